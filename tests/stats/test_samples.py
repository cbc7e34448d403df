"""Samples for charts: one in each slot of time, kept for a while, told as series."""

import json
import logging
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
import redis
from prometheus_client import CollectorRegistry
from support import claim_one, fill, in_thread, push, spoil, stats

from fairqueue import TaskQueue, TaskScheduler
from fairqueue.clock import ManualClock, to_ms
from fairqueue.errors import InvalidInput
from fairqueue.queue.reports import Report
from fairqueue.stats.samples import GAUGES, RATES, WAITS, WINDOWS, SampleStore, Series

NINE = datetime(2026, 3, 5, 9, 0, tzinfo=UTC)  # a slot of 15 s and of 5 min begins
LATE = Report(seconds=1.0, timed_out=True)


@pytest.fixture
def samples(queue: TaskQueue, clock: ManualClock) -> SampleStore:
    clock.set(NINE)
    return SampleStore(queue.link)


def stored(client: redis.Redis, queue: TaskQueue) -> list[tuple[str, datetime]]:
    """The resolutions and slots of all samples, in order."""
    members = cast(list[bytes], client.zrange(queue.keys["samples"], 0, -1))
    parts = [member.decode().split("\0") for member in members]
    return [(mark, datetime.fromtimestamp(int(slot) / 1000, UTC)) for mark, slot, _ in parts]


def last(series: Series, name: str) -> float | None:
    return series.values[name][-1]


def run_all(queue: TaskQueue) -> None:
    """Run everything that waits, in no time."""
    while claims := queue.claim("w", limit=100):
        queue.finish_many((claim, None) for claim in claims)


# --- taking ---------------------------------------------------------------------------------------


def test_the_first_who_comes_in_a_slot_stores_its_sample(
    queue: TaskQueue, clock: ManualClock, redis_client: redis.Redis, samples: SampleStore
) -> None:
    other = SampleStore(queue.link)
    taken = []
    for seconds in (0, 10, 4.999, 0.001, 10):
        clock.advance(seconds)
        taken += [samples.take(), other.take()]
    assert taken == [True, False, False, False, False, False, True, False, False, False]
    fine = [at for mark, at in stored(redis_client, queue) if mark == "f"]
    assert fine == [NINE, NINE + timedelta(seconds=15)]


def test_of_many_who_come_at_once_one_stores_a_sample(samples: SampleStore) -> None:
    answers = [in_thread(samples.take) for _ in range(5)]
    assert sorted(answer() for answer in answers) == [False] * 4 + [True]


def test_a_coarse_sample_is_stored_when_its_slot_turns(
    queue: TaskQueue, clock: ManualClock, redis_client: redis.Redis, samples: SampleStore
) -> None:
    clock.set(NINE + timedelta(seconds=200))
    for _ in range(30):
        samples.take()
        clock.advance(15)
    coarse = [at for mark, at in stored(redis_client, queue) if mark == "c"]
    assert coarse == [NINE, NINE + timedelta(minutes=5), NINE + timedelta(minutes=10)]


def test_samples_are_kept_a_little_longer_than_the_windows(
    queue: TaskQueue, clock: ManualClock, redis_client: redis.Redis, samples: SampleStore
) -> None:
    for _ in range(26 * 12):
        samples.take()
        clock.advance(15)
        samples.take()
        clock.advance(285)
    kept = stored(redis_client, queue)
    newest = clock.now() - timedelta(minutes=5)
    fine = [at for mark, at in kept if mark == "f"]
    coarse = [at for mark, at in kept if mark == "c"]
    assert min(fine) == newest - timedelta(minutes=70) + timedelta(seconds=15)
    assert min(coarse) == newest - timedelta(hours=24, minutes=30)
    assert len(coarse) == 12 * 24.5 + 1


def test_what_is_left_over_by_one_trim_goes_with_the_next(
    queue: TaskQueue, clock: ManualClock, redis_client: redis.Redis, samples: SampleStore
) -> None:
    old = {f"f\0{15_000 * n:013d}\0{{}}": 0 for n in range(150)}
    redis_client.zadd(queue.keys["samples"], old)
    samples.take()
    assert len(stored(redis_client, queue)) == 52
    clock.advance(15)
    samples.take()
    assert {mark for mark, _ in stored(redis_client, queue)} == {"f", "c"}
    assert len(stored(redis_client, queue)) == 3


def test_a_clock_that_was_set_back_finds_its_slots_free(
    queue: TaskQueue, clock: ManualClock, redis_client: redis.Redis, samples: SampleStore
) -> None:
    for _ in range(4):
        samples.take()
        clock.advance(15)
    clock.set(NINE - timedelta(hours=1))
    assert samples.take()
    assert {at for _, at in stored(redis_client, queue)} == {NINE - timedelta(hours=1)}


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


def test_every_window_has_every_series_aligned_on_its_steps(
    clock: ManualClock, samples: SampleStore
) -> None:
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
    with pytest.raises(InvalidInput, match=r"window .* must be one of 15m, 1h, 24h"):
        samples.read(window)


def test_an_empty_queue_has_empty_series(samples: SampleStore) -> None:
    for window in WINDOWS:
        for values in samples.read(window).values.values():
            assert set(values) == {None}


def test_gauges_are_what_there_was(
    queue: TaskQueue, samples: SampleStore, redis_client: redis.Redis
) -> None:
    fill(queue, "alice", 5)
    fill(queue, "bob", 2)
    push(queue, "later", user_id="carol", delay=60)
    queue.set_user("bob", paused=True)
    claim = claim_one(queue)
    queue.bury(claim, "no")
    claim_one(queue)
    samples.take()
    series = samples.read("15m")
    assert {name: last(series, name) for name in GAUGES} == {
        "ready": 5,
        "delayed": 1,
        "running": 1,
        "dead": 1,
        "users": 2,
    }


def test_rates_are_what_counters_grew_by_in_a_second(
    queue: TaskQueue, clock: ManualClock, samples: SampleStore
) -> None:
    fill(queue, "before", 3)
    samples.take()
    clock.advance(20)  # the next sample is late: the rate is that of the time in between
    fill(queue, "alice", 10)
    for _ in range(2):
        queue.bury(claim_one(queue), "no")
    queue.bury(claim_one(queue), "late", report=LATE)
    assert queue.cancel("alice-9")
    run_all(queue)
    samples.take()
    series = samples.read("15m")
    assert {name: last(series, name) for name in RATES} == {
        "pushed": 10 / 20,
        "finished": 9 / 20,
        "failed": 2 / 20,
        "timed_out": 1 / 20,
        "cancelled": 1 / 20,
        "fired": 0,
        "missed": 0,
    }
    assert series.values["pushed"][-2] is None  # nothing is known of before the first


def test_a_counter_that_went_back_gives_nothing(
    queue: TaskQueue, clock: ManualClock, samples: SampleStore, redis_client: redis.Redis
) -> None:
    fill(queue, "alice", 10)
    run_all(queue)
    for _ in range(2):
        samples.take()
        clock.advance(15)
    redis_client.delete(queue.keys["stats"])
    fill(queue, "bob", 3)
    run_all(queue)
    samples.take()
    clock.advance(15)
    samples.take()
    series = samples.read("15m")
    assert series.values["finished"][-4:] == [None, 0, None, 0]
    assert series.values["pushed"][-4:] == [None, 0, 3 / 15, 0]


def test_a_gap_gives_nothing_and_a_long_one_no_rate_after_it(
    clock: ManualClock, samples: SampleStore, queue: TaskQueue
) -> None:
    samples.take()
    clock.advance(30)
    fill(queue, "alice", 30)
    samples.take()
    clock.advance(90)
    fill(queue, "bob", 90)
    samples.take()
    series = samples.read("15m")
    assert series.values["ready"][-9:] == [0, None, 30, *[None] * 5, 120]
    assert series.values["pushed"][-9:] == [None, None, 1.0, *[None] * 6]


def test_a_day_is_told_by_the_coarse_samples(
    queue: TaskQueue, clock: ManualClock, samples: SampleStore
) -> None:
    for n in range(40):
        samples.take()
        fill(queue, f"user-{n}", 3)
        clock.advance(15)
    samples.take()
    series = samples.read("24h")
    assert series.values["pushed"][-3:] == [None, 0.2, 0.2]
    assert series.values["ready"][-3:] == [0, 60, 120]


# --- waits ----------------------------------------------------------------------------------------


def test_waits_are_those_of_runs_that_ended_since_the_sample_before(
    queue: TaskQueue, clock: ManualClock, samples: SampleStore
) -> None:
    push(queue, "old")
    queue.finish(claim_one(queue))
    clock.advance(1)
    samples.take()
    for n in range(20):  # they wait for 14, 13, ... 0 s, and once for none at all
        push(queue, f"task-{n:02d}")
        clock.advance(0.5)
    claims = queue.claim("w", limit=20)
    clock.advance(60)  # how long they run does not matter
    queue.finish_many((claim, None) for claim in claims[:10])
    for claim in claims[10:]:
        queue.bury(claim, "no")
    samples.take()
    series = samples.read("15m")
    assert (last(series, "wait_p50"), last(series, "wait_p95")) == (5.0, 9.5)


def test_no_run_has_no_wait_and_a_cancelled_one_is_none(
    queue: TaskQueue, clock: ManualClock, samples: SampleStore
) -> None:
    push(queue, "a")
    assert queue.cancel("a")
    samples.take()
    series = samples.read("15m")
    assert (last(series, "wait_p50"), last(series, "wait_p95")) == (None, None)


def test_a_retried_run_waits_anew(
    queue: TaskQueue, clock: ManualClock, samples: SampleStore
) -> None:
    push(queue, "a")
    queue.retry(claim_one(queue), "no", delay=100)
    clock.advance(103)
    queue.finish(claim_one(queue))
    samples.take()
    assert last(samples.read("15m"), "wait_p95") == 3.0


def test_of_many_runs_the_newest_hundred_are_looked_at(
    queue: TaskQueue, clock: ManualClock, samples: SampleStore
) -> None:
    fill(queue, "slow", 50)
    clock.advance(10)
    claims = queue.claim("w", limit=50)
    for claim in claims[:25]:
        queue.bury(claim, "no")
    queue.finish_many((claim, None) for claim in claims[25:])
    clock.advance(0.001)
    fill(queue, "quick", 60)
    run_all(queue)
    samples.take()
    assert last(samples.read("15m"), "wait_p50") == 0.0
    clock.advance(15)
    clock.advance(0.001)
    fill(queue, "busy", 100)
    run_all(queue)
    samples.take()
    assert last(samples.read("15m"), "wait_p95") == 0.0


# --- rubbish --------------------------------------------------------------------------------------


@pytest.mark.untidy
def test_what_somebody_has_spoilt_is_a_gap_and_stops_nobody(
    queue: TaskQueue, clock: ManualClock, samples: SampleStore, redis_client: redis.Redis
) -> None:
    key = queue.keys["samples"]
    now = to_ms(NINE, "now")
    for n, text in enumerate(["", "{", "[]", "3", '{"at":"x"}', '{"at":null,"ready":1}', "\xff"]):
        redis_client.zadd(key, {f"f\0{now - 15_000 * (n + 1):013d}\0{text}": 0})
    for member in (b"f\0\xff\xfe", b"rubbish", b"f\0", b"f", b"c\0x\0{}"):
        redis_client.zadd(key, {member: 0})
    for slot in (now - 180_000, now - 165_000):  # two of one moment have no rate
        twice = json.dumps({"at": slot - slot % 60_000, "pushed": 5})
        redis_client.zadd(key, {f"f\0{slot:013d}\0{twice}": 0})
    odd = {"at": now - 150_000, "ready": "many", "dead": True, "running": 7, "pushed": 1e400}
    redis_client.zadd(key, {f"f\0{now - 150_000:013d}\0{json.dumps(odd)}": 0})
    redis_client.hset(queue.keys["stats"], mapping={"finished": "x", "fired": "1e3"})
    redis_client.hset(queue.keys["fair"], "seq", "many")
    redis_client.hset(queue.keys["status"], mapping={"a": "{", "b": "", "c": '{"claimed":"x"}'})
    redis_client.zadd(
        queue.keys["runs"], {f"os\0{now:013d}s{i}": 0 for i in "abcd"} | {"os\0x": 0, "os\0": 0}
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
    clock.advance(15)
    assert samples.take()
    later = samples.read("15m")
    assert (last(later, "finished"), last(later, "fired"), last(later, "pushed")) == (None, 0, None)


# --- the leader takes them ------------------------------------------------------------------------


def test_the_leader_takes_samples_and_nobody_else_has_to(
    queue: TaskQueue, clock: ManualClock, samples: SampleStore, registry: CollectorRegistry
) -> None:
    scheduler = TaskScheduler(queue, registry=registry)
    scheduler.add_schedule("* * * * *", "alice", schedule_id="minutely")
    for _ in range(9):
        scheduler.tick()
        clock.advance(15)
    fired = samples.read("15m").values["fired"]
    assert fired[-9:] == [None, 0, 0, 0, 1 / 15, 0, 0, 0, 1 / 15]


def test_one_that_does_not_lead_takes_none(
    queue: TaskQueue, samples: SampleStore, redis_client: redis.Redis, registry: CollectorRegistry
) -> None:
    first = TaskScheduler(queue, registry=registry)
    second = TaskScheduler(queue, registry=registry)
    first.tick()
    redis_client.delete(queue.keys["samples"])
    second.tick()
    assert stored(redis_client, queue) == []


def test_a_sample_that_fails_does_not_hurt_the_tick(
    queue: TaskQueue,
    clock: ManualClock,
    samples: SampleStore,
    redis_client: redis.Redis,
    registry: CollectorRegistry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil(redis_client, queue, "samples")
    scheduler = TaskScheduler(queue, registry=registry, scheduler_id="me")
    scheduler.add_schedule("* * * * *", "alice", schedule_id="minutely")
    clock.set(NINE + timedelta(minutes=1))
    with caplog.at_level(logging.WARNING, "fairqueue.scheduler"):
        report = scheduler.tick()
    redis_client.delete(queue.keys["samples"])
    assert (report.fired, report.is_leader) == (1, True)
    (record,) = [r for r in caplog.records if getattr(r, "event", "") == "sample_failed"]
    assert "samples is a string" in record.error  # type: ignore[attr-defined]
    labels = {"queue": "default", "type": "redis"}
    assert registry.get_sample_value("fairqueue_scheduler_errors_total", labels) == 1
    up = {"queue": "default", "scheduler": "me"}
    assert registry.get_sample_value("fairqueue_scheduler_redis_up", up) == 1
    assert registry.get_sample_value("fairqueue_scheduler_is_leader", up) == 1


# --- the counter of time-outs ---------------------------------------------------------------------


def test_dead_letters_that_timed_out_are_counted_apart(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    push(queue, "a", "b", "c")
    queue.bury(claim_one(queue), "no")
    queue.bury(claim_one(queue), "late", report=LATE)
    queue.cancel("c")
    assert {name: stats(redis_client).get(name) for name in ("buried", "timed_out")} == {
        "buried": 2,
        "timed_out": 1,
    }


def test_one_that_timed_out_after_it_was_cancelled_is_no_time_out(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    push(queue, "a")
    claim = claim_one(queue)
    queue.cancel("a")
    queue.bury(claim, "late", report=LATE)
    assert "timed_out" not in stats(redis_client)
