"""Shared parts of the benchmarks: a server, the two units, and a table of results."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import redis

from fairqueue import TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer

VALUE = b"x" * 100


@dataclass
class Line:
    """One result and its target."""

    name: str
    figure: str
    aim: str = ""
    ok: bool | None = None
    note: str = ""


class CpuMeter:
    """The processor time of the server's main thread for each item of some kinds of work.

    Measure the kinds in turns, so that all see the same load of the machine.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._costs: defaultdict[str, list[float]] = defaultdict(list)

    def _cpu(self) -> float:
        info = self._client.info("cpu")
        names = ("used_cpu_user_main_thread", "used_cpu_sys_main_thread")
        return sum(float(info[name]) for name in names)

    @contextmanager
    def measure(self, kind: str, items: int) -> Iterator[None]:
        """Measure one round of a kind."""
        before = self._cpu()
        yield
        self._costs[kind].append((self._cpu() - before) / items * 1e6)

    def cost(self, kind: str) -> float:
        """Return the median cost of an item, in µs."""
        return statistics.median(self._costs[kind])

    def ratio(self, kind: str, base: str) -> float:
        """Return the median of the ratios of all rounds."""
        pairs = zip(self._costs[kind], self._costs[base], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


@dataclass
class Bench:
    """A server, its units, and the results so far."""

    server: EmbeddedServer
    client: redis.Redis
    scale: float = 1.0
    lines: list[Line] = field(default_factory=list)
    singles: list[float] = field(default_factory=list)
    bulks: list[float] = field(default_factory=list)

    def fresh_queue(self) -> TaskQueue:
        """Return an empty queue on an empty server."""
        self.empty()
        return TaskQueue.from_url(self.server.url, timeout=30.0)

    def empty(self) -> None:
        """Delete everything synchronously: Valkey would free the memory in the background."""
        self.client.execute_command("FLUSHALL", "SYNC")

    def unit_s(self) -> float:
        """Measure S: single SETs per second."""
        count = 2000
        start = time.perf_counter()
        for i in range(count):
            self.client.set(f"unit:{i}", VALUE)
        rate = count / (time.perf_counter() - start)
        self.singles.append(rate)
        return rate

    def unit_b(self) -> float:
        """Measure B: SETs per second in pipelines of 1,000."""
        start = time.perf_counter()
        for _ in range(10):
            pipeline = self.client.pipeline(transaction=False)
            for i in range(1000):
                pipeline.set(f"unit:{i}", VALUE)
            pipeline.execute()
        rate = 10_000 / (time.perf_counter() - start)
        self.bulks.append(rate)
        return rate

    def server_cpu(self) -> float:
        """Return the processor time of the server, in seconds."""
        info = self.client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def ratio(
        self,
        name: str,
        unit: str,
        aim: float,
        action: Callable[[], int],
        *,
        repeats: int = 5,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        """Time an action, which returns how many things it did, relative to a unit.

        The unit is measured before and after each repetition, so that both see the same load of the
        machine. The result is the median of the ratios.
        """
        ratios, rates, cpus = [], [], []
        measure = self.unit_s if unit == "S" else self.unit_b
        for _ in range(repeats):
            prepare()
            before = measure()
            cpu = self.server_cpu()
            start = time.perf_counter()
            done = action()
            seconds = time.perf_counter() - start
            cpus.append((self.server_cpu() - cpu) / done)
            after = measure()
            rates.append(done / seconds)
            ratios.append(done / seconds / ((before + after) / 2))
        value = statistics.median(ratios)
        self.add(
            name,
            f"{value:.2f} {unit}",
            f"≥ {aim} {unit}",
            value >= aim,
            f"{statistics.median(rates):,.0f}/s, server CPU {statistics.median(cpus) * 1e6:.1f} µs",
        )

    def add(
        self, name: str, figure: str, aim: str = "", ok: bool | None = None, note: str = ""
    ) -> None:
        """Store and print a result."""
        line = Line(name, figure, aim, ok, note)
        self.lines.append(line)
        print(format_line(line), flush=True)

    def compare(
        self, name: str, meter: CpuMeter, kind: str, base: str, most: float | None = None
    ) -> None:
        """Store and print how many times as much a kind of work costs the server as another."""
        value = meter.ratio(kind, base)
        self.add(
            name,
            f"{value:.2f} x",
            f"≤ {most} x" if most else "",
            value <= most if most else None,
            f"server CPU {meter.cost(kind):.1f} µs, {base} {meter.cost(base):.1f} µs",
        )

    def count(self, full: int) -> int:
        """Return a size, reduced for a quick run."""
        return max(100, int(full * self.scale))


def format_line(line: Line) -> str:
    verdict = {True: "ok", False: "MISSED", None: ""}[line.ok]
    return f"{line.name:<46} {line.figure:>16}  {line.aim:<14} {verdict:<7} {line.note}"


@contextmanager
def bench(scale: float) -> Iterator[Bench]:
    """Start a server without persistence, on a unix socket."""
    with EmbeddedServer.start() as server:
        client = redis.Redis.from_url(server.url, socket_timeout=60.0)
        yield Bench(server, client, scale)
        client.close()


def seconds_of(action: Callable[[], object], times: int) -> float:
    """Return the median time of an action, in seconds."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
