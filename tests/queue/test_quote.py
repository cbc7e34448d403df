"""A quote: when a task would start, from its place and from how fast tasks were served lately."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from helpers.tasks import ids_of
from helpers.world import World

from fairqueue.errors import InvalidTask
from fairqueue.models import Task
from fairqueue.queue.estimate import Quote

NO_WORKER = "no worker takes such tasks"
NO_PACE = "no task was served lately while others waited"


def serve(world: World, count: int, every: float = 1.0, **options: Any) -> list[str]:
    """Claim and finish tasks one by one, one in so many seconds; return their ids."""
    served = []
    for _ in range(count):
        for claim in world.queue.claim("w", **options):
            served.append(claim.task.task_id)
            world.queue.finish(claim)
        world.advance(every)
    return served


def wait_of(world: World, quote: Quote) -> float:
    """The estimated wait in seconds; the quote must have a range around it."""
    assert quote.reason is None
    assert quote.starts_about is not None
    assert quote.earliest is not None
    assert quote.latest is not None
    assert quote.earliest <= quote.starts_about <= quote.latest
    return (quote.starts_about - world.now()).total_seconds()


# --- estimates ------------------------------------------------------------------------------------


def test_a_free_worker_takes_a_task_at_once(world: World) -> None:
    world.beat(slots=4, running=1)
    assert wait_of(world, world.queue.quote("ann")) == 0
    world.push("a", "b", user_id="bob")
    assert wait_of(world, world.queue.quote("ann")) == 0


@pytest.mark.parametrize("every", [0.25, 4.0])
def test_a_quote_follows_the_pace_and_the_place(world: World, every: float) -> None:
    world.fill("ann", 100)
    world.fill("bob", 100)
    serve(world, 40, every)
    own = world.queue.size("ann")
    # All of hers are before it, and as many of bob's.
    expected = 2 * own * every
    assert wait_of(world, world.queue.quote("ann")) == pytest.approx(expected, rel=0.1)
    # Someone new waits for one of each.
    assert wait_of(world, world.queue.quote("zoe")) <= 4 * every


def test_the_truth_is_near_the_quote_and_in_its_range(world: World) -> None:
    for user in ("ann", "bob", "carl"):
        world.fill(user, 60, tenant="acme" if user != "carl" else None)
    serve(world, 30)
    for user, tenant in (("ann", "acme"), ("bob", "acme"), ("carl", None)):
        quote = world.queue.quote(user, tenant=tenant)
        world.push(f"new/{user}", user_id=user, tenant=tenant)
        found = world.queue.explain(f"new/{user}")
        assert found is not None
        assert found.starts_about is not None
        assert quote.starts_about is not None
        # What is asked before the push and after it agrees.
        assert abs((found.starts_about - quote.starts_about).total_seconds()) <= 2
    quotes = {}
    for user in ("ann", "bob", "carl"):
        found = world.queue.explain(f"new/{user}")
        assert found is not None
        quotes[f"new/{user}"] = found
    begun: dict[str, datetime] = {}
    at = world.now()
    while len(begun) < 3:
        (claim,) = world.queue.claim("w")
        if claim.task.task_id in quotes:
            begun[claim.task.task_id] = world.now()
        world.queue.finish(claim)
        world.advance(1)
    for task_id, found in quotes.items():
        assert found.starts_about is not None
        assert found.starts_earliest is not None
        assert found.starts_latest is not None
        assert found.starts_earliest <= begun[task_id] <= found.starts_latest
        truth = (begun[task_id] - at).total_seconds()
        assert abs((found.starts_about - at).total_seconds() - truth) <= 0.15 * truth


def test_a_quote_counts_on_both_levels(world: World) -> None:
    """A tenant's many users make its users wait, and nobody else."""
    for n in range(40):
        world.fill(f"u{n}", 5, tenant="big")
    world.fill("only", 5, tenant="small")
    serve(world, 20)
    of_big = wait_of(world, world.queue.quote("new", tenant="big"))
    of_small = wait_of(world, world.queue.quote("new", tenant="small"))
    assert of_small <= 6
    assert of_big >= 20


def test_weights_and_costs_count(world: World) -> None:
    world.queue.set_user("ann", weight=4.0)
    world.fill("ann", 100)
    world.fill("bob", 100)
    serve(world, 20)
    heavy = wait_of(world, world.queue.quote("ann"))
    light = wait_of(world, world.queue.quote("bob"))
    assert heavy == pytest.approx(world.queue.size("ann") * 1.25, rel=0.1)
    assert light == pytest.approx(180, rel=0.15)


def test_each_pool_has_a_pace_of_its_own(world: World) -> None:
    world.fill("ann", 100)
    world.push(*(f"g{n}" for n in range(30)), user_id="ann", pool="gpu")
    for _ in range(10):
        serve(world, 1, 0.1)
        serve(world, 1, 9.9, pools=["gpu"])
    slow = wait_of(world, world.queue.quote("ann", pool="gpu"))
    fast = wait_of(world, world.queue.quote("ann"))
    assert slow == pytest.approx(20 * 10, rel=0.15)
    assert fast == pytest.approx(90 * 10, rel=0.15)


def test_a_rate_or_a_pause_with_an_end_puts_the_start_off(world: World) -> None:
    world.beat(slots=9)
    world.queue.pause_user("ann", until=world.now() + timedelta(seconds=300))
    world.push("a", user_id="ann")
    assert wait_of(world, world.queue.quote("ann")) == pytest.approx(300, abs=1)
    world.queue.set_user("bob", rate=0.1)
    world.push("b", "c", "d", user_id="bob")
    serve(world, 1)
    assert wait_of(world, world.queue.quote("bob")) == pytest.approx(20, abs=11)


def test_a_pause_or_a_rate_counts_while_nothing_waits(world: World) -> None:
    world.beat(slots=9)
    until = world.now() + timedelta(seconds=300)
    world.queue.pause_user("ann", until=until)
    assert world.queue.quote("ann").starts_about == until
    world.queue.set_tenant("acme", paused=True, until=until)
    assert world.queue.quote("ann", tenant="acme").starts_about == until
    world.queue.set_user("bob", rate=0.1)
    world.queue.set_tenant("globex", rate=0.1)
    for tenant in (None, "globex"):
        assert world.queue.quote("bob", tenant=tenant).starts_about == world.now()
        world.queue.push(Task.create(user_id="bob", tenant=tenant))
        serve(world, 1, 0)
        wait = wait_of(world, world.queue.quote("bob", tenant=tenant))
        assert wait == pytest.approx(10, abs=0.01)


@pytest.mark.parametrize(
    ("tenant", "whose"), [(None, "user"), ("acme", "user"), ("acme", "tenant")]
)
def test_there_is_no_quote_at_a_cap(world: World, tenant: str | None, whose: str) -> None:
    world.beat(slots=9)
    if whose == "tenant":
        world.queue.set_tenant("acme", max_running=1)
    else:
        world.queue.set_user("ann", tenant=tenant, max_running=1)
    assert world.queue.quote("ann", tenant=tenant).reason is None
    world.queue.push(Task.create(user_id="ann", tenant=tenant))
    claim = world.claim_one()
    reason = f"as many tasks of the {whose} run as max_running allows"
    assert world.queue.quote("ann", tenant=tenant) == Quote(reason=reason)
    world.push("later", user_id="ann", tenant=tenant, delay=500)
    found = world.queue.explain("later")
    assert found is not None
    assert found.starts_about == world.now() + timedelta(seconds=500)
    world.queue.finish(claim)
    assert world.queue.quote("ann", tenant=tenant).starts_about == world.now()


# --- of a waiting task ----------------------------------------------------------------------------


def test_explain_says_when_a_task_starts(world: World) -> None:
    world.fill("ann", 60)
    serve(world, 20)
    found = world.queue.explain("ann-59")
    assert found is not None
    assert found.starts_about is not None
    assert (found.starts_about - world.now()).total_seconds() == pytest.approx(39, rel=0.1)
    first = world.queue.explain("ann-20")
    assert first is not None
    assert first.starts_about is not None
    assert first.starts_about < found.starts_about


def test_a_delayed_task_starts_after_its_time(world: World) -> None:
    world.beat(slots=9)
    world.push("a", delay=500)
    found = world.queue.explain("a")
    assert found is not None
    assert found.starts_about == world.now() + timedelta(seconds=500)


@pytest.mark.parametrize("how", ["running", "finished", "behind", "held", "paused"])
def test_there_is_no_estimate_for_others(world: World, how: str) -> None:
    world.beat(slots=9)
    world.queue.set_limit("k", slots=1)
    world.push("a", unique="u", limit_keys=["k"])
    claim = world.claim_one()
    asked = "a"
    if how == "finished":
        world.queue.finish(claim)
    elif how == "behind":
        world.push("b", unique="u", on_duplicate="replace")
        asked = "b"
    elif how == "held":
        world.push("b", limit_keys=["k"])
        assert world.queue.claim("w") == []
        asked = "b"
    elif how == "paused":
        world.queue.pause_user("alice")
        world.push("b")
        asked = "b"
    found = world.queue.explain(asked)
    assert found is not None
    assert (found.starts_about, found.starts_earliest, found.starts_latest) == (None, None, None)


# --- none -----------------------------------------------------------------------------------------


def no_worker(world: World) -> None:
    world.fill("bob", 3)


def no_pace(world: World) -> None:
    world.beat(slots=1, running=1)
    world.fill("bob", 30)


def old_pace(world: World) -> None:
    world.fill("bob", 30)
    serve(world, 10)
    world.advance(3600)
    world.beat(slots=1, running=1)


def old_claim(world: World) -> None:
    world.fill("bob", 30)
    serve(world, 10)
    world.advance(3600)


def other_handlers(world: World) -> None:
    world.beat(names=["mail"])


def other_pools(world: World) -> None:
    world.beat(pools=["gpu"])


def paused(world: World) -> None:
    world.beat()
    world.queue.pause_user("ann", tenant="acme")


def tenant_paused(world: World) -> None:
    world.beat()
    world.queue.set_tenant("acme", paused=True)


def no_slot(world: World) -> None:
    world.beat()
    world.queue.set_limits("report", slots=1)
    world.push("x", user_id="bob", name="report")
    world.claim_one()


REASONS: list[tuple[Callable[[World], None], str]] = [
    (no_worker, NO_WORKER),
    (no_pace, NO_PACE),
    (old_pace, NO_PACE),
    (old_claim, NO_WORKER),
    (other_handlers, NO_WORKER),
    (other_pools, NO_WORKER),
    (paused, "the user is paused"),
    (tenant_paused, "the tenant is paused"),
    (no_slot, "the limits of its name or of its keys are reached"),
]


@pytest.mark.parametrize(("make", "reason"), REASONS)
def test_without_an_estimate_there_is_a_reason(
    world: World, make: Callable[[World], None], reason: str
) -> None:
    make(world)
    assert world.queue.quote("ann", tenant="acme", name="report") == Quote(reason=reason)


def test_a_recent_claim_counts_as_a_living_worker(world: World) -> None:
    """A process that claims without heartbeats is one too."""
    world.fill("bob", 20)
    serve(world, 10)
    assert wait_of(world, world.queue.quote("ann")) > 0


def test_a_quote_changes_nothing(world: World) -> None:
    world.fill("bob", 5)
    serve(world, 2)
    before = world.dump()
    world.queue.quote("ann", tenant="acme", pool="gpu", name="report")
    world.queue.quote("bob")
    assert world.dump() == before
    assert ids_of(world.queue.claim("w")) == ["bob-2"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"user_id": ""}, "user_id must be a string of 1 to 200 characters"),
        ({"user_id": "a", "tenant": "a b"}, "tenant must be 1 to 64 letters"),
        ({"user_id": "a", "tenant": "a\0b"}, "tenant must be 1 to 64 letters"),
        ({"user_id": "a", "name": 7}, "not 7"),
        ({"user_id": "a", "pool": "\1"}, r"not '\x01'"),
    ],
    ids=repr,
)
def test_bad_arguments_are_named(world: World, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidTask) as caught:
        world.queue.quote(**fields)
    assert said in str(caught.value)
