"""Store schedules in Redis, and read them back."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Self

from fairqueue.clock import LATEST_MS, from_ms
from fairqueue.errors import (
    BrokenRecord,
    InvalidSchedule,
    ScheduleConflict,
    ScheduleQuota,
    StaleVersion,
    UnknownSchedule,
    kind_of,
    shown,
)
from fairqueue.link.connection import Link
from fairqueue.link.operation import Argument, Ask, At, Call, Now, Operation, operation, steps
from fairqueue.link.partitions import Partitioned, over_all, whole
from fairqueue.link.scripts import load_script
from fairqueue.models import UNREADABLE, Problem, ScheduledTask, new_id
from fairqueue.queue.base import QueueBase
from fairqueue.schedules.adding import Adding, in_use, over_quota, room_for
from fairqueue.schedules.changes import Change
from fairqueue.schedules.definition import (
    Definition,
    Stored,
    definition_text,
    read_definition,
    recurrence_of,
)
from fairqueue.schedules.fields import check_id, check_patch, check_spec
from fairqueue.schedules.places import at_schedule, finish_all_moves, settle
from fairqueue.schedules.plan import Plan
from fairqueue.schedules.state import are_active, number_in, read_state, title_in
from fairqueue.schedules.update import Update, anchored, first_fire, paused_note

# Schedules in one call. All or none means one script, which blocks the server for about 13 µs each:
# 0.13 s for the most. Callers that do not need all or none add ADDED_AT_ONCE in a call.
MAX_ADDED = 10_000
MAX_ADDED_BYTES = 16 * 1024 * 1024  # of their definitions
ADDED_AT_ONCE = 500  # about 5 ms
CLOCK_TRIES = 5  # to plan new schedules by the clock of Redis, if that jumps meanwhile
MAX_PROBLEMS = 1000
GAPS_CHECKED = 20  # the queue's min_interval is compared with this many gaps between fire times
SETTINGS_MS = 5000  # how long a setting of the queue is cached

_REVISION = re.compile(r"[!-~]{1,200}")

CheckTask = Callable[[str, Mapping[str, Any]], Operation[None]]
Specs = dict[str, dict[str, Any]]  # the fields of new schedules, by id


def _first_known(answers: list[list[Any]]) -> list[Any]:
    """What partitions have under ids: at most one of them has each."""
    found = zip(*answers, strict=True)
    return [next((each for each in entries if each is not None), None) for entries in found]


def _oldest_problems(answers: list[list[Problem]]) -> list[Problem]:
    found = sorted(chain(*answers), key=lambda problem: (problem.since, problem.schedule_id))
    return found[:MAX_PROBLEMS]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """A new schedule, packed for the script `add_schedules`."""

    revision: str
    fields: tuple[Argument, ...]


class ScheduleStore(Partitioned):
    """The schedules of one queue."""

    link: Link

    def __init__(
        self,
        link: Link,
        check_task: CheckTask | None = None,
        queue: QueueBase | None = None,
    ) -> None:
        """`check_task` gets the name and the payload of future tasks, and may raise.

        The server of `queue` is checked before anything is written.
        """
        self.link = link
        self.check_task = check_task or _accept
        self._queue = queue
        self._min_interval = (-SETTINGS_MS, 0)  # when it was read, and how many ms it is

    def _twin(self, part: Any) -> Self:
        twin = super()._twin(part)
        link, check_task = self.link, self.check_task
        twin.check_task = lambda name, payload: _at(link, check_task(name, payload))
        twin._queue = None if self._queue is None else self._queue.at(part)
        return twin

    def ready(self) -> Operation[None]:
        """Check the server, unless that was done before."""
        if self._queue is not None:
            yield from self._queue.ready()

    # --- changing ---------------------------------------------------------------------------------

    @operation
    @whole
    def add(self, given: Iterable[Mapping[str, Any]], on_conflict: str) -> Operation[list[str]]:
        """Store new schedules, all or none; return their ids.

        In a queue with partitions, what was stored is removed again if a partition refuses its
        part. Raises InvalidSchedule or a subclass for bad input, and ScheduleConflict for an id
        that is in use when `on_conflict` is "error".
        """
        checked = _check_specs(given, on_conflict)
        if not checked:
            return []
        if not self.link.parts:
            yield from self.ready()
        for fields in checked.values():
            yield from self.check_task(fields["name"], fields["payload"])
        if self.link.parts:
            yield from Adding(self, checked, on_conflict).run()
        else:
            yield from self.put(checked, on_conflict)
        return list(checked)

    def planned(self, checked: Specs) -> Operation[dict[str, NewRow]]:
        """What is to be stored of new schedules, planned from now on. Raises as `add`."""
        now_ms = yield Now()
        rows: dict[str, NewRow] = {}
        for schedule_id, given_fields in checked.items():
            fields = anchored(given_fields, now_ms)
            rows[schedule_id] = _new_row(schedule_id, fields, now_ms)
            yield from self._check_interval(schedule_id, fields, now_ms)
        _check_added_bytes(rows.values())
        return rows

    def put(
        self, checked: Specs, on_conflict: str, rows: dict[str, NewRow] | None = None
    ) -> Operation[dict[str, str]]:
        """Store new schedules in one step; return the revision of each. Raises as `add`.

        `rows` is what was planned a moment ago.
        """
        op = new_id()
        for _ in range(CLOCK_TRIES):
            if rows is None:
                rows = yield from self.planned(checked)
            answer = yield Call(
                "add_schedules",
                op=op,
                on_conflict=on_conflict,
                rest=[field for row in rows.values() for field in row.fields],
                client_now=(yield Now()),  # the planning may have taken a while
            )
            if answer[0] == b"exists":
                raise in_use(answer[1].decode())
            if answer[0] == b"quota":
                raise over_quota(answer[1].decode())
            if answer[0] == b"added":
                return {schedule_id: row.revision for schedule_id, row in rows.items()}
            self.link.learn_time(int(answer[1]))
            rows = None
        raise ScheduleConflict("the clock of Redis jumps repeatedly; nothing was stored")

    @operation
    @whole
    def update(
        self,
        schedule_id: str,
        changes: Mapping[str, Any],
        by: Change | None = None,
        revision: str | None = None,
    ) -> Operation[bool]:
        """Change some fields of a schedule; return False if there is none.

        Reads, changes and writes back only if no other client has written in between, else starts
        over: concurrent updates of different fields all take effect. With a `revision`, raises
        StaleVersion instead if the schedule has another one. A schedule whose group changes moves
        to the partition of the new one.
        """
        check_id(schedule_id)
        patch = check_patch(changes)
        _check_revision(schedule_id, revision)
        moves = bool(self.link.parts) and bool(patch.keys() & {"user_id", "tenant"})
        if moves:
            yield from self._check_room(schedule_id, patch)
        found = yield from self._update(schedule_id, patch, by or Change(), revision)
        if found and moves:
            yield from settle(self, schedule_id)
        return found

    def _check_room(self, schedule_id: str, patch: Mapping[str, Any]) -> Operation[None]:
        """Raise ScheduleQuota if the new user has no room for a schedule in another partition."""
        (stored,) = yield from steps(self.stored)([schedule_id])
        if stored is None:
            return
        before = stored.definition.fields
        after = {**before, **patch}
        old, new = (self.part_of(each["user_id"], each["tenant"]) for each in (before, after))
        if new is not old:
            yield At(new.link, room_for(new.link, {after["user_id"]: 1}))

    @at_schedule
    def _update(
        self, schedule_id: str, patch: dict[str, Any], by: Change, revision: str | None
    ) -> Operation[bool]:
        yield from self.ready()
        if "payload" in patch or "name" in patch:
            # Before the deadline runs, as it may take a while.
            stored = (yield from steps(self.stored)([schedule_id]))[0]
            if stored is not None:
                after = {**stored.definition.fields, **patch}
                yield from self.check_task(after["name"], after["payload"])
        deadline = time.monotonic() + self.link.timeout
        while time.monotonic() < deadline:
            word = yield from self._try_update(schedule_id, patch, by, revision)
            if word in (b"updated", b"absent"):
                return bool(word == b"updated")
        raise ScheduleConflict(
            f"schedule {schedule_id!r} was changed by others repeatedly; nothing was stored"
        )

    def _try_update(
        self, schedule_id: str, patch: dict[str, Any], by: Change, revision: str | None
    ) -> Operation[bytes]:
        keys = self.link.keys
        text, plan_text, state_text = yield Ask(
            *(("HGET", keys[key], schedule_id) for key in ("schedules", "plan", "schedule_state"))
        )
        if text is None:
            return b"absent"
        plan = Plan.read(plan_text)
        if revision is not None and plan.base != revision.encode():
            raise _stale(schedule_id)
        now_ms = yield Now()
        definition = read_definition(schedule_id, text)
        stored = Stored(definition=definition, state=read_state(state_text), plan=plan)
        update = Update(stored, patch, now_ms)
        if update.changes_rule:
            yield from self._check_interval(schedule_id, update.fields, now_ms)
        answer = yield update.call(text, by, (yield Now()))
        if answer[0] == b"skewed":
            self.link.learn_time(int(answer[1]))
        if answer[0] == b"quota":
            raise over_quota(answer[1].decode())
        return bytes(answer[0])

    @operation
    @whole
    def remove(self, schedule_id: str, revision: str | None = None) -> Operation[bool]:
        """Remove a schedule; return False if there is none.

        With a `revision`, raises StaleVersion if the schedule has another one. Without, it is
        removed from all partitions that have its id.
        """
        check_id(schedule_id)
        _check_revision(schedule_id, revision)
        if revision is not None:
            return (yield from self._remove(schedule_id, revision))
        if self.link.parts:
            yield from finish_all_moves(self)
        return (yield from self._remove_all(schedule_id))

    @over_all(any, strict=True)
    def _remove_all(self, schedule_id: str) -> Operation[bool]:
        return (yield from self._remove_here(schedule_id, ""))

    @at_schedule
    def _remove(self, schedule_id: str, revision: str) -> Operation[bool]:
        return (yield from self._remove_here(schedule_id, revision))

    def _remove_here(self, schedule_id: str, revision: str) -> Operation[bool]:
        yield from self.ready()
        word = yield Call("remove_schedule", op=new_id(), id=schedule_id, revision=revision)
        if word == b"stale":
            raise _stale(schedule_id)
        return bool(word == b"removed")

    def _check_interval(
        self, schedule_id: str, fields: Mapping[str, Any], now_ms: int
    ) -> Operation[None]:
        """Raise ScheduleQuota for a rule that fires more often than the queue allows."""
        read_ms, least_ms = self._min_interval
        if abs(now_ms - read_ms) >= SETTINGS_MS:
            text = (yield Ask(("HGET", self.link.keys["settings"], "min_interval_ms")))[0] or b""
            least_ms = int(text) if text.isdigit() else 0
            self._min_interval = (now_ms, least_ms)
        if not least_ms:
            return
        recurrence = recurrence_of(schedule_id, fields["timezone"], fields)
        for before, after in pairwise(recurrence.between(now_ms + 1, LATEST_MS, GAPS_CHECKED + 1)):
            if after - before < least_ms:
                raise ScheduleQuota(
                    f"schedule {schedule_id!r} would run at {from_ms(before).isoformat()} and "
                    f"{from_ms(after).isoformat()}, but the queue's min_interval is "
                    f"{least_ms / 1000:g} seconds; nothing was stored"
                )

    # --- looking ----------------------------------------------------------------------------------

    @operation
    @at_schedule
    def get(self, schedule_id: str) -> Operation[ScheduledTask | None]:
        """Return a schedule, or None. Raises BrokenRecord if it cannot be read."""
        check_id(schedule_id)
        return (yield from self._read([schedule_id]))[0]

    @operation
    @over_all(_first_known)
    def read(self, ids: Sequence[str]) -> Operation[list[ScheduledTask | None]]:
        """Return schedules by id, in order; None for each that is gone or cannot be read."""
        return (yield from self._read(ids, skip_broken=True))

    def _read(
        self, ids: Sequence[str], skip_broken: bool = False
    ) -> Operation[list[ScheduledTask | None]]:
        tasks: list[ScheduledTask | None] = []
        for schedule_id, *texts in (yield from self._texts(ids)):
            try:
                stored = _stored(schedule_id, *texts)
                tasks.append(None if stored is None else stored.to_task())
            except BrokenRecord:
                if not skip_broken:
                    raise
                tasks.append(None)
        return tasks

    @operation
    @over_all(_first_known)
    def stored(self, ids: Sequence[str]) -> Operation[list[Stored | None]]:
        """As `read`, with definition, state and plan as they are stored."""
        found: list[Stored | None] = []
        for each in (yield from self._texts(ids)):
            try:
                found.append(_stored(*each))
            except BrokenRecord:
                found.append(None)
        return found

    @operation
    @at_schedule
    def find(self, schedule_id: str) -> Operation[Stored]:
        """Return a schedule. Raises UnknownSchedule, BrokenRecord or InvalidSchedule."""
        check_id(schedule_id)
        ((_, *texts),) = yield from self._texts([schedule_id])
        stored = _stored(schedule_id, *texts)
        if stored is None:
            raise UnknownSchedule(f"there is no schedule {schedule_id!r}")
        return stored

    def _texts(self, ids: Sequence[str]) -> Operation[list[tuple[Any, ...]]]:
        """Return for each id what is stored: id, definition, plan and state."""
        if not ids:
            return []
        keys = [self.link.keys[name] for name in ("schedules", "plan", "schedule_state")]
        commands: list[Sequence[Argument]] = [("HMGET", key, *ids) for key in keys]
        answers = yield Ask(*commands)
        return list(zip(ids, *answers, strict=True))

    @operation
    @over_all(lambda answers: [any(flags) for flags in zip(*answers, strict=True)])
    def are_active(self, ids: Sequence[str]) -> Operation[list[bool]]:
        """Return whether each of these is active; False for those that are gone."""
        return are_active((yield from self._states(ids)))

    @operation
    @over_all(lambda answers: [max(titles) for titles in zip(*answers, strict=True)])
    def titles(self, ids: Sequence[str]) -> Operation[list[str]]:
        """Return the title of each; '' for those that have none, or are gone."""
        return [title_in(state or b"") for state in (yield from self._states(ids))]

    def _states(self, ids: Sequence[str]) -> Operation[list[bytes | None]]:
        if not ids:
            return []
        states: list[bytes | None]
        (states,) = yield Ask(("HMGET", self.link.keys["schedule_state"], *ids))
        return states

    def paused_note(self, definition: Definition, now_ms: int) -> Operation[str]:
        """Return the note of the fire times that passed while a schedule was paused until now.

        Raises BrokenRecord if it was not.
        """
        (text,) = yield from self._states([definition.schedule_id])
        stored = Stored(definition=definition, state=read_state(text), plan=Plan(b""))
        if number_in(stored.state, "until") is None:
            raise BrokenRecord(f"schedule {definition.schedule_id!r} is due but has no plan")
        return paused_note(stored, now_ms)

    @operation
    @over_all(_oldest_problems)
    def problems(self) -> Operation[list[Problem]]:
        """Return the schedules that cannot run, with the reasons; at most a thousand."""
        found: dict[bytes, Problem] = {}
        cursor: Argument = 0
        while len(found) < MAX_PROBLEMS:
            ((cursor, flat),) = yield Ask(("HSCAN", self.link.keys["broken"], cursor))
            for name, text in zip(flat[::2], flat[1::2], strict=True):
                found[name] = read_problem(name, text)
            if cursor == b"0":
                break
        return _oldest_problems([list(found.values())])


def _accept(name: str, payload: Mapping[str, Any]) -> Operation[None]:
    """Accept every task."""
    yield from ()


def _at(link: Link, steps_: Operation[None]) -> Operation[None]:
    yield At(link, steps_)


def check_list(given: object, what: str) -> list[Mapping[str, Any]]:
    """Return several schedules as a list. Raises InvalidSchedule for anything but an iterable."""
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidSchedule(f"{what} must be a list of dicts, one for each, not {kind_of(given)}")
    return list(given)


def check_new(spec: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the id and the stored form of the fields of a new schedule, with its rule checked."""
    schedule_id, fields = check_spec(spec)
    recurrence_of(schedule_id, fields["timezone"], fields)
    return schedule_id, fields


def _check_specs(given: object, on_conflict: object) -> Specs:
    """Return the fields of new schedules by id."""
    if on_conflict not in ("error", "replace"):
        raise InvalidSchedule(f"on_conflict must be 'error' or 'replace', not {shown(on_conflict)}")
    specs = check_list(given, "schedules")
    if len(specs) > MAX_ADDED:
        raise InvalidSchedule(f"at most {MAX_ADDED} schedules fit in one call, not {len(specs)}")
    checked = [check_new(spec) for spec in specs]
    if len(dict(checked)) != len(checked):
        twice = Counter(schedule_id for schedule_id, _ in checked).most_common(1)[0][0]
        raise InvalidSchedule(f"schedule_id {twice!r} is given twice in one call")
    return dict(checked)


def _new_row(schedule_id: str, fields: dict[str, Any], now_ms: int) -> NewRow:
    """Pack a new schedule for the script `add_schedules`."""
    by, revision = fields["created_by"], Plan.new_revision()
    text = definition_text(fields, created_by=by, created_ms=now_ms, updated_ms=now_ms)
    next_ms, due = first_fire(schedule_id, fields, now_ms)
    is_active = fields["is_active"]
    row = load_script("add_schedules").row(
        id=schedule_id,
        user=fields["user_id"],
        name=fields["name"],
        definition=text,
        revision=revision,
        next_ms=next_ms if is_active else "",
        due_ms=due if is_active else "",
        tenant=fields["tenant"] or "",
        title=fields["title"] or "",
        change=Change(by=by).made_text(fields),
    )
    return NewRow(revision=revision, fields=row)


def _check_added_bytes(rows: Iterable[NewRow]) -> None:
    size = sum(len(field) for row in rows for field in row.fields if isinstance(field, str))
    if size > MAX_ADDED_BYTES:
        raise InvalidSchedule(
            f"the schedules of one call have {size:,} bytes, and at most {MAX_ADDED_BYTES:,} are "
            "stored at once: add them in several calls"
        )


def _check_revision(schedule_id: str, revision: object) -> None:
    """Raise StaleVersion for a revision that no schedule has; '' would mean that none is given."""
    if revision is not None and not isinstance(revision, str):
        raise InvalidSchedule(f"revision must be a string, not {shown(revision):.80}")
    if revision is not None and not _REVISION.fullmatch(revision):
        raise _stale(schedule_id)


def _stale(schedule_id: str) -> StaleVersion:
    return StaleVersion(
        f"schedule {schedule_id!r} was changed since you read it: read it again, then change it"
    )


def _stored(
    schedule_id: str, text: bytes | None, plan: bytes | None, state: bytes | None
) -> Stored | None:
    if text is None:
        return None
    return Stored(
        definition=read_definition(schedule_id, text), state=read_state(state), plan=Plan.read(plan)
    )


def read_problem(name: bytes, text: bytes) -> Problem:
    """Read the record of a schedule that cannot run."""
    schedule_id = name.decode(errors="backslashreplace")
    try:
        record = json.loads(text)
        return Problem(
            schedule_id=schedule_id,
            reason=str(record["reason"]),
            since=from_ms(int(record["since"])),
        )
    except UNREADABLE:
        return Problem(
            schedule_id=schedule_id,
            reason=f"the record of the problem is unreadable: {text[:200]!r}",
            since=from_ms(0),
        )
