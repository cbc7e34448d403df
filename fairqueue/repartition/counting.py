"""Count what a queue has, and compare the ids of two queues in bounded pages."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

from fairqueue.link.connection import Link
from fairqueue.queue.queue import TaskQueue

PAGE = 1000  # ids in one round trip
_PLACES = ("waiting", "delayed", "dead", "ended")


@dataclass(frozen=True)
class QueueCounts:
    """How much a queue has; `moving` is on its way to another queue or another partition."""

    waiting: int = 0
    delayed: int = 0
    running: int = 0
    dead: int = 0
    ended: int = 0
    schedules: int = 0
    moving: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


def links_of(queue: TaskQueue) -> tuple[Link, ...]:
    """The links of the partitions of a queue; its only link if it has none."""
    return queue.link.parts or (queue.link,)


def count(queue: TaskQueue) -> QueueCounts:
    """Count what all partitions have."""
    sums = [0] * 7
    for link in links_of(queue):
        keys = link.keys
        sizes = link.ask(
            *(("ZCARD", keys[name]) for name in ("waiting", "delayed", "leases", "dead", "ended")),
            ("HLEN", keys["schedules"]),
            ("HLEN", keys["moving"]),
        )
        sizes[-1] += len(records_aside(link))
        sums = [a + int(b) for a, b in zip(sums, sizes, strict=True)]
    return QueueCounts(*sums)


def fields_of(link: Link) -> dict[bytes, bytes]:
    """What a partition notes of moves: see the key `repartition` in docs/data-model.md."""
    (found,) = link.ask(("HGETALL", link.keys["repartition"]))
    if isinstance(found, dict):  # as clients with the newer protocol give it
        return found
    return dict(zip(found[::2], found[1::2], strict=True))


def records_aside(link: Link) -> dict[bytes, bytes]:
    """The names and texts of the records that are set aside in a partition."""
    return {name[1:]: text for name, text in fields_of(link).items() if name.startswith(b">")}


def digest_of(name: bytes) -> int:
    """A number for a task (`t` and its id) or a schedule (`s` and its id)."""
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "big")


def digest(queue: TaskQueue) -> int:
    """The sum of the digests of all tasks and schedules: the same ids have the same sum.

    For a queue that is not in use: what moves between two pages may be missed.
    """
    total = 0
    for link in links_of(queue):
        for place in _PLACES:
            for ids in _members(link, place):
                total += sum(digest_of(b"t" + each) for each in ids)
        for members in _members(link, "schedule_index"):
            total += sum(digest_of(b"s" + each.rpartition(b"\0")[2]) for each in members)
    return total % 2**64


def _members(link: Link, key: str) -> Iterator[Sequence[bytes]]:
    first = 0
    while True:
        (page,) = link.ask(("ZRANGE", link.keys[key], first, first + PAGE - 1))
        if not page:
            return
        yield page
        first += len(page)
