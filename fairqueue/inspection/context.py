"""What the parts of the inspector share: the stores of a queue, and one actor's permissions."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fairqueue.access.audit import AuditLog
from fairqueue.access.credentials import AccessStore, Actor
from fairqueue.clock import from_ms
from fairqueue.errors import Forbidden, InvalidInput, UnknownUser, safe_repr, shown
from fairqueue.history.records import Run
from fairqueue.history.runs import History
from fairqueue.http_tasks.checks import Outgoing
from fairqueue.inspection.guard import Guard
from fairqueue.inspection.masking import mask
from fairqueue.inspection.views import LogEntry
from fairqueue.link.connection import Link
from fairqueue.link.operation import steps
from fairqueue.link.owners import Owner
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.schedules.fields import MAX_ID_LENGTH, check_id
from fairqueue.schedules.service import Schedules
from fairqueue.stats.overview import OverviewStore
from fairqueue.stats.partitions import PartitionStore
from fairqueue.stats.samples import SampleStore
from fairqueue.stats.users import UserStats
from fairqueue.validation import MAX_NAME_LENGTH, check_name, with_tenant_prefix

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class Stores:
    """The stores of one queue. Creating them opens no connection."""

    def __init__(self, queue: TaskQueue) -> None:
        self.queue = queue
        self.link: Link = queue.link
        self.outgoing = Outgoing(queue.link)
        self.schedules = Schedules(queue, steps(self.outgoing.check))
        self.history = History(queue)
        self.glance = OverviewStore(queue.link)
        self.partitions = PartitionStore(queue.link)
        self.people = UserStats(queue.link)
        self.samples = SampleStore(queue.link)
        self.workers = WorkerStore(queue.link)
        self.access = AccessStore(queue.link)
        self.audit = AuditLog(queue.link)


class InspectionContext:
    """The stores of a queue and the permissions of an actor."""

    def __init__(self, stores: Stores, actor: Actor) -> None:
        self.stores = stores
        self.guard = Guard(actor, stores.audit)
        self.queue, self.link = stores.queue, stores.link
        self.schedules, self.store = stores.schedules, stores.schedules.store
        self.history, self.glance = stores.history, stores.glance
        self.people, self.samples, self.workers = stores.people, stores.samples, stores.workers

    def now(self) -> datetime:
        """The current time of the queue."""
        return from_ms(self.link.now_ms())

    def with_tenant(self, fields: Mapping[str, Any], *, is_new: bool = True) -> dict[str, Any]:
        """The fields of a task or schedule, with the actor's own tenant if it has one.

        Raises Forbidden for another tenant.
        """
        if not isinstance(fields, Mapping):
            raise InvalidInput(f"expected the fields of a schedule, not {safe_repr(fields)}")
        own = self.guard.actor.tenant
        given = dict(fields)
        if own is None:
            return given
        if given.get("tenant", own) != own:
            raise Forbidden(
                f"{self.guard.actor.name!r} belongs to tenant {own!r} and cannot use tenant "
                f"{shown(given['tenant'])}"
            )
        if is_new or "tenant" in given or "schedule_id" in given:
            given["tenant"] = own
        return given

    def schedule_id_of(self, given: str) -> str:
        """The full id of a schedule: as given, or with the prefix of the actor's tenant."""
        return self._meant(given, lambda each: self._sees_schedule(check_id(each)))

    def task_id_of(self, given: str) -> str:
        """The full id of a task: as given, or with the prefix of the actor's tenant."""
        return self._meant(given, lambda each: self._sees_task(check_name(each, "task_id")))

    def meant_schedules(self, ids: Sequence[str] | None) -> Sequence[str] | None:
        """The ids as given and with the prefix of the actor's tenant; the caller filters them."""
        tenant = self.guard.actor.tenant
        if tenant is None or not isinstance(ids, list | tuple):
            return ids
        own = [with_tenant_prefix(tenant, each) for each in ids if isinstance(each, str)]
        return [*ids, *(each for each in own if len(each) <= MAX_ID_LENGTH)]

    def new_schedule_id(self, given: Any) -> Any:
        """The id of a schedule to add or replace.

        For an actor of one tenant, the id gets the prefix of the tenant unless it names a schedule
        that the actor can see. So the answer does not depend on the schedules of other tenants.
        """
        return self._new(given, self._sees_schedule, check_id)

    def new_task_id(self, given: Any) -> Any:
        """The id of a task to push; see `new_schedule_id`."""
        return self._new(given, self._sees_task, lambda each: check_name(each, "task_id"))

    def _meant(self, given: str, sees: Callable[[str], bool]) -> str:
        tenant = self.guard.actor.tenant
        if tenant is None or not isinstance(given, str) or sees(given):
            return given
        own = with_tenant_prefix(tenant, given)
        return own if len(own) <= MAX_NAME_LENGTH and sees(own) else given

    def _new(self, given: Any, sees: Callable[[str], bool], check: Callable[[str], str]) -> Any:
        tenant = self.guard.actor.tenant
        if tenant is None or not isinstance(given, str):
            return given
        return given if sees(check(given)) else with_tenant_prefix(tenant, given)

    def _sees_schedule(self, schedule_id: str) -> bool:
        schedule = self.store.read([schedule_id])[0]
        return schedule is not None and self.guard.actor.sees(schedule.tenant)

    def _sees_task(self, task_id: str) -> bool:
        details = self.history.get(task_id, tenant=self.guard.actor.tenant)
        return details is not None and self.guard.actor.sees(details.run.tenant)

    def owner(self, user_id: Any, tenant: str | None = None) -> Owner:
        """The user that is meant: of the tenant, or of the actor's own tenant.

        Raises Forbidden for another tenant, and UnknownUser if an actor of one tenant names a user
        that its tenant does not have.
        """
        check_name(user_id, "user_id", InvalidInput)
        owner = Owner(user_id, self.guard.scope(tenant))
        if self.guard.actor.tenant is not None and not self.people.knows(owner):
            raise UnknownUser(f"there is no user {user_id!r}")
        return owner

    def log_entries(self, runs: Sequence[Run], limit: int) -> list[LogEntry]:
        """The log lines of runs, newest first."""
        found: list[LogEntry] = []
        for run in runs:
            details = self.history.get(run.task_id, tenant=run.tenant)
            for attempt in () if details is None else details.attempts:
                found += [
                    LogEntry(
                        task_id=run.task_id,
                        attempt=attempt.number,
                        at=from_ms(line.at_ms),
                        level=line.level,
                        message=line.message,
                        context=mask(dict(line.context)),
                    )
                    for line in attempt.log
                ]
        found.sort(key=lambda entry: entry.at, reverse=True)
        return found[:limit]


class InspectorPart:
    """Base class of the parts of the inspector."""

    def __init__(self, context: InspectionContext) -> None:
        self._context = context
        self._guard = context.guard
