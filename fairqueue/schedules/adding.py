"""Add schedules to a queue with partitions: each to that of its group, and each id only once.

A partition stores its part in one step, and checks that its ids are new. No step spans partitions,
so an id is looked for in all of them before and after: of two calls that add an id to two
partitions at the same time, at least one sees the other afterwards. That one removes what it has
stored and raises ScheduleConflict. So an id that was added, and that a call has returned, stays.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fairqueue.errors import ScheduleConflict, ScheduleQuota
from fairqueue.link.operation import Ask, Call, Gather, Operation, Together
from fairqueue.link.partitions import everywhere, partition_of
from fairqueue.models import new_id
from fairqueue.schedules.places import LOOKS, ambiguous, finish_moves, settle_from

if TYPE_CHECKING:
    from fairqueue.schedules.store import ScheduleStore, Specs

REMOVED_AT_ONCE = 100  # schedules in one round trip, when what was stored is removed again

Found = Mapping[int, set[str]]  # partition -> ids that are in use there


class Adding:
    """One call that adds schedules, given as fields by id, to several partitions."""

    def __init__(self, store: "ScheduleStore", checked: "Specs", on_conflict: str) -> None:
        self._store = store
        self._checked = checked
        self._on_conflict = on_conflict
        self._target = {
            schedule_id: partition_of(fields["user_id"], fields["tenant"], len(store.link.parts))
            for schedule_id, fields in checked.items()
        }

    def run(self) -> Operation[None]:
        """Store all, or raise as `ScheduleStore.add`.

        An id that another partition has is replaced there, then moved. If a partition refuses its
        part, or does not answer, those that this call has added to the others are removed again;
        those that it has replaced stay replaced.
        """
        before = yield from self._find()
        places = self._places(before)
        parts: defaultdict[int, Any] = defaultdict(dict)
        for schedule_id, fields in self._checked.items():
            parts[places[schedule_id]][schedule_id] = fields
        yield from self._check_quotas(before)
        stored = yield from self._store_all(parts, before)
        yield from self._verify(stored, before)
        for schedule_id, number in places.items():
            if number != self._target[schedule_id]:
                yield from settle_from(self._store, self._store.link.parts[number], schedule_id)

    def _find(self) -> Operation[Found]:
        """Which partitions have which of the ids, after all interrupted moves have ended."""
        ids = list(self._checked)

        def look(twin: "ScheduleStore") -> Operation[tuple[set[str], int]]:
            keys = twin.link.keys
            plans, moving = yield Ask(("HMGET", keys["plan"], *ids), ("HLEN", keys["moving"]))
            planned = [each for each, plan in zip(ids, plans, strict=True) if plan is not None]
            if not planned:
                return set(), moving
            # A plan whose definition was lost is none: its id can be used again.
            there = yield Ask(*(("HEXISTS", keys["schedules"], each) for each in planned))
            return {each for each, is_there in zip(planned, there, strict=True) if is_there}, moving

        while True:
            answers = yield from everywhere(self._store, look, strict=True)
            busy = [number for number, (_, moving) in enumerate(answers) if moving]
            if not busy:
                return {number: found for number, (found, _) in enumerate(answers)}
            for number in busy:
                yield from finish_moves(self._store, self._store.link.parts[number])

    def _places(self, before: Found) -> dict[str, int]:
        """The partition in which each is stored first: the one that has the id, if there is one."""
        places = dict(self._target)
        had: defaultdict[str, list[int]] = defaultdict(list)
        for number, found in before.items():
            for schedule_id in found:
                had[schedule_id].append(number)
        for schedule_id, numbers in had.items():
            if self._on_conflict == "error":
                raise in_use(schedule_id)
            if len(numbers) > 1:
                raise ambiguous(schedule_id, numbers)
            places[schedule_id] = numbers[0]
        return places

    def _check_quotas(self, before: Found) -> Operation[None]:
        """Refuse too many schedules of a user before any are stored.

        Each partition checks it again for those that are new there.
        """
        users: defaultdict[int, Counter[str]] = defaultdict(Counter)
        for schedule_id, fields in self._checked.items():
            target = self._target[schedule_id]
            users[target][fields["user_id"]] += schedule_id not in before[target]
        parts = self._store.link.parts
        asked = [(parts[number], room_for(parts[number], more)) for number, more in users.items()]
        yield Gather(asked)

    def _store_all(
        self, parts: Mapping[int, "Specs"], before: Found
    ) -> Operation[dict[int, dict[str, str]]]:
        """Store the part of each partition; the revisions by partition and id."""
        twins = {number: self._store.at(self._store.link.parts[number]) for number in parts}

        def ready(twin: "ScheduleStore", specs: "Specs") -> Operation[Any]:
            yield from twin.ready()
            return (yield from twin.planned(specs))

        planned = yield Gather([(twins[i].link, ready(twins[i], parts[i])) for i in parts])
        puts = [
            (twins[i].link, twins[i].put(parts[i], self._on_conflict, rows))
            for i, rows in zip(parts, planned, strict=True)
        ]
        results = yield Gather(puts, partial=True)
        stored = {
            number: result
            for number, result in zip(parts, results, strict=True)
            if not isinstance(result, Exception)
        }
        for result in results:
            if isinstance(result, Exception):
                yield from self._undo(stored, before)
                raise result
        return stored

    def _verify(self, stored: Mapping[int, Mapping[str, str]], before: Found) -> Operation[None]:
        """Find out whether another call has added one of the ids elsewhere meanwhile."""
        for _ in range(LOOKS):  # one that is moving meanwhile may be seen twice
            after = yield from self._find()
            times = Counter(schedule_id for found in after.values() for schedule_id in found)
            twice = [schedule_id for schedule_id, count in times.items() if count > 1]
            if not twice:
                return
        yield from self._undo(stored, before)
        raise in_use(twice[0])

    def _undo(self, stored: Mapping[int, Mapping[str, str]], before: Found) -> Operation[None]:
        """Remove what this call has added, unless others have changed it meanwhile."""
        removed = []
        for number, revisions in stored.items():
            new = {each: revisions[each] for each in revisions if each not in before[number]}
            part = self._store.link.parts[number]
            removed.append((part, _remove(new)))
        yield Gather(removed, partial=True)


def _remove(revisions: Mapping[str, str]) -> Operation[None]:
    """Remove schedules that have these revisions."""
    calls = [
        Call("remove_schedule", op=new_id(), id=schedule_id, revision=revision)
        for schedule_id, revision in revisions.items()
    ]
    for start in range(0, len(calls), REMOVED_AT_ONCE):
        yield Together(*calls[start : start + REMOVED_AT_ONCE])


def room_for(part: Any, more: Mapping[str, int]) -> Operation[None]:
    """Raise ScheduleQuota if a partition has no room for this many more schedules of users."""
    added = {user: count for user, count in more.items() if count}
    index = part.keys["schedule_index"]
    text, *counts = yield Ask(
        ("HGET", part.keys["settings"], "max_schedules"),
        *(("ZLEXCOUNT", index, f"[{user}\0", f"({user}\1") for user in added),
    )
    most = int(text) if text and text.isdigit() else 0
    for (user, count), there in zip(added.items(), counts, strict=True):
        if most and there + count > most:
            raise over_quota(user)


def in_use(schedule_id: str) -> ScheduleConflict:
    """The error for an id that another schedule has."""
    return ScheduleConflict(
        f"schedule_id {schedule_id!r} is in use, and nothing was stored: choose another id, or "
        "update the schedule that has it"
    )


def over_quota(user_id: str) -> ScheduleQuota:
    """The error for a user who has as many schedules as max_schedules allows."""
    return ScheduleQuota(
        f"user {user_id!r} would have more schedules than max_schedules allows; nothing was stored"
    )
