"""The page about partitions, and what all pages say if some do not answer."""

from collections.abc import Iterator

import pytest
import redis
from helpers.browser import Site, Web
from helpers.pages import get, key, words
from helpers.partitions import NOWHERE, without
from prometheus_client import CollectorRegistry

from fairqueue.demo.seeder import seed
from fairqueue.link.partitions import partition_of
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler

PAGES = (
    *("/", "/schedules", "/users", "/tenants", "/runs", "/failed", "/workers", "/audit"),
    *("/settings", "/partitions"),
)


@pytest.fixture
def queue(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    """A queue with four partitions, on the server's clock."""
    with TaskQueue(redis_client, partitions=4) as queue:
        yield queue


def push_to_all(queue: TaskQueue, count: int = 20) -> None:
    """Push tasks of so many tenants that each partition has some."""
    queue.push_many(
        Task.create(user_id="ann", tenant=f"tenant-{n}", task_id=f"task-{n}") for n in range(count)
    )


def test_the_page_shows_each_partition_and_what_to_do(site: Site, queue: TaskQueue) -> None:
    queue.push_many(Task.create(user_id="ann", tenant="acme") for _ in range(250))
    text = get(site, "/partitions")
    assert all(f'id="partition-{number}"' in text for number in range(4))
    assert "Tenant 'acme' has 100% of what waits" in words(text)
    assert "load delay:1s" in text, "the first look has no rates"


def test_a_queue_without_partitions_has_no_link_to_the_page(
    redis_client: redis.Redis, web: Web, queue: TaskQueue
) -> None:
    assert 'href="/partitions"' in get(web(), "/")


def test_the_page_is_not_for_a_tenant(web: Web) -> None:
    site = web(auth=True)
    answer = site.http.get("/partitions", headers=key(site, tenant="acme", role="viewer"))
    assert answer.status_code == 403
    assert site.http.get("/partitions", headers=key(site, role="viewer")).status_code == 200


def test_pages_name_the_partitions_that_do_not_answer_and_show_the_rest(
    site: Site, queue: TaskQueue
) -> None:
    push_to_all(queue)
    assert "fairqueue-missing-partitions" not in site.http.get("/runs").headers
    with without(queue, 1, 3):
        for path in PAGES:
            answer = site.http.get(path, headers={"Accept": "text/html"})
            assert answer.status_code == 200, path
            assert f"Partitions 1, 3 (node {NOWHERE}) do not answer" in words(answer.text), path
            assert answer.headers["fairqueue-missing-partitions"] == "1, 3"
        assert "task-" in get(site, "/runs")
        assert "of node" in words(get(site, "/partitions"))


def test_the_viewer_of_a_tenant_sees_no_nodes(web: Web, queue: TaskQueue) -> None:
    site = web(auth=True)
    headers = key(site, tenant="acme", role="viewer")
    own = partition_of(None, "acme", 4)
    with without(queue, *({0, 1, 2, 3} - {own, 0})):
        answer = site.http.get("/runs", headers=headers)
        assert answer.status_code == 200
        assert NOWHERE not in answer.text


def test_the_workers_page_says_who_leads_which_partitions(site: Site, queue: TaskQueue) -> None:
    assert "No scheduler is running" in words(get(site, "/workers"))
    scheduler = TaskScheduler(queue, "one", registry=CollectorRegistry())
    scheduler.tick()
    assert "Partitions 0, 1, 2, 3 one" in words(get(site, "/workers"))
    scheduler.stop()


def test_a_month_of_a_school_fits_into_partitions(site: Site, queue: TaskQueue) -> None:
    seeded = seed(queue)
    text = words(get(site, "/schedules"))
    assert len(seeded.failed) > 3
    assert seeded.schedules[0] in text
