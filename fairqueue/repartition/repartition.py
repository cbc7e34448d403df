"""Move a queue to another one: in bounded steps that can be interrupted and repeated anywhere."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairqueue.errors import ConfigurationError, QueueInUse, RepartitionError, plural, shown
from fairqueue.link.connection import Link
from fairqueue.link.operation import Call, Gather, Operation
from fairqueue.link.scripts import load_script
from fairqueue.models import UNREADABLE, new_id
from fairqueue.queue.queue import TaskQueue
from fairqueue.repartition.copying import Copier
from fairqueue.repartition.counting import (
    QueueCounts,
    count,
    digest,
    digest_of,
    fields_of,
    links_of,
    records_aside,
)
from fairqueue.repartition.records import COUNTERS, SCHEDULE, TASK, MovingRecord
from fairqueue.schedules.places import finish_all_moves
from fairqueue.validation import check_count

BATCH = 200  # records in one script: some ms of server time
MOST_AT_ONCE = 500
PASSES = 20  # without waiting, when somebody goes on pushing to the old queue
LOOK_AGAIN_S = 0.25  # between two looks at what is left

_PUT = {TASK: "put_tasks", SCHEDULE: "put_schedules"}


@dataclass
class MoveReport:
    """What was moved, and what is left.

    moved: by kind (`waiting`, `delayed`, `dead`, `ended`, `schedules`). known: how many of them the
    new queue had already. refused: names of what the new queue does not take, and why. verified:
    whether the ids in both queues are those that were there before; None if the queue was in use.
    """

    before: QueueCounts
    after: QueueCounts
    left: QueueCounts
    moved: dict[str, int]
    known: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    verified: bool | None = None
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left in the old queue."""
        return self.left.total == 0


class Repartition:
    """Moves what `old` has to `new`, which may have any number of partitions on any server.

    `progress` is called with the number of records moved so far. A move that was interrupted goes
    on where it was when it is run again, by any process; the last one that begins takes over.
    """

    def __init__(
        self,
        old: TaskQueue,
        new: TaskQueue,
        *,
        progress: Callable[[int], object] | None = None,
        batch: int = BATCH,
    ) -> None:
        """Raises ConfigurationError for a bad `batch`, 1 to 500."""
        check_count(batch, "batch", ConfigurationError, least=1, most=MOST_AT_ONCE)
        self._old, self._new = old, new
        self._progress = progress
        self._batch = batch
        self._token = new_id()
        self._moved: Counter[str] = Counter()
        self._known = 0
        self._known_digest = 0
        self._refused: dict[str, str] = {}

    def alive(self) -> list[str]:
        """What uses the old queue now, for people: schedulers, workers, tasks that run."""
        self._old.check()
        found = []
        for link in links_of(self._old):
            now, keys = link.now_ms(), link.keys
            leader, leases, workers = link.ask(
                ("GET", keys["leader"]),
                ("ZCARD", keys["leases"]),
                ("ZRANGE", keys["worker_ends"], f"({now}", "+inf", "BYSCORE", "LIMIT", 0, 10),
            )
            if name := _leader(leader, now):
                found.append(f"scheduler {name!r} leads")
            found += [f"worker {_text(worker)!r} is alive" for worker in workers]
            if leases:
                found.append(f"{plural(leases, 'task')} run{'s' * (leases == 1)}")
        return list(dict.fromkeys(found))

    def run(
        self,
        *,
        drain: bool = False,
        wait: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> MoveReport:
        """Move everything that can move, and return what was moved and what is left.

        Without `drain`, the old queue must be at rest and the new one empty. With it, workers of
        the old queue may go on: tasks that run stay until they end. `wait`: go on until nothing is
        left, or until `stop` returns True. Raises QueueInUse, RepartitionError if the queues are
        part of another move, differ in their ageing or another process takes over, and what Redis
        raises; then the same call can be repeated.
        """
        began = time.monotonic()
        self._old.check()
        self._new.check()
        if not drain and (alive := self.alive()):
            raise QueueInUse(
                f"queue {shown(self._old.name)} is in use: {'; '.join(alive)}. Stop everything "
                "that uses it, or move it while in use (drain)"
            )
        self._check_ageing()
        self._begin(must_be_empty=not drain)
        self._finish_earlier()
        before, self._known_digest = count(self._old), 0
        ids = None if drain else self._digest()
        self._copier().settings(at_rest=not drain)
        self._go_on(wait, stop)
        if count(self._old).total == len(self._refused):
            self._copier().windows()
            self._move_counters()
        verified = None if ids is None else self._digest() == (ids - self._known_digest) % 2**64
        return MoveReport(
            before=before,
            after=count(self._new),
            left=count(self._old),
            moved=dict(self._moved),
            known=self._known,
            refused=dict(self._refused),
            verified=verified,
            seconds=time.monotonic() - began,
        )

    def _copier(self) -> Copier:
        return Copier(self._old, self._new, self._run)

    def _digest(self) -> int:
        return (digest(self._old) + digest(self._new)) % 2**64

    def _check_ageing(self) -> None:
        """Raises RepartitionError if both queues order the tasks of a user in different ways."""
        home = links_of(self._old)[0]
        (ours,) = home.ask(("HGET", home.keys["settings"], "ageing_ms"))
        for link in links_of(self._new):
            (theirs,) = link.ask(("HGET", link.keys["settings"], "ageing_ms"))
            if theirs is None and not (count(self._new).waiting + count(self._new).delayed):
                continue  # it is copied
            if float(theirs or 0) != float(ours or 0):
                raise RepartitionError(
                    f"queue {shown(self._new.name)} has another ageing than queue "
                    f"{shown(self._old.name)}, so their tasks have no common order: configure the "
                    "same one while the new queue is empty"
                )

    # --- steps ------------------------------------------------------------------------------------

    def _begin(self, *, must_be_empty: bool) -> None:
        """Take over both queues, and let new tasks of the new one come after those of the old.

        Raises RepartitionError, or ConfigurationError if they are the same queue.
        """
        target = f"{self._new.name} ({plural(self._new.partitions, 'partition')})"
        source = f"{self._old.name} ({plural(self._old.partitions, 'partition')})"
        home = links_of(self._old)[0]
        (text,) = home.ask(("HGET", home.keys["repartition"], ""))
        parts = _text(text or b"").split("\0")
        is_known = len(parts) == 4 and (parts[0], parts[3]) == ("from", target)
        move = parts[2] if is_known else new_id()
        seqs = [
            self._begin_in(link, role="from", move=move, other=target, seq=0, empty="", known="")
            for link in links_of(self._old)
        ]
        there = links_of(self._new)[0]
        (text,) = there.ask(("HGET", there.keys["repartition"], ""))
        if self._token in _text(text or b""):
            raise ConfigurationError(
                f"queue {shown(self._old.name)} cannot be moved to itself: choose another name"
            )
        must_be_known = any(records_aside(link) for link in links_of(self._old))
        for link in links_of(self._new):
            self._begin_in(
                link,
                role="to",
                move=move,
                other=source,
                seq=max(seqs),
                empty="1" if must_be_empty else "",
                known="1" if must_be_known else "",
            )

    def _begin_in(self, link: Link, **arguments: Any) -> int:
        """Take over a partition; its arrival number. Raises RepartitionError."""
        answer = self._run(link, "begin_repartition", **arguments)
        queue = shown(link.keys.queue)
        if answer[0] == b"busy":
            way = "to" if answer[1] == b"from" else "from"
            raise RepartitionError(
                f"queue {queue} is part of another move, {way} {_text(answer[2])}: finish that one "
                "first, by the same command"
            )
        if answer[0] == b"used":
            raise RepartitionError(
                f"queue {queue} is not empty: choose another name, or move the queue while in use "
                "(drain)"
            )
        if answer[0] == b"unknown":
            raise RepartitionError(
                f"records of queue {shown(self._old.name)} are on their way to a queue {queue} on "
                "another server: finish that move first"
            )
        return int(answer[1])

    def _finish_earlier(self) -> None:
        """Deliver what an earlier run has set aside; then no note of an arrival is needed."""
        for link in links_of(self._old):
            aside = records_aside(link)
            self._deliver(link, [each for pair in aside.items() for each in pair])
        for link in links_of(self._new):
            notes = [each for each in fields_of(link) if each.startswith(b"<")]
            self._run_all([(link, self._call_to_settle(notes))])

    def _go_on(self, wait: bool, stop: Callable[[], bool]) -> None:
        """Pass over the old queue until nothing moves any more; with `wait`, until it is empty."""
        passes = 0
        while not stop():
            passes += 1
            moved = sum(self._moved.values())
            if self._old.link.parts:
                self._old.link.perform(finish_all_moves(self._old))
            for link in links_of(self._old):
                self._pass(link, stop)
            if sum(self._moved.values()) > moved and (wait or passes < PASSES):
                continue
            left = count(self._old)
            if not wait or not (left.running or left.moving):
                return
            time.sleep(LOOK_AGAIN_S)

    def _pass(self, link: Link, stop: Callable[[], bool]) -> None:
        """Move what can move now. Schedules go first, and take along what their next run needs."""
        after: str | bytes = ""
        while not stop():
            answer = self._run(link, "take_schedules", after=after, limit=self._batch)
            self._deliver(link, answer[3:])
            after = answer[2]
            if not after:
                break
        for script, source in (
            *(("take_tasks", "waiting"), ("take_tasks", "delayed")),
            *(("take_runs", "dead"), ("take_runs", "ended")),
        ):
            skip = 0
            while not stop():
                answer = self._run(link, script, source=source, skip=skip, limit=self._batch)
                skip += answer[1] + self._deliver(link, answer[3:])
                if not answer[2]:
                    break

    def _move_counters(self) -> None:
        for link in links_of(self._old):
            self._deliver(link, self._run(link, "take_counters")[3:])

    def _deliver(self, link: Link, flat: Sequence[bytes]) -> int:
        """Store what was set aside in the new queue, and remove it from the old one.

        Returns how many records came back because the new queue refuses them.
        """
        records = [MovingRecord(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
        refused: list[MovingRecord] = []
        for kind in (TASK, SCHEDULE, COUNTERS):  # a schedule finds its tasks
            if mine := [each for each in records if each.kind == kind]:
                refused += self._put(link, kind, mine)
        if self._progress is not None and records:
            self._progress(sum(self._moved.values()))
        return len(refused)

    def _put(self, old: Link, kind: str, records: list[MovingRecord]) -> list[MovingRecord]:
        """Store records of one kind in their partitions, and confirm it; those that are refused."""
        by_part: dict[int, list[MovingRecord]] = {}
        for record in records:
            by_part.setdefault(record.partition(self._new.partitions), []).append(record)
        links = links_of(self._new)
        calls = [(links[i], self._call_to_put(kind, theirs)) for i, theirs in by_part.items()]
        refused: list[MovingRecord] = []
        notes: list[tuple[Link, Call]] = []
        settled: list[bytes] = []
        for i, answer in zip(by_part, self._run_all(calls), strict=True):
            taken = []
            for record, word in zip(by_part[i], answer[1:], strict=True):
                if word == b"refused":
                    refused.append(record)
                    self._refused[f"{record.place} {record.id!r}"] = _reason(kind, self._new.name)
                else:
                    taken.append(record.name)
                    self._count(record, word)
            settled += taken
            notes.append((links[i], self._call_to_settle([b"<" + name for name in taken])))
        # First in the old queue: the notes prove that the new one has the records.
        if settled:
            self._run_all([(old, self._call_to_settle([b">" + name for name in settled]))])
        self._run_all(notes)
        if refused:
            self._run_all([(old, self._call_to_put(kind, refused, back=True))])
        return refused

    def _count(self, record: MovingRecord, word: bytes) -> None:
        if record.kind == COUNTERS:
            return
        self._moved[record.place] += 1
        if word == b"known":
            self._known += 1
            self._known_digest += digest_of(record.name)

    def _call_to_put(
        self, kind: str, records: Sequence[MovingRecord], *, back: bool = False
    ) -> Call:
        if kind == COUNTERS:
            (counters,) = records
            return Call(
                "put_counters", token=self._token, moved=counters.name, record=counters.text
            )
        row = load_script(_PUT[kind]).row
        rest = [each for one in records for each in row(moved=one.name, record=one.text)]
        return Call(_PUT[kind], token=self._token, back="1" if back else "", rest=rest)

    def _call_to_settle(self, fields: Sequence[bytes]) -> Call:
        return Call("settle_repartition", token=self._token, rest=list(fields))

    def _run(self, link: Link, name: str, /, **arguments: Any) -> Any:
        """Run a script with the token. Raises RepartitionError if another process took over."""
        (answer,) = self._run_all([(link, Call(name, token=self._token, **arguments))])
        return answer

    def _run_all(self, calls: Sequence[tuple[Link, Call]]) -> list[Any]:
        """Run scripts of several partitions at the same time. Raises as `_run`."""
        if not calls:
            return []
        first = calls[0][0]
        answers = first.perform(_gathered(calls))
        for answer in answers:
            if b"taken over" in (answer, answer[0] if isinstance(answer, list) else b""):
                raise RepartitionError(
                    f"another process moves queue {shown(self._old.name)} now: it goes on where "
                    "this one was"
                )
        return answers


def _gathered(calls: Sequence[tuple[Link, Call]]) -> Operation[list[Any]]:
    answers: list[Any] = yield Gather([(link, _one(call)) for link, call in calls])
    return answers


def _one(call: Call) -> Operation[Any]:
    return (yield call)


def _reason(kind: str, queue: str) -> str:
    if kind == SCHEDULE:
        return f"queue {queue!r} has another schedule with this id"
    return f"queue {queue!r} has another task with this id, or 100 other pools"


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _leader(text: bytes | None, now_ms: int) -> str | None:
    """The scheduler that leads; None if there is none."""
    try:
        record = json.loads(text or b"")
        return str(record["scheduler"]) if record["ends"] > now_ms else None
    except UNREADABLE:
        return None
