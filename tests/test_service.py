"""All of FairQueue as one program: where it says it is, how it ends, and that nothing is left."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from helpers.tasks import info_of, make_task
from helpers.waiting import eventually
from helpers.world import World

from fairqueue.access.credentials import AccessStore
from fairqueue.errors import (
    ConfigurationError,
    EmbeddedServerError,
    FairQueueError,
    RedisUnavailable,
)
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime import embedded
from fairqueue.runtime.processes import ProcessGroup
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.service import run
from fairqueue.worker.worker import Worker

WITHIN = 60.0  # seconds after which a test gives up waiting
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

PROGRAM = """
import json, sys
from fairqueue.service import run
sys.exit(run(**json.loads(sys.argv[1])))
"""
# With an app whose tasks wait until a file is there.
WITH_APP = """
import json, os, sys, threading
from fairqueue import Worker
from fairqueue.service import run

def work(payload):
    while not os.path.exists(payload.get("until", "/")):
        threading.Event().wait(0.01)

def make(queue, settings):
    worker = Worker(queue, **settings)
    worker.register("default", work)
    return worker

sys.exit(run(app=make, **json.loads(sys.argv[1])))
"""


@contextmanager
def started(
    program: str = PROGRAM, stdout: int = subprocess.PIPE, **options: object
) -> Iterator["subprocess.Popen[str]"]:
    """The program as a process; killed if the test leaves it running."""
    options = {"port": 0, **options}
    process = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(options)],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONUTF8": "1", "TERM": "xterm"},
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def next_line(process: "subprocess.Popen[str]", start: str) -> str:
    """What follows this beginning, in the next line that has it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line.removeprefix(start).strip()
    raise AssertionError(f"it ended without saying {start!r}")


def busy_line(process: "subprocess.Popen[str]") -> str:
    """The next line of a demo that has begun to work."""
    while not re.match(r"[1-9]\d* tasks/s", line := next_line(process, " ").partition(" | ")[2]):
        pass
    return line


def where(process: "subprocess.Popen[str]") -> tuple[str, str, str]:
    """The address of the dashboard, the secret of the login link, and the URL of Redis."""
    base = next_line(process, "Dashboard")
    link = next_line(process, "Log in").split()[0]
    assert link.startswith(f"{base}/login?token=")
    return base, link.partition("token=")[2], next_line(process, "Redis")


def table() -> dict[int, tuple[int, str]]:
    """All processes: parent and command line, by process id."""
    rows = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    parts = (row.split(None, 2) for row in rows)
    return {int(part[0]): (int(part[1]), part[2] if len(part) > 2 else "") for part in parts}


def children(pid: int) -> set[int]:
    return {child for child, (parent, _) in table().items() if parent == pid}


def family(pid: int) -> set[int]:
    """The processes that a process has started, and those that these have started."""
    parents, found = table(), set[int]()
    while new := {p for p, (parent, _) in parents.items() if parent in found | {pid}} - found:
        found |= new
    return found


def serving(pid: int) -> set[int]:
    """The processes that serve: those that the supervisors have started."""
    known = table()
    supervisors = [each for each in children(pid) if "watchdog" not in known[each][1]]
    return set().union(*(children(each) for each in supervisors))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # Ended, and nobody has asked how: the machine may have no init that does.
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return not state.stdout.strip() or state.stdout.startswith("Z")


def expect_gone(pids: set[int]) -> None:
    assert pids
    eventually(lambda: all(map(is_gone, pids)), f"the end of {pids}", within=WITHIN, every=0.1)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


# --- how it starts and ends -----------------------------------------------------------------------


@pytest.mark.processes
def test_it_says_where_everything_is_and_the_link_lets_one_in() -> None:
    with started(queue="mine") as process:
        base, secret, url = where(process)
        assert next_line(process, "Queue") == "mine"
        assert answers(f"{base}/healthz")
        assert answers(f"{base}/login?token={secret}")
        with TaskQueue.from_url(url, "mine") as queue:
            session = AccessStore(queue.link).redeem(secret)
            assert session is not None
            assert session.info.role == "admin"
            assert AccessStore(queue.link).redeem(secret) is None  # once
            scheduler = TaskScheduler(queue)
            eventually(lambda: scheduler.health().leader, "a leader", within=WITHIN)
        processes = family(process.pid)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WITHIN)
    assert (process.returncode, err) == (0, "")
    assert re.search(r"^Ran \d+ s: 0 schedules fired, 0 tasks done, 0 failed", out, re.MULTILINE)
    expect_gone(processes)


@pytest.mark.processes
def test_it_runs_schedules_and_the_tasks_of_an_app() -> None:
    with started(WITH_APP, workers=2, schedulers=2) as process:
        _, _, url = where(process)
        assert len(serving(process.pid)) == 5
        with TaskQueue.from_url(url) as queue:
            TaskScheduler(queue).add_schedule("* * * * * *", "alice")
            eventually(
                lambda: queue.inspect().counters.get("finished", 0) > 1, "runs", within=WITHIN
            )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WITHIN)
    assert (process.returncode, err) == (0, "")
    assert not re.search("^Ran .* 0 schedules fired", out, re.MULTILINE)


@pytest.mark.processes
def test_it_ends_by_itself_after_so_many_seconds() -> None:
    with started(seconds=1) as process:
        where(process)
        processes = family(process.pid)
        out, err = process.communicate(timeout=WITHIN)
    assert (process.returncode, err) == (0, "")
    assert "Ran 1 s: " in out
    expect_gone(processes)


@pytest.mark.processes
def test_a_task_that_runs_is_finished_before_the_end(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with started(WITH_APP, embedded_path=str(tmp_path / "data")) as process:
        base, _, url = where(process)
        with TaskQueue.from_url(url) as queue:
            queue.push(make_task(task_id="slow", payload={"until": str(done)}))
            eventually(lambda: queue.inspect().running, "the task to run", within=WITHIN)
        process.send_signal(signal.SIGTERM)
        # The dashboard is the first to end: from here on the workers are, or will be, asked to.
        eventually(lambda: not answers(f"{base}/healthz"), "the dashboard's end", within=WITHIN)
        done.touch()
        out, err = process.communicate(timeout=WITHIN)
    assert (process.returncode, err) == (0, "")
    assert "1 task done" in out
    with TaskQueue.embedded(tmp_path / "data") as queue:  # and the data is still there
        found = info_of(queue, "slow")
        assert (found.state, found.attempts) == ("finished", 1)


@pytest.mark.processes
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with started(WITH_APP) as process:
        base, _, url = where(process)
        with TaskQueue.from_url(url) as queue:
            queue.push(make_task(payload={"until": str(tmp_path / "never")}))
            eventually(lambda: queue.inspect().running, "the task to run", within=WITHIN)
        processes = family(process.pid)
        process.send_signal(signal.SIGINT)
        eventually(lambda: not answers(f"{base}/healthz"), "the dashboard's end", within=WITHIN)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WITHIN)
    assert process.returncode == 130
    expect_gone(processes)


@pytest.mark.processes
def test_nothing_outlives_it_when_it_is_killed() -> None:
    with started(demo=True) as process:
        where(process)
        busy_line(process)
        processes = family(process.pid)
        assert len(processes) == 8  # three parts with their supervisors, server and watchdog
        process.kill()
        process.communicate(timeout=WITHIN)
        expect_gone(processes)


# --- what dies is replaced ------------------------------------------------------------------------


@pytest.mark.processes
def test_what_dies_is_started_again_and_that_is_said() -> None:
    with started(WITH_APP) as process:
        base, _, url = where(process)
        before = serving(process.pid)
        assert len(before) == 3
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        for name in ("dashboard", "scheduler", "worker"):
            assert next_line(process, f"A {name} ended and was restarted")
        eventually(lambda: answers(f"{base}/healthz"), "the dashboard", within=WITHIN)
        with TaskQueue.from_url(url) as queue:
            TaskScheduler(queue).add_schedule("* * * * * *", "alice")
            eventually(lambda: queue.inspect().counters.get("finished"), "a run", within=WITHIN)
        assert not serving(process.pid) & before
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WITHIN)
    assert process.returncode == 0


@pytest.mark.processes
def test_a_supervisor_or_server_that_dies_is_replaced_too(tmp_path: Path) -> None:
    with started(embedded_path=str(tmp_path), schedulers=0) as process:
        base, _, url = where(process)
        known = table()
        (supervisor,) = [p for p in children(process.pid) if "watchdog" not in known[p][1]]
        (server,) = [p for p in family(process.pid) if "valkey-server" in known[p][1]]
        os.kill(supervisor, signal.SIGKILL)
        assert next_line(process, "The processes of the dashboard were gone")
        eventually(lambda: answers(f"{base}/healthz"), "the dashboard", within=WITHIN)
        os.kill(server, signal.SIGKILL)
        assert next_line(process, "The embedded server was gone and was restarted") == "."
        with TaskQueue.from_url(url) as queue:
            queue.check()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WITHIN)
    assert process.returncode == 0


# --- what keeps it from starting ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"url": "redis://:secret@x", "embedded_path": "y"},
            ConfigurationError,
            r"url 'redis://\*\*\*@x' and embedded_path 'y' exclude each other",
        ),
        ({"url": "redis://127.0.0.1:1/0"}, RedisUnavailable, "did not answer"),
        ({"url": "nonsense"}, ConfigurationError, "is not a Redis URL"),
        ({"workers": -1}, ConfigurationError, "workers must be a whole number .*, not -1"),
        ({"schedulers": "two"}, ConfigurationError, "schedulers must be a whole .*, not 'two'"),
        ({"seconds": -1}, ConfigurationError, "seconds must be .* seconds, not -1"),
        ({"queue": "a b"}, ConfigurationError, "queue name must have .*, not 'a b'"),
        (
            {"demo": True, "concurrency": 0},
            ConfigurationError,
            "concurrency must be a whole .*, not 0",
        ),
    ],
)
def test_what_cannot_be_used_is_named(
    redis_url: str, options: dict[str, object], error: type[FairQueueError], message: str
) -> None:
    usual = {} if "embedded_path" in options else {"url": redis_url}
    with pytest.raises(error, match=message):
        run(**{**usual, "port": 0, **options})  # type: ignore[arg-type]


def test_a_port_that_is_taken_is_told_with_what_to_do(redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} of 127.0.0.1 .* 0 takes a free"):
            run(url=redis_url, port=port)


@pytest.mark.parametrize("port", [None, 99_999, -1])
def test_nothing_is_started_before_the_port_for_scrapes_is_taken(
    live: TaskQueue, redis_url: str, monkeypatch: pytest.MonkeyPatch, port: int | None
) -> None:
    begun: list[str] = []

    def make(queue: TaskQueue, settings: object) -> Worker:
        begun.append("app")
        return Worker(queue, lambda task: None)

    monkeypatch.setattr(ProcessGroup, "start", lambda group: begun.append("process"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = taken.getsockname()[1] if port is None else port
        with pytest.raises(ConfigurationError, match=f"{wanted}"):
            run(url=redis_url, port=0, app=make, metrics_port=wanted)
    assert begun == []


def test_a_demo_whose_port_is_taken_has_the_next_one_and_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started(demo=True, seconds=0.1, port=port) as process:
            own = int(next_line(process, f"Port {port} is in use, so the dashboard uses port")[:-1])
            assert next_line(process, "Dashboard") == f"http://127.0.0.1:{own}"
            assert process.wait(60) == 0
    assert port < own <= port + 20


def test_without_a_server_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_binary() -> None:
        raise EmbeddedServerError("there is none here: install it")

    monkeypatch.setattr(embedded, "find_binary", no_binary)
    with pytest.raises(EmbeddedServerError, match="install it"):
        run(port=0)


def test_handlers_of_signals_are_those_of_before(redis_url: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigurationError):
        run(url=redis_url, port=-1)
    assert signal.getsignal(signal.SIGTERM) is before


# --- the demo -------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_a_terminal_the_demo_prints_lines(number: signal.Signals) -> None:
    with started(demo=True) as process:
        base, _, _ = where(process)
        line = busy_line(process)
        assert answers(f"{base}/readyz")
        processes = family(process.pid)
        process.send_signal(number)
        out, err = process.communicate(timeout=WITHIN)
    assert re.match(r"\d+ tasks/s \| fired \d+ \| waiting 1,\d+ \| running \d+ \| received", line)
    assert (process.returncode, err) == (0, "")
    ran = r"^Ran \d+ s: [\d,]+ schedules? fired, [1-9][\d,]* tasks? done"
    assert re.search(ran, out, re.MULTILINE)
    assert "hillcrest.imports has 1," in out
    assert not ESCAPE.search(out)
    expect_gone(processes)


@pytest.mark.processes
def test_in_a_terminal_the_demo_draws_and_gives_the_cursor_back() -> None:
    ours, theirs = pty.openpty()
    try:
        with started(stdout=theirs, demo=True) as process:
            os.close(theirs)
            text = b""
            while b"lakeside.office" not in text:
                text += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            with suppress(OSError):  # the other end was closed
                while select.select([ours], [], [], WITHIN)[0] and (more := os.read(ours, 65536)):
                    text += more
            assert process.wait(WITHIN) == 0
    finally:
        os.close(ours)
    assert text.startswith(b"Dashboard")
    assert text.rindex(b"\x1b[?25h") > text.rindex(b"\x1b[?25l")
    assert text.rindex(b"Ran ") > text.rindex(b"\x1b[?25h")


@pytest.mark.processes
def test_a_reader_that_goes_away_ends_the_demo_quietly() -> None:
    with started(demo=True) as process:
        where(process)
        processes = family(process.pid)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        process.wait(WITHIN)
    assert (process.returncode, err) == (0, "")
    expect_gone(processes)


@pytest.mark.processes
def test_the_demo_leaves_nothing_elsewhere(redis_url: str, redis_client: redis.Redis) -> None:
    redis_client.set("theirs", "1")
    with started(demo=True, seconds=2, url=redis_url) as process:
        out, err = process.communicate(timeout=WITHIN)
    assert (process.returncode, err) == (0, "")
    assert f"Redis      {redis_url}" in out
    assert redis_client.keys("*") == [b"theirs"]


def test_the_demo_leaves_a_queue_of_others_alone(redis_url: str, world: World) -> None:
    TaskScheduler(world.queue).add_schedule("* * * * *", "alice", schedule_id="theirs")
    with pytest.raises(ConfigurationError, match="seed an empty queue"):
        run(url=redis_url, port=0, demo=True)
    assert TaskScheduler(world.queue).get_schedule("theirs") is not None
