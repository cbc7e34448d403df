"""Workers: tasks from end to end with history, the cost of an idle worker, and heartbeats."""

import resource
import threading
import time

from benchmarks.common import Bench
from benchmarks.queue_speed import tasks
from fairqueue import TaskQueue, Worker

IDLE_S = 20.0
LEASE_S = 3.0
HELD = 100


def noop(payload: dict[str, object]) -> None:
    """Do nothing."""


class Runs:
    """A queue full of tasks, and workers for it."""

    queue: TaskQueue
    count: int

    def __init__(self, bench: Bench, processes: int | None) -> None:
        self._bench = bench
        self._processes = processes

    def filled(self) -> None:
        self.queue = self._bench.fresh_queue()
        self.queue.configure(keep_finished=1000)
        self.count = len(self.queue.push_many(tasks(self._bench.count(10_000))))

    def run_all(self) -> int:
        worker = Worker(self.queue, concurrency=8, processes=self._processes)
        worker.task("default")(noop)
        worker.start()
        # A cheap request, so that the worker is measured.
        stats = ("HGET", self.queue.keys["stats"], "finished")
        while int(self.queue.link.ask(stats)[0] or 0) < self.count:
            time.sleep(0.01)
        worker.stop()
        return self.count


def run(bench: Bench) -> None:
    one = Runs(bench, None)
    bench.ratio("worker, no-op tasks, one process", "B", 0.1, one.run_all, prepare=one.filled)
    four = Runs(bench, 4)
    bench.ratio("worker, four processes", "B", 0.0, four.run_all, prepare=four.filled, repeats=3)
    idle(bench)
    held_leases(bench)


def _calls(bench: Bench) -> int:
    """Return how many commands clients have sent to the server, without those of scripts."""
    rows = bench.client.info("commandstats")
    sent = ("cmdstat_evalsha", "cmdstat_blpop", "cmdstat_fcall", "cmdstat_eval")
    return sum(rows[name]["calls"] for name in sent if name in rows)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def idle(bench: Bench) -> None:
    """Measure a worker without tasks."""
    with bench.fresh_queue() as queue:
        worker = Worker(queue, concurrency=8)
        worker.task("default")(noop)
        worker.start()
        time.sleep(1)
        calls, cpu = _calls(bench), _cpu()
        time.sleep(IDLE_S)
        calls, cpu = _calls(bench) - calls, _cpu() - cpu
        worker.stop()
    bench.add(
        "idle worker, per minute",
        f"{cpu * 60_000 / IDLE_S:.0f} ms CPU",
        note=f"{calls * 60 / IDLE_S:.0f} commands",
    )


def held_leases(bench: Bench) -> None:
    """Measure a worker that holds many long tasks."""
    with bench.fresh_queue() as queue:
        queue.push_many(tasks(HELD))
        go_on, begun = threading.Event(), threading.Semaphore(0)
        worker = Worker(queue, concurrency=HELD, lease=LEASE_S)

        @worker.task("default")
        def wait(payload: dict[str, object]) -> None:
            begun.release()
            go_on.wait()

        worker.start()
        for _ in range(HELD):
            begun.acquire()
        calls = _calls(bench)
        time.sleep(4 * LEASE_S)
        calls = _calls(bench) - calls
        go_on.set()
        worker.stop()
    name = f"commands a lease, {HELD} long tasks held"
    bench.add(name, f"{calls / 4:.1f}", "≤ 5", calls / 4 <= 5)
