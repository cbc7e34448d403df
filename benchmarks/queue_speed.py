"""Pushing, claiming and finishing, one by one and in bulk."""

from benchmarks.common import Bench
from fairqueue import Claim, Task, TaskQueue

USERS = 100
PAYLOAD = {"report": 7, "note": "x" * 80}


def tasks(count: int, users: int = USERS) -> list[Task]:
    return [Task.create(user_id=f"user-{i % users}", payload=PAYLOAD) for i in range(count)]


def run(bench: Bench) -> None:
    count = bench.count(10_000)
    state: dict[str, TaskQueue] = {}
    batch: list[Task] = []
    claims: list[Claim] = []

    def fresh() -> None:
        state["queue"] = bench.fresh_queue()
        state["queue"].check()
        batch[:] = tasks(count)
        claims.clear()

    def push_one_by_one() -> int:
        for task in batch[:2000]:
            state["queue"].push(task)
        return len(batch[:2000])

    def push_many() -> int:
        state["queue"].push_many(batch)
        return len(batch)

    def filled() -> None:
        fresh()
        push_many()

    def claim_all() -> int:
        while got := state["queue"].claim("bench", limit=50):
            claims.extend(got)
        return len(claims)

    def claimed() -> None:
        filled()
        claim_all()

    def finish_all() -> int:
        for i in range(0, len(claims), 50):
            state["queue"].finish_many((claim, None) for claim in claims[i : i + 50])
        return len(claims)

    bench.ratio("push, one at a time", "S", 0.5, push_one_by_one, prepare=fresh)
    bench.ratio("push_many of 10,000", "B", 0.45, push_many, prepare=fresh)
    bench.ratio("claim in batches of 50", "B", 0.2, claim_all, prepare=filled)
    bench.ratio("finish in batches of 50", "B", 0.25, finish_all, prepare=claimed)
