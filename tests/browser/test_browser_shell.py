"""The frame of the pages, in a real browser: what people see, press and hear."""

import re
import threading
from collections.abc import Callable

import jinja2
import pytest
from helpers.browser import Open, Site, Web, check_page, settle
from helpers.tasks import fill
from helpers.world import World
from playwright.sync_api import Page, expect
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fairqueue.errors import StaleVersion
from fairqueue.inspection import Inspector
from fairqueue.queue.queue import TaskQueue
from fairqueue.stats.samples import SampleStore
from fairqueue.web.dashboard.forms import Done, Form, action
from fairqueue.web.dashboard.shell import environment, page

# Each part that macros.html makes, as pages use it.
PARTS = """
{% extends "base.html" %}
{% import "macros.html" as ui with context %}
{% block title %}Parts{% endblock %}
{% block content %}
{% call ui.heading("Parts", "What pages are made of", link("overview"), "Overview") %}
{{ ui.action_button(link("act"), "Resume", "play", {"id": "a"}) }}
{{ ui.confirm("drop", "Drop", "Drop 37 tasks?", "This cannot be undone.", link("act"), "Drop 37",
              "trash", {"id": "b"}) }}
{% endcall %}
{{ ui.new_rows(["pushed"]) }}
{% call ui.filters() %}
{{ ui.filter_text("user_id", "User", "any") }}
{{ ui.filter_choice("status", "Status", [("", "all"), ("failed", "failed")]) }}
{% endcall %}
{% call ui.table("Things") %}
<thead><tr><th scope="col"><input type="checkbox" data-all="id" aria-label="All on this page"></th>
<th scope="col">Name</th><th scope="col">Status</th><th scope="col">Share</th>
<th scope="col">Outcomes</th><th scope="col" class="number">Took</th><th scope="col">When</th></tr>
</thead>
<tbody>{% for status in ["pending", "retrying", "running", "succeeded", "failed", "timed_out",
  "cancelled", "paused", "disabled", "rate limited"] %}<tr>
<td><input type="checkbox" name="id" value="x" aria-label="Row {{ loop.index }}"></td>
<td><a href="#x">report-{{ loop.index }}</a> <small class="faint">of alice</small></td>
<td>{{ ui.chip(status) }}</td><td>{{ (loop.index / 20) | share }}</td>
<td>{{ ui.outcome_dots(outcomes) }}</td><td class="number">{{ (loop.index * 3.7) | duration }}</td>
<td>{{ now | moment }}</td></tr>{% endfor %}</tbody>
{% endcall %}
<div class="bulk" data-bulk hidden><b data-ticked="id">0</b> chosen</div>
{{ ui.pager("next-cursor", 10) }}
<div class="columns">
<section class="card"><h2>Facts</h2><dl class="facts"><dt>Name</dt><dd>report</dd><dt>Made</dt>
<dd>{{ now | ago }}</dd></dl></section>
{{ ui.empty("inbox", "Nothing waits.", "fairqueue tasks push --user alice") }}
</div>
<form method="post" action="{{ link('act') }}" hx-post="{{ link('act') }}" hx-swap="none" id="own">
<label>Note <input name="note" value="kept"></label><input type="hidden" name="fail" value="1">
<button type="submit" class="small">Save</button></form>
{{ ui.cli_hint("fairqueue runs list --user alice") }}
{% endblock %}
"""


@pytest.fixture
def parts(web: Web, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Site]:
    """A site with a page that has each part, and an action; `site.app.state.acts` has its calls."""
    loaders = [environment().loader, jinja2.DictLoader({"parts.html": PARTS})]
    monkeypatch.setattr(
        environment(), "loader", jinja2.ChoiceLoader([each for each in loaders if each])
    )

    def show(request: Request) -> Response:
        statuses = ["succeeded", "failed", "timed_out", "cancelled", "succeeded"]
        outcomes = [{"status": status} for status in statuses]
        return page(request, "parts.html", outcomes=outcomes)

    def act(request: Request, form: Form) -> Done:
        if form.has("fail"):
            raise StaleVersion("somebody <b>else</b> was faster")
        request.app.state.acts.append(form.need("id"))
        return Done(text="It <i>is</i> done.")

    def start(**options: object) -> Site:
        site = web(**options)
        site.app.state.acts = []
        site.app.router.routes += [
            Route("/parts", show),
            Route("/do/act", action(act), methods=["POST"], name="act"),
        ]
        return site

    return start


def fill_overview(world: World) -> None:
    """Tasks, a schedule whose name is hostile, and two samples."""
    world.fill("alice", 3)
    hostile = "<img src=x onerror=alert(1)>"
    Inspector(world.queue).schedules.add(cron_expr="* * * * *", user_id="alice", name=hostile)
    for _ in range(3):
        SampleStore(world.queue.link).take()
        world.advance(15)


# --- looks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 360)]
)
def test_the_overview_is_in_order(
    world: World, web: Web, open_page: Open, theme: str, width: int
) -> None:
    fill_overview(world)
    found = open_page(web(), theme=theme, width=width)
    settle(found)
    expect(found.get_by_role("heading", level=1)).to_have_text("Overview")
    expect(found.locator("#backlog canvas")).to_be_visible()
    check_page(found)


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_each_part_of_pages_is_in_order(
    parts: Callable[..., Site], open_page: Open, theme: str, width: int
) -> None:
    found = open_page(parts(), "/parts", theme=theme, width=width)
    check_page(found)
    found.get_by_role("button", name="Drop", exact=True).click()
    expect(found.get_by_role("dialog")).to_be_visible()
    check_page(found)


@pytest.mark.parametrize("path", ["/login", "/login?token=fq_x", "/search?q=alice"])
def test_single_pages_are_in_order(web: Web, open_page: Open, path: str) -> None:
    found = open_page(web(auth=path.startswith("/login")), path.replace("?token", "?nothing"))
    check_page(found)


def test_an_error_page_is_in_order(web: Web, open_page: Open) -> None:
    found = open_page(web(), "/nothing")
    expect(found.get_by_role("heading", level=1)).to_have_text("Not found")
    check_page(found, ignore=("404",))


def test_names_are_shown_as_they_are(world: World, web: Web, open_page: Open) -> None:
    fill_overview(world)
    found = open_page(web())
    expect(found.locator("#upcoming")).to_contain_text("<img src=x onerror=alert(1)>")
    assert found.locator("#upcoming img").count() == 0
    check_page(found)


def test_the_policy_keeps_foreign_scripts_out(web: Web, open_page: Open) -> None:
    found = open_page(web())
    found.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.hacked = true";
            document.body.append(script);
        }"""
    )
    assert found.evaluate("() => window.hacked") is None


# --- logging in -----------------------------------------------------------------------------------


def test_a_link_in_the_terminal_logs_in_with_one_click(web: Web, open_page: Open) -> None:
    site = web(auth=True)
    found = open_page(site, site.login("ann", "operator"))
    found.wait_for_url(site.url + "/")
    expect(found.locator(".person")).to_contain_text("ann")
    settle(found)
    check_page(found)


def test_a_pasted_key_logs_in_until_logging_out(web: Web, open_page: Open) -> None:
    site = web(auth=True)
    found = open_page(site, "/search?q=x")
    found.get_by_label("API key").fill(site.key())
    found.get_by_role("button", name="Log in").click()
    expect(found).to_have_url(site.url + "/search?q=x")
    found.get_by_role("button", name="Log out").click()
    expect(found).to_have_url(site.url + "/login")
    found.goto(site.url)
    expect(found).to_have_url(re.compile("/login"))
    check_page(found)


def test_one_can_log_in_without_scripts(web: Web, open_page: Open) -> None:
    site = web(auth=True)
    found = open_page(site, site.login(), java_script_enabled=False)
    found.get_by_role("button", name="Log in").click()
    expect(found.get_by_role("heading", level=1)).to_have_text("Overview")


def end_session(site: Site, found: Page) -> str:
    """Let the session of a page be over; the id that its streams go by."""
    session = next(each for each in found.context.cookies() if each["name"] == "fairqueue_session")
    access = site.app.state.fairqueue.access
    key_id: str = access.admit(session["value"], rate=100, burst=100).actor.key_id
    access.end(session["value"])
    return key_id


def test_a_page_says_that_its_session_has_expired(web: Web, open_page: Open) -> None:
    site = web(auth=True)
    found = open_page(site, site.login())
    settle(found)
    site.app.state.fairqueue.live_updates.end(end_session(site, found))
    expect(found.locator("#live")).to_have_attribute("data-state", "out")
    expect(found.locator(".toast")).to_contain_text("Your session has expired")
    check_page(found, ignore=("401",))
    found.get_by_role("button", name="Log in", exact=True).click()
    check_page(found, ignore=("401",))
    found.get_by_label("API key").fill("fq_wrong")
    found.keyboard.press("Enter")
    expect(found.locator("#session-error")).to_contain_text("unknown")
    found.get_by_label("API key").fill(site.key())
    found.keyboard.press("Enter")
    expect(found.locator("#session")).to_be_hidden()
    expect(found.locator("#live")).to_have_text("Live")
    expect(found.locator(".toast")).to_have_text(re.compile("You are logged in again"))


def test_a_form_that_is_sent_after_the_session_expired_keeps_what_was_typed_and_goes_on(
    queue: TaskQueue, web: Web, open_page: Open
) -> None:
    site = web(auth=True)
    found = open_page(site, site.login())
    settle(found)
    found.goto(f"{site.url}/new/schedule")
    found.get_by_label("Cron expression", exact=True).last.fill("0 9 * * *")
    found.get_by_label("User", exact=True).fill("alice")
    found.get_by_label("Id", exact=True).fill("nine")
    end_session(site, found)
    found.get_by_role("button", name="Add schedule").click()
    dialog = found.get_by_role("dialog", name="Your session has expired")
    expect(dialog).to_contain_text("What you typed is kept")
    check_page(found, ignore=("401",))
    expect(found.get_by_label("User", exact=True)).to_have_value("alice")
    assert Inspector(queue).schedules.find("nine") is None
    dialog.get_by_label("API key").fill(site.key())
    dialog.get_by_role("button", name="Continue").click()
    expect(found.locator(".toast")).to_contain_text("nine")
    assert Inspector(queue).schedules.get("nine").schedule.user_id == "alice"
    check_page(found, ignore=("401",))


def test_a_dialog_survives_an_expired_session(queue: TaskQueue, web: Web, open_page: Open) -> None:
    Inspector(queue).schedules.add(schedule_id="nine", cron_expr="0 9 * * *", user_id="alice")
    site = web(auth=True)
    found = open_page(site, site.login())
    settle(found)
    found.goto(f"{site.url}/schedules/nine")
    found.get_by_role("button", name="Pause", exact=True).click()
    found.get_by_label("Note").fill("too many mails")
    end_session(site, found)
    found.get_by_role("button", name="Pause schedule").click()
    dialog = found.get_by_role("dialog", name="Your session has expired")
    expect(dialog).to_be_visible()
    # As somebody who has logged in in another tab, and has no key.
    other = found.context.new_page()
    other.goto(site.url + site.login())
    expect(other.get_by_role("heading", level=1)).to_have_text("Overview")
    dialog.get_by_role("button", name="Continue").click()
    expect(found.locator("#schedule-notice")).to_contain_text("too many mails")


# --- live -----------------------------------------------------------------------------------------


def test_numbers_change_by_themselves(queue: TaskQueue, web: Web, open_page: Open) -> None:
    found = open_page(web())
    settle(found)
    backlog = found.locator(".stat b[data-live=ready]")
    expect(backlog).to_have_text("0")
    fill(queue, "alice", 1234)
    expect(backlog).to_have_text("1,234")


def test_rows_do_not_jump_but_new_ones_are_announced(
    queue: TaskQueue, parts: Callable[..., Site], open_page: Open
) -> None:
    site = parts()
    found = open_page(site, "/parts?cursor=old&status=failed")
    settle(found)
    new = found.locator(".new-rows")
    expect(new).to_be_hidden()
    fill(queue, "alice", 12)
    expect(new).to_have_text("12 new · show")
    expect(new).to_have_attribute("href", "?status=failed")


def test_a_paused_page_holds_no_stream(site: Site, open_page: Open) -> None:
    found = open_page(site)
    settle(found)
    found.get_by_role("button", name="Live").click()
    expect(found.locator("#live")).to_have_text("Paused")
    gone = threading.Event()
    for _ in range(300):
        if site.app.state.fairqueue.live_updates.viewers == 0:
            break
        gone.wait(0.1)
    assert site.app.state.fairqueue.live_updates.viewers == 0
    found.reload()
    expect(found.locator("#live")).to_have_attribute("aria-pressed", "false")
    found.get_by_role("button", name="Paused").click()
    expect(found.locator("#live")).to_have_attribute("data-state", "live")
    check_page(found)


def test_a_paused_pages_times_do_not_count_on(queue: TaskQueue, web: Web, open_page: Open) -> None:
    Inspector(queue).schedules.add(cron_expr="* * * * *", user_id="alice", schedule_id="minutely")
    found = open_page(web(), "/")
    settle(found)
    fires = found.locator("#upcoming time").first
    expect(fires).to_have_text(re.compile("^(in|now|due) ?"))
    found.get_by_role("button", name="Live").click()
    expect(fires).to_have_text(re.compile(r"\d\d:\d\d:\d\d$"))


def test_a_chart_has_its_numbers_in_a_table(world: World, web: Web, open_page: Open) -> None:
    fill_overview(world)
    found = open_page(web(), "/?window=15m")
    settle(found)
    chart = found.locator("#backlog")
    chart.get_by_text("As a table").click()
    expect(chart.locator("thead th")).to_have_text(
        ["Time", "ready", "running", "delayed", "dead letters"]
    )
    assert "3" in chart.locator("tbody td").all_inner_texts()
    check_page(found)


# --- acting ---------------------------------------------------------------------------------------


def test_a_button_acts_and_the_page_says_so(parts: Callable[..., Site], open_page: Open) -> None:
    site = parts()
    found = open_page(site, "/parts?status=failed")
    found.get_by_role("button", name="Resume").click()
    expect(found.locator(".toast")).to_contain_text("It <i>is</i> done.")
    expect(found).to_have_url(site.url + "/parts?status=failed")
    assert site.app.state.acts == ["a"]
    found.get_by_role("button", name="Dismiss").click()
    expect(found.locator(".toast")).to_have_count(0)
    check_page(found)


def test_what_destroys_asks_first(parts: Callable[..., Site], open_page: Open) -> None:
    site = parts()
    found = open_page(site, "/parts")
    opener = found.get_by_role("button", name="Drop", exact=True)
    opener.click()
    expect(found.get_by_role("button", name="Cancel")).to_be_focused()
    found.keyboard.press("Escape")
    expect(found.get_by_role("dialog")).to_have_count(0)
    expect(opener).to_be_focused()
    opener.click()
    found.get_by_role("button", name="Cancel").click()
    assert site.app.state.acts == []
    opener.click()
    found.get_by_role("button", name="Drop 37").click()
    expect(found.locator(".toast")).to_be_visible()
    assert site.app.state.acts == ["b"]


def test_a_refused_form_keeps_what_was_typed(parts: Callable[..., Site], open_page: Open) -> None:
    found = open_page(parts(), "/parts")
    note = found.get_by_label("Note")
    note.fill("typed")
    found.get_by_role("button", name="Save").click()
    expect(found.locator(".toast-error")).to_contain_text("somebody <b>else</b> was faster")
    expect(note).to_have_value("typed")
    check_page(found, ignore=("412",))


def test_buttons_work_without_scripts(parts: Callable[..., Site], open_page: Open) -> None:
    site = parts()
    found = open_page(site, "/parts", java_script_enabled=False)
    found.get_by_role("button", name="Resume").click()
    expect(found.locator(".toast")).to_contain_text("done")
    assert site.app.state.acts == ["a"]


def test_ticked_rows_are_counted(parts: Callable[..., Site], open_page: Open) -> None:
    found = open_page(parts(), "/parts")
    expect(found.locator(".bulk")).to_be_hidden()
    found.get_by_label("Row 3").check()
    expect(found.locator(".bulk")).to_have_text("1 chosen")
    found.get_by_label("All on this page").check()
    expect(found.locator(".bulk")).to_have_text("10 chosen")


def test_filters_live_in_the_address(parts: Callable[..., Site], open_page: Open) -> None:
    site = parts()
    found = open_page(site, "/parts?cursor=old")
    found.get_by_label("Status").select_option("failed")
    expect(found).to_have_url(site.url + "/parts?status=failed")
    found.get_by_label("User", exact=True).fill("alice")
    found.keyboard.press("Enter")
    expect(found).to_have_url(site.url + "/parts?user_id=alice&status=failed")
    expect(found.get_by_label("Status")).to_have_value("failed")
    found.get_by_role("link", name="Clear").click()
    expect(found).to_have_url(site.url + "/parts")


def test_a_command_can_be_copied(parts: Callable[..., Site], open_page: Open) -> None:
    found = open_page(parts(), "/parts", permissions=["clipboard-read", "clipboard-write"])
    found.locator("button[data-copy=cli]").click()
    expect(found.locator(".toast")).to_contain_text("Copied")
    copied = found.evaluate("() => navigator.clipboard.readText()")
    assert copied == "fairqueue runs list --user alice"


# --- keys and preferences -------------------------------------------------------------------------


def test_a_slash_goes_to_the_search(site: Site, open_page: Open) -> None:
    found = open_page(site)
    found.keyboard.press("/")
    expect(found.get_by_role("searchbox")).to_be_focused()
    found.keyboard.type("a/b")
    found.keyboard.press("Enter")
    expect(found).to_have_url(site.url + "/search?q=a%2Fb")
    expect(found.get_by_role("searchbox")).to_have_value("a/b")


def test_the_first_tab_skips_to_the_content(web: Web, open_page: Open) -> None:
    found = open_page(web())
    found.keyboard.press("Tab")
    expect(found.get_by_text("Skip to content")).to_be_focused()
    found.keyboard.press("Enter")
    expect(found.locator("main")).to_be_focused()


def test_the_menu_of_a_small_screen_opens_and_closes_by_keys(web: Web, open_page: Open) -> None:
    found = open_page(web(), width=390)
    expect(found.get_by_role("link", name="Overview")).to_have_count(0)
    found.get_by_role("button", name="Menu").press("Enter")
    expect(found.locator("#navigation .brand")).to_be_focused()
    expect(found.get_by_role("link", name="Overview")).to_be_visible()
    check_page(found)
    found.keyboard.press("Escape")
    expect(found.get_by_role("button", name="Menu")).to_be_focused()
    expect(found.locator("#navigation")).to_be_hidden()


def test_the_theme_is_kept(web: Web, open_page: Open) -> None:
    found = open_page(web(), theme="light")
    button = found.locator("#theme")
    expect(button).to_have_attribute("aria-label", "Theme: auto")
    button.click()
    button.click()
    expect(button).to_have_attribute("aria-label", "Theme: dark")
    found.reload()
    expect(found.locator("html")).to_have_attribute("data-theme", "dark")
    assert found.evaluate("() => getComputedStyle(document.body).colorScheme") == "dark"
    check_page(found)


def test_times_are_local_or_utc(world: World, parts: Callable[..., Site], open_page: Open) -> None:
    found = open_page(parts(), "/parts")  # the browser is in Berlin
    time = found.locator("time[data-time=moment]").first
    local = time.inner_text()
    found.get_by_role("button", name="Times in local time").click()
    expect(time).not_to_have_text(local)
    utc = time.inner_text()
    hours = [int(re.search(r"(\d\d):\d\d:\d\d", text).group(1)) for text in (local, utc)]  # type: ignore[union-attr]
    assert (hours[0] - hours[1]) % 24 in (1, 2)
    found.reload()
    expect(found.locator("time[data-time=moment]").first).to_have_text(utc)
    expect(time).to_have_attribute("title", re.compile("UTC · .* Europe/Berlin"))
