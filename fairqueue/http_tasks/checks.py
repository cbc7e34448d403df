"""Check HTTP tasks when they are created, to refuse at once what no worker would send.

Workers announce with their heartbeats which tasks are HTTP tasks, and which targets they allow. A
task named `http` with a `url` is an HTTP task even if no live worker runs it; then the rules of
`HttpTasks()` apply. If a worker runs the name with another handler, the task is not checked.
Workers check again when they run the task: a host name may have other addresses by then.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from fairqueue.link.connection import Link
from fairqueue.link.operation import Blocking, Operation, operation, steps
from fairqueue.queue.workers import WorkerStore

USUAL_NAME = "http"
POLICIES_KEPT_S = 5.0  # how long the announcements of workers are cached
HOST_S = 2.0  # a host whose lookup takes longer is allowed: the worker checks again
HOSTS_S, WINDOW_S = 5.0, 60.0  # seconds that all lookups may take in a window of seconds
HOSTS_KEPT = 1000

# By name of the tasks; an empty list if a worker runs them with another handler.
Policies = dict[str, list[Mapping[str, Any]]]


class Outgoing:
    """Checks the HTTP tasks that are created for one queue. May be used by many threads."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._workers = WorkerStore(link)
        self._lock = threading.Lock()
        self._policies: Policies = {}
        self._read_at = -POLICIES_KEPT_S
        # host -> until when its addresses are cached, and the addresses; None: not known
        self._hosts: OrderedDict[str, tuple[float, list[str] | None]] = OrderedDict()
        self._window_ends = 0.0
        self._spent = 0.0

    @operation
    def check(self, name: str, payload: Mapping[str, Any]) -> Operation[None]:
        """Raise InvalidPayload for an HTTP task that is malformed, or whose target is not allowed.

        Without the extra `http` installed, nothing is checked.
        """
        is_usual = name == USUAL_NAME and "url" in payload
        if not is_usual and not isinstance(payload.get("url"), str):
            return
        policies = (yield from self._announced()).get(name)
        if policies == [] or (policies is None and not is_usual):
            return
        try:
            from fairqueue.http_tasks.network import check_made
        except ImportError:
            return
        yield Blocking(check_made, payload, policies or (), self._addresses)

    def _announced(self) -> Operation[Policies]:
        """Return the policies that live workers announce, by task name."""
        with self._lock:
            if time.monotonic() - self._read_at < POLICIES_KEPT_S:
                return self._policies
        found: Policies = {}
        alive = yield from steps(self._workers.alive)()
        for worker in alive:
            for name, policy in worker.http.items():
                found.setdefault(name, []).append(policy)
        for worker in alive:
            found |= {name: [] for name in worker.names if name not in worker.http}
        with self._lock:
            self._policies, self._read_at = found, time.monotonic()
        return found

    def _addresses(self, host: str) -> list[str] | None:
        """Return the addresses of a host; None if they cannot be looked up in time."""
        now = time.monotonic()
        with self._lock:
            kept = self._hosts.get(host)
            if kept is not None and kept[0] > now:
                return kept[1]
            if now >= self._window_ends:
                self._window_ends, self._spent = now + WINDOW_S, 0.0
            left = min(HOST_S, HOSTS_S - self._spent)
        found = _look_up(host, now + left) if left > 0 else None
        with self._lock:
            self._spent += time.monotonic() - now
            self._hosts[host] = (now + WINDOW_S, found)
            while len(self._hosts) > HOSTS_KEPT:
                self._hosts.popitem(last=False)
        return found


def _look_up(host: str, deadline: float) -> list[str] | None:
    from fairqueue.http_tasks.network import look_up_by

    try:
        return look_up_by(host, deadline)
    except OSError:  # includes TimeoutError
        return None
