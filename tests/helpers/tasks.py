"""Push and claim tasks."""

from collections.abc import Sequence
from typing import Any

from fairqueue.models import Claim, Task, TaskInfo
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore


def make_task(user_id: str = "alice", task_id: str | None = None, **fields: Any) -> Task:
    """Make a task; the other fields are those of `Task.create`."""
    return Task.create(user_id=user_id, task_id=task_id, **fields)


def push(queue: TaskQueue, *task_ids: str, user_id: str = "alice", **fields: Any) -> list[str]:
    """Push tasks with these ids for one user."""
    return queue.push_many(make_task(user_id, task_id, **fields) for task_id in task_ids)


def fill(queue: TaskQueue, user_id: str, count: int, **fields: Any) -> None:
    """Push `count` tasks `<user>-0`, `<user>-1`, ... for a user."""
    push(queue, *(f"{user_id}-{n}" for n in range(count)), user_id=user_id, **fields)


def claim_one(queue: TaskQueue, lease: float = 30.0, worker: str = "w") -> Claim:
    """Claim one task, which must be ready."""
    (claim,) = queue.claim(worker, lease=lease)
    return claim


def served_users(queue: TaskQueue, count: int, *, finish: bool = True) -> list[str]:
    """Claim `count` tasks one by one; return their users in order."""
    users = []
    for _ in range(count):
        claims = queue.claim("w", limit=1)
        users += [claim.task.user_id for claim in claims]
        if finish:
            queue.finish_many((claim, None) for claim in claims)
    return users


def ids_of(claims: list[Claim]) -> list[str]:
    """The ids of claimed tasks, in order."""
    return [claim.task.task_id for claim in claims]


def info_of(queue: TaskQueue, task_id: str) -> TaskInfo:
    """Return the info of a task, which must exist."""
    found = queue.get(task_id)
    assert found is not None, task_id
    return found


class Unshowable:
    """A value that cannot be converted to text."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __repr__


class Mute(Unshowable, Exception):
    """An error that cannot be converted to text."""


def beat(
    queue: TaskQueue, worker_id: str = "w", names: Sequence[str] = ("*",), **fields: Any
) -> None:
    """Let a worker report that it is alive, with handlers for these names."""
    record = {"host": "h", "pid": 7, "version": "1.0", "slots": 4, "names": [*names]}
    record |= {"current": [], "running": 0, "started": 0} | fields
    WorkerStore(queue.link).beat(record, worker_id)
