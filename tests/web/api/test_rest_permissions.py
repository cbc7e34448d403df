"""Every endpoint, with every role and every tenant: what is allowed, and that the rest is not."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from helpers.rest import ROLES, TENANTS, Api, days_ago, make_api
from helpers.world import World

from fairqueue.access.audit import AuditLog
from fairqueue.web.api.endpoint import LISTING, NEW, OBJECT, SHARED, Endpoint
from fairqueue.web.api.endpoints import ENDPOINTS

JOB = "/scheduler/jobs/acme-daily"
DEFINITION = {"user_id": "acme-ann", "cron_expr": "0 10 * * *"}
OF_ACME = "?tenant=acme"  # whose user is meant: a key of a tenant may leave it out
GLOBEX = {"user_id": "globex-gil", "cron_expr": "0 10 * * *"}

Example = Callable[[Api], tuple[str, Any]]


def path(path: str, body: Any = None) -> Example:
    return lambda api: (path, body)


def past(path: str, **more: Any) -> Example:
    """A request about the last three days."""

    def example(api: Api) -> tuple[str, Any]:
        span = {"start": days_ago(api.world.clock, 3), "end": days_ago(api.world.clock, 0)}
        return (path, {**span, **more}) if more else (f"{path}?{_query(span)}", None)

    return example


def _query(values: dict[str, str]) -> str:
    return "&".join(f"{name}={value.replace('+', '%2B')}" for name, value in values.items())


EXAMPLES: dict[str, Example] = {
    "list_jobs": path("/scheduler/jobs"),
    "create_job": path("/scheduler/jobs", DEFINITION),
    "change_jobs": path("/scheduler/jobs/bulk", {"action": "pause", "dry_run": False}),
    "export_jobs": path("/scheduler/jobs/export"),
    "import_jobs": path(
        "/scheduler/jobs/import",
        {"documents": [{**DEFINITION, "schedule_id": "acme-daily"}], "dry_run": False},
    ),
    "get_job": path(JOB),
    "replace_job": path(JOB, DEFINITION),
    "change_job": path(JOB, {"priority": 5}),
    "delete_job": path(JOB),
    "toggle_job": path(f"{JOB}/toggle"),
    "pause_job": path(f"{JOB}/pause", {"note": "too many mails"}),
    "resume_job": path(f"{JOB}/resume"),
    "run_job": path(f"{JOB}/run"),
    "copy_job": path(f"{JOB}/copy", {"schedule_id": "acme-copy"}),
    "backfill_job": past(f"{JOB}/backfill", dry_run=False),
    "list_job_runs": path(f"{JOB}/runs"),
    "list_job_moments": past(f"{JOB}/moments"),
    "list_job_changes": path(f"{JOB}/changes"),
    "list_job_logs": path(f"{JOB}/logs"),
    "get_job_chart": path(f"{JOB}/chart"),
    "list_upcoming": path("/scheduler/upcoming"),
    "list_problems": path("/scheduler/problems"),
    "preview": path("/preview?cron_expr=0+9+*+*+*"),
    "preview_body": path("/preview", {"every": 60}),
    "list_runs": path("/scheduler/runs"),
    "prune_runs": path("/scheduler/runs/prune", {"older_than": 0, "dry_run": False}),
    "get_run": path("/scheduler/runs/acme-failed"),
    "retry_run": path("/scheduler/runs/acme-failed/retry"),
    "cancel_run": path("/scheduler/runs/acme-running/cancel"),
    "list_failed": path("/scheduler/failed"),
    "list_failure_groups": path("/scheduler/failed/groups"),
    "retry_all_failed": path("/scheduler/failed/retry", {"dry_run": False}),
    "discard_all_failed": path("/scheduler/failed/discard", {"dry_run": False}),
    "retry_failed": path("/scheduler/failed/acme-failed/retry"),
    "discard_failed": path("/scheduler/failed/acme-failed"),
    "list_tasks": path("/tasks"),
    "push_task": path("/tasks", {"user_id": "acme-ann", "payload": {"n": 1}}),
    "get_task": path("/tasks/acme-waiting"),
    "explain_task": path("/tasks/acme-waiting/explain"),
    "cancel_task": path("/tasks/acme-waiting/cancel"),
    "reschedule_task": path("/tasks/acme-waiting/reschedule", {"delay": 60}),
    "list_users": path("/users"),
    "get_user": path(f"/users/acme-ann{OF_ACME}"),
    "change_user": path(f"/users/acme-ann{OF_ACME}", {"weight": 2}),
    "pause_user": path(f"/users/acme-ann/pause{OF_ACME}"),
    "resume_user": path(f"/users/acme-ann/resume{OF_ACME}"),
    "purge_user": path(f"/users/acme-ann/purge{OF_ACME}", {"dry_run": False}),
    "move_user": path(f"/users/acme-ann/move{OF_ACME}", {"to": "initech"}),
    "quote_user": path(f"/users/acme-ann/quote{OF_ACME}"),
    "list_tenants": path("/tenants"),
    "get_tenant": path("/tenants/acme"),
    "change_tenant": path("/tenants/acme", {"weight": 2}),
    "pause_tenant": path("/tenants/acme/pause"),
    "resume_tenant": path("/tenants/acme/resume"),
    "purge_tenant": path("/tenants/acme/purge", {"dry_run": False}),
    "list_tenant_users": path("/tenants/acme/users"),
    "get_tenant_fairness": path("/tenants/acme/fairness"),
    "get_tenant_shares": path("/tenants/acme/shares"),
    "list_workers": path("/workers"),
    "drain_worker": path("/workers/worker-1/drain"),
    "list_pools": path("/pools"),
    "list_partitions": path("/partitions"),
    "get_snapshot": path("/stats/snapshot"),
    "get_series": path("/stats/series"),
    "get_overview": path("/stats/overview"),
    "list_attention": path("/stats/attention"),
    "get_fairness": path("/stats/fairness"),
    "get_shares": path("/stats/shares"),
    "get_redis": path("/stats/redis"),
    "list_audit": path("/audit"),
    "list_keys": path("/keys"),
    "create_key": path("/keys", {"name": "new", "role": "viewer"}),
    "revoke_key": lambda api: (f"/keys/{api.spare_key}", None),
    "get_settings": path("/settings"),
    "change_settings": path("/settings", {"max_attempts": 7}),
    "list_limits": path("/limits"),
    "set_limits": path("/limits/acme-mail", {"slots": 3}),
    "list_key_limits": path("/key-limits"),
    "set_key_limit": path("/key-limits/acme:*", {"slots": 3}),
    "remove_key_limit": path("/key-limits/acme:7"),
}
PROTECTED = [endpoint for endpoint in ENDPOINTS if endpoint.role is not None]
# Writes that change nothing of the queue: they compute.
NO_CHANGE = ("preview_body",)
# What a resume of a user who is not paused, and a job that is active, leaves as it was.
NO_TRACE = ("resume_job", "resume_user", "resume_tenant", "create_key", "revoke_key", *NO_CHANGE)


def expected(endpoint: Endpoint, role: str | None, tenant: str | None) -> set[int]:
    """The status that the table promises; either refusal where both are due."""
    assert endpoint.role is not None
    if role is None:
        return {401}
    refusals = set()
    if ROLES.index(role) < ROLES.index(endpoint.role):
        refusals.add(403)
    if tenant is not None and endpoint.tenants == SHARED:
        refusals.add(403)
    if tenant == "globex" and endpoint.tenants == OBJECT:
        refusals.add(404)
    return refusals or {endpoint.status}


def cases() -> list[tuple[str | None, str | None]]:
    return [(None, None), *((role, tenant) for role in ROLES for tenant in TENANTS)]


def test_every_operation_has_an_example() -> None:
    assert {endpoint.name for endpoint in PROTECTED} == set(EXAMPLES)


@pytest.mark.parametrize("endpoint", PROTECTED, ids=lambda endpoint: endpoint.name)
def test_an_operation_is_for_its_role_and_tenant_only(endpoint: Endpoint, world: World) -> None:
    api = make_api(world)
    for role, tenant in cases():
        before = api.state()
        others = acmes(api)
        where, body = EXAMPLES[endpoint.name](api)
        where = where if tenant is None else where.replace(OF_ACME, "")
        request = {} if body is None else {"json": body}
        response = api.client(role, tenant).send(endpoint.method, where, **request)
        wanted = expected(endpoint, role, tenant)
        assert response.status_code in wanted, (role, tenant, response.text)
        is_others = tenant == "globex" and endpoint.tenants in (OBJECT, LISTING)
        if tenant == "globex" and endpoint.tenants == NEW:
            assert acmes(api) == others
        if not response.is_success or is_others or not endpoint.is_write:
            assert api.state() == before, (role, tenant)
        if is_others and response.is_success:
            assert "acme" not in response.text, (role, response.text)
        elif response.is_success and endpoint.is_write:
            assert endpoint.name in NO_TRACE or api.state() != before, (role, tenant)
            check_audit(endpoint, api, f"{role} of {tenant}")
            world.redis.flushdb()
            world.queue.link.is_begun = False
            api = make_api(world)


def check_audit(endpoint: Endpoint, api: Api, actor: str) -> None:
    """The change that was just made is the newest entry of the audit log."""
    if endpoint.name in NO_CHANGE:
        return
    entry = AuditLog(api.world.queue.link).entries(limit=1)[0]
    assert (entry.actor, entry.via, entry.outcome) == (actor, "rest", "done")


USERS = [endpoint for endpoint in PROTECTED if endpoint.path.startswith("/users/{user_id}")]


@pytest.mark.parametrize("endpoint", USERS, ids=lambda endpoint: endpoint.name)
def test_a_user_of_another_tenant_cannot_be_named(endpoint: Endpoint, world: World) -> None:
    api = make_api(world)
    where, body = EXAMPLES[endpoint.name](api)
    assert OF_ACME in where
    request = {} if body is None else {"json": body}
    before = api.state()
    problem = api.client("admin", "globex").refused(403, endpoint.method, where, **request)
    assert "acme-ann" not in problem["detail"]
    assert api.state() == before


# --- ids ------------------------------------------------------------------------------------------

OWN = "/scheduler/jobs/globex-own"
# Where a request names an id: what it asks for, and of which kind the id is.
NAMED: dict[str, tuple[str, Callable[[str], tuple[str, Any]]]] = {
    "create_job": ("schedule_id", lambda id_: ("/scheduler/jobs", {**GLOBEX, "schedule_id": id_})),
    "copy_job": ("schedule_id", lambda id_: (f"{OWN}/copy", {"schedule_id": id_})),
    "import_jobs": (
        "schedule_id",
        lambda id_: (
            "/scheduler/jobs/import",
            {"documents": [{**GLOBEX, "schedule_id": id_}], "dry_run": False},
        ),
    ),
    "change_jobs": (
        "schedule_id",
        lambda id_: ("/scheduler/jobs/bulk", {"action": "pause", "ids": [id_], "dry_run": False}),
    ),
    "push_task": ("task_id", lambda id_: ("/tasks", {"user_id": "globex-gil", "task_id": id_})),
    "list_runs": ("schedule_id", lambda id_: (f"/scheduler/runs?schedule_id={id_}", None)),
    "list_failed": ("schedule_id", lambda id_: (f"/scheduler/failed?schedule_id={id_}", None)),
    "retry_all_failed": (
        "schedule_id",
        lambda id_: ("/scheduler/failed/retry", {"schedule_id": id_, "dry_run": False}),
    ),
    "discard_all_failed": (
        "schedule_id",
        lambda id_: ("/scheduler/failed/discard", {"schedule_id": id_, "dry_run": False}),
    ),
}
IDS = {
    "schedule_id": ["acme-daily"],
    "task_id": ["acme-failed", "acme-running", "acme-waiting"],
    "user_id": ["acme-ann"],
    "tenant": ["acme"],
    "key": ["acme:7"],
    "key_id": ["acme-key"],
    "worker_id": ["worker-1"],
    "name": ["acme-mail"],
}


def asked(endpoint: Endpoint, api: Api, id_: str) -> tuple[int, str]:
    """How an admin of globex is answered who names this id; the id itself is not compared."""
    if endpoint.name in NAMED:
        where, body = NAMED[endpoint.name][1](id_)
    else:
        where, body = EXAMPLES[endpoint.name](api)
        where = where.replace(OF_ACME, "")
        for known in (each for ids in IDS.values() for each in ids):
            where = re.sub(rf"/{re.escape(known)}(?=[/?]|$)", f"/{id_}", where)
    request = {} if body is None else {"json": body}
    response = api.client("admin", "globex").send(endpoint.method, where, **request)
    if response.is_success and endpoint.status == 201:
        return response.status_code, ""  # a new object, whose times and marks are its own
    return response.status_code, response.text.replace(id_, "ID")


NAMING = [endpoint for endpoint in PROTECTED if endpoint.name in NAMED or endpoint.parameters]


@pytest.mark.parametrize("endpoint", NAMING, ids=lambda endpoint: endpoint.name)
def test_a_tenant_learns_nothing_of_the_ids_of_others(endpoint: Endpoint, world: World) -> None:
    api = make_api(world)
    own = {**GLOBEX, "schedule_id": "globex-own"}
    api.client("admin", "globex").ok("POST", "/scheduler/jobs", json=own)
    kind = NAMED[endpoint.name][0] if endpoint.name in NAMED else endpoint.parameters[0]
    nobodys = asked(endpoint, api, "made-up")
    for id_ in IDS[kind]:
        before = acmes(api)
        assert asked(endpoint, api, id_) == nobodys
        assert acmes(api) == before


def acmes(api: Api) -> list[str]:
    """What acme has, as its admin is told."""
    client = api.client("admin", "acme")
    paths = ("/scheduler/jobs", "/scheduler/runs", "/users?order=name")
    return [client.send("GET", path).text for path in paths]


def test_an_id_that_a_tenant_gives_is_its_own(world: World) -> None:
    api = make_api(world)
    client = api.client("admin", "globex")
    made = client.ok("POST", "/scheduler/jobs", json={**GLOBEX, "schedule_id": "acme-daily"})
    assert made["schedule_id"] == "globex~acme-daily"
    for id_ in ("acme-daily", "globex~acme-daily"):
        assert client.get(f"/scheduler/jobs/{id_}")["schedule_id"] == "globex~acme-daily"
    assert client.ok("PATCH", "/scheduler/jobs/acme-daily", json={"priority": 5})["priority"] == 5
    bulk = {"action": "pause", "ids": ["acme-daily"], "dry_run": False}
    assert client.ok("POST", "/scheduler/jobs/bulk", json=bulk)["done"] == 1
    task = {"user_id": "globex-gil", "task_id": "175928847299117063"}
    for _ in range(2):  # the same id is one task
        pushed = client.ok("POST", "/tasks", json=task)
        assert pushed["task_id"] == "globex~175928847299117063"
    assert client.get("/tasks/175928847299117063")["task_id"] == "globex~175928847299117063"
    client.ok("POST", "/tasks/175928847299117063/cancel")
    assert len(api.client("admin").get("/scheduler/jobs")["items"]) == 2


def test_a_tenant_may_name_what_was_made_for_it(world: World) -> None:
    client = make_api(world).client("admin", "acme")
    documents = client.get("/scheduler/jobs/export")["documents"]
    diff = client.ok("POST", "/scheduler/jobs/import", json={"documents": documents})
    assert (diff["unchanged"], diff["added"]) == (["acme-daily"], [])
    same = {"user_id": "acme-ann", "task_id": "acme-waiting"}
    client.refused(422, "POST", "/tasks", json=same)  # its own, with other content
