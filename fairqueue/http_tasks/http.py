"""Run tasks that call a URL: what may be sent where, with which secrets, and what is kept of it.

One connection serves one call. Each call has an address of its own that was checked, and a deadline
of its own; a connection that is kept could serve another host name, or another check, than its own.
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
from fairqueue.errors import (
    ConfigurationError,
    InvalidPayload,
)
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
from fairqueue.logs import log_event
from fairqueue.validation import (
    MAX_RESULT_BYTES,
    check_count,
)
from fairqueue.worker.context import TaskContext
from fairqueue.worker.handlers import Discard, Retry
from fairqueue.worker.worker import Worker

__all__ = ["HttpTasks", "SecretRequest", "check_request", "verify_signature"]

logger = logging.getLogger("fairqueue.http")

SIGNATURE_HEADER = "FairQueue-Signature"
ATTEMPT_HEADER = "FairQueue-Attempt"
SECRET_VARIABLE = "FAIRQUEUE_SECRET_"  # noqa: S105 - before the name: no other variable can be read

ANNOUNCED = 200  # entries of allow_private; where there are more, only workers look at addresses
LONGEST_RETRY_AFTER_S = 3600.0  # a server that asks for more is asked again after this
RETRIED = frozenset({408, 425, 429})  # and all from 500
KEPT_HEADERS = ("content-type", "content-length", "content-encoding")
SHOWN_HEADER = 100  # characters kept of each of these
SHOWN_BODY = 500  # characters of an answer's body in an error
RESULT_BODY_BYTES = MAX_RESULT_BYTES - 2048  # as JSON; the rest of a result fits beside it
MASK = b"***"
BACKSLASH = "\\"
# Of one character of a secret: a backslash is doubled, and another one comes before what is next.
LONGEST_ESCAPE = 3 * len("&#x005c;")

_PARTS = re.compile(r"(\\*)([A-Za-z0-9]+|[^\\A-Za-z0-9]|$)")  # of a secret
_HTML_NAMES = (("lt", "<"), ("gt", ">"), ("amp", "&"), ("quot", '"'), ("apos", "'"))
_SIGNATURE = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRequest:
    """A secret that a task refers to: its name, whose task it is, and which host would get it."""

    name: str
    user_id: str
    host: str


Secrets = Callable[[SecretRequest], str | None]


# --- secrets and signatures -----------------------------------------------------------------------


def _from_environment(wanted: SecretRequest) -> str | None:
    return os.environ.get(SECRET_VARIABLE + wanted.name)


class _Revealed:
    """The secrets of one call, by name; what a server repeats of them is masked."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values
        by_length = sorted(set(values.values()), key=len, reverse=True)
        self.longest = max((LONGEST_ESCAPE * len(value) for value in by_length), default=0)
        self._pattern = re.compile(b"|".join(map(_spellings, by_length)) or b"(?!)")

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def fill(self, value: str) -> str:
        """A header's value with its references replaced."""
        words = [(word, REFERENCE.fullmatch(word)) for word in value.split(" ")]
        return " ".join(self[match[1]] if match else word for word, match in words)

    def mask(self, text: bytes) -> bytes:
        """The text without any of the secrets."""
        return self._pattern.sub(MASK, text)


def _spellings(secret: str) -> bytes:
    """A pattern of a secret as an answer may repeat it.

    Each character may be plain or have an escape of JSON, of a URL or of HTML: those who write them
    differ in what they escape, and how. Letters and digits all of them leave alone.
    """
    return "".join(_spelling(*part) for part in _PARTS.findall(secret)).encode()


def _spelling(backslashes: str, rest: str) -> str:
    """A pattern of a part of a secret: backslashes, if any, and what comes after them.

    Each backslash may be doubled, and a mark have one more before it. That is one count for all of
    them: with a choice for each, there would be more ways to read a long row than can be tried.
    """
    plain = rest.isalnum() or not rest
    after = rest if plain else _escaped(rest)
    count = len(backslashes)
    if plain and not count:
        return after
    return f"{_escaped(BACKSLASH)}{{{count},{2 * count + 1}}}{after}"


@cache
def _escaped(mark: str) -> str:
    """A pattern of a character that is neither a letter nor a digit."""
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
    """Whether a request that was received is from the holder of the secret, and recent.

    header: the value of `FairQueue-Signature`, None if there is none. body: the bytes as they came.
    now: seconds since 1970, else the clock's. A signature whose time is more than `tolerance`
    seconds away from it, either way, is refused. Raises ConfigurationError for an empty secret.
    """
    if not secret:
        raise ConfigurationError("the secret is empty: anybody could have signed with it")
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
    they are not on the public Internet. allow_http: also without TLS. secrets: called with a
    `SecretRequest` for each `secret:NAME`, returns the value or None; by default the environment
    variable FAIRQUEUE_SECRET_NAME. signing_secret: a reference, "secret:NAME"; signs each request.
    max_body: bytes of an answer that are read. timeout: seconds for a whole call, unless the
    payload asks for fewer. resolver: a host's addresses. ssl_context: one that trusts your own
    authority. Safe to share between threads; keeps no connection open.
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
        """Raises ConfigurationError naming the argument. Opens no connection."""
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
            raise ConfigurationError("ssl_context does not check host names: it has to")
        self._user_agent = f"fairqueue/{version('fairqueue')}"
        self._lookups = threading.BoundedSemaphore(LOOKUPS)

    @property
    def http_policy(self) -> dict[str, Any]:
        """Where its tasks may go, as its worker says it to those who make tasks."""
        entries = self._allowed.entries
        if len(entries) > ANNOUNCED:
            return {"allow_http": self._allow_http, "allow_any": True}
        return {"allow_http": self._allow_http, "allow_private": entries}

    def register(self, worker: Worker, name: str = "http", **options: Any) -> None:
        """Make it the worker's handler for tasks of a name; options as for `Worker.task`."""
        worker.task(name, **options)(self.handle)

    def handle(self, payload: dict[str, Any], context: TaskContext) -> dict[str, Any]:
        """Make one call; its result. Raises Retry or Discard, and nothing that shows a secret."""
        began = time.monotonic()
        try:
            request = request_of(payload)
        except InvalidPayload as error:
            raise Discard(str(error)) from None
        limit = min(request.timeout or self._timeout, self._timeout)
        deadline = began + limit
        addresses = self._admit(request, context, deadline)
        revealed = self._reveal(request, context.task.user_id, deadline)
        if context.cancelled:
            raise Retry("cancelled before it was sent")  # of a cancelled task that is its end
        answer = self._call(request, context, addresses, revealed, deadline, limit)
        seconds = round(time.monotonic() - began, 3)
        fields = {"host": request.target.host, "status": answer.status, "seconds": seconds}
        _log(logging.DEBUG, "http_answered", context, fields)
        return self._judge(request, answer) | {"seconds": seconds}

    # --- before it is sent ------------------------------------------------------------------------

    def _admit(
        self, request: HttpRequest, context: TaskContext, deadline: float
    ) -> Sequence[IpAddress]:
        """The addresses to connect to: all of the host's, all of them admitted."""
        try:
            if request.target.scheme == "http" and not self._allow_http:
                raise Blocked("http:// is not allowed here: use https://")
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
            raise Retry(f"{request.shown}: looking up the host took too long") from None
        except OSError as error:
            raise Retry(f"{request.shown}: the host cannot be looked up: {error}") from None
        if not found:
            raise Retry(f"{request.shown}: the host has no address")
        try:
            return [ipaddress.ip_address(address) for address in found]
        except ValueError:
            raise Retry(f"{request.shown}: what the host was looked up as is no address") from None

    def _reveal(self, request: HttpRequest, user_id: str, deadline: float) -> _Revealed:
        names = names_in(request.headers)
        if self._signing_name is not None:
            names.append(self._signing_name)
        host = request.target.host
        values = {}
        for name in dict.fromkeys(names):
            values[name] = self._secret(SecretRequest(name=name, user_id=user_id, host=host))
            if time.monotonic() >= deadline:
                raise Retry(f"{request.shown}: looking up the secrets took too long")
        return _Revealed(values)

    def _secret(self, wanted: SecretRequest) -> str:
        try:
            value = self._secrets(wanted)
        except Exception as error:
            # Its text is not shown: nobody knows what is in it.
            raise Retry(
                f"secret:{wanted.name} could not be looked up: {type(error).__name__}"
            ) from None
        if value is None:
            raise Discard(f"secret:{wanted.name} is not known here")
        if not _is_secret(value):
            raise Discard(
                f"secret:{wanted.name} cannot be used: it is empty, has spaces at an end, "
                f"characters that are not printable ASCII, or more than {MAX_HEADER_LENGTH}"
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
        """Send it and read the answer. What goes wrong on the way is a Retry."""
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
            raise Retry(f"{request.shown} timed out: it had {limit:g} s") from None
        except httpcore.ConnectError as error:
            raise Retry(f"{request.shown} cannot be connected to: {error}") from None
        except httpcore.NetworkError:
            raise Retry(f"{request.shown}: the connection broke") from None
        except httpcore.ProtocolError:
            # Its text may repeat what the server sent.
            raise Retry(f"{request.shown}: the answer is no HTTP, or ended too early") from None

    def _headers(
        self, request: HttpRequest, context: TaskContext, revealed: _Revealed
    ) -> list[tuple[str, str]]:
        own = {name.lower() for name in request.headers}
        headers = [(name, revealed.fill(value)) for name, value in request.headers.items()]
        for name, value in headers:
            if len(value) > MAX_HEADER_LENGTH:
                raise Discard(
                    f"payload.headers.{name} has {len(value)} characters with its secrets: "
                    f"at most {MAX_HEADER_LENGTH}"
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
            # A compressed answer could be a thousand times as large as what was read of it.
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]

    def _answer(self, response: httpcore.Response, revealed: _Revealed) -> _Answer:
        headers = {
            name.decode("ascii", "replace").lower(): revealed.mask(value).decode("latin-1")
            for name, value in response.headers
        }
        # A little more is read than is kept, so that a secret across the end is seen as a whole.
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
        """The result of an answer that is one; Retry or Discard for the others."""
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
        """Seconds since 1970."""
        return time.time() if self._clock is None else self._clock.now_ms() / 1000


def _is_secret(value: object) -> bool:
    """Whether it can be sent in a header, if it stands there alone."""
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
        # It is not shown: it may be the secret itself.
        raise ConfigurationError("signing_secret is no reference to a secret: 'secret:NAME'")
    return match[1]


def _read(response: httpcore.Response, limit: int) -> tuple[bytes, bool]:
    """The body, at most `limit` bytes of it; and whether there was more."""
    read = bytearray()
    for chunk in response.iter_stream():
        read += chunk
        if len(read) > limit:
            return bytes(read[:limit]), True
    return bytes(read), False


def _fit(text: str) -> str:
    """As much of a text as a result has room for: as JSON, one character may need six bytes."""
    while (size := len(json.dumps(text, ensure_ascii=False).encode())) > RESULT_BODY_BYTES:
        text = text[: len(text) * RESULT_BODY_BYTES // size]
    return text


def _retry_after(value: str | None, now: float) -> float | None:
    """Seconds that a server asks to wait, at most an hour; None where it asks for nothing."""
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
    log_event(logger, event, level, task=context.task_id, user=context.task.user_id, **fields)
