"""Waits with an end."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import redis


def in_thread(action: Callable[[], Any]) -> Callable[[], Any]:
    """Start an action; calling the answer gives its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(action)
    pool.shutdown(wait=False)
    return lambda: future.result(30)


def until_blocked(client: redis.Redis, count: int = 1) -> None:
    """Come back when so many clients are blocked in the server."""
    deadline = time.monotonic() + 30
    while cast(dict[str, int], client.info("clients"))["blocked_clients"] < count:
        assert time.monotonic() < deadline


def eventually(
    predicate: Callable[[], object], what: str, *, within: float = 10.0, every: float = 0.005
) -> None:
    """Return as soon as the predicate holds; fail, saying what was awaited, after `within` s."""
    pause = threading.Event()
    for _ in range(int(within / every)):
        if predicate():
            return
        pause.wait(every)
    raise AssertionError(f"not within {within:g} s: {what}")
