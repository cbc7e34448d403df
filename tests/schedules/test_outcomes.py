"""Moments of schedules that never ran, and of which somebody has spoilt what is known."""

from datetime import UTC, datetime
from typing import Any

import pytest
from helpers.schedules import THURSDAY, add, at
from helpers.world import World

from fairqueue.clock import to_ms
from fairqueue.errors import InvalidSchedule
from fairqueue.scheduler.scheduler import TaskScheduler

LONG_AGO = datetime(1000, 1, 1, tzinfo=UTC)

START = THURSDAY


def told(world: World, start: datetime, end: datetime) -> list[tuple[datetime, str]]:
    return [(moment.at, moment.outcome) for moment in world.scheduler.moments("nine", start, end)]


def test_a_schedule_that_never_ran_has_no_moment_that_was_fired(world: World) -> None:
    world.add(start=at(5, 8))
    assert told(world, LONG_AGO, at(6, 8)) == [(at(5, 9), "planned")]


def test_the_last_run_is_told_though_the_rule_has_no_such_moment_any_more(world: World) -> None:
    world.add(start=at(5, 8))
    world.tick_at(at(5, 9))
    world.scheduler.update_schedule("nine", cron_expr="0 10 * * *")
    assert told(world, LONG_AGO, at(5, 11)) == [(at(5, 9), "fired"), (at(5, 10), "planned")]


@pytest.mark.parametrize("value", [[], {}, None, "x", True, -1e300, -1, 10**400, float("nan")])
@pytest.mark.parametrize("field", ["last_run", "since", "until", "runs"])
def test_a_spoilt_state_shows_no_moment(world: World, field: str, value: Any) -> None:
    world.add(start=at(5, 8))
    world.tamper("nine", "schedule_state", **{field: value})
    assert told(world, LONG_AGO, at(6, 8)) == [(at(5, 9), "planned")]


@pytest.mark.untidy
@pytest.mark.parametrize("number", ["\u00b2", "9" * 15, "9" * 400, "9" * 5000, "-1", "x"])
def test_a_plan_and_notes_without_a_time_tell_no_moment(world: World, number: str) -> None:
    world.add(start=at(5, 8))
    plan = world.record("plan", "nine")
    revision = plan.partition(" ")[0]
    world.redis.hset(world.keys["plan"], "nine", f"{revision}@{number} {number}")
    world.redis.zadd(world.keys["moments"], {f"nine\0{number}\0{number}\x001\0missed": 0})
    assert [moment for moment, _ in told(world, LONG_AGO, at(6, 8))] == [at(5, 9)]


@pytest.mark.untidy
@pytest.mark.one_partition
def test_a_note_whose_count_cannot_be_read_is_still_one(world: World) -> None:
    world.add(start=at(5, 8))
    missed = to_ms(at(5, 9), "missed")
    world.redis.zadd(world.keys["moments"], {f"nine\0{missed}\0{missed}\0x\0missed": 0})
    world.clock.set(at(6, 8))
    assert told(world, LONG_AGO, at(6, 8)) == [(at(5, 9), "skipped")]


@pytest.mark.parametrize("cursor", ["\u00b2", "9" * 400, "9" * 5000])
def test_a_cursor_that_is_no_moment_is_named(scheduler: TaskScheduler, cursor: str) -> None:
    add(scheduler)
    with pytest.raises(InvalidSchedule, match="is not valid: pass the `cursor` of a page"):
        scheduler.moments("nine", at(5, 8), at(6, 8), cursor=cursor)
