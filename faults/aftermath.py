"""Find what is wrong after a process has died and others have taken over.

The journal of the dead process is compared with the queue: acknowledged operations happened,
operations without an answer happened completely or not at all, and nothing else happened.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import redis
from prometheus_client import CollectorRegistry

from fairqueue.access.audit import AuditLog
from fairqueue.access.credentials import AccessStore, id_of
from fairqueue.access.idempotency import ReplyStore
from fairqueue.clock import ManualClock
from fairqueue.doctor import OK, Records
from fairqueue.errors import BrokenRecord, FairQueueError
from fairqueue.link.keys import KEY_TYPES, Keys
from fairqueue.link.owners import Owner
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules.outcomes import MAX_MOMENTS
from fairqueue.schedules.service import Schedules
from faults.tour import POOL, START_S, TERM_S, Tour, Value

ROUNDS, ROUND_S = 4, 61.0  # beyond all leases, terms and delays of the tours
MOST_CLAIMS = 200  # more claims than this mean that tasks come back for ever
RESERVED: Value = {"state": "running", "status": 0}
TERMINAL = ("finished", "cancelled", "buried")
PAST_S = 200.0  # how long before the tours the examined fire times begin


@dataclass(slots=True)
class Verdict:
    """A violation, in words."""

    lost: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    double_completions: list[str] = field(default_factory=list)
    inconsistent: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # of the tour itself

    def by_kind(self) -> dict[str, list[str]]:
        return {name: texts for name, texts in asdict(self).items() if texts}


# --- the journal ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Journal:
    """What a process attempted, and what was acknowledged.

    values: the possible values of each register. together: registers that must all have their old
    or all have their new values. tasks: the fields of attempted tasks. dropped: attempted
    deletions; gone: acknowledged ones.
    """

    clock_ms: int = round(START_S * 1000)
    error: str = ""
    killed: bool = False
    passed: list[tuple[str, str, int]] = field(default_factory=list)
    pending: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    schedules: set[str] = field(default_factory=set)
    triggers: Counter[str] = field(default_factory=Counter)
    triggered: Counter[str] = field(default_factory=Counter)
    revived: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    resumed: set[str] = field(default_factory=set)
    spoiled: set[str] = field(default_factory=set)
    values: dict[str, list[Value]] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    destroyed: list[tuple[str, set[int]]] = field(default_factory=list)

    @classmethod
    def read(cls, text: bytes) -> "Journal":
        """Read a journal; an incomplete last line is ignored."""
        journal = cls()
        operations: dict[int, dict[str, Any]] = {}
        for line in text.splitlines(keepends=True):
            if line.endswith(b"\n"):
                journal._add(json.loads(line), operations)
        for operation in operations.values():
            journal._settle(operation, {}, "unknown")
            journal.pending = operation
        return journal

    def _add(self, line: list[Any], operations: dict[int, dict[str, Any]]) -> None:
        kind, *rest = line
        if kind == "clock":
            self.clock_ms = rest[0]
        elif kind == "try":
            operations[rest[0]] = rest[1]
        elif kind == "ok":
            self._settle(operations.pop(rest[0]), rest[1], "done")
        elif kind == "refused":
            self._settle(operations.pop(rest[0]), {}, "refused")
        elif kind == "secret":
            self.secrets[rest[0]] = rest[1]
        elif kind == "passed":
            self.passed = [tuple(each) for each in rest[0]]
        elif kind == "error":
            self.error = rest[0]

    def _settle(self, tried: dict[str, Any], told: dict[str, Any], outcome: str) -> None:
        """Record the possible effects of an operation that was "done", "unknown" or "refused"."""
        done = outcome == "done"
        ids = {task["task_id"]: task for task in tried.get("tasks", ())}
        if outcome == "refused":
            self.refused |= ids.keys()
            return
        self.tasks |= ids
        if done:
            self.acknowledged |= {*ids, *told.get("stored", ())}
            self.ended |= told.get("ended", {})
            self.gone |= set(told.get("dropped", ()))
        self.dropped |= set(tried.get("drops", ()))
        self.triggers.update(tried.get("triggers", ()))
        self.triggered.update(tried.get("triggers", ()) if done else ())
        self.revived |= set(tried.get("revives", ()))
        self.filled |= set(tried.get("fills", ()))
        self.resumed |= set(tried.get("resumes", ()))
        self.spoiled |= set(tried.get("spoiled", ()))
        if "destroys" in tried:
            name, keys = tried["destroys"]
            self.destroyed.append((name, {0} if done else {0, keys}))
        for register, (before, after) in tried.get("sets", {}).items():
            self.values[register] = [after] if done else [before, after]
            if register.startswith("schedule/"):
                self.schedules.add(register.partition("/")[2])


# --- judging --------------------------------------------------------------------------------------


def judge(client: redis.Redis, name: str, journal: Journal, tour: Tour, *, repeat: bool) -> Verdict:
    """Examine what a dead process left, recover as others would, examine again, and delete it.

    `repeat`: the process is started again, and pushes again what was not acknowledged.
    """
    clock = ManualClock(journal.clock_ms / 1000)
    with TaskQueue(client, name, clock=clock) as queue:
        try:
            return _Judge(queue, clock, journal, tour).judge(repeat)
        finally:
            queue.destroy()


class _Judge:
    def __init__(self, queue: TaskQueue, clock: ManualClock, journal: Journal, tour: Tour) -> None:
        self._queue = queue
        self._clock = clock
        self._journal = journal
        self._tour = tour
        self._schedules = Schedules(queue)
        self._store = self._schedules.store
        self._verdict = Verdict()

    def judge(self, repeat: bool) -> Verdict:
        self._unspoil()
        if self._tour.mends:
            Records(self._queue.link, fix=True).compare()
        self._check_records("when it died")
        self._check_together()
        self._check_registers()
        self._check_destroyed()
        if repeat:
            self._repeat()
        self._recover()
        self._check_records("after all")
        state = State.read(self._queue)
        check_tasks(self._journal, state, self._verdict)
        self._check_schedules(state)
        return self._verdict

    def _unspoil(self) -> None:
        """Delete foreign data in place of a key of the queue."""
        link = self._queue.link
        for name in self._tour.spoils:
            kind = link.ask(("TYPE", link.keys[name]))[0].decode()
            if kind not in ("none", KEY_TYPES[name]):
                link.ask(("UNLINK", link.keys[name]))

    def _check_records(self, when: str) -> None:
        for finding in Records(self._queue.link, fix=False).compare():
            if finding.level != OK:
                text = f"{when}, {finding.check}: {finding.text}"
                self._verdict.inconsistent.append(text)

    # --- values -----------------------------------------------------------------------------------

    def _check_together(self) -> None:
        """Check that an operation was applied completely or not at all."""
        pending = self._journal.pending
        ids = [task["task_id"] for task in pending.get("tasks", ())]
        stored = [self._queue.get(task_id) is not None for task_id in ids]
        registers = pending.get("together", ())
        stored += [self._store.get(_key(each)) is not None for each in registers]
        if len(set(stored)) > 1:
            text = f"{stored.count(True)} of {len(stored)} were stored: {ids or registers}"
            self._verdict.inconsistent.append(text)

    def _check_registers(self) -> None:
        registers = self._journal.values
        # Trying a login uses it up and changes keys, so keys come first.
        for register in sorted(registers, key=lambda each: each.startswith("login/")):
            found = self._read_register(register)
            allowed = [self._free(register, value) for value in registers[register]]
            if any(_matches(found, value) for value in allowed):
                continue
            verdict = self._verdict
            kind = verdict.lost if found is None else verdict.inconsistent
            if found is not None and allowed == [None]:
                kind = verdict.unexpected
            kind.append(f"{register} is {found}, not {' or '.join(map(str, allowed))}")

    def _free(self, register: str, value: Value) -> Value:
        """Return the expected value, without a pause, which may have ended."""
        if value is None or _key(register) not in self._journal.resumed:
            return value
        return {name: each for name, each in value.items() if name != "is_active"}

    def _read_register(self, register: str) -> Value:
        return _READERS[register.partition("/")[0]](self, _key(register))

    def _read_user(self, user_id: str) -> Value:
        found = asdict(self._queue.get_user(user_id))
        del found["paused_at"]  # the server's time
        return found

    def _read_limits(self, name: str) -> Value:
        limits = self._queue.get_limits().get(name)
        return None if limits is None else asdict(limits)

    def _read_settings(self, _: str) -> Value:
        return asdict(self._queue.settings())

    def _read_schedule(self, schedule_id: str) -> Value:
        if schedule_id in self._journal.spoiled:
            return self._journal.values[f"schedule/{schedule_id}"][-1]
        task = self._store.get(schedule_id)
        return None if task is None else asdict(task)

    def _read_key(self, name: str) -> Value:
        keys = AccessStore(self._queue.link).keys()
        return {"count": sum(each.name == name for each in keys)}

    def _read_session(self, _: str) -> Value:
        key_id = id_of(self._journal.secrets["session"]) or ""
        return {"holds": key_id in AccessStore(self._queue.link).holding([key_id])}

    def _read_login(self, _: str) -> Value:
        access = AccessStore(self._queue.link)
        return {"used": access.redeem(self._journal.secrets["login"]) is None}

    def _read_reply(self, key: str) -> Value:
        begun = ReplyStore(self._queue.link).begin(key, "digest")
        return {"state": begun.state, "status": begun.status}

    def _read_audit(self, target: str) -> Value:
        entries = AuditLog(self._queue.link).entries(target=target)
        return {"outcome": entries[0].outcome} if len(entries) else None

    def _check_destroyed(self) -> None:
        for name, allowed in self._journal.destroyed:
            keys = Keys(name).all()
            (count,) = self._queue.link.ask(("EXISTS", *keys))
            if count not in allowed:
                text = f"queue {name!r} has {count} keys, not {allowed}"
                self._verdict.inconsistent.append(text)
            self._queue.link.ask(("UNLINK", *keys))

    # --- recovering -------------------------------------------------------------------------------

    def _repeat(self) -> None:
        """Push again tasks without an answer: each must remain one task."""
        tasks = [Task.create(**spec) for spec in self._journal.pending.get("tasks", ())]
        with suppress(FairQueueError):  # the queue is full
            self._queue.push_many(tasks)
            self._journal.acknowledged |= {task.task_id for task in tasks}

    def _recover(self) -> None:
        """Remove limits; another scheduler leads after the term, and workers run the tasks."""
        self._lift_limits()
        tick = self._heir()
        tick()
        for _ in range(ROUNDS):
            self._clock.advance(ROUND_S)
            if not tick():
                self._verdict.lost.append("nobody could lead after the term was over")
            self._drain()
        self._check_reserved()

    def _heir(self) -> Callable[[], bool]:
        """Act as another scheduler; True if it leads, or if there are no schedules."""
        link = self._queue.link
        if not any(link.ask(*(("EXISTS", link.keys[name]) for name in ("schedules", "leader")))):
            return lambda: True
        scheduler = TaskScheduler(
            self._queue, "heir", lock_timeout=TERM_S, registry=CollectorRegistry()
        )
        return lambda: scheduler.tick().is_leader

    def _check_reserved(self) -> None:
        for register in self._journal.values:
            if register.startswith("reply/") and self._read_register(register) == RESERVED:
                self._verdict.lost.append(f"{register} is reserved for an owner who is gone")

    def _lift_limits(self) -> None:
        link = self._queue.link
        users, names = link.ask(("HGETALL", link.keys["users"]), ("HGETALL", link.keys["limits"]))
        free: dict[str, Any] = {"max_running": None, "max_waiting": None, "rate": None}
        for key in users[::2]:
            owner = Owner.of_key(key.decode())
            if owner.tenant is not None and owner.is_tenant:
                self._queue.set_tenant(owner.tenant, **free, paused=False)
            else:
                self._queue.set_user(owner.user_id, tenant=owner.tenant, **free, paused=False)
        for name in names[::2]:
            if name.decode().isprintable():
                self._queue.set_limits(name.decode())

    def _drain(self) -> None:
        for _ in range(MOST_CLAIMS):
            claims = self._queue.claim("heir", limit=1000, pools=("default", POOL))
            if not claims:
                return
            self._queue.finish_many((claim, {"by": "heir"}) for claim in claims)
        self._verdict.duplicated.append(f"tasks come back for ever, after {MOST_CLAIMS} claims")

    # --- schedules --------------------------------------------------------------------------------

    def _check_schedules(self, state: "State") -> None:
        self._check_set_aside()
        for schedule_id in self._journal.schedules - self._journal.spoiled:
            with suppress(BrokenRecord):
                if self._store.get(schedule_id) is not None:
                    self._check_moments(schedule_id, state)

    def _check_set_aside(self) -> None:
        """Check that corrupted schedules are reported as problems."""
        told = {problem.schedule_id for problem in self._store.problems()}
        for schedule_id in self._journal.spoiled - told:
            self._verdict.lost.append(f"schedule {schedule_id!r} is spoilt and not set aside")
        for schedule_id in told - self._journal.spoiled:
            self._verdict.inconsistent.append(f"schedule {schedule_id!r} was set aside")

    def _check_moments(self, schedule_id: str, state: "State") -> None:
        """Check that each fire time was fired, or that the reason is known."""
        end = self._clock.now_ms() / 1000 + 0.001
        fired = 0
        for moment in self._schedules.moments(schedule_id, START_S - PAST_S, end, MAX_MOMENTS):
            what = f"moment {moment.at.isoformat()} of schedule {schedule_id!r}"
            has_task = moment.task_id in state.records
            if moment.outcome in ("planned", "unplanned", "unknown"):
                self._verdict.lost.append(f"{what} is {moment.outcome}")
            elif moment.outcome in ("fired", "backfilled"):
                fired += moment.outcome == "fired"
                if not has_task:
                    self._verdict.lost.append(f"{what} was {moment.outcome} and has no task")
            elif has_task:
                self._verdict.unexpected.append(f"{what} is {moment.outcome} and has a task")
        task = self._store.get(schedule_id)
        if task is not None and task.run_count != fired:
            text = f"schedule {schedule_id!r} counts {task.run_count} runs, and {fired} were fired"
            self._verdict.duplicated.append(text)


_READERS: dict[str, Callable[[_Judge, str], Value]] = {
    "user": _Judge._read_user,
    "limits": _Judge._read_limits,
    "settings": _Judge._read_settings,
    "schedule": _Judge._read_schedule,
    "key": _Judge._read_key,
    "session": _Judge._read_session,
    "login": _Judge._read_login,
    "reply": _Judge._read_reply,
    "audit": _Judge._read_audit,
}


def _key(register: str) -> str:
    return register.partition("/")[2]


def _matches(found: Value, expected: Value) -> bool:
    """Whether a register has the expected fields, and maybe more."""
    if found is None or expected is None:
        return found is expected
    return all(found.get(name) == value for name, value in expected.items())


# --- tasks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The tasks of a queue: their records, how many were ever stored, and the counters."""

    records: dict[str, dict[str, Any]]
    stored: int
    counters: dict[str, int]

    @classmethod
    def read(cls, queue: TaskQueue) -> "State":
        keys = queue.keys
        records, stored, counters = queue.link.ask(
            ("HGETALL", keys["status"]), ("HGET", keys["fair"], "seq"), ("HGETALL", keys["stats"])
        )
        return cls(
            records={name: json.loads(text) for name, text in _pairs(records)},
            stored=int(stored or 0),
            counters={name: int(text) for name, text in _pairs(counters)},
        )


def _pairs(flat: list[bytes]) -> Iterable[tuple[str, str]]:
    texts = [each.decode() for each in flat]
    return zip(texts[::2], texts[1::2], strict=True)


def check_tasks(journal: Journal, state: State, verdict: Verdict) -> None:
    """Compare the tasks, when all have ended, with the journal."""
    _check_lost(journal, state, verdict)
    _check_unexpected(journal, state, verdict)
    _check_counts(journal, state, verdict)


def _check_lost(journal: Journal, state: State, verdict: Verdict) -> None:
    for task_id in sorted(journal.acknowledged - journal.dropped):
        if task_id not in state.records:
            verdict.lost.append(f"task {task_id!r} is gone")
    for task_id, record in state.records.items():
        if record["state"] not in TERMINAL:
            verdict.lost.append(f"task {task_id!r} is still {record['state']}")
    for task_id, end in journal.ended.items():
        found = state.records.get(task_id)
        if found is None:
            continue  # lost, which was reported above, or dropped
        result = json.loads(found["result"]) if "result" in found else None
        if found["state"] != end["state"] or end.get("result", result) != result:
            text = f"task {task_id!r} had ended as {end}, and is {found['state']}, {result}"
            verdict.double_completions.append(text)


def _check_unexpected(journal: Journal, state: State, verdict: Verdict) -> None:
    manual: Counter[str] = Counter()
    again = {
        state.records[each].get("retried_as") for each in journal.revived & state.records.keys()
    }
    known = {*journal.tasks, *journal.acknowledged, *again} - journal.gone
    for task_id, record in state.records.items():
        schedule_id = record.get("schedule")
        if schedule_id is not None and schedule_id in journal.schedules:
            manual[schedule_id] += not task_id.startswith(f"{schedule_id}:")
        elif task_id not in known:
            verdict.unexpected.append(f"task {task_id!r} was never pushed, or was dropped")
    for schedule_id in journal.triggers | manual:
        least, most = journal.triggered[schedule_id], journal.triggers[schedule_id]
        if not least <= manual[schedule_id] <= most:
            text = f"schedule {schedule_id!r} was triggered {manual[schedule_id]} times"
            kind = verdict.lost if manual[schedule_id] < least else verdict.duplicated
            kind.append(f"{text}, not {least} to {most}")


def _check_counts(journal: Journal, state: State, verdict: Verdict) -> None:
    """Check that each task was stored once and ended once, including dropped ones."""
    dropped = len(journal.dropped - state.records.keys())
    if state.stored != len(state.records) + dropped:
        text = f"{state.stored} tasks were stored, and {len(state.records)} + {dropped} are known"
        verdict.duplicated.append(text)
    states = Counter(record["state"] for record in state.records.values())
    ended = sum(state.counters.get(name, 0) for name in TERMINAL)
    if ended != sum(states[name] for name in TERMINAL) + dropped:
        text = f"{ended} ends were counted, of {dict(states)} tasks and {dropped} dropped ones"
        verdict.double_completions.append(text)
