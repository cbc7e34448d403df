"""Format log records on standard error, as text or as JSON."""

import logging
from typing import Any

from fairqueue.cli.text import printable, printable_lines
from fairqueue.logs import JsonFormatter, fields_of, time_of, value_text

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


class TextFormatter(logging.Formatter):
    """A line with time, level, logger, message, and the fields not already in the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without the traceback."""
        words = [time_of(record), record.levelname, record.name, printable(record.message)]
        template = str(record.msg)
        for name, value in fields_of(record).items():
            in_message = (
                value == template.split(" ")[0] if name == "event" else f" {name}=%s" in template
            )
            if not in_message:
                words.append(f"{name}={value_text(value)}")
        return " ".join(words)

    def formatException(self, ei: Any) -> str:
        """A traceback with control characters escaped: error texts may contain anything."""
        return "\n".join(printable_lines(super().formatException(ei)))


def configure_logging(level: str, style: str) -> None:
    """Send log records to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
