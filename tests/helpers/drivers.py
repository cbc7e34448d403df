"""Queues under either driver, so that one suite of tests can run against both."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from fairqueue.aio import AsyncTaskQueue
from fairqueue.link.operation import Operation
from fairqueue.queue.queue import TaskQueue

DRIVERS = ("blocking", "asyncio")


class Awaiting:
    """An AsyncTaskQueue with the blocking methods of a TaskQueue, in an event loop of its own."""

    def __init__(self, queue: AsyncTaskQueue) -> None:
        self.queue = queue
        self.runner = asyncio.Runner()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.queue, name)
        return lambda *args, **kwargs: self.runner.run(method(*args, **kwargs))

    @property
    def link(self) -> "Awaiting":
        """Its driver: `perform` blocks."""
        return self

    @property
    def keys(self) -> Any:
        """The names of its keys."""
        return self.queue.operations.keys

    def perform(self, steps: Operation[Any]) -> Any:
        """Run an operation."""
        return self.runner.run(self.queue.link.perform(steps))


@contextmanager
def queue_of(driver: str, url: str, **options: Any) -> Iterator[TaskQueue]:
    """A queue under a driver of DRIVERS."""
    if driver == "blocking":
        with TaskQueue.from_url(url, **options) as queue:
            yield queue
        return
    awaiting = Awaiting(AsyncTaskQueue.from_url(url, **options))
    with awaiting.runner:
        yield cast(TaskQueue, awaiting)
        awaiting.close()
