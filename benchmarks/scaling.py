"""Costs that must not grow: an idle tick with more schedules, a claim with more users."""

import statistics
import time
from collections.abc import Callable

from benchmarks.common import Bench
from benchmarks.queue_speed import PAYLOAD, tasks
from fairqueue import Task, TaskQueue, TaskScheduler

FAR_AWAY = "0 0 1 1 *"
ADDED_AT_ONCE = 10_000


def interleaved(actions: dict[str, Callable[[], object]], times: int) -> dict[str, float]:
    """Return the median time of each action, taken in turns, so that all see the same load."""
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(times):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def idle_ticks(bench: Bench) -> None:
    """Measure idle ticks of queues of different sizes on one server."""
    bench.empty()
    sizes = [1000, bench.count(100_000), bench.count(1_000_000)]
    aims = [None, 1.2, 1.5]
    actions: dict[str, Callable[[], object]] = {}
    for size in sizes:
        queue = TaskQueue.from_url(bench.server.url, name=f"stored-{size}", timeout=30.0)
        scheduler = TaskScheduler(queue)
        for start in range(0, size, ADDED_AT_ONCE):
            scheduler.add_schedules(
                {"cron_expr": FAR_AWAY, "user_id": f"user-{i % 10_000}", "payload": PAYLOAD}
                for i in range(start, min(size, start + ADDED_AT_ONCE))
            )
        scheduler.tick()
        actions[f"{size:,}"] = scheduler.tick
    actions["ping"] = bench.client.ping
    seconds = interleaved(actions, 500)
    base = seconds[f"{sizes[0]:,}"]
    for size, aim in zip(sizes, aims, strict=True):
        value = seconds[f"{size:,}"]
        bench.add(
            f"idle tick, {size:,} schedules stored",
            f"{value / base:.2f} x",
            f"≤ {aim} x" if aim else "the measure",
            value / base <= aim if aim else None,
            f"{value * 1e6:.0f} µs, {value / seconds['ping']:.1f} pings",
        )


def claims(bench: Bench) -> None:
    """Measure claims of ten tasks, from queues with different other users."""
    bench.empty()
    count = bench.count(10_000)

    def queue(name: str) -> TaskQueue:
        return TaskQueue.from_url(bench.server.url, name=name, timeout=30.0)

    few, many, capped = queue("few"), queue("many"), queue("capped")
    few.push_many(tasks(count, users=10))
    many.push_many(tasks(count, users=count))
    for i in range(count):
        capped.set_user(f"capped-{i}", max_running=1)
    capped.push_many(
        Task.create(user_id=f"capped-{i % count}", payload=PAYLOAD) for i in range(2 * count)
    )
    held = 0
    while got := capped.claim("holder", limit=1000, lease=3600):
        held += len(got)
    assert held == count, (held, count)
    capped.push_many(tasks(count, users=10))
    actions: dict[str, Callable[[], object]] = {
        name: lambda queue=queue: queue.claim("bench", limit=10)  # type: ignore[misc]
        for name, queue in (("few", few), ("many", many), ("capped", capped))
    }
    seconds = interleaved(actions, min(500, count // 20))
    bench.add("claim of 10, ten users waiting", "1.00 x", "the measure", None, _us(seconds["few"]))
    for name, text in (
        ("many", f"claim of 10, {count:,} users waiting"),
        ("capped", f"claim of 10, {count:,} users capped"),
    ):
        ratio = seconds[name] / seconds["few"]
        bench.add(text, f"{ratio:.2f} x", "≤ 1.5 x", ratio <= 1.5, _us(seconds[name]))


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


def memory(bench: Bench) -> None:
    count = bench.count(100_000)
    payload = {"note": "x" * 86}  # 100 bytes as JSON
    for name, fill in (("queued task", _fill_tasks), ("stored schedule", _fill_schedules)):
        queue = bench.fresh_queue()
        queue.check()
        before = int(bench.client.info("memory")["used_memory"])
        fill(queue, count, payload)
        each = (int(bench.client.info("memory")["used_memory"]) - before) / count
        bench.add(f"memory of the server per {name}", f"{each:.0f} bytes", "≤ 1024", each <= 1024)


def _fill_tasks(queue: TaskQueue, count: int, payload: dict[str, str]) -> None:
    queue.push_many(
        Task.create(user_id=f"user-{i % 1000}", payload=payload, name="reports.build")
        for i in range(count)
    )


def _fill_schedules(queue: TaskQueue, count: int, payload: dict[str, str]) -> None:
    scheduler = TaskScheduler(queue)
    for start in range(0, count, ADDED_AT_ONCE):
        scheduler.add_schedules(
            {
                "cron_expr": "0 9 * * 1-5",
                "timezone": "Europe/London",
                "user_id": f"user-{i % 1000}",
                "name": "reports.build",
                "payload": payload,
            }
            for i in range(start, min(count, start + ADDED_AT_ONCE))
        )


def run(bench: Bench) -> None:
    memory(bench)
    claims(bench)
    idle_ticks(bench)
