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
from support import (
    check_consistency,
    claim_one,
    count_commands,
    dump,
    fill,
    ids_of,
    in_thread,
    make_task,
    places,
    push,
    until_blocked,
)

from fairqueue.clock import ManualClock
from fairqueue.errors import (
    ConfigurationError,
    InvalidTask,
    LeaseLost,
    QueueFull,
    UnknownTask,
)
from fairqueue.models import Claim, HandlerLimits
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.validation import Priority

OwnServer = Callable[..., EmbeddedServer]

SLOW = "slow"


def held(client: redis.Redis) -> list[str]:
    """The tasks that are set aside, sorted."""
    return sorted(member.split("\0")[3] for member in dump(client).get("held", {}))


def hint_of(queue: TaskQueue, limit: int = 1, names: str = "") -> float:
    """What a claim says until when there may be more, in seconds."""
    return queue.link.perform(queue._claim_once("w", limit, 1_000_000, names))[1]


def claim_slow(queue: TaskQueue, limit: int = 1, lease: float = 1000) -> list[Claim]:
    """Claim so many tasks of any name."""
    return queue.claim("w", limit=limit, lease=lease)


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


def test_slots_hold_when_many_claim_at_once(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=3)
    for n in range(10):
        fill(queue, f"u{n}", 6, name=SLOW)
    lock, running, most, done = threading.Lock(), set[str](), 0, 0

    def work(worker: int) -> None:
        nonlocal most, done
        while done < 60:
            for claim in queue.claim(f"w{worker}", limit=2, wait=0.5):
                with lock:
                    running.add(claim.task.task_id)
                    most = max(most, len(running))
                with lock:
                    running.remove(claim.task.task_id)
                    done += 1
                queue.finish(claim)

    for wait in [in_thread(partial(work, n)) for n in range(4)]:
        wait()
    assert done == 60
    assert most <= 3


def test_no_slots_at_all_means_no_limit(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    queue.set_limits(SLOW, slots=0)
    fill(queue, "alice", 3, name=SLOW)
    assert queue.get_limits() == {}
    assert len(claim_slow(queue, 5)) == 3


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
def test_a_bad_limit_is_named_and_nothing_is_stored(
    queue: TaskQueue, redis_client: redis.Redis, limits: dict[str, Any]
) -> None:
    ((field, value),) = limits.items()
    with pytest.raises(ConfigurationError, match=f"{field}.*{value!r}"):
        queue.set_limits(SLOW, **limits)
    assert dump(redis_client) == {}


def test_a_bad_name_is_named_and_nothing_is_stored(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        queue.set_limits("a\nb", slots=1)
    assert dump(redis_client) == {}


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
def test_a_slot_is_freed_however_the_lease_ends(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock, end: str
) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 3, name=SLOW)
    (first,) = claim_slow(queue, 3)
    assert claim_slow(queue, 3) == []
    ENDS[end](queue, clock, first)
    (second,) = claim_slow(queue, 3)
    assert list(dump(redis_client)["slots"]) == [f"{SLOW}\0{second.task.task_id}"]


@pytest.mark.untidy
@pytest.mark.parametrize("text", [None, b"{", b'{"user":"alice"}'])
def test_the_slot_of_a_run_whose_record_is_spoilt_is_free_when_its_lease_is_over(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock, text: bytes | None
) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 2, name=SLOW)
    claim_slow(queue)
    if text is None:
        redis_client.hdel(queue.keys["status"], "alice-0")
    else:
        redis_client.hset(queue.keys["status"], "alice-0", text)
    assert claim_slow(queue) == []
    clock.advance(2000)
    assert ids_of(claim_slow(queue)) == ["alice-1"]
    assert list(dump(redis_client)["slots"]) == [f"{SLOW}\0alice-1"]


CHANGES: dict[str, tuple[dict[str, Any], int]] = {
    "lowered": ({"slots": 1}, 1),
    "raised": ({"slots": 5}, 5),
    "removed": ({}, 50),
    "only a time-out is left": ({"timeout": 5}, 50),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_task_is_stuck_when_the_limit_changes_while_it_waits(
    queue: TaskQueue, redis_client: redis.Redis, change: str
) -> None:
    limits, at_most = CHANGES[change]
    queue.set_limits(SLOW, slots=2)
    fill(queue, "alice", 6, name=SLOW)
    fill(queue, "bob", 6, name=SLOW)
    running = claim_slow(queue, 12)
    assert (len(running), len(held(redis_client))) == (2, 10)
    queue.set_limits(SLOW, **limits)
    queue.finish_many((claim, None) for claim in running)
    assert len(drain(queue, at_most)) == 10
    assert "slot_line" not in dump(redis_client)


def test_a_lowered_limit_lets_those_end_that_run(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=3)
    fill(queue, "alice", 6, name=SLOW)
    running = claim_slow(queue, 6)
    queue.set_limits(SLOW, slots=1)
    for claim in running[:2]:
        queue.finish(claim)
        assert claim_slow(queue, 6) == []
    queue.finish(running[2])
    assert len(claim_slow(queue, 6)) == 1


def test_a_limit_counts_those_that_begin_after_it_was_set(queue: TaskQueue) -> None:
    fill(queue, "alice", 6, name=SLOW)
    claim_slow(queue, 2)
    queue.set_limits(SLOW, slots=1)
    assert len(claim_slow(queue, 6)) == 1


def test_names_do_not_take_slots_from_each_other(queue: TaskQueue) -> None:
    queue.set_limits("a", slots=1)
    queue.set_limits("ab", slots=2)
    fill(queue, "alice", 3, name="a")
    fill(queue, "bob", 3, name="ab")
    fill(queue, "carol", 3)
    names = Counter(claim.task.name for claim in claim_slow(queue, 20))
    assert names == {"a": 1, "ab": 2, "default": 3}


def test_a_task_that_comes_back_needs_a_slot_again(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    push(queue, "a", "b", name=SLOW)
    queue.retry(claim_one(queue), delay=5)
    assert ids_of(claim_slow(queue, 5)) == ["b"]
    queue.reschedule("a")
    assert claim_slow(queue, 5) == []


# --- what is set aside ----------------------------------------------------------------------------


def test_tasks_without_a_slot_do_not_block_the_others_of_their_user(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 1000, name=SLOW)
    push(queue, "other")
    assert ids_of(claim_slow(queue, 2)) == ["alice-0", "other"]


def test_a_claim_that_sets_aside_as_many_as_it_may_comes_again_at_once(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 1, name=SLOW)
    claim_slow(queue)
    fill(queue, "bob", 1000, name=SLOW)
    push(queue, *(f"more-{n}" for n in range(200)), user_id="bob", name=SLOW)
    push(queue, "other", user_id="bob")
    assert hint_of(queue) == 0.0
    assert ids_of(claim_slow(queue)) == ["other"]


def test_many_users_without_a_slot_do_not_block_one_who_needs_none(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    for n in range(150):
        push(queue, f"t{n}", user_id=f"u{n:03}", name=SLOW)
    push(queue, "other", user_id="zoe")
    claim_slow(queue)
    assert ids_of(claim_slow(queue)) == ["other"]


def test_users_who_wait_for_slots_get_them_in_turn(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 500, name=SLOW)
    (running,) = claim_slow(queue)
    claim_slow(queue)
    fill(queue, "bob", 1, name=SLOW)
    served = []
    for _ in range(3):
        queue.finish(running)
        (running,) = claim_slow(queue)
        served.append(running.task.user_id)
    assert "bob" in served


def test_users_with_many_held_tasks_take_turns(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    for user in ("alice", "bob", "carol"):
        fill(queue, user, 10, name=SLOW)
    served = []
    for _ in range(12):
        (claim,) = claim_slow(queue)
        served.append(claim.task.user_id)
        queue.finish(claim)
    assert Counter(served) == {"alice": 4, "bob": 4, "carol": 4}


def test_priorities_of_a_user_hold_among_held_tasks(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    push(queue, "first", name=SLOW, priority=Priority.CRITICAL)
    for n, priority in enumerate((1, 3, 6, 5, 3)):
        push(queue, f"{priority}-{n}", name=SLOW, priority=priority)
    assert drain(queue, 1) == ["first", "6-2", "5-3", "3-1", "3-4", "1-0"]


def test_a_new_task_of_higher_priority_goes_before_held_ones(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 3, name=SLOW)
    (running,) = claim_slow(queue)
    claim_slow(queue)
    push(queue, "urgent", name=SLOW, priority=Priority.VERY_HIGH)
    queue.finish(running)
    assert ids_of(claim_slow(queue)) == ["urgent"]


def test_a_held_task_can_be_cancelled(queue: TaskQueue, redis_client: redis.Redis) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 3, name=SLOW)
    (running,) = claim_slow(queue, 3)
    assert queue.cancel("alice-1")
    assert places(redis_client)["cancelled"] == ["alice-1"]
    queue.finish(running)
    assert drain(queue, 1) == ["alice-2"]


def test_a_user_whose_held_tasks_were_cancelled_gets_no_second_turn(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "zoe", 3, name=SLOW)
    (running,) = claim_slow(queue)
    claim_slow(queue)
    push(queue, "gone", name=SLOW)
    claim_slow(queue)
    queue.cancel("gone")
    fill(queue, "alice", 3, name=SLOW)
    claim_slow(queue)
    turns = [member for member in dump(redis_client)["slot_line"] if member[0] != "\1"]
    assert sorted(member.split("\0")[2] for member in turns) == ["alice", "zoe"]
    queue.finish(running)
    assert len(drain(queue, 1)) == 5


@pytest.mark.parametrize("delay", [None, 30])
def test_a_held_task_can_be_moved(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock, delay: float | None
) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 2, name=SLOW)
    (running,) = claim_slow(queue, 2)
    assert queue.reschedule("alice-1", delay=delay)
    assert held(redis_client) == []
    queue.finish(running)
    clock.advance(30)
    assert drain(queue, 1) == ["alice-1"]


def test_held_tasks_are_counted_and_explained(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1, rate=5)
    fill(queue, "alice", 3, name=SLOW)
    fill(queue, "bob", 1, name=SLOW)
    claim_slow(queue, 9)
    assert (queue.size(), queue.size("alice"), queue.size("bob")) == (3, 2, 1)
    assert queue.inspect().ready == 3
    why = queue.explain("alice-1")
    assert why is not None
    assert why.waits_for_slot
    assert [each.code for each in why.reasons] == ["name_slots", "name_rate"]
    assert why.summary.startswith(
        "The one slot of tasks named 'slow' is taken. Tasks named 'slow' have used up their rate "
        "of 5 per second. The next one may start at "
    )


@pytest.mark.parametrize("whose", ["queue", "user"])
def test_held_tasks_count_as_waiting(queue: TaskQueue, whose: str) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 3, name=SLOW)
    claim_slow(queue, 3)
    if whose == "queue":
        queue.configure(max_waiting=3)
    else:
        queue.set_user("alice", max_waiting=3)
    push(queue, "fits")
    with pytest.raises(QueueFull, match=whose):
        push(queue, "too many")


def test_ageing_is_not_changed_while_tasks_are_held(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 2, name=SLOW)
    (running,) = claim_slow(queue, 2)
    queue.finish(running)
    assert (held(redis_client), dump(redis_client).get("leases")) == (["alice-1"], None)
    with pytest.raises(ConfigurationError, match="ageing"):
        queue.configure(ageing=5)


STOPS: dict[str, dict[str, Any]] = {"paused": {"paused": True}, "capped": {"max_running": 1}}


@pytest.mark.parametrize("stop", STOPS)
def test_held_tasks_of_a_user_who_may_not_be_served_do_not_delay_others(
    queue: TaskQueue, stop: str
) -> None:
    queue.set_limits(SLOW, slots=1)
    push(queue, "plain")
    fill(queue, "zoe", 1, name=SLOW)
    running = claim_slow(queue, 2)
    fill(queue, "alice", 20, name=SLOW)
    claim_slow(queue)
    fill(queue, "bob", 1, name=SLOW)
    claim_slow(queue)
    queue.set_user("alice", **STOPS[stop])
    queue.finish(next(claim for claim in running if claim.task.user_id == "zoe"))
    assert ids_of(claim_slow(queue)) == ["bob-0"]


def test_held_tasks_of_a_user_go_on_when_the_pause_is_over(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 5, name=SLOW)
    (running,) = claim_slow(queue, 5)
    queue.set_user("alice", paused=True)
    queue.finish(running)
    assert claim_slow(queue, 5) == []
    queue.set_user("alice", paused=False)
    assert drain(queue, 1) == [f"alice-{n}" for n in range(1, 5)]


@pytest.mark.untidy
@pytest.mark.parametrize("text", [None, b"{", b"[]"])
def test_a_held_task_whose_record_is_spoilt_does_not_stop_the_others(
    queue: TaskQueue, redis_client: redis.Redis, text: bytes | None
) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 4, name=SLOW)
    (running,) = claim_slow(queue, 4)
    if text is None:
        redis_client.hdel(queue.keys["status"], "alice-1")
    else:
        redis_client.hset(queue.keys["status"], "alice-1", text)
    queue.finish(running)
    assert hint_of(queue) == 0.0  # nothing was taken, and there is room
    assert drain(queue, 1) == ["alice-2", "alice-3"]
    assert dump(redis_client)["stats"]["broken_tasks"] == "1"


def test_many_held_tasks_of_many_names_come_back_and_none_is_lost(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    names = [f"n{n}" for n in range(6)]
    for name in names:
        queue.set_limits(name, slots=1)
        push(queue, *(f"{name}-{n}" for n in range(500)), name=name)
    running = []
    while claims := claim_slow(queue, 1000):
        running += claims
    assert (len(running), len(held(redis_client))) == (6, 2994)
    for name in names:
        queue.set_limits(name)
    queue.finish_many((claim, None) for claim in running)
    claims = []
    while more := claim_slow(queue, 1000):
        claims += more
    assert len(set(ids_of(claims))) == 2994


def test_held_tasks_of_more_names_than_a_claim_looks_at_are_not_forgotten(
    queue: TaskQueue,
) -> None:
    names = [f"n{n:03}" for n in range(130)]
    for name in names:
        queue.set_limits(name, slots=1)
        push(queue, f"{name}-a", f"{name}-b", name=name)
    running = {claim.task.name: claim for claim in claim_slow(queue, 1000)}
    assert len(running) == 130
    for name in ("n129", "n000"):
        queue.finish(running[name])
        assert {f"{name}-b"} == {i for _ in range(3) for i in ids_of(claim_slow(queue))}


# --- rates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"slots": 1}, {"slots": 3}, {"rate": 20}])
def test_weights_act_on_who_waits_for_a_limit(
    queue: TaskQueue, clock: ManualClock, limits: dict[str, Any]
) -> None:
    """Ten to one: of what is begun, 0.91 is of the one with the larger weight."""
    queue.set_limits(SLOW, **limits)
    queue.set_user("heavy", weight=10)
    fill(queue, "heavy", 400, name=SLOW)
    fill(queue, "light", 400, name=SLOW)
    users: list[str] = []
    while len(users) < 220:
        clock.advance(0.05)
        claims = claim_slow(queue, limit=5)
        users += [claim.task.user_id for claim in claims]
        queue.finish_many((claim, None) for claim in claims)
    assert users.count("heavy") / len(users) == pytest.approx(10 / 11, abs=0.02)


@pytest.mark.parametrize("name", [SLOW, "a name before it"])
def test_a_new_weight_acts_on_who_already_waits_for_a_limit(queue: TaskQueue, name: str) -> None:
    """Raised from 0.01 to 10, nobody waits out the old debt."""
    queue.set_limits(SLOW, slots=1)
    queue.set_user("raised", weight=0.01)
    fill(queue, "raised", 100, name=SLOW)
    fill(queue, "other", 100, name=SLOW)
    if name != SLOW:
        queue.set_limits(name, slots=1)
        queue.push_many(make_task(user_id="raised", name=name) for _ in range(3))
    users = [claim.task.user_id for each in one_by_one(queue, 20) for claim in each]
    assert users.count("raised") <= 4
    queue.set_user("raised", weight=10)
    users = [
        claim.task.user_id
        for each in one_by_one(queue, 12)
        for claim in each
        if claim.task.name == SLOW
    ]
    assert users.count("raised") >= 8
    queue.set_user("raised", weight=0.01)
    users = [claim.task.user_id for each in one_by_one(queue, 12) for claim in each]
    assert users.count("raised") <= 2


def test_a_newcomer_waits_its_turn_for_a_slot(queue: TaskQueue) -> None:
    """One stride from the present turn, however long the line has been moving."""
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 60, name=SLOW)
    drained = [ids_of(each) for each in one_by_one(queue, 40)]
    assert len(drained) == 40
    fill(queue, "bob", 5, name=SLOW)
    users = [claim.task.user_id for each in one_by_one(queue, 8) for claim in each]
    assert users.count("bob") == pytest.approx(4, abs=1)


def one_by_one(queue: TaskQueue, times: int) -> list[list[Claim]]:
    """Claim what may begin and finish it, so often."""
    all_claims = []
    for _ in range(times):
        claims = claim_slow(queue, limit=5)
        queue.finish_many((claim, None) for claim in claims)
        all_claims.append(claims)
    return all_claims


def test_a_rate_holds_over_all_claimers(queue: TaskQueue, clock: ManualClock) -> None:
    queue.set_limits(SLOW, rate=2)
    fill(queue, "alice", 3, name=SLOW)
    fill(queue, "bob", 3, name=SLOW)
    began = []
    for n in range(31):
        began += [n for w in range(3) for _ in queue.claim(f"w{w}", limit=2)]
        clock.advance(0.1)
    assert began == [0, 5, 10, 15, 20, 25]


def test_a_high_rate_lets_some_begin_together(queue: TaskQueue, clock: ManualClock) -> None:
    queue.set_limits(SLOW, rate=50)
    fill(queue, "alice", 12, name=SLOW)
    sizes = []
    for _ in range(3):
        sizes.append(len(claim_slow(queue, 12)))
        clock.advance(0.1)
    assert sizes == [5, 5, 2]


def test_a_worker_learns_when_the_rate_lets_the_next_begin(
    queue: TaskQueue, clock: ManualClock
) -> None:
    queue.set_limits(SLOW, rate=0.5)
    fill(queue, "alice", 3, name=SLOW)
    assert hint_of(queue) == 0.0  # there is more, of which nobody knows yet that it has to wait
    assert hint_of(queue) == 2.0
    clock.advance(1.5)
    assert hint_of(queue) == 0.5
    assert hint_of(queue, names=f"-{SLOW}") > 100  # it is for others


def test_a_raised_rate_of_a_name_acts_at_once(queue: TaskQueue, clock: ManualClock) -> None:
    queue.set_limits(SLOW, rate=0.001)
    fill(queue, "alice", 5, name=SLOW)
    assert len(claim_slow(queue, limit=5)) == 1
    assert claim_slow(queue, limit=5) == []
    queue.set_limits(SLOW, rate=1000)
    clock.advance(0.001)
    assert len(claim_slow(queue, limit=5)) == 1
    clock.advance(0.003)
    assert len(claim_slow(queue, limit=5)) == 3


def test_a_clock_that_is_set_back_does_not_hold_up_the_rate_of_a_name(
    queue: TaskQueue, clock: ManualClock
) -> None:
    queue.set_limits(SLOW, rate=2)
    fill(queue, "alice", 5, name=SLOW)
    assert len(claim_slow(queue, limit=5)) == 1
    clock.advance(-3600)
    assert hint_of(queue) == 0.5
    clock.advance(0.5)
    assert len(claim_slow(queue, limit=5)) == 1
    clock.advance(0.5)
    assert len(claim_slow(queue, limit=5)) == 1


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


def test_a_rate_that_is_taken_away_lets_all_begin(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, rate=0.5)
    fill(queue, "alice", 5, name=SLOW)
    claim_slow(queue, 5)
    queue.set_limits(SLOW)
    assert len(claim_slow(queue, 5)) == 4


def test_a_free_rate_does_not_make_a_worker_spin_while_the_slots_are_taken(
    queue: TaskQueue, clock: ManualClock
) -> None:
    queue.set_limits(SLOW, slots=1, rate=1)
    fill(queue, "alice", 3, name=SLOW)
    claim_slow(queue, 3)
    clock.advance(5)
    assert hint_of(queue) == 995.0  # the end of the lease


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
def test_a_worker_that_waits_for_a_slot_is_woken(
    queue: TaskQueue, redis_client: redis.Redis, free: str
) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 2, name=SLOW)
    (running,) = claim_slow(queue, 2)
    redis_client.delete(queue.keys["wake"])
    waiter = in_thread(lambda: queue.claim("waiter", wait=60))
    until_blocked(redis_client)
    FREES[free](queue, running)
    claims: list[Claim] = waiter()
    assert len(claims) == 1


@pytest.mark.usefixtures("tokens_only")
def test_a_limit_that_is_removed_brings_work_to_all_who_wait(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 6, name=SLOW)
    claim_slow(queue, 6)
    redis_client.delete(queue.keys["wake"])
    waiters = [in_thread(lambda: queue.claim("waiter", wait=60)) for _ in range(5)]
    until_blocked(redis_client, 5)
    queue.set_limits(SLOW)
    got = [task_id for waiter in waiters for task_id in ids_of(waiter())]
    assert sorted(got) == [f"alice-{n}" for n in range(1, 6)]


def test_a_claim_says_that_more_may_begin_while_there_is_room(queue: TaskQueue) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 4, name=SLOW)
    claim_slow(queue, 4)
    queue.set_limits(SLOW, slots=3)
    assert hint_of(queue) == 0.0
    assert hint_of(queue) == 1000.0  # all slots are taken


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
    mixed: TaskQueue, redis_client: redis.Redis, how: dict[str, Any], names: str
) -> None:
    before = dump(redis_client)["status"]
    claims = mixed.claim("w", limit=100, **how)
    assert {claim.task.name for claim in claims} == set(names)
    assert len(claims) == 8 * len(names)
    after = dump(redis_client)["status"]
    others = {i for i, record in before.items() if record["name"] not in names}
    assert {i: after[i] for i in others} == {i: before[i] for i in others}
    assert held(redis_client) == []


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


def test_the_order_between_users_is_fair_though_some_tasks_are_passed_over(
    queue: TaskQueue,
) -> None:
    queue.set_user("bob", weight=3)
    for user in ("alice", "bob"):
        for n in range(20):
            push(queue, f"{user}-{n}", user_id=user, name="a" if n % 2 else "b")
    users = [claim.task.user_id for _ in range(8) for claim in queue.claim("w", avoid=["a"])]
    assert Counter(users) == {"alice": 2, "bob": 6}


@pytest.mark.parametrize("limit", [1, 3])
def test_tasks_of_many_users_that_are_not_wanted_are_no_obstacle(
    queue: TaskQueue, limit: int
) -> None:
    for n in range(50):
        push(queue, f"a{n}", user_id=f"u{n:03}", name="a")
    push(queue, "wanted", user_id="zoe", name="b")
    assert ids_of(queue.claim("w", limit=limit, avoid=["a"])) == ["wanted"]


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


def test_claims_that_find_nothing_look_less_and_less_often(
    queue: TaskQueue, clock: ManualClock
) -> None:
    fill(queue, "alice", 5, name="a")
    waits = []
    for _ in range(7):
        waits.append(hint_of(queue, names="+b"))
        clock.advance(waits[-1])
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    push(queue, "t1", name="b")
    assert ids_of(queue.claim("w", names=["b"])) == ["t1"]
    queue.claim("w", names=["b"])
    assert hint_of(queue, names="+b") <= 0.25


def test_a_claim_looks_at_nobody_until_there_is_something_new_for_it(
    own_server: OwnServer,
) -> None:
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


def test_a_task_that_comes_behind_many_users_is_begun_by_the_next_claim(
    queue: TaskQueue,
) -> None:
    """Also when its worker has not looked at them all: it is told of its users."""
    queue.push_many(
        make_task(f"u{n:03}", f"a{n}-{k}", name="a") for n in range(300) for k in range(30)
    )
    assert queue.claim("w", limit=8, names=["b"]) == []
    for n in range(3):
        push(queue, f"b{n}", user_id=f"zoe-{n}", name="b")
        assert ids_of(queue.claim("w", limit=8, names=["b"])) == [f"b{n}"]


def test_more_users_than_a_kind_is_told_of_are_found_too(queue: TaskQueue) -> None:
    queue.push_many(make_task(f"u{n:03}", f"a{n}", name="a") for n in range(300))
    assert queue.claim("w", limit=8, names=["b"]) == []
    queue.push_many(make_task(f"zoe-{n:03}", f"b{n}", name="b") for n in range(120))
    found: list[str] = []
    for _ in range(25):
        found += ids_of(queue.claim("w", limit=8, names=["b"]))
    assert len(found) == 120


@pytest.mark.parametrize("how", ["cap", "pause", "rate", "slot", "delay", "retry", "release"])
def test_a_worker_that_looks_at_nobody_hears_of_what_it_may_take(
    queue: TaskQueue, clock: ManualClock, redis_client: redis.Redis, how: str
) -> None:
    """Whatever makes a task claimable tells the kind of worker that may take it, and wakes it."""
    end = block(queue, clock, how)
    fill(queue, "bob", 3, name="a")
    assert queue.claim("w", names=["b"]) == []  # it has looked at all, and is not to look again
    wake = queue.keys[queue.link.perform(queue._claim_once("w", 1, 1000, "+b")).wake]
    redis_client.delete(wake)
    end()
    assert redis_client.exists(wake) or how in ("rate", "delay")  # by the clock, which wakes nobody
    assert ids_of(queue.claim("w", names=["b"])) == ["wanted"]


def block(queue: TaskQueue, clock: ManualClock, how: str) -> Callable[[], object]:
    """A task of the name `b` that cannot be claimed for some reason; what takes that away."""
    if how == "cap":
        queue.set_user("alice", max_running=1)
        push(queue, "before", "wanted", name="b")
        running = claim_one(queue)
        return lambda: queue.finish(running)
    if how == "pause":
        queue.set_user("alice", paused=True)
        push(queue, "wanted", name="b")
        return lambda: queue.set_user("alice", paused=False)
    if how == "rate":
        queue.set_user("alice", rate=1)
        push(queue, "before", "wanted", name="b")
        claim_one(queue)
        return lambda: clock.advance(1)
    if how == "slot":
        queue.set_limits("b", slots=1)
        push(queue, "before", "wanted", name="b")
        (running,) = queue.claim("w", limit=2)
        return lambda: queue.finish(running)
    if how == "delay":
        push(queue, "wanted", name="b", delay=0.1)
        return lambda: clock.advance(0.1)
    push(queue, "wanted", name="b")
    running = claim_one(queue)
    if how == "retry":
        return lambda: queue.retry(running)
    return lambda: queue.release(running)


@pytest.mark.usefixtures("tokens_only")
def test_a_task_wakes_nobody_who_cannot_take_it(
    queue: TaskQueue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who claim only other names stay blocked; one of those who may take it comes."""
    claims: Counter[str] = Counter()
    claim_once = queue._claim_once

    def counted(worker_id: str, *arguments: Any) -> Any:
        claims[worker_id] += 1
        return claim_once(worker_id, *arguments)

    monkeypatch.setattr(queue, "_claim_once", counted)
    mail = in_thread(lambda: queue.claim("mail", wait=60, names=["mail"]))
    until_blocked(redis_client)
    rest = in_thread(lambda: queue.claim("rest", wait=60, avoid=["mail"]))
    until_blocked(redis_client, 2)
    for n in range(5):
        push(queue, f"p{n}", user_id=f"u{n}", name="print")
        if n == 0:
            assert ids_of(rest()) == ["p0"]
    push(queue, "t1", name="mail")
    assert ids_of(mail()) == ["t1"]
    assert claims == {"mail": 2, "rest": 2}


def test_a_worker_of_a_kind_without_a_place_is_served_too(queue: TaskQueue) -> None:
    for n in range(24):
        queue.claim("w", names=[f"name {n}"])
    queue.push_many(make_task(f"u{n:03}", f"a{n}", name="a") for n in range(500))
    push(queue, "wanted", user_id="zoe", name="b")
    found = [i for _ in range(15) for i in ids_of(queue.claim("w", names=["b"]))]
    assert found == ["wanted"]


def test_a_kind_that_is_heard_of_no_more_is_forgotten(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock
) -> None:
    queue.claim("w", names=["a"])
    wake = queue.keys[queue.link.perform(queue._claim_once("w", 1, 1000, "+a")).wake]
    push(queue, "t1", name="a")
    assert redis_client.delete(wake) == 1
    clock.advance(61)
    push(queue, "t2", name="a")
    assert redis_client.exists(wake) == 0


def test_a_user_behind_one_whose_critical_task_is_not_wanted_is_served(queue: TaskQueue) -> None:
    fill(queue, "zoe", 2)
    claim_slow(queue, 2)  # which puts zoe behind the others
    push(queue, "no-1", user_id="alice", name="a")
    push(queue, "yes", user_id="bob", name="b")
    push(queue, "no-2", user_id="zoe", name="a", priority=Priority.CRITICAL)
    assert ids_of(queue.claim("w", avoid=["a"])) == ["yes"]


@pytest.mark.parametrize("users", [1, 10, 300])
def test_a_claim_that_wants_nothing_of_what_there_is_does_not_spin(
    queue: TaskQueue, users: int
) -> None:
    for n in range(users):
        push(queue, f"a{n}", user_id=f"u{n:03}", name="a")
    for _ in range(5):
        assert hint_of(queue, names="-a") > 0
    push(queue, "wanted", user_id="v", name="b")
    assert ids_of(queue.claim("w", avoid=["a"])) == ["wanted"]


def test_a_claim_looks_at_a_hundred_tasks_of_a_user(queue: TaskQueue) -> None:
    fill(queue, "alice", 99, name="a")
    push(queue, "in sight", name="b")
    fill(queue, "bob", 100, name="a")
    push(queue, "out of sight", user_id="bob", name="b")
    assert ids_of(queue.claim("w", limit=9, names=["b"])) == ["in sight"]


@pytest.mark.usefixtures("tokens_only")
def test_a_worker_passes_the_token_of_a_task_that_it_does_not_want_on(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    others = [in_thread(lambda: queue.claim("other", wait=60, avoid=["a"])) for _ in range(2)]
    until_blocked(redis_client, 2)
    waiter = in_thread(lambda: queue.claim("waiter", wait=60, names=["a"]))
    until_blocked(redis_client, 3)
    push(queue, "t1", name="a")
    assert ids_of(waiter()) == ["t1"]
    push(queue, "t2", "t3", name="b")
    assert sorted(ids_of(others[0]() + others[1]())) == ["t2", "t3"]


@pytest.mark.usefixtures("tokens_only")
def test_a_worker_passes_the_token_of_a_slot_that_it_does_not_want_on(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 2, name=SLOW)
    (running,) = claim_slow(queue, 2)
    redis_client.delete(queue.keys["wake"])
    other = in_thread(lambda: queue.claim("other", wait=60, avoid=[SLOW]))
    until_blocked(redis_client)
    waiter = in_thread(lambda: queue.claim("waiter", wait=60))
    until_blocked(redis_client, 2)
    queue.finish(running)
    assert ids_of(waiter()) == ["alice-1"]
    push(queue, "for the other")
    assert ids_of(other()) == ["for the other"]


def test_a_worker_leaves_held_tasks_that_it_does_not_want_where_they_are(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    queue.set_limits(SLOW, slots=1)
    fill(queue, "alice", 5, name=SLOW)
    (running,) = claim_slow(queue, 5)
    queue.finish(running)
    assert queue.claim("w", limit=9, avoid=[SLOW]) == []
    assert len(held(redis_client)) == 4
    assert len(drain(queue, 1)) == 4


def test_a_token_is_passed_on_sixteen_times_for_a_task(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    for n in range(24):  # those before it have places
        queue.claim("w", avoid=[f"a{n}"])
    for task_id in ("t1", "t2"):
        push(queue, task_id, name="a")
        passed = 0
        for _ in range(20):
            redis_client.delete(queue.keys["wake"])
            queue.claim("w", avoid=["a"])
            passed += redis_client.exists(queue.keys["wake"])
        assert passed == 16


@pytest.mark.parametrize("users", [300, 400, 500])
def test_a_kind_that_has_looked_at_all_in_several_claims_rests(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock, users: int
) -> None:
    queue.push_many(make_task(f"u{n:03}", f"a{n}", name="a") for n in range(users))
    rests = []
    for _ in range(8):
        assert queue.claim("w", names=["b"]) == []
        state: Any = redis_client.hget(queue.keys["kinds"], "1.state")
        _, _, till, pause, _ = map(int, state.split())
        rests.append((till - clock.now_ms() if till else 0, pause))
    walk = rests.index((250, 250))  # the claims before looked at a part each
    assert walk > 0
    assert rests == [(0, 0)] * walk + [(250, 250)] * (8 - walk)
    clock.advance(0.25)
    found = [hint_of(queue, names="+b") for _ in range(walk + 1)]
    assert found[-1] == pytest.approx(0.5)


def test_the_order_of_names_makes_no_other_kind(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    for names in itertools.permutations("abc"):
        queue.claim("w", names=names)
        queue.claim("w", names=[*names, "a"])
        queue.claim("w", avoid=names)
    fields: list[Any] = redis_client.hkeys(queue.keys["kinds"])
    assert {key for key in fields if b"names" in key} == {b"1.names", b"2.names"}


def test_a_kind_is_told_of_fifty_users_by_name_and_that_there_are_more(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    queue.claim("w", names=["a"])

    def told() -> list[str]:
        text: Any = redis_client.hget(queue.keys["kinds"], "1.news") or b""
        return str(text.decode()).split()

    queue.push_many(make_task(name="a", user_id=f"u{n}") for n in (0, 1, 0))
    assert told() == ["u0", "u1"]
    queue.push_many(make_task(name=name, user_id=f"{name}{n}") for n in range(5) for name in "ab")
    assert told() == ["u0", "u1", *(f"a{n}" for n in range(5))]
    queue.push_many(make_task(name="a", user_id=f"u{n}") for n in range(45))
    assert told() == ["u0", "u1", *(f"a{n}" for n in range(5)), *(f"u{n}" for n in range(2, 45))]
    queue.push_many(make_task(name="a", user_id=f"more{n}") for n in range(3))
    assert told()[49:] == ["u44", "*"]
    queue.push_many(make_task(name="a", user_id=f"again{n}") for n in range(3))
    assert told()[49:] == ["u44", "*"]
    found = [claim.task.user_id for _ in range(9) for claim in queue.claim("w", 9, names=["a"])]
    assert len(found) == 3 + 5 + 45 + 6
    assert told() == []


def test_critical_tasks_that_are_not_wanted_do_not_spend_the_credit(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    fill(queue, "alice", 30, name="a", priority=Priority.CRITICAL)
    fill(queue, "bob", 3, name="b")
    assert len(queue.claim("w", limit=3, avoid=["a"])) == 3
    assert float(dump(redis_client)["fair"].get("credit", 10)) == 10.0
    assert ids_of(queue.claim("w", limit=2)) == ["alice-0", "alice-1"]


def test_a_critical_task_goes_first_though_another_before_it_is_not_wanted(
    queue: TaskQueue,
) -> None:
    for user in ("alice", "bob", "carol"):
        push(queue, f"{user}-no", user_id=user, name="a", priority=Priority.CRITICAL)
        push(queue, f"{user}-plain", user_id=user, name="b")
    push(queue, "first", user_id="carol", name="b", priority=Priority.CRITICAL)
    assert ids_of(queue.claim("w", avoid=["a"])) == ["first"]


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
        claims, hint, _ = self.queue.link.perform(self.queue._claim_once("w", limit, 60_000, names))
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


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_nothing_waits_that_could_run(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock, seed: int
) -> None:
    queue.configure(max_attempts=1000)
    chaos = Chaos(queue, redis_client, clock, seed)
    for _ in range(120):
        chaos.step()
        check_consistency(redis_client)
    chaos.drain()
    assert "held" not in dump(redis_client)
