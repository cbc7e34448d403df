"""An alert: its kind, severity, summary and details, cut to a safe size."""

import logging
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fairqueue.errors import FairQueueError, InvalidInput, kind_of, shown
from fairqueue.logs import log_event
from fairqueue.models import new_id
from fairqueue.validation import check_one_of

logger = logging.getLogger("fairqueue.alerts")

# Sent once for each task, run or schedule.
EVENT_KINDS = (
    "task_failed",
    "task_timed_out",
    "stale_run",
    "schedule_disabled",
    "schedule_broken",
)
# Sent when a value reaches its limit, and again when it is back below the limit.
LIMIT_KINDS = (
    "error_rate",
    "lock_failures",
    "lateness",
    "backlog",
    "oldest_wait",
    "expired_tasks",
    "pool_unserved",
    "redis_unreachable",
)
SUMMARY = "summary"  # replaces the alerts beyond the limit of a minute
KINDS = (*EVENT_KINDS, *LIMIT_KINDS, SUMMARY)
SEVERITIES = {
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

# In characters: an alert says where to look, it is not the record itself.
MAX_SUMMARY, MAX_SUBJECT, MAX_KEY, MAX_DETAIL = 300, 150, 500, 500
MAX_DETAILS = 20  # fields
MAX_INTEGER = 2**63  # other programs may not read a larger number from JSON

_KIND = re.compile(r"[a-z][a-z0-9_]{0,49}")
_BROKEN_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")


class AlertNotSent(FairQueueError):
    """An alert was not delivered. The message has no secrets and no text of the recipient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A message for people.

    Alerts with the same `kind` and `key` are duplicates. All texts become single lines of bounded
    length, and `details` plain values, so that any recipient can show them. Never put payloads into
    an alert. The last four fields are set before delivery: `suppressed` counts the duplicates since
    the last one that was sent, `dropped` the alerts that this recipient did not get.

    Raises InvalidInput for a bad `kind`, `severity` or `details`.
    """

    kind: str
    summary: str
    key: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    severity: str = "error"
    resolved: bool = False
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    alert_id: str = field(default_factory=new_id)
    source: str = ""
    suppressed: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not _KIND.fullmatch(self.kind):
            raise InvalidInput(
                "kind must be a word of up to 50 lower-case letters, digits and underscores, such "
                f"as 'task_failed', not {shown(self.kind):.80}"
            )
        check_one_of(self.severity, "severity", SEVERITIES)
        if not isinstance(self.details, Mapping):
            raise InvalidInput(f"details must be a dict, not {kind_of(self.details)}")
        details = list(self.details.items())[:MAX_DETAILS]
        cleaned = {one_line(name, 50): _plain(value) for name, value in details}
        object.__setattr__(self, "summary", one_line(self.summary, MAX_SUMMARY))
        object.__setattr__(self, "key", one_line(self.key, MAX_KEY))
        object.__setattr__(self, "details", cleaned)

    def headline(self) -> str:
        """Return the summary, with the numbers of alerts not sent, in one line."""
        text = self.summary
        if self.suppressed:
            text += f" [{self.suppressed} duplicates since the last alert]"
        if self.dropped:
            text += f" [{self.dropped} earlier alerts were not delivered]"
        return text

    def text(self) -> str:
        """Return the whole alert as lines of text."""
        lines = [self.headline(), ""]
        lines += [f"{name}: {value}" for name, value in self.details.items()]
        lines += [f"kind: {self.kind}", f"severity: {self.severity}"]
        lines += [f"at: {self.at.isoformat(timespec='seconds')}", f"source: {self.source}"]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Return the whole alert as JSON values."""
        return {
            "id": self.alert_id,
            "kind": self.kind,
            "key": self.key,
            "state": "resolved" if self.resolved else "raised",
            "severity": self.severity,
            "summary": self.summary,
            "details": dict(self.details),
            "at": self.at.isoformat(timespec="milliseconds"),
            "source": self.source,
            "suppressed": self.suppressed,
            "dropped": self.dropped,
        }


def one_line(value: object, most: int) -> str:
    """Return a value as one line of bounded length, which cannot forge headers or log lines."""
    try:
        text = str(value)
    except Exception:  # the value's own __str__ failed
        text = f"a {type(value).__name__} that cannot be shown"
    text = _BROKEN_LINE.sub(" ", text[: 2 * most]).strip()
    return text if len(text) <= most else text[: most - 1] + "…"


def _plain(value: object) -> object:
    """Return a detail as a JSON value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < MAX_INTEGER:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return one_line(value, MAX_DETAIL)


def error_text(error: BaseException | str) -> str:
    """Return the type and the message of an error in one line."""
    if isinstance(error, str):
        return one_line(error, MAX_DETAIL)
    return one_line(f"{type(error).__name__}: {one_line(error, MAX_DETAIL)}", MAX_DETAIL)


def log_warning(event: str, **fields: object) -> None:
    """Log a warning; ignore errors of the application's log handlers."""
    with suppress(Exception):
        log_event(logger, event, logging.WARNING, **fields)
