"""Schedules are operations: they work under the blocking driver and under the asynchronous one."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from helpers.drivers import DRIVERS, queue_of

from fairqueue.aio import AsyncTaskQueue
from fairqueue.clock import ManualClock
from fairqueue.errors import InvalidPayload, InvalidSchedule, ScheduleConflict, UnknownSchedule
from fairqueue.http_tasks.checks import Outgoing
from fairqueue.link.operation import steps
from fairqueue.queue.queue import TaskQueue
from fairqueue.schedules.service import Schedules

Call = Callable[..., Any]
MORNING = datetime(2026, 3, 5, 8, tzinfo=UTC)


@pytest.fixture(params=DRIVERS)
def call(
    request: pytest.FixtureRequest, redis_url: str, redis_client: redis.Redis
) -> Iterator[Call]:
    """Call a method of Schedules by its name, under a driver."""
    with queue_of(request.param, redis_url, clock=ManualClock(MORNING)) as queue:
        inner: Any = queue
        asynchronous = not isinstance(queue, TaskQueue)
        target = inner.queue.operations if asynchronous else queue
        assert isinstance(inner.queue, AsyncTaskQueue) if asynchronous else True
        schedules = Schedules(target, steps(Outgoing(target.link).check))

        def call(method: str, /, *args: Any, **kwargs: Any) -> Any:
            return inner.link.perform(steps(getattr(schedules, method))(*args, **kwargs))

        yield call


def test_a_schedule_goes_from_add_to_remove(call: Call) -> None:
    assert call("add_schedule", "0 9 * * *", "alice", schedule_id="s", payload={"n": 1}) == "s"
    assert call("get_schedule", "s").next_run == MORNING.replace(hour=9)
    assert call("update_schedule", "s", cron_expr="0 10 * * *", changed_by="carol")
    assert call("get_schedule", "s").next_run == MORNING.replace(hour=10)
    assert [change.by for change in call("changes", "s")] == ["carol", None]
    assert call("pause_schedule", "s", by="carol")
    assert not call("get_schedule", "s").is_active
    assert call("resume_schedule", "s")
    assert call("trigger", "s")
    assert call("remove_schedule", "s")
    assert call("get_schedule", "s") is None


def test_many_schedules_are_listed_changed_copied_exported_and_imported(call: Call) -> None:
    specs = [{"every": 60, "user_id": f"u{n}", "schedule_id": f"s{n}"} for n in range(3)]
    assert call("add_schedules", specs) == ["s0", "s1", "s2"]
    page = call("list_schedules", limit=2)
    rest = call("list_schedules", limit=2, cursor=page.cursor)
    assert [task.schedule_id for task in (*page, *rest)] == ["s0", "s1", "s2"]
    assert call("bulk", "pause", user_id="u1", dry_run=False).done == 1
    assert call("copy_schedule", "s0", "s3", user_id="u3") == "s3"
    documents = call("export_schedules")
    assert [each["schedule_id"] for each in documents] == ["s0", "s1", "s2", "s3"]
    diff = call("import_schedules", documents[:1], prune=True, dry_run=False)
    assert (diff.unchanged, diff.removed) == (["s0"], ["s1", "s2", "s3"])
    assert call("replan").failed == 0
    assert call("problems") == []


def test_past_fire_times_are_told_and_filled(call: Call) -> None:
    call("add_schedule", "0 * * * *", "alice", schedule_id="s")
    day = MORNING.replace(hour=5), MORNING.replace(hour=10)
    assert [each.outcome for each in call("moments", "s", *day)] == ["before"] * 4 + ["planned"]
    assert call("backfill", "s", *day).filled == 4
    assert call("backfill", "s", *day).filled == 0
    outcomes = [each.outcome for each in call("moments", "s", *day)]
    assert outcomes == ["backfilled"] * 4 + ["planned"]


def test_errors_are_the_same(call: Call) -> None:
    call("add_schedule", "0 9 * * *", "alice", schedule_id="s")
    with pytest.raises(ScheduleConflict, match="'s' is in use"):
        call("add_schedule", "0 9 * * *", "bob", schedule_id="s")
    with pytest.raises(InvalidSchedule, match="misfire must be one of"):
        call("update_schedule", "s", misfire="never")
    with pytest.raises(UnknownSchedule, match="'none'"):
        call("trigger", "none")
    inside = {"url": "http://127.0.0.1/"}
    with pytest.raises(InvalidPayload, match=r"127\.0\.0\.1"):
        call("add_schedule", "0 9 * * *", "eve", name="http", payload=inside)
    assert [task.schedule_id for task in call("list_schedules")] == ["s"]
