"""Read each partition of a queue and the nodes that hold them: where they are, and what they do."""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from fairqueue.errors import FairQueueError, RedisRefused
from fairqueue.link.connection import Link
from fairqueue.link.info import parse_info
from fairqueue.link.operation import Ask, Call, Gather, Operation, Together, operation
from fairqueue.link.owners import Owner
from fairqueue.link.partitions import Partitioned, whole
from fairqueue.models import QueueSnapshot
from fairqueue.queue.snapshot import snapshot

ANSWER_S = 2.0  # how long a partition may take before it counts as missing
LEAST_APART_S, MOST_APART_S = 0.5, 120.0  # between two readings that rates are made of
LOOKED_INTO = 3  # partitions whose biggest group is looked for: those with most waiting tasks
GROUPS = 100  # tenants, and users without one, whose backlogs are compared
UNKNOWN = "unknown"  # the node of a partition of which nothing was heard yet
MEMORY_SAMPLES = 5  # elements of a key that MEMORY USAGE looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInfo:
    """The state of one partition.

    slot: of a cluster. node: the server that has it, host:port. error: why it does not answer; the
    values below are None then. clock: the virtual time of the default pool, which claims compare:
    they serve where it is lowest; None if nothing waits. ready: tasks that wait for a worker,
    `held` of them for room in a limit. leader: the scheduler that leads it, None if nobody does.
    pushed, claimed: tasks per second since the previous reading of this process; None without one.
    memory: bytes, if that was asked for.
    """

    partition: int
    slot: int
    node: str
    error: str | None = None
    clock: float | None = None
    ready: int | None = None
    delayed: int | None = None
    running: int | None = None
    held: int | None = None
    dead: int | None = None
    oldest_wait: float | None = None
    schedules: int | None = None
    active_schedules: int | None = None
    leader: str | None = None
    leader_until: datetime | None = None
    pushed: float | None = None
    claimed: float | None = None
    memory: int | None = None

    @property
    def rate(self) -> float:
        """Tasks pushed and claimed per second, as far as that is known."""
        return (self.pushed or 0.0) + (self.claimed or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """A server that holds partitions, and its load.

    commands: per second. cpu: the part of one core that its main thread used since the previous
    reading; None without one. `migrates`: how it moves a slot: "source" (Valkey 9: the command goes
    to the node that has it), "target" (Redis 8.4: to the one that gets it), or "" (step by step).
    """

    node: str
    partitions: tuple[int, ...]
    error: str | None = None
    server: str | None = None
    used_memory: int | None = None
    max_memory: int | None = None
    commands: float | None = None
    cpu: float | None = None
    migrates: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BiggestGroup:
    """The tenant, or the user without one, that has most of the waiting tasks of a partition.

    share: its part of them, from 0 to 1.
    """

    tenant: str | None
    user_id: str | None
    waiting: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionReading:
    """All partitions of a queue and their nodes. biggest: of the partitions with most tasks."""

    partitions: list[PartitionInfo]
    nodes: list[NodeInfo]
    biggest: dict[int, BiggestGroup]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one partition answered."""

    counts: QueueSnapshot
    clock: float | None
    info: Mapping[str, str]
    memory: int | None


@dataclass(frozen=True, slots=True)
class _Earlier:
    """A reading that rates are computed from: counts by partition, processor time by node.

    at: when it was, or how many seconds ago.
    """

    at: float
    counts: Mapping[int, QueueSnapshot]
    cpu: Mapping[str, float]


def node_of(link: Link) -> str:
    """The server that a link leads to, for people: host:port, or the path of its socket."""
    return link.node or UNKNOWN


class PartitionStore(Partitioned):
    """The partitions of one queue. May be used by many threads."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._lock = threading.Lock()
        self._readings: list[_Earlier] = []  # the newest, and one before that

    @operation
    @whole
    def read(self, *, memory: bool = False) -> Operation[PartitionReading]:
        """Read all partitions at the same time; those that do not answer say why.

        memory: also what their keys use, which takes a command for each key.
        """
        parts = self.link.parts or (self.link,)
        firsts = _one_of_each_node(parts)  # they ask for INFO
        answers = yield Gather(
            [
                (part, self.at(part)._read_part(info=number in firsts, memory=memory))
                for number, part in enumerate(parts)
            ],
            partial=True,
        )
        nodes = [node_of(part) for part in parts]
        found: dict[int, _Part] = {}
        rows = []
        for number, (part, answer) in enumerate(zip(parts, answers, strict=True)):
            if isinstance(answer, Exception) and not isinstance(answer, FairQueueError):
                raise answer
            row = PartitionInfo(partition=number, slot=part.keys.slot, node=nodes[number])
            if isinstance(answer, FairQueueError):
                rows.append(replace(row, error=str(answer)))
            else:
                found[number] = answer
                rows.append(row)
        earlier = self._earlier(found, nodes)
        rows = [
            _filled(row, found[row.partition], earlier) if row.partition in found else row
            for row in rows
        ]
        biggest = yield from self._biggest(rows)
        return PartitionReading(
            partitions=rows, nodes=_nodes(rows, found, earlier), biggest=biggest
        )

    def _read_part(self, *, info: bool, memory: bool) -> Operation[_Part]:
        answer = yield Call("queue_stats", sample=0, timeout=ANSWER_S)
        _, _, levels = yield Call("peek", pools="", timeout=ANSWER_S)
        level = levels.partition(b" ")[0]  # see level.text in lua/lib/level.lua
        fields: Mapping[str, str] = {}
        used = None
        if info:
            with suppress(RedisRefused):  # not permitted
                fields = parse_info((yield Ask(("INFO",), timeout=ANSWER_S))[0])
        if memory:
            with suppress(RedisRefused):
                used = yield from self._memory()
        return _Part(
            counts=snapshot(answer, self.link.keys.partition),
            clock=None if level.startswith(b"=") else float(level.removeprefix(b"~")),
            info=fields,
            memory=used,
        )

    def _memory(self) -> Operation[int]:
        sizes = yield Ask(
            *(("MEMORY", "USAGE", key, "SAMPLES", MEMORY_SAMPLES) for key in self.link.keys.all()),
            timeout=ANSWER_S,
        )
        return sum(int(size) for size in sizes if size is not None)

    def _earlier(self, found: Mapping[int, _Part], nodes: Sequence[str]) -> _Earlier | None:
        """Note a reading, and return the one that it is compared with, if any."""
        now = _Earlier(
            time.monotonic(),
            {number: part.counts for number, part in found.items()},
            {
                nodes[number]: seconds
                for number, part in found.items()
                if (seconds := _processor_s(part.info)) is not None
            },
        )
        with self._lock:
            for i, reading in enumerate(self._readings):
                if LEAST_APART_S <= now.at - reading.at <= MOST_APART_S:
                    self._readings = [now, reading] if i == 0 else self._readings
                    return replace(reading, at=now.at - reading.at)
            if not self._readings or now.at - self._readings[0].at > MOST_APART_S:
                self._readings = [now]
        return None

    def _biggest(self, rows: Sequence[PartitionInfo]) -> Operation[dict[int, BiggestGroup]]:
        """The biggest group of the partitions with most waiting tasks."""
        fullest = sorted((row for row in rows if row.ready), key=lambda row: -(row.ready or 0))
        chosen = [(row.partition, row.ready or 0) for row in fullest[:LOOKED_INTO]]
        twins = self.twins()
        answers = yield Gather(
            [(twins[number].link, twins[number]._biggest_of(ready)) for number, ready in chosen],
            partial=True,
        )
        return {
            number: answer
            for (number, _), answer in zip(chosen, answers, strict=True)
            if isinstance(answer, BiggestGroup)
        }

    def _biggest_of(self, ready: int) -> Operation[BiggestGroup | None]:
        """The tenant or the user without one that has most waiting tasks, among some of them."""
        calls = (Call("active_users", limit=GROUPS, tenant="", whole=flag) for flag in (1, 0))
        tenants, users = yield Together(*calls)
        keys = [*tenants[:GROUPS], *(key for key in users[:GROUPS] if not key.startswith(b"\2"))]
        if not keys:
            return None
        flat = yield Call("backlogs", rest=keys)
        waiting = [int(count) for count in flat[::2]]
        most = max(waiting)
        owner = Owner.of_key(keys[waiting.index(most)].decode("utf-8", "replace"))
        return BiggestGroup(
            tenant=owner.tenant,
            user_id=None if owner.is_tenant else owner.user_id,
            waiting=most,
            share=min(1.0, most / ready),
        )


def _one_of_each_node(parts: Sequence[Link]) -> set[int]:
    """The first partition of each node, and all whose node is not known yet."""
    nodes = [part.node for part in parts]
    return {i for i, node in enumerate(nodes) if node is None or nodes.index(node) == i}


def _filled(row: PartitionInfo, part: _Part, earlier: _Earlier | None) -> PartitionInfo:
    """The row of a partition that answered."""
    counts = part.counts
    before = None if earlier is None else earlier.counts.get(row.partition)
    return replace(
        row,
        clock=part.clock,
        ready=counts.ready,
        delayed=counts.delayed,
        running=counts.running,
        held=counts.held,
        dead=counts.dead,
        oldest_wait=counts.oldest_wait,
        schedules=counts.schedules,
        active_schedules=counts.active_schedules,
        leader=(counts.leader or "unknown") if counts.is_led else None,
        leader_until=counts.leader_until if counts.is_led else None,
        pushed=_growth(before, counts, "pushed"),
        claimed=_growth(before, counts, "claimed"),
        memory=part.memory,
    )


def _growth(before: QueueSnapshot | None, now: QueueSnapshot, name: str) -> float | None:
    """How much a counter grew per second; None if that is not known."""
    if before is None or (seconds := (now.at - before.at).total_seconds()) <= 0:
        return None
    grown = now.counters.get(name, 0) - before.counters.get(name, 0)
    return grown / seconds if grown >= 0 else None


def _nodes(
    rows: Sequence[PartitionInfo], found: Mapping[int, _Part], earlier: _Earlier | None
) -> list[NodeInfo]:
    """The servers, in the order of their first partitions."""
    nodes = []
    for name in dict.fromkeys(row.node for row in rows):
        own = [row for row in rows if row.node == name]
        info = next((i for row in own if (i := _info_of(row, found))), {})
        failed = all(row.error for row in own)
        node = NodeInfo(
            node=name,
            partitions=tuple(row.partition for row in own),
            error=own[0].error if failed else None,
        )
        nodes.append(_measured(node, info, earlier) if info else node)
    return nodes


def _info_of(row: PartitionInfo, found: Mapping[int, _Part]) -> Mapping[str, str]:
    return found[row.partition].info if row.partition in found else {}


def _measured(node: NodeInfo, info: Mapping[str, str], earlier: _Earlier | None) -> NodeInfo:
    used, cpu = _processor_s(info), None
    before = None if earlier is None else earlier.cpu.get(node.node)
    if earlier is not None and used is not None and before is not None and used >= before:
        cpu = (used - before) / earlier.at
    is_valkey = "valkey_version" in info
    version = info.get("valkey_version") or info.get("redis_version", "")
    return replace(
        node,
        server=f"{'Valkey' if is_valkey else 'Redis'} {version or '?'}",
        used_memory=int(info.get("used_memory", 0)),
        max_memory=int(info.get("maxmemory", 0)),
        commands=float(info.get("instantaneous_ops_per_sec", 0)),
        cpu=cpu,
        migrates=_way_to_migrate(is_valkey, version),
    )


def _way_to_migrate(is_valkey: bool, version: str) -> str:
    try:
        major, minor = map(int, version.split(".")[:2])
    except ValueError:
        return ""
    if is_valkey:
        return "source" if major >= 9 else ""
    return "target" if (major, minor) >= (8, 4) else ""


def _processor_s(info: Mapping[str, str]) -> float | None:
    """Seconds of processor time that a server has used: of the thread that runs commands."""
    for end in ("_main_thread", ""):
        with suppress(KeyError, ValueError):
            return float(info[f"used_cpu_user{end}"]) + float(info[f"used_cpu_sys{end}"])
    return None
