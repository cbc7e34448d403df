"""Workers in processes of their own: replaced, stopped, killed, frozen, and no task is lost."""

import json
import os
import random
import signal
import subprocess
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from helpers.fixtures import Spawn
from helpers.state import check_consistency, places
from helpers.tasks import fill, info_of, push
from helpers.waiting import eventually, in_thread

import fairqueue.worker.pool
import fairqueue.worker.worker
from fairqueue import TaskContext, TaskQueue, Worker
from fairqueue.errors import ConfigurationError
from fairqueue.history.runs import History
from fairqueue.queue.workers import WorkerInfo, WorkerStore

pytestmark = pytest.mark.processes

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs the memory of a process"
)

SEED = 20_260_305
WITHIN = 60.0  # seconds after which a test gives up waiting

# Makes a worker with the settings that the test gives, and what the tests want it to run. Side
# effects are kept beside the queue, in keys that begin with "side:".
PROLOGUE = """
import json, logging, math, os, resource, signal, sys, threading, time
import redis
from prometheus_client import REGISTRY
import fairqueue.runtime.processes, fairqueue.worker
from fairqueue import Retry, TaskQueue, Worker
from fairqueue.alerts import Alerts, CallableRecipient

url, settings = sys.argv[1], json.loads(sys.argv[2])
pause = threading.Event()
client = redis.Redis.from_url(url)
queue = TaskQueue.from_url(url)

def wait_for_gate():
    while not client.exists("side:gate"):
        pause.wait(0.01)

def run(payload, context):
    client.hincrby("side:effects", context.task_id, 1)
    pause.wait(payload.get("seconds", 0))
    if payload.get("gate"):
        wait_for_gate()
    return os.getpid()

def make(**more):
    worker = Worker(queue, **settings, **more)
    worker.register("default", run)
    return worker

def is_stopping():
    if worker._group is None:
        return worker._pool is None
    return worker._deadline() < math.inf

def open_gate_when_stopping():
    while not is_stopping():
        pause.wait(0.01)
    client.set("side:gate", "open")
"""

# Runs until the standard input ends, and answers what it is asked in lines.
SERVE = """
worker = globals().get("worker") or make()
worker.start()
print(json.dumps("started"), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


class Program:
    """Another Python with a worker."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the program has ended"
        return json.loads(line)

    def ask(self, expression: str) -> Any:
        """What an expression is, in the process that has the worker."""
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.hear()

    def pids(self) -> list[int]:
        """The processes that the worker has now."""
        return cast(list[int], self.ask("worker._group.alive()"))

    def end(self) -> None:
        assert self.ask("worker.stop(30)") is True
        out, _ = self.process.communicate("", timeout=30)
        assert (out, self.process.returncode) == ("", 0)


@pytest.fixture
def start(spawn: Spawn, redis_url: str) -> Callable[..., Program]:
    """Start a program with a worker; `code` comes between the prologue and what it does then."""

    def start(code: str = "", then: str = SERVE, **settings: Any) -> Program:
        program = PROLOGUE + textwrap.dedent(code) + textwrap.dedent(then)
        started = Program(spawn(program, redis_url, json.dumps(settings)))
        if then is SERVE:
            assert started.hear() == "started"
        return started

    return start


Start = Callable[..., Program]


@pytest.fixture
def live(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    """A queue that goes by the server's clock."""
    with TaskQueue(redis_client) as queue:
        queue.configure(max_attempts=1000, keep_finished=200_000)
        yield queue
    side = cast(list[bytes], redis_client.keys("side:*"))
    if side:
        redis_client.delete(*side)
    check_consistency(redis_client)


def effects(client: redis.Redis) -> dict[str, int]:
    """How often each task was begun."""
    stored = cast(dict[bytes, bytes], client.hgetall("side:effects"))
    return {task_id.decode(): int(count) for task_id, count in stored.items()}


def counter(queue: TaskQueue, name: str) -> int:
    return queue.inspect().counters.get(name, 0)


def finished(queue: TaskQueue) -> int:
    return counter(queue, "finished")


def alive(queue: TaskQueue) -> list[WorkerInfo]:
    return WorkerStore(queue.link).alive()


def until(predicate: Callable[[], object], what: str) -> None:
    eventually(predicate, what, within=WITHIN, every=0.02)


def until_running(queue: TaskQueue, client: redis.Redis, count: int) -> None:
    until(lambda: sum(effects(client).values()) >= count, f"{count} have begun")
    until(lambda: queue.inspect().running == count, f"{count} run")


def gated(queue: TaskQueue, count: int, **fields: Any) -> list[str]:
    """Push tasks that go on until the gate is open."""
    return push(queue, *(f"g{n}" for n in range(count)), payload={"gate": True}, **fields)


def open_gate(client: redis.Redis) -> None:
    client.set("side:gate", "open")


# --- what they are --------------------------------------------------------------------------------


def test_processes_have_own_names(live: TaskQueue, redis_client: redis.Redis, start: Start) -> None:
    program = start(processes=3, concurrency=2, worker_id="w")
    tasks = gated(live, 6)
    until_running(live, redis_client, 6)
    found = alive(live)
    assert [each.worker_id for each in found] == ["w:0", "w:1", "w:2"]
    assert [each.pid for each in found] == program.pids()
    assert program.process.pid not in {each.pid for each in found}
    assert {each.slots for each in found} == {2}
    open_gate(redis_client)
    until(lambda: finished(live) == 6, "all have run")
    ran_in = Counter(info_of(live, task).result for task in tasks)
    assert ran_in == {each.pid: 2 for each in found}
    assert {info_of(live, task).worker_id for task in tasks} == {"w:0", "w:1", "w:2"}
    program.end()
    assert alive(live) == []


def test_processes_without_a_given_name_have_one_each(live: TaskQueue, start: Start) -> None:
    program = start(processes=2)
    until(lambda: len(alive(live)) == 2, "both are known")
    names = {each.worker_id for each in alive(live)} | {program.ask("worker.worker_id")}
    assert len(names) == 3
    program.end()


def test_to_start_and_stop_again_is_harmless(live: TaskQueue, start: Start) -> None:
    program = start(processes=2)
    pids = program.pids()
    assert program.ask("worker.start()") is None
    assert program.pids() == pids
    assert program.ask("[worker.stop(30), worker.stop(30)]") == [True, True]
    assert program.pids() == []
    push(live, "t")
    assert program.ask("worker.start()") is None
    until(lambda: finished(live) == 1, "it runs again")
    program.end()


def test_tasks_may_run_in_the_parent_before_processes_start(live: TaskQueue, start: Start) -> None:
    push(live, "t1", "t2", "t3")
    program = start("worker = make()\nassert worker.run_until_empty() == 3\n", processes=2)
    assert {info_of(live, f"t{n}").result for n in (1, 2, 3)} == {program.process.pid}
    push(live, "t4")
    until(lambda: finished(live) == 4, "a process has run it")
    assert info_of(live, "t4").result in program.pids()
    program.end()
    assert alive(live) == []  # the parent has left as well


def test_an_embedded_server_is_shared_with_the_processes_and_outlives_them(spawn: Spawn) -> None:
    then = """
    with TaskQueue.embedded() as queue:
        client = redis.Redis.from_url(queue._server.url)
        worker = make()
        from fairqueue.models import Task
        for n in range(2):
            worker.start()
            queue.push_many(Task.create(user_id="u", task_id=f"{n}-{i}") for i in range(50))
            while queue.inspect().counters.get("finished", 0) < 50 * (n + 1):
                pause.wait(0.01)
            print(json.dumps(worker.stop(30)), flush=True)
        ran_in = {queue.get(f"{n}-{i}").result for n in range(2) for i in range(50)}
        print(json.dumps(os.getpid() in ran_in), flush=True)
    """
    settings = json.dumps({"processes": 2})
    program = Program(spawn(PROLOGUE + textwrap.dedent(then), "redis://unused", settings))
    assert [program.hear() for _ in range(3)] == [True, True, False]
    assert program.process.wait(30) == 0


def test_isolated_handlers_run_below_these(live: TaskQueue, start: Start, tmp_path: Path) -> None:
    (tmp_path / "isolated_jobs.py").write_text("import os\ndef run(payload): return os.getpid()\n")
    code = f"""
    sys.path.insert(0, {str(tmp_path)!r})
    import isolated_jobs
    worker = make()
    worker.register("isolated", isolated_jobs.run, isolation="process")
    """
    program = start(code, processes=2)
    push(live, *(f"t{n}" for n in range(4)), name="isolated")
    until(lambda: finished(live) == 4, "all have run")
    ran_in = {info_of(live, f"t{n}").result for n in range(4)}
    assert len(ran_in) == 4
    assert not ran_in & {program.process.pid, *program.pids()}
    program.end()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"processes": 0}, "processes must .*not 0"),
        ({"processes": True}, "processes must .*not True"),
        ({"processes": "two"}, "processes must .*not 'two'"),
        ({"processes": 10_001}, "processes must .*not 10001"),
        ({"max_tasks": 5}, "max_tasks 5"),
        ({"max_memory": 2**30}, "max_memory 1073741824"),
        ({"processes": 2, "max_tasks": 0}, "max_tasks must .*not 0"),
        ({"processes": 2, "max_memory": 0}, "max_memory must .*not 0"),
        ({"processes": 2, "worker_id": "w" * 200}, "worker_id"),
    ],
)
def test_bad_settings_are_named(live: TaskQueue, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Worker(live, **settings)


# --- replaced -------------------------------------------------------------------------------------


def test_a_process_that_is_killed_is_replaced_and_its_tasks_run_again(
    live: TaskQueue, redis_client: redis.Redis, start: Start
) -> None:
    program = start(processes=3, concurrency=2, lease=2.0)
    gated(live, 6)
    until_running(live, redis_client, 6)
    victim = program.pids()[0]
    os.kill(victim, signal.SIGKILL)
    until(lambda: sum(effects(redis_client).values()) >= 8, "its two have begun again")
    assert victim not in program.pids()
    assert len(program.pids()) == 3
    open_gate(redis_client)
    until(lambda: finished(live) == 6, "all have run")
    program.end()
    assert len(effects(redis_client)) == 6
    assert counter(live, "expired") >= 2
    assert {name: len(ids) for name, ids in places(redis_client).items()} == {"finished": 6}


def test_a_process_is_replaced_after_so_many_tasks_and_each_runs_once(
    live: TaskQueue, redis_client: redis.Redis, start: Start
) -> None:
    program = start(processes=2, concurrency=3, max_tasks=10)
    fill(live, "alice", 60)
    fill(live, "bob", 60)
    until(lambda: finished(live) == 120, "all have run")
    tasks = [f"{user}-{n}" for user in ("alice", "bob") for n in range(60)]
    ran_in = Counter(info_of(live, task).result for task in tasks)
    assert max(ran_in.values()) == 10
    assert program.ask("worker._group.restarts") >= 10
    program.end()
    assert effects(redis_client) == dict.fromkeys(tasks, 1)
    # None was claimed for nothing: a process that is to end claims no more than it will run.
    assert (counter(live, "claimed"), counter(live, "released")) == (120, 0)


def test_tasks_that_are_given_back_do_not_wear_a_process_out(
    live: TaskQueue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairqueue.worker.pool, "UNBEGUN_S", 0.01)
    ended, gate = threading.Event(), threading.Event()
    worker = Worker(live, lambda task: task.payload and gate.wait(60), concurrency=1)
    worker._start_pool(3, ended.set)
    try:
        push(live, "quick")
        until(lambda: finished(live) == 1, "it knows that tasks are quick")
        push(live, "long", "waits", "beyond", payload={"long": True})
        until(lambda: counter(live, "released") == 1, "one waits for a slot for too long")
        gate.set()
        assert ended.wait(60)
        assert finished(live) == 3
        assert places(redis_client)["ready"] == ["beyond"]
        assert worker.stop()
    finally:
        gate.set()
        worker.stop(0)


def test_one_that_is_worn_out_does_not_wait_for_ever_for_a_run_that_hangs(
    live: TaskQueue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairqueue.worker.pool, "WORN_OUT_S", 0.05)
    monkeypatch.setattr(fairqueue.worker.pool, "LONGEST_WAIT_S", 0.05)
    ended, gate = threading.Event(), threading.Event()
    worker = Worker(live, lambda task: task.payload and gate.wait(60), concurrency=2)
    worker._start_pool(2, ended.set)
    try:
        push(live, "hangs", payload={"long": True})
        push(live, "quick")
        assert ended.wait(60)
        assert worker.stop() is False
        assert places(redis_client) == {"finished": ["quick"], "ready": ["hangs"]}
    finally:
        gate.set()


@needs_proc
def test_a_large_process_ends_its_task_and_is_replaced(live: TaskQueue, start: Start) -> None:
    code = """
    fairqueue.worker.worker.MEMORY_CHECK_S = 0.05
    kept = []

    def eat(payload):
        kept.append(b"x" * 2**28)
        pause.wait(0.3)  # so that it is seen while it runs
        return os.getpid()

    worker = make()
    worker.register("hungry", eat)
    """
    program = start(code, processes=1, max_memory=2**28)
    (hungry,) = program.pids()
    push(live, "t1", name="hungry")
    until(lambda: program.ask("worker._group.restarts") == 1, "it is replaced")
    assert (info_of(live, "t1").state, info_of(live, "t1").result) == ("finished", hungry)
    push(live, "t2")
    until(lambda: finished(live) == 2, "the new one runs")
    assert info_of(live, "t2").result == program.pids()[0] != hungry
    program.end()


def test_the_last_alerts_of_a_process_are_sent_before_it_ends(
    live: TaskQueue, redis_client: redis.Redis, start: Start
) -> None:
    code = """
    def refuses(payload):
        raise ValueError("no such customer")

    def tell(alert):
        pause.wait(0.2)
        client.rpush("side:told", alert.kind)

    worker = make(alerts=Alerts([CallableRecipient(tell)]))
    worker.register("bad", refuses, retries=0)
    """
    program = start(code, processes=1, max_tasks=1)
    push(live, "t", name="bad")
    until(lambda: program.ask("worker._group.restarts") == 1, "it is replaced")
    assert redis_client.lrange("side:told", 0, -1) == [b"task_failed"]
    program.end()


# --- stopped --------------------------------------------------------------------------------------


def test_stop_waits_for_what_runs(live: TaskQueue, redis_client: redis.Redis, start: Start) -> None:
    program = start(processes=2, concurrency=2)
    gated(live, 4)
    until_running(live, redis_client, 4)
    push(live, "later")
    # The gate opens when all processes know that they are to stop.
    assert program.ask("threading.Thread(target=open_gate_when_stopping).start()") is None
    assert program.ask("worker.stop(60)") is True
    assert places(redis_client) == {"finished": ["g0", "g1", "g2", "g3"], "ready": ["later"]}
    assert alive(live) == []


def test_late_runs_are_given_back(live: TaskQueue, redis_client: redis.Redis, start: Start) -> None:
    program = start(processes=2, concurrency=2, lease=3600)
    tasks = gated(live, 4)
    until_running(live, redis_client, 4)
    assert program.ask("worker.stop(0.1)") is False
    assert places(redis_client) == {"ready": tasks}
    assert {info_of(live, task).attempts for task in tasks} == {0}
    assert alive(live) == []
    assert program.pids() == []


def test_one_that_is_replaced_hears_of_a_stop_with_less_time(
    live: TaskQueue, redis_client: redis.Redis, start: Start
) -> None:
    program = start(processes=1, concurrency=2, lease=3600)
    tasks = gated(live, 2)
    until_running(live, redis_client, 2)
    os.kill(program.pids()[0], signal.SIGTERM)  # it has half a minute to finish
    assert program.ask("worker.stop(0.1)") is False
    assert places(redis_client) == {"ready": tasks}


def test_when_the_parent_is_killed_the_processes_finish_what_they_run_and_end(
    live: TaskQueue, redis_client: redis.Redis, start: Start
) -> None:
    program = start(processes=2, concurrency=2)
    tasks = gated(live, 4)
    until_running(live, redis_client, 4)
    program.process.kill()
    open_gate(redis_client)
    assert program.process.stdout is not None
    assert program.process.stdout.read() == ""  # it ends with the last process that has it
    assert places(redis_client) == {"finished": tasks}
    assert alive(live) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("processes", [None, 2])
def test_forever_ends_on_a_signal_when_what_runs_has_ended(
    live: TaskQueue,
    redis_client: redis.Redis,
    start: Start,
    processes: int | None,
    number: signal.Signals,
) -> None:
    then = """
    worker = make()
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    first = worker.start

    def start_and_watch():  # not before the processes are there: they are copies of this one
        first()
        threading.Thread(target=open_gate_when_stopping, daemon=True).start()

    worker.start = start_and_watch
    in_time = worker.forever(60)
    same = handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    print(json.dumps([in_time, same]), flush=True)
    """
    settings = {} if processes is None else {"processes": processes}
    program = start(then=then, concurrency=2, **settings)
    gated(live, 2)
    until_running(live, redis_client, 2)
    program.process.send_signal(number)
    assert program.hear() == [True, True]
    assert program.process.wait(30) == 0
    assert places(redis_client) == {"finished": ["g0", "g1"]}
    assert alive(live) == []


def test_forever_gives_back_what_does_not_end_in_time(
    live: TaskQueue, redis_client: redis.Redis, start: Start
) -> None:
    then = "print(json.dumps(make().forever(0.1)), flush=True)"
    program = start(then=then, concurrency=2)
    tasks = gated(live, 2)
    until_running(live, redis_client, 2)
    program.process.send_signal(signal.SIGTERM)
    assert program.hear() is False
    assert places(redis_client) == {"ready": tasks}
    program.process.wait(30)


def test_forever_ends_when_another_thread_has_stopped_it_and_not_before(live: TaskQueue) -> None:
    begun, gate = threading.Event(), threading.Event()
    worker = Worker(live, concurrency=1)

    @worker.task("default")
    def stays(payload: dict[str, Any], context: TaskContext) -> None:
        begun.set()
        assert gate.wait(60)

    def stop() -> bool:
        assert begun.wait(60)
        pool = worker._pool
        assert pool is not None
        opened = in_thread(lambda: open_when(lambda: pool._stopping))
        stopped = worker.stop(60)
        opened()
        return stopped

    def open_when(predicate: Callable[[], bool]) -> None:
        until(predicate, "it stops")
        gate.set()

    push(live, "t")
    stopped = in_thread(stop)
    try:
        assert worker.forever(60) is True
        assert info_of(live, "t").state == "finished"
        assert stopped() is True
    finally:
        gate.set()
        worker.stop(0)


@pytest.mark.parametrize("processes", [None, 1])
def test_forever_heeds_a_signal_that_comes_as_soon_as_it_has_started(
    live: TaskQueue, start: Start, processes: int | None
) -> None:
    then = """
    started = lambda: os.kill(os.getpid(), signal.SIGTERM)
    print(json.dumps(make().forever(60, started=started)), flush=True)
    """
    program = start(then=then, **({} if processes is None else {"processes": processes}))
    assert program.hear() is True
    assert program.process.wait(30) == 0
    assert alive(live) == []


def test_forever_stops_when_what_it_calls_at_the_start_fails(live: TaskQueue) -> None:
    worker = Worker(live)
    with pytest.raises(LookupError):
        worker.forever(60, started=[].pop)
    assert worker.state == "stopped"
    assert alive(live) == []


def test_forever_is_for_the_main_thread(live: TaskQueue) -> None:
    with pytest.raises(ConfigurationError, match="main thread"):
        in_thread(Worker(live).forever)()
    assert alive(live) == []


@pytest.mark.parametrize("timeout", [-1, "long", float("nan")])
def test_forever_with_a_time_that_is_none_starts_nothing(live: TaskQueue, timeout: Any) -> None:
    worker = Worker(live)
    with pytest.raises(ConfigurationError, match="timeout"):
        worker.forever(timeout)
    assert worker._pool is None


# --- killed and frozen ----------------------------------------------------------------------------


BATCHES = """
def run(payloads, contexts):
    for context in contexts:
        client.hincrby("side:effects", context.task_id, 1)
    pause.wait(max(each.get("seconds", 0) for each in payloads))
    return [os.getpid()] * len(payloads)

def make(**more):
    worker = Worker(queue, **settings, **more)
    worker.register("default", run, batch=10, batch_wait=0.01, batch_by="user")
    return worker
"""


@pytest.mark.parametrize(("code", "kills"), [("", 25), (BATCHES, 10)], ids=["tasks", "batches"])
def test_when_workers_are_killed_again_and_again_no_task_is_lost_or_ended_twice(
    live: TaskQueue, redis_client: redis.Redis, start: Start, code: str, kills: int
) -> None:
    portion = 120
    chance = random.Random(SEED)
    quick_restarts = "fairqueue.runtime.processes.LONGEST_BACKOFF_S = 0.1\n"
    program = start(code + quick_restarts, processes=4, concurrency=4, lease=1.0)
    killed: set[int] = set()

    def living() -> list[int]:
        return [pid for pid in program.pids() if pid not in killed]

    for n in range(kills):
        fill(live, f"user{n}", portion, payload={"seconds": chance.choice([0, 0.002, 0.01])})
        done = finished(live)
        until(lambda done=done: finished(live) > done, "they are at work")  # type: ignore[misc]
        until(living, "there is one to kill")
        victim = chance.choice(living())
        os.kill(victim, signal.SIGKILL)
        killed.add(victim)
    total = kills * portion
    until(lambda: finished(live) >= total, f"all are finished (seed {SEED})")
    program.end()
    assert len(killed) == kills
    counted = effects(redis_client)
    found = places(redis_client)
    assert {name: len(ids) for name, ids in found.items()} == {"finished": total}
    assert sorted(counted) == found["finished"]  # each ran at least once
    assert finished(live) == total  # and ended once
    assert counter(live, "expired") > 0
    # More than once only those whose lease ended with their worker.
    assert sum(counted.values()) - total <= counter(live, "expired")
    listed = Counter(run.task_id for run in all_runs(live))
    assert listed == dict.fromkeys(found["finished"], 1)


def all_runs(queue: TaskQueue) -> Iterator[Any]:
    history, cursor = History(queue), None
    while True:
        page = history.runs("succeeded", limit=1000, cursor=cursor)
        yield from page
        cursor = page.cursor
        if cursor is None:
            return


def test_a_worker_that_was_frozen_for_longer_than_its_lease_ends_nothing_and_knows_it(
    live: TaskQueue, redis_client: redis.Redis, start: Start
) -> None:
    code = """
    def looks(task):
        client.hincrby("side:effects", task.task_id, 1)
        while not task.lease_lost and task.payload:
            pause.wait(0.01)
        client.rpush("side:seen", json.dumps([task.lease_lost, task.cancelled]))
        return "frozen"

    def lost_leases():
        labels = {"queue": "default", "task": "default", "outcome": "lost_lease"}
        return REGISTRY.get_sample_value("fairqueue_worker_runs_total", labels)

    worker = Worker(queue, looks, **settings)
    """
    program = start(code, lease=1.0, worker_id="frozen")
    push(live, "t", payload={"long": True})
    until_running(live, redis_client, 1)
    os.kill(program.process.pid, signal.SIGSTOP)
    other = Worker(live, lambda task: "other", worker_id="other")
    until(other.run_once, "another worker gets it")
    assert counter(live, "lost_leases") == 0
    os.kill(program.process.pid, signal.SIGCONT)
    until(lambda: redis_client.exists("side:seen"), "its handler sees it, and ends")
    assert redis_client.lrange("side:seen", 0, -1) == [b"[true, true]"]
    until(lambda: program.ask("lost_leases()") == 1, "its finish is refused")
    other.stop()
    push(live, "next")
    until(lambda: finished(live) == 2, "it goes on with others")
    assert info_of(live, "next").result == "frozen"
    program.end()
    found = info_of(live, "t")
    assert (found.state, found.result, found.worker_id) == ("finished", "other", "other")
    assert (found.attempts, effects(redis_client)["t"]) == (2, 1)
    assert Counter(run.task_id for run in all_runs(live)) == {"t": 1, "next": 1}


def test_slots_of_killed_workers_come_back_and_are_never_taken_twice(
    live: TaskQueue, redis_client: redis.Redis, start: Start
) -> None:
    code = """
    fairqueue.runtime.processes.LONGEST_BACKOFF_S = 0.1

    def limited(payload, context):
        me = f"{os.getpid()}:{context.task_id}"
        client.sadd("side:running", me)
        dead = client.smembers("side:killed")
        running = client.smembers("side:running")
        client.rpush("side:at_once", sum(r.split(b":")[0] not in dead for r in running))
        wait_for_gate()
        client.srem("side:running", me)

    worker = make()
    worker.register("limited", limited, slots=2)
    """
    program = start(code, processes=3, concurrency=2, lease=3.0)
    killed: set[int] = set()

    def holders() -> set[int]:
        running = cast(set[bytes], redis_client.smembers("side:running"))
        return {int(each.split(b":")[0]) for each in running} - killed

    def held() -> int:
        running = cast(set[bytes], redis_client.smembers("side:running"))
        return sum(int(each.split(b":")[0]) not in killed for each in running)

    push(live, *(f"t{n}" for n in range(12)), name="limited")
    for _ in range(2):
        until(lambda: held() == 2, "both slots are taken")
        victims = holders()
        killed |= victims
        redis_client.sadd("side:killed", *victims)  # before: those that come later count without
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
    until(lambda: held() == 2, "both slots are taken again")
    open_gate(redis_client)
    until(lambda: finished(live) == 12, "all have run")
    program.end()
    at_once = [int(n) for n in cast(list[bytes], redis_client.lrange("side:at_once", 0, -1))]
    assert max(at_once) == 2
    assert live.get_limits()["limited"].slots == 2


# --- memory ---------------------------------------------------------------------------------------

MEMORY = """
from fairqueue.models import Task

first, total, portion = 20_000, 100_000, 1000
page = os.sysconf("SC_PAGE_SIZE")

def memory():
    return int(open("/proc/self/statm").read().split()[1]) * page

def finished():
    return queue.inspect().counters.get("finished", 0)

worker = Worker(queue, lambda task: None, **settings)
worker.start()
sizes = {}
for n in range(0, total, portion):
    while n - finished() > 2 * portion:
        pause.wait(0.005)
    queue.push_many(Task.create(user_id=f"u{i % 7}") for i in range(n, n + portion))
    if n + portion in (first, total):
        while finished() < n + portion:
            pause.wait(0.005)
        sizes[n + portion] = memory()
print(json.dumps([worker.stop(60), sizes[total] - sizes[first]]), flush=True)
"""


@needs_proc
@pytest.mark.timeout(600)  # some 20 s where nobody else works
def test_a_worker_leaks_no_memory(redis_url: str, redis_client: redis.Redis, spawn: Spawn) -> None:
    program = Program(spawn(PROLOGUE + MEMORY, redis_url, "{}"))
    stopped, growth = program.hear()
    assert stopped is True
    assert growth < 10_000_000  # 125 bytes for each of 80,000 tasks
    program.process.wait(30)


def test_a_process_that_has_lost_a_thread_is_replaced_as_one_that_has_crashed(
    live: TaskQueue, redis_client: redis.Redis, start: Start
) -> None:
    code = """
    first = fairqueue.worker.pool.ThreadPool._run_tasks

    def run_tasks(pool):
        if client.incr("side:slots") > 1:  # the first of all ends at once
            first(pool)

    fairqueue.worker.pool.ThreadPool._run_tasks = run_tasks
    """
    program = start(code, processes=1, concurrency=1)
    push(live, "t")
    until(lambda: places(redis_client) == {"finished": ["t"]}, "it is run")
    assert program.ask("worker._group.restarts") == 1
    program.end()
