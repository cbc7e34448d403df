"""The command line's scheduler: pacing on a clock of the test, and the program as people run it."""

import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
import redis
from helpers.commands import parse
from helpers.processes import DEADLINE, PROGRAM, Start
from helpers.schedules import add, get, tamper
from helpers.tasks import Mute
from helpers.waiting import eventually, in_thread, until_blocked
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue.__main__ import main
from fairqueue.cli import exit_codes, listing, logs
from fairqueue.clock import ManualClock
from fairqueue.errors import ConfigurationError, RedisRefused, RedisUnavailable
from fairqueue.link.whole import stored_partitions
from fairqueue.logs import JsonFormatter
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.scheduler.daemon import (
    COUNTS,
    OUTAGE,
    OVERRUNS,
    SECOND,
    STOPPED,
    Daemon,
    Pacer,
    Totals,
    run_once,
    term_for,
)
from fairqueue.scheduler.firing import TickReport
from fairqueue.scheduler.scheduler import TaskScheduler

DOCS = Path(__file__).parents[2] / "docs"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


# --- pacing ---------------------------------------------------------------------------------------


def test_ticks_do_not_drift_whatever_passes_take() -> None:
    chance = random.Random(7)
    start, interval = 123_456_789, 1_000_000_007
    pacer, now = Pacer(start, interval), start
    for k in range(10_000):
        assert pacer.planned == start + k * interval
        now = pacer.planned + chance.randrange(interval // 10)  # the wait ends a little late
        pacer.begin(now)
        now += chance.randrange(interval // 2)
        assert not pacer.end(now)
        assert now + round(pacer.next_wait(now) * SECOND) == pytest.approx(pacer.planned, abs=2)
    assert (pacer.overruns, pacer.ticks_skipped) == (0, 0)


def test_a_long_run_with_overruns_stays_on_the_planned_times() -> None:
    chance = random.Random(8)
    interval, now, ticks = 1000, 0, 0
    pacer = Pacer(0, interval)
    for _ in range(10_000):
        now = max(now, pacer.planned)
        pacer.begin(now)
        ticks += 1
        assert now < pacer.planned <= now + interval
        assert pacer.planned % interval == 0
        now += chance.randrange(3 * interval)
        pacer.end(now)
    assert pacer.planned == (ticks + pacer.ticks_skipped) * interval
    assert pacer.overruns > 1000


# Passes as (begin, end), with an interval of 10 from 0; then what has been counted.
@pytest.mark.parametrize(
    ("passes", "overruns", "in_a_row", "skipped", "planned"),
    [
        ([], 0, 0, 0, 0),
        ([(0, 3)], 0, 0, 0, 10),
        ([(0, 10)], 0, 0, 0, 10),
        ([(0, 11)], 1, 1, 0, 10),
        ([(0, 35)], 1, 1, 0, 10),
        ([(0, 35), (35, 36)], 1, 0, 2, 40),
        ([(0, 15), (15, 26), (26, 37)], 3, 3, 0, 30),
        ([(0, 15), (15, 16), (20, 31)], 2, 1, 0, 30),
        ([(0, 1), (4, 5), (7, 8)], 0, 0, 0, 10),  # at due moments in between
        ([(0, 1), (9, 12)], 0, 0, 0, 10),  # over a planned tick, but short
        ([(0, 1), (9, 12), (12, 13)], 0, 0, 0, 20),
        ([(0, 1), (55, 56)], 0, 0, 4, 60),  # the process slept
    ],
)
def test_overruns_are_counted_and_skipped_ticks_are_not_caught_up(
    passes: list[tuple[int, int]], overruns: int, in_a_row: int, skipped: int, planned: int
) -> None:
    pacer = Pacer(0, 10)
    for begin, end in passes:
        pacer.begin(begin)
        assert pacer.end(end) == (end - begin > 10)
    counted = (pacer.overruns, pacer.overruns_in_a_row, pacer.ticks_skipped, pacer.planned)
    assert counted == (overruns, in_a_row, skipped, planned)


@pytest.mark.parametrize(("now", "seconds"), [(0, 2.0), (SECOND, 1.0), (2 * SECOND, 0), (9**20, 0)])
def test_the_wait_is_until_the_planned_tick_and_never_negative(now: int, seconds: float) -> None:
    pacer = Pacer(0, 2 * SECOND)
    pacer.begin(0)
    assert pacer.next_wait(now) == seconds


@pytest.mark.parametrize(
    ("interval", "given", "term"), [(1, None, 10), (60, None, 180), (1, 3, 3), (1200, None, 3600)]
)
def test_a_term_lasts_three_intervals(interval: float, given: float | None, term: float) -> None:
    assert term_for(interval, given) == pytest.approx(term)


@pytest.mark.parametrize(
    ("interval", "given", "named"),
    [
        (0, None, "interval must .*not 0"),
        (1201, None, "interval must .*not 1201"),
        (float("nan"), None, "interval must .*not nan"),
        (1, 2, "lock timeout must be at least 3 seconds"),
    ],
)
def test_too_long_an_interval_is_refused(interval: float, given: float | None, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        term_for(interval, given)


# --- passes ---------------------------------------------------------------------------------------


@pytest.fixture
def make(queue: TaskQueue) -> Callable[..., TaskScheduler]:
    """Schedulers on the clock of the test."""

    def make(kind: type[TaskScheduler] = TaskScheduler, **settings: Any) -> TaskScheduler:
        return kind(queue, registry=CollectorRegistry(), **settings)

    return make


def test_totals_have_each_number_of_a_report() -> None:
    totals = Totals()
    totals.add(TickReport(is_leader=True, fired=2, missed=1))
    totals.add(TickReport(fired=3))
    assert set(COUNTS) >= {"fired", "skipped", "missed", "refused", "moved", "set_aside"}
    assert totals.as_dict() == {**dict.fromkeys(COUNTS, 0), "fired": 5, "missed": 1}
    assert (totals.passes, totals.is_leader) == (2, False)


@pytest.mark.parametrize(
    ("report", "failed"),
    [
        (TickReport(fired=1, skipped=1, missed=1, moved=1), False),
        (TickReport(fired=1, refused=1), True),
        (TickReport(fired=1, set_aside=1), True),
    ],
)
def test_a_pass_has_failed_if_one_of_its_schedules_has(report: TickReport, failed: bool) -> None:
    totals = Totals()
    totals.add(report)
    assert totals.failed is failed


def test_one_time_round_fires_what_is_due_and_gives_up_leadership(
    make: Callable[..., TaskScheduler], clock: ManualClock
) -> None:
    scheduler = make()
    add(scheduler, cron_expr="* * * * *")
    clock.advance(60)
    assert run_once(scheduler).counts["fired"] == 1
    assert not scheduler.is_leader
    assert make().tick().is_leader


def test_one_time_round_goes_on_while_something_is_due(make: Callable[..., TaskScheduler]) -> None:
    class Busy(TaskScheduler):
        waits = iter([0.0, 0.0, 0.5])

        def tick(self, now: datetime | float | None = None) -> TickReport:
            return TickReport(is_leader=True, fired=1, wait=next(self.waits))

    assert run_once(make(Busy)).counts["fired"] == 3


def test_one_time_round_does_nothing_while_another_leads(
    make: Callable[..., TaskScheduler], clock: ManualClock
) -> None:
    leader, other = make(), make()
    add(leader, cron_expr="* * * * *")
    leader.tick()
    clock.advance(9)
    totals = run_once(other)
    assert (totals.passes, totals.is_leader, totals.counts["fired"]) == (1, False, 0)
    assert leader.is_leader


class Scripted(TaskScheduler):
    """Its passes are a list of how long they take, or of what they raise; then it is stopped."""

    steps: list[int | Exception]
    daemon: Daemon
    time = 0

    def tick(self, now: datetime | float | None = None) -> TickReport:
        if not self.steps:
            self.daemon.stop()
            return TickReport(is_leader=True)
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        self.time += step
        return TickReport(is_leader=True, fired=1)


@pytest.fixture
def scripted(make: Callable[..., TaskScheduler]) -> Callable[..., Daemon]:
    """A daemon with an interval of a second, whose passes take as many seconds as is said."""

    def scripted(*steps: float | Exception, **settings: Any) -> Daemon:
        scheduler = make(Scripted)
        assert isinstance(scheduler, Scripted)
        scheduler.steps = [
            step if isinstance(step, Exception) else round(step * SECOND) for step in steps
        ]
        scheduler.daemon = Daemon(scheduler, clock=lambda: scheduler.time, **settings)
        return scheduler.daemon

    return scripted


@pytest.mark.parametrize(
    ("steps", "settings", "end", "passes"),
    [
        ([2, 2, 2], {}, STOPPED, 4),
        ([2, 2, 2], {"max_overruns": 4}, STOPPED, 4),
        ([2, 2, 2], {"max_overruns": 3}, OVERRUNS, 3),
        ([2, 2, 2], {"max_overruns": 1}, OVERRUNS, 1),
        ([2, 0.5, 2, 2], {"max_overruns": 3}, STOPPED, 5),
        ([2, 0.5, 2, 2], {"max_overruns": 2}, OVERRUNS, 4),
        ([2, RedisRefused("full"), 2], {"max_overruns": 2}, OVERRUNS, 2),
    ],
)
def test_overruns_in_a_row_end_a_daemon_that_was_told_so(
    scripted: Callable[..., Daemon],
    steps: list[float | Exception],
    settings: dict[str, int],
    end: str,
    passes: int,
) -> None:
    daemon = scripted(*steps, **settings)
    assert daemon.run() == end
    assert daemon.totals.passes == passes


def test_a_pass_that_fails_is_counted_and_the_next_one_goes_on(
    scripted: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    daemon = scripted(0.5, RedisRefused("full"), ZeroDivisionError("a bug"), 0.5)
    assert daemon.run() == STOPPED
    assert daemon.statistics() == {
        "uptime": 1.0,
        "passes": 3,
        "overruns": 0,
        "ticks_skipped": 0,
        "outages": 0,
        "errors": 2,
        **dict.fromkeys(COUNTS, 0),
        "fired": 2,
    }
    assert [record.exc_info is not None for record in caplog.records] == [False, True]


def test_a_pass_that_fails_by_what_cannot_be_shown_does_not_end_a_daemon(
    scripted: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    assert scripted(0.5, Mute(), 0.5).run() == STOPPED
    (failed,) = caplog.records
    assert failed.getMessage() == 'pass_failed error="Mute: (its text cannot be read)"'


def test_failed_passes_in_a_row_are_one_outage(scripted: Callable[..., Daemon]) -> None:
    away = RedisUnavailable("gone")
    daemon = scripted(0.5, away, away, 0.5, away)
    assert daemon.run() == STOPPED
    assert (daemon.outages, daemon.errors) == (2, 3)


@pytest.mark.parametrize("settings", [{"max_overruns": 0}, {"interval": 5}])
def test_a_daemon_refuses_settings_that_make_no_sense(
    make: Callable[..., TaskScheduler], settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError):
        Daemon(make(), **settings)


def test_a_daemon_stopped_before_it_ran_does_not_tick(make: Callable[..., TaskScheduler]) -> None:
    daemon = Daemon(make())
    daemon.stop()
    assert daemon.run() == STOPPED
    assert daemon.totals.passes == 0


# --- Redis goes away ------------------------------------------------------------------------------


@pytest.fixture
def remote(
    own_server: Callable[..., EmbeddedServer], tmp_path: Path
) -> Iterator[tuple[EmbeddedServer, TaskScheduler]]:
    """A server that may be killed, and a scheduler that gives it up soon."""
    server = own_server(tmp_path)
    with TaskQueue.from_url(server.url, timeout=1.0) as queue:
        yield server, TaskScheduler(queue, lock_timeout=3, registry=CollectorRegistry())


@pytest.mark.processes
def test_a_daemon_waits_for_redis_to_come_back(
    remote: tuple[EmbeddedServer, TaskScheduler],
) -> None:
    server, scheduler = remote
    daemon = Daemon(scheduler)
    result = in_thread(daemon.run)
    try:
        eventually(lambda: daemon.totals.passes, "a pass", within=DEADLINE)
        server.kill()
        eventually(lambda: daemon.errors > 1, "failed passes", within=DEADLINE)
        server.restart()
        passes = daemon.totals.passes
        eventually(lambda: daemon.totals.passes > passes, "a pass again", within=DEADLINE)
    finally:
        daemon.stop()
    assert result() == STOPPED
    assert daemon.errors > daemon.outages >= 1  # not each failed pass is an outage


@pytest.mark.processes
def test_a_daemon_may_end_at_an_outage(remote: tuple[EmbeddedServer, TaskScheduler]) -> None:
    server, scheduler = remote
    daemon = Daemon(scheduler, exit_on_outage=True)
    result = in_thread(daemon.run)
    eventually(lambda: daemon.totals.passes or daemon.errors, "a pass", within=DEADLINE)
    server.kill()
    assert result() == OUTAGE
    assert (daemon.outages, daemon.errors) == (1, 1)


# --- the program ----------------------------------------------------------------------------------


@pytest.fixture
def run(redis_url: str) -> Run:
    """Run a command to its end, on the shared server unless it names another one."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*PROGRAM, *arguments],
            env={**os.environ, "FAIRQUEUE_URL": redis_url},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )

    return run


def log_until(process: "subprocess.Popen[str]", event: str) -> str:
    """Read the log of a process up to an event."""
    assert process.stderr is not None
    for line in process.stderr:
        if event in line:
            return line
    raise AssertionError(f"it ended with {process.wait(DEADLINE)} and without {event}")


def result_of(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """How a process ended, and what it has printed that was not read yet."""
    code = process.wait(DEADLINE)
    assert process.stdout is not None
    return code, process.stdout.read()


@pytest.fixture
def live(redis_client: redis.Redis) -> Iterator[TaskScheduler]:
    """A scheduler of real time that only looks and writes schedules; it never ticks."""
    partitions = stored_partitions(redis_client, "default")
    with TaskQueue(redis_client, partitions=partitions) as queue:
        # Its term outlasts what a slow machine needs to start a program.
        yield TaskScheduler(queue, "observer", lock_timeout=600.0, registry=CollectorRegistry())


def yearly(moment: datetime) -> str:
    """A cron with this moment, and no other in the year."""
    return f"{moment.minute} {moment.hour} {moment.day} {moment.month} *"


def add_overdue(queue: TaskQueue, clock: ManualClock, *ids: str) -> None:
    """Add schedules with one moment a year, which was half an hour ago."""
    moment = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=30)
    clock.set(moment - timedelta(minutes=1))
    writer = TaskScheduler(queue, "writer", registry=CollectorRegistry())
    for schedule_id in ids:
        add(writer, schedule_id, cron_expr=yearly(moment))


def waiting(scheduler: TaskScheduler) -> int:
    return scheduler.queue.inspect().ready


@pytest.mark.processes
def test_once_fires_what_is_due_and_says_so(
    run: Run, queue: TaskQueue, clock: ManualClock, live: TaskScheduler
) -> None:
    add_overdue(queue, clock, "a", "b")
    add(live, "later", cron_expr=yearly(datetime.now(UTC) - timedelta(days=1)))
    done = run("scheduler", "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"fired 2, .*missed 0, refused 0, .*set aside 0\b.*\n$", done.stdout)
    assert [get(live, name).run_count for name in ("a", "b", "later")] == [1, 1, 0]
    again = run("scheduler", "--once", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout) == {**dict.fromkeys(COUNTS, 0), "failed": False, "leader": None}


@pytest.mark.processes
def test_once_while_another_instance_leads_is_no_failure(run: Run, live: TaskScheduler) -> None:
    live.tick()
    done = run("scheduler", "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("; observer is the leader and fires what is due\n")
    assert json.loads(run("scheduler", "--once", "--json").stdout)["leader"] == "observer"
    live.stop()


@pytest.mark.processes
def test_several_at_once_fire_once(
    start: Start, queue: TaskQueue, clock: ManualClock, live: TaskScheduler
) -> None:
    names = [f"s{n}" for n in range(50)]
    add_overdue(queue, clock, *names)
    processes = [start("scheduler", "--once", "--json") for _ in range(4)]
    results = [result_of(process) for process in processes]
    assert [code for code, _ in results] == [0] * 4
    assert sum(json.loads(text)["fired"] for _, text in results) == 50
    assert waiting(live) == 50
    assert [get(live, name).run_count for name in names] == [1] * 50


@pytest.mark.processes
@pytest.mark.untidy
def test_a_schedule_that_fails_does_not_stop_the_others_and_is_told(
    run: Run, queue: TaskQueue, clock: ManualClock, live: TaskScheduler, redis_client: redis.Redis
) -> None:
    add_overdue(queue, clock, "good", "spoilt")
    tamper(redis_client, queue, "spoilt", cron_expr="nonsense")
    done = run("scheduler", "--once", "--json", "--log-format", "json")
    assert done.returncode == 1
    outcome = json.loads(done.stdout)
    assert (outcome["fired"], outcome["set_aside"], outcome["failed"]) == (1, 1, True)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["level"], line["event"], line["schedule"]) == (
        "error",
        "schedule_set_aside",
        "spoilt",
    )
    assert "nonsense" in line["reason"]
    assert get(live, "good").run_count == 1


@pytest.mark.processes
def test_a_fire_that_a_limit_refuses_is_told(run: Run, world: World) -> None:
    world.queue.configure(max_waiting=1)
    add_overdue(world.queue, world.clock, "a", "b")
    done = run("scheduler", "--once")
    assert done.returncode == 1
    assert re.match(r"fired 1, .*refused 1,", done.stdout)
    assert re.search(
        r"WARNING fairqueue.scheduler fire_refused schedule=[ab] task=\S+ user=alice", done.stderr
    )


@pytest.mark.processes
def test_once_in_the_folder_of_an_embedded_server(run: Run, tmp_path: Path) -> None:
    clock = ManualClock()
    with TaskQueue.embedded(tmp_path, clock=clock) as queue:
        add_overdue(queue, clock, "a")
        held = run("scheduler", "--once", "--embedded", str(tmp_path))
    assert held.returncode == 3
    assert str(tmp_path) in held.stderr
    done = run("scheduler", "--once", "--embedded", str(tmp_path))
    assert (done.returncode, done.stdout[:8]) == (0, "fired 1,"), done.stderr
    with TaskQueue.embedded(tmp_path) as queue:
        assert [claim.task.schedule_id for claim in queue.claim("w")] == ["a"]


@pytest.mark.processes
@pytest.mark.untidy
def test_a_queue_of_another_name_is_another_queue(
    run: Run, queue: TaskQueue, clock: ManualClock, live: TaskScheduler
) -> None:
    add_overdue(queue, clock, "a")
    assert run("scheduler", "--once", "--queue", "other").stdout.startswith("fired 0,")
    assert get(live, "a").run_count == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    "arguments", [("scheduler", "--once"), ("scheduler",), ("schedules",)], ids=" ".join
)
def test_a_redis_out_of_reach_is_told_at_once(run: Run, arguments: tuple[str, ...]) -> None:
    with closing(socket.socket()) as nobody:  # bound, so that nobody else listens there
        nobody.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{nobody.getsockname()[1]}/0"
        done = run(*arguments, "--url", url)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("fairqueue: Redis did not answer: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.processes
def test_a_wrong_password_is_an_error(run: Run, own_server: Callable[..., EmbeddedServer]) -> None:
    server = own_server(config={"requirepass": "right"})
    done = run("scheduler", "--once", "--url", server.url.replace("unix://", "unix://:wrong@"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fairqueue: Redis refused")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "COMMAND"),
        ("fly", "fly"),
        ("scheduler --interval soon", "soon"),
        ("scheduler --interval 0", "interval must be 0.01 to 1200 seconds, not 0"),
        ("scheduler --interval -1", "interval must be 0.01 to 1200 seconds, not -1"),
        ("scheduler --interval nan", "interval must be 0.01 to 1200 seconds, not nan"),
        ("scheduler --interval 60 --lock-timeout 10", "lock timeout must be at least 180 seconds"),
        ("scheduler --lock-timeout 9999", "lock_timeout must be"),
        ("scheduler --max-overruns 0", "max_overruns must be a whole number from 1"),
        ("scheduler --once --interval 0", "--interval"),
        ("scheduler --once --max-overruns 3", "--max-overruns"),
        ("scheduler --once --exit-on-outage", "--exit-on-outage"),
        ("scheduler --log-level loud", "loud"),
        ("scheduler --url redis://h/0 --embedded x", "cannot be used together"),
        ("scheduler --once --embedded /there/is/none", "/there/is/none"),
        ("schedules --limit 0", "--limit must be a whole number from 1"),
        ("schedules --limit 100001", "--limit must be a whole number from 1"),
    ],
)
def test_what_makes_no_sense_is_named(
    arguments: str,
    named: str,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAIRQUEUE_URL", redis_url)
    assert main(arguments.split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert named in told.err


def test_a_url_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedules", "--url", "nonsense"]) == 2
    assert "'***' is not a Redis URL" in capsys.readouterr().err


# --- the daemon -----------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_daemon_with_statistics_and_without_leadership(
    number: signal.Signals, start: Start, live: TaskScheduler, redis_client: redis.Redis
) -> None:
    process = start("scheduler", "--json", "--interval", "1000")
    until_blocked(redis_client)  # it waits for the next tick, or a wake-up
    process.send_signal(number)
    log_until(process, "lock_released")
    code, text = result_of(process)
    statistics = json.loads(text)
    assert code == 0
    assert statistics.keys() == {
        *("end", "uptime", "passes", "overruns", "ticks_skipped", "outages", "errors"),
        *COUNTS,
    }
    assert (statistics["end"], statistics["errors"]) == ("stopped", 0)
    assert statistics["passes"] > 0
    assert live.tick().is_leader  # and not only after the term
    live.stop()


@pytest.mark.processes
def test_a_daemon_fires_new_schedules_between_ticks(start: Start, live: TaskScheduler) -> None:
    process = start("scheduler", "--interval", "1000")
    log_until(process, "lock_acquired")
    add(live, "each second", cron_expr="* * * * * *")
    for _ in range(3):
        assert live.queue.claim("w", wait=DEADLINE), "nothing was fired long before the next tick"
    process.send_signal(signal.SIGTERM)
    code, text = result_of(process)
    assert code == 0
    fired = re.search(r"^uptime \d.*, overruns 0, .*errors 0, fired (\d+),", text)
    assert fired
    assert int(fired[1]) == get(live, "each second").run_count >= 3


@pytest.mark.processes
def test_a_following_daemon_takes_over_from_the_leader(start: Start, live: TaskScheduler) -> None:
    first = start("scheduler")
    log_until(first, "lock_acquired")
    second = start("scheduler")
    log_until(second, "daemon_started")
    first.send_signal(signal.SIGTERM)
    assert result_of(first)[0] == 0
    log_until(second, "lock_acquired")
    second.send_signal(signal.SIGTERM)
    assert result_of(second)[0] == 0


# A pass that does not end. It says when it has begun, and when the daemon was asked to end.
STUCK = textwrap.dedent(
    """
    import os, sys, threading
    from fairqueue import __main__ as command_line
    from fairqueue.scheduler import daemon

    stop = daemon.Daemon.stop

    def heard(self):
        stop(self)
        os.write(1, b"asked\\n")

    def stuck(self, now=None):
        os.write(1, b"begun\\n")
        threading.Event().wait()

    daemon.Daemon.stop = heard
    daemon.TaskScheduler.tick = stuck
    sys.exit(command_line.main(["scheduler"]))
    """
)


@pytest.mark.processes
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_daemon_at_once(second: signal.Signals, start: Start) -> None:
    process = start(program=STUCK)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    assert process.poll() is None  # it would finish the pass
    process.send_signal(second)
    assert process.wait(DEADLINE) == -second


# Each pass takes twice the interval.
SLOW = textwrap.dedent(
    """
    import sys, time
    from fairqueue import __main__ as command_line
    from fairqueue.scheduler import daemon

    tick = daemon.TaskScheduler.tick

    def slow(self, now=None):
        time.sleep(0.02)
        return tick(self, now)

    daemon.TaskScheduler.tick = slow
    sys.exit(command_line.main(["scheduler", "--interval", "0.01", *sys.argv[1:]]))
    """
)


@pytest.mark.processes
def test_too_many_overruns_have_their_own_exit_code(start: Start, live: TaskScheduler) -> None:
    process = start("--max-overruns", "3", "--json", program=SLOW)
    log_until(process, "3 passes in a row took longer than the interval of 0.01 seconds")
    code, text = result_of(process)
    statistics = json.loads(text)
    assert (code, statistics["end"], statistics["overruns"]) == (6, "overruns", 3)
    assert live.tick().is_leader
    live.stop()


# --- schedules ------------------------------------------------------------------------------------


@pytest.fixture
def show(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """What `schedules` prints to standard output and standard error."""
    monkeypatch.setenv("FAIRQUEUE_URL", redis_url)

    def show(*arguments: str) -> tuple[str, str]:
        assert main(["schedules", *arguments]) == 0
        return capsys.readouterr()

    return show


def test_schedules_are_shown_as_a_table(
    show: Callable[..., tuple[str, str]], make: Callable[..., TaskScheduler], clock: ManualClock
) -> None:
    clock.set(datetime(2026, 3, 5, 8, 59, 30, tzinfo=UTC))
    scheduler = make()
    add(scheduler, "nine", timezone="Europe/Berlin", name="report")
    add(scheduler, "each", cron_expr="* * * * *", user_id="bob", tenant="acme")
    add(scheduler, "off", user_id="bob")
    scheduler.update_schedule("off", is_active=False)
    clock.advance(31)
    scheduler.tick()
    text = show()[0].replace(" 2026-", " ")
    lines = [re.split(r"  +", line) for line in text.splitlines()]
    assert lines == [
        [
            *("ID", "USER", "TITLE", "NAME", "CRON", "ZONE", "STATE", "NEXT RUN", "LAST RUN"),
            "TENANT",
        ],
        [
            *("nine", "alice", "report", "report", "0 9 * * *", "Europe/Berlin", "active"),
            *("03-06 08:00:00", "-", "-"),
        ],
        [
            *("each", "bob", "default", "default", "* * * * *", "UTC", "active"),
            *("03-05 09:01:00", "03-05 09:00:00", "acme"),
        ],
        ["off", "bob", "default", "default", "0 9 * * *", "UTC", "paused", "-", "-", "-"],
    ]
    of_alice = show("--user", "alice")[0]
    assert [line.split()[0] for line in of_alice.splitlines()] == ["ID", "nine"]
    assert show("--user", "nobody") == (
        "ID  USER  TITLE  NAME  CRON  ZONE  STATE  NEXT RUN  LAST RUN  TENANT\n",
        "",
    )


@pytest.mark.untidy
def test_a_schedule_that_was_set_aside_is_shown_with_its_reason_on_one_line(
    show: Callable[..., tuple[str, str]], make: Callable[..., TaskScheduler], world: World
) -> None:
    scheduler = make()
    add(scheduler, "spoilt", cron_expr="* * * * *")
    world.tamper("spoilt", cron_expr="\x1b[2J no\ncron")
    world.advance(60)
    scheduler.tick()
    _, line, problem = show()[0].splitlines()
    assert re.search(r"\\x1b\[2J no\\ncron  UTC   disabled +-", line)
    assert problem.startswith("cannot run: spoilt: ")
    document = json.loads(show("--json")[0])
    assert document["schedules"][0]["state"] == "disabled"
    assert document["set_aside"][0]["schedule_id"] == "spoilt"
    assert "set aside" not in show("--user", "alice")[0]


def test_a_table_is_read_by_pages_and_bounded(
    show: Callable[..., tuple[str, str]],
    make: Callable[..., TaskScheduler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listing, "PAGE", 3)
    names = [f"s{n}" for n in range(8)]
    make().add_schedules(
        {"cron_expr": "0 9 * * *", "user_id": "u", "schedule_id": name, "payload": {"key": "hush"}}
        for name in names
    )
    text, told = show("--limit", "7")
    assert [line.split()[0] for line in text.splitlines()] == ["ID", *names[:7]]
    assert told.startswith(
        "fairqueue: there are more: raise --limit, give --all, or continue with "
    )
    assert show("--limit", "8")[1] == ""
    text, told = show("--json")
    document = json.loads(text)
    assert [each["schedule_id"] for each in document["schedules"]] == names
    assert (document["has_more"], told) == (False, "")
    assert datetime.fromisoformat(document["schedules"][0]["next_run"]).tzinfo is not None
    assert "hush" not in text


@pytest.mark.processes
def test_a_reader_that_goes_away_changes_no_exit_code(start: Start, world: World) -> None:
    world.queue.configure(max_waiting=1)
    add_overdue(world.queue, world.clock, "a", "b")
    process = start("scheduler", "--once", "--log-level", "error")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(DEADLINE) == 1
    assert process.stderr is not None
    assert process.stderr.read() == ""


# --- logs -----------------------------------------------------------------------------------------


def record(message: str, **fields: object) -> logging.LogRecord:
    """A warning at a known moment."""
    usual = {"name": "fairqueue.x", "levelname": "WARNING", "created": 1_700_000_000.5}
    return logging.makeLogRecord({"msg": message, **usual, **fields})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"event": "lock_lost"}, ""),
        ({"event": "other", "schedule": "a"}, " event=other schedule=a"),
        ({"reason": "it is 'broken'"}, " reason=\"it is 'broken'\""),
        ({"reason": "one\ntwo \x1b[2J"}, r' reason="one\ntwo \u001b[2J"'),
        ({"count": 3, "user": None, "name_": ""}, ' count=3 user=None name_=""'),
    ],
)
def test_a_line_of_text_has_the_fields_of_the_event(fields: dict[str, object], text: str) -> None:
    line = logs.TextFormatter().format(record("lock_lost", **fields))
    assert line == f"2023-11-14T22:13:20.500+00:00 WARNING fairqueue.x lock_lost{text}"


def test_a_line_of_json_has_the_fields_of_the_event() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        failed = record("failed", event="e", at=datetime(2026, 3, 5), exc_info=sys.exc_info())
    line = JsonFormatter().format(failed)
    assert "\n" not in line
    document = json.loads(line)
    assert document.pop("exception").endswith("ValueError: wrong")
    assert document == {
        "time": "2023-11-14T22:13:20.500+00:00",
        "level": "warning",
        "logger": "fairqueue.x",
        "message": "failed",
        "event": "e",
        "at": "2026-03-05 00:00:00",
    }


# --- the guide ------------------------------------------------------------------------------------


def test_the_guide_lists_each_exit_code() -> None:
    text = (DOCS / "scheduler-service.md").read_text(encoding="utf-8")
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert listed == [0, 1, 2, 3, 6, 130]
    assert listed == [
        exit_codes.OK,
        exit_codes.FAILED,
        exit_codes.USAGE,
        exit_codes.NO_REDIS,
        exit_codes.UNHEALTHY,
        exit_codes.INTERRUPTED,
    ]


def test_the_guide_names_only_options_that_exist() -> None:
    text = (DOCS / "scheduler-service.md").read_text(encoding="utf-8")
    for line in re.findall(r"-m fairqueue (\S[^\n`]*)", text):
        arguments = re.split(r" +(?:>|\|\||#)", line)[0].split()
        try:
            parse(arguments)
        except click.UsageError as error:
            raise AssertionError(f"no such command: {line}") from error
