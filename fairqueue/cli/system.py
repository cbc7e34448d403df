"""The queue as a whole: `status`, `stats`, `settings`, `audit`, `prune`."""

import time
from typing import Any

import click

from fairqueue.cli.exit_codes import OK, UNHEALTHY
from fairqueue.cli.listing import Walk, answer, paged, show, show_one
from fairqueue.cli.output import json_text, print_table, say
from fairqueue.cli.session import Command, Consent, Session, destructive, pass_session, reading
from fairqueue.cli.text import duration_text, exact_duration, in_words, plural, printable
from fairqueue.cli.values import (
    DURATION,
    PAST,
    WITH_UNIT,
    json_or_text,
    lacks_unit,
    read_duration,
    read_pairs,
)
from fairqueue.inspection import Inspector
from fairqueue.inspection.documents import document
from fairqueue.inspection.views import Overview
from fairqueue.models import QueueSnapshot

AUDIT_PAGE = 1000

AUDIT_COLUMNS = {
    "AT": lambda entry: entry.at,
    "ACTOR": lambda entry: entry.actor,
    "VIA": lambda entry: entry.via,
    "ACTION": lambda entry: entry.action,
    "TARGET": lambda entry: entry.target,
    "TENANT": lambda entry: entry.tenant,
    "OUTCOME": lambda entry: entry.outcome,
    "ERROR": lambda entry: entry.error,
}
# Settings that are durations: people may write 2h.
DURATIONS = ("keep_finished_for", "keep_dead_for", "ageing", "min_interval")
# Among them those that make records go: a number alone may be meant as days.
WITH_UNITS = ("keep_finished_for", "keep_dead_for")


@click.command(cls=Command)
@reading
@pass_session
def status(session: Session) -> int:
    """How the queue is, and what needs attention. Exit code 6 if there is an error."""
    with session.inspector() as inspector:
        overview = inspector.system.overview()
        attention = inspector.system.attention()
    found = {"overview": document(overview), "attention": document(attention)}
    show_one(session, found, _status_rows(overview))
    if session.is_table:
        for each in attention:
            say(printable(f"{each.level}: {each.text}"))
    return UNHEALTHY if any(each.level == "error" for each in attention) else OK


def _status_rows(overview: Overview) -> dict[str, object]:
    leader = overview.leader
    leads = None
    if leader is not None and leader.scheduler is not None:
        leads = f"{leader.scheduler} (term {leader.terms}, {leader.seconds_left:.1f}s left)"
    return {
        "at": overview.at,
        "waiting": overview.ready,
        "delayed": overview.delayed,
        "running": overview.running,
        "dead letters": overview.dead,
        "oldest wait": duration_text(overview.oldest_wait),
        "wait p95": duration_text(overview.wait_p95),
        "users with tasks": overview.active_users,
        "failures last hour": overview.failures_last_hour,
        "runs today": in_words(overview.runs_today),
        "schedules": f"{overview.schedules}, {overview.active_schedules} active",
        "due within the hour": overview.due_within_hour,
        "workers": f"{overview.workers} with {plural(overview.worker_slots or 0, 'slot')}",
        "leader": leads,
    }


@click.command(cls=Command)
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C.")
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="With --watch.")
@click.option("--count", type=int, help="With --watch: end after so many.")
@reading
@pass_session
def stats(session: Session, watch: bool, interval: float, count: int | None) -> None:
    """Counts and counters of the queue. With --watch, a line for each look."""
    with session.inspector() as inspector:
        if watch:
            _watch(session, inspector, interval, count)
            return
        snapshot = inspector.system.snapshot()
    own = document(snapshot)
    counters = own.pop("counters")
    show_one(session, document(snapshot), own | dict(sorted(counters.items())))


WATCHED = ("ready", "delayed", "running", "dead")
FLOWS = ("pushed", "claimed", "finished", "buried", "fired")


def _watch(session: Session, inspector: Inspector, interval: float, count: int | None) -> None:
    """A line for each look: what there is, and what happened in a second since the last one."""
    before: QueueSnapshot | None = None
    number = 0
    while count is None or number < count:
        if number:
            time.sleep(interval)
        snapshot = inspector.system.snapshot()
        if not _say_line(session, snapshot, before, is_first=number == 0):
            return
        before = snapshot
        number += 1


def _say_line(
    session: Session, snapshot: QueueSnapshot, before: QueueSnapshot | None, *, is_first: bool
) -> bool:
    line: dict[str, Any] = {"at": snapshot.at.strftime("%H:%M:%S")}
    line |= {name: getattr(snapshot, name) for name in WATCHED}
    line |= {f"{name}/s": rate(snapshot, before, name) for name in FLOWS}
    if not session.is_table:
        return say(json_text({**line, "at": snapshot.at.isoformat()}))
    widths = [max(len(name), 9) for name in line]
    if is_first:
        say("  ".join(name.rjust(width) for name, width in zip(line, widths, strict=True)))
    values = ("-" if value is None else str(value) for value in line.values())
    return say("  ".join(text.rjust(width) for text, width in zip(values, widths, strict=True)))


def rate(snapshot: QueueSnapshot, before: QueueSnapshot | None, counter: str) -> float | None:
    """How much a counter has grown in a second between two looks."""
    if before is None:
        return None
    seconds = (snapshot.at - before.at).total_seconds()
    grown = snapshot.counters.get(counter, 0) - before.counters.get(counter, 0)
    return round(grown / seconds, 1) if seconds > 0 else None


@click.command(cls=Command)
@click.argument("changes", metavar="[NAME=VALUE]...", nargs=-1)
@reading
@pass_session
def settings(session: Session, changes: tuple[str, ...]) -> None:
    """See or change the settings of the queue. NAME=VALUE holds for all its processes."""
    given = {name: _setting(name, text) for name, text in read_pairs(changes, "setting").items()}
    with session.inspector() as inspector:
        if given:
            inspector.system.configure(**given)
        found = inspector.system.settings()
    if not session.is_table:
        show_one(session, document(found), {})
        return
    words = {
        name: exact_duration(value) if name in DURATIONS else value
        for name, value in found["settings"].items()
    }
    show_one(session, None, {"queue": found["queue"], **words})
    if found["limits"]:
        say("")
        print_table(
            ["NAME", "SLOTS", "RATE", "TIMEOUT"],
            [
                [name, each["slots"], each["rate"], each["timeout"]]
                for name, each in sorted(found["limits"].items())
            ],
        )


def _setting(name: str, text: str) -> Any:
    if name in WITH_UNITS and lacks_unit(text):
        raise click.UsageError(f"{name} {text!r} has no unit: such as {text}d, {text}h or {text}s")
    seconds = read_duration(text) if name in DURATIONS else None
    return json_or_text(text) if seconds is None else seconds


@click.command(cls=Command)
@click.option("--actor", help="Who did it.")
@click.option("--action", help="How the action begins, such as schedule.")
@click.option("--target", help="What it was done to.")
@click.option("--tenant", help="Of this tenant.")
@click.option("--since", type=PAST, help="Since then.")
@click.option("--until", type=PAST, help="Before then.")
@paged
@reading
@pass_session
def audit(session: Session, limit: int, cursor: str | None, all_: bool, **filters: Any) -> None:
    """Who changed what, newest first."""
    with session.inspector() as inspector:

        def fetch(most: int, at: str | None) -> Any:
            return inspector.audit.list(limit=most, cursor=at, **filters)

        walk = Walk(fetch, limit, cursor, all_, page=AUDIT_PAGE)
        show(session, "entries", walk, AUDIT_COLUMNS)


@click.command(cls=Command)
@click.option("--older-than", type=WITH_UNIT, required=True, help="Such as 7d.")
@destructive
@reading
@pass_session
def prune(session: Session, older_than: float, consent: Consent) -> None:
    """Forget ended runs before their time. Prints how many; failed ones are among them."""
    with session.inspector() as inspector:
        count = inspector.system.prune(older_than)
        words = duration_text(older_than)
        if count and consent.to(f"forget {plural(count, 'run')} that ended more than {words} ago"):
            count = inspector.system.prune(older_than, dry_run=False)
    answer(session, {"forgotten": count, "dry_run": consent.dry_run}, str(count))
