"""Refuse requests of the API with problem+json (RFC 9457) that names the invalid field.

`fairqueue.web.problems` turns errors of the library into problems.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from fairqueue.errors import (
    FairQueueError,
    InvalidCron,
    InvalidInput,
    InvalidPayload,
    UnknownTimezone,
    shown,
    truncate,
)
from fairqueue.web.problems import MAX_PART, ProblemDetails, problem_of

# Errors that are always about the same field.
FIELDS: dict[type[FairQueueError], str] = {
    InvalidCron: "cron_expr",
    UnknownTimezone: "timezone",
    InvalidPayload: "payload",
}
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$?\.?(?P<where>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"[^.\[\]]+")
PRIVATE = ("payload", "metadata")  # what they hold is not repeated
_NAMED = re.compile(r"^Object (?P<kind>contains unknown|missing required) field `(?P<name>.*)`$")


class Refused(Exception):
    """A request is refused with a problem."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.detail)
        self.problem = problem


def refuse(status: int, kind: str, detail: str, **extra: Any) -> Refused:
    """A refusal; `extra` are additional members of the problem."""
    return Refused(ProblemDetails(status=status, kind=kind, detail=detail, extra=extra))


def from_validation_error(
    error: msgspec.ValidationError,
    place: str,
    known: Sequence[str],
    sent: object,
    aliases: Mapping[str, str] = {},
) -> Refused:
    """The refusal of a value that does not match its model. `place` is "body" or "query".

    `sent` is what was to match it. `aliases` are the names that the request used instead of ours.
    """
    # The message may repeat what was sent.
    match = _PLACE.match(str(error))
    what = match["what"] if match else str(error)
    where = truncate((match["where"] or "") if match else "", MAX_PART)
    told = truncate(what, MAX_PART) + _value_at(where, sent, what)
    where = aliases.get(where, where)
    field, detail = where, f"{place}: {where}: {told}" if where else f"{place}: {told}"
    named = _NAMED.match(what)
    if named:
        name = truncate(named["name"], MAX_PART)
        field = f"{where}.{name}" if where else name
        if named["kind"] == "missing required":
            detail = f"{place}: field {field!r} is required"
        else:
            fields = "" if where else f"; expected {', '.join(known) or 'none'}"
            detail = f"{place}: unknown field {field!r}{fields}"
    return refuse(422, "invalid-input", detail, **({"field": field} if field else {}))


def _value_at(where: str, sent: object, what: str) -> str:
    """The value at a place of the request, as the end of a sentence that refuses it."""
    steps = _STEP.findall(where)
    if not steps or not set(steps).isdisjoint(PRIVATE) or what.startswith("Invalid enum value"):
        return ""
    for step in steps:
        if isinstance(sent, Mapping) and step in sent:
            sent = sent[step]
        elif isinstance(sent, list) and step.isdecimal() and int(step) < len(sent):
            sent = sent[int(step)]
        else:
            return ""
    if any(isinstance(each, Mapping) for each in (sent, *(sent if isinstance(sent, list) else ()))):
        return ""
    between = " " if ", got " in what else ", not " if what.startswith("Expected") else ": "
    return between + shown(sent)


def from_library_error(error: FairQueueError, known: Sequence[str]) -> ProblemDetails:
    """The problem of an error of the library, with the field if it is known."""
    problem = problem_of(error)
    field = next((field for kind, field in FIELDS.items() if isinstance(error, kind)), None)
    first = problem.detail.removeprefix("a key of ").partition(" ")[0]
    if field is None and isinstance(error, InvalidInput) and first in known:
        field = first
    return problem if field is None else replace(problem, extra={**problem.extra, "field": field})
