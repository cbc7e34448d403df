"""What requests may say: the models of bodies and of query strings.

They check form, and say so in the OpenAPI document. What a value means is checked by the library,
whose errors name it. Durations are seconds, moments are ISO 8601 with an offset.
"""

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fairqueue.schedules.fields import FIELDS, MAX_ID_LENGTH, REQUIRED, STORED, ScheduleField
from fairqueue.validation import MAX_NAME_LENGTH

MAX_LISTED = 1000  # items on one page

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Moment = Annotated[datetime, Meta(tz=True)]
Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
Backoff = Annotated[float, Meta(ge=0)] | list[Annotated[float, Meta(ge=0)]]
Multiplier = Annotated[float, Meta(ge=1, le=100, description="of each delay, for the next one")]
Limit = Annotated[int, Meta(ge=1, le=MAX_LISTED, description="items on one page")]
Cursor = Annotated[str, Meta(max_length=2000, description="of the page before this one")]
Level = Annotated[int, Meta(ge=1, le=6, description="1 (very low) to 6 (critical)")]
Minutes = Annotated[int, Meta(ge=1, le=10_080, description="over which shares are counted")]
Json = dict[str, Any]
DryRun = Annotated[bool, Meta(description="only say what would be done")]
Role = Literal["viewer", "operator", "admin"]
RunStatus = Literal[
    "pending", "retrying", "running", "succeeded", "failed", "timed_out", "cancelled"
]


class Input(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Something that a request says. Fields that are not known are refused by name."""


def given(value: msgspec.Struct) -> dict[str, Any]:
    """The fields that a request has named, with their values."""
    found = {name: getattr(value, name) for name in value.__struct_fields__}
    return {name: inner for name, inner in found.items() if inner is not UNSET}


def unusual(value: msgspec.Struct) -> dict[str, Any]:
    """The fields that differ from their defaults, which are those of the library."""
    usual = {each.name: _default(each) for each in msgspec.structs.fields(type(value))}
    return {name: inner for name, inner in given(value).items() if inner != usual[name]}


def _default(field: msgspec.structs.FieldInfo) -> Any:
    has_factory = field.default_factory is not msgspec.NODEFAULT
    return field.default_factory() if has_factory else field.default


def partial(
    kind: Any,
    name: str,
    *added: tuple[str, Any],
    without: Collection[str] = (),
    doc: str,
) -> Any:
    """A model with the same fields, none of which has to be named."""
    fields = msgspec.structs.fields(kind)
    old = [(each.name, each.type) for each in fields if each.name not in without]
    return _model(name, doc, [(field, inner | UnsetType, UNSET) for field, inner in (*old, *added)])


# --- jobs -----------------------------------------------------------------------------------------


_TYPES: dict[str, Any] = {
    "cron": str | Json,
    "time": Moment,
    "backoff": Backoff,
    "windows": list[Json],
    "dates": list[str],
    "object": Json,
    "flag": bool,
}


def _type(field: ScheduleField) -> Any:
    """Return the type of a field in a body, with its bounds and its description."""
    inner = _TYPES.get(field.kind, str)
    if field.kind == "choice":
        inner = Literal[tuple(filter(None, field.choices))]
    elif field.kind in ("text", "lines"):
        least, most = 0 if field.default is None else 1, int(field.most or MAX_NAME_LENGTH)
        inner = Annotated[str, Meta(min_length=least, max_length=most)]
    elif field.kind in ("integer", "priority"):
        inner = Annotated[int, Meta(ge=field.least or 0, le=field.most)]
    elif field.kind in ("number", "seconds", "duration"):
        inner = Annotated[float, Meta(ge=field.least or 0, le=field.most)]
    unit = " In seconds." if field.kind in ("seconds", "duration", "backoff") else ""
    optional = inner | None if field.default is None else inner
    return Annotated[optional, Meta(description=field.help + unit)]


def _field(field: ScheduleField) -> tuple[Any, ...]:
    """Return the name, type and default of a field in a body."""
    if field.default is REQUIRED:
        return field.name, _type(field)
    if field.kept:
        return field.name, _type(field) | UnsetType, UNSET
    return field.name, _type(field), field.to_document(field.default)


def _model(name: str, doc: str, fields: Iterable[tuple[Any, ...]], base: Any = None) -> Any:
    return msgspec.defstruct(
        name,
        list(fields),
        bases=(base or Input,),
        kw_only=True,
        forbid_unknown_fields=True,
        namespace={"__doc__": doc},
        module=__name__,
    )


ScheduleId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)]
IsActive = _type(FIELDS["is_active"])
NextRun = _type(FIELDS["next_run"])

JobDefinition = _model(
    "JobDefinition",
    "What a job is. One of `cron_expr`, `every` and `at` is its rule.",
    (_field(FIELDS[name]) for name in STORED),
)
NewJob = _model(
    "NewJob",
    "A new job; without `schedule_id` it gets a random one.",
    [("schedule_id", ScheduleId | None, None), ("is_active", IsActive, True)],
    JobDefinition,
)
JobReplacement = _model(
    "JobReplacement",
    "All of a job: a field that is not named gets its default, but `anchor`, `tenant` and\n"
    "`is_active` stay. `***` in the payload keeps the stored value.",
    [("is_active", IsActive | UnsetType, UNSET)],
    JobDefinition,
)
JobChanges = partial(
    JobDefinition,
    "JobChanges",
    ("is_active", IsActive),
    ("next_run", NextRun),
    doc="Some fields of a job; the others stay. `***` in the payload keeps the stored value.",
)
JobCopy = partial(
    JobDefinition,
    "JobCopy",
    ("schedule_id", ScheduleId),
    doc="What differs in the copy: its id, and fields that have another value.",
)
BulkFields = partial(
    JobDefinition,
    "BulkFields",
    ("next_run", NextRun),
    without=[name for name in STORED if not FIELDS[name].bulk],
    doc="What an update of many jobs changes. Owner, name and title are changed one by one.",
)


class JobFilter(Input):
    """Which jobs are meant; all that is given must match."""

    user_id: Name | None = None
    name: Annotated[str, Meta(description="of their tasks, exactly")] | None = None
    name_prefix: Annotated[str, Meta(description="how that name begins")] | None = None
    contains: Annotated[str, Meta(description="a part of name, id or title")] | None = None
    is_active: bool | None = None
    tenant: str | None = None


class JobQuery(JobFilter):
    """Which page of which jobs."""

    limit: Limit = 50
    cursor: Cursor | None = None


class Pause(Input):
    """Why, and until when."""

    note: Annotated[str, Meta(max_length=1000)] | None = None
    until: Moment | None = None


class Resume(Input):
    """Why."""

    note: Annotated[str, Meta(max_length=1000)] | None = None


class Trigger(Input):
    """A payload for this run only."""

    payload: Json | None = None


class BackfillRange(Input):
    """Which moments are filled, from `start` until before `end`."""

    start: Moment
    end: Moment
    dry_run: DryRun = True
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    priority: Level = 1
    unknown_too: Annotated[bool, Meta(description="also where nobody knows if it ran")] = False


class BulkChange(JobFilter, kw_only=True):
    """What is done to all jobs that match, or to those with the ids."""

    action: Literal["pause", "resume", "remove", "update", "trigger"]
    ids: Annotated[list[Name], Meta(max_length=10_000)] | None = None
    changes: BulkFields | None = None  # type: ignore[valid-type]  # it is made by `partial`
    note: Annotated[str, Meta(max_length=1000)] | None = None
    dry_run: DryRun = True


class JobDocuments(Input):
    """Jobs as an export has them: what is stored becomes what they say."""

    documents: list[Json]
    prune: Annotated[bool, Meta(description="remove the jobs that no document names")] = False
    dry_run: DryRun = True


class MomentQuery(Input):
    """Which moments, from `start` until before `end`."""

    start: Moment
    end: Moment
    limit: Limit = 100
    cursor: Cursor | None = None


class ChangeQuery(Input):
    """Which page of changes."""

    limit: Annotated[int, Meta(ge=1, le=50)] = 20
    cursor: Cursor | None = None


class LogQuery(Input):
    """How many lines."""

    limit: Limit = 100


class ChartQuery(Input):
    """How far back."""

    days: Annotated[int, Meta(ge=1, le=366)] = 30


class UpcomingQuery(Input):
    """How many."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 10


class Rule(Input):
    """A rule, before it is stored. One of `cron_expr`, `every` and `at` is needed."""

    cron_expr: str | Json | None = None
    every: Annotated[float, Meta(ge=1)] | None = None
    at: Moment | None = None
    timezone: str = "UTC"
    count: Annotated[int, Meta(ge=1, le=100, description="how many runs are told")] = 5


# --- runs and tasks -------------------------------------------------------------------------------


class RunFilter(Input):
    """Which runs are meant; all that is given must match."""

    user_id: Name | None = None
    schedule_id: Name | None = None
    name: Name | None = None
    fingerprint: Name | None = None
    tenant: str | None = None
    since: Moment | None = None
    until: Moment | None = None


class RunQuery(RunFilter):
    """Which page of which runs; without a status, all: that wait, that run, that have ended."""

    status: Annotated[list[RunStatus], Meta(max_length=7)] = []
    limit: Limit = 50
    cursor: Cursor | None = None


class JobRunQuery(Input):
    """Which page of the runs of a job."""

    status: Annotated[list[RunStatus], Meta(max_length=7)] = []
    since: Moment | None = None
    until: Moment | None = None
    limit: Limit = 50
    cursor: Cursor | None = None


class FailedQuery(RunFilter):
    """Which page of which failed runs."""

    limit: Limit = 50
    cursor: Cursor | None = None


class PageQuery(Input):
    """Which page."""

    limit: Limit = 50
    cursor: Cursor | None = None


class FailedMany(RunFilter):
    """Which failed runs are meant; all that is given must match."""

    dry_run: DryRun = True


class Prune(Input):
    """Which ended runs are forgotten."""

    older_than: Annotated[float, Meta(ge=0, description="seconds since they ended")]
    dry_run: DryRun = True


class NewTask(Input):
    """A task for a user. Giving `task_id` makes repeated pushes one task."""

    user_id: Name
    payload: Json = {}
    priority: Level = 3
    name: Name = "default"
    task_id: Name | None = None
    delay: Annotated[float, Meta(ge=0, description="seconds from now")] | None = None
    at: Moment | None = None
    tenant: str | None = None
    retries: Count | None = None
    max_attempts: Annotated[int, Meta(ge=1, description="one more than `retries`")] | None = None
    backoff: Backoff | None = None
    backoff_cap: Seconds | None = None
    backoff_multiplier: Multiplier | None = None
    jitter: Literal["full", "none"] | None = None
    timeout: Seconds | None = None


class TaskQuery(Input):
    """Which page of the tasks that wait."""

    user_id: Name | None = None
    name: Name | None = None
    tenant: str | None = None
    limit: Limit = 50
    cursor: Cursor | None = None


class NewTime(Input):
    """When a task is to become ready; without either, now."""

    at: Moment | None = None
    delay: Seconds | None = None


# --- users and the system -------------------------------------------------------------------------


class UserQuery(Input):
    """Which page of which users."""

    order: Literal["backlog", "name"] = "backlog"
    prefix: Annotated[str, Meta(description="how their ids begin")] | None = None
    tenant: str | None = None
    minutes: Minutes = 60
    limit: Annotated[int, Meta(ge=1, le=100, description="items on one page")] = 50
    cursor: Cursor | None = None


class WindowQuery(Input):
    """Over how many minutes shares are counted."""

    minutes: Minutes = 60


class ShareQuery(WindowQuery):
    """Over how many minutes, and of how many users by name."""

    top: Annotated[int, Meta(ge=1, le=10)] = 8


class UserChanges(Input):
    """Some settings of a user; null takes a limit away."""

    weight: Annotated[float, Meta(ge=0.01, le=1000)] | UnsetType = UNSET
    max_running: Annotated[int, Meta(ge=1)] | UnsetType | None = UNSET
    max_waiting: Annotated[int, Meta(ge=1)] | UnsetType | None = UNSET
    rate: Annotated[float, Meta(ge=0.001, le=1e6)] | UnsetType | None = UNSET
    tenant: str | UnsetType = UNSET


class DryRunOnly(Input):
    """Whether it is only counted."""

    dry_run: DryRun = True


class SeriesQuery(Input):
    """Which window."""

    window: Literal["15m", "1h", "24h"] = "1h"


class AuditQuery(Input):
    """Which page of which entries."""

    actor: str | None = None
    action: Annotated[str, Meta(description='how it begins, such as "schedule."')] | None = None
    target: str | None = None
    tenant: str | None = None
    since: Moment | None = None
    until: Moment | None = None
    limit: Limit = 100
    cursor: Cursor | None = None


class NewKeyRequest(Input):
    """A key for somebody or something."""

    name: Name
    role: Role
    tenant: str | None = None
    expires_in: Annotated[float, Meta(ge=1, description="seconds")] | None = None


class SettingChanges(Input):
    """Some settings of the queue; the others stay."""

    max_attempts: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    max_waiting: Count | UnsetType = UNSET
    keep_finished: Count | UnsetType = UNSET
    keep_finished_for: Seconds | UnsetType = UNSET
    keep_dead: Count | UnsetType = UNSET
    keep_dead_for: Seconds | UnsetType = UNSET
    cost: Literal["tasks", "time"] | UnsetType = UNSET
    critical_share: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    ageing: Seconds | UnsetType = UNSET
    max_schedules: Count | UnsetType = UNSET
    min_interval: Seconds | UnsetType = UNSET


class LimitChanges(Input):
    """What holds for all tasks of a name; what is not given is not limited."""

    slots: Annotated[int, Meta(ge=1, le=1000)] | None = None
    rate: Annotated[float, Meta(ge=0.001, le=1e6)] | None = None
    timeout: Annotated[float, Meta(ge=0.001)] | None = None
