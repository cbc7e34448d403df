"""The REST API: what each endpoint does, and what it says when it cannot."""

import re
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.rest import Api, Client, days_ago, fail, make_app
from helpers.world import World
from starlette.routing import Mount, Route

from fairqueue.access.credentials import AccessStore
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.web import create_app
from fairqueue.web.api import openapi_document
from fairqueue.web.api.endpoint import (
    LISTING,
    NEW,
    OBJECT,
    OPEN,
    PREFIX,
    SHARED,
    ApiRequest,
    Endpoint,
    Reply,
)
from fairqueue.web.api.endpoints import ENDPOINTS
from fairqueue.web.api.service import MAX_BODY_BYTES, Routes, Service

JOB = "/scheduler/jobs/acme-daily"
NIGHTLY = {"user_id": "bo", "cron_expr": "0 3 * * *", "schedule_id": "nightly"}

# The endpoints of the specification that this API follows.
SPECIFIED = """
GET /scheduler/jobs
POST /scheduler/jobs
GET /scheduler/jobs/{id}
PUT /scheduler/jobs/{id}
DELETE /scheduler/jobs/{id}
POST /scheduler/jobs/{id}/toggle
POST /scheduler/jobs/{id}/run
GET /scheduler/jobs/{id}/runs
GET /scheduler/runs
GET /scheduler/runs/{id}
POST /scheduler/runs/{id}/retry
POST /scheduler/runs/{id}/cancel
GET /scheduler/failed
POST /scheduler/failed/{id}/retry
DELETE /scheduler/failed/{id}
"""


@pytest.fixture
def admin(api: Api) -> Client:
    return api.client("admin")


# --- the table ------------------------------------------------------------------------------------


def test_the_specified_endpoints_are_all_there() -> None:
    known = {f"{each.method} {re.sub(r'{[a-z_]+}', '{id}', each.path)}" for each in ENDPOINTS}
    wanted = SPECIFIED.split("\n")[1:-1]
    assert len(wanted) == 15
    assert set(wanted) <= known


def test_names_and_paths_of_operations_are_unique() -> None:
    assert len({each.name for each in ENDPOINTS}) == len(ENDPOINTS)
    assert len({(each.method, each.path) for each in ENDPOINTS}) == len(ENDPOINTS)


def test_a_fixed_name_wins_over_an_id_and_only_for_its_method() -> None:
    routes = Routes(ENDPOINTS)
    assert routes.find("GET", ["scheduler", "jobs", "export"])[0].name == "export_jobs"
    assert routes.find("GET", ["scheduler", "jobs", "bulk"])[0].name == "get_job"
    assert routes.find("POST", ["scheduler", "jobs", "bulk"])[0].name == "change_jobs"


GUIDE = (Path(__file__).parents[3] / "docs" / "rest.md").read_text(encoding="utf-8")
TENANT = {OBJECT: "own", LISTING: "own", NEW: "own", SHARED: "no", OPEN: "any"}


def test_the_guide_lists_every_operation_as_it_is() -> None:
    rows = re.findall(r"^\| ([A-Z]+) \| `([^`]+)` \| (\w+) \| (\w+) \| (.+) \|$", GUIDE, re.M)
    assert rows == [
        (each.method, each.path, each.role or "nobody", TENANT[each.tenants], each.summary)
        for each in ENDPOINTS
    ]


@pytest.mark.one_partition
def test_the_examples_of_the_guide_work(world: World) -> None:
    secret = AccessStore(world.queue.link).create_key("ann", "admin", by="test").secret
    client = Client(make_app(world.queue), prefix="")
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", GUIDE, re.S | re.M)).replace("\\\n", " ")
    sent = [line for line in commands.splitlines() if line.startswith("curl ")]
    for line in sent:
        command, _, promised = line.partition("  # ")
        words = shlex.split(command.replace("$KEY", secret).replace("$API", PREFIX))[1:]
        response = curl(client, words)
        assert response.status_code == int(promised) if promised else response.is_success, line
    assert len(sent) > 10


def curl(client: Client, words: list[str]) -> httpx.Response:
    """Send what curl would, as far as the guide uses it."""
    method, data, headers, url = None, None, {}, ""
    rest = iter(words)
    for word in rest:
        if word == "-X":
            method = next(rest)
        elif word == "-d":
            data = next(rest)
        elif word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        else:
            url = word
    method = method or ("GET" if data is None else "POST")
    return client.send_own(method, url, headers=headers, content=data)


# --- jobs -----------------------------------------------------------------------------------------


def test_a_job_is_made_and_found_where_the_answer_says(admin: Client) -> None:
    made = admin.send("POST", "/scheduler/jobs", json={**NIGHTLY, "timezone": "Europe/Berlin"})
    assert made.status_code == 201
    assert made.headers["location"] == f"{PREFIX}/scheduler/jobs/nightly"
    job = admin.get("/scheduler/jobs/nightly")
    assert job == made.json()
    assert (job["user_id"], job["timezone"], job["state"]) == ("bo", "Europe/Berlin", "active")
    assert job["sentence"]
    assert job["next_run"].endswith("Z")


def test_a_job_with_a_bad_cron_is_refused_and_not_stored(api: Api, admin: Client) -> None:
    before = api.state()
    problem = admin.refused(422, "POST", "/scheduler/jobs", json={**NIGHTLY, "cron_expr": "61 * *"})
    assert problem["field"] == "cron_expr"
    assert "61 * *" in problem["detail"]
    assert api.state() == before


def test_a_job_id_that_is_taken_is_a_conflict(admin: Client) -> None:
    body = {**NIGHTLY, "schedule_id": "acme-daily"}
    assert "acme-daily" in admin.refused(409, "POST", "/scheduler/jobs", json=body)["detail"]


def test_all_kinds_of_rules_and_options_can_be_said(admin: Client) -> None:
    body = {
        "user_id": "bo",
        "every": 90,
        "start": "2026-01-01T00:00:00+02:00",
        "anchor": "2026-01-01T00:00:00Z",
        "windows": [{"days": [1, 2, 3], "from": "09:00", "to": "17:30"}],
        "exclude": ["2026-12-25"],
        "max_runs": 9,
        "misfire": "skip",
        "jitter": 5,
        "overlap": "skip",
        "retries": 2,
        "backoff": [1, 2.5],
        "backoff_cap": 90,
        "backoff_multiplier": 1.5,
        "backoff_jitter": "full",
        "timeout": 30,
        "max_failures": 3,
        "metadata": {"team": "ops"},
        "priority": 6,
        "name": "mail",
        "tenant": "globex",
    }
    job = admin.ok("POST", "/scheduler/jobs", json=body)
    said = {name: job[name] for name in body if name not in ("anchor", "start")}
    assert said == {name: body[name] for name in said}
    assert job["start"] == "2025-12-31T22:00:00Z"


def test_a_replacement_sets_what_it_does_not_name_to_its_default(admin: Client) -> None:
    definition = {"user_id": "acme-ann", "cron_expr": "0 10 * * *", "tenant": "acme"}
    job = admin.ok("PUT", JOB, json=definition)
    assert (job["cron_expr"], job["name"], job["payload"]) == ("0 10 * * *", "default", {})
    assert (job["tenant"], job["is_active"]) == ("acme", True)


def test_a_patch_changes_the_fields_that_it_names_and_no_others(admin: Client) -> None:
    before = admin.get(JOB)
    after = admin.ok("PATCH", JOB, json={"every": 3600})
    assert (after["every"], after["cron_expr"] or None) == (3600.0, None)
    kept = ("name", "payload", "metadata", "priority", "tenant", "timezone")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_a_masked_value_that_is_sent_back_keeps_what_is_stored(api: Api, admin: Client) -> None:
    payload = admin.get(JOB)["payload"]
    assert payload == {"to": "bo", "password": "***"}
    admin.ok("PATCH", JOB, json={"payload": {**payload, "to": "cy"}})
    task_id = admin.ok("POST", f"{JOB}/run")["task_id"]
    info = api.world.queue.get(task_id)
    assert info is not None
    assert info.task is not None
    assert info.task.payload == {"to": "cy", "password": "hunter2"}


def test_a_patch_without_fields_is_refused(admin: Client) -> None:
    assert "at least one field" in admin.refused(422, "PATCH", JOB, json={})["detail"]


def test_a_deleted_job_is_gone(admin: Client) -> None:
    assert admin.send("DELETE", JOB).status_code == 204
    assert "acme-daily" in admin.refused(404, "GET", JOB)["detail"]
    assert admin.refused(404, "DELETE", JOB)["type"].endswith(":unknown-schedule")


def test_toggle_pauses_and_then_resumes(admin: Client) -> None:
    assert admin.ok("POST", f"{JOB}/toggle")["is_active"] is False
    assert admin.ok("POST", f"{JOB}/toggle", json={})["is_active"] is True


def test_a_pause_keeps_its_note_and_its_end(api: Api, admin: Client) -> None:
    until = days_ago(api.world.clock, -2)
    job = admin.ok("POST", f"{JOB}/pause", json={"note": "holidays", "until": until})
    assert (job["state"], job["pause_note"], job["paused_by"]) == (
        "paused",
        "holidays",
        "admin of None",
    )
    assert job["paused_until"] == until.replace("+00:00", "Z")
    assert admin.ok("POST", f"{JOB}/resume")["state"] == "active"


def test_a_job_that_is_triggered_runs_at_once(api: Api, admin: Client) -> None:
    response = admin.send("POST", f"{JOB}/run", json={"payload": {"now": True}})
    task_id = response.json()["task_id"]
    assert response.headers["location"] == f"{PREFIX}/scheduler/runs/{task_id}"
    run = admin.get(f"/scheduler/runs/{task_id}")
    assert (run["run_type"], run["triggered_by"]) == ("manual", "admin of None")
    assert (run["schedule_id"], run["task"]["payload"]) == ("acme-daily", {"now": True})
    assert [each["task_id"] for each in admin.get(f"{JOB}/runs")["items"]] == [task_id]


def test_the_runs_of_a_job_that_is_not_there_are_not_found(admin: Client) -> None:
    admin.refused(404, "GET", "/scheduler/jobs/nobody/runs")


def test_a_copy_is_like_the_original_but_for_what_is_said(admin: Client) -> None:
    body = {"schedule_id": "acme-copy", "cron_expr": "0 12 * * *"}
    copied = admin.ok("POST", f"{JOB}/copy", json=body)
    assert (copied["schedule_id"], copied["cron_expr"]) == ("acme-copy", "0 12 * * *")
    assert copied["name"] == "acme-report"


def test_a_backfill_is_counted_first_and_then_done(api: Api, admin: Client) -> None:
    span = {"start": days_ago(api.world.clock, 3), "end": days_ago(api.world.clock, 0)}
    assert admin.ok("POST", f"{JOB}/backfill", json=span)["filled"] == 0
    done = admin.ok("POST", f"{JOB}/backfill", json={**span, "dry_run": False})
    assert (done["moments"], done["filled"]) == (3, 3)
    moments = admin.get(f"{JOB}/moments", params=span)["items"]
    assert [each["outcome"] for each in moments] == ["backfilled"] * 3


def test_changes_of_a_job_say_who_made_them_and_hide_secrets(admin: Client) -> None:
    admin.ok("PATCH", JOB, json={"payload": {"password": "swordfish"}, "priority": 5})
    response = admin.send("GET", f"{JOB}/changes")
    change, making = response.json()["items"]
    assert making["made"]
    assert (change["by"], change["fields"]["priority"]) == ("admin of None", [3, 5])
    assert "swordfish" not in response.text
    assert "hunter2" not in response.text


def test_changes_of_a_job_hide_secrets_also_where_a_value_is_cut(admin: Client) -> None:
    payload = {"password": "swordfish", "text": "x" * 1000}
    admin.ok("PATCH", JOB, json={"payload": payload})
    admin.ok("PATCH", JOB, json={"payload": {}})
    assert "swordfish" not in admin.send("GET", f"{JOB}/changes").text


def test_logs_and_chart_of_a_job_tell_of_its_runs(api: Api, admin: Client) -> None:
    api.world.queue.cancel("acme-waiting")
    admin.ok("POST", f"{JOB}/run")
    fail(api.world.queue)
    (line,) = admin.get(f"{JOB}/logs")["items"]
    assert (line["level"], line["message"]) == ("info", "looking for the mailbox")
    assert line["context"] == {"box": 7, "password": "***"}
    days = admin.get(f"{JOB}/chart", params={"days": 7})["items"]
    assert [each["failed"] for each in days] == [0, 0, 0, 0, 0, 0, 1]


def test_jobs_are_filtered(admin: Client) -> None:
    admin.ok("POST", "/scheduler/jobs", json=NIGHTLY)

    def found(**query: Any) -> list[str]:
        return [each["schedule_id"] for each in admin.get("/scheduler/jobs", params=query)["items"]]

    assert sorted(found()) == ["acme-daily", "nightly"]
    assert found(user_id="bo") == ["nightly"]
    assert found(contains="DAIL") == ["acme-daily"]
    assert found(name_prefix="acme-") == ["acme-daily"]
    assert found(tenant="acme") == ["acme-daily"]
    assert found(is_active=False) == []


def test_bulk_counts_first_and_acts_on_what_matches(admin: Client) -> None:
    admin.ok("POST", "/scheduler/jobs", json=NIGHTLY)
    counted = admin.ok("POST", "/scheduler/jobs/bulk", json={"action": "pause", "user_id": "bo"})
    assert (counted["matched"], counted["done"]) == (1, 0)
    body = {"action": "update", "ids": ["nightly"], "changes": {"every": 60}, "dry_run": False}
    assert admin.ok("POST", "/scheduler/jobs/bulk", json=body)["done"] == 1
    assert admin.get("/scheduler/jobs/nightly")["every"] == 60.0
    assert admin.get(JOB)["every"] is None


def test_an_operator_may_pause_many_but_not_remove_them(api: Api) -> None:
    operator = api.client("operator")
    body = {"action": "remove", "dry_run": False}
    operator.refused(403, "POST", "/scheduler/jobs/bulk", json=body)
    assert (
        operator.ok("POST", "/scheduler/jobs/bulk", json={**body, "action": "pause"})["done"] == 1
    )


def test_an_unknown_field_of_a_nested_object_is_named(admin: Client) -> None:
    body = {"action": "update", "changes": {"prority": 1}}
    problem = admin.refused(422, "POST", "/scheduler/jobs/bulk", json=body)
    assert problem["field"] == "changes.prority"


def test_an_export_can_be_imported_and_changes_nothing(admin: Client) -> None:
    exported = admin.get("/scheduler/jobs/export")
    assert exported["documents"][0]["payload"]["password"] == "hunter2"  # for admins, whole
    diff = admin.ok("POST", "/scheduler/jobs/import", json={**exported, "dry_run": False})
    assert (diff["unchanged"], diff["changed"]) == (["acme-daily"], {})


def test_an_import_tells_the_difference_without_secrets(admin: Client) -> None:
    (document,) = admin.get("/scheduler/jobs/export")["documents"]
    document |= {"payload": {"password": "swordfish"}, "priority": 5}
    response = admin.send("POST", "/scheduler/jobs/import", json={"documents": [document]})
    assert response.json()["changed"]["acme-daily"]["priority"] == [3, 5]
    assert "swordfish" not in response.text
    assert admin.get(JOB)["priority"] == 3


def test_a_bad_document_is_named(admin: Client) -> None:
    body = {"documents": [{"schedule_id": "x", "user_id": "bo", "cron_expr": "bad"}]}
    problem = admin.refused(422, "POST", "/scheduler/jobs/import", json=body)
    assert "document 0 ('x'), field 'cron_expr'" in problem["detail"]


@pytest.mark.parametrize(
    "field", ["every", "timeout", "jitter", "start", "end", "anchor", "backoff", "at", "catch_up"]
)
def test_a_number_of_hundreds_of_digits_in_a_document_is_refused(admin: Client, field: str) -> None:
    """Fields of documents have no type of their own that would refuse it before."""
    rule = {} if field in ("every", "at") else {"cron_expr": "0 9 * * *"}
    document = {"schedule_id": "x", "user_id": "bo", **rule, field: int("9" * 400)}
    for dry_run in (True, False):
        body = {"documents": [document], "dry_run": dry_run}
        problem = admin.refused(422, "POST", "/scheduler/jobs/import", json=body)
        assert f"field '{field}': {field} must be" in problem["detail"]
        assert "not 9999" in problem["detail"]


def test_what_comes_next_is_told(admin: Client) -> None:
    (first,) = admin.get("/scheduler/upcoming")["items"]
    assert first["schedule"]["schedule_id"] == "acme-daily"
    assert first["at"] == first["schedule"]["next_run"]


@pytest.mark.untidy
@pytest.mark.one_partition
def test_jobs_that_cannot_be_read_are_listed_as_problems(api: Api, admin: Client) -> None:
    api.world.redis.hset(api.world.queue.keys["schedules"], "acme-daily", "{")
    problem = admin.refused(500, "GET", JOB)
    assert problem["type"].endswith(":broken-record")
    assert "acme-daily" in problem["detail"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_rule_is_previewed_in_its_zone_with_warnings(api: Api, method: str) -> None:
    rule: dict[str, Any] = {"cron_expr": "30 2 * * *", "timezone": "Europe/Berlin", "count": 100}
    request = {"params": rule} if method == "GET" else {"json": rule}
    preview = api.client("viewer").send(method, "/preview", **request).json()
    assert len(preview["runs"]) == 100
    assert preview["runs"][0][-6:] in ("+01:00", "+02:00")


def test_a_rule_that_is_none_cannot_be_previewed(admin: Client) -> None:
    admin.refused(422, "GET", "/preview")
    query = {"cron_expr": "* * * * *", "timezone": "Mars/Base"}
    assert admin.refused(422, "GET", "/preview", params=query)["field"] == "timezone"


# --- runs -----------------------------------------------------------------------------------------


def test_a_run_is_told_with_its_attempts_and_their_logs(admin: Client) -> None:
    run = admin.get("/scheduler/runs/acme-failed")
    (attempt,) = run["attempts"]
    assert (run["status"], attempt["outcome"]) == ("failed", "failed")
    assert attempt["error"] == "no such mailbox"
    (line,) = attempt["log"]
    assert (line["level"], line["message"]) == ("info", "looking for the mailbox")
    assert line["context"] == {"box": 7, "password": "***"}


def test_runs_are_filtered(admin: Client) -> None:
    def found(**query: Any) -> list[str]:
        return [each["task_id"] for each in admin.get("/scheduler/runs", params=query)["items"]]

    assert found() == ["acme-waiting", "acme-running", "acme-failed"]
    assert found(status=["failed", "pending"]) == ["acme-waiting", "acme-failed"]
    assert found(user_id="nobody") == []
    assert found(since="2100-01-01T00:00:00Z") == []
    admin.refused(422, "GET", "/scheduler/runs", params={"status": "lost"})


def test_a_failed_run_that_is_retried_becomes_a_new_run(admin: Client) -> None:
    new_id = admin.ok("POST", "/scheduler/runs/acme-failed/retry")["task_id"]
    assert admin.get(f"/scheduler/runs/{new_id}")["retry_of"] == "acme-failed"
    assert admin.get("/scheduler/runs/acme-failed")["retried_as"] == new_id
    assert admin.ok("POST", "/scheduler/failed/acme-failed/retry")["task_id"] == new_id


def test_a_failed_run_can_be_retried_with_another_payload(admin: Client) -> None:
    body = {"payload": {"to": "dee"}}
    new_id = admin.ok("POST", "/scheduler/runs/acme-failed/retry", json=body)["task_id"]
    assert admin.get(f"/tasks/{new_id}")["task"]["payload"] == {"to": "dee"}


def test_only_failed_runs_are_retried(admin: Client) -> None:
    admin.refused(404, "POST", "/scheduler/runs/acme-running/retry")


def test_a_running_run_is_told_to_end(admin: Client) -> None:
    assert admin.ok("POST", "/scheduler/runs/acme-running/cancel") == {"cancelled": True}
    assert admin.get("/scheduler/runs/acme-running")["cancel_requested"] is True


def test_a_run_that_has_ended_cannot_be_cancelled(admin: Client) -> None:
    problem = admin.refused(409, "POST", "/scheduler/runs/acme-failed/cancel")
    assert "has ended" in problem["detail"]
    admin.refused(404, "POST", "/scheduler/runs/nobody/cancel")


def test_old_runs_are_counted_and_then_forgotten(admin: Client) -> None:
    body = {"older_than": 0}
    path = "/scheduler/runs/prune"
    assert admin.ok("POST", path, json=body) == {"dry_run": True, "count": 1}
    assert admin.ok("POST", path, json={**body, "dry_run": False})["count"] == 1
    admin.refused(404, "GET", "/scheduler/runs/acme-failed")


def test_failed_runs_are_listed_and_grouped_by_cause(api: Api, admin: Client) -> None:
    (run,) = admin.get("/scheduler/failed")["items"]
    (group,) = admin.get("/scheduler/failed/groups")["items"]
    assert (group["count"], group["latest"]["task_id"]) == (1, "acme-failed")
    query = {"fingerprint": run["fingerprint"]}
    assert len(admin.get("/scheduler/failed", params=query)["items"]) == 1


def test_a_failed_run_is_discarded_once(admin: Client) -> None:
    assert admin.send("DELETE", "/scheduler/failed/acme-failed").status_code == 204
    admin.refused(404, "DELETE", "/scheduler/failed/acme-failed")
    admin.refused(404, "DELETE", "/scheduler/failed/acme-waiting")


@pytest.mark.parametrize("action", ["retry", "discard"])
def test_failed_runs_are_counted_and_then_acted_on(admin: Client, action: str) -> None:
    path = f"/scheduler/failed/{action}"
    counted = admin.ok("POST", path, json={"user_id": "acme-ann"})
    assert (counted["matched"], counted["done"]) == (1, 0)
    assert admin.ok("POST", path, json={"dry_run": False})["done"] == 1


# --- tasks ----------------------------------------------------------------------------------------


def test_a_task_is_pushed_once_by_its_id(admin: Client) -> None:
    body = {"user_id": "bo", "task_id": "mine", "payload": {"n": 1}, "delay": 60}
    assert admin.ok("POST", "/tasks", json=body) == {"task_id": "mine"}
    assert admin.ok("POST", "/tasks", json=body) == {"task_id": "mine"}
    assert [each["task_id"] for each in admin.get("/tasks?user_id=bo")["items"]] == ["mine"]
    admin.refused(422, "POST", "/tasks", json={**body, "payload": {"n": 2}})


def test_a_task_is_pushed_with_a_policy_of_its_own(api: Api, admin: Client) -> None:
    policy = {
        "max_attempts": 4,
        "backoff": 60,
        "backoff_cap": 90,
        "backoff_multiplier": 1.5,
        "jitter": "full",
        "timeout": 30,
    }
    body = {"user_id": "bo", "task_id": "mine", **policy}
    admin.ok("POST", "/tasks", json=body)
    assert admin.get("/tasks/mine")["task"]["policy"] == policy
    admin.refused(422, "POST", "/tasks", json={**body, "max_attempts": 5})
    admin.refused(422, "POST", "/tasks", json={**body, "retries": 3})
    admin.refused(422, "POST", "/tasks", json={"user_id": "bo", "max_attempts": 0})


def test_a_task_says_why_it_waits(admin: Client) -> None:
    told = admin.get("/tasks/acme-waiting/explain")
    assert [each["code"] for each in told["reasons"]] == ["tenant_turn"]
    assert told["summary"] == told["reasons"][0]["text"]
    admin.refused(404, "GET", "/tasks/nobody/explain")


def test_a_waiting_task_is_moved_and_a_running_one_is_not(api: Api, admin: Client) -> None:
    at = days_ago(api.world.clock, -1)
    moved = admin.ok("POST", "/tasks/acme-waiting/reschedule", json={"at": at})
    assert moved["due_at"] == at.replace("+00:00", "Z")
    admin.refused(409, "POST", "/tasks/acme-running/reschedule", json={"delay": 1})


def test_a_waiting_task_is_cancelled(admin: Client) -> None:
    assert admin.ok("POST", "/tasks/acme-waiting/cancel") == {"cancelled": True}
    assert admin.get("/tasks/acme-waiting")["status"] == "cancelled"


# --- users ----------------------------------------------------------------------------------------


def test_a_user_is_told_and_changed(admin: Client) -> None:
    body = {"weight": 4, "max_running": 2, "rate": 0.5}
    settings = admin.ok("PATCH", "/users/acme-ann?tenant=acme", json=body)
    assert {name: settings[name] for name in body} == {"weight": 4.0, "max_running": 2, "rate": 0.5}
    assert admin.ok("PATCH", "/users/acme-ann?tenant=acme", json={"rate": None})["rate"] is None
    user = admin.get("/users/acme-ann?tenant=acme")
    assert (user["settings"]["weight"], user["backlog"], user["running"]) == (4.0, 1, 1)
    assert [each["user_id"] for each in admin.get("/users")["items"]] == ["acme-ann"]


def test_an_unknown_user_is_not_found(admin: Client) -> None:
    assert admin.refused(404, "GET", "/users/nobody")["type"].endswith(":unknown-user")


def test_a_user_is_paused_and_resumed(admin: Client) -> None:
    assert admin.ok("POST", "/users/acme-ann/pause?tenant=acme")["paused"] is True
    assert admin.ok("POST", "/users/acme-ann/resume?tenant=acme")["paused"] is False


def test_the_backlog_of_a_user_is_counted_and_then_dropped(admin: Client) -> None:
    path = "/users/acme-ann/purge?tenant=acme"
    assert admin.ok("POST", path) == {"dry_run": True, "count": 1}
    assert admin.ok("POST", path, json={"dry_run": False}) == {"dry_run": False, "count": 1}
    assert admin.get("/tasks")["items"] == []


# --- the system -----------------------------------------------------------------------------------


def test_workers_are_listed_and_drained(admin: Client) -> None:
    assert [each["worker_id"] for each in admin.get("/workers")["items"]] == ["worker-1"]
    admin.ok("POST", "/workers/worker-1/drain")
    assert admin.get("/workers")["items"][0]["draining"] is True
    assert admin.refused(404, "POST", "/workers/nobody/drain")["type"].endswith(":unknown-worker")


def test_numbers_of_the_queue_are_told(admin: Client) -> None:
    snapshot = admin.get("/stats/snapshot")
    assert (snapshot["ready"], snapshot["running"], snapshot["dead"]) == (1, 1, 1)
    overview = admin.get("/stats/overview")
    assert (overview["ready"], overview["failures_last_hour"]) == (1, 1)
    series = admin.get("/stats/series?window=15m")
    assert {len(values) for values in series["values"].values()} == {len(series["times"])}
    assert {each["kind"] for each in admin.get("/stats/attention")["items"]} >= {"failed"}


def test_changes_are_in_the_audit_log_and_found_by_filter(api: Api, admin: Client) -> None:
    api.client("operator", "acme").ok("POST", f"{JOB}/pause", json={"note": "enough"})
    admin.ok("PATCH", "/settings", json={"max_attempts": 7})
    (entry,) = admin.get("/audit?action=schedule.")["items"]
    assert (entry["actor"], entry["target"], entry["outcome"]) == (
        "operator of acme",
        "acme-daily",
        "done",
    )
    assert (entry["tenant"], entry["via"], entry["details"]["note"]) == ("acme", "rest", "enough")
    assert len(admin.get("/audit")["items"]) == 2


def test_a_new_key_works_until_it_is_revoked(api: Api, admin: Client) -> None:
    body = {"name": "ci", "role": "viewer", "tenant": "acme", "expires_in": 3600}
    key = admin.ok("POST", "/keys", json=body)
    listed = admin.send("GET", "/keys")
    assert key["key_id"] in [each["key_id"] for each in listed.json()["items"]]
    assert key["secret"] not in listed.text
    other = Client(api.app, key["secret"])
    assert other.get(JOB)["schedule_id"] == "acme-daily"
    assert admin.send("DELETE", f"/keys/{key['key_id']}").status_code == 204
    other.refused(401, "GET", JOB)
    assert admin.refused(404, "DELETE", f"/keys/{key['key_id']}")["type"].endswith(":unknown-key")


def test_settings_are_told_and_changed(admin: Client) -> None:
    changed = admin.ok("PATCH", "/settings", json={"max_attempts": 7, "keep_dead_for": 60})
    assert (changed["settings"]["max_attempts"], changed["settings"]["keep_dead_for"]) == (7, 60.0)
    assert admin.get("/settings") == changed
    problem = admin.refused(422, "PATCH", "/settings", json={"max_atempts": 7})
    assert problem["field"] == "max_atempts"
    admin.refused(422, "PATCH", "/settings", json={})


def test_limits_of_handlers_are_set(admin: Client) -> None:
    limits = admin.ok("PUT", "/limits/mail", json={"slots": 3, "rate": 1.5})["limits"]
    assert limits == {"mail": {"slots": 3, "rate": 1.5, "timeout": None}}
    assert admin.ok("PUT", "/limits/mail", json={})["limits"] == {}


# --- secrets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/scheduler/jobs",
        JOB,
        "/scheduler/upcoming",
        "/scheduler/runs?status=pending",
        "/scheduler/runs/acme-waiting",
        "/tasks",
        "/tasks/acme-waiting",
        "/audit",
    ],
)
def test_secrets_are_masked(admin: Client, path: str) -> None:
    admin.ok(
        "PATCH", JOB, json={"payload": {"token": "hunter2"}, "metadata": {"secret": "hunter2"}}
    )
    assert "hunter2" not in admin.send("GET", path).text


# --- without a key, and with a wrong one ----------------------------------------------------------


def test_health_readiness_and_description_need_no_key(api: Api) -> None:
    anybody = api.client(None)
    assert anybody.get("/health") == {"status": "ok"}
    assert anybody.send("GET", "/ready").status_code in (200, 503)
    assert anybody.get("/openapi.json") == openapi_document("")


def test_readiness_says_what_is_missing(api: Api) -> None:
    answer = api.client(None).send("GET", "/ready")  # no scheduler leads
    assert (answer.status_code, answer.json()) == (
        503,
        {"status": "not ready", "reasons": ["leader: none"]},
    )


def test_a_wrong_key_is_refused_and_the_answer_says_how(api: Api) -> None:
    response = Client(api.app, "fq_0123456789abcdef_" + "x" * 43).send("GET", "/users")
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")


def test_a_key_may_come_in_its_own_header(api: Api) -> None:
    headers = {"X-API-Key": api.keys["viewer", None]}
    assert api.client(None).send("GET", "/users", headers=headers).status_code == 200


def test_a_key_that_asks_too_often_is_told_when_to_come_back(world: World) -> None:
    secret = AccessStore(world.queue.link).create_key("ann", "viewer", by="test").secret
    client = Client(create_app(world.queue, dashboard=False, rate=0.01, burst=2), secret)
    allowed = [client.send("GET", "/users") for _ in range(2)]
    assert [each.status_code for each in allowed] == [200, 200]
    assert allowed[0].headers["ratelimit-policy"] == '"key";q=2;w=200'
    refused = client.send("GET", "/users")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0


# --- the form of requests -------------------------------------------------------------------------


def send_text(client: Client, text: bytes, kind: str = "application/json") -> Any:
    return client.send("POST", "/tasks", content=text, headers={"Content-Type": kind})


@pytest.mark.parametrize("text", [b"{", b"nothing", b'{"a":\xff}', b"[" * 100_000, b"\x00"])
def test_what_is_no_json_is_malformed(admin: Client, text: bytes) -> None:
    response = send_text(admin, text)
    assert response.status_code == 400
    assert response.json()["type"].endswith(":malformed-json")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "user_id"),
        (b"{}", "user_id"),
        (b'{"user_id":1}', "user_id"),
        (b'{"user_id":"bo","prio":1}', "prio"),
        (b'{"user_id":"bo","priority":9}', "priority"),
        (b'{"user_id":"bo","at":"2026-01-01T00:00:00"}', "at"),
        (b'{"user_id":"bo\\u0000"}', "user_id"),
        (b'{"user_id":"bo","payload":[1]}', "payload"),
        (b'{"user_id":"bo","tenant":"no tenant"}', "tenant"),
    ],
)
def test_a_bad_field_stores_nothing(api: Api, admin: Client, body: bytes, field: str) -> None:
    before = api.state()
    response = send_text(admin, body)
    assert (response.status_code, response.json().get("field")) == (422, field), response.text
    assert field in response.json()["detail"]
    assert api.state() == before


def test_a_body_that_is_no_object_is_refused(admin: Client) -> None:
    assert send_text(admin, b"[]").status_code == 422


def test_a_body_of_another_type_is_refused(admin: Client) -> None:
    response = send_text(admin, b"user_id=bo", "application/x-www-form-urlencoded")
    assert response.status_code == 415
    assert "application/json" in response.json()["detail"]
    assert send_text(admin, b'{"user_id":"bo"}', "application/vnd.x+json").status_code == 201


def test_a_body_that_is_too_large_is_refused(admin: Client) -> None:
    text = b'{"user_id":"' + b"b" * MAX_BODY_BYTES + b'"}'
    assert send_text(admin, text).status_code == 413


def test_a_payload_that_is_too_large_is_named(admin: Client) -> None:
    body = {"user_id": "bo", "payload": {"text": "x" * 300_000}}
    assert admin.refused(422, "POST", "/tasks", json=body)["field"] == "payload"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=ten", "limit"),
        ("limit=5&limit=6", "limit"),
        ("page=2", "page"),
        ("cursor=x", "cursor"),
        ("is_active=maybe", "is_active"),
    ],
)
def test_a_bad_parameter_is_named(admin: Client, query: str, field: str) -> None:
    assert admin.refused(422, "GET", f"/scheduler/jobs?{query}")["field"] == field


def test_a_parameter_that_nobody_knows_is_named_also_where_there_are_none(admin: Client) -> None:
    assert admin.refused(422, "GET", "/workers?limit=5")["field"] == "limit"


def test_a_path_that_nothing_answers_is_a_problem(admin: Client) -> None:
    for path in ("/", "/nothing", "/scheduler/jobs/", "/scheduler/jobs//runs", "/tasks/a/b"):
        assert admin.refused(404, "GET", path)["type"].endswith(":not-found")


def test_a_method_that_is_not_possible_is_told_with_those_that_are(admin: Client) -> None:
    response = admin.send("PATCH", "/tasks")
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, HEAD, POST"


def test_head_answers_as_get_does_without_the_body(admin: Client) -> None:
    got, head = admin.send("GET", JOB), admin.send("HEAD", JOB)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == got.headers["etag"]
    assert head.headers["content-length"] == got.headers["content-length"]


@pytest.mark.parametrize("name", ["a/b", "toggle", "ü ñ", "50%", "a?b#c"])
def test_ids_may_have_any_characters(admin: Client, name: str) -> None:
    made = admin.send("POST", "/scheduler/jobs", json={**NIGHTLY, "schedule_id": name})
    path = made.headers["location"].removeprefix(PREFIX)
    assert admin.get(path)["schedule_id"] == name
    run = admin.send("POST", f"{path}/run")
    assert admin.get(run.headers["location"].removeprefix(PREFIX))["schedule_id"] == name


# --- when the queue says no -----------------------------------------------------------------------


@pytest.mark.one_partition
def test_a_full_queue_asks_to_come_back(api: Api, admin: Client) -> None:
    api.world.queue.configure(max_waiting=1)
    response = admin.send("POST", "/tasks", json={"user_id": "bo"})
    assert (response.status_code, response.json()["type"]) == (
        429,
        "urn:fairqueue:problem:queue-full",
    )
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.one_partition
def test_a_quota_of_schedules_is_a_conflict(api: Api, admin: Client) -> None:
    api.world.queue.configure(max_schedules=1)
    body = {"user_id": "acme-ann", "cron_expr": "* * * * *"}
    problem = admin.refused(409, "POST", "/scheduler/jobs", json=body)
    assert problem["type"].endswith(":schedule-quota")


def test_without_redis_the_process_is_healthy(
    own_server: Callable[..., EmbeddedServer],
) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url, timeout=0.5) as queue:
        secret = AccessStore(queue.link).create_key("ann", "admin", by="test").secret
        client = Client(make_app(queue), secret)
        assert client.send("GET", "/scheduler/jobs").status_code == 200
        server.stop()
        response = client.send("GET", "/scheduler/jobs")
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert client.get("/health") == {"status": "ok"}
        assert client.send("GET", "/ready").status_code == 503


def probe(handler: Callable[[ApiRequest[Any, Any]], Reply], world: World) -> Client:
    """A client of an app that has one endpoint of the test's own, GET /nowhere."""
    endpoint = Endpoint(
        method="GET", path="/nowhere", handler=handler, role="viewer", tenants=OPEN, answer=None
    )
    app = make_app(world.queue)
    app.router.routes[:] = [Mount(PREFIX, routes=[Route("/{rest:path}", Service([endpoint]))])]
    return Client(app, AccessStore(world.queue.link).create_key("ann", "admin", by="test").secret)


def test_our_mistake_is_logged_not_shown(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def crash(call: ApiRequest[Any, Any]) -> Reply:
        raise KeyError("hunter2")

    problem = probe(crash, world).send_own("GET", "/nowhere").json()
    assert "hunter2" not in str(problem)
    assert problem["incident"] in problem["detail"]
    (record,) = [each for each in caplog.records if vars(each).get("event") == "request_crashed"]
    assert vars(record)["incident"] == problem["incident"]
    assert record.exc_info is not None


def test_library_calls_do_not_run_on_the_event_loop(world: World) -> None:
    ran: list[threading.Thread] = []

    def handler(call: ApiRequest[Any, Any]) -> Reply:
        ran.append(threading.current_thread())
        return Reply()

    probe(handler, world).send_own("GET", "/nowhere")
    assert ran != [threading.current_thread()]
    assert len(ran) == 1
