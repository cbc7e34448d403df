"""Why a task waits: the reasons, which of them binds, and the sentences that tell of it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue import Task, TaskQueue, TaskScheduler
from fairqueue.errors import ConfigurationError, InvalidInput
from fairqueue.inspection import Inspector
from fairqueue.models import Explanation, UserSettings
from fairqueue.queue.workers import WorkerStore
from fairqueue.reasons import distance, sentence, when

START = datetime(2026, 11, 18, 0, 7, tzinfo=UTC)


def explain(world: World, task_id: str) -> Explanation:
    found = world.queue.explain(task_id)
    assert found is not None
    assert found.summary == " ".join(reason.text for reason in found.reasons)
    return found


def codes(world: World, task_id: str) -> list[str]:
    return [reason.code for reason in explain(world, task_id).reasons]


def values(world: World, task_id: str, code: str) -> dict[str, Any]:
    (found,) = (each.values for each in explain(world, task_id).reasons if each.code == code)
    return found


# --- workers --------------------------------------------------------------------------------------


def test_with_no_worker_alive_that_is_the_reason(world: World) -> None:
    world.push("a", user_id="alice")
    assert codes(world, "a") == ["no_worker"]
    assert explain(world, "a").summary == ("No worker is alive, so no task can start.")
    world.beat("w1")
    assert codes(world, "a") == ["turn"]
    assert explain(world, "a").summary == "It is next: the first worker with a free slot takes it."
    world.advance(60)  # without another heartbeat
    assert codes(world, "a") == ["no_worker"]
    world.beat("w1")
    WorkerStore(world.queue.link).leave("w1")
    assert codes(world, "a") == ["no_worker"]


def test_draining_workers_take_nothing(world: World) -> None:
    world.push("a", name="mail")
    world.beat("w1", ["mail"])
    WorkerStore(world.queue.link).drain("w1", "ann")
    assert codes(world, "a") == ["no_worker"]
    assert values(world, "a", "no_worker") == {"draining": 1}
    assert "all live workers (1) are draining" in explain(world, "a").summary
    world.beat("w2", ["report"])
    assert codes(world, "a") == ["no_handler"]


def test_that_no_worker_knows_the_name_is_the_reason(world: World) -> None:
    world.push("a", name="mail")
    world.beat("w1", ["report"])
    assert values(world, "a", "no_handler") == {"name": "mail", "workers": 1}
    world.beat("w2", ["paint"])
    assert explain(world, "a").summary == (
        "None of the 2 workers that take tasks has a handler for 'mail'."
    )
    world.beat("w3", ["paint", "mail"])
    assert codes(world, "a") == ["turn"]
    WorkerStore(world.queue.link).leave("w3")
    world.beat("w4", ["*"])
    assert codes(world, "a") == ["turn"]


def test_whoever_claims_without_heartbeats_counts_while_it_holds_a_lease(world: World) -> None:
    world.push("a", "b")
    claim = world.claim_one(lease=30)
    assert codes(world, "b") == ["turn"]
    world.advance(31)
    assert codes(world, "b") == ["no_worker"]
    assert claim.task.task_id == "a"


# --- time -----------------------------------------------------------------------------------------


def test_a_delayed_task_says_when_it_starts(world: World) -> None:
    world.beat()
    world.push("a", delay=55 * 60)
    assert codes(world, "a") == ["delayed"]
    until = world.now() + timedelta(minutes=55)
    assert values(world, "a", "delayed") == {"until": until}
    assert explain(world, "a").summary == f"Starts at {when(until, world.now())}."
    assert "(in 55 min)" in explain(world, "a").summary
    world.advance(55 * 60 + 30)
    world.beat()
    assert codes(world, "a") == ["due"]


def test_a_delayed_task_says_what_else_is_in_its_way(world: World) -> None:
    world.push("a", user_id="alice", delay=60)
    world.queue.pause_user("alice", note="unpaid")
    assert codes(world, "a") == ["delayed", "user_paused", "no_worker"]


def test_a_retry_tells_its_error_and_when_it_is(world: World) -> None:
    world.beat()
    world.queue.push(Task.create(user_id="alice", task_id="a", retries=3))
    world.queue.retry(
        world.claim_one(), "ConnectionError: the partner is away.\nand more", delay=60
    )
    until = world.now() + timedelta(seconds=60)
    assert values(world, "a", "retry") == {
        "attempt": 1,
        "attempts": 4,
        "error": "ConnectionError: the partner is away",
        "until": until,
    }
    assert explain(world, "a").summary == (
        "Attempt 1 of 4 failed: ConnectionError: the partner is away. "
        f"The next attempt starts at {when(until, world.now())}."
    )
    world.queue.reschedule("a")  # it waits for a worker now, and the error is still worth knowing
    assert codes(world, "a") == ["turn", "retry"]
    world.push("b", user_id="bob")
    world.queue.claim("w", limit=1)
    world.queue.claim("w", limit=1)


def test_a_retry_of_a_task_without_a_policy_does_not_guess_how_many_there_are(world: World) -> None:
    world.beat()
    world.push("a")
    world.queue.retry(world.claim_one(), "broken", delay=60)
    assert explain(world, "a").summary.startswith("Attempt 1 failed: broken. The next attempt")


def test_a_buffered_run_says_what_it_waits_for(world: World) -> None:
    scheduler = TaskScheduler(world.queue, registry=CollectorRegistry())
    scheduler.add_schedule("* * * * *", "alice", schedule_id="s", overlap="buffer_one")
    for _ in range(2):
        world.advance(60)
        scheduler.tick()
        world.queue.claim("w", lease=600)
    (task_id,) = (
        run.task_id for run in Inspector(world.queue).runs.list(("pending",), schedule_id="s")
    )
    world.beat()
    assert codes(world, task_id) == ["buffered"]
    assert values(world, task_id, "buffered") == {"schedule": "s"}
    scheduler.stop()


# --- users ----------------------------------------------------------------------------------------


def test_a_pause_says_who_when_why_and_until_when(world: World) -> None:
    world.beat()
    world.push("a", "b", user_id="alice")
    paused_at, until = world.now(), world.now() + timedelta(hours=1)
    settings = world.queue.pause_user("alice", note="invoice 7 is open", by="ann", until=until)
    assert settings == UserSettings(
        paused=True,
        paused_at=paused_at,
        paused_by="ann",
        pause_note="invoice 7 is open",
        paused_until=until,
    )
    assert world.queue.get_user("alice") == settings
    world.advance(600)
    world.beat()
    assert codes(world, "b") == ["user_paused", "own_tasks"]
    assert values(world, "b", "user_paused") == {
        "user": "alice",
        "by": "ann",
        "since": paused_at,
        "until": until,
        "note": "invoice 7 is open",
    }
    assert explain(world, "a").summary == (
        f"User 'alice' is paused by ann since {when(paused_at, world.now())} until "
        f"{when(until, world.now())}: invoice 7 is open."
    )
    assert world.queue.resume_user("alice") == UserSettings()
    assert codes(world, "a") == ["turn"]


def test_a_pause_with_an_end_ends_by_itself(world: World) -> None:
    world.push("a", user_id="alice")
    world.queue.set_user("alice", weight=2, paused=True, until=world.now() + timedelta(seconds=60))
    assert world.queue.claim("w") == []
    world.advance(59.9)
    assert world.queue.claim("w") == []
    assert world.queue.get_user("alice").paused
    world.advance(0.1)
    assert world.queue.get_user("alice") == UserSettings(weight=2)
    assert [claim.task.task_id for claim in world.queue.claim("w")] == ["a"]
    world.push("b", user_id="alice")  # one who is not parked yet is not parked any more
    assert [claim.task.task_id for claim in world.queue.claim("w")] == ["b"]
    assert world.queue.set_user("alice", weight=3) == UserSettings(weight=3)
    assert b"paused" not in (world.redis.hget(world.keys["users"], "alice") or b"")


def test_a_claim_that_waits_hears_of_the_end_of_a_pause(world: World) -> None:
    world.push("a", user_id="alice")
    world.queue.pause_user("alice", until=world.now() + timedelta(seconds=3))
    _, _, hint = world.queue.finish_and_claim([], "w", 1)
    assert hint == 3.0


def test_a_second_pause_keeps_the_beginning_and_takes_the_new_note(world: World) -> None:
    began = world.now()
    world.queue.pause_user("alice", note="first", by="ann", until=began + timedelta(hours=1))
    world.advance(60)
    settings = world.queue.pause_user("alice", note="second", by="bob")
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


def test_caps_and_rates_of_users_are_reasons(world: World) -> None:
    world.beat()
    world.queue.set_user("capped", max_running=1)
    world.fill("capped", 3)
    world.claim_one()
    assert codes(world, "capped-2") == ["user_capped", "own_tasks"]
    world.queue.set_user("rated", rate=0.5)
    world.fill("rated", 2)
    world.claim_one()
    assert values(world, "rated-1", "user_rate") == {
        "user": "rated",
        "rate": 0.5,
        "until": world.now() + timedelta(seconds=2),
    }


def test_limits_of_names_are_reasons_also_before_a_claim_has_met_them(world: World) -> None:
    world.beat()
    world.queue.set_limits("slow", slots=1)
    world.push("a", "b", name="slow")
    world.claim_one()
    assert codes(world, "b") == ["name_slots"]
    assert world.queue.claim("w") == []  # sets it aside
    assert codes(world, "b") == ["name_slots"]
    world.queue.set_limits("slow", slots=2)
    assert codes(world, "b") == ["set_aside"]


@pytest.mark.parametrize(("rate", "seconds"), [(0.5, 2), (1, 1), (4, 0.25)])
def test_the_rate_of_a_name_is_a_reason_to_wait(world: World, rate: float, seconds: float) -> None:
    world.beat()
    world.queue.set_limits("slow", rate=rate)
    world.push("a", "b", name="slow")
    world.claim_one()
    until = world.now() + timedelta(seconds=seconds)
    assert values(world, "b", "name_rate") == {"name": "slow", "rate": rate, "until": until}


def test_users_and_critical_tasks_that_go_first_are_told(world: World) -> None:
    world.beat()
    world.fill("alice", 3)
    world.push("b", user_id="bob")
    world.push("urgent", user_id="carol", priority=6)
    assert codes(world, "b") == ["critical", "turn"]
    assert values(world, "b", "critical") == {"users": 1}
    assert codes(world, "urgent") == ["turn"]
    assert explain(world, "alice-2").summary.endswith("2 earlier tasks of 'alice'.")


# --- those that do not wait -----------------------------------------------------------------------


def test_running_and_ended_tasks_say_so(world: World) -> None:
    world.push("a", "b", "c", "d")
    one = world.claim_one(lease=30)
    assert values(world, "a", "running") == {
        "worker": "w",
        "since": world.now(),
        "until": world.now() + timedelta(seconds=30),
        "attempt": 1,
    }
    world.queue.cancel("a")
    assert codes(world, "a") == ["running", "cancelling"]
    world.queue.finish(one)
    world.queue.finish(world.claim_one())
    world.queue.bury(world.claim_one(), "broken")
    world.queue.cancel("d")
    assert [codes(world, each) for each in "abcd"] == [
        ["cancelled"],
        ["succeeded"],
        ["failed"],
        ["cancelled"],
    ]
    assert explain(world, "c").summary == f"It failed at {when(world.now(), world.now())}: broken."
    assert world.queue.explain("nobody") is None


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


def test_names_of_users_are_values_and_not_templates(world: World) -> None:
    world.push("a", user_id="{0.__class__}")
    world.queue.pause_user("{0.__class__}", note="{note.__class__}")
    assert "User '{0.__class__}' is paused" in explain(world, "a").summary
    assert sentence("user_paused", {"user": "{x}", "note": "{y}"}, str) == (
        "User '{x}' is paused: {y}."
    )
