"""Say no in the form of problem+json (RFC 9457): what is wrong with a request, and with which part.

Errors of the library become problems in `fairqueue.web.problems`; here is what only the API has.
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
    cut,
)
from fairqueue.web.problems import LONGEST_PART, ProblemDetails, problem_of

# Where an error is always about the same field.
FIELDS: dict[type[FairQueueError], str] = {
    InvalidCron: "cron_expr",
    UnknownTimezone: "timezone",
    InvalidPayload: "payload",
}
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$?\.?(?P<where>.*)`)?$", re.DOTALL)
_NAMED = re.compile(r"^Object (?P<kind>contains unknown|missing required) field `(?P<name>.*)`$")


class Refused(Exception):
    """A request that gets a problem for an answer."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.detail)
        self.problem = problem


def refuse(status: int, kind: str, detail: str, **extra: Any) -> Refused:
    """A refusal; `extra` are members of the problem besides those that all have."""
    return Refused(ProblemDetails(status=status, kind=kind, detail=detail, extra=extra))


def conflict(detail: str) -> ProblemDetails:
    """What is there now does not allow it."""
    return ProblemDetails(status=409, kind="conflict", detail=detail)


def not_found(kind: str, detail: str) -> ProblemDetails:
    """There is no such thing."""
    return ProblemDetails(status=404, kind=kind, detail=detail)


def of_form(
    error: msgspec.ValidationError,
    place: str,
    known: Sequence[str],
    aliases: Mapping[str, str] = {},
) -> Refused:
    """What a model says of a value: `place` is "body" or "query".

    `aliases` are the names that the request used instead of ours.
    """
    # It may repeat what was sent: the name of a field, a value that is not one of a few.
    match = _PLACE.match(str(error))
    what = match["what"] if match else str(error)
    where = cut((match["where"] or "") if match else "", LONGEST_PART)
    where = aliases.get(where, where)
    shown = cut(what, LONGEST_PART)
    field, detail = where, f"{place}: {where}: {shown}" if where else f"{place}: {shown}"
    named = _NAMED.match(what)
    if named:
        name = cut(named["name"], LONGEST_PART)
        field = f"{where}.{name}" if where else name
        if named["kind"] == "missing required":
            detail = f"{place}: the field {field!r} is missing"
        else:
            fields = "" if where else f": known are {', '.join(known) or 'none'}"
            detail = f"{place}: unknown field {field!r}{fields}"
    return refuse(422, "invalid-input", detail, **({"field": field} if field else {}))


def of_library(error: FairQueueError, known: Sequence[str]) -> ProblemDetails:
    """An error of the library, with the field that it is about where that is known."""
    problem = problem_of(error)
    field = next((field for kind, field in FIELDS.items() if isinstance(error, kind)), None)
    first = problem.detail.partition(" ")[0]
    if field is None and isinstance(error, InvalidInput) and first in known:
        field = first
    return problem if field is None else replace(problem, extra={**problem.extra, "field": field})
