"""What one run does to context variables or leaves running does not reach the next."""

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
import redis
from scheduling import eventually
from support import push

from fairqueue import TaskContext, TaskQueue, Worker, stage
from fairqueue.clock import ManualClock

Run = Callable[[Worker], None]

who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")
started: list[Any] = []  # what handlers in processes of their own keep alive


@pytest.fixture(params=["run_once", "thread"])
def run(request: pytest.FixtureRequest, redis_client: redis.Redis) -> Iterator[Run]:
    """Run all that is ready in one slot, in this thread or in one of the worker's own."""
    workers: list[Worker] = []

    def run(worker: Worker) -> None:
        if request.param == "run_once":
            assert worker.run_until_empty()
            return
        workers.append(worker)
        worker.start()
        queue = worker.queue
        eventually(lambda: queue.inspect().ready + queue.inspect().running == 0, "all have run")

    yield run
    for worker in workers:
        assert worker.stop(10)


def events(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [vars(each) for each in caplog.records if vars(each).get("event") == event]


# --- context variables ----------------------------------------------------------------------------


def test_no_run_sees_the_context_variables_of_another(live: TaskQueue, run: Run) -> None:
    seen: list[str] = []
    worker = Worker(live, concurrency=1)

    @worker.task("plain")
    def plain(payload: dict[str, Any], context: TaskContext) -> None:
        seen.append(who.get())
        who.set(context.task.user_id)

    @worker.task("async")
    async def later(payload: dict[str, Any], context: TaskContext) -> None:
        seen.append(who.get())
        who.set(context.task.user_id)
        await asyncio.sleep(0)

    @worker.task("class")
    class Build:
        def __init__(self) -> None:
            seen.append(who.get())
            who.set("made")

        def handle(self, payload: dict[str, Any]) -> None:
            seen.append(who.get())

    for number, name in enumerate(["plain", "async", "class", "async", "plain"]):
        push(live, f"t{number}", user_id=f"user-{number}", name=name)
    run(worker)
    assert sorted(seen) == ["made"] + ["nobody"] * 5
    assert who.get() == "nobody"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("by_async", [False, True])
def test_filters_hooks_and_handler_of_a_run_share_their_context_variables(
    live: TaskQueue, run: Run, is_async: bool, by_async: bool
) -> None:
    seen: list[tuple[str, str]] = []

    def note(place: str) -> None:
        seen.append((place, who.get()))
        who.set(f"{who.get()}>{place}")

    def plainly(place: str, answer: Any = None) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            note(place)
            return answer

        async def call_async(*arguments: Any) -> Any:
            note(place)
            await asyncio.sleep(0)
            return answer

        return call_async if by_async else call

    worker = Worker(live, concurrency=1)
    worker.before(plainly("before"))

    def plain(payload: dict[str, Any]) -> None:
        note("handler")

    async def later(payload: dict[str, Any]) -> None:
        note("handler")

    worker.register(
        "job",
        later if is_async else plain,
        when=plainly("when", True),
        then=plainly("then"),
        finally_=plainly("finally"),
    )
    push(live, "t", name="job")
    run(worker)
    places = ["when", "before", "handler", "then", "finally"]
    assert seen == [(p, ">".join(["nobody", *places[:n]])) for n, p in enumerate(places)]


def test_a_run_in_the_thread_of_the_caller_sees_its_variables_and_keeps_its_own(
    queue: TaskQueue,
) -> None:
    seen: list[str] = []
    worker = Worker(queue)

    @worker.task("default")
    async def later(payload: dict[str, Any]) -> None:
        seen.append(who.get())
        who.set("handler")

    push(queue, "a", "b")
    token = who.set("caller")
    try:
        assert worker.run_until_empty() == 2
        assert who.get() == "caller"
    finally:
        who.reset(token)
    assert seen == ["caller", "caller"]


# --- what is left running -------------------------------------------------------------------------


def test_what_an_async_handler_leaves_running_is_cancelled_and_reported(
    live: TaskQueue, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[str] = []
    worker = Worker(live, concurrency=1)

    async def goes_on(task_id: str) -> None:
        try:
            while True:
                steps.append(task_id)
                await asyncio.sleep(0)
        finally:
            steps.append(f"{task_id} ended")

    @worker.task("default")
    async def leaves(payload: dict[str, Any], context: TaskContext) -> str:
        steps.clear()
        started.append(asyncio.ensure_future(goes_on(context.task_id)))
        await asyncio.sleep(0)
        return "done"

    push(live, "a", name="default", user_id="alice")
    with caplog.at_level(logging.WARNING, "fairqueue.worker"):
        run(worker)
        assert steps[-1] == "a ended"
        push(live, "b", name="default", user_id="bob")
        run(worker)
    assert set(steps) == {"b", "b ended"}  # nothing of alice's goes on beside bob's
    assert [info.result for each in "ab" if (info := live.get(each))] == ["done", "done"]
    told = events(caplog, "left_running")
    assert [(each["task"], each["count"], each["ended"]) for each in told] == [
        ("a", 1, True),
        ("b", 1, True),
    ]
    assert "goes_on" in told[0]["left"]


def test_what_a_handler_that_failed_leaves_is_cancelled_before_others_get_its_task(
    queue: TaskQueue, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    worker = Worker(queue)

    async def goes_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append("cancelled")

    @worker.task("default", retries=1, backoff=0)
    async def fails(payload: dict[str, Any]) -> None:
        started.append(asyncio.ensure_future(goes_on()))
        await asyncio.sleep(0)
        raise ValueError("no")

    first = queue.retry

    def retry(*arguments: Any, **named: Any) -> None:
        order.append("offered again")
        first(*arguments, **named)

    retry.__name__ = "retry"
    monkeypatch.setattr(queue, "retry", retry)
    push(queue, "t")
    assert worker.run_once() >= 1
    assert order[:2] == ["cancelled", "offered again"]


def test_what_does_not_heed_being_cancelled_is_never_run_again(
    live: TaskQueue,
    run: Run,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage, "LEFT_S", 0.05)
    steps: list[str] = []
    worker = Worker(live, concurrency=1)

    async def stays() -> None:
        while True:
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                steps.append("cancelled")
            steps.append("step")

    @worker.task("default")
    async def leaves(payload: dict[str, Any], context: TaskContext) -> int:
        if context.task_id == "a":
            started.append(asyncio.ensure_future(stays()))
            await asyncio.sleep(0)
        else:
            steps.clear()
            await asyncio.sleep(0.02)
        return len(steps)

    push(live, "a")
    with caplog.at_level(logging.WARNING, "fairqueue.worker"):
        run(worker)
        assert "cancelled" in steps
        push(live, "b")
        run(worker)
    info = live.get("b")
    assert info is not None
    assert info.result == 0
    (told,) = events(caplog, "left_running")
    assert (told["task"], told["ended"]) == ("a", False)


async def numbers(closed: list[str], name: str) -> AsyncGenerator[int, None]:
    try:
        for number in range(100):
            yield number
    finally:
        await asyncio.sleep(0)
        closed.append(name)


def test_async_generators_that_a_run_has_begun_are_closed_with_it(
    live: TaskQueue, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []
    worker = Worker(live, concurrency=1)

    @worker.task("default")
    async def reads(payload: dict[str, Any], context: TaskContext) -> None:
        kept = numbers(closed, "kept")
        started.append(kept)
        assert await anext(kept) == 0
        async for number in numbers(closed, "dropped"):
            if number == 2:
                break
        async for _ in numbers(closed, "read"):
            pass

    push(live, "t")
    with caplog.at_level(logging.WARNING, "fairqueue.worker"):
        run(worker)
    assert sorted(closed) == ["dropped", "kept", "read"]
    (told,) = events(caplog, "left_running")
    assert (told["task"], told["left"], told["ended"]) == ("t", "numbers", True)


def test_a_run_that_leaves_nothing_is_not_reported_and_keeps_its_event_loop(
    queue: TaskQueue, caplog: pytest.LogCaptureFixture
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    worker = Worker(queue)

    @worker.task("default")
    async def tidy(payload: dict[str, Any]) -> None:
        loops.append(asyncio.get_running_loop())
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))

    push(queue, "a", "b")
    with caplog.at_level(logging.WARNING, "fairqueue.worker"):
        assert worker.run_once() == 2
    assert loops[0] is loops[1]
    assert not events(caplog, "left_running")


# --- in a process of its own ----------------------------------------------------------------------


async def leaves_a_task(payload: dict[str, Any]) -> str:
    started.append(asyncio.ensure_future(asyncio.Event().wait()))
    await asyncio.sleep(0)
    return who.get()


@pytest.mark.processes
def test_what_is_left_in_a_process_of_its_own_is_reported_too(
    queue: TaskQueue, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(queue)
    worker.register("job", leaves_a_task, isolation="process")
    worker.before(lambda: who.set("hook") and None)  # of the worker's process only
    push(queue, "t", name="job")
    with caplog.at_level(logging.WARNING, "fairqueue.worker"):
        assert worker.run_once() == 1
    info = queue.get("t")
    assert info is not None
    assert info.result == "nobody"
    (told,) = events(caplog, "left_running")
    assert (told["task"], told["left"], told["ended"]) == ("t", "Event.wait", True)
