"""The failed runs, by cause or one by one; retry, delete and export them."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, islice
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput
from fairqueue.history.records import FailureGroup, Run, RunDetails
from fairqueue.inspection.documents import document
from fairqueue.models import Page
from fairqueue.schedules.bulk import BulkResult
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.formatting import command
from fairqueue.web.dashboard.forms import Form, posted
from fairqueue.web.dashboard.pages.helpers import now_of
from fairqueue.web.dashboard.pages.run_helpers import (
    LABELS,
    TEXTS,
    filters_of,
    flags,
    given_filters,
    window_of,
)
from fairqueue.web.dashboard.shell import is_htmx, page, partial
from fairqueue.web.problems import problem_of

PAGE = 50  # groups or runs on one page
PART = 200  # runs that one request acts on, in well under a second
ERRORS_SHOWN = 5
EXPORT_CHUNK = 20  # lines that are sent together


class BulkTexts(NamedTuple):
    """The texts of an action on many runs."""

    title: str
    question: str
    about: str
    done_word: str


BULK = {
    "retry": BulkTexts(
        "Retry failed runs",
        "Retry {}",
        "Each becomes a new run with the same arguments. Runs that were already retried are left "
        "out. The failed runs stay in the list.",
        "retried",
    ),
    "discard": BulkTexts(
        "Delete failed runs",
        "Delete {}",
        "Their records are deleted. This cannot be undone.",
        "deleted",
    ),
}


# --- the lists ------------------------------------------------------------------------------------


def failed(request: Request) -> Response:
    """The causes of failures; with filters, the failed runs that match."""
    given = request.query_params
    filters = given_filters(given)
    shows_runs = bool(filters) or given.get("view") == "runs"
    groups, runs = Page[FailureGroup]([], None), Page[Run]([], None)
    problem, window = None, ""
    part = inspector_of(request).failed
    try:
        cursor = given.get("cursor")
        if shows_runs:
            now = now_of(request)
            window = window_of(given, now)[2]
            runs = part.list(limit=PAGE, cursor=cursor, **filters_of(given, now))
        else:
            groups = part.groups(PAGE, cursor)
    except InvalidInput as error:
        problem = problem_of(error)
    shown = flags(given)
    return page(
        request,
        "failed.html",
        problem=problem,
        shows_runs=shows_runs,
        groups=groups,
        runs=runs,
        filters=filters,
        windows=LABELS,
        window=window,
        cli=command("failed", "list" if shows_runs else "groups", *shown),
        export_cli=command("failed", "export", *shown),
    )


def export(request: Request) -> Response:
    """The failed runs that match as JSON lines, with secrets masked."""
    filters = filters_of(request.query_params, now_of(request))
    found = inspector_of(request).failed.export(**filters)
    first = list(islice(found, 1))  # raises errors before the response begins
    return StreamingResponse(
        _lines(chain(first, found)),
        media_type="application/x-ndjson",
        headers={"Content-Disposition": 'attachment; filename="failed-runs.jsonl"'},
    )


def _lines(found: Iterable[RunDetails]) -> Iterator[str]:
    rest = iter(found)
    while part := list(islice(rest, EXPORT_CHUNK)):
        yield "".join(json.dumps(document(each), ensure_ascii=False) + "\n" for each in part)


# --- many at once ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkProgress:
    """The progress of an action on many runs. cursor: where to continue; None at the end."""

    total: int
    done: int = 0
    gone: int = 0
    failed: int = 0
    cursor: str | None = None
    stopped: bool = False
    errors: tuple[tuple[str, str], ...] = ()

    @property
    def processed(self) -> int:
        """How many runs it has tried, at most all."""
        return min(self.total, self.done + self.gone + self.failed)

    def after(self, result: BulkResult, here: str | None, cursor: str | None) -> "BulkProgress":
        """The progress after one more part. After a stop, it continues at the same page."""
        stopped = result.left > 0
        errors = tuple(islice(result.errors.items(), ERRORS_SHOWN))
        return replace(
            self,
            done=self.done + result.done,
            gone=self.gone + result.gone,
            failed=self.failed + result.failed,
            cursor=here if stopped else cursor,
            stopped=stopped,
            errors=errors or self.errors,
        )

    @property
    def goes_on(self) -> bool:
        """Whether the page asks for the next part by itself."""
        return self.cursor is not None and not self.stopped


def ask(request: Request) -> Response:
    """Count the runs that an action would change, and ask for confirmation."""
    kind = _kind(request)
    selected = _selected(request)
    part = inspector_of(request).failed
    count = part.retry_many if kind == "retry" else part.discard_many
    matched = count(dry_run=True, **filters_of(selected, now_of(request))).matched
    return page(
        request,
        "failed_many.html",
        kind=kind,
        texts=BULK[kind],
        selected=selected,
        progress=None,
        asked=given_filters(request.query_params),
        matched=matched,
        cli=command("failed", kind, *(flags(request.query_params) or ["--all"])),
    )


def _selected(request: Request) -> dict[str, str]:
    """The filters of the URL, ending now, so that runs which fail later are not changed."""
    now = now_of(request)
    selected = given_filters(request.query_params)
    since, until, _ = window_of(selected, now)
    selected.pop("last", None)
    if since is not None:
        selected["since"] = since.isoformat()
    soon = now + timedelta(milliseconds=1)  # `until` is exclusive
    selected["until"] = min(until or soon, soon).isoformat()
    return selected


@posted
def act(request: Request, form: Form) -> Response:
    """Act on one part, and show the progress; the page asks for the next part by itself."""
    kind = _kind(request)
    selected = given_filters({name: form.raw(name) for name in (*TEXTS, "since", "until")})
    counts: Any = {name: form.integer(name) or 0 for name in ("total", "done", "gone", "failed")}
    here = form.text("cursor")
    part = inspector_of(request).failed
    do = part.retry_page if kind == "retry" else part.discard_page
    result, cursor = do(limit=PART, cursor=here, **filters_of(selected, now_of(request)))
    context: dict[str, Any] = {
        "kind": kind,
        "texts": BULK[kind],
        "selected": selected,
        "progress": BulkProgress(**counts).after(result, here, cursor),
    }
    if is_htmx(request):
        return partial(request, "failed_progress.html", **context)
    return page(request, "failed_many.html", **context)


def _kind(request: Request) -> str:
    kind: str = request.path_params["kind"]
    if kind not in BULK:
        raise HTTPException(404)
    return kind


ROUTES: list[BaseRoute] = [
    Route("/failed", failed, name="failed"),
    Route("/failed/export", export, name="failed_export"),
    Route("/failed/{kind}", ask, name="failed_ask"),
    Route("/do/failed/{kind}", act, methods=["POST"], name="failed_act"),
]
