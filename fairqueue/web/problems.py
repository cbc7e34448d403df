"""Turn errors into answers: problem+json (RFC 9457) for programs, a page or a toast for people."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from fairqueue.errors import (
    BrokenRecord,
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
    UnknownUser,
    UnknownWorker,
    cut,
)

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1  # after Redis did not answer, or a queue was full

# The first row that fits an error decides its status.
STATUS: tuple[tuple[type[FairQueueError], int], ...] = (
    (Forbidden, 403),
    (UnknownSchedule, 404),
    (UnknownTask, 404),
    (UnknownUser, 404),
    (UnknownWorker, 404),
    (StaleVersion, 412),
    (ScheduleConflict, 409),
    (LeaseLost, 409),
    (ScheduleQuota, 409),  # the request is fine, what is stored says no
    (InvalidInput, 422),
    (QueueFull, 429),
    (RedisUnavailable, 503),
    (RedisRefused, 503),
    (BrokenRecord, 500),
    (FairQueueError, 500),
)
LONGEST_DETAIL = 3000  # characters; errors are shorter, but for what others say in them
LONGEST_PART = 500  # characters of a path or of the name of a field, as somebody has sent it
LATER = (429, 503)  # statuses that say: ask again


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemDetails:
    """What went wrong with a request. `kind` is a stable word for programs, such as `forbidden`."""

    status: int
    kind: str
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The kind, in words."""
        return self.kind.replace("-", " ").capitalize()

    def response(self, instance: str | None = None) -> Response:
        """The answer for a program."""
        body = {
            "type": f"urn:fairqueue:problem:{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": cut(self.detail, LONGEST_DETAIL),
            **({"instance": cut(instance, LONGEST_PART)} if instance else {}),
            **{name: _short(value) for name, value in self.extra.items()},
        }
        text = json.dumps(body, ensure_ascii=False)
        return Response(text, self.status, dict(self.headers), MEDIA_TYPE)


def _short(value: Any) -> Any:
    return cut(value, LONGEST_PART) if isinstance(value, str) else value


def problem_of(error: FairQueueError) -> ProblemDetails:
    """The problem that an error of the library is."""
    status = next(status for kind, status in STATUS if isinstance(error, kind))
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in LATER else {}
    return ProblemDetails(
        status=status, kind=_kebab(type(error)), detail=str(error), headers=headers
    )


def problem_of_status(status: int, detail: str | None = None) -> ProblemDetails:
    """The problem that a bare HTTP status is, such as 404 for a path that nothing answers."""
    phrase = HTTPStatus(status).phrase
    kind = phrase.lower().replace(" ", "-").replace("'", "")
    return ProblemDetails(status=status, kind=kind, detail=detail or phrase)


def unauthorized(detail: str) -> ProblemDetails:
    """Nobody we know sent this."""
    return ProblemDetails(
        status=401,
        kind="unauthorized",
        detail=detail,
        headers={"WWW-Authenticate": 'Bearer realm="fairqueue"'},
    )


def too_many(wait: float, whose: str = "with this key") -> ProblemDetails:
    """Somebody has asked too often; `wait` in seconds."""
    seconds = max(1, math.ceil(wait))
    detail = f"too many requests {whose}: ask again in {seconds} s"
    headers = {"Retry-After": str(seconds)}
    return ProblemDetails(status=429, kind="too-many-requests", detail=detail, headers=headers)


def _kebab(kind: type[Exception]) -> str:
    """`UnknownSchedule` -> `unknown-schedule`."""
    name = kind.__name__
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")
