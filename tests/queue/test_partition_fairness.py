"""Fairness over partitions: the scenes of benchmarks/partitions.py reach their goals, in small."""

import math
import random
from itertools import count

import pytest
import redis

from benchmarks.partitions import SCENES, play
from fairqueue.queue import balance

# The error is about as many tasks as a claim takes, whatever the size: small scenes, small claims.
SIZE, CLIENTS, LIMITS = 0.05, 3, (1, 2, 4)
LEAST_SHARE = 0.88  # some tenants get only thirty tasks


@pytest.fixture(autouse=True)
def _same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chance have a seed, and let clients ask after so many claims, not after a time."""
    seeds, real = count(), random.Random
    monkeypatch.setattr(balance, "ASK_S", math.inf)
    monkeypatch.setattr(
        "fairqueue.queue.balance.random.Random", lambda *seed: real(*(seed or (next(seeds),)))
    )


@pytest.mark.parametrize("name", SCENES)
def test_an_attack_on_a_queue_of_four_partitions_takes_nothing_from_others(
    redis_client: redis.Redis, redis_url: str, name: str
) -> None:
    assert play(name, redis_url, 4, SIZE, CLIENTS, LIMITS).missed(LEAST_SHARE) == []


@pytest.mark.parametrize("name", ["even tenants", "half of the tenants in one partition"])
def test_sixteen_partitions_are_fair_as_a_whole(
    redis_client: redis.Redis, redis_url: str, name: str
) -> None:
    assert play(name, redis_url, 16, SIZE, CLIENTS, LIMITS).missed(LEAST_SHARE) == []
