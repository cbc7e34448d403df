"""Read and check the request in the payload of an HTTP task: method, URL, headers, body."""

import contextlib
import ipaddress
import re
from dataclasses import dataclass

from fairqueue.errors import InvalidInput, InvalidPayload, kind_of, shown
from fairqueue.http_tasks.extra import httpx
from fairqueue.validation import MAX_PAYLOAD_BYTES, check_payload, check_seconds, encode_json

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD")
FIELDS = ("url", "method", "headers", "json", "timeout")
# FairQueue sets these: another value would break the message or the receiver's trust.
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
MAX_HEADER_LENGTH = 8192  # characters of a value, with references and with their secrets
MAX_REFERENCES = 50  # to secrets, in all headers together: each is a lookup
SHORTEST_TIMEOUT_S, LONGEST_TIMEOUT_S = 0.1, 3600.0
_SCHEME = re.compile(r"(https?)://([^/?#]*)", re.IGNORECASE)
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # a last label that some parsers read as an address
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
HEADER_VALUE = re.compile(r"([!-~]([ -~]*[!-~])?)?")
REFERENCE = re.compile(r"secret:([A-Za-z0-9_./-]{1,100})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target of a request."""

    scheme: str
    host: str  # lower case, as it is looked up; an IPv6 address without its brackets
    port: int
    path: str  # with the query

    @property
    def netloc(self) -> str:
        """The value of the Host header: with the port if it is not the default of the scheme."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = self.port == (443 if self.scheme == "https" else 80)
        return host if usual else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A checked request. Its headers contain references to secrets, never their values."""

    method: str
    target: Target
    headers: dict[str, str]
    body: bytes | None
    timeout: float | None

    @property
    def shown(self) -> str:
        """Method, scheme and host, without path and query, which may contain a token."""
        return f"{self.method} {self.target.scheme}://{self.target.netloc}"


def check_request(payload: object) -> None:
    """Check the payload of an HTTP task before it is pushed or scheduled.

    Raises InvalidPayload naming the value. The worker decides whether the target is allowed;
    schedules, commands, REST and the dashboard check that when they create a task as well.
    """
    request_of(payload)


def request_of(payload: object) -> HttpRequest:
    """Return the request in a payload. Raises InvalidPayload."""
    fields = check_payload(payload)
    for field in fields:
        if field not in FIELDS:
            known = ", ".join(FIELDS)
            raise InvalidPayload(
                f"payload.{field} is not a field of an HTTP task, which has {known}"
            )
    method = fields.get("method", "GET")
    if method not in METHODS:
        raise InvalidPayload(
            f"payload.method must be one of {', '.join(METHODS)}, not {_shown(method):.80}"
        )
    headers = _headers_of(fields.get("headers", {}))
    body = None
    if "json" in fields:
        if method in ("GET", "HEAD"):
            raise InvalidPayload(f"payload.json must not be set: a {method} request has no body")
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
    # Errors show only the beginning of the URL: its path and query may contain a token.
    if not isinstance(url, str) or len(url) > MAX_URL_LENGTH:
        found = _shown(_beginning(url) if isinstance(url, str) else url)
        raise InvalidPayload(
            f"payload.url must be a string of at most {MAX_URL_LENGTH} characters, not {found:.80}"
        )
    begin = _SCHEME.match(url)
    if begin is None:
        raise InvalidPayload(
            "payload.url must begin with https:// and a host (or http:// if the worker allows it), "
            f"not {_beginning(url)!r:.80}"
        )
    if "@" in begin[2]:
        raise InvalidPayload(
            "payload.url must not contain a user name or password before "
            f"{begin[2].rpartition('@')[2]!r:.80}: pass them in a header that refers to a secret"
        )
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise InvalidPayload(f"payload.url {begin[0]!r:.80} is malformed: {error}") from None
    port = parsed.port
    if port is None:
        port = 443 if parsed.scheme == "https" else 80
    if not 1 <= port <= 65535:
        raise InvalidPayload(
            f"payload.url {begin[0]!r:.80} must have a port from 1 to 65535, not {port}"
        )
    return Target(
        scheme=parsed.scheme,
        host=check_host(parsed.raw_host.decode("ascii"), "payload.url", InvalidPayload),
        port=port,
        path=parsed.raw_path.decode("ascii"),
    )


def _shown(value: object) -> str:
    """Return a value as an error shows it; only the type of lists and dicts, for tokens."""
    return kind_of(value) if isinstance(value, dict | list | tuple) else shown(value)


def _beginning(url: str) -> str:
    """Return the part of an invalid URL that may be shown: at most scheme and host."""
    scheme, slashes, rest = url.partition("://")
    place = re.split(r"[/?#]", rest if slashes else scheme)[0].rpartition("@")[2]
    return f"{scheme}://{place}" if slashes and scheme.isalnum() else place


def check_host(host: str, what: str, error: type[InvalidInput]) -> str:
    """Return a host as it is looked up: an address in its canonical form, or a name."""
    host = host.removesuffix(".")
    if "%" not in host:  # neither a zone of an IPv6 address nor an escape
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host))
    if _HOST.fullmatch(host) is None:
        raise error(f"{what} has the host {host!r:.80}, which is neither a name nor an address")
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        raise error(
            f"{what} has the host {host!r:.80}: an IPv4 address must be four decimal numbers"
        )
    return host


def _headers_of(headers: object) -> dict[str, str]:
    if not isinstance(headers, dict) or len(headers) > MAX_HEADERS:
        # The value is not shown: it may contain a token; so may an invalid reference, below.
        given = f"{len(headers)}" if isinstance(headers, dict) else kind_of(headers)
        raise InvalidPayload(
            f"payload.headers must be an object of at most {MAX_HEADERS} headers, not {given}"
        )
    seen = set()
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise InvalidPayload(f"payload.headers: {name!r:.80} is not a valid header name")
        lower = name.lower()
        if lower in RESERVED_HEADERS or lower.startswith(RESERVED_PREFIX):
            raise InvalidPayload(f"payload.headers.{name} must not be set: FairQueue sets it")
        if lower in seen:
            raise InvalidPayload(f"payload.headers.{name} is set twice, in different spellings")
        seen.add(lower)
        _check_header_value(name, value)
    if (count := len(names_in(headers))) > MAX_REFERENCES:
        raise InvalidPayload(
            f"payload.headers must refer to secrets at most {MAX_REFERENCES} times, not {count}"
        )
    return headers


def _check_header_value(name: str, value: object) -> None:
    """Check a value without showing it in errors: it may be a token."""
    if not isinstance(value, str) or len(value) > MAX_HEADER_LENGTH:
        raise InvalidPayload(
            f"payload.headers.{name} must be a string of at most {MAX_HEADER_LENGTH} characters"
        )
    if not HEADER_VALUE.fullmatch(value):
        odd = next((c for c in value if not " " <= c <= "~"), None)
        found = "a space at its end" if odd is None else f"the character {odd!r}"
        raise InvalidPayload(
            f"payload.headers.{name} must be printable ASCII without spaces at its ends, but has "
            f"{found}"
        )
    for word in value.split(" "):
        if word.startswith("secret:") and not REFERENCE.fullmatch(word):
            raise InvalidPayload(
                f"payload.headers.{name} has an invalid reference to a secret: it must be "
                "secret:NAME, of letters, digits and _ . / -"
            )


def check_timeout(value: object, what: str, error: type[InvalidInput]) -> float:
    """Check the seconds that one request may take."""
    return check_seconds(value, what, error, least=SHORTEST_TIMEOUT_S, most=LONGEST_TIMEOUT_S)


def names_in(headers: dict[str, str]) -> list[str]:
    """Return the names of the secrets that headers refer to, with repetitions."""
    words = " ".join(headers.values()).split(" ")
    return [match[1] for word in words if (match := REFERENCE.fullmatch(word))]
