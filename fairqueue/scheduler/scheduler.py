"""Fire schedules when they are due: the loop, as a thread or as single ticks."""

import logging
import os
import random
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import Any, Unpack

import redis
from prometheus_client import CollectorRegistry

from fairqueue.alerts import Alerts
from fairqueue.clock import from_ms, to_ms
from fairqueue.errors import (
    BrokenRecord,
    ConfigurationError,
    FairQueueError,
    InvalidCron,
    InvalidSchedule,
    RedisRefused,
    RedisUnavailable,
    UnknownSchedule,
    kind_of,
)
from fairqueue.http_tasks.checks import Outgoing
from fairqueue.link.connection import BATCH_BYTES, Argument, Listener, in_batches
from fairqueue.link.scripts import load_script
from fairqueue.logs import error_line, error_text, log_event
from fairqueue.metrics.collectors import scheduler_metrics
from fairqueue.models import (
    DEFAULT_NAME,
    Page,
    Problem,
    ScheduledTask,
    Task,
    encode_payload,
    new_id,
    task_document,
)
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.recurrence.frequency import Frequency
from fairqueue.retry_policy import encode_policy
from fairqueue.scheduler.leadership import DueSchedule, Leadership, Reading
from fairqueue.schedules.backfill import Backfill, Request, backfill
from fairqueue.schedules.bulk import (
    BulkResult,
    Filter,
    Replanned,
    Replanner,
    ScheduleChange,
    check_action,
    copy_spec,
    list_changes,
    read_stored,
    run_bulk,
    search,
    select_ids,
    walk_ids,
)
from fairqueue.schedules.import_export import Diff, export, import_documents
from fairqueue.schedules.outcomes import Moment, list_moments
from fairqueue.schedules.planning import due_ms, plan
from fairqueue.schedules.store import (
    Definition,
    ScheduleOptions,
    ScheduleStore,
    check_change,
    policy_of,
    read_definition,
)
from fairqueue.stats.samples import SampleStore
from fairqueue.validation import Priority, check_name, check_payload, check_seconds
from fairqueue.worker.heartbeat import report

logger = logging.getLogger("fairqueue.scheduler")
_log = partial(log_event, logger)

READ_LIMIT = 2000  # due schedules read in one round trip
FIRE_CHUNK = 80  # fires in one script: some 2 ms of the server's time, 7 with unfinished runs
CANCEL_CHUNK = 12  # of those that cancel what is unfinished of their schedules
ROUNDS = 200  # readings in one tick at most, so that stop() is heard within a long catch-up
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
LOOK_OVER_MS = 10_000  # so often a leader ends runs that do not answer, and looks at the backlog
CHECK_TIMEOUT_S = 0.5  # how long the constructor and health() ask for Redis
REPLAN_S, REPLAN_PAUSE_S = 0.1, 0.05  # after a tick, so long a leader replans; then it looks again
RENEW_PART = 1 / 3  # of lock_timeout: a leader with nothing to do renews its term so often

STOPPED, STARTING, RUNNING, STOPPING, ERROR = "stopped", "starting", "running", "stopping", "error"


@dataclass(slots=True, kw_only=True)
class TickReport:
    """What one pass did.

    `fired`, `skipped` (by its overlap), `missed`, `refused` (by a limit; tried again later),
    `moved` (changed by others since it was read) and `set_aside` are counts of schedules or
    moments. `wait` is how many seconds there is nothing to do.
    """

    is_leader: bool = False
    fired: int = 0
    skipped: int = 0
    missed: int = 0
    refused: int = 0
    moved: int = 0
    set_aside: int = 0
    wait: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How a scheduler is.

    `lag` is how late the most overdue schedule is, in seconds; one that a limit of the queue
    refuses is not late but refused, which has a counter of its own.
    """

    state: str
    up_since: datetime | None
    last_good_cycle: datetime | None
    redis_up: bool
    is_leader: bool
    leader: str | None
    lag: float | None
    last_error: str | None


@dataclass(slots=True)
class _Fire:
    """One fire that is to be sent, and what it came from."""

    due: DueSchedule
    due_ms: int  # when it was to be fired
    missed: int
    is_last: bool
    user_id: str
    moment_ms: int | None  # None: no moment is fired, only the plan moves on
    row: tuple[Argument, ...]

    def said(self) -> dict[str, Any]:
        """What a log event says of it."""
        schedule_id = self.due.schedule_id
        task_id = None if self.moment_ms is None else f"{schedule_id}:{self.moment_ms}"
        return {"schedule": schedule_id, "task": task_id, "user": self.user_id}


class TaskScheduler:
    """Keeps schedules, and fires them while it leads. May be used by many threads.

    Any number of schedulers may run on a queue; one leads, and the others take over within
    `lock_timeout` seconds of its end. `check_interval` is the longest that the thread waits.
    """

    def __init__(
        self,
        queue: TaskQueue,
        scheduler_id: str | None = None,
        check_interval: float = 1.0,
        lock_timeout: float = 10.0,
        *,
        registry: CollectorRegistry | None = None,
        alerts: Alerts | None = None,
    ) -> None:
        """Checks its arguments, then Redis. `alerts` tells people what goes wrong.

        Raises ConfigurationError naming the argument, or RedisUnavailable at once.
        """
        if not isinstance(queue, TaskQueue):
            raise ConfigurationError(f"queue must be a TaskQueue, not {kind_of(queue)}")
        self.queue = queue
        if scheduler_id is None:
            scheduler_id = f"{socket.gethostname()}:{os.getpid()}:{new_id()[:6]}"
        self.scheduler_id = check_name(scheduler_id, "scheduler_id", ConfigurationError)
        self.check_interval = check_seconds(
            check_interval, "check_interval", ConfigurationError, least=0.01, most=3600
        )
        self.lock_timeout = check_seconds(
            lock_timeout, "lock_timeout", ConfigurationError, least=0.1, most=3600
        )
        if alerts is not None and not isinstance(alerts, Alerts):
            raise ConfigurationError(f"alerts must be an Alerts, not {kind_of(alerts)}")
        self._alerts = alerts or Alerts()
        self._metrics = scheduler_metrics(registry)
        queue.check(timeout=CHECK_TIMEOUT_S)
        self._link = queue.link
        self._outgoing = Outgoing(self._link)
        self._store = ScheduleStore(self._link, self._outgoing.check)
        self._metrics.prepare(queue.name, self.scheduler_id)
        self._begin_life()
        _schedulers.add(self)

    def _begin_life(self) -> None:
        """Be a scheduler that has not run: in the constructor, and in a child after a fork.

        There the thread is gone, locks may be held for good, and the term is the parent's.
        """
        self._leadership = Leadership(self._link, self.scheduler_id, self.lock_timeout)
        self._tick_lock = threading.Lock()
        self._life_lock = threading.RLock()  # a signal handler may stop what is being stopped
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._listener: Listener | None = None
        self._state = STOPPED
        self._up_since: float | None = None
        self._last_cycle: float | None = None
        self._last_error: str | None = None
        self._looked_ms: int | None = None  # when the queue was last looked over
        self._heard: list[bytes] = []  # notices that were passed on then
        self._replanner: Replanner | None = None  # from when it was elected until all is replanned

    # --- schedules --------------------------------------------------------------------------------

    def add_schedule(
        self,
        cron_expr: str | Frequency | Mapping[str, object] | None = None,
        user_id: str | None = None,
        priority: int = Priority.NORMAL,
        payload: dict[str, Any] | None = None,
        timezone: str = "UTC",
        name: str = DEFAULT_NAME,
        schedule_id: str | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        on_conflict: str = "error",
        **options: Unpack[ScheduleOptions],
    ) -> str:
        """Store a schedule; its id. From then on a task is pushed at each of its moments.

        Its rule is `cron_expr` (five fields, or six with seconds first; `H` is hashed by the id),
        or one of the options `every` and `at`. All options: see ScheduleOptions.
        Raises InvalidCron, UnknownTimezone, InvalidPayload or InvalidSchedule naming the value, and
        ScheduleConflict when `schedule_id` is taken, unless `on_conflict` is "replace". Then
        nothing was stored.
        """
        spec = {
            "cron_expr": cron_expr,
            "user_id": user_id,
            "priority": priority,
            "payload": payload,
            "timezone": timezone,
            "name": name,
            "schedule_id": schedule_id,
            "metadata": metadata,
            **options,
        }
        schedule_id = self._store.add([spec], on_conflict)[0]
        _log("schedule_added", schedule=schedule_id, user=user_id)
        return schedule_id

    def add_schedules(
        self, schedules: Iterable[Mapping[str, Any]], *, on_conflict: str = "error"
    ) -> list[str]:
        """Store many schedules, given as dicts of add_schedule's arguments; all or none of them.

        One call is one script: 10,000 schedules of 16 MiB at most, which hold the server for some
        13 µs each. Raises as add_schedule.
        """
        ids = self._store.add(schedules, on_conflict)
        _log("schedules_added", count=len(ids))
        return ids

    def update_schedule(
        self,
        schedule_id: str,
        *,
        changed_by: str | None = None,
        if_revision: str | None = None,
        **changes: Any,
    ) -> bool:
        """Change the given fields, and no others; False if there is no such schedule.

        Fields: those of add_schedule, `is_active`, and `next_run` (a moment to come). A new rule,
        zone or limit plans anew from now. `changed_by` is kept in the history of its changes.
        Raises as add_schedule, InvalidSchedule for an unknown field, and StaleVersion if the
        schedule has another revision than `if_revision`.
        """
        updated = self._store.update(schedule_id, changes, check_change(changed_by), if_revision)
        _log("schedule_updated", schedule=schedule_id, fields=sorted(changes), found=updated)
        return updated

    def remove_schedule(self, schedule_id: str, *, if_revision: str | None = None) -> bool:
        """Forget a schedule; False if there is none. Tasks that it has fired stay.

        Raises StaleVersion if the schedule has another revision than `if_revision`.
        """
        removed = self._store.remove(schedule_id, if_revision)
        _log("schedule_removed", schedule=schedule_id, found=removed)
        return removed

    def get_schedule(self, schedule_id: str) -> ScheduledTask | None:
        """A schedule as it stands, or None. Raises BrokenRecord if it cannot be read."""
        return self._store.get(schedule_id)

    def list_schedules(
        self,
        user_id: str | None = None,
        is_active: bool | None = None,
        limit: int = 100,
        cursor: str | None = None,
        *,
        name_prefix: str | None = None,
        contains: str | None = None,
        tenant: str | None = None,
    ) -> Page[ScheduledTask]:
        """A page of schedules, ordered by user and id; pass its `cursor` to get the next one.

        `name_prefix` is how the name of their tasks begins; `contains` is a part of that name, of
        the id or of the title, in upper or lower case. With one of these they are ordered by name
        and id, or, with `contains` and a user, by id; those of a `tenant` always by user and id. A
        page may be short although there is a cursor: one call looks at 10,000 at most. Raises
        InvalidSchedule for a bad value.
        """
        if name_prefix is None and contains is None and tenant is None:
            return self._store.page(user_id, is_active, limit, cursor)
        wanted = Filter(
            user_id=user_id,
            is_active=is_active,
            name_prefix=name_prefix,
            contains=contains,
            tenant=tenant,
        )
        return search(self._link, self._store, wanted, limit, cursor)

    def pause_schedule(
        self,
        schedule_id: str,
        *,
        note: str | None = None,
        by: str | None = None,
        until: datetime | float | None = None,
    ) -> bool:
        """Fire no more until it is resumed, or until a moment; False if there is none.

        The moments that pass meanwhile are noted as paused. Raises InvalidSchedule for a bad value.
        """
        change = check_change(by, note, until, self._link.now_ms())
        paused = self._store.update(schedule_id, {"is_active": False}, change)
        _log("schedule_paused", schedule=schedule_id, found=paused)
        return paused

    def resume_schedule(
        self, schedule_id: str, *, note: str | None = None, by: str | None = None
    ) -> bool:
        """Let a schedule that was paused or disabled go on, from now; False if there is none."""
        resumed = self._store.update(schedule_id, {"is_active": True}, check_change(by, note))
        _log("schedule_resumed", schedule=schedule_id, found=resumed)
        return resumed

    def tenant_of(self, user_id: str) -> str | None:
        """The tenant that a user belongs to, or None; see TaskQueue.tenant_of."""
        return self.queue.tenant_of(user_id)

    def problems(self) -> list[Problem]:
        """The schedules that had to be set aside, and why: unreadable records, broken crons."""
        return self._store.problems()

    def trigger(
        self,
        schedule_id: str,
        *,
        triggered_by: str | None = None,
        payload: dict[str, Any] | None = None,
    ) -> str:
        """One run now, whatever the plan and its overlap; the plan is left as it is. The task's id.

        `triggered_by` says who asked for it, for the history; `payload` is for this run only.
        Raises UnknownSchedule, BrokenRecord, and as TaskQueue.push does.
        """
        if triggered_by is not None:
            check_name(triggered_by, "triggered_by")
        schedule = self._store.get(schedule_id)
        if schedule is None:
            raise UnknownSchedule(f"there is no schedule {schedule_id!r} to trigger")
        if payload is not None:
            self._outgoing.check(schedule.name, check_payload(payload))
        payload = schedule.payload if payload is None else payload
        policy = policy_of(asdict(schedule))
        task = Task(
            task_id=new_id(),
            user_id=schedule.user_id,
            priority=schedule.priority,
            payload=payload,
            name=schedule.name,
            schedule_id=schedule_id,
            run_type="manual",
            triggered_by=triggered_by,
            policy=policy,
            tenant=schedule.tenant,
            document=task_document(
                schedule.user_id,
                schedule.name,
                schedule.priority,
                encode_payload(payload),
                schedule_id,
                origin={"by": triggered_by, "tenant": schedule.tenant},
                policy=encode_policy(policy),
            ),
        )
        task_id = self.queue.push(task)
        _log("schedule_triggered", schedule=schedule_id, task=task_id, user=schedule.user_id)
        return task_id

    # --- what became of moments -------------------------------------------------------------------

    def moments(
        self,
        schedule_id: str,
        start: datetime | float,
        end: datetime | float,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[Moment]:
        """Each moment from `start` until before `end`, and what became of it; see Moment.

        At most 1,000 on a page; pass its `cursor` to get the next one. Raises UnknownSchedule, and
        InvalidSchedule for a bad value.
        """
        return list_moments(self._link, self._store, schedule_id, start, end, limit, cursor)

    def backfill(
        self,
        schedule_id: str,
        start: datetime | float,
        end: datetime | float,
        *,
        dry_run: bool = False,
        limit: int = 1000,
        priority: int = Priority.VERY_LOW,
        by: str | None = None,
        unknown_too: bool = False,
    ) -> Backfill:
        """Push a task for each past moment in a range that has none; `dry_run` counts them.

        Those are the skipped ones, and those before the schedule was made. Of a moment that is
        "unknown" (see Moment) nobody knows whether it was fired: it is left alone, unless
        `unknown_too`. The same call twice makes the same tasks once, also when those of the first
        time are long gone. `by` is kept with each task.
        Raises UnknownSchedule; InvalidSchedule for a bad value, for more than `limit` moments (at
        most 10,000), and for a schedule with overlap "cancel_previous"; QueueFull when no more fit,
        and ScheduleConflict when others keep changing it: then the call may be repeated.
        """
        request = Request.create(schedule_id, start, end, limit, priority, by, unknown_too)
        report = backfill(self._link, self._store, request, dry_run)
        if not dry_run:
            _log("schedule_backfilled", schedule=schedule_id, filled=report.filled, by=by)
        return report

    def changes(
        self, schedule_id: str, limit: int = 20, cursor: str | None = None
    ) -> Page[ScheduleChange]:
        """Who changed what of a schedule, newest first; the last fifty are kept.

        Raises UnknownSchedule, InvalidSchedule for a bad value.
        """
        return list_changes(self._link, self._store, schedule_id, limit, cursor)

    # --- many schedules ---------------------------------------------------------------------------

    def bulk(
        self,
        action: str,
        *,
        user_id: str | None = None,
        name: str | None = None,
        name_prefix: str | None = None,
        contains: str | None = None,
        is_active: bool | None = None,
        tenant: str | None = None,
        ids: Sequence[str] | None = None,
        dry_run: bool = True,
        by: str | None = None,
        note: str | None = None,
        progress: Callable[[int, int], object] | None = None,
        **changes: Any,
    ) -> BulkResult:
        """Pause, resume, remove, update or trigger all schedules that match; by default only count.

        They are those of a user or a tenant, with tasks of a name, active or not (see
        list_schedules); without any of these, all. With `ids`, only those of them that also match:
        one that is gone or cannot be read does not. `changes` are for update; `by` and `note` as in
        pause_schedule. One that fails does not stop the others: the result has counts and errors.
        `progress` is called with how many are done, and of how many; what it raises ends the
        operation. Raises InvalidSchedule for bad input, before anything is done.
        """
        check_action(action, changes)
        check_change(by, note)
        wanted = Filter(
            user_id=user_id,
            name=name,
            name_prefix=name_prefix,
            contains=contains,
            is_active=is_active,
            tenant=tenant,
        )
        if ids is None:
            pages = walk_ids(self._link, self._store, wanted)
            matching = [each for page in pages for each in page]
        else:
            matching = select_ids(self._store, wanted, ids)
        result = BulkResult(action=action, dry_run=dry_run, matched=len(matching))
        if dry_run:
            return result
        change = check_change(by, note)
        acts: dict[str, Callable[[str], object]] = {
            "pause": lambda each: self._store.update(each, {"is_active": False}, change),
            "resume": lambda each: self._store.update(each, {"is_active": True}, change),
            "remove": self._store.remove,
            "update": lambda each: self._store.update(each, changes, change),
            "trigger": lambda each: self.trigger(each, triggered_by=by),
        }
        run_bulk(result, matching, acts[action], progress)
        _log("schedules_changed", action=action, done=result.done, failed=result.failed, by=by)
        return result

    def copy_schedule(self, schedule_id: str, new_id: str | None = None, **changes: Any) -> str:
        """Store a schedule like another, with some fields changed; its id. It is active.

        Raises UnknownSchedule, BrokenRecord, and as add_schedule.
        """
        original = read_stored(self._store, schedule_id)
        copied = self._store.add([copy_spec(original, new_id, changes)], "error")[0]
        _log("schedule_copied", schedule=copied, original=schedule_id)
        return copied

    def export_schedules(
        self,
        user_id: str | None = None,
        name: str | None = None,
        is_active: bool | None = None,
        *,
        tenant: str | None = None,
    ) -> list[dict[str, Any]]:
        """Schedules as documents that `import_schedules` takes; see `fairqueue.schedules`."""
        wanted = Filter(user_id=user_id, name=name, is_active=is_active, tenant=tenant)
        return export(self._link, self._store, wanted)

    def import_schedules(
        self,
        documents: Iterable[Mapping[str, Any]],
        *,
        prune: bool = False,
        user_id: str | None = None,
        tenant: str | None = None,
        dry_run: bool = True,
        by: str | None = None,
    ) -> Diff:
        """Make what is stored as the documents say; by default only tell the difference.

        Each has a `schedule_id` and otherwise what add_schedule takes. What a document does not
        name gets its default, but `is_active` stays. `prune` removes the schedules that no document
        names: all of them, or those of `user_id` and of `tenant`. The same import again changes
        nothing.
        Raises InvalidSchedule, which names each bad document by its index and its field, before
        anything is stored.
        """
        diff = import_documents(
            self._link,
            self._store,
            documents,
            prune=Filter(user_id=user_id, tenant=tenant) if prune else None,
            dry_run=dry_run,
            change=check_change(by),
        )
        if not dry_run:
            counts = {"added": len(diff.added), "removed": len(diff.removed)}
            _log("schedules_imported", **counts, updated=len(diff.changed), by=by)
        return diff

    def replan(self) -> Replanned:
        """Compute the next runs of all active schedules again: after an update of zone data.

        A leader does so by itself, after it has started, when the queue was last planned by other
        zone data. Only moments to come move, and none that a user has set.
        """
        replanner = Replanner(self._link, self._store)
        while replanner.step():
            pass
        _log("schedules_replanned", **asdict(replanner.report))
        return replanner.report

    # --- one pass ---------------------------------------------------------------------------------

    def tick(self, now: datetime | float | None = None) -> TickReport:
        """One pass: lead if possible, fire all that is due, say how long there is nothing to do.

        `now` is for tests; without it the server's clock decides. Raises RedisUnavailable and
        RedisRefused; whatever was not fired is fired by the next pass.
        """
        now_ms = None if now is None else to_ms(now, "now")
        started = time.monotonic()
        labels = self.queue.name
        with self._tick_lock:
            try:
                report = self._pass(now_ms)
            except FairQueueError as error:
                self._leadership.doubt()
                self._count_failure(error)
                if isinstance(error, RedisUnavailable):
                    self._alerts.redis_failed()
                raise
        self._alerts.redis_ok()
        self._last_cycle = time.time()
        self._last_error = None
        metrics = self._metrics
        metrics.cycles.labels(labels).inc()
        metrics.cycle_seconds.labels(labels).observe(time.monotonic() - started)
        metrics.last_cycle.labels(labels, self.scheduler_id).set(self._last_cycle)
        metrics.redis_up.labels(labels, self.scheduler_id).set(1)
        metrics.is_leader.labels(labels, self.scheduler_id).set(report.is_leader)
        return report

    def _pass(self, now_ms: int | None) -> TickReport:
        report = TickReport()
        for _ in range(ROUNDS):
            reading = self._read(now_ms)
            report.is_leader = reading.is_leader
            if not reading.is_leader:
                report.wait = (reading.ends_ms - reading.now_ms) / 1000
                break
            if reading.due and not self._handle(reading, report, now_ms):
                report.is_leader = False
                break
            if reading.next_ms is None:
                report.wait = self.check_interval
            else:
                elapsed = time.monotonic() - reading.read_at
                report.wait = max(0.0, (reading.next_ms - reading.now_ms) / 1000 - elapsed)
            # Not before nothing is due: what was fired has a new moment, which may be the next one.
            if not reading.due or self._stopping.is_set():
                break
        else:
            report.wait = 0.0  # there may be more
        if report.is_leader:
            self._look_over(reading.now_ms, now_ms)
        return report

    def _look_over(self, at_ms: int, now_ms: int | None) -> None:
        """End runs that do not answer, compare the queue with the alerts' limits, sample it."""
        if self._looked_ms is not None and abs(at_ms - self._looked_ms) < LOOK_OVER_MS:
            return
        self._looked_ms = at_ms
        can_alert = self._alerts.has_recipients
        notices = WorkerStore(self._link).look_over(now_ms, can_alert=can_alert, heard=self._heard)
        for notice in notices:
            report(notice, self._alerts)
        self._heard = [notice.text for notice in notices] if can_alert else []
        if can_alert:
            self._alerts.watch(self.queue.inspect())
        try:
            SampleStore(self._link).take(now_ms)
        except FairQueueError as error:  # schedules are fired whether or not there are charts
            self._count_failure(error)
            _log("sample_failed", logging.WARNING, queue=self.queue.name, error=str(error))

    def _read(self, now_ms: int | None) -> Reading:
        reading = self._leadership.lead(READ_LIMIT, now_ms)
        if reading.elected:
            self._count_lock("acquired")
            _log("lock_acquired", **self._who(), epoch=reading.epoch)
            self._replanner = Replanner(self._link, self._store)
        elif not reading.is_leader:
            self._count_lock("contended")
            left_ms = reading.ends_ms - reading.now_ms
            _log("lock_contended", logging.DEBUG, **self._who(), term_left_ms=left_ms)
        if reading.lost:
            self._lost_lock()
        return reading

    def _handle(self, reading: Reading, report: TickReport, now_ms: int | None) -> bool:
        """Fire what is due; False if somebody else leads."""
        self._metrics.processed.labels(self.queue.name).inc(len(reading.due))
        unusable: list[tuple[DueSchedule, str, str]] = []
        paused = [due for due in reading.due if due.plan.endswith(b" -")]
        planned = [due for due in reading.due if not due.plan.endswith(b" -")]
        sent: deque[list[_Fire]] = deque()

        def calls() -> Iterator[dict[str, Any]]:
            # Planned while the server works on the batch before.
            for batch in in_batches(planned, FIRE_CHUNK, _weight):
                fires = self._plan_all(batch, reading.now_ms, unusable)
                if fires:
                    sent.append(fires)
                    yield {
                        "op": new_id(),
                        "token": self._leadership.token,
                        "term_ms": self._leadership.term_ms,
                        "now_ms": now_ms,
                        "rest": [field for fire in fires for field in fire.row],
                    }

        with closing(self._link.run_each("fire", calls())) as answers:
            for words in answers:
                if words[0] == b"stale":
                    self._lost_lock()
                    self._leadership.lose()
                    return False
                clock_ms = reading.now_ms
                if now_ms is None and self._link.clock is None:
                    clock_ms += int((time.monotonic() - reading.read_at) * 1000)
                self._count_fires(sent.popleft(), words[1:], clock_ms, report)
        # After the fires, each a round trip: they must not wait for these.
        for due in paused:
            self._resume_or_note(due, reading.now_ms, now_ms, unusable)
        for due, kind, reason in unusable:
            self._set_aside(due, kind, reason, report, now_ms)
        return True

    def _plan_all(
        self, dues: Sequence[DueSchedule], now_ms: int, unusable: list[tuple[DueSchedule, str, str]]
    ) -> list[_Fire]:
        """What is to be fired; what cannot be planned goes to `unusable`, with kind and reason."""
        fires: list[_Fire] = []
        for due in dues:
            try:
                fires.append(self._plan(due, now_ms))
            except Exception as error:  # one schedule must never stop the others
                unusable.append((due, *_what_is_wrong(due, error)))
        return fires

    def _resume_or_note(
        self,
        due: DueSchedule,
        at_ms: int,
        now_ms: int | None,
        unusable: list[tuple[DueSchedule, str, str]],
    ) -> None:
        try:
            self._resume(due, at_ms, now_ms)
        except (RedisUnavailable, RedisRefused):
            raise
        except Exception as error:
            unusable.append((due, *_what_is_wrong(due, error)))

    def _resume(self, due: DueSchedule, at_ms: int, now_ms: int | None) -> None:
        """A schedule that was paused until now goes on, or has had its last moment meanwhile."""
        definition = _definition(due)
        rules = definition.rules
        next_ms = rules.recurrence.next_ms(at_ms)
        reason, completed = ("", "") if next_ms is not None else _end_of(definition)
        if next_ms is None and not completed:
            raise InvalidCron(reason)
        word = self._link.run(
            "resume",
            op=new_id(),
            token=self._leadership.token,
            now_ms=now_ms,
            id=due.member,
            plan=due.plan,
            next_ms="" if next_ms is None else next_ms,
            due_ms="" if next_ms is None else due_ms(rules, next_ms),
            noted=self._store.paused_moments(definition, at_ms),
            reason=reason,
        )
        if word == b"resumed":
            _log("schedule_resumed", schedule=due.schedule_id)

    def _plan(self, due: DueSchedule, now_ms: int) -> _Fire:
        """What is to be fired now for a schedule, and when it comes next. Pure but for caches."""
        definition = _definition(due)
        rules = definition.rules
        step = plan(rules, _nominal(due, now_ms), now_ms)
        reason, completed = ("", "") if step.next_ms is not None else _end_of(definition)
        row = load_script("fire").row(
            id=due.schedule_id,
            plan=due.plan,
            moment="" if step.moment_ms is None else step.moment_ms,
            next_ms="" if step.next_ms is None else step.next_ms,
            due_ms="" if step.due_ms is None else step.due_ms,
            missed=step.missed,
            note=step.note,
            user=definition.user_id,
            name=definition.name,
            document="" if step.moment_ms is None else definition.document(step.moment_ms),
            head=definition.status_head,
            level=int(definition.priority),
            overlap=definition.overlap,
            max_runs=definition.rare["max_runs"] or "",
            reason=reason,
            completed=completed,
        )
        acted_ms = now_ms if step.moment_ms is None else due_ms(rules, step.moment_ms)
        is_last = step.next_ms is None and not completed
        return _Fire(
            due=due,
            due_ms=acted_ms,
            missed=step.missed,
            is_last=is_last,
            user_id=definition.user_id,
            moment_ms=step.moment_ms,
            row=row,
        )

    def _count_fires(
        self, fires: list[_Fire], words: list[bytes], clock_ms: int, report: TickReport
    ) -> None:
        labels, metrics = self.queue.name, self._metrics
        fired = missed = stopped = latest_ms = 0
        lateness = metrics.lateness_seconds.labels(labels)
        debug = logger.isEnabledFor(logging.DEBUG)
        for fire, word in zip(fires, words, strict=True):
            if fire.is_last and word in (b"fired", b"skipped", b"passed", b"past"):
                self._alerts.schedule_set_aside(fire.due.schedule_id, "it has no next moment")
            if word == b"fired":
                fired += 1
                missed += fire.missed
                stopped += fire.is_last
                late_ms = max(0, clock_ms - fire.due_ms)
                lateness.observe(late_ms / 1000)
                latest_ms = max(latest_ms, late_ms)
                if debug:
                    _log("schedule_fired", logging.DEBUG, **fire.said(), late_ms=late_ms)
            elif word == b"passed":
                missed += fire.missed
                stopped += fire.is_last
            elif word == b"past":  # what was missed before it was counted then
                stopped += fire.is_last
            elif word == b"skipped":
                report.skipped += 1
                missed += fire.missed
                stopped += fire.is_last
                _log("fire_skipped", **fire.said(), reason="overlap")
            elif word == b"refused":
                report.refused += 1
                _log("fire_refused", logging.WARNING, **fire.said(), reason="queue limit")
            else:  # or "later": it is still due, and the next round of the pass goes on with it
                report.moved += word == b"moved"
        if fired:
            self._alerts.late(latest_ms / 1000)
        report.fired += fired
        report.missed += missed
        report.set_aside += stopped
        refused = words.count(b"refused")
        metrics.pushes.labels(labels, "ok").inc(fired)
        metrics.pushes.labels(labels, "failed").inc(refused)
        metrics.errors.labels(labels, "push").inc(refused)
        metrics.errors.labels(labels, "cron").inc(stopped)
        metrics.missed.labels(labels).inc(missed)

    def _set_aside(
        self, due: DueSchedule, kind: str, reason: str, report: TickReport, now_ms: int | None
    ) -> None:
        word = self._link.run(
            "set_aside",
            op=new_id(),
            token=self._leadership.token,
            now_ms=now_ms,
            id=due.member,
            definition=due.definition,
            plan=due.plan,
            kind=kind,
            reason=reason[:1000].encode(errors="backslashreplace"),
        )
        if word == b"set_aside":
            report.set_aside += 1
            error_type = "cron" if kind == "cron" else "deserialization"
            self._metrics.errors.labels(self.queue.name, error_type).inc()
            _log("schedule_set_aside", logging.ERROR, schedule=due.schedule_id, reason=reason)
            self._alerts.schedule_set_aside(due.schedule_id, reason, broken=kind == "broken")

    # --- the thread -------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """stopped, starting, running, stopping, or error (Redis fails; it comes back by itself)."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return STOPPED
        return self._state

    @property
    def is_leader(self) -> bool:
        """True while this scheduler's term is safely its own."""
        return self._leadership.is_leader

    def start(self) -> None:
        """Start the thread; nothing happens if it runs already.

        Raises FairQueueError while one is still ending that `stop` did not wait for.
        """
        with self._life_lock:
            if self._thread is not None and self._thread.is_alive():
                if self._stopping.is_set():
                    raise FairQueueError(
                        "the scheduler is still stopping: call stop() until it returns True"
                    )
                return
            self._stopping.clear()
            self._state = STARTING
            self._listener = self._link.listener("scheduler_wake")
            self._up_since = time.time()
            self._metrics.started.labels(self.queue.name, self.scheduler_id).set(self._up_since)
            self._thread = threading.Thread(
                target=self._run, name=f"fairqueue-scheduler-{self.queue.name}", daemon=True
            )
            self._thread.start()
        _log("scheduler_started", **self._who())

    def stop(self, timeout: float = 10.0) -> bool:
        """Finish the pass, give up leadership and end; True when it ended within `timeout` seconds.

        One that has not ended in time ends by itself as soon as it can.
        """
        check_seconds(timeout, "timeout", ConfigurationError)
        with self._life_lock:
            thread = self._thread
            if thread is None or not thread.is_alive():
                if self._state == STARTING:  # by whom this has interrupted
                    self._stopping.set()
                if self.is_leader:
                    self._resign(timeout)
                return True
            self._state = STOPPING
            self._stopping.set()
            if self._listener is not None:
                self._listener.interrupt()
            thread.join(timeout)
            ended = not thread.is_alive()
        level = logging.INFO if ended else logging.WARNING
        _log("scheduler_stopped", level, **self._who(), in_time=ended)
        return ended

    def _run(self) -> None:
        listener = self._listener
        assert listener is not None  # noqa: S101 - made by start()
        backoff = FIRST_BACKOFF_S
        try:
            while not self._stopping.is_set():
                try:
                    report = self.tick()
                    self._enter(RUNNING)
                    if report.is_leader and self._replan_some():
                        report.wait = min(report.wait, REPLAN_PAUSE_S)
                    self._rest(listener, report)
                    backoff = FIRST_BACKOFF_S
                except Exception as error:
                    self._enter(ERROR)
                    self._note_failure(error)
                    listener.forget()
                    self._stopping.wait(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                    backoff = min(2 * backoff, LONGEST_BACKOFF_S)
        finally:
            self._resign(min(self.queue.link.timeout, 1.0))
            listener.close()
            self._metrics.started.labels(self.queue.name, self.scheduler_id).set(0)

    def _replan_some(self) -> bool:
        """Plan anew what other zone data has planned, a little at a time; True if there is more."""
        replanner = self._replanner
        if replanner is None:
            return False
        started = time.monotonic()
        while replanner.is_begun or replanner.is_needed():
            if not replanner.step():
                _log("schedules_replanned", **asdict(replanner.report))
                break
            if time.monotonic() - started > REPLAN_S:
                return True
        self._replanner = None
        return False

    def _enter(self, state: str) -> None:
        if not self._stopping.is_set():
            self._state = state

    def _rest(self, listener: Listener, report: TickReport) -> None:
        """Wait for the next moment, a wake-up or the end; never longer than check_interval."""
        seconds = min(report.wait, self.check_interval)
        if report.is_leader:
            listener.wait(min(seconds, RENEW_PART * self.lock_timeout))
        else:
            # Tokens are for the leader.
            listener.forget()
            self._stopping.wait(max(seconds, 0.001))

    def _resign(self, timeout: float) -> None:
        self._metrics.is_leader.labels(self.queue.name, self.scheduler_id).set(0)
        try:
            if self._leadership.resign(timeout):
                _log("lock_released", **self._who())
        except FairQueueError as error:
            # The term ends by itself.
            _log("resign_failed", logging.WARNING, **self._who(), error=str(error))

    def _note_failure(self, error: Exception) -> None:
        self._leadership.doubt()
        self._last_error = error_text(error)
        if isinstance(error, FairQueueError):
            _log("cycle_failed", logging.WARNING, **self._who(), error=str(error))
        elif isinstance(error, redis.RedisError | OSError):
            self._count_failure(RedisUnavailable(str(error)))
            _log("wait_failed", logging.WARNING, **self._who(), error=str(error))
        else:
            self._metrics.errors.labels(self.queue.name, "internal").inc()
            told = error_line(error)
            _log("cycle_failed", logging.ERROR, exc_info=True, **self._who(), error=told)

    def _who(self) -> dict[str, Any]:
        """Which scheduler a log event is about."""
        return {"scheduler": self.scheduler_id, "queue": self.queue.name}

    # --- counting ---------------------------------------------------------------------------------

    def _count_lock(self, outcome: str) -> None:
        self._metrics.lock.labels(self.queue.name, outcome).inc()

    def _lost_lock(self) -> None:
        self._count_lock("lost")
        self._metrics.is_leader.labels(self.queue.name, self.scheduler_id).set(0)
        _log("lock_lost", logging.WARNING, **self._who())
        self._alerts.lock_failed()

    def _count_failure(self, error: FairQueueError) -> None:
        labels = self.queue.name
        self._metrics.is_leader.labels(labels, self.scheduler_id).set(0)
        if isinstance(error, RedisUnavailable):
            self._metrics.redis_up.labels(labels, self.scheduler_id).set(0)
            self._metrics.errors.labels(labels, "redis").inc()
            if isinstance(error.__cause__, redis.TimeoutError):
                self._metrics.errors.labels(labels, "lock_timeout").inc()
        elif isinstance(error, RedisRefused):
            full = isinstance(error.__cause__, redis.exceptions.OutOfMemoryError)
            kind = "push" if full else "redis"
            self._metrics.errors.labels(labels, kind).inc()

    # --- health -----------------------------------------------------------------------------------

    def health(self) -> Health:
        """How this scheduler is, with one short question to Redis."""
        leader, lag, redis_up, problem = None, None, True, self._last_error
        try:
            snapshot = self.queue.inspect(timeout=CHECK_TIMEOUT_S)
            lag = snapshot.overdue
            if snapshot.leader_until is not None and snapshot.leader_until > snapshot.at:
                leader = snapshot.leader
        except FairQueueError as error:
            redis_up, problem = not isinstance(error, RedisUnavailable), str(error)
        running = self.state != STOPPED
        return Health(
            state=self.state,
            up_since=_moment(self._up_since) if running else None,
            last_good_cycle=_moment(self._last_cycle),
            redis_up=redis_up,
            is_leader=self.is_leader,
            leader=leader,
            lag=lag,
            last_error=problem,
        )


def _weight(due: DueSchedule) -> int:
    """What a fire counts for in a batch: its bytes, or more if it may have to cancel others."""
    least = BATCH_BYTES // CANCEL_CHUNK if b'"cancel_previous"' in due.definition else 0
    return max(len(due.definition), least)


def _definition(due: DueSchedule) -> Definition:
    try:
        due.member.decode()
    except UnicodeDecodeError:
        raise BrokenRecord(f"schedule id {due.member!r} is no text") from None
    if not due.definition:
        raise BrokenRecord(f"schedule {due.schedule_id!r} is due but has no definition")
    return read_definition(due.schedule_id, due.definition)


def _what_is_wrong(due: DueSchedule, error: Exception) -> tuple[str, str]:
    """Why a schedule cannot be planned: the kind and the reason with which it is set aside."""
    if isinstance(error, BrokenRecord):
        return "broken", str(error)
    if isinstance(error, InvalidSchedule):
        return "cron", str(error)
    told = error_line(error)
    _log("plan_failed", logging.ERROR, exc_info=error, schedule=due.schedule_id, error=told)
    return "cron", f"the next moment cannot be computed: {told}"


def _end_of(definition: Definition) -> tuple[str, str]:
    """Why there is no next moment, and 'completed' if that is as it should be."""
    reason = f"{definition.words} has no next moment"
    if definition.rare["cron_expr"] is not None and definition.rare["end"] is None:
        return reason, ""
    return f"completed: {reason}", "completed"


def _nominal(due: DueSchedule, now_ms: int) -> int:
    nominal = due.plan.partition(b" ")[2]
    if not nominal.isdigit() or int(nominal) > now_ms:
        raise BrokenRecord(f"schedule {due.schedule_id!r} is due but its plan is {due.plan!r}")
    return int(nominal)


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else from_ms(round(seconds * 1000))


# Weak: a scheduler that nobody uses any more is not kept for this.
_schedulers: "weakref.WeakSet[TaskScheduler]" = weakref.WeakSet()


def _begin_in_child() -> None:
    for scheduler in list(_schedulers):
        scheduler._begin_life()


os.register_at_fork(after_in_child=_begin_in_child)
