"""Push tasks: one, or many in few round trips."""

from collections.abc import Iterable
from typing import Any

from fairqueue.errors import DuplicateTask, InvalidTask, QueueFull, shown
from fairqueue.link.driver import in_batches
from fairqueue.link.operation import Argument, Call, Each, Operation, operation
from fairqueue.link.partitions import at_task, everywhere_numbered, partition_of, whole
from fairqueue.link.scripts import load_script
from fairqueue.models import Task
from fairqueue.queue.base import QueueBase
from fairqueue.queue.waiting_room import make_room
from fairqueue.validation import check_items

PUSH_CHUNK = 250  # tasks in one script: about 3 ms of server time
# How often room is moved to a partition for one call of push_many.
ROOM_TRIES = 3
_FULL = [b"full", b"queue"]


class PushOperations(QueueBase):
    """The part of a queue that stores new tasks."""

    @operation
    @at_task
    def push(self, task: Task) -> Operation[str]:
        """Store a task and return its id. Pushing the same task again has no effect.

        If another task has its unique key, the id of that task is returned. Raises InvalidTask when
        the id belongs to another task, QueueFull when a limit is reached, DuplicateTask when
        another task has its unique key and `on_duplicate` is "error"; then nothing was stored.
        """
        rest = push_row(task)
        answer = yield from self._call(Call("push", rest=rest))
        if answer[:2] == _FULL and (yield from make_room(self.link, 1)):
            answer = yield from self._call(Call("push", rest=rest))
        return _check_pushed(answer, "nothing was stored").get(task.task_id, task.task_id)

    @operation
    @whole
    def push_many(self, tasks: Iterable[Task]) -> Operation[list[str]]:
        """Store many tasks in few round trips; returns their ids in order, as `push` does.

        Each batch of a few hundred is stored completely or not at all. Raises as `push`; with more
        than one batch, other batches may have been stored then. The tasks of each partition are
        batches of their own. The call can be repeated with the same tasks: those that are stored
        already are not stored twice.
        """
        listed = check_items(tasks, "tasks", "tasks", InvalidTask)
        for task in listed:
            _check_task(task)
        if not listed:
            return []
        if not self.link.parts:
            stored = _stored_of(len(listed) > PUSH_CHUNK)
            same = yield from self._push_batches(listed, stored)
            return [same.get(task.task_id, task.task_id) for task in listed]
        numbers = [partition_of_task(task, self.partitions) for task in listed]
        groups: dict[int, list[Task]] = {}
        for number, task in zip(numbers, listed, strict=True):
            groups.setdefault(number, []).append(task)
        stored = _stored_of(len(groups) > 1 or len(listed) > PUSH_CHUNK)
        found = yield from everywhere_numbered(
            self,
            lambda twin: twin._push_batches(groups[twin.keys.partition], stored),
            strict=True,
            only=list(groups),
        )
        others = dict(found)
        return [
            others[number].get(task.task_id, task.task_id)
            for number, task in zip(numbers, listed, strict=True)
        ]

    def _push_batches(self, listed: list[Task], stored: str) -> Operation[dict[str, str]]:
        """Store tasks of one partition; the ids of tasks that have the keys of pushed ones."""
        if not self.link.is_checked:
            yield from self._check()
        for _ in range(ROOM_TRIES):
            try:
                return (yield from self._push_each(listed, stored))
            except QueueFull as error:
                if not error.is_of_queue or not (yield from make_room(self.link, len(listed))):
                    raise
        return (yield from self._push_each(listed, stored))

    def _push_each(self, listed: list[Task], stored: str) -> Operation[dict[str, str]]:
        calls = (
            Call("push", rest=[field for task in batch for field in push_row(task)])
            for batch in in_batches(listed, PUSH_CHUNK, lambda task: len(task.document))
        )
        others: dict[str, str] = {}
        yield Each(calls, lambda answer: others.update(_check_pushed(answer, stored)))
        return others


def _stored_of(has_batches: bool) -> str:
    """What an error says of the tasks that it does not name."""
    if has_batches:
        return "its batch was not stored, other batches of this call may have been stored"
    return "nothing was stored"


def partition_of_task(task: Task, partitions: int) -> int:
    """The partition where a task belongs."""
    return partition_of(task.user_id, task.tenant, partitions)


def push_row(task: Task) -> tuple[Argument, ...]:
    """A task as the script takes it. Raises InvalidTask for anything else."""
    _check_task(task)
    return load_script("push").row(
        id=task.task_id,
        user=task.user_id,
        name=task.name,
        document=task.document,
        head=task.status_head,
        level=int(task.priority),
        when=task.when,
        schedule=task.schedule_id or "",
    )


def _check_task(task: object) -> None:
    if not isinstance(task, Task):
        raise InvalidTask(f"task must be a Task, not {shown(task)}: make one with Task.create(...)")


def _check_pushed(answer: list[Any], stored: str) -> dict[str, str]:
    """Return the tasks that have the keys of pushed ones: id -> id of that task.

    Raises what the script refused; `stored` says what became of the rest.
    """
    if answer[0] == b"other":
        raise InvalidTask(
            f"task_id {answer[1].decode()!r} is already used by a task with different content: "
            f"choose another id; {stored}"
        )
    if answer[0] == b"full":
        whose = f"the {answer[1].decode()}"
        full = QueueFull(
            f"task {answer[2].decode()!r} was not stored: max_waiting is reached for {whose}; "
            f"{stored}"
        )
        full.is_of_queue = answer[1] == b"queue"
        raise full
    if answer[0] == b"duplicate":
        raise DuplicateTask(
            f"task {answer[1].decode()!r} was not stored: task {answer[2].decode()!r} has the same "
            f"unique key; {stored}",
            task_id=answer[2].decode(),
        )
    if answer[0] == b"pools":
        raise InvalidTask(
            f"task {answer[1].decode()!r} was not stored: its pool is new, and a queue can have at "
            f"most 100 pools; {stored}"
        )
    ids = [task_id.decode() for task_id in answer[2:]]
    return dict(zip(ids[::2], ids[1::2], strict=True))
