"""Keys of concurrency: slots, rates and order over all workers, for tasks of several keys too."""

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.state import count_commands
from helpers.tasks import ids_of, make_task, push
from helpers.waiting import in_thread
from helpers.world import World

from fairqueue.doctor import OK, Records
from fairqueue.errors import ConfigurationError
from fairqueue.models import Claim, HandlerLimits, KeyLimits
from fairqueue.queue.queue import TaskQueue

KEY = "account:42"
# What is stored of keys only while tasks with them wait, run or owe a rate.
OF_KEYS = {"slots", "held", "slot_line", "paced", "gate_times", "gate_order", "gate_passes"}
MINUTE = 60.0


def claimed(world: World, limit: int = 10, **options: Any) -> list[str]:
    """Claim, and return the ids."""
    return ids_of(world.queue.claim("w", limit=limit, **options))


def with_keys(world: World, *task_ids: str, keys: list[str] | None = None, **fields: Any) -> None:
    world.push(*task_ids, limit_keys=[KEY] if keys is None else keys, **fields)


# --- slots and rates ------------------------------------------------------------------------------


def test_a_key_without_limits_limits_nothing(world: World) -> None:
    with_keys(world, "a", "b", "c")
    assert claimed(world) == ["a", "b", "c"]
    assert not world.dump().keys() & OF_KEYS


def test_no_more_than_its_slots_run_at_a_time(world: World) -> None:
    world.queue.set_limit(KEY, slots=2)
    with_keys(world, "a", "b", "c", "d", name="one")
    with_keys(world, "e", name="other", user_id="bob")
    first = world.queue.claim("w", limit=10)
    assert len(first) == 2
    assert world.queue.claim("x", limit=10) == []
    world.queue.finish(first[0])
    assert len(world.queue.claim("x", limit=10)) == 1


def test_keys_do_not_take_slots_from_each_other(world: World) -> None:
    world.queue.set_limit("account:1", slots=1)
    world.queue.set_limit("account:2", slots=1)
    with_keys(world, "a", "b", keys=["account:1"])
    with_keys(world, "c", "d", keys=["account:2"])
    assert sorted(claimed(world)) == ["a", "c"]


def test_slots_hold_when_many_claim_at_once(live: TaskQueue) -> None:
    live.set_limit("k:*", slots=2)
    tasks = [
        make_task(f"u{n % 7}", f"t{n}", limit_keys=[f"k:{n % 3}", f"k:{n % 4 + 10}"])
        for n in range(120)
    ]
    live.push_many(tasks)
    lock, running, most, done = threading.Lock(), Counter[str](), Counter[str](), set[str]()

    def work(worker: int) -> None:
        while len(done) < len(tasks):
            for claim in live.claim(f"w{worker}", limit=3, wait=0.2):
                keys = claim.task.limit_keys
                with lock:
                    running.update(keys)
                    most.update({k: max(0, running[k] - most[k]) for k in keys})
                with lock:
                    running.subtract(keys)
                    done.add(claim.task.task_id)
                live.finish(claim)

    for wait in [in_thread(partial(work, n)) for n in range(4)]:
        wait()
    assert len(done) == 120
    assert max(most.values()) <= 2


@pytest.mark.parametrize("end", ["finish", "retry", "release", "bury", "cancel", "lease"])
def test_a_slot_is_freed_however_the_lease_ends(world: World, end: str) -> None:
    world.queue.set_limit(KEY, slots=1)
    with_keys(world, "a")
    with_keys(world, "b", user_id="bob")
    claim = world.claim_one(lease=30)
    other = {"a": "b", "b": "a"}[claim.task.task_id]
    if end == "lease":
        world.advance(31)
    elif end == "cancel":
        world.queue.cancel(claim.task.task_id)
        world.queue.finish(claim)
    elif end == "retry":
        world.queue.retry(claim, "no", delay=60)
    else:
        getattr(world.queue, end)(claim)
    again = claimed(world)
    assert len(again) == 1
    assert again == [other] or end in ("release", "lease")
    assert list(world.dump()["slots"]) == [f"\x03{KEY}\0{again[0]}"]


@pytest.mark.one_partition
def test_slots_are_exact_after_workers_were_killed(world: World) -> None:
    world.queue.configure(max_attempts=100)
    world.queue.set_limit(KEY, slots=3)
    with_keys(world, *(f"t{n}" for n in range(20)))
    for _ in range(6):  # each time all that run are lost
        assert len(claimed(world)) == 3
        assert claimed(world) == []
        world.advance(31)
        world.check()
    ended = set[str]()
    while claims := world.queue.claim("w", limit=10):
        assert len(claims) == 3 or len(ended) >= 18
        ended.update(ids_of(claims))
        world.queue.finish_many((claim, None) for claim in claims)
    assert len(ended) == 20
    assert not world.dump().keys() & OF_KEYS


def test_a_rate_holds_over_all_claimers(world: World) -> None:
    world.queue.set_limit(KEY, rate=2.0)
    with_keys(world, "a", "b", "c")
    with_keys(world, "d", user_id="bob")
    started = []
    for n in range(5):
        started.append(len(world.queue.claim(f"w{n}", limit=10)))
        assert claimed(world) == []
        world.advance(0.5)
    assert started == [1, 1, 1, 1, 0]


def test_a_rate_counts_declared_costs(world: World) -> None:
    world.queue.set_limit(KEY, rate=10.0)
    with_keys(world, "a", cost=50)
    with_keys(world, "b", cost=1)
    assert claimed(world) == ["a"]
    world.advance(4.9)
    assert claimed(world) == []
    world.advance(0.1)
    assert claimed(world) == ["b"]


@pytest.mark.one_partition
def test_what_an_attempt_has_cost_counts_for_the_rate_of_its_key(world: World) -> None:
    world.queue.set_limit(KEY, rate=10.0)
    world.queue.set_limits("report", rate=10.0)
    with_keys(world, "a", "b", "c", name="report", cost=10)
    claim = world.claim_one()
    world.queue.finish(claim, cost=100)
    world.advance(9.9)
    assert claimed(world) == []
    world.advance(0.1)
    (claim,) = world.queue.claim("w", limit=10)
    world.queue.retry(claim, "cheap", delay=500, cost=1)
    world.advance(0.1)
    assert claimed(world) == ["c"]


@pytest.mark.one_partition
def test_a_worker_learns_when_the_rate_of_a_key_lets_the_next_begin(world: World) -> None:
    world.queue.set_limit(KEY, rate=0.5)
    with_keys(world, "a", "b")
    world.claim_one()
    assert claimed(world) == []
    _, _, hint = world.queue.finish_and_claim([], "w", 1)
    assert 1.9 <= hint <= 2.0


def test_a_limit_that_is_removed_lets_all_begin(world: World) -> None:
    world.queue.set_limit(KEY, slots=1)
    with_keys(world, "a", "b", "c")
    assert claimed(world) == ["a"]
    assert claimed(world) == []
    world.queue.set_limit(KEY)
    assert world.queue.get_key_limits() == {}
    assert claimed(world) == ["b", "c"]


def test_a_raised_limit_acts_at_once_on_what_waits(world: World) -> None:
    world.queue.set_limit("account:*", slots=1)
    for account in ("account:1", "account:2"):
        with_keys(world, *(f"{account}/{n}" for n in range(4)), keys=[account])
    assert len(claimed(world)) == 2
    assert claimed(world) == []
    world.queue.set_limit("account:*", slots=3)
    assert len(claimed(world)) == 4


def test_a_changed_pattern_reaches_every_key_that_waits(world: World) -> None:
    """More keys than one script looks at."""
    world.queue.set_limit("k:*", slots=1)
    tasks = [make_task(limit_keys=[f"k:{n % 1200}"]) for n in range(2400)]
    world.queue.push_many(tasks)
    first = []
    while claims := world.queue.claim("w", limit=1000, lease=3600):
        first += claims
    assert len(first) == 1200
    world.queue.set_limit("k:*", slots=2)
    second = []
    for _ in range(40):
        second += world.queue.claim("w", limit=1000, lease=3600)
    assert len(second) == 1200


# --- which limits a key has -----------------------------------------------------------------------


def test_each_key_of_a_pattern_has_slots_of_its_own(world: World) -> None:
    world.queue.set_limit("account:*", slots=1)
    for account in range(3):
        with_keys(world, f"{account}/a", f"{account}/b", keys=[f"account:{account}"])
    with_keys(world, "free", "free too", keys=["region:1"])
    assert sorted(claimed(world)) == ["0/a", "1/a", "2/a", "free", "free too"]


@pytest.mark.parametrize(
    ("key", "slots"),
    [("a:b:c", 4), ("a:b:d", 3), ("a:x", 2), ("z", 1), ("a:", 2), ("a", 1), ("A:b:c", 1)],
)
def test_exact_beats_the_longest_prefix(world: World, key: str, slots: int) -> None:
    for limited, number in (("*", 1), ("a:*", 2), ("a:b:*", 3), ("a:b:c", 4)):
        world.queue.set_limit(limited, slots=number)
    with_keys(world, *(f"t{n}" for n in range(6)), keys=[key])
    assert len(claimed(world)) == slots


def test_the_limits_of_a_key_replace_those_of_its_pattern(world: World) -> None:
    """Nothing is mixed: a key with only a rate has no slots."""
    world.queue.set_limit("account:*", slots=1)
    world.queue.set_limit(KEY, rate=1000.0)
    with_keys(world, "a", "b", "c")
    assert claimed(world) == ["a", "b", "c"]
    world.queue.set_limit(KEY)  # now the pattern counts again, and what runs counts from now on
    with_keys(world, "d", "e")
    assert claimed(world) == ["d"]


def test_limits_of_keys_are_read_as_they_were_set(queue: TaskQueue) -> None:
    queue.set_limit(KEY, slots=1, ordered=True, through_retries=True, scope="tenant")
    queue.set_limit("region:*", rate=2.5)
    queue.set_limits("account:42", slots=7)  # a name, not the key
    assert queue.get_key_limits() == {
        KEY: KeyLimits(slots=1, ordered=True, through_retries=True, scope="tenant"),
        "region:*": KeyLimits(rate=2.5),
    }
    assert queue.get_limits() == {"account:42": HandlerLimits(slots=7)}


def test_a_queue_has_at_most_a_hundred_patterns(world: World) -> None:
    for n in range(100):
        world.queue.set_limit(f"kind{n}:*", slots=1)
    before = world.state()
    with pytest.raises(ConfigurationError, match=r"'more:\*' was not stored.*at most 100 patterns"):
        world.queue.set_limit("more:*", slots=1)
    assert world.state() == before
    world.queue.set_limit("kind7:*", slots=2)  # one that is there is changed,
    world.queue.set_limit("exact", slots=1)  # a key is no pattern,
    world.queue.set_limit("kind7:*")  # and one that is removed makes room
    world.queue.set_limit("more:*", slots=1)
    with_keys(world, "a", "b", keys=["more:7"])
    assert claimed(world) == ["a"]


@pytest.mark.parametrize(
    ("key", "limits", "said"),
    [
        ("", {"slots": 1}, "key must be a string of 1 to 200 characters"),
        ("k" * 201, {"slots": 1}, "key must be a string of 1 to 200 characters"),
        ("a\0b", {"slots": 1}, r"not 'a\x00b'"),
        (7, {"slots": 1}, "not 7"),
        ("a*b", {"slots": 1}, "key must have '*' only at its end, not 'a*b'"),
        ("*a", {"slots": 1}, "key must have '*' only at its end, not '*a'"),
        ("a**", {"slots": 1}, "key must have '*' only at its end, not 'a**'"),
        (KEY, {"slots": -1}, "not -1"),
        (KEY, {"slots": 1001}, "not 1001"),
        (KEY, {"slots": True}, "not True"),
        (KEY, {"rate": 0}, "not 0"),
        (KEY, {"rate": float("nan")}, "not nan"),
        (KEY, {"rate": 1e9}, "not 1000000000"),
        (KEY, {"slots": 1, "scope": "user"}, "scope must be one of queue, tenant, not 'user'"),
        (KEY, {"slots": 1, "ordered": 1}, "ordered must be True or False, not 1"),
        (KEY, {"rate": 1, "ordered": True}, "ordered=True needs slots, such as slots=1"),
        (KEY, {"slots": 1, "through_retries": True}, "through_retries=True needs ordered=True"),
    ],
    ids=repr,
)
def test_bad_limits_are_named_and_nothing_is_stored(
    world: World, key: Any, limits: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        world.queue.set_limit(key, **limits)
    assert said in str(caught.value)
    assert world.dump() == {}


# --- tenants --------------------------------------------------------------------------------------


def test_with_the_scope_of_a_tenant_each_tenant_has_its_own_slots(world: World) -> None:
    world.queue.set_limit(KEY, slots=1, scope="tenant")
    for tenant in ("acme", "blue", None):
        for user in ("ann", "bob"):
            with_keys(world, f"{tenant}/{user}", user_id=user, tenant=tenant)
    # One of each tenant, and one of each user without a tenant.
    assert Counter(task_id.split("/")[0] for task_id in claimed(world)) == {
        "acme": 1,
        "blue": 1,
        "None": 2,
    }
    assert claimed(world) == []


def test_with_the_scope_of_the_queue_tenants_share_the_slots(world: World) -> None:
    world.queue.set_limit(KEY, slots=2)
    for tenant in ("acme", "blue", None):
        with_keys(world, f"{tenant}", tenant=tenant)
    assert len(claimed(world)) == 2


@pytest.mark.parametrize("scope", ["queue", "tenant"])
def test_a_change_of_scope_leaves_nobody_waiting(world: World, scope: str) -> None:
    other = {"queue": "tenant", "tenant": "queue"}[scope]
    world.queue.set_limit(KEY, slots=1, scope=scope)
    for n in range(4):
        with_keys(world, f"t{n}", tenant="acme", user_id=f"u{n}")
    (claim,) = world.queue.claim("w", limit=10)
    world.queue.set_limit(KEY, slots=1, scope=other)
    done = [claim.task.task_id]
    world.queue.finish(claim)
    while claims := world.queue.claim("w", limit=10):
        assert len(claims) == 1
        done += ids_of(claims)
        world.queue.finish(claims[0])
    assert sorted(done) == ["t0", "t1", "t2", "t3"]


@pytest.mark.one_partition
def test_users_of_tenants_take_turns_at_a_key(world: World) -> None:
    """A tenant's many users, and a user's many tasks, bury nobody."""
    world.queue.set_limit(KEY, slots=1)
    for n in range(20):
        for m in range(5):
            with_keys(world, f"big/u{n}/{m}", user_id=f"u{n}", tenant="big")
    for m in range(15):
        with_keys(world, f"small/ann/{m}", user_id="ann", tenant="small")
        with_keys(world, f"-/carl/{m}", user_id="carl")
    started: list[str] = []
    for _ in range(30):
        (claim,) = world.queue.claim("w", limit=10)
        started.append(claim.task.task_id)
        world.queue.finish(claim)
    turns = Counter(task_id.split("/")[0] for task_id in started)
    assert {9 <= turns[who] <= 11 for who in ("big", "small", "-")} == {True}, turns
    users = [task_id.split("/")[1] for task_id in started if task_id.startswith("big")]
    assert len(set(users)) >= len(users) - 2  # almost always another one


@pytest.mark.one_partition
def test_weights_count_for_turns_at_a_key(world: World) -> None:
    world.queue.set_limit(KEY, slots=1)
    world.queue.set_tenant("heavy", weight=3.0)
    for n in range(40):
        with_keys(world, f"heavy{n}", tenant="heavy", user_id=f"u{n}")
        with_keys(world, f"light{n}", tenant="light")
    started = []
    for _ in range(24):
        (claim,) = world.queue.claim("w", limit=10)
        started.append(claim.task.tenant)
        world.queue.finish(claim)
    assert abs(Counter(started)["heavy"] - 18) <= 2


# --- order ----------------------------------------------------------------------------------------


def in_order(world: World, count: int, end: Callable[[Claim], object] | None = None) -> list[str]:
    started = []
    for n in range(count):
        claims = world.queue.claim(f"w{n}", limit=10)
        started += ids_of(claims)
        for claim in claims:
            (end or world.queue.finish)(claim)
    return started


@pytest.mark.one_partition
def test_ordered_tasks_start_in_the_order_of_their_pushes(world: World) -> None:
    world.queue.set_limit(KEY, slots=1, ordered=True)
    expected = []
    for n in range(12):
        user, tenant, level = f"u{n % 3}", (None, "acme")[n % 2], (1, 6, 3)[n % 3]
        world.push("free" + str(n), user_id=user, tenant=tenant)
        with_keys(world, f"t{n}", user_id=user, tenant=tenant, priority=level)
        expected.append(f"t{n}")
    assert [i for i in in_order(world, 30) if not i.startswith("free")] == expected


@pytest.mark.one_partition
@pytest.mark.parametrize("limit", [KEY, "account:*"])
def test_tasks_that_are_held_when_a_key_becomes_ordered_keep_their_order(
    world: World, limit: str
) -> None:
    world.queue.set_limit(limit, slots=1)
    pushed = [f"t{n:03}" for n in range(150)]
    for n, task_id in enumerate(pushed):
        user = "alice" if n < 110 else f"user-{n % 27}"
        with_keys(world, task_id, user_id=user, tenant="acme" if n % 3 else None)
    (first,) = world.queue.claim("w", limit=200)
    world.queue.set_limit(limit, slots=1, ordered=True)
    with_keys(world, "late")
    world.queue.finish(first)
    ran = [first.task.task_id]
    while claims := world.queue.claim("w", limit=10):
        ran += ids_of(claims)
        world.queue.finish_many((claim, None) for claim in claims)
    assert ran[1:] == [i for i in [*pushed, "late"] if i != ran[0]]
    assert not world.dump().keys() & OF_KEYS - {"paced"}


@pytest.mark.one_partition
@pytest.mark.parametrize("removed", [KEY, "account:*"])
def test_held_tasks_keep_their_order_when_an_ordered_pattern_begins_to_apply(
    world: World, removed: str
) -> None:
    world.queue.set_limit("acc*", slots=1, ordered=True)
    world.queue.set_limit(removed, slots=1)
    with_keys(world, "a", "b")
    with_keys(world, "c", user_id="bob")
    (first,) = world.queue.claim("w", limit=10)
    world.queue.set_limit(removed)
    with_keys(world, "late")
    world.queue.finish(first)
    ran = []
    while claims := world.queue.claim("w", limit=10):
        ran += ids_of(claims)
        world.queue.finish_many((claim, None) for claim in claims)
    assert ran == ["b", "c", "late"]


@pytest.mark.one_partition
def test_tasks_that_wait_when_a_key_becomes_ordered_keep_their_order(world: World) -> None:
    with_keys(world, "a", "b", "c")
    world.queue.set_limit(KEY, slots=1, ordered=True)
    claims, ran = world.queue.claim("w", limit=10), []
    with_keys(world, "late")
    while claims:
        ran += ids_of(claims)
        world.queue.finish_many((claim, None) for claim in claims)
        claims = world.queue.claim("w", limit=10)
    assert ran == ["a", "b", "c", "late"]


@pytest.mark.one_partition
def test_a_removed_order_is_forgotten(world: World) -> None:
    world.queue.set_limit(KEY, slots=1, ordered=True)
    with_keys(world, "a", "b")
    world.queue.set_limit(KEY)
    world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=10))
    assert not world.dump().keys() & OF_KEYS
    world.queue.set_limit(KEY, slots=1, ordered=True)
    with_keys(world, "c")
    assert claimed(world) == ["c"]


@pytest.mark.one_partition
def test_places_that_damage_has_left_keep_nobody_waiting(world: World) -> None:
    world.queue.set_limit(KEY, slots=1, ordered=True)
    with_keys(world, "a", "b", "c")
    (first,) = world.queue.claim("w", limit=10)
    places = world.redis.zrange(world.keys["gate_order"], 0, -1)
    world.redis.zrem(world.keys["gate_order"], *places)
    gone = f"o\x03{KEY}\0{0:014}\0gone"
    world.redis.zadd(world.keys["gate_order"], {gone: 0})
    world.queue.finish(first)
    (second,) = world.queue.claim("w", limit=10)
    assert second.task.task_id in ("b", "c")
    world.queue.finish(second)
    assert len(claimed(world)) == 1


@pytest.mark.one_partition
def test_a_task_that_is_held_elsewhere_is_no_finding_when_a_key_becomes_ordered(
    world: World,
) -> None:
    world.queue.set_limits("one", slots=1)
    with_keys(world, "a", "b", name="one")
    assert claimed(world) == ["a"]
    world.queue.set_limit(KEY, slots=1, ordered=True)
    assert [
        each for each in Records(world.queue.link, fix=False).compare() if each.level != OK
    ] == []


@pytest.mark.one_partition
def test_without_order_turns_go_by_user(world: World) -> None:
    world.queue.set_limit(KEY, slots=1)
    with_keys(world, *(f"a{n}" for n in range(5)))
    with_keys(world, "b0", "b1", user_id="bob")
    assert set(in_order(world, 4)) == {"a0", "a1", "b0", "b1"}


@pytest.mark.one_partition
def test_two_ordered_slots_start_the_two_oldest(world: World) -> None:
    world.queue.set_limit(KEY, slots=2, ordered=True)
    with_keys(world, "a", "b")
    with_keys(world, "c", "d", user_id="bob")
    assert sorted(claimed(world)) == ["a", "b"]
    assert claimed(world) == []


@pytest.mark.one_partition
@pytest.mark.parametrize("through_retries", [False, True])
def test_an_ordered_task_keeps_its_place_through_retries_when_asked(
    world: World, through_retries: bool
) -> None:
    world.queue.set_limit(KEY, slots=1, ordered=True, through_retries=through_retries)
    with_keys(world, "a", "b")
    world.queue.retry(world.claim_one(), "not yet", delay=5)
    if through_retries:
        assert claimed(world) == []
        world.advance(5)
        assert in_order(world, 3) == ["a", "b"]
    else:
        assert in_order(world, 3) == ["b"]
        world.advance(5)
        assert claimed(world) == ["a"]


@pytest.mark.one_partition
@pytest.mark.parametrize("end", ["cancel", "purge", "replace", "move", "now"])
def test_a_task_that_waits_for_its_retry_gives_its_place_up_when_it_goes(
    world: World, end: str
) -> None:
    world.queue.set_limit(KEY, slots=1, ordered=True, through_retries=True)
    with_keys(world, "a", unique="u", on_duplicate="replace", unique_for=600)
    with_keys(world, "b", user_id="bob")
    claim = world.claim_one()
    assert claim.task.task_id == "a"
    world.queue.retry(claim, "not yet", delay=500)
    assert claimed(world) == []
    if end == "cancel":
        assert world.queue.cancel("a")
    elif end == "purge":
        assert world.inspector.users.purge("alice", dry_run=False) == 1
    elif end == "replace":  # the last push carries no keys
        world.push("a2", unique="u", on_duplicate="replace", unique_for=600, delay=400)
    elif end == "move":
        world.queue.set_limit(KEY, slots=1, ordered=True, through_retries=True, scope="tenant")
        world.queue.move_user("alice", "acme")
        with_keys(world, "c", "d", user_id="alice")
        assert sorted(in_order(world, 4)) == ["b", "c", "d"]
        return
    else:
        assert world.queue.reschedule("a")
        assert in_order(world, 3) == ["a", "b"]
        return
    assert claimed(world) == ["b"]


@pytest.mark.one_partition
def test_a_moved_task_takes_its_place_in_the_order_along(world: World) -> None:
    world.queue.set_limit(KEY, slots=1, ordered=True, through_retries=True, scope="tenant")
    with_keys(world, "a", tenant="acme")
    with_keys(world, "b", tenant="blue", user_id="bob")
    world.queue.retry(world.claim_one(), "not yet", delay=500)
    assert claimed(world) == ["b"]
    world.queue.move_user("alice", "blue", tenant="acme")
    world.advance(31)  # the lease of b is lost
    assert claimed(world) == []  # a is older, and waits for its retry
    world.advance(500)
    assert in_order(world, 4) == ["a", "b"]


# --- several keys ---------------------------------------------------------------------------------


def test_a_task_has_all_its_keys_or_none(world: World) -> None:
    world.queue.set_limit("*", slots=1)
    with_keys(world, "a", keys=["A"])
    assert claimed(world) == ["a"]
    with_keys(world, "ab", keys=["A", "B"])
    assert claimed(world) == []
    with_keys(world, "b", keys=["B"], user_id="bob")
    # The task of both holds nothing while it waits.
    assert claimed(world) == ["b"]
    assert sorted(world.dump()["slots"]) == ["\x03A\0a", "\x03B\0b"]


@pytest.mark.parametrize("keys", [["A", "B"], ["B", "A"], ["A", "B", "C", "D"]], ids=str)
@pytest.mark.parametrize("users", [1, 3])
def test_streams_of_single_keys_do_not_starve_a_task_of_several(
    world: World, keys: list[str], users: int
) -> None:
    """Tasks of A and of B follow each other without a gap: A+B gets its turn nevertheless."""
    world.queue.set_limit("*", slots=1)
    running: dict[str, Claim] = {}
    number = 0

    def feed() -> None:
        nonlocal number
        for key in keys:
            number += 1
            with_keys(world, f"{key}/{number}", keys=[key], user_id=f"{key}{number % users}")

    def take() -> list[str]:
        claims = world.queue.claim("w", limit=10, lease=600)
        running.update({claim.task.task_id: claim for claim in claims})
        return ids_of(claims)

    for _ in range(3):
        feed()
    take()
    with_keys(world, "all", keys=keys, user_id="zoe")
    rounds = 0
    # A permit has to come round to its partition several times.
    most = 10 * len(keys) * (1 if world.queue.partitions == 1 else 6)
    while "all" not in running and rounds <= most:
        rounds += 1
        feed()
        # One at a time, so that never all keys are free together unless they are kept free.
        world.queue.finish(running.pop(min(running, key=lambda i: int(i.split("/")[1]))))
        world.advance(1)
        take()
    assert "all" in running
    assert rounds <= most
    for claim in running.values():
        world.queue.finish(claim)
    world.check()


def test_a_reservation_outlasts_long_tasks(world: World) -> None:
    """It does not lapse while its task waits for those that run, however long they take."""
    running = make_reservation(world)
    for n in range(40):
        if "both" in running:
            break
        key = "AB"[n % 2] if len(running) == 2 else min(running)
        world.queue.finish(running.pop(key))
        world.push(f"{key}+{n}", limit_keys=[key], user_id=f"{key}'s")
        for claim in world.queue.claim("w", limit=10, lease=24 * 3600):
            task = claim.task
            running["both" if task.task_id == "both" else task.limit_keys[0]] = claim
        world.advance(15 * MINUTE)
    assert "both" in running


def reserved(world: World) -> set[str]:
    """The ids of tasks that reserve a key."""
    members = world.dump().get("gate_order", {})
    return {member.split("\0")[2] for member in members if member.startswith("r")}


def make_reservation(world: World, **fields: Any) -> dict[str, Claim]:
    """Let the task `both` be passed on until it reserves A and B; return what runs."""
    world.queue.set_limit("A", slots=1)
    world.queue.set_limit("B", slots=1)
    running: dict[str, Claim] = {}

    def take() -> None:
        claims = world.queue.claim("w", limit=10, lease=24 * 3600)
        running.update({claim.task.limit_keys[0]: claim for claim in claims})

    with_keys(world, "a0", keys=["A"], user_id="ann")
    with_keys(world, "b0", keys=["B"], user_id="bob")
    take()
    with_keys(world, "both", keys=["A", "B"], user_id="zoe", **fields)
    take()
    for n in range(1, 9):
        if reserved(world):
            break
        key = "AB"[n % 2]
        with_keys(world, f"{key}{n}", keys=[key], user_id={"A": "ann", "B": "bob"}[key])
        world.queue.finish(running.pop(key))
        take()
    assert reserved(world) == {"both"}
    return running


@pytest.mark.one_partition
@pytest.mark.parametrize("end", ["cancel", "expire", "purge", "move", "start"])
def test_a_reservation_goes_with_its_task(world: World, end: str) -> None:
    running = make_reservation(world, expires=3000)
    with_keys(world, "later", keys=["A"], user_id="ann")
    if end == "start":
        for claim in running.values():
            world.queue.finish(claim)
        assert claimed(world) == ["both"]
        assert not reserved(world)
        return
    if end == "cancel":
        assert world.queue.cancel("both")
    elif end == "purge":
        assert world.inspector.users.purge("zoe", dry_run=False) == 1
    elif end == "move":
        assert world.queue.move_user("zoe", "acme") == 1
        assert not reserved(world)
        return
    else:
        world.advance(3000)
        claimed(world)
        assert world.info("both").state == "expired"
    assert not reserved(world)
    world.queue.finish(running["A"])
    assert "later" in claimed(world)


@pytest.mark.one_partition
def test_a_reservation_lapses_if_nobody_takes_the_task(world: World) -> None:
    running = make_reservation(world, name="unknown")
    for claim in running.values():
        world.queue.finish(claim)
    with_keys(world, "later", keys=["A"], user_id="ann")
    assert claimed(world, avoid=["unknown"]) == []
    world.advance(601)
    assert claimed(world, avoid=["unknown"]) == ["later"]
    assert claimed(world) == []
    assert reserved(world) <= {"both"}


def test_of_two_reservations_the_older_one_wins(world: World) -> None:
    """Tasks of A+B and of B+A never wait for each other in a circle."""
    world.queue.set_limit("*", slots=1)
    for n in range(40):
        keys = (["A", "B"], ["B", "A"], ["B", "C"], ["C", "A"])[n % 4]
        with_keys(world, f"t{n}", keys=keys, user_id=f"u{n % 5}")
    done: list[str] = []
    for _ in range(200):
        claims = world.queue.claim("w", limit=10)
        done += ids_of(claims)
        for claim in claims:
            world.queue.finish(claim)
        world.advance(0.2)
    assert sorted(done) == sorted(f"t{n}" for n in range(40))


@pytest.mark.one_partition
def test_a_reservation_of_a_paused_user_keeps_nobody_waiting(world: World) -> None:
    running = make_reservation(world)
    world.queue.pause_user("zoe")
    with_keys(world, "later", keys=["A"], user_id="ann")
    world.queue.finish(running["A"])
    world.advance(1)
    started = claimed(world)
    assert len(started) == 1
    assert started != ["both"]


# --- nobody else ----------------------------------------------------------------------------------


def test_what_waits_for_a_key_blocks_nobody_else(world: World) -> None:
    world.queue.set_limit(KEY, slots=1)
    with_keys(world, *(f"k{n}" for n in range(200)))
    world.push("mine")  # of the same user, behind 200 of them
    world.push("other", user_id="bob")
    with_keys(world, "another key", keys=["account:7"], user_id="carl")
    started: list[str] = []
    for _ in range(4):
        started += claimed(world)
    assert {"mine", "other", "another key"} < set(started)
    assert len(started) == 4


def test_names_are_the_same_machine(world: World) -> None:
    """A task passes the limit of its name and those of its keys, or holds none of them."""
    world.queue.set_limits("report", slots=1)
    world.queue.set_limit(KEY, slots=2)
    with_keys(world, "a", name="report")
    with_keys(world, "b", name="report")
    with_keys(world, "c", "d", name="mail", user_id="bob")
    assert sorted(claimed(world)) == ["a", "c"]
    assert sorted(world.dump()["slots"]) == [f"\x03{KEY}\0a", f"\x03{KEY}\0c", "report\0a"]


def test_a_task_moves_from_the_line_of_its_name_to_that_of_its_key(world: World) -> None:
    world.queue.set_limits("report", slots=1)
    world.queue.set_limit(KEY, slots=1)
    with_keys(world, "a", name="report", keys=["other"])
    with_keys(world, "b", name="mail", user_id="bob")
    running = {claim.task.task_id: claim for claim in world.queue.claim("w", limit=10)}
    with_keys(world, "ab", name="report", user_id="carl")
    assert claimed(world) == []
    world.queue.finish(running["a"])
    assert claimed(world) == []
    world.queue.finish(running["b"])
    assert claimed(world) == ["ab"]


@pytest.mark.one_partition
def test_idle_keys_leave_nothing_behind(world: World) -> None:
    world.queue.configure(keep_finished=0)
    world.queue.set_limit("account:*", slots=1, rate=1000.0, ordered=True)
    world.queue.set_limit("region:*", slots=2, scope="tenant")
    for n in range(50):
        keys = [f"account:{n}", f"region:{n % 3}"]
        with_keys(world, f"a{n}", f"b{n}", keys=keys, user_id=f"u{n % 4}", tenant="acme")
    for _ in range(60):
        world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=20))
        world.advance(0.05)
    assert world.stats()["finished"] == 100
    assert not world.dump().keys() & OF_KEYS


@pytest.mark.one_partition
@pytest.mark.parametrize("limits", [{"slots": 1}, {"slots": 1, "rate": 0.1}])
def test_a_debt_goes_though_all_slots_are_in_use(world: World, limits: dict[str, Any]) -> None:
    world.queue.set_limit("account:*", rate=0.1)
    with_keys(world, "a")
    world.queue.finish_many((claim, None) for claim in world.queue.claim("w"))
    assert "paced" in world.dump()
    world.queue.set_limit("account:*", **limits)
    with_keys(world, "b", "c")
    claims = world.queue.claim("w", limit=10, lease=60)
    if not claims:
        world.advance(10)
        claims = world.queue.claim("w", limit=10, lease=60)
    world.queue.claim("w")
    world.queue.cancel("c")
    world.queue.finish_many((claim, None) for claim in claims)
    world.advance(30)
    assert claimed(world) == []
    assert not world.dump().keys() & OF_KEYS


def test_a_claim_reads_limits_of_the_keys_that_it_meets(own_server: OwnServer) -> None:
    """A hundred thousand keys with limits cost a claim no more than a hundred."""

    def cost(keys: int) -> Counter[str]:
        with redis.Redis.from_url(own_server().url) as client, TaskQueue(client) as queue:
            queue.set_limit("k:0", slots=1)
            text = b'{"slots":1}'
            for start in range(1, keys, 1000):
                fields = {b"\x03k:%d" % n: text for n in range(start, min(keys, start + 1000))}
                client.hset(queue.keys["limits"], mapping=fields)
            push(queue, "a", "b", limit_keys=["k:0"])
            queue.check()
            before = count_commands(client)
            (claim,) = queue.claim("w", limit=10)
            queue.finish(claim)
            assert len(queue.claim("w", limit=10)) == 1
            after = count_commands(client)
            after.subtract(before)
            return Counter({name: n for name, n in after.items() if n and name != "info"})

    assert cost(100_000) == cost(100)


# --- what is said ---------------------------------------------------------------------------------


def test_a_task_that_waits_for_a_key_is_explained(world: World) -> None:
    world.beat()
    world.queue.set_limit(KEY, slots=1)
    with_keys(world, "a", "b")
    claimed(world)
    claimed(world)
    found = world.queue.explain("b")
    assert found is not None
    assert KEY in found.summary
    assert found.waits_for_slot
    assert found.reasons[0].code == "key_slots"


@pytest.mark.one_partition
@pytest.mark.parametrize("pushed", ["before", "before and after"])
def test_tasks_that_are_held_when_their_key_becomes_ordered_start_in_order(
    world: World, pushed: str
) -> None:
    world.queue.set_limit(KEY, slots=1)
    for n in range(6):
        with_keys(world, f"t{n}", user_id=f"u{n % 2}")
    first = world.claim_one()
    assert claimed(world) == []  # now all are held
    world.queue.set_limit(KEY, slots=1, ordered=True)
    expected = [f"t{n}" for n in range(6) if f"t{n}" != first.task.task_id]
    if pushed == "before and after":
        with_keys(world, "late", user_id="u9")
        assert claimed(world) == []
        expected.append("late")
    world.queue.finish(first)
    started = []
    for _ in range(30):
        claims = world.queue.claim("w", limit=10)
        started += ids_of(claims)
        world.queue.finish_many((claim, None) for claim in claims)
        world.advance(0.5)
    assert started == expected


@pytest.mark.one_partition
def test_a_task_that_waits_when_its_key_becomes_ordered_is_not_forgotten(world: World) -> None:
    """It is first looked at when the key is ordered already, and all its slots are in use."""
    world.queue.set_limit(KEY, slots=1)
    with_keys(world, "a")
    first = world.claim_one()
    with_keys(world, "b", user_id="bob")
    world.queue.set_limit(KEY, slots=1, ordered=True)
    assert claimed(world) == []
    world.queue.finish(first)
    assert claimed(world) == ["b"]
