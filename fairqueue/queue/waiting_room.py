"""Share `max_waiting` of a queue among its partitions, and move room to where it is needed."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fairqueue.errors import RedisUnavailable
from fairqueue.link.operation import Argument, Ask, At, Call, Gather, Operation
from fairqueue.models import new_id

PREFIX = "waiting_"  # of the fields of `settings` that are of one partition
LEAST_MOVED = 100  # tasks, so that room is rarely moved
_GIFT = re.compile(rb"(\d+) (\d+) (\S+)")


class _Room(NamedTuple):
    """What a partition says: how many tasks may wait there, how many do, and its pending gift."""

    number: int
    room: int
    used: int
    epoch: str
    gift: bytes

    @property
    def spare(self) -> int:
        return max(0, self.room - self.used)


def shared_out(max_waiting: int, partitions: int, number: int, epoch: str) -> list[Argument]:
    """The settings of a partition when `max_waiting` is shared out evenly, as names and values."""
    room = max_waiting // partitions + (number < max_waiting % partitions)
    return ["waiting_room", room, "waiting_epoch", epoch, "waiting_gift", ""]


def of_queue(settings: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The settings that all partitions have alike."""
    prefix = PREFIX.encode()
    return {name: value for name, value in settings.items() if not name.startswith(prefix)}


def make_room(link: Any, needed: int) -> Operation[bool]:
    """Move room for `needed` tasks to the partition of a link, if others have some to spare.

    Returns whether any came. At any time, the rooms of all partitions are at most max_waiting
    together, whoever dies on the way: room that was given up and did not arrive is found, and
    delivered, by the next call.
    """
    parts = link.whole.parts
    if not parts:
        return False
    rooms = yield from _rooms(parts)
    came = False
    for each in rooms:
        if each.gift:
            came = (yield from _deliver(parts, each)) == link.keys.partition or came
    own = next((each for each in rooms if each.number == link.keys.partition), None)
    if own is None:
        return False
    others = sorted(
        (each for each in rooms if each is not own and not each.gift and each.epoch == own.epoch),
        key=lambda each: -each.spare,
    )
    wanted = max(needed, min(LEAST_MOVED, sum(each.spare for each in others) // 2))
    for each in others:
        if wanted <= 0 or each.spare == 0:
            break
        # A part of what it has to spare, unless that is too little.
        count = min(wanted, max(each.spare // 2, min(each.spare, needed)))
        gift = new_id()
        given = yield At(
            parts[each.number],
            _share("give", each.epoch, own.number, count, gift),
        )
        if given:
            text = f"{own.number} {given} {gift}".encode()
            yield from _deliver(parts, each._replace(gift=text))
            came, wanted = True, wanted - given
    return came


def _deliver(parts: Sequence[Any], giver: _Room) -> Operation[int | None]:
    """Deliver the gift of a partition, and let it forget that; the number of who got it."""
    found = _GIFT.fullmatch(giver.gift)
    if found is None or int(found[1]) >= len(parts):
        return None
    to, count, gift = int(found[1]), int(found[2]), found[3].decode()
    yield At(parts[to], _share("take", giver.epoch, giver.number, count, gift))
    yield At(parts[giver.number], _share("given", giver.epoch, to, count, gift))
    return to


def _rooms(parts: Sequence[Any]) -> Operation[list[_Room]]:
    answers = yield Gather([(part, _read_room(part)) for part in parts], partial=True)
    for answer in answers:
        if isinstance(answer, Exception) and not isinstance(answer, RedisUnavailable):
            raise answer
    return [answer for answer in answers if isinstance(answer, _Room)]


def _read_room(link: Any) -> Operation[_Room | None]:
    keys = link.keys
    (room, epoch, gift), *counts = yield Ask(
        ("HMGET", keys["settings"], "waiting_room", "waiting_epoch", "waiting_gift"),
        *(("ZCARD", keys[name]) for name in ("backlog", "held", "delayed")),
    )
    if room is None or not room.isdigit():
        return None
    return _Room(keys.partition, int(room), sum(counts), (epoch or b"").decode(), gift or b"")


def _share(what: str, epoch: str, other: int, count: int, gift: str) -> Operation[int]:
    call = Call(
        "share_room", op=new_id(), what=what, epoch=epoch, other=other, count=count, gift=gift
    )
    return int((yield call))
