"""How the library writes to the log: events with fields, readable with any formatter.

A record's message is the name of the event and its fields, so that `logging.basicConfig()` alone
tells what happened, to what, and why:

    WARNING:fairqueue.worker:task_failed task=7f3a user=alice attempt=2 error="ValueError: gone"

The same fields are attributes of the record (they are passed as `extra`), for handlers that want
them apart, such as `JsonFormatter`. The library itself never configures handlers or levels.
"""

import json
import logging
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

# Characters of a value that a message shows; the attribute of the record has all of them.
MAX_SHOWN = 500

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
    handler or a filter of the application raises ends here: it must not end the work that is told.
    """
    if not logger.isEnabledFor(level):
        return
    template = " ".join([event, *(f"{name}=%s" for name in fields)])
    values = [value_text(value) for value in fields.values()]
    extra = {"event": event, **fields}
    with suppress(Exception):
        logger.log(level, template, *values, extra=extra, exc_info=exc_info, stacklevel=2)


def value_text(value: object) -> str:
    """A value on one line; in quotes where it has spaces, quotes or control characters."""
    text = str(value)
    if len(text) > MAX_SHOWN:
        text = text[:MAX_SHOWN] + "..."
    is_plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if is_plain else json.dumps(text, ensure_ascii=not text.isprintable())


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was passed to the logger as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in USUAL_ATTRIBUTES}


def time_of(record: logging.LogRecord) -> str:
    """When it was logged: UTC, ISO 8601, to the millisecond."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """A JSON object on a line of its own, for machines.

    It has `time`, `level`, `logger` and `message`, all that was passed as `extra` (for records of
    this library `event` and its fields), and `exception` with the traceback if there is one. What
    JSON does not know is written as its text.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
