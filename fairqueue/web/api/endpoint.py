"""Say what an endpoint of the API is: one row of the table that everything else is made from."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from fairqueue.inspection import Inspector
from fairqueue.web.api.models import Input

PREFIX = "/api/v1"

Q = TypeVar("Q", bound=Input)
B = TypeVar("B", bound=Input)

WRITES = ("POST", "PUT", "PATCH", "DELETE")

# What an endpoint is about, for a key that belongs to a tenant.
OBJECT = "object"  # one object: that of another tenant is not found
LISTING = "listing"  # many: those of its tenant only
SHARED = "shared"  # what all tenants share: forbidden
OPEN = "open"  # nothing that belongs to anybody


class Nothing(Input):
    """No fields: the request says all by its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest(Generic[Q, B]):
    """A request that has passed all checks of its form.

    root is the path under which the API is mounted; if_match are the etags that the client holds.
    """

    inspector: Inspector
    path: Mapping[str, str]
    query: Q
    body: B
    root: str
    if_match: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a handler answers; without a status, the one of its endpoint.

    `kept` stands for the content where the answer is kept for repeated requests.
    """

    content: Any = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    kept: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One row of the table.

    role: what it takes, None where nobody has to say who they are. tenants: OBJECT, LISTING, SHARED
    or OPEN. status: of an answer that is no problem. has_etag: its answer has one, so GET heeds
    If-None-Match. heeds_match: it heeds If-Match.
    """

    method: str
    path: str
    handler: Callable[[ApiRequest[Any, Any]], Reply]
    role: str | None
    tenants: str
    answer: Any
    query: type[Input] = Nothing
    body: type[Input] = Nothing
    status: int = 200
    other_statuses: tuple[int, ...] = ()
    has_etag: bool = False
    heeds_match: bool = False

    @property
    def summary(self) -> str:
        """What it does, in a line."""
        return (self.handler.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def name(self) -> str:
        """Its id in the OpenAPI document."""
        return self.handler.__name__

    @property
    def group(self) -> str:
        """What it is listed under."""
        parts = self.path.split("/")[1:]
        return parts[1] if parts[0] == "scheduler" else parts[0].removesuffix(".json")

    @property
    def parameters(self) -> list[str]:
        """The names of what is variable in its path."""
        return re.findall(r"\{(\w+)\}", self.path)

    @property
    def is_write(self) -> bool:
        """Whether it takes an Idempotency-Key."""
        return self.method in WRITES

    @property
    def has_body(self) -> bool:
        """Whether a body is read."""
        return self.method in ("POST", "PUT", "PATCH")

    @property
    def needs_body(self) -> bool:
        """Whether an empty body is refused."""
        fields = msgspec.structs.fields(self.body)
        return self.has_body and any(each.required for each in fields)

    @property
    def statuses(self) -> list[int]:
        """All that it may answer, 5xx of servers in front of it aside."""
        found = {self.status, *self.other_statuses}
        if self.role is not None:
            found |= {401, 403, 429, 500, 503}
        if self.parameters:
            found |= {404, 422}
        if self.query is not Nothing or self.role is not None:
            found.add(422)  # a parameter that nobody knows is one, too
        if self.has_body:
            found |= {400, 413, 415, 422}
        if self.is_write:
            found.add(409)
        if self.heeds_match:
            found.add(412)
        if self.has_etag and self.method == "GET":
            found.add(304)
        return sorted(found)
