"""Samples for charts: one in each slot of time, kept for a while, told as series."""

import json
import logging
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
import redis
from helpers.waiting import in_thread
from helpers.world import World

from fairqueue import TaskQueue, TaskScheduler
from fairqueue.clock import ManualClock, to_ms
from fairqueue.errors import InvalidInput
from fairqueue.queue.reports import Report
from fairqueue.stats.samples import GAUGES, RATES, WAITS, WINDOWS, SampleStore, Series

NINE = datetime(2026, 3, 5, 9, 0, tzinfo=UTC)  # a slot of 15 s and of 5 min begins
LATE = Report(seconds=1.0, timed_out=True)


@pytest.fixture
def samples(world: World) -> SampleStore:
    world.clock.set(NINE)
    return SampleStore(world.queue.link)


def stored(world: World) -> list[tuple[str, datetime]]:
    """The resolutions and slots of all samples, in order."""
    members = cast(list[bytes], world.redis.zrange(world.keys["samples"], 0, -1))
    parts = [member.decode().split("\0") for member in members]
    return [(mark, datetime.fromtimestamp(int(slot) / 1000, UTC)) for mark, slot, _ in parts]


def last(series: Series, name: str) -> float | None:
    return series.values[name][-1]


def run_all(world: World) -> None:
    """Run everything that waits, in no time."""
    while claims := world.queue.claim("w", limit=100):
        world.queue.finish_many((claim, None) for claim in claims)


# --- taking ---------------------------------------------------------------------------------------


def test_the_first_one_in_a_slot_stores_its_sample(world: World, samples: SampleStore) -> None:
    other = SampleStore(world.queue.link)
    taken = []
    for seconds in (0, 10, 4.999, 0.001, 10):
        world.advance(seconds)
        taken += [samples.take(), other.take()]
    assert taken == [True, False, False, False, False, False, True, False, False, False]
    fine = [at for mark, at in stored(world) if mark == "f"]
    assert fine == [NINE, NINE + timedelta(seconds=15)]


def test_of_many_who_come_at_once_one_stores_a_sample(samples: SampleStore) -> None:
    answers = [in_thread(samples.take) for _ in range(5)]
    assert sorted(answer() for answer in answers) == [False] * 4 + [True]


def test_a_coarse_sample_is_stored_when_its_slot_turns(world: World, samples: SampleStore) -> None:
    world.clock.set(NINE + timedelta(seconds=200))
    for _ in range(30):
        samples.take()
        world.advance(15)
    coarse = [at for mark, at in stored(world) if mark == "c"]
    assert coarse == [NINE, NINE + timedelta(minutes=5), NINE + timedelta(minutes=10)]


def test_samples_outlive_the_windows(world: World, samples: SampleStore) -> None:
    for _ in range(26 * 12):
        samples.take()
        world.advance(15)
        samples.take()
        world.advance(285)
    kept = stored(world)
    newest = world.now() - timedelta(minutes=5)
    fine = [at for mark, at in kept if mark == "f"]
    coarse = [at for mark, at in kept if mark == "c"]
    assert min(fine) == newest - timedelta(minutes=70) + timedelta(seconds=15)
    assert min(coarse) == newest - timedelta(hours=24, minutes=30)
    assert len(coarse) == 12 * 24.5 + 1


def test_leftovers_of_a_trim_go_with_the_next(world: World, samples: SampleStore) -> None:
    old = {f"f\0{15_000 * n:013d}\0{{}}": 0 for n in range(150)}
    world.redis.zadd(world.keys["samples"], old)
    samples.take()
    assert len(stored(world)) == 52
    world.advance(15)
    samples.take()
    assert {mark for mark, _ in stored(world)} == {"f", "c"}
    assert len(stored(world)) == 3


def test_a_clock_that_was_set_back_finds_its_slots_free(world: World, samples: SampleStore) -> None:
    for _ in range(4):
        samples.take()
        world.advance(15)
    world.clock.set(NINE - timedelta(hours=1))
    assert samples.take()
    assert {at for _, at in stored(world)} == {NINE - timedelta(hours=1)}


def test_the_server_s_clock_decides_where_none_is_passed_in(redis_client: redis.Redis) -> None:
    with TaskQueue(redis_client) as queue:
        store = SampleStore(queue.link)
        assert store.take()
        series = store.read("15m")
    seconds, _ = redis_client.time()
    # Two slots at most: the clock goes on while the test runs.
    assert [ready for ready in series.values["ready"] if ready is not None] == [0.0]
    assert abs(series.times[-1].timestamp() - seconds) <= 60


# --- what a sample says ---------------------------------------------------------------------------


def test_every_window_has_all_series_aligned(clock: ManualClock, samples: SampleStore) -> None:
    clock.advance(7)
    samples.take()
    for window, step, count in (("15m", 15, 60), ("1h", 15, 240), ("24h", 300, 288)):
        series = samples.read(window)
        assert series.step == step
        assert series.times[-1] == NINE
        assert series.times == [
            NINE - timedelta(seconds=step * n) for n in range(count - 1, -1, -1)
        ]
        assert series.values.keys() == {*RATES, *GAUGES, *WAITS}
        assert {len(values) for values in series.values.values()} == {count}
        assert last(series, "ready") == 0
        assert [each for each in series.values["ready"] if each is not None] == [0]


def test_without_a_sample_in_the_present_step_a_series_ends_with_the_one_before(
    clock: ManualClock, samples: SampleStore
) -> None:
    samples.take()
    clock.advance(16)
    assert samples.read("15m").times[-1] == NINE
    clock.advance(15)
    series = samples.read("15m")
    assert series.times[-1] == NINE + timedelta(seconds=15)
    assert series.values["ready"][-2:] == [0.0, None]


@pytest.mark.parametrize("window", ["2h", "", None, 15, ["1h"]])
def test_a_window_that_is_none_is_refused(samples: SampleStore, window: Any) -> None:
    with pytest.raises(InvalidInput, match=r"window must be one of 15m, 1h, 24h"):
        samples.read(window)


def test_an_empty_queue_has_empty_series(samples: SampleStore) -> None:
    for window in WINDOWS:
        for values in samples.read(window).values.values():
            assert set(values) == {None}


def test_gauges_are_what_there_was(world: World, samples: SampleStore) -> None:
    world.fill("alice", 5)
    world.fill("bob", 2)
    world.push("later", user_id="carol", delay=60)
    world.queue.set_user("bob", paused=True)
    claim = world.claim_one()
    world.queue.bury(claim, "no")
    world.claim_one()
    samples.take()
    series = samples.read("15m")
    assert {name: last(series, name) for name in GAUGES} == {
        "ready": 5,
        "delayed": 1,
        "running": 1,
        "dead": 1,
        "users": 2,
        "tenants": 0,
        "held": 0,
    }


def test_tenants_and_held_tasks_are_counted(world: World, samples: SampleStore) -> None:
    world.queue.set_limit("account:7", slots=1)
    for tenant in ("acme", "globex"):
        world.push(f"{tenant}-1", user_id="ann", tenant=tenant)
        world.push(f"{tenant}-2", user_id="bob", tenant=tenant, pool="gpu")
    world.push("plain", user_id="carol")
    world.push("k-1", "k-2", "k-3", user_id="dora", limit_keys=["account:7"], pool="keys")
    world.queue.claim("w", limit=3, pools=["keys"])
    samples.take()
    series = samples.read("15m")
    # Ann of two, bob of two, carol; dora's tasks are all held.
    assert {name: last(series, name) for name in ("users", "tenants", "held")} == {
        "users": 5,
        "tenants": 2,
        "held": 2,
    }


def test_rates_are_what_counters_grew_by_in_a_second(world: World, samples: SampleStore) -> None:
    world.fill("before", 3)
    samples.take()
    world.advance(20)  # the next sample is late: the rate is that of the time in between
    world.fill("alice", 10)
    for _ in range(2):
        world.queue.bury(world.claim_one(), "no")
    world.queue.bury(world.claim_one(), "late", report=LATE)
    assert world.queue.cancel("alice-9")
    run_all(world)
    samples.take()
    series = samples.read("15m")
    assert {name: last(series, name) for name in RATES} == pytest.approx(
        {
            "pushed": 10 / 20,
            "finished": 9 / 20,
            "failed": 2 / 20,
            "timed_out": 1 / 20,
            "cancelled": 1 / 20,
            "expired": 0,
            "fired": 0,
            "missed": 0,
        }
    )
    assert series.values["pushed"][-2] is None  # nothing is known of before the first


def test_expired_tasks_have_a_rate(world: World, samples: SampleStore) -> None:
    world.push("a", "b", expires=5.0)
    samples.take()
    world.advance(20)
    world.queue.claim("w")
    samples.take()
    assert last(samples.read("15m"), "expired") == 2 / 20


@pytest.mark.one_partition
def test_a_counter_that_went_back_gives_nothing(world: World, samples: SampleStore) -> None:
    world.fill("alice", 10)
    run_all(world)
    for _ in range(2):
        samples.take()
        world.advance(15)
    world.redis.delete(world.keys["stats"])
    world.fill("bob", 3)
    run_all(world)
    samples.take()
    world.advance(15)
    samples.take()
    series = samples.read("15m")
    assert series.values["finished"][-4:] == [None, 0, None, 0]
    assert series.values["pushed"][-4:] == [None, 0, 3 / 15, 0]


def test_a_gap_has_no_values_and_no_rate_after_it(world: World, samples: SampleStore) -> None:
    samples.take()
    world.advance(30)
    world.fill("alice", 30)
    samples.take()
    world.advance(90)
    world.fill("bob", 90)
    samples.take()
    series = samples.read("15m")
    assert series.values["ready"][-9:] == [0, None, 30, *[None] * 5, 120]
    assert series.values["pushed"][-9:] == [None, None, 1.0, *[None] * 6]


def test_a_day_is_told_by_the_coarse_samples(world: World, samples: SampleStore) -> None:
    for n in range(40):
        samples.take()
        world.fill(f"user-{n}", 3)
        world.advance(15)
    samples.take()
    series = samples.read("24h")
    assert series.values["pushed"][-3:] == [None, 0.2, 0.2]
    assert series.values["ready"][-3:] == [0, 60, 120]


# --- waits ----------------------------------------------------------------------------------------


def test_waits_are_of_runs_ended_since_the_last_one(world: World, samples: SampleStore) -> None:
    world.push("old")
    world.queue.finish(world.claim_one())
    world.advance(1)
    samples.take()
    for n in range(20):  # they wait for 14, 13, ... 0 s, and once for none at all
        world.push(f"task-{n:02d}")
        world.advance(0.5)
    claims = world.queue.claim("w", limit=20)
    world.advance(60)  # how long they run does not matter
    world.queue.finish_many((claim, None) for claim in claims[:10])
    for claim in claims[10:]:
        world.queue.bury(claim, "no")
    samples.take()
    series = samples.read("15m")
    assert (last(series, "wait_p50"), last(series, "wait_p95")) == (5.0, 9.5)


def test_no_run_has_no_wait_and_a_cancelled_one_is_none(world: World, samples: SampleStore) -> None:
    world.push("a")
    assert world.queue.cancel("a")
    samples.take()
    series = samples.read("15m")
    assert (last(series, "wait_p50"), last(series, "wait_p95")) == (None, None)


def test_a_retried_run_waits_anew(world: World, samples: SampleStore) -> None:
    world.push("a")
    world.queue.retry(world.claim_one(), "no", delay=100)
    world.advance(103)
    world.queue.finish(world.claim_one())
    samples.take()
    assert last(samples.read("15m"), "wait_p95") == 3.0


def test_of_many_runs_the_newest_hundred_are_looked_at(world: World, samples: SampleStore) -> None:
    world.fill("slow", 50)
    world.advance(10)
    claims = world.queue.claim("w", limit=50)
    for claim in claims[:25]:
        world.queue.bury(claim, "no")
    world.queue.finish_many((claim, None) for claim in claims[25:])
    world.advance(0.001)
    world.fill("quick", 60)
    run_all(world)
    samples.take()
    assert last(samples.read("15m"), "wait_p50") == 0.0
    world.advance(15)
    world.advance(0.001)
    world.fill("busy", 100)
    run_all(world)
    samples.take()
    assert last(samples.read("15m"), "wait_p95") == 0.0


# --- rubbish --------------------------------------------------------------------------------------


@pytest.mark.one_partition
@pytest.mark.untidy
def test_a_spoilt_sample_is_a_gap_and_stops_nobody(world: World, samples: SampleStore) -> None:
    key = world.keys["samples"]
    now = to_ms(NINE, "now")
    for n, text in enumerate(["", "{", "[]", "3", '{"at":"x"}', '{"at":null,"ready":1}', "\xff"]):
        world.redis.zadd(key, {f"f\0{now - 15_000 * (n + 1):013d}\0{text}": 0})
    for member in (b"f\0\xff\xfe", b"rubbish", b"f\0", b"f", b"c\0x\0{}"):
        world.redis.zadd(key, {member: 0})
    for slot in (now - 180_000, now - 165_000):  # two of one moment have no rate
        twice = json.dumps({"at": slot - slot % 60_000, "pushed": 5})
        world.redis.zadd(key, {f"f\0{slot:013d}\0{twice}": 0})
    odd = {"at": now - 150_000, "ready": "many", "dead": True, "running": 7, "pushed": 1e400}
    world.redis.zadd(key, {f"f\0{now - 150_000:013d}\0{json.dumps(odd)}": 0})
    world.redis.hset(world.keys["stats"], mapping={"finished": "x", "fired": "1e3"})
    world.redis.hset(world.keys["fair"], "seq", "many")
    world.redis.hset(world.keys["status"], mapping={"a": "{", "b": "", "c": '{"claimed":"x"}'})
    world.redis.zadd(
        world.keys["runs"], {f"os\0{now:013d}s{i}": 0 for i in "abcd"} | {"os\0x": 0, "os\0": 0}
    )
    assert samples.take()
    series = samples.read("15m")
    assert {window: len(samples.read(window).times) for window in WINDOWS} == {
        "15m": 60,
        "1h": 240,
        "24h": 288,
    }
    assert series.values["running"][-11] == 7
    assert series.values["ready"][-11] is None
    assert last(series, "ready") == 0
    assert last(series, "wait_p50") is None
    world.advance(15)
    assert samples.take()
    later = samples.read("15m")
    assert (last(later, "finished"), last(later, "fired"), last(later, "pushed")) == (None, 0, None)


# --- the leader takes them ------------------------------------------------------------------------


def test_only_the_leader_takes_samples(world: World, samples: SampleStore) -> None:
    scheduler = TaskScheduler(world.queue, registry=world.registry)
    scheduler.add_schedule("* * * * *", "alice", schedule_id="minutely")
    for _ in range(9):
        scheduler.tick()
        world.advance(15)
    fired = samples.read("15m").values["fired"]
    assert fired[-9:] == [None, 0, 0, 0, 1 / 15, 0, 0, 0, 1 / 15]


def test_one_that_does_not_lead_takes_none(world: World, samples: SampleStore) -> None:
    first = TaskScheduler(world.queue, registry=world.registry)
    second = TaskScheduler(world.queue, registry=world.registry)
    first.tick()
    world.redis.delete(world.keys["samples"])
    second.tick()
    assert stored(world) == []


@pytest.mark.one_partition
def test_a_sample_that_fails_does_not_hurt_the_tick(
    world: World, samples: SampleStore, caplog: pytest.LogCaptureFixture
) -> None:
    world.spoil("samples")
    scheduler = TaskScheduler(world.queue, registry=world.registry, scheduler_id="me")
    scheduler.add_schedule("* * * * *", "alice", schedule_id="minutely")
    world.clock.set(NINE + timedelta(minutes=1))
    with caplog.at_level(logging.WARNING, "fairqueue.scheduler"):
        report = scheduler.tick()
    world.redis.delete(world.keys["samples"])
    assert (report.fired, report.is_leader) == (1, True)
    (record,) = [r for r in caplog.records if getattr(r, "event", "") == "sample_failed"]
    assert "samples is a string" in record.error  # type: ignore[attr-defined]
    labels = {"queue": "default", "type": "redis"}
    assert world.registry.get_sample_value("fairqueue_scheduler_errors_total", labels) == 1
    up = {"queue": "default", "scheduler": "me"}
    assert world.registry.get_sample_value("fairqueue_scheduler_redis_up", up) == 1
    assert world.registry.get_sample_value("fairqueue_scheduler_is_leader", up) == 1


# --- the counter of time-outs ---------------------------------------------------------------------


def test_dead_letters_that_timed_out_are_counted_apart(world: World) -> None:
    world.push("a", "b", "c")
    world.queue.bury(world.claim_one(), "no")
    world.queue.bury(world.claim_one(), "late", report=LATE)
    world.queue.cancel("c")
    assert {name: world.stats().get(name) for name in ("buried", "timed_out")} == {
        "buried": 2,
        "timed_out": 1,
    }


def test_one_that_timed_out_after_it_was_cancelled_is_no_time_out(world: World) -> None:
    claim = world.push_and_claim("a")
    world.queue.cancel("a")
    world.queue.bury(claim, "late", report=LATE)
    assert "timed_out" not in world.stats()
