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
from fairqueue.link.driver import BLOCK_S, LONGEST_PAUSE_S, SILENCE_S, is_for_later, typed

SELECTABLE = 1024  # file descriptors from this number on are too large for `select`
# For the rest of an answer that has begun: meanwhile a listener hears no nudges.
PARTIAL_S = 0.05


class Lender(Protocol):
    """Where a listener gets a connection, and gives it back."""

    dialer: Dialer
    is_cluster: bool

    @property
    def name(self) -> str | None:
        """Where the server is."""

    def lend(self) -> AbstractConnection:
        """A connection to wait on."""

    def take_back(self, connection: AbstractConnection) -> None:
        """Keep a connection on which nothing is pending."""

    def give_up(self, connection: AbstractConnection, error: BaseException) -> None:
        """Close a connection after an error, and learn from it."""


class Ear:
    """A connection on which tokens of some lists are awaited; it makes a new one when it has none.

    The server checks its own time-outs only ten times a second. So the timer is in the client, and
    the server is asked to wait for longer; its time-out shows that it is still alive.
    """

    def __init__(self, lender: Lender, keys: tuple[bytes, ...]) -> None:
        self.keys = keys
        self.is_pending = False  # whether the server is to answer
        self.answers_by = 0.0  # when a living server has answered
        self._lender = lender
        self._pid = os.getpid()
        self._connection: AbstractConnection | None = None

    @property
    def sock(self) -> socket.socket | None:
        """Its socket; None without a connection, and with fakeredis."""
        sock = getattr(self._connection, "_sock", None)
        return sock if isinstance(sock, socket.socket) else None

    def ask(self, block_s: float) -> socket.socket | None:
        """Send BLPOP unless one is pending; return the socket, or None with fakeredis."""
        self.leave_if_elsewhere()
        if self._connection is None:
            self._connection = self._lender.lend()
            self.is_pending = False
        sock = self.sock
        if sock is not None and not self.is_pending:
            try:
                self._connection.send_command("BLPOP", *self.keys, block_s)
            except BaseException as error:
                self._fail(error)
                raise
            self.is_pending = True
            self.answers_by = time.monotonic() + block_s + SILENCE_S
        return sock

    def leave_if_elsewhere(self) -> None:
        """Give up a connection that no longer leads to where the keys are."""
        if self._connection is not None and not self._lender.dialer.still_leads(self._connection):
            self.forget()

    def has_more(self) -> bool:
        """Whether something can be read that the socket does not show. Raises redis errors."""
        connection = self._connection
        assert connection is not None  # noqa: S101 - `ask` has just made it
        try:
            return bool(connection.can_read(timeout=0))
        except BaseException as error:
            self._fail(error)
            raise

    def read(self) -> Any:
        """The answer: a token, or None if the server timed out or the answer is incomplete."""
        connection = self._connection
        assert connection is not None  # noqa: S101 - its socket was just looked at
        try:
            with at_most(connection, PARTIAL_S):
                answer = connection.read_response(disconnect_on_error=False)
        except redis.TimeoutError:
            return None  # a TLS record without data, or the rest is on its way: still pending
        except redis.ResponseError as refusal:
            error = typed(refusal)
            self._fail(error)
            if self._is_for_later(error):
                raise redis.ConnectionError(f"no longer the primary: {error}") from error
            raise error from None
        except BaseException as error:
            self._fail(error)
            raise
        self.is_pending = False
        return answer

    def _is_for_later(self, error: redis.ResponseError) -> bool:
        is_elsewhere = isinstance(error, redis.exceptions.AskError)
        return is_for_later(error) or (is_elsewhere and self._lender.is_cluster)

    def push_back(self, token: Any) -> None:
        """Put a token back for somebody else. Raises redis errors."""
        connection = self._connection
        assert connection is not None  # noqa: S101 - the token was just read from it
        try:
            connection.send_command("LPUSH", *token)
            connection.read_response()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Close the connection after an error."""
        connection = self._connection
        if self._lender.is_cluster and connection is not None:
            self._connection, self.is_pending = None, False
            self._lender.give_up(connection, error)
        else:
            self.forget()

    def forget(self) -> None:
        """Give up the pending BLPOP, so that a token goes to another client."""
        connection, self._connection = self._connection, None
        self.is_pending = False
        if connection is not None:
            disconnect(connection)

    def release(self) -> None:
        """Give the connection back, or close it if a BLPOP is pending on it."""
        connection = self._connection
        if connection is None or self.is_pending or self._pid != os.getpid():
            self.forget()
        else:
            self._connection = None
            self._lender.take_back(connection)


class Waiter:
    """Waits for tokens, for another thread, or for a time, without polling."""

    def __init__(self) -> None:
        self.token_from: bytes | None = None  # the list that the token of the last wait came from
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self._interrupted = threading.Event()

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

    def listen_to(self, *keys: bytes) -> None:
        """Wait for tokens in these lists from now on; the first of them goes first."""
        raise NotImplementedError

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; True if a token came or another thread ended the wait.

        If a token came, `token_from` is the list that had it, and None otherwise.
        """
        raise NotImplementedError

    def wait_for_nudge(self, seconds: float) -> bool:
        """Wait for another thread only: tokens go to other clients meanwhile."""
        raise NotImplementedError

    def forget(self) -> None:
        """Want no tokens any more, so that they go to other clients."""
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError

    def _woken(self, ready: list[socket.socket]) -> bool:
        if ready:
            with suppress(BlockingIOError):
                self._awake.recv(4096)
        return bool(ready)


class Listener(Waiter):
    """Waits for a token in lists of one server."""

    def __init__(self, lender: Lender, *keys: bytes) -> None:
        super().__init__()
        self._ear = Ear(lender, keys)

    def listen_to(self, *keys: bytes) -> None:
        """Wait for tokens in these lists from now on; the first of them goes first."""
        if keys != self._ear.keys:
            self.forget()
            self._ear.keys = keys

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; True if a token came or another thread ended the wait.

        If a token came, `token_from` is the list that had it, and None otherwise.
        Raises redis errors when the connection fails. The BLPOP stays pending until `forget`, so
        that a token which comes between two waits is not missed.
        """
        self.token_from = None
        if seconds <= 0 or self._interrupted.is_set():
            return self._interrupted.is_set()
        end, ear = time.monotonic() + seconds, self._ear
        while (left := end - time.monotonic()) > 0:
            sock = ear.ask(BLOCK_S)
            if sock is None:
                return self._woken(readable([self._awake], min(left, LONGEST_PAUSE_S / 10)))
            ready = self._ready(sock, left)
            if sock in ready:
                answer = ear.read()
                if answer is not None:
                    self.token_from = answer[0]
                    return True
                # Half an answer may be all that ever comes: nudges count meanwhile.
                ready = readable([self._awake], 0)
            if ready:
                return self._woken(ready)
            if ear.is_pending and time.monotonic() >= ear.answers_by:
                self.forget()
        return False

    def _ready(self, sock: socket.socket, seconds: float) -> list[socket.socket]:
        """Wait for the server, another thread or the time; returns the sockets that can be read."""
        if self._ear.has_more():
            return [sock]
        silence = max(0.0, self._ear.answers_by - time.monotonic())
        return readable([sock, self._awake], min(seconds, silence))

    def forget(self) -> None:
        """Give up the pending BLPOP, so that a token goes to another client."""
        self._ear.forget()

    def _release(self) -> None:
        self._ear.release()

    def wait_for_nudge(self, seconds: float) -> bool:
        """Wait for another thread only: tokens go to other clients meanwhile."""
        self._release()
        if seconds <= 0 or self._interrupted.is_set():
            return self._interrupted.is_set()
        return self._woken(readable([self._awake], seconds))


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
        return typed(error)
