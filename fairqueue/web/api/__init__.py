"""The REST API over the Inspector, mounted at /api/v1."""

from typing import Any

from starlette.routing import BaseRoute, Mount, Route

from fairqueue.web.api.endpoint import PREFIX
from fairqueue.web.api.endpoints import ENDPOINTS
from fairqueue.web.api.openapi import describe
from fairqueue.web.api.service import Service

# Paths that need no credential.
PUBLIC = frozenset(PREFIX + endpoint.path for endpoint in ENDPOINTS if endpoint.role is None)


def api_routes() -> list[BaseRoute]:
    """The route under /api/v1. There is one, because Service matches undecoded paths."""
    return [Route("/{rest:path}", Service(ENDPOINTS), name="rest")]


def routes() -> list[BaseRoute]:
    """The routes under /api."""
    return [Mount("/v1", routes=api_routes())]


def openapi_document(root_path: str = "") -> dict[str, Any]:
    """The OpenAPI 3.1 document; `root_path` is where the app is mounted."""
    return describe(ENDPOINTS, root_path)


__all__ = ["PUBLIC", "api_routes", "openapi_document", "routes"]
