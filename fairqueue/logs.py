"""How the library writes to the log: events with fields, readable with any formatter.

A record's message is the name of the event and its fields, so that `logging.basicConfig()` alone
tells what happened, to what, and why:

    WARNING:fairqueue.worker:task_failed task=7f3a user=alice attempt=2 error="ValueError: gone"

The same fields are attributes of the record (they are passed as `extra`), for handlers that want
them apart, such as `JsonFormatter`. The library itself never configures handlers or levels.
"""

import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

# Characters of a value that a message shows; the attribute of the record has all of them.
MAX_SHOWN = 500
# Of a value that JSON cannot hold as it is: characters of a text or a name in it, values in lists
# and objects in all, and how deep these may be in each other.
MAX_PLAIN_TEXT, MAX_PLAIN_VALUES, MAX_PLAIN_DEPTH = 500, 100, 4

USUAL_ATTRIBUTES = {*vars(logging.makeLogRecord({})), "message", "asctime"}


def log_event(
    logger: logging.Logger,
    event: str,
    level: int = logging.INFO,
    /,
    *,
    exc_info: Any = None,
    **fields: object,
) -> None:
    """Log an event with its fields, in the message and as attributes of the record.

    `exc_info` is as in the logging module: True, or the error whose traceback is to be logged.
    Records of one event have one template, by which tools that group records can group them. A
    field must not have the name of an attribute that each record has, such as `name`. What a
    handler or a filter of the application raises ends here, and so does what a value raises that
    is to be shown: it must not end the work that is told.
    """
    if not logger.isEnabledFor(level):
        return
    template = " ".join([event, *(f"{name}=%s" for name in fields)])
    extra = {"event": event, **fields}
    with suppress(Exception):
        values = [value_text(value) for value in fields.values()]
        logger.log(level, template, *values, extra=extra, exc_info=exc_info, stacklevel=2)


def value_text(value: object) -> str:
    """A value on one line; in quotes where it has spaces, quotes or control characters."""
    text = text_of(value)
    if len(text) > MAX_SHOWN:
        text = text[:MAX_SHOWN] + "..."
    is_plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if is_plain else json.dumps(text, ensure_ascii=not text.isprintable())


def text_of(value: object) -> str:
    """What a value says of itself; also of one that cannot say it."""
    try:
        return str(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the value's own code, or a number of thousands of digits
        return f"a {type(value).__name__} that cannot be shown"


def error_text(error: BaseException) -> str:
    """What an error says; also of one that cannot say it."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the error's own code
        return "(its text cannot be read)"


def error_line(error: BaseException) -> str:
    """The type of an error and what it says, whatever it is.

    Better than its repr, which need not say either: `network:ConnectionError` is one of redis-py.
    """
    text = error_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def clean(text: str, most: int) -> str:
    """The beginning of a text, as text that can be stored: lone surrogates are none."""
    return text[:most].encode("utf-8", "replace").decode()


def plain_text(value: object) -> str:
    """The beginning of what a value says of itself, as text that can be stored."""
    return clean(text_of(value), MAX_PLAIN_TEXT)


def new_budget() -> Iterator[None]:
    """For so many values in lists and objects has `plain` room."""
    return itertools.repeat(None, MAX_PLAIN_VALUES)


def plain(value: Any, budget: Iterator[None], depth: int = MAX_PLAIN_DEPTH) -> Any:
    """A value as JSON can hold it, cut to size; "..." where too much was seen already."""
    if value is None or isinstance(value, bool):
        return value
    if (type(value) is int and value.bit_length() <= 64) or (
        type(value) is float and math.isfinite(value)
    ):
        return value
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return plain_text(value)
    if not depth:
        return "..."
    try:
        if isinstance(value, Mapping):
            items = zip(value.items(), budget, strict=False)
            return {plain_text(name): plain(each, budget, depth - 1) for (name, each), _ in items}
        return [plain(each, budget, depth - 1) for each, _ in zip(value, budget, strict=False)]
    except Exception:  # one of the application's own kind, or another thread changes it
        return plain_text(value)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was passed to the logger as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in USUAL_ATTRIBUTES}


def time_of(record: logging.LogRecord) -> str:
    """When it was logged: UTC, ISO 8601, to the millisecond."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """A JSON object on a line of its own, for machines.

    It has `time`, `level`, `logger` and `message`, all that was passed as `extra` (for records of
    this library `event` and its fields), and `exception` with the traceback if there is one; a
    field of `extra` that has one of these names is left out. What JSON does not know is written as
    its text, and a value that it cannot hold at all is cut as in the log of a run.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line |= {name: each for name, each in fields_of(record).items() if name not in line}
        try:
            return _encoded(line)
        except Exception:  # a circle, a name that is no text, a number that is none, ...
            return _encoded({plain_text(name): _holdable(each) for name, each in line.items()})


def _holdable(value: Any) -> Any:
    """A value that JSON can hold: this one if it can."""
    try:
        _encoded(value)
    except Exception:
        return plain(value, new_budget())
    return value


def _encoded(value: Any) -> str:
    return json.dumps(value, default=text_of, allow_nan=False)
