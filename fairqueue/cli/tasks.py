"""`fairqueue tasks`: push tasks, and look at those that wait."""

from datetime import UTC, datetime
from functools import partial
from typing import Any

import click

from fairqueue.cli.exit_codes import FAILED
from fairqueue.cli.listing import Listing, answer, columns, paged, show_one
from fairqueue.cli.output import note
from fairqueue.cli.runs import cancel_all, payload_option, show_details, task_tenant
from fairqueue.cli.schedule_fields import BACKOFF_HELP, read_backoff
from fairqueue.cli.session import (
    Consent,
    Group,
    Session,
    destructive,
    options,
    pass_session,
    prints_data,
)
from fairqueue.cli.sharers import estimate_text
from fairqueue.cli.text import duration_text, moment_text
from fairqueue.cli.values import DEADLINE, DURATION, FUTURE, PRIORITY, Period, read_object
from fairqueue.errors import UnknownTask
from fairqueue.flow_options import DEFAULT_POOL, ON_DUPLICATE, UNIQUE_FOR
from fairqueue.inspection.documents import document

COLUMNS = columns(
    "ID=task_id STATUS=status USER=user_id NAME=name PRIORITY=priority PUSHED=pushed_at "
    "DUE=due_at ATTEMPTS=attempts TENANT=tenant POOL=pool"
)


@click.group(cls=Group, default="list")
def tasks() -> None:
    """Push tasks, and list, show and cancel them. Default: list. Times are UTC."""


flow_options = options(
    click.option("--pool", default=DEFAULT_POOL, show_default=True, help="Pool of its workers."),
    click.option(
        "--limit-key",
        "limit_keys",
        metavar="KEY",
        multiple=True,
        help="Key whose limits it counts for; repeatable, at most 4.",
    ),
    click.option("--unique", metavar="KEY", help="Key that only one task has at a time."),
    click.option(
        "--on-duplicate",
        type=click.Choice(ON_DUPLICATE),
        help="If a task has the key. ignore (default): push nothing. replace: give that task the "
        "new payload and time. error: fail.",
    ),
    click.option(
        "--unique-for",
        type=Period(UNIQUE_FOR),
        help="How long it has the key; default: unfinished.",
    ),
    click.option("--debounce", type=DURATION, help="Each push with the key delays it by so long."),
    click.option("--max-wait", type=DURATION, help="With --debounce: the longest delay."),
    click.option("--expires", type=DEADLINE, help="If it has not started by then, it expires."),
    click.option("--cost", type=float, help="What it counts for in fair shares and rates."),
)


@tasks.command()
@click.option("--user", "user_id", metavar="USER", required=True, help="The user to run it for.")
@click.option("--name", default="default", show_default=True, help="Name of its handler.")
@payload_option(help="Arguments of the handler; repeatable.")
@click.option("--priority", type=PRIORITY, default="3", help="1 to 6; default: NORMAL.")
@click.option(
    "--id", "task_id", metavar="ID", help="Task id. Pushing the same task again has no effect."
)
@click.option("--delay", type=DURATION, help="Delay before it becomes ready.")
@click.option("--at", type=FUTURE, help="Do not run it before this time.")
@click.option("--tenant", help="Tenant that the task belongs to.")
@click.option("--retries", type=int, help="Retries after a failure; default: the handler's.")
@click.option(
    "--max-attempts",
    type=int,
    help="Maximum attempts, including the first and those lost to a dead worker. Use instead of "
    "--retries.",
)
@click.option("--backoff", help=BACKOFF_HELP)
@click.option("--backoff-cap", type=DURATION, help="Longest delay before a retry.")
@click.option("--backoff-multiplier", type=float, help="Growth of each delay; default: 2.")
@click.option(
    "--jitter", help="full: random delay between 0 and the backoff. none (default): exact delay."
)
@click.option("--timeout", type=DURATION, help="Maximum run time; default: the handler's.")
@flow_options
@prints_data
def push(
    session: Session,
    payload: tuple[str, ...],
    backoff: str | None,
    limit_keys: tuple[str, ...],
    **fields: Any,
) -> None:
    """Push a task and print its id.

    If another task has the unique key, the id is that of the other task; see --on-duplicate.
    """
    fields["payload"] = read_object(payload, "--payload")
    fields["backoff"] = None if backoff is None else read_backoff(backoff)
    task_id = session.inspector.tasks.push(**fields, limit_keys=list(limit_keys) or None)
    answer(session, {"task_id": task_id}, task_id)


@tasks.command("list")
@click.option("--user", "user_id", metavar="USER", help="Tasks of this user.")
@click.option("--name", help="Tasks with this name.")
@click.option("--tenant", help="Tasks of this tenant.")
@click.option("--pool", help="Tasks of this pool.")
@paged
def list_(listing: Listing, **filters: Any) -> None:
    """List tasks that wait for a worker or are delayed."""
    listing.show("tasks", partial(listing.inspector.tasks.list, **filters), COLUMNS)


@tasks.command("show")
@click.argument("task_id", metavar="ID")
@task_tenant
@prints_data
def show_(session: Session, task_id: str, tenant: str | None) -> None:
    """Show a task in any state. Secrets in the payload are masked."""
    show_details(session, session.inspector.tasks.get(task_id, tenant=tenant))


@tasks.command()
@click.argument("task_id", metavar="ID")
@task_tenant
@prints_data
def explain(session: Session, task_id: str, tenant: str | None) -> None:
    """Explain why a task waits, and how much is ahead of it."""
    found = session.inspector.tasks.explain(task_id, tenant=tenant)
    if found is None:
        raise UnknownTask(f"there is no task {task_id!r}")
    rows: dict[str, object] = {"state": found.state}
    for number, reason in enumerate(found.reasons):
        rows["why" if number == 0 else f"also ({number})"] = reason.text
    starts = (found.starts_about, found.starts_earliest, found.starts_latest)
    if (text := estimate_text(session, *starts)) is not None:
        rows["estimate"] = text
    show_one(session, document(found), rows)


@tasks.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@task_tenant
@destructive
@pass_session
def cancel(session: Session, ids: tuple[str, ...], tenant: str | None, consent: Consent) -> int:
    """Cancel tasks. Waiting ones do not run, running ones are stopped."""
    return cancel_all(session, ids, tenant, consent)


@tasks.command()
@click.argument("task_id", metavar="ID")
@click.option("--delay", type=DURATION, help="This long from now.")
@click.option("--at", type=FUTURE, help="At this time.")
@task_tenant
@prints_data
def reschedule(
    session: Session, task_id: str, delay: float | None, at: datetime | None, tenant: str | None
) -> int:
    """Change when a waiting task becomes ready. Without --delay and --at: now."""
    is_moved = session.inspector.tasks.reschedule(task_id, delay=delay, at=at, tenant=tenant)
    answer(session, {"task_id": task_id, "rescheduled": is_moved})
    if not is_moved:
        note(f"task {task_id!r} is running or has ended: its time was not changed")
        return FAILED
    if session.is_table:
        note(f"task {task_id!r} is due {_when(delay, at)}")
    return 0


def _when(delay: float | None, at: datetime | None) -> str:
    if at is not None:
        return f"at {moment_text(at.astimezone(UTC))} UTC"
    return "now" if delay is None else f"in {duration_text(delay)}"
