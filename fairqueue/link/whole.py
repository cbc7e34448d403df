"""The link of a queue that has several partitions: one link for each, and one for the whole."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import redis

from fairqueue.clock import Clock
from fairqueue.errors import ConfigurationError, RedisUnavailable, WrongPartitions
from fairqueue.link.cluster import Cluster, ClusterAddress, SlotConnections
from fairqueue.link.connection import Connections, Link
from fairqueue.link.dialer import connection_maker
from fairqueue.link.keys import MOST_PARTITIONS, STORED, Keys
from fairqueue.link.operation import Call, Operation
from fairqueue.link.partitions import is_tolerant
from fairqueue.validation import check_count

Result = TypeVar("Result")


Client = redis.Redis | redis.RedisCluster | ClusterAddress


def open_link(
    client: Client, queue: str, *, timeout: float, clock: Clock | None, partitions: int
) -> Link:
    """The blocking way to a queue. Opens no connection.

    Raises ConfigurationError for a bad client, name or number of partitions.
    """
    check_count(partitions, "partitions", ConfigurationError, least=1, most=MOST_PARTITIONS)
    keys = Keys(queue)
    connections_for = _connections_for(client, timeout)

    def link(keys: Keys) -> Link:
        return Link(connections_for(keys), keys, timeout=timeout, clock=clock)

    if partitions == 1:
        return link(keys)
    parts = [link(Keys(queue, i, partitions)) for i in range(partitions)]
    home = parts[0].keys
    made = WholeLink(connections_for(home), home, timeout=timeout, clock=clock)
    made.join(parts, link(keys))
    return made


def _connections_for(client: Client, timeout: float) -> Callable[[Keys], Connections]:
    """Which connections to use for which keys."""
    if isinstance(client, redis.RedisCluster):
        client = ClusterAddress.of(client)
    if isinstance(client, ClusterAddress):
        cluster = Cluster(client, timeout)
        return lambda keys: SlotConnections(cluster, keys.slot)
    connections = Connections(connection_maker(client, timeout))
    return lambda _: connections


class WholeLink(Link):
    """The blocking way to a queue that has several partitions.

    Its keys are those of partition 0. The first operation records how many partitions the queue
    has, or finds that it has another number.
    """

    def join(self, parts: list[Link], record: Link) -> None:
        """Set the links of the partitions, and the one for the record of their number."""
        self.parts, self.record = tuple(parts), record
        record.is_begun = True
        for part in parts:
            part.whole, part.is_begun = self, True

    def perform(self, steps: Operation[Result]) -> Result:
        """Run an operation, as `Link.perform`. Raises ConfigurationError for another number."""
        if not self.is_begun:
            self._begin()
        return super().perform(steps)

    def _begin(self) -> None:
        try:
            self.record.perform(begin(len(self.parts)))
        except RedisUnavailable:
            if is_tolerant():
                return  # an operation that reads finds nothing under another number
            raise
        self.is_begun = True

    def now_ms(self) -> int:
        """As `Link.now_ms`: by the server of partition 0, or another one if that is away."""
        asked = {self.node}
        end = time.monotonic() + 2 * self.timeout
        try:
            return super().now_ms()
        except RedisUnavailable:
            for part in self.parts[1:]:
                if part.node not in asked and time.monotonic() < end:
                    asked.add(part.node)
                    with suppress(RedisUnavailable):
                        return self.learn_time(part.now_ms())
            raise


def begin(partitions: int) -> Operation[None]:
    """Record the number of partitions of a queue, with the keys that it has without partitions.

    Raises WrongPartitions if the queue has another number.
    """
    try:
        stored = int((yield Call("begin_partitions", partitions=partitions)))
    except WrongPartitions as error:
        stored = error.stored
    if stored != partitions:
        raise WrongPartitions(stored, partitions)


def stored_partitions(client: Client, queue: str, timeout: float = 5.0) -> int:
    """How many partitions a queue has; 1 if nothing is stored in it.

    Raises RedisUnavailable, RedisRefused, or ConfigurationError for a bad client or name.
    """
    link = open_link(client, queue, timeout=timeout, clock=None, partitions=1)
    try:
        (text,) = link.ask(("HGET", link.keys["fair"], "layout"))
    finally:
        link.close()
    found = (text or b"").decode("utf-8", "replace").removeprefix(STORED)
    return int(found) if text and text.startswith(STORED.encode()) and found.isdigit() else 1
