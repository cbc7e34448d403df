"""Limits that span partitions: exact whoever dies, shared fairly, and free when nobody waits."""

import json
import random
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis
from helpers.tasks import ids_of, make_task

from fairqueue.clock import ManualClock
from fairqueue.errors import ConfigurationError, FairQueueError, LeaseLost
from fairqueue.link.operation import At, Call, Gather, Operation
from fairqueue.models import Claim
from fairqueue.queue.claim import Wanted
from fairqueue.queue.permits import home_of
from fairqueue.queue.queue import TaskQueue

PARTITIONS = 4
NAME, KEY = "slow", "account:42"


@pytest.fixture
def queue(redis_client: redis.Redis, clock: ManualClock) -> Iterator[TaskQueue]:
    with TaskQueue(redis_client, clock=clock, partitions=PARTITIONS) as queue:
        yield queue


@pytest.fixture
def other(redis_client: redis.Redis, clock: ManualClock) -> Iterator[TaskQueue]:
    """The queue as another process sees it."""
    with TaskQueue(redis_client, clock=clock, partitions=PARTITIONS) as queue:
        yield queue


def users(queue: TaskQueue, each: int = 1) -> dict[int, list[str]]:
    """Users of each partition."""
    found: dict[int, list[str]] = {number: [] for number in range(PARTITIONS)}
    for n in range(200):
        own = found[queue.part_of(f"u{n}", None).keys.partition]
        if len(own) < each:
            own.append(f"u{n}")
    return found


def fill(queue: TaskQueue, count: int, **fields: Any) -> None:
    """Push tasks of one user of each partition."""
    fields = fields or {"name": NAME}
    queue.push_many(
        make_task(user, f"{user}-{n}", **fields)
        for (user,) in users(queue).values()
        for n in range(count)
    )


def in_use(client: redis.Redis, queue: TaskQueue) -> Counter[str]:
    """The slots in use, by gate, over all partitions."""
    pipe = client.pipeline(transaction=False)
    for part in queue.link.parts:
        pipe.zrange(part.keys["slots"], 0, -1)
    members = [member for each in pipe.execute() for member in each]
    return Counter(member.decode().split("\0")[0] for member in members)


def held_by(client: redis.Redis, queue: TaskQueue, gate: str) -> dict[int, tuple[int, int]]:
    """The version and the number of the permits that each partition has."""
    pipe = client.pipeline(transaction=False)
    for part in queue.link.parts:
        pipe.hget(part.keys["paced"], "\5" + gate)
    found = {}
    for number, text in enumerate(pipe.execute()):
        if text is not None:
            version, count, *_ = text.split()
            found[number] = (int(version), int(count))
    return found


def given_out(client: redis.Redis, queue: TaskQueue, gate: str) -> dict[int, tuple[int, int]]:
    """The same, as the home of the gate counts them."""
    home = queue.link.parts[home_of(gate, PARTITIONS)]
    text: Any = client.hget(home.keys["permits"], gate)
    return {int(number): (row[0], row[1]) for number, row in json.loads(text or b"{}").items()}


def check_permits(client: redis.Redis, queue: TaskQueue, slots: dict[str, int]) -> None:
    """The home counts at least what each partition has, and no more than the slots in all."""
    for gate, most in slots.items():
        given = given_out(client, queue, gate)
        assert sum(count for _, count in given.values()) <= most
        for number, (version, count) in held_by(client, queue, gate).items():
            counted_version, counted = given.get(number, (0, 0))
            assert count <= counted or (count == 0 and counted_version <= version)


# --- what is promised -----------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 5, 50])
def test_no_more_than_its_slots_run_over_all_partitions(queue: TaskQueue, slots: int) -> None:
    queue.set_limits(NAME, slots=slots)
    fill(queue, 5)
    running, done = queue.claim("w", limit=20), 0
    while running:
        assert len(running) == min(slots, 20 - done)
        queue.finish(running.pop(0))
        done += 1
        running += queue.claim("w", limit=20)
    assert done == 20


def test_a_limit_without_contention_costs_no_calls(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    """Permits stay where they are used."""
    queue.set_limits(NAME, slots=8)
    (user,) = users(queue)[2]
    queue.push_many(make_task(user, name=NAME) for _ in range(100))
    held = queue.claim("w", limit=8)
    version = held_by(redis_client, queue, NAME)[2]
    for _ in range(10):
        _, held, _ = queue.finish_and_claim([(claim, None) for claim in held], "w", 8)
        assert len(held) == 8
    assert held_by(redis_client, queue, NAME)[2] == version


def test_contended_permits_go_round(queue: TaskQueue, clock: ManualClock) -> None:
    """With one slot and tasks in all partitions, each gets its turns."""
    queue.set_limits(NAME, slots=1)
    fill(queue, 50)
    served: Counter[int] = Counter()
    for _ in range(80):
        (claim,) = queue.claim("w", limit=5)
        served[claim.partition] += 1
        queue.finish(claim)
    assert min(served.values()) >= 15, served


@pytest.mark.parametrize("how", ["worker", "courier"])
def test_permits_of_the_dead_come_back(
    queue: TaskQueue, other: TaskQueue, clock: ManualClock, how: str
) -> None:
    queue.set_limits(NAME, slots=3)
    fill(queue, 3)
    if how == "worker":
        assert len(other.claim("dead", limit=10, lease=5)) == 3
    else:
        for calls in range(1, 9):
            Process(other, 10, lease_ms=5000).run(calls)
    clock.advance(6)
    found: list[Claim] = []
    for _ in range(20):
        found += queue.claim("w", limit=10, lease=600)
        clock.advance(0.3)
    assert len(found) == 3


def test_a_lowered_limit_holds_over_all_partitions(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock
) -> None:
    queue.set_limits(NAME, slots=6)
    fill(queue, 3)
    running = queue.claim("w", limit=6, lease=600)
    assert len({claim.partition for claim in running}) > 1
    queue.set_limits(NAME, slots=1)
    while running:
        queue.finish(running.pop())
        clock.advance(0.3)
        more = queue.claim("w", limit=6, lease=600)
        assert len(running) + len(more) <= max(1, len(running))
        running += more
        if len(more) == 1:
            break
    assert in_use(redis_client, queue) == {NAME: 1}


def test_a_limit_that_is_set_anew_gives_nothing_twice(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    queue.set_limits(NAME, slots=2)
    fill(queue, 5)
    assert len(queue.claim("w", limit=10, lease=600)) == 2
    queue.set_limits(NAME, slots=2)
    assert queue.claim("w", limit=10) == []
    queue.set_limits(NAME, slots=4)
    assert len(queue.claim("w", limit=10, lease=600)) == 2
    assert in_use(redis_client, queue) == {NAME: 4}


def test_a_key_without_tasks_leaves_no_permits_behind(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock
) -> None:
    queue.set_limit("account:*", slots=2)
    for n in range(30):
        queue.push(make_task(f"u{n}", limit_keys=[f"account:{n}"]))
    assert len(queue.claim("w", limit=100)) == 30
    clock.advance(100)
    for _ in range(10):
        queue.finish_many((claim, None) for claim in queue.claim("w", limit=100))
        clock.advance(11)
    for part in queue.link.parts:
        assert set(redis_client.hkeys(part.keys["paced"])) <= {b"\5"}
        assert set(redis_client.hkeys(part.keys["permits"])) <= {b""}


def test_a_limit_of_each_tenant_needs_no_permits(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    queue.set_limit(KEY, slots=1, scope="tenant")
    fill(queue, 2, limit_keys=[KEY])
    assert len(queue.claim("w", limit=10)) == PARTITIONS
    assert not any(redis_client.exists(part.keys["permits"]) for part in queue.link.parts)


@pytest.mark.parametrize("seed", range(3))
def test_tasks_of_several_keys_do_not_wait_for_each_other_in_a_circle(
    queue: TaskQueue, clock: ManualClock, seed: int
) -> None:
    queue.set_limit("*", slots=1)
    rng = random.Random(seed)
    pairs = (["A", "B"], ["B", "A"], ["B", "C"], ["C", "A"])
    for n in range(40):
        queue.push(make_task(f"u{rng.randrange(8)}", f"t{n}", limit_keys=rng.choice(pairs)))
    done = set[str]()
    for _ in range(400):
        claims = queue.claim("w", limit=10)
        done.update(ids_of(claims))
        queue.finish_many((claim, None) for claim in claims)
        if len(done) == 40:
            break
        clock.advance(0.2)
    assert len(done) == 40


# --- rates ----------------------------------------------------------------------------------------


def starts_per_partition(queue: TaskQueue, clock: ManualClock, seconds: float) -> Counter[int]:
    """Claim and finish twenty times a second; how many started in each partition."""
    started: Counter[int] = Counter()
    for _ in range(round(seconds * 20)):
        claims = queue.claim("w", limit=50)
        started.update(claim.partition for claim in claims)
        queue.finish_many((claim, None) for claim in claims)
        clock.advance(0.05)
    return started


@pytest.mark.parametrize("rate", [2.0, 40.0])
def test_a_rate_holds_over_all_partitions_and_is_reached(
    queue: TaskQueue, clock: ManualClock, rate: float
) -> None:
    queue.set_limits(NAME, rate=rate)
    fill(queue, 150)
    started = starts_per_partition(queue, clock, 10)
    assert started.total() <= rate * 10 + max(1, rate / 10)
    assert started.total() >= rate * 10 * 0.8
    assert min(started[number] for number in range(PARTITIONS)) >= 2, started


def test_the_cost_of_tasks_counts_for_the_rate_over_all_partitions(
    queue: TaskQueue, clock: ManualClock
) -> None:
    queue.set_limit(KEY, rate=10.0)
    queue.push(make_task("u1", "large", limit_keys=[KEY], cost=50))
    assert ids_of(queue.claim("w")) == ["large"]
    fill(queue, 1, limit_keys=[KEY])
    for _ in range(49):
        assert queue.claim("w", limit=10) == []
        clock.advance(0.1)
    clock.advance(0.1)
    assert len(queue.claim("w", limit=10)) >= 1


def test_starts_that_nobody_used_lapse(queue: TaskQueue, clock: ManualClock) -> None:
    """A partition that was given some a while ago may not add them to those of others."""
    queue.set_limits(NAME, rate=1.0)
    fill(queue, 3)
    for calls in range(1, 9):
        Process(queue, 10).run(calls)
        clock.advance(2)
    begun = len(queue.claim("w", limit=50)) + len(queue.claim("w", limit=50))
    assert begun <= 1


# --- any order of events --------------------------------------------------------------------------


def flat(link: Any, steps: Operation[Any]) -> Generator[tuple[Any, Any], Any, Any]:
    """The requests of an operation one by one, also those that go to several partitions at once."""
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            request = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        answer, error = None, None
        try:
            if isinstance(request, At):
                answer = yield from flat(request.link, request.steps)
            elif isinstance(request, Gather):
                answer = []
                for each, own in request.operations:
                    answer.append((yield from flat(each, own)))
            else:
                answer = yield link, request
        except FairQueueError as failure:
            error = failure


def only(request: Any) -> Operation[Any]:
    answer = yield request
    return answer


class Process:
    """A process that claims, one request after the other."""

    def __init__(self, queue: TaskQueue, limit: int, lease_ms: int = 20_000) -> None:
        self._steps = flat(queue.link, queue._claim("w", limit, lease_ms, Wanted()))
        self._next: tuple[Any, Any] | None = next(self._steps)
        self.claims: list[Claim] = []

    @property
    def is_over(self) -> bool:
        return self._next is None

    def send(self, *, twice: bool = False) -> Any:
        """Send the next request; a lost answer lets it be sent again."""
        assert self._next is not None
        link, request = self._next
        if twice and isinstance(request, Call):
            link.perform(only(request))
        return link.perform(only(request))

    def step(self, *, twice: bool = False) -> None:
        """Send the next request and read its answer."""
        try:
            self._next = self._steps.send(self.send(twice=twice))
        except StopIteration as end:
            self._next, self.claims = None, end.value.claims

    def run(self, most: int = 1000) -> None:
        """Go on to the end, or die after some requests."""
        for _ in range(most):
            if not self.is_over:
                self.step()


class History:
    """Random events, and what must hold after each of them."""

    def __init__(self, queue: TaskQueue, client: redis.Redis, clock: ManualClock, seed: int):
        self.queue, self.client, self.clock = queue, client, clock
        self.random = random.Random(seed)
        self.users = [user for each in users(queue, 2).values() for user in each]
        self.processes: list[Process] = []
        self.claims: list[Claim] = []
        self.pushed = 0
        self.slots = {NAME: 3, "\x03" + KEY: 2}
        self.most = dict(self.slots)
        self.used: Counter[str] = Counter()
        queue.configure(max_attempts=10_000)
        self.set_limits()

    def set_limits(self) -> None:
        self.queue.set_limits(NAME, slots=self.slots[NAME])
        self.queue.set_limit(KEY, slots=self.slots["\x03" + KEY])

    def act(self) -> None:
        actions = [self.push] * 2 + [self.claim] * 4 + [self.step] * 24 + [self.end] * 6
        self.random.choice([*actions, self.die, self.wait, self.change])()
        self.check()

    def push(self) -> None:
        name, keys = self.random.choice([(NAME, []), ("other", [KEY]), (NAME, [KEY])])
        self.pushed += 1
        user = self.random.choice(self.users)
        self.queue.push(make_task(user, f"t{self.pushed}", name=name, limit_keys=keys))

    def claim(self) -> None:
        if len(self.processes) < 5:
            self.processes.append(Process(self.queue, self.random.choice((1, 2, 10))))

    def step(self) -> None:
        if not self.processes:
            return
        process = self.random.choice(self.processes)
        process.step(twice=self.random.random() < 0.1)
        if process.is_over:
            self.processes.remove(process)
            self.claims += process.claims

    def die(self) -> None:
        """A process dies, before a request or before it reads the answer."""
        if self.processes:
            process = self.processes.pop(self.random.randrange(len(self.processes)))
            if self.random.random() < 0.5:
                process.send()

    def end(self) -> None:
        if not self.claims:
            return
        claim = self.claims.pop(self.random.randrange(len(self.claims)))
        how = self.random.choice(("finish", "finish", "finish", "retry", "release", "leave"))
        if how != "leave":
            with suppress(LeaseLost):
                getattr(self.queue, how)(claim)

    def wait(self) -> None:
        self.clock.advance(self.random.choice((0.1, 0.3, 1, 12, 21)))

    def change(self) -> None:
        self.slots = {NAME: self.random.choice((1, 3, 5)), "\x03" + KEY: self.random.choice((1, 2))}
        self.set_limits()

    def check(self) -> None:
        used = in_use(self.client, self.queue)
        for gate, slots in self.slots.items():
            # After a limit was lowered, those that run may end, and none may start.
            assert used[gate] <= max(slots, self.used[gate]), (gate, used, self.slots)
            # What was given out before a limit was lowered is given back.
            given = sum(count for _, count in given_out(self.client, self.queue, gate).values())
            self.most[gate] = max(slots, min(self.most[gate], given))
        self.used = used
        check_permits(self.client, self.queue, self.most)

    def finish_all(self) -> None:
        """Everything that is left is done, with all slots: no permit was lost."""
        self.processes.clear()
        self.claims.clear()
        self.clock.advance(60)
        for user in self.users:
            self.queue.push_many(make_task(user, name=NAME) for _ in range(5))
        most = 0
        for _ in range(400):
            claims = self.queue.claim("w", limit=20)
            self.check()
            most = max(most, in_use(self.client, self.queue)[NAME])
            self.clock.advance(0.3)
            self.queue.finish_many((claim, None) for claim in claims)
            if not self.queue.size():
                break
        assert self.queue.size() == 0
        assert most == self.slots[NAME]


@pytest.mark.parametrize("seed", range(4))
def test_the_limit_holds_in_any_order_of_events_and_no_permit_is_lost(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock, seed: int
) -> None:
    history = History(queue, redis_client, clock, seed)
    for _ in range(300):
        history.act()
    history.finish_all()


def test_a_claim_keeps_its_tasks_though_the_home_of_a_limit_does_not_answer(
    queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Operation[Any]:
        raise FairQueueError("not now")

    queue.set_limits(NAME, slots=1)
    fill(queue, 2)
    queue.push(make_task("free", "free"))
    with monkeypatch.context() as patch:
        patch.setattr("fairqueue.queue.permits._share", refuse)
        assert ids_of(queue.claim("w", limit=10, lease=600)) == ["free"]
    assert queue.claim("w", limit=10) == []  # it asks again after a moment


def test_an_order_over_partitions_is_refused(queue: TaskQueue) -> None:
    with pytest.raises(ConfigurationError, match="scope='tenant' in a queue with 4 partitions"):
        queue.set_limit(KEY, slots=1, ordered=True)
    queue.set_limit(KEY, slots=1, ordered=True, scope="tenant")
    assert queue.get_key_limits()[KEY].ordered


def test_a_task_that_waits_for_slots_used_elsewhere_is_explained(queue: TaskQueue) -> None:
    queue.set_limits(NAME, slots=2)
    fill(queue, 2)
    running = queue.claim("w", limit=2, lease=600)
    there = {claim.partition for claim in running}
    (user,) = next(own for number, own in users(queue).items() if number not in there)
    assert queue.claim("w", limit=10) == []
    why = queue.explain(f"{user}-0")
    assert why is not None
    assert "All 2 slots for tasks named 'slow' are taken." in why.summary
