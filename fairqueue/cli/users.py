"""`fairqueue users`: the users with their shares, limits and pauses."""

from functools import partial
from typing import Any

import click

from fairqueue.cli.listing import Columns, Listing, answer, columns, given, paged, show_one
from fairqueue.cli.output import Progress
from fairqueue.cli.session import Consent, Group, Session, destructive, prints_data
from fairqueue.cli.text import duration_text
from fairqueue.cli.values import FUTURE, Kind
from fairqueue.errors import plural
from fairqueue.inspection.documents import document
from fairqueue.link.owners import Owner
from fairqueue.models import Explanation, UserSettings
from fairqueue.stats.users import UserInfo

PAGE = 100  # users per request
NONE = "none"  # the value that removes a limit

COLUMNS: Columns = {
    **columns(
        "USER=user_id STATE=state BACKLOG=backlog RUNNING=running DELAYED=delayed "
        "WEIGHT=settings.weight"
    ),
    "ENTITLED": lambda info: f"{info.entitled:.1%}",
    "RECEIVED": lambda info: f"{info.received:.1%}",
    "OLDEST WAIT": lambda info: duration_text(info.oldest_wait),
    "P95 WAIT": lambda info: duration_text(info.wait_p95),
    **columns("SCHEDULES=schedules TENANT=tenant"),
}
user_argument = click.argument("user_id", metavar="USER")
tenant_option = click.option("--tenant", help="Whose user; default: the user without a tenant.")
minutes_option = click.option(
    "--minutes",
    type=int,
    default=60,
    show_default=True,
    help="Period that shares are counted over.",
)


class Limit(Kind):
    """A number, or `none` to remove a limit."""

    name = "number|none"

    def __init__(self, number: type[int] | type[float]) -> None:
        self._number = number

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or `none`. Fails naming the value."""
        if not isinstance(value, str) or value == NONE:
            return value
        try:
            return self._number(value)
        except ValueError:
            self.fail(f"{value!r} must be a number or {NONE!r}", param, ctx)


@click.group(cls=Group, default="list")
def users() -> None:
    """List users and their shares, limit and pause them. Default: list. Times are UTC."""


@users.command("list")
@click.option(
    "--order",
    type=click.Choice(("backlog", "name")),
    help="backlog: users with waiting or running tasks, largest backlog first. name: all users, "
    "A to Z. Default: backlog, or name if nobody has tasks.",
)
@click.option("--prefix", metavar="TEXT", help="Users whose name starts with this.")
@click.option("--tenant", help="Users of this tenant.")
@minutes_option
@paged
def list_(listing: Listing, order: str | None, **wanted: Any) -> None:
    """List users with their backlog, fair share and actual share."""
    fetch = listing.inspector.users.list
    if order is None:
        is_busy = listing.cursor is not None or fetch(limit=1, **wanted)
        order = "backlog" if is_busy else "name"
    listing.show("users", partial(fetch, order=order, **wanted), COLUMNS, page=PAGE)


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
    rows: dict[str, object] = {
        name.lower(): column(info) for name, column in COLUMNS.items() if name != "WEIGHT"
    }
    rows["why"] = info.why
    if wait is not None:
        rows |= {"next task": wait.task_id, "why it waits": wait.summary}
    return rows | {"parked until": info.parked_until} | _settings(info.settings)


def _settings(settings: UserSettings) -> dict[str, object]:
    return {name.replace("_", " "): value for name, value in document(settings).items()}


def _set(session: Session, user_id: str, tenant: str | None, **changes: Any) -> None:
    settings = session.inspector.users.set(user_id, tenant=tenant, **changes)
    show_one(session, document(settings), _settings(settings))


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
@click.option("--max-running", type=Limit(int), help="Tasks that may run at the same time.")
@click.option("--max-waiting", type=Limit(int), help="Tasks that may wait.")
@click.option("--rate", type=Limit(float), help="Tasks that may start per second.")
@tenant_option
@prints_data
def limit(session: Session, user_id: str, tenant: str | None, **limits: Any) -> None:
    """Set the limits of a user; `none` removes a limit."""
    changes = {name: None if value == NONE else value for name, value in given(limits).items()}
    if not changes:
        raise click.UsageError("give --max-running, --max-waiting or --rate")
    _set(session, user_id, tenant, **changes)


@users.command()
@user_argument
@click.option("--note", help="Note, shown as the reason why the user waits.")
@click.option("--until", type=FUTURE, help="Resume automatically at this time.")
@tenant_option
@prints_data
def pause(session: Session, user_id: str, tenant: str | None, **pause: Any) -> None:
    """Pause a user, until resumed or until a time."""
    settings = session.inspector.users.pause(user_id, tenant=tenant, **pause)
    shown = document(settings)
    found = {name: shown[name] for name in ("paused_by", "pause_note", "paused_until")}
    reasons = {name: value for name, value in found.items() if value}
    answer(session, {"user_id": user_id, "paused": settings.paused, **reasons})


@users.command()
@user_argument
@tenant_option
@prints_data
def resume(session: Session, user_id: str, tenant: str | None) -> None:
    """Resume a paused user."""
    settings = session.inspector.users.resume(user_id, tenant=tenant)
    answer(session, {"user_id": user_id, "paused": settings.paused})


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
    elif consent.to(f"cancel {plural(count, 'waiting task')} of user {Owner(user_id, tenant)}"):
        with Progress("purge") as progress:
            count = users.purge(user_id, tenant=tenant, dry_run=False, progress=progress)
    found = {"user_id": user_id, "cancelled": count, "dry_run": consent.dry_run}
    answer(session, found, str(count))
