"""How the library writes to the log: events with fields, readable with any formatter.

A record's message is the name of the event and its fields, so that `logging.basicConfig()` is
enough to read them:

    WARNING:fairqueue.worker:task_failed task=7f3a user=alice attempt=2 error="ValueError: gone"

The fields are also attributes of the record (they are passed as `extra`), for handlers such as
`JsonFormatter`. The library itself never configures handlers or levels.
"""

import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

# Characters of a value in a message; the attribute of the record is never cut.
MAX_SHOWN = 500
# Limits of `plain`: characters of a text, values in all lists and objects, and levels of nesting.
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

    `exc_info` is as in the logging module: True, or the error whose traceback is logged. All
    records of an event have the same template, by which tools can group them. A field must not
    have the name of a standard attribute of records, such as `name`. Errors raised by handlers and
    filters of the application, or by a value that is formatted, are suppressed: logging must not
    end the work it reports.
    """
    if not logger.isEnabledFor(level):
        return
    template = " ".join([event, *(f"{name}=%s" for name in fields)])
    extra = {"event": event, **fields}
    with suppress(Exception):
        values = [value_text(value) for value in fields.values()]
        logger.log(level, template, *values, extra=extra, exc_info=exc_info, stacklevel=2)


def whose(user_id: str | None, tenant: str | None) -> dict[str, str | None]:
    """Return the log fields of a user: `user`, and `tenant` for a user of one."""
    return {"user": user_id} if tenant is None else {"user": user_id, "tenant": tenant}


def event_logger(name: str) -> "partial[None]":
    """Return `log_event` for the logger of this name."""
    return partial(log_event, logging.getLogger(name))


def value_text(value: object) -> str:
    """Return a value on one line; quoted if it has spaces, quotes or control characters."""
    text = text_of(value)
    if len(text) > MAX_SHOWN:
        text = text[:MAX_SHOWN] + "..."
    is_plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if is_plain else json.dumps(text, ensure_ascii=not text.isprintable())


def text_of(value: object) -> str:
    """Return `str(value)`, or a substitute if that raises."""
    return _str(value, f"a {type(value).__name__} that cannot be shown")


def error_text(error: BaseException) -> str:
    """Return `str(error)`, or a substitute if that raises."""
    return _str(error, "(its text cannot be read)")


def _str(value: object, substitute: str) -> str:
    try:
        return str(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # from the value's own code, or an integer of thousands of digits
        return substitute


def error_line(error: BaseException) -> str:
    """Return the type and the text of an error; its repr need not contain either."""
    text = error_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def clean(text: str, most: int) -> str:
    """Return up to `most` characters of a text, without lone surrogates, which cannot be stored."""
    return text[:most].encode("utf-8", "replace").decode()


def plain_text(value: object) -> str:
    """Return the beginning of `str(value)`, as text that can be stored."""
    return clean(text_of(value), MAX_PLAIN_TEXT)


def new_budget() -> Iterator[None]:
    """Return the budget of `plain`: how many values of lists and objects it keeps."""
    return itertools.repeat(None, MAX_PLAIN_VALUES)


def plain(value: Any, budget: Iterator[None], depth: int = MAX_PLAIN_DEPTH) -> Any:
    """Return a value that JSON can hold, cut to size; "..." stands for values nested too deep."""
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
    except Exception:  # a class of the application, or another thread changes it
        return plain_text(value)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that were passed to the logger as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in USUAL_ATTRIBUTES}


def time_of(record: logging.LogRecord) -> str:
    """Return when a record was logged: UTC, ISO 8601, to the millisecond."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON.

    The object has `time`, `level`, `logger` and `message`, the fields passed as `extra` (for
    records of this library `event` and its fields), and `exception` with the traceback if there is
    one. Fields of `extra` that have one of these names are left out. Values of types that JSON does
    not have are written as text; values that it cannot hold at all are cut as in the log of a run.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
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
        except Exception:  # a cycle, a key that is not text, a NaN, ...
            return _encoded({plain_text(name): _holdable(each) for name, each in line.items()})


def _holdable(value: Any) -> Any:
    """Return the value if JSON can hold it, else a plain version of it."""
    try:
        _encoded(value)
    except Exception:
        return plain(value, new_budget())
    return value


def _encoded(value: Any) -> str:
    return json.dumps(value, default=text_of, allow_nan=False)
