"""Runs that do not answer: ended a lease after they had to end, told of, and out of the way."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.tasks import claim_one, make_task, push
from helpers.waiting import eventually
from helpers.workers import Person
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue import History, Task, TaskQueue, TaskScheduler, Worker
from fairqueue.clock import ManualClock
from fairqueue.errors import InvalidInput, LeaseLost
from fairqueue.models import Claim
from fairqueue.queue.workers import Notice, StaleRun, WorkerStore

MINUTE = "* * * * *"


def beat(world: World, worker_id: str = "w2", **asked: Any) -> list[Notice]:
    """What a worker hears that says it is alive."""
    info = {"host": "box", "pid": 1, "version": "1", "slots": 4, "names": [], "current": []}
    return world.workers.beat(info | {"running": 0, "started": 0}, worker_id, **asked).notices


def keep(queue: TaskQueue, clock: ManualClock, claim: Claim, seconds: int, lease: float) -> None:
    """Let time pass in which the worker extends a lease each second."""
    for _ in range(seconds):
        clock.advance(1)
        queue.extend([claim], lease=lease)


def state(queue: TaskQueue, task_id: str) -> str | None:
    info = queue.get(task_id)
    return None if info is None else info.state


# --- the deadline ---------------------------------------------------------------------------------

# How a run gets its time-out, of 60 s.
TIMED: dict[str, Callable[[TaskQueue], Task]] = {
    "of its name": lambda queue: make_task(task_id="t", name="timed"),
    "its own": lambda queue: make_task(task_id="t", timeout=60),
    "its own, longer": lambda queue: make_task(task_id="t", name="short", timeout=60),
    "its own, shorter": lambda queue: make_task(task_id="t", name="long", timeout=60),
}


@pytest.mark.parametrize("timed", TIMED)
def test_a_run_is_ended_a_lease_after_its_time_out(world: World, timed: str) -> None:
    for name, timeout in (("timed", 60), ("short", 1), ("long", 1000)):
        world.queue.set_limits(name, timeout=timeout)
    task = TIMED[timed](world.queue)
    world.queue.push(task)
    claim = world.claim_one(lease=30, worker="w1")
    keep(world.queue, world.clock, claim, 89, lease=30)
    world.advance(0.999)
    assert world.workers.find_stale() == []
    assert world.queue.extend([claim], lease=30) == ["extended"]
    world.advance(0.001)
    assert world.workers.find_stale() == [
        StaleRun(task_id="t", user_id="alice", name=task.name, worker_id="w1", seconds=90.0)
    ]
    assert world.workers.find_stale() == []
    assert beat(world) == []
    (run,) = History(world.queue).runs()
    assert (run.status, run.attempts, run.stale_since) == ("timed_out", 1, world.now())
    assert run.error == "timed out: still running on worker w1 one lease after its time-out"
    details = History(world.queue).get("t")
    assert details is not None
    assert [attempt.outcome for attempt in details.attempts] == ["timed_out"]
    counted = world.stats()
    assert (counted["stale_runs"], counted["timed_out"], counted["buried"]) == (1, 1, 1)
    assert "expired" not in counted


def test_a_run_that_is_taken_back_by_a_heartbeat_wakes_a_worker(world: World) -> None:
    world.queue.push(make_task(task_id="t"))
    world.queue.claim("dies", lease=10)
    world.advance(10)
    world.redis.delete(world.keys["wake"])
    beat(world)
    assert world.redis.exists(world.keys["wake"])
    assert world.claim_one().task.task_id == "t"


@pytest.mark.parametrize(
    ("limits", "said", "ends"),
    [
        ({}, 20, 50),
        ({}, None, None),
        ({"timeout": 5}, 20, 35),  # an operator's
        ({"timeout": 5}, None, 35),
        ({"slots": 2}, 20, 50),  # an operator's, without a time-out
        ({"slots": 2}, None, None),
    ],
)
def test_a_worker_says_how_long_its_handler_may_run(
    world: World, limits: dict[str, Any], said: float | None, ends: int | None
) -> None:
    """Whatever other workers have declared for the name: that is nothing to end a run by."""
    if limits:
        world.queue.set_limits("report", **limits)
    world.workers.beat({"names": ["report"]}, "other", {"report": {"timeout_ms": 1000}})
    world.queue.push(make_task(task_id="t", name="report"))
    claim = world.claim_one(lease=30)
    lost_after = None
    for second in range(0, 120, 5):
        if world.queue.extend([claim], 30, timeouts=[said]) == ["lost_lease"]:
            lost_after = second
            break
        world.advance(5)
    assert lost_after == ends
    stale = [run.task_id for run in world.workers.find_stale()]
    assert stale == (["t"] if ends else [])


def test_a_time_out_that_was_removed_does_not_rule_the_next_attempt(world: World) -> None:
    world.queue.set_limits("report", timeout=5)
    world.queue.push(make_task(task_id="t", name="report"))
    world.queue.retry(world.claim_one(lease=30), "no", 0)
    world.queue.set_limits("report")
    claim = world.claim_one(lease=30)
    assert world.queue.extend([claim], 30, timeouts=[10]) == ["extended"]
    world.advance(29)
    assert world.queue.extend([claim], 30, timeouts=[10]) == ["extended"]
    world.advance(11)
    assert world.queue.extend([claim], 30, timeouts=[10]) == ["lost_lease"]


def test_a_cancelled_run_is_not_given_more_time_by_its_worker(world: World) -> None:
    world.queue.push(make_task(task_id="t", name="report"))
    claim = world.claim_one(lease=30)
    world.queue.cancel("t")
    assert world.queue.extend([claim], 30, timeouts=[1000]) == ["cancel"]
    world.advance(29)
    assert world.queue.extend([claim], 30, timeouts=[1000]) == ["cancel"]
    world.advance(1)
    assert world.queue.extend([claim], 30, timeouts=[1000]) == ["lost_lease"]


@pytest.mark.parametrize(
    ("timeouts", "match"), [([1, 2], "2 timeouts for 1 claims"), ([-1], "-1"), (["x"], "'x'")]
)
def test_time_outs_that_are_none_are_refused(queue: TaskQueue, timeouts: Any, match: str) -> None:
    queue.push(make_task(task_id="t"))
    with pytest.raises(InvalidInput, match=match):
        queue.extend([claim_one(queue)], 30, timeouts=timeouts)


def test_the_late_result_of_a_run_that_was_ended_is_refused(world: World) -> None:
    claim = world.push_and_claim("t", timeout=1, lease=5)
    keep(world.queue, world.clock, claim, 6, lease=5)
    assert len(world.workers.find_stale()) == 1
    assert world.queue.extend([claim]) == ["lost_lease"]
    for end in (world.queue.finish, world.queue.release, world.queue.retry, world.queue.bury):
        with pytest.raises(LeaseLost):
            end(claim)
    assert state(world.queue, "t") == "buried"


def test_no_lease_is_extended_beyond_the_deadline_of_its_run(world: World) -> None:
    claim = world.push_and_claim("t", timeout=10, lease=5)
    ends = []
    for _ in range(3):
        world.advance(4)
        word = world.queue.extend([claim], lease=3600)[0]
        info = world.info("t")
        assert info.lease_until is not None
        ends.append((word, (info.lease_until - info.claimed_at).total_seconds()))  # type: ignore[operator]
    assert ends == [("extended", 15.0), ("extended", 15.0), ("extended", 15.0)]
    world.advance(3)
    assert world.queue.extend([claim], lease=3600) == ["lost_lease"]


@pytest.mark.parametrize("by", ["a claim", "a beat", "the scheduler"])
def test_whoever_comes_first_ends_it(world: World, by: str) -> None:
    world.push("t", timeout=1)
    keep(world.queue, world.clock, world.claim_one(lease=5, worker="w1"), 6, lease=5)
    if by == "a claim":
        assert world.queue.claim("w2") == []
    elif by == "a beat":
        assert [notice.outcome for notice in beat(world)] == ["timed_out"]
    else:
        world.tick()
    assert state(world.queue, "t") == "buried"
    # Nobody has heard of one that a claim has ended.
    assert [run.task_id for run in world.workers.find_stale()] == (["t"] if by == "a claim" else [])


def test_a_run_of_a_dead_worker_is_offered_again_however_late(world: World) -> None:
    claim = world.push_and_claim("t", timeout=10, lease=5)
    keep(world.queue, world.clock, claim, 9, lease=5)
    world.advance(1000)  # and nobody lives in the meantime
    assert world.workers.find_stale() == []
    assert state(world.queue, "t") == "ready"
    assert world.claim_one().attempt == 2


def test_a_run_that_has_ended_is_not_stale(world: World) -> None:
    for ending in (world.queue.finish, world.queue.retry, world.queue.release, world.queue.bury):
        task_id = world.queue.push(make_task(timeout=1))
        ending(world.claim_one(lease=1))
        world.queue.cancel(task_id)
    world.advance(100)
    assert world.workers.find_stale() == []


def test_a_run_without_a_time_out_goes_on_for_as_long_as_its_lease_is_kept(world: World) -> None:
    world.queue.set_limits("default", slots=5)
    claim = world.push_and_claim("t", lease=5)
    keep(world.queue, world.clock, claim, 100, lease=5)
    assert world.workers.find_stale() == []
    world.queue.finish(claim)


def test_an_attempt_has_a_deadline_of_its_own(world: World) -> None:
    claim = world.push_and_claim("t", timeout=2, lease=2)
    keep(world.queue, world.clock, claim, 3, lease=2)
    world.queue.retry(claim)
    assert "deadline" not in world.status_of("t")
    again = world.claim_one(lease=2)
    keep(world.queue, world.clock, again, 3, lease=2)
    assert world.workers.find_stale() == []
    keep(world.queue, world.clock, again, 1, lease=2)
    assert len(world.workers.find_stale()) == 1


def test_what_an_older_version_has_extended_beyond_its_deadline_is_ended_too(world: World) -> None:
    world.push("t1", "t2", timeout=1)
    world.queue.claim("w", limit=2, lease=5)
    world.redis.zadd(world.keys["leases"], {"t1": world.clock.now_ms() + 3_600_000})
    world.advance(6)
    assert [run.task_id for run in world.workers.find_stale()] == ["t1"]
    assert (state(world.queue, "t1"), state(world.queue, "t2")) == ("buried", "ready")


def test_many_are_ended_and_told_in_parts(world: World) -> None:
    world.push(*(f"t{n}" for n in range(130)), timeout=1)
    claims = world.queue.claim("w", limit=130, lease=1)
    world.advance(0.9)
    world.queue.extend(claims, lease=10)
    world.advance(1.1)
    found = [world.workers.find_stale() for _ in range(3)]
    assert [len(each) for each in found] == [100, 30, 0]
    assert len({run.task_id for each in found for run in each}) == 130


@pytest.mark.untidy
@pytest.mark.parametrize("text", [b"spoilt", b'{"state":"odd","user":"u","rank":"","attempts":1}'])
def test_one_whose_record_is_spoilt_is_passed_over(world: World, text: bytes) -> None:
    world.push("t1", "t2", timeout=1)
    claims = world.queue.claim("w", limit=2, lease=1)
    world.queue.extend(claims, lease=10)
    world.redis.hset(world.keys["status"], "t1", text)
    world.advance(2)
    assert [run.task_id for run in world.workers.find_stale()] == ["t2"]
    assert world.workers.find_stale() == []


# --- its schedule, its user, its slot -------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["skip", "buffer_one"])
def test_the_schedule_of_a_stuck_run_goes_on(world: World, overlap: str) -> None:
    """The handler has no time-out; its schedule has."""
    world.scheduler.add_schedule(
        MINUTE, "alice", schedule_id="s", overlap=overlap, timeout=100.0, retries=5
    )

    def runs() -> tuple[int, int]:
        world.tick()
        schedule = world.scheduler.get_schedule("s")
        assert schedule is not None
        return schedule.run_count, schedule.skipped_count

    world.advance(60)
    assert runs() == (1, 0)
    stuck = world.claim_one(lease=30)
    keep(world.queue, world.clock, stuck, 60, lease=30)
    assert runs() == ((1, 1) if overlap == "skip" else (2, 0))
    assert world.queue.claim("w2") == []
    keep(
        world.queue, world.clock, stuck, 69, lease=30
    )  # 129 s: the next moment comes before the end
    assert runs() == ((1, 2) if overlap == "skip" else (2, 1))
    world.advance(1)
    world.scheduler._posts[0].looked_ms = None  # it looks every ten seconds
    world.tick()
    assert state(world.queue, stuck.task.task_id) == "buried"
    if overlap == "skip":
        keep(world.queue, world.clock, stuck, 50, lease=30)
        assert runs() == (2, 2)
    assert world.claim_one(worker="w2").task.schedule_id == "s"


def test_what_a_stuck_run_holds_is_free_again(world: World) -> None:
    world.queue.set_limits("pdf", slots=1)
    world.queue.set_user("alice", max_running=1)
    world.push("t1", "t2", name="pdf", timeout=1)
    keep(world.queue, world.clock, world.claim_one(lease=5), 6, lease=5)
    assert len(world.workers.find_stale()) == 1
    assert world.claim_one(worker="w2").task.task_id == "t2"


def test_stuck_runs_of_a_schedule_count_as_failures_in_a_row(world: World) -> None:
    world.scheduler.add_schedule(MINUTE, "alice", schedule_id="s", timeout=1.0, max_failures=1)
    world.tick_after(60)
    keep(world.queue, world.clock, world.claim_one(lease=5), 6, lease=5)
    world.workers.find_stale()
    schedule = world.scheduler.get_schedule("s")
    assert schedule is not None
    assert (schedule.is_active, schedule.failures_in_a_row) == (False, 1)


# --- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 1000.0])
def test_a_mute_cancelled_run_ends_after_a_lease(world: World, timeout: float | None) -> None:
    world.queue.set_limits("pdf", slots=1)
    world.queue.set_user("alice", max_running=1)
    world.push("t", "next", name="pdf", timeout=timeout)
    claim = world.claim_one(lease=30, worker="w1")
    world.advance(10)
    assert world.queue.cancel("t")
    assert world.workers.find_stale() == []
    world.advance(5)
    assert world.queue.extend([claim], lease=30) == ["cancel"]  # now it hears
    for _ in range(2):
        world.advance(10)
        assert world.queue.extend([claim], lease=30) == ["cancel"]
    world.advance(9.999)
    assert world.workers.find_stale() == []
    assert world.queue.claim("w2") == []
    world.advance(0.001)
    assert world.queue.extend([claim], lease=30) == ["lost_lease"]
    assert [run.task_id for run in world.workers.find_stale()] == ["t"]
    (run,) = History(world.queue).runs("cancelled")
    assert (run.status, run.stale_since) == ("cancelled", world.now())
    details = History(world.queue).get("t")
    assert details is not None
    assert [attempt.outcome for attempt in details.attempts] == ["cancelled"]
    with pytest.raises(LeaseLost):
        world.queue.finish(claim)
    assert world.claim_one(worker="w2").task.task_id == "next"
    assert "timed_out" not in world.stats()


def test_a_cancelled_run_that_answers_has_a_lease_to_do_so(world: World) -> None:
    claim = world.push_and_claim("t", lease=30)
    world.queue.cancel("t")
    world.advance(29)
    assert world.queue.extend([claim], lease=30) == ["cancel"]
    world.advance(29)
    assert world.workers.find_stale() == []
    assert world.queue.finish_many([(claim, None)]) == ["cancelled"]
    assert state(world.queue, "t") == "cancelled"
    world.advance(100)
    assert world.workers.find_stale() == []


def test_a_cancelled_run_whose_time_is_over_ends_then(world: World) -> None:
    claim = world.push_and_claim("t", timeout=10, lease=30)
    keep(world.queue, world.clock, claim, 39, lease=30)
    world.queue.cancel("t")
    assert world.queue.extend([claim], lease=30) == ["cancel"]
    world.advance(1)
    assert len(world.workers.find_stale()) == 1
    assert state(world.queue, "t") == "cancelled"


def test_a_repeated_extend_gives_nobody_more_time(world: World) -> None:
    claim = world.push_and_claim("t", lease=30)
    world.queue.cancel("t")
    arguments: dict[str, Any] = {"op": "o", "lease_ms": 30_000, "rest": ["t", claim.token]}
    world.queue.link.run("extend", **arguments)
    deadline = world.status_of("t")["deadline"]
    world.advance(10)
    before = world.dump()
    assert world.queue.link.run("extend", **arguments) == [b"cancel"]
    assert world.dump() == before
    assert world.queue.extend([claim], lease=30) == ["cancel"]
    assert world.status_of("t")["deadline"] == deadline


# --- a worker whose slots are all stuck -----------------------------------------------------------


class Stuck:
    """A worker with one slot, in which a handler ignores that it has to end."""

    def __init__(self, queue: TaskQueue, **options: Any) -> None:
        self.registry = CollectorRegistry()
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.ids: list[str] = []
        self.worker = Worker(
            queue, concurrency=1, lease=0.6, registry=self.registry, worker_id="stuck"
        )

        @self.worker.task("default", **options)
        def hang(payload: dict[str, Any]) -> None:
            self.ids.append(payload["n"])
            self.begun.set()
            self.may_end.wait(60)  # in the system: no exception reaches it there

    def gauge(self) -> float | None:
        labels = {"queue": "default", "task": "default"}
        return self.registry.get_sample_value("fairqueue_worker_stuck_runs", labels)

    def __enter__(self) -> "Stuck":
        self.worker.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.may_end.set()
        assert self.worker.stop(20)


@pytest.mark.parametrize("options", [{"timeout": 0.2}, {}])
def test_a_stuck_slot_is_freed_without_a_claim(live: TaskQueue, options: dict[str, Any]) -> None:
    push(live, "t", payload={"n": "t"}, timeout=None if options else 0.2)
    push(live, "waits", payload={"n": "waits"})
    with Stuck(live, **options) as stuck:
        assert stuck.begun.wait(20)
        eventually(lambda: state(live, "t") == "buried", "it is ended", within=30)
        # The slot is what it is: taken, and reported until it is free.
        eventually(lambda: stuck.gauge() == 1, "it is counted", within=30)
        (worker,) = WorkerStore(live.link).alive()
        assert (worker.worker_id, worker.current) == ("stuck", ("t",))
        assert state(live, "waits") == "ready"
        stuck.may_end.set()
        eventually(lambda: state(live, "waits") == "finished", "the slot is free", within=30)
        assert stuck.gauge() == 0
    assert (stuck.ids, state(live, "t")) == (["t", "waits"], "buried")


def test_a_stuck_run_is_cancelled_in_the_end(live: TaskQueue) -> None:
    push(live, "t", payload={"n": "t"})
    with Stuck(live) as stuck:
        assert stuck.begun.wait(20)
        assert live.cancel("t")
        eventually(lambda: state(live, "t") == "cancelled", "it is ended", within=30)
        (worker,) = WorkerStore(live.link).alive()
        assert worker.current == ("t",)


# --- who hears of it ------------------------------------------------------------------------------


def lose(queue: TaskQueue, clock: ManualClock, task_id: str = "t") -> None:
    """A task whose worker dies at its last attempt."""
    push(queue, task_id, max_attempts=1)
    claim_one(queue, lease=1, worker="dead")
    clock.advance(1)


def hang(queue: TaskQueue, clock: ManualClock, task_id: str = "t") -> None:
    """A task whose run goes on after it had to end."""
    push(queue, task_id, timeout=1)
    keep(queue, clock, claim_one(queue, lease=5, worker="stuck"), 6, lease=5)


def ignore(queue: TaskQueue, clock: ManualClock, task_id: str = "t") -> None:
    """A task whose run goes on although it was cancelled."""
    push(queue, task_id)
    claim = claim_one(queue, lease=5, worker="stuck")
    queue.cancel(task_id)
    keep(queue, clock, claim, 6, lease=5)


ALERTS = {lose: ["task_failed"], hang: ["stale_run", "task_failed"], ignore: ["stale_run"]}


@pytest.mark.parametrize("end", ALERTS)
@pytest.mark.parametrize("by", ["worker", "scheduler"])
@pytest.mark.parametrize("found_by", ["itself", "a claim", "one who cannot alert"])
def test_people_hear_of_it_from_whoever_can_tell_them(
    world: World, person: Person, end: Callable[..., None], by: str, found_by: str
) -> None:
    end(world.queue, world.clock)
    if found_by == "a claim":
        assert world.queue.claim("w2") == []
    elif found_by == "one who cannot alert":
        assert len(beat(world)) == 1
        assert beat(world) == []
    worker = Worker(world.queue, alerts=person.alerts)
    scheduler = TaskScheduler(world.queue, alerts=person.alerts, lock_timeout=60.0)
    look = worker.run_once if by == "worker" else scheduler.tick
    look()
    heard = [(alert.kind, alert.details["task"]) for alert in person.heard()]
    assert heard == [(kind, "t") for kind in ALERTS[end]]
    for _ in range(10):  # it was heard, and is not told again
        world.advance(10)
        look()
        assert beat(world, can_alert=True) == []
    assert len(person.told) == len(ALERTS[end])
    worker.stop()
    scheduler.stop()


def test_what_is_told_of_a_task_whose_last_worker_died(world: World, person: Person) -> None:
    lose(world.queue, world.clock)
    worker = Worker(world.queue, alerts=person.alerts)
    worker.run_once()
    person.heard()
    (alert,) = person.told
    assert alert.summary == ("default failed after 1 attempt: the lease of worker dead expired")
    assert alert.details == {
        "task": "t",
        "name": "default",
        "user": "alice",
        "attempt": 1,
        "worker": "dead",
        "error": "the lease of worker dead expired",
    }
    worker.stop()


def test_what_is_told_of_a_run_of_a_schedule_names_it(world: World) -> None:
    world.scheduler.add_schedule(MINUTE, "alice", schedule_id="s", timeout=1.0, name="mail")
    world.tick_after(60)
    claim = world.claim_one(lease=5, worker="stuck")
    keep(world.queue, world.clock, claim, 6, lease=5)
    (notice,) = beat(world)
    assert (notice.schedule_id, notice.name, notice.attempt) == ("s", "mail", 1)
    assert (notice.seconds, notice.worker_id, notice.outcome) == (6.0, "stuck", "timed_out")


def test_a_lease_that_expires_before_the_last_attempt_is_no_news(world: World) -> None:
    world.push_and_claim("t", lease=1)
    world.advance(1)
    assert beat(world, can_alert=True) == []
    assert state(world.queue, "t") == "ready"


def test_what_somebody_heard_and_could_not_pass_on_is_told_to_the_next(world: World) -> None:
    lose(world.queue, world.clock)
    (notice,) = beat(world, "dies", can_alert=True)
    world.advance(29.999)
    assert beat(world, "lives", can_alert=True) == []
    world.advance(0.001)
    assert beat(world, "lives", can_alert=True) == [notice]
    world.advance(5)
    assert world.workers.look_over(can_alert=True, heard=[notice.text]) == []
    world.advance(60)
    assert beat(world, "lives", can_alert=True) == []


def test_one_who_leaves_says_what_was_passed_on(world: World, person: Person) -> None:
    lose(world.queue, world.clock)
    worker = Worker(world.queue, alerts=person.alerts)
    worker.run_once()
    assert "notices" in world.dump()
    worker.stop()
    assert "notices" not in world.dump()


def test_what_is_over_an_hour_old_is_no_news(world: World) -> None:
    lose(world.queue, world.clock, "old")
    assert world.queue.claim("w") == []
    world.advance(3590)
    lose(world.queue, world.clock, "new")
    world.advance(10)
    assert [notice.task_id for notice in beat(world, can_alert=True)] == ["new"]
    assert len(world.dump()["notices"]) == 1


def test_notices_that_nobody_hears_do_not_pile_up(world: World) -> None:
    for n in range(11):
        world.push(*(f"{n}-{m}" for m in range(100)), max_attempts=1)
        world.queue.claim("w", limit=100, lease=1)
        world.advance(1)
        assert world.queue.claim("w2") == []
    assert world.redis.zcard(world.keys["notices"]) == 1000
    assert len(beat(world, can_alert=True)) == 100


def test_a_notice_that_is_none_is_passed_over(world: World) -> None:
    lose(world.queue, world.clock)
    now = world.clock.now_ms()
    for text in (b"spoilt", f"a\0b\0{now}\0c".encode(), b"\xff\0" * 8 + f"{now}\0".encode()):
        world.redis.zadd(world.keys["notices"], {text: 0})
    assert [notice.task_id for notice in beat(world, can_alert=True)] == ["t"]
    world.advance(3601)
    assert beat(world, can_alert=True) == []
    assert world.redis.zcard(world.keys["notices"]) == 0
