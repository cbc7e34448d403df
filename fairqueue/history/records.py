"""Read the records of runs and of their attempts."""

import json
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.flow_options import DEFAULT_POOL, read_flow
from fairqueue.link.operation import Call
from fairqueue.models import UNREADABLE, Task, as_text, text_or_none
from fairqueue.outcomes import ended_status
from fairqueue.queue.reports import LogLine
from fairqueue.validation import (
    Priority,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A task in the history.

    status: pending, running, retrying, succeeded, failed, timed_out, cancelled or expired.
    run_type: "queued", "scheduled", "manual" or "retry". seconds: the duration of the last attempt.
    stale_since: when it was found running after its time-out. retry_of, retried_as: the previous
    and the next run, if a failed run was retried by hand. cost: what it has cost, if it or its
    handler said so. expires_at: when it expires, if it waits and expires.
    """

    task_id: str
    status: str
    user_id: str
    name: str
    priority: Priority
    run_type: str
    triggered_by: str | None
    schedule_id: str | None
    retry_of: str | None
    retried_as: str | None
    attempts: int
    pushed_at: datetime
    due_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    seconds: float | None
    worker_id: str | None
    host: str | None
    pid: int | None
    error: str | None
    fingerprint: str | None
    result: Any
    cancel_requested: bool
    stale_since: datetime | None
    tenant: str | None = None
    pool: str = DEFAULT_POOL
    limit_keys: tuple[str, ...] = ()
    unique: str | None = None
    cost: float | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a task.

    outcome: running, succeeded, failed, timed_out, cancelled, or expired (its worker was gone).
    log_dropped: the number of log lines dropped before those in `log`.
    """

    number: int
    outcome: str
    started_at: datetime
    ended_at: datetime | None
    seconds: float | None
    worker_id: str | None
    host: str | None
    pid: int | None
    error_type: str | None = None
    error: str | None = None
    traceback: str | None = None
    log: tuple[LogLine, ...] = ()
    log_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """A run with its attempts, oldest first, and its task (None if that is damaged)."""

    run: Run
    attempts: list[Attempt]
    task: Task | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Failed runs with one cause: how many are stored, and the latest one."""

    fingerprint: str
    count: int
    last_at: datetime
    latest: Run


def read_run(task_id: str, text: bytes) -> Run | None:
    """Read a run from its status record; None if that is absent or damaged."""
    try:
        record = json.loads(text)
        status, flow = _status(record), read_flow(record)
        host, pid = _place(record.get("place", ""))
        return Run(
            task_id=task_id,
            status=status,
            user_id=as_text(record["user"]),
            name=as_text(record["name"]),
            priority=Priority(record["level"]),
            run_type=as_text(record.get("type", "queued")),
            triggered_by=text_or_none(record.get("by")),
            schedule_id=text_or_none(record.get("schedule")),
            retry_of=text_or_none(record.get("retry_of")),
            retried_as=text_or_none(record.get("retried_as")),
            attempts=int(record["attempts"]),
            pushed_at=from_ms(int(record["pushed"])),
            due_at=from_ms(int(record["due"])),
            started_at=_moment(record.get("claimed")),
            ended_at=_moment(record.get("ended")),
            seconds=_seconds(record),
            worker_id=text_or_none(record.get("worker")),
            host=host,
            pid=pid,
            error=text_or_none(record.get("error")),
            fingerprint=text_or_none(record.get("fingerprint")),
            result=json.loads(record["result"]) if "result" in record else None,
            cancel_requested=bool(record.get("cancel")),
            stale_since=_moment(record.get("stale")),
            tenant=text_or_none(record.get("tenant")),
            pool=flow.pool,
            limit_keys=flow.limit_keys,
            unique=flow.unique,
            cost=flow.cost if record.get("spent") is None else float(record["spent"]),
            expires_at=_moment(record.get("expires")),
        )
    except UNREADABLE:
        return None


def _status(record: dict[str, Any]) -> str:
    state = record["state"]
    if state in ("ready", "delayed"):
        return "retrying" if record["attempts"] > 0 else "pending"
    if state == "running":
        return "running"
    return ended_status(state, timed_out=bool(record.get("timed_out")))


def _seconds(record: dict[str, Any]) -> float | None:
    """Return the duration of the last attempt, once the run has ended."""
    if "took" in record:
        return _finite(record["took"] / 1000)
    # Without a token it was cancelled while it waited for a retry.
    if "ended" not in record or "claimed" not in record or "token" not in record:
        return None
    return _finite((record["ended"] - record["claimed"]) / 1000)


def _finite(value: Any) -> float:
    """Return a number of a record. Raises TypeError or ValueError if it is damaged."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a number of seconds")
    return float(value)


def _place(text: str) -> tuple[str | None, int | None]:
    """Return host and process id, as `this_place` writes them."""
    host, _, pid = text.rpartition(" ")
    return host or None, int(pid) if pid else None


def _moment(value: float | None) -> datetime | None:
    return None if value is None else from_ms(int(value))


def read_attempts(run: Run, lines: bytes) -> list[Attempt]:
    """Return the stored attempts; the last one is made from the run if it is not stored."""
    found = [attempt for line in lines.splitlines() if (attempt := _read_attempt(line))]
    if any(attempt.number == run.attempts for attempt in found) or run.started_at is None:
        return found
    if run.status in ("running", "succeeded", "cancelled"):
        last = Attempt(
            number=run.attempts,
            outcome=run.status,
            started_at=run.started_at,
            ended_at=run.ended_at,
            seconds=run.seconds,
            worker_id=run.worker_id,
            host=run.host,
            pid=run.pid,
        )
        found.append(last)
    return found


def _read_attempt(line: bytes) -> Attempt | None:
    try:
        record = json.loads(line)
        report = record.get("report", {})
        host, pid = _place(record["place"])
        return Attempt(
            number=int(record["attempt"]),
            outcome=as_text(record["outcome"]),
            started_at=from_ms(int(record["start"])),
            ended_at=from_ms(int(record["end"])),
            seconds=_finite(report.get("seconds", (record["end"] - record["start"]) / 1000)),
            worker_id=as_text(record["worker"]) or None,
            host=host,
            pid=pid,
            error_type=text_or_none(report.get("error_type")),
            error=text_or_none(report.get("message", record.get("error"))),
            traceback=text_or_none(report.get("traceback")),
            log=_log_lines(report.get("log", ()), report.get("log_context", {})),
            log_dropped=int(report.get("log_dropped", 0)),
        )
    except UNREADABLE:
        return None


def _log_lines(lines: Any, contexts: Any) -> tuple[LogLine, ...]:
    return tuple(
        _log_line(contexts.get(str(number), {}), *line) for number, line in enumerate(lines)
    )


def _log_line(context: Any, at_ms: Any, level: Any, message: Any) -> LogLine:
    from_ms(at_ms)  # raises if it is not a time
    return LogLine(at_ms, as_text(level), as_text(message), dict(context))


def list_call(source: str, first: str, last: str, limit: int) -> Call:
    """Return a call of the script that lists runs, from `first` down to `last`."""
    bounds: dict[str, Any] = {"from": first, "to": last}
    return Call("list_runs", source=source, limit=limit, **bounds)
