"""Who is served next, on two levels and in pools, is what the plain model says.

Hypothesis makes up pushes, claims, endings, moves and settings; after each step every tag and every
clock is compared with the model. See test_model.py for the variables that let it look for longer.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from helpers.flow_model import FlowModel, FlowTask, Seat
from helpers.machines import EXAMPLES, REPLAY_MS, EchoingMachine, run_machine
from helpers.state import State, check_consistency, dump
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from fairqueue.errors import LeaseLost
from fairqueue.link.owners import Owner
from fairqueue.models import Claim, Task

USERS = ("ann", "bob", "cy")
TENANTS = (None, "acme", "globex")
POOLS = ("default", "gpu", "mail")
# With users and tenants of all kinds in each pool: pools of one claim.
WORKERS = (["default"], ["default"], ["gpu"], ["default", "gpu"], ["default", "gpu", "mail"])

owners = st.builds(Owner, st.sampled_from(USERS), st.sampled_from(TENANTS))
sharers = st.one_of(owners, st.builds(Owner.whole, st.sampled_from(TENANTS[1:])))
picks = st.integers(0, 999)
lost_reply = st.sampled_from((False, False, False, True))
new_tasks = st.tuples(
    owners,
    st.sampled_from(("default", "default", "gpu", "mail")),
    st.sampled_from((1, 3, 3, 3, 5, 6)),
    # A declared cost, a delay or an expiry, in seconds.
    st.sampled_from(({}, {}, {}, {"cost": 0.5}, {"cost": 4.0}, {"delay": 4.0}, {"expires": 3.0})),
)
changes = st.one_of(
    st.fixed_dictionaries({"weight": st.sampled_from((0.5, 1.0, 2.0))}),
    st.fixed_dictionaries({"max_running": st.sampled_from((None, 1, 2))}),
    st.fixed_dictionaries({"rate": st.sampled_from((None, 0.5, 1.0, 20.0))}),
    st.fixed_dictionaries({"paused": st.booleans()}),
)


@dataclass(frozen=True)
class Held:
    """A claim that a worker has had, and what is needed to send it again."""

    claim: Claim
    limit: int
    pools: list[str]
    claimed_ms: int


class FlowMachine(EchoingMachine):
    """Does the same with the real queue and with the model."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.model = FlowModel()
        self.held: list[Held] = []
        self.given_back: set[tuple[str, str]] = set()
        self.pushed = 0
        self.queue.configure(max_attempts=1000)
        # From the beginning it is a queue with tenants.
        self.set(Owner.whole("acme"), {"weight": 1.0}, lost=False)

    def jump(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds / 1000)
        self.link.travelled_ms += milliseconds

    @rule(milliseconds=st.sampled_from((1, 50, 250, 1000, 2000, 5000)))
    def time_passes(self, milliseconds: int) -> None:
        self.jump(milliseconds)

    @rule(seconds=st.sampled_from((11, 31, 100)))
    def a_long_time_passes(self, seconds: int) -> None:
        self.jump(seconds * 1000)

    @precondition(lambda self: self.link.recent())
    @rule(pick=picks, late_ms=st.sampled_from((0, 0, 1000, 31_000)))
    def a_command_comes_again_late(self, pick: int, late_ms: int) -> None:
        self.jump(late_ms)
        if recent := self.link.recent():
            self.link.send_again(recent[pick % len(recent)])

    # --- pushing and claiming ---------------------------------------------------------------------

    @initialize(specs=st.lists(new_tasks, max_size=12))
    def some_tasks_are_there(self, specs: list[Any]) -> None:
        self.push(specs, lost=False)

    @rule(specs=st.lists(new_tasks, min_size=1, max_size=8), lost=lost_reply)
    def push(self, specs: list[Any], lost: bool) -> None:
        real, planned = [], []
        for owner, pool, level, options in specs:
            self.pushed += 1
            task_id = f"t{self.pushed}"
            real.append(
                Task.create(
                    user_id=owner.user_id,
                    tenant=owner.tenant,
                    task_id=task_id,
                    pool=pool,
                    priority=level,
                    **options,
                )
            )
            expires = options.get("expires")
            planned.append(
                FlowTask(
                    task_id=task_id,
                    owner=owner,
                    pool="" if pool == "default" else pool,
                    level=level,
                    cost=options.get("cost"),
                    expires_ms=None if expires is None else self.now + round(expires * 1000),
                    due_ms=self.now + round(options.get("delay", 0) * 1000),
                )
            )
        self.lossy(lost, lambda: self.queue.push_many(real))
        self.model.push(planned, self.now)

    @rule(owner=owners, pool=st.sampled_from(POOLS[:2]))
    def the_credit_of_critical_tasks_is_used_up(self, owner: Owner, pool: str) -> None:
        self.push([(owner, pool, 6, {})] * 11, lost=False)
        self.claim(limit=10, pools=[pool], lost=False)

    @rule(limit=st.integers(1, 6), pools=st.sampled_from(WORKERS), lost=lost_reply)
    def claim(self, limit: int, pools: list[str], lost: bool, heard: bool = True) -> None:
        claims = self.lossy(lost, lambda: self.queue.claim("w", limit, 30, pools=pools))
        token = self.link.last_arguments["op"]
        names = sorted("" if pool == "default" else pool for pool in pools)
        expected = self.model.claim(token, limit, 30_000, self.now, self.order_of(names))
        assert [claim.task.task_id for claim in claims] == expected
        for claim in claims if heard else ():
            self.held.append(Held(claim, limit, pools, self.now))

    def order_of(self, names: list[str]) -> list[str]:
        """Pools as the script gets them, which decides between equal tags."""
        return sorted(names, key=lambda name: name or "default")

    @rule(pools=st.sampled_from(WORKERS))
    def claim_all(self, pools: list[str]) -> None:
        self.claim(limit=100, pools=pools, lost=False)

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def a_claim_comes_again_late(self, pick: int) -> None:
        held = self.held[pick % len(self.held)]
        if self.now - held.claimed_ms <= REPLAY_MS / 2:
            self.ids.forced = held.claim.token
            self.claim(limit=held.limit, pools=held.pools, lost=False, heard=False)

    # --- ending -----------------------------------------------------------------------------------

    def pick_claim(self, pick: int) -> Claim | None:
        """A claim that is still held, and was not given back: that is done once for each token."""
        live = [
            held.claim
            for held in self.held
            if self.model.holds(held.claim.task.task_id, held.claim.token)
            and (held.claim.task.task_id, held.claim.token) not in self.given_back
        ]
        return live[pick % len(live)] if live else None

    @rule(pick=picks, cost=st.sampled_from((None, None, 0.25, 1.0, 6.0)), lost=lost_reply)
    def finish(self, pick: int, cost: float | None, lost: bool) -> None:
        if claim := self.pick_claim(pick):
            self.lossy(lost, lambda: self.queue.finish(claim, cost=cost))
            self.model.finish(claim.task.task_id, self.now, cost)

    @rule(pick=picks, lost=lost_reply)
    def release(self, pick: int, lost: bool) -> None:
        if claim := self.pick_claim(pick):
            self.given_back.add((claim.task.task_id, claim.token))
            self.lossy(lost, lambda: self.queue.release(claim))
            self.model.release(claim.task.task_id, self.now)

    @rule(pick=picks, delay=st.sampled_from((0, 0, 2)), lost=lost_reply)
    def retry(self, pick: int, delay: int, lost: bool) -> None:
        if claim := self.pick_claim(pick):
            self.given_back.add((claim.task.task_id, claim.token))
            self.lossy(lost, lambda: self.queue.retry(claim, "no", delay=delay))
            self.model.retry(claim.task.task_id, delay * 1000, self.now)

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def somebody_ends_a_lease_that_is_lost(self, pick: int) -> None:
        claim = self.held[pick % len(self.held)].claim
        task = self.model.tasks[claim.task.task_id]
        if task.state not in ("finished", "cancelled") and task.token != claim.token:
            with pytest.raises(LeaseLost):
                self.queue.finish(claim)

    def pick_waiting(self, pick: int) -> str | None:
        waiting = self.model.in_state("ready", "delayed")
        return waiting[pick % len(waiting)].task_id if waiting else None

    @rule(pick=picks, lost=lost_reply)
    def cancel(self, pick: int, lost: bool) -> None:
        if task_id := self.pick_waiting(pick):
            assert self.lossy(lost, lambda: self.queue.cancel(task_id))
            self.model.cancel(task_id)

    @rule(pick=picks, delay=st.sampled_from((0, 0, 2)), lost=lost_reply)
    def reschedule(self, pick: int, delay: int, lost: bool) -> None:
        if task_id := self.pick_waiting(pick):
            assert self.lossy(lost, lambda: self.queue.reschedule(task_id, delay=delay))
            self.model.reschedule(task_id, delay * 1000, self.now)

    # --- settings ---------------------------------------------------------------------------------

    @rule(owner=sharers, change=changes, lost=lost_reply)
    def set(self, owner: Owner, change: dict[str, Any], lost: bool) -> None:
        user, tenant = owner.user_id, owner.tenant
        if tenant is not None and owner.is_tenant:
            self.lossy(lost, lambda: self.queue.set_tenant(tenant, **change))
        else:
            self.lossy(lost, lambda: self.queue.set_user(user, tenant=tenant, **change))
        self.model.set(owner, self.now, change)

    @rule(
        owner=owners,
        to=st.sampled_from(TENANTS),
        change=st.one_of(st.none(), changes),
        lost=lost_reply,
    )
    def move(self, owner: Owner, to: str | None, change: dict[str, Any] | None, lost: bool) -> None:
        if owner.tenant == to:
            return
        if change is not None:
            self.set(owner, change, lost=False)
        moved = self.lossy(
            lost, lambda: self.queue.move_user(owner.user_id, to, tenant=owner.tenant)
        )
        assert moved == self.model.move(owner.user_id, owner.tenant, to, self.now)

    @rule(share=st.sampled_from((0.0, 0.5, 0.75, 1.0)))
    def share_of_critical_tasks(self, share: float) -> None:
        self.queue.configure(critical_share=share)
        self.model.share = share

    # --- comparing --------------------------------------------------------------------------------

    @invariant()
    def the_queue_is_what_the_model_says(self) -> None:
        check_consistency(self.client)
        state, model = dump(self.client), self.model
        assert {
            task_id: (
                record["state"],
                Owner(record["user"], record.get("group")),
                record["attempts"],
                record.get("token") if record["state"] == "running" else None,
            )
            for task_id, record in state.get("status", {}).items()
        } == {
            task.task_id: (task.state, task.owner, task.attempts, task.token)
            for task in model.tasks.values()
        }
        running = {owner.key: count for owner, count in model.running().items()}
        assert {name: int(count) for name, count in state.get("running", {}).items()} == running
        parked = {seat.text: until for seat, until in model.parked.items()}
        assert state.get("parked", {}) == parked
        debts = {owner.key: debt for owner, (debt, _) in model.debts.items()}
        stored = state.get("throttle", {})
        assert self.near({name: float(text.split(" ")[0]) for name, text in stored.items()}, debts)
        self.compare_rings(state)

    def compare_rings(self, state: State) -> None:
        rings = self.model.rings.values()
        for name, kind in (("ready", "r"), ("critical", "c"), ("idle", "i")):
            real = {kind + seat: tag for seat, tag in state.get(name, {}).items()}
            tags = state.get("tags", {}).items()
            real |= {seat: float(tag) for seat, tag in tags if seat.startswith(kind)}
            expected: dict[str, float] = {}
            for ring in rings:
                tags_of: dict[Seat, float] = getattr(ring, name)
                expected |= {kind + seat.text: tag for seat, tag in tags_of.items()}
            assert self.near(real, expected), (name, real, expected)
        fair = {name: text for name, text in state["fair"].items() if name.endswith("clock")}
        root = self.model.rings["", None]
        assert self.near(
            {name: float(text) for name, text in fair.items()},
            {name: value for name, value in vars(root).items() if name in fair},
        )
        for name, text in state.get("clocks", {}).items():
            if name:
                clock, critical_clock, credit, offset, rested = text.split(" ")[:5]
                tenant, _, pool = name.partition("\x03")
                ring = self.model.rings[pool, tenant[1:] or None]
                told = {"clock": clock, "critical_clock": critical_clock, "offset": offset}
                clocks = {key: float(text) for key, text in told.items()}
                assert self.near(clocks, {key: getattr(ring, key) for key in told}), (name, text)
                assert (rested == "1") == ring.rested
                assert (None if credit == "-" else float(credit)) == pytest.approx(ring.credit)

    def near(self, real: dict[str, float], expected: dict[str, float]) -> bool:
        """Tags are stored with nine digits after the point."""
        return real == pytest.approx(expected, abs=1e-8)


@pytest.mark.timeout(0 if EXAMPLES else 120)
def test_tenants_users_and_pools_are_served_as_the_model_says(redis_url: str) -> None:
    run_machine(FlowMachine, redis_url, examples=40)
