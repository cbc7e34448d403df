"""Say what became of runs: list them, look into one, run failed ones again, forget old ones."""

import base64
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import chain, islice
from typing import Any, NamedTuple, TypedDict, Unpack

from fairqueue.clock import LATEST_MS, from_ms, to_ms
from fairqueue.errors import BrokenRecord, InvalidInput, QueueFull, UnknownTask, shown
from fairqueue.history.records import FailureGroup, Run, RunDetails, read_attempts, read_run
from fairqueue.logs import log_event
from fairqueue.models import (
    Page,
    Task,
    encode_payload,
    new_id,
    task_document,
)
from fairqueue.outcomes import LETTERS, NEVER_RAN
from fairqueue.queue.delays import index_delayed
from fairqueue.queue.queue import TaskQueue
from fairqueue.retry_policy import encode_policy
from fairqueue.validation import (
    check_count,
    check_items,
    check_name,
    check_payload,
    check_seconds,
    check_tenant,
)

logger = logging.getLogger("fairqueue.history")

UNFINISHED = ("pending", "retrying", "running")
ENDED = tuple(LETTERS)
STATUSES = (*UNFINISHED, *ENDED)
MAX_LISTED = 1000  # runs on one page
READ_AT_ONCE = 500  # runs that one script reads: some 2 ms of the server's time
MAX_WALKED = 10_000  # runs looked at for one page when a filter matches few
MAX_SKIMMED = 2000  # of those that wait, where a listing of all is filtered by what no index has
MAX_RUNNING = 10_000  # running ones that are listed: they are read together, to put them in order
SAMPLES = 5  # runs of a group that are looked at for one that can be read
PRUNE_CHUNK = 100  # records that one script drops, and fewer large ones: some 2 ms
DISCARD_CHUNK = 100
LAST_MS = 9_999_999_999_999  # in 2286: the index has 13 digits for the end of a run

# Sources whose positions are a time in ms and an id, newest first.
_BY_TIME = ("delayed", "waiting", "leases")
_SKIMMED = ("delayed", "waiting")
_POSITION = re.compile(r"([0-9]{1,16}) (.+)", re.DOTALL)
_CLAIMED = re.compile(rb'"claimed":([0-9]{1,16})')  # in the text of a status


class Filters(TypedDict, total=False):
    """What failed runs have to match, as `History.runs` takes it."""

    user_id: str | None
    schedule_id: str | None
    name: str | None
    fingerprint: str | None
    tenant: str | None
    since: datetime | float | None
    until: datetime | float | None


class _Filter(NamedTuple):
    """What a listing is of."""

    statuses: frozenset[str]
    skims: bool = False  # not all that wait are looked at for those that match
    user_id: str | None = None
    schedule_id: str | None = None
    name: str | None = None
    fingerprint: str | None = None
    tenant: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    def has(self, run: Run) -> bool:
        """Whether a run belongs to the listing: the index may be of one filter out of several."""
        wanted = (
            (self.user_id, run.user_id),
            (self.schedule_id, run.schedule_id),
            (self.name, run.name),
            (self.fingerprint, run.fingerprint),
            (self.tenant, run.tenant),
        )
        return (
            run.status in self.statuses
            and all(want is None or want == got for want, got in wanted)
            and self._has_time(run)
        )

    def _has_time(self, run: Run) -> bool:
        if self.since_ms is None and self.until_ms is None:
            return True
        at_ms = to_ms(run.ended_at or run.started_at or run.pushed_at, "moment")
        return (self.since_ms or 0) <= at_ms and (self.until_ms is None or at_ms < self.until_ms)


class _Row(NamedTuple):
    position: str  # where the listing goes on after it
    run: Run | None  # None if it is gone or cannot be read


class History:
    """The runs of a queue: those that wait or run, and the ended ones that are still kept.

    How long is a setting of the queue (`TaskQueue.configure`: keep_finished, keep_dead, ...).
    """

    def __init__(self, queue: TaskQueue) -> None:
        self._link = queue.link

    # --- looking ----------------------------------------------------------------------------------

    def runs(
        self,
        status: str | Iterable[str] | None = None,
        *,
        user_id: str | None = None,
        schedule_id: str | None = None,
        name: str | None = None,
        fingerprint: str | None = None,
        tenant: str | None = None,
        since: datetime | float | None = None,
        until: datetime | float | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[Run]:
        """A page of runs: those that wait, then those that run, then the ended ones.

        Each newest first: by when they were due, began to wait, began to run, or ended; those that
        wait of one user are in the reverse order of their turn, the unfinished ones of one schedule
        in that of their ids. A run that goes on while the pages are read comes again later on, and
        none is missed that stays where it is.

        Without `status`, all; with a `fingerprint`, those that have failed. `since` (with it) and
        `until` (without it) compare the end of a run, or else its last start, or its push. A page
        may be short although its cursor says that there is more: the walk for filters that match
        few is bounded. Of more than 10,000 that run, so many are listed. Without `status` and with
        filters by name, tenant or time, which no index of waiting tasks has, 2,000 each of those
        that wait and of those that are delayed are looked at: name a status to see all of them.
        Raises InvalidInput naming what cannot be used.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        wanted = _check_filter(
            status, user_id, schedule_id, name, fingerprint, tenant, since=since, until=until
        )
        sources = _sources(wanted)
        if "delayed_index" in sources:
            index_delayed(self._link)
        number, position = _decode_cursor(cursor, sources)
        return self._page(wanted, sources[number:], position, limit)

    def _page(
        self, wanted: _Filter, sources: Sequence[str], position: str, limit: int
    ) -> Page[Run]:
        found: list[Run] = []
        seen: set[str] = set()  # one that ends while the page is read would come twice
        walked = 0
        for source in sources:
            more = True
            skimmed = 0
            size = min(limit + 1, READ_AT_ONCE)  # enough where the index is of just this filter
            while more and not (wanted.skims and source in _SKIMMED and skimmed >= MAX_SKIMMED):
                if walked >= MAX_WALKED:
                    return Page(found, _encode_cursor(source, position))
                rows, more = self._read(source, position, wanted, size)
                for i, row in enumerate(rows, 1):
                    position = row.position
                    if row.run is not None and wanted.has(row.run) and row.run.task_id not in seen:
                        seen.add(row.run.task_id)
                        found.append(row.run)
                        if len(found) == limit:
                            is_last = i == len(rows) and not more and source == sources[-1]
                            return Page(
                                found, None if is_last else _encode_cursor(source, position)
                            )
                walked += len(rows)
                skimmed += len(rows)
                size = READ_AT_ONCE
            position = ""
        return Page(found, None)

    def _read(
        self, source: str, position: str, wanted: _Filter, size: int
    ) -> tuple[list[_Row], bool]:
        """The next rows of a source, and whether there may be more after them."""
        if source == "leases":
            return self._read_running(position, size)
        if source in _BY_TIME:
            calls = [_range(source, position, "", size)]
        else:
            calls = [
                _range(source, *_bounds(value, source, position, wanted), size)
                for value in _values(source, wanted)
            ]
        answers = self._link.run_together(*(("list_runs", call) for call in calls))
        parts = [list(_triples(answer)) for answer in answers]
        found = [each for part in parts for each in part]
        # Those that were cut short because of their bytes end at different places: what another one
        # has behind the first of these comes with the next reading.
        ends = [part[-1] for part, answer in zip(parts, answers, strict=True) if answer[0]]
        if len(calls) > 1:
            found.sort(reverse=True)  # ranges of several outcomes: put together by their end
            if ends:
                found = [each for each in found if each >= max(ends)]
        rows = [_Row(at, read_run(task_id, text)) for at, task_id, text in found[:size]]
        return rows, bool(ends) or len(found) >= size

    def _read_running(self, position: str, size: int) -> tuple[list[_Row], bool]:
        """The next of those that run, by when they began.

        All are read to find them: the index has them by the ends of their leases, which move while
        they run, so that going on from one of those would miss runs.
        """
        keys = self._link.keys
        ids = self._link.ask(("ZRANGE", keys["leases"], 0, MAX_RUNNING - 1, "REV"))[0]
        if not ids:
            return [], False
        chunks = [ids[i : i + READ_AT_ONCE] for i in range(0, len(ids), READ_AT_ONCE)]
        texts = self._link.ask(*(("HMGET", keys["status"], *chunk) for chunk in chunks))
        found = [
            (int(match[1]), task_id.decode("utf-8", "replace"), text)
            for task_id, text in zip(ids, chain.from_iterable(texts), strict=True)
            if (match := _CLAIMED.search(text or b""))
        ]
        found.sort(reverse=True)
        if last := _read_position(position):
            found = [each for each in found if each[:2] < last]
        rows = []
        for started_ms, task_id, text in found[:size]:
            run = read_run(task_id, text)
            has_ended = run is not None and run.status != "running"  # just now: it comes later on
            rows.append(_Row(f"{started_ms} {task_id}", None if has_ended else run))
        return rows, len(found) > size

    def find(self, task_ids: Sequence[str]) -> list[Run]:
        """The runs of these ids that are kept and can be read, in order.

        Raises InvalidInput for what is not a list of ids.
        """
        task_ids = check_items(task_ids, "task_ids", "ids of tasks")
        if not task_ids:
            return []
        for task_id in task_ids:
            check_name(task_id, "task_id")
        texts = self._link.ask(("HMGET", self._link.keys["status"], *task_ids))[0]
        found = zip(task_ids, texts, strict=True)
        runs = (read_run(task_id, text) for task_id, text in found if text is not None)
        return [run for run in runs if run is not None]

    def get(self, task_id: str) -> RunDetails | None:
        """All that is kept of a run, or None. Raises BrokenRecord if that cannot be read."""
        check_name(task_id, "task_id")
        keys = self._link.keys
        status, document, lines = self._link.ask(
            ("HGET", keys["status"], task_id),
            ("HGET", keys["tasks"], task_id),
            ("HGET", keys["attempts"], task_id),
        )
        if status is None:
            return None
        run = read_run(task_id, status)
        if run is None:
            raise BrokenRecord(f"the status of task {task_id!r} is unreadable")
        try:
            task = Task.from_document(task_id, document or b"")
        except BrokenRecord:
            task = None
        return RunDetails(run=run, attempts=read_attempts(run, lines or b""), task=task)

    def failure_groups(self, limit: int = 100, cursor: str | None = None) -> Page[FailureGroup]:
        """Failed runs by cause, the latest first: what they have in common is a fingerprint.

        Raises InvalidInput for a bad limit or cursor.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        marks = self._fingerprints(_decode_cursor(cursor, ["failures"])[1], limit + 1)
        more, marks = len(marks) > limit, marks[:limit]
        if not marks:
            return Page([], None)
        index = self._link.keys["runs"]
        counts = self._link.ask(
            *(("ZLEXCOUNT", index, f"[f{mark}\0", f"(f{mark}\1") for _, mark in marks)
        )
        samples = self._link.run_together(
            *(
                ("list_runs", _range("runs", f"(f{mark}\1", f"[f{mark}\0", SAMPLES))
                for _, mark in marks
            )
        )
        groups = []
        for (last_ms, mark), count, sample in zip(marks, counts, samples, strict=True):
            runs = (read_run(task_id, text) for _, task_id, text in _triples(sample))
            latest = next((run for run in runs if run is not None), None)
            if latest is not None:
                groups.append(
                    FailureGroup(
                        fingerprint=mark, count=int(count), last_at=from_ms(last_ms), latest=latest
                    )
                )
        last_ms, mark = marks[-1]
        return Page(groups, _encode_cursor("failures", f"{last_ms} {mark}") if more else None)

    def _fingerprints(self, position: str, most: int) -> list[tuple[int, str]]:
        """Fingerprints after a position, with the ms of their last failures, the latest first."""
        last = _read_position(position)
        found: list[tuple[int, str]] = []
        skip = 0
        key, start = self._link.keys["failures"], str(last[0]) if last else "+inf"
        while len(found) < most:
            part = ("BYSCORE", "REV", "LIMIT", skip, most, "WITHSCORES")
            flat = self._link.ask(("ZRANGE", key, start, "-inf", *part))[0]
            pairs = list(zip(flat[::2], map(float, flat[1::2]), strict=True))
            rows = [
                (int(score), mark.decode("utf-8", "replace"))
                for mark, score in pairs
                if 0 <= score <= LATEST_MS  # others are no times
            ]
            found += [row for row in rows if last is None or row < last]
            skip += len(pairs)
            if len(pairs) < most:
                break
        return found[:most]

    # --- failed runs ------------------------------------------------------------------------------

    def retry(
        self,
        task_id: str,
        *,
        triggered_by: str | None = None,
        payload: dict[str, Any] | None = None,
    ) -> str:
        """Run a failed run again, as a new one that is linked to it; the new one's id.

        With a `payload` it runs with that one instead of its own. A failed run is run again once:
        asked again, the answer is the same id, whatever the payload. Raises UnknownTask if it is
        not among the failed ones, BrokenRecord if its task cannot be read, InvalidPayload,
        QueueFull.
        """
        if triggered_by is not None:
            check_name(triggered_by, "triggered_by")
        if payload is not None:
            encode_payload(check_payload(payload))
        details = self.get(task_id)
        if details is None or details.run.status not in ("failed", "timed_out"):
            status = "not known" if details is None else details.run.status
            raise UnknownTask(f"task {task_id!r} is {status}: only failed ones can be run again")
        if details.task is None:
            raise BrokenRecord(
                f"the document of task {task_id!r} is unreadable: it cannot run again"
            )
        task = _again(details.task, triggered_by, payload)
        answer = self._link.run(
            "revive",
            op=new_id(),
            id=task_id,
            new_id=task.task_id,
            user=task.user_id,
            task_name=task.name,
            document=task.document,
            head=task.status_head,
            level=int(task.priority),
            schedule=task.schedule_id or "",
        )
        if answer[0] == b"not_dead":
            raise UnknownTask(f"task {task_id!r} is not among the failed ones any more")
        if answer[0] == b"full":
            raise QueueFull(f"task {task_id!r} cannot be run again now: max_waiting is reached")
        return str(answer[1].decode())

    def retry_matching(
        self,
        *,
        triggered_by: str | None = None,
        limit: int = MAX_LISTED,
        **filters: Unpack[Filters],
    ) -> list[str]:
        """Run the failed runs that match again, at most `limit`; the ids of the new ones.

        The latest first. Those that were run again before are left alone, and those whose tasks
        cannot be read too, with a warning in the log. Raises QueueFull, after which the call can be
        repeated for the others, and InvalidInput for a bad filter or limit.
        """
        check_count(limit, "limit", least=1)
        if triggered_by is not None:
            check_name(triggered_by, "triggered_by")
        retried: list[str] = []
        for run in self._matching(filters):
            if run.retried_as is not None:
                continue
            try:
                retried.append(self.retry(run.task_id, triggered_by=triggered_by))
            except (BrokenRecord, UnknownTask) as error:  # the latter: dropped meanwhile
                log_event(
                    logger,
                    "run_not_retried",
                    logging.WARNING,
                    task=run.task_id,
                    user=run.user_id,
                    error=str(error),
                )
            if len(retried) == limit:
                break
        return retried

    def discard(self, task_id: str) -> bool:
        """Forget a failed run for good; False if it is not among the failed ones."""
        check_name(task_id, "task_id")
        return self._discard([task_id]) == 1

    def discard_matching(self, *, limit: int = MAX_LISTED, **filters: Unpack[Filters]) -> int:
        """Forget failed runs that match, the latest first, at most `limit`; how many.

        Raises InvalidInput for a bad filter or limit.
        """
        check_count(limit, "limit", least=1)
        ids = [run.task_id for run in islice(self._matching(filters), limit)]
        chunks = (ids[i : i + DISCARD_CHUNK] for i in range(0, len(ids), DISCARD_CHUNK))
        return sum(self._discard(chunk) for chunk in chunks)

    def _discard(self, ids: list[str]) -> int:
        """Forget failed runs; one script drops as many as do not take it too long."""
        dropped, left = 0, 1
        while left:
            count, left = self._link.run("discard", op=new_id(), rest=ids)
            dropped += int(count)
        return dropped

    def _matching(self, filters: Filters) -> Iterator[Run]:
        cursor: str | None = None
        while True:
            page = self.runs(("failed", "timed_out"), limit=MAX_LISTED, cursor=cursor, **filters)
            yield from page
            cursor = page.cursor
            if cursor is None:
                return

    def prune(self, older_than: float | timedelta) -> int:
        """Forget ended runs, failed ones too, that ended so many seconds ago or more; how many.

        Raises InvalidInput for what is no duration.
        """
        seconds = check_seconds(older_than, "older_than")
        before_ms = self._link.now_ms() - round(seconds * 1000) + 1
        dropped = 0
        while count := self._prune(before_ms):
            dropped += count
        return dropped

    def _prune(self, before_ms: int) -> int:
        return int(self._link.run("prune", op=new_id(), before_ms=before_ms, limit=PRUNE_CHUNK))


def _again(task: Task, triggered_by: str | None, payload: dict[str, Any] | None) -> Task:
    """A task with the content of another, which it is a retry of, or with another payload."""
    payload = task.payload if payload is None else payload
    # What it, or its schedule, says of retries and time-outs holds for this run too.
    scheduled_ms = None if task.scheduled_for is None else to_ms(task.scheduled_for, "moment")
    return Task(
        task_id=new_id(),
        user_id=task.user_id,
        priority=task.priority,
        payload=payload,
        name=task.name,
        schedule_id=task.schedule_id,
        scheduled_for=task.scheduled_for,
        run_type="retry",
        triggered_by=triggered_by,
        retry_of=task.task_id,
        policy=task.policy,
        tenant=task.tenant,
        document=task_document(
            task.user_id,
            task.name,
            task.priority,
            encode_payload(payload),
            task.schedule_id,
            scheduled_ms,
            origin={"by": triggered_by, "retry_of": task.task_id, "tenant": task.tenant},
            policy=encode_policy(task.policy),
        ),
    )


# --- filters, sources and cursors -----------------------------------------------------------------


def _check_filter(
    status: str | Iterable[str] | None,
    user_id: str | None,
    schedule_id: str | None,
    name: str | None,
    fingerprint: str | None,
    tenant: str | None,
    *,
    since: datetime | float | None,
    until: datetime | float | None,
) -> _Filter:
    named = {"user_id": user_id, "schedule_id": schedule_id, "name": name, "mark": fingerprint}
    for field, value in named.items():
        if value is not None:
            check_name(value, field.replace("mark", "fingerprint"))
    if tenant is not None:
        check_tenant(tenant, InvalidInput)
    return _Filter(
        statuses=_check_statuses(status, fingerprint),
        skims=status is None and (name, tenant, since, until) != (None, None, None, None),
        user_id=user_id,
        schedule_id=schedule_id,
        name=name,
        fingerprint=fingerprint,
        tenant=tenant,
        since_ms=_check_moment(since, "since"),
        until_ms=_check_moment(until, "until"),
    )


def _check_statuses(status: str | Iterable[str] | None, fingerprint: str | None) -> frozenset[str]:
    if status is None:
        return frozenset(STATUSES if fingerprint is None else ENDED)
    words = (status,) if isinstance(status, str) else status
    listed = list(words) if isinstance(words, Iterable) else [status]
    for word in listed:
        if word not in STATUSES:
            raise InvalidInput(f"status {shown(word)} is none of {', '.join(STATUSES)}")
    if not listed:
        raise InvalidInput(
            f"status {shown(status)} leaves nothing to list: leave it out, or name some"
        )
    return frozenset(listed)


def _check_moment(moment: datetime | float | None, what: str) -> int | None:
    return None if moment is None else min(max(0, to_ms(moment, what)), LAST_MS)


def _sources(wanted: _Filter) -> list[str]:
    """Where the runs of a listing are found, in its order, which is that of a run's life."""
    sources: list[str] = []
    unfinished = wanted.statuses.intersection(UNFINISHED)
    if unfinished and wanted.schedule_id is not None:
        sources = ["open"]
    elif unfinished:
        if unfinished != {"running"}:
            sources = ["delayed", "waiting"]
            if wanted.user_id is not None:
                sources = ["delayed_index", "held", "backlog"]
        if "running" in unfinished:
            sources.append("leases")
    return sources + (["runs"] if wanted.statuses.intersection(ENDED) else [])


def _values(source: str, wanted: _Filter) -> list[str]:
    """What the members of a source begin with, of all the runs that a listing may be of."""
    if source == "open":
        return [wanted.schedule_id or ""]
    if source in ("delayed_index", "backlog", "held"):
        return [wanted.user_id or ""]
    # Those that were cancelled before they ran are listed by themselves.
    dropped = NEVER_RAN if "cancelled" in wanted.statuses else ""
    for kinds, value in (
        ("f", wanted.fingerprint),
        ("c", wanted.schedule_id),
        ("u" + dropped, wanted.user_id),
        ("t", wanted.tenant),
        ("n", wanted.name),
    ):
        if value is not None:
            return [kind + value for kind in kinds]
    letters = [LETTERS[status] for status in ENDED if status in wanted.statuses]
    return ["o" + letter for letter in (*letters, *dropped)]


def _bounds(value: str, source: str, position: str, wanted: _Filter) -> tuple[str, str]:
    """The last and the first member to read of those that begin with a value."""
    since = until = ""
    if source == "runs":  # its members go on with the end of the run
        since = "" if wanted.since_ms is None else f"{wanted.since_ms:013d}"
        until = "" if wanted.until_ms is None else f"{wanted.until_ms:013d}"
    before = position or until
    # Nothing but the value and NUL is no member: its position would be that of the beginning.
    first = f"[{value}\0{since}" if since else f"({value}\0"
    return (f"({value}\0{before}" if before else f"({value}\1"), first


def _range(source: str, first: str, last: str, limit: int) -> dict[str, Any]:
    return {"source": source, "from": first, "to": last, "limit": limit}


def _triples(flat: Sequence[Any]) -> Iterator[tuple[str, str, bytes]]:
    """Position, id and record of each run that the script `runs` has found."""
    for i in range(1, len(flat), 3):
        position, task_id = (
            flat[i].decode("utf-8", "replace"),
            flat[i + 1].decode("utf-8", "replace"),
        )
        yield position, task_id, flat[i + 2]


def _read_position(position: str) -> tuple[int, str] | None:
    match = _POSITION.fullmatch(position)
    return (int(match[1]), match[2]) if match else None


def _encode_cursor(source: str, position: str) -> str:
    return base64.urlsafe_b64encode(f"{source}:{position}".encode()).decode()


def _decode_cursor(cursor: object, sources: Sequence[str]) -> tuple[int, str]:
    """The number of a source, and a position in it."""
    if cursor is None:
        return 0, ""
    try:
        if not isinstance(cursor, str):
            raise TypeError("no string")
        text = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True).decode()
        source, _, position = text.partition(":")
        number = sources.index(source)
        timed = source in (*_BY_TIME, "failures")
        if position and timed and not _read_position(position):
            raise ValueError("no position")
    except (ValueError, TypeError):
        raise InvalidInput(
            f"cursor {shown(cursor)} is none: pass the `cursor` of a page of this listing"
        ) from None
    return number, position
