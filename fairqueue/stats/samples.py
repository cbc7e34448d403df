"""Samples of the counters of a queue, and the series for charts that are made from them."""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.link.connection import Link
from fairqueue.link.operation import Ask, Call, Now, Operation, operation
from fairqueue.link.partitions import Partitioned, everywhere, over_all, whole
from fairqueue.models import UNREADABLE
from fairqueue.validation import check_one_of

FINE_MS, COARSE_MS = 15_000, 300_000  # the steps that lua/maintenance/sample.lua stores
MAX_READ = 1000  # samples in one answer; a day has 288 of 5 minutes
# A rate is computed from two samples that are at most this many steps apart. Over more of them, a
# quiet hour and a burst would look the same.
MOST_STEPS_APART = 5

# window -> mark of the samples, ms between two, number of samples
_WINDOWS = {
    "15m": ("f", FINE_MS, 60),
    "1h": ("f", FINE_MS, 240),
    "24h": ("c", COARSE_MS, 288),
}
WINDOWS = tuple(_WINDOWS)
RATES = ("pushed", "finished", "failed", "timed_out", "cancelled", "expired", "fired", "missed")
GAUGES = ("ready", "delayed", "running", "dead", "users", "tenants", "held")
WAITS = ("wait_p50", "wait_p95")

_SERVED = ("finished", "failed", "timed_out")  # rates of runs whose waits are sampled
_LEAST = 1e-9  # the weight of waits where the rate is not known

_Sample = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values over time: one for each of `times`, which are `step` seconds apart.

    pushed, finished, failed, timed_out, cancelled, expired, fired, missed: the rate per second
    since the previous sample. ready, delayed, running, dead, users and tenants (with waiting
    tasks), held (waiting for room in the limits of a name or key): counts. wait_p50, wait_p95:
    seconds that the runs which ended since the previous sample had waited for a worker;
    at most the newest 100. A value is None if no sample was taken, no run ended, or the counters
    were reset.

    Each partition of a queue has samples of its own. Rates and counts are their sums; the waits of
    the whole are estimated from theirs, by how many runs ended in each. A partition that has no
    sample for a while does not count meanwhile.
    """

    step: float
    times: list[datetime]
    values: dict[str, list[float | None]]


class SampleStore(Partitioned):
    """The samples of one queue: every 15 s for a bit more than an hour, every 5 min for a day."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @operation
    @over_all(any, strict=True)
    def take(self, now_ms: int | None = None) -> Operation[bool]:
        """Store a sample unless the current 15 s have one; return whether it did. Call it often."""
        return bool((yield Call("sample", now_ms=now_ms)))

    @operation
    @whole
    def read(self, window: str = "1h") -> Operation[Series]:
        """Return the series of the last "15m", "1h" or "24h", oldest first.

        It ends with the current step if that has a sample, or else with the previous one. Raises
        InvalidInput for another window.
        """
        mark, step_ms, count = _WINDOWS[check_one_of(window, "window", WINDOWS)]
        last = (yield Now()) // step_ms
        found = yield from everywhere(
            self, lambda twin: twin._samples(mark, step_ms, last - count - MOST_STEPS_APART, last)
        )
        parts = [samples for samples in found if samples]
        if not parts or not all(last in samples for samples in parts):
            last -= 1
        slots = range(last - count + 1, last + 1)
        rows = [_row(parts, slot) for slot in slots]
        return Series(
            step=step_ms / 1000,
            times=[from_ms(slot * step_ms) for slot in slots],
            values={name: [row.get(name) for row in rows] for name in (*RATES, *GAUGES, *WAITS)},
        )

    def _samples(
        self, mark: str, step_ms: int, first: int, last: int
    ) -> Operation[dict[int, _Sample]]:
        """Return the samples of a range of steps, by number of the step."""
        start, end = (f"{mark}\0{max(0, slot) * step_ms:013d}" for slot in (first, last + 1))
        most = ("BYLEX", "LIMIT", 0, MAX_READ)
        key = self.link.keys["samples"]
        (members,) = yield Ask(("ZRANGE", key, f"[{start}", f"({end}", *most))
        return dict(_parse(members, step_ms))


def _parse(members: Iterable[bytes], step_ms: int) -> Iterable[tuple[int, _Sample]]:
    for member in members:
        try:
            _, slot, text = member.split(b"\0", 2)
            stored: dict[str, Any] = json.loads(text)
            sample = {name: float(value) for name, value in stored.items() if _is_number(value)}
            sample["at"]
            yield int(slot) // step_ms, sample
        except UNREADABLE:
            continue  # a damaged sample leaves a gap


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _row(parts: Sequence[dict[int, _Sample]], slot: int) -> dict[str, float]:
    """Return the values of one step of the whole queue, by name."""
    if not any(slot in samples for samples in parts):
        return {}
    found = [_values_near(samples, slot) for samples in parts]
    if len(found) == 1:
        return found[0]
    names = {name for values in found for name in values} - {*WAITS}
    row = {name: math.fsum(values.get(name, 0.0) for values in found) for name in names}
    if waits := [values for values in found if WAITS[0] in values and WAITS[1] in values]:
        weights = [sum(values.get(name, 0.0) for name in _SERVED) or _LEAST for values in waits]
        marks = [(values[WAITS[0]], values[WAITS[1]]) for values in waits]
        row |= {
            name: _quantile(marks, weights, part)
            for name, part in zip(WAITS, (0.5, 0.95), strict=True)
        }
    return row


def _values_near(samples: dict[int, _Sample], slot: int) -> dict[str, float]:
    """Return the values of one step in a partition; in a short gap, those at its end."""
    if slot in samples:
        return _values(samples, slot)
    steps_on = range(slot + 1, slot + MOST_STEPS_APART)
    end = next((later for later in steps_on if later in samples), None)
    if end is None or not any(end - apart in samples for apart in range(1, MOST_STEPS_APART + 1)):
        return {}
    found = _values(samples, end)
    return {name: found[name] for name in found.keys() - {*WAITS}}


def _quantile(marks: Sequence[tuple[float, float]], weights: Sequence[float], part: float) -> float:
    """Return a quantile of waits over partitions, from the p50 and the p95 of each.

    Between them, and below, the waits of a partition are taken as evenly spread.
    """

    def reached(wait: float) -> float:
        """The part of all waits that are not longer."""
        return sum(
            weight * _part_of(p50, p95, wait)
            for (p50, p95), weight in zip(marks, weights, strict=True)
        ) / sum(weights)

    bounds = sorted({0.0, *chain.from_iterable(marks)})
    above = bisect_left(bounds, part, key=reached)
    if above == 0:
        return bounds[0]
    low, high = bounds[above - 1], bounds[above]
    begun, ended = reached(low), reached(math.nextafter(high, 0.0))  # at `high` it may jump
    if ended <= part or ended <= begun:
        return high
    return low + (high - low) * (part - begun) / (ended - begun)


def _part_of(p50: float, p95: float, wait: float) -> float:
    if wait >= p95:
        return 1.0
    if wait >= p50:
        return 0.5 + 0.45 * (wait - p50) / (p95 - p50)
    return 0.5 * wait / p50


def _values(samples: dict[int, _Sample], slot: int) -> dict[str, float]:
    """Return the values of one step, by name."""
    sample = samples.get(slot)
    if sample is None:
        return {}
    values = {name: sample[name] for name in GAUGES if name in sample}
    values |= {name: sample[name] / 1000 for name in WAITS if name in sample}
    earlier = (samples.get(slot - apart) for apart in range(1, MOST_STEPS_APART + 1))
    before = next((each for each in earlier if each is not None), None)
    if before is not None:
        values |= _rates(_counters(before), _counters(sample), sample["at"] - before["at"])
    return values


def _counters(sample: _Sample) -> _Sample:
    """Return the counters of a sample; `failed` are the dead letters that did not time out."""
    counters = {name: sample[name] for name in RATES if name in sample}
    if "buried" in sample and "timed_out" in sample:
        counters["failed"] = sample["buried"] - sample["timed_out"]
    if "expired_tasks" in sample:
        counters["expired"] = sample["expired_tasks"]
    return counters


def _rates(before: _Sample, now: _Sample, ms: float) -> dict[str, float]:
    """Return the growth of counters per second, without those that went back (a reset)."""
    if ms <= 0:
        return {}
    return {
        name: (now[name] - before[name]) * 1000 / ms
        for name in before.keys() & now.keys()
        if now[name] >= before[name]
    }
