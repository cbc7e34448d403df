"""Act on many schedules: those that are named, or all that match."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from fairqueue.cli.exit_codes import FAILED, OK
from fairqueue.cli.listing import show_one
from fairqueue.cli.output import Progress
from fairqueue.cli.output import note as tell
from fairqueue.cli.session import Consent, F, Session
from fairqueue.cli.text import in_words, plural
from fairqueue.inspection import Inspector
from fairqueue.inspection.documents import document
from fairqueue.schedules.bulk import BulkResult

_FILTERS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--user", "user_id"), {"metavar": "USER", "help": "Of this user."}),
    (("--name",), {"help": "With tasks of this name."}),
    (("--name-prefix",), {"metavar": "TEXT", "help": "With a name that begins so."}),
    (("--contains",), {"metavar": "TEXT", "help": "With this in the name or the id."}),
    (("--tenant",), {"help": "Of this tenant."}),
    (("--active/--inactive", "is_active"), {"default": None, "help": "Only such ones."}),
)


def filtered(command: F) -> F:
    """Options that say which schedules are meant."""
    for names, settings in reversed(_FILTERS):
        command = click.option(*names, **settings)(command)
    return command


def meant(command: F) -> F:
    """Ids, filters or `--all`: what an action is done to."""
    command = click.option("--all", "all_", is_flag=True, help="All schedules.")(filtered(command))
    return click.argument("ids", metavar="[ID]...", nargs=-1)(command)


def filters_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The filters that were given."""
    return {name: value for name, value in given.items() if value is not None}


def act_on_many(
    session: Session,
    action: str,
    ids: Sequence[str],
    filters: Mapping[str, Any],
    consent: Consent,
    *,
    note: str | None = None,
    ask_for_one: bool = False,
) -> int:
    """Do something to each schedule that is meant, say how it went; the exit code.

    One that is named must be there. Whoever names them all is asked only if it is for good.
    """
    chosen = _chosen(action, ids, filters)
    with session.inspector() as inspector:
        if ids:
            result = _act_on_named(inspector, action, ids, consent, note, ask_for_one)
            tell_result(session, result)
            return code_of(result)
        result = inspector.schedules.bulk(action, dry_run=True, note=note, **chosen)
        if result.matched and consent.to(f"{action} {plural(result.matched, 'schedule')}"):
            with Progress(action) as progress:
                result = inspector.schedules.bulk(
                    action, dry_run=False, note=note, progress=progress, **chosen
                )
    tell_result(session, result)
    return code_of(result)


def is_one(ids: Sequence[str], filters: Mapping[str, Any]) -> bool:
    """Whether one schedule is meant, by its id."""
    return len(ids) == 1 and not any(filters_of(filters).values())


def _chosen(action: str, ids: Sequence[str], filters: Mapping[str, Any]) -> dict[str, Any]:
    """What the library is told. Raises UsageError unless it is clear which ones are meant."""
    wanted = filters_of(filters)
    all_ = wanted.pop("all_", False)
    if [bool(ids), bool(wanted), all_].count(True) != 1:
        raise click.UsageError(
            f"which schedules to {action}? Give their ids, or filters such as --user, or --all: "
            "one of the three"
        )
    return wanted


def _act_on_named(
    inspector: Inspector,
    action: str,
    ids: Sequence[str],
    consent: Consent,
    note: str | None,
    ask: bool,
) -> BulkResult:
    """One by one, so that the audit log names each. Raises UnknownSchedule before anything."""
    for schedule_id in ids:
        inspector.schedules.get(schedule_id)
    result = BulkResult(action=action, dry_run=consent.dry_run, matched=len(ids))
    what = f"schedule {ids[0]!r}" if len(ids) == 1 else plural(len(ids), "schedule")
    if (ask or consent.dry_run) and not consent.to(f"{action} {what}"):
        return result
    noted = {"note": note} if action in ("pause", "resume") else {}
    act: Callable[..., object] = getattr(inspector.schedules, action)
    for schedule_id in ids:
        act(schedule_id, **noted)
        result.done += 1
    return result


def tell_result(session: Session, result: BulkResult) -> None:
    """Say how it went: as data if asked for, else in a note."""
    found = document(result)
    if not session.is_table:
        show_one(session, found, {})
        return
    counts = {name: found[name] for name in ("matched", "done", "gone", "failed", "left")}
    tell(f"{result.action}: {in_words(counts)}")
    for key, error in result.errors.items():
        tell(f"{key}: {error}")


def code_of(result: BulkResult) -> int:
    """What it means that some were not done."""
    if result.failed or result.left:
        return FAILED
    return OK
