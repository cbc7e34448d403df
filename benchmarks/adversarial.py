"""Attacks on fairness: who gets what, compared with an ideal server of the same tasks.

Each scene is a queue, tenants that behave badly, and tenants that do not. Time is passed in, and
chance has a seed, so that a scene has the same outcome each time: counts, not times.
"""

import heapq
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import Bench
from fairqueue import Task, TaskQueue
from fairqueue.clock import ManualClock
from fairqueue.models import Claim
from fairqueue.queue.snapshot import jain_index

LEAST_JAIN = 0.99  # among those with a backlog during all of a scene
LEAST_SHARE = 0.95  # of what a tenant is entitled to
MOST_WAIT = 2.0  # claims for each active tenant of the same weight: of a quiet tenant's task
WORKERS = 4  # where tasks take time


class Ideal:
    """Serves all members with a backlog at the same time, in proportion to their weights.

    What it gives to a member is what the member is entitled to. Its virtual time is the service
    that a backlogged member of weight 1 has got.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.weights: dict[str, float] = {}
        self._since: dict[str, float] = {}  # member with a backlog -> when it was last settled
        self._ends: dict[str, float] = {}  # the same -> when its backlog is over
        self._heap: list[tuple[float, str]] = []
        self._received: defaultdict[str, float] = defaultdict(float)
        self._total = 0.0  # weight of those with a backlog

    def add(self, member: str, amount: float) -> None:
        """Add to a member's backlog; a negative amount takes from it."""
        weight = self.weights.get(member, 1.0)
        if member not in self._ends:
            if amount <= 0:
                return
            self._since[member] = self._ends[member] = self.now
            self._total += weight
        self._ends[member] += amount / weight
        if amount < 0 and self._ends[member] <= self.now:
            self._leave(member, self.now)
        else:
            heapq.heappush(self._heap, (self._ends[member], member))

    def set_weight(self, member: str, weight: float) -> None:
        old = self.weights.get(member, 1.0)
        self.weights[member] = weight
        if member in self._ends:
            self._settle(member, old)
            self._total += weight - old
            self._ends[member] = self.now + (self._ends[member] - self.now) * old / weight
            heapq.heappush(self._heap, (self._ends[member], member))

    def serve(self, amount: float) -> None:
        """Divide some service between the members."""
        while amount > 1e-9 and self._ends:
            end, member = self._heap[0]
            if self._ends.get(member) != end:
                heapq.heappop(self._heap)  # it has changed since
                continue
            step = min(amount, max(0.0, end - self.now) * self._total)
            self.now += step / self._total
            amount -= step
            if self.now >= end - 1e-12:
                self._leave(member, end)

    def received(self, member: str) -> float:
        if member in self._ends:
            self._settle(member, self.weights.get(member, 1.0))
        return self._received[member]

    def _settle(self, member: str, weight: float) -> None:
        self._received[member] += weight * (self.now - self._since[member])
        self._since[member] = self.now

    def _leave(self, member: str, end: float) -> None:
        weight = self.weights.get(member, 1.0)
        self._received[member] += weight * (end - self._since.pop(member))
        self._total -= weight
        del self._ends[member]


@dataclass
class Level:
    """Members that share something: what they got, and what they are entitled to."""

    ideal: Ideal = field(default_factory=Ideal)
    got: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    left: Counter[str] = field(default_factory=Counter)  # waiting tasks
    always: set[str] = field(default_factory=set)  # those who have had a backlog from the beginning
    begun: bool = False

    def push(self, member: str, count: int, amount: float) -> None:
        if not self.begun:
            self.always.add(member)
        self.left[member] += count
        self.ideal.add(member, amount)

    def serve(self, member: str, amount: float) -> None:
        self.begun = True
        self.ideal.serve(amount)
        self.got[member] += amount

    def drop(self, member: str, count: int) -> None:
        self.left[member] -= count
        if self.left[member] <= 0:
            del self.left[member]
            self.always.discard(member)

    def active(self) -> float:
        """How many members have waiting tasks, each counted with its weight."""
        weights = self.ideal.weights
        return len(self.left) + sum(weights[each] - 1 for each in self.left.keys() & weights.keys())

    def shares(self) -> list[float]:
        """What those with a backlog got, as a part of what they are entitled to."""
        entitled = {member: self.ideal.received(member) for member in sorted(self.always)}
        return [self.got[member] / amount for member, amount in entitled.items() if amount > 0]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The figures of a scene.

    tenants, users: Jain indexes of shares, the second one that of the tenant with the lowest.
    share: the least share of a tenant. wait: the longest wait of a quiet tenant, in claims, where
    `active` tenants had a backlog, each counted with its weight.
    """

    tenants: float
    users: float
    share: float
    wait: int
    active: float

    def missed(self) -> list[str]:
        """The goals that were missed."""
        goals = {
            f"Jain index of tenants {self.tenants:.4f}": self.tenants >= LEAST_JAIN,
            f"Jain index of users {self.users:.4f}": self.users >= LEAST_JAIN,
            f"worst share {self.share:.3f}": self.share >= LEAST_SHARE,
            f"wait of {self.wait} claims, {self.active:g} active": (
                self.wait <= MOST_WAIT * max(1, self.active)
            ),
        }
        return [goal for goal, is_reached in goals.items() if not is_reached]


class Trial:
    """A queue, and the account of who got what.

    A member of the first level is a tenant, or a user without one.
    """

    def __init__(
        self, url: str, size: float, seed: int = 1, *, partitions: int = 1, clients: int = 1
    ) -> None:
        self.clock = ManualClock()
        self.queues = [
            TaskQueue.from_url(url, clock=self.clock, timeout=30.0, partitions=partitions)
            for _ in range(clients)
        ]
        self.queue = self.queues[0]
        self.size = size
        self.chance = random.Random(seed)
        self.root = Level()
        self.inner: dict[str, Level] = {}
        self.claims = 0
        self.counted_pool: str | None = None  # waits are in claims of this pool; None: of any
        self.quiet: dict[str, tuple[int, float]] = {}  # task -> claims before it, active members
        self.waits: list[
            tuple[int, float]
        ] = []  # claims that a quiet task waited for, active members

    def count(self, full: int, least: int = 10) -> int:
        """A number of tasks, users or claims, smaller in a small scene."""
        return max(least, round(full * self.size))

    # --- what happens ---

    def any_queue(self) -> TaskQueue:
        """One of the clients, each of which has its own knowledge of the partitions."""
        return self.queue if len(self.queues) == 1 else self.chance.choice(self.queues)

    def make(self, tenant: str | None, user: str, **options: Any) -> Task:
        return Task.create(user_id=user, tenant=tenant, **options)

    def owner(self, task: Task) -> tuple[str | None, str]:
        """The tenant and the user of a task that `make` has made."""
        return task.tenant, task.user_id

    def push(
        self,
        tenant: str | None,
        user: str,
        count: int = 1,
        *,
        runs: bool = True,
        **options: Any,
    ) -> None:
        """Push tasks; `runs` is False if they cannot start for now: see `arrive`."""
        self.push_all([(tenant, user)] * count, runs=runs, **options)

    def push_all(
        self, owners: Iterable[tuple[str | None, str]], *, runs: bool = True, **options: Any
    ) -> None:
        listed = list(owners)
        self.queue.push_many(self.make(tenant, user, **options) for tenant, user in listed)
        if runs:
            for (tenant, user), count in Counter(listed).items():
                self.arrive(tenant, user, count, options.get("cost") or 1.0)

    def arrive(
        self, tenant: str | None, user: str, count: int, cost: float = 1.0, sign: int = 1
    ) -> None:
        """Note that tasks may start from now on."""
        self.root.push(tenant or user, count, count * cost)
        if tenant is not None:
            self.inner.setdefault(tenant, Level()).push(user, count, count * cost)

    def push_quiet(self, tenant: str, **options: Any) -> None:
        """Push the only task of a tenant with weight 1, whose wait counts."""
        task = self.make(tenant, "quiet", **options)
        self.queue.push(task)
        self.arrive(tenant, "quiet", 1)
        self.quiet[task.task_id] = (self.claims, self.root.active())

    def claim(self, limit: int = 1, **options: Any) -> list[Claim]:
        """Claim tasks, which must be there."""
        for _ in range(100):  # claims may have only moved tasks that cannot start
            claims = self.any_queue().claim("w", limit, lease=86_400.0, **options)
            for claim in claims:
                self.claims += self.counted_pool in (None, claim.task.pool)
                before = self.quiet.pop(claim.task.task_id, None)
                if before is not None:
                    since, active = before
                    self.waits.append((self.claims - since, max(active, self.root.active())))
            if claims:
                return claims
        raise SystemExit("the scene has nothing more to claim")

    def served(self, claim: Claim, amount: float = 1.0, *, again: bool = False) -> None:
        """Note that a claim was used; `again` if its task waits again."""
        tenant, user = self.owner(claim.task)
        member = tenant or user
        self.root.serve(member, amount)
        if again:
            self.root.ideal.add(member, amount)
        else:
            self.root.drop(member, 1)
        if tenant is None:
            return
        users = self.inner[tenant]
        users.serve(user, amount)
        if again:
            users.ideal.add(user, amount)
        else:
            users.drop(user, 1)

    def finish(self, claims: list[Claim]) -> None:
        if len(claims) == 1:
            self.queue.finish(claims[0])
        else:
            self.queue.finish_many((claim, None) for claim in claims)
        for claim in claims:
            self.served(claim, claim.task.cost or 1.0)

    def serve(self, claims: int, each: Callable[[int], object] = lambda n: None) -> None:
        """Claim and finish tasks one by one, and do something before each."""
        for n in range(claims):
            each(n)
            self.finish(self.claim())

    def run_workers(self, seconds: float, takes: Callable[[Claim], float], *, by: str) -> None:
        """Run tasks that take time, on some workers; service is counted in tasks or seconds."""
        busy: list[tuple[float, int, Claim, float]] = []
        now, number = 0.0, 0
        quiet = quiet_every(self, 40)
        while now < seconds:
            while len(busy) < WORKERS:
                quiet(number)
                (claim,) = self.claim()
                number += 1
                heapq.heappush(busy, (now + takes(claim), number, claim, now))
            end, _, claim, start = heapq.heappop(busy)
            self.clock.advance(end - now)
            now = end
            self.queue.finish(claim)
            self.served(claim, end - start if by == "time" else 1.0)

    # --- the account ---

    def set_tenant(self, tenant: str, weight: float) -> None:
        self.queue.set_tenant(tenant, weight=weight)
        self.root.ideal.set_weight(tenant, weight)

    def set_user(self, tenant: str, user: str, weight: float) -> None:
        self.queue.set_user(user, tenant=tenant, weight=weight)
        self.inner[tenant].ideal.set_weight(user, weight)

    def move_user(self, user: str, tenant: str, to: str) -> None:
        """Move a user; its tasks in both tenants are then left out of the comparison of users."""
        self.queue.move_user(user, to, tenant=tenant)
        count = self.inner[tenant].left[user]
        for level, member in ((self.root, tenant), (self.inner[tenant], user)):
            level.ideal.add(member, -count)
            level.drop(member, count)
        self.arrive(to, user, count)

    def outcome(self) -> Outcome:
        shares = self.root.shares()
        of_users = [level.shares() for level in self.inner.values()]
        wait, active = max(self.waits, key=lambda each: each[0] / each[1], default=(0, 0))
        return Outcome(
            tenants=jain_index(shares) or 1.0,
            users=min((jain_index(each) or 1.0 for each in of_users if each), default=1.0),
            share=min(shares, default=1.0),
            wait=wait,
            active=active,
        )


class FlatTrial(Trial):
    """The same tasks pushed without tenants, as users of their own; the account is of tenants.

    It shows what tenants change. Scenes with settings of tenants cannot be played flat.
    """

    def make(self, tenant: str | None, user: str, **options: Any) -> Task:
        return Task.create(user_id=user if tenant is None else f"{tenant}/{user}", **options)

    def owner(self, task: Task) -> tuple[str | None, str]:
        tenant, slash, user = task.user_id.rpartition("/")
        return (tenant if slash else None), user


Scene = Callable[[Trial], None]
SCENES: dict[str, Scene] = {}


def scene(name: str) -> Callable[[Scene], Scene]:
    def add(function: Scene) -> Scene:
        SCENES[name] = function
        return function

    return add


def quiet_every(trial: Trial, steps: int, **options: Any) -> Callable[[int], None]:
    """Let a quiet tenant push a task now and then."""

    def push(n: int) -> None:
        if n % steps == steps // 2 and not trial.quiet:
            trial.push_quiet("quiet", **options)

    return push


# --- many users, newcomers ------------------------------------------------------------------------


@scene("one tenant with 1,000 users, one with 1")
def crowd(trial: Trial) -> None:
    users, rounds = trial.count(1000), 3
    trial.push_all(("crowd", f"user-{n}") for n in range(users) for _ in range(rounds + 2))
    trial.push("lone", "ann", 2 * rounds * users)
    trial.push(None, "bob", 2 * rounds * users)
    quiet = quiet_every(trial, 50)
    while trial.root.got["crowd"] < rounds * users:
        trial.serve(1, lambda _: quiet(trial.claims))


@scene("a flood of new tenants")
def new_tenants(trial: Trial) -> None:
    claims = trial.count(4000)
    for tenant in ("old-1", "old-2"):
        trial.push(tenant, "ann", claims)
        trial.push(tenant, "bob", claims)
    trial.serve(claims, lambda n: trial.push_quiet(f"new-{n}"))


@scene("a flood of new users of one tenant")
def new_users(trial: Trial) -> None:
    claims = trial.count(4000)
    for tenant, user in (("flooded", "ann"), ("flooded", "amy"), ("other", "bob")):
        trial.push(tenant, user, claims)
    quiet = quiet_every(trial, 40)

    def flood(n: int) -> None:
        quiet(n)
        trial.push("flooded", f"new-{n}")

    trial.serve(claims, flood)


@scene("100,000 users of 1,000 tenants")
def large(trial: Trial) -> None:
    tenants, users = trial.count(1000), 100
    for _ in range(2):
        trial.push_all((f"t{t}", f"u{u}") for u in range(users) for t in range(tenants))
    number, left = 0, tenants * users
    while left > 0:
        if not trial.quiet:
            trial.push_quiet(f"quiet-{number}")
            number += 1
        claims = trial.claim(min(250, left))
        left -= sum(trial.owner(claim.task)[1] != "quiet" for claim in claims)
        trial.finish(claims)


# --- attempts that do not end ---------------------------------------------------------------------


@scene("a storm of retries")
def retries(trial: Trial) -> None:
    claims = trial.count(3000)
    trial.queue.configure(max_attempts=1_000_000)
    trial.push("storm", "ann", 40)
    trial.push("storm", "amy", 40)
    trial.push("calm", "bob", claims)
    trial.push(None, "cy", claims)
    quiet = quiet_every(trial, 30)
    for n in range(claims):
        quiet(n)
        (claim,) = trial.claim()
        if trial.owner(claim.task)[0] == "storm":
            trial.queue.retry(claim, "failed")
            trial.served(claim, again=True)
        else:
            trial.finish([claim])


@scene("a worker that gives back what it takes")
def releases(trial: Trial) -> None:
    claims = trial.count(3000)
    for tenant, user in (("acme", "ann"), ("acme", "amy"), ("globex", "bob"), (None, "cy")):
        trial.push(tenant, user, claims)
    quiet = quiet_every(trial, 30)
    for n in range(claims):
        quiet(n)
        trial.queue.release(trial.queue.claim("other")[0])
        trial.serve(1)


# --- tasks that take time -------------------------------------------------------------------------


def long_and_short(trial: Trial, by: str) -> None:
    seconds = trial.count(4000, 600)
    for tenant, user in (("long", "ann"), ("long", "amy"), ("short", "bob"), (None, "cy")):
        trial.push(tenant, user, WORKERS * seconds)
    takes = {"ann": 20.0, "amy": 10.0}
    trial.run_workers(seconds, lambda claim: takes.get(trial.owner(claim.task)[1], 1.0), by=by)


@scene("long tasks, cost by tasks")
def long_by_tasks(trial: Trial) -> None:
    long_and_short(trial, "tasks")


@scene("long tasks, cost by time")
def long_by_time(trial: Trial) -> None:
    trial.queue.configure(cost="time")
    long_and_short(trial, "time")


@scene("tasks that declare their cost")
def declared(trial: Trial) -> None:
    claims = trial.count(3000)
    costs = {"ann": 8.0, "amy": 2.0, "bob": 1.0}
    for tenant, user in (("acme", "ann"), ("acme", "amy"), ("globex", "bob")):
        trial.push(tenant, user, claims, cost=costs[user])
    trial.serve(claims, quiet_every(trial, 40))


# --- limits ---------------------------------------------------------------------------------------


@scene("keys and names without room")
def no_room(trial: Trial) -> None:
    claims = trial.count(3000)
    trial.queue.set_limit("account:*", slots=1)
    trial.queue.set_limits("slow", slots=1)
    taken: list[dict[str, Any]] = [{"limit_keys": ["account:1"]}, {"name": "slow"}]
    for options in taken:
        trial.queue.push(Task.create(user_id="holder", **options))
        trial.queue.claim("holder", lease=86_400.0)
    for tenant, user in (("acme", "ann"), ("globex", "bob"), (None, "cy")):
        for options in taken:
            trial.push(tenant, user, claims // 4, runs=False, **options)
    for tenant, user in (("acme", "ann"), ("acme", "amy"), ("globex", "bob"), (None, "cy")):
        trial.push(tenant, user, claims)
    trial.serve(claims, quiet_every(trial, 30))


@scene("one key for all")
def one_key(trial: Trial) -> None:
    claims = trial.count(3000)
    trial.queue.set_limit("api", slots=1)
    users = [("crowd", f"user-{n}") for n in range(10)] + [("lone", "ann"), (None, "bob")]
    for tenant, user in users:
        trial.push(tenant, user, claims, limit_keys=["api"])
    trial.serve(claims, quiet_every(trial, 40, limit_keys=["api"]))


# --- kinds of workers -----------------------------------------------------------------------------


@scene("workers that take only some names")
def fleets(trial: Trial) -> None:
    claims = trial.count(1500)
    for tenant, names in (("one", ["a"]), ("other", ["b"]), ("both", ["a", "b"])):
        for name in names:
            trial.push(tenant, "ann", 2 * claims, name=name)
            trial.push(tenant, "bob", 2 * claims, name=name)
    quiet = quiet_every(trial, 40, name="a")
    for n in range(claims):
        quiet(n)
        trial.finish(trial.claim(names=["a"]))
        trial.serve(1)


@scene("a pool whose tasks waited while others were served")
def late_pool(trial: Trial) -> None:
    claims = trial.count(1500)
    trial.queue.push_many(
        Task.create(user_id="ann", tenant="first", pool="gpu") for _ in range(claims)
    )
    # The clock of the default pool runs on; then others come for the rare workers.
    trial.queue.push_many(Task.create(user_id=f"u{n % 7}") for n in range(claims))
    while got := trial.queue.claim("cpu", limit=50):
        trial.queue.finish_many((claim, None) for claim in got)
    trial.arrive("first", "ann", claims)
    trial.push("late", "bob", claims, pool="gpu")
    trial.push("late", "amy", claims, pool="gpu")
    trial.push(None, "cy", claims, pool="gpu")
    quiet = quiet_every(trial, 40, pool="gpu")
    for n in range(claims):
        quiet(n)
        trial.finish(trial.claim(pools=["gpu"]))


@scene("workers of several pools")
def many_pools(trial: Trial) -> None:
    """Three workers; each tenant has tasks for all pools, and one many more users."""
    claims = trial.count(1200)
    for pool in ("default", "gpu"):
        for tenant, user in (("acme", "ann"), ("acme", "amy"), ("globex", "bob"), (None, "cy")):
            trial.push(tenant, user, 2 * claims, pool=pool)
    trial.counted_pool = "gpu"
    quiet = quiet_every(trial, 40, pool="gpu")
    for n in range(claims):
        quiet(n)
        for pools in (["default"], ["gpu"], ["default", "gpu"]):
            trial.finish(trial.claim(pools=pools))


# --- change ---------------------------------------------------------------------------------------


@scene("a flood of delayed tasks that fall due together")
def delayed(trial: Trial) -> None:
    claims = trial.count(3000)
    for tenant, user in (("acme", "ann"), ("globex", "bob"), (None, "cy")):
        trial.push(tenant, user, 2 * claims)
    flood = [("flood", f"user-{n % 5}") for n in range(2 * claims)]
    trial.push_all(flood, runs=False, delay=60.0)
    trial.serve(claims // 3, quiet_every(trial, 30))
    trial.clock.advance(60)
    for (tenant, user), count in Counter(flood).items():
        trial.arrive(tenant, user, count)
    trial.serve(claims, quiet_every(trial, 30))


@scene("weights and tenants changed under load")
def changes(trial: Trial) -> None:
    steps, claims = 12, trial.count(400, 30)
    tenants = ("acme", "globex", "initech")
    for tenant in tenants:
        for user in ("ann", "bob", "cy"):
            trial.push(tenant, user, 2 * steps * claims)
        trial.push(tenant, f"mover-of-{tenant}", claims)
    for _ in range(steps):
        tenant, other = trial.chance.sample(tenants, 2)
        trial.set_tenant(tenant, trial.chance.choice([0.5, 1.0, 2.0, 4.0]))
        trial.set_user(other, trial.chance.choice(["ann", "bob"]), trial.chance.choice([1.0, 3.0]))
        mover = f"mover-of-{tenant}"
        if trial.inner[tenant].left[mover]:
            trial.move_user(mover, tenant, other)
        trial.serve(claims, quiet_every(trial, 40))


# --- playing --------------------------------------------------------------------------------------


def play(name: str, url: str, size: float = 1.0) -> Outcome:
    """Play a scene on an empty server, and return its outcome."""
    trial = Trial(url, size)
    with trial.queue:
        SCENES[name](trial)
    return trial.outcome()


def run(bench: Bench) -> None:
    for name in SCENES:
        bench.empty()
        start = time.perf_counter()
        found = play(name, bench.server.url, bench.scale)
        missed = found.missed()
        bench.add(
            f"attack: {name}",
            f"Jain {min(found.tenants, found.users):.4f}",
            f"≥ {LEAST_JAIN}",
            not missed,
            f"users {found.users:.4f}; worst share {found.share:.3f} ≥ {LEAST_SHARE}; "
            f"quiet waits {found.wait} of {MOST_WAIT * found.active:.0f} claims; "
            f"{time.perf_counter() - start:.0f} s",
        )
    bench.empty()
