"""Let everybody do something so often and not more: kept in this process, by who it is."""

import threading
import time

MAX_KNOWN = 10_000  # of those who came lately; the oldest are forgotten, and may come again


class RateLimiter:
    """One every `seconds`, and `burst` of them at once, for each who comes. For many threads."""

    def __init__(self, seconds: float, burst: int) -> None:
        self._seconds = seconds
        self._ahead = seconds * burst
        self._lock = threading.Lock()
        self._free: dict[str, float] = {}

    def wait(self, who: str) -> float:
        """0 if they may now, which counts; else for how many seconds they have to wait."""
        now = time.monotonic()
        with self._lock:
            free = max(now, self._free.pop(who, now)) + self._seconds
            wait = max(0.0, free - self._ahead - now)
            if len(self._free) >= MAX_KNOWN:
                del self._free[next(iter(self._free))]
            self._free[who] = free - self._seconds if wait > 0 else free
        return wait
