"""Workers that are asked to drain: they take no more, finish what they run, and end."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from helpers.fixtures import Spawn
from helpers.state import changes
from helpers.tasks import fill
from helpers.waiting import eventually, in_thread
from helpers.workers import Gate
from helpers.world import World

import fairqueue.worker.heartbeat
from fairqueue import TaskQueue, Worker
from fairqueue.errors import InvalidInput
from fairqueue.queue.workers import GONE_AFTER_S, WorkerStore
from fairqueue.runtime.processes import ProcessGroup

WITHIN = 60.0  # seconds after which a test gives up waiting

FACTS: dict[str, object] = {
    "host": "here",
    "pid": 7,
    "version": "1",
    "slots": 2,
    "names": [],
    "current": [],
    "running": 0,
    "started": 1_700_000_000_000,
}


def draining(workers: WorkerStore) -> dict[str, bool]:
    return {info.worker_id: info.draining for info in workers.alive()}


# --- the mark -------------------------------------------------------------------------------------


def test_a_worker_that_is_asked_to_drain_hears_of_it_with_its_next_beat(world: World) -> None:
    assert world.workers.beat(FACTS, "w").drained_by is None
    assert world.workers.drain("w", by="ann")
    assert draining(world.workers) == {"w": True}
    for _ in range(3):  # the mark stays until it has gone
        world.advance(10)
        assert world.workers.beat(FACTS, "w").drained_by == "ann"
    assert draining(world.workers) == {"w": True}


def test_only_the_one_that_is_meant_drains(workers: WorkerStore) -> None:
    for name in ("a", "b"):
        workers.beat(FACTS, name)
    workers.drain("a", by="ann")
    assert workers.beat(FACTS, "b").drained_by is None
    assert draining(workers) == {"a": True, "b": False}


def test_asked_again_it_still_drains_for_the_first_who_asked(workers: WorkerStore) -> None:
    workers.beat(FACTS, "w")
    assert workers.drain("w", by='ann "the boss" }')
    assert workers.drain("w", by="bob")
    assert workers.beat(FACTS, "w").drained_by == 'ann "the boss" }'
    (info,) = workers.alive()
    assert (info.host, info.pid, info.names, info.draining) == ("here", 7, (), True)


@pytest.mark.parametrize(("worker_id", "by"), [("", "ann"), ("w", ""), ("w", "a\0b"), ("w", None)])
def test_who_asks_and_whom_has_to_be_a_name(workers: WorkerStore, worker_id: str, by: Any) -> None:
    workers.beat(FACTS, "w")
    with pytest.raises(InvalidInput):
        workers.drain(worker_id, by=by)
    assert workers.beat(FACTS, "w").drained_by is None


def test_a_request_that_arrives_twice_is_one(world: World) -> None:
    world.workers.beat(FACTS, "w")
    arguments: dict[str, Any] = {"op": "op", "worker": "w", "by": "ann"}
    assert world.queue.link.run("drain", **arguments) == b"asked"
    before = world.dump()
    assert world.queue.link.run("drain", **arguments) == b"asked"
    assert changes(before, world.dump()) == {}
    world.workers.leave("w")
    assert world.queue.link.run("drain", **arguments) == b"asked"
    assert "workers" not in world.dump()


def test_a_worker_that_is_not_alive_cannot_drain(world: World) -> None:
    assert not world.workers.drain("nobody", by="ann")
    world.workers.beat(FACTS, "left")
    world.workers.leave("left")
    assert not world.workers.drain("left", by="ann")
    world.workers.beat(FACTS, "gone")
    world.advance(GONE_AFTER_S)
    assert not world.workers.drain("gone", by="ann")


def test_the_mark_goes_with_the_worker(workers: WorkerStore) -> None:
    workers.beat(FACTS, "w")
    workers.drain("w", by="ann")
    workers.leave("w")
    assert workers.beat(FACTS, "w").drained_by is None


@pytest.mark.parametrize("other", [{"pid": 8}, {"started": 1_700_000_000_001}])
def test_a_new_worker_was_not_asked(workers: WorkerStore, other: dict[str, object]) -> None:
    workers.beat(FACTS, "w")
    workers.drain("w", by="ann")
    assert workers.beat(FACTS | other, "w").drained_by is None
    assert draining(workers) == {"w": False}


@pytest.mark.parametrize("bad", ["", None, "a\0", 3])
def test_bad_ids_and_names_are_refused(workers: WorkerStore, bad: Any) -> None:
    workers.beat(FACTS, "w")
    with pytest.raises(InvalidInput, match="worker_id"):
        workers.drain(bad, by="ann")
    with pytest.raises(InvalidInput, match="by"):
        workers.drain("w", by=bad)
    assert draining(workers) == {"w": False}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3", '{"id":3}', "\xff"])
def test_a_spoilt_record_is_no_worker_that_could_drain(world: World, text: str) -> None:
    world.workers.beat(FACTS, "w")
    world.redis.hset(world.keys["workers"], "w", text)
    assert not world.workers.drain("w", by="ann")
    assert world.workers.beat(FACTS, "w").drained_by is None


@pytest.mark.parametrize("mark", ["3", "true", "{}", "null"])
def test_a_spoilt_mark_is_none(world: World, mark: str) -> None:
    world.workers.beat(FACTS, "w")
    text = world.redis.hget(world.keys["workers"], "w")
    assert isinstance(text, bytes)
    world.redis.hset(world.keys["workers"], "w", text[:-1] + b',"drain":' + mark.encode() + b"}")
    assert draining(world.workers) == {"w": False}
    assert world.workers.beat(FACTS, "w").drained_by is None


# --- a worker -------------------------------------------------------------------------------------


@pytest.fixture
def worker(queue: TaskQueue, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """One with two slots whose heartbeats come often."""
    monkeypatch.setattr(fairqueue.worker.heartbeat, "BEAT_S", 0.02)
    worker = Worker(queue, concurrency=2, worker_id="me")
    worker.register("default", gate)
    yield worker
    gate.go_on.set()
    worker.stop()


def is_alive(queue: TaskQueue, name: str = "me") -> bool:
    return name in draining(WorkerStore(queue.link))


def test_a_worker_finishes_what_it_runs_takes_no_more_and_ends(
    world: World, worker: Worker, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    world.fill("alice", 5)
    assert worker.state == "stopped"
    with caplog.at_level(logging.INFO, "fairqueue.worker"):
        worker.start()
        for _ in range(2):
            assert gate.starts.acquire(timeout=WITHIN)
        assert worker.state == "running"
        assert world.workers.drain("me", by="ann")
        eventually(lambda: worker.state == "draining", "it hears of it", within=WITHIN)
    assert world.queue.inspect().running == 2  # it goes on with these
    gate.go_on.set()
    eventually(lambda: worker.state == "stopped", "it has ended", within=WITHIN)
    after = world.queue.inspect()
    assert (after.counters["finished"], after.ready, after.running) == (2, 3, 0)
    assert not is_alive(world.queue)
    (record,) = [r for r in caplog.records if getattr(r, "event", "") == "worker_draining"]
    assert (record.worker, record.by) == ("me", "ann")  # type: ignore[attr-defined]


def test_a_worker_that_waits_for_tasks_ends_at_once(world: World, worker: Worker) -> None:
    worker.start()
    eventually(lambda: is_alive(world.queue), "it is known", within=WITHIN)
    world.workers.drain("me", by="ann")
    eventually(lambda: worker.state == "stopped", "it has ended", within=WITHIN)
    eventually(lambda: not is_alive(world.queue), "it has left", within=WITHIN)
    assert not [t for t in threading.enumerate() if t.name.startswith("fairqueue-leases")]


def test_a_drained_worker_may_be_started_again(world: World, worker: Worker, gate: Gate) -> None:
    gate.go_on.set()
    worker.start()
    eventually(lambda: is_alive(world.queue), "it is known", within=WITHIN)
    world.workers.drain("me", by="ann")
    eventually(lambda: worker.state == "stopped", "it has ended", within=WITHIN)
    assert worker.stop() is True
    world.fill("alice", 3)
    worker.start()
    eventually(
        lambda: world.queue.inspect().counters.get("finished") == 3, "it runs", within=WITHIN
    )
    assert worker.state == "running"
    assert draining(world.workers) == {"me": False}


def test_stop_ends_one_that_drains(world: World, worker: Worker, gate: Gate) -> None:
    world.push("a")
    worker.start()
    assert gate.starts.acquire(timeout=WITHIN)
    world.workers.drain("me", by="ann")
    eventually(lambda: worker.state == "draining", "it hears of it", within=WITHIN)
    assert worker.stop(0.0) is False  # what runs is given back
    assert (world.queue.inspect().ready, world.queue.inspect().running) == (1, 0)
    assert not is_alive(world.queue)


def test_a_worker_in_the_callers_thread_drains(world: World, worker: Worker, gate: Gate) -> None:
    gate.go_on.set()
    world.fill("alice", 5)
    assert worker.run_once() == 2
    world.workers.drain("me", by="ann")
    assert worker.run_once() == worker.run_until_empty() == 0
    assert draining(world.workers) == {"me": True}
    worker.stop()
    assert worker.run_once() == 2
    assert draining(world.workers) == {"me": False}


def test_other_workers_take_over_during_a_drain(world: World, worker: Worker, gate: Gate) -> None:
    world.fill("alice", 6)
    worker.start()
    for _ in range(2):
        assert gate.starts.acquire(timeout=WITHIN)
    world.workers.drain("me", by="ann")
    eventually(lambda: worker.state == "draining", "it hears of it", within=WITHIN)
    other = Worker(world.queue, handler=lambda task: None, worker_id="other")
    assert other.run_until_empty() == 4
    other.stop()
    gate.go_on.set()
    eventually(
        lambda: world.queue.inspect().counters.get("finished") == 6, "all ran", within=WITHIN
    )


# --- forever, and processes -----------------------------------------------------------------------

FOREVER = """
import sys, threading
import fairqueue.worker.heartbeat
from fairqueue import TaskQueue, Worker

fairqueue.worker.heartbeat.BEAT_S = 0.02
processes = int(sys.argv[2]) or None
queue = TaskQueue.from_url(sys.argv[1])
worker = Worker(queue, lambda task: None, worker_id="me", processes=processes)
print("ended", worker.forever(), worker.state, flush=True)
"""


@pytest.fixture
def live(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    """A queue by the server's clock, which other processes have too."""
    with TaskQueue(redis_client) as queue:
        yield queue


@pytest.mark.processes
def test_forever_ends_after_a_drain(live: TaskQueue, redis_url: str, spawn: Spawn) -> None:
    process = spawn(FOREVER, redis_url, "0")
    assert process.stdout is not None
    eventually(lambda: is_alive(live), "it is known", within=WITHIN)
    assert WorkerStore(live.link).drain("me", by="ann")
    assert in_thread(process.stdout.readline)() == "ended True stopped\n"
    assert process.wait(WITHIN) == 0
    assert WorkerStore(live.link).alive() == []


@pytest.mark.processes
def test_a_process_that_has_drained_is_not_replaced_and_the_last_one_ends_the_worker(
    live: TaskQueue, redis_url: str, spawn: Spawn
) -> None:
    workers = WorkerStore(live.link)
    process = spawn(FOREVER, redis_url, "2")
    assert process.stdout is not None
    eventually(lambda: draining(workers).keys() == {"me:0", "me:1"}, "both", within=WITHIN)
    assert workers.drain("me:0", by="ann")
    eventually(lambda: draining(workers).keys() == {"me:1"}, "one has ended", within=WITHIN)
    fill(live, "alice", 20)  # the other goes on, and nobody comes in place of the first
    eventually(lambda: live.inspect().counters.get("finished") == 20, "it runs", within=WITHIN)
    assert draining(workers) == {"me:1": False}
    assert process.poll() is None
    assert workers.drain("me:1", by="ann")
    assert in_thread(process.stdout.readline)() == "ended True stopped\n"
    assert process.wait(WITHIN) == 0
    assert workers.alive() == []


@pytest.mark.processes
def test_a_process_that_retires_is_not_replaced(tmp_path: Any) -> None:
    def serve(stop: threading.Event, index: int) -> bool:
        (tmp_path / str(index)).open("a").write("x")
        if index == 0:
            return True
        stop.wait()
        return True

    group = ProcessGroup(serve, 2)
    group.start()
    try:
        eventually(lambda: len(group.alive()) == 1, "one has retired", within=WITHIN)
        assert (group.is_alive(), group.restarts) == (True, 0)
    finally:
        assert group.stop() is True
    assert (tmp_path / "0").read_text() == "x"


@pytest.mark.processes
def test_a_group_ends_when_all_have_retired_and_may_be_started_again(tmp_path: Any) -> None:
    def serve(stop: threading.Event, index: int) -> bool:
        (tmp_path / str(index)).open("a").write("x")
        return True

    group = ProcessGroup(serve, 3)
    for times in (1, 2):
        group.start()
        eventually(lambda: not group.is_alive(), "all have retired", within=WITHIN)
        assert group.stop() is True
        assert [(tmp_path / str(i)).read_text() for i in range(3)] == ["x" * times] * 3
