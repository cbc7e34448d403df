"""Pages of a listing that is merged from all partitions; a cursor has a place in each."""

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast

from fairqueue.cursors import bad_cursor, decode_cursor, encode_cursor
from fairqueue.errors import InvalidInput
from fairqueue.link.operation import Operation
from fairqueue.link.partitions import at_part, everywhere_numbered

T = TypeVar("T")
S = TypeVar("S")

LEAST_READ = 10  # rows of a partition in one round trip, at least


@dataclass(frozen=True, slots=True)
class PlacedRow(Generic[T]):
    """An entry of a listing in one partition.

    order: where it belongs among the entries of all partitions, least first. place: from where its
    partition's listing continues after it.
    """

    order: Any
    place: str
    item: T


@dataclass(frozen=True, slots=True)
class PlacedRows(Generic[T]):
    """The next entries of a listing in one partition.

    place: from where it continues after all that was looked at, which may be more than the rows
    say; None at its end.
    """

    rows: Sequence[PlacedRow[T]]
    place: str | None


Read = Callable[[S, str | None, int], Operation[PlacedRows[T]]]


class _Source(Generic[T]):
    """The listing of one partition, as far as it was read."""

    def __init__(self, place: str | None, *, is_over: bool) -> None:
        self.place = place  # after the last row that was given out; None at the beginning
        self.rows: list[PlacedRow[T]] = []
        self.ahead = place  # after all that was read
        self.is_over = is_over  # everything was read

    def add(self, found: PlacedRows[T]) -> None:
        self.rows = list(found.rows)
        self.is_over = found.place is None
        self.ahead = found.place
        if not self.rows and found.place is not None:
            self.place = found.place

    def take(self) -> T:
        row = self.rows.pop(0)
        self.place = row.place if self.rows or self.is_over else self.ahead
        return row.item

    @property
    def is_empty(self) -> bool:
        return self.is_over and not self.rows


def merged_rows(
    store: S,
    read: Read[S, T],
    limit: int,
    cursor: str | None = None,
    error: type[InvalidInput] = InvalidInput,
) -> Operation[tuple[list[T], str | None]]:
    """Up to `limit` entries of all partitions in order, and the cursor of the rest, or None.

    `read` reads the listing of one partition from a place on, in order. What lies before the place
    in a partition has been given out, what lies after it has not: so nothing is left out or comes
    twice while other entries come and go. A partition that does not answer, if that is tolerated,
    is left out, and keeps its place while others have more. A page may be short if the search for
    entries that match a filter is bounded. Raises `error` for a cursor of something else.
    """
    twins: Any = store
    count = len(twins.link.parts)
    sources = _decode(cursor, count, error)
    found: list[T] = []
    absent: set[int] = set()
    has_given_up = False
    while len(found) < limit and not has_given_up:
        hungry = [
            i
            for i, source in enumerate(sources)
            if not source.rows and not source.is_over and i not in absent
        ]
        if hungry:
            size = max(LEAST_READ, 2 * (limit - len(found)) // count)
            answered = yield from everywhere_numbered(
                store, partial(_more, read, sources, size), only=hungry
            )
            for i, rows in answered:
                sources[i].add(rows)
                has_given_up = has_given_up or (not rows.rows and rows.place is not None)
            absent |= set(hungry) - {i for i, _ in answered}
        heads = [(source.rows[0].order, i) for i, source in enumerate(sources) if source.rows]
        if not heads:
            break
        heapq.heapify(heads)
        while heads and len(found) < limit and not has_given_up:
            _, i = heapq.heappop(heads)
            source = sources[i]
            found.append(source.take())
            if source.rows:
                heapq.heappush(heads, (source.rows[0].order, i))
            elif not source.is_over:
                break  # its next entries may come before those of the others
    is_over = all(source.is_empty or i in absent for i, source in enumerate(sources))
    return found, None if is_over else _encode(sources)


def merged_names(
    store: S,
    listed: Callable[[S, bytes, int], Operation[Any]],
    parse: Callable[[bytes], T | None],
    limit: int,
    cursor: str | None,
) -> Operation[tuple[list[T], str | None]]:
    """Up to `limit` names of all partitions, in the order of their bytes, and the cursor or None.

    `listed` gets the name to start after, and answers 1 if there may be more, then names. Those
    that `parse` does not accept are skipped. Works without partitions, too.
    """
    if cast(Any, store).link.parts:
        return (yield from merged_rows(store, partial(_read_names, listed, parse), limit, cursor))
    found = yield from at_part(store, _read_names(listed, parse, store, cursor, limit))
    return [row.item for row in found.rows], found.place


def _read_names(
    listed: Callable[[S, bytes, int], Operation[Any]],
    parse: Callable[[bytes], T | None],
    store: S,
    place: str | None,
    size: int,
) -> Operation[PlacedRows[T]]:
    more, *found = yield from listed(store, b"" if place is None else decode_cursor(place), size)
    rows = [
        PlacedRow(each, encode_cursor(each), item)
        for each in found
        if (item := parse(each)) is not None
    ]
    return PlacedRows(rows, encode_cursor(found[-1]) if more and found else None)


def _more(
    read: Read[S, T], sources: Sequence[_Source[T]], size: int, twin: Any
) -> Operation[PlacedRows[T]]:
    return read(twin, sources[twin.link.keys.partition].ahead, size)


def _encode(sources: Sequence[_Source[Any]]) -> str:
    places = [False if source.is_empty else source.place for source in sources]
    return encode_cursor(json.dumps(places, separators=(",", ":")).encode())


def _decode(cursor: str | None, count: int, error: type[InvalidInput]) -> list[_Source[Any]]:
    if cursor is None:
        return [_Source(None, is_over=False) for _ in range(count)]
    try:
        places = json.loads(decode_cursor(cursor, error))
    except ValueError:
        places = None
    if (
        not isinstance(places, list)
        or len(places) != count
        or not all(place in (False, None) or isinstance(place, str) for place in places)
    ):
        raise bad_cursor(cursor, error, " for a listing of this queue")
    return [_Source(place or None, is_over=place is False) for place in places]
