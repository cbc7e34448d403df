"""`fairqueue schedules`: make schedules, look at them, change them, one or many."""

from datetime import UTC, datetime, timedelta
from typing import Any

import click

from fairqueue.cli.bulk import act_on_many, filtered, filters_of, is_one, meant
from fairqueue.cli.exit_codes import FAILED
from fairqueue.cli.listing import Walk, answer, paged, show, show_one
from fairqueue.cli.output import note, say
from fairqueue.cli.runs import RUN_COLUMNS, log_columns
from fairqueue.cli.schedule_fields import cleared, fields_of, read_rule, schedule_options
from fairqueue.cli.session import Consent, Group, Session, destructive, pass_session, reading
from fairqueue.cli.text import cell, exact_duration, moment_text, plural, printable
from fairqueue.cli.values import DURATION, FUTURE, PAST, PRIORITY, read_object
from fairqueue.inspection.documents import document
from fairqueue.inspection.schedules import Schedules
from fairqueue.inspection.views import ScheduleView
from fairqueue.models import ScheduledTask
from fairqueue.recurrence.frequency import SYMBOLIC

AHEAD = timedelta(days=3660)  # moments to come are looked for within ten years
CRON_FIELDS = (5, 6)


def rule_text(task: ScheduledTask) -> str:
    """When it fires, for people."""
    if task.every is not None:
        return f"every {exact_duration(task.every.total_seconds())}"
    return task.rule if task.at is None else f"at {moment_text(task.at.astimezone(UTC))}"


COLUMNS = {
    "ID": lambda view: view.schedule.schedule_id,
    "USER": lambda view: view.schedule.user_id,
    "TITLE": lambda view: view.schedule.label,
    "NAME": lambda view: view.schedule.name,
    "CRON": lambda view: rule_text(view.schedule),
    "ZONE": lambda view: view.schedule.timezone,
    "STATE": lambda view: view.state,
    "NEXT RUN": lambda view: view.schedule.next_run,
    "LAST RUN": lambda view: view.schedule.last_run,
}


@click.group(cls=Group, default="list")
def schedules() -> None:
    """Make, see and change schedules; alone: list them. Times are UTC."""


# --- looking --------------------------------------------------------------------------------------


def listed_document(view: ScheduleView) -> dict[str, Any]:
    """A schedule in a listing: without what users put in, which `show` has."""
    found: dict[str, Any] = document(view)
    return {name: value for name, value in found.items() if name not in ("payload", "metadata")}


@schedules.command("list")
@filtered
@paged
@reading
@pass_session
def list_(session: Session, limit: int, cursor: str | None, all_: bool, **filters: Any) -> None:
    """Schedules, by user and id. With --name, --name-prefix or --contains by name and id."""
    wanted = filters_of(filters)
    with session.inspector() as inspector:
        walk = Walk(
            lambda most, at: inspector.schedules.list(limit=most, cursor=at, **wanted),
            limit,
            cursor,
            all_,
        )
        # A problem does not say whose it is, so a part of the schedules is not shown those of all.
        problems = [] if wanted else inspector.schedules.problems()[:limit]
        show(
            session,
            "schedules",
            walk,
            COLUMNS,
            to_document=listed_document,
            more={"set_aside": document(problems)},
        )
    if session.is_table:
        for problem in problems:
            say(printable(f"set aside: {problem.schedule_id}: {problem.reason}"))


@schedules.command("show")
@click.argument("schedule_id", metavar="ID")
@reading
@pass_session
def show_(session: Session, schedule_id: str) -> None:
    """All of one schedule. Secrets in payload and metadata are masked."""
    with session.inspector() as inspector:
        view = inspector.schedules.get(schedule_id)
    show_one(session, {**document(view), "etag": view.etag}, _rows(view))


def _rows(view: ScheduleView) -> dict[str, object]:
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
    own = document(task)
    shown = {"schedule_id", "cron_expr", "every", "at", "timezone", "is_active", "next_run"}
    for name, value in own.items():
        if name not in shown | {"last_run"} and value not in (None, {}, []):
            moment = getattr(task, name)
            rows[name.replace("_", " ")] = moment if isinstance(moment, datetime) else value
    return rows | {"etag": view.etag}


@schedules.command("next")
@click.argument("rule", metavar="CRON|ID", required=False)
@click.option("--id", "schedule_id", metavar="ID", help="A schedule, whatever its id looks like.")
@click.option("--every", type=DURATION, help="An interval instead of a cron expression.")
@click.option("--at", type=FUTURE, help="A moment instead of a cron expression.")
@click.option("--timezone", "--tz", "timezone", default="UTC", show_default=True)
@click.option("--count", type=int, default=5, show_default=True, help="How many runs.")
@click.option("--after", type=FUTURE, help="The first ones after this moment; default: now.")
@reading
@pass_session
def next_(
    session: Session,
    rule: str | None,
    schedule_id: str | None,
    every: float | None,
    at: datetime | None,
    timezone: str,
    count: int,
    after: datetime | None,
) -> None:
    """The next runs of a rule, or of a schedule. For a rule, no Redis is needed."""
    if schedule_id is None and rule is not None and not _is_cron(rule):
        rule, schedule_id = None, rule
    if schedule_id is not None:
        if rule is not None or every is not None or at is not None:
            raise click.UsageError("give a rule or the id of a schedule, not both")
        return _next_of(session, schedule_id, count, after)
    preview = Schedules.preview(
        None if rule is None else read_rule(rule),
        every=every,
        at=at,
        timezone=timezone,
        count=count,
        after=after,
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
    """Whether it is a rule: an expression, a name such as EVERY_DAY, or a dictionary of fields."""
    if text.startswith(("@", "{")) or text in SYMBOLIC:
        return True
    return len(text.split()) in CRON_FIELDS


def _next_of(session: Session, schedule_id: str, count: int, after: datetime | None) -> None:
    start = datetime.now(UTC) if after is None else after
    with session.inspector() as inspector:
        page = inspector.schedules.moments(schedule_id, start, start + AHEAD, limit=count)
    columns = {
        "AT": lambda each: each.at,
        "OUTCOME": lambda each: each.outcome,
        "REASON": lambda each: each.reason,
    }
    show(session, "moments", iter(page), columns)


@schedules.command()
@click.argument("schedule_id", metavar="ID")
@paged
@reading
@pass_session
def history(session: Session, schedule_id: str, limit: int, cursor: str | None, all_: bool) -> None:
    """Its runs: unfinished ones, then ended ones, newest first."""
    with session.inspector() as inspector:
        inspector.schedules.get(schedule_id)

        def fetch(most: int, at: str | None) -> Any:
            return inspector.runs.list(schedule_id=schedule_id, limit=most, cursor=at)

        show(session, "runs", Walk(fetch, limit, cursor, all_), RUN_COLUMNS)


@schedules.command()
@click.argument("schedule_id", metavar="ID")
@click.option("--since", type=PAST, default="1d", show_default=True)
@click.option("--until", type=FUTURE, default="now", show_default=True)
@paged
@reading
@pass_session
def moments(
    session: Session,
    schedule_id: str,
    since: datetime,
    until: datetime,
    limit: int,
    cursor: str | None,
    all_: bool,
) -> None:
    """Each moment in a range, and what became of it."""
    with session.inspector() as inspector:

        def fetch(most: int, at: str | None) -> Any:
            return inspector.schedules.moments(schedule_id, since, until, most, at)

        columns = {
            "AT": lambda each: each.at,
            "OUTCOME": lambda each: each.outcome,
            "REASON": lambda each: each.reason,
            "TASK": lambda each: each.task_id,
        }
        show(session, "moments", Walk(fetch, limit, cursor, all_), columns)


@schedules.command()
@click.argument("schedule_id", metavar="ID")
@paged
@reading
@pass_session
def changes(session: Session, schedule_id: str, limit: int, cursor: str | None, all_: bool) -> None:
    """Who changed what of it, newest first."""
    with session.inspector() as inspector:

        def fetch(most: int, at: str | None) -> Any:
            return inspector.schedules.changes(schedule_id, min(most, 50), at)

        columns = {
            "AT": lambda each: each.at,
            "BY": lambda each: each.by,
            "NOTE": lambda each: each.note,
            "FIELDS": lambda each: [
                f"{name}: {cell(new)}" if each.made else f"{name}: {cell(old)} -> {cell(new)}"
                for name, (old, new) in each.fields.items()
            ],
        }
        show(session, "changes", Walk(fetch, limit, cursor, all_), columns)


@schedules.command()
@click.argument("schedule_id", metavar="ID")
@click.option("--limit", type=int, default=100, show_default=True, help="At most so many lines.")
@reading
@pass_session
def logs(session: Session, schedule_id: str, limit: int) -> None:
    """The last lines that its runs have logged, newest first."""
    with session.inspector() as inspector:
        lines = inspector.schedules.logs(schedule_id, limit)
    show(session, "lines", iter(lines), log_columns(with_task=True))


# --- making and changing --------------------------------------------------------------------------


@schedules.command()
@click.argument("cron_expr", metavar="[CRON]", required=False)
@click.option("--id", "schedule_id", metavar="ID", help="Its id; default: a random one.")
@click.option("--replace", is_flag=True, help="Overwrite the schedule that has the id.")
@schedule_options
@reading
@pass_session
def add(session: Session, replace: bool, **given: Any) -> None:
    """Store a schedule and print its id.

    Its rule: five cron fields (six with seconds), EVERY_DAY and the like, --every or --at.
    """
    fields = fields_of(given)
    if "user_id" not in fields:
        raise click.UsageError("--user is missing: whose tasks does the schedule make?")
    with session.inspector() as inspector:
        on_conflict = "replace" if replace else "error"
        schedule_id = inspector.schedules.add(on_conflict=on_conflict, **fields)
    answer(session, {"schedule_id": schedule_id}, schedule_id)


@schedules.command()
@click.argument("original", metavar="ID")
@click.option("--id", "new_id", metavar="NEW_ID", help="Of the copy; default: a random one.")
@click.option("--cron", "cron_expr", metavar="CRON", help="Another rule.")
@schedule_options
@reading
@pass_session
def copy(session: Session, original: str, new_id: str | None, **given: Any) -> None:
    """Store a schedule like another and print its id. Fields that are given are changed."""
    with session.inspector() as inspector:
        schedule_id = inspector.schedules.copy(original, new_id, **fields_of(given))
    answer(session, {"schedule_id": schedule_id}, schedule_id)


@schedules.command()
@click.argument("schedule_id", metavar="ID")
@click.option("--cron", "cron_expr", metavar="CRON", help="Another rule.")
@click.option("--next-run", type=FUTURE, help="Its next run, a moment to come.")
@click.option("--clear", multiple=True, metavar="FIELD", help="Take a limit away; repeatable.")
@click.option("--if-match", metavar="ETAG", help="Only if it is still as `show` said.")
@schedule_options
@reading
@pass_session
def update(
    session: Session, schedule_id: str, clear: tuple[str, ...], if_match: str | None, **given: Any
) -> None:
    """Change the fields that are given, and no others. A payload is replaced as a whole."""
    patch = fields_of(given) | cleared(clear)
    if not patch:
        raise click.UsageError("nothing to change: give at least one field")
    with session.inspector() as inspector:
        view = inspector.schedules.update(schedule_id, patch, if_match=if_match)
    show_one(session, {**document(view), "etag": view.etag}, _rows(view))


@schedules.command()
@meant
@click.option("--note", help="Why; kept in the history of its changes.")
@click.option("--until", type=FUTURE, help="It goes on by itself then (one schedule).")
@destructive
@reading
@pass_session
def pause(
    session: Session,
    ids: tuple[str, ...],
    note: str | None,
    until: datetime | None,
    consent: Consent,
    **filters: Any,
) -> int:
    """Fire no more until resumed: those named, or all that match."""
    if until is None:
        return act_on_many(session, "pause", ids, filters, consent, note=note)
    if not is_one(ids, filters):
        raise click.UsageError("--until is for one schedule: give its id")
    with session.inspector() as inspector:
        inspector.schedules.get(ids[0])
        if consent.dry_run:
            consent.to(f"pause schedule {ids[0]!r} until {until.isoformat()}")
        else:
            inspector.schedules.pause(ids[0], note=note, until=until)
    return 0


@schedules.command()
@meant
@click.option("--note", help="Why; kept in the history of its changes.")
@destructive
@reading
@pass_session
def resume(
    session: Session, ids: tuple[str, ...], note: str | None, consent: Consent, **filters: Any
) -> int:
    """Let them go on from now: those named, or all that match."""
    return act_on_many(session, "resume", ids, filters, consent, note=note)


@schedules.command()
@meant
@click.option("--payload", multiple=True, metavar="JSON|@FILE|K=V", help="For this run only.")
@destructive
@reading
@pass_session
def trigger(
    session: Session,
    ids: tuple[str, ...],
    payload: tuple[str, ...],
    consent: Consent,
    **filters: Any,
) -> int:
    """One run now, whatever the plan. Of one schedule, the id of the task is printed."""
    given = read_object(payload, "--payload")
    if not is_one(ids, filters):
        if given is not None:
            raise click.UsageError("--payload is for one schedule: give its id")
        return act_on_many(session, "trigger", ids, filters, consent)
    with session.inspector() as inspector:
        inspector.schedules.get(ids[0])
        if consent.dry_run:
            consent.to(f"trigger schedule {ids[0]!r}")
        else:
            task_id = inspector.schedules.trigger(ids[0], payload=given)
            answer(session, {"schedule_id": ids[0], "task_id": task_id}, task_id)
    return 0


@schedules.command()
@meant
@click.option("--if-match", metavar="ETAG", help="Only if it is still as `show` said.")
@destructive
@reading
@pass_session
def remove(
    session: Session,
    ids: tuple[str, ...],
    if_match: str | None,
    consent: Consent,
    **filters: Any,
) -> int:
    """Forget schedules: those named, or all that match. Tasks that they have fired stay."""
    if if_match is None:
        return act_on_many(session, "remove", ids, filters, consent, ask_for_one=True)
    if not is_one(ids, filters):
        raise click.UsageError("--if-match is for one schedule: give its id")
    with session.inspector() as inspector:
        inspector.schedules.get(ids[0])
        if consent.to(f"remove schedule {ids[0]!r}"):
            inspector.schedules.remove(ids[0], if_match=if_match)
    return 0


@schedules.command()
@click.argument("schedule_id", metavar="ID")
@click.option("--since", type=PAST, required=True, help="From this moment on.")
@click.option("--until", type=PAST, default="now", show_default=True, help="Until before it.")
@click.option("--limit", type=int, default=1000, show_default=True, help="Refuse more moments.")
@click.option("--priority", type=PRIORITY, default="1", help="Of the tasks; default: VERY_LOW.")
@click.option("--unknown-too", is_flag=True, help="Also those of which nobody knows.")
@destructive
@reading
@pass_session
def backfill(
    session: Session,
    schedule_id: str,
    since: datetime,
    until: datetime,
    limit: int,
    priority: int,
    unknown_too: bool,
    consent: Consent,
) -> int:
    """Push a task for each past moment in a range that has none."""
    options: Any = {"limit": limit, "priority": priority, "unknown_too": unknown_too}
    with session.inspector() as inspector:
        report = inspector.schedules.backfill(schedule_id, since, until, **options)
        if report.moments and consent.to(
            f"push {plural(report.moments, 'task')} for moments of schedule {schedule_id!r}"
        ):
            report = inspector.schedules.backfill(
                schedule_id, since, until, dry_run=False, **options
            )
    found = document(report)
    show_one(session, found, {name.replace("_", " "): value for name, value in found.items()})
    return 0 if consent.dry_run or report.filled == report.moments else FAILED
