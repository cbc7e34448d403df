"""Attacks on fairness, in small: the scenes of benchmarks/adversarial.py reach all goals."""

import pytest
import redis
from helpers.state import check_consistency

from benchmarks.adversarial import SCENES, FlatTrial, Ideal, Trial, play

SIZE = 0.06
# Those with many users are still smaller.
SIZES = {"one tenant with 1,000 users, one with 1": 0.02, "100,000 users of 1,000 tenants": 0.01}


@pytest.mark.parametrize("name", SCENES)
def test_an_attack_takes_nothing_from_others(
    redis_client: redis.Redis, redis_url: str, name: str
) -> None:
    assert play(name, redis_url, SIZES.get(name, SIZE)).missed() == []
    check_consistency(redis_client)


def test_a_scene_has_the_same_outcome_each_time(redis_client: redis.Redis, redis_url: str) -> None:
    name = "weights and tenants changed under load"
    first = play(name, redis_url, SIZE)
    redis_client.flushall()
    assert play(name, redis_url, SIZE) == first


def test_without_tenants_a_crowd_gets_nearly_everything(
    redis_client: redis.Redis, redis_url: str
) -> None:
    name = "one tenant with 1,000 users, one with 1"
    trial = FlatTrial(redis_url, SIZES[name])
    with trial.queue:
        SCENES[name](trial)
    found = trial.outcome()
    assert found.share < 0.2
    assert found.tenants < 0.5


# --- the account itself ---------------------------------------------------------------------------


def test_an_ideal_server_divides_by_weight_and_passes_on_what_is_not_needed() -> None:
    ideal = Ideal()
    ideal.set_weight("b", 3.0)
    ideal.add("a", 100)
    ideal.add("b", 30)
    ideal.serve(20)
    assert (ideal.received("a"), ideal.received("b")) == (5, 15)
    ideal.set_weight("b", 1.0)
    ideal.serve(40)  # b needs only 15 more
    assert (ideal.received("a"), ideal.received("b")) == (30, 30)
    ideal.serve(10)
    ideal.add("b", 50)
    ideal.serve(20)
    assert (ideal.received("a"), ideal.received("b")) == (50, 40)
    ideal.add("a", -50)
    ideal.serve(10)
    assert (ideal.received("a"), ideal.received("b")) == (50, 50)


def test_the_account_notices_an_unfair_order(redis_client: redis.Redis, redis_url: str) -> None:
    trial = Trial(redis_url, 1.0)
    with trial.queue as queue:
        for n in range(9):
            trial.push("crowd", f"user-{n}", 20)
        trial.push("lone", "ann", 20)
        trial.push_quiet("quiet")
        queue.set_tenant("crowd", weight=9.0)  # which the account is not told
        trial.serve(60)
    missed = trial.outcome().missed()
    assert [goal.partition(" ")[0] for goal in missed] == ["Jain", "worst", "wait"]
