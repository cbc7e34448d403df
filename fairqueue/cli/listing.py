"""Print what pages hold: a bounded part, or all, in the form that was asked for."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import click

from fairqueue.cli.output import json_text, note, print_json, print_pairs, print_table, say
from fairqueue.cli.session import F, Session
from fairqueue.errors import ConfigurationError
from fairqueue.inspection.documents import document
from fairqueue.models import Page
from fairqueue.validation import check_count

USUAL_LIMIT, MOST_LISTED = 100, 100_000  # in one table, which is put together in memory
PAGE = 1000  # asked for at once

T = TypeVar("T")
Fetch = Callable[[int, str | None], Page[T]]  # so many, from a cursor on
Columns = Mapping[str, Callable[[Any], object]]


def paged(command: F) -> F:
    """`--limit`, `--cursor` and `--all`; the command gets them as `limit`, `cursor`, `all_`."""
    command = click.option("--all", "all_", is_flag=True, help="All of them, page by page.")(
        command
    )
    command = click.option("--cursor", help="Go on where a listing has ended.")(command)
    return click.option(
        "--limit",
        type=int,
        default=USUAL_LIMIT,
        show_default=True,
        help="At most so many.",
    )(command)


class Walk(Iterator[T]):
    """The entries of a listing, page by page; afterwards `cursor` says where it goes on."""

    def __init__(
        self,
        fetch: Fetch[T],
        limit: int,
        cursor: str | None,
        all_: bool,
        *,
        page: int | None = None,
    ) -> None:
        check_count(limit, "--limit", ConfigurationError, least=1, most=MOST_LISTED)
        self.cursor = cursor
        self._page = PAGE if page is None else page
        self._entries = self._walk(fetch, None if all_ else limit)

    def __next__(self) -> T:
        return next(self._entries)

    def _walk(self, fetch: Fetch[T], limit: int | None) -> Iterator[T]:
        left = limit
        while left is None or left > 0:
            page = fetch(self._page if left is None else min(left, self._page), self.cursor)
            self.cursor = page.cursor
            yield from page
            if page.cursor is None:
                return
            left = None if left is None else left - len(page)
        # Its cursor says where the last page ended, not that there is more.
        beyond = fetch(1, self.cursor)
        if not beyond and beyond.cursor is None:
            self.cursor = None


def show(
    session: Session,
    noun: str,
    walk: Iterator[Any],
    columns: Columns,
    *,
    to_document: Callable[[Any], Any] = document,
    more: Mapping[str, object] | None = None,
) -> None:
    """Print entries: a table of the columns, a JSON object that has them as `noun`, or lines.

    `more` stands beside them in the JSON object. If there are more of them, a note says so.
    """
    if session.output == "jsonl":
        for each in walk:
            if not say(json_text(to_document(each))):
                return  # nobody reads the others
        note_cursor(walk)
        return
    entries = list(walk)
    cursor = getattr(walk, "cursor", None)
    if session.output == "json":
        listed = [to_document(each) for each in entries]
        print_json({noun: listed, "has_more": cursor is not None, "cursor": cursor, **(more or {})})
        return
    print_table(list(columns), [[column(each) for column in columns.values()] for each in entries])
    note_cursor(walk)


def note_cursor(walk: object) -> None:
    """Say that there are more, and how to get them."""
    cursor = getattr(walk, "cursor", None)
    if cursor is not None:
        note(f"there are more: raise --limit, give --all, or go on with --cursor {cursor}")


def answer(session: Session, value: Mapping[str, object], text: str | None = None) -> None:
    """Print what a command has done: a small document, or the text if there is one to print."""
    if not session.is_table:
        say(json_text(value))
    elif text is not None:
        say(text)


def show_one(session: Session, value: Any, rows: Mapping[str, object]) -> None:
    """Print one thing: its document, or names and values."""
    if session.is_table:
        print_pairs(rows)
    elif session.output == "json":
        print_json(value)
    else:
        say(json_text(value))
