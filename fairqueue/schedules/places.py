"""Where schedules are in a queue with partitions: find them, and move them to that of their group.

A schedule is fired only by the partition of its group, its tenant or its user without one. A change
of the group is stored where the schedule is; then it moves in three steps. The first takes it out
of its partition and notes it whole under the key `moving`, the second stores it in the other
partition, and the third removes the note. Whoever meets a note goes on with the move: a call for
that schedule, or the leader of the partition.
"""

import inspect
import json
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from fairqueue.errors import BrokenRecord, ScheduleConflict, UnknownSchedule
from fairqueue.link.operation import Ask, At, Call, Gather, Operation
from fairqueue.link.partitions import partition_of
from fairqueue.logs import event_logger
from fairqueue.models import UNREADABLE, new_id
from fairqueue.queue import moving
from fairqueue.schedules.definition import read_definition
from fairqueue.schedules.fields import check_id
from fairqueue.schedules.plan import Plan

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")
Steps = Callable[Concatenate[S, P], Operation[T]]

_log = event_logger("fairqueue.control")

LOOKS = 2  # for a schedule that is not found, as it may be moving while all partitions are asked
MOVES_READ = 20  # unfinished moves of a partition in one round trip


def at_schedule(method: Steps[S, P, T]) -> Steps[S, P, T]:
    """The operation works in the partition of the schedule that `schedule_id` names.

    It is looked for again if it has left that partition meanwhile. An id that no partition has is
    for the home, which says so.
    """
    signature = inspect.signature(method)

    @wraps(method)
    def steps(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Operation[T]:
        if not self.link.parts:
            return (yield from method(self, *args, **kwargs))
        schedule_id = signature.bind_partial(self, *args, **kwargs).arguments.get("schedule_id")
        for _ in range(LOOKS):
            twin = yield from find_place(self, schedule_id)
            if twin is None:
                break
            try:
                result: T = yield At(twin.link, method(twin, *args, **kwargs))
            except UnknownSchedule:
                continue
            if result is not None and result is not False:
                return result
        home = self.at(self.link.parts[0])
        missing: T = yield At(home.link, method(home, *args, **kwargs))
        return missing

    steps.__partitions__ = "found"  # type: ignore[attr-defined]
    return steps


def find_place(store: S, schedule_id: Any) -> Operation[S | None]:
    """The store in the partition that has a schedule; None if none has.

    Goes on with moves of it that were interrupted. Raises InvalidSchedule for a bad id,
    ScheduleConflict if several partitions have it, and RedisUnavailable if one that may have it
    does not answer.
    """
    whole: Any = store
    check_id(schedule_id)
    found: list[Any] = []
    for _ in range(LOOKS):
        asked = [(part, _look(part, schedule_id)) for part in whole.link.parts]
        answers = yield Gather(asked, partial=True)
        known = [each for each in zip(whole.twins(), answers, strict=True) if _is_known(each[1])]
        found = [twin for twin, (is_here, _) in known if is_here]
        for twin, (_, record) in known:
            if record is not None:
                yield from _go_on(whole, twin.link, schedule_id, record)
        if len(found) == 1:
            break
    if len(found) > 1:
        raise ambiguous(schedule_id, [twin.link.keys.partition for twin in found])
    for answer in answers:
        if not found and isinstance(answer, Exception):
            raise answer
    return found[0] if found else None


def _is_known(answer: object) -> bool:
    return not isinstance(answer, Exception)


def _look(part: Any, schedule_id: str) -> Operation[tuple[bool, bytes | None]]:
    """Whether a partition has a schedule, and what it notes of it if it is on its way elsewhere."""
    is_here, record = yield Ask(
        ("HEXISTS", part.keys["schedules"], schedule_id),
        ("HGET", part.keys["moving"], schedule_id),
    )
    return bool(is_here), record


def settle(store: Any, schedule_id: str) -> Operation[bool]:
    """Move a schedule to the partition of its group, unless it is there; whether it was moved."""
    twin = yield from find_place(store, schedule_id)
    if twin is None:
        return False
    return (yield from settle_from(store, twin.link, schedule_id))


def settle_from(store: Any, part: Any, schedule_id: str) -> Operation[bool]:
    """As `settle`, for a schedule that is in the partition `part`.

    Raises BrokenRecord for one that cannot be read.
    """
    record = yield At(part, _leave(part, len(store.link.parts), schedule_id))
    if record is None:
        return False
    if record:
        yield from _go_on(store, part, schedule_id, record)
    return True


def _leave(part: Any, partitions: int, schedule_id: str) -> Operation[bytes | None]:
    """Take a schedule out, unless it belongs here; what is noted of it, None if nothing is."""
    text, plan = yield Ask(
        ("HGET", part.keys["schedules"], schedule_id), ("HGET", part.keys["plan"], schedule_id)
    )
    if text is None:
        return None
    definition = read_definition(schedule_id, text)
    to = partition_of(definition.user_id, definition.options["tenant"], partitions)
    if to == part.keys.partition:
        return None
    base = Plan.read(plan).base
    answer = yield Call("move_out", op=new_id(), id=schedule_id, base=base, to=to)
    # One that was changed meanwhile is settled by whoever changed it.
    return bytes(answer[1]) if answer[0] == b"moving" else None


def finish_moves(store: Any, part: Any) -> Operation[int]:
    """Go on with moves out of a partition that were interrupted, of tasks as well; how many."""
    ended = 0
    while True:
        (flat,) = yield At(
            part, _ask(("HRANDFIELD", part.keys["moving"], MOVES_READ, "WITHVALUES"))
        )
        for name, record in zip(flat[::2], flat[1::2], strict=True):
            if name.startswith(moving.TASKS):
                yield from moving.go_on(store.link.parts, part, name, record)
            else:
                yield from _go_on(store, part, name.decode(errors="replace"), record)
            ended += 1
        if len(flat) < 2 * MOVES_READ:
            return ended


def finish_all_moves(store: Any) -> Operation[None]:
    """Go on with all moves that were interrupted."""
    parts = store.link.parts
    waiting = yield Gather([(part, _ask(("HLEN", part.keys["moving"]))) for part in parts])
    for part, (count,) in zip(parts, waiting, strict=True):
        if count:
            yield from finish_moves(store, part)


def _ask(*commands: Any) -> Operation[list[Any]]:
    answers: list[Any] = yield Ask(*commands)
    return answers


def _go_on(store: Any, part: Any, schedule_id: str, record: bytes) -> Operation[None]:
    """Store a schedule that has left a partition in the other one, and end its move."""
    try:
        noted = json.loads(record.decode(errors="replace"))
        move, target = str(noted["move"]), store.link.parts[int(noted["to"])]
    except (*UNREADABLE, IndexError):
        raise BrokenRecord(
            f"the note of schedule {schedule_id!r}, which is moving to another partition, is "
            "unreadable"
        ) from None
    word = yield At(target, _call(Call("move_in", op=move, id=schedule_id, record=record)))
    yield At(part, _call(Call("end_move", op=new_id(), id=schedule_id, move=move)))
    _log(
        "schedule_moved",
        logging.DEBUG,
        schedule=schedule_id,
        partition=target.keys.partition,
        outcome=word.decode(),
    )


def _call(call: Call) -> Operation[Any]:
    return (yield call)


def ambiguous(schedule_id: str, partitions: list[int]) -> ScheduleConflict:
    """The error for an id that several partitions have."""
    return ScheduleConflict(
        f"schedule_id {schedule_id!r} was added to partitions "
        f"{' and '.join(map(str, partitions))} at the same time: remove_schedule removes both"
    )
