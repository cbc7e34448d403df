"""Heartbeats: who is alive, what the workers declare, and runs that go on after their time-out."""

from datetime import timedelta
from typing import Any

import pytest
from helpers.world import World

from fairqueue.errors import InvalidTask
from fairqueue.models import HandlerLimits
from fairqueue.queue.workers import GONE_AFTER_S, Beat, WorkerInfo


def info(**fields: Any) -> dict[str, Any]:
    """What a worker says of itself."""
    given = {
        "host": "box",
        "pid": 17,
        "version": "1.0",
        "slots": 4,
        "names": ["mail"],
        "current": [],
        "running": 0,
        "started": 1_700_000_000_000,
    }
    return given | fields


def beat(world: World, worker_id: str, limits: Any = None, **fields: Any) -> Beat:
    return world.workers.beat(info(**fields), worker_id, limits)


def alive(world: World) -> list[str]:
    return [each.worker_id for each in world.workers.alive()]


# --- who is alive ---------------------------------------------------------------------------------


def test_a_worker_that_beats_is_alive_and_says_what_it_runs(world: World) -> None:
    started = world.now()
    world.advance(5)
    beat(
        world,
        "wörker 1",
        names=["mail", "ünal"],
        current=["t1", "t2"],
        running=2,
        started=world.clock.now_ms() - 5000,
    )
    assert world.workers.alive() == [
        WorkerInfo(
            worker_id="wörker 1",
            host="box",
            pid=17,
            version="1.0",
            slots=4,
            names=("mail", "ünal"),
            current=("t1", "t2"),
            running=2,
            started_at=started,
            seen_at=world.now(),
            gone_at=world.now() + timedelta(seconds=GONE_AFTER_S),
        )
    ]


@pytest.mark.parametrize("worker_id", ["", "a\nb", None, 7])
def test_a_bad_worker_id_is_refused(world: World, worker_id: Any) -> None:
    with pytest.raises(InvalidTask, match="worker_id"):
        beat(world, worker_id)
    with pytest.raises(InvalidTask, match="worker_id"):
        world.workers.leave(worker_id)
    assert world.dump() == {}


def test_workers_are_listed_by_id(world: World) -> None:
    for worker_id in ("b", "a", "c"):
        beat(world, worker_id)
        world.advance(1)
    assert alive(world) == ["a", "b", "c"]


def test_a_worker_without_a_word_is_gone_by_the_clock_of_the_queue(world: World) -> None:
    beat(world, "w")
    world.advance(GONE_AFTER_S - 0.001)
    assert alive(world) == ["w"]
    world.advance(0.001)
    assert alive(world) == []
    assert world.redis.ttl(world.keys["workers"]) == -1  # its end is data: nothing expires


def test_a_worker_that_beats_in_time_stays(world: World) -> None:
    for _ in range(5):
        beat(world, "w")
        world.advance(GONE_AFTER_S - 1)
    assert alive(world) == ["w"]


def test_a_worker_that_beats_late_is_back_and_gone_for_nobody(world: World) -> None:
    beat(world, "w")
    world.advance(2 * GONE_AFTER_S)
    assert beat(world, "w").gone == []
    assert alive(world) == ["w"]


def test_one_worker_is_told_of_one_that_is_gone(world: World) -> None:
    beat(world, "dead")
    world.advance(GONE_AFTER_S)
    assert beat(world, "w1").gone == ["dead"]
    assert beat(world, "w2").gone == []


def test_a_worker_that_leaves_is_gone_at_once_and_missed_by_nobody(world: World) -> None:
    beat(world, "w1")
    beat(world, "w2")
    world.workers.leave("w1")
    world.workers.leave("w1")
    world.workers.leave("unknown")
    assert alive(world) == ["w2"]
    world.advance(1)
    assert beat(world, "w2").gone == []
    world.workers.leave("w2")
    assert not world.dump().keys() & {"workers", "worker_ends"}


def test_one_that_leaves_keeps_nothing_from_the_others(world: World) -> None:
    beat(world, "leaving")
    beat(world, "dead")
    world.queue.configure(max_attempts=1)
    world.push_and_claim("t", lease=5)
    world.advance(GONE_AFTER_S)
    world.workers.leave("leaving")
    told = beat(world, "w")
    assert (told.gone, [notice.task_id for notice in told.notices]) == (["dead"], ["t"])


def test_more_workers_than_one_beat_looks_at_are_found_gone_by_the_next_ones(world: World) -> None:
    everybody = {f"w{n}" for n in range(250)}
    for worker_id in everybody:
        beat(world, worker_id, names=[f"name of {worker_id}"])
    world.advance(GONE_AFTER_S)
    assert alive(world) == []
    told = [beat(world, "new", names=["mail"]) for _ in range(4)]
    assert [len(each.gone) for each in told] == [100, 100, 50, 0]
    assert {worker_id for each in told for worker_id in each.gone} == everybody
    assert [each.handled for each in told] == [{"mail"}] * 4
    assert world.dump()["worker_ends"].keys() == {"new"}
    assert world.dump()["workers"].keys() == {"new", ""}


# --- names ----------------------------------------------------------------------------------------


def test_a_worker_learns_the_names_that_any_worker_runs(world: World) -> None:
    assert beat(world, "w1", names=["mail", "*"]).handled == {"mail", "*"}
    assert beat(world, "w2", names=["mail", "ünal: a b"]).handled == {"mail", "*", "ünal: a b"}
    world.advance(GONE_AFTER_S - 1)
    assert beat(world, "w2", names=["mail", "ünal: a b"]).handled == {"mail", "*", "ünal: a b"}
    world.advance(1)
    assert beat(world, "w2", names=["mail", "ünal: a b"]).handled == {"mail", "ünal: a b"}


def test_names_of_a_worker_that_left_are_forgotten(world: World) -> None:
    beat(world, "w1", names=["mail", "report"])
    beat(world, "w2", names=["mail"])
    world.workers.leave("w1")
    assert beat(world, "w2", names=["mail"]).handled == {"mail"}


def test_names_that_a_worker_does_not_run_any_more_are_forgotten(world: World) -> None:
    beat(world, "w1", names=["mail", "report"])
    assert beat(world, "w1", names=["report", "backup"]).handled == {"report", "backup"}
    assert beat(world, "w1", names=[]).handled == frozenset()


# --- records that somebody has spoilt -------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [b"", b"not json", b"[]", b"{}", b"\xff", b'{"id":"bad","names":[1,{},"x"]}']
)
def test_a_spoilt_record_hides_its_worker_until_the_next_beat(world: World, text: bytes) -> None:
    beat(world, "bad", names=["mail"])
    beat(world, "good", names=["report"])
    world.redis.hset(world.keys["workers"], "bad", text)
    assert alive(world) == ["good"]
    beat(world, "good", names=["report", "backup"])  # reads the records of all
    assert beat(world, "bad", names=["mail"]).handled == {"mail", "report", "backup"}
    assert alive(world) == ["bad", "good"]


def test_a_worker_whose_record_is_lost_is_skipped(world: World) -> None:
    beat(world, "w1")
    beat(world, "w2")
    world.redis.hdel(world.keys["workers"], "w1", "")
    assert alive(world) == ["w2"]
    assert beat(world, "w2").handled == {"mail"}


# --- limits ---------------------------------------------------------------------------------------


def test_limits_that_a_worker_declares_hold(world: World) -> None:
    beat(world, "w", {"mail": {"slots": 2, "rate": 0.5, "timeout_ms": 1500}, "other": {}})
    assert world.queue.get_limits() == {"mail": HandlerLimits(slots=2, rate=0.5, timeout=1.5)}


def test_declared_limits_bind_claims(world: World) -> None:
    beat(world, "w", {"mail": {"slots": 1}})
    world.push("t1", "t2", name="mail")
    assert len(world.queue.claim("w", limit=2)) == 1


def test_an_ordinary_beat_leaves_limits_alone(world: World) -> None:
    beat(world, "w", {"mail": {"slots": 2}})
    beat(world, "w")
    assert world.queue.get_limits() == {"mail": HandlerLimits(slots=2)}


def test_a_worker_that_starts_anew_changes_what_workers_declared(world: World) -> None:
    beat(world, "w", {"mail": {"slots": 2}, "report": {"slots": 1}})
    beat(world, "w", {"mail": {"slots": 3}, "report": {}})
    assert world.queue.get_limits() == {"mail": HandlerLimits(slots=3)}


def test_limits_of_an_operator_stand_over_those_of_workers(world: World) -> None:
    beat(world, "w", {"mail": {"slots": 2}})
    world.queue.set_limits("mail", slots=7)
    world.queue.set_limits("report", rate=1.0)
    beat(world, "w", {"mail": {"slots": 2}, "report": {}})
    expected = {"mail": HandlerLimits(slots=7), "report": HandlerLimits(rate=1.0)}
    assert world.queue.get_limits() == expected


def test_limits_that_the_operator_takes_back_are_the_workers_to_declare_again(world: World) -> None:
    world.queue.set_limits("mail", slots=7)
    world.queue.set_limits("mail")
    beat(world, "w", {"mail": {"slots": 2}})
    assert world.queue.get_limits() == {"mail": HandlerLimits(slots=2)}


def test_a_spoilt_limit_is_declared_anew(world: World) -> None:
    world.redis.hset(world.keys["limits"], "mail", b"spoilt")
    beat(world, "w", {"mail": {"slots": 2}})
    assert world.queue.get_limits() == {"mail": HandlerLimits(slots=2)}
