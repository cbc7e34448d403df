"""What a schedule says about retries and time-outs wins over what the handler says."""

from collections.abc import Iterator
from typing import Any

import pytest
from support import make_task

from fairqueue import History, TaskQueue, TaskScheduler, Worker
from fairqueue.clock import ManualClock
from fairqueue.handlers import Handler, HandlerSettings

MINUTE = "* * * * *"


@pytest.fixture
def scheduler(queue: TaskQueue) -> Iterator[TaskScheduler]:
    """A scheduler that is ticked by hand."""
    scheduler = TaskScheduler(queue)
    yield scheduler
    scheduler.stop()


def failing_worker(queue: TaskQueue, **options: Any) -> Worker:
    worker = Worker(queue)

    @worker.task("default", **options)
    def fail(payload: dict[str, Any]) -> None:
        raise ValueError("no")

    return worker


def attempts(queue: TaskQueue, clock: ManualClock, worker: Worker) -> int:
    """Run all that comes within an hour; how many attempts the one task had."""
    for _ in range(60):
        worker.run_until_empty()
        clock.advance(60)
    (run,) = History(queue).runs(["failed", "timed_out"])
    return run.attempts


@pytest.mark.parametrize(
    ("policy", "handler", "expected"),
    [
        ({}, {"retries": 2}, 3),
        ({"retries": 0}, {"retries": 2}, 1),
        ({"retries": 4, "backoff": [1, 2]}, {"retries": 0}, 5),
    ],
)
def test_the_retries_of_a_schedule_win(
    queue: TaskQueue,
    clock: ManualClock,
    scheduler: TaskScheduler,
    policy: dict[str, Any],
    handler: dict[str, Any],
    expected: int,
) -> None:
    scheduler.add_schedule(MINUTE, "alice", max_runs=1, **policy)
    clock.advance(60)
    scheduler.tick()

    assert attempts(queue, clock, failing_worker(queue, **handler)) == expected


def test_a_triggered_run_has_the_policy_too(
    queue: TaskQueue, clock: ManualClock, scheduler: TaskScheduler
) -> None:
    scheduler.trigger(scheduler.add_schedule("0 0 1 1 *", "alice", retries=1))

    assert attempts(queue, clock, failing_worker(queue, retries=5)) == 2


def test_a_run_that_is_run_again_has_the_policy_too(
    queue: TaskQueue, clock: ManualClock, scheduler: TaskScheduler
) -> None:
    scheduler.trigger(scheduler.add_schedule("0 0 1 1 *", "alice", retries=1, timeout=7.5))
    worker = failing_worker(queue, retries=5)
    assert attempts(queue, clock, worker) == 2
    history = History(queue)
    (failed,) = history.runs("failed")
    again = history.retry(failed.task_id)
    history.discard(failed.task_id)

    details = history.get(again)
    assert details is not None
    assert details.task is not None
    assert details.task.policy == {"retries": 1, "timeout": 7.5}
    assert attempts(queue, clock, worker) == 2


def test_the_timeout_of_a_schedule_wins() -> None:
    handler = Handler("default", lambda payload: None, HandlerSettings.create(timeout=30.0))

    assert handler.under({"timeout": 5.0}).timeout == 5.0
    assert handler.under({"retries": 1}).timeout == 30.0
    assert handler.timeout == 30.0


def test_a_stored_policy_that_cannot_be_used_is_that_of_the_handler(
    queue: TaskQueue, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    task = make_task(task_id="t1")
    document = task.document[:-1] + ',"policy":{"retries":"many"}}'
    queue.push(task)
    queue.link.ask(("HSET", queue.keys["tasks"], "t1", document))

    assert attempts(queue, clock, failing_worker(queue, retries=1)) == 2
    assert "policy_unusable" in caplog.text
