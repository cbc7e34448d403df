"""Read a queue: its size, one task, why a task waits, a snapshot."""

from fairqueue.flow_options import DEFAULT_POOL, check_pool
from fairqueue.link.operation import Ask, Call, Operation, operation, steps
from fairqueue.link.owners import Owner
from fairqueue.link.partitions import at_found, at_owner, over_all
from fairqueue.models import DEFAULT_NAME, UNREADABLE, Explanation, QueueSnapshot, TaskInfo
from fairqueue.queue.ahead import with_others
from fairqueue.queue.base import check_timeout
from fairqueue.queue.estimate import Quote, free_slots, quote
from fairqueue.queue.explanation import Waiting, named
from fairqueue.queue.permits import with_slots_of_others
from fairqueue.queue.records import broken_status, read_status, task_info
from fairqueue.queue.settings import SettingsOperations
from fairqueue.queue.snapshot import merge_snapshots, snapshot
from fairqueue.queue.workers import WorkerStore
from fairqueue.validation import check_name, check_tenant

JAIN_SAMPLE = 1000  # backlogged users whose service is compared


class ReadOperations(SettingsOperations):
    """The part of a queue that only reads."""

    @operation
    @over_all(lambda sizes: sum(sizes))
    def size(self, user_id: str | None = None, *, tenant: str | None = None) -> Operation[int]:
        """How many tasks wait for a worker, also of paused or capped users; not delayed ones.

        Of the queue, of a user id (of all tenants and of none), of a tenant, or of a tenant's user.
        """
        keys = self.keys["backlog"], self.keys["held"]
        if tenant is not None:
            check_tenant(tenant)
        if user_id is None and tenant is None:
            return sum((yield Ask(*(("ZCARD", key) for key in keys))))
        if user_id is None:
            owners = [Owner.whole(tenant or "")]
        else:
            check_name(user_id, "user_id")
            tenants: list[str | None] = [tenant]
            if tenant is None:
                tenants += yield from steps(self.tenants_of)(user_id)
            owners = [Owner(user_id, each) for each in tenants]
        ranges = [owner.range for owner in owners]
        return sum((yield Ask(*(("ZLEXCOUNT", key, *each) for key in keys for each in ranges))))

    @operation
    @at_found("status", "task_id")
    def get(self, task_id: str, *, tenant: str | None = None) -> Operation[TaskInfo | None]:
        """What is known of a task, or None. Raises BrokenRecord if its record is unreadable.

        tenant: whose task, for an id that several tenants use in a queue with partitions; without
        it, AmbiguousTask is raised then.
        """
        check_name(task_id, "task_id")
        status, document, lease_end = yield Ask(
            ("HGET", self.keys["status"], task_id),
            ("HGET", self.keys["tasks"], task_id),
            ("ZSCORE", self.keys["leases"], task_id),
        )
        return None if status is None else task_info(task_id, status, document, lease_end)

    @operation
    @at_found("status", "task_id")
    def explain(self, task_id: str, *, tenant: str | None = None) -> Operation[Explanation | None]:
        """Why a task waits: the reasons, the binding one first; None if the task is not known.

        Times in its sentences are in this process's zone. A worker that does not send heartbeats
        (one that calls `claim` itself) counts as alive while it holds a lease. For `tenant` see
        `get`. Raises BrokenRecord.
        """
        check_name(task_id, "task_id")
        answer = yield from self._call(Call("explain", id=task_id))
        if not answer:
            return None
        workers = yield from steps(WorkerStore(self.link).alive)()
        try:
            found = named(answer)
            pool = read_status(task_id, found["status"]).get("pool")
            found = yield from with_others(self.link, found, pool)
            found = yield from with_slots_of_others(self.link, found)
            return Waiting(task_id, found, workers).explanation()
        except UNREADABLE as error:
            raise broken_status(task_id, error) from None

    @operation
    @at_owner
    def quote(
        self,
        user_id: str,
        *,
        tenant: str | None = None,
        name: str = DEFAULT_NAME,
        pool: str = DEFAULT_POOL,
    ) -> Operation[Quote]:
        """When a task would start if the user pushed it now; see Quote.

        It would come after the tasks that wait already. A claim in the last minutes counts as a
        living worker. Raises InvalidTask naming the value.
        """
        check_name(user_id, "user_id")
        check_name(name, "name")
        if tenant is not None:
            check_tenant(tenant)
        other = "" if check_pool(pool) == DEFAULT_POOL else pool
        answer = yield from self._call(
            Call("quote", owner=Owner(user_id, tenant).key, pool=other, name=name)
        )
        found = yield from with_others(self.link, named(answer), other)
        workers = yield from steps(WorkerStore(self.link).alive)()
        return quote(found, free_slots(workers, pool, name))

    @operation
    @over_all(merge_snapshots)
    def inspect(self, timeout: float | None = None) -> Operation[QueueSnapshot]:
        """Counts and counters of the queue at this moment, in one bounded read."""
        check_timeout(timeout)
        answer = yield Call("queue_stats", sample=JAIN_SAMPLE, timeout=timeout)
        return snapshot(answer, self.keys.partition)
