"""The failed runs: by cause, or those that match; run again, discarded or exported, also many."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, islice
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput
from fairqueue.history.records import FailureGroup, Run, RunDetails
from fairqueue.inspection.documents import document
from fairqueue.models import Page
from fairqueue.schedules.bulk import BulkResult
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.pages.helpers import command, now_of, paths, posted, segment
from fairqueue.web.dashboard.pages.run_helpers import (
    LABELS,
    TEXTS,
    filters_of,
    first_line,
    flags,
    short,
    told_filters,
    took,
    window_of,
)
from fairqueue.web.dashboard.shell import Form, is_htmx, page, partial
from fairqueue.web.problems import problem_of

PAGE = 50  # groups or runs on one page
PART = 200  # runs that one request acts on: well below a second
ERRORS_TOLD = 5
LINES_AT_ONCE = 20  # of an export, in one piece

# Of each bulk action: what it is called, what is asked, what it means, and what was done.
MANY = {
    "retry": (
        "Retry failed runs",
        "Retry {}",
        "Each becomes a new run with the same arguments; those that were run again before are left "
        "out. The failed ones stay in the list.",
        "run again",
    ),
    "discard": (
        "Discard failed runs",
        "Discard {}",
        "All that is kept of them is forgotten for good. This cannot be undone.",
        "discarded",
    ),
}


# --- the lists ------------------------------------------------------------------------------------


def failed(request: Request) -> Response:
    """The causes of failures; with filters, the failed runs that match."""
    given = request.query_params
    told = told_filters(given)
    shows_runs = bool(told) or given.get("view") == "runs"
    groups, runs = Page[FailureGroup]([], None), Page[Run]([], None)
    problem, window = None, ""
    try:
        cursor = given.get("cursor")
        if shows_runs:
            now = now_of(request)
            window, filters = window_of(given, now)[2], filters_of(given, now)
            runs = inspector_of(request).failed.list(limit=PAGE, cursor=cursor, **filters)
        else:
            groups = inspector_of(request).failed.groups(PAGE, cursor)
    except InvalidInput as error:
        problem = problem_of(error)
    shown = flags(given)
    return page(
        request,
        "failed.html",
        status=200 if problem is None else problem.status,
        problem=problem,
        shows_runs=shows_runs,
        groups=groups,
        runs=runs,
        told=told,
        windows=LABELS,
        window=window,
        sees_tenants=actor_of(request).tenant is None,
        first_line=first_line,
        short=short,
        took=took,
        segment=segment,
        command=command("failed", "list" if shows_runs else "groups", *shown),
        export_command=command("failed", "export", *shown),
        **paths(request),
    )


def export(request: Request) -> Response:
    """The failed runs that match, a line of JSON each, with secrets masked."""
    filters = filters_of(request.query_params, now_of(request))
    found = inspector_of(request).failed.export(**filters)
    first = list(islice(found, 1))  # what is wrong is said before the answer begins
    return StreamingResponse(
        _lines(chain(first, found)),
        media_type="application/x-ndjson",
        headers={"Content-Disposition": 'attachment; filename="failed-runs.jsonl"'},
    )


def _lines(found: Iterable[RunDetails]) -> Iterator[str]:
    rest = iter(found)
    while part := list(islice(rest, LINES_AT_ONCE)):
        yield "".join(json.dumps(document(each), ensure_ascii=False) + "\n" for each in part)


# --- many at once ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a bulk action has come. cursor: where it goes on; None at the end."""

    total: int
    done: int = 0
    gone: int = 0
    failed: int = 0
    cursor: str | None = None
    stopped: bool = False
    errors: tuple[tuple[str, str], ...] = ()

    @property
    def looked_at(self) -> int:
        """How many it has dealt with, well or not; no more than there are."""
        return min(self.total, self.done + self.gone + self.failed)

    def after(self, result: BulkResult, here: str | None, cursor: str | None) -> "Progress":
        """With one more part. One that had to stop goes on at the same page."""
        stopped = result.left > 0
        told = tuple(islice(result.errors.items(), ERRORS_TOLD))
        return replace(
            self,
            done=self.done + result.done,
            gone=self.gone + result.gone,
            failed=self.failed + result.failed,
            cursor=here if stopped else cursor,
            stopped=stopped,
            errors=told or self.errors,
        )

    @property
    def goes_on(self) -> bool:
        """Whether the next part follows by itself."""
        return self.cursor is not None and not self.stopped


def ask(request: Request) -> Response:
    """What a bulk action would be done to, counted."""
    kind = _kind(request)
    meant = _meant(request)
    many = inspector_of(request).failed
    count = many.retry_many if kind == "retry" else many.discard_many
    matched = count(dry_run=True, **filters_of(meant, now_of(request))).matched
    options = flags(request.query_params) or ["--all"]
    return page(
        request,
        "failed_many.html",
        **_told(request, kind, meant),
        progress=None,
        asked=told_filters(request.query_params),
        matched=matched,
        command=command("failed", kind, *options),
    )


def _meant(request: Request) -> dict[str, str]:
    """The filters of the address, with this moment as their end.

    What is done is what was counted, also while more runs fail.
    """
    now = now_of(request)
    meant = told_filters(request.query_params)
    since, until, _ = window_of(meant, now)
    meant.pop("last", None)
    if since is not None:
        meant["since"] = since.isoformat()
    soon = now + timedelta(milliseconds=1)  # `until` is without that moment
    meant["until"] = min(until or soon, soon).isoformat()
    return meant


@posted
def act(request: Request, form: Form) -> Response:
    """Do one part of it, and say how far it is; the answer asks for the next one by itself."""
    kind = _kind(request)
    meant = told_filters({name: form.raw(name) for name in (*TEXTS, "since", "until")})
    before = Progress(
        total=form.integer("total") or 0,
        done=form.integer("done") or 0,
        gone=form.integer("gone") or 0,
        failed=form.integer("failed") or 0,
    )
    here = form.text("cursor")
    many = inspector_of(request).failed
    do = many.retry_page if kind == "retry" else many.discard_page
    result, cursor = do(limit=PART, cursor=here, **filters_of(meant, now_of(request)))
    told = _told(request, kind, meant) | {"progress": before.after(result, here, cursor)}
    if is_htmx(request):
        return partial(request, "failed_progress.html", **told)
    return page(request, "failed_many.html", **told)


def _kind(request: Request) -> str:
    kind: str = request.path_params["kind"]
    if kind not in MANY:
        raise HTTPException(404)
    return kind


def _told(request: Request, kind: str, meant: dict[str, str]) -> dict[str, Any]:
    title, question, about, done = MANY[kind]
    return {
        "kind": kind,
        "title": title,
        "question": question,
        "about": about,
        "done_word": done,
        "meant": meant,
        "short": short,
        "segment": segment,
        **paths(request),
    }


ROUTES: list[BaseRoute] = [
    Route("/failed", failed, name="failed"),
    Route("/failed/export", export, name="failed_export"),
    Route("/failed/{kind}", ask, name="failed_ask"),
    Route("/do/failed/{kind}", act, methods=["POST"], name="failed_act"),
]
