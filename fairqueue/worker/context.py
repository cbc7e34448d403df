"""What a handler may know of its run, and say while it runs."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, Protocol

from fairqueue.logs import USUAL_ATTRIBUTES, fields_of
from fairqueue.models import Task
from fairqueue.queue.reports import LogLines
from fairqueue.worker.event_loop import Leftovers

logger = logging.getLogger("fairqueue.task")


class Lines(Protocol):
    """Where the log lines of a run are kept."""

    def keep(self, level: int, message: str, context: Mapping[str, Any]) -> None:
        """Add one, with its fields."""


class TaskLog(logging.LoggerAdapter[logging.Logger]):
    """A logger of one run: each line names the task, and is kept for its history.

    Lines of all levels are kept, also those that the logging module is set to drop. May be called
    itself: `context.log("half done")`, `context.log("slow", level="warning", page=7)`. Fields that
    are given so, or as `extra`, are kept with the line.
    """

    def __init__(self, task: Task, lines: Lines) -> None:
        super().__init__(logger, {"task": task.task_id, "user": task.user_id})
        self._lines = lines

    def __call__(self, message: object, /, level: str = "info", **fields: object) -> None:
        """Log a line with fields. A level that is none counts as "info"."""
        number = logging.getLevelNamesMapping().get(str(level).upper(), logging.INFO)
        self.log(number, "%s", message, extra=fields, stacklevel=2)

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a line as the logging module does, and keep it."""
        self._lines.keep(level, _formatted(msg, args), kwargs.get("extra") or {})
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's place, not this one
        super().log(level, msg, *args, **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the task to the fields that were given, and not in place of them.

        Fields with a name that each record of the logging module has are only kept: it would raise.
        """
        given = kwargs.get("extra") or {}
        usable = {name: value for name, value in given.items() if name not in USUAL_ATTRIBUTES}
        kwargs["extra"] = {**usable, **(self.extra or {})}
        return msg, kwargs


class TaskContext:
    """What a handler may know of its run, and say while it runs.

    `cancelled` and `lease_lost` become True while it runs, within a third of the lease: a handler
    that takes long looks at them and ends early. A run whose lease is lost is not recorded.
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
        self.on_stop: Callable[[], None] | None = None  # of a run that can be ended from outside
        self.left: Leftovers | None = None  # what a run in a process of its own left running
        self._beat = beat
        self._lines = lines
        self._log: TaskLog | None = None

    @property
    def log(self) -> TaskLog:
        """A logger for this run, whose lines are also kept in the task's history."""
        if self._log is None:
            self._log = TaskLog(self.task, self.lines)
        return self._log

    @property
    def lines(self) -> Lines:
        """Where the log lines of this run are kept."""
        if self._lines is None:
            self._lines = LogLines()
        return self._lines

    @property
    def logged(self) -> LogLines | None:
        """The lines that were logged, or None if there are none."""
        return self._lines if isinstance(self._lines, LogLines) else None

    def heartbeat(self) -> bool:
        """Extend the lease of this run now; False if it is lost or the task is cancelled.

        Leases are extended without it; it is for a handler that wants to know at this moment, such
        as before a step that must not be done twice. Raises RedisUnavailable when that cannot be
        found out. In a process of its own a handler is killed instead, and always gets True.
        """
        if not self.cancelled and self._beat is not None:
            self._beat(self)
        return not self.cancelled

    def stop(self, *, lease_lost: bool = False) -> None:
        """Tell the run that nobody waits for it any more. Called by its worker."""
        self.lease_lost = self.lease_lost or lease_lost
        self.cancelled = True
        on_stop = self.on_stop
        if on_stop is not None:
            on_stop()


class RunningTask(Task):
    """A task as the default handler gets it: it also knows how its run stands."""

    __slots__ = ("context",)
    __hash__ = None  # type: ignore[assignment] # as a Task, whose payload has none either
    context: TaskContext

    @classmethod
    def of(cls, context: TaskContext) -> "RunningTask":
        """The task of a context."""
        running = object.__new__(cls)
        for name in _FIELDS:
            object.__setattr__(running, name, getattr(context.task, name))
        object.__setattr__(running, "context", context)
        return running

    @property
    def cancelled(self) -> bool:
        """As `TaskContext.cancelled`."""
        return self.context.cancelled

    @property
    def lease_lost(self) -> bool:
        """As `TaskContext.lease_lost`."""
        return self.context.lease_lost

    def __eq__(self, other: object) -> bool:
        """Equal to each Task with the same content."""
        if not isinstance(other, Task):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _COMPARED)


_FIELDS = tuple(field.name for field in fields(Task))
_COMPARED = tuple(field.name for field in fields(Task) if field.compare)


class LogCapture(logging.Handler):
    """Keeps what the logging module is told in the thread of a run, for the history of its task.

    It hangs on the root logger only while it is entered, and changes no level: what a logger drops
    is not seen here either.
    """

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    def createLock(self) -> None:
        """None is needed, and a time-out that is raised in a handler could leave it locked."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Keep a record. Python 3.13 takes the lock without a look whether there is one."""
        self.emit(record)
        return True

    def attach(self) -> None:
        """Listen from now on."""
        logging.getLogger().addHandler(self)

    def detach(self) -> None:
        """Listen no more."""
        logging.getLogger().removeHandler(self)

    @contextmanager
    def of(self, context: TaskContext) -> Iterator[None]:
        """What this thread logs inside belongs to this run."""
        self._here.context = context
        try:
            yield
        finally:
            self._here.context = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record if a run is going on here; those of `context.log` are kept already."""
        context: TaskContext | None = getattr(self._here, "context", None)
        if context is None or record.name == logger.name:
            return
        try:
            text = _formatted(record.msg, record.args or ())
            context.lines.keep(record.levelno, text, fields_of(record))
        except OSError:  # the worker is gone: no matter of whoever logs
            self.handleError(record)


def _formatted(message: object, arguments: Any) -> str:
    """A message with its arguments; as far as that goes, when they do not fit."""
    try:
        text = str(message)
        if len(arguments) == 1 and isinstance(arguments, tuple) and isinstance(arguments[0], dict):
            arguments = arguments[0]  # as the logging module does
        return text % arguments if arguments else text
    except Exception:
        return _shown(message)


def _shown(message: object) -> str:
    try:
        return str(message)
    except Exception:
        return "(a message that cannot be read)"
