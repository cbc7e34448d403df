"""The report of one attempt at a task, for the history: error, traceback and log lines, bounded."""

import hashlib
import itertools
import json
import logging
import re
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fairqueue.logs import clean, error_text, log_event, new_budget, plain, plain_text
from fairqueue.validation import MAX_ERROR_LENGTH, MAX_RESULT_BYTES, encode_json

logger = logging.getLogger("fairqueue.worker")

MAX_TRACEBACK_BYTES = 8 * 1024  # the end is kept: it has the place of the error
MAX_FRAMES = 100  # innermost frames that are kept of each exception in a chain
MAX_LINES = 200  # log lines of one attempt; the last ones are kept
MAX_LINE_LENGTH = 500  # characters
MAX_CONTEXT_BYTES = 2000  # of the context of one line, as JSON
MAX_DOCUMENT_BYTES = 32 * 1024
MAX_TYPE_LENGTH = 200  # characters
SHOWN_RESULT = 1000  # characters kept of a result that is not JSON

_PACKAGE = str(Path(__file__).parent.parent)

# The parts that differ between two failures of one kind. The order matters: ids may be quoted.
_VARYING = [
    (re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`"), "<text>"),
    (re.compile(r"(?i)\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"(?i)\b0x[0-9a-f]+\b|\b[0-9a-f]{8,}\b"), "<hex>"),
    (re.compile(r"\d+(\.\d+)?"), "<n>"),
]


NO_CONTEXT: Mapping[str, Any] = MappingProxyType({})


class LogLine(NamedTuple):
    """One line that a handler logged."""

    at_ms: int
    level: str
    message: str
    context: Mapping[str, Any] = NO_CONTEXT  # the extra fields of the log call


class LogLines:
    """The last lines that an attempt logged, and how many were dropped before them.

    Any thread may add a line. There is no lock: a time-out can be raised inside `keep`, and would
    leave it locked.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lines: deque[tuple[int, LogLine]] = deque(maxlen=MAX_LINES)

    def keep(self, level: int, message: str, context: Mapping[str, Any] = NO_CONTEXT) -> None:
        """Add a line with its fields, cut to their limits."""
        name = clean(logging.getLevelName(level).lower(), 20)
        text = clean(message, MAX_LINE_LENGTH)
        line = LogLine(round(time.time() * 1000), name, text, bounded(context))
        self._lines.append((next(self._numbers), line))

    def kept(self) -> tuple[tuple[LogLine, ...], int]:
        """The kept lines, oldest first, and how many were dropped before them."""
        lines = list(self._lines)
        total = max((number for number, _ in lines), default=0)
        return tuple(line for _, line in lines), total - len(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How an attempt failed. `place` is the file and function of the error, if known."""

    type: str
    message: str
    traceback: str = ""
    place: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describe an error of any kind. Never raises.

        An error that came from another process carries the description that was made there.
        """
        known = vars(error).get("failure")
        if isinstance(known, Failure):
            return known
        return cls(
            type=clean(type(error).__name__, MAX_TYPE_LENGTH),
            message=clean(error_text(error), MAX_ERROR_LENGTH),
            traceback=_traceback_of(error),
            place=_place_of(error),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one attempt adds to the history: `document`, empty if there is nothing to add.

    seconds: how long the handler ran. log, log_dropped: its last lines, and how many were dropped.
    error_type, message, traceback, timed_out: how it failed. fingerprint: the same for failures of
    the same kind, whatever ids and numbers they contain; '' if it did not fail. cost: what it has
    cost, if the handler says so.
    """

    seconds: float
    log: tuple[LogLine, ...] = ()
    log_dropped: int = 0
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    timed_out: bool = False
    fingerprint: str = ""
    cost: float | None = None

    @classmethod
    def of_failure(
        cls,
        task_name: str,
        failure: Failure,
        *,
        seconds: float,
        lines: LogLines | None = None,
        timed_out: bool = False,
    ) -> "Report":
        """The report of an attempt that failed."""
        log, dropped = ((), 0) if lines is None else lines.kept()
        return cls(
            seconds=seconds,
            log=log,
            log_dropped=dropped,
            error_type=clean(failure.type, MAX_TYPE_LENGTH),
            message=clean(failure.message, MAX_ERROR_LENGTH),
            traceback=_end_of(failure.traceback, MAX_TRACEBACK_BYTES),
            timed_out=timed_out,
            fingerprint=fingerprint(task_name, failure, timed_out=timed_out),
        )

    @property
    def document(self) -> str:
        """The report as one line of JSON, at most 32 KiB; '' if there is nothing to add.

        If it is too long, the oldest log lines are dropped first, then the start of the traceback.
        """
        if not self.log and not self.error_type:
            return ""
        report = self
        while len((text := report._encoded()).encode()) > MAX_DOCUMENT_BYTES:
            half = len(report.log) // 2
            if report.log:
                gone = len(report.log) - half
                dropped = report.log_dropped + gone
                report = replace(report, log=report.log[gone:], log_dropped=dropped)
            else:
                report = replace(report, traceback=report.traceback[len(report.traceback) // 2 :])
        return text

    def _encoded(self) -> str:
        fields: dict[str, Any] = {"seconds": round(self.seconds, 6)}
        for name in ("error_type", "message", "traceback", "fingerprint", "timed_out"):
            if value := getattr(self, name):
                fields[name] = value
        if self.log:
            fields["log"] = [line[:3] for line in self.log]
            # In a field of its own, by line number: older versions read lines of three values.
            contexts = {str(n): line.context for n, line in enumerate(self.log) if line.context}
            if contexts:
                fields["log_context"] = contexts
        if self.log_dropped:
            fields["log_dropped"] = self.log_dropped
        return json.dumps(fields, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def fingerprint(task_name: str, failure: Failure, *, timed_out: bool = False) -> str:
    """16 hexadecimal digits that failures of the same kind share.

    A time-out can interrupt a handler anywhere, so its place does not count.
    """
    message = failure.message[:MAX_ERROR_LENGTH]
    for pattern, word in _VARYING:
        message = pattern.sub(word, message)
    parts = (task_name, failure.type, message, "" if timed_out else failure.place)
    text = "\0".join(parts)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def failure_arguments(error: object, report: Report | None, name: str) -> dict[str, str]:
    """The arguments of the scripts that record a failed attempt."""
    text = str(error).encode("utf-8", "replace").decode()[:MAX_ERROR_LENGTH]
    mark = report.fingerprint if report is not None else ""
    return {
        "error": text,
        "timed_out": "1" if report is not None and report.timed_out else "",
        "fingerprint": mark or fingerprint(name, Failure(type="", message=text)),
        "report": "" if report is None else report.document,
    }


def bounded(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the context of a log line, as a JSON object of at most MAX_CONTEXT_BYTES.

    Values that JSON cannot hold are replaced by the beginning of their text. Fields that do not fit
    are left out, and `more_fields` counts them. Never raises.
    """
    found: dict[str, Any] = {}
    room = MAX_CONTEXT_BYTES
    budget = new_budget()
    for number, (name, value) in enumerate(list(fields.items())):
        name, value = plain_text(name), plain(value, budget)
        room -= len(json.dumps({name: value}, ensure_ascii=False).encode("utf-8", "replace"))
        if room < 0:
            found["more_fields"] = len(fields) - number
            break
        found[name] = value
    return found


def storable(result: Any) -> Any:
    """A copy of a result that can be stored.

    A result that is not JSON, or too large, is replaced by the beginning of its text.
    """
    if result is None:
        return None
    try:
        return json.loads(encode_json(result, "result", MAX_RESULT_BYTES))
    except Exception:  # methods of the result may raise anything
        log_event(logger, "result_kept_as_text", logging.DEBUG, exc_info=True)
    try:
        return clean(repr(result), SHOWN_RESULT)
    except Exception:
        return f"a {type(result).__name__} that cannot be shown"


def _end_of(text: str, most: int) -> str:
    """The end of a text, at most `most` bytes."""
    encoded = text.encode("utf-8", "replace")
    return encoded[-most:].decode("utf-8", "ignore")


def _traceback_of(error: BaseException) -> str:
    """The traceback from the handler on, without the frames of the library above it."""
    start = error.__traceback__
    while start is not None and start.tb_next is not None and _is_ours(start.tb_frame.f_code):
        start = start.tb_next
    try:
        lines = traceback.format_exception(type(error), error, start, limit=-MAX_FRAMES)
    except Exception:  # an error whose text cannot be made
        lines = traceback.format_tb(start, limit=-MAX_FRAMES)
    return _end_of("".join(lines).rstrip("\n"), MAX_TRACEBACK_BYTES)


def _is_ours(code: Any) -> bool:
    return bool(code.co_filename.startswith(_PACKAGE))


def _place_of(error: BaseException) -> str:
    """File and function of the innermost frame, without the line, which changes with every edit."""
    last = error.__traceback__
    if last is None:
        return ""
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    return clean(f"{Path(code.co_filename).name}:{code.co_name}", 2 * MAX_TYPE_LENGTH)
