"""The fair queue: push, claim, end; settings, limits, users, and the workers that are alive."""

from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerInfo, WorkerStore

__all__ = ["TaskQueue", "WorkerInfo", "WorkerStore"]
