"""Pages of runs: the indexes of each partition are read in the order of the life of a run."""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Self

from fairqueue.history.filters import (
    BY_TIME,
    WantedRuns,
    bounds_of,
    check_filter,
    cursor_at,
    place_of_cursor,
    read_position,
    sources_of,
    triples,
    values_of,
)
from fairqueue.history.records import Run, list_call, read_run
from fairqueue.link.merging import PlacedRow, PlacedRows, merged_rows
from fairqueue.link.operation import Ask, Operation, Together, operation, steps
from fairqueue.link.owners import Owner
from fairqueue.link.partitions import Partitioned, at_part, whole
from fairqueue.models import Page
from fairqueue.queue.delays import DelayIndex
from fairqueue.queue.queue import TaskQueue
from fairqueue.validation import check_count

MAX_LISTED = 1000  # runs on one page
READ_AT_ONCE = 500  # runs that one script reads: about 2 ms of server time
MAX_WALKED = 10_000  # runs examined for one page if a filter matches few
MAX_SKIMMED = 2000  # waiting runs examined by a listing of all statuses with a filter without index
MAX_TENANTS = 50  # tenants of one user id whose waiting tasks are listed
MAX_RUNNING = 10_000  # running tasks that are listed: they are read together, to be sorted

_SKIMMED = ("delayed", "waiting")
_CLAIMED = re.compile(rb'"claimed":([0-9]{1,16})')  # in the text of a status
_TIME = re.compile(r"[0-9]{1,16}")  # at the beginning of a position


class _Row(NamedTuple):
    position: str  # where the listing continues after it
    run: Run | None  # None if it is gone or damaged


class _Found(NamedTuple):
    source: str
    position: str
    run: Run


class RunListing(Partitioned):
    """The part of the history that lists runs."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue
        self.link = queue.link

    def _twin(self, part: Any) -> Self:
        twin = super()._twin(part)
        twin._queue = self._queue.at(part)
        return twin

    @operation
    @whole
    def runs(
        self,
        status: str | Iterable[str] | None = None,
        *,
        user_id: str | None = None,
        schedule_id: str | None = None,
        name: str | None = None,
        fingerprint: str | None = None,
        tenant: str | None = None,
        pool: str | None = None,
        since: datetime | float | None = None,
        until: datetime | float | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Operation[Page[Run]]:
        """Return a page of runs: waiting ones, then running ones, then ended ones.

        Each group is sorted by time, newest first. The waiting runs of one user are listed
        last to be served first, the unfinished runs of one schedule in the reverse order of ids;
        if several partitions have some, those of one after those of the other.
        A run that changes its group while pages are read may appear twice; none is missed.

        status: one or several; all by default, or the failed ones with a `fingerprint`. since,
        until: bounds of the end of a run, or else of its last start, or of its push; `until` is not
        included. A page with a cursor may be short, because the search for a filter that matches
        few runs is bounded. At most 10,000 running tasks of each partition are listed. Without
        `status` and with a filter by name, tenant, pool or time, at most 2,000 waiting and 2,000
        delayed tasks are examined, because no index of waiting tasks has these fields: pass a
        status to examine all of them.
        Raises InvalidInput naming the value.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        wanted = check_filter(
            status, user_id, schedule_id, name, fingerprint, tenant, pool, since=since, until=until
        )
        # A tenant is in one partition. A user id may have a task of its own, and some of tenants.
        store = self if tenant is None else self.part_of(user_id, tenant)
        if not store.link.parts:
            return (yield from at_part(store, store._page(wanted, limit, cursor)))
        read = partial(_read_part, wanted, {})
        found, following = yield from merged_rows(store, read, limit, cursor)
        # A run that ended meanwhile may have been read before and after that.
        first = {(run.task_id, run.tenant or run.user_id): run for run in reversed(found)}
        return Page([*reversed(first.values())], following)

    def _page(self, wanted: WantedRuns, limit: int, cursor: str | None) -> Operation[Page[Run]]:
        wanted = yield from self._prepared(wanted)
        found, following = yield from self._walk(wanted, limit, cursor)
        return Page([each.run for each in found], following)

    def _prepared(self, wanted: WantedRuns) -> Operation[WantedRuns]:
        """Find out where tasks of the user wait, and bring the index of delayed ones up to date."""
        sources = sources_of(wanted)
        if wanted.user_id is not None and {"backlog", "delayed_index"}.intersection(sources):
            wanted = wanted._replace(seats=(yield from self._seats(wanted.user_id, wanted.tenant)))
        if "delayed_index" in sources:
            yield from steps(DelayIndex(self.link).update)()
        return wanted

    def _seats(self, user_id: str, tenant: str | None) -> Operation[tuple[str, ...]]:
        """The seats in which tasks of a user id, of any tenant or of one, can wait."""
        tenants = [tenant]
        if tenant is None:
            tenants += yield from steps(self._queue.tenants_of)(user_id)
        pools = ((yield Ask(("HGET", self.link.keys["fair"], "pools")))[0] or b"").decode()
        # Tasks of versions with layout 1 wait as those of the user alone, whatever their tenant.
        owners = dict.fromkeys(Owner(user_id, each) for each in (None, *tenants[:MAX_TENANTS]))
        names = [None, *pools.splitlines()]
        return tuple(owner.seat(pool) for owner in owners for pool in names)

    def _walk(
        self, wanted: WantedRuns, limit: int, cursor: str | None
    ) -> Operation[tuple[list[_Found], str | None]]:
        """Read up to `limit` runs of this partition, and the cursor of the rest or None."""
        every = sources_of(wanted)
        number, position = place_of_cursor(cursor, every)
        sources = every[number:]
        found: list[_Found] = []
        seen: set[str] = set()  # a run that ends while the page is read would appear twice
        walked = 0
        for source in sources:
            more = True
            skimmed = 0
            size = min(limit + 1, READ_AT_ONCE)  # enough if the index has just this filter
            while more and not (wanted.skims and source in _SKIMMED and skimmed >= MAX_SKIMMED):
                if walked >= MAX_WALKED:
                    return found, cursor_at(source, position)
                rows, more = yield from self._read(source, position, wanted, size)
                for i, row in enumerate(rows, 1):
                    position = row.position
                    if row.run is not None and wanted.has(row.run) and row.run.task_id not in seen:
                        seen.add(row.run.task_id)
                        found.append(_Found(source, position, row.run))
                        if len(found) == limit:
                            is_last = i == len(rows) and not more and source == sources[-1]
                            return found, None if is_last else cursor_at(source, position)
                walked += len(rows)
                skimmed += len(rows)
                size = READ_AT_ONCE
            position = ""
        return found, None

    def _read(
        self, source: str, position: str, wanted: WantedRuns, size: int
    ) -> Operation[tuple[list[_Row], bool]]:
        """Return the next rows of a source, and whether there may be more after them."""
        if source == "leases":
            return (yield from self._read_running(position, size))
        if source in BY_TIME:
            calls = [list_call(source, position, "", size)]
        else:
            calls = [
                list_call(source, *bounds_of(value, source, position, wanted), size)
                for value in values_of(source, wanted)
            ]
        answers = yield Together(*calls)
        parts = [list(triples(answer)) for answer in answers]
        found = [each for part in parts for each in part]
        # Ranges that were cut because of their size end at different places. Rows of the others
        # after the first of these places are read again next time.
        ends = [part[-1] for part, answer in zip(parts, answers, strict=True) if answer[0]]
        if len(calls) > 1:
            found.sort(reverse=True)  # merge the ranges of several outcomes by the end of the run
            if ends:
                found = [each for each in found if each >= max(ends)]
        rows = [_Row(at, read_run(task_id, text)) for at, task_id, text in found[:size]]
        return rows, bool(ends) or len(found) >= size

    def _read_running(self, position: str, size: int) -> Operation[tuple[list[_Row], bool]]:
        """Return the next running tasks, sorted by their start.

        All are read, because the index is sorted by the ends of leases. These move while tasks run,
        so a listing that continued at one of them would miss runs.
        """
        keys = self.link.keys
        (ids,) = yield Ask(("ZRANGE", keys["leases"], 0, MAX_RUNNING - 1, "REV"))
        if not ids:
            return [], False
        chunks = [ids[i : i + READ_AT_ONCE] for i in range(0, len(ids), READ_AT_ONCE)]
        texts = yield Ask(*(("HMGET", keys["status"], *chunk) for chunk in chunks))
        found = [
            (int(match[1]), task_id.decode("utf-8", "replace"), text)
            for task_id, text in zip(ids, chain.from_iterable(texts), strict=True)
            if (match := _CLAIMED.search(text or b""))
        ]
        found.sort(reverse=True)
        if last := read_position(position):
            found = [each for each in found if each[:2] < last]
        rows = []
        for started_ms, task_id, text in found[:size]:
            run = read_run(task_id, text)
            has_ended = run is not None and run.status != "running"  # just now: listed later
            rows.append(_Row(f"{started_ms} {task_id}", None if has_ended else run))
        return rows, len(found) > size


def _read_part(
    wanted: WantedRuns,
    prepared: dict[int, WantedRuns],
    store: RunListing,
    place: str | None,
    size: int,
) -> Operation[PlacedRows[Run]]:
    """Read the next runs of one partition, with their order among those of all."""
    number = store.link.keys.partition
    if number not in prepared:
        prepared[number] = yield from store._prepared(wanted)
    found, following = yield from store._walk(prepared[number], size, place)
    sources = sources_of(wanted)
    rows = [
        PlacedRow(_order(sources, each), cursor_at(each.source, each.position), each.run)
        for each in found
    ]
    return PlacedRows(rows, following)


def _order(sources: Sequence[str], found: _Found) -> tuple[int, int]:
    """By source, then newest first where a position begins with a time."""
    number = sources.index(found.source)
    if found.source not in (*BY_TIME, "runs"):
        return number, 0
    match = _TIME.match(found.position)
    return number, -int(match[0]) if match else 0
