"""What the pages about runs share: their filters, how a run is told in a row, command lines."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final

from markupsafe import escape
from starlette.responses import HTMLResponse

from fairqueue.errors import InvalidInput
from fairqueue.history.records import Run
from fairqueue.inspection.runs import RunFilters
from fairqueue.web.dashboard.pages.helpers import options, read_local
from fairqueue.web.dashboard.shell import Done
from fairqueue.web.problems import problem_of

# Windows that end now: their name in the address, which is also how the command line says them.
WINDOWS = {"1h": timedelta(hours=1), "24h": timedelta(hours=24), "7d": timedelta(days=7)}
LABELS = [("", "Any time"), ("1h", "Last hour"), ("24h", "24 hours"), ("7d", "7 days")]
TEXTS: Final = ("user_id", "name", "schedule_id", "tenant", "fingerprint")
LONGEST_ID = 18  # characters of an id in a table


def window_of(
    given: Mapping[str, str], now: datetime
) -> tuple[datetime | None, datetime | None, str]:
    """Since when, until when, and the name of the window; a given moment stands over a window.

    Raises InvalidInput for what is no moment.
    """
    texts = [given.get(name, "").strip() or None for name in ("since", "until")]
    since = read_local(texts[0], "UTC", "since")
    until = read_local(texts[1], "UTC", "until")
    last = given.get("last", "")
    if since is not None or until is not None or last not in WINDOWS:
        return since, until, ""
    return now - WINDOWS[last], None, last


def filters_of(given: Mapping[str, str], now: datetime) -> RunFilters:
    """The filters of a query or a form, as the Inspector takes them. Raises InvalidInput."""
    found: RunFilters = {}
    for name in TEXTS:
        text = given.get(name, "").strip()
        if text:
            found[name] = text
    since, until, _ = window_of(given, now)
    if since is not None and until is not None and since >= until:
        raise InvalidInput(f"since {given['since']} is not before until {given['until']}")
    if since is not None:
        found["since"] = since
    if until is not None:
        found["until"] = until
    return found


def told_filters(given: Mapping[str, str]) -> dict[str, str]:
    """The filters of an address as they stand there, to be carried on; empty ones are left out."""
    names = (*TEXTS, "since", "until", "last")
    return {name: text for name in names if (text := given.get(name, "").strip())}


def flags(given: Mapping[str, str], statuses: Iterable[str] = ()) -> list[str]:
    """The options of the command line for these filters."""
    told = told_filters(given)
    last = told.pop("last", "")
    if last in WINDOWS and not {"since", "until"} & told.keys():
        told["since"] = last
    named = {"user": told.pop("user_id", None), "schedule": told.pop("schedule_id", None)}
    listed = [word for status in statuses for word in ("--status", status)]
    return [*listed, *options(**named, **told)]


def refused(error: InvalidInput) -> Done:
    """What cannot be used, as a toast, and for the place that the form has beside its fields."""
    status = problem_of(error).status
    answer = HTMLResponse(escape(str(error)), status)
    return Done(text=str(error), level="error", response=answer)


# --- rows -----------------------------------------------------------------------------------------


def short(text: str) -> str:
    """An id that fits into a table. Its beginning and its end: one of them tells it from others."""
    return text if len(text) <= LONGEST_ID else f"{text[:8]}…{text[-8:]}"


def waited(run: Run, now: datetime) -> float | None:
    """For how many seconds it waited for its last attempt, or has waited until now."""
    begun = run.started_at if run.status not in ("pending", "retrying") else None
    end = begun or run.ended_at or now
    return (end - run.due_at).total_seconds() if end >= run.due_at else None


def took(run: Run, now: datetime) -> float | None:
    """For how many seconds its last attempt went on, or has gone on until now."""
    if run.status == "running" and run.started_at is not None:
        return max(0.0, (now - run.started_at).total_seconds())
    return run.seconds


def first_line(text: str | None) -> str:
    """The beginning of an error."""
    return text.splitlines()[0] if text and text.strip() else ""
