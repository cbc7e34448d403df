"""`fairqueue failed`: look at failed runs, retry or discard them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from fairqueue.cli.bulk import choose, count_then_act, report
from fairqueue.cli.exit_codes import FAILED
from fairqueue.cli.listing import Columns, Listing, answer, columns, given, paged
from fairqueue.cli.output import Progress, json_text, note, say
from fairqueue.cli.runs import RUN_COLUMNS, error_text, run_filters, show_details, task_tenant
from fairqueue.cli.session import (
    Consent,
    Group,
    Session,
    destructive,
    options,
    pass_session,
    prints_data,
)
from fairqueue.errors import plural
from fairqueue.inspection.documents import document

GROUP_COLUMNS: Columns = {
    **columns(
        "FINGERPRINT=fingerprint COUNT=count LAST=last_at NAME=latest.name USER=latest.user_id"
    ),
    "ERROR": lambda group: error_text(group.latest.error),
}
selected_failed = options(
    click.argument("ids", metavar="[ID]...", nargs=-1),
    run_filters,
    click.option("--all", "all_", is_flag=True, help="All failed runs."),
)


@click.group(cls=Group, default="list")
def failed() -> None:
    """List, retry and discard failed runs. Default: list. Times are UTC."""


@failed.command("list")
@run_filters
@paged
def list_(listing: Listing, **filters: Any) -> None:
    """List failed runs, newest first."""
    listing.show("runs", partial(listing.inspector.failed.list, **given(filters)), RUN_COLUMNS)


@failed.command()
@paged
def groups(listing: Listing) -> None:
    """Group failed runs by cause, most recent first."""
    listing.show("groups", listing.inspector.failed.groups, GROUP_COLUMNS)


@failed.command("show")
@click.argument("task_id", metavar="ID")
@task_tenant
@prints_data
def show_(session: Session, task_id: str, tenant: str | None) -> None:
    """Show a failed run with its attempts and tracebacks."""
    show_details(session, session.inspector.failed.get(task_id, tenant=tenant))


@failed.command()
@selected_failed
@destructive
@prints_data
def retry(session: Session, ids: tuple[str, ...], consent: Consent, **filters: Any) -> int:
    """Run failed runs again. Applies to the given ids, or all that match the filters.

    Prints the new ids of the given runs.
    """
    tenant = _whose(ids, filters)
    wanted = choose("failed runs", "retry", ids, filters)
    part = session.inspector.failed
    if ids:
        ask = len(ids) > 1
        return _act_on_named(session, "retry", ids, tenant, consent, part.retry, ask=ask)
    result = count_then_act(partial(part.retry_many, **wanted), "retry {}", "failed run", consent)
    return report(session, result, "run")


@failed.command()
@selected_failed
@destructive
@prints_data
def discard(session: Session, ids: tuple[str, ...], consent: Consent, **filters: Any) -> int:
    """Delete failed runs. Applies to the given ids, or all that match the filters."""
    tenant = _whose(ids, filters)
    wanted = choose("failed runs", "discard", ids, filters)
    part = session.inspector.failed
    if ids:
        return _act_on_named(session, "discard", ids, tenant, consent, part.discard, ask=True)
    act = partial(part.discard_many, **wanted)
    result = count_then_act(act, "delete {}", "failed run", consent)
    return report(session, result, "run")


def _whose(ids: tuple[str, ...], filters: dict[str, Any]) -> str | None:
    """With ids, `--tenant` is no filter: it says whose runs are meant."""
    return filters.pop("tenant", None) if ids else None


def _act_on_named(
    session: Session,
    action: str,
    ids: tuple[str, ...],
    tenant: str | None,
    consent: Consent,
    act: Callable[..., str | bool],
    *,
    ask: bool,
) -> int:
    """Act on each run; return the exit code. `act` returns the id of a new run, or success."""
    for task_id in ids:
        session.inspector.failed.get(task_id, tenant=tenant)
    what = f"failed run {ids[0]!r}" if len(ids) == 1 else plural(len(ids), "failed run")
    if (ask or consent.dry_run) and not consent.to(f"{action} {what}"):
        return 0
    outcomes: dict[str, str | bool] = {}
    try:
        for task_id in ids:
            outcomes[task_id] = act(task_id, tenant=tenant)
    finally:  # print those that were done before an error
        new_ids = [outcome for outcome in outcomes.values() if isinstance(outcome, str)]
        answer(session, {"action": action, "runs": outcomes}, "\n".join(new_ids) or None)
    missed = [task_id for task_id, outcome in outcomes.items() if not outcome]
    for task_id in missed:
        note(f"task {task_id!r} is not a failed run")
    return FAILED if missed else 0


@failed.command()
@run_filters
@pass_session
def export(session: Session, **filters: Any) -> None:
    """Print failed runs with their attempts, one JSON line each. Secrets are masked."""
    with Progress("export") as progress:
        found = session.inspector.failed.export(**given(filters))
        for number, details in enumerate(found, start=1):
            if not say(json_text(document(details))):
                return
            progress(number)
