"""The demo: one noisy user, five quiet ones, and a terminal that shows who gets what.

`Demo` makes things happen and counts them; `frame`, `line` and `summary` turn what it counted into
text; `run` goes round until it is told to end.
"""

import argparse
import logging
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Self, TextIO

from prometheus_client import CollectorRegistry

from fairqueue.errors import EmbeddedServerError, FairQueueError
from fairqueue.metrics import serve_metrics
from fairqueue.models import Claim, Task
from fairqueue.queue import TaskQueue
from fairqueue.scheduler import TaskScheduler

QUEUE = "fairqueue-demo"
NOISY, QUIET = "noisy", ("ana", "ben", "chloe", "dan", "eva")
BACKLOG = 10_000  # tasks that the noisy user pushes at once: some 40 s of work
WORKERS = 2
BATCH = 2  # tasks in one claim; with more, a new report waits longer until a worker is free
WORK_S = 0.006  # seconds that a task takes
STEP_S = 0.25  # seconds between frames, and how long a signal may go unheard
WINDOW = 20  # steps over which the present speed is measured
KEPT = 1000  # latest fires and waits that the percentiles are made of
NARROWEST = 60  # columns; what does not fit into a narrower terminal is cut off


# --- what is shown --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """What a user got, in the window and in all; the wait of its latest task is in ms."""

    name: str
    waiting: int = 0
    recent: int = 0
    total: int = 0
    last_wait: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that is shown. `window` is in seconds, lateness and waits are in ms."""

    seconds: float
    window: float
    users: Sequence[User]
    scheduler: str = "starting"
    fires: int = 0
    missed: int = 0
    lateness: Sequence[int] = ()
    last_fires: Sequence[tuple[str, int]] = ()
    quiet_waits: Sequence[int] = ()
    fair: bool = True
    metrics_url: str = ""

    @property
    def rate(self) -> float:
        """Tasks served in a second, at present."""
        return sum(user.recent for user in self.users) / self.window

    @property
    def backlog(self) -> int:
        """Tasks of the noisy user that wait."""
        return sum(user.waiting for user in self.users if user.name == NOISY)


def entitled(got: Sequence[int], waiting: Sequence[int]) -> list[float]:
    """How the service should have been shared: equally, but to nobody more than was wanted."""
    wanted = [a + b for a, b in zip(got, waiting, strict=True)]
    left, shares = float(sum(got)), [0.0] * len(wanted)
    for done, i in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[i] = min(wanted[i], left / (len(wanted) - done))
        left -= shares[i]
    return shares


def duration(ms: float) -> str:
    """Milliseconds as people say them."""
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def spread(values: Sequence[int], note: str = "") -> str:
    """The middle and the end of many durations: those that 50 and 99 of 100 do not exceed."""
    if not values:
        return "none yet"
    ordered = sorted(values)
    half, most = (ordered[math.ceil(len(ordered) * part) - 1] for part in (0.5, 0.99))
    return f"p50 {duration(half)}, p99 {duration(most)}{note}"


def contrast(shot: Snapshot) -> str:
    """What fairness does for a quiet user, in a sentence with numbers."""
    name = QUIET[0]
    fifo = f"{name}'s report wait behind {shot.backlog:,} tasks{_work_left(shot, ', about ')}"
    if not shot.fair:
        return f"Without fairness, first in, first out makes {fifo}."
    wait = next((user.last_wait for user in shot.users if user.name == name), None)
    here = "none was served yet" if wait is None else f"the last one waited {duration(wait)}"
    return f"Without fairness, first in, first out would make {fifo}. With it, {here}."


def _work_left(shot: Snapshot, words: str) -> str:
    return f"{words}{shot.backlog / shot.rate:.0f} s at this speed" if shot.rate else ""


def frame(shot: Snapshot, columns: int, rows: int = 100, blocks: str = "█░") -> list[str]:
    """The picture, as lines that fit a terminal."""
    width = max(columns, NARROWEST) - 1  # text in the last column may begin a new line
    title = f"FairQueue demo, {shot.seconds:.0f} s. Ctrl-C ends it. Metrics: {shot.metrics_url}"
    story = f"One noisy user pushes {BACKLOG:,} tasks; five quiet ones want a report every second."
    note = " (half and 99% are within)"
    rule = "fair between users" if shot.fair else "first in, first out"
    fires = ", ".join(f"{user} {late}" for user, late in shot.last_fires)
    lines = [
        *textwrap.wrap(title, width),
        *textwrap.wrap(story, width),
        "",
        "SCHEDULES: does each report start on its second?",
        f"  scheduler   {shot.scheduler}",
        f"  fires       {shot.fires:,} reports, {shot.missed} missed",
        f"  lateness    {spread(shot.lateness, note)}",
        f"  last fires  {fires + ' ms late' if fires else 'none yet'}",
        "",
        f"SERVICE: {shot.rate:.0f} tasks a second by {WORKERS} workers, {rule}",
        "  entitled: an equal share, or all that it wants if less",
        *_table(shot, width, blocks),
        f"  backlog     {shot.backlog:,} tasks of {NOISY} wait{_work_left(shot, ': ')}",
        f"  quiet wait  {spread(shot.quiet_waits, note)}",
        "",
        *textwrap.wrap(contrast(shot), width),
    ]
    if len(lines) >= rows:
        lines = [line for line in lines if line]
    return [line[: columns - 1] for line in lines[: rows - 1]]


def _table(shot: Snapshot, width: int, blocks: str) -> Iterator[str]:
    shares = entitled([u.recent for u in shot.users], [u.waiting for u in shot.users])
    size = min(40, width - 51)
    what = "received of entitled" if size > 14 else "of entitled"
    yield f"  {'user':<6}{'waiting':>8}{'last wait':>10}{'entitled':>9}{'received':>9}  {what}"
    for user, share in zip(shot.users, shares, strict=True):
        part = user.recent / share if share else 0.0
        filled = min(size, round(part * size))
        wait = "none yet" if user.last_wait is None else duration(user.last_wait)
        yield (
            f"  {user.name:<6}{user.waiting:>8,}{wait:>10}{share / shot.window:>7.1f}/s"
            f"{user.recent / shot.window:>7.1f}/s  "
            f"{blocks[0] * filled}{blocks[1] * (size - filled)}{part:>5.0%}"
        )


def received(shot: Snapshot) -> str:
    """The part that each user got, since the start, of what it was entitled to."""
    shares = entitled([u.total for u in shot.users], [u.waiting for u in shot.users])
    parts = zip(shot.users, shares, strict=True)
    return ", ".join(f"{u.name} {u.total / share:.0%}" for u, share in parts if share) or "none yet"


def line(shot: Snapshot) -> str:
    """The picture in one line, for where there is no terminal."""
    return (
        f"{shot.seconds:3.0f} s | {shot.rate:.0f} tasks/s | fires {shot.fires}, late "
        f"{spread(shot.lateness)} | quiet wait {spread(shot.quiet_waits)} | backlog "
        f"{shot.backlog:,} | shares received of entitled: {received(shot)}"
    )


def summary(shot: Snapshot) -> str:
    """What there was to see."""
    return (
        f"Served       {sum(u.total for u in shot.users):,} tasks in {shot.seconds:.0f} s\n"
        f"Fires        {shot.fires:,} reports, {shot.missed} missed\n"
        f"Lateness     {spread(shot.lateness)}\n"
        f"Quiet users  waited {spread(shot.quiet_waits)}\n"
        f"Shares       received of entitled: {received(shot)}\n"
        f"{textwrap.fill(contrast(shot), 79)}"
    )


def paint(line: str) -> str:
    """A line with colour: headings bold, the filled part of a bar green."""
    line = re.sub("^(FairQueue demo|[A-Z]+:)", "\x1b[1m\\1\x1b[0m", line)
    return re.sub("([█#]+)", "\x1b[32m\\1\x1b[0m", line)


# --- what happens ---------------------------------------------------------------------------------


class Demo(logging.Handler):
    """Users, workers and a scheduler on a queue. It is told of fires as any log handler is."""

    def __init__(self, queue: TaskQueue, *, fair: bool) -> None:
        super().__init__()
        registry = CollectorRegistry()
        self._queue, self._fair = queue, fair
        self._scheduler = TaskScheduler(queue, registry=registry)
        self._metrics = serve_metrics(queue, port=0, registry=registry)
        self._pushed = 0
        self._counting = threading.Lock()
        self._total: Counter[str] = Counter()
        self._last_wait: dict[str, int] = {}
        self._quiet_waits: deque[int] = deque(maxlen=KEPT)
        self._fires: deque[tuple[str, int]] = deque(maxlen=KEPT)
        self._before: deque[tuple[float, Counter[str]]] = deque(maxlen=WINDOW)
        self._began = 0.0
        self._failure: Exception | None = None
        self._ending = threading.Event()
        self._workers = [
            threading.Thread(target=self._work, args=(f"worker-{n}",), daemon=True)
            for n in range(WORKERS)
        ]

    def __enter__(self) -> Self:
        logger = logging.getLogger("fairqueue")
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)
        self.refill()
        for name in QUIET:
            self._scheduler.add_schedule(
                "* * * * * *", self._owner(name), payload={"for": name}, schedule_id=name
            )
        self._scheduler.start()
        self._began = time.monotonic()
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ending.set()
        self._scheduler.stop()
        for worker in self._workers:
            worker.join()
        self._metrics.close()
        logging.getLogger("fairqueue").removeHandler(self)

    def _owner(self, name: str) -> str:
        return name if self._fair else "everybody"

    def refill(self) -> None:
        """See to it that the noisy user has a backlog."""
        if self._pushed == self._total[NOISY]:
            user, payload = self._owner(NOISY), {"for": NOISY}
            self._queue.push_many(
                Task.create(user_id=user, payload=payload) for _ in range(BACKLOG)
            )
            self._pushed += BACKLOG

    def _work(self, worker_id: str) -> None:
        try:
            while not self._ending.is_set():
                for claim in self._queue.claim(worker_id, limit=BATCH, wait=0.2):
                    time.sleep(WORK_S)
                    self._queue.finish(claim)
                    self._count(claim)
        except Exception as error:
            self._failure = error  # `snapshot` raises it where it is seen

    def _count(self, claim: Claim) -> None:
        name = claim.task.payload["for"]
        info = self._queue.get(claim.task.task_id)
        with self._counting:
            self._total[name] += 1
            if info is not None and info.ended_at is not None:
                # Until its work began, also behind the others of its batch.
                wait = (info.ended_at - info.due_at).total_seconds() - WORK_S
                self._last_wait[name] = max(0, round(wait * 1000))
                if name != NOISY:
                    self._quiet_waits.append(self._last_wait[name])

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of a fire."""
        fields = vars(record)
        if fields.get("event") == "schedule_fired":
            with self._counting:
                self._fires.append((fields["schedule"], fields["late_ms"]))

    def snapshot(self) -> Snapshot:
        """How things stand. Raises RedisUnavailable, and what a worker has failed of."""
        if self._failure:
            raise self._failure
        state = self._queue.inspect()
        given = {s.schedule_id: s.run_count for s in self._scheduler.list_schedules()}
        given[NOISY] = self._pushed
        role = "this process leads" if self._scheduler.is_leader else "does not lead"
        now = time.monotonic()
        with self._counting:
            since, before = self._before[0] if self._before else (self._began, Counter())
            users = [
                User(
                    name=name,
                    waiting=max(0, given[name] - self._total[name]),
                    recent=self._total[name] - before[name],
                    total=self._total[name],
                    last_wait=self._last_wait.get(name),
                )
                for name in (NOISY, *QUIET)
            ]
            self._before.append((now, self._total.copy()))
            fires, waits = list(self._fires), list(self._quiet_waits)
        return Snapshot(
            seconds=now - self._began,
            window=max(now - since, 0.001),
            users=users,
            scheduler=f"{self._scheduler.state}, {role} (term {state.epoch})",
            fires=state.counters.get("fired", 0),
            missed=state.counters.get("missed", 0),
            lateness=[late for _, late in fires],
            last_fires=fires[-len(QUIET) :],
            quiet_waits=waits,
            fair=self._fair,
            metrics_url=self._metrics.url,
        )


# --- the program ----------------------------------------------------------------------------------


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


@contextmanager
def open_queue(url: str | None) -> Iterator[TaskQueue]:
    """The demo's own queue, empty; nothing of it stays on a server that was there before."""
    with TaskQueue.from_url(url, QUEUE) if url else TaskQueue.embedded(name=QUEUE) as queue:
        queue.check(timeout=2.0)
        queue.destroy()
        try:
            yield queue
        finally:
            with suppress(FairQueueError):
                queue.destroy()


def run(options: argparse.Namespace, out: TextIO, is_over: Callable[[], bool]) -> None:
    """Show the demo until it is over. Raises FairQueueError, and OSError from the output."""
    live = out.isatty() and os.environ.get("TERM") != "dumb"
    with (
        open_queue(options.url) as queue,
        Demo(queue, fair=not options.no_fairness) as demo,
        Terminal(out) if live else nullcontext() as terminal,
    ):
        shot = demo.snapshot()
        if not terminal:
            print(f"FairQueue demo. Metrics: {shot.metrics_url}", file=out, flush=True)
        while not is_over() and shot.seconds < options.seconds:
            # Reports fire on the second: look between the quarters, when none is under way.
            time.sleep(STEP_S - (time.time() + STEP_S / 2) % STEP_S)
            demo.refill()
            last, shot = shot, demo.snapshot()
            if terminal:
                terminal.show(shot)
            elif int(shot.seconds) > int(last.seconds):
                print(line(shot), file=out, flush=True)
    print(f"\n{summary(shot)}", file=out, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser("python -m fairqueue.demo", description="See fairness live.")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end after so long; default: at Ctrl-C"
    )
    parser.add_argument(
        "--url", help=f"use this Redis, there only a queue {QUEUE!r}, emptied at start and end"
    )
    parser.add_argument(
        "--no-fairness",
        action="store_true",
        help="for contrast: give all tasks to one user, so that they go first in, first out",
    )
    options = parser.parse_args(arguments)
    asked: list[int] = []  # no Event: a signal handler must not wait for a lock
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    out: TextIO = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None where it is closed
    try:
        run(options, out, lambda: bool(asked))
    except BrokenPipeError:
        # Nobody reads any more. Python would complain when it flushes stdout at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    except FairQueueError as error:
        print(f"fairqueue.demo: {error}", file=sys.stderr)
        if isinstance(error, EmbeddedServerError):
            print("To use a Redis that runs: --url redis://localhost:6379/0", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
