"""`fairqueue users`: the users with their shares, limits and pauses; and `fairqueue quote`."""

from functools import partial
from typing import Any

import click

from fairqueue.cli.listing import Columns, Listing, answer, columns, paged, show_one
from fairqueue.cli.output import Progress, note
from fairqueue.cli.runs import rows_of as rows_of_record
from fairqueue.cli.session import Command, Consent, Group, Session, destructive, prints_data
from fairqueue.cli.sharers import (
    COLUMNS,
    PAGE,
    answer_paused,
    changed_limits,
    estimate_text,
    in_order,
    limit_options,
    minutes_option,
    order_option,
    pause_options,
    rows_of,
    setting_rows,
)
from fairqueue.errors import plural
from fairqueue.flow_options import DEFAULT_POOL
from fairqueue.inspection.documents import document
from fairqueue.link.owners import Owner
from fairqueue.models import DEFAULT_NAME, Explanation
from fairqueue.stats.users import UserInfo

USER_COLUMNS: Columns = {**columns("USER=user_id"), **COLUMNS, **columns("TENANT=tenant")}
user_argument = click.argument("user_id", metavar="USER")
tenant_option = click.option("--tenant", help="Whose user; default: the user without a tenant.")


@click.group(cls=Group, default="list")
def users() -> None:
    """List users and their shares, limit, pause and move them. Default: list. Times are UTC."""


@users.command("list")
@order_option("users")
@click.option("--prefix", metavar="TEXT", help="Users whose name starts with this.")
@click.option("--tenant", help="Users of this tenant.")
@minutes_option
@paged
def list_(listing: Listing, order: str | None, **wanted: Any) -> None:
    """List users with their backlog, fair share and actual share."""
    fetch = partial(listing.inspector.users.list, **wanted)
    listing.show("users", in_order(listing, fetch, order), USER_COLUMNS, page=PAGE)


@users.command("show")
@user_argument
@tenant_option
@minutes_option
@prints_data
def show_(session: Session, user_id: str, tenant: str | None, minutes: int) -> None:
    """Show a user, and why the user waits."""
    info = session.inspector.users.get(user_id, minutes, tenant=tenant)
    wait = session.inspector.users.next_wait(user_id, tenant=tenant)
    show_one(session, {**document(info), "next_wait": document(wait)}, _rows(info, wait))


def _rows(info: UserInfo, wait: Explanation | None) -> dict[str, object]:
    rows = {"user": info.user_id, "tenant": info.tenant} | rows_of(info)
    if wait is not None:
        rows |= {"next task": wait.task_id, "why it waits": wait.summary}
    return rows | {"parked until": info.parked_until} | setting_rows(info.settings)


def _set(session: Session, user_id: str, tenant: str | None, **changes: Any) -> None:
    settings = session.inspector.users.set(user_id, tenant=tenant, **changes)
    show_one(session, document(settings), setting_rows(settings))
    _note_others(session, user_id, tenant)


@users.command()
@user_argument
@click.argument("weight", type=float)
@tenant_option
@prints_data
def weight(session: Session, user_id: str, tenant: str | None, weight: float) -> None:
    """Set the weight of a user, 0.01 to 1000. The default is 1."""
    _set(session, user_id, tenant, weight=weight)


@users.command()
@user_argument
@limit_options
@tenant_option
@prints_data
def limit(session: Session, user_id: str, tenant: str | None, **limits: Any) -> None:
    """Set the limits of a user; `none` removes a limit."""
    _set(session, user_id, tenant, **changed_limits(limits))


@users.command()
@user_argument
@pause_options("user")
@tenant_option
@prints_data
def pause(session: Session, user_id: str, tenant: str | None, **pause: Any) -> None:
    """Pause a user, until resumed or until a time."""
    settings = session.inspector.users.pause(user_id, tenant=tenant, **pause)
    answer_paused(session, _named(user_id, tenant), settings)
    _note_others(session, user_id, tenant)


@users.command()
@user_argument
@tenant_option
@prints_data
def resume(session: Session, user_id: str, tenant: str | None) -> None:
    """Resume a paused user."""
    settings = session.inspector.users.resume(user_id, tenant=tenant)
    answer_paused(session, _named(user_id, tenant), settings)
    _note_others(session, user_id, tenant)


def _note_others(session: Session, user_id: str, tenant: str | None) -> None:
    """Say so if users of tenants have the id of a user without one, whose settings were changed."""
    others = session.inspector.users.tenants_of(user_id) if tenant is None else []
    if others:
        note(
            f"this was the user {user_id!r} without a tenant: --tenant selects "
            f"{plural(len(others), 'user')} of that id"
        )


def _named(user_id: str, tenant: str | None) -> dict[str, object]:
    return {"user_id": user_id, **({} if tenant is None else {"tenant": tenant})}


@users.command()
@user_argument
@click.option("--to", metavar="TENANT", help="Tenant to move to.")
@click.option("--to-none", is_flag=True, help="Move out of all tenants.")
@tenant_option
@prints_data
def move(session: Session, user_id: str, to: str | None, to_none: bool, tenant: str | None) -> None:
    """Move a user to another tenant, with tasks and settings."""
    if (to is None) != to_none:
        raise click.UsageError("give --to TENANT or --to-none")
    moved = session.inspector.users.move(user_id, to, tenant=tenant)
    answer(session, {"user_id": user_id, "from": tenant, "to": to, "moved": moved})
    if session.is_table:
        note(f"{Owner(user_id, tenant)} is now {Owner(user_id, to)}: moved {plural(moved, 'task')}")


@users.command()
@user_argument
@tenant_option
@destructive
@prints_data
def purge(session: Session, user_id: str, tenant: str | None, consent: Consent) -> None:
    """Cancel all waiting and delayed tasks of a user. Prints how many."""
    users = session.inspector.users
    count = users.purge(user_id, tenant=tenant)
    if not count:
        users.get(user_id, tenant=tenant)  # raises if the user is unknown
    elif consent.to(
        f"cancel {plural(count, 'waiting task')} of user {str(Owner(user_id, tenant))!r}"
    ):
        with Progress("purge") as progress:
            count = users.purge(user_id, tenant=tenant, dry_run=False, progress=progress)
    found = {**_named(user_id, tenant), "cancelled": count, "dry_run": consent.dry_run}
    answer(session, found, str(count))


@click.command(cls=Command)
@user_argument
@tenant_option
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the task.")
@click.option("--pool", default=DEFAULT_POOL, show_default=True, help="Pool of the task.")
@prints_data
def quote(session: Session, user_id: str, **wanted: Any) -> None:
    """Estimate when a task of a user would start, if pushed now."""
    found = session.inspector.users.quote(user_id, **wanted)
    about = estimate_text(session, found.starts_about, found.earliest, found.latest)
    rows = {"quote": about or f"not known: {found.reason}"}
    show_one(session, document(found), rows | rows_of_record(found, hidden=("reason",)))
