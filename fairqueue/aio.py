"""The asynchronous API: the operations of a queue, awaited.

Provisional: schedules, history and workers follow. Names, arguments, results and errors are those
of `TaskQueue`, whose operations these are.
"""

from typing import Any, Self, cast

import redis
import redis.asyncio

from fairqueue.clock import Clock
from fairqueue.link.aio import AsyncLink
from fairqueue.link.cluster import ClusterAddress
from fairqueue.link.keys import Keys
from fairqueue.link.operation import awaited
from fairqueue.link.urls import open_client
from fairqueue.queue.queue import QueueOperations, check_options

__all__ = ["AsyncTaskQueue"]


class AsyncTaskQueue:
    """A queue on Redis that is fair between users, for one event loop at a time.

    Takes a client of either kind for its address and login only: connections are its own. The
    constructor opens none. A task that is cancelled leaves no answer on its way; what it asked may
    have been done, and can be repeated.
    """

    def __init__(
        self,
        redis_client: redis.Redis | redis.asyncio.Redis | ClusterAddress,
        name: str = "default",
        *,
        timeout: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """Raises ConfigurationError for a bad client, name, time-out or clock."""
        keys = Keys(name)
        timeout = check_options(timeout, clock)
        self.link = AsyncLink(redis_client, keys, timeout=timeout, clock=clock)
        self.operations = QueueOperations(name, cast(Any, self.link))

    @classmethod
    def from_url(
        cls, url: str, name: str = "default", *, timeout: float = 5.0, clock: Clock | None = None
    ) -> Self:
        """A queue at a `redis://`, `rediss://` or `unix://` URL. Raises ConfigurationError."""
        return cls(open_client(url), name, timeout=timeout, clock=clock)

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self.operations.name

    @property
    def partitions(self) -> int:
        """How many partitions the queue has."""
        return self.operations.partitions

    async def close(self) -> None:
        """Close the connections."""
        await self.link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncTaskQueue(name={self.name!r})"

    check = awaited(QueueOperations.check)
    push = awaited(QueueOperations.push)
    push_many = awaited(QueueOperations.push_many)
    claim = awaited(QueueOperations.claim)
    extend = awaited(QueueOperations.extend)
    finish = awaited(QueueOperations.finish)
    finish_many = awaited(QueueOperations.finish_many)
    finish_and_claim = awaited(QueueOperations.finish_and_claim)
    retry = awaited(QueueOperations.retry)
    release = awaited(QueueOperations.release)
    bury = awaited(QueueOperations.bury)
    cancel = awaited(QueueOperations.cancel)
    reschedule = awaited(QueueOperations.reschedule)
    size = awaited(QueueOperations.size)
    get = awaited(QueueOperations.get)
    explain = awaited(QueueOperations.explain)
    quote = awaited(QueueOperations.quote)
    inspect = awaited(QueueOperations.inspect)
    set_user = awaited(QueueOperations.set_user)
    pause_user = awaited(QueueOperations.pause_user)
    resume_user = awaited(QueueOperations.resume_user)
    get_user = awaited(QueueOperations.get_user)
    set_tenant = awaited(QueueOperations.set_tenant)
    get_tenant = awaited(QueueOperations.get_tenant)
    move_user = awaited(QueueOperations.move_user)
    tenants_of = awaited(QueueOperations.tenants_of)
    set_limits = awaited(QueueOperations.set_limits)
    get_limits = awaited(QueueOperations.get_limits)
    set_limit = awaited(QueueOperations.set_limit)
    get_key_limits = awaited(QueueOperations.get_key_limits)
    configure = awaited(QueueOperations.configure)
    settings = awaited(QueueOperations.settings)
    destroy = awaited(QueueOperations.destroy)
