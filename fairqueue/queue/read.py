"""Read a queue: its size, one task, why a task waits, a snapshot."""

from fairqueue.link.operation import Ask, Call, Operation, operation, steps
from fairqueue.models import UNREADABLE, Explanation, QueueSnapshot, TaskInfo
from fairqueue.queue.base import QueueBase, check_timeout
from fairqueue.queue.explanation import Waiting
from fairqueue.queue.records import broken_status, task_info
from fairqueue.queue.snapshot import snapshot
from fairqueue.queue.workers import WorkerStore
from fairqueue.validation import check_name

JAIN_SAMPLE = 1000  # backlogged users whose service is compared


class ReadOperations(QueueBase):
    """The part of a queue that only reads."""

    @operation
    def size(self, user_id: str | None = None) -> Operation[int]:
        """How many tasks wait for a worker, also of paused or capped users; not delayed ones."""
        keys = self.keys["backlog"], self.keys["held"]
        if user_id is None:
            return sum((yield Ask(*(("ZCARD", key) for key in keys))))
        check_name(user_id, "user_id")
        user = f"[{user_id}\0", f"({user_id}\1"
        return sum((yield Ask(*(("ZLEXCOUNT", key, *user) for key in keys))))

    @operation
    def get(self, task_id: str) -> Operation[TaskInfo | None]:
        """What is known of a task, or None. Raises BrokenRecord if its record is unreadable."""
        check_name(task_id, "task_id")
        status, document, lease_end = yield Ask(
            ("HGET", self.keys["status"], task_id),
            ("HGET", self.keys["tasks"], task_id),
            ("ZSCORE", self.keys["leases"], task_id),
        )
        return None if status is None else task_info(task_id, status, document, lease_end)

    @operation
    def explain(self, task_id: str) -> Operation[Explanation | None]:
        """Why a task waits: the reasons, the binding one first; None if the task is not known.

        Times in its sentences are in this process's zone. A worker that does not send heartbeats
        (one that calls `claim` itself) counts as alive while it holds a lease. Raises BrokenRecord.
        """
        check_name(task_id, "task_id")
        answer = yield from self._call(Call("explain", id=task_id))
        if not answer:
            return None
        workers = yield from steps(WorkerStore(self.link).alive)()
        try:
            return Waiting(task_id, answer, workers).explanation()
        except UNREADABLE as error:
            raise broken_status(task_id, error) from None

    @operation
    def inspect(self, timeout: float | None = None) -> Operation[QueueSnapshot]:
        """Counts and counters of the queue at this moment, in one bounded read."""
        check_timeout(timeout)
        return snapshot((yield Call("queue_stats", sample=JAIN_SAMPLE, timeout=timeout)))
