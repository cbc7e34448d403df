"""The demo: a school platform at work, in which one user floods the queue and nobody else minds.

`register` gives a worker its handlers, `Load` makes users want things, and `read`, `frame`, `line`
and `summary` turn what happens into text.
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

from fairqueue.demo.school import IMPORT, JOBS, TENANTS, ZONE, Job
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
BACKLOG, LEAST_BACKLOG = (
    1500,
    300,
)  # tasks that the noisy user pushes at once, and when it does again
MOST_WAITING = 40  # tasks of another user: one that is held back does not pile up without end
WORK_S = (0.1, 0.6)  # seconds that a task takes, from and to
TIMEOUT_S = 3.0
# Of a thousand tasks, so many always fail, then so many never end, then so many fail once.
ALWAYS_FAIL, HANG, FAIL_ONCE = 4, 2, 30
STEP_S = 1.0  # between two looks
WINDOW_MIN = 1  # shares are those of the last minute
MOST_USERS = 100  # that are read and shown, as far as there are rows
LIMITED = ("paused", "capped", "rate limited")  # states of users that get less because they must
NARROWEST = 60  # columns; what does not fit into a narrower terminal is cut off
MARK = "live-heartbeat"  # a schedule that only the demo has: its queue is the demo's

# Tasks that users ask for in a second, by the part of their name after the school.
WISHES = {"office": 0.5, "bursar": 0.7, "admissions": 0.8, "transport": 0.4}
# Schedules that fire while one looks: id, rule, job.
LIVE: tuple[tuple[str, dict[str, Any], Job], ...] = (
    (MARK, {"every": timedelta(seconds=5)}, JOBS[2]),
    ("live-mpesa", {"every": timedelta(seconds=12)}, JOBS[3]),
    ("live-reports", {"cron_expr": "*/20 * * * * *"}, JOBS[0]),
    ("live-alerts", {"cron_expr": "* * * * *"}, JOBS[6]),
)


# --- what happens ---------------------------------------------------------------------------------


def fill(queue: TaskQueue) -> None:
    """Give the demo a past and live schedules. A queue that an earlier demo left is begun anew.

    Raises ConfigurationError if the queue has schedules or tasks of others.
    """
    scheduler = TaskScheduler(queue, "demo")
    seed(queue, force=scheduler.get_schedule(MARK) is not None)
    for schedule_id, rule, job in LIVE:
        scheduler.add_schedule(
            **rule,
            user_id=job.user(TENANTS),
            tenant=job.tenant(TENANTS),
            name=job.name,
            schedule_id=schedule_id,
            timezone=ZONE,
            payload=job.payload,
            metadata={"description": f"{job.title}, while the demo runs"},
            retries=1,
            backoff=[2.0],
            timeout=TIMEOUT_S,
        )


def register(worker: Worker) -> None:
    """Give a worker a handler for each job of the school."""
    for job in (*JOBS, IMPORT):
        worker.register(job.name, handler_of(job), retries=2, backoff=[2.0, 5.0], timeout=TIMEOUT_S)


def fate_of(task_id: str) -> int:
    """What becomes of a task, from 0 to 999: the same at each attempt, and in each process."""
    return zlib.crc32(task_id.encode()) % 1000


def handler_of(job: Job) -> Callable[[dict[str, Any], TaskContext], dict[str, int]]:
    """What does a job: it takes a little time, logs, and fails now and then."""
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
    """Spend time, in steps between which a time-out can come."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))


class Load:
    """Users who want things: most a little, and one all at once."""

    def __init__(self, queue: TaskQueue, random_seed: int = 1) -> None:
        self._queue = queue
        self._chance = random.Random(random_seed)  # noqa: S311 - no secret
        self._jobs = {job.role: job for job in JOBS}

    def push(self) -> int:
        """What is asked for in one step; how many tasks."""
        return len(self._queue.push_many([*self._flood(), *self._wishes()]))

    def _flood(self) -> Iterator[Task]:
        if self._queue.size(NOISY) < LEAST_BACKLOG:
            for _ in range(BACKLOG):
                yield self._task(NOISY, IMPORT.tenant(TENANTS), IMPORT)

    def _wishes(self) -> Iterator[Task]:
        for tenant in TENANTS:
            for role, per_second in WISHES.items():
                user = f"{tenant}.{role}"
                wanted = self._chance.random() < per_second * STEP_S
                if wanted and self._queue.size(user) < MOST_WAITING:
                    yield self._task(user, tenant, self._jobs[role])

    def _task(self, user: str, tenant: str | None, job: Job) -> Task:
        return Task.create(
            user_id=user,
            tenant=tenant,
            name=job.name,
            payload=job.payload,
            priority=job.priority,
            triggered_by=user,
        )


# --- what is shown --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that is shown: the queue and its users."""

    seconds: float
    state: QueueSnapshot
    served: int  # since the demo began
    fired: int
    rate: float  # tasks that end in a second, in the window
    users: Sequence[UserInfo]
    jain: float | None
    notes: Sequence[str] = ()


class Reader:
    """Reads snapshots, and remembers how it began."""

    def __init__(self, queue: TaskQueue) -> None:
        self._inspector = Inspector(queue)
        self._first = queue.inspect()
        self._began = time.monotonic()

    def read(self, notes: Sequence[str] = ()) -> Snapshot:
        """How things stand. Raises RedisUnavailable."""
        state = self._inspector.system.snapshot()
        view = self._inspector.users.overview(WINDOW_MIN)
        seconds = time.monotonic() - self._began
        window = max(1.0, min(seconds, 60.0 * WINDOW_MIN))
        return Snapshot(
            seconds=seconds,
            state=state,
            served=self._grown(state, "finished") + self._grown(state, "buried"),
            fired=self._grown(state, "fired"),
            rate=view.ended / window,
            users=self._users(),
            jain=view.jain,
            notes=notes,
        )

    def _users(self) -> list[UserInfo]:
        """All of them, in an order that stays: the noisy one, then from A to Z."""
        found = self._inspector.users.list(order="name", minutes=WINDOW_MIN, limit=MOST_USERS)
        return sorted(found, key=lambda user: user.user_id != NOISY)

    def _grown(self, state: QueueSnapshot, counter: str) -> int:
        return state.counters.get(counter, 0) - self._first.counters.get(counter, 0)


def fair_shares(users: Sequence[UserInfo]) -> list[float]:
    """How the runs of the window should have been shared: by weight.

    But to nobody more than they wanted, or could have within their own limits.
    """
    wanted = [
        float(user.ended if user.state in LIMITED else user.ended + user.backlog) for user in users
    ]
    weights = [user.settings.weight for user in users]
    left, weight, shares = (
        float(sum(user.ended for user in users)),
        sum(weights),
        [0.0] * len(users),
    )
    for i in sorted(range(len(users)), key=lambda i: wanted[i] / weights[i]):
        shares[i] = min(wanted[i], left * weights[i] / weight)
        left, weight = left - shares[i], weight - weights[i]
    return shares


def received(users: Sequence[UserInfo]) -> list[float | None]:
    """The part that each user got of its fair share; None for those that wanted nothing."""
    shares = fair_shares(users)
    return [
        user.ended / share if share else None for user, share in zip(users, shares, strict=True)
    ]


def duration(seconds: float | None) -> str:
    """Seconds as people say them."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def contrast(shot: Snapshot) -> str:
    """What fairness does for the others, in a sentence with numbers."""
    backlog = next((user.backlog for user in shot.users if user.user_id == NOISY), 0)
    waits = [u.wait_p95 for u in shot.users if u.user_id != NOISY and u.state not in LIMITED]
    known = [wait for wait in waits if wait is not None]
    text = f"{NOISY} has {plural(backlog, 'task')} waiting"
    if backlog and shot.rate:
        wait = backlog / shot.rate
        text += f": first in, first out, the next task of anybody would wait {wait:.0f} s"
    return f"{text}. The others wait {duration(max(known))} at most (p95)." if known else f"{text}."


def frame(shot: Snapshot, columns: int, rows: int = 100, blocks: str = "█░") -> list[str]:
    """The picture, as lines that fit a terminal."""
    width = max(columns, NARROWEST) - 1  # text in the last column may begin a new line
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
    yield f"{head}  received of what is fair"
    for user, part in zip(users, received(users), strict=True):
        filled = min(size, round((part or 0.0) * size))
        shown = "-" if part is None else f"{part:.0%}"
        yield (
            f"  {user.user_id:<{names}}{user.backlog:>8,}{user.running:>8}"
            f"{duration(user.wait_p95):>9}{user.received:>8.0%}  "
            f"{blocks[0] * filled}{blocks[1] * (size - filled)} {shown:>4} {user.state}"
        )


def line(shot: Snapshot) -> str:
    """The picture in one line, for where there is no terminal."""
    parts = zip(shot.users, received(shot.users), strict=True)
    known = {user.user_id: part for user, part in parts if part is not None}
    noisy = known.pop(NOISY, None)
    shares = [] if noisy is None else [f"{NOISY} {noisy:.0%}"]
    if known:
        least, most = min(known.values()), max(known.values())
        shares.append(f"{plural(len(known), 'other')} {least:.0%} to {most:.0%}")
    return (
        f"{shot.seconds:3.0f} s | {shot.rate:.0f} tasks/s | fired {shot.fired} | waiting "
        f"{shot.state.ready:,} | running {shot.state.running} | received of what is fair: "
        f"{', '.join(shares) or 'none yet'}"
    )


def paint(line: str) -> str:
    """A line with colour: the title bold, the filled part of a bar green."""
    line = re.sub("^(FairQueue demo)", "\x1b[1m\\1\x1b[0m", line)
    return re.sub("([█#]+)", "\x1b[32m\\1\x1b[0m", line)


class Terminal:
    """Draws each frame over the one before; the cursor is hidden meanwhile."""

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

    def show(self, shot: Snapshot) -> None:
        """Draw in one write and without clearing first, so that nothing flickers."""
        size = shutil.get_terminal_size()
        # Where lines are after a change of size is unknown: they may have been wrapped anew.
        up = f"\r\x1b[{self._drawn}A" if self._drawn else ""
        start = up if size == self._size else "\x1b[H\x1b[2J"
        lines = frame(shot, size.columns, size.lines, self._blocks)
        text = "".join(f"{self._paint(line)}\x1b[K\n" for line in lines)
        self._out.write(f"{start}{text}\x1b[J")
        self._out.flush()
        self._drawn, self._size = len(lines), size
