"""Context of a run: cancellation, heartbeat and log for the handler."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Protocol

from fairqueue.flow_options import check_cost
from fairqueue.logs import USUAL_ATTRIBUTES, fields_of, text_of, whose
from fairqueue.models import Task
from fairqueue.queue.reports import LogLines
from fairqueue.worker.event_loop import Leftovers

logger = logging.getLogger("fairqueue.task")


class Lines(Protocol):
    """A store of the log lines of a run."""

    def keep(self, level: int, message: str, context: Mapping[str, Any]) -> None:
        """Add a line with its fields."""


class TaskLog(logging.LoggerAdapter[logging.Logger]):
    """The logger of one run: each line names the task, and is kept in its history.

    Lines of all levels are kept, even those that the logging module drops. It can also be called:
    `context.log("half done")`, `context.log("slow", level="warning", page=7)`. Fields given this
    way, or as `extra`, are kept with the line.
    """

    def __init__(self, task: Task, lines: Lines) -> None:
        super().__init__(logger, {"task": task.task_id, **whose(task.user_id, task.tenant)})
        self._lines = lines

    def __call__(self, message: object, /, level: str = "info", **fields: object) -> None:
        """Log a line with fields. An unknown level counts as "info"."""
        number = logging.getLevelNamesMapping().get(str(level).upper(), logging.INFO)
        self.log(number, "%s", message, extra=fields, stacklevel=2)

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a line with the logging module, and keep it."""
        self._lines.keep(level, _formatted(msg, args), kwargs.get("extra") or {})
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the location of the caller
        super().log(level, msg, *args, **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the task to the given fields.

        Fields named like a standard attribute of records are only kept: the logging module would
        raise.
        """
        given = kwargs.get("extra") or {}
        usable = {name: value for name, value in given.items() if name not in USUAL_ATTRIBUTES}
        kwargs["extra"] = {**usable, **(self.extra or {})}
        return msg, kwargs


class TaskContext:
    """The context of a run, for its handler.

    `cancelled` and `lease_lost` become True during the run, with a delay of up to a third of the
    lease; a long handler checks them and ends early. A run whose lease is lost is not recorded.
    """

    def __init__(
        self,
        task: Task,
        attempt: int = 1,
        *,
        beat: "Callable[[TaskContext], None] | None" = None,
        lines: Lines | None = None,
    ) -> None:
        self.task = task
        self.task_id = task.task_id
        self.attempt = attempt
        self.cancelled = False
        self.lease_lost = False
        self.on_stop: Callable[[], None] | None = None  # kills a run in its own process
        self.spent: float | None = None  # see `cost`
        self.left: Leftovers | None = None  # what a run in its own process left running
        self._beat = beat
        self._lines = lines
        self._log: TaskLog | None = None

    @property
    def log(self) -> TaskLog:
        """The logger of this run; its lines are also kept in the task's history."""
        if self._log is None:
            self._log = TaskLog(self.task, self.lines)
        return self._log

    @property
    def lines(self) -> Lines:
        """The kept log lines of this run."""
        if self._lines is None:
            self._lines = LogLines()
        return self._lines

    @property
    def logged(self) -> LogLines | None:
        """The lines that were logged, or None if nothing was logged."""
        return self._lines if isinstance(self._lines, LogLines) else None

    def cost(self, units: float) -> None:
        """Say what this attempt has cost, in the units of `Task.create(cost=)`; the last counts.

        It is charged at the end of the attempt, however that ends, instead of what was charged when
        it began. Raises InvalidTask for a bad cost.
        """
        self.spent = check_cost(units)

    def heartbeat(self) -> bool:
        """Extend the lease of this run now; False if it is lost or the task is cancelled.

        Leases are extended automatically; call this before a step that must not be done twice.
        Raises RedisUnavailable if Redis cannot be reached. A handler in its own process is killed
        instead, and always gets True.
        """
        if not self.cancelled and self._beat is not None:
            self._beat(self)
        return not self.cancelled

    def stop(self, *, lease_lost: bool = False) -> None:
        """Tell the run to end. Called by its worker."""
        self.lease_lost = self.lease_lost or lease_lost
        self.cancelled = True
        on_stop = self.on_stop
        if on_stop is not None:
            on_stop()


class RunningTask(Task):
    """A task as the default handler gets it, with the state of its run."""

    __slots__ = ("context",)
    __hash__ = None  # type: ignore[assignment] # like Task, whose payload is not hashable
    context: TaskContext

    @classmethod
    def of(cls, context: TaskContext) -> "RunningTask":
        """Return the task of a context."""
        running = object.__new__(cls)
        for name in _FIELDS:
            object.__setattr__(running, name, getattr(context.task, name))
        object.__setattr__(running, "context", context)
        return running

    @property
    def cancelled(self) -> bool:
        """See `TaskContext.cancelled`."""
        return self.context.cancelled

    @property
    def lease_lost(self) -> bool:
        """See `TaskContext.lease_lost`."""
        return self.context.lease_lost

    def __eq__(self, other: object) -> bool:
        """Whether the other is a Task with the same content."""
        if not isinstance(other, Task):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _COMPARED)


_FIELDS = tuple(field.name for field in fields(Task))
_COMPARED = tuple(field.name for field in fields(Task) if field.compare)


class LogCapture(logging.Handler):
    """Keeps records logged in the thread of a run, for the history of its task.

    It is attached to the root logger and does not change log levels: records that a logger drops
    are not kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    def createLock(self) -> None:
        """Create no lock: none is needed, and TimedOut in a handler could leave it locked."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Keep a record, without the lock, which Python 3.13 would take unchecked."""
        self.emit(record)
        return True

    def attach(self) -> None:
        """Add this handler to the root logger."""
        logging.getLogger().addHandler(self)

    def detach(self) -> None:
        """Remove this handler from the root logger."""
        logging.getLogger().removeHandler(self)

    @contextmanager
    def of(self, context: TaskContext) -> Iterator[None]:
        """Keep what this thread logs inside the block for this run."""
        self._here.context = context
        try:
            yield
        finally:
            self._here.context = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record if this thread runs a task; records of `context.log` are kept already."""
        context: TaskContext | None = getattr(self._here, "context", None)
        if context is None or record.name == logger.name:
            return
        try:
            text = _formatted(record.msg, record.args or ())
            context.lines.keep(record.levelno, text, fields_of(record))
        except OSError:  # the worker is gone, which is not an error of the code that logs
            self.handleError(record)


def _formatted(message: object, arguments: Any) -> str:
    """Return a message with its arguments, or the bare message if formatting fails."""
    try:
        text = str(message)
        if len(arguments) == 1 and isinstance(arguments, tuple) and isinstance(arguments[0], dict):
            arguments = arguments[0]  # as the logging module does
        return text % arguments if arguments else text
    except Exception:
        return text_of(message)
