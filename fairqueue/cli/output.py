"""What commands print: data on standard output, as table or JSON; all else on standard error."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from fairqueue.cli.column_widths import GAP, WRAPPED, fit
from fairqueue.cli.text import cell, pairs, printable, short_cell, table

Row = Mapping[str, object]

# Words that have a colour on a terminal, always besides the word itself.
_STYLES = {
    **dict.fromkeys(("failed", "timed_out", "problem", "disabled", "error"), "red"),
    **dict.fromkeys(("paused", "retrying", "warning", "cancelled", "capped"), "yellow"),
    **dict.fromkeys(("succeeded", "active", "ok", "served", "done"), "green"),
    **dict.fromkeys(("running", "started"), "cyan"),
}


def say(text: str) -> bool:
    """Print a line of data, if anybody reads it; False if nobody does any more."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # The exit code still says what happened. Python would complain when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def note(text: str) -> None:
    """Say something that is no data."""
    click.echo(f"fairqueue: {printable(text)}", err=True)


def on_terminal() -> bool:
    """Whether people see what is printed."""
    return sys.stdout.isatty()


def json_text(value: object, indent: int | None = None) -> str:
    """A value as JSON, on one line unless it is indented; it cannot tell a terminal anything."""
    text = json.dumps(value, ensure_ascii=False, default=_jsonable, indent=indent)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _jsonable(value: Any) -> object:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def print_json(value: object) -> None:
    """A document: on a terminal indented, else on one line."""
    say(json_text(value, 2 if on_terminal() else None))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Rows below headings: with lines and colours where people look and rich is there."""
    listed = [list(row) for row in rows]
    if on_terminal() and _print_rich(headings, listed):
        return
    for line in table([list(headings), *([cell(value) for value in row] for row in listed)]):
        say(line)


def print_pairs(values: Row) -> None:
    """Names and values of one thing, below each other."""
    for line in pairs(values):
        say(line)


def _print_rich(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> bool:
    """Print by way of rich; False where that is not installed."""
    try:
        from rich import box
        from rich.cells import cell_len
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    columns = {
        heading: [printable(short_cell(row[place])) for row in rows]
        for place, heading in enumerate(headings)
    }
    whole = {name: max(map(cell_len, [name, *column])) for name, column in columns.items()}
    empty = [name for name, column in columns.items() if set(column) <= {"-"}]
    console = Console(highlight=False)
    widths = fit(whole, empty if rows else [], console.width)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, GAP - 1, 0, 0))
    for name, width in widths.items():
        wraps = name in WRAPPED
        shown.add_column(
            name, width=width, no_wrap=not wraps, overflow="fold" if wraps else "ellipsis"
        )
    for texts in zip(*(columns[name] for name in widths), strict=True):
        shown.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in texts))
    # A row that is too wide all the same is for the terminal to break: an id can be copied then.
    console.width = max(console.width, sum(widths.values()) + GAP * len(widths))
    console.print(shown)
    _explain(console, rows, [name for name in headings if name not in widths])
    return True


def _explain(console: Any, rows: Sequence[Sequence[object]], left_out: Sequence[str]) -> None:
    """Say below a table what people cannot see in it."""
    words = []
    if any(isinstance(value, datetime) for row in rows for value in row):
        words.append("times are UTC")
    if left_out:
        words.append(f"not shown in so narrow a terminal: {', '.join(left_out)}")
    if words:
        console.print(f"({'; '.join(words)})", style="dim")


class Progress:
    """How far something long has come, on standard error if that is a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = sys.stderr.isatty()
        self._any = False

    def __call__(self, done: int, total: int | None = None) -> None:
        """So many are done, of so many if that is known."""
        if self._shown:
            self._any = True
            of = "" if total is None else f" of {total}"
            click.echo(f"\r{self._what}: {done}{of}", err=True, nl=False)

    def __enter__(self) -> Callable[..., None]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._any:
            click.echo("", err=True)
