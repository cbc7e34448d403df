"""Heartbeats: who is alive, what the workers declare, and runs that go on after their time-out."""

from datetime import timedelta
from typing import Any

import pytest
import redis
from support import claim_one, dump, push

from fairqueue.clock import ManualClock
from fairqueue.errors import InvalidTask
from fairqueue.models import HandlerLimits
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import GONE_AFTER_S, Beat, WorkerInfo, WorkerStore


@pytest.fixture
def workers(queue: TaskQueue) -> WorkerStore:
    return WorkerStore(queue.link)


def info(**fields: Any) -> dict[str, Any]:
    """What a worker says of itself."""
    given = {
        "host": "box",
        "pid": 17,
        "version": "1.0",
        "slots": 4,
        "names": ["mail"],
        "current": [],
        "running": 0,
        "started": 1_700_000_000_000,
    }
    return given | fields


def beat(workers: WorkerStore, worker_id: str, limits: Any = None, **fields: Any) -> Beat:
    return workers.beat(info(**fields), worker_id, limits)


def alive(workers: WorkerStore) -> list[str]:
    return [each.worker_id for each in workers.alive()]


# --- who is alive ---------------------------------------------------------------------------------


def test_a_worker_that_beats_is_alive_and_says_what_it_runs(
    clock: ManualClock, workers: WorkerStore
) -> None:
    started = clock.now()
    clock.advance(5)
    beat(
        workers,
        "wörker 1",
        names=["mail", "ünal"],
        current=["t1", "t2"],
        running=2,
        started=clock.now_ms() - 5000,
    )
    assert workers.alive() == [
        WorkerInfo(
            worker_id="wörker 1",
            host="box",
            pid=17,
            version="1.0",
            slots=4,
            names=("mail", "ünal"),
            current=("t1", "t2"),
            running=2,
            started_at=started,
            seen_at=clock.now(),
            gone_at=clock.now() + timedelta(seconds=GONE_AFTER_S),
        )
    ]


@pytest.mark.parametrize("worker_id", ["", "a\nb", None, 7])
def test_a_bad_worker_id_is_refused(
    redis_client: redis.Redis, workers: WorkerStore, worker_id: Any
) -> None:
    with pytest.raises(InvalidTask, match="worker_id"):
        beat(workers, worker_id)
    with pytest.raises(InvalidTask, match="worker_id"):
        workers.leave(worker_id)
    assert dump(redis_client) == {}


def test_workers_are_listed_by_id(clock: ManualClock, workers: WorkerStore) -> None:
    for worker_id in ("b", "a", "c"):
        beat(workers, worker_id)
        clock.advance(1)
    assert alive(workers) == ["a", "b", "c"]


def test_a_worker_without_a_word_is_gone_by_the_clock_of_the_queue(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock, workers: WorkerStore
) -> None:
    beat(workers, "w")
    clock.advance(GONE_AFTER_S - 0.001)
    assert alive(workers) == ["w"]
    clock.advance(0.001)
    assert alive(workers) == []
    assert redis_client.ttl(queue.keys["workers"]) == -1  # its end is data: nothing expires


def test_a_worker_that_beats_in_time_stays(clock: ManualClock, workers: WorkerStore) -> None:
    for _ in range(5):
        beat(workers, "w")
        clock.advance(GONE_AFTER_S - 1)
    assert alive(workers) == ["w"]


def test_a_worker_that_beats_late_is_back_and_gone_for_nobody(
    clock: ManualClock, workers: WorkerStore
) -> None:
    beat(workers, "w")
    clock.advance(2 * GONE_AFTER_S)
    assert beat(workers, "w").gone == []
    assert alive(workers) == ["w"]


def test_one_worker_is_told_of_one_that_is_gone(clock: ManualClock, workers: WorkerStore) -> None:
    beat(workers, "dead")
    clock.advance(GONE_AFTER_S)
    assert beat(workers, "w1").gone == ["dead"]
    assert beat(workers, "w2").gone == []


def test_a_worker_that_leaves_is_gone_at_once_and_missed_by_nobody(
    redis_client: redis.Redis, clock: ManualClock, workers: WorkerStore
) -> None:
    beat(workers, "w1")
    beat(workers, "w2")
    workers.leave("w1")
    workers.leave("w1")
    workers.leave("unknown")
    assert alive(workers) == ["w2"]
    clock.advance(1)
    assert beat(workers, "w2").gone == []
    workers.leave("w2")
    assert not dump(redis_client).keys() & {"workers", "worker_ends"}


def test_one_that_leaves_keeps_nothing_from_the_others(
    queue: TaskQueue, clock: ManualClock, workers: WorkerStore
) -> None:
    beat(workers, "leaving")
    beat(workers, "dead")
    queue.configure(max_attempts=1)
    push(queue, "t")
    claim_one(queue, lease=5)
    clock.advance(GONE_AFTER_S)
    workers.leave("leaving")
    told = beat(workers, "w")
    assert (told.gone, [notice.task_id for notice in told.notices]) == (["dead"], ["t"])


def test_more_workers_than_one_beat_looks_at_are_found_gone_by_the_next_ones(
    redis_client: redis.Redis, clock: ManualClock, workers: WorkerStore
) -> None:
    everybody = {f"w{n}" for n in range(250)}
    for worker_id in everybody:
        beat(workers, worker_id, names=[f"name of {worker_id}"])
    clock.advance(GONE_AFTER_S)
    assert alive(workers) == []
    told = [beat(workers, "new", names=["mail"]) for _ in range(4)]
    assert [len(each.gone) for each in told] == [100, 100, 50, 0]
    assert {worker_id for each in told for worker_id in each.gone} == everybody
    assert [each.handled for each in told] == [{"mail"}] * 4
    assert dump(redis_client)["worker_ends"].keys() == {"new"}
    assert dump(redis_client)["workers"].keys() == {"new", ""}


# --- names ----------------------------------------------------------------------------------------


def test_a_worker_learns_the_names_that_any_worker_runs(
    clock: ManualClock, workers: WorkerStore
) -> None:
    assert beat(workers, "w1", names=["mail", "*"]).handled == {"mail", "*"}
    assert beat(workers, "w2", names=["mail", "ünal: a b"]).handled == {"mail", "*", "ünal: a b"}
    clock.advance(GONE_AFTER_S - 1)
    assert beat(workers, "w2", names=["mail", "ünal: a b"]).handled == {"mail", "*", "ünal: a b"}
    clock.advance(1)
    assert beat(workers, "w2", names=["mail", "ünal: a b"]).handled == {"mail", "ünal: a b"}


def test_names_of_a_worker_that_left_are_forgotten(workers: WorkerStore) -> None:
    beat(workers, "w1", names=["mail", "report"])
    beat(workers, "w2", names=["mail"])
    workers.leave("w1")
    assert beat(workers, "w2", names=["mail"]).handled == {"mail"}


def test_names_that_a_worker_does_not_run_any_more_are_forgotten(workers: WorkerStore) -> None:
    beat(workers, "w1", names=["mail", "report"])
    assert beat(workers, "w1", names=["report", "backup"]).handled == {"report", "backup"}
    assert beat(workers, "w1", names=[]).handled == frozenset()


# --- records that somebody has spoilt -------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [b"", b"not json", b"[]", b"{}", b"\xff", b'{"id":"bad","names":[1,{},"x"]}']
)
def test_a_spoilt_record_hides_its_worker_until_the_next_beat(
    redis_client: redis.Redis, queue: TaskQueue, workers: WorkerStore, text: bytes
) -> None:
    beat(workers, "bad", names=["mail"])
    beat(workers, "good", names=["report"])
    redis_client.hset(queue.keys["workers"], "bad", text)
    assert alive(workers) == ["good"]
    beat(workers, "good", names=["report", "backup"])  # reads the records of all
    assert beat(workers, "bad", names=["mail"]).handled == {"mail", "report", "backup"}
    assert alive(workers) == ["bad", "good"]


def test_a_worker_whose_record_is_lost_is_skipped(
    redis_client: redis.Redis, queue: TaskQueue, workers: WorkerStore
) -> None:
    beat(workers, "w1")
    beat(workers, "w2")
    redis_client.hdel(queue.keys["workers"], "w1", "")
    assert alive(workers) == ["w2"]
    assert beat(workers, "w2").handled == {"mail"}


# --- limits ---------------------------------------------------------------------------------------


def test_limits_that_a_worker_declares_hold(queue: TaskQueue, workers: WorkerStore) -> None:
    beat(workers, "w", {"mail": {"slots": 2, "rate": 0.5, "timeout_ms": 1500}, "other": {}})
    assert queue.get_limits() == {"mail": HandlerLimits(slots=2, rate=0.5, timeout=1.5)}


def test_declared_limits_bind_claims(queue: TaskQueue, workers: WorkerStore) -> None:
    beat(workers, "w", {"mail": {"slots": 1}})
    push(queue, "t1", "t2", name="mail")
    assert len(queue.claim("w", limit=2)) == 1


def test_an_ordinary_beat_leaves_limits_alone(queue: TaskQueue, workers: WorkerStore) -> None:
    beat(workers, "w", {"mail": {"slots": 2}})
    beat(workers, "w")
    assert queue.get_limits() == {"mail": HandlerLimits(slots=2)}


def test_a_worker_that_starts_anew_changes_what_workers_declared(
    queue: TaskQueue, workers: WorkerStore
) -> None:
    beat(workers, "w", {"mail": {"slots": 2}, "report": {"slots": 1}})
    beat(workers, "w", {"mail": {"slots": 3}, "report": {}})
    assert queue.get_limits() == {"mail": HandlerLimits(slots=3)}


def test_limits_of_an_operator_stand_over_those_of_workers(
    queue: TaskQueue, workers: WorkerStore
) -> None:
    beat(workers, "w", {"mail": {"slots": 2}})
    queue.set_limits("mail", slots=7)
    queue.set_limits("report", rate=1.0)
    beat(workers, "w", {"mail": {"slots": 2}, "report": {}})
    expected = {"mail": HandlerLimits(slots=7), "report": HandlerLimits(rate=1.0)}
    assert queue.get_limits() == expected


def test_limits_that_the_operator_takes_back_are_the_workers_to_declare_again(
    queue: TaskQueue, workers: WorkerStore
) -> None:
    queue.set_limits("mail", slots=7)
    queue.set_limits("mail")
    beat(workers, "w", {"mail": {"slots": 2}})
    assert queue.get_limits() == {"mail": HandlerLimits(slots=2)}


def test_a_spoilt_limit_is_declared_anew(
    redis_client: redis.Redis, queue: TaskQueue, workers: WorkerStore
) -> None:
    redis_client.hset(queue.keys["limits"], "mail", b"spoilt")
    beat(workers, "w", {"mail": {"slots": 2}})
    assert queue.get_limits() == {"mail": HandlerLimits(slots=2)}
