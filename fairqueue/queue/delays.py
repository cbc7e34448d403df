"""Bring the index of delayed tasks by user up to date, for those that older versions stored."""

import re
from contextlib import suppress

from fairqueue.errors import RedisRefused
from fairqueue.link.connection import Link

STEP = 250  # entries that one call looks at: about 2 ms of the server's time
MAX_STEPS = 40  # in one go; whoever comes next goes on from there
# What a walk through all could not put right is left alone for so long, by everybody: otherwise one
# record that cannot be read lets each heartbeat of each worker walk again.
REST_MS = 60_000

_REST = re.compile(rb"(-?[0-9]{1,15}) ([0-9]{1,16})")
_PLACE = re.compile(rb"(delayed|delayed_index) ([0-9]{1,20})")


def index_delayed(link: Link) -> bool:
    """See to it that delayed tasks are found by their users, as far as some bounded steps go.

    Versions before the index stored none, and one of them that still runs changes none. One round
    trip where nothing is amiss, which the numbers of entries tell, or nothing else than what could
    not be put right in the last minute. Where the user of the connection may only read, the index
    stays as it is. False if there is more to look at than was.
    """
    walks = 0  # that have ended; the first may have begun in the middle
    with suppress(RedisRefused):
        for _ in range(MAX_STEPS):
            if walks == 2 or _agree(link):
                return True
            walks += not _step(link)
        return False
    return True


def index_all(link: Link) -> None:
    """Bring every delayed task into the index, also where the numbers of entries agree.

    An older version can leave one entry too many and one too few, which cancel each other out.
    Where Redis takes no writes now, the index stays as it is.
    """
    cursor = None
    with suppress(RedisRefused):
        while cursor != 0:
            cursor, flat = link.ask(("ZSCAN", link.keys["delayed"], cursor or 0, "COUNT", STEP))[0]
            cursor = int(cursor)
            if flat:
                link.run("index_delayed", source="delayed", next="delayed 0", rest=flat[::2])


def _agree(link: Link) -> bool:
    keys = link.keys
    delayed, indexed, rest = link.ask(
        ("ZCARD", keys["delayed"]),
        ("ZCARD", keys["delayed_index"]),
        ("HGET", keys["fair"], "index_off"),
    )
    found = _REST.fullmatch(rest or b"")
    off = int(found[1]) if found and abs(link.now_ms() - int(found[2])) < REST_MS else 0
    return bool(delayed - indexed == off)


def _step(link: Link) -> bool:
    """Look at the next entries of what is delayed, then of the index; False after the last."""
    keys = link.keys
    found = _PLACE.fullmatch(link.ask(("HGET", keys["fair"], "index_from"))[0] or b"")
    source, cursor = (found[1].decode(), int(found[2])) if found else ("delayed", 0)
    cursor, flat = link.ask(("ZSCAN", keys[source], cursor, "COUNT", STEP))[0]
    following = f"{source} {int(cursor)}"
    if int(cursor) == 0:
        following = "delayed_index 0" if source == "delayed" else ""
    link.run("index_delayed", source=source, next=following, rest=flat[::2])
    return following != ""
