"""The demo: its pictures as text, and the program as people run it."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import redis

from fairqueue import demo, embedded
from fairqueue.demo import NOISY, QUIET, Demo, Snapshot, Terminal, User, entitled, frame, spread
from fairqueue.errors import EmbeddedServerError, RedisUnavailable
from fairqueue.queue import TaskQueue

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def make_snapshot(**fields: object) -> Snapshot:
    """Ten seconds into a run in which all is well."""
    quiet = [User(name=name, recent=5, total=10, last_wait=12) for name in QUIET]
    usual: dict[str, object] = {
        "seconds": 10.0,
        "window": 5.0,
        "users": [User(name=NOISY, waiting=8000, recent=975, total=2000, last_wait=9800), *quiet],
        "scheduler": "running, this process leads (term 1)",
        "fires": 50,
        "lateness": [1, 2, 3, 40],
        "last_fires": [("ana", 3), ("ben", 40)],
        "quiet_waits": [4, 12, 1500],
        "metrics_url": "http://127.0.0.1:9109/metrics",
    }
    return Snapshot(**{**usual, **fields})  # type: ignore[arg-type]


def empty_snapshot() -> Snapshot:
    """Before anything has happened."""
    users = [User(name=name) for name in (NOISY, *QUIET)]
    return Snapshot(seconds=0.0, window=0.001, users=users)


# --- the pictures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "waiting", "expected"),
    [
        ([], [], []),
        ([0, 0], [0, 0], [0, 0]),
        ([90, 5, 5], [1000, 0, 0], [90, 5, 5]),
        ([100, 0, 0], [1000, 2, 50], [49, 2, 49]),
        ([30, 0, 0], [9, 9, 99], [10.5, 9, 10.5]),
        ([10, 0], [0, 0], [10, 0]),
    ],
)
def test_service_is_shared_equally_but_nobody_gets_more_than_is_wanted(
    got: list[int], waiting: list[int], expected: list[float]
) -> None:
    assert entitled(got, waiting) == pytest.approx(expected)
    assert sum(entitled(got, waiting)) == pytest.approx(sum(got))


def test_percentiles_are_values_that_occurred() -> None:
    assert spread([]) == "none yet"
    assert spread([7]) == "p50 7 ms, p99 7 ms"
    assert spread(list(range(1, 101))) == "p50 50 ms, p99 99 ms"
    assert spread([1, 2000]) == "p50 1 ms, p99 2.0 s"


@pytest.mark.parametrize("columns", [20, 60, 80, 120, 300])
@pytest.mark.parametrize("shot", [make_snapshot(), empty_snapshot(), make_snapshot(fair=False)])
def test_a_frame_fits_the_terminal(shot: Snapshot, columns: int) -> None:
    assert max(map(len, frame(shot, columns))) < columns
    for rows in (5, 24):
        assert len(frame(shot, columns, rows)) < rows


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_frame_labels_each_number(columns: int) -> None:
    text = "\n".join(frame(make_snapshot(), columns, 24))
    assert "running, this process leads (term 1)" in text
    assert "fires       50 reports, 0 missed" in text
    assert "lateness    p50 2 ms, p99 40 ms" in text
    assert "last fires  ana 3, ben 40 ms late" in text
    assert "SERVICE: 200 tasks a second" in text
    assert "backlog     8,000 tasks of noisy wait: 40 s" in text
    assert "quiet wait  p50 12 ms, p99 1.5 s" in text
    assert "http://127.0.0.1:9109/metrics" in text
    assert re.search(r"noisy +8,000 +9\.8 s +195\.0/s +195\.0/s +█+ 100%\n", text)
    assert re.search(r"ana +0 +12 ms +1\.0/s +1\.0/s +█+ 100%\n", text)


def test_a_frame_of_24_rows_shows_everything_at_80_columns() -> None:
    lines = frame(make_snapshot(), 80, 24)
    assert lines == frame(make_snapshot(), 80)
    assert lines[-1].endswith("With it, the last one waited 12 ms.")


def test_the_contrast_is_a_sentence_with_numbers() -> None:
    assert demo.contrast(make_snapshot()) == (
        "Without fairness, first in, first out would make ana's report wait behind 8,000 tasks, "
        "about 40 s at this speed. With it, the last one waited 12 ms."
    )


def test_without_fairness_the_bars_show_who_starves() -> None:
    users = [User(name=NOISY, waiting=8000, recent=1000, total=2000, last_wait=9800)]
    users += [User(name=name, waiting=10) for name in QUIET]
    shot = make_snapshot(users=users, fair=False, quiet_waits=[])
    text = "\n".join(frame(shot, 80, 24))
    assert re.search(r"noisy .* █+ 105%\n", text)
    assert re.search(r"ana +10 +none yet +2\.0/s +0\.0/s +░+   0%\n", text)
    assert "ana 0%" in demo.summary(shot)


def test_before_anything_happened_there_is_text_for_it() -> None:
    shot = empty_snapshot()
    assert "last fires  none yet" in "\n".join(frame(shot, 80))
    assert demo.line(shot).endswith("shares received of entitled: none yet")
    assert "Served       0 tasks in 0 s" in demo.summary(shot)


# --- the terminal ---------------------------------------------------------------------------------


class FakeTerminal(io.StringIO):
    encoding = "utf-8"


def draw(out: FakeTerminal, *shots: Snapshot) -> str:
    with Terminal(out) as terminal:
        for shot in shots:
            terminal.show(shot)
    return out.getvalue()


def test_a_frame_is_drawn_over_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("NO_COLOR", "1")
    text = draw(FakeTerminal(), make_snapshot(), make_snapshot())
    height = len(frame(make_snapshot(), 80, 24))
    assert text.count(f"\r\x1b[{height}A") == 1
    assert "\x1b[2J" not in text
    assert text.startswith("\x1b[?25l")
    assert text.endswith("\x1b[?25h")


def test_a_resized_terminal_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    out = FakeTerminal()
    monkeypatch.setenv("COLUMNS", "80")
    with Terminal(out) as terminal:
        terminal.show(make_snapshot())
        monkeypatch.setenv("COLUMNS", "100")
        terminal.show(make_snapshot())
    assert out.getvalue().count("\x1b[2J") == 1


def test_no_color_means_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = draw(FakeTerminal(), make_snapshot())
    monkeypatch.setenv("NO_COLOR", "1")
    plain = draw(FakeTerminal(), make_snapshot())
    assert "\x1b[32m█" in coloured
    assert not re.search(r"\x1b\[[0-9;]*m", plain)
    assert ESCAPE.sub("", coloured) == ESCAPE.sub("", plain)


def test_a_terminal_without_unicode_gets_plain_bars() -> None:
    class Ascii(FakeTerminal):
        encoding = "ascii"

    assert draw(Ascii(), make_snapshot(), empty_snapshot()).isascii()


# --- the program ----------------------------------------------------------------------------------


@contextmanager
def started(*arguments: str, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """The demo as a process; killed if the test leaves it running."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fairqueue.demo", *arguments],
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


def family(pid: int) -> set[int]:
    """The processes that a process has started, and those that these have started."""
    rows = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    pairs = (row.split() for row in rows)
    parents = {int(child): int(parent) for child, parent in pairs}
    found: set[int] = set()
    while new := {p for p, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return found


def all_gone(pids: set[int]) -> bool:
    deadline = time.monotonic() + 10
    left = set(pids)
    while left and time.monotonic() < deadline:
        for pid in list(left):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                left.discard(pid)
        time.sleep(0.01)
    return not left


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.processes
def test_without_a_terminal_it_prints_lines_and_ends_by_itself() -> None:
    with started("--seconds", "2") as process:
        assert re.match(
            r"FairQueue demo. Metrics: http://127.0.0.1:\d+/metrics\n", first_line(process)
        )
        servers = family(process.pid)
        assert len(servers) >= 2  # the embedded server and its watchdog
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert re.search(r"^ +1 s \| \d+ tasks/s \| fires \d", out, re.MULTILINE)
    assert re.search(r"^Fires +[1-9]\d* reports, 0 missed$", out, re.MULTILINE)
    assert re.search(r"^Shares .*noisy \d+%, ana \d+%, ben \d+%, chloe", out, re.MULTILINE)
    assert "Without fairness, first in, first out would make ana's report wait behind" in out
    assert not ESCAPE.search(out)
    assert all_gone(servers)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_the_summary(number: signal.Signals) -> None:
    with started() as process:
        first_line(process)
        servers = family(process.pid)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "Served" in out
    assert all_gone(servers)


@pytest.mark.processes
def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    with started() as process:
        first_line(process)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        process.wait(60)
    assert (process.returncode, err) == (0, "")


@pytest.mark.processes
def test_in_a_terminal_it_draws_and_gives_the_cursor_back() -> None:
    ours, theirs = pty.openpty()
    try:
        with started(stdout=theirs) as process:
            os.close(theirs)
            text = b""
            while b"chloe" not in text:
                text += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            with suppress(OSError):  # the other end was closed
                while select.select([ours], [], [], 60)[0] and (more := os.read(ours, 65536)):
                    text += more
            assert process.wait(60) == 0
    finally:
        os.close(ours)
    assert text.startswith(b"\x1b[?25l")
    assert text.rindex(b"\x1b[?25h") > text.rindex(b"\x1b[?25l")
    assert text.rindex(b"Served") > text.rindex(b"\x1b[?25h")


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [[], ["--no-fairness"]])
def test_it_leaves_nothing_on_a_server_of_others(
    arguments: list[str], redis_url: str, redis_client: redis.Redis
) -> None:
    redis_client.set("theirs", "1")
    with started("--seconds", "1", "--url", redis_url, *arguments) as process:
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert redis_client.keys("*") == [b"theirs"]


def run_main(*arguments: str) -> int:
    """The program in this process, whose signal handlers stay as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return demo.main(arguments)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_without_a_server_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_binary() -> None:
        raise EmbeddedServerError("there is none here: install it")

    monkeypatch.setattr(embedded, "find_binary", no_binary)
    assert run_main() == 1
    assert capsys.readouterr().err == (
        "fairqueue.demo: there is none here: install it\n"
        "To use a Redis that runs: --url redis://localhost:6379/0\n"
    )


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "nonsense"])
def test_a_url_without_a_server_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--url", url) == 1
    assert capsys.readouterr().err.startswith("fairqueue.demo: ")


def test_what_a_worker_fails_of_ends_the_demo(
    redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise RedisUnavailable("gone")

    monkeypatch.setattr(demo, "BACKLOG", 10)
    monkeypatch.setattr(TaskQueue, "finish", broken)
    with TaskQueue.from_url(redis_url) as queue, Demo(queue, fair=True) as running:
        for worker in running._workers:
            worker.join(10)
        with pytest.raises(RedisUnavailable, match="gone"):
            running.snapshot()


def test_a_drained_backlog_is_filled_again(
    redis_url: str, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "BACKLOG", 3)
    with TaskQueue.from_url(redis_url) as queue, Demo(queue, fair=True) as running:
        deadline = time.monotonic() + 10
        while running.snapshot().backlog and time.monotonic() < deadline:
            time.sleep(0.01)
        monkeypatch.setattr(demo, "BACKLOG", 1000)
        running.refill()
        assert running.snapshot().backlog > 0
