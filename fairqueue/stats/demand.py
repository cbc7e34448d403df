"""Who wants service in a window of time, and how much each is entitled to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fairqueue.queue.snapshot import jain_index
from fairqueue.stats.facts import Facts, read_settings, valid_key


@dataclass(slots=True, kw_only=True)
class Demand:
    """Those with demand in a window, by their names in Redis: weights, ended runs, open tasks.

    At most `most` are counted.
    """

    at_ms: int
    most: int
    weights: dict[str, float] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    limited: set[str] = field(default_factory=set)  # users that their own settings limit
    is_cut: bool = False  # there are more users than these

    def jain(self, ended: int) -> float | None:
        """Return Jain's index of received against entitled service, of `ended` runs."""
        level = self.level_with((), ended) if ended else 0.0
        parts = []
        for user, weight in self.weights.items():
            got = self.ended.get(user, 0)
            wanted = got + self.open.get(user, 0)
            if user not in self.limited and wanted:
                parts.append(got / min(wanted, level * weight) if level else 0.0)
        return jain_index(parts)

    @classmethod
    def merged(cls, parts: Sequence["Demand"]) -> "Demand":
        """Return the demand of a queue from that of its partitions; nobody is in two of them."""
        found = cls(at_ms=min(part.at_ms for part in parts), most=sum(part.most for part in parts))
        for part in parts:
            found.weights |= part.weights
            found.ended |= part.ended
            found.open |= part.open
            found.waiting |= part.waiting
            found.limited |= part.limited
            found.is_cut = found.is_cut or part.is_cut
        return found

    def add(self, flat: list[Any]) -> None:
        """Add the rows of a script, up to `most` users."""
        for name, ended, settings in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            user = valid_key(name)
            if user is None:
                continue
            if len(self.weights) >= self.most and user not in self.weights:
                self.is_cut = True
                continue
            read = read_settings(settings, self.at_ms)
            self.weights[user] = read.weight
            if read.paused or read.max_running is not None or read.rate is not None:
                self.limited.add(user)
            if int(ended):
                self.ended[user] = int(ended)

    def add_active(self, users: list[str]) -> None:
        """Add users that ended no run in the window, with the weight that most have."""
        for user in users[: self.most - len(self.weights)]:
            self.weights.setdefault(user, 1.0)

    def level_with(self, facts: Sequence[Facts], ended: int) -> float:
        """Return the fair number of runs for a weight of 1, with `facts` as newer values.

        The ended runs are divided by weight. No user gets more than they wanted; the rest is
        divided among the others, again by weight.
        """
        found = {
            user: (self.ended.get(user, 0) + self.open.get(user, 0), weight)
            for user, weight in self.weights.items()
        }
        found |= {each.key: (each.wanted, each.settings.weight) for each in facts}
        left, weights = float(ended), math.fsum(weight for _, weight in found.values())
        for wanted, weight in sorted(found.values(), key=lambda each: each[0] / each[1]):
            if weights <= 0 or wanted / weight >= left / weights:
                return left / weights if weights > 0 else math.inf
            left, weights = left - wanted, weights - weight
        return math.inf
