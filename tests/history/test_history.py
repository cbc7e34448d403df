"""What became of runs: statuses, attempts, listings, failed ones, retention."""

import base64
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, cast

import pytest
import redis
from support import claim_one, dump, fill, make_task, push, stats

from fairqueue.clock import ManualClock, from_ms
from fairqueue.errors import (
    BrokenRecord,
    InvalidInput,
    InvalidPayload,
    InvalidTask,
    QueueFull,
    UnknownTask,
)
from fairqueue.history import runs as history_module
from fairqueue.history.records import Attempt, FailureGroup, Run, RunDetails
from fairqueue.history.runs import ENDED, STATUSES, History
from fairqueue.models import Claim, Page, Task
from fairqueue.queue.claim import this_place
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Failure, LogLine, Report
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.validation import Priority

HOST, PID = this_place().split(" ")


@pytest.fixture
def history(queue: TaskQueue) -> History:
    return History(queue)


@pytest.fixture
def scheduler(queue: TaskQueue) -> TaskScheduler:
    return TaskScheduler(queue, "s1")


def a_report(kind: str = "ValueError", message: str = "bad value 7", **fields: Any) -> Report:
    """What a worker says of an attempt that failed."""
    failure = Failure(type=kind, message=message, traceback="Traceback: ...", place="jobs.py:run")
    made = Report.of_failure(
        "default", failure, seconds=1.5, timed_out=fields.pop("timed_out", False)
    )
    return replace(made, **fields)


def details(history: History, task_id: str) -> RunDetails:
    found = history.get(task_id)
    assert found is not None
    return found


def run_of(history: History, task_id: str) -> Run:
    return details(history, task_id).run


def ids(page: list[Run]) -> list[str]:
    return [run.task_id for run in page]


def all_pages(history: History, limit: int, **filters: Any) -> list[str]:
    """The ids of a whole listing, page by page."""
    found: list[str] = []
    cursor: str | None = None
    for _ in range(1000):
        page = history.runs(limit=limit, cursor=cursor, **filters)
        assert len(page) <= limit
        found += ids(page)
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("the listing has no end")


def end(queue: TaskQueue, status: str, claim: Claim) -> None:
    """Let a claimed task end in this way."""
    if status == "succeeded":
        queue.finish(claim)
    elif status == "failed":
        queue.bury(claim, "bad value", report=a_report())
    elif status == "timed_out":
        queue.bury(claim, "too long", report=a_report("TimedOut", "too long", timed_out=True))
    else:
        queue.cancel(claim.task.task_id)
        queue.finish(claim)


def add_ended(queue: TaskQueue, status: str, task_id: str, **fields: Any) -> str:
    """A run that has ended in this way, now."""
    queue.push(make_task(task_id=task_id, **fields))
    end(queue, status, claim_one(queue))
    return task_id


def bury(queue: TaskQueue, *task_ids: str, report: Report | None = None, **fields: Any) -> None:
    """Runs that have failed now."""
    for task_id in task_ids:
        queue.push(make_task(task_id=task_id, **fields))
        queue.bury(claim_one(queue), "boom", report=report)


def edit_status(client: redis.Redis, queue: TaskQueue, task_id: str, **fields: Any) -> None:
    """Write other values into a status, behind everybody's back."""
    stored = json.loads(cast(bytes, client.hget(queue.keys["status"], task_id)))
    client.hset(queue.keys["status"], task_id, json.dumps(stored | fields))


# --- statuses -------------------------------------------------------------------------------------

Steps = Callable[[TaskQueue, ManualClock], object]


def take_back(queue: TaskQueue, clock: ManualClock) -> None:
    """Let the leases expire; a claim that wants something else takes them back."""
    clock.advance(31)
    assert queue.claim("other", names=["something else"]) == []


def claimed(step: Callable[[TaskQueue, Claim], object]) -> Steps:
    def steps(queue: TaskQueue, clock: ManualClock) -> None:
        push(queue, "t")
        step(queue, claim_one(queue))

    return steps


def cancelled(step: Callable[[TaskQueue, Claim], object]) -> Steps:
    def steps(queue: TaskQueue, claim: Claim) -> None:
        assert queue.cancel("t")
        step(queue, claim)

    return claimed(steps)


def expired(max_attempts: int, *, cancel: bool = False) -> Steps:
    def steps(queue: TaskQueue, clock: ManualClock) -> None:
        queue.configure(max_attempts=max_attempts)
        push(queue, "t")
        claim_one(queue)
        if cancel:
            queue.cancel("t")
        take_back(queue, clock)

    return steps


def cancelled_between_attempts(queue: TaskQueue, claim: Claim) -> None:
    queue.retry(claim, delay=60)
    queue.cancel("t")


LATE = a_report("TimedOut", "too long", timed_out=True)

TRANSITIONS: dict[str, tuple[str, Steps]] = {
    "pushed": ("pending", lambda q, c: push(q, "t")),
    "pushed for later": ("pending", lambda q, c: push(q, "t", delay=60)),
    "claimed": ("running", claimed(lambda q, claim: None)),
    "claimed, cancel asked": ("running", claimed(lambda q, claim: q.cancel("t"))),
    "released": ("pending", claimed(lambda q, claim: q.release(claim))),
    "retried": ("retrying", claimed(lambda q, claim: q.retry(claim, "boom"))),
    "retried later": ("retrying", claimed(lambda q, claim: q.retry(claim, "boom", delay=60))),
    "expired": ("retrying", expired(2)),
    "finished": ("succeeded", claimed(lambda q, claim: q.finish(claim))),
    "buried": ("failed", claimed(lambda q, claim: q.bury(claim, "boom"))),
    "buried after a time-out": ("timed_out", claimed(lambda q, c: q.bury(c, "late", report=LATE))),
    "expired too often": ("failed", expired(1)),
    "cancelled": ("cancelled", lambda q, c: (push(q, "t"), q.cancel("t"))),
    "cancelled before it is due": (
        "cancelled",
        lambda q, c: (push(q, "t", delay=60), q.cancel("t")),
    ),
    "cancelled between attempts": ("cancelled", claimed(cancelled_between_attempts)),
    "cancelled and finished": ("cancelled", cancelled(lambda q, claim: q.finish(claim))),
    "cancelled and retried": ("cancelled", cancelled(lambda q, claim: q.retry(claim))),
    "cancelled and buried": ("cancelled", cancelled(lambda q, claim: q.bury(claim))),
    "cancelled and released": ("cancelled", cancelled(lambda q, claim: q.release(claim))),
    "cancelled and expired": ("cancelled", expired(2, cancel=True)),
}


@pytest.mark.parametrize("case", TRANSITIONS)
def test_a_run_has_one_status_and_is_in_the_listing_of_that(
    queue: TaskQueue, clock: ManualClock, history: History, case: str
) -> None:
    status, steps = TRANSITIONS[case]
    steps(queue, clock)
    assert run_of(history, "t").status == status
    listed = {each: ids(history.runs(each)) for each in STATUSES}
    assert listed == {each: ["t"] if each == status else [] for each in STATUSES}
    of_user = {each: ids(history.runs(each, user_id="alice")) for each in STATUSES}
    assert of_user == listed


def test_a_run_that_timed_out_and_then_failed_otherwise_has_failed(
    queue: TaskQueue, history: History
) -> None:
    push(queue, "t")
    queue.retry(claim_one(queue), "late", report=LATE)
    queue.bury(claim_one(queue), "boom", report=a_report())
    assert run_of(history, "t").status == "failed"


def test_a_run_that_timed_out_and_whose_worker_then_died_has_failed(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    queue.configure(max_attempts=2)
    push(queue, "t")
    queue.retry(claim_one(queue), "late", report=LATE)
    claim_one(queue, lease=10)
    clock.advance(10)
    assert queue.claim("w") == []
    assert run_of(history, "t").status == "failed"
    assert ids(history.runs("timed_out")) == []


def test_a_run_that_timed_out_and_then_went_well_has_succeeded(
    queue: TaskQueue, history: History
) -> None:
    push(queue, "t")
    queue.retry(claim_one(queue), "late", report=LATE)
    queue.finish(claim_one(queue))
    assert run_of(history, "t").status == "succeeded"


def test_a_run_says_all_about_itself(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    pushed = clock.now()
    task = make_task(
        task_id="t", name="report", priority=Priority.HIGH, payload={"n": 1}, triggered_by="carol"
    )
    queue.push(task)
    clock.advance(2)
    claim = claim_one(queue, worker="w1")
    clock.advance(3)
    queue.finish_many([(claim, {"rows": 8}, Report(seconds=2.75))])
    found = details(history, "t")
    assert found.run == Run(
        task_id="t",
        status="succeeded",
        user_id="alice",
        name="report",
        priority=Priority.HIGH,
        run_type="queued",
        triggered_by="carol",
        schedule_id=None,
        retry_of=None,
        retried_as=None,
        attempts=1,
        pushed_at=pushed,
        due_at=pushed,
        started_at=pushed + timedelta(seconds=2),
        ended_at=pushed + timedelta(seconds=5),
        seconds=2.75,
        worker_id="w1",
        host=HOST,
        pid=int(PID),
        error=None,
        fingerprint=None,
        result={"rows": 8},
        cancel_requested=False,
        stale_since=None,
    )
    assert found.task is not None
    assert found.task.payload == {"n": 1}


def test_a_run_cancelled_between_attempts_does_not_count_the_wait(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    push(queue, "t")
    queue.retry(claim_one(queue), "boom", delay=3600)
    clock.advance(1800)
    queue.cancel("t")
    assert run_of(history, "t").seconds is None


def test_without_a_report_a_run_took_as_long_as_it_was_held(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    push(queue, "t")
    claim = claim_one(queue)
    clock.advance(1.25)
    queue.bury(claim, "boom")
    assert run_of(history, "t").seconds == 1.25


def test_nothing_is_known_of_a_run_that_never_was(history: History) -> None:
    assert history.get("nobody") is None


@pytest.mark.parametrize("task_id", ["", "a\nb", 7, None])
def test_a_bad_id_is_refused(history: History, task_id: Any) -> None:
    for ask in (history.get, history.retry, history.discard):
        with pytest.raises(InvalidTask, match="task_id"):
            ask(task_id)


# --- attempts -------------------------------------------------------------------------------------


def outcomes(history: History, task_id: str = "t") -> list[tuple[int, str]]:
    return [(each.number, each.outcome) for each in details(history, task_id).attempts]


def test_the_attempts_of_a_run_that_failed_twice_and_then_went_well(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    log = (LogLine(1_700_000_000_500, "warning", "nearly"),)
    start = clock.now()
    push(queue, "t")
    first = claim_one(queue, worker="w1")
    clock.advance(2)
    queue.retry(first, "bad value 7", delay=60, report=a_report(log=log, log_dropped=3))
    clock.advance(60)
    second = claim_one(queue, worker="w2")
    clock.advance(1)
    queue.retry(second, "too long", report=LATE)
    third = claim_one(queue, worker="w3")
    clock.advance(4)
    queue.finish(third)

    def at(seconds: float) -> datetime:
        return start + timedelta(seconds=seconds)

    assert details(history, "t").attempts == [
        Attempt(
            number=1,
            outcome="failed",
            started_at=at(0),
            ended_at=at(2),
            seconds=1.5,
            worker_id="w1",
            host=HOST,
            pid=int(PID),
            error_type="ValueError",
            error="bad value 7",
            traceback="Traceback: ...",
            log=log,
            log_dropped=3,
        ),
        Attempt(
            number=2,
            outcome="timed_out",
            started_at=at(62),
            ended_at=at(63),
            seconds=1.5,
            worker_id="w2",
            host=HOST,
            pid=int(PID),
            error_type="TimedOut",
            error="too long",
            traceback="Traceback: ...",
        ),
        Attempt(
            number=3,
            outcome="succeeded",
            started_at=at(63),
            ended_at=at(67),
            seconds=4.0,
            worker_id="w3",
            host=HOST,
            pid=int(PID),
        ),
    ]


def test_an_attempt_without_a_report_keeps_its_error(queue: TaskQueue, history: History) -> None:
    push(queue, "t")
    queue.retry(claim_one(queue), 'first "error"\n ünd 1')
    queue.bury(claim_one(queue), "second error")
    attempts = details(history, "t").attempts
    assert [each.error for each in attempts] == ['first "error"\n ünd 1', "second error"]
    assert run_of(history, "t").error == "second error"


def test_an_attempt_whose_worker_died_is_kept(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    push(queue, "t")
    claim_one(queue, worker="dead")
    take_back(queue, clock)
    claim_one(queue, worker="alive")
    first, second = details(history, "t").attempts
    assert (first.outcome, first.worker_id, first.seconds) == ("expired", "dead", 31.0)
    assert first.error == "the lease of worker dead expired"
    assert (second.outcome, second.worker_id, second.ended_at) == ("running", "alive", None)


def test_a_run_that_expired_for_the_last_time_has_its_attempts(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    queue.configure(max_attempts=2)
    push(queue, "t")
    for _ in range(2):
        claim_one(queue)
        take_back(queue, clock)
    assert outcomes(history) == [(1, "expired"), (2, "expired")]
    assert run_of(history, "t").fingerprint == "lease-expired"


def test_a_released_attempt_leaves_nothing(queue: TaskQueue, history: History) -> None:
    push(queue, "t")
    queue.retry(claim_one(queue), "boom")
    queue.release(claim_one(queue))
    assert outcomes(history) == [(1, "failed")]
    queue.finish(claim_one(queue))
    assert outcomes(history) == [(1, "failed"), (2, "succeeded")]


def test_a_run_that_never_began_has_no_attempts(queue: TaskQueue, history: History) -> None:
    push(queue, "t")
    assert outcomes(history) == []
    queue.cancel("t")
    assert outcomes(history) == []


@pytest.mark.parametrize(
    ("step", "outcome"),
    [
        (lambda q, claim: q.finish(claim), "cancelled"),
        (lambda q, claim: q.release(claim), "cancelled"),
        (lambda q, claim: q.retry(claim, "boom"), "failed"),
        pytest.param(
            lambda q, claim: q.bury(claim, "late", report=LATE),
            "timed_out",
            marks=pytest.mark.untidy,  # the check takes a cancelled run for one that timed out
        ),
    ],
    ids=["finish", "release", "retry", "bury"],
)
def test_an_attempt_that_was_asked_to_cancel_says_how_it_ended(
    queue: TaskQueue, history: History, step: Callable[[TaskQueue, Claim], None], outcome: str
) -> None:
    push(queue, "t")
    claim = claim_one(queue)
    queue.cancel("t")
    step(queue, claim)
    assert outcomes(history) == [(1, outcome)]


def test_what_a_run_logged_is_kept_when_it_goes_well(queue: TaskQueue, history: History) -> None:
    context = {"page": 7, "of": {"name": "ü", "sizes": [1, 2.5, None, True]}}
    log = (LogLine(1, "info", "begun"), LogLine(2, "error", "ende\nmit ü", context))
    push(queue, "t")
    queue.finish_many([(claim_one(queue), None, Report(seconds=0.5, log=log))])
    (attempt,) = details(history, "t").attempts
    assert (attempt.outcome, attempt.seconds, attempt.log) == ("succeeded", 0.5, log)


def test_the_oldest_attempts_go_when_there_is_too_much_to_tell(
    queue: TaskQueue, history: History
) -> None:
    push(queue, "t")
    long = a_report(log=tuple(LogLine(n, "info", "x" * 400) for n in range(60)))
    for _ in range(6):
        queue.retry(claim_one(queue), report=long)
    queue.finish(claim_one(queue))
    assert outcomes(history) == [(5, "failed"), (6, "failed"), (7, "succeeded")]


@pytest.mark.untidy
def test_attempts_that_cannot_be_read_are_left_out(
    redis_client: redis.Redis, queue: TaskQueue, history: History
) -> None:
    push(queue, "t")
    for n in range(3):
        queue.retry(claim_one(queue), f"error {n}")
    key = queue.keys["attempts"]
    lines = cast(bytes, redis_client.hget(key, "t")).split(b"\n")
    spoilt = [lines[0], b"{", b'{"attempt":2}', b"[]", b"\xff", b'{"report":{"log":[5]}}', lines[2]]
    redis_client.hset(key, "t", b"\n".join(spoilt))
    assert [attempt.error for attempt in details(history, "t").attempts] == ["error 0", "error 2"]


# --- where runs come from -------------------------------------------------------------------------


def fire(scheduler: TaskScheduler, clock: ManualClock, schedule_id: str, **fields: Any) -> Claim:
    """Add a schedule of every minute and claim its first task."""
    scheduler.add_schedule("* * * * *", "alice", schedule_id=schedule_id, **fields)
    clock.advance(60)
    assert scheduler.tick().fired == 1
    return claim_one(scheduler.queue)


def test_a_run_says_where_it_comes_from(
    queue: TaskQueue, clock: ManualClock, history: History, scheduler: TaskScheduler
) -> None:
    queue.push(make_task(task_id="queued"))
    queue.finish(claim_one(queue))
    scheduled = fire(scheduler, clock, "s").task
    bury(queue, "failed")
    manual = scheduler.trigger("s", triggered_by="carol")
    retry = history.retry("failed", triggered_by="dave")
    origins = {
        task_id: (run.run_type, run.triggered_by, run.schedule_id, run.retry_of)
        for task_id in ("queued", scheduled.task_id, manual, retry)
        for run in [run_of(history, task_id)]
    }
    assert origins == {
        "queued": ("queued", None, None, None),
        scheduled.task_id: ("scheduled", None, "s", None),
        manual: ("manual", "carol", "s", None),
        retry: ("retry", "dave", None, "failed"),
    }


# --- listings -------------------------------------------------------------------------------------


def test_ended_runs_are_listed_newest_first(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    expected = []
    for number, status in enumerate(ENDED * 3):
        expected.append(add_ended(queue, status, f"t{number}"))
        clock.advance(0.001)
    page = history.runs()
    assert ids(page) == expected[::-1]
    assert page.cursor is None


def test_runs_that_ended_in_the_same_moment_are_each_listed_once(
    queue: TaskQueue, history: History
) -> None:
    expected = {add_ended(queue, ENDED[n % 4], f"t{n}") for n in range(25)}
    for limit in (1, 2, 7, 24, 25, 26):
        found = all_pages(history, limit)
        assert len(found) == 25
        assert set(found) == expected


def test_a_page_that_ends_with_the_listing_has_no_cursor(
    queue: TaskQueue, history: History
) -> None:
    for n in range(4):
        add_ended(queue, "succeeded", f"t{n}")
    assert history.runs("succeeded", limit=4).cursor is None
    assert history.runs("succeeded", limit=3).cursor is not None


def test_nothing_is_listed_of_an_empty_queue(history: History) -> None:
    for status in (None, *STATUSES):
        page = history.runs(status)
        assert (list(page), page.cursor) == ([], None)
    assert list(history.failure_groups()) == []


USERS, NAMES = ("alice", "bob"), ("report", "mail", "backup")


@pytest.fixture
def many(
    queue: TaskQueue, clock: ManualClock, scheduler: TaskScheduler, history: History
) -> list[Run]:
    """Runs of all kinds, ended at moments of which some are the same; newest first."""
    chance = random.Random(7)
    for schedule_id, user in (("s1", "alice"), ("s2", "bob")):
        scheduler.add_schedule("* * * * *", user, schedule_id=schedule_id, name="backup")
    found = []
    for number in range(80):
        user, name = chance.choice(USERS), chance.choice(NAMES)
        if number % 4 == 0:
            task_id = scheduler.trigger(chance.choice(("s1", "s2")))
        else:
            task_id = queue.push(make_task(user, f"t{number}", name=name))
        end(queue, chance.choice(ENDED), claim_one(queue))
        found.append(run_of(history, task_id))
        clock.advance(chance.choice((0, 0, 0.001, 0.5)))

    def newest_first(run: Run) -> tuple[datetime | None, str, str]:
        return (
            run.ended_at,
            {"succeeded": "s", "cancelled": "c"}.get(run.status, run.status[0]),
            run.task_id,
        )

    return sorted(found, key=newest_first, reverse=True)


def test_a_listing_is_of_what_matches_all_its_filters(history: History, many: list[Run]) -> None:
    middle, later = many[40].ended_at, many[10].ended_at
    assert middle is not None
    assert later is not None
    mark = next(run.fingerprint for run in many if run.status == "failed")
    tests: dict[str, dict[Any, Callable[[Run], bool]]] = {
        "status": {
            status: (lambda run, status=status: run.status in status)  # type: ignore[misc]
            for status in [(each,) for each in ENDED] + [("failed", "timed_out"), STATUSES]
        },
        "user_id": {"alice": lambda run: run.user_id == "alice"},
        "schedule_id": {"s1": lambda run: run.schedule_id == "s1"},
        "name": {"backup": lambda run: run.name == "backup"},
        "fingerprint": {mark: lambda run: run.fingerprint == mark},
        "since": {middle: lambda run: run.ended_at is not None and run.ended_at >= middle},
        "until": {later: lambda run: run.ended_at is not None and run.ended_at < later},
    }
    single = [(field, value) for field, values in tests.items() for value in values]
    for chosen in [*itertools.combinations(single, 1), *itertools.combinations(single, 2)]:
        filters = dict(chosen)
        expected = [
            run.task_id
            for run in many
            if all(tests[field][value](run) for field, value in filters.items())
        ]
        assert all_pages(history, 1000, **filters) == expected, filters
        assert all_pages(history, 7, **filters) == expected, filters


def test_small_reads_make_the_same_listing(
    history: History, many: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "READ_AT_ONCE", 3)
    assert all_pages(history, 9) == ids(many)
    failed = [run.task_id for run in many if run.status == "failed" and run.user_id == "bob"]
    assert all_pages(history, 9, status="failed", user_id="bob") == failed


def test_a_walk_for_filters_that_match_few_is_bounded(
    history: History, many: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "READ_AT_ONCE", 5)
    monkeypatch.setattr(history_module, "MAX_WALKED", 10)
    nobody = history.runs(user_id="alice", name="no such name")
    assert list(nobody) == []
    assert nobody.cursor is not None
    expected = [run.task_id for run in many if run.status == "failed" and run.user_id == "bob"]
    assert all_pages(history, 5, status="failed", user_id="bob") == expected


def test_moments_may_be_given_in_seconds_and_far_away(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    add_ended(queue, "succeeded", "t")
    now = clock.now_ms() / 1000
    assert ids(history.runs(since=now)) == ["t"]
    assert ids(history.runs(until=now)) == []
    assert ids(history.runs(since=0, until=now + 0.001)) == ["t"]
    year_2300, year_9000 = 10_413_792_000.0, 221_845_392_000.0
    for far in (year_2300, year_9000):
        assert ids(history.runs(until=far)) == ["t"]
        assert ids(history.runs(since=far)) == []
    assert ids(history.runs(since=datetime.fromisoformat("1950-01-01T00:00:00+00:00"))) == ["t"]


def test_moments_also_choose_among_unfinished_runs(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    push(queue, "old")
    clock.advance(10)
    push(queue, "new")
    assert ids(history.runs("pending", since=clock.now())) == ["new"]
    assert ids(history.runs("pending", until=clock.now())) == ["old"]


def test_without_a_status_all_are_listed(queue: TaskQueue, history: History) -> None:
    add_ended(queue, "succeeded", "ended")
    push(queue, "again")
    queue.retry(claim_one(queue), "broken", delay=60)
    push(queue, "running")
    claim_one(queue)
    push(queue, "waiting")
    push(queue, "later", delay=90)
    everything = ["later", "again", "waiting", "running", "ended"]
    assert ids(history.runs()) == ids(history.runs(STATUSES)) == everything
    assert ids(history.runs(("running", *ENDED))) == ["running", "ended"]
    found, cursor = list[str](), None
    while True:
        page = history.runs(limit=2, cursor=cursor)
        found += ids(page)
        cursor = page.cursor
        if cursor is None:
            break
    assert found == everything
    assert ids(history.runs(user_id="alice")) == everything


def test_a_backlog_of_others_does_not_hide_what_has_ended(
    queue: TaskQueue, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairqueue.history.runs.MAX_SKIMMED", 10)
    monkeypatch.setattr("fairqueue.history.runs.MAX_WALKED", 60)
    monkeypatch.setattr("fairqueue.history.runs.READ_AT_ONCE", 10)
    push(queue, "mine", name="rare")
    queue.finish(claim_one(queue))
    push(queue, *(f"other-{n}" for n in range(100)), name="common")
    push(queue, *(f"late-{n}" for n in range(100)), name="common", delay=60)
    assert ids(history.runs(name="rare")) == ["mine"]
    assert ids(history.runs(STATUSES, name="rare")) == []  # named, all of them are walked through


def test_all_runs_of_a_schedule_are_listed(
    queue: TaskQueue, clock: ManualClock, history: History, scheduler: TaskScheduler
) -> None:
    first = fire(scheduler, clock, "s")
    queue.finish(first)
    scheduler.add_schedule("0 0 1 1 *", "alice", schedule_id="s2")
    scheduler.trigger("s2")
    clock.advance(60)
    scheduler.tick()
    second = f"s:{clock.now_ms() // 60_000 * 60_000}"
    third = scheduler.trigger("s")
    everything = {first.task.task_id, second, third}
    assert set(ids(history.runs(schedule_id="s"))) == everything
    assert set(all_pages(history, 1, schedule_id="s")) == everything
    assert set(ids(history.runs("pending", schedule_id="s"))) == {second, third}
    assert ids(history.runs("running", schedule_id="s")) == []
    assert ids(history.runs("succeeded", schedule_id="s")) == [first.task.task_id]


def test_running_ones_are_listed_by_their_start(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    for n in range(3):
        push(queue, f"t{n}")
        queue.claim("w", lease=100 - 10 * n)
        clock.advance(1)
    assert ids(history.runs("running")) == ["t2", "t1", "t0"]
    assert all_pages(history, 1, status="running") == ["t2", "t1", "t0"]
    assert all_pages(history, 2, status="running", user_id="alice") == ["t2", "t1", "t0"]


def test_running_ones_of_one_are_found_behind_those_of_others(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    push(queue, "old", user_id="alice")
    claim_one(queue)
    clock.advance(1)
    fill(queue, "bob", 5)
    queue.claim("w", limit=5)
    assert ids(history.runs("running", user_id="alice", limit=1)) == ["old"]


def test_pending_ones_are_listed_by_when_they_are_due_or_began_to_wait(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    for n in range(4):
        push(queue, f"w{n}")
        push(queue, f"d{n}", delay=60)
        clock.advance(1)
    expected = ["d3", "d2", "d1", "d0", "w3", "w2", "w1", "w0"]
    for limit in (1, 3, 8, 9):
        assert all_pages(history, limit, status="pending") == expected


def test_many_that_began_to_wait_at_once_are_each_listed_once(
    queue: TaskQueue, history: History
) -> None:
    fill(queue, "alice", 300)
    fill(queue, "ünal", 3)
    for limit in (7, 100):
        found = all_pages(history, limit, status="pending")
        assert len(found) == 303
        assert len(set(found)) == 303


def test_waiting_ones_of_a_user_are_found_in_all_places(queue: TaskQueue, history: History) -> None:
    queue.set_limits("slow", slots=1)
    push(queue, "running", "held-1", "held-2", name="slow")
    push(queue, "ready-1", "ready-2", name="quick")
    push(queue, "delayed", delay=60)
    push(queue, "bobs", user_id="bob", name="slow")
    assert len(queue.claim("w", limit=1)) == 1
    queue.claim("w2", limit=1, names=["slow"])
    expected = {"held-1", "held-2", "ready-1", "ready-2", "delayed"}
    for limit in (1, 2, 100):
        found = all_pages(history, limit, status="pending", user_id="alice")
        assert sorted(found) == sorted(expected)
    assert ids(history.runs("pending", user_id="alice", name="slow")) == ["held-2", "held-1"]
    assert dump_keys(queue, "held") != []


def dump_keys(queue: TaskQueue, key: str) -> list[bytes]:
    return list(queue.link.ask(("ZRANGE", queue.keys[key], 0, -1))[0])


def test_waiting_ones_of_a_user_do_not_walk_past_those_of_others(
    queue: TaskQueue, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "READ_AT_ONCE", 5)
    monkeypatch.setattr(history_module, "MAX_WALKED", 10)
    fill(queue, "bob", 100)
    fill(queue, "alice", 3)
    page = history.runs("pending", user_id="alice")
    assert (sorted(ids(page)), page.cursor) == (["alice-0", "alice-1", "alice-2"], None)


LOOKALIKES = ["a", "ab", "a b", "a:b", "A", "ä", "äb", "a\u0301", "日本", "日", "o", "os", "fa"]


def test_values_that_look_alike_do_not_leak_into_each_others_listings(
    queue: TaskQueue, clock: ManualClock, history: History, scheduler: TaskScheduler
) -> None:
    for text in LOOKALIKES:
        queue.push(make_task(text, f"{text}-ended", name=text))
        queue.bury(claim_one(queue), report=a_report(fingerprint=text))
    for text in LOOKALIKES:
        scheduler.add_schedule("0 0 1 1 *", "scheduled", schedule_id=text)
        scheduler.trigger(text)
        queue.finish(claim_one(queue))
    for text in LOOKALIKES:
        scheduler.trigger(text)
        push(queue, f"{text}-waiting", user_id=text, name=text)
    for text in LOOKALIKES:
        filters: list[Any] = [{"user_id": text}, {"name": text}, {"fingerprint": text}]
        for each in filters:
            assert ids(history.runs(ENDED, **each)) == [f"{text}-ended"]
        assert ids(history.runs("pending", user_id=text)) == [f"{text}-waiting"]
        assert {run.schedule_id for run in history.runs(schedule_id=text)} == {text}
        assert len(history.runs(schedule_id=text)) == 2
    assert sorted(group.fingerprint for group in history.failure_groups()) == sorted(LOOKALIKES)


# --- while things change --------------------------------------------------------------------------


def rest_of(history: History, page: Page[Run], **filters: Any) -> list[str]:
    """The ids of the pages after a page."""
    found: list[str] = []
    for _ in range(100):
        if page.cursor is None:
            return found
        page = history.runs(cursor=page.cursor, **filters)
        found += ids(page)
    raise AssertionError("the listing has no end")


def all_groups(history: History, limit: int, cursor: str | None = None) -> list[str]:
    """The fingerprints of all groups after a cursor, page by page."""
    found = []
    for _ in range(100):
        page = history.failure_groups(limit, cursor)
        found += [group.fingerprint for group in page]
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("the groups have no end")


def test_runs_that_wait_are_not_missed_when_others_begin_between_pages(
    queue: TaskQueue, history: History
) -> None:
    fill(queue, "alice", 10)
    filters: dict[str, Any] = {"status": "pending", "limit": 4}
    page = history.runs(**filters)
    for claim in queue.claim("w", limit=8):
        queue.finish(claim)
    assert {"alice-8", "alice-9"} <= {*ids(page), *rest_of(history, page, **filters)}
    fill(queue, "bob", 10)
    page = history.runs(**filters)
    for task_id in ids(page):
        queue.cancel(task_id)
    left = {f"bob-{n}" for n in range(10)} | {"alice-8", "alice-9"}
    assert left - set(ids(page)) == set(rest_of(history, page, **filters))


def test_running_ones_are_not_missed_when_leases_are_extended_between_pages(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    fill(queue, "alice", 9)
    claims = queue.claim("w", limit=9)
    filters: dict[str, Any] = {"status": "running", "limit": 3}
    page = history.runs(**filters)
    first = set(ids(page))
    clock.advance(5)
    gone = [claim for claim in claims if claim.task.task_id in first]
    queue.extend([claim for claim in claims if claim not in gone][::2], lease=100)
    queue.finish_many((claim, None) for claim in gone)
    fill(queue, "bob", 2)
    queue.claim("w", limit=2)
    expected = {f"alice-{n}" for n in range(9)} - first
    assert sorted(rest_of(history, page, **filters)) == sorted(expected)


def test_a_run_that_ends_while_it_is_looked_at_is_listed_once(
    queue: TaskQueue, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(queue, "t")
    claim = claim_one(queue)
    ask = queue.link.ask

    def ask_and_finish(*commands: Any, **options: Any) -> list[Any]:
        answers = ask(*commands, **options)
        if commands[0][:2] == ("ZRANGE", queue.keys["leases"]):
            queue.finish(claim)
        return answers

    monkeypatch.setattr(queue.link, "ask", ask_and_finish)
    assert [(run.task_id, run.status) for run in history.runs()] == [("t", "succeeded")]


def test_ended_ones_are_not_missed_when_more_end_between_pages(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    for n in range(10):
        add_ended(queue, ENDED[n % 4], f"old{n}")
        clock.advance(1)
    page = history.runs(limit=3)
    assert ids(page) == ["old9", "old8", "old7"]
    for n in range(3):
        add_ended(queue, "failed", f"new{n}")
    history.discard("old9")
    assert rest_of(history, page, limit=3) == [f"old{n}" for n in range(6, -1, -1)]


def test_a_run_that_goes_on_between_pages_comes_again(queue: TaskQueue, history: History) -> None:
    fill(queue, "alice", 6)
    filters: dict[str, Any] = {"status": STATUSES, "limit": 2}
    page = history.runs(**filters)
    found = ids(page)
    for _ in range(20):
        for claim in queue.claim("w", limit=1):
            queue.finish(claim)
        if page.cursor is not None:
            page = history.runs(cursor=page.cursor, **filters)
            found += ids(page)
    assert page.cursor is None
    assert set(found) == {f"alice-{n}" for n in range(6)}


def test_groups_are_not_missed_when_others_vanish_between_pages(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    for n in range(6):
        bury(queue, f"t{n}", report=a_report(fingerprint=f"f{n}"))
        clock.advance(n % 2)
    page = history.failure_groups(limit=2)
    assert [group.fingerprint for group in page] == ["f5", "f4"]
    history.discard("t5")
    assert all_groups(history, 2, page.cursor) == ["f3", "f2", "f1", "f0"]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"status": "done"},
        {"status": "FAILED"},
        {"status": ["failed", "lost"]},
        {"status": []},
        {"status": 5},
        {"status": [None]},
        {"status": [["failed"]]},
        {"user_id": ""},
        {"user_id": "a\0b"},
        {"user_id": 7},
        {"name": "x" * 201},
        {"schedule_id": "a\nb"},
        {"fingerprint": "\x7f"},
        {"since": "yesterday"},
        {"since": datetime(2026, 1, 1)},
        {"until": float("nan")},
        {"until": True},
        {"limit": 0},
        {"limit": 1001},
        {"limit": True},
        {"limit": "10"},
        {"cursor": ""},
        {"cursor": "nonsense"},
        {"cursor": "ü"},
        {"cursor": 5},
        {"cursor": b"cnVuczo="},
    ],
    ids=str,
)
def test_a_listing_refuses_what_it_cannot_use(history: History, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(arguments))):
        history.runs(**arguments)


def a_cursor(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "text", ["", "open:x", "-1:", "0:", "failures:5 x", "waiting:x y", "waiting:²²", "waiting:- a"]
)
def test_a_cursor_of_another_listing_is_refused(history: History, text: str) -> None:
    with pytest.raises(InvalidInput, match="cursor"):
        history.runs(STATUSES, cursor=a_cursor(text))
    with pytest.raises(InvalidInput, match="cursor"):
        history.failure_groups(cursor=a_cursor("runs:1"))


@pytest.mark.parametrize("text", ["waiting:5 x", "leases:5 x", "runs:nowhere", "runs:", "delayed:"])
def test_a_cursor_to_nowhere_does_no_harm(queue: TaskQueue, history: History, text: str) -> None:
    add_ended(queue, "succeeded", "t")
    assert set(ids(history.runs(STATUSES, cursor=a_cursor(text)))) <= {"t"}


def test_a_cursor_does_not_lead_to_the_runs_of_others(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    for n in range(3):
        add_ended(queue, "succeeded", f"b{n}", user_id="bob")
        clock.advance(1)
        add_ended(queue, "succeeded", f"a{n}", user_id="alice")
    fill(queue, "bob", 3)
    fill(queue, "alice", 3)
    for status in ("succeeded", "pending"):
        cursor = history.runs(status, user_id="alice", limit=1).cursor
        found = history.runs(status, user_id="bob", cursor=cursor)
        assert {run.user_id for run in found} == {"bob"}


@pytest.mark.parametrize("limit", [0, -1, 1.5, "3", None])
def test_bad_limits_of_the_other_calls_are_refused(history: History, limit: Any) -> None:
    for ask in (history.failure_groups, history.retry_matching, history.discard_matching):
        with pytest.raises(InvalidInput, match="limit"):
            ask(limit=limit)


@pytest.mark.parametrize("value", [-1, "1d", None, float("inf")])
def test_prune_refuses_what_is_no_duration(history: History, value: Any) -> None:
    with pytest.raises(InvalidInput, match="older_than"):
        history.prune(value)


def test_who_asked_for_a_retry_is_checked(queue: TaskQueue, history: History) -> None:
    bury(queue, "t")
    with pytest.raises(InvalidTask, match="triggered_by"):
        history.retry("t", triggered_by="a\nb")
    with pytest.raises(InvalidTask, match="triggered_by"):
        history.retry_matching(triggered_by="", user_id="nobody")
    assert queue.size() == 0


# --- records that somebody has spoilt -------------------------------------------------------------

SPOILT = [b"", b"not json", b"[]", b"7", b"{}", b"\xff\xfe", b'{"state":"finished","user":"alice"}']


@pytest.mark.untidy
@pytest.mark.parametrize("text", SPOILT)
def test_a_run_whose_status_is_spoilt_is_skipped_and_named(
    redis_client: redis.Redis, queue: TaskQueue, history: History, text: bytes
) -> None:
    for status in ("succeeded", "failed"):
        for n in range(3):
            add_ended(queue, status, f"{status}-{n}")
        redis_client.hset(queue.keys["status"], f"{status}-2", text)
    push(queue, "running-0", "running-1")
    queue.claim("w", limit=2)
    push(queue, "waiting-0", "waiting-1")
    for task_id in ("running-0", "waiting-0"):
        redis_client.hset(queue.keys["status"], task_id, text)
    expected = {f"{status}-{n}" for status in ("succeeded", "failed") for n in (0, 1)}
    expected |= {"running-1", "waiting-1"}
    assert set(all_pages(history, 1, status=STATUSES)) == expected
    assert set(all_pages(history, 1, status=STATUSES, user_id="alice")) == expected
    (group,) = history.failure_groups()
    assert group.latest.task_id == "failed-1"
    for task_id in ("succeeded-2", "failed-2", "running-0", "waiting-0"):
        with pytest.raises(BrokenRecord, match=task_id):
            history.get(task_id)


@pytest.mark.untidy
@pytest.mark.parametrize(
    "fields",
    [
        {"state": "odd"},
        {"user": 7},
        {"name": None},
        {"level": 9},
        {"attempts": "two"},
        {"pushed": 1e300},
        {"ended": "late"},
        {"place": 5},
        {"place": "host pid"},
        {"result": "{"},
        {"took": "long"},
    ],
    ids=str,
)
def test_a_status_with_a_spoilt_field_is_skipped_and_named(
    redis_client: redis.Redis, queue: TaskQueue, history: History, fields: dict[str, Any]
) -> None:
    add_ended(queue, "succeeded", "good")
    add_ended(queue, "succeeded", "spoilt")
    edit_status(redis_client, queue, "spoilt", **fields)
    assert ids(history.runs()) == ["good"]
    with pytest.raises(BrokenRecord, match="spoilt"):
        history.get("spoilt")


@pytest.mark.untidy
def test_members_of_the_index_that_mean_nothing_are_skipped(
    redis_client: redis.Redis, queue: TaskQueue, history: History
) -> None:
    add_ended(queue, "failed", "t")
    mark = run_of(history, "t").fingerprint or ""
    junk = [b"\0", b"\0x", b"\0\xff", b"\x0017", b"\0" + b"9" * 13 + b"sgone"]
    for prefix in (b"os", b"of", b"ualice", f"f{mark}".encode()):
        redis_client.zadd(queue.keys["runs"], {prefix + tail: 0 for tail in junk})
    assert all_pages(history, 1) == ["t"]
    assert all_pages(history, 1, user_id="alice") == ["t"]
    assert [group.latest.task_id for group in history.failure_groups()] == ["t"]


@pytest.mark.untidy
def test_a_spoilt_member_of_a_group_does_not_stop_a_discard(
    redis_client: redis.Redis, queue: TaskQueue, history: History
) -> None:
    bury(queue, "t", report=a_report(fingerprint="x"))
    redis_client.zadd(queue.keys["runs"], {b"fx\0spoilt": 0})
    assert history.discard("t")
    assert history.get("t") is None
    assert list(history.failure_groups()) == []


@pytest.mark.untidy
def test_a_spoilt_document_says_so_and_cannot_run_again(
    redis_client: redis.Redis, queue: TaskQueue, history: History
) -> None:
    bury(queue, "t1", "t2", "t3")
    for text in (b"{", b"[]", b'{"user":"alice"}', b'{"user":"alice","name":7}'):
        redis_client.hset(queue.keys["tasks"], "t2", text)
        assert details(history, "t2").task is None
        with pytest.raises(BrokenRecord, match="t2"):
            history.retry("t2")
    assert len(history.retry_matching()) == 2
    assert [run.retried_as is None for run in history.runs("failed")] == [False, True, False]


# --- retention ------------------------------------------------------------------------------------


def test_retention_by_count_drops_the_oldest(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    queue.configure(keep_finished=3, keep_dead=2)
    for n in range(6):
        add_ended(queue, "succeeded", f"s{n}")
        bury(queue, f"f{n}", report=a_report(fingerprint=f"mark{n % 3}"))
        clock.advance(1)
    assert ids(history.runs("succeeded")) == ["s5", "s4", "s3"]
    assert ids(history.runs("failed")) == ["f5", "f4"]
    state = dump(redis_client)
    assert state["attempts"].keys() == {"f5", "f4"}
    assert state["failures"].keys() == {"mark2", "mark1"}
    assert history.get("s0") is None


def test_retention_by_age_drops_what_is_old(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    queue.configure(keep_finished_for=60, keep_dead_for=3600)
    add_ended(queue, "succeeded", "s")
    add_ended(queue, "cancelled", "c")
    bury(queue, "f", report=a_report())
    clock.advance(61)
    queue.claim("w")
    assert ids(history.runs()) == ["f"]
    clock.advance(3600)
    queue.claim("w")
    assert ids(history.runs()) == []
    state = dump(redis_client)
    assert not state.keys() & {"runs", "attempts", "failures", "status", "tasks", "ended", "dead"}


def test_runs_of_a_queue_that_keeps_none_are_not_listed(queue: TaskQueue, history: History) -> None:
    queue.configure(keep_finished=0, keep_dead=0)
    for status in ENDED:
        add_ended(queue, status, status)
    assert ids(history.runs()) == []


def test_prune_drops_what_ended_long_enough_ago(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    for status in ENDED:
        add_ended(queue, status, f"old-{status}")
    clock.advance(60)
    for status in ENDED:
        add_ended(queue, status, f"new-{status}")
    push(queue, "waiting")
    assert history.prune(60.001) == 0
    assert history.prune(timedelta(minutes=1)) == 4
    assert set(ids(history.runs(ENDED))) == {f"new-{status}" for status in ENDED}
    assert len(dump(redis_client)["attempts"]) == 2
    assert history.prune(0) == 4
    assert ids(history.runs(STATUSES)) == ["waiting"]


def test_a_prune_takes_only_what_ended_before_its_moment(
    queue: TaskQueue, clock: ManualClock
) -> None:
    add_ended(queue, "succeeded", "t")
    for before_ms, dropped in ((clock.now_ms(), 0), (clock.now_ms() + 1, 1)):
        assert queue.link.run("prune", op=str(before_ms), before_ms=before_ms, limit=9) == dropped


def test_prune_drops_many_in_parts(
    queue: TaskQueue, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "PRUNE_CHUNK", 4)
    fill(queue, "alice", 30)
    claims = queue.claim("w", limit=30)
    queue.finish_many((claim, None) for claim in claims[:20])
    for claim in claims[20:]:
        queue.bury(claim)
    assert history.prune(0) == 30
    assert ids(history.runs()) == []


@pytest.mark.untidy
def test_prune_also_drops_what_cannot_be_read(
    redis_client: redis.Redis, queue: TaskQueue, history: History
) -> None:
    add_ended(queue, "succeeded", "t1")
    add_ended(queue, "failed", "t2")
    for task_id in ("t1", "t2"):
        redis_client.hset(queue.keys["status"], task_id, b"spoilt")
    assert history.prune(0) == 2
    assert history.get("t1") is None
    assert ids(history.runs()) == []
    assert list(history.failure_groups()) == []


# --- failed runs ----------------------------------------------------------------------------------


def groups_of(history: History) -> list[tuple[str, int, str]]:
    return [(g.fingerprint, g.count, g.latest.task_id) for g in history.failure_groups()]


def test_failed_runs_are_grouped_by_cause(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    bury(queue, "a1", report=a_report("ValueError", "bad value 1"))
    clock.advance(1)
    bury(queue, "b1", report=a_report("KeyError", "'x'"))
    clock.advance(1)
    bury(queue, "a2", report=a_report("ValueError", "bad value 2"))
    first, second = history.failure_groups()
    assert first == FailureGroup(
        fingerprint=run_of(history, "a1").fingerprint or "",
        count=2,
        last_at=clock.now(),
        latest=run_of(history, "a2"),
    )
    assert (second.count, second.latest.task_id) == (1, "b1")
    assert ids(history.runs(fingerprint=first.fingerprint)) == ["a2", "a1"]


def test_a_listing_by_cause_leaves_out_runs_that_have_not_failed(
    queue: TaskQueue, history: History
) -> None:
    bury(queue, "dead", report=a_report(fingerprint="x"))
    push(queue, "waits")
    everything = history.runs(["pending", "failed"], user_id="alice")
    assert sorted(ids(everything)) == ["dead", "waits"]
    assert ids(history.runs(["pending", "failed"], user_id="alice", fingerprint="x")) == ["dead"]


def test_failures_without_a_report_are_grouped_by_their_text(
    queue: TaskQueue, history: History
) -> None:
    for task_id, error in (("t1", "no row 17"), ("t2", "no row 4711"), ("t3", "no table")):
        push(queue, task_id)
        queue.bury(claim_one(queue), error)
    assert sorted(group.count for group in history.failure_groups()) == [1, 2]


def test_a_group_shrinks_and_vanishes_with_its_runs(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    bury(queue, "t1", report=a_report(fingerprint="x"))
    first_at = clock.now()
    clock.advance(5)
    bury(queue, "other", report=a_report(fingerprint="y"))
    clock.advance(5)
    bury(queue, "t2", report=a_report(fingerprint="x"))
    assert groups_of(history) == [("x", 2, "t2"), ("y", 1, "other")]
    history.discard("t2")
    assert groups_of(history) == [("y", 1, "other"), ("x", 1, "t1")]
    assert history.failure_groups()[1].last_at == first_at
    history.discard("t1")
    assert groups_of(history) == [("y", 1, "other")]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
def test_groups_come_in_pages_also_those_of_one_moment(
    queue: TaskQueue, history: History, limit: int
) -> None:
    for n in range(5):
        bury(queue, f"t{n}", report=a_report(fingerprint=f"f{n}"))
    assert all_groups(history, limit) == ["f4", "f3", "f2", "f1", "f0"]


def test_a_failed_run_can_be_run_again_as_a_new_one(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    payload = {"n": [1, {"ü": None}]}
    bury(queue, "old", name="report", priority=Priority.HIGH, payload=payload)
    before = run_of(history, "old")
    clock.advance(10)
    new_id = history.retry("old", triggered_by="carol")
    assert run_of(history, "old") == replace(before, retried_as=new_id)
    new = details(history, new_id)
    assert (new.run.status, new.run.run_type, new.run.retry_of) == ("pending", "retry", "old")
    assert (new.run.triggered_by, new.run.attempts, new.run.error) == ("carol", 0, None)
    claim = claim_one(queue)
    assert (claim.task.task_id, claim.task.payload) == (new_id, payload)
    assert (claim.task.name, claim.task.priority) == ("report", Priority.HIGH)
    assert (claim.task.run_type, claim.task.retry_of) == ("retry", "old")
    queue.finish(claim)
    assert run_of(history, new_id).status == "succeeded"
    assert stats(redis_client)["revived"] == 1


def test_a_failed_run_is_run_again_once(queue: TaskQueue, history: History) -> None:
    bury(queue, "old")
    first = history.retry("old", triggered_by="carol")
    assert history.retry("old", triggered_by="dave") == first
    assert queue.size() == 1
    assert run_of(history, first).triggered_by == "carol"


def test_a_failed_run_can_be_run_again_with_another_payload(
    queue: TaskQueue, history: History
) -> None:
    bury(queue, "old", name="report", payload={"table": "typo"}, tenant="acme")
    new_id = history.retry("old", payload={"table": "right"})
    assert history.retry("old", payload={"table": "late"}) == new_id
    assert history.retry("old") == new_id
    task = claim_one(queue).task
    assert (task.task_id, task.payload, task.name) == (new_id, {"table": "right"}, "report")
    assert (task.retry_of, task.tenant) == ("old", "acme")
    before = details(history, "old").task
    assert before is not None
    assert before.payload == {"table": "typo"}


def test_an_empty_payload_is_one(queue: TaskQueue, history: History) -> None:
    bury(queue, "old", payload={"table": "typo"})
    history.retry("old", payload={})
    assert claim_one(queue).task.payload == {}


@pytest.mark.parametrize("payload", [["a"], "text", {"a": {1}}, {"a": "x" * 300_000}], ids=type)
def test_a_run_is_not_run_again_with_what_is_no_payload(
    queue: TaskQueue, history: History, payload: Any
) -> None:
    bury(queue, "old")
    with pytest.raises(InvalidPayload, match="payload"):
        history.retry("old", payload=payload)
    assert run_of(history, "old").retried_as is None
    assert queue.size() == 0


def test_a_run_that_timed_out_can_be_run_again_and_again(
    queue: TaskQueue, history: History
) -> None:
    bury(queue, "t", report=LATE)
    second = history.retry("t")
    queue.bury(claim_one(queue), report=LATE)
    third = history.retry(second)
    assert run_of(history, third).retry_of == second
    assert run_of(history, second).retry_of == "t"
    assert ids(history.runs("timed_out")).count("t") == 1


@pytest.mark.parametrize("case", [c for c, (s, _) in TRANSITIONS.items() if s not in ENDED[1:3]])
def test_only_failed_runs_can_be_run_again_or_discarded(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock, history: History, case: str
) -> None:
    status, steps = TRANSITIONS[case]
    steps(queue, clock)
    before = dump(redis_client)["status"]
    with pytest.raises(UnknownTask, match=f"'t' is {status}"):
        history.retry("t")
    assert history.discard("t") is False
    assert dump(redis_client)["status"] == before


def test_an_unknown_run_cannot_be_run_again(history: History) -> None:
    with pytest.raises(UnknownTask, match="'nobody' is not known"):
        history.retry("nobody")
    assert history.discard("nobody") is False


def test_a_run_that_is_dropped_while_it_is_looked_at_is_not_run_again(
    queue: TaskQueue, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(queue, "t")
    look = history.get

    def look_and_lose(task_id: str) -> RunDetails | None:
        found = look(task_id)
        history.discard(task_id)
        return found

    monkeypatch.setattr(history, "get", look_and_lose)
    with pytest.raises(UnknownTask, match="not among the failed ones any more"):
        history.retry("t")
    assert queue.size() == 0


def test_a_retried_run_of_a_schedule_keeps_its_moment(
    queue: TaskQueue, clock: ManualClock, history: History, scheduler: TaskScheduler
) -> None:
    claim = fire(scheduler, clock, "s")
    queue.bury(claim)
    new_id = history.retry(claim.task.task_id)
    again = claim_one(queue).task
    assert again.task_id == new_id
    assert (again.schedule_id, again.scheduled_for) == ("s", claim.task.scheduled_for)
    assert again.scheduled_for is not None
    assert again.run_type == "retry"
    assert ids(history.runs(schedule_id="s")) == [new_id, claim.task.task_id]


def test_a_retry_that_does_not_fit_changes_nothing(
    redis_client: redis.Redis, queue: TaskQueue, history: History
) -> None:
    bury(queue, "t1", "t2")
    queue.configure(max_waiting=1)
    push(queue, "waiting")
    before = dump(redis_client)
    with pytest.raises(QueueFull, match="'t1'"):
        history.retry("t1")
    assert dump(redis_client) == before
    queue.cancel("waiting")
    with pytest.raises(QueueFull):
        history.retry_matching()
    assert [run.retried_as is None for run in history.runs("failed")] == [False, True]
    queue.finish(claim_one(queue))
    assert len(history.retry_matching()) == 1


def test_a_retry_that_its_user_has_no_room_for_is_refused(
    queue: TaskQueue, history: History
) -> None:
    bury(queue, "t")
    queue.set_user("alice", max_waiting=1)
    push(queue, "waiting")
    with pytest.raises(QueueFull):
        history.retry("t")


@pytest.fixture
def failed(queue: TaskQueue, clock: ManualClock) -> datetime:
    """Failed runs of alice and bob; since when the later ones are."""
    bury(queue, "a-mail", user_id="alice", name="mail", report=a_report(fingerprint="x"))
    bury(queue, "b-mail", user_id="bob", name="mail", report=a_report(fingerprint="x"))
    clock.advance(60)
    bury(queue, "a-late", user_id="alice", report=LATE)
    bury(queue, "b-late", user_id="bob", report=LATE)
    add_ended(queue, "succeeded", "good")
    return clock.now()


def sorted_text(value: dict[str, Any] | set[str]) -> str:
    """The same in every process, which the text of a set is not."""
    return str(sorted(value)) if isinstance(value, set) else str(value)


MATCHING: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"a-mail", "b-mail", "a-late", "b-late"}),
    ({"user_id": "alice"}, {"a-mail", "a-late"}),
    ({"name": "mail"}, {"a-mail", "b-mail"}),
    ({"name": "mail", "user_id": "bob"}, {"b-mail"}),
    ({"fingerprint": "x"}, {"a-mail", "b-mail"}),
    ({"since": "later"}, {"a-late", "b-late"}),
    ({"until": "later", "user_id": "alice"}, {"a-mail"}),
    ({"user_id": "nobody"}, set()),
]


@pytest.mark.parametrize(("filters", "expected"), MATCHING, ids=sorted_text)
def test_all_failed_runs_that_match_are_run_again(
    queue: TaskQueue,
    history: History,
    failed: datetime,
    filters: dict[str, Any],
    expected: set[str],
) -> None:
    given: Any = {key: failed if value == "later" else value for key, value in filters.items()}
    made = history.retry_matching(triggered_by="carol", **given)
    assert {run_of(history, new_id).retry_of for new_id in made} == expected
    assert queue.size() == len(made) == len(expected)
    assert history.retry_matching(**given) == []


@pytest.mark.parametrize(("filters", "expected"), MATCHING, ids=sorted_text)
def test_all_failed_runs_that_match_are_discarded(
    redis_client: redis.Redis,
    history: History,
    failed: datetime,
    filters: dict[str, Any],
    expected: set[str],
) -> None:
    given: Any = {key: failed if value == "later" else value for key, value in filters.items()}
    everything = {"a-mail", "b-mail", "a-late", "b-late"}
    assert history.discard_matching(**given) == len(expected)
    assert set(ids(history.runs(("failed", "timed_out")))) == everything - expected
    assert dump(redis_client).get("attempts", {}).keys() == everything - expected
    assert stats(redis_client).get("discarded", 0) == len(expected)


def test_as_many_failed_runs_as_wished_are_run_again_the_latest_first(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    for n in range(5):
        bury(queue, f"t{n}")
        clock.advance(1)
    history.retry("t4")
    queue.finish(claim_one(queue))
    made = history.retry_matching(limit=2)
    assert [run_of(history, new_id).retry_of for new_id in made] == ["t3", "t2"]
    assert history.discard_matching(limit=3) == 3
    assert ids(history.runs("failed")) == ["t1", "t0"]


def test_a_filter_that_does_not_exist_is_refused(queue: TaskQueue, history: History) -> None:
    bury(queue, "t")
    filters: Any = {"usr_id": "alice"}
    with pytest.raises(TypeError, match="usr_id"):
        history.retry_matching(**filters)
    with pytest.raises(TypeError, match="usr_id"):
        history.discard_matching(**filters)
    with pytest.raises(InvalidInput, match="since"):
        history.discard_matching(since="yesterday")  # type: ignore[arg-type]
    assert ids(history.runs("failed")) == ["t"]


def test_more_failed_runs_than_a_script_takes_are_discarded(
    queue: TaskQueue, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "DISCARD_CHUNK", 3)
    bury(queue, *(f"t{n}" for n in range(10)))
    assert history.discard_matching() == 10
    assert ids(history.runs()) == []


# --- commands that are sent twice -----------------------------------------------------------------


def twice(queue: TaskQueue, script: str, **arguments: Any) -> tuple[Any, Any]:
    """The answers to a command and to its repetition, which must change nothing."""
    first = queue.link.run(script, **arguments)
    return first, queue.link.run(script, **arguments)


def revive_arguments(task: Task, new_id: str) -> dict[str, Any]:
    return {
        "op": "op1",
        "id": task.task_id,
        "new_id": new_id,
        "user": task.user_id,
        "task_name": task.name,
        "document": task.document,
        "head": task.status_head,
        "level": int(task.priority),
        "schedule": "",
    }


def test_a_retry_sent_twice_makes_one_run(queue: TaskQueue, history: History) -> None:
    task = make_task(task_id="t")
    bury(queue, "t")
    arguments = revive_arguments(task, "new")
    assert twice(queue, "revive", **arguments) == ([b"retried", b"new"], [b"retried", b"new"])
    assert queue.size() == 1
    queue.finish(claim_one(queue))
    assert history.prune(0) == 2
    assert queue.link.run("revive", **arguments) == [b"retried", b"new"]
    assert queue.size() == 0


def test_a_run_that_is_no_dead_letter_is_not_revived(queue: TaskQueue) -> None:
    push(queue, "t")
    claim_one(queue)
    arguments = revive_arguments(make_task(task_id="t"), "new")
    assert twice(queue, "revive", **arguments) == ([b"not_dead"], [b"not_dead"])
    assert queue.size() == 0


def test_a_discard_sent_twice_says_the_same(
    redis_client: redis.Redis, queue: TaskQueue, history: History
) -> None:
    bury(queue, "t1", "t2", "t3")
    answers = twice(queue, "discard", op="op1", rest=["t1", "t2", "t1", "nobody"])
    assert answers == ([2, 0], [2, 0])
    assert ids(history.runs("failed")) == ["t3"]
    assert stats(redis_client)["discarded"] == 2


def test_a_prune_sent_twice_says_the_same(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    add_ended(queue, "succeeded", "t1")
    add_ended(queue, "failed", "t2")
    before_ms = clock.now_ms() + 1
    assert twice(queue, "prune", op="op1", before_ms=before_ms, limit=1) == (2, 2)
    add_ended(queue, "succeeded", "t3")
    assert queue.link.run("prune", op="op1", before_ms=before_ms, limit=1) == 2
    assert ids(history.runs()) == ["t3"]


def test_a_run_can_be_pushed_again_after_it_was_forgotten_but_not_doubled(
    queue: TaskQueue, history: History
) -> None:
    bury(queue, "t")
    history.discard("t")
    push(queue, "t")
    assert queue.size() == 0  # told from a repetition by the grave that it left


def test_moments_of_runs_are_exact_to_the_millisecond(
    queue: TaskQueue, clock: ManualClock, history: History
) -> None:
    clock.advance(0.123)
    add_ended(queue, "succeeded", "t")
    assert run_of(history, "t").ended_at == from_ms(clock.now_ms())
