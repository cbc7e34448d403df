"""Fairness over the partitions of a queue: who gets what, compared with an ideal server.

The scenes attack what makes a queue of several partitions fair as a whole: partitions with more
tenants than others, that were idle, paused or out of reach, tenants that are alone in theirs, and
clients that know different things. The account is that of benchmarks/adversarial.py.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import Any

from benchmarks.adversarial import LEAST_JAIN, LEAST_SHARE, Trial
from benchmarks.common import Bench
from fairqueue import Priority, Task
from fairqueue.errors import RedisUnavailable
from fairqueue.link.partitions import partition_of
from fairqueue.models import Claim
from fairqueue.queue import balance

PARTITIONS = (1, 4, 16, 64)
CLIENTS = 8  # with knowledge of their own
LIMITS = (1, 3, 8, 20)  # tasks of a claim, in turns


@lru_cache(maxsize=4096)
def names_in(partition: int, partitions: int, number: int, prefix: str = "t") -> tuple[str, ...]:
    """Some names of tenants that belong in a partition."""
    found = (f"{prefix}{n}" for n in count())
    chosen = (name for name in found if partition_of("", name, partitions) == partition)
    return tuple(islice(chosen, number))


class PartTrial(Trial):
    """A trial of a queue with partitions, claimed from by several clients in random order."""

    def __init__(
        self,
        url: str,
        size: float,
        partitions: int,
        clients: int = CLIENTS,
        limits: Sequence[int] = LIMITS,
    ) -> None:
        super().__init__(url, size, partitions=partitions, clients=clients)
        self.partitions = partitions
        self.limits = limits
        self.ratios: list[float] = []  # what somebody got for what others got, who had as much work

    def here(self, partition: int) -> int:
        """The number of a partition, if there are fewer."""
        return partition % self.partitions

    def tenants(self, partition: int, number: int, prefix: str = "t") -> tuple[str, ...]:
        """Names of tenants that belong in a partition."""
        return names_in(self.here(partition), self.partitions, number, prefix)

    def spread(self, number: int, *, skewed: bool) -> list[str]:
        """Names of tenants over all partitions; half of them in one if `skewed`."""
        if skewed:
            half = number // 2
            return [*self.tenants(0, half, "half"), *(f"rest{n}" for n in range(number - half))]
        return [f"t{n}" for n in range(number)]

    def take(self, claims: int, **options: Any) -> None:
        """Claim and finish until this many tasks were claimed, with limits of 1 to 20."""
        number = 0
        while number < claims:
            got = self.claim(self.chance.choice(self.limits), **options)
            number += len(got)
            self.finish(got)

    def quit(self, claims: float = math.inf, **options: Any) -> None:
        """Claim and finish as many tasks, or all, which do not count."""
        while claims > 0:
            queue = self.any_queue()
            got = queue.claim("w", max(self.limits), lease=86_400.0, **options)
            queue.finish_many((claim, None) for claim in got)
            claims -= len(got)
            if not got:
                break

    def out_of_reach(self, number: int) -> Iterator[None]:
        """Let a partition not answer, and all clients know it, for one turn of a loop."""
        clients = self.queues if self.partitions > 1 else []
        for queue in clients:
            for known in queue.__dict__.get("_balances", {}).values():
                known.note_down(number, RedisUnavailable("out of reach"))
                known.partitions[number].down_until = math.inf
        yield
        for queue in clients:
            for known in queue.__dict__.get("_balances", {}).values():
                known.partitions[number].down_until = -math.inf
                known.partitions[number].down_since -= 2 * balance.AWAY_S
                known.claims = 10**9


Scene = Callable[[PartTrial], None]
SCENES: dict[str, Scene] = {}


def scene(name: str) -> Callable[[Scene], Scene]:
    def add(function: Scene) -> Scene:
        SCENES[name] = function
        return function

    return add


def _backlog(trial: PartTrial, tenants: Iterable[str], each: int) -> None:
    trial.push_all((tenant, "ann") for tenant in tenants for _ in range(each))


def _many(trial: PartTrial, *, skewed: bool) -> None:
    tenants = trial.spread(40, skewed=skewed)
    rounds = trial.count(400, 30)
    _backlog(trial, tenants, 2 * rounds)
    trial.take(rounds * len(tenants))


@scene("even tenants")
def even(trial: PartTrial) -> None:
    _many(trial, skewed=False)


@scene("half of the tenants in one partition")
def skewed(trial: PartTrial) -> None:
    _many(trial, skewed=True)


@scene("weights, half of the tenants in one partition")
def weights(trial: PartTrial) -> None:
    tenants = trial.spread(40, skewed=True)
    rounds = trial.count(300, 90)
    for n, tenant in enumerate(tenants):
        trial.set_tenant(tenant, (1.0, 2.0, 4.0, 0.5)[n % 4])
    _backlog(trial, tenants, 3 * rounds)
    trial.take(rounds * len(tenants))


@scene("a partition that wakes when others have served a lot")
def wakes(trial: PartTrial) -> None:
    tenants = [each for p in range(1, 5) for each in trial.tenants(p, 5)]
    before, during = trial.count(20_000, 1200), trial.count(8000, 500)
    for tenant in tenants:
        trial.queue.push_many(
            Task.create(user_id="ann", tenant=tenant) for _ in range((before + 4 * during) // 20)
        )
    trial.quit(before)
    for tenant in tenants:
        trial.arrive(tenant, "ann", during)
    # Several partitions at once, so that none of them is a measure for the others.
    late = [each for p in (0, 5, 6) for each in trial.tenants(p, 4, "late")]
    _backlog(trial, late, during // 4)
    trial.take(during)


@scene("an idle queue that begins again")
def idle(trial: PartTrial) -> None:
    """Partitions end at different levels, then all begin at once."""
    first, second = trial.tenants(0, 8), trial.tenants(1, 2)
    served = trial.count(2000, 400)
    for tenant in first:
        trial.queue.push_many(Task.create(user_id="ann", tenant=tenant) for _ in range(served // 8))
    trial.quit()
    for tenant in second:
        trial.queue.push_many(Task.create(user_id="ann", tenant=tenant) for _ in range(served))
    trial.quit()
    tenants = [each for p in range(4) for each in trial.tenants(p, 5, "new")]
    rounds = trial.count(100, 60)
    _backlog(trial, tenants, 2 * rounds)
    trial.take(rounds * len(tenants))


def _trickle(trial: PartTrial, *, at_once: bool) -> None:
    """A tenant that is alone in its partition pushes its next task when the last one is gone.

    It is entitled to as much as others, and not to more because nobody is ahead of it there.
    """
    tenants = [each for p in range(1, 4) for each in trial.tenants(p, 5, "busy")]
    (alone,) = trial.tenants(0, 1, "alone")
    claims = trial.count(3000, 500)
    _backlog(trial, tenants, claims // 4)
    trial.push(alone, "ann")
    number = 0
    while number < claims:
        got = trial.claim()
        number += len(got)
        is_its = any(claim.task.tenant == alone for claim in got)
        if is_its and at_once:
            trial.push(alone, "ann")
        trial.finish(got)
        if is_its and not at_once:
            trial.push(alone, "ann")
    others = sum(trial.root.got[each] for each in tenants) / len(tenants)
    trial.ratios.append(trial.root.got[alone] / others)


@scene("a lone tenant that pushes again when its task is claimed")
def trickler_claimed(trial: PartTrial) -> None:
    _trickle(trial, at_once=True)


@scene("a lone tenant that pushes again when its task is done")
def trickler_done(trial: PartTrial) -> None:
    _trickle(trial, at_once=False)


@scene("ever new tenants that are alone in their partition")
def new_and_alone(trial: PartTrial) -> None:
    """Each pushes one task when that of the one before was taken: all of them are as one tenant."""
    tenants = [each for p in range(1, 4) for each in trial.tenants(p, 5, "busy")]
    claims = trial.count(3000, 1000)
    _backlog(trial, tenants, claims // 4)
    new = list(trial.tenants(0, claims // 8, "new"))
    trial.push(new[0], "ann")
    at, number = 0, 0
    while number < claims:
        got = trial.claim()
        number += len(got)
        trial.finish(got)
        if new[at] not in trial.root.left and at + 1 < len(new):
            at += 1
            trial.push(new[at], "ann")
    others = sum(trial.root.got[each] for each in tenants) / len(tenants)
    trial.ratios.append(at / others)


@scene("a lone tenant that runs one task at a time")
def capped(trial: PartTrial) -> None:
    tenants = [each for p in range(1, 4) for each in trial.tenants(p, 5, "busy")]
    (alone,) = trial.tenants(0, 1, "alone")
    claims = trial.count(3000, 500)
    trial.queue.set_tenant(alone, max_running=1)
    _backlog(trial, [*tenants, alone], claims // 4)
    worker, number = trial.any_queue(), 0
    held: list[Claim] = []
    while number < claims:
        _, got, _ = worker.finish_and_claim([(claim, None) for claim in held], "w", 1, 86_400.0)
        for claim in held:
            trial.served(claim)
        held, number = got, number + len(got)
        worker = trial.any_queue()


@scene("a partition whose tenants were paused")
def paused(trial: PartTrial) -> None:
    there = trial.tenants(0, 4, "paused")
    tenants = [each for p in range(1, 4) for each in trial.tenants(p, 5, "busy")]
    before, during = trial.count(8000, 600), trial.count(4000, 1200)
    for tenant in (*there, *tenants):
        trial.queue.push_many(
            Task.create(user_id="ann", tenant=tenant)
            for _ in range(trial.count(1200, 300) if tenant in there else (before + during) // 8)
        )
    trial.claim(1)
    for tenant in there:
        trial.queue.set_tenant(tenant, paused=True)
    trial.quit(before)
    for tenant in there:
        trial.queue.set_tenant(tenant, paused=False)
    for tenant in (*there, *tenants):
        trial.arrive(tenant, "ann", during)
    trial.take(during)


@scene("tasks that only some workers take")
def stuck(trial: PartTrial) -> None:
    """A partition whose only tasks nobody took for a while gets others."""
    (rare,) = trial.tenants(0, 1, "rare")
    tenants = [each for p in range(1, 4) for each in trial.tenants(p, 5, "busy")]
    before, during = trial.count(8000, 600), trial.count(4000, 1200)
    trial.queue.push_many(
        Task.create(user_id="ann", tenant=rare, name="rare") for _ in range(before)
    )
    for tenant in tenants:
        trial.queue.push_many(
            Task.create(user_id="ann", tenant=tenant, name="common")
            for _ in range((before + 4 * during) // 15)
        )
    trial.quit(before, avoid=["rare"])
    for tenant in tenants:
        trial.arrive(tenant, "ann", during)
    for tenant in trial.tenants(0, 3, "late"):
        trial.push(tenant, "ann", during // 4, name="common")
    trial.take(during, avoid=["rare"])


@scene("CRITICAL tasks in one partition")
def critical(trial: PartTrial) -> None:
    """They go first, but what waits beside them gets nothing by it."""
    urgent, *beside = trial.tenants(0, 5, "beside")
    tenants = [each for p in range(1, 4) for each in trial.tenants(p, 5, "busy")]
    claims = trial.count(4000, 1400)
    _backlog(trial, [*beside, *tenants], claims // 4)
    for n in range(claims // 8):
        trial.queue.push(Task.create(user_id="ann", tenant=urgent, priority=Priority.CRITICAL))
        for claim in (got := trial.claim(trial.chance.choice(trial.limits))):
            if claim.task.tenant != urgent:
                trial.finish([claim])
            else:
                trial.queue.finish(claim)
        assert got, n


@scene("a partition that was out of reach")
def away(trial: PartTrial) -> None:
    there = trial.tenants(0, 4, "away")
    tenants = [each for p in range(1, 4) for each in trial.tenants(p, 5, "busy")]
    before, during = trial.count(8000, 600), trial.count(4000, 1200)
    for tenant in (*there, *tenants):
        trial.queue.push_many(
            Task.create(user_id="ann", tenant=tenant) for _ in range((before + 4 * during) // 15)
        )
    trial.quit(100)
    for _ in trial.out_of_reach(0):
        trial.quit(before)
    for tenant in (*there, *tenants):
        trial.arrive(tenant, "ann", during)
    trial.take(during)


@scene("long tasks in one partition, cost by time")
def by_time(trial: PartTrial) -> None:
    trial.queue.configure(cost="time")
    seconds = trial.count(2000, 200)
    takes = dict.fromkeys(trial.tenants(0, 2, "long"), 8.0)
    takes |= {each: 1.0 for p in (1, 2) for each in trial.tenants(p, 3, "short")}
    for tenant in takes:
        trial.push(tenant, "ann", 4 * seconds)
    trial.run_workers(seconds, lambda claim: takes.get(claim.task.tenant or "", 1.0), by="time")


# --- playing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartOutcome:
    """Jain index and worst share of tenants; what attackers got for what others got."""

    jain: float
    share: float
    ratios: tuple[float, ...]

    def missed(self, least_share: float = LEAST_SHARE) -> list[str]:
        """The goals that were missed; `least_share`: of the worst tenant."""
        goals = {
            f"Jain index of tenants {self.jain:.4f}": self.jain >= LEAST_JAIN,
            f"worst share {self.share:.3f}": self.share >= least_share,
        }
        for ratio in self.ratios:
            goals[f"got {ratio:.3f} of what others got"] = ratio <= 2 - least_share
        return [goal for goal, is_reached in goals.items() if not is_reached]


def play(
    name: str,
    url: str,
    partitions: int,
    size: float = 1.0,
    clients: int = CLIENTS,
    limits: Sequence[int] = LIMITS,
) -> PartOutcome:
    """Play a scene on an empty server, and return its outcome."""
    trial = PartTrial(url, size, partitions, clients, limits)
    with ExitStack() as stack:
        for queue in trial.queues:
            stack.enter_context(queue)
        SCENES[name](trial)
    found = trial.outcome()
    return PartOutcome(found.tenants, found.share, tuple(trial.ratios))


def run(bench: Bench) -> None:
    for name in SCENES:
        for partitions in PARTITIONS:
            bench.empty()
            start = time.perf_counter()
            found = play(name, bench.server.url, partitions, bench.scale)
            bench.add(
                f"{name}, {partitions}",
                f"Jain {found.jain:.4f}",
                f"≥ {LEAST_JAIN}",
                not found.missed(),
                f"worst share {found.share:.3f} ≥ {LEAST_SHARE}"
                + "".join(f"; got {ratio:.3f} of others" for ratio in found.ratios)
                + f"; {time.perf_counter() - start:.0f} s",
            )
    bench.empty()
