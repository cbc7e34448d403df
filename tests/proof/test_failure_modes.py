"""Each failure of docs/failure-modes.md: what happens, and what an operator sees of it."""

import logging
import os
import re
import resource
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.commands import Cli, parse
from helpers.fixtures import OwnServer, Spawn
from helpers.network import StallingProxy
from helpers.schedules import THURSDAY, add, at, fire_id, fired_ids, get
from helpers.state import changes, check_consistency, dump, places, state_of
from helpers.tasks import claim_one, info_of, push
from helpers.waiting import eventually, until_blocked
from helpers.world import World
from prometheus_client import CollectorRegistry

import fairqueue.cli.session
import fairqueue.worker.pool
from fairqueue import History, Task, TaskContext, TaskQueue, TaskScheduler, Worker
from fairqueue.alerts import KINDS, Alert, AlertLimits, Alerts, CallableRecipient
from fairqueue.doctor import Doctor, Finding
from fairqueue.errors import InvalidTask, RedisRefused, RedisUnavailable
from fairqueue.http_tasks.http import HttpTasks
from fairqueue.inspection import Inspector
from fairqueue.link.partitions import tolerate_missing
from fairqueue.metrics.collectors import (
    ERROR_TYPES,
    LOCK_OUTCOMES,
    QueueCollector,
    scheduler_metrics,
    worker_metrics,
)
from fairqueue.models import Claim
from fairqueue.queue.workers import GONE_AFTER_S, WorkerStore
from fairqueue.runtime.cluster import EmbeddedCluster
from fairqueue.scheduler.scheduler import SchedulerHealth

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "failure-modes.md"
DAY = 86_400
UNWRITTEN = re.compile("error: (Valkey|Redis) could not write its data to disk")


# --- the page -------------------------------------------------------------------------------------

ROW = re.compile(r"^\| \[([^]]+)\]\(#[^)]*\) \| `(test_\w+)` \|$", re.MULTILINE)
PARTS = ("**Noticed**", "**What happens**", "**What you see**", "**What to do**")


def sections(text: str) -> dict[str, str]:
    """The text under each heading, by heading."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_page_and_the_tests_name_the_same_failures() -> None:
    text = PAGE.read_text()
    rows = ROW.findall(text)
    own = {name for name in vars(sys.modules[__name__]) if name.startswith("test_")}
    of_page = {name for name in own if name.startswith("test_the_page_")}
    assert sorted(name for _, name in rows) == sorted(own - of_page)
    described = {name for name, body in sections(text).items() if all(p in body for p in PARTS)}
    assert {failure for failure, _ in rows} == described


@pytest.mark.untidy
def test_the_page_names_only_metrics_that_there_are(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    registry = CollectorRegistry()
    scheduler_metrics(registry)
    worker_metrics(registry)
    Alerts(registry=registry)
    registry.register(QueueCollector(queue))
    registry.register(QueueCollector(TaskQueue(redis_client, "parts", partitions=2)))
    known = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in registry.collect()
    }
    text = PAGE.read_text()
    named = set(re.findall(r"\bfairqueue_\w+", text))
    assert named
    assert named <= known
    assert set(re.findall(r'type="(\w+)"', text)) <= set(ERROR_TYPES)
    outcomes_of_runs = {"retried", "buried", "lost_lease"}
    assert set(re.findall(r'outcome="(\w+)"', text)) <= {*LOCK_OUTCOMES, *outcomes_of_runs}


def test_the_page_names_only_events_alerts_and_fields_that_there_are() -> None:
    text = PAGE.read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "fairqueue").rglob("*.py"))
    events = set(re.findall(r"log `(\w+)`", text))
    assert events
    assert [event for event in sorted(events) if f'"{event}"' not in sources] == []
    assert set(re.findall(r"alert `(\w+)`", text)) <= set(KINDS)
    health = set(re.findall(r"`health\(\)\.(\w+)`", text))
    assert health
    assert health <= {field.name for field in fields(SchedulerHealth)}


def test_the_page_names_only_commands_that_there_are() -> None:
    commands = set(re.findall(r"`fairqueue ([^`]+)`", PAGE.read_text()))
    assert commands
    for command in commands:
        parse(command.split())


# --- looking --------------------------------------------------------------------------------------

START = THURSDAY


@pytest.fixture
def told() -> list[Alert]:
    """The alerts that `alerts` has sent."""
    return []


@pytest.fixture
def alerts(told: list[Alert]) -> Iterator[Alerts]:
    """Tells `told`; of an outage at once."""
    recipients = [CallableRecipient(told.append, name="told")]
    limits = AlertLimits(redis_unreachable=0.001)
    alerts = Alerts(recipients, limits=limits, registry=CollectorRegistry())
    yield alerts
    alerts.close(10)


def events(caplog: pytest.LogCaptureFixture) -> set[str]:
    """The events that were logged so far."""
    return {record.event for record in caplog.records if hasattr(record, "event")}


def metric(queue: TaskQueue, name: str, **labels: str) -> float:
    """What a scrape of the queue says now."""
    registry = CollectorRegistry()
    registry.register(QueueCollector(queue))
    value = registry.get_sample_value(f"fairqueue_{name}", {"queue": "default"} | labels)
    assert value is not None, name
    return value


def errors_of(registry: CollectorRegistry, kind: str) -> float | None:
    labels = {"queue": "default", "type": kind}
    return registry.get_sample_value("fairqueue_scheduler_errors_total", labels)


def finding(queue: TaskQueue, check: str) -> Finding:
    """What the doctor says about one thing."""
    return next(each for each in Doctor(queue).examine() if each.check == check)


def attention(queue: TaskQueue) -> list[str]:
    """What `fairqueue status` says below its numbers."""
    return [f"{each.level}: {each.text}" for each in Inspector(queue).system.attention()]


def outcomes(queue: TaskQueue, task_id: str) -> list[str]:
    """How the attempts at a task ended."""
    details = History(queue).get(task_id)
    assert details is not None
    return [attempt.outcome for attempt in details.attempts]


def take(queue: TaskQueue) -> Claim:
    """The next task, as soon as there is one."""
    claims = queue.claim("taker", wait=30)
    assert claims, "no task within 30 s"
    return claims[0]


def line(process: Any) -> str:
    """The next line that a process prints."""
    return str(process.stdout.readline()).strip()


# --- schedulers -----------------------------------------------------------------------------------

LEADER = textwrap.dedent(
    """
    import sys
    from fairqueue import TaskQueue, TaskScheduler

    TaskScheduler(TaskQueue.from_url(sys.argv[1]), "doomed", lock_timeout=0.5).start()
    sys.stdin.read()
    """
)


def test_a_scheduler_that_crashes_is_seen_to_be_gone_and_another_takes_over(
    live: TaskQueue, spawn: Spawn, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    standby = TaskScheduler(live, "standby", registry=CollectorRegistry())
    add(standby)
    cli = Cli(redis_url)
    doomed = spawn(LEADER, redis_url)
    eventually(lambda: standby.health().leader == "doomed", "it leads", within=30)
    assert (cli.run("status").code, Inspector(live).system.ready()) == (0, [])

    doomed.kill()

    eventually(lambda: standby.health().leader is None, "its term is over", within=30)
    status = cli.run("status")
    words = "error: no scheduler is running: schedules do not fire. Start one: fairqueue scheduler"
    assert (status.code, words in status.lines) == (6, True)
    assert Inspector(live).system.ready() == ["leader: none"]
    assert finding(live, "leader").level == "problem"
    assert metric(live, "leader_present") == 0

    assert standby.tick().is_leader
    assert "lock_acquired" in events(caplog)
    assert (metric(live, "leader_present"), metric(live, "terms_total")) == (1, 2)
    assert (cli.run("status").code, Inspector(live).system.ready()) == (0, [])


SKEWED = textwrap.dedent(
    """
    import sys, time

    wall = time.time
    time.time = lambda: wall() + float(sys.argv[2])

    from fairqueue import Task, TaskQueue, TaskScheduler
    from fairqueue.doctor import Doctor

    name = f"off by {sys.argv[2]}"
    queue = TaskQueue.from_url(sys.argv[1])
    scheduler = TaskScheduler(queue, name, check_interval=0.1, lock_timeout=0.5)
    scheduler.add_schedule("* * * * * *", name, schedule_id=name)
    queue.push(Task.create(user_id=name, delay=0.2))
    print(next(f.level for f in Doctor(queue).examine(records=False) if f.check == "clock"))
    scheduler.start()
    print("started", flush=True)
    sys.stdin.read()
    """
)


def test_processes_go_by_the_clock_of_redis(live: TaskQueue, spawn: Spawn, redis_url: str) -> None:
    skews = ("3600", "-3600")
    names = {f"off by {skew}" for skew in skews}
    processes = {skew: spawn(SKEWED, redis_url, skew) for skew in skews}
    for process in processes.values():
        assert [line(process), line(process)] == ["warning", "started"]  # the doctor sees it
    observer = TaskScheduler(live, registry=CollectorRegistry())
    seen: list[Claim] = []

    def take_from_each() -> None:
        """Until each user has had a delayed task, and one of its schedule."""
        missing = {(name, is_scheduled) for name in names for is_scheduled in (True, False)}
        while missing:
            seen.append(take(live))
            missing.discard((seen[-1].task.user_id, seen[-1].task.schedule_id is not None))

    take_from_each()
    # Whoever leads is killed: now the other one does, whose clock says another hour.
    leader = str(observer.health().leader)
    processes[leader.removeprefix("off by ")].kill()
    (other,) = names - {leader}
    eventually(lambda: observer.health().leader == other, "the other one leads", within=30)
    taken_over = live.inspect().at
    while seen[-1].task.scheduled_for is None or seen[-1].task.scheduled_for < taken_over:
        seen.append(take(live))
    for process in processes.values():
        process.kill()
        process.wait(10)

    ids = [claim.task.task_id for claim in seen]
    assert len(ids) == len(set(ids))
    for claim in seen:
        info = info_of(live, claim.task.task_id)
        if claim.task.scheduled_for is not None:
            # Not before its moment, and not an hour later.
            late = info.pushed_at - claim.task.scheduled_for
            assert timedelta(0) <= late < timedelta(minutes=20)
        assert info.claimed_at is not None
        assert info.claimed_at - info.pushed_at < timedelta(minutes=20)


# --- Redis ----------------------------------------------------------------------------------------


def test_without_redis_everybody_says_so_and_goes_on_when_it_is_back(
    own_server: OwnServer,
    tmp_path: Path,
    registry: CollectorRegistry,
    alerts: Alerts,
    told: list[Alert],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    server = own_server(tmp_path)
    ran: list[str] = []
    with TaskQueue.from_url(server.url, timeout=0.3) as queue:
        scheduler = TaskScheduler(
            queue, "s", check_interval=0.1, registry=registry, alerts=alerts, lock_timeout=1
        )
        worker = Worker(queue, lambda task: ran.append(task.task_id), registry=CollectorRegistry())
        push(queue, "before", delay=DAY)
        scheduler.start()
        worker.start()
        try:
            eventually(lambda: scheduler.is_leader, "it leads", within=30)
            server.kill()
            eventually(lambda: scheduler.state == "error", "the scheduler has noticed", within=30)
            eventually(lambda: "worker_failed" in events(caplog), "so has the worker", within=30)
            health = scheduler.health()
            assert (health.redis_up, health.is_leader, health.lag) == (False, False, None)
            assert "Redis did not answer" in str(health.last_error)
            labels = {"queue": "default", "scheduler": "s"}
            assert registry.get_sample_value("fairqueue_scheduler_redis_up", labels) == 0
            assert metric(queue, "redis_up") == 0
            assert (errors_of(registry, "redis") or 0) >= 1
            assert "cycle_failed" in events(caplog)
            eventually(lambda: told, "people are told")
            assert {alert.kind for alert in told} == {"redis_unreachable"}
            with pytest.raises(RedisUnavailable):
                push(queue, "meanwhile")
            assert Inspector(queue).system.ready() == ["redis: RedisUnavailable"]
            monkeypatch.setattr(fairqueue.cli.session, "CHECK_S", 0.05)
            assert Cli(server.url).run("status").code == 3

            server.restart()
            eventually(lambda: scheduler.state == "running", "it is back", within=30)
            push(queue, "after")
            assert queue.reschedule("before")
            eventually(lambda: sorted(ran) == ["after", "before"], "all of it runs", within=30)
        finally:
            assert scheduler.stop(20)
            assert worker.stop(20)


@pytest.mark.own_user
def test_a_node_that_is_down_stops_only_its_partitions(
    own_cluster: Callable[..., EmbeddedCluster], caplog: pytest.LogCaptureFixture
) -> None:
    config = {"cluster-require-full-coverage": "no"}
    cluster = own_cluster(primaries=3, fsync="always", config=config)
    with TaskQueue.from_url(cluster.url, partitions=3, timeout=1.0) as queue:
        users = {queue.part_of(f"u{i}", None).keys.partition: f"u{i}" for i in range(40)}
        scheduler = TaskScheduler(queue, registry=CollectorRegistry())
        ran: list[str] = []
        worker = Worker(queue, lambda task: ran.append(task.user_id), registry=CollectorRegistry())
        for user in users.values():
            queue.push(Task.create(user_id=user))
        worker.run_until_empty()
        assert sorted(ran) == sorted(users.values())

        lost = cluster.owner(queue.link.parts[1].keys.slot)
        queue.push(Task.create(user_id=users[1]))
        (held,) = queue.claim("w", limit=1)
        lost.kill()

        with pytest.raises(RedisUnavailable):
            queue.push(Task.create(user_id=users[1]))
        ran.clear()
        for number in (0, 2):
            queue.push(Task.create(user_id=users[number], task_id=f"t{number}"))
        worker.run_until_empty()
        assert sorted(ran) == sorted([users[0], users[2]])
        with caplog.at_level("INFO"):
            scheduler.tick()
        assert "partition_failed" in events(caplog)
        assert [
            row.partition for row in Inspector(queue).partitions.read().partitions if row.error
        ] == [1]
        with tolerate_missing() as missing:
            assert {"t0", "t2"} <= {run.task_id for run in History(queue).runs()}
        assert list(missing.partitions) == [1]

        lost.restart()
        cluster.wait()
        queue.finish(held)
        queue.push(Task.create(user_id=users[1], task_id="t1"))
        ran.clear()
        worker.run_until_empty()
        assert ran == [users[1]]
        scheduler.tick()
        assert scheduler.leads == (0, 1, 2)


def test_a_redis_that_cannot_save_to_disk_takes_no_change_until_it_can(
    own_server: OwnServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = own_server(tmp_path, config={"save": "3600 1000000", "dbfilename": "kept.rdb"})
    registry = CollectorRegistry()
    began, may_end = threading.Event(), threading.Event()

    def handle(task: Task) -> str:
        began.set()
        assert may_end.wait(60)
        return "done"

    with TaskQueue.from_url(server.url) as queue, redis.Redis.from_url(server.url) as client:

        def save() -> bool:
            client.bgsave()
            eventually(lambda: not client.info("persistence")["rdb_bgsave_in_progress"], "saved")
            return bool(client.info("persistence")["rdb_last_bgsave_status"] == "ok")

        scheduler = TaskScheduler(queue, registry=registry)
        worker = Worker(queue, handle, concurrency=1, registry=CollectorRegistry())
        push(queue, "runs")
        worker.start()
        try:
            assert began.wait(30)
            # As good as a full disk: what is saved has no place to go to.
            blocked = tmp_path / "kept.rdb" / "in the way"
            blocked.mkdir(parents=True)
            assert not save()
            before = dump(client)
            for change in (
                lambda: push(queue, "new"),
                lambda: add(scheduler),
                scheduler.tick,
                lambda: queue.claim("w"),
                lambda: queue.configure(max_attempts=3),
            ):
                with pytest.raises(RedisRefused, match="MISCONF"):
                    change()
            may_end.set()
            eventually(lambda: "worker_failed" in events(caplog), "the worker has noticed")
            assert dump(client) == before
            assert errors_of(registry, "redis") == 1
            assert scheduler.health().redis_up
            status = Cli(server.url).run("status")
            assert status.code == 6
            assert any(UNWRITTEN.fullmatch(text) for text in status.lines)
            told = finding(queue, "persistence")
            assert (told.level, "could not write to disk" in told.text) == ("problem", True)

            blocked.rmdir()
            blocked.parent.rmdir()
            assert save()
            eventually(lambda: info_of(queue, "runs").state == "finished", "it is told", within=30)
            assert (info_of(queue, "runs").attempts, info_of(queue, "runs").result) == (1, "done")
            push(queue, "new")
        finally:
            may_end.set()
            assert worker.stop(20)
        check_consistency(client)


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_a_redis_that_cannot_write_its_log_keeps_what_it_has_acknowledged(
    own_server: OwnServer, tmp_path: Path, fsync: str
) -> None:
    server = own_server(tmp_path, fsync=fsync)
    with TaskQueue.from_url(server.url, timeout=0.5) as queue:
        push(queue, "first")
        size = max(file.stat().st_size for file in tmp_path.rglob("*.aof"))
        # A disk on which so much is left; the last write ends in the middle.
        full = (size + 50_000, resource.RLIM_INFINITY)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, full)
        stored = ["first"]

        def fill() -> None:
            while len(stored) < 1000:
                stored.extend(push(queue, f"t{len(stored)}", payload={"x": "y" * 3000}))

        with pytest.raises((RedisUnavailable, RedisRefused)) as failure:
            fill()
        if fsync == "always":  # it ends, since it cannot keep its promise
            assert failure.type is RedisUnavailable
            assert "Can't recover from AOF write error" in server.log_path.read_text()
            server.restart()
        else:
            assert failure.type is RedisRefused
            assert "MISCONF Errors writing to the AOF file" in str(failure.value)
            assert finding(queue, "persistence").level == "problem"
            assert any(UNWRITTEN.fullmatch(text) for text in attention(queue))
            room = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, room)
            eventually(lambda: finding(queue, "persistence").level == "ok", "it writes again")
        assert len(stored) > 5
        push(queue, "last")
        server.kill()
        server.restart()
        with redis.Redis.from_url(server.url) as client:
            kept = places(client)["ready"]
            # One more may be there: it was stored, and its answer was lost.
            assert set(stored) <= set(kept)
            assert len(kept) <= len(stored) + 2
            if fsync == "always":
                assert "last" in kept
            check_consistency(client)


def test_a_full_redis_refuses_pushes_and_lets_drain(own_server: OwnServer, world: World) -> None:
    server = own_server()
    with (
        TaskQueue.from_url(server.url, clock=world.clock) as queue,
        redis.Redis.from_url(server.url) as client,
    ):
        scheduler = TaskScheduler(queue, registry=world.registry)
        add(scheduler)
        push(queue, "a", "b", "c", "d")
        world.clock.set(at(5, 9))
        client.config_set("maxmemory", 1_000_000)
        before = state_of(client)
        with pytest.raises(RedisRefused, match="maxmemory"):
            push(queue, "more")
        with pytest.raises(RedisRefused, match="maxmemory"):
            scheduler.tick()
        # The term is all that has changed, so that others do not take over for nothing.
        changed = {name.partition(".")[0] for name in changes(before, state_of(client))}
        assert changed == {"leader", "epoch", "stats"}
        assert errors_of(world.registry, "push") == 1
        assert finding(queue, "memory").level == "problem"
        assert any("of its maxmemory" in text for text in attention(queue))

        claims = queue.claim("w", limit=4)
        queue.finish(claims[0])
        queue.retry(claims[1], "again")
        queue.release(claims[2])
        queue.bury(claims[3], "no")
        assert History(queue).prune(0) == 2

        client.config_set("maxmemory", 0)
        assert scheduler.tick().fired == 1
        push(queue, "more")
        check_consistency(client)


def test_a_redis_that_comes_back_empty_is_used_from_the_start_and_schedules_are_imported(
    own_server: OwnServer, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = own_server()  # without a folder nothing is kept
    with (
        TaskQueue.from_url(server.url, clock=world.clock) as queue,
        redis.Redis.from_url(server.url) as client,
    ):
        scheduler = TaskScheduler(queue, "s", registry=world.registry)
        add(scheduler)
        exported = scheduler.export_schedules()
        push(queue, "held", "waiting")
        held = claim_one(queue)
        assert scheduler.tick().is_leader
        assert metric(queue, "schedules") == 1

        server.kill()
        server.restart()

        assert queue.finish_many([(held, "done")]) == ["lost_lease"]  # nobody knows of it any more
        report = scheduler.tick()
        assert report.is_leader
        assert {"lock_lost", "lock_acquired"} <= events(caplog)
        lost = {"queue": "default", "outcome": "lost"}
        assert world.registry.get_sample_value("fairqueue_scheduler_lock_total", lost) == 1
        assert (metric(queue, "schedules"), metric(queue, "ready")) == (0, 0)
        assert (metric(queue, "epoch"), metric(queue, "pushed_total")) == (1, 0)

        diff = scheduler.import_schedules(exported, dry_run=False)
        assert diff.added == ["nine"]
        world.clock.set(at(5, 9))
        assert scheduler.tick().fired == 1
        assert fired_ids(client, queue) == [fire_id("nine", at(5, 9))]
        check_consistency(client)


def test_a_scheduler_cut_off_from_redis_gives_way_and_follows_when_it_is_back(
    own_server: OwnServer, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = own_server()
    with (
        StallingProxy(server.socket_path) as network,
        TaskQueue.from_url(server.url) as queue,
        TaskQueue.from_url(network.url, timeout=0.3) as remote,
        redis.Redis.from_url(server.url) as client,
    ):
        far = TaskScheduler(remote, "far", check_interval=0.1, lock_timeout=0.5, registry=registry)
        near = TaskScheduler(
            queue, "near", check_interval=0.1, lock_timeout=0.5, registry=CollectorRegistry()
        )
        add(far, cron_expr="* * * * * *")
        far.start()
        try:
            eventually(lambda: far.is_leader, "the far one leads", within=30)
            network.stall()
            eventually(lambda: far.state == "error", "it has noticed", within=30)
            assert not far.is_leader
            near.start()
            eventually(lambda: near.is_leader, "the near one leads", within=30)
            network.resume()
            eventually(lambda: far.state == "running", "it is back", within=30)
            assert (far.is_leader, near.health().leader) == (False, "near")
            # Whichever it was doing then.
            assert events(caplog) & {"cycle_failed", "wait_failed"}
            labels = {"queue": "default", "outcome": "contended"}
            contended = registry.get_sample_value("fairqueue_scheduler_lock_total", labels)
            assert (contended or 0) >= 1
        finally:
            network.resume()
            assert far.stop(20)
            assert near.stop(20)
        schedule = get(near, "nine")
        assert schedule.run_count == len(dump(client).get("tasks", {}))
        check_consistency(client)


# --- workers --------------------------------------------------------------------------------------


def test_a_worker_cut_off_from_redis_loses_its_lease_and_records_nothing(
    own_server: OwnServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = own_server()
    registry = CollectorRegistry()
    began, knows = threading.Event(), threading.Event()
    with (
        StallingProxy(server.socket_path) as network,
        TaskQueue.from_url(server.url) as queue,
        TaskQueue.from_url(network.url, timeout=0.3) as remote,
        redis.Redis.from_url(server.url) as client,
    ):
        worker = Worker(remote, concurrency=1, lease=0.5, registry=registry)

        @worker.task("t")
        def handle(payload: dict[str, Any], context: TaskContext) -> str:
            began.set()
            eventually(lambda: context.lease_lost, "it is told", within=60)
            knows.set()
            return "by the one that was cut off"

        push(queue, "a", name="t")
        worker.start()
        try:
            assert began.wait(30)
            network.stall()
            claim = take(queue)
            assert (claim.task.task_id, claim.attempt) == ("a", 2)
            queue.finish(claim, "by another")
            eventually(lambda: "extend_failed" in events(caplog), "it has noticed", within=30)
            network.resume()
            assert knows.wait(30)
            labels = {"queue": "default", "task": "t", "outcome": "lost_lease"}
            eventually(
                lambda: registry.get_sample_value("fairqueue_worker_runs_total", labels) == 1,
                "it tried to record its end, and was refused",
                within=30,
            )
        finally:
            network.resume()
            assert worker.stop(20)
        assert info_of(queue, "a").result == "by another"
        assert outcomes(queue, "a") == ["expired", "succeeded"]
        assert {"extend_failed", "lease_lost"} <= events(caplog)
        assert metric(queue, "lost_leases_total") >= 1
        assert metric(queue, "expired_total") == 1
        check_consistency(client)


def test_a_worker_that_crashes_is_missed_and_its_task_is_run_by_another(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.push("a")
    store = WorkerStore(world.queue.link)
    about = {"host": "h", "pid": 7, "version": "1", "slots": 1, "names": ["*"], "started": 0}
    store.beat({**about, "current": ["a"], "running": 1}, "doomed")
    world.claim_one(worker="doomed", lease=30)  # and it is not heard of again
    assert [worker.worker_id for worker in store.alive()] == ["doomed"]

    world.advance(GONE_AFTER_S + 1)
    with_all = Worker(
        world.queue, lambda task: None, worker_id="other", registry=CollectorRegistry()
    )
    assert with_all.run_until_empty() == 1

    assert [worker.worker_id for worker in store.alive()] == ["other"]
    gone = [each for each in caplog.records if getattr(each, "event", "") == "worker_gone"]
    assert [getattr(each, "worker", "") for each in gone] == ["doomed"]
    assert outcomes(world.queue, "a") == ["expired", "succeeded"]
    assert metric(world.queue, "expired_total") == 1
    with_all.stop()


def test_a_task_that_kills_its_worker_is_buried(live: TaskQueue, redis_url: str) -> None:
    live.configure(max_attempts=2)
    worker = Worker(live, processes=1, concurrency=1, lease=0.5, registry=CollectorRegistry())
    worker.register("poison", lambda payload: os.kill(os.getpid(), signal.SIGKILL))
    worker.register("harmless", lambda payload: "done")
    push(live, "p", name="poison")
    worker.start()
    try:
        eventually(lambda: info_of(live, "p").attempts == 2, "it was tried again", within=60)
        push(live, "h", name="harmless")
        eventually(lambda: info_of(live, "p").state == "buried", "it is given up", within=60)
        eventually(lambda: info_of(live, "h").state == "finished", "others run", within=60)
    finally:
        assert worker.stop(30)

    assert outcomes(live, "p") == ["expired", "expired"]
    assert (metric(live, "dead"), metric(live, "buried_total")) == (1, 1)
    failed = Cli(redis_url).json("failed", "list")["runs"]
    assert [run["task_id"] for run in failed] == ["p"]
    assert "expired" in failed[0]["error"]


def test_a_handler_that_cannot_be_ended_holds_one_slot_and_is_seen(
    live: TaskQueue, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    may_end, ran = threading.Event(), threading.Event()
    worker = Worker(live, concurrency=2, lease=0.2, registry=registry)

    @worker.task("slow", timeout=0.1, retries=0)
    def slow(payload: dict[str, Any]) -> None:
        may_end.wait(60)  # in the system: no exception reaches it there

    worker.register("quick", lambda payload: ran.set())
    push(live, "s", name="slow")
    worker.start()
    labels = {"queue": "default", "task": "slow"}

    def stuck() -> float | None:
        return registry.get_sample_value("fairqueue_worker_stuck_runs", labels)

    try:
        eventually(lambda: stuck() == 1, "it is counted", within=30)
        assert {"task_overdue", "task_stuck"} <= events(caplog)
        push(live, "q", name="quick")
        assert ran.wait(30)
        scheduler = TaskScheduler(live, registry=CollectorRegistry())

        def is_stale() -> bool:
            scheduler._posts[0].looked_ms = None  # it looks every ten seconds
            scheduler.tick()
            return metric(live, "stale_runs_total") == 1

        eventually(is_stale, "it is ended", within=30)
        assert info_of(live, "s").state == "buried"
        assert finding(live, "stale runs").text.endswith("such as s")
        assert "stale_run" in events(caplog)
        assert stuck() == 1
        may_end.set()
        eventually(lambda: stuck() == 0, "the slot is free", within=30)
    finally:
        may_end.set()
        assert worker.stop(20)
        scheduler.stop()
    assert outcomes(live, "s") == ["timed_out"]
    assert (metric(live, "timed_out_total"), info_of(live, "s").attempts) == (1, 1)


# --- tasks ----------------------------------------------------------------------------------------


def test_a_target_that_cannot_be_reached_is_tried_again_and_then_a_dead_letter(
    world: World, alerts: Alerts, told: list[Alert]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]  # and nobody listens there from now on
    registry = CollectorRegistry()
    worker = Worker(world.queue, lambda task: None, registry=registry, alerts=alerts)
    http = HttpTasks(allow_private=["127.0.0.1"], allow_http=True)
    http.register(worker, name="http", retries=2, backoff=[60.0, 120.0], jitter="none")
    payload = {"url": f"http://127.0.0.1:{port}/hook"}
    world.push("call", name="http", payload=payload)
    world.push("other", user_id="bob")

    assert worker.run_until_empty() == 2
    info = info_of(world.queue, "call")
    assert (info.state, info.due_at) == ("delayed", world.now() + timedelta(seconds=60))
    assert "127.0.0.1" in str(info.error)
    assert info_of(world.queue, "other").state == "finished"
    world.advance(60)
    assert worker.run_until_empty() == 1
    world.advance(119)
    assert worker.run_until_empty() == 0
    world.advance(1)
    assert worker.run_until_empty() == 1

    assert (info_of(world.queue, "call").state, outcomes(world.queue, "call")) == (
        "buried",
        ["failed"] * 3,
    )
    (group,) = History(world.queue).failure_groups()
    assert group.count == 1
    assert "warning: a run failed lately" in attention(world.queue)
    eventually(lambda: told, "people are told")
    assert [alert.kind for alert in told] == ["task_failed"]
    labels = {"queue": "default", "task": "http", "outcome": "retried"}
    assert registry.get_sample_value("fairqueue_worker_runs_total", labels) == 2
    again = History(world.queue).retry("call")
    assert info_of(world.queue, again).state == "ready"
    worker.stop()


BROKEN = ["not JSON", "{}", "[1]", '{"user_id": 7}', "\udcff"]


def test_a_schedule_whose_record_is_broken_is_set_aside_and_the_others_fire(
    world: World, alerts: Alerts, told: list[Alert], caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    scheduler = TaskScheduler(world.queue, registry=registry, alerts=alerts)
    for n, text in enumerate(BROKEN):
        add(scheduler, f"broken {n}")
        record = text.encode("utf-8", "surrogateescape")
        world.redis.hset(world.keys["schedules"], f"broken {n}", record)
    add(scheduler, "cron")
    world.tamper("cron", cron_expr="61 * * * *")
    add(scheduler, "fine")
    world.clock.set(at(5, 9))

    report = scheduler.tick()

    assert (report.fired, report.set_aside) == (1, len(BROKEN) + 1)
    assert world.fired_ids() == [fire_id("fine", at(5, 9))]
    named = {problem.schedule_id for problem in scheduler.problems()}
    assert named == {"cron", *(f"broken {n}" for n in range(len(BROKEN)))}
    assert errors_of(registry, "deserialization") == len(BROKEN)
    assert errors_of(registry, "cron") == 1
    assert metric(world.queue, "set_aside") == len(BROKEN) + 1
    assert "schedule_set_aside" in events(caplog)
    assert any(
        text.startswith("error: schedule cron cannot run:") for text in attention(world.queue)
    )
    assert finding(world.queue, "schedules").level == "warning"
    eventually(lambda: len(told) == len(BROKEN) + 1, "people are told")
    assert {alert.kind for alert in told} == {"schedule_broken", "schedule_disabled"}

    add(scheduler, "broken 0", on_conflict="replace")  # written anew, it is as good as any
    world.clock.set(at(6, 9))
    assert scheduler.tick().fired == 2


@pytest.mark.untidy  # what is broken stays so until the doctor comes
def test_a_task_whose_record_is_broken_stops_no_other(world: World) -> None:
    world.push("bad document", "bad status", "fine")
    world.redis.hset(world.keys["tasks"], "bad document", "not JSON")
    world.redis.hset(world.keys["status"], "bad status", "not JSON")

    assert [claim.task.task_id for claim in world.queue.claim("w", limit=10)] == ["fine"]

    assert info_of(world.queue, "bad document").state == "buried"
    assert metric(world.queue, "broken_tasks_total") >= 1
    wrong = [
        each for each in Doctor(world.queue).examine(fix=True) if each.check.startswith("records")
    ]
    assert any("bad status" in each.text for each in wrong)


# --- pools, expiry and keys -----------------------------------------------------------------------


def test_tasks_of_a_pool_without_workers_wait_and_that_is_seen(
    world: World, told: list[Alert]
) -> None:
    now = [0.0]
    recipients = [CallableRecipient(told.append, name="told")]
    world.push("a", "b", "c", pool="gpu")
    world.push("d")
    world.beat("cpu")
    world.queue.finish(world.claim_one())
    with Alerts(recipients, registry=CollectorRegistry(), monotonic=lambda: now[0]) as alerts:
        scheduler = TaskScheduler(world.queue, alerts=alerts, registry=CollectorRegistry())
        for _ in range(2):
            scheduler.tick()
            world.advance(61)
            now[0] += 61.0
        scheduler.tick()
        assert alerts.flush(30)
    assert {(alert.kind, alert.key) for alert in told} == {("pool_unserved", "gpu")}
    world.beat("cpu")
    (said,) = (text for text in attention(world.queue) if "pool" in text)
    assert said.startswith("warning: no live worker serves the pool 'gpu': 3 tasks wait. Start one")
    assert "--pool gpu" in said
    assert finding(world.queue, "workers").details["unserved"] == {"gpu": 3}
    assert metric(world.queue, "pool_unserved", pool="gpu") == 1
    assert metric(world.queue, "pool_unserved", pool="default") == 0
    assert metric(world.queue, "pool_waiting", pool="gpu") == 3
    explanation = world.queue.explain("a")
    assert explanation is not None
    assert "gpu" in explanation.summary

    world.beat("gpu", pools=["gpu"])
    assert not any("pool" in text for text in attention(world.queue))
    worker = Worker(world.queue, lambda payload: None, pools=["gpu"])
    assert worker.run_until_empty() == 3
    assert metric(world.queue, "pool_unserved", pool="gpu") == 0


def test_tasks_that_no_worker_starts_in_time_expire_and_are_counted(
    world: World, told: list[Alert]
) -> None:
    alerts = Alerts(
        [CallableRecipient(told.append, name="told")],
        limits=AlertLimits(expired_tasks=1),
        registry=CollectorRegistry(),
    )
    with alerts:
        scheduler = TaskScheduler(world.queue, alerts=alerts, registry=CollectorRegistry())
        scheduler.tick()
        world.push("late", expires=30)
        world.push("other")
        world.advance(31)
        assert world.claim_one().task.task_id == "other"
        scheduler.tick()
        assert alerts.flush(30)
    assert info_of(world.queue, "late").state == "expired"
    assert metric(world.queue, "expired_tasks_total") == 1
    assert (metric(world.queue, "expired_total"), metric(world.queue, "dead")) == (0, 0)
    assert [run.task_id for run in History(world.queue).runs("expired")] == ["late"]
    words = "warning: 1 task expired within the last hour, before a worker started it"
    assert words in attention(world.queue)
    assert [alert.kind for alert in told] == ["expired_tasks"]
    with pytest.raises(InvalidTask):
        History(world.queue).retry("late")


def test_a_key_is_free_again_when_the_lease_of_its_task_ends(world: World) -> None:
    world.queue.set_limit("account:*", slots=1, ordered=True)
    world.push("first", "second", "third", limit_keys=["account:42"])
    world.push("other", limit_keys=["account:7"])
    doomed = world.queue.claim("doomed", limit=9, lease=30)  # and then it is killed
    assert [claim.task.task_id for claim in doomed] == ["first", "other"]
    world.advance(29)
    assert world.queue.claim("w", limit=9) == []
    assert (metric(world.queue, "held"), metric(world.queue, "slots_in_use")) == (2, 2)
    explanation = world.queue.explain("second")
    assert explanation is not None
    assert "account:42" in explanation.summary

    world.advance(2)
    (again, other) = world.queue.claim("w", limit=9, lease=30)
    assert {again.task.task_id, other.task.task_id} == {"first", "other"}
    assert metric(world.queue, "expired_total") == 2
    world.queue.finish(again)
    assert [claim.task.task_id for claim in world.queue.claim("w", limit=9)] == ["second"]
    check_consistency(world.redis)


# --- waking ---------------------------------------------------------------------------------------


def test_a_lost_wake_up_delays_a_worker_and_a_scheduler_and_loses_nothing(
    live: TaskQueue, redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairqueue.worker.pool, "LONGEST_WAIT_S", 0.3)  # it is five seconds
    ran = threading.Event()
    worker = Worker(live, lambda task: ran.set(), registry=CollectorRegistry())
    scheduler = TaskScheduler(
        live, check_interval=0.3, lock_timeout=3600, registry=CollectorRegistry()
    )
    scheduler.add_schedule("@yearly", "alice")  # there is nothing to wake up for by itself
    redis_client.delete(live.keys["scheduler_wake"])
    taken = threading.Semaphore(0)

    def take_token(key: str) -> None:
        """Take the next token of a list, as one does who is killed right after that."""
        with redis.Redis.from_url(redis_url) as client:
            assert client.blpop([live.keys[key]], 30)
        taken.release()

    keys = ("wake", "scheduler_wake")
    doomed = [threading.Thread(target=take_token, args=(key,)) for key in keys]
    for thread in doomed:
        thread.start()
    until_blocked(redis_client, 2)  # first in line, before those who could do something
    worker.start()
    scheduler.start()
    try:
        until_blocked(redis_client, 4)
        push(live, "a")
        assert ran.wait(30)
        ran.clear()
        scheduler.add_schedule("* * * * * *", "bob")
        assert ran.wait(30)
        assert all(taken.acquire(timeout=30) for _ in doomed)
    finally:
        assert scheduler.stop(20)
        assert worker.stop(20)
        for thread in doomed:
            thread.join(30)
