"""Examine a queue and its Redis, and repair indexes and counts that do not match the records.

The doctor asks Redis about itself, and the queue about its leader, its workers and its delays. It
compares every index and count with the records, in small steps, while the queue is in use. A script
decides atomically whether an entry is wrong, so that concurrent work is not reported.
"""

from collections.abc import Sequence
from typing import Any, Self

from fairqueue.doctor.findings import (
    BATCH,
    OK,
    PROBLEM,
    WARNING,
    Finding,
    Progress,
    in_batches,
    no_progress,
)
from fairqueue.doctor.records import Records
from fairqueue.doctor.server import ServerChecks
from fairqueue.errors import RedisRefused, RedisUnavailable, plural
from fairqueue.link.keys import command_line
from fairqueue.link.operation import Ask, Operation, operation, steps
from fairqueue.link.partitions import (
    Missing,
    Partitioned,
    at_part,
    everywhere,
    tolerate_missing,
    whole,
)
from fairqueue.models import QueueSnapshot
from fairqueue.queue.pools import pool_infos
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerInfo, WorkerStore
from fairqueue.schedules.store import ScheduleStore

OVERDUE_S = 60.0  # a schedule that is later than this is stuck
HISTORY_BYTES = 2**30  # memory of ended runs above which the doctor warns
HISTORY_SHARE = 0.5  # the same as a part of maxmemory, if that is less
HISTORY_SAMPLE = 100  # runs whose size is measured
RUN_BYTES = 450  # memory of a run besides its texts: its entries in the indexes


class Doctor(Partitioned):
    """Examines one queue."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue
        self.link = queue.link

    def _twin(self, part: Any) -> Self:
        twin = super()._twin(part)
        twin._queue = self._queue.at(part)
        return twin

    @operation
    @whole
    def examine(
        self, *, fix: bool = False, records: bool = True, progress: Progress = no_progress
    ) -> Operation[list[Finding]]:
        """Return the findings of all checks. `fix` repairs inconsistent entries.

        `records`: whether to compare all entries, which takes long if there are many. `progress`
        is called with the number of entries compared so far. A partition that does not answer is a
        finding, and the others are examined. Raises RedisUnavailable if none answers, and
        RedisRefused if Redis does not accept the connection.
        """
        with tolerate_missing() as missing:
            found, maxmemory = yield from self._check_servers()
            found += yield from self._check_queue(maxmemory)
            if records:
                found += yield from self._check_records(fix, progress)
            return found + _check_partitions(len(self.link.parts), missing)

    def _check_servers(self) -> Operation[tuple[list[Finding], int]]:
        """Return the findings about each server of the queue, and the sum of their maxmemory."""
        nodes: dict[Any, Any] = {}
        for twin in self.twins():
            nodes.setdefault(twin.link.node if self.link.parts else None, twin)
        found: list[Finding] = []
        maxmemory = 0
        for node, twin in nodes.items():
            checks = ServerChecks(twin.link)
            try:
                findings = yield from at_part(twin, checks.findings())
            except RedisUnavailable as error:
                if len(nodes) == 1:
                    raise
                text = f"does not answer: {error}"
                findings = [Finding("server", PROBLEM, text)]
            maxmemory += checks.max_memory
            found += findings if len(nodes) == 1 else [each.of_node(node) for each in findings]
        return found, maxmemory

    def _check_queue(self, maxmemory: int) -> Operation[list[Finding]]:
        try:
            snapshot = yield from steps(self._queue.inspect)()
        except RedisRefused as error:
            return [Finding("queue", PROBLEM, str(error))]
        workers = yield from steps(WorkerStore(self.link).alive)()
        return [
            _check_leader(snapshot, self._queue.name),
            *(yield from self._check_schedules(snapshot)),
            (yield from self._check_workers(snapshot, workers)),
            (yield from self._check_stale_runs([i.encode() for w in workers for i in w.current])),
            (yield from self._check_history(maxmemory)),
            *(yield from self._check_move(snapshot)),
        ]

    def _check_records(self, fix: bool, progress: Progress) -> Operation[list[Finding]]:
        try:
            return (yield from steps(Records(self.link, fix=fix, progress=progress).compare)())
        except RedisRefused as error:  # no writes now; the other findings still count
            return [Finding("records", PROBLEM, f"the entries could not be compared: {error}")]

    # --- the queue --------------------------------------------------------------------------------

    def _check_schedules(self, snapshot: QueueSnapshot) -> Operation[list[Finding]]:
        found: list[Finding] = []
        problems = []
        if snapshot.set_aside:
            problems = yield from steps(ScheduleStore(self.link).problems)()
        if problems:
            reasons = [f"{each.schedule_id}: {each.reason}" for each in problems]
            aside = plural(snapshot.set_aside, "schedule was", "schedules were")
            text = f"{aside} set aside, such as {reasons[0]}"
            found.append(Finding("schedules", WARNING, text, {"set_aside": reasons[:100]}))
        if snapshot.overdue > OVERDUE_S:
            text = f"a schedule is {snapshot.overdue:.0f} s overdue: no scheduler fires it"
            found.append(Finding("overdue", PROBLEM, text, {"overdue": snapshot.overdue}))
        text = f"{snapshot.active_schedules} of {snapshot.schedules} are active, none is late"
        return found or [Finding("schedules", OK, text)]

    def _check_workers(
        self, snapshot: QueueSnapshot, workers: Sequence[WorkerInfo]
    ) -> Operation[Finding]:
        details = {"workers": len(workers), "waiting": snapshot.ready}
        if snapshot.ready:
            is_anybody_there = yield from steps(WorkerStore(self.link).is_anybody_there)()
            if not is_anybody_there:
                waits = plural(snapshot.ready, "task waits", "tasks wait")
                start = command_line("fairqueue worker --app tasks", self._queue.name)
                text = f"{waits} and no worker is alive: {start}"
                return Finding("workers", PROBLEM, text, details)
        unserved = [pool for pool in pool_infos(snapshot, workers) if pool.is_unserved]
        if unserved:
            waiting = {pool.pool: pool.waiting for pool in unserved}
            shown = ", ".join(f"{name!r} ({count})" for name, count in waiting.items())
            text = f"tasks wait in pools that no live worker serves: {shown:.300}"
            return Finding("workers", WARNING, text, details | {"unserved": waiting})
        slots = plural(sum(worker.slots for worker in workers), "slot")
        text = f"{plural(len(workers), 'worker is', 'workers are')} alive, with {slots}"
        return Finding("workers", OK, text, details)

    def _check_stale_runs(self, current: list[bytes]) -> Operation[Finding]:
        """Look for runs that workers still have although their tasks were ended."""
        parts = yield from everywhere(self, lambda twin: twin._stale(current))
        stale = [task_id for part in parts for task_id in part]
        if stale:
            many = plural(len(stale), "slot is", "slots are")
            text = f"{many} taken by runs that do not end, such as {stale[0]}"
            return Finding("stale runs", WARNING, text, {"stale": stale[:100]})
        return Finding("stale runs", OK, "no run continues after its task was ended")

    def _stale(self, current: list[bytes]) -> Operation[list[str]]:
        stale = []
        for ids in in_batches(current, BATCH):
            texts = (yield Ask(("HMGET", self.link.keys["status"], *ids)))[0]
            for task_id, text in zip(ids, texts, strict=True):
                if b'"stale":' in (text or b""):
                    stale.append(task_id.decode(errors="replace"))
        return stale

    def _check_history(self, maxmemory: int) -> Operation[Finding]:
        """Estimate the memory of the ended runs from a sample of each partition."""
        parts = yield from everywhere(self, lambda twin: twin._history())
        runs, used = (sum(each) for each in zip(*parts, strict=True))
        most = min(HISTORY_BYTES, maxmemory * HISTORY_SHARE) if maxmemory else HISTORY_BYTES
        details = {"runs": runs, "bytes": round(used)}
        text = f"{runs:,} ended runs are kept and use about {used / 2**20:,.0f} MiB"
        if used <= most:
            return Finding("history", OK, text, details)
        advice = "lower keep_finished, keep_dead or the times to keep them"
        text += f", more than {most / 2**20:,.0f} MiB: {advice}"
        return Finding("history", WARNING, text, details)

    def _check_move(self, snapshot: QueueSnapshot) -> Operation[list[Finding]]:
        """Look for what `fairqueue repartition` has left behind, if the queue was moved."""
        parts = yield from everywhere(self, lambda twin: twin._move())
        others = [other for other, _ in parts if other]
        if not others:
            return []
        moving, waiting = sum(count for _, count in parts), snapshot.ready + snapshot.delayed
        details = {"to": others[0], "moving": moving, "waiting": waiting}
        if not moving and not waiting:
            return [Finding("repartition", OK, f"the queue was moved to {others[0]}", details)]
        text = (
            f"the queue was moved to {others[0]}, but {plural(waiting, 'task waits', 'tasks wait')}"
            f" here and {plural(moving, 'record is', 'records are')} on the way: repeat `fairqueue "
            "repartition` with --drain"
        )
        return [Finding("repartition", WARNING, text, details)]

    def _move(self) -> Operation[tuple[str, int]]:
        """Return the queue to which a partition was moved, if any, and how much is on the way."""
        key = self.link.keys["repartition"]
        (found,) = yield Ask(("HGETALL", key))
        fields = (
            found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
        )
        role, _, rest = fields.get(b"", b"").decode(errors="replace").partition("\0")
        if role != "from":
            return "", 0
        return rest.rpartition("\0")[2], sum(name.startswith(b">") for name in found)

    def _history(self) -> Operation[tuple[int, float]]:
        """Return the number of ended runs of one partition, and their size."""
        keys = self.link.keys
        kept = yield Ask(("ZCARD", keys["ended"]), ("ZCARD", keys["dead"]))
        used = 0.0
        for name, count in zip(("ended", "dead"), kept, strict=True):
            if count:
                used += count * (yield from self._bytes_of_one(name))
        return sum(kept), used

    def _bytes_of_one(self, name: str) -> Operation[float]:
        """Return the mean size of a kept run in a sample."""
        keys = self.link.keys
        ids = (yield Ask(("ZRANDMEMBER", keys[name], HISTORY_SAMPLE)))[0]
        if not ids:
            return 0.0
        places = ("tasks", "status", "attempts")
        sizes = yield Ask(*(("HSTRLEN", keys[place], i) for place in places for i in ids))
        return RUN_BYTES + sum(map(int, sizes)) / len(ids)


def _check_leader(snapshot: QueueSnapshot, queue: str) -> Finding:
    start = command_line("fairqueue scheduler", queue)
    if snapshot.parts:
        return _check_leaders(snapshot, start)
    until = snapshot.leader_until
    if snapshot.leader is not None and until is not None and until > snapshot.at:
        left = (until - snapshot.at).total_seconds()
        text = f"{snapshot.leader} leads for another {left:.1f} s; term {snapshot.epoch}"
        return Finding("leader", OK, text, {"seconds_left": left})
    if snapshot.active_schedules:
        return Finding("leader", PROBLEM, f"no scheduler leads, so schedules do not fire: {start}")
    return Finding("leader", OK, "no scheduler leads, and no schedule is active")


def _check_leaders(snapshot: QueueSnapshot, start: str) -> Finding:
    """Check that each partition with active schedules has a leader."""
    leaders = snapshot.leaders
    details = {"leaders": leaders}
    idle = [
        part.partition
        for part in snapshot.parts
        if leaders[part.partition] is None and part.active_schedules
    ]
    if idle:
        many = "partition" if len(idle) == 1 else "partitions"
        which = ", ".join(map(str, idle))
        text = f"no scheduler leads {many} {which:.100}, so schedules do not fire: {start}"
        return Finding("leader", PROBLEM, text, details)
    names = {name for name in leaders.values() if name is not None}
    led = sum(name is not None for name in leaders.values())
    if not names:
        return Finding("leader", OK, "no scheduler leads, and no schedule is active", details)
    text = f"{plural(len(names), 'scheduler leads', 'schedulers lead')} "
    text += plural(led, "partition", "partitions")
    return Finding("leader", OK, text, details)


def _check_partitions(count: int, missing: Missing) -> list[Finding]:
    if not count:
        return []
    if not missing:
        return [Finding("partitions", OK, f"all {count} partitions answer")]
    return [
        Finding(
            "partitions",
            PROBLEM,
            f"partition {number} was not examined: {why}",
            {"partition": number},
        )
        for number, why in sorted(missing.partitions.items())
    ]
