"""Say what became of each moment of a schedule.

What fires costs nothing here. Redis has notes of the moments that did not become a task, each for a
stretch of them; since when the rule is what it is; and the last run. From these follows the rest: a
moment since then, not after the last run and in no stretch, was fired.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from fairqueue.clock import from_ms, to_ms
from fairqueue.errors import InvalidSchedule, shown
from fairqueue.link.connection import Link
from fairqueue.models import Page
from fairqueue.schedules.bulk import read_stored
from fairqueue.schedules.store import ScheduleStore, Stored
from fairqueue.validation import check_count

MAX_MOMENTS = 1000  # on one page
# As lua/lib/moments.lua has it: with so many notes, older ones may have been dropped.
NOTES_KEPT = 200
BACKFILLED = "backfilled"

N = TypeVar("N", int, None)
_MS = re.compile(r"[0-9]{1,15}")  # what a moment between 1970 and 9999 looks like


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment of a schedule, and what became of it.

    outcome: "fired"; "skipped", with the reason: missed, misfire, not caught up, overlap, paused,
        put off (a later next_run was set), or why it was disabled; "backfilled"; "planned", which
        is to come or about to be fired; "unplanned", which is to come but is paused or put off;
        "before" it was made; "unknown", because its rule was changed since and the task is gone.
    task_id: of the task that it became, or would.
    """

    at: datetime
    outcome: str
    task_id: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Moments with one fate: all from the first to the last."""

    first_ms: int
    last_ms: int
    reason: str


class Notes:
    """The notes of one schedule, to be asked about a moment."""

    def __init__(self, notes: Iterable[Note]) -> None:
        ordered = sorted(notes, key=lambda note: (note.last_ms, -note.first_ms))
        self._notes = ordered
        self._lasts = [note.last_ms for note in ordered]
        # The first moment of all notes from here on: most moments are in none.
        self._firsts = [note.first_ms for note in ordered]
        for i in range(len(ordered) - 2, -1, -1):
            self._firsts[i] = min(self._firsts[i], self._firsts[i + 1])

    def find(self, moment_ms: int) -> Note | None:
        """The note of a moment: of several the one that ends first, which is the closest."""
        start = bisect_left(self._lasts, moment_ms)
        if start == len(self._notes) or self._firsts[start] > moment_ms:
            return None
        return next(note for note in self._notes[start:] if note.first_ms <= moment_ms)


class Fates:
    """What is known of the moments of one schedule, at the time of one reading."""

    def __init__(self, stored: Stored, notes: list[Note], now_ms: int) -> None:
        self.stored = stored
        self.now_ms = now_ms
        self._filled = Notes(note for note in notes if note.reason == BACKFILLED)
        self._notes = Notes(note for note in notes if note.reason != BACKFILLED)
        full = len(notes) >= NOTES_KEPT
        self._forgotten_ms = min(note.last_ms for note in notes) if full else 0
        state = stored.state
        self._created_ms = stored.definition.created_ms
        # A plan that does not say since when it holds is an old one, of which nothing is noted.
        self._plan_ms = _number(state.get("since"), now_ms)
        self._ruled_ms = stored.definition.ruled_ms if "since" in state else now_ms
        self._last_run_ms = _number(state.get("last_run"), None)

    def moments(self, from_ms: int, until_ms: int, limit: int) -> list[int]:
        """The first so many from one until before another: those of its rule, and the set ones."""
        found = self.stored.definition.recurrence.between(from_ms, until_ms, limit)
        # Only as far as the list goes, if it ends before the range does.
        end_ms = found[-1] if len(found) == limit else until_ms
        others = {
            ms
            for ms in (self._last_run_ms, self.stored.nominal_ms)
            if ms is not None and from_ms <= ms < end_ms
        }
        return sorted({*found, *others})[:limit]

    def fate(self, moment_ms: int) -> tuple[str, str | None]:
        """Outcome and reason; see Moment."""
        if self._filled.find(moment_ms):
            return "backfilled", None
        note = self._notes.find(moment_ms)
        if moment_ms == self._last_run_ms:
            return "fired", None
        if note is not None:
            return "skipped", note.reason
        if moment_ms > self.now_ms:
            return self._fate_to_come(moment_ms)
        if moment_ms < self._forgotten_ms:
            return "unknown", None
        if moment_ms <= self._ruled_ms:
            return ("before" if moment_ms <= self._created_ms else "unknown"), None
        return self._fate_since(moment_ms)

    def _fate_since(self, moment_ms: int) -> tuple[str, str | None]:
        """Of one that came while the present plan held, and of which nothing is noted."""
        set_ms, nominal_ms = self.stored.set_ms, self.stored.nominal_ms
        if set_ms is not None and self._plan_ms < moment_ms < set_ms:
            return "skipped", "put off"
        if self._last_run_ms is not None and moment_ms < self._last_run_ms:
            return "fired", None
        if not self.stored.is_active:
            return "skipped", self._inactive_reason()
        if nominal_ms is not None and moment_ms >= nominal_ms:
            return "planned", "due"
        return "unknown", None

    def _fate_to_come(self, moment_ms: int) -> tuple[str, str | None]:
        if not self.stored.is_active:
            until = _number(self.stored.state.get("until"), 0)
            if until and moment_ms > until:
                return "planned", None
            return "unplanned", self._inactive_reason()
        nominal_ms = self.stored.nominal_ms
        if nominal_ms is not None and moment_ms < nominal_ms:
            return "unplanned", "put off"
        return "planned", None

    def _inactive_reason(self) -> str:
        reason = self.stored.state.get("reason")
        return reason if isinstance(reason, str) else "paused"


def read_fates(link: Link, store: ScheduleStore, schedule_id: str) -> Fates:
    """What is known of a schedule's moments now.

    Raises UnknownSchedule, and BrokenRecord if its record cannot be read.
    """
    stored = read_stored(store, schedule_id)
    # After the plan: what is noted in between is known then, not doubted.
    now_ms = link.now_ms()
    own = f"[{schedule_id}\0", f"({schedule_id}\1"
    members = link.ask(("ZRANGEBYLEX", link.keys["moments"], *own))[0]
    notes = [note for member in members if (note := _read_note(member)) is not None]
    return Fates(stored, notes, now_ms)


def list_moments(
    link: Link,
    store: ScheduleStore,
    schedule_id: str,
    start: object,
    end: object,
    limit: int,
    cursor: str | None,
) -> Page[Moment]:
    """The moments from `start` until before `end`, in order; see TaskScheduler.moments."""
    check_count(limit, "limit", InvalidSchedule, least=1, most=MAX_MOMENTS)
    from_ms, until_ms = check_range(start, end)
    if cursor is not None:
        from_ms = max(from_ms, _check_cursor(cursor))
    fates = read_fates(link, store, schedule_id)
    found = fates.moments(from_ms, until_ms, limit + 1)
    page = [_moment(schedule_id, ms, *fates.fate(ms)) for ms in found[:limit]]
    return Page(_known_by_task(link, page), str(found[limit]) if len(found) > limit else None)


def check_range(start: object, end: object) -> tuple[int, int]:
    """A range in ms. Raises InvalidSchedule for what is none."""
    start_ms, end_ms = to_ms(start, "start", InvalidSchedule), to_ms(end, "end", InvalidSchedule)
    if start_ms > end_ms:
        first, last = from_ms(start_ms).isoformat(), from_ms(end_ms).isoformat()
        raise InvalidSchedule(f"start {first} is after end {last}")
    return start_ms, end_ms


def stored_tasks(link: Link, ids: list[str]) -> set[str]:
    """Those of the ids that are of tasks which are still there."""
    there: set[str] = set()
    for i in range(0, len(ids), MAX_MOMENTS):
        asked = ids[i : i + MAX_MOMENTS]
        answers = link.ask(*(("HEXISTS", link.keys["tasks"], task_id) for task_id in asked))
        there |= {task_id for task_id, is_there in zip(asked, answers, strict=True) if is_there}
    return there


def task_id_of(schedule_id: str, moment_ms: int) -> str:
    """The id of the task that a moment of a schedule becomes."""
    return f"{schedule_id}:{moment_ms}"


def _known_by_task(link: Link, page: list[Moment]) -> list[Moment]:
    """Where nothing else is known: one whose task is still there was fired."""
    doubtful = [moment for moment in page if moment.outcome in ("unknown", "before")]
    there = stored_tasks(link, [moment.task_id for moment in doubtful])
    return [
        Moment(at=moment.at, outcome="fired", task_id=moment.task_id)
        if moment.outcome in ("unknown", "before") and moment.task_id in there
        else moment
        for moment in page
    ]


def _moment(schedule_id: str, moment_ms: int, outcome: str, reason: str | None) -> Moment:
    return Moment(
        at=from_ms(moment_ms),
        outcome=outcome,
        reason=reason,
        task_id=task_id_of(schedule_id, moment_ms),
    )


def _read_note(member: bytes) -> Note | None:
    """A note, or None for what somebody else has written there."""
    parts = member.decode(errors="replace").split("\0")
    if len(parts) != 5 or not all(_MS.fullmatch(part) for part in parts[1:3]):
        return None
    return Note(first_ms=int(parts[2]), last_ms=int(parts[1]), reason=parts[4])


def _number(value: Any, otherwise: N) -> int | N:
    return int(value) if isinstance(value, int | float) else otherwise


def _check_cursor(cursor: object) -> int:
    if not isinstance(cursor, str) or not _MS.fullmatch(cursor):
        raise InvalidSchedule(f"cursor {shown(cursor)} is none: pass the `cursor` of a page")
    return int(cursor)
