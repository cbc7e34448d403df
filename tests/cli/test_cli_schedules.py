"""`fairqueue schedules`, `export` and `import`: each command, its JSON, and how it fails."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from helpers.commands import Cli
from helpers.state import check_consistency
from helpers.tasks import claim_one
from prometheus_client import CollectorRegistry

from fairqueue.cli.bulk import DONE
from fairqueue.models import ScheduledTask
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler


@pytest.fixture
def live(redis_client: redis.Redis) -> Iterator[TaskScheduler]:
    """A scheduler of real time on the queue that the commands see."""
    with TaskQueue(redis_client) as queue:
        yield TaskScheduler(queue, "observer", registry=CollectorRegistry())
    check_consistency(redis_client)


@pytest.fixture
def cli(redis_url: str, live: TaskScheduler) -> Cli:
    return Cli(redis_url)


def get(live: TaskScheduler, schedule_id: str) -> ScheduledTask:
    found = live.get_schedule(schedule_id)
    assert found is not None
    return found


def add(live: TaskScheduler, *ids: str, user_id: str = "alice", name: str = "report") -> None:
    for schedule_id in ids:
        live.add_schedule("0 9 * * *", user_id, schedule_id=schedule_id, name=name)


def hours(first: int, last: int) -> tuple[str, ...]:
    """A range of whole hours from now, far enough from it that no clock strikes meanwhile."""
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, end = now + timedelta(hours=first), now + timedelta(hours=last)
    return "--since", start.isoformat(), "--until", end.isoformat()


# --- making ---------------------------------------------------------------------------------------


def test_add_takes_all_that_the_library_takes(cli: Cli, live: TaskScheduler) -> None:
    done = cli.ok(
        *("schedules", "add", "0 9 * * *", "--user", "alice", "--id", "nine", "--name", "report"),
        *("--tz", "Europe/Berlin", "--priority", "high", "--payload", "n=1", "--tenant", "north"),
        *("--metadata", '{"team": "x"}', "--overlap", "skip", "--misfire", "fire_all"),
        *("--catch-up", "2h", "--max-catch-up", "5", "--jitter", "30s", "--retries", "2"),
        *("--backoff", "2s,10s", "--timeout", "1m", "--max-failures", "3", "--max-runs", "9"),
        *("--backoff-cap", "1h", "--backoff-multiplier", "1.5", "--backoff-jitter", "full"),
        *("--window", '{"days": [1], "from": "08:00", "to": "10:00"}', "--exclude", "2030-01-07"),
        *("--start", "2026-01-01", "--end", "2031-01-01T00:00:00Z"),
        *("--pool", "gpu", "--limit-key", "account:42", "--limit-key", "a,b", "--cost", "3.5"),
        *("--unique", "nightly", "--on-duplicate", "replace", "--unique-for", "2h"),
        *("--expires", "1h"),
    )
    assert done.out == "nine\n"
    task = get(live, "nine")
    assert (task.cron_expr, task.user_id, task.name) == ("0 9 * * *", "alice", "report")
    assert (task.timezone, task.priority, task.payload) == ("Europe/Berlin", 4, {"n": 1})
    assert (task.metadata, task.overlap, task.misfire) == ({"team": "x"}, "skip", "fire_all")
    assert (task.catch_up, task.max_catch_up, task.jitter) == (7200, 5, 30)
    assert (task.retries, task.backoff, task.timeout) == (2, [2, 10], 60)
    assert (task.backoff_cap, task.backoff_multiplier) == (3600, 1.5)
    assert task.backoff_jitter == "full"
    assert (task.max_failures, task.max_runs, task.tenant) == (3, 9, "north")
    assert (task.exclude, len(task.windows or [])) == (["2030-01-07"], 1)
    assert (task.pool, task.limit_keys, task.cost) == ("gpu", ["account:42", "a,b"], 3.5)
    assert (task.unique, task.on_duplicate, task.unique_for) == ("nightly", "replace", 7200)
    assert task.expires == 3600


def test_an_interval_and_a_moment_are_rules_too(cli: Cli, live: TaskScheduler) -> None:
    cli.ok("schedules", "add", "--every", "90s", "--user", "u", "--id", "a")
    cli.ok("schedules", "add", "--at", "2h", "--user", "u", "--id", "b")
    assert get(live, "a").every == timedelta(seconds=90)
    at = get(live, "b").at
    assert at is not None
    assert abs(at - datetime.now(UTC) - timedelta(hours=2)) < timedelta(minutes=5)
    listed = cli.ok("schedules").out
    assert "every 1m30s " in listed
    assert f"at {at:%Y-%m-%d %H:%M:%S} " in listed


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("0 9 * * *",), 2, "--user"),
        (("99 9 * * *", "--user", "u"), 2, "99"),
        (("0 9 * * *", "--user", "u", "--tz", "Mars/Base"), 2, "Mars/Base"),
        (("0 9 * * *", "--user", "u", "--overlap", "odd"), 2, "odd"),
        (("0 9 * * *", "--user", "u", "--priority", "9"), 2, "'9'"),
        (("0 9 * * *", "--user", "u", "--backoff", "2s,soon"), 2, "soon"),
        (("0 9 * * *", "--user", "u", "--window", "{odd"), 2, "{odd"),
        (("0 9 * * *", "--user", "u", "--unique", "k", "--unique-for", "ever"), 2, "'ever'"),
        (("0 9 * * *", "--user", "u", "--unique-for", "waiting"), 2, "unique_for needs unique"),
        (("0 9 * * *", "--user", "u", "--limit-key", "a*"), 2, "must not contain '*'"),
        (("0 9 * * *", "--user", "u", "--cost", "0"), 2, "cost must be"),
        (("0 9 * * *", "--user", "u", "--id", "taken"), 5, "taken"),
        (("--user", "u"), 2, "cron_expr"),
    ],
)
def test_what_cannot_be_added_is_named(
    cli: Cli, live: TaskScheduler, arguments: tuple[str, ...], code: int, named: str
) -> None:
    add(live, "taken")
    done = cli.run("schedules", "add", *arguments)
    assert (done.code, done.out) == (code, "")
    assert named in done.err
    assert len(live.list_schedules()) == 1


def test_add_replaces_if_told_so(cli: Cli, live: TaskScheduler) -> None:
    add(live, "a")
    cli.ok("schedules", "add", "0 5 * * *", "--user", "bob", "--id", "a", "--replace")
    assert (get(live, "a").cron_expr, get(live, "a").user_id) == ("0 5 * * *", "bob")


def test_copy_makes_one_like_another(cli: Cli, live: TaskScheduler) -> None:
    add(live, "a")
    assert cli.ok("schedules", "copy", "a", "--id", "b", "--cron", "0 5 * * *").out == "b\n"
    assert (get(live, "b").cron_expr, get(live, "b").name) == ("0 5 * * *", "report")
    assert cli.run("schedules", "copy", "none").code == 4


# --- looking --------------------------------------------------------------------------------------


def test_list_finds_by_user_name_and_text(cli: Cli, live: TaskScheduler) -> None:
    add(live, "a1", "a2")
    add(live, "b1", user_id="bob", name="mail")
    live.pause_schedule("a2")

    def ids(*arguments: str) -> list[str]:
        return [each["schedule_id"] for each in cli.json("schedules", *arguments)["schedules"]]

    assert ids() == ["a1", "a2", "b1"]
    assert ids("--user", "bob") == ["b1"]
    assert ids("--name", "report") == ["a1", "a2"]
    assert ids("--name-prefix", "ma") == ["b1"]
    assert ids("--contains", "A1") == ["a1"]
    assert ids("--inactive") == ["a2"]
    assert ids("--active", "--user", "alice") == ["a1"]
    assert ids("--user", "nobody") == []


def test_show_has_all_fields_and_masks_secrets(cli: Cli, live: TaskScheduler) -> None:
    live.add_schedule("0 9 * * *", "alice", schedule_id="a", payload={"n": 1, "password": "hush"})
    text = cli.ok("schedules", "show", "a").out
    document = cli.json("schedules", "show", "a")
    assert document["payload"] == {"n": 1, "password": "***"}
    assert (document["state"], document["sentence"]) == ("active", "At 09:00 (UTC)")
    assert re.search(r"^in words +At 09:00 \(UTC\)$", text, re.MULTILINE)
    assert "hush" not in text
    done = cli.run("schedules", "show", "none")
    assert (done.code, done.out) == (4, "")
    assert "'none'" in done.err


def test_next_needs_no_redis_for_a_rule() -> None:
    nowhere = Cli("redis://127.0.0.1:1/0")
    rule = ("schedules", "next", "0 9 * * 1", "--tz", "Europe/Berlin", "--after", "2026-03-05")
    done = nowhere.ok(*rule, "--count", "2")
    assert done.lines == [
        "2026-03-09 09:00:00+01:00  2026-03-09 08:00:00 UTC",
        "2026-03-16 09:00:00+01:00  2026-03-16 08:00:00 UTC",
    ]
    assert "Monday" in done.err
    document = nowhere.json(*rule)
    assert (len(document["runs"]), document["timezone"]) == (5, "Europe/Berlin")
    clock_change = ("schedules", "next", "30 2 * * *", "--tz", "Europe/Berlin")
    assert "2026-03-29" in nowhere.ok(*clock_change, "--after", "2026-03-27").err
    assert len(nowhere.ok("schedules", "next", "--every", "90s").lines) == 5
    assert len(nowhere.ok("schedules", "next", "--at", "2h").lines) == 1
    for text in ("EVERY_DAY", '{"minutes": 10, "hours": 2}'):
        after = ("--after", "2026-03-05", "--count", "1")
        (run,) = nowhere.ok("schedules", "next", text, *after).lines
        assert run == "2026-03-05 02:10:00+00:00  2026-03-05 02:10:00 UTC"
    assert "no runs after" in nowhere.ok("schedules", "next", "--at", "-1d").err
    assert nowhere.run("schedules", "next").code == 2
    assert nowhere.run("schedules", "next", "99 9 * * *").code == 2
    assert nowhere.run("schedules", "next", "some-id").code == 3


def test_next_of_a_schedule_is_what_it_will_do(cli: Cli, live: TaskScheduler) -> None:
    live.add_schedule("0 0 1 1 *", "alice", schedule_id="a")
    add(live, "0 9 * * *")
    found = cli.json("schedules", "next", "a", "--count", "3")["moments"]
    assert [each["outcome"] for each in found] == ["planned"] * 3
    assert datetime.fromisoformat(found[0]["at"]) == get(live, "a").next_run
    by_id = cli.json("schedules", "next", "--id", "0 9 * * *", "--count", "1")["moments"]
    assert by_id[0]["task_id"].startswith("0 9 * * *:")
    assert cli.run("schedules", "next", "none").code == 4
    assert cli.run("schedules", "next", "0 9 * * *", "--id", "a").code == 2


def test_a_moment_in_the_past_is_said_to_be_one(cli: Cli) -> None:
    refused = cli.run("schedules", "add", "--at", "-1d", "--user", "ann")
    assert refused.code == 2
    assert "is in the past" in refused.err
    assert "EVERY_" not in cli.ok("schedules", "add", "EVERY_DAY", "--user", "ann", "--id", "a").err
    assert cli.json("schedules", "show", "a")["cron_expr"] == "10 2 * * *"
    cli.ok("schedules", "add", '{"minutes": 5}', "--user", "ann", "--id", "b")
    assert cli.json("schedules", "show", "b")["cron_expr"] == "5 * * * *"


def test_history_has_the_runs_of_a_schedule(cli: Cli, live: TaskScheduler) -> None:
    add(live, "a")
    task_id = live.trigger("a")
    claim = claim_one(live.queue)
    live.queue.finish(claim)
    (run,) = cli.json("schedules", "history", "a")["runs"]
    assert (run["task_id"], run["status"]) == (task_id, "succeeded")
    assert task_id in cli.ok("schedules", "history", "a").out
    assert cli.run("schedules", "history", "none").code == 4


def test_moments_say_what_became_of_each(cli: Cli, live: TaskScheduler) -> None:
    live.add_schedule("0 * * * *", "alice", schedule_id="a")
    past, future = hours(-5, -2), hours(2, 4)
    found = cli.json("schedules", "moments", "a", *past)["moments"]
    assert [each["outcome"] for each in found] == ["before"] * 3
    found = cli.json("schedules", "moments", "a", *future)["moments"]
    assert [each["outcome"] for each in found] == ["planned"] * 2
    assert cli.ok("schedules", "moments", "a", *past).lines[1].split()[2] == "before"
    assert cli.run("schedules", "moments", "none").code == 4


def test_changes_say_who_changed_what(cli: Cli, live: TaskScheduler) -> None:
    cli.ok("schedules", "add", "0 9 * * *", "--id", "a", "--user", "ann", "--name", "report")
    cli.ok("schedules", "update", "a", "--name", "mail")
    change, making = cli.json("schedules", "changes", "a")["changes"]
    assert (making["made"], making["fields"]["user_id"]) == (True, [None, "ann"])
    assert making["by"] == change["by"] == cli.json("schedules", "show", "a")["created_by"]
    assert change["fields"] == {"name": ["report", "mail"]}
    assert "@" in change["by"]
    assert "name: report -> mail" in cli.ok("schedules", "changes", "a").out
    assert cli.run("schedules", "changes", "none").code == 4


def test_a_title_is_listed_and_shown(cli: Cli) -> None:
    titled = ("--title", "Daily report", "--description", "For the board")
    cli.ok("schedules", "add", "0 9 * * *", "--id", "a", "--user", "ann", *titled)
    cli.ok("schedules", "add", "0 9 * * *", "--id", "b", "--user", "ann", "--name", "mail")
    listed = cli.ok("schedules", "list").lines
    assert "TITLE" in listed[0]
    assert "Daily report" in listed[1]
    assert "mail" in listed[2]
    assert len(cli.ok("schedules", "list", "--contains", "daily rep").lines) == 2
    assert "For the board" in cli.ok("schedules", "show", "a").out
    cli.ok("schedules", "update", "a", "--clear", "title", "--description", "Nobody reads it")
    found = cli.json("schedules", "show", "a")
    assert (found["title"], found["description"]) == (None, "Nobody reads it")


def test_logs_are_those_of_its_runs(cli: Cli, live: TaskScheduler) -> None:
    add(live, "a")
    assert cli.json("schedules", "logs", "a")["lines"] == []
    assert cli.ok("schedules", "logs", "a").out == "TASK  AT  LEVEL  MESSAGE  CONTEXT\n"
    assert cli.run("schedules", "logs", "none").code == 4


# --- changing -------------------------------------------------------------------------------------


def test_update_is_a_patch(cli: Cli, live: TaskScheduler) -> None:
    live.add_schedule(
        *("0 9 * * *", "alice"),
        schedule_id="a",
        payload={"n": 1, "api_key": "hush"},
        max_runs=5,
        retries=3,
    )
    document = cli.json("schedules", "update", "a", "--cron", "0 5 * * *", "--clear", "max-runs")
    assert (document["cron_expr"], document["max_runs"]) == ("0 5 * * *", None)
    task = get(live, "a")
    assert (task.retries, task.payload) == (3, {"n": 1, "api_key": "hush"})
    cli.ok("schedules", "update", "a", "--payload", "n=2", "--payload", "api_key=***")
    assert get(live, "a").payload == {"n": 2, "api_key": "hush"}
    assert "0 5 * * *" in cli.ok("schedules", "update", "a", "--jitter", "5s").out


def test_update_may_be_conditional(cli: Cli, live: TaskScheduler) -> None:
    add(live, "a")
    etag = cli.json("schedules", "show", "a")["etag"]
    cli.ok("schedules", "update", "a", "--name", "b", "--if-match", etag)
    done = cli.run("schedules", "update", "a", "--name", "c", "--if-match", etag)
    assert (done.code, get(live, "a").name) == (5, "b")
    assert cli.run("schedules", "remove", "a", "--if-match", etag, "--yes").code == 5
    etag = cli.json("schedules", "show", "a")["etag"]
    cli.ok("schedules", "remove", "a", "--if-match", etag, "--yes")
    assert live.get_schedule("a") is None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("a",), 2),
        (("a", "--clear", "user"), 2),
        (("a", "--cron", "99 9 * * *"), 2),
        (("none", "--name", "x"), 4),
    ],
)
def test_an_update_that_cannot_be_made_changes_nothing(
    cli: Cli, live: TaskScheduler, arguments: tuple[str, ...], code: int
) -> None:
    add(live, "a")
    before = get(live, "a")
    assert cli.run("schedules", "update", *arguments).code == code
    assert get(live, "a") == before


def test_pause_and_resume_by_id_need_no_consent(cli: Cli, live: TaskScheduler) -> None:
    add(live, "a", "b")
    cli.ok("schedules", "pause", "a", "b", "--note", "too loud")
    assert (get(live, "a").is_active, get(live, "a").pause_note) == (False, "too loud")
    cli.ok("schedules", "resume", "a")
    assert [get(live, name).is_active for name in ("a", "b")] == [True, False]
    cli.ok("schedules", "pause", "a", "--until", "2h")
    assert get(live, "a").paused_until is not None
    actions = [entry["action"] for entry in cli.json("audit")["entries"]]
    assert actions == ["schedule.pause", "schedule.resume", "schedule.pause", "schedule.pause"]


@pytest.mark.parametrize("action", ["pause", "resume", "trigger", "remove"])
def test_a_missing_id_stops_before_anything(cli: Cli, live: TaskScheduler, action: str) -> None:
    add(live, "a")
    before = get(live, "a")
    assert cli.run("schedules", action, "a", "none", "--yes").code == 4
    assert (get(live, "a"), live.queue.size()) == (before, 0)


@pytest.mark.parametrize("action", ["pause", "resume", "trigger", "remove"])
def test_it_must_be_clear_which_ones_are_meant(cli: Cli, live: TaskScheduler, action: str) -> None:
    add(live, "a")
    for arguments in ((), ("a", "--user", "alice"), ("a", "--all"), ("--all", "--user", "alice")):
        done = cli.run("schedules", action, *arguments, "--yes")
        assert (done.code, "one of the three" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("action", "left"), [("pause", {"a": False, "b": False, "c": True}), ("remove", {"c": True})]
)
def test_all_that_match_are_counted_tried_and_acted_on(
    cli: Cli, live: TaskScheduler, action: str, left: dict[str, bool]
) -> None:
    add(live, "a", "b")
    add(live, "c", user_id="bob")
    before = live.list_schedules()
    tried = cli.json("schedules", action, "--user", "alice", "--dry-run")
    assert (tried["matched"], tried["done"], tried["dry_run"]) == (2, 0, True)
    refused = cli.run("schedules", action, "--user", "alice")
    assert (refused.code, f"to {action} 2 schedules, give --yes" in refused.err) == (2, True)
    assert live.list_schedules() == before
    done = cli.ok("schedules", action, "--user", "alice", "--yes")
    assert f"{DONE[action]} 2 schedules" in done.err
    assert {each.schedule_id: each.is_active for each in live.list_schedules()} == left


def test_one_is_removed_only_with_consent(cli: Cli, live: TaskScheduler) -> None:
    add(live, "a")
    assert cli.run("schedules", "remove", "a").code == 2
    assert "would remove schedule 'a'" in cli.ok("schedules", "remove", "a", "--dry-run").err
    assert live.get_schedule("a") is not None
    cli.ok("schedules", "remove", "a", "--yes")
    assert live.get_schedule("a") is None


def test_trigger_prints_the_task_of_one_and_counts_many(cli: Cli, live: TaskScheduler) -> None:
    add(live, "a", "b")
    task_id = cli.ok("schedules", "trigger", "a", "--payload", "n=1").out.strip()
    claim = claim_one(live.queue)
    assert (claim.task.task_id, claim.task.payload) == (task_id, {"n": 1})
    live.queue.finish(claim)
    assert cli.ok("schedules", "trigger", "a", "--dry-run").out == ""
    told = cli.json("schedules", "trigger", "a")
    claim = claim_one(live.queue)
    assert told == {"schedule_id": "a", "task_id": claim.task.task_id}
    live.queue.finish(claim)
    cli.ok("schedules", "trigger", "--all", "--yes")
    assert live.queue.size() == 2
    assert cli.run("schedules", "trigger", "--all", "--payload", "n=1", "--yes").code == 2


def test_backfill_counts_first_and_then_pushes(cli: Cli, live: TaskScheduler) -> None:
    live.add_schedule("0 * * * *", "alice", schedule_id="a")
    past = hours(-5, -2)
    tried = cli.json("schedules", "backfill", "a", *past, "--dry-run")
    assert (tried["moments"], tried["filled"], live.queue.size()) == (3, 0, 0)
    assert cli.run("schedules", "backfill", "a", *past).code == 2
    done = cli.json("schedules", "backfill", "a", *past, "--yes")
    assert (done["filled"], live.queue.size()) == (3, 3)
    again = cli.ok("schedules", "backfill", "a", *past, "--yes")
    assert "moments  0" in again.out
    assert cli.run("schedules", "backfill", "none", *past, "--yes").code == 4
    assert cli.run("schedules", "backfill", "a").code == 2


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_what_was_exported_can_be_imported(
    cli: Cli, live: TaskScheduler, tmp_path: Path, suffix: str
) -> None:
    live.add_schedule("0 9 * * *", "alice", schedule_id="a", payload={"token": "kept"})
    add(live, "b", user_id="bob")
    file = tmp_path / f"schedules.{suffix}"
    done = cli.ok("export", str(file))
    assert (done.out, "wrote 2 schedules" in done.err) == ("", True)
    assert cli.ok("import", str(file)).out == ""  # nothing differs, so nobody is asked
    live.remove_schedule("a")
    live.update_schedule("b", name="other")
    add(live, "c")
    tried = cli.ok("import", str(file), "--prune", "--dry-run")
    assert tried.lines == ["+ a", "~ b  name: other -> report", "- c"]
    assert cli.run("import", str(file), "--prune").code == 2
    document = cli.json("import", str(file), "--prune", "--yes")
    assert (document["added"], document["removed"]) == (["a"], ["c"])
    assert get(live, "a").payload == {"token": "kept"}
    assert [each.schedule_id for each in live.list_schedules()] == ["a", "b"]


def test_export_writes_and_import_reads_standard_streams(cli: Cli, live: TaskScheduler) -> None:
    add(live, "a")
    add(live, "b", user_id="bob")
    text = cli.ok("export", "--user", "alice").out
    assert [each["schedule_id"] for each in json.loads(text)] == ["a"]
    assert "schedule_id: a" in cli.ok("export", "-", "--format", "yaml").out
    live.remove_schedule("a")
    assert cli.ok("import", "-", "--yes", input=text).lines == ["+ a"]


@pytest.mark.parametrize(
    ("text", "named"),
    [("{", "JSON"), ('[{"schedule_id": "a", "cron_expr": "99 * * * *", "user_id": "u"}]', "99")],
)
def test_a_file_that_cannot_be_imported_is_told(
    cli: Cli, live: TaskScheduler, tmp_path: Path, text: str, named: str
) -> None:
    file = tmp_path / "schedules.json"
    file.write_text(text, encoding="utf-8")
    done = cli.run("import", str(file), "--yes")
    assert (done.code, named in done.err) == (2, True)
    assert live.list_schedules() == []
    assert cli.run("import", str(tmp_path / "none.json")).code == 2
    assert cli.run("export", str(tmp_path / "no" / "folder.json")).code == 1
