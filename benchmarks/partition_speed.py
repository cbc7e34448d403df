"""What partitions cost: processor time of the server and of its clients for each task.

All partitions are on one server, so that nothing but their number differs. Time is that of the
processor, in rounds that take turns: other load of the machine changes it least.
"""

import itertools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from benchmarks.common import Bench, CpuMeter
from fairqueue import Claim, Task, TaskQueue, Worker

PARTITIONS = (1, 4, 16, 64)
MOST_SERVER = 1.1  # times as much as without partitions, at 16
MOST_CLIENT = 1.2
AT = 16
ROUNDS = 7
BATCH = 50
TENANTS = 200
PAYLOAD = {"note": "x" * 86}


def _tasks(count: int) -> list[Task]:
    return [
        Task.create(user_id="ann", tenant=f"tenant-{n % TENANTS}", payload=PAYLOAD)
        for n in range(count)
    ]


def _push(queue: TaskQueue, tasks: list[Task]) -> None:
    for task in tasks:
        queue.push(task)


def _push_many(queue: TaskQueue, tasks: list[Task]) -> None:
    queue.push_many(tasks)


def _one_by_one(queue: TaskQueue, count: int) -> None:
    for _ in range(count):
        (claim,) = queue.claim("bench")
        queue.finish(claim)


def _batches(queue: TaskQueue, count: int) -> None:
    done: list[tuple[Claim, None]] = []
    left = count
    while left > 0 or done:
        _, claims, _ = queue.finish_and_claim(done, "bench", min(BATCH, left))
        done = [(claim, None) for claim in claims]
        left -= len(claims)


def _work(queue: TaskQueue, count: int) -> None:
    done, is_over = itertools.count(1), threading.Event()

    def noop(payload: dict[str, object]) -> None:
        if next(done) >= count:
            is_over.set()

    worker = Worker(queue, concurrency=8)
    worker.task("default")(noop)
    worker.start()
    is_over.wait(60.0)
    worker.stop()


class Meters:
    """The processor time of the server and of this process, by kind of work and partitions."""

    def __init__(self, bench: Bench) -> None:
        self.server = CpuMeter(bench.client)
        self.client: defaultdict[str, list[float]] = defaultdict(list)

    def measure(self, kind: str, count: int, action: Callable[[], object]) -> None:
        with self.server.measure(kind, count):
            before = time.process_time()
            action()
            self.client[kind].append((time.process_time() - before) / count * 1e6)


def run(bench: Bench) -> None:
    bench.empty()
    meters, count = Meters(bench), bench.count(4000)
    queues = {
        n: TaskQueue.from_url(bench.server.url, f"of-{n}", partitions=n, timeout=30.0)
        for n in PARTITIONS
    }
    for _ in range(ROUNDS):
        for n, queue in queues.items():
            _push_many(queue, _tasks(2 * TENANTS))  # so that all of them have a backlog
            tasks = _tasks(count // 4)
            meters.measure(f"push, {n}", len(tasks), partial(_push, queue, tasks))
            tasks = _tasks(2 * count)
            meters.measure(f"push_many, {n}", len(tasks), partial(_push_many, queue, tasks))
            some = count // 4
            meters.measure(f"claim and finish, {n}", some, partial(_one_by_one, queue, some))
            meters.measure(f"batches of {BATCH}, {n}", count, partial(_batches, queue, count))
            meters.measure(f"a worker, {n}", count, partial(_work, queue, count))
    for kind in ("push", "push_many", "claim and finish", f"batches of {BATCH}", "a worker"):
        for n in PARTITIONS[1:]:
            aim = MOST_SERVER if n == AT else None
            ours, base = f"{kind}, {n}", f"{kind}, 1"
            bench.compare(f"{kind}, {n} partitions", meters.server, ours, base, aim)
            ratio = statistics.median(
                here / there
                for here, there in zip(meters.client[ours], meters.client[base], strict=True)
            )
            bench.add(
                "  the same, its client",
                f"{ratio:.2f} x",
                f"≤ {MOST_CLIENT} x" if n == AT else "",
                ratio <= MOST_CLIENT if n == AT else None,
                f"client CPU {statistics.median(meters.client[ours]):.0f} µs, "
                f"without {statistics.median(meters.client[base]):.0f} µs",
            )
    for queue in queues.values():
        queue.close()
    bench.empty()
