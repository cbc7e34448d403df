"""`fairqueue runs`: look at runs, cancel and retry them."""

from collections.abc import Collection
from datetime import datetime
from functools import partial
from typing import Any

import click

from fairqueue.cli.exit_codes import FAILED
from fairqueue.cli.listing import Columns, Listing, answer, columns, given, paged, show, show_one
from fairqueue.cli.output import note, say
from fairqueue.cli.session import (
    Consent,
    Group,
    Session,
    destructive,
    options,
    pass_session,
    prints_data,
)
from fairqueue.cli.text import duration_text, printable, printable_lines
from fairqueue.cli.values import PAST, read_object
from fairqueue.errors import plural
from fairqueue.history.filters import STATUSES
from fairqueue.history.records import Attempt, RunDetails
from fairqueue.inspection.documents import document

MAX_ERROR = 60  # characters of an error in a table


def error_text(error: str | None) -> str | None:
    """The first line of an error, shortened for a table."""
    if not error:
        return None
    line = error.splitlines()[0]
    return line if len(line) <= MAX_ERROR else line[: MAX_ERROR - 1] + "…"


RUN_COLUMNS: Columns = {
    **columns(
        "ID=task_id STATUS=status USER=user_id NAME=name DUE=due_at STARTED=started_at "
        "ENDED=ended_at"
    ),
    "TOOK": lambda run: duration_text(run.seconds),
    "ATTEMPTS": lambda run: run.attempts,
    "TENANT": lambda run: run.tenant,
    "ERROR": lambda run: error_text(run.error),
}
LOG_COLUMNS: Columns = {
    **columns("AT=at LEVEL=level MESSAGE=message"),
    "CONTEXT": lambda line: line.context or None,
}

run_filters = options(
    click.option("--user", "user_id", metavar="USER", help="Runs of this user."),
    click.option("--schedule", "schedule_id", metavar="ID", help="Runs of this schedule."),
    click.option("--name", help="Runs with this task name."),
    click.option("--fingerprint", help="Runs that failed with this cause."),
    click.option("--tenant", help="Runs of this tenant."),
    click.option("--pool", help="Runs of this pool."),
    click.option(
        "--since",
        type=PAST,
        help="Runs that ended at or after this time. Unfinished runs are compared by start or push "
        "time.",
    ),
    click.option("--until", type=PAST, help="Runs before this time."),
)
task_tenant = click.option("--tenant", help="Whose task is meant, if several tenants use its id.")
payload_option = partial(click.option, "--payload", multiple=True, metavar="JSON|@FILE|K=V")


@click.group(cls=Group, default="list")
def runs() -> None:
    """List, show, cancel and retry runs. Default: list. Times are UTC."""


@runs.command("list")
@click.option(
    "--status",
    multiple=True,
    type=click.Choice(STATUSES),
    help="Runs with this status. Repeatable.",
)
@run_filters
@paged
def list_(listing: Listing, status: tuple[str, ...], **filters: Any) -> None:
    """List waiting, then running, then ended runs, newest first."""
    fetch = partial(listing.inspector.runs.list, status or None, **given(filters))
    listing.show("runs", fetch, RUN_COLUMNS)


@runs.command("show")
@click.argument("task_id", metavar="ID")
@task_tenant
@prints_data
def show_(session: Session, task_id: str, tenant: str | None) -> None:
    """Show a run with its attempts and tracebacks. Secrets in the payload are masked."""
    show_details(session, session.inspector.runs.get(task_id, tenant=tenant))


def show_details(session: Session, details: RunDetails) -> None:
    """Print a run and its attempts."""
    task = document(details)["task"]
    payload = {"payload": None if task is None else task["payload"]}
    show_one(session, document(details), rows_of(details.run) | payload)
    if session.is_table:
        for attempt in details.attempts:
            _show_attempt(attempt)


def rows_of(
    record: Any, hidden: Collection[str] = (), empty: Collection[object] = (None, False, [], {})
) -> dict[str, object]:
    """The fields of a record for people, without those that are hidden or empty."""
    return {
        name.replace("_", " "): own if isinstance(own := getattr(record, name), datetime) else value
        for name, value in document(record).items()
        if name not in hidden and value not in empty
    }


def _show_attempt(attempt: Attempt) -> None:
    where = f" on {attempt.worker_id}" if attempt.worker_id else ""
    took = f" after {duration_text(attempt.seconds)}" if attempt.seconds is not None else ""
    say(printable(f"attempt {attempt.number}: {attempt.outcome}{where}{took}"))
    for line in printable_lines(attempt.traceback or attempt.error or ""):
        if line:
            say(f"  {line}")


@runs.command()
@click.argument("task_id", metavar="ID")
@task_tenant
@prints_data
def logs(session: Session, task_id: str, tenant: str | None) -> None:
    """Print the lines that a run has logged."""
    lines = session.inspector.runs.logs(task_id, tenant=tenant)
    show(session, "lines", iter(lines), LOG_COLUMNS)


@runs.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@task_tenant
@destructive
@pass_session
def cancel(session: Session, ids: tuple[str, ...], tenant: str | None, consent: Consent) -> int:
    """Cancel tasks. Waiting ones do not run, running ones are stopped."""
    return cancel_all(session, ids, tenant, consent)


def cancel_all(session: Session, ids: tuple[str, ...], tenant: str | None, consent: Consent) -> int:
    """Cancel each task; the exit code is 1 if one had already ended."""
    runs = session.inspector.runs
    for task_id in ids:
        runs.get(task_id, tenant=tenant)
    what = f"task {ids[0]!r}" if len(ids) == 1 else plural(len(ids), "task")
    if not consent.to(f"cancel {what}"):
        return 0
    ended = [task_id for task_id in ids if not runs.cancel(task_id, tenant=tenant)]
    for task_id in ended:
        note(f"task {task_id!r} has already ended")
    return FAILED if ended else 0


@runs.command()
@click.argument("task_id", metavar="ID")
@task_tenant
@payload_option(help="Another payload; repeatable.")
@prints_data
def retry(session: Session, task_id: str, tenant: str | None, payload: tuple[str, ...]) -> None:
    """Run a failed run again, and print the id of the new run."""
    changed = read_object(payload, "--payload")
    runs = session.inspector.runs
    if changed is None:
        new_id = runs.retry(task_id, tenant=tenant)
    else:
        new_id = runs.edit_and_retry(task_id, changed, tenant=tenant)
    answer(session, {"task_id": new_id}, new_id)
