"""Failpoints are enumerated and visited, and the judge of what they leave can say no."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.fixtures import Spawn
from helpers.tasks import fill, make_task

from fairqueue.clock import ManualClock
from fairqueue.link.scripts import parts_of, script_names
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from faults.aftermath import Journal, Verdict, judge
from faults.failpoints import (
    PHASES,
    Failpoints,
    UnknownCommand,
    all_failpoints,
    catalogue,
    load_scripts,
    sent_commands,
)
from faults.tour import START_S, TOURS, Tour

# Another one each day, and with it another phase of each script. All phases with all seeds:
# python -m faults.failpoints --seeds 20
SEED = int(os.environ.get("FAIRQUEUE_FAULTS_SEED", datetime.now(UTC).toordinal() % 20))
RUN_S = 550  # far more than it takes, for machines that have much else to do

CHANGING = [name for name in script_names() if "no-writes" not in parts_of(name)[-1].flags]


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.timeout(RUN_S + 50)
def test_a_process_that_dies_at_any_change_loses_nothing_and_doubles_nothing() -> None:
    """Also: the tours make every call of the catalogue, and no other."""
    points = [f"{name}:{PHASES[(SEED + n) % 3]}" for n, name in enumerate([*CHANGING, "ROLE"])]
    only = ",".join(points)
    arguments = ["--seeds", "1", "--first", str(SEED), "--only", only, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "faults.failpoints", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout)
    assert summary["violations"] == []
    assert summary["unvisited"] == [], f"FAIRQUEUE_FAULTS_SEED={SEED}"
    assert summary["unmade"] == [], f"FAIRQUEUE_FAULTS_SEED={SEED}"
    assert summary["unknown"] == [], f"FAIRQUEUE_FAULTS_SEED={SEED}"
    assert summary["killed"] == len(points)
    assert done.returncode == 0


def test_there_is_a_failpoint_in_each_phase_of_each_script_and_command() -> None:
    assert {*script_names()} < {*catalogue()}
    assert {"BLPOP", "SCRIPT LOAD", "UNLINK", "TIME", "HSCAN"} < {*catalogue()}
    assert len(all_failpoints()) == len({*all_failpoints()}) == 3 * len(catalogue())


@pytest.mark.parametrize(
    ("source", "commands"),
    [
        ('link.ask(("HLEN", key))', {"HLEN"}),
        ('link.ask(("HGET", key), ("CONFIG", "GET", "save"))', {"HGET", "CONFIG GET"}),
        ('self._link.ask(*(("ZSCORE", key, each) for each in ids))', {"ZSCORE"}),
        ('HELLO = ("ECHO", "x")\nlink.ask(HELLO)', {"ECHO"}),
        ('connection.send_command("BLPOP", key, 0)', {"BLPOP"}),
        ('channel.ask("kill")', set()),
    ],
)
def test_a_sent_command_is_found(tmp_path: Path, source: str, commands: set[str]) -> None:
    (tmp_path / "new.py").write_text(source)
    assert sent_commands(tmp_path) == commands


@pytest.mark.parametrize("source", ["link.ask(words)", "connection.send_command(*words)"])
def test_a_command_that_the_source_hides_must_be_named(tmp_path: Path, source: str) -> None:
    (tmp_path / "new.py").write_text(f"def look():\n    {source}\n")
    with pytest.raises(UnknownCommand, match="module 'new', look, line 2"):
        sent_commands(tmp_path)


# --- connections that are watched -----------------------------------------------------------------


def test_every_call_passes_its_three_phases_whatever_way_it_goes(redis_url: str) -> None:
    load_scripts(redis_url)
    points = Failpoints.record()
    with TaskQueue(points.client(redis_url), "watched", clock=ManualClock()) as queue:
        queue.push_many(make_task(task_id=f"t{n}") for n in range(600))  # one after the other
        claims = queue.claim("w", limit=3)
        queue.finish_and_claim([(claim, None) for claim in claims], "w", 1)  # together
        queue.get("t1")
        queue.destroy()
    assert {call for call, _ in points.passed} <= {*catalogue()}
    for call, phase in points.passed:
        assert points.passed[call, phase] == points.passed[call, "before"]
    assert points.passed["push", "sent"] == 3
    assert points.passed["finish", "after"] == 1
    assert points.passed["HGET", "after"] == 3  # one of them by the first call


def test_a_call_that_is_refused_was_answered(redis_url: str, redis_client: redis.Redis) -> None:
    points = Failpoints.record()
    with TaskQueue(points.client(redis_url)) as queue:
        redis_client.set(queue.keys["tasks"].decode(), "text")
        with pytest.raises(Exception, match="another program has written here"):
            queue.push(make_task())
        redis_client.flushdb()
    assert points.passed["push", "after"] == points.passed["push", "sent"] > 0


DYING = """
import sys
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from faults.failpoints import Failpoints

url, call, phase, nth = sys.argv[1:]
queue = TaskQueue(Failpoints.kill_at(call, phase, int(nth)).client(url))
for n in range(3):
    print("try", flush=True)
    queue.push(Task.create(user_id="alice", task_id=f"t{n}"))
    print("told", flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("phase", "stored"), [("before", 1), ("sent", 2), ("after", 2)])
def test_a_process_dies_where_it_is_told_to(
    spawn: Spawn, queue: TaskQueue, redis_url: str, phase: str, stored: int
) -> None:
    load_scripts(redis_url)  # so that each push is one call
    process = spawn(DYING, redis_url, "push", phase, "2")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert said.split() == ["try", "told", "try"]
    assert queue.size() == stored


# --- the judge ------------------------------------------------------------------------------------

PLAIN = Tour(name="plain", play=lambda stage: None)


def lines(*entries: Any) -> Journal:
    return Journal.read(b"".join(json.dumps(each).encode() + b"\n" for each in entries))


def pushed(*task_ids: str, told: bool = True) -> list[Any]:
    """A push as a process notes it, which was told that all went well, or died."""
    tasks = [{"user_id": "alice", "task_id": task_id} for task_id in task_ids]
    return [["try", 1, {"tasks": tasks}], *([["ok", 1, {}]] if told else [])]


@pytest.fixture
def left(redis_client: redis.Redis) -> TaskQueue:
    """What a process left, which the judge deletes."""
    return TaskQueue(redis_client, "left", clock=ManualClock(START_S))


@pytest.fixture
def verdict_on(left: TaskQueue, redis_client: redis.Redis) -> Callable[..., Verdict]:
    def decide(*entries: Any, repeat: bool = False) -> Verdict:
        return judge(redis_client, left.name, lines(*entries), PLAIN, repeat=repeat)

    return decide


def test_what_is_as_it_was_noted_is_right(
    left: TaskQueue, verdict_on: Callable[..., Verdict], redis_client: redis.Redis
) -> None:
    left.push_many(make_task(task_id=each) for each in ("t1", "t2"))
    assert verdict_on(*pushed("t1", "t2")).by_kind() == {}
    assert redis_client.keys("*left*") == []


@pytest.mark.parametrize("stored", [(), ("t1", "t2")])
@pytest.mark.parametrize("repeat", [False, True])
def test_what_nobody_was_told_of_may_be_there_or_not(
    left: TaskQueue, verdict_on: Callable[..., Verdict], stored: tuple[str, ...], repeat: bool
) -> None:
    left.push_many(make_task(task_id=each) for each in stored)
    assert verdict_on(*pushed("t1", "t2", told=False), repeat=repeat).by_kind() == {}


def test_a_missing_task_is_lost(left: TaskQueue, verdict_on: Callable[..., Verdict]) -> None:
    left.push(make_task(task_id="t1"))
    assert verdict_on(*pushed("t1", "t2")).by_kind() == {"lost": ["task 't2' is gone"]}


def test_an_endless_task_is_lost(left: TaskQueue, verdict_on: Callable[..., Verdict]) -> None:
    left.push(make_task(task_id="t1", delay=1e6))
    assert verdict_on(*pushed("t1")).by_kind() == {"lost": ["task 't1' is still delayed"]}


def test_an_unpushed_task_is_found(left: TaskQueue, verdict_on: Callable[..., Verdict]) -> None:
    left.push_many(make_task(task_id=each) for each in ("t1", "t2"))
    assert verdict_on(*pushed("t1")).unexpected == ["task 't2' was never pushed, or was dropped"]


def test_a_refused_task_is_found(left: TaskQueue, verdict_on: Callable[..., Verdict]) -> None:
    left.push(make_task(task_id="t1"))
    found = verdict_on(*pushed("t1", told=False), ["refused", 1])
    assert found.unexpected == ["task 't1' was never pushed, or was dropped"]


def test_a_task_that_was_stored_twice_is_duplicated(
    left: TaskQueue, verdict_on: Callable[..., Verdict], redis_client: redis.Redis
) -> None:
    left.push(make_task(task_id="t1"))
    redis_client.hincrby(left.keys["fair"].decode(), "seq", 1)
    assert verdict_on(*pushed("t1")).duplicated == ["2 tasks were stored, and 1 + 0 are known"]


def test_half_a_pair_is_inconsistent(left: TaskQueue, verdict_on: Callable[..., Verdict]) -> None:
    left.push(make_task(task_id="t1"))
    found = verdict_on(*pushed("t1", "t2", told=False))
    assert found.by_kind() == {"inconsistent": ["1 of 2 were stored: ['t1', 't2']"]}


def test_a_second_completion_is_found(left: TaskQueue, verdict_on: Callable[..., Verdict]) -> None:
    left.push(make_task(task_id="t1"))
    end = {"t1": {"state": "finished", "result": {"by": "tour"}}}
    found = verdict_on(*pushed("t1"), ["try", 2, {}], ["ok", 2, {"ended": end}])
    (text,) = found.double_completions
    assert text.endswith("and is finished, {'by': 'heir'}")


def test_an_end_that_was_counted_twice_is_a_second_completion(
    left: TaskQueue, verdict_on: Callable[..., Verdict], redis_client: redis.Redis
) -> None:
    left.push(make_task(task_id="t1"))
    redis_client.hincrby(left.keys["stats"].decode(), "finished", 1)
    assert verdict_on(*pushed("t1")).double_completions == [
        "2 ends were counted, of {'finished': 1} tasks and 0 dropped ones"
    ]


def test_records_that_do_not_agree_are_inconsistent(
    left: TaskQueue, verdict_on: Callable[..., Verdict], redis_client: redis.Redis
) -> None:
    fill(left, "alice", 2)
    redis_client.zrem(left.keys["waiting"].decode(), "alice-0")
    found = verdict_on(*pushed("alice-0", "alice-1"))
    assert found.inconsistent[0].startswith("when it died, records: status")


@pytest.mark.parametrize("told", [False, True])
def test_a_change_of_settings_is_there_wholly_or_not_at_all(
    left: TaskQueue, verdict_on: Callable[..., Verdict], told: bool
) -> None:
    left.set_user("alice", weight=2.0)
    before, after = {"weight": 1.0, "rate": None}, {"weight": 2.0, "rate": 5.0}
    trying = ["try", 1, {"sets": {"user/alice": [before, after]}}]
    found = verdict_on(trying, *([["ok", 1, {}]] if told else []))
    (text,) = found.inconsistent
    assert text.startswith("user/alice is ")


ADDED = {"sets": {"schedule/s1": [None, {"user_id": "alice"}]}}
REMOVED = {"sets": {"schedule/s1": [{"user_id": "alice"}, None]}}


def test_an_acknowledged_schedule_that_is_gone_is_lost(verdict_on: Callable[..., Verdict]) -> None:
    found = verdict_on(["try", 1, ADDED], ["ok", 1, {}])
    assert found.by_kind() == {"lost": ["schedule/s1 is None, not {'user_id': 'alice'}"]}


def scheduled(left: TaskQueue) -> None:
    TaskScheduler(left, "maker").add_schedule(every=20, user_id="alice", schedule_id="s1")


def test_a_leftover_schedule_is_found(left: TaskQueue, verdict_on: Callable[..., Verdict]) -> None:
    scheduled(left)
    found = verdict_on(["try", 1, ADDED], ["ok", 1, {}], ["try", 2, REMOVED], ["ok", 2, {}])
    assert len(found.unexpected) == 1


def test_each_moment_is_accounted_for(left: TaskQueue, verdict_on: Callable[..., Verdict]) -> None:
    scheduled(left)
    assert verdict_on(["try", 1, ADDED], ["ok", 1, {}]).by_kind() == {}


def test_a_moment_that_nobody_fires_is_lost(
    left: TaskQueue, verdict_on: Callable[..., Verdict], redis_client: redis.Redis
) -> None:
    scheduled(left)
    redis_client.zadd(left.keys["due"].decode(), {"s1": START_S * 1000 + 1e9})
    found = verdict_on(["try", 1, ADDED], ["ok", 1, {}])
    assert found.lost[0].endswith("of schedule 's1' is planned")


def test_a_moment_that_is_counted_twice_is_duplicated(
    left: TaskQueue, verdict_on: Callable[..., Verdict], redis_client: redis.Redis
) -> None:
    scheduled(left)
    key = left.keys["schedule_state"].decode()
    state = json.loads(redis_client.hget(key, "s1") or "{}")
    redis_client.hset(key, "s1", json.dumps(state | {"runs": 1}))
    found = verdict_on(["try", 1, ADDED], ["ok", 1, {}])
    assert found.duplicated == ["schedule 's1' counts 5 runs, and 4 were fired"]


def test_a_trigger_of_which_nothing_came_is_lost(
    left: TaskQueue, verdict_on: Callable[..., Verdict]
) -> None:
    scheduled(left)
    triggering = ["try", 2, {"triggers": ["s1"]}]
    found = verdict_on(["try", 1, ADDED], ["ok", 1, {}], triggering, ["ok", 2, {}])
    assert found.by_kind() == {"lost": ["schedule 's1' was triggered 0 times, not 1 to 1"]}


def test_a_queue_that_is_half_destroyed_is_inconsistent(
    left: TaskQueue, verdict_on: Callable[..., Verdict], redis_client: redis.Redis
) -> None:
    other = TaskQueue(redis_client, "other", clock=ManualClock(START_S))
    other.push(make_task())
    found = verdict_on(["try", 1, {"destroys": ["other", 99]}])
    assert len(found.inconsistent) == 1


def test_a_line_that_is_not_whole_was_not_written() -> None:
    text = b'["try", 1, {"tasks": [{"task_id": "t1"}]}]\n["ok", 1'
    journal = Journal.read(text)
    assert journal.acknowledged == set()
    assert journal.tasks.keys() == {"t1"}


def test_each_tour_has_a_sentence_that_says_what_it_does() -> None:
    assert [tour.name for tour in TOURS.values() if not tour.play.__doc__] == []
