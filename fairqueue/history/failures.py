"""Failed runs grouped by their cause, which several partitions may have."""

from collections.abc import Sequence

from fairqueue.clock import LATEST_MS, from_ms
from fairqueue.history.filters import cursor_at, place_of_cursor, read_position, triples
from fairqueue.history.records import FailureGroup, Run, list_call, read_run
from fairqueue.link.operation import Ask, Operation, Together, operation
from fairqueue.link.partitions import Partitioned, everywhere, everywhere_numbered, whole
from fairqueue.models import Page
from fairqueue.validation import check_count

MAX_GROUPS = 1000  # on one page
SAMPLES = 5  # runs of a failure group that are read to find one that is not damaged

_Mark = tuple[int, str]  # the time of the last failure in ms, and the fingerprint


class FailureGroups(Partitioned):
    """The part of the history that groups failed runs."""

    @operation
    @whole
    def failure_groups(
        self, limit: int = 100, cursor: str | None = None
    ) -> Operation[Page[FailureGroup]]:
        """Return failed runs grouped by their fingerprint, the cause, the latest first.

        Raises InvalidInput for a bad limit or cursor.
        """
        check_count(limit, "limit", least=1, most=MAX_GROUPS)
        # All partitions have one order, by time and fingerprint: one position is enough.
        last = read_position(place_of_cursor(cursor, ["failures"])[1])
        found: list[FailureGroup] = []
        more = True
        while more and len(found) < limit:
            marks, more = yield from self._next_marks(last, limit - len(found))
            found += yield from self._groups([*dict.fromkeys(name for _, name in marks)], last)
            if marks:
                last = marks[-1]
        if last is None or not more:
            return Page(found, None)
        return Page(found, cursor_at("failures", f"{last[0]} {last[1]}"))

    def _next_marks(self, last: _Mark | None, most: int) -> Operation[tuple[list[_Mark], bool]]:
        """Return what comes next, in order, and whether there is more.

        At most `most` fingerprints; each may come once for each partition that has it.
        """
        parts = yield from everywhere(self, lambda twin: twin._fingerprints(last, most + 1))
        ends = [part[-1] for part in parts if len(part) > most]
        rows = sorted((mark for part in parts for mark in part), reverse=True)
        names: set[str] = set()
        for i, mark in enumerate(rows):
            names.add(mark[1])
            # After the end of a list that was cut, others may come before the next row.
            if len(names) > most or (ends and mark < max(ends)):
                return rows[:i], True
        return rows, bool(ends)

    def _fingerprints(self, last: _Mark | None, most: int) -> Operation[list[_Mark]]:
        """Return fingerprints after a position, with the times of their last failures in ms."""
        found: list[_Mark] = []
        skip = 0
        key, start = self.link.keys["failures"], str(last[0]) if last else "+inf"
        while len(found) < most:
            part = ("BYSCORE", "REV", "LIMIT", skip, most, "WITHSCORES")
            (flat,) = yield Ask(("ZRANGE", key, start, "-inf", *part))
            pairs = list(zip(flat[::2], map(float, flat[1::2]), strict=True))
            rows = [
                (int(score), mark.decode("utf-8", "replace"))
                for mark, score in pairs
                if 0 <= score <= LATEST_MS  # others are damaged
            ]
            found += [row for row in rows if last is None or row < last]
            skip += len(pairs)
            if len(pairs) < most:
                break
        return found[:most]

    def _groups(self, names: Sequence[str], last: _Mark | None) -> Operation[list[FailureGroup]]:
        """Return the groups of fingerprints, without those that come before a position.

        A partition may have a fingerprint whose latest failure, in another one, was listed before.
        """
        if not names:
            return []
        parts = yield from everywhere_numbered(self, lambda twin: twin._figures(names))
        counts = dict.fromkeys(names, 0)
        latest: dict[str, tuple[int, int]] = {}  # the time of the latest failure, and its partition
        for number, figures in parts:
            for name, last_ms, count in figures:
                counts[name] += count
                if last_ms is not None:
                    latest[name] = max(latest.get(name, (-1, 0)), (last_ms, number))
        wanted: dict[int, list[str]] = {}
        for name, (last_ms, number) in latest.items():
            if last is None or (last_ms, name) < last:
                wanted.setdefault(number, []).append(name)
        samples = yield from everywhere_numbered(
            self,
            lambda twin: twin._samples(wanted.get(twin.link.keys.partition, [])),
            only=[*wanted],
        )
        runs = {name: run for _, found in samples for name, run in found.items()}
        return [
            FailureGroup(
                fingerprint=name,
                count=counts[name],
                last_at=from_ms(latest[name][0]),
                latest=runs[name],
            )
            for name in sorted(runs, key=lambda name: (latest[name][0], name), reverse=True)
        ]

    def _figures(self, names: Sequence[str]) -> Operation[list[tuple[str, int | None, int]]]:
        """Return fingerprints with the times of their last failures in ms, and their counts."""
        keys = self.link.keys
        times, *counts = yield Ask(
            ("ZMSCORE", keys["failures"], *names),
            *(("ZLEXCOUNT", keys["runs"], f"[f{name}\0", f"(f{name}\1") for name in names),
        )
        return [
            (name, None if time is None else int(float(time)), int(count))
            for name, time, count in zip(names, times, counts, strict=True)
        ]

    def _samples(self, names: Sequence[str]) -> Operation[dict[str, Run]]:
        """Return the latest failed run of fingerprints that is not damaged."""
        if not names:
            return {}
        answers = yield Together(
            *(list_call("runs", f"(f{name}\1", f"[f{name}\0", SAMPLES) for name in names)
        )
        found = {}
        for name, answer in zip(names, answers, strict=True):
            runs = (read_run(task_id, text) for _, task_id, text in triples(answer))
            if (latest := next((run for run in runs if run is not None), None)) is not None:
                found[name] = latest
        return found
