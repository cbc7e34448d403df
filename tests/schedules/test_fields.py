"""The table of fields: everything that takes or shows a field of a schedule is made from it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
import redis

import fairqueue
from fairqueue.link.scripts import lua_folder
from fairqueue.models import ScheduledTask
from fairqueue.schedules.fields import (
    ADDABLE,
    FIELDS,
    KINDS,
    OPTIONAL,
    STORED,
    TABLE,
    ScheduleField,
    ScheduleOptions,
)

ROOT = Path(fairqueue.__file__).parent.parent
# What add_schedule takes by names of its own.
ARGUMENTS = {"cron_expr", "user_id", "priority", "payload", "timezone", "name", "metadata"}


def load_script() -> ModuleType:
    """Load scripts/field_table.py, which is not part of a package."""
    spec = importlib.util.spec_from_file_location(
        "field_table", ROOT / "scripts" / "field_table.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_options_of_type_checkers_are_those_of_the_table() -> None:
    assert set(ScheduleOptions.__annotations__) == set(ADDABLE) - ARGUMENTS
    hints = get_type_hints(ScheduleOptions)
    optional = {name for name, hint in hints.items() if type(None) in get_args(hint)}
    assert optional == {name for name in hints if FIELDS[name].default is None}


def test_a_schedule_that_is_read_has_the_fields_of_the_table() -> None:
    shown = {field.name for field in fields(ScheduledTask)}
    assert set(FIELDS) - shown == {"anchor"}


def test_the_page_of_schedules_has_the_table() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    assert load_script().with_table(page) == page, "run python scripts/field_table.py"


@pytest.mark.parametrize("field", TABLE, ids=lambda each: each.name)
def test_a_default_is_a_value_that_can_be_stored(field: ScheduleField) -> None:
    if field.name in OPTIONAL:
        field.check_stored(field.default)
    if field.name in STORED and field.default is not None and field.name != "user_id":
        assert field.check(field.to_user(field.default)) == field.default


def test_a_rule_is_one_of_the_kinds() -> None:
    assert [name for name in STORED if name in KINDS] == list(KINDS)


# --- one more row ---------------------------------------------------------------------------------


class Case(NamedTuple):
    """A new field of one kind: its row, and two values.

    first, second: as documents have them; the Python API takes them as well. option: the second
    on the command line. text: the second in the form; None if its box is not ticked.
    """

    default: str
    first: Any
    second: Any
    option: Sequence[str]
    text: str | None
    bad: Any
    more: str = ""


WINDOWS = [{"days": [1, 2], "from": "09:00", "to": "17:30"}]
CASES = {
    "text": Case("None", "one", "two", ["--new", "two"], "two", 7),
    "lines": Case("None", "one\nline", "two", ["--new", "two"], "two", 7),
    "cron": Case("None", "0 1 * * *", "0 2 * * *", ["--new", "0 2 * * *"], "0 2 * * *", "x"),
    "zone": Case("'UTC'", "Asia/Tokyo", "Europe/Rome", ["--new", "Europe/Rome"], "Europe/Rome", 7),
    "choice": Case("'a'", "b", "c", ["--new", "c"], "c", "d", "choices=dict(a='A', b='B', c='C')"),
    "priority": Case("Priority.NORMAL", 1, 5, ["--new", "5"], "5", 9, "least=1, most=6"),
    "integer": Case("None", 3, 4, ["--new", "4"], "4", -1),
    "number": Case("None", 1.5, 2.5, ["--new", "2.5"], "2.5", "x", "least=0, most=9"),
    "time": Case(
        "None",
        "2030-01-01T00:00:00+00:00",
        "2031-01-01T00:00:00+00:00",
        ["--new", "2031-01-01T00:00:00Z"],
        "2031-01-01T00:00:00",
        "x",
    ),
    "duration": Case("None", 60, 90, ["--new", "90s"], "90s", -1),
    "seconds": Case("None", 60, 90, ["--new", "90s"], "90s", -1),
    "backoff": Case("None", [1, 2], [3, 4], ["--new", "3s,4s"], "3s, 4s", -1),
    "windows": Case(
        "None",
        [{"days": [3]}],
        WINDOWS,
        ["--new", json.dumps(WINDOWS[0])],
        json.dumps(WINDOWS),
        [{}],
    ),
    "dates": Case("None", ["2030-01-01"], ["2030-01-02"], ["--new", "2030-01-02"], "2030-01-02", 0),
    "texts": Case(
        "None", ["a", "b"], ["a,b", "c"], ["--new", "a,b", "--new", "c"], '["a,b", "c"]', 7
    ),
    "period": Case("'a'", 60, "b", ["--new", "b"], "b", "d", "choices=dict(a='A', b='B')"),
    "period, a duration": Case(
        "'a'", "b", 90, ["--new", "90s"], "90s", -1, "choices=dict(a='A', b='B')"
    ),
    "object": Case("{}", {"a": 1}, {"a": 2}, ["--new", "a=2"], '{"a": 2}', 7),
    "flag": Case("False", True, False, ["--no-new"], None, "yes"),
    "flag, by default on": Case("True", False, True, ["--new"], "true", "yes"),
}
UNCHECKED = {"dates"}  # they are checked with the rule

PROGRAM = """
    import contextlib, io, json, sys
    from starlette.testclient import TestClient
    from fairqueue import FairQueueError, TaskQueue, TaskScheduler
    from fairqueue.cli.program import main
    from fairqueue.web import create_app
    from fairqueue.web.api import openapi_document

    url, script, case = sys.argv[1:]
    sys.path.insert(0, script)
    first, second, option, text, bad = json.loads(case)
    queue = TaskQueue.from_url(url)
    scheduler, found = TaskScheduler(queue), {}

    def stored(schedule_id="s"):
        documents = scheduler.export_schedules()
        (it,) = [each for each in documents if each["schedule_id"] == schedule_id]
        return it.get("new", "its default")

    scheduler.add_schedule("0 9 * * *", "alice", schedule_id="s", new=first)
    found["add"] = stored()
    found["get"] = scheduler.get_schedule("s").new is not None
    scheduler.update_schedule("s", new=second)
    found["update"] = stored()
    try:
        scheduler.update_schedule("s", new=bad)
    except FairQueueError as error:
        found["check"] = str(error)

    (document,) = scheduler.export_schedules()
    scheduler.import_schedules([{**document, "new": first}], dry_run=False)
    found["import"] = stored()
    found["changes"] = list(scheduler.changes("s")[0].fields)

    app = create_app(queue, auth=False)
    http = TestClient(app, base_url="http://localhost", client=("127.0.0.1", 5000))
    job = "/api/v1/scheduler/jobs"
    rule = {"cron_expr": "0 9 * * *", "user_id": "alice"}
    answer = http.post(job, json={**rule, "schedule_id": "r", "new": first})
    found["REST"] = [answer.status_code, "new" in answer.json(), stored("r")]
    answer = http.patch(job + "/s", json={"new": second})
    found["PATCH"] = [answer.status_code, stored()]
    schemas = openapi_document()["components"]["schemas"]
    found["OpenAPI"] = sorted(
        name for name, schema in schemas.items() if "new" in schema.get("properties", {})
    )

    scheduler.update_schedule("s", new=first)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main(["schedules", "update", "s", "--url", url, *option, "-o", "json"])
    found["CLI"] = ["new" in json.loads(said.getvalue()), stored()]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        found["--clear"] = main(["schedules", "update", "s", "--url", url, "--clear", "new"])
    found["cleared"] = stored()

    page = http.get("/new/schedule").text
    found["form"] = ['name="new"' in page, "What is new." in page]
    form = {"kind": "cron_expr", **rule, "user_id": "bob", "schedule_id": "f"}
    form |= {} if text is None else {"new": text}
    origin = {"Origin": "http://localhost"}
    http.post("/new/schedule", data=form, headers=origin)
    found["saved form"] = stored("f")

    import field_table
    found["docs"] = "| `new` |" in field_table.field_table()
    print(json.dumps(found))
"""


@pytest.mark.parametrize("name", CASES)
def test_one_more_row_appears_in_all_interfaces_and_docs(
    name: str, tmp_path: Path, redis_url: str, redis_client: redis.Redis
) -> None:
    case, kind = CASES[name], name.partition(",")[0]
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fairqueue", tmp_path / "fairqueue", ignore=ignored)
    shutil.copytree(lua_folder(), tmp_path / "lua", dirs_exist_ok=True)
    row = f'    F("new", "{kind}", {case.default}, "What is new.", label="New", group=TASK, '
    insert(tmp_path / "fairqueue/schedules/fields.py", '    F("title", ', row + case.more + "),\n")
    line = "    new: Any = None\n"
    insert(tmp_path / "fairqueue/models.py", "    revision: str = field(", line)

    values = json.dumps([case.first, case.second, case.option, case.text, case.bad])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), redis_url, str(ROOT / "scripts"), values],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    first, second = (
        "its default" if repr(value) == case.default else value
        for value in (case.first, case.second)
    )
    error = found.pop("check", "")
    assert bool(error) == (kind not in UNCHECKED)
    if kind == "text":
        assert error == (
            "new must be a string of 1 to 200 characters without control characters, not 7"
        )
    is_optional = case.default == "None"
    assert found == {
        "add": first,
        "get": True,
        "update": second,
        "import": first,
        "changes": ["new"],
        "REST": [201, True, first],
        "PATCH": [200, second],
        "OpenAPI": [
            "BulkFields",
            "Job",
            "JobChanges",
            "JobCopy",
            "JobReplacement",
            "NewJob",
            "ScheduledTask",
        ],
        "CLI": [True, second],
        "--clear": 0 if is_optional else 2,
        "cleared": "its default" if is_optional else second,
        "form": [True, kind != "choice"],
        "saved form": second,
        "docs": True,
    }


def insert(path: Path, before: str, text: str) -> None:
    """Put text before a line of a file."""
    old = path.read_text(encoding="utf-8")
    assert old.count(before) == 1
    path.write_text(old.replace(before, text + before), encoding="utf-8")
