"""A job may be told in the terms of a table of cron jobs; and who made it, and what it is for."""

from typing import Any

import pytest
from helpers.rest import Api, Client
from helpers.world import World

from fairqueue.web.api.aliases import NAMES
from fairqueue.worker.worker import Worker

THEIRS = {
    "school_id": 7,
    "name": "Daily Fee Reminder",
    "description": "Three days before fees are due.\nAsk the bursar.",
    "job_class": "SendFeeRemindersJob",
    "job_method": "handle",
    "parameters": {"days": 3},
    "cron_expression": "0 8 * * *",
    "timezone": "Africa/Nairobi",
    "is_active": True,
    "run_as_user_id": 42,
    "max_retries": 5,
    "retry_delay_seconds": 30,
    "timeout_seconds": 120,
    "overlap_prevention": False,
    "queue_name": "gpu",
}
OURS = {
    "tenant": "7",
    "title": "Daily Fee Reminder",
    "description": "Three days before fees are due.\nAsk the bursar.",
    "name": "SendFeeRemindersJob",
    "payload": {"days": 3},
    "cron_expr": "0 8 * * *",
    "timezone": "Africa/Nairobi",
    "is_active": True,
    "user_id": "42",
    "retries": 5,
    "backoff": 30,
    "timeout": 120,
    "overlap": "allow",
    "pool": "gpu",
}
JOB = "/scheduler/jobs/acme-daily"


@pytest.fixture
def client(api: Api) -> Client:
    return api.client()


def told(job: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: job[name] for name in names}


# --- names of others ------------------------------------------------------------------------------


def test_a_job_is_made_in_the_terms_of_a_table_of_cron_jobs(client: Client) -> None:
    job = client.ok("POST", "/scheduler/jobs", json=THEIRS)
    assert told(job, *OURS) == OURS


def test_a_job_in_these_terms_has_their_defaults(client: Client) -> None:
    body = {"job_class": "Report", "cron_expression": "0 8 * * *", "run_as_user_id": "ann"}
    job = client.ok("POST", "/scheduler/jobs", json=body)
    usual = {"retries": 3, "backoff": 60, "timeout": 3600, "overlap": "skip"}
    assert told(job, *usual) == usual
    own = {"retries": 1, "overlap": "allow"}
    assert told(client.ok("POST", "/scheduler/jobs", json=body | own), *own) == own
    body = {"name": "report", "cron_expr": "0 8 * * *", "user_id": "ann"}
    job = client.ok("POST", "/scheduler/jobs", json=body)
    assert told(job, *usual) == {"retries": None, "backoff": None, "timeout": None} | {
        "overlap": "allow"
    }


def run_all(worker: Worker) -> None:
    """Run what is ready: of the queue's own tasks some have been left by their worker."""
    for _ in range(3):
        worker.run_once()


def test_its_retries_come_after_60_120_and_240_seconds(client: Client, world: World) -> None:
    worker = Worker(world.queue, concurrency=1)

    @worker.task("Report")
    def fails(payload: object) -> None:
        raise ValueError("no")

    world.queue.cancel("acme-waiting")
    body = {"job_class": "Report", "cron_expression": "0 8 * * *", "run_as_user_id": "ann"}
    job = client.ok("POST", "/scheduler/jobs", json=body)
    task_id = client.ok("POST", f"/scheduler/jobs/{job['schedule_id']}/run")["task_id"]
    waits = []
    for _ in range(3):
        run_all(worker)
        info = world.info(task_id)
        waits.append(info.due_at.timestamp() - world.clock.now_ms() / 1000)
        world.clock.set(info.due_at)
    assert waits == [60.0, 120.0, 240.0]
    run_all(worker)
    assert client.get(f"/scheduler/runs/{task_id}")["status"] == "failed"


@pytest.mark.parametrize("theirs", NAMES)
@pytest.mark.parametrize("method", ["PATCH", "PUT", "POST"])
def test_two_names_of_one_field_must_say_the_same(client: Client, method: str, theirs: str) -> None:
    ours = NAMES[theirs]
    other: dict[str, Any] = {
        "name": "other",
        "payload": {"other": 1},
        "cron_expr": "1 1 * * *",
        "user_id": "bo",
    }
    other |= {"tenant": "other", "retries": 9, "backoff": 9, "timeout": 9, "overlap": "skip"}
    other["pool"] = "other"
    path = JOB if method != "POST" else f"{JOB}/copy"
    if theirs == "job_class":
        body: dict[str, Any] = {"job_class": "A", "name": "One", "title": "Another"}
        said: tuple[str, ...] = ("name 'One'", "title 'Another'")
    else:
        body = {theirs: THEIRS[theirs], ours: other[ours]}
        said = (f"{theirs} {THEIRS[theirs]!r}", f"{ours} {other[ours]!r}")
    if ours == "payload":  # which may hold secrets
        said = ("body: parameters and payload are the same field",)
    if method == "PUT":
        body = {"user_id": "acme-ann", "cron_expr": "0 9 * * *"} | body
    problem = client.refused(422, method, path, json=body)
    for part in said:
        assert part in problem["detail"]
    assert problem["field"] in (theirs, "name")


def test_two_names_that_say_the_same_are_taken(client: Client) -> None:
    both = {"job_class": "mail", "name": "mail", "parameters": {"a": 1}, "payload": {"a": 1}}
    job = client.ok("PATCH", JOB, json=both)
    assert told(job, "name", "payload", "title") == {
        "name": "mail",
        "payload": {"a": 1},
        "title": None,
    }


def test_a_change_in_these_terms_changes_what_it_names(client: Client) -> None:
    before = client.get(JOB)
    after = client.ok("PATCH", JOB, json={"max_retries": 2, "overlap_prevention": True})
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"retries", "overlap", "updated_at", "etag"} - (
        {"updated_at"} if before["updated_at"] == after["updated_at"] else set()
    )
    assert told(after, "retries", "overlap") == {"retries": 2, "overlap": "skip"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_retries": "many"}, "max_retries"),
        ({"timeout_seconds": -1}, "timeout_seconds"),
        ({"overlap_prevention": "yes"}, "overlap_prevention"),
        ({"parameters": [1]}, "parameters"),
        ({"job_method": "run"}, "job_method"),
        ({"job_klass": "x"}, "job_klass"),
    ],
)
def test_an_error_names_the_given_field(client: Client, body: dict[str, Any], field: str) -> None:
    problem = client.refused(422, "PATCH", JOB, json=body)
    assert field in problem["detail"]
    assert problem["field"] == field


@pytest.mark.parametrize("value", ["yes", "skip", 1, None])
def test_overlap_prevention_is_true_or_false(client: Client, value: Any) -> None:
    problem = client.refused(422, "PATCH", JOB, json={"overlap_prevention": value})
    assert problem["detail"] == f"body: overlap_prevention must be true or false, not {value!r}"
    assert problem["field"] == "overlap_prevention"


def test_the_openapi_document_has_these_names(client: Client) -> None:
    schemas = client.get("/openapi.json")["components"]["schemas"]
    for model in ("NewJob", "JobReplacement", "JobChanges", "JobCopy"):
        for theirs, ours in NAMES.items():
            assert f"`{ours}`" in schemas[model]["properties"][theirs]["description"]
    assert {"required": ["run_as_user_id"]} in schemas["NewJob"]["anyOf"]
    properties = schemas["NewTask"]["properties"]
    assert "`pool`" in properties["queue_name"]["description"]
    assert not {"cron_expression", "overlap_prevention"} & {*properties}


def test_a_task_is_pushed_in_these_terms(client: Client) -> None:
    body = {
        "queue_name": "gpu",
        "job_class": "Thumbnail",
        "job_method": "handle",
        "parameters": {"n": 1},
        "run_as_user_id": 42,
        "school_id": 7,
        "max_retries": 2,
        "retry_delay_seconds": 9,
        "timeout_seconds": 60,
    }
    run = client.get("/tasks/" + client.ok("POST", "/tasks", json=body)["task_id"])
    assert told(run, "pool", "name", "user_id", "tenant") == {
        "pool": "gpu",
        "name": "Thumbnail",
        "user_id": "42",
        "tenant": "7",
    }
    assert run["task"]["policy"] == {"retries": 2, "backoff": 9, "timeout": 60}
    assert run["task"]["payload"] == {"n": 1}
    for more, field in (
        ({"pool": "cpu"}, "queue_name"),
        ({"name": "Other"}, "job_class"),
        ({"cron_expression": "0 8 * * *"}, "cron_expression"),
        ({"queue_name": ""}, "queue_name"),
    ):
        assert client.refused(422, "POST", "/tasks", json=body | more)["field"] == field


# --- who made it, and what it is for --------------------------------------------------------------


def test_who_made_a_job_is_kept(client: Client, api: Api) -> None:
    body = {"user_id": "ann", "every": 60, "schedule_id": "x", "title": "Every minute"}
    client.ok("POST", "/scheduler/jobs", json=body)
    api.client("admin", None).ok("PATCH", "/scheduler/jobs/x", json={"title": "A minute"})
    job = client.get("/scheduler/jobs/x")
    assert told(job, "title", "description", "created_by") == {
        "title": "A minute",
        "description": None,
        "created_by": "admin of None",
    }
    change, making = client.get("/scheduler/jobs/x/changes")["items"]
    assert (making["made"], making["by"]) == (True, "admin of None")
    assert making["fields"]["title"] == [None, "Every minute"]
    assert (change["made"], change["fields"]) == (False, {"title": ["Every minute", "A minute"]})
    problem = client.refused(422, "PATCH", "/scheduler/jobs/x", json={"created_by": "root"})
    assert problem["field"] == "created_by"
    copy = client.ok("POST", "/scheduler/jobs/x/copy", json={"schedule_id": "y"})
    assert told(copy, "title", "created_by") == told(job, "title", "created_by")


def test_secrets_in_what_a_job_was_made_with_are_masked(client: Client) -> None:
    payload = {"password": "hunter2", "to": "bo"}
    body = {"user_id": "ann", "every": 60, "schedule_id": "x", "payload": payload}
    client.ok("POST", "/scheduler/jobs", json=body)
    (making,) = client.get("/scheduler/jobs/x/changes")["items"]
    assert making["fields"]["payload"] == [None, {"password": "***", "to": "bo"}]


def test_a_job_may_be_made_paused(client: Client, api: Api) -> None:
    body = {"user_id": "ann", "every": 60, "schedule_id": "x", "is_active": False}
    job = client.ok("POST", "/scheduler/jobs", json=body)
    assert told(job, "state", "next_run", "is_active") == {
        "state": "paused",
        "next_run": None,
        "is_active": False,
    }
    assert "x" not in api.state()["due"]
    job = client.ok("POST", "/scheduler/jobs/x/resume")
    assert (job["state"], job["next_run"] is not None) == ("active", True)


def test_what_is_imported_was_made_by_whoever_imports_it(client: Client) -> None:
    document = {"schedule_id": "x", "user_id": "ann", "every": 60, "title": "X", "is_active": False}
    body = {"documents": [document], "dry_run": False}
    client.ok("POST", "/scheduler/jobs/import", json=body)
    job = client.get("/scheduler/jobs/x")
    assert told(job, "title", "created_by", "state") == {
        "title": "X",
        "created_by": "admin of None",
        "state": "paused",
    }
    exported = client.get("/scheduler/jobs/export?user_id=ann")["documents"]
    (again,) = exported
    assert again["title"] == "X"
    assert "created_by" not in again
    diff = client.ok("POST", "/scheduler/jobs/import", json={"documents": exported})
    assert diff["unchanged"] == ["x"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"title": "x" * 201}, "title"),
        ({"title": "two\nlines"}, "title"),
        ({"title": 7}, "title"),
        ({"description": "x" * 4001}, "description"),
        ({"description": "bell\a"}, "description"),
    ],
)
def test_an_unshowable_title_is_refused(client: Client, body: dict[str, Any], field: str) -> None:
    assert client.refused(422, "PATCH", JOB, json=body)["field"] == field


def test_a_title_can_be_taken_away(client: Client) -> None:
    assert client.ok("PATCH", JOB, json={"title": "X", "description": "a\r\n\tb"})["title"] == "X"
    assert client.get(JOB)["description"] == "a\n\tb"
    job = client.ok("PATCH", JOB, json={"title": None, "description": ""})
    assert told(job, "title", "description") == {"title": None, "description": None}
