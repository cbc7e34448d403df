"""Leaders of partitions: spread over schedulers, taken over, given back, and shown."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from helpers.schedules import THURSDAY
from helpers.state import check_consistency
from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock
from fairqueue.errors import RedisUnavailable
from fairqueue.link.connection import Link
from fairqueue.link.operation import Call
from fairqueue.link.partitions import partition_of
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.roster import Member, Shares
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules.service import Schedules

START = THURSDAY
PARTS = 8
TERM = 10.0

Silence = Callable[[TaskScheduler, Sequence[int]], None]


@pytest.fixture
def queue(redis_client: redis.Redis, clock: ManualClock) -> Iterator[TaskQueue]:
    """A queue with eight partitions."""
    with TaskQueue(redis_client, clock=clock, partitions=PARTS) as queue:
        yield queue
    check_consistency(redis_client, partitions=PARTS)


class Schedulers:
    """Schedulers of one queue that tick in turn, and what they led after each tick."""

    def __init__(self, client: redis.Redis, clock: ManualClock, partitions: int = PARTS) -> None:
        self._client = client
        self._clock = clock
        self._partitions = partitions
        self._observer = TaskQueue(client, clock=clock, partitions=partitions)
        self._queues = [self._observer]
        self.history: list[dict[int, str]] = []
        self.alive: list[TaskScheduler] = []

    def add(self, name: str) -> TaskScheduler:
        queue = TaskQueue(self._client, clock=self._clock, partitions=self._partitions)
        self._queues.append(queue)
        scheduler = TaskScheduler(queue, name, lock_timeout=TERM, registry=CollectorRegistry())
        self.alive.append(scheduler)
        return scheduler

    def run(self, seconds: float) -> None:
        """Let all that are alive tick each second."""
        for _ in range(round(seconds)):
            self._clock.advance(1)
            for scheduler in list(self.alive):
                scheduler.tick()
            self.history.append(self.leaders)

    @property
    def leaders(self) -> dict[int, str]:
        """Who leads each partition."""
        found = self._observer.inspect().leaders
        return {number: name for number, name in found.items() if name is not None}

    @property
    def counts(self) -> list[int]:
        """How many partitions each scheduler leads, in order."""
        return sorted(Counter(self.leaders.values()).values())

    @property
    def changes(self) -> int:
        """How often a partition got another leader."""
        last: dict[int, str] = {}
        changes = 0
        for leaders in self.history:
            changes += sum(last.get(number, name) != name for number, name in leaders.items())
            last |= leaders
        return changes

    def close(self) -> None:
        for queue in self._queues:
            queue.close()


@pytest.fixture
def schedulers(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock
) -> Iterator[Schedulers]:
    schedulers = Schedulers(redis_client, clock)
    yield schedulers
    schedulers.close()


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Silence]:
    """Let some partitions not answer a scheduler; none to let all answer again."""
    monkeypatch.setattr("fairqueue.scheduler.post.FIRST_PAUSE_S", 1e-9)
    monkeypatch.setattr("fairqueue.scheduler.post.LONGEST_PAUSE_S", 1e-9)
    with TaskQueue.from_url(f"unix://{tmp_path}/nobody") as dead:

        def silence(scheduler: TaskScheduler, partitions: Sequence[int]) -> None:
            for part in scheduler.link.parts:
                is_silent = part.keys.partition in partitions
                part.connections = (dead if is_silent else scheduler).link.connections

        yield silence


def user_in(number: int) -> str:
    """A user of a partition."""
    users = (f"user{n}" for n in range(1000))
    return next(each for each in users if partition_of(each, None, PARTS) == number)


def add_everywhere(queue: TaskQueue, **rule: Any) -> None:
    """Add a schedule to each partition, with its number as id."""
    specs = [{"user_id": user_in(n), "schedule_id": str(n), **rule} for n in range(PARTS)]
    Schedules(queue).add_schedules(specs)


def fired(queue: TaskQueue, client: redis.Redis) -> list[tuple[str, datetime]]:
    """The fire times of all tasks that are stored, by schedule."""
    found = []
    for part in queue.link.parts:
        for name in client.hkeys(part.keys["tasks"]):
            schedule_id, ms = cast(bytes, name).decode().split(":")
            found.append((schedule_id, datetime.fromtimestamp(int(ms) / 1000, START.tzinfo)))
    return sorted(found)


# --- spreading ------------------------------------------------------------------------------------


def test_one_scheduler_leads_all_partitions_at_once(schedulers: Schedulers) -> None:
    one = schedulers.add("one")
    assert one.tick().is_leader
    assert one.leads == tuple(range(PARTS))
    health = one.health()
    assert health.is_leader
    assert health.leader == "one"
    assert health.leaders == dict.fromkeys(range(PARTS), "one")
    assert one.stop()
    assert one.leads == ()
    assert one.health().leaders == dict.fromkeys(range(PARTS))


def test_partitions_are_shared_evenly_when_schedulers_join_and_leave(
    schedulers: Schedulers,
) -> None:
    schedulers.add("one")
    schedulers.run(3)
    schedulers.add("two")
    schedulers.run(TERM - 2)
    assert schedulers.counts == [8]  # it may go as it came
    schedulers.run(5)
    assert schedulers.counts == [4, 4]
    schedulers.add("three")
    schedulers.run(TERM + 3)
    assert schedulers.counts == [2, 3, 3]
    assert schedulers.changes == 4 + 2
    schedulers.alive.pop(1).stop()
    schedulers.run(2)
    assert schedulers.counts == [4, 4]
    assert schedulers.changes == 4 + 2 + 3
    schedulers.run(60)
    assert schedulers.changes == 4 + 2 + 3
    assert all(len(leaders) == PARTS for leaders in schedulers.history[5:-65])


def test_how_many_partitions_a_scheduler_leads_is_a_metric(queue: TaskQueue) -> None:
    registry = CollectorRegistry()
    scheduler = TaskScheduler(queue, "one", registry=registry)

    def led() -> float | None:
        return registry.get_sample_value(
            "fairqueue_scheduler_partitions_led", {"queue": "default", "scheduler": "one"}
        )

    assert led() == 0
    scheduler.tick()
    assert led() == PARTS
    scheduler.stop()
    assert led() == 0


def test_schedulers_that_start_together_share_evenly(schedulers: Schedulers) -> None:
    for name in ("one", "two", "three", "four", "five"):
        schedulers.add(name)
    schedulers.run(TERM + 5)
    assert schedulers.counts == [1, 1, 2, 2, 2]


def test_of_more_schedulers_than_partitions_each_leads_one_at_most(
    redis_client: redis.Redis, clock: ManualClock
) -> None:
    schedulers = Schedulers(redis_client, clock, partitions=2)
    for name in ("one", "two", "three"):
        schedulers.add(name)
    schedulers.run(TERM + 5)
    assert schedulers.counts == [1, 1]
    schedulers.close()


def test_the_partitions_of_a_scheduler_that_died_are_taken_over_within_its_term(
    schedulers: Schedulers, queue: TaskQueue
) -> None:
    for name in ("one", "two", "three"):
        schedulers.add(name)
    schedulers.run(TERM + 5)
    dead = schedulers.alive.pop()
    orphans = [number for number, name in schedulers.leaders.items() if name == dead.scheduler_id]
    schedulers.run(TERM - 1)
    assert {schedulers.leaders[number] for number in orphans} == {dead.scheduler_id}
    before = schedulers.changes
    schedulers.run(1)
    assert dead.scheduler_id not in schedulers.leaders.values()
    assert schedulers.counts == [4, 4]
    assert schedulers.changes == before + len(orphans)


def test_a_scheduler_that_pauses_briefly_loses_nothing_and_a_longer_pause_moves_each_twice(
    schedulers: Schedulers,
) -> None:
    schedulers.add("one")
    two = schedulers.add("two")
    schedulers.run(TERM + 5)
    before = schedulers.changes
    schedulers.alive.remove(two)
    schedulers.run(TERM - 2)
    schedulers.alive.append(two)
    schedulers.run(20)
    assert schedulers.changes == before
    schedulers.alive.remove(two)
    schedulers.run(TERM + 5)
    assert schedulers.counts == [8]
    schedulers.alive.append(two)
    schedulers.run(TERM - 1)
    assert schedulers.counts == [8]
    schedulers.run(20)
    assert schedulers.counts == [4, 4]
    assert schedulers.changes == before + 8


def test_one_that_comes_and_goes_moves_nothing(schedulers: Schedulers) -> None:
    schedulers.add("one")
    schedulers.run(3)
    for n in range(5):
        schedulers.add(f"visitor{n}")
        schedulers.run(TERM - 3)
        schedulers.alive.pop().stop()
    assert schedulers.changes == 0


# --- firing ---------------------------------------------------------------------------------------


def test_each_fire_time_of_each_partition_is_fired_once_while_leaders_change(
    schedulers: Schedulers, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_everywhere(queue, every=1)
    schedulers.add("one")
    schedulers.run(20)
    schedulers.add("two")
    schedulers.run(15)
    schedulers.alive.pop(0).stop()
    schedulers.run(5)
    schedulers.add("three")
    schedulers.run(15)
    schedulers.alive.pop(0)
    schedulers.run(TERM + 5)
    times = fired(queue, redis_client)
    assert len(times) == len(set(times))
    for number in range(PARTS):
        own = [at for schedule_id, at in times if schedule_id == str(number)]
        gaps = [(after - before).total_seconds() for before, after in pairwise(own)]
        assert own[0] == START + timedelta(seconds=1)
        assert own[-1] >= START + timedelta(seconds=69)
        # One is fired for all that passed while nobody led: at most a term, once.
        assert sorted(gaps)[-3:] <= [2.0, 2.0, TERM + 1]


def test_a_tick_fires_in_all_partitions(
    schedulers: Schedulers, queue: TaskQueue, clock: ManualClock
) -> None:
    one = schedulers.add("one")
    add_everywhere(queue, every=60)
    assert one.tick().wait <= 1.0
    clock.advance(60)
    report = one.tick()
    assert (report.fired, report.set_aside) == (PARTS, 0)


def test_a_partition_that_does_not_answer_stops_no_other(
    schedulers: Schedulers,
    queue: TaskQueue,
    redis_client: redis.Redis,
    silence: Silence,
    caplog: pytest.LogCaptureFixture,
) -> None:
    add_everywhere(queue, every=1)
    one = schedulers.add("one")
    schedulers.run(2)
    silence(one, [0, 5])
    schedulers.run(10)
    assert one.is_leader
    counts = Counter(schedule_id for schedule_id, _ in fired(queue, redis_client))
    assert counts == {str(n): 2 if n in (0, 5) else 12 for n in range(PARTS)}
    assert "partition_failed scheduler=one queue=default partition=5" in caplog.text
    silence(one, [])
    schedulers.run(2)
    assert one.leads == tuple(range(PARTS))
    silence(one, range(PARTS))
    with pytest.raises(RedisUnavailable):
        one.tick()
    assert not one.is_leader


def test_a_partition_that_one_scheduler_cannot_reach_is_taken_by_another(
    schedulers: Schedulers, queue: TaskQueue, silence: Silence
) -> None:
    one = schedulers.add("one")
    schedulers.add("two")
    schedulers.run(TERM + 5)
    own = [number for number, name in schedulers.leaders.items() if name == "one"]
    silence(one, own[-1:])
    schedulers.run(TERM + 1)
    assert schedulers.leaders[own[-1]] == "two"
    schedulers.run(5)
    before = schedulers.changes
    assert schedulers.counts == [4, 4]
    schedulers.run(60)
    assert schedulers.changes == before


def test_without_the_home_partitions_are_led_on_and_taken_over(
    schedulers: Schedulers, silence: Silence
) -> None:
    one, two = schedulers.add("one"), schedulers.add("two")
    schedulers.run(TERM + 5)
    silence(one, [0])
    silence(two, [0])
    schedulers.run(30)
    led = {n: name for n, name in schedulers.leaders.items() if n != 0}
    assert sorted(Counter(led.values()).values()) in ([3, 4], [2, 5])
    schedulers.alive.remove(two)
    schedulers.run(2 * TERM)
    assert schedulers.leaders == dict.fromkeys(range(1, PARTS), "one")


def test_a_schedule_whose_move_was_interrupted_is_not_fired_for_its_old_group(
    schedulers: Schedulers, queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock
) -> None:
    Schedules(queue).add_schedule(every=5, user_id=user_in(0), schedule_id="s")
    # As after the first step of a change of its user: its definition is of another partition.
    Schedules(queue).at(queue.link.parts[0]).update_schedule("s", user_id=user_in(3))
    one = schedulers.add("one")
    schedulers.run(12)
    parts = queue.link.parts
    assert redis_client.hlen(parts[0].keys["tasks"]) == 0
    assert redis_client.hlen(parts[3].keys["tasks"]) == 2
    assert one.get_schedule("s") is not None


@pytest.mark.parametrize("step", ["move_in", "end_move"])
def test_the_leader_ends_a_move_that_was_interrupted(
    schedulers: Schedulers,
    queue: TaskQueue,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    schedules = Schedules(queue)
    schedules.add_schedule(every=5, user_id=user_in(0), schedule_id="s")
    plain = Link.command_of

    def command_of(link: Link, call: Call) -> Any:
        if call.script == step:
            raise KeyboardInterrupt
        return plain(link, call)

    with monkeypatch.context() as patch:
        patch.setattr(Link, "command_of", command_of)
        with pytest.raises(KeyboardInterrupt):
            schedules.update_schedule("s", user_id=user_in(3))
    schedulers.add("one")
    schedulers.run(12)
    assert redis_client.hlen(queue.link.parts[3].keys["tasks"]) == 2
    assert redis_client.hlen(queue.link.parts[0].keys["moving"]) == 0


# --- shares ---------------------------------------------------------------------------------------


def member(token: str, *leads: int, since: int = 0) -> Member:
    return Member(token=token, since_ms=since, ends_ms=99, leads=frozenset(leads))


@pytest.mark.parametrize(
    ("members", "take", "give"),
    [
        ([member("me")], [0, 1, 2, 3], 0),
        ([member("me", 0, 1, 2, 3)], [], 0),
        ([member("me", 0, 1, 2, 3), member("z")], [], 2),
        ([member("me", 0, 1, 2, 3), member("z", since=5)], [], 0),
        ([member("me"), member("z", 0, 1, 2, 3)], [], 0),
        ([member("me"), member("z", 0, 1)], [2, 3], 0),
        ([member("me"), member("a")], [2, 3], 0),
        ([member("me", 0, 1), member("z", 2, 3), member("c")], [], 0),
        ([member("b", 0, 1), member("me", 2, 3), member("c")], [], 1),
        ([member("me", 0, 1, 2), member("z", 3)], [], 1),
        ([member("me", 0, 1, 2), member("z")], [], 1),  # one is free
        ([member("me", 0), member("a", 1), member("b", 2), member("c", 3), member("d")], [], 0),
    ],
)
def test_what_a_scheduler_takes_and_gives(
    members: list[Member], take: list[int], give: int
) -> None:
    shares = Shares(members, 4)
    assert (shares.to_take("me"), shares.to_give("me", 1)) == (take, give)
