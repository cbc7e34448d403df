"""Schedules that your users create, and a queue in which no user starves another, on one Redis."""

from fairqueue.errors import (
    BrokenRecord,
    ConfigurationError,
    EmbeddedServerError,
    FairQueueError,
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
    UnknownSchedule,
    UnknownTimezone,
)
from fairqueue.handlers import Discard, Retry, TaskContext, TimedOut
from fairqueue.models import Claim, QueueSettings, ScheduledTask, Task, TaskInfo
from fairqueue.queue import TaskQueue
from fairqueue.scheduler import TaskScheduler
from fairqueue.validation import Priority
from fairqueue.worker import Worker

__all__ = [
    "BrokenRecord",
    "Claim",
    "ConfigurationError",
    "Discard",
    "EmbeddedServerError",
    "FairQueueError",
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
    "Retry",
    "ScheduleConflict",
    "ScheduledTask",
    "Task",
    "TaskContext",
    "TaskInfo",
    "TaskQueue",
    "TaskScheduler",
    "TimedOut",
    "UnknownSchedule",
    "UnknownTimezone",
    "Worker",
]
