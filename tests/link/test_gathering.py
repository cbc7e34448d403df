"""The deadline of calls that ask several partitions, of which some do not answer."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import redis
from helpers.tasks import make_task

from fairqueue.errors import RedisUnavailable
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.runtime.embedded import EmbeddedServer

PARTITIONS = 16
TIMEOUT_S = 0.2
USERS = [f"user-{number}" for number in range(4 * PARTITIONS)]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start() as server:
        yield server


@pytest.fixture
def frozen(server: EmbeddedServer) -> Iterator[TaskQueue]:
    """A queue whose server has stopped in the middle of things."""
    url = server.url
    with TaskQueue.from_url(url, timeout=TIMEOUT_S, partitions=PARTITIONS) as queue:
        queue.check()
        process = int(redis.Redis.from_url(url).info("server")["process_id"])
        os.kill(process, signal.SIGSTOP)
        try:
            yield queue
        finally:
            os.kill(process, signal.SIGCONT)


CALLS: dict[str, Callable[[TaskQueue], object]] = {
    "settings": lambda queue: queue.settings(),
    "time": lambda queue: queue.link.now_ms(),
    "push_many": lambda queue: queue.push_many([make_task(user_id=name) for name in USERS]),
    "workers": lambda queue: WorkerStore(queue.link).alive(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_does_not_wait_for_each_partition_of_a_frozen_server(
    frozen: TaskQueue, call: Callable[[TaskQueue], object]
) -> None:
    began = time.monotonic()
    with pytest.raises(RedisUnavailable):
        call(frozen)
    assert time.monotonic() - began < PARTITIONS * TIMEOUT_S / 2
