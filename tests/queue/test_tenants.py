"""Tenants: which one a user belongs to, what carries one, and what is found by one."""

import itertools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from scheduling import THURSDAY, add, at, fire_id, get, tamper
from support import claim_one, count_commands, dump, make_task, push

from fairqueue.clock import ManualClock
from fairqueue.errors import (
    BrokenRecord,
    ConfigurationError,
    InvalidInput,
    InvalidSchedule,
    InvalidTask,
)
from fairqueue.history.records import Run
from fairqueue.history.runs import ENDED, History
from fairqueue.models import Page, ScheduledTask, Task, UserSettings
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules.bulk import Filter
from fairqueue.worker.context import RunningTask, TaskContext
from fairqueue.worker.worker import Worker


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(THURSDAY)


@pytest.fixture
def history(queue: TaskQueue) -> History:
    return History(queue)


def run_of(history: History, task_id: str) -> Run:
    details = history.get(task_id)
    assert details is not None
    return details.run


def tenant_keys(client: redis.Redis) -> dict[str, Any]:
    """What is stored of tenants."""
    keys = ("tenants", "tenant_users", "tenant_schedules")
    return {key: content for key, content in dump(client).items() if key in keys}


# --- names ----------------------------------------------------------------------------------------

BAD_NAMES = ["", "a b", 'a"b', "é", "a\0b", "a/b", "x" * 65, "acme\n", 7, b"acme", ["acme"]]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_name_that_is_none_is_refused_and_nothing_is_stored(
    queue: TaskQueue,
    scheduler: TaskScheduler,
    history: History,
    redis_client: redis.Redis,
    name: Any,
) -> None:
    add(scheduler)
    before = dump(redis_client)
    calls: dict[type[Exception], list[Callable[[], object]]] = {
        InvalidTask: [lambda: Task.create(user_id="alice", tenant=name)],
        ConfigurationError: [lambda: queue.set_user("alice", tenant=name)],
        InvalidSchedule: [
            lambda: add(scheduler, "new", tenant=name),
            lambda: scheduler.update_schedule("nine", tenant=name),
            lambda: scheduler.copy_schedule("nine", tenant=name),
            lambda: scheduler.list_schedules(tenant=name),
            lambda: scheduler.export_schedules(tenant=name),
            lambda: scheduler.bulk("remove", tenant=name, dry_run=False),
        ],
        InvalidInput: [lambda: history.runs(tenant=name)],
    }
    for error, refused in calls.items():
        for call in refused:
            with pytest.raises(error, match=r"tenant .* cannot be used"):
                call()
    assert dump(redis_client) == before


@pytest.mark.parametrize("name", ["a", "Acme-2.x_", "x" * 64, "-", "..."])
def test_a_name_that_is_one_is_kept_as_it_is(queue: TaskQueue, history: History, name: str) -> None:
    push(queue, "t", tenant=name)
    assert queue.tenant_of("alice") == name
    assert run_of(history, "t").tenant == name


# --- users ----------------------------------------------------------------------------------------


def test_a_user_belongs_to_the_first_tenant_that_a_task_names(
    queue: TaskQueue, scheduler: TaskScheduler, redis_client: redis.Redis
) -> None:
    push(queue, "t1")
    assert queue.tenant_of("alice") is None
    push(queue, "t2", tenant="acme")
    push(queue, "t3", "t4", tenant="blue")
    push(queue, "t5", user_id="bob", tenant="blue")
    assert (queue.tenant_of("alice"), scheduler.tenant_of("bob")) == ("acme", "blue")
    assert tenant_keys(redis_client) == {
        "tenants": {"alice": "acme", "bob": "blue"},
        "tenant_users": {"acme\0alice": 0, "blue\0bob": 0},
    }


def test_of_tasks_that_are_pushed_together_the_first_one_counts(queue: TaskQueue) -> None:
    tasks = [make_task(tenant=tenant) for tenant in (None, "acme", "blue")]
    queue.push_many([*tasks, make_task("bob", tenant="blue")])
    assert (queue.tenant_of("alice"), queue.tenant_of("bob")) == ("acme", "blue")


def test_a_user_belongs_to_the_first_tenant_that_a_schedule_names(
    queue: TaskQueue, scheduler: TaskScheduler
) -> None:
    add(scheduler, "a", tenant="acme")
    add(scheduler, "b", user_id="bob")
    assert (queue.tenant_of("alice"), queue.tenant_of("bob")) == ("acme", None)
    scheduler.update_schedule("b", tenant="blue")
    scheduler.update_schedule("a", user_id="carol")
    assert (queue.tenant_of("bob"), queue.tenant_of("carol")) == ("blue", "acme")
    assert queue.tenant_of("alice") == "acme"


def test_a_user_is_moved_to_another_tenant_and_taken_away(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    push(queue, "t", tenant="acme")
    assert queue.set_user("alice", tenant="blue") == UserSettings(tenant="blue")
    assert tenant_keys(redis_client) == {
        "tenants": {"alice": "blue"},
        "tenant_users": {"blue\0alice": 0},
    }
    assert queue.set_user("alice", tenant="blue").tenant == "blue"
    assert queue.set_user("alice", weight=2.0) == UserSettings(weight=2.0, tenant="blue")
    assert queue.get_user("alice") == UserSettings(weight=2.0, tenant="blue")
    assert queue.set_user("alice", tenant=None) == UserSettings(weight=2.0)
    assert queue.get_user("alice") == UserSettings(weight=2.0)
    assert tenant_keys(redis_client) == {}
    push(queue, "u", tenant="red")
    assert queue.tenant_of("alice") == "red"


def test_a_tenant_is_no_setting_of_the_user(queue: TaskQueue, redis_client: redis.Redis) -> None:
    queue.set_user("alice", tenant="acme")
    assert not dump(redis_client).keys() & {"users", "user_names"}
    queue.set_user("alice", max_running=3)
    queue.set_user("bob", weight=2.0)
    state = dump(redis_client)
    assert state["users"]["alice"] == {"max_running": 3}
    assert state["user_names"] == {"alice": 0, "bob": 0}
    queue.set_user("alice", max_running=None)
    assert dump(redis_client)["user_names"] == {"bob": 0}


def test_a_move_that_arrives_twice_undoes_no_other(queue: TaskQueue) -> None:
    move: dict[str, Any] = {"op": "o", "user": "alice", "change": json.dumps({"tenant": "acme"})}
    answer = queue.link.run("set_user", **move)
    queue.set_user("alice", tenant="blue")
    assert queue.link.run("set_user", **move) == answer
    assert queue.tenant_of("alice") == "blue"


def test_a_task_without_a_tenant_asks_for_none(queue: TaskQueue, redis_client: redis.Redis) -> None:
    def asked(task_id: str, **fields: Any) -> int:
        before = count_commands(redis_client)
        push(queue, task_id, **fields)
        after = count_commands(redis_client)
        return sum(after[name] - before[name] for name in ("hexists", "hsetnx"))

    push(queue, "first")
    assert asked("plain") == 0
    assert asked("of a tenant", tenant="acme") == 1


# --- tasks and runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["user_id", "name", "triggered_by"])
@pytest.mark.parametrize(
    "text", ['x","tenant":"acme', ',"tenant":"acme', '\\","tenant":"acme"', "tenant"]
)
def test_no_text_of_a_task_is_taken_for_its_tenant(
    queue: TaskQueue, history: History, redis_client: redis.Redis, field: str, text: str
) -> None:
    fields: dict[str, Any] = {"user_id": "alice", "task_id": "t"}
    queue.push(Task.create(**fields | {field: text}))
    queue.finish(claim_one(queue))
    assert tenant_keys(redis_client) == {}
    assert run_of(history, "t").tenant is None
    assert history.runs(tenant="acme") == []


def test_the_payload_of_a_schedule_is_not_taken_for_its_tenant(
    scheduler: TaskScheduler, clock: ManualClock, redis_client: redis.Redis
) -> None:
    add(scheduler, payload={"a": 1, "tenant": "acme"}, metadata={"a": 1, "tenant": "acme"})
    clock.set(at(5, 9))
    assert scheduler.tick().fired == 1
    assert tenant_keys(redis_client) == {}
    assert scheduler.list_schedules(tenant="acme") == []


def test_a_task_keeps_its_tenant_until_its_run_has_ended(
    queue: TaskQueue, history: History
) -> None:
    push(queue, "t", tenant="acme")
    claim = claim_one(queue)
    assert claim.task.tenant == "acme"
    assert RunningTask.of(TaskContext(claim.task)).tenant == "acme"
    queue.retry(claim, "not yet")
    assert run_of(history, "t").tenant == "acme"
    queue.finish(claim_one(queue))
    assert [run.task_id for run in history.runs("succeeded", tenant="acme")] == ["t"]


def test_the_same_id_for_another_tenant_is_another_task(queue: TaskQueue) -> None:
    push(queue, "t", tenant="acme")
    push(queue, "t", tenant="acme")
    for other in (None, "blue"):
        with pytest.raises(InvalidTask, match="'t' belongs to"):
            push(queue, "t", tenant=other)
    assert queue.size() == 1


def test_a_task_is_pushed_for_a_tenant_by_its_function(queue: TaskQueue, history: History) -> None:
    worker = Worker(queue)

    @worker.task("build")
    def build(report: int) -> None: ...

    first = build.options(tenant="acme").push("alice", report=1)
    second = build.options(tenant="acme").options(tenant=None).push("alice", report=2)
    assert [run_of(history, task_id).tenant for task_id in (first, second)] == ["acme", None]


def test_each_task_of_a_schedule_has_its_tenant(
    queue: TaskQueue, scheduler: TaskScheduler, history: History, clock: ManualClock
) -> None:
    add(scheduler, tenant="acme")
    clock.set(at(5, 9))
    assert scheduler.tick().fired == 1
    claim = claim_one(queue)
    queue.bury(claim, "no")
    triggered = scheduler.trigger("nine")
    scheduler.backfill("nine", at(4, 0), at(5, 0))
    retried = history.retry(claim.task.task_id)
    fired, filled = fire_id("nine", at(5, 9)), fire_id("nine", at(4, 9))
    for task_id in (fired, triggered, filled, retried):
        details = history.get(task_id)
        assert details is not None
        assert details.task is not None
        assert (details.run.tenant, details.task.tenant) == ("acme", "acme"), task_id
    unfinished = history.runs(("pending", "retrying"), tenant="acme")
    assert {run.task_id for run in unfinished} == {triggered, filled, retried}


@pytest.fixture
def many_runs(queue: TaskQueue, clock: ManualClock, history: History) -> list[Run]:
    """Runs of all tenants and statuses, newest end first."""
    chosen = itertools.product(("acme", "acme2", None), ("alice", "bob"), ("a", "b"), ENDED)
    for number, (tenant, user, name, status) in enumerate(chosen):
        push(queue, f"t{number}", user_id=user, name=name, tenant=tenant)
        claim = claim_one(queue)
        if status == "cancelled":
            queue.cancel(claim.task.task_id)
        if status in ("succeeded", "cancelled"):
            queue.finish(claim)
        else:
            queue.bury(claim, f"failure of {name}")
        clock.advance(1)
    push(queue, "waiting", tenant="acme")
    push(queue, "other", tenant="blue")
    return history.runs(ENDED, limit=1000)


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"user_id": "bob"},
        {"name": "a"},
        {"user_id": "bob", "name": "b"},
        {"status": "failed"},
        {"status": ("succeeded", "cancelled"), "name": "a"},
        {"since": THURSDAY + timedelta(seconds=4), "until": THURSDAY + timedelta(seconds=9)},
    ],
    ids=str,
)
def test_runs_of_a_tenant_are_those_that_the_filters_leave(
    history: History, many_runs: list[Run], filters: dict[str, Any]
) -> None:
    filters = {"status": ENDED} | filters
    expected = [run.task_id for run in history.runs(limit=1000, **filters) if run.tenant == "acme"]
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = history.runs(tenant="acme", limit=3, cursor=cursor, **filters)
        found += [run.task_id for run in page]
        cursor = page.cursor
        if cursor is None:
            break
    assert found == expected
    assert 0 < len(found) < len(many_runs)


def test_unfinished_runs_of_a_tenant_are_found_and_ended_ones_forgotten(
    queue: TaskQueue, history: History, many_runs: list[Run], redis_client: redis.Redis
) -> None:
    assert [run.task_id for run in history.runs("pending", tenant="acme")] == ["waiting"]
    claim_one(queue)
    assert [run.task_id for run in history.runs("running", tenant="acme")] == ["waiting"]
    history.prune(0)
    assert [run.task_id for run in history.runs(tenant="acme")] == ["waiting"]
    assert "runs" not in dump(redis_client)


def test_failed_runs_of_a_tenant_are_run_again_and_discarded(
    history: History, many_runs: list[Run]
) -> None:
    failed = [run for run in many_runs if run.status == "failed"]
    own = {run.task_id for run in failed if run.tenant == "acme"}
    retried = history.retry_matching(tenant="acme")
    assert {run_of(history, task_id).retry_of for task_id in retried} == own
    assert history.discard_matching(tenant="acme") == len(own)
    left = history.runs("failed", limit=1000)
    assert {run.task_id for run in left} == {run.task_id for run in failed} - own


# --- schedules ------------------------------------------------------------------------------------


def test_a_schedule_changes_its_tenant_and_loses_it(
    scheduler: TaskScheduler, redis_client: redis.Redis
) -> None:
    add(scheduler, tenant="acme")
    planned = get(scheduler, "nine").next_run
    scheduler.update_schedule("nine", tenant="blue", changed_by="carol")
    assert (get(scheduler, "nine").tenant, get(scheduler, "nine").next_run) == ("blue", planned)
    assert scheduler.changes("nine")[0].fields == {"tenant": ("acme", "blue")}
    scheduler.update_schedule("nine", tenant=None)
    assert get(scheduler, "nine").tenant is None
    assert "tenant_schedules" not in dump(redis_client)


def test_a_schedule_that_is_replaced_has_the_tenant_of_the_new_one(
    scheduler: TaskScheduler, redis_client: redis.Redis
) -> None:
    add(scheduler, tenant="acme")
    add(scheduler, tenant="blue", user_id="bob", on_conflict="replace")
    assert dump(redis_client)["tenant_schedules"] == {"blue\0bob\0nine": 0}
    add(scheduler, on_conflict="replace")
    assert "tenant_schedules" not in dump(redis_client)


def test_a_schedule_that_is_fired_and_paused_stays_with_its_tenant(
    scheduler: TaskScheduler, clock: ManualClock
) -> None:
    add(scheduler, tenant="acme")
    clock.set(at(5, 9))
    assert scheduler.tick().fired == 1
    scheduler.pause_schedule("nine")
    assert [each.schedule_id for each in scheduler.list_schedules(tenant="acme")] == ["nine"]
    assert scheduler.remove_schedule("nine")
    assert scheduler.list_schedules(tenant="acme") == []


def test_a_schedule_whose_tenant_cannot_be_is_unreadable(
    queue: TaskQueue, scheduler: TaskScheduler, redis_client: redis.Redis
) -> None:
    add(scheduler)
    tamper(redis_client, queue, "nine", tenant='x","y')
    with pytest.raises(BrokenRecord, match="tenant"):
        scheduler.get_schedule("nine")
    scheduler.remove_schedule("nine")


@pytest.mark.parametrize("spoilt", [7, True, {"a": 1}])
def test_a_state_whose_tenant_is_spoilt_stops_nothing(
    queue: TaskQueue, scheduler: TaskScheduler, redis_client: redis.Redis, spoilt: Any
) -> None:
    add(scheduler, tenant="acme")
    tamper(redis_client, queue, "nine", "schedule_state", tenant=spoilt)
    assert scheduler.update_schedule("nine", payload={"a": 1})
    assert [each.schedule_id for each in scheduler.list_schedules(tenant="acme")] == ["nine"]
    assert scheduler.remove_schedule("nine")


@pytest.mark.untidy
def test_what_the_index_has_of_another_is_not_taken_for_the_tenants_own(
    queue: TaskQueue, scheduler: TaskScheduler, redis_client: redis.Redis
) -> None:
    add(scheduler, "s", tenant="blue")
    redis_client.zadd(queue.keys["tenant_schedules"], {"acme\0alice\0s": 0})
    assert scheduler.list_schedules(tenant="acme") == []
    assert scheduler.export_schedules(tenant="acme") == []
    assert scheduler.bulk("remove", tenant="acme", dry_run=False).matched == 0


@pytest.fixture
def many_schedules(scheduler: TaskScheduler) -> list[ScheduledTask]:
    """Schedules of all tenants, users and names, some of them paused; ordered by user and id."""
    chosen = itertools.product(
        ("acme", "acme2", None), ("alice", "bob"), ("job", "mail", "job.x"), (True, False)
    )
    for number, (tenant, user, name, active) in enumerate(chosen):
        schedule_id = f"{'ab'[number % 2]}{number:02}"
        add(scheduler, schedule_id, user_id=user, name=name, tenant=tenant)
        if not active:
            scheduler.pause_schedule(schedule_id)
    return scheduler.list_schedules(limit=1000)


FILTERS: list[dict[str, Any]] = [
    {},
    {"user_id": "bob"},
    {"is_active": False},
    {"name_prefix": "job"},
    {"contains": "MAIL"},
    {"contains": "b1", "user_id": "bob"},
    {"name_prefix": "job", "contains": "x", "user_id": "alice", "is_active": True},
]


def all_pages(read: Callable[..., Page[ScheduledTask]], **filters: Any) -> list[str]:
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = read(cursor=cursor, limit=2, **filters)
        found += [task.schedule_id for task in page]
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_schedules_of_a_tenant_are_those_that_the_filters_leave(
    scheduler: TaskScheduler, many_schedules: list[ScheduledTask], filters: dict[str, Any]
) -> None:
    wanted = Filter(**filters)
    expected = [
        task.schedule_id
        for task in many_schedules
        if task.tenant == "acme" and wanted.matches(task)
    ]
    assert all_pages(scheduler.list_schedules, tenant="acme", **filters) == expected
    assert scheduler.bulk("pause", tenant="acme", **filters).matched == len(expected)
    assert 0 < len(expected) < len(many_schedules)


def test_a_cursor_does_not_lead_to_another_tenant(
    scheduler: TaskScheduler, many_schedules: list[ScheduledTask]
) -> None:
    cursor = scheduler.list_schedules(tenant="acme2", limit=1).cursor
    assert cursor is not None
    with pytest.raises(InvalidSchedule, match="another listing"):
        scheduler.list_schedules(cursor=cursor, tenant="acme")
    with pytest.raises(InvalidSchedule, match="another listing"):
        scheduler.list_schedules(cursor=cursor, tenant="acme2", user_id="bob")


def test_a_bulk_operation_acts_on_just_the_ids_that_match(
    scheduler: TaskScheduler, many_schedules: list[ScheduledTask]
) -> None:
    own = [task.schedule_id for task in many_schedules if task.tenant == "acme"]
    others = [task.schedule_id for task in many_schedules if task.tenant != "acme"]
    ids = [*own[:3], own[0], *others[:3], "nobody's"]
    assert scheduler.bulk("remove", ids=ids).matched == 6
    result = scheduler.bulk("remove", tenant="acme", ids=ids, dry_run=False)
    assert (result.matched, result.done) == (3, 3)
    left = [task.schedule_id for task in scheduler.list_schedules(limit=1000)]
    assert sorted(left) == sorted({*own, *others} - set(own[:3]))
    assert scheduler.bulk("remove", ids=[], dry_run=False).matched == 0


@pytest.mark.parametrize("ids", ["nine", [7], [""], ["a\0b"]], ids=str)
def test_ids_that_are_none_are_refused_before_anything_is_done(
    scheduler: TaskScheduler, ids: Any
) -> None:
    add(scheduler)
    with pytest.raises(InvalidSchedule, match="id"):
        scheduler.bulk("remove", ids=ids, dry_run=False)
    assert get(scheduler, "nine")


@pytest.mark.parametrize("filters", [{"name_prefix": "job."}, {"contains": "MAIL"}], ids=str)
def test_a_bulk_operation_finds_names_by_their_parts(
    scheduler: TaskScheduler, many_schedules: list[ScheduledTask], filters: dict[str, Any]
) -> None:
    matching = [task for task in many_schedules if Filter(**filters).matches(task)]
    assert scheduler.bulk("trigger", **filters).matched == len(matching) > 0


def test_documents_carry_the_tenant_out_and_in(
    scheduler: TaskScheduler, redis_client: redis.Redis, many_schedules: list[ScheduledTask]
) -> None:
    documents = scheduler.export_schedules(tenant="acme")
    assert {document["tenant"] for document in documents} == {"acme"}
    for document in documents:
        scheduler.remove_schedule(document["schedule_id"])
    assert len(scheduler.import_schedules(documents, dry_run=False).added) == len(documents)
    assert scheduler.export_schedules(tenant="acme") == documents
    moved = [{**document, "tenant": "blue"} for document in documents]
    changed = scheduler.import_schedules(moved, dry_run=False).changed
    assert changed[documents[0]["schedule_id"]] == {"tenant": ("acme", "blue")}
    assert scheduler.export_schedules(tenant="blue") == moved


def test_an_import_prunes_the_schedules_of_its_tenant_only(
    scheduler: TaskScheduler, many_schedules: list[ScheduledTask]
) -> None:
    kept, *others = scheduler.export_schedules(tenant="acme")
    diff = scheduler.import_schedules([kept], prune=True, tenant="acme", dry_run=False)
    assert diff.removed == [document["schedule_id"] for document in others]
    left = scheduler.list_schedules(limit=1000)
    assert len(left) == len(many_schedules) - len(others)
