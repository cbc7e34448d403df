"""Answer requests although some partitions of the queue do not answer, and say which."""

import threading
from collections.abc import Callable, Mapping

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairqueue.errors import FairQueueError, RedisUnavailable
from fairqueue.inspection.missing import missing_text, note_missing
from fairqueue.link.connection import Link
from fairqueue.link.partitions import Missing

HEADER = "FairQueue-Missing-Partitions"
LOOK_S = 2.0  # how often to look whether a partition is back, and how long it may take to answer

_NOTED = "fairqueue.missing"  # in a scope: the partitions that did not answer the request
_READS = frozenset({"GET", "HEAD"})
_NOT_READING = ("/static/", "/events", "/healthz", "/login")


class Absences:
    """The partitions that do not answer, as far as this process knows.

    They are not asked until they are back, which a thread finds out: a node that is frozen would
    cost every request a time-out.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._known: dict[int, str] = {}
        self._watcher: threading.Thread | None = None

    def known(self) -> dict[int, str]:
        """Return the partitions that do not answer, with the reasons."""
        with self._lock:
            return dict(self._known)

    def learn(self, missing: Mapping[int, str]) -> None:
        """Take note of partitions that did not answer."""
        if not missing:
            return
        with self._lock:
            for number, reason in missing.items():
                self._known.setdefault(number, reason)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, daemon=True)
                self._watcher.start()

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(LOOK_S)
            back = [number for number in self.known() if self.is_back(number)]
            with self._lock:
                for number in back:
                    self._known.pop(number, None)
                if not self._known:
                    self._watcher = None
                    return

    def is_back(self, number: int) -> bool:
        """Return whether a partition answers again."""
        try:
            self._link.parts[number].ask(("PING",), timeout=LOOK_S)
        except RedisUnavailable:
            return False
        except FairQueueError:
            return True  # it answers, or the queue was closed: the next request finds out
        return True


class MissingMiddleware:
    """Let requests that only read go on without partitions that do not answer.

    The answer names them in a header, and pages in a notice.
    """

    def __init__(self, app: ASGIApp, absences: Absences, path_of: Callable[[Scope], str]) -> None:
        """path_of: the path of a request below the mount point."""
        self._app = app
        self._absences = absences
        self._path_of = path_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or not self._reads(scope):
            await self._app(scope, receive, send)
            return
        with note_missing(self._absences.known()) as missing:
            scope[_NOTED] = missing

            async def framed(message: Message) -> None:
                if message["type"] == "http.response.start" and missing:
                    numbers = ", ".join(map(str, sorted(missing.partitions)))
                    MutableHeaders(scope=message)[HEADER] = numbers
                await send(message)

            try:
                await self._app(scope, receive, framed)
            finally:
                self._absences.learn(missing.partitions)

    def _reads(self, scope: Scope) -> bool:
        path = self._path_of(scope)
        return scope["method"] in _READS and not path.startswith(_NOT_READING)


def missing_of(request: Request, link: Link, *, with_nodes: bool) -> str:
    """What to tell on a page about partitions that do not answer; empty if all do."""
    missing: Missing | None = request.scope.get(_NOTED)
    return "" if missing is None else missing_text(link, missing.partitions, with_nodes=with_nodes)
