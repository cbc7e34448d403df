"""A plain model of who is served next: tenants and their users, in pools, with costs and expiry.

It is written from the words of the design, with a dict for each order, and works out anew what can
be worked out from the tasks. The test beside `test_model.py` compares the real queue with it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairqueue.link.owners import Owner
from helpers.model import BURST_S, CRITICAL, CRITICAL_CREDIT, NEVER

RingName = tuple[str, str | None]  # a pool, and a tenant whose users take turns in it


class Seat(NamedTuple):
    """Where a user or a tenant waits: in one pool, "" for the default one."""

    owner: Owner
    pool: str

    @property
    def text(self) -> str:
        """Seats with the same tag are served in this order."""
        return self.owner.seat(self.pool or None)

    @property
    def above(self) -> "Seat | None":
        """The seat of the tenant whose user this is."""
        owner = self.owner
        if owner.tenant is None or owner.is_tenant:
            return None
        return Seat(Owner.whole(owner.tenant), self.pool)

    @property
    def below(self) -> RingName:
        """The ring of the users of this tenant."""
        return self.pool, self.owner.tenant

    @property
    def ring(self) -> RingName:
        """The ring in which it takes turns."""
        return self.pool, None if self.owner.is_tenant else self.owner.tenant


@dataclass
class Ring:
    """A fair order: start tags of those who may be served, and finish tags of the others."""

    clock: float = 0.0
    critical_clock: float = 0.0
    credit: float | None = None
    offset: float = 0.0
    rested: bool = False
    ready: dict[Seat, float] = field(default_factory=dict)
    critical: dict[Seat, float] = field(default_factory=dict)
    idle: dict[Seat, float] = field(default_factory=dict)

    def next_by(self, tags: dict[Seat, float]) -> Seat | None:
        """The seat whose turn it is by these tags."""
        return min(tags, key=lambda seat: (tags[seat], seat.text), default=None)

    def has_credit(self, share: float) -> bool:
        """Whether a CRITICAL task may go first."""
        return share >= 1 or (CRITICAL_CREDIT if self.credit is None else self.credit) >= 1


@dataclass(kw_only=True)
class FlowTask:
    """A task, and all that has happened to it."""

    task_id: str
    owner: Owner
    pool: str
    level: int
    cost: float | None = None
    expires_ms: int | None = None
    due_ms: int = 0
    arrival: int = 0
    state: str = "new"
    attempts: int = 0
    token: str | None = None
    charge: float = 0.0
    lease_end_ms: int = 0

    @property
    def seat(self) -> Seat:
        """Where it waits."""
        return Seat(self.owner, self.pool)

    @property
    def rank(self) -> tuple[int, int]:
        """Order by level, highest first, then by arrival."""
        return CRITICAL - self.level, self.arrival


def owners_of(owner: Owner) -> list[Owner]:
    """A user, and the tenant whose user it is: those who are charged for a task."""
    if owner.tenant is None or owner.is_tenant:
        return [owner]
    return [owner, Owner.whole(owner.tenant)]


class FlowModel:
    """The queue. Every method takes the moment at which it happens, in ms."""

    def __init__(self) -> None:
        self.share = 0.5  # of CRITICAL tasks
        self.rings: defaultdict[RingName, Ring] = defaultdict(Ring)
        self.parked: dict[Seat, float] = {}
        self.pools: list[str] = []
        self.settings: dict[Owner, dict[str, Any]] = {}
        self.debts: dict[Owner, tuple[float, float | None]] = {}  # until when, and the last cost
        self.tasks: dict[str, FlowTask] = {}
        self.claims: dict[str, list[str]] = {}
        self.arrivals = 0

    # --- what can be worked out -------------------------------------------------------------------

    def in_state(self, *states: str) -> list[FlowTask]:
        """The tasks in these states."""
        return [task for task in self.tasks.values() if task.state in states]

    def backlog(self, seat: Seat) -> list[FlowTask]:
        """The tasks that wait at a seat, next one first."""
        mine = [task for task in self.in_state("ready") if task.seat == seat]
        return sorted(mine, key=lambda task: task.rank)

    def running(self) -> Counter[Owner]:
        """How many tasks of each user and of each tenant are leased."""
        leased = self.in_state("running")
        return Counter(owner for task in leased for owner in owners_of(task.owner))

    def holds(self, task_id: str, token: str) -> bool:
        """Whether this token has the task's lease."""
        task = self.tasks[task_id]
        return task.state == "running" and task.token == token

    def of(self, owner: Owner, name: str) -> Any:
        """A setting of a user or a tenant."""
        return self.settings.get(owner, {}).get(name)

    def weight(self, owner: Owner) -> float:
        return float(self.of(owner, "weight") or 1.0)

    def stride(self, owner: Owner, cost: float | None) -> float:
        """How far a serve moves a user or a tenant in virtual time."""
        return (1.0 if cost is None else cost) / self.weight(owner)

    def most_credit(self) -> float:
        return max(CRITICAL_CREDIT, 1 + self.refill())

    def refill(self) -> float:
        return self.share / (1 - self.share) if self.share < 1 else 0.0

    def blocked(self, owner: Owner, now: int, cost: float | None = None) -> float | None:
        """When one may be served: None for now, a time, or NEVER until a setting changes."""
        if self.of(owner, "paused"):
            return NEVER
        cap, rate = self.of(owner, "max_running"), self.of(owner, "rate")
        if cap is not None and self.running()[owner] >= cap:
            return NEVER
        if rate is None:
            return None
        burst, interval = max(1, math.floor(rate * BURST_S)), 1000 / rate
        until, last = self.debts.get(owner, (0.0, None))
        most = now + max(burst, 1 if last is None else last) * interval
        if until > most + 0.001:
            until = most
            self.debts[owner] = (until, None)
        # What costs more than the rate allows at once begins when there is no debt.
        free = until - max(0.0, burst - (1 if cost is None else cost)) * interval
        return math.ceil(free) if free > now else None

    # --- seats come and go ------------------------------------------------------------------------

    def ring(self, seat: Seat) -> Ring:
        return self.rings[seat.ring]

    def debt(self, seat: Seat) -> float | None:
        """The finish tag of a seat, if the clock has not passed it."""
        tag = self.ring(seat).idle.get(seat)
        return tag if tag is not None and tag > self.ring(seat).clock else None

    def place(
        self, seat: Seat, now: int, newcomer: bool, cost: float | None, critical: bool
    ) -> None:
        """A seat with waiting tasks takes its place, or is parked; and so does its tenant."""
        until = self.blocked(seat.owner, now)
        if until is not None:
            self.parked[seat] = until
            return
        ring, debt = self.ring(seat), self.debt(seat)
        start = ring.clock
        if debt is not None:
            start = max(start, debt)
        elif newcomer:
            start += self.stride(seat.owner, cost)
        ring.idle.pop(seat, None)
        if (self.pools or seat.pool) and seat.ring[1] is None and not ring.ready:
            ring.rested = True
        ring.ready[seat] = start
        above = seat.above
        if above and above not in self.parked and above not in self.ring(above).ready:
            is_new = newcomer and not self.running()[above.owner] and self.debt(above) is None
            self.place(above, now, is_new, cost, critical)
        if critical:
            self.enter_lane(seat, cost)

    def enter_lane(self, seat: Seat, cost: float | None) -> None:
        """The next task of a seat is CRITICAL; its tenant enters the lane with it."""
        ring = self.ring(seat)
        tag = ring.critical_clock + self.stride(seat.owner, cost)
        ring.critical.setdefault(seat, tag)
        if seat.above and seat.above in self.ring(seat.above).ready:
            self.enter_lane(seat.above, cost)

    def return_seat(self, seat: Seat, now: int) -> None:
        """A seat that was parked may be served again; it is no newcomer."""
        if seat.owner.is_tenant:
            inner = self.rings[seat.below]
            if inner.ready:
                self.place(seat, now, False, None, bool(inner.critical))
            return
        head = self.backlog(seat)[0]
        self.place(seat, now, False, head.cost, head.level == CRITICAL)

    def park(self, seat: Seat, until: float) -> None:
        ring = self.ring(seat)
        ring.idle[seat] = ring.ready.pop(seat)
        ring.critical.pop(seat, None)
        self.parked[seat] = until
        self.left(seat)

    def leave(self, seat: Seat) -> None:
        """A seat without waiting tasks keeps its tag."""
        ring = self.ring(seat)
        if seat in ring.ready:
            ring.idle[seat] = ring.ready.pop(seat)
        self.parked.pop(seat, None)
        ring.critical.pop(seat, None)
        self.left(seat)

    def left(self, seat: Seat) -> None:
        """A tenant of whom no user is ready leaves the ring above."""
        above = seat.above
        if above is None:
            return
        if not self.ring(seat).ready:
            self.leave(above)
            self.ring(above).idle.setdefault(above, self.ring(above).clock)
        elif not self.ring(seat).critical:
            self.ring(above).critical.pop(above, None)

    def keep_lane(self, seat: Seat) -> None:
        """A seat whose next task is not CRITICAL leaves the lane."""
        backlog = self.backlog(seat)
        if backlog and backlog[0].level != CRITICAL and seat in self.ring(seat).ready:
            self.ring(seat).critical.pop(seat, None)
            self.left(seat)

    def review(self, owner: Owner, now: int) -> None:
        """The limits of somebody, or what counts against them, have changed."""
        until = self.blocked(owner, now)
        for pool in ("", *self.pools):
            self.review_seat(Seat(owner, pool), until, now)

    def review_seat(self, seat: Seat, until: float | None, now: int) -> None:
        if seat in self.parked:
            if until is not None:
                self.parked[seat] = until
            else:
                del self.parked[seat]
                self.return_seat(seat, now)
        elif seat in self.ring(seat).ready and until is not None:
            self.park(seat, until)

    def settle(self, ring: Ring) -> None:
        """Past service does not count any more."""
        ring.clock = max([ring.clock, *ring.idle.values()])

    def settle_pool(self, pool: str) -> None:
        """Nothing waits in a pool, and nothing runs."""
        ring = self.rings[pool, None]
        if not ring.ready and not self.in_state("running"):
            self.settle(ring)

    def settle_for(self, seat: Seat) -> None:
        """The same for a tenant that has no place and nothing running, before a seat is placed."""
        self.settle_pool(seat.pool)
        above = seat.above
        if (
            above
            and above not in self.ring(above).ready
            and not self.running()[above.owner]
            and not self.ring(seat).ready
            and self.debt(above) is None
        ):
            self.settle(self.ring(seat))

    def wait(self, tasks: list[FlowTask], now: int, *, returning: bool = False) -> None:
        """Tasks begin to wait; those that return do not make their user a newcomer."""
        seats = list(dict.fromkeys(task.seat for task in tasks))
        ready = {seat for seat in seats if seat in self.ring(seat).ready}
        absent = [seat for seat in seats if seat not in ready and seat not in self.parked]
        for task in tasks:
            task.state = "ready"
        if absent:
            self.settle_pool("")
        for seat in absent:
            self.settle_for(seat)
            known = returning or self.running()[seat.owner] > 0 or self.debt(seat) is not None
            head = self.backlog(seat)[0]
            self.place(seat, now, not known, head.cost, head.level == CRITICAL)
        for task in tasks:
            if task.seat in ready and task.level == CRITICAL:
                self.enter_lane(task.seat, task.cost)
            self.know(task.pool)

    def know(self, pool: str) -> None:
        if pool and pool not in self.pools:
            self.pools.append(pool)

    def take_away(self, task: FlowTask) -> None:
        """A task does not wait any more."""
        waited, task.state = task.state == "ready", "between"
        if waited and self.backlog(task.seat):
            self.keep_lane(task.seat)
        elif waited:
            self.leave(task.seat)

    # --- pushing and claiming ---------------------------------------------------------------------

    def push(self, tasks: Iterable[FlowTask], now: int) -> None:
        """Store new tasks: they wait, or are delayed."""
        waiting = []
        for task in tasks:
            self.arrivals += 1
            task.arrival = self.arrivals
            self.tasks[task.task_id] = task
            if task.due_ms > now:
                task.state = "delayed"
            else:
                waiting.append(task)
        self.wait(waiting, now)

    def claim(self, token: str, limit: int, lease_ms: int, now: int, pools: list[str]) -> list[str]:
        """Hand out tasks of some pools, fairly on both levels."""
        held = [task_id for task_id in self.claims.get(token, []) if self.holds(task_id, token)]
        if held:
            return held
        self.upkeep(now)
        for pool in pools:
            self.know(pool)
            ring = self.rings[pool, None]
            if ring.credit is not None:
                ring.credit = min(ring.credit, self.most_credit())
        if len(pools) > 1:
            self.align(pools)
        served = self.serve_all(limit, now, pools)
        for task in served:
            task.token, task.lease_end_ms = token, now + lease_ms
            task.attempts += 1
        for pool in pools:
            if not served:
                self.settle_pool(pool)
            self.reap((pool, None))
        self.claims[token] = [task.task_id for task in served]
        return self.claims[token]

    def serve_all(self, limit: int, now: int, pools: list[str]) -> list[FlowTask]:
        """The tasks whose turn it is, at most so many."""
        served: list[FlowTask] = []
        opened: set[RingName] = set()
        while len(served) < limit and (turn := self.next_turn(pools)) is not None:
            task = self.serve(*turn, now, opened)
            if task is not None:
                served.append(task)
        for name in opened:
            self.reap(name)
        return served

    def align(self, pools: list[str]) -> None:
        """A pool that had nothing to serve begins where the lowest of the others is."""
        tags = {pool: self.rings[pool, None].ready.values() for pool in pools}
        first = {pool: min(values) for pool, values in tags.items() if values}
        busy = [
            tag + self.rings[pool, None].offset
            for pool, tag in first.items()
            if not self.rings[pool, None].rested
        ]
        floor = min(busy, default=None)
        for pool, tag in first.items():
            ring = self.rings[pool, None]
            if ring.rested:
                floor = tag + ring.offset if floor is None else floor
                ring.offset, ring.rested = floor - tag, False

    def next_turn(self, pools: list[str]) -> tuple[Seat, bool] | None:
        """Whose turn it is, and whether by the CRITICAL lane."""
        rings = [self.rings[pool, None] for pool in pools]
        lanes = [
            (ring.critical[seat], at, seat)
            for at, ring in enumerate(rings)
            if self.share > 0 and ring.has_credit(self.share)
            if (seat := ring.next_by(ring.critical))
        ]
        if lanes:
            return min(lanes)[2], True
        several = len(pools) > 1
        turns = [
            (ring.ready[seat] + (ring.offset if several else 0.0), at, seat)
            for at, ring in enumerate(rings)
            if (seat := ring.next_by(ring.ready))
        ]
        return (min(turns)[2], False) if turns else None

    def serve(self, seat: Seat, jumps: bool, now: int, opened: set[RingName]) -> FlowTask | None:
        """Take the next task of a user, or of the tenant's user whose turn it is."""
        if not seat.owner.is_tenant:
            return self.serve_user(seat, jumps, now)
        if self.pools and (until := self.blocked(seat.owner, now)) is not None:
            self.park(seat, until)
            return None
        opened.add(seat.below)
        inner, outer = self.rings[seat.below], self.ring(seat)
        task = None
        while task is None and seat in outer.ready:
            user = inner.next_by(inner.critical if jumps else inner.ready)
            if user is None:
                return None
            task = self.serve_user(user, jumps, now, above=seat)
        return task

    def serve_user(
        self, seat: Seat, jumps: bool, now: int, above: Seat | None = None
    ) -> FlowTask | None:
        task = self.backlog(seat)[0]
        if task.cost is not None or self.pools:
            for each in (seat, above):
                if each and (until := self.blocked(each.owner, now, task.cost)) is not None:
                    self.park(each, until)
                    return None
        task.state = "running"
        task.charge = 1.0 if task.cost is None else task.cost
        for each in (seat, above):
            if each:
                self.charge(each, jumps, task.cost)
                self.spend(each.owner, task.cost, now)
        if not self.backlog(seat):
            self.leave(seat)
        elif (until := self.blocked(seat.owner, now)) is not None:
            self.park(seat, until)
        else:
            self.keep_lane(seat)
        if above and above in self.ring(above).ready:
            until = self.blocked(above.owner, now)
            if until is not None:
                self.park(above, until)
        return task

    def charge(self, seat: Seat, jumps: bool, cost: float | None) -> None:
        """Advance the clocks of a ring, and the tags of a seat, by one task."""
        ring, stride, is_pool = self.ring(seat), self.stride(seat.owner, cost), not seat.ring[1]
        if jumps:
            ring.critical_clock = max(ring.critical_clock, ring.critical[seat])
            ring.critical[seat] += stride
            if self.share < 1 and is_pool:
                ring.credit = (CRITICAL_CREDIT if ring.credit is None else ring.credit) - 1
        else:
            ring.clock = max(ring.clock, ring.ready[seat])
            if self.share < 1 and ring.credit is not None:
                ring.credit = min(self.most_credit(), ring.credit + self.refill())
        ring.ready[seat] += stride

    def spend(self, owner: Owner, cost: float | None, now: int) -> None:
        if rate := self.of(owner, "rate"):
            until, _ = self.debts.get(owner, (0.0, None))
            spent = (1.0 if cost is None else cost) * 1000 / rate
            self.debts[owner] = max(float(now), until) + spent, cost

    def reap(self, name: RingName) -> None:
        """Finish tags that the clock has passed go; with a tenant's, all that its ring has left."""
        ring = self.rings[name]
        for seat in [seat for seat, tag in ring.idle.items() if tag <= ring.clock]:
            del ring.idle[seat]
            if seat.owner.is_tenant and seat not in self.parked:
                del self.rings[seat.below]

    def upkeep(self, now: int) -> None:
        """What time has made due: delays, leases, expired tasks, parked seats."""
        due = [task for task in self.in_state("delayed") if task.due_ms <= now]
        self.wait(sorted(due, key=lambda task: (task.due_ms, task.task_id)), now)
        lost = [task for task in self.in_state("running") if task.lease_end_ms <= now]
        lost.sort(key=lambda task: (task.lease_end_ms, task.task_id))
        for task in lost:
            self.end_lease(task, now)
        self.wait(lost, now, returning=True)
        waiting = self.in_state("ready", "delayed")
        late = [task for task in waiting if task.expires_ms is not None and task.expires_ms <= now]
        for task in sorted(late, key=lambda task: (task.expires_ms, task.task_id)):
            if task.attempts == 0:
                self.take_away(task)
                task.state = "expired"
        moments = [(until, seat.text, seat) for seat, until in self.parked.items() if until <= now]
        for _, _, seat in sorted(moments):
            self.review_seat(seat, self.blocked(seat.owner, now), now)

    # --- ending -----------------------------------------------------------------------------------

    def end_lease(self, task: FlowTask, now: int, cost: float | None = None) -> None:
        """The lease is over; what it has cost is charged instead of what was declared."""
        task.state, task.token = "between", None
        owners = owners_of(task.owner)
        if cost is not None:
            self.adjust(task, cost - task.charge)
            for owner in owners:
                if rate := self.of(owner, "rate"):
                    until, _ = self.debts.get(owner, (0.0, None))
                    more = (cost - (1.0 if task.cost is None else task.cost)) * 1000 / rate
                    debt = max(float(now), until) + more
                    # It may be that of several tasks, which ran at a time.
                    self.debts[owner] = debt, max(cost, (debt - now) * rate / 1000)
        for owner in owners:
            has_paid = cost is not None and self.of(owner, "rate") is not None
            if self.of(owner, "max_running") is not None or has_paid:
                self.review(owner, now)

    def adjust(self, task: FlowTask, by: float) -> None:
        """Correct the tags of a user and its tenant, never below the clock."""
        for seat in (task.seat, task.seat.above):
            if seat is None:
                continue
            ring, change = self.ring(seat), by / self.weight(seat.owner)
            tags = ring.ready if seat in ring.ready else ring.idle
            tags[seat] = max(ring.clock, tags.get(seat, ring.clock) + change)

    def finish(self, task_id: str, now: int, cost: float | None) -> None:
        """The holder of the lease has done the task."""
        task = self.tasks[task_id]
        self.end_lease(task, now, cost)
        task.state = "finished"

    def retry(self, task_id: str, delay_ms: int, now: int) -> None:
        """The task is offered again."""
        task = self.tasks[task_id]
        self.end_lease(task, now)
        task.due_ms = now + delay_ms
        if delay_ms:
            task.state = "delayed"
        else:
            self.wait([task], now, returning=True)

    def release(self, task_id: str, now: int) -> None:
        """The task was not begun: attempt and charge are as before, and so is its expiry."""
        task = self.tasks[task_id]
        task.state, task.token, task.attempts = "between", None, task.attempts - 1
        self.adjust(task, -task.charge)
        self.wait([task], now, returning=True)
        for owner in owners_of(task.owner):
            self.review(owner, now)

    def cancel(self, task_id: str) -> None:
        """A task that waits will not run."""
        task = self.tasks[task_id]
        self.take_away(task)
        task.state = "cancelled"

    def reschedule(self, task_id: str, delay_ms: int, now: int) -> None:
        """A task that nobody has claimed becomes ready at another time."""
        task = self.tasks[task_id]
        self.take_away(task)
        task.due_ms = now + delay_ms
        if delay_ms:
            task.state = "delayed"
        else:
            self.wait([task], now)

    # --- settings ---------------------------------------------------------------------------------

    def set(self, owner: Owner, now: int, change: dict[str, Any]) -> None:
        """Change settings; a new weight rescales what one is ahead of the clocks of each pool."""
        before = self.weight(owner)
        stored = self.settings.get(owner, {}) | change
        self.settings[owner] = {name: value for name, value in stored.items() if value is not None}
        if not self.settings[owner]:
            del self.settings[owner]
        if self.of(owner, "rate") is None:
            self.debts.pop(owner, None)
        ratio = before / self.weight(owner)
        for pool in ("", *self.pools):
            seat = Seat(owner, pool)
            ring = self.ring(seat)
            for tags, clock in (
                (ring.ready, ring.clock),
                (ring.idle, ring.clock),
                (ring.critical, ring.critical_clock),
            ):
                if seat in tags and tags[seat] > clock and ratio != 1:
                    tags[seat] = clock + (tags[seat] - clock) * ratio
        self.review(owner, now)

    def move(self, user: str, old: str | None, new: str | None, now: int) -> int:
        """A user's waiting tasks belong to another tenant, and so do settings if it has none."""
        before, after = Owner(user, old), Owner(user, new)
        has_settings = before in self.settings and after not in self.settings
        if has_settings:
            self.settings[after] = self.settings.pop(before)
        mine = [task for task in self.in_state("ready", "delayed") if task.owner == before]
        mine.sort(key=lambda task: (task.seat.text, task.rank))
        waiting = []
        for task in mine:
            if task.state == "ready":
                self.take_away(task)
                waiting.append(task)
            task.owner = after
        self.wait(waiting, now, returning=True)
        for owner in (before, after) if has_settings else ():
            self.review(owner, now)
        return len(mine)
