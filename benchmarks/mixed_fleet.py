"""Workers of different kinds: what idle ones cost, and whether they starve anybody.

Kinds of workers are told apart by the names of their handlers, and by pools.
"""

import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from benchmarks.common import Bench, CpuMeter
from fairqueue import Claim, Task, TaskQueue, Worker

USERS, TASKS_EACH = 300, 100  # of the name whose only worker is busy
IDLE_WORKERS = 4
PUSHES_PER_S = 50
SECONDS = 10.0
FOR_IDLE = 20  # tasks for one of the idle workers, behind all others
POOLS = 20  # each with one idle worker
ROUNDS = 15
PUSHED = 300  # in a round
GPU_SERVES = 120


def run(bench: Bench) -> None:
    by_names(bench)
    by_pools(bench)
    share_of_late_user(bench)


def by_names(bench: Bench) -> None:
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


# --- pools ----------------------------------------------------------------------------------------


def by_pools(bench: Bench) -> None:
    """Push tasks for one pool, with and without idle workers of other pools."""
    bench.empty()
    meter = CpuMeter(bench.client)
    with ExitStack() as stack:
        queues = {
            name: stack.enter_context(TaskQueue.from_url(bench.server.url, name=name, timeout=30.0))
            for name in ("alone", "fleet")
        }
        for queue in queues.values():
            # Some tasks always wait for the default pool, and both queues have had the other pools.
            queue.push_many(Task.create(user_id=f"user-{n}") for n in range(USERS))
            for n in range(POOLS):
                queue.push(Task.create(user_id="ann", pool=f"pool-{n}"))
                queue.finish(queue.claim("w", pools=[f"pool-{n}"])[0])
        for n in range(POOLS):
            worker = Worker(queues["fleet"], lambda _: None, concurrency=1, pools=[f"pool-{n}"])
            worker.start()
            stack.callback(worker.stop, 5)
        time.sleep(4)  # until all workers have tried to claim
        extra = 0
        for round_ in range(ROUNDS):
            for name, queue in queues.items():
                tasks = [Task.create(user_id=f"user-{n}") for n in range(PUSHED)]
                before = _scripts_run(bench)
                with meter.measure(name, PUSHED):
                    for task in tasks:
                        queue.push(task)
                if name == "fleet" and round_:
                    extra += _scripts_run(bench) - before - PUSHED
        bench.compare(
            f"push with {POOLS} idle workers of other pools", meter, "fleet", "alone", 1.05
        )
        calls = extra / (ROUNDS - 1) / PUSHED
        bench.add("scripts that they run for each push", f"{calls:.3f}", "≤ 0.05", calls <= 0.05)


def _scripts_run(bench: Bench) -> int:
    stats = bench.client.info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


def share_of_late_user(bench: Bench) -> None:
    """Ann's tasks wait for rare workers while others are served; then come Bob's."""
    shares = {kind: _bobs_share(bench, is_pool=kind == "pools") for kind in ("pools", "names")}
    got = shares["pools"]
    bench.add(
        f"of {GPU_SERVES} tasks of a rare pool, a late user gets",
        f"{got}",
        f"≥ {GPU_SERVES * 0.45:.0f}",
        got >= GPU_SERVES * 0.45,
        f"with names instead of pools: {shares['names']}",
    )


def _bobs_share(bench: Bench, *, is_pool: bool) -> int:
    def tasks(user: str, kind: str) -> list[Task]:
        pool, name = (kind, "task") if is_pool else ("default", kind)
        return [Task.create(user_id=user, pool=pool, name=name) for _ in range(2 * GPU_SERVES)]

    def claim(kind: str) -> Claim:
        taken = queue.claim("w", pools=[kind]) if is_pool else queue.claim("w", names=[kind])
        return taken[0]

    with bench.fresh_queue() as queue:
        queue.push_many(tasks("ann", "gpu"))
        for n in range(5):
            queue.push_many(tasks(f"user-{n}", "cpu"))
        for _ in range(5 * GPU_SERVES):
            queue.finish(claim("cpu"))
        queue.push_many(tasks("bob", "gpu"))
        got = 0
        for _ in range(GPU_SERVES):
            taken = claim("gpu")
            got += taken.task.user_id == "bob"
            queue.finish(taken)
        return got
