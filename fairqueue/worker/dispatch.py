"""Push tasks through the function that handles them, with the payload as keyword arguments."""

import functools
from collections.abc import Callable
from datetime import datetime
from typing import Any, Generic, ParamSpec, TypeVar, Unpack

from fairqueue.errors import InvalidTask, shown
from fairqueue.flow_options import DEFAULT_POOL
from fairqueue.models import Task, TaskOptions, check_options
from fairqueue.queue.base import UNSET
from fairqueue.queue.queue import TaskQueue
from fairqueue.worker.handlers import Handler
from fairqueue.worker.hooks import Hookable

P = ParamSpec("P")
R = TypeVar("R")


class Dispatch:
    """How tasks of one name are pushed. Immutable: each method returns a new one.

    The last of `delay` and `at` counts.
    """

    def __init__(self, queue: TaskQueue, fields: dict[str, Any]) -> None:
        self._queue = queue
        self._fields = fields

    def push(self, user_id: str, /, **payload: Any) -> str:
        """Push a task for a user, with these values as its payload; return its id.

        Raises InvalidTask, InvalidPayload or QueueFull, as `Task.create` and `TaskQueue.push` do;
        nothing is stored then.
        """
        return self._queue.push(Task.create(user_id=user_id, payload=payload, **self._fields))

    def delay(self, seconds: float) -> "Dispatch":
        """Run the task this many seconds after the push."""
        return self._with(delay=seconds, at=None)

    def at(self, when: datetime | float) -> "Dispatch":
        """Run the task at an aware datetime, or at seconds since 1970."""
        return self._with(delay=None, at=when)

    def options(
        self,
        *,
        priority: int = UNSET,
        task_id: str | None = UNSET,
        tenant: str | None = UNSET,
        **options: Unpack[TaskOptions],
    ) -> "Dispatch":
        """Set the priority, the tenant, or the id, which makes repeated pushes one task.

        The other options are the task's own policy, which wins over the handler's, and its flow:
        its pool, keys, expiry and cost; see `Task.create`. Options of a unique key are given
        together.
        """
        given = {"priority": priority, "task_id": task_id, "tenant": tenant, **options}
        unknown = [name for name in options if name not in TaskOptions.__annotations__]
        if unknown:
            known = ", ".join(TaskOptions.__annotations__)
            raise InvalidTask(f"unknown field {shown(unknown[0])}: must be one of {known}")
        check_options(options)
        return self._with(**{name: value for name, value in given.items() if value is not UNSET})

    def _with(self, **fields: Any) -> "Dispatch":
        return Dispatch(self._queue, self._fields | fields)


class RegisteredTask(Hookable, Generic[P, R]):
    """A registered function or class, which can be called as before, and pushed.

    Attributes that it does not have itself are those of the function or class.
    """

    def __init__(self, queue: TaskQueue, handler: Handler, target: Callable[P, R]) -> None:
        functools.update_wrapper(self, target, updated=())
        self.name = handler.name
        self.__wrapped__ = target
        self._hooks = handler.hooks
        fields: dict[str, Any] = {"name": handler.name}
        if handler.settings.pool != DEFAULT_POOL:
            fields["pool"] = handler.settings.pool
        self._dispatch = Dispatch(queue, fields)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly, or create an instance of the class."""
        return self.__wrapped__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Looked up in __dict__: before __init__ there is no target, and this would recurse.
        if "__wrapped__" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["__wrapped__"], name)

    def __repr__(self) -> str:
        return f"<task {self.name!r}: {self.__wrapped__!r}>"

    def push(self, user_id: str, /, **payload: Any) -> str:
        """Push a task for a user, with these values as its payload; see `Dispatch.push`."""
        return self._dispatch.push(user_id, **payload)

    def delay(self, seconds: float) -> Dispatch:
        """Run the task this many seconds after the push: `build.delay(60).push("alice")`."""
        return self._dispatch.delay(seconds)

    def at(self, when: datetime | float) -> Dispatch:
        """Run the task at an aware datetime, or at seconds since 1970."""
        return self._dispatch.at(when)

    def options(
        self,
        *,
        priority: int = UNSET,
        task_id: str | None = UNSET,
        tenant: str | None = UNSET,
        **options: Unpack[TaskOptions],
    ) -> Dispatch:
        """Set options of the task; see `Dispatch.options`."""
        return self._dispatch.options(priority=priority, task_id=task_id, tenant=tenant, **options)


def unwrapped(target: Any) -> Any:
    """Return the function or class of a registered task; anything else unchanged."""
    return target.__wrapped__ if isinstance(target, RegisteredTask) else target
