"""The options of a task that say where, how often and until when it may run: its flow.

They travel in the document and in the status of a task: `pool` as a field of its own, the others in
one object, `flow`, which tasks without them do not have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from json.encoder import encode_basestring
from types import UnionType
from typing import Any, TypedDict

from fairqueue.clock import from_ms, is_past, to_ms
from fairqueue.errors import InvalidInput, InvalidTask, shown
from fairqueue.validation import check_name, check_one_of, check_seconds, encode_json

DEFAULT_POOL = "default"
MAX_LIMIT_KEYS = 4  # keys of a task: each costs a claim a few commands
LEAST_COST = 0.000_001  # units: less would not move a user's place in the fair order
MOST_COST = 1_000_000.0  # units: more would hold a user back for too long
SHORTEST_S = 0.001  # seconds: times are stored in milliseconds
LONGEST_WINDOW_S = 30 * 86_400.0  # seconds that a unique key can be kept: each is a record in Redis
MAX_FLOW_BYTES = 16 * 1024  # more than the largest flow needs

ON_DUPLICATE = ("ignore", "replace", "error")
UNIQUE_FOR = ("unfinished", "waiting")


class FlowOptions(TypedDict, total=False):
    """The flow of a task, as `Task.create` takes it.

    pool: the kind of workers that run it; "default" by default.
    limit_keys: at most 4 keys whose limits it counts for, such as "account:42".
    unique: a key that only one task of its tenant, or of its user without a tenant, can have.
    on_duplicate: what a push does when another task has the key: "ignore" (the push returns the id
        of that task; the default), "replace" (that task gets the new payload and time) or "error"
        (the push raises DuplicateTask).
    unique_for: how long a task has the key: until it is "unfinished" no more (the default), while
        it is "waiting", or for this many seconds from the first push.
    debounce: seconds by which each push with the key puts the task off; it runs with the last
        payload. max_wait: seconds after the first push by which it is ready in any case.
    expires: seconds from the push, or an aware datetime: a task that has not started by then ends
        as expired.
    cost: how much it counts for in the fair order and for rates, in your own units. By default 1,
        or the measured time with `configure(cost="time")`.
    """

    pool: str
    limit_keys: Sequence[str] | None
    unique: str | None
    on_duplicate: str | None
    unique_for: str | float | timedelta | None
    debounce: float | timedelta | None
    max_wait: float | timedelta | None
    expires: float | timedelta | datetime | None
    cost: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The checked flow of a task. Times are in milliseconds.

    unique_for: "unfinished", "waiting" or a number of milliseconds. expires_in_ms counts from the
    push, expires_ms is a time; at most one of them is not None.
    """

    pool: str = DEFAULT_POOL
    limit_keys: tuple[str, ...] = ()
    unique: str | None = None
    on_duplicate: str = "ignore"
    unique_for: str | int = "unfinished"
    debounce_ms: int | None = None
    max_wait_ms: int | None = None
    expires_in_ms: int | None = None
    expires_ms: int | None = None
    cost: float | None = None

    def of_retry(self) -> "Flow":
        """Return the flow of a retry that a person asks for: a new task without key and expiry."""
        if self.unique is None and self.expires_in_ms is None and self.expires_ms is None:
            return self
        return replace(NO_FLOW, pool=self.pool, limit_keys=self.limit_keys, cost=self.cost)

    def fields(self) -> str:
        """Return the flow as JSON fields of a document or a status; "" if nothing was given."""
        if self is NO_FLOW:
            return ""
        text = "" if self.pool == DEFAULT_POOL else f',"pool":{encode_basestring(self.pool)}'
        stored = self._stored()
        return f'{text},"flow":{encode_json(stored, "flow", MAX_FLOW_BYTES)}' if stored else text

    def _stored(self) -> dict[str, Any]:
        expires: str | int | None = self.expires_ms
        if self.expires_in_ms is not None:
            expires = f"+{self.expires_in_ms}"
        given = {
            "keys": list(self.limit_keys) or None,
            "cost": self.cost,
            "expires": expires,
            "unique": self.unique,
            "on_duplicate": None if self.on_duplicate == "ignore" else self.on_duplicate,
            "unique_for": None if self.unique_for == "unfinished" else self.unique_for,
            "debounce": self.debounce_ms,
            "max_wait": self.max_wait_ms,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def expires_at(self) -> datetime | None:
        """The time at which the task expires, if it was given as one."""
        return None if self.expires_ms is None else from_ms(self.expires_ms)


NO_FLOW = Flow()


def check_pool(value: object, error: type[InvalidInput] = InvalidTask) -> str:
    """Check the name of a pool: 1 to 200 characters, none of them a control character."""
    return check_name(value, "pool", error)


def check_limit_keys(value: object, error: type[InvalidInput] = InvalidTask) -> tuple[str, ...]:
    """Check the keys of a task: at most 4 different ones, without `*`, which patterns end with."""
    if not isinstance(value, list | tuple):
        raise error(
            f"limit_keys must be a list of at most {MAX_LIMIT_KEYS} strings, not {shown(value)}"
        )
    if len(value) > MAX_LIMIT_KEYS:
        raise error(
            f"limit_keys must have at most {MAX_LIMIT_KEYS} keys, not {len(value)}: {shown(value)}"
        )
    for key in value:
        check_name(key, "a key of limit_keys", error)
        if "*" in key:
            raise error(
                f"a key of limit_keys must not contain '*', not {shown(key)}: only set_limit takes "
                "patterns"
            )
        if value.count(key) > 1:
            raise error(f"limit_keys must have each key once, not {key!r} {value.count(key)} times")
    return tuple(value)


def check_cost(value: object, error: type[InvalidInput] = InvalidTask) -> float:
    """Check the cost of a task: a positive number, at most 1,000,000."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not LEAST_COST <= value <= MOST_COST:  # type: ignore[operator]
        raise error(
            f"cost must be a number greater than 0, from {LEAST_COST:.15g} to {MOST_COST:.15g}, "
            f"not {shown(value)}"
        )
    return float(value)  # type: ignore[arg-type]


def check_unique_for(value: object, error: type[InvalidInput] = InvalidTask) -> str | int:
    """Return "unfinished", "waiting", or a window in milliseconds."""
    if isinstance(value, str):
        if value in UNIQUE_FOR:
            return value
    elif not isinstance(value, bool) and isinstance(value, int | float | timedelta):
        return _check_window(value, "unique_for", error)
    raise error(
        f"unique_for must be 'unfinished', 'waiting' or a number of seconds, not {shown(value)}"
    )


def check_expires(
    value: object, error: type[InvalidInput] = InvalidTask
) -> tuple[int | None, int | None]:
    """Return (ms from the push, ms since 1970) of which one is None. Raises for a past time."""
    if not isinstance(value, datetime):
        if isinstance(value, bool) or not isinstance(value, int | float | timedelta):
            raise error(
                "expires must be a number of seconds, a timedelta or a datetime with a time zone, "
                f"not {shown(value)}"
            )
        return round(check_seconds(value, "expires", error, least=SHORTEST_S) * 1000), None
    if value.utcoffset() is None:
        raise error(
            "expires must be a datetime with a time zone, such as datetime.now(UTC) + "
            f"timedelta(hours=1), or a number of seconds, not {value.isoformat()!r}"
        )
    moment_ms = to_ms(value, "expires", error)
    if is_past(moment_ms):
        raise error(f"expires must be in the future, not {value.isoformat()!r}, which is past")
    return None, moment_ms


def _check_window(value: object, what: str, error: type[InvalidInput]) -> int:
    """Return a duration of at most 30 days in milliseconds."""
    return round(check_seconds(value, what, error, least=SHORTEST_S, most=LONGEST_WINDOW_S) * 1000)


def check_flow(given: Mapping[str, Any], error: type[InvalidInput] = InvalidTask) -> Flow:
    """Return the checked flow of a task; None counts as not given, except for `pool`.

    Raises `error` naming the value.
    """
    if not given:
        return NO_FLOW
    pool = check_pool(given.get("pool", DEFAULT_POOL), error)
    flow: dict[str, Any] = {} if pool == DEFAULT_POOL else {"pool": pool}
    keys, cost, expires = (given.get(name) for name in ("limit_keys", "cost", "expires"))
    if keys is not None and (checked := check_limit_keys(keys, error)):
        flow["limit_keys"] = checked
    if cost is not None:
        flow["cost"] = check_cost(cost, error)
    if expires is not None:
        flow["expires_in_ms"], flow["expires_ms"] = check_expires(expires, error)
    flow |= _check_unique(given, error)
    return Flow(**flow) if flow else NO_FLOW


def _check_unique(given: Mapping[str, Any], error: type[InvalidInput]) -> dict[str, Any]:
    """Return the fields of a flow that belong to a unique key."""
    named = ("unique", "on_duplicate", "unique_for", "debounce", "max_wait")
    unique, reaction, scope, debounce, longest = (given.get(name) for name in named)
    if reaction is not None:
        check_one_of(reaction, "on_duplicate", ON_DUPLICATE, error)
    scope = "unfinished" if scope is None else check_unique_for(scope, error)
    if unique is None:
        usual = {"on_duplicate": "ignore", "unique_for": "unfinished"}
        for name in named[1:]:
            if (value := given.get(name)) not in (None, usual.get(name)):
                raise error(f"{name} needs unique, the key of the task: {name}={shown(value)}")
        return {}
    flow: dict[str, Any] = {"unique": check_name(unique, "unique", error)}
    flow |= {"on_duplicate": reaction or "ignore", "unique_for": scope}
    if debounce is not None:
        flow["debounce_ms"] = _check_window(debounce, "debounce", error)
        if reaction not in (None, "replace"):
            raise error(
                f"on_duplicate must be 'replace' with debounce, not {reaction!r}: the last push "
                "replaces the others"
            )
        flow["on_duplicate"] = "replace"
    if longest is not None:
        if debounce is None:
            raise error(f"max_wait needs debounce: max_wait={shown(longest)}")
        flow["max_wait_ms"] = _check_window(longest, "max_wait", error)
        if flow["max_wait_ms"] < flow["debounce_ms"]:
            raise error(
                f"max_wait must be at least debounce, {shown(debounce)}, not {shown(longest)}"
            )
    return flow


def check_times(flow: Flow, delay_ms: int | None, at_ms: int | None) -> None:
    """Check the times of a flow against the time at which its task becomes ready."""
    if flow is NO_FLOW:
        return
    if flow.debounce_ms is not None:
        for name, ready_ms in (("delay", delay_ms), ("at", at_ms)):
            if ready_ms is not None:
                raise InvalidTask(
                    f"pass debounce or {name}, not both (debounce={flow.debounce_ms / 1000:.15g}, "
                    f"{name}={ready_ms / 1000:.15g})"
                )
    expires_ms = flow.expires_in_ms
    for name, ready_ms in (("delay", delay_ms), ("debounce", flow.debounce_ms)):
        if expires_ms is not None and ready_ms is not None and expires_ms <= ready_ms:
            raise InvalidTask(
                f"expires must be longer than {name}, or the task never starts "
                f"(expires={expires_ms / 1000:.15g}, {name}={ready_ms / 1000:.15g})"
            )
    if flow.expires_ms is not None and at_ms is not None and flow.expires_ms <= at_ms:
        raise InvalidTask(
            "expires must be later than at, or the task never starts "
            f"(expires={from_ms(flow.expires_ms).isoformat()}, at={from_ms(at_ms).isoformat()})"
        )


# Field of a stored flow -> field of Flow, and its type. `expires` is two fields of Flow.
_STORED: dict[str, tuple[str, type | UnionType]] = {
    "keys": ("limit_keys", list),
    "cost": ("cost", int | float),
    "unique": ("unique", str),
    "on_duplicate": ("on_duplicate", str),
    "unique_for": ("unique_for", int | str),
    "debounce": ("debounce_ms", int),
    "max_wait": ("max_wait_ms", int),
}


def read_flow(record: Mapping[str, Any]) -> Flow:
    """Return the flow in a document or a status. Raises TypeError or ValueError if it is damaged.

    Fields that a later version has added are ignored.
    """
    pool, stored = record.get("pool"), record.get("flow")
    if pool is None and stored is None:
        return NO_FLOW
    _check_stored("pool", pool, str | None)
    _check_stored("flow", stored, dict | None)
    flow: dict[str, Any] = {} if pool is None else {"pool": pool}
    for name, value in (stored or {}).items():
        if name in _STORED:
            field, kind = _STORED[name]
            flow[field] = _check_stored(name, value, kind)
    if "limit_keys" in flow:
        flow["limit_keys"] = tuple(_check_stored("keys", key, str) for key in flow["limit_keys"])
    expires = _check_stored("expires", (stored or {}).get("expires"), str | int | None)
    if expires is not None:
        flow["expires_in_ms" if isinstance(expires, str) else "expires_ms"] = int(expires)
    return Flow(**flow)


def _check_stored(name: str, value: Any, kind: type | UnionType) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r:.80}")
    return value
