"""Run tasks: handlers, leases, heartbeats, time-outs and isolation."""

from fairqueue.worker.worker import Worker

__all__ = ["Worker"]
