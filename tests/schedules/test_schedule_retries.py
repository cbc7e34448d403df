"""What a schedule or a task says of its retries and time-out wins over what the handler says."""

from typing import Any

import pytest
from helpers.tasks import make_task
from helpers.world import World

from fairqueue import History, Task, TaskQueue, Worker
from fairqueue.errors import InvalidSchedule, InvalidTask
from fairqueue.worker.handlers import Handler, HandlerSettings

MINUTE = "* * * * *"


def failing_worker(world: World, **options: Any) -> Worker:
    worker = Worker(world.queue)

    @worker.task("default", **options)
    def fail(payload: dict[str, Any]) -> None:
        raise ValueError("no")

    return worker


def attempts(world: World, worker: Worker) -> int:
    """Run all that comes within an hour; how many attempts the one task had."""
    for _ in range(60):
        worker.run_until_empty()
        world.advance(60)
    (run,) = History(world.queue).runs(["failed", "timed_out"])
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
    world: World, policy: dict[str, Any], handler: dict[str, Any], expected: int
) -> None:
    world.scheduler.add_schedule(MINUTE, "alice", max_runs=1, **policy)
    world.tick_after(60)

    assert attempts(world, failing_worker(world, **handler)) == expected


def delays(world: World, worker: Worker, task_id: str) -> list[float]:
    """Run one task to its end; how many seconds it waited before each retry."""
    found = []
    while worker.run_until_empty():
        info = world.info(task_id)
        if info.state != "delayed":
            break
        found.append((info.due_at - world.now()).total_seconds())
        world.advance(found[-1])
    return found


DELAYS = [
    ({"backoff": 60}, [60, 120, 240]),
    ({"backoff": [60, 120, 240]}, [60, 120, 240]),
    ({"backoff": [60, 120, 240], "backoff_cap": 1}, [60, 120, 240]),
    ({"backoff": 60, "backoff_cap": 100}, [60, 100, 100]),
    ({"backoff": 60, "backoff_multiplier": 3}, [60, 180, 540]),
    ({"backoff": 60, "backoff_multiplier": 1}, [60, 60, 60]),
    ({"backoff": 40_000}, [40_000, 80_000, 86_400]),
    ({"backoff": 200_000}, [200_000, 200_000, 200_000]),
    # Without a backoff of its own, it is the handler's: 8 s, times 2, up to 20 s.
    ({}, [8, 16, 20]),
    ({"backoff_cap": 10}, [8, 10, 10]),
    ({"backoff_multiplier": 1.5}, [8, 12, 18]),
]
HANDLER = {"backoff": 8.0, "backoff_cap": 20.0, "jitter": "none"}


@pytest.mark.parametrize(("policy", "expected"), DELAYS)
@pytest.mark.parametrize("of", ["schedule", "task"])
def test_the_delays_are_what_the_backoff_says(
    world: World, of: str, policy: dict[str, Any], expected: list[float]
) -> None:
    worker = failing_worker(world, **HANDLER)
    if of == "schedule":
        schedule_id = world.scheduler.add_schedule("0 0 1 1 *", "alice", retries=3, **policy)
        task_id = world.scheduler.trigger(schedule_id)
    else:
        task_id = world.queue.push(Task.create(user_id="alice", retries=3, **policy))
    assert delays(world, worker, task_id) == expected


@pytest.mark.parametrize("of", ["schedule", "task"])
def test_jitter_is_drawn_where_it_is_asked_for(world: World, of: str) -> None:
    world.patch("random.uniform", lambda low, high: low + (high - low) / 4)
    worker = failing_worker(world, **HANDLER)
    cases: list[tuple[float | list[float], list[float]]] = [
        (60.0, [15, 30]),
        ([60.0, 100.0], [15, 25]),
    ]
    for backoff, expected in cases:
        if of == "schedule":
            schedule_id = world.scheduler.add_schedule(
                "0 0 1 1 *", "alice", retries=2, backoff=backoff, backoff_jitter="full"
            )
            task_id = world.scheduler.trigger(schedule_id)
        else:
            task = Task.create(user_id="alice", retries=2, backoff=backoff, jitter="full")
            task_id = world.queue.push(task)
        assert delays(world, worker, task_id) == expected


def test_the_jitter_of_a_schedules_moments_is_not_that_of_its_retries(world: World) -> None:
    world.scheduler.trigger(
        world.scheduler.add_schedule("0 0 1 1 *", "alice", retries=2, backoff=[5], jitter=30)
    )
    (claim,) = world.queue.claim("w")
    assert claim.task.policy == {"retries": 2, "backoff": [5.0]}


def test_the_policy_of_a_schedule_can_be_changed_and_taken_away(world: World) -> None:
    own: dict[str, Any] = {"backoff_cap": 90.0, "backoff_multiplier": 3.0, "backoff_jitter": "full"}
    schedule_id = world.scheduler.add_schedule("0 0 1 1 *", "alice", **own)
    schedule = world.scheduler.get_schedule(schedule_id)
    assert schedule is not None
    assert {name: getattr(schedule, name) for name in own} == own
    world.scheduler.update_schedule(schedule_id, backoff_cap=None, backoff_multiplier=1)
    schedule = world.scheduler.get_schedule(schedule_id)
    assert schedule is not None
    changed = (schedule.backoff_cap, schedule.backoff_multiplier, schedule.backoff_jitter)
    assert changed == (None, 1.0, "full")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("retries", -1, "retries must .*not -1"),
        ("backoff", [], r"backoff must have 1 to 1000 delays, not 0"),
        ("backoff", [1.0] * 1001, "backoff must have .* not 1001"),
        ("backoff_cap", -1, "backoff_cap must .*not -1"),
        ("backoff_multiplier", 0.5, "backoff_multiplier must .*not 0.5"),
        ("backoff_multiplier", 101, "backoff_multiplier must .*not 101"),
        ("jitter", "some", "jitter must .*not 'some'"),
        ("timeout", 0, "timeout must .*not 0"),
    ],
)
def test_an_unusable_policy_is_refused(world: World, field: str, value: Any, says: str) -> None:
    with pytest.raises(InvalidTask, match=says):
        Task.create(user_id="alice", **{field: value})
    of_schedule = "backoff_jitter" if field == "jitter" else field
    with pytest.raises(InvalidSchedule, match=says):
        world.scheduler.add_schedule(MINUTE, "alice", **{of_schedule: value})


# --- tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"retries": 0}, 1),
        ({"retries": 4, "backoff": 1}, 5),
        ({"max_attempts": 1}, 1),
        ({"max_attempts": 3, "backoff": [1]}, 3),
    ],
)
def test_the_retries_of_a_task_win(world: World, policy: dict[str, Any], expected: int) -> None:
    world.queue.push(Task.create(user_id="alice", **policy))
    assert attempts(world, failing_worker(world, retries=2)) == expected


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (2, 2), (7, 7), (None, 5)])
def test_attempts_of_dead_workers_count(world: World, most: int | None, expected: int) -> None:
    task_id = world.queue.push(Task.create(user_id="alice", max_attempts=most))
    for attempt in range(1, expected + 1):
        assert world.claim_one(lease=1).attempt == attempt
        world.advance(1)
    assert world.queue.claim("w") == []
    info = world.info(task_id)
    assert (info.state, info.attempts) == ("buried", expected)


def test_a_task_has_either_retries_or_attempts() -> None:
    with pytest.raises(InvalidTask, match="pass retries or max_attempts, not both"):
        Task.create(user_id="alice", retries=2, max_attempts=3)
    with pytest.raises(InvalidTask, match=r"max_attempts must .*not 0"):
        Task.create(user_id="alice", max_attempts=0)


def test_the_same_id_with_another_policy_is_another_task(queue: TaskQueue) -> None:
    def push(**policy: Any) -> str:
        return queue.push(Task.create(user_id="alice", task_id="t", **policy))

    assert push(retries=2, timeout=30) == push(timeout=30.0, retries=2) == "t"
    for policy in ({}, {"retries": 3, "timeout": 30}, {"retries": 2}, {"max_attempts": 3}):
        with pytest.raises(InvalidTask, match="'t'"):
            push(**policy)


def test_a_handler_pushes_tasks_with_a_policy_of_their_own(queue: TaskQueue) -> None:
    build = Worker(queue).register("build", lambda payload: None, retries=9)
    urgent = build.options(retries=1, timeout=5)
    urgent.options(backoff=[3], priority=5).push("alice")
    (claim,) = queue.claim("w")
    assert claim.task.policy == {"retries": 1, "timeout": 5.0, "backoff": [3.0]}
    assert int(claim.task.priority) == 5
    with pytest.raises(InvalidTask, match=r"retries must .*not -1"):
        build.options(retries=-1)
    with pytest.raises(InvalidTask, match="unknown field 'retires'"):
        build.options(retires=1)  # type: ignore[call-arg]


def test_the_timeout_of_a_task_wins(queue: TaskQueue) -> None:
    worker = Worker(queue)
    seen = []

    @worker.task("default", timeout=30.0, retries=0)
    def hang(payload: dict[str, Any]) -> None:
        seen.append(payload)
        while True:
            pass

    task_id = queue.push(Task.create(user_id="alice", timeout=0.05))
    worker.run_once()
    (run,) = History(queue).runs("timed_out")
    assert (run.task_id, len(seen)) == (task_id, 1)


def test_the_scripts_know_of_a_policy_what_they_need(world: World) -> None:
    """Of a task that is pushed, fired, triggered, filled in or retried."""
    world.scheduler.add_schedule(MINUTE, "alice", schedule_id="s", timeout=7.5)
    started = world.now()
    world.tick_after(60)
    world.advance(1)
    world.scheduler.trigger("s")
    world.scheduler.pause_schedule("s")
    world.advance(60)
    world.scheduler.resume_schedule("s")
    world.scheduler.backfill("s", started, world.now(), dry_run=False)
    world.queue.push(Task.create(user_id="alice", timeout=7.5))
    claims = world.queue.claim("w", limit=10)
    assert [world.status_of(c.task.task_id)["timeout_ms"] for c in claims] == [7500] * 4
    world.queue.bury(claims[0])
    History(world.queue).retry(claims[0].task.task_id)
    (again,) = world.queue.claim("w")
    assert world.status_of(again.task.task_id)["timeout_ms"] == 7500
    task_id = world.queue.push(Task.create(user_id="alice", max_attempts=3))
    assert world.status_of(task_id)["max_attempts"] == 3


def test_a_triggered_run_has_the_policy_too(world: World) -> None:
    world.scheduler.trigger(world.scheduler.add_schedule("0 0 1 1 *", "alice", retries=1))

    assert attempts(world, failing_worker(world, retries=5)) == 2


def test_a_run_that_is_run_again_has_the_policy_too(world: World) -> None:
    world.scheduler.trigger(
        world.scheduler.add_schedule("0 0 1 1 *", "alice", retries=1, timeout=7.5)
    )
    worker = failing_worker(world, retries=5)
    assert attempts(world, worker) == 2
    history = History(world.queue)
    (failed,) = history.runs("failed")
    again = history.retry(failed.task_id)
    history.discard(failed.task_id)

    details = history.get(again)
    assert details is not None
    assert details.task is not None
    assert details.task.policy == {"retries": 1, "timeout": 7.5}
    assert attempts(world, worker) == 2


def test_the_timeout_of_a_schedule_wins() -> None:
    handler = Handler("default", lambda payload: None, HandlerSettings.create(timeout=30.0))

    assert handler.under({"timeout": 5.0}).timeout == 5.0
    assert handler.under({"retries": 1}).timeout == 30.0
    assert handler.timeout == 30.0


@pytest.mark.one_partition
def test_a_bad_stored_policy_is_replaced(world: World, caplog: pytest.LogCaptureFixture) -> None:
    task = make_task(task_id="t1")
    document = task.document[:-1] + ',"policy":{"retries":"many"}}'
    world.queue.push(task)
    world.queue.link.ask(("HSET", world.keys["tasks"], "t1", document))

    assert attempts(world, failing_worker(world, retries=1)) == 2
    assert "policy_unusable" in caplog.text
