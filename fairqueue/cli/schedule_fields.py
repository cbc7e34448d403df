"""The options that say what a schedule is, and the fields of the library that they stand for."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from fairqueue.cli.session import F
from fairqueue.cli.values import DURATION, FUTURE, PRIORITY, read_duration, read_object

BACKOFF_HELP = "Before a retry: a duration, or several with commas."

# What can be taken away by `--clear`, and so gets its default.
CLEARABLE = (
    "start",
    "end",
    "windows",
    "exclude",
    "max_runs",
    "retries",
    "backoff",
    "backoff_cap",
    "backoff_multiplier",
    "backoff_jitter",
    "timeout",
    "max_failures",
    "title",
    "description",
)

_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--every",), {"type": DURATION, "help": "Each so often, such as 90s or 2h."}),
    (("--at",), {"type": FUTURE, "help": "Once, at this moment."}),
    (("--timezone", "--tz", "timezone"), {"help": "Zone of the rule; UTC if none is given."}),
    (("--user", "user_id"), {"metavar": "USER", "help": "Whose tasks it makes."}),
    (("--name",), {"help": "Name of the tasks; default: default."}),
    (("--title",), {"help": "What people call it."}),
    (("--description",), {"help": "What it is for."}),
    (("--tenant",), {"help": "The group of users that it belongs to."}),
    (("--priority",), {"type": PRIORITY, "help": "1 to 6, or VERY_LOW to CRITICAL."}),
    (
        ("--payload",),
        {"multiple": True, "metavar": "JSON|@FILE|K=V", "help": "For its tasks; repeatable."},
    ),
    (
        ("--metadata",),
        {"multiple": True, "metavar": "JSON|@FILE|K=V", "help": "Kept with it; repeatable."},
    ),
    (("--start",), {"type": FUTURE, "help": "No moments before."}),
    (("--end",), {"type": FUTURE, "help": "No moments from then on."}),
    (("--anchor",), {"type": FUTURE, "help": "What --every counts from."}),
    (
        ("--window", "windows"),
        {
            "multiple": True,
            "metavar": "JSON",
            "help": 'Only then: {"days": [1, 2], "from": "09:00", "to": "17:30"}; repeatable.',
        },
    ),
    (("--exclude",), {"multiple": True, "metavar": "DATE", "help": "Not then; repeatable."}),
    (("--max-runs",), {"type": int, "help": "Completed after so many."}),
    (("--misfire",), {"help": "Missed moments: fire_once, skip or fire_all."}),
    (("--catch-up",), {"type": DURATION, "help": "How far back fire_all goes."}),
    (("--max-catch-up",), {"type": int, "help": "How many fire_all fires."}),
    (("--jitter",), {"type": DURATION, "help": "Fire up to so much later."}),
    (
        ("--overlap",),
        {"help": "While one is unfinished: allow, skip, buffer_one or cancel_previous."},
    ),
    (("--retries",), {"type": int, "help": "Of its tasks."}),
    (("--backoff",), {"help": BACKOFF_HELP}),
    (("--backoff-cap",), {"type": DURATION, "help": "The longest delay before a retry."}),
    (("--backoff-multiplier",), {"type": float, "help": "What each delay grows by; default: 2."}),
    (("--backoff-jitter",), {"help": "full: delays are drawn at random; default: none."}),
    (("--timeout",), {"type": DURATION, "help": "Of its tasks."}),
    (("--max-failures",), {"type": int, "help": "Paused after so many in a row."}),
)


def schedule_options(command: F) -> F:
    """All options above; the command gets them under the names of the library's fields."""
    for names, settings in reversed(_OPTIONS):
        command = click.option(*names, **settings)(command)
    return command


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were given. Raises UsageError naming what cannot be read."""
    found = {name: value for name, value in given.items() if value is not None and value != ()}
    for name, read in _READERS.items():
        if name in found:
            found[name] = read(found[name])
    return found


def read_rule(text: str) -> str | dict[str, Any] | None:
    """A cron expression or a name as it is, a dictionary of fields from JSON."""
    return read_object([text], "the rule") if text.startswith("{") else text


def read_backoff(text: str) -> float | list[float]:
    """What --backoff says, in seconds. Raises UsageError."""
    parts = [read_duration(part.strip()) for part in text.split(",")]
    seconds = [part for part in parts if part is not None]
    if len(seconds) != len(parts):
        raise click.UsageError(f"--backoff {text!r} is none: a duration, or several: 2s,10s,1m")
    return seconds if "," in text else seconds[0]


def _windows(given: Sequence[str]) -> list[Any]:
    found = []
    for text in given:
        try:
            found.append(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise click.UsageError(f"--window {text!r:.60} is no JSON: {error}") from None
    return found


_READERS: dict[str, Callable[[Any], Any]] = {
    "payload": lambda given: read_object(given, "--payload"),
    "metadata": lambda given: read_object(given, "--metadata"),
    "cron_expr": read_rule,
    "backoff": read_backoff,
    "windows": _windows,
    "exclude": list,
}


def cleared(names: Sequence[str]) -> dict[str, None]:
    """Fields that are to be taken away. Raises UsageError naming one that cannot be."""
    found: dict[str, None] = {}
    for name in names:
        field = name.replace("-", "_")
        if field not in CLEARABLE:
            raise click.UsageError(f"--clear {name!r} is none of {', '.join(CLEARABLE)}")
        found[field] = None
    return found
