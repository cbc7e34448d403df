"""The metrics as Prometheus sees them: scraped over HTTP, parsed, compared with known events."""

import os
import re
import signal
import socket
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.network import is_closed_after
from helpers.schedules import THURSDAY, at
from helpers.tasks import make_task
from helpers.waiting import eventually
from helpers.world import World
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from fairqueue.alerts import alert_metrics
from fairqueue.errors import ConfigurationError, LeaseLost, QueueFull, RedisUnavailable
from fairqueue.link.scripts import lua_folder
from fairqueue.metrics.collectors import (
    _COUNTERS,
    ERROR_TYPES,
    LOCK_OUTCOMES,
    QueueCollector,
    WorkerMetrics,
    serve_metrics,
)
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.processes import ProcessGroup
from fairqueue.scheduler.scheduler import TaskScheduler

Scrape = dict[str, float]

START = THURSDAY


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain")
        return str(answer.read().decode())


def parse(text: str) -> Scrape:
    """Samples by name and labels, such as `fairqueue_errors_total{type=cron}`, queue left out."""
    samples: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            labels.pop("queue", None)
            shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            samples[sample.name + (f"{{{shown}}}" if shown else "")] = sample.value
    return samples


def scrape(queue: TaskQueue, registry: CollectorRegistry) -> Scrape:
    with serve_metrics(queue, port=0, registry=registry) as server:
        return parse(fetch(server.url))


def counts(samples: Scrape) -> dict[str, float]:
    """What `fairqueue_scheduler_` counters say, without their prefix; zeros left out."""
    start = "fairqueue_scheduler_"
    return {
        name.removeprefix(start): value
        for name, value in samples.items()
        if name.startswith(start) and "_total" in name and value
    }


def add(scheduler: TaskScheduler, schedule_id: str = "nine", **fields: Any) -> str:
    given = {"cron_expr": "0 9 * * *", "user_id": "alice"} | fields
    return scheduler.add_schedule(schedule_id=schedule_id, **given)


# --- the monitoring points ------------------------------------------------------------------------


def test_every_monitoring_point_is_there_before_anything_happens(world: World) -> None:
    TaskScheduler(world.queue, "one", registry=world.registry)
    samples = scrape(world.queue, world.registry)

    wanted = {
        # schedules processed per second; lock acquisition; push success; processing time
        "fairqueue_scheduler_schedules_processed_total",
        *(f"fairqueue_scheduler_lock_total{{outcome={outcome}}}" for outcome in LOCK_OUTCOMES),
        "fairqueue_scheduler_pushes_total{outcome=ok}",
        "fairqueue_scheduler_pushes_total{outcome=failed}",
        "fairqueue_scheduler_cycle_seconds_sum",
        "fairqueue_scheduler_cycle_seconds_count",
        # errors by type: redis, lock time-out, deserialization, push, cron
        *(f"fairqueue_scheduler_errors_total{{type={kind}}}" for kind in ERROR_TYPES),
        # uptime; last successful cycle; Redis; lock
        "fairqueue_scheduler_start_timestamp_seconds{scheduler=one}",
        "fairqueue_scheduler_last_successful_cycle_timestamp_seconds{scheduler=one}",
        "fairqueue_scheduler_redis_up{scheduler=one}",
        "fairqueue_scheduler_is_leader{scheduler=one}",
        # delays
        "fairqueue_scheduler_fire_lateness_seconds_sum",
        "fairqueue_scheduler_missed_moments_total",
        "fairqueue_overdue_seconds",
        "fairqueue_redis_up",
        "fairqueue_leader_present",
    }
    assert wanted <= samples.keys()
    assert {"redis", "lock_timeout", "deserialization", "push", "cron"} <= set(ERROR_TYPES)
    assert counts(samples) == {}


@pytest.mark.one_partition
def test_known_events_have_known_values(world: World) -> None:
    began = time.time()
    scheduler = TaskScheduler(world.queue, "one", registry=world.registry)
    world.queue.set_user("full", max_waiting=1)
    world.queue.push(make_task("full"))
    add(scheduler, "hourly", cron_expr="0 * * * *")
    add(scheduler, "refused", user_id="full")
    add(scheduler, "unreadable")
    add(scheduler, "bad cron")
    add(scheduler, "later", cron_expr="0 9 1 1 *")
    world.redis.hset(world.keys["schedules"], "unreadable", "{")
    world.tamper("bad cron", cron_expr="x")
    world.clock.set(at(5, 11, 0, 2))

    before = scrape(world.queue, world.registry)
    assert before["fairqueue_overdue_seconds"] == 7202
    assert before["fairqueue_leader_present"] == 0
    scheduler.tick()

    samples = scrape(world.queue, world.registry)
    assert counts(samples) == {
        "cycles_total": 1,
        "schedules_processed_total": 4,
        "lock_total{outcome=acquired}": 1,
        "pushes_total{outcome=ok}": 1,
        "pushes_total{outcome=failed}": 1,
        "missed_moments_total": 2,
        "errors_total{type=push}": 1,
        "errors_total{type=deserialization}": 1,
        "errors_total{type=cron}": 1,
    }
    assert samples["fairqueue_scheduler_fire_lateness_seconds_count"] == 1
    assert samples["fairqueue_scheduler_fire_lateness_seconds_sum"] == 2
    assert samples["fairqueue_scheduler_cycle_seconds_count"] == 1
    assert samples["fairqueue_scheduler_is_leader{scheduler=one}"] == 1
    assert samples["fairqueue_scheduler_redis_up{scheduler=one}"] == 1
    last = samples["fairqueue_scheduler_last_successful_cycle_timestamp_seconds{scheduler=one}"]
    assert began <= last <= time.time()
    assert {name: samples[f"fairqueue_{name}"] for name in (
        "fired_total", "missed_total", "refused_total", "terms_total", "set_aside_broken_total",
        "set_aside_cron_total", "schedules", "active_schedules", "set_aside", "ready", "epoch",
        "leader_present", "redis_up", "overdue_seconds",
    )} == {
        "fired_total": 1,
        "missed_total": 2,
        "refused_total": 1,
        "terms_total": 1,
        "set_aside_broken_total": 1,
        "set_aside_cron_total": 1,
        "schedules": 5,
        "active_schedules": 3,
        "set_aside": 2,
        "ready": 2,
        "epoch": 1,
        "leader_present": 1,
        "redis_up": 1,
        "overdue_seconds": 0,
    }  # fmt: skip


@pytest.mark.one_partition
def test_the_lock_is_counted_as_acquired_contended_and_lost(world: World) -> None:
    one = TaskScheduler(world.queue, "one", registry=world.registry)
    others = CollectorRegistry()
    two = TaskScheduler(world.queue, "two", registry=others)
    one.tick()
    two.tick()
    two.tick()
    world.advance(10)
    two.tick()
    one.tick()

    assert counts(scrape(world.queue, world.registry)) == {
        "cycles_total": 2,
        "lock_total{outcome=acquired}": 1,
        "lock_total{outcome=contended}": 1,
        "lock_total{outcome=lost}": 1,
    }
    samples = scrape(world.queue, others)
    assert counts(samples) == {
        "cycles_total": 3,
        "lock_total{outcome=contended}": 2,
        "lock_total{outcome=acquired}": 1,
    }
    assert samples["fairqueue_scheduler_is_leader{scheduler=two}"] == 1
    assert samples["fairqueue_terms_total"] == 2


def test_a_refused_stale_fire_is_a_lost_lock(world: World) -> None:
    scheduler = TaskScheduler(world.queue, "one", registry=world.registry)
    add(scheduler)
    world.clock.set(at(5, 9))
    world.before_script("fire", lambda: world.advance(10))
    scheduler.tick()
    found = counts(scrape(world.queue, world.registry))
    assert found["lock_total{outcome=lost}"] == 1
    assert "pushes_total{outcome=ok}" not in found


def test_a_server_that_does_not_answer_in_time_is_a_lock_timeout(
    own_server: OwnServer, registry: CollectorRegistry
) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url, timeout=0.2) as queue:
        scheduler = TaskScheduler(queue, "one", registry=registry)
        scheduler.tick()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(RedisUnavailable):
                scheduler.tick()
        finally:
            os.kill(server.pid, signal.SIGCONT)
        samples = scrape(queue, registry)
        found = counts(samples)
        assert found["errors_total{type=lock_timeout}"] == 1
        assert found["errors_total{type=redis}"] == 1
        assert samples["fairqueue_scheduler_redis_up{scheduler=one}"] == 0
        assert samples["fairqueue_scheduler_is_leader{scheduler=one}"] == 0


def test_redis_errors_are_counted_and_the_scrape_is_still_answered(
    own_server: OwnServer, registry: CollectorRegistry
) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url, timeout=0.2) as queue:
        scheduler = TaskScheduler(queue, "one", registry=registry)
        scheduler.tick()
        with serve_metrics(queue, port=0, registry=registry) as metrics:
            assert parse(fetch(metrics.url))["fairqueue_redis_up"] == 1
            server.kill()
            for _ in range(2):
                with pytest.raises(RedisUnavailable):
                    scheduler.tick()

            samples = parse(fetch(metrics.url))
            assert samples["fairqueue_redis_up"] == 0
            assert "fairqueue_ready" not in samples
            assert counts(samples)["errors_total{type=redis}"] == 2
            assert samples["fairqueue_scheduler_redis_up{scheduler=one}"] == 0

            server.restart()
            scheduler.tick()
            samples = parse(fetch(metrics.url))
            assert samples["fairqueue_redis_up"] == 1
            assert samples["fairqueue_scheduler_redis_up{scheduler=one}"] == 1


def test_the_uptime_is_there_while_the_thread_is(
    redis_client: redis.Redis, registry: CollectorRegistry
) -> None:
    with TaskQueue(redis_client) as queue:
        scheduler = TaskScheduler(queue, "one", registry=registry)
        name = "fairqueue_scheduler_start_timestamp_seconds{scheduler=one}"
        assert scrape(queue, registry)[name] == 0
        began = time.time()
        scheduler.start()
        assert began <= scrape(queue, registry)[name] <= time.time()
        assert scheduler.stop()
        assert scrape(queue, registry)[name] == 0


# --- the queue's counters -------------------------------------------------------------------------


@pytest.mark.one_partition
def test_counters_add_up_over_objects_and_outlive_them(world: World) -> None:
    for n in range(2):
        with TaskQueue(world.redis, clock=world.clock) as queue:
            scheduler = TaskScheduler(queue, registry=CollectorRegistry())
            add(scheduler, f"s{n}", cron_expr="* * * * *")
            world.advance(60)
            scheduler.tick()
            queue.push(make_task("bob", f"task{n}"))
            queue.finish(queue.claim("w")[0])

    with TaskQueue(world.redis, clock=world.clock) as queue:
        samples = scrape(queue, world.registry)
    # s0 at the first minute, s0 and s1 at the second; the second scheduler waited for the term
    assert samples["fairqueue_fired_total"] == 3
    assert samples["fairqueue_claimed_total"] == 2
    assert samples["fairqueue_finished_total"] == 2
    assert samples["fairqueue_terms_total"] == 2


def test_the_life_of_tasks_is_counted(world: World) -> None:
    world.queue.set_user("full", max_waiting=1)
    world.queue.push_many(make_task("alice", name) for name in ("a", "b", "c", "d", "e"))
    world.queue.push(make_task("alice", "a"))
    world.queue.push(make_task("full"))
    with pytest.raises(QueueFull):
        world.queue.push(make_task("full"))
    world.queue.push(make_task("alice", "later", delay=60))
    held = {claim.task.task_id: claim for claim in world.queue.claim("w", limit=6)}
    world.queue.finish(held["a"])
    world.queue.retry(held["b"], delay=60)
    world.queue.release(held["c"])
    world.queue.bury(held["d"])
    world.queue.cancel("c")
    with pytest.raises(LeaseLost):
        world.queue.finish(held["b"])

    samples = scrape(world.queue, world.registry)
    wanted = {
        "duplicates_total": 1,
        "refused_total": 1,
        "claimed_total": 6,
        "finished_total": 1,
        "retried_total": 1,
        "released_total": 1,
        "buried_total": 1,
        "cancelled_total": 1,
        "lost_leases_total": 1,
        "delayed": 2,
        "running": 2,
        "dead": 1,
    }
    assert {name: samples[f"fairqueue_{name}"] for name in wanted} == wanted


def test_no_metric_has_a_label_for_users(world: World) -> None:
    scheduler = TaskScheduler(world.queue, "one", registry=world.registry)
    add(scheduler, user_id="somebody-special")
    world.clock.set(at(5, 9))
    scheduler.tick()
    with serve_metrics(world.queue, port=0, registry=world.registry) as server:
        text = fetch(server.url)
    labels = {
        label
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for label in sample.labels
    }
    labels -= {"partition"} if world.queue.partitions > 1 else set()
    assert labels == {"queue", "pool", "scheduler", "outcome", "type", "le"}
    assert "somebody-special" not in text


# --- registries and the server --------------------------------------------------------------------


@pytest.mark.untidy
def test_two_schedulers_share_a_registry(world: World) -> None:
    with TaskQueue(world.redis, "second", clock=world.clock) as second:
        one = TaskScheduler(world.queue, "one", registry=world.registry)
        two = TaskScheduler(world.queue, "two", registry=world.registry)
        three = TaskScheduler(second, "three", registry=world.registry)
        for scheduler in (one, two, three):
            scheduler.tick()

    def value(name: str, **labels: str) -> float | None:
        return world.registry.get_sample_value(f"fairqueue_scheduler_{name}", labels)

    assert value("cycles_total", queue="default") == 2
    assert value("cycles_total", queue="second") == 1
    assert value("is_leader", queue="default", scheduler="one") == 1
    assert value("is_leader", queue="default", scheduler="two") == 0
    assert value("is_leader", queue="second", scheduler="three") == 1


def test_a_custom_registry_keeps_out_of_the_common_one(world: World) -> None:
    TaskScheduler(world.queue, "only here", registry=world.registry)
    with serve_metrics(world.queue, port=0) as server:
        assert "only here" not in fetch(server.url)


def test_without_a_registry_the_common_one_is_used_and_served(queue: TaskQueue) -> None:
    scheduler = TaskScheduler(queue, "in the common one")
    TaskScheduler(queue, "in the common one too")
    scheduler.tick()
    with serve_metrics(queue, port=0) as server:
        samples = parse(fetch(server.url))
    assert samples["fairqueue_scheduler_is_leader{scheduler=in the common one}"] == 1
    assert "fairqueue_scheduler_is_leader{scheduler=in the common one too}" in samples


def test_the_collector_can_be_registered_by_hand_and_without_redis(own_server: OwnServer) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url, timeout=0.2) as queue:
        server.kill()
        registry = CollectorRegistry()
        registry.register(QueueCollector(queue))
        assert registry.get_sample_value("fairqueue_redis_up", {"queue": "default"}) == 0


def test_a_port_that_is_taken_is_named(world: World) -> None:
    server = serve_metrics(world.queue, port=0, registry=world.registry)
    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{server.port}"):
        serve_metrics(world.queue, port=server.port, registry=world.registry)
    server.close()
    with serve_metrics(world.queue, port=server.port, registry=world.registry) as again:
        assert again.port == server.port  # freed by close


@pytest.mark.processes
def test_a_forked_copy_does_not_keep_the_port(world: World) -> None:
    def wait(stop: threading.Event, index: int) -> None:
        stop.wait()

    server = serve_metrics(world.queue, port=0, registry=world.registry)
    group = ProcessGroup(wait, 1)
    group.start()
    try:
        assert "fairqueue" in fetch(server.url)
        server.close()
        with serve_metrics(world.queue, port=server.port, registry=world.registry) as again:
            assert again.port == server.port
    finally:
        group.stop(10)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"])
def test_a_scrape_that_is_half_sent_is_dropped(
    world: World, sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    world.patch("fairqueue.metrics.collectors.REQUEST_S", 0.3)
    with serve_metrics(world.queue, port=0, registry=world.registry) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(sent)
            assert client.recv(1) == b""
        assert "fairqueue" in fetch(server.url)
    assert capfd.readouterr().err == ""


def test_a_byte_of_a_scrape_now_and_then_buys_no_time(world: World) -> None:
    world.patch("fairqueue.metrics.collectors.REQUEST_S", 0.5)
    with (
        serve_metrics(world.queue, port=0, registry=world.registry) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=0.05) as client,
    ):
        client.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        eventually(lambda: is_closed_after(client, b"x"), "it was dropped")


@pytest.mark.parametrize("port", [-1, 65_536, "80", None, True])
def test_a_bad_port_is_named(queue: TaskQueue, port: Any) -> None:
    with pytest.raises(ConfigurationError, match="port"):
        serve_metrics(queue, port=port)


def test_everything_that_the_scripts_count_is_a_metric() -> None:
    texts = [path.read_text(encoding="utf-8") for path in lua_folder().rglob("*.lua")]
    patterns = (
        r"\bcount\('(\w+)'",
        r"\bcounter = '(\w+)'",
        r"COUNTER_OF_STATE = \{ \w+ = '(\w+)' \}",
    )
    counted = {name for text in texts for each in patterns for name in re.findall(each, text)}

    # Of those that are put together, `set_aside_` has a kind behind it.
    assert {"claimed", "expired", "expired_tasks", "not_unique", "replaced"} <= counted
    assert counted - {"set_aside_"} - _COUNTERS.keys() == set()


# --- tenants, pools, keys -------------------------------------------------------------------------


def test_tenants_and_what_holds_their_tasks_are_counted(world: World) -> None:
    world.queue.set_limit("account:*", slots=1)
    for tenant in ("acme", "globex", "initech"):
        for user in ("ann", "bob"):
            world.queue.push(make_task(user, f"{tenant}-{user}", tenant=tenant))
    world.queue.push(make_task("carol", "plain"))
    world.queue.push(make_task("carol", "gpu", pool="gpu"))
    world.queue.push(make_task("ann", "acme-gpu", tenant="acme", pool="gpu"))
    world.queue.set_tenant("globex", paused=True)
    for number in range(3):
        fields: Any = {"limit_keys": ["account:1"], "unique": f"u-{number}"}
        world.queue.push(make_task("dave", f"d-{number}", pool="keys", **fields))
    (running,) = world.queue.claim("w", limit=3, pools=["keys"])

    samples = scrape(world.queue, world.registry)
    assert samples["fairqueue_active_tenants"] == 3
    assert samples["fairqueue_parked_tenants"] == 1
    # Ann and bob of two tenants, carol, and in the pool gpu carol and ann once more; globex is not.
    active = samples["fairqueue_active_users"] - samples["fairqueue_parked_users"]
    assert active == 9
    assert samples["fairqueue_held"] == 2
    assert samples["fairqueue_slots_in_use"] == 1
    assert samples["fairqueue_unique_keys"] == 3

    world.queue.finish(running)
    world.queue.set_tenant("globex", paused=False)
    samples = scrape(world.queue, world.registry)
    assert samples["fairqueue_parked_tenants"] == 0
    assert samples["fairqueue_slots_in_use"] == 0
    assert samples["fairqueue_held"] == 1  # the other one is back
    assert samples["fairqueue_unique_keys"] == 2


def test_a_tenant_whose_users_are_all_held_back_is_active(world: World) -> None:
    world.push("a", user_id="ann", tenant="acme")
    world.push("b", user_id="bob", tenant="globex")
    world.push("c", user_id="carol", tenant="globex")
    world.queue.pause_user("ann", tenant="acme")
    world.queue.pause_user("bob", tenant="globex")
    snapshot = world.queue.inspect()
    assert (snapshot.active_tenants, snapshot.parked_tenants) == (2, 0)
    assert (snapshot.active_users, snapshot.parked_users) == (3, 2)


def test_many_tenants_are_counted_by_the_first_ones(world: World) -> None:
    tenants = [f"t-{number:04}" for number in range(1200)]
    world.queue.push_many(make_task("ann", tenant=tenant) for tenant in tenants)
    world.queue.push_many(make_task("bob", tenant=tenant, pool="gpu") for tenant in tenants)
    snapshot = world.queue.inspect()
    assert (snapshot.active_tenants, snapshot.active_users) == (1200, 2400)


def test_pools_have_a_label(world: World) -> None:
    for number in range(3):
        world.queue.push(make_task("ann", f"g-{number}", pool="gpu"))
        world.advance(10)
    world.queue.push(make_task("ann", "plain"))
    world.advance(1)
    world.beat("w1", pools=["default", "mail"])

    samples = scrape(world.queue, world.registry)
    of = {pool: f"{{pool={pool}}}" for pool in ("default", "gpu", "mail")}
    waiting = {pool: samples["fairqueue_pool_waiting" + label] for pool, label in of.items()}
    assert waiting == {"default": 1, "gpu": 3, "mail": 0}
    workers = {pool: samples["fairqueue_pool_workers" + label] for pool, label in of.items()}
    assert workers == {"default": 1, "gpu": 0, "mail": 1}
    unserved = {pool: samples["fairqueue_pool_unserved" + label] for pool, label in of.items()}
    assert unserved == {"default": 0, "gpu": 1, "mail": 0}
    assert samples["fairqueue_pool_slots{pool=mail}"] == 4
    assert samples["fairqueue_pool_running{pool=mail}"] == 0
    assert samples["fairqueue_pool_oldest_wait_seconds{pool=gpu}"] == 31
    assert samples["fairqueue_pool_oldest_wait_seconds{pool=default}"] == 1


@pytest.mark.one_partition
def test_the_wait_of_the_default_pool_is_left_out_if_it_is_not_known(world: World) -> None:
    for number in range(20):
        world.queue.push(make_task("ann", f"g-{number}", pool="gpu"))
    world.queue.push(make_task("ann", "plain"))
    world.advance(5)
    samples = scrape(world.queue, world.registry)
    assert "fairqueue_pool_oldest_wait_seconds{pool=default}" not in samples
    assert samples["fairqueue_pool_oldest_wait_seconds{pool=gpu}"] == 5
    world.queue.cancel("g-0")
    samples = scrape(world.queue, world.registry)
    assert samples["fairqueue_pool_oldest_wait_seconds{pool=default}"] == 5


def test_only_named_tenants_have_a_label(world: World) -> None:
    world.queue.push(make_task("ann", "acme-1", tenant="acme"))
    world.queue.finish(world.claim_one())
    for tenant in ("acme", "globex", "other"):
        world.queue.push(make_task("ann", f"{tenant}-2", tenant=tenant))
    world.queue.push(make_task("ann", "globex-3", tenant="globex"))
    world.queue.set_tenant("globex", paused=True)
    world.advance(7)

    with serve_metrics(
        world.queue, port=0, registry=world.registry, tenants=["acme", "globex"]
    ) as server:
        samples = parse(fetch(server.url))
    tenants = {name.partition("tenant=")[2] for name in samples if "tenant=" in name}
    assert tenants == {"acme}", "globex}"}
    assert samples["fairqueue_tenant_waiting{tenant=acme}"] == 1
    assert samples["fairqueue_tenant_waiting{tenant=globex}"] == 2
    assert samples["fairqueue_tenant_running{tenant=acme}"] == 0
    assert samples["fairqueue_tenant_received{tenant=acme}"] == 1.0
    assert samples["fairqueue_tenant_paused{tenant=acme}"] == 0
    assert samples["fairqueue_tenant_paused{tenant=globex}"] == 1
    assert samples["fairqueue_tenant_oldest_wait_seconds{tenant=globex}"] == 7


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ("acme", "tenants must be a list of names, not a str"),
        (["a b"], "tenant must be 1 to 64 letters.*, not 'a b'"),
        ([f"t{n}" for n in range(101)], "tenants must be at most 100 names, not 101"),
    ],
)
def test_bad_tenants_are_named(queue: TaskQueue, tenants: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        serve_metrics(queue, port=0, tenants=tenants)


def test_expired_tasks_and_unique_pushes_are_counted(world: World) -> None:
    fields: Any = {"unique": "report:7"}
    world.queue.push(make_task("ann", "one", **fields))
    world.queue.push(make_task("ann", "two", **fields))
    world.queue.push(make_task("ann", "three", payload={"n": 3}, on_duplicate="replace", **fields))
    world.queue.push(make_task("ann", "late", expires=5.0))
    world.advance(6)
    world.claim_one()

    samples = scrape(world.queue, world.registry)
    assert samples["fairqueue_expired_tasks_total"] == 1
    assert samples["fairqueue_expired_total"] == 0  # leases
    assert samples["fairqueue_not_unique_total"] == 2
    assert samples["fairqueue_replaced_total"] == 1


def test_the_page_lists_each_metric(world: World) -> None:
    """What the page says of the metrics of a queue are their own help texts."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(fairqueue_\w+)` \| (.+) \|$", page, re.MULTILINE))
    scheduler = TaskScheduler(world.queue, "one", registry=world.registry)
    WorkerMetrics(world.registry)
    alert_metrics(world.registry)
    scheduler.tick()
    world.push("a", tenant="acme")
    world.queue.finish(world.claim_one())
    world.push("b", tenant="acme")
    world.advance(10)
    world.claim_one()
    with serve_metrics(world.queue, port=0, registry=world.registry, tenants=["acme"]) as server:
        text = fetch(server.url)
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family.documentation
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    }
    sometimes = {"fairqueue_jain_index"}
    if world.queue.partitions == 1:
        sometimes |= {name for name in rows if name.startswith("fairqueue_partition_")}
    assert rows.keys() - sometimes == families.keys() - sometimes
    rules = page.partition("```yaml")[2]
    assert set(re.findall(r"\bfairqueue_\w+", rules)) <= rows.keys()
    for name in [f"fairqueue_{each}_total" for each in _COUNTERS]:
        help_text = families[name].rstrip(".")
        assert rows[name].lower().startswith(help_text.lower()), name
