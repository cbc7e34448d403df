"""Describe the endpoints as an OpenAPI 3.1 document."""

from collections.abc import Sequence
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from fairqueue.web.api.aliases import SCHEMAS, TAKEN, names_for
from fairqueue.web.api.endpoint import PREFIX, Endpoint, Nothing

REF = "#/components/schemas/{name}"
JSON, PROBLEM = "application/json", "application/problem+json"

DESCRIPTION = """\
Schedules, runs, users, tenants and settings of one FairQueue queue.

Listings return pages: pass `cursor` to get the next one. Errors are problem documents (RFC 9457).
Every write accepts an `Idempotency-Key`: the same request with the same key is done once.
"""

_IDEMPOTENCY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"},
    "description": "a repeated request with the same key gets the stored response, for a day",
}
_IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "schema": {"type": "string"},
    "description": "the ETag of the job: 412 if the job has changed",
}
_IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "schema": {"type": "string"},
    "description": "the ETag of the job: 304 if the job has not changed",
}


class ProblemDocument(msgspec.Struct, kw_only=True, rename={"kind": "type"}):
    """The problem of a request (RFC 9457). `type` is for programs, `detail` for people."""

    kind: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    field: str | None = None


def describe(endpoints: Sequence[Endpoint], root: str) -> dict[str, Any]:
    """The OpenAPI document; `root` is the path that the app is mounted at."""
    models: list[Any] = [ProblemDocument]
    for each in endpoints:
        models += [model for model in (each.query, each.body, each.answer) if _is_model(model)]
    models = list(dict.fromkeys(models))
    _, schemas = msgspec.json.schema_components(models, ref_template=REF)
    for model in TAKEN:
        _add_aliases(model, schemas.get(model.__name__))
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(PREFIX + each.path, {})[each.method.lower()] = _operation(each, schemas)
    used = _used(paths)
    return {
        "openapi": "3.1.0",
        "info": {"title": "FairQueue", "version": _version(), "description": DESCRIPTION},
        "servers": [{"url": root or "/"}],
        "security": [{"bearer": []}, {"key": []}],
        "tags": [{"name": name} for name in dict.fromkeys(each.group for each in endpoints)],
        "paths": paths,
        "components": {
            "schemas": {name: schemas[name] for name in sorted(_closure(used, schemas))},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _add_aliases(model: Any, schema: dict[str, Any] | None) -> None:
    """Add the alternative names of fields."""
    if schema is None:
        return
    schema["properties"] = schema["properties"] | {name: SCHEMAS[name] for name in names_for(model)}
    if schema["required"]:
        rest = [name for name in schema["required"] if name != "user_id"]
        either = ("user_id", "run_as_user_id")
        schema |= {"required": rest, "anyOf": [{"required": [name]} for name in either]}


def _is_model(model: Any) -> bool:
    return isinstance(model, type) and issubclass(model, msgspec.Struct)


def _version() -> str:
    try:
        return version("fairqueue")
    except PackageNotFoundError:
        return "0"


def _operation(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "tags": [endpoint.group],
        "responses": {str(each): _response(endpoint, each) for each in endpoint.statuses},
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in endpoint.parameters
    ]
    parameters += _query(endpoint, schemas)
    parameters += [_IDEMPOTENCY] if endpoint.is_write else []
    parameters += [_IF_MATCH] if endpoint.supports_if_match else []
    parameters += [_IF_NONE_MATCH] if endpoint.has_etag and endpoint.method == "GET" else []
    if parameters:
        described["parameters"] = parameters
    if endpoint.has_body:
        described["requestBody"] = {
            "required": endpoint.needs_body,
            "content": {JSON: {"schema": _ref(endpoint.body)}},
        }
    if endpoint.role is None:
        described["security"] = []
    else:
        described["description"] = f"Needs the role {endpoint.role}."
        described["x-role"] = endpoint.role
        described["x-tenants"] = endpoint.tenants
    return described


def _query(endpoint: Endpoint, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    model = schemas[endpoint.query.__name__] if endpoint.query is not Nothing else {}
    return [
        {
            "name": name,
            "in": "query",
            "required": name in model["required"],
            "schema": _without_null(schema),
        }
        for name, schema in model.get("properties", {}).items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without null: a parameter is left out instead."""
    kinds = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(kinds) == 1:
        schema = {**{k: v for k, v in schema.items() if k != "anyOf"}, **kinds[0]}
    return {name: value for name, value in schema.items() if (name, value) != ("default", None)}


def _ref(model: Any) -> dict[str, Any]:
    return {"$ref": REF.format(name=model.__name__)} if _is_model(model) else {"type": "object"}


def _response(endpoint: Endpoint, status: int) -> dict[str, Any]:
    described: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    if status in (endpoint.status, *endpoint.other_statuses) and endpoint.answer is not None:
        described["content"] = {JSON: {"schema": _ref(endpoint.answer)}}
    elif status >= 400:
        described["content"] = {PROBLEM: {"schema": _ref(ProblemDocument)}}
    headers = _response_headers(endpoint, status)
    if headers:
        described["headers"] = {name: {"schema": {"type": "string"}} for name in headers}
    return described


def _response_headers(endpoint: Endpoint, status: int) -> list[str]:
    if status in (429, 503) and endpoint.role is not None:
        return ["Retry-After"]
    if status == 304 or (status == endpoint.status and endpoint.has_etag):
        return ["ETag"]
    return []


def _used(value: Any) -> set[str]:
    """The names of the schemas that a value refers to."""
    if isinstance(value, dict):
        ref = value.get("$ref")
        own = {ref.rpartition("/")[2]} if isinstance(ref, str) else set()
        return own.union(*(_used(each) for each in value.values()))
    if isinstance(value, list):
        return set().union(*(_used(each) for each in value))
    return set()


def _closure(names: set[str], schemas: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    rest = set(names)
    while rest:
        name = rest.pop()
        found.add(name)
        rest |= _used(schemas[name]) - found
    return found
