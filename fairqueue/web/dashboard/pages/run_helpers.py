"""What the pages about runs share: filters, time windows and command lines."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final

from markupsafe import escape
from starlette.responses import HTMLResponse

from fairqueue.errors import InvalidInput
from fairqueue.inspection.runs import RunFilters
from fairqueue.web.dashboard.formatting import options
from fairqueue.web.dashboard.forms import Done
from fairqueue.web.dashboard.pages.helpers import read_local
from fairqueue.web.problems import problem_of

# Windows that end now, by their name in the URL, which the command line understands too.
WINDOWS = {"1h": timedelta(hours=1), "24h": timedelta(hours=24), "7d": timedelta(days=7)}
LABELS = [("", "Any time"), ("1h", "Last hour"), ("24h", "24 hours"), ("7d", "7 days")]
TEXTS: Final = ("user_id", "name", "schedule_id", "tenant", "pool", "fingerprint")


def window_of(
    given: Mapping[str, str], now: datetime
) -> tuple[datetime | None, datetime | None, str]:
    """The start, the end and the name of the window; given times take precedence.

    Raises InvalidInput for an invalid time.
    """
    texts = [given.get(name, "").strip() or None for name in ("since", "until")]
    since = read_local(texts[0], "UTC", "since")
    until = read_local(texts[1], "UTC", "until")
    last = given.get("last", "")
    if since is not None or until is not None or last not in WINDOWS:
        return since, until, ""
    return now - WINDOWS[last], None, last


def filters_of(given: Mapping[str, str], now: datetime) -> RunFilters:
    """The filters of a query or a form for the Inspector. Raises InvalidInput."""
    found: RunFilters = {}
    for name in TEXTS:
        text = given.get(name, "").strip()
        if text:
            found[name] = text
    since, until, _ = window_of(given, now)
    if since is not None and until is not None and since >= until:
        raise InvalidInput(f"since {given['since']} must be before until {given['until']}")
    if since is not None:
        found["since"] = since
    if until is not None:
        found["until"] = until
    return found


def given_filters(given: Mapping[str, str]) -> dict[str, str]:
    """The filters of a URL or a form as texts, without empty ones."""
    names = (*TEXTS, "since", "until", "last")
    return {name: text for name in names if (text := given.get(name, "").strip())}


def flags(given: Mapping[str, str], statuses: Iterable[str] = ()) -> list[str]:
    """The command-line options for these filters."""
    texts = given_filters(given)
    last = texts.pop("last", "")
    if last in WINDOWS and not {"since", "until"} & texts.keys():
        texts["since"] = last
    named = {"user": texts.pop("user_id", None), "schedule": texts.pop("schedule_id", None)}
    listed = [word for status in statuses for word in ("--status", status)]
    return [*listed, *options(**named, **texts)]


def refused(error: InvalidInput) -> Done:
    """An error as a toast, and as text for the place beside the field."""
    answer = HTMLResponse(escape(str(error)), problem_of(error).status)
    return Done(text=str(error), level="error", response=answer)
