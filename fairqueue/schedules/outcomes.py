"""Find the outcome of each fire time of a schedule.

Firing writes nothing for this. Redis has notes of the fire times that did not become a task, each
for a stretch of them; the time since when the present rule applies; and the last run. The rest
follows: a fire time since then, not after the last run and in no stretch, was fired.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from fairqueue.clock import from_ms, to_ms
from fairqueue.cursors import bad_cursor
from fairqueue.errors import InvalidSchedule
from fairqueue.link.operation import Ask, Now, Operation, steps
from fairqueue.models import Page
from fairqueue.schedules.definition import Stored
from fairqueue.schedules.state import number_in
from fairqueue.schedules.store import ScheduleStore
from fairqueue.validation import check_count

MAX_MOMENTS = 1000  # on one page
# The same number as in lua/lib/moments.lua. With this many notes, older ones may have been dropped.
NOTES_KEPT = 200
BACKFILLED = "backfilled"

_MS = re.compile(r"[0-9]{1,15}")  # a time between 1970 and 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class FireTime:
    """A fire time of a schedule, and its outcome.

    outcome: "fired"; "skipped", with the reason: missed, misfire, not caught up, overlap, duplicate
        (another task had its unique key), paused, put off (a later next_run was set), or
        why the schedule was disabled; "backfilled"; "planned" (it is to come, or about to be
        fired); "unplanned" (it is to come, but the schedule is paused or put off); "before" (the
        schedule was made later); "unknown" (the rule was changed since then, and the task is gone).
    task_id: of the task that it became, or would become.
    """

    at: datetime
    outcome: str
    task_id: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Fire times with one outcome: all from the first to the last."""

    first_ms: int
    last_ms: int
    reason: str


class Notes:
    """The notes of one schedule."""

    def __init__(self, notes: Iterable[Note]) -> None:
        ordered = sorted(notes, key=lambda note: (note.last_ms, -note.first_ms))
        self._notes = ordered
        self._lasts = [note.last_ms for note in ordered]
        # The first fire time of all notes from here on: most fire times are in none.
        self._firsts = [note.first_ms for note in ordered]
        for i in range(len(ordered) - 2, -1, -1):
            self._firsts[i] = min(self._firsts[i], self._firsts[i + 1])

    def find(self, moment_ms: int) -> Note | None:
        """Return the note of a fire time; of several the one that ends first."""
        start = bisect_left(self._lasts, moment_ms)
        if start == len(self._notes) or self._firsts[start] > moment_ms:
            return None
        return next(note for note in self._notes[start:] if note.first_ms <= moment_ms)


class Outcomes:
    """What is known of the fire times of one schedule, at the time of one reading."""

    def __init__(self, stored: Stored, notes: list[Note], now_ms: int) -> None:
        self.stored = stored
        self.now_ms = now_ms
        self._filled = Notes(note for note in notes if note.reason == BACKFILLED)
        self._notes = Notes(note for note in notes if note.reason != BACKFILLED)
        full = len(notes) >= NOTES_KEPT
        self._forgotten_ms = min(note.last_ms for note in notes) if full else 0
        state = stored.state
        self._created_ms = stored.definition.created_ms
        # A state without the time since when its plan holds is old, and has no notes.
        since_ms = number_in(state, "since")
        self._plan_ms = now_ms if since_ms is None else since_ms
        self._ruled_ms = stored.definition.ruled_ms if "since" in state else now_ms
        self._last_run_ms = number_in(state, "last_run")

    def moments(self, from_ms: int, until_ms: int, limit: int) -> list[int]:
        """Return up to `limit` fire times in [from_ms, until_ms): of the rule, and set by users."""
        found = self.stored.definition.recurrence.between(from_ms, until_ms, limit)
        # Only as far as the list goes, if it ends before the range does.
        end_ms = found[-1] if len(found) == limit else until_ms
        others = {
            ms
            for ms in (self._last_run_ms, self.stored.plan.nominal_ms)
            if ms is not None and from_ms <= ms < end_ms
        }
        return sorted({*found, *others})[:limit]

    def of(self, moment_ms: int) -> tuple[str, str | None]:
        """Return the outcome of a fire time and its reason; see FireTime."""
        if self._filled.find(moment_ms):
            return "backfilled", None
        note = self._notes.find(moment_ms)
        if moment_ms == self._last_run_ms:
            return "fired", None
        if note is not None:
            return "skipped", note.reason
        if moment_ms > self.now_ms:
            return self._future(moment_ms)
        if moment_ms < self._forgotten_ms:
            return "unknown", None
        if moment_ms <= self._ruled_ms:
            return ("before" if moment_ms <= self._created_ms else "unknown"), None
        return self._past(moment_ms)

    def _past(self, moment_ms: int) -> tuple[str, str | None]:
        """Return the outcome of a fire time under the present plan that is in no note."""
        set_ms, nominal_ms = self.stored.plan.set_ms, self.stored.plan.nominal_ms
        if set_ms is not None and self._plan_ms < moment_ms < set_ms:
            return "skipped", "put off"
        if self._last_run_ms is not None and moment_ms < self._last_run_ms:
            return "fired", None
        if not self.stored.is_active:
            return "skipped", self._inactive_reason()
        if nominal_ms is not None and moment_ms >= nominal_ms:
            return "planned", "due"
        return "unknown", None

    def _future(self, moment_ms: int) -> tuple[str, str | None]:
        if not self.stored.is_active:
            until = number_in(self.stored.state, "until")
            if until and moment_ms > until:
                return "planned", None
            return "unplanned", self._inactive_reason()
        nominal_ms = self.stored.plan.nominal_ms
        if nominal_ms is not None and moment_ms < nominal_ms:
            return "unplanned", "put off"
        return "planned", None

    def _inactive_reason(self) -> str:
        reason = self.stored.state.get("reason")
        return reason if isinstance(reason, str) else "paused"


def read_outcomes(store: ScheduleStore, schedule_id: str) -> Operation[Outcomes]:
    """Read what is known of a schedule's fire times. Raises UnknownSchedule, BrokenRecord."""
    stored = yield from steps(store.find)(schedule_id)
    # After the plan, so that notes written in between are of past fire times.
    now_ms = yield Now()
    own = f"[{schedule_id}\0", f"({schedule_id}\1"
    (members,) = yield Ask(("ZRANGEBYLEX", store.link.keys["moments"], *own))
    notes = [note for member in members if (note := _read_note(member)) is not None]
    return Outcomes(stored, notes, now_ms)


def list_moments(
    store: ScheduleStore,
    schedule_id: str,
    start: object,
    end: object,
    limit: int,
    cursor: str | None,
) -> Operation[Page[FireTime]]:
    """Return the fire times in [start, end), in order; see TaskScheduler.moments."""
    check_count(limit, "limit", InvalidSchedule, least=1, most=MAX_MOMENTS)
    start_ms, until_ms = check_range(start, end)
    if cursor is not None:
        if not isinstance(cursor, str) or not _MS.fullmatch(cursor):
            raise bad_cursor(cursor, InvalidSchedule)
        start_ms = max(start_ms, int(cursor))
    outcomes = yield from read_outcomes(store, schedule_id)
    found = outcomes.moments(start_ms, until_ms, limit + 1)
    page = []
    for ms in found[:limit]:
        outcome, reason = outcomes.of(ms)
        task_id = task_id_of(schedule_id, ms)
        page.append(FireTime(at=from_ms(ms), outcome=outcome, reason=reason, task_id=task_id))
    doubtful = [each.task_id for each in page if each.outcome in ("unknown", "before")]
    there = yield from stored_tasks(store, doubtful)  # then it was fired
    page = [replace(each, outcome="fired") if each.task_id in there else each for each in page]
    return Page(page, str(found[limit]) if len(found) > limit else None)


def check_range(start: object, end: object) -> tuple[int, int]:
    """Return a range in ms. Raises InvalidSchedule."""
    start_ms, end_ms = to_ms(start, "start", InvalidSchedule), to_ms(end, "end", InvalidSchedule)
    if start_ms > end_ms:
        first, last = from_ms(start_ms).isoformat(), from_ms(end_ms).isoformat()
        raise InvalidSchedule(f"start {first} is after end {last}")
    return start_ms, end_ms


def stored_tasks(store: ScheduleStore, ids: list[str]) -> Operation[set[str]]:
    """Return those of the task ids whose tasks are still stored."""
    key, there = store.link.keys["tasks"], set()
    for i in range(0, len(ids), MAX_MOMENTS):
        asked = ids[i : i + MAX_MOMENTS]
        answers = yield Ask(*(("HEXISTS", key, task_id) for task_id in asked))
        there |= {task_id for task_id, is_there in zip(asked, answers, strict=True) if is_there}
    return there


def task_id_of(schedule_id: str, moment_ms: int) -> str:
    """Return the id of the task that a fire time of a schedule becomes."""
    return f"{schedule_id}:{moment_ms}"


def _read_note(member: bytes) -> Note | None:
    """Read a note; None for anything else in its place."""
    parts = member.decode(errors="replace").split("\0")
    if len(parts) != 5 or not all(_MS.fullmatch(part) for part in parts[1:3]):
        return None
    return Note(first_ms=int(parts[2]), last_ms=int(parts[1]), reason=parts[4])
