"""Tenants take turns, and the users of a tenant take turns in its share."""

import random
from collections import Counter

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.state import count_commands
from helpers.tasks import fill, ids_of, push
from helpers.world import World

from fairqueue.errors import QueueFull
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.validation import Priority


def served(queue: TaskQueue, count: int, *, finish: bool = True) -> list[tuple[str | None, str]]:
    """Claim `count` tasks one by one; return their tenants and users in order."""
    found = []
    for _ in range(count):
        for claim in queue.claim("w"):
            found.append((claim.task.tenant, claim.task.user_id))
            if finish:
                queue.finish(claim)
    return found


def tenants_of(found: list[tuple[str | None, str]]) -> Counter[str | None]:
    return Counter(tenant for tenant, _ in found)


def users_of(found: list[tuple[str | None, str]], tenant: str | None) -> Counter[str]:
    return Counter(user for its_tenant, user in found if its_tenant == tenant)


# --- turns ----------------------------------------------------------------------------------------


def test_many_user_ids_gain_a_tenant_nothing(queue: TaskQueue) -> None:
    queue.push_many(Task.create(user_id=f"u{n}", tenant="crowd") for n in range(1000))
    fill(queue, "ann", 100, tenant="lone")
    fill(queue, "bob", 100)
    assert tenants_of(served(queue, 150)) == {"crowd": 50, "lone": 50, None: 50}


def test_tenants_and_users_of_a_tenant_take_turns(queue: TaskQueue) -> None:
    for tenant, users in (("acme", "abc"), ("globex", "xy"), (None, "z")):
        for user in users:
            fill(queue, user, 30, tenant=tenant)
    found = served(queue, 90)
    for start in range(0, 90, 3):
        assert {tenant for tenant, _ in found[start : start + 3]} == {"acme", "globex", None}
    assert users_of(found, "acme") == {"a": 10, "b": 10, "c": 10}
    assert users_of(found, "globex") == {"x": 15, "y": 15}


def two_tenants(queue: TaskQueue, count: int = 60) -> None:
    """Ann and Bob of acme, Cy of globex, each with a backlog."""
    for tenant, user in (("acme", "ann"), ("acme", "bob"), ("globex", "cy")):
        fill(queue, user, count, tenant=tenant)


def test_weights_count_on_their_own_level(queue: TaskQueue) -> None:
    queue.set_tenant("acme", weight=2.0)
    queue.set_user("ann", tenant="acme", weight=3.0)
    queue.set_user("cy", tenant="globex", weight=50.0)
    two_tenants(queue)
    found = served(queue, 60)
    assert tenants_of(found) == {"acme": 40, "globex": 20}
    assert users_of(found, "acme") == {"ann": 30, "bob": 10}


def test_new_weights_act_on_what_already_waits(queue: TaskQueue) -> None:
    two_tenants(queue)
    served(queue, 6)
    queue.set_tenant("acme", weight=4.0)
    assert tenants_of(served(queue, 50)) == {"acme": 40, "globex": 10}
    queue.set_tenant("acme", weight=1.0)
    queue.set_user("bob", tenant="acme", weight=4.0)
    found = served(queue, 30)
    assert tenants_of(found)["globex"] in (14, 15, 16)
    assert users_of(found, "acme")["bob"] in (11, 12, 13)


def test_a_weight_rescales_only_the_tag_of_its_level(world: World) -> None:
    two_tenants(world.queue)
    served(world.queue, 7)
    before = world.dump()
    world.queue.set_user("ann", tenant="acme", weight=4.0)
    after = world.dump()
    assert after["ready"] == before["ready"]
    moved = {seat for seat, tag in after["tags"].items() if tag != before["tags"][seat]}
    assert moved == {"r\x02acme\x02ann"}
    world.queue.set_tenant("acme", weight=4.0)
    assert world.dump()["tags"] == after["tags"]
    assert world.dump()["ready"] != after["ready"]


def test_a_stream_of_new_tenants_does_not_starve_a_backlogged_one(queue: TaskQueue) -> None:
    """It gets the share of one among all who wait, as a user without tenants does."""
    fill(queue, "ann", 400, tenant="acme")
    found = []
    for n in range(400):
        push(queue, f"new-{n}", user_id="ann", tenant=f"new-{n}")
        found += served(queue, 1)
    assert tenants_of(found)["acme"] >= 20


def test_a_stream_of_new_users_takes_from_their_tenant_only(queue: TaskQueue) -> None:
    fill(queue, "ann", 400, tenant="acme")
    fill(queue, "cy", 400, tenant="globex")
    found = []
    for n in range(400):
        push(queue, f"new-{n}", user_id=f"new-{n}", tenant="acme")
        found += served(queue, 2)
    assert tenants_of(found) == {"acme": 400, "globex": 400}
    assert users_of(found, "acme")["ann"] >= 20


@pytest.mark.parametrize("who", ["tenant", "user"])
def test_leaving_and_coming_back_gains_nothing(queue: TaskQueue, who: str) -> None:
    """Whoever always has just one task waiting gets no more than one with a backlog."""
    comes, stays = (("x", "u"), ("y", "u")) if who == "tenant" else (("x", "a"), ("x", "b"))
    push(queue, *(f"stays-{n}" for n in range(100)), user_id=stays[1], tenant=stays[0])
    found = []
    for n in range(100):
        if not queue.size(comes[1], tenant=comes[0]):
            push(queue, f"comes-{n}", user_id=comes[1], tenant=comes[0])
        found += served(queue, 1)
    assert 45 <= Counter(found)[comes] <= 50


def test_a_tenant_that_is_back_after_all_was_served_has_no_debt(queue: TaskQueue) -> None:
    fill(queue, "ann", 40, tenant="acme")
    served(queue, 40)
    push(queue, *(f"again-{n}" for n in range(20)), user_id="ann", tenant="acme")
    fill(queue, "cy", 20, tenant="globex")
    assert tenants_of(served(queue, 20)) == {"acme": 10, "globex": 10}


def test_release_loops_gain_nothing(queue: TaskQueue) -> None:
    two_tenants(queue, 40)
    for _ in range(50):
        queue.release(queue.claim("w")[0])
    found = served(queue, 40)
    assert tenants_of(found) == {"acme": 20, "globex": 20}
    assert users_of(found, "acme") == {"ann": 10, "bob": 10}


@pytest.mark.parametrize("seed", range(6))
def test_a_tenant_of_one_user_is_served_as_a_user_without_one(world: World, seed: int) -> None:
    rng = random.Random(seed)
    steps = [(rng.randrange(6), rng.random(), rng.choice([1, 3, 3, 6])) for _ in range(400)]

    def order(as_tenants: bool) -> list[str]:
        found: list[str] = []
        world.redis.flushdb()
        world.queue.configure(critical_share=0.3)
        for at, (n, change, level) in enumerate(steps):
            settings = {"paused": change < 0.05} if change < 0.1 else {"weight": 1 + 10 * change}
            if change > 0.4:
                user, tenant = ("u", f"t{n}") if as_tenants else (f"u{n}", None)
                world.push(f"{n}-{at}", user_id=user, tenant=tenant, priority=level)
            elif change > 0.2:
                found += ids_of(world.queue.claim("w", limit=int(100 * change) % 5 + 1))
            elif as_tenants:
                world.queue.set_tenant(f"t{n}", **settings)
            else:
                world.queue.set_user(f"u{n}", **settings)
        return found

    assert order(as_tenants=True) == order(as_tenants=False)


@pytest.mark.parametrize("seed", range(6))
def test_users_of_the_only_tenant_are_served_as_without_it(world: World, seed: int) -> None:
    rng = random.Random(seed)
    steps = [(rng.randrange(6), rng.random(), rng.choice([1, 3, 3, 5])) for _ in range(400)]

    def order(tenant: str | None) -> list[str]:
        found: list[str] = []
        world.redis.flushdb()
        for at, (n, change, level) in enumerate(steps):
            settings = {"paused": change < 0.05} if change < 0.1 else {"weight": 1 + 10 * change}
            if change > 0.4:
                world.push(f"{n}-{at}", user_id=f"u{n}", tenant=tenant, priority=level)
            elif change > 0.2:
                found += ids_of(world.queue.claim("w", limit=int(100 * change) % 5 + 1))
            else:
                world.queue.set_user(f"u{n}", tenant=tenant, **settings)
        return found

    assert order("acme") == order(None)


def crowded(world: World, seed: int) -> None:
    """Tenants and users of several weights and caps, with tasks of several levels in two pools."""
    rng = random.Random(seed)
    world.queue.configure(critical_share=rng.choice([0.0, 0.2, 0.5, 1.0]))
    for tenant in ("t0", "t1", "t2", None):
        if tenant:
            cap = rng.choice([None, None, 40])
            world.queue.set_tenant(tenant, weight=rng.choice([0.5, 1.0, 3.0]), max_running=cap)
        for n in range(rng.randint(1, 6)):
            weight = rng.choice([0.5, 1.0, 2.0])
            cap = rng.choice([None, None, 10])
            world.queue.set_user(f"u{n}", tenant=tenant, weight=weight, max_running=cap)
            for k in range(rng.randint(1, 15)):
                level = rng.choice([1, 3, 3, 3, 5, 6])
                task_id = f"{tenant}-u{n}-{k}"
                world.push(task_id, user_id=f"u{n}", tenant=tenant, priority=level)


def order_of_serves(world: World, limit: int) -> list[str]:
    order: list[str] = []
    while claims := world.queue.claim("w", limit=limit):
        order += ids_of(claims)
    world.check()
    return order


@pytest.mark.parametrize("limit", [2, 7, 30, 200])
@pytest.mark.parametrize("seed", range(4))
def test_turns_do_not_depend_on_the_claims_size(world: World, limit: int, seed: int) -> None:
    crowded(world, seed)
    together = order_of_serves(world, limit)
    world.redis.flushdb()
    crowded(world, seed)
    assert together == order_of_serves(world, 1)
    assert len(together) == len(set(together))


# --- the CRITICAL lane ----------------------------------------------------------------------------


def test_critical_tasks_are_charged_on_both_levels(queue: TaskQueue) -> None:
    queue.configure(critical_share=1.0)
    two_tenants(queue, 40)
    critical = (f"critical-{n}" for n in range(10))
    push(queue, *critical, user_id="ann", tenant="acme", priority=Priority.CRITICAL)
    assert users_of(served(queue, 10), "acme") == {"ann": 10}
    found = served(queue, 20)
    assert tenants_of(found) == {"acme": 5, "globex": 15}
    assert users_of(found, "acme")["bob"] == 5


def test_the_critical_lane_is_fair_between_tenants_and_in_them(queue: TaskQueue) -> None:
    queue.configure(critical_share=1.0)
    for tenant, users in (("acme", "abcd"), ("globex", "x")):
        for user in users:
            ids = (f"{user}-{n}" for n in range(20))
            push(queue, *ids, user_id=user, tenant=tenant, priority=Priority.CRITICAL)
    found = served(queue, 24)
    assert tenants_of(found) == {"acme": 12, "globex": 12}
    assert users_of(found, "acme") == dict.fromkeys("abcd", 3)


def test_the_lane_has_no_more_than_its_share_however_many_tenants_use_it(queue: TaskQueue) -> None:
    queue.configure(critical_share=0.25)
    fill(queue, "plain", 100)
    for n in range(20):
        ids = (f"{n}-{k}" for k in range(20))
        push(queue, *ids, user_id="u", tenant=f"t{n}", priority=Priority.CRITICAL)
    fill(queue, "calm", 100, tenant="calm")
    found = served(queue, 88)
    in_turn = 88 * 0.75 / 22
    assert tenants_of(found)["calm"] >= in_turn - 1
    assert tenants_of(found)[None] >= in_turn - 1


def test_a_tenant_leaves_the_lane_with_its_last_critical_task(world: World) -> None:
    two_tenants(world.queue, 5)
    push(world.queue, "c", user_id="bob", tenant="acme", priority=Priority.CRITICAL)
    assert list(world.dump()["critical"]) == ["\x02acme"]
    assert world.claim_one().task.task_id == "c"
    assert "critical" not in world.dump()
    world.check()


# --- limits of a tenant ---------------------------------------------------------------------------


def test_a_cap_of_a_tenant_holds_over_its_users(world: World) -> None:
    world.queue.set_tenant("acme", max_running=3)
    for user in ("ann", "bob", "cy", "dan"):
        fill(world.queue, user, 5, tenant="acme")
    fill(world.queue, "eve", 2, tenant="globex")
    claims = world.queue.claim("w", limit=20)
    assert Counter(claim.task.tenant for claim in claims) == {"acme": 3, "globex": 2}
    assert world.queue.claim("w") == []
    world.queue.finish(claims[0])
    assert len(world.queue.claim("w", limit=20)) == 1
    world.check()


def test_caps_hold_on_both_levels(world: World) -> None:
    world.queue.set_tenant("acme", max_running=5)
    world.queue.set_user("ann", tenant="acme", max_running=1)
    fill(world.queue, "ann", 9, tenant="acme")
    fill(world.queue, "bob", 9, tenant="acme")
    found = Counter(c.task.user_id for c in world.queue.claim("w", limit=20))
    assert found == {"ann": 1, "bob": 4}


def test_a_rate_of_a_tenant_holds_over_its_users(world: World) -> None:
    world.queue.set_tenant("acme", rate=2.0)
    for user in ("ann", "bob", "cy", "dan"):
        fill(world.queue, user, 30, tenant="acme")
    begun = []
    for _ in range(100):
        begun += world.queue.claim("w", limit=20, lease=3600)
        world.advance(0.1)
    assert 20 <= len(begun) <= 23
    counts = Counter(claim.task.user_id for claim in begun).values()
    assert max(counts) - min(counts) <= 1


def test_a_paused_tenant_is_not_served_and_comes_back_as_no_newcomer(world: World) -> None:
    two_tenants(world.queue)
    served(world.queue, 10)
    world.queue.set_tenant("acme", paused=True)
    assert tenants_of(served(world.queue, 10)) == {"globex": 10}
    world.queue.set_tenant("acme", paused=False)
    # It does not get what it missed, and is not last either.
    assert tenants_of(served(world.queue, 20))["acme"] in (10, 11)
    world.check()


def test_a_tenant_whose_users_are_all_paused_leaves_and_comes_back(world: World) -> None:
    two_tenants(world.queue)
    served(world.queue, 10)
    for user in ("ann", "bob"):
        world.queue.set_user(user, tenant="acme", paused=True)
    assert "\x02acme" not in world.dump()["ready"]
    assert tenants_of(served(world.queue, 10)) == {"globex": 10}
    world.queue.set_user("bob", tenant="acme", paused=False)
    assert users_of(served(world.queue, 20), "acme")["bob"] in (10, 11)
    world.check()


def test_toggling_a_pause_gains_nothing(queue: TaskQueue) -> None:
    two_tenants(queue)
    found = []
    for _ in range(40):
        queue.set_tenant("acme", paused=True)
        queue.set_tenant("acme", paused=False)
        found += served(queue, 1)
    assert tenants_of(found) == {"acme": 20, "globex": 20}


def test_a_pause_of_a_tenant_holds_for_a_user_whose_own_pause_ends(world: World) -> None:
    two_tenants(world.queue, 2)
    world.queue.set_user("ann", tenant="acme", paused=True)
    world.queue.set_tenant("acme", paused=True)
    world.queue.set_user("ann", tenant="acme", paused=False)
    assert tenants_of(served(world.queue, 4)) == {"globex": 2}
    world.queue.set_tenant("acme", paused=False)
    assert tenants_of(served(world.queue, 6)) == {"acme": 4}


def test_a_tenant_may_have_so_many_waiting_tasks(world: World) -> None:
    world.queue.set_tenant("acme", max_waiting=3)
    world.push("a", "b", user_id="ann", tenant="acme")
    world.push("c", user_id="bob", tenant="acme")
    with pytest.raises(
        QueueFull, match="'d' was not stored: max_waiting is reached for the tenant"
    ):
        world.push("d", "e", user_id="cy", tenant="acme")
    world.push("f", user_id="cy", tenant="globex")
    assert world.queue.size() == 4


# --- what is stored -------------------------------------------------------------------------------


def test_what_is_stored_of_users_goes_with_their_tenant(world: World) -> None:
    """After a while nothing is left of a tenant with many users, removed in bounded steps."""
    for n in range(300):
        world.push(f"t{n}", user_id=f"u{n}", tenant="crowd")
    for n in range(50):
        world.push(f"x{n}", user_id="x", tenant="other")
    served(world.queue, 100)
    for n in range(250):
        world.push(f"y{n}", user_id="y", tenant="other")
    served(world.queue, 600)
    assert world.queue.size() == 0
    world.push("end", user_id="z")
    served(world.queue, 40)
    for _ in range(20):
        world.queue.claim("w")
    world.check()
    kept = [f for f in world.dump().get("tags", {}) if "crowd" in f]
    assert kept == []
    assert "\x02crowd" not in world.dump().get("clocks", {})


def test_a_claim_does_not_walk_users_who_may_not_be_served(own_server: OwnServer) -> None:
    """Paused users of a tenant, and paused tenants, cost a claim nothing."""

    def cost(paused: int) -> Counter[str]:
        with redis.Redis.from_url(own_server().url) as client, TaskQueue(client) as queue:
            for n in range(paused):
                queue.set_user(f"u{n}", tenant="acme", paused=True)
                queue.set_tenant(f"t{n}", paused=True)
                push(queue, f"u{n}", user_id=f"u{n}", tenant="acme")
                push(queue, f"t{n}", user_id="u", tenant=f"t{n}")
            two_tenants(queue, 30)
            served(queue, 10)
            before = count_commands(client)
            served(queue, 5)
            after = count_commands(client)
            after.subtract(before)
            return Counter({name: n for name, n in after.items() if n and name != "info"})

    assert cost(200) == cost(2)


# --- what users are told --------------------------------------------------------------------------


def test_explain_answers_on_both_levels(world: World) -> None:
    world.beat()
    for n in range(3):
        world.push(f"x{n}", user_id="u", tenant=f"a{n}")
    for n in range(14):
        world.push(f"l{n}", user_id=f"u{n}", tenant="lakeside")
    found = world.queue.explain("l1")
    assert found is not None
    assert (found.tenants_ahead, found.users_ahead) == (3, 1)
    assert found.summary == (
        "Tenant 'lakeside' is served after 3 others; among its 14 waiting users, 'u1' is 2nd."
    )
    world.queue.set_tenant("lakeside", paused=True)
    found = world.queue.explain("l1")
    assert found is not None
    assert "Tenant 'lakeside' is paused" in found.summary


def test_a_tenant_in_the_critical_lane_stays_when_a_worker_wants_none_of_its_tasks(
    world: World,
) -> None:
    world.push("urgent", user_id="eve", tenant="acme", priority=6)
    world.push("wanted", user_id="ann", tenant="globex", name="mail")
    assert ids_of(world.queue.claim("w", limit=5, names=["mail"])) == ["wanted"]
    world.check()
    assert ids_of(world.queue.claim("w", limit=5)) == ["urgent"]
