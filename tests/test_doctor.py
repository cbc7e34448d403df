"""The doctor: what it says of Redis and of a queue, and that it repairs what does not agree."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from helpers.network import LossyProxy
from helpers.schedules import add
from helpers.state import changes, check_consistency, dump
from helpers.tasks import push
from helpers.waiting import in_thread
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue.doctor import OK, PROBLEM, WARNING, Doctor, Finding
from fairqueue.link.connection import Link
from fairqueue.models import new_id
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.scheduler.scheduler import TaskScheduler


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def wrong(findings: list[Finding]) -> dict[str, Finding]:
    """The findings about records that do not agree, by structure."""
    found = by_check(findings)
    return {
        name.removeprefix("records: "): finding
        for name, finding in found.items()
        if name.startswith("records: ")
    }


# --- Redis and the queue --------------------------------------------------------------------------


def test_an_empty_queue_has_nothing_wrong(queue: TaskQueue) -> None:
    findings = Doctor(queue).examine()
    assert [each for each in findings if each.level == PROBLEM] == []
    found = by_check(findings)
    assert found["server"].text.startswith(("Valkey", "Redis"))
    assert found["eviction"].level == OK
    assert found["permissions"].text == "all commands are allowed (by ACL DRYRUN)"
    assert found["records"].text == "0 entries agree with each other"
    assert set(found["latency"].details) == {"median", "least", "most"}
    assert abs(found["clock"].details["skew"]) < 60


@pytest.mark.parametrize(
    ("settings", "check", "level", "words"),
    [
        ({"maxmemory-policy": "allkeys-lru"}, "eviction", PROBLEM, "set it to noeviction"),
        ({"maxmemory-policy": "volatile-lru"}, "eviction", OK, "maxmemory-policy volatile-lru"),
        ({"appendonly": "no", "save": ""}, "persistence", WARNING, "everything would be lost"),
        ({"maxmemory": "1500000000"}, "memory", OK, "of maxmemory"),
    ],
)
def test_settings_of_redis_that_lose_data_are_told(
    own_server: Callable[..., EmbeddedServer],
    settings: dict[str, str],
    check: str,
    level: str,
    words: str,
) -> None:
    server = own_server(config=settings)
    with TaskQueue.from_url(server.url) as queue:
        finding = by_check(Doctor(queue).examine())[check]
    assert (finding.level, words in finding.text) == (level, True), finding


@pytest.mark.own_user
@pytest.mark.parametrize(
    ("rules", "refused", "how"),
    [
        ("+@all -zadd -blpop", ["BLPOP", "ZADD"], "by ACL DRYRUN"),
        ("+@all -zcard -acl", ["ZCARD"], "those that can be tried without a change"),
        ("+@all -acl -info -config", [], "those that can be tried without a change"),
    ],
)
def test_commands_that_the_user_of_redis_may_not_run_are_named(
    own_server: Callable[..., EmbeddedServer], rules: str, refused: list[str], how: str
) -> None:
    server = own_server()
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "default", *rules.split())
        with TaskQueue.from_url(server.url) as queue:
            finding = by_check(Doctor(queue).examine())["permissions"]
    assert (finding.level, finding.details.get("refused", [])) == (
        PROBLEM if refused else OK,
        refused,
    )
    assert how in finding.text


def test_schedules_without_a_leader_and_tasks_without_a_worker_are_problems(world: World) -> None:
    scheduler = TaskScheduler(world.queue, registry=CollectorRegistry())
    add(scheduler, cron_expr="* * * * *")
    world.push("a")
    world.advance(200)
    found = by_check(Doctor(world.queue).examine())
    assert [found[name].level for name in ("leader", "overdue", "workers")] == [PROBLEM] * 3
    scheduler.tick()
    WorkerStore(world.queue.link).beat(
        {"host": "h", "pid": 1, "version": "1", "slots": 4, "names": ["*"], "current": []}
        | {"running": 0, "started": 0},
        "w",
    )
    found = by_check(Doctor(world.queue).examine())
    assert [found[name].level for name in ("leader", "schedules", "workers")] == [OK] * 3
    assert found["workers"].text == "1 worker is alive, with 4 slots"
    scheduler.stop()


def test_pools_that_no_live_worker_serves_are_told(world: World) -> None:
    world.push("a", "b", pool="gpu")
    world.push("c", pool="mail")
    world.beat("w", pools=["default", "mail"])
    found = by_check(Doctor(world.queue).examine())["workers"]
    assert (found.level, found.details["unserved"]) == (WARNING, {"gpu": 2})
    assert found.text == "tasks wait in pools that no live worker serves: 'gpu' (2)"
    world.beat("v", pools=["gpu"])
    assert by_check(Doctor(world.queue).examine())["workers"].level == OK


def test_runs_that_go_on_after_their_time_out_are_told(world: World) -> None:
    world.push("a", "b", timeout=1)
    claims = world.queue.claim("w", limit=2, lease=10)
    world.queue.extend(claims, lease=300)
    world.queue.finish(claims[1])
    world.advance(11)
    workers = WorkerStore(world.queue.link)
    assert len(workers.find_stale()) == 1
    info = {"host": "h", "pid": 1, "version": "1", "slots": 4, "names": ["*"], "started": 0}
    workers.beat(info | {"current": ["a", "b", "c"], "running": 3}, "w")
    finding = by_check(Doctor(world.queue).examine())["stale runs"]
    assert (finding.level, finding.details) == (WARNING, {"stale": ["a"]})
    assert finding.text == "1 slot is taken by runs that do not end, such as a"
    workers.beat(info | {"current": ["b"], "running": 1}, "w")  # it has ended at last
    assert by_check(Doctor(world.queue).examine())["stale runs"].level == OK


# --- records that have to agree -------------------------------------------------------------------


@pytest.fixture
def busy(world: World) -> TaskQueue:
    """A queue with tasks in every state, users of every kind, schedules and tenants."""
    world.queue.set_limits("slotted", slots=1, timeout=60)
    world.queue.set_user("capped", max_running=1)
    world.queue.set_user("paused", paused=True)
    world.queue.set_user("alice", tenant="north")
    world.push("held-1", "held-2", "held-3", name="slotted")
    world.fill("capped", 3)
    world.fill("paused", 2)
    world.fill("bob", 6, tenant="south")
    world.push("urgent", user_id="dora", priority=6)
    world.push("late", user_id="bob", delay=3600)
    claims = world.queue.claim("w", limit=8, lease=300)
    by_id = {claim.task.task_id: claim for claim in claims}
    done = [claim for task_id, claim in by_id.items() if task_id.startswith("bob")]
    world.queue.finish(done[0])
    world.queue.bury(done[1], "broken")
    world.push("urgent-2", user_id="erin", priority=6)
    world.queue.cancel("bob-5")
    scheduler = TaskScheduler(world.queue, lock_timeout=3600, registry=CollectorRegistry())
    add(scheduler, "nine", tenant="north")
    add(scheduler, "ten", user_id="bob", name="report")
    add(scheduler, "off")
    scheduler.pause_schedule("off", note="why")
    scheduler.trigger("ten")
    add(scheduler, "each", cron_expr="* * * * *", overlap="buffer_one", name="each")
    for _ in range(2):  # the second waits until the first has run
        world.advance(60)
        scheduler.tick()
        world.queue.claim("w", names=["each"], lease=300)
    scheduler.stop()
    WorkerStore(world.queue.link).beat(
        {"host": "h", "pid": 1, "version": "1", "slots": 4, "names": ["*"], "current": []}
        | {"running": 0, "started": 0},
        "w",
    )
    return world.queue


def test_reading_a_busy_queue_changes_nothing(busy: TaskQueue, redis_client: redis.Redis) -> None:
    before = dump(redis_client)
    findings = Doctor(busy).examine()
    assert wrong(findings) == {}
    assert by_check(findings)["records"].level == OK
    assert changes(before, dump(redis_client)) == {}


Damage = Callable[[redis.Redis, TaskQueue], object]


def members(client: redis.Redis, queue: TaskQueue, key: str) -> list[bytes]:
    found: list[bytes] = client.zrange(queue.keys[key], 0, -1)  # type: ignore[assignment]
    assert found, key
    return found


def without_first(key: str) -> Damage:
    return lambda client, queue: client.zrem(queue.keys[key], members(client, queue, key)[0])


def with_extra(key: str, member: str, score: float = 0) -> Damage:
    return lambda client, queue: client.zadd(queue.keys[key], {member: score})


def with_field(key: str, field: str, value: str) -> Damage:
    return lambda client, queue: client.hset(queue.keys[key], field, value)


def without_field(key: str, field: str) -> Damage:
    return lambda client, queue: client.hdel(queue.keys[key], field)


def unwritten(key: str) -> Damage:
    return lambda client, queue: client.delete(queue.keys[key])


# What somebody or something has spoilt, and where the doctor says so.
DAMAGES: list[tuple[Damage, str]] = [
    (without_first("waiting"), "status"),
    (without_first("delayed"), "status"),
    (without_first("delayed_index"), "status"),
    (without_first("leases"), "status"),
    (without_first("ended"), "status"),
    (without_first("dead"), "status"),
    (without_first("backlog"), "status"),
    (without_first("held"), "status"),
    (without_first("slots"), "status"),
    (without_first("deadlines"), "status"),
    (without_first("open"), "status"),
    (without_first("runs"), "status"),
    (without_first("failures"), "status"),
    (without_first("ready"), "users in line"),
    (without_first("parked"), "users in line"),
    (without_first("critical"), "users in line"),
    (without_field("running", "capped"), "running"),
    (with_field("running", "capped", "7"), "running"),
    (with_field("running", "nobody", "1"), "running"),
    (with_field("running", "nobody", "0"), "running"),
    (with_extra("waiting", "bob-0"), "waiting"),
    (with_extra("waiting", "nobody"), "waiting"),
    (with_extra("delayed", "nobody", 1e13), "delayed"),
    (with_extra("delayed_index", "bob\x00000000000000001\x00late"), "delayed_index"),
    (with_extra("delayed_index", "bob\x00000000000000001\x00nobody"), "delayed_index"),
    (with_extra("leases", "nobody", 1e13), "leases"),
    (with_extra("ended", "capped-1"), "ended"),
    (with_extra("dead", "nobody"), "dead"),
    (with_extra("backlog", "bob\x00300000000000099\x00nobody\x00default"), "backlog"),
    (with_extra("backlog", "stranger\x00300000000000099\x00nobody\x00default"), "backlog"),
    (with_extra("held", "bob\x00slotted\x00300000000000099\x00nobody"), "held"),
    (with_extra("slots", "slotted\x00nobody"), "slots"),
    (with_extra("deadlines", "nobody", 1e13), "deadlines"),
    (with_extra("open", "ten\x00nobody"), "open"),
    (with_extra("runs", "ubob\x001700000000000snobody"), "runs"),
    (with_extra("failures", "nothing"), "failures"),
    (with_extra("ready", "nobody"), "users in line"),
    (with_extra("parked", "nobody", 1e13), "users in line"),
    (with_extra("critical", "paused"), "users in line"),
    (with_extra("idle", "erin"), "users in line"),
    (with_extra("slot_line", "slotted\x0000000000000099\x00stranger"), "slot_line"),
    (with_extra("slot_line", "\x01slotted\x00stranger"), "slot_line"),
    (unwritten("slot_line"), "held"),
    (with_field("tasks", "nobody", "{}"), "tasks"),
    (without_field("tasks", "capped-1"), "status"),
    (with_field("attempts", "nobody", "{}"), "attempts"),
    (without_first("due"), "schedules"),
    (with_extra("due", "off", 1e13), "schedules"),
    (with_extra("due", "nobody", 1e13), "due"),
    (with_field("plan", "nobody", "x -"), "plan"),
    (with_field("schedule_state", "nobody", "{}"), "schedule_state"),
    (without_first("schedule_index"), "schedules"),
    (with_extra("schedule_index", "bob\x00nobody"), "schedule_index"),
    (without_first("schedule_names"), "schedules"),
    (with_extra("schedule_names", "other\x00ten"), "schedule_names"),
    (without_first("tenant_schedules"), "schedules"),
    (with_extra("tenant_schedules", "south\x00bob\x00ten"), "tenant_schedules"),
    (with_extra("moments", "nobody\x001\x001\x001\x00missed"), "moments"),
    (with_extra("changes", "nobody\x001\x001\x00{}"), "changes"),
    (without_first("user_names"), "users"),
    (with_extra("user_names", "nobody"), "user_names"),
    (without_first("tenant_users"), "user_tenants"),
    (without_first("user_tenants"), "tenant_users"),
    (with_extra("tenant_users", "west\x00bob"), "tenant_users"),
    (with_extra("tenant_users", "west"), "tenant_users"),
    (with_extra("user_tenants", "bob"), "user_tenants"),
    (with_field("workers", "ghost", "{}"), "workers"),
    (with_extra("worker_ends", "ghost", 1e13), "worker_ends"),
]


@pytest.mark.one_partition
@pytest.mark.parametrize(
    ("damage", "place"), DAMAGES, ids=[f"{n} {place}" for n, (_, place) in enumerate(DAMAGES)]
)
def test_what_does_not_agree_is_found_and_repaired(
    damage: Damage, place: str, busy: TaskQueue, redis_client: redis.Redis
) -> None:
    damage(redis_client, busy)
    before = dump(redis_client)
    found = wrong(Doctor(busy).examine())
    assert place in found
    assert found[place].level == PROBLEM
    assert found[place].repairable == found[place].details["wrong"] > 0
    assert changes(before, dump(redis_client)) == {}
    repaired = wrong(Doctor(busy).examine(fix=True))
    assert repaired[place].level == WARNING
    assert repaired[place].text.endswith("repaired")
    assert wrong(Doctor(busy).examine()) == {}
    check_consistency(redis_client)


@pytest.mark.one_partition
def test_a_run_goes_on_waiting_for_the_first(busy: TaskQueue, redis_client: redis.Redis) -> None:
    before = dump(redis_client)["delayed"]
    (task_id,) = (each for each in before if each.startswith("each:"))
    redis_client.zrem(busy.keys["delayed"], task_id)
    Doctor(busy).examine(fix=True)
    assert dump(redis_client)["delayed"] == before


@pytest.mark.one_partition
def test_all_damage_is_repaired_and_the_queue_goes_on(busy: TaskQueue, world: World) -> None:
    for damage, _ in DAMAGES:
        damage(world.redis, busy)
    Doctor(busy).examine(fix=True)
    Doctor(busy).examine(fix=True)  # what one repair uncovered
    assert wrong(Doctor(busy).examine()) == {}
    world.check()
    world.advance(4000)  # leases end, delayed tasks are due
    busy.set_user("paused", paused=False)
    while claims := busy.claim("w", limit=10):
        busy.finish_many((claim, None) for claim in claims)
    assert (busy.size(), busy.inspect().running) == (0, 0)


@pytest.mark.one_partition
@pytest.mark.untidy
@pytest.mark.parametrize(
    ("damage", "place"),
    [
        (with_field("status", "capped-1", "nonsense"), "status"),
        (without_field("schedule_state", "nine"), "schedules"),
    ],
)
def test_what_nobody_can_know_is_told_and_left_alone(
    damage: Damage, place: str, busy: TaskQueue, redis_client: redis.Redis
) -> None:
    damage(redis_client, busy)
    found = wrong(Doctor(busy).examine())[place]
    assert (found.level, found.repairable) == (PROBLEM, 0)
    assert wrong(Doctor(busy).examine(fix=True))[place].level == PROBLEM


def test_a_repair_is_told_how_far_it_is(busy: TaskQueue) -> None:
    steps: list[int] = []
    Doctor(busy).examine(progress=steps.append)
    assert steps == sorted(steps)
    assert steps[-1] > 50


@pytest.mark.one_partition
def test_without_records_only_redis_is_read(busy: TaskQueue, redis_client: redis.Redis) -> None:
    without_first("waiting")(redis_client, busy)
    checks = by_check(Doctor(busy).examine(records=False))
    assert not any(name.startswith("records") for name in checks)
    Doctor(busy).examine(fix=True)


def test_a_lost_repair_is_repeated(far: TaskQueue, near: redis.Redis, proxy: LossyProxy) -> None:
    push(far, "a", "b")
    near.delete(far.keys["waiting"])
    answer = proxy.losing(lambda: repair(far.link, "task", "a", "b"))
    told = b"is ready but not in waiting"
    assert answer == [b"a", told, b"1", b"b", told, b"1"]


def repair(link: Link, kind: str, *entries: str) -> Any:
    return link.run("repair_tasks", op=new_id(), kind=kind, fix="1", rest=entries)


def test_an_entry_that_was_put_right_meanwhile_is_no_difference(busy: TaskQueue) -> None:
    """The script looks at what is there now, whatever the caller has read before."""
    assert repair(busy.link, "waiting", "long gone") == []
    assert repair(busy.link, "task", "long gone") == []
    assert repair(busy.link, "running", "capped") == []


def test_work_that_goes_on_is_no_difference(redis_client: redis.Redis) -> None:
    with TaskQueue(redis_client) as queue:
        queue.set_limits("slotted", slots=2)
        over = threading.Event()

        def work(number: int) -> int:
            done = 0
            while not over.is_set():
                name = ("slotted", "default")[done % 2]
                push(queue, f"{number}-{done}", user_id=f"u{done % 5}", name=name)
                for claim in queue.claim(f"w{number}", limit=3):
                    queue.finish(claim)
                done += 1
            return done

        results = [in_thread(partial(work, n)) for n in range(3)]
        try:
            for fix in (False, True, False, True):
                assert wrong(Doctor(queue).examine(fix=fix)) == {}
        finally:
            over.set()
        assert all(result() for result in results)
    check_consistency(redis_client)


@pytest.mark.one_partition
def test_a_delayed_task_is_brought_back_with_its_own_moment(world: World) -> None:
    world.push("t", delay=60)
    due = world.redis.zscore(world.keys["delayed"], "t")
    assert due == world.clock.now_ms() + 60_000
    world.redis.delete(world.keys["delayed"], world.keys["delayed_index"])
    world.advance(10)
    assert repair(world.queue.link, "task", "t") != []
    assert world.redis.zscore(world.keys["delayed"], "t") == due
    assert world.queue.claim("w") == []


@pytest.mark.one_partition
def test_a_waiting_task_is_brought_back_as_one_that_waits_from_now_on(world: World) -> None:
    world.push("t")
    world.redis.delete(world.keys["waiting"])
    world.advance(10)
    assert repair(world.queue.link, "task", "t") != []
    assert world.redis.zscore(world.keys["waiting"], "t") == world.clock.now_ms()
