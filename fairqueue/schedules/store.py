"""Keep schedules in Redis: what users wrote, and what is planned from it."""

import base64
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from json.encoder import encode_basestring
from typing import Any, TypedDict

from fairqueue.clock import LATEST_MS, from_ms, read_ms
from fairqueue.errors import (
    BrokenRecord,
    InvalidCron,
    InvalidSchedule,
    ScheduleConflict,
    ScheduleQuota,
    StaleVersion,
    kind_of,
    safe_repr,
    shown,
)
from fairqueue.link.connection import Argument, Link
from fairqueue.link.scripts import load_script
from fairqueue.models import (
    DEFAULT_NAME,
    UNREADABLE,
    Page,
    Problem,
    ScheduledTask,
    encode_payload,
    new_id,
    origin_fields,
    status_head,
    task_document,
    text_or_none,
)
from fairqueue.recurrence.frequency import as_cron
from fairqueue.recurrence.kinds import Recurrence, compile_form, compile_recurrence
from fairqueue.recurrence.windows import check_windows
from fairqueue.recurrence.zones import find_zone
from fairqueue.retry_policy import (
    check_backoff,
    check_jitter,
    check_multiplier,
    check_timeout,
    encode_policy,
    status_fields,
)
from fairqueue.schedules.planning import MISFIRES, MISSED_CAP, Rules, due_ms, stretch
from fairqueue.validation import (
    MAX_NAME_LENGTH,
    MAX_NOTE_LENGTH,
    MAX_PAYLOAD_BYTES,
    Priority,
    check_count,
    check_name,
    check_payload,
    check_priority,
    check_seconds,
    check_tenant,
    check_text,
    encode_json,
)

# Schedules in one call. All or none means one script, which holds the server for some 13 µs each:
# 0.13 s for the most. Whoever does not need all or none adds ADDED_AT_ONCE in a call.
MAX_ADDED = 10_000
MAX_ADDED_BYTES = 16 * 1024 * 1024  # of their definitions
ADDED_AT_ONCE = 500  # some 5 ms
CLOCK_TRIES = 5  # to plan new schedules by the clock of Redis, if that jumps meanwhile
MAX_LISTED = 1000  # schedules on one page
CHANGES_LISTED = 50  # of one schedule, on one page: as many as lua/lib/changes.lua keeps
MAX_WALKED = 10_000  # schedules looked at for one page when a filter matches few
MAX_PROBLEMS = 1000
MAX_METADATA_BYTES = 16 * 1024
MAX_DESCRIPTION_LENGTH = 4000  # characters
MAX_CHANGE_LENGTH = 200  # characters of a value that a change shows
DEFINITIONS_KEPT = 20_000  # parsed definitions in memory, some 2 KiB each

SET_MARK = "@"  # in a revision, before the next moment that a user has set, ms
_REVISION = re.compile(r"[!-~]{1,200}")
_MS = re.compile(r"[0-9]{1,15}")
_TITLE = re.compile(rb'(?<=[{,])"title":("(?:[^"\\]|\\.)*")')

# Characters of a schedule's id, so that `<schedule_id>:<time in ms>` is an id for TaskQueue.get.
MAX_ID_LENGTH = MAX_NAME_LENGTH - 16

OVERLAPS = ("allow", "skip", "buffer_one", "cancel_previous")
# Fields that are stored only where they differ from these. Times are in ms.
USUAL: dict[str, Any] = {
    "cron_expr": None,
    "every": None,
    "anchor": None,
    "at": None,
    "start": None,
    "end": None,
    "windows": None,
    "exclude": None,
    "max_runs": None,
    "misfire": "fire_once",
    "catch_up": 86_400_000,
    "max_catch_up": 100,
    "jitter": 0,
    "overlap": "allow",
    "retries": None,
    "backoff": None,
    "backoff_cap": None,
    "backoff_multiplier": None,
    "backoff_jitter": None,
    "timeout": None,
    "max_failures": None,
    "tenant": None,
    "title": None,
    "description": None,
}
KINDS = ("cron_expr", "every", "at")
_MOMENTS = ("anchor", "at", "start", "end", "next_run")
_DURATIONS = ("every", "catch_up", "jitter")
# What the fields of a state are; float stands for a count or a moment in ms.
_STATE_KINDS: dict[str, type] = {
    "user": str,
    "tenant": str,
    "title": str,
    "active": bool,
    "reason": str,
    "note": str,
    "by": str,
    **dict.fromkeys(("since", "paused", "until", "last_run"), float),
    **dict.fromkeys(("runs", "missed", "refused", "skipped", "failures"), float),
}
LIMITS = ("start", "end", "windows", "exclude")
DEFAULTS: dict[str, Any] = {
    "user_id": None,
    "priority": Priority.NORMAL,
    "payload": {},
    "timezone": "UTC",
    "name": DEFAULT_NAME,
    "metadata": {},
    **USUAL,
    "created_by": None,
    "is_active": True,
}
FIELDS = ("user_id", "priority", "payload", "timezone", "name", "metadata", *USUAL)
_FIELD_TYPES = {"timezone": str, "payload": dict, "metadata": dict}
ADDABLE = (*FIELDS, "created_by", "is_active")
PATCHABLE = (*FIELDS, "is_active", "next_run")
# What plans anew from now when it is changed.
PLANNING = (*KINDS, *LIMITS, "anchor", "timezone", "jitter")
MOST_JITTER_S = 86_400
MOST_CATCH_UP = 1000
# A limit on how close moments may be is compared with the gaps between so many that come next.
GAPS_CHECKED = 20
SETTINGS_MS = 5000  # so long a setting of the queue is not read again
ENGINE = 1  # of the rules by which moments are found: stored with each schedule


class ScheduleOptions(TypedDict, total=False):
    """What can be said of a schedule besides its rule, its user and its task.

    Moments are aware datetimes, seconds since 1970, or ISO 8601 with an offset.
    every: a timedelta or seconds, counted from `anchor`, `start` or now. at: once, at that moment.
    start, end: no moments before and from then on. windows: days and hours in the schedule's zone,
        such as {"days": [1, 2, 3, 4, 5], "from": "09:00", "to": "17:30"}. exclude: dates in that
        zone, such as "2026-12-25". max_runs: it is completed after so many.
    misfire: what becomes of moments that passed while no scheduler ran: "fire_once" fires the
        latest, "skip" none that is more than a minute late, "fire_all" all of the last `catch_up`
        seconds (a day), at most `max_catch_up` (100), oldest first.
    jitter: each moment is fired up to so many seconds later, never past the next one.
    overlap: while a task of it is unfinished, "allow" pushes another, "skip" none, "buffer_one" one
        that begins when the run before it has ended, "cancel_previous" cancels what is unfinished.
    retries, timeout: for its tasks, instead of the handler's. backoff: seconds before the first
        retry, which double each time up to a day, without jitter; `backoff_multiplier`,
        `backoff_cap` and backoff_jitter="full" change that. Or a list of delays, taken as it is.
    max_failures: it is paused after so many dead letters in a row.
    tenant: the group of users that its tasks are done for; see docs/tenants.md.
    title: what people call it, one line. description: what it is for, in several.
    created_by: who makes it, kept for good. is_active: False makes it paused.
    """

    every: timedelta | float | None
    anchor: datetime | float | str | None
    at: datetime | float | str | None
    start: datetime | float | str | None
    end: datetime | float | str | None
    windows: list[dict[str, Any]] | None
    exclude: list[str] | None
    max_runs: int | None
    misfire: str
    catch_up: timedelta | float
    max_catch_up: int
    jitter: timedelta | float
    overlap: str
    retries: int | None
    backoff: float | list[float] | None
    backoff_cap: float | None
    backoff_multiplier: float | None
    backoff_jitter: str | None
    timeout: float | None
    max_failures: int | None
    tenant: str | None
    title: str | None
    description: str | None
    created_by: str | None
    is_active: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a user wrote, read back: ready to be fired."""

    schedule_id: str
    timezone: str
    user_id: str
    priority: Priority
    payload: dict[str, Any]
    name: str
    metadata: dict[str, Any]
    rare: dict[str, Any]  # the fields of USUAL
    created_by: str | None
    created_ms: int
    updated_ms: int
    ruled_ms: int  # since when its moments are what they are, and all that became of them is known
    status_head: str
    document_head: str
    document_tail: str

    @property
    def recurrence(self) -> Recurrence:
        """Its moments. Raises InvalidCron or UnknownTimezone if it has none (any more)."""
        return recurrence_of(self.schedule_id, self.timezone, self.rare)

    @property
    def rules(self) -> Rules:
        """What decides what it fires. Raises as `recurrence` does."""
        rare = self.rare
        return Rules(
            schedule_id=self.schedule_id,
            recurrence=self.recurrence,
            misfire=rare["misfire"],
            catch_up_ms=rare["catch_up"],
            max_catch_up=rare["max_catch_up"],
            jitter_ms=rare["jitter"],
        )

    @property
    def overlap(self) -> str:
        """What happens while a task of it is unfinished."""
        return str(self.rare["overlap"])

    @property
    def words(self) -> str:
        """Its rule as its user wrote it."""
        kind = next((kind for kind in KINDS if self.rare[kind] is not None), "cron_expr")
        return f"{kind} {_shown(kind, self.rare[kind])!r}"

    def document(self, moment_ms: int) -> str:
        """What is stored of the task that fires at a moment."""
        return f"{self.document_head}{moment_ms}{self.document_tail}"


@lru_cache(maxsize=DEFINITIONS_KEPT)
def read_definition(schedule_id: str, text: bytes) -> Definition:
    """Read a stored definition. Raises BrokenRecord, saying what is wrong with it."""
    try:
        stored = text.decode()
        record = json.loads(stored)
        user_id = check_name(record["user_id"], "user_id")
        name = check_name(record["name"], "name")
        given = {field: record[field] for field in record.keys() & USUAL.keys()}
        rare = USUAL | given
        _check_rare(rare, given)
        priority = check_priority(record["priority"])
        payload, metadata = record["payload"], record["metadata"]
        # What was read from JSON needs no closer look than this.
        for field, kind in _FIELD_TYPES.items():
            if not isinstance(record[field], kind):
                raise InvalidSchedule(f"{field} is no {kind.__name__}")
        head, mark, tail = task_document(
            user_id,
            name,
            priority,
            _stored_payload(stored, record),
            schedule_id,
            0,
            origin={"tenant": rare["tenant"]},
            policy=encode_policy(policy_of(rare)),
        ).partition('"scheduled_for":0')
        return Definition(
            schedule_id=schedule_id,
            timezone=record["timezone"],
            user_id=user_id,
            priority=priority,
            payload=payload,
            name=name,
            metadata=metadata,
            rare=rare,
            created_by=text_or_none(record.get("created_by")),
            created_ms=int(record["created"]),
            updated_ms=int(record["updated"]),
            ruled_ms=int(record.get("ruled", record["created"])),
            status_head=status_head(user_id, name, priority)
            + f',"schedule":{encode_basestring(schedule_id)},"type":"scheduled"'
            + origin_fields({"tenant": rare["tenant"]})
            + status_fields(policy_of(rare))
            + _fail_limit(rare),
            document_head=head + mark[:-1],
            document_tail=tail,
        )
    except KeyError as error:
        raise BrokenRecord(f"schedule {schedule_id!r} has no field {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BrokenRecord(f"schedule {schedule_id!r} is unreadable: {error}") from None


def _stored_payload(stored: str, record: dict[str, Any]) -> str:
    """The payload as it stands in the text, which saves encoding it; see `_definition_text`."""
    _, mark, rest = stored.partition(',"metadata":{},"payload":')
    if mark and rest.endswith("}") and next(reversed(record)) == "payload":
        return rest[:-1]
    return encode_payload(record["payload"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A schedule with its state and its plan, as they are stored.

    `nominal_ms` is its next moment, None while it has none. `revision` is new with each change of
    the schedule or of its plan.
    """

    definition: Definition
    state: dict[str, Any]
    revision: str
    nominal_ms: int | None

    @property
    def is_active(self) -> bool:
        """Whether it is planned."""
        return bool(self.state.get("active"))

    @property
    def set_ms(self) -> int | None:
        """The next moment that a user has set; the plan before it is not the rule's."""
        mark = self.revision.partition(SET_MARK)[2]
        return _read_ms(mark)


def new_revision(before: str = "", set_ms: int | None = None) -> str:
    """A random revision, with the next moment that a user has set, now or `before`."""
    mark = str(set_ms) if set_ms is not None else before.partition(SET_MARK)[2]
    return f"{new_id()}{SET_MARK}{mark}" if mark else new_id()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Who changes a schedule, and why; `until` is when one that is paused goes on."""

    by: str | None = None
    note: str | None = None
    until_ms: int | None = None

    def pause_text(self) -> str:
        """What is kept of a pause, JSON."""
        pause = {"by": self.by, "note": self.note, "until": self.until_ms}
        return json.dumps({name: value for name, value in pause.items() if value is not None})

    def made_text(self, fields: Mapping[str, Any]) -> str:
        """That a schedule was made, and with which values, JSON; none that is its default."""
        given = {
            name: [None, _short(fields[name])]
            for name in (*FIELDS, "is_active")
            if fields[name] != DEFAULTS[name]
        }
        record = {"by": self.by, "note": self.note, "fields": given, "made": True}
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"))

    def text(self, before: Mapping[str, Any], after: Mapping[str, Any], active: str) -> str:
        """What has changed, JSON; nothing if nothing has."""
        changed = {
            name: [_short(before[name]), _short(after[name])]
            for name in before
            if before[name] != after[name]
        }
        if active:
            changed["is_active"] = [active == "0", active == "1"]
        if not changed:
            return ""
        record = {"by": self.by, "note": self.note, "fields": changed}
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def check_change(
    by: object = None, note: object = None, until: Any = None, now_ms: int = 0
) -> Change:
    """Who changes something, and why, checked. Raises InvalidSchedule naming the value."""
    if by is not None:
        check_name(by, "by", InvalidSchedule)
    if note is not None and (not isinstance(note, str) or len(note) > MAX_NOTE_LENGTH):
        raise InvalidSchedule(
            f"note {shown(note):.60} is no text of at most {MAX_NOTE_LENGTH} characters"
        )
    until_ms = None if until is None else read_ms(until, "until", InvalidSchedule)
    if until_ms is not None and until_ms <= now_ms:
        raise InvalidSchedule(f"until {from_ms(until_ms).isoformat()} is in the past")
    return Change(by=by, note=note, until_ms=until_ms)  # type: ignore[arg-type]


def _check_added_bytes(rows: Sequence[Argument]) -> None:
    size = sum(len(row) for row in rows if isinstance(row, str))
    if size > MAX_ADDED_BYTES:
        raise InvalidSchedule(
            f"the schedules of one call have {size:,} bytes, and at most {MAX_ADDED_BYTES:,} are "
            "stored at once: add them in several calls"
        )


def _short(value: Any) -> Any:
    """A value as a change shows it: whole, or the beginning of its text."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return value if len(text) <= MAX_CHANGE_LENGTH else text[:MAX_CHANGE_LENGTH] + "..."


class ScheduleStore:
    """The schedules of one queue."""

    def __init__(
        self, link: Link, look_at: Callable[[str, Mapping[str, Any]], None] | None = None
    ) -> None:
        """`look_at` is called with the name and the payload of tasks to come, and may refuse."""
        self._link = link
        self.look_at = look_at or (lambda name, payload: None)
        self._min_interval = (-SETTINGS_MS, 0)  # when it was read, and how many ms it is

    # --- changing ---------------------------------------------------------------------------------

    def add(self, given: Iterable[Mapping[str, Any]], on_conflict: str) -> list[str]:
        """Store new schedules, all or none; their ids.

        Raises InvalidSchedule and its kin for bad input, ScheduleConflict for an id that is taken
        when `on_conflict` is "error".
        """
        if on_conflict not in ("error", "replace"):
            raise InvalidSchedule(
                f"on_conflict {shown(on_conflict)} is neither 'error' nor 'replace'"
            )
        specs = check_list(given, "schedules")
        if len(specs) > MAX_ADDED:
            raise InvalidSchedule(f"{len(specs)} schedules in one call: at most {MAX_ADDED}")
        checked = [_check_spec(spec) for spec in specs]
        ids = [schedule_id for schedule_id, _ in checked]
        if len(set(ids)) != len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise InvalidSchedule(f"schedule_id {twice!r} is given twice in one call")
        if not ids:
            return []
        for _, fields in checked:
            self.look_at(fields["name"], fields["payload"])
        operation = new_id()
        for _ in range(CLOCK_TRIES):
            now_ms = self._link.now_ms()
            rows = [field for spec in checked for field in self._row(*spec, now_ms)]
            _check_added_bytes(rows)
            answer = self._link.run(
                "add_schedules",
                op=operation,
                on_conflict=on_conflict,
                rest=rows,
                client_now=self._link.now_ms(),  # the planning may have taken a while
            )
            if answer[0] == b"exists":
                raise ScheduleConflict(
                    f"schedule_id {answer[1].decode()!r} is taken: nothing was stored; take "
                    "another id, or update the schedule that has it"
                )
            if answer[0] == b"quota":
                raise _over_quota(answer[1])
            if answer[0] == b"added":
                return ids
            self._link.learn_time(int(answer[1]))
        raise ScheduleConflict("the clock of Redis jumps again and again: nothing was stored")

    def _row(self, schedule_id: str, fields: dict[str, Any], now_ms: int) -> tuple[Argument, ...]:
        """Pack a new schedule for the script `add_schedules`."""
        fields, by = _anchored(fields, now_ms), fields["created_by"]
        text = _definition_text(fields, created_by=by, created_ms=now_ms, updated_ms=now_ms)
        next_ms, due = _first_moment(schedule_id, fields, now_ms)
        self._check_interval(schedule_id, fields, now_ms)
        is_active = fields["is_active"]
        return load_script("add_schedules").row(
            id=schedule_id,
            user=fields["user_id"],
            name=fields["name"],
            definition=text,
            revision=new_id(),
            next_ms=next_ms if is_active else "",
            due_ms=due if is_active else "",
            tenant=fields["tenant"] or "",
            title=fields["title"] or "",
            change=Change(by=by).made_text(fields),
        )

    def update(
        self,
        schedule_id: str,
        changes: Mapping[str, Any],
        by: Change | None = None,
        revision: str | None = None,
    ) -> bool:
        """Change some fields of a schedule; False if there is none.

        Reads, changes and writes back only if nobody else has written in between, else starts
        over: concurrent updates of different fields all take effect. With a `revision`, raises
        StaleVersion instead if the schedule has another one.
        """
        check_id(schedule_id)
        patch = _check_patch(changes)
        _check_revision(schedule_id, revision)
        if "payload" in patch or "name" in patch:
            self._look_at_update(schedule_id, patch)
        deadline = time.monotonic() + self._link.timeout
        while time.monotonic() < deadline:
            word = self._try_update(schedule_id, patch, by or Change(), revision)
            if word in (b"updated", b"absent"):
                return word == b"updated"
        raise ScheduleConflict(
            f"schedule {schedule_id!r} was changed by others again and again: nothing was stored"
        )

    def _look_at_update(self, schedule_id: str, patch: Mapping[str, Any]) -> None:
        """Before the deadline runs, as it may take a while."""
        stored = self.stored([schedule_id])[0]
        if stored is not None:
            after = {**fields_of(stored.definition), **patch}
            self.look_at(after["name"], after["payload"])

    def _try_update(
        self, schedule_id: str, patch: dict[str, Any], by: Change, revision: str | None
    ) -> bytes:
        text, plan, state_text = self._link.ask(
            ("HGET", self._link.keys["schedules"], schedule_id),
            ("HGET", self._link.keys["plan"], schedule_id),
            ("HGET", self._link.keys["schedule_state"], schedule_id),
        )
        if text is None:
            return b"absent"
        if revision is not None and (plan or b"").partition(b" ")[0] != revision.encode():
            raise _stale(schedule_id)
        now_ms = self._link.now_ms()
        old = read_definition(schedule_id, text)
        state = _read_state(state_text)
        before = fields_of(old)
        fields = _anchored(_patched(before, patch), now_ms)
        if any(field in patch for field in (*KINDS, *LIMITS)):
            recurrence_of(schedule_id, fields["timezone"], fields)
            self._check_interval(schedule_id, fields, now_ms)
        active = _becomes_active(patch, state)
        if active == "1" or (active == "" and state.get("active") and "max_runs" in patch):
            _check_runs(schedule_id, fields, state)
        next_ms, due = self._next_after_update(schedule_id, fields, patch, state, active, now_ms)
        answer = self._link.run(
            "update_schedule",
            op=new_id(),
            client_now=self._link.now_ms(),
            id=schedule_id,
            expected=text,
            base=(plan or b"").partition(b" ")[0],
            definition=_definition_text(
                fields,
                created_by=old.created_by,
                created_ms=old.created_ms,
                updated_ms=now_ms,
                ruled_ms=old.ruled_ms
                if _stays_known(patch, plan, state, active, next_ms)
                else now_ms,
            ),
            user=fields["user_id"],
            tenant=fields["tenant"] or "",
            title=fields["title"] or "",
            revision=_revision_after(patch, plan, active, next_ms),
            old_name=old.name,
            task_name=fields["name"],
            next_ms=next_ms,
            due_ms=due,
            active=active,
            pause=by.pause_text() if active == "0" else "",
            noted=_paused_moments(old, state, now_ms) if active == "1" or _replans(patch) else "",
            change=by.text(before, fields, active),
        )
        if answer[0] == b"skewed":
            self._link.learn_time(int(answer[1]))
        if answer[0] == b"quota":
            raise _over_quota(answer[1])
        return bytes(answer[0])

    def _next_after_update(
        self,
        schedule_id: str,
        fields: dict[str, Any],
        patch: Mapping[str, Any],
        state: Mapping[str, Any],
        active: str,
        now_ms: int,
    ) -> tuple[int | str, int | str]:
        """The next moment, and when to act on it; nothing where the plan stays."""
        if "next_run" in patch:
            if active == "" and not state.get("active"):
                raise InvalidSchedule(
                    f"next_run cannot be set: schedule {schedule_id!r} is not active; pass "
                    "is_active=True with it"
                )
            next_ms = _check_next_run(patch["next_run"], now_ms)
            return next_ms, next_ms
        if active == "1" or (active == "" and state.get("active") and _replans(patch)):
            return _first_moment(schedule_id, fields, now_ms)
        return "", ""

    def paused_moments(self, definition: Definition, now_ms: int) -> str:
        """The moments that passed while a schedule was paused until now, as they are noted.

        Raises BrokenRecord if it was not.
        """
        state_text = self._link.ask(
            ("HGET", self._link.keys["schedule_state"], definition.schedule_id)
        )[0]
        state = _read_state(state_text)
        if not isinstance(state.get("until"), int | float):
            raise BrokenRecord(f"schedule {definition.schedule_id!r} is due but has no plan")
        return _paused_moments(definition, state, now_ms)

    def _check_interval(self, schedule_id: str, fields: Mapping[str, Any], now_ms: int) -> None:
        """Raises ScheduleQuota for a rule whose next moments are closer than the queue allows."""
        read_ms, least_ms = self._min_interval
        if abs(now_ms - read_ms) >= SETTINGS_MS:
            settings = self._link.keys["settings"]
            text = self._link.ask(("HGET", settings, "min_interval_ms"))[0] or b""
            least_ms = int(text) if text.isdigit() else 0
            self._min_interval = (now_ms, least_ms)
        if not least_ms:
            return
        recurrence = recurrence_of(schedule_id, fields["timezone"], fields)
        moments = recurrence.between(now_ms + 1, LATEST_MS, GAPS_CHECKED + 1)
        for before, after in pairwise(moments):
            if after - before < least_ms:
                raise ScheduleQuota(
                    f"schedule {schedule_id!r} has moments at {from_ms(before).isoformat()} and "
                    f"{from_ms(after).isoformat()}: the queue's min_interval is "
                    f"{least_ms / 1000:g} seconds; nothing was stored"
                )

    @staticmethod
    def check(spec: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The id and the fields of a new schedule, as they are stored. Raises as `add`."""
        return _check_spec(spec)

    @staticmethod
    def check_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
        """Changes that a schedule may take, as they are stored. Raises as `update`."""
        return _check_patch(changes)

    def remove(self, schedule_id: str, revision: str | None = None) -> bool:
        """Forget a schedule; False if there is none.

        With a `revision`, raises StaleVersion if the schedule has another one.
        """
        check_id(schedule_id)
        _check_revision(schedule_id, revision)
        word = self._link.run(
            "remove_schedule", op=new_id(), id=schedule_id, revision=revision or ""
        )
        if word == b"stale":
            raise _stale(schedule_id)
        return bool(word == b"removed")

    # --- looking ----------------------------------------------------------------------------------

    def get(self, schedule_id: str) -> ScheduledTask | None:
        """A schedule, or None. Raises BrokenRecord if it cannot be read."""
        check_id(schedule_id)
        return self._read([schedule_id.encode()])[0]

    def read(self, ids: Sequence[str]) -> list[ScheduledTask | None]:
        """Schedules by their ids, in order; None for each that is gone or cannot be read."""
        names = [schedule_id.encode() for schedule_id in ids]
        return list(self._read(names, skip_broken=True)) if ids else []

    def are_active(self, ids: Sequence[str | bytes]) -> list[bool]:
        """Whether each of these is active; False also for those that are gone."""
        if not ids:
            return []
        states = self._link.ask(("HMGET", self._link.keys["schedule_state"], *ids))[0]
        return _are_active(states)

    def titles(self, ids: Sequence[str | bytes]) -> list[str]:
        """What people call each of these; empty for those that have no title, or are gone."""
        if not ids:
            return []
        states = self._link.ask(("HMGET", self._link.keys["schedule_state"], *ids))[0]
        return [_title_in(state or b"") for state in states]

    def stored(self, ids: Sequence[str]) -> list[Stored | None]:
        """As `read`, with definition, state and plan as they are stored."""
        if not ids:
            return []
        keys = self._link.keys
        answers = self._link.ask(
            ("HMGET", keys["schedules"], *ids),
            ("HMGET", keys["plan"], *ids),
            ("HMGET", keys["schedule_state"], *ids),
        )
        return [_stored(*each) for each in zip(ids, *answers, strict=True)]

    def page(
        self, user_id: str | None, is_active: bool | None, limit: int, cursor: str | None
    ) -> Page[ScheduledTask]:
        """A page of schedules, ordered by user and id.

        A page may be short although its cursor says that there is more: the walk for a filter that
        matches few is bounded. Records that cannot be read are left out; `problems` has them.
        """
        check_count(limit, "limit", InvalidSchedule, least=1, most=MAX_LISTED)
        if user_id is not None:
            check_name(user_id, "user_id", InvalidSchedule)
        if is_active not in (None, True, False):
            raise InvalidSchedule(f"is_active {shown(is_active)} is neither True, False nor None")
        # As bytes: somebody may have put a member there that is no text.
        start, stop = (
            (b"-", "+") if user_id is None else (f"[{user_id}\0".encode(), f"({user_id}\1")
        )
        if cursor is not None:
            start = b"(" + _decode_cursor(cursor, user_id)
        index = self._link.keys["schedule_index"]
        found: list[ScheduledTask] = []
        walked = 0
        while True:
            want = limit if is_active is None else MAX_LISTED
            members = self._link.ask(("ZRANGE", index, start, stop, "BYLEX", "LIMIT", 0, want))[0]
            likely = self._likely(members, is_active)
            for member, task in zip(likely, self._read_members(likely), strict=True):
                if task is not None and is_active in (None, task.is_active):
                    found.append(task)
                    if len(found) == limit:
                        return Page(found, _encode_cursor(member))
            walked += len(members)
            if len(members) < want:
                return Page(found, None)
            start = b"(" + members[-1]
            if walked >= MAX_WALKED and _is_text(start):
                return Page(found, _encode_cursor(start[1:]))

    def problems(self) -> list[Problem]:
        """The schedules that were set aside, with the reasons; at most a thousand."""
        found: dict[bytes, Problem] = {}
        cursor: Argument = 0
        while len(found) < MAX_PROBLEMS:
            cursor, flat = self._link.ask(("HSCAN", self._link.keys["broken"], cursor))[0]
            for name, text in zip(flat[::2], flat[1::2], strict=True):
                found[name] = _problem(name, text)
            if cursor == b"0":
                break
        ordered = sorted(found.values(), key=lambda problem: (problem.since, problem.schedule_id))
        return ordered[:MAX_PROBLEMS]

    def _likely(self, members: Sequence[bytes], is_active: bool | None) -> Sequence[bytes]:
        """The entries of the index that are worth reading in full."""
        if is_active is None:
            return members
        flags = self.are_active(_ids(members))
        return [member for member, flag in zip(members, flags, strict=True) if flag == is_active]

    def _read_members(self, members: Sequence[bytes]) -> Sequence[ScheduledTask | None]:
        ids = _ids(members)
        return self._read(ids, skip_broken=True) if ids else []

    def _read(
        self, ids: Sequence[bytes], skip_broken: bool = False
    ) -> Sequence[ScheduledTask | None]:
        keys = self._link.keys
        definitions, plans, states = self._link.ask(
            ("HMGET", keys["schedules"], *ids),
            ("HMGET", keys["plan"], *ids),
            ("HMGET", keys["schedule_state"], *ids),
        )
        tasks: list[ScheduledTask | None] = []
        for name, text, plan, state in zip(ids, definitions, plans, states, strict=True):
            try:
                tasks.append(
                    None
                    if text is None
                    else _scheduled_task(name.decode("utf-8", "replace"), text, plan, state)
                )
            except BrokenRecord:
                if not skip_broken:
                    raise
                tasks.append(None)
        return tasks


def _ids(members: Sequence[bytes]) -> list[bytes]:
    return [member.partition(b"\0")[2] for member in members]


def _stored(
    schedule_id: str, text: bytes | None, plan: bytes | None, state: bytes | None
) -> Stored | None:
    try:
        definition = None if text is None else read_definition(schedule_id, text)
    except BrokenRecord:
        return None
    if definition is None:
        return None
    revision, _, nominal = (plan or b"").decode(errors="replace").partition(" ")
    return Stored(
        definition=definition,
        state=_read_state(state),
        revision=revision,
        nominal_ms=_read_ms(nominal),
    )


def _check_revision(schedule_id: str, revision: object) -> None:
    """Raises StaleVersion for what no schedule has: an empty one would be taken for none given."""
    if revision is not None and not isinstance(revision, str):
        raise InvalidSchedule(f"revision {shown(revision):.80} is no text: pass that of a schedule")
    if revision is not None and not _REVISION.fullmatch(revision):
        raise _stale(schedule_id)


def _revision_after(
    patch: Mapping[str, Any], plan: bytes | None, active: str, next_ms: int | str
) -> str:
    """The revision of an update. What leaves the plan alone keeps the mark of a set moment."""
    if active == "" and next_ms == "":
        return new_revision((plan or b"").decode(errors="replace").partition(" ")[0])
    return new_revision(set_ms=patch.get("next_run"))


def _over_quota(user: bytes) -> ScheduleQuota:
    return ScheduleQuota(
        f"user {user.decode()!r} would have more schedules than max_schedules allows: nothing was "
        "stored"
    )


def check_list(given: object, what: str) -> list[Mapping[str, Any]]:
    """Several schedules, each a dict. Raises InvalidSchedule for what does not hold any."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidSchedule(f"{what} must be a list of dicts, one for each, not {kind_of(given)}")
    return list(given)


def check_id(schedule_id: object) -> str:
    """An id that a schedule may have. Raises InvalidSchedule."""
    return check_name(schedule_id, "schedule_id", InvalidSchedule, most=MAX_ID_LENGTH)


def _check_spec(spec: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The id and the checked fields of a new schedule."""
    if not isinstance(spec, Mapping):
        raise InvalidSchedule(
            f"{safe_repr(spec)} is no schedule: a dict of the fields {', '.join(FIELDS)}"
        )
    given = {name: value for name, value in spec.items() if name != "schedule_id"}
    if "user_id" not in given:
        raise InvalidSchedule(f"a schedule needs user_id; this one has {shown(list(given))}")
    kinds = [kind for kind in KINDS if given.get(kind) is not None]
    if len(kinds) != 1:
        has = " and ".join(kinds) or "none of them"
        raise InvalidSchedule(f"a schedule needs one of {', '.join(KINDS)}; this one has {has}")
    fields = DEFAULTS | _check_fields(given, ADDABLE)
    schedule_id = spec.get("schedule_id")
    checked_id = new_id() if schedule_id is None else check_id(schedule_id)
    recurrence_of(checked_id, fields["timezone"], fields)
    return checked_id, fields


def _check_patch(changes: Mapping[str, Any]) -> dict[str, Any]:
    patch = _check_fields(changes, PATCHABLE)
    if "payload" in patch:
        encode_payload(patch["payload"])
    if "metadata" in patch:
        encode_json(patch["metadata"], "metadata", MAX_METADATA_BYTES)
    if patch.get("is_active") is False and "next_run" in patch:
        raise InvalidSchedule("next_run cannot be set on a schedule that is made inactive")
    return patch


def _check_fields(given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """The fields with their values checked. Raises InvalidSchedule or one of its kin."""
    for name in given:
        if name not in known:
            raise InvalidSchedule(f"unknown field {shown(name)}: known are {', '.join(known)}")
    fields = {name: _CHECKS[name](value) for name, value in given.items() if name in _CHECKS}
    if "timezone" in given:
        find_zone(given["timezone"])
    return {**given, **fields}


def _check_active(value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidSchedule(f"is_active {shown(value)} is neither True nor False")
    return value


def _or_none(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _check_choice(value: object, name: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise InvalidSchedule(f"{name} {shown(value)} is none of {', '.join(choices)}")
    return str(value)


def _ms(value: object, name: str, **bounds: float) -> int:
    return round(check_seconds(value, name, InvalidSchedule, **bounds) * 1000)


def _check_description(value: object) -> str:
    return check_text(value, "description", InvalidSchedule, most=MAX_DESCRIPTION_LENGTH)


def _check_windows(value: Any) -> Any:
    check_windows(value)
    return value


_IN_MS = {"catch_up", "jitter", "every", "anchor", "at", "start", "end"}
_AS_GIVEN = {
    "misfire",
    "overlap",
    "max_runs",
    "max_failures",
    "retries",
    "max_catch_up",
    "tenant",
    "title",
    "description",
}


def _check_rare(rare: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Look at what was stored. Raises InvalidSchedule for a value that cannot be used."""
    for name in given.keys() & _AS_GIVEN:
        _CHECKS[name](given[name])
    for name in given.keys() & _IN_MS:
        if given[name] != USUAL[name]:
            check_count(given[name], name, InvalidSchedule, most=LATEST_MS)
    if not isinstance(rare["cron_expr"], str | None):
        raise InvalidSchedule(f"cron_expr {shown(rare['cron_expr']):.60} is no text")
    if sum(rare[kind] is not None for kind in KINDS) != 1:
        raise InvalidSchedule(f"it has not exactly one of {', '.join(KINDS)}")


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "cron_expr": _or_none(as_cron),
    "every": _or_none(lambda value: _ms(value, "every", least=1.0)),
    "anchor": _or_none(lambda value: read_ms(value, "anchor", InvalidSchedule)),
    "at": _or_none(lambda value: read_ms(value, "at", InvalidSchedule)),
    "start": _or_none(lambda value: read_ms(value, "start", InvalidSchedule)),
    "end": _or_none(lambda value: read_ms(value, "end", InvalidSchedule)),
    "windows": _or_none(_check_windows),
    "max_runs": _or_none(lambda value: check_count(value, "max_runs", InvalidSchedule, least=1)),
    "misfire": lambda value: _check_choice(value, "misfire", MISFIRES),
    "catch_up": lambda value: _ms(value, "catch_up"),
    "max_catch_up": lambda value: check_count(
        value, "max_catch_up", InvalidSchedule, least=1, most=MOST_CATCH_UP
    ),
    "jitter": lambda value: _ms(value, "jitter", most=MOST_JITTER_S),
    "retries": _or_none(lambda value: check_count(value, "retries", InvalidSchedule)),
    "backoff": _or_none(lambda value: check_backoff(value, InvalidSchedule)),
    "backoff_cap": _or_none(lambda value: check_seconds(value, "backoff_cap", InvalidSchedule)),
    "backoff_multiplier": _or_none(lambda value: check_multiplier(value, InvalidSchedule)),
    "backoff_jitter": _or_none(
        lambda value: check_jitter(value, InvalidSchedule, "backoff_jitter")
    ),
    "timeout": _or_none(lambda value: check_timeout(value, InvalidSchedule)),
    "max_failures": _or_none(
        lambda value: check_count(value, "max_failures", InvalidSchedule, least=1)
    ),
    "tenant": _or_none(lambda value: check_tenant(value, InvalidSchedule)),
    "title": lambda value: check_name(value, "title", InvalidSchedule) if value else None,
    "description": lambda value: _check_description(value) if value else None,
    "created_by": _or_none(lambda value: check_name(value, "created_by", InvalidSchedule)),
    "user_id": lambda value: check_name(value, "user_id", InvalidSchedule),
    "name": lambda value: check_name(value, "name", InvalidSchedule),
    "priority": lambda value: check_priority(value, InvalidSchedule),
    "payload": lambda value: check_payload({} if value is None else value),
    "metadata": lambda value: check_payload({} if value is None else value, "metadata"),
    "overlap": lambda value: _check_choice(value, "overlap", OVERLAPS),
    "is_active": _check_active,
    "next_run": lambda value: read_ms(value, "next_run", InvalidSchedule),
}


def _check_next_run(next_ms: int, now_ms: int) -> int:
    if next_ms <= now_ms:
        raise InvalidSchedule(
            f"next_run {from_ms(next_ms).isoformat()} is in the past: a moment after "
            f"{from_ms(now_ms).isoformat()}"
        )
    return next_ms


def _replans(patch: Mapping[str, Any]) -> bool:
    return any(field in patch for field in PLANNING)


def fields_of(definition: Definition) -> dict[str, Any]:
    """What its user wrote, field by field."""
    plain = {field: getattr(definition, field) for field in FIELDS if field not in USUAL}
    return plain | definition.rare


def user_form(name: str, value: Any) -> Any:
    """The value of a field as its user would give it, which for times is not as it is stored."""
    if value is None or name not in (*_MOMENTS, *_DURATIONS):
        return _copied(value)
    return from_ms(value) if name in _MOMENTS else value / 1000


def _patched(before: dict[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """The fields after a change. A rule of another kind takes the place of the old one."""
    fields = before | {name: value for name, value in patch.items() if name in before}
    kinds = [kind for kind in KINDS if patch.get(kind) is not None]
    if len(kinds) > 1:
        raise InvalidSchedule(f"a schedule needs one of {', '.join(KINDS)}; {kinds} are given")
    for kind in KINDS:
        if kinds and kind != kinds[0]:
            fields[kind] = None
    if all(fields[kind] is None for kind in KINDS):
        raise InvalidSchedule(f"a schedule needs one of {', '.join(KINDS)}; none would be left")
    if "anchor" not in patch and (kinds or "start" in patch):
        fields["anchor"] = None
    return fields


def _anchored(fields: dict[str, Any], now_ms: int) -> dict[str, Any]:
    """An interval counts from its start, or from when it was made: it does not drift."""
    if fields["every"] is None or fields["anchor"] is not None:
        return fields
    return fields | {"anchor": now_ms if fields["start"] is None else fields["start"]}


def recurrence_of(schedule_id: str, timezone: str, rare: Mapping[str, Any]) -> Recurrence:
    """The moments of a rule. Raises InvalidSchedule and its kin, naming the value."""
    limits = {name: rare[name] for name in LIMITS if rare[name] is not None}
    form: dict[str, Any] = {"timezone": timezone}
    if rare["every"] is not None:
        form |= {"every": rare["every"], "anchor": rare["anchor"] or 0}
    elif rare["at"] is not None:
        form["at"] = rare["at"]
    elif not limits and "H" not in str(rare["cron_expr"]):
        return compile_recurrence(rare["cron_expr"], timezone)  # as almost all are
    else:
        form["cron"] = rare["cron_expr"]
    if limits:
        form["limits"] = limits
    return compile_form(form, seed=schedule_id)


# Fields of a schedule that are its tasks' policy. Its `jitter` is that of its moments.
_POLICY = {
    "retries": "retries",
    "backoff": "backoff",
    "backoff_cap": "backoff_cap",
    "backoff_multiplier": "backoff_multiplier",
    "backoff_jitter": "jitter",
    "timeout": "timeout",
}


def policy_of(rare: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a schedule says about retries and time-out of its tasks; None if it says nothing."""
    policy = {inner: rare[name] for name, inner in _POLICY.items() if rare[name] is not None}
    return policy or None


def _fail_limit(rare: Mapping[str, Any]) -> str:
    limit = rare["max_failures"]
    return "" if limit is None else f',"fail_limit":{limit}'


def _paused_moments(definition: Definition, state: Mapping[str, Any], now_ms: int) -> str:
    """The moments that passed while it was paused, as they are noted.

    With them go those that had come before the pause and were not fired yet.
    """
    paused, last_run = state.get("paused"), state.get("last_run")
    if not isinstance(paused, int | float):
        return ""
    fired = min(last_run, paused) if isinstance(last_run, int | float) else 0
    since = max(definition.ruled_ms, fired)
    try:
        recurrence = definition.recurrence
    except InvalidSchedule:
        return ""  # it had none then
    first, last = recurrence.next_ms(int(since)), recurrence.latest_ms(now_ms)
    if first is None or last is None or first > last:
        return ""
    return stretch(first, last, recurrence.count(first, last + 1, MISSED_CAP), "paused")


def _becomes_active(patch: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """'1' or '0' where the patch changes it, '' where it stays.

    What the scheduler disabled for its cron comes back with a new cron; what is paused stays so.
    """
    if "is_active" in patch:
        wanted = bool(patch["is_active"])
        if wanted and state.get("active") and not _replans(patch):
            return ""
        return "1" if wanted else "0"
    set_aside = state.get("reason") and not state.get("paused")
    if set_aside and (_replans(patch) or "next_run" in patch):
        return "1"
    return ""


def _first_moment(schedule_id: str, fields: Mapping[str, Any], now_ms: int) -> tuple[int, int]:
    """The next moment after now, and when to act on it."""
    recurrence = recurrence_of(schedule_id, fields["timezone"], fields)
    moment = recurrence.next_ms(now_ms)
    if moment is None:
        kind = next(kind for kind in KINDS if fields[kind] is not None)
        if past := past_moment(fields, now_ms):
            raise InvalidSchedule(f"{past}: it would never run")
        error = InvalidCron if kind == "cron_expr" else InvalidSchedule
        raise error(
            f"{kind} {_shown(kind, fields[kind])!r} has no moment in the years to come in "
            f"{fields['timezone']}, within its limits"
        )
    rules = Rules(schedule_id=schedule_id, recurrence=recurrence, jitter_ms=fields["jitter"])
    return moment, due_ms(rules, moment)


def past_moment(fields: Mapping[str, Any], now_ms: int) -> str | None:
    """Which of its moments is why a rule has none to come, in words; None if it is none of them."""
    for name in ("at", "end"):
        if fields[name] is not None and fields[name] <= now_ms:
            return f"{name} {from_ms(fields[name]).isoformat()} is in the past"
    return None


def _shown(kind: str, value: Any) -> str:
    """A rule as its user would write it."""
    if kind == "at":
        return from_ms(value).isoformat()
    return str(timedelta(milliseconds=value)) if kind == "every" else str(value)


def _check_runs(schedule_id: str, fields: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raises InvalidSchedule where an active schedule has no run left."""
    most, runs = fields["max_runs"], state.get("runs", 0)
    if most is not None and isinstance(runs, int | float) and runs >= most:
        raise InvalidSchedule(
            f"max_runs {most} is no more than the {int(runs)} runs that schedule {schedule_id!r} "
            "has had: give a higher one, or None"
        )


def _stays_known(
    patch: Mapping[str, Any],
    plan: bytes | None,
    state: Mapping[str, Any],
    active: str,
    next_ms: int | str,
) -> bool:
    """Whether it is still known after an update what became of the moments before it.

    So it is where the rule stays and the plan goes on, or stops and goes on by a pause.
    """
    if _replans(patch) or "next_run" in patch:
        return False
    if active == "" and next_ms == "":
        return True
    was_set = SET_MARK.encode() in (plan or b"")
    return not was_set and (active == "0" or isinstance(state.get("paused"), int | float))


def _definition_text(
    fields: Mapping[str, Any],
    *,
    created_by: str | None,
    created_ms: int,
    updated_ms: int,
    ruled_ms: int | None = None,
) -> str:
    """What is stored. Raises InvalidPayload when payload or metadata are too large."""
    record = {
        name: fields[name]
        for name in FIELDS
        if name not in ("payload", "metadata") and fields[name] != USUAL.get(name)
    }
    record |= {"priority": int(fields["priority"]), "created": created_ms, "updated": updated_ms}
    record["engine"] = ENGINE
    if created_by is not None:
        record["created_by"] = created_by
    if ruled_ms not in (None, created_ms):
        record["ruled"] = ruled_ms
    metadata = encode_json(fields["metadata"], "metadata", MAX_METADATA_BYTES)
    return (
        f"{encode_json(record, 'schedule', MAX_PAYLOAD_BYTES)[:-1]},"
        f'"metadata":{metadata},"payload":{encode_payload(fields["payload"])}}}'
    )


def _read_state(text: bytes | None) -> dict[str, Any]:
    """Parse a stored state, without fields of a wrong type, as lua/lib/schedule_state.lua does.

    The next fire makes it good; until then the rest of it can be told.
    """
    try:
        state = json.loads(text or b"{}")
    except UNREADABLE:
        return {}
    if not isinstance(state, dict):
        return {}
    return {name: value for name, value in state.items() if _can_be(name, value)}


def _are_active(texts: Sequence[bytes | None]) -> list[bool]:
    """Whether states are of active schedules, as `_read_state` says it, without all the rest."""
    whole = [text or b"{}" for text in texts]
    try:
        states = json.loads(b"[" + b",".join(whole) + b"]")  # a fourth of the time of one by one
    except UNREADABLE:
        states = []
    if len(states) != len(whole):  # somebody has spoilt one
        states = [_read_state(text) for text in whole]
    return [isinstance(state, dict) and state.get("active") is True for state in states]


def _title_in(state: bytes) -> str:
    """The title in the text of a state: to read all of it takes ten times as long.

    In JSON a quote inside a value has a backslash before it: nothing else can be taken for it.
    """
    found = _TITLE.search(state)
    if found is None:
        return ""
    try:
        return str(json.loads(found[1])) if b"\\" in found[1] else found[1][1:-1].decode()
    except ValueError:
        return ""  # somebody has spoilt it


def _can_be(name: str, value: Any) -> bool:
    kind = _STATE_KINDS.get(name, type(value))
    if kind is not float:
        return isinstance(value, kind)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= LATEST_MS


def _scheduled_task(
    schedule_id: str, text: bytes, plan: bytes | None, state_text: bytes | None
) -> ScheduledTask:
    definition = read_definition(schedule_id, text)
    rare = definition.rare
    state = _read_state(state_text)
    revision, _, nominal = (plan or b"").decode(errors="replace").partition(" ")
    active = bool(state.get("active"))
    try:
        return ScheduledTask(
            schedule_id=schedule_id,
            cron_expr=rare["cron_expr"] or "",
            user_id=definition.user_id,
            priority=definition.priority,
            # Copies: definitions are kept, and the caller may change what it is given.
            payload=_copied(definition.payload),
            timezone=definition.timezone,
            name=definition.name,
            metadata=_copied(definition.metadata),
            is_active=active,
            disabled_reason=state.get("reason"),
            created_at=from_ms(definition.created_ms),
            updated_at=from_ms(definition.updated_ms),
            last_run=_moment(state.get("last_run")),
            next_run=_moment(_read_ms(nominal)) if active else None,
            run_count=int(state.get("runs", 0)),
            missed_count=int(state.get("missed", 0)),
            overlap=definition.overlap,
            skipped_count=int(state.get("skipped", 0)),
            every=None if rare["every"] is None else timedelta(milliseconds=rare["every"]),
            at=_moment(rare["at"]),
            start=_moment(rare["start"]),
            end=_moment(rare["end"]),
            windows=_copied(rare["windows"]),
            exclude=_copied(rare["exclude"]),
            max_runs=rare["max_runs"],
            misfire=rare["misfire"],
            catch_up=rare["catch_up"] / 1000,
            max_catch_up=rare["max_catch_up"],
            jitter=rare["jitter"] / 1000,
            retries=rare["retries"],
            backoff=_copied(rare["backoff"]),
            backoff_cap=rare["backoff_cap"],
            backoff_multiplier=rare["backoff_multiplier"],
            backoff_jitter=rare["backoff_jitter"],
            timeout=rare["timeout"],
            max_failures=rare["max_failures"],
            failures_in_a_row=int(state.get("failures", 0)),
            paused_at=_moment(state.get("paused")),
            paused_by=state.get("by"),
            pause_note=state.get("note"),
            paused_until=_moment(state.get("until")),
            tenant=rare["tenant"],
            title=rare["title"],
            description=rare["description"],
            created_by=definition.created_by,
            revision=revision,
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise BrokenRecord(
            f"the state of schedule {schedule_id!r} is unreadable: {error}"
        ) from None


def _copied(value: Any) -> Any:
    """A copy of a JSON value; copy.deepcopy takes five times as long."""
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _stale(schedule_id: str) -> StaleVersion:
    return StaleVersion(
        f"schedule {schedule_id!r} was changed since you read it: read it again, then change it"
    )


def _problem(name: bytes, text: bytes) -> Problem:
    schedule_id = name.decode(errors="backslashreplace")
    try:
        record = json.loads(text)
        return Problem(
            schedule_id=schedule_id,
            reason=str(record["reason"]),
            since=from_ms(int(record["since"])),
        )
    except UNREADABLE:
        return Problem(
            schedule_id=schedule_id,
            reason=f"the record of the problem is unreadable: {text[:200]!r}",
            since=from_ms(0),
        )


def _read_ms(text: str) -> int | None:
    """A moment of a plan; None where there is none, or none that could be."""
    moment_ms = int(text) if _MS.fullmatch(text) else None
    return moment_ms if moment_ms is not None and moment_ms <= LATEST_MS else None


def _moment(value: float | None) -> datetime | None:
    return None if value is None else from_ms(int(value))


def _is_text(member: bytes) -> bool:
    try:
        member.decode()
    except UnicodeDecodeError:
        return False
    return True


def _encode_cursor(member: bytes) -> str:
    return base64.urlsafe_b64encode(member).decode()


def _decode_cursor(cursor: object, user_id: str | None) -> bytes:
    try:
        if not isinstance(cursor, str):
            raise TypeError("no string")
        member = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
        if b"\0" not in member or not _is_text(member):
            raise ValueError("no member")
    except (ValueError, TypeError):
        raise InvalidSchedule(
            f"cursor {shown(cursor)} is none: pass the `cursor` of a page"
        ) from None
    if user_id is not None and not member.startswith(f"{user_id}\0".encode()):
        # Going on from there would list the schedules of others.
        raise InvalidSchedule(
            f"cursor {shown(cursor)} is of a page of another user than {user_id!r}"
        )
    return member
