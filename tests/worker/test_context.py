"""What one run does to context variables or leaves running does not reach the next."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
import redis
from helpers.fixtures import Logged
from helpers.tasks import info_of, push
from helpers.waiting import eventually
from helpers.world import World

from fairqueue import TaskContext, TaskQueue, Worker
from fairqueue.worker import event_loop

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


def test_a_run_in_the_callers_thread_sees_its_variables(queue: TaskQueue) -> None:
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


def test_leftovers_of_a_handler_are_cancelled(live: TaskQueue, run: Run, logged: Logged) -> None:
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
    run(worker)
    assert steps[-1] == "a ended"
    push(live, "b", name="default", user_id="bob")
    run(worker)
    assert set(steps) == {"b", "b ended"}  # nothing of alice's goes on beside bob's
    assert [info.result for each in "ab" if (info := live.get(each))] == ["done", "done"]
    told = logged("left_running")
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
    live: TaskQueue, run: Run, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "LEFT_S", 0.05)
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
    run(worker)
    assert "cancelled" in steps
    push(live, "b")
    run(worker)
    assert info_of(live, "b").result == 0
    (told,) = logged("left_running")
    assert (told["task"], told["ended"]) == ("a", False)


def test_what_a_cancelled_task_starts_is_cancelled_too(
    live: TaskQueue, run: Run, logged: Logged
) -> None:
    steps: list[str] = []
    worker = Worker(live, concurrency=1)

    async def goes_on(depth: int) -> None:
        try:
            while True:
                steps.append(f"step {depth}")
                await asyncio.sleep(0.001)
        finally:
            if depth:
                started.append(asyncio.ensure_future(goes_on(depth - 1)))

    @worker.task("default")
    async def leaves(payload: dict[str, Any], context: TaskContext) -> int:
        if context.task_id == "a":
            started.append(asyncio.ensure_future(goes_on(3)))
            await asyncio.sleep(0)
        else:
            steps.clear()
            await asyncio.sleep(0.02)
        return len(steps)

    push(live, "a")
    run(worker)
    push(live, "b", user_id="bob")
    run(worker)
    assert steps == []
    (told,) = logged("left_running")
    assert (told["task"], told["count"], told["ended"]) == ("a", 4, True)


@pytest.mark.parametrize("soon", [False, True])
def test_a_runs_timers_never_go_off(live: TaskQueue, run: Run, logged: Logged, soon: bool) -> None:
    rings: list[str] = []
    worker = Worker(live, concurrency=1)

    def ring() -> None:
        rings.append("rung")

    @worker.task("default")
    async def leaves(payload: dict[str, Any], context: TaskContext) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, ring).cancel()  # is none
        if context.task_id == "b":
            await asyncio.sleep(0.05)
        elif soon:
            loop.call_soon(loop.call_later, 0.01, ring)
        else:
            loop.call_later(0.01, ring)

    push(live, "a")
    run(worker)
    push(live, "b", user_id="bob")
    run(worker)
    assert rings == []
    (told,) = logged("left_running")
    assert (told["task"], told["count"], told["ended"]) == ("a", 1, True)
    assert told["left"].endswith("ring")


def test_a_timer_of_a_closing_connection_is_left_alone(queue: TaskQueue, logged: Logged) -> None:
    timers: list[asyncio.TimerHandle] = []
    worker = Worker(queue)

    def give_up() -> None:
        """What asyncio calls when the other side does not answer."""

    give_up.__module__ = "asyncio.sslproto"

    @worker.task("default")
    async def closes(payload: dict[str, Any]) -> None:
        timers.append(asyncio.get_running_loop().call_later(60, give_up))

    push(queue, "a", "b")
    assert worker.run_once() == 2
    assert [each.cancelled() for each in timers] == [False, False]
    assert not logged("left_running")


def test_a_call_that_comes_again_with_each_turn_is_never_run_again(
    live: TaskQueue, run: Run, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "LEFT_S", 0.05)
    turns: list[int] = []
    worker = Worker(live, concurrency=1)

    def again(loop: asyncio.AbstractEventLoop) -> None:
        turns.append(1)
        loop.call_soon(again, loop)

    @worker.task("default")
    async def leaves(payload: dict[str, Any], context: TaskContext) -> int:
        if context.task_id == "a":
            again(asyncio.get_running_loop())
        else:
            turns.clear()
            await asyncio.sleep(0.01)
        return len(turns)

    push(live, "a")
    run(worker)
    push(live, "b", user_id="bob")
    run(worker)
    assert turns == []
    (told,) = logged("left_running")
    assert (told["task"], told["ended"]) == ("a", False)
    assert told["left"].endswith("again")


@pytest.mark.parametrize("by_thread", [False, True])
def test_what_a_run_leaves_to_a_thread_is_waited_for_and_reported(
    live: TaskQueue, run: Run, logged: Logged, by_thread: bool
) -> None:
    steps: list[str] = []
    go_on = threading.Event()
    worker = Worker(live, concurrency=1)

    def blocks() -> None:
        go_on.wait(0.05)
        steps.append("ended")

    @worker.task("default")
    async def leaves(payload: dict[str, Any], context: TaskContext) -> list[str]:
        if context.task_id == "a" and by_thread:
            started.append(asyncio.ensure_future(asyncio.to_thread(blocks)))
            await asyncio.sleep(0)
        elif context.task_id == "a":
            asyncio.get_running_loop().run_in_executor(None, blocks)
        else:
            await asyncio.to_thread(steps.append, "awaited")
        return list(steps)

    push(live, "a")
    run(worker)
    assert steps == ["ended"]
    push(live, "b", user_id="bob")
    run(worker)
    (told,) = logged("left_running")
    assert (told["task"], told["ended"]) == ("a", True)
    assert "blocks" in told["left"]


def test_a_thread_that_goes_on_is_reported_and_holds_nobody_up(
    live: TaskQueue, run: Run, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "LEFT_S", 0.05)
    go_on = threading.Event()
    begun: list[int] = []
    worker = Worker(live, concurrency=1)

    def blocks() -> None:
        begun.append(1)
        go_on.wait(60)

    @worker.task("default")
    async def leaves(payload: dict[str, Any], context: TaskContext) -> str:
        loop = asyncio.get_running_loop()
        if context.task_id == "a":
            for _ in range(100):  # more than there are threads
                loop.run_in_executor(None, blocks)
        return await asyncio.to_thread(lambda: "not behind them") if payload else "left"

    try:
        push(live, "a")
        run(worker)
        push(live, "b", user_id="bob", payload={"wait": True})
        run(worker)
        assert info_of(live, "b").result == "not behind them"
        (told,) = logged("left_running")
        assert (told["task"], told["count"], told["ended"]) == ("a", 100, False)
        assert 0 < len(begun) < 100
    finally:
        go_on.set()


async def numbers(closed: list[str], name: str) -> AsyncGenerator[int, None]:
    try:
        for number in range(100):
            yield number
    finally:
        await asyncio.sleep(0)
        closed.append(name)


def test_async_generators_close_with_their_run(live: TaskQueue, run: Run, logged: Logged) -> None:
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
    run(worker)
    assert sorted(closed) == ["dropped", "kept", "read"]
    (told,) = logged("left_running")
    assert (told["task"], told["left"], told["ended"]) == ("t", "numbers", True)


def test_a_generator_that_ignores_its_end_is_logged_once(queue: TaskQueue, logged: Logged) -> None:
    worker = Worker(queue)

    async def stubborn() -> AsyncGenerator[int, None]:
        try:
            yield 1
        except GeneratorExit:
            yield 2

    @worker.task("default")
    async def reads(payload: dict[str, Any]) -> None:
        started.append(stubborn())
        assert await anext(started[-1]) == 1

    push(queue, "t")
    assert worker.run_once() == 1
    (told,) = logged("left_running")
    assert (told["count"], told["ended"]) == (1, True)


def test_a_clean_run_is_not_reported_and_keeps_its_loop(queue: TaskQueue, logged: Logged) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    worker = Worker(queue)

    @worker.task("default")
    async def tidy(payload: dict[str, Any]) -> None:
        loops.append(asyncio.get_running_loop())
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))

    push(queue, "a", "b")
    assert worker.run_once() == 2
    assert loops[0] is loops[1]
    assert not logged("left_running")


# --- in a process of its own ----------------------------------------------------------------------


async def leaves_a_task(payload: dict[str, Any]) -> str:
    started.append(asyncio.ensure_future(asyncio.Event().wait()))
    await asyncio.sleep(0)
    return who.get()


@pytest.mark.processes
def test_what_is_left_in_a_process_of_its_own_is_reported_too(world: World, logged: Logged) -> None:
    worker = Worker(world.queue)
    worker.register("job", leaves_a_task, isolation="process")
    worker.before(lambda: who.set("hook") and None)  # of the worker's process only
    world.push("t", name="job")
    assert worker.run_once() == 1
    assert world.info("t").result == "nobody"
    (told,) = logged("left_running")
    assert (told["task"], told["left"], told["ended"]) == ("t", "Event.wait", True)
