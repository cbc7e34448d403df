"""What a client knows of the partitions of a queue, and which one it claims from next.

Each partition has a level: the virtual time at which it serves its next task; see
lua/lib/level.lua. If clients claim where the level is lowest, all partitions serve alike for each
weight. What a client knows comes from the answers to its own claims; now and then it asks all
partitions anew, because other clients claim, too.
"""

import math
import random
import time
from collections.abc import Collection
from dataclasses import dataclass, field

# All partitions are asked again after this many claims for each of them: a question costs a tenth
# of a claim, and what is known gets older with each claim of another client.
CLAIMS_EACH = 2
# And after this many seconds: new tasks of a partition that was idle wait for so long at most.
ASK_S = 1.0
# A partition that did not answer is left alone for a while, longer each time.
FIRST_DOWN_S, LONGEST_DOWN_S = 0.5, 8.0


@dataclass(slots=True)
class Known:
    """What is known of one partition.

    level, lane: of its ordinary turns and of its CRITICAL lane; infinite if nothing waits.
    has_work: whether something may be for this kind of claims. lists: where a worker waits for
    tokens of it. entered_at: when this kind last claimed there, by the monotonic clock. due_at:
    when something becomes due there. down_until: when it may be asked again; it did not answer.
    """

    level: float = math.inf
    lane: float = math.inf
    has_work: bool = False
    lists: tuple[bytes, ...] = ()
    entered_at: float = -math.inf
    due_at: float = math.inf
    down_until: float = -math.inf
    down_s: float = FIRST_DOWN_S


@dataclass(slots=True)
class Balance:
    """What one kind of claims knows of all partitions. Threads may share it."""

    partitions: list[Known]
    asked_at: float = -math.inf
    claims: int = 0
    dice: random.Random = field(default_factory=random.Random)

    @classmethod
    def of(cls, count: int) -> "Balance":
        """Know nothing of `count` partitions yet."""
        return cls([Known() for _ in range(count)])

    def is_old(self) -> bool:
        """Whether all partitions should be asked again before the next claim."""
        return (
            self.claims >= CLAIMS_EACH * len(self.partitions)
            or time.monotonic() - self.asked_at >= ASK_S
        )

    def askable(self) -> list[int]:
        """The partitions that are worth asking: not those that did not answer just now."""
        now = time.monotonic()
        return [i for i, known in enumerate(self.partitions) if known.down_until <= now]

    def best(self, tried: Collection[int] = ()) -> int | None:
        """The partition to claim from: with the lowest CRITICAL lane, or else the lowest level.

        None if nothing waits in the others than those that were `tried`. Ties are broken at random,
        so that workers do not all claim from the same one.
        """
        now = time.monotonic()
        open_ones = [
            (i, known)
            for i, known in enumerate(self.partitions)
            if known.has_work and i not in tried and known.down_until <= now
        ]
        for levels in (
            [(known.lane, i) for i, known in open_ones if known.lane < math.inf],
            [(known.level, i) for i, known in open_ones],
        ):
            if levels:
                lowest = min(levels)[0]
                return self.dice.choice([i for level, i in levels if level == lowest])
        return None

    def floors(self, number: int) -> str:
        """The lowest levels of the other partitions, as the script `claim` takes them."""
        others = [known for i, known in enumerate(self.partitions) if i != number]
        return " ".join(
            _text(min(levels, default=math.inf))
            for levels in ([each.level for each in others], [each.lane for each in others])
        )

    def note(self, number: int, levels: bytes, hint: float) -> None:
        """Take note of what a partition has answered; `hint`: seconds until something is due."""
        known = self.partitions[number]
        level, _, lane = levels.decode().partition(" ")
        known.level, known.lane = _number(level), _number(lane)
        known.has_work = known.level < math.inf or hint <= 0
        known.due_at = time.monotonic() + hint
        known.down_until, known.down_s = -math.inf, FIRST_DOWN_S

    def note_down(self, number: int) -> None:
        """Take note that a partition did not answer."""
        known = self.partitions[number]
        known.level = known.lane = math.inf
        known.has_work = False
        known.down_until = time.monotonic() + known.down_s
        known.down_s = min(2 * known.down_s, LONGEST_DOWN_S)

    def was_asked(self) -> None:
        """Take note that all partitions were asked just now."""
        self.asked_at, self.claims = time.monotonic(), 0

    def entered(self, number: int) -> None:
        """Take note that this kind of workers has claimed in a partition, which knows it now."""
        self.partitions[number].entered_at = time.monotonic()

    def expect_entries(self, seconds: float) -> None:
        """Let this kind of workers claim wherever it did not for a while.

        Each partition has to know what tokens it wants.
        """
        since = time.monotonic() - seconds
        for known in self.partitions:
            known.has_work = known.has_work or known.entered_at < since

    def is_any_up(self) -> bool:
        """Whether any partition has answered the last question to it."""
        return any(known.down_until == -math.inf for known in self.partitions)

    def partition_with(self, key: bytes) -> int | None:
        """The partition whose list a token came from."""
        for i, known in enumerate(self.partitions):
            if key in known.lists:
                return i
        return None

    def hint(self) -> float:
        """Seconds until something becomes due in a partition; infinite if nothing is known."""
        now = time.monotonic()
        moments = (
            known.down_until if known.down_until > now else known.due_at
            for known in self.partitions
        )
        return max(0.0, min(moments) - now)

    def lists(self) -> tuple[bytes, ...]:
        """Where to wait for tokens of all partitions that answer."""
        return tuple(key for known in self.partitions for key in known.lists)


def _text(level: float) -> str:
    return "-" if level == math.inf else repr(level)


def _number(text: str) -> float:
    return math.inf if text in ("-", "") else float(text)
