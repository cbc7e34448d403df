"""`fairqueue schedules`: add, show and change schedules, one or many."""

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import click

from fairqueue.cli.bulk import act_on_many, is_one, schedule_filters, selected
from fairqueue.cli.exit_codes import FAILED
from fairqueue.cli.listing import Columns, Listing, answer, columns, given, paged, show, show_one
from fairqueue.cli.output import note, say
from fairqueue.cli.runs import LOG_COLUMNS, RUN_COLUMNS, payload_option, rows_of
from fairqueue.cli.schedule_fields import cleared, fields_of, read_rule, schedule_options
from fairqueue.cli.session import Consent, Group, Session, destructive, prints_data
from fairqueue.cli.text import cell, exact_duration, moment_text, printable
from fairqueue.cli.values import DURATION, FUTURE, PAST, PRIORITY, read_object
from fairqueue.errors import plural
from fairqueue.inspection.documents import document
from fairqueue.inspection.schedules import ScheduleInspector
from fairqueue.inspection.views import ScheduleView
from fairqueue.models import ScheduledTask
from fairqueue.recurrence.frequency import SYMBOLIC

AHEAD = timedelta(days=3660)  # how far ahead to look for fire times
CRON_FIELDS = (5, 6)
CHANGES_PAGE = 50  # changes per request
# Fields that `show` prints above the others.
SHOWN_FIRST = {
    *("schedule_id", "cron_expr", "every", "at", "timezone", "is_active", "next_run", "last_run")
}


def rule_text(task: ScheduledTask) -> str:
    """When a schedule fires, for people."""
    if task.every is not None:
        return f"every {exact_duration(task.every.total_seconds())}"
    return task.rule if task.at is None else f"at {moment_text(task.at.astimezone(UTC))}"


COLUMNS: Columns = {
    **columns(
        "ID=schedule.schedule_id USER=schedule.user_id TITLE=schedule.label NAME=schedule.name"
    ),
    "CRON": lambda view: rule_text(view.schedule),
    **columns("ZONE=schedule.timezone STATE=state"),
    "NEXT RUN": lambda view: view.schedule.next_run,
    "LAST RUN": lambda view: view.schedule.last_run,
    "TENANT": lambda view: view.schedule.tenant,
}
MOMENT_COLUMNS = columns("AT=at OUTCOME=outcome REASON=reason")
CHANGE_COLUMNS: Columns = {
    **columns("AT=at BY=by NOTE=note"),
    "FIELDS": lambda each: [
        f"{name}: {cell(new)}" if each.made else f"{name}: {cell(old)} -> {cell(new)}"
        for name, (old, new) in each.fields.items()
    ],
}
schedule_argument = click.argument("schedule_id", metavar="ID")
cron_option = click.option("--cron", "cron_expr", metavar="CRON", help="New cron expression.")
note_option = click.option("--note", help="The reason, kept with the changes.")
if_match_option = click.option(
    "--if-match", metavar="ETAG", help="Only if it is unchanged since `show` printed this etag."
)


@click.group(cls=Group, default="list")
def schedules() -> None:
    """Add, show and change schedules. Default: list. Times are UTC."""


# --- reading --------------------------------------------------------------------------------------


def listed_document(view: ScheduleView) -> dict[str, Any]:
    """A schedule in a listing: without payload and metadata, which `show` prints."""
    found: dict[str, Any] = document(view)
    return {name: value for name, value in found.items() if name not in ("payload", "metadata")}


@schedules.command("list")
@schedule_filters
@paged
def list_(listing: Listing, **filters: Any) -> None:
    """List schedules, by user and id. With --name, --name-prefix or --contains, by name."""
    wanted = given(filters)
    part = listing.inspector.schedules
    # A problem does not name its user, so a filtered list does not show problems.
    problems = [] if wanted else part.problems()[: listing.limit]
    listing.show(
        "schedules",
        partial(part.list, **wanted),
        COLUMNS,
        to_document=listed_document,
        more={"set_aside": document(problems)},
    )
    if listing.session.is_table:
        for problem in problems:
            say(printable(f"cannot run: {problem.schedule_id}: {problem.reason}"))


@schedules.command("show")
@schedule_argument
@prints_data
def show_(session: Session, schedule_id: str) -> None:
    """Show a schedule. Secrets in payload and metadata are masked."""
    _show_view(session, session.inspector.schedules.get(schedule_id))


def _show_view(session: Session, view: ScheduleView) -> None:
    task: ScheduledTask = view.schedule
    rows: dict[str, object] = {
        "id": task.schedule_id,
        "rule": rule_text(task),
        "in words": view.sentence,
        "zone": task.timezone,
        "state": view.state,
        "next run": task.next_run,
        "last run": task.last_run,
        "last outcomes": [outcome.status for outcome in view.outcomes],
    }
    rows |= rows_of(task, SHOWN_FIRST, empty=(None, {}, [])) | {"etag": view.etag}
    show_one(session, {**document(view), "etag": view.etag}, rows)


@schedules.command("next")
@click.argument("rule", metavar="CRON|ID", required=False)
@click.option("--id", "schedule_id", metavar="ID", help="A schedule whose id looks like a rule.")
@click.option("--every", type=DURATION, help="An interval instead of a cron expression.")
@click.option("--at", type=FUTURE, help="A single time instead of a cron expression.")
@click.option("--timezone", "--tz", "timezone", default="UTC", show_default=True)
@click.option("--count", type=int, default=5, show_default=True, help="Number of runs.")
@click.option("--after", type=FUTURE, help="Runs after this time; default: now.")
@prints_data
def next_(
    session: Session,
    rule: str | None,
    schedule_id: str | None,
    every: float | None,
    at: datetime | None,
    count: int,
    after: datetime | None,
    timezone: str,
) -> None:
    """Print the next runs of a rule or of a schedule. Redis is not needed for a rule."""
    if schedule_id is None and rule is not None and not _is_cron(rule):
        rule, schedule_id = None, rule
    if schedule_id is not None:
        if rule is not None or every is not None or at is not None:
            raise click.UsageError("give a rule or the id of a schedule, not both")
        return _next_of(session, schedule_id, count, after)
    expression = None if rule is None else read_rule(rule)
    preview = ScheduleInspector.preview(
        expression, every=every, at=at, timezone=timezone, count=count, after=after
    )
    if not session.is_table:
        return show_one(session, document(preview), {})
    note(preview.sentence)
    for run in preview.runs:
        say(f"{run.isoformat(sep=' ')}  {cell(run.astimezone(UTC))} UTC")
    for warning in preview.warnings:
        note(warning)
    return None


def _is_cron(text: str) -> bool:
    """Whether a text is a rule: an expression, a name such as EVERY_DAY, or fields as JSON."""
    if text.startswith(("@", "{")) or text in SYMBOLIC:
        return True
    return len(text.split()) in CRON_FIELDS


def _next_of(session: Session, schedule_id: str, count: int, after: datetime | None) -> None:
    start = datetime.now(UTC) if after is None else after
    page = session.inspector.schedules.moments(schedule_id, start, start + AHEAD, limit=count)
    show(session, "moments", iter(page), MOMENT_COLUMNS)


@schedules.command()
@schedule_argument
@paged
def history(listing: Listing, schedule_id: str) -> None:
    """List runs of a schedule: unfinished, then ended, newest first."""
    inspector = listing.inspector
    inspector.schedules.get(schedule_id)
    listing.show("runs", partial(inspector.runs.list, schedule_id=schedule_id), RUN_COLUMNS)


@schedules.command()
@schedule_argument
@click.option("--since", type=PAST, default="1d", help="Start of the range; default: 1 day ago.")
@click.option("--until", type=FUTURE, default="now", show_default=True)
@paged
def moments(listing: Listing, schedule_id: str, since: datetime, until: datetime) -> None:
    """List the fire times in a range and their outcomes."""
    fetch = partial(listing.inspector.schedules.moments, schedule_id, since, until)
    listing.show("moments", fetch, {**MOMENT_COLUMNS, **columns("TASK=task_id")})


@schedules.command()
@schedule_argument
@paged
def changes(listing: Listing, schedule_id: str) -> None:
    """List who changed what in a schedule, newest first."""
    fetch = partial(listing.inspector.schedules.changes, schedule_id)
    listing.show("changes", fetch, CHANGE_COLUMNS, page=CHANGES_PAGE)


@schedules.command()
@schedule_argument
@click.option("--limit", type=int, default=100, show_default=True, help="Maximum number of lines.")
@prints_data
def logs(session: Session, schedule_id: str, limit: int) -> None:
    """Print the last log lines of a schedule's runs, newest first."""
    lines = session.inspector.schedules.logs(schedule_id, limit)
    show(session, "lines", iter(lines), {**columns("TASK=task_id"), **LOG_COLUMNS})


# --- adding and changing --------------------------------------------------------------------------


@schedules.command()
@click.argument("cron_expr", metavar="[CRON]", required=False)
@click.option("--id", "schedule_id", metavar="ID", help="Its id; default: a random one.")
@click.option("--replace", is_flag=True, help="Replace an existing schedule with the same id.")
@schedule_options
@prints_data
def add(session: Session, replace: bool, **given: Any) -> None:
    """Add a schedule and print its id.

    The rule is five cron fields (six with seconds), a name such as EVERY_DAY, --every or --at.
    """
    fields = fields_of(given)
    if "user_id" not in fields:
        raise click.UsageError("--user is missing: name the user that the schedule runs tasks for")
    on_conflict = "replace" if replace else "error"
    schedule_id = session.inspector.schedules.add(on_conflict=on_conflict, **fields)
    answer(session, {"schedule_id": schedule_id}, schedule_id)


@schedules.command()
@click.argument("original", metavar="ID")
@click.option("--id", "new_id", metavar="NEW_ID", help="Id of the copy; default: a random one.")
@cron_option
@schedule_options
@prints_data
def copy(session: Session, original: str, new_id: str | None, **given: Any) -> None:
    """Copy a schedule and print the id of the copy. Options change fields of the copy."""
    schedule_id = session.inspector.schedules.copy(original, new_id, **fields_of(given))
    answer(session, {"schedule_id": schedule_id}, schedule_id)


@schedules.command()
@schedule_argument
@cron_option
@click.option("--next-run", type=FUTURE, help="Time of its next run.")
@click.option("--clear", multiple=True, metavar="FIELD", help="Remove a value; repeatable.")
@if_match_option
@schedule_options
@prints_data
def update(
    session: Session, schedule_id: str, clear: tuple[str, ...], if_match: str | None, **given: Any
) -> None:
    """Change the given fields of a schedule. A payload is replaced as a whole."""
    patch = fields_of(given) | cleared(clear)
    if not patch:
        raise click.UsageError("nothing to change: give at least one field")
    _show_view(session, session.inspector.schedules.update(schedule_id, patch, if_match=if_match))


def _check_one(option: str, ids: tuple[str, ...], filters: dict[str, Any]) -> None:
    if not is_one(ids, filters):
        raise click.UsageError(f"{option} is for one schedule: give its id")


@schedules.command()
@selected
@note_option
@click.option("--until", type=FUTURE, help="Resume automatically then (one schedule only).")
@destructive
@prints_data
def pause(
    session: Session,
    ids: tuple[str, ...],
    note: str | None,
    until: datetime | None,
    consent: Consent,
    **filters: Any,
) -> int:
    """Pause schedules until resumed. Applies to the given ids, or all that match the filters."""
    if until is None:
        return act_on_many(session, "pause", ids, filters, consent, note=note)
    _check_one("--until", ids, filters)
    session.inspector.schedules.get(ids[0])
    if consent.dry_run:
        consent.to(f"pause schedule {ids[0]!r} until {until.isoformat()}")
    else:
        session.inspector.schedules.pause(ids[0], note=note, until=until)
    return 0


@schedules.command()
@selected
@note_option
@destructive
@prints_data
def resume(
    session: Session, ids: tuple[str, ...], note: str | None, consent: Consent, **filters: Any
) -> int:
    """Resume schedules from now on. Applies to the given ids, or all that match the filters."""
    return act_on_many(session, "resume", ids, filters, consent, note=note)


@schedules.command()
@selected
@payload_option(help="For this run only.")
@destructive
@prints_data
def trigger(
    session: Session,
    ids: tuple[str, ...],
    payload: tuple[str, ...],
    consent: Consent,
    **filters: Any,
) -> int:
    """Run schedules now, in addition to their plan. For one schedule, prints the task id."""
    changed = read_object(payload, "--payload")
    if changed is None and not is_one(ids, filters):
        return act_on_many(session, "trigger", ids, filters, consent)
    _check_one("--payload", ids, filters)
    session.inspector.schedules.get(ids[0])
    if consent.dry_run:
        consent.to(f"trigger schedule {ids[0]!r}")
    else:
        task_id = session.inspector.schedules.trigger(ids[0], payload=changed)
        answer(session, {"schedule_id": ids[0], "task_id": task_id}, task_id)
    return 0


@schedules.command()
@selected
@if_match_option
@destructive
@prints_data
def remove(
    session: Session,
    ids: tuple[str, ...],
    if_match: str | None,
    consent: Consent,
    **filters: Any,
) -> int:
    """Remove schedules. Applies to the given ids, or all that match the filters.

    Tasks that they have fired stay.
    """
    if if_match is None:
        return act_on_many(session, "remove", ids, filters, consent, ask_for_one=True)
    _check_one("--if-match", ids, filters)
    session.inspector.schedules.get(ids[0])
    if consent.to(f"remove schedule {ids[0]!r}"):
        session.inspector.schedules.remove(ids[0], if_match=if_match)
    return 0


@schedules.command()
@schedule_argument
@click.option("--since", type=PAST, required=True, help="Start of the range.")
@click.option("--until", type=PAST, default="now", show_default=True, help="End, not included.")
@click.option(
    "--limit",
    type=int,
    default=1000,
    show_default=True,
    help="Fail if there are more fire times than this.",
)
@click.option(
    "--priority", type=PRIORITY, default="1", help="Priority of the tasks; default: VERY_LOW."
)
@click.option("--unknown-too", is_flag=True, help="Include times that may already have run.")
@destructive
@prints_data
def backfill(
    session: Session,
    schedule_id: str,
    since: datetime,
    until: datetime,
    consent: Consent,
    **options: Any,
) -> int:
    """Push tasks for past fire times that did not run."""
    act = partial(session.inspector.schedules.backfill, schedule_id, since, until, **options)
    report = act()
    tasks = plural(report.moments, "task")
    if report.moments and consent.to(f"push {tasks} for past runs of schedule {schedule_id!r}"):
        report = act(dry_run=False)
    found = document(report)
    show_one(session, found, {name.replace("_", " "): value for name, value in found.items()})
    return 0 if consent.dry_run or report.filled == report.moments else FAILED
