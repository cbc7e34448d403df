"""The fair queue: push, claim and end tasks; settings of users and names; live workers."""

from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerInfo, WorkerStore

__all__ = ["TaskQueue", "WorkerInfo", "WorkerStore"]
