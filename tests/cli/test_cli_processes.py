"""The command line as a process: signals, pipes, terminals, and what goes on until stopped."""

import json
import os
import pty
import select
import signal
import subprocess
import textwrap
import time
import urllib.request
from contextlib import closing, suppress
from pathlib import Path

import pytest
import redis
from helpers.processes import DEADLINE, PROGRAM, Start, line_of, result_of
from helpers.state import places
from helpers.tasks import fill, info_of, push
from helpers.waiting import eventually

from fairqueue.history.runs import History
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore

pytestmark = pytest.mark.processes


# --- ends -----------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_command_with_130_without_traceback(start: Start, live: TaskQueue) -> None:
    process = start("stats", "--watch", "--interval", "1000s")
    line_of(process, "ready")
    line_of(process, "0")  # it waits for the next look
    process.send_signal(signal.SIGINT)
    code, _, err = result_of(process)
    assert (code, err.strip()) == (130, "")


def test_a_reader_that_goes_away_ends_a_listing_quietly(start: Start, live: TaskQueue) -> None:
    fill(live, "alice", 3000)
    process = start("tasks", "--all", "-o", "jsonl")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["user_id"] == "alice"
    process.stdout.close()
    assert process.wait(DEADLINE) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_exit_codes_reach_the_shell(start: Start, live: TaskQueue) -> None:
    processes = [(start("schedules", "show", "none"), 4), (start("schedules", "next", "odd"), 4)]
    for process, code in processes:
        assert result_of(process)[:2] == (code, "")


# --- worker ---------------------------------------------------------------------------------------

JOBS = textwrap.dedent(
    """
    import os, time
    from fairqueue import TaskQueue, Worker

    def make(queue, concurrency=2, lease=30.0, processes=None):
        given = {"concurrency": concurrency, "lease": lease, "processes": processes}
        worker = Worker(queue, **given, worker_id="made")

        @worker.task("double")
        def double(payload):
            return {"doubled": 2 * payload["n"]}

        @worker.task("wait")
        def wait(payload):
            while not os.path.exists("gate"):
                time.sleep(0.01)

        return worker

    class Greet:
        def handle(self, payload):
            return {"hello": payload["name"]}
    """
)


@pytest.fixture
def jobs(tmp_path: Path) -> None:
    """A module in the folder where commands run."""
    (tmp_path / "jobs.py").write_text(JOBS, encoding="utf-8")


@pytest.mark.usefixtures("jobs")
def test_a_worker_of_a_module_runs_until_it_is_stopped(start: Start, live: TaskQueue) -> None:
    push(live, "a", name="double", payload={"n": 21})
    process = start("worker", "--app", "jobs:make", "--concurrency", "3")
    history = History(live)
    eventually(
        lambda: (found := history.get("a")) and found.run.status == "succeeded",
        "the task is run",
        within=DEADLINE,
    )
    (worker,) = WorkerStore(live.link).alive()
    assert (worker.worker_id, worker.slots) == ("made", 3)
    process.send_signal(signal.SIGTERM)
    code, out, err = result_of(process)
    assert (code, out) == (0, "")
    assert "worker_stopped" in err
    details = history.get("a")
    assert details is not None
    assert details.run.result == {"doubled": 42}


@pytest.mark.usefixtures("jobs")
def test_a_burst_runs_what_is_ready_and_ends(start: Start, live: TaskQueue) -> None:
    push(live, "a", "b", name="jobs.Greet", payload={"name": "ann"})
    code, out, _ = result_of(start("worker", "-A", "jobs", "--burst", "--log-level", "error"))
    assert (code, out) == (0, "2\n")
    details = History(live).get("a")
    assert details is not None
    assert details.run.result == {"hello": "ann"}
    assert WorkerStore(live.link).alive() == []


@pytest.mark.usefixtures("jobs")
def test_a_worker_takes_the_pools_that_are_named(start: Start, live: TaskQueue) -> None:
    push(live, "a", name="jobs.Greet", payload={"name": "ann"})
    push(live, "b", name="jobs.Greet", payload={"name": "bob"}, pool="gpu")
    push(live, "c", name="jobs.Greet", payload={"name": "cy"}, pool="disk")
    options = ("--pool", "gpu", "--pool", "disk", "--burst", "--log-level", "error")
    code, out, _ = result_of(start("worker", "-A", "jobs", *options))
    assert (code, out) == (0, "2\n")
    assert info_of(live, "a").state == "ready"


def children(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    rows = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [int(row.split()[0]) for row in rows if int(row.split()[1]) == pid]


@pytest.mark.usefixtures("jobs")
def test_a_worker_whose_supervisor_is_killed_finishes_what_runs_and_fails(
    start: Start, live: TaskQueue, redis_client: redis.Redis, tmp_path: Path
) -> None:
    process = start("worker", "--app", "jobs:make", "--processes", "2", "--log-format", "json")
    push(live, "a", name="wait")
    eventually(lambda: places(redis_client) == {"running": ["a"]}, "it runs", within=DEADLINE)
    (supervisor,) = children(process.pid)
    assert len(children(supervisor)) == 2
    os.kill(supervisor, signal.SIGKILL)
    line_of(process, "worker_broken", err=True)
    (tmp_path / "gate").touch()
    code, _, err = result_of(process)
    assert code == 1
    assert "worker_stopped" in err
    assert places(redis_client) == {"finished": ["a"]}  # nothing is lost, nothing outlives it
    assert WorkerStore(live.link).alive() == []


@pytest.mark.usefixtures("jobs")
def test_up_replaces_supervisors(start: Start, live: TaskQueue, redis_client: redis.Redis) -> None:
    process = start("up", "--app", "jobs:make", "--port", "0")
    line_of(process, "Queue")
    parts = ("dashboard", "scheduler", "worker")
    in_order = sorted(children(process.pid))  # of their start
    for part, supervisor in zip(parts, in_order, strict=True):
        os.kill(supervisor, signal.SIGKILL)
        line_of(process, f"The processes of the {part} were gone and were restarted")
    push(live, "a", name="double", payload={"n": 1})
    eventually(lambda: places(redis_client) == {"finished": ["a"]}, "it is run", within=DEADLINE)
    process.send_signal(signal.SIGTERM)
    assert result_of(process)[0] == 0


def test_a_demo_runs_in_a_cluster_of_its_own(start: Start) -> None:
    process = start("demo", "--cluster", "--port", "0", "--seconds", "3")
    assert "redis+cluster://127.0.0.1:" in line_of(process, "Redis")
    code, out, _ = result_of(process)
    assert code == 0
    assert " tasks done, " in out


# --- metrics and dashboard ------------------------------------------------------------------------


def test_metrics_are_served_until_a_signal(start: Start, live: TaskQueue) -> None:
    push(live, "a")
    process = start("metrics", "--port", "0")
    line = line_of(process, "metrics at ", err=True)
    with closing(urllib.request.urlopen(line.split()[-1], timeout=DEADLINE)) as answer:
        assert b'fairqueue_ready{queue="default"} 1.0' in answer.read()
    process.send_signal(signal.SIGTERM)
    assert result_of(process)[0] == 0


def test_the_dashboard_is_served_until_a_signal(start: Start, live: TaskQueue) -> None:
    process = start("dashboard", "--port", "0", "--read-only")
    address = line_of(process, "Dashboard").split()[1]
    assert "/login?token=" in line_of(process, "Log in")
    with closing(urllib.request.urlopen(f"{address}/healthz", timeout=DEADLINE)) as answer:
        assert answer.status == 200
    process.send_signal(signal.SIGINT)
    code, _, err = result_of(process)
    assert (code, "Traceback" in err) == (0, False)


# --- terminals ------------------------------------------------------------------------------------


class Terminal:
    """A command with a terminal of its own."""

    def __init__(self, *arguments: str, url: str) -> None:
        self._master, slave = pty.openpty()
        env = {**os.environ, "FAIRQUEUE_URL": url, "TERM": "xterm", "COLUMNS": "100"}
        env.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments], env=env, stdin=slave, stdout=slave, stderr=slave
        )
        os.close(slave)
        self.text = ""

    def until(self, part: str) -> str:
        """Read what is shown until this comes."""
        deadline = time.monotonic() + DEADLINE
        while part not in self.text:
            assert select.select([self._master], [], [], deadline - time.monotonic())[0], self.text
            self.text += os.read(self._master, 65536).decode()
        return self.text

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Read all that is still shown; the exit code."""
        with suppress(OSError):  # the other side is closed
            while data := os.read(self._master, 65536):
                self.text += data.decode()
        return self.process.wait(DEADLINE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)
        os.close(self._master)


@pytest.mark.parametrize(("answer", "code", "left"), [("n\n", 1, 1), ("y\n", 0, 0)])
def test_people_are_asked_before_something_is_lost(
    redis_url: str, live: TaskQueue, answer: str, code: int, left: int
) -> None:
    push(live, "a")
    with closing(Terminal("users", "purge", "alice", url=redis_url)) as terminal:
        terminal.until("Cancel 1 waiting task of user 'alice'? [y/N]")
        terminal.type(answer)
        assert terminal.end() == code
    assert live.size() == left


def test_a_terminal_gets_colours_and_obeys_no_user(redis_url: str, live: TaskQueue) -> None:
    push(live, "a", name="x" + "\u202e")
    claim = live.claim("w")[0]
    live.bury(claim, "no \x1b[2J disk")
    with closing(Terminal("runs", "list", url=redis_url)) as terminal:
        assert terminal.end() == 0
    assert "\x1b[31mfailed" in terminal.text
    assert "\x1b[2J" not in terminal.text
    assert "\u202e" not in terminal.text


def test_top_restores_the_terminal_when_q_is_pressed(redis_url: str, live: TaskQueue) -> None:
    fill(live, "alice", 3)
    with closing(Terminal("top", "--interval", "1000s", url=redis_url)) as terminal:
        assert "alice" in terminal.until("(q quits)")
        terminal.type("q")
        assert terminal.end() == 0
    assert terminal.text.index("\x1b[?1049h") < terminal.text.index("\x1b[?1049l")


def test_long_work_shows_how_far_it_is(redis_url: str, live: TaskQueue) -> None:
    fill(live, "alice", 300)
    with closing(Terminal("users", "purge", "alice", "--yes", url=redis_url)) as terminal:
        assert terminal.end() == 0
    assert "purge: 300 of 300" in terminal.text
