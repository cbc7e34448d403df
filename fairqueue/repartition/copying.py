"""Copy settings, credentials and similar records; what the new queue has already is kept."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from fairqueue.link.connection import Link
from fairqueue.link.driver import in_batches
from fairqueue.link.keys import KEY_TYPES
from fairqueue.link.operation import Argument
from fairqueue.link.owners import Owner
from fairqueue.link.partitions import jump_hash
from fairqueue.link.scripts import load_script
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.waiting_room import PREFIX
from fairqueue.repartition.counting import PAGE, links_of

Row = tuple[str, bytes, bytes]  # key, field or member, value or score

EVERYWHERE = -1  # the place of records that all partitions have
EVERYWHERE_ALIKE = ("settings", "limits")
AT_HOME = (
    *("credentials", "credential_ends", "api_keys", "sessions"),
    *("replies", "replies_before", "audit"),
)


def layout_of(queue: TaskQueue) -> int:
    """The largest layout of the partitions."""
    found = [link.ask(("HGET", link.keys["fair"], "layout"))[0] for link in links_of(queue)]
    return max(int(text or 1) for text in found)


class Copier:
    """Copies records of one queue to the partitions of another one."""

    def __init__(self, old: TaskQueue, new: TaskQueue, run: Callable[..., object]) -> None:
        self._old, self._new = old, new
        self._run = run  # runs a script of the new queue with the token of the move
        self._parts = len(links_of(new))

    def settings(self, *, at_rest: bool) -> None:
        """Copy settings and limits, users and tenants, credentials, audit log and replies."""
        layout = layout_of(self._old)
        for link in links_of(self._old):
            self._copy(self._placed(link, at_rest), layout)
        if self._new.link.parts and (most := self._new.settings().max_waiting):
            self._new.configure(max_waiting=most)  # shares it out

    def windows(self) -> None:
        """Copy unique keys that no task has, but that are taken until the end of a window."""
        for link in links_of(self._old):
            self._copy(self._windows(link), 1)

    def _windows(self, link: Link) -> Iterator[tuple[int, Row]]:
        now = link.now_ms()
        for key, field, text in _rows(link, "uniques"):
            ends = (text.split(b"\0") + [b""] * 3)[2]
            if ends and float(ends) > now:
                place = self._place(field.partition(b"\0")[0])
                yield place, (key, field, text)
                yield place, ("expiring", b"\x01" + field, ends)

    def _copy(self, placed: Iterable[tuple[int, Row]], layout: int) -> None:
        links, script = links_of(self._new), load_script("copy_records")
        for batch in in_batches(list(placed), PAGE // 4, lambda each: len(each[1][2])):
            rows: dict[int, list[Argument]] = defaultdict(list)
            for place, (key, field, value) in batch:
                row = script.row(key=key, field=field, value=value)
                for i in range(len(links)) if place == EVERYWHERE else (place,):
                    rows[i].extend(row)
            for i, rest in rows.items():
                self._run(links[i], "copy_records", old_layout=layout, rest=rest)

    def _place(self, owner: bytes) -> int:
        """The partition of an owner or a tenant, given by its name in Redis."""
        found = Owner.of_key(owner.decode("utf-8", "replace"))
        group = found.key if found.tenant is None else Owner.whole(found.tenant).key
        return jump_hash(group, self._parts) if self._parts > 1 else 0

    def _placed(self, link: Link, at_rest: bool) -> Iterator[tuple[int, Row]]:
        """All records of one partition of the old queue, with the partition for each."""
        for key, field, value in _rows(link, *EVERYWHERE_ALIKE):
            of_one = key == "settings" and field.startswith(PREFIX.encode())
            if not of_one and (key != "limits" or not _declared(value)):
                yield EVERYWHERE, (key, field, value)
        yield from self._users(link)
        for key, owner, value in _rows(link, "throttle", "averages"):
            yield self._place(owner), (key, owner, value)
        for key, member, _ in _rows(link, "tenant_users"):
            tenant, _, user = member.partition(b"\0")
            place = self._place(b"\x02" + tenant)
            yield place, (key, member, b"0")
            yield place, ("user_tenants", user + b"\0" + tenant, b"0")
        for key, field, value in _rows(link, *AT_HOME, *(("notices",) if at_rest else ())):
            yield 0, (key.removesuffix("_before"), field, value)

    def _users(self, link: Link) -> Iterator[tuple[int, Row]]:
        tenants = {user: tenant for _, user, tenant in _rows(link, "tenants")}
        for _, owner, text in _rows(link, "users"):
            owners = [owner]
            if owner in tenants:  # of versions before layout 2: the user's share of the tenant
                owners.append(b"\x02" + tenants[owner] + b"\x02" + owner)
            for each in owners:
                place = self._place(each)
                yield place, ("users", each, text)
                yield place, ("user_names", each, b"0")


def _declared(text: bytes) -> bool:
    """Whether limits were declared by workers, which do so again."""
    try:
        stored = json.loads(text)
    except ValueError:
        return False
    return isinstance(stored, dict) and stored.get("by") == "worker"


def _rows(link: Link, *keys: str) -> Iterator[Row]:
    """What keys of a partition have: fields and values, or members and scores."""
    for key in keys:
        scan = "HSCAN" if KEY_TYPES[key] == "hash" else "ZSCAN"
        cursor = 0
        while True:
            ((place, found),) = link.ask((scan, link.keys[key], cursor, "COUNT", PAGE))
            if isinstance(found, dict):  # as clients with the newer protocol give them
                found = [each for pair in found.items() for each in pair]
            for field, value in zip(found[::2], found[1::2], strict=True):
                yield key, field, value
            cursor = int(place)
            if cursor == 0:
                break
