"""The addresses that requests may go to, and connections to checked addresses only."""

import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from fairqueue.errors import LONGEST_SHOWN, ConfigurationError, InvalidPayload, shown, truncate
from fairqueue.http_tasks.extra import httpcore, httpx
from fairqueue.http_tasks.requests import Target, check_host, request_of
from fairqueue.validation import check_count, check_items

CONNECT_S = 10.0  # for all addresses together: a silent host must not use up the whole time-out
TRIED_ADDRESSES = 4  # of one host; they share the time to connect
LOOKUPS = 64  # lookups at a time: one cannot be ended, and a slow name server holds its thread
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
# A list of our own, because `is_global` differs between versions of Python: it includes multicast,
# and included addresses that contain an IPv4 address for a long time.
SPECIAL_NETWORKS: tuple[tuple[IpNetwork, str], ...] = tuple(
    (ipaddress.ip_network(network), rule)
    for network, rule in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared address space"),
        ("127.0.0.0/8", "loopback"),
        # Azure: a machine reaches its own host here, which serves its configuration.
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
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # all public addresses of IPv6
# The third quarter of an IPv6 address whose last one is an IPv4 address: ISATAP, RFC 5214.
ISATAP = (0x00005EFE, 0x02005EFE)
Resolver = Callable[[str], Iterable[str]]
_lookups = threading.BoundedSemaphore(LOOKUPS)


class Blocked(Exception):
    """A target is not allowed. The message is for the owner of the task, `address` for the log."""

    def __init__(self, text: str, address: str = "") -> None:
        super().__init__(text)
        self.address = address


class AllowList:
    """The targets that are allowed although they are not on the public Internet."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._networks: list[IpNetwork] = []
        self._hosts: set[tuple[str, int | None]] = set()
        self.entries: list[str] = []  # as given
        for entry in check_items(
            entries, "allow_private", "networks and hosts", ConfigurationError
        ):
            self._add(entry)
            self.entries.append(entry)

    def _add(self, entry: object) -> None:
        if not isinstance(entry, str):
            raise ConfigurationError(f"allow_private must contain strings, not {shown(entry)}")
        try:
            self._networks.append(ipaddress.ip_network(entry))
            return
        except ValueError as error:
            if "/" in entry:
                raise ConfigurationError(
                    f"allow_private contains {shown(entry)}, which is not a network: "
                    f"{truncate(str(error), LONGEST_SHOWN)}"
                ) from None
        try:
            if any(mark in entry for mark in "?#@"):
                raise ValueError("host names and networks do not contain ?, # or @")
            parsed = httpx.URL(f"any://{entry}")  # a scheme without a default port
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigurationError(
                "allow_private must contain networks such as 10.1.0.0/16, host names or "
                f"host:port, not {shown(entry)} ({truncate(str(error), LONGEST_SHOWN)})"
            ) from None
        host = check_host(parsed.raw_host.decode("ascii"), "allow_private", ConfigurationError)
        if parsed.port is not None:
            check_count(parsed.port, "port", ConfigurationError, least=1, most=65535)
        self._hosts.add((host, parsed.port))

    def check(self, target: Target, addresses: Sequence[IpAddress]) -> None:
        """Raise Blocked if any address of the target is not allowed."""
        if {(target.host, None), (target.host, target.port)} & self._hosts:
            return
        for address in addresses:
            rule = forbidding_rule(address)
            if rule and not any(address in network for network in self._networks):
                raise Blocked(
                    f"the host {target.host!r} has an address that is not allowed: {rule}",
                    str(address),
                )


def forbidding_rule(address: IpAddress) -> str | None:
    """Return the rule that forbids an address; None if it is on the public Internet."""
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
    """Check the payload of an HTTP task when it is created.

    policies: those of the workers that run such tasks (`HttpTasks.http_policy`), one of which must
    allow it; without any, the rules of `HttpTasks()` apply. addresses_of: returns None for a host
    that cannot be looked up now; it is allowed, and checked when the task runs. Raises
    InvalidPayload.
    """
    request = request_of(payload)
    for policy in policies or ({},):
        try:
            _check_policy(request.target, policy, addresses_of)
        except Blocked as error:
            reason = str(error)
        else:
            return
    who = "no live worker allows it" if policies else "HttpTasks(allow_private=...) can allow it"
    raise InvalidPayload(f"payload.url: {request.shown} is blocked: {reason}; {who}")


def _check_policy(
    target: Target,
    policy: Mapping[str, Any],
    addresses_of: Callable[[str], Sequence[str] | None],
) -> None:
    if target.scheme == "http" and policy.get("allow_http") is not True:
        raise Blocked("http:// is not allowed: use https://")
    if policy.get("allow_any") is True:
        return
    try:
        allowed = AllowList(policy.get("allow_private", ()))
    except (ConfigurationError, TypeError):  # a damaged announcement
        allowed = AllowList(())
    addresses: Sequence[str] | None
    try:
        addresses = [str(ipaddress.ip_address(target.host))]
    except ValueError:
        addresses = addresses_of(target.host)
    with contextlib.suppress(ValueError):  # the lookup returned something else than addresses
        allowed.check(target, [ipaddress.ip_address(each) for each in addresses or ()])


def look_up_by(host: str, deadline: float) -> list[str]:
    """Return the addresses of a host. Raises OSError; TimeoutError after the deadline."""
    return resolve_by(addresses_of, _lookups, host, deadline)


def resolve_by(
    resolver: Resolver, lookups: threading.BoundedSemaphore, host: str, deadline: float
) -> list[str]:
    """Call a resolver in a thread, because the system's resolver has no time-out."""
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
    except RuntimeError:  # the limit of threads is reached
        lookups.release()
        raise
    return answer.result(max(0.0, deadline - time.monotonic()))


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host, by the system's resolver."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@contextlib.contextmanager
def _raising(late: type[Exception], broken: type[Exception]) -> Iterator[None]:
    """Turn errors of a socket into those that httpcore expects."""
    try:
        yield
    except TimeoutError as error:
        raise late(str(error)) from error
    except OSError as error:
        raise broken(str(error)) from error


class _Stream(httpcore.NetworkStream):
    """A socket with one deadline for all its operations, however often bytes arrive."""

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


class Pinned(httpcore.NetworkBackend):
    """Connects only to the checked addresses, whatever the name resolves to by now."""

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
        """Connect to the first checked address that answers."""
        with _raising(httpcore.ConnectTimeout, httpcore.ConnectError):
            sock = self._connect(port)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _Stream(sock, self._deadline)

    def _connect(self, port: int) -> socket.socket:
        """Return a connection to the first address that answers. Raises the last error."""
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
