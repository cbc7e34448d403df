"""`fairqueue users`: who waits, who gets what, and what each is entitled to."""

from datetime import datetime
from typing import Any

import click

from fairqueue.cli.listing import Columns, Walk, answer, paged, show, show_one
from fairqueue.cli.output import Progress
from fairqueue.cli.session import Consent, Group, Session, destructive, pass_session, reading
from fairqueue.cli.text import duration_text, plural
from fairqueue.cli.values import FUTURE, Kind
from fairqueue.inspection.documents import document
from fairqueue.models import Explanation, UserSettings
from fairqueue.stats.users import UserInfo

MOST_ON_PAGE = 100
NONE = "none"  # what takes a limit away

COLUMNS: Columns = {
    "USER": lambda info: info.user_id,
    "STATE": lambda info: info.state,
    "BACKLOG": lambda info: info.backlog,
    "RUNNING": lambda info: info.running,
    "DELAYED": lambda info: info.delayed,
    "WEIGHT": lambda info: info.settings.weight,
    "ENTITLED": lambda info: f"{info.entitled:.1%}",
    "RECEIVED": lambda info: f"{info.received:.1%}",
    "OLDEST WAIT": lambda info: duration_text(info.oldest_wait),
    "P95 WAIT": lambda info: duration_text(info.wait_p95),
    "SCHEDULES": lambda info: info.schedules,
    "TENANT": lambda info: info.settings.tenant,
}


class Limit(Kind):
    """A number, or `none` to take a limit away."""

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
            self.fail(f"{value!r} is neither a number nor {NONE!r}", param, ctx)


@click.group(cls=Group, default="list")
def users() -> None:
    """Users and their shares; without a subcommand: list. Times are UTC."""


@users.command("list")
@click.option(
    "--order",
    type=click.Choice(("backlog", "name")),
    help="backlog: those with waiting or running tasks, the largest backlog first. name: all, "
    "A to Z. Default: backlog, or name if nobody has such tasks.",
)
@click.option("--prefix", metavar="TEXT", help="Whose names begin so.")
@click.option("--tenant", help="Of this tenant.")
@click.option("--minutes", type=int, default=60, show_default=True, help="Shares of so long.")
@paged
@reading
@pass_session
def list_(
    session: Session,
    limit: int,
    cursor: str | None,
    all_: bool,
    order: str | None,
    **wanted: Any,
) -> None:
    """Users: what waits, what each is entitled to and got."""
    with session.inspector() as inspector:
        if order is None:
            is_busy = cursor is not None or inspector.users.list(limit=1, **wanted)
            order = "backlog" if is_busy else "name"

        def fetch(most: int, at: str | None) -> Any:
            return inspector.users.list(limit=most, cursor=at, order=order, **wanted)

        walk = Walk(fetch, limit, cursor, all_, page=MOST_ON_PAGE)
        show(session, "users", walk, COLUMNS)


@users.command("show")
@click.argument("user_id", metavar="USER")
@click.option("--minutes", type=int, default=60, show_default=True, help="Shares of so long.")
@reading
@pass_session
def show_(session: Session, user_id: str, minutes: int) -> None:
    """One user, and why they wait."""
    with session.inspector() as inspector:
        info = inspector.users.get(user_id, minutes)
        wait = inspector.users.next_wait(user_id)
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


@users.command()
@click.argument("user_id", metavar="USER")
@click.argument("weight", type=float)
@reading
@pass_session
def weight(session: Session, user_id: str, weight: float) -> None:
    """Change a user's share of service: 0.01 to 1000, others have 1."""
    with session.inspector() as inspector:
        settings = inspector.users.set(user_id, weight=weight)
    show_one(session, document(settings), _settings(settings))


@users.command()
@click.argument("user_id", metavar="USER")
@click.option("--max-running", type=Limit(int), help="Tasks at a time.")
@click.option("--max-waiting", type=Limit(int), help="Tasks that may wait.")
@click.option("--rate", type=Limit(float), help="Tasks that begin in a second.")
@click.option("--tenant", help="The group that the user belongs to.")
@reading
@pass_session
def limit(session: Session, user_id: str, **given: Any) -> None:
    """Limit a user, or take a limit away with `none`."""
    changes: dict[str, Any] = {
        name: None if value == NONE else value for name, value in given.items() if value is not None
    }
    if not changes:
        raise click.UsageError("give --max-running, --max-waiting, --rate or --tenant")
    with session.inspector() as inspector:
        settings = inspector.users.set(user_id, **changes)
    show_one(session, document(settings), _settings(settings))


@users.command()
@click.argument("user_id", metavar="USER")
@click.option("--note", help="Why; shown wherever somebody asks why they wait.")
@click.option("--until", type=FUTURE, help="They go on by themselves then.")
@reading
@pass_session
def pause(session: Session, user_id: str, note: str | None, until: datetime | None) -> None:
    """Hold back a user's tasks, for now or until a moment."""
    with session.inspector() as inspector:
        settings = inspector.users.pause(user_id, note=note, until=until)
    told = document(settings)
    found = {name: told[name] for name in ("paused_by", "pause_note", "paused_until") if told[name]}
    answer(session, {"user_id": user_id, "paused": settings.paused, **found})


@users.command()
@click.argument("user_id", metavar="USER")
@reading
@pass_session
def resume(session: Session, user_id: str) -> None:
    """Hand out the tasks of a user again."""
    with session.inspector() as inspector:
        settings = inspector.users.resume(user_id)
    answer(session, {"user_id": user_id, "paused": settings.paused})


@users.command()
@click.argument("user_id", metavar="USER")
@destructive
@reading
@pass_session
def purge(session: Session, user_id: str, consent: Consent) -> None:
    """Cancel all tasks of a user that wait or are delayed. Prints how many."""
    with session.inspector() as inspector:
        count = inspector.users.purge(user_id)
        if not count:
            inspector.users.get(user_id)  # says so if nobody knows them
        elif consent.to(f"cancel {plural(count, 'waiting task')} of user {user_id!r}"):
            with Progress("purge") as progress:
                count = inspector.users.purge(user_id, dry_run=False, progress=progress)
    found = {"user_id": user_id, "cancelled": count, "dry_run": consent.dry_run}
    answer(session, found, str(count))
