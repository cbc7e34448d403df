"""A soak: `python -m faults.soak --minutes N [--seed S] [--publish]`: load for long, and faults.

The load is steady: every user has waiting tasks, and the workers are the bottleneck. So the data of
the queue, and the memory of its processes, must not grow. Exits with status 1 if something grew, or
if a guarantee was broken. Less than five minutes are too short to detect growth.
"""

import argparse
import math
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import redis
from prometheus_client import CollectorRegistry

from fairqueue.scheduler.scheduler import TaskScheduler
from faults.checker import Verdict, check_trimmed
from faults.measures import (
    Growth,
    Run,
    Sample,
    Series,
    Share,
    judge,
    lateness,
    longest_trouble,
    look,
    quantile,
    read_runs,
    resident_mib,
    shares,
)
from faults.profiles import ANYTHING
from faults.report import ROOT, publish, row_of, table
from faults.roles import Part
from faults.storm import STEADY, Player, Profile, Result, Storm

PICTURE = ROOT / "docs" / "images" / "soak.png"
SAMPLE_S = 1.0
USERS, EVEN = 24, 12  # how many there are, and how many of them keep their weight
WAITING = 40  # tasks of a user at most
BATCH = 20
PACE_S = 0.05  # of a task: with 3 workers of 4 threads 240 tasks a second at most
SCHEDULES = 30  # of the editor at most
EDITS_S = 1.0  # faster ones fill the caches of definitions, which looks like a leak
KEEP_FINISHED, KEEP_DEAD = 2_000, 50
# Limits from docs/data-model.md: entries of a schedule, and slots.
CEILINGS = {
    "moments": 200 * (STEADY + SCHEDULES),
    "changes": 50 * (STEADY + SCHEDULES),
    "samples": 600,
}


def profile_for(minutes: float) -> Profile:
    """All faults, one every three seconds."""
    return Profile(
        name="soak",
        faults=ANYTHING,
        seconds=60 * minutes,
        most_seconds=math.inf,
        gap=3.0,
        timeout=2.0,
    )


class Soak(Storm):
    """A long storm that samples memory and data each second."""

    def __init__(self, profile: Profile, seed: int, *, say: Callable[[str], None] = print) -> None:
        super().__init__(profile, seed, say=say)
        self.samples: list[Sample] = []
        self.marks: list[tuple[float, str]] = []
        self.began = self.ended = time.time()
        self._next = 0.0

    def _set_up(self) -> None:
        self.queue.configure(max_attempts=10_000, keep_finished=KEEP_FINISHED, keep_dead=KEEP_DEAD)
        for number in range(USERS):
            self.queue.set_user(f"user-{number}", max_waiting=WAITING)
        # Their own users: lateness then depends only on schedulers and shares.
        TaskScheduler(self.queue, registry=CollectorRegistry()).add_schedules(
            {"cron_expr": "* * * * * *", "user_id": f"clock-{n}", "schedule_id": f"steady-{n}"}
            for n in range(STEADY)
        )
        self.began = time.time()

    def _part(self, player: Player) -> Part:
        return replace(
            super()._part(player),
            users=USERS,
            even=EVEN,
            batch=BATCH,
            patient=False,
            pace=PACE_S,
            schedules=SCHEDULES,
            edits=EDITS_S,
        )

    def _strike_kill(self) -> bool:
        """SIGKILL of any actor but the first of each role, which live on, so that leaks show."""
        return self._kill(self.dice.choice([player for player in self.players if player.index]))

    def _strike(self, kind: str) -> bool:
        at = time.time()
        struck = super()._strike(kind)
        if struck:
            self.marks.append((at, kind))
        return struck

    def _pass_time(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            if now >= self._next:
                self._next = now + SAMPLE_S
                self._take_sample()
            super()._pass_time(max(0.0, min(end, self._next) - time.monotonic()))
            if time.monotonic() >= end:
                return

    def _take_sample(self) -> None:
        memory = {}
        for player in self.players:
            size = resident_mib(player.pid)
            if size is not None:
                memory[f"{player.role} {player.name}"] = size
        data = None
        with suppress(redis.RedisError):
            data = look(self.client, self.queue.keys)
        self.samples.append(Sample(at=time.time(), memory=memory, data=data))

    def _drain(self) -> list[str]:
        self.ended = time.time()
        return super()._drain()

    def _judge(self) -> Verdict:
        return check_trimmed(self.queue, self.folder)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The results of a soak. Times are seconds since 1970."""

    result: Result
    began: float
    ended: float
    samples: list[Sample]
    marks: list[tuple[float, str]]
    runs: list[Run]
    late: Series
    shares: list[Share]
    growths: list[Growth]

    @classmethod
    def of(cls, soak: Soak, result: Result) -> Self:
        """Read the folder of the soak, which must exist. Growth is added to the verdict."""
        runs = read_runs(soak.folder)
        even = frozenset(f"user-{number}" for number in range(EVEN))
        growths = judge(soak.samples, soak.began, soak.ended, CEILINGS)
        leaks = {str(growth) for growth in growths if growth.is_leak}
        result.verdict.grown = result.verdict.note("grew all the time", leaks)
        return cls(
            result=result,
            began=soak.began,
            ended=soak.ended,
            samples=soak.samples,
            marks=soak.marks,
            runs=runs,
            late=lateness(runs),
            shares=shares(runs, soak.samples, even, soak.began, soak.ended),
            growths=growths,
        )

    def measured(self) -> dict[str, Any]:
        """Return the results as numbers."""
        late = [seconds for _, seconds in self.late]
        jain = [share.jain for share in self.shares]
        return {
            "tasks_per_s": round(len(self.runs) / (self.ended - self.began), 1),
            "late_s": _spread(late, (0.5, 0.99, 1.0)),
            "longest_trouble_s": round(longest_trouble(self.late), 2),
            "jain": _spread(jain, (0.5, 0.0)),
            "growth": {
                growth.name: [round(growth.marks[0], 1), round(growth.marks[-1], 1)]
                for growth in self.growths
            },
        }


def _spread(values: list[float], parts: tuple[float, ...]) -> dict[str, float]:
    names = {0.0: "least", 0.5: "median", 0.99: "p99", 1.0: "most"}
    return {names[part]: round(quantile(values, part), 4) for part in parts if values}


def describe(record: Record) -> str:
    """Return the results as text."""
    numbers = record.measured()
    lines = [
        f"{numbers['tasks_per_s']} tasks a second",
        f"late by s, of {len(record.late)} fires: {numbers['late_s']}; longest time without one "
        f"that was run within a second: {numbers['longest_trouble_s']} s",
        f"Jain index of {len(record.shares)} windows: {numbers['jain']}",
    ]
    if not record.growths:
        lines.append("too short to say whether anything grows")
    for growth in record.growths:
        # Keys with almost no entries are left out.
        if growth.unit != "entries" or growth.marks[-1] >= 100 or growth.is_leak:
            lines.append(f"{'GREW' if growth.is_leak else 'flat'}  {growth}")
    return "\n".join(f"  {line}" for line in lines)


def run_soak(minutes: float, seed: int, *, say: Callable[[str], None] = print) -> Record:
    """Run a soak and print its results."""
    with Soak(profile_for(minutes), seed, say=say) as soak:
        return Record.of(soak, soak.run())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="default: drawn at random, and printed")
    parser.add_argument("--publish", action="store_true", help="write to docs/reliability.md")
    options = parser.parse_args()
    if not 0 < options.minutes < math.inf:
        parser.error(f"--minutes {options.minutes} makes no sense: such as 10, or 0.3")
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    record = run_soak(options.minutes, seed, say=lambda line: print(line, flush=True))
    from faults.picture import draw

    result = {**record.result.as_dict(), "measured": record.measured()}
    picture = PICTURE if options.publish else Path(tempfile.mkdtemp(prefix="soak-")) / "soak.png"
    draw(record, picture)
    if options.publish:
        publish([result])
    print(describe(record))
    for line in record.result.verdict.details:
        print(f"  {line}")
    print(f"\n{table([row_of(result)])}")
    print(f"picture: {picture}")
    print(f"violations: {record.result.violations}, seed {seed}")
    sys.exit(1 if record.result.violations else 0)


if __name__ == "__main__":
    main()
