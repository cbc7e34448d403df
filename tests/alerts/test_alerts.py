"""Alerts: decisions by tables with a clock that is moved, deliveries to real local servers."""

import base64
import functools
import hashlib
import hmac
import json
import logging
import re
import shutil
import socketserver
import ssl
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default as mail_policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers.tasks import Unshowable, make_task
from prometheus_client import CollectorRegistry

from fairqueue.alerts import (
    KINDS,
    Alert,
    AlertLimits,
    AlertNotSent,
    Alerts,
    CallableRecipient,
    Dedup,
    EmailRecipient,
    Lane,
    LimitWatch,
    LogRecipient,
    RateLimit,
    Recipient,
    WebhookRecipient,
)
from fairqueue.alerts.alert import MAX_DETAILS, MAX_SUMMARY
from fairqueue.alerts.limits import LONGEST_BACKOFF_S, PENDING, TRIES, CounterWindow
from fairqueue.errors import ConfigurationError, InvalidInput, TimedOut
from fairqueue.models import PoolSnapshot, QueueSnapshot
from fairqueue.queue.workers import StaleRun, WorkerInfo

DEADLINE_S = 60.0  # for what takes milliseconds on a quiet machine
SECRET = "never-shown-3f9a"
PAGE = Path(__file__).parents[2] / "docs" / "alerts.md"


class Time:
    """Seconds that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Inbox:
    """A recipient that remembers what it was told, and can be waited for."""

    def __init__(self) -> None:
        self.name, self.timeout = "inbox", 600.0  # not late when a test moves the clock
        self.alerts: list[Alert] = []
        self._changed = threading.Condition()

    def send(self, alert: Alert) -> None:
        with self._changed:
            self.alerts.append(alert)
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.alerts) >= count, DEADLINE_S)


class Hanging:
    """A recipient that hangs until it is let go, and then fails if it is told to."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.name, self.timeout = "hanging", 10.0
        self.entered, self.gate = threading.Event(), threading.Event()
        self.error = error
        self.alerts: list[Alert] = []

    def send(self, alert: Alert) -> None:
        self.alerts.append(alert)
        self.entered.set()
        self.gate.wait()
        if self.error is not None:
            raise self.error


class Events(logging.Handler):
    """The events that the logger got, which can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.records.append(record)
            self._changed.notify_all()

    def wait_for(self, event: str, count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.names().count(event) >= count, DEADLINE_S)

    def names(self) -> list[str]:
        return [str(vars(record).get("event")) for record in self.records]

    def text(self) -> str:
        return "\n".join(f"{record.getMessage()} {vars(record)}" for record in self.records)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def events() -> Iterator[Events]:
    handler = Events()
    log = logging.getLogger("fairqueue.alerts")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


Make = Callable[..., Alerts]


@pytest.fixture
def make(time: Time, registry: CollectorRegistry) -> Iterator[Make]:
    """Alerts whose time is `time`, closed at the end; hanging recipients are let go before."""
    with ExitStack() as stack:

        def make(*recipients: Recipient, **settings: Any) -> Alerts:
            given: dict[str, Any] = {"registry": registry, "monotonic": time} | settings
            alerts = stack.enter_context(Alerts(recipients, **given))
            for recipient in recipients:
                if isinstance(recipient, Hanging):
                    stack.callback(recipient.gate.set)
            return alerts

        yield make


def news(key: str = "k", **fields: Any) -> Alert:
    return Alert(**{"kind": "task_failed", "key": key, "summary": f"about {key}"} | fields)


def snapshot(**fields: Any) -> QueueSnapshot:
    plain: dict[str, Any] = {
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "counters": {},
        "oldest_wait": 0.0,
        "overdue": 0.0,
        "leader": None,
        "leader_until": None,
        "jain_index": None,
    }
    numbers = "ready delayed running dead active_users parked_users schedules active_schedules"
    plain |= dict.fromkeys([*numbers.split(), "set_aside", "epoch"], 0)
    return QueueSnapshot(**plain | fields)


def outcomes(registry: CollectorRegistry, kind: str = "task_failed") -> dict[str, float]:
    """Counts by outcome, zeros left out."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == "fairqueue_alerts_total" and sample.labels["kind"] == kind:
                found[sample.labels["outcome"]] = sample.value
    assert len(found) == 5
    return {outcome: value for outcome, value in found.items() if value}


# --- an alert -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, None),
        (True, True),
        (7, 7),
        (0.5, 0.5),
        ("two\r\nlines\x00", "two lines"),
        ("lone \ud800 surrogate", "lone   surrogate"),
        (float("nan"), "nan"),
        (2**64, str(2**64)),
        pytest.param(10**5000, "a int that cannot be shown", id="a long number"),
        (["a", 1], "['a', 1]"),
        ("x" * 1000, "x" * 499 + "…"),
        (Unshowable(), "a Unshowable that cannot be shown"),
    ],
)
def test_details_become_plain_values_of_bounded_length(value: object, shown: object) -> None:
    alert = news(details={"field": value})
    assert alert.details == {"field": shown}
    json.dumps(alert.as_dict(), allow_nan=False).encode()


def test_an_alert_is_bounded_and_its_texts_are_single_lines() -> None:
    alert = news(
        "a\nb", summary="x\n" * 10_000, details={str(n): n for n in range(MAX_DETAILS + 5)}
    )
    assert len(alert.summary) <= MAX_SUMMARY
    assert "\n" not in alert.summary + alert.key
    assert len(alert.details) == MAX_DETAILS


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "Task failed"), ("kind", ""), ("kind", 3), ("severity", "dire"), ("details", ["a"])],
)
def test_an_alert_with_an_unusable_field_is_refused_by_name(field: str, value: object) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(InvalidInput, match=rf"^{field} "):
        news(**fields)


# --- decisions ------------------------------------------------------------------------------------


def test_the_same_news_is_told_once_and_then_with_the_count_of_what_was_suppressed() -> None:
    dedup = Dedup(repeat_after=100.0)
    table = [
        (0.0, "a", 0),
        (1.0, "a", None),
        (2.0, "b", 0),
        (99.9, "a", None),
        (100.0, "a", 2),
        (150.0, "a", None),
        (200.0, "a", 1),
        (900.0, "a", 0),
        (901.0, "b", 0),
    ]
    assert [dedup.admit("kind", key, now) for now, key, _ in table] == [row[2] for row in table]
    assert dedup.admit("other", "a", 901.0) == 0


def test_with_no_silence_everything_is_told() -> None:
    dedup = Dedup(repeat_after=0.0)
    assert [dedup.admit("kind", "a", 5.0) for _ in range(3)] == [0, 0, 0]


def test_the_memory_of_news_is_bounded_and_forgets_what_was_told_first() -> None:
    dedup = Dedup(repeat_after=100.0, most=2)
    for now, key in enumerate("abc"):
        dedup.admit("kind", key, float(now))
    assert [dedup.admit("kind", key, 5.0) for key in "cba"] == [None, None, 0]


def test_what_is_beyond_the_rate_becomes_one_summary_a_minute_later() -> None:
    rate = RateLimit(per_minute=2)
    assert [rate.admit(news(), now) for now in (0.0, 10.0)] == [True, True]
    assert [rate.due] == [None]
    more = [
        news(severity="warning"),
        news(severity="critical"),
        Alert(kind="backlog", summary="fine", severity="info", resolved=True),
    ]
    assert [rate.admit(alert, 20.0 + n) for n, alert in enumerate(more)] == [False] * 3
    assert rate.due == 80.0
    assert rate.summary(79.9) is None
    summary = rate.summary(80.0)
    assert summary is not None
    assert (summary.kind, summary.severity) == ("summary", "critical")
    assert summary.summary == "3 more: 2 task_failed, 1 backlog resolved"
    assert summary.details == {"task_failed": 2, "backlog resolved": 1}
    assert [rate.due, rate.summary(1000.0)] == [None, None]


def test_a_minute_never_brings_more_than_the_rate() -> None:
    rate = RateLimit(per_minute=3)
    told = [now for now in range(300) if rate.admit(news(), float(now))]
    assert all(sum(now <= other < now + 60 for other in told) <= 3 for now in told)
    assert len(told) == 15


def kinds_of(alerts: Any) -> list[str]:
    return [f"{alert.kind} resolved" if alert.resolved else alert.kind for alert in alerts]


def limits(**given: Any) -> LimitWatch:
    return LimitWatch(AlertLimits(**given), repeat_after=1000.0)


# A limit that is passed: (settings, what passes it, what is just below).
PASSED: list[tuple[str, dict[str, Any], Callable[..., Any], Callable[..., Any]]] = [
    (
        "backlog",
        {"backlog": 10},
        lambda watch, now: watch.watch(snapshot(ready=10), now),
        lambda watch, now: watch.watch(snapshot(ready=9), now),
    ),
    (
        "oldest_wait",
        {"oldest_wait": 5.0},
        lambda watch, now: watch.watch(snapshot(oldest_wait=5.0), now),
        lambda watch, now: watch.watch(snapshot(oldest_wait=4.9), now),
    ),
    (
        "lateness",
        {"lateness": 2.0},
        lambda watch, now: watch.late(2.0, now),
        lambda watch, now: watch.late(1.9, now),
    ),
    (
        "lateness",
        {"lateness": 2.0},
        lambda watch, now: watch.watch(snapshot(overdue=2.0), now),
        lambda watch, now: watch.watch(snapshot(overdue=1.9), now),
    ),
]


@pytest.mark.parametrize(("kind", "settings", "above", "below"), PASSED)
def test_a_limit_is_told_once_when_reached_and_once_when_left_for_long_enough(
    kind: str, settings: dict[str, Any], above: Callable[..., Any], below: Callable[..., Any]
) -> None:
    watch = limits(**settings, quiet=60.0)
    assert kinds_of(below(watch, 0.0)) == []
    assert kinds_of(above(watch, 1.0)) == [kind]
    assert kinds_of(above(watch, 2.0)) == []
    below(watch, 10.0)
    assert kinds_of(watch.look_again(69.9)) == []
    above(watch, 69.9)  # the dip was too short: it is all one breach
    below(watch, 100.0)
    assert kinds_of(watch.look_again(159.9)) == []
    (end,) = watch.look_again(160.0)
    assert (kinds_of([end]), end.severity) == ([f"{kind} resolved"], "info")
    assert end.details["over_for_s"] == 99
    assert kinds_of(watch.look_again(500.0)) == []
    assert kinds_of(above(watch, 501.0)) == [kind]


@pytest.mark.parametrize(("kind", "settings", "above", "below"), PASSED)
def test_a_limit_that_stays_passed_is_told_again_as_a_reminder(
    kind: str, settings: dict[str, Any], above: Callable[..., Any], below: Callable[..., Any]
) -> None:
    watch = limits(**settings)
    told = [now for now in range(0, 3000, 100) if above(watch, float(now))]
    assert told == [0, 1000, 2000]


@pytest.mark.parametrize(("kind", "settings", "above", "below"), PASSED)
def test_a_limit_of_none_is_never_passed(
    kind: str, settings: dict[str, Any], above: Callable[..., Any], below: Callable[..., Any]
) -> None:
    watch = limits(**dict.fromkeys(settings))
    assert kinds_of(above(watch, 0.0)) == []
    assert not watch.is_over


def test_the_error_rate_is_judged_from_enough_runs_and_told_as_a_part() -> None:
    watch = limits(error_rate=0.5, error_rate_least_runs=4)
    assert kinds_of(watch.run_ended(True, 0.0)) == []
    assert kinds_of(watch.run_ended(False, 0.0)) == []
    assert kinds_of(watch.run_ended(False, 0.0)) == []
    (alert,) = watch.run_ended(True, 0.0)
    assert alert.summary == "50% of the runs failed (limit: 0.5)"
    assert kinds_of(watch.run_ended(True, 1.0)) == []


def test_the_error_rate_counts_only_runs_of_its_window() -> None:
    watch = limits(error_rate=0.5, error_rate_least_runs=2, window=100.0)
    for _ in range(50):
        watch.run_ended(False, 0.0)
    assert kinds_of(watch.run_ended(True, 99.0)) == []
    assert kinds_of(watch.run_ended(True, 101.0)) == ["error_rate"]


def test_the_error_rate_is_resolved_by_runs_that_go_well_and_not_by_silence() -> None:
    watch = limits(error_rate=0.5, error_rate_least_runs=2, window=100.0, quiet=10.0)
    for _ in range(2):
        watch.run_ended(True, 0.0)
    assert kinds_of(watch.look_again(5000.0)) == []
    assert watch.is_over
    for _ in range(2):
        watch.run_ended(False, 5000.0)
    assert kinds_of(watch.look_again(5001.0)) == []
    assert kinds_of(watch.look_again(5011.0)) == ["error_rate resolved"]


def test_lock_failures_are_counted_in_a_window_and_resolved_by_its_passing() -> None:
    watch = limits(lock_failures=3, window=100.0, quiet=10.0)
    told = [kinds_of(watch.lock_failed(now)) for now in (0.0, 60.0, 120.0, 130.0)]
    assert told == [[], [], [], ["lock_failures"]]
    assert kinds_of(watch.look_again(159.0)) == []
    assert kinds_of(watch.look_again(160.0)) == []  # now two are left
    assert kinds_of(watch.look_again(169.9)) == []
    assert kinds_of(watch.look_again(170.0)) == ["lock_failures resolved"]


def expired(count: int) -> QueueSnapshot:
    return snapshot(counters={"expired_tasks": count})


def test_expired_tasks_are_counted_in_a_window() -> None:
    watch = limits(expired_tasks=3, window=100.0, quiet=10.0)
    assert kinds_of(watch.watch(expired(50), 0.0)) == []  # of before, which nobody has seen
    assert kinds_of(watch.watch(expired(52), 30.0)) == []
    assert kinds_of(watch.watch(expired(52), 101.0)) == []
    assert kinds_of(watch.watch(expired(54), 140.0)) == []  # two in the last 100 seconds
    (alert,) = watch.watch(expired(55), 149.0)
    assert alert.summary == "3 tasks expired (limit: 3)"
    assert kinds_of(watch.watch(expired(56), 160.0)) == []
    assert kinds_of(watch.watch(expired(56), 300.0)) == []  # none since
    (end,) = watch.look_again(310.0)
    assert end.summary == "resolved after 151 s: fewer than 3 tasks expire again"


def test_a_reset_counter_does_not_count_as_expired_tasks() -> None:
    watch = limits(expired_tasks=3, window=100.0)
    watch.watch(expired(1000), 0.0)
    assert kinds_of(watch.watch(expired(2), 10.0)) == []
    assert kinds_of(watch.watch(expired(4), 20.0)) == []
    assert kinds_of(watch.watch(expired(5), 30.0)) == ["expired_tasks"]


def test_what_is_kept_of_a_counter_is_bounded() -> None:
    window = CounterWindow(100.0)
    for second in range(100_000):
        assert window.add(second, float(second)) == min(second, max(second % 10 + 100, 100))
    assert len(window._read) <= 12


def pooled(*pools: str) -> QueueSnapshot:
    """A queue with a waiting task in each of these pools, of which no worker has taken any."""
    return snapshot(pools=tuple(PoolSnapshot(pool=pool, waiting=1) for pool in pools))


def worker_of(*pools: str) -> WorkerInfo:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return WorkerInfo(
        worker_id="w",
        host="h",
        pid=1,
        version="1",
        slots=2,
        names=("*",),
        current=(),
        running=0,
        started_at=now,
        seen_at=now,
        gone_at=now,
        pools=pools,
    )


def test_a_pool_without_workers_is_told_once_its_tasks_have_waited_for_long_enough() -> None:
    watch = limits(pool_unserved=60.0, quiet=10.0)
    both, one = pooled("gpu", "mail"), pooled("gpu")
    assert kinds_of(watch.watch(one, 0.0, [])) == []
    assert kinds_of(watch.watch(both, 30.0, [])) == []
    (alert,) = watch.watch(both, 60.0, [])
    assert (alert.kind, alert.key, alert.severity) == ("pool_unserved", "gpu", "error")
    assert alert.summary == (
        "tasks wait in the pool 'gpu', which no live worker has served for 60 s (limit: 60)"
    )
    assert alert.details == {"value": 60.0, "limit": 60.0, "pool": "gpu", "waiting": 1}
    assert [each.key for each in watch.watch(both, 90.0, [])] == ["mail"]
    assert watch.is_over

    watch.watch(both, 100.0, [worker_of("default", "gpu")])
    (end,) = watch.look_again(110.0)
    assert (end.kind, end.key, end.resolved) == ("pool_unserved", "gpu", True)
    assert end.summary == ("resolved after 40 s: the pool 'gpu' is served, or nothing waits in it")
    watch.watch(pooled(), 120.0, [])  # what waited was cancelled
    assert [each.key for each in watch.look_again(130.0)] == ["mail"]
    assert {key for _, key in watch._breaches} == {""}  # nothing is remembered of pools
    # It starts anew.
    assert kinds_of(watch.watch(one, 200.0, [])) == []
    assert kinds_of(watch.watch(one, 260.0, [])) == ["pool_unserved"]


def test_a_pool_is_judged_by_its_own_workers_and_claims() -> None:
    watch = limits(pool_unserved=60.0)
    now = datetime(2026, 1, 1, tzinfo=UTC)
    drains = replace(worker_of("gpu"), draining=True)
    claimed = PoolSnapshot(pool="gpu", waiting=1, last_claim=now - timedelta(minutes=9))
    for second in (0.0, 60.0):
        assert kinds_of(watch.watch(pooled("gpu"), second, [worker_of("gpu")])) == []
        assert kinds_of(watch.watch(snapshot(pools=(claimed,)), second, [])) == []
        assert kinds_of(watch.watch(pooled("gpu"), second)) == []  # the workers are not known
    assert kinds_of(watch.watch(pooled("gpu"), 100.0, [drains])) == []
    assert kinds_of(watch.watch(pooled("gpu"), 160.0, [drains])) == ["pool_unserved"]


def test_pools_are_not_judged_without_a_limit() -> None:
    watch = limits(pool_unserved=None)
    told = [watch.watch(pooled("gpu"), float(now), []) for now in range(0, 1000, 100)]
    assert not any(told)


REDIS = [
    # (settings, calls as (second, went well), when it is told)
    ("fails for long enough", {}, [(0, False), (29, False), (30, False), (35, False)], [30]),
    ("one good call between", {}, [(0, False), (29, True), (30, False), (58, False)], []),
    ("two failures far apart", {}, [(0, False), (3600, False)], []),
    ("a short limit", {"redis_unreachable": 1.0}, [(0, False), (5, False)], [5]),
    ("no limit", {"redis_unreachable": None}, [(0, False), (30, False), (59, False)], []),
]


@pytest.mark.parametrize(
    ("settings", "calls", "told"), [row[1:] for row in REDIS], ids=[row[0] for row in REDIS]
)
def test_redis_is_called_out_of_reach_when_every_call_fails_for_long_enough(
    settings: dict[str, Any], calls: list[tuple[int, bool]], told: list[int]
) -> None:
    watch = limits(**settings)
    seen = []
    for now, fine in calls:
        if fine:
            watch.redis_ok(float(now))
        elif watch.redis_failed(float(now)):
            seen.append(now)
    assert seen == told


def test_redis_is_back_only_when_it_stays_back() -> None:
    watch = limits(redis_unreachable=30.0, quiet=60.0)
    watch.redis_failed(0.0)
    (alert,) = watch.redis_failed(40.0)
    assert (alert.severity, alert.details["value"]) == ("critical", 40.0)
    fine = [watch.redis_is_fine]
    watch.redis_ok(50.0)
    assert [*fine, watch.redis_is_fine] == [False, True]
    assert kinds_of(watch.redis_failed(80.0)) == []
    assert kinds_of(watch.look_again(115.0)) == []
    watch.redis_ok(120.0)
    assert kinds_of(watch.look_again(179.0)) == []
    (end,) = watch.look_again(180.0)
    assert end.summary == "resolved after 80 s: Redis answers again"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("error_rate", 0),
        ("error_rate", 1.5),
        ("error_rate_least_runs", 0),
        ("lock_failures", 0),
        ("lateness", -1),
        ("backlog", 0.5),
        ("oldest_wait", "long"),
        ("expired_tasks", 0),
        ("pool_unserved", 0),
        ("redis_unreachable", float("inf")),
        ("window", 0),
        ("quiet", None),
    ],
)
def test_an_unusable_limit_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name} "):
        AlertLimits(**{name: value})  # type: ignore[arg-type]


# --- one recipient's lane -------------------------------------------------------------------------


def take(lane: Lane, now: float) -> Alert:
    alert = lane.take(now)
    assert alert is not None
    return alert


def test_a_recipient_gets_one_alert_at_a_time_in_order() -> None:
    lane = Lane(10.0, 5)
    first, second = news("1"), news("2")
    for alert in (first, second):
        lane.offer(alert)
    assert lane.take(0.0) == first
    assert lane.take(0.0) is None
    assert lane.ended(first, True, 1.0) == "sent"
    assert lane.take(1.0) == second
    assert lane.ended(second, True, 1.0) == "sent"
    assert (lane.undelivered, lane.due) == (0, None)


def test_a_failed_delivery_is_repeated_after_pauses_that_double_and_then_given_up() -> None:
    lane = Lane(10.0, 5)
    lane.offer(news())
    now, pauses, words = 0.0, [], []
    for _ in range(TRIES):
        alert = take(lane, now)
        words.append(lane.ended(alert, False, now))
        if lane.due is not None:
            assert lane.take(lane.due - 0.01) is None
            pauses.append(lane.due - now)
            now = lane.due
    assert pauses == [1, 2, 4, 8, 16, 32, 64]
    assert words == ["retry"] * (TRIES - 1) + ["given_up"]
    assert lane.undelivered == 0


def test_the_pause_after_failures_has_a_longest_and_ends_with_a_success() -> None:
    lane = Lane(10.0, 100)
    now = 0.0
    for key in range(5):
        lane.offer(news(str(key)))
    for _ in range(4 * TRIES):
        lane.ended(take(lane, now), False, now)
        assert lane.due is not None
        pause, now = lane.due - now, lane.due
    assert pause == LONGEST_BACKOFF_S
    alert = take(lane, now)
    assert alert.dropped == 4
    assert lane.ended(alert, True, now) == "sent"
    lane.offer(news("fails"))
    lane.ended(take(lane, now), False, now)
    assert lane.due == now + 1


def test_what_is_too_much_drops_the_oldest_and_the_next_delivered_alert_says_so() -> None:
    lane = Lane(10.0, 2)
    dropped = [lane.offer(news(key)) for key in "abcd"]
    assert [None if alert is None else alert.key for alert in dropped] == [None, None, "a", "b"]
    alert = take(lane, 0.0)
    assert (alert.key, alert.dropped) == ("c", 2)
    lane.ended(alert, False, 0.0)  # it was not told: the count stays
    alert = take(lane, 5.0)
    assert (alert.key, alert.dropped) == ("c", 2)
    lane.offer(news("e"))
    lane.offer(news("f"))  # drops d while c is on its way
    lane.ended(alert, True, 5.0)
    assert [take(lane, 5.0).dropped, lane.undelivered] == [1, 2]


def test_a_delivery_that_is_late_is_said_once_and_not_repeated() -> None:
    lane = Lane(10.0, 5)
    lane.offer(news("a"))
    lane.offer(news("b"))
    alert = take(lane, 0.0)
    assert lane.due == 10.0
    assert lane.overdue(9.9) is None
    assert lane.overdue(10.0) == alert
    assert [lane.overdue(11.0), lane.due] == [None, None]
    assert lane.ended(alert, False, 50.0) == "late"
    assert lane.take(50.5) is None
    assert (take(lane, 51.0).key, lane.undelivered) == ("b", 1)


def test_at_the_end_each_alert_is_tried_once_without_pauses() -> None:
    lane = Lane(10.0, 5)
    lane.offer(news("a"))
    lane.offer(news("b"))
    lane.ended(take(lane, 0.0), False, 0.0)
    lane.hurry()
    words = [lane.ended(take(lane, 0.0), False, 0.0) for _ in range(2)]
    assert (words, lane.undelivered) == (["given_up", "given_up"], 0)


# --- the shell ------------------------------------------------------------------------------------


def test_nothing_is_started_before_the_first_alert(make: Make) -> None:
    before = set(threading.enumerate())
    inbox = Inbox()
    alerts = make(inbox)
    alerts.run_ended(True)
    alerts.redis_ok()
    assert alerts.flush(0)
    assert set(threading.enumerate()) <= before
    alerts.raise_(news())
    inbox.wait_for(1)


def test_an_alert_reaches_each_recipient_and_is_counted(
    make: Make, registry: CollectorRegistry
) -> None:
    inboxes = [Inbox(), Inbox()]
    alerts = make(*inboxes, source="queue mail")
    alert = news(details={"task": "t"})
    alerts.raise_(alert)
    assert alerts.flush(DEADLINE_S)
    assert [inbox.alerts for inbox in inboxes] == [[replace(alert, source="queue mail")]] * 2
    assert outcomes(registry) == {"sent": 2}


def test_a_repeated_alert_is_suppressed_and_counted(
    make: Make, time: Time, registry: CollectorRegistry
) -> None:
    inbox = Inbox()
    alerts = make(inbox, repeat_after=100.0)
    for _ in range(5):
        alerts.raise_(news())
    time.now += 100.0
    alerts.raise_(news())
    assert alerts.flush(DEADLINE_S)
    assert [alert.suppressed for alert in inbox.alerts] == [0, 4]
    assert inbox.alerts[1].headline() == "about k [4 duplicates since the last alert]"
    assert outcomes(registry) == {"sent": 2, "suppressed": 4}


def test_alerts_beyond_the_rate_arrive_as_one_summary(
    make: Make, time: Time, registry: CollectorRegistry
) -> None:
    inbox = Inbox()
    alerts = make(inbox, per_minute=2)
    for key in range(39):
        alerts.raise_(news(str(key)))
    assert alerts.flush(DEADLINE_S)
    assert len(inbox.alerts) == 2
    time.now += 60.0
    alerts.flush(0)  # wakes the thread, which else sleeps by a clock that is not ours
    inbox.wait_for(3)
    assert inbox.alerts[2].summary == "37 more: 37 task_failed"
    assert outcomes(registry) == {"sent": 2, "limited": 37}


def test_a_limit_and_its_end_arrive_without_being_asked(make: Make, time: Time) -> None:
    inbox = Inbox()
    alerts = make(inbox, limits=AlertLimits(backlog=10))
    alerts.watch(snapshot(ready=12))
    alerts.watch(snapshot(ready=3))
    time.now += 60.0
    alerts.flush(0)
    inbox.wait_for(2)
    assert kinds_of(inbox.alerts) == ["backlog", "backlog resolved"]


STALE = StaleRun(task_id="t1", user_id="alice", name="build", worker_id="w", seconds=90.0)


REPORTS: list[tuple[str, Callable[[Alerts, Time], object]]] = [
    ("task_failed", lambda alerts, time: alerts.task_failed(make_task(), 3, ValueError("x"))),
    ("task_timed_out", lambda alerts, time: alerts.task_timed_out(make_task(), 1, 2.5)),
    ("stale_run", lambda alerts, time: alerts.stale_run(STALE)),
    ("schedule_disabled", lambda alerts, time: alerts.schedule_set_aside("s", "no moment")),
    ("schedule_broken", lambda alerts, time: alerts.schedule_set_aside("s", "bad", broken=True)),
    ("error_rate", lambda alerts, time: [alerts.run_ended(True) for _ in range(20)]),
    ("lock_failures", lambda alerts, time: [alerts.lock_failed() for _ in range(5)]),
    ("lateness", lambda alerts, time: alerts.late(60.0)),
    ("backlog", lambda alerts, time: alerts.watch(snapshot(ready=10_000))),
    ("oldest_wait", lambda alerts, time: alerts.watch(snapshot(oldest_wait=600.0))),
    ("expired_tasks", lambda alerts, time: [alerts.watch(expired(n)) for n in (0, 100)]),
    ("pool_unserved", lambda alerts, time: unserved(alerts, time)),
    ("redis_unreachable", lambda alerts, time: out_of_reach(alerts, time)),
]


def unserved(alerts: Alerts, time: Time) -> None:
    alerts.watch(pooled("gpu"), [])
    time.now += 60.0
    alerts.watch(pooled("gpu"), [])


def out_of_reach(alerts: Alerts, time: Time) -> None:
    alerts.redis_failed()
    time.now += 30.0
    alerts.redis_failed()
    alerts.redis_ok()


@pytest.mark.parametrize(("kind", "report"), REPORTS, ids=[kind for kind, _ in REPORTS])
def test_each_report_becomes_one_alert_of_its_kind(
    make: Make, time: Time, kind: str, report: Callable[[Alerts, Time], object]
) -> None:
    inbox = Inbox()
    alerts = make(inbox)
    report(alerts, time)
    assert alerts.flush(DEADLINE_S)
    assert kinds_of(inbox.alerts) == [kind]


def test_there_is_a_report_for_each_kind() -> None:
    assert {kind for kind, _ in REPORTS} | {"summary"} == set(KINDS)


def test_a_failed_task_is_told_by_ids_and_error_but_never_by_its_payload(make: Make) -> None:
    inbox = Inbox()
    alerts = make(inbox)
    task = make_task("alice", "t-1", name="reports.build", payload={"card": SECRET})
    alerts.task_failed(task, 3, ValueError("a\nb"), "f00d")
    alerts.task_failed(task, 3, "KeyError: 'x'")
    alerts.task_failed(task, 3, "KeyError: 'y'")
    alerts.task_timed_out(task, 1, 2.5)
    alerts.stale_run(STALE)
    assert alerts.flush(DEADLINE_S)
    first = inbox.alerts[0]
    assert first.key == "reports.build:f00d"
    assert first.summary == "reports.build failed after 3 attempts: ValueError: a b"
    assert first.details == {
        "task": "t-1",
        "name": "reports.build",
        "user": "alice",
        "attempt": 3,
        "error": "ValueError: a b",
        "fingerprint": "f00d",
    }
    assert [alert.key for alert in inbox.alerts[1:2]] == ["reports.build:KeyError"]
    assert len(inbox.alerts) == 4
    assert SECRET not in repr(inbox.alerts)


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr
)
def test_a_recipient_that_raises_anything_is_tried_again_and_stops_nobody_else(
    make: Make, time: Time, events: Events, registry: CollectorRegistry, error: BaseException
) -> None:
    inbox, failing = Inbox(), Hanging(error)
    failing.gate.set()
    alerts = make(failing, inbox)
    alerts.raise_(news("a"))
    events.wait_for("alert_not_sent")
    inbox.wait_for(1)
    failing.error = None
    time.now += 1.0
    assert alerts.flush(DEADLINE_S)
    assert [alert.key for alert in failing.alerts] == ["a", "a"]
    assert [alert.key for alert in inbox.alerts] == ["a"]
    assert outcomes(registry) == {"sent": 2, "failed": 1}


def test_a_hanging_recipient_blocks_neither_who_raises_nor_the_others(
    make: Make, time: Time, events: Events, registry: CollectorRegistry
) -> None:
    inbox, hanging = Inbox(), Hanging()
    alerts = make(hanging, inbox, per_minute=PENDING)
    alerts.raise_(news("first"))
    assert hanging.entered.wait(DEADLINE_S)
    for minute in range(1, 4):
        time.now += 60.0
        for number in range(PENDING):
            alerts.raise_(news(f"{minute}-{number}"))
        inbox.wait_for(1 + minute * PENDING)
    events.wait_for("alert_overdue")
    assert not alerts.flush(0)
    assert {alert.dropped for alert in inbox.alerts} == {0}
    hanging.gate.set()
    events.wait_for("alert_late")
    time.now += 1.0  # the pause after it
    assert alerts.flush(DEADLINE_S)
    assert len(hanging.alerts) == 1 + PENDING
    assert hanging.alerts[1].key == "3-0"
    assert [alert.dropped for alert in hanging.alerts[:3]] == [0, 2 * PENDING, 0]
    assert outcomes(registry) == {"sent": 1 + 4 * PENDING, "failed": 1, "dropped": 2 * PENDING}
    assert events.names() == ["alert_overdue", "alert_late"]


def test_a_failing_clock_metric_or_argument_is_not_raised(make: Make, events: Events) -> None:
    def broken() -> float:
        raise RuntimeError("no time")

    alerts = make(Inbox(), monotonic=broken)
    alerts.raise_(news())
    alerts.run_ended(True)
    alerts.late("very")  # type: ignore[arg-type]
    alerts.raise_("fire")  # type: ignore[arg-type]
    alerts.watch(None)  # type: ignore[arg-type]
    alerts.task_failed(None, 1, "x")  # type: ignore[arg-type]
    assert events.names() == ["alert_not_raised"] * 6


def test_a_log_handler_that_raises_is_not_the_callers_problem(make: Make) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("disk full")

    inbox, handler, log = Inbox(), Broken(), logging.getLogger("fairqueue.alerts")
    log.addHandler(handler)
    try:
        alerts = make(LogRecipient(), inbox)
        alerts.raise_("fire")  # type: ignore[arg-type]
        alerts.raise_(news())
        inbox.wait_for(1)
        assert not alerts.flush(0.01)
    finally:
        log.removeHandler(handler)


def test_the_time_out_of_a_handler_is_not_swallowed(make: Make) -> None:
    def overdue() -> float:
        raise TimedOut

    with pytest.raises(TimedOut):
        make(Inbox(), monotonic=overdue).raise_(news())


def test_without_recipients_nothing_happens_at_all(make: Make, registry: CollectorRegistry) -> None:
    before = set(threading.enumerate())
    alerts = make()
    alerts.raise_(news())
    alerts.raise_("fire")  # type: ignore[arg-type]
    assert alerts.close(0)
    assert set(threading.enumerate()) <= before
    assert outcomes(registry) == {}


def test_a_signal_handler_may_raise_an_alert_during_another(make: Make, time: Time) -> None:
    inbox = Inbox()
    inner = iter([True])

    def interrupted() -> float:
        # The clock is asked under the lock, which is where a signal would hurt most.
        if next(inner, False):
            alerts.raise_(news("from the signal"))
        return time.now

    alerts = make(inbox, monotonic=interrupted)
    alerts.raise_(news("from the program"))
    assert alerts.flush(DEADLINE_S)
    assert [alert.key for alert in inbox.alerts] == ["from the signal", "from the program"]


def test_closing_sends_what_waits_and_the_summary_and_ends_the_thread(
    make: Make, time: Time, events: Events, registry: CollectorRegistry
) -> None:
    inbox, failing = Inbox(), Hanging(ValueError("no"))
    failing.gate.set()
    alerts = make(inbox, failing, per_minute=1)
    alerts.raise_(news("a"))
    alerts.raise_(news("b"))
    events.wait_for("alert_not_sent")
    thread = alerts._thread
    assert thread in threading.enumerate()
    assert alerts.close(DEADLINE_S)
    assert thread not in threading.enumerate()
    assert [alert.kind for alert in inbox.alerts] == ["task_failed", "summary"]
    assert [alert.kind for alert in failing.alerts] == ["task_failed", "task_failed", "summary"]
    alerts.raise_(news("c"))
    assert alerts.close(0)
    assert len(inbox.alerts) == 2
    assert outcomes(registry) == {"sent": 1, "limited": 1, "failed": 2, "dropped": 2}


def test_closing_does_not_wait_longer_than_it_is_told(make: Make, events: Events) -> None:
    hanging = Hanging()
    alerts = make(hanging)
    alerts.raise_(news())
    assert hanging.entered.wait(DEADLINE_S)
    assert not alerts.close(0.01)
    assert events.names() == ["alerts_undelivered"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limits", 5),
        ("repeat_after", -1),
        ("per_minute", 0),
        ("source", "a\nb"),
        ("registry", "prometheus"),
    ],
)
def test_an_unusable_setting_is_refused_by_name(make: Make, name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name} "):
        make(Inbox(), **{name: value})


@pytest.mark.parametrize("recipient", [print, object(), None])
def test_what_is_no_recipient_is_refused(recipient: Any) -> None:
    with pytest.raises(ConfigurationError, match="wrap a function in CallableRecipient"):
        Alerts([recipient])


def test_two_alerts_share_the_metrics_of_a_registry(
    make: Make, registry: CollectorRegistry
) -> None:
    for inbox in (Inbox(), Inbox()):
        alerts = make(inbox)
        alerts.raise_(Alert(kind="disk_full", summary="of our own"))
        assert alerts.flush(DEADLINE_S)
    assert outcomes(registry, "other") == {"sent": 2}


FORKING = """
import os, sys, threading
from fairqueue.alerts import Alert, Alerts, CallableRecipient

def tell(alert):
    print(alert.key, alert.source == f"{host}:{os.getpid()}", flush=True)

import socket
host = socket.gethostname()
alerts = Alerts([CallableRecipient(tell)])
alerts.raise_(Alert(kind="task_failed", key="before", summary="x"))
assert alerts.flush(60)

# Another thread holds the lock while this one forks: in the child nobody would ever release it.
held, go = threading.Event(), threading.Event()
def hold():
    with alerts._lock:
        held.set()
        go.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    alerts.raise_(Alert(kind="task_failed", key="before", summary="x"))
    alerts.raise_(Alert(kind="task_failed", key="child", summary="x"))
    os._exit(0 if alerts.close(60) else 1)
_, status = os.waitpid(child, 0)
go.set()
alerts.raise_(Alert(kind="task_failed", key="parent", summary="x"))
assert alerts.close(60)
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.processes
def test_a_forked_child_has_its_own_thread(spawn: Callable[..., "subprocess.Popen[str]"]) -> None:
    output, _ = spawn(FORKING).communicate(timeout=DEADLINE_S)
    assert output.splitlines() == ["before True", "before True", "child True", "parent True", "0"]


# --- the log and functions ------------------------------------------------------------------------


def test_the_log_gets_a_line_at_the_level_of_the_alert_with_its_fields(events: Events) -> None:
    alert = news(severity="critical", suppressed=2, details={"task": "t"})
    LogRecipient().send(alert)
    (record,) = events.records
    assert (record.levelname, vars(record)["event"]) == ("CRITICAL", "alert")
    assert record.getMessage() == f"alert task_failed: {alert.headline()}"
    assert vars(record)["alert"] == alert.as_dict()


def test_a_partial_is_named_without_its_arguments() -> None:
    recipient = CallableRecipient(functools.partial(print, SECRET))
    assert repr(recipient) == "CallableRecipient(partial)"


@pytest.mark.parametrize(
    ("maker", "message"),
    [
        (lambda: CallableRecipient(3), "function must be callable, not 3"),  # type: ignore[arg-type]
        (lambda: CallableRecipient(print, timeout=0), "timeout must be .* not 0"),
        (lambda: CallableRecipient(print, name="a\nb"), "name "),
        (lambda: LogRecipient("root"), "to must be an instance of Logger, not a str"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_function_or_logger_is_refused(maker: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        maker()


# --- TLS for the servers of the tests -------------------------------------------------------------


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody trusts, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    arguments = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    arguments += " -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *arguments.split(), "-out", str(made), "-keyout", str(key)],
        check=True,
        capture_output=True,
    )
    return made, key


@pytest.fixture
def server_tls(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


@pytest.fixture
def client_tls(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate[0]))


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# --- webhooks -------------------------------------------------------------------------------------


class Hook(ThreadingHTTPServer):
    """Remembers requests as (path, headers, body), and answers each with `status`."""

    daemon_threads = True

    def __init__(self, status: int = 204) -> None:
        super().__init__(("127.0.0.1", 0), HookHandler)
        self.status = status
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A handshake that the client breaks off is part of a test."""


class HookHandler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, dict(self.headers), body))
        self.send_response(self.server.status, SECRET)  # a server that echoes what it should not
        if self.server.status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    with serving(server):
        yield server


def url_of(hook: Hook, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{hook.server_port}/hooks/{SECRET}?key={SECRET}"


def test_a_webhook_gets_signed_json(hook: Hook) -> None:
    recipient = WebhookRecipient(
        url_of(hook), headers={"Authorization": "Bearer x"}, secret=SECRET, allow_http=True
    )
    alert = news("ключ", details={"user": "ålice"}, suppressed=3, dropped=1)
    recipient.send(alert)
    ((path, headers, body),) = hook.requests
    assert path == f"/hooks/{SECRET}?key={SECRET}"
    assert json.loads(body) == alert.as_dict()
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == "Bearer x"
    match = re.fullmatch(r"t=(\d+),v1=([0-9a-f]{64})", headers["Fairqueue-Signature"])
    assert match is not None
    signed = match[1].encode() + b"." + body
    assert match[2] == hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()


def test_a_webhook_without_secret_is_not_signed(hook: Hook) -> None:
    WebhookRecipient(url_of(hook), allow_http=True).send(news())
    assert "Fairqueue-Signature" not in hook.requests[0][1]


@pytest.mark.parametrize("status", [302, 400, 500])
def test_only_2xx_is_success_and_redirects_are_not_followed(hook: Hook, status: int) -> None:
    hook.status = status
    recipient = WebhookRecipient(url_of(hook), allow_http=True)
    with pytest.raises(AlertNotSent, match=f"answered {status}, not 2xx$") as caught:
        recipient.send(news())
    assert SECRET not in str(caught.value)
    assert len(hook.requests) == 1


def test_a_webhook_ignores_proxy_variables(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    WebhookRecipient(url_of(hook), allow_http=True).send(news())
    assert len(hook.requests) == 1


def test_a_webhook_that_is_not_there_is_a_failure() -> None:
    hook = Hook()
    hook.server_close()
    with pytest.raises(AlertNotSent, match="is unreachable: ConnectionRefusedError"):
        WebhookRecipient(url_of(hook), allow_http=True).send(news())


def test_a_webhook_by_https_checks_the_certificate(
    hook: Hook, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext
) -> None:
    hook.socket = server_tls.wrap_socket(hook.socket, server_side=True)
    url = url_of(hook, "https")
    with pytest.raises(AlertNotSent, match="CERTIFICATE_VERIFY_FAILED"):
        WebhookRecipient(url).send(news())
    assert hook.requests == []
    WebhookRecipient(url, context=client_tls).send(news())
    assert len(hook.requests) == 1


@pytest.mark.parametrize(
    ("url", "more"),
    [
        (f"http://example.org/{SECRET}", {}),
        (f"ftp://example.org/{SECRET}", {"allow_http": True}),
        (f"file:///{SECRET}", {"allow_http": True}),
        (f"https:///{SECRET}", {}),
        (f"https://user:{SECRET}@example.org/", {}),
        (f"https://example.org:port/{SECRET}", {}),
        (f"https://example.org/{SECRET}\r\nX: y", {}),
        (f"https://exämple.org/{SECRET}", {}),
        (7, {}),
        ("https://example.org/", {"headers": {"X\n": SECRET}}),
        ("https://example.org/", {"headers": {"X": f"{SECRET}\r\nY: z"}}),
        ("https://example.org/", {"headers": {"X": 5}}),
        ("https://example.org/", {"secret": ""}),
        ("https://example.org/", {"secret": 5}),
        ("https://example.org/", {"timeout": -1}),
        ("https://example.org/", {"context": "strict"}),
    ],
)
def test_a_bad_webhook_is_refused_without_showing_secrets(url: Any, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        WebhookRecipient(url, **more)
    assert SECRET not in str(caught.value)


# --- e-mail ---------------------------------------------------------------------------------------


class Mail(socketserver.ThreadingTCPServer):
    """As much SMTP as a client needs. `mails` has (logins, recipients, message, was encrypted)."""

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None, mode: str = "starttls") -> None:
        super().__init__(("127.0.0.1", 0), MailHandler)
        self.port = int(self.server_address[1])
        self.tls, self.mode = tls, mode
        self.answers: dict[str, str] = {}  # to a command, instead of the usual one
        self.mails: list[tuple[list[str], list[str], EmailMessage, bool]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A handshake that the client breaks off is part of a test."""


class MailHandler(socketserver.StreamRequestHandler):
    server: Mail

    def setup(self) -> None:
        self.encrypted = False
        super().setup()
        if self.server.mode == "ssl":
            self._encrypt()

    def _encrypt(self) -> None:
        assert self.server.tls is not None
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", buffering=0)
        self.encrypted = True

    def finish(self) -> None:
        super().finish()
        self.connection.close()  # the one that encrypts is not the server's to close

    def handle(self) -> None:
        self.logins: list[str] = []
        self.to: list[str] = []
        self._say("220 ready")
        while line := self.rfile.readline().decode().strip():
            command, _, rest = line.partition(" ")
            command = command.upper()
            if command == "RCPT":
                self.to.append(rest)
            if command == "AUTH":
                self.logins.append(base64.b64decode(rest.split()[1]).decode())
            usual = getattr(self, f"on_{command.lower()}", lambda: "250 ok")()
            self._say(self.server.answers.get(command, usual))
            if command == "STARTTLS":
                self._encrypt()
            if command == "QUIT":
                return

    def _say(self, answer: str) -> None:
        if answer:
            self.wfile.write(answer.encode() + b"\r\n")

    def on_ehlo(self) -> str:
        plain = self.server.mode == "starttls" and self.server.tls and not self.encrypted
        return "250-hello\r\n" + ("250 STARTTLS" if plain else "250 AUTH PLAIN")

    def on_auth(self) -> str:
        return "235 welcome"

    def on_starttls(self) -> str:
        return "220 go ahead"

    def on_data(self) -> str:
        self._say("354 go on")
        lines = []
        while (line := self.rfile.readline()) != b".\r\n":
            lines.append(line)
        message = message_from_bytes(b"".join(lines), policy=mail_policy)
        assert isinstance(message, EmailMessage)
        self.server.mails.append((self.logins, self.to, message, self.encrypted))
        return "250 taken"

    def on_quit(self) -> str:
        return "221 bye"


@pytest.fixture
def mail() -> Iterator[Mail]:
    server = Mail()
    with serving(server):
        yield server


def to_mail(mail: Mail, **fields: Any) -> EmailRecipient:
    given: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": mail.port,
        "sender": "queue@example.org",
        "to": ["ops@example.org", "dev@example.org"],
        "tls": "none",
    }
    return EmailRecipient(**given | fields)


def test_a_mail_has_everything_and_nobody_can_write_its_headers(mail: Mail) -> None:
    alert = news(
        summary="broke\r\nBcc: all@example.org\r\n\r\nünd böse",
        details={"error": "a\n.\nQUIT\n"},
        dropped=2,
        source="host:1",
    )
    to_mail(mail).send(alert)
    ((logins, to, message, encrypted),) = mail.mails
    assert (logins, encrypted) == ([], False)
    # Versions of Python write the word before it in capitals or not.
    assert [each.upper() for each in to] == ["TO:<OPS@EXAMPLE.ORG>", "TO:<DEV@EXAMPLE.ORG>"]
    assert message["Bcc"] is None
    assert message["Subject"] == f"[FairQueue] error: {alert.headline()}"
    assert message["From"] == "queue@example.org"
    assert message["To"] == "ops@example.org, dev@example.org"
    assert message["Message-ID"] == f"<{alert.alert_id}@example.org>"
    assert message["Auto-Submitted"] == "auto-generated"
    assert message["Date"].datetime == alert.at.replace(microsecond=0)
    assert message.get_content().replace("\r\n", "\n") == alert.text()
    assert "2 earlier alerts were not delivered" in alert.text()


@pytest.mark.parametrize("mode", ["starttls", "ssl"])
def test_a_mail_is_sent_encrypted_with_a_login(
    server_tls: ssl.SSLContext, client_tls: ssl.SSLContext, mode: str
) -> None:
    with serving(mail := Mail(server_tls, mode)):
        login = {"username": "me", "password": SECRET}
        to_mail(mail, tls=mode, context=client_tls, **login).send(news())
        with pytest.raises(AlertNotSent, match="CERTIFICATE_VERIFY_FAILED"):
            to_mail(mail, tls=mode, **login).send(news())
    ((logins, _, _, encrypted),) = mail.mails
    assert (logins, encrypted) == ([f"\0me\0{SECRET}"], True)


def test_a_server_without_starttls_gets_nothing(mail: Mail) -> None:
    with pytest.raises(AlertNotSent, match="SMTPNotSupportedError"):
        to_mail(mail, tls="starttls").send(news())
    assert mail.mails == []


@pytest.mark.parametrize(
    ("command", "answer", "reason"),
    [
        ("MAIL", f"451 {SECRET}", "SMTPSenderRefused 451"),
        ("RCPT", f"550 {SECRET}", "SMTPRecipientsRefused"),
        ("DATA", f"554 {SECRET}", "SMTPDataError 554"),
    ],
)
def test_a_mail_that_is_refused_is_a_failure_that_repeats_nothing_the_server_said(
    mail: Mail, command: str, answer: str, reason: str
) -> None:
    mail.answers[command] = answer
    with pytest.raises(AlertNotSent, match=f"failed: {reason}$"):
        to_mail(mail).send(news())


@pytest.mark.parametrize("answer", ["500 what", ""])
def test_a_mail_that_was_taken_is_sent_however_the_server_parts(mail: Mail, answer: str) -> None:
    mail.answers["QUIT"] = answer
    to_mail(mail).send(news())
    assert len(mail.mails) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host": ""}, "host must be .* not ''"),
        ({"port": 0}, "port must be .* not 0"),
        ({"sender": "me"}, "sender must be .* not 'me'"),
        ({"sender": "a@b.org\nBcc: c@d.org"}, "sender "),
        ({"to": []}, "to must be a list of addresses, not an empty list"),
        ({"to": "ops@example.org"}, "to must be a list of addresses, not a str"),
        ({"to": ["ops@example.org, dev@example.org"]}, "to must be .* not 'ops"),
        ({"to": ["jörg@example.org"]}, "to must be .* not 'jörg"),
        ({"tls": "yes"}, "tls must be .* not 'yes'"),
        ({"tls": "ssl", "username": "me"}, "password must be an ASCII string"),
        ({"tls": "ssl", "password": SECRET}, "username must be an ASCII string"),
        ({"tls": "ssl", "username": "me", "password": f"{SECRET}ß"}, "password must be an ASCII"),
        (
            {"tls": "none", "username": "me", "password": SECRET},
            "tls must be .* to send a password",
        ),
        ({"timeout": 0}, "timeout must be .* not 0"),
        ({"context": 3}, "context must be an instance of SSLContext, not 3"),
    ],
)
def test_an_unusable_mail_setting_is_refused_without_showing_the_password(
    mail: Mail, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}") as caught:
        to_mail(mail, **fields)
    assert SECRET not in str(caught.value)


# --- secrets --------------------------------------------------------------------------------------


def test_secrets_are_not_shown(make: Make, mail: Mail, hook: Hook, events: Events) -> None:
    hook.status = 500
    mail.answers["MAIL"] = f"451 {SECRET}"
    webhook = WebhookRecipient(
        url_of(hook), headers={"X-Key": SECRET}, secret=SECRET, allow_http=True
    )
    email = to_mail(mail, tls="ssl", username="me", password=SECRET, timeout=5.0)
    alerts = make(
        webhook,
        to_mail(mail),
        EmailRecipient(
            host="127.0.0.1",
            port=1,
            sender="a@b.org",
            to=["a@b.org"],
            username="me",
            password=SECRET,
        ),
    )
    alerts.raise_(news())
    events.wait_for("alert_not_sent", 3)
    assert SECRET not in events.text()
    assert SECRET not in repr([alerts, webhook, email])
    assert repr(webhook) == f"WebhookRecipient('http://127.0.0.1:{hook.server_port}')"


# --- the page -------------------------------------------------------------------------------------


def test_the_examples_of_the_page_work(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    checks = """
    import hashlib, hmac
    digest = hmac.new(b"s", b"1700000000." + b"{}", hashlib.sha256).hexdigest()
    assert is_genuine(f"t=1700000000,v1={digest}", b"{}", b"s", 1700000100)
    assert not is_genuine(f"t=1700000000,v1={digest}", b"{}", b"s", 1700001000)
    assert not is_genuine(f"t=1700000000,v1={digest}", b"{ }", b"s", 1700000100)
    assert not is_genuine("", b"{}", b"s", 1700000100)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join([*examples, textwrap.dedent(checks)])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "critical: the disk of db-1 is full\n"


def test_the_page_lists_each_kind_and_each_limit_with_its_default() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\|$", text, re.MULTILINE)
    assert sorted(rows) == sorted(KINDS)
    usual = AlertLimits()
    for name in AlertLimits.__slots__:
        assert f"`{name}={getattr(usual, name):_}`" in text
