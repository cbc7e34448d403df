"""A snapshot of a queue: the answer of the script queue_stats, as numbers."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.flow_options import DEFAULT_POOL
from fairqueue.models import (
    UNREADABLE,
    PoolSnapshot,
    QueueSnapshot,
    text_or_none,
)
from fairqueue.queue.records import (
    moment_of,
)


def jain_index(service: Sequence[float]) -> float | None:
    """Jain's fairness index: 1 if all got the same, 1/n if one got all; None without service."""
    total, squares = sum(service), sum(x * x for x in service)
    return total * total / (len(service) * squares) if squares > 0 else None


def snapshot(answer: list[Any], partition: int = 0) -> QueueSnapshot:
    """Parse the answer of the script."""
    numbers = [int(value) for value in answer[2:13]]
    leader, leader_until = _leader(answer[13])
    service = tuple(_number(value) for value in answer[15])
    return QueueSnapshot(
        at=from_ms(int(answer[0])),
        counters=dict(_pairs(answer[1])),
        ready=numbers[0],
        delayed=numbers[1],
        running=numbers[2],
        dead=numbers[3],
        oldest_wait=numbers[4] / 1000,
        active_users=numbers[5],
        parked_users=numbers[6],
        schedules=numbers[7],
        active_schedules=numbers[8],
        overdue=numbers[9] / 1000,
        set_aside=numbers[10],
        leader=leader,
        leader_until=leader_until,
        epoch=int(_number(answer[14])),
        jain_index=jain_index(service),
        pools=tuple(_pools(answer[16], numbers[0])),
        active_tenants=int(answer[17]),
        parked_tenants=int(answer[18]),
        held=int(answer[19]),
        slots_in_use=int(answer[20]),
        unique_keys=int(answer[21]),
        partition=partition,
        service=service,
    )


_SUMS = (
    *("ready", "delayed", "running", "dead", "active_users", "parked_users", "schedules"),
    *("active_schedules", "set_aside", "active_tenants", "parked_tenants", "held"),
    *("slots_in_use", "unique_keys"),
)
_MAXIMA = ("at", "oldest_wait", "overdue", "epoch")


def merge_snapshots(parts: list[QueueSnapshot]) -> QueueSnapshot:
    """The snapshot of a queue from those of its partitions."""
    counters: Counter[str] = Counter()
    for part in parts:
        counters.update(part.counters)
    service = tuple(chain.from_iterable(part.service for part in parts))
    leader = leader_until = None
    if all(part.is_led for part in parts):
        leader = ", ".join(sorted({part.leader or "unknown" for part in parts}))
        leader_until = min(part.leader_until for part in parts if part.leader_until)
    values: dict[str, Any] = {
        name: sum(getattr(part, name) for part in parts) for name in _SUMS
    } | {name: max(getattr(part, name) for part in parts) for name in _MAXIMA}
    return QueueSnapshot(
        **values,
        counters=dict(counters),
        leader=leader,
        leader_until=leader_until,
        jain_index=jain_index(service),
        pools=tuple(_merged_pools(parts)),
        parts=tuple(parts),
        service=service,
    )


def _merged_pools(parts: list[QueueSnapshot]) -> Iterator[PoolSnapshot]:
    """The pools of all partitions, the default one first."""
    found: dict[str, list[PoolSnapshot]] = {}
    for pool in chain.from_iterable(part.pools for part in parts):
        found.setdefault(pool.pool, []).append(pool)
    for name, pools in sorted(found.items(), key=lambda each: (each[0] != DEFAULT_POOL, each[0])):
        yield PoolSnapshot(
            pool=name,
            waiting=sum(pool.waiting for pool in pools),
            oldest_wait=max(
                (w for pool in pools if (w := pool.oldest_wait) is not None), default=None
            ),
            last_claim=max((at for pool in pools if (at := pool.last_claim)), default=None),
        )


def _pools(flat: list[Any], waiting: int) -> Iterator[PoolSnapshot]:
    """The pools of a queue, the default one first."""
    rows = list(zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True))
    in_others = sum(int(count) for _, count, _, _ in rows)
    for name, count, ms, last in rows:
        pool = name.decode("utf-8", "replace")
        yield PoolSnapshot(
            pool=pool or DEFAULT_POOL,
            waiting=int(count) if pool else max(0, waiting - in_others),
            oldest_wait=None if int(ms) < 0 else int(ms) / 1000,
            last_claim=from_ms(int(last)) if int(last) else None,
        )


def _leader(text: bytes) -> tuple[str | None, datetime | None]:
    """The leader and the end of its term; nobody if the record is malformed."""
    try:
        record = json.loads(text)
        return text_or_none(record["scheduler"]), moment_of(record["ends"])
    except UNREADABLE:
        return None, None


def _number(text: bytes) -> float:
    """Parse a stored number; 0 if malformed."""
    with suppress(ValueError):
        value = float(text)
        if math.isfinite(value):
            return value
    return 0.0


def _pairs(flat: list[bytes]) -> Iterator[tuple[str, int]]:
    """Parse names and counts; malformed counts are skipped."""
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        with suppress(ValueError):
            yield name.decode(), int(value)
