"""What all parts of the inspector stand on: the stores of one queue, and the rules of one actor."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from prometheus_client import CollectorRegistry

from fairqueue.access import AccessStore, Actor
from fairqueue.audit import AuditLog
from fairqueue.clock import from_ms
from fairqueue.connection import Link
from fairqueue.errors import Forbidden, InvalidInput, UnknownUser, shown, told
from fairqueue.glance import Glance
from fairqueue.history import History
from fairqueue.inspection.guard import Guard
from fairqueue.inspection.views import LogEntry
from fairqueue.people import PeopleStore
from fairqueue.queue import TaskQueue
from fairqueue.samples import SampleStore
from fairqueue.scheduler import TaskScheduler
from fairqueue.schedules import ScheduleStore
from fairqueue.validation import check_name
from fairqueue.workers import WorkerStore

LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class Stores:
    """The stores of one queue. Making them opens nothing."""

    def __init__(self, queue: TaskQueue) -> None:
        self.queue = queue
        self.link: Link = queue.link
        self.schedules = ScheduleStore(queue.link)
        self.history = History(queue)
        self.glance = Glance(queue.link)
        self.people = PeopleStore(queue.link)
        self.samples = SampleStore(queue.link)
        self.workers = WorkerStore(queue.link)
        self.access = AccessStore(queue.link)
        self.audit = AuditLog(queue.link)

    @cached_property
    def scheduler(self) -> TaskScheduler:
        """For what a scheduler offers its users: it is never started, and counts nothing."""
        return TaskScheduler(self.queue, scheduler_id="inspector", registry=CollectorRegistry())


class Ground:
    """Stores and rules together."""

    def __init__(self, stores: Stores, actor: Actor) -> None:
        self.stores = stores
        self.guard = Guard(actor, stores.audit)
        self.queue, self.link = stores.queue, stores.link
        self.store, self.history, self.glance = stores.schedules, stores.history, stores.glance
        self.people, self.samples, self.workers = stores.people, stores.samples, stores.workers

    @property
    def scheduler(self) -> TaskScheduler:
        """The schedules' API. Raises RedisUnavailable when it is made."""
        return self.stores.scheduler

    def now(self) -> datetime:
        """The time of the queue."""
        return from_ms(self.link.now_ms())

    def with_tenant(
        self, fields: Mapping[str, Any], *, known_user: str | None = None, is_new: bool = True
    ) -> dict[str, Any]:
        """What an actor gives for a task or a schedule, in its own tenant if it has one.

        Raises Forbidden for another tenant, and UnknownUser for a user of another one.
        """
        if not isinstance(fields, Mapping):
            raise InvalidInput(f"{told(fields)} is no object with the fields of a schedule")
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
        user_id = given.get("user_id")
        if user_id is not None and user_id != known_user:
            self.check_user(user_id, may_be_new=True)
        return given

    def check_user(self, user_id: Any, *, may_be_new: bool = False) -> None:
        """Raises UnknownUser if the actor may not see this user.

        An actor of one tenant may name a user whom nobody knows yet, and who thereby belongs to
        that tenant; not one whom others use without a tenant.
        """
        own = self.guard.actor.tenant
        check_name(user_id, "user_id")
        if own is None:
            return
        tenant = self.queue.tenant_of(user_id)
        if tenant == own or (may_be_new and tenant is None and not self.is_known(user_id)):
            return
        raise UnknownUser(f"there is no user {user_id!r}")

    def is_known(self, user_id: str) -> bool:
        """Whether anything is stored of a user."""
        return self.people.knows(user_id)

    def log_entries(self, task_ids: Sequence[str], limit: int) -> list[LogEntry]:
        """The lines of runs, newest first."""
        found: list[LogEntry] = []
        for task_id in task_ids:
            details = self.history.get(task_id)
            for attempt in () if details is None else details.attempts:
                found += [
                    LogEntry(
                        task_id=task_id,
                        attempt=attempt.number,
                        at=from_ms(line.at_ms),
                        level=line.level,
                        message=line.message,
                    )
                    for line in attempt.log
                ]
        found.sort(key=lambda entry: entry.at, reverse=True)
        return found[:limit]
