"""What the log says: with the plainest formatter, what happened to what, and why."""

import ast
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.schedules import THURSDAY, at, fire_id
from helpers.tasks import Mute, make_task
from helpers.world import World
from prometheus_client import CollectorRegistry

import fairqueue
from fairqueue.cli.logs import TextFormatter
from fairqueue.errors import RedisUnavailable
from fairqueue.logs import MAX_SHOWN, JsonFormatter, error_line, fields_of, log_event
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.worker.context import TaskContext
from fairqueue.worker.worker import Worker

PACKAGE = Path(fairqueue.__file__).parent
logger = logging.getLogger("fairqueue.test")


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    """The messages of an event, as `logging.basicConfig()` shows them."""
    return [each.getMessage() for each in caplog.records if vars(each).get("event") == event]


# --- one event ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("alice", "alice"),
        (7, "7"),
        (None, "None"),
        ("", '""'),
        ("two words", '"two words"'),
        ("Müller wartet", '"Müller wartet"'),
        ('a"b', '"a\\"b"'),
        ("a=b", '"a=b"'),
        ("one\ntwo\x1b[2J", '"one\\ntwo\\u001b[2J"'),
        ("100%", "100%"),
        ("x" * (MAX_SHOWN + 1), "x" * MAX_SHOWN + "..."),
    ],
)
def test_a_message_names_the_event_and_its_fields(
    caplog: pytest.LogCaptureFixture, value: object, text: str
) -> None:
    log_event(logger, "thing_happened", logging.WARNING, user=value, count=3)
    (record,) = caplog.records
    assert record.getMessage() == f"thing_happened user={text} count=3"
    assert fields_of(record) == {"event": "thing_happened", "user": value, "count": 3}
    assert (record.levelno, record.funcName) == (
        logging.WARNING,
        "test_a_message_names_the_event_and_its_fields",
    )


def test_a_line_of_the_command_line_says_each_field_once(caplog: pytest.LogCaptureFixture) -> None:
    log_event(logger, "thing_happened", logging.WARNING, user="alice", reason="it is late")
    line = TextFormatter().format(caplog.records[0])
    assert line.endswith(' WARNING fairqueue.test thing_happened user=alice reason="it is late"')


def test_nothing_is_made_of_an_event_that_nobody_wants(caplog: pytest.LogCaptureFixture) -> None:
    class Dear:
        def __str__(self) -> str:
            raise AssertionError("nobody asked")

    caplog.set_level(logging.INFO, "fairqueue.test")
    log_event(logger, "thing_happened", logging.DEBUG, value=Dear())
    assert caplog.records == []


class Leaving:
    def __str__(self) -> str:
        raise SystemExit


class Odd(str):
    def __len__(self) -> int:
        raise RuntimeError("no length")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Mute(), '"a Mute that cannot be shown"'),
        ([Mute()], '"a list that cannot be shown"'),
        (Leaving(), '"a Leaving that cannot be shown"'),
        (10**5000, '"a int that cannot be shown"'),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_cannot_be_shown_is_told_as_such(
    caplog: pytest.LogCaptureFixture, value: object, text: str
) -> None:
    log_event(logger, "thing_happened", logging.WARNING, value=value)
    assert lines(caplog, "thing_happened") == [f"thing_happened value={text}"]


def test_a_value_of_the_oddest_kind_ends_nothing() -> None:
    log_event(logger, "thing_happened", logging.WARNING, value=Odd("x"))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("gone"), "ValueError: gone"),
        (ValueError(), "ValueError"),
        (redis.ConnectionError("closed by server"), "ConnectionError: closed by server"),
        (Mute(), "Mute: (its text cannot be read)"),
    ],
)
def test_an_error_is_told_by_its_type_and_its_text(error: Exception, line: str) -> None:
    assert error_line(error) == line


# --- lines of JSON --------------------------------------------------------------------------------


def json_line(**fields: Any) -> dict[str, Any]:
    """What the formatter makes of a record, read as strictly as JSON is meant."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    record = logging.makeLogRecord({"msg": "x", "name": "n", "levelname": "INFO", **fields})
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


circle: dict[str, Any] = {}
circle["in"] = circle


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({(1, 2): 3}, {"(1, 2)": 3}),
        ({"a": [{(1, 2): {4}}]}, {"a": [{"(1, 2)": [4]}]}),
        (circle, {"in": {"in": {"in": {"in": "..."}}}}),
        (math.nan, "nan"),
        ([math.inf, 1.5], ["inf", 1.5]),
        (10**5000, "a int that cannot be shown"),
        (Mute(), "a Mute that cannot be shown"),
        ([Mute()], ["a Mute that cannot be shown"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_json_cannot_hold_spoils_no_line(value: Any, kept: Any) -> None:
    long = "x" * 2000
    line = json_line(value=value, other=long, more=[{"a": 1}])
    assert line["value"] == kept
    assert (line["other"], line["more"]) == (long, [{"a": 1}]), "others stay as they are"
    assert line["message"] == "x"


def test_what_a_line_of_json_always_has_is_not_replaced() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    given = dict.fromkeys(("time", "level", "logger", "exception"), "mine")
    line = json_line(**given, exc_info=info, other="mine")
    assert [name for name, value in line.items() if value == "mine"] == ["other"]
    assert list(line)[:4] == ["time", "level", "logger", "message"]
    assert (line["level"], line["logger"]) == ("info", "n")


# --- what the library says ------------------------------------------------------------------------


def test_a_failed_task_names_its_reason(queue: TaskQueue, caplog: pytest.LogCaptureFixture) -> None:
    def fail(task: object) -> None:
        raise ValueError("order 7 is gone")

    queue.push(make_task(task_id="t-1", user_id="alice", name="mail.send"))
    Worker(queue, fail, registry=CollectorRegistry()).run_once()
    assert lines(caplog, "task_failed") == [
        "task_failed task=t-1 task_name=mail.send user=alice attempt=1 "
        'error="ValueError: order 7 is gone"'
    ]


def test_a_user_of_a_tenant_is_named_with_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(payload: object, context: TaskContext) -> None:
        context.log("half done")
        raise ValueError("no")

    caplog.set_level(logging.DEBUG, "fairqueue")
    world.clock.set(THURSDAY)
    world.add("nine", user_id="ann", tenant="acme", retries=0)
    world.clock.set(at(5, 9))
    world.tick()
    worker = Worker(world.queue, registry=CollectorRegistry())
    worker.register("default", fail)
    worker.run_once()
    told = [record for record in caplog.records if vars(record).get("user") == "ann"]
    assert {vars(record).get("event") for record in told} >= {
        "schedule_added",
        "schedule_fired",
        "task_failed",
    }
    assert {vars(record).get("tenant") for record in told} == {"acme"}
    assert "half done" in {record.message for record in told}


def test_a_fire_logs_user_and_lateness(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.clock.set(THURSDAY)
    world.add("nine", user_id="alice")
    world.clock.set(at(5, 9, 0, 2))
    caplog.set_level(logging.DEBUG, "fairqueue")
    world.tick()
    task = fire_id("nine", at(5, 9))
    assert lines(caplog, "schedule_fired") == [
        f"schedule_fired schedule=nine task={task} user=alice late_ms=2000"
    ]


def test_a_contended_lock_is_told_to_those_who_listen_closely(
    scheduler: TaskScheduler, other: TaskScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    assert scheduler.tick().is_leader
    caplog.set_level(logging.INFO, "fairqueue")
    other.tick()
    assert lines(caplog, "lock_contended") == []
    caplog.set_level(logging.DEBUG, "fairqueue")
    other.tick()
    assert lines(caplog, "lock_contended") == [
        "lock_contended scheduler=two queue=default term_left_ms=10000"
    ]


def test_a_cycle_that_fails_says_whose_and_why(
    scheduler: TaskScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler._note_failure(RedisUnavailable("nobody answers at h:1"))
    scheduler._note_failure(KeyError("oops"))
    who = "cycle_failed scheduler=one queue=default"
    assert lines(caplog, "cycle_failed") == [
        f'{who} error="nobody answers at h:1"',
        f"""{who} error="KeyError: 'oops'\"""",
    ]


def test_a_cycle_that_fails_by_an_error_that_cannot_be_shown_says_so(
    scheduler: TaskScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler._note_failure(Mute())
    (line,) = lines(caplog, "cycle_failed")
    assert line.endswith('error="Mute: (its text cannot be read)"')
    assert scheduler.health().last_error == "(its text cannot be read)"


# --- all of it ------------------------------------------------------------------------------------

# What is logged in somebody else's words: an alert's headline, the lines of a run.
OTHERS = {("recipients", "self._logger"), ("context", "self.logger"), ("isolation", "logger")}


def calls_of(path: Path) -> list[tuple[str, ast.Call]]:
    """All calls of a module's methods of loggers and of log_event, with what they are called on."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.append((ast.unparse(node.func.value), node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.append((node.func.id, node))
    return found


METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def test_every_event_is_logged_with_its_fields_in_the_message() -> None:
    direct = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "logs.py":
            continue
        for on, call in calls_of(path):
            if not isinstance(call.func, ast.Attribute) or call.func.attr not in METHODS:
                continue
            if on.split(".")[-1] in ("logger", "_logger") and (path.stem, on) not in OTHERS:
                direct.append(f"{path.name}:{call.lineno}")
    assert direct == [], "use log_event: these say nothing without `extra`"


def test_no_field_has_the_name_of_what_each_record_has() -> None:
    usual: set[str] = {*vars(logging.makeLogRecord({})), "message", "asctime"} - {"exc_info"}
    clashes = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for on, call in calls_of(path):
            if on in ("log_event", "_log", "log_warning"):
                names: set[Any] = {each.arg for each in call.keywords}
                clashes += [f"{path.name}:{call.lineno} {name}" for name in names & usual]
    assert clashes == []
