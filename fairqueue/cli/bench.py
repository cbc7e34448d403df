"""`fairqueue bench`: measure the speed of a queue on this Redis, from this machine."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click
from prometheus_client import CollectorRegistry

from fairqueue.cli.listing import show
from fairqueue.cli.output import note
from fairqueue.cli.session import Command, Session, prints_data
from fairqueue.inspection.documents import document
from fairqueue.models import Task, new_id
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler

USERS = 20
BATCH = 50
MOST = 100_000

COLUMNS = {
    "WHAT": lambda figure: figure.what,
    "COUNT": lambda figure: figure.count,
    "PER SECOND": lambda figure: f"{figure.per_second:,.0f}",
    "OF A PING": lambda figure: f"{figure.of_a_ping:.2f}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A measurement. of_a_ping: how often it was done in the time of one round trip."""

    what: str
    count: int
    per_second: float
    of_a_ping: float


@click.command(cls=Command)
@click.option("--tasks", type=click.IntRange(10, MOST), default=2000, show_default=True)
@prints_data
def bench(session: Session, tasks: int) -> None:
    """Measure the speed of this Redis. Uses a queue of its own, which is deleted afterwards."""
    session.queue = f"bench-{new_id()[:12]}"
    with session.open() as queue:
        note(f"using queue {queue.name!r}, which is deleted afterwards")
        try:
            figures = list(_measure(queue, tasks))
        finally:
            queue.destroy()
    show(session, "figures", iter(figures), COLUMNS, to_document=document)


def _measure(queue: TaskQueue, count: int) -> Iterator[Figure]:
    single = max(1, count // 10)
    ping = _seconds(lambda: [queue.link.ask(("PING",)) for _ in range(single)]) / single

    def figure(what: str, number: int, act: Callable[[], object]) -> Figure:
        seconds = _seconds(act)
        speed = number / seconds
        return Figure(what=what, count=number, per_second=speed, of_a_ping=speed * ping)

    yield Figure(what="ping", count=single, per_second=1 / ping, of_a_ping=1.0)
    yield figure("push, one by one", single, lambda: _push_each(queue, single))
    yield figure("push_many", count, lambda: queue.push_many(_tasks(count)))
    yield figure(f"claim and finish by {BATCH}", single + count, lambda: _drain(queue))
    scheduler = TaskScheduler(queue, registry=CollectorRegistry())
    specs = [{"cron_expr": "0 9 * * *", "user_id": f"user-{n % USERS}"} for n in range(count)]
    yield figure("add_schedules", count, lambda: scheduler.add_schedules(specs))


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return max(time.perf_counter() - started, 1e-9)


def _tasks(count: int) -> Iterator[Task]:
    for number in range(count):
        yield Task.create(user_id=f"user-{number % USERS}", payload={"number": number})


def _push_each(queue: TaskQueue, count: int) -> None:
    for task in _tasks(count):
        queue.push(task)


def _drain(queue: TaskQueue) -> None:
    while claims := queue.claim("bench", limit=BATCH):
        queue.finish_many((claim, None) for claim in claims)
