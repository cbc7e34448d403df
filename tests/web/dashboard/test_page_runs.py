"""The pages about runs and failed runs over HTTP: what they show, do and refuse."""

import html
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from helpers.browser import Site, Web
from helpers.pages import HTML, HTMX, get, key, post, said, words
from helpers.tasks import beat, claim_one, make_task
from helpers.world import World
from starlette.applications import Starlette
from starlette.routing import Mount

from fairqueue.demo.seeder import seed
from fairqueue.history.filters import STATUSES
from fairqueue.link.connection import Link
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Failure, LogLine, Report
from fairqueue.queue.workers import LostRun, WorkerStore
from fairqueue.reasons import estimate, roughly
from fairqueue.web.dashboard.formatting import first_line, segment, short
from fairqueue.web.dashboard.pages import failed as failed_page
from fairqueue.web.dashboard.pages.runs import COUNTERS

START = datetime(2026, 3, 5, 8, 0, tzinfo=UTC)
NO_TEXTS: list[Any] = [[], {}, None, 7, True, -1e300, 10**400]
NO_MOMENTS: list[Any] = [[], {}, None, "x", -1e300, 10**400]
XSS = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


def shown(text: str) -> list[str]:
    """The ids of the runs in the table of a page, in order."""
    body = text[text.find("<tbody") : text.find("</tbody>")]
    return [
        html.unescape(each) for each in re.findall(r'class="mono id"><a [^>]*title="([^"]*)"', body)
    ]


def end(world: World, task_id: str, user_id: str = "alice", **fields: Any) -> str:
    """A run that has succeeded."""
    world.queue.push(make_task(user_id, task_id, **fields))
    world.queue.finish(world.claim_one(), {"sent": 3})
    return task_id


def fail(
    world: World,
    task_id: str,
    user_id: str = "alice",
    *,
    error: str = "the disk is full",
    log: tuple[LogLine, ...] = (),
    traceback: str = "",
    **fields: Any,
) -> str:
    """A run that has failed for good."""
    world.queue.push(make_task(user_id, task_id, **fields))
    claim = world.claim_one()
    failure = Failure(type="OSError", message=error, traceback=traceback)
    report = Report.of_failure(claim.task.name, failure, seconds=1.5)
    report = Report(
        **{name: getattr(report, name) for name in report.__dataclass_fields__ if name != "log"},
        log=log,
    )
    world.queue.bury(claim, f"OSError: {error}", report=report)
    return task_id


def actions(world: World) -> list[tuple[str, str, str]]:
    """What the audit log says, oldest first."""
    return [(e.action, e.target, e.outcome) for e in world.inspector.audit.list()][::-1]


# --- the list -------------------------------------------------------------------------------------


def test_a_row_tells_all_of_a_run(web: Web, world: World) -> None:
    world.queue.push(
        make_task("alice", "a-run-with-a-rather-long-id", name="mails.send", tenant="north")
    )
    world.advance(2)
    claim = world.claim_one(worker="worker-1")
    world.advance(65)
    world.queue.finish(claim, None)

    text = get(web(), "/runs")

    assert shown(text) == ["a-run-with-a-rather-long-id"]
    row = words(text[text.index("<tbody") : text.index("</tbody>")])
    for told in ("a-run-wi…-long-id", "mails.send", "alice", "north", "succeeded", "worker-1"):
        assert told in row
    assert "2 s" in row
    assert "1 min 5 s" in row
    assert text.count("<time") >= 3


def test_the_wait_of_a_second_attempt_is_named_as_such(site: Site, world: World) -> None:
    world.queue.push(make_task("alice", "again"))
    world.advance(40)
    world.queue.retry(world.claim_one(lease=60), delay=1)
    world.advance(8)
    world.claim_one()

    page, row = words(get(site, "/runs/again")), words(get(site, "/runs"))

    assert "Until first start 40 s" in page
    assert "Waited 7 s for the last attempt" in page
    assert "7 s last attempt" in row


@pytest.mark.untidy
@pytest.mark.one_partition
def test_a_run_that_began_at_no_time_does_not_hide_the_others(web: Web, world: World) -> None:
    for task_id in ("good", "spoilt"):
        world.queue.push(make_task("alice", task_id))
        world.claim_one()
    text = cast(bytes, world.redis.hget(world.keys["status"], "spoilt"))
    spoilt = re.sub(rb'"claimed":[0-9]+', b'"claimed":' + b"9" * 5000, text)
    world.redis.hset(world.keys["status"], "spoilt", spoilt)

    assert shown(get(web(), "/runs")) == ["good"]


def test_an_empty_list_says_what_to_do_next(web: Web) -> None:
    text = get(web(), "/runs")

    assert "There are no runs yet" in text
    assert "fairqueue tasks push" in text


def test_a_month_of_a_school_is_listed(site: Site, queue: TaskQueue) -> None:
    world = seed(queue)

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
        ({"pool": "gpu"}, ["f"]),
        ({"pool": "cpu"}, []),
    ],
)
def test_filters_are_in_the_address(
    web: Web, world: World, query: dict[str, Any], found: list[str]
) -> None:
    end(world, "a")
    world.advance(1)
    end(world, "b", "bob", name="mails.send", tenant="north")
    world.advance(1)
    fail(world, "c")
    world.queue.push(make_task("alice", "d"))
    world.claim_one()
    world.queue.push(make_task("alice", "e"))
    world.queue.push(make_task("dora", "f", delay=60, pool="gpu"))

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
    web: Web, world: World, query: dict[str, str], found: list[str]
) -> None:
    world.queue.configure(keep_finished_for=timedelta(days=30))
    for task_id, before in (("week", 72), ("day", 12), ("new", 0)):
        world.clock.set(START - timedelta(hours=before))
        end(world, task_id)

    assert shown(get(web(), "/runs", **query)) == found


def test_what_is_chosen_stays_chosen(web: Web, queue: TaskQueue) -> None:
    text = get(web(), "/runs", status=["failed", "timed_out"], user_id="bob", last="24h")

    assert re.findall(r'name="status" value="(\w+)" checked', text) == ["failed", "timed_out"]
    assert 'name="user_id" value="bob"' in text
    assert 'name="last" value="24h"' in text
    assert re.search(r'aria-current="true">24 hours', text)
    line = "fairqueue runs list --status failed --status timed_out --user bob --since 24h"
    assert line in html.unescape(text)


def test_an_id_leads_to_its_run(site: Site, world: World) -> None:
    end(world, "a/b c")

    answer = site.http.get("/runs", params={"id": " a/b c "}, headers=HTML)

    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/a%2Fb%20c")
    assert "a/b c" in get(site, answer.headers["location"])
    assert "there is no task" in html.unescape(get(site, "/runs", 404, id="nobody"))


def test_pages_follow_each_other(site: Site, world: World) -> None:
    for number in range(30):
        world.advance(1)
        end(world, f"run-{number:02}")

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
        ({"since": "2026-03-05T09:00", "until": "2026-03-05T08:00"}, "must be before"),
        ({"user_id": "a\x07b"}, "user_id"),
        ({"tenant": "no tenant!"}, "tenant"),
        ({"id": "x" * 300}, "task_id"),
    ],
)
def test_bad_input_is_named_on_the_page(web: Web, query: dict[str, str], told: str) -> None:
    text = get(web(), "/runs", 422, **query)

    assert re.search(rf'role="alert">.*{told}', text, re.S)
    assert "<form" in text  # what was typed can be mended


def test_new_runs_are_announced_by_counters_of_what_is_shown(site: Site) -> None:
    def counters(**query: Any) -> str:
        found = re.search(r'data-new="([^"]*)"', get(site, "/runs", **query))
        assert found
        return found[1]

    assert counters() == "pushed"
    assert counters(status="running") == "claimed"
    assert counters(status=["failed", "timed_out"]) == "buried"
    assert counters(status="timed_out") == "timed_out"
    assert set(COUNTERS) == set(STATUSES)


def test_a_longer_list_asks_redis_no_more_often(site: Site, world: World) -> None:
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

        world.patch(Link, name, counted)
    # Asked once a second, not for each page.
    world.patch("fairqueue.web.dashboard.shell.has_tenants", lambda request: False)
    for number in range(3):
        fail(world, f"run-{number}", error=f"kind {'abc'[number]}")
    paths = ("/runs", "/failed?view=runs", "/failed", "/audit")
    few = [count(path) for path in paths]
    for number in range(40):
        fail(world, f"more-{number}", error=f"kind {chr(100 + number % 20)}{number}")

    assert [count(path) for path in paths] == few


# --- one run --------------------------------------------------------------------------------------


def test_the_ready_time_of_a_delayed_run_is_told_until_a_retry(site: Site, world: World) -> None:
    world.queue.push(make_task("alice", "late", delay=60))

    def timeline() -> str:
        text = words(get(site, "/runs/late"))
        return text[text.index("Timeline") :][:300]

    assert "Ready" in timeline()
    world.advance(60)
    claim = world.claim_one()
    assert "Ready" in timeline()
    world.queue.retry(claim, "again", 30)
    assert "Ready" not in timeline()


def test_a_failed_run_is_told_with_its_attempts(web: Web, world: World) -> None:
    world.inspector.schedules.add(
        schedule_id="nine", cron_expr="0 9 * * *", user_id="alice", name="report"
    )
    world.clock.set(START + timedelta(hours=1))
    assert world.scheduler.tick().fired == 1
    world.advance(3)
    claim = world.claim_one(worker="worker-1")
    world.advance(5)
    context = {"free": 7, "api_key": "hush"}
    line = LogLine(world.clock.now_ms(), "warning", "not much space", context)
    report = Report(
        seconds=5, log=(line,), log_dropped=7, error_type="OSError", message="disk full"
    )
    world.queue.retry(claim, "OSError: disk full", 60, report=report)
    world.advance(60)
    claim = world.claim_one(worker="worker-1")
    report = Report.of_failure(
        "report", Failure(type="OSError", message="disk full", traceback="at line 7"), seconds=1
    )
    world.queue.bury(claim, "OSError: disk full", report=report)
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
    assert "7 earlier lines were dropped" in text
    assert "Started by its schedule" in text
    assert f"fairqueue runs retry {task_id}" in text


def test_arguments_and_results_are_masked(web: Web, queue: TaskQueue) -> None:
    queue.push(make_task("alice", "a", payload={"api_key": "k-123", "to": "bob"}))
    queue.finish(claim_one(queue), {"token": "t-456", "sent": 3})

    text = get(web(), "/runs/a")

    assert "k-123" not in text
    assert "t-456" not in text
    assert '"to": "bob"' in html.unescape(text)
    assert '"sent": 3' in html.unescape(text)


def test_a_run_that_waits_says_why(site: Site, world: World) -> None:
    done = end(world, "done")
    world.queue.push(make_task("alice", "first"))
    world.queue.push(make_task("alice", "second"))
    world.queue.push(make_task("alice", "later", delay=3600))

    waiting, delayed = get(site, "/runs/second"), get(site, "/runs/later")

    assert "Why is it waiting?" in waiting
    assert "No worker is alive" in waiting
    assert "1 earlier task of 'alice' runs first." in waiting
    assert "Starts at <time" in delayed
    assert "Why is it waiting?" not in get(site, f"/runs/{done}")


def test_a_run_tells_its_pool_keys_cost_and_expiry(site: Site, world: World) -> None:
    options = {"pool": "gpu", "limit_keys": ["account:42", "region:eu"], "unique": "report:7"}
    world.queue.push(make_task("alice", "t", cost=3.5, expires=60.0, **options))
    world.queue.push(make_task("alice", "plain"))

    told, plain = words(get(site, "/runs/t")), words(get(site, "/runs/plain"))

    assert "Pool gpu Limit keys account:42 region:eu Unique key report:7 Cost 3.5" in told
    assert "if it has not started" in told
    for name in ("Pool", "Limit keys", "Unique key", "Cost", "Expires"):
        assert name not in plain


def test_an_expired_run_is_listed_and_told_as_such(site: Site, world: World) -> None:
    world.queue.push(make_task("alice", "late", expires=60.0))
    world.queue.push(make_task("alice", "other"))
    world.advance(61)
    world.claim_one()

    assert shown(get(site, "/runs", status="expired")) == ["late"]
    told = words(get(site, "/runs/late"))
    assert "Status expired" in told
    assert "Expired" in told[told.index("Timeline") :]
    assert "expired 1" in words(get(site, "/"))


def test_a_waiting_run_says_when_it_starts(site: Site, world: World) -> None:
    beat(world.queue, slots=1, running=1)
    for n in range(40):
        world.queue.push(make_task("bob", f"b{n}"))
    world.queue.push(make_task("alice", "mine"))
    for _ in range(10):  # one task in two seconds
        world.advance(2)
        world.queue.finish(world.claim_one())
    world.queue.push(make_task("alice", "later"))

    explanation = world.queue.explain("later")
    assert explanation is not None
    assert explanation.starts_about is not None
    about = (explanation.starts_about - world.now()).total_seconds()
    told = words(get(site, "/runs/later"))
    assert f"It starts in about {roughly(about)}" in told
    page = words(get(site, "/users/alice"))
    assert "The next task starts in about" in page
    idle = words(get(site, "/users/bob"))
    assert "The next task starts" in idle


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ((0.1, 0.2, 0.5), "at once"),
        ((120, 180, 300), "in about 3 min (2 to 5 min)"),
        ((50, 100, 150), "in about 2 min (50 s to 2 min)"),
        ((170, 180, 190), "in about 3 min"),
        ((-5, 20, 40), "in about 20 s (0 to 40 s)"),
        ((3600, 7200, 10_800), "in about 2 h (1 to 3 h)"),
        ((86_400, 864_000, 1_728_000), "in about 10 d (24 h to 20 d)"),
    ],
)
def test_an_estimate_is_told_in_one_unit(seconds: tuple[float, float, float], text: str) -> None:
    now = datetime(2026, 3, 5, tzinfo=UTC)
    first, about, last = (now + timedelta(seconds=each) for each in seconds)
    assert estimate(about, first, last, now) == text


def test_links_lead_from_a_retry_to_what_it_repeats_and_back(site: Site, world: World) -> None:
    fail(world, "old")
    new = world.inspector.acting_as(world.inspector.actor).runs.retry("old")

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


def test_a_failed_run_is_run_again(web: Web, world: World) -> None:
    fail(world, "a")

    answer = post(web(), "/do/runs/retry", id="a")

    new = answer.headers["location"].removeprefix("/runs/")
    assert world.inspector.runs.get(new).run.retry_of == "a"
    assert said(answer) == f"Retried as run {short(new)}."
    assert actions(world) == [("run.retry", "a", "done")]


def test_an_edited_run_keeps_the_secrets_that_were_not_shown(site: Site, world: World) -> None:
    fail(world, "a", payload={"api_key": "k-123", "to": "bob"})
    page = get(site, "/runs/a")
    area = re.search(r"<textarea[^>]*>(.*?)</textarea>", page, re.S)
    assert area
    typed = html.unescape(area[1]).replace("bob", "eve")

    answer = post(site, "/do/runs/edit", id="a", payload=typed)

    assert answer.headers["location"].startswith("/runs/")
    assert world.claim_one().task.payload == {"api_key": "k-123", "to": "eve"}
    assert actions(world) == [("run.retry", "a", "done")]
    assert "k-123" not in repr(world.inspector.audit.list())


@pytest.mark.parametrize("payload", ["", "{", "[1]", '"text"', "null"])
def test_arguments_that_are_no_object_are_refused(web: Web, world: World, payload: str) -> None:
    fail(world, "a")
    fields = {"id": "a", "payload": payload}

    answer = web().http.post("/do/runs/edit", data=fields, headers=HTMX)

    assert answer.status_code == 422
    assert "JSON" in json.loads(answer.headers["HX-Trigger"])["toast"]["text"]
    assert world.queue.size() == 0


def test_a_run_that_has_not_ended_is_cancelled(site: Site, world: World) -> None:
    end(world, "ended")
    world.queue.push(make_task("alice", "a"))

    cancelled = post(site, "/do/runs/cancel", id="a")
    ended = post(site, "/do/runs/cancel", id="ended")

    assert world.inspector.runs.get("a").run.status == "cancelled"
    assert said(cancelled).startswith("Cancelled")
    assert said(ended) == "It had already ended: nothing was changed."
    assert [entry[:2] for entry in actions(world)] == [("run.cancel", "a"), ("run.cancel", "ended")]


def test_a_running_run_shows_that_it_is_being_cancelled(site: Site, queue: TaskQueue) -> None:
    queue.push(make_task("alice", "a"))
    claim = claim_one(queue)

    post(site, "/do/runs/cancel", id="a")
    text = get(site, "/runs/a")

    assert "It is being cancelled" in text
    assert 'data-dialog="cancel"' not in text
    assert "being cancelled" in get(site, "/runs")
    queue.bury(claim, "stopped")


def test_a_failed_run_is_discarded(site: Site, world: World) -> None:
    fail(world, "a")

    answer = post(site, "/do/runs/discard", id="a")

    assert (answer.headers["location"], said(answer)) == ("/failed", "Run a was deleted.")
    get(site, "/runs/a", 404)
    assert actions(world) == [("run.discard", "a", "done")]


def test_what_is_not_there_is_not_found(site: Site) -> None:
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
@pytest.mark.one_partition
def test_a_run_with_an_attempt_that_cannot_be_read_is_shown_without_it(
    site: Site, world: World, field: str, value: Any
) -> None:
    world.queue.push(make_task("alice", "spoilt"))
    world.queue.retry(world.claim_one(), error="the first reason")
    world.queue.bury(world.claim_one(), "the second reason")
    lines = cast(bytes, world.redis.hget(world.keys["attempts"], "spoilt")).splitlines()
    assert len(lines) == 2
    spoilt = json.dumps({**json.loads(lines[0]), field: value}).encode()
    world.redis.hset(world.keys["attempts"], "spoilt", spoilt + b"\n" + lines[1])

    text = words(get(site, "/runs/spoilt"))

    assert "the second reason" in text
    assert "the first reason" not in text
    assert site.http.get("/api/v1/scheduler/runs/spoilt").status_code == 200


@pytest.mark.untidy
@pytest.mark.parametrize("field", ["name", "user", "error", "worker", "tenant", "fingerprint"])
@pytest.mark.one_partition
def test_text_that_is_not_utf_8_is_shown_best_effort(site: Site, world: World, field: str) -> None:
    fail(world, "spoilt")
    record = json.loads(world.redis.hget(world.keys["status"], "spoilt") or b"")
    world.redis.hset(world.keys["status"], "spoilt", json.dumps({**record, field: "a\ud800&b"}))

    for path in ("/runs", "/runs/spoilt", "/failed"):
        assert get(site, path)
    assert "a?&b" in words(get(site, "/runs/spoilt"))
    answer = site.http.get("/api/v1/scheduler/runs/spoilt")
    assert (answer.status_code, "a?&b" in answer.text) == (200, True)


# --- failed runs ----------------------------------------------------------------------------------


def test_failed_runs_stand_together_by_their_cause(site: Site, world: World) -> None:
    for number in range(3):
        fail(world, f"disk-{number}", error=f"disk {number} is full", name="backup")
    world.advance(60)
    fail(world, "mail", error="no such mailbox", name="mails.send")

    text = get(site, "/failed")
    rows = [words(row) for row in text.split("<tr>")[2:]]

    assert "OSError: no such mailbox" in rows[0]
    assert "mails.send 1" in rows[0]
    assert "OSError: disk 2 is full" in rows[1]
    assert "backup 3" in rows[1]
    group = re.search(r'href="(/failed\?fingerprint=[0-9a-f]+)">OSError: disk', text)
    assert group
    assert sorted(shown(get(site, group[1]))) == ["disk-0", "disk-1", "disk-2"]


def test_a_queue_without_failures_says_so(site: Site) -> None:
    assert "Nothing has failed" in get(site, "/failed")
    assert "No failed run matches" in get(site, "/failed", user_id="bob")
    assert "No failed run matches" in get(site, "/failed/retry")


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
    web: Web, world: World, query: dict[str, str], found: list[str]
) -> None:
    fail(world, "a")
    world.advance(7200)
    fail(world, "b", "bob", tenant="north")
    end(world, "c")

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
def test_many_are_run_again_part_by_part(site: Site, world: World, scripts: bool) -> None:
    world.patch(failed_page, "PART", 2)
    for number in range(5):
        fail(world, f"disk-{number}")
    fail(world, "other", "bob")

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
    assert "5 runs were retried" in text
    assert world.queue.size() == 5
    assert world.inspector.runs.get("other").run.retried_as is None
    assert actions(world) == [("runs.retry", "(all that match)", "done")] * 3
    assert "No failed run matches" in get(site, "/failed/retry", user_id="alice")


def test_what_is_done_is_what_was_counted_though_time_goes_on(site: Site, world: World) -> None:
    fail(world, "old")
    world.advance(3000)
    fail(world, "new")
    form = form_of(get(site, "/failed/discard", last="1h"))
    assert {name for name in form if name not in ("total", "csrf")} == {"since", "until"}
    world.advance(3000)  # "old" is older than an hour now
    fail(world, "later")
    assert "2 runs were deleted" in post(site, "/do/failed/discard", 200, **form).text
    assert shown(get(site, "/failed", view="runs")) == ["later"]


def test_a_cause_is_discarded(site: Site, world: World) -> None:
    for number in range(3):
        fail(world, f"disk-{number}")
    fail(world, "other", error="no such mailbox")
    cause = world.inspector.runs.get("disk-0").run.fingerprint

    text = get(site, "/failed/discard", fingerprint=cause)
    assert "Delete 3 failed runs?" in text
    answer = post(site, "/do/failed/discard", 200, **form_of(text))

    assert "3 runs were deleted" in answer.text
    assert [run.task_id for run in world.inspector.failed.list()] == ["other"]
    (entry,) = world.inspector.audit.list()
    assert (entry.action, entry.details["done"]) == ("runs.discard", 3)


def test_what_fails_after_the_count_is_left_alone(site: Site, world: World) -> None:
    fail(world, "before")
    text = get(site, "/failed/discard")
    world.advance(1)
    fail(world, "after")

    post(site, "/do/failed/discard", 200, **form_of(text))

    assert [run.task_id for run in world.inspector.failed.list()] == ["after"]


def test_a_full_queue_stops_it_and_it_can_go_on(site: Site, world: World) -> None:
    for number in range(3):
        fail(world, f"disk-{number}")
    world.queue.configure(max_waiting=1)
    text = get(site, "/failed/retry")

    stopped = post(site, "/do/failed/retry", 200, **form_of(text)).text
    world.queue.configure(max_waiting=0)
    done = post(site, "/do/failed/retry", 200, **form_of(stopped)).text

    assert "Stopped" in stopped
    assert "max_waiting is reached" in stopped
    assert 'hx-trigger="load' not in stopped
    assert "3 runs were retried" in done
    assert world.queue.size() == 3


def test_failed_runs_are_exported_as_lines(web: Web, world: World) -> None:
    for number in range(25):
        fail(world, f"disk-{number:02}", payload={"password": "p-1", "n": number})
    fail(world, "other", "bob")

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


def test_there_is_no_other_action_on_many(site: Site) -> None:
    get(site, "/failed/explode", 404)
    post(site, "/do/failed/explode", 404)


# --- who may --------------------------------------------------------------------------------------

ACTS = ("/do/runs/retry", "/do/runs/edit", "/do/runs/cancel", "/do/runs/discard")
MANY = ("/do/failed/retry", "/do/failed/discard")


def test_a_viewer_sees_no_buttons_and_is_refused(web: Web, world: World) -> None:
    fail(world, "a")
    world.queue.push(make_task("alice", "b"))
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
    assert world.inspector.runs.get("a").run.retried_as is None
    assert actions(world) == []


def test_a_read_only_dashboard_has_no_buttons_and_changes_nothing(web: Web, world: World) -> None:
    fail(world, "a")
    site = web(read_only=True)

    text = get(site, "/runs/a")

    assert "data-dialog" not in text
    for path in (*ACTS, *MANY):
        post(site, path, 403, id="a", payload="{}")
    assert world.queue.size() == 0


def test_somebody_of_one_tenant_sees_its_runs_only(web: Web, world: World) -> None:
    fail(world, "ours", "nora", tenant="north")
    fail(world, "theirs", "sam", tenant="south", error="no such mailbox")
    fail(world, "nobodys", "ann", error="no such mailbox")
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
    assert {run.task_id for run in world.inspector.failed.list()} == {"theirs", "nobodys"}
    assert "theirs" not in page("/failed/export")


# --- hostile texts --------------------------------------------------------------------------------


def test_texts_of_users_are_shown_as_text(site: Site, world: World) -> None:
    line = LogLine(0, XSS[:20], XSS)
    fail(world, XSS, XSS, name=XSS, payload={XSS: XSS}, error=XSS, log=(line,), traceback=XSS)
    world.queue.push(make_task(XSS, "waiting", name=XSS, triggered_by=XSS))
    world.queue.push(make_task(XSS, "running", name=XSS))
    world.queue.claim(XSS, limit=2)
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


def test_pages_work_wherever_the_app_is_mounted(web: Web, world: World) -> None:
    fail(world, "a")
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


def test_rows_are_updated_by_id_for_those_who_may_see_them(world: World, web: Web) -> None:
    end(world, "ours", "nora", tenant="north")
    end(world, "theirs", "sam", tenant="south")
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
    world: World, beats: bool, lease: float, after: float, told: tuple[bool, float] | None
) -> None:
    world.queue.push(make_task("alice", "a"))
    world.queue.push(make_task("alice", "waits"))
    if beats:
        WorkerStore(world.queue.link).beat({}, "w")
    world.queue.claim("w", lease=lease)
    world.advance(after)
    found = world.inspector.runs.lost(world.inspector.runs.find(["a", "waits"]))
    expected = (
        {}
        if told is None
        else {"a": LostRun(is_heard=told[0], lease_ends=START + timedelta(seconds=told[1]))}
    )
    assert found == expected
