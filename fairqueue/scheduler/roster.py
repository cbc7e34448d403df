"""Which schedulers are alive and lead which partitions, and what follows for each of them.

A scheduler tells the home partition about itself every now and then, and reads of the others. From
that each computes how many partitions it should lead, which ones it takes and which it gives back.
This only spreads the work: whoever leads a partition is decided there, and a scheduler that knows
nothing of the others takes partitions that nobody leads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fairqueue.link.connection import Link
from fairqueue.link.operation import Call, Operation, operation
from fairqueue.link.partitions import at_home
from fairqueue.models import new_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A scheduler that is alive: since when, until when without news, and what it leads."""

    token: str
    since_ms: int
    ends_ms: int
    leads: frozenset[int]


class Roster:
    """The list of schedulers of a queue, for one of them. `link` is that of the home partition."""

    def __init__(self, link: Link, scheduler_id: str, term_ms: int) -> None:
        self.link = link
        self.token = new_id()
        self._scheduler_id = scheduler_id
        self._term_ms = term_ms

    @operation
    @at_home
    def enlist(
        self, leads: Iterable[int], now_ms: int | None = None, timeout: float | None = None
    ) -> Operation[tuple[int, list[Member]]]:
        """Tell what this scheduler leads; the time in ms, and all that are alive."""
        return (yield from self._tell(leads, self._term_ms, now_ms, timeout))

    @operation
    @at_home
    def leave(self, timeout: float | None = None) -> Operation[None]:
        """Tell that this scheduler stops."""
        yield from self._tell((), 0, None, timeout)

    def _tell(
        self, leads: Iterable[int], term_ms: int, now_ms: int | None, timeout: float | None
    ) -> Operation[tuple[int, list[Member]]]:
        answer = yield Call(
            "enlist",
            token=self.token,
            scheduler=self._scheduler_id,
            term_ms=term_ms,
            leads=",".join(map(str, sorted(leads))),
            now_ms=now_ms,
            timeout=timeout,
        )
        return int(answer[0]), [
            Member(
                token=token.decode(),
                since_ms=int(since),
                ends_ms=int(ends),
                leads=frozenset(int(each) for each in led.decode().split(",") if each.isdigit()),
            )
            for token, since, ends, led in zip(*(answer[i::4] for i in range(1, 5)), strict=True)
        ]


class Shares:
    """How many partitions each scheduler should lead: n/k, rounded up for some of them.

    Those who lead more keep more, so that no partition moves without need.
    """

    def __init__(self, members: Sequence[Member], partitions: int) -> None:
        self._partitions = partitions
        least, more = divmod(partitions, len(members))
        ordered = sorted(members, key=lambda member: (-len(member.leads), member.token))
        # How many more it should lead than it does; negative: fewer.
        self._wanted = {
            member.token: (least + (place < more) - len(member.leads), member)
            for place, member in enumerate(ordered)
        }

    @property
    def free(self) -> list[int]:
        """The partitions that nobody leads, as far as is known."""
        led = {number for _, member in self._wanted.values() for number in member.leads}
        return [number for number in range(self._partitions) if number not in led]

    def to_take(self, token: str) -> list[int]:
        """The free partitions that are for this scheduler."""
        free = self.free
        for each in sorted(self._wanted):
            wanted = max(0, self._wanted[each][0])
            if each == token:
                return free[:wanted]
            free = free[wanted:]
        return []

    def to_give(self, token: str, steady_ms: int) -> int:
        """How many partitions this scheduler gives back, for others that lead too few.

        Only those count that are alive since before `steady_ms`: one that comes and goes moves
        nothing. What is free is for them first.
        """
        missing = sum(
            wanted
            for wanted, member in self._wanted.values()
            if wanted > 0 and member.since_ms <= steady_ms
        ) - len(self.free)
        for each in sorted(self._wanted, key=lambda each: (self._wanted[each][0], each)):
            given = max(0, min(-self._wanted[each][0], missing))
            if each == token:
                return given
            missing -= given
        return 0
