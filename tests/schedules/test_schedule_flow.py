"""Tasks of schedules and the flow: tenants, pools, keys, unique tasks, expiry and cost."""

import math
import re
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from helpers import schedules
from helpers.world import World

from fairqueue.errors import DuplicateTask, InvalidSchedule, InvalidTask, QueueFull
from fairqueue.models import ScheduledTask, Task
from fairqueue.schedules import dump_schedules, load_schedules

MINUTE = "* * * * *"


def minute(world: World) -> datetime:
    """The last fire time of a schedule that fires each minute."""
    return world.now().replace(second=0)


# --- tenants --------------------------------------------------------------------------------------


def fire(world: World) -> None:
    for _ in range(6):
        world.tick_after(60)


def fire_after_an_outage(world: World) -> None:
    world.advance(360)
    while world.tick().fired:
        pass


def run_now(world: World) -> None:
    for schedule in [*world.scheduler.list_schedules()] * 6:
        world.scheduler.trigger(schedule.schedule_id)


def backfill(world: World) -> None:
    for schedule in world.scheduler.list_schedules():
        world.scheduler.backfill(schedule.schedule_id, world.now().timestamp() - 360, world.now())


@pytest.mark.parametrize("begin", [fire, fire_after_an_outage, run_now, backfill])
@pytest.mark.one_partition
def test_tenants_have_equal_shares_of_scheduled_tasks(
    world: World, begin: Callable[[World], None]
) -> None:
    """Three users of one tenant against one user of another, whose id is also in the first."""
    users = [("acme", "ann"), ("acme", "bob"), ("acme", "cy"), ("globex", "ann")]
    for tenant, user in users:
        world.add(
            f"{tenant}-{user}",
            cron_expr=MINUTE,
            user_id=user,
            tenant=tenant,
            misfire="fire_all",
        )
    begin(world)
    sizes = {owner: world.queue.size(owner[1], tenant=owner[0]) for owner in users}
    assert sizes == dict.fromkeys(users, 6)

    served = [claim.task for _ in range(12) for claim in world.queue.claim("w")]

    assert Counter(task.tenant for task in served) == {"acme": 6, "globex": 6}
    of_acme = Counter(task.user_id for task in served if task.tenant == "acme")
    assert of_acme == {"ann": 2, "bob": 2, "cy": 2}


# --- fields ---------------------------------------------------------------------------------------

GIVEN: dict[str, Any] = {
    "pool": "gpu",
    "limit_keys": ["account:42", "printer"],
    "unique": "nightly",
    "on_duplicate": "replace",
    "unique_for": 3600.0,
    "expires": 600.0,
    "cost": 3.5,
}


def given_of(it: ScheduledTask | Task) -> dict[str, Any]:
    found = {name: getattr(it, name) for name in GIVEN}
    return found | {"limit_keys": list(found["limit_keys"] or []) or None}


@pytest.mark.parametrize("begin", [fire, run_now])
def test_a_task_has_the_flow_of_its_schedule(world: World, begin: Callable[[World], None]) -> None:
    world.add("report", cron_expr=MINUTE, **GIVEN)
    begin(world)

    (claim,) = world.queue.claim("w", limit=10, pools=["gpu"])

    assert given_of(claim.task) == GIVEN
    (info,) = [world.info(claim.task.task_id)]
    assert (info.pool, info.limit_keys, info.cost) == ("gpu", ("account:42", "printer"), 3.5)


def test_the_flow_survives_reading_updating_copying_exporting_and_importing(world: World) -> None:
    world.add("report", cron_expr=MINUTE, **GIVEN)
    assert given_of(world.schedule("report")) == GIVEN

    world.scheduler.copy_schedule("report", "copy", user_id="bob")
    assert given_of(world.schedule("copy")) == GIVEN
    assert world.scheduler.update_schedule("report", cost=2, unique_for="waiting", expires=None)
    changed = {**GIVEN, "cost": 2.0, "unique_for": "waiting", "expires": None}
    assert given_of(world.schedule("report")) == changed

    documents = world.scheduler.export_schedules()
    for schedule_id in ("report", "copy"):
        world.scheduler.remove_schedule(schedule_id)
    for format in ("json", "yaml"):
        text = dump_schedules(documents, format)
        world.scheduler.import_schedules(load_schedules(text, format), dry_run=False)
    assert world.scheduler.export_schedules() == documents
    assert given_of(world.schedule("report")) == changed


def test_a_schedule_without_a_flow_stores_nothing_of_it(world: World) -> None:
    world.add("report", cron_expr=MINUTE)
    assert world.record("schedules", "report").keys().isdisjoint(GIVEN)
    world.tick_after(60)
    (claim,) = world.queue.claim("w")
    assert '"flow"' not in claim.task.document
    assert (
        given_of(claim.task)
        == given_of(world.schedule("report"))
        == {
            **dict.fromkeys(GIVEN),
            "pool": "default",
            "on_duplicate": "ignore",
            "unique_for": "unfinished",
        }
    )


BAD = [
    ({"pool": ""}, "pool must be"),
    ({"pool": "a b\n"}, "pool must be"),
    ({"limit_keys": list("abcde")}, "limit_keys must have at most 4 keys, not 5"),
    ({"limit_keys": ["account:*"]}, "must not contain '*', not 'account:*'"),
    ({"limit_keys": "account:42"}, "limit_keys must be a list"),
    ({"unique": ""}, "unique must be"),
    ({"on_duplicate": "replace"}, "on_duplicate needs unique"),
    ({"unique_for": 60}, "unique_for needs unique"),
    ({"unique": "a", "on_duplicate": "drop"}, "on_duplicate must be one of"),
    ({"unique": "a", "unique_for": "ever"}, "unique_for must be 'unfinished', 'waiting' or"),
    ({"unique": "a", "unique_for": 0}, "unique_for must be"),
    ({"unique": "a", "overlap": "cancel_previous"}, "cancel_previous"),
    ({"expires": 0}, "expires must be"),
    ({"expires": -1}, "expires must be"),
    ({"expires": datetime(2030, 1, 1, tzinfo=UTC)}, "expires must be"),
    *[({"cost": cost}, "cost must be") for cost in (0, -1, math.nan, math.inf, 1e7, "3", True)],
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda each: str(each)[:40])
def test_a_bad_flow_is_refused_and_nothing_is_stored(
    world: World, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSchedule, match=re.escape(message)):
        world.add("new", cron_expr=MINUTE, **fields)
    assert world.scheduler.get_schedule("new") is None

    world.add("old", cron_expr=MINUTE)
    before = world.record("schedules", "old")
    with pytest.raises(InvalidSchedule, match=re.escape(message)):
        world.scheduler.update_schedule("old", **fields)
    with pytest.raises(InvalidSchedule, match=re.escape(message)):
        world.scheduler.import_schedules(
            [{"schedule_id": "old", "user_id": "alice", "cron_expr": MINUTE, **fields}],
            dry_run=False,
        )
    assert world.record("schedules", "old") == before


def test_a_change_that_leaves_options_of_a_unique_key_without_it_is_refused(world: World) -> None:
    world.add("report", cron_expr=MINUTE, unique="nightly", on_duplicate="replace")
    with pytest.raises(InvalidSchedule, match="on_duplicate needs unique"):
        world.scheduler.update_schedule("report", unique=None)
    assert world.scheduler.update_schedule("report", unique=None, on_duplicate="ignore")
    assert world.schedule("report").unique is None


# --- unique tasks ---------------------------------------------------------------------------------


def outcomes(world: World, schedule_id: str, minutes: int) -> list[tuple[str, str | None]]:
    start = minute(world) - timedelta(minutes=minutes - 1)
    found = world.scheduler.moments(schedule_id, start, world.now())
    return [(each.outcome, each.reason) for each in found]


def test_a_slow_task_is_never_queued_twice(world: World) -> None:
    world.add("report", cron_expr=MINUTE, unique="nightly")
    reports = [world.tick_after(60) for _ in range(2)]
    (claim,) = world.queue.claim("w", lease=600)
    reports += [world.tick_after(60) for _ in range(2)]

    assert [(each.fired, each.duplicates, each.skipped) for each in reports] == [
        (1, 0, 0),
        (0, 1, 0),
        (0, 1, 0),
        (0, 1, 0),
    ]
    assert world.queue.size("alice") == 0
    duplicate = ("skipped", "duplicate")
    assert outcomes(world, "report", 4) == [("fired", None), *[duplicate] * 3]
    assert world.schedule("report").skipped_count == 3
    counters = world.queue.inspect().counters
    assert (counters["not_unique"], counters.get("skipped", 0)) == (3, 0)

    world.queue.finish(claim)
    assert world.tick_after(60).fired == 1


def test_a_key_that_is_free_from_the_start_of_a_task_lets_one_wait_behind_it(world: World) -> None:
    world.add("report", cron_expr=MINUTE, unique="nightly", unique_for="waiting")
    world.tick_after(60)
    world.queue.claim("w", lease=600)
    assert [world.tick_after(60).fired for _ in range(3)] == [1, 0, 0]
    assert world.queue.size("alice") == 1


def test_a_window_lets_one_task_in_however_fast_it_ends(world: World) -> None:
    world.add("report", cron_expr=MINUTE, unique="nightly", unique_for=150)
    fired = []
    for _ in range(6):
        fired.append(world.tick_after(60).fired)
        for claim in world.queue.claim("w"):
            world.queue.finish(claim)
    assert fired == [1, 0, 0, 1, 0, 0]


def test_a_fire_gives_its_task_to_the_one_that_waits(world: World) -> None:
    world.add("report", cron_expr=MINUTE, unique="nightly", on_duplicate="replace")
    world.tick_after(60)
    first = minute(world)
    world.scheduler.update_schedule("report", payload={"pages": 2})
    assert world.tick_after(60).duplicates == 1

    (claim,) = world.queue.claim("w", limit=9, lease=600)
    assert claim.task.task_id == schedules.fire_id("report", first)
    assert (claim.task.payload, claim.task.scheduled_for) == ({"pages": 2}, minute(world))
    # The one that runs is not replaced: the next one waits until it has ended.
    assert [world.tick_after(60).fired for _ in range(2)] == [1, 0]
    assert world.queue.claim("w") == []
    world.queue.finish(claim)
    (claim,) = world.queue.claim("w")
    assert claim.task.scheduled_for == minute(world)


def test_schedules_of_one_tenant_share_a_key_and_those_of_others_do_not(world: World) -> None:
    for schedule_id, tenant in (("a", "acme"), ("b", "acme"), ("c", "globex"), ("d", None)):
        world.add(
            schedule_id, cron_expr=MINUTE, user_id=schedule_id, tenant=tenant, unique="nightly"
        )
    report = world.tick_after(60)
    assert (report.fired, report.duplicates) == (3, 1)
    assert outcomes(world, "c", 1) == outcomes(world, "d", 1) == [("fired", None)]
    assert sorted(outcomes(world, "a", 1) + outcomes(world, "b", 1)) == [
        ("fired", None),
        ("skipped", "duplicate"),
    ]


@pytest.mark.one_partition
def test_schedules_with_one_key_that_are_due_together_keep_their_tasks_apart(world: World) -> None:
    """The last document of several counts; the task stays one of the schedule that fired it."""
    for number in range(5):
        world.add(
            f"s{number}",
            cron_expr=MINUTE,
            payload={"n": number},
            unique="nightly",
            on_duplicate="replace",
        )
    report = world.tick_after(60)
    assert (report.fired, report.duplicates) == (1, 4)
    (claim,) = world.queue.claim("w", limit=9)
    schedule_id = claim.task.task_id.partition(":")[0]
    assert world.redis.zrange(world.keys["open"], 0, -1) == [
        f"{schedule_id}\0{claim.task.task_id}".encode()
    ]
    world.queue.finish(claim)
    assert not world.redis.exists(world.keys["open"])


def test_a_cancelled_run_is_followed_by_the_next_although_it_has_the_key(world: World) -> None:
    world.add(
        "report",
        cron_expr=MINUTE,
        unique="nightly",
        on_duplicate="replace",
        overlap="cancel_previous",
    )
    world.tick_after(60)
    (claim,) = world.queue.claim("w", lease=600)
    assert world.tick_after(60).fired == 1
    assert world.info(claim.task.task_id).cancel_requested
    assert world.queue.claim("w") == []
    world.queue.finish(claim)
    assert len(world.queue.claim("w")) == 1


def test_a_run_by_hand_is_answered_with_the_task_that_has_the_key(world: World) -> None:
    world.add("report", cron_expr=MINUTE, unique="nightly")
    world.tick_after(60)
    task_id = schedules.fire_id("report", minute(world))
    assert world.scheduler.trigger("report") == task_id
    world.scheduler.update_schedule("report", on_duplicate="error")
    with pytest.raises(DuplicateTask, match=re.escape(task_id)):
        world.scheduler.trigger("report")
    assert world.queue.size("alice") == 1


def test_a_backfill_pushes_a_task_for_each_fire_time_although_the_schedule_is_unique(
    world: World,
) -> None:
    world.add("report", cron_expr=MINUTE, **{**GIVEN, "on_duplicate": "ignore"})
    start = world.now()
    for _ in range(3):
        world.tick_after(60)
    filled = world.scheduler.backfill("report", start, world.now())
    assert filled.filled == 2
    claims = world.queue.claim("w", limit=9, pools=["gpu"])
    assert [(claim.task.unique, claim.task.expires) for claim in claims] == [
        ("nightly", 600.0),
        (None, None),
        (None, None),
    ]
    assert {claim.task.cost for claim in claims} == {3.5}


def test_a_queue_without_room_for_a_pool_refuses_its_tasks(world: World) -> None:
    """A hundred pools with waiting tasks are the most."""
    for number in range(101):
        world.add(f"s{number}", cron_expr=MINUTE, pool=f"p{number}")
    start = world.now()
    report = world.tick_after(60)
    refused = [f"s{n}" for n in range(101) if not world.schedule(f"s{n}").run_count]
    assert (report.fired, report.refused, len(refused)) == (100, 1, 1)
    with pytest.raises(InvalidTask, match="a queue can have at most 100 pools"):
        world.scheduler.trigger(refused[0])

    (schedule,) = refused
    world.scheduler.pause_schedule(schedule)
    world.advance(60)
    with pytest.raises(QueueFull, match=r"^0 fire times .* at most 100 pools"):
        world.scheduler.backfill(schedule, start, world.now())
    assert world.queue.inspect().ready == 100

    pool = "p0" if schedule != "s0" else "p1"
    (claim,) = world.queue.claim("w", pools=[pool])  # its place is free now
    world.queue.finish(claim)
    assert world.scheduler.backfill(schedule, start, world.now()).filled == 2


# --- expiry ---------------------------------------------------------------------------------------


def test_a_task_expires_when_it_has_not_started_in_time_after_its_run(world: World) -> None:
    world.add("report", cron_expr="0 * * * *", expires=600)
    for late, state in ((599, "running"), (601, "expired")):
        world.tick_after(3600 - world.now().timestamp() % 3600)
        task_id = schedules.fire_id("report", world.now())
        world.advance(late)
        world.queue.claim("w")
        assert world.info(task_id).state == state
    assert world.queue.inspect().counters["expired_tasks"] == 1
