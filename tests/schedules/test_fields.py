"""The table of fields: everything that takes or shows a field of a schedule is made from it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

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

ROW = """
    F("cost_center", "text", None, "Cost center that pays for its runs.",
      label="Cost center", group=TASK),
"""
LINE = "    cost_center: str | None = None\n"
PROGRAM = """
    import contextlib, io, json, sys
    from starlette.testclient import TestClient
    from fairqueue import FairQueueError, TaskQueue, TaskScheduler
    from fairqueue.cli.program import main
    from fairqueue.schedules.fields import FIELDS
    from fairqueue.web import create_app
    from fairqueue.web.api import openapi_document

    url, script = sys.argv[1:]
    sys.path.insert(0, script)
    queue = TaskQueue.from_url(url)
    scheduler, found = TaskScheduler(queue), {}

    def stored():
        return scheduler.get_schedule("s").cost_center

    scheduler.add_schedule("0 9 * * *", "alice", schedule_id="s", cost_center="add")
    found["add"] = stored()
    scheduler.update_schedule("s", cost_center="update")
    found["update"] = stored()
    try:
        scheduler.update_schedule("s", cost_center=7)
    except FairQueueError as error:
        found["check"] = str(error)

    (document,) = scheduler.export_schedules()
    found["export"] = document["cost_center"]
    scheduler.import_schedules([{**document, "cost_center": "import"}], dry_run=False)
    found["import"] = stored()
    found["changes"] = scheduler.changes("s")[0].fields["cost_center"]

    app = create_app(queue, auth=False)
    http = TestClient(app, base_url="http://localhost", client=("127.0.0.1", 5000))
    job = "/api/v1/scheduler/jobs"
    body = {"cron_expr": "0 9 * * *", "user_id": "alice", "cost_center": "rest"}
    found["REST"] = http.post(job, json=body).json()["cost_center"]
    found["PATCH"] = http.patch(job + "/s", json={"cost_center": "patch"}).json()["cost_center"]
    schemas = openapi_document()["components"]["schemas"]
    found["OpenAPI"] = sorted(
        name for name, schema in schemas.items() if "cost_center" in schema.get("properties", {})
    )

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main(["schedules", "update", "s", "--url", url, "--cost-center", "cli", "-o", "json"])
    found["CLI"] = json.loads(said.getvalue())["cost_center"]
    with contextlib.redirect_stdout(said):
        main(["schedules", "update", "s", "--url", url, "--clear", "cost-center"])
    found["--clear"] = stored()

    page = http.get("/new/schedule").text
    found["form"] = 'name="cost_center"' in page and "Cost center that pays" in page
    form = {"kind": "cron_expr", "cron_expr": "0 9 * * *", "user_id": "bob", "schedule_id": "f"}
    origin = {"Origin": "http://localhost"}
    http.post("/new/schedule", data={**form, "cost_center": "form"}, headers=origin)
    found["saved form"] = scheduler.get_schedule("f").cost_center

    import field_table
    found["docs"] = "| `cost_center` | text |" in field_table.field_table()
    print(json.dumps(found))
"""


def test_one_more_row_appears_in_all_interfaces_and_docs(
    tmp_path: Path, redis_url: str, redis_client: redis.Redis
) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fairqueue", tmp_path / "fairqueue", ignore=ignored)
    shutil.copytree(lua_folder(), tmp_path / "lua", dirs_exist_ok=True)
    insert(tmp_path / "fairqueue/schedules/fields.py", '    F("title", ', ROW)
    insert(tmp_path / "fairqueue/models.py", "    revision: str = field(", LINE)

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), redis_url, str(ROOT / "scripts")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "add": "add",
        "update": "update",
        "check": "cost_center must be a string of 1 to 200 characters without control characters, "
        "not 7",
        "export": "update",
        "import": "import",
        "changes": ["update", "import"],
        "REST": "rest",
        "PATCH": "patch",
        "OpenAPI": [
            "BulkFields",
            "Job",
            "JobChanges",
            "JobCopy",
            "JobReplacement",
            "NewJob",
            "ScheduledTask",
        ],
        "CLI": "cli",
        "--clear": None,
        "form": True,
        "saved form": "form",
        "docs": True,
    }


def insert(path: Path, before: str, text: str) -> None:
    """Put text before a line of a file."""
    old = path.read_text(encoding="utf-8")
    assert old.count(before) == 1
    path.write_text(old.replace(before, text.lstrip("\n") + before), encoding="utf-8")
