"""The handler of tasks that call a URL: allowed targets, secrets, signatures and results.

Each call has its own connection, because each has its own checked address and deadline. A kept
connection could be used for another host name, or without a check.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from importlib.metadata import version
from typing import Any

from fairqueue.clock import Clock
from fairqueue.errors import ConfigurationError, InvalidPayload
from fairqueue.http_tasks.extra import httpcore, httpx
from fairqueue.http_tasks.network import (
    LOOKUPS,
    AllowList,
    Blocked,
    IpAddress,
    Pinned,
    Resolver,
    addresses_of,
    resolve_by,
)
from fairqueue.http_tasks.requests import (
    HEADER_VALUE,
    MAX_HEADER_LENGTH,
    REFERENCE,
    HttpRequest,
    check_request,
    check_timeout,
    names_in,
    request_of,
)
from fairqueue.logs import log_event, whose
from fairqueue.models import Task
from fairqueue.validation import MAX_RESULT_BYTES, check_count
from fairqueue.worker.context import TaskContext
from fairqueue.worker.handlers import Discard, Retry
from fairqueue.worker.worker import Worker

__all__ = ["HttpTasks", "SecretRequest", "check_request", "verify_signature"]

logger = logging.getLogger("fairqueue.http")

SIGNATURE_HEADER = "FairQueue-Signature"
ATTEMPT_HEADER = "FairQueue-Attempt"
SECRET_VARIABLE = "FAIRQUEUE_SECRET_"  # noqa: S105 - before the name: no other variable can be read

ANNOUNCED = 200  # entries of allow_private; with more, only workers check addresses
LONGEST_RETRY_AFTER_S = 3600.0  # the longest wait that a server can ask for
RETRIED = frozenset({408, 425, 429})  # and all from 500
KEPT_HEADERS = ("content-type", "content-length", "content-encoding")
SHOWN_HEADER = 100  # characters of each of these in a result
SHOWN_BODY = 500  # characters of a response body in an error
RESULT_BODY_BYTES = MAX_RESULT_BYTES - 2048  # as JSON; leaves room for the rest of a result
MASK = b"***"
BACKSLASH = "\\"
# For one character of a secret: a backslash may be doubled, with another one before the next mark.
LONGEST_ESCAPE = 3 * len("&#x005c;")

_PARTS = re.compile(r"(\\*)([A-Za-z0-9]+|[^\\A-Za-z0-9]|$)")  # of a secret
_HTML_NAMES = (("lt", "<"), ("gt", ">"), ("amp", "&"), ("quot", '"'), ("apos", "'"))
_SIGNATURE = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRequest:
    """A secret that a task refers to: its name, whose task it is, and the receiving host.

    A user id of one tenant and the same id of another are two users.
    """

    name: str
    user_id: str
    host: str
    tenant: str | None = None


Secrets = Callable[[SecretRequest], str | None]


# --- secrets and signatures -----------------------------------------------------------------------


def _from_environment(wanted: SecretRequest) -> str | None:
    return os.environ.get(SECRET_VARIABLE + wanted.name)


class _Revealed:
    """The secrets of one call, by name. Masks them in responses that repeat them."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values
        by_length = sorted(set(values.values()), key=len, reverse=True)
        self.longest = max((LONGEST_ESCAPE * len(value) for value in by_length), default=0)
        self._pattern = re.compile(b"|".join(map(_spellings, by_length)) or b"(?!)")

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def fill(self, value: str) -> str:
        """Return the value of a header with its references replaced."""
        words = [(word, REFERENCE.fullmatch(word)) for word in value.split(" ")]
        return " ".join(self[match[1]] if match else word for word, match in words)

    def mask(self, text: bytes) -> bytes:
        """Return the text with all secrets masked."""
        return self._pattern.sub(MASK, text)


def _spellings(secret: str) -> bytes:
    """Return a pattern that matches a secret as a response may repeat it.

    Each character may be plain or escaped for JSON, a URL or HTML: encoders differ in what they
    escape, and how. None of them escapes letters and digits.
    """
    return "".join(_spelling(*part) for part in _PARTS.findall(secret)).encode()


def _spelling(backslashes: str, rest: str) -> str:
    """Return a pattern for a part of a secret: backslashes, if any, and what follows them.

    Each backslash may be doubled, and a mark may have one more before it. The pattern has one count
    for all of them: a choice for each would make the search exponential.
    """
    plain = rest.isalnum() or not rest
    after = rest if plain else _escaped(rest)
    count = len(backslashes)
    if plain and not count:
        return after
    return f"{_escaped(BACKSLASH)}{{{count},{2 * count + 1}}}{after}"


@cache
def _escaped(mark: str) -> str:
    """Return a pattern for a character that is neither a letter nor a digit."""
    code = f"{ord(mark):02x}"
    found = [f"&{name};" for name, meant in _HTML_NAMES if meant == mark]
    found += [f"&#x0{{0,2}}{code};", f"&#0{{0,2}}{ord(mark)};"]
    found += [rf"\\u00{code}", rf"\\x{code}", f"%{code}", re.escape(mark)]
    if mark == " ":
        found.append(r"\+")
    return f"(?i:{'|'.join(found)})"


def _digest(secret: str | bytes, moment: str, body: bytes) -> str:
    key = secret.encode() if isinstance(secret, str) else secret
    return hmac.new(key, moment.encode() + b"." + body, hashlib.sha256).hexdigest()


def verify_signature(
    secret: str | bytes,
    header: str | None,
    body: bytes,
    now: float | None = None,
    tolerance: float = 300.0,
) -> bool:
    """Return whether a received request is recent and was signed with the secret.

    header: the value of `FairQueue-Signature`, or None. body: the received bytes. now: seconds
    since 1970; the current time by default. A signature is refused if its time differs from `now`
    by more than `tolerance` seconds. Raises ConfigurationError for an empty secret.
    """
    if not secret:
        raise ConfigurationError("secret must not be empty: anybody could sign with it")
    match = _SIGNATURE.fullmatch(header or "")
    if match is None:
        return False
    genuine = hmac.compare_digest(_digest(secret, match[1], body), match[2])
    return genuine and abs((time.time() if now is None else now) - int(match[1])) <= tolerance


# --- the handler ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    status: int
    headers: dict[str, str]  # lower case; secrets masked
    body: str  # secrets masked
    truncated: bool


class HttpTasks:
    """Runs tasks whose payload is a request: {"url", "method", "headers", "json", "timeout"}.

    allow_private: networks ("10.1.0.0/16"), host names or "host:port" that may be called although
    they are not on the public Internet. allow_http: allow requests without TLS. secrets: called
    with a `SecretRequest` for each `secret:NAME`; returns the value or None. By default it reads
    FAIRQUEUE_SECRET_NAME from the environment. signing_secret: a reference, "secret:NAME"; signs
    each request. max_body: bytes of a response that are read. timeout: seconds for a whole call,
    unless the payload sets fewer. resolver: returns the addresses of a host. ssl_context: to trust
    your own authority. Safe to share between threads; keeps no connection open.
    """

    def __init__(
        self,
        *,
        allow_private: Iterable[str] = (),
        allow_http: bool = False,
        secrets: Secrets | None = None,
        signing_secret: str | None = None,
        max_body: int = RESULT_BODY_BYTES,
        timeout: float = 30.0,
        resolver: Resolver | None = None,
        clock: Clock | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Raise ConfigurationError for a bad argument. Open no connection."""
        self._allowed = AllowList(allow_private)
        self._allow_http = allow_http
        self._secrets = secrets or _from_environment
        self._signing_name = _signing_name(signing_secret)
        self._max_body = check_count(
            max_body, "max_body", ConfigurationError, most=RESULT_BODY_BYTES
        )
        self._timeout = check_timeout(timeout, "timeout", ConfigurationError)
        self._resolver = resolver or addresses_of
        self._clock = clock
        self._ssl_context = ssl_context or httpx.create_ssl_context()
        if not self._ssl_context.check_hostname:
            raise ConfigurationError("ssl_context must check host names")
        self._user_agent = f"fairqueue/{version('fairqueue')}"
        self._lookups = threading.BoundedSemaphore(LOOKUPS)

    @property
    def http_policy(self) -> dict[str, Any]:
        """The allowed targets, as the worker announces them."""
        entries = self._allowed.entries
        if len(entries) > ANNOUNCED:
            return {"allow_http": self._allow_http, "allow_any": True}
        return {"allow_http": self._allow_http, "allow_private": entries}

    def register(self, worker: Worker, name: str = "http", **options: Any) -> None:
        """Register as a handler of the worker; options as in `Worker.task`."""
        worker.task(name, **options)(self.handle)

    def handle(self, payload: dict[str, Any], context: TaskContext) -> dict[str, Any]:
        """Make one call and return its result. Raises Retry or Discard, without any secret."""
        began = time.monotonic()
        try:
            request = request_of(payload)
        except InvalidPayload as error:
            raise Discard(str(error)) from None
        limit = min(request.timeout or self._timeout, self._timeout)
        deadline = began + limit
        addresses = self._admit(request, context, deadline)
        revealed = self._reveal(request, context.task, deadline)
        if context.cancelled:
            raise Retry("cancelled before it was sent")  # a cancelled task is not retried
        answer = self._call(request, context, addresses, revealed, deadline, limit)
        seconds = round(time.monotonic() - began, 3)
        fields = {"host": request.target.host, "status": answer.status, "seconds": seconds}
        _log(logging.DEBUG, "http_answered", context, fields)
        return self._judge(request, answer) | {"seconds": seconds}

    # --- before the call --------------------------------------------------------------------------

    def _admit(
        self, request: HttpRequest, context: TaskContext, deadline: float
    ) -> Sequence[IpAddress]:
        """Return all addresses of the host, which must all be allowed."""
        try:
            if request.target.scheme == "http" and not self._allow_http:
                raise Blocked("http:// is not allowed: use https://")
            addresses = self._addresses(request, deadline)
            self._allowed.check(request.target, addresses)
        except Blocked as error:
            fields = {"host": request.target.host, "address": error.address, "reason": str(error)}
            _log(logging.WARNING, "http_blocked", context, fields)
            raise Discard(f"{request.shown} is blocked: {error}") from None
        return addresses

    def _addresses(self, request: HttpRequest, deadline: float) -> list[IpAddress]:
        host = request.target.host
        with contextlib.suppress(ValueError):
            return [ipaddress.ip_address(host)]
        try:
            found = resolve_by(self._resolver, self._lookups, host, deadline)
        except TimeoutError:
            raise Retry(f"{request.shown}: the lookup of the host took too long") from None
        except OSError as error:
            raise Retry(f"{request.shown}: the lookup of the host failed: {error}") from None
        if not found:
            raise Retry(f"{request.shown}: the host has no address")
        try:
            return [ipaddress.ip_address(address) for address in found]
        except ValueError:
            raise Retry(f"{request.shown}: the resolver returned an invalid address") from None

    def _reveal(self, request: HttpRequest, task: Task, deadline: float) -> _Revealed:
        names = names_in(request.headers)
        if self._signing_name is not None:
            names.append(self._signing_name)
        host = request.target.host
        values = {}
        for name in dict.fromkeys(names):
            wanted = SecretRequest(name=name, user_id=task.user_id, host=host, tenant=task.tenant)
            values[name] = self._secret(wanted)
            if time.monotonic() >= deadline:
                raise Retry(f"{request.shown}: the lookup of secrets took too long")
        return _Revealed(values)

    def _secret(self, wanted: SecretRequest) -> str:
        try:
            value = self._secrets(wanted)
        except Exception as error:
            # Its text is not shown: it may contain the secret.
            raise Retry(
                f"the lookup of secret:{wanted.name} failed: {type(error).__name__}"
            ) from None
        if value is None:
            raise Discard(f"secret:{wanted.name} is not known to this worker")
        if not _is_secret(value):
            raise Discard(
                f"secret:{wanted.name} must be 1 to {MAX_HEADER_LENGTH} printable ASCII "
                "characters, without spaces at its ends"
            )
        return value

    # --- the call ---------------------------------------------------------------------------------

    def _call(
        self,
        request: HttpRequest,
        context: TaskContext,
        addresses: Sequence[IpAddress],
        revealed: _Revealed,
        deadline: float,
        limit: float,
    ) -> _Answer:
        """Send the request and read the response. Raises Retry for errors of the network."""
        target = request.target
        url = httpcore.URL(
            scheme=target.scheme, host=target.host, port=target.port, target=target.path
        )
        headers = self._headers(request, context, revealed)
        connection = httpcore.HTTPConnection(
            url.origin,
            ssl_context=self._ssl_context,
            network_backend=Pinned(addresses, deadline),
        )
        try:
            with connection:
                sent = httpcore.Request(request.method, url, headers=headers, content=request.body)
                return self._answer(connection.handle_request(sent), revealed)
        except httpcore.TimeoutException:
            raise Retry(f"{request.shown} timed out after {limit:g} s") from None
        except httpcore.ConnectError as error:
            raise Retry(f"{request.shown}: the connection failed: {error}") from None
        except httpcore.NetworkError:
            raise Retry(f"{request.shown}: the connection was lost") from None
        except httpcore.ProtocolError:
            # Its text may repeat what the server sent.
            raise Retry(f"{request.shown}: the response is not HTTP, or incomplete") from None

    def _headers(
        self, request: HttpRequest, context: TaskContext, revealed: _Revealed
    ) -> list[tuple[str, str]]:
        own = {name.lower() for name in request.headers}
        headers = [(name, revealed.fill(value)) for name, value in request.headers.items()]
        for name, value in headers:
            if len(value) > MAX_HEADER_LENGTH:
                raise Discard(
                    f"payload.headers.{name} must be at most {MAX_HEADER_LENGTH} characters with "
                    f"its secrets, not {len(value)}"
                )
        if "user-agent" not in own:
            headers.append(("User-Agent", self._user_agent))
        if request.body is not None and "content-type" not in own:
            headers.append(("Content-Type", "application/json"))
        body = request.body or b""
        if request.method not in ("GET", "HEAD"):
            headers.append(("Content-Length", str(len(body))))
        if self._signing_name is not None:
            moment = str(int(self._now()))
            digest = _digest(revealed[self._signing_name], moment, body)
            headers.append((SIGNATURE_HEADER, f"t={moment},v1={digest}"))
        return [
            ("Host", request.target.netloc),
            *headers,
            ("Idempotency-Key", urllib.parse.quote(context.task_id, safe=":/@+,=")),
            (ATTEMPT_HEADER, str(context.attempt)),
            # A compressed response could be a thousand times as large as the bytes read.
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]

    def _answer(self, response: httpcore.Response, revealed: _Revealed) -> _Answer:
        headers = {
            name.decode("ascii", "replace").lower(): revealed.mask(value).decode("latin-1")
            for name, value in response.headers
        }
        # A little more is read than is kept, so that a secret across the end is masked.
        over = max(0, revealed.longest - 1)
        raw, cut = _read(response, self._max_body + over)
        body = revealed.mask(raw)
        if cut:
            body = body[: len(body) - over]
        text = body[: self._max_body].decode("utf-8", "replace")
        kept = _fit(text)
        truncated = cut or len(body) > self._max_body or len(kept) < len(text)
        return _Answer(status=response.status, headers=headers, body=kept, truncated=truncated)

    def _judge(self, request: HttpRequest, answer: _Answer) -> dict[str, Any]:
        """Return the result of a response with status 2xx. Raises Retry or Discard for others."""
        status = answer.status
        if 200 <= status < 300:
            kept = {
                n: answer.headers[n][:SHOWN_HEADER] for n in KEPT_HEADERS if n in answer.headers
            }
            return {
                "status": status,
                "headers": kept,
                "body": answer.body,
                "truncated": answer.truncated,
            }
        said = f"{request.shown} answered {status}"
        if 300 <= status < 400:
            place = answer.headers.get("location", "")[:SHOWN_BODY]
            raise Discard(f"{said}: redirects are not followed (to {place!r})")
        if answer.body:
            said += f": {answer.body[:SHOWN_BODY]}"
        if status in RETRIED or status >= 500:
            raise Retry(said, in_=_retry_after(answer.headers.get("retry-after"), self._now()))
        raise Discard(said)

    def _now(self) -> float:
        """Return seconds since 1970."""
        return time.time() if self._clock is None else self._clock.now_ms() / 1000


def _is_secret(value: object) -> bool:
    """Return whether a secret is a valid header value by itself."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= MAX_HEADER_LENGTH
        and HEADER_VALUE.fullmatch(value) is not None
    )


def _signing_name(reference: str | None) -> str | None:
    if reference is None:
        return None
    match = REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
    if match is None:
        # The value is not shown: it may be the secret itself.
        raise ConfigurationError("signing_secret must be a reference such as 'secret:NAME'")
    return match[1]


def _read(response: httpcore.Response, limit: int) -> tuple[bytes, bool]:
    """Return at most `limit` bytes of the body, and whether there was more."""
    read = bytearray()
    for chunk in response.iter_stream():
        read += chunk
        if len(read) > limit:
            return bytes(read[:limit]), True
    return bytes(read), False


def _fit(text: str) -> str:
    """Cut a text to the size of a result: as JSON, one character may need six bytes."""
    while (size := len(json.dumps(text, ensure_ascii=False).encode())) > RESULT_BODY_BYTES:
        text = text[: len(text) * RESULT_BODY_BYTES // size]
    return text


def _retry_after(value: str | None, now: float) -> float | None:
    """Return the seconds that a server asks to wait, at most an hour; None if it does not."""
    if value is None:
        return None
    if value.isascii() and value.isdigit():
        seconds = float(value)
    else:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return min(seconds, LONGEST_RETRY_AFTER_S) if seconds > 0 else None


def _log(level: int, event: str, context: TaskContext, fields: Mapping[str, object]) -> None:
    task = context.task
    own = whose(task.user_id, task.tenant)
    log_event(logger, event, level, task=context.task_id, **own, **fields)
