"""Limits of keys, whatever the order of calls: what starts may start, and what may start does.

Who is next at a key depends on turns and reservations; here only that is judged which no order may
break. Each claim has to keep to the slots and to the order of ordered keys; a task of several keys
is passed by only so many younger ones; and when nothing starts any more, nothing could have.
"""

from collections import Counter
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import redis
from helpers.machines import EXAMPLES, run_machine
from helpers.state import check_consistency, dump
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fairqueue.clock import ManualClock
from fairqueue.models import Claim, Task
from fairqueue.queue.queue import TaskQueue

# Slots of each key: "own:" are slots of each tenant, "row:" is ordered, "free" has no limits.
SLOTS = {"one:a": 1, "one:b": 1, "two": 2, "own:c": 1, "row:d": 1, "free": 1000}
ORDERED = {"row:d"}
MOST_PASSED = 25  # younger tasks that start at the keys of one that has several
ROUNDS = 40  # claims after which nothing more starts, with a second between them

owners = st.tuples(st.sampled_from(("ann", "bob", "cy")), st.sampled_from((None, "acme")))
keys = st.lists(st.sampled_from(sorted(SLOTS)), max_size=3, unique=True)
picks = st.integers(0, 999)


class Waiter(NamedTuple):
    """A task, and its gates: a key, or a key of a tenant or of a user without one."""

    number: int
    gates: tuple[tuple[str, str], ...]


class KeysMachine(RuleBasedStateMachine):
    """Pushes, claims and ends tasks with keys."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.cleanup = ExitStack()
        self.client = self.cleanup.enter_context(redis.Redis.from_url(url))
        self.client.flushdb()
        self.clock = ManualClock()
        self.queue = self.cleanup.enter_context(TaskQueue(self.client, clock=self.clock))
        self.queue.configure(max_attempts=1000)
        for key, slots in SLOTS.items():
            scope = "tenant" if key.startswith("own:") else "queue"
            self.queue.set_limit(key, slots=slots, ordered=key in ORDERED, scope=scope)
        self.waiting: dict[str, Waiter] = {}
        self.running: dict[str, Waiter] = {}
        self.claims: dict[str, Claim] = {}
        self.passed: Counter[str] = Counter()
        self.pushed = 0

    def teardown(self) -> None:
        self.cleanup.close()

    @rule(specs=st.lists(st.tuples(owners, keys), min_size=1, max_size=10))
    def push(self, specs: list[Any]) -> None:
        tasks = []
        for (user, tenant), limit_keys in specs:
            self.pushed += 1
            task_id = f"t{self.pushed}"
            tasks.append(
                Task.create(user_id=user, tenant=tenant, task_id=task_id, limit_keys=limit_keys)
            )
            whose = f"tenant {tenant}" if tenant else f"user {user}"
            gates = tuple((key, whose if key.startswith("own:") else "") for key in limit_keys)
            self.waiting[task_id] = Waiter(self.pushed, gates)
        self.queue.push_many(tasks)

    @rule(count=st.integers(3, 12))
    def a_stream_passes_a_task_of_two_keys(self, count: int) -> None:
        self.push([(("ann", None), ["one:a", "one:b"])])
        for n in range(count):
            self.push([(("bob", None), ["one:a"]), (("cy", None), ["one:b"])])
            self.claim(limit=2)
            self.end(n, "finish")

    def used(self) -> Counter[tuple[str, str]]:
        return Counter(gate for task in self.running.values() for gate in task.gates)

    def may_start(self, task: Waiter) -> bool:
        """Whether all its keys have room, and it is the oldest where that matters."""
        used = self.used()
        older = [w for w in self.waiting.values() if w.number < task.number]
        return all(
            used[gate] < SLOTS[gate[0]]
            and not (gate[0] in ORDERED and any(gate in each.gates for each in older))
            for gate in task.gates
        )

    @rule(limit=st.integers(1, 6))
    def claim(self, limit: int) -> None:
        self.take(limit)

    def take(self, limit: int) -> int:
        """Claim tasks; each must have had the right to start."""
        claims = self.queue.claim("w", limit=limit, lease=10_000)
        for claim in claims:
            task_id = claim.task.task_id
            task = self.waiting[task_id]
            assert self.may_start(task), (task_id, task.gates, self.used())
            del self.waiting[task_id]
            self.running[task_id] = task
            self.claims[task_id] = claim
            for other, waiter in self.waiting.items():
                if waiter.number < task.number and set(waiter.gates) & set(task.gates):
                    self.passed[other] += len(waiter.gates) > 1
                    assert self.passed[other] <= MOST_PASSED, (other, waiter)
        return len(claims)

    @rule(pick=picks, how=st.sampled_from(("finish", "finish", "release", "retry", "bury")))
    def end(self, pick: int, how: str) -> None:
        if not self.running:
            return
        task_id = sorted(self.running)[pick % len(self.running)]
        task, claim = self.running.pop(task_id), self.claims.pop(task_id)
        if how == "finish":
            self.queue.finish(claim)
        elif how == "bury":
            self.queue.bury(claim, "no")
        else:
            self.waiting[task_id] = task
            if how == "release":
                self.queue.release(claim)
            else:
                self.queue.retry(claim, "no", delay=0)

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        if self.waiting:
            task_id = sorted(self.waiting)[pick % len(self.waiting)]
            assert self.queue.cancel(task_id)
            del self.waiting[task_id]

    @rule(seconds=st.sampled_from((0.5, 1.0, 15.0)))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def nothing_is_left_that_could_start(self) -> None:
        """Of what is held, a part comes back each second; then only full keys hold anything up."""
        idle = 0
        for _ in range(ROUNDS):
            idle = 0 if self.take(20) else idle + 1
            self.clock.advance(1.1)
            if idle > 3:
                break
        several = [w for w in self.waiting.values() if len(w.gates) > 1]
        for task_id, task in self.waiting.items():
            reserved = any(
                each.number < task.number and set(each.gates) & set(task.gates) for each in several
            )
            assert reserved or not self.may_start(task), (task_id, task.gates, self.used())

    @invariant()
    def slots_are_held_by_those_who_run(self) -> None:
        check_consistency(self.client)
        state = dump(self.client)
        held = Counter(member.split("\0")[0] for member in state.get("slots", {}))
        expected: Counter[str] = Counter()
        for (key, whose), count in self.used().items():
            kind, _, name = whose.partition(" ")
            suffix = f"\x02{name}" if kind == "user" else f"\x02\x02{name}" if kind else ""
            expected[f"\x03{key}{suffix}"] += count
        assert held == expected
        states = Counter(record["state"] for record in state.get("status", {}).values())
        assert (states["ready"], states["running"]) == (len(self.waiting), len(self.running))


@pytest.mark.timeout(0 if EXAMPLES else 120)
def test_keys_hold_and_nothing_waits_for_nothing(redis_url: str) -> None:
    run_machine(KeysMachine, redis_url, examples=20)
