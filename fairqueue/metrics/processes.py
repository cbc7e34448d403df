"""Add up the metrics of processes that come and go, so that one port shows those of all.

    child 0 --.
    child 1 ---+-->  a place in shared memory for each  -->  the parent, at a scrape
    child 2 --'

A child stores the values of its registry once a second, and when it ends. Its replacement continues
from there: counters never go back, and nothing grows with the number of replacements. The counts of
the last second before a child was killed are lost.
"""

import json
import logging
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fairqueue.logs import error_line, log_event
from fairqueue.runtime.processes import process_exists

logger = logging.getLogger("fairqueue.metrics")

REPORT_S = 1.0  # how often a child stores its metrics
PLACE_BYTES = 512 * 1024  # for the metrics of a child, compressed; unused memory costs nothing
_HEAD = struct.Struct("=II")  # checksum and length of what follows

# Metrics that mean one process each; of these the port shows the parent's own.
_OF_ONE_PROCESS = ("python_", "process_")
_CUMULATIVE = ("counter", "histogram", "summary")
_YES_OR_NO = ("info", "stateset")  # 1 or 0: of these there is nothing to add up
_TRIES = 10  # to read what is written at the same time

# The values of one family of metrics: by name and labels of the sample.
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class _Family:
    """A metric with all its samples."""

    def __init__(self, kind: str, text: str, values: Values) -> None:
        self.kind = kind
        self.text = text
        self.values = values


Families = dict[str, _Family]


class Tally:
    """One place for each child, in memory shared with the process that forks them.

    Make it before the fork, and let each child be `reporting` at its own place. `Merged` then adds
    their counts to those of the registry, in the process that made it.
    """

    def __init__(self, places: int, registry: CollectorRegistry | None = None) -> None:
        self._registry = REGISTRY if registry is None else registry
        self._places = [_Place() for _ in range(places)]
        self._owner = os.getpid()
        _tallies.setdefault(self._registry, WeakSet()).add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process made it, and is not a forked copy."""
        return self._owner == os.getpid()

    @contextmanager
    def reporting(self, place: int) -> Iterator[None]:
        """In a child: store its metrics until the end, without those it was forked with."""
        report = _Report(self._registry, self._places[place])
        report.write(os.getpid())
        ended = threading.Event()

        def keep_on() -> None:
            while not ended.wait(REPORT_S):
                report.write(os.getpid())

        thread = threading.Thread(target=keep_on, name="fairqueue-tally", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            report.write(0)

    def read(self) -> Iterator[Families]:
        """Yield the values that each child stored last."""
        for place in self._places:
            pid, families = place.read()
            if not process_exists(pid):  # gauges of a dead process mean nothing
                families = {n: f for n, f in families.items() if f.kind in _CUMULATIVE}
            yield families


class _Report:
    """The report of a child: its own counts, plus those of the children it replaces."""

    def __init__(self, registry: CollectorRegistry, place: "_Place") -> None:
        self._registry = registry
        self._place = place
        self._before = {
            name: family for name, family in place.read()[1].items() if family.kind in _CUMULATIVE
        }
        self._inherited: Families | None = None
        self._failing = False

    def write(self, pid: int) -> None:
        """Store the report. An error is only logged, once: the tasks matter more.

        Counts from before the first successful read of the registry are lost.
        """
        try:
            if self._inherited is None:
                self._inherited = _own(self._registry)
            families = _own(self._registry)
            for name, family in self._inherited.items():
                if name in families:
                    _disinherit(families[name], family.values)
            _add_children(families, self._registry)
            self._place.write(pid, _added(families, self._before))
            self._failing = False
        except Exception as error:
            if not self._failing:
                log_event(logger, "metrics_not_reported", logging.WARNING, error=error_line(error))
            self._failing = True


class _Place:
    """A document that one process writes and another reads, without a lock.

    It has two halves: one is written while the other is read, and a byte says which. So a writer
    that is killed leaves the previous document.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1 + 2 * PLACE_BYTES)

    def write(self, pid: int, families: Families) -> None:
        """Replace the document. Raises ValueError if it is too large."""
        lines = [
            [name, each.kind, each.text, [[*key, value] for key, value in each.values.items()]]
            for name, each in families.items()
        ]
        data = zlib.compress(json.dumps([pid, lines]).encode(), 1)
        if _HEAD.size + len(data) > PLACE_BYTES:
            raise ValueError(f"the metrics of a process take {len(data)} bytes, compressed")
        half = 1 - self._memory[0]
        start = 1 + half * PLACE_BYTES
        head = _HEAD.pack(zlib.crc32(data), len(data))
        self._memory[start : start + _HEAD.size + len(data)] = head + data
        self._memory[0] = half

    def read(self) -> tuple[int, Families]:
        """Return the process that wrote last, and its document; (0, {}) if there is none."""
        for _ in range(_TRIES):
            start = 1 + self._memory[0] * PLACE_BYTES
            checksum, length = _HEAD.unpack_from(self._memory, start)
            data = self._memory[start + _HEAD.size : start + _HEAD.size + length]
            if length and zlib.crc32(data) == checksum:
                pid, lines = json.loads(zlib.decompress(data))
                return pid, {name: _family(*rest) for name, *rest in lines}
        return 0, {}


def _family(kind: str, text: str, samples: Iterable[tuple[str, Any, float]]) -> _Family:
    values = {
        (name, tuple((label, value) for label, value in labels)): number
        for name, labels, number in samples
    }
    return _Family(kind, text, values)


def _disinherit(family: _Family, inherited: Values) -> None:
    """Remove the values that a child was forked with, which its parent reports already.

    They are subtracted from counters; other values are removed if they have not changed.
    """
    for key, value in inherited.items():
        if key not in family.values:
            continue
        if family.kind in _CUMULATIVE:
            family.values[key] -= value
        elif family.values[key] == value:
            del family.values[key]


def _own(registry: CollectorRegistry) -> Families:
    """Return the values of a registry, without those that describe one process."""
    return {
        metric.name: _Family(metric.type, metric.documentation, _values(metric))
        for metric in registry.collect()
        if not metric.name.startswith(_OF_ONE_PROCESS)
    }


def _add_children(families: Families, registry: CollectorRegistry) -> Families:
    """Add the values of the children of this process."""
    for tally in _own_tallies(registry):
        for values in tally.read():
            _added(families, values)
    return families


def _values(metric: Metric) -> Values:
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for sample in metric.samples
        if not sample.name.endswith("_created")  # a time cannot be added up
    }


def _added(families: Families, more: Mapping[str, _Family]) -> Families:
    """Add `more` to `families`: sums, or the larger of two values that mean yes or no."""
    for name, other in more.items():
        family = families.setdefault(name, _Family(other.kind, other.text, {}))
        for key, value in other.values.items():
            if family.kind in _YES_OR_NO:
                family.values[key] = max(family.values.get(key, 0.0), value)
            else:
                family.values[key] = family.values.get(key, 0.0) + value
    return families


_tallies: WeakKeyDictionary[CollectorRegistry, "WeakSet[Tally]"] = WeakKeyDictionary()


def _own_tallies(registry: CollectorRegistry) -> list[Tally]:
    return [tally for tally in _tallies.get(registry, ()) if tally.is_ours]


class Merged(Collector):
    """All metrics of some registries and of the children of this process, added up by name."""

    def __init__(self, *registries: CollectorRegistry) -> None:
        self._registries = tuple(dict.fromkeys(registries))

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of all registries and children, added up by name."""
        if len(self._registries) == 1 and not _own_tallies(self._registries[0]):
            yield from self._registries[0].collect()
            return
        own = {}
        added: Families = {}
        for registry in self._registries:
            for metric in registry.collect():
                if metric.name.startswith(_OF_ONE_PROCESS):
                    own[metric.name] = metric
            _added(added, _add_children(_own(registry), registry))
        yield from own.values()
        for name, family in added.items():
            metric = Metric(name, family.text, family.kind)
            for (sample, labels), value in family.values.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not read metrics."""
        return []
