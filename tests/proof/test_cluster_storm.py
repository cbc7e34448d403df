"""Storms on a real cluster, in short, and what judges them."""

import json
from pathlib import Path

import pytest
import redis

from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from faults.cluster import KINDS, PARTITIONS, Verdict, judge, run_cluster_storm, tenant_of
from faults.journal import Journal


@pytest.mark.timeout(150)
@pytest.mark.parametrize("kind", KINDS)
def test_a_storm_on_a_cluster_breaks_nothing(kind: str) -> None:
    verdict = run_cluster_storm(kind, seed=1, seconds=4.0)
    assert verdict.violations == 0, verdict
    assert verdict.acknowledged > 0
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
        journal.note("pushed", ids)
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
        judge(queue, tmp_path, verdict)
    assert (verdict.acknowledged, verdict.finished) == (5, 4)
    assert (verdict.lost, verdict.undone, verdict.doubled) == (2, 1, 1)
    assert (verdict.unexpected, verdict.misplaced, verdict.inconsistent) == (1, 2, 1)
    assert verdict.violations == 8
