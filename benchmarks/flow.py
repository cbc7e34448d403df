"""What tenants, keys, limits and unique keys cost the server, compared with tasks without them.

The queues that are compared are on one server and are measured in turns.
"""

import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.common import Bench, CpuMeter
from fairqueue import Task, TaskQueue

ROUNDS = 15
BATCH = 50
LEASE_S = 86_400.0
TENANTS, USERS = 1000, 100  # users of each tenant
KEYS = 100_000
PATTERNS = 100
THREADS = 50
UNIQUE_KEYS = 200
PUSHED_AT_ONCE = 10_000


def run(bench: Bench) -> None:
    tenants(bench)
    keys_in_use(bench)
    idle_limits(bench)
    unique_pushes(bench)


class Queues:
    """Queues by name, on one server that was empty, and what claims, pushes and ends cost them."""

    def __init__(self, bench: Bench, names: Iterable[str]) -> None:
        bench.empty()
        self.queues = {
            name: TaskQueue.from_url(bench.server.url, name=f"queue-{number}", timeout=30.0)
            for number, name in enumerate(names)
        }
        self.meter = CpuMeter(bench.client)

    def rounds(self, claims: int, batch: int, kind: str) -> None:
        """Claim and finish tasks of each queue in turns, as `claim, <kind>` of the queue."""
        for _, (name, queue) in itertools.product(range(ROUNDS), self.queues.items()):
            got = []
            with self.meter.measure(f"claim, {kind}, {name}", claims * batch):
                for _ in range(claims):
                    got += queue.claim("bench", limit=batch, lease=LEASE_S)
            assert len(got) == claims * batch, (name, len(got))
            with self.meter.measure(f"finish, {kind}, {name}", len(got)):
                for start in range(0, len(got), batch):
                    queue.finish_many((claim, None) for claim in got[start : start + batch])

    def push(self, name: str, tasks: Iterable[Task]) -> None:
        """Push tasks in parts, so that not all of them are in memory."""
        rest = iter(tasks)
        while part := list(itertools.islice(rest, PUSHED_AT_ONCE)):
            self.queues[name].push_many(part)

    def close(self) -> None:
        for queue in self.queues.values():
            queue.close()


# --- tenants --------------------------------------------------------------------------------------


def tenants(bench: Bench) -> None:
    """Claims from tenants with many users, and from as many users without a tenant."""
    queues = Queues(bench, ["flat", "tenants"])
    count = bench.count(TENANTS)
    for part in range(2):
        owners = [(f"t{t}", f"u{u}") for u in range(USERS) for t in range(count)]
        for round_, name in itertools.product(range(ROUNDS), queues.queues):
            own = owners[round_::ROUNDS]
            tasks = [_of_owner(owner, is_flat=name == "flat") for owner in own]
            with queues.meter.measure(f"push {part}, {name}", len(own)):
                queues.push(name, tasks)
    queues.rounds(200, 1, "one")
    queues.rounds(8, BATCH, "batch")
    for kind, text in (("one", "one at a time"), ("batch", f"in batches of {BATCH}")):
        for step, most in (("claim", 1.3), ("finish", None)):
            bench.compare(
                f"{step} {text}, {count:,} tenants x {USERS} users",
                queues.meter,
                f"{step}, {kind}, tenants",
                f"{step}, {kind}, flat",
                most,
            )
    for part, text in enumerate(("of new users", "of users who wait")):
        name = f"push in bulk {text}, {count:,} tenants"
        bench.compare(name, queues.meter, f"push {part}, tenants", f"push {part}, flat")
    queues.close()


def _of_owner(owner: tuple[str, str], *, is_flat: bool) -> Task:
    tenant, user = owner
    if is_flat:
        return Task.create(user_id=f"{tenant}-{user}")
    return Task.create(user_id=user, tenant=tenant)


# --- keys -----------------------------------------------------------------------------------------


def keys_in_use(bench: Bench) -> None:
    """Claims of tasks whose key is free, while few or many other keys are in use."""
    count = bench.count(KEYS)
    few = "10 keys in use"
    many = f"{count:,} keys in use"
    queues = Queues(bench, ["no keys", few, many])
    claims = ROUNDS * (200 + 8 * BATCH)
    for name, queue in queues.queues.items():
        in_use = {"no keys": 0, few: 10, many: count}[name]
        if in_use:
            queue.set_limit("account:*", slots=1)
        queues.push(name, _running(count, in_use))
        while queue.claim("holder", limit=1000, lease=LEASE_S):
            pass
        # Of each tenth key, another task waits.
        queues.push(name, _held(in_use))
        while bench.client.zcard(queue.keys["backlog"]):
            queue.claim("bench", limit=1)  # moves them out of the way
        queues.push(
            name,
            (
                _keyed(f"user-{n % 100}", f"account:free-{n}" if in_use else None)
                for n in range(claims)
            ),
        )
    queues.rounds(200, 1, "one")
    queues.rounds(8, BATCH, "batch")
    for kind, text in (("one", "one at a time"), ("batch", f"in batches of {BATCH}")):
        claim = f"claim, {kind}, "
        bench.compare(f"claim {text}, {many}", queues.meter, claim + many, claim + few, 1.3)
        bench.compare(f"claim {text}, a key each", queues.meter, claim + few, claim + "no keys")
    queues.close()


def _keyed(user: str, key: str | None) -> Task:
    return Task.create(user_id=user, limit_keys=[key] if key else None)


def _running(count: int, in_use: int) -> Iterator[Task]:
    """Tasks to be claimed for good, of which some have a key each."""
    for n in range(count):
        yield _keyed(f"holder-{n % 1000}", f"account:{n}" if n < in_use else None)


def _held(in_use: int) -> Iterator[Task]:
    for n in range(0, in_use, 10):
        yield _keyed(f"holder-{n % 1000}", f"account:{n}")


# --- limits that nothing uses ---------------------------------------------------------------------


def idle_limits(bench: Bench) -> None:
    """Plain tasks on a queue with limits of keys, and on queues without any.

    The first option of flow that a queue uses gives it layout 2. "other options" is a queue with
    that layout and without limits.
    """
    plain, other, idle = "no options", "other options", "idle limits"
    queues = Queues(bench, [plain, other, idle])
    queues.queues[other].set_tenant("acme", weight=2.0)
    for n in range(PATTERNS):
        queues.queues[idle].set_limit(f"kind-{n}:*", slots=3, rate=10.0)
    singles, bulk = bench.count(300), bench.count(8 * BATCH)
    made = _plain(ROUNDS * (singles + bulk))
    for _ in range(ROUNDS):
        one_by_one = list(itertools.islice(made, singles))
        together = list(itertools.islice(made, bulk))
        for name, queue in queues.queues.items():
            with queues.meter.measure(f"push, one, {name}", singles):
                for task in one_by_one:
                    queue.push(task)
            with queues.meter.measure(f"push, batch, {name}", bulk):
                queue.push_many(together)
    queues.rounds(singles, 1, "one")
    queues.rounds(bulk // BATCH, BATCH, "batch")
    for step, (kind, text) in itertools.product(
        ("push", "claim", "finish"), (("one", "one at a time"), ("batch", "in bulk"))
    ):
        work, meter = f"{step}, {kind}, ", queues.meter
        bench.compare(
            f"{step} {text}, {PATTERNS} idle patterns", meter, work + idle, work + other, 1.05
        )
        bench.compare(f"{step} {text}, once options are used", meter, work + other, work + plain)
    queues.close()


def _plain(count: int) -> Iterator[Task]:
    for n in range(count):
        yield Task.create(user_id=f"user-{n % 100}", payload={"n": n})


# --- unique tasks ---------------------------------------------------------------------------------


def unique_pushes(bench: Bench) -> None:
    """Fifty threads that push tasks for the same keys; each key must have one task."""
    queues = Queues(bench, ["plain", "unique"])
    keys = max(20, bench.count(UNIQUE_KEYS))
    # In the first round of keys most pushes make a task or race for it; in the others none does.
    answers: dict[str, set[str]] = {}
    seconds = dict.fromkeys(queues.queues, 0.0)
    for round_ in range(5):
        for name, queue in queues.queues.items():
            names = [f"{round_}-{number}" for number in range(keys)]
            unique = name == "unique"
            with queues.meter.measure(name, THREADS * keys):
                start = time.perf_counter()
                pushed = _push_from_threads(queue, names, unique=unique)
                seconds[name] += time.perf_counter() - start
            if unique:
                answers |= {key: {each[n] for each in pushed} for n, key in enumerate(names)}
    waiting = queues.queues["unique"].size()
    is_one_each = waiting == len(answers) and all(len(ids) == 1 for ids in answers.values())
    rates = {name: 5 * THREADS * keys / taken for name, taken in seconds.items()}
    bench.add(
        f"tasks for {len(answers):,} unique keys, {THREADS} threads",
        f"{waiting:,}",
        f"= {len(answers):,}",
        is_one_each,
        f"{rates['unique']:,.0f} pushes/s, plain ones {rates['plain']:,.0f}/s",
    )
    bench.compare("push that finds its key taken", queues.meter, "unique", "plain")
    queues.close()


def _push_from_threads(queue: TaskQueue, keys: list[str], *, unique: bool) -> list[list[str]]:
    """Let each thread push a task for each key at once; return the ids that they got."""
    barrier = threading.Barrier(THREADS)

    def push_all(number: int) -> list[str]:
        payload = {"from": number}
        tasks = [
            Task.create(user_id="ann", payload=payload, unique=key if unique else None)
            for key in keys
        ]
        barrier.wait()
        return [queue.push(task) for task in tasks]

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(push_all, range(THREADS)))
