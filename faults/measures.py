"""The measurements of a soak: memory and data each second, and times from the journals.

A series is flat if, after a warm-up, the high mark of the last quarter exceeds that of the second
quarter by at most an allowance. The high mark is the 90th percentile: some data comes and goes in
generations, so that a median would depend on where in a generation a quarter begins.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import redis

from fairqueue.link.keys import BARRIER, KEY_TYPES, Keys
from fairqueue.queue.snapshot import jain_index
from faults.journal import read_journals

MIB = 1024 * 1024
# Until retention drops as much as comes in. Answers need two minutes: the first quarter's too.
WARM_S = 60.0
# A shorter quarter would hold less than one generation of `ops` (60 s), and say nothing.
LEAST_QUARTER_S = 60.0
LEAST_SAMPLES = 20  # in a quarter
HIGH = 0.9
# The allowance above the second quarter's high mark: a share of it, and an absolute amount.
SHARE = 0.1
SLACK_MIB, SLACK_ENTRIES, SLACK_ANSWERS = 3.0, 200, 0.3
# Most of what Redis holds are the answers of two minutes: more, when the machine becomes faster.
SLACK_REDIS_MIB = 8.0
# Schedulers and editors keep 20,000 definitions and 65,536 moments, and need long to have so many.
CACHING, CACHES_MIB, CACHES_MIB_H = ("scheduler", "editor"), 53.0, 6.0
ANSWERS_S = 120.0  # for which answers are kept at most
# Seconds over which backlogged users are compared, and how many turns each needs in them.
WINDOW_S, LEAST_TURNS = 10.0, 10

# With layout 2 the barrier is no hash, and nothing else grows in it.
MEASURED = {name: kind for name, kind in KEY_TYPES.items() if name != BARRIER}
_SIZE = {"hash": "HLEN", "zset": "ZCARD", "list": "LLEN", "string": "EXISTS"}

Series = list[tuple[float, float]]  # moment, value
Marks = tuple[float, float, float]  # of the last three quarters


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of Redis at one time. used: MiB. backlogged: users whose tasks wait for a worker.

    finished: tasks, since the beginning.
    """

    used: float
    keys: int
    entries: dict[str, int]
    finished: int
    backlogged: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample; at: seconds since 1970. memory: process -> MiB. data: None if Redis was down."""

    at: float
    memory: dict[str, float]
    data: Data | None


class Run(NamedTuple):
    """A task that was begun; late: seconds after the fire time of its schedule, if it has one."""

    at: float
    task_id: str
    user: str
    late: float | None


@dataclass(frozen=True, kw_only=True)
class Share:
    """How evenly backlogged users were served, relative to their entitlement."""

    at: float
    jain: float
    least: float
    most: float


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The high marks of a series in three quarters, and the limit for the last one."""

    name: str
    unit: str
    marks: Marks
    allowed: float

    @property
    def is_leak(self) -> bool:
        """Whether it grew too much and steadily: the effect of other load passes."""
        second, third, last = self.marks
        return second < third < last and last > self.allowed

    def __str__(self) -> str:
        second, _, last = self.marks
        return f"{self.name}: {second:,.1f} -> {last:,.1f} {self.unit}, {self.allowed:,.1f} allowed"


# --- samples --------------------------------------------------------------------------------------


def resident_mib(pid: int) -> float | None:
    """Return the private memory of a process, if the system reports it; None if it is gone.

    Pages of files, programs and libraries are not counted: a leak is not there.
    """
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    return None


def look(client: redis.Redis, keys: Keys) -> Data:
    """Read the data of a queue's server. Raises redis.RedisError."""
    with client.pipeline(transaction=False) as ask:
        for name, kind in MEASURED.items():
            ask.execute_command(_SIZE[kind], keys[name])
        ask.info("memory")
        ask.dbsize()
        ask.hget(keys["stats"], "finished")
        ask.zrange(keys["ready"], 0, -1)
        ask.zrange(keys["parked"], 0, -1)
        *sizes, memory, count, finished, ready, parked = ask.execute()
    return Data(
        used=memory["used_memory"] / MIB,
        keys=count,
        entries=dict(zip(MEASURED, sizes, strict=True)),
        finished=int(finished or 0),
        backlogged=frozenset(user.decode() for user in [*ready, *parked]),
    )


def read_runs(folder: Path) -> list[Run]:
    """Return the runs in the journals of a folder, in order."""
    return sorted(
        Run(at, task_id, user, late)
        for _, (kind, *fields) in read_journals(folder)
        if kind == "run"
        for task_id, user, at, late in [fields]
    )


# --- time and shares ------------------------------------------------------------------------------


def lateness(runs: Iterable[Run]) -> Series:
    """Return how late each task of a steady schedule was run, by the time of its first run."""
    first: dict[str, Run] = {}
    for run in runs:
        if run.late is not None and run.task_id.startswith("steady-"):
            first.setdefault(run.task_id, run)
    return [(run.at, run.late) for run in first.values() if run.late is not None]


def longest_trouble(late: Series, on_time: float = 1.0) -> float:
    """Return the longest time, in seconds, without a task of a schedule that ran on time."""
    good = [at for at, seconds in late if seconds <= on_time]
    return max((later - sooner for sooner, later in pairwise(good)), default=0.0)


def shares(
    runs: Sequence[Run], samples: Sequence[Sample], users: frozenset[str], begin: float, end: float
) -> list[Share]:
    """Compare users of the same weight that were backlogged throughout, window by window."""
    found = []
    for number in range(int((end - begin) / WINDOW_S)):
        since = begin + number * WINDOW_S
        busy = _backlogged(samples, since, since + WINDOW_S) & users
        first, last = (bisect_left(runs, (at,)) for at in (since, since + WINDOW_S))
        turns = Counter(run.user for run in runs[first:last])
        served = [turns[user] for user in busy]
        if len(served) < 2 or sum(served) < LEAST_TURNS * len(served):
            continue
        mean = sum(served) / len(served)
        found.append(
            Share(
                at=since + WINDOW_S / 2,
                jain=jain_index(served) or 0.0,
                least=min(served) / mean,
                most=max(served) / mean,
            )
        )
    return found


def _backlogged(samples: Sequence[Sample], since: float, until: float) -> frozenset[str]:
    seen = [s.data.backlogged for s in samples if s.data and since <= s.at < until]
    return frozenset.intersection(*seen) if len(seen) >= WINDOW_S / 2 else frozenset()


# --- flatness -------------------------------------------------------------------------------------


def memory_series(samples: Iterable[Sample]) -> dict[str, Series]:
    """MiB of each process, and of Redis' data."""
    series: dict[str, Series] = {}
    for sample in samples:
        for name, size in sample.memory.items():
            series.setdefault(name, []).append((sample.at, size))
        if sample.data is not None:
            series.setdefault("Redis", []).append((sample.at, sample.data.used))
    return series


def entry_series(samples: Iterable[Sample]) -> dict[str, Series]:
    """Entries of each key, and the number of keys; the generations of answers as one."""
    series: dict[str, Series] = {}
    for sample in samples:
        if sample.data is None:
            continue
        entries = dict(sample.data.entries)
        entries["ops"] += entries.pop("ops_before")
        for name, size in {**entries, "(keys)": sample.data.keys}.items():
            series.setdefault(name, []).append((sample.at, size))
    return series


def answer_series(samples: Iterable[Sample]) -> Series:
    """Return the number of kept answers per task finished in that time."""
    seen = [(s.at, s.data.finished, s.data.entries) for s in samples if s.data]
    moments = [at for at, _, _ in seen]
    series = []
    for at, finished, entries in seen:
        before = bisect_right(moments, at - ANSWERS_S) - 1
        if before >= 0 and finished > seen[before][1]:
            answers = entries["ops"] + entries["ops_before"]
            series.append((at, answers / (finished - seen[before][1])))
    return series


def judge(
    samples: Sequence[Sample], begin: float, end: float, ceilings: Mapping[str, int]
) -> list[Growth]:
    """Return the growth of all series that lasted; nothing if the soak was too short.

    ceilings: key -> entries that the data model allows, so that it may grow up to there.
    """
    begin += WARM_S
    if (end - begin) / 4 < LEAST_QUARTER_S:
        return []
    found = []

    def add(name: str, unit: str, series: Series, slack: float, ceiling: float = 0.0) -> None:
        if marks := _high_marks(series, begin, end):
            allowed = max(marks[0] * (1 + SHARE) + slack, ceiling)
            found.append(Growth(name=name, unit=unit, marks=marks, allowed=allowed))

    for name, series in memory_series(samples).items():
        add(name, "MiB", series, _slack(name, (end - begin) / 3600))
    entries = entry_series(samples)
    entries.pop("ops", None)  # so many as there were operations lately
    for name, series in entries.items():
        add(f"key {name}", "entries", series, SLACK_ENTRIES, ceilings.get(name, 0))
    add("key ops", "entries for each task", answer_series(samples), SLACK_ANSWERS)
    return found


def _slack(name: str, hours: float) -> float:
    if name == "Redis":
        return SLACK_REDIS_MIB
    if name.startswith(CACHING):
        return SLACK_MIB + min(CACHES_MIB, CACHES_MIB_H * hours / 2)
    return SLACK_MIB


def _high_marks(series: Series, begin: float, end: float) -> Marks | None:
    quarter = (end - begin) / 4
    marks = []
    if not series or series[0][0] > begin + 1.25 * quarter:
        return None  # a process that was started later warms up first
    for number in (1, 2, 3):
        since = begin + number * quarter
        values = [value for at, value in series if since <= at < since + quarter]
        if len(values) < LEAST_SAMPLES:
            return None
        marks.append(quantile(values, HIGH))
    second, third, last = marks
    return second, third, last


def quantile(values: Sequence[float], share: float) -> float:
    """Return a percentile of the values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
