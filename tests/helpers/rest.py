"""A client of the REST API that checks its answers, and a queue with one of everything."""

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.types import ASGIApp

from fairqueue.access.credentials import AccessStore
from fairqueue.clock import ManualClock, from_ms
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Failure, LogLines, Report
from fairqueue.web import create_app
from fairqueue.web.api.endpoint import PREFIX
from fairqueue.web.api.endpoints import ENDPOINTS
from fairqueue.web.api.service import Routes
from helpers.state import State
from helpers.tasks import claim_one
from helpers.world import World

ROLES = ("viewer", "operator", "admin")
TENANTS = (None, "acme", "globex")
ACME: dict[str, Any] = {"user_id": "acme-ann", "tenant": "acme"}

ROUTES = Routes(ENDPOINTS)
PROBLEM = "application/problem+json"
# What is written down about requests, and who may send them: no part of what they ask for.
_ABOUT_REQUESTS = ("audit", "api_pace", "api_keys", "credentials", "credential_ends", "replies")


class Client:
    """Sends requests to an app and checks the form of each answer."""

    def __init__(self, app: ASGIApp, secret: str | None = None, prefix: str = PREFIX) -> None:
        self._app = app
        self._prefix = prefix
        self._headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}

    def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request to a path of the API, and check that the answer is as the table says."""
        response = self.send_own(method, path, **request)
        check_form(response)
        return response

    def send_own(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Send a request without checking the answer."""
        request["headers"] = {**self._headers, **request.get("headers", {})}

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, self._prefix + path, **request)

        return asyncio.run(send())

    def get(self, path: str, **request: Any) -> Any:
        """Return the JSON at a path, which must exist."""
        return self.ok("GET", path, **request)

    def ok(self, method: str, path: str, json: Any = None, **request: Any) -> Any:
        """Send a request that must succeed; return its JSON."""
        if json is not None:
            request["json"] = json
        response = self.send(method, path, **request)
        assert response.is_success, (response.status_code, response.text)
        return response.json() if response.content else None

    def refused(self, status: int, method: str, path: str, **request: Any) -> dict[str, Any]:
        """Send a request that must be refused; return the problem document."""
        response = self.send(method, path, **request)
        assert response.status_code == status, (response.status_code, response.text)
        problem: dict[str, Any] = response.json()
        return problem


def check_form(response: httpx.Response) -> None:
    """Check that an answer has a status and a type that its endpoint declares."""
    path = response.request.url.raw_path.decode().partition("?")[0].removeprefix(PREFIX)
    if response.status_code >= 400 and response.headers["content-type"] == PROBLEM:
        check_problem(response)
    if response.status_code in (404, 405):
        return
    parts = [httpx.URL(f"http://x/{part}").path[1:] for part in path.split("/")[1:]]
    endpoint, _ = ROUTES.find(response.request.method, parts)
    assert response.status_code in endpoint.statuses, (endpoint.name, response.status_code)
    if response.status_code in (endpoint.status, *endpoint.other_statuses):
        if endpoint.answer is None:
            assert response.content == b""
        elif response.request.method != "HEAD":
            msgspec.convert(response.json(), endpoint.answer)
            assert response.headers["content-type"] == "application/json"
    elif response.status_code >= 400:
        assert response.headers["content-type"] == PROBLEM, response.text


def check_problem(response: httpx.Response) -> None:
    """Check the fields that RFC 9457 requires."""
    problem = response.json()
    assert problem["status"] == response.status_code
    assert problem["type"].startswith("urn:fairqueue:problem:")
    assert problem["title"]
    assert problem["detail"]
    assert problem["instance"]


@dataclass(kw_only=True)
class Api:
    """A queue with one of everything, all of tenant acme, whose ids begin with `acme`."""

    world: World
    app: ASGIApp
    keys: dict[tuple[str, str | None], str] = field(default_factory=dict)
    spare_key: str = ""

    def client(self, role: str | None = "admin", tenant: str | None = None) -> Client:
        """Return a client with a key of this role and tenant, or without a key."""
        return Client(self.app, None if role is None else self.keys[role, tenant])

    def state(self) -> State:
        """Everything stored, without the records of requests."""
        state = self.world.state()
        return {name: value for name, value in state.items() if name not in _ABOUT_REQUESTS}


def make_app(queue: TaskQueue) -> Starlette:
    """Return an app with the API alone and no rate limit."""
    return create_app(queue, dashboard=False, rate=1e6, burst=1_000_000)


def make_api(world: World) -> Api:
    """Fill an empty queue."""
    queue = world.queue
    api = Api(world=world, app=make_app(queue))
    access = AccessStore(queue.link)
    for role in ROLES:
        for tenant in TENANTS:
            name = f"{role} of {tenant}"
            api.keys[role, tenant] = access.create_key(name, role, tenant, by="test").secret
    api.spare_key = access.create_key("spare", "viewer", by="test").info.key_id
    world.push("acme-failed", **ACME, name="acme-mail")
    fail(queue)
    world.push_and_claim("acme-running", **ACME, name="acme-mail")
    payload = {"to": "bo", "password": "hunter2"}
    world.push("acme-waiting", **ACME, name="acme-mail", payload=payload)
    secrets = {"payload": payload, "metadata": {"api_key": "hunter2"}}
    world.add("acme-daily", **ACME, name="acme-report", **secrets)
    world.beat("worker-1")
    queue.set_limit("acme:7", slots=1)
    return api


def fail(queue: TaskQueue, message: str = "no such mailbox") -> str:
    """Claim the next task and let it fail; return its id."""
    claim = claim_one(queue)
    lines = LogLines()
    lines.keep(20, "looking for the mailbox", {"box": 7, "password": "hunter2"})
    failure = Failure(type="ValueError", message=message)
    report = Report.of_failure(claim.task.name, failure, seconds=0.1, lines=lines)
    queue.bury(claim, message, report=report)
    return claim.task.task_id


def days_ago(clock: ManualClock, days: float) -> str:
    """Format a time for a request."""
    return (from_ms(clock.now_ms()) - timedelta(days=days)).isoformat()
