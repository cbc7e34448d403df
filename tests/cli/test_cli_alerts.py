"""Whom the programs tell what goes wrong: options, and real processes with a real webhook."""

import json
import textwrap
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.commands import Cli
from helpers.processes import Start, line_of
from helpers.schedules import add, tamper
from helpers.tasks import push
from helpers.waiting import eventually

from fairqueue.alerts import AlertLimits, Alerts
from fairqueue.cli.alert_options import _limits
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler

NAMES = ("alert_jobs", "alert_app")


class Hook:
    """A webhook at this machine, and what it was told."""

    def __init__(self) -> None:
        told: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self.told = told
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def kinds(self) -> set[str]:
        return {alert["kind"] for alert in self.told}


@pytest.fixture
def hook() -> Iterator[Hook]:
    """A webhook that takes everything."""
    hook = Hook()
    yield hook
    hook.server.shutdown()
    hook.server.server_close()


@pytest.fixture
def spoil(live: TaskQueue, redis_client: redis.Redis) -> Callable[[], None]:
    """Store a schedule whose rule nobody can read, which is due."""

    def spoil() -> None:
        scheduler = TaskScheduler(live)
        add(scheduler, "spoilt", cron_expr="* * * * * *")
        tamper(redis_client, live, "spoilt", cron_expr="nonsense")

    return spoil


APP = textwrap.dedent(
    """
    from fairqueue import Alerts, Worker
    from fairqueue.alerts import WebhookRecipient

    URL = {url!r}

    def make_alerts():
        return Alerts([WebhookRecipient(URL, allow_http=True)])

    def make(queue, alerts=None):
        worker = Worker(queue, alerts=alerts)

        @worker.task("fail", retries=0)
        def fail(payload):
            raise ValueError("it does")

        return worker

    def make_with_its_own(queue):
        return make(queue, make_alerts())

    def silent(queue):
        return make(queue)

    class Fail:
        retries = 0

        def handle(self, payload):
            raise ValueError("it does")
    """
)


@pytest.fixture
def app(tmp_path: Path, hook: Hook) -> str:
    """A module in the folder where the commands run."""
    (tmp_path / "alert_app.py").write_text(APP.format(url=hook.url), encoding="utf-8")
    return "alert_app"


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("options", ["--alert-webhook {url}", "--alerts {app}:make_alerts"])
def test_a_scheduler_of_the_command_line_tells_a_webhook(
    start: Start, hook: Hook, app: str, spoil: Callable[[], None], options: str
) -> None:
    spoil()
    process = start("scheduler", *options.format(url=hook.url, app=app).split())
    eventually(lambda: "schedule_disabled" in hook.kinds, "the webhook was told", within=60)
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.processes
def test_what_waits_is_told_before_a_scheduler_of_cron_ends(
    start: Start, live: TaskQueue, hook: Hook, spoil: Callable[[], None]
) -> None:
    spoil()
    eventually(lambda: live.inspect().overdue > 0, "it is due")
    assert start("scheduler", "--once", "--alert-webhook", hook.url).wait(60) == 1
    assert hook.kinds == {"schedule_disabled"}


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", ["--app {app}:make --alert-webhook {url}", "--app {app}:make_with_its_own"]
)
def test_scheduler_and_workers_of_up_share_their_alerts(
    start: Start, live: TaskQueue, hook: Hook, app: str, spoil: Callable[[], None], options: str
) -> None:
    spoil()
    push(live, "t", name="fail")
    process = start("up", "--port", "0", *options.format(app=app, url=hook.url).split())
    line_of(process, "Dashboard")
    wanted = {"schedule_disabled", "task_failed"}
    eventually(lambda: wanted <= hook.kinds, "both have told it", within=60)
    process.terminate()
    assert process.wait(60) == 0


@pytest.mark.processes
def test_class_workers_tell_webhooks(start: Start, live: TaskQueue, hook: Hook, app: str) -> None:
    push(live, "t", name="alert_app.Fail")
    done = start("worker", "--app", app, "--burst", "--alert-webhook", hook.url)
    assert done.wait(60) == 0
    assert hook.kinds == {"task_failed"}


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--alerts nowhere_at_all", "no module 'nowhere_at_all'"),
        ("--alerts json", "json has no 'alerts'; expected an Alerts"),
        ("--alerts json:dumps.x", "has no 'dumps.x'"),
        ("--alerts os:getcwd", "must be an Alerts, or a function that returns one, not a str"),
        ("--alerts json:dumps", 'was called and raised TypeError("dumps() missing 1 required'),
        ("--alerts json:", "json has no ''; expected an Alerts"),
        ("--alerts=", "must name a module, for example myapp.ops:alerts"),
        ("--alerts json:alerts --alert-log", "own recipients and limits: remove --alert-webhook"),
        ("--alerts json:alerts --alert-limit backlog=5", "remove --alert-webhook, --alert-log and"),
        ("--alert-limit backlog=5", "needs --alert-webhook or --alert-log, which say where"),
        (
            "--alert-log --alert-limit backlogs=5",
            "'backlogs' is not a limit: use one of error_rate",
        ),
        ("--alert-log --alert-limit backlog", "'backlog' must be NAME=VALUE"),
        ("--alert-log --alert-limit backlog=much", "backlog=much must be a number, a duration"),
        ("--alert-log --alert-limit backlog=0.5", "backlog must be a whole number"),
        ("--alert-log --alert-limit quiet=off", "quiet must be a number"),
        ("--alert-webhook ftp://x", "webhook"),
        ("--alert-webhook @/nowhere/file", "cannot be read"),
    ],
)
@pytest.mark.parametrize("command", ["scheduler", "up", "worker --app json"])
def test_unusable_alerts_are_named(redis_url: str, command: str, options: str, named: str) -> None:
    done = Cli(redis_url).run(*command.split(), *options.split())
    assert (done.code, done.out) == (2, "")
    assert named in done.err
    assert "Traceback" not in done.err


def test_an_app_that_takes_no_alerts_is_told_so(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silent_app.py").write_text(APP.format(url="https://x"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    done = Cli(redis_url).run("worker", "--app", "silent_app:silent", "--alert-log")
    assert done.code == 2
    assert (
        "does not accept alerts, so --alerts, --alert-webhook, --alert-log cannot be given"
        in done.err
    )


def test_a_url_may_stand_in_a_file(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hook").write_text("https://example.org/secret\n", encoding="utf-8")
    given: list[Any] = []

    def run(**options: Any) -> int:
        given.append(options["alerts"])
        return 0

    monkeypatch.setattr("fairqueue.service.run", run)
    line = ["up", "--alert-webhook", f"@{tmp_path / 'hook'}", "--alert-log"]
    Cli(redis_url).ok(*line)
    Cli(redis_url).ok("up", "--alert-log")
    told = [str(each) for each in given if isinstance(each, Alerts)]
    assert told == [
        "Alerts([WebhookRecipient('https://example.org'), LogRecipient('fairqueue.alerts')])",
        "Alerts([LogRecipient('fairqueue.alerts')])",
    ]


def test_limits_of_alerts_are_numbers_durations_or_off() -> None:
    given = ("backlog=50000", "error_rate=0.25", "pool_unserved=5m", "lateness=off", "window=90")
    limits = _limits(given)
    assert limits == AlertLimits(
        backlog=50_000, error_rate=0.25, pool_unserved=300, lateness=None, window=90
    )
