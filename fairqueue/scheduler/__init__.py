"""Fire schedules when they are due: the loop, its leadership, and the daemon."""

from fairqueue.scheduler.scheduler import (
    Health,
    TaskScheduler,
    TickReport,
)

__all__ = [
    "Health",
    "TaskScheduler",
    "TickReport",
]
