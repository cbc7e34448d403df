"""The partitions of a queue: which one is hot, and what to do about it."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from fairqueue.errors import plural
from fairqueue.inspection.context import InspectorPart
from fairqueue.link.keys import command_line
from fairqueue.stats.partitions import BiggestGroup, NodeInfo, PartitionInfo, PartitionReading

HOT_TIMES = 2.0  # as much as the median of the others is hot
LEAST_RATE, LEAST_WAITING = 20.0, 200  # tasks per second and waiting tasks: less is never hot
MOST_OF_IT = 0.5  # the share of one group from which on it is the cause
BUSY_CPU = 0.8  # of a core: Redis runs commands in one thread
LEAST_COMMANDS = 500.0  # of a node per second: less is never busy
MAX_ADVICE = 10
START_SCHEDULER = "fairqueue scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionAdvice:
    """Something that stands out, and what to do about it.

    level: "ok", "warning" or "error". partition, node: which one is meant, if it is about one.
    command: a line for a shell, if one helps.
    """

    level: str
    text: str
    partition: int | None = None
    node: str | None = None
    command: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsView:
    """The partitions of a queue, the servers that hold them, and what to do.

    hot: the partitions that have much more to do than the others.
    """

    at: datetime
    queue: str
    partitions: list[PartitionInfo]
    nodes: list[NodeInfo]
    hot: list[int]
    advice: list[PartitionAdvice]


class Partitions(InspectorPart):
    """The partitions of the queue, which all tenants share."""

    @property
    def count(self) -> int:
        """How many the queue has."""
        return self._context.queue.partitions

    def check(self) -> None:
        """Raises Forbidden for an actor of one tenant, or without the role to see partitions."""
        self._guard.read_global("see partitions")

    def read(self, *, memory: bool = False) -> PartitionsView:
        """Each partition with its node, its backlog, its leader and its load; and advice.

        Rates are those since the last call in this process; the first call has none. A partition
        that does not answer is shown with the reason. memory: also the memory of each partition,
        which takes a command for each key. Raises Forbidden for an actor of one tenant.
        """
        self.check()
        reading = self._context.stores.partitions.read(memory=memory)
        hot = hot_partitions(reading.partitions)
        return PartitionsView(
            at=self._context.now(),
            queue=self._context.queue.name,
            partitions=reading.partitions,
            nodes=reading.nodes,
            hot=[partition for partition, _ in hot],
            advice=list(_advice(reading, hot, self._context.queue.name))[:MAX_ADVICE],
        )


def hot_partitions(rows: Sequence[PartitionInfo]) -> list[tuple[int, str]]:
    """The partitions that have much more to do than the others, and how much; the hottest first."""
    rates = {row.partition: row.rate for row in rows if row.error is None}
    waits = {row.partition: float(row.ready or 0) for row in rows if row.error is None}
    found: dict[int, tuple[float, str]] = {}
    for number, times in _outstanding(waits, LEAST_WAITING):
        told = f"{plural(int(waits[number]), 'task waits', 'tasks wait')} there"
        found[number] = (times, f"{told}, {_times(times)}")
    for number, times in _outstanding(rates, LEAST_RATE):
        told = f"it takes {rates[number]:.0f} pushes and claims per second"
        found[number] = (times, f"{told}, {_times(times)}")
    ordered = sorted(found.items(), key=lambda each: -each[1][0])
    return [(number, text) for number, (_, text) in ordered]


def _outstanding(values: dict[int, float], least: float) -> Iterator[tuple[int, float]]:
    """What is much more than the median of the others, and how many times; inf if that is 0."""
    for number, value in values.items():
        others = [other for each, other in values.items() if each != number]
        if not others or value < least:
            continue
        usual = statistics.median(others)
        if value > HOT_TIMES * usual:
            yield number, value / usual if usual else float("inf")


def _times(times: float) -> str:
    if times == float("inf"):
        return "and in most others nothing"
    return f"{times:.1f} times the median of the others"


def _advice(
    reading: PartitionReading, hot: Sequence[tuple[int, str]], queue: str
) -> Iterator[PartitionAdvice]:
    rows = {row.partition: row for row in reading.partitions}
    yield from _of_missing(reading)
    yield from _of_leaders(reading.partitions, queue)
    told = False
    for number, why in hot:
        told = True
        yield _of_hot(rows[number], why, reading)
    for node in _busy_nodes(reading.nodes):
        if not any(rows[number].node == node.node for number, _ in hot):
            told = True
            yield _of_busy(node, reading)
    if not told and all(row.error is None for row in reading.partitions):
        if len(rows) == 1:
            text = "this queue has one partition: partitions are chosen when a queue is made"
        elif all(row.pushed is None for row in reading.partitions):
            text = "no partition has much more waiting tasks than the others"
        else:
            text = "no partition has much more to do than the others"
        yield PartitionAdvice(level="ok", text=text)


def _of_missing(reading: PartitionReading) -> Iterator[PartitionAdvice]:
    for node in reading.nodes:
        failed = [
            row for row in reading.partitions if row.node == node.node and row.error is not None
        ]
        if not failed:
            continue
        which = _listed([row.partition for row in failed])
        text = (
            f"{which} of node {node.node} {'does' if len(failed) == 1 else 'do'} not answer: "
            f"{str(failed[0].error).rstrip('.')}. Nothing is served there until the node is back "
            "or a replica takes over; all other partitions go on"
        )
        one = failed[0].partition if len(failed) == 1 else None
        yield PartitionAdvice(level="error", text=text, partition=one, node=node.node)


def _of_leaders(rows: Sequence[PartitionInfo], queue: str) -> Iterator[PartitionAdvice]:
    without = [row.partition for row in rows if row.active_schedules and row.leader is None]
    if without:
        one = len(without) == 1
        text = (
            f"no scheduler leads {_listed(without).lower()}: {'its' if one else 'their'} schedules "
            "do not fire. Start a scheduler"
        )
        yield PartitionAdvice(
            level="error",
            text=text,
            partition=without[0] if one else None,
            command=command_line(START_SCHEDULER, queue),
        )


def _of_hot(row: PartitionInfo, why: str, reading: PartitionReading) -> PartitionAdvice:
    """What to do about a partition that has much more to do than the others."""
    is_hot = f"partition {row.partition} is hot: {why}"
    biggest = reading.biggest.get(row.partition)
    if biggest is not None and biggest.share >= MOST_OF_IT:
        text = (
            f"{is_hot}. {_named(biggest)} has {biggest.share:.0%} of what waits. All its tasks are "
            "in one partition, so more partitions or another node would not help: limit it, or "
            "split it"
        )
        return PartitionAdvice(level="warning", text=text, partition=row.partition, node=row.node)
    to = _target(row.node, reading.nodes)
    if to is None:
        text = f"{is_hot}. There is no other node that it could move to: add one to the cluster"
        return PartitionAdvice(level="warning", text=text, partition=row.partition, node=row.node)
    return PartitionAdvice(
        level="warning",
        text=f"{is_hot}. Move its slot {row.slot} to {to.node}, which has less to do",
        partition=row.partition,
        node=row.node,
        command=_migration(row.slot, _node(row.node, reading.nodes), to),
    )


def _busy_nodes(nodes: Sequence[NodeInfo]) -> Iterator[NodeInfo]:
    """The nodes that use most of a core, or run many more commands than the others."""
    commands = {i: node.commands or 0.0 for i, node in enumerate(nodes) if node.error is None}
    many = {i for i, _ in _outstanding(commands, LEAST_COMMANDS)}
    for i, node in enumerate(nodes):
        if i in many or (node.cpu or 0.0) >= BUSY_CPU:
            yield node


def _of_busy(node: NodeInfo, reading: PartitionReading) -> PartitionAdvice:
    """What to do about a node that has much to do with partitions of which none stands out."""
    cpu = "" if node.cpu is None else f" and uses {node.cpu:.0%} of a core"
    text = f"node {node.node} runs {node.commands or 0:.0f} commands per second{cpu}"
    own = [row for row in reading.partitions if row.node == node.node]
    to = _target(node.node, reading.nodes)
    if to is None:
        text += ": add a node to the cluster, and move some of its slots there"
        return PartitionAdvice(level="warning", text=text, node=node.node)
    if len(own) < 2:
        text += (
            ", with one partition: give it a faster machine, or use more partitions in a new queue"
        )
        return PartitionAdvice(level="warning", text=text, node=node.node)
    moved = sorted(own, key=lambda row: row.rate)[len(own) // 2]
    return PartitionAdvice(
        level="warning",
        text=f"{text}. Move partition {moved.partition}, its slot {moved.slot}, to {to.node}",
        partition=moved.partition,
        node=node.node,
        command=_migration(moved.slot, node, to),
    )


def _node(name: str, nodes: Sequence[NodeInfo]) -> NodeInfo:
    return next(node for node in nodes if node.node == name)


def _target(source: str, nodes: Sequence[NodeInfo]) -> NodeInfo | None:
    """The node with least to do, if it has less to do than the source."""
    others = [node for node in nodes if node.node != source and node.error is None]
    return min(others, key=_load, default=None)


def _load(node: NodeInfo) -> tuple[float, float, int]:
    return node.cpu or 0.0, node.commands or 0.0, len(node.partitions)


def _migration(slot: int, source: NodeInfo, to: NodeInfo) -> str | None:
    """The command line that moves a slot to a node, if its server can do that in one step."""
    if source.migrates == to.migrates == "source":
        node_id = f'"$({_client("valkey-cli", to.node)} CLUSTER MYID)"'
        moving = f"CLUSTER MIGRATESLOTS SLOTSRANGE {slot} {slot} NODE {node_id}"
        return f"{_client('valkey-cli', source.node)} {moving}"
    if source.migrates == to.migrates == "target":
        return f"{_client('redis-cli', to.node)} CLUSTER MIGRATION IMPORT {slot} {slot}"
    return None


def _client(program: str, node: str) -> str:
    parts = urlsplit(f"//{node}")
    return f"{program} -h {parts.hostname or 'localhost'} -p {parts.port or 6379}"


def _named(group: BiggestGroup) -> str:
    return f"Tenant {group.tenant!r}" if group.tenant is not None else f"User {group.user_id!r}"


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"Partition {numbers[0]}"
    return f"Partitions {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
