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
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from importlib.metadata import version
from typing import Any

from fairqueue.clock import Clock
from fairqueue.errors import (
    LONGEST_SHOWN,
    ConfigurationError,
    InvalidInput,
    InvalidPayload,
    cut,
    shown,
)
from fairqueue.logs import log_event
from fairqueue.validation import (
    MAX_PAYLOAD_BYTES,
    MAX_RESULT_BYTES,
    check_count,
    check_items,
    check_payload,
    check_seconds,
    encode_json,
)
from fairqueue.worker.context import TaskContext
from fairqueue.worker.handlers import Discard, Retry
from fairqueue.worker.worker import Worker

try:
    import httpcore
    import httpx
except ImportError as error:
    raise ImportError(
        "fairqueue.http needs httpx, which is not installed: pip install 'fairqueue[http]'"
    ) from error

__all__ = ["HttpTasks", "SecretRequest", "check_request", "verify_signature"]

logger = logging.getLogger("fairqueue.http")

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD")
FIELDS = ("url", "method", "headers", "json", "timeout")
# Ours to send: another value would break the message, the body's limit or the receiver's trust.
RESERVED_HEADERS = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "idempotency-key",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
RESERVED_PREFIX = "fairqueue-"
SIGNATURE_HEADER = "FairQueue-Signature"
ATTEMPT_HEADER = "FairQueue-Attempt"
SECRET_VARIABLE = "FAIRQUEUE_SECRET_"  # noqa: S105 - before the name: no other variable can be read

MAX_URL_LENGTH = 8192  # characters; many servers refuse longer ones
MAX_HEADERS = 50
MAX_HEADER_LENGTH = 8192  # characters of a value, as it is written and with its secrets
MAX_REFERENCES = 50  # to secrets, in all headers together: whoever gives them is asked for each
SHORTEST_TIMEOUT_S, LONGEST_TIMEOUT_S = 0.1, 3600.0
CONNECT_S = 10.0  # for all addresses together: a silent host is given up before the whole time-out
TRIED_ADDRESSES = 4  # of those that a name has; they share the time to connect
ANNOUNCED = 200  # entries of allow_private; where there are more, only workers look at addresses
LOOKUPS = 64  # name lookups at a time: one cannot be ended, and a slow name server holds its thread
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

_SCHEME = re.compile(r"(https?)://([^/?#]*)", re.IGNORECASE)
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a last label like this: some read it as an address
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_HEADER_VALUE = re.compile(r"([!-~]([ -~]*[!-~])?)?")
_REFERENCE = re.compile(r"secret:([A-Za-z0-9_./-]{1,100})")
_PARTS = re.compile(r"(\\*)([A-Za-z0-9]+|[^\\A-Za-z0-9]|$)")  # of a secret
_HTML_NAMES = (("lt", "<"), ("gt", ">"), ("amp", "&"), ("quot", '"'), ("apos", "'"))
_SIGNATURE = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# Written out, because what `is_global` says differs between versions of Python: there multicast is
# global, and the addresses that carry an IPv4 address inside were for long.
SPECIAL_NETWORKS: tuple[tuple[IpNetwork, str], ...] = tuple(
    (ipaddress.ip_network(network), rule)
    for network, rule in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared address space"),
        ("127.0.0.0/8", "loopback"),
        # Of Azure: each machine reaches its own host there, which hands out its settings.
        ("168.63.129.16/32", "platform of a cloud"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved for protocols"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("::ffff:0:0/96", "IPv4-mapped"),
        ("::/96", "IPv4-compatible"),
        ("64:ff9b::/96", "NAT64"),
        ("64:ff9b:1::/48", "NAT64"),
        ("2001::/32", "Teredo"),
        ("2001::/23", "reserved for protocols"),
        ("2001:db8::/32", "documentation"),
        ("2002::/16", "6to4"),
        ("3fff::/20", "documentation"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
    )
)
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # all of IPv6 that is given out to be reached
# The third quarter of an IPv6 address whose last one is an IPv4 address: ISATAP, RFC 5214.
ISATAP = (0x00005EFE, 0x02005EFE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRequest:
    """A secret that a task refers to: its name, whose task it is, and which host would get it."""

    name: str
    user_id: str
    host: str


Secrets = Callable[[SecretRequest], str | None]
Resolver = Callable[[str], Iterable[str]]


# --- the request ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    scheme: str
    host: str  # lower case, as it is looked up; an IPv6 address without its brackets
    port: int
    path: str  # with the query

    @property
    def netloc(self) -> str:
        """As the Host header has it: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = self.port == (443 if self.scheme == "https" else 80)
        return host if usual else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A payload that was checked. Its headers hold references to secrets, never their values."""

    method: str
    target: _Target
    headers: dict[str, str]
    body: bytes | None
    timeout: float | None

    @property
    def shown(self) -> str:
        """Which call this is, without the path and the query: they may hold a token."""
        return f"{self.method} {self.target.scheme}://{self.target.netloc}"


def check_request(payload: object) -> None:
    """Check the payload of an HTTP task before it is pushed or scheduled.

    Raises InvalidPayload that names the value. Whether the target may be reached is known to the
    worker that runs the task; what is made through a schedule, a command, REST or the dashboard is
    checked for that as well.
    """
    _request_of(payload)


def _request_of(payload: object) -> _Request:
    fields = check_payload(payload)
    for field in fields:
        if field not in FIELDS:
            raise InvalidPayload(f"payload.{field} is no field of an HTTP task: {_listed(FIELDS)}")
    method = fields.get("method", "GET")
    if method not in METHODS:
        raise InvalidPayload(f"payload.method {_shown(method):.80} is none of {_listed(METHODS)}")
    headers = _headers_of(fields.get("headers", {}))
    body = None
    if "json" in fields:
        if method in ("GET", "HEAD"):
            raise InvalidPayload(f"payload.json cannot be sent: a {method} request has no body")
        body = encode_json(fields["json"], "payload.json", MAX_PAYLOAD_BYTES).encode()
    timeout = fields.get("timeout")
    if timeout is not None:
        timeout = _check_timeout(timeout, "payload.timeout", InvalidPayload)
    return _Request(
        method=method,
        target=_target_of(fields.get("url")),
        headers=headers,
        body=body,
        timeout=timeout,
    )


def _target_of(url: object) -> _Target:
    # Errors show the beginning of the URL alone: its path and query may hold a token.
    if not isinstance(url, str) or len(url) > MAX_URL_LENGTH:
        found = _shown(_beginning(url) if isinstance(url, str) else url)
        raise InvalidPayload(
            f"payload.url {found:.80} is no URL: a string of at most {MAX_URL_LENGTH} characters"
        )
    begin = _SCHEME.match(url)
    if begin is None:
        raise InvalidPayload(
            f"payload.url {_beginning(url)!r:.80} does not begin with https:// and a host (or "
            "http://, where the worker allows it)"
        )
    if "@" in begin[2]:
        raise InvalidPayload(
            f"payload.url has a user name or password before {begin[2].rpartition('@')[2]!r:.80}: "
            "put them into a header, as a reference to a secret"
        )
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise InvalidPayload(f"payload.url {begin[0]!r:.80} cannot be read: {error}") from None
    port = parsed.port
    if port is None:
        port = 443 if parsed.scheme == "https" else 80
    if not 1 <= port <= 65535:
        raise InvalidPayload(f"payload.url {begin[0]!r:.80} has the port {port}: 1 to 65535")
    return _Target(
        scheme=parsed.scheme,
        host=_check_host(parsed.raw_host.decode("ascii"), "payload.url", InvalidPayload),
        port=port,
        path=parsed.raw_path.decode("ascii"),
    )


def _shown(value: object) -> str:
    """A value as an error shows it; of a list or an object the kind alone: it may hold a token."""
    is_nested = isinstance(value, dict | list | tuple)
    return f"(a {type(value).__name__})" if is_nested else shown(value)


def _beginning(url: str) -> str:
    """What of a text may be shown that should have been a URL: its scheme and host at most."""
    scheme, slashes, rest = url.partition("://")
    place = re.split(r"[/?#]", rest if slashes else scheme)[0].rpartition("@")[2]
    return f"{scheme}://{place}" if slashes and scheme.isalnum() else place


def _check_host(host: str, what: str, error: type[InvalidInput]) -> str:
    """A host as it is looked up: an address in its one usual spelling, or a name."""
    host = host.removesuffix(".")
    if "%" not in host:  # neither a zone of an IPv6 address nor an escape
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host))
    if _HOST.fullmatch(host) is None:
        raise error(f"{what} has the host {host!r:.80}, which is neither a name nor an address")
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        raise error(
            f"{what} has the host {host!r:.80}: write an IPv4 address as four decimal numbers"
        )
    return host


def _headers_of(headers: object) -> dict[str, str]:
    if not isinstance(headers, dict) or len(headers) > MAX_HEADERS:
        # It is not shown: it may hold a token, and so may a reference that is none, below.
        raise InvalidPayload(
            f"payload.headers is a {type(headers).__name__} and no object "
            f"of at most {MAX_HEADERS} headers"
        )
    seen = set()
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise InvalidPayload(f"payload.headers has the name {name!r:.80}, which is none")
        lower = name.lower()
        if lower in RESERVED_HEADERS or lower.startswith(RESERVED_PREFIX):
            raise InvalidPayload(f"payload.headers.{name} cannot be set: FairQueue sends it itself")
        if lower in seen:
            raise InvalidPayload(f"payload.headers.{name} is there twice, in different spellings")
        seen.add(lower)
        _check_header_value(name, value)
    if (count := len(_names_in(headers))) > MAX_REFERENCES:
        raise InvalidPayload(
            f"payload.headers refers to secrets {count} times: at most {MAX_REFERENCES} times"
        )
    return headers


def _check_header_value(name: str, value: object) -> None:
    """Errors do not show the value: it may be a token that was pasted in."""
    if not isinstance(value, str) or len(value) > MAX_HEADER_LENGTH:
        raise InvalidPayload(
            f"payload.headers.{name} is no string of at most {MAX_HEADER_LENGTH} characters"
        )
    if not _HEADER_VALUE.fullmatch(value):
        odd = next((c for c in value if not " " <= c <= "~"), None)
        found = "a space at its end" if odd is None else f"the character {odd!r}"
        raise InvalidPayload(f"payload.headers.{name} has {found}: printable ASCII, please")
    for word in value.split(" "):
        if word.startswith("secret:") and not _REFERENCE.fullmatch(word):
            raise InvalidPayload(
                f"payload.headers.{name} has a word that begins with 'secret:' and is no "
                "reference: secret:NAME, of letters, digits and _ . / -"
            )


def _check_timeout(value: object, what: str, error: type[InvalidInput]) -> float:
    return check_seconds(value, what, error, least=SHORTEST_TIMEOUT_S, most=LONGEST_TIMEOUT_S)


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1]


# --- where it may go ------------------------------------------------------------------------------


class _Blocked(Exception):
    """A target that no rule admits; the text is for the task's owner, `address` for the log."""

    def __init__(self, text: str, address: str = "") -> None:
        super().__init__(text)
        self.address = address


class _AllowList:
    """Which targets may be reached although they are not on the public Internet."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._networks: list[IpNetwork] = []
        self._hosts: set[tuple[str, int | None]] = set()
        self.entries: list[str] = []  # as they were given
        wanted = "networks and hosts"
        for entry in check_items(entries, "allow_private", wanted, ConfigurationError):
            self._add(entry)
            self.entries.append(entry)

    def _add(self, entry: object) -> None:
        if not isinstance(entry, str):
            raise ConfigurationError(f"allow_private has {shown(entry)}, which is no string")
        try:
            self._networks.append(ipaddress.ip_network(entry))
            return
        except ValueError as error:
            if "/" in entry:
                raise ConfigurationError(
                    f"allow_private has {shown(entry)}, which is no network: "
                    f"{cut(str(error), LONGEST_SHOWN)}"
                ) from None
        try:
            if any(mark in entry for mark in "?#@"):
                raise ValueError("neither a name nor a network has ?, # or @")
            parsed = httpx.URL(f"any://{entry}")  # a scheme without a usual port: each is told
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigurationError(
                f"allow_private has {shown(entry)}: a network such as 10.1.0.0/16, a host name, or "
                f"host:port ({cut(str(error), LONGEST_SHOWN)})"
            ) from None
        host = _check_host(parsed.raw_host.decode("ascii"), "allow_private", ConfigurationError)
        if parsed.port is not None:
            check_count(parsed.port, "port", ConfigurationError, least=1, most=65535)
        self._hosts.add((host, parsed.port))

    def check(self, target: _Target, addresses: Sequence[IpAddress]) -> None:
        """Refuse a target if any of its addresses is not admitted."""
        if {(target.host, None), (target.host, target.port)} & self._hosts:
            return
        for address in addresses:
            rule = forbidding_rule(address)
            if rule and not any(address in network for network in self._networks):
                raise _Blocked(
                    f"the host {target.host!r} has an address that may not be called: {rule}",
                    str(address),
                )


def forbidding_rule(address: IpAddress) -> str | None:
    """Which rule keeps HTTP tasks from an address; None: it is on the public Internet."""
    for network, rule in SPECIAL_NETWORKS:
        if address in network:
            return f"{rule} ({network})"
    if address.version == 6 and address not in GLOBAL_UNICAST:
        return f"outside of {GLOBAL_UNICAST}"
    if address.version == 6 and int(address) >> 32 & 0xFFFFFFFF in ISATAP:
        return "ISATAP"
    return None if address.is_global else "not globally routable"


def check_made(
    payload: object,
    policies: Sequence[Mapping[str, Any]],
    addresses_of: Callable[[str], Sequence[str] | None],
) -> None:
    """Check the payload of an HTTP task when it is made.

    policies: of the workers that run such tasks (`HttpTasks.http_policy`), one of which must let it
    pass; none: what `HttpTasks()` lets pass. addresses_of: None for a host that cannot be looked up
    now; it is let through, and looked up again when the task runs. Raises InvalidPayload.
    """
    request = _request_of(payload)
    for policy in policies or ({},):
        try:
            _check_policy(request.target, policy, addresses_of)
        except _Blocked as error:
            reason = str(error)
        else:
            return
    who = "no living worker allows it" if policies else "HttpTasks(allow_private=) can allow it"
    raise InvalidPayload(f"payload.url: {request.shown} is blocked: {reason}; {who}")


def _check_policy(
    target: _Target,
    policy: Mapping[str, Any],
    addresses_of: Callable[[str], Sequence[str] | None],
) -> None:
    if target.scheme == "http" and policy.get("allow_http") is not True:
        raise _Blocked("http:// is not allowed here: use https://")
    if policy.get("allow_any") is True:
        return
    try:
        allowed = _AllowList(policy.get("allow_private", ()))
    except (ConfigurationError, TypeError):  # somebody has planted it
        allowed = _AllowList(())
    addresses: Sequence[str] | None
    try:
        addresses = [str(ipaddress.ip_address(target.host))]
    except ValueError:
        addresses = addresses_of(target.host)
    with contextlib.suppress(ValueError):  # what it was looked up as is not an address
        allowed.check(target, [ipaddress.ip_address(each) for each in addresses or ()])


def look_up_by(host: str, deadline: float) -> list[str]:
    """The addresses of a host. Raises OSError, TimeoutError when the monotonic clock passes."""
    return _resolve_by(_look_up, _lookups, host, deadline)


def _resolve_by(
    resolver: Resolver, lookups: threading.BoundedSemaphore, host: str, deadline: float
) -> list[str]:
    """Ask a resolver, in a thread: the system's has no time-out that could be set."""
    if not lookups.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise TimeoutError
    answer: Future[list[str]] = Future()

    def look_up() -> None:
        try:
            answer.set_result(list(resolver(host)))
        except BaseException as error:
            answer.set_exception(error)
        finally:
            lookups.release()

    thread = threading.Thread(target=look_up, name="fairqueue-lookup", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads can be had
        lookups.release()
        raise
    return answer.result(max(0.0, deadline - time.monotonic()))


_lookups = threading.BoundedSemaphore(LOOKUPS)


def _look_up(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


# --- the connection -------------------------------------------------------------------------------


@contextlib.contextmanager
def _raising(late: type[Exception], broken: type[Exception]) -> Iterator[None]:
    """Errors of a socket as those that httpcore expects."""
    try:
        yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:
        raise broken(str(error)) from error


class _Stream(httpcore.NetworkStream):
    """A socket whose operations all end by one deadline, however often bytes arrive."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _raising(httpcore.ReadTimeout, httpcore.ReadError):
            self._arm()
            return self._sock.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _raising(httpcore.WriteTimeout, httpcore.WriteError):
            while buffer:
                self._arm()
                buffer = buffer[self._sock.send(buffer) :]

    def close(self) -> None:
        self._sock.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        with _raising(httpcore.ConnectTimeout, httpcore.ConnectError):
            try:
                self._arm()
                sock = ssl_context.wrap_socket(self._sock, server_hostname=server_hostname)
            except BaseException:
                self.close()
                raise
        return _Stream(sock, self._deadline)

    def _arm(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)


class _Pinned(httpcore.NetworkBackend):
    """Connects to the addresses that were checked, whatever the name would mean by now."""

    def __init__(self, addresses: Sequence[IpAddress], deadline: float) -> None:
        self._addresses = addresses[:TRIED_ADDRESSES]
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        with _raising(httpcore.ConnectTimeout, httpcore.ConnectError):
            sock = self._connect(port)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _Stream(sock, self._deadline)

    def _connect(self, port: int) -> socket.socket:
        """The first address that answers. Raises what the last one raised."""
        connect_by = min(self._deadline, time.monotonic() + CONNECT_S)
        failure: OSError = TimeoutError()
        for tried, address in enumerate(self._addresses):
            left = connect_by - time.monotonic()
            if left <= 0:
                break
            try:
                share = left / (len(self._addresses) - tried)
                return socket.create_connection((str(address), port), share)
            except OSError as error:
                failure = error
        raise failure


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
        words = [(word, _REFERENCE.fullmatch(word)) for word in value.split(" ")]
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


def _names_in(headers: dict[str, str]) -> list[str]:
    """The secrets that headers refer to, as often as they do."""
    words = " ".join(headers.values()).split(" ")
    return [match[1] for word in words if (match := _REFERENCE.fullmatch(word))]


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
        self._allowed = _AllowList(allow_private)
        self._allow_http = allow_http
        self._secrets = secrets or _from_environment
        self._signing_name = _signing_name(signing_secret)
        self._max_body = check_count(
            max_body, "max_body", ConfigurationError, most=RESULT_BODY_BYTES
        )
        self._timeout = _check_timeout(timeout, "timeout", ConfigurationError)
        self._resolver = resolver or _look_up
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
            request = _request_of(payload)
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
        self, request: _Request, context: TaskContext, deadline: float
    ) -> Sequence[IpAddress]:
        """The addresses to connect to: all of the host's, all of them admitted."""
        try:
            if request.target.scheme == "http" and not self._allow_http:
                raise _Blocked("http:// is not allowed here: use https://")
            addresses = self._addresses(request, deadline)
            self._allowed.check(request.target, addresses)
        except _Blocked as error:
            fields = {"host": request.target.host, "address": error.address, "reason": str(error)}
            _log(logging.WARNING, "http_blocked", context, fields)
            raise Discard(f"{request.shown} is blocked: {error}") from None
        return addresses

    def _addresses(self, request: _Request, deadline: float) -> list[IpAddress]:
        host = request.target.host
        with contextlib.suppress(ValueError):
            return [ipaddress.ip_address(host)]
        try:
            found = _resolve_by(self._resolver, self._lookups, host, deadline)
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

    def _reveal(self, request: _Request, user_id: str, deadline: float) -> _Revealed:
        names = _names_in(request.headers)
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
        request: _Request,
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
            network_backend=_Pinned(addresses, deadline),
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
        self, request: _Request, context: TaskContext, revealed: _Revealed
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

    def _judge(self, request: _Request, answer: _Answer) -> dict[str, Any]:
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
        and _HEADER_VALUE.fullmatch(value) is not None
    )


def _signing_name(reference: str | None) -> str | None:
    if reference is None:
        return None
    match = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
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
