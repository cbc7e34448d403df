"""A user moves to a tenant in another partition: all that waits, once, whatever happens."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import redis
from helpers.moving import members_of, random_task, texts_of
from helpers.state import check_consistency
from helpers.tasks import make_task

from fairqueue.clock import ManualClock
from fairqueue.history.runs import History
from fairqueue.link.connection import Link
from fairqueue.link.operation import Call, Operation
from fairqueue.link.partitions import partition_of
from fairqueue.queue import moving
from fairqueue.queue.queue import TaskQueue
from fairqueue.repartition.counting import links_of
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules.places import finish_all_moves
from fairqueue.schedules.service import Schedules

PARTS = 4
STEPS = ("move_user_out", "move_user_in", "end_user_move")
POOLS = ("default", "gpu", "slow")


@pytest.fixture
def queue(redis_client: redis.Redis, clock: ManualClock) -> Iterator[TaskQueue]:
    """A queue with four partitions, whose counts and indexes must agree at the end."""
    with TaskQueue(redis_client, clock=clock, partitions=PARTS) as queue:
        yield queue
    check_consistency(redis_client, partitions=PARTS)


def tenant_in(number: int) -> str:
    """A tenant of a partition."""
    names = (f"tenant{n}" for n in range(1000))
    return next(each for each in names if partition_of("x", each, PARTS) == number)


OLD, NEW, THIRD = tenant_in(1), tenant_in(3), tenant_in(2)


def push(queue: TaskQueue, *task_ids: str, user: str = "ann", **fields: Any) -> None:
    fields.setdefault("tenant", OLD)
    for task_id in task_ids:
        queue.push(make_task(user, task_id, **fields))


def claimed(queue: TaskQueue, **options: Any) -> list[str]:
    return [each.task.task_id for each in queue.claim("w", 100, pools=POOLS, **options)]


def waiting_of(queue: TaskQueue, *users: str) -> dict[str, dict[str, Any]]:
    """What is known of the unfinished tasks of users; of where they belong, only the user."""
    status, since = texts_of(queue, "status"), members_of(queue, "waiting")
    times, documents = members_of(queue, "delayed"), texts_of(queue, "tasks")
    found = {}
    for task_id, record in status.items():
        if record["user"] in users and record["state"] in ("ready", "delayed"):
            place = since.get(task_id.encode()) or times[task_id.encode()]
            hidden = ("group", "tenant", "digest", "bytes", "flow", "behind")
            kept = {name: value for name, value in record.items() if name not in hidden}
            document = {n: v for n, v in documents[task_id].items() if n != "tenant"}
            found[task_id] = kept | {"place": place, "document": document}
    return found


def fill(queue: TaskQueue, rng: random.Random, clock: ManualClock, users: str = "ab") -> None:
    """Push tasks with some of everything, and let some of them run, fail or come back."""
    queue.set_limits("slotted", slots=1)
    queue.set_limit("account:*", slots=1, scope="tenant")
    queue.set_limit("ordered:*", slots=1, ordered=True, through_retries=True, scope="tenant")
    for number in range(40):
        task = random_task(rng, number)
        queue.push(replace(task, user_id=rng.choice(users), tenant=OLD))
        clock.advance(rng.random() * 3)
    for claim in queue.claim("w", 12, lease=600, pools=POOLS):
        how = rng.randrange(4)
        if how == 0:
            queue.retry(claim, "again", delay=rng.choice([0, 100]))
        elif how == 1:
            queue.release(claim)
        elif how == 2:
            queue.finish(claim)
        # else it goes on


class Interrupted(Exception):
    """The process has died."""


def dying(operation: Operation[Any], after: int, *, late: bool) -> Operation[Any]:
    """An operation whose process dies: before a request, or before it reads the answer."""
    answer: Any = None
    while True:
        try:
            request = operation.send(answer)
        except StopIteration as end:
            return end.value
        if after == 0 and not late:
            raise Interrupted
        answer = yield request
        if after == 0:
            raise Interrupted
        after -= 1


def move(queue: TaskQueue, user: str = "ann", to: str | None = NEW, old: str | None = OLD) -> int:
    return queue.move_user(user, to, tenant=old)


def interrupt(queue: TaskQueue, after: int, *, late: bool = False, user: str = "ann") -> None:
    source, target = queue.part_of(user, OLD).link, queue.part_of(user, NEW).link
    steps = moving.move_between(source, target, user, OLD, NEW)
    with pytest.raises(Interrupted):
        queue.link.perform(dying(steps, after, late=late))


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "MOVED_AT_ONCE", 3)


# --- what moves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_all_that_waits_moves_and_keeps_its_id_its_place_and_its_time(
    queue: TaskQueue, clock: ManualClock, small_steps: None, seed: int
) -> None:
    fill(queue, random.Random(seed), clock)
    before, others = waiting_of(queue, "a"), waiting_of(queue, "b")
    assert before
    assert move(queue, "a") == len(before)
    after = waiting_of(queue, "a")
    behind = {i for i, s in texts_of(queue, "status").items() if s.get("flow", {}).get("unique")}
    assert {i: each for i, each in after.items() if i not in behind} == {
        i: each for i, each in before.items() if i not in behind
    }
    assert after.keys() == before.keys()
    records = {i: s for i, s in texts_of(queue, "status").items() if i in after}
    assert {(each["group"], each["tenant"]) for each in records.values()} == {(NEW, NEW)}
    assert waiting_of(queue, "b").keys() == others.keys()
    assert move(queue, "a") == 0
    assert move(queue, "a", OLD, NEW) == len(before)
    assert waiting_of(queue, "a").keys() == before.keys()


@pytest.mark.parametrize(("old", "new"), [(None, NEW), (OLD, None), (OLD, NEW)])
def test_a_task_belongs_to_the_other_tenant_from_then_on(
    queue: TaskQueue, old: str | None, new: str | None
) -> None:
    user = next(f"u{n}" for n in range(99) if partition_of(f"u{n}", None, PARTS) == 0)
    push(queue, "late", user=user, tenant=old, delay=50)
    push(queue, "a", "b", user=user, tenant=old)
    assert move(queue, user, new, old) == 3
    assert queue.size(user, tenant=new) == 2
    found = queue.claim("w", 9)
    assert [(each.task.task_id, each.task.tenant) for each in found] == [("a", new), ("b", new)]
    assert new is None or new in queue.tenants_of(user)


def test_tasks_pushed_later_come_after_those_that_moved(queue: TaskQueue) -> None:
    push(queue, *(f"other{n}" for n in range(20)), user="bob")
    push(queue, "a", "b")
    move(queue)
    push(queue, "c", tenant=NEW)
    ours = [each for each in claimed(queue) if not each.startswith("other")]
    assert ours == ["a", "b", "c"]


def test_running_tasks_stay_until_they_end(queue: TaskQueue) -> None:
    push(queue, "runs", "waits")
    (claim,) = queue.claim("w")
    assert move(queue) == 1
    queue.retry(claim, "again")
    assert queue.size("ann", tenant=OLD) == 1
    assert move(queue) == 1
    assert sorted(claimed(queue)) == ["runs", "waits"]


def test_settings_move_unless_the_user_has_some_there(queue: TaskQueue) -> None:
    queue.set_user("ann", tenant=OLD, weight=3.0, paused=True)
    push(queue, "a")
    move(queue)
    assert queue.get_user("ann", tenant=NEW).weight == 3.0
    assert queue.get_user("ann", tenant=OLD).weight == 1.0
    assert claimed(queue) == []
    queue.set_user("ann", tenant=OLD, weight=5.0)
    move(queue)
    assert queue.get_user("ann", tenant=NEW).weight == 3.0
    assert queue.get_user("ann", tenant=OLD).weight == 5.0
    queue.resume_user("ann", tenant=NEW)
    assert claimed(queue) == ["a"]


def test_a_user_of_whom_nothing_waits_moves_with_the_settings(queue: TaskQueue) -> None:
    queue.set_user("ann", tenant=OLD, weight=3.0)
    assert move(queue) == 0
    assert queue.get_user("ann", tenant=NEW).weight == 3.0
    assert NEW in queue.tenants_of("ann")


def test_a_moved_task_gives_up_a_unique_key_that_another_one_has_there(queue: TaskQueue) -> None:
    push(queue, "mine", "later", unique="report", on_duplicate="ignore")
    push(queue, "theirs", tenant=NEW, unique="report")
    assert move(queue) == 1
    assert sorted(claimed(queue)) == ["mine", "theirs"]
    push(queue, "free", unique="report")  # the key is free where the task was
    assert claimed(queue) == ["free"]


def test_a_task_behind_a_running_one_with_its_key_does_not_wait_there(queue: TaskQueue) -> None:
    push(queue, "runs", unique="report", on_duplicate="replace")
    (claim,) = queue.claim("w")
    push(queue, "next", unique="report", on_duplicate="replace")
    assert claimed(queue) == []
    assert move(queue) == 1
    assert claimed(queue) == ["next"]
    queue.finish(claim)


def test_a_task_whose_id_another_one_has_there_stays(queue: TaskQueue, small_steps: None) -> None:
    push(queue, *(f"t{n}" for n in range(8)))
    push(queue, "t1", "t6", tenant=NEW)
    before = waiting_of(queue.at(queue.part_of("ann", OLD).link), "ann")
    assert move(queue) == 6
    assert queue.size("ann", tenant=OLD) == 2
    after = waiting_of(queue.at(queue.part_of("ann", OLD).link), "ann")
    assert after == {name: before[name] for name in ("t1", "t6")}
    found = queue.claim("w", 100)
    assert Counter((each.task.task_id, each.task.tenant) for each in found) == Counter(
        [(f"t{n}", NEW) for n in range(8)] + [("t1", OLD), ("t6", OLD)]
    )


def test_a_push_that_is_repeated_after_the_move_is_recognised(queue: TaskQueue) -> None:
    task = make_task("ann", "t", tenant=OLD)
    queue.push(task)
    move(queue)
    assert queue.push(task) == "t"
    assert claimed(queue) == ["t"]


def test_expired_tasks_and_pools_are_where_the_task_is(
    queue: TaskQueue, clock: ManualClock
) -> None:
    push(queue, "short", expires=50)
    push(queue, "gpu", pool="gpu")
    assert move(queue) == 2
    clock.advance(60)
    assert claimed(queue) == ["gpu"]
    assert texts_of(queue, "status")["short"]["state"] == "expired"


def test_a_buffered_run_stays_behind_one_that_runs_and_moves_with_one_that_waits(
    queue: TaskQueue, clock: ManualClock
) -> None:
    Schedules(queue).add_schedule(
        every=60, user_id="ann", tenant=OLD, schedule_id="s", overlap="buffer_one"
    )
    scheduler = TaskScheduler(queue, "one")
    clock.advance(61)
    scheduler.tick()
    (first,) = queue.claim("w", lease=900)
    clock.advance(61)
    scheduler.tick()
    assert len(waiting_of(queue, "ann")) == 1
    assert move(queue) == 0
    queue.release(first)
    assert len(waiting_of(queue, "ann")) == 2
    assert move(queue) == 2
    (again,) = queue.claim("w", 10, lease=900)
    assert again.task.task_id == first.task.task_id
    queue.finish(again)
    assert len(claimed(queue)) == 1


# --- deaths and lost replies ----------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("after", range(4))
def test_a_move_that_died_at_any_step_is_ended_by_the_next_call(
    queue: TaskQueue, clock: ManualClock, small_steps: None, after: int, late: bool
) -> None:
    fill(queue, random.Random(after), clock)
    queue.set_user("a", tenant=OLD, weight=3.0)
    before = waiting_of(queue, "a")
    if after < 3:
        interrupt(queue, after, late=late, user="a")
    move(queue, "a")
    assert waiting_of(queue, "a").keys() == before.keys()
    assert {s["group"] for i, s in texts_of(queue, "status").items() if i in before} == {NEW}
    assert queue.get_user("a", tenant=NEW).weight == 3.0
    assert queue.get_user("a", tenant=OLD).weight == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_tasks_end_once_though_moves_die_and_workers_go_on(
    queue: TaskQueue, clock: ManualClock, small_steps: None, seed: int
) -> None:
    rng, ended = random.Random(seed), Counter[str]()
    fill(queue, rng, clock)
    known = {i for i, s in texts_of(queue, "status").items() if "ended" not in s}

    def work(most: int) -> None:
        for claim in queue.claim("w", most, lease=50, pools=POOLS):
            queue.finish(claim)
            ended[claim.task.task_id] += 1
        History(queue).prune(0)  # nothing is known of a task once it has ended
        clock.advance(rng.choice([0.1, 70.0]))  # tombstones end

    places = [OLD, NEW, THIRD]
    for _ in range(40):
        old, new = rng.sample(places, 2)
        user = rng.choice("ab")
        source, target = queue.part_of(user, old).link, queue.part_of(user, new).link
        steps = moving.move_between(source, target, user, old, new)
        with suppress(Interrupted):
            queue.link.perform(dying(steps, rng.randint(0, 9), late=rng.random() < 0.7))
        work(1)
    queue.link.perform(finish_all_moves(queue))
    for _ in range(40):
        work(20)
    assert queue.size() == 0
    assert max(ended.values()) == 1
    assert ended.keys() <= known
    assert not texts_of(queue, "moving")


def test_steps_that_arrive_twice_and_late_change_nothing(
    queue: TaskQueue, clock: ManualClock, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(queue, random.Random(5), clock)
    before = waiting_of(queue, "a")
    calls: list[tuple[Link, Call]] = []
    plain = Link.command_of

    def noted(link: Link, call: Call) -> Any:
        if call.script in STEPS:
            calls.append((link, call))
        return plain(link, call)

    def twice(call: Call) -> Operation[Any]:
        first = yield call
        again = yield call
        if call.script == "move_user_in":
            assert first == again
        return first

    with monkeypatch.context() as patch:
        patch.setattr(Link, "command_of", noted)
        patch.setattr(moving, "_call", twice)
        assert move(queue, "a") == len(before)
    assert len(calls) >= 2 * 3 * len(before) // 3
    assert waiting_of(queue, "a").keys() == before.keys()
    for claim in queue.claim("w", 100, lease=9999, pools=POOLS):
        queue.finish(claim)
    History(queue).prune(0)
    left = waiting_of(queue, "a", "b")
    for forget in (False, True):
        for link, call in reversed(calls):
            if not (forget and call.script == "move_user_out"):
                link.perform(one(call))
        assert waiting_of(queue, "a", "b") == left
        for link in links_of(queue):
            link.ask(("UNLINK", link.keys["ops"], link.keys["ops_before"]))  # as after a minute


def one(call: Call) -> Operation[Any]:
    return (yield call)


def test_one_call_ends_what_another_one_has_left(queue: TaskQueue, small_steps: None) -> None:
    push(queue, "a1", "a2", "a3", "a4", "a5")
    push(queue, "b1", "b2", user="bob")
    interrupt(queue, 0, late=True)
    assert move(queue, "bob") == 2
    assert queue.size("ann", tenant=NEW) == 3
    assert queue.size("ann", tenant=OLD) == 2
    assert move(queue) == 2
    assert queue.size(tenant=NEW) == 7


def test_a_replica_that_has_forgotten_the_last_moves_loses_no_later_ones(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    fair = queue.part_of("ann", OLD).keys["fair"]
    before = redis_client.hgetall(fair)
    push(queue, "a")
    assert move(queue) == 1
    redis_client.hset(fair, mapping={b"seq": before.get(b"seq", b"0")})
    push(queue, "b")
    assert move(queue) == 1
    assert sorted(claimed(queue)) == ["a", "b"]


def leaders_look_over(queue: TaskQueue, clock: ManualClock) -> None:
    scheduler = TaskScheduler(queue, "leader")
    for _ in range(4):
        clock.advance(4)
        scheduler.tick()


@pytest.mark.parametrize("finish", [leaders_look_over, None])
@pytest.mark.parametrize("after", [0, 1])
def test_the_leader_ends_a_move_that_was_interrupted(
    queue: TaskQueue,
    clock: ManualClock,
    after: int,
    finish: Callable[[TaskQueue, ManualClock], None] | None,
) -> None:
    push(queue, "a", "b")
    interrupt(queue, after, late=True)
    if finish is None:
        queue.link.perform(finish_all_moves(queue))
    else:
        finish(queue, clock)
    assert queue.size("ann", tenant=NEW) == 2
    assert sorted(claimed(queue)) == ["a", "b"]
    assert not texts_of(queue, "moving")
