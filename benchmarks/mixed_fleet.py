"""The cost of idle workers of other names while tasks of one name are pushed."""

import statistics
import threading
import time
from collections.abc import Callable

from benchmarks.common import Bench
from fairqueue import Task, TaskQueue, Worker

USERS, TASKS_EACH = 300, 100  # of the name whose only worker is busy
IDLE_WORKERS = 4
PUSHES_PER_S = 50
SECONDS = 10.0
FOR_IDLE = 20  # tasks for one of the idle workers, behind all others


def run(bench: Bench) -> None:
    """Start one busy worker, and idle workers for other names."""
    with bench.fresh_queue() as queue:
        users = bench.count(USERS)
        queue.push_many(
            Task.create(user_id=f"user-{n}", name="reports")
            for n in range(users)
            for _ in range(TASKS_EACH)
        )
        release, begun = threading.Event(), _Begun()
        workers = [_worker(queue, "reports", lambda _: release.wait(120))]
        workers += [_worker(queue, f"other-{n}", begun.note) for n in range(IDLE_WORKERS)]
        for worker in workers:
            worker.start()
        time.sleep(4)  # until all workers know each other and have tried to claim
        try:
            _push(bench, queue, users)
            _begin(bench, queue, begun)
        finally:
            release.set()
            for worker in workers:
                worker.stop(5)


class _Begun:
    """Return when tasks began, by number."""

    def __init__(self) -> None:
        self.moments: dict[object, float] = {}

    def note(self, payload: dict[str, object]) -> None:
        self.moments[payload["n"]] = time.perf_counter()


def _worker(queue: TaskQueue, name: str, handler: Callable[[dict[str, object]], object]) -> Worker:
    worker = Worker(queue, concurrency=1)
    worker.register(name, handler)
    return worker


def _push(bench: Bench, queue: TaskQueue, users: int) -> None:
    """Push at a steady rate, for the name whose worker is busy."""
    cpu, start, taken = bench.server_cpu(), time.perf_counter(), []
    planned = int(PUSHES_PER_S * SECONDS)
    for n in range(planned):
        time.sleep(max(0.0, start + n / PUSHES_PER_S - time.perf_counter()))
        if time.perf_counter() - start > SECONDS:
            break
        before = time.perf_counter()
        queue.push(Task.create(user_id=f"user-{n % users}", name="reports"))
        taken.append(time.perf_counter() - before)
    seconds = time.perf_counter() - start
    used = (bench.server_cpu() - cpu) / seconds
    bench.add(
        f"{IDLE_WORKERS} idle workers of other names, server CPU",
        f"{100 * used:.1f} %",
        "≤ 10 %",
        used <= 0.1,
        f"{len(taken) / seconds:.0f} of {PUSHES_PER_S} pushes a second, "
        f"median {1000 * statistics.median(taken):.1f} ms",
    )


def _begin(bench: Bench, queue: TaskQueue, begun: _Begun) -> None:
    """Push tasks for an idle worker, one after the other."""
    waits = []
    for n in range(FOR_IDLE):
        pushed = time.perf_counter()
        task = Task.create(user_id=f"late-{n}", name="other-1", payload={"n": n})
        queue.push(task)
        while n not in begun.moments and time.perf_counter() < pushed + 30:
            time.sleep(0.001)
        waits.append(begun.moments.get(n, pushed + 30) - pushed)
    bench.add(
        "a task for one of them begins after",
        f"{1000 * statistics.median(waits):.1f} ms",
        note=f"at most {1000 * max(waits):.1f} ms",
    )
