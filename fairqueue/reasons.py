"""Why a task waits, in sentences: one for each reason, from the values that it is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

Tell = Callable[[datetime], Any]
Fill = Callable[..., str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason why a task waits, or where it is.

    code: no_worker, no_handler, delayed, retry, due, buffered, user_paused, user_capped, user_rate,
    name_slots, name_rate, set_aside, critical, turn, own_tasks; or running, cancelling, succeeded,
    cancelled, failed. text: the same as a sentence, with times in the zone of the process. values:
    what it is made of, by name; moments are aware datetimes.
    """

    code: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)


def reason(code: str, now: datetime, **values: Any) -> Reason:
    """A reason with its sentence."""
    return Reason(code=code, text=sentence(code, values, lambda at: when(at, now)), values=values)


def sentence(code: str, values: Mapping[str, Any], tell: Tell, fill: Fill = str.format) -> str:
    """A reason as a sentence; `tell` writes moments, `fill` puts the values into the text."""
    template = _TEMPLATES[code](values)
    shown = {name: _shown(value, tell) for name, value in values.items()}
    return fill(template, **shown)


def _shown(value: Any, tell: Tell) -> Any:
    if isinstance(value, datetime):
        return tell(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def when(at: datetime, now: datetime) -> str:
    """A moment by the clock of the process, and how far it is: `00:07 CET (in 55 min)`."""
    local, today = at.astimezone(), now.astimezone()
    day = ""
    if local.date() != today.date():
        year = f" {local.year}" if local.year != today.year else ""
        day = f"{local.day} {local:%b}{year} "
    return f"{day}{local:%H:%M:%S} {local.tzname()} ({distance(at - now)})"


def distance(by: timedelta) -> str:
    """`in 55 min`, `2 h 5 min ago`, `now`."""
    seconds = by.total_seconds()
    if abs(seconds) < 1:
        return "now"
    text = _length(abs(seconds))
    return f"in {text}" if seconds > 0 else f"{text} ago"


def _length(seconds: float) -> str:
    """So many seconds in the one or two units that matter."""
    whole = round(seconds)
    for unit, size, below, lower, most in (
        ("s", 1, "", 1, 60),
        ("min", 60, "s", 1, 3600),
        ("h", 3600, "min", 60, 86_400),
        ("d", 86_400, "h", 3600, whole + 1),
    ):
        if whole < most:
            many, rest = divmod(whole, size)
            rest //= lower
            is_short = below and rest and (unit != "min" or many < 10)
            return f"{many} {unit} {rest} {below}" if is_short else f"{many} {unit}"
    raise AssertionError(seconds)


# --- sentences ------------------------------------------------------------------------------------


def _no_worker(values: Mapping[str, Any]) -> str:
    if not values["draining"]:
        return "No worker is alive, so nothing takes tasks from this queue."
    return "No worker takes tasks: all that are alive ({draining}) are draining."


def _no_handler(values: Mapping[str, Any]) -> str:
    if values["workers"] == 1:
        return "The one worker that takes tasks has no handler for '{name}'."
    return "None of the {workers} workers that take tasks has a handler for '{name}'."


def _retry(values: Mapping[str, Any]) -> str:
    of_all = " of {attempts}" if values.get("attempts") else ""
    failed = f"Attempt {{attempt}}{of_all} failed" + (": {error}." if values.get("error") else ".")
    return failed + (" The next attempt starts at {until}." if values.get("until") else "")


def _user_paused(values: Mapping[str, Any]) -> str:
    text = "User '{user}' is paused"
    for name in ("by", "since", "until"):
        text += f" {name} {{{name}}}" if values.get(name) else ""
    return text + (": {note}." if values.get("note") else ".")


def _user_rate(values: Mapping[str, Any]) -> str:
    then = " The next one may start at {until}." if values.get("until") else ""
    return "User '{user}' has used up a rate of {rate} tasks per second." + then


def _name_rate(values: Mapping[str, Any]) -> str:
    return (
        "Tasks named '{name}' have used up their rate of {rate} per second. The next one may start "
        "at {until}."
    )


def _name_slots(values: Mapping[str, Any]) -> str:
    if values["slots"] == 1:
        return "The one slot of tasks named '{name}' is taken."
    return "All {slots} slots of tasks named '{name}' are taken."


def _users(count: int, field: str) -> str:
    return "1 other user" if count == 1 else f"{{{field}}} other users"


def _critical(values: Mapping[str, Any]) -> str:
    users, verb = _users(values["users"], "users"), "has" if values["users"] == 1 else "have"
    return f"{users} {verb} CRITICAL tasks, which may go first."


def _own(values: Mapping[str, Any]) -> str:
    tasks = "1 earlier task" if values["tasks"] == 1 else "{tasks} earlier tasks"
    return f"{tasks} of '{{user}}'"


def _turn(values: Mapping[str, Any]) -> str:
    ahead = [_users(values["users"], "users")] if values["users"] else []
    ahead += [_own(values)] if values["tasks"] else []
    if not ahead:
        return "It is next: the first worker with a free slot takes it."
    return f"It waits for its turn, after {' and '.join(ahead)}."


def _own_tasks(values: Mapping[str, Any]) -> str:
    return f"{_own(values)} {'comes' if values['tasks'] == 1 else 'come'} first."


def _running(values: Mapping[str, Any]) -> str:
    since = " since {since}" if values.get("since") else ""
    return f"It is running on {{worker}}{since}; its lease ends at {{until}}."


def _failed(values: Mapping[str, Any]) -> str:
    return "It failed at {at}" + (": {error}." if values.get("error") else ".")


def _capped(values: Mapping[str, Any]) -> str:
    runs = "1 task running" if values["running"] == 1 else "{running} tasks running"
    return f"User '{{user}}' has {runs}, as many as max_running allows."


_TEMPLATES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "no_worker": _no_worker,
    "no_handler": _no_handler,
    "delayed": lambda _: "Starts at {until}.",
    "retry": _retry,
    "due": lambda _: "It was due at {since}: the next worker that asks for tasks takes it up.",
    "buffered": lambda _: "Starts when the previous run of schedule '{schedule}' ends.",
    "user_paused": _user_paused,
    "user_capped": _capped,
    "user_rate": _user_rate,
    "name_slots": _name_slots,
    "name_rate": _name_rate,
    "set_aside": lambda _: "It waits for its turn among tasks named '{name}'.",
    "critical": _critical,
    "turn": _turn,
    "own_tasks": _own_tasks,
    "running": _running,
    "cancelling": lambda _: "It was asked to stop.",
    "succeeded": lambda _: "It succeeded at {at}.",
    "cancelled": lambda _: "It was cancelled at {at}.",
    "failed": _failed,
}
