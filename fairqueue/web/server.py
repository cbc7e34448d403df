"""Serve an app with uvicorn: in the foreground, or beside other things in a thread."""

import socket
import threading
from typing import Self

import uvicorn
from starlette.applications import Starlette

from fairqueue.errors import ConfigurationError
from fairqueue.validation import check_count
from fairqueue.web.site import Site

GRACE_S = 5.0  # what requests get to end when the server stops
START_S = 30.0


class _Server(uvicorn.Server):
    """Says when it answers, and ends the event streams first: uvicorn would wait for them."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        site = getattr(getattr(app, "state", None), "site", None)
        if isinstance(site, Site):
            site.hub.close()
        await super().shutdown(sockets)


class WebServer:
    """An app at a port of its own, in a thread. Use it as a context manager, or start and stop it.

    Port 0 takes a free one; `url` says which. Raises ConfigurationError for an address that cannot
    be had.
    """

    def __init__(self, app: Starlette, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = _bind(host, port)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(_config(app))
        self._thread = threading.Thread(target=self._run, name="fairqueue-web", daemon=True)
        self._failure: BaseException | None = None

    @property
    def url(self) -> str:
        """Where it is, without a slash at the end."""
        return f"http://{_in_url(self.host)}:{self.port}"

    def start(self) -> Self:
        """Return when it answers. Raises what kept it from starting."""
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
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(app: Starlette, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until SIGINT or SIGTERM, then end the streams and what is under way.

    Raises ConfigurationError for an address that cannot be had.
    """
    _Server(_config(app)).run(sockets=[_bind(host, port)])


def _config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
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
