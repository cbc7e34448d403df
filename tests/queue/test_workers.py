"""Workers that say they are alive: their records, tasks that they leave to others, their limits."""

import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.schedules import before_script
from helpers.tasks import push
from helpers.waiting import eventually, in_thread
from helpers.workers import Gate
from helpers.world import World

import fairqueue.worker.heartbeat
from fairqueue import Task, TaskQueue, Worker
from fairqueue.errors import ConfigurationError, RedisUnavailable
from fairqueue.models import HandlerLimits
from fairqueue.queue.delays import DelayIndex
from fairqueue.queue.workers import GONE_AFTER_S, MAX_CURRENT, WorkerInfo, WorkerStore
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.worker.heartbeat import VERSION

Make = Callable[..., Worker]


def test_a_worker_hears_once_that_it_is_to_drain(queue: TaskQueue) -> None:
    heard: list[str] = []
    worker = Worker(queue, lambda task: None, worker_id="w")
    heartbeat = worker._core.new_heartbeat(lambda: heard.append("drain"))
    heartbeat.beat(())
    assert (heard, heartbeat.is_draining) == ([], False)
    assert WorkerStore(queue.link).drain("w", "ann")
    for _ in range(3):
        heartbeat.beat(())
    assert (heard, heartbeat.is_draining) == (["drain"], True)


def test_a_worker_names_those_of_its_tasks_that_it_has_held_for_longest(
    queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairqueue.worker.heartbeat, "BEAT_S", 0.05)
    released, workers = threading.Event(), WorkerStore(queue.link)
    worker = Worker(queue, lambda task: released.wait(60), concurrency=MAX_CURRENT + 5)
    first, others = [f"a{n}" for n in range(MAX_CURRENT)], [f"b{n}" for n in range(5)]
    try:
        worker.start()
        queue.push_many(Task.create(user_id="alice", task_id=each) for each in first)
        eventually(lambda: [w.running for w in workers.alive()] == [len(first)], "a heartbeat")
        queue.push_many(Task.create(user_id="alice", task_id=each) for each in others)
        eventually(lambda: workers.alive()[0].running == len(first + others), "a heartbeat")
        assert {*workers.alive()[0].current} == {*first}
    finally:
        released.set()
        worker.stop()


def test_what_a_heartbeat_was_told_is_heard_though_redis_is_gone_right_after_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """A notice is told once to a worker without recipients: it must not be lost on the way."""
    world.push("t", timeout=0.1)
    world.queue.configure(max_attempts=1)
    world.queue.claim("gone", lease=0.1)
    world.advance(1)

    def away(index: object) -> None:
        raise RedisUnavailable("away")

    world.patch(DelayIndex, "update", away)
    heartbeat = Worker(world.queue, lambda task: None, worker_id="w")._core.new_heartbeat()
    with pytest.raises(RedisUnavailable):
        heartbeat.beat(())
    assert [record.message.split()[0] for record in caplog.records] == ["task_given_up"]


@pytest.fixture
def make(queue: TaskQueue) -> Iterator[Make]:
    """Make workers with handlers for some names, which are stopped at the end."""
    made: list[Worker] = []

    def make(*names: str, **settings: Any) -> Worker:
        worker = Worker(queue, **settings)
        for name in names:
            worker.register(name, lambda payload: worker.worker_id)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.stop(0.0)


def alive(world: World) -> list[WorkerInfo]:
    return WorkerStore(world.queue.link).alive()


def ids(world: World) -> list[str]:
    return [worker.worker_id for worker in alive(world)]


def finished(world: World) -> int:
    return world.queue.inspect().counters.get("finished", 0)


def events(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "event", None) == event]


# --- the record -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [False, True])
def test_a_worker_is_known_before_its_first_claim(world: World, make: Make, threads: bool) -> None:
    seen: list[WorkerInfo] = []
    world.before_script("claim", lambda: seen.extend(alive(world)))
    worker = make("mail", handler=lambda task: None, concurrency=3, worker_id="me")
    worker.start() if threads else worker.run_once()
    eventually(lambda: seen, "it claims")
    (record,) = seen
    assert record.worker_id == "me"
    assert (record.host, record.pid) == (socket.gethostname(), os.getpid())
    assert (record.version, record.slots, record.names) == (VERSION, 3, ("mail", "*"))
    assert (record.current, record.running) == ((), 0)
    assert record.started_at == record.seen_at == world.now()


def test_the_record_says_what_runs_now(world: World, make: Make, gate: Gate) -> None:
    world.patch(fairqueue.worker.heartbeat, "BEAT_S", 0.02)
    worker = make(concurrency=2)
    worker.register("default", gate)
    world.push("t")
    started_at = world.now()
    worker.start()
    eventually(lambda: [each.current for each in alive(world)] == [("t",)], "it is said")
    world.advance(1)
    eventually(lambda: alive(world)[0].seen_at == world.now(), "the next heartbeat")
    (record,) = alive(world)
    assert (record.running, record.started_at) == (1, started_at)
    gate.go_on.set()
    eventually(lambda: alive(world)[0].current == (), "it has ended")
    assert worker.stop()
    assert alive(world) == []


def test_a_worker_in_the_callers_thread_leaves_when_stopped(world: World, make: Make) -> None:
    worker = make("mail")
    worker.run_once()
    assert ids(world) == [worker.worker_id]
    assert worker.stop()
    assert alive(world) == []
    worker.run_once()
    assert ids(world) == [worker.worker_id]


def test_a_long_run_in_the_callers_thread_stays_alive(world: World, make: Make, gate: Gate) -> None:
    world.patch(fairqueue.worker.heartbeat, "BEAT_S", 0.02)
    worker = make()
    worker.register("default", gate)
    world.push("t")
    ran = in_thread(worker.run_once)
    eventually(lambda: [each.current for each in alive(world)] == [("t",)], "it is said")
    world.advance(1)
    eventually(lambda: alive(world)[0].seen_at == world.now(), "the next heartbeat")
    worker.stop()
    gate.go_on.set()
    assert ran() == 1
    assert alive(world) == []


def test_a_late_thread_does_not_bring_back_a_gone_worker(world: World, make: Make) -> None:
    heartbeat = make("mail")._core.new_heartbeat()
    heartbeat.beat(["t"])
    heartbeat.leave()
    heartbeat.begin()
    heartbeat.beat(["t"])
    assert alive(world) == []
    assert heartbeat.next_beat == math.inf


def test_one_that_never_said_a_word_does_not_leave(
    queue: TaskQueue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = before_script(queue, monkeypatch, "heartbeat", lambda: None)
    assert make("mail").stop()
    assert sent == []


def test_a_worker_started_during_a_stop_is_alive(world: World, make: Make, gate: Gate) -> None:
    worker = make(concurrency=1)
    worker.register("default", gate)
    world.push("t1", "t2")
    worker.start()
    assert gate.begun.wait(10)
    pool = worker._pool
    assert pool is not None
    stopped = in_thread(lambda: worker.stop(30))
    eventually(lambda: pool._stopping, "it stops")
    started = in_thread(worker.start)
    gate.go_on.set()
    assert stopped()
    started()
    eventually(lambda: finished(world) == 2, "it goes on")
    assert ids(world) == [worker.worker_id]


def test_a_worker_that_is_gone_is_forgotten_and_said_once(
    world: World, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    make("mail", worker_id="dead").run_once()
    world.advance(GONE_AFTER_S)
    assert alive(world) == []
    others = [make("mail"), make("mail")]
    for worker in others:
        worker.run_once()
    assert [record.worker for record in events(caplog, "worker_gone")] == ["dead"]
    assert ids(world) == sorted(worker.worker_id for worker in others)


def test_heartbeats_that_fail_are_said_and_tried_again(
    world: World, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    world.patch(fairqueue.worker.heartbeat, "BEAT_S", 0.02)
    world.patch("fairqueue.worker.lease_keeper.BEAT_S", 0.02)
    worker = make("default")
    worker.start()
    eventually(lambda: alive(world), "it is known")
    failing = threading.Event()
    beat = WorkerStore.beat

    def fails(*arguments: Any, **named: Any) -> Any:
        if failing.is_set():
            raise ValueError("something that nobody expects")
        return beat(*arguments, **named)

    world.patch(WorkerStore, "beat", fails)
    failing.set()
    eventually(lambda: len(events(caplog, "heartbeat_failed")) > 1, "it fails and goes on")
    failing.clear()
    WorkerStore(world.queue.link).leave(worker.worker_id)
    eventually(lambda: alive(world), "it is known again")


def test_a_forked_copy_of_a_worker_has_a_name_of_its_own(queue: TaskQueue, make: Make) -> None:
    worker, named = make("mail"), make("mail", worker_id="mine")
    before = worker.worker_id
    worker._reset()  # as after a fork
    named._reset()
    assert worker.worker_id != before
    assert named.worker_id == "mine"


# --- tasks for others -----------------------------------------------------------------------------


def test_a_worker_leaves_tasks_to_one_that_has_a_handler_for_them(world: World, make: Make) -> None:
    knows_a, knows_b = make("a"), make("b")
    knows_b.run_once()
    world.push("a1", "a2", name="a")
    world.push("b1", "b2", name="b")
    assert knows_a.run_until_empty() == 2
    assert [world.info(task_id).state for task_id in ("b1", "b2")] == ["ready"] * 2
    assert knows_b.run_until_empty() == 2
    found = world.info("b1")
    assert (found.state, found.attempts, found.error) == ("finished", 1, None)
    assert found.worker_id == knows_b.worker_id


def test_a_worker_leaves_unknown_names_to_catch_all_workers(world: World, make: Make) -> None:
    knows_a, takes_any = make("a"), make(handler=lambda task: "any")
    takes_any.run_once()
    world.push("t", name="never heard of")
    world.push("t2", name="a")
    assert knows_a.run_until_empty() == 1
    assert takes_any.run_until_empty() == 1
    found = world.info("t")
    assert (found.attempts, found.result) == (1, "any")


def test_one_that_takes_anything_takes_also_what_others_know(queue: TaskQueue, make: Make) -> None:
    make("a").run_once()
    push(queue, "t", name="a")
    assert make(handler=lambda task: None).run_until_empty() == 1


def test_a_mixed_fleet_with_threads_burns_no_attempts(world: World, make: Make) -> None:
    workers = {name: make(name, concurrency=2) for name in ("a", "b", "c")}
    for worker in workers.values():
        worker.run_once()  # so that all are known before the first claim
    for worker in workers.values():
        worker.start()
    for name in workers:
        for user in ("alice", "bob"):
            world.push(*(f"{name}-{user}-{n}" for n in range(20)), name=name, user_id=user)
    eventually(lambda: finished(world) == 120, "all have run", within=60)
    for name, worker in workers.items():
        for user in ("alice", "bob"):
            found = [world.info(f"{name}-{user}-{n}") for n in range(20)]
            assert {(each.attempts, each.worker_id) for each in found} == {(1, worker.worker_id)}
    counted = world.stats()
    assert counted["claimed"] == counted["finished"] + counted.get("released", 0)
    assert "retried" not in counted


def test_an_unknown_name_is_tried_and_buried_with_a_reason(world: World, make: Make) -> None:
    workers = [make("a"), make("c")]
    world.push("t", name="b")
    waits: list[float] = []
    for turn in range(6):
        # Both say that they are alive; the one whose turn it is claims first.
        ran = [workers[(turn + n) % 2].run_once() for n in range(2)]
        assert ran == [1, 0]
        found = world.info("t")
        assert found.error == "no handler for task 'b' here"
        if found.state == "delayed":
            assert found.due_at is not None
            waits.append((found.due_at - world.now()).total_seconds())
            world.clock.set(found.due_at)
    assert waits == [5, 10, 20, 40, 80]
    assert (world.info("t").state, world.info("t").attempts) == ("buried", 6)


def test_the_others_take_over_a_name_whose_worker_is_gone(world: World, make: Make) -> None:
    knows_a, knows_b = make("a"), make("b")
    knows_b.run_once()
    world.push("t", name="b")
    world.advance(GONE_AFTER_S - 0.001)
    assert knows_a.run_once() == 0
    world.advance(0.001)
    assert knows_a.run_once() == 1
    found = world.info("t")
    assert (found.state, found.error) == ("delayed", "no handler for task 'b' here")
    assert found.due_at is not None
    world.clock.set(found.due_at)
    knows_b.run_once()  # it is back
    assert (world.info("t").state, world.info("t").attempts) == ("finished", 2)


def test_a_worker_leaves_a_name_once_it_is_known(world: World, make: Make) -> None:
    knows_a, knows_b = make("a"), make("b")
    world.push("t", name="b")
    assert knows_a.run_once() == 1  # nobody knew it
    knows_b.run_once()
    world.advance(5)
    assert knows_a.run_once() == 0
    assert knows_b.run_once() == 1


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [False, True])
def test_handler_limits_reach_redis_at_start(queue: TaskQueue, make: Make, threads: bool) -> None:
    worker = make("free")
    worker.register("mail", lambda payload: None, slots=2, rate=0.5, timeout=1.5)
    worker.register("report", lambda payload: None, timeout=60)
    worker.start() if threads else worker.run_once()
    expected = {
        "mail": HandlerLimits(slots=2, rate=0.5, timeout=1.5),
        "report": HandlerLimits(timeout=60.0),
    }
    eventually(lambda: queue.get_limits() == expected, "they hold")


def test_limits_change_when_the_code_does_and_an_operator_s_stand(world: World, make: Make) -> None:
    def version(**limits: dict[str, Any]) -> Worker:
        worker = make()
        for name in ("mail", "report", "backup"):
            worker.register(name, lambda payload: None, **limits.get(name, {}))
        return worker

    old = version(mail={"slots": 2}, report={"rate": 1.0}, backup={"timeout": 9.0})
    old.run_once()
    world.queue.set_limits("backup", slots=7)
    version(mail={"slots": 3}, backup={"slots": 1}).run_once()
    expected = {"mail": HandlerLimits(slots=3), "backup": HandlerLimits(slots=7)}
    assert world.queue.get_limits() == expected
    old.run_once()  # only another heartbeat: it has declared its limits before
    assert world.queue.get_limits() == expected


def test_limits_that_cannot_be_stored_are_refused_with_the_handler(make: Make) -> None:
    worker = make()
    with pytest.raises(ConfigurationError, match=r"slots must .*not 1001"):
        worker.register("mail", lambda payload: None, slots=1001)
    assert worker.handler_limits() == {}


def test_slots_hold_over_two_workers(world: World, make: Make) -> None:
    together = threading.Barrier(2)
    lock = threading.Lock()
    running: list[int] = []
    at_once: list[int] = []

    def handle(payload: dict[str, Any]) -> None:
        with lock:
            running.append(1)
            at_once.append(len(running))
        together.wait(60)  # two run at a time, or this breaks
        with lock:
            running.pop()

    for _ in range(2):
        worker = make(concurrency=3)
        worker.register("mail", handle, slots=2)
        worker.run_once()
        worker.start()
    for user in ("alice", "bob"):
        world.push(*(f"{user}-{n}" for n in range(10)), name="mail", user_id=user)
    eventually(lambda: finished(world) == 20, "all have run", within=60)
    assert max(at_once) == 2


# --- stale runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["another worker", "the scheduler"])
def test_a_run_that_does_not_end_is_reported_once_by_whoever_looks_first(
    world: World, make: Make, gate: Gate, caplog: pytest.LogCaptureFixture, first: str
) -> None:
    world.patch(fairqueue.worker.heartbeat, "BEAT_S", 3600.0)  # it does not report itself
    stuck, other, scheduler = make(lease=1000.0), make(), TaskScheduler(world.queue)
    stuck.register("mail", gate, timeout=60)
    world.push("t", name="mail")
    ran = in_thread(stuck.run_once)
    assert gate.begun.wait(20)
    world.advance(900)
    assert gate.contexts[0].heartbeat()
    world.advance(159.999)
    other.run_once()
    scheduler.tick()
    assert events(caplog, "stale_run") == []
    world.advance(10)
    looks: list[Callable[[], object]] = [other.run_once, scheduler.tick]
    for look in looks if first == "another worker" else reversed(looks):
        look()
        reports = [(each.task, each.worker) for each in events(caplog, "stale_run")]
        assert reports == [("t", stuck.worker_id)]
    assert world.queue.inspect().counters["stale_runs"] == 1
    gate.go_on.set()
    assert ran() == 1


def test_an_ordinary_run_is_not_reported(
    world: World, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    worker = make()
    worker.register("mail", lambda payload: None, timeout=60)
    world.push("t", name="mail")
    worker.run_once()
    world.advance(1000)
    worker.run_once()
    TaskScheduler(world.queue).tick()
    assert events(caplog, "stale_run") == []
