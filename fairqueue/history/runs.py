"""The history of runs: list them, read one, retry or delete failed ones, delete old ones."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, NamedTuple, TypedDict, Unpack

from fairqueue.clock import LATEST_MS, from_ms, to_ms
from fairqueue.cursors import bad_cursor, decode_cursor, encode_cursor
from fairqueue.errors import BrokenRecord, InvalidInput, QueueFull, UnknownTask, shown
from fairqueue.flow_options import check_pool
from fairqueue.history.records import (
    FailureGroup,
    Run,
    RunDetails,
    list_call,
    read_attempts,
    read_run,
)
from fairqueue.link.operation import Ask, Call, Now, Operation, Together, operation, steps
from fairqueue.link.owners import Owner
from fairqueue.logs import log_event
from fairqueue.models import Page, Task, encode_payload, new_id, task_document
from fairqueue.outcomes import LETTERS, NEVER_RAN
from fairqueue.queue.delays import DelayIndex
from fairqueue.queue.queue import TaskQueue
from fairqueue.retry_policy import encode_policy
from fairqueue.validation import (
    check_count,
    check_items,
    check_name,
    check_one_of,
    check_payload,
    check_seconds,
    check_tenant,
)

logger = logging.getLogger("fairqueue.history")

UNFINISHED = ("pending", "retrying", "running")
ENDED = tuple(LETTERS)
STATUSES = (*UNFINISHED, *ENDED)
MAX_LISTED = 1000  # runs on one page
READ_AT_ONCE = 500  # runs that one script reads: about 2 ms of server time
MAX_WALKED = 10_000  # runs examined for one page if a filter matches few
MAX_SKIMMED = 2000  # waiting runs examined by a listing of all statuses with a filter without index
MAX_TENANTS = 50  # tenants of one user id whose waiting tasks are listed
MAX_RUNNING = 10_000  # running tasks that are listed: they are read together, to be sorted
SAMPLES = 5  # runs of a failure group that are read to find one that is not damaged
PRUNE_CHUNK = 100  # records that one script drops, and fewer large ones: about 2 ms
DISCARD_CHUNK = 100
LAST_MS = 9_999_999_999_999  # in 2286: the end of a run has 13 digits in the index
FAILED = ("failed", "timed_out")

# Sources whose positions are a time in ms and an id, newest first.
_BY_TIME = ("delayed", "waiting", "leases")
_SKIMMED = ("delayed", "waiting")
_POSITION = re.compile(r"([0-9]{1,16}) (.+)", re.DOTALL)
_CLAIMED = re.compile(rb'"claimed":([0-9]{1,16})')  # in the text of a status


class Filters(TypedDict, total=False):
    """Filters of failed runs, as in `History.runs`."""

    user_id: str | None
    schedule_id: str | None
    name: str | None
    fingerprint: str | None
    tenant: str | None
    pool: str | None
    since: datetime | float | None
    until: datetime | float | None


class _RunFilter(NamedTuple):
    """The runs that a listing contains.

    skims: only some of the waiting runs are examined. seats: where tasks of the user wait; see
    lua/lib/owners.lua.
    """

    statuses: frozenset[str]
    skims: bool = False
    seats: tuple[str, ...] = ()
    user_id: str | None = None
    schedule_id: str | None = None
    name: str | None = None
    fingerprint: str | None = None
    tenant: str | None = None
    pool: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    def has(self, run: Run) -> bool:
        """Return whether a run matches all filters; the index that is read has only one."""
        return (
            run.status in self.statuses
            and self.user_id in (None, run.user_id)
            and self.schedule_id in (None, run.schedule_id)
            and self.name in (None, run.name)
            and self.fingerprint in (None, run.fingerprint)
            and self.tenant in (None, run.tenant)
            and self.pool in (None, run.pool)
            and self._has_time(run)
        )

    def _has_time(self, run: Run) -> bool:
        if self.since_ms is None and self.until_ms is None:
            return True
        at_ms = to_ms(run.ended_at or run.started_at or run.pushed_at, "moment")
        return (self.since_ms or 0) <= at_ms and (self.until_ms is None or at_ms < self.until_ms)


class _Row(NamedTuple):
    position: str  # where the listing continues after it
    run: Run | None  # None if it is gone or damaged


class History:
    """The runs of a queue: waiting and running tasks, and the ended ones that are still stored.

    `TaskQueue.configure` sets how many are stored, and how long: keep_finished, keep_dead, ...
    """

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue
        self.link = queue.link

    # --- reading ----------------------------------------------------------------------------------

    @operation
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
        last to be served first, the unfinished runs of one schedule in the reverse order of ids.
        A run that changes its group while pages are read may appear twice; none is missed.

        status: one or several; all by default, or the failed ones with a `fingerprint`. since,
        until: bounds of the end of a run, or else of its last start, or of its push; `until` is not
        included. A page with a cursor may be short, because the search for a filter that matches
        few runs is bounded. At most 10,000 running tasks are listed. Without `status` and with a
        filter by name, tenant, pool or time, at most 2,000 waiting and 2,000 delayed tasks are
        examined, because no index of waiting tasks has these fields: pass a status to examine all
        of them.
        Raises InvalidInput naming the value.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        wanted = _check_filter(
            status, user_id, schedule_id, name, fingerprint, tenant, pool, since=since, until=until
        )
        sources = _sources(wanted)
        if user_id is not None and {"backlog", "delayed_index"}.intersection(sources):
            wanted = wanted._replace(seats=(yield from self._seats(user_id, tenant)))
        if "delayed_index" in sources:
            yield from steps(DelayIndex(self.link).update)()
        number, position = _decode_cursor(cursor, sources)
        return (yield from self._page(wanted, sources[number:], position, limit))

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

    def _page(
        self, wanted: _RunFilter, sources: Sequence[str], position: str, limit: int
    ) -> Operation[Page[Run]]:
        found: list[Run] = []
        seen: set[str] = set()  # a run that ends while the page is read would appear twice
        walked = 0
        for source in sources:
            more = True
            skimmed = 0
            size = min(limit + 1, READ_AT_ONCE)  # enough if the index has just this filter
            while more and not (wanted.skims and source in _SKIMMED and skimmed >= MAX_SKIMMED):
                if walked >= MAX_WALKED:
                    return Page(found, _cursor(source, position))
                rows, more = yield from self._read(source, position, wanted, size)
                for i, row in enumerate(rows, 1):
                    position = row.position
                    if row.run is not None and wanted.has(row.run) and row.run.task_id not in seen:
                        seen.add(row.run.task_id)
                        found.append(row.run)
                        if len(found) == limit:
                            is_last = i == len(rows) and not more and source == sources[-1]
                            return Page(found, None if is_last else _cursor(source, position))
                walked += len(rows)
                skimmed += len(rows)
                size = READ_AT_ONCE
            position = ""
        return Page(found, None)

    def _read(
        self, source: str, position: str, wanted: _RunFilter, size: int
    ) -> Operation[tuple[list[_Row], bool]]:
        """Return the next rows of a source, and whether there may be more after them."""
        if source == "leases":
            return (yield from self._read_running(position, size))
        if source in _BY_TIME:
            calls = [list_call(source, position, "", size)]
        else:
            calls = [
                list_call(source, *_bounds(value, source, position, wanted), size)
                for value in _values(source, wanted)
            ]
        answers = yield Together(*calls)
        parts = [list(_triples(answer)) for answer in answers]
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
        if last := _read_position(position):
            found = [each for each in found if each[:2] < last]
        rows = []
        for started_ms, task_id, text in found[:size]:
            run = read_run(task_id, text)
            has_ended = run is not None and run.status != "running"  # just now: listed later
            rows.append(_Row(f"{started_ms} {task_id}", None if has_ended else run))
        return rows, len(found) > size

    @operation
    def find(self, task_ids: Sequence[str]) -> Operation[list[Run]]:
        """Return the stored runs with these ids, in order, without damaged ones.

        Raises InvalidInput if `task_ids` is not a list of ids.
        """
        task_ids = check_items(task_ids, "task_ids", "task ids")
        if not task_ids:
            return []
        for task_id in task_ids:
            check_name(task_id, "task_id")
        (texts,) = yield Ask(("HMGET", self.link.keys["status"], *task_ids))
        found = zip(task_ids, texts, strict=True)
        runs = (read_run(task_id, text) for task_id, text in found if text is not None)
        return [run for run in runs if run is not None]

    @operation
    def get(self, task_id: str) -> Operation[RunDetails | None]:
        """Return a run with its attempts, or None. Raises BrokenRecord if its record is damaged."""
        check_name(task_id, "task_id")
        keys = self.link.keys
        status, document, lines = yield Ask(
            ("HGET", keys["status"], task_id),
            ("HGET", keys["tasks"], task_id),
            ("HGET", keys["attempts"], task_id),
        )
        if status is None:
            return None
        run = read_run(task_id, status)
        if run is None:
            raise BrokenRecord(f"the status record of task {task_id!r} is damaged")
        try:
            task = Task.from_document(task_id, document or b"")
        except BrokenRecord:
            task = None
        return RunDetails(run=run, attempts=read_attempts(run, lines or b""), task=task)

    @operation
    def failure_groups(
        self, limit: int = 100, cursor: str | None = None
    ) -> Operation[Page[FailureGroup]]:
        """Return failed runs grouped by their fingerprint, the cause, the latest first.

        Raises InvalidInput for a bad limit or cursor.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        _, position = _decode_cursor(cursor, ["failures"])
        marks = yield from self._fingerprints(position, limit + 1)
        more, marks = len(marks) > limit, marks[:limit]
        if not marks:
            return Page([], None)
        index = self.link.keys["runs"]
        counts = yield Ask(
            *(("ZLEXCOUNT", index, f"[f{mark}\0", f"(f{mark}\1") for _, mark in marks)
        )
        samples = yield Together(
            *(list_call("runs", f"(f{mark}\1", f"[f{mark}\0", SAMPLES) for _, mark in marks)
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
        return Page(groups, _cursor("failures", f"{last_ms} {mark}") if more else None)

    def _fingerprints(self, position: str, most: int) -> Operation[list[tuple[int, str]]]:
        """Return fingerprints after a position, with the times of their last failures in ms."""
        last = _read_position(position)
        found: list[tuple[int, str]] = []
        skip = 0
        key, start = self.link.keys["failures"], str(last[0]) if last else "+inf"
        while len(found) < most:
            part = ("BYSCORE", "REV", "LIMIT", skip, most, "WITHSCORES")
            (flat,) = yield Ask(("ZRANGE", key, start, "-inf", *part))
            pairs = list(zip(flat[::2], map(float, flat[1::2]), strict=True))
            rows = [
                (int(score), mark.decode("utf-8", "replace"))
                for mark, score in pairs
                if 0 <= score <= LATEST_MS  # others are damaged
            ]
            found += [row for row in rows if last is None or row < last]
            skip += len(pairs)
            if len(pairs) < most:
                break
        return found[:most]

    # --- failed runs ------------------------------------------------------------------------------

    @operation
    def retry(
        self,
        task_id: str,
        *,
        triggered_by: str | None = None,
        payload: dict[str, Any] | None = None,
    ) -> Operation[str]:
        """Run a failed run again, as a new run that refers to it, and return the new id.

        A `payload` replaces its own. A failed run is retried once: a second call returns the same
        id, whatever the payload. Raises UnknownTask if it is not a failed run, BrokenRecord if its
        task is damaged, InvalidPayload, QueueFull.
        """
        if triggered_by is not None:
            check_name(triggered_by, "triggered_by")
        if payload is not None:
            encode_payload(check_payload(payload))
        details = yield from steps(self.get)(task_id)
        if details is None or details.run.status not in FAILED:
            status = "unknown" if details is None else details.run.status
            raise UnknownTask(f"task {task_id!r} is {status}: only failed runs can be retried")
        if details.task is None:
            raise BrokenRecord(
                f"the document of task {task_id!r} is damaged: the run cannot be retried"
            )
        task = _again(details.task, triggered_by, payload)
        answer = yield Call(
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
            raise UnknownTask(f"task {task_id!r} is no longer a failed run")
        if answer[0] == b"full":
            raise QueueFull(f"task {task_id!r} cannot be retried now: max_waiting is reached")
        return str(answer[1].decode())

    @operation
    def retry_matching(
        self,
        *,
        triggered_by: str | None = None,
        limit: int = MAX_LISTED,
        **filters: Unpack[Filters],
    ) -> Operation[list[str]]:
        """Retry at most `limit` failed runs that match, the latest first; return the new ids.

        Runs that were retried before are skipped, and those whose tasks are damaged too, with a
        warning in the log. Raises QueueFull, after which the call can be repeated for the rest, and
        InvalidInput for a bad filter or limit.
        """
        check_count(limit, "limit", least=1)
        if triggered_by is not None:
            check_name(triggered_by, "triggered_by")
        retried: list[str] = []
        cursor: str | None = None
        while True:
            page = yield from self._failed(cursor, filters)
            for run in page:
                if run.retried_as is None:
                    retried += yield from self._retry_one(run, triggered_by)
                if len(retried) == limit:
                    return retried
            cursor = page.cursor
            if cursor is None:
                return retried

    def _retry_one(self, run: Run, triggered_by: str | None) -> Operation[list[str]]:
        """Retry a run and return its new id in a list, which is empty if it cannot be retried."""
        try:
            return [(yield from steps(self.retry)(run.task_id, triggered_by=triggered_by))]
        except (BrokenRecord, UnknownTask) as error:  # UnknownTask: dropped meanwhile
            fields = {"task": run.task_id, "user": run.user_id, "error": str(error)}
            log_event(logger, "run_not_retried", logging.WARNING, **fields)
            return []

    @operation
    def discard(self, task_id: str) -> Operation[bool]:
        """Delete a failed run from the history; return False if it is not a failed run."""
        check_name(task_id, "task_id")
        return (yield from self._discard([task_id])) == 1

    @operation
    def discard_matching(
        self, *, limit: int = MAX_LISTED, **filters: Unpack[Filters]
    ) -> Operation[int]:
        """Delete at most `limit` failed runs that match, the latest first; return how many.

        Raises InvalidInput for a bad filter or limit.
        """
        check_count(limit, "limit", least=1)
        ids: list[str] = []
        cursor: str | None = None
        while len(ids) < limit:
            page = yield from self._failed(cursor, filters)
            ids += [run.task_id for run in page]
            cursor = page.cursor
            if cursor is None:
                break
        dropped = 0
        for i in range(0, min(len(ids), limit), DISCARD_CHUNK):
            dropped += yield from self._discard(ids[i : min(i + DISCARD_CHUNK, limit)])
        return dropped

    def _discard(self, ids: list[str]) -> Operation[int]:
        """Delete failed runs; one script deletes as many as its time allows."""
        dropped, left = 0, 1
        while left:
            count, left = yield Call("discard", op=new_id(), rest=ids)
            dropped += int(count)
        return dropped

    def _failed(self, cursor: str | None, filters: Filters) -> Operation[Page[Run]]:
        return steps(self.runs)(FAILED, limit=MAX_LISTED, cursor=cursor, **filters)

    @operation
    def prune(self, older_than: float | timedelta) -> Operation[int]:
        """Delete ended runs, failed ones included, that are at least this old; return how many.

        `older_than` is in seconds or a timedelta. Raises InvalidInput if it is neither.
        """
        seconds = check_seconds(older_than, "older_than")
        before_ms = (yield Now()) - round(seconds * 1000) + 1
        dropped = 0
        while count := (yield Call("prune", op=new_id(), before_ms=before_ms, limit=PRUNE_CHUNK)):
            dropped += int(count)
        return dropped


def _again(task: Task, triggered_by: str | None, payload: dict[str, Any] | None) -> Task:
    """Return a retry of a task, with another payload if one is given."""
    payload = task.payload if payload is None else payload
    # The policy of the task or its schedule applies to this run too.
    flow = task.flow.of_retry()
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
        flow=flow,
        document=task_document(
            task.user_id,
            task.name,
            task.priority,
            encode_payload(payload),
            task.schedule_id,
            scheduled_ms,
            origin={"by": triggered_by, "retry_of": task.task_id, "tenant": task.tenant},
            policy=encode_policy(task.policy),
            flow=flow,
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
    pool: str | None,
    *,
    since: datetime | float | None,
    until: datetime | float | None,
) -> _RunFilter:
    named = (("user_id", user_id), ("schedule_id", schedule_id), ("name", name))
    for field, value in (*named, ("fingerprint", fingerprint)):
        if value is not None:
            check_name(value, field)
    if tenant is not None:
        check_tenant(tenant, InvalidInput)
    if pool is not None:
        check_pool(pool, InvalidInput)
    return _RunFilter(
        statuses=_check_statuses(status, fingerprint),
        skims=status is None
        and any(each is not None for each in (name, tenant, pool, since, until)),
        user_id=user_id,
        schedule_id=schedule_id,
        name=name,
        fingerprint=fingerprint,
        tenant=tenant,
        pool=pool,
        since_ms=_check_moment(since, "since"),
        until_ms=_check_moment(until, "until"),
    )


def _check_statuses(status: str | Iterable[str] | None, fingerprint: str | None) -> frozenset[str]:
    if status is None:
        return frozenset(STATUSES if fingerprint is None else ENDED)
    words = (status,) if isinstance(status, str) else status
    listed = list(words) if isinstance(words, Iterable) else [status]
    if not listed:
        raise InvalidInput(f"status must name at least one status or be None, not {shown(status)}")
    return frozenset(check_one_of(word, "status", STATUSES) for word in listed)


def _check_moment(moment: datetime | float | None, what: str) -> int | None:
    return None if moment is None else min(max(0, to_ms(moment, what)), LAST_MS)


def _sources(wanted: _RunFilter) -> list[str]:
    """Return the sources of a listing, in the order of the life of a run."""
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


def _values(source: str, wanted: _RunFilter) -> list[str]:
    """Return the prefixes of the members of a source that may match."""
    if source == "open":
        return [wanted.schedule_id or ""]
    if source == "delayed_index":  # by owner, not by seat
        return [seat for seat in wanted.seats if "\x03" not in seat]
    if source in ("backlog", "held"):
        return list(wanted.seats)
    if wanted.fingerprint is not None:
        return ["f" + wanted.fingerprint]
    if wanted.schedule_id is not None:
        return ["c" + wanted.schedule_id]
    if wanted.user_id is not None:
        return _values_of_user(wanted.user_id, wanted)
    for kind, value in (("t", wanted.tenant), ("n", wanted.name)):
        if value is not None:
            return [kind + value]
    letters = [LETTERS[status] for status in ENDED if status in wanted.statuses]
    # Those that were cancelled before they ran are listed by themselves.
    dropped = NEVER_RAN if "cancelled" in wanted.statuses else ""
    return ["o" + letter for letter in (*letters, *dropped)]


def _values_of_user(user_id: str, wanted: _RunFilter) -> list[str]:
    """Return the prefixes in the index of ended runs for a user id, of any tenant or of one.

    Runs of versions with layout 1 are under the user alone, whatever their tenant.
    """
    kinds = ["u"] + [NEVER_RAN] * bool({"cancelled", "expired"} & wanted.statuses)
    if wanted.tenant is None:
        return [*(kind + user_id for kind in kinds), "p" + user_id]
    owners = (user_id, Owner(user_id, wanted.tenant).key)
    return [kind + owner for kind in kinds for owner in owners]


def _bounds(value: str, source: str, position: str, wanted: _RunFilter) -> tuple[str, str]:
    """Return the last and the first member to read, of those with this prefix."""
    since = until = ""
    if source == "runs":  # the end of the run follows the prefix
        since = "" if wanted.since_ms is None else f"{wanted.since_ms:013d}"
        until = "" if wanted.until_ms is None else f"{wanted.until_ms:013d}"
    before = position or until
    # The prefix and NUL alone are not a member: its position would be that of the beginning.
    first = f"[{value}\0{since}" if since else f"({value}\0"
    return (f"({value}\0{before}" if before else f"({value}\1"), first


def _triples(flat: Sequence[Any]) -> Iterator[tuple[str, str, bytes]]:
    """Yield position, id and record of each run that the script has found."""
    for i in range(1, len(flat), 3):
        position, task_id = (text.decode("utf-8", "replace") for text in flat[i : i + 2])
        yield position, task_id, flat[i + 2]


def _read_position(position: str) -> tuple[int, str] | None:
    match = _POSITION.fullmatch(position)
    return (int(match[1]), match[2]) if match else None


def _cursor(source: str, position: str) -> str:
    return encode_cursor(f"{source}:{position}".encode())


def _decode_cursor(cursor: object, sources: Sequence[str]) -> tuple[int, str]:
    """Return the number of a source and a position in it. Raises InvalidInput."""
    if cursor is None:
        return 0, ""
    try:
        source, _, position = decode_cursor(cursor).decode().partition(":")
    except UnicodeDecodeError:
        raise bad_cursor(cursor, InvalidInput) from None
    is_timed = source in (*_BY_TIME, "failures")
    if source not in sources or (position and is_timed and not _read_position(position)):
        raise bad_cursor(cursor, InvalidInput, " for this listing")
    return sources.index(source), position
