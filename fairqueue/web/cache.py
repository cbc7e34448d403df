"""Read once for all who ask at the same time: what is the same for them is kept for a moment."""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Kept = TypeVar("Kept")

MAX_KEPT = 1000  # values; old ones go when there are more


class Cache:
    """Values by key, each good for some seconds. May be used by many threads.

    The key must name all that the value depends on, the reader's tenant above all.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._kept: dict[Hashable, tuple[float, Any]] = {}
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], Kept]) -> Kept:
        """The value of a key, made now unless that was done just before. Raises what `make` does.

        Of several who ask at the same time, one makes it and the others wait for that.
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
                    self._making.pop(key, None)  # else those that fail would stay for ever
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
