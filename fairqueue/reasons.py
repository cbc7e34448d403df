"""The reasons why a task waits, as codes with values and as sentences."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

FormatTime = Callable[[datetime], Any]
FillTemplate = Callable[..., str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason why a task waits, or its state if it does not wait.

    code: no_worker, no_pool_worker, no_handler, delayed, retry, due, buffered, behind, user_paused,
    user_capped, user_rate, tenant_paused, tenant_capped, tenant_rate, name_slots, name_rate,
    set_aside, key_slots, key_rate, key_order, key_turn, reserved, critical, turn, tenant_turn,
    own_tasks, expires, expiring (it has expired, but is not ended yet); or running, cancelling,
    succeeded, cancelled, failed, expired. text: a sentence, with times in the time zone of the
    process. values: the values in the sentence, by name; times are aware datetimes.
    """

    code: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)


def reason(code: str, now: datetime, **values: Any) -> Reason:
    """Return a reason with its sentence."""
    return Reason(code=code, text=sentence(code, values, lambda at: when(at, now)), values=values)


def sentence(
    code: str, values: Mapping[str, Any], format_time: FormatTime, fill: FillTemplate = str.format
) -> str:
    """Return the sentence of a reason. `fill` inserts the values, by name, into the template."""
    template = _TEMPLATES[code]
    text = template if isinstance(template, str) else template(values)
    return fill(text, **{name: _shown(value, format_time) for name, value in values.items()})


def _shown(value: Any, format_time: FormatTime) -> Any:
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def when(at: datetime, now: datetime) -> str:
    """Format a time in the time zone of the process: `00:07:00 CET (in 55 min)`."""
    local, today = at.astimezone(), now.astimezone()
    day = ""
    if local.date() != today.date():
        year = f" {local.year}" if local.year != today.year else ""
        day = f"{local.day} {local:%b}{year} "
    return f"{day}{local:%H:%M:%S} {local.tzname()} ({distance(at - now)})"


def distance(by: timedelta) -> str:
    """Format a time relative to now: `in 55 min`, `2 h 5 min ago`, `now`."""
    seconds = by.total_seconds()
    if abs(seconds) < 1:
        return "now"
    text = _length(abs(seconds))
    return f"in {text}" if seconds > 0 else f"{text} ago"


def _length(seconds: float) -> str:
    """Format a duration in its largest unit, and the next smaller one unless that is noise."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        many, unit, rest, below = whole // 60, "min", whole % 60, "s"
    elif whole < 86_400:
        many, unit, rest, below = whole // 3600, "h", whole % 3600 // 60, "min"
    else:
        many, unit, rest, below = whole // 86_400, "d", whole % 86_400 // 3600, "h"
    is_short = rest and (unit != "min" or many < 10)
    return f"{many} {unit} {rest} {below}" if is_short else f"{many} {unit}"


def roughly(seconds: float) -> str:
    """A duration that is an estimate, in one unit: `20 s`, `3 min`, `2 h`, `4 d`."""
    for unit, length, most in (("s", 1, 59.5), ("min", 60, 59.5), ("h", 3600, 47.5)):
        if seconds / length < most:
            return f"{max(seconds / length, 0):.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def estimate(about: datetime, earliest: datetime, latest: datetime, now: datetime) -> str:
    """When something starts, as a part of a sentence: `in about 3 min (2 to 5 min)`."""
    first, at, last = (max((each - now).total_seconds(), 0) for each in (earliest, about, latest))
    if last < 1:
        return "at once"
    low, middle, high = roughly(first), roughly(at), roughly(last)
    if low == high:
        return f"in about {middle}"
    (many, unit), (_, other) = low.split(), high.split()
    return f"in about {middle} ({many if unit == other else low} to {high})"


# --- sentences ------------------------------------------------------------------------------------


def _no_worker(values: Mapping[str, Any]) -> str:
    if not values["draining"]:
        return "No worker is alive, so no task can start."
    return "No worker takes tasks: all live workers ({draining}) are draining."


def _no_handler(values: Mapping[str, Any]) -> str:
    if values["workers"] == 1:
        return "The only worker that takes tasks has no handler for '{name}'."
    return "None of the {workers} workers that take tasks has a handler for '{name}'."


def _retry(values: Mapping[str, Any]) -> str:
    of_all = " of {attempts}" if values.get("attempts") else ""
    failed = f"Attempt {{attempt}}{of_all} failed" + (": {error}." if values.get("error") else ".")
    return failed + (" The next attempt starts at {until}." if values.get("until") else "")


def _no_pool_worker(values: Mapping[str, Any]) -> str:
    if values["workers"] == 0:
        return "No live worker serves pool '{pool}'."
    if values["workers"] == 1:
        return "The only worker that takes tasks does not serve pool '{pool}'."
    return "None of the {workers} workers that take tasks serves pool '{pool}'."


def _sharer(values: Mapping[str, Any]) -> str:
    """The beginning of a sentence about a user or a tenant."""
    return "User '{user}'" if "user" in values else "Tenant '{tenant}'"


def _paused(values: Mapping[str, Any]) -> str:
    text = f"{_sharer(values)} is paused"
    for name in ("by", "since", "until"):
        text += f" {name} {{{name}}}" if values.get(name) else ""
    return text + (": {note}." if values.get("note") else ".")


def _rate(values: Mapping[str, Any]) -> str:
    then = " The next one may start at {until}." if values.get("until") else ""
    return f"{_sharer(values)} has reached the rate limit of {{rate}} tasks per second.{then}"


def _limited(values: Mapping[str, Any]) -> str:
    """The tasks of a limit, as a part of a sentence."""
    return "tasks named '{name}'" if "name" in values else "tasks with the key '{key}'"


def _slots(values: Mapping[str, Any]) -> str:
    if values["slots"] == 1:
        return f"The only slot for {_limited(values)} is taken."
    return f"All {{slots}} slots for {_limited(values)} are taken."


def _limit_rate(values: Mapping[str, Any]) -> str:
    tasks = _limited(values)
    return (
        f"{tasks[0].upper()}{tasks[1:]} have reached their rate limit of {{rate}} per second. "
        "The next one may start at {until}."
    )


def _key_order(values: Mapping[str, Any]) -> str:
    if values["tasks"] == 1:
        return "1 earlier task with the key '{key}' has to start first."
    return "{tasks} earlier tasks with the key '{key}' have to start first."


def _set_aside(values: Mapping[str, Any]) -> str:
    return f"It waits for its turn among the {_limited(values)}."


def _reserved(values: Mapping[str, Any]) -> str:
    return f"An older task is next for a slot of the {_limited(values)}."


def _users(count: int, field: str) -> str:
    return "1 other user" if count == 1 else f"{{{field}}} other users"


def _critical(values: Mapping[str, Any]) -> str:
    users, verb = _users(values["users"], "users"), "has" if values["users"] == 1 else "have"
    return f"{users} {verb} CRITICAL tasks, which may run first."


def _own(values: Mapping[str, Any]) -> str:
    tasks = "1 earlier task" if values["tasks"] == 1 else "{tasks} earlier tasks"
    return f"{tasks} of '{{user}}'"


def _turn(values: Mapping[str, Any]) -> str:
    ahead = [_users(values["users"], "users")] if values["users"] else []
    ahead += [_own(values)] if values["tasks"] else []
    if not ahead:
        return "It is next: the first worker with a free slot takes it."
    return f"It waits for its turn, after {' and '.join(ahead)}."


def _ordinal(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def _tenant_turn(values: Mapping[str, Any]) -> str:
    others = "1 other" if values["tenants"] == 1 else "{tenants} others"
    first = f"Tenant '{{tenant}}' is served after {others}"
    if not values["tenants"]:
        first = "Tenant '{tenant}' is served next"
    if values["of"] > 1:
        first += f"; among its {{of}} waiting users, '{{user}}' is {_ordinal(values['place'])}"
    return f"{first}, after {_own(values)}." if values["tasks"] else f"{first}."


def _own_tasks(values: Mapping[str, Any]) -> str:
    return f"{_own(values)} {'runs' if values['tasks'] == 1 else 'run'} first."


def _running(values: Mapping[str, Any]) -> str:
    since = " since {since}" if values.get("since") else ""
    return f"It is running on {{worker}}{since}; its lease ends at {{until}}."


def _failed(values: Mapping[str, Any]) -> str:
    return "It failed at {at}" + (": {error}." if values.get("error") else ".")


def _capped(values: Mapping[str, Any]) -> str:
    runs = "1 task running" if values["running"] == 1 else "{running} tasks running"
    return f"{_sharer(values)} has {runs}, as many as max_running allows."


# By code: the template, or a function that chooses it by the values.
_TEMPLATES: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
    "no_worker": _no_worker,
    "no_pool_worker": _no_pool_worker,
    "no_handler": _no_handler,
    "delayed": "Starts at {until}.",
    "retry": _retry,
    "due": "It was due at {since}. The next worker that asks for tasks takes it.",
    "buffered": "Starts when the previous run of schedule '{schedule}' ends.",
    "behind": "Starts when the running task with the same unique key ends.",
    "user_paused": _paused,
    "user_capped": _capped,
    "user_rate": _rate,
    "tenant_paused": _paused,
    "tenant_capped": _capped,
    "tenant_rate": _rate,
    "name_slots": _slots,
    "name_rate": _limit_rate,
    "set_aside": _set_aside,
    "key_slots": _slots,
    "key_rate": _limit_rate,
    "key_order": _key_order,
    "key_turn": _set_aside,
    "reserved": _reserved,
    "critical": _critical,
    "turn": _turn,
    "tenant_turn": _tenant_turn,
    "expires": "It expires at {until} if it has not started.",
    "expiring": "It expired at {until} and will not start: the next claim ends it.",
    "own_tasks": _own_tasks,
    "running": _running,
    "cancelling": "Its cancellation was requested.",
    "succeeded": "It succeeded at {at}.",
    "cancelled": "It was cancelled at {at}.",
    "failed": _failed,
    "expired": "It expired at {at}: no worker had started it by then.",
}
