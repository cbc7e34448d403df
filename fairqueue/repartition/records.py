"""Records on their way from one queue to another, and the partition for each of them."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fairqueue.link.partitions import partition_of

TASK, SCHEDULE, COUNTERS = "t", "s", "c"  # the first letter of the name of a record

# Places of the parts of a task, and of a schedule; see lua/lib/set_aside_tasks.lua and
# lua/maintenance/take_schedules.lua.
_TASK_PLACE, _TASK_STATUS = 1, 4
_DEFINITION, _STATE, _USER = 1, 4, 6


@dataclass(frozen=True)
class MovingRecord:
    """A record that was set aside in one queue and is to be stored in another one."""

    name: bytes
    text: bytes

    @property
    def kind(self) -> str:
        """TASK, SCHEDULE or COUNTERS."""
        return chr(self.name[0])

    @property
    def id(self) -> str:
        """The id of the task or the schedule."""
        return self.name[1:].decode("utf-8", "surrogateescape")

    @cached_property
    def parts(self) -> list[bytes]:
        """What it consists of."""
        return netstrings_in(self.text)

    @property
    def place(self) -> str:
        """What is counted: `waiting`, `delayed`, `dead`, `ended` or `schedules`."""
        return self.parts[_TASK_PLACE].decode() if self.kind == TASK else "schedules"

    def partition(self, partitions: int) -> int:
        """The partition that it belongs to; the home for counters."""
        if self.kind == COUNTERS:
            return 0
        if self.kind == TASK:
            status = _json(self.parts[_TASK_STATUS])
            # Tasks of versions before layout 2 name a tenant without belonging to a group.
            return partition_of(
                status.get("user"), status.get("group") or status.get("tenant"), partitions
            )
        state, definition = _json(self.parts[_STATE]), _json(self.parts[_DEFINITION])
        if "user_id" in definition:
            return partition_of(definition["user_id"], definition.get("tenant"), partitions)
        user = self.parts[_USER].decode("utf-8", "replace")  # it is broken
        return partition_of(state.get("user", user), state.get("tenant"), partitions)


def _json(text: bytes) -> dict[str, Any]:
    """A JSON object; empty if it cannot be read."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def netstrings_in(text: bytes) -> list[bytes]:
    """The parts of a text of netstrings: each has its length and a colon before it."""
    parts, place = [], 0
    while place < len(text):
        colon = text.index(b":", place)
        end = colon + 1 + int(text[place:colon])
        parts.append(text[colon + 1 : end])
        place = end
    return parts
