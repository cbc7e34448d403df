"""Compare every index and count with the records, and repair if asked to, in small steps."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Self

from fairqueue.doctor.findings import (
    BATCH,
    OK,
    PROBLEM,
    WARNING,
    Finding,
    Progress,
    in_batches,
    no_progress,
)
from fairqueue.doctor.groups import Groups
from fairqueue.errors import RedisRefused, plural
from fairqueue.link.connection import Link
from fairqueue.link.keys import KEY_TYPES
from fairqueue.link.operation import Ask, Call, Operation, operation, steps
from fairqueue.link.owners import Owner
from fairqueue.link.partitions import Partitioned, everywhere_numbered, whole
from fairqueue.models import new_id
from fairqueue.queue.delays import DelayIndex

MOST_LEASES = 10_000  # more are not counted in one script: lua/maintenance/repair_tasks.lua
EXAMPLES = 5  # of wrong entries in one finding

# Structures in the order of repair: first entries without a record are removed, then each task is
# moved to where its record says, then counts are corrected, then the places of users.
_OF_TASKS = (
    *("tasks", "attempts", "waiting", "delayed", "delayed_index", "leases", "ended", "dead"),
    *("backlog", "held", "slot_line", "slots", "deadlines", "open", "runs", "failures"),
    *("pool_tasks", "gate_order", "gate_passes", "paced", "uniques", "expiring"),
    *("rings", "tags", "clocks"),
)
_OF_RECORDS = (
    *("due", "plan", "schedule_state", "schedule_index", "schedule_names", "tenant_schedules"),
    *("moments", "changes", "schedules", "users", "user_names", "user_tenants", "tenant_users"),
    *("workers", "worker_ends", "limits"),
)
_BY_SCHEDULE = ("moments", "changes")  # examined by the schedule id before the NUL of each entry


class Records(Partitioned):
    """Compares every index and count of a queue with its records, and repairs if asked to."""

    def __init__(self, link: Link, *, fix: bool, progress: Progress = no_progress) -> None:
        self.link = link
        self._fix = fix
        self._progress = progress
        self.looked = 0  # entries
        self._omit_values = True  # whether the server supports HSCAN NOVALUES

    def _twin(self, part: Any) -> Self:
        twin = super()._twin(part)
        twin.looked = 0
        twin._progress = lambda looked: self._progress(self.looked + looked)
        return twin

    @operation
    @whole
    def compare(self) -> Operation[list[Finding]]:
        """Return a finding for each structure with wrong entries, or one that all agree.

        In a queue with partitions also for users and tenants that are in a wrong one, and for
        settings that differ.
        """
        found: list[Finding] = []
        if not self.link.parts:
            found += yield from self._compare()
        for part in self.link.parts:
            number, twin = part.keys.partition, self.at(part)
            results = yield from everywhere_numbered(
                self, lambda twin: twin._compare(), only=[number]
            )
            for _, findings in results:
                found += [each.of_partition(number) for each in findings]
            self.looked, twin.looked = self.looked + twin.looked, 0
        if self.link.parts:
            found += yield from Groups(self.link).findings()
        text = f"{plural(self.looked, 'entry agrees', 'entries agree')} with each other"
        return found or [Finding("records", OK, text)]

    def _compare(self) -> Operation[list[Finding]]:
        found: list[Finding] = []
        if self._fix and not (yield Ask(("ZCARD", self.link.keys["delayed_index"])))[0]:
            # Older versions have no such index: nothing is wrong.
            yield from steps(DelayIndex(self.link).update)()
        for name in _OF_TASKS:
            found += yield from self._check("repair_tasks", name, [name])
        found += yield from self._check("repair_tasks", "task", ["status"])
        found += yield from self._check("repair_tasks", "behind", ["delayed"], name="unique keys")
        found += yield from self._check_counts()
        turns = ["ready", "parked", "critical"]
        found += yield from self._check("repair_tasks", "user", turns, ["backlog"], "users in line")
        for name in _OF_RECORDS:
            whole, by_id = ([], [name]) if name in _BY_SCHEDULE else ([name], [])
            found += yield from self._check("repair_records", name, whole, by_id, name)
        return found

    def _check(
        self,
        script: str,
        kind: str,
        whole: Sequence[str],
        by_id: Sequence[str] = (),
        name: str = "",
    ) -> Operation[list[Finding]]:
        """Examine structures: the entries of `whole`, and the distinct ids that begin `by_id`."""
        wrong = _WrongEntries()
        for structure in (*whole, *by_id):
            seen: set[bytes] = set()
            cursor = -1
            while cursor:
                cursor, entries = yield from self.page(structure, max(0, cursor))
                if structure in by_id:
                    ids = dict.fromkeys(entry.partition(b"\0")[0] for entry in entries)
                    entries = [each for each in ids if each not in seen]
                    seen.update(entries)
                yield from self._examine(script, kind, entries, wrong)
        return wrong.findings(name or whole[0], self._fix)

    def _examine(
        self, script: str, kind: str, entries: Iterable[bytes], wrong: "_WrongEntries"
    ) -> Operation[None]:
        """Run a script on entries, and add the wrong ones to `wrong`."""
        for batch in in_batches(entries, BATCH):
            fix = "1" if self._fix else ""
            wrong.add((yield Call(script, op=new_id(), kind=kind, fix=fix, rest=batch)))
            self.looked += len(batch)
            self._progress(self.looked)

    # --- counts of running tasks ------------------------------------------------------------------

    def _check_counts(self) -> Operation[list[Finding]]:
        if (yield Ask(("ZCARD", self.link.keys["leases"])))[0] > MOST_LEASES:
            text = f"more than {MOST_LEASES} tasks run: the counts of users were not compared"
            return [Finding("running", WARNING, text)]
        counts = Counter(dict((yield from self._stored_counts())))
        counts.subtract((yield from self._leases_by_user()))
        # Work goes on meanwhile: the script decides which counts are wrong.
        users = {user for user, count in counts.items() if count}
        users |= {user for user, count in (yield from self._stored_counts()) if count <= 0}
        wrong = _WrongEntries()
        yield from self._examine("repair_tasks", "running", users, wrong)
        return wrong.findings("running", self._fix)

    def _stored_counts(self) -> Operation[list[tuple[bytes, int]]]:
        counts: list[tuple[bytes, int]] = []
        cursor = -1
        while cursor:
            cursor, flat = yield from self._scan("HSCAN", "running", max(0, cursor))
            counts += zip(flat[::2], map(_number, flat[1::2]), strict=True)
        return counts

    def _leases_by_user(self) -> Operation[Counter[bytes]]:
        counts: Counter[bytes] = Counter()
        cursor = -1
        while cursor:
            cursor, entries = yield from self.page("leases", max(0, cursor))
            for ids in in_batches(entries, BATCH):
                for text in (yield Ask(("HMGET", self.link.keys["status"], *ids)))[0]:
                    counts.update(_sharers_in(text or b""))
        return counts

    # --- scanning ---------------------------------------------------------------------------------

    def page(self, name: str, cursor: int) -> Operation[tuple[int, list[bytes]]]:
        """Return the next cursor, 0 at the end, and entries of a structure, some of them twice."""
        if KEY_TYPES[name] != "hash":
            cursor, flat = yield from self._scan("ZSCAN", name, cursor)
            return cursor, flat[::2]
        if self._omit_values:
            try:
                return (yield from self._scan("HSCAN", name, cursor, "NOVALUES"))
            except RedisRefused:  # before Redis 7.4 and Valkey 8
                self._omit_values = False
        cursor, flat = yield from self._scan("HSCAN", name, cursor)
        return cursor, flat[::2]

    def _scan(
        self, command: str, name: str, cursor: int, *more: str
    ) -> Operation[tuple[int, list[bytes]]]:
        key = self.link.keys[name]
        following, part = (yield Ask((command, key, cursor, "COUNT", BATCH, *more)))[0]
        return int(following), part


class _WrongEntries:
    """Counts the wrong entries of a structure, and keeps a few as examples."""

    def __init__(self) -> None:
        self._count = self._repairable = 0
        self._examples: list[str] = []

    def add(self, answer: list[bytes]) -> None:
        """Add the answer of a script: entry, text, and b"1" if it is repairable, for each."""
        self._count += len(answer) // 3
        self._repairable += answer[2::3].count(b"1")
        for entry, text in list(zip(answer[::3], answer[1::3], strict=True))[:EXAMPLES]:
            shown = entry.decode(errors="replace").replace("\0", " / ")
            self._examples.append(f"{shown} {text.decode(errors='replace')}")
        del self._examples[EXAMPLES:]

    def findings(self, name: str, fix: bool) -> list[Finding]:
        """Return the finding, if any entry was wrong."""
        if not self._count:
            return []
        done = self._repairable if fix else 0
        many = plural(self._count, "entry does", "entries do")
        text = f"{many} not agree, such as: {self._examples[0]}"
        return [
            Finding(
                f"records: {name}",
                WARNING if done == self._count else PROBLEM,
                f"{done} of {text}; repaired" if done else text,
                {"wrong": self._count, "repaired": done, "examples": self._examples},
                repairable=0 if fix else self._repairable,
            )
        ]


_USER = re.compile(rb'"user":("(?:[^"\\]|\\.)*")')
_GROUP = re.compile(rb'"group":"([A-Za-z0-9_.-]+)"')


def _sharers_in(record: bytes) -> list[bytes]:
    """Return the owner and the tenant of a status record, by their names in Redis.

    Empty if absent or malformed.
    """
    match, group = _USER.search(record), _GROUP.search(record)
    with suppress(ValueError):
        if match is not None:
            user, tenant = str(json.loads(match[1])), group[1].decode() if group else None
            found = [Owner(user, tenant).key] + ([Owner.whole(tenant).key] if tenant else [])
            return [each.encode() for each in found]
    return []


def _number(text: bytes) -> int:
    """Parse a stored count; -1 if malformed."""
    try:
        return int(text)
    except ValueError:
        return -1
