"""Take a screenshot of each screen of the demo, for the README: `make screenshots`.

Starts the demo, logs in with its one-time link, lets it run for a while and visits every screen.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDTH, HEIGHT = 1280, 860
RUNS_MS = 100_000  # how long the demo runs before the first screenshot, so that charts have data

# screenshot -> path; {} is replaced by the first row of the list
SCREENS = {
    "overview": "/?window=15m",
    "schedules": "/schedules",
    "schedule": "/schedules {}",
    "schedule-new": "/new/schedule",
    "tenants": "/tenants",
    "tenant": "/tenants {}",
    "users": "/users",
    "user": "/users {}",
    "runs": "/runs",
    "run": "/runs {}",
    "failed": "/failed",
    "workers": "/workers",
    "audit": "/audit",
    "settings": "/settings",
}


def main() -> int:
    """Take all screenshots, or those that are named."""
    wanted = sys.argv[1:] or list(SCREENS)
    IMAGES.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fairqueue", "up", "--demo", "--port", "0"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        login = read_login(demo)
        with sync_playwright() as playwright:
            path = os.environ.get("FAIRQUEUE_CHROMIUM") or next(
                filter(None, map(shutil.which, NAMES))
            )
            browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
            take_all(browser, login, wanted)
            browser.close()
    finally:
        demo.send_signal(signal.SIGINT)
        demo.wait(60)
    return 0


def read_login(demo: "subprocess.Popen[str]") -> str:
    """Return the one-time link that the demo prints."""
    assert demo.stdout is not None
    for line in demo.stdout:
        if found := re.search(r"https?://\S+/login\?token=\S+", line):
            return found[0]
    raise SystemExit("the demo ended before it printed its address")


def take_all(browser: Browser, login: str, wanted: list[str]) -> None:
    """Log in, wait until there is data, and visit the screens."""
    root = login.partition("/login")[0]
    context = browser.new_context(
        viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(login)
    page.wait_for_url(root + "/")  # a link to this machine logs in directly
    page.wait_for_timeout(RUNS_MS)
    for name in wanted:
        visit(page, root, SCREENS[name])
        page.screenshot(path=str(IMAGES / f"{name}.png"))
        print(f"docs/images/{name}.png")
    if "overview" in wanted:
        page.emulate_media(color_scheme="dark")
        visit(page, root, SCREENS["overview"])
        page.screenshot(path=str(IMAGES / "overview-dark.png"))
        print("docs/images/overview-dark.png")


def visit(page: Page, root: str, path: str) -> None:
    """Open a screen; for the page of one object, the first row of its list."""
    route, _, row = path.partition(" ")
    page.goto(root + route)
    page.wait_for_load_state("load")
    if row:
        page.locator("main table tbody th a, main table tbody td a").first.click()
        page.wait_for_load_state("load")
    page.wait_for_timeout(1500)  # charts are drawn


if __name__ == "__main__":
    sys.exit(main())
