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
from fairqueue.models import Claim, QueueSettings, ScheduledTask, Task, TaskInfo
from fairqueue.queue import TaskQueue
from fairqueue.scheduler import TaskScheduler
from fairqueue.validation import Priority

__all__ = [
    "BrokenRecord",
    "Claim",
    "ConfigurationError",
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
    "ScheduleConflict",
    "ScheduledTask",
    "Task",
    "TaskInfo",
    "TaskQueue",
    "TaskScheduler",
    "UnknownSchedule",
    "UnknownTimezone",
]
