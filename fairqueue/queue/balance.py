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
from dataclasses import dataclass

from fairqueue.errors import RedisUnavailable

# All partitions are asked again after this many claims for each of them: a question costs a tenth
# of a claim, and what is known gets older with each claim of another client.
CLAIMS_EACH = 2
# And after this many seconds: new tasks of a partition that was idle wait for so long at most.
ASK_S = 1.0
# A partition that did not answer is left alone for a while, longer each time.
FIRST_DOWN_S, LONGEST_DOWN_S = 0.5, 8.0


# A partition that was out of reach for longer has no service stored up when it comes back.
AWAY_S = 2.0


@dataclass(slots=True)
class Known:
    """What is known of one partition.

    lists: where a worker waits for tokens of it. entered_at: when this kind last claimed there, by
    the monotonic clock. due_at: when something becomes due there. down_until: when it may be asked
    again; it did not answer, since `down_since`. error: why it did not answer.
    """

    lists: tuple[bytes, ...] = ()
    entered_at: float = -math.inf
    due_at: float = math.inf
    down_until: float = -math.inf
    down_s: float = FIRST_DOWN_S
    down_since: float = math.inf
    error: Exception | None = None


class Levels:
    """The levels of all partitions in one of the two orders: ordinary turns, the CRITICAL lane.

    at: the level of what is served next, infinite if nothing waits; of a partition that rests it
    was not moved to the floor yet. busy: the same of those that do not rest. far: how far those are
    where nothing waits, or that rest.
    """

    __slots__ = ("at", "busy", "far")

    def __init__(self, count: int) -> None:
        self.at = [math.inf] * count
        self.busy = [math.inf] * count
        self.far = [-math.inf] * count

    def note(self, number: int, text: bytes) -> None:
        """Take note of what a partition has answered; see level.text in lua/lib/level.lua."""
        mark = text[:1]
        if mark == b"=":
            self.at[number] = self.busy[number] = math.inf
            self.far[number] = float(text[1:])
        elif mark == b"~":
            self.at[number] = self.far[number] = float(text[1:])
            self.busy[number] = math.inf
        else:
            self.at[number] = self.busy[number] = float(text)

    def forget(self, number: int) -> None:
        """Take note that nothing is known to wait in a partition."""
        self.at[number] = self.busy[number] = math.inf

    def lowest_other(self, number: int) -> float:
        """The lowest level of the other partitions that serve; infinite if none does."""
        busy = self.busy.copy()  # threads share it
        busy[number] = math.inf
        return min(busy)

    def farthest(self) -> float:
        """How far the partitions are that have nothing to serve."""
        return max(self.far)


class Balance:
    """What one kind of claims knows of all partitions. Threads may share it."""

    def __init__(self, count: int) -> None:
        """Know nothing of `count` partitions yet."""
        self.partitions = [Known() for _ in range(count)]
        self.asked_at = -math.inf
        self.claims = 0
        self._dice = random.Random()  # noqa: S311 - only to break ties
        self._turns, self._lane = Levels(count), Levels(count)
        self._vain: set[int] = set()  # what waits there is not for this kind of claims
        self._due_at = math.inf  # the earliest of the partitions

    def is_old(self) -> bool:
        """Whether all partitions should be asked again before the next claim."""
        return (
            self.claims >= CLAIMS_EACH * len(self.partitions)
            or time.monotonic() - self.asked_at >= ASK_S
        )

    def asks_in(self) -> float:
        """Seconds until all partitions should be asked again."""
        return max(0.0, self.asked_at + ASK_S - time.monotonic())

    def askable(self) -> list[int]:
        """The partitions that are worth asking: not those that did not answer just now.

        All of them if none has answered: then there is nothing that an attempt would delay.
        """
        now = time.monotonic()
        found = [i for i, known in enumerate(self.partitions) if known.down_until <= now]
        return found or list(range(len(self.partitions)))

    def best(self, tried: Collection[int] = ()) -> int | None:
        """The partition to claim from: with the lowest CRITICAL lane, or else the lowest level.

        One where something has become due comes first: it may be what is to be served next. None if
        nothing waits in the others than those that were `tried`. Ties are broken at random, so that
        workers do not all claim from the same one.
        """
        now = time.monotonic()
        if self._due_at <= now:
            for i, known in enumerate(self.partitions):
                if known.due_at <= now and known.down_until <= now and i not in tried:
                    return i
        for levels in (self._lane.at, self._turns.at):
            levels = levels.copy()  # another thread may change it meanwhile
            for i in (*tried, *self._vain):
                levels[i] = math.inf
            lowest = min(levels)
            if lowest < math.inf:
                if levels.count(lowest) == 1:
                    return levels.index(lowest)
                return self._dice.choice([i for i, level in enumerate(levels) if level == lowest])
        return None

    def floors(self, number: int) -> str:
        """The floors for a claim in a partition, as level.floors in lua/lib/level.lua takes them.

        These are the lowest levels of the others; if nothing waits there, how far they were. Who is
        alone then starts where the queue was, and others that come later do not wait for it.
        """
        floor, lane = self._turns.lowest_other(number), self._lane.lowest_other(number)
        mark = ""
        if floor == math.inf:
            mark, floor = "~", self._turns.farthest()
        elif self._was_away(number):
            mark = "!"
        if lane == math.inf:
            lane = self._lane.farthest()
        return f"{mark}{_text(floor)} {_text(lane)}"

    def _was_away(self, number: int) -> bool:
        known = self.partitions[number]
        return time.monotonic() - known.down_since >= AWAY_S

    def note(self, number: int, levels: bytes, hint: float, *, has_more: bool = False) -> None:
        """Take note of what a partition has answered; `hint`: seconds until something is due.

        has_more: that is 0 because more waits, which has its turn by its level.
        """
        known = self.partitions[number]
        if levels:
            turns, _, lane = levels.partition(b" ")
            self._turns.note(number, turns)
            self._lane.note(number, lane)
            self._vain.discard(number)
        known.due_at = math.inf if has_more and hint <= 0 else time.monotonic() + hint
        self._due_at = min(each.due_at for each in self.partitions)
        known.down_until, known.down_s, known.error = -math.inf, FIRST_DOWN_S, None

    def note_vain(self, number: int) -> None:
        """Take note that what waits in a partition is not for this kind, or may not run now."""
        self._vain.add(number)

    def note_due(self, number: int) -> None:
        """Take note that held tasks may have come back in a partition: a claim there is due."""
        self._vain.discard(number)
        self.partitions[number].due_at = self._due_at = time.monotonic()

    def note_claimed(self, number: int) -> None:
        """Take note that a claim in a partition was answered."""
        self.partitions[number].down_since = math.inf

    def note_down(self, number: int, error: Exception) -> None:
        """Take note that a partition did not answer, or refused."""
        known, now = self.partitions[number], time.monotonic()
        known.error = error
        self._turns.forget(number)
        self._lane.forget(number)
        known.due_at = math.inf
        known.down_since = min(known.down_since, now)
        known.down_until = now + known.down_s
        known.down_s = min(2 * known.down_s, LONGEST_DOWN_S)

    def was_asked(self) -> None:
        """Take note that all partitions were asked just now."""
        self.asked_at, self.claims = time.monotonic(), 0

    def entered(self, number: int) -> None:
        """Take note that this kind of workers has claimed in a partition, which knows it now."""
        self.partitions[number].entered_at = time.monotonic()

    def unentered(self, seconds: float) -> list[int]:
        """The partitions where this kind of workers did not claim for a while.

        Each partition has to know what tokens it wants.
        """
        now = time.monotonic()
        return [
            i
            for i, known in enumerate(self.partitions)
            if known.entered_at < now - seconds and known.down_until <= now
        ]

    def is_empty(self, number: int) -> bool:
        """Whether nothing is known to wait in a partition."""
        return self._turns.at[number] == math.inf

    def failure(self) -> Exception | None:
        """Why it is not true that nothing waits: no partition answers, or one refuses."""
        errors = [error for known in self.partitions if (error := known.error) is not None]
        refusals = [error for error in errors if not isinstance(error, RedisUnavailable)]
        if refusals:
            return refusals[0]
        return errors[0] if len(errors) == len(self.partitions) else None

    def partition_with(self, key: bytes) -> int | None:
        """The partition whose list a token came from."""
        for i, known in enumerate(self.partitions):
            if key in known.lists:
                return i
        return None

    def hint(self) -> float:
        """Seconds until something becomes due in a partition; infinite if nothing is known."""
        if self.best() is not None:
            return 0.0
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
    return "-" if math.isinf(level) else repr(level)
