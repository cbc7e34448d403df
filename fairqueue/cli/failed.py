"""`fairqueue failed`: look at failed runs, run them again, or forget them."""

from collections.abc import Callable
from typing import Any

import click

from fairqueue.cli.bulk import code_of, tell_result
from fairqueue.cli.exit_codes import FAILED
from fairqueue.cli.listing import Walk, answer, paged, show
from fairqueue.cli.output import Progress, json_text, note, say
from fairqueue.cli.runs import RUN_COLUMNS, given_filters, run_filters, show_details
from fairqueue.cli.session import Consent, Group, Session, destructive, pass_session, reading
from fairqueue.cli.text import plural
from fairqueue.inspection import Inspector
from fairqueue.inspection.documents import document
from fairqueue.schedules.bulk import BulkResult

GROUP_COLUMNS = {
    "FINGERPRINT": lambda group: group.fingerprint,
    "COUNT": lambda group: group.count,
    "LAST": lambda group: group.last_at,
    "NAME": lambda group: group.latest.name,
    "USER": lambda group: group.latest.user_id,
    "ERROR": lambda group: RUN_COLUMNS["ERROR"](group.latest),
}


@click.group(cls=Group, default="list")
def failed() -> None:
    """Failed runs; alone: list them. Times are UTC."""


@failed.command("list")
@run_filters
@paged
@reading
@pass_session
def list_(session: Session, limit: int, cursor: str | None, all_: bool, **filters: Any) -> None:
    """Failed runs, newest first."""
    wanted = given_filters(filters)
    with session.inspector() as inspector:

        def fetch(most: int, at: str | None) -> Any:
            return inspector.failed.list(limit=most, cursor=at, **wanted)

        show(session, "runs", Walk(fetch, limit, cursor, all_), RUN_COLUMNS)


@failed.command()
@paged
@reading
@pass_session
def groups(session: Session, limit: int, cursor: str | None, all_: bool) -> None:
    """Failed runs by cause, the latest first."""
    with session.inspector() as inspector:
        walk = Walk(inspector.failed.groups, limit, cursor, all_)
        show(session, "groups", walk, GROUP_COLUMNS)


@failed.command("show")
@click.argument("task_id", metavar="ID")
@reading
@pass_session
def show_(session: Session, task_id: str) -> None:
    """One failed run with its attempts and tracebacks."""
    with session.inspector() as inspector:
        details = inspector.failed.get(task_id)
    show_details(session, details)


@failed.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@run_filters
@click.option("--all", "all_", is_flag=True, help="All failed runs.")
@destructive
@reading
@pass_session
def retry(
    session: Session, ids: tuple[str, ...], all_: bool, consent: Consent, **filters: Any
) -> int:
    """Run failed runs again: those named, or all that match. Prints the new ids of those named."""
    wanted = _meant("retry", ids, filters, all_)
    with session.inspector() as inspector:
        if ids:
            act = inspector.failed.retry
            return _each(session, inspector, ids, consent, "retry", act, ask=len(ids) > 1)
        return _many(session, inspector.failed.retry_many, "run", wanted, consent, "again")


@failed.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@run_filters
@click.option("--all", "all_", is_flag=True, help="All failed runs.")
@destructive
@reading
@pass_session
def discard(
    session: Session, ids: tuple[str, ...], all_: bool, consent: Consent, **filters: Any
) -> int:
    """Forget failed runs for good: those named, or all that match."""
    wanted = _meant("discard", ids, filters, all_)
    with session.inspector() as inspector:
        if ids:
            return _each(session, inspector, ids, consent, "discard", inspector.failed.discard)
        return _many(session, inspector.failed.discard_many, "forget", wanted, consent, "for good")


def _meant(
    action: str, ids: tuple[str, ...], filters: dict[str, Any], all_: bool
) -> dict[str, Any]:
    wanted = given_filters(filters)
    if [bool(ids), bool(wanted), all_].count(True) != 1:
        raise click.UsageError(
            f"which failed runs to {action}? Give their ids, or filters such as --user, or --all: "
            "one of the three"
        )
    return wanted


def _each(
    session: Session,
    inspector: Inspector,
    ids: tuple[str, ...],
    consent: Consent,
    action: str,
    act: Callable[[str], str | bool],
    *,
    ask: bool = True,
) -> int:
    """Act on each; the exit code. `act` returns the id of a new run, or whether it was done."""
    for task_id in ids:
        inspector.failed.get(task_id)
    what = f"run {ids[0]!r}" if len(ids) == 1 else f"{len(ids)} runs"
    if (ask or consent.dry_run) and not consent.to(f"{action} failed {what}"):
        return 0
    outcomes: dict[str, str | bool] = {}
    try:
        for task_id in ids:
            outcomes[task_id] = act(task_id)
    finally:  # those before one that failed are done
        new_ids = [outcome for outcome in outcomes.values() if isinstance(outcome, str)]
        answer(session, {"action": action, "runs": outcomes}, "\n".join(new_ids) or None)
    missed = [task_id for task_id, outcome in outcomes.items() if not outcome]
    for task_id in missed:
        note(f"task {task_id!r} is not among the failed ones")
    return FAILED if missed else 0


def _many(
    session: Session,
    act: Callable[..., BulkResult],
    verb: str,
    wanted: dict[str, Any],
    consent: Consent,
    how: str,
) -> int:
    result = act(dry_run=True, **wanted)
    if result.matched and consent.to(f"{verb} {plural(result.matched, 'failed run')} {how}"):
        with Progress(result.action) as progress:
            result = act(dry_run=False, progress=progress, **wanted)
    tell_result(session, result)
    return code_of(result)


@failed.command()
@run_filters
@pass_session
def export(session: Session, **filters: Any) -> None:
    """Failed runs with attempts, a line of JSON each. Secrets in payloads are masked."""
    with session.inspector() as inspector, Progress("export") as progress:
        found = inspector.failed.export(**given_filters(filters))
        for number, details in enumerate(found, start=1):
            if not say(json_text(document(details))):
                return
            progress(number)
