"""What a schedule does at a moment while its task of an earlier one is unfinished."""

from collections.abc import Callable
from typing import Any

import pytest
import redis
from helpers.schedules import get
from helpers.state import dump
from helpers.tasks import claim_one, fill, ids_of
from helpers.world import World

from fairqueue.clock import ManualClock
from fairqueue.errors import BrokenRecord, InvalidSchedule
from fairqueue.link.operation import Call
from fairqueue.models import Claim
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.firing import TickReport
from fairqueue.scheduler.scheduler import TaskScheduler

POLICIES = ("allow", "skip", "buffer_one", "cancel_previous")
LEASE_S = 1000.0


@pytest.fixture
def scheduler(queue: TaskQueue, clock: ManualClock) -> TaskScheduler:
    """The scheduler of the test, half a minute before a moment of `s`."""
    clock.set(1_700_000_010.0)
    return TaskScheduler(queue, "one", lock_timeout=60.0)


class Firing:
    """A schedule `s` of every minute, and its tasks `run(0)`, `run(1)`, ..."""

    def __init__(self, scheduler: TaskScheduler, clock: ManualClock, overlap: str) -> None:
        self.scheduler, self.queue, self.clock = scheduler, scheduler.queue, clock
        scheduler.add_schedule("* * * * *", "alice", schedule_id="s", overlap=overlap)
        schedule = get(scheduler, "s")
        assert schedule.next_run is not None
        self.first_ms = round(schedule.next_run.timestamp() * 1000)

    def run(self, n: int) -> str:
        """The id of the task of the n-th moment."""
        return f"s:{self.first_ms + n * 60_000}"

    def fire(self) -> TickReport:
        """The next moment has come."""
        self.clock.advance(60)
        return self.scheduler.tick()

    def claim(self, count: int = 9) -> list[Claim]:
        """Claim all that is offered."""
        return self.queue.claim("w", limit=count, lease=LEASE_S)

    def states(self) -> list[str]:
        """The states of the first tasks, '' for one that is not there."""
        infos = [self.queue.get(self.run(n)) for n in range(3)]
        return [info.state if info is not None else "" for info in infos]


# --- how the run before it can be -----------------------------------------------------------------


def waiting(firing: Firing) -> None:
    """It waits for a worker."""


def running(firing: Firing) -> None:
    firing.claim()


def retrying(firing: Firing) -> None:
    firing.queue.retry(firing.claim()[0], "no", delay=500)


def finished(firing: Firing) -> None:
    firing.queue.finish(firing.claim()[0])


def cancelled(firing: Firing) -> None:
    firing.queue.cancel(firing.run(0))


def buried(firing: Firing) -> None:
    firing.queue.bury(firing.claim()[0], "no")


BEFORE = {f.__name__: f for f in (waiting, running, retrying, finished, cancelled, buried)}
UNFINISHED = ("waiting", "running", "retrying")
WORDS = {"waiting": "ready", "retrying": "delayed"}

# policy and run before -> states of that run and of the one of the next moment
OUTCOMES: dict[tuple[str, str], list[str]] = {
    ("skip", "waiting"): ["ready", ""],
    ("skip", "running"): ["running", ""],
    ("skip", "retrying"): ["delayed", ""],
    ("buffer_one", "waiting"): ["ready", ""],
    ("buffer_one", "running"): ["running", "delayed"],
    ("buffer_one", "retrying"): ["delayed", ""],
    ("cancel_previous", "waiting"): ["cancelled", "ready"],
    ("cancel_previous", "running"): ["running", "ready"],
    ("cancel_previous", "retrying"): ["cancelled", "ready"],
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("overlap", POLICIES)
def test_what_a_fire_does_by_the_state_of_the_run_before(
    scheduler: TaskScheduler, world: World, overlap: str, before: str
) -> None:
    firing = Firing(scheduler, world.clock, overlap)
    assert firing.fire().fired == 1
    BEFORE[before](firing)
    report = firing.fire()
    usual = [WORDS.get(before, before), "ready"]
    expected = OUTCOMES.get((overlap, before), usual)
    assert firing.states() == [*expected, ""]
    is_skipped = expected[1] == ""
    assert (report.fired, report.skipped) == ((0, 1) if is_skipped else (1, 0))
    schedule = get(scheduler, "s")
    assert (schedule.run_count, schedule.skipped_count) == ((1, 1) if is_skipped else (2, 0))
    assert schedule.missed_count == 0
    assert schedule.next_run is not None
    assert schedule.next_run.timestamp() * 1000 == firing.first_ms + 120_000
    assert world.stats().get("skipped", 0) == is_skipped
    assert world.stats()["fired"] == 2 - is_skipped


@pytest.mark.untidy
@pytest.mark.parametrize("text", [None, b"{", b'{"state":"running"}'])
@pytest.mark.parametrize("overlap", POLICIES)
@pytest.mark.one_partition
def test_a_run_whose_record_is_spoilt_does_not_stop_its_schedule(
    scheduler: TaskScheduler, world: World, overlap: str, text: bytes | None
) -> None:
    firing = Firing(scheduler, world.clock, overlap)
    firing.fire()
    running(firing)
    status = firing.queue.keys["status"]
    if text is None:
        world.redis.hdel(status, firing.run(0))
    else:
        world.redis.hset(status, firing.run(0), text)
    assert firing.fire().fired == 1
    assert ids_of(firing.claim()) == [firing.run(1)]


@pytest.mark.untidy
@pytest.mark.parametrize("overlap", ["skip", "buffer_one", "cancel_previous"])
@pytest.mark.parametrize("before", [finished, cancelled])
@pytest.mark.one_partition
def test_a_run_that_has_ended_and_is_still_listed_as_open_does_not_count(
    scheduler: TaskScheduler, world: World, overlap: str, before: Callable[[Firing], None]
) -> None:
    firing = Firing(scheduler, world.clock, overlap)
    firing.fire()
    before(firing)
    ended = firing.queue.get(firing.run(0))
    world.redis.zadd(firing.queue.keys["open"], {f"s\0{firing.run(0)}": 0})

    report = firing.fire()

    assert (report.fired, firing.states()[1]) == (1, "ready")
    assert firing.queue.get(firing.run(0)) == ended
    left = world.redis.zrange(firing.queue.keys["open"], 0, -1)
    assert left == [f"s\0{firing.run(1)}".encode()]


def test_runs_of_other_schedules_do_not_count(scheduler: TaskScheduler, clock: ManualClock) -> None:
    for schedule_id in ("a", "ab", "b"):
        scheduler.add_schedule("* * * * *", "alice", schedule_id=schedule_id, overlap="skip")
    clock.advance(60)
    assert scheduler.tick().fired == 3
    for claim in scheduler.queue.claim("w", limit=3):
        if claim.task.schedule_id == "a":
            scheduler.queue.finish(claim)
    clock.advance(60)
    report = scheduler.tick()
    assert (report.fired, report.skipped) == (1, 2)
    assert get(scheduler, "a").run_count == 2


# --- skip -----------------------------------------------------------------------------------------


def test_a_skipping_schedule_fires_again(scheduler: TaskScheduler, clock: ManualClock) -> None:
    firing = Firing(scheduler, clock, "skip")
    firing.fire()
    (claim,) = firing.claim()
    assert [firing.fire().skipped for _ in range(3)] == [1, 1, 1]
    firing.queue.finish(claim)
    assert firing.fire().fired == 1
    schedule = get(scheduler, "s")
    assert (schedule.run_count, schedule.skipped_count, schedule.missed_count) == (2, 3, 0)
    assert ids_of(firing.claim()) == [firing.run(4)]


def test_a_skipped_fire_keeps_the_last_run(scheduler: TaskScheduler, clock: ManualClock) -> None:
    firing = Firing(scheduler, clock, "skip")
    firing.fire()
    last = get(scheduler, "s").last_run
    firing.fire()
    assert get(scheduler, "s").last_run == last


def test_a_skipped_moment_needs_no_room(scheduler: TaskScheduler, clock: ManualClock) -> None:
    firing = Firing(scheduler, clock, "skip")
    firing.fire()
    firing.queue.configure(max_waiting=1)
    report = firing.fire()
    assert (report.skipped, report.refused) == (1, 0)


def test_moments_before_a_skip_are_missed(scheduler: TaskScheduler, clock: ManualClock) -> None:
    firing = Firing(scheduler, clock, "skip")
    firing.fire()
    clock.advance(180)
    report = firing.fire()
    assert (report.skipped, report.missed) == (1, 3)
    schedule = get(scheduler, "s")
    assert (schedule.skipped_count, schedule.missed_count) == (1, 3)


# --- buffer_one -----------------------------------------------------------------------------------


@pytest.fixture
def buffered(scheduler: TaskScheduler, clock: ManualClock) -> tuple[Firing, Claim]:
    """A run and the claim on it, and another that waits for its end."""
    firing = Firing(scheduler, clock, "buffer_one")
    firing.fire()
    (claim,) = firing.claim()
    assert firing.fire().fired == 1
    assert firing.states() == ["running", "delayed", ""]
    return firing, claim


def cancelled_and_finished(firing: Firing, claim: Claim) -> None:
    firing.queue.cancel(claim.task.task_id)
    firing.queue.finish(claim)


def cancelled_in_its_retry(firing: Firing, claim: Claim) -> None:
    firing.queue.retry(claim, delay=500)
    firing.queue.cancel(claim.task.task_id)


RUN_ENDS: dict[str, Callable[[Firing, Claim], object]] = {
    "finish": lambda firing, claim: firing.queue.finish(claim),
    "bury": lambda firing, claim: firing.queue.bury(claim, "no"),
    "cancel": cancelled_and_finished,
    "cancel of a retry": cancelled_in_its_retry,
}


@pytest.mark.parametrize("end", RUN_ENDS)
def test_a_buffered_run_begins_after_the_other(buffered: tuple[Firing, Claim], end: str) -> None:
    firing, claim = buffered
    assert firing.claim() == []
    RUN_ENDS[end](firing, claim)
    assert ids_of(firing.claim()) == [firing.run(1)]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_buffered_run_begins_when_the_worker_of_the_one_before_it_died(
    buffered: tuple[Firing, Claim], is_cancelled: bool
) -> None:
    firing, claim = buffered
    if is_cancelled:
        firing.queue.cancel(claim.task.task_id)
    else:
        firing.queue.configure(max_attempts=1)
    firing.clock.advance(LEASE_S)
    # The first claim takes the lease back, after it has looked at what is delayed.
    begun = ids_of(firing.claim()) + ids_of(firing.claim())
    assert begun == [firing.run(1)]
    assert firing.states()[0] == ("cancelled" if is_cancelled else "buried")


@pytest.mark.parametrize("again", ["retry", "release", "expired"])
def test_a_buffered_run_waits_for_a_retry(buffered: tuple[Firing, Claim], again: str) -> None:
    firing, claim = buffered
    if again == "retry":
        firing.queue.retry(claim, "no", delay=5)
        assert firing.claim() == []
        firing.clock.advance(5)
    elif again == "release":
        firing.queue.release(claim)
    else:
        firing.clock.advance(LEASE_S)
    (claim,) = firing.claim()
    assert claim.task.task_id == firing.run(0)
    firing.queue.finish(claim)
    assert ids_of(firing.claim()) == [firing.run(1)]


def test_no_second_run_is_buffered(buffered: tuple[Firing, Claim]) -> None:
    firing, claim = buffered
    report = firing.fire()
    assert (report.fired, report.skipped) == (0, 1)
    assert firing.states() == ["running", "delayed", ""]
    firing.queue.finish(claim)
    assert ids_of(firing.claim()) == [firing.run(1)]
    assert firing.fire().fired == 1  # the buffered one runs now: there is room for another


def test_a_buffered_run_is_explained(buffered: tuple[Firing, Claim]) -> None:
    firing, _ = buffered
    why = firing.queue.explain(firing.run(1))
    assert why is not None
    assert why.summary == "Starts when the previous run of schedule 's' ends."


def test_a_cancelled_buffered_run_is_explained_as_cancelled(buffered: tuple[Firing, Claim]) -> None:
    firing, claim = buffered
    assert firing.queue.cancel(firing.run(1))
    why = firing.queue.explain(firing.run(1))
    assert why is not None
    assert why.summary.startswith("It was cancelled at ")
    firing.queue.finish(claim)
    assert firing.claim() == []


def test_a_buffered_run_can_be_told_to_begin_at_once(buffered: tuple[Firing, Claim]) -> None:
    firing, _ = buffered
    assert firing.queue.reschedule(firing.run(1))
    assert ids_of(firing.claim()) == [firing.run(1)]


@pytest.mark.untidy
@pytest.mark.parametrize("overlap", ["buffer_one", "skip"])
@pytest.mark.one_partition
def test_a_buffered_run_is_let_go_by_the_next_fire_if_the_one_before_it_vanished(
    buffered: tuple[Firing, Claim], redis_client: redis.Redis, overlap: str
) -> None:
    firing, claim = buffered
    redis_client.hdel(firing.queue.keys["status"], claim.task.task_id)
    firing.scheduler.update_schedule("s", overlap=overlap)
    assert firing.claim() == []
    assert firing.fire().skipped == 1
    assert ids_of(firing.claim()) == [firing.run(1)]


def test_a_worker_that_waits_is_woken_by_the_end_that_lets_a_buffered_run_begin(
    buffered: tuple[Firing, Claim], redis_client: redis.Redis
) -> None:
    firing, claim = buffered
    redis_client.delete(firing.queue.keys["wake"])
    firing.queue.finish(claim)
    assert dump(redis_client)["wake"] == ["1"]


# --- cancel_previous ------------------------------------------------------------------------------


def test_the_worker_of_a_replaced_run_hears(scheduler: TaskScheduler, clock: ManualClock) -> None:
    firing = Firing(scheduler, clock, "cancel_previous")
    firing.fire()
    (claim,) = firing.claim()
    assert firing.queue.extend([claim], lease=LEASE_S) == ["extended"]
    firing.fire()
    assert firing.queue.extend([claim], lease=LEASE_S) == ["cancel"]
    firing.queue.retry(claim)
    assert firing.states() == ["cancelled", "ready", ""]
    assert ids_of(firing.claim()) == [firing.run(1)]


def test_only_the_unfinished_runs_are_cancelled(scheduler: TaskScheduler, world: World) -> None:
    firing = Firing(scheduler, world.clock, "allow")
    firing.fire()
    retrying(firing)
    firing.fire()
    running(firing)
    fill(firing.queue, "alice", 2)
    scheduler.update_schedule("s", overlap="cancel_previous")
    assert firing.fire().fired == 1
    assert firing.states() == ["cancelled", "running", "ready"]
    assert {"alice-0", "alice-1", firing.run(2)} == set(world.places()["ready"])


def test_a_buffered_run_is_cancelled_by_the_next_one(buffered: tuple[Firing, Claim]) -> None:
    firing, claim = buffered
    firing.scheduler.update_schedule("s", overlap="cancel_previous")
    assert firing.fire().fired == 1
    assert firing.states() == ["running", "cancelled", "ready"]
    firing.queue.finish(claim)
    assert firing.states() == ["cancelled", "cancelled", "ready"]


def test_a_fire_that_is_refused_cancels_nothing(scheduler: TaskScheduler, world: World) -> None:
    firing = Firing(scheduler, world.clock, "cancel_previous")
    firing.fire()
    firing.queue.configure(max_waiting=1)
    assert firing.fire().refused == 1
    assert firing.states() == ["ready", "", ""]


# --- many unfinished runs -------------------------------------------------------------------------

ONE_CALL = 30  # unfinished runs that one script cancels


def open_runs(firing: Firing, count: int) -> list[str]:
    """So many unfinished runs of the schedule."""
    return [firing.scheduler.trigger("s") for _ in range(count)]


def cancelled_of(world: World, ids: list[str]) -> list[str]:
    """Those that were cancelled, or whose cancelling was asked for."""
    status = world.dump()["status"]
    return [i for i in ids if status[i]["state"] == "cancelled" or status[i].get("cancel")]


@pytest.mark.parametrize("claimed", [0, 70])
def test_more_runs_than_one_script_cancels_are_cancelled_before_the_next_one_begins(
    scheduler: TaskScheduler, world: World, claimed: int
) -> None:
    firing = Firing(scheduler, world.clock, "cancel_previous")
    ids = open_runs(firing, 130)
    firing.claim(claimed or 1)
    world.patch("fairqueue.scheduler.scheduler.ROUNDS", 1)
    done = []
    world.advance(60)
    while not firing.queue.get(firing.run(0)):
        done.append(len(cancelled_of(world, ids)))
        report = scheduler.tick()
        assert (report.moved, report.skipped) == (0, 0)
        assert report.wait == 0.0 or report.fired
    assert done == list(range(0, len(ids), ONE_CALL))
    assert cancelled_of(world, ids) == ids
    assert get(scheduler, "s").run_count == 1
    assert "cancelled_to" not in world.dump()["schedule_state"]["s"]


def test_one_pass_cancels_them_all(scheduler: TaskScheduler, world: World) -> None:
    firing = Firing(scheduler, world.clock, "cancel_previous")
    ids = open_runs(firing, 230)
    firing.claim(50)
    assert firing.fire().fired == 1
    assert cancelled_of(world, ids) == ids
    assert firing.fire().fired == 1  # although 50 of them still run
    assert get(scheduler, "s").run_count == 2


def test_cancelling_many_runs_holds_up_nobody(scheduler: TaskScheduler, clock: ManualClock) -> None:
    firing = Firing(scheduler, clock, "cancel_previous")
    open_runs(firing, 150)
    scheduler.add_schedule("* * * * *", "bob", schedule_id="z")
    assert firing.fire().fired == 2


@pytest.mark.parametrize(("overlap", "expected"), [("skip", ""), ("buffer_one", "delayed")])
def test_only_so_many_unfinished_runs_are_looked_at_in_one_script(
    scheduler: TaskScheduler, clock: ManualClock, overlap: str, expected: str
) -> None:
    for n in range(15):
        scheduler.add_schedule("* * * * *", "bob", schedule_id=f"t{n}", overlap=overlap)
        for _ in range(100):
            scheduler.trigger(f"t{n}")
    while scheduler.queue.claim("w", 1000, lease=LEASE_S):
        pass
    clock.advance(60)
    report = scheduler.tick()
    skipped = expected == ""
    assert (report.fired, report.skipped) == ((0, 15) if skipped else (15, 0))
    moment = round(clock.now().timestamp()) // 60 * 60_000
    infos = [scheduler.queue.get(f"t{n}:{moment}") for n in range(15)]
    assert {info.state if info else "" for info in infos} == {expected}


def test_ending_many_runs_reads_the_schedule_once(scheduler: TaskScheduler, world: World) -> None:
    firing = Firing(scheduler, world.clock, "buffer_one")
    open_runs(firing, 90)
    claims = firing.claim(100)
    assert firing.fire().fired == 1  # buffered
    before = world.count_commands()
    firing.queue.finish_many((claim, None) for claim in claims[:80])
    looked = world.count_commands() - before
    assert looked["zrangebylex"] == 1
    assert firing.states() == ["delayed", "", ""]
    firing.queue.finish_many((claim, None) for claim in claims[80:])
    assert ids_of(firing.claim()) == [firing.run(0)]


@pytest.mark.one_partition
def test_a_buffered_run_begins_after_many_gone(scheduler: TaskScheduler, world: World) -> None:
    firing = Firing(scheduler, world.clock, "buffer_one")
    open_runs(firing, 40)
    claims = firing.claim(40)
    firing.fire()
    keys = firing.queue.keys
    for claim in claims[:-1]:  # they have vanished without an end
        world.redis.hdel(keys["status"], claim.task.task_id)
        world.redis.hdel(keys["tasks"], claim.task.task_id)
        world.redis.zrem(keys["leases"], claim.task.task_id)
    world.redis.hset(keys["running"], "alice", 1)
    firing.queue.finish(claims[-1])
    assert ids_of(firing.claim()) == [firing.run(0)]


# --- the policy itself ----------------------------------------------------------------------------


def test_the_policy_is_allow_unless_said(scheduler: TaskScheduler) -> None:
    scheduler.add_schedule("* * * * *", "alice", schedule_id="s")
    assert get(scheduler, "s").overlap == "allow"


@pytest.mark.parametrize("overlap", POLICIES)
def test_the_policy_can_be_changed(scheduler: TaskScheduler, world: World, overlap: str) -> None:
    for old in POLICIES:
        scheduler.add_schedule(
            "* * * * *", "alice", schedule_id="s", overlap=old, on_conflict="replace"
        )
        assert scheduler.update_schedule("s", overlap=overlap)
        assert get(scheduler, "s").overlap == overlap


def test_a_changed_policy_holds_next_time(scheduler: TaskScheduler, clock: ManualClock) -> None:
    firing = Firing(scheduler, clock, "allow")
    firing.fire()
    scheduler.update_schedule("s", overlap="skip")
    assert firing.fire().skipped == 1
    scheduler.update_schedule("s", overlap="allow")
    assert firing.fire().fired == 1


@pytest.mark.parametrize("overlap", ["", "Skip", "queue", None, 1, ["skip"]])
def test_another_policy_is_refused_and_named(
    scheduler: TaskScheduler, redis_client: redis.Redis, overlap: str
) -> None:
    with pytest.raises(InvalidSchedule, match="overlap"):
        scheduler.add_schedule("* * * * *", "alice", schedule_id="s", overlap=overlap)
    assert dump(redis_client) == {}
    scheduler.add_schedule("* * * * *", "alice", schedule_id="s", overlap="skip")
    with pytest.raises(InvalidSchedule, match="overlap"):
        scheduler.update_schedule("s", overlap=overlap)
    assert get(scheduler, "s").overlap == "skip"


@pytest.mark.one_partition
def test_a_bad_policy_breaks_a_record(scheduler: TaskScheduler, redis_client: redis.Redis) -> None:
    scheduler.add_schedule("* * * * *", "alice", schedule_id="s", overlap="skip")
    key = scheduler.queue.keys["schedules"]
    text = redis_client.hget(key, "s")
    assert isinstance(text, bytes)
    redis_client.hset(key, "s", text.replace(b'"skip"', b'"hop"'))
    with pytest.raises(BrokenRecord, match="hop"):
        scheduler.get_schedule("s")


@pytest.mark.parametrize("overlap", POLICIES)
def test_a_trigger_does_not_ask_for_the_policy(
    scheduler: TaskScheduler, clock: ManualClock, overlap: str
) -> None:
    firing = Firing(scheduler, clock, overlap)
    firing.fire()
    (claim,) = firing.claim()
    triggered = [scheduler.trigger("s"), scheduler.trigger("s")]
    assert sorted(ids_of(firing.claim())) == sorted(triggered)
    assert firing.queue.extend([claim], lease=LEASE_S) == ["extended"]


def test_a_triggered_run_counts(scheduler: TaskScheduler, clock: ManualClock) -> None:
    firing = Firing(scheduler, clock, "skip")
    scheduler.trigger("s")
    assert firing.fire().skipped == 1
    firing.queue.finish(claim_one(firing.queue))
    assert firing.fire().fired == 1


@pytest.mark.parametrize("before", UNFINISHED)
@pytest.mark.parametrize("overlap", POLICIES)
@pytest.mark.one_partition
def test_a_fire_that_is_sent_again_says_the_same_and_does_no_more(
    scheduler: TaskScheduler, world: World, overlap: str, before: str
) -> None:
    firing = Firing(scheduler, world.clock, overlap)
    firing.fire()
    BEFORE[before](firing)
    command, sent = scheduler.queue.link.command_of, []

    def recorded(call: Call) -> Any:
        made = command(call)
        if call.script == "fire":
            sent.append(made[1])
        return made

    world.patch(scheduler.queue.link, "command_of", recorded)
    report = firing.fire()
    once = world.dump()
    (words,) = sent
    answer = world.redis.execute_command(*words)
    assert answer == [b"fired", b"fired" if report.fired else b"skipped"]
    assert world.dump() == once


def test_runs_of_a_schedule_are_open_until_they_end(scheduler: TaskScheduler, world: World) -> None:
    firing = Firing(scheduler, world.clock, "allow")
    firing.fire()
    firing.fire()
    assert len(world.dump()["open"]) == 2
    for claim in firing.claim():
        firing.queue.finish(claim)
    assert "open" not in world.dump()
