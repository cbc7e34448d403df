"""Compare the server's processor time per task with that of another checkout.

    python -m benchmarks.versions /path/to/other [--rounds 7]

Each round measures both versions, in turns, on fresh servers. The result is the median of the
ratios of the rounds: above 1, this version costs more. The queue has no tenants, pools, keys or
unique tasks: this shows what those cost a queue that does not use them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USERS = 100
BATCH = 50


def measure(count: int) -> dict[str, float]:
    """Measure the `fairqueue` that this process imports: µs of the server for each item."""
    import redis
    from prometheus_client import CollectorRegistry

    from fairqueue import Task, TaskQueue, TaskScheduler
    from fairqueue.clock import ManualClock
    from fairqueue.runtime.embedded import EmbeddedServer

    found: dict[str, float] = {}
    with EmbeddedServer.start() as server, redis.Redis.from_url(server.url) as client:

        def cpu() -> float:
            info = client.info("cpu")
            names = ("used_cpu_user_main_thread", "used_cpu_sys_main_thread")
            return sum(float(info[name]) for name in names)

        def timed(name: str, items: int, action: Callable[[], object]) -> None:
            before = cpu()
            action()
            found[name] = (cpu() - before) / items * 1e6

        clock = ManualClock()
        queue = TaskQueue.from_url(server.url, clock=clock, timeout=30.0)
        queue.configure(keep_finished=1000)
        numbers = range(11 * count)
        made = [Task.create(user_id=f"user-{i % USERS}", payload={"n": i}) for i in numbers]
        singles, bulk = made[:count], made[count:]

        def one_by_one() -> None:
            for _ in range(count):
                (claim,) = queue.claim("w")
                queue.finish(claim)

        def in_batches() -> None:
            while claims := queue.claim("w", limit=BATCH):
                queue.finish_many((claim, None) for claim in claims)

        def push_all() -> None:
            for task in singles:
                queue.push(task)

        timed("push, one at a time", count, push_all)
        timed("claim and finish, one at a time", count, one_by_one)
        timed("push, in bulk", 10 * count, lambda: queue.push_many(bulk))
        timed("claim and finish, in batches of 50", 10 * count, in_batches)
        scheduler = TaskScheduler(queue, registry=CollectorRegistry())
        scheduler.add_schedules(
            [{"cron_expr": "* * * * *", "user_id": f"user-{i % USERS}"} for i in range(5 * count)]
        )
        scheduler.tick()
        clock.advance(60)
        timed("fire", 5 * count, scheduler.tick)
        assert queue.size() == 5 * count
    return found


def run_in(checkout: Path, count: int) -> dict[str, float]:
    """Measure the version in a checkout, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, str(Path(__file__)), "--measure", str(count)]
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment, cwd=checkout
    ).stdout
    measured: dict[str, float] = json.loads(output)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("other", nargs="?", type=Path, help="root of the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=1000, help="items of the smallest kind")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    if options.other is None:
        parser.error("the root of the other checkout is missing")
    ours: list[dict[str, float]] = []
    others: list[dict[str, float]] = []
    for number in range(options.rounds):
        order = [(ROOT, ours), (options.other.resolve(), others)]
        for checkout, results in order if number % 2 else reversed(order):
            results.append(run_in(checkout, options.count))
    for name in ours[0]:
        ratio = statistics.median(a[name] / b[name] for a, b in zip(ours, others, strict=True))
        here, there = (statistics.median(each[name] for each in r) for r in (ours, others))
        print(f"{name:<36} {ratio:5.3f} x   {here:6.1f} µs, the other {there:6.1f} µs")


if __name__ == "__main__":
    main()
