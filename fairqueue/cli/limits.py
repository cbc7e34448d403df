"""`fairqueue limits`: the limits of keys and of task names; and `fairqueue pools`."""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import click

from fairqueue.cli.exit_codes import NOT_FOUND
from fairqueue.cli.listing import Columns, answer, columns, given, show
from fairqueue.cli.output import note
from fairqueue.cli.session import Command, Group, Session, prints_data
from fairqueue.cli.text import duration_text
from fairqueue.cli.values import DURATION
from fairqueue.inspection.documents import document

POOL_COLUMNS: Columns = {
    **columns("POOL=pool WAITING=waiting"),
    "OLDEST WAIT": lambda pool: duration_text(pool.oldest_wait),
    **columns("WORKERS=workers SLOTS=slots RUNNING=running"),
    "LAST CLAIM": lambda pool: pool.last_claim,
    "SERVED": lambda pool: not pool.is_unserved if pool.waiting or pool.workers else None,
}
KEY, NAME = "key", "task name"
LIMIT_COLUMNS: Columns = {
    heading: itemgetter(heading.lower().replace(" ", "_"))
    for heading in ("OF", "KEY", "SLOTS", "RATE", "ORDERED", "THROUGH RETRIES", "SCOPE", "TIMEOUT")
}
OF_KEYS = ("ordered", "through_retries", "scope")  # limits that task names do not have
key_argument = click.argument("key")
task_name_option = click.option(
    "--task-name", is_flag=True, help="KEY is the name of tasks, not one of their keys."
)


@click.command(cls=Command)
@prints_data
def pools(session: Session) -> None:
    """List pools with their waiting tasks and their workers."""
    found = session.inspector.system.pools()
    show(session, "pools", iter(found), POOL_COLUMNS)
    for pool in found:
        if pool.is_unserved:
            note(f"no live worker serves the pool {pool.pool!r}")


@click.group(cls=Group, default="list")
def limits() -> None:
    """List, set and remove the limits of keys and of task names. Default: list."""


@limits.command("list")
@prints_data
def list_(session: Session) -> None:
    """List the limits of keys, patterns and task names."""
    system = session.inspector.system
    found = [*_rows(KEY, system.key_limits()), *_rows(NAME, system.limits())]
    show(session, "limits", iter(found), LIMIT_COLUMNS)


def _rows(of: str, limits: Mapping[str, Any]) -> list[dict[str, Any]]:
    empty = dict.fromkeys(name.lower() for name in LIMIT_COLUMNS)
    return [{**empty, "of": of, "key": key, **document(limits[key])} for key in sorted(limits)]


@limits.command("set")
@key_argument
@task_name_option
@click.option("--slots", type=int, help="Tasks that may run at the same time.")
@click.option("--rate", type=float, help="Tasks, or cost, that may start per second.")
@click.option("--ordered", is_flag=True, default=None, help="Start tasks in the order of pushes.")
@click.option(
    "--through-retries",
    is_flag=True,
    default=None,
    help="With --ordered: a retry holds back later tasks.",
)
@click.option(
    "--scope",
    type=click.Choice(("queue", "tenant")),
    help="tenant: each tenant, and each user without one, has slots and a rate of its own.",
)
@click.option("--timeout", type=DURATION, help="With --task-name: longest run.")
@prints_data
def set_(session: Session, key: str, task_name: bool, **limits: Any) -> None:
    """Set the limits of a key, replacing those that it has.

    KEY may be the beginning of keys and an asterisk, as in 'account:*': each key that begins so has
    slots and a rate of its own. The limits of a key itself win over those of patterns.
    """
    changes = given(limits)
    wrong = OF_KEYS if task_name else ("timeout",)
    for name in wrong:
        if name in changes:
            raise click.UsageError(
                f"--{name.replace('_', '-')} is {'not ' if task_name else 'only '}for --task-name"
            )
    system = session.inspector.system
    if not task_name:
        system.set_limit(key, **changes)
    elif changes:
        system.set_limits(key, **changes)
    else:
        raise click.UsageError("give --slots, --rate or --timeout")
    answer(session, {"key": key, "of": NAME if task_name else KEY, **changes})


@limits.command()
@key_argument
@task_name_option
@prints_data
def remove(session: Session, key: str, task_name: bool) -> int:
    """Remove the limits of a key, a pattern or a task name."""
    system = session.inspector.system
    if not task_name:
        removed = system.remove_limit(key)
    elif removed := key in system.limits():
        system.set_limits(key)
    if not removed:
        note(f"there is no limit of the {NAME if task_name else KEY} {key!r}")
        return NOT_FOUND
    answer(session, {"key": key, "of": NAME if task_name else KEY, "removed": True})
    return 0
