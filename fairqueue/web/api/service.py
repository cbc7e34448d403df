"""Serve the endpoints: find the endpoint, check the form of the request, send the response."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import unquote, urlencode

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fairqueue.access.credentials import Actor
from fairqueue.access.idempotency import ReplyStore
from fairqueue.errors import FairQueueError, StaleVersion, shown, truncate
from fairqueue.inspection.documents import document
from fairqueue.logs import log_event
from fairqueue.models import new_id
from fairqueue.validation import check_name
from fairqueue.web.api.aliases import resolve
from fairqueue.web.api.endpoint import ApiRequest, Endpoint, Nothing, Reply
from fairqueue.web.api.errors import Refused, from_library_error, from_validation_error, refuse
from fairqueue.web.api.models import Input
from fairqueue.web.app_state import app_state
from fairqueue.web.auth import inspector_of
from fairqueue.web.problems import MEDIA_TYPE, ProblemDetails

logger = logging.getLogger("fairqueue.web")

MAX_BODY_BYTES = 1024 * 1024
JSON = "application/json"
RUNNING_RETRY_S = 1  # when to repeat a request that is still being processed


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """A response. `kept` is the body for repeated requests, if it differs."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    kept: bytes | None = None

    def response(self, is_head: bool) -> Response:
        """The response for Starlette; for HEAD, with the length of the body."""
        headers = dict(self.headers)
        if is_head:
            headers["Content-Length"] = str(len(self.body))
        return Response(b"" if is_head else self.body, self.status, headers)


class Service:
    """The API as an ASGI app, below its prefix."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._routes = Routes(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        request = Request(scope, receive)
        try:
            endpoint, path = self._routes.find(request.method, segments(scope))
            body = await read_body(request) if endpoint.has_body else b""
            answer = await run_in_threadpool(answer_to, endpoint, path, request, body)
        except Refused as refused:
            answer = problem_answer(refused.problem, request)
        response = answer.response(request.method == "HEAD")
        response.headers["RateLimit-Policy"] = rate_policy(request)
        await response(scope, receive, send)


def rate_policy(request: Request) -> str:
    """The RateLimit-Policy header: the burst of a key, and the seconds to refill it."""
    state = app_state(request)
    return f'"key";q={state.burst};w={math.ceil(state.burst / state.rate)}'


# --- routing --------------------------------------------------------------------------------------


def segments(scope: Scope) -> list[str]:
    """The segments of the path below the prefix of the API.

    They are split before they are decoded, because an id may contain an encoded slash.
    """
    prefix = str(scope["path"]).removesuffix(str(scope["path_params"]["rest"]))
    return [unquote(part) for part in _sent_path(scope).split("/")[prefix.count("/") :]]


class Routes:
    """The endpoints by their paths."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        # Fixed names take precedence over ids: `jobs/export` is the export.
        self._rows = sorted(
            ((endpoint.path.split("/")[1:], endpoint) for endpoint in endpoints),
            key=lambda row: [part.startswith("{") for part in row[0]],
        )

    def find(self, method: str, parts: Sequence[str]) -> tuple[Endpoint, dict[str, str]]:
        """The endpoint and its path parameters. Raises Refused: 404, or 405 with Allow."""
        allowed: list[str] = []
        for template, endpoint in self._rows:
            path = _match(template, parts)
            if path is None:
                continue
            if method == endpoint.method or (method, endpoint.method) == ("HEAD", "GET"):
                return endpoint, path
            allowed += ["GET", "HEAD"] if endpoint.method == "GET" else [endpoint.method]
        if not allowed:
            raise refuse(
                404, "not-found", f"there is nothing at {truncate('/' + '/'.join(parts), 200)}"
            )
        allow = ", ".join(dict.fromkeys(allowed))
        detail = f"{method} is not allowed here; use {allow}"
        raise Refused(
            ProblemDetails(
                status=405, kind="method-not-allowed", detail=detail, headers={"Allow": allow}
            )
        )


def _match(template: Sequence[str], parts: Sequence[str]) -> dict[str, str] | None:
    if len(template) != len(parts):
        return None
    path = {}
    for wanted, part in zip(template, parts, strict=True):
        if wanted.startswith("{") and part:
            path[wanted[1:-1]] = part
        elif wanted != part:
            return None
    return path


# --- reading requests -----------------------------------------------------------------------------


async def read_body(request: Request) -> bytes:
    """Read the body. Raises Refused: 413, 415."""
    body = b""
    length = request.headers.get("content-length", "")
    if not (length.isdigit() and int(length) > MAX_BODY_BYTES):
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                break
        else:
            return _check_type(request, body)
    raise refuse(413, "too-large", f"a body may have at most {MAX_BODY_BYTES} bytes")


def _check_type(request: Request, body: bytes) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        raise refuse(
            415,
            "unsupported-media-type",
            f"Content-Type must be {JSON}, not {kind!r:.80}",
            accept=JSON,
        )
    return body


def read_query(endpoint: Endpoint, request: Request) -> Input:
    """Parse the query string. Raises Refused: 422."""
    model = endpoint.query
    fields = {each.encode_name: each.type for each in msgspec.structs.fields(model)}
    values: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if _is_list(fields.get(name)):
            values.setdefault(name, []).append(value)
        elif name in values:
            raise refuse(422, "invalid-input", f"query: {shown(name)} is given twice", field=name)
        else:
            values[name] = value
    try:
        return msgspec.convert(values, model, strict=False)
    except msgspec.ValidationError as error:
        raise from_validation_error(error, "query", list(fields), values) from None


def _is_list(kind: Any) -> bool:
    return getattr(getattr(kind, "__origin__", kind), "__origin__", None) is list


def read_json(endpoint: Endpoint, body: bytes) -> Input:
    """Parse the body; an empty one has no fields. Raises Refused: 400, 422."""
    if not endpoint.has_body:
        return Nothing()
    try:
        value = msgspec.json.decode(body) if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refuse(400, "malformed-json", f"the body is not valid JSON: {error}") from None
    value, aliases = resolve(value, endpoint.body)
    try:
        return msgspec.convert(value, endpoint.body)
    except msgspec.ValidationError as error:
        known = [each.encode_name for each in msgspec.structs.fields(endpoint.body)]
        raise from_validation_error(error, "body", known, value, aliases) from None


# --- responses ------------------------------------------------------------------------------------


def answer_to(
    endpoint: Endpoint, path: Mapping[str, str], request: Request, body: bytes
) -> HttpAnswer:
    """Process a request. Runs in a thread; errors become problems."""
    key = request.headers.get("idempotency-key") if endpoint.is_write else None
    if key is None:
        return _done(endpoint, path, request, body)
    act = partial(_done_once, key, endpoint, path, request, body)
    return _guarded(act, ["Idempotency-Key"], endpoint, request)


def _guarded(
    act: Callable[[], HttpAnswer], known: Sequence[str], endpoint: Endpoint, request: Request
) -> HttpAnswer:
    try:
        return act()
    except Refused as refused:
        return problem_answer(refused.problem, request)
    except FairQueueError as error:
        return problem_answer(from_library_error(error, known), request)
    except Exception:
        return _crashed(endpoint, request)


def _done(endpoint: Endpoint, path: Mapping[str, str], request: Request, body: bytes) -> HttpAnswer:
    def act() -> HttpAnswer:
        result = endpoint.handler(_call(endpoint, path, request, body))
        return _finished(endpoint, _reply(result), request)

    return _guarded(act, _names(endpoint), endpoint, request)


def _reply(result: Any) -> Reply:
    """The reply to a request; a handler may also return the value to be shown."""
    if isinstance(result, Reply):
        return result
    content = document(result)
    return Reply(content={"items": content} if isinstance(content, list) else content)


def _names(endpoint: Endpoint) -> list[str]:
    models = (endpoint.body, endpoint.query)
    return [field for model in models for field in model.__struct_fields__] + endpoint.parameters


def _call(
    endpoint: Endpoint, path: Mapping[str, str], request: Request, body: bytes
) -> ApiRequest[Any, Any]:
    state = app_state(request)
    call = ApiRequest(
        state=state,
        inspector=state.inspector if endpoint.role is None else inspector_of(request),
        path=path,
        query=read_query(endpoint, request),
        body=read_json(endpoint, body),
        root=str(request.scope.get("root_path", "")),
    )
    if endpoint.supports_if_match and "if-match" in request.headers:
        return replace(call, if_match=_if_match(call, request.headers["if-match"]))
    return call


def _if_match(call: ApiRequest[Any, Any], header: str) -> str | None:
    """The etag that must be current; None for any. Raises StaleVersion if none can match."""
    tags = [tag.strip() for tag in header.split(",") if tag.strip()]
    if "*" in tags:
        return None
    strong = [tag.strip('"') for tag in tags if not tag.startswith("W/")]
    if len(strong) == 1:
        return strong[0]
    now = call.inspector.schedules.get(call.path["schedule_id"]).etag
    for tag in strong:
        if tag.partition(".")[0] == now.partition(".")[0]:
            return tag
    raise StaleVersion(f"the job has changed: none of the etags {header!r:.200} is current")


def _finished(endpoint: Endpoint, reply: Reply, request: Request) -> HttpAnswer:
    status = reply.status or endpoint.status
    body = b"" if reply.content is None else _encoded(reply.content)
    headers = dict(reply.headers)
    if body:
        headers["Content-Type"] = JSON
    if endpoint.has_etag:
        headers["ETag"] = tag = f'"{reply.content["etag"]}"'
        headers["Cache-Control"] = "private, no-cache"  # may be cached, but must be revalidated
        if endpoint.method == "GET" and _is_known(tag, request.headers.get("if-none-match", "")):
            headers.pop("Content-Type")
            return HttpAnswer(status=304, headers=headers, body=b"")
    if isinstance(reply.content, dict) and reply.content.get("cursor"):
        headers["Link"] = f'<{_next(request, reply.content["cursor"])}>; rel="next"'
    kept = None if reply.kept is None else _encoded(reply.kept)
    return HttpAnswer(status=status, headers=headers, body=body, kept=kept)


def _encoded(content: Any) -> bytes:
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:
        # Stored text may contain characters that UTF-8 cannot hold.
        text = json.dumps(msgspec.to_builtins(content), ensure_ascii=False)
        return text.encode("utf-8", "replace")


def _is_known(tag: str, header: str) -> bool:
    tags = [each.strip().removeprefix("W/") for each in header.split(",")]
    return tag in tags or "*" in tags


def _next(request: Request, cursor: str) -> str:
    """The relative URL of the next page, which proxies cannot break."""
    items = [item for item in request.query_params.multi_items() if item[0] != "cursor"]
    return "?" + urlencode([*items, ("cursor", cursor)])


def problem_answer(problem: ProblemDetails, request: Request) -> HttpAnswer:
    """The response for a problem."""
    response = problem.response(_sent_path(request.scope))
    headers = {**problem.headers, "Content-Type": MEDIA_TYPE}
    return HttpAnswer(status=problem.status, headers=headers, body=bytes(response.body))


def _sent_path(scope: Scope) -> str:
    """The path as the client sent it."""
    raw = scope.get("raw_path")
    return str(scope["path"]) if raw is None else raw.decode("latin-1").partition("?")[0]


def _crashed(endpoint: Endpoint, request: Request) -> HttpAnswer:
    """The response to an unexpected error: the log has the traceback under the same id."""
    incident = new_id()
    log_event(
        logger,
        "request_crashed",
        logging.ERROR,
        exc_info=True,
        operation=endpoint.name,
        incident=incident,
    )
    detail = f"internal error; see the log of the server for incident {incident}"
    extra = {"incident": incident}
    problem = ProblemDetails(status=500, kind="internal-error", detail=detail, extra=extra)
    return problem_answer(problem, request)


# --- idempotency ----------------------------------------------------------------------------------


def _done_once(
    header: str,
    endpoint: Endpoint,
    path: Mapping[str, str],
    request: Request,
    body: bytes,
) -> HttpAnswer:
    """Process a request with an Idempotency-Key, or repeat the stored response.

    Responses with 5xx and 429 are not stored, because a repetition may succeed.
    """
    check_name(header, "Idempotency-Key")
    inspector = inspector_of(request)
    store = ReplyStore(inspector.queue.link)
    key = f"{_sender(inspector.actor)} {header}"
    begun = store.begin(key, _digest(request, body))
    if begun.state == "done" and not begun.is_whole:
        detail = f"already done with status {begun.status}; the response was too long to store"
        raise refuse(409, "conflict", detail)
    if begun.state == "done":
        headers = {**begun.headers, "Idempotency-Replayed": "true"}
        return HttpAnswer(status=begun.status, headers=headers, body=begun.body.encode())
    if begun.state != "new":
        raise Refused(_in_use(begun.state, header))
    try:
        answer = _done(endpoint, path, request, body)
    except BaseException:
        store.drop(key, token=begun.token)
        raise
    if answer.status >= 500 or answer.status == 429:
        store.drop(key, token=begun.token)
    else:
        text = (answer.body if answer.kept is None else answer.kept).decode()
        store.done(key, answer.status, answer.headers, text, token=begun.token)
    return answer


def _sender(actor: Actor) -> str:
    return actor.key_id or f"({actor.via} {actor.name})"


def _digest(request: Request, body: bytes) -> str:
    """A digest of all that the outcome of a request depends on."""
    said = (request.method, request.url.path, request.url.query, request.headers.get("if-match"))
    return hashlib.sha256(repr(said).encode() + b"\n" + body).hexdigest()


def _in_use(state: str, header: str) -> ProblemDetails:
    if state == "running":
        return ProblemDetails(
            status=409,
            kind="request-running",
            detail=f"a request with Idempotency-Key {header!r} is being processed: repeat it soon",
            headers={"Retry-After": str(RUNNING_RETRY_S)},
        )
    return ProblemDetails(
        status=422,
        kind="idempotency-key-reused",
        detail=f"Idempotency-Key {header!r} was used for another request: use a new one",
        extra={"field": "Idempotency-Key"},
    )
