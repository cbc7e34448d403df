"""Read the few numbers that overviews show: what is due, how runs ended, how Redis fares."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from fairqueue.clock import from_ms, to_ms
from fairqueue.link.connection import Link
from fairqueue.link.info import parse_info
from fairqueue.outcomes import LETTERS, NEVER_RAN, STATUS_OF_LETTER

MAX_COUNTED = 10_000  # runs of one tenant that are counted one by one
MAX_ENDINGS = 1000  # of one schedule

# In the text of a status: to read all of it takes ten times as long.
_NUMBERS = re.compile(rb'"(attempts|claimed|due|took)":([0-9]+(?:\.[0-9]+)?)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one run ended."""

    task_id: str
    status: str
    ended_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """Of the runs that ended last: how long each waited, in order, and took; in seconds."""

    waits: list[float]
    seconds: list[float]


class Glance:
    """Small bounded reads over the indexes of one queue."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def endings(
        self, schedule_ids: Sequence[str], limit: int = 10, tenant: str | None = None
    ) -> dict[str, list[Ending]]:
        """How the last runs of schedules ended, newest first: one round trip for all of them.

        With a tenant, one more, and only its runs: an id may have been another's schedule before.
        """
        if not schedule_ids:
            return {}
        count = min(limit, MAX_ENDINGS)
        key = self._link.keys["runs"]
        answers = self._link.ask(
            *(
                ("ZREVRANGEBYLEX", key, f"(c{each}\1", f"(c{each}\0", "LIMIT", 0, count)
                for each in schedule_ids
            )
        )
        if tenant is not None:
            answers = self._of_tenant(answers, tenant)
        return {
            schedule_id: [ending for member in members if (ending := _ending(member))]
            for schedule_id, members in zip(schedule_ids, answers, strict=True)
        }

    def _of_tenant(self, answers: list[list[bytes]], tenant: str) -> list[list[bytes]]:
        """Those of the entries that the index of runs has for the tenant as well."""
        head = f"t{tenant}".encode()
        own = [[head + member[member.index(b"\0") :] for member in each] for each in answers]
        key = self._link.keys["runs"]
        places = [place for each in own for place in each]
        if not places:
            return answers
        scores = self._link.ask(("ZMSCORE", key, *places))[0]
        theirs = {place for place, score in zip(places, scores, strict=True) if score is not None}
        return [[place for place in each if place in theirs] for each in own]

    def count_ended(self, since: datetime, tenant: str | None = None) -> dict[str, int]:
        """How many runs ended since then, by status, as far as history goes.

        Those of one tenant are counted one by one, the latest ten thousand at most.
        """
        start = f"{to_ms(since, 'since'):013d}"
        key = self._link.keys["runs"]
        if tenant is None:
            letters = (*STATUS_OF_LETTER, NEVER_RAN)
            counts = self._link.ask(
                *(("ZLEXCOUNT", key, f"[o{each}\0{start}", f"(o{each}\1") for each in letters)
            )
            *numbers, dropped = map(int, counts)
            by_status = dict(zip(STATUS_OF_LETTER.values(), numbers, strict=True))
            return by_status | {"cancelled": by_status["cancelled"] + dropped}
        first, last = f"(t{tenant}\1", f"[t{tenant}\0{start}"
        members = self._link.ask(("ZREVRANGEBYLEX", key, first, last, "LIMIT", 0, MAX_COUNTED))[0]
        found = [ending.status for member in members if (ending := _ending(member))]
        return {status: found.count(status) for status in STATUS_OF_LETTER.values()}

    def recent(self, tenant: str | None = None, limit: int = 100) -> Recent:
        """How long the runs that ended last had waited for their first attempt, and took."""
        values = [f"o{LETTERS[status]}" for status in ("succeeded", "failed", "timed_out")]
        if tenant is not None:
            values = [f"t{tenant}"]
        answers = self._link.run_together(
            *(
                (
                    "list_runs",
                    {"source": "runs", "from": f"({v}\1", "to": f"({v}\0", "limit": limit},
                )
                for v in values
            )
        )
        found = [(flat[i], flat[i + 2]) for flat in answers for i in range(1, len(flat), 3)]
        found.sort(reverse=True)  # by their ends, which places begin with
        waits, took = [], []
        for _, text in found[:limit]:
            times = {name: float(number) for name, number in _NUMBERS.findall(text)}
            if times.get(b"attempts") == 1 and b"claimed" in times and b"due" in times:
                waits.append(max(0.0, times[b"claimed"] - times[b"due"]) / 1000)
            if b"took" in times:
                took.append(times[b"took"] / 1000)
        return Recent(waits=sorted(waits), seconds=took)

    def count_before(self, moment: datetime) -> int:
        """How many ended runs, failed ones too, ended at that moment or earlier."""
        last = to_ms(moment, "moment")
        keys = self._link.keys
        return sum(self._link.ask(*(("ZCOUNT", keys[k], "-inf", last) for k in ("ended", "dead"))))

    def count_schedules(self, tenant: str) -> int:
        """How many schedules a tenant has."""
        key = self._link.keys["tenant_schedules"]
        return int(self._link.ask(("ZLEXCOUNT", key, f"[{tenant}\0", f"({tenant}\1"))[0])

    def count_due(self, until: datetime) -> int:
        """How many schedules are to act until then."""
        last = to_ms(until, "until")
        return int(self._link.ask(("ZCOUNT", self._link.keys["due"], "-inf", last))[0])

    def due_soon(self, limit: int = 10, skip: int = 0) -> list[tuple[str, datetime]]:
        """The schedules that act next, and when."""
        part = (skip, skip + limit - 1, "WITHSCORES")
        flat = self._link.ask(("ZRANGE", self._link.keys["due"], *part))[0]
        return [
            (name.decode(errors="replace"), from_ms(int(float(at))))
            for name, at in zip(flat[::2], flat[1::2], strict=True)
        ]

    def server(self) -> tuple[dict[str, str], float, float]:
        """What INFO tells, how long a round trip took, and how far our clock is ahead, in s."""
        began = time.monotonic()
        # Not PING, which a server that cannot write to its disk refuses.
        seconds, micros = self._link.ask(("TIME",))[0]
        took = time.monotonic() - began
        skew = time.time() - (int(seconds) + int(micros) / 1e6)
        return parse_info(self._link.ask(("INFO",))[0]), took, skew


def _ending(member: bytes) -> Ending | None:
    """What an entry of the index of runs says; None for what is none."""
    place = member.decode("utf-8", "replace").partition("\0")[2]
    end, letter, task_id = place[:13], place[13:14], place[14:]
    if not end.isdigit() or letter not in STATUS_OF_LETTER:
        return None
    return Ending(task_id=task_id, status=STATUS_OF_LETTER[letter], ended_at=from_ms(int(end)))
