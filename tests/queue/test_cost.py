"""Cost in own units: declared at push, charged when claimed on both levels, settled at the end."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from helpers.tasks import fill, ids_of
from helpers.world import World

from fairqueue.errors import InvalidTask
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Report


def serve(queue: TaskQueue, count: int, *, cost: float | None = None) -> Counter[str]:
    """Claim and finish tasks one by one; return how much cost each tenant or user was served."""
    served = Counter[str]()
    for _ in range(count):
        (claim,) = queue.claim("w")
        served[claim.task.tenant or claim.task.user_id] += round(claim.task.cost or 1)
        queue.finish(claim, cost=cost)
    return served


def claimed(world: World, limit: int = 10) -> list[str]:
    return ids_of(world.queue.claim("w", limit=limit))


# --- shares ---------------------------------------------------------------------------------------


def test_shares_are_by_cost_and_not_by_number(queue: TaskQueue) -> None:
    fill(queue, "big", 100, cost=5)
    fill(queue, "small", 300, cost=1)
    served = serve(queue, 120)
    assert abs(served["big"] - served["small"]) <= 5


def test_cost_is_charged_on_both_levels(world: World) -> None:
    """Between tenants, and between the users of one."""
    world.fill("ann", 300, tenant="acme", cost=1)
    world.fill("bob", 300, tenant="acme", cost=4)
    world.fill("carl", 300, tenant="globex", cost=10)
    by_user = Counter[str]()
    by_tenant = Counter[str]()
    for _ in range(200):
        (claim,) = world.queue.claim("w")
        cost = round(claim.task.cost or 1)
        by_user[claim.task.user_id] += cost
        by_tenant[str(claim.task.tenant)] += cost
        world.queue.finish(claim)
    assert abs(by_tenant["acme"] - by_tenant["globex"]) <= 10
    assert abs(by_user["ann"] - by_user["bob"]) <= 4


def test_weights_divide_what_is_charged(world: World) -> None:
    world.queue.set_user("heavy", weight=3)
    world.fill("heavy", 300, cost=2)
    world.fill("light", 300, cost=6)
    served = serve(world.queue, 200)
    assert abs(served["heavy"] - 3 * served["light"]) <= 18


def test_a_huge_cost_holds_its_user_back_and_nobody_else(world: World) -> None:
    world.fill("ann", 30, cost=1)
    world.fill("bob", 30, cost=1)
    serve(world.queue, 10)
    world.push("huge", user_id="ann", cost=1_000_000, priority=5)
    served = serve(world.queue, 26)
    assert served["ann"] >= 1_000_000  # in her turn, and nothing more before bob had his
    assert served["bob"] == 25
    assert serve(world.queue, 25).keys() == {"ann"}


def test_a_newcomer_waits_as_long_as_its_task_is_large(world: World) -> None:
    """Otherwise a stream of new users with large tasks would starve those who have waited."""
    world.fill("bob", 100)
    serve(world.queue, 5)
    world.push("large", user_id="ann", cost=20)
    assert serve(world.queue, 19) == {"bob": 19}
    served = serve(world.queue, 3)
    assert (served["ann"], served["bob"]) == (20, 2)


def test_a_released_task_gets_its_charge_back(world: World) -> None:
    world.fill("ann", 50, cost=40)
    world.fill("bob", 300, cost=1)
    for _ in range(5):
        for claim in world.queue.claim("w", limit=2):
            world.queue.release(claim)
    started = Counter[str]()
    for _ in range(205):
        (claim,) = world.queue.claim("w")
        started[claim.task.user_id] += 1
        world.queue.finish(claim)
    assert started["ann"] in (4, 5)


# --- what it has cost -----------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [None, 1.0, 50.0])
def test_what_it_has_cost_is_settled_at_the_end(world: World, declared: float | None) -> None:
    """Bob's tasks cost 9 whatever was declared; ann's cost 1."""
    world.fill("ann", 300, tenant="acme")
    world.fill("bob", 300, tenant="acme", cost=declared)
    world.fill("carl", 300, tenant="globex")
    started, by_tenant = Counter[str](), Counter[str]()
    for _ in range(200):
        (claim,) = world.queue.claim("w")
        user = claim.task.user_id
        cost = 9.0 if user == "bob" else 1.0
        started[user] += 1
        by_tenant[str(claim.task.tenant)] += round(cost)
        world.queue.finish(claim, cost=cost)
    late = declared or 1  # a newcomer waits as long as its first task is said to be
    assert abs(started["ann"] - 9 * started["bob"]) <= 18 + late
    assert abs(by_tenant["acme"] - by_tenant["globex"]) <= 18


@pytest.mark.parametrize("end", ["retry", "bury", "report"])
def test_other_ends_settle_too(world: World, end: str) -> None:
    world.fill("ann", 100)
    world.fill("bob", 100)
    started = Counter[str]()
    for _ in range(60):
        (claim,) = world.queue.claim("w")
        started[claim.task.user_id] += 1
        cost = 9.0 if claim.task.user_id == "bob" else 1.0
        if end == "retry":
            world.queue.retry(claim, "no", delay=5000, cost=cost)
        elif end == "bury":
            world.queue.bury(claim, "no", cost=cost)
        else:
            report = Report(seconds=0.1, cost=cost)
            world.queue.finish_many([(claim, None, report)])
    assert abs(started["ann"] - 9 * started["bob"]) <= 18


def test_what_it_has_cost_is_not_settled_twice(world: World) -> None:
    world.fill("ann", 3)
    world.push("x", user_id="bob")
    claim = next(c for c in world.queue.claim("w", limit=2) if c.task.user_id == "ann")
    world.queue.finish(claim, cost=7)
    tag = world.dump()["ready"]["ann"]
    world.queue.finish(claim, cost=7)
    assert world.dump()["ready"]["ann"] == tag


def test_a_declared_cost_wins_over_measured_time(world: World) -> None:
    world.queue.configure(cost="time")
    world.fill("ann", 100, cost=1)
    world.fill("bob", 100, cost=1)
    started = Counter[str]()
    for _ in range(40):
        (claim,) = world.queue.claim("w")
        started[claim.task.user_id] += 1
        world.advance(20 if claim.task.user_id == "bob" else 0.01)
        world.queue.finish(claim)
    assert started == {"ann": 20, "bob": 20}
    assert "averages" not in world.dump()


def test_a_cost_given_at_the_end_wins_over_measured_time(world: World) -> None:
    world.queue.configure(cost="time")
    world.fill("ann", 100)
    world.fill("bob", 100)
    started = Counter[str]()
    for _ in range(40):
        (claim,) = world.queue.claim("w")
        started[claim.task.user_id] += 1
        world.advance(20 if claim.task.user_id == "bob" else 0.01)
        world.queue.finish(claim, cost=1)
    assert abs(started["ann"] - started["bob"]) <= 1


def test_a_finish_with_a_cost_by_a_worker_without_the_lease_changes_nothing(world: World) -> None:
    world.fill("ann", 3)
    claim = world.claim_one()
    world.advance(31)
    world.queue.claim("w", limit=3)
    before = world.state()
    assert world.queue.finish_many([(claim, None, Report(seconds=0.1, cost=500.0))]) == [
        "lost_lease"
    ]
    after = world.state()
    assert {k for k in before if before[k] != after[k]} == {"stats"}


# --- rates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["user", "tenant"])
def test_a_rate_counts_units(world: World, whose: str) -> None:
    if whose == "user":
        world.queue.set_user("ann", tenant="acme", rate=10)
    else:
        world.queue.set_tenant("acme", rate=10)
    world.fill("ann", 5, tenant="acme", cost=20)
    started = []
    for second in range(9):
        started += [second] * len(claimed(world))
        world.advance(1)
    assert started == [0, 2, 4, 6, 8]


def test_one_larger_than_a_burst_starts_when_there_is_no_debt(world: World) -> None:
    world.queue.set_user("ann", rate=2)
    world.push("a", user_id="ann", cost=1)
    world.push("huge", user_id="ann", cost=1000)
    world.push("b", user_id="ann", cost=1)
    assert ids_of(world.queue.claim("w", lease=1000)) == ["a"]
    world.advance(0.4)
    assert claimed(world) == []
    world.advance(0.1)
    assert ids_of(world.queue.claim("w", lease=1000)) == ["huge"]
    world.advance(499)
    assert claimed(world) == []
    world.advance(1)
    assert claimed(world) == ["b"]


def test_a_burst_is_a_tenth_of_a_second_in_units(world: World) -> None:
    world.queue.set_user("ann", rate=1000)
    world.fill("ann", 30, cost=10)
    assert len(claimed(world, limit=30)) == 10
    world.advance(0.05)
    assert len(claimed(world, limit=30)) == 5


@pytest.mark.parametrize("whose", ["user", "tenant", "name"])
def test_what_it_has_cost_counts_for_the_rate(world: World, whose: str) -> None:
    if whose == "user":
        world.queue.set_user("ann", tenant="acme", rate=10)
    elif whose == "tenant":
        world.queue.set_tenant("acme", rate=10)
    else:
        world.queue.set_limits("default", rate=10)
    world.fill("ann", 5, tenant="acme")
    (claim,) = world.queue.claim("w", limit=10)
    world.queue.finish(claim, cost=100)
    world.advance(9.8)
    assert claimed(world) == []
    world.advance(0.2)
    assert len(claimed(world)) == 1


def test_costs_of_tasks_that_ran_at_once_add_up_in_the_rate(world: World) -> None:
    world.queue.set_user("ann", rate=100)
    world.fill("ann", 12)
    claims = world.queue.claim("w", limit=10)
    assert len(claims) == 10
    for claim in claims:
        world.queue.finish(claim, cost=100)
    world.advance(9)
    assert claimed(world) == []
    world.advance(1.1)
    assert len(claimed(world)) == 2


def test_a_task_that_has_cost_less_frees_the_rate(world: World) -> None:
    world.queue.set_user("ann", rate=1)
    world.fill("ann", 3, cost=100)
    (claim,) = world.queue.claim("w", limit=10)
    world.advance(1)
    assert claimed(world) == []
    world.queue.finish(claim, cost=1)
    assert len(claimed(world)) == 1


def test_explain_tells_until_when_the_rate_of_units_does_not_allow_it(world: World) -> None:
    world.queue.set_user("ann", rate=10)
    world.push("a", "b", user_id="ann", cost=50)
    assert claimed(world) == ["a"]
    found = world.queue.explain("b")
    assert found is not None
    assert found.user_rate_limited_until == world.now() + timedelta(seconds=5)


# --- bad input ------------------------------------------------------------------------------------

BAD = [0, -1, float("nan"), float("inf"), 1_000_000.1, 1e-9, True, "3", 10**400]


@pytest.mark.parametrize("cost", BAD, ids=lambda cost: repr(cost)[:20])
def test_a_bad_cost_is_named_and_nothing_is_stored(world: World, cost: Any) -> None:
    with pytest.raises(InvalidTask, match="cost must be a number greater than 0, from 1e-06"):
        world.push("t", cost=cost)
    assert world.dump() == {}
    claim = world.push_and_claim("u")
    before = world.dump()
    for end in (world.queue.finish, world.queue.retry, world.queue.bury):
        with pytest.raises(InvalidTask, match="cost must be a number greater than 0"):
            end(claim, cost=cost)
    assert world.dump() == before
