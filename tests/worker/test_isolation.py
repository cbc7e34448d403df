"""Handlers in processes of their own: what comes back, and that they can always be killed."""

import asyncio
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.tasks import claim_one, info_of, push
from helpers.waiting import eventually
from helpers.world import World

from fairqueue import Discard, Retry, TaskContext, TaskQueue, TimedOut, Worker
from fairqueue.clock import ManualClock
from fairqueue.errors import ConfigurationError
from fairqueue.models import Task
from fairqueue.queue.reports import Failure
from fairqueue.worker import isolation
from fairqueue.worker.handlers import Handler, HandlerSettings
from fairqueue.worker.isolation import MAX_MESSAGE_BYTES, ProcessFailed, run_isolated

pytestmark = pytest.mark.processes


# --- handlers, at the top level of a module -------------------------------------------------------


def facts(payload: dict[str, Any], context: TaskContext) -> list[Any]:
    return [payload, context.task_id, context.attempt, context.task.user_id, context.cancelled]


async def later(payload: dict[str, Any]) -> str:
    await asyncio.sleep(0)
    return "later"


class Build:
    def handle(self, payload: dict[str, Any]) -> str:
        return "built"


def own_process(payload: dict[str, Any]) -> int:
    return os.getpid()


def beats(payload: dict[str, Any], context: TaskContext) -> bool:
    return context.heartbeat()


def odd_result(payload: dict[str, Any]) -> Any:
    return {1, 2}


def talks(payload: dict[str, Any], context: TaskContext) -> None:
    context.log.info("half %s", "done", extra={"page": 7, "odd": {1}, "name": "x"})
    logging.getLogger("elsewhere").warning("disk full", extra={"free": 0})
    context.log.warning("\ud800")


def fails(payload: dict[str, Any]) -> None:
    raise ValueError("order 7 is gone")


def retries(payload: dict[str, Any]) -> None:
    raise Retry("busy", in_=42)


def discards(payload: dict[str, Any]) -> None:
    raise Discard("no such customer")


def times_out(payload: dict[str, Any]) -> None:
    raise TimedOut("by itself")


def exits(payload: dict[str, Any]) -> None:
    sys.exit(3)


def breaks_off(payload: dict[str, Any]) -> None:
    os._exit(7)


def crashes(payload: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def writes_to_the_pipe(payload: dict[str, Any]) -> None:
    for each in gc.get_objects():
        if isinstance(each, Connection) and each.writable:
            each.send_bytes(payload["text"].encode() * payload.get("times", 1))
    time.sleep(600)


def begin(payload: dict[str, Any]) -> None:
    """Say which process this is, in a file that somebody waits for."""
    if "pid_file" in payload:
        path = Path(payload["pid_file"])
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)


def sleeps(payload: dict[str, Any]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    begin(payload)
    time.sleep(600)


def holds_the_interpreter(payload: dict[str, Any]) -> None:
    begin(payload)
    re.match(r"(a+)+$", "a" * 100 + "b")


def catches_everything(payload: dict[str, Any]) -> None:
    begin(payload)
    while True:
        try:
            time.sleep(600)
        except BaseException:
            continue


STUBBORN = [sleeps, holds_the_interpreter, catches_everything]


# --- without a server -----------------------------------------------------------------------------


def context_of(payload: dict[str, Any] | None = None) -> TaskContext:
    task = Task.create(user_id="alice", task_id="t", payload=payload or {}, name="job")
    return TaskContext(task, attempt=3)


def run(
    target: Callable[..., Any],
    timeout: float | None = 60.0,
    context: TaskContext | None = None,
    *,
    capture: bool = False,
) -> Any:
    settings = HandlerSettings.create(timeout=timeout, isolation="process")
    handler = Handler("job", target, settings)
    (result,) = run_isolated(handler, [context or context_of()], capture=capture)
    return result


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pid_in(path: Path) -> int:
    eventually(path.exists, "the handler has begun", within=60)
    return int(path.read_text())


@pytest.mark.parametrize(
    ("target", "result"),
    [
        (facts, [{"n": 7}, "t", 3, "alice", False]),
        (later, "later"),
        (Build, "built"),
        (beats, True),
        (odd_result, "{1, 2}"),
    ],
)
def test_the_result_comes_back_whatever_kind_the_handler_is(target: Any, result: Any) -> None:
    assert run(target, context=context_of({"n": 7})) == result


def test_each_run_has_a_process_of_its_own_which_ends_with_it() -> None:
    pids = {run(own_process), run(own_process)}
    assert len(pids | {os.getpid()}) == 3
    assert not any(is_alive(pid) for pid in pids)


def test_many_threads_run_processes_at_once() -> None:
    pids: list[int] = []
    threads = [threading.Thread(target=lambda: pids.append(run(own_process))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(pids)) == 6


@pytest.mark.parametrize(
    ("target", "kind", "text"),
    [
        (retries, Retry, "busy"),
        (discards, Discard, "no such customer"),
        (times_out, TimedOut, "by"),
    ],
)
def test_a_handlers_decision_comes_back(target: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as raised:
        run(target)
    assert getattr(raised.value, "in_", 42) == 42
    assert Failure.of(raised.value).place == f"test_isolation.py:{target.__name__}"


def test_a_failure_comes_back_with_its_type_message_and_traceback() -> None:
    with pytest.raises(ProcessFailed, match="order 7 is gone") as raised:
        run(fails)
    failure = raised.value.failure
    assert (failure.type, failure.message) == ("ValueError", "order 7 is gone")
    assert failure.place == "test_isolation.py:fails"
    assert 'raise ValueError("order 7 is gone")' in failure.traceback
    assert "isolation.py" not in failure.traceback.replace("test_isolation.py", "")


@pytest.mark.parametrize(
    ("target", "kind", "text"),
    [
        (exits, "SystemExit", "3"),
        (breaks_off, "ProcessFailed", "exited with status 7 before it gave a result"),
        (crashes, "ProcessFailed", "killed by SIGSEGV"),
    ],
)
def test_a_process_that_exits_is_a_failure_that_says_how(target: Any, kind: str, text: str) -> None:
    with pytest.raises(ProcessFailed, match=text) as raised:
        run(target)
    assert raised.value.failure.type == kind


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({"text": "junk"}, "malformed message"),
        ({"text": "[]"}, "malformed message"),
        ({"text": "{}"}, "malformed message"),
        ({"text": '{"log": [1]}'}, "malformed message"),
        ({"text": '{"log": ["x", "y", 1]}'}, "malformed message"),
        ({"text": '{"log": [7, 20, "no such task", true, {}]}'}, "malformed message"),
        ({"text": '{"result": [1, 2]}'}, "malformed message"),
        ({"text": '{"result": 5}'}, "malformed message"),
        ({"text": '{"failed": [0, {}]}'}, "malformed message"),
        ({"text": '{"cost": [0, -1]}'}, "malformed message"),
        ({"text": '{"error": {}}'}, "malformed message"),
        ({"text": '{"error": 5}'}, "malformed message"),
        ({"text": "x", "times": MAX_MESSAGE_BYTES + 1}, f"more than {MAX_MESSAGE_BYTES} bytes"),
    ],
)
def test_a_process_that_sends_nonsense_is_killed(payload: dict[str, Any], text: str) -> None:
    with pytest.raises(ProcessFailed, match=text):
        run(writes_to_the_pipe, context=context_of(payload))


def test_log_lines_come_back_and_are_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    context = context_of()
    with caplog.at_level("INFO"):
        run(talks, context=context)
    assert context.logged is not None
    kept = [line[1:] for line in context.logged.kept()[0]]
    fields = {"page": 7, "odd": [1], "name": "x"}
    assert kept == [("info", "half done", fields), ("warning", "?", {})]
    assert vars(caplog.records[0])["page"] == 7
    assert [(r.name, r.getMessage()) for r in caplog.records] == [
        ("fairqueue.task", "half done"),
        ("fairqueue.task", "?"),
    ]


def test_what_other_loggers_say_there_is_kept_when_it_is_captured() -> None:
    context = context_of()
    run(talks, context=context, capture=True)
    assert context.logged is not None
    kept = context.logged.kept()[0]
    assert [line.message for line in kept] == ["half done", "disk full", "?"]
    assert [line.context.get("free") for line in kept] == [None, 0, None]


@pytest.mark.parametrize("target", STUBBORN)
def test_a_handler_is_killed_at_its_time_out_whatever_it_does(target: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(TimedOut, match=r"ran for more than 1 s"):
        run(target, timeout=1.0, context=context_of({"pid_file": str(pid_file)}))
    assert not pid_file.exists() or not is_alive(pid_in(pid_file))


@pytest.mark.parametrize(
    ("lease_lost", "text"), [(False, "task was cancelled"), (True, "lease was lost")]
)
@pytest.mark.parametrize("target", STUBBORN)
def test_a_handler_is_killed_when_nobody_waits_for_it_any_more(
    target: Any, tmp_path: Path, lease_lost: bool, text: str
) -> None:
    pid_file = tmp_path / "pid"
    context = context_of({"pid_file": str(pid_file)})
    failed: list[Exception] = []

    def wait() -> None:
        try:
            run(target, timeout=None, context=context)
        except ProcessFailed as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pid = pid_in(pid_file)
    context.stop(lease_lost=lease_lost)
    thread.join(60)
    assert text in str(failed[0])
    assert not is_alive(pid)


def test_a_run_that_was_cancelled_before_its_process_began_does_not_begin(tmp_path: Path) -> None:
    context = context_of({"pid_file": str(tmp_path / "pid")})
    context.stop()
    with pytest.raises(ProcessFailed, match="cancelled"):
        run(sleeps, timeout=None, context=context)


def test_a_process_that_does_not_begin_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "START_S", 0.0)
    with pytest.raises(ProcessFailed, match="had not begun after 0 s"):
        run(facts)


# --- registering ----------------------------------------------------------------------------------


@pytest.fixture
def worker() -> Worker:
    """One that never meets a server: nothing listens at this address."""
    return Worker(TaskQueue(redis.Redis(port=1)))


def local() -> Callable[..., Any]:
    def inner(payload: dict[str, Any]) -> None: ...

    return inner


@pytest.mark.parametrize("target", [lambda payload: None, local(), Build().handle, print])
def test_a_handler_that_a_process_cannot_find_is_refused(worker: Worker, target: Any) -> None:
    with pytest.raises(ConfigurationError, match="at the top level of a module"):
        worker.register("job", target, isolation="process")


def test_a_handler_whose_name_means_something_else_is_refused_at_the_start(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.register("job", fails, isolation="process")
    for other, text in ((facts, "which differs"), (None, "which does not exist")):
        monkeypatch.setattr(sys.modules[__name__], "fails", other)
        with pytest.raises(ConfigurationError, match=text):
            worker.start()
        with pytest.raises(ConfigurationError, match=text):
            worker.run_once()


@pytest.mark.parametrize("isolation", ["fork", None, True])
def test_another_isolation_is_refused(worker: Worker, isolation: Any) -> None:
    with pytest.raises(ConfigurationError, match="isolation "):
        worker.register("job", fails, isolation=isolation)


# --- with a server --------------------------------------------------------------------------------


@pytest.fixture
def live(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    with TaskQueue(redis_client) as queue:
        yield queue


def test_a_worker_records_what_comes_back(world: World) -> None:
    worker = Worker(world.queue)
    hooks: list[Any] = []
    worker.then(lambda result: hooks.append(result))
    worker.catch(lambda error: hooks.append(str(error)))
    worker.register("built", Build, isolation="process")
    worker.register("failed", fails, isolation="process", retries=0)
    worker.register("retried", retries, isolation="process")
    worker.register("overdue", sleeps, isolation="process", retries=0, timeout=0.2)
    for name in ("built", "failed", "retried", "overdue"):
        world.push(name, name=name)
    assert worker.run_until_empty() == 4
    found = {name: world.queue.get(name) for name in ("built", "failed", "retried", "overdue")}
    assert {name: (i.state, i.result, i.error) for name, i in found.items() if i is not None} == {
        "built": ("finished", "built", None),
        "failed": ("buried", None, "ValueError: order 7 is gone"),
        "retried": ("delayed", None, "busy"),
        "overdue": ("buried", None, "timed out: ran for more than 0.2 s"),
    }
    assert hooks == ["built", "order 7 is gone", "busy", "ran for more than 0.2 s"]
    info = found["retried"]
    assert info is not None
    assert (info.due_at - world.now()).total_seconds() == 42


def test_cancelling_a_task_kills_its_process(live: TaskQueue, tmp_path: Path) -> None:
    worker = Worker(live, concurrency=1, lease=0.3)
    worker.register("default", holds_the_interpreter, isolation="process")
    push(live, "t", payload={"pid_file": str(tmp_path / "pid")})
    worker.start()
    try:
        pid = pid_in(tmp_path / "pid")
        assert live.cancel("t")
        eventually(lambda: not is_alive(pid), "the process is killed")
    finally:
        assert worker.stop(30)
    assert info_of(live, "t").state == "cancelled"


def test_losing_the_lease_kills_the_process_and_nothing_is_recorded(
    live: TaskQueue, redis_client: redis.Redis, tmp_path: Path
) -> None:
    worker = Worker(live, concurrency=1, lease=0.3)
    worker.register("default", sleeps, isolation="process")
    push(live, "t", payload={"pid_file": str(tmp_path / "pid")})
    worker.start()
    try:
        pid = pid_in(tmp_path / "pid")
        with TaskQueue(redis_client, clock=ManualClock(time.time() + 1000)) as thief:
            stolen = claim_one(thief, lease=1000, worker="thief")
            eventually(lambda: not is_alive(pid), "the process is killed")
            assert worker.stop(30)
            thief.finish(stolen, "his")
    finally:
        worker.stop(30)
    found = info_of(live, "t")
    assert (found.state, found.result) == ("finished", "his")


def test_a_worker_that_stops_kills_and_releases_its_runs(live: TaskQueue, tmp_path: Path) -> None:
    worker = Worker(live, concurrency=1)
    worker.register("default", sleeps, isolation="process")
    push(live, "t", payload={"pid_file": str(tmp_path / "pid")})
    worker.start()
    pid = pid_in(tmp_path / "pid")
    assert worker.stop(0.0) is False
    eventually(lambda: not is_alive(pid), "the process is killed")
    found = info_of(live, "t")
    assert (found.state, found.attempts, found.error) == ("ready", 0, None)


# A worker as a script: its handler is defined in the main module.
SCRIPT = textwrap.dedent(
    """
    import re, sys, os, json
    from pathlib import Path
    from fairqueue import TaskQueue, Worker

    queue = TaskQueue.from_url(sys.argv[1])
    worker = Worker(queue, concurrency=1, lease=30)

    @worker.task("default", isolation="process", timeout=300)
    def stuck(payload):
        if "pid_file" not in payload:
            return "from the main script"
        path = Path(payload["pid_file"])
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)
        re.match(r"(a+)+$", "a" * 100 + "b")

    {guard}worker.run_until_empty()
    """
)


@pytest.fixture
def script(tmp_path: Path, redis_url: str) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []

    def script(guard: str = "if __name__ == '__main__': ") -> "subprocess.Popen[str]":
        path = tmp_path / "main.py"
        path.write_text(SCRIPT.replace("{guard}", guard))
        process = subprocess.Popen(
            [sys.executable, str(path), redis_url],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(process)
        return process

    yield script
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def test_a_handler_of_the_main_script_runs_in_a_process_too(live: TaskQueue, script: Any) -> None:
    push(live, "t")
    assert script().wait(60) == 0
    assert info_of(live, "t").result == "from the main script"


def test_an_unguarded_main_script_fails_and_says_what_to_do(live: TaskQueue, script: Any) -> None:
    push(live, "t")
    _, errors = script(guard="").communicate(timeout=60)
    assert "start it under `if __name__ == '__main__':`" in errors
    found = info_of(live, "t")
    assert found.error == (
        "ProcessFailed: its process exited with status 1 before it gave a result"
    )


def test_a_killed_worker_ends_its_process(live: TaskQueue, script: Any, tmp_path: Path) -> None:
    push(live, "t", payload={"pid_file": str(tmp_path / "pid")})
    worker = script()
    pid = pid_in(tmp_path / "pid")
    worker.kill()
    eventually(lambda: not is_alive(pid), "the process has ended")


FORKED_AFTER_A_RUN = """
import multiprocessing, os, sys
from multiprocessing import forkserver
import fairqueue.worker.isolation

context = multiprocessing.get_context("forkserver")
first = context.Process(target=print, args=("parent",), kwargs={"flush": True})
first.start(); first.join()
pid = os.fork()
if pid == 0:
    again = context.Process(target=print, args=("child",), kwargs={"flush": True})
    again.start(); again.join()
    os._exit(again.exitcode)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.processes
def test_a_process_that_was_forked_after_an_isolated_run_can_isolate_too(
    spawn: Callable[..., "subprocess.Popen[str]"],
) -> None:
    output, _ = spawn(FORKED_AFTER_A_RUN).communicate(timeout=60)

    assert output.split() == ["parent", "child", "0"]
