"""How log records look on standard error: a line of text for people, or of JSON for machines."""

import logging
from typing import Any

from fairqueue.cli.text import printable, printable_lines
from fairqueue.logs import JsonFormatter, fields_of, time_of, value_text

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


class TextFormatter(logging.Formatter):
    """A line for people: time, level, logger, message, and the fields that it does not have."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line; a traceback follows it."""
        words = [time_of(record), record.levelname, record.name, printable(record.message)]
        template = str(record.msg)
        for name, value in fields_of(record).items():
            is_said = (
                value == template.split(" ")[0] if name == "event" else f" {name}=%s" in template
            )
            if not is_said:
                words.append(f"{name}={value_text(value)}")
        return " ".join(words)

    def formatException(self, ei: Any) -> str:
        """A traceback; what an error says may be of anybody's making."""
        return "\n".join(printable_lines(super().formatException(ei)))


def configure_logging(level: str, style: str) -> None:
    """Send what the library logs to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
