"""Schedules that your users create, and a queue in which no user starves another, on one Redis."""

from fairqueue.alerts import Alerts
from fairqueue.context import RunningTask, TaskContext
from fairqueue.dispatch import RegisteredTask
from fairqueue.errors import (
    BrokenRecord,
    ConfigurationError,
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
    UnknownLayout,
    UnknownSchedule,
    UnknownTask,
    UnknownTimezone,
    UnknownUser,
    UnknownWorker,
)
from fairqueue.handlers import Discard, Retry, TimedOut
from fairqueue.history import History
from fairqueue.models import Claim, QueueSettings, ScheduledTask, Task, TaskInfo
from fairqueue.queue import TaskQueue
from fairqueue.scheduler import TaskScheduler
from fairqueue.validation import Priority
from fairqueue.worker import Worker

__all__ = [
    "Alerts",
    "BrokenRecord",
    "Claim",
    "ConfigurationError",
    "Discard",
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
    "UnknownTimezone",
    "UnknownUser",
    "UnknownWorker",
    "Worker",
]
