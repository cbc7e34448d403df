"""Compare what was acknowledged to the actors with the drained queue, by set algebra.

    lost        acknowledged, and not among the tasks that have ended
    unexpected  present, but never pushed, or refused
    duplicated  enqueued more often than there are tasks
    doubled     completed more than once
    stale       done by a leader after its term, or by a worker without its lease
    crowded     more tasks of a key ran than it has slots, or two with a unique key were unfinished
    wrong       an answer to an actor that cannot be true

It also compares the structures of the queue with each other, the counters with what they count, and
each fire time of a schedule with its outcome.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from prometheus_client import CollectorRegistry

from fairqueue.doctor import OK, Records
from fairqueue.link.connection import Link
from fairqueue.models import ScheduledTask
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from faults.flow import Evidence
from faults.journal import read_journals
from faults.witness import Testimony

EXAMPLES = 5  # examples of each kind of violation in a verdict
SCAN = 1000

_STATE = re.compile(rb'"state":"(\w+)"')
_FIRE = re.compile(r":\d{12,}$")
# The counters of a queue, and the state of the tasks they count.
_COUNTED = {"finished": "finished", "buried": "buried", "cancelled": "cancelled"}


@dataclass
class Told(Testimony):
    """The contents of the journals."""

    intended: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    runs: Counter[str] = field(default_factory=Counter)
    completed: Counter[str] = field(default_factory=Counter)
    adding: set[str] = field(default_factory=set)
    added: set[str] = field(default_factory=set)
    cancelling: set[str] = field(default_factory=set)
    removing: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)  # another task had the unique key

    @classmethod
    def read(cls, folder: Path) -> "Told":
        """Read all journals of a folder."""
        told = cls()
        for actor, (kind, *fields) in read_journals(folder):
            getattr(told, f"_{kind}")(actor, *fields)
        return told

    def may_fire(self, schedule_id: str) -> bool:
        """Whether it is a schedule of the storm itself, or an actor tried to add it."""
        return schedule_id.startswith("steady-") or schedule_id in self.adding

    def _push(self, actor: str, first: int, count: int, outcome: str) -> None:
        ids = {f"{actor}.{number}" for number in range(first, first + count)}
        if outcome == "intent":
            self.intended |= ids
        elif outcome == "ok":
            self.acknowledged |= ids
        elif outcome == "failed":
            self.refused |= ids

    def _uniques(self, actor: str, at_ms: int, answers: dict[str, str]) -> None:
        self.ignored |= {task_id for task_id, answer in answers.items() if answer != task_id}

    def _left(self, actor: str, task_id: str, at_ms: int) -> None:
        """Keep the end of a run for `faults.flow`."""

    def _killed(self, actor: str, name: str, at_ms: int) -> None:
        """Keep the death of an actor for `faults.flow`."""

    def _run(self, actor: str, task_id: str, user: str, at: float, late: float | None) -> None:
        self.runs[task_id] += 1

    def _done(self, actor: str, task_ids: list[str]) -> None:
        self.completed.update(task_ids)

    def _cancel(self, actor: str, task_id: str) -> None:
        self.cancelling.add(task_id)

    def _add(self, actor: str, schedule_id: str, outcome: str) -> None:
        (self.added if outcome == "ok" else self.adding).add(schedule_id)

    def _remove(self, actor: str, schedule_id: str, outcome: str) -> None:
        (self.removed if outcome == "ok" else self.removing).add(schedule_id)


@dataclass(kw_only=True)
class Verdict:
    """The result of a storm."""

    tasks: int = 0
    fires: int = 0
    missed: int = 0
    runs: int = 0
    repeated_runs: int = 0
    acknowledged: int = 0
    lost: int = 0
    unexpected: int = 0
    duplicated: int = 0
    doubled: int = 0
    repeated_completions: int = 0
    unfinished: int = 0
    schedules_wrong: int = 0
    disagreements: int = 0
    stale: int = 0
    crowded: int = 0
    wrong: int = 0
    grown: int = 0
    details: list[str] = field(default_factory=list)

    def violations(self, *, durable: bool) -> int:
        """How many guarantees were broken; without durability, losses do not count."""
        always = (
            self.unexpected
            + self.duplicated
            + self.doubled
            + self.unfinished
            + self.schedules_wrong
            + self.disagreements
            + self.stale
            + self.crowded
            + self.wrong
            + self.grown
        )
        return always + (self.lost + self.repeated_completions if durable else 0)

    def __add__(self, other: "Verdict") -> "Verdict":
        """Return the sum of two verdicts."""
        mine, theirs = vars(self), vars(other)
        return Verdict(**{name: mine[name] + theirs[name] for name in mine})

    def note(self, what: str, examples: set[str]) -> int:
        """Keep some examples; return how many violations there are."""
        if examples:
            shown = ", ".join(sorted(examples)[:EXAMPLES])
            self.details.append(f"{len(examples)} {what}: {shown}")
        return len(examples)


def check(
    queue: TaskQueue,
    folder: Path,
    *,
    durable: bool = True,
    steady_clock: bool = True,
    direct: bool = False,
    calm: bool = False,
    lease_ms: int | None = None,
) -> Verdict:
    """Judge a drained queue by the journals of a folder.

    Without durability acknowledged operations may be lost; without a steady clock the number of
    fire times is unknown. direct: no command can be delayed for long, so that the actors know when
    their terms end. calm: no actor was killed or stopped, so that no lease has expired. lease_ms:
    of the workers, if tasks have keys and unique keys.
    """
    told, states = Told.read(folder), dict(_states(queue.link))
    fired = {task_id for task_id in states if _FIRE.search(task_id)}
    pushed = states.keys() - fired
    verdict = Verdict(
        tasks=len(states),
        fires=len(fired),
        runs=told.runs.total(),
        repeated_runs=told.runs.total() - len(told.runs),
        acknowledged=len(told.acknowledged),
    )
    verdict.lost = verdict.note("lost", told.acknowledged - told.ignored - pushed)
    never_meant = pushed - told.intended
    only_refused = told.refused - told.acknowledged
    verdict.unexpected = verdict.note("unexpected", never_meant | (only_refused & pushed))
    ended = {task_id for task_id, state in states.items() if state in _COUNTED}
    verdict.unfinished = verdict.note("not ended", states.keys() - ended)
    finished = {task_id for task_id, state in states.items() if state == "finished"}
    verdict.unfinished += verdict.note("finished and never run", finished - told.runs.keys())
    twice = {task_id for task_id, count in told.completed.items() if count > 1}
    verdict.repeated_completions = verdict.note("acknowledged as completed twice", twice)
    if durable:
        unknown = told.completed.keys() - finished
        verdict.lost += verdict.note("completions lost", unknown)
    _check_counters(queue, states, verdict)
    there = _schedules(queue)
    if durable:
        _check_lost_schedules(told, there, verdict)
        _check_rights(told, folder, verdict, terms=steady_clock, direct=direct)
        verdict.wrong = verdict.note("wrong answers", told.wrong)
    if calm:
        _check_leases(queue, verdict)
    if lease_ms is not None:
        _check_flow(Evidence.read(folder, lease_ms), pushed, verdict)
    strangers = {task_id for task_id in fired if not told.may_fire(_FIRE.sub("", task_id))}
    verdict.unexpected += verdict.note("fires of schedules that nobody added", strangers)
    _check_moments(there, fired, verdict, steady_clock=steady_clock)
    _check_structures(queue, verdict)
    return verdict


def check_trimmed(queue: TaskQueue, folder: Path) -> Verdict:
    """Judge a queue whose retention drops ended tasks, which are known only by the journals.

    A missing task has run, or an actor tried to cancel it. Exactly as many tasks have ended as were
    enqueued; no more were finished than have run, and no fewer than were acknowledged.
    """
    told, states = Told.read(folder), dict(_states(queue.link))
    counters = Counter(queue.inspect().counters)
    seen = told.runs.keys() | states.keys()
    fired = {task_id for task_id in seen if _FIRE.search(task_id)}
    only_refused = told.refused - told.acknowledged
    verdict = Verdict(
        tasks=counters["pushed"],
        fires=len(fired),
        runs=told.runs.total(),
        repeated_runs=told.runs.total() - len(told.runs),
        acknowledged=len(told.acknowledged),
    )
    verdict.lost = verdict.note("lost", told.acknowledged - seen - told.cancelling)
    unmeant = seen - fired - told.intended
    verdict.unexpected = verdict.note("unexpected", unmeant | (only_refused & seen))
    open_ones = {task_id for task_id, state in states.items() if state not in _COUNTED}
    verdict.unfinished = verdict.note("not ended", open_ones)
    finished = {task_id for task_id, state in states.items() if state == "finished"}
    verdict.unfinished += verdict.note("finished and never run", finished - told.runs.keys())
    twice = {task_id for task_id, count in told.completed.items() if count > 1}
    verdict.repeated_completions = verdict.note("acknowledged as completed twice", twice)
    undone = (told.completed.keys() & states.keys()) - finished
    verdict.lost += verdict.note("completions lost", undone)
    _check_sums(counters, told, fired, verdict)
    there = _schedules(queue)
    _check_lost_schedules(told, there, verdict)
    _check_rights(told, folder, verdict, terms=True, direct=False)
    verdict.wrong = verdict.note("wrong answers", told.wrong)
    _check_moments(there, fired, verdict, steady_clock=True)
    _check_structures(queue, verdict)
    return verdict


def _check_rights(told: Told, folder: Path, verdict: Verdict, *, terms: bool, direct: bool) -> None:
    """Check that no actor acted without the right to, by its answers."""
    verdict.stale = verdict.note("acts without a lease", told.without_lease(folder))
    if terms:
        verdict.stale += verdict.note("terms of two leaders", told.two_leaders())
    if terms and direct:
        verdict.stale += verdict.note("acts after the end of a term", told.late)


def _check_flow(evidence: Evidence, pushed: set[str], verdict: Verdict) -> None:
    """Check that keys and unique keys had no more tasks at a time than they may."""
    verdict.crowded = verdict.note("times a key had more tasks than slots", evidence.over())
    verdict.crowded += verdict.note("unique keys with two unfinished tasks", evidence.twice())
    stored = pushed & (evidence.ignored.keys() - evidence.stored.keys())
    verdict.crowded += verdict.note("stored although another task had the key", stored)
    verdict.wrong += verdict.note("pushes with a wrong answer", evidence.wrong_answers())
    if not evidence.runs or not evidence.ignored:
        verdict.unfinished += 1
        verdict.details.append("no run with a lease, or no push that found another task")


def _check_leases(queue: TaskQueue, verdict: Verdict) -> None:
    """Check that all claimed tasks reached the worker that claimed them."""
    expired = queue.inspect().counters.get("expired", 0)
    if expired:
        verdict.wrong += expired
        verdict.details.append(f"{expired} leases ended although all their workers lived")


def _check_sums(counters: Counter[str], told: Told, fired: set[str], verdict: Verdict) -> None:
    ended = sum(counters[counter] for counter in _COUNTED.values())
    if counters["fired"] != len(fired):
        verdict.duplicated += abs(counters["fired"] - len(fired))
        verdict.details.append(f"{counters['fired']} fires were counted, {len(fired)} seen")
    possible = len(told.intended - (told.refused - told.acknowledged)) + len(fired)
    if counters["pushed"] > possible:
        verdict.duplicated += counters["pushed"] - possible
        verdict.details.append(f"{counters['pushed']} enqueued, of {possible} at most")
    if counters["pushed"] != ended:
        verdict.doubled += abs(counters["pushed"] - ended)
        verdict.details.append(f"{counters['pushed']} enqueued, {ended} ended")
    if not len(told.completed) <= counters["finished"] <= len(told.runs):
        verdict.doubled += 1
        verdict.details.append(
            f"counted {counters['finished']} finished, {len(told.completed)} were acknowledged "
            f"and {len(told.runs)} have run"
        )


def _states(link: Link) -> Iterator[tuple[str, str]]:
    cursor: bytes | str = "0"
    while True:
        cursor, found = link.ask(("HSCAN", link.keys["status"], cursor, "COUNT", SCAN))[0]
        for task_id, record in zip(found[::2], found[1::2], strict=True):
            match = _STATE.search(record)
            yield task_id.decode(), match[1].decode() if match else "unreadable"
        if cursor == b"0":
            return


def _check_counters(queue: TaskQueue, states: dict[str, str], verdict: Verdict) -> None:
    """Compare the counters with the tasks; nothing is trimmed here."""
    counters = queue.inspect().counters
    verdict.duplicated = abs(counters.get("pushed", 0) - len(states))
    if verdict.duplicated:
        verdict.details.append(f"{counters.get('pushed', 0)} enqueued, {len(states)} tasks")
    there = Counter(states.values())
    for state, counter in _COUNTED.items():
        if counters.get(counter, 0) != there[state]:
            verdict.doubled += abs(counters.get(counter, 0) - there[state])
            verdict.details.append(
                f"counted {counters.get(counter, 0)} {counter}, {there[state]} are there"
            )


def _schedules(queue: TaskQueue) -> dict[str, ScheduledTask]:
    scheduler = TaskScheduler(queue, "checker", registry=CollectorRegistry())
    there, cursor = {}, None
    while True:
        page = scheduler.list_schedules(limit=1000, cursor=cursor)
        there.update({schedule.schedule_id: schedule for schedule in page})
        cursor = page.cursor
        if cursor is None:
            return there


def _check_lost_schedules(told: Told, there: dict[str, ScheduledTask], verdict: Verdict) -> None:
    """Check that added schedules exist, unless removed, and removed ones do not."""
    kept = told.added - told.removing
    verdict.lost += verdict.note("schedules lost", kept - there.keys())
    verdict.unexpected += verdict.note("schedules not removed", told.removed & there.keys())


def _check_moments(
    there: dict[str, ScheduledTask], fired: set[str], verdict: Verdict, *, steady_clock: bool
) -> None:
    """Check that each fire time was fired once, or counted as missed."""
    by_schedule = Counter(_FIRE.sub("", task_id) for task_id in fired)
    wrong = set()
    for name, schedule in there.items():
        runs, missed = schedule.run_count, schedule.missed_count
        verdict.missed += missed
        if runs != by_schedule[name]:
            wrong.add(f"{name} counts {runs} runs, {by_schedule[name]} are there")
        # The schedules of the storm itself never change: they fire once a second.
        if steady_clock and name.startswith("steady-") and schedule.last_run is not None:
            first = schedule.created_at.replace(microsecond=0) + timedelta(seconds=1)
            moments = round((schedule.last_run - first).total_seconds()) + 1
            if runs + missed != moments:
                wrong.add(f"{name}: {moments} moments, {runs} fired, {missed} missed")
    verdict.schedules_wrong = verdict.note("schedules whose moments do not add up", wrong)


def _check_structures(queue: TaskQueue, verdict: Verdict) -> None:
    for finding in Records(queue.link, fix=False).compare():
        if finding.level != OK:
            verdict.disagreements += 1
            verdict.details.append(f"{finding.check}: {finding.text}")
