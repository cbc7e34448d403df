"""Open a queue by its address, with as many partitions as it has."""

import os

from fairqueue.errors import RedisUnavailable, WrongPartitions
from fairqueue.link.urls import open_client
from fairqueue.link.whole import stored_partitions
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer


def open_queue(
    url: str,
    name: str = "default",
    *,
    partitions: int | None = None,
    timeout: float = 5.0,
    patient: bool = False,
) -> TaskQueue:
    """The queue at a URL, with the partitions that it has; see TaskQueue.from_url.

    partitions: how many a new queue is to have, 1 by default; another queue must have as many.
    timeout: seconds for the question how many it has. If nobody answers that, the queue is opened
    with the given number, or if `patient` with 1. Raises WrongPartitions, ConfigurationError,
    RedisRefused and RedisUnavailable.
    """
    client = open_client(url)
    try:
        stored = stored_partitions(client, name, timeout)
    except RedisUnavailable:
        if not patient and partitions is None:
            raise
        stored = 1
    if stored > 1 and partitions not in (None, stored):
        raise WrongPartitions(stored, partitions or 1)
    queue = TaskQueue(client, name, partitions=stored if partitions is None else partitions)
    queue.link.is_begun = stored > 1
    return queue


def open_embedded(
    path: str | os.PathLike[str] | None = None,
    name: str = "default",
    *,
    partitions: int | None = None,
) -> TaskQueue:
    """A queue with a server of its own, with the partitions that it has; see TaskQueue.embedded.

    Raises WrongPartitions, ConfigurationError or EmbeddedServerError.
    """
    server = EmbeddedServer.start(path)
    try:
        queue = open_queue(server.url, name, partitions=partitions)
    except BaseException:
        server.stop()
        raise
    queue.own(server)
    return queue
