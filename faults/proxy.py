"""The network of the fault harness: a TCP proxy in front of one server that injects faults.

    owner  == socket pair, a JSON line each way ==>  proxy process  -- connections -->  server

This file is also the program of the process. It needs only the standard library, so that the
process starts quickly and runs none of the tested code.

The process ends when the owner's end of the socket pair is closed, or when the owner is no longer
its parent; the latter covers forked children of the owner, which keep a copy of that end.
"""

import contextlib
import heapq
import itertools
import json
import os
import random
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

# Seconds for the process to start, and to answer: it waits only for sockets.
ANSWER_S = 30.0
# Seconds between two checks of the parent: how long the process may outlive an owner that was
# killed while a forked copy of it lives on. Otherwise the end of the socket is noticed at once.
LOOK_S = 0.25
CHUNK = 65_536  # bytes read at once
MOST_CALLS = 1024  # writes to one connection before the others are handled
MOST_QUEUED = 1024 * 1024  # bytes that wait for one reader; after that its writer has to wait
ACCEPTED_AT_ONCE = 64  # new connections before the others are handled
BACKLOG = 1024

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class ProxyError(Exception):
    """The proxy cannot execute a command, or its process has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The traffic of a proxy so far; `open`: its current client connections."""

    connections: int
    open: int
    bytes: int
    dropped: int


class Proxy:
    """A TCP port in front of a server, in its own process, that can inject faults.

    When a method returns, its fault is active. Faults add up until `clear`. The address never
    changes. The proxy ends with `close`, at the end of the `with` block, and when the process that
    started it ends in any way, including SIGKILL. May be used by many threads; a forked copy of the
    owner may use only the address.
    """

    def __init__(self, upstream: str, seed: int) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._unread = b""
        self._control, theirs = socket.socketpair()
        self._control.settimeout(ANSWER_S)
        with theirs:
            # -I -S: independent of PYTHONPATH and site-packages.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(self._owner), str(seed)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for the owner
            )
        try:
            self._last = self._tell("set_upstream", upstream=upstream)
            self.port: int = self._last["port"]
        except BaseException:
            self._end()
            raise

    @classmethod
    def start(cls, upstream: str, *, seed: int = 0) -> Self:
        """Stand in front of a server: the path of its unix socket, or "host:port".

        `seed` is for the jitter of `delay`. Raises ProxyError for an upstream that is neither.
        """
        return cls(upstream, seed)

    @property
    def url(self) -> str:
        """The address for clients, the same for the life of this object."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    @property
    def counts(self) -> Counts:
        """Return the traffic so far."""
        if self._process.returncode is None:
            self._last = self._tell("count")
        return Counts(**self._last["counts"])

    @property
    def dropped(self) -> int:
        """How many replies were dropped so far."""
        return self.counts.dropped

    # --- faults -----------------------------------------------------------------------------------

    def set_upstream(self, upstream: str) -> None:
        """Connect new connections to another server; open ones stay."""
        self._tell("set_upstream", upstream=upstream)

    def delay(self, seconds: float, jitter: float = 0.0) -> None:
        """Delay each chunk by `seconds`, and by up to `jitter` more, both ways, in order.

        Chunks in flight when this changes arrive as planned.
        """
        self._tell("delay", seconds=seconds, jitter=jitter)

    def black_hole(self) -> None:
        """Drop all bytes, both ways, and the information that a side has closed its connection.

        New connections are accepted and never answered.
        """
        self._tell("black_hole")

    def half_open(self) -> None:
        """Close the server's side of all connections, unnoticed; data of clients is lost.

        New connections work. The old ones stay dead until `clear` or `reset`, or until the client
        closes them.
        """
        self._tell("half_open")

    def one_byte_chunks(self) -> None:
        """Deliver everything byte by byte, both ways."""
        self._tell("one_byte_chunks")

    def refuse(self) -> None:
        """Refuse new connections, like a closed port."""
        self._tell("refuse")

    def reset(self) -> None:
        """Reset all open connections. New ones work."""
        self._tell("reset")

    def drop_replies(self, count: int, every: int = 1) -> None:
        """Drop each `every`-th reply to a script, `count` times, and reset its connection.

        The script was run. Errors are not dropped; of several replies that come together, such as
        those to a pipeline, all are, which counts as one.
        """
        self._tell("drop_replies", count=count, every=every)

    def clear(self) -> None:
        """Remove all faults. Connections that lost bytes, or their other side, are reset."""
        self._tell("clear")

    def close(self) -> None:
        """End the process, and with it all connections. May be called again."""
        if os.getpid() != self._owner or self._process.returncode is not None:
            return
        with contextlib.suppress(ProxyError):  # it was killed
            self._last = self._tell("count")  # so that they can be read afterwards
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- the owner's end --------------------------------------------------------------------------

    def _tell(self, verb: str, **arguments: object) -> dict[str, Any]:
        """Send a command, wait until it is done, and return the answer. Raises ProxyError."""
        if os.getpid() != self._owner:
            raise ProxyError(f"only process {self._owner}, which started the proxy, can tell it")
        with self._lock:
            try:
                self._control.sendall(json.dumps([verb, arguments]).encode() + b"\n")
                answer: dict[str, Any] = json.loads(self._line())
            except OSError as error:
                raise ProxyError(f"the proxy does not answer to {verb!r} ({error})") from error
        if answer["error"] is not None:
            raise ProxyError(f"the proxy cannot do {verb!r}: {answer['error']}")
        return answer

    def _line(self) -> bytes:
        while b"\n" not in self._unread:
            received = self._control.recv(4096)
            if not received:
                raise ConnectionResetError("its process has ended")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _end(self) -> None:
        # Unlike close(), shutdown() works even if a forked copy of us keeps our end.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# --- the process ----------------------------------------------------------------------------------


class _End:
    """One end of a connection: a socket, and data in flight to it."""

    __slots__ = (
        "blocked",
        "done",
        "last_due",
        "mask",
        "open",
        "other",
        "outbox",
        "pair",
        "queued",
        "sock",
    )

    def __init__(self, sock: socket.socket, pair: "_Pair") -> None:
        self.sock = sock
        self.pair = pair
        self.other: _End = self
        self.outbox: deque[tuple[float, memoryview]] = deque()  # when it arrives, and what
        self.queued = 0  # bytes in the outbox
        self.last_due = 0.0
        self.blocked = False  # cannot be written to now, or is not connected yet
        self.done = False  # it has closed its sending side
        self.mask = 0  # registered events
        self.open = True

    def lose(self) -> None:
        """Drop data in flight."""
        self.outbox.clear()
        self.queued = 0
        self.blocked = False


class _Pair:
    """A connection through the proxy. A `dark` one loses all bytes."""

    __slots__ = ("client", "dark", "replied", "script", "server")

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = _End(client, self), _End(server, self)
        self.client.other, self.server.other = self.server, self.client
        self.dark = False
        self.script = False  # the last request had a script
        self.replied = True  # a part of its reply has come


class _Server:
    """The loop of the proxy process. Standard input is the socket to the owner."""

    def __init__(self, owner: int, seed: int) -> None:
        self._owner = owner
        self._random = random.Random(seed)
        self._selector = selectors.DefaultSelector()
        self._control = socket.socket(fileno=0)
        self._selector.register(self._control, READ)
        self._unread = b""
        # Bound, and never listening: it keeps the port while connections are refused.
        self._holder = _bound(0)
        self._port: int = self._holder.getsockname()[1]
        self._listening: socket.socket | None = None
        self._pairs: set[_Pair] = set()
        self._timers: list[tuple[float, int, _End]] = []
        self._numbers = itertools.count()
        self._family: int = socket.AF_UNIX
        self._address: Any = None
        self._connections = self._bytes = self._dropped = 0
        self._be_healthy()
        self._listen()

    def _be_healthy(self) -> None:
        self._delay = self._jitter = 0.0
        self._dark = self._single = False
        self._plain = True  # chunks are forwarded at once
        self._to_drop, self._every, self._replies = 0, 1, 0

    def run(self) -> None:
        """Serve until the owner is gone or closes the socket."""
        look = 0.0
        while True:
            for key, mask in self._selector.select(self._patience()):
                if key.data is not None:
                    self._ready(key.data, mask)
                elif key.fileobj is not self._control:
                    self._accept()
                elif not self._obey():
                    return
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                self._flush(heapq.heappop(self._timers)[2])
            if now >= look:
                look = now + LOOK_S
                if os.getppid() != self._owner:
                    return

    def _patience(self) -> float:
        if not self._timers:
            return LOOK_S
        return min(LOOK_S, max(0.0, self._timers[0][0] - time.monotonic()))

    # --- commands ---------------------------------------------------------------------------------

    def _obey(self) -> bool:
        """Execute commands of the owner; False if it has closed the socket."""
        try:
            received = self._control.recv(CHUNK)
        except OSError:
            return False
        self._unread += received
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            verb, arguments = json.loads(line)
            error = None
            try:
                self._verbs[verb](self, **arguments)
            except (OSError, ValueError) as problem:
                error = str(problem)
            counts = {
                "connections": self._connections,
                "open": sum(pair.client.open for pair in self._pairs),
                "bytes": self._bytes,
                "dropped": self._dropped,
            }
            answer = {"error": error, "port": self._port, "counts": counts}
            with contextlib.suppress(OSError):  # it is gone, which the next read reports
                self._control.sendall(json.dumps(answer).encode() + b"\n")
        return bool(received)

    def _count(self) -> None:
        """The answer has the counts."""

    def _set_upstream(self, upstream: str) -> None:
        if "/" in upstream:
            self._family, self._address = socket.AF_UNIX, upstream
        else:
            host, _, port = upstream.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"{upstream!r} is neither the path of a socket nor host:port")
            found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            self._family, self._address = found[0], found[4]

    def _set_delay(self, seconds: float, jitter: float) -> None:
        if not 0 <= seconds <= 3600 or not 0 <= jitter <= 3600:
            raise ValueError(f"{seconds!r} and {jitter!r} are not both from 0 to 3600 seconds")
        self._delay, self._jitter = seconds, jitter
        self._plain = not self._single and not seconds and not jitter

    def _black_hole(self) -> None:
        self._dark = True
        for pair in self._pairs:
            self._darken(pair)

    def _half_open(self) -> None:
        for pair in list(self._pairs):
            self._darken(pair)
            self._close(pair.server)

    def _one_byte_chunks(self) -> None:
        self._single, self._plain = True, False

    def _refuse(self) -> None:
        if self._listening is not None:
            self._selector.unregister(self._listening)
            self._listening.close()
            self._listening = None

    def _reset_all(self) -> None:
        for pair in list(self._pairs):
            self._reset(pair)

    def _drop_replies(self, count: int, every: int) -> None:
        if count < 0 or every < 1:
            raise ValueError(f"count {count!r} is less than 0, or every {every!r} less than 1")
        if not self._to_drop:
            for pair in self._pairs:  # earlier requests are answered
                pair.script, pair.replied = False, True
        self._to_drop, self._every, self._replies = count, every, 0

    def _clear(self) -> None:
        self._be_healthy()
        for pair in list(self._pairs):
            if pair.dark:
                self._reset(pair)
        self._listen()

    _verbs: dict[str, Callable[..., None]] = {  # noqa: RUF012 - nobody changes it
        "count": _count,
        "set_upstream": _set_upstream,
        "delay": _set_delay,
        "black_hole": _black_hole,
        "half_open": _half_open,
        "one_byte_chunks": _one_byte_chunks,
        "refuse": _refuse,
        "reset": _reset_all,
        "drop_replies": _drop_replies,
        "clear": _clear,
    }

    # --- connections ------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listening is None:
            self._listening = _bound(self._port)
            self._listening.listen(BACKLOG)
            self._selector.register(self._listening, READ)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if self._listening is None:
                return
            try:
                client, _ = self._listening.accept()
            except OSError:  # no more, or it has disconnected
                return
            self._connections += 1
            self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        pair = _Pair(client, socket.socket(self._family))
        self._pairs.add(pair)
        for end in (pair.client, pair.server):
            end.sock.setblocking(False)
            if end.sock.family != socket.AF_UNIX:
                end.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._dark:
            self._darken(pair)
            self._close(pair.server)
            return
        try:
            pair.server.sock.connect(self._address)
        except BlockingIOError:
            pair.server.blocked = True
        except OSError:  # the server is down: its port would refuse
            self._reset(pair)
            return
        self._watch(pair.client)
        self._watch(pair.server)

    def _darken(self, pair: _Pair) -> None:
        pair.dark = True
        for end in (pair.client, pair.server):
            end.lose()
            self._watch(end)

    def _reset(self, pair: _Pair) -> None:
        """Reset a connection."""
        if pair.client.open:
            linger = struct.pack("ii", 1, 0)
            with contextlib.suppress(OSError):  # it has ended by itself
                pair.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._close(pair.client)
        self._close(pair.server)

    def _close(self, end: _End) -> None:
        if end.open:
            end.lose()
            end.open = False
            self._watch(end)
            end.sock.close()
        if not end.other.open:
            self._pairs.discard(end.pair)

    def _watch(self, end: _End) -> None:
        """Register for the events that matter now."""
        mask = 0
        if end.open:
            mask = WRITE if end.blocked else 0
            if end.other.queued < MOST_QUEUED and not end.done:
                mask |= READ
        if mask == end.mask:
            return
        if not end.mask:
            self._selector.register(end.sock, mask, end)
        elif not mask:
            self._selector.unregister(end.sock)
        else:
            self._selector.modify(end.sock, mask, end)
        end.mask = mask

    # --- bytes ------------------------------------------------------------------------------------

    def _ready(self, end: _End, mask: int) -> None:
        if mask & WRITE and end.open:
            end.blocked = False
            self._flush(end)
        if mask & READ and end.open:
            self._receive(end)

    def _receive(self, end: _End) -> None:
        pair = end.pair
        try:
            data = end.sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            if pair.dark:
                self._close(end)
            else:
                self._reset(pair)
            return
        if not pair.dark:
            self._carry(end.other, data)
        elif not data:
            self._close(end)  # without informing the other end

    def _carry(self, end: _End, data: bytes) -> None:
        """Forward bytes to an end; empty bytes mean that there will be no more."""
        if self._to_drop and self._is_dropped(end, data):
            return
        self._bytes += len(data)
        if self._plain and data and not end.outbox and not end.blocked:
            # The usual and fast path.
            try:
                sent = end.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._reset(end.pair)
                return
            if sent == len(data):
                return
            data = data[sent:]
        self._queue(end, data)

    def _is_dropped(self, end: _End, data: bytes) -> bool:
        """Whether these bytes are a reply to drop; the connection is reset then."""
        pair = end.pair
        if end is pair.server:
            if pair.replied:
                pair.script = pair.replied = False
            pair.script = pair.script or b"\r\nEVAL" in data
            return False
        if pair.replied or not data:
            return False  # the rest of a forwarded reply
        pair.replied = True
        if not pair.script or data.startswith(b"-"):
            return False
        self._replies += 1
        if self._replies % self._every:
            return False
        self._to_drop -= 1
        self._dropped += 1
        self._reset(pair)
        return True

    def _queue(self, end: _End, data: bytes) -> None:
        """Deliver bytes to an end in order."""
        if not data:
            end.other.done = True
        now, due = time.monotonic(), 0.0
        if self._delay or self._jitter:
            due = max(end.last_due, now + self._delay + self._random.uniform(0, self._jitter))
            end.last_due = due
            heapq.heappush(self._timers, (due, next(self._numbers), end))
        end.outbox.append((due, memoryview(data)))
        end.queued += len(data)
        self._flush(end)

    def _flush(self, end: _End) -> None:
        """Write delivered bytes, as far as the socket accepts them."""
        now = time.monotonic()
        calls = 0
        while end.outbox and not end.blocked and end.outbox[0][0] <= now:
            due, data = end.outbox.popleft()
            if not data:
                self._close(end)
                self._close(end.other)
                return
            try:
                sent = end.sock.send(data[:1] if self._single else data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._reset(end.pair)
                return
            end.queued -= sent
            if sent < len(data):
                end.outbox.appendleft((due, data[sent:]))
            calls += 1
            end.blocked = sent == 0 or calls == MOST_CALLS  # continues when it is writable
        self._watch(end)
        self._watch(end.other)


def _bound(port: int) -> socket.socket:
    """Return a socket bound to a local port, which another of ours may share."""
    sock = socket.socket(socket.AF_INET)
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    return sock


def main() -> None:
    """Run the process, given its owner and the seed."""
    # Drop what was inherited from the starting thread. Only the owner ends this process.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _Server(int(sys.argv[1]), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
