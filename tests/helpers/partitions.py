"""Take the node of a partition away, and give it back."""

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from fairqueue.link.connection import Connections
from fairqueue.link.dialer import connection_maker
from fairqueue.queue.queue import TaskQueue

NOWHERE = "127.0.0.1:1"


@contextmanager
def without(queue: TaskQueue, *numbers: int) -> Iterator[None]:
    """Let partitions of a queue be on a node where nobody listens."""
    host, _, port = NOWHERE.partition(":")
    nobody = Connections(connection_maker(redis.Redis(host, int(port)), 1.0))
    parts = [queue.link.parts[number] for number in numbers]
    before = [part.connections for part in parts]
    for part in parts:
        part.connections = nobody
    try:
        yield
    finally:
        for part, connections in zip(parts, before, strict=True):
            part.connections = connections
