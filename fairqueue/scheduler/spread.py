"""Decide which partitions a scheduler asks whether it leads them, and which it gives back."""

import math
import time
from collections.abc import Sequence

from fairqueue.link.operation import At, Operation, steps
from fairqueue.scheduler.leadership import Reading
from fairqueue.scheduler.post import Post
from fairqueue.scheduler.roster import Member, Roster, Shares

# One that should lead a free partition has taken it after this part of a term; then others do.
GRACE_PART = 1 / 3
QUIET_MS = 4000  # between two attempts to tell a home that does not answer
LEAST_WAIT_S = 0.05


class Spread:
    """The posts of one scheduler in a queue with partitions.

    Its times are in ms: of the queue's clock in tests, or else of this process's monotonic clock,
    to which those of answers are converted by what they say of the present.
    """

    def __init__(self, posts: Sequence[Post], roster: Roster, term_ms: int, every_ms: int) -> None:
        """`every_ms`: how often to tell and read which schedulers are alive."""
        self._posts = posts
        self._roster = roster
        self._term_ms = term_ms
        self._every_ms = every_ms
        self._told: frozenset[int] = frozenset()
        self._told_ms = -math.inf
        self._quiet_until = -math.inf
        self._members: list[Member] = []
        self._taking: list[int] = []
        self._rescued: set[int] = set()  # partitions that were free for long although others live
        self._now = 0

    @property
    def leads(self) -> frozenset[int]:
        """The numbers of the partitions that this scheduler leads."""
        return frozenset(
            post.number
            for post in self._posts
            if post.leadership.is_leader and post.led_until_ms > self._now
        )

    def begin(self, now_ms: int | None) -> None:
        """Begin a pass: read the clock, and forget what was known if that was set back."""
        clock = self._roster.link.clock
        if now_ms is None:
            now_ms = int(time.monotonic() * 1000) if clock is None else clock.now_ms()
        if now_ms < self._now or self._told_ms == -math.inf:
            self._told_ms = self._quiet_until = -math.inf
            for post in self._posts:
                post.ask_ms = math.inf
        self._now = now_ms

    @property
    def is_news(self) -> bool:
        """Whether the others should be told what this scheduler leads, now or again."""
        if self._now < self._quiet_until:
            return False
        return not self.leads or self.has_changed or self._now >= self._told_ms + self._every_ms

    @property
    def has_changed(self) -> bool:
        """Whether this scheduler leads something else than the others know."""
        return self._now >= self._quiet_until and self.leads != self._told

    @property
    def is_listed(self) -> bool:
        """Whether the others know of this scheduler."""
        return self._told_ms > -math.inf

    @property
    def is_quiet(self) -> bool:
        """Whether the home did not answer when it was last told."""
        return self._quiet_until > self._told_ms

    def be_quiet(self) -> None:
        """Tell nothing for a while, because the home does not answer."""
        self._told_ms = self._now
        self._quiet_until = self._now + QUIET_MS

    def tell(self, now_ms: int | None, timeout: float) -> Operation[None]:
        """Tell what this scheduler leads, and read which others are alive."""
        leads = self.leads
        at_ms, found = yield At(
            self._roster.link, steps(self._roster.enlist)(leads, now_ms, timeout)
        )
        ahead = self._now - at_ms
        self._members = [
            Member(
                token=each.token,
                since_ms=each.since_ms + ahead,
                ends_ms=each.ends_ms + ahead,
                leads=each.leads,
            )
            for each in found
        ]
        self._told, self._told_ms = leads, self._now
        self._quiet_until = -math.inf

    def choose(self) -> tuple[list[Post], list[Post]]:
        """The posts to ask whether this scheduler leads there, and those to give back."""
        own = self._roster.token
        leads = self.leads
        members = [each for each in self._members if each.ends_ms > self._now and each.token != own]
        since_ms = next((m.since_ms for m in self._members if m.token == own), self._now)
        me = Member(token=own, since_ms=since_ms, ends_ms=0, leads=leads)
        shares = Shares([*members, me], len(self._posts))
        self._taking = shares.to_take(own)
        # Those that were taken because others could not have to stay: they would come back.
        kept = sorted(leads, key=lambda number: (number not in self._rescued, number))
        give = kept[len(kept) - shares.to_give(own, self._now - self._term_ms) :]
        free = set(shares.free)
        for post in self._posts:
            if post.number not in free:
                post.ask_ms = math.inf
            elif post.ask_ms == math.inf:
                post.ask_ms = self._now + GRACE_PART * self._term_ms
        asked = [
            post
            for post in self._posts
            if post.number not in give
            and not post.is_silent
            and (post.is_held or post.number in self._taking or self._now >= post.ask_ms)
        ]
        return asked, [post for post in self._posts if post.number in give]

    def note(self, post: Post, reading: Reading) -> None:
        """Note who leads a partition: when its term ends, somebody else should."""
        if reading.elected and post.number not in self._taking:
            self._rescued.add(post.number)
        if reading.is_leader:
            post.led_until_ms, post.ask_ms = self._now + self._term_ms, math.inf
        else:
            self._rescued.discard(post.number)
            left_ms = reading.ends_ms - reading.now_ms
            post.led_until_ms = -math.inf
            post.ask_ms = self._now + left_ms

    def note_given(self, post: Post) -> None:
        """Note that a partition was given back, for somebody else to take."""
        post.led_until_ms, post.ask_ms = -math.inf, math.inf
        self._rescued.discard(post.number)

    @property
    def wait_s(self) -> float:
        """For how many seconds there is nothing to do for partitions that others lead."""
        times = [max(self._told_ms + self._every_ms, self._quiet_until)]
        times += [each.ends_ms for each in self._members if each.ends_ms > self._now]
        leads = self.leads
        for post in self._posts:
            if post.number not in leads and not post.is_silent:
                times.append(post.ask_ms)
        return float(max(LEAST_WAIT_S, (min(times) - self._now) / 1000))
