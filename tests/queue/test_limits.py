"""Names of tasks: who claims which, and how many of one run or begin over all claimers."""

import itertools
import math
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.state import count_commands, dump
from helpers.tasks import fill, ids_of, make_task, push
from helpers.waiting import in_thread
from helpers.world import World

from fairqueue.clock import ManualClock
from fairqueue.errors import ConfigurationError, InvalidTask, LeaseLost, QueueFull, UnknownTask
from fairqueue.models import Claim, HandlerLimits
from fairqueue.queue.claim import Wanted
from fairqueue.queue.queue import TaskQueue
from fairqueue.validation import Priority

SLOW = "slow"


def held(world: World) -> list[str]:
    """The tasks that are set aside, sorted."""
    return sorted(member.split("\0")[3] for member in world.dump().get("held", {}))


def hint_of(world: World, limit: int = 1, names: str = "") -> float:
    """What a claim says until when there may be more, in seconds."""
    return world.queue.link.perform(world.queue._claim_once("w", limit, 1_000_000, Wanted(names)))[
        1
    ]


def wake_list(world: World, names: str) -> bytes:
    """The list at which workers of a kind wait."""
    claim = world.queue._claim_once("w", 1, 1000, Wanted(names))
    return world.queue.link.full(world.queue.link.perform(claim).wake)[0]


def claim_slow(world: World, limit: int = 1, lease: float = 1000) -> list[Claim]:
    """Claim so many tasks of any name."""
    return world.queue.claim("w", limit=limit, lease=lease)


def drain(queue: TaskQueue, at_most: int) -> list[str]:
    """Claim and finish all there is; fails if more than so many are offered together."""
    done = []
    while claims := queue.claim("w", limit=50):
        assert len(claims) <= at_most
        queue.finish_many((claim, None) for claim in claims)
        done += ids_of(claims)
    return done


@pytest.fixture
def tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting claim is ended by a token and not by looking again after a while."""
    monkeypatch.setattr("fairqueue.queue.claim.LONGEST_WAIT_S", 1000.0)


# --- slots ----------------------------------------------------------------------------------------


def test_no_more_than_its_slots_run_at_a_time_over_all_claimers(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=2)
    fill(queue, "alice", 5, name=SLOW)
    fill(queue, "bob", 5, name=SLOW)
    running = [claim for n in range(5) for claim in queue.claim(f"w{n}", limit=3)]
    done: list[Claim] = []
    while running:
        assert len(running) == min(2, 10 - len(done))
        done.append(running.pop(0))
        queue.finish(done[-1])
        running += [claim for n in range(5) for claim in queue.claim(f"w{n}", limit=3)]
    assert len(set(ids_of(done))) == 10


def test_slots_hold_when_many_claim_at_once(live: TaskQueue) -> None:
    live.set_limits(SLOW, slots=3)
    for n in range(10):
        fill(live, f"u{n}", 6, name=SLOW)
    lock, running, most, done = threading.Lock(), set[str](), 0, 0

    def work(worker: int) -> None:
        nonlocal most, done
        while done < 60:
            for claim in live.claim(f"w{worker}", limit=2, wait=0.5):
                with lock:
                    running.add(claim.task.task_id)
                    most = max(most, len(running))
                with lock:
                    running.remove(claim.task.task_id)
                    done += 1
                live.finish(claim)

    for wait in [in_thread(partial(work, n)) for n in range(4)]:
        wait()
    assert done == 60
    assert most <= 3


def test_no_slots_at_all_means_no_limit(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.queue.set_limits(SLOW, slots=0)
    world.fill("alice", 3, name=SLOW)
    assert world.queue.get_limits() == {}
    assert len(claim_slow(world, 5)) == 3


@pytest.mark.parametrize(
    "limits",
    [
        {"slots": -1},
        {"slots": 1001},
        {"slots": 1.5},
        {"slots": "2"},
        {"rate": 0},
        {"rate": -1.0},
        {"rate": "fast"},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": "soon"},
    ],
)
def test_a_bad_limit_is_named_and_nothing_is_stored(world: World, limits: dict[str, Any]) -> None:
    ((field, value),) = limits.items()
    with pytest.raises(ConfigurationError, match=f"{field}.*{value!r}"):
        world.queue.set_limits(SLOW, **limits)
    assert world.dump() == {}


def test_a_bad_name_is_named_and_nothing_is_stored(world: World) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        world.queue.set_limits("a\nb", slots=1)
    assert world.dump() == {}


def test_limits_are_read_as_they_were_set(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=2, rate=0.5, timeout=1.5)
    queue.set_limits("quick", rate=100)
    assert queue.get_limits() == {
        SLOW: HandlerLimits(slots=2, rate=0.5, timeout=1.5),
        "quick": HandlerLimits(rate=100),
    }


def buried_by_expiry(queue: TaskQueue, clock: ManualClock, claim: Claim) -> None:
    queue.configure(max_attempts=1)
    clock.advance(2000)


def cancelled_by_expiry(queue: TaskQueue, clock: ManualClock, claim: Claim) -> None:
    queue.cancel(claim.task.task_id)
    clock.advance(2000)


def cancelled(queue: TaskQueue, clock: ManualClock, claim: Claim) -> None:
    queue.cancel(claim.task.task_id)
    queue.retry(claim)


ENDS: dict[str, Callable[[TaskQueue, ManualClock, Claim], object]] = {
    "finish": lambda queue, clock, claim: queue.finish(claim),
    "retry": lambda queue, clock, claim: queue.retry(claim),
    "retry later": lambda queue, clock, claim: queue.retry(claim, delay=9),
    "release": lambda queue, clock, claim: queue.release(claim),
    "bury": lambda queue, clock, claim: queue.bury(claim),
    "cancel": cancelled,
    "its worker died": lambda queue, clock, claim: clock.advance(2000),
    "its worker died once too often": buried_by_expiry,
    "its worker died when it was to be cancelled": cancelled_by_expiry,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_slot_is_freed_however_the_lease_ends(world: World, end: str) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 3, name=SLOW)
    (first,) = claim_slow(world, 3)
    assert claim_slow(world, 3) == []
    ENDS[end](world.queue, world.clock, first)
    (second,) = claim_slow(world, 3)
    assert list(world.dump()["slots"]) == [f"{SLOW}\0{second.task.task_id}"]


@pytest.mark.one_partition
@pytest.mark.untidy
@pytest.mark.parametrize("text", [None, b"{", b'{"user":"alice"}'])
def test_the_slot_of_a_spoilt_run_is_freed_with_its_lease(world: World, text: bytes | None) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 2, name=SLOW)
    claim_slow(world)
    if text is None:
        world.redis.hdel(world.keys["status"], "alice-0")
    else:
        world.redis.hset(world.keys["status"], "alice-0", text)
    assert claim_slow(world) == []
    world.advance(2000)
    assert ids_of(claim_slow(world)) == ["alice-1"]
    assert list(world.dump()["slots"]) == [f"{SLOW}\0alice-1"]


CHANGES: dict[str, tuple[dict[str, Any], int]] = {
    "lowered": ({"slots": 1}, 1),
    "raised": ({"slots": 5}, 5),
    "removed": ({}, 50),
    "only a time-out is left": ({"timeout": 5}, 50),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_task_is_stuck_when_the_limit_changes_while_it_waits(world: World, change: str) -> None:
    limits, at_most = CHANGES[change]
    world.queue.set_limits(SLOW, slots=2)
    world.fill("alice", 6, name=SLOW)
    world.fill("bob", 6, name=SLOW)
    running = claim_slow(world, 12)
    assert (len(running), len(held(world))) == (2, 10)
    world.queue.set_limits(SLOW, **limits)
    world.queue.finish_many((claim, None) for claim in running)
    assert len(drain(world.queue, at_most)) == 10
    assert "slot_line" not in world.dump()


def test_a_lowered_limit_lets_those_end_that_run(world: World) -> None:
    world.queue.set_limits(SLOW, slots=3)
    world.fill("alice", 6, name=SLOW)
    running = claim_slow(world, 6)
    world.queue.set_limits(SLOW, slots=1)
    for claim in running[:2]:
        world.queue.finish(claim)
        assert claim_slow(world, 6) == []
    world.queue.finish(running[2])
    assert len(claim_slow(world, 6)) == 1


def test_a_limit_counts_those_that_begin_after_it_was_set(world: World) -> None:
    world.fill("alice", 6, name=SLOW)
    claim_slow(world, 2)
    world.queue.set_limits(SLOW, slots=1)
    assert len(claim_slow(world, 6)) == 1


def test_names_do_not_take_slots_from_each_other(world: World) -> None:
    world.queue.set_limits("a", slots=1)
    world.queue.set_limits("ab", slots=2)
    world.fill("alice", 3, name="a")
    world.fill("bob", 3, name="ab")
    world.fill("carol", 3)
    names = Counter(claim.task.name for claim in claim_slow(world, 20))
    assert names == {"a": 1, "ab": 2, "default": 3}


def test_a_task_that_comes_back_needs_a_slot_again(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.push("a", "b", name=SLOW)
    world.queue.retry(world.claim_one(), delay=5)
    assert ids_of(claim_slow(world, 5)) == ["b"]
    world.queue.reschedule("a")
    assert claim_slow(world, 5) == []


# --- what is set aside ----------------------------------------------------------------------------


@pytest.mark.one_partition
def test_tasks_without_a_slot_do_not_block_the_others_of_their_user(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 1000, name=SLOW)
    world.push("other")
    assert ids_of(claim_slow(world, 2)) == ["alice-0", "other"]


@pytest.mark.one_partition
def test_a_claim_that_sets_aside_as_many_as_it_may_comes_again_at_once(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 1, name=SLOW)
    claim_slow(world)
    world.fill("bob", 1000, name=SLOW)
    world.push(*(f"more-{n}" for n in range(200)), user_id="bob", name=SLOW)
    world.push("other", user_id="bob")
    assert hint_of(world) == 0.0
    assert ids_of(claim_slow(world)) == ["other"]


@pytest.mark.one_partition
def test_many_users_without_a_slot_do_not_block_one_who_needs_none(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    for n in range(150):
        world.push(f"t{n}", user_id=f"u{n:03}", name=SLOW)
    world.push("other", user_id="zoe")
    claim_slow(world)
    assert ids_of(claim_slow(world)) == ["other"]


def test_users_who_wait_for_slots_get_them_in_turn(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 500, name=SLOW)
    (running,) = claim_slow(world)
    claim_slow(world)
    world.fill("bob", 1, name=SLOW)
    served = []
    for _ in range(3):
        world.queue.finish(running)
        (running,) = claim_slow(world)
        served.append(running.task.user_id)
    assert "bob" in served


@pytest.mark.one_partition
def test_users_with_many_held_tasks_take_turns(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    for user in ("alice", "bob", "carol"):
        world.fill(user, 10, name=SLOW)
    served = []
    for _ in range(12):
        (claim,) = claim_slow(world)
        served.append(claim.task.user_id)
        world.queue.finish(claim)
    assert Counter(served) == {"alice": 4, "bob": 4, "carol": 4}


def test_priorities_of_a_user_hold_among_held_tasks(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    push(queue, "first", name=SLOW, priority=Priority.CRITICAL)
    for n, priority in enumerate((1, 3, 6, 5, 3)):
        push(queue, f"{priority}-{n}", name=SLOW, priority=priority)
    assert drain(queue, 1) == ["first", "6-2", "5-3", "3-1", "3-4", "1-0"]


def test_a_new_task_of_higher_priority_goes_before_held_ones(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 3, name=SLOW)
    (running,) = claim_slow(world)
    claim_slow(world)
    world.push("urgent", name=SLOW, priority=Priority.VERY_HIGH)
    world.queue.finish(running)
    assert ids_of(claim_slow(world)) == ["urgent"]


def test_a_held_task_can_be_cancelled(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 3, name=SLOW)
    (running,) = claim_slow(world, 3)
    assert world.queue.cancel("alice-1")
    assert world.places()["cancelled"] == ["alice-1"]
    world.queue.finish(running)
    assert drain(world.queue, 1) == ["alice-2"]


def test_a_user_whose_held_tasks_were_cancelled_gets_no_second_turn(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("zoe", 3, name=SLOW)
    (running,) = claim_slow(world)
    claim_slow(world)
    world.push("gone", name=SLOW)
    claim_slow(world)
    world.queue.cancel("gone")
    world.fill("alice", 3, name=SLOW)
    claim_slow(world)
    turns = [member for member in world.dump()["slot_line"] if member[0] != "\1"]
    assert sorted(member.split("\0")[2] for member in turns) == ["alice", "zoe"]
    world.queue.finish(running)
    assert len(drain(world.queue, 1)) == 5


@pytest.mark.parametrize("delay", [None, 30])
def test_a_held_task_can_be_moved(world: World, delay: float | None) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 2, name=SLOW)
    (running,) = claim_slow(world, 2)
    assert world.queue.reschedule("alice-1", delay=delay)
    assert held(world) == []
    world.queue.finish(running)
    world.advance(30)
    assert drain(world.queue, 1) == ["alice-1"]


def test_held_tasks_are_counted_and_explained(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1, rate=5)
    world.fill("alice", 3, name=SLOW)
    world.fill("bob", 1, name=SLOW)
    claim_slow(world, 9)
    assert (world.queue.size(), world.queue.size("alice"), world.queue.size("bob")) == (3, 2, 1)
    assert world.queue.inspect().ready == 3
    why = world.queue.explain("alice-1")
    assert why is not None
    assert why.waits_for_slot
    assert [each.code for each in why.reasons] == ["name_slots", "name_rate"]
    assert why.summary.startswith(
        "The only slot for tasks named 'slow' is taken. Tasks named 'slow' have reached their rate "
        "limit of 5 per second. The next one may start at "
    )


@pytest.mark.parametrize("whose", ["queue", "user"])
def test_held_tasks_count_as_waiting(world: World, whose: str) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 3, name=SLOW)
    claim_slow(world, 3)
    if whose == "queue":
        world.queue.configure(max_waiting=3)
    else:
        world.queue.set_user("alice", max_waiting=3)
    world.push("fits")
    with pytest.raises(QueueFull, match=whose):
        world.push("too many")


def test_ageing_is_not_changed_while_tasks_are_held(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1, rate=0.001)
    world.fill("alice", 2, name=SLOW)
    (running,) = claim_slow(world, 2)
    world.queue.finish(running)
    assert (held(world), world.dump().get("leases")) == (["alice-1"], None)
    with pytest.raises(ConfigurationError, match="ageing"):
        world.queue.configure(ageing=5)


STOPS: dict[str, dict[str, Any]] = {"paused": {"paused": True}, "capped": {"max_running": 1}}


@pytest.mark.parametrize("stop", STOPS)
def test_held_tasks_of_a_blocked_user_do_not_delay_others(world: World, stop: str) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.push("plain")
    world.fill("zoe", 1, name=SLOW)
    running = claim_slow(world, 2)
    world.fill("alice", 20, name=SLOW)
    claim_slow(world)
    world.fill("bob", 1, name=SLOW)
    claim_slow(world)
    world.queue.set_user("alice", **STOPS[stop])
    world.queue.finish(next(claim for claim in running if claim.task.user_id == "zoe"))
    assert ids_of(claim_slow(world)) == ["bob-0"]


def test_held_tasks_of_a_user_go_on_when_the_pause_is_over(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 5, name=SLOW)
    (running,) = claim_slow(world, 5)
    world.queue.set_user("alice", paused=True)
    world.queue.finish(running)
    assert claim_slow(world, 5) == []
    world.queue.set_user("alice", paused=False)
    assert drain(world.queue, 1) == [f"alice-{n}" for n in range(1, 5)]


@pytest.mark.one_partition
@pytest.mark.untidy
@pytest.mark.parametrize("text", [None, b"{", b"[]"])
def test_a_spoilt_held_task_does_not_stop_the_others(world: World, text: bytes | None) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 4, name=SLOW)
    (running,) = claim_slow(world, 4)
    if text is None:
        world.redis.hdel(world.keys["status"], "alice-1")
    else:
        world.redis.hset(world.keys["status"], "alice-1", text)
    world.queue.finish(running)
    assert hint_of(world) == 0.0  # nothing was taken, and there is room
    assert drain(world.queue, 1) == ["alice-2", "alice-3"]
    assert world.dump()["stats"]["broken_tasks"] == "1"


def test_many_held_tasks_of_many_names_come_back_and_none_is_lost(world: World) -> None:
    names = [f"n{n}" for n in range(6)]
    for name in names:
        world.queue.set_limits(name, slots=1)
        world.push(*(f"{name}-{n}" for n in range(500)), name=name)
    running = []
    while claims := claim_slow(world, 1000):
        running += claims
    assert (len(running), len(held(world))) == (6, 2994)
    for name in names:
        world.queue.set_limits(name)
    world.queue.finish_many((claim, None) for claim in running)
    claims = []
    while more := claim_slow(world, 1000):
        claims += more
    assert len(set(ids_of(claims))) == 2994


def test_held_tasks_of_more_names_than_a_claim_looks_at_are_not_forgotten(world: World) -> None:
    names = [f"n{n:03}" for n in range(130)]
    for name in names:
        world.queue.set_limits(name, slots=1)
        world.push(f"{name}-a", f"{name}-b", name=name)
    running = {claim.task.name: claim for claim in claim_slow(world, 1000)}
    assert len(running) == 130
    for name in ("n129", "n000"):
        world.queue.finish(running[name])
        assert {f"{name}-b"} == {i for _ in range(3) for i in ids_of(claim_slow(world))}


# --- rates ----------------------------------------------------------------------------------------


@pytest.mark.one_partition
@pytest.mark.parametrize("limits", [{"slots": 1}, {"slots": 3}, {"rate": 20}])
def test_weights_act_on_who_waits_for_a_limit(world: World, limits: dict[str, Any]) -> None:
    """Ten to one: of what is begun, 0.91 is of the one with the larger weight."""
    world.queue.set_limits(SLOW, **limits)
    world.queue.set_user("heavy", weight=10)
    world.fill("heavy", 400, name=SLOW)
    world.fill("light", 400, name=SLOW)
    users: list[str] = []
    while len(users) < 220:
        world.advance(0.05)
        claims = claim_slow(world, limit=5)
        users += [claim.task.user_id for claim in claims]
        world.queue.finish_many((claim, None) for claim in claims)
    assert users.count("heavy") / len(users) == pytest.approx(10 / 11, abs=0.02)


@pytest.mark.parametrize("name", [SLOW, "a name before it"])
def test_a_new_weight_acts_on_who_already_waits_for_a_limit(world: World, name: str) -> None:
    """Raised from 0.01 to 10, nobody waits out the old debt."""
    world.queue.set_limits(SLOW, slots=1)
    world.queue.set_user("raised", weight=0.01)
    world.fill("raised", 100, name=SLOW)
    world.fill("other", 100, name=SLOW)
    if name != SLOW:
        world.queue.set_limits(name, slots=1)
        world.queue.push_many(make_task(user_id="raised", name=name) for _ in range(3))
    users = [claim.task.user_id for each in one_by_one(world, 20) for claim in each]
    assert users.count("raised") <= 4
    world.queue.set_user("raised", weight=10)
    users = [
        claim.task.user_id
        for each in one_by_one(world, 12)
        for claim in each
        if claim.task.name == SLOW
    ]
    assert users.count("raised") >= 8
    world.queue.set_user("raised", weight=0.01)
    users = [claim.task.user_id for each in one_by_one(world, 12) for claim in each]
    assert users.count("raised") <= 2


def test_a_newcomer_waits_its_turn_for_a_slot(world: World) -> None:
    """One stride from the present turn, however long the line has been moving."""
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 60, name=SLOW)
    drained = [ids_of(each) for each in one_by_one(world, 40)]
    assert len(drained) == 40
    world.fill("bob", 5, name=SLOW)
    users = [claim.task.user_id for each in one_by_one(world, 8) for claim in each]
    assert users.count("bob") == pytest.approx(4, abs=1)


def one_by_one(world: World, times: int) -> list[list[Claim]]:
    """Claim what may begin and finish it, so often."""
    all_claims = []
    for _ in range(times):
        claims = claim_slow(world, limit=5)
        world.queue.finish_many((claim, None) for claim in claims)
        all_claims.append(claims)
    return all_claims


def test_a_rate_holds_over_all_claimers(world: World) -> None:
    world.queue.set_limits(SLOW, rate=2)
    world.fill("alice", 3, name=SLOW)
    world.fill("bob", 3, name=SLOW)
    began = []
    for n in range(31):
        began += [n for w in range(3) for _ in world.queue.claim(f"w{w}", limit=2)]
        world.advance(0.1)
    assert began == [0, 5, 10, 15, 20, 25]


def test_a_high_rate_lets_some_begin_together(world: World) -> None:
    world.queue.set_limits(SLOW, rate=50)
    world.fill("alice", 12, name=SLOW)
    sizes = []
    for _ in range(3):
        sizes.append(len(claim_slow(world, 12)))
        world.advance(0.1)
    assert sizes == [5, 5, 2]


@pytest.mark.one_partition
def test_a_worker_learns_when_the_rate_lets_the_next_begin(world: World) -> None:
    world.queue.set_limits(SLOW, rate=0.5)
    world.fill("alice", 3, name=SLOW)
    assert hint_of(world) == 0.0  # there is more, of which nobody knows yet that it has to wait
    assert hint_of(world) == 2.0
    world.advance(1.5)
    assert hint_of(world) == 0.5
    assert hint_of(world, names=f"-{SLOW}") > 100  # it is for others


def test_a_raised_rate_of_a_name_acts_at_once(world: World) -> None:
    world.queue.set_limits(SLOW, rate=0.001)
    world.fill("alice", 5, name=SLOW)
    assert len(claim_slow(world, limit=5)) == 1
    assert claim_slow(world, limit=5) == []
    world.queue.set_limits(SLOW, rate=1000)
    world.advance(0.001)
    assert len(claim_slow(world, limit=5)) == 1
    world.advance(0.003)
    assert len(claim_slow(world, limit=5)) == 3


@pytest.mark.one_partition
def test_a_clock_that_is_set_back_does_not_hold_up_the_rate_of_a_name(world: World) -> None:
    world.queue.set_limits(SLOW, rate=2)
    world.fill("alice", 5, name=SLOW)
    assert len(claim_slow(world, limit=5)) == 1
    world.advance(-3600)
    assert hint_of(world) == 0.5
    world.advance(0.5)
    assert len(claim_slow(world, limit=5)) == 1
    world.advance(0.5)
    assert len(claim_slow(world, limit=5)) == 1


def test_a_claim_reads_the_limits_of_names_that_it_meets(own_server: OwnServer) -> None:
    """Counted in bytes that scripts read as a whole: there may be many thousands of limits."""
    server = own_server()
    with TaskQueue.from_url(server.url) as queue, redis.Redis.from_url(server.url) as client:
        for n in range(3):
            queue.set_limits(f"name {n}", slots=2)
        fill(queue, "alice", 10, name="name 1")
        before = count_commands(client)
        assert len(queue.claim("w", limit=5)) == 2
        read = count_commands(client) - before
        assert read["hgetall"] == 1  # the settings of the queue


def test_a_rate_that_is_taken_away_lets_all_begin(world: World) -> None:
    world.queue.set_limits(SLOW, rate=0.5)
    world.fill("alice", 5, name=SLOW)
    claim_slow(world, 5)
    world.queue.set_limits(SLOW)
    assert len(claim_slow(world, 5)) == 4


@pytest.mark.one_partition
def test_a_free_rate_does_not_make_a_worker_spin_while_the_slots_are_taken(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1, rate=1)
    world.fill("alice", 3, name=SLOW)
    claim_slow(world, 3)
    world.advance(5)
    assert hint_of(world) == 995.0  # the end of the lease


# --- waiting for a slot ---------------------------------------------------------------------------

FREES: dict[str, Callable[[TaskQueue, Claim], object]] = {
    "finish": lambda queue, claim: queue.finish(claim),
    "retry later": lambda queue, claim: queue.retry(claim, delay=900),
    "bury": lambda queue, claim: queue.bury(claim),
    "release": lambda queue, claim: queue.release(claim),
    "a raised limit": lambda queue, claim: queue.set_limits(SLOW, slots=2),
    "a removed limit": lambda queue, claim: queue.set_limits(SLOW),
}


@pytest.mark.usefixtures("tokens_only")
@pytest.mark.parametrize("free", FREES)
def test_a_worker_that_waits_for_a_slot_is_woken(world: World, free: str) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 2, name=SLOW)
    (running,) = claim_slow(world, 2)
    world.redis.delete(world.keys["wake"])
    waiter = in_thread(lambda: world.queue.claim("waiter", wait=60))
    world.until_blocked()
    FREES[free](world.queue, running)
    claims: list[Claim] = waiter()
    assert len(claims) == 1


@pytest.mark.usefixtures("tokens_only")
def test_a_limit_that_is_removed_brings_work_to_all_who_wait(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 6, name=SLOW)
    claim_slow(world, 6)
    world.redis.delete(world.keys["wake"])
    waiters = [in_thread(lambda: world.queue.claim("waiter", wait=60)) for _ in range(5)]
    world.until_blocked(5)
    world.queue.set_limits(SLOW)
    got = [task_id for waiter in waiters for task_id in ids_of(waiter())]
    assert sorted(got) == [f"alice-{n}" for n in range(1, 6)]


@pytest.mark.one_partition
def test_a_claim_says_that_more_may_begin_while_there_is_room(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 4, name=SLOW)
    claim_slow(world, 4)
    world.queue.set_limits(SLOW, slots=3)
    assert hint_of(world) == 0.0
    assert hint_of(world) == 1000.0  # all slots are taken


# --- names of a claim -----------------------------------------------------------------------------


@pytest.fixture
def mixed(queue: TaskQueue) -> TaskQueue:
    """Tasks of three names, of two users in turn."""
    for n in range(4):
        for user in ("alice", "bob"):
            for name in ("a", "b", "c"):
                push(queue, f"{user}-{name}{n}", user_id=user, name=name)
    return queue


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"names": ["a"]}, "a"),
        ({"names": ["b", "c", "none"]}, "bc"),
        ({"avoid": ["a"]}, "bc"),
        ({"avoid": ["a", "b", "none"]}, "c"),
        ({"names": None, "avoid": ()}, "abc"),
    ],
)
def test_a_claim_takes_only_the_names_that_it_wants(
    mixed: TaskQueue, world: World, how: dict[str, Any], names: str
) -> None:
    before = world.dump()["status"]
    claims = mixed.claim("w", limit=100, **how)
    assert {claim.task.name for claim in claims} == set(names)
    assert len(claims) == 8 * len(names)
    after = world.dump()["status"]
    others = {i for i, record in before.items() if record["name"] not in names}
    assert {i: after[i] for i in others} == {i: before[i] for i in others}
    assert held(world) == []


def test_what_one_claimer_leaves_another_finds_in_its_old_order(mixed: TaskQueue) -> None:
    mixed.claim("w", limit=100, avoid=["a"])
    claims = mixed.claim("w", limit=100)
    assert ids_of(claims) == [f"{user}-a{n}" for n in range(4) for user in ("alice", "bob")]
    assert {claim.attempt for claim in claims} == {1}


@pytest.mark.parametrize(
    "how", [{"names": []}, {"names": ["a\nb"]}, {"names": [""]}, {"avoid": [7]}]
)
def test_names_that_cannot_be_are_refused(queue: TaskQueue, how: dict[str, Any]) -> None:
    with pytest.raises(InvalidTask):
        queue.claim("w", **how)


def test_the_order_between_users_is_fair_though_some_tasks_are_passed_over(world: World) -> None:
    world.queue.set_user("bob", weight=3)
    for user in ("alice", "bob"):
        for n in range(20):
            world.push(f"{user}-{n}", user_id=user, name="a" if n % 2 else "b")
    users = [claim.task.user_id for _ in range(8) for claim in world.queue.claim("w", avoid=["a"])]
    assert Counter(users) == {"alice": 2, "bob": 6}


@pytest.mark.parametrize("limit", [1, 3])
def test_tasks_of_many_users_that_are_not_wanted_are_no_obstacle(world: World, limit: int) -> None:
    for n in range(50):
        world.push(f"a{n}", user_id=f"u{n:03}", name="a")
    world.push("wanted", user_id="zoe", name="b")
    assert ids_of(world.queue.claim("w", limit=limit, avoid=["a"])) == ["wanted"]


def test_a_wanted_task_behind_very_many_users_is_found_in_a_while(queue: TaskQueue) -> None:
    for n in range(700):
        push(queue, f"a{n}", user_id=f"u{n:03}", name="a")
    push(queue, "wanted", user_id="zoe", name="b")
    found = [i for _ in range(8) for i in ids_of(queue.claim("w", names=["b"]))]
    assert found == ["wanted"]


@pytest.mark.parametrize("limit", [1, 50, 242, 1000])
def test_tasks_behind_many_users_are_found_whatever_the_limit(queue: TaskQueue, limit: int) -> None:
    """Two workers that leave each other's tasks alone; those of one are all behind."""
    queue.push_many(make_task(f"u{n:03}", f"a{n}", name="a") for n in range(880))
    for n in range(5):
        push(queue, f"wanted-{n}", user_id=f"zoe-{n}", name="b")
    found: list[str] = []
    for _ in range(10 + 5):
        found += ids_of(queue.claim("one", limit=limit, avoid=["a"]))
    assert sorted(found) == [f"wanted-{n}" for n in range(5)]


@pytest.mark.parametrize("seed", range(6))
def test_repeated_claims_look_at_every_user(queue: TaskQueue, seed: int) -> None:
    """Whatever the limit, and where the tasks are, and though others claim meanwhile."""
    rng = random.Random(seed)
    users, deep = rng.randint(300, 900), rng.randint(1, 6)
    limit = rng.choice([1, 2, 50, 242, 1000])
    wanted = rng.sample(range(users), 4)
    tasks = [make_task(f"u{n}", f"a{n}-{k}", name="a") for n in range(users) for k in range(deep)]
    queue.push_many(tasks)
    push(queue, *(f"b{n}" for n in wanted[:2]), user_id=f"u{wanted[0]}", name="b")
    push(queue, *(f"b{n}" for n in wanted[2:]), user_id=f"u{wanted[2]}", name="b")
    found: list[str] = []
    # A claim looks at a thousand tasks in vain, half of them where the last one stopped; a user
    # counts for four.
    for _ in range(math.ceil(users * (deep + 4) / 500) + 4):
        found += ids_of(queue.claim("one", limit=limit, names=["b"]))
        assert queue.claim("two", limit=limit, names=["c"]) == []
    assert sorted(found) == sorted(f"b{n}" for n in wanted)


def test_a_claim_that_finds_nothing_reads_a_bounded_number_of_tasks(own_server: OwnServer) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url) as queue, redis.Redis.from_url(server.url) as client:
        queue.push_many(
            make_task(f"u{n}", f"a{n}-{k}", name="a") for n in range(60) for k in range(120)
        )
        for _ in range(3):
            before = count_commands(client)
            assert queue.claim("w", limit=240, names=["b"]) == []
            # Five readings of each user, of up to fifty tasks.
            assert (count_commands(client) - before)["zrangebylex"] <= 100


@pytest.mark.one_partition
def test_claims_that_find_nothing_look_less_and_less_often(world: World) -> None:
    world.fill("alice", 5, name="a")
    waits = []
    for _ in range(7):
        waits.append(hint_of(world, names="+b"))
        world.advance(waits[-1])
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    world.push("t1", name="b")
    assert ids_of(world.queue.claim("w", names=["b"])) == ["t1"]
    world.queue.claim("w", names=["b"])
    assert hint_of(world, names="+b") <= 0.25


def test_a_claim_reads_no_user_until_there_is_something_new(own_server: OwnServer) -> None:
    server = own_server()
    clock = ManualClock()
    with (
        TaskQueue.from_url(server.url, clock=clock) as queue,
        redis.Redis.from_url(server.url) as client,
    ):
        fill(queue, "alice", 50, name="a")
        assert queue.claim("w", names=["b"]) == []
        before = count_commands(client)
        fill(queue, "bob", 5, name="a")
        assert queue.claim("w", names=["b"]) == []
        assert (count_commands(client) - before)["zrangebylex"] == 1  # bob has come
        push(queue, "t1", user_id="alice", name="b")
        assert ids_of(queue.claim("w", names=["b"])) == ["t1"]


def test_a_task_that_comes_behind_many_users_is_begun_by_the_next_claim(world: World) -> None:
    """Also when its worker has not looked at them all: it is told of its users."""
    world.queue.push_many(
        make_task(f"u{n:03}", f"a{n}-{k}", name="a") for n in range(300) for k in range(30)
    )
    assert world.queue.claim("w", limit=8, names=["b"]) == []
    for n in range(3):
        world.push(f"b{n}", user_id=f"zoe-{n}", name="b")
        assert ids_of(world.queue.claim("w", limit=8, names=["b"])) == [f"b{n}"]


def test_more_users_than_a_kind_is_told_of_are_found_too(queue: TaskQueue) -> None:
    queue.push_many(make_task(f"u{n:03}", f"a{n}", name="a") for n in range(300))
    assert queue.claim("w", limit=8, names=["b"]) == []
    queue.push_many(make_task(f"zoe-{n:03}", f"b{n}", name="b") for n in range(120))
    found: list[str] = []
    for _ in range(25):
        found += ids_of(queue.claim("w", limit=8, names=["b"]))
    assert len(found) == 120


@pytest.mark.one_partition
@pytest.mark.parametrize("how", ["cap", "pause", "rate", "slot", "delay", "retry", "release"])
def test_a_worker_that_looks_at_nobody_hears_of_what_it_may_take(world: World, how: str) -> None:
    """Whatever makes a task claimable tells the kind of worker that may take it, and wakes it."""
    end = block(world, how)
    world.fill("bob", 3, name="a")
    assert (
        world.queue.claim("w", names=["b"]) == []
    )  # it has looked at all, and is not to look again
    wake = wake_list(world, "+b")
    world.redis.delete(wake)
    end()
    assert world.redis.exists(wake) or how in ("rate", "delay")  # by the clock, which wakes nobody
    assert ids_of(world.queue.claim("w", names=["b"])) == ["wanted"]


def block(world: World, how: str) -> Callable[[], object]:
    """A task of the name `b` that cannot be claimed for some reason; what takes that away."""
    if how == "cap":
        world.queue.set_user("alice", max_running=1)
        world.push("before", "wanted", name="b")
        running = world.claim_one()
        return lambda: world.queue.finish(running)
    if how == "pause":
        world.queue.set_user("alice", paused=True)
        world.push("wanted", name="b")
        return lambda: world.queue.set_user("alice", paused=False)
    if how == "rate":
        world.queue.set_user("alice", rate=1)
        world.push("before", "wanted", name="b")
        world.claim_one()
        return lambda: world.advance(1)
    if how == "slot":
        world.queue.set_limits("b", slots=1)
        world.push("before", "wanted", name="b")
        (running,) = world.queue.claim("w", limit=2)
        return lambda: world.queue.finish(running)
    if how == "delay":
        world.push("wanted", name="b", delay=0.1)
        return lambda: world.advance(0.1)
    running = world.push_and_claim("wanted", name="b")
    if how == "retry":
        return lambda: world.queue.retry(running)
    return lambda: world.queue.release(running)


@pytest.mark.one_partition
@pytest.mark.usefixtures("tokens_only")
def test_a_task_wakes_nobody_who_cannot_take_it(world: World) -> None:
    """Those who claim only other names stay blocked; one of those who may take it comes."""
    claims: Counter[str] = Counter()
    claim_once = world.queue._claim_once

    def counted(worker_id: str, *arguments: Any) -> Any:
        claims[worker_id] += 1
        return claim_once(worker_id, *arguments)

    world.patch(world.queue, "_claim_once", counted)
    mail = in_thread(lambda: world.queue.claim("mail", wait=60, names=["mail"]))
    world.until_blocked()
    rest = in_thread(lambda: world.queue.claim("rest", wait=60, avoid=["mail"]))
    world.until_blocked(2)
    for n in range(5):
        world.push(f"p{n}", user_id=f"u{n}", name="print")
        if n == 0:
            assert ids_of(rest()) == ["p0"]
    world.push("t1", name="mail")
    assert ids_of(mail()) == ["t1"]
    assert claims == {"mail": 2, "rest": 2}


def test_a_worker_of_a_kind_without_a_place_is_served_too(queue: TaskQueue) -> None:
    for n in range(24):
        queue.claim("w", names=[f"name {n}"])
    queue.push_many(make_task(f"u{n:03}", f"a{n}", name="a") for n in range(500))
    push(queue, "wanted", user_id="zoe", name="b")
    found = [i for _ in range(15) for i in ids_of(queue.claim("w", names=["b"]))]
    assert found == ["wanted"]


@pytest.mark.one_partition
def test_a_kind_that_is_heard_of_no_more_is_forgotten(world: World) -> None:
    world.queue.claim("w", names=["a"])
    wake = wake_list(world, "+a")
    world.push("t1", name="a")
    assert world.redis.delete(wake) == 1
    world.advance(61)
    world.push("t2", name="a")
    assert world.redis.exists(wake) == 0


def test_a_user_behind_one_whose_critical_task_is_not_wanted_is_served(world: World) -> None:
    world.fill("zoe", 2)
    claim_slow(world, 2)  # which puts zoe behind the others
    world.push("no-1", user_id="alice", name="a")
    world.push("yes", user_id="bob", name="b")
    world.push("no-2", user_id="zoe", name="a", priority=Priority.CRITICAL)
    assert ids_of(world.queue.claim("w", avoid=["a"])) == ["yes"]


@pytest.mark.parametrize("users", [1, 10, 300])
def test_a_claim_that_finds_nothing_does_not_spin(world: World, users: int) -> None:
    for n in range(users):
        world.push(f"a{n}", user_id=f"u{n:03}", name="a")
    for _ in range(5):
        assert hint_of(world, names="-a") > 0
    world.push("wanted", user_id="v", name="b")
    assert ids_of(world.queue.claim("w", avoid=["a"])) == ["wanted"]


def test_a_claim_looks_at_a_hundred_tasks_of_a_user(queue: TaskQueue) -> None:
    fill(queue, "alice", 99, name="a")
    push(queue, "in sight", name="b")
    fill(queue, "bob", 100, name="a")
    push(queue, "out of sight", user_id="bob", name="b")
    assert ids_of(queue.claim("w", limit=9, names=["b"])) == ["in sight"]


@pytest.mark.usefixtures("tokens_only")
def test_a_worker_passes_the_token_of_a_task_that_it_does_not_want_on(world: World) -> None:
    others = [in_thread(lambda: world.queue.claim("other", wait=60, avoid=["a"])) for _ in range(2)]
    world.until_blocked(2)
    waiter = in_thread(lambda: world.queue.claim("waiter", wait=60, names=["a"]))
    world.until_blocked(3)
    world.push("t1", name="a")
    assert ids_of(waiter()) == ["t1"]
    world.push("t2", "t3", name="b")
    assert sorted(ids_of(others[0]() + others[1]())) == ["t2", "t3"]


@pytest.mark.usefixtures("tokens_only")
def test_a_worker_passes_the_token_of_a_slot_that_it_does_not_want_on(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 2, name=SLOW)
    (running,) = claim_slow(world, 2)
    world.redis.delete(world.keys["wake"])
    other = in_thread(lambda: world.queue.claim("other", wait=60, avoid=[SLOW]))
    world.until_blocked()
    waiter = in_thread(lambda: world.queue.claim("waiter", wait=60))
    world.until_blocked(2)
    world.queue.finish(running)
    assert ids_of(waiter()) == ["alice-1"]
    world.push("for the other")
    assert ids_of(other()) == ["for the other"]


def test_a_worker_leaves_held_tasks_that_it_does_not_want_where_they_are(world: World) -> None:
    world.queue.set_limits(SLOW, slots=1)
    world.fill("alice", 5, name=SLOW)
    (running,) = claim_slow(world, 5)
    world.queue.finish(running)
    before = world.places()
    assert world.queue.claim("w", limit=9, avoid=[SLOW]) == []
    assert (world.places(), len(held(world))) == (before, 3)  # one has come back for others
    assert len(drain(world.queue, 1)) == 4


@pytest.mark.one_partition
def test_a_token_is_passed_on_sixteen_times_for_a_task(world: World) -> None:
    for n in range(24):  # those before it have places
        world.queue.claim("w", avoid=[f"a{n}"])
    for task_id in ("t1", "t2"):
        world.push(task_id, name="a")
        passed = 0
        for _ in range(20):
            world.redis.delete(world.keys["wake"])
            world.queue.claim("w", avoid=["a"])
            passed += world.redis.exists(world.keys["wake"])
        assert passed == 16


@pytest.mark.one_partition
@pytest.mark.parametrize("users", [300, 400, 500])
def test_a_kind_that_has_looked_at_all_in_several_claims_rests(world: World, users: int) -> None:
    world.queue.push_many(make_task(f"u{n:03}", f"a{n}", name="a") for n in range(users))
    rests = []
    for _ in range(8):
        assert world.queue.claim("w", names=["b"]) == []
        state: Any = world.redis.hget(world.keys["kinds"], "1.state")
        _, _, till, pause, _ = map(int, state.split())
        rests.append((till - world.clock.now_ms() if till else 0, pause))
    walk = rests.index((250, 250))  # the claims before looked at a part each
    assert walk > 0
    assert rests == [(0, 0)] * walk + [(250, 250)] * (8 - walk)
    world.advance(0.25)
    found = [hint_of(world, names="+b") for _ in range(walk + 1)]
    assert found[-1] == pytest.approx(0.5)


def test_the_order_of_names_makes_no_other_kind(world: World) -> None:
    for names in itertools.permutations("abc"):
        world.queue.claim("w", names=names)
        world.queue.claim("w", names=[*names, "a"])
        world.queue.claim("w", avoid=names)
    fields: list[Any] = world.redis.hkeys(world.keys["kinds"])
    assert {key for key in fields if b"names" in key} == {b"1.names", b"2.names"}


@pytest.mark.one_partition
def test_a_kind_is_told_of_fifty_users_by_name_and_that_there_are_more(world: World) -> None:
    world.queue.claim("w", names=["a"])

    def told() -> list[str]:
        text: Any = world.redis.hget(world.keys["kinds"], "1.news") or b""
        return str(text.decode()).split()

    world.queue.push_many(make_task(name="a", user_id=f"u{n}") for n in (0, 1, 0))
    assert told() == ["u0", "u1"]
    world.queue.push_many(
        make_task(name=name, user_id=f"{name}{n}") for n in range(5) for name in "ab"
    )
    assert told() == ["u0", "u1", *(f"a{n}" for n in range(5))]
    world.queue.push_many(make_task(name="a", user_id=f"u{n}") for n in range(45))
    assert told() == ["u0", "u1", *(f"a{n}" for n in range(5)), *(f"u{n}" for n in range(2, 45))]
    world.queue.push_many(make_task(name="a", user_id=f"more{n}") for n in range(3))
    assert told()[49:] == ["u44", "*"]
    world.queue.push_many(make_task(name="a", user_id=f"again{n}") for n in range(3))
    assert told()[49:] == ["u44", "*"]
    found = [
        claim.task.user_id for _ in range(9) for claim in world.queue.claim("w", 9, names=["a"])
    ]
    assert len(found) == 3 + 5 + 45 + 6
    assert told() == []


def test_critical_tasks_that_are_not_wanted_do_not_spend_the_credit(world: World) -> None:
    world.fill("alice", 30, name="a", priority=Priority.CRITICAL)
    world.fill("bob", 3, name="b")
    assert len(world.queue.claim("w", limit=3, avoid=["a"])) == 3
    assert float(world.dump()["fair"].get("credit", 10)) == 10.0
    assert ids_of(world.queue.claim("w", limit=2)) == ["alice-0", "alice-1"]


def test_a_critical_task_goes_first_though_another_before_it_is_not_wanted(world: World) -> None:
    for user in ("alice", "bob", "carol"):
        world.push(f"{user}-no", user_id=user, name="a", priority=Priority.CRITICAL)
        world.push(f"{user}-plain", user_id=user, name="b")
    world.push("first", user_id="carol", name="b", priority=Priority.CRITICAL)
    assert ids_of(world.queue.claim("w", avoid=["a"])) == ["first"]


def test_names_and_slots_work_together(queue: TaskQueue) -> None:
    queue.set_limits("b", slots=1)
    for n in range(4):
        push(queue, f"a{n}", f"b{n}", name="a" if n % 2 else "b")
    assert ids_of(queue.claim("w", limit=9, names=["b"])) == ["a0"]
    assert ids_of(queue.claim("w", limit=9, avoid=["b"])) == ["a1", "b1", "a3", "b3"]
    assert queue.claim("w", limit=9) == []


def test_finish_and_claim_takes_only_the_names_that_it_wants(queue: TaskQueue) -> None:
    push(queue, "t1", name="a")
    push(queue, "t2", name="b")
    (claim,) = queue.claim("w", names=["a"])
    words, claims, hint = queue.finish_and_claim([(claim, None)], "w", 5, names=["a"])
    assert (words, claims) == (["finished"], [])
    assert hint > 0
    assert ids_of(queue.finish_and_claim([], "w", 5, avoid=["a"])[1]) == ["t2"]


# --- all together ---------------------------------------------------------------------------------


class Chaos:
    """Random calls, and what must hold after each of them."""

    NAMES = ("a", "b", "c", "d")
    USERS = ("u", "v", "w", "x", "y")

    def __init__(self, queue: TaskQueue, client: redis.Redis, clock: ManualClock, seed: int):
        self.queue, self.client, self.clock = queue, client, clock
        self.random = random.Random(seed)
        self.claims: list[Claim] = []
        self.pushed = 0
        self.slots: dict[str, int] = {}

    def step(self) -> None:
        actions = [self.push] * 3 + [self.claim] * 4 + [self.claim_some] * 3 + [self.end] * 4
        actions += [self.set_limits, self.set_user, self.cancel, self.move, self.wait]
        self.random.choice(actions)()

    def push(self) -> None:
        names = (f"t{self.pushed + n}" for n in range(self.random.choice((1, 1, 3, 20))))
        ids = list(names)
        user, name = self.random.choice(self.USERS), self.random.choice(self.NAMES)
        push(self.queue, *ids, user_id=user, name=name, priority=self.random.choice((1, 3, 6)))
        self.pushed += len(ids)

    def claim(self) -> None:
        limit = self.random.choice((1, 1, 4, 30))
        claims, hint = self.take(limit)
        for _ in range(50):
            if len(claims) == limit or hint > 0:
                break
            more, hint = self.take(limit - len(claims))  # which is what a hint of 0 asks for
            claims += more
        if len(claims) < limit:
            self.check_nothing_is_left()

    def claim_some(self) -> None:
        names, how = self.random.sample(self.NAMES, 2), self.random.choice("+-")
        claims, _ = self.take(self.random.choice((1, 4)), how + "\n".join(names))
        assert all((claim.task.name in names) == (how == "+") for claim in claims)

    def take(self, limit: int, names: str = "") -> tuple[list[Claim], float]:
        before = self.running()
        claims, hint, *_ = self.queue.link.perform(
            self.queue._claim_once("w", limit, 60_000, Wanted(names))
        )
        begun = Counter(claim.task.name for claim in claims)
        for name, slots in self.slots.items():
            assert begun[name] <= max(0, slots - before[name])
        self.claims += claims
        return claims, hint

    def running(self) -> Counter[str]:
        """Slots that are taken, of leases that are not over."""
        state = dump(self.client)
        ends = state.get("leases", {})
        taken = [member.split("\0") for member in state.get("slots", {})]
        now = self.clock.now_ms()
        return Counter(name for name, task_id in taken if ends[task_id] > now)

    def check_nothing_is_left(self) -> None:
        """All that waits has a user who may not be served, or a name without room."""
        state = dump(self.client)
        for member in state.get("held", {}):
            assert not self.has_room(member.split("\0")[1], state)
        assert "ready" not in state

    def has_room(self, name: str, state: dict[str, Any]) -> bool:
        limits = state.get("limits", {}).get(name, {})
        if "slots" in limits and self.running()[name] >= limits["slots"]:
            return False
        paced = float(state.get("paced", {}).get(name, 0))
        return "rate" not in limits or paced <= self.clock.now_ms()

    def end(self) -> None:
        if not self.claims:
            return
        claim = self.claims.pop(self.random.randrange(len(self.claims)))
        how = self.random.choice((*["finish"] * 4, "retry", "release", "bury", "leave"))
        with suppress(LeaseLost):
            if how == "retry":
                self.queue.retry(claim, "no", delay=self.random.choice((0, 5)))
            elif how != "leave":
                {"finish": self.queue.finish, "release": self.queue.release}.get(
                    how, self.queue.bury
                )(claim)

    def set_limits(self) -> None:
        name = self.random.choice(self.NAMES)
        slots = self.random.choice((None, 1, 2, 5))
        rate = self.random.choice((None, None, 1.0))
        self.slots.pop(name, None)
        if slots is not None:
            self.slots[name] = slots
        self.queue.set_limits(name, slots=slots, rate=rate)

    def set_user(self) -> None:
        user = self.random.choice(self.USERS)
        self.queue.set_user(user, paused=self.random.random() < 0.3)
        self.queue.set_user(user, max_running=self.random.choice((None, None, 1, 3)))

    def cancel(self) -> None:
        self.queue.cancel(f"t{self.random.randrange(self.pushed + 1)}")

    def move(self) -> None:
        with suppress(UnknownTask):
            task_id = f"t{self.random.randrange(self.pushed + 1)}"
            self.queue.reschedule(task_id, delay=self.random.choice((0, 3)))

    def wait(self) -> None:
        self.clock.advance(self.random.choice((0.5, 1, 10, 61)))

    def drain(self) -> None:
        """Nobody is stopped any more: all that is left ends."""
        for user in self.USERS:
            self.queue.set_user(user, paused=False, max_running=None)
        self.clock.advance(100)
        for _ in range(self.pushed):
            claims = self.queue.claim("w", limit=30, lease=60)
            self.queue.finish_many((claim, None) for claim in claims)
            self.clock.advance(1)
        assert self.queue.size() == 0


@pytest.mark.one_partition
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_nothing_waits_that_could_run(world: World, seed: int) -> None:
    world.queue.configure(max_attempts=1000)
    chaos = Chaos(world.queue, world.redis, world.clock, seed)
    for _ in range(120):
        chaos.step()
        world.check()
    chaos.drain()
    assert "held" not in world.dump()
