"""The embedded cluster: several embedded servers on loopback ports that share the slots."""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import redis
from redis.connection import UnixDomainSocketConnection

from fairqueue.errors import ConfigurationError, EmbeddedServerError
from fairqueue.runtime.embedded import EmbeddedServer, Fsync
from fairqueue.validation import check_count, check_seconds

SLOTS = 16_384
HOST = "127.0.0.1"
MOST_NODES = 64
# Seconds between two looks at the cluster while it changes.
LOOK_S = 0.02
# Seconds for one answer of a node to a command of this module.
ANSWER_S = 10.0
# Milliseconds that a node may take to send the keys of a slot to another one.
MIGRATE_MS = 10_000

Check = Callable[[], bool]


class EmbeddedNode:
    """One server of an embedded cluster."""

    def __init__(self, cluster: "EmbeddedCluster", ports: "_Ports", config: dict[str, str]) -> None:
        """Hold the ports and settings; the cluster starts the server."""
        self._cluster = cluster
        self._ports = ports
        self.port = ports.port
        self.is_running = True
        self.is_frozen = False
        self._server = EmbeddedServer.start(
            fsync=cluster.fsync or "always",
            config=config,
            port=ports.open_for_server(),
            timeout=cluster.timeout,
        )
        self.id: str = self.ask("CLUSTER", "MYID").decode()

    @property
    def address(self) -> str:
        """Its host and port, such as 127.0.0.1:40001."""
        return f"{HOST}:{self.port}"

    @property
    def server(self) -> EmbeddedServer:
        """Its server, whose `url` and `socket_path` lead to this node alone."""
        return self._server

    @property
    def is_primary(self) -> bool:
        """Whether it takes itself for a primary now. Raises redis errors."""
        return bool(self.ask("ROLE")[0] == b"master")

    def ask(self, *command: str | int) -> Any:
        """Send a command to this node alone; its answer. Raises redis errors."""
        connection = UnixDomainSocketConnection(  # type: ignore[abstract]
            path=self._server.socket_path, socket_timeout=ANSWER_S, protocol=2
        )
        try:
            connection.connect()
            connection.send_command(*command)
            return connection.read_response()
        finally:
            connection.disconnect()

    def kill(self) -> None:
        """Kill it, as in a crash. Without `fsync` its data is gone."""
        self._server.kill()
        self.is_running, self.is_frozen = False, False

    def restart(self) -> None:
        """Start it again at the same address, after stopping it if it runs."""
        self.thaw()
        self._server.restart()
        self.is_running = True

    def freeze(self) -> None:
        """Stop its process without ending it: its connections stay open, and nothing answers."""
        os.kill(self._server.pid, signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        """Let a frozen node go on."""
        if self.is_frozen:
            os.kill(self._server.pid, signal.SIGCONT)
            self.is_frozen = False

    def stop(self) -> None:
        """Stop it for good."""
        self.thaw()
        self.is_running = False
        self._server.stop()
        self._ports.close()

    def __repr__(self) -> str:
        return f"<EmbeddedNode {self.address} pid {self._server.pid}>"


class EmbeddedCluster:
    """A private cluster of real servers, for tests and for trying things out.

    It ends with `stop()`, at the end of the `with` block, or when the process that started it ends
    in any way. Its nodes listen on free ports of 127.0.0.1, without a password. Its data is gone
    when it ends.
    """

    def __init__(
        self, *, fsync: Fsync | None, config: Mapping[str, str], node_timeout: float, timeout: float
    ) -> None:
        """Hold the settings. Use `EmbeddedCluster.start` to start a cluster."""
        self.fsync = fsync
        self.timeout = timeout
        self._config = {
            "cluster-node-timeout": str(round(node_timeout * 1000)),
            "repl-diskless-sync-delay": "0",
            **({} if fsync is None else {"appendonly": "yes"}),
            **config,
            "cluster-enabled": "yes",
            "cluster-announce-ip": HOST,
        }
        self._nodes: list[EmbeddedNode] = []

    @classmethod
    def start(
        cls,
        primaries: int = 3,
        replicas: int = 0,
        *,
        fsync: Fsync | None = None,
        config: Mapping[str, str] | None = None,
        node_timeout: float = 1.0,
        timeout: float = 30.0,
    ) -> Self:
        """Start a cluster and return when all its nodes say that it works.

        primaries: each has an equal part of the slots. replicas: how many each primary has.
        fsync: "always" or "everysec": nodes keep their data when they are killed and restarted;
            see `EmbeddedServer.start`. Without it, they keep nothing.
        config: further settings of the servers, one value each.
        node_timeout: seconds after which a node that does not answer is taken for dead.
        timeout: seconds until the cluster must work.

        Raises EmbeddedServerError if a server or the cluster does not start, and
        ConfigurationError for invalid arguments. Neither leaves anything running.
        """
        check_count(primaries, "primaries", ConfigurationError, least=1, most=MOST_NODES)
        most = MOST_NODES // primaries - 1
        check_count(replicas, "replicas", ConfigurationError, least=0, most=most)
        check_seconds(node_timeout, "node_timeout", ConfigurationError, least=0.1)
        check_seconds(timeout, "timeout", ConfigurationError, least=0.001)
        cluster = cls(fsync=fsync, config=config or {}, node_timeout=node_timeout, timeout=timeout)
        try:
            cluster._begin(primaries, replicas)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    # --- what it has ------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The address for `TaskQueue.from_url`, with all nodes."""
        return f"redis+cluster://{','.join(node.address for node in self._nodes)}/"

    @property
    def nodes(self) -> tuple[EmbeddedNode, ...]:
        """Its nodes, also those that were killed: the first primaries, then the others."""
        return tuple(self._nodes)

    @property
    def running(self) -> list[EmbeddedNode]:
        """The nodes that were neither killed nor frozen."""
        return [node for node in self._nodes if node.is_running and not node.is_frozen]

    @property
    def primaries(self) -> list[EmbeddedNode]:
        """The nodes that are primaries now. Raises redis errors."""
        return [node for node in self.running if node.is_primary]

    def node(self, address: str) -> EmbeddedNode:
        """The node with an address such as 127.0.0.1:40001."""
        return next(node for node in self._nodes if node.address == address)

    def owner(self, slot: int) -> EmbeddedNode:
        """The primary that serves a slot, as the first node that answers sees it."""
        for first, last, primary, *_ in self._slots():
            if first <= slot <= last:
                return next(node for node in self._nodes if node.id == primary[2].decode())
        raise EmbeddedServerError(f"no node of the embedded cluster serves slot {slot}")

    def replicas_of(self, primary: EmbeddedNode) -> list[EmbeddedNode]:
        """The nodes that copy a primary now."""
        ids = {line.split()[0].decode() for line in primary.ask("CLUSTER", "REPLICAS", primary.id)}
        return [node for node in self._nodes if node.id in ids]

    # --- what can be done with it -----------------------------------------------------------------

    def flush(self) -> None:
        """Delete the data of all primaries."""
        for node in self.primaries:
            node.ask("FLUSHALL")

    def wait(self) -> None:
        """Wait until all running nodes agree that the cluster works, and all replicas have a copy.

        Raises EmbeddedServerError if they do not within the time-out of `start`.
        """
        self._until("all nodes agree that the cluster works", self._works)

    def fail_over(self, primary: EmbeddedNode) -> EmbeddedNode:
        """Have a replica take over from its primary, without loss; returns the new primary."""
        replica = self.replicas_of(primary)[0]
        replica.ask("CLUSTER", "FAILOVER")
        self._until(f"{replica} is a primary", lambda: replica.is_primary)
        self.wait()
        return replica

    def add(self, replica_of: EmbeddedNode | None = None) -> EmbeddedNode:
        """Add a node: a primary without slots, or a replica. Returns when all others know it."""
        node = self._start_node()
        self._meet(self.running)
        if replica_of is not None:
            self._replicate(node, replica_of)
        self.wait()
        return node

    def remove(self, node: EmbeddedNode) -> None:
        """Move the slots of a node to other primaries, have all others forget it, and end it."""
        others = [each for each in self.primaries if each is not node]
        theirs = [row for row in self._slots() if row[2][2].decode() == node.id]
        for i, (first, last, *_) in enumerate(theirs):
            self.move_slots(first, last, others[i % len(others)])
        self._nodes.remove(node)
        for each in self.running:
            with contextlib.suppress(redis.ResponseError):  # it has heard of that from another one
                each.ask("CLUSTER", "FORGET", node.id)
        node.stop()
        self.wait()

    def move_slots(self, first: int, last: int, target: EmbeddedNode) -> None:
        """Move slots of one node to another in one atomic step, as Valkey 9 can."""
        source = self.owner(first)
        source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", first, last, "NODE", target.id)
        self._until(
            f"slots {first} to {last} are at {target}",
            lambda: self.owner(first) is target and self._works(),
        )

    def moving_slot(self, slot: int, target: EmbeddedNode) -> "SlotMove":
        """Begin to move a slot step by step, as before Valkey 9: key by key."""
        return SlotMove(self, slot, self.owner(slot), target)

    def stop(self) -> None:
        """End all nodes. Does nothing a second time, and in a process that did not start them."""
        for node in self._nodes:
            node.stop()
        self._nodes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<EmbeddedCluster {self.url}>"

    # --- internals --------------------------------------------------------------------------------

    def _begin(self, primaries: int, replicas: int) -> None:
        for _ in range(primaries * (1 + replicas)):
            self._start_node()
        for i, node in enumerate(self._nodes):
            # Nodes with the same number would have to find out first which one gets another.
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        heads = self._nodes[:primaries]
        for i, node in enumerate(heads):
            first, end = i * SLOTS // primaries, (i + 1) * SLOTS // primaries
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        self._meet(self._nodes)
        for i, node in enumerate(self._nodes[primaries:]):
            self._replicate(node, heads[i % primaries])
        self.wait()

    def _start_node(self) -> EmbeddedNode:
        ports = _Ports()
        try:
            config = {**self._config, "cluster-port": str(ports.bus_port)}
            node = EmbeddedNode(self, ports, config)
        except BaseException:
            ports.close()
            raise
        self._nodes.append(node)
        return node

    def _meet(self, nodes: Sequence[EmbeddedNode]) -> None:
        """Introduce each node to each other one: faster than to let them gossip."""
        for i, node in enumerate(nodes):
            for other in nodes[:i]:
                node.ask("CLUSTER", "MEET", HOST, other.port, other._ports.bus_port)
        self._until("all nodes know each other", lambda: all(map(self._knows_all, nodes)))

    def _knows_all(self, node: EmbeddedNode) -> bool:
        lines = [line.split() for line in node.ask("CLUSTER", "NODES").decode().splitlines()]
        known = {line[0] for line in lines if "handshake" not in line[2]}
        return known >= {each.id for each in self.running}

    def _replicate(self, replica: EmbeddedNode, primary: EmbeddedNode) -> None:
        replica.ask("CLUSTER", "REPLICATE", primary.id)

    def _works(self) -> bool:
        nodes = self.running
        views = {
            tuple((first, last, primary[2]) for first, last, primary, *_ in sorted(rows))
            for rows in (node.ask("CLUSTER", "SLOTS") for node in nodes)
        }
        return len(views) == 1 and all(map(self._is_ready, nodes))

    def _is_ready(self, node: EmbeddedNode) -> bool:
        """Whether a node thinks that the cluster works, and has its primary's data."""
        info = node.ask("CLUSTER", "INFO").decode()
        role = node.ask("ROLE")
        return (
            "cluster_state:ok" in info
            and f"cluster_slots_ok:{SLOTS}" in info
            and (role[0] == b"master" or role[3] == b"connected")
            and self._knows_all(node)
        )

    def _slots(self) -> list[Any]:
        """The answer to CLUSTER SLOTS of the first node that gives one."""
        failure: Exception | None = None
        for node in self.running:
            try:
                return list(node.ask("CLUSTER", "SLOTS"))
            except redis.RedisError as error:
                failure = error
        raise EmbeddedServerError("no node of the embedded cluster answers") from failure

    def _until(self, what: str, check: Check) -> None:
        deadline = time.monotonic() + self.timeout
        failure: Exception | None = None
        while time.monotonic() < deadline:
            try:
                if check():
                    return
            except redis.RedisError as error:
                failure = error
            time.sleep(LOOK_S)
        raise EmbeddedServerError(
            f"the embedded cluster was not ready within {self.timeout:g} s: waited until {what}"
        ) from failure


class SlotMove:
    """A slot on its way from one node to another, key by key; tests say how far it goes."""

    def __init__(
        self, cluster: EmbeddedCluster, slot: int, source: EmbeddedNode, target: EmbeddedNode
    ) -> None:
        """Mark the slot at both nodes. Keys that do not exist are asked of the target from now."""
        self._cluster = cluster
        self.slot = slot
        self.source = source
        self.target = target
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)

    def keys(self) -> list[bytes]:
        """The keys of the slot that are still at the source, at most 1,000."""
        return list(self.source.ask("CLUSTER", "GETKEYSINSLOT", self.slot, 1000))

    def move_keys(self, *keys: bytes) -> None:
        """Move some keys, or without arguments all that are left."""
        for group in [keys] if keys else iter(self.keys, []):
            if group:
                names = [key.decode() for key in group]
                target = (HOST, self.target.port, "", 0, MIGRATE_MS)
                self.source.ask("MIGRATE", *target, "KEYS", *names)

    def finish(self) -> None:
        """Move all keys that are left, and give the slot to the target."""
        self.move_keys()
        nodes = [self.target, self.source]
        nodes += [node for node in self._cluster.primaries if node not in nodes]
        for node in nodes:
            node.ask("CLUSTER", "SETSLOT", self.slot, "NODE", self.target.id)


class _Ports:
    """Two free ports of 127.0.0.1 for one node, kept from others for as long as it exists.

    A bound socket that does not listen keeps the system from giving the port to anybody else. On
    Linux a server may listen on it nevertheless; elsewhere it is closed just before.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self.port, self.bus_port = self._take(), self._take()

    def _take(self) -> int:
        sock = socket.socket()
        self._held.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port

    def open_for_server(self) -> int:
        """The port for clients, which the server may open now."""
        if sys.platform != "linux":
            self.close()
        return self.port

    def close(self) -> None:
        """Let anybody have the ports."""
        for sock in self._held:
            sock.close()
        self._held.clear()
