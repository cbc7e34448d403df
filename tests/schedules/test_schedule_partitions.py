"""Schedules of a queue with partitions: each is in that of its group, and each id is used once."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from helpers.schedules import THURSDAY
from helpers.state import check_consistency

from fairqueue.clock import ManualClock
from fairqueue.errors import (
    InvalidSchedule,
    RedisUnavailable,
    ScheduleConflict,
    ScheduleQuota,
    StaleVersion,
)
from fairqueue.link.connection import Link
from fairqueue.link.operation import Call
from fairqueue.link.partitions import partition_of
from fairqueue.queue.queue import TaskQueue
from fairqueue.schedules.service import Schedules

START = THURSDAY
PARTS = 4

Hook = Callable[..., list[str]]


@pytest.fixture
def queue(redis_client: redis.Redis, clock: ManualClock) -> Iterator[TaskQueue]:
    """A queue with four partitions."""
    with TaskQueue(redis_client, clock=clock, partitions=PARTS) as queue:
        yield queue
    check_consistency(redis_client, partitions=PARTS)


@pytest.fixture
def schedules(queue: TaskQueue) -> Schedules:
    return Schedules(queue)


@pytest.fixture
def peer(queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock) -> Iterator[Schedules]:
    """The schedules of the same queue, in another process."""
    with TaskQueue(redis_client, clock=clock, partitions=PARTS) as queue:
        yield Schedules(queue)


@pytest.fixture
def before_script(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> Hook:
    """Call a function before a script is first sent to any partition."""

    def hook(script: str, do: Callable[[], object]) -> list[str]:
        sent: list[str] = []
        plain = Link.command_of

        def hooked(link: Link, call: Call) -> Any:
            if link in queue.link.parts:
                sent.append(call.script)
                if call.script == script and sent.count(script) == 1:
                    do()
            return plain(link, call)

        monkeypatch.setattr(Link, "command_of", hooked)
        return sent

    return hook


def user_in(number: int) -> str:
    """A user of a partition."""
    users = (f"user{n}" for n in range(1000))
    return next(each for each in users if partition_of(each, None, PARTS) == number)


def places_of(queue: TaskQueue, client: redis.Redis, schedule_id: str) -> list[int]:
    """The partitions that have a schedule."""
    keys = [part.keys["schedules"] for part in queue.link.parts]
    return [n for n, key in enumerate(keys) if client.hexists(key, schedule_id)]


def on_their_way(queue: TaskQueue, client: redis.Redis) -> list[int]:
    """How many schedules have left each partition and have not arrived."""
    return [client.hlen(part.keys["moving"]) for part in queue.link.parts]


def add(schedules: Schedules, schedule_id: str, user_id: str, **options: Any) -> str:
    return schedules.add_schedule("0 9 * * *", user_id, schedule_id=schedule_id, **options)


def specs(users: list[str], prefix: str = "s", **options: Any) -> list[dict[str, Any]]:
    return [
        {"cron_expr": "0 9 * * *", "user_id": user, "schedule_id": f"{prefix}{n}", **options}
        for n, user in enumerate(users)
    ]


def test_a_schedule_is_in_the_partition_of_its_group(
    schedules: Schedules, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    users = [f"user{n}" for n in range(20)]
    schedules.add_schedules(specs(users))
    schedules.add_schedules(specs(users, "t", tenant="acme"))
    for n, user in enumerate(users):
        assert places_of(queue, redis_client, f"s{n}") == [partition_of(user, None, PARTS)]
        assert places_of(queue, redis_client, f"t{n}") == [partition_of(user, "acme", PARTS)]
    assert {partition_of(user, None, PARTS) for user in users} == set(range(PARTS))


@pytest.mark.parametrize(
    "filters",
    [{}, {"is_active": True}, {"name_prefix": "r"}, {"contains": "7"}, {"tenant": "acme"}],
    ids=str,
)
def test_a_listing_has_all_in_order_however_it_is_cut(
    schedules: Schedules, redis_client: redis.Redis, clock: ManualClock, filters: dict[str, Any]
) -> None:
    every = [
        spec | {"name": f"r{n % 3}", "tenant": "acme" if n % 4 == 0 else None}
        for n, spec in enumerate(specs([f"user{n % 9}" for n in range(40)]))
    ]
    with TaskQueue(redis_client, "single", clock=clock) as single:
        plain = Schedules(single)
        for each in (plain, schedules):
            each.add_schedules(every)
            each.pause_schedule("s3")
        wanted = [each.schedule_id for each in plain.list_schedules(limit=1000, **filters)]
        found, cursor = [], None
        while True:
            page = schedules.list_schedules(limit=7, cursor=cursor, **filters)
            found += [each.schedule_id for each in page]
            if (cursor := page.cursor) is None:
                break
        assert found == wanted
        assert found
        assert schedules.export_schedules(**filters) == plain.export_schedules(**filters)
        single.destroy()
    with pytest.raises(InvalidSchedule, match="cursor"):
        schedules.list_schedules(cursor="x")


def test_an_id_that_another_partition_has_is_refused(
    schedules: Schedules, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add(schedules, "s", user_in(0))
    with pytest.raises(ScheduleConflict, match="'s' is in use, and nothing was stored"):
        add(schedules, "s", user_in(1))
    with pytest.raises(ScheduleConflict, match="'s'"):
        schedules.add_schedules(
            [*specs([user_in(2)]), {"every": 60, "user_id": user_in(3), "schedule_id": "s"}]
        )
    assert [each.schedule_id for each in schedules.list_schedules()] == ["s"]


def test_a_replaced_schedule_moves_and_keeps_its_changes(
    schedules: Schedules, queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock
) -> None:
    add(schedules, "s", user_in(0), created_by="carol")
    schedules.pause_schedule("s", by="dora")
    clock.advance(1)
    add(schedules, "s", user_in(3), on_conflict="replace", created_by="eve")
    assert places_of(queue, redis_client, "s") == [3]
    assert on_their_way(queue, redis_client) == [0] * PARTS
    assert [change.by for change in schedules.changes("s")] == ["eve", "dora", "carol"]
    schedule = schedules.get_schedule("s")
    assert schedule is not None
    assert (schedule.user_id, schedule.is_active) == (user_in(3), True)


@pytest.mark.parametrize("changes", [{"user_id": user_in(2)}, {"tenant": "tenant2"}], ids=str)
def test_a_change_of_the_group_moves_a_schedule_with_all_that_is_known_of_it(
    schedules: Schedules,
    queue: TaskQueue,
    redis_client: redis.Redis,
    clock: ManualClock,
    changes: dict[str, Any],
) -> None:
    add(schedules, "s", user_in(0), title="Morning")
    schedules.pause_schedule("s")
    clock.advance(timedelta(days=2))
    schedules.resume_schedule("s")
    before = schedules.get_schedule("s")
    moments = schedules.moments("s", START, START + timedelta(days=3))
    assert before is not None
    assert schedules.update_schedule("s", **changes)
    user, tenant = changes.get("user_id", user_in(0)), changes.get("tenant")
    target = partition_of(user, tenant, PARTS)
    assert places_of(queue, redis_client, "s") == [target]
    after = schedules.get_schedule("s")
    assert after is not None
    assert (after.user_id, after.tenant) == (user, tenant)
    assert (after.next_run, after.title) == (before.next_run, "Morning")
    assert schedules.moments("s", START, START + timedelta(days=3)) == moments
    assert len(schedules.changes("s")) == 4
    due = queue.link.parts[target].keys["due"]
    assert after.next_run is not None
    assert redis_client.zscore(due, "s") == after.next_run.timestamp() * 1000


@pytest.mark.parametrize("step", ["move_in", "end_move"])
def test_a_move_that_was_interrupted_is_ended_by_the_next_call(
    schedules: Schedules,
    peer: Schedules,
    queue: TaskQueue,
    redis_client: redis.Redis,
    before_script: Hook,
    step: str,
) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    add(schedules, "s", user_in(0))
    before_script(step, die)
    with pytest.raises(KeyboardInterrupt):
        schedules.update_schedule("s", user_id=user_in(1))
    assert on_their_way(queue, redis_client) == [1, 0, 0, 0]
    with pytest.raises(ScheduleConflict, match="'s'"):
        add(peer, "s", user_in(2))
    assert on_their_way(queue, redis_client) == [0] * PARTS
    assert places_of(queue, redis_client, "s") == [1]
    assert peer.remove_schedule("s")
    assert peer.get_schedule("s") is None


def test_a_schedule_that_is_removed_while_it_moves_does_not_come_back(
    schedules: Schedules,
    peer: Schedules,
    queue: TaskQueue,
    redis_client: redis.Redis,
    before_script: Hook,
) -> None:
    add(schedules, "s", user_in(0))
    before_script("move_in", lambda: peer.remove_schedule("s"))
    schedules.update_schedule("s", user_id=user_in(1))
    assert places_of(queue, redis_client, "s") == []
    assert on_their_way(queue, redis_client) == [0] * PARTS


def test_an_id_that_is_added_to_two_partitions_at_once_is_stored_in_one(
    schedules: Schedules,
    peer: Schedules,
    queue: TaskQueue,
    redis_client: redis.Redis,
    before_script: Hook,
) -> None:
    users = [user_in(n) for n in range(PARTS)]
    before_script("add_schedules", lambda: add(peer, "s1", user_in(3)))
    with pytest.raises(ScheduleConflict, match="'s1' is in use, and nothing was stored"):
        schedules.add_schedules(specs(users))
    assert [each.schedule_id for each in schedules.list_schedules()] == ["s1"]
    assert places_of(queue, redis_client, "s1") == [3]


def test_an_id_that_two_partitions_have_all_the_same_is_named_and_can_be_removed(
    schedules: Schedules, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add(schedules, "s", user_in(0))
    with TaskQueue(redis_client, clock=queue.link.clock, partitions=PARTS) as other:
        part = Schedules(other).at(other.link.parts[1])
        part.add_schedule("0 9 * * *", user_in(1), schedule_id="s")
    with pytest.raises(ScheduleConflict, match="partitions 0 and 1 at the same time"):
        schedules.update_schedule("s", title="Which?")
    with pytest.raises(ScheduleConflict, match="partitions 0 and 1"):
        add(schedules, "s", user_in(1), on_conflict="replace")
    assert schedules.remove_schedule("s")
    assert places_of(queue, redis_client, "s") == []


@pytest.mark.parametrize("checked", ["before", "in the script"])
def test_nothing_is_stored_if_one_partition_refuses_its_part(
    schedules: Schedules,
    peer: Schedules,
    queue: TaskQueue,
    before_script: Hook,
    checked: str,
) -> None:
    users = [user_in(n) for n in range(PARTS)]
    for twin in queue.twins():
        twin.configure(max_schedules=1)
    if checked == "before":
        add(peer, "first", user_in(2))
    else:
        before_script("add_schedules", lambda: add(peer, "first", user_in(2)))
    with pytest.raises(ScheduleQuota, match=f"'{user_in(2)}' would have more"):
        schedules.add_schedules(specs(users))
    assert [each.schedule_id for each in schedules.list_schedules()] == ["first"]
    with pytest.raises(InvalidSchedule, match="is in the past"):
        schedules.add_schedules([*specs([user_in(0)]), {"at": 5, "user_id": user_in(1)}])
    assert [each.schedule_id for each in schedules.list_schedules()] == ["first"]
    add(schedules, "second", user_in(0))
    with pytest.raises(ScheduleQuota, match=f"'{user_in(2)}'"):
        schedules.update_schedule("second", user_id=user_in(2))


def test_what_other_partitions_have_stored_is_removed_if_one_does_not_answer(
    schedules: Schedules, queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Link.command_of

    def hooked(link: Link, call: Call) -> Any:
        if link is queue.link.parts[2] and call.script == "add_schedules":
            raise RedisUnavailable("partition 2 does not answer")
        return plain(link, call)

    with monkeypatch.context() as patch:
        patch.setattr(Link, "command_of", hooked)
        with pytest.raises(RedisUnavailable):
            schedules.add_schedules(specs([user_in(n) for n in range(PARTS)]))
    assert schedules.list_schedules() == []


def test_a_stale_revision_is_refused_in_any_partition(schedules: Schedules) -> None:
    add(schedules, "s", user_in(3))
    schedule = schedules.get_schedule("s")
    assert schedule is not None
    assert schedules.update_schedule("s", title="x", if_revision=schedule.revision)
    with pytest.raises(StaleVersion):
        schedules.update_schedule("s", title="y", if_revision=schedule.revision)
    with pytest.raises(StaleVersion):
        schedules.remove_schedule("s", if_revision=schedule.revision)
    assert not schedules.remove_schedule("absent")


def test_bulk_import_and_replan_are_for_all_partitions(
    schedules: Schedules, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    users = [f"user{n}" for n in range(12)]
    schedules.add_schedules(specs(users))
    assert schedules.bulk("update", user_id="user3", dry_run=False, title="Three").done == 1
    assert schedules.bulk("pause", ids=["s1", "s2", "absent"], dry_run=False).done == 2
    documents = schedules.export_schedules()
    assert [each["schedule_id"] for each in documents if not each["is_active"]] == ["s1", "s2"]
    changed = [
        {**each, "user_id": "user0"}
        for each in documents
        if each["schedule_id"] not in ("s10", "s11")
    ]
    diff = schedules.import_schedules(changed, prune=True, dry_run=False)
    assert (len(diff.changed), diff.removed) == (9, ["s10", "s11"])
    home = partition_of("user0", None, PARTS)
    assert all(places_of(queue, redis_client, each["schedule_id"]) == [home] for each in changed)
    assert schedules.import_schedules(changed, prune=True).is_empty
    assert schedules.replan().looked_at == 8
    assert schedules.bulk("remove", dry_run=False).done == 10


def test_tasks_of_a_trigger_and_of_a_backfill_are_for_the_partition_of_the_group(
    schedules: Schedules, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add(schedules, "s", user_in(3))
    schedules.trigger("s")
    assert schedules.backfill("s", START - timedelta(days=3), START).filled == 3
    tasks = [part.keys["tasks"] for part in queue.link.parts]
    assert [redis_client.hlen(key) for key in tasks] == [0, 0, 0, 4]


def test_problems_of_all_partitions_are_listed_oldest_first(
    schedules: Schedules, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    for number in range(PARTS):
        record = f'{{"reason":"broken","since":{(7 * number) % 5}}}'
        redis_client.hset(queue.link.parts[number].keys["broken"], f"s{number}", record)
    assert [each.schedule_id for each in schedules.problems()] == ["s0", "s3", "s1", "s2"]
    for number in range(PARTS):
        assert schedules.remove_schedule(f"s{number}")
