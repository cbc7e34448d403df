"""Alerts that real workers and schedulers raise, and recipients that cannot hurt them."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.schedules import THURSDAY, add, at
from helpers.tasks import fill, make_task, push
from helpers.waiting import eventually, in_thread
from helpers.workers import Person
from helpers.world import World
from prometheus_client import CollectorRegistry

import fairqueue.alerts.alerts
from fairqueue import Discard, TaskContext, TaskQueue, Worker
from fairqueue.alerts import Alert, AlertLimits, Alerts, CallableRecipient
from fairqueue.errors import ConfigurationError, RedisUnavailable
from fairqueue.queue.workers import WorkerStore
from fairqueue.scheduler.scheduler import TaskScheduler


def refuses(payload: dict[str, Any]) -> None:
    raise ValueError("no such customer")


# --- workers --------------------------------------------------------------------------------------


def test_only_the_last_failure_of_a_task_is_alerted(world: World, person: Person) -> None:
    worker = Worker(world.queue, alerts=person.alerts)
    worker.register("mail", refuses, retries=1, backoff=1, jitter="none")
    world.push("t", name="mail", payload={"secret": "do not tell"})
    worker.run_once()
    assert person.heard() == []
    world.advance(1)
    worker.run_once()
    (alert,) = person.heard()
    assert alert.kind == "task_failed"
    assert alert.summary == "mail failed after 2 attempts: ValueError: no such customer"
    told = {name: alert.details[name] for name in ("task", "name", "user", "attempt")}
    assert told == {"task": "t", "name": "mail", "user": "alice", "attempt": 2}
    assert alert.details["fingerprint"]
    assert "do not tell" not in alert.text()


def test_a_task_that_nobody_knows_is_told_when_it_is_buried(world: World, person: Person) -> None:
    worker = Worker(world.queue, alerts=person.alerts)
    world.push("t", name="unknown")
    for _ in range(6):
        assert worker.run_once() == 1
        world.advance(300)
    (alert,) = person.heard("task_failed")
    assert "no handler for task 'unknown' here" in alert.summary


def test_a_failure_after_the_lease_was_lost_is_not_told(world: World, person: Person) -> None:
    worker = Worker(world.queue, alerts=person.alerts, lease=30)

    @worker.task("default")
    def late(payload: dict[str, Any]) -> None:
        world.advance(31)
        world.queue.finish(world.claim_one(worker="other"))
        raise Discard("too late to say so")

    world.push("t")
    worker.run_once()
    assert person.heard() == []


def test_a_time_out_is_alerted(redis_client: redis.Redis, person: Person) -> None:
    with TaskQueue(redis_client) as queue:
        worker = Worker(queue, alerts=person.alerts)

        @worker.task("slow", timeout=0.05)
        def slow(payload: dict[str, Any]) -> None:
            end = time.monotonic() + 30
            while time.monotonic() < end:
                pass

        push(queue, "t", name="slow")
        worker.run_once()
        (alert,) = person.heard()
    assert (alert.kind, alert.summary) == ("task_timed_out", "slow ran for more than 0.05 s")
    assert (alert.details["task"], alert.details["attempt"]) == ("t", 1)


@pytest.mark.parametrize("by", ["worker", "scheduler"])
def test_a_run_that_does_not_end_is_told_once(world: World, person: Person, by: str) -> None:
    world.patch("fairqueue.worker.heartbeat.BEAT_S", 3600.0)  # it does not report itself
    begun, go_on = threading.Event(), threading.Event()
    contexts: list[TaskContext] = []
    stuck = Worker(world.queue, lease=1000.0, worker_id="stuck")

    @stuck.task("mail", timeout=60)
    def stays(payload: dict[str, Any], context: TaskContext) -> None:
        contexts.append(context)
        begun.set()
        assert go_on.wait(60)

    world.push("t", name="mail")
    ran = in_thread(stuck.run_once)
    try:
        assert begun.wait(20)
        world.advance(900)
        assert contexts[0].heartbeat()
        world.advance(200)
        look: Callable[[], object] = Worker(world.queue, alerts=person.alerts).run_once
        if by == "scheduler":
            look = TaskScheduler(world.queue, alerts=person.alerts).tick
        look()
        world.advance(20)
        look()
        (alert,) = person.heard("stale_run")
    finally:
        go_on.set()
    assert alert.details == {
        "task": "t",
        "name": "mail",
        "user": "alice",
        "worker": "stuck",
        "seconds": 1100.0,
    }
    assert ran() == 1


def test_a_high_error_rate_is_reported(queue: TaskQueue, people: Callable[..., Person]) -> None:
    limits = AlertLimits(error_rate=0.5, error_rate_least_runs=4)
    person = people(limits=limits)
    worker = Worker(queue, alerts=person.alerts)
    worker.register("bad", refuses, retries=5)
    worker.register("good", lambda payload: None)
    push(queue, "g1", "g2", name="good")
    assert worker.run_until_empty() == 2
    push(queue, "b1", name="bad")
    assert worker.run_until_empty() == 1
    assert person.heard() == []
    push(queue, "b2", "b3", name="bad")
    assert worker.run_until_empty() == 2
    (alert,) = person.heard()
    assert (alert.kind, alert.details["value"]) == ("error_rate", 0.5)


def test_a_worker_reports_a_backlog(queue: TaskQueue, people: Callable[..., Person]) -> None:
    person = people(limits=AlertLimits(backlog=3))
    fill(queue, "alice", 3)
    Worker(queue, lambda task: None, concurrency=1, alerts=person.alerts).run_once()
    (alert,) = person.heard()
    assert (alert.kind, alert.details["value"]) == ("backlog", 3)


def is_down(person: Person) -> bool:
    return any(alert.kind == "redis_unreachable" and not alert.resolved for alert in person.told)


def is_back(person: Person) -> bool:
    return any(alert.kind == "redis_unreachable" and alert.resolved for alert in person.told)


@pytest.mark.parametrize(
    ("all_slots_are_busy", "beat_s"),
    [
        pytest.param(False, 3600.0, id="seen when it claims"),
        pytest.param(True, 0.05, id="seen at its heartbeat"),
    ],
)
def test_redis_out_of_reach_is_told_by_a_worker_and_that_it_is_back(
    own_server: OwnServer,
    tmp_path: Path,
    people: Callable[..., Person],
    monkeypatch: pytest.MonkeyPatch,
    all_slots_are_busy: bool,
    beat_s: float,
) -> None:
    monkeypatch.setattr(fairqueue.alerts.alerts, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr("fairqueue.worker.heartbeat.BEAT_S", beat_s)
    monkeypatch.setattr("fairqueue.worker.lease_keeper.BEAT_S", beat_s)
    server = own_server(tmp_path)
    person = people(limits=AlertLimits(redis_unreachable=0.2, quiet=0.001))
    begun, go_on = threading.Event(), threading.Event()
    with TaskQueue.from_url(server.url, timeout=0.3) as queue:
        worker = Worker(queue, concurrency=1, lease=30.0, alerts=person.alerts)

        @worker.task("default")
        def stays(payload: dict[str, Any]) -> None:
            begun.set()
            assert go_on.wait(60)

        try:
            if all_slots_are_busy:
                push(queue, "t")
            worker.start()
            if all_slots_are_busy:
                assert begun.wait(20)
            eventually(lambda: WorkerStore(queue.link).alive(), "it is known")
            server.kill()
            eventually(lambda: is_down(person), "they are told", within=30)
            server.restart()
            eventually(lambda: is_back(person), "they are told that it is back", within=30)
            go_on.set()
            push(queue, "next")
            eventually(
                lambda: queue.inspect().counters.get("finished") == 1 + all_slots_are_busy,
                "it goes on",
                within=40,
            )
        finally:
            go_on.set()
            worker.stop(10)


def test_a_worker_whose_slots_are_busy_does_not_take_its_own_silence_for_an_answer(
    own_server: OwnServer, people: Callable[..., Person], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a heartbeat asks Redis then; that nothing failed in between says nothing."""
    monkeypatch.setattr("fairqueue.worker.heartbeat.BEAT_S", 0.05)
    monkeypatch.setattr("fairqueue.worker.lease_keeper.BEAT_S", 0.05)
    server = own_server()
    person = people(limits=AlertLimits(redis_unreachable=0.2, quiet=0.001))
    begun, go_on = threading.Event(), threading.Event()
    with TaskQueue.from_url(server.url, timeout=0.2) as queue:
        worker = Worker(queue, concurrency=1, lease=30.0, alerts=person.alerts)

        @worker.task("default")
        def stays(payload: dict[str, Any]) -> None:
            begun.set()
            assert go_on.wait(60)

        try:
            push(queue, "t")
            worker.start()
            assert begun.wait(20)
            pool = worker._pool
            assert pool is not None
            server.kill()
            nudging = threading.Event()

            def nudge() -> bool:  # as slots that end do: each nudge is a turn of the dispatcher
                pool._listener.nudge()
                nudging.wait(0.001)
                return is_down(person)

            eventually(nudge, "they are told all the same", within=30)
        finally:
            go_on.set()
            worker.stop(0)


@pytest.mark.parametrize("value", [print, "mail me"])
def test_alerts_that_are_none_are_refused(queue: TaskQueue, value: Any) -> None:
    for make in (Worker, TaskScheduler):
        with pytest.raises(ConfigurationError, match="alerts must be an Alerts"):
            make(queue, alerts=value)


# --- schedulers -----------------------------------------------------------------------------------


def test_schedules_that_fire_no_more_are_told(world: World, person: Person) -> None:
    world.clock.set(THURSDAY)
    scheduler = TaskScheduler(world.queue, alerts=person.alerts)
    for schedule_id in ("fine", "odd cron", "spoilt"):
        add(scheduler, schedule_id)
    world.tamper("odd cron", cron_expr="every now and then")
    world.redis.hset(world.keys["schedules"], "spoilt", "not JSON")
    world.clock.set(at(5, 9))
    scheduler.tick()
    scheduler.tick()
    told = {alert.kind: alert for alert in person.heard()}
    assert len(person.told) == 2
    assert told["schedule_disabled"].details["schedule"] == "odd cron"
    assert told["schedule_broken"].details["schedule"] == "spoilt"
    assert "every now and then" in told["schedule_disabled"].summary
    assert world.queue.size() == 1  # of the one that is fine


def test_a_schedule_without_a_next_moment_is_told_when_it_fires_for_the_last_time(
    world: World, people: Callable[..., Person]
) -> None:
    person = people(limits=AlertLimits(lateness=None))
    world.clock.set(at(1, 0).replace(year=9998, month=12, day=31))
    scheduler = TaskScheduler(world.queue, alerts=person.alerts)
    add(scheduler, "last", cron_expr="0 0 1 1 *")
    world.clock.set(at(1, 0).replace(year=9999, month=1))
    assert scheduler.tick().fired == 1
    (alert,) = person.heard()
    assert (alert.kind, alert.details["schedule"]) == ("schedule_disabled", "last")


def test_a_leader_whose_place_is_taken_is_told(world: World, people: Callable[..., Person]) -> None:
    person = people(limits=AlertLimits(lock_failures=1))
    scheduler = TaskScheduler(world.queue, "one", alerts=person.alerts)
    scheduler.tick()
    world.advance(60)  # beyond its term
    TaskScheduler(world.queue, "two").tick()
    assert not scheduler.tick().is_leader
    (alert,) = person.heard()
    assert alert.kind == "lock_failures"


def test_a_schedule_that_fires_late_is_told(world: World, person: Person) -> None:
    world.clock.set(THURSDAY)
    scheduler = TaskScheduler(world.queue, alerts=person.alerts)
    add(scheduler)
    world.clock.set(at(5, 9, 10))
    scheduler.tick()
    (alert,) = person.heard()
    assert (alert.kind, alert.details["value"]) == ("lateness", 600.0)


def test_redis_out_of_reach_is_told_by_a_scheduler_and_that_it_is_back(
    own_server: OwnServer,
    tmp_path: Path,
    people: Callable[..., Person],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fairqueue.alerts.alerts, "LOOK_AGAIN_S", 0.05)
    server = own_server(tmp_path)
    person = people(limits=AlertLimits(redis_unreachable=0.2, quiet=0.001))
    with TaskQueue.from_url(server.url, timeout=0.3) as queue:
        scheduler = TaskScheduler(queue, alerts=person.alerts)
        scheduler.tick()
        server.kill()

        def ticks() -> bool:
            with pytest.raises(RedisUnavailable):
                scheduler.tick()
            return is_down(person)

        eventually(ticks, "they are told", within=30)
        server.restart()

        def is_well() -> bool:
            scheduler.tick()
            return is_back(person)

        eventually(is_well, "they are told that it is back", within=30)


# --- recipients that fail -------------------------------------------------------------------------


def test_recipients_that_raise_or_hang_do_not_hurt_a_worker(redis_client: redis.Redis) -> None:
    told: list[Alert] = []
    called, go_on = threading.Event(), threading.Event()

    def hangs(alert: Alert) -> None:
        called.set()
        go_on.wait(60)

    def raises(alert: Alert) -> None:
        raise SystemExit("a recipient that wants the world to end")

    alerts = Alerts(
        [CallableRecipient(hangs), CallableRecipient(raises), CallableRecipient(told.append)],
        registry=CollectorRegistry(),
        repeat_after=0,
        per_minute=10_000,
    )
    with TaskQueue(redis_client) as queue:
        worker = Worker(queue, concurrency=4, alerts=alerts)
        worker.register("bad", refuses, retries=0)
        worker.register("good", lambda payload: None)
        try:
            queue.push_many(
                make_task("alice", f"{name}{n}", name=name)
                for n in range(100)
                for name in ("bad", "good")
            )
            worker.start()
            assert called.wait(30)
            eventually(lambda: queue.inspect().dead == 100, "all bad ones", within=60)
            eventually(
                lambda: queue.inspect().counters.get("finished") == 100, "all good ones", within=60
            )
            eventually(
                lambda: sum(alert.kind == "task_failed" for alert in told) == 100,
                "the one that listens hears of each",
                within=60,
            )
            assert not go_on.is_set()
            assert worker.stop(30)
        finally:
            go_on.set()
            worker.stop(0)
            alerts.close()


# --- pools and expiry -----------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["scheduler", "worker"])
def test_a_pool_without_workers_is_told_by_whoever_looks(
    world: World, people: Callable[..., Person], by: str
) -> None:
    now = [1000.0]
    person = people(monotonic=lambda: now[0])
    worker = Worker(world.queue, lambda task: None, alerts=person.alerts, worker_id="cpu")
    heartbeat = worker._core.new_heartbeat()
    scheduler = TaskScheduler(world.queue, alerts=person.alerts)

    def look(*pools: str) -> None:
        """What a leader and a worker do every ten seconds, a minute later."""
        world.advance(61)
        now[0] += 61.0
        if pools:
            world.beat("gpu-1", pools=[*pools])
        if by == "worker":
            heartbeat.beat(())
        else:
            scheduler.tick()

    world.push("render", pool="gpu")
    look()
    assert person.heard() == []
    look("mail")
    (alert,) = person.heard()
    assert (alert.kind, alert.key, alert.details["waiting"]) == ("pool_unserved", "gpu", 1)
    look("mail", "gpu")
    now[0] += 61.0
    assert [(each.key, each.resolved) for each in person.heard()][1:] == [("gpu", True)]


def test_tasks_that_expire_are_told(world: World, people: Callable[..., Person]) -> None:
    person = people(limits=AlertLimits(expired_tasks=3))
    heartbeat = Worker(world.queue, lambda task: None, alerts=person.alerts)._core.new_heartbeat()
    world.push("a", "b", expires=5.0)
    heartbeat.beat(())
    world.advance(10)
    assert world.queue.claim("w") == []
    heartbeat.beat(())
    assert person.heard() == []
    world.push("c", expires=5.0)
    world.advance(10)
    assert world.queue.claim("w") == []
    heartbeat.beat(())
    (alert,) = person.heard()
    assert (alert.kind, alert.details["value"]) == ("expired_tasks", 3)
