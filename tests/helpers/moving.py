"""Queues with some of everything, what they have, and moves that die on their way."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import pytest
import redis

from fairqueue.clock import ManualClock
from fairqueue.models import Claim, Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.repartition import MoveReport, Repartition
from fairqueue.repartition.counting import links_of
from helpers.state import check_consistency

Texts = dict[str, Any]


class Open(Protocol):
    """Opens the queue in a database."""

    def __call__(self, database: int, partitions: int) -> TaskQueue:
        """Open it; its counts and indexes are compared at the end of the test."""


def texts_of(queue: TaskQueue, key: str) -> Texts:
    """The fields and parsed values of a hash, of all partitions together."""
    found: Texts = {}
    for link in links_of(queue):
        (flat,) = link.ask(("HGETALL", link.keys[key]))
        pairs = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
        for name, text in pairs.items():
            assert name not in found, f"{name!r} is in two partitions"
            try:
                found[name.decode()] = json.loads(text)
            except ValueError:
                found[name.decode()] = text
    return found


def members_of(queue: TaskQueue, key: str) -> dict[bytes, float]:
    """The members and scores of a sorted set, of all partitions together."""
    found: dict[bytes, float] = {}
    for link in links_of(queue):
        (flat,) = link.ask(("ZRANGE", link.keys[key], 0, -1, "WITHSCORES"))
        pairs = (
            flat if flat and isinstance(flat[0], list) else zip(flat[::2], flat[1::2], strict=True)
        )
        for member, score in pairs:
            # Groups of failures are formed over all tenants.
            assert key == "failures" or member not in found, f"{member!r} is in two partitions"
            found[member] = max(float(score), found.get(member, 0.0))
    return found


HASHES = ("tasks", "status", "attempts", "schedules", "plan", "schedule_state", "broken")
SETS = (
    *("waiting", "delayed", "ended", "dead", "due", "moments", "changes", "schedule_index"),
    *("failures", "open"),
)


def content_of(queue: TaskQueue) -> Texts:
    """All that a move has to keep."""
    return {
        **{key: texts_of(queue, key) for key in HASHES},
        **{key: members_of(queue, key) for key in SETS},
    }


def with_groups(content: Texts) -> Texts:
    """As a version with two levels of fairness stores it: who names a tenant waits as its user."""
    for record in content["status"].values():
        if "tenant" in record:
            record["group"] = record["tenant"]
    return content


def end_leases(queue: TaskQueue, clock: ManualClock) -> None:
    """Let all leases and terms of a queue of one partition end."""
    clock.advance(3600)
    for _ in range(3):
        queue.claim("nobody", names=["nothing has this name"])


def at_rest(queue: TaskQueue, clock: ManualClock) -> TaskQueue:
    """Let all leases, terms and workers of a queue end."""
    end_leases(queue, clock)
    return queue


def claim_all(queue: TaskQueue, clock: ManualClock) -> list[Claim]:
    """Claim and finish all tasks until none is left, delayed ones included."""
    claims: list[Claim] = []
    idle = 0
    while idle < 5:
        found = queue.claim("w", limit=20)
        for claim in found:
            queue.finish(claim)
        claims += found
        idle = 0 if found else idle + 1
        if not found:
            clock.advance(100_000)
    return claims


# --- random queues --------------------------------------------------------------------------------


def random_task(rng: random.Random, number: int) -> Task:
    """A task with some of everything."""
    fields: dict[str, Any] = {}
    if rng.random() < 0.4:
        fields["tenant"] = rng.choice(["acme", "globex", "initech"])
    if rng.random() < 0.2:
        fields["pool"] = rng.choice(["gpu", "slow"])
    if rng.random() < 0.3:
        fields["limit_keys"] = rng.sample(
            ["account:1", "account:2", "ordered:1"], rng.randint(1, 2)
        )
    if rng.random() < 0.3:
        fields["unique"] = f"report:{rng.randint(1, 5)}"
        fields["on_duplicate"] = rng.choice(["ignore", "replace"])
        fields["unique_for"] = rng.choice(["unfinished", "waiting", 500])
    if rng.random() < 0.2:
        fields["expires"] = rng.choice([50, 5_000_000])
    if rng.random() < 0.2:
        fields["delay"] = rng.choice([5, 40])
    if rng.random() < 0.1:
        fields["cost"] = 2.5
    return Task.create(
        user_id=rng.choice("abcdefgh"),
        priority=rng.randint(1, 6),
        name=rng.choice(["report", "slotted", "mail"]),
        payload={"n": number, "text": "x" * rng.choice([0, 10, 2000])},
        task_id=f"task-{number}",
        **fields,
    )


def live_a_little(queue: TaskQueue, rng: random.Random, clock: ManualClock, first: int) -> None:
    """Push tasks, and let some of them run, fail, come back or be cancelled."""
    store = queue  # of one partition
    store.set_limits("slotted", slots=1)
    store.set_limit("account:*", slots=1, scope="tenant")
    store.set_limit("ordered:*", slots=1, ordered=True, through_retries=True)
    store.set_tenant("acme", weight=3.0)
    store.set_user("b", weight=2.0, max_running=2)
    for number in range(first, first + 60):
        store.push(random_task(rng, number))
        clock.advance(rng.random() * 3)
    pools = ["default", "gpu", "slow"]
    for claim in store.claim("w", limit=25, lease=600, pools=pools):
        how = rng.randrange(6)
        if how == 0:
            store.retry(claim, "again", delay=rng.choice([0, 100]))
        elif how == 1:
            store.bury(claim, "no")
        elif how == 2:
            store.release(claim)
        elif how == 3:
            store.cancel(claim.task.task_id)
            store.finish(claim)
        elif how == 4:
            store.finish(claim, {"ok": 1})
        # else it goes on


FLOW_HASHES = ("uniques", "users")
FLOW_SETS = ("expiring", "pool_tasks", "delayed_index", "runs", "tenant_users", "user_tenants")


def all_content_of(queue: TaskQueue) -> Texts:
    """The same, and what tasks with options need."""
    order = {m: s for m, s in members_of(queue, "gate_order").items() if m.startswith(b"o")}
    return {
        **content_of(queue),
        **{key: texts_of(queue, key) for key in FLOW_HASHES},
        **{key: members_of(queue, key) for key in FLOW_SETS},
        "gate_order": order,
    }


class Interrupted(Exception):
    """The process has died."""


class Mortal(Repartition):
    """Dies at a call to Redis: before it is sent, or before its answer is read."""

    def __init__(self, old: TaskQueue, new: TaskQueue, calls: int, *, late: bool) -> None:
        super().__init__(old, new, batch=7)
        self._left, self._late = calls, late

    def _run_all(self, calls: Any) -> Any:
        self._left -= 1
        if self._left < 0 and not self._late:
            raise Interrupted
        answers = super()._run_all(calls)
        if self._left < 0:
            raise Interrupted
        return answers


def move_with_deaths(
    old: TaskQueue,
    new: TaskQueue,
    rng: random.Random,
    between: Callable[[], object],
    drain: bool = False,
) -> tuple[MoveReport, int]:
    """Move a queue by processes that die, one after the other; the last report, and how many."""
    deaths = 0
    while True:
        # At the beginning there are some 20 calls before something moves.
        calls, late = rng.choice([rng.randint(0, 60), 10_000]), rng.random() < 0.7
        try:
            return Mortal(old, new, calls, late=late).run(drain=drain), deaths
        except Interrupted:
            deaths += 1
            between()


@pytest.fixture
def clients(redis_url: str, redis_client: redis.Redis) -> Iterator[list[redis.Redis]]:
    """Clients of empty databases: of the old queue, of the new one, and of more."""
    with ExitStack() as opened:
        made = [redis_client]
        for number in range(1, 5):
            made.append(opened.enter_context(redis.Redis.from_url(redis_url, db=number)))
        for client in made:
            client.flushdb()
        yield made
        for client in made:
            client.flushdb()


@pytest.fixture
def open_queue(clients: list[redis.Redis], clock: ManualClock) -> Iterator[Open]:
    """Open queues in the databases; their counts and indexes must agree at the end."""
    opened: list[tuple[int, TaskQueue]] = []

    def open_queue(database: int, partitions: int) -> TaskQueue:
        made = TaskQueue(clients[database], clock=clock, partitions=partitions)
        opened.append((database, made))
        return made

    yield open_queue
    for database, queue in opened:
        check_consistency(clients[database], partitions=queue.partitions)
        queue.close()
