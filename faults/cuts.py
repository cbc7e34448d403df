"""Cut networks of a cluster: clients do not reach a node, or nodes do not reach each other.

Nothing is closed by a cut: what is sent does not arrive, as with a broken cable.
"""

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairqueue.runtime.cluster import HOST, EmbeddedNode

LOOK_S = 0.02

# --- a client and a node --------------------------------------------------------------------------


def cut_file(folder: Path, name: str) -> Path:
    """The file that says from which port an actor is cut off, and until when (`time.monotonic`)."""
    return folder / f"{name}.cut"


def cut_client(folder: Path, name: str, port: int, seconds: float) -> None:
    """Cut an actor off from a port of this machine for some seconds."""
    path = cut_file(folder, name)
    fresh = path.with_suffix(".fresh")
    fresh.write_text(json.dumps([port, time.monotonic() + seconds]))
    fresh.rename(path)


def obey_cuts(folder: Path, name: str) -> None:
    """Let each socket that this process opens from now on obey `cut_client`."""
    _CuttableSocket.path = cut_file(folder, name)
    socket.socket = _CuttableSocket  # type: ignore[misc]


class _CuttableSocket(socket.socket):
    """A socket whose data waits while its peer's port is cut off, until its own time is over."""

    path: Path
    _port = 0

    def connect(self, address: Any) -> None:
        self._port = address[1] if isinstance(address, tuple) else 0
        self._hold()
        super().connect(address)

    def send(self, *arguments: Any) -> int:
        self._hold()
        return super().send(*arguments)

    def sendall(self, *arguments: Any) -> None:
        self._hold()
        super().sendall(*arguments)

    def recv(self, *arguments: Any) -> bytes:
        self._hold()
        data = super().recv(*arguments)
        self._hold()  # it arrived after the cut had begun
        return data

    def recv_into(self, *arguments: Any) -> int:
        self._hold()
        count = super().recv_into(*arguments)
        self._hold()
        return count

    def _hold(self) -> None:
        limit = self.gettimeout()
        begun = time.monotonic()
        while self._is_cut():
            if limit == 0:
                raise BlockingIOError
            if limit is not None and time.monotonic() - begun >= limit:
                raise TimeoutError("timed out")
            time.sleep(LOOK_S)

    def _is_cut(self) -> bool:
        try:
            port, until = json.loads(self.path.read_text())
        except FileNotFoundError:
            return False
        return bool(port == self._port and time.monotonic() < until)


# --- a node and the others ------------------------------------------------------------------------


class Bus:
    """The network between the nodes of a cluster, which can be cut around one of them.

    Each node announces a port of this class, which passes on to its own. Each connects from an
    address of its own, so that both directions of a pair can be cut: on Linux, each address that
    begins with 127 is this machine.
    """

    def __init__(self, nodes: tuple[EmbeddedNode, ...]) -> None:
        """Open a port for each node; `join` puts them to use."""
        self._doors: dict[socket.socket, tuple[str, int]] = {}
        self._links: dict[socket.socket, tuple[socket.socket, str, str]] = {}
        self._nodes, self._addresses, self._ports = nodes, dict[str, str](), dict[str, int]()
        self._cut = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        for i, node in enumerate(nodes):
            door = socket.create_server((HOST, 0), backlog=100)
            real = int(node.ask("CONFIG", "GET", "cluster-port")[1])
            self._doors[door] = (node.id, real)
            self._addresses[f"127.0.0.{10 + i}"] = node.id
            self._ports[node.id] = door.getsockname()[1]
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def join(self, timeout: float = 15.0) -> None:
        """Let all nodes go through it, also those that were started again.

        Raises TimeoutError if they do not.
        """
        for node, address in zip(self._nodes, self._addresses, strict=True):
            node.ask("CONFIG", "SET", "bind-source-addr", address)
            node.ask("CONFIG", "SET", "cluster-announce-bus-port", self._ports[node.id])
        until = time.monotonic() + timeout
        while not self._is_between():
            if time.monotonic() > until:
                raise TimeoutError("the nodes do not connect through the ports that they announce")
            time.sleep(LOOK_S)

    def _is_between(self) -> bool:
        """Whether each node is linked to each other one; closes links of before its address."""
        with self._lock:
            for sock, (_, source, _target) in list(self._links.items()):
                if not source:
                    self._close(sock)
            linked = {(source, target) for _, source, target in self._links.values()}
        return all((a.id, b.id) in linked for a in self._nodes for b in self._nodes if a is not b)

    def cut_off(self, node: EmbeddedNode) -> None:
        """Let nothing pass from or to a node any more."""
        with self._lock:
            self._cut = node.id

    def heal(self) -> None:
        """Let everything pass again, over new connections."""
        with self._lock:
            cut, self._cut = self._cut, ""
            for sock, (_, source, target) in list(self._links.items()):
                if cut in (source, target):
                    self._close(sock)

    def close(self) -> None:
        """Close all connections."""
        self._ended.set()
        self._thread.join(10)
        for sock in (*self._doors, *self._links):
            sock.close()

    def _carry(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                open_links = [
                    sock
                    for sock, (_, source, target) in self._links.items()
                    if not self._cut or self._cut not in (source, target)
                ]
            try:
                ready = select.select([*self._doors, *open_links], [], [], LOOK_S)[0]
            except (OSError, ValueError):  # one was closed meanwhile
                continue
            with self._lock:
                for sock in ready:
                    self._accept(sock) if sock in self._doors else self._pass(sock)

    def _accept(self, door: socket.socket) -> None:
        target, port = self._doors[door]
        sock, peer = door.accept()
        source = self._addresses.get(peer[0], "")
        try:
            other = socket.create_connection((HOST, port), 1.0)
        except OSError:
            sock.close()
            return
        self._links[sock] = (other, source, target)
        self._links[other] = (sock, source, target)

    def _pass(self, sock: socket.socket) -> None:
        link = self._links.get(sock)
        if link is None or (self._cut and self._cut in link[1:]):
            return
        try:
            data = sock.recv(65536)
            link[0].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        link = self._links.pop(sock, None)
        if link is not None:
            self._links.pop(link[0], None)
            link[0].close()
            sock.close()


def keep_from_copying(primary: EmbeddedNode, replica: EmbeddedNode) -> Callable[[], None]:
    """Let a replica get nothing from its primary until the returned function is called."""
    replica.ask("CONFIG", "SET", "masteruser", "nobody", "masterauth", "x")
    primary.ask("CLIENT", "KILL", "TYPE", "REPLICA")

    def let_copy() -> None:
        replica.ask("CONFIG", "SET", "masteruser", "", "masterauth", "")

    return let_copy
