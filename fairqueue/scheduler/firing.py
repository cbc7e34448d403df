"""Fire what is due: plan each schedule, send the fires in batches, count how they went."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fairqueue.alerts import Alerts
from fairqueue.errors import (
    BrokenRecord,
    InvalidCron,
    InvalidSchedule,
    RedisRefused,
    RedisUnavailable,
)
from fairqueue.link.driver import BATCH_BYTES, in_batches
from fairqueue.link.operation import Argument, Call, Each, Operation, operation
from fairqueue.link.partitions import partition_of
from fairqueue.link.scripts import load_script
from fairqueue.logs import error_line, event_logger, whose
from fairqueue.metrics.collectors import SchedulerMetrics
from fairqueue.models import new_id
from fairqueue.queue.waiting_room import make_room
from fairqueue.scheduler.leadership import DueSchedule, Leadership, Reading
from fairqueue.schedules.definition import Definition, read_definition
from fairqueue.schedules.places import settle_from
from fairqueue.schedules.planning import due_ms, plan
from fairqueue.schedules.store import ScheduleStore

logger = logging.getLogger("fairqueue.scheduler")
_log = event_logger("fairqueue.scheduler")

_SKIPPED = {b"skipped": "overlap", b"duplicate": "duplicate"}  # word of a fire -> reason

FIRE_CHUNK = 80  # fires in one script: about 2 ms of server time, 7 with unfinished runs
CANCEL_CHUNK = 12  # the same for schedules that cancel their unfinished runs


@dataclass(slots=True, kw_only=True)
class TickReport:
    """What one pass did.

    `fired`, `skipped` (by the overlap policy), `duplicates` (another task had the unique key),
    `missed`, `refused` (by a limit; tried again later), `moved` (changed by others since it was
    read) and `set_aside` (cannot run) are counts of schedules or fire times. `wait` is for how many
    seconds there is nothing to do.
    """

    is_leader: bool = False
    fired: int = 0
    skipped: int = 0
    duplicates: int = 0
    missed: int = 0
    refused: int = 0
    moved: int = 0
    set_aside: int = 0
    wait: float = 0.0


@dataclass(slots=True)
class Fire:
    """One fire that is to be sent; `moment_ms` is None if only the plan moves on."""

    due: DueSchedule
    due_ms: int
    missed: int
    is_last: bool
    user_id: str
    tenant: str | None
    moment_ms: int | None
    row: Sequence[Argument]

    def log_fields(self) -> dict[str, Any]:
        """Return what a log event says about it."""
        schedule_id = self.due.schedule_id
        task_id = None if self.moment_ms is None else f"{schedule_id}:{self.moment_ms}"
        return {"schedule": schedule_id, "task": task_id, **whose(self.user_id, self.tenant)}


# A schedule that cannot be planned, with the kind and the reason with which it is disabled.
Unusable = tuple[DueSchedule, str, str]


class Firing:
    """Fires what is due, for the leader of a partition."""

    def __init__(
        self,
        store: ScheduleStore,
        whole: ScheduleStore,
        leadership: Leadership,
        metrics: SchedulerMetrics,
        alerts: Alerts,
        queue_name: str,
    ) -> None:
        """`store` has the schedules of a partition, `whole` those of the queue."""
        self.link = store.link
        self._store = store
        self._whole = whole
        self._leadership = leadership
        self._metrics = metrics
        self._alerts = alerts
        self._queue_name = queue_name

    @operation
    def fire(self, reading: Reading, report: TickReport, now_ms: int | None) -> Operation[bool]:
        """Fire what is due; return False if another scheduler leads."""
        self._metrics.processed.labels(self._queue_name).inc(len(reading.due))
        unusable: list[Unusable] = []
        strays = self._strays(reading.due)
        here = [due for due in reading.due if due not in strays] if strays else reading.due
        planned = [due for due in here if not due.plan.is_pause]
        refused = report.refused
        if not (yield from self._send(planned, reading, report, now_ms, unusable)):
            return False
        # After the fires, which must not wait for these: each is a round trip.
        for due in [due for due in here if due.plan.is_pause]:
            yield from self._resume(due, reading.now_ms, now_ms, unusable)
        for due, kind, reason in unusable:
            yield from self._set_aside(due, kind, reason, report, now_ms)
        for due in strays:
            yield from settle_from(self._whole, self.link, due.schedule_id)
        if report.refused > refused:  # they are tried again
            yield from make_room(self.link, report.refused - refused)
        return True

    def _send(
        self,
        planned: Sequence[DueSchedule],
        reading: Reading,
        report: TickReport,
        now_ms: int | None,
        unusable: list[Unusable],
    ) -> Operation[bool]:
        """Plan and send the fires; return False if another scheduler leads."""
        sent: deque[list[Fire]] = deque()
        leads = True

        def calls() -> Iterator[Call]:
            # Planned while the server works on the batch before.
            for batch in in_batches(planned, FIRE_CHUNK, _weight):
                if fires := _plan_all(batch, reading.now_ms, unusable):
                    sent.append(fires)
                    yield Call(
                        "fire",
                        op=new_id(),
                        token=self._leadership.token,
                        term_ms=self._leadership.term_ms,
                        now_ms=now_ms,
                        rest=[field for fire in fires for field in fire.row],
                    )

        def read(words: list[bytes]) -> bool:
            nonlocal leads
            if words[0] == b"stale":
                leads = False
                return False
            clock_ms = reading.now_ms
            if now_ms is None and self.link.clock is None:
                clock_ms += int((time.monotonic() - reading.read_at) * 1000)
            self._count(sent.popleft(), words[1:], clock_ms, report)
            return True

        if self._whole.link.parts:
            # One by one, so that they go together with those of other partitions.
            for call in calls():
                if not read((yield call)):
                    break
        else:
            yield Each(calls(), read)
        return leads

    def _strays(self, dues: Sequence[DueSchedule]) -> list[DueSchedule]:
        """Those that belong to another partition: a change of their group was interrupted."""
        parts, strays = self._whole.link.parts, []
        for due in dues if parts else ():
            try:
                definition = _definition(due)
            except BrokenRecord:
                continue  # it is set aside
            tenant = definition.options["tenant"]
            if partition_of(definition.user_id, tenant, len(parts)) != self.link.keys.partition:
                strays.append(due)
        return strays

    def _resume(
        self, due: DueSchedule, at_ms: int, now_ms: int | None, unusable: list[Unusable]
    ) -> Operation[None]:
        """Resume a schedule that was paused until now, or end it if it has no fire time left."""
        try:
            definition = _definition(due)
            rules = definition.rules
            next_ms = rules.recurrence.next_ms(at_ms)
            reason, completed = ("", "") if next_ms is not None else _end_of(definition)
            if next_ms is None and not completed:
                raise InvalidCron(reason)
            word = yield Call(
                "resume",
                op=new_id(),
                token=self._leadership.token,
                now_ms=now_ms,
                id=due.member,
                plan=due.plan.text,
                next_ms="" if next_ms is None else next_ms,
                due_ms="" if next_ms is None else due_ms(rules, next_ms),
                noted=(yield from self._store.paused_note(definition, at_ms)),
                reason=reason,
            )
        except (RedisUnavailable, RedisRefused):
            raise
        except Exception as error:
            unusable.append(_unusable(due, error))
        else:
            if word == b"resumed":
                _log("schedule_resumed", schedule=due.schedule_id)

    def _count(
        self, fires: Sequence[Fire], words: Sequence[bytes], clock_ms: int, report: TickReport
    ) -> None:
        queue, metrics = self._queue_name, self._metrics
        fired = missed = stopped = latest_ms = 0
        lateness = metrics.lateness_seconds.labels(queue)
        debug = logger.isEnabledFor(logging.DEBUG)
        for fire, word in zip(fires, words, strict=True):
            if word in (b"fired", b"skipped", b"duplicate", b"passed", b"past"):
                stopped += fire.is_last
                missed += fire.missed if word != b"past" else 0  # those were counted before
                if fire.is_last:
                    reason = "it has no next fire time"
                    self._alerts.schedule_set_aside(fire.due.schedule_id, reason)
            if word == b"fired":
                fired += 1
                late_ms = max(0, clock_ms - fire.due_ms)
                lateness.observe(late_ms / 1000)
                latest_ms = max(latest_ms, late_ms)
                if debug:
                    _log("schedule_fired", logging.DEBUG, **fire.log_fields(), late_ms=late_ms)
            elif word in _SKIPPED:
                _log("fire_skipped", **fire.log_fields(), reason=_SKIPPED[word])
            elif word == b"refused":
                _log("fire_refused", logging.WARNING, **fire.log_fields(), reason="queue limit")
        if fired:
            self._alerts.late(latest_ms / 1000)
        report.fired += fired
        report.missed += missed
        report.set_aside += stopped
        # Others, such as "later", are still due in the next round.
        report.skipped += words.count(b"skipped")
        report.duplicates += words.count(b"duplicate")
        report.moved += words.count(b"moved")
        report.refused += (refused := words.count(b"refused"))
        metrics.pushes.labels(queue, "ok").inc(fired)
        metrics.pushes.labels(queue, "failed").inc(refused)
        metrics.errors.labels(queue, "push").inc(refused)
        metrics.errors.labels(queue, "cron").inc(stopped)
        metrics.missed.labels(queue).inc(missed)

    def _set_aside(
        self, due: DueSchedule, kind: str, reason: str, report: TickReport, now_ms: int | None
    ) -> Operation[None]:
        word = yield Call(
            "set_aside",
            op=new_id(),
            token=self._leadership.token,
            now_ms=now_ms,
            id=due.member,
            definition=due.definition,
            plan=due.plan.text,
            kind=kind,
            reason=reason[:1000].encode(errors="backslashreplace"),
        )
        if word == b"set_aside":
            report.set_aside += 1
            error_type = "cron" if kind == "cron" else "deserialization"
            self._metrics.errors.labels(self._queue_name, error_type).inc()
            _log("schedule_set_aside", logging.ERROR, schedule=due.schedule_id, reason=reason)
            self._alerts.schedule_set_aside(due.schedule_id, reason, broken=kind == "broken")


def _plan_all(dues: Sequence[DueSchedule], now_ms: int, unusable: list[Unusable]) -> list[Fire]:
    """Return what to fire; schedules that cannot be planned go to `unusable`."""
    fires: list[Fire] = []
    for due in dues:
        try:
            fires.append(plan_fire(due, now_ms))
        except Exception as error:  # one schedule must never stop the others
            unusable.append(_unusable(due, error))
    return fires


def plan_fire(due: DueSchedule, now_ms: int) -> Fire:
    """Return what to fire now for a schedule, and when it is due next. Pure except for caches."""
    definition = _definition(due)
    rules = definition.rules
    nominal_ms = due.plan.nominal_ms
    if nominal_ms is None or nominal_ms > now_ms:
        raise BrokenRecord(f"schedule {due.schedule_id!r} is due but its plan is {due.plan.text!r}")
    step = plan(rules, nominal_ms, now_ms)
    reason, completed = ("", "") if step.next_ms is not None else _end_of(definition)
    return Fire(
        due=due,
        due_ms=due_ms(rules, step.moment_ms) if step.moment_ms is not None else now_ms,
        missed=step.missed,
        is_last=step.next_ms is None and not completed,
        user_id=definition.user_id,
        tenant=definition.options["tenant"],
        moment_ms=step.moment_ms,
        row=load_script("fire").row(
            id=due.schedule_id,
            plan=due.plan.text,
            moment="" if step.moment_ms is None else step.moment_ms,
            next_ms="" if step.next_ms is None else step.next_ms,
            due_ms="" if step.due_ms is None else step.due_ms,
            missed=step.missed,
            note=step.note,
            user=definition.user_id,
            name=definition.name,
            document="" if step.moment_ms is None else definition.texts.document(step.moment_ms),
            head=definition.texts.status_head,
            level=int(definition.priority),
            overlap=definition.overlap,
            max_runs=definition.options["max_runs"] or "",
            reason=reason,
            completed=completed,
        ),
    )


def _weight(due: DueSchedule) -> int:
    """Return what a fire counts for in a batch: its bytes, or more if it may cancel others."""
    least = BATCH_BYTES // CANCEL_CHUNK if b'"cancel_previous"' in due.definition else 0
    return max(len(due.definition), least)


def _definition(due: DueSchedule) -> Definition:
    try:
        due.member.decode()
    except UnicodeDecodeError:
        raise BrokenRecord(f"schedule id {due.member!r} is not valid UTF-8") from None
    if not due.definition:
        raise BrokenRecord(f"schedule {due.schedule_id!r} is due but has no definition")
    return read_definition(due.schedule_id, due.definition)


def _unusable(due: DueSchedule, error: Exception) -> Unusable:
    """Return why a schedule cannot be planned."""
    if isinstance(error, BrokenRecord):
        return due, "broken", str(error)
    if isinstance(error, InvalidSchedule):
        return due, "cron", str(error)
    line = error_line(error)
    _log("plan_failed", logging.ERROR, exc_info=error, schedule=due.schedule_id, error=line)
    return due, "cron", f"the next fire time cannot be computed: {line}"


def _end_of(definition: Definition) -> tuple[str, str]:
    """Return why there is no next fire time, and 'completed' if that is as intended."""
    reason = f"{definition.rule_text} has no next fire time"
    if definition.options["cron_expr"] is not None and definition.options["end"] is None:
        return reason, ""
    return f"completed: {reason}", "completed"
