"""Tenants, pools, limits of keys, quotes, and what tasks and jobs may ask for, over REST."""

from typing import Any

import pytest
from helpers.rest import Api, Client, days_ago

from fairqueue.flow_options import MAX_LIMIT_KEYS
from fairqueue.models import KeyLimits


@pytest.fixture
def admin(api: Api) -> Client:
    return api.client()


def ids(page: Any) -> list[str]:
    return [each["task_id"] for each in page["items"]]


# --- tenants --------------------------------------------------------------------------------------


def test_tenants_are_listed_with_their_shares(api: Api, admin: Client) -> None:
    api.world.push("g", user_id="gil", tenant="globex")
    api.world.push("plain", user_id="gil")
    acme, globex = admin.get("/tenants")["items"]
    assert (acme["tenant"], acme["backlog"], acme["running"], acme["users"]) == ("acme", 1, 1, 1)
    assert (globex["tenant"], globex["backlog"], globex["settings"]["weight"]) == ("globex", 1, 1.0)
    assert (acme["ended"], acme["received"]) == (1, 1.0)
    page = admin.get("/tenants?limit=1")
    assert [each["tenant"] for each in page["items"]] == ["acme"]
    rest = admin.get(f"/tenants?limit=1&cursor={page['cursor']}")
    assert [each["tenant"] for each in rest["items"]] == ["globex"]
    found = admin.get("/tenants?prefix=gl")["items"]
    assert [each["tenant"] for each in found] == ["globex"]


def test_tenants_are_listed_by_backlog(api: Api, admin: Client) -> None:
    for number in range(3):
        api.world.push(f"g{number}", user_id="gil", tenant="globex")
    admin.ok("PATCH", "/tenants/idle", json={"weight": 2})

    def listed(query: str) -> list[str]:
        return [each["tenant"] for each in admin.get(f"/tenants?{query}")["items"]]

    assert listed("order=backlog") == ["globex", "acme"]
    assert listed("order=backlog&prefix=ac") == ["acme"]
    page = admin.get("/tenants?order=backlog&limit=1")
    assert listed(f"order=backlog&limit=1&cursor={page['cursor']}") == ["acme"]
    assert listed("order=name") == ["acme", "globex", "idle"]
    admin.refused(422, "GET", "/tenants?order=odd")
    admin.refused(422, "GET", "/tenants?order=backlog&cursor=x")


def test_a_tenant_is_told_and_changed(admin: Client) -> None:
    body = {"weight": 4, "max_running": 2, "max_waiting": 9, "rate": 0.5}
    settings = admin.ok("PATCH", "/tenants/acme", json=body)
    assert {name: settings[name] for name in body} == body
    assert admin.ok("PATCH", "/tenants/acme", json={"rate": None})["rate"] is None
    assert admin.get("/tenants/acme")["settings"]["max_waiting"] == 9
    problem = admin.refused(404, "GET", "/tenants/initech")
    assert problem["type"].endswith(":unknown-tenant")
    for wrong, field in (({}, None), ({"weight": 0}, "weight"), ({"tenant": "x"}, "tenant")):
        problem = admin.refused(422, "PATCH", "/tenants/acme", json=wrong)
        assert problem.get("field") == field
    assert "tenant" in admin.refused(422, "PATCH", "/tenants/no%20way", json=body)["detail"]


def test_a_tenant_is_paused_and_resumed(api: Api, admin: Client) -> None:
    api.world.push("g", user_id="gil", tenant="globex")
    body = {"note": "unpaid", "until": days_ago(api.world.clock, -1)}
    paused = admin.ok("POST", "/tenants/acme/pause", json=body)
    assert (paused["paused"], paused["paused_by"]) == (True, "admin of None")
    told = admin.get("/tasks/acme-waiting/explain")
    assert [each["code"] for each in told["reasons"]] == ["tenant_paused"]
    assert "unpaid" in told["summary"]
    claims = api.world.queue.claim("w", limit=10)
    assert {claim.task.tenant for claim in claims} == {"globex"}
    assert admin.ok("POST", "/tenants/acme/resume")["paused"] is False
    assert [each.task.tenant for each in api.world.queue.claim("w", limit=10)] == ["acme"]


def test_the_backlog_of_a_tenant_is_counted_and_then_dropped(api: Api, admin: Client) -> None:
    api.world.push("kept", user_id="acme-ann")
    path = "/tenants/acme/purge"
    assert admin.ok("POST", path) == {"dry_run": True, "count": 1}
    assert admin.ok("POST", path, json={"dry_run": False}) == {"dry_run": False, "count": 1}
    assert ids(admin.get("/tasks")) == ["kept"]


def test_the_users_of_a_tenant_share_its_service(api: Api, admin: Client) -> None:
    api.world.push("b1", user_id="bob", tenant="acme")
    api.world.push("other", user_id="bob", tenant="globex")
    listed = admin.get("/tenants/acme/users?order=name")["items"]
    assert [(each["user_id"], each["tenant"]) for each in listed] == [
        ("acme-ann", "acme"),
        ("bob", "acme"),
    ]
    assert sum(each["received"] for each in listed) == 1.0
    fair = admin.get("/tenants/acme/fairness")
    assert (fair["users"], fair["ended"]) == (2, 1)
    shares = admin.get("/tenants/acme/shares")
    assert shares["users"] == [{"user_id": "acme-ann", "tenant": "acme"}]
    assert [sum(counts) for counts in shares["counts"]] == [1]
    whole = admin.get("/stats/shares")
    assert whole["users"] == [{"user_id": "", "tenant": "acme"}]
    assert [sum(counts) for counts in whole["counts"]] == [1]
    admin.refused(404, "GET", "/tenants/initech/users")


def test_a_key_of_a_tenant_sees_its_tenant_only(api: Api) -> None:
    api.world.push("g", user_id="gil", tenant="globex")
    viewer = api.client("viewer", "acme")
    assert [each["tenant"] for each in viewer.get("/tenants")["items"]] == ["acme"]
    assert viewer.get("/tenants/acme")["tenant"] == "acme"
    for path in ("", "/users", "/fairness", "/shares"):
        viewer.refused(404, "GET", f"/tenants/globex{path}")
    assert [each["tenant"] for each in viewer.get("/users")["items"]] == ["acme"]
    assert viewer.get("/stats/fairness")["users"] == 1
    assert api.client("admin", "acme").ok("POST", "/tenants/acme/purge")["count"] == 1
    api.client("admin", "acme").refused(404, "POST", "/tenants/globex/purge")


# --- users of tenants -----------------------------------------------------------------------------


def test_the_users_of_one_id_in_two_tenants_are_two(api: Api, admin: Client) -> None:
    for tenant in (None, "globex"):
        api.world.push(f"of-{tenant}", user_id="acme-ann", tenant=tenant)
    listed = admin.get("/users?order=name")["items"]
    assert [each["tenant"] for each in listed] == [None, "acme", "globex"]
    admin.ok("PATCH", "/users/acme-ann?tenant=globex", json={"weight": 3})
    weights = {
        query: admin.get(f"/users/acme-ann{query}")["settings"]["weight"]
        for query in ("", "?tenant=acme", "?tenant=globex")
    }
    assert weights == {"": 1.0, "?tenant=acme": 1.0, "?tenant=globex": 3.0}
    path = "/users/acme-ann/purge?tenant=globex"
    assert admin.ok("POST", path, json={"dry_run": False})["count"] == 1
    assert {*ids(admin.get("/tasks"))} == {"acme-waiting", "of-None"}
    admin.refused(404, "GET", "/users/acme-ann?tenant=initech")
    assert "tenant" in admin.refused(422, "GET", "/users/acme-ann?tenant=no%20way")["detail"]


@pytest.mark.one_partition
def test_a_user_moves_with_tasks_and_settings(admin: Client) -> None:
    admin.ok("PATCH", "/users/acme-ann?tenant=acme", json={"weight": 3})
    path = "/users/acme-ann/move"
    assert admin.ok("POST", f"{path}?tenant=acme", json={"to": "globex"}) == {"moved": 1}
    assert admin.get("/tasks/acme-waiting")["tenant"] == "globex"
    assert admin.get("/users/acme-ann?tenant=globex")["settings"]["weight"] == 3.0
    assert admin.ok("POST", f"{path}?tenant=globex", json={"to": None}) == {"moved": 1}
    assert admin.get("/tasks/acme-waiting")["tenant"] is None
    entry = admin.get("/audit?action=user.move&limit=1")["items"][0]
    assert (entry["target"], entry["tenant"], entry["details"]) == (
        "acme-ann",
        "globex",
        {"to": None, "moved": 1},
    )
    for body, field in (({}, "to"), ({"to": 7}, "to")):
        assert admin.refused(422, "POST", path, json=body)["field"] == field
    assert "another tenant" in admin.refused(422, "POST", path, json={"to": None})["detail"]
    admin.refused(422, "POST", path, json={"to": "no way"})


def test_a_move_of_an_unknown_user_is_refused(api: Api, admin: Client) -> None:
    before = api.state()
    problem = admin.refused(404, "POST", "/users/nobody/move", json={"to": "globex"})
    assert problem["detail"] == "there is no user 'nobody'"
    problem = admin.refused(404, "POST", "/users/acme-ann/move", json={"to": "globex"})
    assert "of tenant 'acme'" in problem["detail"]
    assert api.state() == before


@pytest.mark.one_partition
def test_a_move_can_be_repeated(admin: Client) -> None:
    for moved in (1, 0):
        path = "/users/acme-ann/move?tenant=acme"
        assert admin.ok("POST", path, json={"to": "globex"}) == {"moved": moved}


def test_a_user_of_a_tenant_pushes_as_that_pair(api: Api) -> None:
    operator = api.client("operator", "globex")
    pushed = operator.ok("POST", "/tasks", json={"user_id": "acme-ann", "task_id": "own"})
    assert operator.get(f"/tasks/{pushed['task_id']}")["tenant"] == "globex"
    assert operator.get("/users/acme-ann")["backlog"] == 1
    assert api.client("viewer", "acme").get("/users/acme-ann")["backlog"] == 1
    operator.refused(403, "POST", "/tasks", json={"user_id": "acme-ann", "tenant": "acme"})


# --- what tasks may ask for -----------------------------------------------------------------------

FLOW: dict[str, Any] = {
    "pool": "gpu",
    "limit_keys": ["account:42", "box:1"],
    "unique": "report:7",
    "cost": 3.5,
}


def test_a_task_has_its_flow(api: Api, admin: Client) -> None:
    at = days_ago(api.world.clock, -1)
    body = {"user_id": "bo", **FLOW, "unique_for": 60, "on_duplicate": "error", "expires": at}
    run = admin.get("/tasks/" + admin.ok("POST", "/tasks", json=body)["task_id"])
    assert {name: run[name] for name in FLOW} == FLOW
    assert run["expires_at"] == at.replace("+00:00", "Z")
    assert ids(admin.get("/tasks?pool=gpu")) == [run["task_id"]]
    assert ids(admin.get("/scheduler/runs?pool=gpu")) == [run["task_id"]]
    assert ids(admin.get("/tasks?pool=cpu")) == []


def test_a_second_task_with_a_unique_key_is_the_first_one(admin: Client) -> None:
    body = {"user_id": "bo", "unique": "report:7", "payload": {"n": 1}}
    first = admin.ok("POST", "/tasks", json=body)["task_id"]
    assert admin.ok("POST", "/tasks", json={**body, "payload": {"n": 2}})["task_id"] == first
    problem = admin.refused(409, "POST", "/tasks", json={**body, "on_duplicate": "error"})
    assert problem["type"].endswith(":duplicate-task")
    assert problem["task_id"] == first
    body |= {"on_duplicate": "replace", "payload": {"n": 3}}
    assert admin.ok("POST", "/tasks", json=body)["task_id"] == first
    assert admin.get(f"/tasks/{first}")["task"]["payload"] == {"n": 3}
    assert len(admin.get("/tasks?user_id=bo")["items"]) == 1
    replaced, refused, ignored, pushed = admin.get("/audit?action=task.push")["items"]
    for entry in (replaced, ignored):
        assert entry["target"] != first
        assert (entry["details"]["task_id"], entry["details"]["unique"]) == (first, "report:7")
    assert (refused["outcome"], first in refused["error"]) == ("failed", True)
    assert (pushed["target"], pushed["details"]) == (first, {"user_id": "bo", "name": "default"})


def test_a_unique_key_is_that_of_a_tenant(api: Api) -> None:
    body = {"user_id": "bo", "unique": "report:7", "on_duplicate": "error"}
    for tenant in (None, "acme", "globex"):
        api.client("operator", tenant).ok("POST", "/tasks", json=body)
        api.client("operator", tenant).refused(409, "POST", "/tasks", json=body)


def test_a_debounced_task_runs_with_the_last_payload(api: Api, admin: Client) -> None:
    body = {"user_id": "bo", "unique": "index", "debounce": 60, "max_wait": 600}
    first = admin.ok("POST", "/tasks", json={**body, "payload": {"n": 1}})["task_id"]
    due = admin.get(f"/tasks/{first}")["due_at"]
    api.world.clock.advance(30)
    assert admin.ok("POST", "/tasks", json={**body, "payload": {"n": 2}})["task_id"] == first
    run = admin.get(f"/tasks/{first}")
    assert run["due_at"] > due
    assert run["task"]["payload"] == {"n": 2}


def test_a_task_that_has_not_started_in_time_expires(api: Api, admin: Client) -> None:
    body = {"user_id": "bo", "expires": 60}
    task_id = admin.ok("POST", "/tasks", json=body)["task_id"]
    assert "expires" in [each["code"] for each in admin.get(f"/tasks/{task_id}/explain")["reasons"]]
    api.world.clock.advance(61)
    api.world.queue.claim("w", limit=10)
    assert admin.get(f"/tasks/{task_id}")["status"] == "expired"
    assert ids(admin.get("/scheduler/runs?status=expired")) == [task_id]
    assert ids(admin.get("/scheduler/runs?status=expired&user_id=acme-ann")) == []


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"pool": ""}, "pool"),
        ({"pool": 7}, "pool"),
        ({"limit_keys": "account"}, "limit_keys"),
        ({"limit_keys": [*"abcde"]}, "limit_keys"),
        ({"limit_keys": ["a*"]}, "limit_keys"),
        ({"limit_keys": ["a", "a"]}, "limit_keys"),
        ({"limit_keys": [""]}, "limit_keys[0]"),
        ({"unique": "x" * 201}, "unique"),
        ({"on_duplicate": "error"}, "on_duplicate"),
        ({"unique": "x", "on_duplicate": "odd"}, "on_duplicate"),
        ({"unique": "x", "unique_for": "ever"}, "unique_for"),
        ({"unique": "x", "unique_for": 0}, "unique_for"),
        ({"debounce": 5}, "debounce"),
        ({"unique": "x", "max_wait": 5}, "max_wait"),
        ({"unique": "x", "debounce": 5, "max_wait": 4}, "max_wait"),
        ({"expires": 0}, "expires"),
        ({"expires": "2020-01-01T00:00:00Z"}, "expires"),
        ({"expires": "2100-01-01T00:00:00"}, "expires"),
        ({"expires": 5, "delay": 6}, "expires"),
        ({"cost": 0}, "cost"),
        ({"cost": -1}, "cost"),
        ({"cost": 1e9}, "cost"),
        ({"cost": "much"}, "cost"),
    ],
)
def test_a_task_with_a_bad_flow_is_not_stored(
    api: Api, admin: Client, wrong: dict[str, Any], field: str | None
) -> None:
    before = api.state()
    problem = admin.refused(422, "POST", "/tasks", json={"user_id": "bo", **wrong})
    assert problem.get("field") == field
    assert api.state() == before


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"limit_keys": ["a", ""]}, "limit_keys[1]: Expected `str` of length >= 1, not ''"),
        ({"limit_keys": [*"abcde"]}, "of length <= 4, not ['a', 'b', 'c', 'd', 'e']"),
        ({"expires": -1}, "expires: Expected `float` >= 0.001, not -1"),
        ({"expires": "soon"}, "expires: Invalid RFC3339 encoded datetime: 'soon'"),
        ({"cost": 1e9}, "cost: Expected `float` <= 1000000.0, not 1000000000.0"),
        ({"cost": "3"}, "got `str` '3'"),
        ({"queue_name": ""}, "queue_name: Expected `str` of length >= 1, not ''"),
        ({"on_duplicate": "odd"}, "on_duplicate: Invalid enum value 'odd'"),
    ],
)
def test_a_bad_value_is_named(admin: Client, wrong: dict[str, Any], told: str) -> None:
    problem = admin.refused(422, "POST", "/tasks", json={"user_id": "bo", **wrong})
    assert problem["detail"].endswith(told)


def test_a_bad_payload_is_not_repeated(admin: Client) -> None:
    body = {"user_id": "bo", "payload": "password"}
    assert "password" not in admin.refused(422, "POST", "/tasks", json=body)["detail"]


def test_a_job_has_a_flow_too(admin: Client) -> None:
    body = {**FLOW, "user_id": "bo", "every": 60, "schedule_id": "x", "expires": 600}
    job = admin.ok("POST", "/scheduler/jobs", json={**body, "queue_name": "gpu"})
    assert {name: job[name] for name in (*FLOW, "expires")} == {**FLOW, "expires": 600}
    run = admin.get("/scheduler/runs/" + admin.ok("POST", "/scheduler/jobs/x/run")["task_id"])
    assert {name: run[name] for name in FLOW} == FLOW
    changed = admin.ok("PATCH", "/scheduler/jobs/x", json={"pool": "default", "cost": None})
    assert (changed["pool"], changed["cost"], changed["unique"]) == ("default", None, "report:7")
    for wrong in ({"cost": 0}, {"limit_keys": ["a*"]}, {"pool": ""}, {"unique_for": "ever"}):
        admin.refused(422, "PATCH", "/scheduler/jobs/x", json=wrong)
    assert admin.get("/scheduler/jobs/x")["limit_keys"] == FLOW["limit_keys"]
    replaced = admin.ok("PUT", "/scheduler/jobs/x", json={"user_id": "bo", "every": 60})
    assert {name: replaced[name] for name in FLOW} == {
        "pool": "default",
        "limit_keys": None,
        "unique": None,
        "cost": None,
    }


def test_many_jobs_get_a_pool_at_once(admin: Client) -> None:
    for number in range(3):
        body = {"user_id": "bo", "every": 60, "schedule_id": f"x{number}"}
        admin.ok("POST", "/scheduler/jobs", json=body)
    body = {"action": "update", "user_id": "bo", "changes": {"pool": "gpu"}, "dry_run": False}
    assert admin.ok("POST", "/scheduler/jobs/bulk", json=body)["done"] == 3
    jobs = admin.get("/scheduler/jobs?user_id=bo")["items"]
    assert {job["pool"] for job in jobs} == {"gpu"}
    documents = admin.get("/scheduler/jobs/export?user_id=bo")["documents"]
    assert {each["pool"] for each in documents} == {"gpu"}
    documents[0] |= {"pool": "default", "limit_keys": ["account:42"]}
    body = {"documents": documents, "dry_run": False}
    (changed,) = admin.ok("POST", "/scheduler/jobs/import", json=body)["changed"].values()
    assert {*changed} == {"pool", "limit_keys"}


def test_failed_runs_of_a_pool_are_retried(api: Api, admin: Client) -> None:
    queue = api.world.queue
    api.world.push("broken", user_id="bo", pool="gpu", limit_keys=["account:42"], cost=2.0)
    (claim,) = queue.claim("w", pools=["gpu"])
    queue.bury(claim, "no")
    assert ids(admin.get("/scheduler/failed?pool=gpu")) == ["broken"]
    body = {"pool": "gpu", "dry_run": False}
    assert admin.ok("POST", "/scheduler/failed/retry", json=body)["done"] == 1
    (run,) = admin.get("/tasks?pool=gpu")["items"]
    assert (run["retry_of"], run["pool"], run["limit_keys"], run["cost"]) == (
        *("broken", "gpu", ["account:42"], 2.0),
    )


# --- limits, pools and quotes ---------------------------------------------------------------------


def test_limits_of_keys_are_set_listed_and_removed(api: Api, admin: Client) -> None:
    body = {"slots": 1, "ordered": True, "through_retries": True, "scope": "tenant"}
    told = admin.ok("PUT", "/key-limits/account:*", json=body)["limits"]
    assert told["account:*"] == {**body, "rate": None}
    assert admin.get("/key-limits")["limits"] == told
    assert admin.get("/settings")["key_limits"] == told
    assert admin.ok("PUT", "/key-limits/a%2Fb", json={"rate": 2})["limits"]["a/b"]["rate"] == 2
    limits = api.world.queue.get_key_limits()
    assert limits["a/b"] == KeyLimits(rate=2.0)
    assert admin.send("DELETE", "/key-limits/account:*").status_code == 204
    assert {*admin.get("/key-limits")["limits"]} == {"a/b", "acme:7"}
    problem = admin.refused(404, "DELETE", "/key-limits/account:*")
    assert problem["type"].endswith(":unknown-limit")


@pytest.mark.parametrize(
    ("key", "body", "field"),
    [
        ("a", {}, None),
        ("a", {"slots": 0}, "slots"),
        ("a", {"slots": 1, "scope": "all"}, "scope"),
        ("a", {"rate": 1, "ordered": True}, None),
        ("a", {"slots": 1, "through_retries": True}, None),
        ("a", {"slots": 1, "timeout": 5}, "timeout"),
        ("a*b", {"slots": 1}, "key"),
        ("a%01", {"slots": 1}, "key"),
    ],
)
def test_a_bad_limit_of_a_key_is_refused(
    api: Api, admin: Client, key: str, body: dict[str, Any], field: str | None
) -> None:
    before = api.state()
    assert admin.refused(422, "PUT", f"/key-limits/{key}", json=body).get("field") == field
    assert api.state() == before


def test_pools_say_what_waits_and_who_serves_them(api: Api, admin: Client) -> None:
    admin.ok("POST", "/tasks", json={"user_id": "bo", "pool": "gpu"})
    default, gpu = admin.get("/pools")["items"]
    assert (default["pool"], default["waiting"], default["workers"]) == ("default", 1, 1)
    assert (gpu["pool"], gpu["waiting"], gpu["is_unserved"]) == ("gpu", 1, True)
    (attention,) = [
        each for each in admin.get("/stats/attention")["items"] if each["kind"] == "pool"
    ]
    assert attention["target"] == "gpu"
    api.world.beat("worker-2", pools=["gpu"])
    _, gpu = admin.get("/pools")["items"]
    assert (gpu["workers"], gpu["is_unserved"]) == (1, False)


def test_a_quote_says_when_a_task_would_start(admin: Client) -> None:
    known = admin.get("/users/new/quote")
    assert known["earliest"] <= known["starts_about"] <= known["latest"]
    assert known["reason"] is None
    away = admin.get("/users/new/quote?pool=gpu&tenant=acme&name=mail")
    assert (away["starts_about"], away["reason"]) == (None, "no worker takes such tasks")
    admin.ok("POST", "/tenants/acme/pause")
    assert admin.get("/users/acme-ann/quote?tenant=acme")["reason"] == "the tenant is paused"
    admin.refused(422, "GET", "/users/new/quote?pool=")
    told = admin.get("/tasks/acme-waiting/explain")
    assert told["starts_about"] is None


def test_an_explanation_estimates_the_start(admin: Client) -> None:
    told = admin.get("/tasks/acme-waiting/explain")
    assert told["starts_earliest"] <= told["starts_about"] <= told["starts_latest"]


def test_the_document_bounds_the_keys_of_a_task(admin: Client) -> None:
    schemas = admin.get("/openapi.json")["components"]["schemas"]
    keys = schemas["NewTask"]["properties"]["limit_keys"]["anyOf"][0]
    assert keys["maxItems"] == MAX_LIMIT_KEYS
