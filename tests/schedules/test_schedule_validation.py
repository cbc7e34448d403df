"""What is said of a schedule is checked when it is said, and errors stay short."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from helpers.rest import Api
from helpers.schedules import THURSDAY, add, at, get, tamper
from helpers.tasks import make_task
from helpers.world import World

from fairqueue.access.credentials import Actor
from fairqueue.errors import FairQueueError, InvalidCron, InvalidSchedule
from fairqueue.inspection import Inspector
from fairqueue.inspection.schedules import ScheduleInspector
from fairqueue.queue.queue import TaskQueue
from fairqueue.recurrence.frequency import as_cron, every
from fairqueue.recurrence.moments import between, describe, matches, next_run, preview, previous_run
from fairqueue.scheduler.scheduler import TaskScheduler

HUGE = "x" * 100_000
LONGEST_ERROR = 2000  # characters

START = THURSDAY


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["nonsense", "", "61 * * * *", "* * * *", "H(9-1) * * * *"])
def test_as_cron_refuses_what_is_not_an_expression(text: str) -> None:
    with pytest.raises(InvalidCron, match=r"field|minute"):
        as_cron(text)


@pytest.mark.parametrize("text", ["H 9 * * *", "h/15 * * * *", "@daily", " 0 9 * * MON "])
def test_as_cron_gives_an_expression_back_as_it_is(text: str) -> None:
    assert as_cron(text) == text


RULES: list[tuple[Any, datetime]] = [
    ("EVERY_DAY", at(6, 2, 10)),
    ({"minutes": 0, "hours": 9}, at(5, 9)),
    (every().day.at("09:30"), at(5, 9, 30)),
    (every(minutes=15), at(5, 9)),
    ("0 9 * * *", at(5, 9)),
]


@pytest.mark.parametrize(("rule", "moment"), RULES, ids=str)
def test_all_that_tells_of_a_rule_takes_what_add_schedule_takes(
    scheduler: TaskScheduler, rule: Any, moment: datetime
) -> None:
    add(scheduler, cron_expr=rule)
    assert get(scheduler, "nine").next_run == moment
    assert next_run(rule, "UTC", THURSDAY) == moment
    assert previous_run(rule, "UTC", moment) == moment
    assert between(rule, "UTC", THURSDAY, moment + timedelta(seconds=1)) == [moment]
    assert [run.utc for run in preview(rule, 1, THURSDAY)] == [moment]
    assert matches(rule, moment)
    assert describe(rule) == describe(as_cron(rule))
    assert ScheduleInspector.preview(rule, after=THURSDAY, count=1).runs == [moment]


@pytest.mark.parametrize("when", ["2026-03-05T10:00:00+01:00", at(5, 9), "2026-03-05T09:00:00Z"])
def test_a_single_moment_may_be_a_text(scheduler: TaskScheduler, when: Any) -> None:
    add(scheduler, cron_expr=None, at=when)
    assert get(scheduler, "nine").at == at(5, 9)
    assert next_run({"at": when}, None, THURSDAY) == at(5, 9)
    assert ScheduleInspector.preview(at=when, after=THURSDAY).runs == [at(5, 9)]


def test_a_moment_in_milliseconds_is_what_a_stored_form_has() -> None:
    assert next_run({"at": 1_772_701_200_000}, None, THURSDAY) == at(5, 9)


@pytest.mark.parametrize("field", ["at", "start", "end", "anchor"])
@pytest.mark.parametrize("text", ["2026-03-05T09:00:00", "tomorrow", ""])
def test_a_text_that_is_not_one_moment_is_refused(world: World, field: str, text: str) -> None:
    rule: dict[str, Any] = {"at": text} if field == "at" else {"every": 60, field: text}
    with pytest.raises(InvalidSchedule, match=rf"{field} must be .*2026.* not '{text}'"):
        world.add(**({"cron_expr": None} | rule))


MATCHED: list[tuple[Any, datetime, str | None, bool]] = [
    ("0 9 * * *", at(5, 9), None, True),
    ("0 9 * * *", at(5, 9) + timedelta(milliseconds=999), None, True),
    ("0 9 * * *", at(5, 9, 0, 1), None, False),
    ("0 9 * * *", at(5, 8), "Europe/Berlin", True),
    ("0 9 * * *", at(5, 9), "Europe/Berlin", False),
    ({"every": 1500, "anchor": 0}, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), None, True),
    ({"every": 1500, "anchor": 0}, datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC), None, False),
    ({"at": "2026-03-05T09:00:00Z"}, at(5, 9), None, True),
    ({"at": "2026-03-05T09:00:00Z"}, at(5, 10), None, False),
]


@pytest.mark.parametrize(("rule", "moment", "zone", "expected"), MATCHED)
def test_whether_a_rule_has_a_moment_is_told_to_the_second(
    rule: Any, moment: datetime, zone: str | None, expected: bool
) -> None:
    assert matches(rule, moment, zone) is expected


def test_a_window_that_limits_nothing_is_refused(scheduler: TaskScheduler) -> None:
    with pytest.raises(InvalidSchedule, match=r"windows\[1\] must have days, from or to"):
        add(scheduler, windows=[{"days": [1]}, {}])
    add(scheduler)
    with pytest.raises(InvalidSchedule, match=r"windows\[0\] must have days, from or to"):
        scheduler.update_schedule("nine", windows=[{}])
    with pytest.raises(InvalidSchedule, match=r"windows\[0\] must have days, from or to"):
        next_run({"cron": "0 9 * * *", "limits": {"windows": [{}]}}, None, THURSDAY)
    with pytest.raises(InvalidSchedule, match=r"windows\[0\] must have days, from or to"):
        ScheduleInspector.preview("0 9 * * *", windows=[{}])


def test_a_schedule_that_was_stored_with_such_a_window_still_fires(world: World) -> None:
    world.add()
    tamper(world.redis, world.scheduler.queue, "nine", windows=[{}])
    assert world.tick_at(at(5, 9)).fired == 1
    assert world.scheduler.problems() == []


@pytest.mark.parametrize(
    "fields", [{"cron_expr": None, "at": at(4, 9)}, {"end": at(4, 9)}], ids=["at", "end"]
)
def test_a_moment_in_the_past_is_refused(scheduler: TaskScheduler, fields: dict[str, Any]) -> None:
    field = "end" if "end" in fields else "at"
    with pytest.raises(InvalidSchedule, match=rf"{field} 2026-03-04T09:00.* is in the past"):
        add(scheduler, **fields)
    document = {"schedule_id": "nine", "user_id": "alice", "cron_expr": "0 9 * * *", **fields}
    with pytest.raises(InvalidSchedule, match=rf"{field} 2026-03-04T09:00.* is in the past"):
        scheduler.import_schedules([document])


@pytest.mark.parametrize("given", [5, None, "abc", {"cron_expr": "0 9 * * *"}, b"x"], ids=repr)
def test_what_is_not_a_list_of_schedules_is_refused(scheduler: TaskScheduler, given: Any) -> None:
    with pytest.raises(InvalidSchedule, match="must be a list of dicts"):
        scheduler.add_schedules(given)
    with pytest.raises(InvalidSchedule, match="must be a list of dicts"):
        scheduler.import_schedules(given)
    with pytest.raises(InvalidSchedule, match="must be a list of dicts"):
        Inspector(scheduler.queue, Actor(name="test")).schedules.import_(given)


# --- long values ----------------------------------------------------------------------------------

TASK_FIELDS = ("user_id", "task_id", "name", "priority", "delay", "at", "payload", "triggered_by")
SCHEDULE_FIELDS = (
    *("cron_expr", "user_id", "priority", "payload", "timezone", "name", "schedule_id", "metadata"),
    *("every", "anchor", "at", "start", "end", "windows", "exclude", "max_runs", "misfire"),
    *("catch_up", "max_catch_up", "jitter", "overlap", "retries", "backoff", "timeout"),
    *("max_failures", "tenant", "is_active", "next_run", HUGE),
)
LONG_CALLS: dict[str, Callable[[TaskScheduler], object]] = {
    "get": lambda s: s.queue.get(HUGE),
    "cancel": lambda s: s.queue.cancel(HUGE),
    "size": lambda s: s.queue.size(HUGE),
    "cost": lambda s: s.queue.configure(cost=HUGE),
    "critical_share": lambda s: s.queue.configure(critical_share=HUGE),  # type: ignore[arg-type]
    "weight": lambda s: s.queue.set_user("ann", weight=HUGE),  # type: ignore[arg-type]
    "tenant of user": lambda s: s.queue.set_user("ann", tenant=HUGE),
    "queue name": lambda s: TaskQueue.from_url("redis://127.0.0.1:1", name=HUGE),
    "url": lambda s: TaskQueue.from_url(HUGE),
    "scheduler_id": lambda s: TaskScheduler(s.queue, scheduler_id=HUGE),
    "check_interval": lambda s: TaskScheduler(s.queue, check_interval=HUGE),  # type: ignore[arg-type]
    "lists": lambda s: s.list_schedules(cursor=HUGE),
    "listed user": lambda s: s.list_schedules(user_id=HUGE),
    "listed part": lambda s: s.list_schedules(contains=HUGE),
    "pause": lambda s: s.pause_schedule("nine", note=HUGE),
    "until": lambda s: s.pause_schedule("nine", until=HUGE),  # type: ignore[arg-type]
    "bulk": lambda s: s.bulk(HUGE),
    "bulk ids": lambda s: s.bulk("pause", ids=HUGE),
    "on_conflict": lambda s: add(s, on_conflict=HUGE),
    "revision": lambda s: s.remove_schedule("nine", if_revision=HUGE * 2),
    "import": lambda s: s.import_schedules([{"schedule_id": HUGE}, {HUGE: 1}, HUGE]),  # type: ignore[list-item]
    "import field": lambda s: s.import_schedules([{"schedule_id": "a", "at": HUGE}]),
    "next_run": lambda s: next_run(HUGE, "UTC", THURSDAY),
    "next_run zone": lambda s: next_run("0 9 * * *", HUGE, THURSDAY),
    "next_run form": lambda s: next_run({HUGE: 1}, None, THURSDAY),
    "next_run at": lambda s: next_run({"at": HUGE}, None, THURSDAY),
    "describe": lambda s: describe("0 9 * * *", locale=HUGE),
    "fields": lambda s: as_cron({"minutes": HUGE}),
    "field": lambda s: as_cron({HUGE: 1}),
    "window": lambda s: add(s, windows=[{"from": HUGE}]),
    "window key": lambda s: add(s, windows=[{HUGE: 1}]),
    "window hours": lambda s: add(s, windows=[{"from": "24:00", "to": HUGE}]),
    "payload path": lambda s: add(s, payload={HUGE: object()}),
    **{
        f"task {field}": lambda s, field=field: s.queue.push(  # type: ignore[misc]
            make_task(**{"user_id": "ann", field: HUGE})
        )
        for field in TASK_FIELDS
    },
    **{
        f"schedule {field[:20]}": lambda s, field=field: add(s, **{field: HUGE})  # type: ignore[misc]
        for field in SCHEDULE_FIELDS
        if field != "schedule_id"
    },
    **{
        f"update {field[:20]}": lambda s, field=field: s.update_schedule("nine", **{field: HUGE})  # type: ignore[misc]
        for field in SCHEDULE_FIELDS
        if field != "schedule_id"
    },
    **{
        f"copy {field[:20]}": lambda s, field=field: s.copy_schedule("nine", **{field: HUGE})  # type: ignore[misc]
        for field in SCHEDULE_FIELDS
        if field != "schedule_id"
    },
}


@pytest.mark.parametrize("call", LONG_CALLS)
def test_an_error_does_not_repeat_a_long_value(scheduler: TaskScheduler, call: str) -> None:
    add(scheduler)
    with pytest.raises(FairQueueError) as caught:
        LONG_CALLS[call](scheduler)
    assert len(str(caught.value)) < LONGEST_ERROR, str(caught.value)[:300]


REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "/scheduler/jobs", {"user_id": "ann", HUGE: 1}),
    ("POST", "/scheduler/jobs", {"user_id": "ann", "misfire": HUGE}),
    ("POST", "/scheduler/jobs", {"user_id": "ann", "cron_expr": HUGE}),
    ("POST", "/scheduler/jobs", {"user_id": "ann", "cron_expr": {HUGE: HUGE}}),
    ("POST", "/scheduler/jobs", {"user_id": "ann", "cron_expr": {"minutes": HUGE}}),
    ("POST", "/scheduler/jobs", {"user_id": "ann", "cron_expr": "0 9 * * *", "timezone": HUGE}),
    ("POST", "/scheduler/jobs", {"user_id": "ann", "at": HUGE}),
    ("POST", "/scheduler/jobs", {"user_id": "ann", "cron_expr": "@daily", "tenant": HUGE}),
    ("POST", "/scheduler/jobs", {"user_id": "ann", "every": 60, "windows": [{HUGE: 1}]}),
    ("POST", "/scheduler/jobs", {"user_id": "ann", "every": 60, "exclude": [HUGE]}),
    ("PATCH", "/scheduler/jobs/acme-daily", {"name": HUGE}),
    ("PATCH", "/scheduler/jobs/acme-daily", {"timezone": HUGE}),
    ("POST", "/scheduler/jobs/import", {"documents": [{HUGE: 1}, {"schedule_id": HUGE}]}),
    ("POST", "/scheduler/jobs/import", {"documents": [{"schedule_id": "a", "name": HUGE}]}),
    ("POST", "/scheduler/jobs/bulk", {"action": "pause", "tenant": HUGE}),
    ("POST", "/tasks", {"user_id": "ann", "tenant": HUGE}),
    ("POST", "/tasks", {"user_id": HUGE}),
    ("POST", "/preview", {"cron_expr": HUGE}),
    ("POST", "/preview", {"cron_expr": "0 9 * * *", "timezone": HUGE}),
    ("PATCH", "/settings", {"cost": HUGE}),
    ("GET", f"/scheduler/jobs?{'y' * 20_000}=1", None),
    ("GET", f"/scheduler/jobs?limit={'y' * 20_000}", None),
    ("GET", f"/scheduler/jobs?cursor={'y' * 20_000}", None),
    ("GET", f"/scheduler/jobs?{'y' * 20_000}=1&{'y' * 20_000}=1", None),
    ("GET", f"/nowhere/{'y' * 20_000}", None),
    ("GET", f"/scheduler/jobs/{'y' * 20_000}", None),
    ("GET", f"/tasks/{'y' * 20_000}", None),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS, ids=range(len(REQUESTS)))
def test_answers_do_not_repeat_long_values(api: Api, method: str, path: str, body: Any) -> None:
    request = {} if body is None else {"json": body}
    response = api.client().send(method, path, **request)
    assert response.status_code in (404, 422), response.text[:300]
    assert len(response.content) < 2 * LONGEST_ERROR, response.text[:300]


def test_a_long_header_is_not_repeated(api: Api) -> None:
    client = api.client()
    for name in ("Idempotency-Key", "If-Match", "Content-Type"):
        response = client.send(
            "PUT", "/scheduler/jobs/acme-daily", content=b"{}", headers={name: HUGE}
        )
        assert response.status_code >= 400
        assert len(response.content) < 2 * LONGEST_ERROR
