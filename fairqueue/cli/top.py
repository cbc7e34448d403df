"""`fairqueue top`: a live view of users, workers and throughput."""

import os
import select
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import click

from fairqueue.cli.output import json_text, on_terminal, say
from fairqueue.cli.session import Command, Session, prints_data
from fairqueue.cli.system import rate
from fairqueue.cli.text import duration_text, in_words, printable, table
from fairqueue.cli.values import DURATION
from fairqueue.errors import plural
from fairqueue.inspection import Inspector
from fairqueue.inspection.documents import document
from fairqueue.inspection.missing import note_missing
from fairqueue.models import QueueSnapshot
from fairqueue.queue.pools import PoolInfo, pool_infos
from fairqueue.queue.workers import WorkerInfo
from fairqueue.stats.users import UserInfo

MAX_USERS = 50
BAR, MIN_BAR = 20, 5  # cells of the bar that shows a share; left out if there is less room
MAX_USER = 24  # characters of a name
SHARE_MINUTES = 15  # period that shares are counted over
ENTER, LEAVE, HOME, CLEAR_BELOW = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H", "\x1b[J"
CLEAR_LINE = "\x1b[K"

HEADINGS = ("USER", "TENANT", "STATE", "BACKLOG", "RUNNING", "OLDEST", "ENTITLED", "RECEIVED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The state of the queue at one time. Rates are per second, None at first."""

    snapshot: QueueSnapshot
    users: Sequence[UserInfo]
    workers: Sequence[WorkerInfo]
    finished: float | None
    pushed: float | None
    missing: Sequence[int] = ()  # partitions that did not answer

    @property
    def pools(self) -> Sequence[PoolInfo]:
        """The pools, if there are more than the default one."""
        pools = pool_infos(self.snapshot, self.workers)
        return pools if len(pools) > 1 else ()


def looks(inspector: Inspector, users: int) -> Iterator[Look]:
    """Yield the state of the queue, read anew for each item."""
    before: QueueSnapshot | None = None
    while True:
        with note_missing() as missing:
            snapshot = inspector.system.snapshot()
            people = inspector.users.list(limit=users, minutes=SHARE_MINUTES)
            workers = inspector.workers.list()
        yield Look(
            snapshot=snapshot,
            users=people,
            workers=workers,
            missing=sorted(missing.partitions),
            finished=rate(snapshot, before, "finished"),
            pushed=rate(snapshot, before, "pushed"),
        )
        before = snapshot


def summary(look: Look) -> dict[str, object]:
    """The counts and rates of the queue."""
    shot = look.snapshot
    leads = shot.leader_until is not None and shot.leader_until > shot.at
    flow = {"held": shot.held, "tenants": shot.active_tenants}
    return {
        "at": shot.at.strftime("%H:%M:%S"),
        "waiting": shot.ready,
        "running": shot.running,
        "delayed": shot.delayed,
        **{name: count for name, count in flow.items() if count},
        "dead": shot.dead,
        "finished/s": look.finished,
        "pushed/s": look.pushed,
        "workers": len(look.workers),
        "slots": sum(worker.slots for worker in look.workers),
        "leader": shot.leader if leads else None,
        **({"missing partitions": ", ".join(map(str, look.missing))} if look.missing else {}),
    }


def lines_of(look: Look, columns: int, rows: int) -> list[str]:
    """The lines of the screen: the queue, its users by backlog, its workers."""
    numbers = {name: "-" if value is None else value for name, value in summary(look).items()}
    numbers["oldest wait"] = duration_text(look.snapshot.oldest_wait)
    head = [*_head_lines(numbers, columns), ""]
    pools = [_pools_line(look.pools)] if look.pools else []
    room = max(1, rows - len(head) - len(pools) - 3)
    found = [*head, *_user_lines(look.users, columns)[:room]]
    found += ["", *pools, _workers_line(look.workers)]
    return [printable(line)[:columns] for line in found[:rows]]


def _head_lines(numbers: Mapping[str, object], columns: int) -> list[str]:
    """The counts, wrapped between them."""
    lines = ["fairqueue top "]
    for name, value in numbers.items():
        words = in_words({name: value})
        if len(lines[-1]) + len(words) + 2 > columns:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{words},"
    lines[-1] = lines[-1].rstrip(",")
    return lines


def _user_lines(users: Sequence[UserInfo], columns: int) -> list[str]:
    """Headings and users, with a bar for the received share if there is room.

    The column of tenants is left out if nobody has one.
    """
    found = [HEADINGS, *(_row(info) for info in users)]
    if not any(info.tenant for info in users):
        found = [(row[0], *row[2:]) for row in found]
    lines = list(table(found))
    width = max(map(len, lines))
    cells = min(BAR, columns - width - 2)
    if cells < MIN_BAR:
        return lines
    bars = ["", *(_bar(info.received, cells) for info in users)]
    return [f"{line:{width}}  {bar}".rstrip() for line, bar in zip(lines, bars, strict=True)]


def _bar(share: float, cells: int) -> str:
    filled = round(min(1.0, share) * cells)
    return "#" * filled + "." * (cells - filled)


def _row(info: UserInfo) -> tuple[str, ...]:
    return (
        _cut(info.user_id),
        _cut(info.tenant or "-"),
        info.state,
        str(info.backlog),
        str(info.running),
        duration_text(info.oldest_wait),
        f"{info.entitled:.1%}",
        f"{info.received:.1%}",
    )


def _cut(name: str) -> str:
    return name if len(name) <= MAX_USER else name[: MAX_USER - 1] + "…"


def _pools_line(pools: Sequence[PoolInfo]) -> str:
    words = [
        f"{pool.pool} {pool.waiting} waiting, "
        + (plural(pool.workers, "worker") if pool.workers else "no worker")
        for pool in pools
    ]
    return "pools: " + "; ".join(words)


def _workers_line(workers: Sequence[WorkerInfo]) -> str:
    words = [f"{worker.worker_id} {worker.running}/{worker.slots}" for worker in workers]
    return "(q quits)  workers: " + (", ".join(words) or "none")


@click.command(cls=Command)
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="Between updates.")
@click.option("--count", type=int, help="Stop after this many updates.")
@click.option(
    "--users",
    type=click.IntRange(1, MAX_USERS),
    default=20,
    show_default=True,
    help="Maximum number of users to show.",
)
@prints_data
def top(session: Session, interval: float, count: int | None, users: int) -> None:
    """Show users by backlog with their shares, live. Press q or Ctrl-C to quit."""
    source = looks(session.inspector, users)
    if session.is_table and on_terminal():
        with suppress(KeyboardInterrupt):
            _fill_screen(source, interval, count)
    else:
        _print_lines(session, source, interval, count)


def _print_lines(
    session: Session, source: Iterator[Look], interval: float, count: int | None
) -> None:
    for number, look in enumerate(source, start=1):
        line = {name: "-" if value is None else value for name, value in summary(look).items()}
        busiest = [f"{info.owner} {info.backlog}" for info in look.users[:3]]
        text = f"{in_words(line)}; {', '.join(busiest) or 'nobody is waiting'}"
        if not session.is_table:
            pools = document(pool_infos(look.snapshot, look.workers))
            users = document(list(look.users))
            text = json_text({**summary(look), "users": users, "pools": pools})
        if not say(printable(text)) or number == count:
            return
        time.sleep(interval)


def _fill_screen(source: Iterator[Look], interval: float, count: int | None) -> None:
    with _screen():
        for number, look in enumerate(source, start=1):
            size = shutil.get_terminal_size()
            shown = (line + CLEAR_LINE for line in lines_of(look, size.columns, size.lines - 1))
            sys.stdout.write(HOME + "\r\n".join(shown) + CLEAR_BELOW)
            sys.stdout.flush()
            if number == count or _is_ended(interval):
                return


def _is_ended(seconds: float) -> bool:
    """Wait, and return True as soon as q is pressed."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
            return False
        if select.select([sys.stdin], [], [], left)[0] and os.read(
            sys.stdin.fileno(), 1
        ).lower() in (b"q", b""):
            return True
    return False


@contextmanager
def _screen() -> Iterator[None]:
    """Use the alternate screen and read single keys; restore the terminal afterwards."""
    import termios
    import tty

    before = None
    if sys.stdin.isatty():
        before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
    sys.stdout.write(ENTER)
    try:
        yield
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
