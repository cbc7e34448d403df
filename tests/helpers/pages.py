"""Request pages, send forms and read toasts."""

import base64
import html
import json
import re
from typing import Any

import httpx

from fairqueue.web.dashboard.shell import TOAST_COOKIE
from helpers.browser import Site
from helpers.world import World

HTML = {"Accept": "text/html"}
HTMX = {"Accept": "text/html", "HX-Request": "true"}


def get(site: Site, path: str, status: int = 200, /, **query: Any) -> str:
    """The text of a page."""
    answer = site.http.get(path, params=query or None, headers=HTML)
    assert answer.status_code == status, answer.text
    return answer.text


def post(site: Site, path: str, status: int = 303, /, **fields: Any) -> httpx.Response:
    """Send a form as a browser without scripts would."""
    answer = site.http.post(path, data=fields, headers=HTML)
    assert answer.status_code == status, answer.text
    return answer


def send(site: Site, path: str, /, **fields: Any) -> httpx.Response:
    """Send a form as htmx does."""
    return site.http.post(path, data=fields, headers=HTMX)


def toast(answer: httpx.Response) -> str:
    """The toast that an answer to htmx triggers."""
    return str(json.loads(answer.headers["HX-Trigger"])["toast"]["text"])


def key(site: Site, **who: Any) -> dict[str, str]:
    """Headers with a new API key."""
    return {**HTML, "Authorization": f"Bearer {site.key(**who)}"}


def said(answer: httpx.Response) -> str:
    """The toast that the next page shows."""
    text: str = json.loads(base64.urlsafe_b64decode(answer.cookies[TOAST_COOKIE]))["text"]
    return text


def words(text: str) -> str:
    """The text of a page from its <main> on, without tags."""
    body = text[max(0, text.find("<main")) :].replace("<wbr>", "")
    plain = html.unescape(re.sub(r"<[^>]+>", " ", body))
    return re.sub(r"\s+", " ", plain)


def add(world: World, schedule_id: str = "nine", **fields: Any) -> str:
    """Add a schedule through the inspector, by default daily at nine."""
    rule = {} if {"every", "at"} & fields.keys() else {"cron_expr": "0 9 * * *"}
    given = {**rule, "user_id": "alice", "name": "report", **fields}
    return world.inspector.schedules.add(schedule_id=schedule_id, **given)
