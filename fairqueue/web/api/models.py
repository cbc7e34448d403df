"""The models of bodies and query strings.

They check the form of values and are part of the OpenAPI document; the library checks the rest.
Durations are seconds, times are ISO 8601 with an offset.
"""

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fairqueue.flow_options import (
    DEFAULT_POOL,
    LEAST_COST,
    LONGEST_WINDOW_S,
    MAX_LIMIT_KEYS,
    MOST_COST,
    ON_DUPLICATE,
    SHORTEST_S,
    UNIQUE_FOR,
)
from fairqueue.history.filters import STATUSES
from fairqueue.models import DEFAULT_NAME
from fairqueue.schedules.fields import FIELDS, MAX_ID_LENGTH, REQUIRED, STORED, ScheduleField
from fairqueue.validation import MAX_NAME_LENGTH

MAX_LISTED = 1000  # items on one page

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Moment = Annotated[datetime, Meta(tz=True)]
Seconds = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
Backoff = Annotated[float, Meta(ge=0)] | list[Annotated[float, Meta(ge=0)]]
Multiplier = Annotated[float, Meta(ge=1, le=100, description="factor from one delay to the next")]
Limit = Annotated[int, Meta(ge=1, le=MAX_LISTED, description="items on one page")]
Cursor = Annotated[str, Meta(max_length=2000, description="from the previous page")]
Level = Annotated[int, Meta(ge=1, le=6, description="1 (very low) to 6 (critical)")]
Minutes = Annotated[int, Meta(ge=1, le=10_080, description="period over which shares are counted")]
Json = dict[str, Any]
DryRun = Annotated[bool, Meta(description="only return what would be done")]
Role = Literal["viewer", "operator", "admin"]
if TYPE_CHECKING:
    RunStatus = str
    OnDuplicate = str
    UniqueFor = str
else:
    RunStatus = Literal[STATUSES]
    OnDuplicate = Literal[ON_DUPLICATE]
    UniqueFor = Literal[UNIQUE_FOR]
Pool = Annotated[str, Meta(min_length=1, max_length=200, description="the kind of workers")]
Tenant = Annotated[str, Meta(description="whose user; default: the key's tenant, or no tenant")]
TaskTenant = Annotated[str, Meta(description="whose task, if several tenants use its id")]
Key = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
Window = Annotated[float, Meta(ge=SHORTEST_S, le=LONGEST_WINDOW_S)]


class Input(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base class of query strings and bodies. Unknown fields are refused."""


def given(value: msgspec.Struct) -> dict[str, Any]:
    """The fields that were given, with their values."""
    found = {name: getattr(value, name) for name in value.__struct_fields__}
    return {name: inner for name, inner in found.items() if inner is not UNSET}


def unusual(value: msgspec.Struct) -> dict[str, Any]:
    """The fields that differ from their defaults."""
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
    """A model with the same fields, all optional."""
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
    "texts": list[str],
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
    elif field.kind == "period":
        inner = Literal[tuple(field.choices)] | Annotated[float, Meta(ge=field.least or 0)]
    unit = " In seconds." if field.kind in ("seconds", "duration", "period", "backoff") else ""
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
    """Filters of jobs; all of them must match."""

    user_id: Name | None = None
    name: Annotated[str, Meta(description="exact name of the tasks")] | None = None
    name_prefix: Annotated[str, Meta(description="start of the name")] | None = None
    contains: Annotated[str, Meta(description="part of name, id or title")] | None = None
    is_active: bool | None = None
    tenant: str | None = None


class JobQuery(JobFilter):
    """A page of the jobs that match."""

    limit: Limit = 50
    cursor: Cursor | None = None


class Pause(Input):
    """The reason, and when to resume."""

    note: Annotated[str, Meta(max_length=1000)] | None = None
    until: Moment | None = None


class Resume(Input):
    """The reason."""

    note: Annotated[str, Meta(max_length=1000)] | None = None


class Trigger(Input):
    """A payload for this run only."""

    payload: Json | None = None


class BackfillRange(Input):
    """The range to backfill, from `start` to `end`, not included."""

    start: Moment
    end: Moment
    dry_run: DryRun = True
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    priority: Level = 1
    unknown_too: Annotated[bool, Meta(description="include times that may already have run")] = (
        False
    )


class BulkChange(JobFilter, kw_only=True):
    """An action on all jobs that match, or on those with the given ids."""

    action: Literal["pause", "resume", "remove", "update", "trigger"]
    ids: Annotated[list[Name], Meta(max_length=10_000)] | None = None
    changes: BulkFields | None = None  # type: ignore[valid-type]  # it is made by `partial`
    note: Annotated[str, Meta(max_length=1000)] | None = None
    dry_run: DryRun = True


class JobDocuments(Input):
    """Jobs as exported; the stored jobs are changed to match."""

    documents: list[Json]
    prune: Annotated[bool, Meta(description="remove jobs that are not in the documents")] = False
    dry_run: DryRun = True


class MomentQuery(Input):
    """A page of fire times from `start` to `end`, not included."""

    start: Moment
    end: Moment
    limit: Limit = 100
    cursor: Cursor | None = None


class ChangeQuery(Input):
    """A page of changes."""

    limit: Annotated[int, Meta(ge=1, le=50)] = 20
    cursor: Cursor | None = None


class LogQuery(Input):
    """The number of lines."""

    limit: Limit = 100


class ChartQuery(Input):
    """The number of days."""

    days: Annotated[int, Meta(ge=1, le=366)] = 30


class UpcomingQuery(Input):
    """The number of jobs."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 10


class Rule(Input):
    """A rule, before it is stored. One of `cron_expr`, `every` and `at` is needed."""

    cron_expr: str | Json | None = None
    every: Annotated[float, Meta(ge=1)] | None = None
    at: Moment | None = None
    timezone: str = "UTC"
    count: Annotated[int, Meta(ge=1, le=100, description="number of runs")] = 5


# --- runs and tasks -------------------------------------------------------------------------------


class RunFilter(Input):
    """Filters of runs; all of them must match."""

    user_id: Name | None = None
    schedule_id: Name | None = None
    name: Name | None = None
    fingerprint: Name | None = None
    tenant: str | None = None
    pool: Pool | None = None
    since: Moment | None = None
    until: Moment | None = None


class RunQuery(RunFilter):
    """A page of the runs that match; without a status, of all statuses."""

    status: Annotated[list[RunStatus], Meta(max_length=len(STATUSES))] = []
    limit: Limit = 50
    cursor: Cursor | None = None


class JobRunQuery(Input):
    """A page of the runs of a job."""

    status: Annotated[list[RunStatus], Meta(max_length=len(STATUSES))] = []
    since: Moment | None = None
    until: Moment | None = None
    limit: Limit = 50
    cursor: Cursor | None = None


class FailedQuery(RunFilter):
    """A page of the failed runs that match."""

    limit: Limit = 50
    cursor: Cursor | None = None


class PageQuery(Input):
    """A page."""

    limit: Limit = 50
    cursor: Cursor | None = None


class FailedMany(RunFilter):
    """Filters of failed runs; all of them must match."""

    dry_run: DryRun = True


class Prune(Input):
    """The ended runs to delete."""

    older_than: Annotated[float, Meta(ge=0, description="seconds since they ended")]
    dry_run: DryRun = True


class NewTask(Input):
    """A task of a user. Pushing the same `task_id` again is one task."""

    user_id: Name
    payload: Json = {}
    priority: Level = 3
    name: Name = DEFAULT_NAME
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
    pool: Pool = DEFAULT_POOL
    limit_keys: (
        Annotated[list[Key], Meta(max_length=MAX_LIMIT_KEYS, description="keys with limits")] | None
    ) = None
    unique: Annotated[Key, Meta(description="only one task has this key")] | None = None
    on_duplicate: Annotated[OnDuplicate, Meta(description="if another task has the key")] | None = (
        None
    )
    unique_for: (
        Annotated[
            UniqueFor | Window,
            Meta(description="how long a task has the key; a number is seconds"),
        ]
        | None
    ) = None
    debounce: (
        Annotated[Window, Meta(description="seconds by which each push puts the task off")] | None
    ) = None
    max_wait: Annotated[Window, Meta(description="with `debounce`: at most so long")] | None = None
    expires: (
        Annotated[
            Moment | Annotated[float, Meta(ge=SHORTEST_S)],
            Meta(description="seconds from now, or the time, by which it must start"),
        ]
        | None
    ) = None
    cost: (
        Annotated[
            float,
            Meta(ge=LEAST_COST, le=MOST_COST, description="what it counts for in shares and rates"),
        ]
        | None
    ) = None


class TaskQuery(Input):
    """A page of waiting tasks."""

    user_id: Name | None = None
    name: Name | None = None
    tenant: str | None = None
    pool: Pool | None = None
    limit: Limit = 50
    cursor: Cursor | None = None


class NewTime(Input):
    """When a task becomes ready; by default now."""

    at: Moment | None = None
    delay: Seconds | None = None


# --- users and the system -------------------------------------------------------------------------


class TenantUserQuery(Input):
    """A page of the users of a tenant that match."""

    order: Literal["backlog", "name"] = "backlog"
    prefix: Annotated[str, Meta(description="start of the id")] | None = None
    minutes: Minutes = 60
    limit: Annotated[int, Meta(ge=1, le=100, description="items on one page")] = 50
    cursor: Cursor | None = None


class UserQuery(TenantUserQuery):
    """A page of the users that match."""

    tenant: str | None = None


class WindowQuery(Input):
    """The period over which shares are counted."""

    minutes: Minutes = 60


class TaskOwnerQuery(Input):
    """Whose task is meant, for an id that several tenants use."""

    tenant: TaskTenant | None = None


class PartitionQuery(Input):
    """What to measure."""

    memory: Annotated[bool, Meta(description="also add up the memory of each partition")] = False


class OwnerQuery(Input):
    """Whose user is meant; by default that of the key's tenant, or the user without a tenant."""

    tenant: Tenant | None = None


class OwnerWindowQuery(OwnerQuery):
    """The user, and the period over which shares are counted."""

    minutes: Minutes = 60


class ShareQuery(WindowQuery):
    """The period, and the number of users that are named."""

    top: Annotated[int, Meta(ge=1, le=10)] = 8


class UserChanges(Input):
    """Settings of a user to change; null removes a limit."""

    weight: Annotated[float, Meta(ge=0.01, le=1000)] | UnsetType = UNSET
    max_running: Annotated[int, Meta(ge=1)] | UnsetType | None = UNSET
    max_waiting: Annotated[int, Meta(ge=1)] | UnsetType | None = UNSET
    rate: Annotated[float, Meta(ge=0.001, le=1e6)] | UnsetType | None = UNSET


class TenantChanges(UserChanges):
    """Settings of a tenant to change; null removes a limit."""


class UserMove(Input):
    """The tenant to move to; null for none."""

    to: str | None


class QuoteQuery(OwnerQuery):
    """The user, and the task that would be pushed."""

    name: Name = DEFAULT_NAME
    pool: Pool = DEFAULT_POOL


class TenantQuery(Input):
    """A page of the tenants that match."""

    order: Literal["backlog", "name"] = "name"
    prefix: Annotated[str, Meta(description="start of the name")] | None = None
    minutes: Minutes = 60
    limit: Annotated[int, Meta(ge=1, le=100, description="items on one page")] = 50
    cursor: Cursor | None = None


class DryRunOnly(Input):
    """Whether to count only."""

    dry_run: DryRun = True


class SeriesQuery(Input):
    """The time window."""

    window: Literal["15m", "1h", "24h"] = "1h"


class AuditQuery(Input):
    """A page of the entries that match."""

    actor: str | None = None
    action: Annotated[str, Meta(description='start of the action, such as "schedule."')] | None = (
        None
    )
    target: str | None = None
    tenant: str | None = None
    since: Moment | None = None
    until: Moment | None = None
    limit: Limit = 100
    cursor: Cursor | None = None


class NewKeyRequest(Input):
    """A new API key."""

    name: Name
    role: Role
    tenant: str | None = None
    expires_in: Annotated[float, Meta(ge=1, description="seconds")] | None = None


class SettingChanges(Input):
    """Settings of the queue to change."""

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
    """The limits of a task name; a limit that is not given is removed."""

    slots: Annotated[int, Meta(ge=1, le=1000)] | None = None
    rate: Annotated[float, Meta(ge=0.001, le=1e6)] | None = None
    timeout: Annotated[float, Meta(ge=0.001)] | None = None


class KeyLimitChanges(Input):
    """The limits of a key, or of all keys of a pattern. It needs `slots` or `rate`."""

    slots: Annotated[int, Meta(ge=1, le=1000, description="tasks that run at a time")] | None = None
    rate: Annotated[float, Meta(ge=0.001, le=1e6, description="cost per second")] | None = None
    ordered: Annotated[bool, Meta(description="tasks start in the order of their pushes")] = False
    through_retries: Annotated[bool, Meta(description="a retry holds back later tasks")] = False
    scope: Annotated[Literal["queue", "tenant"], Meta(description="who shares slots and rate")] = (
        "queue"
    )
