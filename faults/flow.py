"""Tasks with tenants, keys and unique keys, and what a storm of them must never show.

The options of a task follow from its id, so producers, workers and the checker know them without
telling each other. Two promises are judged by what the actors saw, not by records of the queue:

    over    more tasks of a key ran at a time than it has slots
    twice   two tasks with the same unique key were unfinished at a time

A run counts from its begin to its end, or to the death of its process, and only while its lease
had certainly not expired: so many milliseconds from when the claim was sent.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fairqueue.queue.queue import TaskQueue
from faults.journal import read_journals

POOLS = ("default", "gpu")
TENANTS = tuple(f"tenant-{n}" for n in range(4))
KEYS = 6
REPORTS = 5  # unique keys of each tenant
PATTERN, SLOTS = "account:*", 2
STRICT = "account:0"  # has one slot
EDGE_MS = 1  # times in journals are rounded


class Flow(NamedTuple):
    """The options of a task."""

    tenant: str
    pool: str
    limit_keys: tuple[str, ...]
    unique: str | None


def flow_of(task_id: str) -> Flow:
    """Return the options of a task: most have a key, some have two, some are unique.

    The tasks of schedules have none.
    """
    if ":" in task_id:
        return Flow("", POOLS[0], (), None)
    lot = zlib.crc32(f"flow {task_id}".encode())
    lot, tenant = divmod(lot, len(TENANTS))
    lot, key = divmod(lot, KEYS)
    lot, report = divmod(lot, REPORTS)
    lot, kind = divmod(lot, 10)
    keys = {f"account:{key}"} if kind < 8 else set()
    keys |= {f"account:{lot % KEYS}"} if kind < 2 else set()
    unique = f"report:{report}" if kind in (1, 4, 9) else None
    pool = POOLS[lot % 5 == 0]
    return Flow(TENANTS[tenant], pool, tuple(sorted(keys)), unique)


def set_limits(queue: TaskQueue) -> None:
    """Limit how many tasks of each key may run."""
    queue.set_limit(PATTERN, slots=SLOTS)
    queue.set_limit(STRICT, slots=1)


def slots_of(key: str) -> int:
    """How many tasks of a key may run at a time."""
    return 1 if key == STRICT else SLOTS


class Span(NamedTuple):
    """A stretch of time in which something was certainly so, in ms."""

    task_id: str
    first: float
    last: float


@dataclass
class Evidence:
    """What the journals tell about runs and unique tasks."""

    lease_ms: int
    runs: list[Span] = field(default_factory=list)
    stored: dict[str, int] = field(default_factory=dict)  # since when at the latest
    ignored: dict[str, str] = field(default_factory=dict)  # the task that had the key
    _sent: dict[tuple[str, str], int] = field(default_factory=dict)
    _open: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, lease_ms: int) -> "Evidence":
        """Read all journals of a folder."""
        evidence = cls(lease_ms)
        killed: dict[str, int] = {}
        for actor, (kind, *fields) in read_journals(folder):
            if kind == "killed":
                killed[fields[0]] = fields[1]
            elif kind in ("held", "run", "left", "uniques"):
                getattr(evidence, f"_{kind}")(actor, *fields)
        for (actor, task_id), began in evidence._open.items():
            if actor in killed:
                evidence._note_run(actor, task_id, began, killed[actor])
        return evidence

    def _held(self, actor: str, at_ms: int, tasks: list[tuple[str, int]], sent_ms: int) -> None:
        for task_id, _ in tasks:
            self._sent[actor, task_id] = sent_ms

    def _run(self, actor: str, task_id: str, user: str, at: float, late: float | None) -> None:
        self._open[actor, task_id] = at * 1000

    def _left(self, actor: str, task_id: str, at_ms: int) -> None:
        began = self._open.pop((actor, task_id), None)
        if began is not None:
            self._note_run(actor, task_id, began, at_ms)

    def _uniques(self, actor: str, at_ms: int, answers: Mapping[str, str]) -> None:
        for task_id, answer in answers.items():
            if answer == task_id:
                self.stored.setdefault(task_id, at_ms)
            else:
                self.ignored[task_id] = answer

    def _note_run(self, actor: str, task_id: str, began: float, ended: float) -> None:
        sent_ms = self._sent.get((actor, task_id))
        if sent_ms is not None:
            self.runs.append(Span(task_id, began, min(ended, sent_ms + self.lease_ms)))

    def over(self) -> set[str]:
        """Return keys of which more tasks ran at a time than they have slots."""
        by_key: dict[str, list[Span]] = defaultdict(list)
        for run in self.runs:
            for key in flow_of(run.task_id).limit_keys:
                by_key[key].append(run)
        return {
            f"{len(found)} of {key} at once: {', '.join(sorted(found))}"
            for key, runs in by_key.items()
            for found in _crowds(runs, slots_of(key))
        }

    def twice(self) -> set[str]:
        """Return unique keys of which two tasks were unfinished at a time."""
        seen: dict[str, Span] = {}
        for run in self.runs:
            before = seen.get(run.task_id, Span(run.task_id, run.first, run.first))
            first = min(before.first, run.first, self.stored.get(run.task_id, run.first))
            seen[run.task_id] = Span(run.task_id, first, max(before.last, run.last))
        by_key: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for task_id, span in seen.items():
            flow = flow_of(task_id)
            if flow.unique is not None:
                by_key[flow.tenant, flow.unique].append(span)
        return {
            f"{key} of {tenant} has {' and '.join(sorted(found))}"
            for (tenant, key), spans in by_key.items()
            for found in _crowds(spans, 1)
        }

    def wrong_answers(self) -> set[str]:
        """Return pushes that were answered with a task of another key."""
        return {
            f"{task_id} was answered with {other}"
            for task_id, other in self.ignored.items()
            if flow_of(task_id)[::3] != flow_of(other)[::3]
        }


def _crowds(spans: Iterable[Span], most: int) -> Iterator[set[str]]:
    """Groups of more than so many spans that have a moment in common."""
    events: list[tuple[float, int, str]] = []
    for span in spans:
        if span.last - span.first > 2 * EDGE_MS:
            events.append((span.first + EDGE_MS, 1, span.task_id))
            events.append((span.last - EDGE_MS, 0, span.task_id))
    there: list[str] = []
    for _, begins, task_id in sorted(events):
        if begins:
            there.append(task_id)
            if len(there) > most:
                yield set(there)
        else:
            there.remove(task_id)


def options_of(task_id: str) -> dict[str, Any]:
    """Return the options of a task as `Task.create` takes them."""
    flow = flow_of(task_id)
    return {name: value for name, value in flow._asdict().items() if value}
