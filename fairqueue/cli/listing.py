"""Print the entries of a listing, page by page, in the format that was asked for."""

import functools
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import click

from fairqueue.cli.output import json_text, note, print_json, print_pairs, print_table, say
from fairqueue.cli.session import F, Session, options, prints_data
from fairqueue.errors import ConfigurationError
from fairqueue.inspection import Inspector
from fairqueue.inspection.documents import document
from fairqueue.models import Page
from fairqueue.validation import check_count

DEFAULT_LIMIT = 100
MAX_LISTED = 100_000  # entries of one table, which is built in memory
PAGE = 1000  # entries per request

T = TypeVar("T")
Fetch = Callable[..., Page[T]]  # takes `limit` and `cursor`
Columns = Mapping[str, Callable[[Any], object]]


def columns(spec: str) -> dict[str, Callable[[Any], object]]:
    """Columns that show attributes: `"ID=task_id STATUS=status"`."""
    pairs = (each.partition("=") for each in spec.split())
    return {heading: attrgetter(attribute) for heading, _, attribute in pairs}


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in values.items() if value is not None}


class Walk(Iterator[T]):
    """Iterate over a listing page by page; afterwards `cursor` says where to continue."""

    def __init__(
        self, fetch: Fetch[T], limit: int, cursor: str | None, all_: bool, page: int | None = None
    ) -> None:
        check_count(limit, "--limit", ConfigurationError, least=1, most=MAX_LISTED)
        self.cursor = cursor
        self._page = PAGE if page is None else page
        self._entries = self._walk(fetch, None if all_ else limit)

    def __next__(self) -> T:
        return next(self._entries)

    def _walk(self, fetch: Fetch[T], limit: int | None) -> Iterator[T]:
        left = limit
        while left is None or left > 0:
            most = self._page if left is None else min(left, self._page)
            page = fetch(limit=most, cursor=self.cursor)
            self.cursor = page.cursor
            yield from page
            if page.cursor is None:
                return
            left = None if left is None else left - len(page)
        # The cursor says where the last page ended, not that there is more.
        beyond = fetch(limit=1, cursor=self.cursor)
        if not beyond and beyond.cursor is None:
            self.cursor = None


class Listing:
    """A command that lists something, with `--limit`, `--cursor` and `--all`."""

    def __init__(self, session: Session, limit: int, cursor: str | None, all_: bool) -> None:
        self.session = session
        self.limit, self.cursor, self._all = limit, cursor, all_

    @property
    def inspector(self) -> Inspector:
        """The inspector of the session."""
        return self.session.inspector

    def show(
        self,
        noun: str,
        fetch: Fetch[Any],
        columns: Columns,
        *,
        page: int | None = None,
        to_document: Callable[[Any], Any] = document,
        more: Mapping[str, object] | None = None,
    ) -> None:
        """Print the entries that `fetch` returns, `page` at a time; see `show`."""
        walk = Walk(fetch, self.limit, self.cursor, self._all, page)
        show(self.session, noun, walk, columns, to_document=to_document, more=more)


def paged(command: F) -> F:
    """Add `--limit`, `--cursor` and `--all`; the command gets a Listing as its first argument."""

    @functools.wraps(command)
    def lists(session: Session, limit: int, cursor: str | None, all_: bool, **settings: Any) -> Any:
        return command(Listing(session, limit, cursor, all_), **settings)

    add: Callable[[Any], Any] = options(
        click.option(
            "--limit",
            type=int,
            default=DEFAULT_LIMIT,
            show_default=True,
            help="Maximum number of entries.",
        ),
        click.option("--cursor", help="Continue where an earlier listing ended."),
        click.option("--all", "all_", is_flag=True, help="List all entries, page by page."),
        prints_data,
    )
    found: F = add(lists)
    return found


def show(
    session: Session,
    noun: str,
    walk: Iterator[Any],
    columns: Columns,
    *,
    to_document: Callable[[Any], Any] = document,
    more: Mapping[str, object] | None = None,
) -> None:
    """Print entries as a table, as a JSON object with a list called `noun`, or as JSON lines.

    `more` is added to the JSON object. A note says so if there are more entries.
    """
    if session.output == "jsonl":
        for each in walk:
            if not say(json_text(to_document(each))):
                return  # nobody reads the rest
        note_cursor(walk)
        return
    entries = list(walk)
    if session.output == "json":
        cursor = getattr(walk, "cursor", None)
        listed = [to_document(each) for each in entries]
        print_json({noun: listed, "has_more": cursor is not None, "cursor": cursor, **(more or {})})
        return
    print_table(list(columns), [[column(each) for column in columns.values()] for each in entries])
    note_cursor(walk)


def note_cursor(walk: object) -> None:
    """Say that there are more entries, and how to get them."""
    cursor = getattr(walk, "cursor", None)
    if cursor is not None:
        note(f"there are more: raise --limit, give --all, or continue with --cursor {cursor}")


def answer(session: Session, value: Mapping[str, object], text: str | None = None) -> None:
    """Print the result of a command: as a line of JSON, or `text` for people, if any."""
    if not session.is_table:
        say(json_text(value))
    elif text is not None:
        say(text)


def show_one(session: Session, value: Any, rows: Mapping[str, object]) -> None:
    """Print one object: as JSON, or `rows` of names and values for people."""
    if session.is_table:
        print_pairs(rows)
    elif session.output == "json":
        print_json(value)
    else:
        say(json_text(value))
