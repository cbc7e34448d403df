"""Workers, the audit log and settings in a real browser: what people see, press and hear."""

import pytest
from helpers.browser import Open, Site, Web, check_page, settle
from helpers.world import World
from playwright.sync_api import expect

from fairqueue.demo.seeder import seed
from fairqueue.inspection import Inspector
from fairqueue.queue.queue import TaskQueue

XSS = "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize(("theme", "width"), [("light", 390), ("dark", 1280)])
def test_the_pages_are_sound(
    world: World, site: Site, open_page: Open, theme: str, width: int
) -> None:
    seed(world.queue)
    beat(world, current=("a", "b", "c"))
    beat(world, XSS)
    world.queue.set_limits("mails.send", slots=3)
    Inspector(world.queue).keys.create(XSS, "operator")

    for path in ("/workers", "/audit", "/audit?action=run.&last=7d", "/settings"):
        page = open_page(site, path, theme=theme, width=width)
        settle(page)
        check_page(page)


@pytest.mark.parametrize("path", ["/workers", "/audit", "/settings"])
def test_empty_pages_are_sound(web: Web, open_page: Open, path: str) -> None:
    page = open_page(web(), path)
    settle(page)
    check_page(page)


def beat(world: World, worker_id: str = "worker-1", current: tuple[str, ...] = ()) -> None:
    """Let a worker report that it is alive."""
    fields = {"host": worker_id, "pid": 4711, "version": "1.2.3", "slots": 8, "current": current}
    started = world.queue.link.now_ms()
    world.beat(worker_id, [worker_id], **fields, running=len(current), started=started)


def test_a_worker_is_drained_by_keyboard(world: World, web: Web, open_page: Open) -> None:
    beat(world)
    page = open_page(web(), "/workers")

    page.get_by_role("button", name="Drain", exact=True).press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("finishes its 0 runs")
    check_page(page)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")

    expect(page.locator(".toast")).to_contain_text("takes no more tasks")
    expect(page.locator(".chip", has_text="draining")).to_be_visible()
    check_page(page)


def test_limits_are_set_in_a_dialog(queue: TaskQueue, web: Web, open_page: Open) -> None:
    page = open_page(web(), "/workers")

    page.get_by_role("button", name="Limit a name").click()
    page.get_by_role("textbox", name="Task name").fill("mails.send")
    page.get_by_role("dialog").get_by_label("Runs at once").fill("2")
    check_page(page)
    page.keyboard.press("Enter")

    expect(page.locator(".toast")).to_contain_text("The limits of mails.send apply")
    expect(page.get_by_role("row", name="mails.send")).to_be_visible()
    assert queue.get_limits()["mails.send"].slots == 2


def test_a_bad_setting_is_named_in_place(queue: TaskQueue, web: Web, open_page: Open) -> None:
    page = open_page(web(), "/settings")

    page.get_by_role("button", name="Edit max_waiting").press("Enter")
    field = page.get_by_label("Value a whole number; default 0").and_(page.locator(":visible"))
    field.fill("many")
    page.keyboard.press("Enter")
    expect(page.locator("#set-max_waiting-error")).to_contain_text(
        "must be a whole number, not 'many'"
    )
    expect(field).to_have_value("many")
    check_page(page, ignore=("422",))
    field.fill("500")
    page.keyboard.press("Enter")

    expect(page.locator(".toast").first).to_contain_text("max_waiting is now 500")
    expect(page.get_by_role("row", name="max_waiting")).to_contain_text("changed")
    assert queue.settings().max_waiting == 500


def test_a_key_is_made_copied_and_revoked(queue: TaskQueue, site: Site, open_page: Open) -> None:
    page = open_page(site, "/settings", permissions=["clipboard-read", "clipboard-write"])

    page.get_by_label("Name", exact=True).fill(XSS)
    page.get_by_role("button", name="Create key").press("Enter")
    secret = page.locator("#secret").text_content()
    check_page(page)
    page.get_by_role("button", name="Copy secret").click()
    expect(page.locator(".toast")).to_contain_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == secret
    page.get_by_role("button", name="I have copied it").click()
    expect(page.get_by_role("row", name=XSS)).to_be_visible()
    page.get_by_role("button", name="Revoke", exact=True).press("Enter")
    page.get_by_role("button", name="Revoke key").press("Enter")

    expect(page.locator(".toast").first).to_contain_text("The key was revoked")
    assert Inspector(queue).keys.list() == []


def test_the_keyboard_opens_an_entrys_details(queue: TaskQueue, web: Web, open_page: Open) -> None:
    Inspector(queue).users.set("alice", weight=2)
    page = open_page(web(), "/audit")

    page.get_by_text("Show the details of user.set").press("Enter")

    expect(page.get_by_label("Details", exact=True)).to_contain_text('"weight": 2')
    check_page(page)
