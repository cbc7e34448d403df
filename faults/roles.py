"""The processes of a storm: producers, workers, schedulers and editors, as users run them.

Each uses only the public objects, and notes in its journal each attempt before it is made, and the
answer afterwards. SIGTERM ends it gracefully.
"""

import mmap
import os
import random
import signal
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from fairqueue import Discard, Retry, Task, TaskQueue, TaskScheduler, Worker
from fairqueue.errors import (
    FairQueueError,
    QueueFull,
    RedisRefused,
    RedisUnavailable,
    ScheduleConflict,
)
from fairqueue.queue.claim import Answer
from fairqueue.runtime.processes import wait_for
from faults.flow import POOLS, TENANTS, options_of
from faults.journal import Journal
from faults.witness import Witness, now_ms

# How many of 1,000 tasks take some time.
SLOW, SLOW_S = 10, 0.05
# How many of 100 batches are pushed again after an acknowledgement; have a task cancelled.
AGAIN, CANCELLED = 5, 5
FULL_PAUSE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Part:
    """The settings of an actor.

    largest: size of the batches that are sometimes pushed, in several commands. patient: whether a
    producer pushes refused tasks again, or tries another user. pace: the least duration of a task,
    in seconds. even: how many users, from the first on, keep their weight. schedules: the most that
    an editor has. edits: seconds between two edits. failing, hopeless: how many of 1,000 tasks fail
    at first, and always. patience: seconds that a stopping worker waits for its tasks. flow:
    whether tasks have tenants, pools, keys and unique keys; see faults/flow.py.
    """

    name: str
    url: str
    queue: str
    journal: str
    seed: int
    clock: str | None = None
    timeout: float = 5.0
    lock_timeout: float = 1.0
    lease: float = 2.0
    concurrency: int = 4
    users: int = 40
    batch: int = 100
    largest: int = 0
    patient: bool = True
    pace: float = 0.0
    even: int = 0
    schedules: int = 1_000_000
    edits: float = 0.02
    failing: int = 20
    hopeless: int = 4
    patience: float = 10.0
    flow: bool = False


class SharedClock:
    """The time of this machine, shifted for all processes at once by the owner of the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        Path(path).touch()
        if not Path(path).stat().st_size:
            Path(path).write_bytes(struct.pack("q", 0))
        with open(path, "r+b") as file:
            self._offset = mmap.mmap(file.fileno(), 8)

    def now_ms(self) -> int:
        """Milliseconds since 1970, with the jumps."""
        return time.time_ns() // 1_000_000 + self.offset_ms

    @property
    def offset_ms(self) -> int:
        """By how much the time is shifted."""
        return int(struct.unpack("q", self._offset[:8])[0])

    def jump_to(self, offset_ms: int) -> None:
        """Shift the time for all processes."""
        self._offset[:8] = struct.pack("q", offset_ms)


class Actor:
    """An actor: its queue, its journal, and whether it is to end."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.random = random.Random(part.seed)
        self.journal = Journal(part.journal)
        self.ending = threading.Event()
        # Not in the handler: the wait that it interrupts may hold the lock of the event.
        asked, ask = os.pipe()
        signal.signal(signal.SIGTERM, lambda number, frame: os.write(ask, b"x"))
        threading.Thread(target=self._end, args=(asked,), daemon=True).start()
        clock = None if part.clock is None else SharedClock(part.clock)
        self.queue = TaskQueue.from_url(part.url, part.queue, timeout=part.timeout, clock=clock)

    def _end(self, asked: int) -> None:
        os.read(asked, 1)
        self.ending.set()

    def insist(self, action: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
        """Repeat until Redis acknowledges: "ok"; "unknown" or "failed" if we give up before.

        After a lost answer the effect is unknown, whatever later answers are: an early command may
        still be in flight.
        """
        outcome = "failed"
        while True:
            try:
                action(*arguments, **settings)
                return "ok"
            except RedisUnavailable:
                outcome = "unknown"
            except (QueueFull, RedisRefused, ScheduleConflict) as error:
                self.ending.wait(FULL_PAUSE_S)
                if isinstance(error, QueueFull) and not self.part.patient:
                    return outcome
            if self.ending.is_set():
                return outcome


# --- producers ------------------------------------------------------------------------------------


def produce(actor: Actor) -> None:
    """Push tasks in batches until asked to end."""
    part, dice = actor.part, actor.random
    first = 0
    while not actor.ending.is_set():
        count = dice.choice((1, 1, 10, part.batch, part.largest or part.batch))
        # One user at a time, if a full user must not delay the others.
        user = None if part.patient else dice.randrange(part.users)
        tasks = [_task(part, dice, n, user) for n in range(first, first + count)]
        actor.journal.note("push", first, count, "intent")
        answers: list[str] = []
        outcome = actor.insist(_push, actor, tasks, answers)
        if outcome == "failed" and count > part.batch:
            outcome = "unknown"  # some of several commands may have been applied
        if outcome == "ok" and part.flow:
            uniques = [task.task_id for task in tasks if task.unique]
            told = {task.task_id: at for task, at in zip(tasks, answers, strict=True)}
            actor.journal.note("uniques", now_ms(), {each: told[each] for each in uniques})
        actor.journal.note("push", first, count, outcome)
        if outcome == "ok" and dice.randrange(100) < AGAIN:
            again: list[str] = []
            if actor.insist(_push, actor, tasks, again) == "ok" and again != answers:
                actor.journal.note("wrong", f"a push from {tasks[0].task_id} on is another now")
        if outcome == "ok" and dice.randrange(100) < CANCELLED:
            _cancel(actor, dice.choice(tasks).task_id)
        first += count


def _push(actor: Actor, tasks: list[Task], answers: list[str]) -> None:
    answers[:] = actor.queue.push_many(tasks)


def _task(part: Part, dice: random.Random, number: int, user: int | None) -> Task:
    if user is None:  # some have much more to do than others
        user = int(part.users * dice.random() ** 2)
    options = options_of(f"{part.name}.{number}") if part.flow else {}
    return Task.create(
        user_id=f"user-{user}",
        task_id=f"{part.name}.{number}",
        priority=dice.choice((1, 2, 3, 3, 3, 4, 5, 6)),
        payload={"n": number},
        delay=dice.random() * 2 if dice.randrange(100) < 3 else None,
        **options,
    )


def _cancel(actor: Actor, task_id: str) -> None:
    actor.journal.note("cancel", task_id)
    actor.insist(actor.queue.cancel, task_id)


# --- workers --------------------------------------------------------------------------------------


def work(actor: Actor) -> None:
    """Run tasks until asked to end; note each run, and each acknowledged completion."""
    part = actor.part
    actor.queue = _Acknowledging.of(actor.queue, actor)
    Witness.watch(actor.queue.link, actor.journal)
    worker = Worker(
        actor.queue,
        lambda task: _handle(actor, task),
        pools=POOLS if part.flow else POOLS[:1],
        concurrency=part.concurrency,
        lease=part.lease,
        worker_id=part.name,
        registry=CollectorRegistry(),
    )
    worker.start()
    wait_for(actor.ending)
    worker.stop(part.patience)


def _handle(actor: Actor, task: Task) -> None:
    now = time.time()
    moment = task.scheduled_for
    late = None if moment is None else round(now - moment.timestamp(), 3)
    actor.journal.note("run", task.task_id, task.user_id, round(now, 3), late)
    try:
        _do(actor, task)
    finally:
        if actor.part.flow:
            actor.journal.note("left", task.task_id, now_ms())


def _do(actor: Actor, task: Task) -> None:
    actor.ending.wait(actor.part.pace)
    lot = zlib.crc32(task.task_id.encode()) % 1000
    if lot < actor.part.hopeless:
        raise Discard("it was never going to work")
    lot -= actor.part.hopeless
    if lot < actor.part.failing and actor.random.random() < 0.5:
        raise Retry(in_=0.1)
    lot -= actor.part.failing
    if 0 <= lot < SLOW:
        actor.ending.wait(SLOW_S)


class _Acknowledging(TaskQueue):
    """A queue that notes the completions that Redis has acknowledged to this process."""

    actor: Actor

    @classmethod
    def of(cls, queue: TaskQueue, actor: Actor) -> TaskQueue:
        queue.__class__ = cls
        assert isinstance(queue, cls)
        queue.actor = actor
        return queue

    def exchange(
        self, results: Sequence[Any], *arguments: Any, **settings: Any
    ) -> tuple[list[str], Answer]:
        answer = super().exchange(results, *arguments, **settings)
        self._note(results, answer[0])
        return answer

    def finish_many(self, results: Any) -> list[str]:
        results = list(results)
        words = super().finish_many(results)
        self._note(results, words)
        return words

    def _note(self, results: Sequence[Any], words: list[str]) -> None:
        done = [
            result[0].task.task_id
            for result, word in zip(results, words, strict=True)
            if word == "finished"
        ]
        if done:
            self.actor.journal.note("done", done)


# --- schedulers -----------------------------------------------------------------------------------


def schedule(actor: Actor) -> None:
    """Lead or follow until asked to end.

    SIGUSR1: it stops itself right before the next fire, the worst time for a pause. SIGUSR2: before
    it resigns.
    """
    part = actor.part
    link = Witness.watch(actor.queue.link, actor.journal)
    signal.signal(signal.SIGUSR1, lambda number, frame: link.stop_before["fire"].set())
    signal.signal(signal.SIGUSR2, lambda number, frame: link.stop_before["resign"].set())
    scheduler: TaskScheduler | None = None
    while scheduler is None:
        try:
            scheduler = TaskScheduler(
                actor.queue,
                part.name,
                check_interval=0.2,
                lock_timeout=part.lock_timeout,
                registry=CollectorRegistry(),
            )
        except FairQueueError:
            if actor.ending.wait(0.1):
                return
    scheduler.start()
    wait_for(actor.ending)
    scheduler.stop(10)


# --- editors --------------------------------------------------------------------------------------


def edit(actor: Actor) -> None:
    """Add, change, pause and remove schedules, and change settings of users, until asked to end."""
    dice = actor.random
    scheduler: TaskScheduler | None = None
    mine: list[str] = []
    number = 0
    while not actor.ending.wait(actor.part.edits):
        if scheduler is None:
            try:
                scheduler = TaskScheduler(
                    actor.queue, actor.part.name, registry=CollectorRegistry()
                )
            except FairQueueError:
                continue
        lot = dice.randrange(100)
        if not mine or (lot < 40 and len(mine) < actor.part.schedules):
            mine.append(_add(actor, scheduler, f"{actor.part.name}.{number}"))
            number += 1
        elif lot < 60:
            _remove(actor, scheduler, mine.pop(dice.randrange(len(mine))))
        elif lot < 80:
            _change(actor, scheduler, dice.choice(mine))
        else:
            user = f"user-{dice.randrange(actor.part.even, actor.part.users)}"
            weight = dice.choice((0.5, 1, 2))
            actor.insist(actor.queue.set_user, user, weight=weight)
            if actor.part.flow:
                actor.insist(actor.queue.set_tenant, dice.choice(TENANTS), weight=weight)


def _add(actor: Actor, scheduler: TaskScheduler, schedule_id: str) -> str:
    tries = 0

    def add() -> None:
        nonlocal tries
        tries += 1
        try:
            scheduler.add_schedule(
                actor.random.choice(("*/2 * * * * *", "0 0 1 1 *")),
                f"user-{actor.random.randrange(actor.part.users)}",
                schedule_id=schedule_id,
            )
        except ScheduleConflict:  # ours, from an attempt whose answer was lost
            if tries == 1:
                actor.journal.note("wrong", f"{schedule_id} was there before it was added")

    actor.journal.note("add", schedule_id, "intent")
    actor.journal.note("add", schedule_id, actor.insist(add))
    return schedule_id


def _remove(actor: Actor, scheduler: TaskScheduler, schedule_id: str) -> None:
    tries = 0

    def remove() -> None:
        nonlocal tries
        tries += 1
        if not scheduler.remove_schedule(schedule_id) and tries == 1:
            actor.journal.note("wrong", f"{schedule_id} was gone before it was removed")

    actor.journal.note("remove", schedule_id, "intent")
    actor.journal.note("remove", schedule_id, actor.insist(remove))


def _change(actor: Actor, scheduler: TaskScheduler, schedule_id: str) -> None:
    lot = actor.random.randrange(3)
    if lot == 0:
        actor.insist(scheduler.update_schedule, schedule_id, cron_expr="*/3 * * * * *")
    elif lot == 1:
        actor.insist(scheduler.pause_schedule, schedule_id)
    else:
        actor.insist(scheduler.resume_schedule, schedule_id)


ROLES: dict[str, Callable[[Actor], None]] = {
    "producer": produce,
    "worker": work,
    "scheduler": schedule,
    "editor": edit,
}


def act(role: str, setting: dict[str, Any]) -> None:
    """Run an actor to its end, in this process."""
    actor = Actor(Part(**setting))
    ROLES[role](actor)
    actor.queue.close()
