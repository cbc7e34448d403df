"""Push, claim and finish, one by one and in bulk."""

from benchmarks.common import Bench
from fairqueue import Claim, Task, TaskQueue

USERS = 100
PAYLOAD = {"report": 7, "note": "x" * 80}
BATCH = 50


def tasks(count: int, users: int = USERS) -> list[Task]:
    return [Task.create(user_id=f"user-{i % users}", payload=PAYLOAD) for i in range(count)]


class Runs:
    """A queue and its tasks, prepared for one measurement."""

    queue: TaskQueue
    tasks: list[Task]
    claims: list[Claim]

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def fresh(self) -> None:
        self.queue = self._bench.fresh_queue()
        self.queue.check()
        self.tasks = tasks(self._bench.count(10_000))
        self.claims = []

    def filled(self) -> None:
        self.fresh()
        self.push_many()

    def claimed(self) -> None:
        self.filled()
        self.claim_all()

    def push_one_by_one(self) -> int:
        for task in self.tasks[:2000]:
            self.queue.push(task)
        return len(self.tasks[:2000])

    def push_many(self) -> int:
        return len(self.queue.push_many(self.tasks))

    def claim_all(self) -> int:
        while got := self.queue.claim("bench", limit=BATCH):
            self.claims += got
        return len(self.claims)

    def finish_all(self) -> int:
        for i in range(0, len(self.claims), BATCH):
            self.queue.finish_many((claim, None) for claim in self.claims[i : i + BATCH])
        return len(self.claims)


def run(bench: Bench) -> None:
    runs = Runs(bench)
    bench.ratio("push, one at a time", "S", 0.5, runs.push_one_by_one, prepare=runs.fresh)
    bench.ratio("push_many of 10,000", "B", 0.45, runs.push_many, prepare=runs.fresh)
    bench.ratio("claim in batches of 50", "B", 0.2, runs.claim_all, prepare=runs.filled)
    bench.ratio("finish in batches of 50", "B", 0.25, runs.finish_all, prepare=runs.claimed)
