"""Turn errors into problems (RFC 9457) with a status."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from fairqueue.errors import (
    AmbiguousTask,
    BrokenRecord,
    DuplicateTask,
    FairQueueError,
    Forbidden,
    InvalidInput,
    LeaseLost,
    QueueFull,
    RedisRefused,
    RedisUnavailable,
    ScheduleConflict,
    ScheduleQuota,
    StaleVersion,
    UnknownSchedule,
    UnknownTask,
    UnknownTenant,
    UnknownUser,
    UnknownWorker,
    truncate,
)

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1  # after Redis did not respond, or a queue was full

# The first match determines the status.
STATUS: tuple[tuple[type[FairQueueError], int], ...] = (
    (Forbidden, 403),
    (UnknownSchedule, 404),
    (UnknownTask, 404),
    (UnknownUser, 404),
    (UnknownTenant, 404),
    (UnknownWorker, 404),
    (StaleVersion, 412),
    (AmbiguousTask, 409),
    (ScheduleConflict, 409),
    (LeaseLost, 409),
    (ScheduleQuota, 409),  # the request is valid, but what is stored does not allow it
    (DuplicateTask, 409),
    (InvalidInput, 422),
    (QueueFull, 429),
    (RedisUnavailable, 503),
    (RedisRefused, 503),
    (BrokenRecord, 500),
    (FairQueueError, 500),
)
MAX_DETAIL = 3000  # characters
MAX_PART = 500  # characters of a path or a field name from a request
LATER = (429, 503)  # statuses with Retry-After


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemDetails:
    """The problem of a request. `kind` is a stable word for programs, such as `forbidden`."""

    status: int
    kind: str
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The kind in words."""
        return self.kind.replace("-", " ").capitalize()

    def response(self, instance: str | None = None) -> Response:
        """The response as problem+json."""
        body = {
            "type": f"urn:fairqueue:problem:{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": truncate(self.detail, MAX_DETAIL),
            **({"instance": truncate(instance, MAX_PART)} if instance else {}),
            **{name: _short(value) for name, value in self.extra.items()},
        }
        text = json.dumps(body, ensure_ascii=False)
        return Response(text, self.status, dict(self.headers), MEDIA_TYPE)


def _short(value: Any) -> Any:
    return truncate(value, MAX_PART) if isinstance(value, str) else value


def problem_of(error: FairQueueError) -> ProblemDetails:
    """The problem of an error of the library."""
    status = next(status for kind, status in STATUS if isinstance(error, kind))
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in LATER else {}
    extra = {"task_id": error.task_id} if isinstance(error, DuplicateTask) else {}
    return ProblemDetails(
        status=status, kind=_kebab(type(error)), detail=str(error), headers=headers, extra=extra
    )


def problem_of_status(status: int, detail: str | None = None) -> ProblemDetails:
    """The problem of an HTTP status, such as 404 for an unknown path."""
    phrase = HTTPStatus(status).phrase
    kind = phrase.lower().replace(" ", "-").replace("'", "")
    return ProblemDetails(status=status, kind=kind, detail=detail or phrase)


def unauthorized(detail: str) -> ProblemDetails:
    """The problem of a request without a valid key or session."""
    return ProblemDetails(
        status=401,
        kind="unauthorized",
        detail=detail,
        headers={"WWW-Authenticate": 'Bearer realm="fairqueue"'},
    )


def too_many(wait: float, whose: str = "with this key") -> ProblemDetails:
    """The problem of too many requests; `wait` in seconds."""
    seconds = max(1, math.ceil(wait))
    detail = f"too many requests {whose}: retry in {seconds} s"
    headers = {"Retry-After": str(seconds)}
    return ProblemDetails(status=429, kind="too-many-requests", detail=detail, headers=headers)


def _kebab(kind: type[Exception]) -> str:
    """`UnknownSchedule` -> `unknown-schedule`."""
    name = kind.__name__
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")
