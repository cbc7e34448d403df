"""Why a task waits: the reasons, which of them binds, and the sentences that tell of it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry
from support import beat, claim_one, fill, push

from fairqueue import Task, TaskQueue, TaskScheduler
from fairqueue.clock import ManualClock
from fairqueue.errors import ConfigurationError, InvalidInput
from fairqueue.inspection import Inspector
from fairqueue.models import Explanation, UserSettings
from fairqueue.queue.workers import WorkerStore
from fairqueue.reasons import distance, sentence, when

START = datetime(2026, 11, 18, 0, 7, tzinfo=UTC)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


def explain(queue: TaskQueue, task_id: str) -> Explanation:
    found = queue.explain(task_id)
    assert found is not None
    assert found.summary == " ".join(reason.text for reason in found.reasons)
    return found


def codes(queue: TaskQueue, task_id: str) -> list[str]:
    return [reason.code for reason in explain(queue, task_id).reasons]


def values(queue: TaskQueue, task_id: str, code: str) -> dict[str, Any]:
    (found,) = (each.values for each in explain(queue, task_id).reasons if each.code == code)
    return found


# --- workers --------------------------------------------------------------------------------------


def test_with_no_worker_alive_that_is_the_reason(queue: TaskQueue, clock: ManualClock) -> None:
    push(queue, "a", user_id="alice")
    assert codes(queue, "a") == ["no_worker"]
    assert explain(queue, "a").summary == (
        "No worker is alive, so nothing takes tasks from this queue."
    )
    beat(queue, "w1")
    assert codes(queue, "a") == ["turn"]
    assert explain(queue, "a").summary == "It is next: the first worker with a free slot takes it."
    clock.advance(60)  # without another heartbeat
    assert codes(queue, "a") == ["no_worker"]
    beat(queue, "w1")
    WorkerStore(queue.link).leave("w1")
    assert codes(queue, "a") == ["no_worker"]


def test_draining_workers_take_nothing(queue: TaskQueue) -> None:
    push(queue, "a", name="mail")
    beat(queue, "w1", ["mail"])
    WorkerStore(queue.link).drain("w1", "ann")
    assert codes(queue, "a") == ["no_worker"]
    assert values(queue, "a", "no_worker") == {"draining": 1}
    assert "all that are alive (1) are draining" in explain(queue, "a").summary
    beat(queue, "w2", ["report"])
    assert codes(queue, "a") == ["no_handler"]


def test_that_no_worker_knows_the_name_is_the_reason(queue: TaskQueue) -> None:
    push(queue, "a", name="mail")
    beat(queue, "w1", ["report"])
    assert values(queue, "a", "no_handler") == {"name": "mail", "workers": 1}
    beat(queue, "w2", ["paint"])
    assert explain(queue, "a").summary == (
        "None of the 2 workers that take tasks has a handler for 'mail'."
    )
    beat(queue, "w3", ["paint", "mail"])
    assert codes(queue, "a") == ["turn"]
    WorkerStore(queue.link).leave("w3")
    beat(queue, "w4", ["*"])
    assert codes(queue, "a") == ["turn"]


def test_whoever_claims_without_heartbeats_counts_while_it_holds_a_lease(
    queue: TaskQueue, clock: ManualClock
) -> None:
    push(queue, "a", "b")
    claim = claim_one(queue, lease=30)
    assert codes(queue, "b") == ["turn"]
    clock.advance(31)
    assert codes(queue, "b") == ["no_worker"]
    assert claim.task.task_id == "a"


# --- time -----------------------------------------------------------------------------------------


def test_a_delayed_task_says_when_it_starts(queue: TaskQueue, clock: ManualClock) -> None:
    beat(queue)
    push(queue, "a", delay=55 * 60)
    assert codes(queue, "a") == ["delayed"]
    until = clock.now() + timedelta(minutes=55)
    assert values(queue, "a", "delayed") == {"until": until}
    assert explain(queue, "a").summary == f"Starts at {when(until, clock.now())}."
    assert "(in 55 min)" in explain(queue, "a").summary
    clock.advance(55 * 60 + 30)
    beat(queue)
    assert codes(queue, "a") == ["due"]


def test_a_delayed_task_says_what_else_is_in_its_way(queue: TaskQueue) -> None:
    push(queue, "a", user_id="alice", delay=60)
    queue.pause_user("alice", note="unpaid")
    assert codes(queue, "a") == ["delayed", "user_paused", "no_worker"]


def test_a_retry_tells_its_error_and_when_it_is(queue: TaskQueue, clock: ManualClock) -> None:
    beat(queue)
    queue.push(Task.create(user_id="alice", task_id="a", retries=3))
    queue.retry(claim_one(queue), "ConnectionError: the partner is away.\nand more", delay=60)
    until = clock.now() + timedelta(seconds=60)
    assert values(queue, "a", "retry") == {
        "attempt": 1,
        "attempts": 4,
        "error": "ConnectionError: the partner is away",
        "until": until,
    }
    assert explain(queue, "a").summary == (
        "Attempt 1 of 4 failed: ConnectionError: the partner is away. "
        f"The next attempt starts at {when(until, clock.now())}."
    )
    queue.reschedule("a")  # it waits for a worker now, and the error is still worth knowing
    assert codes(queue, "a") == ["turn", "retry"]
    push(queue, "b", user_id="bob")
    queue.claim("w", limit=1)
    queue.claim("w", limit=1)


def test_a_retry_of_a_task_without_a_policy_does_not_guess_how_many_there_are(
    queue: TaskQueue,
) -> None:
    beat(queue)
    push(queue, "a")
    queue.retry(claim_one(queue), "broken", delay=60)
    assert explain(queue, "a").summary.startswith("Attempt 1 failed: broken. The next attempt")


def test_a_buffered_run_says_what_it_waits_for(queue: TaskQueue, clock: ManualClock) -> None:
    scheduler = TaskScheduler(queue, registry=CollectorRegistry())
    scheduler.add_schedule("* * * * *", "alice", schedule_id="s", overlap="buffer_one")
    for _ in range(2):
        clock.advance(60)
        scheduler.tick()
        queue.claim("w", lease=600)
    (task_id,) = (run.task_id for run in Inspector(queue).runs.list(("pending",), schedule_id="s"))
    beat(queue)
    assert codes(queue, task_id) == ["buffered"]
    assert values(queue, task_id, "buffered") == {"schedule": "s"}
    scheduler.stop()


# --- users ----------------------------------------------------------------------------------------


def test_a_pause_says_who_when_why_and_until_when(queue: TaskQueue, clock: ManualClock) -> None:
    beat(queue)
    push(queue, "a", "b", user_id="alice")
    paused_at, until = clock.now(), clock.now() + timedelta(hours=1)
    settings = queue.pause_user("alice", note="invoice 7 is open", by="ann", until=until)
    assert settings == UserSettings(
        paused=True,
        paused_at=paused_at,
        paused_by="ann",
        pause_note="invoice 7 is open",
        paused_until=until,
    )
    assert queue.get_user("alice") == settings
    clock.advance(600)
    beat(queue)
    assert codes(queue, "b") == ["user_paused", "own_tasks"]
    assert values(queue, "b", "user_paused") == {
        "user": "alice",
        "by": "ann",
        "since": paused_at,
        "until": until,
        "note": "invoice 7 is open",
    }
    assert explain(queue, "a").summary == (
        f"User 'alice' is paused by ann since {when(paused_at, clock.now())} until "
        f"{when(until, clock.now())}: invoice 7 is open."
    )
    assert queue.resume_user("alice") == UserSettings()
    assert codes(queue, "a") == ["turn"]


def test_a_pause_with_an_end_ends_by_itself(
    queue: TaskQueue, clock: ManualClock, redis_client: redis.Redis
) -> None:
    push(queue, "a", user_id="alice")
    queue.set_user("alice", weight=2, paused=True, until=clock.now() + timedelta(seconds=60))
    assert queue.claim("w") == []
    clock.advance(59.9)
    assert queue.claim("w") == []
    assert queue.get_user("alice").paused
    clock.advance(0.1)
    assert queue.get_user("alice") == UserSettings(weight=2)
    assert [claim.task.task_id for claim in queue.claim("w")] == ["a"]
    push(queue, "b", user_id="alice")  # one who is not parked yet is not parked any more
    assert [claim.task.task_id for claim in queue.claim("w")] == ["b"]
    assert queue.set_user("alice", weight=3) == UserSettings(weight=3)
    assert b"paused" not in (redis_client.hget(queue.keys["users"], "alice") or b"")


def test_a_claim_that_waits_hears_of_the_end_of_a_pause(
    queue: TaskQueue, clock: ManualClock
) -> None:
    push(queue, "a", user_id="alice")
    queue.pause_user("alice", until=clock.now() + timedelta(seconds=3))
    _, _, hint = queue.finish_and_claim([], "w", 1)
    assert hint == 3.0


def test_a_second_pause_keeps_the_beginning_and_takes_the_new_note(
    queue: TaskQueue, clock: ManualClock
) -> None:
    began = clock.now()
    queue.pause_user("alice", note="first", by="ann", until=began + timedelta(hours=1))
    clock.advance(60)
    settings = queue.pause_user("alice", note="second", by="bob")
    assert (settings.paused_at, settings.paused_by) == (began, "bob")
    assert (settings.pause_note, settings.paused_until) == ("second", None)


@pytest.mark.parametrize(
    "given",
    [
        {"paused": False, "note": "why"},
        {"by": "ann"},
        {"paused": True, "note": "x" * 1001},
        {"paused": True, "note": 7},
        {"paused": True, "by": ""},
        {"paused": True, "until": START},
        {"paused": True, "until": "tomorrow"},
        {"paused": True, "until": datetime(2030, 1, 1)},
    ],
)
def test_a_pause_that_cannot_be_is_refused(queue: TaskQueue, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        queue.set_user("alice", **given)
    assert queue.get_user("alice") == UserSettings()


def test_the_error_names_what_was_given(queue: TaskQueue) -> None:
    with pytest.raises(ConfigurationError, match=r"until 2026-11-18T00:07:00.* is in the past"):
        queue.pause_user("alice", until=START)


def test_caps_and_rates_of_users_are_reasons(queue: TaskQueue, clock: ManualClock) -> None:
    beat(queue)
    queue.set_user("capped", max_running=1)
    fill(queue, "capped", 3)
    claim_one(queue)
    assert codes(queue, "capped-2") == ["user_capped", "own_tasks"]
    queue.set_user("rated", rate=0.5)
    fill(queue, "rated", 2)
    claim_one(queue)
    assert values(queue, "rated-1", "user_rate") == {
        "user": "rated",
        "rate": 0.5,
        "until": clock.now() + timedelta(seconds=2),
    }


def test_limits_of_names_are_reasons_also_before_a_claim_has_met_them(queue: TaskQueue) -> None:
    beat(queue)
    queue.set_limits("slow", slots=1)
    push(queue, "a", "b", name="slow")
    claim_one(queue)
    assert codes(queue, "b") == ["name_slots"]
    assert queue.claim("w") == []  # sets it aside
    assert codes(queue, "b") == ["name_slots"]
    queue.set_limits("slow", slots=2)
    assert codes(queue, "b") == ["set_aside"]


@pytest.mark.parametrize(("rate", "seconds"), [(0.5, 2), (1, 1), (4, 0.25)])
def test_the_rate_of_a_name_is_a_reason_until_the_next_run_may_begin(
    queue: TaskQueue, clock: ManualClock, rate: float, seconds: float
) -> None:
    beat(queue)
    queue.set_limits("slow", rate=rate)
    push(queue, "a", "b", name="slow")
    claim_one(queue)
    until = clock.now() + timedelta(seconds=seconds)
    assert values(queue, "b", "name_rate") == {"name": "slow", "rate": rate, "until": until}


def test_users_and_critical_tasks_that_go_first_are_told(queue: TaskQueue) -> None:
    beat(queue)
    fill(queue, "alice", 3)
    push(queue, "b", user_id="bob")
    push(queue, "urgent", user_id="carol", priority=6)
    assert codes(queue, "b") == ["critical", "turn"]
    assert values(queue, "b", "critical") == {"users": 1}
    assert codes(queue, "urgent") == ["turn"]
    assert explain(queue, "alice-2").summary.endswith("2 earlier tasks of 'alice'.")


# --- those that do not wait -----------------------------------------------------------------------


def test_running_and_ended_tasks_say_so(queue: TaskQueue, clock: ManualClock) -> None:
    push(queue, "a", "b", "c", "d")
    one = claim_one(queue, lease=30)
    assert values(queue, "a", "running") == {
        "worker": "w",
        "since": clock.now(),
        "until": clock.now() + timedelta(seconds=30),
        "attempt": 1,
    }
    queue.cancel("a")
    assert codes(queue, "a") == ["running", "cancelling"]
    queue.finish(one)
    queue.finish(claim_one(queue))
    queue.bury(claim_one(queue), "broken")
    queue.cancel("d")
    assert [codes(queue, each) for each in "abcd"] == [
        ["cancelled"],
        ["succeeded"],
        ["failed"],
        ["cancelled"],
    ]
    assert explain(queue, "c").summary == f"It failed at {when(clock.now(), clock.now())}: broken."
    assert queue.explain("nobody") is None


# --- sentences ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.4, "now"),
        (-0.99, "now"),
        (1, "in 1 s"),
        (-1, "1 s ago"),
        (12, "in 12 s"),
        (59.4, "in 59 s"),
        (60, "in 1 min"),
        (125, "in 2 min 5 s"),
        (3300, "in 55 min"),
        (3325, "in 55 min"),
        (7500, "in 2 h 5 min"),
        (-7500, "2 h 5 min ago"),
        (90_000, "in 1 d 1 h"),
        (86_400 * 400, "in 400 d"),
    ],
)
def test_a_distance_is_told_in_the_units_that_matter(seconds: float, said: str) -> None:
    assert distance(timedelta(seconds=seconds)) == said


def test_a_moment_has_its_day_where_that_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now = START.astimezone()
    assert when(START, now).endswith("(now)")
    assert when(START, now)[2] == ":"
    later = START + timedelta(days=2)
    assert when(later, now).startswith(f"{later.astimezone():%-d %b} ")
    assert str(later.year + 1) in when(later + timedelta(days=366), now)


def test_names_of_users_are_values_and_not_templates(queue: TaskQueue) -> None:
    push(queue, "a", user_id="{0.__class__}")
    queue.pause_user("{0.__class__}", note="{note.__class__}")
    assert "User '{0.__class__}' is paused" in explain(queue, "a").summary
    assert sentence("user_paused", {"user": "{x}", "note": "{y}"}, str) == (
        "User '{x}' is paused: {y}."
    )
