"""No user starves another: who is served next, told by the order of claims on a real server."""

import random
from collections import Counter, deque
from collections.abc import Callable
from itertools import groupby

import pytest
import redis
from support import (
    changes,
    claim_one,
    count_commands,
    dump,
    fill,
    ids_of,
    jain,
    push,
    served_users,
)

from fairqueue.clock import ManualClock
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.snapshot import jain_index
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.validation import Priority

OwnServer = Callable[..., EmbeddedServer]


def longest_run(users: list[str]) -> int:
    """How often in a row one user was served at most."""
    return max(len(list(group)) for _, group in groupby(users))


# --- turns ----------------------------------------------------------------------------------------


def test_equal_users_take_turns(queue: TaskQueue) -> None:
    for user in ("alice", "bob", "carol"):
        fill(queue, user, 20)
    users = served_users(queue, 60)
    for start in range(0, 60, 3):
        assert set(users[start : start + 3]) == {"alice", "bob", "carol"}


def mixed_backlog(queue: TaskQueue, seed: int) -> None:
    """Twelve users of several weights and caps, with tasks of several levels, some critical."""
    rng = random.Random(seed)
    queue.configure(critical_share=rng.choice([0.0, 0.2, 0.5, 1.0]))
    for n in range(12):
        weight = rng.choice([0.5, 1.0, 2.0, 3.0])
        queue.set_user(f"u{n}", weight=weight, max_running=rng.choice([None, None, 40]))
        for k in range(rng.randint(1, 15)):
            level = rng.choice([1, 3, 3, 3, 5, 6])
            push(queue, f"u{n}-{k}", user_id=f"u{n}", priority=level)


def order_of_serves(queue: TaskQueue, limit: int) -> list[str]:
    order: list[str] = []
    while claims := queue.claim("w", limit=limit):
        order += ids_of(claims)
    return order


@pytest.mark.parametrize("limit", [2, 7, 30, 200])
@pytest.mark.parametrize("seed", range(4))
def test_turns_do_not_depend_on_how_many_are_claimed_at_once(
    queue: TaskQueue, redis_client: redis.Redis, limit: int, seed: int
) -> None:
    """Claims of any size follow each other as claims of one do."""
    mixed_backlog(queue, seed)
    together = order_of_serves(queue, limit)
    redis_client.flushdb()
    mixed_backlog(queue, seed)
    assert together == order_of_serves(queue, 1)
    assert len(together) == len(set(together))


def test_a_light_user_does_not_wait_for_a_heavy_ones_backlog(queue: TaskQueue) -> None:
    fill(queue, "heavy", 1000)
    served_users(queue, 100)
    push(queue, "l1", user_id="light")
    assert "light" in served_users(queue, 3)


def test_priority_does_not_overtake_other_users(queue: TaskQueue) -> None:
    fill(queue, "pushy", 10, priority=Priority.VERY_HIGH)
    fill(queue, "modest", 10, priority=Priority.VERY_LOW)
    assert longest_run(served_users(queue, 20)) <= 2


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heavy", "light"), [(2.0, 1.0), (1.0, 0.5), (10.0, 1.0), (3.0, 1.5)])
def test_users_are_served_by_their_weights(queue: TaskQueue, heavy: float, light: float) -> None:
    queue.set_user("heavy", weight=heavy)
    queue.set_user("light", weight=light)
    fill(queue, "heavy", 300)
    fill(queue, "light", 300)
    counts = Counter(served_users(queue, 220))
    assert counts["heavy"] == pytest.approx(220 * heavy / (heavy + light), abs=2)


def test_a_new_weight_acts_on_what_already_waits(queue: TaskQueue) -> None:
    fill(queue, "alice", 300)
    fill(queue, "bob", 300)
    before = Counter(served_users(queue, 60))
    assert before == {"alice": 30, "bob": 30}
    queue.set_user("alice", weight=2.0)
    after = Counter(served_users(queue, 90))
    assert after["alice"] == pytest.approx(60, abs=2)


def test_a_raised_weight_rescales_the_debt(queue: TaskQueue, redis_client: redis.Redis) -> None:
    """Raised from 0.01 to 10, a user would otherwise wait out a hundred serves of old debt."""
    queue.set_user("slow", weight=0.01)
    fill(queue, "slow", 50)
    fill(queue, "other", 300)
    while "slow" not in served_users(queue, 1):
        pass
    tag = dump(redis_client)["ready"]["slow"]
    queue.set_user("slow", weight=10.0)
    state = dump(redis_client)
    now = float(state["fair"]["clock"])
    assert state["ready"]["slow"] == pytest.approx(now + (tag - now) / 1000)
    assert "slow" in served_users(queue, 3)


@pytest.mark.parametrize("where", ["ready", "idle", "parked"])
def test_a_weight_rescales_the_tag_wherever_it_is(
    queue: TaskQueue, redis_client: redis.Redis, where: str
) -> None:
    fill(queue, "other", 10)
    fill(queue, "alice", 1 if where == "idle" else 5)
    queue.set_user("alice", weight=0.1)
    while "alice" not in served_users(queue, 1, finish=False):
        pass
    if where == "parked":
        queue.set_user("alice", paused=True)
    key = "ready" if where == "ready" else "idle"
    before = dump(redis_client)
    now = float(before["fair"]["clock"])
    queue.set_user("alice", weight=0.2)
    tag, new = changes(before, dump(redis_client))[f"{key}.alice"]
    assert tag - now > 1
    assert new - now == pytest.approx((tag - now) / 2)


# --- coming and going -----------------------------------------------------------------------------


def test_a_newcomer_enters_one_stride_after_the_clock(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    fill(queue, "old", 10)
    served_users(queue, 4)
    clock = float(dump(redis_client)["fair"]["clock"])
    push(queue, "n1", user_id="new")
    assert dump(redis_client)["ready"]["new"] == clock + 1
    queue.set_user("weighty", weight=4.0)
    push(queue, "n2", user_id="weighty")
    assert dump(redis_client)["ready"]["weighty"] == clock + 0.25


def test_a_stream_of_newcomers_does_not_starve_a_backlogged_user(queue: TaskQueue) -> None:
    """Entering at the clock instead, they would leave the old one a serve or two."""
    fill(queue, "old", 400)
    served = 0
    for n in range(400):
        push(queue, f"n{n}", user_id=f"new-{n}")
        served += served_users(queue, 1).count("old")
    assert served >= 20


def test_a_user_who_comes_back_pays_what_is_left_of_the_turn(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    fill(queue, "old", 10)
    push(queue, "a1", user_id="alice")
    while "alice" not in served_users(queue, 1):
        pass
    tag = dump(redis_client)["idle"]["alice"]
    push(queue, "a2", user_id="alice")
    state = dump(redis_client)
    assert state["ready"]["alice"] == tag
    assert "alice" not in state.get("idle", {})


def test_leaving_and_coming_back_gains_nothing(queue: TaskQueue) -> None:
    """A user with one task at a time gets no more than one who is always backlogged."""
    fill(queue, "steady", 300)
    served = Counter[str]()
    push(queue, "i-0", user_id="in and out")
    for n in range(1, 200):
        users = served_users(queue, 1)
        served.update(users)
        if users == ["in and out"]:
            push(queue, f"i-{n}", user_id="in and out")
    assert served["in and out"] <= served["steady"] + 1
    assert served["in and out"] >= 90


def test_tags_that_the_clock_has_passed_are_reaped(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    for n in range(200):
        push(queue, f"t{n}", user_id=f"u{n}")
    fill(queue, "steady", 200)
    served_users(queue, 250)
    assert len(dump(redis_client).get("idle", {})) <= 2
    served_users(queue, 200)
    push(queue, "last")
    state = dump(redis_client)
    assert "idle" not in state
    assert state["ready"].keys() == {"alice"}


def test_an_empty_queue_forgets_the_past(queue: TaskQueue, redis_client: redis.Redis) -> None:
    fill(queue, "busy", 50)
    served_users(queue, 50)
    push(queue, "b", user_id="busy")
    push(queue, "n", user_id="new")
    assert sorted(served_users(queue, 2)) == ["busy", "new"]
    ready = dump(redis_client)
    assert "ready" not in ready


# --- release --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 5])
def test_release_restores_the_charge(
    queue: TaskQueue, redis_client: redis.Redis, tasks: int
) -> None:
    queue.set_user("alice", weight=0.5)
    fill(queue, "alice", tasks)
    fill(queue, "bob", 5)
    order = []
    for _ in range(4):
        claim = claim_one(queue)
        order.append(claim.task.task_id)
        queue.release(claim)
    # Given back untouched, it is offered again and again: nobody paid, nobody lost a turn.
    assert len(set(order)) == 1
    assert claim_one(queue).attempt == 1
    assert "stats" in dump(redis_client)


def test_release_gives_the_place_in_the_users_own_order_back(queue: TaskQueue) -> None:
    fill(queue, "alice", 3)
    push(queue, "high", priority=Priority.HIGH)
    claims = queue.claim("w", limit=3)
    assert ids_of(claims) == ["high", "alice-0", "alice-1"]
    for claim in claims:
        queue.release(claim)
    assert ids_of(queue.claim("w", limit=4)) == ["high", "alice-0", "alice-1", "alice-2"]


# --- limits of a user -----------------------------------------------------------------------------


def test_no_more_run_than_max_running(queue: TaskQueue) -> None:
    queue.set_user("alice", max_running=2)
    fill(queue, "alice", 5)
    fill(queue, "bob", 2)
    claims = queue.claim("w", limit=10)
    assert Counter(claim.task.user_id for claim in claims) == {"alice": 2, "bob": 2}
    assert queue.claim("w", limit=10) == []
    mine = [claim for claim in claims if claim.task.user_id == "alice"]
    queue.finish(mine[0])
    assert ids_of(queue.claim("w", limit=10)) == ["alice-2"]
    queue.retry(mine[1], delay=60)
    assert ids_of(queue.claim("w", limit=10)) == ["alice-3"]
    queue.set_user("alice", max_running=None)
    assert ids_of(queue.claim("w", limit=10)) == ["alice-4"]


def test_a_lowered_cap_acts_at_once(queue: TaskQueue, redis_client: redis.Redis) -> None:
    fill(queue, "alice", 5)
    claims = queue.claim("w", limit=3)
    queue.set_user("alice", max_running=2)
    assert dump(redis_client)["parked"] == {"alice": float("inf")}
    queue.finish(claims[0])
    assert queue.claim("w") == []
    queue.finish(claims[1])
    assert len(queue.claim("w", limit=5)) == 1


def test_an_expired_lease_frees_its_place_under_the_cap(
    queue: TaskQueue, clock: ManualClock
) -> None:
    queue.set_user("alice", max_running=1)
    fill(queue, "alice", 2)
    claim_one(queue, lease=1)
    clock.advance(1)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-0"]


def test_a_paused_user_is_not_served(queue: TaskQueue) -> None:
    fill(queue, "alice", 2)
    fill(queue, "bob", 2)
    queue.set_user("alice", paused=True)
    push(queue, "a9")
    assert served_users(queue, 5) == ["bob", "bob"]
    queue.set_user("alice", paused=False)
    assert served_users(queue, 5) == ["alice"] * 3


def test_un_parking_is_no_new_arrival(queue: TaskQueue, redis_client: redis.Redis) -> None:
    fill(queue, "alice", 5)
    fill(queue, "bob", 20)
    served_users(queue, 4)
    queue.set_user("alice", paused=True)
    served_users(queue, 6)
    queue.set_user("alice", paused=False)
    state = dump(redis_client)
    assert state["ready"]["alice"] == float(state["fair"]["clock"])
    assert served_users(queue, 2).count("alice") >= 1


@pytest.mark.parametrize(("rate", "at_once"), [(1.0, 1), (10.0, 1), (0.5, 1), (50.0, 5)])
def test_a_rate_is_kept(queue: TaskQueue, clock: ManualClock, rate: float, at_once: int) -> None:
    queue.set_user("alice", rate=rate)
    fill(queue, "alice", 40)
    assert len(queue.claim("w", limit=40)) == at_once
    assert queue.claim("w", limit=40) == []
    seconds = 20 / rate
    served = 0
    for _ in range(200):
        clock.advance(seconds / 200)
        served += len(queue.claim("w", limit=40))
    assert served == pytest.approx(20, abs=1)


def served_in(queue: TaskQueue, clock: ManualClock, seconds: float) -> int:
    """How many tasks are claimed in so many seconds, by a hundred claims."""
    served = 0
    for _ in range(100):
        clock.advance(seconds / 100)
        served += len(queue.claim("w", limit=250))
    return served


def test_a_raised_rate_acts_at_once(queue: TaskQueue, clock: ManualClock) -> None:
    queue.set_user("alice", rate=0.001)
    fill(queue, "alice", 400)
    assert len(queue.claim("w", limit=40)) == 1
    assert queue.claim("w", limit=40) == []
    queue.set_user("alice", rate=10.0)
    assert served_in(queue, clock, 10) == pytest.approx(100, abs=1)


@pytest.mark.parametrize("back", [3.0, 3600.0])
def test_a_clock_that_is_set_back_does_not_hold_up_a_rate(
    queue: TaskQueue, clock: ManualClock, back: float
) -> None:
    """Nobody waits for longer than the rate itself makes them, whoever else waits for longer."""
    queue.set_user("slow", rate=0.002)
    fill(queue, "slow", 2)
    for n in range(120):
        queue.set_user(f"u{n}", rate=10.0)
        fill(queue, f"u{n}", 50)
    queue.claim("w", limit=200)
    assert queue.claim("w") == []
    clock.advance(-back)
    for _ in range(3):
        queue.claim("w", limit=1000)
    clock.advance(0.1)
    assert len([*queue.claim("w", limit=200), *queue.claim("w", limit=200)]) == 120
    assert served_in(queue, clock, 2) == pytest.approx(2400, rel=0.02)


def test_a_user_within_the_rate_is_not_held_back(queue: TaskQueue, clock: ManualClock) -> None:
    queue.set_user("alice", rate=1.0)
    for n in range(5):
        push(queue, f"t{n}")
        assert ids_of(queue.claim("w")) == [f"t{n}"]
        clock.advance(1)


def test_what_a_claim_costs_does_not_depend_on_parked_users(own_server: OwnServer) -> None:
    """Counted in commands: those who may not be served are not even looked at."""

    def cost(parked: int) -> Counter[str]:
        with redis.Redis.from_url(own_server().url) as client, TaskQueue(client) as queue:
            for n in range(parked):
                if n % 3 == 0:
                    queue.set_user(f"u{n}", paused=True)
                elif n % 3 == 1:
                    queue.set_user(f"u{n}", max_running=1)
                else:
                    queue.set_user(f"u{n}", rate=0.001)
                push(queue, f"t{n}a", f"t{n}b", user_id=f"u{n}")
            queue.claim("w", limit=1000, lease=10_000)
            assert queue.inspect().parked_users == parked
            fill(queue, "alice", 60)
            served_users(queue, 50)  # until the tags of those who were served are reaped
            before = count_commands(client)
            for _ in range(5):
                claim_one(queue)
            after = count_commands(client)
            after.subtract(before)
            return Counter({name: n for name, n in after.items() if n and name != "info"})

    assert cost(300) == cost(3)


# --- cost by time ---------------------------------------------------------------------------------


def test_with_cost_by_time_users_share_the_time_of_workers(
    queue: TaskQueue, clock: ManualClock
) -> None:
    """Slow tasks of ten seconds against quick ones of one: ten quick ones for each slow one."""
    queue.configure(cost="time")
    fill(queue, "slow", 100)
    fill(queue, "quick", 400)
    seconds = {"slow": 10, "quick": 1}
    used = Counter[str]()
    for _ in range(220):
        claim = claim_one(queue, lease=100)
        user = claim.task.user_id
        clock.advance(seconds[user])
        used[user] += seconds[user]
        queue.finish(claim)
    assert used["slow"] == pytest.approx(used["quick"], rel=0.15)


def test_with_cost_by_tasks_time_does_not_count(queue: TaskQueue, clock: ManualClock) -> None:
    fill(queue, "slow", 50)
    fill(queue, "quick", 50)
    served = Counter[str]()
    for _ in range(40):
        claim = claim_one(queue, lease=100)
        served[claim.task.user_id] += 1
        clock.advance(10 if claim.task.user_id == "slow" else 1)
        queue.finish(claim)
    assert served == {"slow": 20, "quick": 20}


def test_an_expired_lease_pays_for_the_time_that_it_held(
    queue: TaskQueue, clock: ManualClock, redis_client: redis.Redis
) -> None:
    queue.configure(cost="time", max_attempts=1)
    fill(queue, "crashing", 10)
    fill(queue, "working", 100)
    used = Counter[str]()
    for _ in range(60):
        claim = claim_one(queue, lease=5)
        if claim.task.user_id == "crashing":
            clock.advance(5)
            used["crashing"] += 5
        else:
            clock.advance(1)
            used["working"] += 1
            queue.finish(claim)
    assert used["crashing"] <= used["working"] * 1.5
    assert "usage" in dump(redis_client)


def test_what_a_users_tasks_take_is_forgotten_with_the_users_tag(
    queue: TaskQueue, clock: ManualClock, redis_client: redis.Redis
) -> None:
    queue.configure(cost="time")
    push(queue, "once", user_id="visitor")
    fill(queue, "regular", 20)
    for _ in range(20):
        claim = claim_one(queue)
        clock.advance(1)
        queue.finish(claim)
    state = dump(redis_client)
    assert "visitor" not in state.get("idle", {})
    assert state["usage"].keys() == {"regular"}


# --- priorities of a user's own tasks -------------------------------------------------------------


def test_six_priorities_are_strict_within_a_user(queue: TaskQueue) -> None:
    levels = [3, 1, 6, 2, 5, 4] * 3
    for n, level in enumerate(levels):
        push(queue, f"{level}-{n:02}", priority=level)
    got = ids_of(queue.claim("w", limit=18))
    assert got == sorted(got, key=lambda task_id: (-int(task_id[0]), task_id))


def test_without_ageing_waiting_does_not_outweigh_a_level(
    queue: TaskQueue, clock: ManualClock
) -> None:
    push(queue, "low", priority=Priority.LOW)
    clock.advance(100_000)
    push(queue, "normal", priority=Priority.NORMAL)
    assert ids_of(queue.claim("w", limit=2)) == ["normal", "low"]


@pytest.mark.parametrize(("waited", "first"), [(59, "high"), (61, "normal")])
def test_with_ageing_waiting_outweighs_a_level(
    queue: TaskQueue, clock: ManualClock, waited: float, first: str
) -> None:
    queue.configure(ageing=60)
    push(queue, "normal", priority=Priority.NORMAL)
    clock.advance(waited)
    push(queue, "high", priority=Priority.HIGH)
    assert claim_one(queue).task.task_id == first


def test_with_ageing_critical_still_goes_first(queue: TaskQueue, clock: ManualClock) -> None:
    queue.configure(ageing=1)
    push(queue, "old", priority=Priority.VERY_HIGH)
    clock.advance(100_000)
    push(queue, "critical", priority=Priority.CRITICAL)
    assert ids_of(queue.claim("w", limit=2)) == ["critical", "old"]


def test_with_ageing_a_steady_stream_does_not_starve_the_lowest(
    queue: TaskQueue, clock: ManualClock
) -> None:
    queue.configure(ageing=10)
    push(queue, "lowest", priority=Priority.VERY_LOW)
    got = []
    for n in range(60):
        push(queue, f"t{n}", priority=Priority.VERY_HIGH)
        claim = claim_one(queue)
        got.append(claim.task.task_id)
        queue.finish(claim)
        clock.advance(1)
    assert got.index("lowest") <= 42


# --- CRITICAL -------------------------------------------------------------------------------------


def test_critical_goes_ahead_of_other_users(queue: TaskQueue) -> None:
    fill(queue, "alice", 50)
    fill(queue, "bob", 50)
    served_users(queue, 10)
    push(queue, "c1", user_id="carol", priority=Priority.CRITICAL)
    push(queue, "n1", user_id="carol")
    claim = claim_one(queue)
    assert claim.task.task_id == "c1"
    assert "carol" not in {c.task.user_id for c in queue.claim("w", limit=2)}


def test_the_critical_lane_is_fair_inside(queue: TaskQueue) -> None:
    queue.configure(critical_share=1.0)
    for user in ("alice", "bob", "carol"):
        fill(queue, user, 20, priority=Priority.CRITICAL)
    fill(queue, "dave", 20)
    users = served_users(queue, 60)
    assert "dave" not in users
    assert Counter(users) == {"alice": 20, "bob": 20, "carol": 20}
    assert longest_run(users) <= 2


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.8])
def test_the_critical_lane_is_bounded_by_its_share(queue: TaskQueue, share: float) -> None:
    """Beyond a credit of ten, and the one turn in eleven that the pushy user has anyway."""
    queue.configure(critical_share=share)
    fill(queue, "pushy", 400, priority=Priority.CRITICAL)
    for n in range(10):
        fill(queue, f"u{n}", 60)
    pushy = served_users(queue, 300).count("pushy")
    assert pushy <= 10 + share * 300 + 300 / 11
    assert pushy >= share * 300 - 5


@pytest.mark.parametrize("share", [0.9, 0.95, 0.99])
def test_a_large_share_of_the_lane_is_reached(queue: TaskQueue, share: float) -> None:
    """Both lanes are backlogged; the ordinary turns are not taken by those in the lane."""
    queue.configure(critical_share=share)
    backlog = [("pushy", Priority.CRITICAL)] * 2500 + [("other", Priority.NORMAL)] * 400
    queue.push_many(Task.create(user_id=user, priority=level) for user, level in backlog)
    served = [c.task.user_id for _ in range(20) for c in queue.claim("w", limit=120)]
    assert served.count("pushy") / len(served) == pytest.approx(share, abs=0.005)
    assert longest_run(served[200:]) <= share / (1 - share) + 1


def test_a_lowered_share_takes_the_credit_away(queue: TaskQueue) -> None:
    queue.configure(critical_share=0.99)
    fill(queue, "other", 200)
    served_users(queue, 20)
    fill(queue, "pushy", 100, priority=Priority.CRITICAL)
    served_users(queue, 12)  # that the credit is counted
    queue.finish_many((claim, None) for claim in queue.claim("w", limit=1))
    queue.configure(critical_share=0.5)
    assert served_users(queue, 40).count("pushy") <= 26


def test_without_a_share_there_is_no_lane(queue: TaskQueue) -> None:
    queue.configure(critical_share=0.0)
    fill(queue, "pushy", 20, priority=Priority.CRITICAL)
    fill(queue, "other", 20)
    assert Counter(served_users(queue, 20)) == {"pushy": 10, "other": 10}


def test_a_new_weight_acts_on_the_place_in_the_critical_lane(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    queue.configure(critical_share=1.0)
    queue.set_user("heavy", weight=0.1)
    fill(queue, "heavy", 9, priority=Priority.CRITICAL)
    served_users(queue, 2)
    clock, tag = lane_of(redis_client, "heavy")
    assert tag - clock == pytest.approx(10)
    queue.set_user("heavy", weight=2.0)
    assert lane_of(redis_client, "heavy") == pytest.approx((clock, clock + 0.5))
    # Whoever is not ahead of the clock has no debt that a new weight could change.
    redis_client.zadd(queue.keys["critical"], {"heavy": clock - 3})
    queue.set_user("heavy", weight=1.0)
    assert lane_of(redis_client, "heavy") == (clock, clock - 3)


def lane_of(client: redis.Redis, user: str) -> tuple[float, float]:
    """The clock of the CRITICAL lane, and the user's tag there."""
    state = dump(client)
    return float(state["fair"]["critical_clock"]), state["critical"][user]


def test_critical_serves_are_charged_to_the_ordinary_turn(queue: TaskQueue) -> None:
    """Who went ahead with critical tasks waits longer with the others."""
    fill(queue, "pushy", 5, priority=Priority.CRITICAL)
    push(queue, *(f"p{n}" for n in range(20)), user_id="pushy")
    fill(queue, "other", 20)
    users = served_users(queue, 20)
    assert users[:5] == ["pushy"] * 5
    assert users[5:10].count("other") >= 4
    assert users.count("other") == pytest.approx(10, abs=1)


def test_a_user_leaves_the_lane_with_the_last_critical_task(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    push(queue, "c1", "c2", user_id="carol", priority=Priority.CRITICAL)
    push(queue, "n1", user_id="carol")
    fill(queue, "alice", 3)
    claim_one(queue)
    assert dump(redis_client)["critical"].keys() == {"carol"}
    queue.cancel("c2")
    assert "critical" not in dump(redis_client)
    assert claim_one(queue).task.user_id == "alice"


def test_a_paused_user_has_no_lane(queue: TaskQueue, redis_client: redis.Redis) -> None:
    push(queue, "c1", user_id="carol", priority=Priority.CRITICAL)
    push(queue, "a1", user_id="alice")
    queue.set_user("carol", paused=True)
    assert "critical" not in dump(redis_client)
    assert ids_of(queue.claim("w", limit=5)) == ["a1"]
    queue.set_user("carol", paused=False)
    assert ids_of(queue.claim("w", limit=5)) == ["c1"]


# --- measured -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amounts", "index"),
    [([1.0, 1.0, 1.0], 1.0), ([1.0, 0.0], 0.5), ([4.0, 2.0], 0.9), ([], None), ([0.0], None)],
)
def test_the_jain_index(amounts: list[float], index: float | None) -> None:
    assert jain_index(amounts) == (None if index is None else pytest.approx(index))


def test_the_snapshot_tells_how_fair_the_last_window_was(
    queue: TaskQueue, clock: ManualClock
) -> None:
    assert queue.inspect().jain_index is None
    queue.set_user("b", weight=2.0)
    for user in ("a", "b", "c"):
        fill(queue, user, 200)
    for _ in range(3):
        clock.advance(10.001)
        served_users(queue, 40)
    index = queue.inspect().jain_index
    assert index is not None
    assert index >= 0.99


def test_one_large_backlog_and_a_hundred_quiet_users(queue: TaskQueue) -> None:
    """The promise: who asks for little waits for little, whatever the others have queued.

    `heavy` has 3,000 tasks waiting. A hundred users arrive later, with ten tasks each, one pushed
    when the one before is done. Waits are counted in claims.
    """
    fill(queue, "heavy", 3000)
    served_users(queue, 50)
    quiet = [f"quiet-{n:03}" for n in range(100)]
    left = dict.fromkeys(quiet, 10)
    pushed_at: dict[str, int] = {}
    waits: list[int] = []
    arrivals = deque(quiet)
    heavy = 0
    for now in range(2500):
        if arrivals and now % 3 == 0:
            user = arrivals.popleft()
            push(queue, f"{user}-0", user_id=user)
            pushed_at[user] = now
        claim = claim_one(queue)
        queue.finish(claim)
        user = claim.task.user_id
        if user == "heavy":
            heavy += 1
            continue
        waits.append(now - pushed_at.pop(user))
        left[user] -= 1
        if left[user]:
            push(queue, f"{user}-{10 - left[user]}", user_id=user)
            pushed_at[user] = now
    assert set(left.values()) == {0}
    active = len(quiet) + 1
    waits.sort()
    assert len(waits) == 1000
    assert waits[int(len(waits) * 0.99)] <= 2 * active
    assert waits[-1] <= 2 * active + 2
    assert heavy >= 1000


def test_backlogged_users_get_the_same(queue: TaskQueue) -> None:
    fill(queue, "heavy", 2000)
    served_users(queue, 20)
    users = [f"u{n:02}" for n in range(50)]
    for user in users:
        fill(queue, user, 40)
    served = Counter(served_users(queue, 1530))
    amounts = [float(served[user]) for user in [*users, "heavy"]]
    assert jain(amounts) >= 0.99
    assert max(amounts) - min(amounts) <= 2


def test_little_is_remembered_of_users_who_are_gone(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock
) -> None:
    """Neither tags nor averages pile up with the number of users that there ever were."""
    queue.configure(cost="time", keep_finished=0)
    for n in range(300):
        push(queue, f"t{n}", user_id=f"u{n}")
        claim = claim_one(queue)
        clock.advance(1)
        queue.finish(claim)
    fill(queue, "steady", 100)
    for n in range(300, 360):
        push(queue, f"t{n}", user_id=f"u{n}")
        for claim in queue.claim("w", limit=2):
            clock.advance(1)
            queue.finish(claim)
    state = dump(redis_client)
    for key in ("idle", "usage", "throttle", "running", "parked", "users"):
        assert len(state.get(key, {})) <= 70, key
