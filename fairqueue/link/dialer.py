"""Open connections with the settings of a client, to the current primary, with our time-outs.

redis-py's own retries are off: see driver.py.
"""

import math
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import redis
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.backoff import NoBackoff
from redis.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
)
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

from fairqueue.errors import ConfigurationError, kind_of

Maker = Callable[..., AbstractConnection]
Address = tuple[str, int]

# Seconds that one sentinel may take for each step before the next one is asked.
SENTINEL_S = 0.5
# Seconds for each step until a server has confirmed that it is the primary. Sentinels name a frozen
# primary until they agree that it is down; waiting longer would use up the caller's deadline.
HANDSHAKE_S = 1.0

# Seconds for an answer at most: a primary that does not answer may be frozen, and another one may
# have taken over long before the caller's deadline.
ANSWER_S = 3.0
# Seconds between two questions to a sentinel whether connections still lead to the primary. In a
# planned failover the old primary goes on to acknowledge writes that are lost, for 8 s with the
# default settings of sentinels; until we look, our writes go there.
LOOK_S = 1.0

# Settings of a client's connections that ours must not share.
_NOT_OURS = (
    *("himport_registry", "event_dispatcher", "retry_on_timeout", "retry_on_error"),
    "connection_pool",  # of Sentinel
)


class NobodyThere(redis.ConnectionError):
    """The address does not exist or nobody listens there; the refusal came at once."""


class Dialer:
    """Opens connections. May be used by many threads, and after a fork."""

    def __init__(self, make: Maker, options: Mapping[str, Any]) -> None:
        self._make = make
        self._options = options

    def dial(self, within: float = math.inf) -> AbstractConnection:
        """A connection, ready for use; no step takes longer than `within`. Raises redis errors.

        NobodyThere is one of them.
        """
        connection = self._make(**limited(self._options, within))
        try:
            connection.connect()
            wait_for_answers(connection, self._options.get("socket_timeout"))
        except BaseException as error:
            disconnect(connection)
            if isinstance(error, redis.ConnectionError) and is_nobody(error):
                raise NobodyThere(str(error)) from error
            raise
        return connection

    def still_leads(self, connection: AbstractConnection, within: float = math.inf) -> bool:
        """Whether a connection still leads to where a new one would, as far as is known."""
        return True

    @property
    def name(self) -> str | None:
        """Where connections lead, for people: a host and port, or a path; None if not known."""
        if "host" in self._options:
            return address_text((self._options["host"], self._options.get("port", 6379)))
        path: str | None = self._options.get("path")
        return path


def connection_maker(client: redis.Redis, timeout: float) -> Dialer:
    """A dialer with the settings of a client, for operations that may take `timeout` seconds.

    Raises ConfigurationError if it is not a client, or one for replicas.
    """
    if not isinstance(client, redis.Redis):
        raise ConfigurationError(
            f"client must be a redis.Redis or a redis.RedisCluster, not {kind_of(client)}"
        )
    pool: Any = client.connection_pool
    # Half of the deadline: a lost reply leaves time for another attempt.
    attempt = timeout / 2
    if isinstance(pool, SentinelConnectionPool):
        return _SentinelDialer(pool, min(attempt, ANSWER_S))
    if not isinstance(pool, ConnectionPool):
        return Dialer(lambda **_: cast(AbstractConnection, pool.make_connection()), {})
    return Dialer(pool.connection_class, options_like(pool, attempt))


class _SentinelDialer(Dialer):
    """Asks sentinels for the primary, connects to it and checks its role.

    All within the time for one attempt: the caller repeats. Keeps no connection to sentinels, only
    the order in which they are asked.
    """

    def __init__(self, pool: SentinelConnectionPool, attempt: float) -> None:
        if not pool.is_master:
            raise ConfigurationError(
                f"this client is for replicas of {pool.service_name!r}: make one for the primary, "
                f"with master_for({pool.service_name!r})"
            )
        self._service = pool.service_name
        self._attempt = attempt
        super().__init__(
            SSLConnection if issubclass(pool.connection_class, SSLConnection) else Connection,
            options_like(pool, min(attempt, HANDSHAKE_S)),
        )
        self._usual: float = options_like(pool, attempt)["socket_timeout"]
        manager = pool.sentinel_manager
        self._force_ip: str | None = getattr(manager, "_force_master_ip", None)
        self._sentinels = [_Sentinel(each.connection_pool, attempt) for each in manager.sentinels]
        self._last_named: Address | None = None
        self._look_at = 0.0  # when to ask again

    def dial(self, within: float = math.inf) -> AbstractConnection:
        """A connection to the primary, ready for use; no step takes longer than `within`.

        Raises redis.ConnectionError or TimeoutError when there is none now (NobodyThere when there
        are no sentinels either); AuthenticationError and ResponseError when somebody said no.
        """
        deadline = time.monotonic() + min(self._attempt, within)
        # The failure of a server is reported first: it says more than those of sentinels.
        failure: Exception | None = None
        problems: list[Exception] = []
        tried = set()
        for sentinel in self._sentinels:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                address = self._primary(sentinel, left)
            except (redis.RedisError, OSError) as error:
                problems.append(error)
                continue
            if address in tried:
                continue
            tried.add(address)
            try:
                connection = self._connect(address, within)
            except redis.AuthenticationError:
                raise
            except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
                failure = error  # another sentinel may name another server
                continue
            # The next call begins with this sentinel.
            self._sentinels = [sentinel, *(e for e in self._sentinels if e is not sentinel)]
            self._last_named, self._look_at = address, time.monotonic() + LOOK_S
            return connection
        raise failure or _nobody(self._service, problems)

    def still_leads(self, connection: AbstractConnection, within: float = math.inf) -> bool:
        """Whether this connection leads to the primary that the sentinels named within LOOK_S.

        One of them is asked. If it does not answer, the last answer counts, and the next call asks
        another one.
        """
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S  # first, so that other threads do not ask too
            first, *others = self._sentinels
            try:
                self._last_named = self._primary(first, min(self._attempt, within))
            except (redis.RedisError, OSError):
                self._sentinels = [*others, first]
        own = cast(Connection, connection)
        return self._last_named in (None, (own.host, own.port))

    @property
    def name(self) -> str | None:
        """The host and port of the primary that was named last."""
        return None if self._last_named is None else address_text(self._last_named)

    def _primary(self, sentinel: "_Sentinel", seconds: float) -> Address:
        host, port = sentinel.ask(self._service, seconds)
        return self._force_ip or host, port

    def _connect(self, address: Address, within: float) -> AbstractConnection:
        host, port = address
        options = {**limited(self._options, within), "host": host, "port": port}
        connection = self._make(**options)
        try:
            connection.connect()
            # A server that was replaced may be a replica by now.
            connection.send_command("ROLE")
            role = connection.read_response()[0]
            if role != b"master":
                raise redis.ConnectionError(f"{host}:{port} is a {role.decode()}, not the primary")
            wait_for_answers(connection, self._usual)
        except BaseException:
            disconnect(connection)
            raise
        return connection


class _Sentinel:
    """One sentinel: where it is, and how to log in."""

    def __init__(self, pool: ConnectionPool, attempt: float) -> None:
        self._class = pool.connection_class
        self._options = options_like(pool, min(attempt, SENTINEL_S))
        self._name = f"{self._options.get('host')}:{self._options.get('port')}"

    def ask(self, service: str, seconds: float) -> Address:
        """The address of the primary of a service. Raises redis errors that name the sentinel."""
        connection = self._class(**limited(self._options, seconds))
        try:
            connection.connect()
            connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
            answer = connection.read_response()
        except redis.AuthenticationError as error:
            raise redis.AuthenticationError(f"sentinel {self._name}: {error}") from error
        except (redis.RedisError, OSError) as error:
            raise redis.ConnectionError(f"sentinel {self._name}: {error}") from error
        finally:
            disconnect(connection)
        if answer is None:
            raise redis.ConnectionError(f"sentinel {self._name} has no service {service!r}")
        try:
            host, port = answer
            return host.decode(), int(port)
        except (ValueError, TypeError, AttributeError):
            raise redis.ConnectionError(f"sentinel {self._name} named no address") from None


def _nobody(service: str, problems: list[Exception]) -> Exception:
    """The error when no sentinel named a primary."""
    text = f"no sentinel named a primary of {service!r}: {'; '.join(map(str, problems))}"
    if any(isinstance(problem, redis.AuthenticationError) for problem in problems):
        return redis.AuthenticationError(text)
    return (NobodyThere if all(map(is_nobody, problems)) else redis.ConnectionError)(text)


def is_nobody(error: BaseException) -> bool:
    """Whether a connection failed because nobody listens: refused, no such socket, no such host."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError | FileNotFoundError | socket.gaierror):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def options_like(pool: ConnectionPool, seconds: float) -> dict[str, Any]:
    """The settings of a pool's connections, with `seconds` for each step and without retries."""
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if not name.startswith(("maint_notifications", "orig_")) and name not in _NOT_OURS
    }
    if issubclass(pool.connection_class, SSLConnection | AsyncSSLConnection):
        # redis-py before 6 accepts a certificate of any host.
        unchecked = options.get("ssl_cert_reqs") in ("none", ssl.CERT_NONE)
        options.setdefault("ssl_check_hostname", not unchecked)
    options.update(
        decode_responses=False,
        encoding="utf-8",  # what scripts and records are written in
        encoding_errors="strict",
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=min(seconds, options.get("socket_timeout") or seconds),
        socket_connect_timeout=min(seconds, options.get("socket_connect_timeout") or seconds),
    )
    return options


def limited(options: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The settings of a connection, with no more than `seconds` for each step of making it."""
    steps = ("socket_timeout", "socket_connect_timeout")
    return {
        name: min(seconds, value) if name in steps else value for name, value in options.items()
    }


def address_text(address: Address) -> str:
    """An address for people."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def wait_for_answers(connection: AbstractConnection, seconds: float | None) -> None:
    """Set the time-out of answers, from now on."""
    sock: Any = connection._sock
    if seconds is not None and isinstance(sock, socket.socket):  # not with fakeredis
        sock.settimeout(seconds)


def disconnect(connection: AbstractConnection) -> None:
    """Close a connection, whatever state it is in."""
    with suppress(Exception):
        connection.disconnect()
