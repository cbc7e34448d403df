"""Keep schedules in Redis: what users wrote, and what is planned from it."""

import base64
import copy
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any

from fairqueue.clock import from_ms, to_ms
from fairqueue.connection import Argument, Link
from fairqueue.errors import (
    BrokenRecord,
    InvalidCron,
    InvalidSchedule,
    ScheduleConflict,
)
from fairqueue.models import (
    DEFAULT_NAME,
    Page,
    Problem,
    ScheduledTask,
    encode_payload,
    new_id,
    status_head,
    task_document,
)
from fairqueue.recurrence import Recurrence, compile_recurrence
from fairqueue.validation import (
    MAX_NAME_LENGTH,
    MAX_PAYLOAD_BYTES,
    Priority,
    check_count,
    check_name,
    check_payload,
    check_priority,
    encode_json,
)

MAX_ADDED = 10_000  # schedules in one call, which is one script: some 0.1 s of the server's time
MAX_LISTED = 1000  # schedules on one page
MAX_WALKED = 10_000  # schedules looked at for one page when a filter matches few
MAX_PROBLEMS = 1000
MAX_METADATA_BYTES = 16 * 1024
DEFINITIONS_KEPT = 20_000  # parsed definitions in memory, some 2 KiB each

# Characters of a schedule's id, so that `<schedule_id>:<time in ms>` is an id for TaskQueue.get.
MAX_ID_LENGTH = MAX_NAME_LENGTH - 16

FIELDS = ("cron_expr", "user_id", "priority", "payload", "timezone", "name", "metadata", "overlap")
OVERLAPS = ("allow", "skip", "buffer_one", "cancel_previous")
# Fields that are stored only where they differ from these.
USUAL = {"overlap": "allow"}
_FIELD_TYPES = {"cron_expr": str, "timezone": str, "payload": dict, "metadata": dict}
PATCHABLE = (*FIELDS, "is_active", "next_run")


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a user wrote, read back: ready to be fired."""

    schedule_id: str
    cron_expr: str
    timezone: str
    user_id: str
    priority: Priority
    payload: dict[str, Any]
    name: str
    metadata: dict[str, Any]
    overlap: str
    created_ms: int
    updated_ms: int
    status_head: str
    document_head: str
    document_tail: str

    @property
    def recurrence(self) -> Recurrence:
        """Its moments. Raises InvalidCron or UnknownTimezone if it has none (any more)."""
        return compile_recurrence(self.cron_expr, self.timezone)

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
        overlap = _check_overlap(record.get("overlap", USUAL["overlap"]))
        priority = check_priority(record["priority"])
        payload, metadata = record["payload"], record["metadata"]
        # What was read from JSON needs no closer look than this.
        for field, kind in _FIELD_TYPES.items():
            if not isinstance(record[field], kind):
                raise InvalidSchedule(f"{field} is no {kind.__name__}")
        head, mark, tail = task_document(
            user_id, name, priority, _stored_payload(stored, record), schedule_id, 0
        ).partition('"scheduled_for":0')
        return Definition(
            schedule_id=schedule_id,
            cron_expr=record["cron_expr"],
            timezone=record["timezone"],
            user_id=user_id,
            priority=priority,
            payload=payload,
            name=name,
            metadata=metadata,
            overlap=overlap,
            created_ms=int(record["created"]),
            updated_ms=int(record["updated"]),
            status_head=status_head(user_id, name, priority)
            + f',"schedule":{encode_basestring(schedule_id)},"type":"scheduled"',
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


class ScheduleStore:
    """The schedules of one queue."""

    def __init__(self, link: Link) -> None:
        self._link = link

    # --- changing ---------------------------------------------------------------------------------

    def add(self, specs: Sequence[Mapping[str, Any]], on_conflict: str) -> list[str]:
        """Store new schedules, all or none; their ids.

        Raises InvalidSchedule and its kin for bad input, ScheduleConflict for an id that is taken
        when `on_conflict` is "error".
        """
        if on_conflict not in ("error", "replace"):
            raise InvalidSchedule(f"on_conflict {on_conflict!r} is neither 'error' nor 'replace'")
        if len(specs) > MAX_ADDED:
            raise InvalidSchedule(f"{len(specs)} schedules in one call: at most {MAX_ADDED}")
        checked = [_check_spec(spec) for spec in specs]
        ids = [schedule_id for schedule_id, _ in checked]
        if len(set(ids)) != len(ids):
            twice = Counter(ids).most_common(1)[0][0]
            raise InvalidSchedule(f"schedule_id {twice!r} is given twice in one call")
        if not ids:
            return []
        operation = new_id()
        while True:
            now_ms = self._link.now_ms()
            rest: list[Argument] = []
            for schedule_id, fields in checked:
                text = _definition_text(fields, created_ms=now_ms, updated_ms=now_ms)
                next_ms = _first_moment(fields["cron_expr"], fields["timezone"], now_ms)
                rest += [schedule_id, fields["user_id"], text, new_id(), next_ms]
            answer = self._link.run(
                "add_schedules", op=operation, client_now=now_ms, on_conflict=on_conflict, rest=rest
            )
            if answer[0] == b"exists":
                raise ScheduleConflict(
                    f"schedule_id {answer[1].decode()!r} is taken: nothing was stored; pass "
                    "on_conflict='replace' to replace it, or use update_schedule"
                )
            if answer[0] == b"added":
                return ids
            self._link.learn_time(int(answer[1]))

    def update(self, schedule_id: str, changes: Mapping[str, Any]) -> bool:
        """Change some fields of a schedule; False if there is none.

        Reads, changes and writes back only if nobody else has written in between, else starts
        over: concurrent updates of different fields all take effect.
        """
        _check_id(schedule_id)
        patch = _check_patch(changes)
        deadline = time.monotonic() + self._link.timeout
        while time.monotonic() < deadline:
            word = self._try_update(schedule_id, patch)
            if word in (b"updated", b"absent"):
                return word == b"updated"
        raise ScheduleConflict(
            f"schedule {schedule_id!r} was changed by others again and again: nothing was stored"
        )

    def _try_update(self, schedule_id: str, patch: dict[str, Any]) -> bytes:
        text, plan, state_text = self._link.ask(
            ("HGET", self._link.keys["schedules"], schedule_id),
            ("HGET", self._link.keys["plan"], schedule_id),
            ("HGET", self._link.keys["schedule_state"], schedule_id),
        )
        if text is None:
            return b"absent"
        now_ms = self._link.now_ms()
        old = read_definition(schedule_id, text)
        state = _read_state(state_text)
        fields = {field: patch.get(field, getattr(old, field)) for field in FIELDS}
        active = _becomes_active(patch, state)
        next_ms: int | str = ""
        if "next_run" in patch:
            if active == "" and not state.get("active"):
                raise InvalidSchedule(
                    f"next_run cannot be set: schedule {schedule_id!r} is not active; pass "
                    "is_active=True with it"
                )
            next_ms = _check_next_run(patch["next_run"], now_ms)
        elif active == "1" or (active == "" and state.get("active") and _replans(patch)):
            next_ms = _first_moment(fields["cron_expr"], fields["timezone"], now_ms)
        answer = self._link.run(
            "update_schedule",
            op=new_id(),
            client_now=now_ms,
            id=schedule_id,
            expected=text,
            base=(plan or b"").partition(b" ")[0],
            definition=_definition_text(fields, created_ms=old.created_ms, updated_ms=now_ms),
            user=fields["user_id"],
            revision=new_id(),
            next_ms=next_ms,
            active=active,
        )
        if answer[0] == b"skewed":
            self._link.learn_time(int(answer[1]))
        return bytes(answer[0])

    def remove(self, schedule_id: str) -> bool:
        """Forget a schedule; False if there is none."""
        _check_id(schedule_id)
        return bool(self._link.run("remove_schedule", op=new_id(), id=schedule_id) == b"removed")

    # --- looking ----------------------------------------------------------------------------------

    def get(self, schedule_id: str) -> ScheduledTask | None:
        """A schedule, or None. Raises BrokenRecord if it cannot be read."""
        _check_id(schedule_id)
        return self._read([schedule_id.encode()])[0]

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
            raise InvalidSchedule(f"is_active {is_active!r} is neither True, False nor None")
        start, stop = ("-", "+") if user_id is None else (f"[{user_id}\0", f"({user_id}\1")
        if cursor is not None:
            start = "(" + _decode_cursor(cursor, user_id)
        index = self._link.keys["schedule_index"]
        found: list[ScheduledTask] = []
        walked = 0
        while True:
            want = limit if is_active is None else MAX_LISTED
            members = self._link.ask(("ZRANGE", index, start, stop, "BYLEX", "LIMIT", 0, want))[0]
            for member, task in zip(members, self._read_members(members), strict=True):
                start = "(" + member.decode()
                if task is not None and is_active in (None, task.is_active):
                    found.append(task)
                    if len(found) == limit:
                        return Page(found, _encode_cursor(start[1:]))
            walked += len(members)
            if len(members) < want:
                return Page(found, None)
            if walked >= MAX_WALKED:
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

    def _read_members(self, members: Sequence[bytes]) -> Sequence[ScheduledTask | None]:
        ids = [member.partition(b"\0")[2] for member in members]
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
                    None if text is None else _scheduled_task(name.decode(), text, plan, state)
                )
            except BrokenRecord:
                if not skip_broken:
                    raise
                tasks.append(None)
        return tasks


def _check_id(schedule_id: object) -> str:
    return check_name(schedule_id, "schedule_id", InvalidSchedule, most=MAX_ID_LENGTH)


def _check_spec(spec: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The id and the checked fields of a new schedule."""
    if not isinstance(spec, Mapping):
        raise InvalidSchedule(f"{spec!r} is no schedule: a dict of the fields {', '.join(FIELDS)}")
    given = {name: value for name, value in spec.items() if name != "schedule_id"}
    for name in ("cron_expr", "user_id"):
        if name not in given:
            raise InvalidSchedule(f"a schedule needs {name}; this one has {sorted(given)}")
    defaults = {
        "priority": Priority.NORMAL,
        "payload": {},
        "timezone": "UTC",
        "name": DEFAULT_NAME,
        "metadata": {},
        **USUAL,
    }
    fields = _check_fields(defaults | given, FIELDS)
    schedule_id = spec.get("schedule_id")
    return (new_id() if schedule_id is None else _check_id(schedule_id)), fields


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
            raise InvalidSchedule(f"unknown field {name!r}: known are {', '.join(known)}")
    fields = {name: _CHECKS[name](value) for name, value in given.items() if name in _CHECKS}
    if "cron_expr" in given or "timezone" in given:
        compile_recurrence(given.get("cron_expr", "* * * * *"), given.get("timezone", "UTC"))
    return {**given, **fields}


def _check_active(value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidSchedule(f"is_active {value!r} is neither True nor False")
    return value


def _check_overlap(value: object) -> str:
    if value not in OVERLAPS:
        raise InvalidSchedule(f"overlap {value!r} is none of {', '.join(OVERLAPS)}")
    return str(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "user_id": lambda value: check_name(value, "user_id", InvalidSchedule),
    "name": lambda value: check_name(value, "name", InvalidSchedule),
    "priority": lambda value: check_priority(value, InvalidSchedule),
    "payload": lambda value: check_payload({} if value is None else value),
    "metadata": lambda value: check_payload({} if value is None else value, "metadata"),
    "overlap": _check_overlap,
    "is_active": _check_active,
    "next_run": lambda value: to_ms(value, "next_run", InvalidSchedule),
}


def _check_next_run(next_ms: int, now_ms: int) -> int:
    if next_ms <= now_ms:
        raise InvalidSchedule(
            f"next_run {from_ms(next_ms).isoformat()} is in the past: a moment after "
            f"{from_ms(now_ms).isoformat()}"
        )
    return next_ms


def _replans(patch: Mapping[str, Any]) -> bool:
    return "cron_expr" in patch or "timezone" in patch


def _becomes_active(patch: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """'1' or '0' where the patch changes it, '' where it stays.

    What the scheduler disabled for its cron comes back with a new cron; what a user has switched
    off stays off.
    """
    if "is_active" in patch:
        wanted = bool(patch["is_active"])
        if wanted and state.get("active") and not _replans(patch):
            return ""
        return "1" if wanted else "0"
    if state.get("reason") and (_replans(patch) or "next_run" in patch):
        return "1"
    return ""


def _first_moment(cron_expr: str, timezone: str, now_ms: int) -> int:
    moment = compile_recurrence(cron_expr, timezone).next_ms(now_ms)
    if moment is None:
        raise InvalidCron(f"{cron_expr!r} has no moment in the years to come in {timezone}")
    return moment


def _definition_text(fields: Mapping[str, Any], *, created_ms: int, updated_ms: int) -> str:
    """What is stored. Raises InvalidPayload when payload or metadata are too large."""
    record = {
        name: fields[name]
        for name in FIELDS
        if name not in ("payload", "metadata") and fields[name] != USUAL.get(name)
    }
    record |= {"priority": int(fields["priority"]), "created": created_ms, "updated": updated_ms}
    metadata = encode_json(fields["metadata"], "metadata", MAX_METADATA_BYTES)
    return (
        f"{encode_json(record, 'schedule', MAX_PAYLOAD_BYTES)[:-1]},"
        f'"metadata":{metadata},"payload":{encode_payload(fields["payload"])}}}'
    )


def _read_state(text: bytes | None) -> dict[str, Any]:
    try:
        state = json.loads(text or b"{}")
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def _scheduled_task(
    schedule_id: str, text: bytes, plan: bytes | None, state_text: bytes | None
) -> ScheduledTask:
    definition = read_definition(schedule_id, text)
    state = _read_state(state_text)
    nominal = (plan or b"").partition(b" ")[2]
    active = bool(state.get("active"))
    try:
        return ScheduledTask(
            schedule_id=schedule_id,
            cron_expr=definition.cron_expr,
            user_id=definition.user_id,
            priority=definition.priority,
            # Copies: definitions are kept, and the caller may change what it is given.
            payload=copy.deepcopy(definition.payload),
            timezone=definition.timezone,
            name=definition.name,
            metadata=copy.deepcopy(definition.metadata),
            is_active=active,
            disabled_reason=state.get("reason"),
            created_at=from_ms(definition.created_ms),
            updated_at=from_ms(definition.updated_ms),
            last_run=_moment(state.get("last_run")),
            next_run=from_ms(int(nominal)) if active and nominal.isdigit() else None,
            run_count=int(state.get("runs", 0)),
            missed_count=int(state.get("missed", 0)),
            overlap=definition.overlap,
            skipped_count=int(state.get("skipped", 0)),
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise BrokenRecord(
            f"the state of schedule {schedule_id!r} is unreadable: {error}"
        ) from None


def _problem(name: bytes, text: bytes) -> Problem:
    schedule_id = name.decode(errors="backslashreplace")
    try:
        record = json.loads(text)
        return Problem(
            schedule_id=schedule_id,
            reason=str(record["reason"]),
            since=from_ms(int(record["since"])),
        )
    except (ValueError, TypeError, KeyError, OverflowError):
        return Problem(
            schedule_id=schedule_id,
            reason=f"the record of the problem is unreadable: {text[:200]!r}",
            since=from_ms(0),
        )


def _moment(value: float | None) -> datetime | None:
    return None if value is None else from_ms(int(value))


def _encode_cursor(member: str) -> str:
    return base64.urlsafe_b64encode(member.encode()).decode()


def _decode_cursor(cursor: object, user_id: str | None) -> str:
    try:
        if not isinstance(cursor, str):
            raise TypeError("no string")
        member = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode()
        if "\0" not in member:
            raise ValueError("no member")
    except (ValueError, TypeError):
        raise InvalidSchedule(f"cursor {cursor!r} is none: pass the `cursor` of a page") from None
    if user_id is not None and not member.startswith(f"{user_id}\0"):
        # Going on from there would list the schedules of others.
        raise InvalidSchedule(f"cursor {cursor!r} is of a page of another user than {user_id!r}")
    return member
