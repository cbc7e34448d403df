"""Print data on standard output, as a table or JSON, and notes on standard error."""

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

# Colours of words on a terminal.
_STYLES = {
    **dict.fromkeys(("failed", "timed_out", "problem", "disabled", "error"), "red"),
    **dict.fromkeys(("paused", "retrying", "warning", "cancelled", "capped"), "yellow"),
    **dict.fromkeys(("succeeded", "active", "ok", "served", "done"), "green"),
    **dict.fromkeys(("running", "started"), "cyan"),
}


def say(text: str) -> bool:
    """Print a line of data; return False if the reader has closed the pipe."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Keeps Python from printing an error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def note(text: str) -> None:
    """Print a message on standard error."""
    click.echo(f"fairqueue: {printable(text)}", err=True)


def on_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def json_text(value: object, indent: int | None = None) -> str:
    """A value as JSON without control characters, on one line unless it is indented."""
    text = json.dumps(value, ensure_ascii=False, default=_jsonable, indent=indent)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _jsonable(value: Any) -> object:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def print_json(value: object) -> None:
    """Print a document: indented on a terminal, else on one line."""
    say(json_text(value, 2 if on_terminal() else None))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, with colours on a terminal if rich is installed."""
    listed = [list(row) for row in rows]
    if on_terminal() and _print_rich(headings, listed):
        return
    for line in table([list(headings), *([cell(value) for value in row] for row in listed)]):
        say(line)


def print_pairs(values: Row) -> None:
    """Print names and values, one pair per line."""
    for line in pairs(values):
        say(line)


def _print_rich(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> bool:
    """Print with rich; return False if it is not installed."""
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
    # If a row is still too wide, the terminal wraps it, and ids can be copied.
    console.width = max(console.width, sum(widths.values()) + GAP * len(widths))
    console.print(shown)
    _explain(console, rows, [name for name in headings if name not in widths])
    return True


def _explain(console: Any, rows: Sequence[Sequence[object]], left_out: Sequence[str]) -> None:
    """Print notes below a table: the time zone, and columns that were left out."""
    words = []
    if any(isinstance(value, datetime) for row in rows for value in row):
        words.append("times are UTC")
    if left_out:
        words.append(f"terminal too narrow for: {', '.join(left_out)}")
    if words:
        console.print(f"({'; '.join(words)})", style="dim")


class Progress:
    """Show the progress of a long operation on standard error, if that is a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = sys.stderr.isatty()
        self._any = False

    def __call__(self, done: int, total: int | None = None) -> None:
        """Show the count, and the total if it is known."""
        if self._shown:
            self._any = True
            of = "" if total is None else f" of {total}"
            click.echo(f"\r{self._what}: {done}{of}", err=True, nl=False)

    def __enter__(self) -> Callable[..., None]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._any:
            click.echo("", err=True)
