"""The pages about tenants in a real browser: charts, dialogs, forms, looks and axe."""

from typing import Any

import pytest
from helpers.browser import Open, Web, check_page, settle
from helpers.tasks import beat, make_task
from helpers.world import World
from playwright.sync_api import expect

from fairqueue import TaskQueue

NASTY = "<img src=x onerror=alert(1)>/?#%"


@pytest.fixture
def lively(world: World) -> None:
    """Tenants in each state, with users of one id, one of them with a nasty name."""
    beat(world.queue)
    world.queue.set_tenant("hilltop", weight=2, max_running=1)
    world.queue.set_tenant("riverbank", rate=0.01, max_waiting=100)
    for _ in range(10):
        for tenant, users in (
            ("lakeside", ("ann", "bob", NASTY)),
            ("hilltop", ("ann",)),
            ("riverbank", ("bob",)),
            (None, ("nightly",)),
        ):
            for user in users:
                fill(world.queue, user, 2, tenant=tenant)
        world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=6))
        world.advance(60)
    world.queue.set_tenant("northfield", paused=True, by="grace", note="invoice 7 is unpaid")
    fill(world.queue, "carl", 3, tenant="northfield", pool="gpu", limit_keys=["account:42"])
    world.claim_one()


def fill(queue: TaskQueue, user_id: str, count: int, **fields: Any) -> None:
    """Push tasks of a user. Their ids say nothing."""
    queue.push_many(make_task(user_id, **fields) for _ in range(count))


@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
@pytest.mark.parametrize(
    "path", ["/tenants", "/tenants?as=runs", "/tenants/lakeside", "/tenants/northfield"]
)
def test_the_pages_are_sound(web: Web, open_page: Open, path: str, theme: str, width: int) -> None:
    page = open_page(web(), path, theme=theme, width=width)
    settle(page)
    is_quiet = path.endswith("northfield")
    expect(page.locator("figure canvas")).to_have_count(0 if is_quiet else 1)
    check_page(page)


@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize("path", ["/", "/workers", "/settings", "/users?order=name", "/runs"])
def test_the_pages_of_a_queue_with_tenants_and_pools_are_sound(
    web: Web, open_page: Open, path: str
) -> None:
    page = open_page(web(), path)
    settle(page)
    check_page(page)


@pytest.mark.usefixtures("lively")
def test_from_tenants_to_a_user_and_back(web: Web, open_page: Open) -> None:
    page = open_page(web(), "/")
    page.get_by_role("link", name="Tenants").click()
    settle(page)
    expect(page.locator(".people tr")).to_have_count(4)
    expect(page.locator(".legend")).to_contain_text("nightly")  # beside the tenants
    page.get_by_role("link", name="lakeside", exact=True).click()
    settle(page)
    expect(page.locator(".legend")).to_contain_text(NASTY)
    expect(page.locator(".people tr")).to_have_count(3)
    page.get_by_role("link", name=NASTY, exact=True).click()
    settle(page)
    expect(page.get_by_role("heading", level=1)).to_have_text(NASTY)
    expect(page.locator("#why .headline")).to_contain_text("lakeside")
    assert page.locator("main img").count() == 0
    check_page(page)
    page.get_by_role("link", name="Tenant lakeside").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("lakeside")


@pytest.mark.usefixtures("lively")
def test_limits_are_changed_on_the_page_of_a_tenant(
    world: World, web: Web, open_page: Open
) -> None:
    page = open_page(web(), "/tenants/lakeside")
    settle(page)
    page.get_by_label("Weight").fill("0")
    page.get_by_role("button", name="Change limits").click()
    expect(page.locator(".toast")).to_contain_text("weight must be")
    expect(page.get_by_label("Weight")).to_have_value("0")
    page.get_by_label("Weight").fill("2.5")
    page.get_by_label("Max. running").fill("3")
    page.get_by_role("button", name="Change limits").click()
    expect(page.locator(".toast")).to_contain_text("Changed lakeside: weight 2.5, max running 3.")
    settings = world.queue.get_tenant("lakeside")
    assert (settings.weight, settings.max_running) == (2.5, 3)
    check_page(page, ignore=("422",))


@pytest.mark.usefixtures("lively")
def test_limits_are_changed_without_scripts(world: World, web: Web, open_page: Open) -> None:
    page = open_page(web(), "/tenants/lakeside", java_script_enabled=False)
    page.get_by_label("Weight").fill("2.5")
    page.get_by_role("button", name="Change limits").click()
    expect(page.locator(".toast")).to_contain_text("Changed lakeside: weight 2.5.")
    assert world.queue.get_tenant("lakeside").weight == 2.5


@pytest.mark.usefixtures("lively")
def test_a_tenant_is_paused_and_purged_after_being_asked(
    world: World, web: Web, open_page: Open
) -> None:
    page = open_page(web(), "/tenants")
    settle(page)
    page.get_by_role("button", name="Pause hilltop").click()
    dialog = page.get_by_role("dialog", name="Pause hilltop?")
    expect(dialog).to_be_visible()
    check_page(page)
    page.keyboard.type("too many mails")
    page.keyboard.press("Enter")
    expect(page.locator(".toast")).to_contain_text("Paused hilltop")
    expect(page.get_by_role("button", name="Resume hilltop")).to_be_visible()
    waiting = world.inspector.tenants.purge("hilltop", dry_run=True)
    page.get_by_role("button", name="Cancel the waiting tasks of hilltop").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading")).to_have_text(f"Cancel {waiting} waiting tasks?")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert world.inspector.tenants.purge("hilltop", dry_run=True) == waiting
    page.get_by_role("button", name="Cancel the waiting tasks of hilltop").click()
    dialog.get_by_role("button", name=f"Cancel {waiting} tasks").click()
    expect(page.locator(".toast")).to_contain_text(f"Cancelled {waiting} waiting tasks of hilltop.")
    assert world.inspector.tenants.purge("hilltop", dry_run=True) == 0


@pytest.mark.usefixtures("lively")
def test_a_user_is_moved_to_another_tenant(world: World, web: Web, open_page: Open) -> None:
    page = open_page(web(), "/users/carl?tenant=northfield")
    settle(page)
    page.get_by_role("button", name="Move…").click()
    dialog = page.get_by_role("dialog", name="Move carl of northfield")
    expect(dialog).to_be_visible()
    check_page(page)
    dialog.get_by_label("To tenant").fill("hilltop")
    dialog.get_by_role("button", name="Move user").click()
    expect(page.locator(".toast")).to_contain_text(
        "Moved carl of northfield to hilltop, with 3 waiting tasks."
    )
    expect(page.get_by_role("link", name="Tenant hilltop")).to_be_visible()
    assert world.inspector.users.get("carl", tenant="hilltop").backlog == 3


@pytest.mark.usefixtures("lively")
def test_a_key_is_limited_and_freed_again(world: World, web: Web, open_page: Open) -> None:
    page = open_page(web(), "/settings")
    settle(page)
    page.get_by_role("button", name="Limit a key").click()
    dialog = page.get_by_role("dialog", name="Limit a key")
    check_page(page)
    dialog.get_by_label("Key").fill("acc*ount")
    dialog.get_by_label("Runs at once").fill("2")
    dialog.get_by_role("button", name="Set limits").click()
    expect(dialog.locator(".field-error")).to_contain_text("acc*ount")
    assert world.queue.get_key_limits() == {}
    dialog.get_by_label("Key").fill("account:*")
    dialog.get_by_label("Order").select_option("as pushed")
    dialog.get_by_role("button", name="Set limits").click()
    expect(page.locator(".toast").first).to_contain_text("The limits of account:* apply from now")
    limits = world.queue.get_key_limits()["account:*"]
    assert (limits.slots, limits.ordered, limits.through_retries) == (2, True, False)
    page.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove limits").click()
    expect(page.get_by_text("No key has limits.")).to_be_visible()
    assert world.queue.get_key_limits() == {}
    check_page(page, ignore=("422",))


@pytest.mark.usefixtures("lively")
def test_a_key_of_a_tenant_sees_its_own_page(web: Web, open_page: Open) -> None:
    site = web(auth=True)
    page = open_page(site, site.login(role="admin", tenant="lakeside"))
    page.get_by_role("link", name="Tenant", exact=True).click()
    settle(page)
    expect(page.get_by_role("heading", level=1)).to_have_text("lakeside")
    expect(page.locator("figure canvas")).to_have_count(1)
    expect(page.locator("main")).not_to_contain_text("hilltop")
    expect(page.locator("main").get_by_role("button", name="Change limits")).to_have_count(0)
    check_page(page)
    page.get_by_role("link", name="ann", exact=True).click()
    settle(page)
    expect(page.locator("main")).not_to_contain_text("hilltop")
    check_page(page)


@pytest.mark.usefixtures("lively")
def test_a_row_of_a_tenant_is_updated_in_place(world: World, web: Web, open_page: Open) -> None:
    page = open_page(web(), "/tenants")
    settle(page)
    world.queue.set_tenant("lakeside", paused=True)
    page.evaluate("document.body.dispatchEvent(new CustomEvent('fq:pulse'))")
    page.get_by_role("button", name="Resume lakeside").click()
    expect(page.locator(".toast")).to_contain_text("Resumed lakeside.")
    assert not world.queue.get_tenant("lakeside").paused
