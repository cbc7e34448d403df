"""The queue as a whole on the command line: status, stats, keys, audit, doctor and the others."""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.commands import Cli
from helpers.state import dump
from helpers.tasks import beat, claim_one, fill, push
from prometheus_client import CollectorRegistry

import fairqueue.metrics.collectors
import fairqueue.web.server
from fairqueue.cli.apps import load_worker
from fairqueue.cli.top import Look, lines_of, looks
from fairqueue.models import new_id
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler


@pytest.fixture
def cli(redis_url: str, live: TaskQueue) -> Cli:
    return Cli(redis_url)


# --- status, stats, top ---------------------------------------------------------------------------


def test_status_is_healthy_or_says_what_is_wrong(cli: Cli, live: TaskQueue) -> None:
    done = cli.ok("status")
    assert "waiting" in done.out
    push(live, "a")
    sick = cli.run("status")
    assert (sick.code, "error: no worker is alive: 1 task waits" in sick.out) == (6, True)
    document = cli.run("status", "--json").json
    assert document["overview"]["ready"] == 1
    assert "workers" in [each["kind"] for each in document["attention"]]


def test_stats_has_counts_and_counters(cli: Cli, live: TaskQueue) -> None:
    push(live, "a", "b")
    live.finish(claim_one(live))
    document = cli.json("stats")
    assert (document["ready"], document["counters"]["finished"]) == (1, 1)
    assert any(line.split() == ["finished", "1"] for line in cli.ok("stats").lines)


def test_stats_are_watched_for_a_while(cli: Cli, live: TaskQueue) -> None:
    push(live, "a")
    lines = cli.ok("stats", "--watch", "--count", "2", "--interval", "1ms").lines
    assert [line.split()[1] for line in lines] == ["ready", "1", "1"]
    objects = cli.ok(
        *("stats", "--watch", "--count", "2", "--interval", "1ms", "-o", "jsonl")
    ).objects
    assert [each["ready"] for each in objects] == [1, 1]
    assert objects[0]["pushed/s"] is None


def test_top_prints_lines_where_there_is_no_terminal(cli: Cli, live: TaskQueue) -> None:
    fill(live, "alice", 3)
    beat(live, names=["mail"], current=["a"], running=1)
    done = cli.ok("top", "--count", "2", "--interval", "1ms")
    assert len(done.lines) == 2
    assert "waiting 3" in done.lines[0]
    assert done.lines[0].endswith("leader -; alice 3")
    (document,) = cli.ok("top", "--count", "1", "-o", "jsonl").objects
    assert (document["workers"], document["users"][0]["backlog"]) == (1, 3)
    assert cli.run("top", "--users", "0").code == 2


def test_top_fills_the_screen_and_no_more(cli: Cli, live: TaskQueue) -> None:
    from fairqueue.inspection import Inspector

    fill(live, "alice\u202e", 3)
    fill(live, "bob", 1)
    beat(live, names=["mail"], current=["a"], running=1)
    inspector = Inspector(live)
    look = Look(
        snapshot=live.inspect(),
        users=inspector.users.list(),
        workers=inspector.workers.list(),
        finished=None,
        pushed=1.5,
    )
    lines = lines_of(look, columns=60, rows=6)
    assert len(lines) <= 6
    assert max(map(len, lines)) <= 60
    head = " ".join(lines_of(look, columns=80, rows=30)).split("USER")[0]
    assert "oldest wait" in head
    assert "leader -," in head
    text = "\n".join(lines_of(look, columns=200, rows=30))
    assert "alice\\u202e" in text
    assert "pushed/s 1.5" in text
    assert "w 1/4" in text


def flow(live: TaskQueue) -> None:
    """Tenants, a pool without workers, and tasks that wait for a key."""
    live.set_limit("account:7", slots=1)
    for tenant in ("acme", "globex"):
        push(live, f"{tenant}-1", f"{tenant}-2", user_id="ann", tenant=tenant)
    push(live, "render", user_id="carol", pool="gpu")
    push(live, "k-1", "k-2", user_id="dora", pool="keys", limit_keys=["account:7"])
    live.set_tenant("globex", paused=True)
    beat(live, names=["*"], pools=["default", "keys"])
    live.claim("w", limit=2, pools=["keys"])


def test_status_shows_tenants_pools_and_limits(cli: Cli, live: TaskQueue) -> None:
    flow(live)
    done = cli.ok("status")
    rows = [line.split() for line in done.lines]
    assert ["tenants", "with", "tasks", "2,", "1", "held", "back"] in rows
    assert ["waiting", "for", "limits", "1"] in rows
    pools = rows.index(["POOL", "WAITING", "OLDEST", "WAIT", "WORKERS", "SLOTS", "RUNNING"])
    assert rows[pools + 1][:2] == ["default", "4"]
    assert ["gpu", "1"] in [row[:2] for row in rows]
    assert "warning: no live worker serves the pool 'gpu': a task waits. Start one" in done.out
    document = cli.json("status")
    assert [each["is_unserved"] for each in document["pools"]] == [False, True, False]


def test_status_of_a_plain_queue_has_no_pools(cli: Cli, live: TaskQueue) -> None:
    push(live, "a")
    beat(live)
    done = cli.ok("status")
    assert "POOL" not in done.out
    assert "tenants" not in done.out


def test_status_says_that_tasks_expired(cli: Cli, live: TaskQueue) -> None:
    push(live, "a", expires=0.001)
    push(live, "b", delay=0.01)
    beat(live)
    while live.inspect().delayed:
        live.claim("w")
    attention = cli.run("status", "--json").json["attention"]
    assert {each["kind"] for each in attention} == {"expired"}


def test_top_shows_tenants_and_pools(cli: Cli, live: TaskQueue) -> None:
    from fairqueue.inspection import Inspector

    flow(live)
    (line,) = cli.ok("top", "--count", "1").lines
    assert "held 1, tenants 2" in line
    assert "ann of acme 2" in line
    (document,) = cli.ok("top", "--count", "1", "-o", "jsonl").objects
    assert {each["pool"]: each["waiting"] for each in document["pools"]} == {
        "default": 4,
        "gpu": 1,
        "keys": 1,
    }
    inspector = Inspector(live)
    (look,) = islice(looks(inspector, 9), 1)
    lines = lines_of(look, columns=200, rows=30)
    assert ["USER", "TENANT", "STATE"] in [each.split()[:3] for each in lines]
    assert ["ann", "globex"] in [each.split()[:2] for each in lines]
    assert lines[-2] == (
        "pools: default 4 waiting, 1 worker; gpu 1 waiting, no worker; keys 1 waiting, 1 worker"
    )
    assert max(map(len, lines_of(look, columns=60, rows=10))) <= 60
    assert len(lines_of(look, columns=60, rows=10)) <= 10


def test_metrics_of_named_tenants_are_printed(cli: Cli, live: TaskQueue) -> None:
    flow(live)
    plain = cli.ok("metrics").out
    assert 'fairqueue_pool_waiting{pool="gpu",queue="default"} 1.0' in plain
    assert "tenant=" not in plain
    named = cli.ok("metrics", "--tenant", "acme", "--tenant", "nobody").out
    assert 'fairqueue_tenant_waiting{queue="default",tenant="acme"} 2.0' in named
    assert 'fairqueue_tenant_waiting{queue="default",tenant="nobody"} 0.0' in named
    assert "globex" not in named
    done = cli.run("metrics", "--tenant", "a b")
    assert (done.code, "tenant must be 1 to 64 letters" in done.err) == (2, True)


# --- settings, keys, audit, workers, prune --------------------------------------------------------


def test_settings_are_shown_and_changed(cli: Cli, live: TaskQueue) -> None:
    live.set_limits("mail", slots=3)
    assert any(line.split() == ["max_attempts", "5"] for line in cli.ok("settings").lines)
    done = cli.run("settings", "keep_dead_for=7")
    assert (done.code, "keep_dead_for '7' needs a unit" in done.err) == (2, True)
    document = cli.json("settings", "max_attempts=7", "keep_dead_for=2d", "cost=time")
    assert (document["settings"]["max_attempts"], document["limits"]["mail"]["slots"]) == (7, 3)
    settings = live.settings()
    assert (settings.max_attempts, settings.keep_dead_for, settings.cost) == (7, 172_800, "time")
    shown = cli.ok("settings")
    assert "mail" in shown.out
    assert any(line.split() == ["keep_dead_for", "2d"] for line in shown.lines)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("max_attempts", "setting 'max_attempts' must be NAME=VALUE"),
        ("=3", "setting '=3' must be NAME=VALUE"),
        ("max_attempts=0", "max_attempts must be"),
        ("odd=1", "odd"),
        ("cost=odd", "cost must be 'tasks' or 'time', not 'odd'"),
    ],
)
def test_a_bad_setting_is_refused(cli: Cli, live: TaskQueue, change: str, words: str) -> None:
    before = live.settings()
    refused = cli.run("settings", change)
    assert (refused.code, words in refused.err) == (2, True)
    assert live.settings() == before


def test_a_key_is_made_and_revoked(cli: Cli, live: TaskQueue, redis_client: redis.Redis) -> None:
    done = cli.ok("keys", "create", "ci", "--role", "operator", "--tenant", "north")
    secret = done.out.strip()
    assert secret.startswith("fq_")
    (key,) = cli.json("keys")["keys"]
    assert (key["name"], key["role"], key["tenant"]) == ("ci", "operator", "north")
    assert secret not in str(dump(redis_client)) + cli.ok("keys").out + str(key)
    made = cli.json("keys", "create", "other", "--expires-in", "2d")
    assert (made["secret"].startswith("fq_"), made["role"]) == (True, "viewer")
    assert cli.run("keys", "revoke", key["key_id"]).code == 2
    assert "would revoke" in cli.ok("keys", "revoke", key["key_id"], "--dry-run").err
    cli.ok("keys", "revoke", key["key_id"], "--yes")
    assert [each["name"] for each in cli.json("keys")["keys"]] == ["other"]
    assert cli.run("keys", "revoke", key["key_id"], "--yes").code == 4
    assert cli.run("keys", "create", "x", "--role", "king").code == 2


def test_audit_says_who_changed_what(cli: Cli, live: TaskQueue) -> None:
    cli.ok("users", "pause", "alice")
    cli.ok("tasks", "push", "--user", "bob", "--id", "a")
    entries = cli.json("audit")["entries"]
    assert [(each["action"], each["target"]) for each in entries] == [
        ("task.push", "a"),
        ("user.pause", "alice"),
    ]
    assert {each["via"] for each in entries} == {"cli"}
    assert [each["target"] for each in cli.json("audit", "--action", "user")["entries"]] == [
        "alice"
    ]
    assert cli.json("audit", "--until", "1d")["entries"] == []
    assert "user.pause" in cli.ok("audit", "--since", "1h").out
    assert cli.run("audit", "--cursor", "nonsense").code == 2


def test_workers_are_listed_and_drained(cli: Cli, live: TaskQueue) -> None:
    none = cli.ok("workers")
    assert (none.out[:2], "no worker is alive" in none.err) == ("ID", True)
    beat(live, names=["mail"], current=["a"], running=1)
    (worker,) = cli.json("workers")["workers"]
    assert (worker["worker_id"], worker["slots"], worker["names"]) == ("w", 4, ["mail"])
    assert cli.run("workers", "drain", "w").code == 2
    assert "would drain worker 'w'" in cli.ok("workers", "drain", "w", "--dry-run").err
    cli.ok("workers", "drain", "w", "--yes")
    assert cli.json("audit")["entries"][0]["action"] == "worker.drain"
    assert cli.run("workers", "drain", "ghost", "--yes").code == 4


def test_prune_forgets_old_runs_and_prints_how_many(cli: Cli, live: TaskQueue) -> None:
    push(live, "a", "b")
    for claim in live.claim("w", limit=2):
        live.finish(claim)
    assert cli.ok("prune", "--older-than", "1d", "--yes").out == "0\n"
    assert cli.run("prune", "--older-than", "0").code == 2
    assert cli.ok("prune", "--older-than", "0", "--dry-run").out == "2\n"
    assert live.get("a") is not None
    assert cli.ok("prune", "--older-than", "0", "--yes").out == "2\n"
    assert live.get("a") is None
    assert cli.json("prune", "--older-than", "0") == {"forgotten": 0, "dry_run": False}
    assert cli.run("prune").code == 2
    assert cli.run("prune", "--older-than", "long").code == 2
    done = cli.run("prune", "--older-than", "7", "--yes")
    assert (done.code, "'7' needs a unit, for example 7d, 7h or 7s" in done.err) == (2, True)


# --- doctor, bench, metrics -----------------------------------------------------------------------


def test_doctor_finds_and_repairs(cli: Cli, live: TaskQueue, redis_client: redis.Redis) -> None:
    beat(live, names=["mail"], current=["a"], running=1)
    push(live, "a")
    healthy = cli.ok("doctor")
    assert healthy.out.startswith("CHECK")
    assert "repaired" not in healthy.err
    redis_client.delete(*(part.keys["waiting"] for part in live.link.parts or (live.link,)))
    sick = cli.run("doctor")
    assert (sick.code, "1 entry can be repaired: fairqueue doctor --fix" in sick.err) == (6, True)
    document = cli.run("doctor", "-o", "json").json
    levels = {each["check"]: each["level"] for each in document["findings"]}
    assert levels["records: status"] == "problem"
    assert cli.run("doctor", "--fix").code == 2  # nobody to ask
    assert cli.run("doctor", "--fix", "--dry-run").code == 6
    assert cli.run("doctor", "--quick").code == 0
    assert cli.run("doctor", "--quick", "--fix").code == 2
    done = cli.ok("doctor", "--fix", "--yes")
    assert "repaired" in done.out
    assert cli.ok("doctor").code == 0


def test_bench_has_its_own_queue(cli: Cli, live: TaskQueue, redis_client: redis.Redis) -> None:
    push(live, "kept")
    figures = cli.json("bench", "--tasks", "20")["figures"]
    assert [each["what"] for each in figures][:3] == ["ping", "push, one by one", "push_many"]
    assert all(each["per_second"] > 0 for each in figures)
    assert all(key.startswith(b"{fairqueue:default") for key in redis_client.scan_iter())
    assert "push_many" in cli.ok("bench", "--tasks", "10").out
    assert cli.run("bench", "--tasks", "1").code == 2


def test_metrics_whose_thread_has_died_end_with_an_error(
    cli: Cli, live: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairqueue.metrics.collectors._Server, "serve_forever", lambda *_: None)
    done = cli.run("metrics", "--port", "0")
    assert (done.code, "has ended" in done.err) == (1, True)


def test_a_dashboard_whose_thread_has_died_ends_with_an_error(
    cli: Cli, live: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fairqueue.web.server._WebUvicorn, "run", lambda _, sockets: sockets[0].close()
    )
    done = cli.run("dashboard", "--port", "0")
    assert (done.code, "has ended" in done.err) == (1, True)


def test_metrics_are_printed_once_without_a_port(cli: Cli, live: TaskQueue) -> None:
    push(live, "a")
    text = cli.ok("metrics").out
    assert 'fairqueue_ready{queue="default"} 1.0' in text
    assert cli.run("metrics", "--port", "-1").code == 2


def test_the_leader_is_shown(cli: Cli, live: TaskQueue) -> None:
    scheduler = TaskScheduler(live, "observer", registry=CollectorRegistry())
    scheduler.tick()
    assert "observer (term 1" in cli.ok("status").out
    assert cli.ok("top", "--count", "1").out.strip().endswith("leader observer; nobody is waiting")
    scheduler.stop()


# --- apps, up and demo ----------------------------------------------------------------------------

MODULE = """
from fairqueue import TaskQueue, Worker

made = Worker(TaskQueue.from_url("redis://127.0.0.1:1/0"))

def make(queue, concurrency=2):
    return Worker(queue, concurrency=concurrency)

def any_setting(queue, **settings):
    return Worker(queue, **settings)

class Space:
    make = staticmethod(make)

class Greet:
    def handle(self, payload):
        return None

def nothing(queue):
    return None

def needs_more(queue, folder):
    return Worker(queue)

def needs_none():
    return Worker(None)

def fails(queue):
    raise LookupError("no such setting")

number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the folder where the program runs; its name is new each time."""
    name = f"jobs_{new_id()}"
    (tmp_path / f"{name}.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / f"{name}_broken.py").write_text("import no_such_module_at_all", encoding="utf-8")
    (tmp_path / f"{name}_wrong.py").write_text("1 / 0", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name
    for each in [each for each in sys.modules if each.startswith(name)]:
        del sys.modules[each]


@pytest.mark.parametrize(
    ("place", "settings", "slots"),
    [
        (":make", {}, 2),
        (":make", {"concurrency": 3}, 3),
        (":Space.make", {"concurrency": 4}, 4),
        (":any_setting", {"concurrency": 5, "lease": 60}, 5),
        (":made", {}, 8),
        ("", {"concurrency": 6}, 6),
    ],
)
def test_an_app_is_a_worker_a_function_or_a_module(
    live: TaskQueue, module: str, place: str, settings: dict[str, Any], slots: int
) -> None:
    worker = load_worker(module + place, live, settings)
    assert worker.concurrency == slots
    assert (worker.queue is live) == (place != ":made")
    assert worker.lease == settings.get("lease", 30)


@pytest.mark.parametrize(
    ("app", "options", "named"),
    [
        ("none_at_all:make", "", "there is no module 'none_at_all'"),
        ("{}.inner:make", "", "inner"),
        ("{}:missing", "", "has no 'missing'"),
        ("{}:number", "", "must be a Worker, or a function that returns one, not an int"),
        ("{}:nothing", "", "must be a Worker, or a function that returns one, not None"),
        ("{}:needs_more", "", "missing 1 required positional argument: 'folder'"),
        ("{}:needs_none", "", "takes 0 positional arguments but 1 was given"),
        ("{}:fails", "", "was called and raised LookupError('no such setting')"),
        ("", "", "must name a module, for example myapp.jobs:make_worker"),
        ("{}_broken:make", "", "no_such_module_at_all"),
        ("{}_wrong:make", "", "ZeroDivisionError"),
        (":make", "", "must name a module"),
        ("tasks.py", "", "'tasks.py' is a file: name the module, 'tasks'"),
        ("./jobs/mail.py:make", "", "is a file: name the module, 'jobs.mail'"),
        ("{}:make", "--processes 2", "does not accept processes"),
        ("{}:make", "--pool gpu", "does not accept pools, so --pool cannot be given"),
        ("{}:any_setting", "--pool=", "pool must be a string of 1 to 200 characters"),
        ("{}:made", "--concurrency 2", "is a Worker object"),
        ("{}:make", "--concurrency 0", "concurrency must be a whole number from 1 to 250, not 0"),
    ],
)
def test_an_app_that_is_none_is_told(
    cli: Cli, module: str, app: str, options: str, named: str
) -> None:
    done = cli.run("worker", "--app", app.format(module), *options.split())
    assert (done.code, done.out) == (2, "")
    assert named in done.err
    assert "Traceback" not in done.err


def test_up_tells_what_an_app_raises(cli: Cli, module: str) -> None:
    done = cli.run("up", "--port", "0", "--app", f"{module}:fails")
    assert (done.code, done.out) == (2, "")
    assert "--app" in done.err
    assert "was called and raised LookupError('no such setting')" in done.err


def test_a_worker_without_its_redis_ends_at_once(cli: Cli, module: str) -> None:
    assert cli.run("worker", "--app", f"{module}:made").code == 3
    assert cli.run("worker").code == 2


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `fairqueue.service.run` is called with, instead of being run."""
    called: list[dict[str, Any]] = []

    def run(**options: Any) -> int:
        called.append(options)
        return 6

    monkeypatch.setattr("fairqueue.service.run", run)
    return called


def test_up_runs_everything_and_its_code_is_the_programs(
    cli: Cli, redis_url: str, live: TaskQueue, module: str, runs: list[dict[str, Any]]
) -> None:
    line = f"up --app {module}:make --port 0 --workers 2 --queue mail --seconds 1m --open"
    assert cli.run(*line.split()).code == 6
    (options,) = runs
    assert options.pop("app")(live, {"concurrency": 8}).concurrency == 2
    assert options == {
        "url": redis_url,
        "embedded_path": None,
        "queue": "mail",
        "host": "127.0.0.1",
        "port": 0,
        "workers": 2,
        "demo": False,
        "seconds": 60,
        "schedulers": 1,
        "open_browser": True,
        "metrics_host": "127.0.0.1",
        "metrics_port": None,
    }
    assert cli.run("up", "--app", "none_at_all:make").code == 2
    assert len(runs) == 1


def test_up_gives_an_app_the_concurrency_that_was_asked_for(
    cli: Cli, live: TaskQueue, module: str, runs: list[dict[str, Any]]
) -> None:
    cli.run("up", "--app", f"{module}:make", "--concurrency", "3")
    (options,) = runs
    assert options["concurrency"] == 3
    assert options["app"](live, {}).concurrency == 3


def test_a_cluster_of_its_own_excludes_other_servers(cli: Cli, runs: list[Any]) -> None:
    for other in (("--url", "redis://h"), ("--embedded", "x")):
        done = cli.run("up", "--demo", "--cluster", *other)
        assert (done.code, "--cluster starts servers of its own" in done.err) == (2, True)
    assert runs == []


def test_up_gives_an_app_its_pools(
    cli: Cli, live: TaskQueue, module: str, runs: list[dict[str, Any]]
) -> None:
    cli.run("up", "--app", f"{module}:any_setting", "--pool", "gpu", "--pool", "default")
    (options,) = runs
    assert options["app"](live, {}).pools == ("default", "gpu")
    done = cli.run("up", "--pool", "gpu")
    assert (done.code, "--pool 'gpu' needs --app" in done.err) == (2, True)
    done = cli.run("up", "--demo", "--pool", "gpu")
    assert (done.code, "--pool 'gpu' needs --app" in done.err) == (2, True)
    assert len(runs) == 1


def test_up_refuses_workers_with_a_queue(cli: Cli, module: str, runs: list[dict[str, Any]]) -> None:
    done = cli.run("up", "--app", f"{module}:made")
    assert (done.code, runs) == (2, [])
    assert "def make_worker(queue)" in done.err


def test_up_in_a_folder_and_demo_without_a_url_need_no_redis(
    cli: Cli, tmp_path: Path, redis_url: str, runs: list[dict[str, Any]]
) -> None:
    cli.run("up", "--embedded", str(tmp_path))
    cli.run("demo", "--seconds", "2")
    cli.run("up", "--demo")
    cli.run("demo", "--url", redis_url)
    told = [(each["url"], each["embedded_path"], each["demo"]) for each in runs]
    assert told == [
        (None, str(tmp_path), False),
        (None, None, True),
        (None, None, True),
        (redis_url, None, True),
    ]
    assert cli.run("up", "--demo", "--app", "handlers:make").code == 2
    assert len(runs) == 4


def test_without_the_web_packages_they_are_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fairqueue.web", None)
    done = cli.run("dashboard")
    assert (done.code, "pip install 'fairqueue[web,embedded]'" in done.err) == (2, True)
