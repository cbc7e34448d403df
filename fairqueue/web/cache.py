"""A short-lived cache, so that many viewers cost one read."""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Kept = TypeVar("Kept")

MAX_KEPT = 1000  # values; expired ones are removed beyond that


class Cache:
    """Values by key that expire after some seconds. Thread-safe.

    The key must include all that the value depends on, above all the reader's tenant.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._kept: dict[Hashable, tuple[float, Any]] = {}
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """The cached value, or the result of `make`, whose errors are raised.

        If several threads ask at the same time, one calls `make` and the others wait.
        """
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                until, value = self._kept.get(key, (0.0, None))
            if time.monotonic() < until:
                found: Kept = value
                return found
            try:
                made = make()
            except BaseException:
                with self._lock:
                    self._making.pop(key, None)  # failed keys must not accumulate
                raise
            with self._lock:
                self._forget()
                self._kept[key] = (time.monotonic() + self._seconds, made)
            return made

    def _forget(self) -> None:
        if len(self._kept) < MAX_KEPT:
            return
        now = time.monotonic()
        for key in [key for key, (until, _) in self._kept.items() if until <= now]:
            del self._kept[key]
            self._making.pop(key, None)
