"""Serve an app with uvicorn: in the foreground, or beside other things in a thread.

uvicorn waits for ever for the rest of a request that has begun, and for a client that does not read
its answer. Here each step has its time, so that slow clients cannot take all connections.
"""

import asyncio
import logging
import socket
import threading
from dataclasses import dataclass
from typing import Any, Self

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from fairqueue.errors import ConfigurationError
from fairqueue.logs import log_event
from fairqueue.validation import check_count
from fairqueue.web.app_state import AppState

logger = logging.getLogger("fairqueue.web")

GRACE_S = 5.0  # what requests get to end when the server stops
START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """How long clients may take, in seconds, and how many there may be.

    `head`: from the start of a connection, or from the answer before, until all headers are there.
    `body`: for the body, and a second more for each `least_rate` bytes of it that have come.
    `idle`: without a request, between two of them. `write`: for reading what waits to be sent.
    `connections`: open ones at most; more are closed at once.
    """

    head: float = 20.0
    body: float = 20.0
    idle: float = 5.0
    write: float = 30.0
    least_rate: float = 10_000.0  # bytes a second
    connections: int = 800  # below the 1,024 files that a process usually may have


class _Config(uvicorn.Config):
    """The settings of a server, with our own."""

    def __init__(self, app: Starlette, limits: ClientLimits, **settings: Any) -> None:
        super().__init__(app, **settings)
        self.limits = limits


class _TimedProtocol(H11Protocol):
    """A connection whose client has to get on with it: see ClientLimits."""

    config: _Config

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, or close it where there are too many."""
        super().connection_made(transport)
        self._limits = self.config.limits
        self._awaited: object = None  # which part of which request the timer is for
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0
        self._body_bytes = 0
        self._unread: asyncio.TimerHandle | None = None
        if len(self.connections) > self._limits.connections:
            self._drop("connections")
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        super().connection_lost(exc)
        for timer in (self._timer, self._unread):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        self._body_bytes += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """More waits to be sent than it should."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.write, self._drop, "write")

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _watch(self) -> None:
        """Let the time of what is awaited run, if that is something new."""
        state = self.conn.their_state
        if (state, self.cycle) == self._awaited:
            return
        self._awaited = (state, self.cycle)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if state in (h11.IDLE, h11.SEND_BODY):
            self._since, self._body_bytes = self.loop.time(), 0
            self._look_in(self._allowed())

    def _look_in(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._look)

    def _allowed(self) -> float:
        """How many seconds in all the client has for what is awaited."""
        if self.conn.their_state is h11.IDLE:
            return self._limits.head
        return self._limits.body + self._body_bytes / self._limits.least_rate

    def _look(self) -> None:
        """The time is over, unless more has come since, or we ourselves do not read."""
        if self.flow.read_paused:
            self._since = self.loop.time()
        left = self._since + self._allowed() - self.loop.time()
        if left > 0:
            self._look_in(left)
        else:
            self._drop("head" if self.conn.their_state is h11.IDLE else "body")

    def _drop(self, limit: str) -> None:
        client = self.client[0] if self.client else None
        log_event(logger, "connection_dropped", logging.DEBUG, client=client, limit=limit)
        self.transport.abort()


class _WebUvicorn(uvicorn.Server):
    """Says when it answers, and ends the event streams first: uvicorn would wait for them."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        state = getattr(getattr(app, "state", None), "fairqueue", None)
        if isinstance(state, AppState):
            state.live_updates.close()
        await super().shutdown(sockets)


class WebServer:
    """An app at a port of its own, in a thread. Use it as a context manager, or start and stop it.

    Port 0 takes a free one; `url` says which. Raises ConfigurationError for an address that cannot
    be had.
    """

    def __init__(
        self,
        app: Starlette,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: ClientLimits | None = None,
    ) -> None:
        self._socket = _bind(host, port)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._server = _WebUvicorn(_config(app, limits))
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def url(self) -> str:
        """Where it is, without a slash at the end."""
        return f"http://{_in_url(self.host)}:{self.port}"

    def start(self) -> Self:
        """Return when it answers. Raises what kept it from starting."""
        # Not made before: it may be a forked copy of this process that starts it, where Python 3.13
        # takes each thread that the parent had made for one that has ended.
        self._thread = threading.Thread(target=self._run, name="fairqueue-web", daemon=True)
        self._thread.start()
        self._server.ready.wait(START_S)
        if self._failure is not None:
            raise self._failure
        return self

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as error:
            self._failure = error
        finally:
            self._server.ready.set()

    def stop(self, timeout: float = 2 * GRACE_S) -> bool:
        """End the streams, then the server; True if it is gone in time."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_alive()

    def is_alive(self) -> bool:
        """Whether it runs: it was started, and has neither been stopped nor failed."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(app: Starlette, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until SIGINT or SIGTERM, then end the streams and what is under way.

    Raises ConfigurationError for an address that cannot be had.
    """
    _WebUvicorn(_config(app)).run(sockets=[_bind(host, port)])


def _config(app: Starlette, limits: ClientLimits | None = None) -> uvicorn.Config:
    limits = limits or ClientLimits()
    return _Config(
        app,
        limits,
        http=_TimedProtocol,
        timeout_keep_alive=limits.idle,
        # One-time links have their secret in the address: it must not reach a log.
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=round(GRACE_S),
        ws="none",
    )


def _bind(host: str, port: int) -> socket.socket:
    check_count(port, "port", ConfigurationError, least=0, most=65_535)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen at {host}:{port} ({error}): choose another host or port"
        ) from error
    return sock


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
