"""One noisy user and a hundred quiet ones: shares of service, and the wait of the quiet ones."""

from collections import Counter

from benchmarks.common import Bench
from fairqueue import Task
from fairqueue.queue.snapshot import jain_index

QUIET = 100
EACH = 10


def run(bench: Bench) -> None:
    queue = bench.fresh_queue()
    queue.push_many(Task.create(user_id="noisy") for _ in range(bench.count(100_000)))
    for _ in range(200):
        queue.claim("bench")
    queue.push_many(Task.create(user_id=f"quiet-{i % QUIET}") for i in range(QUIET * EACH))
    # How long the next task of a user waits, in claims of one task.
    since = {f"quiet-{i}": 0 for i in range(QUIET)}
    waits: list[int] = []
    served: Counter[str] = Counter()
    turn = 0
    while len(waits) < QUIET * EACH:
        turn += 1
        user = queue.claim("bench")[0].task.user_id
        if len(waits) < QUIET * (EACH - 1):
            served[user] += 1  # until then all users have a backlog
        if user in since:
            waits.append(turn - since[user])
            since[user] = turn
    users = QUIET + 1
    p99 = sorted(waits)[int(len(waits) * 0.99)]
    jain = jain_index([served[user] for user in (*since, "noisy")]) or 0.0
    bench.add("Jain index of service, 101 backlogged users", f"{jain:.4f}", "≥ 0.99", jain >= 0.99)
    bench.add(
        "quiet user's wait in claims, p99",
        f"{p99}",
        f"≤ {2 * users}",
        p99 <= 2 * users,
        f"{users} users, one with {bench.count(100_000):,} tasks",
    )
