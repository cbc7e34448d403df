"""`fairqueue tenants`, `limits`, `pools` and `quote`, and what tasks may ask for when pushed."""

import json
from typing import Any

import pytest
from helpers.commands import Cli
from helpers.tasks import beat, claim_one, fill, push

from fairqueue.errors import UnknownTenant
from fairqueue.history.runs import History
from fairqueue.inspection import Inspector
from fairqueue.models import KeyLimits
from fairqueue.queue.queue import TaskQueue


@pytest.fixture
def cli(redis_url: str, live: TaskQueue) -> Cli:
    return Cli(redis_url)


def fill_tenants(queue: TaskQueue) -> None:
    """Let two users of acme wait with three tasks, one of globex with one."""
    push(queue, "a1", "a2", user_id="ann", tenant="acme")
    push(queue, "b1", user_id="bob", tenant="acme")
    push(queue, "g1", user_id="gil", tenant="globex")


# --- tenants --------------------------------------------------------------------------------------


def test_tenants_are_listed_with_what_they_should_have_and_what_they_got(
    cli: Cli, live: TaskQueue
) -> None:
    fill_tenants(live)
    live.set_tenant("acme", weight=3)
    live.finish(claim_one(live))
    acme, globex = cli.json("tenants")["tenants"]
    assert (acme["tenant"], acme["users"], acme["settings"]["weight"]) == ("acme", 2, 3.0)
    assert (globex["tenant"], globex["backlog"] + globex["running"]) == ("globex", 1)
    assert acme["entitled"] == 0.75
    assert acme["received"] + globex["received"] == 1.0
    heading, *rows = cli.ok("tenants").lines
    assert heading.split()[:4] == ["TENANT", "USERS", "STATE", "BACKLOG"]
    assert "75.0%" in rows[0]
    assert [each["tenant"] for each in cli.json("tenants", "--prefix", "gl")["tenants"]] == [
        "globex"
    ]


def test_tenants_are_listed_page_by_page(cli: Cli, live: TaskQueue) -> None:
    fill_tenants(live)
    first = cli.json("tenants", "--limit", "1")
    assert ([each["tenant"] for each in first["tenants"]], first["has_more"]) == (["acme"], True)
    rest = cli.json("tenants", "--cursor", first["cursor"])
    assert ([each["tenant"] for each in rest["tenants"]], rest["has_more"]) == (["globex"], False)
    lines = cli.ok("tenants", "--all", "-o", "jsonl").objects
    assert [each["tenant"] for each in lines] == ["acme", "globex"]


def test_tenants_with_the_largest_backlog_are_the_first(cli: Cli, live: TaskQueue) -> None:
    push(live, "x1", "x2", user_id="xia", tenant="zeta")
    push(live, "a1", user_id="ann", tenant="acme")
    live.set_tenant("idle", weight=2)

    def listed(*arguments: str) -> list[str]:
        return [each["tenant"] for each in cli.json("tenants", *arguments)["tenants"]]

    assert listed() == listed("--order", "backlog") == ["zeta", "acme"]
    assert listed("--order", "name") == ["acme", "idle", "zeta"]
    first = cli.json("tenants", "--limit", "1")
    assert listed("--cursor", first["cursor"]) == ["acme"]
    for task_id in ("x1", "x2", "a1"):
        live.cancel(task_id)
    assert listed() == ["acme", "idle", "zeta"]
    first = cli.json("tenants", "--limit", "1")
    assert listed("--cursor", first["cursor"]) == ["idle", "zeta"]
    assert cli.run("tenants", "--order", "odd").code == 2


def test_a_tenant_is_shown_with_its_users(cli: Cli, live: TaskQueue) -> None:
    fill_tenants(live)
    shown = cli.json("tenants", "show", "acme")
    assert (shown["tenant"], shown["backlog"], shown["has_more"]) == ("acme", 3, False)
    assert [(each["user_id"], each["backlog"]) for each in shown["members"]] == [
        ("ann", 2),
        ("bob", 1),
    ]
    out = cli.ok("tenants", "show", "acme").out
    assert "no worker is alive" in out
    assert "ann" in out
    assert "gil" not in out
    for task_id in ("a1", "a2", "b1"):
        live.cancel(task_id)
    assert [each["user_id"] for each in cli.json("tenants", "show", "acme")["members"]] == [
        "ann",
        "bob",
    ]
    assert cli.run("tenants", "show", "nobody").code == 4


def test_a_tenant_gets_a_weight_and_limits(cli: Cli, live: TaskQueue) -> None:
    assert cli.json("tenants", "weight", "acme", "2.5")["weight"] == 2.5
    cli.ok("tenants", "limit", "acme", "--max-running", "3", "--max-waiting", "9", "--rate", "0.5")
    settings = live.get_tenant("acme")
    assert (settings.weight, settings.max_running, settings.rate) == (2.5, 3, 0.5)
    assert "max waiting" in cli.ok("tenants", "limit", "acme", "--rate", "none").out
    settings = live.get_tenant("acme")
    assert (settings.rate, settings.max_waiting) == (None, 9)
    assert live.get_user("acme").weight == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("weight", "acme", "0"),
        ("weight", "acme", "much"),
        ("weight", "no way", "2"),
        ("limit", "acme"),
        ("limit", "acme", "--rate", "fast"),
        ("limit", "acme", "--max-running", "0"),
        ("pause", ""),
        ("pause", "acme", "--until", "-1h"),
    ],
)
def test_a_bad_value_for_a_tenant_is_refused(
    cli: Cli, live: TaskQueue, arguments: tuple[str, ...]
) -> None:
    assert cli.run("tenants", *arguments).code == 2
    assert cli.json("tenants")["tenants"] == []


def test_a_tenant_is_paused_and_resumed(cli: Cli, live: TaskQueue) -> None:
    fill_tenants(live)
    told = cli.json("tenants", "pause", "acme", "--note", "unpaid", "--until", "1h")
    assert (told["tenant"], told["paused"], told["pause_note"]) == ("acme", True, "unpaid")
    assert {claim.task.tenant for claim in live.claim("w", limit=10)} == {"globex"}
    said = cli.ok("tasks", "explain", "a1").out
    assert "Tenant 'acme' is paused" in said
    assert "unpaid" in said
    assert cli.json("tenants", "resume", "acme") == {"tenant": "acme", "paused": False}
    assert len(live.claim("w", limit=10)) == 3


def test_purge_cancels_what_the_users_of_a_tenant_wait_for(cli: Cli, live: TaskQueue) -> None:
    fill_tenants(live)
    push(live, "later", user_id="bob", tenant="acme", delay=60)
    assert cli.run("tenants", "purge", "acme").code == 2
    assert cli.ok("tenants", "purge", "acme", "--dry-run").out == "4\n"
    assert cli.json("tenants", "purge", "acme", "--yes") == {
        "tenant": "acme",
        "cancelled": 4,
        "dry_run": False,
    }
    assert (live.size(), live.inspect().delayed) == (1, 0)
    assert cli.run("tenants", "purge", "nobody", "--yes").code == 4


def test_changes_of_tenants_are_audited(cli: Cli, live: TaskQueue) -> None:
    fill_tenants(live)
    cli.ok("tenants", "weight", "acme", "2")
    cli.ok("tenants", "pause", "acme")
    cli.ok("tenants", "purge", "acme", "--yes")
    cli.ok("limits", "set", "account:*", "--slots", "1")
    cli.ok("limits", "remove", "account:*")
    entries = cli.json("audit")["entries"]
    assert [(each["action"], each["target"]) for each in entries] == [
        ("key_limits.remove", "account:*"),
        ("key_limits.change", "account:*"),
        ("tenant.purge", "acme"),
        ("tenant.pause", "acme"),
        ("tenant.set", "acme"),
    ]


# --- users of tenants -----------------------------------------------------------------------------


def test_users_of_one_id_in_two_tenants_are_two(cli: Cli, live: TaskQueue) -> None:
    for tenant in (None, "acme", "globex"):
        push(live, f"of-{tenant}", user_id="ann", tenant=tenant)
    listed = cli.json("users")["users"]
    assert {each["tenant"] for each in listed} == {None, "acme", "globex"}
    assert [each["tenant"] for each in cli.json("users", "--tenant", "acme")["users"]] == ["acme"]
    assert cli.json("users", "show", "ann", "--tenant", "acme")["next_wait"]["task_id"] == "of-acme"
    assert cli.json("users", "show", "ann")["next_wait"]["task_id"] == "of-None"
    cli.ok("users", "pause", "ann", "--tenant", "acme")
    paused = {tenant: live.get_user("ann", tenant=tenant).paused for tenant in ("acme", "globex")}
    assert paused == {"acme": True, "globex": False}
    assert not live.get_user("ann").paused
    told = cli.json("users", "resume", "ann", "--tenant", "acme")
    assert told == {"user_id": "ann", "tenant": "acme", "paused": False}
    assert cli.ok("users", "purge", "ann", "--tenant", "globex", "--yes").out == "1\n"
    assert {each["task_id"] for each in cli.json("tasks")["tasks"]} == {"of-None", "of-acme"}
    assert cli.run("users", "show", "ann", "--tenant", "initech").code == 4


def test_who_names_no_tenant_is_told_of_users_of_tenants(cli: Cli, live: TaskQueue) -> None:
    push(live, "a", user_id="ann", tenant="acme")
    push(live, "g", user_id="ann", tenant="globex")
    for command in (("show", "ann"), ("purge", "ann", "--dry-run")):
        refused = cli.run("users", *command)
        assert refused.code == 4
        assert "no user 'ann' without a tenant, but of tenant 'acme', 'globex'" in refused.err
    said = cli.ok("users", "weight", "ann", "2").err
    assert "the user 'ann' without a tenant: --tenant selects 2 users of that id" in said
    assert "tenant" in cli.ok("users", "pause", "ann").err
    assert cli.ok("users", "weight", "ann", "2", "--tenant", "acme").err == ""
    assert cli.ok("users", "weight", "bob", "2").err == ""
    assert (
        "no user 'bob' of tenant 'acme'" in cli.run("users", "show", "bob", "--tenant", "acme").err
    )


@pytest.mark.one_partition
def test_a_user_moves_with_tasks_and_settings(cli: Cli, live: TaskQueue) -> None:
    live.set_user("ann", weight=4)
    push(live, "a", "b", user_id="ann")
    told = cli.json("users", "move", "ann", "--to", "acme")
    assert told == {"user_id": "ann", "from": None, "to": "acme", "moved": 2}
    assert live.get_user("ann", tenant="acme").weight == 4
    assert [run["tenant"] for run in cli.json("tasks", "--tenant", "acme")["tasks"]] == ["acme"] * 2
    said = cli.ok("users", "move", "ann", "--tenant", "acme", "--to", "globex").err
    assert "ann of acme is now ann of globex: moved 2 tasks" in said
    assert cli.json("users", "move", "ann", "--tenant", "globex", "--to-none")["moved"] == 2
    assert live.size("ann") == 2


@pytest.mark.parametrize(
    "arguments",
    [(), ("--to", "acme", "--to-none"), ("--to-none",), ("--to", "no way"), ("--to", "")],
)
def test_a_move_that_goes_nowhere_is_refused(
    cli: Cli, live: TaskQueue, arguments: tuple[str, ...]
) -> None:
    push(live, "a", user_id="ann")
    assert cli.run("users", "move", "ann", *arguments).code == 2
    assert cli.json("tasks")["tasks"][0]["tenant"] is None


def test_a_move_of_an_unknown_user_is_refused(cli: Cli, live: TaskQueue) -> None:
    push(live, "a", user_id="ann")
    refused = cli.run("users", "move", "anne", "--to", "acme")
    assert (refused.code, refused.err.strip()) == (4, "fairqueue: there is no user 'anne'")


# --- what tasks may ask for -----------------------------------------------------------------------


def push_task(cli: Cli, *arguments: str) -> str:
    return cli.ok("tasks", "push", "--user", "ann", *arguments).out.strip()


def test_a_pushed_task_has_its_flow(cli: Cli, live: TaskQueue) -> None:
    task_id = push_task(
        cli,
        *("--tenant", "acme", "--pool", "gpu", "--limit-key", "account:42", "--limit-key", "box:1"),
        *("--unique", "report:7", "--on-duplicate", "error", "--unique-for", "waiting"),
        *("--expires", "2h", "--cost", "3.5"),
    )
    run = cli.json("tasks", "show", task_id)
    assert {name: run[name] for name in ("pool", "limit_keys", "unique", "cost", "tenant")} == {
        "pool": "gpu",
        "limit_keys": ["account:42", "box:1"],
        "unique": "report:7",
        "cost": 3.5,
        "tenant": "acme",
    }
    assert run["expires_at"] is not None
    assert live.claim("w") == []
    (claim,) = live.claim("w", pools=["gpu"])
    live.finish(claim)


def test_tasks_and_runs_are_listed_by_pool(cli: Cli, live: TaskQueue) -> None:
    push_task(cli, "--id", "a")
    push_task(cli, "--id", "b", "--pool", "gpu")
    for command in ("tasks", "runs"):
        listed = cli.json(command, "--pool", "gpu")[command]
        assert [each["task_id"] for each in listed] == ["b"]


def test_a_second_task_with_a_unique_key_is_the_first_one(cli: Cli, live: TaskQueue) -> None:
    first = push_task(cli, "--unique", "report:7")
    assert push_task(cli, "--unique", "report:7") == first
    assert live.size() == 1
    refused = cli.run(
        *("tasks", "push", "--user", "ann", "--unique", "report:7", "--on-duplicate", "error")
    )
    assert (refused.code, repr(first) in refused.err, live.size()) == (5, True, 1)
    replaced = push_task(
        *(cli, "--unique", "report:7", "--on-duplicate", "replace", "--payload", "n=2")
    )
    assert replaced == first
    assert claim_one(live).task.payload == {"n": 2}


def test_a_debounced_task_waits_and_runs_with_the_last_payload(cli: Cli, live: TaskQueue) -> None:
    options = ("--unique", "index", "--debounce", "5m", "--max-wait", "1h")
    first = push_task(cli, *options, "--payload", "n=1")
    assert push_task(cli, *options, "--payload", "n=2") == first
    assert (live.size(), live.inspect().delayed) == (0, 1)
    assert cli.json("tasks", "show", first)["task"]["payload"] == {"n": 2}


def test_runs_that_expired_are_listed(cli: Cli, live: TaskQueue) -> None:
    task_id = push_task(cli, "--expires", "0.001")
    live.claim("w")
    listed = cli.json("runs", "--status", "expired")["runs"]
    assert [each["task_id"] for each in listed] == [task_id]
    assert "expired" in cli.ok("runs", "list", "--status", "expired").out
    assert "It expired at" in cli.ok("tasks", "explain", task_id).out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--pool", ""),
        ("--limit-key", "a*"),
        ("--limit-key", ""),
        *(tuple(part for key in "abcde" for part in ("--limit-key", key)),),
        ("--unique", "x\x01"),
        ("--on-duplicate", "error"),
        ("--on-duplicate", "odd", "--unique", "x"),
        ("--unique", "x", "--unique-for", "ever"),
        ("--debounce", "5"),
        ("--unique", "x", "--max-wait", "5"),
        ("--expires", "soon"),
        ("--expires", "2020-01-01"),
        ("--cost", "0"),
        ("--cost", "-1"),
        ("--cost", "nan"),
        ("--cost", "1e9"),
        ("--tenant", "no\x01way"),
    ],
)
def test_a_task_with_a_bad_flow_is_not_stored(
    cli: Cli, live: TaskQueue, arguments: tuple[str, ...]
) -> None:
    done = cli.run("tasks", "push", "--user", "ann", *arguments)
    assert (done.code, done.out) == (2, "")
    assert History(live).runs() == []


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.one_partition
def test_limits_of_keys_are_set_listed_and_removed(cli: Cli, live: TaskQueue) -> None:
    told = cli.json("limits", "set", "account:*", "--slots", "1", "--ordered", "--through-retries")
    assert told == {
        "key": "account:*",
        "of": "key",
        "slots": 1,
        "ordered": True,
        "through_retries": True,
    }
    cli.ok("limits", "set", "account:42", "--rate", "0.5", "--scope", "tenant")
    assert live.get_key_limits() == {
        "account:*": KeyLimits(slots=1, ordered=True, through_retries=True),
        "account:42": KeyLimits(rate=0.5, scope="tenant"),
    }
    listed = cli.json("limits")["limits"]
    assert [(each["key"], each["slots"], each["rate"]) for each in listed] == [
        ("account:*", 1, None),
        ("account:42", None, 0.5),
    ]
    assert cli.ok("limits").lines[1].split()[:3] == ["key", "account:*", "1"]
    assert cli.json("limits", "remove", "account:*")["removed"] is True
    assert [*live.get_key_limits()] == ["account:42"]
    gone = cli.run("limits", "remove", "account:*")
    assert (gone.code, gone.out) == (4, "")


def test_limits_of_task_names_are_set_listed_and_removed(cli: Cli, live: TaskQueue) -> None:
    cli.ok("limits", "set", "mail", "--task-name", "--slots", "3", "--timeout", "5m")
    limits = live.get_limits()["mail"]
    assert (limits.slots, limits.rate, limits.timeout) == (3, None, 300.0)
    (listed,) = cli.json("limits")["limits"]
    assert (listed["of"], listed["key"], listed["timeout"]) == ("task name", "mail", 300.0)
    assert cli.run("limits", "remove", "mail").code == 4
    cli.ok("limits", "remove", "mail", "--task-name")
    assert live.get_limits() == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ("account:*",),
        ("account:*", "--ordered"),
        ("a*b", "--slots", "1"),
        ("", "--slots", "1"),
        ("a", "--slots", "0"),
        ("a", "--slots", "many"),
        ("a", "--rate", "-1"),
        ("a", "--slots", "1", "--through-retries"),
        ("a", "--slots", "1", "--scope", "all"),
        ("a", "--slots", "1", "--timeout", "5"),
        ("mail", "--task-name"),
        ("mail", "--task-name", "--slots", "1", "--ordered"),
        ("mail", "--task-name", "--slots", "1", "--scope", "tenant"),
    ],
)
def test_a_bad_limit_of_a_key_is_refused(
    cli: Cli, live: TaskQueue, arguments: tuple[str, ...]
) -> None:
    assert cli.run("limits", "set", *arguments).code == 2
    assert cli.json("limits")["limits"] == []


def test_what_waits_for_a_key_says_so(cli: Cli, live: TaskQueue) -> None:
    cli.ok("limits", "set", "account:*", "--slots", "1")
    push_task(cli, "--id", "first", "--limit-key", "account:42")
    push_task(cli, "--id", "second", "--limit-key", "account:42")
    claims = live.claim("w", limit=2)
    assert [claim.task.task_id for claim in claims] == ["first"]
    assert "The only slot for tasks with the key 'account:42' is taken." in (
        cli.ok("tasks", "explain", "second").out
    )
    cli.ok("limits", "remove", "account:*")
    assert claim_one(live).task.task_id == "second"


# --- pools and quotes -----------------------------------------------------------------------------


def test_pools_say_what_waits_and_who_serves_them(cli: Cli, live: TaskQueue) -> None:
    push_task(cli)
    push_task(cli, "--pool", "gpu")
    push_task(cli, "--pool", "gpu")
    listed = {each["pool"]: each for each in cli.json("pools")["pools"]}
    assert {name: each["waiting"] for name, each in listed.items()} == {"default": 1, "gpu": 2}
    assert listed["gpu"]["is_unserved"] is True
    done = cli.ok("pools")
    assert done.lines[0].split()[:2] == ["POOL", "WAITING"]
    assert "no live worker serves the pool 'gpu'" in done.err
    live.claim("w", pools=["gpu"])
    assert "pool 'gpu'" not in cli.ok("pools").err


@pytest.mark.one_partition
def test_a_quote_says_when_a_task_would_start(cli: Cli, live: TaskQueue) -> None:
    unknown = cli.json("quote", "ann")
    assert unknown["starts_about"] is None
    assert unknown["reason"] == "no worker takes such tasks"
    assert "not known: no worker takes such tasks" in cli.ok("quote", "ann").out
    fill(live, "bob", 1)
    live.finish(claim_one(live))
    known = cli.json("quote", "ann", "--tenant", "acme", "--name", "mail")
    assert known["reason"] is None
    assert known["earliest"] <= known["starts_about"] <= known["latest"]
    assert "starts at once" in cli.ok("quote", "ann").out
    live.set_tenant("acme", paused=True)
    assert cli.json("quote", "ann", "--tenant", "acme")["reason"] == "the tenant is paused"
    for bad in (("",), ("ann", "--pool", ""), ("ann", "--tenant", "no way")):
        assert cli.run("quote", *bad).code == 2


def test_explain_estimates_the_start_and_names_both_levels(cli: Cli, live: TaskQueue) -> None:
    fill_tenants(live)
    beat(live, "w")
    told = cli.json("tasks", "explain", "b1")
    (reason,) = (each for each in told["reasons"] if each["code"] == "tenant_turn")
    assert "Tenant 'acme'" in reason["text"]
    assert "among its 2 waiting users" in reason["text"]
    assert told["starts_about"] is not None
    assert "starts at once" in cli.ok("tasks", "explain", "b1").out


def test_a_schedule_has_a_flow_too(cli: Cli, live: TaskQueue) -> None:
    options: tuple[Any, ...] = ("--pool", "gpu", "--limit-key", "account:42", "--limit-key", "b")
    cli.ok(
        *("schedules", "add", "--every", "1h", "--user", "ann", "--id", "s", *options),
        *("--unique", "nightly", "--unique-for", "2h", "--expires", "10m", "--cost", "2.5"),
    )
    shown = json.loads(cli.ok("schedules", "show", "s", "-o", "json").out)
    assert {name: shown[name] for name in ("pool", "limit_keys", "unique", "expires", "cost")} == {
        "pool": "gpu",
        "limit_keys": ["account:42", "b"],
        "unique": "nightly",
        "expires": 600.0,
        "cost": 2.5,
    }
    task_id = cli.ok("schedules", "trigger", "s").out.strip()
    run = cli.json("runs", "show", task_id)
    assert (run["pool"], run["limit_keys"], run["unique"], run["cost"]) == (
        *("gpu", ["account:42", "b"], "nightly", 2.5),
    )
    cli.ok("schedules", "update", "s", "--clear", "unique")
    shown = json.loads(cli.ok("schedules", "show", "s", "-o", "json").out)
    assert (shown["unique"], shown["unique_for"]) == (None, "unfinished")
    refused = cli.run("schedules", "update", "s", "--cost", "0")
    assert (refused.code, "cost" in refused.err) == (2, True)


def test_an_unknown_tenant_is_an_error_of_the_library_too(live: TaskQueue) -> None:
    with pytest.raises(UnknownTenant):
        Inspector(live).tenants.get("nobody")
