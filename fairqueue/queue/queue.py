"""The fair queue: push tasks, claim them fairly between users, and record how they ended."""

import os
from typing import Any, Self

import redis

from fairqueue.clock import Clock
from fairqueue.errors import ConfigurationError, RedisRefused, UnknownLayout, kind_of
from fairqueue.link.cluster import ClusterAddress
from fairqueue.link.driver import MAX_TIMEOUT_S
from fairqueue.link.keys import Keys
from fairqueue.link.operation import Ask, At, Operation, operation, steps
from fairqueue.link.partitions import everywhere, whole
from fairqueue.link.urls import open_client
from fairqueue.link.whole import open_link
from fairqueue.queue.end import EndOperations
from fairqueue.queue.push import PushOperations
from fairqueue.queue.read import ReadOperations
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.validation import check_seconds


class QueueOperations(PushOperations, EndOperations, ReadOperations):
    """All that can be asked of a queue, by either driver."""

    @operation
    @whole
    def destroy(self) -> Operation[None]:
        """Delete the queue with all its tasks and schedules. This cannot be undone.

        Raises UnknownLayout for the queue of a later version, which may have more keys.
        """
        try:
            yield from steps(self.inspect)()
        except UnknownLayout:
            raise
        except RedisRefused:  # a queue whose keys are damaged can be deleted
            pass
        if self.link.parts:
            yield from everywhere(self, lambda part: part._unlink(), strict=True)
            yield At(self.link.record, self._unlink(self.link.record.keys))
            self.link.is_begun = False
        else:
            yield from self._unlink()

    def _unlink(self, keys: Keys | None = None) -> Operation[None]:
        yield Ask(("UNLINK", *(keys or self.keys).all()))


def check_options(timeout: object, clock: object) -> float:
    """The time-out of a queue. Raises ConfigurationError for a bad time-out or clock."""
    if clock is not None and not callable(getattr(clock, "now_ms", None)):
        raise ConfigurationError(
            "clock must be None or have a method now_ms, as ManualClock has; "
            f"{kind_of(clock)} has none"
        )
    return check_seconds(timeout, "timeout", ConfigurationError, least=0.1, most=MAX_TIMEOUT_S)


class TaskQueue(QueueOperations):
    """A queue on Redis that is fair between users. May be used by many threads at once.

    The constructor opens no connection; the first call does, and checks that the server keeps what
    it stores. `timeout` bounds each operation in seconds, repeats included. `clock` is for tests:
    without one, all time is that of the Redis server. `partitions` spread a queue over the nodes of
    a cluster; their number is chosen when the queue is new, and never changes: see docs/cluster.md.
    """

    def __init__(
        self,
        redis_client: redis.Redis | redis.RedisCluster | ClusterAddress,
        name: str = "default",
        *,
        timeout: float = 5.0,
        clock: Clock | None = None,
        partitions: int = 1,
    ) -> None:
        """Raises ConfigurationError for a bad client, name, time-out, clock or `partitions`."""
        timeout = check_options(timeout, clock)
        options: Any = {"timeout": timeout, "clock": clock, "partitions": partitions}
        super().__init__(name, open_link(redis_client, name, **options))
        self._server: EmbeddedServer | None = None

    @classmethod
    def from_url(
        cls,
        url: str,
        name: str = "default",
        *,
        timeout: float = 5.0,
        clock: Clock | None = None,
        partitions: int = 1,
    ) -> Self:
        """A queue at a `redis://`, `rediss://`, `unix://`, `+sentinel://` or `+cluster://` URL.

        With `redis+sentinel://host:port,host:port/service/0`, the queue is at the primary that the
        sentinels name, whichever that is. With `redis+cluster://host:port,host:port/`, it is in the
        cluster of these nodes, over which `partitions` spread it. Raises ConfigurationError.
        """
        return cls(open_client(url), name, timeout=timeout, clock=clock, partitions=partitions)

    @classmethod
    def embedded(
        cls,
        path: str | os.PathLike[str] | None = None,
        name: str = "default",
        *,
        clock: Clock | None = None,
        partitions: int = 1,
    ) -> Self:
        """A queue with a real server of its own, which ends with this process.

        With a `path` the data is kept there, and each acknowledged write survives a crash; without,
        it is gone at the end. Raises EmbeddedServerError, saying what is missing.
        """
        server = EmbeddedServer.start(path)
        try:
            queue = cls.from_url(server.url, name, clock=clock, partitions=partitions)
        except BaseException:
            server.stop()
            raise
        queue.own(server)
        return queue

    def own(self, server: EmbeddedServer) -> None:
        """Take over a server, which ends when the queue is closed."""
        self._server = server

    @property
    def server(self) -> EmbeddedServer | None:
        """The embedded server, if this queue has one."""
        return self._server

    def close(self) -> None:
        """Close the connections, and end the embedded server if there is one."""
        self.link.close()
        if self._server is not None:
            self._server.stop()
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TaskQueue(name={self.name!r})"
