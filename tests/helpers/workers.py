"""Handlers that wait, and recipients that remember their alerts."""

import threading
from typing import Any

from prometheus_client import CollectorRegistry

from fairqueue.alerts import Alert, Alerts, CallableRecipient
from fairqueue.worker.context import TaskContext


class Gate:
    """A handler that signals when it begins, and waits for `go_on`."""

    def __init__(self, result: Any = None) -> None:
        self.begun = threading.Event()
        self.starts = threading.Semaphore(0)  # released once for each run
        self.go_on = threading.Event()
        self.contexts: list[TaskContext] = []
        self._result = result

    def __call__(self, payload: dict[str, Any], context: TaskContext) -> Any:
        self.contexts.append(context)
        self.begun.set()
        self.starts.release()
        assert self.go_on.wait(60)
        return self._result

    @property
    def context(self) -> TaskContext:
        return self.contexts[-1]


class Person:
    """A recipient that remembers its alerts."""

    def __init__(self, **settings: Any) -> None:
        self.told: list[Alert] = []
        recipient = CallableRecipient(self.told.append)
        self.alerts = Alerts([recipient], registry=CollectorRegistry(), **settings)

    def heard(self, *kinds: str) -> list[Alert]:
        """The alerts so far, of these kinds or of all."""
        assert self.alerts.flush(30)
        return [alert for alert in self.told if not kinds or alert.kind in kinds]
