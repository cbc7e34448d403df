"""Examine what the partitions of a queue have to agree on: who lives where, and the settings."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from fairqueue.doctor.findings import BATCH, PROBLEM, WARNING, Finding
from fairqueue.errors import plural
from fairqueue.link.connection import Link
from fairqueue.link.keys import KEY_TYPES
from fairqueue.link.operation import Ask, Operation
from fairqueue.link.owners import Owner
from fairqueue.link.partitions import Partitioned, everywhere_numbered, partition_of
from fairqueue.models import UNREADABLE
from fairqueue.queue.waiting_room import PREFIX

EXAMPLES = 5  # of users and tenants in a wrong partition
MOST_WRONG = 10_000  # of them that are counted


def _owner(member: str) -> Owner:
    """The user or tenant of an entry that begins with a seat or an owner."""
    return Owner.of_key(member.partition("\0")[0].partition("\x03")[0])


def _tenant(member: str) -> Owner:
    return Owner.whole(member.partition("\0")[0])


# Structure -> whom an entry of it belongs to.
_OWNERS: dict[str, Callable[[str], Owner]] = {
    "backlog": _owner,
    "held": _owner,
    "delayed_index": _owner,
    "running": _owner,
    "users": _owner,
    "tenant_users": _tenant,
    "tenant_schedules": _tenant,
}


class Groups(Partitioned):
    """Compares the partitions of a queue with each other."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def findings(self) -> Operation[list[Finding]]:
        """Return a finding for each partition with strangers, and one if settings differ."""
        count, found = len(self.link.parts), []
        parts = yield from everywhere_numbered(self, lambda twin: twin._strangers(count))
        for number, strangers in parts:
            if strangers:
                found.append(_misplaced(strangers).of_partition(number))
        settings = yield from everywhere_numbered(self, lambda twin: twin._settings())
        return [*found, *_differing(settings)]

    def _strangers(self, count: int) -> Operation[dict[str, int]]:
        """Return users and tenants that belong elsewhere, with the numbers of their partitions."""
        found: dict[str, int] = {}
        for name, owner_of in _OWNERS.items():
            cursor = -1
            while cursor and len(found) < MOST_WRONG:
                cursor, entries = yield from self._page(name, max(0, cursor))
                for entry in entries:
                    owner = owner_of(entry.decode("utf-8", "replace"))
                    right = partition_of(owner.user_id, owner.tenant, count)
                    if right != self.link.keys.partition:
                        found[str(owner)] = right
        return found

    def _page(self, name: str, cursor: int) -> Operation[tuple[int, list[bytes]]]:
        command = "HSCAN" if KEY_TYPES[name] == "hash" else "ZSCAN"
        key = self.link.keys[name]
        following, flat = (yield Ask((command, key, cursor, "COUNT", BATCH)))[0]
        return int(following), flat[::2]

    def _settings(self) -> Operation[dict[str, Any]]:
        """Return the settings of the queue and the limits that operators have set."""
        keys = self.link.keys
        settings, limits = yield Ask(("HGETALL", keys["settings"]), ("HGETALL", keys["limits"]))
        found: dict[str, Any] = {
            name: value.decode() for name, value in _pairs(settings) if not name.startswith(PREFIX)
        }
        for name, value in _pairs(limits):
            try:
                read = json.loads(value)
            except UNREADABLE:
                continue  # the prefixes of patterns
            # What workers declare reaches each partition with their next start.
            if isinstance(read, dict) and (name[:1] == "\x03" or read.get("by") == "operator"):
                read.pop("op", None)  # the call that stored it: another one in each partition
                found[f"limits of {name.removeprefix(chr(3))}"] = read
        return found


def _pairs(flat: list[bytes]) -> Iterator[tuple[str, bytes]]:
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        yield name.decode("utf-8", "replace"), value


def _misplaced(strangers: dict[str, int]) -> Finding:
    first, right = next(iter(strangers.items()))
    many = plural(len(strangers), "user or tenant belongs", "users and tenants belong")
    details = {"wrong": len(strangers), "examples": dict([*strangers.items()][:EXAMPLES])}
    text = f"{many} to other partitions, such as {first} to {right}"
    return Finding("partitions: groups", PROBLEM, text, details)


def _differing(parts: list[tuple[int, dict[str, Any]]]) -> Iterator[Finding]:
    """Say which settings are not alike: a change of them did not reach all partitions."""
    names = sorted({name for _, settings in parts for name in settings})
    for name in names:
        values = {number: settings.get(name) for number, settings in parts}
        first, usual = next(iter(values.items()))
        others = [number for number, value in values.items() if value != usual]
        if others:
            text = (
                f"{name} is {usual} in partition {first} and {values[others[0]]} in partition "
                f"{others[0]}: set it again, a change did not reach all of them"
            )
            details = {"setting": name, "values": values}
            yield Finding("partitions: settings", WARNING, text, details)
