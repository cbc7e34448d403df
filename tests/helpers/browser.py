"""Fixtures of the web tests: a real server with a real queue behind it, and a real browser.

site = web(auth=False)              # create_app's options; uvicorn in a thread, a free port
site.http.get("/healthz")           # httpx
page = open_page(site, "/runs")     # Chromium, a context of its own
check_page(page)                    # no console error, no CSP violation, no axe finding
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from starlette.applications import Starlette

from fairqueue.access.credentials import AccessStore, Actor
from fairqueue.queue.queue import TaskQueue
from fairqueue.web import WebServer, create_app
from fairqueue.web.dashboard.shell import STATIC

ROOT = Path(__file__).resolve().parents[2]
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# What is still being faded in has less contrast than it will have.
FINISH = """() => document.getAnimations()
    .filter((each) => each.effect.getComputedTiming().endTime !== Infinity)
    .forEach((each) => each.finish())"""
# What WCAG 2.2 AA asks for, and what axe calls best practice.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PATIENCE_MS = 30_000
expect.set_options(timeout=PATIENCE_MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A served app, and a client of it that follows no redirects."""

    app: Starlette
    server: WebServer
    http: httpx.Client

    @property
    def url(self) -> str:
        return self.server.url

    def key(self, name: str = "ann", role: str = "admin", tenant: str | None = None) -> str:
        """The secret of a new API key."""
        access: AccessStore = self.app.state.fairqueue.access
        return access.create_key(name, role, tenant, by="test").secret

    def login(self, name: str = "ann", role: str = "admin", tenant: str | None = None) -> str:
        """The path of a one-time link."""
        actor = Actor(name=name, role=role, tenant=tenant)
        return f"/login?token={self.app.state.fairqueue.access.create_login(actor)}"


Web = Callable[..., Site]


@pytest.fixture
def web(queue: TaskQueue) -> Iterator[Web]:
    """Serve the test's queue with the options of `create_app`, or an app that has it mounted.

    `auth=False` unless told otherwise; `mounted` makes the outer app from ours.
    """
    with ExitStack() as servers:

        def start(
            *,
            mounted: Callable[[Starlette], Starlette] | None = None,
            prefix: str = "",
            **options: Any,
        ) -> Site:
            if options.get("dashboard", True) and not (STATIC / "versions.json").exists():
                pytest.fail("the files of the dashboard are missing: run make static", False)
            app = create_app(queue, **{"auth": False, **options})
            server = servers.enter_context(WebServer(mounted(app) if mounted else app))
            client = httpx.Client(base_url=server.url + prefix, timeout=30)
            return Site(app=app, server=server, http=servers.enter_context(client))

        yield start


@pytest.fixture
def site(web: Web) -> Site:
    """The test's queue, served with the default options."""
    return web()


# --- the browser ----------------------------------------------------------------------------------


def find_browser() -> str | None:
    """Return the path of an installed Chromium, or None."""
    named = os.environ.get("FAIRQUEUE_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One browser for all tests. Without one they are skipped; in CI that is a failure."""
    path = find_browser()
    if path is None:
        reason = "no Chromium here: `make browser` installs one, or set FAIRQUEUE_CHROMIUM"
        if os.environ.get("CI", "").lower() in ("true", "1"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield browser
        asyncio._set_running_loop(loop)
        browser.close()


@contextmanager
def _loop_of(browser: Browser) -> Iterator[None]:
    """Playwright keeps an event loop in this thread: for its tests only, others have their own."""
    asyncio._set_running_loop(browser._impl_obj._loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(None)


@dataclass
class Notes:
    """Errors that a page reported while it was open."""

    errors: list[str] = field(default_factory=list)

    def on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.type}: {message.text}")

    def on_error(self, error: Exception) -> None:
        self.errors.append(f"exception: {error}")


NOTES: dict[int, Notes] = {}

Open = Callable[..., Page]


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Open]:
    """Open a path of a site in a new browser context."""
    with _loop_of(chromium), ExitStack() as contexts:

        def start(
            site: Site | str,
            path: str = "/",
            *,
            width: int = 1280,
            height: int = 900,
            theme: str = "light",
            **options: Any,
        ) -> Page:
            context = chromium.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if theme == "dark" else "light",
                timezone_id="Europe/Berlin",
                locale="en-GB",
                **options,
            )
            contexts.callback(context.close)
            context.set_default_timeout(PATIENCE_MS)
            page = context.new_page()
            notes = NOTES[id(page)] = Notes()
            contexts.callback(NOTES.pop, id(page), None)
            page.on("console", notes.on_console)
            page.on("pageerror", notes.on_error)
            url = site if isinstance(site, str) else site.url
            page.goto(url + path, wait_until="load")
            return page

        yield start


def check_page(page: Page, ignore: tuple[str, ...] = ()) -> None:
    """Assert that a page has no errors in its current state.

    No error or warning in the console (where violations of the content security policy show), no
    finding of axe, and nothing wider than the window. `ignore` are texts of expected errors, such
    as the status of a refused form.
    """
    errors = [e for e in NOTES[id(page)].errors if not any(text in e for text in ignore)]
    assert not errors, errors
    page.evaluate(FINISH)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(
        "rules => axe.run(document, {runOnly: rules, resultTypes: ['violations']})", RULES
    )
    findings = [
        f"{each['id']} ({each['help']}): {node['html'][:200]} {node['failureSummary']}"
        for each in found["violations"]
        for node in each["nodes"]
    ]
    assert not findings, "\n".join(findings)
    wide = page.evaluate("document.scrollingElement.scrollWidth - window.innerWidth")
    assert wide <= 0, f"the page is {wide} pixels wider than the window"


def settle(page: Page) -> None:
    """Wait until the stream has brought numbers and all charts are drawn."""
    # By locators: what waits for a script's own condition needs eval, which our policy forbids.
    expect(page.locator("html")).to_have_attribute("data-fresh", "true")
    expect(page.locator("figure[data-chart]:not([data-ready])")).to_have_count(0)
