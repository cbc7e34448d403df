"""Limit how often each caller may do something, in this process."""

import threading
import time

MAX_KNOWN = 10_000  # callers that are remembered; the oldest are dropped


class RateLimiter:
    """Allow one action every `seconds` per caller, with bursts of `burst`. Thread-safe."""

    def __init__(self, seconds: float, burst: int) -> None:
        self._seconds = seconds
        self._ahead = seconds * burst
        self._lock = threading.Lock()
        self._free: dict[str, float] = {}

    def wait(self, who: str) -> float:
        """Return 0 and count the action if it is allowed now, else the seconds to wait."""
        now = time.monotonic()
        with self._lock:
            free = max(now, self._free.pop(who, now)) + self._seconds
            wait = max(0.0, free - self._ahead - now)
            if len(self._free) >= MAX_KNOWN:
                del self._free[next(iter(self._free))]
            self._free[who] = free - self._seconds if wait > 0 else free
        return wait
