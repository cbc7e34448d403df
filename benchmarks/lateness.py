"""How late schedules fire: 500 schedules at distinct times over 20 seconds, in a running thread."""

import select
import time

from benchmarks.common import Bench, seconds_of
from fairqueue import TaskScheduler
from fairqueue.clock import from_ms

FAR_AWAY = "0 0 1 1 *"


def bare_timers(count: int = 250) -> list[float]:
    """Measure how late this machine wakes a process that only sleeps."""
    late = []
    for _ in range(count):
        moment = time.monotonic() + 0.02
        select.select([], [], [], 0.02)
        late.append(time.monotonic() - moment)
    return late


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def nearly_all(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def run(bench: Bench) -> None:
    queue = bench.fresh_queue()
    scheduler = TaskScheduler(queue)
    count, seconds = 500, max(2.0, 20.0 * bench.scale)
    ids = scheduler.add_schedules({"cron_expr": FAR_AWAY, "user_id": "u"} for _ in range(count))
    timers = bare_timers()
    start_ms = int(time.time() * 1000) + 3000
    for i, schedule_id in enumerate(ids):
        moment = from_ms(start_ms + round(i * seconds * 1000 / count))
        scheduler.update_schedule(schedule_id, next_run=moment)
    round_trip = seconds_of(bench.client.ping, 1000)
    scheduler.start()
    late: list[float] = []
    deadline = time.monotonic() + seconds + 30
    while len(late) < count and time.monotonic() < deadline:
        for claim in queue.claim("bench", limit=100, wait=1.0):
            info = queue.get(claim.task.task_id)
            assert info is not None
            assert claim.task.scheduled_for is not None
            late.append((info.pushed_at - claim.task.scheduled_for).total_seconds())
    scheduler.stop()
    assert len(late) == count, f"{len(late)} of {count} fired"
    timers += bare_timers()
    p50, p99, timer = middle(late), nearly_all(late), nearly_all(timers)
    aim = 10 * round_trip + timer + 0.001
    bench.add(
        "lateness of 500 fires, p99",
        f"{p99 * 1000:.1f} ms",
        f"< {aim * 1000:.1f} ms",
        p99 < aim,
        f"p50 {p50 * 1000:.1f} ms; round trip {round_trip * 1000:.2f} ms, bare timer p50 "
        f"{middle(timers) * 1000:.2f} ms, p99 {timer * 1000:.1f} ms, clock 1 ms",
    )
