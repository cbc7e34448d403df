"""Random calls with tenants, pools, keys, unique tasks, expiry and cost.

Records agree after each call, limits hold, and in the end nothing is stuck or left behind.
`FAIRQUEUE_CHAOS_SEEDS=200 pytest tests/queue/test_flow_chaos.py` tries more of them.
"""

import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from helpers.state import dump, tenant_of
from helpers.world import World

from fairqueue.doctor import OK, Records
from fairqueue.errors import DuplicateTask, InvalidTask, LeaseLost, QueueFull, UnknownTask
from fairqueue.models import Claim, Task, UserSettings
from fairqueue.queue.claim import Wanted

USERS = ("ann", "bob", "cy")
TENANTS = (None, "acme", "globex")
POOLS = ("default", "default", "gpu", "mail")
KEYS = ("a:1", "a:2", "b:1", "order")
NAMES = ("plain", "plain", "limited")
SEEDS = int(os.environ.get("FAIRQUEUE_CHAOS_SEEDS", "10"))
WHOSE = (*USERS, *(f"\x02{tenant}" for tenant in TENANTS if tenant))  # with keys of their own
ENDED = {"finished", "cancelled", "expired", "buried"}


class Chaos:
    """Random calls, and what must hold after each of them."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.queue, self.clock = world, world.queue, world.clock
        self.random = random.Random(seed)
        self.claims: list[Claim] = []
        self.pushed: list[Task] = []
        self.answers: dict[str, str] = {}
        self.slots = {"\x03a:1": 1, "\x03a:2": 1, "\x03b:1": 2, "\x03order": 1, "limited": 2}
        self.queue.set_limit("a:*", slots=1)
        self.queue.set_limit("b:1", slots=2, rate=50.0)
        self.scope = scope = ("queue", "tenant")[seed % 3 == 0]
        self.queue.set_limit(
            "order", slots=1, ordered=True, through_retries=seed % 2 == 0, scope=scope
        )
        if scope == "tenant":
            del self.slots["\x03order"]  # each tenant has its own
            self.slots |= {f"\x03order\x02{whose}": 1 for whose in WHOSE}
        self.queue.set_limits("limited", slots=2)

    def step(self) -> None:
        actions = [self.push] * 5 + [self.claim] * 5 + [self.end] * 5 + [self.wait] * 2
        actions += [self.cancel, self.move, self.set_sharer, self.push_again, self.set_limit]
        actions += [self.move_user, self.set_queue, self.set_order]
        self.random.choice(actions)()

    def make(self) -> Task:
        pick = self.random.choice
        fields: dict[str, Any] = {
            "user_id": pick(USERS),
            "tenant": pick(TENANTS),
            "name": pick(NAMES),
            "pool": pick(POOLS),
            "priority": pick((1, 3, 3, 6)),
            "task_id": f"t{len(self.pushed)}",
            "delay": pick((None, None, None, 2.0)),
            "cost": pick((None, None, 0.5, 30.0)),
            "expires": pick((None, None, None, 4.0, 60.0)),
        }
        if self.random.random() < 0.4:
            fields["limit_keys"] = self.random.sample(KEYS, pick((1, 1, 2, 3)))
        if self.random.random() < 0.3:
            fields |= {
                "unique": pick(("u", "v")),
                "on_duplicate": pick(("ignore", "replace", "replace", "error")),
            }
            fields["unique_for"] = pick(("unfinished", "waiting", 5.0))
            if fields["on_duplicate"] == "replace" and pick((True, False)):
                fields |= {"debounce": 1.0, "max_wait": 3.0, "delay": None}
        return Task.create(**fields)

    def push(self) -> None:
        tasks = []
        for _ in range(self.random.choice((1, 1, 3, 10))):
            tasks.append(self.make())
            self.pushed.append(tasks[-1])
        with suppress(QueueFull, DuplicateTask):
            ids = self.queue.push_many(tasks)
            self.answers |= {t.task_id: i for t, i in zip(tasks, ids, strict=True)}

    def push_again(self) -> None:
        """A repeated push within the replay horizon gets the first answer."""
        recent = [t for t in self.pushed[-20:] if t.task_id in self.answers]
        if recent:
            task = self.random.choice(recent)
            with suppress(InvalidTask):  # it was pushed more than a minute ago and is gone
                assert self.queue.push(task) == self.answers[task.task_id]

    def claim(self) -> None:
        pools = self.random.choice((["default"], ["gpu"], ["mail"], ["default", "gpu"], POOLS))
        limit = self.random.choice((1, 1, 4, 30))
        before, running = self.used(), self.running()
        wanted = Wanted("", "" if set(pools) == {"default"} else "\n".join(sorted(set(pools))))
        answer = self.queue.link.perform(self.queue._claim_once("w", limit, 20_000, wanted))
        begun: Counter[Any] = Counter()
        for claim in answer.claims:
            assert claim.task.pool in pools
            tenant = claim.task.tenant
            whose = claim.task.user_id if tenant is None else f"\x02{tenant}"
            for key in claim.task.limit_keys:
                begun.update((f"\x03{key}", f"\x03{key}\x02{whose}"))
            begun[claim.task.name] += 1
            begun.update({(claim.task.tenant, claim.task.user_id), (claim.task.tenant, "")})
            info = self.world.info(claim.task.task_id)
            assert info.expires_at is None or info.expires_at > self.clock.now()
        for gate, slots in self.slots.items():
            assert begun[gate] <= max(0, slots - before[gate]), gate
        for sharer, settings in self.settings():
            if begun[sharer]:
                assert not settings.paused, sharer
                most = settings.max_running or math.inf
                assert running[sharer] + begun[sharer] <= max(most, running[sharer]), sharer
        self.claims += answer.claims

    def running(self) -> Counter[tuple[str | None, str]]:
        """Leases that are not over, of users and, with an empty user, of tenants."""
        state, now = dump(self.world.redis), self.clock.now_ms()
        found: Counter[tuple[str | None, str]] = Counter()
        for task_id, ends in state.get("leases", {}).items():
            if ends > now:
                record = state["status"][task_id]
                found.update({(record.get("group"), record["user"]), (record.get("group"), "")})
        return found

    def settings(self) -> Iterator[tuple[tuple[str | None, str], UserSettings]]:
        for tenant in TENANTS:
            for user in USERS:
                yield (tenant, user), self.queue.get_user(user, tenant=tenant)
            if tenant:
                yield (tenant, ""), self.queue.get_tenant(tenant)

    def used(self) -> Counter[str]:
        """Slots that are taken, of leases that are not over."""
        state = dump(self.world.redis)
        ends, now = state.get("leases", {}), self.clock.now_ms()
        taken = [member.split("\0") for member in state.get("slots", {})]
        return Counter(gate for gate, task_id in taken if ends[task_id] > now)

    def end(self) -> None:
        if not self.claims:
            return
        claim = self.claims.pop(self.random.randrange(len(self.claims)))
        how = self.random.choice((*["finish"] * 4, "costly", "retry", "release", "bury", "leave"))
        with suppress(LeaseLost):
            if how == "retry":
                cost = self.random.choice((None, 5.0))
                self.queue.retry(claim, "no", delay=self.random.choice((0, 3)), cost=cost)
            elif how == "costly":
                self.queue.finish(claim, cost=self.random.choice((0.1, 70.0)))
            elif how != "leave":
                {"finish": self.queue.finish, "release": self.queue.release}.get(
                    how, self.queue.bury
                )(claim)

    def set_sharer(self) -> None:
        settings: dict[str, Any] = self.random.choice(
            (
                {"paused": True},
                {"paused": False},
                {"max_running": 1},
                {"max_running": None},
                {"rate": 2.0},
                {"rate": None},
                {"weight": self.random.choice((0.5, 1.0, 4.0))},
                {"max_waiting": self.random.choice((None, 20))},
            )
        )
        tenant = self.random.choice(TENANTS)
        if tenant is not None and self.random.random() < 0.5:
            self.queue.set_tenant(tenant, **settings)
        else:
            self.queue.set_user(self.random.choice(USERS), tenant=tenant, **settings)

    def set_limit(self) -> None:
        slots = self.random.choice((1, 2, 3))
        self.queue.set_limit("b:1", slots=slots, rate=self.random.choice((None, 50.0)))
        self.slots["\x03b:1"] = slots

    def set_order(self) -> None:
        """Change how tasks of a key are ordered while they wait, and back."""
        ordered = self.random.choice((True, False))
        self.queue.set_limit(
            "order",
            slots=1,
            ordered=ordered,
            through_retries=ordered and self.random.choice((True, False)),
            scope=self.scope,
        )

    def set_queue(self) -> None:
        self.queue.configure(
            keep_finished=self.random.choice((0, 5, 1000)),
            critical_share=self.random.choice((0.0, 0.3, 1.0)),
        )

    def move_user(self) -> None:
        old, new = self.random.sample(TENANTS, 2)
        self.queue.move_user(self.random.choice(USERS), new, tenant=old)

    def cancel(self) -> None:
        self.queue.cancel(f"t{self.random.randrange(len(self.pushed) + 1)}")

    def move(self) -> None:
        with suppress(UnknownTask):
            task_id = f"t{self.random.randrange(len(self.pushed) + 1)}"
            self.queue.reschedule(task_id, delay=self.random.choice((0, 3)))

    def wait(self) -> None:
        self.clock.advance(self.random.choice((0.02, 0.5, 1, 5, 21)))

    def drain(self) -> None:
        """Nothing holds anybody back any more: all that is left ends."""
        for tenant in TENANTS:
            free: dict[str, Any] = {"paused": False, "max_running": None, "rate": None}
            for user in USERS:
                self.queue.set_user(user, tenant=tenant, **free)
            if tenant is not None:
                self.queue.set_tenant(tenant, **free)
        self.clock.advance(30)
        for _ in range(2 * len(self.pushed) + 20):
            claims = self.queue.claim("w", limit=30, lease=60, pools=POOLS)
            self.queue.finish_many((claim, None) for claim in claims)
            self.clock.advance(0.5)
            if not claims and not self.queue.size() and not self.queue.inspect().delayed:
                break
        state = dump(self.world.redis)
        left = {i: r for i, r in state.get("status", {}).items() if r["state"] not in ENDED}
        assert left == {}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_whatever_happens_records_agree_and_nothing_is_stuck(world: World, seed: int) -> None:
    world.queue.configure(max_attempts=1000)
    chaos, doctor = Chaos(world, seed), Records(world.queue.link, fix=False)
    for _ in range(150):
        chaos.step()
        world.check()
        assert [each for each in doctor.compare() if each.level != OK] == []
    chaos.drain()
    world.check()
    # When all is over and time has passed, nothing of it is left behind.
    world.clock.advance(3600)
    for _ in range(40):
        world.queue.claim("w", pools=POOLS)
    state = world.dump()
    assert not state.keys() & {"held", "slot_line", "slots", "gate_order", "gate_passes"}
    assert not state.keys() & {"uniques", "expiring", "pool_tasks", "rings", "tags", "ready"}
    assert not any(tenant_of(ring) or ring.startswith("\x02") for ring in state.get("clocks", {}))
