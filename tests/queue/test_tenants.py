"""Tenants: whose users are whose, what carries a tenant, and what is found by one."""

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from helpers.schedules import THURSDAY, add, at, fire_id
from helpers.tasks import make_task, push
from helpers.world import World

from fairqueue.errors import (
    BrokenRecord,
    ConfigurationError,
    InvalidInput,
    InvalidSchedule,
    InvalidTask,
)
from fairqueue.history.filters import ENDED
from fairqueue.history.records import Run
from fairqueue.history.runs import History
from fairqueue.models import Page, ScheduledTask, Task, UserSettings
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules.search import ScheduleFilter
from fairqueue.worker.context import RunningTask, TaskContext
from fairqueue.worker.worker import Worker

START = THURSDAY


def run_of(world: World, task_id: str) -> Run:
    details = world.history.get(task_id)
    assert details is not None
    return details.run


def tenant_keys(world: World) -> dict[str, Any]:
    """What is stored of tenants."""
    keys = ("tenants", "tenant_users", "user_tenants", "tenant_schedules")
    return {key: content for key, content in world.dump().items() if key in keys}


# --- names ----------------------------------------------------------------------------------------

BAD_NAMES = ["", "a b", 'a"b', "é", "a\0b", "a/b", "x" * 65, "acme\n", 7, b"acme", ["acme"]]


@pytest.mark.parametrize("name", BAD_NAMES, ids=repr)
def test_a_name_that_is_none_is_refused_and_nothing_is_stored(world: World, name: Any) -> None:
    world.add()
    before = world.dump()
    calls: dict[type[Exception], list[Callable[[], object]]] = {
        InvalidTask: [lambda: Task.create(user_id="alice", tenant=name)],
        ConfigurationError: [
            lambda: world.queue.set_user("alice", tenant=name),
            lambda: world.queue.get_user("alice", tenant=name),
            lambda: world.queue.pause_user("alice", tenant=name),
            lambda: world.queue.set_tenant(name, weight=2.0),
            lambda: world.queue.get_tenant(name),
            lambda: world.queue.move_user("alice", name),
            lambda: world.queue.move_user("alice", "acme", tenant=name),
        ],
        InvalidSchedule: [
            lambda: world.add("new", tenant=name),
            lambda: world.scheduler.update_schedule("nine", tenant=name),
            lambda: world.scheduler.copy_schedule("nine", tenant=name),
            lambda: world.scheduler.list_schedules(tenant=name),
            lambda: world.scheduler.export_schedules(tenant=name),
            lambda: world.scheduler.bulk("remove", tenant=name, dry_run=False),
        ],
        InvalidInput: [lambda: world.history.runs(tenant=name)],
    }
    for error, refused in calls.items():
        for call in refused:
            with pytest.raises(error, match="tenant must be 1 to 64 letters"):
                call()
    assert world.dump() == before


@pytest.mark.parametrize("name", ["a", "Acme-2.x_", "x" * 64, "-", "..."])
def test_a_name_that_is_one_is_kept_as_it_is(world: World, name: str) -> None:
    world.push("t", tenant=name)
    assert world.queue.tenants_of("alice") == [name]
    assert run_of(world, "t").tenant == name


# --- users ----------------------------------------------------------------------------------------


def test_a_user_id_is_a_user_of_each_tenant_that_a_task_names(world: World) -> None:
    world.push("t1")
    assert world.queue.tenants_of("alice") == []
    world.push("t2", tenant="blue")
    world.push("t3", "t4", tenant="acme")
    world.push("t5", user_id="bob", tenant="blue")
    assert world.queue.tenants_of("alice") == ["acme", "blue"]
    assert world.queue.tenants_of("bob") == ["blue"]
    assert tenant_keys(world) == {
        "tenant_users": {"acme\0alice": 0, "blue\0alice": 0, "blue\0bob": 0},
        "user_tenants": {"alice\0acme": 0, "alice\0blue": 0, "bob\0blue": 0},
    }
    sizes = {tenant: world.queue.size("alice", tenant=tenant) for tenant in ("acme", "blue")}
    assert (world.queue.size("alice"), sizes) == (4, {"acme": 2, "blue": 1})


def test_tasks_that_are_pushed_together_each_name_their_own_tenant(queue: TaskQueue) -> None:
    tasks = [make_task(tenant=tenant) for tenant in (None, "acme", "blue")]
    queue.push_many([*tasks, make_task("bob", tenant="blue")])
    assert (queue.tenants_of("alice"), queue.tenants_of("bob")) == (["acme", "blue"], ["blue"])
    assert [queue.size("alice", tenant=tenant) for tenant in (None, "acme", "blue")] == [3, 1, 1]


def test_a_user_is_listed_with_each_tenant_that_a_schedule_names(world: World) -> None:
    world.add("a", tenant="acme")
    world.add("b", user_id="bob")
    assert (world.queue.tenants_of("alice"), world.queue.tenants_of("bob")) == (["acme"], [])
    world.scheduler.update_schedule("b", tenant="blue")
    world.scheduler.update_schedule("a", user_id="carol")
    assert world.queue.tenants_of("bob") == ["blue"]
    assert world.queue.tenants_of("carol") == ["acme"]
    assert world.queue.tenants_of("alice") == ["acme"]


def test_settings_are_of_the_pair_that_is_named(world: World) -> None:
    queue = world.queue
    assert queue.set_user("alice", tenant="blue", weight=2.0) == UserSettings(
        weight=2.0, tenant="blue"
    )
    queue.set_user("alice", max_running=3)
    assert queue.get_user("alice") == UserSettings(max_running=3)
    assert queue.get_user("alice", tenant="blue") == UserSettings(weight=2.0, tenant="blue")
    assert queue.get_user("alice", tenant="acme") == UserSettings(tenant="acme")
    queue.pause_user("alice", tenant="blue")
    world.push("plain")
    world.push("of blue", tenant="blue")
    assert [claim.task.task_id for claim in queue.claim("w", limit=9)] == ["plain"]
    assert queue.resume_user("alice", tenant="blue") == UserSettings(weight=2.0, tenant="blue")
    assert [claim.task.task_id for claim in queue.claim("w", limit=9)] == ["of blue"]


def test_a_user_is_moved_to_another_tenant_and_taken_away(world: World) -> None:
    queue = world.queue
    world.push("t", tenant="acme")
    queue.set_user("alice", tenant="acme", weight=2.0)
    assert queue.move_user("alice", "blue", tenant="acme") == 1
    assert world.info("t").tenant == "blue"
    assert queue.get_user("alice", tenant="blue") == UserSettings(weight=2.0, tenant="blue")
    assert queue.get_user("alice", tenant="acme") == UserSettings(tenant="acme")
    assert queue.move_user("alice", None, tenant="blue") == 1
    assert world.info("t").tenant is None
    assert queue.get_user("alice") == UserSettings(weight=2.0)
    assert [queue.size("alice", tenant=tenant) for tenant in ("acme", "blue")] == [0, 0]
    assert queue.size("alice") == 1
    world.check()


def test_a_move_to_where_the_user_is_already_is_refused(world: World) -> None:
    world.push("t", tenant="acme")
    before = world.dump()
    for tenant in ("acme", None):
        with pytest.raises(ConfigurationError, match=f"another tenant, not {tenant!r}"):
            world.queue.move_user("alice", tenant, tenant=tenant)
    assert world.dump() == before


def test_a_tenant_is_no_setting_of_the_user(world: World) -> None:
    world.queue.set_user("alice", tenant="acme")
    assert not world.dump().keys() & {"users", "user_names"}
    world.queue.set_user("alice", max_running=3)
    world.queue.set_user("bob", weight=2.0)
    state = world.dump()
    assert state["users"]["alice"] == {"max_running": 3}
    assert state["user_names"] == {"alice": 0, "bob": 0}
    world.queue.set_user("alice", max_running=None)
    assert world.dump()["user_names"] == {"bob": 0}


@pytest.mark.one_partition
def test_a_move_that_arrives_twice_undoes_no_other(world: World) -> None:
    queue = world.queue
    world.push("t")
    move: dict[str, Any] = {"user": "alice", "tenant": "", "to": "acme", "limit": 100}
    assert queue.link.run("move_user", op="o", **move) == 1
    assert queue.move_user("alice", None, tenant="acme") == 1
    assert queue.link.run("move_user", op="o", **move) == 1
    assert world.info("t").tenant is None


def test_a_task_without_a_tenant_does_not_touch_the_lists_of_tenants(world: World) -> None:
    def asked(task_id: str, **fields: Any) -> list[int]:
        before = world.count_commands()
        world.push(task_id, **fields)
        after = world.count_commands()
        return [after[name] - before[name] for name in ("zscore", "hget")]

    world.push("first")
    plain = asked("plain")
    assert not tenant_keys(world)
    assert plain < asked("of a tenant", tenant="acme")
    # Once the queue has a tenant, a task without one still does not look for its user's tenants.
    assert asked("plain too")[0] == plain[0]


# --- tasks and runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["user_id", "name", "triggered_by"])
@pytest.mark.parametrize(
    "text", ['x","tenant":"acme', ',"tenant":"acme', '\\","tenant":"acme"', "tenant"]
)
def test_no_text_of_a_task_is_taken_for_its_tenant(world: World, field: str, text: str) -> None:
    fields: dict[str, Any] = {"user_id": "alice", "task_id": "t"}
    world.queue.push(Task.create(**fields | {field: text}))
    world.queue.finish(world.claim_one())
    assert tenant_keys(world) == {}
    assert run_of(world, "t").tenant is None
    assert world.history.runs(tenant="acme") == []


def test_the_payload_of_a_schedule_is_not_taken_for_its_tenant(world: World) -> None:
    world.add(payload={"a": 1, "tenant": "acme"}, metadata={"a": 1, "tenant": "acme"})
    assert world.tick_at(at(5, 9)).fired == 1
    assert tenant_keys(world) == {}
    assert world.scheduler.list_schedules(tenant="acme") == []


def test_a_task_keeps_its_tenant_until_its_run_has_ended(world: World) -> None:
    claim = world.push_and_claim("t", tenant="acme")
    assert claim.task.tenant == "acme"
    assert RunningTask.of(TaskContext(claim.task)).tenant == "acme"
    world.queue.retry(claim, "not yet")
    assert run_of(world, "t").tenant == "acme"
    world.queue.finish(world.claim_one())
    assert [run.task_id for run in world.history.runs("succeeded", tenant="acme")] == ["t"]


def test_the_same_id_for_another_tenant_is_another_task(queue: TaskQueue) -> None:
    push(queue, "t", tenant="acme")
    push(queue, "t", tenant="acme")
    for other in (None, "blue"):
        with pytest.raises(InvalidTask, match="'t' is already used by"):
            push(queue, "t", tenant=other)
    assert queue.size() == 1


def test_a_task_is_pushed_for_a_tenant_by_its_function(world: World) -> None:
    worker = Worker(world.queue)

    @worker.task("build")
    def build(report: int) -> None: ...

    first = build.options(tenant="acme").push("alice", report=1)
    second = build.options(tenant="acme").options(tenant=None).push("alice", report=2)
    assert [run_of(world, task_id).tenant for task_id in (first, second)] == ["acme", None]


def test_each_task_of_a_schedule_has_its_tenant(world: World) -> None:
    world.add(tenant="acme")
    assert world.tick_at(at(5, 9)).fired == 1
    claim = world.claim_one()
    world.queue.bury(claim, "no")
    triggered = world.scheduler.trigger("nine")
    world.scheduler.backfill("nine", at(4, 0), at(5, 0))
    retried = world.history.retry(claim.task.task_id)
    fired, filled = fire_id("nine", at(5, 9)), fire_id("nine", at(4, 9))
    for task_id in (fired, triggered, filled, retried):
        details = world.history.get(task_id)
        assert details is not None
        assert details.task is not None
        assert (details.run.tenant, details.task.tenant) == ("acme", "acme"), task_id
    unfinished = world.history.runs(("pending", "retrying"), tenant="acme")
    assert {run.task_id for run in unfinished} == {triggered, filled, retried}


@pytest.fixture
def many_runs(world: World) -> list[Run]:
    """Runs of all tenants and statuses, newest end first."""
    chosen = itertools.product(("acme", "acme2", None), ("alice", "bob"), ("a", "b"), ENDED)
    for number, (tenant, user, name, status) in enumerate(chosen):
        claim = world.push_and_claim(f"t{number}", user_id=user, name=name, tenant=tenant)
        if status == "cancelled":
            world.queue.cancel(claim.task.task_id)
        if status in ("succeeded", "cancelled"):
            world.queue.finish(claim)
        else:
            world.queue.bury(claim, f"failure of {name}")
        world.advance(1)
    world.push("waiting", tenant="acme")
    world.push("other", tenant="blue")
    return world.history.runs(ENDED, limit=1000)


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


def test_only_unfinished_runs_of_a_tenant_are_found(world: World, many_runs: list[Run]) -> None:
    assert [run.task_id for run in world.history.runs("pending", tenant="acme")] == ["waiting"]
    world.claim_one()
    assert [run.task_id for run in world.history.runs("running", tenant="acme")] == ["waiting"]
    world.history.prune(0)
    assert [run.task_id for run in world.history.runs(tenant="acme")] == ["waiting"]
    assert "runs" not in world.dump()


def test_a_tenants_failed_runs_are_rerun_and_discarded(world: World, many_runs: list[Run]) -> None:
    failed = [run for run in many_runs if run.status == "failed"]
    own = {run.task_id for run in failed if run.tenant == "acme"}
    retried = world.history.retry_matching(tenant="acme")
    assert {run_of(world, task_id).retry_of for task_id in retried} == own
    assert world.history.discard_matching(tenant="acme") == len(own)
    left = world.history.runs("failed", limit=1000)
    assert {run.task_id for run in left} == {run.task_id for run in failed} - own


# --- schedules ------------------------------------------------------------------------------------


def test_a_schedule_changes_its_tenant_and_loses_it(world: World) -> None:
    world.add(tenant="acme")
    planned = world.schedule("nine").next_run
    world.scheduler.update_schedule("nine", tenant="blue", changed_by="carol")
    assert (world.schedule("nine").tenant, world.schedule("nine").next_run) == ("blue", planned)
    assert world.scheduler.changes("nine")[0].fields == {"tenant": ("acme", "blue")}
    world.scheduler.update_schedule("nine", tenant=None)
    assert world.schedule("nine").tenant is None
    assert "tenant_schedules" not in world.dump()


def test_a_schedule_that_is_replaced_has_the_tenant_of_the_new_one(world: World) -> None:
    world.add(tenant="acme")
    world.add(tenant="blue", user_id="bob", on_conflict="replace")
    assert world.dump()["tenant_schedules"] == {"blue\0bob\0nine": 0}
    world.add(on_conflict="replace")
    assert "tenant_schedules" not in world.dump()


def test_a_schedule_that_is_fired_and_paused_stays_with_its_tenant(world: World) -> None:
    world.add(tenant="acme")
    assert world.tick_at(at(5, 9)).fired == 1
    world.scheduler.pause_schedule("nine")
    assert [each.schedule_id for each in world.scheduler.list_schedules(tenant="acme")] == ["nine"]
    assert world.scheduler.remove_schedule("nine")
    assert world.scheduler.list_schedules(tenant="acme") == []


def test_a_schedule_whose_tenant_cannot_be_is_unreadable(world: World) -> None:
    world.add()
    world.tamper("nine", tenant='x","y')
    with pytest.raises(BrokenRecord, match="tenant"):
        world.scheduler.get_schedule("nine")
    world.scheduler.remove_schedule("nine")


@pytest.mark.parametrize("spoilt", [7, True, {"a": 1}])
def test_a_state_whose_tenant_is_spoilt_stops_nothing(world: World, spoilt: Any) -> None:
    world.add(tenant="acme")
    world.tamper("nine", "schedule_state", tenant=spoilt)
    assert world.scheduler.update_schedule("nine", payload={"a": 1})
    assert [each.schedule_id for each in world.scheduler.list_schedules(tenant="acme")] == ["nine"]
    assert world.scheduler.remove_schedule("nine")


@pytest.mark.untidy
def test_what_the_index_has_of_another_is_not_taken_for_the_tenants_own(world: World) -> None:
    world.add("s", tenant="blue")
    world.redis.zadd(world.keys["tenant_schedules"], {"acme\0alice\0s": 0})
    assert world.scheduler.list_schedules(tenant="acme") == []
    assert world.scheduler.export_schedules(tenant="acme") == []
    assert world.scheduler.bulk("remove", tenant="acme", dry_run=False).matched == 0


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
    wanted = ScheduleFilter(**filters)
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
    with pytest.raises(InvalidSchedule, match="not valid for this listing"):
        scheduler.list_schedules(cursor=cursor, tenant="acme")
    with pytest.raises(InvalidSchedule, match="not valid for this listing"):
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
def test_ids_that_are_none_are_refused_before_anything_is_done(world: World, ids: Any) -> None:
    world.add()
    with pytest.raises(InvalidSchedule, match="id"):
        world.scheduler.bulk("remove", ids=ids, dry_run=False)
    assert world.schedule("nine")


@pytest.mark.parametrize("filters", [{"name_prefix": "job."}, {"contains": "MAIL"}], ids=str)
def test_a_bulk_operation_finds_names_by_their_parts(
    scheduler: TaskScheduler, many_schedules: list[ScheduledTask], filters: dict[str, Any]
) -> None:
    matching = [task for task in many_schedules if ScheduleFilter(**filters).matches(task)]
    assert scheduler.bulk("trigger", **filters).matched == len(matching) > 0


def test_documents_carry_the_tenant_out_and_in(
    world: World, many_schedules: list[ScheduledTask]
) -> None:
    documents = world.scheduler.export_schedules(tenant="acme")
    assert {document["tenant"] for document in documents} == {"acme"}
    for document in documents:
        world.scheduler.remove_schedule(document["schedule_id"])
    assert len(world.scheduler.import_schedules(documents, dry_run=False).added) == len(documents)
    assert world.scheduler.export_schedules(tenant="acme") == documents
    moved = [{**document, "tenant": "blue"} for document in documents]
    changed = world.scheduler.import_schedules(moved, dry_run=False).changed
    assert changed[documents[0]["schedule_id"]] == {"tenant": ("acme", "blue")}
    assert world.scheduler.export_schedules(tenant="blue") == moved


def test_an_import_prunes_the_schedules_of_its_tenant_only(
    scheduler: TaskScheduler, many_schedules: list[ScheduledTask]
) -> None:
    kept, *others = scheduler.export_schedules(tenant="acme")
    diff = scheduler.import_schedules([kept], prune=True, tenant="acme", dry_run=False)
    assert diff.removed == [document["schedule_id"] for document in others]
    left = scheduler.list_schedules(limit=1000)
    assert len(left) == len(many_schedules) - len(others)
