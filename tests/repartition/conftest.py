"""Databases with a queue each: to be moved, and to move to."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis
from helpers.moving import Open
from helpers.state import check_consistency

from fairqueue.clock import ManualClock
from fairqueue.queue.queue import TaskQueue


@pytest.fixture
def clients(redis_url: str, redis_client: redis.Redis) -> Iterator[list[redis.Redis]]:
    """Clients of empty databases: of the old queue, of the new one, and of more."""
    with ExitStack() as opened:
        made = [redis_client]
        for number in range(1, 5):
            made.append(opened.enter_context(redis.Redis.from_url(redis_url, db=number)))
        for client in made:
            client.flushdb()
        yield made
        for client in made:
            client.flushdb()


@pytest.fixture
def open_queue(clients: list[redis.Redis], clock: ManualClock) -> Iterator[Open]:
    """Open queues in the databases; their counts and indexes must agree at the end."""
    opened: list[tuple[int, TaskQueue]] = []

    def open_queue(database: int, partitions: int) -> TaskQueue:
        made = TaskQueue(clients[database], clock=clock, partitions=partitions)
        opened.append((database, made))
        return made

    yield open_queue
    for database, queue in opened:
        check_consistency(clients[database], partitions=queue.partitions)
        queue.close()
