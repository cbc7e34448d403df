"""`fairqueue repartition`: move a queue to a new one with another number of partitions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from threading import Event

import click

from fairqueue.cli.exit_codes import FAILED, OK
from fairqueue.cli.output import Progress, note, print_json, print_table
from fairqueue.cli.session import (
    DEFAULT_URL,
    Command,
    Consent,
    Session,
    destructive,
    ended_by_signals,
    prints_data,
)
from fairqueue.errors import plural
from fairqueue.link.keys import MOST_PARTITIONS
from fairqueue.queue.queue import TaskQueue
from fairqueue.repartition import MoveReport, QueueCounts, Repartition, count

REFUSED_SHOWN = 20


@click.command(cls=Command)
@click.argument("new", metavar="NEW")
@click.option(
    "--to",
    "to",
    metavar="N",
    type=click.IntRange(1, MOST_PARTITIONS),
    required=True,
    help="How many partitions the queue NEW has, or is to have.",
)
@click.option("--to-url", metavar="URL", help="URL of the Redis of NEW; default: the same one.")
@click.option("--drain", is_flag=True, help="Move a queue that is in use, as far as is possible.")
@click.option("--wait", is_flag=True, help="With --drain: go on until nothing is left.")
@destructive
@prints_data
def repartition(
    session: Session,
    new: str,
    to: int,
    to_url: str | None,
    drain: bool,
    wait: bool,
    consent: Consent,
) -> int:
    """Move the queue to a new one with N partitions.

    The queue must be at rest and NEW empty, unless --drain is given. A move that was interrupted is
    continued by the same command. The exit code is 1 if something is left.
    """
    if wait and not drain:
        raise click.UsageError("--wait is of use only with --drain: a queue at rest moves at once")
    with _queues(session, new, to, to_url) as (old, target):
        target_name = f"{new!r} with {plural(to, 'partition')}"
        before = count(old)
        what = f"move {_summary(before)} from queue {old.name!r} to {target_name}"
        with Progress("repartition") as progress:
            mover = Repartition(old, target, progress=progress)
            for user in [] if drain else mover.alive():
                note(f"queue {old.name!r} is in use: {user}")
            if not consent.to(what):
                return OK
            stopped = Event()
            with ended_by_signals(stopped.set):
                report = mover.run(drain=drain, wait=wait, stop=stopped.is_set)
    _show(session, report)
    return OK if report.is_complete and report.verified is not False else FAILED


@contextmanager
def _queues(
    session: Session, new: str, partitions: int, to_url: str | None
) -> Iterator[tuple[TaskQueue, TaskQueue]]:
    with session.open() as old:
        url = to_url or (old.server.url if old.server else session.named_url or DEFAULT_URL)
        with TaskQueue.from_url(url, new, partitions=partitions) as target:
            yield old, target


def _summary(counts: QueueCounts) -> str:
    unfinished = counts.waiting + counts.delayed + counts.moving
    return ", ".join(
        (
            plural(unfinished, "waiting task"),
            plural(counts.schedules, "schedule"),
            plural(counts.dead + counts.ended, "ended task"),
        )
    )


def _show(session: Session, report: MoveReport) -> None:
    if not session.is_table:
        print_json({**asdict(report), "complete": report.is_complete})
        return
    before, left, after = asdict(report.before), asdict(report.left), asdict(report.after)
    rows = [
        [name, before[name], report.moved.get(name, 0), left[name], after[name]] for name in before
    ]
    print_table(["", "BEFORE", "MOVED", "LEFT", "IN NEW"], rows)
    if report.verified is not None:
        same = "are those" if report.verified else "ARE NOT THOSE"
        note(f"the ids of all tasks and schedules {same} that were there before")
    if report.known:
        note(f"{plural(report.known, 'record was', 'records were')} in the new queue already")
    for name, why in list(report.refused.items())[:REFUSED_SHOWN]:
        note(f"left behind: {name}: {why}")
    if not report.is_complete:
        note(f"{plural(report.left.total, 'record is', 'records are')} left in the old queue")
