"""Fire schedules when they are due: the loop, its leadership, and the daemon."""

from fairqueue.scheduler.firing import TickReport
from fairqueue.scheduler.scheduler import SchedulerHealth, TaskScheduler

__all__ = [
    "SchedulerHealth",
    "TaskScheduler",
    "TickReport",
]
