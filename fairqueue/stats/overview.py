"""Read the numbers of overview pages: schedules that are due, ended runs, the Redis server."""

import heapq
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice

from fairqueue.clock import from_ms, to_ms
from fairqueue.history.records import list_call
from fairqueue.link.connection import Link
from fairqueue.link.info import parse_info
from fairqueue.link.operation import Ask, Operation, Together, operation
from fairqueue.link.partitions import (
    Partitioned,
    at_home,
    at_part,
    everywhere,
    over_all,
    over_tenant,
    total,
    whole,
)
from fairqueue.outcomes import LETTERS, NEVER_RAN, STATUS_OF_LETTER

MAX_COUNTED = 10_000  # runs of one tenant that are counted one by one
MAX_ENDINGS = 1000  # of one schedule

# Matched in the text of a status record: parsing it as JSON takes ten times as long.
_NUMBERS = re.compile(rb'"(attempts|claimed|due|took)":([0-9]+(?:\.[0-9]+)?)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one run ended."""

    task_id: str
    status: str
    ended_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """The waits, sorted, and the durations of the runs that ended last, in seconds."""

    waits: list[float]
    seconds: list[float]


def _sum_by_status(parts: list[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in parts:
        total.update(counts)
    return dict(total)


class OverviewStore(Partitioned):
    """Small bounded reads over the indexes of one queue."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @operation
    @whole
    def endings(
        self, schedule_ids: Sequence[str], limit: int = 10, tenant: str | None = None
    ) -> Operation[dict[str, list[Ending]]]:
        """Return how the last runs of each schedule ended, newest first, in one round trip.

        With a tenant, in two round trips, and only its runs: another tenant may have had a schedule
        with this id before.
        """
        if not schedule_ids:
            return {}
        count = min(limit, MAX_ENDINGS)
        if tenant is not None:
            twin = self.part_of(None, tenant)
            return (yield from at_part(twin, twin._endings(schedule_ids, count, tenant)))
        parts = yield from everywhere(self, lambda twin: twin._endings(schedule_ids, count, None))
        return {each: _newest([part[each] for part in parts], count) for each in schedule_ids}

    def _endings(
        self, schedule_ids: Sequence[str], count: int, tenant: str | None
    ) -> Operation[dict[str, list[Ending]]]:
        key = self.link.keys["runs"]
        answers = yield Ask(
            *(
                ("ZREVRANGEBYLEX", key, f"(c{each}\1", f"(c{each}\0", "LIMIT", 0, count)
                for each in schedule_ids
            )
        )
        if tenant is not None:
            answers = yield from self._of_tenant(answers, tenant)
        return {
            schedule_id: [ending for member in members if (ending := _ending(member))]
            for schedule_id, members in zip(schedule_ids, answers, strict=True)
        }

    def _of_tenant(self, answers: list[list[bytes]], tenant: str) -> Operation[list[list[bytes]]]:
        """Return the entries that the index of runs has for the tenant as well."""
        head = f"t{tenant}".encode()
        own = [[head + member[member.index(b"\0") :] for member in each] for each in answers]
        places = [place for each in own for place in each]
        if not places:
            return answers
        (scores,) = yield Ask(("ZMSCORE", self.link.keys["runs"], *places))
        theirs = {place for place, score in zip(places, scores, strict=True) if score is not None}
        return [[place for place in each if place in theirs] for each in own]

    @operation
    @over_tenant(_sum_by_status)
    def count_ended(self, since: datetime, tenant: str | None = None) -> Operation[dict[str, int]]:
        """Count the stored runs that ended since a time, by status.

        Those of one tenant are counted one by one, at most the latest ten thousand.
        """
        start = f"{to_ms(since, 'since'):013d}"
        key = self.link.keys["runs"]
        if tenant is None:
            letters = (*STATUS_OF_LETTER, NEVER_RAN)
            counts = yield Ask(
                *(("ZLEXCOUNT", key, f"[o{each}\0{start}", f"(o{each}\1") for each in letters)
            )
            *numbers, dropped = map(int, counts)
            by_status = dict(zip(STATUS_OF_LETTER.values(), numbers, strict=True))
            return by_status | {"cancelled": by_status["cancelled"] + dropped}
        first, last = f"(t{tenant}\1", f"[t{tenant}\0{start}"
        (members,) = yield Ask(("ZREVRANGEBYLEX", key, first, last, "LIMIT", 0, MAX_COUNTED))
        found = [ending.status for member in members if (ending := _ending(member))]
        return {status: found.count(status) for status in STATUS_OF_LETTER.values()}

    @operation
    @whole
    def recent(self, tenant: str | None = None, limit: int = 100) -> Operation[Recent]:
        """Return the waits for a first attempt, and the durations, of the runs that ended last."""
        if tenant is not None:
            twin = self.part_of(None, tenant)
            found = yield from at_part(twin, twin._newest_runs(tenant, limit))
        else:
            parts = yield from everywhere(self, lambda twin: twin._newest_runs(None, limit))
            found = sorted(chain.from_iterable(parts), reverse=True)[:limit]
        waits, took = [], []
        for _, text in found:
            times = {name: float(number) for name, number in _NUMBERS.findall(text)}
            if times.get(b"attempts") == 1 and b"claimed" in times and b"due" in times:
                waits.append(max(0.0, times[b"claimed"] - times[b"due"]) / 1000)
            if b"took" in times:
                took.append(times[b"took"] / 1000)
        return Recent(waits=sorted(waits), seconds=took)

    def _newest_runs(self, tenant: str | None, limit: int) -> Operation[list[tuple[bytes, bytes]]]:
        """Return the places and the records of the runs that ended last, newest first."""
        values = [f"o{LETTERS[status]}" for status in ("succeeded", "failed", "timed_out")]
        if tenant is not None:
            values = [f"t{tenant}"]
        answers = yield Together(
            *(list_call("runs", f"({value}\1", f"({value}\0", limit) for value in values)
        )
        found = [(flat[i], flat[i + 2]) for flat in answers for i in range(1, len(flat), 3)]
        found.sort(reverse=True)  # by their end, which is the first part of a place
        return found[:limit]

    @operation
    @over_all(total)
    def count_before(self, moment: datetime) -> Operation[int]:
        """Count the stored runs, failed ones included, that ended at this time or earlier."""
        last = to_ms(moment, "moment")
        keys = self.link.keys
        return sum((yield Ask(*(("ZCOUNT", keys[k], "-inf", last) for k in ("ended", "dead")))))

    @operation
    @over_tenant(total)
    def count_schedules(self, tenant: str) -> Operation[int]:
        """Count the schedules of a tenant."""
        key = self.link.keys["tenant_schedules"]
        return int((yield Ask(("ZLEXCOUNT", key, f"[{tenant}\0", f"({tenant}\1")))[0])

    @operation
    @over_all(total)
    def count_due(self, until: datetime) -> Operation[int]:
        """Count the schedules that are due until a time."""
        last = to_ms(until, "until")
        return int((yield Ask(("ZCOUNT", self.link.keys["due"], "-inf", last)))[0])

    @operation
    @whole
    def due_soon(self, limit: int = 10, skip: int = 0) -> Operation[list[tuple[str, datetime]]]:
        """Return the schedules that are due next, with their times."""
        if not self.link.parts:
            return (yield from self._due(skip, limit))
        parts = yield from everywhere(self, lambda twin: twin._due(0, skip + limit))
        found = sorted(chain.from_iterable(parts), key=lambda each: each[1])
        return found[skip : skip + limit]

    def _due(self, skip: int, limit: int) -> Operation[list[tuple[str, datetime]]]:
        part = (skip, skip + limit - 1, "WITHSCORES")
        (flat,) = yield Ask(("ZRANGE", self.link.keys["due"], *part))
        return [
            (name.decode(errors="replace"), from_ms(int(float(at))))
            for name, at in zip(flat[::2], flat[1::2], strict=True)
        ]

    @operation
    @at_home
    def server(self) -> Operation[tuple[dict[str, str], float, float]]:
        """Return INFO, the seconds of a round trip, and how far the local clock is ahead in s."""
        began = time.monotonic()
        # Not PING, which a server refuses that cannot write to its disk.
        seconds, micros = (yield Ask(("TIME",)))[0]
        took = time.monotonic() - began
        skew = time.time() - (int(seconds) + int(micros) / 1e6)
        return parse_info((yield Ask(("INFO",)))[0]), took, skew


def _newest(parts: Sequence[list[Ending]], count: int) -> list[Ending]:
    """Return the newest endings of lists that are sorted."""
    merged = heapq.merge(*parts, key=lambda ending: ending.ended_at, reverse=True)
    return list(islice(merged, count))


def _ending(member: bytes) -> Ending | None:
    """Read an entry of the index of runs; None if it is damaged."""
    place = member.decode("utf-8", "replace").partition("\0")[2]
    end, letter, task_id = place[:13], place[13:14], place[14:]
    if not end.isdigit() or letter not in STATUS_OF_LETTER:
        return None
    return Ending(task_id=task_id, status=STATUS_OF_LETTER[letter], ended_at=from_ms(int(end)))
