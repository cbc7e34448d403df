"""The fields of a schedule: one table from which everything that takes or shows a field is made.

Definitions and their checks, import and export, the REST models and the OpenAPI document, the
options of `fairqueue schedules`, the form of the dashboard and the table in docs/schedules.md
follow from it. A new field takes a row here, and a line for type checkers in `ScheduleOptions` and
in `fairqueue.models.ScheduledTask`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypedDict

from fairqueue.clock import LATEST_MS, from_ms, read_ms
from fairqueue.errors import InvalidSchedule, safe_repr, shown
from fairqueue.flow_options import (
    DEFAULT_POOL,
    LEAST_COST,
    LONGEST_WINDOW_S,
    MOST_COST,
    SHORTEST_S,
    Flow,
    check_cost,
    check_flow,
    check_limit_keys,
    check_pool,
    check_unique_for,
)
from fairqueue.models import DEFAULT_NAME, encode_payload, new_id
from fairqueue.recurrence.frequency import as_cron
from fairqueue.recurrence.windows import check_windows
from fairqueue.recurrence.zones import find_zone
from fairqueue.retry_policy import MOST_MULTIPLIER, check_backoff
from fairqueue.validation import (
    MAX_NAME_LENGTH,
    Priority,
    check_count,
    check_name,
    check_number,
    check_payload,
    check_priority,
    check_seconds,
    check_tenant,
    check_text,
    encode_json,
)

MAX_ID_LENGTH = MAX_NAME_LENGTH - 16  # so that `<schedule_id>:<time in ms>` is the id of a task
MAX_DESCRIPTION_LENGTH = 4000  # characters
MAX_METADATA_BYTES = 16 * 1024
REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "required"})()


@dataclass(frozen=True, slots=True)
class ScheduleField:
    """One field of a schedule.

    kind: what its values are. It decides how they are checked and stored, and how each interface
        reads and shows them: text, lines (text of several lines), cron, zone, choice, priority,
        integer, number, time (stored in ms), duration (stored in ms), seconds (a duration that is
        stored in seconds), period (one of `choices`, or a duration that is stored in seconds),
        backoff, windows, dates, texts (a list of them), object (JSON) or flag (whose default must
        be True or False).
    default: as stored; None if the field is optional, REQUIRED if it must be given.
    help: what it means, in one sentence. hint: a second sentence, for the form only.
    label, group, place: its name and its place in the form; without a group it is not there.
    option: its names on the command line if not `--<name>`; None if it has none.
    choices: the values of a choice or a period, with what the form calls them.
    least, most: bounds of a number, in seconds for durations. For a text, most is its length.
    policy: its name in the retry policy of tasks, if it is a part of that.
    replans: changing it computes the next run again, from now.
    always: it is stored even if it has its default.
    adds, patches: it can be given for a new schedule, and in a change.
    bulk: it can be changed for many schedules at once. kept: replacing a job leaves it as it is.
    check_given: a check instead of that of its kind.
    """

    name: str
    kind: str
    default: Any
    help: str
    _: KW_ONLY
    hint: str = ""
    label: str = ""
    group: str = ""
    place: int = 50
    placeholder: str = ""
    option: tuple[str, ...] | None = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    least: float | None = None
    most: float | None = None
    policy: str = ""
    replans: bool = False
    always: bool = False
    adds: bool = True
    patches: bool = True
    bulk: bool = True
    kept: bool = False
    check_given: Callable[[Any], Any] | None = None

    def check(self, value: Any) -> Any:
        """Return a value as it is stored. Raises InvalidSchedule or a subclass naming the value."""
        if value is None and self.default is None:
            return None
        if self.check_given is not None:
            return self.check_given(value)
        return _CHECKS[self.kind](self, value)

    def check_stored(self, value: Any) -> None:
        """Raise InvalidSchedule for a stored value that cannot be used."""
        if value is None and self.default is None:
            return
        if self.kind in IN_MS:
            check_count(value, self.name, InvalidSchedule, most=LATEST_MS)
        elif self.kind == "cron" and not isinstance(value, str):
            raise InvalidSchedule(f"{self.name} must be a string, not {shown(value):.60}")
        elif self.kind in ("text", "lines", "choice", "integer", "flag", "period", "texts"):
            self.check(value)

    def to_user(self, value: Any) -> Any:
        """Return a stored value as users give it: times as datetimes, durations as seconds."""
        if value is None or self.kind not in IN_MS:
            return copied(value)
        return from_ms(value) if self.kind == "time" else value / 1000

    def to_document(self, value: Any) -> Any:
        """Return a stored value as documents have it: times in ISO 8601, whole seconds as such."""
        value = self.to_user(value)
        if isinstance(value, datetime):
            return value.isoformat()
        if self.kind == "priority" and value is not None:
            return int(value)
        return int(value) if isinstance(value, float) and value.is_integer() else value


def copied(value: Any) -> Any:
    """Copy a JSON value; copy.deepcopy takes five times as long."""
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


IN_MS = ("time", "duration")


def _bounds(each: ScheduleField) -> dict[str, Any]:
    given = {"least": each.least, "most": each.most}
    return {name: value for name, value in given.items() if value is not None}


def _check_choice(each: ScheduleField, value: object) -> str:
    if not isinstance(value, str) or value not in each.choices or not value:
        names = ", ".join(filter(None, each.choices))
        raise InvalidSchedule(f"{each.name} must be one of {names}, not {shown(value)}")
    return value


def _check_flag(each: ScheduleField, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidSchedule(f"{each.name} must be True or False, not {shown(value)}")
    return value


def _check_windows(each: ScheduleField, value: Any) -> Any:
    check_windows(value)
    return value


def _check_zone(each: ScheduleField, value: Any) -> Any:
    find_zone(value)
    return value


def _seconds(each: ScheduleField, value: object) -> float:
    return check_seconds(value, each.name, InvalidSchedule, **_bounds(each))


def _check_period(each: ScheduleField, value: object) -> str | float:
    return _check_choice(each, value) if isinstance(value, str) else _seconds(each, value)


def _check_texts(each: ScheduleField, value: object) -> list[str]:
    if not isinstance(value, list | tuple):
        raise InvalidSchedule(f"{each.name} must be a list of strings, not {shown(value)}")
    return [check_name(text, f"an item of {each.name}", InvalidSchedule) for text in value]


_CHECKS: dict[str, Callable[[ScheduleField, Any], Any]] = {
    "text": lambda each, value: check_name(value, each.name, InvalidSchedule),
    "lines": lambda each, value: check_text(
        value, each.name, InvalidSchedule, most=int(each.most or MAX_DESCRIPTION_LENGTH)
    ),
    "cron": lambda each, value: as_cron(value),
    "zone": _check_zone,
    "choice": _check_choice,
    "priority": lambda each, value: check_priority(value, InvalidSchedule),
    "integer": lambda each, value: check_count(value, each.name, InvalidSchedule, **_bounds(each)),
    "number": lambda each, value: check_number(value, each.name, InvalidSchedule, **_bounds(each)),
    "time": lambda each, value: read_ms(value, each.name, InvalidSchedule),
    "duration": lambda each, value: round(_seconds(each, value) * 1000),
    "seconds": _seconds,
    "period": _check_period,
    "backoff": lambda each, value: check_backoff(value, InvalidSchedule),
    "windows": _check_windows,
    "dates": lambda each, value: value,  # they are checked with the rule
    "texts": _check_texts,
    "object": lambda each, value: check_payload({} if value is None else value, each.name),
    "flag": _check_flag,
}

_PRIORITIES = {str(int(p)): f"{int(p)} {p.name.replace('_', ' ').lower()}" for p in Priority}
_MISFIRES = {
    "fire_once": "fire the latest one",
    "skip": "fire none",
    "fire_all": "fire all of them",
}
_OVERLAPS = {
    "allow": "run beside it",
    "skip": "skip the new run",
    "buffer_one": "start when it has ended, one at most",
    "cancel_previous": "cancel the previous run",
}
_DUPLICATES = {
    "ignore": "keep that task",
    "replace": "give that task the new payload, if it has not started",
    "error": "keep that task; a run that is started by hand fails",
}
_UNIQUE_FOR = {"unfinished": "until the task has ended", "waiting": "until the task starts"}
_BACKOFF_JITTERS = {
    "": "default: none",
    "none": "none",
    "full": "full: each delay is drawn between 0 and itself",
}

# The parts of the form.
FORM_GROUPS = RULE, LIMITS, TASK, POLICIES, FLOW = "rule", "limits", "task", "policies", "flow"

F = ScheduleField
# In the order in which fields are stored and exported.
# fmt: off
TABLE: tuple[ScheduleField, ...] = (
    F("user_id", "text", REQUIRED, "User whose share of the queue its tasks use.",
      label="User", group=TASK, place=30, placeholder="alice", option=("--user",), always=True,
      bulk=False),
    F("priority", "priority", Priority.NORMAL,
      "Priority of its tasks, from 1 (VERY_LOW) to 6 (CRITICAL).",
      least=1, most=6, label="Priority", group=TASK, choices=_PRIORITIES, always=True),
    F("payload", "object", {}, "Payload of its tasks, a JSON object.",
      hint="*** stands for a secret that is not shown, and leaves it unchanged.",
      label="Payload", group=TASK, place=70, always=True),
    F("timezone", "zone", "UTC", "Time zone of the rule, for example Europe/London.",
      label="Time zone", group=RULE, place=60, placeholder="Europe/Berlin",
      option=("--timezone", "--tz"), always=True, replans=True),
    F("name", "text", DEFAULT_NAME, "Name of its tasks; a worker must have a handler for it.",
      label="Name", group=TASK, place=20, placeholder=DEFAULT_NAME, always=True, bulk=False),
    F("metadata", "object", {}, "Data kept with the schedule, a JSON object; tasks do not get it.",
      label="Metadata", group=TASK, place=80, always=True),
    F("cron_expr", "cron", None,
      "Cron rule: minute hour day month weekday, or six fields with seconds first.",
      hint="H picks a fixed time per schedule, to spread load.",
      label="Cron expression", group=RULE, placeholder="0 9 * * 1-5", option=None, replans=True),
    F("every", "duration", None, "Interval between runs.", least=1,
      label="Every", group=RULE, placeholder="15m", replans=True),
    F("anchor", "time", None,
      "Time from which `every` counts; by default `start`, or the time of creation.",
      kept=True, replans=True),
    F("at", "time", None, "Run once, at this time.", label="At", group=RULE, replans=True),
    F("start", "time", None, "No runs before this time.",
      label="Starts at", group=LIMITS, replans=True),
    F("end", "time", None, "No runs at or after this time.",
      label="Ends at", group=LIMITS, replans=True),
    F("windows", "windows", None,
      'Days and hours when it runs, such as {"days": [1, 2], "from": "09:00", "to": "17:30"}.',
      hint="A JSON list; day 1 is Monday.",
      label="Only in these windows", group=LIMITS, option=("--window",), replans=True),
    F("exclude", "dates", None, "Dates when it does not run, such as 2026-12-25.",
      label="Not on these dates", group=LIMITS, replans=True),
    F("max_runs", "integer", None, "Number of runs after which it is completed.", least=1,
      label="Stop after (runs)", group=LIMITS),
    F("misfire", "choice", "fire_once", "What to do about runs missed while no scheduler ran.",
      label="If the scheduler was down", group=POLICIES, choices=_MISFIRES),
    F("catch_up", "duration", 86_400_000, "How far back fire_all looks for missed runs.",
      label="Catch up at most", group=POLICIES),
    F("max_catch_up", "integer", 100, "Maximum number of missed runs that fire_all runs.",
      least=1, most=1000, label="Catch up at most (runs)", group=POLICIES),
    F("jitter", "duration", 0, "Random delay of each run, up to this long.", most=86_400,
      label="Jitter", group=POLICIES, replans=True),
    F("overlap", "choice", "allow", "What to do when a run is due and another is unfinished.",
      label="If the previous run is still going", group=POLICIES, choices=_OVERLAPS),
    F("retries", "integer", None, "Retries of its tasks, instead of the handler's.", least=0,
      label="Retries", group=POLICIES, policy="retries"),
    F("backoff", "backoff", None,
      "Delay before the first retry, doubled each time; or a list of delays.",
      label="Backoff", group=POLICIES, policy="backoff"),
    F("backoff_cap", "seconds", None, "Longest delay before a retry; default: a day.",
      label="Backoff: longest delay", group=POLICIES, policy="backoff_cap"),
    F("backoff_multiplier", "number", None, "Factor by which each delay grows; default: 2.",
      least=1, most=MOST_MULTIPLIER,
      label="Backoff: multiplied by", group=POLICIES, policy="backoff_multiplier"),
    F("backoff_jitter", "choice", None, "full draws each delay at random; default: none.",
      label="Backoff: jitter", group=POLICIES, choices=_BACKOFF_JITTERS, policy="jitter"),
    F("timeout", "seconds", None, "Time limit of each run, instead of the handler's.",
      least=0.001, label="Time-out", group=POLICIES, policy="timeout"),
    F("max_failures", "integer", None, "Number of failed runs in a row after which it is paused.",
      least=1, label="Pause after (failures in a row)", group=POLICIES),
    F("tenant", "text", None, "Tenant that its tasks belong to.",
      check_given=lambda value: check_tenant(value, InvalidSchedule),
      label="Tenant", group=TASK, place=40, kept=True, bulk=False),
    F("pool", "text", DEFAULT_POOL, "Pool of its tasks: the kind of workers that run them.",
      check_given=lambda value: check_pool(value, InvalidSchedule),
      label="Pool", group=TASK, place=45, placeholder=DEFAULT_POOL),
    F("limit_keys", "texts", None,
      "Keys whose limits its tasks count for, such as account:42; at most four.",
      check_given=lambda value: list(check_limit_keys(value, InvalidSchedule)) or None,
      label="Keys with limits", group=FLOW, option=("--limit-key",)),
    F("unique", "text", None,
      "Key that only one task of its tenant, or of its user without a tenant, has at a time.",
      label="Unique key", group=FLOW, placeholder="nightly", bulk=False),
    F("on_duplicate", "choice", "ignore",
      "What to do when a run is due and another task has the unique key.",
      label="If another task has the unique key", group=FLOW, choices=_DUPLICATES, bulk=False),
    F("unique_for", "period", "unfinished",
      "How long a task has the unique key: unfinished, waiting, or a duration from its push.",
      check_given=lambda value: _check_unique_for(value),
      least=SHORTEST_S, most=LONGEST_WINDOW_S, choices=_UNIQUE_FOR,
      label="Unique for", group=FLOW, bulk=False),
    F("expires", "seconds", None,
      "Time from each run in which its task must start; else it ends as expired.",
      least=SHORTEST_S, label="Expires after", group=FLOW),
    F("cost", "number", None,
      "What each task counts for in the fair order and for rates, in units of your own.",
      check_given=lambda value: check_cost(value, InvalidSchedule),
      least=LEAST_COST, most=MOST_COST, label="Cost", group=FLOW),
    F("title", "text", None, "What people call it; lists show it instead of the name.",
      check_given=lambda value: check_name(value, "title", InvalidSchedule) if value else None,
      label="Title", group=TASK, place=10, placeholder="Daily report", bulk=False),
    F("description", "lines", None, "What it is for.", most=MAX_DESCRIPTION_LENGTH,
      check_given=lambda value: _check_description(value) if value else None,
      label="Description", group=TASK, place=60, bulk=False),
    F("created_by", "text", None, "Who made it; it cannot be changed.",
      option=None, patches=False),
    F("is_active", "flag", True, "False if it is paused.", option=None, bulk=False),
    F("next_run", "time", REQUIRED, "Its next run, a time in the future.",
      option=None, adds=False),
)
# fmt: on


def _check_description(value: object) -> str:
    return check_text(value, "description", InvalidSchedule, most=MAX_DESCRIPTION_LENGTH)


def _check_unique_for(value: object) -> str | float:
    checked = check_unique_for(value, InvalidSchedule)
    return checked if isinstance(checked, str) else checked / 1000


FIELDS: Mapping[str, ScheduleField] = {each.name: each for each in TABLE}
# What users write and definitions store, and the part of it that is stored only if it is unusual.
# is_active is a part of the state.
STORED = tuple(
    each.name for each in TABLE if each.adds and each.patches and each.name != "is_active"
)
OPTIONAL: Mapping[str, Any] = {
    name: FIELDS[name].default for name in STORED if not FIELDS[name].always
}
DEFAULTS: Mapping[str, Any] = {each.name: each.default for each in TABLE if each.adds}
ADDABLE = tuple(DEFAULTS)
PATCHABLE = tuple(each.name for each in TABLE if each.patches)
REPLANNING = tuple(each.name for each in TABLE if each.replans)
_OF_FLOW = ("pool", "limit_keys", "unique", "on_duplicate", "unique_for", "expires", "cost")
KINDS = ("cron_expr", "every", "at")  # of rules; a schedule has one of them
NARROWING = ("start", "end", "windows", "exclude")  # what a recurrence takes besides its rule


class ScheduleOptions(TypedDict, total=False):
    """The options of a schedule besides its cron rule, user and task; see docs/schedules.md#fields.

    Times are aware datetimes, seconds since 1970, or ISO 8601 with an offset. Durations are
    timedeltas or seconds.
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
    pool: str
    limit_keys: Sequence[str] | None
    unique: str | None
    on_duplicate: str
    unique_for: str | timedelta | float
    expires: timedelta | float | None
    cost: float | None
    title: str | None
    description: str | None
    created_by: str | None
    is_active: bool


def check_id(schedule_id: object) -> str:
    """Check the id of a schedule. Raises InvalidSchedule."""
    return check_name(schedule_id, "schedule_id", InvalidSchedule, most=MAX_ID_LENGTH)


def check_fields(given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return the fields as they are stored. Raises InvalidSchedule for a bad or unknown one."""
    for name in given:
        if name not in known:
            raise InvalidSchedule(f"unknown field {shown(name)}; known fields: {', '.join(known)}")
    return {name: FIELDS[name].check(value) for name, value in given.items()}


def flow_of(fields: Mapping[str, Any]) -> Flow:
    """Return the flow of the tasks of a schedule. Raises InvalidSchedule if its fields disagree."""
    given = {name: fields[name] for name in _OF_FLOW if fields[name] != FIELDS[name].default}
    flow = check_flow(given, InvalidSchedule)
    frees_key = flow.on_duplicate == "replace" or flow.unique_for == "waiting"
    if flow.unique is not None and fields["overlap"] == "cancel_previous" and not frees_key:
        raise InvalidSchedule(
            "overlap 'cancel_previous' with unique needs on_duplicate 'replace' or unique_for "
            f"'waiting': a run that is being cancelled still has the key {flow.unique!r}, so no "
            "other would follow it"
        )
    return flow


def check_spec(spec: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the id and the stored form of the fields of a new schedule."""
    if not isinstance(spec, Mapping):
        raise InvalidSchedule(f"a schedule must be a dict of its fields, not {safe_repr(spec)}")
    given = {name: value for name, value in spec.items() if name != "schedule_id"}
    if "user_id" not in given:
        raise InvalidSchedule(f"a schedule needs user_id; this one has {shown(list(given))}")
    kinds = [kind for kind in KINDS if given.get(kind) is not None]
    if len(kinds) != 1:
        has = " and ".join(kinds) or "none of them"
        raise InvalidSchedule(f"a schedule needs one of {', '.join(KINDS)}; this one has {has}")
    fields = {**DEFAULTS, **check_fields(given, ADDABLE)}
    flow_of(fields)
    schedule_id = spec.get("schedule_id")
    return (new_id() if schedule_id is None else check_id(schedule_id)), fields


def check_patch(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored form of changes to a schedule. Raises InvalidSchedule."""
    patch = check_fields(changes, PATCHABLE)
    for name in patch.keys() & {"payload", "metadata"}:
        encode_object(patch, name)
    if patch.get("is_active") is False and "next_run" in patch:
        raise InvalidSchedule("next_run cannot be set on a schedule that is made inactive")
    return patch


def encode_object(fields: Mapping[str, Any], name: str) -> str:
    """Encode payload or metadata. Raises InvalidPayload when it is too large."""
    if name == "payload":
        return encode_payload(fields[name])
    return encode_json(fields[name], name, MAX_METADATA_BYTES)
