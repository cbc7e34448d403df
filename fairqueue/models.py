"""The data types of the public API, and how tasks are stored."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any, Generic, TypeVar, Unpack

from fairqueue.clock import from_ms, to_ms
from fairqueue.errors import BrokenRecord, InvalidTask, shown
from fairqueue.flow_options import (
    DEFAULT_POOL,
    NO_FLOW,
    Flow,
    FlowOptions,
    check_flow,
    check_times,
    read_flow,
)
from fairqueue.reasons import Reason
from fairqueue.retry_policy import TaskPolicy, check_policy, encode_policy, status_fields
from fairqueue.validation import (
    MAX_PAYLOAD_BYTES,
    Priority,
    check_name,
    check_payload,
    check_priority,
    check_seconds,
    check_task_id,
    check_tenant,
    encode_json,
)

T = TypeVar("T")

DEFAULT_NAME = "default"
DIGESTED_BYTES = 1024  # as in lua/lib/enqueue.lua: the digest of a longer document is kept

# The exceptions that reading a damaged record can raise.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def as_text(value: Any) -> str:
    """Return a value of a record that must be a string. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not a string")
    return value


def text_or_none(value: Any) -> str | None:
    """Return a value of a record that must be a string or None. Raises TypeError."""
    return None if value is None else as_text(value)


def _as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.80} is not an object")
    return value


def new_id() -> str:
    """Return a random id of 96 bits."""
    return os.urandom(12).hex()


@lru_cache(maxsize=10_000)
def status_head(user_id: str, name: str, priority: int) -> str:
    """Return the fields of a status record that are known before the push: JSON without its end."""
    user, named = encode_basestring(user_id), encode_basestring(name)
    return f'{{"user":{user},"name":{named},"level":{int(priority)},"attempts":0'


class TaskOptions(TaskPolicy, FlowOptions, total=False):
    """The options of one task: its policy and its flow."""


_OF_FLOW = FlowOptions.__annotations__.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of work for a user. Make one with `Task.create`.

    delay_ms, at_ms: when it becomes ready. schedule_id, scheduled_for: set if a schedule has fired
    it. run_type: "queued", "scheduled", "manual" (a schedule was triggered) or "retry" (of the dead
    letter `retry_of`). policy: retries and time-out set for this task or its schedule; they
    override the handler's. tenant: the group of users that it belongs to, if any. flow: its pool,
    keys, cost and expiry. document: the task as it is stored.
    """

    task_id: str
    user_id: str
    priority: Priority
    payload: dict[str, Any]
    name: str = DEFAULT_NAME
    delay_ms: int | None = None
    at_ms: int | None = None
    schedule_id: str | None = None
    scheduled_for: datetime | None = None
    run_type: str = "queued"
    triggered_by: str | None = None
    retry_of: str | None = None
    policy: dict[str, Any] | None = None
    tenant: str | None = None
    flow: Flow = NO_FLOW
    document: str = field(repr=False, compare=False)

    @classmethod
    def create(
        cls,
        *,
        user_id: str,
        payload: dict[str, Any] | None = None,
        priority: int = Priority.NORMAL,
        name: str = DEFAULT_NAME,
        task_id: str | None = None,
        delay: float | None = None,
        at: datetime | float | None = None,
        triggered_by: str | None = None,
        tenant: str | None = None,
        **options: Unpack[TaskOptions],
    ) -> "Task":
        """Return a checked task.

        task_id: pushing the same id again does not add a second task; random by default.
        delay, at: when it becomes ready: seconds from the push, or an aware datetime or seconds
            since 1970. A time in the past means now.
        triggered_by: who or what requested it, for the history.
        tenant: the group of users that it belongs to. A user without a tenant joins it.

        `FlowOptions` explains pool, limit_keys, unique, on_duplicate, unique_for, debounce,
        max_wait, expires and cost. These override the options of the handler:
        retries, max_attempts: attempts after a failure; or attempts in total, including those
            whose worker died. Pass one of them.
        backoff: seconds before the first retry, doubled for each further one, up to a day, without
            jitter; or a list of delays. See also backoff_multiplier, backoff_cap, jitter="full".
        timeout: the longest duration of a run in seconds.

        Raises InvalidTask or InvalidPayload naming the value.
        """
        delay_ms, at_ms = check_when(delay, at)
        priority = check_priority(priority)
        checked = check_payload({} if payload is None else payload)
        _check_names(user_id, name, triggered_by, tenant)
        policy, flow = check_options(options)
        check_times(flow, delay_ms, at_ms)
        origin = {"by": triggered_by, "tenant": tenant}
        stored: dict[str, Any] = {"origin": origin, "policy": encode_policy(policy), "flow": flow}
        return cls(
            task_id=new_id() if task_id is None else check_task_id(task_id),
            user_id=user_id,
            priority=priority,
            payload=checked,
            name=name,
            delay_ms=delay_ms,
            at_ms=at_ms,
            triggered_by=triggered_by,
            policy=policy,
            tenant=tenant,
            flow=flow,
            document=task_document(user_id, name, priority, encode_payload(checked), **stored),
        )

    @classmethod
    def from_document(cls, task_id: str, document: bytes | str) -> "Task":
        """Return a stored task. Raises BrokenRecord if its document is damaged."""
        try:
            record = json.loads(document)
            scheduled_ms = record.get("scheduled_for")
            return cls(
                task_id=task_id,
                user_id=as_text(record["user"]),
                priority=Priority(record["priority"]),
                payload=_as_object(record["payload"]),
                name=as_text(record["name"]),
                schedule_id=text_or_none(record.get("schedule")),
                scheduled_for=None if scheduled_ms is None else from_ms(scheduled_ms),
                run_type=run_type(record.get("schedule"), scheduled_ms, record.get("retry_of")),
                triggered_by=text_or_none(record.get("by")),
                retry_of=text_or_none(record.get("retry_of")),
                policy=None if record.get("policy") is None else _as_object(record["policy"]),
                tenant=text_or_none(record.get("tenant")),
                flow=read_flow(record),
                document=document if isinstance(document, str) else document.decode(),
            )
        except UNREADABLE as error:
            raise BrokenRecord(f"the document of task {task_id!r} is damaged: {error}") from None

    def __repr__(self) -> str:
        """Identify the task without its payload, whose secrets must not end up in logs."""
        return f"Task({self.task_id!r}, user_id={self.user_id!r}, name={self.name!r})"

    @property
    def status_head(self) -> str:
        """The fields of its status record that are known before the push: JSON without its end."""
        head = status_head(self.user_id, self.name, self.priority)
        if self.schedule_id is not None:
            head += f',"schedule":{encode_basestring(self.schedule_id)}'
        if self.run_type != "queued":
            head += f',"type":"{self.run_type}"'
        origin = {"by": self.triggered_by, "retry_of": self.retry_of} | group_of(self.tenant)
        head += origin_fields(origin) + status_fields(self.policy) + self.flow.fields()
        document = self.document.encode()
        if len(document) > DIGESTED_BYTES:
            digest = hashlib.sha1(document, usedforsecurity=False).hexdigest()
            head += f',"digest":"{digest}"'
        return head

    @property
    def when(self) -> str:
        """The time at which it becomes ready, as scripts take it."""
        return moment_text(self.delay_ms, self.at_ms)

    @property
    def pool(self) -> str:
        """The kind of workers that run it."""
        return self.flow.pool

    @property
    def limit_keys(self) -> tuple[str, ...]:
        """The keys whose limits it counts for."""
        return self.flow.limit_keys

    @property
    def unique(self) -> str | None:
        """The key that no other task may have."""
        return self.flow.unique

    @property
    def on_duplicate(self) -> str:
        """What a push does when another task has the key: "ignore", "replace" or "error"."""
        return self.flow.on_duplicate

    @property
    def unique_for(self) -> str | float:
        """How long it has the key: "unfinished", "waiting", or seconds from the first push."""
        scope = self.flow.unique_for
        return scope if isinstance(scope, str) else scope / 1000

    @property
    def debounce(self) -> float | None:
        """The seconds by which each push with the key puts it off."""
        return _seconds(self.flow.debounce_ms)

    @property
    def max_wait(self) -> float | None:
        """The seconds after the first push by which a debounced task is ready."""
        return _seconds(self.flow.max_wait_ms)

    @property
    def expires(self) -> float | datetime | None:
        """When it expires if it has not started: seconds from the push, or a time."""
        return self.flow.expires_at or _seconds(self.flow.expires_in_ms)

    @property
    def cost(self) -> float | None:
        """How much it counts for, in units; None if it was not given."""
        return self.flow.cost


def moment_text(delay_ms: int | None, at_ms: int | None) -> str:
    """Return a time as scripts take it: "" for now, `+<ms>` from now, or `<ms>` since 1970."""
    if delay_ms is not None:
        return f"+{delay_ms}"
    return "" if at_ms is None else str(at_ms)


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def check_when(delay: object, at: object) -> tuple[int | None, int | None]:
    """Return (delay in ms, time in ms), at most one of them not None. Raises InvalidTask."""
    if delay is not None and at is not None:
        raise InvalidTask(f"pass delay or at, not both (delay={shown(delay)}, at={shown(at)})")
    if delay is not None:
        return round(check_seconds(delay, "delay", InvalidTask) * 1000), None
    return None, None if at is None else to_ms(at, "at", InvalidTask)


def run_type(schedule_id: str | None, scheduled_ms: int | None, retry_of: str | None) -> str:
    """Return the origin of a task: "queued", "scheduled", "manual" or "retry"."""
    if retry_of is not None:
        return "retry"
    if schedule_id is None:
        return "queued"
    return "manual" if scheduled_ms is None else "scheduled"


def origin_fields(origin: Mapping[str, str | None]) -> str:
    """Return the origin of a task as JSON fields, without those that are None."""
    return "".join(
        f',"{name}":{encode_basestring(value)}'
        for name, value in origin.items()
        if value is not None
    )


def group_of(tenant: str | None) -> dict[str, str | None]:
    """Return the tenant as a status has it. Records without `group` are of earlier versions."""
    return {"tenant": tenant, "group": tenant}


def encode_payload(payload: dict[str, Any]) -> str:
    """Return a checked payload as canonical JSON. Raises InvalidPayload if it is too large."""
    return encode_json(payload, "payload", MAX_PAYLOAD_BYTES)


@lru_cache(maxsize=10_000)
def _document_head(user_id: str, name: str, priority: int) -> str:
    user, named = encode_basestring(user_id), encode_basestring(name)
    return f'{{"user":{user},"name":{named},"priority":{int(priority)}'


def task_document(
    user_id: str,
    name: str,
    priority: int,
    payload_json: str,
    schedule_id: str | None = None,
    scheduled_ms: int | None = None,
    origin: Mapping[str, str | None] = {},
    policy: str | None = None,
    flow: Flow = NO_FLOW,
) -> str:
    """Return the stored form of a task: everything but its id, so equal tasks are equal text."""
    text = _document_head(user_id, name, priority)
    if schedule_id is not None:
        text += f',"schedule":{encode_basestring(schedule_id)}'
        if scheduled_ms is not None:
            text += f',"scheduled_for":{scheduled_ms}'
    text += origin_fields(origin)
    if policy is not None:
        text += f',"policy":{policy}'
    return f'{text}{flow.fields()},"payload":{payload_json}}}'


def _check_names(user_id: str, name: str, triggered_by: str | None, tenant: str | None) -> None:
    check_name(user_id, "user_id")
    check_name(name, "name")
    if triggered_by is not None:
        check_name(triggered_by, "triggered_by")
    if tenant is not None:
        check_tenant(tenant)


def check_options(options: TaskOptions) -> tuple[dict[str, Any] | None, Flow]:
    """Return the policy and the flow of a task. Raises InvalidTask naming the value."""
    if not options:
        return None, NO_FLOW
    unknown = options.keys() - TaskOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"Task.create() got an unexpected keyword argument {min(unknown)!r}")
    policy = {name: value for name, value in options.items() if name not in _OF_FLOW}
    flow = {name: value for name, value in options.items() if name in _OF_FLOW}
    return check_policy(policy), check_flow(flow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A task that a worker holds until its lease ends.

    `partition` is where the task is, in a queue that has several.
    """

    task: Task
    token: str
    attempt: int
    worker_id: str
    lease_until: datetime
    due_ms: int
    partition: int = 0

    @property
    def due_at(self) -> datetime:
        """The time at which the task became ready: its wait begins here."""
        return from_ms(self.due_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """The state of a task.

    `state` is one of ready, delayed, running, finished, buried, cancelled, expired. `task` is None
    if its document is damaged. `cost` is None if it was not given, `expires_at` if it does not
    expire or has started.
    """

    task_id: str
    state: str
    user_id: str
    name: str
    priority: Priority
    attempts: int
    pushed_at: datetime
    due_at: datetime
    claimed_at: datetime | None
    ended_at: datetime | None
    lease_until: datetime | None
    worker_id: str | None
    error: str | None
    result: Any
    cancel_requested: bool
    task: Task | None
    tenant: str | None = None
    pool: str = DEFAULT_POOL
    limit_keys: tuple[str, ...] = ()
    cost: float | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerLimits:
    """Limits on all tasks of one name, over all workers. None means no limit.

    slots: how many run at a time. rate: how many start in a second. timeout: seconds that a run may
    take, unless its task sets its own; a run that takes one lease longer is ended by the queue. The
    worker ends a run at the time-out of its handler's options.
    """

    slots: int | None = None
    rate: float | None = None
    timeout: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Limits on all tasks with a key, over all workers. None means no limit.

    slots: how many run at a time. rate: how much cost starts in a second; a task that declares none
    counts as 1. ordered: the tasks start in the order of their pushes, whoever pushed them, and
    priorities do not matter; otherwise users take turns. through_retries: an ordered task that is
    to be retried lets no later one start before. scope: "queue", or "tenant" if each tenant, and
    each user without one, has slots and a rate of its own.
    """

    slots: int | None = None
    rate: float | None = None
    ordered: bool = False
    through_retries: bool = False
    scope: str = "queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a task waits: the reasons, the decisive one first. `summary` joins their sentences.

    The other fields repeat values of the reasons. starts_about: when it starts, probably between
    starts_earliest and starts_latest; None if it has started, or if that cannot be said: see
    TaskQueue.quote. users_ahead counts the users of the same tenant,
    tenants_ahead the tenants, and the users without one, that are served before its tenant.
    """

    task_id: str
    state: str
    summary: str
    reasons: tuple[Reason, ...] = ()
    delayed_until: datetime | None = None
    own_tasks_ahead: int | None = None
    users_ahead: int | None = None
    tenants_ahead: int | None = None
    starts_about: datetime | None = None
    starts_earliest: datetime | None = None
    starts_latest: datetime | None = None
    user_paused: bool = False
    user_capped: bool = False
    user_rate_limited_until: datetime | None = None
    waits_for_slot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSettings:
    """The limits, the weight and the pause of a user, or of a tenant.

    tenant: the tenant, or the tenant of the user; None for a user without one.

    The pause_* and paused_* fields are None unless the user is paused and they were given. A pause
    that has ended is not shown.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_waiting: int | None = None
    rate: float | None = None
    paused: bool = False
    tenant: str | None = None
    paused_at: datetime | None = None
    paused_by: str | None = None
    pause_note: str | None = None
    paused_until: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The settings that `TaskQueue.configure` changes, for all processes that use the queue.

    max_attempts: a task whose lease expires on this attempt, or on a later one, becomes a dead
        letter.
    max_waiting: the largest number of waiting and delayed tasks; 0 means no limit.
    keep_finished, keep_finished_for: how many finished and cancelled tasks stay readable, and for
        how many seconds; 0 keeps none.
    keep_dead, keep_dead_for: the same for dead letters.
    cost: "tasks": each task counts the same; "time": users share the time for which workers hold
        their tasks, so a worker should claim no more tasks than it runs at once.
    critical_share: the largest share of claims that CRITICAL tasks may take out of turn; 1.0 means
        no limit, 0.0 means never.
    ageing: seconds of waiting that equal one level of priority; 0 for strict priorities. Can be
        changed only while no task is queued.
    max_schedules: how many schedules a user may have; 0 means no limit.
    min_interval: the shortest time in seconds between two fires of a new schedule.
    """

    max_attempts: int = 5
    max_waiting: int = 0
    keep_finished: int = 100_000
    keep_finished_for: float = 604_800.0
    keep_dead: int = 10_000
    keep_dead_for: float = 2_592_000.0
    cost: str = "tasks"
    critical_share: float = 0.5
    ageing: float = 0.0
    max_schedules: int = 0
    min_interval: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledTask:
    """A schedule. Times are aware datetimes; `next_run` is None while it is not active.

    The fields that users set are those of the table in schedules/fields.py. `revision` is new with
    each change by a user or of its plan; a fire keeps it.
    """

    schedule_id: str
    cron_expr: str
    user_id: str
    priority: Priority
    payload: dict[str, Any]
    timezone: str
    name: str
    metadata: dict[str, Any]
    is_active: bool
    disabled_reason: str | None
    created_at: datetime
    updated_at: datetime
    last_run: datetime | None
    next_run: datetime | None
    run_count: int
    missed_count: int
    overlap: str = "allow"
    skipped_count: int = 0
    every: timedelta | None = None
    at: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    windows: list[dict[str, Any]] | None = None
    exclude: list[str] | None = None
    max_runs: int | None = None
    misfire: str = "fire_once"
    catch_up: float = 86_400.0
    max_catch_up: int = 100
    jitter: float = 0.0
    retries: int | None = None
    backoff: float | list[float] | None = None
    backoff_cap: float | None = None
    backoff_multiplier: float | None = None
    backoff_jitter: str | None = None
    timeout: float | None = None
    max_failures: int | None = None
    failures_in_a_row: int = 0
    paused_at: datetime | None = None
    paused_by: str | None = None
    pause_note: str | None = None
    paused_until: datetime | None = None
    tenant: str | None = None
    pool: str = DEFAULT_POOL
    limit_keys: list[str] | None = None
    unique: str | None = None
    on_duplicate: str = "ignore"
    unique_for: str | float = "unfinished"
    expires: float | None = None
    cost: float | None = None
    title: str | None = None
    description: str | None = None
    created_by: str | None = None
    revision: str = field(default="", compare=False, repr=False)

    def __repr__(self) -> str:
        """Name the schedule; its payload may hold secrets, which do not belong in a log."""
        return f"ScheduledTask({self.schedule_id!r}, {self.rule!r}, user_id={self.user_id!r})"

    @property
    def label(self) -> str:
        """Its title, or else the name of its tasks."""
        return self.title or self.name

    @property
    def rule(self) -> str:
        """When it fires, in short: its cron expression, its interval or its time."""
        if self.every is not None:
            return f"every {self.every}"
        return self.cron_expr if self.at is None else f"at {self.at.isoformat()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A schedule that cannot run, and why."""

    schedule_id: str
    reason: str
    since: datetime


class Page(list[T], Generic[T]):
    """One page of a listing. Pass `cursor` to get the next page; None means this is the last."""

    def __init__(self, items: list[T], cursor: str | None) -> None:
        super().__init__(items)
        self.cursor = cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    """The waiting tasks of a pool.

    oldest_wait: in seconds; None if not known, which only happens to the default pool when the
    oldest tasks of the queue wait in others. last_claim: when a worker last took one of its tasks,
    None if that is not known.
    """

    pool: str
    waiting: int
    oldest_wait: float | None = None
    last_claim: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """Counts of a queue at one time, for metrics and health.

    jain_index compares tenants and users without one. pools: the default pool, and all that tasks
    or workers have named. active_users, active_tenants: those with waiting tasks, and parked_users,
    parked_tenants: those of them that may not be served now; a user with tasks in several pools
    counts in each. Of more than 500 tenants these numbers may be estimates. held: waiting tasks
    that wait for room in the limits of their name or of a key. slots_in_use: slots of names and
    keys that running tasks hold. unique_keys: those in use.

    Of a queue with partitions these are sums, and the longest waits; leader: who leads, several
    names if need be, and nobody if a partition has no leader; leader_until: the end of the first of
    their terms. parts: the snapshots of the partitions that answered. partition: the number of the
    partition, 0 for the whole. service: what jain_index compares, by weight.
    """

    at: datetime
    counters: dict[str, int]
    ready: int
    delayed: int
    running: int
    dead: int
    oldest_wait: float
    active_users: int
    parked_users: int
    schedules: int
    active_schedules: int
    overdue: float
    set_aside: int
    leader: str | None
    leader_until: datetime | None
    epoch: int
    jain_index: float | None
    pools: tuple[PoolSnapshot, ...] = ()
    active_tenants: int = 0
    parked_tenants: int = 0
    held: int = 0
    slots_in_use: int = 0
    unique_keys: int = 0
    partition: int = 0
    parts: "tuple[QueueSnapshot, ...]" = field(default=(), repr=False)
    service: tuple[float, ...] = field(default=(), repr=False)

    @property
    def is_led(self) -> bool:
        """Whether a scheduler leads, in all partitions."""
        return self.leader_until is not None and self.leader_until > self.at

    @property
    def leaders(self) -> dict[int, str | None]:
        """Who leads each partition that answered."""
        return {
            part.partition: part.leader if part.is_led else None for part in self.parts or (self,)
        }
