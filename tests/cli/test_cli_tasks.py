"""`fairqueue tasks`, `runs`, `failed` and `users`: each command, its JSON, and how it fails."""

import json

import pytest
from helpers.commands import Cli
from helpers.tasks import claim_one, fill, push

from fairqueue.cli.bulk import DONE
from fairqueue.history.runs import History
from fairqueue.inspection.documents import document
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Report
from fairqueue.worker.worker import Worker


@pytest.fixture
def cli(redis_url: str, live: TaskQueue) -> Cli:
    return Cli(redis_url)


def bury(queue: TaskQueue, *task_ids: str, error: str = "broken", user_id: str = "alice") -> None:
    """Push tasks, and have each fail for good."""
    for task_id in task_ids:
        push(queue, task_id, user_id=user_id, payload={"n": 1, "password": "hush"})
        queue.bury(claim_one(queue), error)


# --- tasks ----------------------------------------------------------------------------------------


def test_push_stores_a_task_and_prints_its_id(cli: Cli, live: TaskQueue) -> None:
    done = cli.ok(
        *("tasks", "push", "--user", "alice", "--name", "mail", "--payload", "n=1"),
        *("--priority", "critical", "--id", "a", "--tenant", "north"),
    )
    assert done.out == "a\n"
    claim = claim_one(live)
    task = claim.task
    assert (task.task_id, task.name, task.payload) == ("a", "mail", {"n": 1})
    assert (task.priority, task.tenant) == (6, "north")
    live.finish(claim)


def test_pushed_tasks_may_have_a_policy_of_their_own(cli: Cli, live: TaskQueue) -> None:
    cli.ok(
        *("tasks", "push", "--user", "alice", "--max-attempts", "3", "--backoff", "1m"),
        *("--backoff-cap", "1h", "--backoff-multiplier", "3", "--jitter", "full"),
        *("--timeout", "5m"),
    )
    claim = claim_one(live)
    assert claim.task.policy == {
        "max_attempts": 3,
        "backoff": 60.0,
        "backoff_cap": 3600.0,
        "backoff_multiplier": 3.0,
        "jitter": "full",
        "timeout": 300.0,
    }
    live.finish(claim)


def test_pushed_tasks_may_wait(cli: Cli, live: TaskQueue) -> None:
    later = cli.ok("tasks", "push", "--user", "u", "--delay", "2h").out.strip()
    at = cli.ok("tasks", "push", "--user", "u", "--at", "1d").out.strip()
    assert (live.inspect().delayed, live.size()) == (2, 0)
    assert {later, at} == {each["task_id"] for each in cli.json("tasks")["tasks"]}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), 2),
        (("--user", ""), 2),
        (("--user", "u", "--priority", "7"), 2),
        (("--user", "u", "--payload", "nothing"), 2),
        (("--user", "u", "--delay", "2h", "--at", "2h"), 2),
        (("--user", "u", "--delay", "soon"), 2),
        (("--user", "u", "--id", "taken"), 2),
        (("--user", "u", "--retries", "1", "--max-attempts", "2"), 2),
        (("--user", "u", "--backoff", "1m,soon"), 2),
    ],
)
@pytest.mark.one_partition
def test_a_task_that_cannot_be_pushed_is_not_stored(
    cli: Cli, live: TaskQueue, arguments: tuple[str, ...], code: int
) -> None:
    push(live, "taken")
    done = cli.run("tasks", "push", *arguments)
    assert (done.code, done.out, live.size()) == (code, "", 1)


@pytest.mark.one_partition
def test_a_full_queue_is_an_error(cli: Cli, live: TaskQueue) -> None:
    live.configure(max_waiting=1)
    push(live, "a")
    done = cli.run("tasks", "push", "--user", "u")
    assert (done.code, "max_waiting" in done.err) == (1, True)


def test_tasks_are_listed_and_shown(cli: Cli, live: TaskQueue) -> None:
    push(live, "a", payload={"token": "hush"})
    push(live, "b", user_id="bob", name="mail")
    assert [each["task_id"] for each in cli.json("tasks", "--user", "bob")["tasks"]] == ["b"]
    assert [each["task_id"] for each in cli.json("tasks", "--name", "mail")["tasks"]] == ["b"]
    assert cli.json("tasks", "show", "a")["task"]["payload"] == {"token": "***"}
    shown = cli.ok("tasks", "show", "a").out
    assert "pending" in shown
    assert "hush" not in shown
    assert cli.run("tasks", "show", "none").code == 4


def test_explain_says_why_a_task_waits(cli: Cli, live: TaskQueue) -> None:
    push(live, "a", "b")
    live.set_user("alice", paused=True)
    said = cli.ok("tasks", "explain", "b").out
    assert "No worker is alive" in said
    assert "User 'alice' is paused" in said
    told = cli.json("tasks", "explain", "b")
    assert [each["code"] for each in told["reasons"]] == [
        *("no_worker", "user_paused", "own_tasks")
    ]
    assert (told["own_tasks_ahead"], told["user_paused"]) == (1, True)
    assert cli.run("tasks", "explain", "none").code == 4


@pytest.mark.parametrize("group", ["tasks", "runs"])
def test_cancel_needs_consent(cli: Cli, live: TaskQueue, group: str) -> None:
    push(live, "done")
    live.finish(claim_one(live))
    push(live, "a", "b")
    assert cli.run(group, "cancel", "a").code == 2
    assert "would cancel 2 tasks" in cli.ok(group, "cancel", "a", "b", "--dry-run").err
    assert live.size() == 2
    cli.ok(group, "cancel", "a", "--yes")
    assert live.size() == 1
    assert cli.run(group, "cancel", "none", "--yes").code == 4
    ended = cli.run(group, "cancel", "b", "done", "--yes")
    assert (ended.code, "'done' has already ended" in ended.err, live.size()) == (1, True, 0)


def test_reschedule_moves_a_task_that_waits(cli: Cli, live: TaskQueue) -> None:
    push(live, "a")
    assert "task 'a' is due in 2h" in cli.ok("tasks", "reschedule", "a", "--delay", "2h").err
    assert live.inspect().delayed == 1
    assert " UTC" in cli.ok("tasks", "reschedule", "a", "--at", "1d").err
    assert cli.json("tasks", "reschedule", "a") == {"task_id": "a", "rescheduled": True}
    claim = claim_one(live)
    done = cli.run("tasks", "reschedule", "a", "--at", "1d")
    assert (done.code, "is running or has ended" in done.err) == (1, True)
    live.finish(claim)
    assert cli.run("tasks", "reschedule", "none").code == 4


# --- runs -----------------------------------------------------------------------------------------


def test_runs_are_filtered_by_status_user_name_and_time(cli: Cli, live: TaskQueue) -> None:
    bury(live, "bad")
    push(live, "good", user_id="bob", name="mail")
    live.finish(claim_one(live), {"sent": 3})
    push(live, "waits")

    def ids(*arguments: str) -> list[str]:
        return [each["task_id"] for each in cli.json("runs", *arguments)["runs"]]

    assert ids() == ["waits", "good", "bad"]
    assert ids("--status", "failed") == ["bad"]
    assert ids("--status", "failed", "--status", "pending") == ["waits", "bad"]
    assert ids("--user", "bob") == ["good"]
    assert ids("--name", "mail") == ["good"]
    assert ids("--since", "1h") == ["waits", "good", "bad"]
    assert ids("--until", "1h") == []
    assert "succeeded" in cli.ok("runs").out
    assert cli.run("runs", "--status", "odd").code == 2


def test_a_run_is_shown_with_its_attempts(cli: Cli, live: TaskQueue) -> None:
    worker = Worker(live, worker_id="w")

    @worker.task("mail", retries=0)
    def mail(payload: dict[str, object], context: object) -> None:
        context.log("sending \x1b[2J")  # type: ignore[attr-defined]
        raise ValueError("no\x1b[2J server")

    push(live, "a", name="mail", payload={"password": "hush"})
    worker.run_until_empty()
    shown = cli.ok("runs", "show", "a").out
    assert "attempt 1: failed on w" in shown
    assert "ValueError" in shown
    assert "hush" not in shown
    assert "\x1b" not in shown
    document = cli.json("runs", "show", "a")
    assert (document["status"], document["attempts"][0]["error_type"]) == ("failed", "ValueError")
    (line,) = cli.json("runs", "logs", "a")["lines"]
    assert (line["message"], line["attempt"]) == ("sending \x1b[2J", 1)
    assert "sending \\x1b[2J" in cli.ok("runs", "logs", "a").out
    for command in ("show", "logs"):
        assert cli.run("runs", command, "none").code == 4


def test_a_failed_run_is_run_again_also_with_another_payload(cli: Cli, live: TaskQueue) -> None:
    bury(live, "a", "b")
    first = cli.ok("runs", "retry", "a").out.strip()
    assert cli.ok("runs", "retry", "a").out.strip() == first
    cli.ok("runs", "retry", "b", "--payload", "n=2", "--payload", "password=***")
    payloads = [claim.task.payload for claim in live.claim("w", limit=2)]
    assert payloads == [{"n": 1, "password": "hush"}, {"n": 2, "password": "hush"}]
    assert cli.run("runs", "retry", "none").code == 4


# --- failed ---------------------------------------------------------------------------------------


def test_failed_runs_are_listed_grouped_shown_and_exported(cli: Cli, live: TaskQueue) -> None:
    bury(live, "a", "b", error="no server")
    bury(live, "c", error="no\x1b[2J disk", user_id="bob")
    listed = cli.json("failed")["runs"]
    assert [each["task_id"] for each in listed] == ["c", "b", "a"]
    assert "no\\x1b[2J disk" in cli.ok("failed", "--user", "bob").out
    groups = {group["latest"]["user_id"]: group for group in cli.json("failed", "groups")["groups"]}
    assert (groups["alice"]["count"], groups["bob"]["count"]) == (2, 1)
    assert "no server" in cli.ok("failed", "groups").out
    mark = groups["alice"]["fingerprint"]
    assert len(cli.json("failed", "--fingerprint", mark)["runs"]) == 2
    assert cli.json("failed", "show", "a")["error"] == "no server"
    assert "no server" in cli.ok("failed", "show", "a").out
    assert cli.run("failed", "show", "none").code == 4
    exported = cli.ok("failed", "export", "--user", "alice").objects
    assert [each["task_id"] for each in exported] == ["b", "a"]
    assert exported[0]["task"]["payload"] == {"n": 1, "password": "***"}


def test_named_failed_runs_are_retried_or_discarded(cli: Cli, live: TaskQueue) -> None:
    bury(live, "a", "b", "c")
    assert cli.run("failed", "retry", "a", "b").code == 2
    assert "would retry failed run 'a'" in cli.ok("failed", "retry", "a", "--dry-run").err
    assert live.size() == 0
    new_ids = cli.ok("failed", "retry", "a", "b", "--yes").lines
    assert (len(new_ids), live.size()) == (2, 2)
    cli.ok("failed", "discard", "c", "--yes")
    assert History(live).get("c") is None
    assert cli.run("failed", "retry", "none", "--yes").code == 4
    assert cli.run("failed", "discard", "none", "--yes").code == 4
    waiting = new_ids[0]
    done = cli.run("failed", "discard", waiting, "--yes")
    assert (done.code, "is not a failed run" in done.err) == (1, True)


def test_one_failed_run_is_retried_without_being_asked_for(cli: Cli, live: TaskQueue) -> None:
    bury(live, "a", "b")
    (new_id,) = cli.ok("failed", "retry", "a").lines
    assert claim_one(live).task.task_id == new_id
    assert cli.json("failed", "discard", "b", "--yes") == {"action": "discard", "runs": {"b": True}}


@pytest.mark.parametrize(("action", "waiting", "left"), [("retry", 2, 3), ("discard", 0, 1)])
def test_all_failed_runs_that_match_are_counted_tried_and_acted_on(
    cli: Cli, live: TaskQueue, action: str, waiting: int, left: int
) -> None:
    bury(live, "a", "b")
    bury(live, "c", user_id="bob")
    tried = cli.json("failed", action, "--user", "alice", "--dry-run")
    assert (tried["matched"], tried["done"], tried["dry_run"]) == (2, 0, True)
    assert cli.run("failed", action, "--user", "alice").code == 2
    assert (live.size(), live.inspect().dead) == (0, 3)
    done = cli.ok("failed", action, "--user", "alice", "--yes")
    assert f"{DONE[action]} 2 runs" in done.err
    assert (live.size(), live.inspect().dead) == (waiting, left)
    for arguments in ((), ("a", "--all"), ("--all", "--user", "alice")):
        assert cli.run("failed", action, *arguments, "--yes").code == 2


def test_a_queue_that_is_full_leaves_failed_runs_and_says_so(cli: Cli, live: TaskQueue) -> None:
    bury(live, "a", "b", "c")
    live.configure(max_waiting=1)
    done = cli.run("failed", "retry", "--all", "--yes", "-o", "json")
    assert (done.code, done.json["done"], done.json["left"]) == (1, 1, 1)


# --- users ----------------------------------------------------------------------------------------


def test_users_with_only_delayed_tasks_are_listed(cli: Cli, live: TaskQueue) -> None:
    push(live, "later", user_id="alice", delay=3600)
    (alice,) = cli.json("users")["users"]
    assert (alice["user_id"], alice["delayed"]) == ("alice", 1)
    assert cli.ok("users").lines[1].split()[:5] == ["alice", "idle", "0", "0", "1"]
    push(live, "now", user_id="bob")
    assert [each["user_id"] for each in cli.json("users")["users"]] == ["bob"]


def test_users_are_listed_by_backlog_or_name(cli: Cli, live: TaskQueue) -> None:
    fill(live, "alice", 2)
    fill(live, "bob", 5)
    live.set_user("carol", weight=3)
    listed = cli.json("users")["users"]
    assert [(each["user_id"], each["backlog"]) for each in listed] == [("bob", 5), ("alice", 2)]
    by_name = cli.json("users", "--order", "name")["users"]
    assert [each["user_id"] for each in by_name] == ["alice", "bob", "carol"]
    assert [each["user_id"] for each in cli.json("users", "--prefix", "al")["users"]] == ["alice"]
    assert cli.ok("users").lines[1].split()[0] == "bob"
    assert cli.run("users", "--order", "odd").code == 2
    assert cli.run("users", "--minutes", "0").code == 2


def test_a_user_is_shown(cli: Cli, live: TaskQueue) -> None:
    fill(live, "alice", 2)
    live.set_user("alice", paused=True, max_running=3)
    document = cli.json("users", "show", "alice")
    assert (document["state"], document["settings"]["max_running"]) == ("paused", 3)
    assert "paused" in cli.ok("users", "show", "alice").out
    assert cli.run("users", "show", "nobody").code == 4


def test_weight_and_limits_are_set_and_taken_away(cli: Cli, live: TaskQueue) -> None:
    assert cli.json("users", "weight", "alice", "2.5")["weight"] == 2.5
    cli.ok("users", "limit", "alice", "--max-running", "3", "--rate", "0.5", "--tenant", "north")
    cli.ok("users", "weight", "alice", "4", "--tenant", "north")
    settings = live.get_user("alice", tenant="north")
    assert (settings.weight, settings.max_running, settings.rate) == (4.0, 3, 0.5)
    one = ("users", "limit", "alice", "--tenant", "north")
    assert "max running" in cli.ok(*one, "--rate", "none").out
    settings = live.get_user("alice", tenant="north")
    assert (settings.rate, settings.max_running) == (None, 3)
    own = live.get_user("alice")
    assert (own.weight, own.max_running) == (2.5, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ("weight", "alice", "0"),
        ("weight", "alice", "--", "-2.5"),
        ("limit", "alice", "--rate", "-0.5"),
        ("weight", "alice", "much"),
        ("weight", "alice"),
        ("limit", "alice"),
        ("limit", "alice", "--rate", "fast"),
        ("limit", "alice", "--max-running", "0"),
        ("limit", "alice", "--tenant", "north"),
        ("limit", "alice", "--rate", "1", "--tenant", "no way"),
    ],
)
def test_a_bad_limit_is_refused(cli: Cli, live: TaskQueue, arguments: tuple[str, ...]) -> None:
    assert cli.run("users", *arguments).code == 2
    assert json.loads(cli.ok("users", "--order", "name", "-o", "json").out)["users"] == []


def test_a_user_is_paused_and_resumed(cli: Cli, live: TaskQueue) -> None:
    cli.ok("users", "pause", "alice")
    assert live.get_user("alice").paused
    cli.ok("users", "resume", "alice")
    assert not live.get_user("alice").paused
    paused = cli.json("users", "pause", "alice", "--note", "unpaid", "--until", "1h")
    settings = live.get_user("alice")
    assert paused == {
        "user_id": "alice",
        "paused": True,
        "paused_by": settings.paused_by,
        "pause_note": "unpaid",
        "paused_until": document(settings)["paused_until"],
    }
    assert settings.paused_by
    push(live, "waits", user_id="alice")
    assert "unpaid" in cli.ok("users", "show", "alice").out
    live.cancel("waits")
    assert cli.json("users", "resume", "alice") == {"user_id": "alice", "paused": False}
    assert cli.run("users", "pause", "").code == 2


def test_purge_cancels_what_waits_and_prints_how_many(cli: Cli, live: TaskQueue) -> None:
    fill(live, "alice", 3)
    fill(live, "bob", 1)
    assert cli.run("users", "purge", "alice").code == 2
    assert cli.ok("users", "purge", "alice", "--dry-run").out == "3\n"
    assert live.size() == 4
    assert cli.ok("users", "purge", "alice", "--yes").out == "3\n"
    assert live.size() == 1
    found = {"user_id": "bob", "cancelled": 1}
    assert cli.json("users", "purge", "bob", "--dry-run") == {**found, "dry_run": True}
    assert cli.run("users", "purge", "nobody", "--yes").code == 4


def test_every_command_sees_a_user_with_only_delayed_tasks(cli: Cli, live: TaskQueue) -> None:
    push(live, "later", user_id="dora", delay=3600)
    push(live, "again", user_id="dora")
    live.retry(claim_one(live), "broken", delay=3600)
    shown = cli.json("users", "show", "dora")
    assert (shown["user_id"], shown["delayed"], shown["backlog"]) == ("dora", 2, 0)
    assert [each["user_id"] for each in cli.json("users", "--order", "name")["users"]] == ["dora"]
    listed = cli.json("runs", "--user", "dora", "--status", "retrying")["runs"]
    assert [each["task_id"] for each in listed] == ["again"]
    assert cli.ok("users", "purge", "dora", "--dry-run").out == "2\n"
    assert cli.ok("users", "purge", "dora", "--yes").out == "2\n"
    assert live.inspect().delayed == 0


def test_a_report_of_a_run_is_no_part_of_a_listing(cli: Cli, live: TaskQueue) -> None:
    push(live, "a")
    claim = claim_one(live)
    live.finish_many([(claim, {"access_token": "hush", "n": 1}, Report(seconds=0.5))])
    (run,) = cli.json("runs")["runs"]
    assert (run["result"], run["seconds"]) == ({"access_token": "***", "n": 1}, 0.5)
    assert "attempts" in run
    assert "log" not in run
