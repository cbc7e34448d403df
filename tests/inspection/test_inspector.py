"""One way for every face to look at a queue and to act on it, with roles, tenants and an audit."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
from helpers.schedules import THURSDAY, at
from helpers.state import state_of
from helpers.tasks import claim_one, make_task
from helpers.world import World

from fairqueue.access.credentials import Actor
from fairqueue.clock import ManualClock
from fairqueue.errors import (
    ConfigurationError,
    FairQueueError,
    Forbidden,
    InvalidInput,
    InvalidSchedule,
    StaleVersion,
    UnknownSchedule,
    UnknownTask,
    UnknownTenant,
    UnknownUser,
    UnknownWorker,
)
from fairqueue.history.filters import ENDED
from fairqueue.inspection import Inspector
from fairqueue.inspection.masking import MASK
from fairqueue.inspection.system import OLD_WAIT_S
from fairqueue.link.owners import Owner
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import LogLine, Report
from fairqueue.queue.workers import GONE_AFTER_S
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.stats.overview import OverviewStore

ADMIN = Actor(name="ann")
OPERATOR = Actor(name="ole", role="operator")
VIEWER = Actor(name="vic", role="viewer")
NORTH = Actor(name="nora", tenant="north")
SOUTH = Actor(name="sam", tenant="south")

START = THURSDAY


@pytest.fixture
def inspector(queue: TaskQueue) -> Inspector:
    return Inspector(queue, ADMIN)


@pytest.fixture
def north(inspector: Inspector) -> Inspector:
    return inspector.acting_as(NORTH)


@pytest.fixture
def south(inspector: Inspector) -> Inspector:
    return inspector.acting_as(SOUTH)


def add(inspector: Inspector, schedule_id: str = "nine", **fields: Any) -> str:
    given = {"cron_expr": "0 9 * * *", "user_id": "alice"} | fields
    return inspector.schedules.add(schedule_id=schedule_id, **given)


def fail(world: World, task_id: str = "t", **fields: Any) -> str:
    """A task that has failed for good."""
    world.queue.push(make_task(fields.pop("user_id", "alice"), task_id, **fields))
    world.queue.bury(world.claim_one(), "it broke")
    return task_id


def actions(inspector: Inspector) -> list[tuple[str, str, str]]:
    """What the audit log says, oldest first."""
    return [(e.actor, e.action, e.outcome) for e in inspector.audit.list()][::-1]


# --- schedules ------------------------------------------------------------------------------------


def test_a_schedule_shows_its_state_and_outcomes(inspector: Inspector, queue: TaskQueue) -> None:
    add(inspector)
    task_id = inspector.schedules.trigger("nine")
    queue.finish(claim_one(queue), {"sent": 3})

    (view,) = inspector.schedules.list()

    assert (view.schedule.schedule_id, view.state) == ("nine", "active")
    assert view.sentence == "At 09:00 (UTC)"
    assert [(each.task_id, each.status) for each in view.outcomes] == [(task_id, "succeeded")]
    assert inspector.schedules.get("nine") == view


def test_states_have_words(inspector: Inspector) -> None:
    add(inspector, "on")
    add(inspector, "off")
    inspector.schedules.pause("off", note="holidays")
    add(inspector, "once", cron_expr=None, at=THURSDAY + timedelta(hours=1))

    states = {view.schedule.schedule_id: view.state for view in inspector.schedules.list()}

    assert states == {"on": "active", "off": "paused", "once": "active"}


def test_secrets_are_masked_wherever_a_schedule_is_shown(inspector: Inspector) -> None:
    add(inspector, payload={"api_key": "k-123", "to": "bob", "deep": [{"password": "p-456"}]})
    inspector.schedules.update("nine", {"payload": {"api_key": "k-789", "to": "eve"}})

    shown = repr(inspector.schedules.get("nine")) + repr(inspector.schedules.changes("nine"))
    shown += repr(inspector.schedules.list()) + repr(inspector.schedules.upcoming())
    shown += repr(inspector.audit.list())

    assert not [secret for secret in ("k-123", "p-456", "k-789") if secret in shown]
    assert inspector.schedules.get("nine").schedule.payload == {"api_key": MASK, "to": "eve"}


def test_what_is_masked_in_an_edit_stays_as_it_is(inspector: Inspector) -> None:
    add(inspector, payload={"api_key": "k-123", "to": "bob"})

    inspector.schedules.update("nine", {"payload": {"api_key": MASK, "to": "eve"}})

    stored = inspector.stores.schedules.get_schedule("nine")
    assert stored is not None
    assert stored.payload == {"api_key": "k-123", "to": "eve"}


def test_an_edit_of_what_somebody_else_has_changed_is_refused(inspector: Inspector) -> None:
    add(inspector)
    etag = inspector.schedules.get("nine").etag
    inspector.schedules.update("nine", {"timezone": "Europe/London"}, if_match=etag)

    with pytest.raises(StaleVersion, match="was changed since you read it"):
        inspector.schedules.update("nine", {"timezone": "Asia/Tokyo"}, if_match=etag)
    with pytest.raises(StaleVersion):
        inspector.schedules.remove("nine", if_match=etag)

    assert inspector.schedules.get("nine").schedule.timezone == "Europe/London"


def test_a_run_does_not_make_the_etag_stale(inspector: Inspector, clock: ManualClock) -> None:
    add(inspector)
    etag = inspector.schedules.get("nine").etag
    clock.set(at(5, 9))
    assert TaskScheduler(inspector.queue).tick().fired == 1

    assert inspector.schedules.get("nine").etag != etag
    inspector.schedules.update("nine", {"timezone": "Asia/Tokyo"}, if_match=etag)


def test_a_preview_needs_no_redis_and_warns_of_clock_changes() -> None:
    preview = Inspector(TaskQueue.from_url("redis://127.0.0.1:1/0")).schedules.preview

    shown = preview("30 1 * * *", timezone="Europe/London", after=at(28, 12), count=2)

    assert shown.sentence == "At 01:30 (Europe/London)"
    assert [run.isoformat() for run in shown.runs] == [
        "2026-03-29T02:00:00+01:00",
        "2026-03-30T01:30:00+01:00",
    ]
    assert any("2026-03-29" in warning for warning in shown.warnings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cron_expr": "0 9 * *"}, "'0 9 \\* \\*'"),
        ({"cron_expr": "0 9 * * *", "timezone": "Mars/Base"}, "Mars/Base"),
        ({}, "pass one of them"),
        ({"cron_expr": "* * * * *", "every": 60}, "pass one of them"),
        ({"every": -1}, "every"),
        ({"cron_expr": "* * * * *", "count": 0}, "count"),
    ],
)
def test_a_bad_preview_is_named(inspector: Inspector, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        inspector.schedules.preview(**given)


def test_many_schedules_are_counted_before_anything_is_done(inspector: Inspector) -> None:
    for number in range(3):
        add(inspector, f"report-{number}", name="reports.build")
    add(inspector, "other", name="mails.send")

    counted = inspector.schedules.bulk("pause", contains="report")
    done = inspector.schedules.bulk("pause", contains="report", dry_run=False, note="quiet")

    assert (counted.matched, counted.done, done.done) == (3, 0, 3)
    assert {v.schedule.schedule_id for v in inspector.schedules.list(is_active=True)} == {"other"}
    assert inspector.audit.list(action="schedules.pause")[0].details["done"] == 3


def test_a_long_payload_that_was_changed_is_not_shown_in_parts(inspector: Inspector) -> None:
    add(inspector, payload={"api_key": "k-123", "text": "x" * 500})
    inspector.schedules.update("nine", {"payload": {"api_key": "k-456", "text": "y" * 500}})

    change, making = inspector.schedules.changes("nine")

    assert change.fields["payload"] == (MASK, MASK)
    assert making.fields["payload"] == (None, MASK)


def test_what_a_bulk_action_selects_by_it_cannot_change(inspector: Inspector) -> None:
    with pytest.raises(InvalidSchedule, match="user_id cannot be changed for many"):
        inspector.schedules.bulk("update", changes={"user_id": "bob"})


def test_bulk_actions_may_be_of_chosen_ones(inspector: Inspector) -> None:
    for schedule_id in ("a", "b", "c"):
        add(inspector, schedule_id)

    result = inspector.schedules.bulk("remove", ids=["a", "c", "gone"], dry_run=False)

    assert result.done == 2
    assert [view.schedule.schedule_id for view in inspector.schedules.list()] == ["b"]


def test_runs_of_a_schedule_are_counted_by_day(inspector: Inspector, world: World) -> None:
    world.queue.configure(keep_finished_for=timedelta(days=7))
    add(inspector)
    inspector.schedules.trigger("nine")
    world.queue.finish(world.claim_one())
    world.advance(timedelta(days=1))
    inspector.schedules.trigger("nine")
    world.queue.bury(world.claim_one(), "no")

    days = inspector.schedules.history_chart("nine", days=3)

    assert [(day.day.day, day.succeeded, day.failed) for day in days] == [
        (4, 0, 0),
        (5, 1, 0),
        (6, 0, 1),
    ]


def test_log_lines_of_a_schedules_runs_are_put_together(inspector: Inspector, world: World) -> None:
    add(inspector)
    task_id = inspector.schedules.trigger("nine")
    claim = world.claim_one()
    lines = LogLine(1000, "info", "began"), LogLine(2000, "error", "no paper")
    world.queue.finish_many([(claim, None, Report(seconds=1.0, log=lines))])

    logged = inspector.schedules.logs("nine")

    assert [(e.task_id, e.level, e.message) for e in logged] == [
        (task_id, "error", "no paper"),
        (task_id, "info", "began"),
    ]
    assert inspector.runs.logs(task_id) == logged[::-1]


# --- runs, failed, tasks --------------------------------------------------------------------------


def test_arguments_and_results_of_runs_are_masked(inspector: Inspector, queue: TaskQueue) -> None:
    task_id = inspector.tasks.push(user_id="alice", payload={"token": "s3cret", "n": 1})
    queue.finish(claim_one(queue), {"secret": "s3cret"})

    details = inspector.runs.get(task_id)

    assert "s3cret" not in repr(details) + repr(inspector.runs.list())
    assert details.task is not None
    assert details.task.payload == {"token": MASK, "n": 1}


def test_a_failed_run_is_edited_and_keeps_its_secrets(inspector: Inspector, world: World) -> None:
    fail(world, payload={"token": "s3cret", "n": 1})

    new_id = inspector.runs.edit_and_retry("t", {"token": MASK, "n": 2})

    task = world.claim_one().task
    assert (task.task_id, task.payload) == (new_id, {"token": "s3cret", "n": 2})
    assert inspector.runs.get(new_id).run.triggered_by == "ann"


def test_all_failed_runs_that_match_are_run_again_once(inspector: Inspector, world: World) -> None:
    for task_id in ("a", "b"):
        fail(world, task_id, name="reports.build")
    fail(world, "c", name="mails.send")
    told: list[tuple[int, int]] = []

    counted = inspector.failed.retry_many(name="reports.build")
    done = inspector.failed.retry_many(
        name="reports.build", dry_run=False, progress=lambda n, of: told.append((n, of))
    )
    again = inspector.failed.retry_many(name="reports.build", dry_run=False)

    assert (counted.matched, done.done, again.matched) == (2, 2, 0)
    assert told == [(1, 2), (2, 2)]
    assert world.queue.size() == 2


def test_failed_runs_are_run_again_page_by_page(inspector: Inspector, world: World) -> None:
    for task_id in ("a", "b", "c"):
        fail(world, task_id)
    inspector.failed.retry("b")
    before = len(inspector.audit.list())

    first, cursor = inspector.failed.retry_page(limit=2)
    second, end = inspector.failed.retry_page(limit=2, cursor=cursor)
    again, _ = inspector.failed.retry_page()

    assert (first.done, second.done, end) == (1, 1, None)
    assert (again.matched, world.queue.size()) == (0, 3)
    assert len(inspector.audit.list()) == before + 2  # where nothing was done, nothing is said


def test_a_full_queue_stops_a_page_for_now(inspector: Inspector, world: World) -> None:
    for task_id in ("a", "b", "c"):
        fail(world, task_id)
    world.queue.configure(max_waiting=1)

    stopped, _ = inspector.failed.retry_page()
    world.queue.configure(max_waiting=0)
    rest, _ = inspector.failed.retry_page()

    assert (stopped.done, stopped.failed, stopped.left) == (1, 1, 1)
    assert rest.done == 2


def test_failed_runs_are_discarded_page_by_page(inspector: Inspector, world: World) -> None:
    for task_id in ("a", "b", "c"):
        fail(world, task_id)

    first, cursor = inspector.failed.discard_page(limit=2)
    second, end = inspector.failed.discard_page(limit=2, cursor=cursor)

    assert (first.done, second.done, end) == (2, 1, None)
    assert inspector.failed.list() == []


@pytest.mark.parametrize("act", ["retry_page", "discard_page"])
def test_a_viewer_may_not_see_failed_runs(inspector: Inspector, world: World, act: str) -> None:
    fail(world)

    with pytest.raises(Forbidden):
        getattr(inspector.acting_as(VIEWER).failed, act)()

    assert world.queue.size() == 0
    assert len(inspector.failed.list()) == 1


def test_failed_runs_are_discarded(inspector: Inspector, world: World) -> None:
    for task_id in ("a", "b", "c"):
        fail(world, task_id)

    assert inspector.failed.discard("a") is True
    assert inspector.failed.discard_many(dry_run=False).done == 2
    assert inspector.failed.list() == []


def test_a_task_is_pushed_explained_moved_and_cancelled(inspector: Inspector, world: World) -> None:
    task_id = inspector.tasks.push(user_id="alice", name="mails.send")

    explanation = inspector.tasks.explain(task_id)

    assert explanation is not None
    assert explanation.state == "ready"
    assert inspector.tasks.reschedule(task_id, delay=60.0) is True
    entry = inspector.audit.list()[0]
    assert (entry.action, entry.target) == ("task.reschedule", task_id)
    expected = {"user_id": "alice", "at": None, "delay": 60.0, "moved": True}
    assert entry.details == expected
    assert [run.task_id for run in inspector.tasks.list()] == [task_id]
    assert inspector.tasks.cancel(task_id) is True
    assert inspector.runs.get(task_id).run.status == "cancelled"


def test_the_schedules_that_act_next_are_as_many_as_asked_for(inspector: Inspector) -> None:
    for hour in range(9, 14):
        add(inspector, f"at-{hour}", cron_expr=f"0 {hour} * * *")
    upcoming = inspector.schedules.upcoming(3)
    assert [each.schedule.schedule_id for each in upcoming] == ["at-9", "at-10", "at-11"]
    glance = OverviewStore(inspector.queue.link)
    assert [name for name, _ in glance.due_soon(2, skip=2)] == ["at-11", "at-12"]
    assert [name for name, _ in glance.due_soon(10, skip=4)] == ["at-13"]
    assert [name for name, _ in glance.due_soon(1)] == ["at-9"]


# --- users ----------------------------------------------------------------------------------------


def test_users_are_listed_by_backlog_and_by_name(inspector: Inspector, queue: TaskQueue) -> None:
    for user_id, count in (("bob", 1), ("alice", 3), ("carol", 2)):
        queue.push_many(make_task(user_id) for _ in range(count))

    busiest = inspector.users.list(limit=2)
    rest = inspector.users.list(limit=2, cursor=busiest.cursor)
    by_name = inspector.users.list(order="name")

    assert [(u.user_id, u.backlog) for u in [*busiest, *rest]] == [
        ("alice", 3),
        ("carol", 2),
        ("bob", 1),
    ]
    assert rest.cursor is None
    assert [user.user_id for user in by_name] == ["alice", "bob", "carol"]


def test_shares_are_those_of_the_runs_that_ended(inspector: Inspector, queue: TaskQueue) -> None:
    queue.set_user("alice", weight=3.0)
    for user_id in ("alice", "bob"):
        queue.push_many(make_task(user_id) for _ in range(10))
    queue.finish_many((claim, None) for claim in queue.claim("w", limit=8))

    alice, bob = inspector.users.get("alice"), inspector.users.get("bob")

    assert (alice.received, bob.received) == (0.75, 0.25)
    assert (alice.entitled, bob.entitled) == (0.75, 0.25)
    series = inspector.users.shares()
    assert sum(series.counts[Owner("alice")]) == 6


def test_past_shares_do_not_move_as_time_passes(inspector: Inspector, world: World) -> None:
    world.queue.push_many(make_task("alice") for _ in range(3))
    world.queue.push(make_task("bob"))
    world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=4))

    before = inspector.users.service("alice")
    world.advance(60)
    after = inspector.users.service("alice")

    ended = [
        {at: n for at, n in zip(series.times, series.counts[Owner("alice")], strict=True) if n}
        for series in (before, after)
    ]
    assert ended[0] == ended[1]
    assert list(ended[0].values()) == [3]
    assert sum(after.others) == 1
    assert {(at - after.times[0]).total_seconds() % 120 for at in after.times} == {0.0}
    assert all(at.timestamp() % 120 == 0 for at in after.times)


def test_a_user_is_told_why_its_next_task_waits(inspector: Inspector, queue: TaskQueue) -> None:
    assert inspector.users.next_wait("alice") is None
    queue.push(make_task("alice"))
    urgent = make_task("alice", priority=6)
    queue.push(urgent)

    explanation = inspector.users.next_wait("alice")

    assert explanation is not None
    assert (explanation.task_id, explanation.own_tasks_ahead) == (urgent.task_id, 0)


def test_a_backlog_is_dropped_after_it_was_counted(inspector: Inspector, queue: TaskQueue) -> None:
    queue.push_many(make_task("noisy") for _ in range(600))
    queue.push(make_task("quiet"))

    assert inspector.users.purge("noisy") == 600
    assert queue.size("noisy") == 600
    assert inspector.users.purge("noisy", dry_run=False) == 600

    assert (queue.size("noisy"), queue.size("quiet")) == (0, 1)


def test_a_user_is_paused_and_weighed(inspector: Inspector, queue: TaskQueue) -> None:
    queue.push(make_task("alice"))

    inspector.users.pause("alice")
    assert inspector.users.get("alice").state == "paused"
    inspector.users.resume("alice")
    settings = inspector.users.set("alice", weight=2.0, max_running=5)

    assert (settings.weight, settings.max_running, settings.paused) == (2.0, 5, False)


def test_an_unknown_user_is_unknown(inspector: Inspector) -> None:
    with pytest.raises(UnknownUser, match="'nobody'"):
        inspector.users.get("nobody")


# --- tenants --------------------------------------------------------------------------------------


def test_what_an_actor_of_a_tenant_makes_belongs_to_it(north: Inspector, world: World) -> None:
    add(north, user_id="nils")
    world.clock.set(at(5, 9))
    TaskScheduler(north.queue).tick()
    world.queue.finish(world.claim_one())

    (run,) = north.runs.list()

    assert (north.schedules.get("nine").tenant, run.tenant) == ("north", "north")
    assert world.queue.tenants_of("nils") == ["north"]


def test_another_tenants_things_are_not_there(
    inspector: Inspector, north: Inspector, south: Inspector, world: World
) -> None:
    add(north, "cold", user_id="nils")
    add(inspector, "shared", user_id="root")
    failed = fail(world, "t", user_id="nils", tenant="north")

    looks: list[tuple[Callable[[], object], type[FairQueueError]]] = [
        (lambda: south.schedules.get("cold"), UnknownSchedule),
        (lambda: south.schedules.get("shared"), UnknownSchedule),
        (lambda: south.schedules.trigger("cold"), UnknownSchedule),
        (lambda: south.schedules.remove("cold"), UnknownSchedule),
        (lambda: south.schedules.update("cold", {"timezone": "UTC"}), UnknownSchedule),
        (lambda: south.runs.get(failed), UnknownTask),
        (lambda: south.failed.retry(failed), UnknownTask),
        (lambda: south.failed.discard(failed), UnknownTask),
        (lambda: south.runs.cancel(failed), UnknownTask),
        (lambda: south.users.get("nils"), UnknownUser),
        (lambda: south.users.service("nils"), UnknownUser),
        (lambda: south.users.next_wait("nils"), UnknownUser),
        (lambda: south.users.pause("nils"), UnknownUser),
        (lambda: south.users.purge("nils", dry_run=False), UnknownUser),
    ]
    for look, error in looks:
        with pytest.raises(error):
            look()
    assert south.schedules.list() == []
    assert south.runs.list() == []
    assert south.failed.list() == []
    assert south.failed.groups() == []
    assert south.users.list() == []
    assert south.users.list(order="name") == []
    assert south.schedules.bulk("remove", dry_run=False).matched == 0
    assert south.failed.discard_many(dry_run=False).matched == 0
    assert [view.schedule.schedule_id for view in north.schedules.list()] == ["north~cold"]
    assert [group.count for group in north.failed.groups()] == [1]


def test_a_tenant_cannot_take_users_or_ids_of_others(
    inspector: Inspector, north: Inspector, south: Inspector, queue: TaskQueue
) -> None:
    add(north, "cold", user_id="nils")
    queue.push(make_task("root"))  # of no tenant, but known

    attempts: list[tuple[Callable[[], object], type[FairQueueError]]] = [
        (lambda: add(south, "warm", user_id="sue", tenant="north"), Forbidden),
        (lambda: south.tasks.push(user_id="sue", tenant="north"), Forbidden),
        (lambda: south.users.get("nils", tenant="north"), Forbidden),
        (lambda: south.users.pause("root"), UnknownUser),
        (lambda: south.schedules.list(tenant="north"), Forbidden),
        (lambda: south.users.set("nils", weight=9.0), Forbidden),
    ]
    for attempt, error in attempts:
        with pytest.raises(error):
            attempt()
    rule = {"schedule_id": "cold", "cron_expr": "* * * * *", "user_id": "sue"}
    assert south.schedules.add(on_conflict="replace", **rule) == "south~cold"
    assert south.schedules.import_([rule], dry_run=False).unchanged == ["south~cold"]
    south.schedules.remove("cold")
    add(south, "warm", user_id="sue")
    with pytest.raises(Forbidden):
        south.schedules.update("warm", {"tenant": "north"})
    assert [view.tenant for view in inspector.schedules.list()] == ["north", "south"]


def test_a_user_of_two_tenants_is_a_user_of_each(
    north: Inspector, south: Inspector, inspector: Inspector, queue: TaskQueue
) -> None:
    north.tasks.push(user_id="nils")
    south.tasks.push(user_id="nils")
    queue.push(make_task("nils"))

    south.users.pause("nils", note="theirs alone")
    assert south.users.purge("nils", dry_run=False) == 1

    seen = [inspector.users.get("nils", tenant=each) for each in ("north", "south", None)]
    assert [(info.backlog, info.settings.paused) for info in seen] == [
        (1, False),
        (0, True),
        (1, False),
    ]
    assert north.users.get("nils").settings.pause_note is None


@pytest.mark.parametrize(
    "look",
    [
        lambda i: i.system.snapshot(),
        lambda i: i.system.series(),
        lambda i: i.system.redis(),
        lambda i: i.system.settings(),
        lambda i: i.system.configure(max_attempts=3),
        lambda i: i.system.limits(),
        lambda i: i.system.prune(10),
        lambda i: i.workers.list(),
        lambda i: i.workers.drain("w"),
        lambda i: i.system.pools(),
        lambda i: i.system.key_limits(),
        lambda i: i.system.set_limit("account:*", slots=1),
        lambda i: i.users.move("nils", "south"),
        lambda i: i.tenants.set("north", weight=1000.0),
        lambda i: i.tenants.resume("north"),
        lambda i: i.users.set("nils", weight=1000.0),
        lambda i: i.keys.list(),
        lambda i: i.keys.create("k", "viewer"),
    ],
)
def test_tenants_see_no_shared_data(north: Inspector, look: Callable[[Inspector], object]) -> None:
    with pytest.raises(Forbidden, match="tenant 'north'"):
        look(north)


def test_the_overview_of_a_tenant_has_its_own_numbers_only(
    inspector: Inspector, north: Inspector, world: World
) -> None:
    add(north, "cold", user_id="nils")
    add(inspector, "other", user_id="root")
    fail(world, "t", user_id="nils", tenant="north")
    fail(world, "u", user_id="root")

    overview = north.system.overview()

    assert (overview.schedules, overview.failures_last_hour) == (1, 1)
    assert (overview.ready, overview.workers, overview.snapshot) == (None, None, None)
    assert inspector.system.overview().failures_last_hour == 2


# --- roles ----------------------------------------------------------------------------------------

Act = Callable[[Inspector], object]

NINE = {"schedule_id": "nine", "cron_expr": "0 10 * * *", "user_id": "alice"}

ENDPOINTS: dict[str, Act] = {
    "schedule.pause": lambda i: i.schedules.pause("nine"),
    "schedule.resume": lambda i: i.schedules.resume("nine"),
    "schedule.trigger": lambda i: i.schedules.trigger("nine"),
    "schedule.backfill": lambda i: i.schedules.backfill("nine", at(1, 0), at(3, 0), dry_run=False),
    "schedules.pause": lambda i: i.schedules.bulk("pause", dry_run=False),
    "task.push": lambda i: i.tasks.push(user_id="alice"),
    "task.reschedule": lambda i: i.tasks.reschedule("waits", delay=60.0),
    "run.cancel": lambda i: i.runs.cancel("waits"),
    "run.retry": lambda i: i.failed.retry("dead"),
    "run.discard": lambda i: i.failed.discard("dead"),
    "runs.retry": lambda i: i.failed.retry_many(dry_run=False),
    "runs.discard": lambda i: i.failed.discard_many(dry_run=False),
    "user.pause": lambda i: i.users.pause("alice"),
    "user.resume": lambda i: i.users.resume("alice"),
    "tenant.pause": lambda i: i.tenants.pause("north"),
    "tenant.resume": lambda i: i.tenants.resume("north"),
}
ADMINISTRATION: dict[str, Act] = {
    "schedule.add": lambda i: add(i, "new"),
    "schedule.copy": lambda i: i.schedules.copy("nine"),
    "schedule.update": lambda i: i.schedules.update("nine", {"timezone": "Asia/Tokyo"}),
    "schedule.remove": lambda i: i.schedules.remove("nine"),
    "schedules.remove": lambda i: i.schedules.bulk("remove", dry_run=False),
    "schedules.export": lambda i: i.schedules.export(),
    "schedules.import": lambda i: i.schedules.import_([NINE], prune=True, dry_run=False),
    "user.set": lambda i: i.users.set("alice", weight=2.0),
    "user.purge": lambda i: i.users.purge("alice", dry_run=False),
    "settings.change": lambda i: i.system.configure(max_attempts=3),
    "user.move": lambda i: i.users.move("alice", "north"),
    "tenant.set": lambda i: i.tenants.set("north", max_running=3),
    "tenant.purge": lambda i: i.tenants.purge("north", dry_run=False),
    "limits.change": lambda i: i.system.set_limits("mails", slots=2),
    "key_limits.change": lambda i: i.system.set_limit("account:*", slots=2),
    "key_limits.remove": lambda i: i.system.remove_limit("line"),
    "runs.prune": lambda i: i.system.prune(0, dry_run=False),
    "key.create": lambda i: i.keys.create("k", "viewer"),
    "key.revoke": lambda i: i.keys.revoke("0" * 16),
}


@pytest.fixture
def furnished(inspector: Inspector, world: World) -> Inspector:
    """A queue with one of each; entries of the audit log are ordered by time."""
    fail(world, "dead")
    add(inspector)
    world.queue.set_limit("line", slots=1)
    world.queue.push(make_task("alice", "waits"))
    world.advance(1)
    return inspector


@pytest.mark.parametrize("action", [*ENDPOINTS, *ADMINISTRATION])
def test_a_viewer_changes_nothing(
    furnished: Inspector, redis_client: redis.Redis, action: str
) -> None:
    before = state_of(redis_client)

    with pytest.raises(Forbidden, match="'vic' has the role viewer"):
        (ENDPOINTS | ADMINISTRATION)[action](furnished.acting_as(VIEWER))

    assert state_of(redis_client) == before


@pytest.mark.parametrize("action", ADMINISTRATION)
def test_an_operator_administers_nothing(
    furnished: Inspector, redis_client: redis.Redis, action: str
) -> None:
    before = state_of(redis_client)

    with pytest.raises(Forbidden, match="need the role admin"):
        ADMINISTRATION[action](furnished.acting_as(OPERATOR))

    assert state_of(redis_client) == before


@pytest.mark.parametrize("action", ENDPOINTS)
def test_what_an_operator_does_is_written_down(furnished: Inspector, action: str) -> None:
    ENDPOINTS[action](furnished.acting_as(OPERATOR))

    assert actions(furnished)[-1] == ("ole", action, "done")


@pytest.mark.parametrize("action", ADMINISTRATION)
@pytest.mark.one_partition
def test_what_an_admin_does_is_written_down(furnished: Inspector, action: str) -> None:
    ADMINISTRATION[action](furnished)

    assert actions(furnished)[-1] == ("ann", action, "done")


@pytest.mark.one_partition
def test_what_was_changed_of_tenants_is_written_down(furnished: Inspector, world: World) -> None:
    world.push("n1", "n2", user_id="nils", tenant="north")

    furnished.tenants.set("north", weight=2.0, rate=None)
    furnished.users.set("nils", tenant="north", max_running=1)
    assert furnished.users.move("nils", "south", tenant="north") == 2
    furnished.system.set_limit("account:*", slots=2, ordered=True)
    assert furnished.tenants.purge("south", dry_run=False) == 2

    written = {each.action: each for each in furnished.audit.list(limit=5)}
    assert {action: (each.target, each.tenant) for action, each in written.items()} == {
        "tenant.set": ("north", "north"),
        "user.set": ("nils", "north"),
        "user.move": ("nils", "north"),
        "key_limits.change": ("account:*", None),
        "tenant.purge": ("south", "south"),
    }
    assert written["tenant.set"].details == {"weight": 2.0, "rate": None}
    assert written["user.move"].details == {"to": "south", "moved": 2}
    assert written["key_limits.change"].details == {"slots": 2, "ordered": True}


def test_an_actor_of_one_tenant_meets_no_other(north: Inspector, world: World) -> None:
    """A key of a tenant sees, pauses and purges its own users, whatever ids others use."""
    for tenant in ("north", "south", None):
        world.push(f"of {tenant}", user_id="nils", tenant=tenant)
    world.queue.set_user("nils", tenant="south", weight=7)
    refused: list[Act] = [
        lambda i: i.tenants.get("south"),
        lambda i: i.tenants.overview("south"),
        lambda i: i.tenants.service("south"),
        lambda i: i.tenants.purge("south"),
        lambda i: i.users.get("nils", tenant="south"),
        lambda i: i.users.purge("nils", tenant="south"),
        lambda i: i.users.pause("nils", tenant="south"),
        lambda i: i.users.quote("nils", tenant="south"),
        lambda i: i.users.tenants_of("nils"),
        lambda i: i.tenants.pause("north"),
        lambda i: i.tenants.pause("south"),
    ]
    before = state_of(world.redis)
    for act in refused:
        with pytest.raises((Forbidden, UnknownTenant)):
            act(north)
    assert state_of(world.redis) == before
    assert [info.tenant for info in north.tenants.list()] == ["north"]
    assert north.users.get("nils").settings.weight == 1.0
    assert [run.task_id for run in north.runs.list(user_id="nils")] == ["of north"]
    assert north.users.purge("nils", dry_run=False) == 1
    assert world.places() == {"cancelled": ["of north"], "ready": ["of None", "of south"]}


def test_looking_is_not_written_down(furnished: Inspector) -> None:
    before = actions(furnished)
    viewer = furnished.acting_as(VIEWER)

    viewer.schedules.list()
    viewer.schedules.get("nine")
    viewer.runs.get("dead")
    viewer.users.list()
    viewer.system.overview()
    viewer.system.attention()
    viewer.schedules.backfill("nine", at(1, 0), at(3, 0))
    viewer.users.purge("alice")

    assert actions(furnished) == before


def test_a_change_that_fails_is_written_down_with_its_reason(furnished: Inspector) -> None:
    with pytest.raises(InvalidSchedule, match="'Mars/Base'"):
        furnished.schedules.update("nine", {"timezone": "Mars/Base"})

    (entry,) = furnished.audit.list(limit=1)
    assert (entry.action, entry.target, entry.outcome) == ("schedule.update", "nine", "failed")
    assert entry.error is not None
    assert "Mars/Base" in entry.error


# --- the whole ------------------------------------------------------------------------------------


def test_the_overview_has_the_numbers_of_the_queue(furnished: Inspector) -> None:
    overview = furnished.system.overview()

    assert (overview.ready, overview.dead, overview.running) == (1, 1, 0)
    assert (overview.schedules, overview.active_schedules) == (1, 1)
    assert overview.runs_today == {**dict.fromkeys(ENDED, 0), "failed": 1}
    assert overview.due_within_hour == 1


def test_what_needs_attention_is_said(furnished: Inspector) -> None:
    kinds = {(each.level, each.kind) for each in furnished.system.attention()}

    assert ("error", "leader") in kinds
    assert ("error", "workers") in kinds
    assert ("warning", "failed") in kinds


def _of_workers(inspector: Inspector) -> list[str]:
    return [each.text for each in inspector.system.attention() if each.kind == "workers"]


def test_a_bare_claimer_counts_during_its_lease(inspector: Inspector, world: World) -> None:
    world.queue.push(make_task("alice", "held"))
    world.queue.claim("me", lease=60)
    assert _of_workers(inspector) == []
    world.queue.push(make_task("alice", "waits"))
    assert _of_workers(inspector) == []
    world.advance(61)
    (text,) = _of_workers(inspector)
    assert text.startswith("no worker is alive: 1 task waits, 1 run has lost its worker.")


def test_the_runs_of_a_dead_worker_need_early_attention(inspector: Inspector, world: World) -> None:
    world.queue.push(make_task("alice", "held"))
    world.beat("w")
    world.queue.claim("w", lease=600)
    assert _of_workers(inspector) == []
    world.advance(GONE_AFTER_S)
    (text,) = _of_workers(inspector)
    assert text.startswith("no worker is alive: 1 run has lost its worker.")


def test_a_task_that_waits_for_long_needs_attention(inspector: Inspector, world: World) -> None:
    world.queue.push(make_task("alice", "waits"))
    world.beat("w")
    world.advance(OLD_WAIT_S)
    world.beat("w")
    kinds = ("users", "workers")
    assert [each for each in inspector.system.attention() if each.kind in kinds] == []
    world.advance(60)
    world.beat("w")
    (found,) = (each for each in inspector.system.attention() if each.kind in kinds)
    assert (found.level, found.text) == ("warning", "the oldest task has waited 11 minutes")


def test_a_queue_whose_redis_is_gone_is_not_ready() -> None:
    queue = TaskQueue.from_url("redis://127.0.0.1:1/0", timeout=0.1)

    assert Inspector(queue).system.ready() == ["redis: RedisUnavailable"]


def test_a_queue_is_ready_when_somebody_leads(furnished: Inspector) -> None:
    assert furnished.system.ready() == ["leader: none"]
    TaskScheduler(furnished.queue).tick()
    assert furnished.system.ready() == []


def test_a_worker_that_is_not_there_cannot_be_drained(inspector: Inspector) -> None:
    with pytest.raises(UnknownWorker, match="'w9'"):
        inspector.workers.drain("w9")


def test_the_server_is_described(inspector: Inspector) -> None:
    info = inspector.system.redis()

    assert info.server in ("Valkey", "Redis")
    assert info.used_memory > 0
    assert info.round_trip > 0


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda i: i.users.list(order="size"), "'size'"),
        (lambda i: i.users.list(cursor="x"), "cursor 'x'"),
        (lambda i: i.users.list(limit=0), "limit"),
        (lambda i: i.users.list(minutes=0), "minutes"),
        (lambda i: i.users.set("alice"), "nothing to change"),
        (lambda i: i.system.configure(colour="red"), "'colour'"),
        (lambda i: i.system.configure(), "nothing to change"),
        (lambda i: i.system.series("1y"), "'1y'"),
        (lambda i: i.runs.list("lost"), "'lost'"),
        (lambda i: i.schedules.bulk("explode", dry_run=False), "'explode'"),
    ],
)
def test_bad_input_is_named(inspector: Inspector, act: Act, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        act(inspector)


def test_nothing_is_stored_on_a_server_that_evicts_keys(
    own_server: Callable[..., EmbeddedServer],
) -> None:
    server = own_server()
    with redis.Redis.from_url(server.url) as client, TaskQueue.from_url(server.url) as queue:
        client.config_set("maxmemory-policy", "allkeys-lru")
        inspector = Inspector(queue, Actor(name="ann", role="admin", via="cli"))
        fields = {"cron_expr": "0 9 * * *", "user_id": "alice"}
        with pytest.raises(ConfigurationError, match="allkeys-lru"):
            inspector.schedules.add(**fields)
        assert not client.exists(queue.keys["schedules"])
