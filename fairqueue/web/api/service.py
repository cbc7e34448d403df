"""Serve the endpoints: find the one that is meant, check the form of a request, answer it."""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlencode

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fairqueue.access.credentials import Actor
from fairqueue.access.idempotency import ReplyStore
from fairqueue.errors import FairQueueError, StaleVersion, cut, shown
from fairqueue.logs import log_event
from fairqueue.models import new_id
from fairqueue.validation import check_name
from fairqueue.web.api.aliases import resolve
from fairqueue.web.api.endpoint import ApiRequest, Endpoint, Nothing, Reply
from fairqueue.web.api.errors import Refused, conflict, of_form, of_library, refuse
from fairqueue.web.api.models import Input
from fairqueue.web.app_state import app_state
from fairqueue.web.auth import inspector_of
from fairqueue.web.problems import MEDIA_TYPE, ProblemDetails

logger = logging.getLogger("fairqueue.web")

MAX_BODY_BYTES = 1024 * 1024
JSON = "application/json"
RUNNING_RETRY_S = 1  # after which a request is sent again whose twin is still being done


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What goes out. `kept` is the body for repeated requests, where that differs."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    kept: bytes | None = None

    def response(self, is_head: bool) -> Response:
        """As Starlette sends it; the answer to HEAD says how long the body would be."""
        headers = dict(self.headers)
        if is_head:
            headers["Content-Length"] = str(len(self.body))
        return Response(b"" if is_head else self.body, self.status, headers)


class Service:
    """The API as an ASGI app, for whatever comes after its prefix."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._routes = Routes(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever happens."""
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
    """How often a key may ask: so many requests within so many seconds, at any rate."""
    state = app_state(request)
    return f'"key";q={state.burst};w={math.ceil(state.burst / state.rate)}'


# --- which endpoint ------------------------------------------------------------------------------


def segments(scope: Scope) -> list[str]:
    """The parts of the path after the prefix of the API.

    Of the path as it was sent: in one that is decoded, a slash in an id is like those between.
    """
    prefix = str(scope["path"]).removesuffix(str(scope["path_params"]["rest"]))
    return [unquote(part) for part in _sent_path(scope).split("/")[prefix.count("/") :]]


class Routes:
    """The endpoints by their paths."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        # Fixed names win over ids: `jobs/export` is the export.
        self._rows = sorted(
            ((endpoint.path.split("/")[1:], endpoint) for endpoint in endpoints),
            key=lambda row: [part.startswith("{") for part in row[0]],
        )

    def find(self, method: str, parts: Sequence[str]) -> tuple[Endpoint, dict[str, str]]:
        """The endpoint, and what its path says. Raises Refused: 404, or 405 with Allow."""
        allowed: list[str] = []
        for template, endpoint in self._rows:
            path = _match(template, parts)
            if path is None:
                continue
            if method == endpoint.method or (method, endpoint.method) == ("HEAD", "GET"):
                return endpoint, path
            allowed += ["GET", "HEAD"] if endpoint.method == "GET" else [endpoint.method]
        if not allowed:
            raise refuse(404, "not-found", f"there is nothing at {cut('/' + '/'.join(parts), 200)}")
        allow = ", ".join(dict.fromkeys(allowed))
        detail = f"{method} is not possible here: {allow}"
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


# --- what a request says --------------------------------------------------------------------------


async def read_body(request: Request) -> bytes:
    """The body. Raises Refused: 413, 415."""
    body = b""
    length = request.headers.get("content-length", "")
    if not (length.isdigit() and int(length) > MAX_BODY_BYTES):
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                break
        else:
            return _check_type(request, body)
    raise refuse(413, "too-large", f"a body may have {MAX_BODY_BYTES} bytes at most")


def _check_type(request: Request, body: bytes) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        raise refuse(
            415, "unsupported-media-type", f"Content-Type {kind!r:.80} is not {JSON}", accept=JSON
        )
    return body


def read_query(endpoint: Endpoint, request: Request) -> Input:
    """The query string as its model. Raises Refused: 422."""
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
        raise of_form(error, "query", list(fields)) from None


def _is_list(kind: Any) -> bool:
    return getattr(getattr(kind, "__origin__", kind), "__origin__", None) is list


def read_json(endpoint: Endpoint, body: bytes) -> Input:
    """The body as its model; an empty one has no fields. Raises Refused: 400, 422."""
    if not endpoint.has_body:
        return Nothing()
    try:
        value = msgspec.json.decode(body) if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refuse(400, "malformed-json", f"the body is no JSON: {error}") from None
    value, aliases = resolve(value, endpoint.body)
    try:
        return msgspec.convert(value, endpoint.body)
    except msgspec.ValidationError as error:
        known = [each.encode_name for each in msgspec.structs.fields(endpoint.body)]
        raise of_form(error, "body", known, aliases) from None


# --- answers --------------------------------------------------------------------------------------


def answer_to(endpoint: Endpoint, path: Mapping[str, str], request: Request, body: bytes) -> Answer:
    """Do what a request asks for, and say how it went. Runs in a thread; raises nothing."""
    try:
        key = request.headers.get("idempotency-key") if endpoint.is_write else None
        if key is None:
            return _done(endpoint, path, request, body)
        return _done_once(key, endpoint, path, request, body)
    except Refused as refused:
        return problem_answer(refused.problem, request)
    except FairQueueError as error:
        return problem_answer(of_library(error, ["Idempotency-Key"]), request)
    except Exception:
        return _crashed(endpoint, request)


def _done(endpoint: Endpoint, path: Mapping[str, str], request: Request, body: bytes) -> Answer:
    try:
        call = _call(endpoint, path, request, body)
        return _finished(endpoint, endpoint.handler(call), request)
    except Refused as refused:
        return problem_answer(refused.problem, request)
    except FairQueueError as error:
        return problem_answer(of_library(error, _names(endpoint)), request)
    except Exception:
        return _crashed(endpoint, request)


def _names(endpoint: Endpoint) -> list[str]:
    models = (endpoint.body, endpoint.query)
    return [field for model in models for field in model.__struct_fields__] + endpoint.parameters


def _call(
    endpoint: Endpoint, path: Mapping[str, str], request: Request, body: bytes
) -> ApiRequest[Any, Any]:
    is_public = endpoint.role is None
    inspector = app_state(request).inspector if is_public else inspector_of(request)
    call = ApiRequest(
        inspector=inspector,
        path=path,
        query=read_query(endpoint, request),
        body=read_json(endpoint, body),
        root=str(request.scope.get("root_path", "")),
    )
    if endpoint.heeds_match and "if-match" in request.headers:
        return replace(call, if_match=_if_match(call, request.headers["if-match"]))
    return call


def _if_match(call: ApiRequest[Any, Any], header: str) -> str | None:
    """The etag that has to be the present one. Raises StaleVersion where none can be."""
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
    raise StaleVersion(f"none of the etags {header!r:.200} is that of the job now")


def _finished(endpoint: Endpoint, reply: Reply, request: Request) -> Answer:
    status = reply.status or endpoint.status
    body = b"" if reply.content is None else _encoded(reply.content)
    headers = dict(reply.headers)
    if body:
        headers["Content-Type"] = JSON
    if endpoint.has_etag:
        headers["ETag"] = tag = f'"{reply.content["etag"]}"'
        headers["Cache-Control"] = "private, no-cache"  # may be kept, if it is asked for each time
        if endpoint.method == "GET" and _is_known(tag, request.headers.get("if-none-match", "")):
            headers.pop("Content-Type")
            return Answer(status=304, headers=headers, body=b"")
    if isinstance(reply.content, dict) and reply.content.get("cursor"):
        headers["Link"] = f'<{_next(request, reply.content["cursor"])}>; rel="next"'
    kept = None if reply.kept is None else _encoded(reply.kept)
    return Answer(status=status, headers=headers, body=body, kept=kept)


def _encoded(content: Any) -> bytes:
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:
        # Somebody has put text into a record that UTF-8 cannot hold.
        text = json.dumps(msgspec.to_builtins(content), ensure_ascii=False)
        return text.encode("utf-8", "replace")


def _is_known(tag: str, header: str) -> bool:
    tags = [each.strip().removeprefix("W/") for each in header.split(",")]
    return tag in tags or "*" in tags


def _next(request: Request, cursor: str) -> str:
    """The next page, as seen from this one: whatever proxies do to paths, that stays right."""
    items = [item for item in request.query_params.multi_items() if item[0] != "cursor"]
    return "?" + urlencode([*items, ("cursor", cursor)])


def problem_answer(problem: ProblemDetails, request: Request) -> Answer:
    """A problem as it goes out."""
    response = problem.response(_sent_path(request.scope))
    headers = {**problem.headers, "Content-Type": MEDIA_TYPE}
    return Answer(status=problem.status, headers=headers, body=bytes(response.body))


def _sent_path(scope: Scope) -> str:
    """The path as it was sent: what a client can compare with what it asked for."""
    raw = scope.get("raw_path")
    return str(scope["path"]) if raw is None else raw.decode("latin-1").partition("?")[0]


def _crashed(endpoint: Endpoint, request: Request) -> Answer:
    """A mistake of ours: the log has the traceback, the client an id to find it by."""
    incident = new_id()
    log_event(
        logger,
        "request_crashed",
        logging.ERROR,
        exc_info=True,
        operation=endpoint.name,
        incident=incident,
    )
    detail = f"something went wrong here; the log says what, under incident {incident}"
    extra = {"incident": incident}
    problem = ProblemDetails(status=500, kind="internal-error", detail=detail, extra=extra)
    return problem_answer(problem, request)


# --- once -----------------------------------------------------------------------------------------


def _done_once(
    header: str,
    endpoint: Endpoint,
    path: Mapping[str, str],
    request: Request,
    body: bytes,
) -> Answer:
    """Do a request that carries a key of its own, or answer as it was answered before.

    What may go another way the next time (5xx, and 429) is not kept.
    """
    check_name(header, "Idempotency-Key")
    inspector = inspector_of(request)
    store = ReplyStore(inspector.queue.link)
    key = f"{_sender(inspector.actor)} {header}"
    begun = store.begin(key, _digest(request, body))
    if begun.state == "done" and not begun.is_whole:
        raise Refused(
            conflict(
                f"the request was done, with status {begun.status}; its answer was too long to keep"
            )
        )
    if begun.state == "done":
        headers = {**begun.headers, "Idempotency-Replayed": "true"}
        return Answer(status=begun.status, headers=headers, body=begun.body.encode())
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
    """What two requests have in common that are one: all that the outcome depends on."""
    said = (request.method, request.url.path, request.url.query, request.headers.get("if-match"))
    return hashlib.sha256(repr(said).encode() + b"\n" + body).hexdigest()


def _in_use(state: str, header: str) -> ProblemDetails:
    if state == "running":
        return ProblemDetails(
            status=409,
            kind="request-running",
            detail=f"a request with Idempotency-Key {header!r} is being done: ask again soon",
            headers={"Retry-After": str(RUNNING_RETRY_S)},
        )
    return ProblemDetails(
        status=422,
        kind="idempotency-key-reused",
        detail=f"Idempotency-Key {header!r} was used for another request: choose a new one",
        extra={"field": "Idempotency-Key"},
    )
