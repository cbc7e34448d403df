"""The heartbeats of workers in Redis: which workers are alive, and what each one runs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.flow_options import DEFAULT_POOL
from fairqueue.link.connection import Link
from fairqueue.link.operation import Argument, Ask, Call, Now, Operation, operation, steps
from fairqueue.link.partitions import Partitioned, over_all
from fairqueue.models import UNREADABLE, new_id
from fairqueue.validation import check_name

BEAT_S = 10.0  # seconds between two heartbeats of a worker
GONE_AFTER_S = 3.5 * BEAT_S  # without a heartbeat for this long, a worker counts as gone
MAX_LISTED = 1000  # workers in one answer
ANY = "*"  # any name: the worker has a default handler
MAX_CURRENT = 25  # task ids in one record: a heartbeat may read the records of 1,000 workers


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A live worker, as of its last heartbeat.

    `names` are the tasks that it has handlers for, with "*" if it takes any name. `current` are the
    ids of the first 25 tasks that it holds, the longest held first; `running` counts all of them.
    `draining`: it was asked to take no more tasks and to stop. `pools`: those that it serves.
    """

    worker_id: str
    host: str
    pid: int
    version: str
    slots: int
    names: tuple[str, ...]
    current: tuple[str, ...]
    running: int
    started_at: datetime
    seen_at: datetime
    gone_at: datetime
    draining: bool = False
    pools: tuple[str, ...] = (DEFAULT_POOL,)
    # Where its HTTP tasks may go, by task name: see HttpTasks.
    http: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleRun:
    """A run that went on for a lease after its time-out or its cancellation.

    Its task was ended; the run itself may go on in its worker.
    """

    task_id: str
    user_id: str
    name: str
    worker_id: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRun:
    """A run whose worker sends no heartbeats, or did not extend its lease.

    lease_ends: from when on another worker may take the task. is_heard: whether the worker still
    sends heartbeats.
    """

    lease_ends: datetime
    is_heard: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A task that was ended without its worker, to be reported by an alert.

    outcome: "expired" (its last lease was not extended), "timed_out" or "cancelled" (it went on for
    a lease after it had to end). seconds: since it was claimed. text: identifies the notice in
    Redis; pass it as `heard` once it was reported.
    """

    task_id: str
    user_id: str
    name: str
    schedule_id: str | None
    worker_id: str
    attempt: int
    outcome: str
    seconds: float
    error: str
    text: bytes

    @property
    def stale_run(self) -> StaleRun | None:
        """The run that went on, if it did."""
        if self.outcome == "expired":
            return None
        return StaleRun(
            task_id=self.task_id,
            user_id=self.user_id,
            name=self.name,
            worker_id=self.worker_id,
            seconds=self.seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The answer to a heartbeat.

    handled: task names that some live worker of the same pools has handlers for. notices: tasks
    that were ended without their workers. gone: workers that vanished. drained_by: who asked this
    worker to take no more tasks and to stop, or None. partitions: how many of them it reached.
    """

    handled: frozenset[str]
    notices: list[Notice]
    gone: list[str]
    drained_by: str | None = None
    partitions: int = 1


def _merge_beats(beats: Sequence[Beat]) -> Beat:
    return Beat(
        handled=frozenset().union(*(beat.handled for beat in beats)),
        notices=[notice for beat in beats for notice in beat.notices],
        gone=list(dict.fromkeys(worker for beat in beats for worker in beat.gone)),
        drained_by=next((beat.drained_by for beat in beats if beat.drained_by), None),
        partitions=sum(beat.partitions for beat in beats),
    )


def _merge_lost(found: Sequence[Mapping[str, LostRun]]) -> dict[str, LostRun]:
    return {task_id: run for each in found for task_id, run in each.items()}


def _merge_workers(found: Sequence[Sequence[WorkerInfo]]) -> list[WorkerInfo]:
    """Each worker once, as of the last heartbeat that a partition got."""
    latest: dict[str, WorkerInfo] = {}
    for worker in sorted((each for part in found for each in part), key=lambda info: info.seen_at):
        latest[worker.worker_id] = worker
    return [latest[worker_id] for worker_id in sorted(latest)]


class WorkerStore(Partitioned):
    """The workers of one queue."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @operation
    @over_all(_merge_beats, tolerant=True)
    def beat(
        self,
        info: Mapping[str, object],
        worker_id: str,
        limits: Mapping[str, Mapping[str, float]] | None = None,
        *,
        can_alert: bool = False,
        heard: Sequence[bytes] = (),
    ) -> Operation[Beat]:
        """Record a heartbeat of a worker; `limits` of its handlers are passed once, when it starts.

        Also ends runs that do not answer: see `look_over`, also for `can_alert` and `heard`. Raises
        InvalidTask for a bad id.
        """
        ttl_ms = round(GONE_AFTER_S * 1000)
        return (
            yield from self._beat(info, worker_id, ttl_ms, limits, can_alert=can_alert, heard=heard)
        )

    @operation
    @over_all(lambda _: None, tolerant=True)
    def leave(self, worker_id: str, heard: Sequence[bytes] = ()) -> Operation[None]:
        """Remove a worker that stops; `heard` are the notices that it has reported."""
        yield from self._beat({}, worker_id, 0, None, heard=heard)

    def _beat(
        self,
        info: Mapping[str, object],
        worker_id: str,
        ttl_ms: int,
        limits: Mapping[str, Mapping[str, float]] | None,
        *,
        can_alert: bool = False,
        heard: Sequence[bytes] = (),
    ) -> Operation[Beat]:
        check_name(worker_id, "worker_id")  # the field '' is taken
        answer = yield Call(
            "heartbeat",
            worker=worker_id,
            record=json.dumps({"id": worker_id, **info}, separators=(",", ":"))[:-1],
            ttl_ms=ttl_ms,
            limits="" if limits is None else json.dumps(limits),
            can_alert="1" if can_alert else "",
            rest=heard,
        )
        self.link.learn_time(int(answer[0]))
        return Beat(
            handled=frozenset(name.decode("utf-8", "replace") for name in answer[1]),
            notices=_notices(answer[2]),
            gone=[each.decode("utf-8", "replace") for each in answer[3]],
            drained_by=answer[4].decode("utf-8", "replace") or None,
        )

    @operation
    @over_all(any)
    def drain(self, worker_id: str, by: str) -> Operation[bool]:
        """Ask a worker to take no more tasks, finish its runs and stop; False if it is not alive.

        It learns of it with its next heartbeat, within ten seconds. Then it stops as by `stop`
        without a time-out: `forever` returns, and one of several processes is not replaced. Asking
        again changes nothing. `by` says who asks, for its log. Raises InvalidTask for a bad id or
        name.
        """
        check_name(worker_id, "worker_id")
        check_name(by, "by")
        word = yield Call("drain", op=new_id(), worker=worker_id, by=by)
        return bool(word == b"asked")

    @operation
    @over_all(lambda found: [run for each in found for run in each])
    def find_stale(self, now_ms: int | None = None) -> Operation[list[StaleRun]]:
        """Runs that went on after they had to end; each is returned to the first caller only.

        Ends those that are found now, as `look_over` does. Callers that can send alerts still get
        their notices.
        """
        notices = yield from steps(self.look_over)(now_ms)
        return [run for each in notices if (run := each.stale_run) is not None]

    @operation
    @over_all(lambda found: [notice for each in found for notice in each])
    def look_over(
        self, now_ms: int | None = None, *, can_alert: bool = False, heard: Sequence[bytes] = ()
    ) -> Operation[list[Notice]]:
        """End runs that do not answer, take back expired leases, and return notices for alerts.

        With `can_alert`, a notice is returned again half a minute later, to the next caller, until
        its text is passed as `heard`; without, each is returned once, for a log. Returns at most a
        hundred, and none older than an hour.
        """
        answer = yield Call(
            "find_stale", now_ms=now_ms, can_alert="1" if can_alert else "", rest=heard
        )
        return _notices(answer)

    @operation
    @over_all(_merge_lost)
    def lost(self, workers: Mapping[str, str]) -> Operation[dict[str, LostRun]]:
        """The running tasks whose worker is gone or whose lease is over.

        `workers`: task id -> the worker that holds it. A process that calls `claim` itself sends no
        heartbeats, so its runs are among them.
        """
        if not workers:
            return {}
        now_ms = yield Now()
        ends, leases = yield Ask(
            ("ZMSCORE", self.link.keys["worker_ends"], *workers.values()),
            ("ZMSCORE", self.link.keys["leases"], *workers),
        )
        found = {}
        for task_id, gone, lease in zip(workers, ends, leases, strict=True):
            if lease is None:
                continue  # it ended meanwhile
            is_heard = gone is not None and float(gone) > now_ms
            if not is_heard or float(lease) <= now_ms:
                lease_ends = from_ms(int(float(lease)))
                found[task_id] = LostRun(lease_ends=lease_ends, is_heard=is_heard)
        return found

    @operation
    @over_all(any)
    def is_anybody_there(self) -> Operation[bool]:
        """Whether a worker is alive, or a process that calls `claim` itself.

        The latter sends no heartbeats: it counts as alive while it holds a lease, unless the lease
        may be that of a worker that is gone.
        """
        ends, leases = self.link.keys["worker_ends"], self.link.keys["leases"]
        now_ms = yield Now()
        alive, gone, held = yield Ask(
            ("ZCOUNT", ends, f"({now_ms}", "+inf"),
            ("ZCOUNT", ends, "-inf", now_ms),
            ("ZCOUNT", leases, f"({now_ms}", "+inf"),
        )
        return bool(alive) or (bool(held) and not gone)

    @operation
    @over_all(_merge_workers)
    def alive(self, timeout: float | None = None) -> Operation[list[WorkerInfo]]:
        """The live workers, ordered by id; at most a thousand."""
        now_ms = yield Now()
        ends = self.link.keys["worker_ends"]
        most = ("LIMIT", 0, MAX_LISTED, "WITHSCORES")
        asked = Ask(("ZRANGE", ends, f"({now_ms}", "+inf", "BYSCORE", *most), timeout=timeout)
        flat = (yield asked)[0]
        if not flat:
            return []
        ids: list[Argument] = flat[::2]
        records = (yield Ask(("HMGET", self.link.keys["workers"], *ids), timeout=timeout))[0]
        found = (_info(text, end) for text, end in zip(records, flat[1::2], strict=True))
        return sorted((each for each in found if each), key=lambda info: info.worker_id)


def _notices(texts: Iterable[bytes]) -> list[Notice]:
    """Parse the notices that a script returns; malformed ones are skipped."""
    found = []
    for text in texts:
        fields = text.decode("utf-8", "replace").split("\0")
        try:
            task_id, user_id, name, schedule, worker_id, attempt, outcome, ms, _, error = fields
            notice = Notice(
                task_id=task_id,
                user_id=user_id,
                name=name,
                schedule_id=schedule or None,
                worker_id=worker_id,
                attempt=int(attempt),
                outcome=outcome,
                seconds=int(ms) / 1000,
                error=error,
                text=text,
            )
        except ValueError:
            continue
        found.append(notice)
    return found


def _policies(said: object) -> dict[str, Mapping[str, Any]]:
    if not isinstance(said, dict):
        return {}
    return {name: policy for name, policy in said.items() if isinstance(policy, dict)}


def _info(text: bytes | None, end: bytes) -> WorkerInfo | None:
    try:
        record = json.loads(text or b"")
        return WorkerInfo(
            worker_id=str(record["id"]),
            host=str(record["host"]),
            pid=int(record["pid"]),
            version=str(record["version"]),
            slots=int(record["slots"]),
            names=tuple(map(str, record["names"])),
            current=tuple(map(str, record["current"])),
            running=int(record["running"]),
            started_at=from_ms(int(record["started"])),
            seen_at=from_ms(int(record["seen"])),
            gone_at=from_ms(int(float(end))),
            draining=isinstance(record.get("drain"), str),
            pools=tuple(map(str, record.get("pools") or (DEFAULT_POOL,))),
            http=_policies(record.get("http")),
        )
    except UNREADABLE:
        return None  # damaged; the next heartbeat writes it again
