"""The demo: a school platform in which one user floods the queue without delaying the others.

`register` gives a worker its handlers, `Load` pushes tasks, `Reader` reads the state of the queue,
and `frame`, `line` and `contrast` turn that into text.
"""

import os
import random
import re
import shutil
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TextIO

from fairqueue.demo.jobs import IMPORT, JOBS, TENANTS, Job
from fairqueue.demo.seeder import seed
from fairqueue.errors import plural
from fairqueue.inspection import Inspector
from fairqueue.models import QueueSnapshot, Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.stats.users import UserInfo
from fairqueue.worker.context import TaskContext
from fairqueue.worker.worker import Worker

NOISY = IMPORT.user(TENANTS)
# How many tasks the noisy user pushes at once, and how few are left when it does so again.
BACKLOG, LEAST_BACKLOG = 1500, 300
MOST_WAITING = 40  # tasks of another user, so that those of a limited user do not pile up
WORK_S = (0.1, 0.6)  # the least and the longest time of a task
TIMEOUT_S = 3.0
# How many of a thousand tasks always fail, hang, and fail at their first attempt.
ALWAYS_FAIL, HANG, FAIL_ONCE = 4, 2, 30
STEP_S = 1.0  # between two updates
WINDOW_MIN = 1  # minutes for which shares are computed
MOST_USERS = 100  # that are read; as many are shown as there are rows
LIMITED = ("paused", "capped", "rate limited")  # states of users held back by their own limits
NARROWEST = 60  # columns; lines are cut in a narrower terminal
MARK = "live-heartbeat"  # a schedule that only the queue of a demo has

# Tasks that users push per second, by the part of their name after the school.
RATES = {"office": 0.5, "bursar": 0.7, "admissions": 0.8, "transport": 0.4}
# More options of these tasks: those of a user with a low rate are soon of no use, and one every
# five seconds is enough of others.
FLOWS: dict[str, dict[str, Any]] = {
    "admissions": {"expires": 15.0},
    "transport": {"unique": "positions", "unique_for": 5.0},
}
# Schedules that fire during the demo: id, rule, job.
LIVE: tuple[tuple[str, dict[str, Any], Job], ...] = (
    (MARK, {"every": timedelta(seconds=5)}, JOBS[2]),
    ("live-mpesa", {"every": timedelta(seconds=12)}, JOBS[3]),
    ("live-reports", {"cron_expr": "*/20 * * * * *"}, JOBS[0]),
    ("live-alerts", {"cron_expr": "* * * * *"}, JOBS[6]),
)


# --- work -----------------------------------------------------------------------------------------


def fill(queue: TaskQueue) -> None:
    """Give the queue a history and live schedules; the queue of an earlier demo is emptied first.

    Raises ConfigurationError if the queue has other schedules or tasks.
    """
    scheduler = TaskScheduler(queue, "demo")
    seed(queue, force=scheduler.get_schedule(MARK) is not None)
    for schedule_id, rule, job in LIVE:
        fields = job.schedule(
            TENANTS,
            **rule,
            schedule_id=schedule_id,
            metadata={"description": f"{job.title}, while the demo runs"},
            retries=1,
            backoff=[2.0],
            timeout=TIMEOUT_S,
        )
        scheduler.add_schedule(**fields)


def register(worker: Worker) -> None:
    """Give a worker a handler for each job."""
    for job in (*JOBS, IMPORT):
        worker.register(job.name, handler_of(job), retries=2, backoff=[2.0, 5.0], timeout=TIMEOUT_S)


def fate_of(task_id: str) -> int:
    """Return a number from 0 to 999 that decides how a task ends, at each attempt the same."""
    return zlib.crc32(task_id.encode()) % 1000


def handler_of(job: Job) -> Callable[[dict[str, Any], TaskContext], dict[str, int]]:
    """Return a handler that takes a little time, logs, and fails now and then."""
    error = type(job.fault.type, (Exception,), {})

    def handle(payload: dict[str, Any], context: TaskContext) -> dict[str, int]:
        fate = fate_of(context.task_id)
        number = fate + 3
        for text in job.lines[:-1]:
            context.log(text.format(n=number))
        _take(random.uniform(*WORK_S))  # noqa: S311 - no secret
        if fate < ALWAYS_FAIL or (
            ALWAYS_FAIL + HANG <= fate < ALWAYS_FAIL + HANG + FAIL_ONCE and context.attempt == 1
        ):
            context.log("this does not look good", level="warning")
            raise error(job.fault.message)
        if fate < ALWAYS_FAIL + HANG:
            context.log("waiting for an answer", level="warning")
            _take(10 * TIMEOUT_S)
        context.log(job.lines[-1].format(n=number))
        return {job.result: number}

    return handle


def _take(seconds: float) -> None:
    """Sleep in short steps, so that a time-out can interrupt it."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))


class Load:
    """Pushes tasks: a few of most users, and many of one. Some expire before they can start."""

    def __init__(self, queue: TaskQueue, random_seed: int = 1) -> None:
        self._queue = queue
        self._chance = random.Random(random_seed)  # noqa: S311 - no secret
        self._jobs = {job.role: job for job in JOBS}

    def push(self) -> int:
        """Push the tasks of one step; return how many were stored."""
        tasks = [*self._flood(), *self._requests()]
        ids = self._queue.push_many(tasks)
        return sum(task.task_id == found for task, found in zip(tasks, ids, strict=True))

    def _flood(self) -> Iterator[Task]:
        tenant = IMPORT.tenant(TENANTS)
        if self._queue.size(NOISY, tenant=tenant) < LEAST_BACKLOG:
            for _ in range(BACKLOG):
                yield IMPORT.task(NOISY, tenant, priority=IMPORT.priority)

    def _requests(self) -> Iterator[Task]:
        for tenant in TENANTS:
            for role, per_second in RATES.items():
                user = f"{tenant}.{role}"
                wanted = self._chance.random() < per_second * STEP_S
                if wanted and self._queue.size(user, tenant=tenant) < MOST_WAITING:
                    job = self._jobs[role]
                    yield job.task(user, tenant, priority=job.priority, **FLOWS.get(role, {}))


# --- display --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoState:
    """Everything that is shown: the queue and its users."""

    seconds: float
    state: QueueSnapshot
    served: int  # since the start of the demo
    fired: int
    rate: float  # tasks that ended per second, in the window
    users: Sequence[UserInfo]
    jain: float | None
    notes: Sequence[str] = ()


class Reader:
    """Reads the state of the queue, relative to the start of the demo."""

    def __init__(self, queue: TaskQueue) -> None:
        self._inspector = Inspector(queue)
        self._first = queue.inspect()
        self._began = time.monotonic()

    def read(self, notes: Sequence[str] = ()) -> DemoState:
        """Return the current state. Raises RedisUnavailable."""
        state = self._inspector.system.snapshot()
        view = self._inspector.users.overview(WINDOW_MIN)
        seconds = time.monotonic() - self._began
        window = max(1.0, min(seconds, 60.0 * WINDOW_MIN))
        return DemoState(
            seconds=seconds,
            state=state,
            served=sum(grown(self._first, state, each) for each in ("finished", "buried")),
            fired=grown(self._first, state, "fired"),
            rate=view.ended / window,
            users=self._users(),
            jain=view.jain,
            notes=notes,
        )

    def _users(self) -> list[UserInfo]:
        """Return the users in a stable order: the noisy one, then by name."""
        found = self._inspector.users.list(order="name", minutes=WINDOW_MIN, limit=MOST_USERS)
        return sorted(found, key=lambda user: user.user_id != NOISY)


def grown(first: QueueSnapshot, last: QueueSnapshot, counter: str) -> int:
    """Return by how much a counter has grown."""
    return last.counters.get(counter, 0) - first.counters.get(counter, 0)


def fair_shares(users: Sequence[UserInfo]) -> list[float]:
    """Return the fair share of each user in the runs of the window, by weight.

    No user gets more than they asked for, or than their own limits allow.
    """
    wanted = [
        float(user.ended if user.state in LIMITED else user.ended + user.backlog) for user in users
    ]
    weights = [user.settings.weight for user in users]
    left, weight = float(sum(user.ended for user in users)), sum(weights)
    shares = [0.0] * len(users)
    for i in sorted(range(len(users)), key=lambda i: wanted[i] / weights[i]):
        shares[i] = min(wanted[i], left * weights[i] / weight)
        left, weight = left - shares[i], weight - weights[i]
    return shares


def received(users: Sequence[UserInfo]) -> list[float | None]:
    """Return which part of its fair share each user got; None for a user without tasks."""
    shares = fair_shares(users)
    return [
        user.ended / share if share else None for user, share in zip(users, shares, strict=True)
    ]


def duration(seconds: float | None) -> str:
    """Format seconds for people."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def contrast(shot: DemoState) -> str:
    """Say in numbers what fairness does for the other users."""
    backlog = next((user.backlog for user in shot.users if user.user_id == NOISY), 0)
    waits = [u.wait_p95 for u in shot.users if u.user_id != NOISY and u.state not in LIMITED]
    known = [wait for wait in waits if wait is not None]
    text = f"{NOISY} has {plural(backlog, 'task')} waiting"
    if backlog and shot.rate:
        wait = backlog / shot.rate
        text += f": first in, first out, the next task of any user would wait {wait:.0f} s"
    return f"{text}. The others wait {duration(max(known))} at most (p95)." if known else f"{text}."


def frame(shot: DemoState, columns: int, rows: int = 100, blocks: str = "█░") -> list[str]:
    """Return the display as lines that fit a terminal."""
    width = max(columns, NARROWEST) - 1  # text in the last column may wrap
    state = shot.state
    jain = "-" if shot.jain is None else f"{shot.jain:.2f}"
    lines = [
        f"FairQueue demo, {shot.seconds:.0f} s: {plural(round(shot.rate), 'task')} a second, "
        f"{plural(shot.fired, 'schedule')} fired",
        f"  waiting {state.ready:,}   running {state.running}   failed {state.dead}   "
        f"fairness (Jain) {jain}",
        "",
        *_table(shot.users, width, blocks),
        "",
        *textwrap.wrap(contrast(shot), width),
        *shot.notes,
    ]
    if len(lines) >= rows:
        lines = [line for line in lines if line]
    return [line[: columns - 1] for line in lines[: rows - 1]]


def _table(users: Sequence[UserInfo], width: int, blocks: str) -> Iterator[str]:
    size = max(4, min(30, width - 72))
    names = max([len(user.user_id) for user in users], default=4)
    head = f"  {'user':<{names}}{'waiting':>8}{'running':>8}{'p95 wait':>9}{'of all':>8}"
    yield f"{head}  received of the fair share"
    for user, part in zip(users, received(users), strict=True):
        filled = min(size, round((part or 0.0) * size))
        shown = "-" if part is None else f"{part:.0%}"
        yield (
            f"  {user.user_id:<{names}}{user.backlog:>8,}{user.running:>8}"
            f"{duration(user.wait_p95):>9}{user.received:>8.0%}  "
            f"{blocks[0] * filled}{blocks[1] * (size - filled)} {shown:>4} {user.state}"
        )


def line(shot: DemoState) -> str:
    """Return the display in one line, for use without a terminal."""
    parts = zip(shot.users, received(shot.users), strict=True)
    known = {user.user_id: part for user, part in parts if part is not None}
    noisy = known.pop(NOISY, None)
    shares = [] if noisy is None else [f"{NOISY} {noisy:.0%}"]
    if known:
        least, most = min(known.values()), max(known.values())
        shares.append(f"{plural(len(known), 'other')} {least:.0%} to {most:.0%}")
    return (
        f"{shot.seconds:3.0f} s | {shot.rate:.0f} tasks/s | fired {shot.fired} | waiting "
        f"{shot.state.ready:,} | running {shot.state.running} | received of the fair share: "
        f"{', '.join(shares) or 'none yet'}"
    )


def paint(line: str) -> str:
    """Colour a line: the title bold, the filled part of a bar green."""
    line = re.sub("^(FairQueue demo)", "\x1b[1m\\1\x1b[0m", line)
    return re.sub("([█#]+)", "\x1b[32m\\1\x1b[0m", line)


class Terminal:
    """Draws each frame over the previous one, with the cursor hidden."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._paint = str if os.environ.get("NO_COLOR") else paint
        self._blocks = "█░" if "utf" in (out.encoding or "").lower() else "#-"
        self._drawn, self._size = 0, shutil.get_terminal_size()

    def __enter__(self) -> Self:
        self._out.write("\x1b[?25l")
        return self

    def __exit__(self, *exc_info: object) -> None:
        with suppress(OSError):
            self._out.write("\r\x1b[K\x1b[?25h")  # the terminal may have echoed ^C
            self._out.flush()

    def show(self, shot: DemoState) -> None:
        """Draw in one write, without clearing first, so that nothing flickers."""
        size = shutil.get_terminal_size()
        # After a change of size the lines may have been wrapped: their position is unknown.
        up = f"\r\x1b[{self._drawn}A" if self._drawn else ""
        start = up if size == self._size else "\x1b[H\x1b[2J"
        lines = frame(shot, size.columns, size.lines, self._blocks)
        text = "".join(f"{self._paint(line)}\x1b[K\n" for line in lines)
        self._out.write(f"{start}{text}\x1b[J")
        self._out.flush()
        self._drawn, self._size = len(lines), size
