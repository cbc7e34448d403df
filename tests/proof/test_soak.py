"""The soak: what counts as growth, as late, as fair, and as lost where retention drops tasks."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.tasks import claim_one, push
from helpers.world import World

from fairqueue.queue.queue import TaskQueue
from faults.checker import Verdict, check_trimmed
from faults.journal import Journal
from faults.measures import (
    Data,
    Growth,
    Sample,
    judge,
    lateness,
    longest_trouble,
    look,
    read_runs,
    resident_mib,
    shares,
)
from faults.picture import draw
from faults.soak import CEILINGS, Record, Soak, profile_for
from faults.storm import Player, Result

SECONDS = 600
EVEN_USERS = frozenset({"user-0", "user-1"})


def sample(at: float, *, mib: float = 30.0, redis_mib: float = 5.0, **entries: int) -> Sample:
    data = Data(
        used=redis_mib,
        keys=20,
        finished=int(at) * 100,
        entries={"ops": 0, "ops_before": 0, "waiting": 10, "tasks": 2_000} | entries,
        backlogged=EVEN_USERS | {"user-9"},
    )
    return Sample(at=at, memory={"worker w0-0": mib}, data=data)


def leaks(samples: list[Sample], seconds: float = SECONDS) -> list[str]:
    growths = judge(samples, 0.0, seconds, CEILINGS)
    return [growth.name for growth in growths if growth.is_leak]


# --- growth ---------------------------------------------------------------------------------------


def test_what_stays_as_it_is_is_flat() -> None:
    growths = judge([sample(at) for at in range(SECONDS)], 0.0, SECONDS, {})
    assert "worker w0-0" in {growth.name for growth in growths}
    assert not any(growth.is_leak for growth in growths)


def test_a_process_that_grows_all_the_time_is_named() -> None:
    assert leaks([sample(at, mib=30 + at / 30) for at in range(SECONDS)]) == ["worker w0-0"]


def test_redis_and_a_key_that_grow_all_the_time_are_named() -> None:
    samples = [sample(at, redis_mib=5 + at / 20, open=at * 2) for at in range(SECONDS)]
    assert leaks(samples) == ["Redis", "key open"]


def test_generations_that_come_and_go_are_flat() -> None:
    samples = [sample(at, ops=at % 60 * 500, ops_before=30_000) for at in range(SECONDS)]
    assert leaks(samples) == []
    assert leaks([sample(at, ops=at * 500) for at in range(SECONDS)]) == ["key ops"]


def test_more_answers_of_more_tasks_are_no_leak() -> None:
    samples = [sample(at, ops=120 * int(100 + at / 2)) for at in range(SECONDS)]
    finished = [int(at * 100 + at * at / 4) for at in range(SECONDS)]
    faster = [
        replace(one, data=replace(one.data, finished=count))
        for one, count in zip(samples, finished, strict=True)
        if one.data is not None
    ]
    assert leaks(samples) == ["key ops"]
    assert leaks(faster) == []


def test_what_was_high_for_a_while_is_no_leak() -> None:
    dice = random.Random(5)
    samples = [sample(at, mib=30 + 20 * (dice.random() < 0.05)) for at in range(SECONDS)]
    assert leaks(samples) == []


def test_growth_up_to_what_the_data_model_allows_is_no_leak() -> None:
    assert leaks([sample(at, moments=at * 10) for at in range(SECONDS)]) == []
    assert leaks([sample(at, moments=at * 100) for at in range(SECONDS)]) == ["key moments"]


def test_a_short_soak_does_not_judge_growth() -> None:
    assert judge([sample(at, mib=30 + at) for at in range(250)], 0.0, 250, {}) == []


def test_a_process_that_was_killed_in_between_is_not_judged() -> None:
    late_ones = [sample(at, mib=30 + at) for at in range(SECONDS // 2, SECONDS)]
    assert "worker w0-0" not in {growth.name for growth in judge(late_ones, 0.0, SECONDS, {})}


# --- time and shares ------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "w0-0.journal")


def test_lateness_is_of_a_steady_schedules_first_run(journal: Journal, tmp_path: Path) -> None:
    journal.note("run", "steady-0:1000000000000", "clock-0", 7.5, 0.5)
    journal.note("run", "steady-0:1000000000000", "clock-0", 9.0, 2.0)
    journal.note("run", "e0-0.3:1000000000000", "user-1", 9.0, 2.0)
    journal.note("run", "p0-0.1", "user-1", 9.0, None)
    journal.note("done", ["p0-0.1"])
    assert lateness(read_runs(tmp_path)) == [(7.5, 0.5)]


def test_trouble_lasts_from_one_run_on_time_to_the_next() -> None:
    assert longest_trouble([(1.0, 0.1), (2.0, 0.2), (4.0, 3.0), (6.5, 0.1), (7.0, 0.1)]) == 4.5
    assert longest_trouble([]) == 0.0


def test_shares_are_of_users_backlogged_all_through(journal: Journal, tmp_path: Path) -> None:
    for number in range(40):
        journal.note("run", f"p0-0.{number}", f"user-{number % 4 // 3}", number / 4, None)
        journal.note("run", f"p0-1.{number}", "user-9", number / 4, None)
    samples = [sample(at) for at in range(10)]
    (share,) = shares(read_runs(tmp_path), samples, EVEN_USERS, 0.0, 10.0)
    assert (share.least, share.most) == (0.5, 1.5)
    assert share.jain == pytest.approx(0.8)


def test_users_who_were_briefly_idle_are_not_compared(journal: Journal, tmp_path: Path) -> None:
    for number in range(40):
        journal.note("run", f"p0-0.{number}", f"user-{number % 2}", number / 4, None)
    samples = [sample(at) for at in range(10)]
    idle = samples[3].data
    assert idle is not None
    samples[3] = replace(samples[3], data=replace(idle, backlogged=frozenset({"user-0"})))
    assert shares(read_runs(tmp_path), samples, EVEN_USERS, 0.0, 10.0) == []


# --- looking --------------------------------------------------------------------------------------


def test_a_look_counts_what_each_key_holds(world: World) -> None:
    world.push("one", "two")
    world.push("three", user_id="bob")
    data = look(world.redis, world.keys)
    assert {key: data.entries[key] for key in ("tasks", "waiting", "ready", "dead")} == {
        "tasks": 3,
        "waiting": 3,
        "ready": 2,
        "dead": 0,
    }
    assert data.backlogged == {"alice", "bob"}
    assert data.used > 0


def test_a_process_that_is_gone_has_no_memory() -> None:
    assert resident_mib(2**22 + 1) is None


# --- the verdict where retention drops tasks ------------------------------------------------------


def told(journal: Journal, *done: str, count: int = 3) -> None:
    journal.note("push", 0, count, "intent")
    journal.note("push", 0, count, "ok")
    for task_id in done:
        journal.note("run", task_id, "alice", 1.0, None)
        journal.note("done", [task_id])


@pytest.fixture
def trimmed(queue: TaskQueue) -> TaskQueue:
    """Three tasks that were pushed and finished, of which one is left."""
    queue.configure(keep_finished=1)
    push(queue, *(f"w0-0.{number}" for number in range(3)))
    for _ in range(3):
        queue.finish(claim_one(queue))
    return queue


def test_dropped_tasks_are_not_lost(trimmed: TaskQueue, journal: Journal, tmp_path: Path) -> None:
    told(journal, "w0-0.0", "w0-0.1", "w0-0.2")
    verdict = check_trimmed(trimmed, tmp_path)
    assert (verdict.violations(durable=True), verdict.tasks, verdict.details) == (0, 3, [])


def test_a_vanished_task_is_lost(trimmed: TaskQueue, journal: Journal, tmp_path: Path) -> None:
    told(journal, "w0-0.1", "w0-0.2")
    verdict = check_trimmed(trimmed, tmp_path)
    assert verdict.lost == 1
    assert "1 lost: w0-0.0" in verdict.details


def test_a_cancelled_task_need_not_run(queue: TaskQueue, journal: Journal, tmp_path: Path) -> None:
    push(queue, "w0-0.0")
    queue.configure(keep_finished=0)
    told(journal, count=1)
    journal.note("cancel", "w0-0.0")
    queue.cancel("w0-0.0")
    assert check_trimmed(queue, tmp_path).violations(durable=True) == 0


def test_a_double_completion_is_found(trimmed: TaskQueue, journal: Journal, tmp_path: Path) -> None:
    told(journal, "w0-0.0", "w0-0.1", "w0-0.2", "w0-0.1")
    verdict = check_trimmed(trimmed, tmp_path)
    assert (verdict.repeated_completions, verdict.lost) == (1, 0)


def test_unintended_tasks_are_found(trimmed: TaskQueue, journal: Journal, tmp_path: Path) -> None:
    told(journal, "w0-0.0", "w0-0.1", "w0-0.2")
    push(trimmed, "w0-9.0")
    trimmed.finish(claim_one(trimmed))
    verdict = check_trimmed(trimmed, tmp_path)
    assert (verdict.unexpected, verdict.duplicated) == (1, 1)


def test_an_unended_task_is_found(trimmed: TaskQueue, journal: Journal, tmp_path: Path) -> None:
    told(journal, "w0-0.0", "w0-0.1", "w0-0.2", count=4)
    push(trimmed, "w0-0.3")
    verdict = check_trimmed(trimmed, tmp_path)
    assert (verdict.unfinished, verdict.doubled) == (1, 1)


# --- the soak -------------------------------------------------------------------------------------


def test_the_first_of_each_role_is_never_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    soak = Soak(profile_for(1.0), seed=5)
    soak.players = [
        Player(role, index, None) for role in ("worker", "editor") for index in range(3)
    ]
    killed: list[Player] = []
    monkeypatch.setattr(soak, "_kill", killed.append)
    for _ in range(100):
        soak._strike_kill()
    assert {(player.role, player.index) for player in killed} == {
        ("worker", 1),
        ("worker", 2),
        ("editor", 1),
        ("editor", 2),
    }


def record_of(samples: list[Sample]) -> Record:
    soak = Soak(profile_for(SECONDS / 60), seed=5)
    soak.began, soak.ended, soak.samples = 0.0, float(SECONDS), samples
    soak.marks = [(10.0, "kill"), (20.0, "reset"), (20.0, "network")]
    soak.folder = Path("/nowhere")
    result = Result(
        name="soak", seed=5, seconds=SECONDS, faults={}, verdict=Verdict(), durable=True
    )
    return Record.of(soak, result)


def test_what_has_grown_breaks_a_promise() -> None:
    record = record_of([sample(at, mib=30 + at / 30) for at in range(SECONDS)])
    assert (record.result.verdict.grown, record.result.violations) == (1, 1)
    assert "worker w0-0" in record.result.verdict.details[0]


@pytest.mark.parametrize("samples", [[], [sample(at) for at in range(SECONDS)]])
def test_the_picture_is_drawn_whatever_there_is(samples: list[Sample], tmp_path: Path) -> None:
    draw(record_of(samples), tmp_path / "new" / "soak.png")
    assert (tmp_path / "new" / "soak.png").read_bytes().startswith(b"\x89PNG")


def test_a_growth_says_what_grew_and_what_was_allowed() -> None:
    growth = Growth(name="Redis", unit="MiB", marks=(5.0, 7.0, 9.0), allowed=8.5)
    assert str(growth) == "Redis: 5.0 -> 9.0 MiB, 8.5 allowed"
