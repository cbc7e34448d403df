"""The pages about users in a real browser: charts, dialogs, keys, looks and axe."""

import pytest
from helpers.browser import Open, Web, check_page, settle
from helpers.tasks import fill, push
from helpers.world import World
from playwright.sync_api import expect

from fairqueue import TaskQueue
from fairqueue.demo.seeder import seed

NASTY = "<img src=x onerror=alert(1)>/?#%"


@pytest.fixture
def lively(world: World) -> None:
    """Users in each state, some of whom got more than others."""
    world.queue.set_user("paused", paused=True, tenant="acme")
    world.queue.set_user("capped", weight=4, max_running=1)
    world.queue.set_user("rated", rate=0.01, max_waiting=100)
    for minute in range(10):
        for user in ("paused", "capped", "rated", "bob", NASTY):
            tenant = "acme" if user == "paused" else None
            world.push(f"{user}-{minute}a", f"{user}-{minute}b", user_id=user, tenant=tenant)
        world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=3))
        world.advance(60)
    world.claim_one()


@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
@pytest.mark.parametrize(
    "path", ["/users", "/users?order=name&window=15m&as=runs", "/users/capped", "/users/rated"]
)
def test_the_pages_are_sound(web: Web, open_page: Open, path: str, theme: str, width: int) -> None:
    page = open_page(web(), path, theme=theme, width=width)
    settle(page)
    expect(page.locator("figure canvas")).to_have_count(1)
    page.get_by_text("As a table").first.click()
    expect(page.locator("figure details tbody tr")).to_have_count(30)
    check_page(page)


@pytest.mark.parametrize("path", ["/users", "/users?order=name&window=24h"])
def test_a_month_of_use_looks_well(queue: TaskQueue, web: Web, open_page: Open, path: str) -> None:
    seed(queue)
    page = open_page(web(), path)
    settle(page)
    check_page(page)


def test_an_empty_page_is_without_fault(web: Web, open_page: Open) -> None:
    page = open_page(web(), "/users")
    settle(page)
    expect(page.get_by_text("No run has ended in this window.")).to_be_visible()
    check_page(page)


def test_an_unknown_user_leads_to_all_users(queue: TaskQueue, web: Web, open_page: Open) -> None:
    fill(queue, "alice", 1)
    page = open_page(web(), "/users/nobody")
    page.get_by_role("button", name="Show all users").click()
    expect(page.get_by_role("link", name="alice", exact=True)).to_be_visible()
    check_page(page, ignore=("404",))


@pytest.mark.usefixtures("lively")
def test_a_nasty_name_is_only_text_and_its_link_works(web: Web, open_page: Open) -> None:
    page = open_page(web(), "/users")
    settle(page)
    expect(page.locator(".legend")).to_contain_text(NASTY)
    page.get_by_role("link", name=NASTY, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(NASTY)
    settle(page)
    assert page.locator("main img").count() == 0
    check_page(page)


def test_a_backlog_is_dropped_from_the_list(queue: TaskQueue, web: Web, open_page: Open) -> None:
    fill(queue, "alice", 2)
    page = open_page(web(), "/users")
    settle(page)
    push(queue, "late")  # after the page was made
    page.get_by_role("button", name="Cancel the waiting tasks of alice").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading")).to_have_text("Cancel 3 waiting tasks?")
    check_page(page)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert queue.size("alice") == 3
    page.get_by_role("button", name="Cancel the waiting tasks of alice").click()
    dialog.get_by_role("button", name="Cancel 3 tasks").click()
    expect(page.locator(".toast")).to_contain_text("Cancelled 3 waiting tasks of alice.")
    assert queue.size("alice") == 0


def test_limits_are_changed_in_a_dialog_and_what_was_typed_stays_when_it_is_refused(
    queue: TaskQueue, web: Web, open_page: Open
) -> None:
    fill(queue, "alice", 1)
    page = open_page(web(), "/users")
    settle(page)
    page.get_by_role("button", name="Change the limits of alice").click()
    dialog = page.get_by_role("dialog")
    weight = dialog.get_by_label("Weight")
    weight.fill("0")
    weight.press("Enter")
    expect(page.locator(".toast")).to_contain_text("weight must be")
    expect(weight).to_have_value("0")
    check_page(page, ignore=("422",))
    weight.fill("2.5")
    dialog.get_by_role("button", name="Change limits").click()
    expect(page.locator(".toast")).to_contain_text("Changed alice: weight 2.5.")
    assert queue.get_user("alice").weight == 2.5


def test_limits_are_changed_on_the_page_of_a_user(world: World, web: Web, open_page: Open) -> None:
    world.fill("alice", 1)
    page = open_page(web(), "/users/alice")
    settle(page)
    page.get_by_label("Max. running").fill("many")
    page.get_by_role("button", name="Change limits").click()
    expect(page.locator(".toast")).to_contain_text("max_running must be a whole number, not 'many'")
    expect(page.get_by_label("Max. running")).to_have_value("many")
    page.get_by_label("Max. running").fill("3")
    page.get_by_role("button", name="Change limits").click()
    expect(page.locator(".toast")).to_contain_text("Changed alice: max running 3.")
    expect(page.get_by_label("Max. running")).to_have_value("3")
    check_page(page, ignore=("422",))


def test_a_user_is_paused_by_keyboard(queue: TaskQueue, web: Web, open_page: Open) -> None:
    fill(queue, "alice", 1)
    page = open_page(web(), "/users/alice")
    settle(page)
    page.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Pause alice?")).to_be_visible()
    check_page(page)
    page.keyboard.type("too many mails")
    page.keyboard.press("Enter")
    expect(page.locator(".toast")).to_contain_text("Paused alice")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    expect(page.locator("#why")).to_contain_text("too many mails")
    check_page(page)


@pytest.mark.usefixtures("lively")
def test_a_viewer_of_a_tenant_sees_its_own_and_no_buttons(web: Web, open_page: Open) -> None:
    site = web(auth=True)
    page = open_page(site, site.login(role="viewer", tenant="acme"))
    page.get_by_role("link", name="Users").click()
    settle(page)
    expect(page.locator(".people tr")).to_have_count(1)
    expect(page.locator(".jain")).to_contain_text("Compared1 user")
    expect(page.locator(".people button")).to_have_count(0)
    check_page(page)
    page.get_by_role("link", name="paused", exact=True).click()
    settle(page)
    expect(page.locator("main").get_by_role("button", name="Pause")).to_have_count(0)
    check_page(page)


def test_an_updated_row_can_still_be_used(queue: TaskQueue, web: Web, open_page: Open) -> None:
    fill(queue, "alice", 1)
    page = open_page(web(), "/users")
    settle(page)
    queue.set_user("alice", paused=True)
    page.evaluate("document.body.dispatchEvent(new CustomEvent('fq:pulse'))")
    expect(page.get_by_role("button", name="Resume alice")).to_be_visible()
    expect(page.locator(".people .chip")).to_have_text("paused")
    page.get_by_role("button", name="Change the limits of alice").click()
    expect(page.get_by_role("dialog").get_by_role("heading")).to_have_text("Limits of alice")
    check_page(page)
