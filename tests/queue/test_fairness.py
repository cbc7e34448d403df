"""No user starves another: who is served next, told by the order of claims on a real server."""

import random
from collections import Counter, deque
from itertools import groupby

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.state import changes, count_commands, jain
from helpers.tasks import claim_one, fill, ids_of, push, served_users
from helpers.world import World

from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.snapshot import jain_index
from fairqueue.validation import Priority


def longest_run(users: list[str]) -> int:
    """How often in a row one user was served at most."""
    return max(len(list(group)) for _, group in groupby(users))


# --- turns ----------------------------------------------------------------------------------------


def test_equal_users_take_turns(queue: TaskQueue) -> None:
    for user in ("alice", "bob", "carol"):
        fill(queue, user, 20)
    users = served_users(queue, 60)
    for start in range(0, 60, 3):
        assert set(users[start : start + 3]) == {"alice", "bob", "carol"}


def mixed_backlog(world: World, seed: int) -> None:
    """Twelve users of several weights and caps, with tasks of several levels, some critical."""
    rng = random.Random(seed)
    world.queue.configure(critical_share=rng.choice([0.0, 0.2, 0.5, 1.0]))
    for n in range(12):
        weight = rng.choice([0.5, 1.0, 2.0, 3.0])
        world.queue.set_user(f"u{n}", weight=weight, max_running=rng.choice([None, None, 40]))
        for k in range(rng.randint(1, 15)):
            level = rng.choice([1, 3, 3, 3, 5, 6])
            world.push(f"u{n}-{k}", user_id=f"u{n}", priority=level)


def order_of_serves(world: World, limit: int) -> list[str]:
    order: list[str] = []
    while claims := world.queue.claim("w", limit=limit):
        order += ids_of(claims)
    return order


@pytest.mark.parametrize("limit", [2, 7, 30, 200])
@pytest.mark.parametrize("seed", range(4))
def test_turns_do_not_depend_on_the_claims_size(world: World, limit: int, seed: int) -> None:
    """Claims of any size follow each other as claims of one do."""
    mixed_backlog(world, seed)
    together = order_of_serves(world, limit)
    world.redis.flushdb()
    mixed_backlog(world, seed)
    assert together == order_of_serves(world, 1)
    assert len(together) == len(set(together))


def test_a_light_user_does_not_wait_for_a_heavy_ones_backlog(queue: TaskQueue) -> None:
    fill(queue, "heavy", 1000)
    served_users(queue, 100)
    push(queue, "l1", user_id="light")
    assert "light" in served_users(queue, 3)


def test_priority_does_not_overtake_other_users(queue: TaskQueue) -> None:
    fill(queue, "pushy", 10, priority=Priority.VERY_HIGH)
    fill(queue, "modest", 10, priority=Priority.VERY_LOW)
    assert longest_run(served_users(queue, 20)) <= 2


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heavy", "light"), [(2.0, 1.0), (1.0, 0.5), (10.0, 1.0), (3.0, 1.5)])
def test_users_are_served_by_their_weights(queue: TaskQueue, heavy: float, light: float) -> None:
    queue.set_user("heavy", weight=heavy)
    queue.set_user("light", weight=light)
    fill(queue, "heavy", 300)
    fill(queue, "light", 300)
    counts = Counter(served_users(queue, 220))
    assert counts["heavy"] == pytest.approx(220 * heavy / (heavy + light), abs=2)


def test_a_new_weight_acts_on_what_already_waits(queue: TaskQueue) -> None:
    fill(queue, "alice", 300)
    fill(queue, "bob", 300)
    before = Counter(served_users(queue, 60))
    assert before == {"alice": 30, "bob": 30}
    queue.set_user("alice", weight=2.0)
    after = Counter(served_users(queue, 90))
    assert after["alice"] == pytest.approx(60, abs=2)


def test_a_raised_weight_rescales_the_debt(world: World) -> None:
    """Raised from 0.01 to 10, a user would otherwise wait out a hundred serves of old debt."""
    world.queue.set_user("slow", weight=0.01)
    world.fill("slow", 50)
    world.fill("other", 300)
    while "slow" not in world.served_users(1):
        pass
    tag = world.dump()["ready"]["slow"]
    world.queue.set_user("slow", weight=10.0)
    state = world.dump()
    now = float(state["fair"]["clock"])
    assert state["ready"]["slow"] == pytest.approx(now + (tag - now) / 1000)
    assert "slow" in world.served_users(3)


@pytest.mark.parametrize("where", ["ready", "idle", "parked"])
def test_a_weight_rescales_the_tag_wherever_it_is(world: World, where: str) -> None:
    world.fill("other", 10)
    world.fill("alice", 1 if where == "idle" else 5)
    world.queue.set_user("alice", weight=0.1)
    while "alice" not in world.served_users(1, finish=False):
        pass
    if where == "parked":
        world.queue.set_user("alice", paused=True)
    key = "ready" if where == "ready" else "idle"
    before = world.dump()
    now = float(before["fair"]["clock"])
    world.queue.set_user("alice", weight=0.2)
    tag, new = changes(before, world.dump())[f"{key}.alice"]
    assert tag - now > 1
    assert new - now == pytest.approx((tag - now) / 2)


# --- coming and going -----------------------------------------------------------------------------


def test_a_newcomer_enters_one_stride_after_the_clock(world: World) -> None:
    world.fill("old", 10)
    world.served_users(4)
    clock = float(world.dump()["fair"]["clock"])
    world.push("n1", user_id="new")
    assert world.dump()["ready"]["new"] == clock + 1
    world.queue.set_user("weighty", weight=4.0)
    world.push("n2", user_id="weighty")
    assert world.dump()["ready"]["weighty"] == clock + 0.25


def test_a_stream_of_newcomers_does_not_starve_a_backlogged_user(queue: TaskQueue) -> None:
    """Entering at the clock instead, they would leave the old one a serve or two."""
    fill(queue, "old", 400)
    served = 0
    for n in range(400):
        push(queue, f"n{n}", user_id=f"new-{n}")
        served += served_users(queue, 1).count("old")
    assert served >= 20


def test_a_user_who_comes_back_pays_what_is_left_of_the_turn(world: World) -> None:
    world.fill("old", 10)
    world.push("a1", user_id="alice")
    while "alice" not in world.served_users(1):
        pass
    tag = world.dump()["idle"]["alice"]
    world.push("a2", user_id="alice")
    state = world.dump()
    assert state["ready"]["alice"] == tag
    assert "alice" not in state.get("idle", {})


def test_leaving_and_coming_back_gains_nothing(queue: TaskQueue) -> None:
    """A user with one task at a time gets no more than one who is always backlogged."""
    fill(queue, "steady", 300)
    served = Counter[str]()
    push(queue, "i-0", user_id="in and out")
    for n in range(1, 200):
        users = served_users(queue, 1)
        served.update(users)
        if users == ["in and out"]:
            push(queue, f"i-{n}", user_id="in and out")
    assert served["in and out"] <= served["steady"] + 1
    assert served["in and out"] >= 90


def test_tags_that_the_clock_has_passed_are_reaped(world: World) -> None:
    for n in range(200):
        world.push(f"t{n}", user_id=f"u{n}")
    world.fill("steady", 200)
    world.served_users(250)
    assert len(world.dump().get("idle", {})) <= 2
    world.served_users(200)
    world.push("last")
    state = world.dump()
    assert "idle" not in state
    assert state["ready"].keys() == {"alice"}


def test_an_empty_queue_forgets_the_past(world: World) -> None:
    world.fill("busy", 50)
    world.served_users(50)
    world.push("b", user_id="busy")
    world.push("n", user_id="new")
    assert sorted(world.served_users(2)) == ["busy", "new"]
    ready = world.dump()
    assert "ready" not in ready


# --- release --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 5])
def test_release_restores_the_charge(world: World, tasks: int) -> None:
    world.queue.set_user("alice", weight=0.5)
    world.fill("alice", tasks)
    world.fill("bob", 5)
    order = []
    for _ in range(4):
        claim = world.claim_one()
        order.append(claim.task.task_id)
        world.queue.release(claim)
    # Given back untouched, it is offered again and again: nobody paid, nobody lost a turn.
    assert len(set(order)) == 1
    assert world.claim_one().attempt == 1
    assert "stats" in world.dump()


def test_release_gives_the_place_in_the_users_own_order_back(queue: TaskQueue) -> None:
    fill(queue, "alice", 3)
    push(queue, "high", priority=Priority.HIGH)
    claims = queue.claim("w", limit=3)
    assert ids_of(claims) == ["high", "alice-0", "alice-1"]
    for claim in claims:
        queue.release(claim)
    assert ids_of(queue.claim("w", limit=4)) == ["high", "alice-0", "alice-1", "alice-2"]


# --- limits of a user -----------------------------------------------------------------------------


def test_no_more_run_than_max_running(queue: TaskQueue) -> None:
    queue.set_user("alice", max_running=2)
    fill(queue, "alice", 5)
    fill(queue, "bob", 2)
    claims = queue.claim("w", limit=10)
    assert Counter(claim.task.user_id for claim in claims) == {"alice": 2, "bob": 2}
    assert queue.claim("w", limit=10) == []
    mine = [claim for claim in claims if claim.task.user_id == "alice"]
    queue.finish(mine[0])
    assert ids_of(queue.claim("w", limit=10)) == ["alice-2"]
    queue.retry(mine[1], delay=60)
    assert ids_of(queue.claim("w", limit=10)) == ["alice-3"]
    queue.set_user("alice", max_running=None)
    assert ids_of(queue.claim("w", limit=10)) == ["alice-4"]


def test_a_lowered_cap_acts_at_once(world: World) -> None:
    world.fill("alice", 5)
    claims = world.queue.claim("w", limit=3)
    world.queue.set_user("alice", max_running=2)
    assert world.dump()["parked"] == {"alice": float("inf")}
    world.queue.finish(claims[0])
    assert world.queue.claim("w") == []
    world.queue.finish(claims[1])
    assert len(world.queue.claim("w", limit=5)) == 1


def test_an_expired_lease_frees_its_place_under_the_cap(world: World) -> None:
    world.queue.set_user("alice", max_running=1)
    world.fill("alice", 2)
    world.claim_one(lease=1)
    world.advance(1)
    assert ids_of(world.queue.claim("w", limit=5)) == ["alice-0"]


def test_a_paused_user_is_not_served(queue: TaskQueue) -> None:
    fill(queue, "alice", 2)
    fill(queue, "bob", 2)
    queue.set_user("alice", paused=True)
    push(queue, "a9")
    assert served_users(queue, 5) == ["bob", "bob"]
    queue.set_user("alice", paused=False)
    assert served_users(queue, 5) == ["alice"] * 3


def test_un_parking_is_no_new_arrival(world: World) -> None:
    world.fill("alice", 5)
    world.fill("bob", 20)
    world.served_users(4)
    world.queue.set_user("alice", paused=True)
    world.served_users(6)
    world.queue.set_user("alice", paused=False)
    state = world.dump()
    assert state["ready"]["alice"] == float(state["fair"]["clock"])
    assert world.served_users(2).count("alice") >= 1


@pytest.mark.parametrize(("rate", "at_once"), [(1.0, 1), (10.0, 1), (0.5, 1), (50.0, 5)])
def test_a_rate_is_kept(world: World, rate: float, at_once: int) -> None:
    world.queue.set_user("alice", rate=rate)
    world.fill("alice", 40)
    assert len(world.queue.claim("w", limit=40)) == at_once
    assert world.queue.claim("w", limit=40) == []
    seconds = 20 / rate
    served = 0
    for _ in range(200):
        world.advance(seconds / 200)
        served += len(world.queue.claim("w", limit=40))
    assert served == pytest.approx(20, abs=1)


def served_in(world: World, seconds: float) -> int:
    """How many tasks are claimed in so many seconds, by a hundred claims."""
    served = 0
    for _ in range(100):
        world.advance(seconds / 100)
        served += len(world.queue.claim("w", limit=250))
    return served


def test_a_raised_rate_acts_at_once(world: World) -> None:
    world.queue.set_user("alice", rate=0.001)
    world.fill("alice", 400)
    assert len(world.queue.claim("w", limit=40)) == 1
    assert world.queue.claim("w", limit=40) == []
    world.queue.set_user("alice", rate=10.0)
    assert served_in(world, 10) == pytest.approx(100, abs=1)


@pytest.mark.parametrize("back", [3.0, 3600.0])
def test_a_clock_that_is_set_back_does_not_hold_up_a_rate(world: World, back: float) -> None:
    """Nobody waits for longer than the rate itself makes them, whoever else waits for longer."""
    world.queue.set_user("slow", rate=0.002)
    world.fill("slow", 2)
    for n in range(120):
        world.queue.set_user(f"u{n}", rate=10.0)
        world.fill(f"u{n}", 50)
    world.queue.claim("w", limit=200)
    assert world.queue.claim("w") == []
    world.advance(-back)
    for _ in range(3):
        world.queue.claim("w", limit=1000)
    world.advance(0.1)
    assert len([*world.queue.claim("w", limit=200), *world.queue.claim("w", limit=200)]) == 120
    assert served_in(world, 2) == pytest.approx(2400, rel=0.02)


def test_a_user_within_the_rate_is_not_held_back(world: World) -> None:
    world.queue.set_user("alice", rate=1.0)
    for n in range(5):
        world.push(f"t{n}")
        assert ids_of(world.queue.claim("w")) == [f"t{n}"]
        world.advance(1)


def test_what_a_claim_costs_does_not_depend_on_parked_users(own_server: OwnServer) -> None:
    """Counted in commands: those who may not be served are not even looked at."""

    def cost(parked: int) -> Counter[str]:
        with redis.Redis.from_url(own_server().url) as client, TaskQueue(client) as queue:
            for n in range(parked):
                if n % 3 == 0:
                    queue.set_user(f"u{n}", paused=True)
                elif n % 3 == 1:
                    queue.set_user(f"u{n}", max_running=1)
                else:
                    queue.set_user(f"u{n}", rate=0.001)
                push(queue, f"t{n}a", f"t{n}b", user_id=f"u{n}")
            queue.claim("w", limit=1000, lease=10_000)
            assert queue.inspect().parked_users == parked
            fill(queue, "alice", 60)
            served_users(queue, 50)  # until the tags of those who were served are reaped
            before = count_commands(client)
            for _ in range(5):
                claim_one(queue)
            after = count_commands(client)
            after.subtract(before)
            return Counter({name: n for name, n in after.items() if n and name != "info"})

    assert cost(300) == cost(3)


# --- cost by time ---------------------------------------------------------------------------------


def test_with_cost_by_time_users_share_the_time_of_workers(world: World) -> None:
    """Slow tasks of ten seconds against quick ones of one: ten quick ones for each slow one."""
    world.queue.configure(cost="time")
    world.fill("slow", 100)
    world.fill("quick", 400)
    seconds = {"slow": 10, "quick": 1}
    used = Counter[str]()
    for _ in range(220):
        claim = world.claim_one(lease=100)
        user = claim.task.user_id
        world.advance(seconds[user])
        used[user] += seconds[user]
        world.queue.finish(claim)
    assert used["slow"] == pytest.approx(used["quick"], rel=0.15)


def test_with_cost_by_tasks_time_does_not_count(world: World) -> None:
    world.fill("slow", 50)
    world.fill("quick", 50)
    served = Counter[str]()
    for _ in range(40):
        claim = world.claim_one(lease=100)
        served[claim.task.user_id] += 1
        world.advance(10 if claim.task.user_id == "slow" else 1)
        world.queue.finish(claim)
    assert served == {"slow": 20, "quick": 20}


def test_an_expired_lease_pays_for_the_time_that_it_held(world: World) -> None:
    world.queue.configure(cost="time", max_attempts=1)
    world.fill("crashing", 10)
    world.fill("working", 100)
    used = Counter[str]()
    for _ in range(60):
        claim = world.claim_one(lease=5)
        if claim.task.user_id == "crashing":
            world.advance(5)
            used["crashing"] += 5
        else:
            world.advance(1)
            used["working"] += 1
            world.queue.finish(claim)
    assert used["crashing"] <= used["working"] * 1.5
    assert "averages" in world.dump()


def test_what_a_users_tasks_take_is_forgotten_with_the_users_tag(world: World) -> None:
    world.queue.configure(cost="time")
    world.push("once", user_id="visitor")
    world.fill("regular", 20)
    for _ in range(20):
        claim = world.claim_one()
        world.advance(1)
        world.queue.finish(claim)
    state = world.dump()
    assert "visitor" not in state.get("idle", {})
    assert state["averages"].keys() == {"regular"}


# --- priorities of a user's own tasks -------------------------------------------------------------


def test_six_priorities_are_strict_within_a_user(queue: TaskQueue) -> None:
    levels = [3, 1, 6, 2, 5, 4] * 3
    for n, level in enumerate(levels):
        push(queue, f"{level}-{n:02}", priority=level)
    got = ids_of(queue.claim("w", limit=18))
    assert got == sorted(got, key=lambda task_id: (-int(task_id[0]), task_id))


def test_without_ageing_waiting_does_not_outweigh_a_level(world: World) -> None:
    world.push("low", priority=Priority.LOW)
    world.advance(100_000)
    world.push("normal", priority=Priority.NORMAL)
    assert ids_of(world.queue.claim("w", limit=2)) == ["normal", "low"]


@pytest.mark.parametrize(("waited", "first"), [(59, "high"), (61, "normal")])
def test_with_ageing_waiting_outweighs_a_level(world: World, waited: float, first: str) -> None:
    world.queue.configure(ageing=60)
    world.push("normal", priority=Priority.NORMAL)
    world.advance(waited)
    world.push("high", priority=Priority.HIGH)
    assert world.claim_one().task.task_id == first


def test_with_ageing_critical_still_goes_first(world: World) -> None:
    world.queue.configure(ageing=1)
    world.push("old", priority=Priority.VERY_HIGH)
    world.advance(100_000)
    world.push("critical", priority=Priority.CRITICAL)
    assert ids_of(world.queue.claim("w", limit=2)) == ["critical", "old"]


def test_with_ageing_a_steady_stream_does_not_starve_the_lowest(world: World) -> None:
    world.queue.configure(ageing=10)
    world.push("lowest", priority=Priority.VERY_LOW)
    got = []
    for n in range(60):
        claim = world.push_and_claim(f"t{n}", priority=Priority.VERY_HIGH)
        got.append(claim.task.task_id)
        world.queue.finish(claim)
        world.advance(1)
    assert got.index("lowest") <= 42


# --- CRITICAL -------------------------------------------------------------------------------------


def test_critical_goes_ahead_of_other_users(queue: TaskQueue) -> None:
    fill(queue, "alice", 50)
    fill(queue, "bob", 50)
    served_users(queue, 10)
    push(queue, "c1", user_id="carol", priority=Priority.CRITICAL)
    push(queue, "n1", user_id="carol")
    claim = claim_one(queue)
    assert claim.task.task_id == "c1"
    assert "carol" not in {c.task.user_id for c in queue.claim("w", limit=2)}


def test_the_critical_lane_is_fair_inside(queue: TaskQueue) -> None:
    queue.configure(critical_share=1.0)
    for user in ("alice", "bob", "carol"):
        fill(queue, user, 20, priority=Priority.CRITICAL)
    fill(queue, "dave", 20)
    users = served_users(queue, 60)
    assert "dave" not in users
    assert Counter(users) == {"alice": 20, "bob": 20, "carol": 20}
    assert longest_run(users) <= 2


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.8])
def test_the_critical_lane_is_bounded_by_its_share(queue: TaskQueue, share: float) -> None:
    """Beyond a credit of ten, and the one turn in eleven that the pushy user has anyway."""
    queue.configure(critical_share=share)
    fill(queue, "pushy", 400, priority=Priority.CRITICAL)
    for n in range(10):
        fill(queue, f"u{n}", 60)
    pushy = served_users(queue, 300).count("pushy")
    assert pushy <= 10 + share * 300 + 300 / 11
    assert pushy >= share * 300 - 5


@pytest.mark.parametrize("share", [0.9, 0.95, 0.99])
def test_a_large_share_of_the_lane_is_reached(queue: TaskQueue, share: float) -> None:
    """Both lanes are backlogged; the ordinary turns are not taken by those in the lane."""
    queue.configure(critical_share=share)
    backlog = [("pushy", Priority.CRITICAL)] * 2500 + [("other", Priority.NORMAL)] * 400
    queue.push_many(Task.create(user_id=user, priority=level) for user, level in backlog)
    served = [c.task.user_id for _ in range(20) for c in queue.claim("w", limit=120)]
    assert served.count("pushy") / len(served) == pytest.approx(share, abs=0.005)
    assert longest_run(served[200:]) <= share / (1 - share) + 1


def test_a_lowered_share_takes_the_credit_away(queue: TaskQueue) -> None:
    queue.configure(critical_share=0.99)
    fill(queue, "other", 200)
    served_users(queue, 20)
    fill(queue, "pushy", 100, priority=Priority.CRITICAL)
    served_users(queue, 12)  # that the credit is counted
    queue.finish_many((claim, None) for claim in queue.claim("w", limit=1))
    queue.configure(critical_share=0.5)
    assert served_users(queue, 40).count("pushy") <= 26


def test_without_a_share_there_is_no_lane(queue: TaskQueue) -> None:
    queue.configure(critical_share=0.0)
    fill(queue, "pushy", 20, priority=Priority.CRITICAL)
    fill(queue, "other", 20)
    assert Counter(served_users(queue, 20)) == {"pushy": 10, "other": 10}


def test_a_new_weight_acts_on_the_place_in_the_critical_lane(world: World) -> None:
    world.queue.configure(critical_share=1.0)
    world.queue.set_user("heavy", weight=0.1)
    world.fill("heavy", 9, priority=Priority.CRITICAL)
    world.served_users(2)
    clock, tag = lane_of(world, "heavy")
    assert tag - clock == pytest.approx(10)
    world.queue.set_user("heavy", weight=2.0)
    assert lane_of(world, "heavy") == pytest.approx((clock, clock + 0.5))
    # Whoever is not ahead of the clock has no debt that a new weight could change.
    world.redis.zadd(world.keys["critical"], {"heavy": clock - 3})
    world.queue.set_user("heavy", weight=1.0)
    assert lane_of(world, "heavy") == (clock, clock - 3)


def lane_of(world: World, user: str) -> tuple[float, float]:
    """The clock of the CRITICAL lane, and the user's tag there."""
    state = world.dump()
    return float(state["fair"]["critical_clock"]), state["critical"][user]


def test_critical_serves_are_charged_to_the_ordinary_turn(queue: TaskQueue) -> None:
    """Who went ahead with critical tasks waits longer with the others."""
    fill(queue, "pushy", 5, priority=Priority.CRITICAL)
    push(queue, *(f"p{n}" for n in range(20)), user_id="pushy")
    fill(queue, "other", 20)
    users = served_users(queue, 20)
    assert users[:5] == ["pushy"] * 5
    assert users[5:10].count("other") >= 4
    assert users.count("other") == pytest.approx(10, abs=1)


def test_a_user_leaves_the_lane_with_the_last_critical_task(world: World) -> None:
    world.push("c1", "c2", user_id="carol", priority=Priority.CRITICAL)
    world.push("n1", user_id="carol")
    world.fill("alice", 3)
    world.claim_one()
    assert world.dump()["critical"].keys() == {"carol"}
    world.queue.cancel("c2")
    assert "critical" not in world.dump()
    assert world.claim_one().task.user_id == "alice"


def test_a_paused_user_has_no_lane(world: World) -> None:
    world.push("c1", user_id="carol", priority=Priority.CRITICAL)
    world.push("a1", user_id="alice")
    world.queue.set_user("carol", paused=True)
    assert "critical" not in world.dump()
    assert ids_of(world.queue.claim("w", limit=5)) == ["a1"]
    world.queue.set_user("carol", paused=False)
    assert ids_of(world.queue.claim("w", limit=5)) == ["c1"]


# --- measured -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amounts", "index"),
    [([1.0, 1.0, 1.0], 1.0), ([1.0, 0.0], 0.5), ([4.0, 2.0], 0.9), ([], None), ([0.0], None)],
)
def test_the_jain_index(amounts: list[float], index: float | None) -> None:
    assert jain_index(amounts) == (None if index is None else pytest.approx(index))


def test_the_snapshot_tells_how_fair_the_last_window_was(world: World) -> None:
    assert world.queue.inspect().jain_index is None
    world.queue.set_user("b", weight=2.0)
    for user in ("a", "b", "c"):
        world.fill(user, 200)
    for _ in range(3):
        world.advance(10.001)
        world.served_users(40)
    index = world.queue.inspect().jain_index
    assert index is not None
    assert index >= 0.99


def test_one_large_backlog_and_a_hundred_quiet_users(queue: TaskQueue) -> None:
    """The promise: who asks for little waits for little, whatever the others have queued.

    `heavy` has 3,000 tasks waiting. A hundred users arrive later, with ten tasks each, one pushed
    when the one before is done. Waits are counted in claims.
    """
    fill(queue, "heavy", 3000)
    served_users(queue, 50)
    quiet = [f"quiet-{n:03}" for n in range(100)]
    left = dict.fromkeys(quiet, 10)
    pushed_at: dict[str, int] = {}
    waits: list[int] = []
    arrivals = deque(quiet)
    heavy = 0
    for now in range(2500):
        if arrivals and now % 3 == 0:
            user = arrivals.popleft()
            push(queue, f"{user}-0", user_id=user)
            pushed_at[user] = now
        claim = claim_one(queue)
        queue.finish(claim)
        user = claim.task.user_id
        if user == "heavy":
            heavy += 1
            continue
        waits.append(now - pushed_at.pop(user))
        left[user] -= 1
        if left[user]:
            push(queue, f"{user}-{10 - left[user]}", user_id=user)
            pushed_at[user] = now
    assert set(left.values()) == {0}
    active = len(quiet) + 1
    waits.sort()
    assert len(waits) == 1000
    assert waits[int(len(waits) * 0.99)] <= 2 * active
    assert waits[-1] <= 2 * active + 2
    assert heavy >= 1000


def test_backlogged_users_get_the_same(queue: TaskQueue) -> None:
    fill(queue, "heavy", 2000)
    served_users(queue, 20)
    users = [f"u{n:02}" for n in range(50)]
    for user in users:
        fill(queue, user, 40)
    served = Counter(served_users(queue, 1530))
    amounts = [float(served[user]) for user in [*users, "heavy"]]
    assert jain(amounts) >= 0.99
    assert max(amounts) - min(amounts) <= 2


def test_little_is_remembered_of_users_who_are_gone(world: World) -> None:
    """Neither tags nor averages pile up with the number of users that there ever were."""
    world.queue.configure(cost="time", keep_finished=0)
    for n in range(300):
        claim = world.push_and_claim(f"t{n}", user_id=f"u{n}")
        world.advance(1)
        world.queue.finish(claim)
    world.fill("steady", 100)
    for n in range(300, 360):
        world.push(f"t{n}", user_id=f"u{n}")
        for claim in world.queue.claim("w", limit=2):
            world.advance(1)
            world.queue.finish(claim)
    state = world.dump()
    for key in ("idle", "averages", "throttle", "running", "parked", "users"):
        assert len(state.get(key, {})) <= 70, key
