"""Keep the heartbeats of workers in Redis: who is alive, and what each runs."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from fairqueue.clock import from_ms
from fairqueue.connection import Argument, Link
from fairqueue.models import UNREADABLE, new_id
from fairqueue.validation import check_name

BEAT_S = 10.0  # so often a worker says that it is alive
GONE_AFTER_S = 3.5 * BEAT_S  # without a word for so long it counts as gone
MAX_LISTED = 1000  # workers in one answer
MAX_CURRENT = 100  # tasks that a record names


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker that is alive, as it said at its last heartbeat.

    `names` are the tasks it has handlers for, "*" among them if it takes any. `current` are the
    ids of the tasks that it held, a hundred at most, of `running` in all. `draining`: somebody has
    asked it to take no more and end.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleRun:
    """A run that goes on after the time-out of its handler."""

    task_id: str
    user_id: str
    name: str
    worker_id: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a worker learns when it says that it is alive.

    handled: names of tasks that any living worker has handlers for. stale: runs that were found to
    go on after their time-out. gone: workers that ended without a word. drained_by: who asked this
    one to take no more tasks and end, if anybody has.
    """

    handled: frozenset[str]
    stale: list[StaleRun]
    gone: list[str]
    drained_by: str | None = None


class WorkerStore:
    """The workers of one queue."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def beat(
        self,
        info: Mapping[str, object],
        worker_id: str,
        limits: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Beat:
        """Say that a worker is alive; `limits` of its handlers are said once, when it starts.

        Raises InvalidTask for an unusable id.
        """
        return self._beat(info, worker_id, round(GONE_AFTER_S * 1000), limits)

    def leave(self, worker_id: str) -> None:
        """Say that a worker ends."""
        self._beat({}, worker_id, 0, None)

    def _beat(
        self,
        info: Mapping[str, object],
        worker_id: str,
        ttl_ms: int,
        limits: Mapping[str, Mapping[str, float]] | None,
    ) -> Beat:
        check_name(worker_id, "worker_id")  # the field '' is taken
        answer = self._link.run(
            "beat",
            worker=worker_id,
            record=json.dumps({"id": worker_id, **info}, separators=(",", ":"))[:-1],
            ttl_ms=ttl_ms,
            limits="" if limits is None else json.dumps(limits),
        )
        self._link.learn_time(int(answer[0]))
        return Beat(
            handled=frozenset(name.decode("utf-8", "replace") for name in answer[1]),
            stale=read_stale(answer[2]),
            gone=[each.decode("utf-8", "replace") for each in answer[3]],
            drained_by=answer[4].decode("utf-8", "replace") or None,
        )

    def drain(self, worker_id: str, by: str) -> bool:
        """Ask a worker to take no more tasks, finish what it runs, and end; False if none is alive.

        It hears of it with its next heartbeat, which comes every ten seconds. Then it ends as by
        `stop`, without a time-out: `forever` returns, and one of several processes is not replaced.
        Asked again, nothing changes. `by` says who asks, for its log. Raises InvalidTask for an
        unusable id or name.
        """
        check_name(worker_id, "worker_id")
        check_name(by, "by")
        return bool(self._link.run("drain", op=new_id(), worker=worker_id, by=by) == b"asked")

    def find_stale(self, now_ms: int | None = None) -> list[StaleRun]:
        """Runs that go on after their time-out, each reported once to whoever asks first."""
        return read_stale(self._link.run("find_stale", now_ms=now_ms))

    def alive(self) -> list[WorkerInfo]:
        """The workers that are alive, by id; at most a thousand."""
        now_ms = self._link.now_ms()
        ends = self._link.keys["worker_ends"]
        most = ("LIMIT", 0, MAX_LISTED, "WITHSCORES")
        flat = self._link.ask(("ZRANGE", ends, f"({now_ms}", "+inf", "BYSCORE", *most))[0]
        if not flat:
            return []
        ids: list[Argument] = flat[::2]
        records = self._link.ask(("HMGET", self._link.keys["workers"], *ids))[0]
        found = (_info(text, end) for text, end in zip(records, flat[1::2], strict=True))
        return sorted((each for each in found if each), key=lambda info: info.worker_id)


def read_stale(flat: Iterable[bytes]) -> list[StaleRun]:
    """Stale runs as a script returns them."""
    values = list(flat)
    return [
        StaleRun(
            task_id=values[i].decode("utf-8", "replace"),
            user_id=values[i + 1].decode("utf-8", "replace"),
            name=values[i + 2].decode("utf-8", "replace"),
            worker_id=values[i + 3].decode("utf-8", "replace"),
            seconds=int(values[i + 4]) / 1000,
        )
        for i in range(0, len(values), 5)
    ]


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
        )
    except UNREADABLE:
        return None  # somebody has spoilt it; its next heartbeat writes it anew
