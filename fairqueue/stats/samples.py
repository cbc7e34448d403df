"""Keep samples of what a queue does, and tell them as series for charts."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.errors import InvalidInput, shown
from fairqueue.link.connection import Link
from fairqueue.models import UNREADABLE

FINE_MS, COARSE_MS = 15_000, 300_000  # the steps that lua/maintenance/sample.lua keeps
MAX_READ = 1000  # samples in one answer; a day has 288 of 5 minutes
# A rate is told of two samples that are at most so many steps apart: over more of them it would
# draw a quiet hour and a burst as one.
MOST_STEPS_APART = 5

# window -> mark of the samples, ms between two, how many
_WINDOWS = {
    "15m": ("f", FINE_MS, 60),
    "1h": ("f", FINE_MS, 240),
    "24h": ("c", COARSE_MS, 288),
}
WINDOWS = tuple(_WINDOWS)
RATES = ("pushed", "finished", "failed", "timed_out", "cancelled", "fired", "missed")
GAUGES = ("ready", "delayed", "running", "dead", "users")
WAITS = ("wait_p50", "wait_p95")

_Sample = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values over time: one for each of `times`, which are `step` seconds apart.

    pushed, finished, failed, timed_out, cancelled, fired, missed: how many in a second, since the
    sample before. ready, delayed, running, dead, users (with waiting tasks): how many there were.
    wait_p50, wait_p95: seconds that runs which ended since the sample before had waited for a
    worker; of more than 100, the newest 100. None where nothing is known: nobody took a sample, no
    run ended, or the counters began anew.
    """

    step: float
    times: list[datetime]
    values: dict[str, list[float | None]]


class SampleStore:
    """The samples of one queue: of 15 s for a bit more than an hour, of 5 min for a day."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def take(self, now_ms: int | None = None) -> bool:
        """Store a sample if the present 15 s have none; whether it did. May be called often."""
        return bool(self._link.run("sample", now_ms=now_ms))

    def read(self, window: str = "1h") -> Series:
        """The series of the last "15m", "1h" or "24h", oldest first.

        It ends with the present step if that has a sample, else with the one before. Raises
        InvalidInput for another window.
        """
        if not isinstance(window, str) or window not in _WINDOWS:
            raise InvalidInput(f"window {shown(window)} must be one of {', '.join(_WINDOWS)}")
        mark, step_ms, count = _WINDOWS[window]
        last = self._link.now_ms() // step_ms
        samples = self._samples(mark, step_ms, last - count - MOST_STEPS_APART, last)
        if last not in samples:
            last -= 1
        slots = range(last - count + 1, last + 1)
        names = (*RATES, *GAUGES, *WAITS)
        rows = [_values(samples, slot) for slot in slots]
        return Series(
            step=step_ms / 1000,
            times=[from_ms(slot * step_ms) for slot in slots],
            values={name: [row.get(name) for row in rows] for name in names},
        )

    def _samples(self, mark: str, step_ms: int, first: int, last: int) -> dict[int, _Sample]:
        """The samples of some steps, by number of the step."""
        start, end = (f"{mark}\0{max(0, slot) * step_ms:013d}" for slot in (first, last + 1))
        most = ("BYLEX", "LIMIT", 0, MAX_READ)
        key = self._link.keys["samples"]
        members = self._link.ask(("ZRANGE", key, f"[{start}", f"({end}", *most))[0]
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
            continue  # somebody has spoilt it: a gap


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _values(samples: dict[int, _Sample], slot: int) -> dict[str, float]:
    """What is known of one step, by name."""
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
    """The counters of a sample; failed ones are the dead letters that did not time out."""
    counters = {name: sample[name] for name in RATES if name in sample}
    if "buried" in sample and "timed_out" in sample:
        counters["failed"] = sample["buried"] - sample["timed_out"]
    return counters


def _rates(before: _Sample, now: _Sample, ms: float) -> dict[str, float]:
    """What counters grew by in a second. One that went back has begun anew: nothing is known."""
    if ms <= 0:
        return {}
    return {
        name: (now[name] - before[name]) * 1000 / ms
        for name in before.keys() & now.keys()
        if now[name] >= before[name]
    }
