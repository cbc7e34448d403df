"""Calls about a user select the pair of tenant and user id; a tenant has what a user has."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from helpers.tasks import ids_of, make_task
from helpers.world import World

from fairqueue import Task
from fairqueue.aio import AsyncTaskQueue
from fairqueue.errors import ConfigurationError, InvalidTask, QueueFull
from fairqueue.models import UserSettings
from fairqueue.queue.queue import QueueOperations, TaskQueue

PAIRS = ((None, "ann"), ("acme", "ann"), ("globex", "ann"), ("acme", "bob"), ("globex", "bob"))


def fill(world: World, count: int = 3) -> None:
    """Give each pair some tasks: ready, delayed, held by a limit, and in another pool."""
    world.queue.set_limit("k", slots=1)
    world.push("blocker", user_id="zoe", limit_keys=["k"])
    world.claim_one(lease=3600)
    for tenant, user in PAIRS:
        for n in range(count):
            fields: dict[str, Any] = {"user_id": user, "tenant": tenant}
            world.push(f"{tenant}/{user}/held{n}", limit_keys=["k"], **fields)
    while world.queue.claim("w", limit=50):
        pass
    for tenant, user in PAIRS:
        for n in range(count):
            fields = {"user_id": user, "tenant": tenant}
            world.push(f"{tenant}/{user}/ready{n}", **fields)
            world.push(f"{tenant}/{user}/pool{n}", pool="gpu", **fields)
            world.push(f"{tenant}/{user}/later{n}", delay=500, **fields)


def unfinished(world: World) -> dict[str, int]:
    """How many tasks wait or are delayed, by `tenant/user`."""
    found: dict[str, int] = {}
    for task_id, record in world.dump()["status"].items():
        if record["state"] in ("ready", "delayed"):
            pair = task_id.rpartition("/")[0]
            found[pair] = found.get(pair, 0) + 1
    return found


# --- sizes and purges -----------------------------------------------------------------------------


def test_sizes_are_of_a_pair_a_tenant_a_user_id_or_the_queue(world: World) -> None:
    fill(world, 2)
    size = world.queue.size
    assert size("ann", tenant="acme") == size("bob", tenant="globex") == 6
    assert size(tenant="acme") == 12
    assert size("ann") == 18  # of all tenants and of none
    assert size("bob") == 12
    assert size() == 30
    assert size("nobody") == size("ann", tenant="nowhere") == size(tenant="nowhere") == 0


def test_sizes_do_not_mix_names_that_begin_alike(world: World) -> None:
    for tenant, user in (("a", "b"), ("ab", "c"), ("a", "bc"), (None, "a"), (None, "ab")):
        world.push(f"{tenant}/{user}", user_id=user, tenant=tenant)
    assert world.queue.size(tenant="a") == 2
    assert world.queue.size(tenant="ab") == 1
    assert world.queue.size("b") == world.queue.size("b", tenant="a") == 1
    assert world.queue.size("a") == 1


@pytest.mark.parametrize(
    ("user", "tenant"), [("ann", None), ("ann", "acme"), ("bob", "globex"), (None, "acme")]
)
def test_a_purge_is_of_a_pair_or_of_a_tenant(
    world: World, user: str | None, tenant: str | None
) -> None:
    fill(world)
    if user is None:
        hit = {f"{t}/{u}" for t, u in PAIRS if t == tenant}
        dropped = world.inspector.tenants.purge(str(tenant), dry_run=False)
    else:
        hit = {f"{tenant}/{user}"}
        dropped = world.inspector.users.purge(user, tenant=tenant, dry_run=False)
    assert dropped == 12 * len(hit)
    left = unfinished(world)
    assert left == {f"{t}/{u}": 12 for t, u in PAIRS if f"{t}/{u}" not in hit}
    world.check()
    cancelled = world.history.runs("cancelled", limit=100)
    assert {run.task_id.rpartition("/")[0] for run in cancelled} == hit


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("paused", PAIRS, ids=str)
def test_a_pause_is_of_one_pair(world: World, paused: tuple[str | None, str]) -> None:
    for tenant, user in PAIRS:
        world.push(f"{tenant}/{user}", user_id=user, tenant=tenant)
        world.push(f"{tenant}/{user}/gpu", user_id=user, tenant=tenant, pool="gpu")
    tenant, user = paused
    world.queue.pause_user(user, tenant=tenant, note="enough", by="op")
    settings = world.queue.get_user(user, tenant=tenant)
    assert (settings.paused, settings.pause_note, settings.tenant) == (True, "enough", tenant)
    started = ids_of(world.queue.claim("w", limit=50, pools=["default", "gpu"]))
    assert len(started) == 8
    assert not any(task_id.startswith(f"{tenant}/{user}") for task_id in started)
    world.queue.resume_user(user, tenant=tenant)
    assert len(world.queue.claim("w", limit=50, pools=["default", "gpu"])) == 2


def test_a_pause_of_a_tenant_ends_by_itself(world: World) -> None:
    world.push("a", tenant="acme")
    until = world.now() + timedelta(seconds=60)
    settings = world.queue.set_tenant("acme", paused=True, note="night", by="op", until=until)
    assert (settings.paused_until, settings.paused_by) == (until, "op")
    assert world.queue.claim("w") == []
    world.advance(60)
    assert ids_of(world.queue.claim("w")) == ["a"]
    assert world.queue.get_tenant("acme") == UserSettings(tenant="acme")


def test_settings_of_a_tenant_are_a_patch(world: World) -> None:
    queue = world.queue
    queue.set_tenant("acme", weight=2.0, max_running=5)
    queue.set_tenant("acme", rate=3, max_waiting=7)
    assert queue.get_tenant("acme") == UserSettings(
        weight=2.0, max_running=5, rate=3.0, max_waiting=7, tenant="acme"
    )
    queue.set_tenant("acme", max_running=None, rate=None, max_waiting=None)
    assert queue.get_tenant("acme") == UserSettings(weight=2.0, tenant="acme")
    assert queue.get_user("acme") == UserSettings()  # a user of that name is somebody else
    assert queue.get_user("ann", tenant="acme") == UserSettings(tenant="acme")


def test_max_waiting_is_of_the_pair_and_of_the_tenant(world: World) -> None:
    world.queue.set_user("ann", tenant="acme", max_waiting=1)
    world.queue.set_tenant("acme", max_waiting=2)
    world.push("1", user_id="ann", tenant="acme")
    with pytest.raises(QueueFull, match="'2' was not stored: max_waiting is reached for the user"):
        world.push("2", user_id="ann", tenant="acme")
    world.push("3", user_id="bob", tenant="acme")
    with pytest.raises(QueueFull, match="max_waiting is reached for the tenant"):
        world.push("4", user_id="bob", tenant="acme")
    world.push("5", "6", user_id="ann")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight": 0}, "weight must be a number from 0.01 to 1000, not 0"),
        ({"weight": 0.009}, "not 0.009"),
        ({"weight": 1000.1}, "not 1000.1"),
        ({"weight": float("nan")}, "not nan"),
        ({"weight": None}, "not None"),
        ({"max_running": 0}, "not 0"),
        ({"max_waiting": -1}, "not -1"),
        ({"rate": 0}, "not 0"),
        ({"paused": "yes"}, "paused must be True or False, not 'yes'"),
        ({"note": "x"}, "note, by and until are for a pause"),
        ({"paused": True, "until": 5}, "is in the past"),
    ],
    ids=repr,
)
def test_bad_settings_are_named_and_nothing_is_stored(
    world: World, settings: dict[str, Any], said: str
) -> None:
    calls: list[Any] = [
        lambda: world.queue.set_tenant("acme", **settings),
        lambda: world.queue.set_user("ann", tenant="acme", **settings),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        assert said in str(caught.value)
    assert not {key for key in world.dump() if key not in ("ops", "ops_before")}


@pytest.mark.parametrize("tenant", ["a\x02b", "\x03", "a\nb", "", "a b", "x" * 65, 7], ids=repr)
def test_a_tenant_with_control_characters_is_refused_everywhere(world: World, tenant: Any) -> None:
    calls: list[Any] = [
        lambda: make_task(tenant=tenant),
        lambda: world.queue.set_tenant(tenant, weight=2),
        lambda: world.queue.get_tenant(tenant),
        lambda: world.queue.set_user("ann", tenant=tenant),
        lambda: world.queue.get_user("ann", tenant=tenant),
        lambda: world.queue.move_user("ann", tenant),
        lambda: world.queue.move_user("ann", "acme", tenant=tenant),
        lambda: world.queue.size(tenant=tenant),
        lambda: world.queue.size("ann", tenant=tenant),
        lambda: world.queue.quote("ann", tenant=tenant),
    ]
    for call in calls:
        with pytest.raises((InvalidTask, ConfigurationError), match="tenant must be 1 to 64"):
            call()
    assert world.dump() == {}


# --- moving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [None, "acme"])
@pytest.mark.parametrize("new", [None, "globex", "new"])
def test_moving_takes_all_that_waits_along(world: World, old: str | None, new: str | None) -> None:
    if old == new:
        with pytest.raises(ConfigurationError, match="must move to another tenant, not None"):
            world.queue.move_user("ann", new, tenant=old)
        return
    fill(world)
    before = unfinished(world)
    world.queue.set_user("ann", tenant=old, weight=3.0)
    world.push(f"{old}/ann/runs", user_id="ann", tenant=old, priority=6)
    (running,) = world.queue.claim("w")
    assert running.task.task_id == f"{old}/ann/runs"
    assert world.queue.move_user("ann", new, tenant=old) == 12
    assert unfinished(world) == before
    for task_id, record in world.dump()["status"].items():
        if task_id.startswith(f"{old}/ann/") and record["state"] in ("ready", "delayed"):
            assert record.get("group") == record.get("tenant") == new
    assert world.info(running.task.task_id).tenant == old
    world.queue.finish(running)
    assert world.queue.get_user("ann", tenant=new).weight == 3.0
    assert world.queue.get_user("ann", tenant=old).weight == 1.0
    assert world.queue.size("ann", tenant=old) == (0 if old else world.queue.size("ann"))
    world.check()
    claimed = ids_of(world.queue.claim("w", limit=1000, pools=["default", "gpu"]))
    assert len(claimed) == len(PAIRS) * 6  # what is held stays held
    claim = next(c for c in claimed if c.startswith(f"{old}/ann/ready"))
    document = world.info(claim).task
    assert document is not None
    assert document.tenant == new


def test_moving_does_not_replace_settings_that_are_there(world: World) -> None:
    world.queue.set_user("ann", weight=3.0)
    world.queue.set_user("ann", tenant="acme", weight=5.0)
    world.queue.move_user("ann", "acme")
    assert world.queue.get_user("ann", tenant="acme").weight == 5.0
    assert world.queue.get_user("ann").weight == 3.0


def test_moved_tasks_keep_their_order_and_their_ids(world: World) -> None:
    world.push("a", "b", "c", priority=3)
    world.push("first", priority=5)
    world.queue.move_user("alice", "acme")
    assert ids_of(world.queue.claim("w", limit=10)) == ["first", "a", "b", "c"]
    task = Task.create(user_id="alice", task_id="a", name="default")
    assert world.queue.push(task) == "a"  # its push is still recognised


def test_a_move_of_many_tasks_goes_on_where_it_was_cut(world: World) -> None:
    world.fill("ann", 350)
    arguments: dict[str, Any] = {"user": "ann", "tenant": "", "to": "acme", "limit": 100}
    assert world.queue.link.run("move_user", op="1", **arguments) == 100
    world.check()
    assert world.queue.size("ann", tenant="acme") == 100
    assert world.queue.move_user("ann", "acme") == 250
    assert world.queue.size("ann", tenant="acme") == 350


# --- the asynchronous queue -----------------------------------------------------------------------


def test_the_asynchronous_queue_has_every_operation(world: World) -> None:
    """What a queue can do, it can do in an event loop, with the same arguments."""
    internal = {"at", "catch_up", "exchange", "keys", "part_of", "ready", "twins"}
    names = {name for name in dir(QueueOperations) if not name.startswith("_")} & {*dir(TaskQueue)}
    missing = {name for name in names if not hasattr(AsyncTaskQueue, name)}
    assert missing == internal


def test_the_operations_of_flow_can_be_awaited(world: World) -> None:
    async def use() -> None:
        async with AsyncTaskQueue(world.redis, clock=world.clock) as queue:
            await queue.set_tenant("acme", weight=2.0)
            await queue.set_limit("account:*", slots=1)
            task = make_task(
                "ann", "a", tenant="acme", pool="gpu", limit_keys=["account:1"], unique="u", cost=2
            )
            assert await queue.push(task) == "a"
            assert await queue.push(make_task("bob", "b", tenant="acme", unique="u")) == "a"
            assert await queue.move_user("ann", "globex", tenant="acme") == 1
            assert await queue.tenants_of("ann") == ["acme", "globex"]
            assert await queue.size("ann", tenant="globex") == 1
            (claim,) = await queue.claim("w", pools=["gpu"])
            await queue.finish(claim, result={"ok": True}, cost=3.5)
            assert (await queue.get_tenant("acme")).weight == 2.0
            assert (await queue.get_key_limits()).keys() == {"account:*"}
            assert (await queue.quote("ann", tenant="globex")).reason is not None

    asyncio.run(use())
    assert world.info("a").state == "finished"
