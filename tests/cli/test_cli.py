"""The command line as a whole: its commands, its options, its exit codes, what it prints."""

import json
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
import redis
from helpers.commands import Cli, all_commands, parse
from helpers.tasks import push

from fairqueue.cli import output, program
from fairqueue.cli.column_widths import GAP, fit
from fairqueue.cli.exit_codes import exit_code
from fairqueue.cli.session import Consent, actor
from fairqueue.cli.text import cell, duration_text, exact_duration, printable, short_cell, table
from fairqueue.cli.values import FUTURE, PAST, read_duration, read_object
from fairqueue.errors import (
    BrokenRecord,
    DuplicateTask,
    EmbeddedServerError,
    FairQueueError,
    Forbidden,
    InvalidCron,
    QueueFull,
    RedisRefused,
    RedisUnavailable,
    ScheduleConflict,
    StaleVersion,
    UnknownSchedule,
    UnknownTask,
    UnknownTenant,
    UnknownUser,
    UnknownWorker,
)
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer

GUIDE = Path(__file__).parents[2] / "docs" / "cli.md"
ROOM_FOR_HELP = 62  # characters beside the name of a command, at 80 columns
COMMANDS = {" ".join(path): command for path, command in all_commands()}

# What cannot be taken back, or is done to many at once.
DESTRUCTIVE = {
    *("schedules pause", "schedules resume", "schedules trigger", "schedules remove"),
    *("schedules backfill", "tasks cancel", "runs cancel", "failed retry", "failed discard"),
    *("users purge", "tenants purge", "workers drain", "keys revoke", "prune", "import", "doctor"),
    "repartition",
}
# Commands that print no records: they do something, or go on until they are stopped.
NOT_READING = {
    *("up", "demo", "dashboard", "worker", "metrics", "completion", "export", "failed export"),
    *("acl", "tasks cancel", "runs cancel", "workers drain", "keys revoke"),
}


@pytest.fixture
def cli(redis_url: str, redis_client: redis.Redis) -> Cli:
    return Cli(redis_url)


# --- all commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_says_what_it_does(cli: Cli, path: str) -> None:
    done = cli.ok(*path.split(), "--help")
    assert done.out.startswith(f"Usage: fairqueue {path} [OPTIONS]")
    assert COMMANDS[path].help
    for option in ("--url", "--embedded", "--queue", "--log-level", "--log-format"):
        assert option in done.out


def options_of(command: click.Command) -> set[str]:
    return {name for param in command.params for name in param.opts}


@pytest.mark.parametrize("path", COMMANDS)
def test_what_cannot_be_taken_back_can_be_tried_and_is_asked_for(path: str) -> None:
    asked = {"--dry-run", "--yes"} & options_of(COMMANDS[path])
    assert asked == ({"--dry-run", "--yes"} if path in DESTRUCTIVE else set())


def test_the_first_sentence_about_a_command_fits_into_a_list_of_them() -> None:
    commands = {**program.commands, **COMMANDS}
    told = {path: each.get_short_help_str(ROOM_FOR_HELP) for path, each in commands.items()}
    assert [path for path, text in told.items() if text.endswith("...")] == []


@pytest.mark.parametrize("path", COMMANDS)
def test_what_reads_prints_json_too(path: str) -> None:
    assert ("--output" in options_of(COMMANDS[path])) == (path not in NOT_READING)


def test_the_guide_lists_each_command_and_no_other() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| `fairqueue ([a-z ]+?)(?: [A-Z\[-].*?)?` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def test_every_line_of_the_guide_is_one_that_the_program_takes() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    lines = re.findall(r"^(?:\$ )?fairqueue ([^\n|`]+)", text, re.MULTILINE)
    assert len(lines) > 20
    for line in lines:
        arguments = shlex.split(line, comments=True)
        try:
            parse(arguments)
        except click.UsageError as error:
            raise AssertionError(f"{line}: {error.message}") from error


def test_the_guide_lists_each_exit_code() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert listed == [0, 1, 2, 3, 4, 5, 6, 130]


# --- the guide's example --------------------------------------------------------------------------

EXAMPLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(2))
def test_an_example_of_the_guide_prints_what_it_says(
    cli: Cli, live: TaskQueue, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that begin with `$` are run; `...` stands for anything."""
    monkeypatch.chdir(tmp_path)
    example = EXAMPLE.findall(GUIDE.read_text(encoding="utf-8"))[number]
    for block in re.split(r"^\$ fairqueue ", example, flags=re.MULTILINE)[1:]:
        line, _, promised = block.partition("\n")
        done = cli.run(*shlex.split(line))
        pattern = re.escape(promised.strip()).replace(r"\.\.\.", ".*")
        printed = re.sub(r" +\n", "\n", done.out.strip())
        assert re.fullmatch(pattern, printed, re.DOTALL), f"{line}\n{printed}\n{done.err}"


# --- where options stand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "--queue other tasks list",
        "tasks --queue other list",
        "tasks list --queue other",
        "tasks --queue other",
        "tasks --queue=other",
        "--queue wrong tasks --queue other --limit 5",
    ],
)
@pytest.mark.untidy
def test_shared_options_go_anywhere(cli: Cli, redis_client: redis.Redis, line: str) -> None:
    with TaskQueue(redis_client, "other") as other:
        push(other, "here")
        assert cli.json(*line.split())["tasks"][0]["task_id"] == "here"


def test_a_url_stands_over_the_variable(cli: Cli, redis_url: str) -> None:
    nowhere = Cli("redis://127.0.0.1:1/0")
    assert nowhere.run("tasks").code == 3
    assert nowhere.ok("tasks", "--url", redis_url).out.startswith("ID")


def test_without_a_command_the_help_is_an_error(cli: Cli) -> None:
    done = cli.run()
    assert (done.code, done.out) == (2, "")
    assert "COMMAND" in done.err


def test_a_group_alone_lists(cli: Cli) -> None:
    groups = ("schedules", "tasks", "runs", "failed", "users", "tenants", "limits", "workers")
    for group in (*groups, "keys"):
        assert cli.ok(group).out == cli.ok(group, "list").out


def test_the_version_is_told(cli: Cli) -> None:
    assert re.fullmatch(r"fairqueue, version \S+\n", cli.ok("--version").out)


# --- exit codes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownSchedule, 4),
        (UnknownTask, 4),
        (UnknownUser, 4),
        (UnknownTenant, 4),
        (UnknownWorker, 4),
        (ScheduleConflict, 5),
        (StaleVersion, 5),
        (DuplicateTask, 5),
        (InvalidCron, 2),
        (RedisUnavailable, 3),
        (EmbeddedServerError, 3),
        (QueueFull, 1),
        (RedisRefused, 1),
        (Forbidden, 1),
        (BrokenRecord, 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: type[FairQueueError], code: int) -> None:
    assert exit_code(error("what")) == code


READING = sorted(set(COMMANDS) - NOT_READING - DESTRUCTIVE - {"schedules next", "scheduler"})
# Arguments without which a command would be a mistake.
ARGUMENTS = {
    **dict.fromkeys(("runs show", "runs logs", "failed show", "tasks show", "tasks explain"), "x"),
    **dict.fromkeys(("schedules show", "schedules history", "schedules changes"), "x"),
    **dict.fromkeys(("schedules moments", "schedules logs", "users show"), "x"),
    **dict.fromkeys(("schedules copy", "runs retry", "tasks reschedule"), "x"),
    **dict.fromkeys(("users pause", "users resume", "tenants pause", "tenants resume"), "x"),
    **dict.fromkeys(("tenants show", "quote", "limits remove"), "x"),
    "tenants weight": "x 2",
    "tenants limit": "x --rate 3",
    "users move": "x --to y",
    "limits set": "x --slots 1",
    "schedules add": "--every 1h --user x",
    "schedules update": "x --name y",
    "tasks push": "--user x",
    "users weight": "x 2",
    "users limit": "x --rate 3",
    "keys create": "x",
    "stats": "--count 1",
    "top": "--count 1",
    "repartition": "x --to 2",
}


@pytest.mark.parametrize("path", READING)
def test_each_command_reports_a_missing_redis(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sleep(seconds: float) -> None:
        raise AssertionError("it does not try again where nobody has ever answered")

    monkeypatch.setattr(time, "sleep", no_sleep)
    with closing(socket.socket()) as nobody:  # bound, so that nobody else listens there
        nobody.bind(("127.0.0.1", 0))
        away = Cli(f"redis://127.0.0.1:{nobody.getsockname()[1]}/0")
        done = away.run(*path.split(), *ARGUMENTS.get(path, "").split())
    assert (done.code, done.out) == (3, "")
    assert "Redis did not answer" in done.err


def test_an_embedded_folder_is_opened(tmp_path: Path) -> None:
    with TaskQueue.embedded(tmp_path) as queue:
        push(queue, "kept")
    nowhere = Cli("redis://127.0.0.1:1/0")
    assert "kept" in nowhere.ok("tasks", "--embedded", str(tmp_path)).out


def test_an_embedded_folder_is_made_and_that_is_said(tmp_path: Path) -> None:
    nowhere, path = Cli("redis://127.0.0.1:1/0"), tmp_path / "none"
    done = nowhere.ok("tasks", "--embedded", str(path))
    assert "is a new folder with an empty queue" in done.err
    assert path.is_dir()
    assert "new folder" not in nowhere.ok("tasks", "--embedded", str(path)).err
    (tmp_path / "file").write_text("", encoding="utf-8")
    done = nowhere.run("tasks", "--embedded", str(tmp_path / "file"))
    assert (done.code, "must be a folder, not a file" in done.err) == (2, True)


def test_a_wrong_password_is_an_error(
    own_server: Callable[..., EmbeddedServer],
) -> None:
    server = own_server(config={"requirepass": "right"})
    done = Cli(server.url.replace("unix://", "unix://:wrong@")).run("status")
    assert (done.code, done.out) == (2, "")
    assert "wrong" not in done.err


# --- asking ---------------------------------------------------------------------------------------


def test_without_a_terminal_nothing_is_lost_without_yes(cli: Cli, live: TaskQueue) -> None:
    push(live, "a")
    done = cli.run("users", "purge", "alice")
    assert done.code == 2
    assert "give --yes: there is no terminal to ask on" in done.err
    assert live.size() == 1


@pytest.mark.parametrize(("answer", "agreed"), [("y", True), ("n", False), ("", False)])
def test_on_a_terminal_people_are_asked(
    monkeypatch: pytest.MonkeyPatch, answer: str, agreed: bool
) -> None:
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    asked = []

    def confirm(text: str, **settings: Any) -> bool:
        asked.append(text)
        return answer == "y"

    monkeypatch.setattr(click, "confirm", confirm)
    consent = Consent(dry_run=False, yes=False)
    if agreed:
        assert consent.to("drop it")
    else:
        with pytest.raises(click.exceptions.Exit) as ended:
            consent.to("drop it")
        assert ended.value.exit_code == 1
    assert asked == ["Drop it?"]


# --- reading what people type ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("2w", 1_209_600),
        ("999999999999d", 3_155_760_000),
        ("", None),
        ("h", None),
        ("2 h", None),
        ("2h!", None),
        ("-2h", None),
        ("٣s", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert read_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "past", "future"),
    [("2h", -2, 2), ("-2h", -2, -2), ("+2h", 2, 2), ("now", 0, 0), ("1d", -24, 24)],
)
def test_moments_relative_to_now(text: str, past: float, future: float) -> None:
    now = datetime.now(UTC)
    for kind, hours in ((PAST, past), (FUTURE, future)):
        away = kind.convert(text, None, None) - now - timedelta(hours=hours)
        assert abs(away) < timedelta(minutes=5)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-03-05", "2026-03-05T00:00:00+00:00"),
        ("2026-03-05T09:00", "2026-03-05T09:00:00+00:00"),
        ("2026-03-05T09:00:00+01:00", "2026-03-05T09:00:00+01:00"),
        ("2026-03-05T09:00:00Z", "2026-03-05T09:00:00+00:00"),
    ],
)
def test_moments_as_iso_8601_are_utc_without_an_offset(text: str, moment: str) -> None:
    assert PAST.convert(text, None, None).isoformat() == moment


@pytest.mark.parametrize("text", ["soon", "", "--2h", "+-2h", "2026-13-01", "9999999999999999d"])
def test_what_is_no_moment_is_named(text: str) -> None:
    if text.endswith("d"):
        assert FUTURE.convert(text, None, None).year < 9999  # as far as a duration goes
        return
    with pytest.raises(click.BadParameter, match="is not a time"):
        PAST.convert(text, None, None)


def test_payloads_are_json_files_and_pairs_together(tmp_path: Path) -> None:
    file = tmp_path / "payload.json"
    file.write_text('{"b": [2]}', encoding="utf-8")
    given = ['{"a": 1}', f"@{file}", "c=3", "d=text", "e=", 'f={"g": null}', "h=x=y"]
    assert read_object(given, "--payload") == {
        "a": 1,
        "b": [2],
        "c": 3,
        "d": "text",
        "e": "",
        "f": {"g": None},
        "h": "x=y",
    }
    assert read_object([], "--payload") is None


@pytest.mark.parametrize("text", ["{nonsense", "word", "=3", "@/there/is/none", "{} []"])
def test_what_is_no_payload_is_named(text: str) -> None:
    with pytest.raises(click.UsageError, match="--payload"):
        read_object([text], "--payload")


# --- printing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0s"),
        (0.1234, "0.123s"),
        (9.99, "9.99s"),
        (90, "1m30s"),
        (3600, "1h"),
        (3661, "1h1m"),
        (90_061, "1d1h"),
        (-90, "-1m30s"),
    ],
)
def test_durations_for_people(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (12, "12s"), (0.5, "0.5s"), (7_776_000, "90d"), (90_061.5, "1d1h1m1.5s")],
)
def test_an_exact_duration_leaves_nothing_out(seconds: float, text: str) -> None:
    assert exact_duration(seconds) == text


def test_values_for_people() -> None:
    moment = datetime(2026, 3, 5, 9, tzinfo=UTC)
    values = [None, "", True, 0, 1.5, moment, timedelta(seconds=90), ["a", None], {"ü": 1}, ()]
    assert [cell(value) for value in values] == [
        *("-", "-", "yes", "0", "1.5", "2026-03-05 09:00:00", "1m30s", "a, -", '{"ü": 1}', "-")
    ]
    assert cell(7_776_000.0) == "7776000"
    assert short_cell(datetime(1999, 3, 5, 9, tzinfo=UTC)) == "1999-03-05 09:00:00"


def test_a_table_cannot_tell_the_terminal_anything() -> None:
    assert printable("\x1b[2J\r\nü") == "\\x1b[2J\\r\\nü"
    assert list(table([("A", "B"), ("\x1b[1m", "x"), ("l\nm", "y")])) == [
        "A        B",
        "\\x1b[1m  x",
        "l\\nm     y",
    ]


def test_json_cannot_tell_the_terminal_anything_and_says_the_same() -> None:
    value = {"ü": "\x1b[2J \x9b2J \u202e \u2028 \U000e0001 日本"}
    for indent in (None, 2):
        text = output.json_text(value, indent)
        assert text.replace("\n", "").isprintable()
        assert json.loads(text) == value
    assert "日本" in text


def test_on_a_terminal_a_table_is_drawn_without_obeying_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    output.print_table(["ID", "STATUS"], [["[bold]a[/bold]", "failed"], ["\x1b[2Jb", "ok"]])
    printed = capsys.readouterr().out
    assert "[bold]a[/bold]" in printed
    assert "\\x1b[2Jb" in printed
    assert "\x1b" not in printed  # no colour: this is no terminal after all


WIDTHS = {"ID": 40, "STATUS": 9, "USER": 20, "NAME": 25, "ENDED": 14, "ATTEMPTS": 8, "ERROR": 60}


def test_a_wide_terminal_shows_all_of_a_table() -> None:
    assert fit(WIDTHS, [], 200) == WIDTHS


@pytest.mark.parametrize("columns", [80, 100, 120, 150])
def test_a_narrow_terminal_gets_whole_ids_and_headings_and_fewer_columns(columns: int) -> None:
    widths = fit(WIDTHS, [], columns)
    assert sum(widths.values()) + GAP * (len(widths) - 1) <= columns
    assert (widths["ID"], widths["STATUS"]) == (40, 9)
    assert all(width >= len(name) for name, width in widths.items())
    assert "ATTEMPTS" not in widths or "ERROR" in widths


def test_a_column_without_any_value_is_the_first_to_go() -> None:
    assert list(fit({"ID": 10, "VERSION": 10, "ERROR": 10}, ["ERROR"], 22)) == ["ID", "VERSION"]


def test_a_table_on_a_terminal_says_what_it_leaves_out_and_keeps_ids_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    moment = datetime.now(UTC).replace(month=3, day=5, hour=9, minute=1, second=2)
    row = ["i" * 60, "3", moment, "e" * 60]
    output.print_table(["ID", "ATTEMPTS", "SEEN", "LAST"], [row])
    output.print_table(["AT", "ERROR"], [[moment, "e" * 60]])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any("i" * 60 in line for line in lines)
    assert any("terminal too narrow for: ATTEMPTS, SEEN" in line for line in lines)
    assert "03-05 09:01:02  " + "e" * 33 + "…" in lines
    assert "(times are UTC)" in lines


def test_without_rich_a_terminal_gets_plain_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    monkeypatch.setitem(sys.modules, "rich", None)
    output.print_table(["ID"], [["a"]])
    assert capsys.readouterr().out == "ID\na\n"


def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with output.Progress("retry") as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with output.Progress("retry") as progress:
        progress(1, 2)
        progress(3)
    assert capsys.readouterr().err == "\rretry: 1 of 2\rretry: 3\n"


def test_every_form_of_output_has_the_same_records(cli: Cli, live: TaskQueue) -> None:
    push(live, "a", "b")
    document = cli.json("tasks")
    assert [task["task_id"] for task in document["tasks"]] == ["b", "a"]
    assert (document["has_more"], document["cursor"]) == (False, None)
    assert cli.ok("tasks", "-o", "jsonl").objects == document["tasks"]
    assert cli.ok("tasks", "--json").json == document
    assert [line.split()[0] for line in cli.ok("tasks").lines] == ["ID", "b", "a"]


def test_a_listing_goes_on_at_its_cursor_and_all_walks_through(
    cli: Cli, live: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairqueue.cli.listing.PAGE", 2)
    push(live, *(f"t{n}" for n in range(5)))
    first = cli.json("tasks", "--limit", "2")
    assert first["has_more"]
    rest = cli.json("tasks", "--limit", "3", "--cursor", first["cursor"])
    ids = [task["task_id"] for task in first["tasks"] + rest["tasks"]]
    assert (sorted(ids), rest["has_more"]) == ([f"t{n}" for n in range(5)], False)
    assert len(cli.ok("tasks", "--all", "-o", "jsonl").objects) == 5
    told = cli.ok("tasks", "--limit", "2").err
    assert told.startswith("fairqueue: there are more: ")
    assert cli.run("tasks", "--cursor", "nonsense").code == 2


# --- without click --------------------------------------------------------------------------------


@pytest.mark.processes
def test_without_click_it_says_what_to_install() -> None:
    text = "import sys; sys.modules['click'] = None; from fairqueue.__main__ import main; "
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text + "sys.exit(main(['status']))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install 'fairqueue[cli]'" in done.stderr


def test_completion_is_printed_for_each_shell(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_FAIRQUEUE_COMPLETE" in cli.ok("completion", shell).out
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert cli.ok("completion").out == cli.ok("completion", "fish").out
    monkeypatch.setenv("SHELL", "/bin/odd")
    assert cli.run("completion").code == 2
    assert cli.run("completion", "odd").code == 2


def test_the_actor_is_the_user_of_the_machine() -> None:
    assert re.fullmatch(r".+@.+", actor().name)
    assert (actor().role, actor().via, actor().tenant) == ("admin", "cli", None)
