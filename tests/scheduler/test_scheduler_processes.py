"""Schedulers in processes of their own, killed and stopped: no moment is doubled or lost."""

import os
import signal
import subprocess
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
import redis
from helpers.fixtures import Spawn
from helpers.state import check_consistency
from helpers.waiting import eventually
from prometheus_client import CollectorRegistry

from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.scheduler.scheduler import TaskScheduler

pytestmark = pytest.mark.processes

LOCK_TIMEOUT = 0.5
SCHEDULES = 5

# Runs a scheduler until its standard input ends. With "stop itself", it stops itself once, right
# before it sends the first fire; its metrics go to standard output when it ends.
DRIVER = textwrap.dedent(
    f"""
    import signal, sys, threading
    from prometheus_client import CollectorRegistry, generate_latest
    from fairqueue import TaskQueue, TaskScheduler

    url, name, stops_itself = sys.argv[1], sys.argv[2], sys.argv[3] == "stop itself"
    queue = TaskQueue.from_url(url)
    registry = CollectorRegistry()
    scheduler = TaskScheduler(
        queue, name, check_interval=0.1, lock_timeout={LOCK_TIMEOUT}, registry=registry
    )
    command = queue.link.command_of

    def stop_before_fire(call):
        global stops_itself
        if call.script == "fire" and stops_itself:
            stops_itself = False
            # To this thread: one to the process might stop it only after the command is sent.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return command(call)

    queue.link.command_of = stop_before_fire
    scheduler.start()
    print("started", flush=True)
    sys.stdin.read()
    assert scheduler.stop(10)
    print(generate_latest(registry).decode(), flush=True)
    """
)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(spawn: Spawn, redis_url: str) -> Start:
    """Start scheduler processes, which are gone at the end."""

    def start(name: str, mode: str = "") -> "subprocess.Popen[str]":
        return spawn(DRIVER, redis_url, name, mode)

    return start


@pytest.fixture
def queue(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    with TaskQueue(redis_client) as queue:
        queue.configure(keep_finished=0)
        yield queue


@pytest.fixture
def scheduler(queue: TaskQueue) -> TaskScheduler:
    """One that only looks and writes schedules; it never ticks."""
    scheduler = TaskScheduler(queue, "observer", registry=CollectorRegistry())
    scheduler.add_schedules(
        {"cron_expr": "* * * * * *", "user_id": f"u{n}", "schedule_id": f"s{n}"}
        for n in range(SCHEDULES)
    )
    return scheduler


def finish(process: "subprocess.Popen[str]") -> str:
    """Tell a scheduler to end; what it printed."""
    output, _ = process.communicate("", timeout=20)
    assert process.returncode == 0
    return output


def wait_for_start(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"


def is_stopped(process: "subprocess.Popen[str]") -> bool:
    pid, status = os.waitpid(process.pid, os.WNOHANG | os.WUNTRACED)
    return pid == process.pid and os.WIFSTOPPED(status)


def collect(queue: TaskQueue, seen: Counter[str], until: datetime) -> None:
    """Take tasks as they come, until one is of that moment or later."""
    while True:
        claims = queue.claim("w", limit=100, wait=10)
        assert claims, "no task within 10 s"
        seen.update(claim.task.task_id for claim in claims)
        queue.finish_many((claim, None) for claim in claims)
        moments = [claim.task.scheduled_for for claim in claims]
        if any(moment is not None and moment >= until for moment in moments):
            return


def check_exactly_once(
    queue: TaskQueue, scheduler: TaskScheduler, seen: Counter[str], client: redis.Redis
) -> None:
    """Each moment of each schedule was enqueued once, or is counted as missed."""
    while claims := queue.claim("w", limit=100):
        seen.update(claim.task.task_id for claim in claims)
        queue.finish_many((claim, None) for claim in claims)
    assert [name for name, count in seen.items() if count > 1] == []
    for schedule in scheduler.list_schedules():
        fired = [name for name in seen if name.startswith(schedule.schedule_id + ":")]
        assert len(fired) == schedule.run_count
        assert schedule.last_run is not None
        first = schedule.created_at.replace(microsecond=0) + timedelta(seconds=1)
        span = (schedule.last_run - first).total_seconds()
        assert schedule.run_count + schedule.missed_count == span + 1
        assert schedule.next_run == schedule.last_run + timedelta(seconds=1)
    check_consistency(client)


def now() -> datetime:
    return datetime.now(UTC)


def test_when_the_leader_is_killed_the_other_goes_on_and_no_moment_is_doubled_or_lost(
    queue: TaskQueue, scheduler: TaskScheduler, start: Start, redis_client: redis.Redis
) -> None:
    seen: Counter[str] = Counter()
    processes = {name: start(name) for name in ("one", "two")}
    for process in processes.values():
        wait_for_start(process)
    collect(queue, seen, now())
    leader = scheduler.health().leader
    assert leader in processes

    processes[leader].kill()
    eventually(lambda: scheduler.health().leader not in (None, leader), "the other leads")
    collect(queue, seen, now())

    (survivor,) = (process for name, process in processes.items() if name != leader)
    finish(survivor)
    check_exactly_once(queue, scheduler, seen, redis_client)
    assert queue.inspect().epoch == 2


def test_a_leader_stopped_between_reading_and_firing_changes_nothing_when_it_goes_on(
    queue: TaskQueue, scheduler: TaskScheduler, start: Start, redis_client: redis.Redis
) -> None:
    seen: Counter[str] = Counter()
    stopped = start("stopped", "stop itself")
    eventually(lambda: is_stopped(stopped), "it has read and is about to fire")
    assert queue.size() == 0
    other = start("other")
    collect(queue, seen, now())
    assert scheduler.health().leader == "other"

    os.kill(stopped.pid, signal.SIGCONT)
    collect(queue, seen, now() + timedelta(seconds=1))

    assert scheduler.health().leader == "other"
    output = finish(stopped)
    assert 'fairqueue_scheduler_lock_total{outcome="lost",queue="default"} 1.0' in output
    assert 'fairqueue_scheduler_pushes_total{outcome="ok",queue="default"} 0.0' in output
    finish(other)
    check_exactly_once(queue, scheduler, seen, redis_client)
    assert queue.inspect().epoch == 2


def test_a_follower_that_is_killed_is_not_missed(
    queue: TaskQueue, scheduler: TaskScheduler, start: Start, redis_client: redis.Redis
) -> None:
    seen: Counter[str] = Counter()
    leader = start("leader")
    eventually(lambda: scheduler.health().leader == "leader", "it leads")
    follower = start("follower")
    wait_for_start(follower)
    follower.kill()
    collect(queue, seen, now())
    finish(leader)
    check_exactly_once(queue, scheduler, seen, redis_client)
    assert queue.inspect().epoch == 1
    assert scheduler.health().leader is None  # resigned


def test_a_server_killed_under_two_schedulers_loses_no_moment(
    own_server: Callable[..., EmbeddedServer], tmp_path: os.PathLike[str]
) -> None:
    server = own_server(tmp_path)
    with TaskQueue.from_url(server.url) as queue, redis.Redis.from_url(server.url) as client:
        observer = TaskScheduler(queue, registry=CollectorRegistry())
        schedulers = [
            TaskScheduler(
                queue, check_interval=0.1, lock_timeout=LOCK_TIMEOUT, registry=CollectorRegistry()
            )
            for _ in range(2)
        ]
        observer.add_schedule("* * * * * *", "alice", schedule_id="s")
        for scheduler in schedulers:
            scheduler.start()
        seen: Counter[str] = Counter()
        collect(queue, seen, now())
        server.kill()
        server.restart()
        collect(queue, seen, now() + timedelta(seconds=1))
        for scheduler in schedulers:
            assert scheduler.stop(10)
        check_exactly_once(queue, observer, seen, client)
