"""The pages about schedules in a real browser: what only scripts do, keys, looks and axe."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from helpers.browser import Open, Site, Web, check_page, settle
from helpers.pages import add
from helpers.rest import fail
from helpers.world import World
from playwright.sync_api import Dialog, Page, expect

from fairqueue.inspection import Inspector

START = datetime(2026, 3, 5, 8, 0, tzinfo=UTC)  # a Thursday


@pytest.fixture
def lively(world: World) -> None:
    """Schedules of each state, one of them with runs and a change, one with a nasty name."""
    add(world, "off", user_id="carol", max_failures=1)
    assert world.tick_at(START + timedelta(hours=1)).fired == 1
    fail(world.queue)
    add(world, timezone="Europe/London", payload={"to": "bo", "token": "x"}, tenant="acme")
    world.inspector.schedules.trigger("nine")
    world.queue.finish(world.claim_one())
    world.inspector.schedules.trigger("nine")
    fail(world.queue)
    world.inspector.schedules.update("nine", {"cron_expr": "30 1 * * *"})
    add(world, "poll", every=5400, user_id="bob")
    world.inspector.schedules.pause("poll", note="too many mails")
    add(world, "once", at=START + timedelta(days=1), name="<script>alert(1)</script>")


@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
@pytest.mark.parametrize(
    "path",
    [
        "/schedules",
        "/schedules/nine",
        "/schedules/poll",
        "/schedules/off",
        "/new/schedule",
        "/do/schedules/edit?id=nine",
    ],
)
def test_nothing_is_wrong_with_a_page(
    web: Web, open_page: Open, path: str, theme: str, width: int
) -> None:
    page = open_page(web(), path, theme=theme, width=width)
    settle(page)
    expect(page.get_by_text("Loading…")).to_have_count(0)
    check_page(page)


def test_nothing_is_wrong_with_an_empty_list(web: Web, open_page: Open) -> None:
    page = open_page(web(), "/schedules")
    settle(page)
    expect(page.get_by_text("There are no schedules yet")).to_be_visible()
    check_page(page)


def test_the_preview_follows_what_is_typed(web: Web, open_page: Open) -> None:
    page = open_page(web(), "/new/schedule")
    preview = page.locator("#preview")
    expect(preview).to_contain_text("Type a rule")
    assert preview.get_attribute("aria-live") == "polite"

    page.get_by_label("Cron expression", exact=True).last.fill("0 9 * * 1-5")
    expect(preview).to_contain_text("At 09:00, Monday through Friday (UTC)")
    expect(preview.locator("tbody tr")).to_have_count(5)
    expect(preview).to_contain_text("Thu 2026-03-05 09:00+00:00")

    page.get_by_label("Time zone").fill("Europe/Berlin")
    expect(preview).to_contain_text("Fri 2026-03-06 09:00+01:00")
    expect(preview).to_contain_text("2026-03-06 08:00")

    page.get_by_label("Cron expression", exact=True).last.fill("61 9 * * *")
    expect(page.locator("#error-cron_expr")).to_contain_text("minute must be 0 to 59, not 61")
    page.get_by_label("Interval").check()
    expect(page.locator("#error-cron_expr")).to_be_hidden()
    page.get_by_label("Every", exact=True).fill("90m")
    expect(preview).to_contain_text("Every 1 hour 30 minutes")
    check_page(page)


def test_marks_follow_what_is_typed(web: Web, open_page: Open) -> None:
    page = open_page(web(), "/new/schedule")
    cron, user = (page.get_by_label(name, exact=True).last for name in ("Cron expression", "User"))
    page.get_by_role("button", name="Add schedule").click()
    for field in (cron, user):
        expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#error-cron_expr")).to_contain_text("is missing")

    user.fill("bob")
    expect(user).not_to_have_attribute("aria-invalid", "true")
    expect(page.locator("#error-user_id")).to_be_empty()
    cron.fill("0 9 * * *")
    expect(cron).not_to_have_attribute("aria-invalid", "true")
    zone = page.get_by_label("Time zone")
    zone.fill("Mars/Base")
    expect(zone).to_have_attribute("aria-invalid", "true")
    check_page(page, ignore=("422",))


def test_json_is_checked_while_it_is_typed(web: Web, open_page: Open) -> None:
    page = open_page(web(), "/new/schedule")
    payload = page.get_by_label("Payload")
    payload.fill('{"to": ')
    payload.blur()
    expect(page.locator("#error-payload")).to_contain_text("Not valid JSON yet")
    expect(payload).to_have_attribute("aria-invalid", "true")
    payload.fill('{"to": "bo"}')
    payload.blur()
    expect(page.locator("#error-payload")).to_be_empty()


def test_a_schedule_is_made_with_the_form(web: Web, inspector: Inspector, open_page: Open) -> None:
    page = open_page(web(), "/schedules")
    page.get_by_role("button", name="New schedule").first.click()
    page.get_by_label("Cron expression", exact=True).last.fill("0 9 * * *")
    page.get_by_role("button", name="Add schedule").click()
    expect(page.locator("#error-user_id")).to_contain_text("is missing")
    expect(page.get_by_label("User", exact=True)).to_be_focused()
    check_page(page, ignore=("422",))
    page.get_by_label("User", exact=True).fill("bob")
    page.get_by_label("Id", exact=True).fill("report-7")
    page.get_by_role("button", name="Add schedule").click()
    expect(page.locator(".toast")).to_contain_text("Added report-7.")
    assert inspector.schedules.get("report-7").schedule.user_id == "bob"


def test_all_matches_are_paused_after_a_question(web: Web, world: World, open_page: Open) -> None:
    for number in range(60):
        add(world, f"s{number:02}", name="mails.send" if number < 55 else "report")
    page = open_page(web(), "/schedules?name_prefix=mails")
    bar = page.locator("#bulk")
    expect(bar).to_be_hidden()

    page.get_by_label("Select all on this page").check()
    expect(bar).to_contain_text("25 selected")
    expect(bar).to_contain_text("all 55 that match")
    bar.get_by_role("checkbox").check()
    bar.get_by_role("button", name="Pause").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Pause 55 schedules?")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    check_page(page)
    assert world.inspector.schedules.count(is_active=False) == 0

    dialog.get_by_label("Note").fill("quiet")
    dialog.get_by_role("button", name="Pause 55 schedules").click()
    expect(page.locator(".toast")).to_contain_text("55 schedules paused")
    assert world.inspector.schedules.count(is_active=False) == 55


def test_ticked_rows_are_deleted_and_no_others(web: Web, world: World, open_page: Open) -> None:
    for name in ("a", "b", "c"):
        add(world, name)
    page = open_page(web(), "/schedules")
    page.get_by_label("Select report, a").check()
    page.get_by_label("Select report, c").check()
    button = page.locator("#bulk").get_by_role("button", name="Delete")
    button.click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(button).to_be_focused()
    button.click()
    page.get_by_role("dialog").get_by_role("button", name="Delete 2 schedules").click()
    expect(page.locator(".toast")).to_contain_text("2 schedules deleted")
    expect(page.locator("#schedule-rows tr")).to_have_count(1)


def press_until(page: Page, name: str) -> None:
    """Press Tab until the button of this name has the focus."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == name:
            return
    raise AssertionError(f"Tab does not reach {name!r}")


def test_the_keyboard_alone_pauses_a_schedule(web: Web, world: World, open_page: Open) -> None:
    add(world)
    page = open_page(web(), "/schedules/nine")
    settle(page)
    press_until(page, "Pause")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_focused()

    page.keyboard.press("Enter")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    press_until(page, "Pause schedule")
    page.keyboard.press("Enter")
    expect(page.locator(".toast")).to_contain_text("Paused nine.")
    assert world.inspector.schedules.get("nine").state == "paused"


def test_a_refusal_keeps_the_dialog_and_its_text(web: Web, world: World, open_page: Open) -> None:
    add(world)
    page = open_page(web(), "/schedules/nine")
    page.get_by_role("button", name="Trigger", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Payload").fill("{nonsense")
    dialog.get_by_role("button", name="Trigger now").click()
    expect(dialog.locator(".toast")).to_contain_text("payload is not valid JSON")
    expect(dialog.get_by_label("Payload")).to_have_value("{nonsense")
    check_page(page, ignore=("422",))
    page.keyboard.press("Escape")
    expect(page.locator(".toast")).to_be_visible()
    dialog = page.get_by_role("dialog")
    page.get_by_role("button", name="Trigger", exact=True).click()
    dialog.get_by_label("Payload").fill('{"day": 2}')
    dialog.get_by_role("button", name="Trigger now").click()
    expect(page.locator(".toast")).to_contain_text("is waiting for a worker")
    assert len(world.inspector.tasks.list()) == 1


def test_a_backfill_is_counted_and_then_done(web: Web, world: World, open_page: Open) -> None:
    add(world, cron_expr="0 * * * *")
    page = open_page(web(), "/schedules/nine")
    page.get_by_label("From (UTC)").fill("2026-03-05T00:00")
    page.get_by_label("Until, not included").fill("2026-03-05T07:00")
    page.get_by_role("button", name="Count").click()
    answer = page.locator("#backfill-answer")
    expect(answer).to_contain_text("would create 7 runs")
    check_page(page)
    page.get_by_label("Until, not included").fill("2026-03-05T06:00")
    expect(answer).to_be_empty()
    page.get_by_role("button", name="Count").click()
    page.get_by_role("button", name="Create 6 runs").click()
    expect(page.locator(".toast")).to_contain_text("6 runs created")
    assert len(world.inspector.tasks.list()) == 6


def test_rows_are_kept_up_to_date_where_they_are(web: Web, world: World, open_page: Open) -> None:
    add(world, "b")
    page = open_page(web(), "/schedules")
    settle(page)
    page.get_by_label("Select report, b").check()
    page.get_by_label("Select report, b").blur()
    add(world, "a")
    world.inspector.schedules.pause("b")
    page.evaluate("document.body.dispatchEvent(new CustomEvent('fq:pulse'))")
    expect(page.locator("#schedule-rows tr")).to_contain_text("paused")
    expect(page.locator("#schedule-rows tr")).to_have_count(1)
    expect(page.get_by_label("Select report, b")).to_be_checked()
    check_page(page)


def test_texts_of_users_run_nothing(site: Site, world: World, open_page: Open) -> None:
    attack = '"><img src=x onerror=alert(1)><script>alert(2)</script>'
    add(world, attack, name=attack, user_id=attack, payload={attack: attack})
    world.inspector.schedules.trigger(attack)
    fail(world.queue, attack)
    world.inspector.schedules.pause(attack, note=attack)
    page = open_page(site, "/schedules")
    shown: list[str] = []

    def note(dialog: Dialog) -> None:
        shown.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", note)
    page.get_by_label("Select all on this page").check()
    page.locator("#bulk").get_by_role("button", name="Resume").click()
    expect(page.get_by_role("dialog")).to_contain_text("Resume 1 schedule?")
    page.keyboard.press("Escape")
    page.locator("td.what a").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(attack)
    expect(page.get_by_text("Loading…")).to_have_count(0)
    page.get_by_role("button", name="Edit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(r"^Edit "))
    expect(page.locator("#preview")).to_contain_text("At 09:00")
    check_page(page)
    assert shown == []
