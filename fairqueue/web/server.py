"""Serve an app with uvicorn, in the foreground or in a thread.

uvicorn waits forever for the rest of a request, and for a client that does not read the response.
Here each step has a time limit, so that slow clients cannot use up all connections.
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

GRACE_S = 5.0  # time that requests get to finish when the server stops
START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """How long clients may take, in seconds, and how many there may be.

    `head`: until all headers have arrived. `body`: for the body, plus a second for each
    `least_rate` bytes that have arrived. `idle`: between two requests. `write`: for reading data
    that waits to be sent. `connections`: maximum number; more are closed at once.
    """

    head: float = 20.0
    body: float = 20.0
    idle: float = 5.0
    write: float = 30.0
    least_rate: float = 10_000.0  # bytes a second
    connections: int = 800  # below the usual limit of 1,024 open files


class _Config(uvicorn.Config):
    """The configuration of uvicorn, with our limits."""

    def __init__(self, app: Starlette, limits: ClientLimits, **settings: Any) -> None:
        super().__init__(app, **settings)
        self.limits = limits


class _TimedProtocol(H11Protocol):
    """A connection with time limits for its client: see ClientLimits."""

    config: _Config

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, or close the connection if there are too many."""
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
        """Stop the timers."""
        super().connection_lost(exc)
        for timer in (self._timer, self._unread):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Process data."""
        self._body_bytes += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Start the timer for a client that does not read."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._limits.write, self._drop, "write")

    def resume_writing(self) -> None:
        """Stop that timer."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _watch(self) -> None:
        """Start the timer of the next step, if it has changed."""
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
        """The seconds that the client has for the current step."""
        if self.conn.their_state is h11.IDLE:
            return self._limits.head
        return self._limits.body + self._body_bytes / self._limits.least_rate

    def _look(self) -> None:
        """Drop the client if its time is over, unless we ourselves do not read."""
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
    """Signals when it is ready, and ends the event streams before it stops."""

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
    """Serve an app in a thread. Use it as a context manager, or call `start` and `stop`.

    Port 0 uses a free port; see `url`. Raises ConfigurationError if the address cannot be used.
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
        """The URL of the server, without a trailing slash."""
        return f"http://{_in_url(self.host)}:{self.port}"

    def start(self) -> Self:
        """Start, and return when it is ready. Raises an error that kept it from starting."""
        # Not created earlier: `start` may run in a forked process, where Python 3.13 considers
        # threads of the parent as ended.
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
        """End the streams, then the server; True if it has stopped in time."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.is_alive()

    def is_alive(self) -> bool:
        """Whether the server is running."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(app: Starlette, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until SIGINT or SIGTERM, then end the streams and finish open requests.

    Raises ConfigurationError if the address cannot be used.
    """
    _WebUvicorn(_config(app)).run(sockets=[_bind(host, port)])


def _config(app: Starlette, limits: ClientLimits | None = None) -> uvicorn.Config:
    limits = limits or ClientLimits()
    return _Config(
        app,
        limits,
        http=_TimedProtocol,
        timeout_keep_alive=limits.idle,
        # URLs of one-time links contain secrets, which must not be logged.
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
            f"cannot listen on {host}:{port} ({error}): choose another host or port"
        ) from error
    return sock


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
