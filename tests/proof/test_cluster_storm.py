"""Storms on a real cluster, in short, and what judges them."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock
from fairqueue.link.partitions import partition_of
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from faults.cluster import (
    KINDS,
    PARTITIONS,
    SCHEDULED,
    Takeover,
    Verdict,
    add_schedules,
    judge,
    judge_schedules,
    run_cluster_storm,
    tenant_of,
)
from faults.cuts import cut_client, obey_cuts
from faults.journal import Journal


@pytest.mark.timeout(150)
@pytest.mark.parametrize("kind", KINDS)
def test_a_storm_on_a_cluster_breaks_nothing(kind: str) -> None:
    verdict = run_cluster_storm(kind, seed=1, seconds=4.0)
    assert verdict.violations == 0, verdict
    assert verdict.acknowledged > 0
    assert verdict.fires > 0
    assert sum(verdict.faults.values()) >= 5


def test_what_is_lost_doubled_or_misplaced_is_noticed(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "producer-0.journal")
    with TaskQueue.from_url(redis_url, partitions=PARTITIONS) as queue:
        ids = [f"producer-0.{n}" for n in range(5)]
        for n, task_id in enumerate(ids[:4]):
            queue.push(Task.create(user_id="ann", tenant=tenant_of(n), task_id=task_id))
        journal.note("intent", ids)
        journal.note("pushed", ids, 1.5)
        claims = queue.claim("w", 3)
        for claim in claims:
            queue.finish(claim)
            journal.note("done", claim.task.task_id)
        journal.note("done", claims[0].task.task_id)
        journal.note("done", ids[4])
        (left,) = queue.claim("w", 1)
        home = queue.link.parts[left.partition]
        elsewhere = queue.link.parts[(left.partition + 1) % PARTITIONS]
        record = redis_client.hget(home.keys["status"], left.task.task_id)
        redis_client.hset(elsewhere.keys["status"], left.task.task_id, record)
        redis_client.hset(home.keys["status"], "stranger.0", json.dumps({"state": "finished"}))
        verdict = Verdict("kept", 0)
        judge(queue, tmp_path, verdict, [Takeover("killed", 1.0), Takeover("killed", 5.0)])
    assert verdict.lost_by == {"killed": [2, 0]}
    assert (verdict.acknowledged, verdict.finished) == (5, 4)
    assert (verdict.lost, verdict.undone, verdict.doubled) == (2, 1, 1)
    assert (verdict.unexpected, verdict.misplaced, verdict.inconsistent) == (1, 2, 1)
    assert verdict.violations == 8


@pytest.fixture
def fired(redis_client: redis.Redis, redis_url: str, clock: ManualClock) -> Iterator[TaskQueue]:
    """A queue whose schedules have fired three times, and whose tasks are finished."""
    with TaskQueue.from_url(redis_url, partitions=PARTITIONS, clock=clock) as queue:
        add_schedules(queue)
        scheduler = TaskScheduler(queue, registry=CollectorRegistry())
        for _ in range(3):
            clock.advance(1.0)
            scheduler.tick()
            while claims := queue.claim("w", limit=100):
                queue.finish_many((claim, None) for claim in claims)
        yield queue


def test_the_schedules_of_a_storm_are_in_all_partitions() -> None:
    tenants = [f"tenant-{number}" for number in SCHEDULED]
    assert {partition_of("", tenant, PARTITIONS) for tenant in tenants} == set(range(PARTITIONS))


def test_a_lost_fire_is_noticed(
    fired: TaskQueue, redis_client: redis.Redis, tmp_path: Path
) -> None:
    verdict = Verdict("failover", 0)
    judge(fired, tmp_path, verdict)
    judge_schedules(fired, verdict)
    assert (verdict.fires, verdict.violations) == (3 * len(SCHEDULED), 0)
    status = fired.link.parts[0].keys["status"]
    redis_client.hdel(status, redis_client.hkeys(status)[0])
    judge_schedules(fired, verdict)
    assert (verdict.unfired, verdict.violations) == (1, 1)


def test_a_fire_in_two_partitions_and_one_that_ran_and_is_gone_are_noticed(
    fired: TaskQueue, redis_client: redis.Redis, tmp_path: Path
) -> None:
    Journal(tmp_path / "worker-0.journal").note("ran", "every-3:1700000000000")
    first, second = (part.keys["status"] for part in fired.link.parts[:2])
    name, record = next(iter(redis_client.hgetall(first).items()))
    redis_client.hset(second, name, record)
    verdict = Verdict("kept", 0)
    judge(fired, tmp_path, verdict)
    assert (verdict.misplaced, verdict.undone_fires) == (2, 1)


def test_a_client_that_is_cut_off_hears_nothing_until_the_cut_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "socket", socket.socket)  # it is put back at the end
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        obey_cuts(tmp_path, "worker-0")
        with socket.create_connection(("127.0.0.1", port), 5.0) as client:
            peer, _ = server.accept()
            with peer:
                cut_client(tmp_path, "worker-0", port, 60.0)
                client.settimeout(0.1)
                peer.sendall(b"hello")
                with pytest.raises(TimeoutError):
                    client.recv(5)
                with pytest.raises(TimeoutError):
                    client.sendall(b"hello")
                cut_client(tmp_path, "worker-0", port, 0.0)
                client.settimeout(5.0)
                client.sendall(b"hello")
                assert peer.recv(5) == b"hello"
                assert client.recv(5) == b"hello"
