"""The frame of the web face: who gets in, what protects it, and how actions and errors are told."""

import asyncio
import base64
import functools
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import httpx
import pytest
from helpers.browser import Site, Web
from python_multipart.exceptions import FormParserError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from fairqueue.errors import (
    ConfigurationError,
    FairQueueError,
    Forbidden,
    QueueFull,
    RedisUnavailable,
    StaleVersion,
    UnknownSchedule,
    UnknownWorker,
    plural,
)
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.web import WebServer, create_app, serve
from fairqueue.web.app_state import link
from fairqueue.web.auth import SESSION_COOKIE, SESSION_S, actor_of, inspector_of
from fairqueue.web.dashboard import formatting, shell
from fairqueue.web.dashboard.forms import Done, Form, action, form_of
from fairqueue.web.dashboard.icons import SHAPES, icon
from fairqueue.web.dashboard.login import MAX_SECRET
from fairqueue.web.problems import problem_of

HTML = {"Accept": "text/html"}
HTMX = {"Accept": "text/html", "HX-Request": "true"}


def log_in(site: Site, **who: Any) -> None:
    """Have the site's client log in."""
    answer = site.http.post("/login", data={"secret": site.key(**who)})
    assert answer.status_code == 303


def add(site: Site, path: str, endpoint: Callable[..., Any], *methods: str) -> None:
    """A route of the test's own."""
    site.app.router.routes.append(Route(path, endpoint, methods=list(methods) or ["GET"]))


def who_am_i(request: Request) -> Response:
    actor = actor_of(request)
    return PlainTextResponse(f"{actor.name} {actor.role} {actor.tenant} {actor.via}")


# --- what protects every answer -------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", "/static/app.css", "/nothing", "/login", "/healthz", "/boom"]
)
def test_every_answer_has_the_security_headers(site: Site, path: str) -> None:
    def boom(_: Request) -> Response:
        raise RuntimeError("a secret detail")

    add(site, "/boom", boom)
    headers = site.http.get(path, headers=HTML).headers
    policy = dict(each.split(" ", 1) for each in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"


def test_pages_are_not_kept_and_files_with_a_digest_are(site: Site) -> None:
    page = site.http.get("/")
    assert page.headers["cache-control"] == "no-store"
    paths = re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text)
    assert len(paths) >= 7
    for path in paths:
        answer = site.http.get(path)
        assert (answer.status_code, "immutable" in answer.headers["cache-control"]) == (200, True)


def test_pages_have_no_inline_script_or_style(web: Web) -> None:
    text = web().http.get("/").text
    assert " style=" not in text
    assert not re.search(r"<script(?![^>]* src=)", text)
    assert "<style" not in text
    assert "hx-on" not in text


@pytest.mark.parametrize("name", ["..%2f__init__.py", "%2e%2e%2fshell.py", "nothing.css"])
def test_no_other_files_are_served(web: Web, name: str) -> None:
    assert web().http.get(f"/static/{name}").status_code == 404


def test_a_crash_says_nothing_of_what_is_inside(site: Site) -> None:
    def boom(_: Request) -> Response:
        raise RuntimeError("a secret detail")

    add(site, "/boom", boom)
    answer = site.http.get("/boom", headers=HTML)
    assert answer.status_code == 500
    assert "secret detail" not in answer.text
    assert "see the log of the server" in answer.text


def test_a_body_that_is_too_large_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairqueue.web.app.MAX_BODY_BYTES", 1000)
    add(site, "/do/something", action(lambda *_: Done(text="done")), "POST")
    answer = site.http.post("/do/something", data={"note": "x" * 2000}, headers=HTML)
    assert answer.status_code == 413


# --- who gets in ----------------------------------------------------------------------------------


def test_everything_is_closed_but_a_few_named_paths(web: Web) -> None:
    site = web(auth=True)
    for route in site.app.routes:
        path = re.sub(r"{[^}]*}", "x", getattr(route, "path", ""))
        answer = site.http.get(path, headers={"Accept": "application/json"})
        public = path in ("/healthz", "/readyz", "/login") or path.startswith("/static")
        assert (answer.status_code == 401) is not public, path


def test_who_is_not_known_is_sent_to_the_login_and_back(web: Web) -> None:
    site = web(auth=True)
    answer = site.http.get("/search?q=a%20b", headers=HTML)
    assert (answer.status_code, answer.headers["location"]) == (
        303,
        "/login?next=/search%3Fq%3Da%2520b",
    )
    page = site.http.get(answer.headers["location"])
    assert 'name="next" value="/search?q=a%20b"' in page.text
    back = site.http.post("/login", data={"secret": site.key(), "next": "/search?q=a%20b"})
    assert back.headers["location"] == "/search?q=a%20b"


def test_who_acts_after_the_session_has_ended_logs_in_and_comes_back(web: Web) -> None:
    site = web(auth=True)
    sent = {**HTML, "Sec-Fetch-Site": "same-origin", "Referer": f"{site.url}/search?q=a"}
    answer = site.http.post("/do/something", headers=sent)
    assert answer.headers["location"] == "/login?next=/search%3Fq%3Da"
    by_htmx = site.http.post("/do/something", headers={**sent, "HX-Request": "true"})
    assert by_htmx.status_code == 401
    assert json.loads(by_htmx.headers["hx-trigger"]) == {"fq:session": {}}  # the page stays
    assert "hx-redirect" not in by_htmx.headers


def test_a_session_that_is_over_is_told_at_the_login(web: Web) -> None:
    site = web(auth=True)
    site.http.post("/login", data={"secret": site.key()})
    cookie = site.http.cookies[SESSION_COOKIE]
    site.app.state.fairqueue.access.end(cookie)
    sent = {**HTML, "Sec-Fetch-Site": "same-origin", "Referer": f"{site.url}/runs"}
    looked = site.http.get("/runs", headers=sent).headers["location"]
    assert looked == "/login?next=/runs&why=expired"
    assert "Your session has expired. Log in again" in site.http.get(looked).text
    acted = site.http.post("/do/something", headers=sent).headers["location"]
    assert acted == "/login?next=/runs&why=unsaved"
    assert "nothing was saved" in site.http.get(acted).text
    assert "expired" not in site.http.get("/login?why=<b>").text


def test_the_cookie_outlives_its_session_so_that_its_end_can_be_told(web: Web) -> None:
    answer = (site := web(auth=True)).http.post("/login", data={"secret": site.key()})
    kept = int(answer.headers["set-cookie"].lower().partition("max-age=")[2].partition(";")[0])
    assert kept > SESSION_S


def test_the_api_answers_a_stranger_with_a_problem(web: Web) -> None:
    answer = web(auth=True).http.get("/api/v1/schedules", headers=HTML)
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "how", [lambda key: {"Authorization": f"Bearer {key}"}, lambda key: {"X-API-Key": key}]
)
def test_a_key_lets_a_program_in(web: Web, how: Callable[[str], dict[str, str]]) -> None:
    site = web(auth=True)
    add(site, "/who", who_am_i)
    key = site.key("bot", "viewer", "acme")
    assert site.http.get("/who", headers=how(key)).text == "bot viewer acme rest"


@pytest.mark.parametrize(
    "header",
    ["Bearer fq_wrong", "Basic YTpi", "Bearer", "", "Bearer fq_0123456789abcdef_" + "x" * 43],
)
def test_a_wrong_key_lets_nobody_in(web: Web, header: str) -> None:
    site = web(auth=True)
    log_in(site)  # a wrong header is not made good by a cookie
    headers = {"Authorization": header, "Accept": "application/json"}
    assert site.http.get("/", headers=headers).status_code == 401


def test_logging_in_with_a_key_begins_a_session(web: Web) -> None:
    site = web(auth=True)
    add(site, "/who", who_am_i)
    answer = site.http.post("/login", data={"secret": site.key("ann", "operator")})
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert "Secure" not in cookie  # it came by http
    assert site.http.get("/who").text == "ann operator None web"


@pytest.mark.parametrize(
    ("options", "secure"),
    [
        ({"secure_cookies": True}, True),
        ({"base_url": "https://ops.example"}, True),
        ({"base_url": "https://ops.example", "secure_cookies": False}, False),
    ],
)
def test_cookies_need_https_if_it_is_used(web: Web, options: dict[str, Any], secure: bool) -> None:
    site = web(auth=True, **options)
    cookie = site.http.post("/login", data={"secret": site.key()}).headers["set-cookie"]
    assert ("Secure" in cookie.split("; ")) is secure


def test_logging_out_ends_the_session_for_good(web: Web) -> None:
    site = web(auth=True)
    log_in(site)
    session = site.http.cookies[SESSION_COOKIE]
    answer = site.http.post("/logout", headers={"Sec-Fetch-Site": "same-origin"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert SESSION_COOKIE not in site.http.cookies
    again = site.http.get("/", headers={**HTML, "Cookie": f"{SESSION_COOKIE}={session}"})
    assert again.status_code == 303


def test_a_wrong_key_at_the_login_is_said_so(web: Web) -> None:
    answer = web(auth=True).http.post("/login", data={"secret": "fq_nonsense"})
    assert answer.status_code == 401
    assert "unknown or was revoked" in answer.text
    assert "set-cookie" not in answer.headers


def test_of_a_token_that_is_too_long_the_login_shows_a_part(web: Web) -> None:
    text = web(auth=True).http.get(f"/login?token={'x' * 1000}").text
    assert re.findall("x{100,}", text) == ["x" * MAX_SECRET]
    assert 63 < MAX_SECRET < 1000


def test_looking_at_a_one_time_link_does_not_use_it_up(web: Web) -> None:
    site = web(auth=True)
    path = site.login()
    token = path.partition("token=")[2]
    for _ in range(3):
        assert token in site.http.get(path).text
    first = site.http.post("/login", data={"secret": token})
    second = httpx.post(site.url + "/login", data={"secret": token})
    assert (first.status_code, second.status_code) == (303, 401)


@pytest.mark.parametrize(("host", "presses"), [("localhost", True), ("queue.example", False)])
def test_only_on_this_machine_a_link_logs_in_by_itself(web: Web, host: str, presses: bool) -> None:
    site = web(auth=True)
    page = site.http.get(site.login(), headers={"Host": f"{host}:80"}).text
    assert ("data-auto-submit" in page) is presses


@pytest.mark.parametrize(
    "path",
    ["//evil.example", "https://evil.example", "/\\evil", "evil", "", "/a\nb", "/%5c/../\\x"],
)
def test_a_login_leads_to_pages_of_ours_only(web: Web, path: str) -> None:
    site = web(auth=True)
    answer = site.http.post("/login", data={"secret": site.key(), "next": path})
    where = answer.headers["location"]
    assert where == "/" or (where == path and path.startswith("/%5c") and "\\" not in path)


def test_a_link_on_another_site_leads_in_whoever_is_logged_in(web: Web) -> None:
    site = web(auth=True)
    answer = site.http.get("/", headers={**HTML, "Sec-Fetch-Site": "cross-site"})
    assert (answer.status_code, 'http-equiv="refresh"' in answer.text) == (200, True)
    again = site.http.get("/", headers={**HTML, "Sec-Fetch-Site": "same-origin"})
    assert again.status_code == 303  # and no second time


def test_who_asks_too_often_is_told_when_to_come_again(web: Web) -> None:
    site = web(auth=True, rate=0.01, burst=2)
    headers = {"Authorization": f"Bearer {site.key()}", "Accept": "application/json"}
    answers = [site.http.get("/search", headers=headers) for _ in range(3)]
    assert [each.status_code for each in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 100
    assert answers[2].json()["title"] == "Too many requests"


def test_without_authentication_only_this_machine_is_served(site: Site) -> None:
    assert site.http.get("/").status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example", "[", ""):
        assert site.http.get("/", headers={"Host": host}).status_code in (400, 403)


# --- changes --------------------------------------------------------------------------------------

SAME = {"Sec-Fetch-Site": "same-origin"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (SAME, 303),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "{own}"}, 403),
        ({"Origin": "{own}"}, 303),
        ({}, 403),  # a browser would have said where it comes from
    ],
)
def test_only_our_pages_can_use_a_session(web: Web, headers: dict[str, str], status: int) -> None:
    site = web(auth=True)
    done: list[str] = []

    def act(request: Request, form: Form) -> Done:
        done.append(form.need("id"))
        return Done(text="done")

    add(site, "/do/something", action(act), "POST")
    log_in(site)
    sent = {name: value.format(own=site.url) for name, value in headers.items()}
    answer = site.http.post("/do/something", data={"id": "a"}, headers={**HTML, **sent})
    assert answer.status_code == status
    assert done == (["a"] if status == 303 else [])


@pytest.mark.parametrize("header", ["X-API-Key", "Authorization"])
def test_a_key_counts_beside_a_session_and_others_cannot_send_one(web: Web, header: str) -> None:
    site = web(auth=True)
    seen: list[str] = []

    def act(request: Request, form: Form) -> Done:
        seen.append(inspector_of(request).actor.name)
        return Done(text="done")

    add(site, "/do/something", action(act), "POST")
    log_in(site)
    key = site.key("bot")
    headers = {header: key if header == "X-API-Key" else f"Bearer {key}"}
    post = functools.partial(site.http.post, "/do/something", data={"id": "a"})
    assert post(headers={**HTML, **headers}).status_code == 303
    assert seen == ["bot"]
    cross = {"Sec-Fetch-Site": "cross-site"}
    assert post(headers={**HTML, **headers, **cross}).status_code == 403
    assert seen == ["bot"]


def test_the_address_that_browsers_see_counts_behind_a_proxy(web: Web) -> None:
    site = web(auth=True, base_url="https://ops.example/")
    add(site, "/do/something", action(lambda *_: Done(text="done")), "POST")
    sent = {"X-API-Key": site.key(), "Host": "internal:8000", "Origin": "https://ops.example"}
    assert site.http.post("/do/something", data={"a": "b"}, headers=sent).status_code == 303
    sent["Origin"] = "https://other.example"
    assert site.http.post("/do/something", data={"a": "b"}, headers=sent).status_code == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_read_only_app_changes_nothing(web: Web, method: str) -> None:
    site = web(read_only=True)
    add(site, "/do/something", lambda _: PlainTextResponse("changed"), method)
    for path in ("/do/something", "/api/v1/schedules"):
        answer = site.http.request(method, path, headers={"Accept": "application/json"})
        assert (answer.status_code, answer.json()["title"]) == (403, "Read only")
    assert "Read-only" in site.http.get("/").text


def test_one_can_log_in_and_out_of_a_read_only_app(web: Web) -> None:
    site = web(auth=True, read_only=True)
    log_in(site)
    assert site.http.get("/", headers=HTML).status_code == 200
    assert site.http.post("/logout", headers=SAME).status_code == 303


def test_an_action_says_how_it_went_on_the_next_page_once(site: Site) -> None:
    add(site, "/do/something", action(lambda *_: Done(text="Paused <b>x</b>", to="/")), "POST")
    answer = site.http.post("/do/something", data={"a": "b"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "Paused &lt;b&gt;x&lt;/b&gt;" in site.http.get("/").text
    assert "Paused" not in site.http.get("/").text


def test_an_action_by_htmx_goes_on_without_a_redirect_of_fetch(site: Site) -> None:
    add(site, "/do/something", action(lambda *_: Done(text="done")), "POST")
    sent = {**HTMX, "HX-Current-URL": f"{site.url}/search?q=a"}
    answer = site.http.post("/do/something", data={"a": "b"}, headers=sent)
    assert (answer.status_code, answer.headers["hx-redirect"]) == (204, "/search?q=a")


def test_an_action_may_leave_the_page_as_it_is(site: Site) -> None:
    add(site, "/do/something", action(lambda *_: Done(text="ünicode", stay=True)), "POST")
    answer = site.http.post("/do/something", data={"a": "b"}, headers=HTMX)
    assert "hx-redirect" not in answer.headers
    toast = json.loads(answer.headers["hx-trigger"])["toast"]
    assert toast == {"text": "ünicode", "level": "success"}


ERRORS: list[tuple[FairQueueError, int]] = [
    (Forbidden("no"), 403),
    (UnknownSchedule("none"), 404),
    (UnknownWorker("none"), 404),
    (StaleVersion("old"), 412),
    (QueueFull("full"), 429),
    (ConfigurationError("bad value"), 422),
    (RedisUnavailable("gone"), 503),
    (FairQueueError("else"), 500),
]


@pytest.mark.parametrize(("error", "status"), ERRORS)
def test_an_actions_error_is_a_toast(site: Site, error: FairQueueError, status: int) -> None:
    def act(request: Request, form: Form) -> Done:
        raise error

    add(site, "/do/something", action(act), "POST")
    by_htmx = site.http.post("/do/something", data={"a": "b"}, headers=HTMX)
    assert by_htmx.status_code == status
    assert by_htmx.headers["hx-reswap"] == "none"
    toast = json.loads(by_htmx.headers["hx-trigger"])["toast"]
    assert toast == {"text": str(error), "level": "error"}
    plain = site.http.post("/do/something", data={"a": "b"}, headers=HTML)
    assert (plain.status_code, str(error)[1:] in plain.text) == (status, True)


def test_errors_have_kinds_for_programs() -> None:
    problem = problem_of(UnknownSchedule("there is no schedule 'x'"))
    body = json.loads(bytes(problem.response("/api/v1/schedules/x").body))
    assert body == {
        "type": "urn:fairqueue:problem:unknown-schedule",
        "title": "Unknown schedule",
        "status": 404,
        "detail": "there is no schedule 'x'",
        "instance": "/api/v1/schedules/x",
    }
    assert problem_of(RedisUnavailable("gone")).headers == {"Retry-After": "1"}


def test_a_form_says_what_is_missing_or_wrong(site: Site) -> None:
    def act(request: Request, form: Form) -> Done:
        found = (form.text("a"), form.integer("n"), form.decimal("x"), form.json("j"))
        return Done(text=f"{found} {form.every('id')} {form.has('b')} {form.need('need')}")

    add(site, "/do/something", action(act), "POST")

    def send(**data: Any) -> str:
        answer = site.http.post("/do/something", data=data, headers={**HTMX, "Accept": "*/*"})
        if answer.status_code == 204:
            cookie = answer.cookies["fairqueue_toast"].strip('"')
            return str(json.loads(base64.urlsafe_b64decode(cookie))["text"])
        return f"{answer.status_code} {json.loads(answer.headers['hx-trigger'])['toast']['text']}"

    good = {"a": " x ", "n": "3", "x": "1.5", "j": "[1]", "id": ["p", "q"], "need": "y"}
    assert send(**good) == "('x', 3, 1.5, [1]) ['p', 'q'] False y"
    assert send(need="y", b="on") == "(None, None, None, None) [] True y"
    assert send() == "422 need is required"
    assert send(n="many") == "422 n must be a whole number, not 'many'"
    assert send(x="much") == "422 x must be a number, not 'much'"
    assert send(j="{").startswith("422 j is not valid JSON")


# --- mounting and links ---------------------------------------------------------------------------


def outer(app: Starlette) -> Starlette:
    """An app of somebody else, with ours inside, and a route of the same name."""
    home = Route("/", lambda _: PlainTextResponse("theirs"), name="overview")
    return Starlette(routes=[home, Mount("/ops", routes=[Mount("/queue", app=app)])])


def test_mounted_under_a_prefix_all_links_stay_below_it(web: Web) -> None:
    site = web(auth=True, mounted=outer, prefix="/ops/queue")
    answer = site.http.get("/search", headers=HTML)
    assert answer.headers["location"].startswith("/ops/queue/login?next=/ops/queue/search")
    answer = httpx.post(f"{site.url}/ops/queue/login", data={"secret": site.key()})
    assert answer.headers["location"] == "/ops/queue/"
    assert "Path=/ops/queue" in answer.headers["set-cookie"].split("; ")
    session = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}
    page = site.http.get("/", headers={**HTML, **session}).text
    links = re.findall(r'(?:href|src|action|data-events|data-chart|hx-get)="([^"]+)"', page)
    assert len(links) > 10
    assert [each for each in links if not each.startswith(("/ops/queue/", "#", "?"))] == []
    for each in links:
        if each.startswith("/ops/queue/static"):
            assert httpx.get(site.url + each).status_code == 200


def test_links_hold_ids_of_any_characters(site: Site) -> None:
    seen: list[str] = []

    def thing(request: Request) -> Response:
        seen.append(request.path_params["id"])
        return PlainTextResponse(link(request, "thing", id=request.query_params["of"]))

    site.app.router.routes.append(Route("/things/{id:path}", thing, name="thing"))
    for name in ("a b", "a/b", "a?b#c", "50%", "50%25", "ä€😀", "a&b=c;d+e", "/a/", '"<>'):
        path = site.http.get("/things/x", params={"of": name}).text
        site.http.get(path, params={"of": "x"})
        assert seen[-1] == name


def test_a_queue_without_pages_needs_no_files(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "STATIC", shell.FOLDER / "nowhere")
    site = web(dashboard=False)
    assert site.http.get("/healthz").status_code == 200
    answer = site.http.get("/", headers=HTML)
    assert answer.headers["content-type"] == "application/problem+json"
    with pytest.raises(ConfigurationError, match="make static"):
        web()


def test_a_tenant_is_not_led_to_what_all_tenants_share(web: Web) -> None:
    site = web(auth=True)
    for name in ("workers", "settings", "runs"):
        if name not in {getattr(route, "name", "") for route in site.app.routes}:
            add_named(site, name)
    log_in(site, role="viewer", tenant="acme")
    page = site.http.get("/search", headers=HTML).text
    assert "Tenant acme" in page
    assert 'href="/runs"' in page
    assert 'href="/workers"' not in page
    assert 'href="/settings"' not in page


def add_named(site: Site, name: str) -> None:
    route = Route(f"/{name}", lambda _: PlainTextResponse(name), name=name)
    site.app.router.routes.append(route)


def test_the_inspector_of_a_request_acts_for_its_sender(web: Web) -> None:
    site = web(auth=True)

    def act(request: Request) -> Response:
        actor = inspector_of(request).actor
        return PlainTextResponse(f"{actor.name} {actor.tenant}")

    add(site, "/act", act)
    key = site.key("bot", "viewer", "acme")
    assert site.http.get("/act", headers={"X-API-Key": key}).text == "bot acme"


# --- health ---------------------------------------------------------------------------------------


def test_without_redis_it_is_healthy_not_ready(own_server: Callable[..., EmbeddedServer]) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url, timeout=0.3) as queue:
        app = create_app(queue)
        with WebServer(app) as web:
            server.stop()
            healthy, ready = httpx.get(f"{web.url}/healthz"), httpx.get(f"{web.url}/readyz")
            page = httpx.get(
                web.url, headers={**HTML, "X-API-Key": "fq_" + "0" * 16 + "_" + "x" * 43}
            )
    assert (healthy.status_code, healthy.json()) == (200, {"status": "ok"})
    assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
    assert all(server.url not in reason for reason in ready.json()["reasons"])
    assert ready.json()["reasons"] != []
    assert page.status_code == 503


def test_asking_for_readiness_again_and_again_is_not_felt_by_redis(site: Site) -> None:
    asked: list[int] = []
    system = site.app.state.fairqueue.inspector.system
    ready = system.ready

    def count() -> list[str]:
        asked.append(1)
        return list(ready())

    system.ready = count
    for _ in range(20):
        assert site.http.get("/readyz").status_code in (200, 503)
    assert len(asked) < 20


# --- serving --------------------------------------------------------------------------------------


def test_an_address_that_is_taken_is_said_so(site: Site, queue: TaskQueue) -> None:
    app = create_app(queue)
    with pytest.raises(ConfigurationError, match="choose another host or port"):
        serve(app, "127.0.0.1", site.server.port)
    with pytest.raises(ConfigurationError, match="port"):
        WebServer(app, "127.0.0.1", 70_000)


# --- writing for people ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0 ms"),
        (0.0004, "0 ms"),
        (0.34, "340 ms"),
        (0.9999, "1 s"),
        (4.25, "4.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (185, "3 min 5 s"),
        (3600, "1 h"),
        (3725, "1 h 2 min"),
        (86_399, "23 h 59 min"),
        (187_200, "2 d 4 h"),
        (-5, "−5 s"),
    ],
)
def test_durations_are_told_in_the_units_that_matter(seconds: float | None, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0 %"), (0.1234, "12.3 %"), (1, "100 %"), (0.9996, "100 %")],
)
def test_shares_are_told_in_percent(value: float | None, text: str) -> None:
    assert formatting.share(value) == text


def test_numbers_sizes_and_counts_are_told_with_their_units() -> None:
    assert [formatting.number(12345), formatting.number(None), formatting.number(1.25, 1)] == [
        "12,345",
        "–",
        "1.2",
    ]
    assert [formatting.size(n) for n in (0, 1536, 3 * 1024**2, None)] == [
        "0 B",
        "1.5 KiB",
        "3.0 MiB",
        "–",
    ]
    assert [plural(n, "task") for n in (0, 1, 1200)] == ["0 tasks", "1 task", "1,200 tasks"]


def test_moments_are_for_scripts_and_for_those_without() -> None:
    at = datetime(2024, 5, 1, 12, 30, 15, tzinfo=UTC)
    assert formatting.countdown(at) == (
        '<time datetime="2024-05-01T12:30:15.000Z" data-time="countdown">'
        "2024-05-01 12:30:15 UTC</time>"
    )
    assert formatting.moment(None) == "–"


def test_icons_are_drawn_and_hidden_from_readers() -> None:
    assert all('aria-hidden="true"' in icon(name) for name in SHAPES)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (4.25, "4.2 s"), (757, "12.6 min"), (3597, "1.0 h"), (90_000, "1.0 d")],
)
def test_short_durations_have_one_unit(seconds: float | None, text: str) -> None:
    assert formatting.brief(seconds) == text


def test_a_form_that_cannot_be_read_is_a_bad_request_whatever_reads_it() -> None:
    class Sent:
        async def form(self, **limits: int) -> None:
            raise FormParserError("Expected boundary character 45, got 0 at index 2")

    with pytest.raises(HTTPException, match="malformed") as told:
        asyncio.run(form_of(cast(Request, Sent()), max_files=0, max_fields=1))
    assert told.value.status_code == 400
