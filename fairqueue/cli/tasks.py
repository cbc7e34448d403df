"""`fairqueue tasks`: push tasks, and look at those that wait."""

from datetime import UTC, datetime
from typing import Any

import click

from fairqueue.cli.exit_codes import FAILED
from fairqueue.cli.listing import Walk, answer, paged, show, show_one
from fairqueue.cli.output import note
from fairqueue.cli.runs import cancel_all, show_details
from fairqueue.cli.schedule_fields import BACKOFF_HELP, read_backoff
from fairqueue.cli.session import Consent, Group, Session, destructive, pass_session, reading
from fairqueue.cli.text import duration_text, moment_text
from fairqueue.cli.values import DURATION, FUTURE, PRIORITY, read_object
from fairqueue.errors import UnknownTask
from fairqueue.inspection.documents import document

COLUMNS = {
    "ID": lambda run: run.task_id,
    "STATUS": lambda run: run.status,
    "USER": lambda run: run.user_id,
    "NAME": lambda run: run.name,
    "PRIORITY": lambda run: run.priority,
    "PUSHED": lambda run: run.pushed_at,
    "DUE": lambda run: run.due_at,
    "ATTEMPTS": lambda run: run.attempts,
}


@click.group(cls=Group, default="list")
def tasks() -> None:
    """Push tasks and see those that wait; alone: list them. Times are UTC."""


@tasks.command()
@click.option("--user", "user_id", metavar="USER", required=True, help="Whose task it is.")
@click.option("--name", default="default", show_default=True, help="What workers know it by.")
@click.option(
    "--payload", multiple=True, metavar="JSON|@FILE|K=V", help="What it works on; repeatable."
)
@click.option("--priority", type=PRIORITY, default="3", help="1 to 6; default: NORMAL.")
@click.option("--id", "task_id", metavar="ID", help="Pushed again with it, it is one task.")
@click.option("--delay", type=DURATION, help="Not before so long.")
@click.option("--at", type=FUTURE, help="Not before this moment.")
@click.option("--tenant", help="The group of users that it belongs to.")
@click.option("--retries", type=int, help="After it has failed; default: its handler's.")
@click.option("--max-attempts", type=int, help="One more than --retries; dead workers count too.")
@click.option("--backoff", help=BACKOFF_HELP)
@click.option("--backoff-cap", type=DURATION, help="The longest delay before a retry.")
@click.option("--backoff-multiplier", type=float, help="What each delay grows by; default: 2.")
@click.option("--jitter", help="full: delays are drawn at random; default: none.")
@click.option("--timeout", type=DURATION, help="How long it may run; default: its handler's.")
@reading
@pass_session
def push(session: Session, payload: tuple[str, ...], backoff: str | None, **given: Any) -> None:
    """Store a task and print its id."""
    given["payload"] = read_object(payload, "--payload")
    given["backoff"] = None if backoff is None else read_backoff(backoff)
    with session.inspector() as inspector:
        task_id = inspector.tasks.push(**given)
    answer(session, {"task_id": task_id}, task_id)


@tasks.command("list")
@click.option("--user", "user_id", metavar="USER", help="Of this user.")
@click.option("--name", help="Of this name.")
@click.option("--tenant", help="Of this tenant.")
@paged
@reading
@pass_session
def list_(
    session: Session, limit: int, cursor: str | None, all_: bool, **filters: str | None
) -> None:
    """Tasks that wait for a worker or for their time."""
    with session.inspector() as inspector:

        def fetch(most: int, at: str | None) -> Any:
            return inspector.tasks.list(limit=most, cursor=at, **filters)

        show(session, "tasks", Walk(fetch, limit, cursor, all_), COLUMNS)


@tasks.command("show")
@click.argument("task_id", metavar="ID")
@reading
@pass_session
def show_(session: Session, task_id: str) -> None:
    """One task, whatever its state. Secrets in the payload are masked."""
    with session.inspector() as inspector:
        details = inspector.tasks.get(task_id)
    show_details(session, details)


@tasks.command()
@click.argument("task_id", metavar="ID")
@reading
@pass_session
def explain(session: Session, task_id: str) -> None:
    """Why a task waits, and how much is served before it."""
    with session.inspector() as inspector:
        found = inspector.tasks.explain(task_id)
    if found is None:
        raise UnknownTask(f"there is no task {task_id!r}")
    rows: dict[str, object] = {"state": found.state}
    for number, reason in enumerate(found.reasons):
        rows["why" if number == 0 else f"also ({number})"] = reason.text
    show_one(session, document(found), rows)


@tasks.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@destructive
@pass_session
def cancel(session: Session, ids: tuple[str, ...], consent: Consent) -> int:
    """See to it that tasks do not run."""
    return cancel_all(session, ids, consent)


@tasks.command()
@click.argument("task_id", metavar="ID")
@click.option("--delay", type=DURATION, help="So long from now.")
@click.option("--at", type=FUTURE, help="At this moment.")
@reading
@pass_session
def reschedule(session: Session, task_id: str, delay: float | None, at: datetime | None) -> int:
    """Move the time of a task that no worker has. Neither --delay nor --at means now."""
    with session.inspector() as inspector:
        is_moved = inspector.tasks.reschedule(task_id, delay=delay, at=at)
    answer(session, {"task_id": task_id, "rescheduled": is_moved})
    if not is_moved:
        note(f"task {task_id!r} runs or has ended: its time stays")
        return FAILED
    if session.is_table:
        note(f"task {task_id!r} is due {_when(delay, at)}")
    return 0


def _when(delay: float | None, at: datetime | None) -> str:
    if at is not None:
        return f"at {moment_text(at.astimezone(UTC))} UTC"
    return "now" if delay is None else f"in {duration_text(delay)}"
