"""How log records look on standard error: a line of text for people, or of JSON for machines."""

import json
import logging
from datetime import UTC, datetime
from typing import Any

from fairqueue.cli.text import printable, printable_lines

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

_USUAL_ATTRIBUTES = {*vars(logging.makeLogRecord({})), "message", "asctime"}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What was passed to the logger as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _USUAL_ATTRIBUTES}


def time_of(record: logging.LogRecord) -> str:
    """When it was logged, UTC."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class TextFormatter(logging.Formatter):
    """A line for people: time, level, logger, event, fields."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line; a traceback follows it."""
        fields = fields_of(record)
        if fields.get("event") == record.message:
            del fields["event"]
        words = [time_of(record), record.levelname, record.name, printable(record.message)]
        return " ".join(words + [f"{name}={_value(value)}" for name, value in fields.items()])

    def formatException(self, ei: Any) -> str:
        """A traceback; what an error says may be of anybody's making."""
        return "\n".join(printable_lines(super().formatException(ei)))


def _value(value: object) -> str:
    """A value without spaces and control characters, or quoted."""
    text = str(value)
    is_plain = text.isprintable() and text and not set(text) & set(' "=')
    return text if is_plain else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """A JSON object on a line of its own, for machines."""

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


def configure_logging(level: str, style: str) -> None:
    """Send what the library logs to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
