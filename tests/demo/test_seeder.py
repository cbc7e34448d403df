"""Seeded queues: what is in them, that it agrees with itself, and that it lasts."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
import redis
from helpers.state import check_consistency
from helpers.tasks import make_task
from helpers.world import World

from benchmarks.large_queue import seed_large
from fairqueue.clock import ManualClock
from fairqueue.demo.jobs import JOBS, POOLS, TENANTS
from fairqueue.demo.seeder import seed
from fairqueue.errors import ConfigurationError, InvalidInput
from fairqueue.history.records import Run
from fairqueue.history.runs import History
from fairqueue.inspection import Inspector
from fairqueue.models import QueueSettings, ScheduledTask
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler

# As the specification of the jobs has it.
CRONS = {
    "ProcessScheduledReportsJob": "*/5 * * * *",
    "SendFeeRemindersJob": "0 8 * * *",
    "CleanupExpiredSessionsJob": "0 1 * * *",
    "SyncMpesaTransactionsJob": "*/15 * * * *",
    "PurgeOldAuditLogsJob": "0 2 * * 0",
    "RefreshAggregateSummariesJob": "0 0 * * *",
    "SendLowBalanceAlertsJob": "0 9 * * *",
    "ExpireWaitlistOffersJob": "0 10 * * *",
    "CleanupGpsLogsJob": "0 3 * * 0",
    "GenerateDailyBackupJob": "0 4 * * *",
}


def all_runs(queue: TaskQueue) -> list[Run]:
    """All that have ended, oldest first."""
    return list(reversed(History(queue).runs(limit=1000)))


def all_schedules(queue: TaskQueue) -> list[ScheduledTask]:
    return list(TaskScheduler(queue).list_schedules(limit=1000))


def outcomes(queue: TaskQueue) -> dict[str, int]:
    return dict(Counter(run.status for run in all_runs(queue)))


def tenant_of(queue: TaskQueue, user: str) -> str | None:
    """The tenant of a user; None if the user has none. No seeded user is of two."""
    tenants = queue.tenants_of(user)
    assert len(tenants) <= 1
    return tenants[0] if tenants else None


# --- schedules and people -------------------------------------------------------------------------


def test_there_are_the_ten_jobs_with_their_crons_and_zone(queue: TaskQueue) -> None:
    seeded = seed(queue)
    found = all_schedules(queue)
    assert {each.name: each.cron_expr for each in found} == CRONS
    assert {each.timezone for each in found} == {"Africa/Nairobi"}
    assert sorted(seeded.schedules) == sorted(each.schedule_id for each in found)
    assert all(each.metadata["description"] for each in found)


def test_some_schedules_are_paused_with_a_note(queue: TaskQueue) -> None:
    seeded = seed(queue)
    found = {each.schedule_id: each for each in all_schedules(queue)}
    paused = {name for name, each in found.items() if not each.is_active}
    assert paused == set(seeded.paused)
    assert 0 < len(paused) < len(found)
    for name in paused:
        assert found[name].pause_note
        assert str(found[name].paused_by).startswith("grace@")
        assert found[name].paused_at is not None


def test_what_became_of_each_schedule_is_what_its_runs_say(world: World) -> None:
    seed(world.queue)
    scheduled = Counter(r.schedule_id for r in all_runs(world.queue) if r.run_type == "scheduled")
    scheduler = TaskScheduler(world.queue)
    for each in all_schedules(world.queue):
        assert each.run_count == scheduled[each.schedule_id] > 0
        assert each.missed_count == each.skipped_count == 0
        assert each.created_at < world.now()
        if each.is_active:
            assert each.next_run is not None
            assert each.next_run > world.now()
        moments = scheduler.moments(each.schedule_id, each.created_at, world.now(), limit=1000)
        told = Counter(moment.outcome for moment in moments)
        assert told.keys() <= {"fired", "skipped"}
        assert told["fired"] == each.run_count


def test_users_belong_to_schools_and_differ_in_weights_and_limits(queue: TaskQueue) -> None:
    seeded = seed(queue)
    settings = {user: queue.get_user(user, tenant=tenant_of(queue, user)) for user in seeded.users}
    assert {each.tenant for each in settings.values()} == {*TENANTS, None}
    assert len({each.weight for each in settings.values()}) > 2
    assert any(each.max_running for each in settings.values())
    assert any(each.rate for each in settings.values())
    assert {run.user_id for run in all_runs(queue)} <= set(seeded.users)


def test_schools_differ_in_weights_and_limits(queue: TaskQueue) -> None:
    seeded = seed(queue)
    found = Inspector(queue).tenants.list(minutes=7 * 24 * 60)
    assert [tenant.tenant for tenant in found] == sorted(seeded.tenants)
    assert len({tenant.settings.weight for tenant in found}) == 3
    assert any(tenant.settings.max_running for tenant in found)
    assert all(tenant.users >= 4 for tenant in found)
    assert all(tenant.ended for tenant in found)


def test_jobs_have_pools_keys_a_unique_key_and_costs(queue: TaskQueue) -> None:
    seed(queue)
    found = {each.name: each for each in all_schedules(queue)}
    assert {each.pool for each in found.values()} == set(POOLS)
    mpesa, backup = found["SyncMpesaTransactionsJob"], found["GenerateDailyBackupJob"]
    assert (mpesa.unique, mpesa.limit_keys) == ("sync-mpesa", ["account:hillcrest"])
    assert backup.cost == 20
    assert backup.expires is not None
    assert queue.get_key_limits().keys() == {"account:*", "sms"}
    pools = Counter(run.pool for run in all_runs(queue))
    assert pools.keys() == set(POOLS)


def test_runs_have_the_tenant_of_their_user(queue: TaskQueue) -> None:
    seeded = seed(queue)
    tenants = {user: tenant_of(queue, user) for user in seeded.users}
    runs = all_runs(queue)
    assert {run.tenant for run in runs} == {*TENANTS, None}
    assert all(run.tenant == tenants[run.user_id] for run in runs)


def test_the_audit_log_says_who_did_what(queue: TaskQueue) -> None:
    seeded = seed(queue)
    entries = Inspector(queue).audit.list(limit=1000)
    assert {entry.outcome for entry in entries} == {"done"}
    actions = Counter(entry.action for entry in entries)
    assert actions["schedule.add"] == 10
    assert actions["schedule.pause"] == len(seeded.paused)
    assert actions["schedule.trigger"] > 0
    assert len({entry.actor for entry in entries}) > 3
    assert all(entry.at <= seeded.now for entry in entries)
    assert [entry.at for entry in entries] == sorted((e.at for e in entries), reverse=True)


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (100, {"succeeded": 80, "failed": 15, "timed_out": 5}),
        (20, {"succeeded": 16, "failed": 3, "timed_out": 1}),
        (300, {"succeeded": 240, "failed": 45, "timed_out": 15}),
        (1, {"succeeded": 1}),
    ],
)
def test_outcomes_are_counted(queue: TaskQueue, runs: int, expected: dict[str, int]) -> None:
    seeded = seed(queue, runs=runs)
    assert outcomes(queue) == expected
    assert len(seeded.succeeded) == expected["succeeded"]
    assert len(seeded.failed) == expected.get("failed", 0)
    assert len(seeded.timed_out) == expected.get("timed_out", 0)


@pytest.mark.parametrize(
    "now",
    [
        datetime(2026, 1, 1, tzinfo=UTC),  # on a moment of several schedules
        datetime(2026, 3, 1, 21, 0, 0, 900_000, tzinfo=UTC),  # within its second
        datetime(2026, 2, 1, 0, 0, 2, tzinfo=UTC),  # just after one
        datetime(2025, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC),
        datetime(2026, 1, 5, 10, tzinfo=UTC),  # what is paused, is on one of its moments
    ],
)
def test_at_any_moment_the_numbers_are_exact(redis_client: redis.Redis, now: datetime) -> None:
    with TaskQueue(redis_client, clock=ManualClock(now)) as queue:
        seed(queue, random_seed=now.day)
        assert outcomes(queue) == {"succeeded": 80, "failed": 15, "timed_out": 5}
        assert all(run.ended_at and run.ended_at <= now for run in all_runs(queue))
        assert not any(each.missed_count or each.skipped_count for each in all_schedules(queue))
        check_consistency(redis_client)


@pytest.mark.parametrize("random_seed", range(2, 7))
def test_whatever_chance_decides_the_numbers_are_exact(queue: TaskQueue, random_seed: int) -> None:
    seeded = seed(queue, random_seed=random_seed)
    assert outcomes(queue) == {"succeeded": 80, "failed": 15, "timed_out": 5}
    assert len(seeded.to_retry) == 5


def test_five_failed_runs_stand_there_to_be_run_again(queue: TaskQueue) -> None:
    seeded = seed(queue)
    runs = {run.task_id: run for run in all_runs(queue)}
    failed = [run for run in runs.values() if run.status in ("failed", "timed_out")]
    waiting = {run.task_id for run in failed if run.retried_as is None}
    assert waiting == set(seeded.to_retry)
    assert len(waiting) == 5
    assert {runs[task_id].status for task_id in waiting} == {"failed"}
    assert len({runs[task_id].name for task_id in waiting}) > 2
    for run in failed:
        if run.retried_as is not None:
            again = runs[run.retried_as]
            assert (again.status, again.retry_of) == ("succeeded", run.task_id)
            assert again.triggered_by
    # They can be: the very thing that they stand there for.
    assert History(queue).retry(seeded.to_retry[0]) not in runs
    assert queue.size() == 1


def test_runs_lie_in_the_past_month(world: World) -> None:
    seed(world.queue)
    ends = [run.ended_at for run in all_runs(world.queue) if run.ended_at]
    assert len(ends) == 100
    assert max(ends) <= world.now()
    assert world.now() - timedelta(days=31) < min(ends) < world.now() - timedelta(days=14)
    assert len({end.date() for end in ends}) > 10


def test_runs_tell_what_workers_would_tell(queue: TaskQueue) -> None:
    seeded = seed(queue)
    history = History(queue)
    levels: set[str] = set()
    for run in all_runs(queue):
        details = history.get(run.task_id)
        assert details is not None
        assert details.task is not None
        last = details.attempts[-1]
        assert last.outcome == run.status
        assert [attempt.number for attempt in details.attempts] == list(range(1, run.attempts + 1))
        for attempt in details.attempts:
            assert attempt.seconds is not None
            assert attempt.seconds > 0
            assert attempt.ended_at is not None
            times = [datetime.fromtimestamp(each.at_ms / 1000, UTC) for each in attempt.log]
            assert times == sorted(times)
            assert attempt.started_at <= times[0] <= times[-1] <= attempt.ended_at
            levels |= {each.level for each in attempt.log}
        for before, after in pairwise(details.attempts):
            assert before.ended_at is not None
            assert before.ended_at < after.started_at
        if run.status == "succeeded":
            assert run.result
        if run.status == "failed":
            assert str(last.traceback).startswith("Traceback (most recent call last):")
    assert levels == {"debug", "info", "warning", "error"}
    kinds = Counter(run.run_type for run in all_runs(queue))
    assert kinds.keys() == {"scheduled", "manual", "queued", "retry"}
    tried_twice = [r for r in all_runs(queue) if r.status == "succeeded" and r.attempts == 2]
    assert tried_twice
    assert {run.task_id for run in tried_twice} <= set(seeded.succeeded)


def test_failed_runs_of_one_cause_are_one_group(queue: TaskQueue) -> None:
    seed(queue)
    groups = History(queue).failure_groups()
    assert sum(group.count for group in groups) == 20
    assert 2 < len(groups) < 20


# --- the queue ------------------------------------------------------------------------------------


def test_nothing_waits_runs_or_leads(world: World) -> None:
    seed(world.queue)
    state = world.queue.inspect()
    assert (state.ready, state.delayed, state.running, state.dead) == (0, 0, 0, 20)
    assert (state.overdue, state.set_aside, state.leader) == (0.0, 0, None)
    assert world.queue.link.clock is world.clock


def test_nothing_is_dropped_by_what_comes_after(world: World) -> None:
    seed(world.queue)
    world.advance(timedelta(days=7))
    for number in range(30):
        world.queue.push(make_task("alice", f"later-{number}"))
        world.queue.finish(world.claim_one())
    assert len(all_runs(world.queue)) == 130


def test_a_scheduler_goes_on_from_there(world: World) -> None:
    seed(world.queue)
    world.advance(900)
    report = TaskScheduler(world.queue).tick()
    assert report.is_leader
    assert report.fired == 2  # what is due every five and every fifteen minutes


def test_the_same_seed_makes_the_same_past(redis_client: redis.Redis) -> None:
    def past(random_seed: int) -> object:
        with TaskQueue(redis_client, clock=ManualClock()) as queue:
            seed(queue, random_seed=random_seed, force=True)
            return [
                (r.name, r.user_id, r.run_type, r.status, r.attempts, r.started_at, r.ended_at)
                for r in all_runs(queue)
            ]

    assert past(7) == past(7)
    assert past(7) != past(8)


def test_now_may_be_given(world: World) -> None:
    now = world.now() - timedelta(days=400)
    seeded = seed(world.queue, now=now)
    assert seeded.now == now
    assert all(run.ended_at and run.ended_at <= now for run in all_runs(world.queue))


@pytest.mark.parametrize("what", ["schedule", "task", "delayed", "ended"])
def test_a_queue_with_something_in_it_is_refused(world: World, what: str) -> None:
    if what == "schedule":
        TaskScheduler(world.queue).add_schedule("* * * * *", "alice")
    else:
        world.queue.push(make_task(delay=60.0 if what == "delayed" else None))
        if what == "ended":
            world.queue.finish(world.claim_one())
    before = world.dump()
    with pytest.raises(ConfigurationError, match=r"'default' is not empty: .* seed an empty queue"):
        seed(world.queue)
    assert world.dump() == before


def test_force_empties_it_first(queue: TaskQueue) -> None:
    TaskScheduler(queue).add_schedule("* * * * *", "alice", schedule_id="theirs")
    queue.push(make_task("alice"))
    seed(queue, force=True)
    assert len(all_schedules(queue)) == 10
    assert queue.size() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"runs": 0}, "runs must be a whole number .*, not 0"),
        ({"runs": 10_001}, "runs must be a whole number .*, not 10001"),
        ({"tenants": ()}, "tenants must have"),
        ({"tenants": ("a b",)}, "tenant must be 1 to 64 letters.*, not 'a b'"),
        ({"now": datetime(2026, 1, 1)}, "now must be a datetime with a time zone.* not .*"),
    ],
)
def test_bad_input_stores_nothing(world: World, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        seed(world.queue, **arguments)  # type: ignore[arg-type]
    assert world.dump() == {}


def test_one_school_is_enough(queue: TaskQueue) -> None:
    seeded = seed(queue, tenants=["only"])
    assert seeded.tenants == ("only",)
    assert {run.tenant for run in all_runs(queue)} == {"only", None}


def test_many_are_seeded_as_well(world: World) -> None:
    seed_large(world.queue, schedules=300, runs=2500, users=7)
    state = world.queue.inspect()
    assert (state.schedules, state.ready, state.running, state.overdue) == (300, 0, 0, 0.0)
    assert state.counters["finished"] + state.counters["buried"] == 2500
    assert 0 < state.dead < 250
    assert {each.tenant for each in all_schedules(world.queue)} == {f"tenant-{n}" for n in range(7)}
    runs = History(world.queue).runs(user_id="user-0003", limit=1000)
    assert len(runs) == 357
    assert all(run.ended_at and run.ended_at <= world.now() for run in runs)
    assert world.queue.settings() != QueueSettings()


def test_each_job_has_a_schedule_of_its_own() -> None:
    assert len({job.schedule_id for job in JOBS}) == 10
    assert JOBS[1].schedule_id == "send-fee-reminders"
