"""The overview and the search, as the server sends them."""

import html
import re
from typing import Any

import pytest
from helpers.browser import Site, Web
from helpers.pages import add, words
from helpers.tasks import claim_one, make_task
from helpers.world import World

from fairqueue.queue.queue import TaskQueue
from fairqueue.stats.samples import SampleStore


def get(site: Site, path: str, headers: dict[str, str] | None = None, **params: Any) -> str:
    answer = site.http.get(path, params=params or None, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.text


# --- the overview ---------------------------------------------------------------------------------


def test_failures_are_one_number_wherever_they_are_told(web: Web, queue: TaskQueue) -> None:
    for task_id in ("a", "b"):
        queue.push(make_task("alice", task_id))
        queue.bury(claim_one(queue), "OSError: disk full")

    text = get(web(), "/")

    assert "Runs that failed in the last hour: 2" in words(text)
    assert (
        len(re.findall(r'data-live="failures_last_hour">2<', text)) == 2
    )  # the tile, and what needs attention
    assert re.search(r'aria-current="true">15 min', text)


def test_pools_without_workers_and_expired_tasks_need_attention(web: Web, world: World) -> None:
    world.queue.push(make_task("alice", "late", expires=5.0))
    world.queue.push(make_task("alice", "render", pool="gpu"))
    world.advance(6)
    world.beat("cpu")
    world.queue.claim("cpu")

    text = get(web(), "/")

    assert "No live worker serves the pool 'gpu': a task waits" in html.unescape(text)
    assert "1 task expired within the last hour" in text
    assert 'href="/runs?status=expired"' in text


def test_a_tenant_sees_no_tile_of_what_there_is_not(web: Web) -> None:
    site = web(auth=True)
    headers = {"Authorization": f"Bearer {site.key(role='viewer', tenant='north')}"}

    text = get(site, "/", headers)

    tiles = re.findall(r"<dt>([^<]+)</dt>", text[text.index('class="stats"') :])
    assert {"Failures", "Schedules"} <= set(tiles)
    assert not {"Backlog", "Running", "Workers", "Fairness", "Due"} & set(tiles)


def test_expired_tasks_have_a_line_and_a_link_once_there_are_any(site: Site, world: World) -> None:
    def labels(window: str) -> set[str]:
        lines = site.http.get(f"/charts/throughput?window={window}").json()["lines"]
        return {line["label"] for line in lines}

    world.push("late", expires=60.0)
    sample(world)
    assert labels("15m") == {"succeeded", "failed", "timed out", "cancelled"}
    world.advance(61)
    world.queue.claim("w")
    sample(world)
    assert "expired" in labels("1h")  # another window: each is cached for a second
    assert 'href="/runs?status=expired"' in get(site, "/")


def sample(world: World) -> None:
    SampleStore(world.queue.link).take()
    world.advance(15)


# --- the search -----------------------------------------------------------------------------------


def test_the_search_finds_parts_of_names_and_tells_how_many_more(web: Web, world: World) -> None:
    for number in range(8):
        add(world, f"daily-{number}", name="mails.report")

    text = get(web(), "/search", q="report")

    assert len(re.findall(r'href="/schedules/daily-\d"', text)) == 5
    assert "3 more: show all matching schedules" in words(text)
    assert 'href="/schedules?text=report"' in text


def test_the_search_finds_users_by_the_start_of_their_name(web: Web, queue: TaskQueue) -> None:
    for user in ("hillcrest.imports", "hillcrest.mails", "north"):
        queue.push(make_task(user, f"of-{user}"))

    text = get(web(), "/search", q="hillcrest")

    assert 'href="/users/hillcrest.imports"' in text
    assert 'href="/users/hillcrest.mails"' in text
    assert 'href="/users/north"' not in text
    assert " more" not in words(text)


def test_the_search_finds_a_run_by_its_id(web: Web, queue: TaskQueue) -> None:
    queue.push(make_task("alice", "run/7"))

    text = get(web(), "/search", q="run/7")

    assert 'href="/runs/run%2F7"' in text
    assert "user alice: pending" in words(text)


@pytest.mark.parametrize("q", ["nobody", "<b>", "*", "x" * 300, "\u2603"])
def test_what_is_not_there_is_not_linked(web: Web, q: str) -> None:
    text = get(web(), "/search", q=q)

    assert "Nothing found for “" in words(text)
    assert 'class="hits"' not in text
