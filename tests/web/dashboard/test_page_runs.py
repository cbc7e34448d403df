"""The pages about runs and failed runs over HTTP: what they show, do and refuse."""

import html
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
import redis
from browser import Web
from pages import HTML, HTMX, get, key, post, said
from starlette.applications import Starlette
from starlette.routing import Mount
from support import claim_one, make_task

from fairqueue.clock import ManualClock
from fairqueue.demo.seeder import seed
from fairqueue.history.runs import STATUSES
from fairqueue.inspection import Inspector
from fairqueue.link.connection import Link
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Failure, LogLine, Report
from fairqueue.queue.workers import LostRun, WorkerStore
from fairqueue.web.dashboard.pages import failed as failed_page
from fairqueue.web.dashboard.pages.helpers import segment
from fairqueue.web.dashboard.pages.run_helpers import first_line, short
from fairqueue.web.dashboard.pages.runs import COUNTERS

START = datetime(2026, 3, 5, 8, 0, tzinfo=UTC)
NO_TEXTS: list[Any] = [[], {}, None, 7, True, -1e300, 10**400]
NO_MOMENTS: list[Any] = [[], {}, None, "x", -1e300, 10**400]
XSS = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def inspector(queue: TaskQueue) -> Inspector:
    return Inspector(queue)


def shown(text: str) -> list[str]:
    """The ids of the runs in the table of a page, in order."""
    body = text[text.find("<tbody") : text.find("</tbody>")]
    return [
        html.unescape(each) for each in re.findall(r'class="mono id"><a [^>]*title="([^"]*)"', body)
    ]


def words(text: str) -> str:
    """What a page says, without its tags."""
    body = text[max(0, text.find("<main")) :].replace("<wbr>", "")
    plain = html.unescape(re.sub(r"<[^>]+>", " ", body))
    return re.sub(r"\s+", " ", plain)


def end(queue: TaskQueue, task_id: str, user_id: str = "alice", **fields: Any) -> str:
    """A run that has succeeded."""
    queue.push(make_task(user_id, task_id, **fields))
    queue.finish(claim_one(queue), {"sent": 3})
    return task_id


def fail(
    queue: TaskQueue,
    task_id: str,
    user_id: str = "alice",
    *,
    error: str = "the disk is full",
    log: tuple[LogLine, ...] = (),
    traceback: str = "",
    **fields: Any,
) -> str:
    """A run that has failed for good."""
    queue.push(make_task(user_id, task_id, **fields))
    claim = claim_one(queue)
    failure = Failure(type="OSError", message=error, traceback=traceback)
    report = Report.of_failure(claim.task.name, failure, seconds=1.5)
    report = Report(
        **{name: getattr(report, name) for name in report.__dataclass_fields__ if name != "log"},
        log=log,
    )
    queue.bury(claim, f"OSError: {error}", report=report)
    return task_id


def actions(inspector: Inspector) -> list[tuple[str, str, str]]:
    """What the audit log says, oldest first."""
    return [(e.action, e.target, e.outcome) for e in inspector.audit.list()][::-1]


# --- the list -------------------------------------------------------------------------------------


def test_a_row_tells_all_of_a_run(web: Web, queue: TaskQueue, clock: ManualClock) -> None:
    queue.push(make_task("alice", "a-run-with-a-rather-long-id", name="mails.send", tenant="north"))
    clock.advance(2)
    claim = claim_one(queue, worker="worker-1")
    clock.advance(65)
    queue.finish(claim, None)

    text = get(web(), "/runs")

    assert shown(text) == ["a-run-with-a-rather-long-id"]
    row = words(text[text.index("<tbody") : text.index("</tbody>")])
    for told in ("a-run-wi…-long-id", "mails.send", "alice", "north", "succeeded", "worker-1"):
        assert told in row
    assert "2 s" in row
    assert "1 min 5 s" in row
    assert text.count("<time") >= 3


def test_the_wait_of_a_second_attempt_is_named_as_such(
    web: Web, queue: TaskQueue, clock: ManualClock
) -> None:
    queue.push(make_task("alice", "again"))
    clock.advance(40)
    queue.retry(claim_one(queue, lease=60), delay=1)
    clock.advance(8)
    claim_one(queue)
    site = web()

    page, row = words(get(site, "/runs/again")), words(get(site, "/runs"))

    assert "Until first start 40 s" in page
    assert "Waited 7 s for the last attempt" in page
    assert "7 s last attempt" in row


@pytest.mark.untidy
def test_a_run_that_began_at_no_time_does_not_hide_the_others(
    web: Web, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    for task_id in ("good", "spoilt"):
        queue.push(make_task("alice", task_id))
        claim_one(queue)
    text = cast(bytes, redis_client.hget(queue.keys["status"], "spoilt"))
    spoilt = re.sub(rb'"claimed":[0-9]+', b'"claimed":' + b"9" * 5000, text)
    redis_client.hset(queue.keys["status"], "spoilt", spoilt)

    assert shown(get(web(), "/runs")) == ["good"]


def test_an_empty_list_says_what_to_do_next(web: Web) -> None:
    text = get(web(), "/runs")

    assert "There are no runs yet" in text
    assert "fairqueue tasks push" in text


def test_a_month_of_a_school_is_listed(web: Web, queue: TaskQueue) -> None:
    world = seed(queue)
    site = web()

    text = get(site, "/runs")

    assert len(shown(text)) == 25
    assert 'rel="next"' in text
    assert words(get(site, f"/runs/{world.failed[0]}")).count("Attempt ") >= 3


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"status": "failed"}, ["c"]),
        ({"status": ["failed", "running"]}, ["d", "c"]),
        ({"status": "pending"}, ["f", "e"]),
        ({"user_id": "bob"}, ["b"]),
        ({"name": "mails.send"}, ["b"]),
        ({"schedule_id": "nine"}, []),
        ({"tenant": "north"}, ["b"]),
        ({"user_id": " bob ", "status": "succeeded"}, ["b"]),
        ({"user_id": "bob", "status": "failed"}, []),
        ({}, ["f", "e", "d", "c", "b", "a"]),
        ({"user_id": "", "name": ""}, ["f", "e", "d", "c", "b", "a"]),
        ({"user_id": "dora"}, ["f"]),
    ],
)
def test_filters_are_in_the_address(
    web: Web, queue: TaskQueue, clock: ManualClock, query: dict[str, Any], found: list[str]
) -> None:
    end(queue, "a")
    clock.advance(1)
    end(queue, "b", "bob", name="mails.send", tenant="north")
    clock.advance(1)
    fail(queue, "c")
    queue.push(make_task("alice", "d"))
    claim_one(queue)
    queue.push(make_task("alice", "e"))
    queue.push(make_task("dora", "f", delay=60))

    text = get(web(), "/runs", **query)

    assert shown(text) == found
    if any(str(value).strip() for value in query.values()):
        assert "Only runs with " in text
        assert ">Show all runs</a>" in text
    else:
        assert "Only runs with " not in text
    if not found:
        assert "No run matches these filters" in text


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"last": "1h"}, ["new"]),
        ({"last": "24h"}, ["new", "day"]),
        ({"last": "7d"}, ["new", "day", "week"]),
        ({"last": "nonsense"}, ["new", "day", "week"]),
        ({"since": "2026-03-04T18:00"}, ["new", "day"]),
        ({"since": "2026-03-04T18:00", "last": "1h"}, ["new", "day"]),
        ({"until": "2026-03-04T00:00"}, ["week"]),
        ({"since": "2026-03-04T18:00", "until": "2026-03-05T06:00"}, ["day"]),
    ],
)
def test_runs_are_found_by_their_time(
    web: Web, queue: TaskQueue, clock: ManualClock, query: dict[str, str], found: list[str]
) -> None:
    queue.configure(keep_finished_for=timedelta(days=30))
    for task_id, before in (("week", 72), ("day", 12), ("new", 0)):
        clock.set(START - timedelta(hours=before))
        end(queue, task_id)

    assert shown(get(web(), "/runs", **query)) == found


def test_what_is_chosen_stays_chosen(web: Web, queue: TaskQueue) -> None:
    text = get(web(), "/runs", status=["failed", "timed_out"], user_id="bob", last="24h")

    assert re.findall(r'name="status" value="(\w+)" checked', text) == ["failed", "timed_out"]
    assert 'name="user_id" value="bob"' in text
    assert 'name="last" value="24h"' in text
    assert re.search(r'aria-current="true">24 hours', text)
    line = "fairqueue runs list --status failed --status timed_out --user bob --since 24h"
    assert line in html.unescape(text)


def test_an_id_leads_to_its_run(web: Web, queue: TaskQueue) -> None:
    end(queue, "a/b c")
    site = web()

    answer = site.http.get("/runs", params={"id": " a/b c "}, headers=HTML)

    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/a%2Fb%20c")
    assert "a/b c" in get(site, answer.headers["location"])
    assert "there is no task" in html.unescape(get(site, "/runs", 404, id="nobody"))


def test_pages_follow_each_other(web: Web, queue: TaskQueue, clock: ManualClock) -> None:
    for number in range(30):
        clock.advance(1)
        end(queue, f"run-{number:02}")
    site = web()

    first = get(site, "/runs")
    more = re.search(r'rel="next" href="([^"]+)"', first)
    assert more
    second = get(site, "/runs" + html.unescape(more[1]))

    assert shown(first) + shown(second) == [f"run-{number:02}" for number in reversed(range(30))]
    assert 'rel="next"' not in second
    assert "First page" in second


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"status": "sleeping"}, "sleeping"),
        ({"cursor": "nonsense"}, "cursor"),
        ({"since": "yesterday"}, "yesterday"),
        ({"since": "2026-03-05T09:00", "until": "2026-03-05T08:00"}, "is not before"),
        ({"user_id": "a\x07b"}, "user_id"),
        ({"tenant": "no tenant!"}, "tenant"),
        ({"id": "x" * 300}, "task_id"),
    ],
)
def test_bad_input_is_named_on_the_page(web: Web, query: dict[str, str], told: str) -> None:
    text = get(web(), "/runs", 422, **query)

    assert re.search(rf'role="alert">.*{told}', text, re.S)
    assert "<form" in text  # what was typed can be mended


def test_new_runs_are_announced_by_counters_of_what_is_shown(web: Web) -> None:
    site = web()

    def counters(**query: Any) -> str:
        found = re.search(r'data-new="([^"]*)"', get(site, "/runs", **query))
        assert found
        return found[1]

    assert counters() == "pushed"
    assert counters(status="running") == "claimed"
    assert counters(status=["failed", "timed_out"]) == "buried"
    assert counters(status="timed_out") == "timed_out"
    assert set(COUNTERS) == set(STATUSES)


def test_a_longer_list_asks_redis_no_more_often(
    web: Web, queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = web()
    asked: list[str] = []

    def count(path: str) -> int:
        asked.clear()
        get(site, path)
        return len(asked)

    for name in ("_ask", "_call", "_together"):
        method = getattr(Link, name)

        def counted(self: Link, *given: Any, _method: Any = method, **named: Any) -> Any:
            asked.append("asked")
            return _method(self, *given, **named)

        monkeypatch.setattr(Link, name, counted)
    for number in range(3):
        fail(queue, f"run-{number}", error=f"kind {'abc'[number]}")
    paths = ("/runs", "/failed?view=runs", "/failed", "/audit")
    few = [count(path) for path in paths]
    for number in range(40):
        fail(queue, f"more-{number}", error=f"kind {chr(100 + number % 20)}{number}")

    assert [count(path) for path in paths] == few


# --- one run --------------------------------------------------------------------------------------


def test_when_a_delayed_run_was_ready_is_told_until_it_is_tried_again(
    web: Web, queue: TaskQueue, clock: ManualClock
) -> None:
    queue.push(make_task("alice", "late", delay=60))
    site = web()

    def timeline() -> str:
        text = words(get(site, "/runs/late"))
        return text[text.index("Timeline") :][:300]

    assert "Ready" in timeline()
    clock.advance(60)
    claim = claim_one(queue)
    assert "Ready" in timeline()
    queue.retry(claim, "again", 30)
    assert "Ready" not in timeline()


def test_a_failed_run_is_told_with_its_attempts(
    web: Web, queue: TaskQueue, clock: ManualClock, inspector: Inspector
) -> None:
    inspector.schedules.add(
        schedule_id="nine", cron_expr="0 9 * * *", user_id="alice", name="report"
    )
    clock.set(START + timedelta(hours=1))
    assert inspector.stores.scheduler.tick().fired == 1
    clock.advance(3)
    claim = claim_one(queue, worker="worker-1")
    clock.advance(5)
    context = {"free": 7, "api_key": "hush"}
    line = LogLine(clock.now_ms(), "warning", "not much space", context)
    report = Report(
        seconds=5, log=(line,), log_dropped=7, error_type="OSError", message="disk full"
    )
    queue.retry(claim, "OSError: disk full", 60, report=report)
    clock.advance(60)
    claim = claim_one(queue, worker="worker-1")
    report = Report.of_failure(
        "report", Failure(type="OSError", message="disk full", traceback="at line 7"), seconds=1
    )
    queue.bury(claim, "OSError: disk full", report=report)
    task_id = claim.task.task_id

    text = words(get(web(), f"/runs/{task_id}"))

    steps = ["Due", "Fired", "Started, attempt 1", "Started, attempt 2", "Failed"]
    places = [text.index(step, text.index("Timeline")) for step in steps]
    assert places == sorted(places)
    assert "+3 s" in text
    assert "+1 min 5 s" in text
    for told in ("Attempt 1", "Attempt 2", "OSError : disk full", "at line 7", "not much space"):
        assert told in text
    assert '{"free": 7, "api_key": "***"}' in text
    assert "7 lines before these were not kept" in text
    assert "fired by its schedule" in text
    assert f"fairqueue runs retry {task_id}" in text


def test_arguments_and_results_are_masked(web: Web, queue: TaskQueue) -> None:
    queue.push(make_task("alice", "a", payload={"api_key": "k-123", "to": "bob"}))
    queue.finish(claim_one(queue), {"token": "t-456", "sent": 3})

    text = get(web(), "/runs/a")

    assert "k-123" not in text
    assert "t-456" not in text
    assert '"to": "bob"' in html.unescape(text)
    assert '"sent": 3' in html.unescape(text)


def test_a_run_that_waits_says_why(web: Web, queue: TaskQueue) -> None:
    done = end(queue, "done")
    queue.push(make_task("alice", "first"))
    queue.push(make_task("alice", "second"))
    queue.push(make_task("alice", "later", delay=3600))
    site = web()

    waiting, delayed = get(site, "/runs/second"), get(site, "/runs/later")

    assert "Why is it waiting?" in waiting
    assert "No worker is alive" in waiting
    assert "1 earlier task of 'alice' comes first." in waiting
    assert "Starts at <time" in delayed
    assert "Why is it waiting?" not in get(site, f"/runs/{done}")


def test_links_lead_from_a_retry_to_what_it_repeats_and_back(
    web: Web, queue: TaskQueue, inspector: Inspector
) -> None:
    fail(queue, "old")
    new = inspector.acting_as(inspector.actor).runs.retry("old")
    site = web()

    before, after = get(site, "/runs/old"), get(site, f"/runs/{new}")

    assert f'href="/runs/{new}"' in before
    assert 'href="/runs/old"' in after
    assert "by python" in words(after)
    assert 'data-dialog="retry"' not in before  # it is run again once


@pytest.mark.parametrize(
    ("status", "dialogs"),
    [
        ("pending", ["cancel"]),
        ("running", ["cancel"]),
        ("succeeded", []),
        ("failed", ["retry", "edit", "discard"]),
    ],
)
def test_what_can_be_done_depends_on_the_status(
    web: Web, queue: TaskQueue, status: str, dialogs: list[str]
) -> None:
    queue.push(make_task("alice", "a"))
    claims = [claim_one(queue)] if status != "pending" else []
    if status == "succeeded":
        queue.finish(claims[0])
    if status == "failed":
        queue.bury(claims[0], "why")

    text = get(web(), "/runs/a")

    assert re.findall(r'data-dialog="(\w+)"', text) == dialogs
    assert re.findall(r'<code id="(\w+)-cli"', text) == dialogs


def test_a_failed_run_is_run_again(web: Web, queue: TaskQueue, inspector: Inspector) -> None:
    fail(queue, "a")

    answer = post(web(), "/do/runs/retry", id="a")

    new = answer.headers["location"].removeprefix("/runs/")
    assert inspector.runs.get(new).run.retry_of == "a"
    assert said(answer) == f"It runs again as {short(new)}."
    assert actions(inspector) == [("run.retry", "a", "done")]


def test_an_edited_run_keeps_the_secrets_that_were_not_shown(
    web: Web, queue: TaskQueue, inspector: Inspector
) -> None:
    fail(queue, "a", payload={"api_key": "k-123", "to": "bob"})
    site = web()
    page = get(site, "/runs/a")
    area = re.search(r"<textarea[^>]*>(.*?)</textarea>", page, re.S)
    assert area
    typed = html.unescape(area[1]).replace("bob", "eve")

    answer = post(site, "/do/runs/edit", id="a", payload=typed)

    assert answer.headers["location"].startswith("/runs/")
    assert claim_one(queue).task.payload == {"api_key": "k-123", "to": "eve"}
    assert actions(inspector) == [("run.retry", "a", "done")]
    assert "k-123" not in repr(inspector.audit.list())


@pytest.mark.parametrize("payload", ["", "{", "[1]", '"text"', "null"])
def test_arguments_that_are_no_object_are_refused(web: Web, queue: TaskQueue, payload: str) -> None:
    fail(queue, "a")
    fields = {"id": "a", "payload": payload}

    answer = web().http.post("/do/runs/edit", data=fields, headers=HTMX)

    assert answer.status_code == 422
    assert "payload is no JSON" in json.loads(answer.headers["HX-Trigger"])["toast"]["text"]
    assert queue.size() == 0


def test_a_run_that_has_not_ended_is_cancelled(
    web: Web, queue: TaskQueue, inspector: Inspector
) -> None:
    end(queue, "ended")
    queue.push(make_task("alice", "a"))
    site = web()

    cancelled = post(site, "/do/runs/cancel", id="a")
    ended = post(site, "/do/runs/cancel", id="ended")

    assert inspector.runs.get("a").run.status == "cancelled"
    assert said(cancelled).startswith("Cancelled")
    assert said(ended) == "It had ended before: nothing was changed."
    assert [entry[:2] for entry in actions(inspector)] == [
        ("run.cancel", "a"),
        ("run.cancel", "ended"),
    ]


def test_a_running_run_shows_that_it_is_being_cancelled(web: Web, queue: TaskQueue) -> None:
    queue.push(make_task("alice", "a"))
    claim = claim_one(queue)
    site = web()

    post(site, "/do/runs/cancel", id="a")
    text = get(site, "/runs/a")

    assert "It is being cancelled" in text
    assert 'data-dialog="cancel"' not in text
    assert "being cancelled" in get(site, "/runs")
    queue.bury(claim, "stopped")


def test_a_failed_run_is_discarded(web: Web, queue: TaskQueue, inspector: Inspector) -> None:
    fail(queue, "a")
    site = web()

    answer = post(site, "/do/runs/discard", id="a")

    assert (answer.headers["location"], said(answer)) == ("/failed", "Run a is discarded.")
    get(site, "/runs/a", 404)
    assert actions(inspector) == [("run.discard", "a", "done")]


def test_what_is_not_there_is_not_found(web: Web) -> None:
    site = web()

    assert "there is no task" in html.unescape(get(site, "/runs/nobody", 404)).lower()
    for act in ("retry", "cancel", "discard"):
        post(site, f"/do/runs/{act}", 404, id="nobody")
    post(site, "/do/runs/edit", 404, id="nobody", payload="{}")
    post(site, "/do/runs/retry", 422)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("outcome", value) for value in NO_TEXTS],
        *[("worker", value) for value in NO_TEXTS],
        *[("start", value) for value in NO_MOMENTS],
        ("report", {"seconds": float("nan")}),
        ("report", {"seconds": []}),
        ("report", {"seconds": 10**400}),
        ("report", {"message": []}),
        ("report", {"traceback": {"a": 1}}),
        ("report", {"log": [[10**400, "info", "x"]]}),
        ("report", {"log": [[1, [], "x"]]}),
        ("report", {"log": [[1, "info", "x", "y"]]}),
        ("report", {"log": [[1, "info", "x"]], "log_context": ["y"]}),
        ("report", {"log": [[1, "info", "x"]], "log_context": {"0": 5}}),
        ("report", {"log_dropped": None}),
    ],
)
def test_a_run_with_an_attempt_that_cannot_be_read_is_shown_without_it(
    web: Web, queue: TaskQueue, redis_client: redis.Redis, field: str, value: Any
) -> None:
    queue.push(make_task("alice", "spoilt"))
    queue.retry(claim_one(queue), error="the first reason")
    queue.bury(claim_one(queue), "the second reason")
    lines = cast(bytes, redis_client.hget(queue.keys["attempts"], "spoilt")).splitlines()
    assert len(lines) == 2
    spoilt = json.dumps({**json.loads(lines[0]), field: value}).encode()
    redis_client.hset(queue.keys["attempts"], "spoilt", spoilt + b"\n" + lines[1])
    site = web()

    text = words(get(site, "/runs/spoilt"))

    assert "the second reason" in text
    assert "the first reason" not in text
    assert site.http.get("/api/v1/scheduler/runs/spoilt").status_code == 200


@pytest.mark.untidy
@pytest.mark.parametrize("field", ["name", "user", "error", "worker", "tenant", "fingerprint"])
def test_text_of_a_run_that_utf_8_cannot_hold_is_shown_as_far_as_it_can_be(
    web: Web, queue: TaskQueue, redis_client: redis.Redis, field: str
) -> None:
    fail(queue, "spoilt")
    record = json.loads(redis_client.hget(queue.keys["status"], "spoilt") or b"")
    redis_client.hset(queue.keys["status"], "spoilt", json.dumps({**record, field: "a\ud800&b"}))
    site = web()

    for path in ("/runs", "/runs/spoilt", "/failed"):
        assert get(site, path)
    assert "a?&b" in words(get(site, "/runs/spoilt"))
    answer = site.http.get("/api/v1/scheduler/runs/spoilt")
    assert (answer.status_code, "a?&b" in answer.text) == (200, True)


# --- failed runs ----------------------------------------------------------------------------------


def test_failed_runs_stand_together_by_their_cause(
    web: Web, queue: TaskQueue, clock: ManualClock
) -> None:
    for number in range(3):
        fail(queue, f"disk-{number}", error=f"disk {number} is full", name="backup")
    clock.advance(60)
    fail(queue, "mail", error="no such mailbox", name="mails.send")
    site = web()

    text = get(site, "/failed")
    rows = [words(row) for row in text.split("<tr>")[2:]]

    assert "OSError: no such mailbox" in rows[0]
    assert "mails.send 1" in rows[0]
    assert "OSError: disk 2 is full" in rows[1]
    assert "backup 3" in rows[1]
    group = re.search(r'href="(/failed\?fingerprint=[0-9a-f]+)">OSError: disk', text)
    assert group
    assert sorted(shown(get(site, group[1]))) == ["disk-0", "disk-1", "disk-2"]


def test_a_queue_without_failures_says_so(web: Web) -> None:
    site = web()

    assert "Nothing has failed" in get(site, "/failed")
    assert "No failed run matches" in get(site, "/failed", user_id="bob")
    assert "Nothing to do" in get(site, "/failed/retry")


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"view": "runs"}, ["b", "a"]),
        ({"user_id": "bob"}, ["b"]),
        ({"tenant": "north"}, ["b"]),
        ({"name": "nothing"}, []),
        ({"last": "1h"}, ["b"]),
    ],
)
def test_failed_runs_are_filtered(
    web: Web, queue: TaskQueue, clock: ManualClock, query: dict[str, str], found: list[str]
) -> None:
    fail(queue, "a")
    clock.advance(7200)
    fail(queue, "b", "bob", tenant="north")
    end(queue, "c")

    assert shown(get(web(), "/failed", **query)) == found


@pytest.mark.parametrize(
    "path",
    [
        "/failed?user_id=a%07",
        "/failed?since=never",
        "/failed?cursor=x",
        "/failed?view=runs&cursor=x",
    ],
)
def test_bad_filters_of_failed_runs_are_named(web: Web, path: str) -> None:
    assert 'role="alert"' in get(web(), path, 422)


@pytest.mark.parametrize("path", ["/failed/retry", "/failed/discard", "/failed/export"])
def test_nothing_is_begun_with_bad_filters(web: Web, path: str) -> None:
    get(web(), path, 422, since="never")


def form_of(text: str) -> dict[str, str]:
    """The hidden fields of the form that goes on."""
    part = text[text.index('id="progress"') :]
    found = re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', part)
    return {name: html.unescape(value) for name, value in found}


@pytest.mark.parametrize("scripts", [True, False])
def test_many_are_run_again_part_by_part(
    web: Web,
    queue: TaskQueue,
    inspector: Inspector,
    monkeypatch: pytest.MonkeyPatch,
    scripts: bool,
) -> None:
    monkeypatch.setattr(failed_page, "PART", 2)
    for number in range(5):
        fail(queue, f"disk-{number}")
    fail(queue, "other", "bob")
    site = web()

    text = get(site, "/failed/retry", user_id="alice")
    assert "Retry 5 failed runs?" in text
    assert "fairqueue failed retry --user alice" in text
    parts = 0
    while 'name="total"' in text:
        answer = site.http.post(
            "/do/failed/retry", data=form_of(text), headers=HTMX if scripts else HTML
        )
        assert answer.status_code == 200
        text, parts = answer.text, parts + 1
        assert ("<nav" in text) is not scripts
        assert ('hx-trigger="load' in text) is ('name="cursor"' in text)

    assert parts == 3
    assert "5 runs were run again" in text
    assert queue.size() == 5
    assert inspector.runs.get("other").run.retried_as is None
    assert actions(inspector) == [("runs.retry", "(all that match)", "done")] * 3
    assert "Nothing to do" in get(site, "/failed/retry", user_id="alice")


def test_what_is_done_is_what_was_counted_though_time_goes_on(
    web: Web, queue: TaskQueue, clock: ManualClock
) -> None:
    fail(queue, "old")
    clock.advance(3000)
    fail(queue, "new")
    site = web()
    form = form_of(get(site, "/failed/discard", last="1h"))
    assert {name for name in form if name not in ("total", "csrf")} == {"since", "until"}
    clock.advance(3000)  # "old" is older than an hour now
    fail(queue, "later")
    assert "2 runs were discarded" in post(site, "/do/failed/discard", 200, **form).text
    assert shown(get(site, "/failed", view="runs")) == ["later"]


def test_a_cause_is_discarded(web: Web, queue: TaskQueue, inspector: Inspector) -> None:
    for number in range(3):
        fail(queue, f"disk-{number}")
    fail(queue, "other", error="no such mailbox")
    cause = inspector.runs.get("disk-0").run.fingerprint
    site = web()

    text = get(site, "/failed/discard", fingerprint=cause)
    assert "Discard 3 failed runs?" in text
    answer = post(site, "/do/failed/discard", 200, **form_of(text))

    assert "3 runs were discarded" in answer.text
    assert [run.task_id for run in inspector.failed.list()] == ["other"]
    (entry,) = inspector.audit.list()
    assert (entry.action, entry.details["done"]) == ("runs.discard", 3)


def test_what_fails_after_the_count_is_left_alone(
    web: Web, queue: TaskQueue, clock: ManualClock, inspector: Inspector
) -> None:
    fail(queue, "before")
    site = web()
    text = get(site, "/failed/discard")
    clock.advance(1)
    fail(queue, "after")

    post(site, "/do/failed/discard", 200, **form_of(text))

    assert [run.task_id for run in inspector.failed.list()] == ["after"]


def test_a_full_queue_stops_it_and_it_can_go_on(web: Web, queue: TaskQueue) -> None:
    for number in range(3):
        fail(queue, f"disk-{number}")
    queue.configure(max_waiting=1)
    site = web()
    text = get(site, "/failed/retry")

    stopped = post(site, "/do/failed/retry", 200, **form_of(text)).text
    queue.configure(max_waiting=0)
    done = post(site, "/do/failed/retry", 200, **form_of(stopped)).text

    assert "Stopped" in stopped
    assert "max_waiting is reached" in stopped
    assert 'hx-trigger="load' not in stopped
    assert "3 runs were run again" in done
    assert queue.size() == 3


def test_failed_runs_are_exported_as_lines(web: Web, queue: TaskQueue) -> None:
    for number in range(25):
        fail(queue, f"disk-{number:02}", payload={"password": "p-1", "n": number})
    fail(queue, "other", "bob")

    answer = web().http.get("/failed/export", params={"user_id": "alice"})

    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert "failed-runs.jsonl" in answer.headers["content-disposition"]
    assert sorted(line["task_id"] for line in lines) == [f"disk-{n:02}" for n in range(25)]
    assert lines[0]["task"]["payload"]["password"] == "***"
    assert lines[0]["attempts"][0]["error_type"] == "OSError"
    assert "p-1" not in answer.text


def test_an_export_of_nothing_is_empty(web: Web) -> None:
    assert web().http.get("/failed/export").text == ""


def test_there_is_no_other_action_on_many(web: Web) -> None:
    site = web()

    get(site, "/failed/explode", 404)
    post(site, "/do/failed/explode", 404)


# --- who may --------------------------------------------------------------------------------------

ACTS = ("/do/runs/retry", "/do/runs/edit", "/do/runs/cancel", "/do/runs/discard")
MANY = ("/do/failed/retry", "/do/failed/discard")


def test_a_viewer_sees_no_buttons_and_is_refused(
    web: Web, queue: TaskQueue, inspector: Inspector
) -> None:
    fail(queue, "a")
    queue.push(make_task("alice", "b"))
    site = web(auth=True, rate=1000.0, burst=1000)
    viewer = key(site, role="viewer")

    for path in ("/runs", "/runs/a", "/runs/b", "/failed", "/failed?view=runs", "/failed/retry"):
        text = site.http.get(path, headers=viewer).text
        main = text[text.index("<main") :]
        assert "data-dialog" not in main
        assert 'method="post"' not in main
        assert "/failed/discard" not in main
    for path in (*ACTS, *MANY):
        answer = site.http.post(path, data={"id": "a", "payload": "{}"}, headers=viewer)
        assert answer.status_code == 403
    assert inspector.runs.get("a").run.retried_as is None
    assert actions(inspector) == []


def test_a_read_only_dashboard_has_no_buttons_and_changes_nothing(
    web: Web, queue: TaskQueue
) -> None:
    fail(queue, "a")
    site = web(read_only=True)

    text = get(site, "/runs/a")

    assert "data-dialog" not in text
    for path in (*ACTS, *MANY):
        post(site, path, 403, id="a", payload="{}")
    assert queue.size() == 0


def test_somebody_of_one_tenant_sees_its_runs_only(
    web: Web, queue: TaskQueue, inspector: Inspector
) -> None:
    fail(queue, "ours", "nora", tenant="north")
    fail(queue, "theirs", "sam", tenant="south", error="no such mailbox")
    fail(queue, "nobodys", "ann", error="no such mailbox")
    site = web(auth=True, rate=1000.0, burst=1000)
    nora = key(site, tenant="north")

    def page(path: str, status: int = 200) -> str:
        answer = site.http.get(path, headers=nora)
        assert answer.status_code == status, answer.text
        return answer.text

    assert shown(page("/runs")) == shown(page("/failed?view=runs")) == ["ours"]
    assert 'name="tenant"' not in page("/runs")
    assert "theirs" not in page("/failed")
    assert "no such mailbox" not in page("/failed")
    page("/runs?tenant=south", 403)
    for path in ("/runs/theirs", "/runs/nobodys", "/runs?id=theirs"):
        page(path, 404)
    for act in ACTS:
        fields = {"id": "theirs", "payload": "{}"}
        assert site.http.post(act, data=fields, headers=nora).status_code == 404
    for path in MANY:
        assert site.http.post(path, data={"total": "9"}, headers=nora).status_code == 200
    assert {run.task_id for run in inspector.failed.list()} == {"theirs", "nobodys"}
    assert "theirs" not in page("/failed/export")


# --- hostile texts --------------------------------------------------------------------------------


def test_texts_of_users_are_shown_as_text(web: Web, queue: TaskQueue) -> None:
    line = LogLine(0, XSS[:20], XSS)
    fail(
        queue,
        XSS,
        XSS,
        name=XSS,
        payload={XSS: XSS},
        error=XSS,
        log=(line,),
        traceback=XSS,
    )
    queue.push(make_task(XSS, "waiting", name=XSS, triggered_by=XSS))
    queue.push(make_task(XSS, "running", name=XSS))
    queue.claim(XSS, limit=2)
    site = web()
    cause = re.search(r"fingerprint=([0-9a-f]+)", get(site, "/failed"))
    assert cause

    texts = [
        get(site, path)
        for path in (
            "/runs",
            "/runs/running",
            "/runs/waiting",
            f"/runs/{segment(XSS)}",
            "/failed",
            f"/failed?fingerprint={cause[1]}",
        )
    ]
    texts += [get(site, "/runs", user_id=XSS, name=XSS, schedule_id=XSS)]
    texts += [get(site, "/failed/retry", user_id=XSS)]

    for text in texts:
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "&lt;script&gt;" in text


def test_pages_work_wherever_the_app_is_mounted(web: Web, queue: TaskQueue) -> None:
    fail(queue, "a")
    site = web(mounted=lambda app: Starlette(routes=[Mount("/ops", app)]), prefix="/ops")

    text = get(site, "/runs")

    assert 'href="/ops/runs/a"' in text
    assert 'action="/ops/do/runs/retry"' in get(site, "/runs/a")
    assert post(site, "/do/runs/discard", id="a").headers["location"] == "/ops/failed"


def test_long_ids_keep_both_ends() -> None:
    assert short("a" * 18) == "a" * 18
    assert short("abcdefgh-and-more-12345678") == "abcdefgh…12345678"


@pytest.mark.parametrize(("text", "line"), [(None, ""), ("", ""), (" \n", ""), ("a\nb", "a")])
def test_of_an_error_its_first_line_is_listed(text: str | None, line: str) -> None:
    assert first_line(text) == line


def test_rows_are_brought_up_to_date_by_their_ids_for_those_who_may_see_them(
    queue: TaskQueue, web: Web
) -> None:
    end(queue, "ours", "nora", tenant="north")
    end(queue, "theirs", "sam", tenant="south")
    site = web(auth=True)
    everybody = key(site, role="viewer")
    north = key(site, role="viewer", tenant="north")

    def rows(headers: dict[str, str], *ids: str) -> list[str]:
        answer = site.http.get("/do/runs/rows", params={"id": ids}, headers=headers)
        assert answer.status_code == 200
        return shown(answer.text)

    assert rows(everybody, "theirs", "ours", "gone") == ["theirs", "ours"]
    assert rows(north, "theirs", "ours", "gone") == ["ours"]
    assert rows(north) == []


@pytest.mark.parametrize(
    ("beats", "lease", "after", "told"),
    [
        (False, 60, 10, (False, 60)),
        (False, 10, 60, (False, 10)),
        (True, 60, 10, None),
        (True, 10, 30, (True, 10)),
        (True, 300, 60, (False, 300)),
    ],
    ids=["never heard", "lease over", "well", "heard, lease over", "heard no more"],
)
def test_a_run_is_lost_when_its_worker_is_gone_or_its_lease_is_over(
    queue: TaskQueue,
    inspector: Inspector,
    clock: ManualClock,
    beats: bool,
    lease: float,
    after: float,
    told: tuple[bool, float] | None,
) -> None:
    queue.push(make_task("alice", "a"))
    queue.push(make_task("alice", "waits"))
    if beats:
        WorkerStore(queue.link).beat({}, "w")
    queue.claim("w", lease=lease)
    clock.advance(after)
    found = inspector.runs.lost(inspector.runs.find(["a", "waits"]))
    expected = (
        {}
        if told is None
        else {"a": LostRun(is_heard=told[0], lease_ends=START + timedelta(seconds=told[1]))}
    )
    assert found == expected
