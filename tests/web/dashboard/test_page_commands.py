"""The command lines that pages show: each is one that the program takes, and does what it says."""

import html
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from helpers.browser import Site, Web
from helpers.commands import Cli, parse
from helpers.pages import HTML
from helpers.rest import fail
from helpers.state import check_consistency
from helpers.tasks import fill, make_task

from fairqueue.access.credentials import AccessStore
from fairqueue.cli.session import Session
from fairqueue.clock import ManualClock
from fairqueue.demo.seeder import seed
from fairqueue.doctor import Doctor
from fairqueue.inspection import Inspector
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore

LISTS = (
    *(
        "/",
        "/schedules",
        "/tenants",
        "/users",
        "/runs",
        "/failed",
        "/failed?view=runs",
        "/workers",
        "/audit",
    ),
    *("/settings", "/search?q=a", "/new/schedule", "/failed/retry", "/failed/discard", "/login"),
)
FILTERED = (
    "/schedules?name_prefix=-x&text=%27q%27&user_id=--help&tenant=north&status=paused",
    "/tenants?prefix=a&window=24h",
    "/users?order=name&prefix=-a&window=24h",
    "/users?tenant=acme",
    "/runs?pool=-gpu&status=expired",
    "/runs?status=failed&status=pending&user_id=a%20b&name=-n&schedule_id=s&tenant=t&last=24h",
    "/runs?since=2026-03-05T08:00&until=2026-03-06T08:00",
    "/failed?user_id=-u&name=n&fingerprint=f&last=7d",
    "/failed/retry?user_id=-u&last=1h",
    "/audit?actor=-a&action=run.&target=--x&last=1h",
)
# What only looks: these are run.
LOOKS = ("status", "doctor", "workers", "settings", "audit")
LOOKS_OF = ("list", "show", "groups", "next", "logs")
ODD = "-odd 'one'"  # an id as it may be, which must not be taken for an option

APP = """
class Hello:
    def handle(self, payload):
        return "done"
"""


@pytest.fixture(params=["default", "mails.2", "-odd"])
def queue(
    request: pytest.FixtureRequest, redis_client: redis.Redis, clock: ManualClock
) -> Iterator[TaskQueue]:
    """A queue of the usual name, one of another name, and one whose name looks like an option."""
    with TaskQueue(redis_client, request.param, clock=clock) as queue:
        yield queue
    check_consistency(redis_client, request.param)


def commands_of(text: str) -> Iterator[str]:
    """The lines that a page shows, and those that its sentences name."""
    for line in re.findall(r'<code id="[^"]*" tabindex="0">([^<]*)</code>', text):
        if (command := html.unescape(line)).startswith("fairqueue"):
            yield command
    for sentence in re.findall(r"Start one: (?:<code>)?(fairqueue [^<]*)", text):
        yield html.unescape(sentence).strip().rstrip(".")


def read(site: Site, path: str) -> list[str]:
    answer = site.http.get(path, headers=HTML)
    assert answer.status_code == 200, path
    return list(commands_of(answer.text))


def check(command: str, queue: TaskQueue) -> None:
    """That the program takes a line: whoever copies it must not get an error of usage.

    And that it is for this queue, which it names only if its name is not the usual one.
    """
    words = shlex.split(command)
    assert words[0] == "fairqueue"
    try:
        context = parse(words[1:])
    except Exception as error:
        raise AssertionError(f"{command}: {error}") from error
    assert context.ensure_object(Session).queue == queue.name, command
    assert ("--queue" in command) == (queue.name != "default"), command


def arguments_of(command: str, queue: TaskQueue) -> list[str]:
    """The words of a line, without those that say which queue is meant."""
    words = shlex.split(command)[1:]
    named = {"default": [], "mails.2": ["--queue", "mails.2"], "-odd": ["--queue=-odd"]}[queue.name]
    assert words[: len(named)] == named, command
    return words[len(named) :]


@pytest.mark.parametrize("path", LISTS)
def test_the_commands_of_empty_pages_are_ones(web: Web, queue: TaskQueue, path: str) -> None:
    found = read(web(), path)
    assert found or path.startswith(("/search", "/failed/"))  # where nothing is to be done
    for command in found:
        check(command, queue)


@pytest.fixture
def busy(queue: TaskQueue) -> TaskQueue:
    """A queue with some of everything: of odd names, too."""
    seed(queue)
    inspector = Inspector(queue)
    inspector.schedules.add(schedule_id=ODD, cron_expr="0 9 * * *", user_id=ODD)
    inspector.schedules.trigger(ODD)
    inspector.users.set(ODD, weight=2)
    fill(queue, "alice", 3)
    queue.push(make_task("bob", "run-1", name="mails.send"))
    WorkerStore(queue.link).beat({"host": "h"}, "w-1")
    AccessStore(queue.link).create_key("ci", "viewer", by="test")
    queue.set_limits("mails.send", slots=2)
    queue.push(make_task(ODD, "odd-1", tenant="acme", pool="-odd 'pool'", limit_keys=[ODD]))
    queue.set_limit(f"{ODD}*", slots=2)
    return queue


def pages_of(queue: TaskQueue) -> Iterator[str]:
    """The pages of single things, in each state that changes what they show."""
    inspector = Inspector(queue)
    yield from ("/users/alice", f"/users/{ODD}", f"/schedules/{ODD}", "/runs/run-1")
    yield from ("/tenants/acme", f"/users/{ODD}?tenant=acme", "/runs/odd-1")
    for run in (*inspector.failed.list(limit=2), *inspector.runs.list("succeeded", limit=2)):
        yield f"/runs/{run.task_id}"
    for is_active in (True, False):
        for view in inspector.schedules.list(is_active=is_active, limit=2):
            yield f"/schedules/{view.schedule.schedule_id}"
            yield f"/do/schedules/edit?id={view.schedule.schedule_id}"
    for kind in ("limits", "purge", "pause"):
        yield f"/ask/users/{kind}?id=alice"
        yield f"/ask/users/{kind}?id={ODD}&tenant=acme"
        yield f"/ask/tenants/{kind}?id=acme"
    yield f"/ask/users/move?id={ODD}&tenant=acme"
    start, end = "2020-01-01T00:00", "2020-01-02T00:00"
    yield f"/do/schedules/count-backfill?id={ODD}&start={start}&end={end}"


def test_the_commands_of_all_pages_are_ones(site: Site, busy: TaskQueue) -> None:
    found: set[str] = set()
    for path in (*LISTS, *FILTERED, *pages_of(busy)):
        found |= set(read(site, path))
    for kind in ("pause", "resume", "trigger", "remove"):
        for chosen in ({"id": [ODD, "b"]}, {"all": "1", "user_id": "-u"}):
            answer = site.http.post(f"/do/schedules/ask/{kind}", data=chosen, headers=HTML)
            found |= set(commands_of(answer.text))
    assert len(found) > 50
    for command in sorted(found):
        check(command, busy)


def test_the_commands_that_only_look_end_well(web: Web, busy: TaskQueue, redis_url: str) -> None:
    site, cli = web(), Cli(redis_url)
    found = {each for path in (*LISTS, *pages_of(busy)) for each in read(site, path)}
    ran = 0
    for command in sorted(found):
        words = arguments_of(command, busy)
        if words in [[each] for each in LOOKS] or set(words[1:2]) & set(LOOKS_OF):
            done = cli.run(*shlex.split(command)[1:])
            assert done.code in (0, 6), command  # 6: the doctor has something to say
            ran += 1
    assert ran > 10


def test_the_worker_that_pages_tell_to_start_runs_tasks(
    web: Web, queue: TaskQueue, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(APP)
    lines = read(web(), "/workers")
    (line,) = [each for each in lines if arguments_of(each, queue)[0] == "worker"]
    task = queue.push(make_task("alice", name="tasks.Hello"))
    words = [*shlex.split(line)[1:], "--burst", "--url", redis_url]
    program = [sys.executable, "-m", "fairqueue", *words]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Inspector(queue).runs.get(task).run.status == "succeeded"


def test_a_failed_run_tells_commands_that_are_ones(web: Web, queue: TaskQueue) -> None:
    queue.push(make_task("alice", "run-1", payload={"to": "it's", "token": "x"}))
    fail(queue)
    for command in read(web(), "/runs/run-1"):
        check(command, queue)


def test_the_commands_that_change_something_change_this_queue(
    web: Web, queue: TaskQueue, redis_url: str
) -> None:
    (line,) = [each for each in read(web(), "/runs") if " push " in each]
    Cli(redis_url).ok(*shlex.split(line)[1:])
    assert queue.inspect().ready == 1
    (text,) = [each.text for each in Inspector(queue).system.attention() if each.kind == "workers"]
    check(text.partition("Start one: ")[2], queue)


def test_the_commands_that_the_doctor_tells_are_for_its_queue(queue: TaskQueue) -> None:
    Inspector(queue).schedules.add(cron_expr="0 9 * * *", user_id="ann")
    queue.push(make_task())
    told = {each.check: each.text for each in Doctor(queue).examine(records=False)}
    check(told["leader"].partition("fire: ")[2], queue)
    check(told["workers"].partition("alive: ")[2], queue)
