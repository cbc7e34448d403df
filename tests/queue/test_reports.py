"""Reports without a server: what is kept of an attempt, how it is cut, and what failures share."""

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tasks import Mute

from fairqueue.queue.reports import (
    MAX_CONTEXT_BYTES,
    MAX_DOCUMENT_BYTES,
    MAX_LINE_LENGTH,
    MAX_LINES,
    MAX_TRACEBACK_BYTES,
    Failure,
    LogLines,
    Report,
    bounded,
    fingerprint,
)
from fairqueue.validation import MAX_ERROR_LENGTH


def failure_of(call: Callable[[], Any]) -> Failure:
    """How a call fails."""
    try:
        call()
    except BaseException as error:
        return Failure.of(error)
    raise AssertionError("it has not failed")


def raises(error: BaseException) -> Failure:
    def fail() -> None:
        raise error

    return failure_of(fail)


def report_of(failure: Failure, lines: LogLines | None = None, **fields: Any) -> Report:
    return Report.of_failure("job", failure, seconds=1.5, lines=lines, **fields)


def logged(*messages: str) -> LogLines:
    lines = LogLines()
    for message in messages:
        lines.keep(logging.INFO, message)
    return lines


# --- what is kept ---------------------------------------------------------------------------------


def test_a_success_without_log_lines_has_nothing_to_tell() -> None:
    assert Report(seconds=1.5).document == ""


def test_a_success_with_log_lines_tells_them() -> None:
    log, dropped = logged("begun", "done").kept()
    told = json.loads(Report(seconds=1.5, log=log, log_dropped=dropped).document)
    assert told.keys() == {"seconds", "log"}
    assert [line[1:] for line in told["log"]] == [["info", "begun"], ["info", "done"]]


def test_a_failure_tells_its_type_message_place_and_time() -> None:
    report = report_of(raises(ValueError("no such customer")), timed_out=True)
    told = json.loads(report.document)
    assert told.pop("traceback").endswith("ValueError: no such customer")
    assert told == {
        "seconds": 1.5,
        "error_type": "ValueError",
        "message": "no such customer",
        "timed_out": True,
        "fingerprint": report.fingerprint,
    }
    assert len(report.fingerprint) == 16
    assert "\n" not in report.document


def test_a_failure_knows_the_file_and_function_that_raised() -> None:
    assert raises(ValueError()).place == "test_reports.py:fail"
    assert Failure.of(ValueError()).place == ""


def test_a_report_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Report(seconds=1.0).seconds = 2.0  # type: ignore[misc]


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


def deep() -> None:
    deep()


def chained() -> None:
    try:
        raise KeyError("first")
    except KeyError as error:
        raise ValueError("second") from error


def grouped() -> None:
    raise ExceptionGroup("many", [ValueError(n) for n in range(50)])


def syntax() -> None:
    compile("a b", "made-up.py", "exec")


@pytest.mark.parametrize(
    "call",
    [
        lambda: raises_(Speechless()),
        lambda: raises_(Mute()),
        lambda: raises_(ValueError("\ud800")),
        lambda: raises_(ValueError("\0\x1b[31m")),
        lambda: raises_(type("\udc80", (Exception,), {})()),
        lambda: raises_(SystemExit(3)),
        lambda: raises_(KeyError()),
        deep,
        chained,
        grouped,
        syntax,
    ],
)
def test_whatever_was_raised_can_be_stored(call: Callable[[], None]) -> None:
    document = report_of(failure_of(call)).document
    assert json.loads(document.encode().decode())["error_type"]


def raises_(error: BaseException) -> None:
    raise error


# --- bounds ---------------------------------------------------------------------------------------


def test_a_long_message_is_cut() -> None:
    assert raises(ValueError("x" * 5000)).message == "x" * MAX_ERROR_LENGTH


def test_of_a_long_traceback_the_end_is_kept() -> None:
    found = raises(ValueError("ü" * 10_000 + " the end")).traceback
    assert found.endswith(" the end")
    assert MAX_TRACEBACK_BYTES - 2 <= len(found.encode()) <= MAX_TRACEBACK_BYTES


def test_of_many_log_lines_the_last_are_kept_and_the_others_counted() -> None:
    log, dropped = logged(*(str(n) for n in range(MAX_LINES + 50))).kept()
    assert [line.message for line in log] == [str(n) for n in range(50, MAX_LINES + 50)]
    assert dropped == 50


def test_a_long_log_line_is_cut_and_can_be_stored() -> None:
    (line,), _ = logged("\ud800" + "x" * 1000).kept()
    assert line.message == "?" + "x" * (MAX_LINE_LENGTH - 1)


def test_a_document_that_is_too_long_loses_its_oldest_log_lines() -> None:
    lines = logged(*(f"{n:03} " + "ü" * 490 for n in range(MAX_LINES + 7)))
    report = report_of(raises(ValueError("no")), lines)
    assert len(report.document.encode()) <= MAX_DOCUMENT_BYTES
    told = json.loads(report.document)
    assert told["traceback"] == report.traceback
    assert told["log"][-1][2].startswith(f"{MAX_LINES + 6:03} ")
    assert 0 < len(told["log"]) < MAX_LINES
    assert len(told["log"]) + told["log_dropped"] == MAX_LINES + 7


def test_a_document_that_is_still_too_long_loses_the_start_of_its_traceback() -> None:
    # Control characters take six bytes each as JSON.
    hostile = Failure(type="E", message="\1" * 2000, traceback="\1" * 8000 + "the end")
    document = report_of(hostile, logged("a line")).document
    assert len(document.encode()) <= MAX_DOCUMENT_BYTES
    told = json.loads(document)
    assert told["message"] == hostile.message
    assert told["traceback"].endswith("the end")


def test_lines_of_many_threads_are_all_counted() -> None:
    lines = LogLines()

    def log() -> None:
        for n in range(1000):
            lines.keep(logging.INFO, str(n))

    threads = [threading.Thread(target=log) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    kept, dropped = lines.kept()
    assert (len(kept), dropped) == (MAX_LINES, 4000 - MAX_LINES)


# --- the context of lines -------------------------------------------------------------------------


class Unreadable:
    def __str__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (7, 7),
        (2.5, 2.5),
        (True, True),
        (None, None),
        ("ä", "ä"),
        ("x" * 501, "x" * 500),
        ("\ud800", "?"),
        (float("nan"), "nan"),
        (2**70, str(2**70)),
        (b"x", "b'x'"),
        (Path("/x"), "/x"),
        (ValueError("no"), "no"),
        (Unreadable(), "a Unreadable that cannot be shown"),
        ({1: (2, {3})}, {"1": [2, [3]]}),
        ([[[[[5]]]]], [[[["..."]]]]),
    ],
)
def test_a_field_of_a_line_is_kept_as_json_can_hold_it(value: Any, kept: Any) -> None:
    found = bounded({"field": value})["field"]
    assert found == kept
    json.dumps(found, allow_nan=False).encode()


def test_what_is_in_itself_and_what_is_endless_is_cut() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert bounded({"field": 10**5000}) == {"field": "a int that cannot be shown"}
    wide = [[[[0] * 1000] * 1000] * 1000] * 1000
    for value in (circle, wide):
        assert len(json.dumps(bounded({"field": value}))) < MAX_CONTEXT_BYTES


def test_the_context_of_a_line_has_a_bound_and_says_what_was_left_out() -> None:
    kept = bounded({f"field-{n}": "ü" * 400 for n in range(10)})
    assert kept.pop("more_fields") == 8
    assert list(kept) == ["field-0", "field-1"]


def test_lines_with_much_context_go_as_others_do_the_oldest_first() -> None:
    lines = LogLines()
    for n in range(100):
        lines.keep(logging.INFO, f"line {n}", {"text": "x" * 500, "n": n})
    log, dropped = lines.kept()
    document = Report(seconds=1.0, log=log, log_dropped=dropped).document
    assert len(document.encode()) <= MAX_DOCUMENT_BYTES
    told = json.loads(document)
    assert told["log"][-1][2] == "line 99"
    assert len(told["log"]) + told["log_dropped"] == 100
    numbers = [int(line[2].split()[1]) for line in told["log"]]
    assert [told["log_context"][str(i)]["n"] for i in range(len(numbers))] == numbers


def test_lines_keep_their_three_values_for_readers_of_older_versions() -> None:
    lines = LogLines()
    lines.keep(logging.INFO, "plain")
    lines.keep(logging.INFO, "with", {"n": 1})
    told = json.loads(Report(seconds=1.0, log=lines.kept()[0]).document)
    assert [len(line) for line in told["log"]] == [3, 3]
    assert told["log_context"] == {"1": {"n": 1}}


# --- fingerprints ---------------------------------------------------------------------------------


def mark(
    message: str, *, task: str = "job", kind: str = "ValueError", place: str = "a.py:f"
) -> str:
    return fingerprint(task, Failure(type=kind, message=message, place=place))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order 7 is gone", "order 12345 is gone"),
        ("took 1.5 s", "took 20 s"),
        ("no user 'alice'", "no user 'bob'"),
        ('no file "a b"', 'no file "c"'),
        ("object at 0x7f00aa", "object at 0x7f11bb12"),
        ("commit deadbeef01 is bad", "commit 0123456789abcdef is bad"),
        (
            "run 123e4567-e89b-12d3-a456-426614174000 failed",
            "run FFFFFFFF-0000-12d3-a456-426614174abc failed",
        ),
    ],
)
def test_failures_that_differ_in_ids_and_numbers_are_of_one_kind(one: str, other: str) -> None:
    assert mark(one) == mark(other)


@pytest.mark.parametrize(
    "other",
    [
        mark("another message"),
        mark("no", task="other"),
        mark("no", kind="KeyError"),
        mark("no", place="b.py:f"),
        mark("no", place="a.py:g"),
    ],
)
def test_other_failures_are_of_another_kind(other: str) -> None:
    assert mark("no") != other


def test_the_line_of_a_failure_does_not_change_its_kind() -> None:
    def fails(at: int) -> None:
        if at == 1:
            raise ValueError("no")
        raise ValueError("no")

    one, two = failure_of(lambda: fails(1)), failure_of(lambda: fails(2))
    assert one.traceback != two.traceback
    assert fingerprint("job", one) == fingerprint("job", two)


def test_a_time_out_is_of_one_kind_wherever_it_hits() -> None:
    hits = [
        Failure(type="TimedOut", message="ran for 5 s", place=place) for place in ("a:f", "b:g")
    ]
    assert len({fingerprint("job", hit, timed_out=True) for hit in hits}) == 1
