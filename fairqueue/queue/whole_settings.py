"""Change settings in all partitions of a queue, and let those that missed a change catch up."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from fairqueue.errors import RedisUnavailable
from fairqueue.link.operation import Argument, Ask, At, Call, Gather, Operation, operation
from fairqueue.link.partitions import whole
from fairqueue.models import UNREADABLE, new_id
from fairqueue.queue.base import QueueBase
from fairqueue.queue.waiting_room import of_queue, shared_out

T = TypeVar("T")

# The operation that has set limits in a partition, which set_limits.lua adds.
_SET_BY = re.compile(rb',"op":"[^"]*"\}\Z')

CHANGING = b"changing"  # the field of the mark; see lua/settings/mark_change.lua
# First bytes of the fields of limits that people set: of a key, and of names of tasks.
_BY_PEOPLE = frozenset(b"\x03") | frozenset(range(32, 256))


class WholeSettings(QueueBase):
    """The part of a queue that keeps the settings of all partitions alike."""

    def _change_all(self, change: Callable[[Any], Operation[T]]) -> Operation[T]:
        """Make a change in the home, then in all other partitions; the result of the home.

        It is made once the home has made it. A partition that does not answer catches up after its
        return: until then a mark in the home says so. Raises what the home raises.
        """
        if not self.link.parts:
            return (yield from change(self))
        home, *others = self.twins()
        mark = new_id()
        yield At(home.link, home._mark(mark, ""))
        result: T = yield At(home.link, change(home))
        answers = yield Gather([(twin.link, change(twin)) for twin in others], partial=True)
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        for error in errors:
            if not isinstance(error, RedisUnavailable):
                raise error
        # A partition where tasks have come meanwhile may have refused what the home accepted.
        if all(answer == result for answer in answers):
            yield At(home.link, home._mark("", mark))
        return result

    def _mark(self, mark: str, ended: str) -> Operation[bool]:
        return bool((yield from self._call(Call("mark_change", mark=mark, ended=ended))))

    @operation
    @whole
    def catch_up(self) -> Operation[bool]:
        """Compare all partitions with the home if a change may not have reached them all.

        Returns False if some partitions still have to catch up. The leader of the home calls it now
        and then.
        """
        if not self.link.parts:
            return True
        home, *others = self.twins()
        mark, settings, limits = yield At(home.link, home._read_settings(marked=True))
        if not mark:
            return True
        answers = yield Gather(
            [(twin.link, twin._follow(settings, limits)) for twin in others], partial=True
        )
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, RedisUnavailable):
                raise answer
        if not all(answer is True for answer in answers):
            return False
        is_over: bool = yield At(home.link, home._mark("", mark))
        return is_over

    def _read_settings(self, *, marked: bool = False) -> Operation[tuple[str, Any, Any]]:
        """The mark, the settings and the limits of this partition; nothing without a mark."""
        (mark,) = yield Ask(("HGET", self.keys["settings"], CHANGING))
        if marked and not mark:
            return "", {}, {}
        settings, limits = yield Ask(
            ("HGETALL", self.keys["settings"]), ("HGETALL", self.keys["limits"])
        )
        return (mark or b"").decode(), _pairs(settings), _pairs(limits)

    def _follow(
        self, settings: Mapping[bytes, bytes], limits: Mapping[bytes, bytes]
    ) -> Operation[bool]:
        """Make the settings and limits of this partition those of the home; False if it refuses."""
        _, own_settings, own_limits = yield from self._read_settings()
        rest: list[Argument] = []
        for name, value in of_queue(settings).items():
            if name != CHANGING and own_settings.get(name) != value:
                rest += (name, value)
        epoch = settings.get(b"waiting_epoch", b"")
        if epoch != own_settings.get(b"waiting_epoch", b""):
            number, most = self.keys.partition, int(settings.get(b"max_waiting", b"0"))
            rest += shared_out(most, len(self.link.whole.parts), number, epoch.decode())
        word = b""
        if rest:
            word = yield from self._call(Call("configure", op=new_id(), rest=rest))
        for field, text in _differences(limits, own_limits):
            yield from self._set_limits(field.decode(), text)
        return word != b"not_empty"

    def _set_limits(self, field: str, text: str) -> Operation[bool]:
        """Store limits, and let all held tasks that may start now come back.

        Returns False, with nothing changed, for one pattern too many.
        """
        after: str | bytes = ""
        while True:
            after = yield from self._call(
                Call("set_limits", op=new_id(), field=field, limits=text, after=after)
            )
            if not after or after == b"patterns":
                return not after


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _differences(
    limits: Mapping[bytes, bytes], own: Mapping[bytes, bytes]
) -> Iterator[tuple[bytes, str]]:
    """The limits of people that differ: field and text, '' for those that are gone."""
    for field in limits.keys() | own.keys():
        if not field or field[0] not in _BY_PEOPLE:
            continue
        wanted, found = _of_people(limits.get(field)), _of_people(own.get(field))
        if wanted != found:
            yield field, (wanted or b"").decode()


def _of_people(text: bytes | None) -> bytes | None:
    """The text of limits, without who set them in a partition; None if a worker declared them."""
    try:
        declared = text is not None and json.loads(text).get("by") == "worker"
    except UNREADABLE:
        declared = False
    return None if declared or text is None else _SET_BY.sub(b"}", text)
