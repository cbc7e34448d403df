"""The pools of a queue, with the workers that serve them."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from fairqueue.models import PoolSnapshot, QueueSnapshot
from fairqueue.queue.estimate import claim_counts_ms
from fairqueue.queue.workers import WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """A pool, its waiting tasks and who takes them.

    oldest_wait: see PoolSnapshot. workers, slots, running: of the live workers
    that serve it; those that serve several pools count in each. last_claim: see PoolSnapshot.
    is_unserved: tasks wait, no live worker takes them, and nobody claimed lately; see
    `claim_counts_ms`.
    """

    pool: str
    waiting: int
    oldest_wait: float | None
    workers: int
    slots: int
    running: int
    last_claim: datetime | None
    is_unserved: bool


def idle_pools(snapshot: QueueSnapshot) -> list[PoolSnapshot]:
    """The pools with waiting tasks from which nobody claimed lately: no worker may serve them."""
    return _not_claimed_from(snapshot, claim_counts_ms(0, ()))


def pool_infos(snapshot: QueueSnapshot, alive: Iterable[WorkerInfo]) -> list[PoolInfo]:
    """The pools of a queue: those with waiting tasks or live workers, the default one first."""
    alive = [*alive]
    workers = [worker for worker in alive if not worker.draining]
    waiting = {pool.pool: pool for pool in snapshot.pools}
    served = {pool for worker in workers for pool in worker.pools}
    names = [*waiting, *sorted(served - {*waiting})]
    idle = _not_claimed_from(snapshot, claim_counts_ms(snapshot.running, alive))
    found = []
    for name in names:
        pool = waiting.get(name)
        takers = [worker for worker in workers if name in worker.pools]
        count = 0 if pool is None else pool.waiting
        found.append(
            PoolInfo(
                pool=name,
                waiting=count,
                oldest_wait=None if pool is None else pool.oldest_wait,
                workers=len(takers),
                slots=sum(worker.slots for worker in takers),
                running=sum(worker.running for worker in takers),
                last_claim=None if pool is None else pool.last_claim,
                is_unserved=pool in idle and not takers,
            )
        )
    return found


def _not_claimed_from(snapshot: QueueSnapshot, span_ms: int) -> list[PoolSnapshot]:
    """The pools with waiting tasks from which nobody claimed in a span before the snapshot."""
    span = timedelta(milliseconds=span_ms)
    return [
        pool
        for pool in snapshot.pools
        if pool.waiting and (pool.last_claim is None or snapshot.at - pool.last_claim > span)
    ]
