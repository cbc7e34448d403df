"""Settings of a queue with partitions: all have them, also those that missed a change."""

from collections.abc import Callable, Iterator

import pytest
import redis
from helpers.partitions import without
from helpers.tasks import make_task
from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock
from fairqueue.errors import ConfigurationError, RedisUnavailable
from fairqueue.link.operation import Operation
from fairqueue.link.partitions import partition_of
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler

PARTITIONS = 4


@pytest.fixture
def many(redis_client: redis.Redis, clock: ManualClock) -> Iterator[TaskQueue]:
    with TaskQueue(redis_client, clock=clock, partitions=PARTITIONS) as queue:
        yield queue


CHANGES: dict[str, Callable[[TaskQueue], object]] = {
    "configure": lambda queue: queue.configure(max_attempts=9),
    "set_limits": lambda queue: queue.set_limits("mail", slots=3),
    "set_limit": lambda queue: queue.set_limit("account:*", slots=1, scope="tenant"),
}


def seen_by(queue: TaskQueue, number: int) -> tuple[object, ...]:
    """What a partition has."""
    twin: TaskQueue = queue.at(queue.link.parts[number])
    return twin.settings(), twin.get_limits(), twin.get_key_limits()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_reaches_all_partitions(
    many: TaskQueue, change: Callable[[TaskQueue], object]
) -> None:
    before = seen_by(many, 0)
    change(many)
    seen = [seen_by(many, number) for number in range(PARTITIONS)]
    assert seen[0] != before
    assert all(each == seen[0] for each in seen)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_partition_that_missed_a_change_catches_up(
    many: TaskQueue, change: Callable[[TaskQueue], object]
) -> None:
    many.check()
    with without(many, 2):
        change(many)
        assert many.catch_up() is False
    assert seen_by(many, 2) != seen_by(many, 0)
    assert seen_by(many, 3) == seen_by(many, 0)
    assert many.catch_up() is True
    assert seen_by(many, 2) == seen_by(many, 0)


def test_a_removed_limit_is_removed_where_it_was_missed(many: TaskQueue) -> None:
    many.set_limits("mail", slots=3)
    with without(many, 1):
        many.set_limits("mail")
    many.catch_up()
    assert seen_by(many, 1)[1] == {}


def test_a_change_without_the_home_is_not_made(many: TaskQueue) -> None:
    many.check()
    with without(many, 0), pytest.raises(RedisUnavailable):
        many.configure(max_attempts=9)
    assert seen_by(many, 1) == seen_by(many, 0)


def test_two_changes_at_once_are_compared_afterwards(many: TaskQueue) -> None:
    """Partitions may have got them in another order than the home."""
    home = many.at(many.link.parts[0])
    many.link.perform(home._mark("one", ""))
    many.link.perform(home._mark("two", ""))
    many.at(many.link.parts[0]).configure(max_attempts=8)
    many.at(many.link.parts[1]).configure(max_attempts=7)
    assert many.link.perform(home._mark("", "one")) is False
    assert many.catch_up() is True
    assert seen_by(many, 1) == seen_by(many, 0)


def test_ageing_is_refused_while_any_partition_has_tasks(many: TaskQueue) -> None:
    many.push_many([make_task(f"u{i}") for i in range(3)])
    with pytest.raises(ConfigurationError, match="ageing 10 can be set only while no task is"):
        many.configure(ageing=10)
    assert all(seen_by(many, number)[0] == many.settings() for number in range(PARTITIONS))


def test_a_partition_that_refused_a_change_catches_up(
    many: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task may come between the question whether there are any and the change."""

    def nothing(_: TaskQueue) -> Operation[bool]:
        yield from ()
        return False

    names = (f"user-{i}" for i in range(100))
    many.push(make_task(next(each for each in names if partition_of(each, None, PARTITIONS) == 1)))
    with monkeypatch.context() as patch:
        patch.setattr(TaskQueue, "_has_tasks", nothing)
        many.configure(ageing=60.0)
    assert seen_by(many, 1) != seen_by(many, 0)
    assert many.catch_up() is False
    (claim,) = many.claim("w")
    many.finish(claim)
    assert many.catch_up() is True
    assert seen_by(many, 1) == seen_by(many, 0)


def test_the_leader_of_the_home_lets_partitions_catch_up(
    many: TaskQueue, clock: ManualClock
) -> None:
    scheduler = TaskScheduler(many, registry=CollectorRegistry())
    scheduler.tick()
    with without(many, 2):
        many.configure(max_attempts=9)
    clock.advance(11)
    scheduler.tick()
    assert seen_by(many, 2) == seen_by(many, 0)
