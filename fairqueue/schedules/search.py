"""Find schedules: which ones match, page by page or all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import TypedDict

from fairqueue.cursors import bad_cursor, decode_cursor, encode_cursor
from fairqueue.errors import InvalidSchedule, shown
from fairqueue.link.merging import PlacedRow, PlacedRows, merged_rows
from fairqueue.link.operation import Ask, Operation, steps
from fairqueue.link.partitions import everywhere
from fairqueue.models import Page, ScheduledTask
from fairqueue.schedules.fields import check_id
from fairqueue.schedules.store import ScheduleStore
from fairqueue.validation import check_count, check_items, check_name, check_tenant

MAX_LISTED = 1000  # schedules on one page
MAX_WALKED = 10_000  # schedules looked at for one page when a filter matches few
LEAST_READ = 100  # schedules that are read in full at a time, where more than a page may match


class MoreFilters(TypedDict, total=False):
    """Which schedules are meant, besides their user and whether they are active."""

    name: str | None
    name_prefix: str | None
    contains: str | None
    tenant: str | None


class ScheduleFilters(MoreFilters, total=False):
    """Which schedules are meant; see ScheduleFilter."""

    user_id: str | None
    is_active: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFilter:
    """Which schedules are meant: those that match all values that are not None.

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
        """Raise InvalidSchedule naming a bad value."""
        for what in ("user_id", "name", "name_prefix", "contains"):
            if getattr(self, what) is not None:
                check_name(getattr(self, what), what, InvalidSchedule)
        if self.tenant is not None:
            check_tenant(self.tenant, InvalidSchedule)
        if self.is_active not in (None, True, False):
            raise InvalidSchedule(
                f"is_active must be True, False or None, not {shown(self.is_active)}"
            )

    @property
    def index(self) -> str:
        """The key of the index to walk."""
        if self.tenant is not None:
            return "tenant_schedules"  # never more than the tenant's own
        named = self.name is not None or self.name_prefix is not None
        if named or (self.contains is not None and self.user_id is None):
            return "schedule_names"
        return "schedule_index"

    @property
    def bounds(self) -> tuple[bytes, bytes]:
        """The part of the index to walk."""
        exact = self._exact
        if exact is not None:
            return b"[" + exact.encode() + b"\0", b"(" + exact.encode() + b"\1"
        if self.name_prefix is not None:
            prefix = self.name_prefix.encode()
            return b"[" + prefix, b"(" + prefix + b"\xff"  # no text has this byte
        return b"-", b"+"

    @property
    def _exact(self) -> str | None:
        """What all entries of that part begin with, up to a NUL."""
        if self.tenant is not None:
            return self.tenant if self.user_id is None else f"{self.tenant}\0{self.user_id}"
        return self.name if self.index == "schedule_names" else self.user_id

    @property
    def needs_reading(self) -> bool:
        """Whether the index alone does not say which schedules match.

        Of a tenant the schedules themselves decide, so that it never gets those of another.
        """
        if self.is_active is not None or self.contains is not None or self.tenant is not None:
            return True
        both = self.user_id is not None or bool(self.name and self.name_prefix)
        return self.index == "schedule_names" and both

    @property
    def is_of_words(self) -> bool:
        """Whether an index entry and the title are enough to see which schedules may match."""
        return self.contains is not None and self.index == "schedule_names"

    def may_match(self, member: bytes, title: str) -> bool:
        """Return whether name, id or title contain what is looked for."""
        part = (self.contains or "").casefold()
        return part in member.decode(errors="replace").casefold() or part in title.casefold()

    def matches(self, task: ScheduledTask) -> bool:
        """Return whether a schedule is meant."""
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


def search(
    store: ScheduleStore, wanted: ScheduleFilter, limit: int, cursor: str | None
) -> Operation[Page[ScheduledTask]]:
    """Return a page of the schedules that match, in the order of the index that is walked.

    A page may be short although it has a cursor: one call looks at no more than 10,000 schedules.
    Records that cannot be read are left out. Raises InvalidSchedule for a bad value.
    """
    check_count(limit, "limit", InvalidSchedule, least=1, most=MAX_LISTED)

    def read(
        twin: ScheduleStore, place: str | None, size: int
    ) -> Operation[PlacedRows[ScheduledTask]]:
        return _rows(twin, wanted, min(size, MAX_LISTED), place)

    if store.link.parts:
        return Page(*(yield from merged_rows(store, read, limit, cursor, InvalidSchedule)))
    found = yield from _rows(store, wanted, limit, cursor)
    return Page([row.item for row in found.rows], found.place)


def _rows(
    store: ScheduleStore, wanted: ScheduleFilter, limit: int, cursor: str | None
) -> Operation[PlacedRows[ScheduledTask]]:
    """The next schedules of one partition that match, with their entries in the index."""
    start = wanted.bounds[0] if cursor is None else b"(" + _decode_cursor(cursor, wanted)
    want = MAX_LISTED if wanted.needs_reading else limit
    found: list[PlacedRow[ScheduledTask]] = []
    walked = 0
    while True:
        members = yield from walk(store, wanted, start, want)
        for part in _parts((yield from _likely(store, wanted, members)), limit):
            tasks = yield from steps(store.read)(ids_of(part))
            for member, task in zip(part, tasks, strict=True):
                if task is not None and wanted.matches(task):
                    found.append(PlacedRow(member, encode_cursor(member), task))
                    if len(found) == limit:
                        return PlacedRows(found, found[-1].place)
        if len(members) < want:
            return PlacedRows(found, None)
        start, walked = b"(" + members[-1], walked + len(members)
        if walked >= MAX_WALKED and _is_text(members[-1]):
            return PlacedRows(found, encode_cursor(members[-1]))


def find_ids(store: ScheduleStore, wanted: ScheduleFilter) -> Operation[list[str]]:
    """Return the ids of all schedules that match."""
    if not store.link.parts:
        return ids_of((yield from _find(store, wanted)))
    found = yield from everywhere(store, lambda twin: _find(twin, wanted), strict=True)
    return ids_of(list(merge(*found)))


def _find(store: ScheduleStore, wanted: ScheduleFilter) -> Operation[list[bytes]]:
    """Return the entries of all schedules of one partition that match."""
    found: list[bytes] = []
    start = wanted.bounds[0]
    while members := (yield from walk(store, wanted, start, MAX_LISTED)):
        likely = yield from _likely(store, wanted, members)
        if wanted.needs_reading:
            matching = set((yield from _matching(store, wanted, ids_of(likely))))
            both = zip(likely, ids_of(likely), strict=True)
            likely = [member for member, schedule_id in both if schedule_id in matching]
        found += likely
        start = b"(" + members[-1]
    return found


def select_ids(
    store: ScheduleStore, wanted: ScheduleFilter, ids: Sequence[str]
) -> Operation[list[str]]:
    """Return those of the ids whose schedules match, each once. Raises InvalidSchedule."""
    listed = check_items(ids, "ids", "ids of schedules", InvalidSchedule)
    unique = list(dict.fromkeys(check_id(each) for each in listed))
    found: list[str] = []
    for i in range(0, len(unique), MAX_LISTED):
        found += yield from _matching(store, wanted, unique[i : i + MAX_LISTED])
    return found


def walk(
    store: ScheduleStore, wanted: ScheduleFilter, start: bytes, want: int
) -> Operation[list[bytes]]:
    """Return up to `want` entries of the filter's index, from `start` on."""
    key, stop = store.link.keys[wanted.index], wanted.bounds[1]
    members: list[bytes]
    (members,) = yield Ask(("ZRANGE", key, start, stop, "BYLEX", "LIMIT", 0, want))
    return members


def ids_of(members: Sequence[bytes]) -> list[str]:
    """Return the ids in entries of an index."""
    return [member.rpartition(b"\0")[2].decode(errors="replace") for member in members]


def _matching(
    store: ScheduleStore, wanted: ScheduleFilter, ids: Sequence[str]
) -> Operation[list[str]]:
    tasks = yield from steps(store.read)(ids)
    return [task.schedule_id for task in tasks if task is not None and wanted.matches(task)]


def _likely(
    store: ScheduleStore, wanted: ScheduleFilter, members: Sequence[bytes]
) -> Operation[list[bytes]]:
    """Return the entries of an index that are worth reading in full.

    Whether schedules are active is asked first, where it matters: that is a small part of each, and
    the filter may match none of ten thousand.
    """
    found = list(members)
    if wanted.is_active is not None:
        flags = yield from steps(store.are_active)(ids_of(found))
        both = zip(found, flags, strict=True)
        found = [member for member, is_active in both if is_active == wanted.is_active]
    if wanted.is_of_words:
        titles = yield from steps(store.titles)(ids_of(found))
        named = zip(found, titles, strict=True)
        found = [member for member, title in named if wanted.may_match(member, title)]
    return found


def _parts(members: Sequence[bytes], limit: int) -> Iterator[Sequence[bytes]]:
    """Split entries into as many as a page may have, and some at least."""
    step = max(limit, LEAST_READ)
    return (members[i : i + step] for i in range(0, len(members), step))


def _decode_cursor(cursor: object, wanted: ScheduleFilter) -> bytes:
    member = decode_cursor(cursor, InvalidSchedule)
    first, last = wanted.bounds
    is_inside = first == b"-" or first[1:] <= member < last[1:]
    if b"\0" not in member or not _is_text(member) or not is_inside:
        raise bad_cursor(cursor, InvalidSchedule, " for this listing")
    return member


def _is_text(member: bytes) -> bool:
    """Return whether it is valid UTF-8; entries that others have written may not be."""
    try:
        member.decode()
    except UnicodeDecodeError:
        return False
    return True
