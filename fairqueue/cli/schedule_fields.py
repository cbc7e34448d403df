"""The options of schedules on the command line, made from the table of fields."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from fairqueue.cli.session import F
from fairqueue.cli.values import DURATION, FUTURE, PRIORITY, read_duration, read_object
from fairqueue.schedules.fields import FIELDS, KINDS, TABLE, ScheduleField

BACKOFF_HELP = "Delay before a retry: a duration, or several with commas."

# What `--clear` can reset to its default.
CLEARABLE = tuple(
    each.name
    for each in TABLE
    if each.option is not None and each.default is None and not each.kept and each.name not in KINDS
)

_TYPES: dict[str, Any] = {
    "duration": DURATION,
    "seconds": DURATION,
    "time": FUTURE,
    "priority": PRIORITY,
    "integer": int,
    "number": float,
}
# With the metavar.
_REPEATED = {"object": "JSON|@FILE|K=V", "windows": "JSON", "dates": "DATE", "texts": "TEXT"}


def schedule_options(command: F) -> F:
    """Add an option for each field; the command gets it under the name of the field."""
    for each in reversed(TABLE):
        if each.option is not None:
            command = _option(each)(command)
    return command


def _option(each: ScheduleField) -> Callable[[F], F]:
    names = each.option or (f"--{each.name.replace('_', '-')}",)
    settings: dict[str, Any] = {"help": each.help, "type": _TYPES.get(each.kind)}
    if each.kind == "flag":
        names = tuple(f"{name}/--no-{name.removeprefix('--')}" for name in names)
        settings["default"] = None
    if each.choices and each.kind == "choice":
        settings["help"] += f" One of {', '.join(filter(None, each.choices))}."
    if each.kind in _REPEATED:
        settings |= {"multiple": True, "metavar": _REPEATED[each.kind]}
        settings["help"] += " Repeatable."
    return click.option(*names, each.name, **settings)


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that were given. Raises UsageError naming what cannot be read."""
    found = {name: value for name, value in given.items() if value is not None and value != ()}
    for name in found.keys() & FIELDS.keys():
        if read := _READERS.get(FIELDS[name].kind):
            found[name] = read(name, found[name])
    return found


def read_rule(text: str) -> str | dict[str, Any] | None:
    """Return a cron expression or a name as it is, a dictionary of fields from JSON."""
    return read_object([text], "the rule") if text.startswith("{") else text


def read_backoff(text: str) -> float | list[float]:
    """Return the delays of --backoff in seconds. Raises UsageError."""
    parts = [read_duration(part.strip()) for part in text.split(",")]
    seconds = [part for part in parts if part is not None]
    if len(seconds) != len(parts):
        raise click.UsageError(
            f"--backoff must be a duration, or several such as 2s,10s,1m, not {text!r}"
        )
    return seconds if "," in text else seconds[0]


def _period(name: str, text: str) -> str | float:
    choices = FIELDS[name].choices
    if text in choices:
        return text
    seconds = read_duration(text)
    if seconds is None:
        raise click.UsageError(
            f"--{name.replace('_', '-')} must be {', '.join(choices)} or a duration such as 2h, "
            f"not {text!r}"
        )
    return seconds


def _windows(name: str, given: Sequence[str]) -> list[Any]:
    found = []
    for text in given:
        try:
            found.append(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise click.UsageError(f"--window {text!r:.60} is not JSON: {error}") from None
    return found


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "object": lambda name, given: read_object(given, f"--{name}"),
    "cron": lambda name, given: read_rule(given),
    "backoff": lambda name, given: read_backoff(given),
    "windows": _windows,
    "dates": lambda name, given: list(given),
    "texts": lambda name, given: list(given),
    "period": _period,
}

# What goes with a field that is cleared: without a unique key these say nothing.
_GOES_WITH = {"unique": ("on_duplicate", "unique_for")}


def cleared(names: Sequence[str]) -> dict[str, Any]:
    """Return the fields to reset. Raises UsageError naming one that cannot be."""
    found: dict[str, Any] = {}
    for name in names:
        field = name.replace("-", "_")
        if field not in CLEARABLE:
            raise click.UsageError(f"--clear must be one of {', '.join(CLEARABLE)}, not {name!r}")
        found[field] = None
        found |= {other: FIELDS[other].default for other in _GOES_WITH.get(field, ())}
    return found
