"""The request that a task describes, checked: method, URL, headers, body."""

import contextlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fairqueue.errors import (
    InvalidInput,
    InvalidPayload,
    shown,
)
from fairqueue.http_tasks.extra import httpx
from fairqueue.validation import (
    MAX_PAYLOAD_BYTES,
    check_payload,
    check_seconds,
    encode_json,
)

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
MAX_URL_LENGTH = 8192  # characters; many servers refuse longer ones
MAX_HEADERS = 50
MAX_HEADER_LENGTH = 8192  # characters of a value, as it is written and with its secrets
MAX_REFERENCES = 50  # to secrets, in all headers together: whoever gives them is asked for each
SHORTEST_TIMEOUT_S, LONGEST_TIMEOUT_S = 0.1, 3600.0
_SCHEME = re.compile(r"(https?)://([^/?#]*)", re.IGNORECASE)
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a last label like this: some read it as an address
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
HEADER_VALUE = re.compile(r"([!-~]([ -~]*[!-~])?)?")
REFERENCE = re.compile(r"secret:([A-Za-z0-9_./-]{1,100})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a request goes."""

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
class HttpRequest:
    """A payload that was checked. Its headers hold references to secrets, never their values."""

    method: str
    target: Target
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
    request_of(payload)


def request_of(payload: object) -> HttpRequest:
    """The request in a payload. Raises InvalidPayload."""
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
        timeout = check_timeout(timeout, "payload.timeout", InvalidPayload)
    return HttpRequest(
        method=method,
        target=_target_of(fields.get("url")),
        headers=headers,
        body=body,
        timeout=timeout,
    )


def _target_of(url: object) -> Target:
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
    return Target(
        scheme=parsed.scheme,
        host=check_host(parsed.raw_host.decode("ascii"), "payload.url", InvalidPayload),
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


def check_host(host: str, what: str, error: type[InvalidInput]) -> str:
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
    if (count := len(names_in(headers))) > MAX_REFERENCES:
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
    if not HEADER_VALUE.fullmatch(value):
        odd = next((c for c in value if not " " <= c <= "~"), None)
        found = "a space at its end" if odd is None else f"the character {odd!r}"
        raise InvalidPayload(f"payload.headers.{name} has {found}: printable ASCII, please")
    for word in value.split(" "):
        if word.startswith("secret:") and not REFERENCE.fullmatch(word):
            raise InvalidPayload(
                f"payload.headers.{name} has a word that begins with 'secret:' and is no "
                "reference: secret:NAME, of letters, digits and _ . / -"
            )


def check_timeout(value: object, what: str, error: type[InvalidInput]) -> float:
    """Seconds for one request. Raises the error."""
    return check_seconds(value, what, error, least=SHORTEST_TIMEOUT_S, most=LONGEST_TIMEOUT_S)


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " and " + words[-1]


def names_in(headers: dict[str, str]) -> list[str]:
    """The secrets that headers refer to, as often as they do."""
    words = " ".join(headers.values()).split(" ")
    return [match[1] for word in words if (match := REFERENCE.fullmatch(word))]
