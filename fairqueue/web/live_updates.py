"""Send live numbers to open pages, with one poller per process."""

import asyncio
import json
import logging
import random
import signal
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from starlette.concurrency import run_in_threadpool

from fairqueue.errors import FairQueueError, RedisUnavailable
from fairqueue.logs import log_event

logger = logging.getLogger("fairqueue.web")

POLL_S = 1.0  # age of the numbers on a page, at most
ANSWER_S = 1.0  # how long Redis may take before pages say that it does not respond
HEARTBEAT_S = 15.0  # proxies close connections that are silent for a minute
STREAM_S = 120.0  # lifetime of a stream; the browser reconnects and is authenticated again
CHECK_S = 5.0  # how long a key that was revoked elsewhere still gets updates
LOOK_S = 0.5  # how often to check whether the server is stopping
MAX_VIEWERS = 500  # streams in one process
MAX_OF_ONE = 10  # streams with one key or session, so that nobody can lock others out
RETRY_MS = 2000  # how long a browser waits before it reconnects

Numbers = Mapping[str, Any]
# Reads the numbers for the viewers of a tenant; None for viewers of all tenants.
Reader = Callable[[str | None], Numbers]
# Returns which of these keys and sessions are still valid.
Holding = Callable[[Collection[str]], Collection[str]]


def server_is_ending() -> bool:
    """Whether uvicorn is stopping, if it serves this app in the main thread.

    It waits for open connections before it tells the app, so the streams would never end. Its
    server owns the signal handlers.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        server = getattr(signal.getsignal(number), "__self__", None)
        if getattr(server, "should_exit", False) is True:
            return True
    return False


class Viewer:
    """One open page. Only the newest numbers wait for it, so a slow page costs nothing."""

    def __init__(self, tenant: str | None, key_id: str | None) -> None:
        self.tenant = tenant
        self.key_id = key_id
        self._next: bytes | None = None
        self._last: bytes | None = None
        self._ended = False
        self._awake = asyncio.Event()

    def show(self, text: bytes) -> None:
        """Send the newest numbers unless the page has them; older ones are dropped."""
        self._next = None if text == self._last else text
        if self._next is not None:
            self._awake.set()

    def end(self) -> None:
        """End the stream."""
        self._ended = True
        self._awake.set()

    async def messages(self, seconds: float, heartbeat: float) -> AsyncGenerator[bytes, None]:
        """The messages of the stream, until it is ended or its time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        yield f"retry: {RETRY_MS}\n\n".encode()
        while not self._ended and (left := deadline - loop.time()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._awake.wait(), min(heartbeat, left))
            self._awake.clear()
            if self._next is None:
                yield b": alive\n\n"
                continue
            self._last, self._next = self._next, None
            yield b"event: numbers\ndata: " + self._last + b"\n\n"


class LiveUpdates:
    """The streams of one process and event loop. It polls only while there are viewers."""

    def __init__(
        self,
        read: Reader,
        *,
        holding: Holding = lambda key_ids: key_ids,
        poll: float = POLL_S,
        answer: float = ANSWER_S,
        heartbeat: float = HEARTBEAT_S,
        stream: float = STREAM_S,
        check: float = CHECK_S,
        is_ending: Callable[[], bool] = server_is_ending,
    ) -> None:
        self._read = read
        self._holding = holding
        self._check_s = check
        self._poll_s = poll
        self._answer_s = answer
        self._heartbeat_s = heartbeat
        self._stream_s = stream
        self._viewers: set[Viewer] = set()
        self._news: dict[str | None, bytes] = {}
        self._is_ending = is_ending
        self._poller: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False
        self._failing = False

    @property
    def viewers(self) -> int:
        """The number of open streams."""
        return len(self._viewers)

    def is_full(self, key_id: str | None = None) -> bool:
        """Whether a new viewer, or one with this key, must be refused."""
        if self._closed or self._is_ending() or len(self._viewers) >= MAX_VIEWERS:
            return True
        own = sum(viewer.key_id == key_id for viewer in self._viewers)
        return key_id is not None and own >= MAX_OF_ONE

    async def stream(self, tenant: str | None, key_id: str | None) -> AsyncGenerator[bytes, None]:
        """The messages of one viewer, until it leaves, its session ends or `close` is called."""
        viewer = Viewer(tenant, key_id)
        self._viewers.add(viewer)
        try:
            if tenant in self._news:
                viewer.show(self._news[tenant])
            if self._closed:
                viewer.end()
            else:
                self._begin()
            # Jitter, so that viewers that came together do not reconnect together.
            seconds = self._stream_s * random.uniform(0.75, 1.25)  # noqa: S311 - jitter
            async for message in viewer.messages(seconds, self._heartbeat_s):
                yield message
        finally:
            self._viewers.discard(viewer)

    def _begin(self) -> None:
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())

    def end(self, key_id: str | None) -> None:
        """End the streams of a key or session."""
        for viewer in self._viewers:
            if viewer.key_id == key_id:
                viewer.end()

    def close(self) -> None:
        """End all streams permanently."""
        self._closed = True
        for viewer in self._viewers:
            viewer.end()
        for task in (self._poller, self._watcher):
            if task is not None:
                task.cancel()
        self._poller = self._watcher = None

    async def _watch(self) -> None:
        """End all streams when the server is stopping."""
        while self._viewers:
            if self._is_ending():
                for viewer in self._viewers:
                    viewer.end()
            await asyncio.sleep(LOOK_S)
        self._watcher = None

    async def _poll(self) -> None:
        """Read the numbers once per tenant, as long as there are viewers."""
        loop = asyncio.get_running_loop()
        checked = loop.time()
        while self._viewers:
            if loop.time() - checked >= self._check_s:
                await self._check()
                checked = loop.time()
            for tenant in {viewer.tenant for viewer in self._viewers}:
                text = await self._news_of(tenant)
                self._news[tenant] = text
                for viewer in self._viewers:
                    if viewer.tenant == tenant:
                        viewer.show(text)
            await asyncio.sleep(self._poll_s)
        self._news.clear()  # it would be stale for the next viewer
        self._poller = None

    async def _check(self) -> None:
        """End the streams whose key or session is no longer valid."""
        key_ids = {viewer.key_id for viewer in self._viewers if viewer.key_id is not None}
        held: Collection[str] = ()
        try:
            held = await run_in_threadpool(self._holding, key_ids)
        except RedisUnavailable:
            return  # there are no updates either
        except Exception as error:
            # End all streams: the browsers reconnect and are authenticated again.
            _warn("check_failed", error)
        for key_id in key_ids.difference(held):
            self.end(key_id)

    async def _news_of(self, tenant: str | None) -> bytes:
        try:
            text = _encoded(await self._answer_of(tenant))
            self._failing = False
        except Exception as error:
            # Pages show it, and the next round tries again. It is logged once.
            if not self._failing:
                _warn("poll_failed", error)
            self._failing = True
            text = UNAVAILABLE
        return text

    async def _answer_of(self, tenant: str | None) -> Numbers:
        """Read the numbers. If that takes long, tell all viewers meanwhile.

        A call is repeated for many seconds before it fails, and pages must not look current.
        """
        reading = asyncio.ensure_future(run_in_threadpool(self._read, tenant))
        try:
            done, _ = await asyncio.wait({reading}, timeout=self._answer_s)
            if not done:
                for viewer in self._viewers:
                    viewer.show(UNAVAILABLE)
            return await reading
        except asyncio.CancelledError:
            reading.cancel()
            raise


def _encoded(numbers: Numbers) -> bytes:
    return json.dumps(numbers, separators=(",", ":"), sort_keys=True).encode()


UNAVAILABLE = _encoded({"unavailable": True})


def _warn(event: str, error: Exception) -> None:
    known = isinstance(error, FairQueueError)
    log_event(logger, event, logging.WARNING, exc_info=not known, error=str(error) or repr(error))
