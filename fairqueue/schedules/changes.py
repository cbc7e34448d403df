"""The history of a schedule's changes: who changed what, when and why."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairqueue.clock import from_ms, read_ms
from fairqueue.cursors import bad_cursor, decode_cursor, encode_cursor
from fairqueue.errors import BrokenRecord, InvalidSchedule, shown
from fairqueue.models import Page
from fairqueue.schedules.fields import DEFAULTS, FIELDS, STORED
from fairqueue.validation import MAX_NOTE_LENGTH, check_name

CHANGES_LISTED = 50  # on one page: as many as lua/lib/changes.lua keeps of a schedule
MAX_CHANGE_LENGTH = 200  # characters of a value that a change shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Who changes a schedule, and why; `until` is when a paused schedule resumes."""

    by: str | None = None
    note: str | None = None
    until_ms: int | None = None

    def pause_text(self) -> str:
        """Return what is stored of a pause, JSON."""
        pause = {"by": self.by, "note": self.note, "until": self.until_ms}
        return json.dumps({name: value for name, value in pause.items() if value is not None})

    def made_text(self, fields: Mapping[str, Any]) -> str:
        """Return the record of a new schedule, JSON: the values that are not defaults."""
        given = {
            name: [None, _short(fields[name])]
            for name in (*STORED, "is_active")
            if fields[name] != DEFAULTS[name]
        }
        return self._record(given, made=True)

    def text(self, before: Mapping[str, Any], after: Mapping[str, Any], active: str) -> str:
        """Return the record of what has changed, JSON; '' if nothing has."""
        changed = {
            name: [_short(before[name]), _short(after[name])]
            for name in before
            if before[name] != after[name]
        }
        if active:
            changed["is_active"] = [active == "0", active == "1"]
        return self._record(changed) if changed else ""

    def _record(self, fields: Mapping[str, Any], **more: bool) -> str:
        record = {"by": self.by, "note": self.note, "fields": fields, **more}
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def check_change(
    by: object = None, note: object = None, until: Any = None, now_ms: int = 0
) -> Change:
    """Check who changes something, and why. Raises InvalidSchedule naming the value."""
    if by is not None:
        check_name(by, "by", InvalidSchedule)
    if note is not None and (not isinstance(note, str) or len(note) > MAX_NOTE_LENGTH):
        raise InvalidSchedule(
            f"note must be a string of at most {MAX_NOTE_LENGTH} characters, not {shown(note):.60}"
        )
    until_ms = None if until is None else read_ms(until, "until", InvalidSchedule)
    if until_ms is not None and until_ms <= now_ms:
        raise InvalidSchedule(f"until {from_ms(until_ms).isoformat()} is in the past")
    return Change(by=by, note=note, until_ms=until_ms)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChange:
    """One change of a schedule: when, by whom, why, and each field's old and new value.

    made: the schedule was created, with these fields. Durations are in seconds. A long value is
    shown by the beginning of its JSON text.
    """

    at: datetime
    by: str | None
    note: str | None
    fields: dict[str, tuple[Any, Any]]
    made: bool = False


def change_bounds(schedule_id: str, cursor: str | None) -> tuple[bytes, bytes]:
    """Return where a page of changes begins and ends in the index, newest first.

    Raises InvalidSchedule for a cursor of another listing.
    """
    own = f"{schedule_id}\0".encode()
    start = f"{schedule_id}\1".encode()
    if cursor is not None:
        start = decode_cursor(cursor, InvalidSchedule)
        if not start.startswith(own):
            raise bad_cursor(cursor, InvalidSchedule, " for the changes of this schedule")
    return b"(" + start, b"[" + own


def read_changes(members: list[bytes], limit: int) -> Page[ScheduleChange]:
    """Return a page of what is stored; `members` has one more if there is another page."""
    page = [_read_change(member) for member in members[:limit]]
    if len(members) <= limit:
        return Page(page, None)
    # The time and the operation are enough to continue from; the rest is what was changed.
    return Page(page, encode_cursor(b"\0".join(members[limit - 1].split(b"\0")[:3])))


def _read_change(member: bytes) -> ScheduleChange:
    schedule_id, when, _, text = member.decode(errors="replace").split("\0", 3)
    try:
        record = json.loads(text)
        return ScheduleChange(
            at=from_ms(int(when)),
            by=record["by"],
            note=record["note"],
            fields={
                name: (_shown(name, old), _shown(name, new))
                for name, (old, new) in record["fields"].items()
            },
            made=bool(record.get("made")),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenRecord(
            f"a change of schedule {schedule_id!r} is unreadable: {error!r}"
        ) from None


def _short(value: Any) -> Any:
    """Return a value as a change shows it: whole, or the beginning of its text."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return value if len(text) <= MAX_CHANGE_LENGTH else text[:MAX_CHANGE_LENGTH] + "..."


def _shown(name: str, value: Any) -> Any:
    return value if isinstance(value, str) or name not in FIELDS else FIELDS[name].to_user(value)
