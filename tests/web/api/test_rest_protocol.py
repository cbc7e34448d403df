"""What the REST API promises of HTTP: done once, not over what others wrote, page by page."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers.rest import Api, Client, fail, make_app
from helpers.tasks import push
from helpers.waiting import in_thread
from starlette.applications import Starlette
from starlette.routing import Mount

from fairqueue.inspection.schedules import ScheduleInspector
from fairqueue.web.api import openapi_document
from fairqueue.web.api.endpoint import PREFIX

JOB = "/scheduler/jobs/acme-daily"
ONCE = {"Idempotency-Key": "one"}


@pytest.fixture
def admin(api: Api) -> Client:
    return api.client("admin")


# --- once -----------------------------------------------------------------------------------------


def test_a_repeated_request_is_answered_and_not_done_again(api: Api, admin: Client) -> None:
    first = admin.send("POST", f"{JOB}/run", headers=ONCE)
    after = api.state()
    second = admin.send("POST", f"{JOB}/run", headers=ONCE)
    assert (second.status_code, second.json()) == (201, first.json())
    assert second.headers["location"] == first.headers["location"]
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert api.state() == after


def test_all_kinds_of_writes_heed_the_key(admin: Client) -> None:
    for method, path, body in (
        ("PATCH", JOB, {"priority": 5}),
        ("PUT", "/limits/mail", {"slots": 1}),
        ("DELETE", JOB, None),
    ):
        request: dict[str, Any] = {"headers": {"Idempotency-Key": method}}
        if body is not None:
            request["json"] = body
        first, second = (admin.send(method, path, **request) for _ in range(2))
        assert second.status_code == first.status_code
        assert second.content == first.content
        assert second.headers["idempotency-replayed"] == "true"


def test_a_key_that_was_used_for_another_request_is_refused(admin: Client) -> None:
    admin.ok("POST", f"{JOB}/pause", headers=ONCE)
    problem = admin.refused(422, "POST", f"{JOB}/resume", headers=ONCE)
    assert (problem["field"], "one" in problem["detail"]) == ("Idempotency-Key", True)
    admin.refused(422, "POST", f"{JOB}/pause", headers=ONCE, json={"note": "other"})
    assert admin.get(JOB)["state"] == "paused"


def test_keys_of_different_senders_have_nothing_to_do_with_each_other(api: Api) -> None:
    api.client("admin").ok("POST", f"{JOB}/toggle", headers=ONCE)
    answer = api.client("operator").send("POST", f"{JOB}/toggle", headers=ONCE)
    assert (answer.status_code, answer.json()["is_active"]) == (200, True)


def test_a_refusal_is_kept_too(admin: Client) -> None:
    admin.refused(404, "POST", "/scheduler/jobs/later/run", headers=ONCE)
    body = {"user_id": "bo", "every": 60, "schedule_id": "later"}
    admin.ok("POST", "/scheduler/jobs", json=body)
    again = admin.send("POST", "/scheduler/jobs/later/run", headers=ONCE)
    assert (again.status_code, again.headers["idempotency-replayed"]) == (404, "true")


def test_what_may_go_better_the_next_time_is_not_kept(api: Api, admin: Client) -> None:
    api.world.queue.configure(max_waiting=1)
    admin.refused(429, "POST", f"{JOB}/run", headers=ONCE)
    api.world.queue.configure(max_waiting=0)
    assert admin.send("POST", f"{JOB}/run", headers=ONCE).status_code == 201


def test_a_mistake_of_ours_is_not_kept(admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(ScheduleInspector, "trigger")
        admin.refused(500, "POST", f"{JOB}/run", headers=ONCE)
    assert admin.send("POST", f"{JOB}/run", headers=ONCE).status_code == 201


def test_a_request_whose_twin_is_being_done_is_to_be_sent_again(
    api: Api, admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    trigger = ScheduleInspector.trigger

    def slow(self: ScheduleInspector, schedule_id: str, **options: Any) -> str:
        begun.set()
        assert go_on.wait(30)
        return trigger(self, schedule_id, **options)

    monkeypatch.setattr(ScheduleInspector, "trigger", slow)
    first = in_thread(lambda: admin.send("POST", f"{JOB}/run", headers=ONCE))
    assert begun.wait(30)
    twin = admin.send("POST", f"{JOB}/run", headers=ONCE)
    go_on.set()
    done = first()
    assert (twin.status_code, int(twin.headers["retry-after"])) == (409, 1)
    assert done.status_code == 201
    again = admin.send("POST", f"{JOB}/run", headers=ONCE)
    assert again.json() == done.json()
    assert len(admin.get(f"{JOB}/runs")["items"]) == 1


def test_of_many_at_once_with_one_key_one_is_done(api: Api, admin: Client) -> None:
    sent = [in_thread(lambda: admin.send("POST", f"{JOB}/run", headers=ONCE)) for _ in range(4)]
    answers = [result() for result in sent]
    assert {answer.status_code for answer in answers} <= {201, 409}
    ids = {answer.json()["task_id"] for answer in answers if answer.status_code == 201}
    assert len(ids) == 1
    assert [run["task_id"] for run in admin.get(f"{JOB}/runs")["items"]] == list(ids)


def test_the_secret_of_a_new_key_is_not_kept(api: Api, admin: Client) -> None:
    body = {"name": "ci", "role": "viewer"}
    first = admin.ok("POST", "/keys", json=body, headers=ONCE)
    second = admin.ok("POST", "/keys", json=body, headers=ONCE)
    assert second == {**first, "secret": None}
    for name in ("replies", "replies_before"):
        kept = api.world.redis.hgetall(api.world.queue.keys[name])
        assert first["secret"] not in str(kept)


@pytest.mark.parametrize("key", ["", "x" * 201])
def test_a_key_that_cannot_be_used_is_refused(api: Api, admin: Client, key: str) -> None:
    before = api.state()
    problem = admin.refused(422, "POST", f"{JOB}/run", headers={"Idempotency-Key": key})
    assert problem["field"] == "Idempotency-Key"
    assert api.state() == before


def test_reading_heeds_no_key(admin: Client) -> None:
    assert "idempotency-replayed" not in admin.send("GET", JOB, headers=ONCE).headers
    admin.ok("POST", f"{JOB}/pause")
    assert admin.ok("GET", JOB, headers=ONCE)["state"] == "paused"


def test_an_answer_that_is_too_long_to_keep_is_not_done_again(api: Api, admin: Client) -> None:
    payload = {"text": "x" * 100_000}
    first = admin.send("PATCH", JOB, json={"payload": payload}, headers=ONCE)
    after = api.state()
    second = admin.send("PATCH", JOB, json={"payload": payload}, headers=ONCE)
    assert first.status_code == 200
    assert second.status_code == 409
    assert "already done" in second.json()["detail"]
    assert api.state() == after


# --- versions -------------------------------------------------------------------------------------


def test_what_has_not_changed_is_not_sent_again(admin: Client) -> None:
    tag = admin.send("GET", JOB).headers["etag"]
    for header in (tag, f'"other", {tag}', f"W/{tag}", "*"):
        answer = admin.send("GET", JOB, headers={"If-None-Match": header})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == tag
    admin.ok("PATCH", JOB, json={"priority": 5})
    changed = admin.send("GET", JOB, headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag


def test_a_run_that_ends_changes_the_tag_of_its_job(api: Api, admin: Client) -> None:
    api.world.queue.cancel("acme-waiting")
    admin.ok("POST", f"{JOB}/run")
    tag = admin.send("GET", JOB).headers["etag"]
    fail(api.world.queue)
    answer = admin.send("GET", JOB, headers={"If-None-Match": tag})
    assert (answer.status_code, len(answer.json()["outcomes"])) == (200, 1)
    # It is no reason to refuse a change by who read the job before.
    assert admin.send("PATCH", JOB, json={"priority": 4}, headers={"If-Match": tag}).is_success


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("PUT", {"user_id": "acme-ann", "every": 60, "tenant": "acme"}),
        ("PATCH", {"priority": 5}),
        ("DELETE", None),
    ],
)
def test_a_stale_change_is_refused(api: Api, admin: Client, method: str, body: Any) -> None:
    tag = admin.send("GET", JOB).headers["etag"]
    request = {} if body is None else {"json": body}
    admin.ok("PATCH", JOB, json={"priority": 4})
    before = api.state()
    problem = admin.refused(412, method, JOB, headers={"If-Match": tag}, **request)
    assert problem["type"].endswith(":stale-version")
    admin.refused(412, method, JOB, headers={"If-Match": '"a", "b"'}, **request)
    admin.refused(412, method, JOB, headers={"If-Match": f"W/{tag}"}, **request)
    assert api.state() == before
    tag = admin.send("GET", JOB).headers["etag"]
    answer = admin.send(method, JOB, headers={"If-Match": f'"other", {tag}'}, **request)
    assert answer.is_success, answer.text


def test_the_tag_of_a_listing_can_be_matched_and_any_can(admin: Client) -> None:
    (job,) = admin.get("/scheduler/jobs")["items"]
    tag = f'"{job["etag"]}"'
    admin.ok("PATCH", JOB, json={"priority": 4}, headers={"If-Match": tag})
    admin.refused(412, "PATCH", JOB, json={"priority": 5}, headers={"If-Match": tag})
    admin.ok("PATCH", JOB, json={"priority": 5}, headers={"If-Match": "*"})


def test_the_tag_of_a_change_is_that_of_what_is_read_then(admin: Client) -> None:
    changed = admin.send("PATCH", JOB, json={"priority": 5})
    assert changed.headers["etag"] == admin.send("GET", JOB).headers["etag"]


# --- pages ----------------------------------------------------------------------------------------


def walk(client: Client, path: str, **query: Any) -> Iterator[list[Any]]:
    """The pages of a listing, as the Link headers lead to them."""
    response = client.send("GET", path, params=query)
    while True:
        page = response.json()
        yield page["items"]
        if page["cursor"] is None:
            assert "link" not in response.headers
            return
        link = response.headers["link"]
        assert link.endswith('>; rel="next"')
        url = httpx.URL(f"http://test{path}").join(link[1 : link.index(">")])
        response = client.send("GET", url.raw_path.decode())


def test_all_jobs_come_once_over_many_pages(admin: Client) -> None:
    names = [f"job-{number:02}" for number in range(23)]
    for name in names:
        body = {"user_id": "bo", "every": 60, "schedule_id": name}
        admin.ok("POST", "/scheduler/jobs", json=body)
    pages = list(walk(admin, "/scheduler/jobs", limit=5, user_id="bo"))
    assert [len(page) for page in pages][:4] == [5, 5, 5, 5]
    assert [job["schedule_id"] for page in pages for job in page] == names


def test_all_runs_come_once_over_many_pages(api: Api, admin: Client) -> None:
    ids = [f"run-{number:02}" for number in range(17)]
    push(api.world.queue, *ids, user_id="bo")
    pages = list(walk(admin, "/scheduler/runs", limit=4, status=["pending"], user_id="bo"))
    assert sorted(run["task_id"] for page in pages for run in page) == ids


def test_the_audit_log_comes_newest_first_over_many_pages(admin: Client) -> None:
    for number in range(7):
        admin.ok("PUT", f"/limits/name-{number}", json={"slots": 1})
    pages = list(walk(admin, "/audit", limit=3))
    targets = [entry["target"] for page in pages for entry in page]
    assert targets == [f"name-{number}" for number in range(6, -1, -1)]


def test_users_and_moments_have_pages(api: Api, admin: Client) -> None:
    for number in range(5):
        push(api.world.queue, f"t{number}", user_id=f"user-{number}")
    users = [user["user_id"] for page in walk(admin, "/users", limit=2) for user in page]
    assert sorted(users) == ["acme-ann", *(f"user-{number}" for number in range(5))]
    span = {"start": "2023-11-20T00:00:00Z", "end": "2023-11-27T00:00:00Z"}
    pages = list(walk(admin, f"{JOB}/moments", limit=3, **span))
    assert [len(page) for page in pages] == [3, 3, 1]


def test_writes_and_only_writes_are_described_with_a_key_that_makes_them_happen_once() -> None:
    operations = [
        (method, {parameter["name"] for parameter in operation.get("parameters", [])})
        for methods in openapi_document("")["paths"].values()
        for method, operation in methods.items()
    ]
    assert {method for method, names in operations if "Idempotency-Key" not in names} == {"get"}
    assert not any("Idempotency-Key" in names for method, names in operations if method == "get")


# --- mounted --------------------------------------------------------------------------------------


def test_a_mounted_app_says_where_it_is(api: Api) -> None:
    outer = Starlette(routes=[Mount("/ops/queue", app=make_app(api.world.queue))])
    client = Client(outer, api.keys["admin", None], prefix=f"/ops/queue{PREFIX}")
    body = {"user_id": "bo", "every": 60, "schedule_id": "a/b"}
    made = client.send_own("POST", "/scheduler/jobs", json=body)
    assert made.headers["location"] == f"/ops/queue{PREFIX}/scheduler/jobs/a%2Fb"
    assert client.send_own("GET", "/scheduler/jobs/a%2Fb").json()["schedule_id"] == "a/b"
    served = client.send_own("GET", "/openapi.json").json()
    assert served == openapi_document("/ops/queue")
    assert served["servers"] == [{"url": "/ops/queue"}]
