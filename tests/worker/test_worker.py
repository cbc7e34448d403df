"""Workers on a real server: what they record, how they start, stop, lose leases and survive."""

import asyncio
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.network import LossyProxy
from helpers.state import check_consistency, places, stats
from helpers.tasks import Mute, Unshowable, claim_one, fill, ids_of, info_of, make_task, push
from helpers.waiting import eventually
from helpers.workers import Gate
from helpers.world import World
from prometheus_client import REGISTRY, CollectorRegistry

import fairqueue.worker.pool
from fairqueue import Discard, Retry, Task, TaskContext, TaskQueue, TimedOut, Worker
from fairqueue.clock import ManualClock
from fairqueue.errors import InvalidInput, InvalidPayload, InvalidTask, LeaseLost
from fairqueue.queue.reports import Report
from fairqueue.worker.context import RunningTask

Make = Callable[..., Worker]

SHORT = 0.3  # seconds of a lease that is to be extended within a test


@pytest.fixture
def make() -> Iterator[Make]:
    """Make workers that are stopped at the end, whatever happens."""
    made: list[Worker] = []

    def make(queue: TaskQueue, *arguments: Any, **settings: Any) -> Worker:
        made.append(Worker(queue, *arguments, **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.stop(0.0)
    eventually(lambda: not worker_threads(), "all threads of workers have ended")


@pytest.fixture
def thief(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    """The same queue as seen by one whose clock is ahead: all leases are over for it."""
    with TaskQueue(redis_client, clock=ManualClock(time.time() + 1000)) as queue:
        yield queue


def worker_threads() -> list[str]:
    names = ("fairqueue-slot", "fairqueue-worker", "fairqueue-leases")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


def state(queue: TaskQueue, task_id: str) -> str:
    return info_of(queue, task_id).state


def places_of(queue: TaskQueue, *task_ids: str) -> list[str]:
    return [state(queue, task_id) for task_id in task_ids]


def spin(seconds: float = 20.0) -> None:
    """Work that a time-out can end at any moment."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


# --- in the thread of the caller ------------------------------------------------------------------


def test_results_are_recorded_whatever_kind_the_handler_is(queue: TaskQueue) -> None:
    worker = Worker(queue, worker_id="me")

    @worker.task("plain")
    def plain(payload: dict[str, Any]) -> Any:
        return payload["n"] + 1

    @worker.task("async")
    async def later(payload: dict[str, Any], context: TaskContext) -> Any:
        await asyncio.sleep(0)
        return [context.task_id, context.attempt, context.task.user_id]

    @worker.task("class")
    class Build:
        def handle(self, payload: dict[str, Any]) -> None:
            return None

    for name in ("plain", "async", "class"):
        push(queue, name, name=name, payload={"n": 1})
    assert worker.run_once() == 3
    assert [info_of(queue, n).result for n in ("plain", "async", "class")] == [
        2,
        ["async", 1, "alice"],
        None,
    ]
    assert {state(queue, n) for n in ("plain", "async", "class")} == {"finished"}
    assert info_of(queue, "plain").worker_id == "me"


def test_the_default_handler_gets_tasks_that_have_none_of_their_own(queue: TaskQueue) -> None:
    worker = Worker(queue, lambda task: f"{task.name} for {task.user_id}")
    worker.task("known")(lambda payload: "own")
    push(queue, "a", name="known")
    push(queue, "b", name="unknown")
    assert worker.run_once() == 2
    assert (info_of(queue, "a").result, info_of(queue, "b").result) == ("own", "unknown for alice")


def test_run_once_takes_at_most_as_many_as_there_are_slots(queue: TaskQueue) -> None:
    worker = Worker(queue, lambda task: None, concurrency=3)
    fill(queue, "alice", 7)
    assert [worker.run_once() for _ in range(4)] == [3, 3, 1, 0]


def test_run_until_empty_runs_all_that_is_ready_also_what_handlers_push(world: World) -> None:
    worker = Worker(world.queue, concurrency=2)

    @worker.task("default")
    def once_more(payload: dict[str, Any]) -> None:
        if payload.get("left"):
            world.queue.push(make_task(payload={"left": payload["left"] - 1}))

    world.push("first", payload={"left": 4})
    world.push("later", delay=60)
    assert worker.run_until_empty() == 5
    assert state(world.queue, "later") == "delayed"
    world.advance(60)
    assert worker.run_until_empty() == 1
    assert worker_threads() == []


def test_a_failure_is_retried_by_policy_then_buried_with_its_error(world: World) -> None:
    worker = Worker(world.queue)
    attempts: list[int] = []

    @worker.task("default", retries=3, backoff=10, backoff_cap=25, jitter="none")
    def fails(payload: dict[str, Any], context: TaskContext) -> None:
        attempts.append(context.attempt)
        raise ValueError(f"no. {context.attempt}")

    world.push("t")
    for attempt, delay in ((1, 10), (2, 20), (3, 25)):
        assert worker.run_until_empty() == 1
        found = world.info("t")
        assert (found.state, found.error) == ("delayed", f"ValueError: no. {attempt}")
        assert found.due_at == world.now() + timedelta(seconds=delay)
        world.advance(delay - 0.001)
        assert worker.run_until_empty() == 0
        world.advance(0.001)
    assert worker.run_until_empty() == 1
    found = world.info("t")
    assert (found.state, found.error, found.attempts) == ("buried", "ValueError: no. 4", 4)
    assert attempts == [1, 2, 3, 4]
    world.advance(1000)
    assert worker.run_until_empty() == 0
    assert world.stats()["retried"] == 3


def test_a_list_of_delays_is_kept_to(world: World) -> None:
    worker = Worker(world.queue)
    worker.task("default", retries=3, backoff=[1, 7], jitter="none")(lambda payload: 1 / 0)
    world.push("t")
    for delay in (1, 7, 7):
        assert worker.run_once() == 1
        assert world.info("t").due_at == world.now() + timedelta(seconds=delay)
        world.advance(delay)
    assert worker.run_once() == 1
    assert state(world.queue, "t") == "buried"


def test_a_task_that_succeeds_after_failures_is_finished_without_error(world: World) -> None:
    worker = Worker(world.queue)

    @worker.task("default")
    def flaky(payload: dict[str, Any], context: TaskContext) -> int:
        if context.attempt < 3:
            raise OSError("not yet")
        return context.attempt

    world.push("t")
    for _ in range(3):
        assert worker.run_once() == 1
        world.advance(60)
    found = world.info("t")
    assert (found.state, found.result, found.error) == ("finished", 3, None)


def test_retry_says_itself_when(world: World) -> None:
    worker = Worker(world.queue)

    @worker.task("default", retries=2, backoff=5, jitter="none")
    def busy(payload: dict[str, Any], context: TaskContext) -> None:
        if context.attempt == 1:
            raise Retry("the other side is busy", in_=42)
        raise Retry

    world.push("t")
    assert worker.run_once() == 1
    found = world.info("t")
    assert (found.state, found.error) == ("delayed", "the other side is busy")
    assert found.due_at == world.now() + timedelta(seconds=42)
    world.advance(42)
    assert worker.run_once() == 1
    found = world.info("t")
    assert found.error == "the handler asked for a retry"
    assert found.due_at == world.now() + timedelta(seconds=10)  # as the policy says
    world.advance(10)
    assert worker.run_once() == 1
    assert state(world.queue, "t") == "buried"  # a retry is an attempt as well


def test_retry_in_no_time_is_offered_again_at_once(queue: TaskQueue) -> None:
    worker = Worker(queue)

    @worker.task("default")
    def twice(payload: dict[str, Any], context: TaskContext) -> None:
        if context.attempt == 1:
            raise Retry(in_=0)

    push(queue, "t")
    assert worker.run_until_empty() == 2
    assert state(queue, "t") == "finished"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Discard("no such customer"), "no such customer"), (Discard(), "the handler discarded it")],
)
def test_discard_buries_at_once_with_its_reason(world: World, error: Discard, reason: str) -> None:
    worker = Worker(world.queue)

    @worker.task("default", retries=100)
    def discards(payload: dict[str, Any]) -> None:
        raise error

    world.push("t")
    assert worker.run_until_empty() == 1
    found = world.info("t")
    assert (found.state, found.error, found.attempts) == ("buried", reason, 1)


def test_a_task_of_an_unknown_name_is_left_to_others_and_finally_buried(world: World) -> None:
    worker = Worker(world.queue)
    world.push("t", name="of-the-new-version")
    waits = []
    while state(world.queue, "t") != "buried":
        assert worker.run_once() == 1
        found = world.info("t")
        assert found.error == "no handler for task 'of-the-new-version' here"
        if found.state == "delayed":
            waits.append((found.due_at - world.now()).total_seconds())
            world.clock.set(found.due_at)
    assert waits == [5, 10, 20, 40, 80]


def test_a_worker_that_knows_the_name_runs_what_another_did_not(world: World) -> None:
    old, new = Worker(world.queue), Worker(world.queue)
    new.task("job")(lambda payload: "done")
    world.push("t", name="job")
    assert old.run_once() == 1
    world.advance(5)
    assert new.run_once() == 1
    assert (state(world.queue, "t"), world.info("t").result) == ("finished", "done")


class Odd:
    def __repr__(self) -> str:
        return "odd \ud800"


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.parametrize(
    ("result", "kept"),
    [
        ({1, 2}, "{1, 2}"),
        (math.nan, "nan"),
        ([b"x"], "[b'x']"),
        ("\ud800", r"'\ud800'"),
        ("x" * 20_000, "'" + "x" * 999),
        (Unshowable(), "a Unshowable that cannot be shown"),
        (Odd(), "odd ?"),
        (10**5000, "a int that cannot be shown"),
        ((1, (2, "ü")), [1, [2, "ü"]]),
        ({"b": [None, True]}, {"b": [None, True]}),
        (0, 0),
        ("", ""),
        (False, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_result_that_is_no_json_is_kept_as_text(queue: TaskQueue, result: Any, kept: Any) -> None:
    push(queue, "t")
    assert Worker(queue, lambda task: result).run_once() == 1
    found = info_of(queue, "t")
    assert (found.state, found.result) == ("finished", kept)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit: "),
        (asyncio.CancelledError(), "CancelledError: "),
        (Speechless(), "Speechless: (its text cannot be read)"),
        (ValueError("\ud800"), "ValueError: ?"),
        (TimedOut(), "timed out: "),
        (TimedOut("by itself"), "timed out: by itself"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_exception_is_a_failure(queue: TaskQueue, error: BaseException, text: str) -> None:
    worker = Worker(queue)

    @worker.task("default", retries=0)
    def fails(payload: dict[str, Any]) -> None:
        if payload:
            raise error

    push(queue, "bad", payload={"fail": True})
    push(queue, "good")
    assert worker.run_once() == 2
    found = info_of(queue, "bad")
    assert found.state == "buried"
    assert found.error is not None
    assert found.error.startswith(text)
    assert state(queue, "good") == "finished"


def test_an_interrupt_from_the_keyboard_ends_the_run_and_gives_the_task_back(world: World) -> None:
    worker = Worker(world.queue)

    @worker.task("default")
    def interrupted(payload: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)

    world.push("t", "u")
    with pytest.raises(KeyboardInterrupt):
        worker.run_until_empty()
    assert {(state(world.queue, t), world.info(t).attempts) for t in "tu"} == {("ready", 0)}
    assert worker_threads() == []


# --- cancelling -----------------------------------------------------------------------------------


def test_a_waiting_task_that_is_cancelled_does_not_run(queue: TaskQueue) -> None:
    ran: list[str] = []
    push(queue, "a", "b")
    assert queue.cancel("a")
    assert Worker(queue, lambda task: ran.append(task.task_id)).run_until_empty() == 1
    assert ran == ["b"]
    assert state(queue, "a") == "cancelled"


@pytest.mark.parametrize("ends", ["with a result", "by an error", "by discard"])
def test_a_running_task_sees_that_it_is_cancelled(live: TaskQueue, make: Make, ends: str) -> None:
    worker = make(live, lease=SHORT)
    begun = threading.Event()
    seen: list[tuple[bool, bool]] = []

    @worker.task("default", retries=3, backoff=0)
    def patient(payload: dict[str, Any], context: TaskContext) -> str:
        begun.set()
        eventually(lambda: context.cancelled, "the handler sees that it is cancelled")
        seen.append((context.cancelled, context.lease_lost))
        if ends == "by an error":
            raise RuntimeError("stopped half-way")
        if ends == "by discard":
            raise Discard("stopped half-way")
        return "half"

    push(live, "t")
    worker.start()
    assert begun.wait(10)
    assert live.cancel("t")
    eventually(lambda: state(live, "t") != "running", "the task has ended")
    assert worker.stop(10)
    assert state(live, "t") == "cancelled"
    assert seen == [(True, False)]


def test_run_once_tells_its_handler_of_a_cancel_too(live: TaskQueue) -> None:
    worker = Worker(live, lease=SHORT)

    @worker.task("default")
    def patient(payload: dict[str, Any], context: TaskContext) -> None:
        assert live.cancel(context.task_id)
        eventually(lambda: context.cancelled, "the handler sees that it is cancelled")

    push(live, "t")
    assert worker.run_once() == 1
    assert state(live, "t") == "cancelled"


# --- threads: life --------------------------------------------------------------------------------


def test_a_worker_starts_and_stops_any_number_of_times(live: TaskQueue, make: Make) -> None:
    worker = make(live, lambda task: task.task_id, concurrency=2)
    for n in range(3):
        worker.start()
        worker.start()
        assert len(worker_threads()) == 4  # two slots, one that claims, one for leases
        push(live, f"t{n}")
        eventually(lambda n=n: state(live, f"t{n}") == "finished", "the task has run")  # type: ignore[misc]
        assert worker.stop(10) is True
        assert worker.stop(timedelta(seconds=10)) is True  # type: ignore[arg-type]
        eventually(lambda: not worker_threads(), "its threads have ended")
        push(live, f"after{n}")
        assert state(live, f"after{n}") == "ready"
        live.cancel(f"after{n}")


def test_many_threads_may_start_and_stop_it(live: TaskQueue, make: Make) -> None:
    worker = make(live, lambda task: None, concurrency=2)
    fill(live, "alice", 200)
    barrier = threading.Barrier(4)

    def both() -> None:
        barrier.wait(10)
        for _ in range(3):
            worker.start()
            worker.stop(10)

    threads = [threading.Thread(target=both) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert worker.stop(10)
    eventually(lambda: not worker_threads(), "its threads have ended")
    assert live.inspect().running == 0


def test_a_task_that_is_pushed_while_the_worker_waits_runs_soon(
    live: TaskQueue, make: Make, redis_client: redis.Redis
) -> None:
    worker = make(live, lambda task: None)
    worker.start()
    eventually(lambda: any(row["cmd"] == "blpop" for row in redis_client.client_list()), "it waits")
    began = time.monotonic()
    push(live, "now")
    eventually(lambda: state(live, "now") == "finished", "it has run", within=2)
    push(live, "soon", delay=0.2)
    eventually(lambda: state(live, "soon") == "finished", "it has run", within=2)
    assert time.monotonic() - began < 2


def test_stop_waits_for_what_runs_and_records_it(live: TaskQueue, make: Make, gate: Gate) -> None:
    worker = make(live, concurrency=2)
    worker.task("default")(gate)
    push(live, "a", "b")
    worker.start()
    eventually(lambda: len(gate.contexts) == 2, "both run")
    push(live, "c")
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(worker.stop(10)))
    stopping.start()
    assert not gate.context.cancelled
    assert stopping.is_alive()
    gate.go_on.set()
    stopping.join(10)
    assert stopped == [True]
    assert places_of(live, "a", "b", "c") == ["finished", "finished", "ready"]
    assert info_of(live, "a").result == "late"


def test_what_does_not_end_in_time_is_given_back_and_its_result_is_not_recorded(
    live: TaskQueue, make: Make, gate: Gate, redis_client: redis.Redis
) -> None:
    worker = make(live, concurrency=2)
    worker.task("default")(gate)
    push(live, "t")
    worker.start()
    assert gate.begun.wait(10)
    assert (state(live, "t"), info_of(live, "t").attempts) == ("running", 1)

    assert worker.stop(0.05) is False
    assert gate.context.cancelled
    found = info_of(live, "t")
    assert (found.state, found.attempts, found.error) == ("ready", 0, None)
    gate.go_on.set()
    eventually(lambda: not worker_threads(), "the handler has ended, and its thread")
    assert state(live, "t") == "ready"
    assert "finished" not in stats(redis_client)

    other = Worker(live, lambda task: "by another")
    assert other.run_once() == 1
    assert (info_of(live, "t").result, info_of(live, "t").attempts) == ("by another", 1)


def test_a_failure_after_a_release_is_not_recorded(live: TaskQueue, make: Make) -> None:
    worker = make(live)
    begun, go_on = threading.Event(), threading.Event()

    @worker.task("default", retries=0)
    def fails(payload: dict[str, Any]) -> None:
        begun.set()
        assert go_on.wait(20)
        raise ValueError

    push(live, "t")
    worker.start()
    assert begun.wait(10)
    assert worker.stop(0.0) is False
    go_on.set()
    eventually(lambda: not worker_threads(), "the handler has ended, and its thread")
    found = info_of(live, "t")
    assert (found.state, found.attempts, found.error) == ("ready", 0, None)


def test_what_no_slot_has_begun_is_given_back_at_once(
    live: TaskQueue, make: Make, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairqueue.worker.pool, "QUICK_S", 1000.0)  # so that tasks are claimed ahead
    worker = make(live, lambda task: None, concurrency=1)
    worker.task("gate")(gate)
    worker.start()
    push(live, "first")
    eventually(lambda: state(live, "first") == "finished", "one has run")
    push(live, "a", "b", name="gate")
    assert gate.begun.wait(10)
    eventually(lambda: places_of(live, "a", "b") == ["running"] * 2, "both are claimed")
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(worker.stop(10)))
    stopping.start()
    eventually(lambda: state(live, "b") == "ready", "the second is given back")
    assert info_of(live, "b").attempts == 0
    assert state(live, "a") == "running"
    gate.go_on.set()
    stopping.join(10)
    assert stopped == [True]
    assert places_of(live, "a", "b") == ["finished", "ready"]
    assert len(gate.contexts) == 1


def test_only_quick_tasks_are_claimed_ahead(live: TaskQueue, make: Make, gate: Gate) -> None:
    worker = make(live, concurrency=1)
    worker.task("default")(gate)
    push(live, "a", "b")
    worker.start()
    assert gate.begun.wait(10)
    assert ids_of(live.claim("other")) == ["b"]
    gate.go_on.set()
    assert worker.stop(10)


def test_what_was_claimed_while_the_worker_was_stopped_is_given_back(
    live: TaskQueue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    worker = make(live, lambda task: ran.append(task.task_id), concurrency=2)
    claimed, go_on = threading.Event(), threading.Event()
    together = live.exchange

    def slow(*arguments: Any, **named: Any) -> Any:
        answer = together(*arguments, **named)
        if answer[1].claims:
            claimed.set()
            assert go_on.wait(20)
        return answer

    monkeypatch.setattr(live, "exchange", slow)
    push(live, "a", "b")
    worker.start()
    assert claimed.wait(10)
    pool = worker._pool
    assert pool is not None
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(worker.stop(10)))
    stopping.start()
    eventually(lambda: pool._stopping, "it is being stopped")
    go_on.set()
    stopping.join(10)
    assert stopped == [True]
    assert ran == []
    assert [(state(live, t), info_of(live, t).attempts) for t in "ab"] == [("ready", 0)] * 2


# --- threads: how many at once, leases ------------------------------------------------------------


def test_exactly_as_many_tasks_run_at_once_as_there_are_slots(live: TaskQueue, make: Make) -> None:
    worker = make(live, concurrency=3)
    together, lock = threading.Barrier(3), threading.Lock()
    now, most = 0, 0

    @worker.task("default", retries=0)
    def counted(payload: dict[str, Any]) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait(10)  # broken, and the task buried, unless three run at once
        with lock:
            now -= 1

    fill(live, "alice", 15)
    fill(live, "bob", 15)
    worker.start()
    eventually(lambda: live.inspect().counters.get("finished") == 30, "all have run")
    assert most == 3
    assert worker.stop(10)


def test_the_lease_of_a_long_task_is_kept(live: TaskQueue, make: Make, gate: Gate) -> None:
    worker = make(live, lease=SHORT, concurrency=1)
    worker.task("default")(gate)
    push(live, "t")
    worker.start()
    assert gate.begun.wait(10)
    first = info_of(live, "t").lease_until
    assert first is not None

    def moved() -> bool:
        assert live.claim("other") == []
        until = info_of(live, "t").lease_until
        assert until is not None
        return until > first + timedelta(seconds=3 * SHORT)

    eventually(moved, "the lease has been extended several times")
    gate.go_on.set()
    assert worker.stop(10)
    found = info_of(live, "t")
    assert (found.state, found.attempts, found.result) == ("finished", 1, "late")
    assert not gate.context.lease_lost


def test_run_once_keeps_the_lease_of_a_long_task(live: TaskQueue) -> None:
    worker = Worker(live, lease=SHORT)

    @worker.task("default")
    def long(payload: dict[str, Any], context: TaskContext) -> None:
        first = info_of(live, "t").lease_until
        assert first is not None
        end = first + timedelta(seconds=SHORT)

        def moved() -> bool:
            assert live.claim("other") == []
            until = info_of(live, "t").lease_until
            return until is not None and until > end

        eventually(moved, "the lease has been extended")

    push(live, "t")
    assert worker.run_once() == 1
    assert (state(live, "t"), info_of(live, "t").attempts) == ("finished", 1)


@pytest.mark.parametrize("ends", ["with a result", "by an error"])
def test_a_run_that_has_lost_its_lease_is_told_and_not_recorded(
    live: TaskQueue, make: Make, thief: TaskQueue, ends: str, redis_client: redis.Redis
) -> None:
    worker = make(live, lease=SHORT)
    contexts: list[TaskContext] = []
    go_on = threading.Event()

    @worker.task("default", retries=0)
    def robbed(payload: dict[str, Any], context: TaskContext) -> str:
        contexts.append(context)
        assert go_on.wait(20)
        if ends == "by an error":
            raise ValueError
        return "mine"

    push(live, "t")
    worker.start()
    eventually(lambda: contexts, "it runs")
    stolen = claim_one(thief, lease=1000, worker="thief")
    eventually(lambda: contexts[0].lease_lost, "the handler sees that its lease is lost")
    assert contexts[0].cancelled
    # It is not asked for again: the keeper says it once.
    before = stats(redis_client)["lost_leases"]
    go_on.set()
    assert worker.stop(10)
    assert (state(live, "t"), info_of(live, "t").worker_id) == ("running", "thief")
    assert stats(redis_client)["lost_leases"] == before + 1
    thief.finish(stolen, "his")
    assert (info_of(live, "t").result, info_of(live, "t").attempts) == ("his", 2)


def test_a_slot_survives_an_error_that_nobody_thought_of(
    live: TaskQueue, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the lease is not kept for ever: the task is offered again."""
    worker = make(live, concurrency=1, lease=SHORT)
    worker.task("default")(lambda payload: "done")

    def break_once(*arguments: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(worker._executor, "execute", break_once)
    push(live, "t")
    worker.start()
    eventually(lambda: state(live, "t") == "finished", "it was run again")
    assert worker.stop(10)
    assert info_of(live, "t").attempts == 2
    assert "slot_failed" in caplog.text


# --- time-outs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [True, False])
def test_a_handler_over_its_time_is_retried(live: TaskQueue, make: Make, threads: bool) -> None:
    worker = make(live, concurrency=1, lease=30)
    began = time.monotonic()
    errors: list[str | None] = []
    raised: list[type[BaseException]] = []

    @worker.task("default", retries=1, backoff=0, timeout=0.05)
    def too_long(payload: dict[str, Any], context: TaskContext) -> str:
        if context.attempt == 2:
            errors.append(info_of(live, "t").error)
            return "quick"
        try:
            spin()
        except BaseException as error:
            raised.append(type(error))
            assert context.cancelled
            raise
        return "slow"

    push(live, "t")
    if threads:
        worker.start()
        eventually(lambda: state(live, "t") == "finished", "the second attempt has run")
        assert worker.stop(10)
    else:
        assert worker.run_until_empty() == 2
    assert raised == [TimedOut]
    assert errors == ["timed out: ran for more than 0.05 s"]
    assert (info_of(live, "t").result, info_of(live, "t").attempts) == ("quick", 2)
    assert time.monotonic() - began < 5  # not only when leases are extended, every 10 s


def test_an_async_handler_that_takes_too_long_is_ended_too(live: TaskQueue, make: Make) -> None:
    worker = make(live, concurrency=1)

    @worker.task("default", retries=0, timeout=0.05)
    async def forever(payload: dict[str, Any]) -> None:
        if payload:
            await asyncio.Event().wait()

    push(live, "t", payload={"forever": True})
    push(live, "next")
    worker.start()
    eventually(lambda: state(live, "next") == "finished", "the next has run")
    found = info_of(live, "t")
    assert (found.state, found.error) == ("buried", "timed out: ran for more than 0.05 s")


def test_a_time_out_longer_than_the_run_changes_nothing(live: TaskQueue, make: Make) -> None:
    worker = make(live, concurrency=2)
    worker.task("default", timeout=30)(lambda payload: "in time")
    fill(live, "alice", 50)
    worker.start()
    eventually(lambda: live.inspect().counters.get("finished") == 50, "all have run")
    assert worker.stop(10)


def test_a_time_out_that_comes_as_the_handler_ends_does_not_hit_the_next_task(
    live: TaskQueue, make: Make, redis_client: redis.Redis
) -> None:
    worker = make(live, concurrency=2)
    timeout, pairs = 0.003, 200

    @worker.task("edge", retries=0, timeout=timeout)
    def ends_at_its_time_out(payload: dict[str, Any]) -> None:
        spin(timeout * payload["part"])

    @worker.task("next", retries=0)
    def innocent(payload: dict[str, Any]) -> None:
        sum(range(1000))

    tasks = []
    for n in range(pairs):
        part = 0.9 + 0.2 * n / pairs
        tasks.append(make_task(task_id=f"edge-{n}", name="edge", payload={"part": part}))
        tasks.append(make_task(task_id=f"next-{n}", name="next"))
    live.push_many(tasks)
    worker.start()

    def ended() -> int:
        counters = live.inspect().counters
        return counters.get("finished", 0) + counters.get("buried", 0)

    eventually(lambda: ended() == 2 * pairs, "all have ended")
    found = places(redis_client)
    assert [task_id for task_id in found.get("buried", []) if task_id.startswith("next")] == []
    assert sum(name.startswith("fairqueue-slot") for name in worker_threads()) == 2
    assert worker.stop(10)


# --- nothing that happens ends the worker ---------------------------------------------------------


def test_slots_survive_whatever_handlers_raise_and_return(live: TaskQueue, make: Make) -> None:
    worker = make(live, concurrency=1)
    shared: list[Any] = []

    @worker.task("default", retries=0)
    def odd(payload: dict[str, Any]) -> Any:
        kind = payload["kind"]
        if kind == "exit":
            sys.exit(1)
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "speechless":
            raise Speechless
        if kind == "changing":
            return shared
        shared.append(object())  # what was returned before is no JSON any more
        return {"odd": Odd(), "unshowable": Unshowable()}.get(kind, "good")

    kinds = ["exit", "interrupt", "speechless", "changing", "odd", "unshowable", "good"]
    live.push_many(make_task(task_id=kind, payload={"kind": kind}) for kind in kinds)
    worker.start()
    eventually(lambda: state(live, "good") == "finished", "the last one has run")
    assert places_of(live, *kinds) == ["buried"] * 3 + ["finished"] * 4
    assert info_of(live, "changing").result == []
    assert worker.stop(10)


def test_a_worker_goes_on_when_redis_was_killed_and_is_back(
    own_server: OwnServer, tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    server = own_server(tmp_path)
    runs: list[str] = []
    halfway, go_on = threading.Event(), threading.Event()
    with (
        TaskQueue.from_url(server.url, timeout=0.5) as queue,
        redis.Redis.from_url(server.url) as client,
    ):
        worker = make(queue, concurrency=4, lease=1.0)

        @worker.task("default", retries=0)
        def counted(payload: dict[str, Any], context: TaskContext) -> None:
            runs.append(context.task_id)
            if len(runs) >= 100:
                halfway.set()
                assert go_on.wait(20)

        fill(queue, "alice", 150)
        fill(queue, "bob", 150)
        worker.start()
        assert halfway.wait(10)
        server.kill()
        go_on.set()
        eventually(lambda: "worker_failed" in caplog.text, "it has seen that Redis is away")
        server.restart()
        push(queue, "last")
        eventually(lambda: queue.inspect().counters.get("finished") == 301, "all have run")
        assert worker.stop(10)
        assert len(set(runs)) == 301
        assert set(places(client)) == {"finished"}
        check_consistency(client)


def test_stop_is_bounded_while_redis_is_away(own_server: OwnServer, make: Make, gate: Gate) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url, timeout=0.3) as queue:
        worker = make(queue, concurrency=8)
        worker.task("default")(gate)
        fill(queue, "alice", 8)
        worker.start()
        eventually(lambda: len(gate.contexts) == 8, "all slots are busy")
        server.kill()
        began = time.monotonic()
        assert worker.stop(0.1) is False
        assert time.monotonic() - began < 2  # one time-out, not one for each of them
        assert all(context.cancelled for context in gate.contexts)
        gate.go_on.set()
        eventually(lambda: not worker_threads(), "its threads have ended")


# --- finish_and_claim -----------------------------------------------------------------------------


def test_finish_and_claim_records_and_takes_in_one_call(world: World) -> None:
    world.push("a", "b", "c", "d", "e")
    first = world.queue.claim("w", limit=3)
    world.queue.cancel("b")
    world.queue.release(first[2])
    words, claims, hint = world.queue.finish_and_claim(
        [(first[0], {"n": 1}), (first[1], None), (first[2], None)], "w", 2, lease=10
    )
    assert words == ["finished", "cancelled", "lost_lease"]
    assert ids_of(claims) == ["c", "d"]
    assert hint == 0.0  # there is more
    assert world.info("a").result == {"n": 1}
    assert {claim.lease_until for claim in claims} == {world.now() + timedelta(seconds=10)}
    assert {world.info(t).lease_until for t in "cd"} == {world.now() + timedelta(seconds=10)}
    assert [claim.worker_id for claim in claims] == ["w", "w"]
    world.queue.finish_many((claim, None) for claim in claims)
    assert world.places()["finished"] == ["a", "c", "d"]


def test_what_is_finished_makes_room_for_the_claim_of_the_same_call(queue: TaskQueue) -> None:
    queue.set_user("alice", max_running=1)
    push(queue, "a", "b")
    claim = claim_one(queue)
    words, claims, _ = queue.finish_and_claim([(claim, None)], "w", 5)
    assert (words, ids_of(claims)) == (["finished"], ["b"])


def test_the_hint_says_when_there_may_be_more(queue: TaskQueue) -> None:
    assert queue.finish_and_claim([], "w", 1) == ([], [], math.inf)
    push(queue, "later", delay=7.5)
    assert queue.finish_and_claim([], "w", 1) == ([], [], 7.5)
    push(queue, "now")
    _, claims, hint = queue.finish_and_claim([], "w", 1, lease=3)
    assert (ids_of(claims), hint) == (["now"], 3.0)


def test_nothing_to_finish_or_nothing_to_claim_is_fine(queue: TaskQueue) -> None:
    push(queue, "a", "b")
    claim = claim_one(queue)
    assert queue.finish_and_claim([(claim, 1)], "w", 0) == (["finished"], [], 0.0)
    assert queue.finish_and_claim([], "w", 0) == ([], [], 0.0)
    assert state(queue, "b") == "ready"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"worker_id": ""}, "worker_id must be"),
        ({"limit": -1}, "limit must be a whole number from 0 to 1000, not -1"),
        ({"limit": 1001}, "limit must be a whole number from 0 to 1000, not 1001"),
        ({"limit": True}, "limit must be a whole number from 0 to 1000, not True"),
        ({"lease": 0}, "lease must be 0.001"),
        ({"results": 251}, "results must be a whole number from 0 to 250"),
        ({"results": "bad"}, "result"),
    ],
)
def test_finish_and_claim_names_what_is_out_of_bounds_and_does_nothing(
    queue: TaskQueue, change: dict[str, Any], named: str
) -> None:
    push(queue, "a", "b")
    claim = claim_one(queue)
    arguments: dict[str, Any] = {"results": [(claim, 1)], "worker_id": "w", "limit": 1} | change
    if arguments["results"] == 251:
        arguments["results"] = [(claim, 1)] * 251
    elif arguments["results"] == "bad":
        arguments["results"] = [(claim, object())]
    with pytest.raises(InvalidInput) as error:
        queue.finish_and_claim(**arguments)
    assert named in str(error.value)
    assert places_of(queue, "a", "b") == ["running", "ready"]


def test_as_many_as_can_be_finished_and_claimed_at_once(queue: TaskQueue) -> None:
    fill(queue, "alice", 1250)
    claims = queue.claim("w", limit=250)
    words, more, _ = queue.finish_and_claim([(claim, 1) for claim in claims], "w", 1000)
    assert (words, len(more)) == (["finished"] * 250, 250)


def test_finish_and_claim_goes_on_when_the_scripts_were_flushed(world: World) -> None:
    world.push("a", "b", "c")
    claims = world.queue.claim("w")
    for task_id in "bc":
        world.redis.script_flush()
        words, claims, _ = world.queue.finish_and_claim([(claims[0], None)], "w", 1)
        assert (words, ids_of(claims)) == (["finished"], [task_id])
    assert world.stats() | {"finished": 2, "claimed": 3} == world.stats()
    assert world.info("c").attempts == 1


def test_a_lost_reply_to_finish_and_claim_is_asked_for_again(own_server: OwnServer) -> None:
    server = own_server()
    with (
        LossyProxy(server.socket_path) as proxy,
        TaskQueue.from_url(proxy.url, timeout=10) as far,
        redis.Redis.from_url(server.url) as client,
    ):
        push(far, "a", "b", "c")
        claim = claim_one(far)
        proxy.drop_replies(2)
        words, claims, _ = far.finish_and_claim([(claim, "x")], "w", 1)
        assert proxy.dropped == 2
        assert (words, ids_of(claims)) == (["finished"], ["b"])
        counted = stats(client)
        assert (counted["finished"], counted["claimed"]) == (1, 2)
        assert "lost_leases" not in counted
        far.finish(claims[0])
        with pytest.raises(LeaseLost):
            far.retry(claims[0])
        check_consistency(client)


def test_what_was_claimed_ahead_goes_back_when_no_slot_becomes_free(live: TaskQueue) -> None:
    """After many quick tasks two that take long hold the slots; the others must not wait."""
    ending = threading.Event()
    worker = Worker(live, handler=lambda task: task.payload and ending.wait(60), concurrency=2)
    fill(live, "quick", 200)
    worker.start()
    try:
        eventually(lambda: live.inspect().counters.get("finished") == 200, "the quick ones ran")
        live.push_many(make_task("slow", f"s{i}", payload={"n": i}) for i in range(20))
        eventually(lambda: live.inspect().counters.get("released", 0) > 0, "some are given back")
        eventually(lambda: live.inspect().running == 2, "only what runs is held")
        assert live.size() == 18
    finally:
        ending.set()
        assert worker.stop()


def test_runs_are_counted_by_handler_and_outcome(world: World) -> None:
    worker = Worker(world.queue, registry=world.registry)

    @worker.task("good")
    def good(payload: dict[str, Any]) -> None:
        pass

    @worker.task("bad", retries=0)
    def bad(payload: dict[str, Any]) -> None:
        raise ValueError("no")

    @worker.task("again", jitter="none")
    def again(payload: dict[str, Any]) -> None:
        raise Retry

    for name in ("good", "bad", "again", "made up by a user"):
        world.push(name, name=name)
    worker.run_until_empty()

    def runs(task: str, outcome: str) -> float | None:
        labels = {"queue": "default", "task": task, "outcome": outcome}
        return world.registry.get_sample_value("fairqueue_worker_runs_total", labels)

    assert runs("good", "finished") == 1
    assert runs("bad", "buried") == 1
    assert runs("again", "retried") == 1
    assert runs("unknown", "retried") == 1
    for task, count in (("good", 1), ("bad", 1), ("again", 1), ("unknown", None)):
        labels = {"queue": "default", "task": task}
        found = world.registry.get_sample_value("fairqueue_worker_run_seconds_count", labels)
        assert found == count, task


def test_a_registry_that_is_none_is_refused(queue: TaskQueue) -> None:
    with pytest.raises(InvalidInput, match="registry must be a CollectorRegistry, not a str"):
        Worker(queue, registry="mine")  # type: ignore[arg-type]


# --- hooks ----------------------------------------------------------------------------------------


class Calls:
    """Hooks that write down how they were called."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def hook(self, name: str, error: BaseException | None = None) -> Callable[..., None]:
        """One that takes two arguments, and fails if it is told to."""

        def call(first: Any, context: TaskContext) -> None:
            self.made.append((name, first))
            if error is not None:
                raise error

        return call

    def last(self, name: str, error: BaseException | None = None) -> Callable[..., None]:
        """The same for the end of a run."""

        def call(context: TaskContext) -> None:
            self.made.append((name, context.task_id))
            if error is not None:
                raise error

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.made]


@pytest.fixture
def calls() -> Calls:
    return Calls()


def with_all_hooks(world: World, calls: Calls, **failing: BaseException) -> Worker:
    """A worker with a hook of each kind, and a handler with one of each; some of which fail."""
    worker = Worker(world.queue)
    worker.before(calls.hook("worker.before", failing.get("worker_before")))
    worker.then(calls.hook("worker.then", failing.get("worker_then")))
    worker.catch(calls.hook("worker.catch", failing.get("worker_catch")))
    worker.finally_(calls.last("worker.finally", failing.get("worker_finally")))

    @worker.task(
        "default",
        retries=0,
        before=calls.hook("before", failing.get("before")),
        then=[calls.hook("then", failing.get("then"))],
    )
    def build(payload: dict[str, Any]) -> str:
        calls.made.append(("handler", payload))
        if "handler" in failing:
            raise failing["handler"]
        return "built"

    build.catch(calls.hook("catch", failing.get("catch")))
    build.finally_(calls.last("finally", failing.get("finally")))
    return worker


def test_all_hooks_are_called_in_order_around_a_success(world: World, calls: Calls) -> None:
    world.push("t", payload={"n": 7})
    assert with_all_hooks(world, calls).run_once() == 1
    assert calls.made == [
        ("worker.before", {"n": 7}),
        ("before", {"n": 7}),
        ("handler", {"n": 7}),
        ("then", "built"),
        ("worker.then", "built"),
        ("finally", "t"),
        ("worker.finally", "t"),
    ]


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (ValueError("no"), "buried"),
        (Retry("busy"), "buried"),  # there are no retries left
        (Discard("no use"), "buried"),
        (TimedOut("by itself"), "buried"),
        (SystemExit(3), "buried"),
    ],
)
def test_hooks_of_worker_and_handler_are_called_in_order_around_a_failure(
    world: World, calls: Calls, error: BaseException, place: str
) -> None:
    world.push("t")
    assert with_all_hooks(world, calls, handler=error).run_once() == 1
    assert state(world.queue, "t") == place
    assert calls.made[3:] == [
        ("catch", error),
        ("worker.catch", error),
        ("finally", "t"),
        ("worker.finally", "t"),
    ]


ENDS = ["finally", "worker.finally"]
FAILED = ["catch", "worker.catch", *ENDS]
WENT_WELL = ["then", "worker.then", *ENDS]


@pytest.mark.parametrize(
    ("failing", "called", "place"),
    [
        ("worker_before", ["worker.before", *FAILED], "buried"),
        ("before", ["worker.before", "before", *FAILED], "buried"),
        ("then", ["worker.before", "before", "handler", *WENT_WELL], "finished"),
        ("worker_then", ["worker.before", "before", "handler", *WENT_WELL], "finished"),
        ("finally", ["worker.before", "before", "handler", *WENT_WELL], "finished"),
        ("worker_finally", ["worker.before", "before", "handler", *WENT_WELL], "finished"),
    ],
)
@pytest.mark.parametrize("error", [RuntimeError("of a hook"), SystemExit(1)])
def test_a_hook_that_fails_before_the_handler_fails_the_run_and_later_ones_do_not(
    world: World,
    calls: Calls,
    failing: str,
    called: list[str],
    place: str,
    error: BaseException,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world.push("t")
    assert with_all_hooks(world, calls, **{failing: error}).run_once() == 1
    assert calls.names == called
    assert state(world.queue, "t") == place
    assert ("hook_failed" in caplog.text and "hook=call" in caplog.text) == (place == "finished")


@pytest.mark.parametrize("failing", ["catch", "worker_catch", "finally", "worker_finally"])
def test_a_failing_hook_hides_no_failure(world: World, calls: Calls, failing: str) -> None:
    world.push("t")
    errors = {failing: RuntimeError("of a hook"), "handler": ValueError("of the handler")}
    assert with_all_hooks(world, calls, **errors).run_once() == 1
    assert calls.names[3:] == FAILED
    assert (state(world.queue, "t"), world.info("t").error) == (
        "buried",
        "ValueError: of the handler",
    )


@pytest.mark.parametrize("failing", ["then", "worker_then", "finally", "worker_finally"])
def test_a_hook_whose_error_cannot_be_shown_changes_nothing(
    world: World, calls: Calls, failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.push("t")
    assert with_all_hooks(world, calls, **{failing: Mute()}).run_once() == 1
    assert (state(world.queue, "t"), world.info("t").attempts) == ("finished", 1)
    assert 'error="Mute: (its text cannot be read)"' in caplog.text


@pytest.mark.parametrize("failing", ["catch", "worker_catch", "finally", "worker_finally"])
def test_a_mute_error_of_a_hook_hides_no_failure(world: World, calls: Calls, failing: str) -> None:
    world.push("t")
    errors = {failing: Mute(), "handler": ValueError("of the handler")}
    assert with_all_hooks(world, calls, **errors).run_once() == 1
    assert (state(world.queue, "t"), world.info("t").error) == (
        "buried",
        "ValueError: of the handler",
    )


def test_hooks_may_take_fewer_arguments_and_be_async(queue: TaskQueue, calls: Calls) -> None:
    worker = Worker(queue, lambda task: "result")

    @worker.before
    def nothing() -> None:
        calls.made.append("before")

    @worker.then
    async def only_the_result(result: str) -> None:
        await asyncio.sleep(0)
        calls.made.append(result)

    @worker.then
    def everything(*arguments: Any) -> None:
        calls.made.append(len(arguments))

    @worker.finally_
    def with_an_option(factor: int = 2) -> None:
        calls.made.append(factor)

    push(queue, "t")
    assert worker.run_once() == 1
    assert calls.made == ["before", "result", 2, 2]


def test_async_hooks_run_in_the_loop_of_their_async_handler(queue: TaskQueue) -> None:
    worker = Worker(queue)
    loops: list[Any] = []

    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    @worker.task("default", before=note, then=note, finally_=note)
    async def later(payload: dict[str, Any]) -> None:
        await note()

    push(queue, "t")
    assert worker.run_once() == 1
    assert (len(loops), len(set(loops))) == (4, 1)


def test_hooks_are_called_in_threads_too(live: TaskQueue, make: Make, calls: Calls) -> None:
    worker = make(live, concurrency=2)
    worker.before(calls.hook("before"))
    worker.finally_(calls.last("finally"))
    worker.register("default", lambda payload: None)
    fill(live, "alice", 20)
    worker.start()
    eventually(lambda: live.inspect().counters.get("finished") == 20, "all have run")
    assert worker.stop(10)
    assert sorted(calls.names) == ["before"] * 20 + ["finally"] * 20


def test_a_keyboard_interrupt_in_a_hook_releases_the_task(queue: TaskQueue, calls: Calls) -> None:
    worker = Worker(queue, lambda task: None)
    worker.then(lambda: signal.raise_signal(signal.SIGINT))
    push(queue, "t")
    with pytest.raises(KeyboardInterrupt):
        worker.run_once()
    assert (state(queue, "t"), info_of(queue, "t").attempts) == ("ready", 0)


# --- filters --------------------------------------------------------------------------------------


def yes(payload: dict[str, Any]) -> bool:
    return True


def no(payload: dict[str, Any], context: TaskContext) -> int:
    return 0


async def small(payload: dict[str, Any]) -> bool:
    return bool(payload["n"] < 10)


@pytest.mark.parametrize(
    ("filters", "skipped_by"),
    [
        ({}, None),
        ({"when": yes}, None),
        ({"when": no}, "no"),
        ({"when": [yes, small]}, None),
        ({"when": [yes, no, small]}, "no"),
        ({"skip": yes}, "yes"),
        ({"skip": no}, None),
        ({"skip": [no, small, yes]}, "small"),
        ({"when": yes, "skip": no}, None),
        ({"when": yes, "skip": small}, "small"),
        ({"when": no, "skip": yes}, "no"),
        ({"when": [], "skip": []}, None),
    ],
)
def test_a_task_runs_if_all_of_when_and_none_of_skip_say_yes(
    world: World, calls: Calls, filters: dict[str, Any], skipped_by: str | None
) -> None:
    worker = Worker(world.queue, registry=world.registry)
    worker.before(calls.hook("before"))
    worker.finally_(calls.last("finally"))
    worker.register("job", lambda payload: "ran", **filters)
    world.push("t", name="job", payload={"n": 7})
    assert worker.run_once() == 1
    skipped = skipped_by is not None
    found = world.info("t")
    assert found.state == "finished"
    assert found.result == ({"skipped": skipped_by} if skipped else "ran")
    assert calls.names == ([] if skipped else ["before", "finally"])
    counted = {
        outcome: world.registry.get_sample_value(
            "fairqueue_worker_runs_total", {"queue": "default", "task": "job", "outcome": outcome}
        )
        for outcome in ("finished", "skipped")
    }
    assert counted == {"finished": None if skipped else 1, "skipped": 1 if skipped else None}


@pytest.mark.parametrize("kind", ["when", "skip"])
def test_a_filter_that_raises_has_failed_the_run(queue: TaskQueue, calls: Calls, kind: str) -> None:
    def broken(payload: dict[str, Any]) -> bool:
        return bool(payload["missing"])

    worker = Worker(queue)
    worker.catch(calls.hook("catch"))
    options: dict[str, Any] = {kind: broken}
    worker.register("default", lambda payload: "ran", retries=0, **options)
    push(queue, "t")
    assert worker.run_once() == 1
    assert (state(queue, "t"), info_of(queue, "t").error) == ("buried", "KeyError: 'missing'")
    assert calls.names == ["catch"]


# --- pushing by the handler -----------------------------------------------------------------------


def test_a_registered_task_is_pushed_with_its_payload_as_arguments(queue: TaskQueue) -> None:
    worker = Worker(queue)

    @worker.task("reports.build")
    def build(payload: dict[str, Any]) -> Any:
        return payload

    task_id = build.push("alice", report=7, user_id="in the payload", self=1, name="x", delay=2)
    assert worker.run_once() == 1
    found = info_of(queue, task_id)
    assert (found.user_id, found.name) == ("alice", "reports.build")
    assert found.result == {
        "report": 7,
        "user_id": "in the payload",
        "self": 1,
        "name": "x",
        "delay": 2,
    }


def test_a_dispatch_says_when_with_which_priority_and_id(world: World) -> None:
    build = Worker(world.queue).register("build", lambda payload: None)
    soon = world.now() + timedelta(minutes=1)
    pushed = {
        "delay": build.delay(60).push("alice"),
        "at": build.at(soon).push("alice"),
        "both": build.delay(5).at(soon).push("alice"),
        "options": build.options(priority=5).delay(60).options(task_id="mine").push("alice"),
    }
    found = {name: world.info(task_id) for name, task_id in pushed.items()}
    assert {name: (i.state, i.due_at, int(i.priority)) for name, i in found.items()} == {
        "delay": ("delayed", soon, 3),
        "at": ("delayed", soon, 3),
        "both": ("delayed", soon, 3),
        "options": ("delayed", soon, 5),
    }
    assert pushed["options"] == "mine"
    assert build.options(task_id="once").push("bob", n=1) == "once"
    assert build.options(task_id="once").push("bob", n=1) == "once"
    assert world.queue.size("bob") == 1


def test_a_dispatch_is_not_changed_by_what_is_made_of_it(queue: TaskQueue) -> None:
    build = Worker(queue).register("build", lambda payload: None)
    delayed = build.delay(60)
    urgent = delayed.options(priority=6)
    first, second = delayed.push("alice"), urgent.push("alice")
    assert (int(info_of(queue, first).priority), int(info_of(queue, second).priority)) == (3, 6)
    assert state(queue, build.push("alice")) == "ready"


@pytest.mark.parametrize(
    ("push_it", "kind", "says"),
    [
        (lambda build: build.push(""), InvalidTask, "user_id must .*not ''"),
        (lambda build: build.push(7), InvalidTask, "user_id must .*not 7"),
        (lambda build: build.push("alice", n={1}), InvalidPayload, r"payload\.n must .* not a set"),
        (lambda build: build.delay(-1).push("alice"), InvalidTask, "delay must .*not -1"),
        (lambda build: build.at("noon").push("alice"), InvalidTask, "at must .*not 'noon'"),
        (
            lambda build: build.options(priority=9).push("alice"),
            InvalidTask,
            "priority must .*not 9",
        ),
        (
            lambda build: build.options(task_id="").push("alice"),
            InvalidTask,
            "task_id must .*not ''",
        ),
    ],
)
def test_bad_values_are_named_and_nothing_is_pushed(
    queue: TaskQueue, push_it: Any, kind: type[Exception], says: str
) -> None:
    build = Worker(queue).register("build", lambda payload: None)
    with pytest.raises(kind, match=says):
        push_it(build)
    assert (queue.size(), queue.inspect().delayed) == (0, 0)


# --- what is told of a run ------------------------------------------------------------------------


class Told:
    """A queue's calls that end claims, with the reports that were given."""

    def __init__(self, queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reports: dict[str, Report] = {}
        finish_many = queue.finish_many

        def finish(results: Any) -> Any:
            listed = list(results)
            for claim, _, report in listed:
                self.reports[claim.task.task_id] = report
            return finish_many(listed)

        monkeypatch.setattr(queue, "finish_many", finish)
        for name in ("retry", "bury"):
            monkeypatch.setattr(queue, name, self._noting(getattr(queue, name)))

    def _noting(self, action: Callable[..., None]) -> Callable[..., None]:
        def noting(claim: Any, *arguments: Any, report: Report, **named: Any) -> None:
            self.reports[claim.task.task_id] = report
            action(claim, *arguments, report=report, **named)

        noting.__name__ = action.__name__
        return noting


@pytest.fixture
def told(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(queue, monkeypatch)


def test_a_plain_success_tells_nothing_but_its_time(queue: TaskQueue, told: Told) -> None:
    push(queue, "t")
    assert Worker(queue, lambda task: None).run_once() == 1
    report = told.reports["t"]
    assert report.document == ""
    assert report.seconds > 0


def test_a_success_tells_what_it_has_logged(queue: TaskQueue, told: Told) -> None:
    worker = Worker(queue)
    worker.register("default", lambda payload, context: context.log.info("half done"))
    push(queue, "t")
    assert worker.run_once() == 1
    assert [line.message for line in told.reports["t"].log] == ["half done"]


def test_fields_of_a_log_line_are_kept_with_it(
    queue: TaskQueue, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(queue, capture_logs=True)

    @worker.task("default")
    def logs(payload: dict[str, Any], context: TaskContext) -> None:
        context.log("half done", page=7, of=[1, 2])
        context.log("slow", level="warning", message="x", name="y", task="mine")
        context.log.error("page %d is empty", 8, extra={"page": 8, "args": "z"})
        logging.getLogger("elsewhere").warning("full", extra={"free": 0, "odd": Path("/x")})
        context.log("nothing more")

    push(queue, "t")
    with caplog.at_level(logging.INFO):
        assert worker.run_once() == 1
    assert [line[1:] for line in told.reports["t"].log] == [
        ("info", "half done", {"page": 7, "of": [1, 2]}),
        ("warning", "slow", {"message": "x", "name": "y", "task": "mine"}),
        ("error", "page 8 is empty", {"page": 8, "args": "z"}),
        ("warning", "full", {"free": 0, "odd": "/x"}),
        ("info", "nothing more", {}),
    ]
    of_task = [vars(each) for each in caplog.records if each.name == "fairqueue.task"]
    assert [(each.get("page"), each["task"]) for each in of_task] == [
        (7, "t"),
        (None, "t"),
        (8, "t"),
        (None, "t"),
    ]


@pytest.mark.parametrize(
    ("error", "kind", "message", "timed_out"),
    [
        (ValueError("no"), "ValueError", "no", False),
        (Retry("busy"), "Retry", "busy", False),
        (Discard("no use"), "Discard", "no use", False),
        (TimedOut("by itself"), "TimedOut", "by itself", True),
        (Speechless(), "Speechless", "(its text cannot be read)", False),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else type(value).__name__,
)
def test_a_failure_tells_how_and_where_it_failed(
    queue: TaskQueue, told: Told, error: Exception, kind: str, message: str, timed_out: bool
) -> None:
    worker = Worker(queue)

    @worker.task("default")
    def fails(payload: dict[str, Any], context: TaskContext) -> None:
        context.log("so far")
        raise error

    push(queue, "t")
    assert worker.run_once() == 1
    report = told.reports["t"]
    assert (report.error_type, report.message, report.timed_out) == (kind, message, timed_out)
    assert "in fails" in report.traceback
    assert "fairqueue/" not in report.traceback
    assert [line.message for line in report.log] == ["so far"]
    assert len(report.fingerprint) == 16


def test_a_task_without_a_handler_is_told_as_such(queue: TaskQueue, told: Told) -> None:
    push(queue, "t", name="of-the-new-version")
    assert Worker(queue).run_once() == 1
    assert told.reports["t"].error_type == "UnknownTask"


@pytest.mark.parametrize("kind", ["plain", "async", "turned into another error"])
def test_a_time_out_is_reported_as_such(queue: TaskQueue, told: Told, kind: str) -> None:
    worker = Worker(queue)

    def too_long(payload: dict[str, Any]) -> None:
        try:
            spin()
        except TimedOut as error:
            if kind == "plain":
                raise
            raise ValueError("half-way") from error

    async def too_long_async(payload: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    worker.register("default", too_long_async if kind == "async" else too_long, timeout=0.05)
    push(queue, "t")
    assert worker.run_once() == 1
    report = told.reports["t"]
    assert report.timed_out
    assert report.message == ("half-way" if "error" in kind else "ran for more than 0.05 s")


# --- logs that are captured -----------------------------------------------------------------------


@pytest.mark.parametrize("capture_logs", [True, False])
def test_what_loggers_are_told_in_a_handler_is_kept_if_that_is_asked_for(
    queue: TaskQueue, told: Told, capture_logs: bool
) -> None:
    elsewhere = logging.getLogger("elsewhere")
    before = logging.getLogger().handlers[:]
    during: list[int] = []
    worker = Worker(queue, capture_logs=capture_logs)
    worker.before(lambda: elsewhere.warning("in a hook"))

    @worker.task("plain")
    def plain(payload: dict[str, Any]) -> None:
        during.append(len(logging.getLogger().handlers))
        elsewhere.warning("of plain")

    @worker.task("async")
    async def later(payload: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        elsewhere.warning("of async")

    for name in ("plain", "async"):
        push(queue, name, name=name)
    assert worker.run_once() == 2
    kept = {name: [line.message for line in told.reports[name].log] for name in ("plain", "async")}
    expected = {"plain": ["of plain"], "async": ["of async"]}
    assert kept == (expected if capture_logs else {"plain": [], "async": []})
    assert during == [len(before) + capture_logs]
    assert logging.getLogger().handlers == before


def test_a_started_worker_captures_logs_until_it_is_stopped(live: TaskQueue, make: Make) -> None:
    before = logging.getLogger().handlers[:]
    worker = make(live, capture_logs=True, concurrency=2)
    seen: dict[str, list[str]] = {}
    together = threading.Barrier(2)

    @worker.task("default")
    def logs(payload: dict[str, Any], context: TaskContext) -> None:
        together.wait(10)
        logging.getLogger("elsewhere").warning("of %s", context.task_id)
        together.wait(10)
        assert context.logged is not None
        seen[context.task_id] = [line.message for line in context.logged.kept()[0]]

    push(live, "a", "b")
    worker.start()
    assert len(logging.getLogger().handlers) == len(before) + 1
    eventually(lambda: len(seen) == 2, "both have run")
    assert worker.stop(10)
    assert seen == {"a": ["of a"], "b": ["of b"]}
    assert logging.getLogger().handlers == before


# --- asking now -----------------------------------------------------------------------------------


def test_a_heartbeat_extends_the_lease_at_once(world: World) -> None:
    worker = Worker(world.queue, lease=30)
    answers: list[Any] = []

    @worker.task("default")
    def long(payload: dict[str, Any], context: TaskContext) -> None:
        world.advance(20)
        answers.append(context.heartbeat())
        answers.append(world.info("t").lease_until == world.now() + timedelta(seconds=30))

    world.push("t")
    assert worker.run_once() == 1
    assert answers == [True, True]
    assert state(world.queue, "t") == "finished"


def test_a_heartbeat_says_that_the_task_was_cancelled(queue: TaskQueue) -> None:
    worker = Worker(queue)
    answers: list[Any] = []

    @worker.task("default")
    def long(payload: dict[str, Any], context: TaskContext) -> None:
        assert queue.cancel("t")
        answers.extend([context.cancelled, context.heartbeat()])
        answers.extend([context.cancelled, context.lease_lost])

    push(queue, "t")
    assert worker.run_once() == 1
    assert answers == [False, False, True, False]
    assert state(queue, "t") == "cancelled"


def test_a_default_handler_whose_lease_is_lost_sees_it_on_its_task(world: World) -> None:
    answers: list[Any] = []

    def robbed(task: Task) -> str:
        assert isinstance(task, RunningTask)
        answers.append(task.lease_lost)
        world.advance(31)
        stolen = world.claim_one(worker="thief")
        answers.append(task.context.heartbeat())
        answers.extend([task.lease_lost, task.cancelled])
        world.queue.finish(stolen, "his")
        return "mine"

    world.push("t")
    assert Worker(world.queue, robbed, lease=30).run_once() == 1
    assert answers == [False, False, True, True]
    assert (world.info("t").result, world.info("t").attempts) == ("his", 2)


def test_a_default_handler_of_a_started_worker_sees_a_lost_lease_without_asking(
    live: TaskQueue, make: Make, thief: TaskQueue
) -> None:
    tasks: list[Any] = []
    ended = threading.Event()

    def robbed(task: Task) -> None:
        tasks.append(task)
        eventually(lambda: task.lease_lost, "the lease is lost")  # type: ignore[attr-defined]
        ended.set()

    worker = make(live, robbed, lease=SHORT)
    push(live, "t")
    worker.start()
    eventually(lambda: tasks, "it runs")
    stolen = claim_one(thief, lease=1000, worker="thief")
    assert ended.wait(20)
    assert worker.stop(10)
    thief.finish(stolen)


# --- runs that will not end -----------------------------------------------------------------------


def test_a_run_that_goes_on_after_its_time_out_keeps_its_slot_and_is_said_once_per_lease(
    live: TaskQueue, make: Make, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make(live, concurrency=1, lease=SHORT, registry=registry)
    go_on = threading.Event()

    @worker.task("stubborn", timeout=0.2, retries=0)
    def stubborn(payload: dict[str, Any]) -> str:
        try:
            spin()
        except TimedOut:
            assert go_on.wait(20)
        return "in the end"

    def stuck() -> float | None:
        labels = {"queue": "default", "task": "stubborn"}
        return registry.get_sample_value("fairqueue_worker_stuck_runs", labels)

    def words() -> list[Any]:
        return [r for r in caplog.records if vars(r).get("event") == "task_stuck"]

    push(live, "t", name="stubborn")
    worker.start()
    eventually(lambda: len(words()) >= 3, "it is said several times")
    assert stuck() == 1
    assert state(live, "t") == "buried"  # ended without it
    seconds = [vars(record)["seconds"] for record in words()]
    assert all(later - before > 0.9 * SHORT for before, later in pairwise(seconds))
    assert seconds == [round(each, 3) for each in seconds]
    assert {vars(record)["task"] for record in words()} == {"t"}
    assert caplog.text.count("task_overdue") == 1
    go_on.set()
    eventually(lambda: stuck() == 0, "it has ended")
    assert worker.stop(10)
    assert (state(live, "t"), info_of(live, "t").result) == ("buried", None)  # it came too late


def test_a_worker_counts_in_its_registry_or_in_that_of_prometheus(queue: TaskQueue) -> None:
    registry = CollectorRegistry()
    assert Worker(queue, lambda task: None, registry=registry).registry is registry
    assert Worker(queue, lambda task: None).registry is REGISTRY


def test_a_worker_without_tasks_does_not_look_at_the_clock_all_the_time(
    live: TaskQueue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    class Clock:
        def __getattr__(self, name: str) -> Any:
            return getattr(time, name)

        def monotonic(self) -> float:
            looks.append(time.monotonic())
            return looks[-1]

    monkeypatch.setattr("fairqueue.worker.lease_keeper.time", Clock())
    worker = make(live, lambda task: None, concurrency=1)
    worker.start()
    for number in range(20):
        push(live, f"t{number}")
        eventually(lambda n=number: state(live, f"t{n}") == "finished", "it ran")  # type: ignore[misc]
    assert worker.stop(10)
    assert len(looks) < 1000
