"""Objects as documents: what all faces write, and that secrets are not in it."""

import json
import math
from dataclasses import MISSING
from dataclasses import fields as fields_of
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from fairqueue.access.credentials import KeyInfo, NewKey
from fairqueue.history.records import Attempt, Run, RunDetails
from fairqueue.inspection.documents import document
from fairqueue.inspection.views import DayCount, Outcome, Preview, ScheduleView
from fairqueue.models import Page, ScheduledTask, Task
from fairqueue.queue.reports import LogLine
from fairqueue.schedules.changes import ScheduleChange
from fairqueue.schedules.import_export import Diff
from fairqueue.validation import Priority
from fairqueue.web.api.response_models import shape

NOON = datetime(2026, 3, 5, 12, tzinfo=UTC)


def make_schedule(**fields: Any) -> ScheduledTask:
    usual: dict[str, Any] = {
        "schedule_id": "nine",
        "cron_expr": "0 9 * * *",
        "user_id": "ann",
        "priority": Priority.HIGH,
        "payload": {},
        "timezone": "UTC",
        "name": "mail",
        "metadata": {},
        "is_active": True,
        "disabled_reason": None,
        "created_at": NOON,
        "updated_at": NOON,
        "last_run": None,
        "next_run": None,
        "run_count": 0,
        "missed_count": 0,
    }
    return ScheduledTask(**(usual | fields))


def make_run(**fields: Any) -> Run:
    usual = {
        each.name: None if each.default is MISSING else each.default for each in fields_of(Run)
    }
    said = {"task_id": "t1", "status": "failed", "user_id": "ann", "name": "mail"}
    times = {"pushed_at": NOON, "due_at": NOON}
    rest = {
        "priority": Priority.LOW,
        "run_type": "queued",
        "attempts": 1,
        "cancel_requested": False,
    }
    return Run(**(usual | said | times | rest | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (NOON, "2026-03-05T12:00:00Z"),
        (NOON + timedelta(milliseconds=7), "2026-03-05T12:00:00.007Z"),
        (NOON.astimezone(ZoneInfo("Europe/Berlin")), "2026-03-05T13:00:00+01:00"),
        (date(2026, 3, 5), "2026-03-05"),
        (timedelta(minutes=1.5), 90.0),
        (Priority.HIGH, 4),
        (math.nan, None),
        (math.inf, None),
        (True, True),
        (("a", 1), ["a", 1]),
        ({"a": NOON}, {"a": "2026-03-05T12:00:00Z"}),
        (
            LogLine(0, "info", "hello", {"n": 7, "token": "hush"}),
            {
                "at": "1970-01-01T00:00:00Z",
                "level": "info",
                "message": "hello",
                "context": {"n": 7, "token": "***"},
            },
        ),
        (Page([1, 2], "next"), {"items": [1, 2], "cursor": "next"}),
    ],
)
def test_a_value_is_written_in_one_way(value: object, written: object) -> None:
    assert document(value) == written


def test_what_has_no_form_in_json_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="object"):
        document({"a": object()})


def test_a_schedule_stands_beside_what_is_said_of_it() -> None:
    outcome = Outcome(task_id="t1", status="failed", ended_at=NOON)
    view = ScheduleView(
        schedule=make_schedule(every=timedelta(seconds=90), revision="r1"),
        state="active",
        sentence="At 09:00",
        outcomes=[outcome],
    )
    written = document(view)
    assert (written["schedule_id"], written["every"], written["state"]) == ("nine", 90.0, "active")
    assert written["outcomes"] == [
        {"task_id": "t1", "status": "failed", "ended_at": "2026-03-05T12:00:00Z"}
    ]
    assert written["etag"].startswith("r1.")
    assert "revision" not in written


def test_a_run_stands_beside_its_attempts_and_its_stored_text_is_not_told() -> None:
    attempt = Attempt(
        number=1,
        outcome="failed",
        started_at=NOON,
        ended_at=NOON,
        seconds=1.0,
        worker_id="w",
        host="h",
        pid=1,
        log=(LogLine(0, "info", "hello"),),
    )
    task = Task.create(user_id="ann", payload={"to": "bo", "password": "hunter2"})
    written = document(RunDetails(run=make_run(), attempts=[attempt], task=task))
    assert (written["task_id"], written["attempts"][0]["log"][0]["message"]) == ("t1", "hello")
    assert written["task"]["payload"] == {"to": "bo", "password": "***"}
    assert "hunter2" not in json.dumps(written)


def test_a_secret_of_a_key_is_not_in_its_document() -> None:
    info = KeyInfo(
        key_id="k",
        name="ci",
        kind="key",
        role="viewer",
        tenant=None,
        created_at=NOON,
        created_by="ann",
        expires_at=None,
    )
    written = document(NewKey(secret="fq_hunter2", info=info))
    assert written["key_id"] == "k"
    assert "secret" not in written


def test_secrets_are_masked_where_users_put_json_and_ids_are_not_taken_for_secrets() -> None:
    change = ScheduleChange(at=NOON, by="ann", note=None, fields={"payload": ({"token": "a"}, {})})
    assert document(change)["fields"] == {"payload": [{"token": "***"}, {}]}
    diff = Diff(dry_run=True, changed={"my_token": {"payload": ({"token": "a"}, {"token": "b"})}})
    assert document(diff)["changed"] == {"my_token": {"payload": [{"token": "***"}] * 2}}
    run = make_run(result={"password": "hunter2", "rows": 8})
    assert document(run)["result"] == {"password": "***", "rows": 8}


@pytest.mark.parametrize(
    "value",
    [
        make_schedule(every=timedelta(seconds=90), payload={"a": 1}),
        make_run(result=[1]),
        Preview(rule="r", sentence="s", timezone="UTC", runs=[NOON], warnings=[]),
        Diff(dry_run=False, changed={"a": {"priority": (3, 5)}}),
        DayCount(day=date(2026, 3, 5)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_model_of_an_object_is_that_of_its_document(value: Any) -> None:
    written = json.loads(json.dumps(document(value)))
    kind: Any = type(value)
    model = msgspec.convert(written, shape(kind))
    assert set(written) == set(model.__struct_fields__)
