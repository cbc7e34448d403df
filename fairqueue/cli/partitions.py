"""`fairqueue partitions`: where the partitions of a queue are, and which one is hot."""

import time
from collections.abc import Callable
from typing import Any

import click

from fairqueue.cli.exit_codes import OK, UNHEALTHY
from fairqueue.cli.listing import columns, show_one
from fairqueue.cli.output import print_table, say
from fairqueue.cli.session import Command, Session, prints_data
from fairqueue.cli.text import printable
from fairqueue.cli.values import DURATION
from fairqueue.inspection.documents import document
from fairqueue.inspection.partitions import PartitionsView
from fairqueue.stats.partitions import LEAST_APART_S

MIB = 1024 * 1024

Column = Callable[[Any], object]
COLUMNS: dict[str, Column] = {
    **columns("PARTITION=partition SLOT=slot NODE=node"),
    "CLOCK": lambda row: None if row.clock is None else round(row.clock, 1),
    **columns("READY=ready HELD=held DELAYED=delayed RUNNING=running"),
    "LEADER": lambda row: row.leader,
    "PUSHED/S": lambda row: _per_second(row.pushed),
    "CLAIMED/S": lambda row: _per_second(row.claimed),
}
MEMORY: dict[str, Column] = {"MEMORY": lambda row: _mebibytes(row.memory)}
NODE_COLUMNS: dict[str, Column] = {
    "NODE": lambda node: node.node,
    "SERVER": lambda node: "does not answer" if node.error else node.server,
    "PARTITIONS": lambda node: ", ".join(map(str, node.partitions)),
    "MEMORY": lambda node: _mebibytes(node.used_memory),
    "COMMANDS/S": lambda node: _per_second(node.commands),
    "CPU": lambda node: None if node.cpu is None else f"{node.cpu:.0%}",
}


@click.command(cls=Command)
@click.option(
    "--over",
    "period",
    type=DURATION,
    default="1s",
    show_default=True,
    help="Count pushes, claims and processor time over this long.",
)
@click.option("--memory", is_flag=True, help="Add up the memory of the keys of each partition.")
@prints_data
def partitions(session: Session, period: float, memory: bool) -> int:
    """Show partitions with their nodes, and which one is hot.

    The slot, the clock, the backlog, the leader and the load of each, and what to do. The exit code
    is 6 if one does not answer, or if nobody leads it although it has schedules.
    """
    part = session.inspector.partitions
    if period >= LEAST_APART_S:
        part.read()
        time.sleep(period)
    view = part.read(memory=memory)
    if session.is_table:
        _print(view, memory)
    else:
        show_one(session, document(view), {})
    return UNHEALTHY if any(each.level == "error" for each in view.advice) else OK


def _print(view: PartitionsView, memory: bool) -> None:
    shown = {**COLUMNS, **(MEMORY if memory else {})}
    rows = [[column(row) for column in shown.values()] for row in view.partitions]
    print_table(list(shown), rows)
    say("")
    nodes = [[column(node) for column in NODE_COLUMNS.values()] for node in view.nodes]
    print_table(list(NODE_COLUMNS), nodes)
    say("")
    for each in view.advice:
        say(printable(f"{each.level}: {each.text}."))
        if each.command is not None:
            say(f"  {printable(each.command)}")


def _mebibytes(count: int | None) -> str | None:
    return None if count is None else f"{count / MIB:.1f} MiB"


def _per_second(rate: float | None) -> str | None:
    return None if rate is None else f"{rate:.1f}"
