"""What an endpoint of the API is: a row of the table in endpoints.py."""

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from fairqueue.inspection import Inspector
from fairqueue.web.api.models import Input, given
from fairqueue.web.app_state import AppState

PREFIX = "/api/v1"

Q = TypeVar("Q", bound=Input)
B = TypeVar("B", bound=Input)

WRITES = ("POST", "PUT", "PATCH", "DELETE")

# What a key of a tenant gets from an endpoint.
OBJECT = "object"  # one object; an object of another tenant is not found
LISTING = "listing"  # only the objects of its tenant
NEW = "new"  # what it creates belongs to its tenant
SHARED = "shared"  # nothing, because all tenants share it
OPEN = "open"  # everything


class Nothing(Input):
    """No fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest(Generic[Q, B]):
    """A request whose form was checked.

    root: the path that the API is mounted at. if_match: the etag that the object must have.
    """

    state: AppState
    inspector: Inspector
    path: Mapping[str, str]
    query: Q
    body: B
    root: str
    if_match: str | None = None

    @property
    def id(self) -> str:
        """The id in the path."""
        return next(iter(self.path.values()))

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields of query and body that were given, as a new dict."""
        return given(self.query) | given(self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A response with a status or headers of its own.

    kept: the content to store for repeated requests, if it differs.
    """

    content: Any = None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    kept: Any = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table.

    handler: returns a Reply, or a value that the service encodes as JSON. role: the role
    that it needs; None if it needs no key. tenants: OBJECT, LISTING, NEW, SHARED or OPEN. answer:
    the model of the response. status: on success. has_etag: the response has an ETag, and GET
    supports If-None-Match. supports_if_match: it supports If-Match.
    """

    method: str
    path: str
    handler: Callable[[ApiRequest[Any, Any]], Any]
    role: str | None
    tenants: str
    answer: Any
    _: KW_ONLY
    query: type[Input] = Nothing
    body: type[Input] = Nothing
    status: int = 200
    other_statuses: tuple[int, ...] = ()
    has_etag: bool = False
    supports_if_match: bool = False

    @property
    def summary(self) -> str:
        """What it does, in one line."""
        return (self.handler.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def name(self) -> str:
        """The operation id in the OpenAPI document."""
        return self.handler.__name__

    @property
    def group(self) -> str:
        """The tag in the OpenAPI document."""
        parts = self.path.split("/")[1:]
        return parts[1] if parts[0] == "scheduler" else parts[0].removesuffix(".json")

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters in the path."""
        return re.findall(r"\{(\w+)\}", self.path)

    @property
    def is_write(self) -> bool:
        """Whether it accepts an Idempotency-Key."""
        return self.method in WRITES

    @property
    def has_body(self) -> bool:
        """Whether it reads a body."""
        return self.method in ("POST", "PUT", "PATCH")

    @property
    def needs_body(self) -> bool:
        """Whether an empty body is refused."""
        fields = msgspec.structs.fields(self.body)
        return self.has_body and any(each.required for each in fields)

    @property
    def statuses(self) -> list[int]:
        """All statuses that it may return."""
        found = {self.status, *self.other_statuses}
        if self.role is not None:
            found |= {401, 403, 429, 500, 503}
        if self.parameters:
            found |= {404, 422}
        if self.query is not Nothing or self.role is not None:
            found.add(422)  # unknown parameters are refused
        if self.has_body:
            found |= {400, 413, 415, 422}
        if self.is_write or {"task_id", "schedule_id"} & set(self.parameters):
            found.add(409)  # an id may be that of several partitions
        if self.supports_if_match:
            found.add(412)
        if self.has_etag and self.method == "GET":
            found.add(304)
        return sorted(found)
