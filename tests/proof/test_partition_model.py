"""A queue with partitions does what a plain model says, whatever the order of calls.

Which group is served next depends on what clients know of the partitions, so it is not part of the
model: tests/queue/test_partition_fairness.py judges it. Here is what no order may break: each task
is in the partition of its group and nowhere else, tasks of a user come in their order, caps and
pauses hold, ids that two partitions have are never guessed, and a claim that finds nothing has
looked everywhere.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import redis
from helpers.machines import EXAMPLES, run_machine
from helpers.state import check_consistency, dump_partition
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fairqueue import Priority
from fairqueue.clock import ManualClock
from fairqueue.errors import AmbiguousTask, InvalidTask, LeaseLost, UnknownTask, WrongPartitions
from fairqueue.link.connection import Link
from fairqueue.link.operation import Call
from fairqueue.link.partitions import partition_of
from fairqueue.models import Claim, Task
from fairqueue.queue.queue import TaskQueue

PARTITIONS = 3
CLIENTS = 2  # each has its own knowledge of the partitions
# Several groups in each partition.
OWNERS = [(user, tenant) for tenant in (None, "acme", "globex", "hooli") for user in ("ann", "bob")]
LEASE_S = 30.0
# Scripts whose second answer is the first one.
SAME = {"push", "finish", "retry", "release", "bury", "cancel", "reschedule", "set_user"}

owners = st.sampled_from(OWNERS)
picks = st.integers(0, 999)
delays = st.sampled_from((None, None, None, 0.5, 5.0, 70.0))
levels = st.sampled_from((Priority.NORMAL, Priority.NORMAL, Priority.CRITICAL))
lost_reply = st.sampled_from((False, False, True))


@dataclass
class Known:
    """A task as it should be: `state` is waiting, running, finished, cancelled or buried."""

    task: Task
    number: int
    partition: int
    due_ms: int
    state: str = "waiting"
    claim: Claim | None = None
    until_ms: int = 0

    @property
    def owner(self) -> tuple[str, str | None]:
        return self.task.user_id, self.task.tenant

    @property
    def place(self) -> tuple[bool, int]:
        """Where it comes among the tasks of its user."""
        return self.task.priority != Priority.CRITICAL, self.number


class PartitionMachine(RuleBasedStateMachine):
    """Pushes, claims and ends tasks of a queue with partitions."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.cleanup = ExitStack()
        self.client = self.cleanup.enter_context(redis.Redis.from_url(url))
        self.client.flushdb()
        self.clock = ManualClock()
        self.queues = [
            self.cleanup.enter_context(
                TaskQueue(self.client, clock=self.clock, partitions=PARTITIONS)
            )
            for _ in range(CLIENTS)
        ]
        self.queue = self.queues[0]
        self.queue.configure(max_attempts=1000, critical_share=0.5)
        self.tasks: dict[tuple[int, str], Known] = {}
        self.settings: dict[tuple[str | None, str | None], dict[str, Any]] = {}
        self.old_claims: list[tuple[Known, Claim]] = []
        self.echo = False
        send = Link._call

        def echoed(link: Link, call: Call) -> Any:
            first = send(link, call)
            if not self.echo:
                return first
            second = send(link, call)
            assert call.script not in SAME - {"push"} or second == first, call.script
            return second

        self.cleanup.enter_context(mock.patch.object(Link, "_call", echoed))

    def teardown(self) -> None:
        self.cleanup.close()

    def any_queue(self, pick: int) -> TaskQueue:
        return self.queues[pick % CLIENTS]

    def make(
        self, owner: tuple[str, str | None], level: Priority, delay: float | None, task_id: str
    ) -> Known:
        user, tenant = owner
        task = Task.create(
            user_id=user, tenant=tenant, task_id=task_id, priority=level, delay=delay
        )
        due = self.clock.now_ms() + round(1000 * (delay or 0))
        return Known(task, len(self.tasks), partition_of(user, tenant, PARTITIONS), due)

    def of_state(self, *states: str) -> list[Known]:
        return [known for known in self.tasks.values() if known.state in states]

    def store(self, known: Known) -> None:
        self.tasks[known.partition, known.task.task_id] = known

    def is_loose(self, known: Known) -> bool:
        """Whether its lease may have been taken back, or has been."""
        return known.state == "running" and known.until_ms <= self.clock.now_ms()

    # --- what happens ---

    @rule(milliseconds=st.sampled_from((1, 300, 1000, 5000, 31_000, 71_000)))
    def time_passes(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds / 1000)

    @rule(
        specs=st.lists(st.tuples(owners, levels, delays), min_size=1, max_size=8),
        lost=lost_reply,
        pick=picks,
    )
    def push(self, specs: list[Any], lost: bool, pick: int) -> None:
        listed = []
        for owner, level, delay in specs:
            known = self.make(owner, level, delay, f"t{len(self.tasks)}")
            self.store(known)
            listed.append(known)
        self.echo = lost
        ids = self.any_queue(pick).push_many([known.task for known in listed])
        self.echo = False
        assert ids == [known.task.task_id for known in listed]

    @rule(pick=picks, owner=owners)
    def push_an_id_of_somebody_else(self, pick: int, owner: tuple[str, str | None]) -> None:
        if not self.tasks:
            return
        task_id = list(self.tasks)[pick % len(self.tasks)][1]
        known = self.make(owner, Priority.NORMAL, None, task_id)
        there = self.tasks.get((known.partition, task_id))
        if there is None:
            assert self.queue.push(known.task) == task_id
            self.store(known)
        elif there.owner != owner:
            with pytest.raises(InvalidTask, match="already used"):
                self.queue.push(known.task)

    @rule(limit=st.integers(1, 6), pick=picks, lost=lost_reply)
    def claim(self, limit: int, pick: int, lost: bool) -> None:
        self.echo = lost
        claims = self.any_queue(pick).claim("w", limit, LEASE_S)
        self.echo = False
        assert len(claims) <= limit
        self.took(claims)
        if not claims:
            self.nothing_could_start()

    def took(self, claims: list[Claim]) -> None:
        for claim in claims:
            known = self.tasks[claim.partition, claim.task.task_id]
            assert (claim.task.user_id, claim.task.tenant) == known.owner
            assert known.state == "waiting" or self.is_loose(known), known
            assert known.due_ms <= self.clock.now_ms()
            for other in self.of_state("waiting"):
                if other.owner == known.owner and other.due_ms <= self.clock.now_ms():
                    assert other.place >= known.place or known.state == "running", (known, other)
            known.state, known.claim = "running", claim
            known.until_ms = self.clock.now_ms() + round(1000 * LEASE_S)
        running = Counter(
            each.owner for each in self.of_state("running") if not self.is_loose(each)
        )
        for owner, count in running.items():
            most = self.settings.get(owner, {}).get("max_running")
            taken = any((c.task.user_id, c.task.tenant) == owner for c in claims)
            assert not taken or most is None or count <= most, (owner, count)
            assert not taken or not self.is_paused(owner)

    def is_paused(self, owner: tuple[str | None, str | None]) -> bool:
        whose = (owner, (None, owner[1]))
        return any(self.settings.get(each, {}).get("paused") for each in whose)

    def nothing_could_start(self) -> None:
        running = Counter(each.owner for each in self.of_state("running"))
        for known in self.of_state("waiting"):
            most = self.settings.get(known.owner, {}).get("max_running")
            is_capped = most is not None and running[known.owner] >= most
            is_due = known.due_ms <= self.clock.now_ms()
            assert not is_due or is_capped or self.is_paused(known.owner), known

    @rule(limit=st.integers(1, 4), pick=picks, some=st.lists(picks, max_size=4))
    def finish_and_claim(self, limit: int, pick: int, some: list[int]) -> None:
        ending = self.picked(some)
        words, claims, _ = self.any_queue(pick).finish_and_claim(
            [(known.claim, None) for known in ending if known.claim], "w", limit, LEASE_S
        )
        for known, word in zip(ending, words, strict=True):
            self.ended(known, "finished", is_lost=word == "lost_lease")
        self.took(claims)

    def picked(self, some: list[int]) -> list[Known]:
        running = self.of_state("running")
        return list(
            {id(k): k for k in (running[n % len(running)] for n in some if running)}.values()
        )

    def ended(self, known: Known, state: str, *, is_lost: bool) -> None:
        assert not is_lost or self.is_loose(known), known
        if not is_lost:
            assert known.claim
            self.old_claims.append((known, known.claim))
            known.state, known.claim = state, None

    @rule(
        pick=picks,
        how=st.sampled_from(("finish", "bury", "release", "retry")),
        lost=lost_reply,
    )
    def end(self, pick: int, how: str, lost: bool) -> None:
        for known in self.picked([pick]):
            queue = self.any_queue(pick)
            act = getattr(queue, how)
            if how == "retry":
                act = partial(act, error="no", delay=5.0)
            self.echo = lost
            try:
                act(known.claim)
            except LeaseLost:
                assert self.is_loose(known)
            else:
                after = {"finish": "finished", "bury": "buried"}.get(how, "waiting")
                self.ended(known, after, is_lost=False)
                if how == "retry":
                    known.due_ms = self.clock.now_ms() + 5000
            self.echo = False

    @rule(pick=picks)
    def what_has_ended_is_not_ended_again(self, pick: int) -> None:
        if self.old_claims:
            known, claim = self.old_claims[pick % len(self.old_claims)]
            if known.state in ("buried", "cancelled") or known.claim is not None:
                with pytest.raises(LeaseLost):
                    self.queue.finish(claim, "again")

    @rule(pick=picks, by=st.sampled_from(("id", "tenant")))
    def cancel(self, pick: int, by: str) -> None:
        waiting = self.of_state("waiting")
        if not waiting:
            return
        known = waiting[pick % len(waiting)]
        task_id, tenant = known.task.task_id, known.task.tenant
        same = [number for number, name in self.tasks if name == task_id]
        if by == "tenant" and tenant is not None:
            assert self.queue.cancel(task_id, tenant=tenant)
        elif len(same) > 1:
            with pytest.raises(AmbiguousTask):
                self.queue.cancel(task_id)
            return
        else:
            assert self.queue.cancel(task_id)
        known.state = "cancelled"

    @rule()
    def ids_that_nobody_has_are_unknown(self) -> None:
        assert not self.queue.cancel("nobody")
        with pytest.raises(UnknownTask):
            self.queue.reschedule("nobody", delay=1)

    @rule(
        owner=st.sampled_from([*OWNERS, (None, "acme"), (None, "globex")]),
        change=st.sampled_from(
            ({"paused": True}, {"paused": False}, {"max_running": 1}, {"max_running": None})
        ),
    )
    def set_owner(self, owner: tuple[str | None, str | None], change: dict[str, Any]) -> None:
        user, tenant = owner
        if user is None:
            if "max_running" in change:
                return
            self.queue.set_tenant(str(tenant), **change)
        else:
            self.queue.set_user(user, tenant=tenant, **change)
        self.settings.setdefault(owner, {}).update(change)

    @rule(number=st.sampled_from((1, 2, 4)))
    def another_number_of_partitions_is_refused(self, number: int) -> None:
        with (
            TaskQueue(self.client, partitions=number) as other,
            pytest.raises(WrongPartitions),
        ):
            other.push(Task.create(user_id="ann"))

    # --- what always holds ---

    @invariant()
    def each_task_is_where_it_belongs(self) -> None:
        check_consistency(self.client, partitions=PARTITIONS)
        for number in range(PARTITIONS):
            state = dump_partition(self.client, "default", number, PARTITIONS)
            records = state.get("status", {})
            mine = {name: known for (at, name), known in self.tasks.items() if at == number}
            assert set(records) == set(mine)
            for task_id, known in mine.items():
                stored = records[task_id]["state"]
                if known.state == "waiting":
                    assert stored in ("ready", "delayed"), (known, stored)
                elif known.state == "running":
                    assert stored == "running" or self.is_loose(known), (known, stored)
                else:
                    assert stored == known.state, (known, stored)

    @invariant()
    def counts_are_those_of_all_partitions(self) -> None:
        found = self.queue.inspect()
        open_ones = len(self.of_state("waiting", "running"))
        assert found.ready + found.delayed + found.running == open_ones


@pytest.mark.timeout(0 if EXAMPLES else 180)
def test_a_queue_with_partitions_does_what_the_model_says(redis_url: str) -> None:
    run_machine(PartitionMachine, redis_url, examples=12)
