"""What pages keep up to date by themselves, and what they say when they cannot."""

import json
import os
import signal
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from helpers.browser import Open, Site, Web, check_page, settle
from helpers.fixtures import OwnServer
from helpers.tasks import claim_one, fill, make_task
from helpers.world import World
from playwright.sync_api import Page, expect

from fairqueue.inspection import Inspector
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import LogLine, Report
from fairqueue.queue.workers import GONE_AFTER_S
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.web import WebServer, create_app

PATIENCE_S = 30.0
LONGEST_S = 30.0  # the longest time that a call may go on trying
PULSE = "document.body.dispatchEvent(new CustomEvent('fq:pulse'))"
# Notes where each text of a canvas is drawn, and how wide it and the canvas are, in pixels of it.
WATCH = """
window.drawn = [];
const fillText = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const at = this.getTransform().transformPoint(new DOMPoint(x, y));
  const wide = this.measureText(text).width;
  const left = at.x - wide * ({ center: 0.5, right: 1 }[this.textAlign] ?? 0);
  window.drawn.push({ text, left, right: left + wide, width: this.canvas.width });
  return fillText.apply(this, arguments);
};
"""


# --- charts ---------------------------------------------------------------------------------------


def draw(page: Page, site: Site, begin: datetime, minutes: int) -> list[dict[str, Any]]:
    """The texts of charts that show so many minutes from a moment on."""
    step = minutes * 60 / 60
    times = [begin.timestamp() + i * step for i in range(61)]
    lines = [{"label": "succeeded", "tone": "ok", "values": [float(i) for i in range(61)]}]
    body = json.dumps({"times": times, "unit": "/s", "lines": lines})
    page.context.add_init_script(WATCH)
    page.route("**/charts/**", lambda route: route.fulfill(body=body))
    page.goto(site.url + "/")
    settle(page)
    drawn: list[dict[str, Any]] = page.evaluate("window.drawn")
    return drawn


@pytest.mark.parametrize("minutes", [15, 60, 1440])
@pytest.mark.parametrize("width", [390, 1280])
def test_no_chart_label_is_cut_off(site: Site, open_page: Open, minutes: int, width: int) -> None:
    page = open_page(site, "/audit", width=width)
    end = datetime(2026, 3, 5, 15, 0, tzinfo=UTC)
    drawn = draw(page, site, end - timedelta(minutes=minutes), minutes)
    assert "16:00" in {each["text"] for each in drawn}  # the end, in the zone of the browser
    cut = [each for each in drawn if each["left"] < 0 or each["right"] > each["width"]]
    assert not cut


def test_a_chart_that_crosses_midnight_says_the_day(site: Site, open_page: Open) -> None:
    page = open_page(site, "/audit")
    drawn = draw(page, site, datetime(2026, 3, 5, 12, 0, tzinfo=UTC), 1440)
    texts = [each["text"] for each in drawn]
    assert "06 Mar" in texts
    assert "00:00" not in texts


# --- ranges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "shown"),
    [(8, "25 Feb 07:00:00 to 05 Mar 07:00:00"), (1, "04 Mar 07:00:00 to 05 Mar 07:00:00")],
)
def test_a_range_over_several_days_has_the_day_of_both_ends(
    web: Web, world: World, open_page: Open, days: int, shown: str
) -> None:
    today = datetime(2026, 3, 5, 6, 0, tzinfo=UTC)  # seven in Berlin
    world.clock.set(today - timedelta(days=days, hours=1))
    inspector = Inspector(world.queue)
    inspector.schedules.add(schedule_id="six", cron_expr="0 6 * * *", user_id="alice")
    inspector.schedules.pause("six")
    world.clock.set(today + timedelta(minutes=30))
    inspector.schedules.resume("six")
    page = open_page(web(), "/schedules/six")
    missed = page.get_by_role("row", name="paused")
    expect(missed.locator("td").first).to_have_text(shown)
    check_page(page)


def test_a_range_within_a_day_says_its_day_once(web: Web, world: World, open_page: Open) -> None:
    world.clock.set(datetime(2026, 3, 4, 5, 30, tzinfo=UTC))
    inspector = Inspector(world.queue)
    inspector.schedules.add(schedule_id="hourly", cron_expr="0 6-8 * * *", user_id="alice")
    inspector.schedules.pause("hourly")
    world.clock.set(datetime(2026, 3, 4, 9, 0, tzinfo=UTC))
    inspector.schedules.resume("hourly")
    world.clock.set(datetime(2026, 3, 5, 5, 0, tzinfo=UTC))
    page = open_page(web(), "/schedules/hourly")
    missed = page.get_by_role("row", name="paused")
    expect(missed.locator("td").first).to_have_text("04 Mar 07:00:00 to 09:00:00")


# --- filters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name", "link"),
    [
        ("/runs?status=failed", "user_id", "24 hours"),
        ("/failed?view=runs", "name", "7 days"),
        ("/failed", "name", "Runs"),
        ("/audit", "actor", "Last hour"),
        ("/users", "prefix", "15 min"),
    ],
)
def test_what_was_typed_into_filters_is_kept_when_a_window_is_clicked(
    web: Web, queue: TaskQueue, open_page: Open, path: str, name: str, link: str
) -> None:
    fill(queue, "alice", 1)
    page = open_page(web(), path)
    before = parse_qs(urlsplit(page.url).query)
    page.locator(f"form.filters [name={name}]").fill("ann & bo")
    page.locator(".segments").get_by_role("link", name=link, exact=True).click()
    page.wait_for_load_state()
    given = parse_qs(urlsplit(page.url).query)
    assert given[name] == ["ann & bo"]
    assert before.items() <= given.items()
    expect(page.locator(f"form.filters [name={name}]")).to_have_value("ann & bo")
    check_page(page)


# --- when Redis or the dashboard is away ----------------------------------------------------------


def serve(server: EmbeddedServer, servers: ExitStack) -> tuple[TaskQueue, Site]:
    """A dashboard whose calls go on trying for long, half a minute, before they fail."""
    queue = servers.enter_context(TaskQueue.from_url(server.url, timeout=LONGEST_S))
    app = create_app(queue, auth=False)
    web = servers.enter_context(WebServer(app))
    client = servers.enter_context(httpx.Client(base_url=web.url))
    return queue, Site(app=app, server=web, http=client)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_page_says_soon_that_redis_is_away_and_goes_on_by_itself(
    own_server: OwnServer, open_page: Open, how: str
) -> None:
    server = own_server()
    with ExitStack() as servers:
        queue, site = serve(server, servers)
        page = open_page(site)
        settle(page)
        state, alarm = page.locator("#live"), page.locator("#unavailable")
        expect(state).to_have_text("Live")
        expect(alarm).to_be_hidden()
        os.kill(server.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        expect(alarm).to_be_visible(timeout=LONGEST_S * 1000 / 2)  # while a call goes on trying
        expect(alarm).to_contain_text("Redis does not respond.")
        expect(state).to_have_text("No data")
        check_page(page)
        if how == "killed":
            server.restart()
        else:
            os.kill(server.pid, signal.SIGCONT)
        expect(alarm).to_be_hidden()
        expect(state).to_have_text("Live")
        fill(queue, "alice", 7)
        expect(page.locator(".stat b[data-live=ready]")).to_have_text("7")


def test_a_failed_page_loads_when_redis_is_back(own_server: OwnServer, open_page: Open) -> None:
    server = own_server()
    with ExitStack() as servers:
        queue = servers.enter_context(TaskQueue.from_url(server.url, timeout=0.5))
        site = servers.enter_context(WebServer(create_app(queue, auth=False)))
        os.kill(server.pid, signal.SIGKILL)
        page = open_page(site.url, "/runs")
        expect(page.locator(".told")).to_contain_text("reloads by itself")
        check_page(page, ignore=("503",))
        server.restart()
        expect(page.get_by_role("heading", level=1)).to_have_text("Runs")


def test_a_page_says_that_the_dashboard_is_away(site: Site, open_page: Open) -> None:
    page = open_page(site)
    settle(page)
    site.server.stop(PATIENCE_S)
    expect(page.get_by_text("The dashboard does not respond.")).to_be_visible()
    expect(page.get_by_text("Redis does not respond.")).to_be_hidden()
    expect(page.locator("#live")).to_have_text("No data")


# --- parts that are kept up to date ---------------------------------------------------------------


def pulse(page: Page) -> None:
    """What a live page does by itself every quarter of a minute."""
    page.evaluate(PULSE)


def test_the_page_of_a_schedule_follows_what_happens(
    web: Web, queue: TaskQueue, open_page: Open
) -> None:
    inspector = Inspector(queue)
    inspector.schedules.add(schedule_id="nine", cron_expr="0 9 * * *", user_id="alice")
    page = open_page(web(), "/schedules/nine")
    settle(page)
    expect(page.locator("#last-runs")).to_contain_text("It has not run yet")
    page.locator("#outcome-days summary").click()
    inspector.schedules.trigger("nine")
    pulse(page)
    expect(page.locator("#last-runs .chip")).to_have_text("pending")
    claim = claim_one(queue)
    line = LogLine(at_ms=queue.link.now_ms(), level="INFO", message="a line")
    queue.finish_many([(claim, None, Report(seconds=1.0, log=(line,)))])
    inspector.schedules.pause("nine", note="too many mails")
    pulse(page)
    expect(page.locator("#last-runs .chip")).to_have_text("succeeded")
    expect(page.locator("#changes")).to_contain_text("too many mails")
    expect(page.locator("#schedule-notice")).to_contain_text("Paused")
    expect(page.get_by_text("a line")).to_be_visible()
    expect(page.locator("#outcome-days details")).to_have_attribute(
        "open", ""
    )  # as the reader left it
    page.get_by_role("button", name="Resume", exact=True).click()
    page.get_by_role("button", name="Resume schedule").click()
    expect(page.locator(".toast")).to_contain_text("Resumed nine")
    check_page(page)


def test_the_page_of_a_run_follows_it_to_its_end(web: Web, world: World, open_page: Open) -> None:
    task = world.queue.push(make_task("alice", name="report"))
    page = open_page(web(), f"/runs/{task}")
    settle(page)
    expect(page.locator("#attempts")).to_contain_text("No worker has started it yet")
    claim = world.claim_one()
    pulse(page)
    expect(page.locator("#attempts .chip")).to_have_text("running")
    world.queue.bury(claim, "disk full")
    pulse(page)
    expect(page.locator("#run-state")).to_contain_text("disk full")
    expect(page.locator("#attempts .chip")).to_have_text("failed")
    page.get_by_role("button", name="Retry", exact=True).click()
    page.get_by_role("button", name="Retry run").click()
    expect(page.locator(".toast")).to_contain_text("Retried as run")
    check_page(page)


def test_runs_in_a_list_are_updated_in_place(web: Web, world: World, open_page: Open) -> None:
    world.queue.push(make_task("alice", name="report"))
    claim = world.claim_one()
    page = open_page(web(), "/runs?status=running")
    settle(page)
    rows = page.locator("tbody[data-refresh] tr")
    expect(rows).to_have_count(1)
    expect(rows.locator(".chip")).to_have_text("running")
    world.advance(5)
    world.queue.finish(claim)
    world.fill("bob", 2)
    world.queue.claim("w", limit=2)
    pulse(page)
    expect(rows.locator(".chip")).to_have_text("succeeded")
    expect(rows).to_have_count(1)  # and the new ones are only announced
    expect(page.locator(".new-rows")).to_contain_text("2 new")
    check_page(page)


def test_the_page_of_a_user_follows_what_happens(web: Web, world: World, open_page: Open) -> None:
    world.queue.push(make_task("alice", name="report"))
    page = open_page(web(), "/users/alice")
    settle(page)
    expect(page.locator("#waiting-tasks tbody tr")).to_have_count(1)
    world.queue.finish(world.claim_one())
    pulse(page)
    expect(page.locator("#waiting-tasks")).to_contain_text("No waiting or delayed tasks")
    expect(page.locator("#last-runs .chip")).to_have_text("succeeded")
    check_page(page)


# --- workers that are gone ------------------------------------------------------------------------


def test_runs_of_a_gone_worker_show_their_lease(site: Site, world: World, open_page: Open) -> None:
    now = datetime(2026, 3, 5, 12, 0, tzinfo=UTC)
    world.clock.set(now)
    task = world.queue.push(make_task("alice", name="report"))
    world.beat("w1")
    world.queue.claim("w1", lease=60)
    world.advance(GONE_AFTER_S)
    page = open_page(site, "/")
    running = page.locator(".stat", has_text="Running")
    expect(running).to_contain_text("all without heartbeats")
    expect(page.locator("#attention")).to_contain_text("1 run has lost its worker")
    check_page(page)
    page.goto(f"{site.url}/runs?status=running")
    expect(page.locator("td .lost")).to_contain_text("no heartbeats; lease ends in")
    page.goto(f"{site.url}/runs/{task}")
    notice = page.locator("#run-state .notice")
    expect(notice).to_contain_text("Its worker w1 sends no heartbeats: it has crashed, or")
    expect(notice).to_contain_text("another worker takes it")
    expect(notice.locator("time")).to_have_attribute("datetime", "2026-03-05T12:01:00.000Z")
    check_page(page)
    world.advance(90)
    page.goto(f"{site.url}/runs/{task}")
    expect(notice).to_contain_text("the next free worker takes it")
    page.goto(f"{site.url}/workers")
    expect(page.locator(".stat", has_text="Slots in use")).to_contain_text("of 0; 1 run without")
    check_page(page)
