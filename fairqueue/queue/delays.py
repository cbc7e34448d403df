"""Bring the index of delayed tasks by user up to date, for those that older versions stored."""

import re
from contextlib import suppress

from fairqueue.errors import RedisRefused
from fairqueue.link.connection import Link
from fairqueue.link.operation import Ask, Call, Now, Operation, operation
from fairqueue.link.partitions import Partitioned, over_all

STEP = 250  # entries that one call looks at: about 2 ms of server time
MAX_STEPS = 40  # in one call; the next call goes on from there
# Entries that a complete pass could not repair are left alone for this long, by everybody:
# otherwise one unreadable record would make each heartbeat of each worker start another pass.
REST_MS = 60_000

_REST = re.compile(rb"(-?[0-9]{1,15}) ([0-9]{1,16})")
_PLACE = re.compile(rb"(delayed|delayed_index) ([0-9]{1,20})")


class DelayIndex(Partitioned):
    """The index of delayed tasks by user."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @operation
    @over_all(all)
    def update(self) -> Operation[bool]:
        """Bring the index up to date, in a bounded number of steps.

        Versions before the index wrote no entries, and do not update them while they still run.
        Takes one round trip when the counts of entries agree, or differ only by what could not be
        repaired in the last minute. Where the connection may only read, the index stays as it is.
        Returns False if entries are left to examine.
        """
        passes = 0  # complete ones; the first may have begun in the middle
        with suppress(RedisRefused):
            for _ in range(MAX_STEPS):
                if passes == 2 or (yield from self._agrees()):
                    return True
                passes += not (yield from self._step())
            return False
        return True

    @operation
    @over_all(lambda _: None, strict=True)
    def rebuild(self) -> Operation[None]:
        """Bring every delayed task into the index, also where the counts of entries agree.

        An older version can leave one entry too many and one too few, so that the counts still
        agree. Where Redis accepts no writes now, the index stays as it is.
        """
        cursor = None
        with suppress(RedisRefused):
            while cursor != 0:
                delayed = self.link.keys["delayed"]
                cursor, flat = (yield Ask(("ZSCAN", delayed, cursor or 0, "COUNT", STEP)))[0]
                cursor = int(cursor)
                if flat:
                    yield Call("index_delayed", source="delayed", next="delayed 0", rest=flat[::2])

    def _agrees(self) -> Operation[bool]:
        keys = self.link.keys
        delayed, indexed, rest = yield Ask(
            ("ZCARD", keys["delayed"]),
            ("ZCARD", keys["delayed_index"]),
            ("HGET", keys["fair"], "index_off"),
        )
        found = _REST.fullmatch(rest or b"")
        now_ms = yield Now()
        off = int(found[1]) if found and abs(now_ms - int(found[2])) < REST_MS else 0
        return bool(delayed - indexed == off)

    def _step(self) -> Operation[bool]:
        """Examine the next delayed tasks, then entries of the index; False after the last."""
        keys = self.link.keys
        found = _PLACE.fullmatch((yield Ask(("HGET", keys["fair"], "index_from")))[0] or b"")
        source, cursor = (found[1].decode(), int(found[2])) if found else ("delayed", 0)
        cursor, flat = (yield Ask(("ZSCAN", keys[source], cursor, "COUNT", STEP)))[0]
        following = f"{source} {int(cursor)}"
        if int(cursor) == 0:
            following = "delayed_index 0" if source == "delayed" else ""
        yield Call("index_delayed", source=source, next=following, rest=flat[::2])
        return following != ""
