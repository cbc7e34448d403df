"""Both drivers run the same operations, with the same deadlines, repeats and errors."""

import ast
import asyncio
import inspect
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import fakeredis
import pytest
import redis
import redis.asyncio
from helpers.drivers import DRIVERS, queue_of
from helpers.network import LossyProxy, StallingProxy
from helpers.state import check_consistency, stats
from helpers.tasks import ids_of, make_task
from helpers.waiting import in_thread, until_blocked
from redis.sentinel import Sentinel

import fairqueue
from fairqueue.aio import AsyncTaskQueue
from fairqueue.errors import (
    ConfigurationError,
    FairQueueError,
    InvalidPayload,
    InvalidTask,
    LeaseLost,
    RedisRefused,
    RedisUnavailable,
    ScheduleConflict,
    UnknownLayout,
)
from fairqueue.http_tasks.checks import Outgoing
from fairqueue.link.driver import Talk
from fairqueue.link.operation import (
    Ask,
    Blocking,
    Call,
    Each,
    Now,
    Operation,
    Together,
    Wait,
    steps,
)
from fairqueue.queue.push import push_row
from fairqueue.queue.queue import QueueOperations, TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.schedules.service import Schedules

OwnServer = Callable[..., EmbeddedServer]
PACKAGE = Path(fairqueue.__file__).parent


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    """One of the drivers."""
    return str(request.param)


@pytest.fixture
def both(driver: str, redis_url: str, redis_client: redis.Redis) -> Iterator[TaskQueue]:
    """A queue under each driver."""
    with queue_of(driver, redis_url) as queue:
        yield queue
    check_consistency(redis_client)


# --- operations -----------------------------------------------------------------------------------


def test_a_task_goes_from_push_to_its_end(both: TaskQueue) -> None:
    assert both.push(make_task(task_id="t1")) == "t1"
    assert both.push_many([make_task(task_id=f"m{n}") for n in range(600)])[599] == "m599"
    assert both.size() == 601
    (claim,) = both.claim("w", lease=60)
    both.finish(claim, {"ok": True})
    info = both.get("t1")
    assert info is not None
    assert (info.state, info.result) == ("finished", {"ok": True})
    with pytest.raises(LeaseLost):
        both.retry(claim)
    with pytest.raises(InvalidTask, match="is already used by a task with different content"):
        both.push(make_task(task_id="m1", payload={"other": 1}))
    assert both.get("nobody") is None


def test_several_scripts_are_run_in_one_round_trip(both: TaskQueue) -> None:
    both.push_many([make_task(task_id=f"t{n}") for n in range(3)])
    (claim,) = both.claim("w")
    words, claims, hint = both.finish_and_claim([(claim, None)], "w", 1)
    assert (words, ids_of(claims), hint) == (["finished"], ["t1"], 0.0)


def test_an_operation_reads_errors_where_it_asks(both: TaskQueue) -> None:
    def careful() -> Operation[str]:
        try:
            yield Ask(("NO", "SUCH", "COMMAND"))
        except RedisRefused as error:
            assert isinstance((yield Now()), int)
            return f"{error} {(yield Blocking(min, 3, 2))}"
        return "not refused"

    text = both.link.perform(careful())
    assert "unknown command" in text
    assert text.endswith(" 2")


def pushes(count: int) -> Iterator[Call]:
    return (Call("push", rest=push_row(make_task(task_id=f"e{n}"))) for n in range(count))


def test_the_answers_to_many_calls_are_read_in_order_and_can_be_stopped(both: TaskQueue) -> None:
    both.check()
    read: list[Any] = []

    def some() -> Operation[None]:
        def keep(answer: Any) -> bool:
            read.append(answer)
            return len(read) < 3

        yield Each(pushes(5), keep)
        yield Each(iter(()), read.append)

    both.link.perform(some())
    assert [answer[0] for answer in read] == [b"pushed"] * 3
    assert 3 <= both.size() <= 4, "one more was on its way"

    def failing() -> Operation[None]:
        def refuse(answer: Any) -> None:
            raise KeyError("stop")

        yield Each(pushes(5), refuse)

    with pytest.raises(KeyError):
        both.link.perform(failing())


def test_a_forgotten_script_is_sent_again(both: TaskQueue, redis_client: redis.Redis) -> None:
    for number in range(3):
        redis_client.script_flush()
        both.push(make_task(task_id=f"t{number}"))
        redis_client.script_flush()
        both.push_many([make_task(task_id=f"m{number}-{n}") for n in range(600)])
        redis_client.script_flush()
        both.finish_and_claim([], "w", 1)
    assert stats(redis_client)["pushed"] == 3 * 601


@pytest.mark.untidy
def test_a_key_of_a_wrong_type_is_named(both: TaskQueue, redis_client: redis.Redis) -> None:
    redis_client.set(both.keys["leases"], "text")
    with pytest.raises(RedisRefused, match=r"\}:leases is a string and should be a zset"):
        both.push(make_task())
    redis_client.delete(both.keys["leases"])


def test_partly_refused_commands_are_in_doubt(both: TaskQueue, redis_client: redis.Redis) -> None:
    both.push(make_task(task_id="a"))
    (claim,) = both.claim("w")
    redis_client.set(both.keys["served_before"], "no hash")
    with pytest.raises(RedisUnavailable, match="it is not known whether it was done before"):
        both.finish_and_claim([(claim, None)], "w", 1)
    redis_client.delete(both.keys["served_before"])
    info = both.get("a")
    assert info is not None
    assert info.state == "finished"


def test_another_layout_is_refused_unchanged(both: TaskQueue, redis_client: redis.Redis) -> None:
    redis_client.hset(both.keys["fair"], "layout", "99")
    with pytest.raises(UnknownLayout, match="layout 99"):
        both.push(make_task())
    assert redis_client.hgetall(both.keys["fair"]) == {b"layout": b"99"}
    redis_client.flushdb()


def operations_of(queue: TaskQueue) -> QueueOperations:
    """The operations of a queue under either driver."""
    return queue if isinstance(queue, QueueOperations) else cast(Any, queue).queue.operations


def add_schedule(queue: TaskQueue, schedule_id: str, **fields: Any) -> str:
    """Add a schedule under either driver, checking its tasks as a scheduler does."""
    operations = operations_of(queue)
    schedules = Schedules(operations, steps(Outgoing(operations.link).check))
    add = steps(schedules.add_schedule)
    added: str = queue.link.perform(add("0 9 * * *", "alice", schedule_id=schedule_id, **fields))
    return added


def test_a_schedule_is_added(both: TaskQueue, redis_client: redis.Redis) -> None:
    assert add_schedule(both, "nine", timezone="Europe/London") == "nine"
    with pytest.raises(ScheduleConflict, match="'nine'"):
        add_schedule(both, "nine")
    with pytest.raises(InvalidPayload, match=r"127\.0\.0\.1"):
        add_schedule(both, "inside", name="http", payload={"url": "http://127.0.0.1/"})
    with TaskQueue(redis_client) as queue:
        (schedule,) = Schedules(queue).list_schedules()
    assert (schedule.schedule_id, schedule.timezone) == ("nine", "Europe/London")


# --- lost replies ---------------------------------------------------------------------------------


@pytest.fixture
def far(driver: str, proxy: LossyProxy) -> Iterator[TaskQueue]:
    """A queue behind that network."""
    with queue_of(driver, proxy.url, timeout=10) as queue:
        queue.check()
        yield queue


def test_a_lost_reply_repeats_no_call(far: TaskQueue, proxy: LossyProxy) -> None:
    assert proxy.losing(lambda: far.push(make_task(task_id="t1"))) == "t1"
    assert proxy.losing(lambda: far.push(make_task(task_id="t2")), replies=3) == "t2"
    many = [make_task(task_id=f"many-{n}") for n in range(700)]
    assert len(proxy.losing(lambda: far.push_many(many), replies=2)) == 700
    (one,) = proxy.losing(lambda: far.claim("w"))
    (two,) = proxy.losing(lambda: far.claim("w"))
    proxy.losing(lambda: far.finish(one, {"ok": True}))
    proxy.losing(lambda: far.finish_and_claim([(two, None)], "w", 1))
    assert proxy.losing(lambda: far.cancel("many-5")) is True
    assert proxy.losing(lambda: add_schedule(far, "nine")) == "nine"
    with redis.Redis.from_url(proxy.url) as client:
        counted = stats(client)
        check_consistency(client)
    assert counted.pop("duplicates") > 0
    assert counted == {"pushed": 702, "claimed": 3, "finished": 2, "cancelled": 1}


def test_a_lost_refusal_is_repeated(far: TaskQueue, proxy: LossyProxy) -> None:
    far.push(make_task(task_id="t1"))
    (claim,) = far.claim("w")
    far.finish(claim)
    with pytest.raises(LeaseLost):
        proxy.losing(lambda: far.retry(claim), replies=2)
    with pytest.raises(InvalidTask):
        proxy.losing(lambda: far.push(make_task(task_id="t1", payload={"other": 1})), replies=2)


# --- deadlines ------------------------------------------------------------------------------------


@pytest.fixture
def stalling(own_server: OwnServer) -> Iterator[StallingProxy]:
    """A network that can hold everything up."""
    with StallingProxy(own_server().socket_path) as proxy:
        yield proxy


MANY = [make_task(task_id=f"m{n}") for n in range(600)]
CALLS: dict[str, Callable[[TaskQueue], object]] = {
    "push": lambda queue: queue.push(make_task(task_id="t2")),
    "push_many": lambda queue: queue.push_many(MANY),
    "finish_and_claim": lambda queue: queue.finish_and_claim([], "w", 1),
    "inspect": lambda queue: queue.inspect(timeout=0.2),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_mute_server_is_given_up_at_the_deadline(
    driver: str, stalling: StallingProxy, call: str
) -> None:
    with queue_of(driver, stalling.url, timeout=0.6) as queue:
        queue.push(make_task(task_id="t1"))  # there is a connection, which answers
        stalling.stall()
        began = time.monotonic()
        with pytest.raises(RedisUnavailable, match=r"Redis did not answer: .+"):
            CALLS[call](queue)
        assert time.monotonic() - began < 20, "a deadline, on a busy machine"
        stalling.resume()
        assert queue.push(make_task(task_id="t2")) == "t2"


def test_a_late_answer_is_asked_for_again(driver: str, stalling: StallingProxy) -> None:
    """The first attempt, half of the deadline, ends; another one follows."""
    with queue_of(driver, stalling.url, timeout=4.0) as queue:
        queue.push(make_task(task_id="t1"))
        stalling.stall()
        resumed = threading.Timer(2.2, stalling.resume)
        resumed.start()
        assert len(queue.push_many(MANY)) == 600
        resumed.join()
        assert queue.size() == 601


def test_nothing_is_delivered_after_the_deadline(driver: str, own_server: OwnServer) -> None:
    server = own_server()
    with (
        queue_of(driver, server.url, timeout=0.4) as queue,
        redis.Redis.from_url(server.url) as client,
    ):
        queue.push(make_task(task_id="t1"))
        pid = int(cast(dict[str, Any], client.info("server"))["process_id"])
        large = [make_task(task_id=f"l{n}", payload={"x": "y" * 4000}) for n in range(240)]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(RedisUnavailable):
                queue.push_many(large)
        finally:
            os.kill(pid, signal.SIGCONT)
        # In the same event loop, which could go on to send the rest of a buffer.
        assert queue.get("t1") is not None
        assert queue.size() == 1


def test_a_request_in_doubt_is_not_sent_after_its_deadline(both: TaskQueue) -> None:
    both.check()
    awaiting: Any = both
    is_blocking = isinstance(both, TaskQueue)
    link = awaiting.link if is_blocking else awaiting.queue.link
    sent: list[str] = []

    def talk() -> Talk:
        sent.append("sent")
        yield (("PING",),)

    def repeat() -> None:
        again = link._repeat(talk, None, sent_at=time.monotonic() - 2 * link.timeout)
        awaiting.runner.run(again)

    with pytest.raises(RedisUnavailable, match="no time was left"):
        repeat()
    assert sent == []


def test_an_address_at_which_nobody_listens_is_tried_once(driver: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with queue_of(driver, f"redis://127.0.0.1:{port}", timeout=30) as queue:
            began = time.monotonic()
            with pytest.raises(RedisUnavailable, match="did not answer"):
                queue.push(make_task())
            assert time.monotonic() - began < 15, "not until the deadline"


def test_a_closed_queue_refuses_everything(driver: str, redis_url: str) -> None:
    with queue_of(driver, redis_url) as queue:
        queue.push(make_task())
        queue.close()
        with pytest.raises(RedisRefused, match="closed"):
            queue.size()


@pytest.mark.untidy
def test_a_wrong_password_is_a_refusal(driver: str, own_server: OwnServer) -> None:
    server = own_server()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "right")
        with (
            queue_of(driver, server.url) as queue,
            pytest.raises(FairQueueError, match=r"NOAUTH|login|Authentication"),
        ):
            queue.size()


# --- waiting --------------------------------------------------------------------------------------


def test_a_waiting_claim_is_woken_by_a_push(both: TaskQueue, redis_client: redis.Redis) -> None:
    waiting = in_thread(lambda: both.claim("w", wait=60))
    until_blocked(redis_client)
    with TaskQueue(redis_client) as other:
        other.push(make_task(task_id="t1"))
    assert ids_of(waiting()) == ["t1"]


def test_a_wait_ends_with_its_time(both: TaskQueue) -> None:
    assert both.claim("w", wait=0.05) == []


def test_a_token_between_waits_is_not_missed(both: TaskQueue, redis_client: redis.Redis) -> None:
    def twice() -> Operation[tuple[bytes | None, bytes | None]]:
        first = yield Wait("wake", 0.01)
        redis_client.lpush(both.keys["wake"], "1")
        second = yield Wait("wake", 60)
        return first, second

    assert both.link.perform(twice()) == (None, both.keys["wake"])


def test_another_list_can_be_waited_for(both: TaskQueue, redis_client: redis.Redis) -> None:
    def other() -> Operation[tuple[bytes | None, bytes | None]]:
        first = yield Wait("wake", 0.01)
        redis_client.lpush(both.keys["scheduler_wake"], "1")
        second = yield Wait("scheduler_wake", 60)
        return first, second

    assert both.link.perform(other()) == (None, both.keys["scheduler_wake"])


@pytest.mark.parametrize("pushed", ["wake", "wake_3"])
def test_several_lists_can_be_waited_for_at_once(
    both: TaskQueue, redis_client: redis.Redis, pushed: str
) -> None:
    def either() -> Operation[tuple[bytes | None, bytes | None, bytes | None]]:
        first = yield Wait(["wake_3", "wake"], 0.01)
        redis_client.lpush(both.keys[pushed], "1")
        second = yield Wait(["wake_3", "wake"], 60)
        third = yield Wait(["wake_3", "wake"], 0.01)
        return first, second, third

    assert both.link.perform(either()) == (None, both.keys[pushed], None)


def test_the_server_is_asked_again_when_its_own_time_out_ends_a_wait(
    both: TaskQueue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairqueue.link.driver.BLOCK_S", 0.02)
    monkeypatch.setattr("fairqueue.link.listener.BLOCK_S", 0.02)
    waiting = in_thread(lambda: both.link.perform(_waiting(60)))
    until_blocked(redis_client)
    time.sleep(0.2)  # some time-outs of the server
    redis_client.lpush(both.keys["wake"], "1")
    assert waiting() is True


def _waiting(seconds: float) -> Operation[bool]:
    return bool((yield Wait("wake", seconds)))


def test_a_wait_outlives_a_silent_server(
    driver: str, stalling: StallingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is given up, and no other call gets an answer that was meant for it."""
    for module in ("driver", "listener"):
        monkeypatch.setattr(f"fairqueue.link.{module}.BLOCK_S", 0.2)
        monkeypatch.setattr(f"fairqueue.link.{module}.SILENCE_S", 0.1)
    with queue_of(driver, stalling.url, timeout=10.0) as queue:
        queue.push(make_task(task_id="t1"))

        def silent() -> Operation[bool]:
            yield Wait("wake_1", 0.01)
            stalling.stall()
            threading.Timer(1.0, stalling.resume).start()
            return bool((yield Wait("wake_1", 2.0)))

        assert queue.link.perform(silent()) is False
        for _ in range(4):
            assert queue.size() == 1
            info = queue.get("t1")
            assert info is not None
            assert info.task_id == "t1"


def test_waits_share_connections(driver: str, own_server: OwnServer) -> None:
    server = own_server()
    with (
        queue_of(driver, server.url) as queue,
        redis.Redis.from_url(server.url) as client,
        TaskQueue.from_url(server.url) as other,
    ):
        for number in range(12):
            waiting = in_thread(lambda: queue.claim("w", wait=60))
            until_blocked(client)
            other.push(make_task(task_id=f"t{number}"))
            assert ids_of(waiting()) == [f"t{number}"]
        assert len(client.client_list()) < 8


def test_a_wait_ends_when_it_is_closed(both: TaskQueue, redis_client: redis.Redis) -> None:
    both.check()
    waiting = in_thread(lambda: both.link.perform(_waiting(60)))
    until_blocked(redis_client)
    redis_client.client_kill_filter(_type="normal", skipme=True)
    assert waiting() is False
    assert both.size() == 0


# --- forks and event loops ------------------------------------------------------------------------


def test_a_queue_can_be_used_after_a_fork(both: TaskQueue, redis_client: redis.Redis) -> None:
    both.push(make_task(task_id="parent"))

    def child() -> None:
        cast(Any, both).runner = asyncio.Runner()
        both.push(make_task(task_id="child"))
        os._exit(0 if both.size() == 2 else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0
    both.push(make_task(task_id="parent-2"))
    assert both.size() == 3
    assert stats(redis_client)["pushed"] == 3


def test_an_asynchronous_queue_can_be_used_in_one_loop_after_the_other(redis_url: str) -> None:
    queue = AsyncTaskQueue.from_url(redis_url)

    async def use(task_id: str) -> None:
        await queue.push(make_task(task_id=task_id))
        while queue.link._free:  # as a pool that is cleared between two loops
            await queue.link._free.pop().disconnect()

    asyncio.run(use("one"))
    asyncio.run(use("two"))


def test_two_event_loops_do_not_get_each_others_connections(
    redis_url: str, redis_client: redis.Redis
) -> None:
    queue = AsyncTaskQueue.from_url(redis_url)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        first.run_until_complete(queue.push(make_task(task_id="t1")))
        redis_client.client_pause(200)
        pending = first.create_task(queue.size())
        first.run_until_complete(asyncio.sleep(0))  # it has a connection of the first loop
        second.run_until_complete(queue.size())
        assert first.run_until_complete(pending) == 1
        assert second.run_until_complete(queue.size()) == 1
        second.run_until_complete(queue.destroy())
        second.run_until_complete(queue.close())
    finally:
        for loop in (first, second):
            loop.run_until_complete(asyncio.sleep(0))  # for the transports to close
            loop.close()


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", [0, 1, 2, 3, 5, 8, 13])
def test_a_cancelled_call_leaves_no_answer_on_its_way(
    redis_url: str, redis_client: redis.Redis, pause: int
) -> None:
    """Whatever it was about to do: the next caller gets its own answer."""

    async def run() -> None:
        async with AsyncTaskQueue.from_url(redis_url) as queue:
            await queue.push(make_task(task_id="first"))
            for call in (
                lambda: queue.push(make_task(task_id="t")),
                lambda: queue.push_many([make_task(task_id=f"m{n}") for n in range(300)]),
                lambda: queue.claim("w", names=["none"], wait=60),
                lambda: queue.size(),
            ):
                task = asyncio.ensure_future(call())
                for _ in range(pause):
                    await asyncio.sleep(0)
                task.cancel()
                done, _ = await asyncio.wait({task}, timeout=30)
                assert done, "the cancellation was swallowed"
                info = await queue.get("first")
                assert info is not None
                assert info.task_id == "first"
                assert await queue.size("nobody") == 0

    asyncio.run(run())
    check_consistency(redis_client)


def test_many_tasks_of_one_loop_share_the_queue(redis_url: str, redis_client: redis.Redis) -> None:
    async def run() -> None:
        async with AsyncTaskQueue.from_url(redis_url) as queue:
            tasks = [make_task(f"u{n % 7}", f"t{n}") for n in range(200)]
            assert await asyncio.gather(*map(queue.push, tasks)) == [t.task_id for t in tasks]
            claimed = await asyncio.gather(*(queue.claim(f"w{n}", limit=4) for n in range(50)))
            claims = [claim for each in claimed for claim in each]
            assert len({claim.task.task_id for claim in claims}) == 200
            await asyncio.gather(*map(queue.finish, claims))

    asyncio.run(run())
    assert stats(redis_client)["finished"] == 200
    check_consistency(redis_client)


# --- clients --------------------------------------------------------------------------------------


def test_an_asynchronous_queue_takes_a_client_of_either_kind(redis_url: str) -> None:
    async def run(client: Any) -> int:
        async with AsyncTaskQueue(client, "other") as queue:
            return await queue.size()

    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert asyncio.run(run(client)) == 0
    assert asyncio.run(run(redis.asyncio.Redis.from_url(redis_url))) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("redis://", "client must be a redis.Redis or a redis.asyncio.Redis, not"),
        (Sentinel([("127.0.0.1", 1)]).master_for("main"), "does not support Redis Sentinel yet"),
        (fakeredis.FakeRedis(), "cannot be used asynchronously"),
    ],
)
def test_a_client_that_cannot_be_used_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        AsyncTaskQueue(given)


# --- one place for each operation -----------------------------------------------------------------


def test_the_asynchronous_queue_has_every_operation_of_the_blocking_one() -> None:
    def operations(kind: type) -> dict[str, inspect.Signature]:
        return {
            name: inspect.signature(method)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if hasattr(method, "__wrapped__")
        }

    blocking, awaiting = operations(QueueOperations), operations(AsyncTaskQueue)
    assert blocking.keys() - awaiting.keys() == {"catch_up", "exchange"}  # of schedulers, workers
    assert {name: blocking[name] for name in awaiting} == awaiting
    assert str(blocking["push"]).endswith("-> str")


REQUESTS = {each.__name__ for each in (Call, Ask, Each, Together, Wait, Now, Blocking)} | {"steps"}


def plain_operations(tree: ast.Module) -> set[str]:
    """The names of generators that `operation` does not run by itself."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and ast.unparse(node.returns).startswith("Operation[")
        and "operation" not in map(ast.unparse, node.decorator_list)
    }


def test_every_operation_is_run() -> None:
    """A call of an operation without `yield from` would do nothing, and nobody would notice."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    base = plain_operations(trees[PACKAGE / "queue" / "base.py"])
    assert "_check" in base
    lost = []
    for path, tree in trees.items():
        names = {f"self.{name}" for name in base | plain_operations(tree)} | REQUESTS
        if path.parent.name != "queue" and not plain_operations(tree):
            names = REQUESTS
        lost += [
            f"{path.name}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) in names
        ]
    assert lost == []
