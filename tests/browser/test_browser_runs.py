"""The pages about runs and failed runs in a real browser: what people see, press and hear."""

import re

import pytest
from helpers.browser import Open, Site, Web, check_page, settle
from helpers.tasks import claim_one, make_task
from helpers.world import World
from playwright.sync_api import expect

from fairqueue.demo.seeder import seed
from fairqueue.inspection import Inspector
from fairqueue.queue.queue import TaskQueue
from fairqueue.web.dashboard.pages import failed as failed_page

XSS = "<img src=x onerror=alert(1)>"


def fail(world: World, task_id: str, **fields: object) -> None:
    """A run that has failed for good."""
    world.queue.push(make_task("alice", task_id, **fields))
    world.queue.bury(world.claim_one(), "it broke")


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_the_pages_are_sound_with_a_month_of_runs(
    queue: TaskQueue, site: Site, open_page: Open, theme: str, width: int
) -> None:
    world = seed(queue)
    queue.push(make_task("alice", "waiting"))

    for path in (
        "/runs",
        "/runs?status=failed&status=timed_out&last=7d",
        f"/runs/{world.to_retry[0]}",
        "/runs/waiting",
        "/failed",
        "/failed?view=runs",
        "/failed/retry",
    ):
        page = open_page(site, path, theme=theme, width=width)
        settle(page)
        check_page(page)


@pytest.mark.parametrize("path", ["/runs", "/failed", "/failed/discard"])
def test_empty_pages_are_sound(web: Web, open_page: Open, path: str) -> None:
    page = open_page(web(), path)
    settle(page)
    check_page(page)


def test_new_runs_are_announced_in_place(world: World, web: Web, open_page: Open) -> None:
    fail(world, "first")
    page = open_page(web(), "/runs")
    settle(page)

    world.advance(1)
    fail(world, "second")

    hint = page.locator(".new-rows")
    expect(hint).to_contain_text("1 new")
    expect(page.locator("tbody tr")).to_have_count(1)
    hint.click()
    expect(page.locator("tbody tr")).to_have_count(2)


def test_filters_are_used_by_keyboard(world: World, web: Web, open_page: Open) -> None:
    fail(world, "a")
    world.queue.push(make_task("bob", "b"))
    page = open_page(web(), "/runs")

    page.get_by_label("pending").focus()
    page.keyboard.press("Space")
    page.get_by_label("User", exact=True).fill("bob")
    page.keyboard.press("Enter")

    expect(page).to_have_url(re.compile(r"/runs\?status=pending&user_id=bob$"))
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.get_by_label("pending")).to_be_checked()


def test_a_run_is_edited_and_run_again_by_keyboard(world: World, web: Web, open_page: Open) -> None:
    fail(world, "a", payload={"api_key": "k-123", "to": XSS})
    page = open_page(web(), "/runs/a")

    page.get_by_role("button", name="Edit and retry").focus()
    page.keyboard.press("Enter")
    area = page.get_by_label("Arguments a JSON object")
    expect(area).to_be_visible()
    check_page(page)
    area.fill('{"api_key": "***", ')
    page.get_by_role("button", name="Retry with these").press("Enter")
    expect(page.locator(".toast")).to_contain_text("payload is not valid JSON")
    expect(area).to_have_value('{"api_key": "***", ')
    area.fill('{"api_key": "***", "to": "eve"}')
    page.get_by_role("button", name="Retry with these").press("Enter")

    expect(page.locator(".toast").first).to_contain_text("Retried as run")
    expect(page.get_by_text("Retry of")).to_be_visible()
    expect(page.get_by_text("Why is it waiting?")).to_be_visible()
    assert world.claim_one().task.payload == {"api_key": "k-123", "to": "eve"}
    check_page(page, ignore=("422",))


def test_escape_leaves_a_dialog(queue: TaskQueue, web: Web, open_page: Open) -> None:
    queue.push(make_task("alice", "a"))
    page = open_page(web(), "/runs/a")

    page.get_by_role("button", name="Cancel", exact=True).press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    expect(page.get_by_role("button", name="Keep run")).to_be_focused()
    page.keyboard.press("Escape")

    expect(page.get_by_role("dialog")).to_be_hidden()
    assert queue.size() == 1


def test_many_failed_runs_are_rerun_with_progress(world: World, web: Web, open_page: Open) -> None:
    world.patch(failed_page, "PART", 3)
    for number in range(10):
        fail(world, f"a-{number}")
    page = open_page(web(), "/failed")

    page.get_by_role("button", name="Retry all…").click()
    page.get_by_role("button", name="Retry 10 runs").press("Enter")

    expect(page.get_by_role("heading", name="Done")).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="10 runs were retried")).to_be_visible()
    assert world.queue.size() == 10
    check_page(page)
    parts = Inspector(world.queue).audit.list(action="runs.retry")
    assert len(parts) == 4


def test_an_export_is_downloaded(world: World, web: Web, open_page: Open) -> None:
    fail(world, "a")
    page = open_page(web(), "/failed")

    with page.expect_download() as started:
        page.get_by_role("button", name="Export").click()

    assert started.value.suggested_filename == "failed-runs.jsonl"
    assert '"task_id": "a"' in started.value.path().read_text(encoding="utf-8")


def test_hostile_texts_do_nothing(queue: TaskQueue, site: Site, open_page: Open) -> None:
    queue.push(make_task(XSS, XSS, name=XSS, payload={XSS: XSS}))
    queue.bury(claim_one(queue, worker=XSS), XSS)

    for path in ("/runs", "/failed", "/failed?view=runs", "/failed/retry?user_id=" + XSS):
        page = open_page(site, path)
        settle(page)
        expect(page.locator("main img")).to_have_count(0)
        expect(page.locator("main")).to_contain_text(XSS)
        check_page(page)
    page.goto(site.url + "/runs")
    page.locator("tbody a").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(XSS)
    check_page(page)
