"""The queue as a whole: `status`, `stats`, `settings`, `audit`, `prune`."""

import time
from functools import partial
from typing import Any

import click

from fairqueue.cli.exit_codes import OK, UNHEALTHY
from fairqueue.cli.listing import Listing, answer, columns, paged, show_one
from fairqueue.cli.output import json_text, print_table, say
from fairqueue.cli.session import Command, Consent, Session, destructive, prints_data
from fairqueue.cli.text import duration_text, exact_duration, in_words, printable
from fairqueue.cli.values import (
    DURATION,
    PAST,
    WITH_UNIT,
    json_or_text,
    lacks_unit,
    read_duration,
    read_pairs,
)
from fairqueue.errors import plural
from fairqueue.inspection.documents import document
from fairqueue.inspection.missing import note_missing
from fairqueue.inspection.views import Overview
from fairqueue.models import QueueSnapshot
from fairqueue.queue.pools import PoolInfo

AUDIT_COLUMNS = columns(
    "AT=at ACTOR=actor VIA=via ACTION=action TARGET=target TENANT=tenant OUTCOME=outcome "
    "ERROR=error"
)
# Settings that are durations, which may be written as 2h.
DURATIONS = ("keep_finished_for", "keep_dead_for", "ageing", "min_interval")
# Those that delete records: a number without a unit may be meant as days.
WITH_UNITS = ("keep_finished_for", "keep_dead_for")


@click.command(cls=Command)
@prints_data
def status(session: Session) -> int:
    """Show the state of the queue and what needs attention. Exit code 6 if there is an error."""
    system = session.inspector.system
    overview, attention, pools = system.overview(), system.attention(), system.pools()
    found = {
        "overview": document(overview),
        "pools": document(pools),
        "attention": document(attention),
    }
    show_one(session, found, _status_rows(overview))
    if session.is_table:
        if len(pools) > 1:
            say("")
            print_table(POOL_HEADINGS, (_pool_row(pool) for pool in pools))
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
        **_of_flow(overview.snapshot),
        "failures last hour": overview.failures_last_hour,
        "runs today": in_words(overview.runs_today),
        "schedules": f"{overview.schedules}, {overview.active_schedules} active",
        "due within the hour": overview.due_within_hour,
        "workers": f"{overview.workers} with {plural(overview.worker_slots or 0, 'slot')}",
        "leader": leads,
    }


def _of_flow(snapshot: QueueSnapshot | None) -> dict[str, object]:
    """What a queue with tenants, or with limits of names and keys, has besides."""
    if snapshot is None:
        return {}
    rows: dict[str, object] = {}
    if snapshot.active_tenants:
        parked = f", {snapshot.parked_tenants} held back" if snapshot.parked_tenants else ""
        rows["tenants with tasks"] = f"{snapshot.active_tenants}{parked}"
    if snapshot.held:
        rows["waiting for limits"] = snapshot.held
    return rows


POOL_HEADINGS = ("POOL", "WAITING", "OLDEST WAIT", "WORKERS", "SLOTS", "RUNNING")


def _pool_row(pool: PoolInfo) -> tuple[object, ...]:
    wait = duration_text(pool.oldest_wait)
    return pool.pool, pool.waiting, wait, pool.workers, pool.slots, pool.running


@click.command(cls=Command)
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="With --watch.")
@click.option("--count", type=int, help="With --watch: stop after this many lines.")
@prints_data
def stats(session: Session, watch: bool, interval: float, count: int | None) -> None:
    """Print statistics of the queue. With --watch, one line at a time."""
    if watch:
        _watch(session, interval, count)
        return
    snapshot = session.inspector.system.snapshot()
    own = document(snapshot)
    counters = own.pop("counters")
    show_one(session, document(snapshot), own | dict(sorted(counters.items())))


WATCHED = ("ready", "delayed", "running", "dead")
FLOWS = ("pushed", "claimed", "finished", "buried", "fired")


def _watch(session: Session, interval: float, count: int | None) -> None:
    """Print a line per interval: the counts, and the rates since the line before."""
    before: QueueSnapshot | None = None
    number = 0
    while count is None or number < count:
        if number:
            time.sleep(interval)
        with note_missing() as missing:
            snapshot = session.inspector.system.snapshot()
        session.warn_missing(missing.partitions)
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
    """The growth of a counter per second between two snapshots."""
    if before is None:
        return None
    seconds = (snapshot.at - before.at).total_seconds()
    grown = snapshot.counters.get(counter, 0) - before.counters.get(counter, 0)
    return round(grown / seconds, 1) if seconds > 0 else None


@click.command(cls=Command)
@click.argument("changes", metavar="[NAME=VALUE]...", nargs=-1)
@prints_data
def settings(session: Session, changes: tuple[str, ...]) -> None:
    """Show or change the settings of the queue. They apply to all its processes."""
    given = {name: _setting(name, text) for name, text in read_pairs(changes, "setting").items()}
    system = session.inspector.system
    if given:
        system.configure(**given)
    found = system.settings()
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
        limits = sorted(found["limits"].items())
        rows = [[name, each["slots"], each["rate"], each["timeout"]] for name, each in limits]
        print_table(["NAME", "SLOTS", "RATE", "TIMEOUT"], rows)


def _setting(name: str, text: str) -> Any:
    if name in WITH_UNITS and lacks_unit(text):
        raise click.UsageError(
            f"{name} {text!r} needs a unit, for example {text}d, {text}h or {text}s"
        )
    seconds = read_duration(text) if name in DURATIONS else None
    return json_or_text(text) if seconds is None else seconds


@click.command(cls=Command)
@click.option("--actor", help="Changes made by this actor.")
@click.option("--action", help="Actions with this prefix, for example schedule.")
@click.option("--target", help="Changes of this object.")
@click.option("--tenant", help="Changes in this tenant.")
@click.option("--since", type=PAST, help="Since this time.")
@click.option("--until", type=PAST, help="Before this time.")
@paged
def audit(listing: Listing, **filters: Any) -> None:
    """List who changed what, newest first."""
    listing.show("entries", partial(listing.inspector.audit.list, **filters), AUDIT_COLUMNS)


@click.command(cls=Command)
@click.option("--older-than", type=WITH_UNIT, required=True, help="For example 7d.")
@destructive
@prints_data
def prune(session: Session, older_than: float, consent: Consent) -> None:
    """Delete the records of old runs, failed ones too. Prints how many."""
    system = session.inspector.system
    count = system.prune(older_than)
    age = duration_text(older_than)
    if count and consent.to(f"delete {plural(count, 'run')} that ended more than {age} ago"):
        count = system.prune(older_than, dry_run=False)
    answer(session, {"forgotten": count, "dry_run": consent.dry_run}, str(count))
