"""Connections to the nodes of a Redis Cluster: which node has a slot, and what its errors mean.

One `Cluster` knows all nodes, for all links of a queue. `SlotConnections` stand for the connections
to the node that serves one slot now. See docs/adr/0034-cluster-connections.md.
"""

import math
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import redis
from redis.connection import AbstractConnection, Connection, ConnectionPool
from redis.exceptions import AskError, ClusterDownError, MovedError

from fairqueue.errors import ConfigurationError, RedisRefused
from fairqueue.link.connection import Connections, exchange
from fairqueue.link.dialer import (
    ANSWER_S,
    HANDSHAKE_S,
    Address,
    Dialer,
    NobodyThere,
    address_text,
    disconnect,
    is_nobody,
    limited,
    options_like,
    wait_for_answers,
)
from fairqueue.link.driver import BROKEN, HalfDone, Talk, is_untrusted
from fairqueue.link.group_listener import GroupListener
from fairqueue.link.keys import slot_of_key
from fairqueue.link.listener import Lender, Waiter, at_most
from fairqueue.link.operation import Argument

# Seconds that one node may take to say which node has which slots, before the next one is asked.
ASK_S = 0.5
# Seconds between two such questions because of failures, and because a slot has moved. All threads
# together ask no more often.
LOOK_S = 0.1
MOVED_LOOK_S = 1.0

_LEAST_S = 0.001

Remap = Callable[[Address], Address]


@dataclass(frozen=True, kw_only=True)
class ClusterAddress:
    """Where to find a cluster, and how to log in at its nodes. Opens no connection."""

    nodes: tuple[Address, ...]  # some of them: they name the others
    pool: ConnectionPool = field(repr=False)  # with the settings of connections
    remap: Remap | None = None  # where to reach a node with such an address

    @classmethod
    def of(cls, client: redis.RedisCluster) -> "ClusterAddress":
        """The cluster of a client of redis-py, with the client's settings."""
        manager = client.nodes_manager
        known = [*manager.startup_nodes.values(), *client.get_nodes()]
        pool: ConnectionPool = client.get_redis_connection(known[-1]).connection_pool
        addresses = dict.fromkeys((node.host, int(node.port)) for node in known)
        remap = getattr(manager, "address_remap", None)
        return cls(nodes=tuple(addresses), pool=pool, remap=remap)


class Cluster:
    """The nodes of a cluster, and which of them serves which slot. May be used by many threads."""

    def __init__(self, address: ClusterAddress, timeout: float) -> None:
        options = options_like(address.pool, min(timeout / 2, ANSWER_S))
        # Of redis-py's cluster client: it may ask for reads from replicas.
        options.pop("redis_connect_func", None)
        self._options = options
        self._make = address.pool.connection_class
        self._remap = address.remap
        self._seeds = address.nodes
        self._attempt: float = options["socket_timeout"]
        self._nodes: dict[Address, Node] = {}
        self._owners: dict[int, Node] = {}  # the slots that were asked for
        self._ranges: list[tuple[int, int, Address]] = []
        self._others: tuple[Address, ...] = ()  # replicas
        self._looked_at = -math.inf
        self._failure: Exception | None = None  # of the last look
        self._moved_to: Address | None = None  # a node that knows more than others
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = False
        self.is_known = False  # whether a node ever answered
        self.era = 0  # grows when connections break and when slots move

    def close(self) -> None:
        """Close the connections that are not in use; the others close when they come back."""
        self._is_closed = True
        for node in list(self._nodes.values()):
            node.close()

    def known_owner(self, slot: int) -> "Node | None":
        """The node that served a slot when that was last found out; None if nobody knows."""
        node = self._owners.get(slot)
        if node is None and (node := self._found(slot)) is not None:
            self._owners[slot] = node
        return node

    def node_of(self, connection: AbstractConnection) -> "Node | None":
        """The node that a connection leads to; None if it has left the cluster."""
        own = cast(Connection, connection)
        return self._nodes.get((own.host, own.port))

    def owner(self, slot: int, within: float) -> "Node":
        """The node that serves a slot, found out in at most `within` seconds. Raises redis errors.

        Also raises ConfigurationError for a server that is not in a cluster, and RedisRefused after
        `close`.
        """
        node = self.known_owner(slot)
        if node is None or node.is_suspect or self._is_closed:
            self._look(slot, within)
            node = self.known_owner(slot)
        elif self._moved_to is not None and time.monotonic() - self._looked_at > MOVED_LOOK_S:
            self._look_aside(within)
            node = self._owners.get(slot, node)
        if node is None:
            raise self._failure or redis.ConnectionError(f"no node of the cluster has slot {slot}")
        return node

    def importing(self, failure: AskError, asked: "Node | None") -> "Node":
        """The node that gets the slot of an ASK."""
        host = failure.host or (asked.address[0] if asked is not None else self._seeds[0][0])
        return self._node(self._reachable(host, failure.port))

    # --- what failures mean -----------------------------------------------------------------------

    def note(self, node: "Node", failure: BaseException) -> None:
        """Learn from an error of a node, or of a connection to it."""
        if isinstance(failure, HalfDone):
            failure = failure.refusal
        if isinstance(failure, MovedError):
            self._moved(failure, node)
        elif isinstance(failure, (*BROKEN, ClusterDownError)):
            self.era += 1
            node.is_suspect = True

    def _moved(self, failure: MovedError, asked: "Node") -> None:
        owner = self._node(self._reachable(failure.host or asked.address[0], failure.port))
        if self._owners.get(failure.slot_id) is not owner:
            self.era += 1
        self._owners[failure.slot_id] = owner
        self._moved_to = owner.address

    # --- looking ----------------------------------------------------------------------------------

    def _look(self, slot: int, within: float) -> None:
        """Ask nodes who has which slots, unless another thread has just done so."""
        if self._is_closed:
            raise RedisRefused("the queue is closed: make a new TaskQueue")
        if self._pid != os.getpid():  # a thread of the parent may have held it
            self._lock, self._pid = threading.Lock(), os.getpid()
        within = min(within, self._attempt)
        began = time.monotonic()
        if not self._lock.acquire(timeout=within):
            raise redis.TimeoutError("no node of the cluster said in time who has which slots")
        try:
            if self._looked_at > began - LOOK_S:
                return
            try:
                self._ask_nodes(slot, began + within)
                self._failure = None
            except (redis.RedisError, OSError) as error:
                self._failure = error
                raise
            finally:
                self._looked_at = time.monotonic()
        finally:
            self._lock.release()

    def _look_aside(self, within: float) -> None:
        """Look because slots have moved; whoever calls knows the owner of its own slot."""
        with suppress(redis.RedisError, OSError):  # it goes on with what it knows
            self._look(-1, min(within, ASK_S))

    def _ask_nodes(self, slot: int, deadline: float) -> None:
        """Take the answer of the first node that knows who has a slot."""
        problems: list[Exception] = []
        for address in self._in_order():
            left = min(deadline - time.monotonic(), ASK_S)
            if left <= 0:
                break
            try:
                rows = self._ask(address, left)
            except (redis.RedisError, OSError) as error:
                if "cluster support disabled" in str(error):
                    raise ConfigurationError(
                        f"{address_text(address)} is not in a cluster: connect with redis:// "
                        "instead of redis+cluster://, or with a redis.Redis"
                    ) from None
                problems.append(error)
                continue
            self.is_known = True
            if slot < 0 or any(first <= slot <= last for first, last, _ in rows):
                self._take_over(rows)
                return
            problems.append(
                redis.ConnectionError(f"{address_text(address)}: no node has slot {slot}")
            )
        raise _nobody(problems)

    def _in_order(self) -> list[Address]:
        """The addresses to ask: first those that are likely to answer, and to know."""
        primaries = {address for _, _, address in self._ranges}.union(list(self._nodes))
        healthy = [each for each in primaries if not self._node(each).is_suspect]
        random.shuffle(healthy)
        if self._moved_to in healthy:
            healthy.insert(0, self._moved_to)
        self._moved_to = None
        return list(dict.fromkeys((*healthy, *self._others, *self._seeds, *primaries)))

    def _ask(self, address: Address, seconds: float) -> list[tuple[int, int, Address]]:
        """What a node says: first and last slot, and the address of its primary."""
        node = self._nodes.get(address)
        servers = node if node is not None else Connections(self._dialer(address))
        connection = servers.take(seconds)
        try:
            with at_most(connection, seconds):
                connection.send_command("CLUSTER", "SLOTS")
                answer = connection.read_response()
        except BaseException as error:
            servers.give_up(connection, error)
            raise
        if node is None:
            disconnect(connection)  # most likely an entry point that is not asked again
        else:
            node.take_back(connection)
        others = []
        rows = []
        for first, last, primary, *replicas in answer:
            rows.append((int(first), int(last), self._announced(primary, address)))
            others += [self._announced(each, address) for each in replicas]
        self._others = tuple(dict.fromkeys(others))
        return rows

    def _announced(self, row: Sequence[Any], asked: Address) -> Address:
        """The address of a node in an answer; without a host, it is that of the node asked."""
        host = (row[0] or b"").decode()
        return self._reachable(host if host not in ("", "?") else asked[0], int(row[1]))

    def _reachable(self, host: str, port: int) -> Address:
        return self._remap((host, port)) if self._remap is not None else (host, port)

    def _take_over(self, rows: list[tuple[int, int, Address]]) -> None:
        """Note who has which slots; connections to nodes that have none are closed."""
        self._ranges = rows
        for slot, before in list(self._owners.items()):
            found = self._found(slot)
            if found is not before:
                self.era += 1
            if found is not None:
                self._owners[slot] = found
        used = {address for _, _, address in rows} | {
            node.address for node in self._owners.values()
        }
        for address in list(self._nodes):
            if address not in used:
                self._nodes.pop(address).retire()

    def _found(self, slot: int) -> "Node | None":
        for first, last, address in self._ranges:
            if first <= slot <= last:
                return self._node(address)
        return None

    def _node(self, address: Address) -> "Node":
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes.setdefault(address, Node(self, address, self._dialer(address)))
        return node

    def _dialer(self, address: Address) -> Dialer:
        return _NodeDialer(self._make, {**self._options, "host": address[0], "port": address[1]})


class Node(Connections):
    """The connections to one node."""

    def __init__(self, cluster: Cluster, address: Address, dialer: Dialer) -> None:
        super().__init__(dialer)
        self.address = address
        self.is_suspect = False  # whether something has failed there, and nothing has worked since
        self._cluster = cluster
        self._is_retired = False

    def retire(self) -> None:
        """Close all connections, those in use when they come back: the node has left."""
        self._is_retired = True
        self.close_free()

    def take_back(self, connection: AbstractConnection) -> None:
        """Keep a connection for the next caller: it works."""
        self.is_suspect = False
        super().take_back(connection)
        if self._is_retired:
            self.close_free()

    def give_up(self, connection: AbstractConnection, error: BaseException) -> None:
        """Close a connection after an error, and note what the error means."""
        self._cluster.note(self, error)
        super().give_up(connection, error)

    def dial(self, within: float) -> AbstractConnection:
        """A new connection. Raises redis errors."""
        try:
            return super().dial(within)
        except BROKEN as error:
            self._cluster.note(self, error)
            raise


class SlotConnections(Connections):
    """The connections to whichever node serves a slot now."""

    is_cluster = True

    def __init__(self, cluster: Cluster, slot: int) -> None:
        self._cluster = cluster
        self._slot = slot
        self.dialer = _SlotDialer(self)

    @property
    def is_known(self) -> bool:  # type: ignore[override]
        """Whether a node ever answered."""
        return self._cluster.is_known

    @property
    def is_checked(self) -> bool:
        """Whether the node that serves the slot is known to keep what it stores."""
        node = self._cluster.known_owner(self._slot)
        return node is not None and node.is_checked

    @is_checked.setter
    def is_checked(self, value: bool) -> None:
        node = self._cluster.known_owner(self._slot)
        if node is not None:
            node.is_checked = value

    @property
    def era(self) -> int:  # type: ignore[override]
        """Grows when connections break and when slots move."""
        return self._cluster.era

    @property
    def name(self) -> str | None:
        """The host and port of the node that serves the slot, as far as is known."""
        node = self._cluster.known_owner(self._slot)
        return None if node is None else address_text(node.address)

    def close(self) -> None:
        """Close the connections to all nodes."""
        self._cluster.close()

    def here(self) -> Connections:
        """The connections to the node that serves the slot; these ones if nobody knows it."""
        try:
            return self._cluster.owner(self._slot, ASK_S)
        except (redis.RedisError, OSError):
            return self  # the attempt will say so

    def listener(self, *keys: bytes) -> Waiter:
        """A listener for tokens in lists, which may be in several slots."""
        return GroupListener(self, *keys)

    def by_slot(self, keys: tuple[bytes, ...]) -> dict[int, tuple[Lender, tuple[bytes, ...]]]:
        """Where to wait for these keys, and for which of them, for each slot."""
        found: dict[int, list[bytes]] = {}
        for key in keys:
            found.setdefault(slot_of_key(key), []).append(key)
        return {
            slot: (SlotConnections(self._cluster, slot), tuple(own)) for slot, own in found.items()
        }

    def take(self, within: float) -> AbstractConnection:
        """A free connection to the node that serves the slot, or a new one."""
        began = time.monotonic()
        node = self._cluster.owner(self._slot, within)
        return node.take(max(within - (time.monotonic() - began), _LEAST_S))

    def lend(self) -> AbstractConnection:
        """A connection to wait on."""
        return self._cluster.owner(self._slot, math.inf).lend()

    def take_back(self, connection: AbstractConnection) -> None:
        """Keep a connection for the next caller."""
        node = self._cluster.node_of(connection)
        if node is None:
            disconnect(connection)
        else:
            node.take_back(connection)

    def give_up(self, connection: AbstractConnection, error: BaseException) -> None:
        """Close a connection after an error."""
        node = self._cluster.node_of(connection)
        if node is None:
            disconnect(connection)
        else:
            node.give_up(connection, error)

    def leads(self, connection: AbstractConnection) -> bool:
        """Whether a connection leads to the node that serves the slot, as far as is known."""
        owner = self._cluster.known_owner(self._slot)
        return owner is None or owner is self._cluster.node_of(connection)

    def converse(self, connection: AbstractConnection, talk: Talk) -> Any:
        """Send what a conversation yields, and read the answers; its result.

        While the slot moves, a node answers ASK to what is at the next one already: that is asked
        there, and nothing else is.
        """
        aside: _Aside | None = None
        try:
            commands = next(talk)
            while True:
                answers = exchange(connection, commands)
                if aside is not None or any(map(_is_ask, answers)):
                    aside = aside or _Aside(self._cluster, self._cluster.node_of(connection))
                    aside.follow(commands, answers)
                commands = talk.send(answers)
        except StopIteration as end:
            return end.value
        finally:
            if aside is not None:
                aside.close()


class _Aside:
    """A conversation at the node that gets a slot, for the part of it that is there already."""

    def __init__(self, cluster: Cluster, asked: Node | None) -> None:
        self._cluster = cluster
        self._asked = asked
        self._node: Node | None = None
        self._connection: AbstractConnection | None = None

    def follow(self, commands: Sequence[Sequence[Argument]], answers: list[Any]) -> None:
        """Ask again what was answered by ASK, and replace these answers.

        A script is loaded at both nodes. Raises redis errors.
        """
        refused = [answer for answer in answers if _is_ask(answer)]
        if self._connection is None:
            self._node = self._cluster.importing(refused[0], self._asked)
            self._connection = self._node.take(HANDSHAKE_S)
        which = [
            i for i, command in enumerate(commands) if _is_ask(answers[i]) or command[0] == "SCRIPT"
        ]
        if not which:
            return
        pairs = [each for i in which for each in (("ASKING",), commands[i])]
        try:
            found = exchange(self._connection, pairs)
        except BaseException as error:
            self.close(error)
            raise
        for i, granted, answer in zip(which, found[::2], found[1::2], strict=True):
            answers[i] = granted if isinstance(granted, redis.ResponseError) else answer

    def close(self, error: BaseException | None = None) -> None:
        """Give the connection back, or close it after an error."""
        connection, self._connection = self._connection, None
        if connection is None or self._node is None:
            return
        if error is None:
            self._node.take_back(connection)
        else:
            self._node.give_up(connection, error)


class _NodeDialer(Dialer):
    """Opens connections to one node. One that does not answer soon is not worth waiting for."""

    def dial(self, within: float = math.inf) -> AbstractConnection:
        """A connection, ready for use; no step takes longer than `within`. Raises redis errors."""
        connection = self._make(**limited(self._options, min(within, HANDSHAKE_S)))
        try:
            connection.connect()
            # A frozen node accepts connections: its kernel does. Only an answer shows that it runs.
            connection.send_command("PING")
            connection.read_response()
            wait_for_answers(connection, self._options["socket_timeout"])
        except BaseException as error:
            disconnect(connection)
            if isinstance(error, redis.ConnectionError) and is_nobody(error):
                raise NobodyThere(f"{self.name}: {error}") from error
            if isinstance(error, redis.TimeoutError):
                raise redis.TimeoutError(f"{self.name}: {error}") from error
            raise
        return connection


class _SlotDialer(Dialer):
    """Says whether a connection still leads to the node that serves a slot."""

    def __init__(self, of: SlotConnections) -> None:
        self._of = of

    def still_leads(self, connection: AbstractConnection, within: float = math.inf) -> bool:
        """Whether it does, as far as is known."""
        return self._of.leads(connection)


def _is_ask(answer: object) -> bool:
    return isinstance(answer, AskError) and not isinstance(answer, MovedError)


def _nobody(problems: list[Exception]) -> Exception:
    """The error when no node said who has which slots."""
    for problem in problems:
        if isinstance(problem, redis.AuthenticationError | redis.ResponseError) or is_untrusted(
            problem
        ):
            return problem
    text = f"no node of the cluster answered: {'; '.join(map(str, problems))}"
    return (NobodyThere if all(map(is_nobody, problems)) else redis.ConnectionError)(text)
