"""Waits with a deadline."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis


def in_thread(action: Callable[[], Any]) -> Callable[[], Any]:
    """Start an action in a thread; call the returned function for its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(action)
    pool.shutdown(wait=False)
    return lambda: future.result(30)


def until_blocked(client: redis.Redis, count: int = 1) -> None:
    """Wait until `count` clients are blocked in the server."""
    deadline = time.monotonic() + 30
    while sum(each["blocked_clients"] for each in infos(client, "clients")) < count:
        assert time.monotonic() < deadline


def infos(client: redis.Redis, section: str) -> list[dict[str, Any]]:
    """A section of INFO of each primary: of one server, or of all nodes of a cluster."""
    any_client: Any = client
    if isinstance(any_client, redis.RedisCluster):
        found: Any = any_client.info(section, target_nodes=redis.RedisCluster.PRIMARIES)
        return list(found.values())
    return [any_client.info(section)]


def eventually(
    predicate: Callable[[], object], what: str, *, within: float = 10.0, every: float = 0.005
) -> None:
    """Wait until the predicate holds; fail with `what` after `within` seconds."""
    pause = threading.Event()
    for _ in range(int(within / every)):
        if predicate():
            return
        pause.wait(every)
    raise AssertionError(f"not within {within:g} s: {what}")
