"""How far quotes are from the truth, on a steady and on a bursty load.

Workers are simulated: time is passed in, and chance has a seed. Probes ask for a quote, push the
task that it was for, and see when it starts; some ask again while the task waits.
"""

import heapq
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from benchmarks.common import Bench
from fairqueue import Task, TaskQueue
from fairqueue.clock import ManualClock

WORKERS = 8
MEAN_S = 2.0  # of a task; they vary
TENANTS, USERS = 20, 5
PROBE_S = 7.0  # between two probes
ASKED_AGAIN_S = 15.0
BURST_S = 240.0  # between two bursts
SHORTEST_WAIT_S = 1.0  # of shorter waits, the relative error says nothing

Owner = tuple[str, str]  # tenant and user


@dataclass
class Asked:
    """A quote, and the truth as soon as it is known: seconds from the question."""

    at: float
    about: float | None
    earliest: float = 0.0
    latest: float = 0.0
    truth: float | None = None

    @property
    def error(self) -> float | None:
        """Relative error; None if it is not known or the wait was too short."""
        if self.about is None or self.truth is None or self.truth < SHORTEST_WAIT_S:
            return None
        return abs(self.about - self.truth) / self.truth


class SimulatedLoad:
    """A queue with workers that take simulated time, and what was asked about its tasks."""

    def __init__(self, url: str, seed: int) -> None:
        self.clock = ManualClock()
        self.queue = TaskQueue.from_url(url, clock=self.clock, timeout=30.0)
        self.chance = random.Random(seed)
        self.now = 0.0
        self.idle = WORKERS
        self.asked: list[Asked] = []
        self._of_task: dict[str, list[Asked]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, moment: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (moment, self._number, action))

    def every(self, moments: Iterator[float], action: Callable[[], None]) -> None:
        """Do something at each of some moments."""

        def step() -> None:
            action()
            if (following := next(moments, None)) is not None:
                self.at(following, step)

        self.at(next(moments), step)

    def owner(self) -> Owner:
        return f"t{self.chance.randrange(TENANTS)}", f"u{self.chance.randrange(USERS)}"

    def push(self, count: int, owner: Owner | None = None) -> None:
        owners = [owner or self.owner() for _ in range(count)]
        self.queue.push_many(Task.create(user_id=user, tenant=tenant) for tenant, user in owners)

    def probe(self) -> None:
        """Ask when a task would start, and push it."""
        tenant, user = self.owner()
        found = self.queue.quote(user, tenant=tenant)
        task_id = self.queue.push(Task.create(user_id=user, tenant=tenant))
        self._note(task_id, found.starts_about, found.earliest, found.latest)
        self.at(self.now + ASKED_AGAIN_S, lambda: self._ask_again(task_id))

    def _ask_again(self, task_id: str) -> None:
        if task_id in self._of_task:
            found = self.queue.explain(task_id)
            assert found is not None
            self._note(task_id, found.starts_about, found.starts_earliest, found.starts_latest)

    def _note(
        self,
        task_id: str,
        about: datetime | None,
        earliest: datetime | None,
        latest: datetime | None,
    ) -> None:
        began = self.clock.now_ms() / 1000

        def seconds(moment: datetime | None) -> float:
            return 0.0 if moment is None else moment.timestamp() - began

        times = (None if about is None else seconds(about), seconds(earliest), seconds(latest))
        asked = Asked(self.now, *times)
        self.asked.append(asked)
        self._of_task.setdefault(task_id, []).append(asked)

    def _start_tasks(self) -> None:
        while self.idle:
            claims = self.queue.claim("w", lease=86_400.0)
            if not claims:
                return
            (claim,) = claims
            self.idle -= 1
            for asked in self._of_task.pop(claim.task.task_id, ()):
                asked.truth = self.now - asked.at
            takes = MEAN_S * self.chance.gammavariate(2.0, 0.5)

            def end(claim: object = claim) -> None:
                self.queue.finish(claim)  # type: ignore[arg-type]
                self.idle += 1

            self.at(self.now + takes, end)

    def run(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds:
            moment, _, action = heapq.heappop(self._events)
            self.clock.advance(moment - self.now)
            self.now = moment
            action()
            self._start_tasks()


def _moments(chance: random.Random, start: float, mean: float) -> Iterator[float]:
    """Moments at random distances."""
    while True:
        start += chance.expovariate(1 / mean)
        yield start


def steady(simulation: SimulatedLoad) -> None:
    """As many tasks come as are served; some hundred always wait."""
    simulation.push(400)
    mean = MEAN_S / WORKERS
    simulation.every(_moments(simulation.chance, 0.0, mean), lambda: simulation.push(1))


def bursty(simulation: SimulatedLoad) -> None:
    """Half the workers are busy, until one tenant pushes some hundred tasks, again and again."""
    mean = 2 * MEAN_S / WORKERS
    simulation.every(_moments(simulation.chance, 0.0, mean), lambda: simulation.push(1))

    def burst() -> None:
        for _ in range(3):
            simulation.push(100, simulation.owner())

    simulation.every(_moments(simulation.chance, 30.0, BURST_S), burst)


def quotes_of(
    url: str, load: Callable[[SimulatedLoad], None], seconds: float, seed: int = 1
) -> list[Asked]:
    """Simulate a load on an empty server; return the quotes whose truth is known."""
    simulation = SimulatedLoad(url, seed)
    with simulation.queue:
        load(simulation)
        simulation.every(_moments(simulation.chance, 60.0, PROBE_S), simulation.probe)
        simulation.run(seconds)
    return [asked for asked in simulation.asked if asked.truth is not None]


def run(bench: Bench) -> None:
    for load in (steady, bursty):
        bench.empty()
        asked = quotes_of(bench.server.url, load, 3600 * bench.scale)
        errors = sorted(each.error for each in asked if each.error is not None)
        waits = [each.truth for each in asked if each.error is not None and each.truth is not None]
        inside = [
            each.earliest - 0.5 <= (each.truth or 0.0) <= each.latest + 0.5
            for each in asked
            if each.error is not None
        ]
        at_once = [each for each in asked if each.truth is not None and each.truth < 1.0]
        right = sum(each.about is not None and each.about < 2.0 for each in at_once)
        bench.add(
            f"error of a quote, {load.__name__} load, median",
            f"{100 * statistics.median(errors):.0f} %",
            note=f"p90 {100 * errors[int(0.9 * len(errors))]:.0f} %; in the range "
            f"{100 * statistics.mean(inside):.0f} %; {len(errors)} quotes, median wait "
            f"{statistics.median(waits):.0f} s; of {len(at_once)} tasks that started at once, "
            f"{right} were quoted so; {sum(each.about is None for each in asked)} of {len(asked)} "
            "without an estimate",
        )
