"""The real queue, on a real server, does what the plain model says, whatever the order of events.

Hypothesis makes up sequences of calls, clock jumps, lost replies and restarts; after every step the
answers, the contents of every Redis key and what can be recomputed from them are compared with the
model. `FAIRQUEUE_MODEL_EXAMPLES=2000 pytest tests/proof/test_model.py` looks for longer, at random;
with `FAIRQUEUE_MODEL_SAME=1` at the same examples each time.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import redis
from helpers.machines import EXAMPLES, REPLAY_MS, EchoingMachine, run_machine
from helpers.model import Every, ModelQueue, ModelReading, ModelSchedule, ModelSchedulers, ModelTask
from helpers.state import READS, check_consistency
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from fairqueue.errors import InvalidTask, LeaseLost, QueueFull, ScheduleConflict, StaleVersion
from fairqueue.link.keys import BARRIER, KEY_TYPES
from fairqueue.link.operation import Operation, operation
from fairqueue.models import Claim, Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import Notice, WorkerStore
from fairqueue.scheduler.firing import TickReport
from fairqueue.scheduler.leadership import Reading
from fairqueue.scheduler.scheduler import TaskScheduler

USERS = ("ann", "bob", "cy", "dee")
SCHEDULES = ("s1", "s2", "s3")
SCHEDULERS = ("one", "two")
SLOW = "slow"  # the name whose slots are limited, and which some workers avoid
COUNTED = (
    *("claimed", "finished", "cancelled", "buried", "retried", "released", "expired"),
    *("stale_runs", "timed_out"),
)
COUNTED_BY_SCHEDULERS = ("fired", "missed", "terms")
MOST_PAUSE_MS = 5000  # of a claim of some names that has found nothing
TERM_S = 60.0  # long enough that no scheduler loses trust in the real time that an example takes
CHECK_INTERVAL_S = 7.0
CRONS = {
    "* * * * *": Every(60_000),
    "*/5 * * * *": Every(300_000),
    "30 * * * *": Every(3_600_000, 1_800_000),
    "0 */6 * * *": Every(21_600_000),
}

# Weights are powers of two and intervals of rates are whole, so that tags are exact numbers.
users = st.sampled_from(USERS)
levels = st.sampled_from((1, 3, 3, 3, 5, 6, 6))
delays = st.sampled_from((None, None, None, None, 0, 500, 4_000, 70_000))
picks = st.integers(0, 999)
lost_reply = st.sampled_from((False, False, False, True))
new_tasks = st.tuples(users, levels, delays)
user_changes = st.one_of(
    st.fixed_dictionaries({"weight": st.sampled_from((0.5, 1.0, 2.0, 4.0))}),
    st.fixed_dictionaries({"max_running": st.sampled_from((None, 1, 2))}),
    st.fixed_dictionaries({"rate": st.sampled_from((None, 0.5, 1.0, 20.0))}),
    st.fixed_dictionaries({"paused": st.booleans()}),
)
queue_changes = st.one_of(
    st.fixed_dictionaries({"max_attempts": st.integers(1, 3)}),
    st.fixed_dictionaries({"keep_finished": st.sampled_from((0, 1, 3, 1000))}),
    st.fixed_dictionaries({"keep_finished_for": st.sampled_from((0, 20, 86_400))}),
    st.fixed_dictionaries({"keep_dead": st.sampled_from((0, 1, 1000))}),
    st.fixed_dictionaries({"keep_dead_for": st.sampled_from((0, 20, 86_400))}),
    st.fixed_dictionaries({"critical_share": st.sampled_from((0.0, 0.5, 0.75, 0.9375, 1.0))}),
    st.fixed_dictionaries({"max_waiting": st.sampled_from((0, 0, 6, 15))}),
)
schedule_changes = st.one_of(
    st.fixed_dictionaries({"payload": st.integers(0, 3)}),
    st.fixed_dictionaries({"cron": st.sampled_from(sorted(CRONS))}),
    st.fixed_dictionaries({"active": st.booleans()}),
    st.fixed_dictionaries({"active": st.booleans(), "cron": st.sampled_from(sorted(CRONS))}),
    st.fixed_dictionaries({"user": users, "level": levels}),
)


def name_of(task_id: str) -> str:
    """Every third task is slow; an id that is pushed again has the same name."""
    return SLOW if int(task_id[1:]) % 3 == 0 else "default"


def timeout_of(task_id: str) -> float | None:
    """Every fourth task has a time-out of its own, in seconds."""
    return 20.0 if int(task_id[1:]) % 4 == 1 else None


# --- what is in Redis -----------------------------------------------------------------------------


OWN_KEYS = [name for name in KEY_TYPES if name != BARRIER]


@operation
def _see_nothing(store: WorkerStore, /, *_: object, **__: object) -> Operation[list[Notice]]:
    """In place of what a leader does now and then."""
    yield from ()
    return []


class Raw:
    """Everything that a queue has in Redis, read in one round trip."""

    def __init__(self, client: redis.Redis, queue: TaskQueue) -> None:
        with client.pipeline(transaction=False) as pipe:
            pipe.keys("*")
            for name in OWN_KEYS:
                READS[KEY_TYPES[name]](pipe, queue.keys[name])
            stored, *contents = pipe.execute()
        assert set(stored) <= set(queue.keys.all())
        self._contents: dict[str, Any] = dict(zip(OWN_KEYS, contents, strict=True))

    def hash(self, name: str) -> dict[str, str]:
        assert KEY_TYPES[name] == "hash"
        return {k.decode(): v.decode() for k, v in self._contents[name].items()}

    def records(self, name: str) -> dict[str, dict[str, Any]]:
        return {field: json.loads(text) for field, text in self.hash(name).items()}

    def numbers(self, name: str) -> dict[str, float]:
        return {field: float(text) for field, text in self.hash(name).items()}

    def zset(self, name: str) -> dict[str, float]:
        assert KEY_TYPES[name] == "zset"
        return {member.decode(): float(score) for member, score in self._contents[name]}

    def text(self, name: str) -> str | None:
        assert KEY_TYPES[name] == "string"
        content = self._contents[name]
        return None if content is None else content.decode()

    def length(self, name: str) -> int:
        assert KEY_TYPES[name] == "list"
        return len(self._contents[name])


def check_places(raw: Raw) -> None:
    """Every task is in the one place that its state says, and counts are those of the places."""
    status = raw.records("status")
    assert status.keys() == raw.hash("tasks").keys()
    by_state: dict[str, set[str]] = {}
    for task_id, record in status.items():
        by_state.setdefault(record["state"], set()).add(task_id)
    backlog = [member.split("\0") for member in raw.zset("backlog")]
    places = {
        "ready": {each[2] for each in backlog} | {m.split("\0")[3] for m in raw.zset("held")},
        "delayed": raw.zset("delayed").keys(),
        "running": raw.zset("leases").keys(),
        "ended": raw.zset("ended").keys(),
        "buried": raw.zset("dead").keys(),
    }
    by_state["ended"] = by_state.pop("finished", set()) | by_state.pop("cancelled", set())
    assert by_state.keys() <= places.keys()
    for state, place in places.items():
        assert place == by_state.get(state, set()), state
    assert sum(len(place) for place in places.values()) == len(status)
    assert raw.zset("waiting").keys() == places["ready"]
    assert raw.zset("delayed_index").keys() == {
        f"{status[task_id]['user']}\0{due:015.0f}\0{task_id}"
        for task_id, due in raw.zset("delayed").items()
    }
    for user, rank, task_id, name in backlog:
        record = status[task_id]
        assert (record["user"], record["rank"], record["name"]) == (user, rank, name)
    leased = Counter(status[task_id]["user"] for task_id in places["running"])
    assert raw.numbers("running") == leased


def check_users(raw: Raw) -> None:
    """Users with waiting tasks are in one of ready and parked, and in the lane if it is theirs."""
    heads: dict[str, str] = {}
    for member in sorted(raw.zset("backlog")):
        user, rank, *_ = member.split("\0")
        heads.setdefault(user, rank)
    ready, parked = raw.zset("ready").keys(), raw.zset("parked").keys()
    assert not ready & parked
    assert ready | parked == heads.keys()
    assert raw.zset("critical").keys() == {user for user in ready if heads[user][0] == "0"}
    assert not ready & raw.zset("idle").keys()


def check_schedules(raw: Raw) -> None:
    """Plans are of known schedules, and exactly those are due that are active or will be."""
    states = raw.records("schedule_state")
    assert states.keys() == raw.hash("schedules").keys() == raw.hash("plan").keys()
    awaited = {name for name, s in states.items() if s["active"] or "until" in s}
    assert raw.zset("due").keys() == awaited
    index = {f"{state['user']}\0{name}" for name, state in states.items()}
    assert raw.zset("schedule_index").keys() == index


# --- the machine ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """A claim that a worker has had, and what is needed to send it again."""

    claim: Claim
    limit: int
    claimed_ms: int


class Machine(EchoingMachine):
    """Does the same with the real queue and with the model."""

    cost = "tasks"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        quiet = mock.patch.object(logging.getLogger("fairqueue.scheduler"), "disabled", True)
        self.cleanup.enter_context(quiet)
        # A leader looks over the queue now and then; here that is a rule of its own.
        blind = mock.patch.object(WorkerStore, "look_over", _see_nothing)
        self.cleanup.enter_context(blind)
        self.schedulers = {
            name: TaskScheduler(
                self.queue, name, check_interval=CHECK_INTERVAL_S, lock_timeout=TERM_S
            )
            for name in SCHEDULERS
        }
        self.model = ModelQueue()
        self.planned = ModelSchedulers(self.model, term_ms=int(TERM_S * 1000))
        self.pushed: dict[str, tuple[str, int]] = {}
        self.held: list[Held] = []
        self.stalled: dict[str, tuple[Reading, ModelReading]] = {}
        self.revisions: dict[int, str] = {}
        self.latest_ms = self.now
        self.queue.configure(cost=self.cost)
        self.model.settings.cost = self.cost

    def is_uncertain(self, task_id: str, call: str = "", token: str = "") -> bool:
        """Whether the queue may, but need not, still remember a task that is gone, or a call."""
        grave = self.model.graves.get(task_id)
        answer = self.model.answers.get((call, task_id, token))
        moments = [grave.at_ms] if grave else []
        moments += [answer[0]] if answer else []
        return any(self.latest_ms - moment > REPLAY_MS for moment in moments)

    # --- time -------------------------------------------------------------------------------------

    def jump(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds / 1000)
        self.latest_ms = max(self.latest_ms, self.now)
        self.link.travelled_ms += abs(milliseconds)

    @rule(milliseconds=st.sampled_from((1, 50, 250, 1000, 2000, 5000)))
    def time_passes(self, milliseconds: int) -> None:
        self.jump(milliseconds)

    @rule(seconds=st.sampled_from((15, 31, 61, 300, 3600, 100_000)))
    def a_long_time_passes(self, seconds: int) -> None:
        self.jump(seconds * 1000)

    @rule(milliseconds=st.integers(1, 4000))
    def the_clock_is_set_back(self, milliseconds: int) -> None:
        self.jump(-milliseconds)

    @rule()
    def the_server_forgets_its_scripts(self) -> None:
        self.client.script_flush()

    @precondition(lambda self: self.link.recent())
    @rule(pick=picks, late_ms=st.sampled_from((0, 0, 1000, 31_000, 31_000)))
    def a_command_comes_again_late(self, pick: int, late_ms: int) -> None:
        """Its sender has had the answer, or has not: it changes nothing, and is answered alike."""
        self.jump(late_ms)
        if recent := self.link.recent():
            self.link.send_again(recent[pick % len(recent)])

    # --- pushing ----------------------------------------------------------------------------------

    def task(
        self, task_id: str, user: str, level: int, delay_ms: int | None
    ) -> tuple[Task, ModelTask]:
        real = Task.create(
            user_id=user,
            priority=level,
            task_id=task_id,
            name=name_of(task_id),
            timeout=timeout_of(task_id),
            delay=None if delay_ms is None else delay_ms / 1000,
        )
        due_ms = self.now + (delay_ms or 0)
        return real, ModelTask(
            task_id=task_id,
            user=user,
            level=level,
            document=(user, level),
            name=name_of(task_id),
            timeout_ms=None if (seconds := timeout_of(task_id)) is None else round(seconds * 1000),
            due_ms=due_ms,
        )

    def push_pairs(self, pairs: list[tuple[Task, ModelTask]], lost: bool) -> None:
        word = self.model.push([planned for _, planned in pairs], self.now)
        tasks = [real for real, _ in pairs]
        self.link.echo = lost
        try:
            if len(tasks) == 1:
                assert self.queue.push(tasks[0]) == tasks[0].task_id
            else:
                assert self.queue.push_many(tasks) == [task.task_id for task in tasks]
            answer = "pushed"
        except InvalidTask:
            answer = "other"
        except QueueFull:
            answer = "full"
        finally:
            self.link.echo = False
        assert answer == word
        if word == "pushed":
            for task in tasks:
                self.pushed.setdefault(task.task_id, (task.user_id, int(task.priority)))

    def next_task_id(self) -> str:
        return f"t{len(self.pushed) + 1}"

    @initialize(specs=st.lists(new_tasks, max_size=8))
    def some_tasks_are_there(self, specs: list[tuple[str, int, int | None]]) -> None:
        if specs:
            self.push_many(specs, repeated=None, lost=False)

    @rule(spec=new_tasks, lost=lost_reply)
    def push(self, spec: tuple[str, int, int | None], lost: bool) -> None:
        self.push_pairs([self.task(self.next_task_id(), *spec)], lost)

    @rule(
        specs=st.lists(new_tasks, min_size=2, max_size=8),
        repeated=st.one_of(st.none(), picks),
        lost=lost_reply,
    )
    def push_many(
        self, specs: list[tuple[str, int, int | None]], repeated: int | None, lost: bool
    ) -> None:
        start = len(self.pushed)
        pairs = [self.task(f"t{start + i}", *spec) for i, spec in enumerate(specs, 1)]
        if repeated is not None:
            # The same one twice in one call is one task, too.
            user, level, delay = specs[repeated % len(specs)]
            pairs.append(self.task(f"t{start + 1 + repeated % len(specs)}", user, level, delay))
        self.push_pairs(pairs, lost)

    @rule(user=users)
    def the_credit_of_critical_tasks_is_used_up(self, user: str) -> None:
        self.push_many([(user, 6, None)] * 11, repeated=None, lost=False)
        self.claim(limit=10, lease=30, lost=False)

    @precondition(lambda self: self.pushed)
    @rule(pick=picks, user=st.one_of(st.none(), users), delay=delays, lost=lost_reply)
    def push_an_old_id(self, pick: int, user: str | None, delay: int | None, lost: bool) -> None:
        task_id = sorted(self.pushed)[pick % len(self.pushed)]
        if self.is_uncertain(task_id):
            return
        owner, level = self.pushed[task_id]
        self.push_pairs([self.task(task_id, user or owner, level, delay)], lost)

    # --- claiming ---------------------------------------------------------------------------------

    @rule(limit=st.integers(1, 5), lease=st.sampled_from((1, 30, 30, 90)), lost=lost_reply)
    def claim(
        self, limit: int, lease: int, lost: bool, heard: bool = True, avoid: str | None = None
    ) -> None:
        self.link.echo = lost
        claims = self.queue.claim("w", limit=limit, lease=lease, avoid=[avoid] if avoid else ())
        self.link.echo = False
        token = self.link.last_arguments["op"]
        expected = self.model.claim(token, limit, lease * 1000, self.now, avoid)
        assert [claim.task.task_id for claim in claims] == expected
        for claim in claims:
            task = self.model.tasks[claim.task.task_id]
            assert (claim.attempt, claim.due_ms) == (task.attempts, task.due_ms)
            if heard:
                self.held.append(Held(claim, limit, self.now))
        hint, real = self.model.hint(self.now, avoid), self.link.last_answer[0]
        hints = {hint}
        if avoid and len(claims) == limit:
            # It may not have looked at all users, or at more than it took something of.
            hints |= {0, self.model.hint(self.now, avoid, after_all=True)}
        if avoid and not claims and self.model.ready and 0 < real <= MOST_PAUSE_MS:
            # Where there are tasks for others it looks again after a while, before all else.
            hints |= {real} if hint < 0 or real <= hint else set()
        assert real in hints

    @rule(limit=st.integers(1, 5))
    def claim_but_avoid_slow_tasks(self, limit: int) -> None:
        self.claim(limit=limit, lease=30, lost=False, avoid=SLOW)

    @rule()
    def claim_all(self) -> None:
        self.claim(limit=100, lease=30, lost=False)

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def a_claim_comes_again_late(self, pick: int) -> None:
        held = self.held[pick % len(self.held)]
        if not 0 <= self.latest_ms - held.claimed_ms <= REPLAY_MS / 2:
            return  # the client has given up by then
        # One that was on its way for long: its sender has had an answer, and hears no other.
        self.ids.forced = held.claim.token
        self.claim(limit=held.limit, lease=30, lost=False, heard=False)

    # --- ending -----------------------------------------------------------------------------------

    def pick_claim(self, pick: int) -> tuple[Claim, str, str] | None:
        """A claim: of those that are held now rather than of those that are stale."""
        if not self.held:
            return None
        claims = [held.claim for held in self.held]
        live = [c for c in claims if self.model.holds(c.task.task_id, c.token)]
        chosen = live if live and pick % 4 else claims
        claim = chosen[pick % len(chosen)]
        return claim, claim.task.task_id, claim.token

    def end(self, lost: bool, act: Callable[[], object], word: str) -> None:
        self.link.echo = lost
        try:
            act()
            assert word != "lost_lease"
        except LeaseLost:
            assert word == "lost_lease"
        finally:
            self.link.echo = False

    @precondition(lambda self: self.held)
    @rule(some=st.lists(picks, min_size=1, max_size=5), lost=lost_reply)
    def finish(self, some: list[int], lost: bool) -> None:
        chosen = [c for c in map(self.pick_claim, some) if c and not self.is_uncertain(c[1])]
        words = self.model.finish([(task_id, token) for _, task_id, token in chosen], self.now)
        if len(chosen) == 1:
            self.end(lost, lambda: self.queue.finish(chosen[0][0], {"n": 1}), words[0])
            return
        self.link.echo = lost
        answer = self.queue.finish_many((claim, None) for claim, _, _ in chosen)
        self.link.echo = False
        assert answer == words

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def what_was_finished_and_trimmed_is_pushed_again(self, pick: int) -> None:
        self.configure({"keep_finished": 0}, lost=False)
        self.finish([pick], lost=False)
        gone = sorted(self.model.graves.keys() & self.pushed.keys())
        for task_id in [each for each in gone if not self.is_uncertain(each)][:3]:
            owner, level = self.pushed[task_id]
            self.push_pairs([self.task(task_id, owner, level, None)], lost=False)

    @precondition(lambda self: self.held)
    @rule(pick=picks, delay=st.sampled_from((0, 0, 1000, 40_000)), lost=lost_reply)
    def retry(self, pick: int, delay: int, lost: bool) -> None:
        if chosen := self.pick_claim(pick):
            claim, task_id, token = chosen
            if self.is_uncertain(task_id, "retry", token):
                return
            word = self.model.retry(task_id, token, delay, self.now)
            self.end(lost, lambda: self.queue.retry(claim, "no", delay=delay / 1000), word)

    @precondition(lambda self: self.held)
    @rule(pick=picks, lost=lost_reply)
    def release(self, pick: int, lost: bool) -> None:
        if chosen := self.pick_claim(pick):
            claim, task_id, token = chosen
            if self.is_uncertain(task_id, "release", token):
                return
            word = self.model.release(task_id, token, self.now)
            self.end(lost, lambda: self.queue.release(claim), word)

    @precondition(lambda self: self.held)
    @rule(pick=picks, lost=lost_reply)
    def bury(self, pick: int, lost: bool) -> None:
        if chosen := self.pick_claim(pick):
            claim, task_id, token = chosen
            if self.is_uncertain(task_id, "bury", token):
                return
            word = self.model.bury(task_id, token, self.now)
            self.end(lost, lambda: self.queue.bury(claim, "never"), word)

    @precondition(lambda self: self.held)
    @rule(some=st.lists(picks, min_size=1, max_size=4), lease=st.integers(1, 60), lost=lost_reply)
    def extend(self, some: list[int], lease: int, lost: bool) -> None:
        chosen = [
            c
            for c in map(self.pick_claim, some)
            if c and not any(self.is_uncertain(c[1], call, c[2]) for call in ("retry", "release"))
        ]
        words = [
            self.model.extend(task_id, token, lease * 1000, self.now)
            for _, task_id, token in chosen
        ]
        self.link.echo = lost
        assert self.queue.extend([claim for claim, _, _ in chosen], lease=lease) == words
        self.link.echo = False

    @rule()
    def look_over(self) -> None:
        self.link.run("find_stale", can_alert="")
        self.model.look_over(self.now)

    @precondition(lambda self: self.model.in_state("running"))
    @rule(pick=picks, how=st.sampled_from(("its time", "a cancel")), passed=st.booleans())
    def a_run_does_not_answer(self, pick: int, how: str, passed: bool) -> None:
        """Its worker extends its lease until it is ended, or just not yet."""
        running = self.model.in_state("running")
        task = running[pick % len(running)]
        found = [h.claim for h in self.held if h.claim.token == task.token]
        claims = [claim for claim in found if claim.task.task_id == task.task_id]
        if not claims or (how == "its time" and task.deadline_ms is None):
            return
        if how == "a cancel":
            assert self.queue.cancel(task.task_id) == self.model.cancel(task.task_id, self.now)
        words = [self.model.extend(task.task_id, claims[0].token, 3_600_000, self.now)]
        assert self.queue.extend(claims[:1], lease=3600) == words
        if task.deadline_ms is not None and task.deadline_ms > self.now:
            self.jump(task.deadline_ms - self.now - 1 + passed)
        self.look_over()

    @precondition(lambda self: self.model.tasks)
    @rule(pick=picks, lost=lost_reply)
    def cancel(self, pick: int, lost: bool) -> None:
        alive = [t.task_id for t in self.model.in_state("ready", "delayed", "running")]
        known = sorted(alive if alive and pick % 4 else self.model.tasks)
        task_id = known[pick % len(known)]
        self.link.echo = lost
        assert self.queue.cancel(task_id) == self.model.cancel(task_id, self.now)
        self.link.echo = False

    @precondition(lambda self: self.model.tasks)
    @rule(pick=picks, delay=st.sampled_from((0, 0, 1000, 40_000)), lost=lost_reply)
    def reschedule(self, pick: int, delay: int, lost: bool) -> None:
        waiting = [t.task_id for t in self.model.in_state("ready", "delayed")]
        known = sorted(waiting if waiting and pick % 4 else self.model.tasks)
        task_id = known[pick % len(known)]
        self.link.echo = lost
        moved = self.queue.reschedule(task_id, delay=delay / 1000)
        self.link.echo = False
        assert moved == self.model.reschedule(task_id, delay, self.now)

    @precondition(lambda self: self.model.in_state("running"))
    @rule()
    def all_leases_expire(self) -> None:
        self.jump(max(t.lease_end_ms for t in self.model.in_state("running")) - self.now + 1)
        self.claim(limit=1, lease=30, lost=False)

    # --- settings ---------------------------------------------------------------------------------

    @rule(user=users, change=user_changes, lost=lost_reply)
    def set_user(self, user: str, change: dict[str, Any], lost: bool) -> None:
        self.link.echo = lost
        answer = self.queue.set_user(user, **change)
        self.link.echo = False
        self.model.set_user(user, self.now, **change)
        expected = self.model.user(user)
        assert (answer.weight, answer.max_running, answer.rate, answer.paused) == (
            expected.weight,
            expected.max_running,
            expected.rate,
            expected.paused,
        )

    @rule(slots=st.sampled_from((None, 1, 1, 2)), lost=lost_reply)
    def set_slots(self, slots: int | None, lost: bool) -> None:
        self.link.echo = lost
        self.queue.set_limits(SLOW, slots=slots)
        self.link.echo = False
        self.model.set_slots(SLOW, slots, self.now)

    @rule(change=queue_changes, lost=lost_reply)
    def configure(self, change: dict[str, Any], lost: bool) -> None:
        self.link.echo = lost
        self.queue.configure(**change)
        self.link.echo = False
        for name, value in change.items():
            if name.endswith("_for"):
                name, value = name.removesuffix("_for") + "_ms", value * 1000
            setattr(self.model.settings, name, value)

    # --- schedules --------------------------------------------------------------------------------

    @rule(
        schedule_id=st.sampled_from(SCHEDULES),
        cron=st.sampled_from(sorted(CRONS)),
        user=users,
        level=levels,
        replacing=st.booleans(),
        lost=lost_reply,
    )
    def add_schedule(
        self,
        schedule_id: str,
        cron: str,
        user: str,
        level: int,
        replacing: bool,
        lost: bool,
    ) -> None:
        planned = ModelSchedule(
            schedule_id=schedule_id,
            cron=CRONS[cron],
            user=user,
            level=level,
            payload=0,
        )
        added = self.planned.add(planned, self.now, replacing=replacing)
        self.link.echo = lost
        try:
            answer = self.schedulers["one"].add_schedule(
                cron_expr=cron,
                user_id=user,
                priority=level,
                payload={"n": 0},
                schedule_id=schedule_id,
                on_conflict="replace" if replacing else "error",
            )
            assert answer == schedule_id
            assert added
        except ScheduleConflict:
            assert not added
        finally:
            self.link.echo = False

    @rule(schedule_id=st.sampled_from(SCHEDULES), change=schedule_changes, lost=lost_reply)
    def update_schedule(self, schedule_id: str, change: dict[str, Any], lost: bool) -> None:
        names = {"cron": "cron_expr", "active": "is_active", "user": "user_id", "level": "priority"}
        real = {names.get(name, name): value for name, value in change.items()}
        if "payload" in change:
            real["payload"] = {"n": change["payload"]}
        if "cron" in change:
            change = change | {"cron": CRONS[change["cron"]]}
        expected = self.planned.update(schedule_id, self.now, change)
        self.link.echo = lost
        assert self.schedulers["two"].update_schedule(schedule_id, **real) == expected
        self.link.echo = False

    @precondition(lambda self: self.planned.schedules)
    @rule(pick=picks, seconds=st.sampled_from((1, 50, 61, 4000)), lost=lost_reply)
    def pause_for_a_while(self, pick: int, seconds: int, lost: bool) -> None:
        schedule_id = self.pick_schedule(pick).schedule_id
        until_ms = self.now + seconds * 1000
        self.link.echo = lost
        assert self.schedulers["two"].pause_schedule(schedule_id, until=until_ms / 1000)
        self.link.echo = False
        self.planned.update(schedule_id, self.now, {"active": False, "until_ms": until_ms})

    @rule(schedule_id=st.sampled_from(SCHEDULES), lost=lost_reply)
    def remove_schedule(self, schedule_id: str, lost: bool) -> None:
        self.link.echo = lost
        answer = self.schedulers["one"].remove_schedule(schedule_id)
        self.link.echo = False
        assert answer == self.planned.remove(schedule_id)

    @rule(user=users, cron=st.sampled_from(sorted(CRONS)))
    def an_answer_outlives_the_turn_of_the_generations(self, user: str, cron: str) -> None:
        """Answers are kept in two generations, of a minute each."""
        self.set_user(user, {"weight": 1.0}, lost=False)
        self.jump(31_000)
        self.add_schedule("s1", cron, user, 3, replacing=True, lost=False)
        self.remove_schedule("s1", lost=False)
        removal = self.link.sent[-1]
        self.jump(31_000)
        self.set_user(user, {"weight": 2.0}, lost=False)
        self.link.send_again(removal)

    def pick_schedule(self, pick: int) -> ModelSchedule:
        schedules = self.planned.schedules
        return schedules[sorted(schedules)[pick % len(schedules)]]

    @precondition(lambda self: self.planned.schedules)
    @rule(pick=picks, lost=lost_reply)
    def trigger(self, pick: int, lost: bool) -> None:
        schedule = self.pick_schedule(pick)
        task_id: str | None = None
        self.link.echo = lost
        try:
            task_id = self.schedulers["one"].trigger(schedule.schedule_id)
        except QueueFull:
            pass
        finally:
            self.link.echo = False
        task = ModelTask(
            task_id=task_id or "refused",
            user=schedule.user,
            level=schedule.level,
            document=(),
        )
        assert self.model.push([task], self.now) == ("pushed" if task_id else "full")

    @rule(name=st.sampled_from(SCHEDULERS), lost=lost_reply)
    def tick(self, name: str, lost: bool) -> None:
        scheduler = self.schedulers[name]
        self.link.echo = lost
        report = scheduler.tick()
        self.link.echo = False
        expected = self.planned.tick(name, self.now)
        assert (report.is_leader, report.fired, report.missed, report.refused) == (
            expected.is_leader,
            expected.fired,
            expected.missed,
            expected.refused,
        )
        assert (report.moved, report.set_aside) == (0, 0)
        assert scheduler.is_leader == (name in self.planned.trusting)
        wait_ms = CHECK_INTERVAL_S * 1000 if expected.wait_ms is None else expected.wait_ms
        # The real time that the tick took counts; seconds are no exact numbers.
        assert wait_ms - 2000 <= report.wait * 1000 <= wait_ms + 0.001

    @rule(name=st.sampled_from(SCHEDULERS), seconds=st.sampled_from((60, 61, 150, 4000)))
    def tick_later(self, name: str, seconds: int) -> None:
        self.jump(seconds * 1000)
        self.tick(name, lost=False)

    @precondition(lambda self: self.planned.awaited())
    @rule(name=st.sampled_from(SCHEDULERS))
    def tick_on_the_moment(self, name: str) -> None:
        self.jump(max(0, self.planned.awaited()[0].due_ms - self.now))
        self.tick(name, lost=False)

    @precondition(lambda self: self.planned.awaited())
    @rule()
    def a_schedule_is_made_anew_before_a_moment_that_it_has_fired(self) -> None:
        """Its state is gone, and with it the last run: the name of the task is what is left."""
        schedule = self.planned.awaited()[0]
        schedule_id = schedule.schedule_id
        self.tick_on_the_moment("one")
        self.tick("two", lost=False)
        if not schedule.last_run_ms or not 0 <= self.now - schedule.last_run_ms < 4000:
            return
        self.jump(schedule.last_run_ms - self.now - 1)
        self.remove_schedule(schedule_id, lost=False)
        cron = next(text for text, every in CRONS.items() if every == schedule.cron)
        self.add_schedule(
            schedule_id, cron, schedule.user, schedule.level, replacing=False, lost=False
        )
        self.tick_later("one", 1)
        self.tick("two", lost=False)

    @precondition(lambda self: self.planned.awaited())
    @rule(name=st.sampled_from(SCHEDULERS), lost=lost_reply)
    def a_leader_stalls_before_it_fires(self, name: str, lost: bool) -> None:
        self.jump(max(0, self.planned.awaited()[0].due_ms - self.now))
        self.link.echo = lost
        reading = self.schedulers[name]._posts[0].leadership.lead(100)
        self.link.echo = False
        expected = self.planned.read(name, self.now)
        assert reading.is_leader == (expected is not None)
        if expected is not None:
            due = [schedule.schedule_id for schedule in expected.due]
            assert [found.schedule_id for found in reading.due] == due
            self.stalled[name] = (reading, expected)

    @precondition(lambda self: self.stalled)
    @rule(pick=picks, late_ms=st.sampled_from((0, 500, 61_000)), lost=lost_reply)
    def a_stalled_leader_fires(self, pick: int, late_ms: int, lost: bool) -> None:
        name = sorted(self.stalled)[pick % len(self.stalled)]
        reading, planned = self.stalled.pop(name)
        self.jump(late_ms)
        report = TickReport()
        self.link.echo = lost
        scheduler = self.schedulers[name]
        leads = not scheduler._fire([(scheduler._posts[0], reading)], report, None)
        self.link.echo = False
        expected = self.planned.fire(name, planned, self.now)
        assert leads == (expected is not None)
        if expected is not None:
            assert (report.fired, report.missed, report.refused, report.moved) == (
                expected.fired,
                expected.missed,
                expected.refused,
                expected.moved,
            )

    @rule(name=st.sampled_from(SCHEDULERS), lost=lost_reply)
    def stop(self, name: str, lost: bool) -> None:
        self.link.echo = lost
        assert self.schedulers[name].stop()
        self.link.echo = False
        self.planned.stop(name, self.now)

    # --- actors without the right -----------------------------------------------------------------
    #
    # These send a script what only an actor would who knows less than is so by now. The answer is
    # a refusal, and nothing changes; where two guards stand behind one another, each is asked.

    def stored(self, schedule: ModelSchedule) -> tuple[bytes, str, str]:
        """The definition of a schedule, its plan and its revision."""
        name, keys = schedule.schedule_id, self.queue.keys
        definition = self.client.hget(keys["schedules"], name)
        plan = self.client.hget(keys["plan"], name)
        assert definition is not None
        assert plan is not None
        return definition, plan.decode(), plan.decode().split(" ")[0]

    def act_as_leader(
        self, act: str, schedule: ModelSchedule, token: str, plan: str, text: bytes
    ) -> Any:
        """Send one of the acts of a leader upon a schedule, as it was read; the word."""
        name = schedule.schedule_id
        call: dict[str, Any] = {"op": self.ids(), "token": token}
        if act == "resume":
            call |= {"id": name, "plan": plan, "noted": "", "reason": ""}
            call |= {"next_ms": self.now + 1000, "due_ms": self.now + 1000}
        elif act == "set_aside":
            call |= {"id": name, "definition": text, "plan": plan}
            call |= {"kind": "cron", "reason": "never"}
        elif act == "fire":
            moments = [self.now, self.now + 1000, self.now + 1000, 0, ""]
            task = [schedule.user, "default", "{}", '{"attempts":0', 3, "allow", "", "", ""]
            call |= {"term_ms": 1000, "rest": [name, plan, *moments, *task]}
        answer = self.link.run(act, **call)
        return answer[-1] if isinstance(answer, list) else answer

    @precondition(lambda self: self.planned.schedules)
    @rule(
        pick=picks,
        act=st.sampled_from(("fire", "resume", "set_aside", "resign")),
        name=st.sampled_from((*SCHEDULERS, "a stranger")),
    )
    def somebody_acts_who_does_not_lead(self, pick: int, act: str, name: str) -> None:
        if name in SCHEDULERS and self.planned.leads(name, self.now):
            return
        leadership = self.schedulers[name]._posts[0].leadership if name in SCHEDULERS else None
        schedule = self.pick_schedule(pick)
        text, plan, _ = self.stored(schedule)
        token = leadership.token if leadership else "a stranger's"
        assert self.act_as_leader(act, schedule, token, plan, text) == b"stale"

    @precondition(lambda self: self.planned.schedules)
    @rule(
        pick=picks,
        act=st.sampled_from(("fire", "resume", "set_aside", "set_aside")),
        name=st.sampled_from(SCHEDULERS),
        old=st.sampled_from(("plan", "text")),
    )
    def a_leader_acts_upon_what_it_read_before(
        self, pick: int, act: str, name: str, old: str
    ) -> None:
        schedule = self.pick_schedule(pick)
        if act == "resume" and schedule.until_ms is None:
            self.pause_for_a_while(pick, 4000, lost=False)
        if self.planned.present_term(self.now) is None:
            self.tick(name, lost=False)
        leader = next(each for each in SCHEDULERS if self.planned.leads(each, self.now))
        token = self.schedulers[leader]._posts[0].leadership.token
        text, plan, _ = self.stored(schedule)
        if act == "set_aside" and old == "text":
            text = b"{}"
        else:
            plan = "0 " + plan.split(" ")[1]
        assert self.act_as_leader(act, schedule, token, plan, text) == b"moved"
        if act == "fire":
            self.planned.renew(leader, self.now, 1000)

    @precondition(lambda self: self.planned.schedules)
    @rule(pick=picks)
    def somebody_saves_what_was_made_from_something_else(self, pick: int) -> None:
        """Of what was read either the text or the revision is still the same."""
        schedule = self.pick_schedule(pick)
        definition, _, revision = self.stored(schedule)
        assert self.save(schedule, definition, "0") == [b"changed"]
        assert self.save(schedule, b"{}", revision) == [b"changed"]

    def save(self, schedule: ModelSchedule, text: bytes, base: str) -> Any:
        return self.link.run(
            "update_schedule",
            op=self.ids(),
            client_now=self.now,
            id=schedule.schedule_id,
            expected=text,
            base=base,
            definition=text,
            user=schedule.user,
            tenant="",
            title="",
            revision="1",
            old_name="default",
            task_name="default",
            next_ms="",
            due_ms="",
            active="",
            pause="",
            noted="",
            change="",
        )

    @precondition(lambda self: self.planned.schedules)
    @rule(pick=picks)
    def remove_another_revision(self, pick: int) -> None:
        with pytest.raises(StaleVersion):
            self.schedulers["one"].remove_schedule(
                self.pick_schedule(pick).schedule_id, if_revision="0"
            )

    def backfill(self, schedule: ModelSchedule, base: str, moment_ms: int) -> Any:
        return self.link.run(
            "backfill",
            op=self.ids(),
            id=schedule.schedule_id,
            base=base,
            revision=self.ids(),
            user=schedule.user,
            task_name="default",
            head='{"attempts":0',
            level=schedule.level,
            notes="",
            rest=[moment_ms, "{}"],
        )

    @precondition(lambda self: self.planned.schedules)
    @rule(pick=picks)
    def somebody_fills_moments_of_an_old_plan(self, pick: int) -> None:
        assert self.backfill(self.pick_schedule(pick), "0", self.now) == [b"changed"]

    @precondition(lambda self: any(s.last_run_ms for s in self.planned.schedules.values()))
    @rule(pick=picks)
    def a_moment_that_was_fired_is_filled(self, pick: int) -> None:
        fired = [s for s in self.planned.schedules.values() if s.last_run_ms is not None]
        schedule = fired[pick % len(fired)]
        assert schedule.last_run_ms is not None
        task_id = f"{schedule.schedule_id}:{schedule.last_run_ms}"
        if self.is_uncertain(task_id) or not self.model.remembers(task_id):
            return
        base = self.stored(schedule)[2]
        assert self.backfill(schedule, base, schedule.last_run_ms) == [b"filled", 0]
        self.planned.change_revision(schedule)

    # --- comparing --------------------------------------------------------------------------------

    @invariant()
    def the_queue_is_what_the_model_says(self) -> None:
        raw = Raw(self.client, self.queue)
        check_places(raw)
        check_users(raw)
        check_consistency(self.client)
        check_schedules(raw)
        self.compare_tasks(raw)
        self.compare_places(raw)
        self.compare_users(raw)
        self.compare_counts(raw)
        self.compare_schedules(raw)
        self.compare_leader(raw)

    def compare_tasks(self, raw: Raw) -> None:
        real = {
            task_id: (
                record["state"],
                record["user"],
                record["level"],
                record["attempts"],
                bool(record.get("cancel")),
                record["due"],
                record.get("token") if record["state"] == "running" else None,
            )
            for task_id, record in raw.records("status").items()
        }
        assert real == {
            task.task_id: (
                task.state,
                task.user,
                task.level,
                task.attempts,
                task.cancel_asked,
                task.due_ms,
                task.token if task.state == "running" else None,
            )
            for task in self.model.tasks.values()
        }

    def compare_places(self, raw: Raw) -> None:
        order: dict[str, list[str]] = {}
        for member in sorted(raw.zset("backlog")):
            user, _, task_id, _ = member.split("\0")
            order.setdefault(user, []).append(task_id)
        model = self.model
        held: dict[str, list[str]] = {}
        for member in sorted(raw.zset("held")):
            user, _, _, task_id = member.split("\0")
            held.setdefault(user, []).append(task_id)
        for user in USERS:
            assert order.get(user, []) == [task.task_id for task in model.backlog(user)]
            assert held.get(user, []) == [task.task_id for task in model.held(user, SLOW)]
        turns = [m.split("\0") for m in sorted(raw.zset("slot_line")) if not m.startswith("\1")]
        line = sorted((turn, user) for user, turn in model.line.get(SLOW, {}).items())
        assert [(int(turn), user) for _, turn, user in turns] == line
        assert self.queue.size() == len(model.in_state("ready"))
        mine = [task for task in model.in_state("ready") if task.user == "ann"]
        assert self.queue.size("ann") == len(mine)
        moments = {
            "waiting": {task.task_id: task.since_ms for task in model.in_state("ready")},
            "delayed": {task.task_id: task.due_ms for task in model.in_state("delayed")},
            "leases": {task.task_id: task.lease_end_ms for task in model.in_state("running")},
            "deadlines": {
                t.task_id: t.deadline_ms for t in model.in_state("running") if t.deadline_ms
            },
            "ended": {t.task_id: t.ended_ms for t in model.in_state("finished", "cancelled")},
            "dead": {task.task_id: task.ended_ms for task in model.in_state("buried")},
            "gate_times": model.look_at,
        }
        for name, expected in moments.items():
            assert raw.zset(name) == expected, name

    def compare_users(self, raw: Raw) -> None:
        model = self.model
        fair = {
            name: float(text)
            for name, text in raw.hash("fair").items()
            if name in ("clock", "critical_clock", "credit")
        }
        same = self.same_numbers
        assert same(raw.zset("ready"), model.ready)
        assert same(raw.zset("parked"), model.parked)
        assert same(raw.zset("critical"), model.critical)
        assert same(raw.zset("idle"), model.idle)
        assert same(raw.numbers("throttle"), model.throttle)
        assert same(raw.numbers("averages"), model.usage)
        assert raw.numbers("running") == model.running()
        real = {name: fair.get(name, 0.0) for name in ("clock", "critical_clock")}
        real["credit"] = min(fair.get("credit", 10.0), model.most_credit())
        clocks = {"clock": model.clock, "critical_clock": model.critical_clock}
        assert same(real, clocks | {"credit": min(model.credit, model.most_credit())})

    def same_numbers(self, real: dict[str, float], expected: dict[str, float]) -> bool:
        return real == expected

    def compare_counts(self, raw: Raw) -> None:
        """Each thing that happened is counted once, however often it was sent."""
        real = raw.numbers("stats")
        for event in (*COUNTED, *COUNTED_BY_SCHEDULERS):
            assert real.get(event, 0) == self.model.counts[event], event
        assert int(raw.hash("fair").get("seq", 0)) == self.model.arrivals
        assert "broken_tasks" not in real

    def compare_schedules(self, raw: Raw) -> None:
        plans, states = raw.hash("plan"), raw.records("schedule_state")
        definitions, due = raw.records("schedules"), raw.zset("due")
        assert definitions.keys() == self.planned.schedules.keys()
        for name, schedule in self.planned.schedules.items():
            revision, nominal = plans[name].split(" ")
            assert nominal == ("-" if schedule.nominal_ms is None else str(schedule.nominal_ms))
            awaited = schedule.active or schedule.until_ms is not None
            assert due.get(name) == (schedule.due_ms if awaited else None)
            # Every save writes a new revision, and nothing else does.
            assert self.revisions.setdefault(schedule.saves, revision) == revision
            state, definition = states[name], definitions[name]
            assert state["active"] == schedule.active
            assert state.get("until") == schedule.until_ms
            assert state["runs"] == schedule.runs
            assert state.get("missed", 0) == schedule.missed
            assert state.get("last_run") == schedule.last_run_ms
            assert CRONS[definition["cron_expr"]] == schedule.cron
            assert (definition["user_id"], definition["priority"], definition["payload"]) == (
                schedule.user,
                schedule.level,
                {"n": schedule.payload},
            )
        assert len(set(self.revisions.values())) == len(self.revisions)
        assert raw.hash("broken") == {}

    def compare_leader(self, raw: Raw) -> None:
        text, term = raw.text("leader"), self.planned.term
        leader = json.loads(text) if text else None
        assert (leader and (leader["scheduler"], leader["ends"], leader["epoch"])) == (
            term and (term.token[0], term.ends_ms, self.planned.epoch)
        )
        assert int(raw.text("epoch") or 0) == self.planned.epoch

    @invariant()
    def tasks_can_be_looked_at(self) -> None:
        tasks = list(self.model.tasks.values())
        if not tasks:
            return
        task = tasks[self.now % len(tasks)]
        info = self.queue.get(task.task_id)
        assert info is not None
        assert (info.state, info.attempts) == (task.state, task.attempts)
        why = self.queue.explain(task.task_id)
        assert why is not None
        assert why.waits_for_slot == task.is_held
        if task.state == "ready" and not task.is_held:
            backlog = self.model.backlog(task.user)
            assert why.own_tasks_ahead == backlog.index(task)
            assert (why.users_ahead is None) == (task.user in self.model.parked)
        snapshot = self.queue.inspect()
        assert (snapshot.ready, snapshot.parked_users) == (
            len(self.model.in_state("ready")),
            len(self.model.parked),
        )


class MachineThatSharesTime(Machine):
    """Users share the time that their tasks take: tags are no exact numbers."""

    cost = "time"

    def same_numbers(self, real: dict[str, float], expected: dict[str, float]) -> bool:
        return real.keys() == expected.keys() and all(
            real[user] == pytest.approx(expected[user], rel=1e-9, abs=1e-9) for user in real
        )


@pytest.mark.timeout(0 if EXAMPLES else 120)
def test_the_queue_and_its_schedulers_do_what_the_model_says(redis_url: str) -> None:
    run_machine(Machine, redis_url, examples=80)


@pytest.mark.timeout(0 if EXAMPLES else 120)
def test_users_who_share_time_are_served_as_the_model_says(redis_url: str) -> None:
    run_machine(MachineThatSharesTime, redis_url, examples=15)
