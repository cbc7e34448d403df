"""What the operations of a queue share: name, keys, driver, and the check of the server."""

from typing import Any

from fairqueue.errors import ConfigurationError, RedisRefused
from fairqueue.link.connection import Link
from fairqueue.link.info import parse_info
from fairqueue.link.keys import Keys
from fairqueue.link.operation import Ask, Call, Operation, operation
from fairqueue.link.partitions import Partitioned, over_all
from fairqueue.validation import check_seconds


class _Unset:
    def __repr__(self) -> str:
        return "unchanged"


UNSET: Any = _Unset()  # the default of arguments where None has a meaning of its own


class QueueBase(Partitioned):
    """One queue and the driver that runs its operations."""

    link: Link

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self.link = link

    @property
    def partitions(self) -> int:
        """How many partitions the queue has."""
        return max(1, len(self.link.parts))

    @property
    def keys(self) -> Keys:
        """The names of the queue's keys in Redis."""
        return self.link.keys

    @operation
    @over_all(lambda _: None, strict=True)
    def check(self, timeout: float | None = None) -> Operation[None]:
        """Check that Redis answers and keeps what it stores.

        Raises RedisUnavailable, or ConfigurationError for a server that evicts keys or is too old.
        """
        check_timeout(timeout)
        yield from self._check(timeout)

    def _check(self, timeout: float | None = None) -> Operation[None]:
        layout = ("HGET", self.keys["fair"], "layout")
        try:
            text, stored = yield Ask(("INFO",), layout, timeout=timeout)
            info = parse_info(text)
        except RedisRefused:
            info = {}  # not permitted, or not supported: fakeredis
            (stored,) = yield Ask(layout, timeout=timeout)
        if not self.link.whole.parts:
            self.link.begin_with(stored)
        policy = info.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys"):
            raise ConfigurationError(
                f"this Redis has maxmemory-policy {policy!r} and may evict tasks and schedules: "
                "set it to 'noeviction'"
            )
        version = info.get("redis_version", "7.0")
        if int(version.split(".")[0]) < 7:
            raise ConfigurationError(f"this is Redis {version}: FairQueue needs 7.0 or later")
        self.link.is_checked = True

    def ready(self) -> Operation[None]:
        """Check the server, unless that was done before."""
        if not self.link.is_checked:
            yield from self._check()

    def _call(self, call: Call) -> Operation[Any]:
        """Run a script that writes; the first time, check the server before."""
        if not self.link.is_checked:
            yield from self._check()
        return (yield call)


def check_timeout(timeout: object) -> None:
    """Raises ConfigurationError unless `timeout` is None or a positive number of seconds."""
    if timeout is not None:
        check_seconds(timeout, "timeout", ConfigurationError, least=0.001)
