"""A thread of a worker that dies: it goes on, or the worker ends and everybody can see it."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from helpers.fixtures import Logged
from helpers.state import places
from helpers.tasks import Mute, info_of, make_task, push
from helpers.waiting import eventually, in_thread, until_blocked

import fairqueue.runtime.threads
from fairqueue import TaskContext, TaskQueue, Worker
from fairqueue import service as up
from fairqueue.alerts import Alerts
from fairqueue.errors import FairQueueError
from fairqueue.queue.workers import WorkerStore
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.worker.lease_keeper import LeaseKeeper
from fairqueue.worker.pool import ThreadPool

# What each kind of thread does, by the beginning of its name.
KINDS = {
    "fairqueue-slot": (ThreadPool, "_run_tasks"),
    "fairqueue-worker": (ThreadPool, "_take_turns"),
    "fairqueue-leases": (LeaseKeeper, "_keep"),
}
Make = Callable[..., Worker]


@pytest.fixture
def make(live: TaskQueue) -> Iterator[Make]:
    """Make workers that are stopped at the end, whatever happens."""
    made: list[Worker] = []

    def make(*arguments: Any, **settings: Any) -> Worker:
        made.append(Worker(live, *arguments, **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.stop(0.0)


class Death:
    """Ends threads of one kind when they begin their work: so many of them, by an error or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        owner, method = KINDS[kind]
        self._work = getattr(owner, method)
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.times = 0
        death = self

        def work(self: Any) -> None:
            with death._lock:
                dies, death.times = death.times > 0, death.times - 1
            if not dies:
                death._work(self)
            elif death.error is not None:
                raise death.error

        monkeypatch.setattr(owner, method, work)


@pytest.fixture(params=list(KINDS))
def death(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Death:
    monkeypatch.setattr(fairqueue.runtime.threads, "FIRST_PAUSE_S", 0.001)
    return Death(monkeypatch, request.param)


def alive(queue: TaskQueue) -> list[str]:
    return [each.worker_id for each in WorkerStore(queue.link).alive()]


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("odd"), KeyboardInterrupt(), Mute()])
def test_a_thread_goes_on_whatever_is_raised_in_it(
    live: TaskQueue,
    redis_client: redis.Redis,
    make: Make,
    death: Death,
    logged: Logged,
    error: BaseException,
) -> None:
    death.error, death.times = error, 2
    worker = make(lambda task: None, concurrency=1)
    push(live, "a", "b")
    worker.start()
    eventually(lambda: places(redis_client) == {"finished": ["a", "b"]}, "they are run")
    eventually(lambda: death.times < 0, "it has gone on after each error")
    assert worker.state == "running"
    assert [each["exc_info"][1] for each in logged("thread_failed")] == [error, error]
    assert worker.stop(10) is True


def test_the_leases_are_kept_after_something_was_raised_in_the_thread_that_keeps_them(
    live: TaskQueue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairqueue.runtime.threads, "FIRST_PAUSE_S", 0.001)
    extended = threading.Event()
    first = live.extend
    asked: list[int] = []

    def extend(*arguments: Any, **named: Any) -> Any:
        asked.append(1)
        if len(asked) == 1:
            raise SystemExit
        answer = first(*arguments, **named)
        extended.set()
        return answer

    monkeypatch.setattr(live, "extend", extend)
    worker = make(concurrency=1, lease=3.0)

    @worker.task("default")
    def waits(payload: dict[str, Any], context: TaskContext) -> bool:
        return extended.wait(30) and not context.lease_lost

    push(live, "t")
    worker.start()
    eventually(lambda: (info := live.get("t")) and info.state == "finished", "it ends")
    info = info_of(live, "t")
    assert info.result is True


def test_a_worker_without_one_of_its_threads_ends_and_says_so(
    live: TaskQueue,
    redis_client: redis.Redis,
    make: Make,
    death: Death,
    logged: Logged,
) -> None:
    death.times = 1
    worker = make(lambda task: None, concurrency=2, worker_id="w")
    worker.start()
    eventually(lambda: worker.state == "failed", "it has failed")
    eventually(lambda: not worker._is_alive(), "it has ended")
    assert alive(live) == []
    (told,) = logged("worker_broken")
    assert (told["worker"], told["levelno"]) == ("w", logging.ERROR)
    assert worker.stop(10) is False
    assert worker.state == "failed"
    push(live, "a")
    worker.start()
    assert worker.state == "running"
    eventually(lambda: places(redis_client) == {"finished": ["a"]}, "it is run")
    assert worker.stop(10) is True
    assert worker.state == "stopped"


def test_a_worker_that_fails_finishes_what_runs_and_takes_no_more(
    live: TaskQueue, redis_client: redis.Redis, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, die = threading.Event(), threading.Event(), threading.Event()
    first = ThreadPool._run_tasks

    def run_tasks(pool: ThreadPool) -> None:
        if threading.current_thread().name == "fairqueue-slot-1":
            die.wait(30)
        else:
            first(pool)

    monkeypatch.setattr(ThreadPool, "_run_tasks", run_tasks)
    worker = make(concurrency=2)

    @worker.task("default")
    def waits(payload: dict[str, Any]) -> None:
        begun.set()
        assert go_on.wait(30)

    push(live, "a")
    worker.start()
    assert begun.wait(30)
    die.set()
    eventually(lambda: worker.state == "failed", "it has failed")
    eventually(lambda: alive(live) == [], "it has left, while it finishes what runs")
    push(live, "b")
    go_on.set()
    eventually(lambda: not worker._is_alive(), "it ends by itself")
    assert places(redis_client) == {"finished": ["a"], "ready": ["b"]}


def test_what_runs_when_the_thread_that_records_dies_is_given_back(
    live: TaskQueue, redis_client: redis.Redis, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    first = ThreadPool._take_turns

    def take_turns(pool: ThreadPool) -> None:
        turn = pool._turn

        def last_turn() -> None:
            turn()
            if begun.is_set():
                pool._is_drained = lambda: True  # type: ignore[method-assign]

        pool._turn = last_turn  # type: ignore[method-assign]
        first(pool)
        del pool._is_drained

    monkeypatch.setattr(ThreadPool, "_take_turns", take_turns)
    worker = make(concurrency=1)

    @worker.task("default")
    def waits(payload: dict[str, Any], context: TaskContext) -> None:
        begun.set()
        worker._pool._listener.nudge()  # type: ignore[union-attr]
        eventually(lambda: context.cancelled, "it is told")
        go_on.set()

    push(live, "a")
    worker.start()
    assert go_on.wait(60)
    eventually(lambda: worker.state == "failed", "it has failed")
    assert places(redis_client) == {"ready": ["a"]}


def test_forever_says_that_the_worker_has_failed(live: TaskQueue, make: Make, death: Death) -> None:
    death.times = 1
    assert make(lambda task: None, concurrency=2).forever(10) is False


def test_a_worker_whose_connection_breaks_says_why(
    live: TaskQueue, redis_client: redis.Redis, make: Make, logged: Logged
) -> None:
    worker = make(lambda task: None, concurrency=1)
    worker.start()
    until_blocked(redis_client)
    (blocked,) = [each for each in redis_client.client_list() if each["cmd"] == "blpop"]
    redis_client.client_kill_filter(_id=blocked["id"])
    eventually(lambda: logged("worker_failed"), "it has noticed")
    (told,) = logged("worker_failed")
    kind, _, reason = told["error"].partition(": ")
    assert kind.endswith("Error") or kind == "RedisUnavailable"
    assert reason


def test_a_worker_in_which_nothing_can_be_shown_goes_on(
    live: TaskQueue, make: Make, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    """An error of a turn of the dispatcher, and one of a slot."""
    first_turn, failed = ThreadPool._turn, threading.Event()

    def turn(pool: ThreadPool) -> None:
        if not failed.is_set():
            failed.set()
            raise Mute
        first_turn(pool)

    monkeypatch.setattr(ThreadPool, "_turn", turn)
    worker = make(lambda task: None, concurrency=1)
    execute, ran = worker._executor.execute, threading.Event()

    def fail_once(run: Any, slot: Any) -> Any:
        if run.claim.task.task_id == "a":
            ran.set()
            raise Mute
        return execute(run, slot)

    monkeypatch.setattr(worker._executor, "execute", fail_once)
    push(live, "a", "b")
    worker.start()
    eventually(lambda: (info := live.get("b")) and info.state == "finished", "the next is run")
    assert ran.is_set()
    for event in ("worker_failed", "slot_failed"):
        (told,) = logged(event)
        assert told["error"] == "Mute: (its text cannot be read)"
    assert not logged("thread_failed")


def test_a_start_is_told_once(make: Make, caplog: pytest.LogCaptureFixture, logged: Logged) -> None:
    caplog.set_level(logging.INFO, "fairqueue.worker")
    worker = make(lambda task: None, concurrency=1)
    for _ in range(2):
        worker.start()
        worker.start()
        assert worker.stop(10)
    assert len(logged("worker_started")) == 2


@pytest.mark.processes
def test_that_the_supervisor_has_died_is_told_once(
    make: Make, caplog: pytest.LogCaptureFixture, logged: Logged
) -> None:
    caplog.set_level(logging.INFO, "fairqueue.worker")
    worker = make(lambda task: None, concurrency=1, processes=1)
    for number in (1, 2):
        worker.start()
        worker.start()
        assert worker._group is not None
        os.kill(worker._group.supervisor_pid, signal.SIGKILL)
        eventually(lambda: worker.state == "failed", "it has failed")
        assert [worker.stop(10), worker.stop(10)] == [False, False]
        assert len(logged("worker_started")) == number
        assert len(logged("worker_broken")) == number


class Raising(logging.Handler):
    """A handler of the logging module that fails, and lets everybody know."""

    def handle(self, record: logging.LogRecord) -> bool:
        if record.name == "fairqueue.worker":
            raise OSError("the disk of the log is full")
        return True


def test_slots_survive_a_log_that_cannot_be_written(
    live: TaskQueue, redis_client: redis.Redis, make: Make
) -> None:
    worker = make(concurrency=1)

    @worker.task("default", retries=0)
    def fails(payload: dict[str, Any]) -> None:
        if payload:
            raise ValueError("no")

    live.push(make_task(task_id="bad", payload={"fails": True}))
    push(live, "good")
    raising = Raising()
    logging.getLogger().addHandler(raising)
    try:
        worker.start()
        eventually(
            lambda: places(redis_client) == {"buried": ["bad"], "finished": ["good"]},
            "each is run and recorded",
        )
    finally:
        logging.getLogger().removeHandler(raising)


# --- what serves in a process of its own ----------------------------------------------------------


def test_the_process_of_a_scheduler_whose_thread_died_ends_with_an_error(
    queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TaskScheduler, "_run", lambda self: self._listener.close())
    with pytest.raises(FairQueueError, match="thread of the scheduler has ended"):
        up._schedule(queue, Alerts(), threading.Event())


def test_a_failed_worker_exits_with_an_error(live: TaskQueue, make: Make, death: Death) -> None:
    death.times = 1
    with pytest.raises(FairQueueError, match="the worker has failed"):
        up._work(make(lambda task: None, concurrency=2), threading.Event())


def test_what_serves_ends_quietly_when_it_is_told_to(queue: TaskQueue, make: Make) -> None:
    stop = threading.Event()
    worker = make(lambda task: None)
    ended = [
        in_thread(lambda: up._schedule(queue, Alerts(), stop)),
        in_thread(lambda: up._work(worker, stop)),
    ]
    eventually(lambda: worker.state == "running", "it runs")
    stop.set()
    for each in ended:
        each()
