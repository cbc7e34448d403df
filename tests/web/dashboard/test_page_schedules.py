"""The pages about schedules over HTTP: what they show, what their forms do, and who may do it."""

import html
import json
import re
from datetime import UTC, datetime, timedelta
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest
from helpers.browser import Site, Web
from helpers.pages import HTML, HTMX, add, get, post, said, words
from helpers.rest import fail
from helpers.world import World

from fairqueue.access.audit import AuditEntry
from fairqueue.clock import ManualClock
from fairqueue.inspection import Actor, Inspector
from fairqueue.link.connection import Link
from fairqueue.web.dashboard.formatting import (
    command,
    local_text,
    seconds_text,
    segment,
    wall,
)
from fairqueue.web.dashboard.pages.helpers import read_local, read_seconds
from fairqueue.web.dashboard.pages.schedule import bars, stretches

START = datetime(2026, 3, 5, 8, 0, tzinfo=UTC)  # a Thursday


def fields_of(text: str) -> dict[str, Any]:
    """What the form on a page would send as it stands."""
    form = text[text.index('class="schedule-form"') :]
    found = {}
    for tag in re.findall(r"<input [^>]*>", form):
        name, value = re.search(r'name="([^"]*)"', tag), re.search(r'value="([^"]*)"', tag)
        if name and value and ("radio" not in tag or " checked" in tag):
            found[name[1]] = html.unescape(value[1])
    for name, value in re.findall(
        r'<textarea [^>]*name="([^"]*)"[^>]*>\n(.*?)</textarea>', form, re.S
    ):
        found[name] = html.unescape(value)
    for name, options in re.findall(r'<select [^>]*name="([^"]*)"[^>]*>(.*?)</select>', form, re.S):
        chosen = re.search(r'value="([^"]*)" selected', options)
        assert chosen, name
        found[name] = chosen[1]
    return found


def error_of(text: str, field: str) -> str:
    """What stands below a field."""
    found = re.search(rf'id="error-{field}"[^>]*>(.*?)</small>', text, re.S)
    assert found
    return html.unescape(found[1])


def last_entry(world: World) -> AuditEntry:
    """The newest line of the audit log."""
    return world.inspector.audit.list(limit=1)[0]


def log_in(site: Site, **who: Any) -> None:
    """Have the site's client log in."""
    assert site.http.post("/login", data={"secret": site.key(**who)}).status_code == 303


# --- the list -------------------------------------------------------------------------------------


def test_an_empty_list_says_what_to_do_next(web: Web) -> None:
    text = get(web(), "/schedules")
    assert "There are no schedules yet" in text
    assert "fairqueue schedules add" in text
    assert "New schedule" in text


def test_a_row_tells_all_about_a_schedule(web: Web, world: World) -> None:
    add(world, timezone="Europe/Berlin", tenant="acme")
    world.inspector.schedules.trigger("nine")
    claim = world.claim_one()
    world.queue.finish(claim)

    text = get(web(), "/schedules")

    user = 'href="/users/alice?tenant=acme"'
    for part in ('href="/schedules/nine"', user, ">acme</a>", "0 9 * * *", "At 09:00"):
        assert part in text
    assert "Europe/Berlin" in text
    assert 'datetime="2026-03-06T08:00:00.000Z" data-time="countdown"' in text
    assert f'href="/runs/{claim.task.task_id}' in text
    assert 'title="succeeded, 2026-03-05 08:00 UTC"><span class="sr-only">succeeded</span>' in text
    assert "fairqueue schedules list" in text


def test_filters_stand_in_the_address_and_narrow_the_list(site: Site, world: World) -> None:
    add(world, "a", name="mails.send", user_id="bob", tenant="acme")
    add(world, "b", name="mails.read")
    add(world, "c", name="report")
    world.inspector.schedules.pause("c")

    def shown(**query: Any) -> list[str]:
        return re.findall(r'data-key="([^"]*)"', get(site, "/schedules", **query))

    assert shown(name_prefix="mails") == ["b", "a"]
    assert shown(text="SEND") == ["a"]
    assert shown(user_id="alice") == ["b", "c"]
    assert shown(status="paused") == ["c"]
    assert shown(status="active") == ["b", "a"]
    assert shown(tenant="acme") == ["a"]
    assert shown(tenant="acme", status="paused") == []
    text = get(site, "/schedules", user_id="alice", status="paused")
    assert "fairqueue schedules list --user alice --inactive" in text
    assert "No schedule matches these filters" in get(site, "/schedules", user_id="nobody")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"status": "angry"}, "status must be active or paused, not &#39;angry&#39;"),
        ({"tenant": "a b"}, "not &#39;a b&#39;"),
        ({"cursor": "x"}, "cursor &#39;x&#39; is not valid"),
    ],
)
def test_a_bad_filter_is_named_and_kept(web: Web, query: dict[str, Any], message: str) -> None:
    text = get(web(), "/schedules", 422, user_id="keep-me", **query)
    assert message in text
    assert 'value="keep-me"' in text


def test_pages_follow_each_other_by_their_cursor(web: Web, world: World) -> None:
    for number in range(60):
        add(world, f"s{number:03}")
    site, seen, path = web(), [], "/schedules"
    for _ in range(3):
        text = get(site, path)
        seen += re.findall(r'data-key="([^"]*)"', text)
        link = re.search(r'rel="next" href="([^"]*)"', text)
        path = "/schedules" + html.unescape(link[1]) if link else ""
    assert seen == [f"s{number:03}" for number in range(60)]
    assert path == ""


def test_a_full_page_takes_as_many_round_trips_as_a_short_one(site: Site, world: World) -> None:
    trips: list[object] = []
    for name in ("ask", "run"):
        original = getattr(Link, name)

        def counted(link: Link, *given: Any, _act: Any = original, **options: Any) -> Any:
            trips.append(given)
            return _act(link, *given, **options)

        world.patch(Link, name, counted)
    for number in range(5):
        add(world, f"a{number}")
    trips.clear()
    get(site, "/schedules")
    few = len(trips)
    for number in range(45):
        add(world, f"b{number}")
    trips.clear()
    get(site, "/schedules")
    assert len(trips) == few <= 10


def test_a_broken_schedule_does_not_hide_the_others(site: Site, world: World) -> None:
    add(world, "bad", every=60)
    add(world, "good")
    world.tamper("bad", timezone="Mars/Base")
    assert re.findall(r'data-key="([^"]*)"', get(site, "/schedules")) == ["bad", "good"]
    assert "Mars/Base" in get(site, "/schedules/bad")
    world.tamper("bad", timezone="UTC")


# --- many at once ---------------------------------------------------------------------------------


def test_all_that_match_are_counted_before_they_are_touched(site: Site, world: World) -> None:
    for number in range(60):
        add(world, f"s{number:02}", name="mails" if number % 2 else "report")
    assert get(site, "/do/schedules/count", name_prefix="mails") == "30"

    asked = post(site, "/do/schedules/ask/pause", 200, all="1", name_prefix="mails").text

    assert "Pause 30 schedules?" in asked
    assert "fairqueue schedules pause --name-prefix mails" in asked
    assert world.inspector.schedules.count(is_active=False) == 0


@pytest.mark.parametrize(
    ("kind", "done"),
    [("pause", "paused"), ("resume", "resumed"), ("trigger", "triggered"), ("remove", "deleted")],
)
def test_a_bulk_action_is_done_and_audited(site: Site, world: World, kind: str, done: str) -> None:
    for name in ("a", "b", "c"):
        add(world, name)
    if kind == "resume":
        world.inspector.schedules.bulk("pause", dry_run=False)

    answer = post(site, f"/do/schedules/bulk/{kind}", id=["a", "b"], note="why")

    assert said(answer) == f"2 schedules {done}"
    states = {view.schedule.schedule_id: view.state for view in world.inspector.schedules.list()}
    off = {"resume": "paused"}.get(kind, "active")
    if kind == "remove":
        assert states == {"c": "active"}
    else:
        on = {"pause": "paused"}.get(kind, "active")
        assert states == {"a": on, "b": on, "c": off}
    assert len(world.inspector.tasks.list()) == (2 if kind == "trigger" else 0)
    entry = last_entry(world)
    assert (entry.action, entry.outcome, entry.details["done"]) == (f"schedules.{kind}", "done", 2)
    assert (entry.actor, entry.via) == ("local", "web")


def test_a_bulk_action_on_all_that_match_leaves_the_others(web: Web, world: World) -> None:
    add(world, "a", name="mails")
    add(world, "b")
    answer = post(web(), "/do/schedules/bulk/remove", all="1", text="mail")
    assert said(answer) == "1 schedule deleted"
    assert [view.schedule.schedule_id for view in world.inspector.schedules.list()] == ["b"]


def test_a_bulk_action_tells_what_failed(web: Web, world: World) -> None:
    world.queue.configure(max_waiting=1)
    add(world, "a")
    add(world, "b")
    text = said(post(web(), "/do/schedules/bulk/trigger", id=["a", "b"]))
    assert text.startswith("1 schedule triggered, 1 failed · b: ")


def test_a_bulk_action_on_nothing_is_refused(site: Site, inspector: Inspector) -> None:
    for path in ("ask/pause", "bulk/pause"):
        answer = site.http.post(f"/do/schedules/{path}", headers=HTMX)
        assert answer.status_code == 422
        assert "nothing is selected" in answer.headers["hx-trigger"]
    assert site.http.post("/do/schedules/bulk/burn", data={"all": "1"}).status_code == 404


# --- one schedule ---------------------------------------------------------------------------------


def test_the_page_of_a_schedule_that_has_not_run(web: Web, world: World) -> None:
    add(
        world,
        timezone="Europe/London",
        cron_expr="30 1 * * *",
        overlap="skip",
        retries=3,
        backoff=[2.0, 10.0],
        backoff_jitter="full",
        max_failures=5,
        payload={"to": "bo", "password": "hunter2"},
        metadata={"api_key": "hunter2", "team": "blue"},
        start=START,
        windows=[{"days": [1, 7], "from": "01:00", "to": "03:00"}],
    )
    text = get(web(), "/schedules/nine")
    for part in (
        "At 01:30 (Europe/London)",
        "skip the new run",
        "2 s, 10 s; jitter full",
        "5 in a row; now 0",
        "Mon, Sun 01:00 to 03:00",
        "It has not run yet",
        "Created with",
        "No run has ended",
        "fairqueue schedules pause --note why nine",
        "fairqueue schedules trigger nine",
    ):
        assert part in text, part
    assert "hunter2" not in text
    assert "blue" in text


def test_a_change_of_the_clock_is_warned_of(web: Web, world: World) -> None:
    world.clock.set(datetime(2026, 3, 28, 12, tzinfo=UTC))
    add(world, cron_expr="30 1 * * *", timezone="Europe/London")
    text = get(web(), "/schedules/nine")
    assert "Sun 2026-03-29 02:00+01:00" in text
    assert re.search(r"notice-warning.*2026-03-29 02:00:00\+01:00", text, re.S)


def test_the_page_of_a_schedule_that_ran(site: Site, world: World) -> None:
    add(world)
    assert world.tick_at(START + timedelta(hours=1)).fired == 1
    task_id = fail(world.queue, "no such mailbox")
    world.inspector.schedules.trigger("nine")
    world.queue.finish(world.claim_one())

    text = get(site, "/schedules/nine")
    logs = get(site, "/do/schedules/logs", id="nine")

    assert f'href="/runs/{segment(task_id)}"' in text
    assert "no such mailbox" in text
    assert "Thu 05 Mar: 1 succeeded, 1 failed" in text
    assert (
        '<th scope="row">2026-03-05</th><td class="number">1</td><td class="number">1</td>' in text
    )
    assert "looking for the mailbox" in logs
    assert '{"box": 7, "password": "***"}' in unescape(logs)
    assert f'href="/runs/{segment(task_id)}"' in logs


def test_missed_moments_are_told_in_stretches(web: Web, world: World) -> None:
    add(world, cron_expr="0 * * * *")
    world.inspector.schedules.pause("nine")
    world.clock.set(START + timedelta(hours=10, minutes=30))
    world.inspector.schedules.resume("nine")
    text = get(web(), "/do/schedules/moments", id="nine")
    assert 'class="number">10<' in text
    assert "skipped: paused" in text


def test_nothing_missed_is_said(web: Web, world: World) -> None:
    add(world)
    assert "None in the last 30 days" in get(web(), "/do/schedules/moments", id="nine")
    assert "have logged nothing" in get(web(), "/do/schedules/logs", id="nine")


def test_a_busy_schedule_shows_the_moments_of_ten_minutes(web: Web, world: World) -> None:
    add(world, every=1)
    world.inspector.schedules.pause("nine")
    world.clock.set(START + timedelta(days=2))
    text = get(web(), "/do/schedules/moments", id="nine")
    assert 'class="number">600<' in text
    assert "skipped: paused" in text


def test_a_schedule_that_was_switched_off_says_why_and_what_to_do(web: Web, world: World) -> None:
    add(world, max_failures=1)
    assert world.tick_at(START + timedelta(hours=1)).fired == 1
    fail(world.queue)
    text = get(web(), "/schedules/nine")
    assert "paused after 1 failures in a row" in text
    assert "fix it, and resume the schedule" in text


def test_changes_are_told_with_who_and_what(web: Web, world: World) -> None:
    add(world, payload={"token": "hunter2"})
    ann = world.inspector.acting_as(Actor(name="ann"))
    ann.schedules.update("nine", {"cron_expr": "0 10 * * *", "payload": {"token": "hunter3"}})
    text = get(web(), "/schedules/nine")
    assert re.search(
        r"<td>ann</td>.*<b>cron expr</b> <del>&#34;0 9 \* \* \*&#34;</del>", text, re.S
    )
    assert "hunter" not in text


@pytest.mark.parametrize("path", ["/schedules/x", "/do/schedules/logs?id=x", "/do/schedules/logs"])
def test_an_unknown_schedule_is_not_found(web: Web, path: str) -> None:
    text = get(web(), path, 404)
    assert "no schedule" in text or "the id of the schedule is missing" in text.lower()


@pytest.mark.parametrize(
    "schedule_id", ["a/b", "a/../b", "new", "logs", "x?y=1", "50% #1", "ünï ☃", "a+b&c"]
)
def test_an_id_may_hold_any_character(site: Site, world: World, schedule_id: str) -> None:
    add(world, schedule_id)
    path = re.search(r'class="what"><a href="([^"]*)"', get(site, "/schedules"))
    assert path
    text = get(site, html.unescape(path[1]))
    assert f"<code>{html.escape(schedule_id)}</code>" in text
    edit = re.search(r'href="(/do/schedules/edit[^"]*)"', text)
    assert edit
    assert "Save changes" in get(site, html.unescape(edit[1]))
    answer = post(site, "/do/schedules/pause", id=schedule_id)
    assert get(site, answer.headers["location"]).count('data-dialog="resume"') == 1


@pytest.mark.parametrize("value", [[], {}, None, "x", True, -1e300, float("nan"), 10**400])
def test_a_schedule_with_a_spoilt_state_is_shown(site: Site, world: World, value: Any) -> None:
    add(world, metadata={"title": "Daily report"})
    spoilt = dict.fromkeys(("last_run", "missed", "skipped", "failures", "until", "since"), value)
    texts = dict.fromkeys(("reason", "note", "by"), 7 if value == "x" else value)
    spoilt |= {**texts, "runs": value, "paused": value}
    world.tamper("nine", "schedule_state", **spoilt)

    assert "nine" in get(site, "/schedules")
    assert "0 9 * * *" in get(site, "/schedules/nine")
    answer = site.http.get("/api/v1/scheduler/jobs/nine")
    assert (answer.status_code, answer.json()["run_count"]) == (200, 0)


# --- actions on one -------------------------------------------------------------------------------


def test_pausing_keeps_the_note_and_the_end(web: Web, world: World) -> None:
    add(world, timezone="Europe/Berlin")
    answer = post(
        web(), "/do/schedules/pause", id="nine", note="too many mails", until="2026-03-06T12:00"
    )
    assert answer.headers["location"] == "/schedules/nine"
    assert said(answer) == "Paused nine until Fri 2026-03-06 12:00+01:00."
    task = world.inspector.schedules.get("nine").schedule
    assert (task.pause_note, task.paused_by) == ("too many mails", "local")
    assert task.paused_until == datetime(2026, 3, 6, 11, tzinfo=UTC)
    entry = last_entry(world)
    assert (entry.action, entry.target, entry.outcome) == ("schedule.pause", "nine", "done")


def test_resuming_lets_it_go_on(site: Site, world: World) -> None:
    add(world)
    world.inspector.schedules.pause("nine")
    assert "Paused" in get(site, "/schedules/nine")
    post(site, "/do/schedules/resume", id="nine")
    assert world.inspector.schedules.get("nine").state == "active"
    assert last_entry(world).action == "schedule.resume"


def test_triggering_pushes_one_run_with_any_payload(site: Site, world: World) -> None:
    add(world, payload={"day": 1})
    post(site, "/do/schedules/trigger", id="nine", payload="")
    post(site, "/do/schedules/trigger", id="nine", payload='{"day": 2}')
    claims = [world.claim_one(), world.claim_one()]
    assert sorted(claim.task.payload["day"] for claim in claims) == [1, 2]
    assert last_entry(world).action == "schedule.trigger"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("trigger", {"payload": "{"}, "payload is not valid JSON"),
        ("trigger", {"payload": "[1]"}, "payload must be a JSON object"),
        ("pause", {"until": "tomorrow"}, "until must be a time"),
        ("pause", {"until": "2020-01-01T00:00"}, "is in the past"),
        ("pause", {"note": "x" * 1001}, "note"),
        ("backfill", {"start": "2026-03-01T00:00", "end": ""}, "end is required"),
    ],
)
def test_bad_input_of_an_action_is_named_and_nothing_is_done(
    web: Web, world: World, path: str, fields: dict[str, Any], message: str
) -> None:
    add(world)
    before = world.inspector.schedules.get("nine")
    answer = web().http.post(f"/do/schedules/{path}", data={"id": "nine", **fields}, headers=HTMX)
    assert answer.status_code == 422
    assert message in json.loads(answer.headers["hx-trigger"])["toast"]["text"]
    assert world.inspector.schedules.get("nine") == before
    assert len(world.inspector.tasks.list()) == 0


def test_deleting_needs_the_schedule_as_it_was_shown(site: Site, world: World) -> None:
    add(world)
    etag = world.inspector.schedules.get("nine").etag
    world.inspector.schedules.update("nine", {"name": "other"})
    assert "was changed since" in post(site, "/do/schedules/remove", 412, id="nine", etag=etag).text
    assert world.inspector.schedules.find("nine") is not None

    etag = world.inspector.schedules.get("nine").etag
    answer = post(site, "/do/schedules/remove", id="nine", etag=etag)

    assert answer.headers["location"] == "/schedules"
    assert world.inspector.schedules.find("nine") is None
    assert last_entry(world).action == "schedule.remove"


def test_a_backfill_is_offered_for_the_last_day_by_the_minute(web: Web, world: World) -> None:
    add(world, timezone="Europe/Berlin")
    text = get(web(), "/schedules/nine")
    given = dict(re.findall(r'type="datetime-local" name="([^"]*)" value="([^"]*)"', text))
    assert given["start"] == "2026-03-04T09:00"
    assert given["end"] == "2026-03-05T09:00"


def test_a_backfill_is_counted_first_and_then_done(site: Site, world: World) -> None:
    add(world, cron_expr="0 * * * *", timezone="Europe/Berlin")
    path = "/do/schedules/count-backfill"
    # From two until nine in Berlin: seven moments before it was made.
    asked = get(site, path, id="nine", start="2026-03-05T02:00", end="2026-03-05T09:00")
    assert "would create <strong>7 runs</strong>" in asked
    assert "Create 7 runs" in asked
    assert len(world.inspector.tasks.list()) == 0

    hidden = dict(re.findall(r'type="hidden" name="([^"]*)" value="([^"]*)"', asked))
    answer = post(site, "/do/schedules/backfill", **hidden)

    assert said(answer) == "Backfilled nine: 7 runs created."
    assert len(world.inspector.tasks.list()) == 7
    assert last_entry(world).action == "schedule.backfill"
    again = get(site, path, id="nine", start="2026-03-05T02:00", end="2026-03-05T09:00")
    assert "nothing to backfill in this range" in again


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        ("2026-03-05T02:00", "", "fill in the start and the end"),
        ("2026-03-05T02:00", "2026-03-04T02:00", "is after end"),
        ("never", "2026-03-04T02:00", "must be a time"),
    ],
)
def test_a_bad_range_is_named(web: Web, world: World, start: str, end: str, message: str) -> None:
    add(world)
    text = get(web(), "/do/schedules/count-backfill", id="nine", start=start, end=end)
    assert message in text
    assert "Create" not in text


# --- the form -------------------------------------------------------------------------------------


def test_a_new_schedule_is_stored_as_it_was_typed(site: Site, world: World) -> None:
    fields = fields_of(get(site, "/new/schedule"))
    fields |= {
        "schedule_id": "report-7",
        "cron_expr": "0 9 * * 1-5",
        "timezone": "Europe/Berlin",
        "user_id": "bob",
        "tenant": "acme",
        "name": "mails.send",
        "priority": "5",
        "payload": '{"to": "bo"}',
        "metadata": '{"team": "blue"}',
        "start": "2026-03-05T12:00",
        "end": "2026-12-01T00:00",
        "windows": '[{"days": [1, 2], "from": "08:00", "to": "12:00"}]',
        "exclude": "2026-12-25, 2026-12-26",
        "max_runs": "100",
        "misfire": "fire_all",
        "catch_up": "2h",
        "max_catch_up": "7",
        "jitter": "30s",
        "overlap": "skip",
        "retries": "3",
        "backoff": "2s, 1m",
        "backoff_cap": "1h",
        "backoff_multiplier": "1.5",
        "backoff_jitter": "full",
        "timeout": "5m",
        "max_failures": "4",
    }

    answer = post(site, "/new/schedule", **fields)

    assert (answer.headers["location"], said(answer)) == ("/schedules/report-7", "Added report-7.")
    task = world.inspector.schedules.get("report-7").schedule
    assert (task.cron_expr, task.timezone, task.user_id) == ("0 9 * * 1-5", "Europe/Berlin", "bob")
    assert (task.tenant, task.name, int(task.priority)) == ("acme", "mails.send", 5)
    assert (task.payload, task.metadata) == ({"to": "bo"}, {"team": "blue"})
    assert task.start == datetime(2026, 3, 5, 11, tzinfo=UTC)
    assert task.end == datetime(2026, 11, 30, 23, tzinfo=UTC)
    assert task.windows == [{"days": [1, 2], "from": "08:00", "to": "12:00"}]
    assert task.exclude == ["2026-12-25", "2026-12-26"]
    assert (task.misfire, task.catch_up, task.max_catch_up) == ("fire_all", 7200.0, 7)
    assert (task.jitter, task.overlap, task.retries) == (30.0, "skip", 3)
    assert (task.backoff, task.timeout, task.max_failures) == ([2.0, 60.0], 300.0, 4)
    assert task.max_runs == 100
    delays = (task.backoff_cap, task.backoff_multiplier, task.backoff_jitter)
    assert delays == (3600.0, 1.5, "full")
    assert last_entry(world).action == "schedule.add"


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"kind": "every", "every": "1h30m"}, "every 1:30:00"),
        ({"kind": "at", "at": "2026-06-01T09:30"}, "at 2026-06-01T07:30:00+00:00"),
        ({"kind": "cron_expr", "cron_expr": "@daily"}, None),
    ],
)
def test_a_rule_is_of_the_chosen_kind(
    site: Site, inspector: Inspector, fields: dict[str, Any], rule: str | None
) -> None:
    others = {"cron_expr": "0 1 * * *", "every": "7s", "at": "2027-01-01T00:00"}
    given = fields_of(get(site, "/new/schedule")) | others | fields
    post(
        site,
        "/new/schedule",
        **{**given, "schedule_id": "x", "user_id": "bob", "timezone": "Europe/Berlin"},
    )
    task = inspector.schedules.get("x").schedule
    assert rule is None or task.rule == rule
    assert sum(each is not None for each in (task.cron_expr or None, task.every, task.at)) == 1


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"cron_expr": ""}, "cron_expr", "is missing"),
        ({"cron_expr": "61 * * * *"}, "cron_expr", "minute must be 0 to 59, not 61"),
        ({"kind": "every", "every": "soon"}, "every", "must be a duration"),
        ({"kind": "every", "every": "0.1s"}, "every", "must be 1 to"),
        ({"kind": "at", "at": "noon"}, "at", "must be a time"),
        ({"timezone": "Mars/Base"}, "timezone", "not in the tz database"),
        ({"timezone": "Mars/Base", "start": "2026-04-01T00:00"}, "timezone", "tz database"),
        ({"user_id": ""}, "user_id", "is missing"),
        ({"user_id": "x" * 201}, "user_id", "must be a string of 1 to 200"),
        ({"tenant": "a b"}, "tenant", "must be 1 to 64 letters"),
        ({"payload": "{'a': 1}"}, "payload", "is not JSON"),
        ({"payload": "[]"}, "payload", "must be a JSON object"),
        ({"metadata": "7"}, "metadata", "must be a JSON object"),
        ({"windows": '[{"days": [9]}]'}, "windows", "must be a whole number from 1 to 7"),
        ({"windows": "{}"}, "windows", "must be a JSON list"),
        ({"exclude": "xmas"}, "exclude", "must be dates such as"),
        ({"retries": "many"}, "retries", "must be a whole number"),
        ({"retries": "-1"}, "retries", "-1"),
        ({"backoff": "2s,soon"}, "backoff", "must be a duration"),
        ({"backoff_multiplier": "x"}, "backoff_multiplier", "must be a number"),
        ({"backoff_multiplier": "0.5"}, "backoff_multiplier", "0.5"),
        ({"max_runs": "0"}, "max_runs", "0"),
        ({"limit_keys": "a,b,c,d,e"}, "limit_keys", "at most 4 keys, not 5"),
        ({"limit_keys": "a*"}, "limit_keys", "must not contain"),
        ({"unique_for": "waiting"}, "unique_for", "needs unique"),
        (
            {"unique": "u", "unique_for": "ever"},
            "unique_for",
            "must be unfinished, waiting or a duration such as 15m",
        ),
        ({"expires": "-5"}, "expires", "must be 0.001 to"),
        ({"cost": "nan"}, "cost", "not nan"),
        ({"schedule_id": "taken"}, "schedule_id", "is in use"),
    ],
)
def test_what_is_wrong_stands_below_its_field_and_what_was_typed_is_kept(
    site: Site, world: World, fields: dict[str, Any], field: str, message: str
) -> None:
    add(world, "taken")
    usual = {"cron_expr": "0 9 * * *", "user_id": "bob", "name": "keep-this"}
    given = fields_of(get(site, "/new/schedule")) | usual | fields

    answer = site.http.post("/new/schedule", data=given, headers=HTML)

    assert answer.status_code == (409 if field == "schedule_id" else 422)
    assert message in error_of(answer.text, field)
    assert fields_of(answer.text) == given
    assert re.search(rf'name="{field}"[^>]*aria-invalid="true"', answer.text, re.S)
    assert [view.schedule.schedule_id for view in world.inspector.schedules.list()] == ["taken"]


def test_all_that_cannot_be_read_is_told_at_once(site: Site) -> None:
    given = fields_of(get(site, "/new/schedule")) | {"payload": "{", "retries": "x"}
    text = post(site, "/new/schedule", 422, **given).text
    wrong = [
        name for name in ("payload", "retries", "user_id", "cron_expr") if error_of(text, name)
    ]
    assert wrong == ["payload", "retries", "user_id", "cron_expr"]
    assert "4 fields cannot be used" in text


def test_an_edit_changes_what_was_changed_and_nothing_else(site: Site, world: World) -> None:
    add(world, every=5400, payload={"to": "bo", "password": "hunter2"}, timeout=300)
    planned = world.inspector.schedules.get("nine").schedule.next_run
    world.clock.set(START + timedelta(minutes=10))
    fields = fields_of(get(site, "/do/schedules/edit", id="nine"))
    assert "hunter2" not in fields["payload"]
    fields["name"] = "other"
    fields["payload"] = fields["payload"].replace('"bo"', '"ann"')
    fields["timeout"] = ""

    answer = post(site, "/do/schedules/edit", **fields)

    assert said(answer) == "Saved nine."
    task = world.inspector.schedules.get("nine").schedule
    assert (task.name, task.timeout, task.next_run) == ("other", None, planned)
    (stored,) = world.inspector.stores.schedules.store.read(["nine"])
    assert stored is not None
    assert stored.payload == {"to": "ann", "password": "hunter2"}
    changed = set(world.inspector.schedules.changes("nine")[0].fields)
    assert changed == {"name", "payload", "timeout"}
    assert last_entry(world).action == "schedule.update"


def test_titles_are_shown_instead_of_names(site: Site, world: World) -> None:
    add(world, title="Daily <report>", description="For the board\nand others")
    add(world, "other", name="mail", user_id="bob")
    listed = get(site, "/schedules")
    assert ">Daily &lt;report&gt;</a>" in listed
    assert ">mail</a>" in listed
    assert ">Daily &lt;report&gt;</a>" in get(site, "/schedules?text=DAILY")
    assert "Daily &lt;report&gt;" in get(site, "/search?q=daily")
    text = get(site, "/schedules/nine")
    assert "<title>Daily &lt;report&gt;" in text
    assert "For the board\nand others</dd>" in text
    assert " by " in text[text.index("<dt>Created</dt>") :]
    fields = fields_of(get(site, "/do/schedules/edit", id="nine"))
    assert (fields["title"], fields["description"]) == (
        "Daily <report>",
        "For the board\nand others",
    )


def test_the_options_of_flow_are_folded_until_they_have_a_value(site: Site, world: World) -> None:
    add(world)
    add(world, "busy", pool="gpu", limit_keys=["account:42"], unique="nightly", cost=2.5)

    def folded(path: str) -> str:
        return get(site, path).split("<summary>Advanced")[0].rsplit("<details", 1)[1]

    assert folded("/new/schedule").startswith(">")
    assert folded("/do/schedules/edit?id=nine").startswith(">")
    assert folded("/do/schedules/edit?id=busy").startswith(" open>")
    told = words(get(site, "/schedules/busy"))
    assert "Pool gpu Keys with limits account:42 Unique key nightly" in told
    assert "Cost 2.5" in told
    world.inspector.schedules.update("busy", {"unique_for": 90.0})
    assert "nightly, for 90 s" in words(get(site, "/schedules/busy"))


def test_a_form_that_is_saved_as_it_is_changes_nothing(site: Site, world: World) -> None:
    add(
        world,
        at=START + timedelta(days=3, seconds=7),
        timezone="Asia/Tokyo",
        exclude=["2026-12-25"],
    )
    before = world.inspector.schedules.get("nine")
    post(site, "/do/schedules/edit", **fields_of(get(site, "/do/schedules/edit", id="nine")))
    assert world.inspector.schedules.get("nine") == before


def test_a_time_means_the_new_zone_when_the_zone_is_changed(site: Site, world: World) -> None:
    add(world, at=datetime(2026, 6, 1, 7, tzinfo=UTC), timezone="Europe/Berlin")
    fields = fields_of(get(site, "/do/schedules/edit", id="nine"))
    assert fields["at"] == "2026-06-01T09:00"
    post(site, "/do/schedules/edit", **{**fields, "timezone": "Asia/Tokyo"})
    assert world.inspector.schedules.get("nine").schedule.at == datetime(2026, 6, 1, 0, tzinfo=UTC)


def test_a_stale_edit_shows_what_was_typed_and_stored(site: Site, world: World) -> None:
    add(world)
    fields = fields_of(get(site, "/do/schedules/edit", id="nine"))
    world.inspector.schedules.update("nine", {"cron_expr": "0 11 * * *"})
    fields |= {"cron_expr": "0 10 * * *", "name": "typed"}

    answer = post(site, "/do/schedules/edit", 412, **fields)

    assert "This schedule was changed since you opened the form" in answer.text
    kept = fields_of(answer.text)
    assert (kept["cron_expr"], kept["name"]) == ("0 10 * * *", "typed")
    assert "Stored now: <code>0 11 * * *</code>" in answer.text
    assert world.inspector.schedules.get("nine").schedule.cron_expr == "0 11 * * *"
    post(site, "/do/schedules/edit", **kept)
    assert world.inspector.schedules.get("nine").schedule.cron_expr == "0 10 * * *"


def test_a_copy_has_the_secrets_of_its_original(site: Site, world: World) -> None:
    add(world, payload={"to": "bo", "password": "hunter2"})
    fields = fields_of(get(site, "/do/schedules/copy", id="nine"))
    assert fields["schedule_id"] == ""

    post(site, "/do/schedules/copy", **{**fields, "schedule_id": "ten", "cron_expr": "0 10 * * *"})

    (stored,) = world.inspector.stores.schedules.store.read(["ten"])
    assert stored is not None
    assert (stored.cron_expr, stored.payload["password"]) == ("0 10 * * *", "hunter2")
    assert last_entry(world).action == "schedule.copy"
    text = post(
        site, "/do/schedules/copy", 422, **{**fields, "payload": '{"password": "***"}'}
    ).text
    assert "enter the secrets" in error_of(text, "payload")


# --- preview --------------------------------------------------------------------------------------


def test_a_preview_shows_the_next_five_runs_in_the_zone_and_in_utc(web: Web) -> None:
    text = get(
        web(),
        "/do/schedules/preview",
        kind="cron_expr",
        cron_expr="0 9 * * *",
        timezone="Asia/Tokyo",
    )
    assert "At 09:00 (Asia/Tokyo)" in text
    assert "<td>Fri 2026-03-06 09:00+09:00</td><td>2026-03-06 00:00</td>" in text
    assert text.count("<tr><td>") == 5


def test_a_preview_knows_limits_intervals_and_clock_changes(site: Site, clock: ManualClock) -> None:
    limited = get(
        site,
        "/do/schedules/preview",
        cron_expr="0 9 * * *",
        windows='[{"days": [1]}]',
        exclude="2026-03-09",
    )
    assert "Mon 2026-03-16 09:00+00:00" in limited
    assert "Mon 2026-03-09" not in limited
    assert "Every 1 hour 30 minutes" in get(
        site, "/do/schedules/preview", kind="every", every="90m"
    )
    past = get(site, "/do/schedules/preview", kind="at", at="2020-01-01T00:00")
    assert "will not run again" in past
    clock.set(datetime(2026, 3, 28, 12, tzinfo=UTC))
    changed = get(site, "/do/schedules/preview", cron_expr="30 1 * * *", timezone="Europe/London")
    assert "notice-warning" in changed


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"cron_expr": "61 * * * *"}, "cron_expr", "minute must be 0 to 59, not 61"),
        ({"cron_expr": "0 9 * * *", "timezone": "Mars"}, "timezone", "tz database"),
        ({"cron_expr": "0 9 * * *", "windows": "["}, "windows", "not JSON"),
        ({"cron_expr": "0 9 * * *", "windows": '["x"]'}, "windows", "windows"),
        ({"kind": "every", "every": "x"}, "every", "must be a duration"),
    ],
)
def test_a_preview_of_nonsense_says_so_beside_the_field(
    web: Web, fields: dict[str, Any], field: str, message: str
) -> None:
    text = get(web(), "/do/schedules/preview", **fields)
    assert message in error_of(text, field)
    others = set(re.findall(r'id="error-(\w+)"', text)) - {field}
    assert [name for name in others if error_of(text, name)] == []


def test_a_preview_of_nothing_is_no_error(web: Web) -> None:
    text = get(web(), "/do/schedules/preview")
    assert "Type a rule" in text
    assert "notice-error" not in text


# --- texts of users -------------------------------------------------------------------------------


class Tags(HTMLParser):
    """The tags of a page with their attributes, as a browser would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    @classmethod
    def of(cls, text: str) -> list[tuple[str, dict[str, str | None]]]:
        parser = cls()
        parser.feed(text)
        return parser.found


ATTACKS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'-alert(1)-'",
    "</textarea><script>alert(1)</script>",
    "<hx-partial hx-target=body>x</hx-partial>",
    "{{ 7 * 7 }}",
    "javascript:alert(1)",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_users_wrote_is_shown_as_text(site: Site, world: World, attack: str) -> None:
    add(
        world,
        attack,
        name=attack,
        user_id=attack,
        payload={attack: attack},
        metadata={attack: attack},
    )
    world.inspector.schedules.trigger(attack)
    fail(world.queue, attack)
    world.inspector.schedules.pause(attack, note=attack)
    code = segment(attack)
    texts = [
        get(site, "/schedules"),
        get(site, "/schedules", text=attack, user_id=attack),
        get(site, f"/schedules/{code}"),
        get(site, "/do/schedules/edit", id=attack),
        get(site, "/do/schedules/copy", id=attack),
        get(site, "/do/schedules/logs", id=attack),
        get(site, "/do/schedules/moments", id=attack),
        get(site, "/new/schedule", cron_expr=attack, payload=attack, name=attack),
        get(site, "/do/schedules/preview", cron_expr=attack, timezone=attack, windows=attack),
        get(site, "/do/schedules/count-backfill", id=attack, start=attack, end=attack),
        post(site, "/do/schedules/ask/pause", 200, id=[attack]).text,
        post(site, "/do/schedules/ask/pause", 200, all="1", text=attack).text,
    ]
    for text in texts:
        assert "<hx-" not in text
        for tag, attributes in Tags.of(text):
            assert tag != "img"
            assert tag != "script" or "src" in attributes
            assert not any(name.startswith(("on", "hx-on")) for name in attributes)
            for name in ("href", "src", "action", "formaction", "hx-get", "hx-post"):
                assert not (attributes.get(name) or "").startswith("javascript:")
            assert "style" not in attributes
        assert "49" not in re.findall(r"<h1>(.*?)</h1>", text)


def test_the_usual_address_is_the_form_unless_it_is_an_id(site: Site, world: World) -> None:
    answer = site.http.get("/schedules/new", headers=HTML)
    assert (answer.status_code, answer.headers["location"]) == (307, "/new/schedule")
    add(world, schedule_id="new")
    assert "<h1>" in get(site, "/schedules/new")


# --- who may --------------------------------------------------------------------------------------

CHANGES = [
    ("do/schedules/pause", {"id": "nine"}),
    ("do/schedules/resume", {"id": "nine"}),
    ("do/schedules/trigger", {"id": "nine"}),
    ("do/schedules/remove", {"id": "nine"}),
    (
        "do/schedules/backfill",
        {"id": "nine", "start": "2026-03-01T00:00", "end": "2026-03-02T00:00"},
    ),
    ("do/schedules/bulk/pause", {"id": "nine"}),
    ("do/schedules/bulk/remove", {"all": "1"}),
    ("new/schedule", {"user_id": "bob", "kind": "every", "every": "1h"}),
    ("do/schedules/edit", {"id": "nine", "user_id": "bob", "kind": "every", "every": "1h"}),
    ("do/schedules/copy", {"id": "nine", "user_id": "bob", "kind": "every", "every": "1h"}),
]


@pytest.mark.parametrize(("path", "fields"), CHANGES)
def test_a_viewer_may_do_nothing(web: Web, world: World, path: str, fields: dict[str, Any]) -> None:
    add(world)
    before = world.inspector.schedules.get("nine")
    site = web(auth=True)
    log_in(site, role="viewer")
    headers = {**HTML, "Sec-Fetch-Site": "same-origin"}
    answer = site.http.post(f"/{path}", data=fields, headers=headers)
    assert answer.status_code == 403, answer.text
    assert world.inspector.schedules.get("nine") == before
    assert world.inspector.schedules.count() == 1
    assert len(world.inspector.tasks.list()) == 0


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_buttons_are_those_of_the_role(web: Web, world: World, role: str) -> None:
    add(world)
    site = web(auth=True)
    log_in(site, role=role)
    listed, one = get(site, "/schedules"), get(site, "/schedules/nine")
    operates, administers = role != "viewer", role == "admin"
    assert ("data-bulk" in listed) is operates
    assert ('data-dialog="pause"' in one) is operates
    assert ('data-dialog="trigger"' in one) is operates
    assert ("New schedule" in listed) is administers
    assert ("/do/schedules/edit" in one) is administers
    assert ('data-dialog="remove"' in one) is administers
    assert ("ask/remove" in listed) is administers
    get(site, "/do/schedules/edit", 200 if administers else 403, id="nine")


def test_a_read_only_site_has_no_buttons_and_still_previews(web: Web, world: World) -> None:
    add(world)
    site = web(read_only=True)
    for text in (get(site, "/schedules"), get(site, "/schedules/nine")):
        assert "data-dialog" not in text
        assert "data-bulk" not in text
        assert "/new/schedule" not in text
    get(site, "/new/schedule", 403)
    assert "At 09:00" in get(site, "/do/schedules/preview", cron_expr="0 9 * * *")
    assert "Create" not in get(
        site,
        "/do/schedules/count-backfill",
        id="nine",
        start="2026-03-01T00:00",
        end="2026-03-05T00:00",
    ).replace("Would create", "")


def test_another_tenants_schedule_is_not_there(web: Web, world: World) -> None:
    add(world, tenant="acme")
    add(world, "theirs", user_id="bob", tenant="globex")
    site = web(auth=True)
    log_in(site, role="admin", tenant="acme")

    assert re.findall(r'data-key="([^"]*)"', get(site, "/schedules")) == ["nine"]
    assert "tenant" not in re.findall(r"<th [^>]*>(User[^<]*)</th>", get(site, "/schedules"))[0]
    get(site, "/schedules", 403, tenant="globex")
    get(site, "/schedules/theirs", 404)
    for path in ("edit", "copy", "logs", "moments", "count-backfill"):
        get(site, f"/do/schedules/{path}", 404, id="theirs")
    headers = {**HTML, "Sec-Fetch-Site": "same-origin"}
    for path, fields in CHANGES:
        if "id" in fields and "/bulk/" not in path:
            sent = {**fields, "id": "theirs"}
            answer = site.http.post(f"/{path}", data=sent, headers=headers)
            assert answer.status_code == 404, path
    answer = site.http.post("/do/schedules/bulk/remove", data={"id": "theirs"}, headers=headers)
    assert said(answer) == "0 schedules deleted"
    assert world.inspector.schedules.find("theirs") is not None


def test_what_a_tenant_adds_is_its_own(web: Web, inspector: Inspector) -> None:
    site = web(auth=True)
    log_in(site, role="admin", tenant="acme")
    text = get(site, "/new/schedule")
    assert 'name="tenant"' not in text
    fields = fields_of(text) | {"schedule_id": "x", "user_id": "bob", "cron_expr": "0 9 * * *"}
    headers = {**HTML, "Sec-Fetch-Site": "same-origin"}
    assert site.http.post("/new/schedule", data=fields, headers=headers).status_code == 303
    assert inspector.schedules.get("acme~x").tenant == "acme"


def test_what_a_tenant_edits_and_copies_stays_its_own(web: Web, inspector: Inspector) -> None:
    inspector.schedules.add(
        schedule_id="acme~x", cron_expr="0 9 * * *", user_id="bob", tenant="acme"
    )
    site = web(auth=True)
    log_in(site, role="admin", tenant="acme")
    headers = {**HTML, "Sec-Fetch-Site": "same-origin"}
    for kind, changes in (("edit", {"title": "X"}), ("copy", {"schedule_id": "y"})):
        fields = fields_of(get(site, f"/do/schedules/{kind}", id="acme~x"))
        assert "tenant" not in fields
        answer = site.http.post(
            f"/do/schedules/{kind}", data={**fields, **changes}, headers=headers
        )
        assert answer.status_code == 303, answer.text
    edited, copied = (inspector.schedules.get(each).schedule for each in ("acme~x", "acme~y"))
    assert (edited.title, edited.tenant, copied.tenant) == ("X", "acme", "acme")


# --- small parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("1h30m", 5400.0), ("1.5 h", 5400.0), ("2 min", 120.0)]
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert read_seconds(text, "every") == seconds


@pytest.mark.parametrize("seconds", [0.0, 0.25, 1.0, 61.0, 5400.0, 86_400.0, 90_061.0])
def test_durations_survive_being_written(seconds: float) -> None:
    assert read_seconds(seconds_text(seconds), "x") == seconds


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Asia/Kolkata", "America/New_York"])
def test_moments_survive_being_written(zone: str) -> None:
    at = datetime(2026, 7, 1, 12, 34, 56, tzinfo=UTC)
    assert read_local(local_text(at, zone), zone, "at") == at


def test_a_wall_clock_time_that_is_skipped_means_the_end_of_the_gap() -> None:
    at = read_local("2026-03-29T02:30", "Europe/Berlin", "at")
    assert at is not None
    assert wall(at, "Europe/Berlin") == "Sun 2026-03-29 03:00+02:00"


def test_a_command_line_can_be_pasted() -> None:
    line = command("schedules", "pause", ids=["a b; rm -rf /"])
    assert line == "fairqueue schedules pause 'a b; rm -rf /'"


def test_an_expired_run_is_an_outcome_of_its_schedule(site: Site, world: World) -> None:
    add(world, expires=60.0)
    world.inspector.schedules.trigger("nine")
    world.advance(61)
    world.queue.claim("w")

    text = get(site, "/schedules/nine")

    (today,) = world.inspector.schedules.history_chart("nine", 1)
    assert (today.expired, today.failed) == (1, 0)
    assert f"{today.day:%a %d %b}: 1 expired" in text
    assert bars([today]).most_down == 1
    assert "expired" in words(get(site, "/schedules"))


def test_a_chart_without_runs_has_no_bars(world: World) -> None:
    add(world)
    drawn = bars(world.inspector.schedules.history_chart("nine", 30))
    assert (drawn.most_up, drawn.most_down) == (0, 0)
    assert {(bar.up, bar.down) for bar in drawn.days} == {(0.0, 0.0)}
    assert stretches([]) == []
