"""What the commands about users and tenants have in common: their columns, options and answers."""

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

import click

from fairqueue.cli.listing import Columns, Fetch, Listing, answer, columns, given
from fairqueue.cli.session import F, Session, options
from fairqueue.cli.text import duration_text
from fairqueue.cli.values import FUTURE, Kind
from fairqueue.inspection.documents import document
from fairqueue.models import UserSettings
from fairqueue.reasons import estimate

PAGE = 100  # users or tenants per request
NONE = "none"  # the value that removes a limit

COLUMNS: Columns = {
    **columns("STATE=state BACKLOG=backlog RUNNING=running DELAYED=delayed WEIGHT=settings.weight"),
    "ENTITLED": lambda info: f"{info.entitled:.1%}",
    "RECEIVED": lambda info: f"{info.received:.1%}",
    "OLDEST WAIT": lambda info: duration_text(info.oldest_wait),
    "P95 WAIT": lambda info: duration_text(info.wait_p95),
    "SCHEDULES": lambda info: info.schedules,
}
minutes_option = click.option(
    "--minutes",
    type=int,
    default=60,
    show_default=True,
    help="Period that shares are counted over.",
)


def order_option(whose: str) -> Callable[[F], F]:
    """The option of lists of users or tenants that sets their order."""
    add: Callable[[F], F] = click.option(
        "--order",
        type=click.Choice(("backlog", "name")),
        help=f"backlog: {whose} with waiting or running tasks, largest backlog first. name: all "
        f"{whose}, A to Z. Default: backlog, or name if nobody has tasks.",
    )
    return add


def in_order(listing: Listing, fetch: Fetch[Any], order: str | None) -> Fetch[Any]:
    """Fetch in an order; without one, by backlog if anybody has tasks, else by name."""
    if order is None:
        cursor = listing.cursor
        # A cursor of a list by backlog is a number.
        by_backlog = fetch(order="backlog", limit=1) if cursor is None else cursor.isdecimal()
        order = "backlog" if by_backlog else "name"
    return partial(fetch, order=order)


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


limit_options = options(
    click.option("--max-running", type=Limit(int), help="Tasks that may run at the same time."),
    click.option("--max-waiting", type=Limit(int), help="Tasks that may wait."),
    click.option("--rate", type=Limit(float), help="Tasks, or cost, that may start per second."),
)


def pause_options(whose: str) -> Callable[[F], F]:
    """The options of a pause of a user or a tenant."""
    return options(
        click.option("--note", help=f"Note, shown as the reason why the {whose} waits."),
        click.option("--until", type=FUTURE, help="Resume automatically at this time."),
    )


def changed_limits(limits: Mapping[str, Any]) -> dict[str, Any]:
    """The limits that were given; None removes one. Raises UsageError if there are none."""
    changes = {name: None if value == NONE else value for name, value in given(limits).items()}
    if not changes:
        raise click.UsageError("give --max-running, --max-waiting or --rate")
    return changes


def rows_of(info: Any) -> dict[str, object]:
    """The state and the share of a user or a tenant, for people."""
    rows = {name.lower(): column(info) for name, column in COLUMNS.items() if name != "WEIGHT"}
    return rows | {"why": info.why}


def setting_rows(settings: UserSettings) -> dict[str, object]:
    """The settings of a user or a tenant, for people."""
    return {name.replace("_", " "): value for name, value in document(settings).items()}


def estimate_text(
    session: Session, about: datetime | None, earliest: datetime | None, latest: datetime | None
) -> str | None:
    """When a task starts, in words; None if that is not known."""
    if about is None or earliest is None or latest is None:
        return None
    return f"starts {estimate(about, earliest, latest, session.inspector.now())}"


def answer_paused(session: Session, who: Mapping[str, object], settings: UserSettings) -> None:
    """Print whether somebody is paused, and why."""
    shown = document(settings)
    found = {name: shown[name] for name in ("paused_by", "pause_note", "paused_until")}
    reasons = {name: value for name, value in found.items() if value}
    answer(session, {**who, "paused": settings.paused, **reasons})
