"""Wait for a token in Redis lists on a blocking connection, without polling."""

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import redis
from redis.connection import AbstractConnection

from fairqueue.link.dialer import Dialer, disconnect
from fairqueue.link.driver import BLOCK_S, LONGEST_PAUSE_S, SILENCE_S, is_for_later

SELECTABLE = 1024  # file descriptors from this number on are too large for `select`
# For the rest of an answer that has begun: meanwhile a listener hears no nudges.
PARTIAL_S = 0.05


class Lender(Protocol):
    """Where a listener gets a connection, and gives it back."""

    dialer: Dialer

    def lend(self) -> AbstractConnection:
        """A connection to wait on."""

    def take_back(self, connection: AbstractConnection) -> None:
        """Keep a connection on which nothing is pending."""


class Listener:
    """Waits for a token in lists, for another thread, or for a time, without polling.

    The server checks its own time-outs only ten times a second. So the timer is here, and the
    server is asked to wait for longer; its time-out shows that it is still alive.
    """

    def __init__(self, lender: Lender, *keys: bytes) -> None:
        self._lender = lender
        self._pid = os.getpid()
        self._keys = keys
        self.token_from: bytes | None = None  # the list that the token of the last wait came from
        self._connection: AbstractConnection | None = None
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self._interrupted = threading.Event()
        self._pending = False
        self._answers_by = 0.0  # when a living server has answered the pending BLPOP

    def listen_to(self, *keys: bytes) -> None:
        """Wait for tokens in these lists from now on; the first of them goes first."""
        if keys != self._keys:
            self.forget()
            self._keys = keys

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; True if a token came or another thread ended the wait.

        If a token came, `token_from` is the list that had it, and None otherwise.
        Raises redis errors when the connection fails. The BLPOP stays pending until `forget`, so
        that a token which comes between two waits is not missed.
        """
        self.token_from = None
        if seconds <= 0 or self._interrupted.is_set():
            return self._interrupted.is_set()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            sock = self._ask()
            if sock is None:
                return self._woken(readable([self._awake], min(left, LONGEST_PAUSE_S / 10)))
            ready = self._ready(sock, left)
            if sock in ready:
                answer = self._read()
                if answer is not None:
                    self.token_from = answer[0]
                    return True
                # Half an answer may be all that ever comes: nudges count meanwhile.
                ready = readable([self._awake], 0)
            if ready:
                return self._woken(ready)
            if self._pending and time.monotonic() >= self._answers_by:
                self.forget()
        return False

    def _ready(self, sock: socket.socket, seconds: float) -> list[socket.socket]:
        """Wait for the server, another thread or the time; returns the sockets that can be read."""
        connection = self._connection
        assert connection is not None  # noqa: S101 - _ask has just made it
        try:
            if connection.can_read(timeout=0):
                return [sock]
        except BaseException:
            self.forget()
            raise
        silence = max(0.0, self._answers_by - time.monotonic())
        return readable([sock, self._awake], min(seconds, silence))

    def _read(self) -> Any:
        """The answer: a token, or None if the server timed out or the answer is incomplete."""
        connection = self._connection
        assert connection is not None  # noqa: S101 - _ready has just looked at it
        try:
            with at_most(connection, PARTIAL_S):
                answer = connection.read_response(disconnect_on_error=False)
        except redis.TimeoutError:
            return None  # a TLS record without data, or the rest is on its way: still pending
        except redis.ResponseError as error:
            self.forget()
            if is_for_later(error):
                raise redis.ConnectionError(f"no longer the primary: {error}") from error
            raise
        except BaseException:
            self.forget()
            raise
        self._pending = False
        return answer

    def _ask(self) -> socket.socket | None:
        """Send BLPOP unless one is pending; return the socket, or None with fakeredis."""
        if self._connection is not None and not self._lender.dialer.still_leads(self._connection):
            self.forget()
        if self._connection is None:
            self._connection = self._lender.lend()
            self._pending = False
        sock = getattr(self._connection, "_sock", None)
        if not isinstance(sock, socket.socket):
            return None
        if not self._pending:
            try:
                self._connection.send_command("BLPOP", *self._keys, BLOCK_S)
            except BaseException:
                self.forget()
                raise
            self._pending = True
            self._answers_by = time.monotonic() + BLOCK_S + SILENCE_S
        return sock

    def forget(self) -> None:
        """Give up the pending BLPOP, so that a token goes to another client."""
        connection, self._connection = self._connection, None
        self._pending = False
        if connection is not None:
            disconnect(connection)

    def _release(self) -> None:
        """Give the connection back, or close it if a BLPOP is pending on it."""
        connection = self._connection
        if connection is None or self._pending or self._pid != os.getpid():
            self.forget()
        else:
            self._connection = None
            self._lender.take_back(connection)

    def _woken(self, ready: list[socket.socket]) -> bool:
        if ready:
            with suppress(BlockingIOError):
                self._awake.recv(4096)
        return bool(ready)

    def wait_for_nudge(self, seconds: float) -> bool:
        """Wait for another thread only: tokens go to other clients meanwhile."""
        self._release()
        if seconds <= 0 or self._interrupted.is_set():
            return self._interrupted.is_set()
        return self._woken(readable([self._awake], seconds))

    def interrupt(self) -> None:
        """End the wait of another thread, and all later ones."""
        self._interrupted.set()
        self.nudge()

    def nudge(self) -> None:
        """End the wait of another thread, or its next wait if it is not waiting now."""
        with suppress(OSError):
            self._waker.send(b"x")

    def close(self) -> None:
        """Give everything back."""
        self._release()
        self._awake.close()
        self._waker.close()


def readable(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """The sockets that can be read within `seconds`. `select` is exact to 1 µs, `poll` to 1 ms."""
    if max(sock.fileno() for sock in sockets) < SELECTABLE:
        return select.select(sockets, [], [], seconds)[0]
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLIN)
    ready = {number for number, _ in poll.poll(seconds * 1000)}
    return [sock for sock in sockets if sock.fileno() in ready]


@contextmanager
def at_most(connection: AbstractConnection, seconds: float) -> Iterator[None]:
    """Wait at most `seconds` for an answer, or less if the connection has a shorter time-out."""
    sock = getattr(connection, "_sock", None)
    if not isinstance(sock, socket.socket):
        yield
        return
    usual = sock.gettimeout()
    sock.settimeout(seconds if usual is None else min(usual, seconds))
    try:
        yield
    finally:
        if sock.fileno() >= 0:  # still open
            sock.settimeout(usual)


def answer_or_error(connection: AbstractConnection) -> Any:
    """The next answer; a refusal is one, too."""
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error
