"""The definition of a schedule: what its user wrote, as it is stored and read back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.errors import BrokenRecord, InvalidSchedule
from fairqueue.models import (
    ScheduledTask,
    encode_payload,
    group_of,
    origin_fields,
    status_head,
    task_document,
    text_or_none,
)
from fairqueue.recurrence.kinds import Recurrence, compile_form, compile_recurrence
from fairqueue.retry_policy import encode_policy, status_fields
from fairqueue.schedules.fields import (
    FIELDS,
    KINDS,
    NARROWING,
    OPTIONAL,
    STORED,
    copied,
    encode_object,
    flow_of,
)
from fairqueue.schedules.plan import Plan
from fairqueue.schedules.planning import Rules
from fairqueue.schedules.state import number_in
from fairqueue.validation import (
    MAX_PAYLOAD_BYTES,
    Priority,
    check_name,
    check_priority,
    encode_json,
)

DEFINITIONS_KEPT = 20_000  # parsed definitions in memory, some 2 KiB each
ENGINE = 1  # version of the rules by which fire times are computed: stored with each schedule
_TYPES = {"timezone": str, "payload": dict, "metadata": dict}
_POLICY = {each.name: each.policy for each in FIELDS.values() if each.policy}
# What is not shown as it is stored. Lists and objects are copied, because definitions are cached
# and callers may change what they get.
_CONVERTED = tuple(
    (name, FIELDS[name].to_user)
    for name in OPTIONAL
    if FIELDS[name].kind in ("time", "duration", "object", "windows", "dates", "backoff", "texts")
)
_ALWAYS = tuple(name for name in STORED if name not in OPTIONAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTexts:
    """What the scripts store of each task of a schedule, up to its fire time."""

    status_head: str
    document_head: str
    document_tail: str

    def document(self, moment_ms: int) -> str:
        """Return the document of the task that fires at a time."""
        return f"{self.document_head}{moment_ms}{self.document_tail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a user wrote, read back: ready to be fired.

    options: the fields that are stored only if they differ from their defaults.
    ruled_ms: since when the present rule applies, and the outcome of each fire time is known.
    """

    schedule_id: str
    timezone: str
    user_id: str
    priority: Priority
    payload: dict[str, Any]
    name: str
    metadata: dict[str, Any]
    options: dict[str, Any]
    created_by: str | None
    created_ms: int
    updated_ms: int
    ruled_ms: int
    texts: TaskTexts

    @property
    def fields(self) -> dict[str, Any]:
        """What its user wrote, field by field, as stored."""
        return {name: getattr(self, name) for name in _ALWAYS} | self.options

    @property
    def recurrence(self) -> Recurrence:
        """Its fire times. Raises InvalidCron or UnknownTimezone if it has none (any more)."""
        return recurrence_of(self.schedule_id, self.timezone, self.options)

    @property
    def rules(self) -> Rules:
        """What decides what it fires. Raises as `recurrence` does."""
        options = self.options
        return Rules(
            schedule_id=self.schedule_id,
            recurrence=self.recurrence,
            misfire=options["misfire"],
            catch_up_ms=options["catch_up"],
            max_catch_up=options["max_catch_up"],
            jitter_ms=options["jitter"],
        )

    @property
    def overlap(self) -> str:
        """What happens at a fire time while a task of it is unfinished."""
        return str(self.options["overlap"])

    @property
    def rule_text(self) -> str:
        """Its rule as its user wrote it."""
        return rule_text(self.options)


@lru_cache(maxsize=DEFINITIONS_KEPT)
def read_definition(schedule_id: str, text: bytes) -> Definition:
    """Read a stored definition. Raises BrokenRecord, saying what is wrong with it."""
    try:
        stored = text.decode()
        record = json.loads(stored)
        user_id = check_name(record["user_id"], "user_id")
        name = check_name(record["name"], "name")
        given = {field: record[field] for field in record.keys() & OPTIONAL.keys()}
        for field, value in given.items():
            FIELDS[field].check_stored(value)
        options = {**OPTIONAL, **given}
        if sum(options[kind] is not None for kind in KINDS) != 1:
            raise InvalidSchedule(f"it must have exactly one of {', '.join(KINDS)}")
        priority = check_priority(record["priority"])
        # What was read from JSON needs no closer look than this.
        for field, kind in _TYPES.items():
            if not isinstance(record[field], kind):
                raise InvalidSchedule(f"{field} must be a {kind.__name__}")
        return Definition(
            schedule_id=schedule_id,
            timezone=record["timezone"],
            user_id=user_id,
            priority=priority,
            payload=record["payload"],
            name=name,
            metadata=record["metadata"],
            options=options,
            created_by=text_or_none(record.get("created_by")),
            created_ms=int(record["created"]),
            updated_ms=int(record["updated"]),
            ruled_ms=int(record.get("ruled", record["created"])),
            texts=task_texts(
                schedule_id, user_id, name, priority, _stored_payload(stored, record), options
            ),
        )
    except KeyError as error:
        raise BrokenRecord(f"schedule {schedule_id!r} has no field {error}") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BrokenRecord(f"schedule {schedule_id!r} is unreadable: {error}") from None


def _stored_payload(stored: str, record: dict[str, Any]) -> str:
    """Return the payload as it is in the text, rather than encode it; see `definition_text`."""
    _, mark, rest = stored.partition(',"metadata":{},"payload":')
    if mark and rest.endswith("}") and next(reversed(record)) == "payload":
        return rest[:-1]
    return encode_payload(record["payload"])


def task_texts(
    schedule_id: str,
    user_id: str,
    name: str,
    priority: Priority,
    payload: str,
    options: Mapping[str, Any],
    *,
    by: str | None = None,
    is_backfill: bool = False,
) -> TaskTexts:
    """Return what is stored of each task. `by`: who asked for it; `payload` is JSON.

    A task of a backfill has neither unique key nor expiry, as each fire time gets its own, and says
    nothing about the runs of today: its failures do not count.
    """
    origin, policy, flow = (
        {"by": by} | group_of(options["tenant"]),
        policy_of(options),
        flow_of(options),
    )
    if is_backfill:
        flow = flow.of_retry()
    head, mark, tail = task_document(
        user_id,
        name,
        priority,
        payload,
        schedule_id,
        0,
        origin=origin,
        policy=encode_policy(policy),
        flow=flow,
    ).partition('"scheduled_for":0')
    limit = None if is_backfill else options["max_failures"]
    return TaskTexts(
        status_head=status_head(user_id, name, priority)
        + f',"schedule":{encode_basestring(schedule_id)},"type":"scheduled"'
        + origin_fields(origin)
        + status_fields(policy)
        + flow.fields()
        + ("" if limit is None else f',"fail_limit":{limit}'),
        document_head=head + mark[:-1],
        document_tail=tail,
    )


def definition_text(
    fields: Mapping[str, Any],
    *,
    created_by: str | None,
    created_ms: int,
    updated_ms: int,
    ruled_ms: int | None = None,
) -> str:
    """Return the text to store. Raises InvalidPayload if payload or metadata are too large."""
    record = {
        name: fields[name]
        for name in STORED
        if name not in ("payload", "metadata")
        and (name not in OPTIONAL or fields[name] != OPTIONAL[name])
    }
    record |= {"priority": int(fields["priority"]), "created": created_ms, "updated": updated_ms}
    record["engine"] = ENGINE
    if created_by is not None:
        record["created_by"] = created_by
    if ruled_ms not in (None, created_ms):
        record["ruled"] = ruled_ms
    metadata, payload = encode_object(fields, "metadata"), encode_object(fields, "payload")
    return (
        f"{encode_json(record, 'schedule', MAX_PAYLOAD_BYTES)[:-1]},"
        f'"metadata":{metadata},"payload":{payload}}}'
    )


def recurrence_of(schedule_id: str, timezone: str, options: Mapping[str, Any]) -> Recurrence:
    """Return the fire times of a rule. Raises InvalidSchedule or a subclass naming the value."""
    limits = {name: options[name] for name in NARROWING if options[name] is not None}
    form: dict[str, Any] = {"timezone": timezone}
    if options["every"] is not None:
        form |= {"every": options["every"], "anchor": options["anchor"] or 0}
    elif options["at"] is not None:
        form["at"] = options["at"]
    elif not limits and "H" not in str(options["cron_expr"]):
        return compile_recurrence(options["cron_expr"], timezone)  # as almost all are
    else:
        form["cron"] = options["cron_expr"]
    if limits:
        form["limits"] = limits
    return compile_form(form, seed=schedule_id)


def rule_text(options: Mapping[str, Any]) -> str:
    """Return a rule as its user would write it, with the name of its field."""
    kind = next((kind for kind in KINDS if options[kind] is not None), "cron_expr")
    value = options[kind]
    if kind == "at":
        value = from_ms(value).isoformat()
    elif kind == "every":
        value = timedelta(milliseconds=value)
    return f"{kind} {str(value)!r}"


def policy_of(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the retry policy that a schedule gives to its tasks; None if it has none."""
    policy = {inner: options[name] for name, inner in _POLICY.items() if options[name] is not None}
    return policy or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A schedule with its state and its plan, as they are stored."""

    definition: Definition
    state: dict[str, Any]
    plan: Plan

    @property
    def is_active(self) -> bool:
        """Whether it is planned."""
        return bool(self.state.get("active"))

    def to_task(self) -> ScheduledTask:
        """Return it for users. Raises BrokenRecord if its state cannot be read."""
        definition, state = self.definition, self.state
        options = definition.options.copy()
        for name, to_user in _CONVERTED:
            if options[name] is not None:
                options[name] = to_user(options[name])
        del options["anchor"]  # only exports have it
        options["cron_expr"] = options["cron_expr"] or ""
        if options["every"] is not None:
            options["every"] = timedelta(seconds=options["every"])
        try:
            return ScheduledTask(
                **options,
                user_id=definition.user_id,
                priority=definition.priority,
                payload=copied(definition.payload),
                timezone=definition.timezone,
                name=definition.name,
                metadata=copied(definition.metadata),
                schedule_id=definition.schedule_id,
                is_active=self.is_active,
                disabled_reason=state.get("reason"),
                created_by=definition.created_by,
                created_at=from_ms(definition.created_ms),
                updated_at=from_ms(definition.updated_ms),
                last_run=self._time("last_run"),
                next_run=_datetime(self.plan.nominal_ms) if self.is_active else None,
                run_count=int(state.get("runs", 0)),
                missed_count=int(state.get("missed", 0)),
                skipped_count=int(state.get("skipped", 0)),
                failures_in_a_row=int(state.get("failures", 0)),
                paused_at=self._time("paused"),
                paused_by=state.get("by"),
                pause_note=state.get("note"),
                paused_until=self._time("until"),
                revision=self.plan.revision,
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise BrokenRecord(
                f"the state of schedule {definition.schedule_id!r} is unreadable: {error}"
            ) from None

    def _time(self, name: str) -> datetime | None:
        return _datetime(number_in(self.state, name))


def _datetime(moment_ms: int | None) -> datetime | None:
    return None if moment_ms is None else from_ms(moment_ms)
