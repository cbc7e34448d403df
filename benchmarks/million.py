"""A million schedules of ten thousand users on one server: add, fire, list, restart."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from benchmarks.common import Bench, seconds_of
from benchmarks.scaling import interleaved
from fairqueue import TaskQueue, TaskScheduler
from fairqueue.clock import ManualClock

NOW = datetime(2026, 11, 17, 12, 0, tzinfo=UTC).timestamp()
FAR_AWAY = "0 0 1 1 *"
SOON = "30 12 17 11 *"
USERS = 10_000
ADDED_AT_ONCE = 10_000
PAYLOAD = {"report": 7, "note": "x" * 80}


def specs(start: int, count: int, cron_expr: str = FAR_AWAY) -> list[dict[str, object]]:
    """Yield `count` schedules, user by user."""
    return [
        {
            "cron_expr": cron_expr,
            "user_id": f"user-{i % USERS}",
            "name": f"reports.{i % 1000:03d}",
            "payload": PAYLOAD,
        }
        for i in range(start, start + count)
    ]


def run(bench: Bench) -> None:
    count, due = bench.count(1_000_000), bench.count(10_000)
    clock = ManualClock(NOW)
    queue = bench.fresh_queue()
    queue.link.clock = clock
    scheduler = TaskScheduler(queue)
    before = int(bench.client.info("memory")["used_memory"])
    started = time.perf_counter()
    for start in range(0, count, ADDED_AT_ONCE):
        scheduler.add_schedules(specs(start, min(ADDED_AT_ONCE, count - start)))
    seconds = time.perf_counter() - started
    each = (int(bench.client.info("memory")["used_memory"]) - before) / count
    bench.add(
        f"{count:,} schedules added", f"{count / seconds:,.0f}/s", note=f"{each:.0f} bytes each"
    )
    add_more(bench, scheduler, count)
    look(bench, queue, scheduler)
    fire(bench, clock, scheduler, due)
    restart(bench, clock, queue)


def add_more(bench: Bench, scheduler: TaskScheduler, stored: int) -> None:
    """Add schedules to those that are stored."""

    def one_by_one() -> int:
        for spec in specs(0, 1000):
            scheduler.add_schedule(**spec)  # type: ignore[arg-type]
        return 1000

    def bulk() -> int:
        return len(scheduler.add_schedules(specs(0, ADDED_AT_ONCE)))

    bench.ratio(f"add_schedule, {stored:,} stored", "S", 0.4, one_by_one, repeats=3)
    bench.ratio(f"add_schedules, {stored:,} stored", "B", 0.2, bulk, repeats=3)


def look(bench: Bench, queue: TaskQueue, scheduler: TaskScheduler) -> None:
    """Measure pages of listings, in round trips."""
    actions: dict[str, Callable[[], object]] = {
        "a user's page of 100": lambda: scheduler.list_schedules(user_id="user-7"),
        "names with a prefix, 20": lambda: scheduler.list_schedules(
            name_prefix="reports.00", limit=20
        ),
    }
    seconds = interleaved({**actions, "ping": bench.client.ping}, 50)
    for name in actions:
        bench.add(
            name, f"{seconds[name] * 1e3:.1f} ms", note=_pings(seconds[name], seconds["ping"])
        )


def fire(bench: Bench, clock: ManualClock, scheduler: TaskScheduler, due: int) -> None:
    """Fire some of them in the same second, and measure the next tick."""
    scheduler.add_schedules(specs(0, due, SOON))
    scheduler.tick()
    idle = seconds_of(scheduler.tick, 50)
    clock.set(NOW + 1800)
    unit = bench.unit_b()
    started = time.perf_counter()
    fired = scheduler.tick().fired
    rate = fired / (time.perf_counter() - started)
    assert fired == due, (fired, due)
    bench.add(f"fire {due:,} of them", f"{rate / unit:.2f} B", "≥ 0.2 B", rate / unit >= 0.2)
    after = seconds_of(scheduler.tick, 50)
    bench.add("the tick after that", f"{after / idle:.2f} x idle")


def restart(bench: Bench, clock: ManualClock, queue: TaskQueue) -> None:
    """Measure how long a new leader takes until its first fire, in idle ticks."""
    idle_scheduler = TaskScheduler(queue)
    queue.link.ask(("DEL", queue.keys["leader"]))
    idle_scheduler.add_schedules(specs(0, 1, "31 12 17 11 *"))
    clock.set(NOW + 1860)
    started = time.perf_counter()
    fresh = TaskScheduler(queue)
    fired = fresh.tick().fired
    seconds = time.perf_counter() - started
    assert fired == 1, fired
    idle = seconds_of(fresh.tick, 50)
    bench.add("restart until the first fire", f"{seconds / idle:.1f} idle ticks", note=_ms(seconds))


def _pings(seconds: float, ping: float) -> str:
    return f"{seconds / ping:.0f} pings"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
