"""The thread around the loop: it starts, waits, wakes, survives Redis and forks, and stops."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.waiting import eventually
from prometheus_client import CollectorRegistry

from fairqueue.errors import RedisUnavailable
from fairqueue.link.listener import Waiter
from fairqueue.models import Claim
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler

Make = Callable[..., TaskScheduler]

EVERY_SECOND = "* * * * * *"


@pytest.fixture
def queue(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    with TaskQueue(redis_client) as queue:
        yield queue


@pytest.fixture
def make() -> Iterator[Make]:
    """Make schedulers that are stopped at the end, whatever happens."""
    made: list[TaskScheduler] = []

    def make(queue: TaskQueue, scheduler_id: str | None = None, **settings: Any) -> TaskScheduler:
        settings = {"registry": CollectorRegistry()} | settings
        made.append(TaskScheduler(queue, scheduler_id, **settings))
        return made[-1]

    yield make
    for scheduler in made:
        assert scheduler.stop(20)


def claim(queue: TaskQueue, wait: float = 10.0) -> Claim:
    """The next task, as soon as there is one."""
    claims = queue.claim("w", wait=wait)
    assert claims, f"no task within {wait} s"
    return claims[0]


def scheduler_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("fairqueue-scheduler")]


def is_blocked(client: redis.Redis) -> bool:
    """Whether some connection waits in a BLPOP."""
    return any(row["cmd"] == "blpop" and "b" in row["flags"] for row in client.client_list())


# --- life -----------------------------------------------------------------------------------------


def test_a_thread_starts_runs_and_stops_any_number_of_times(
    queue: TaskQueue, make: Make, redis_client: redis.Redis
) -> None:
    scheduler = make(queue, "one")
    assert scheduler.state == "stopped"
    for _ in range(3):
        scheduler.start()
        assert scheduler.state in ("starting", "running")
        eventually(lambda: scheduler.state == "running", "running")
        eventually(lambda: scheduler.is_leader, "leading")
        health = scheduler.health()
        assert (health.state, health.leader, health.last_error) == ("running", "one", None)
        assert health.up_since is not None
        assert abs(health.up_since - datetime.now(UTC)) < timedelta(minutes=1)
        assert scheduler.stop(10) is True
        assert scheduler.state == "stopped"
        assert not scheduler.is_leader
        assert redis_client.get(queue.keys["leader"]) is None  # resigned
        assert scheduler.health().up_since is None
    assert scheduler_threads() == []


def test_starting_and_stopping_twice_is_the_same_as_once(queue: TaskQueue, make: Make) -> None:
    scheduler = make(queue)
    scheduler.start()
    scheduler.start()
    assert len(scheduler_threads()) == 1
    assert scheduler.stop() is True
    assert scheduler.stop() is True
    assert scheduler_threads() == []


def test_many_threads_may_start_and_stop_it(queue: TaskQueue, make: Make) -> None:
    scheduler = make(queue)
    barrier = threading.Barrier(6)

    def both() -> None:
        barrier.wait(10)
        for _ in range(5):
            scheduler.start()
            scheduler.stop()

    threads = [threading.Thread(target=both) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert scheduler.stop()
    assert scheduler_threads() == []


def test_a_stop_may_come_in_the_middle_of_a_stop(
    queue: TaskQueue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from the handler of a second signal."""
    scheduler = make(queue)
    scheduler.start()
    (thread,) = scheduler_threads()
    join = thread.join
    inner: list[bool] = []

    def interrupted(timeout: float) -> None:
        monkeypatch.setattr(thread, "join", join)
        inner.append(scheduler.stop(30))

    monkeypatch.setattr(thread, "join", interrupted)
    assert scheduler.stop(30)
    assert inner == [True]


def test_a_stop_may_come_in_the_middle_of_a_start(
    queue: TaskQueue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make(queue)
    listener = queue.link.listener

    def interrupted(key: str) -> Waiter:
        assert scheduler.stop(30)
        return listener(key)

    monkeypatch.setattr(queue.link, "listener", interrupted)
    scheduler.start()
    eventually(lambda: scheduler_threads() == [], "it has ended")


def test_a_stop_does_not_wait_for_the_check_interval(queue: TaskQueue, make: Make) -> None:
    leader, follower = make(queue, check_interval=60), make(queue, check_interval=60)
    leader.start()
    eventually(lambda: leader.is_leader, "leading")
    follower.start()
    eventually(lambda: follower.state == "running", "following")
    assert follower.stop(5) is True
    assert leader.stop(5) is True


def test_the_follower_takes_over_from_one_that_stopped(queue: TaskQueue, make: Make) -> None:
    one = make(queue, check_interval=0.05, lock_timeout=2)
    two = make(queue, check_interval=0.05, lock_timeout=2)
    one.start()
    eventually(lambda: one.is_leader, "one leads")
    two.start()
    eventually(lambda: two.state == "running", "two runs")
    assert not two.is_leader
    one.stop()
    eventually(lambda: two.is_leader, "two leads")


def test_an_idle_leader_keeps_its_term_while_it_waits(queue: TaskQueue, make: Make) -> None:
    registry = CollectorRegistry()
    scheduler = make(queue, "one", check_interval=60, lock_timeout=0.3, registry=registry)
    scheduler.start()
    labels = {"queue": "default"}

    def cycles() -> float:
        return registry.get_sample_value("fairqueue_scheduler_cycles_total", labels) or 0

    eventually(lambda: cycles() >= 8, "renewals", within=20)
    assert queue.inspect().epoch == 1


def test_nothing_runs_because_of_an_import() -> None:
    code = """
    import threading
    import fairqueue, fairqueue.scheduler, fairqueue.metrics
    assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)


def test_the_thread_does_not_keep_the_process_alive(redis_url: str) -> None:
    code = f"""
    from fairqueue import TaskQueue, TaskScheduler
    scheduler = TaskScheduler(TaskQueue.from_url({redis_url!r}), check_interval=3600)
    scheduler.start()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)


# --- waking ---------------------------------------------------------------------------------------


def soon(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def test_an_earlier_schedule_wakes_the_waiting_leader(
    queue: TaskQueue, make: Make, redis_url: str, redis_client: redis.Redis
) -> None:
    leader = make(queue, check_interval=60, lock_timeout=600)
    leader.start()
    eventually(lambda: is_blocked(redis_client), "the leader waits")

    with TaskQueue.from_url(redis_url) as elsewhere:
        TaskScheduler(elsewhere, registry=CollectorRegistry()).add_schedule(
            EVERY_SECOND, "alice", schedule_id="s"
        )
        first, second = claim(elsewhere), claim(elsewhere)

    # The second one shows that what was fired itself is waited for, without a wake-up.
    for got in (first, second):
        assert got.task.schedule_id == "s"
    assert first.task.scheduled_for is not None
    assert second.task.scheduled_for is not None
    assert second.task.scheduled_for - first.task.scheduled_for == timedelta(seconds=1)


def test_an_earlier_run_wakes_it(queue: TaskQueue, make: Make, redis_client: redis.Redis) -> None:
    leader = make(queue, check_interval=60, lock_timeout=600)
    leader.add_schedule("@yearly", "alice", schedule_id="s")
    leader.start()
    eventually(lambda: is_blocked(redis_client), "the leader waits")
    moment = soon(0.3).replace(microsecond=0) + timedelta(seconds=1)
    leader.update_schedule("s", next_run=moment)
    assert claim(queue).task.scheduled_for == moment


def test_a_schedule_added_by_another_process_wakes_the_leader(
    queue: TaskQueue, make: Make, redis_url: str, redis_client: redis.Redis
) -> None:
    leader = make(queue, check_interval=60, lock_timeout=600)
    leader.start()
    eventually(lambda: is_blocked(redis_client), "the leader waits")
    code = f"""
    from fairqueue import TaskQueue, TaskScheduler
    with TaskQueue.from_url({redis_url!r}) as queue:
        TaskScheduler(queue).add_schedule("* * * * * *", "alice", schedule_id="s")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)
    assert claim(queue).task.schedule_id == "s"


# --- when Redis is away ---------------------------------------------------------------------------


def test_a_killed_server_is_an_error(own_server: OwnServer, tmp_path: Path, make: Make) -> None:
    server = own_server(tmp_path)
    registry = CollectorRegistry()
    with TaskQueue.from_url(server.url, timeout=0.3) as queue:
        scheduler = make(queue, "one", check_interval=0.1, lock_timeout=1, registry=registry)
        scheduler.add_schedule(EVERY_SECOND, "alice", schedule_id="s")
        scheduler.start()
        first = claim(queue)
        eventually(lambda: scheduler.state == "running", "running")

        server.kill()
        eventually(lambda: scheduler.state == "error", "error")
        assert not scheduler.is_leader
        health = scheduler.health()
        assert (health.state, health.redis_up) == ("error", False)
        assert health.last_error is not None
        errors = registry.get_sample_value(
            "fairqueue_scheduler_errors_total", {"queue": "default", "type": "redis"}
        )
        assert errors is not None
        assert errors >= 1

        server.restart()
        eventually(lambda: scheduler.state == "running", "running again", within=20)
        second = claim(queue)
        assert second.task.task_id != first.task.task_id
        eventually(lambda: scheduler.health().redis_up, "healthy")
        assert scheduler.health().last_error is None


def test_a_thread_waits_for_redis(own_server: OwnServer, tmp_path: Path, make: Make) -> None:
    server = own_server(tmp_path)
    with TaskQueue.from_url(server.url, timeout=0.2) as queue:
        scheduler = make(queue, check_interval=0.1)
        server.kill()
        scheduler.start()
        eventually(lambda: scheduler.state == "error", "error")
        server.restart()
        eventually(lambda: scheduler.state == "running", "running", within=20)


def test_a_broken_wait_is_resumed(queue: TaskQueue, make: Make, redis_client: redis.Redis) -> None:
    scheduler = make(queue, check_interval=60, lock_timeout=600)
    scheduler.start()
    eventually(lambda: is_blocked(redis_client), "the leader waits")
    victims = [row["id"] for row in redis_client.client_list() if row["cmd"] == "blpop"]
    for victim in victims:
        redis_client.client_kill_filter(_id=victim)
    eventually(
        lambda: any(
            row["cmd"] == "blpop" and row["id"] not in victims for row in redis_client.client_list()
        ),
        "another connection waits",
    )
    scheduler.add_schedule(EVERY_SECOND, "alice")
    claim(queue)
    assert scheduler.state == "running"


def test_stop_says_so_when_the_thread_cannot_end_in_time(own_server: OwnServer, make: Make) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url, timeout=1.0) as queue:
        scheduler = make(queue, check_interval=0.05)
        scheduler.start()
        eventually(lambda: scheduler.is_leader, "leading")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert scheduler.stop(0.05) is False
            assert scheduler.state == "stopping"
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert scheduler.stop(10) is True
        assert scheduler.state == "stopped"


def test_a_stop_while_redis_is_away_ends_all_the_same(own_server: OwnServer, make: Make) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url, timeout=0.3) as queue:
        scheduler = make(queue, check_interval=0.05)
        scheduler.start()
        eventually(lambda: scheduler.is_leader, "leading")
        server.kill()
        eventually(lambda: scheduler.state == "error", "error")
        assert scheduler.stop(10) is True


def test_a_paused_server_loses_nothing(own_server: OwnServer, make: Make, tmp_path: Path) -> None:
    server = own_server(tmp_path)
    with TaskQueue.from_url(server.url) as queue, redis.Redis.from_url(server.url) as client:
        scheduler = make(queue, check_interval=0.1)
        scheduler.add_schedule(EVERY_SECOND, "alice", schedule_id="s")
        scheduler.start()
        first = claim(queue)
        client.client_pause(1500)
        moments = [first.task.scheduled_for]
        moments += [claim(queue).task.scheduled_for for _ in range(2)]
        schedule = scheduler.get_schedule("s")
        assert schedule is not None
        assert first.task.scheduled_for is not None
        assert schedule.last_run is not None
        span = (schedule.last_run - first.task.scheduled_for).total_seconds()
        assert len(set(moments)) == 3
        assert schedule.run_count + schedule.missed_count == span + 1


def test_an_error_that_nobody_foresaw_does_not_end_the_thread(
    queue: TaskQueue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    scheduler = make(queue, check_interval=0.05, registry=registry)
    tick = scheduler.tick
    failed: list[int] = []

    def fail_once() -> Any:
        if not failed:
            failed.append(1)
            raise ZeroDivisionError("boom")
        return tick()

    monkeypatch.setattr(scheduler, "tick", fail_once)
    scheduler.start()
    eventually(lambda: scheduler.state == "running", "running")
    labels = {"queue": "default", "type": "internal"}
    assert registry.get_sample_value("fairqueue_scheduler_errors_total", labels) == 1


def test_a_wrong_typed_wake_list_is_an_error_state_until_it_is_gone(
    queue: TaskQueue, make: Make, redis_client: redis.Redis
) -> None:
    redis_client.set(queue.keys["scheduler_wake"], "text")
    scheduler = make(queue, check_interval=0.1)
    scheduler.start()
    eventually(lambda: scheduler.state == "error", "error")
    redis_client.delete(queue.keys["scheduler_wake"])
    eventually(lambda: scheduler.state == "running", "running")


# --- forks ----------------------------------------------------------------------------------------

FORK = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
from fairqueue import TaskQueue, TaskScheduler

queue = TaskQueue.from_url(sys.argv[1])
scheduler = TaskScheduler(queue, "parent", check_interval=0.05, lock_timeout=2)
scheduler.add_schedule("* * * * * *", "alice", schedule_id="s")
scheduler.start()
assert queue.claim("w", wait=10)
token = scheduler._posts[0].leadership.token
with scheduler._tick_lock, scheduler._life_lock:  # as if the thread were in the middle of a tick
    child = os.fork()
if child == 0:
    assert scheduler.state == "stopped", scheduler.state
    assert not scheduler.is_leader
    assert scheduler._posts[0].leadership.token != token
    assert scheduler.tick().is_leader is False  # the parent leads
    assert scheduler.stop() is True
    scheduler.start()
    scheduler.add_schedule("@yearly", "alice", schedule_id="from the child")
    assert scheduler.stop(10) is True
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert scheduler.state == "running"
assert scheduler._posts[0].leadership.token == token  # the child has not resigned for us
assert queue.claim("w", wait=10)
assert queue.inspect().epoch == 1
assert scheduler.get_schedule("from the child")
assert scheduler.stop(10) is True
"""


def test_a_forked_child_has_its_own_scheduler(redis_client: redis.Redis, redis_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, redis_url],
        timeout=60,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_without_redis_nothing_is_started(own_server: OwnServer) -> None:
    server = own_server()
    url = server.url
    server.kill()
    before = time.monotonic()
    with TaskQueue.from_url(url) as queue, pytest.raises(RedisUnavailable):
        TaskScheduler(queue, registry=CollectorRegistry())
    assert time.monotonic() - before < 4
    assert scheduler_threads() == []
