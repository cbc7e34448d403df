"""The fair queue: push, claim, end; settings, limits, users, and the workers that are alive."""

from fairqueue.queue.queue import (
    UNSET,
    Answer,
    Result,
    TaskQueue,
    check_limits,
    jain_index,
    this_place,
    without_past_pause,
)
from fairqueue.queue.workers import WorkerInfo, WorkerStore

__all__ = [
    "UNSET",
    "Answer",
    "Result",
    "TaskQueue",
    "WorkerInfo",
    "WorkerStore",
    "check_limits",
    "jain_index",
    "this_place",
    "without_past_pause",
]
