"""An alert: its kind, severity, text and details, cut to what is safe to send."""

import logging
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fairqueue.errors import (
    FairQueueError,
    InvalidInput,
    kind_of,
    shown,
)
from fairqueue.logs import log_event
from fairqueue.models import new_id

logger = logging.getLogger("fairqueue.alerts")

# Sent once for each task, run or schedule concerned.
EVENT_KINDS = (
    "task_failed",
    "task_timed_out",
    "stale_run",
    "schedule_disabled",
    "schedule_broken",
)
# Sent when a value reaches its limit, and again when it is back within it.
LIMIT_KINDS = (
    "error_rate",
    "lock_failures",
    "lateness",
    "backlog",
    "oldest_wait",
    "redis_unreachable",
)
SUMMARY = "summary"  # stands for the alerts that were too many for a minute
KINDS = (*EVENT_KINDS, *LIMIT_KINDS, SUMMARY)
SEVERITIES = {
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

# Characters that are kept: an alert is a hint where to look, not the record itself.
MAX_SUMMARY, MAX_SUBJECT, MAX_KEY, MAX_DETAIL = 300, 150, 500, 500
MAX_DETAILS = 20  # fields
MAX_INTEGER = 2**63  # a longer number may not be written as JSON by Python, or read by others


_KIND = re.compile(r"[a-z][a-z0-9_]{0,49}")
_BROKEN_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")


class AlertNotSent(FairQueueError):
    """A recipient could not be told; the message has no secret and nothing that it answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that a person should know.

    Alerts with the same `kind` and `key` are the same news. All texts become single lines of
    bounded length, and `details` plain values, so that any recipient can show them. Never put
    payloads into it. The last four fields are filled in on the way to the recipient: `suppressed`
    is how many of the same news were kept back since the last one, `dropped` how many alerts this
    recipient did not get.

    Raises InvalidInput for an unusable `kind`, `severity` or `details`.
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
                f"kind {shown(self.kind):.80} cannot be used: a word such as 'task_failed', of up "
                "to 50 small letters, digits and underscores"
            )
        if self.severity not in SEVERITIES:
            known = ", ".join(SEVERITIES)
            raise InvalidInput(f"severity {shown(self.severity):.80} is none of {known}")
        if not isinstance(self.details, Mapping):
            raise InvalidInput(f"details must be a dict, not {kind_of(self.details)}")
        details = list(self.details.items())[:MAX_DETAILS]
        cleaned = {one_line(name, 50): _plain(value) for name, value in details}
        object.__setattr__(self, "summary", one_line(self.summary, MAX_SUMMARY))
        object.__setattr__(self, "key", one_line(self.key, MAX_KEY))
        object.__setattr__(self, "details", cleaned)

    def headline(self) -> str:
        """The summary, and what was not told, in one line."""
        text = self.summary
        if self.suppressed:
            text += f" [{self.suppressed} more of these since the last alert]"
        if self.dropped:
            text += f" [{self.dropped} alerts before this one were not delivered]"
        return text

    def text(self) -> str:
        """Everything about it in lines, for people."""
        lines = [self.headline(), ""]
        lines += [f"{name}: {value}" for name, value in self.details.items()]
        lines += [f"kind: {self.kind}", f"severity: {self.severity}"]
        lines += [f"at: {self.at.isoformat(timespec='seconds')}", f"source: {self.source}"]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Everything about it as JSON can hold it, for programs."""
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
    """A value as one line of bounded length: a header or a log line cannot be forged with it."""
    try:
        text = str(value)
    except Exception:  # the value's own code
        text = f"a {type(value).__name__} that cannot be shown"
    text = _BROKEN_LINE.sub(" ", text[: 2 * most]).strip()
    return text if len(text) <= most else text[: most - 1] + "…"


def _plain(value: object) -> object:
    """A detail as JSON can hold it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < MAX_INTEGER:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return one_line(value, MAX_DETAIL)


def error_text(error: BaseException | str) -> str:
    """What an error says, in one line."""
    if isinstance(error, str):
        return one_line(error, MAX_DETAIL)
    return one_line(f"{type(error).__name__}: {one_line(error, MAX_DETAIL)}", MAX_DETAIL)


def log_warning(event: str, **fields: object) -> None:
    """A warning; a handler of the application that raises is not our caller's problem."""
    with suppress(Exception):
        log_event(logger, event, logging.WARNING, **fields)
