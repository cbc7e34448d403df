"""Act on many schedules or runs: the given ids, or all that match the filters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from fairqueue.cli.exit_codes import FAILED, OK
from fairqueue.cli.listing import given, show_one
from fairqueue.cli.output import Progress
from fairqueue.cli.output import note as tell
from fairqueue.cli.session import Consent, F, Session, options
from fairqueue.errors import plural
from fairqueue.inspection import Inspector
from fairqueue.inspection.documents import document
from fairqueue.schedules.bulk import BulkResult

# What was done, in words; the JSON output has the names of the actions.
DONE = {
    "pause": "paused",
    "resume": "resumed",
    "trigger": "triggered",
    "remove": "removed",
    "update": "updated",
    "retry": "retried",
    "discard": "discarded",
}

schedule_filters = options(
    click.option("--user", "user_id", metavar="USER", help="Schedules of this user."),
    click.option("--name", help="Schedules with this task name."),
    click.option("--name-prefix", metavar="TEXT", help="Schedules whose task name starts with it."),
    click.option("--contains", metavar="TEXT", help="Schedules with this in name, id or title."),
    click.option("--tenant", help="Schedules of this tenant."),
    click.option(
        "--active/--inactive",
        "is_active",
        default=None,
        help="Only active or only inactive schedules.",
    ),
)


def selected(command: F) -> F:
    """Add the arguments that select schedules: ids, filters or `--all`."""
    ids = click.argument("ids", metavar="[ID]...", nargs=-1)
    all_ = click.option("--all", "all_", is_flag=True, help="All schedules.")
    return options(ids, schedule_filters, all_)(command)


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
    """Act on each selected schedule and print the result; return the exit code.

    Schedules that are named must exist. Naming them all is consent enough, unless `ask_for_one`.
    """
    chosen = choose("schedules", action, ids, filters)
    inspector = session.inspector
    if ids:
        result = _act_on_named(inspector, action, ids, consent, note, ask_for_one)
    else:

        def act(**settings: Any) -> BulkResult:
            return inspector.schedules.bulk(action, note=note, **settings, **chosen)

        result = count_then_act(act, f"{action} {{}}", "schedule", consent)
    return report(session, result, "schedule")


def is_one(ids: Sequence[str], filters: Mapping[str, Any]) -> bool:
    """Whether one schedule is selected, by its id."""
    return len(ids) == 1 and not any(given(filters).values())


def choose(
    nouns: str, action: str, ids: Sequence[str], filters: Mapping[str, Any]
) -> dict[str, Any]:
    """The filters that were given. Raises UsageError unless the selection is clear."""
    wanted = given(filters)
    all_ = wanted.pop("all_", False)
    if [bool(ids), bool(wanted), all_].count(True) != 1:
        raise click.UsageError(
            f"which {nouns} to {action}? Give ids, or filters such as --user, or --all: one of the "
            "three"
        )
    return wanted


def count_then_act(
    act: Callable[..., BulkResult], question: str, noun: str, consent: Consent
) -> BulkResult:
    """Count what would be done, ask, and do it. `question` has a place for the count."""
    result = act(dry_run=True)
    if result.matched and consent.to(question.format(plural(result.matched, noun))):
        with Progress(result.action) as progress:
            result = act(dry_run=False, progress=progress)
    return result


def _act_on_named(
    inspector: Inspector,
    action: str,
    ids: Sequence[str],
    consent: Consent,
    note: str | None,
    ask: bool,
) -> BulkResult:
    """Act one by one, so that the audit log names each. Raises UnknownSchedule before acting."""
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


def report(session: Session, result: BulkResult, noun: str) -> int:
    """Print the result, as JSON or as a note; return the exit code."""
    if not session.is_table:
        show_one(session, document(result), {})
    else:
        tell(in_words(result, noun))
        for key, error in result.errors.items():
            tell(f"{key}: {error}")
    return FAILED if result.failed or result.left else OK


def in_words(result: BulkResult, noun: str) -> str:
    """The result in a line: `paused 2 schedules, 1 gone meanwhile`."""
    if not result.matched:
        return f"no {noun} matches"
    if result.dry_run:
        return f"{plural(result.matched, noun + ' matches', noun + 's match')}: nothing was changed"
    parts = [f"{DONE[result.action]} {plural(result.done, noun)}"]
    others = {"gone meanwhile": result.gone, "failed": result.failed, "not tried": result.left}
    return ", ".join([*parts, *(f"{count:,} {what}" for what, count in others.items() if count)])
