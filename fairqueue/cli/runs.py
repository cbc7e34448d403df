"""`fairqueue runs`: what became of tasks."""

from datetime import datetime
from typing import Any

import click

from fairqueue.cli.exit_codes import FAILED
from fairqueue.cli.listing import Columns, Walk, answer, paged, show, show_one
from fairqueue.cli.output import note, say
from fairqueue.cli.session import Consent, F, Group, Session, destructive, pass_session, reading
from fairqueue.cli.text import duration_text, plural, printable, printable_lines
from fairqueue.cli.values import PAST, read_object
from fairqueue.history.records import Attempt, Run, RunDetails
from fairqueue.history.runs import STATUSES
from fairqueue.inspection.documents import document

RUN_COLUMNS: Columns = {
    "ID": lambda run: run.task_id,
    "STATUS": lambda run: run.status,
    "USER": lambda run: run.user_id,
    "NAME": lambda run: run.name,
    "DUE": lambda run: run.due_at,
    "STARTED": lambda run: run.started_at,
    "ENDED": lambda run: run.ended_at,
    "TOOK": lambda run: duration_text(run.seconds),
    "ATTEMPTS": lambda run: run.attempts,
    "ERROR": lambda run: _first_line(run.error),
}
LONGEST_ERROR = 60  # characters of an error in a table


def _first_line(text: str | None) -> str | None:
    if not text:
        return None
    line = text.splitlines()[0]
    return line if len(line) <= LONGEST_ERROR else line[: LONGEST_ERROR - 1] + "…"


def log_columns(*, with_task: bool) -> Columns:
    """Of lines that runs have logged."""
    task: Columns = {"TASK": lambda line: line.task_id} if with_task else {}
    return {
        **task,
        "AT": lambda line: line.at,
        "LEVEL": lambda line: line.level,
        "MESSAGE": lambda line: line.message,
        "CONTEXT": lambda line: line.context or None,
    }


def run_filters(command: F) -> F:
    """Options that say which runs are meant, besides their status."""
    for names, settings in reversed(_FILTERS):
        command = click.option(*names, **settings)(command)
    return command


_FILTERS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--user", "user_id"), {"metavar": "USER", "help": "Of this user."}),
    (("--schedule", "schedule_id"), {"metavar": "ID", "help": "Of this schedule."}),
    (("--name",), {"help": "Of tasks of this name."}),
    (("--fingerprint",), {"help": "That failed in this way."}),
    (("--tenant",), {"help": "Of this tenant."}),
    (("--since",), {"type": PAST, "help": "Ended (or else started, or pushed) since then."}),
    (("--until",), {"type": PAST, "help": "And before then."}),
)


def given_filters(filters: dict[str, Any]) -> dict[str, Any]:
    """The filters that were given."""
    return {name: value for name, value in filters.items() if value is not None}


@click.group(cls=Group, default="list")
def runs() -> None:
    """What became of tasks; alone: list them. Times are UTC."""


@runs.command("list")
@click.option("--status", multiple=True, type=click.Choice(STATUSES), help="Repeatable.")
@run_filters
@paged
@reading
@pass_session
def list_(
    session: Session,
    status: tuple[str, ...],
    limit: int,
    cursor: str | None,
    all_: bool,
    **filters: Any,
) -> None:
    """Runs, newest first: waiting, running, then ended."""
    wanted = given_filters(filters)
    with session.inspector() as inspector:

        def fetch(most: int, at: str | None) -> Any:
            return inspector.runs.list(status or None, limit=most, cursor=at, **wanted)

        show(session, "runs", Walk(fetch, limit, cursor, all_), RUN_COLUMNS)


@runs.command("show")
@click.argument("task_id", metavar="ID")
@reading
@pass_session
def show_(session: Session, task_id: str) -> None:
    """One run with its attempts and tracebacks. Secrets in the payload are masked."""
    with session.inspector() as inspector:
        details = inspector.runs.get(task_id)
    show_details(session, details)


def show_details(session: Session, details: RunDetails) -> None:
    """Print a run and its attempts."""
    show_one(session, document(details), _rows(details))
    if session.is_table:
        for attempt in details.attempts:
            _show_attempt(attempt)


def _rows(details: RunDetails) -> dict[str, object]:
    run: Run = details.run
    rows: dict[str, object] = {}
    own = document(run)
    for name, value in own.items():
        if value not in (None, False, [], {}):
            moment = getattr(run, name)
            rows[name.replace("_", " ")] = moment if isinstance(moment, datetime) else value
    payload = document(details)["task"]
    return rows | {"payload": None if payload is None else payload["payload"]}


def _show_attempt(attempt: Attempt) -> None:
    where = f" on {attempt.worker_id}" if attempt.worker_id else ""
    took = f" after {duration_text(attempt.seconds)}" if attempt.seconds is not None else ""
    say(printable(f"attempt {attempt.number}: {attempt.outcome}{where}{took}"))
    for line in printable_lines(attempt.traceback or attempt.error or ""):
        if line:
            say(f"  {line}")


@runs.command()
@click.argument("task_id", metavar="ID")
@reading
@pass_session
def logs(session: Session, task_id: str) -> None:
    """The lines that a run has logged."""
    with session.inspector() as inspector:
        lines = inspector.runs.logs(task_id)
    show(session, "lines", iter(lines), log_columns(with_task=False))


@runs.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@destructive
@pass_session
def cancel(session: Session, ids: tuple[str, ...], consent: Consent) -> int:
    """See to it that tasks do not run (any more)."""
    return cancel_all(session, ids, consent)


def cancel_all(session: Session, ids: tuple[str, ...], consent: Consent) -> int:
    """Cancel each; 1 if one had ended before."""
    ended = 0
    with session.inspector() as inspector:
        for task_id in ids:
            inspector.runs.get(task_id)
        what = f"task {ids[0]!r}" if len(ids) == 1 else plural(len(ids), "task")
        if not consent.to(f"cancel {what}"):
            return 0
        for task_id in ids:
            if not inspector.runs.cancel(task_id):
                ended += 1
                note(f"task {task_id!r} has ended before")
    return FAILED if ended else 0


@runs.command()
@click.argument("task_id", metavar="ID")
@click.option(
    "--payload", multiple=True, metavar="JSON|@FILE|K=V", help="Another payload; repeatable."
)
@reading
@pass_session
def retry(session: Session, task_id: str, payload: tuple[str, ...]) -> None:
    """Run a failed run again, and print the id of the new one."""
    given = read_object(payload, "--payload")
    with session.inspector() as inspector:
        if given is None:
            new_id = inspector.runs.retry(task_id)
        else:
            new_id = inspector.runs.edit_and_retry(task_id, given)
    answer(session, {"task_id": new_id}, new_id)
