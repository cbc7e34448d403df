"""Fairness over partitions: the scenes of benchmarks/partitions.py reach their goals, in small."""

import pytest
import redis

from benchmarks.partitions import SCENES, play

# The error is about as many tasks as a claim takes, whatever the size: small scenes, small claims.
SIZE, CLIENTS, LIMITS = 0.05, 3, (1, 2, 4)


@pytest.mark.parametrize("name", SCENES)
def test_an_attack_on_a_queue_of_four_partitions_takes_nothing_from_others(
    redis_client: redis.Redis, redis_url: str, name: str
) -> None:
    assert play(name, redis_url, 4, SIZE, CLIENTS, LIMITS).missed() == []


@pytest.mark.parametrize("name", ["even tenants", "half of the tenants in one partition"])
def test_sixteen_partitions_are_fair_as_a_whole(
    redis_client: redis.Redis, redis_url: str, name: str
) -> None:
    assert play(name, redis_url, 16, SIZE, CLIENTS, LIMITS).missed() == []
