"""What an operator does with the schedules of a queue, beyond one field of one of them."""

import base64
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytz

from fairqueue.clock import from_ms
from fairqueue.errors import (
    LONGEST_SHOWN,
    BrokenRecord,
    FairQueueError,
    InvalidSchedule,
    RedisUnavailable,
    UnknownSchedule,
    cut,
    shown,
)
from fairqueue.link.connection import Link
from fairqueue.logs import log_event
from fairqueue.models import Page, ScheduledTask, new_id
from fairqueue.schedules.store import (
    CHANGES_LISTED,
    ENGINE,
    KINDS,
    MAX_LISTED,
    MAX_WALKED,
    ScheduleStore,
    Stored,
    check_id,
    fields_of,
    user_form,
)
from fairqueue.validation import check_count, check_items, check_name, check_tenant

logger = logging.getLogger("fairqueue.control")

ACTIONS = ("pause", "resume", "remove", "update", "trigger")
LEAST_READ = 100  # schedules that are read in full at a time, where more than a page may match
MAX_ERRORS = 100  # that a bulk operation tells; the others are counted
# A moment as close as this is left to be fired as it was planned: replanning must not lose one.
REPLAN_MARGIN_MS = 30_000


# --- finding --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which schedules are meant; None: whatever it is. All that is given must match.

    name: of their tasks, exactly; name_prefix: its beginning. contains: a part of the name, of
    the id or of the title, in upper or lower case.
    """

    user_id: str | None = None
    name: str | None = None
    name_prefix: str | None = None
    contains: str | None = None
    is_active: bool | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidSchedule naming the value."""
        for what in ("user_id", "name", "name_prefix", "contains"):
            if getattr(self, what) is not None:
                check_name(getattr(self, what), what, InvalidSchedule)
        if self.tenant is not None:
            check_tenant(self.tenant, InvalidSchedule)
        if self.is_active not in (None, True, False):
            raise InvalidSchedule(
                f"is_active {shown(self.is_active)} is neither True, False nor None"
            )

    @property
    def index(self) -> str:
        """The key of the index that is walked."""
        if self.tenant is not None:
            return "tenant_schedules"  # never more than the tenant's own
        named = self.name is not None or self.name_prefix is not None
        if named or (self.contains is not None and self.user_id is None):
            return "schedule_names"
        return "schedule_index"

    @property
    def bounds(self) -> tuple[bytes, bytes]:
        """The part of the index that is walked."""
        exact = self._exact
        if exact is not None:
            return b"[" + exact.encode() + b"\0", b"(" + exact.encode() + b"\1"
        if self.name_prefix is not None:
            prefix = self.name_prefix.encode()
            return b"[" + prefix, b"(" + prefix + b"\xff"  # no text has this byte
        return b"-", b"+"

    @property
    def _exact(self) -> str | None:
        """What all entries that are walked begin with, up to a NUL."""
        if self.tenant is not None:
            return self.tenant if self.user_id is None else f"{self.tenant}\0{self.user_id}"
        return self.name if self.index == "schedule_names" else self.user_id

    @property
    def needs_reading(self) -> bool:
        """Whether the index alone does not say which ones match.

        Of a tenant the schedules themselves decide: nobody else's may be taken for its own.
        """
        if self.is_active is not None or self.contains is not None or self.tenant is not None:
            return True
        both = self.user_id is not None or bool(self.name and self.name_prefix)
        return self.index == "schedule_names" and both

    @property
    def is_of_words(self) -> bool:
        """Whether an entry of the index and the title are enough to see which may match."""
        return self.contains is not None and self.index == "schedule_names"

    def may_match(self, member: bytes, title: str) -> bool:
        """Whether a part of the name, of the id or of the title is what is looked for."""
        part = (self.contains or "").casefold()
        return part in member.decode(errors="replace").casefold() or part in title.casefold()

    def matches(self, task: ScheduledTask) -> bool:
        """Whether a schedule is meant."""
        wanted = (self.user_id, self.name, self.is_active, self.tenant)
        found = (task.user_id, task.name, task.is_active, task.tenant)
        if any(w is not None and w != f for w, f in zip(wanted, found, strict=True)):
            return False
        if self.name_prefix is not None and not task.name.startswith(self.name_prefix):
            return False
        if self.contains is None:
            return True
        part = self.contains.casefold()
        return any(
            part in text.casefold() for text in (task.name, task.schedule_id, task.title or "")
        )


def _members(link: Link, filter_: Filter, start: bytes, want: int) -> list[bytes]:
    key, stop = link.keys[filter_.index], filter_.bounds[1]
    members: list[bytes] = link.ask(("ZRANGE", key, start, stop, "BYLEX", "LIMIT", 0, want))[0]
    return members


def _ids(members: Sequence[bytes]) -> list[str]:
    return [member.rpartition(b"\0")[2].decode(errors="replace") for member in members]


def _likely(store: ScheduleStore, filter_: Filter, members: Sequence[bytes]) -> list[bytes]:
    """The entries of an index that are worth reading in full.

    Whether schedules are active is asked first, where it matters: that is a small part of each, and
    the filter may match none of ten thousand.
    """
    found = list(members)
    if filter_.is_active is not None:
        flags = store.are_active(_ids(found))
        both = zip(found, flags, strict=True)
        found = [member for member, is_active in both if is_active == filter_.is_active]
    if filter_.is_of_words:
        named = zip(found, store.titles(_ids(found)), strict=True)
        found = [member for member, title in named if filter_.may_match(member, title)]
    return found


def _parts(members: Sequence[bytes], limit: int) -> Iterator[Sequence[bytes]]:
    """As many at a time as a page may have, and some at least."""
    step = max(limit, LEAST_READ)
    return (members[i : i + step] for i in range(0, len(members), step))


def search(
    link: Link, store: ScheduleStore, filter_: Filter, limit: int, cursor: str | None
) -> Page[ScheduledTask]:
    """A page of the schedules that match, in the order of the index that is walked.

    A page may be short although its cursor says that there is more: one call looks at no more than
    10,000. Raises InvalidSchedule for a bad value.
    """
    check_count(limit, "limit", InvalidSchedule, least=1, most=MAX_LISTED)
    start = filter_.bounds[0] if cursor is None else b"(" + _decode_cursor(cursor, filter_)
    want = MAX_LISTED if filter_.needs_reading else limit
    found: list[ScheduledTask] = []
    for _ in range(MAX_WALKED // want):
        members = _members(link, filter_, start, want)
        for likely in _parts(_likely(store, filter_, members), limit):
            for member, task in zip(likely, store.read(_ids(likely)), strict=True):
                if task is not None and filter_.matches(task):
                    found.append(task)
                    if len(found) == limit:
                        return Page(found, _encode_cursor(member))
        if len(members) < want:
            return Page(found, None)
        start = b"(" + members[-1]
    return Page(found, _encode_cursor(start[1:]))


def walk_ids(link: Link, store: ScheduleStore, filter_: Filter) -> Iterator[list[str]]:
    """The ids of all schedules that match, page by page; some pages may be empty."""
    start = filter_.bounds[0]
    while members := _members(link, filter_, start, MAX_LISTED):
        ids = _ids(_likely(store, filter_, members))
        if filter_.needs_reading:
            tasks = [task for task in store.read(ids) if task is not None]
            ids = [task.schedule_id for task in tasks if filter_.matches(task)]
        yield ids
        start = b"(" + members[-1]


def select_ids(store: ScheduleStore, filter_: Filter, ids: Sequence[str]) -> list[str]:
    """Those of the ids whose schedules match, each once. Raises InvalidSchedule for a bad id."""
    listed = check_items(ids, "ids", "ids of schedules", InvalidSchedule)
    unique = list(dict.fromkeys(check_id(each) for each in listed))
    found: list[str] = []
    for i in range(0, len(unique), MAX_LISTED):
        tasks = [task for task in store.read(unique[i : i + MAX_LISTED]) if task is not None]
        found += [task.schedule_id for task in tasks if filter_.matches(task)]
    return found


def _encode_cursor(member: bytes) -> str:
    return base64.urlsafe_b64encode(member).decode()


def _decode_cursor(cursor: object, filter_: Filter) -> bytes:
    try:
        if not isinstance(cursor, str):
            raise TypeError("no string")
        member = base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
    except (ValueError, TypeError):
        raise InvalidSchedule(
            f"cursor {shown(cursor)} is none: pass the `cursor` of a page"
        ) from None
    first, last = filter_.bounds
    if b"\0" not in member or not (first == b"-" or first[1:] <= member < last[1:]):
        raise InvalidSchedule(f"cursor {shown(cursor)} is of a page of another listing")
    return member


# --- acting on many -------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class BulkResult:
    """What a bulk operation did, or would do.

    matched: how many schedules the filter has found. done, gone (removed by others meanwhile),
    failed and left (Redis was gone, so they were not tried) add up to it, unless it was a dry run.
    errors: what was wrong, by schedule id; the first hundred.
    """

    action: str
    dry_run: bool
    matched: int
    done: int = 0
    gone: int = 0
    failed: int = 0
    left: int = 0
    errors: dict[str, str] = field(default_factory=dict)


def check_action(action: object, changes: Mapping[str, Any]) -> str:
    """A bulk action that is known and goes with the changes. Raises InvalidSchedule."""
    if action not in ACTIONS:
        raise InvalidSchedule(f"action {shown(action)} is none of {', '.join(ACTIONS)}")
    if action == "update" and not changes:
        raise InvalidSchedule("update needs at least one field to change")
    if action != "update" and changes:
        told = cut(", ".join(sorted(changes)), LONGEST_SHOWN)
        raise InvalidSchedule(f"{action} takes no changes; {told} are given")
    if action == "update":
        ScheduleStore.check_changes(changes)
    return str(action)


def run_bulk(
    result: BulkResult,
    ids: Sequence[str],
    act: Callable[[str], object],
    progress: Callable[[int, int], object] | None,
) -> BulkResult:
    """Act on each; one that fails does not stop the others. `act` returns False if it is gone."""
    for number, schedule_id in enumerate(ids, start=1):
        try:
            if act(schedule_id) is False:
                result.gone += 1
            else:
                result.done += 1
        except UnknownSchedule:
            result.gone += 1
        except RedisUnavailable as error:
            # Whether it was done is not known. The others would wait for the time-out each.
            _note_error(result, schedule_id, error)
            result.left = len(ids) - number
            break
        except FairQueueError as error:
            _note_error(result, schedule_id, error)
        if progress is not None:
            progress(number, len(ids))
    return result


def _note_error(result: BulkResult, schedule_id: str, error: FairQueueError) -> None:
    result.failed += 1
    if len(result.errors) < MAX_ERRORS:
        result.errors[schedule_id] = str(error)


def read_stored(store: ScheduleStore, schedule_id: str) -> Stored:
    """A schedule that is there. Raises UnknownSchedule, BrokenRecord, InvalidSchedule."""
    if store.get(schedule_id) is not None:
        (stored,) = store.stored([schedule_id])
        if stored is not None:
            return stored
    raise UnknownSchedule(f"there is no schedule {schedule_id!r}")


# --- copies ---------------------------------------------------------------------------------------


def copy_spec(
    stored: Stored, schedule_id: str | None, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """What `add_schedules` takes to make a schedule like another. Raises InvalidSchedule.

    Who made the other one is not who makes this one.
    """
    for name in ("schedule_id", "is_active", "next_run"):
        if name in changes:
            raise InvalidSchedule(f"{name} {shown(changes[name])} cannot be given to a copy")
    fields = fields_of(stored.definition)
    spec = {name: user_form(name, value) for name, value in fields.items()}
    kinds = [kind for kind in KINDS if changes.get(kind) is not None]
    if kinds:
        # A rule of another kind takes the place of the old one, and an interval begins anew.
        spec |= dict.fromkeys((*KINDS, "anchor"))
    return spec | dict(changes) | {"schedule_id": schedule_id or new_id()}


# --- history --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChange:
    """One change of a schedule: when, by whom, why, and each field's old and new value.

    made: it is the making of the schedule, and the fields are those that it was given. Durations
    are in seconds. A value that is long is shown by the beginning of its JSON text.
    """

    at: datetime
    by: str | None
    note: str | None
    fields: dict[str, tuple[Any, Any]]
    made: bool = False


def list_changes(
    link: Link, store: ScheduleStore, schedule_id: str, limit: int, cursor: str | None
) -> Page[ScheduleChange]:
    """What was changed of a schedule, newest first; see TaskScheduler.changes."""
    check_count(limit, "limit", InvalidSchedule, least=1, most=CHANGES_LISTED)
    if store.get(schedule_id) is None:
        raise UnknownSchedule(f"there is no schedule {schedule_id!r}")
    own = f"{schedule_id}\0".encode()
    start = b"(" + f"{schedule_id}\1".encode()
    if cursor is not None:
        start = b"(" + _decode_change_cursor(cursor, own)
    key = link.keys["changes"]
    members = link.ask(("ZREVRANGEBYLEX", key, start, b"[" + own, "LIMIT", 0, limit + 1))[0]
    page = [_read_change(member) for member in members[:limit]]
    # Its place is enough to go on from: after `when` and the operation comes what was changed.
    place = b"\0".join(members[limit - 1].split(b"\0")[:3]) if len(members) > limit else None
    return Page(page, None if place is None else _encode_cursor(place))


def _read_change(member: bytes) -> ScheduleChange:
    schedule_id, when, _, text = member.decode(errors="replace").split("\0", 3)
    try:
        record = json.loads(text)
        fields = {
            name: (_shown(name, old), _shown(name, new))
            for name, (old, new) in record["fields"].items()
        }
        return ScheduleChange(
            at=from_ms(int(when)),
            by=record["by"],
            note=record["note"],
            fields=fields,
            made=bool(record.get("made")),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenRecord(
            f"a change of schedule {schedule_id!r} is unreadable: {error!r}"
        ) from None


def _shown(name: str, value: Any) -> Any:
    return value if isinstance(value, str) else user_form(name, value)


def _decode_change_cursor(cursor: object, own: bytes) -> bytes:
    try:
        place = base64.b64decode(str(cursor).encode(), altchars=b"-_", validate=True)
    except ValueError:
        place = b""
    if not place.startswith(own):
        raise InvalidSchedule(f"cursor {shown(cursor)} is none of this schedule's changes")
    return place


# --- zones ----------------------------------------------------------------------------------------


def zone_data() -> str:
    """By which zone data and rules this process finds moments."""
    olson, version = getattr(pytz, "OLSON_VERSION", "?"), getattr(pytz, "__version__", "?")
    return f"{olson} (pytz {version}), engine {ENGINE}"


@dataclass(slots=True, kw_only=True)
class Replanned:
    """How many active schedules were looked at, and how many have another next run now."""

    looked_at: int = 0
    changed: int = 0
    failed: int = 0


class Replanner:
    """Computes the next runs of all active schedules again, page by page.

    Only moments to come are moved. One that is due, or will be in a moment, is fired as it was
    planned, and so is one that a user has set.
    """

    def __init__(self, link: Link, store: ScheduleStore) -> None:
        self._link = link
        self._store = store
        self._start = Filter().bounds[0]  # moves on when a page is done: a step can be repeated
        self.report = Replanned()

    @property
    def is_begun(self) -> bool:
        """Whether a page is done."""
        return self._start != Filter().bounds[0]

    def is_needed(self) -> bool:
        """Whether the queue was last planned by other zone data or rules than ours."""
        text = self._link.ask(("HGET", self._link.keys["settings"], "tzdata"))[0]
        return bool(text != zone_data().encode())

    def step(self) -> bool:
        """Look at one page; False when that was the last, and it is known what planned them."""
        members = _members(self._link, Filter(), self._start, MAX_LISTED)
        if not members:
            self._link.run("configure", op=new_id(), rest=["tzdata", zone_data()])
            return False
        for stored in self._store.stored(_ids(members)):
            if stored is not None and stored.is_active:
                self.report.looked_at += 1
                self._replan(stored)
        self._start = b"(" + members[-1]
        return True

    def _replan(self, stored: Stored) -> None:
        definition, nominal_ms = stored.definition, stored.nominal_ms
        now_ms = self._link.now_ms()
        if nominal_ms is None or nominal_ms == stored.set_ms:
            return
        if nominal_ms <= now_ms + REPLAN_MARGIN_MS:
            return
        try:
            if definition.recurrence.next_ms(now_ms) == nominal_ms:
                return
            # To name its zone again plans it anew, and changes nothing else.
            if self._store.update(definition.schedule_id, {"timezone": definition.timezone}):
                self.report.changed += 1
        except RedisUnavailable:
            raise
        except FairQueueError as error:
            # It has no moment any more, or nobody knows its zone: its old plan stands.
            self.report.failed += 1
            log_event(
                logger,
                "replan_failed",
                logging.WARNING,
                schedule=definition.schedule_id,
                error=str(error),
            )
