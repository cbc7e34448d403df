"""Which runs a listing contains: its filters, the indexes to read, and places in these."""

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

from fairqueue.clock import to_ms
from fairqueue.cursors import bad_cursor, decode_cursor, encode_cursor
from fairqueue.errors import InvalidInput, shown
from fairqueue.flow_options import check_pool
from fairqueue.history.records import Run
from fairqueue.link.owners import Owner
from fairqueue.outcomes import LETTERS, NEVER_RAN
from fairqueue.validation import check_name, check_one_of, check_tenant

UNFINISHED = ("pending", "retrying", "running")
ENDED = tuple(LETTERS)
STATUSES = (*UNFINISHED, *ENDED)
LAST_MS = 9_999_999_999_999  # in 2286: the end of a run has 13 digits in the index

# Sources whose positions are a time in ms and an id, newest first.
BY_TIME = ("delayed", "waiting", "leases")
_POSITION = re.compile(r"([0-9]{1,16}) (.+)", re.DOTALL)


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


class WantedRuns(NamedTuple):
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


def check_filter(
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
) -> WantedRuns:
    """Return the filter of a listing. Raises InvalidInput naming the value."""
    named = (("user_id", user_id), ("schedule_id", schedule_id), ("name", name))
    for field, value in (*named, ("fingerprint", fingerprint)):
        if value is not None:
            check_name(value, field)
    if tenant is not None:
        check_tenant(tenant, InvalidInput)
    if pool is not None:
        check_pool(pool, InvalidInput)
    return WantedRuns(
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


def sources_of(wanted: WantedRuns) -> list[str]:
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


def values_of(source: str, wanted: WantedRuns) -> list[str]:
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


def _values_of_user(user_id: str, wanted: WantedRuns) -> list[str]:
    """Return the prefixes in the index of ended runs for a user id, of any tenant or of one.

    Runs of versions with layout 1 are under the user alone, whatever their tenant.
    """
    kinds = ["u"] + [NEVER_RAN] * bool({"cancelled", "expired"} & wanted.statuses)
    if wanted.tenant is None:
        return [*(kind + user_id for kind in kinds), "p" + user_id]
    owners = (user_id, Owner(user_id, wanted.tenant).key)
    return [kind + owner for kind in kinds for owner in owners]


def bounds_of(value: str, source: str, position: str, wanted: WantedRuns) -> tuple[str, str]:
    """Return the last and the first member to read, of those with this prefix."""
    since = until = ""
    if source == "runs":  # the end of the run follows the prefix
        since = "" if wanted.since_ms is None else f"{wanted.since_ms:013d}"
        until = "" if wanted.until_ms is None else f"{wanted.until_ms:013d}"
    before = position or until
    # The prefix and NUL alone are not a member: its position would be that of the beginning.
    first = f"[{value}\0{since}" if since else f"({value}\0"
    return (f"({value}\0{before}" if before else f"({value}\1"), first


def triples(flat: Sequence[Any]) -> Iterator[tuple[str, str, bytes]]:
    """Yield position, id and record of each run that the script has found."""
    for i in range(1, len(flat), 3):
        position, task_id = (text.decode("utf-8", "replace") for text in flat[i : i + 2])
        yield position, task_id, flat[i + 2]


def read_position(position: str) -> tuple[int, str] | None:
    """Return the time in ms and the id of a position; None if it is malformed."""
    match = _POSITION.fullmatch(position)
    return (int(match[1]), match[2]) if match else None


def cursor_at(source: str, position: str) -> str:
    """Return the cursor of a place: a position in a source."""
    return encode_cursor(f"{source}:{position}".encode())


def place_of_cursor(cursor: object, sources: Sequence[str]) -> tuple[int, str]:
    """Return the number of a source and a position in it. Raises InvalidInput."""
    if cursor is None:
        return 0, ""
    try:
        source, _, position = decode_cursor(cursor).decode().partition(":")
    except UnicodeDecodeError:
        raise bad_cursor(cursor, InvalidInput) from None
    is_timed = source in (*BY_TIME, "failures")
    if source not in sources or (position and is_timed and not read_position(position)):
        raise bad_cursor(cursor, InvalidInput, " for this listing")
    return sources.index(source), position
