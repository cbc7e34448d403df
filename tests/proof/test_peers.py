"""What people complained about in other schedulers and queues, and that it does not happen here.

Each test says in its docstring which complaint it is about and what happened there.
"""

import json
import random
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from helpers.fixtures import OwnServer, Spawn
from helpers.network import LossyProxy, StallingProxy
from helpers.schedules import THURSDAY, add, at, before_script, fire_id, fired_ids, get
from helpers.state import check_consistency
from helpers.tasks import claim_one, info_of, make_task
from helpers.waiting import eventually, in_thread, until_blocked
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue import History, TaskQueue, TaskScheduler, Worker
from fairqueue.access.credentials import CHUNK as REVOKED
from fairqueue.access.credentials import AccessStore
from fairqueue.alerts import Alert, Alerts, CallableRecipient
from fairqueue.clock import ManualClock
from fairqueue.doctor import Doctor
from fairqueue.errors import InvalidSchedule, RedisUnavailable
from fairqueue.inspection import Inspector
from fairqueue.link.keys import MOST_PARTITIONS
from fairqueue.link.scripts import load_script, script_names
from fairqueue.models import Claim, new_id
from fairqueue.queue.claim import CLAIM_LIMIT, EXTEND_CHUNK
from fairqueue.queue.delays import DelayIndex
from fairqueue.queue.end import FINISH_CHUNK
from fairqueue.queue.workers import WorkerStore
from fairqueue.repartition import Repartition
from fairqueue.repartition.repartition import MOST_AT_ONCE
from fairqueue.schedules.store import MAX_ADDED
from fairqueue.stats.users import MAX_READ

COMPLAINTS = (
    "celery#1495",
    "celery#2856",
    "kombu#337",
    "redbeat#127",
    "redbeat#129",
    "redbeat#151",
    "redbeat#208",
    "redbeat#238",
    "rq#1354",
    "rq#1531",
    "rq-scheduler#250",
    "taskiq#244",
    "taskiq#328",
    "bullmq#2988",
    "bullmq#3272",
    "apscheduler#1021",
    "dramatiq#64",
    "dramatiq#258",
    "arq#224",
    "suna#3626",
)
REFERENCE = re.compile(r"^\s*([a-z-]+#\d+): (\S.*)$", re.MULTILINE)

Make = Callable[..., TaskScheduler]

DAY, TERM_S = 86_400, 10.0


def test_each_complaint_has_a_test_that_tells_what_happened() -> None:
    told: dict[str, list[str]] = {}
    for name, test in vars(sys.modules[__name__]).items():
        if name.startswith("test_"):
            for reference, words in REFERENCE.findall(test.__doc__ or ""):
                told.setdefault(reference, []).append(words)
    assert sorted(told) == sorted(COMPLAINTS)


START = THURSDAY


@pytest.fixture
def make(world: World) -> Iterator[Make]:
    """Make schedulers with connections of their own, as in other processes; stopped at the end."""
    with ExitStack() as made:

        def make(scheduler_id: str, **settings: Any) -> TaskScheduler:
            queue = made.enter_context(TaskQueue(world.redis, clock=world.clock))
            settings = {"registry": CollectorRegistry()} | settings
            scheduler = TaskScheduler(queue, scheduler_id, **settings)
            made.callback(scheduler.stop)
            return scheduler

        yield make


def has_led(scheduler: TaskScheduler) -> bool:
    """Tick, and say whether it leads."""
    return scheduler.tick().is_leader


def is_in_error(scheduler: TaskScheduler) -> bool:
    return scheduler.state == "error"


def line(process: Any) -> str:
    """The next line that a process prints."""
    return str(process.stdout.readline()).strip()


# --- one of many schedulers -----------------------------------------------------------------------

# Fires schedules until it is killed.
SCHEDULER = textwrap.dedent(
    """
    import sys
    from fairqueue import TaskQueue, TaskScheduler

    url, interval, term = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    scheduler = TaskScheduler(
        TaskQueue.from_url(url), "first", check_interval=interval, lock_timeout=term
    )
    scheduler.start()
    print("started", flush=True)
    sys.stdin.read()
    """
)


def take(queue: TaskQueue) -> Claim:
    """The next task, as soon as there is one."""
    claims = queue.claim("w", wait=30)
    assert claims, "no task within 30 s"
    return claims[0]


def test_when_the_leader_is_killed_another_goes_on_and_nobody_has_to_start_it(
    live: TaskQueue, spawn: Spawn, redis_url: str
) -> None:
    """celery#1495: one beat process fires everything, and when its machine dies nobody does."""
    first = spawn(SCHEDULER, redis_url, "0.1", "0.5")
    standby = TaskScheduler(
        live, "standby", check_interval=0.1, lock_timeout=0.5, registry=CollectorRegistry()
    )
    standby.add_schedule("* * * * * *", "alice", schedule_id="s")
    eventually(lambda: standby.health().leader == "first", "the first one leads", within=30)
    standby.start()
    try:
        seen = [take(live).task.task_id]
        first.kill()
        eventually(lambda: standby.is_leader, "the standby leads")
        # At most one of these was fired by the first.
        seen += [take(live).task.task_id for _ in range(2)]
    finally:
        assert standby.stop(10)
    seen += [claim.task.task_id for claim in live.claim("w", limit=100)]
    assert len(seen) == len(set(seen)) == get(standby, "s").run_count


def test_a_moment_that_the_leader_fired_before_it_died_is_not_fired_again(world: World) -> None:
    """celery#1495: with the patches offered there, the new beat repeats what the old one sent."""
    world.add()
    assert world.tick_at(at(5, 9)).fired == 1
    world.advance(TERM_S)  # and it is not heard of again
    report = world.other.tick()
    assert (report.is_leader, report.fired) == (True, 0)
    assert world.queue.size() == 1


def test_two_schedulers_at_the_same_time_fire_each_moment_once(make: Make, world: World) -> None:
    """celery#2856: two beats on two servers, meant for availability, send every task twice."""
    schedulers = [make("one"), make("two")]
    schedulers[0].add_schedules(
        {"cron_expr": "* * * * *", "user_id": f"u{n}", "schedule_id": f"s{n}"} for n in range(100)
    )
    fired = 0
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            world.advance(60)  # longer than a term: each time both may lead
            barrier = threading.Barrier(2)

            def tick(scheduler: TaskScheduler, barrier: threading.Barrier = barrier) -> int:
                barrier.wait(30)
                return scheduler.tick().fired

            fired += sum(pool.map(tick, schedulers))
    assert fired == len(world.dump()["tasks"]) == 500


def test_two_believed_leaders_fire_each_moment_once(make: Make, world: World) -> None:
    """celery#2856: two beats on two servers, meant for availability, send every task twice."""
    one, two = make("one"), make("two")
    add(one)
    world.clock.set(at(5, 9))

    def let_the_other_do_it() -> None:
        world.redis.delete(world.keys["leader"])
        assert two.tick().fired == 1
        # Even with a term that both take for theirs, the plan is not the one that was read.
        leader = world.state()["leader"] | {"token": one._posts[0].leadership.token}
        world.redis.set(world.keys["leader"], json.dumps(leader))

    before_script(one.queue, world.monkeypatch, "fire", let_the_other_do_it)
    report = one.tick()
    assert (report.is_leader, report.fired, report.moved) == (True, 0, 1)
    assert world.fired_ids() == [fire_id("nine", at(5, 9))]


def test_four_schedulers_for_days_have_one_leader_at_a_time(make: Make, world: World) -> None:
    """rq#1531: of four workers with a scheduler each, all four were active after four days."""
    dice = random.Random(1531)
    schedulers = [make(f"scheduler-{n}") for n in range(4)]
    add(schedulers[0], cron_expr="* * * * *")
    began, fired, led = world.now(), 0, set()
    while world.now() < began + timedelta(days=4):
        # Often longer than a term, so that it ends unseen; and some of them sleep meanwhile.
        world.advance(dice.choice([3, 9, 11, 70, 3600]))
        awake = [each for each in schedulers if dice.random() < 0.7]
        dice.shuffle(awake)
        reports = {each.scheduler_id: each.tick() for each in awake}
        leaders = {name for name, report in reports.items() if report.is_leader}
        assert len(leaders) == min(1, len(awake)) or not leaders
        led |= leaders
        fired += sum(report.fired for report in reports.values())
    assert len(led) == 4
    schedulers[0].stop()
    world.advance(TERM_S)
    fired += schedulers[0].tick().fired
    schedule = get(schedulers[0], "nine")
    assert fired == schedule.run_count == len(world.dump()["tasks"])
    assert schedule.last_run is not None
    minutes = (schedule.last_run - at(5, 9)) / timedelta(minutes=1) + 1
    assert schedule.run_count + schedule.missed_count == minutes


# --- a lock that is lost --------------------------------------------------------------------------


def test_a_leader_that_comes_back_does_not_prolong_the_term_of_another(world: World) -> None:
    """redbeat#127: cut off and back again, the old beat extended the new one's lock as its own."""
    assert has_led(world.scheduler)
    world.advance(TERM_S)
    assert has_led(world.other)
    term = world.state()["leader"]
    world.advance(TERM_S / 2)

    assert not has_led(world.scheduler)

    assert world.state()["leader"] == term
    assert term["scheduler"] == "two"
    world.scheduler.stop()
    assert world.state()["leader"] == term


def test_a_standby_without_redis_fires_nothing(own_server: OwnServer, clock: ManualClock) -> None:
    """redbeat#208: the connection broke while it asked for the lock, and it sent as if it led."""
    server = own_server()
    with (
        LossyProxy(server.socket_path) as network,
        TaskQueue.from_url(server.url, clock=clock) as queue,
        TaskQueue.from_url(network.url, clock=clock, timeout=0.3) as cut_off,
    ):
        leader = TaskScheduler(queue, "leader", registry=CollectorRegistry())
        standby = TaskScheduler(cut_off, "standby", registry=CollectorRegistry())
        add(leader)
        clock.set(at(5, 8, 59, 55))
        assert has_led(leader)
        clock.set(at(5, 9))
        network.drop_replies(1_000_000)
        with pytest.raises(RedisUnavailable):
            standby.tick()
        assert (queue.size(), standby.is_leader) == (0, False)
        assert leader.tick().fired == 1

        # Here it *was* elected, and cannot know it: the term passes, and another does the work.
        leader.stop()
        clock.set(at(6, 9))
        with pytest.raises(RedisUnavailable):
            standby.tick()
        assert (queue.size(), standby.is_leader) == (1, False)
        assert not has_led(leader)
        clock.advance(TERM_S)
        assert leader.tick().fired == 1

        network.drop_replies(0)
        assert not has_led(standby)
        assert (queue.size(), network.dropped > 1) == (2, True)


def test_without_an_election_schedulers_fire_nothing(make: Make, world: World) -> None:
    """redbeat#238: a wrong setting made taking the lock fail, and every instance sent all tasks."""
    schedulers = [make(f"scheduler-{n}", check_interval=0.05) for n in range(3)]
    add(schedulers[0])
    world.clock.set(at(5, 9))
    world.spoil("leader")
    for each in schedulers:
        each.start()
    for each in schedulers:
        eventually(partial(is_in_error, each), "it says that it cannot lead")
        assert "leader is a list and should be a string" in str(each.health().last_error)
    assert (world.queue.size(), [each.is_leader for each in schedulers]) == (0, [False] * 3)

    world.redis.delete(world.keys["leader"])

    eventually(lambda: all(each.state == "running" for each in schedulers), "all go on", within=30)
    assert [each.stop(10) for each in schedulers] == [True] * 3
    assert world.fired_ids() == [fire_id("nine", at(5, 9))]


def test_an_old_leader_that_was_held_up_before_it_sent_sends_nothing(world: World) -> None:
    """redbeat#129: the beat that could not renew its lock went on sending, beside the new one."""
    world.add()
    world.clock.set(at(5, 9))
    states = []

    def lose_the_term() -> None:
        world.advance(TERM_S)
        # The new one has just been elected and has fired nothing yet: only the term is in the way.
        assert world.other._posts[0].leadership.lead(1).is_leader
        states.append(world.state())

    world.before_script("fire", lose_the_term)
    report = world.tick()

    assert (report.is_leader, report.fired) == (False, 0)
    assert [world.state()] == states
    lost = {"queue": "default", "outcome": "lost"}
    assert world.registry.get_sample_value("fairqueue_scheduler_lock_total", lost) == 1
    assert world.other.tick().fired == 1
    assert world.fired_ids() == [fire_id("nine", at(5, 9))]


def test_a_leader_keeps_its_term_while_it_enqueues_for_longer_than_that(world: World) -> None:
    """rq#1354: enqueuing took longer than the lock, others took it, and jobs were doubled."""
    world.scheduler.add_schedules(
        {"cron_expr": "0 9 * * *", "user_id": f"u{n}", "schedule_id": f"s{n}"} for n in range(2000)
    )
    world.clock.set(at(5, 9))
    intruders = []

    def be_slow() -> None:
        world.advance(0.4 * TERM_S)
        intruders.append(world.other.tick())

    sent = world.before_script("fire", be_slow, times=1000)
    assert world.tick().fired == 2000

    assert sent.count("fire") * 0.4 > 3  # terms
    assert [(each.is_leader, each.fired) for each in intruders] == [(False, 0)] * len(intruders)
    assert world.queue.inspect().epoch == 1
    assert len(world.dump()["tasks"]) == 2000


def test_a_leader_that_planned_too_long_leaves_all_to_the_next(
    world: World,
) -> None:
    """rq#1354: enqueuing took longer than the lock, others took it, and jobs were doubled."""
    world.scheduler.add_schedules(
        {"cron_expr": "0 9 * * *", "user_id": f"u{n}", "schedule_id": f"s{n}"} for n in range(600)
    )
    world.clock.set(at(5, 9))
    taken = []

    def be_much_too_slow() -> None:
        world.advance(TERM_S)
        taken.append(world.other.tick().fired)

    world.before_script("fire", be_much_too_slow)
    report = world.tick()
    assert (report.is_leader, report.fired, taken) == (False, 0, [600])
    assert len(world.dump()["tasks"]) == 600


# --- outages and restarts -------------------------------------------------------------------------


def test_two_minutes_without_redis_and_a_new_scheduler_lose_no_moment_and_no_beat(
    own_server: OwnServer, clock: ManualClock, tmp_path: Path
) -> None:
    """redbeat#151: after a restart, timers began anew, and a job due meanwhile was never sent."""
    server = own_server(tmp_path)
    with TaskQueue.from_url(server.url, clock=clock, timeout=0.5) as queue:
        old = TaskScheduler(queue, "old", registry=CollectorRegistry())
        add(old)
        old.add_schedule(every=600, user_id="bob", schedule_id="every ten minutes")
        old.tick()
        beat = THURSDAY + timedelta(minutes=10)
        assert get(old, "every ten minutes").next_run == beat
        server.kill()
        with pytest.raises(RedisUnavailable):
            old.tick()
    clock.set(at(5, 9, 1, 30))
    server.restart()
    with TaskQueue.from_url(server.url, clock=clock) as queue:
        new = TaskScheduler(queue, "new", registry=CollectorRegistry())
        report = new.tick()
        assert (report.fired, report.missed) == (1, 0)
        assert claim_one(queue).task.task_id == fire_id("nine", at(5, 9))
        assert get(new, "every ten minutes").next_run == beat
        clock.set(beat)
        assert new.tick().fired == 1


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_restarted_scheduler_fires_nothing_twice(world: World, make: Make, end: str) -> None:
    """taskiq#244: restarted in the minute of a cron task, the scheduler sent it a second time."""
    world.add()
    assert world.tick_at(at(5, 9)).fired == 1
    if end == "stopped":
        world.scheduler.stop()
    for second in (5, 20, 59):
        world.clock.set(at(5, 9, 0, second))
        assert make(f"started at {second}").tick().fired == 0
    assert world.fired_ids() == [fire_id("nine", at(5, 9))]


@pytest.mark.parametrize(
    ("misfire", "fired"), [("fire_once", [20]), ("fire_all", [10, 20]), ("skip", [])]
)
def test_what_was_missed_while_no_scheduler_ran_is_caught_up_as_the_schedule_says(
    make: Make, world: World, misfire: str, fired: list[int]
) -> None:
    """taskiq#328: a task of every ten hours was missed in a restart, and waited for ten more."""
    old = make("old")
    old.add_schedule(every=36_000, user_id="alice", schedule_id="s", misfire=misfire)
    old.tick()
    world.advance(timedelta(hours=25))
    new = make("new")
    assert new.tick().fired == len(fired)
    moments = [THURSDAY + timedelta(hours=hours) for hours in fired]
    assert world.fired_ids() == [fire_id("s", moment) for moment in moments]
    schedule = get(new, "s")
    assert schedule.missed_count == 2 - len(fired)
    assert schedule.next_run == THURSDAY + timedelta(hours=30)  # in step, and not from the restart


# --- moments --------------------------------------------------------------------------------------


def test_three_o_clock_fires_once_however_often_somebody_looks_in_that_minute(world: World) -> None:
    """rq-scheduler#250: `0 3 * * *` ran at 3:00 and again at 3:01."""
    world.add("three", cron_expr="0 3 * * *")
    world.clock.set(at(6, 3))
    fired = []
    for seconds in (0, 0.5, 1, 30, 59, 59.999, 60, 61, 120):
        world.clock.set(at(6, 3) + timedelta(seconds=seconds))
        fired.append(world.tick().fired)
    assert fired == [1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert world.fired_ids() == [fire_id("three", at(6, 3))]
    assert world.schedule("three").next_run == at(7, 3)


# zone, cron, a moment before the clocks go back, and the local times that are expected to be fired
OVERLAPS = [
    ("Europe/Helsinki", "30 * * * *", datetime(2017, 10, 28, 23), ["02:30", "03:30", "03:30"]),
    ("Europe/Helsinki", "30 3 * * *", datetime(2017, 10, 28, 23), ["03:30", "03:30", "03:30"]),
    ("Europe/London", "0 */2 * * *", datetime(2024, 10, 26, 22), ["00:00", "02:00", "04:00"]),
    ("Europe/London", "0 1-23/2 * * *", datetime(2024, 10, 26, 22), ["01:00", "03:00", "05:00"]),
    ("America/New_York", "*/20 * * * *", datetime(2025, 11, 2, 5), ["01:20", "01:40", "01:00"]),
]


@pytest.mark.parametrize(("zone", "cron", "start", "expected"), OVERLAPS)
def test_schedules_pass_the_hour_that_comes_twice(
    world: World, zone: str, cron: str, start: datetime, expected: list[str]
) -> None:
    """apscheduler#1021: in the hour that comes twice, the next moment was the same for ever."""
    world.clock.set(start.replace(tzinfo=UTC))
    world.add(cron_expr=cron, timezone=zone)
    moments = [world.schedule("nine").next_run]
    for _ in range(30):
        moment = moments[-1]
        assert moment is not None
        assert world.tick_at(moment).fired == 1
        moments.append(world.schedule("nine").next_run)
    known = [moment for moment in moments if moment is not None]
    assert len(known) == 31
    assert all(before < after for before, after in pairwise(known))
    local = [moment.astimezone(ZoneInfo(zone)).strftime("%H:%M") for moment in known]
    assert local[:3] == expected


# --- schedules that change, and that go on --------------------------------------------------------


def test_many_quick_upserts_are_one_schedule_and_one_task(make: Make, world: World) -> None:
    """bullmq#2988: the same scheduler upserted in quick succession had several delayed jobs."""
    makers = [make(f"maker-{n}") for n in range(4)]
    leader = make("leader")
    add(leader, cron_expr="* * * * *")
    began = threading.Barrier(len(makers) + 1)

    def upsert(maker: TaskScheduler) -> None:
        began.wait(30)
        for n in range(40):
            add(maker, cron_expr="* * * * *", payload={"n": n}, on_conflict="replace")

    with ThreadPoolExecutor(len(makers)) as pool:
        done = [pool.submit(upsert, maker) for maker in makers]
        began.wait(30)
        while not all(each.done() for each in done):
            world.advance(60)
            leader.tick()
        for each in done:
            each.result()
    world.advance(60)
    leader.tick()

    state = world.state()
    for key in ("schedules", "plan", "due", "schedule_state", "schedule_index", "schedule_names"):
        assert len(state[key]) == 1, key
    schedule = get(leader, "nine")
    assert schedule.payload == {"n": 39}
    assert schedule.run_count == len(state["tasks"])
    # None is lost. One may be counted twice: a change that carries a time which has passed since
    # plans its moment again, though it is not fired again.
    minutes = (world.now() - THURSDAY) / timedelta(minutes=1)
    assert schedule.run_count + schedule.missed_count >= minutes


def cancel(queue: TaskQueue, task_id: str) -> None:
    assert queue.cancel(task_id)


def bury(queue: TaskQueue, task_id: str) -> None:
    queue.bury(claim_one(queue), "it failed")


def finish(queue: TaskQueue, task_id: str) -> None:
    queue.finish(claim_one(queue))


def abandon(queue: TaskQueue, task_id: str) -> None:
    claim_one(queue, lease=1)


def purge(queue: TaskQueue, task_id: str) -> None:
    cancel(queue, task_id)
    History(queue).prune(0)


def nothing(queue: TaskQueue, task_id: str) -> None:
    """It waits for a worker that is not there."""


@pytest.mark.parametrize("end", [cancel, bury, finish, abandon, purge, nothing])
def test_a_schedule_goes_on_whatever_became_of_its_last_run(
    world: World, end: Callable[[TaskQueue, str], None]
) -> None:
    """bullmq#3272: the next job is made by the one before, so that the chain broke with one."""
    world.add()
    for day in range(5, 9):
        assert world.tick_at(at(day, 9)).fired == 1
        end(world.queue, fire_id("nine", at(day, 9)))
    schedule = world.schedule("nine")
    assert (schedule.run_count, schedule.next_run) == (4, at(9, 9))


def test_a_schedule_goes_on_although_the_id_of_its_next_task_is_taken(world: World) -> None:
    """bullmq#3272: the next job's id was there already, so that none was added, and it stopped."""
    world.add()
    for day in (5, 6):
        assert world.tick_at(at(day, 9)).fired == 1
    world.clock.set(THURSDAY)  # somebody has set the server's clock back, and the plan
    world.scheduler.update_schedule("nine", next_run=at(5, 9))
    for day in range(5, 9):
        assert world.tick_at(at(day, 9)).moved == 0
    assert world.schedule("nine").next_run == at(9, 9)
    expected = [fire_id("nine", at(day, 9)) for day in range(5, 9)]
    assert world.fired_ids() == expected


def test_a_running_scheduler_takes_up_new_and_changed_schedules_at_once(
    live: TaskQueue, spawn: Spawn, redis_url: str, redis_client: redis.Redis
) -> None:
    """arq#224: cron jobs stand in the worker's code, and none can be added while it runs."""
    running = spawn(SCHEDULER, redis_url, "3600", "3600")  # it looks by itself once an hour
    assert line(running) == "started"
    until_blocked(redis_client)
    here = TaskScheduler(live, "here", registry=CollectorRegistry())

    here.add_schedule("* * * * * *", "alice", schedule_id="s", payload={"version": 1})
    assert take(live).task.payload == {"version": 1}
    here.update_schedule("s", payload={"version": 2})
    claim = take(live)
    while claim.task.payload != {"version": 2}:
        claim = take(live)
    here.remove_schedule("s")
    assert redis_client.zcard(live.keys["due"]) == 0
    assert here.health().leader == "first"


# --- tasks ----------------------------------------------------------------------------------------


def test_a_task_delayed_for_longer_than_any_lease_runs_once(world: World) -> None:
    """kombu#337: a job that waited in a worker for its ETA was given to others at the time-out."""
    ran: list[str] = []
    workers = [
        Worker(
            world.queue,
            lambda task: ran.append(task.task_id),
            lease=2,
            worker_id=f"w{n}",
            registry=CollectorRegistry(),
        )
        for n in range(3)
    ]
    world.queue.push(make_task(task_id="in two days", delay=2 * DAY))
    for _ in range(2 * 24 - 1):
        world.advance(3600)
        assert [worker.run_until_empty() for worker in workers] == [0, 0, 0]
    world.advance(3600)
    assert [worker.run_until_empty() for worker in workers] == [1, 0, 0]
    world.advance(DAY)
    assert [worker.run_until_empty() for worker in workers] == [0, 0, 0]
    assert ran == ["in two days"]
    assert world.stats() == {"pushed": 1, "claimed": 1, "finished": 1}
    for worker in workers:
        worker.stop()


def test_a_task_that_runs_for_longer_than_its_lease_runs_once(live: TaskQueue) -> None:
    """kombu#337: whatever took longer than the visibility time-out was run again beside itself."""
    may_end = threading.Event()
    runs: list[str] = []

    def handle(task: object) -> None:
        runs.append("began")
        assert may_end.wait(60)

    worker = Worker(live, handle, concurrency=2, lease=0.3, registry=CollectorRegistry())
    live.push(make_task(task_id="long"))
    worker.start()
    try:
        eventually(lambda: runs, "it began", within=30)

        def seconds() -> float:
            info = info_of(live, "long")
            assert info.lease_until is not None
            assert info.claimed_at is not None
            return (info.lease_until - info.claimed_at).total_seconds()

        eventually(lambda: seconds() > 4 * 0.3, "four leases have passed", within=30)
        may_end.set()
    finally:
        may_end.set()
        assert worker.stop(30)
    info = info_of(live, "long")
    assert (info.state, info.attempts, runs) == ("finished", 1, ["began"])


# Takes a task and does not get on with it.
WORKER = textwrap.dedent(
    """
    import sys, threading
    from fairqueue import TaskQueue, Worker

    def handle(task):
        print(task.task_id, flush=True)
        threading.Event().wait()

    Worker(TaskQueue.from_url(sys.argv[1]), handle, lease=0.5).start()
    threading.Event().wait()
    """
)


def test_the_task_of_a_killed_worker_is_run_by_another_when_its_lease_has_ended(
    live: TaskQueue, spawn: Spawn, redis_url: str
) -> None:
    """dramatiq#64: the task of a crashed worker was given to others after seven days."""
    live.push(make_task(task_id="t"))
    doomed = spawn(WORKER, redis_url)
    assert line(doomed) == "t"
    assert live.claim("other") == []
    doomed.send_signal(signal.SIGKILL)
    claim = take(live)
    assert (claim.task.task_id, claim.attempt) == ("t", 2)
    live.finish(claim)
    assert [attempt.outcome for attempt in runs_of(live, "t")] == ["expired", "succeeded"]
    assert Worker(live, registry=CollectorRegistry()).lease <= 60


def runs_of(queue: TaskQueue, task_id: str) -> list[Any]:
    details = History(queue).get(task_id)
    assert details is not None
    return list(details.attempts)


# --- large inputs ---------------------------------------------------------------------------------

OVERFLOW = 8000  # as many values as Lua can pass to a function


def test_tens_of_thousands_of_tasks_in_one_call_are_stored(world: World) -> None:
    """dramatiq#258: more than 7,999 values at once overflow Lua's stack: the worker sat idle."""
    world.queue.push_many(make_task(f"u{n % 1000}", f"t{n}") for n in range(5 * OVERFLOW))
    assert world.queue.size() == 5 * OVERFLOW
    claims = world.queue.claim("w", limit=CLAIM_LIMIT)
    assert world.queue.extend(claims * 9) == ["extended"] * 9 * CLAIM_LIMIT
    assert world.queue.finish_many((claim, None) for claim in claims) == ["finished"] * CLAIM_LIMIT
    world.redis.flushdb()  # to look whether all of it agrees takes longer than all of this


def test_thousands_that_are_due_or_abandoned_together_are_offered(world: World) -> None:
    """dramatiq#258: taking back what dead workers held overflowed Lua's stack: nobody got it."""
    count = OVERFLOW + 200
    world.queue.push_many(make_task(f"u{n % 7}", f"t{n}", delay=60) for n in range(count))
    world.advance(60)
    held = 0
    while claims := world.queue.claim("doomed", limit=CLAIM_LIMIT, lease=60):
        held += len(claims)
    assert held == count
    world.advance(60)
    offered = [claim for _ in range(5) for claim in world.queue.claim("w", limit=CLAIM_LIMIT)]
    assert len({claim.task.task_id for claim in offered}) == len(offered) >= 500
    assert {claim.attempt for claim in offered} == {2}


def test_ten_thousand_schedules_in_one_call_are_stored_and_more_are_refused(world: World) -> None:
    """dramatiq#258: more than 7,999 values at once overflow Lua's stack: the worker sat idle."""
    due = 2500  # more than are read at once
    specs = [
        {"cron_expr": cron, "user_id": f"u{n % 9}", "schedule_id": f"s{n}", "tenant": "t"}
        for n, cron in enumerate(["* * * * *"] * due + ["@yearly"] * (MAX_ADDED - due))
    ]
    with pytest.raises(
        InvalidSchedule, match="at most 10000 schedules fit in one call, not 100000"
    ):
        world.scheduler.add_schedules(specs * 10)
    assert world.queue.inspect().schedules == 0
    assert len(world.scheduler.add_schedules(specs)) == MAX_ADDED
    assert len(world.scheduler.add_schedules(specs[:1000], on_conflict="replace")) == 1000
    report = world.tick_after(90 * 60)
    assert (report.fired, report.missed) == (due, 89 * due)
    world.redis.flushdb()  # as above


def largest_push(queue: TaskQueue) -> object:
    tasks = (
        make_task(f"u{n}", f"t{n}", tenant=f"tenant-{n}", payload={"x": "y" * 1000})
        for n in range(1000)
    )
    return len(queue.push_many(tasks)) == 1000


def largest_extend(queue: TaskQueue) -> object:
    claims = claimed(queue, EXTEND_CHUNK)
    return queue.extend(claims) == ["extended"] * EXTEND_CHUNK


def largest_finish(queue: TaskQueue) -> object:
    """Recorded in two parts; the second drops what the first has left, as far as it may."""
    claims = claimed(queue, 2 * FINISH_CHUNK)
    queue.configure(keep_finished=0)
    words = queue.finish_many((claim, {"x": "y" * 100}) for claim in claims)
    return words == ["finished"] * 2 * FINISH_CHUNK


def largest_discard(queue: TaskQueue) -> object:
    for claim in claimed(queue, 260):
        queue.bury(claim, f"error {claim.task.task_id}")
    return History(queue).discard_matching(limit=1000) == 260


def largest_fire(queue: TaskQueue) -> object:
    scheduler = filled(queue)
    queue.link.clock.advance(3600)  # type: ignore[union-attr]
    return scheduler.tick().fired == 600


def largest_add(queue: TaskQueue) -> object:
    filled(queue)
    return queue.inspect().schedules == 600


def largest_backfill(queue: TaskQueue) -> object:
    scheduler = filled(queue)
    until = THURSDAY
    return scheduler.backfill("s1", until - timedelta(minutes=1000), until).filled == 1000


def largest_configure(queue: TaskQueue) -> object:
    settings = queue.settings()
    given = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    return queue.configure(**given) == settings


def largest_people(queue: TaskQueue) -> object:
    claimed(queue, 1000)
    return len(Inspector(queue).users.list(limit=100)) == 100


def largest_backlogs(queue: TaskQueue) -> object:
    queue.push_many(make_task(f"u{n}", f"t{n}") for n in range(1000))
    return len(Inspector(queue).users.list(limit=100)) == 100


def largest_shares(queue: TaskQueue) -> object:
    claims = claimed(queue, 500)
    queue.finish_many((claim, None) for claim in claims)
    return len(Inspector(queue).users.shares(top=10).users) == 10


def largest_places(queue: TaskQueue) -> object:
    levels = [repr(n / 7) for n in range(MAX_READ)]
    return len(queue.link.run("seats_before", rest=levels)) == MAX_READ + 1


def largest_revoke(queue: TaskQueue) -> object:
    store = AccessStore(queue.link)
    ids = [store.create_key(f"k{n}", "viewer", by="me").info.key_id for n in range(REVOKED)]
    return queue.link.run("revoke_credentials", op=new_id(), rest=ids) == REVOKED


def largest_repair(queue: TaskQueue) -> object:
    filled(queue)
    claimed(queue, 600)
    return {each.check for each in Doctor(queue).examine(fix=True) if each.level != "ok"} <= {
        "persistence",
        "clock",
        "leader",
    }


def largest_index(queue: TaskQueue) -> object:
    """Delayed tasks as a version before the index left them."""
    queue.push_many(make_task(f"u{n}", f"t{n}", delay=60) for n in range(600))
    queue.link.ask(("DEL", queue.keys["delayed_index"]))
    DelayIndex(queue.link).update()
    return queue.link.ask(("ZCARD", queue.keys["delayed_index"])) == [600]


def lost_runs(queue: TaskQueue) -> tuple[WorkerStore, list[bytes]]:
    """As many notices of lost runs as are told at once, unheard."""
    queue.configure(max_attempts=1)
    claimed(queue, 100)
    queue.link.clock.advance(3600)  # type: ignore[union-attr]
    workers = WorkerStore(queue.link)
    return workers, [notice.text for notice in workers.look_over(can_alert=True)]


def largest_find_stale(queue: TaskQueue) -> object:
    workers, heard = lost_runs(queue)
    workers.look_over(can_alert=True, heard=heard)
    return len(heard) == 100 and not queue.link.ask(("EXISTS", queue.keys["notices"]))[0]


def largest_beat(queue: TaskQueue) -> object:
    workers, heard = lost_runs(queue)
    workers.beat({}, "w", can_alert=True, heard=heard)
    return len(heard) == 100 and not queue.link.ask(("EXISTS", queue.keys["notices"]))[0]


def largest_permits(queue: TaskQueue) -> object:
    row = load_script("share_permits").row
    said = [
        row(partition=n, version=0, count=0, wants=1, set_by="") for n in range(MOST_PARTITIONS)
    ]
    rest = [each for one in said for each in one]
    return queue.link.run("share_permits", op=new_id(), gate="slow", rest=rest) is not None


# Of a move to another queue.
MOVING = ("copy_records", "put_schedules", "put_tasks", "settle_repartition")
LARGEST = {
    "share_permits": largest_permits,
    "push": largest_push,
    "extend": largest_extend,
    "finish": largest_finish,
    "discard": largest_discard,
    "fire": largest_fire,
    "add_schedules": largest_add,
    "backfill": largest_backfill,
    "configure": largest_configure,
    "user_stats": largest_people,
    "backlogs": largest_backlogs,
    "run_counts": largest_shares,
    "seats_before": largest_places,
    "revoke_credentials": largest_revoke,
    "heartbeat": largest_beat,
    "find_stale": largest_find_stale,
    "index_delayed": largest_index,
    "repair_tasks": largest_repair,
    "repair_records": largest_repair,
}


def claimed(queue: TaskQueue, count: int) -> list[Claim]:
    """So many tasks, each of a user and a tenant of its own, claimed at once."""
    queue.push_many(make_task(f"u{n}", f"t{n}", tenant=f"tenant-{n}") for n in range(count))
    claims = queue.claim("w", limit=count)
    assert len(claims) == count
    return claims


def filled(queue: TaskQueue) -> TaskScheduler:
    """A scheduler with 600 schedules of every minute."""
    scheduler = TaskScheduler(queue, registry=CollectorRegistry())
    scheduler.add_schedules(
        {"cron_expr": "* * * * *", "user_id": f"u{n}", "schedule_id": f"s{n}", "tenant": f"t{n}"}
        for n in range(600)
    )
    return scheduler


def test_each_script_that_takes_a_list_is_tried_with_its_longest() -> None:
    lists = {name for name in script_names() if load_script(name).fields}
    assert {*LARGEST, *MOVING} == lists


@pytest.mark.parametrize("script", sorted(LARGEST))
def test_a_script_takes_the_longest_list_that_it_is_ever_given(
    queue: TaskQueue, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dramatiq#258: more than 7,999 values at once overflow Lua's stack: the worker sat idle."""
    sent = before_script(queue, monkeypatch, script, lambda: None)
    assert LARGEST[script](queue)
    assert script in sent


def test_a_move_takes_the_longest_lists_that_it_is_ever_given(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above."""
    sent = before_script(queue, monkeypatch, MOVING[0], lambda: None)
    with TaskQueue(redis_client, "old", clock=clock) as old:
        old.push_many(make_task(f"u{n}", f"t{n}", tenant=f"tenant-{n}") for n in range(1000))
        filled(old)
        for n in range(400):
            old.set_user(f"u{n}", weight=2.0)
        assert Repartition(old, queue, batch=MOST_AT_ONCE).run().is_complete
        old.destroy()
    assert {*MOVING} <= {*sent}


# --- one that hangs -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["handler", "before", "then", "finally_", "when"])
def test_one_run_that_hangs_stops_no_other_schedule(world: World, where: str) -> None:
    """suna#3626: one fire that never returned stopped every cron of the fleet for 18 hours."""
    hangs, may_end, ran = threading.Event(), threading.Event(), threading.Semaphore(0)

    def hang(*arguments: object) -> bool:
        hangs.set()
        return may_end.wait(60)

    worker = Worker(world.queue, concurrency=2, lease=DAY, registry=CollectorRegistry())
    if where == "handler":
        worker.register("hangs", lambda payload: hang())
    else:
        worker.register("hangs", lambda payload: None, **{where: hang})  # type: ignore[arg-type]
    worker.register("fine", lambda payload: ran.release())
    for name in ("hangs", "fine"):
        world.add(name, name=name, cron_expr="* * * * *", overlap="skip")
    worker.start()
    try:
        for minute in range(10):
            world.advance(60)
            report = in_thread(world.scheduler.tick)()
            assert (report.fired, report.skipped) == ((1, 1) if minute else (2, 0))
            assert ran.acquire(timeout=30)
            assert hangs.wait(30)
            # Until it is recorded: a schedule that skips would take it for one that goes on.
            eventually(lambda: world.queue.inspect().running == 1, "only the one that hangs runs")
    finally:
        may_end.set()
        assert worker.stop(30)


def test_a_recipient_that_hangs_stops_no_schedule_and_no_other_recipient(world: World) -> None:
    """suna#3626: one fire that never returned stopped every cron of the fleet for 18 hours."""
    hangs, may_end = threading.Event(), threading.Event()
    told: list[Alert] = []

    def hang(alert: Alert) -> None:
        hangs.set()
        may_end.wait(60)

    recipients = [CallableRecipient(hang), CallableRecipient(told.append, name="told")]
    alerts = Alerts(recipients, registry=CollectorRegistry())
    scheduler = TaskScheduler(world.queue, alerts=alerts, registry=CollectorRegistry())
    add(scheduler, "fine", cron_expr="* * * * *")
    try:
        for n in range(5):
            add(scheduler, f"broken {n}", cron_expr="* * * * *")
            world.tamper(f"broken {n}", cron_expr="no cron")
            world.advance(60)
            report = in_thread(scheduler.tick)()
            assert (report.fired, report.set_aside) == (1, 1)
            assert hangs.wait(30)
            eventually(lambda: len(told) == len(world.dump()["broken"]), "the other is told")
    finally:
        may_end.set()
        alerts.close(30)
    assert {alert.kind for alert in told} == {"schedule_disabled"}


def test_one_call_to_redis_that_hangs_stops_no_schedule(
    own_server: OwnServer, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """suna#3626: one fire that never returned stopped every cron of the fleet for 18 hours."""
    server = own_server()
    with (
        StallingProxy(server.socket_path) as network,
        TaskQueue.from_url(server.url, clock=clock) as queue,
        TaskQueue.from_url(network.url, clock=clock, timeout=0.3) as remote,
        redis.Redis.from_url(server.url) as client,
    ):
        leader = TaskScheduler(remote, "leader", registry=CollectorRegistry())
        standby = TaskScheduler(queue, "standby", registry=CollectorRegistry())
        add(leader, cron_expr="* * * * *")
        before_script(remote, monkeypatch, "fire", network.stall)
        clock.set(at(5, 9))
        with pytest.raises(RedisUnavailable):
            in_thread(leader.tick)()
        assert not leader.is_leader
        clock.advance(TERM_S)
        assert (standby.tick().fired, queue.size()) == (1, 1)
        clock.set(at(5, 9, 1))
        assert standby.tick().fired == 1

        network.resume()  # what hung arrives now, a minute late
        standby.stop()
        clock.set(at(5, 9, 2))
        assert leader.tick().fired == 1  # it needs nobody to mend it
        assert fired_ids(client, queue) == [fire_id("nine", at(5, 9, n)) for n in range(3)]
        check_consistency(client)
