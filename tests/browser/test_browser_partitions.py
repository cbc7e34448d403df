"""The page about partitions in a browser: light, dark, narrow, with rates, without a node."""

from collections.abc import Iterator

import pytest
import redis
from helpers.browser import Open, Web, check_page
from helpers.partitions import without
from playwright.sync_api import expect

from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue


@pytest.fixture
def queue(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    """A queue with four partitions, one of which is hot."""
    with TaskQueue(redis_client, partitions=4) as queue:
        queue.push_many(Task.create(user_id="ann", tenant=f"tenant-{n % 30}") for n in range(90))
        queue.push_many(Task.create(user_id="ann", tenant="acme") for _ in range(400))
        yield queue


@pytest.mark.parametrize(
    ("width", "theme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
)
def test_the_page_is_well_made(web: Web, open_page: Open, width: int, theme: str) -> None:
    page = open_page(web(), "/partitions", width=width, theme=theme)
    expect(page.locator("#what-to-do")).to_contain_text("Tenant 'acme' has")
    # The first look has no rates; the page looks again by itself.
    expect(page.locator("#partition-0")).to_contain_text("and 0.0 /s")
    check_page(page)


def test_a_notice_comes_and_goes_with_a_node(web: Web, open_page: Open, queue: TaskQueue) -> None:
    page = open_page(web(), "/partitions")
    notice = page.locator("#missing")
    expect(notice).to_be_hidden()
    with without(queue, 2):
        expect(notice).to_contain_text("Partition 2 (node 127.0.0.1:1) does not answer")
        page.reload()
        expect(page.locator("#partition-2")).to_contain_text("does not answer")
        check_page(page)
    expect(notice).to_be_hidden()
