"""Add schedules and fire them."""

from datetime import UTC, datetime

from benchmarks.common import Bench
from fairqueue import TaskScheduler
from fairqueue.clock import ManualClock
from fairqueue.recurrence.kinds import _next_ms

PAYLOAD = {"report": 7, "note": "x" * 80}
ZONES = [
    "UTC",
    "Europe/London",
    "Europe/Berlin",
    "Europe/Athens",
    "America/New_York",
    "America/Chicago",
    "America/Denver",
    "America/Los_Angeles",
    "America/Sao_Paulo",
    "Asia/Kolkata",
    "Asia/Tokyo",
    "Asia/Shanghai",
    "Asia/Dubai",
    "Asia/Kathmandu",
    "Australia/Sydney",
    "Australia/Lord_Howe",
    "Pacific/Auckland",
    "Africa/Nairobi",
    "Africa/Casablanca",
    "America/St_Johns",
]
DUE = datetime(2026, 11, 17, 12, 30, tzinfo=UTC)


def specs(count: int, users: int = 100) -> list[dict[str, object]]:
    crons = due_expressions(200)
    return [
        {
            "cron_expr": crons[i % len(crons)],
            "user_id": f"user-{i % users}",
            "timezone": ZONES[(i // len(crons)) % len(ZONES)],
            "payload": PAYLOAD,
            "name": "reports.build",
        }
        for i in range(count)
    ]


def due_expressions(count: int) -> list[str]:
    """Yield different expressions that all fire at every quarter of an hour, in any time zone."""
    found: dict[str, None] = {}
    extra = 0
    while len(found) < count:
        minutes = sorted({0, 15, 30, 45, extra % 60, (extra * 7 + extra // 60) % 60})
        hours = ("*", "0-23", "*/1")[extra % 3]
        days = ("*", "0-6", "*/1")[extra // 60 % 3]
        found[f"{','.join(map(str, minutes))} {hours} * * {days}"] = None
        extra += 1
    return list(found)


def run(bench: Bench) -> None:
    count = bench.count(10_000)
    clock = ManualClock(DUE.timestamp() - 60)
    state: dict[str, TaskScheduler] = {}

    def fresh() -> None:
        clock.set(DUE.timestamp() - 60)
        queue = bench.fresh_queue()
        queue.link.clock = clock
        state["scheduler"] = TaskScheduler(queue)

    def add_one_by_one() -> int:
        for spec in specs(2000):
            state["scheduler"].add_schedule(**spec)  # type: ignore[arg-type]
        return 2000

    def add_many() -> int:
        batch = specs(count)
        for i in range(0, count, 5000):
            state["scheduler"].add_schedules(batch[i : i + 5000])
        return count

    def filled() -> None:
        fresh()
        add_many()
        state["scheduler"].tick()
        _next_ms.cache_clear()  # each round computes its next fire times again
        clock.set(DUE.timestamp())

    def fire() -> int:
        fired = state["scheduler"].tick().fired
        assert fired == count, (fired, count)
        return fired

    bench.ratio("add_schedule, one at a time", "S", 0.4, add_one_by_one, prepare=fresh)
    bench.ratio("add_schedules in thousands", "B", 0.2, add_many, prepare=fresh)
    bench.ratio(f"fire {count:,} due at the same time", "B", 0.2, fire, prepare=filled)
