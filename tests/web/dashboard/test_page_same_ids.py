"""Tasks of two tenants that have the same id, in different partitions: pages, REST and commands."""

from collections.abc import Iterator

import pytest
import redis
from helpers.browser import Site
from helpers.commands import Cli
from helpers.pages import get, send, toast, words

from fairqueue.link.partitions import partition_of
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue

NORTH = "north"
SOUTH = next(
    name
    for name in (f"south-{n}" for n in range(100))
    if partition_of(None, name, 4) != partition_of(None, NORTH, 4)
)


@pytest.fixture
def queue(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    """A queue with four partitions, with the task `same` of two tenants."""
    with TaskQueue(redis_client, partitions=4) as queue:
        for tenant in (NORTH, SOUTH):
            queue.push(Task.create(user_id="ann", tenant=tenant, task_id="same"))
        yield queue


def test_a_page_is_of_the_tenant_that_the_link_names(site: Site) -> None:
    listed = get(site, "/runs")
    assert all(f'href="/runs/same?tenant={tenant}"' in listed for tenant in (NORTH, SOUTH))
    assert f"--tenant {NORTH}" in words(get(site, "/runs/same", tenant=NORTH))
    assert "pass tenant=" in get(site, "/runs/same", 409)
    done = send(site, "/do/runs/cancel", id="same", tenant=NORTH)
    assert done.headers["HX-Location" if "HX-Location" in done.headers else "HX-Redirect"]
    assert "cancelled" in words(get(site, "/runs/same", tenant=NORTH)).lower()
    assert "pending" in words(get(site, "/runs/same", tenant=SOUTH)).lower()
    refused = send(site, "/do/runs/cancel", id="same")
    assert "pass tenant=" in toast(refused)


def test_rest_asks_for_the_tenant(site: Site) -> None:
    problem = site.http.get("/api/v1/tasks/same")
    assert problem.status_code == 409
    assert problem.json()["type"] == "urn:fairqueue:problem:ambiguous-task"
    for path in ("tasks/same", "scheduler/runs/same", "tasks/same/explain"):
        assert site.http.get(f"/api/v1/{path}", params={"tenant": SOUTH}).status_code == 200, path
    cancelled = site.http.post("/api/v1/tasks/same/cancel", params={"tenant": SOUTH})
    assert cancelled.json() == {"cancelled": True}
    other = site.http.get("/api/v1/tasks/same", params={"tenant": NORTH})
    assert other.json()["status"] == "pending"


def test_commands_ask_for_the_tenant(redis_url: str, queue: TaskQueue) -> None:
    cli = Cli(redis_url)
    refused = cli.run("tasks", "show", "same")
    assert (refused.code, "pass tenant=" in refused.err) == (2, True)
    assert cli.json("tasks", "show", "same", "--tenant", NORTH)["tenant"] == NORTH
    cli.ok("tasks", "reschedule", "same", "--tenant", NORTH, "--delay", "1h")
    cli.ok("runs", "cancel", "same", "--tenant", SOUTH, "--yes")
    shown = cli.json("runs", "show", "same", "--tenant", SOUTH)
    assert (shown["tenant"], shown["status"]) == (SOUTH, "cancelled")
