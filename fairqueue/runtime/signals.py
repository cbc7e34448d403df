"""Wait in the main thread for SIGINT and SIGTERM."""

import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Self

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Catches SIGINT and SIGTERM inside a `with` block, in the main thread.

    The first one ends a `wait`; each later one calls `on_second`. The handlers that were installed
    before are restored at the end.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.on_second: Callable[[], None] = lambda: None
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        self._awake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        # Before the handlers, so that no signal is missed. Python writes the number of a signal
        # there even if another thread received it.
        self._fd_before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._handle) for number in NUMBERS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._handlers.items():  # None: not Python's, and lost
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._awake.close()
        self._waker.close()

    def _handle(self, number: int, frame: object) -> None:
        if os.getpid() != self._owner:
            return  # a child that was just forked and has no handlers of its own yet
        self.seen.append(number)
        if len(self.seen) > 1:
            self.on_second()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for a signal; True if one has come, now or before."""
        if not self.seen and select.select([self._awake], [], [], max(0.0, seconds))[0]:
            # The bytes of other signals wake it too.
            return bool(set(self._awake.recv(16)) & set(NUMBERS)) or bool(self.seen)
        return bool(self.seen)
