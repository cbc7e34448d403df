"""The audit log: who changed what, when, and the outcome."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.access.audit import AuditEntry
from fairqueue.errors import InvalidInput
from fairqueue.models import Page
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.formatting import command, options
from fairqueue.web.dashboard.pages.helpers import now_of
from fairqueue.web.dashboard.pages.run_helpers import LABELS, WINDOWS, window_of
from fairqueue.web.dashboard.shell import page
from fairqueue.web.problems import problem_of

PAGE = 50  # entries on one page
TEXTS = ("actor", "action", "target", "tenant")
# Suggestions for the filter of actions.
PREFIXES = (
    "schedule.", "schedules.", "run.", "runs.", "task.", "user.", "worker.", "key.",
    "settings.", "limits.",
)  # fmt: skip


def audit(request: Request) -> Response:
    """A page of the entries that match, newest first."""
    given = request.query_params
    problem, found, window = None, Page[AuditEntry]([], None), ""
    filters: dict[str, Any] = {
        name: text for name in TEXTS if (text := given.get(name, "").strip())
    }
    try:
        since, until, window = window_of(given, now_of(request))
        found = inspector_of(request).audit.list(
            **filters, since=since, until=until, limit=PAGE, cursor=given.get("cursor")
        )
    except InvalidInput as error:
        problem = problem_of(error)
    times = {name: given.get(name, "").strip() for name in ("since", "until")}
    if window in WINDOWS:
        times["since"] = window
    return page(
        request,
        "audit.html",
        entries=found,
        problem=problem,
        windows=LABELS,
        window=window,
        prefixes=PREFIXES,
        is_filtered=bool(filters or any(times.values())),
        cli=command("audit", *options(**filters, **times)),
    )


ROUTES: list[BaseRoute] = [Route("/audit", audit, name="audit")]
