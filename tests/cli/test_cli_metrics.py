"""Programs that are scraped: what each one's port shows, and that processes are added up."""

import os
import signal
import socket
import subprocess
import textwrap
import urllib.request
from pathlib import Path

import pytest
from helpers.commands import Cli
from helpers.processes import Start, line_of
from helpers.schedules import add
from helpers.tasks import push
from helpers.waiting import eventually
from prometheus_client.parser import text_string_to_metric_families

from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.worker.worker import Worker

DEADLINE = 60

APP = textwrap.dedent(
    """
    from fairqueue import Worker

    def make(queue, processes=None):
        worker = Worker(queue, concurrency=2, processes=processes)

        @worker.task("double")
        def double(payload):
            return {}

        return worker
    """
)


@pytest.fixture
def app(tmp_path: Path) -> str:
    """What makes a worker, in the folder where the commands run."""
    (tmp_path / "metered_app.py").write_text(APP, encoding="utf-8")
    return "metered_app:make"


class Port:
    """A port that is scraped. Counters that go back are an error."""

    def __init__(self, process: "subprocess.Popen[str]", *, err: bool) -> None:
        line = line_of(process, "metrics at " if err else "Metrics ", err=err)
        self._url = line.split()[-1]
        self._before: dict[str, float] = {}

    def scrape(self) -> dict[str, float]:
        """The sums of all samples by name."""
        with urllib.request.urlopen(self._url, timeout=DEADLINE) as answer:
            text = answer.read().decode()
        sums: dict[str, float] = {}
        names = []
        for family in text_string_to_metric_families(text):
            names.append(family.name)
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        assert len(names) == len(set(names)), "each family is told once"
        for name, before in self._before.items():
            if name.endswith(("_total", "_count", "_bucket")) and name.startswith("fairqueue"):
                assert sums[name] >= before, name
        self._before = sums
        return sums

    def value(self, name: str) -> float:
        return self.scrape().get(name, -1.0)


@pytest.mark.processes
def test_a_scheduler_of_the_command_line_can_be_scraped(start: Start, live: TaskQueue) -> None:
    add(TaskScheduler(live), "often", cron_expr="* * * * * *")
    process = start("scheduler", "--metrics-port", "0")
    port = Port(process, err=True)
    eventually(
        lambda: port.value("fairqueue_scheduler_pushes_total") > 0, "it has fired", within=DEADLINE
    )
    shown = port.scrape()
    assert "process_cpu_seconds_total" in shown
    assert "fairqueue_ready" not in shown, "those of the queue are for one exporter"
    process.terminate()
    assert process.wait(DEADLINE) == 0


@pytest.mark.processes
def test_worker_processes_add_up_monotonically(start: Start, live: TaskQueue, app: str) -> None:
    process = start("worker", "--app", app, "--processes", "2", "--metrics-port", "0")
    port = Port(process, err=True)
    runs = "fairqueue_worker_runs_total"

    def push_and_wait(first: int, last: int) -> None:
        for number in range(first, last):
            push(live, f"t{number}", name="double")
        eventually(lambda: port.value(runs) == last, f"{last} runs are counted", within=DEADLINE)

    push_and_wait(0, 40)
    pids = {worker.pid for worker in WorkerStore(live.link).alive()}
    assert len(pids) == 2
    os.kill(min(pids), signal.SIGKILL)
    push_and_wait(40, 60)
    eventually(
        lambda: len({w.pid for w in WorkerStore(live.link).alive()} - pids) == 1,
        "another one has taken its place",
        within=DEADLINE,
    )
    push_and_wait(60, 100)
    shown = port.scrape()
    assert shown["fairqueue_worker_run_seconds_count"] == 100
    assert "fairqueue_ready" not in shown
    process.terminate()
    assert process.wait(DEADLINE) == 0


@pytest.mark.processes
def test_up_shows_all_processes_at_one_port(start: Start, live: TaskQueue, app: str) -> None:
    add(TaskScheduler(live), "often", cron_expr="* * * * * *", name="double")
    for number in range(20):
        push(live, f"t{number}", name="double")
    process = start("up", "--app", app, "--workers", "2", "--port", "0", "--metrics-port", "0")
    port = Port(process, err=False)
    eventually(
        lambda: port.value("fairqueue_worker_runs_total") > 20, "all have run", within=DEADLINE
    )
    shown = port.scrape()
    assert shown["fairqueue_scheduler_pushes_total"] > 0
    assert shown["fairqueue_pushed_total"] > 20
    assert shown["fairqueue_scheduler_is_leader"] == 1
    assert shown["process_cpu_seconds_total"] > 0
    process.terminate()
    assert process.wait(DEADLINE) == 0


@pytest.mark.processes
@pytest.mark.parametrize("command", ["scheduler", "worker --app {app}", "up --port 0"])
def test_a_taken_port_is_named(start: Start, live: TaskQueue, app: str, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start(*command.format(app=app).split(), "--metrics-port", port)
        _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 2
    assert "cannot serve metrics on 127.0.0.1" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("port", [None, 99_999])
@pytest.mark.parametrize("command", ["scheduler", "worker --app {app}"])
def test_the_port_is_looked_at_before_anything_starts(
    redis_url: str,
    app: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    port: int | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    begun: list[str] = []
    monkeypatch.setattr(Worker, "start", lambda worker: begun.append("worker"))
    monkeypatch.setattr(TaskScheduler, "tick", lambda scheduler: begun.append("scheduler"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = str(port or taken.getsockname()[1])
        line = [*command.format(app=app).split(), "--metrics-port", wanted]
        done = Cli(redis_url).run(*line)
    assert (done.code, begun) == (2, [])
    assert wanted in done.err


@pytest.mark.parametrize("line", ["scheduler --once", "worker --app metered --burst"])
def test_what_ends_at_once_cannot_be_scraped(redis_url: str, line: str) -> None:
    done = Cli(redis_url).run(*line.split(), "--metrics-port", "0")
    assert done.code == 2
    assert "--metrics-port cannot be used with" in done.err
