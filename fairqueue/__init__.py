"""Schedules that your users create, and a queue in which no user starves another, on one Redis."""

from fairqueue import aliases
from fairqueue.alerts import Alerts
from fairqueue.errors import (
    AmbiguousTask,
    BrokenRecord,
    ConfigurationError,
    DuplicateTask,
    EmbeddedServerError,
    FairQueueError,
    Forbidden,
    InvalidCron,
    InvalidInput,
    InvalidPayload,
    InvalidSchedule,
    InvalidTask,
    LeaseLost,
    QueueFull,
    RedisRefused,
    RedisUnavailable,
    ScheduleConflict,
    StaleVersion,
    TimedOut,
    UnknownLayout,
    UnknownSchedule,
    UnknownTask,
    UnknownTenant,
    UnknownTimezone,
    UnknownUser,
    UnknownWorker,
    WrongPartitions,
)
from fairqueue.history.runs import History
from fairqueue.models import Claim, QueueSettings, ScheduledTask, Task, TaskInfo
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.validation import Priority
from fairqueue.worker.context import RunningTask, TaskContext
from fairqueue.worker.dispatch import RegisteredTask
from fairqueue.worker.handlers import Discard, Retry
from fairqueue.worker.worker import Worker

aliases.install()

__all__ = [
    "Alerts",
    "AmbiguousTask",
    "BrokenRecord",
    "Claim",
    "ConfigurationError",
    "Discard",
    "DuplicateTask",
    "EmbeddedServerError",
    "FairQueueError",
    "Forbidden",
    "History",
    "InvalidCron",
    "InvalidInput",
    "InvalidPayload",
    "InvalidSchedule",
    "InvalidTask",
    "LeaseLost",
    "Priority",
    "QueueFull",
    "QueueSettings",
    "RedisRefused",
    "RedisUnavailable",
    "RegisteredTask",
    "Retry",
    "RunningTask",
    "ScheduleConflict",
    "ScheduledTask",
    "StaleVersion",
    "Task",
    "TaskContext",
    "TaskInfo",
    "TaskQueue",
    "TaskScheduler",
    "TimedOut",
    "UnknownLayout",
    "UnknownSchedule",
    "UnknownTask",
    "UnknownTenant",
    "UnknownTimezone",
    "UnknownUser",
    "UnknownWorker",
    "Worker",
    "WrongPartitions",
]
