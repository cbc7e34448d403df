"""The doctor on queues with tenants, pools, keys, unique keys and expiry: damage, and none."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from helpers.schedules import add
from helpers.state import changes, check_consistency, dump
from helpers.tasks import push
from helpers.waiting import in_thread
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue.doctor import OK, PROBLEM, WARNING, Finding, Records
from fairqueue.link.connection import Link
from fairqueue.link.keys import KEY_TYPES
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler

ACME, ALICE = "\x02acme", "\x02acme\x02alice"
KEY = "\x03account:1"


def wrong(link: Link, *, fix: bool = False) -> dict[str, Finding]:
    """The findings about records that do not agree, by structure."""
    found = Records(link, fix=fix).compare()
    return {each.check.removeprefix("records: "): each for each in found if each.level != OK}


@pytest.fixture
def flowing(world: World) -> TaskQueue:
    """A queue with something in every structure of layout 2, in use."""
    queue = world.queue
    queue.set_limit("account:*", slots=1, rate=100)
    queue.set_limit("line:*", slots=1, ordered=True)
    queue.set_limit("both", slots=1, scope="tenant")
    queue.set_tenant("acme", weight=3)
    queue.set_tenant("stopped", paused=True)
    queue.set_user("alice", tenant="acme", weight=2)
    for user in ("alice", "bob"):
        for tenant in ("acme", "stopped", None):
            name = f"{user}-{tenant}"
            world.push(f"{name}-1", f"{name}-2", user_id=user, tenant=tenant)
            world.push(f"{name}-gpu", f"{name}-gpu2", user_id=user, tenant=tenant, pool="gpu")
            world.push(f"{name}-later", user_id=user, tenant=tenant, delay=3600)
    world.push("k1", "k2", "k3", tenant="acme", limit_keys=["account:1"], name="k")
    world.push("o1", "o2", "o3", tenant="acme", limit_keys=["line:1"], name="k")
    world.push("b1", "b2", tenant="acme", limit_keys=["line:2", "account:2"], name="k")
    queue.claim("w", limit=20, lease=300, names=["k"])  # one of each runs
    world.push("u1", user_id="ann", tenant="acme", unique="u", name="unique")
    queue.claim("w", lease=300, names=["unique"])
    behind = {"unique": "u", "on_duplicate": "replace"}
    world.push("u2", user_id="ann", tenant="acme", name="unique", **behind)
    world.push("win", user_id="ann", unique="w", unique_for=600, name="unique")
    world.push("exp", user_id="ann", expires=7200, name="expires", delay=1800)
    world.push("cost", user_id="ann", cost=2.5)
    for _ in range(3):
        claims = queue.claim("w", limit=2, lease=300, pools=["default", "gpu"])
        queue.finish(claims[0])
    world.push("passing", user_id="zoe", tenant="initech")
    queue.finish(queue.claim("w", names=["default"], avoid=(), limit=1)[0])
    world.push("urgent", user_id="eve", tenant="globex", priority=6)
    scheduler = TaskScheduler(queue, lock_timeout=3600, registry=CollectorRegistry())
    add(scheduler, "nine", tenant="acme", pool="gpu")
    scheduler.stop()
    return queue


Damage = Callable[[redis.Redis, TaskQueue], object]


def first_of(client: redis.Redis, queue: TaskQueue, key: str, start: str) -> bytes:
    """The first member or field of a key that begins with a text."""
    name = queue.keys[key]
    found: Any = client.zrange(name, 0, -1) if is_zset(key) else client.hkeys(name)
    first: bytes = next(each for each in sorted(found) if each.startswith(start.encode()))
    return first


def is_zset(key: str) -> bool:
    return KEY_TYPES[key] == "zset"


def without(key: str, start: str) -> Damage:
    def do(client: redis.Redis, queue: TaskQueue) -> None:
        member = first_of(client, queue, key, start)
        (client.zrem if is_zset(key) else client.hdel)(queue.keys[key], member)

    return do


def with_extra(key: str, member: str, score: float = 0) -> Damage:
    return lambda client, queue: client.zadd(queue.keys[key], {member: score})


def with_field(key: str, field: str, value: str) -> Damage:
    return lambda client, queue: client.hset(queue.keys[key], field, value)


TAG = "000000000000001.000000000"

# What somebody or something has spoilt, and one of the places where the doctor says so.
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no seat of a user": (without("rings", f"r{ACME}\0"), "tags"),
    "no tag of a user": (without("tags", f"r{ACME}\x02"), "rings"),
    "no seat of a pool": (without("rings", "r\x03gpu\0"), "tags"),
    "no tag of a tenant in a pool": (without("tags", f"r{ACME}\x03gpu"), "rings"),
    "no finish tag": (without("rings", "i"), "tags"),
    "another tag": (with_field("tags", f"r{ALICE}", TAG), "tags"),
    "a seat without a task": (with_extra("rings", f"r{ACME}\0{TAG}\0{ACME}\x02no"), "rings"),
    "a seat in a wrong ring": (with_extra("rings", f"r\x02x\0{TAG}\0{ALICE}"), "rings"),
    "a seat that is none": (with_extra("rings", "rubbish"), "rings"),
    "a tag without a seat": (with_field("tags", f"r{ACME}\x02nobody", TAG), "tags"),
    "an old tag in the ring of no tenant": (
        lambda client, queue: (
            client.zadd(queue.keys["rings"], {f"i\x02gone\0{TAG}\0\x02gone\x02ann": 0}),
            client.hset(queue.keys["tags"], "i\x02gone\x02ann", TAG),
        ),
        "tags",
    ),
    "clocks of no tenant": (with_field("clocks", "\x02nobody", "1 1 - 0 0 "), "clocks"),
    "clocks of no pool": (with_field("clocks", "\x03nopool", "1 1 - 0 0 "), "clocks"),
    "no tenant in ready": (without("ready", ACME), "tags"),
    "a tenant without tasks": (with_extra("ready", "\x02empty"), "users in line"),
    "no parked tenant": (without("parked", "\x02stopped"), "tags"),
    "a parked tenant without a reason": (
        lambda client, queue: (
            client.zrem(queue.keys["ready"], ACME),
            client.zadd(queue.keys["parked"], {ACME: 1e13}),
        ),
        "tags",
    ),
    "no tenant in the CRITICAL lane": (without("critical", "\x02globex"), "tags"),
    "too few runs of a tenant": (with_field("running", ACME, "1"), "running"),
    "runs of no tenant": (with_field("running", "\x02nobody", "3"), "running"),
    "no task of a pool": (without("pool_tasks", "gpu"), "status"),
    "a task in a wrong pool": (
        with_extra("pool_tasks", "gpu\x00000000000000001\x00cost"),
        "pool_tasks",
    ),
    "no place in an order": (without("gate_order", "o\x03line:1\0"), "status"),
    "a place of no task": (
        with_extra("gate_order", "o\x03line:1\x0000000000000000\x00nobody"),
        "gate_order",
    ),
    "a reservation of no task": (
        with_extra("gate_order", f"r{KEY}\x0000000000000000\x00nobody\x00alice\x001"),
        "gate_order",
    ),
    "a place of a task that is not held": (
        with_extra("gate_order", f"h{KEY}\x0000000000000000\x00cost"),
        "gate_order",
    ),
    "a pass of no task": (with_field("gate_passes", "nobody", "2"), "gate_passes"),
    "no slot of a key": (without("slots", KEY), "status"),
    "a slot of no task": (with_extra("slots", f"{KEY}\0nobody"), "slots"),
    "a forgotten gate": (
        lambda client, queue: (
            client.hdel(queue.keys["limits"], "\x03line:*"),
            client.zrem(queue.keys["gate_times"], "\x03line:1", "\x03line:2"),
        ),
        "held",
    ),
    "a debt that nobody drops": (with_field("paced", "\x03account:9", "1"), "paced"),
    "no held task": (without("held", ALICE), "status"),
    "no turn of a tenant": (without("slot_line", f"{KEY}\0"), "slot_line"),
    "no turn of a user": (without("slot_line", f"{KEY}\x06"), "slot_line"),
    "no holder of a key": (without("uniques", ACME), "status"),
    "a key of no task": (with_field("uniques", "ann\0x", "no\0unfinished\0\x001\0\0"), "uniques"),
    "a key of a task without one": (
        with_field("uniques", "ann\0x", "cost\0unfinished\0\x001\0\0"),
        "uniques",
    ),
    "a follower that does not wait": (
        with_field("uniques", f"{ACME}\0u", "u1\0unfinished\0\x001\0cost\x001"),
        "uniques",
    ),
    "a follower that is not known": (
        with_field("uniques", f"{ACME}\0u", "u1\0unfinished\0\x001\0\0"),
        "unique keys",
    ),
    "a window without an end": (without("expiring", "\x01"), "uniques"),
    "no end of a task": (without("expiring", "exp"), "status"),
    "another end of a task": (with_extra("expiring", "exp", 5), "status"),
    "an end of no task": (with_extra("expiring", "nobody", 5), "expiring"),
    "an end of no window": (with_extra("expiring", "\x01ann\0no", 5), "expiring"),
    "no time of a delayed user": (
        lambda client, queue: (
            client.hdel(queue.keys["tags"], f"d{ALICE}"),
            client.zrem(queue.keys["rings"], first_of(client, queue, "rings", f"d{ACME}\0")),
        ),
        "status",
    ),
    "no time of a delayed tenant": (without("delayed_users", ACME), "status"),
    "a user of no tenant": (without("user_tenants", "alice\0acme"), "tenant_users"),
    "a tenant without its user": (without("tenant_users", "acme\0alice"), "user_tenants"),
    "a tenant without its name": (without("user_names", ACME), "users"),
    "no run of a tenant": (without("runs", "gacme\0"), "status"),
    "no run of a user of tenants": (without("runs", "p"), "status"),
    "a run of no tenant": (with_extra("runs", "gno\x001700000000000salice-acme-1"), "runs"),
    "no prefix of a pattern": (
        lambda client, queue: client.hset(queue.keys["limits"], "\x04", "account:\n"),
        "limits",
    ),
    "a prefix of no pattern": (
        lambda client, queue: client.hset(
            queue.keys["limits"], "\x04", "account:\nline:\nnothing:\n"
        ),
        "limits",
    ),
}


def drain(world: World) -> None:
    """Run all that waits, also what is delayed and what was held."""
    queue = world.queue
    queue.set_tenant("stopped", paused=False)
    for _ in range(40):
        world.advance(400)  # leases end
        while claims := queue.claim("w", limit=20, pools=["default", "gpu"]):
            queue.finish_many((claim, None) for claim in claims)
    assert {"ready", "delayed", "running"}.isdisjoint(world.places()), world.places()


def test_a_queue_in_use_with_all_of_it_has_nothing_wrong(
    flowing: TaskQueue, world: World, redis_client: redis.Redis
) -> None:
    before = dump(redis_client)
    for key in ("rings", "tags", "clocks", "pool_tasks", "gate_order", "uniques", "expiring"):
        assert before[key], key
    assert wrong(flowing.link) == {}
    assert changes(before, dump(redis_client)) == {}
    assert wrong(flowing.link, fix=True) == {}
    world.check()
    drain(world)
    assert wrong(flowing.link) == {}


@pytest.mark.one_partition
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_repaired_and_all_is_served(
    damage: str, flowing: TaskQueue, world: World, redis_client: redis.Redis
) -> None:
    do, place = DAMAGES[damage]
    do(redis_client, flowing)
    before = dump(redis_client)
    found = wrong(flowing.link)
    assert place in found, found
    assert found[place].level == PROBLEM
    assert found[place].repairable == found[place].details["wrong"] > 0
    assert changes(before, dump(redis_client)) == {}
    repaired = wrong(flowing.link, fix=True)
    assert repaired[place].level == WARNING
    assert repaired[place].text.endswith("repaired")
    assert wrong(flowing.link) == {}
    check_consistency(redis_client)
    drain(world)


@pytest.mark.parametrize(
    "lost",
    [
        *("rings", "tags", "clocks", "pool_tasks", "gate_order", "gate_passes", "gate_times"),
        *("uniques", "expiring", "user_tenants", "delayed_users", "slot_line", "slots", "parked"),
        *("ready", "critical", "idle", "running", "paced", "waiting", "backlog", "held"),
    ],
)
def test_a_lost_structure_is_made_again_and_all_is_served(
    lost: str, flowing: TaskQueue, world: World, redis_client: redis.Redis
) -> None:
    redis_client.delete(flowing.keys[lost])
    wrong(flowing.link, fix=True)
    wrong(flowing.link, fix=True)  # what one repair uncovered
    assert wrong(flowing.link) == {}
    drain(world)


@pytest.mark.one_partition
def test_all_damage_at_once_is_repaired(
    flowing: TaskQueue, world: World, redis_client: redis.Redis
) -> None:
    for do, _ in DAMAGES.values():
        try:
            do(redis_client, flowing)
        except StopIteration:  # other damage has taken it away
            continue
    for _ in range(3):
        wrong(flowing.link, fix=True)
    assert wrong(flowing.link) == {}
    check_consistency(redis_client)
    drain(world)


def test_work_with_all_of_it_is_no_difference(redis_client: redis.Redis) -> None:
    """Workers, producers and the doctor at once, on the clock of the server."""
    with TaskQueue(redis_client) as queue:
        queue.set_limit("account:*", slots=1)
        queue.set_limit("line:*", slots=2, ordered=True, rate=200)
        queue.set_tenant("acme", max_running=3)
        over = threading.Event()

        def work(number: int) -> int:
            done = 0
            while not over.is_set():
                tenant = ("acme", "globex", None)[done % 3]
                options = (
                    {"limit_keys": [f"account:{done % 3}", f"line:{done % 2}"]},
                    {"limit_keys": [f"line:{done % 2}"], "delay": 0.01},
                    {"pool": "gpu", "cost": 2.0},
                    {"unique": f"u{done % 4}", "expires": 5},
                    {"unique": "r", "on_duplicate": "replace"},
                )[done % 5]
                push(queue, f"{number}-{done}", user_id=f"u{done % 4}", tenant=tenant, **options)
                for claim in queue.claim(f"w{number}", limit=3, pools=["default", "gpu"]):
                    if done % 7:
                        queue.finish(claim)
                    else:
                        queue.retry(claim, "again", delay=0.01)
                done += 1
            return done

        results = [in_thread(partial(work, n)) for n in range(3)]
        try:
            for fix in (False, True, False, True, False, False):
                assert wrong(queue.link, fix=fix) == {}
        finally:
            over.set()
        assert all(result() for result in results)
    check_consistency(redis_client)
