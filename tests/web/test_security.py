"""What somebody hostile would try: other tenants' secrets, open doors, ways to wear us out."""

import asyncio
import html
import logging
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from helpers.browser import Site, Web
from helpers.commands import Cli
from helpers.schedules import THURSDAY
from helpers.tasks import claim_one, make_task
from starlette.applications import Starlette

from fairqueue.access.credentials import AccessStore, Actor
from fairqueue.cli.logs import TextFormatter
from fairqueue.clock import ManualClock
from fairqueue.errors import ConfigurationError, Forbidden, QueueFull, StaleVersion
from fairqueue.inspection import Inspector
from fairqueue.inspection.masking import MASK, mask
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import LogLine, Report
from fairqueue.web import create_app
from fairqueue.web.auth import SESSION_COOKIE
from fairqueue.web.cache import Cache
from fairqueue.web.dashboard.formatting import command, options
from fairqueue.web.live_updates import MAX_OF_ONE, MAX_VIEWERS, LiveUpdates
from fairqueue.web.rate_limit import MAX_KNOWN, RateLimiter

PATIENCE_S = 60.0
AT_ONCE = 20  # sessions of one key, as lua/access/begin_session.lua has it

ADMIN = Actor(name="ann")
OPERATOR = Actor(name="ole", role="operator")
NORTH = Actor(name="nora", tenant="north")
SOUTH = Actor(name="sam", tenant="south")

START = THURSDAY


@pytest.fixture
def inspector(queue: TaskQueue) -> Inspector:
    return Inspector(queue, ADMIN)


@pytest.fixture
def store(queue: TaskQueue) -> AccessStore:
    return AccessStore(queue.link)


def add(inspector: Inspector, schedule_id: str, user_id: str, **fields: Any) -> None:
    inspector.schedules.add(
        schedule_id=schedule_id, cron_expr="0 9 * * *", user_id=user_id, **fields
    )


def finish_with_a_line(inspector: Inspector, schedule_id: str, message: str) -> str:
    """Run a schedule once; its run logs a line."""
    task_id = inspector.schedules.trigger(schedule_id)
    claim = claim_one(inspector.queue)
    lines = (LogLine(1000, "info", message),)
    inspector.queue.finish_many([(claim, None, Report(seconds=1.0, log=lines))])
    return task_id


def fail_one(queue: TaskQueue, **fields: Any) -> str:
    """A run that has failed."""
    queue.push(make_task(task_id="t", **fields))
    queue.bury(claim_one(queue), "no")
    return "t"


# --- tenants --------------------------------------------------------------------------------------


def test_the_id_of_another_tenants_old_schedule_tells_nothing(inspector: Inspector) -> None:
    north, south = inspector.acting_as(NORTH), inspector.acting_as(SOUTH)
    add(inspector, "report", "nick", tenant="north")
    theirs = finish_with_a_line(north, "report", "the password is swordfish")
    assert [each.message for each in north.schedules.logs("report")]
    north.schedules.remove("report")
    add(inspector, "report", "susan", tenant="south")
    own = finish_with_a_line(south, "report", "hello")

    view = south.schedules.get("report")
    (listed,) = south.schedules.list()
    chart = south.schedules.history_chart("report", 1)

    assert [line.message for line in south.schedules.logs("report")] == ["hello"]
    assert [each.task_id for each in view.outcomes] == [own] != [theirs]
    assert listed == view
    assert [day.succeeded for day in chart] == [1]
    assert len(inspector.schedules.get("report").outcomes) == 2  # who sees all sees both


@pytest.mark.one_partition
def test_a_schedule_that_becomes_anothers_before_the_change_is_left_alone(
    inspector: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    north = inspector.acting_as(NORTH)
    add(inspector, "report", "nick", tenant="north")
    look: Callable[..., Any] = north.schedules._own

    def moved_meanwhile(*arguments: str) -> Any:
        seen = look(*arguments)
        inspector.users.move("nick", "south", tenant="north")
        inspector.schedules.update("report", {"tenant": "south", "payload": {"of": "south"}})
        return seen

    monkeypatch.setattr(north.schedules, "_own", moved_meanwhile)
    with pytest.raises(StaleVersion):
        north.schedules.update("report", {"payload": {"of": "north"}})
    monkeypatch.setattr(north.schedules, "_own", look)
    inspector.schedules.update("report", {"tenant": "north"})
    monkeypatch.setattr(north.schedules, "_own", moved_meanwhile)
    with pytest.raises(StaleVersion):
        north.schedules.remove("report")

    assert inspector.schedules.get("report").schedule.payload == {"of": "south"}


# --- secrets --------------------------------------------------------------------------------------


def test_who_may_not_see_a_secret_cannot_send_it_elsewhere(inspector: Inspector) -> None:
    secret = {"url": "https://good.example", "token": "t-123"}
    stolen = {"url": "https://evil.example", "token": MASK}
    add(inspector, "call", "alice", payload=secret)
    fail_one(inspector.queue, payload=secret)
    operator = inspector.acting_as(OPERATOR)

    with pytest.raises(Forbidden, match="need the role admin"):
        operator.schedules.trigger("call", payload=stolen)
    with pytest.raises(Forbidden, match="need the role admin"):
        operator.runs.edit_and_retry("t", stolen)

    new_id = operator.runs.edit_and_retry("t", secret | {"token": MASK})  # as it was: that is fine
    assert claim_one(inspector.queue).task.payload == secret
    assert inspector.runs.get(new_id).run.retry_of == "t"


def test_an_operator_may_choose_arguments_that_are_all_their_own(inspector: Inspector) -> None:
    add(inspector, "call", "alice", payload={"token": "t-123", "n": 1})

    inspector.acting_as(OPERATOR).schedules.trigger("call", payload={"n": 2})

    assert claim_one(inspector.queue).task.payload == {"n": 2}


def test_no_text_takes_long_to_mask() -> None:
    program = """
from fairqueue.inspection.masking import mask
for text in ("a." * 120_000 + " ://", "://" * 80_000, "://" + "a" * 250_000, "://@" * 60_000):
    mask({"url": text})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pa@ss@host:1/0", "redis://***@host:1/0"),
        ("see https://u:p@a.example/x?q=1", "see https://***@a.example/x?q=1"),
        ("https://a.example/@me", "https://a.example/@me"),
    ],
)
def test_passwords_in_urls_are_masked_to_their_end(url: str, shown: str) -> None:
    assert mask({"url": url}) == {"url": shown}


def test_a_secret_file_is_private(redis_url: str, queue: TaskQueue, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    before = os.umask(0o022)
    try:
        Cli(redis_url).ok("export", str(file))
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


# --- logging in -----------------------------------------------------------------------------------


def test_a_key_cannot_begin_sessions_without_end(store: AccessStore, clock: ManualClock) -> None:
    eager = store.create_key("eve", "viewer", by="root").secret
    other = store.create_key("bob", "viewer", by="root").secret
    for _ in range(AT_ONCE):
        assert store.redeem(eager) is not None

    with pytest.raises(QueueFull, match="too many logins with this key: try again in 60 s"):
        store.redeem(eager)

    assert store.redeem(other) is not None  # nobody else has to wait
    assert store.admit(eager, rate=1.0, burst=1).actor is not None  # nor do its requests
    clock.advance(60)
    assert store.redeem(eager) is not None


def test_a_wrong_secret_uses_up_no_logins_of_its_owner(store: AccessStore) -> None:
    secret = store.create_key("bob", "viewer", by="root").secret
    wrong = secret[:-1] + ("A" if secret[-1] != "A" else "B")
    for _ in range(2 * AT_ONCE):
        assert store.redeem(wrong) is None

    assert store.redeem(secret) is not None


def test_a_revoked_key_leaves_nothing_of_its_pace(store: AccessStore, queue: TaskQueue) -> None:
    key = store.create_key("bob", "viewer", by="root")
    store.redeem(key.secret)
    store.admit(key.secret, rate=1.0, burst=1)
    store.revoke(key.info.key_id)
    assert queue.link.ask(("HLEN", queue.keys["api_pace"])) == [0]


def test_too_many_logins_get_an_answer_that_says_so(web: Web) -> None:
    site = web(auth=True)
    secret = site.key()
    answers = [httpx.post(f"{site.url}/login", data={"secret": secret}) for _ in range(AT_ONCE + 1)]
    assert [each.status_code for each in answers] == [303] * AT_ONCE + [429]
    assert "too many logins with this key" in answers[-1].text
    assert "retry-after" in answers[-1].headers


def test_an_address_cannot_try_secrets_without_end(web: Web) -> None:
    site = web(auth=True)
    wrong = f"fq_{'0' * 16}_{'A' * 43}"
    answers = [site.http.post("/login", data={"secret": wrong}).status_code for _ in range(40)]
    assert (answers[0], answers[-1]) == (401, 429)
    assert set(answers) == {401, 429}


def test_a_pace_admits_sometimes_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("fairqueue.web.rate_limit.time.monotonic", lambda: now)
    limiter = RateLimiter(2.0, 3)
    assert [limiter.wait("a") for _ in range(4)] == [0.0, 0.0, 0.0, 2.0]
    assert limiter.wait("b") == 0.0
    now += 2
    assert (limiter.wait("a"), limiter.wait("a")) == (0.0, 2.0)
    for number in range(MAX_KNOWN):
        limiter.wait(f"other {number}")
    assert limiter.wait("a") == 0.0
    assert len(limiter._free) == MAX_KNOWN


def test_a_refused_login_is_logged_safely(web: Web, caplog: pytest.LogCaptureFixture) -> None:
    site = web(auth=True)
    wrong = f"fq_{'0' * 16}_{'A' * 43}"
    site.http.post("/login", data={"secret": wrong})
    (record,) = (each for each in caplog.records if vars(each).get("event") == "login_refused")
    assert (vars(record)["address"], vars(record)["key"]) == ("127.0.0.1", "0" * 16)
    assert wrong not in str(vars(record))


def test_a_change_is_in_the_log_also_when_the_audit_log_has_lost_it(
    inspector: Inspector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    inspector.acting_as(SOUTH).tasks.push(user_id="susan", task_id="t")
    (record,) = (each for each in caplog.records if vars(each).get("event") == "change_begun")
    told = {name: vars(record)[name] for name in ("actor", "action", "target", "tenant", "via")}
    assert told == {
        "actor": "sam",
        "action": "task.push",
        "target": "south~t",
        "tenant": "south",
        "via": "python",
    }


# --- streams --------------------------------------------------------------------------------------


async def begin(live_updates: LiveUpdates, key_id: str | None) -> Any:
    stream = live_updates.stream(None, key_id)
    await anext(stream)
    return stream


def test_one_session_cannot_take_all_streams() -> None:
    async def scene() -> None:
        live_updates = LiveUpdates(lambda tenant: {}, poll=3600)
        streams = [await begin(live_updates, "eve") for _ in range(MAX_OF_ONE)]
        assert (
            live_updates.is_full("eve"),
            live_updates.is_full("bob"),
            live_updates.is_full(None),
        ) == (True, False, False)
        streams += [await begin(live_updates, None) for _ in range(MAX_VIEWERS - MAX_OF_ONE)]
        assert (live_updates.is_full("bob"), live_updates.is_full(None)) == (True, True)
        live_updates.close()
        for stream in streams:
            await stream.aclose()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_the_stream_of_a_key_that_was_revoked_ends_before_its_time(store: AccessStore) -> None:
    kept, gone = (store.create_key(name, "viewer", by="root") for name in ("bob", "eve"))
    session = store.redeem(gone.secret)
    assert session is not None

    async def scene() -> None:
        live_updates = LiveUpdates(lambda tenant: {}, holding=store.holding, poll=0.01, check=0.0)
        staying = await begin(live_updates, kept.info.key_id)
        ending = [await begin(live_updates, each.info.key_id) for each in (gone, session)]
        store.revoke(gone.info.key_id)
        for stream in ending:
            async for _ in stream:  # until its end
                pass
        assert live_updates.viewers == 1
        live_updates.close()
        await staying.aclose()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_credentials_end_with_their_key_or_time(store: AccessStore, clock: ManualClock) -> None:
    key = store.create_key("bob", "viewer", by="root")
    short = store.create_key("eve", "viewer", expires_in=10, by="root").info.key_id
    session = store.redeem(key.secret)
    assert session is not None
    ids = {key.info.key_id, session.info.key_id, short}

    assert store.holding([*ids, "0" * 16]) == ids
    clock.advance(11)
    assert store.holding(ids) == ids - {short}
    # As if the caller had died before it revoked the rest.
    store.link.run("revoke_credentials", op="x", rest=[key.info.key_id])
    assert store.holding(ids) == store.holding([]) == set()


# --- doors ----------------------------------------------------------------------------------------


async def ask_from(app: Starlette, address: str, host: str = "localhost") -> int:
    transport = httpx.ASGITransport(app=app, client=(address, 50_000))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return (await client.get("/api/v1/settings", headers={"Host": host})).status_code


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("127.0.0.1", 200),
        ("127.9.9.9", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("192.0.2.7", 403),
        ("2001:db8::7", 403),
        ("::ffff:192.0.2.7", 403),
        ("fe80::7%eth0", 403),
        ("nonsense", 403),
        ("testclient", 200),  # as Starlette's own calls itself
    ],
)
def test_a_host_header_alone_opens_nothing(queue: TaskQueue, address: str, status: int) -> None:
    app = create_app(queue, auth=False, dashboard=False)
    assert asyncio.run(ask_from(app, address)) == status
    assert asyncio.run(ask_from(app, address, "evil.example")) == 403


@pytest.mark.parametrize(
    "base_url", ["queue.example.com", "/ops", "javascript:alert(1)", "https://", "http://["]
)
def test_a_base_url_that_is_none_is_refused(queue: TaskQueue, base_url: str) -> None:
    with pytest.raises(ConfigurationError, match="base_url"):
        create_app(queue, base_url=base_url)


@pytest.mark.parametrize("origin", ["null", "", "://", "http://", "http://[", "[", "evil.example"])
def test_an_origin_that_is_nobodys_changes_nothing(web: Web, origin: str) -> None:
    site = web(base_url="https://queue.example.com")
    for path in ("/login", "/do/users/pause", "/api/v1/users/a/pause"):
        assert site.http.post(path, headers={"Origin": origin}).status_code == 403
    answer = send(site, "POST /login HTTP/1.1", "Host:", f"Origin: {origin}")
    assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400"))


def test_an_origin_of_ours_may_change_things(web: Web) -> None:
    site = web(base_url="https://queue.example.com/ops/")
    for origin in (site.url, "https://queue.example.com"):
        answer = site.http.post("/api/v1/users/a/pause", headers={"Origin": origin})
        assert answer.status_code == 200


def send(site: Site, *lines: str) -> bytes:
    """Send the head of a request as it is; the answer to it."""
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=PATIENCE_S) as client:
        client.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1"))
        parts = []
        while part := client.recv(65_536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("line", "headers"),
    [
        ("GET /nothing", ["Referer: http://["]),
        ("GET /nothing", ["HX-Current-URL: http://[", "HX-Request: true"]),
        ("GET /login", ["Host: ["]),
        ("GET /login?next=//evil.example&token=" + "x" * 1000, []),
        ("GET /static/" + "a" * 3000, []),
        ("GET /static/%00", []),
        ("GET /static/..%2f..%2fapp.py", []),
        ("GET /static/..", []),
        ("GET /api/v1/scheduler%2Fjobs", []),
        ("GET /api%2Fv1/health", []),
    ],
)
def test_nonsense_from_anybody_is_no_crash(web: Web, line: str, headers: list[str]) -> None:
    site = web(auth=True)
    host = [] if any(each.startswith("Host") for each in headers) else ["Host: 127.0.0.1"]
    answer = send(site, f"{line} HTTP/1.1", *host, *headers)
    assert answer.split(b" ")[1] in (b"200", b"303", b"400", b"401", b"404")
    assert b"evil.example" not in answer


def test_json_that_is_too_deep_is_told_as_such(web: Web) -> None:
    data = {"id": "x", "payload": "[" * 100_000}
    answer = web().http.post("/do/runs/edit", data=data, headers={"Accept": "text/html"})
    assert (answer.status_code, "is not valid JSON" in answer.text) == (422, True)


def test_a_session_cookie_opens_nothing_for_other_sites(web: Web) -> None:
    site = web(auth=True)
    site.http.post("/login", data={"secret": site.key()})
    assert SESSION_COOKIE in site.http.cookies
    path = "/api/v1/users/a/pause"
    for headers in ({}, {"Origin": "null"}, {"Sec-Fetch-Site": "same-site", "Origin": site.url}):
        assert site.http.post(path, headers=headers).status_code == 403
    for method in ("X-HTTP-Method-Override", "X-Method-Override"):
        assert site.http.get(path, headers={method: "POST"}).status_code == 405
    assert site.http.post(path, headers={"Origin": site.url}).status_code == 200


# --- memory ---------------------------------------------------------------------------------------


def test_what_fails_leaves_nothing_in_a_memo() -> None:
    cache = Cache(60.0)
    for number in range(100):
        with pytest.raises(ZeroDivisionError):
            cache.get(number, lambda: 1 // 0)
    assert cache._making == {}


# --- terminals ------------------------------------------------------------------------------------


def test_a_traceback_in_the_log_tells_a_terminal_nothing() -> None:
    try:
        raise ValueError("\x1b]0;evil\x07 \x1b[2J\r2026-01-01 INFO all is well")
    except ValueError:
        about = ("fairqueue.worker", logging.WARNING, __file__, 1, "task_failed", None)
        record = logging.LogRecord(*about, sys.exc_info())

    lines = TextFormatter().format(record).split("\n")

    assert lines[-1].startswith(r"ValueError: \x1b]0;evil\x07 \x1b[2J\r2026")
    assert all(line.isprintable() for line in lines)


# --- command lines that pages show ----------------------------------------------------------------


@pytest.mark.parametrize("schedule_id", ["--all", "--yes", "--url=redis://elsewhere", "; rm -rf ~"])
def test_a_command_line_that_is_copied_runs_nothing_else(
    web: Web, inspector: Inspector, schedule_id: str
) -> None:
    inspector.schedules.add(cron_expr="0 9 * * *", user_id="alice", schedule_id=schedule_id)

    text = html.unescape(web().http.get(f"/schedules/{quote(schedule_id, safe='')}").text)

    lines = re.findall(r">(fairqueue schedules [^<]*)</code>", text)
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert words[-1] == schedule_id
        assert not schedule_id.startswith("-") or words[-2] == "--"


def test_a_value_of_an_option_is_no_option() -> None:
    assert command("runs", "list", *options(user="--all")) == "fairqueue runs list --user=--all"


def test_a_long_text_that_is_no_duration_is_refused_at_once(web: Web) -> None:
    answer = web().http.get(
        "/do/schedules/preview", params={"kind": "every", "every": "1" * 9000 + "x"}
    )

    assert answer.status_code < 500


def test_links_hold_ids_that_look_like_ways(web: Web, inspector: Inspector) -> None:
    inspector.schedules.add(cron_expr="* * * * *", user_id="u", schedule_id="a/../../settings")

    text = web().http.get("/").text

    assert "/schedules/a%2F..%2F..%2Fsettings" in text
