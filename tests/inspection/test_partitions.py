"""The partitions of a queue as the inspector shows them, and what it makes of them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from fairqueue.clock import ManualClock
from fairqueue.errors import Forbidden
from fairqueue.inspection import Actor, Inspector
from fairqueue.inspection.partitions import _advice, hot_partitions
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.stats.partitions import BiggestGroup, NodeInfo, PartitionInfo, PartitionReading


@pytest.fixture
def spread(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    """A queue with four partitions, on the server's clock."""
    with TaskQueue(redis_client, partitions=4) as queue:
        yield queue


def test_each_partition_is_shown_with_its_slot_and_its_backlog(spread: TaskQueue) -> None:
    spread.push(Task.create(user_id="ann", tenant="acme"))
    view = Inspector(spread).partitions.read(memory=True)
    assert [row.partition for row in view.partitions] == [0, 1, 2, 3]
    assert [row.slot // 4096 for row in view.partitions] == [0, 1, 2, 3]
    assert sorted(row.ready or 0 for row in view.partitions) == [0, 0, 0, 1]
    assert [row.clock is None for row in view.partitions] == [
        not row.ready for row in view.partitions
    ]
    assert all(row.memory is not None and row.error is None for row in view.partitions)
    (node,) = view.nodes
    assert node.partitions == (0, 1, 2, 3)
    assert (node.used_memory or 0) > 0


def test_a_queue_without_partitions_has_one(queue: TaskQueue) -> None:
    view = Inspector(queue).partitions.read()
    if queue.partitions == 1:
        assert [(row.partition, row.ready) for row in view.partitions] == [(0, 0)]
        assert [each.level for each in view.advice] == ["ok"]


def test_rates_are_those_since_the_reading_before(
    redis_client: redis.Redis, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = 100.0
    monkeypatch.setattr("fairqueue.stats.partitions.time.monotonic", lambda: at)
    with TaskQueue(redis_client, clock=clock, partitions=2) as queue:
        inspector = Inspector(queue)
        assert {row.pushed for row in inspector.partitions.read().partitions} == {None}
        for number in range(20):
            queue.push(Task.create(user_id="ann", tenant="acme", task_id=str(number)))
        clock.advance(10)
        at += 10
        rates = sorted(row.pushed or 0.0 for row in inspector.partitions.read().partitions)
        assert rates == [0.0, 2.0]
        assert inspector.partitions.read().partitions[0].pushed is not None, "the one before that"


def test_partitions_are_for_viewers_of_all_tenants(spread: TaskQueue) -> None:
    inspector = Inspector(spread)
    inspector.acting_as(Actor(name="v", role="viewer")).partitions.read()
    with pytest.raises(Forbidden):
        inspector.acting_as(Actor(name="t", role="admin", tenant="acme")).partitions.read()


def test_a_big_tenant_is_named_as_the_cause(spread: TaskQueue) -> None:
    spread.push_many(Task.create(user_id="ann", tenant="acme") for _ in range(300))
    spread.push_many(Task.create(user_id=f"u{n}") for n in range(40))
    view = Inspector(spread).partitions.read()
    (number,) = view.hot
    (advice,) = view.advice
    assert (advice.partition, advice.level) == (number, "warning")
    assert "Tenant 'acme' has" in advice.text


# --- judgement ------------------------------------------------------------------------------------

ROW = PartitionInfo(
    partition=0, slot=100, node="a:1", ready=0, pushed=0.0, claimed=0.0, active_schedules=0
)
NODE = NodeInfo(node="a:1", partitions=(0,), commands=10.0, cpu=0.1, migrates="source")


def _rows(*changes: dict[str, object]) -> list[PartitionInfo]:
    rows = []
    for number, change in enumerate(changes):
        given = {"partition": number, "slot": 100 * number, **change}
        rows.append(replace(ROW, **given))  # type: ignore[arg-type]
    return rows


@pytest.mark.parametrize(
    ("changes", "hot"),
    [
        ([{}, {}, {}], []),
        ([{"ready": 199}, {}, {}], []),
        ([{"ready": 900}, {"ready": 300}, {"ready": 400}], [0]),
        ([{"ready": 700}, {"ready": 300}, {"ready": 400}], []),
        ([{"ready": 250}, {}], [0]),
        ([{"pushed": 30.0, "claimed": 30.0}, {"pushed": 5.0}, {"claimed": 9.0}], [0]),
        ([{"ready": 400}, {"ready": 100}, {"ready": 900}, {"ready": 100}], [2, 0]),
        ([{"ready": 900}], []),
        ([{"ready": 900}, {"error": "gone", "ready": None, "pushed": None}], []),
    ],
)
def test_hot_is_what_has_more_than_twice_the_median_of_the_others(
    changes: list[dict[str, object]], hot: list[int]
) -> None:
    assert [number for number, _ in hot_partitions(_rows(*changes))] == hot


def test_a_hot_partition_is_to_be_moved_to_the_node_with_least_to_do() -> None:
    rows = _rows({"ready": 900}, {}, {"node": "b:2"}, {"node": "c:3"})
    nodes = [
        replace(NODE, partitions=(0, 1), cpu=0.7),
        replace(NODE, node="b:2", partitions=(2,), cpu=0.3),
        replace(NODE, node="c:3", partitions=(3,), cpu=0.2),
    ]
    reading = PartitionReading(partitions=rows, nodes=nodes, biggest={})
    (advice,) = _advice(reading, hot_partitions(rows), "default")
    assert "Move its slot 0 to c:3" in advice.text
    assert advice.command == (
        "valkey-cli -h a -p 1 CLUSTER MIGRATESLOTS SLOTSRANGE 0 0 NODE "
        '"$(valkey-cli -h c -p 3 CLUSTER MYID)"'
    )


def test_a_hot_partition_of_one_tenant_is_not_moved() -> None:
    rows = _rows({"ready": 900}, {"node": "b:2"})
    biggest = BiggestGroup(tenant="acme", user_id=None, waiting=810, share=0.9)
    nodes = [NODE, replace(NODE, node="b:2", partitions=(1,))]
    reading = PartitionReading(partitions=rows, nodes=nodes, biggest={0: biggest})
    (advice,) = _advice(reading, hot_partitions(rows), "default")
    assert "Tenant 'acme' has 90% of what waits" in advice.text
    assert advice.command is None


def test_a_node_that_is_down_and_a_missing_leader_come_first() -> None:
    gone: dict[str, object] = {"error": "no answer", "node": "b:2", "ready": None}
    rows = _rows({"active_schedules": 2}, gone, gone)
    nodes = [NODE, replace(NODE, node="b:2", partitions=(1, 2), error="no answer")]
    reading = PartitionReading(partitions=rows, nodes=nodes, biggest={})
    down, leaderless = _advice(reading, [], "mail")
    assert down.text.startswith("Partitions 1 and 2 of node b:2 do not answer: no answer.")
    assert leaderless.command == "fairqueue --queue mail scheduler"
    assert "no scheduler leads partition 0" in leaderless.text


def test_a_busy_node_gives_a_partition_away() -> None:
    rows = _rows({}, {}, {"node": "b:2"})
    nodes = [
        replace(NODE, partitions=(0, 1), cpu=0.9, commands=9000.0),
        replace(NODE, node="b:2", partitions=(2,)),
    ]
    reading = PartitionReading(partitions=rows, nodes=nodes, biggest={})
    (advice,) = _advice(reading, [], "default")
    assert "node a:1 runs 9000 commands per second and uses 90% of a core" in advice.text
    assert "Move partition 1, its slot 100, to b:2" in advice.text
