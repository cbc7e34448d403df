"""`fairqueue tenants`: the tenants with their shares, limits and pauses."""

from functools import partial
from typing import Any

import click

from fairqueue.cli.listing import Columns, Listing, answer, columns, paged, show_one
from fairqueue.cli.output import Progress, note, print_table, say
from fairqueue.cli.session import Consent, Group, Session, destructive, prints_data
from fairqueue.cli.sharers import (
    COLUMNS,
    PAGE,
    answer_paused,
    changed_limits,
    in_order,
    limit_options,
    minutes_option,
    order_option,
    pause_options,
    rows_of,
    setting_rows,
)
from fairqueue.cli.users import USER_COLUMNS
from fairqueue.errors import plural
from fairqueue.inspection.documents import document
from fairqueue.models import Page
from fairqueue.stats.users import TenantInfo, UserInfo

TENANT_COLUMNS: Columns = {
    **columns("TENANT=tenant USERS=users"),
    **COLUMNS,
    "JAIN": lambda info: None if info.jain is None else f"{info.jain:.3f}",
}
_OF_USERS = {name: column for name, column in USER_COLUMNS.items() if name != "TENANT"}
tenant_argument = click.argument("tenant", metavar="TENANT")


@click.group(cls=Group, default="list")
def tenants() -> None:
    """List tenants and their shares, limit and pause them. Default: list. Times are UTC."""


@tenants.command("list")
@order_option("tenants")
@click.option("--prefix", metavar="TEXT", help="Tenants whose name starts with this.")
@minutes_option
@paged
def list_(listing: Listing, order: str | None, **wanted: Any) -> None:
    """List tenants with their backlog, fair share and actual share."""
    fetch = partial(listing.inspector.tenants.list, **wanted)
    listing.show("tenants", in_order(listing, fetch, order), TENANT_COLUMNS, page=PAGE)


@tenants.command("show")
@tenant_argument
@minutes_option
@prints_data
def show_(session: Session, tenant: str, minutes: int) -> None:
    """Show a tenant and its users, with their shares of its service."""
    info = session.inspector.tenants.get(tenant, minutes)
    users = session.inspector.users
    members = users.list(tenant=tenant, minutes=minutes, limit=PAGE)
    if not members:
        members = users.list(order="name", tenant=tenant, minutes=minutes, limit=PAGE)
    listed = [document(each) for each in members]
    found = {**document(info), "members": listed, "has_more": members.cursor is not None}
    show_one(session, found, _rows(info))
    if session.is_table:
        _show_members(tenant, members)


def _rows(info: TenantInfo) -> dict[str, object]:
    jain = TENANT_COLUMNS["JAIN"](info)
    rows = {"tenant": info.tenant, "users": info.users} | rows_of(info)
    return rows | {"jain": jain, "parked until": info.parked_until} | setting_rows(info.settings)


def _show_members(tenant: str, members: Page[UserInfo]) -> None:
    if members:
        say("")
        rows = [[column(each) for column in _OF_USERS.values()] for each in members]
        print_table(list(_OF_USERS), rows)
    if members.cursor is not None:
        note(f"there are more: fairqueue users list --tenant {tenant} --all")


def _set(session: Session, tenant: str, **changes: Any) -> None:
    settings = session.inspector.tenants.set(tenant, **changes)
    show_one(session, document(settings), setting_rows(settings))


@tenants.command()
@tenant_argument
@click.argument("weight", type=float)
@prints_data
def weight(session: Session, tenant: str, weight: float) -> None:
    """Set the weight of a tenant, 0.01 to 1000. The default is 1."""
    _set(session, tenant, weight=weight)


@tenants.command()
@tenant_argument
@limit_options
@prints_data
def limit(session: Session, tenant: str, **limits: Any) -> None:
    """Set the limits of a tenant; `none` removes a limit.

    They hold for all its users together.
    """
    _set(session, tenant, **changed_limits(limits))


@tenants.command()
@tenant_argument
@pause_options("tenant")
@prints_data
def pause(session: Session, tenant: str, **pause: Any) -> None:
    """Pause a tenant, until resumed or until a time."""
    settings = session.inspector.tenants.pause(tenant, **pause)
    answer_paused(session, {"tenant": tenant}, settings)


@tenants.command()
@tenant_argument
@prints_data
def resume(session: Session, tenant: str) -> None:
    """Resume a paused tenant."""
    settings = session.inspector.tenants.resume(tenant)
    answer_paused(session, {"tenant": tenant}, settings)


@tenants.command()
@tenant_argument
@destructive
@prints_data
def purge(session: Session, tenant: str, consent: Consent) -> None:
    """Cancel all waiting and delayed tasks of a tenant. Prints how many."""
    tenants = session.inspector.tenants
    count = tenants.purge(tenant)
    if not count:
        tenants.get(tenant)  # raises if the tenant is unknown
    elif consent.to(f"cancel {plural(count, 'waiting task')} of tenant {tenant!r}"):
        with Progress("purge") as progress:
            count = tenants.purge(tenant, dry_run=False, progress=progress)
    found = {"tenant": tenant, "cancelled": count, "dry_run": consent.dry_run}
    answer(session, found, str(count))
