"""What a scheduler offers for schedules; the work is done in `fairqueue.schedules`."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Unpack

from fairqueue.models import DEFAULT_NAME, Page, Problem, ScheduledTask
from fairqueue.queue.queue import TaskQueue
from fairqueue.recurrence.frequency import Frequency
from fairqueue.schedules.backfill import Backfill
from fairqueue.schedules.bulk import BulkResult, Progress
from fairqueue.schedules.changes import ScheduleChange
from fairqueue.schedules.fields import ScheduleOptions
from fairqueue.schedules.import_export import Diff
from fairqueue.schedules.outcomes import FireTime
from fairqueue.schedules.replan import Replanned
from fairqueue.schedules.search import ScheduleFilter
from fairqueue.schedules.service import Schedules
from fairqueue.validation import Priority


class ScheduleMethods:
    """The part of a scheduler that adds, changes and looks at schedules."""

    queue: TaskQueue
    schedules: Schedules

    def add_schedule(
        self,
        cron_expr: str | Frequency | Mapping[str, object] | None = None,
        user_id: str | None = None,
        priority: int = Priority.NORMAL,
        payload: dict[str, Any] | None = None,
        timezone: str = "UTC",
        name: str = DEFAULT_NAME,
        schedule_id: str | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        on_conflict: str = "error",
        **options: Unpack[ScheduleOptions],
    ) -> str:
        """Store a schedule and return its id. A task is pushed at each of its fire times.

        Its rule is `cron_expr` (five fields, or six with seconds first; `H` is hashed by the id),
        or one of the options `every` and `at`. For all options see ScheduleOptions.
        Raises InvalidCron, UnknownTimezone, InvalidPayload or InvalidSchedule naming the value, and
        ScheduleConflict if `schedule_id` is in use, unless `on_conflict` is "replace". Nothing is
        stored then.
        """
        spec = {
            "cron_expr": cron_expr,
            "user_id": user_id,
            "priority": priority,
            "payload": payload,
            "timezone": timezone,
            "name": name,
            "schedule_id": schedule_id,
            "metadata": metadata,
            **options,
        }
        return self.schedules.add(spec, on_conflict)

    def add_schedules(
        self, schedules: Iterable[Mapping[str, Any]], *, on_conflict: str = "error"
    ) -> list[str]:
        """Store many schedules, given as dicts of add_schedule's arguments; all or none of them.

        One call is one script: 10,000 schedules of 16 MiB at most, which hold the server for some
        13 µs each. Returns their ids. Raises as add_schedule.
        """
        return self.schedules.add_many(schedules, on_conflict)

    def update_schedule(
        self,
        schedule_id: str,
        *,
        changed_by: str | None = None,
        if_revision: str | None = None,
        **changes: Any,
    ) -> bool:
        """Change the given fields, and no others; return False if there is no such schedule.

        Fields: those of add_schedule, `is_active`, and `next_run` (a time in the future). A new
        rule, zone or limit plans the schedule anew, from now. `changed_by` is kept in the history
        of its changes. Raises as add_schedule, InvalidSchedule for an unknown field, and
        StaleVersion if the schedule has another revision than `if_revision`.
        """
        return self.schedules.update(schedule_id, changes, by=changed_by, if_revision=if_revision)

    def remove_schedule(self, schedule_id: str, *, if_revision: str | None = None) -> bool:
        """Remove a schedule; return False if there is none. Tasks that it has fired stay.

        Raises StaleVersion if the schedule has another revision than `if_revision`.
        """
        return self.schedules.remove(schedule_id, if_revision=if_revision)

    def get_schedule(self, schedule_id: str) -> ScheduledTask | None:
        """Return a schedule, or None. Raises BrokenRecord if it cannot be read."""
        return self.schedules.get(schedule_id)

    def list_schedules(
        self,
        user_id: str | None = None,
        is_active: bool | None = None,
        limit: int = 100,
        cursor: str | None = None,
        *,
        name_prefix: str | None = None,
        contains: str | None = None,
        tenant: str | None = None,
    ) -> Page[ScheduledTask]:
        """Return a page of schedules, ordered by user and id; its `cursor` gets the next one.

        `name_prefix` is how the name of their tasks begins; `contains` is a part of that name, of
        the id or of the title, in upper or lower case. With one of these they are ordered by name
        and id, or, with `contains` and a user, by id; those of a `tenant` always by user and id. A
        page may be short although it has a cursor: one call looks at 10,000 at most. Records that
        cannot be read are left out; see `problems`. Raises InvalidSchedule for a bad value.
        """
        wanted = ScheduleFilter(
            user_id=user_id,
            is_active=is_active,
            name_prefix=name_prefix,
            contains=contains,
            tenant=tenant,
        )
        return self.schedules.page(wanted, limit, cursor)

    def pause_schedule(
        self,
        schedule_id: str,
        *,
        note: str | None = None,
        by: str | None = None,
        until: datetime | float | None = None,
    ) -> bool:
        """Stop firing until it is resumed, or until a time; return False if there is none.

        Fire times that pass meanwhile are noted as paused. Raises InvalidSchedule for a bad value.
        """
        return self.schedules.pause(schedule_id, note=note, by=by, until=until)

    def resume_schedule(
        self, schedule_id: str, *, note: str | None = None, by: str | None = None
    ) -> bool:
        """Resume a paused or disabled schedule, from now; return False if there is none."""
        return self.schedules.resume(schedule_id, note=note, by=by)

    def tenant_of(self, user_id: str) -> str | None:
        """Return the tenant that a user belongs to, or None; see TaskQueue.tenant_of."""
        return self.queue.tenant_of(user_id)

    def problems(self) -> list[Problem]:
        """Return the schedules that cannot run, and why: unreadable records, broken rules."""
        return self.schedules.problems()

    def trigger(
        self,
        schedule_id: str,
        *,
        triggered_by: str | None = None,
        payload: dict[str, Any] | None = None,
    ) -> str:
        """Push one task now, whatever the plan and the overlap policy, and return its id.

        The plan is left as it is. `triggered_by` is kept in the history; `payload` is for this run
        only. Raises UnknownSchedule, BrokenRecord, and as TaskQueue.push.
        """
        return self.schedules.trigger(schedule_id, by=triggered_by, payload=payload)

    def moments(
        self,
        schedule_id: str,
        start: datetime | float,
        end: datetime | float,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[FireTime]:
        """Return each fire time from `start` until before `end`, and what became of it.

        At most 1,000 on a page; its `cursor` gets the next one. See FireTime. Raises
        UnknownSchedule, and InvalidSchedule for a bad value.
        """
        return self.schedules.moments(schedule_id, start, end, limit, cursor)

    def backfill(
        self,
        schedule_id: str,
        start: datetime | float,
        end: datetime | float,
        *,
        dry_run: bool = False,
        limit: int = 1000,
        priority: int = Priority.VERY_LOW,
        by: str | None = None,
        unknown_too: bool = False,
    ) -> Backfill:
        """Push a task for each past fire time in a range that has none; `dry_run` counts them.

        Those are the skipped ones, and those before the schedule was made. Whether a fire time that
        is "unknown" (see FireTime) was fired is not known: it is left alone, unless `unknown_too`.
        The same call twice makes the same tasks once, even if those of the first call are gone.
        `by` is kept with each task.
        Raises UnknownSchedule; InvalidSchedule for a bad value, for more than `limit` fire times
        (at most 10,000), and for a schedule with overlap "cancel_previous"; QueueFull when no more
        fit, and ScheduleConflict when others keep changing it: then the call may be repeated.
        """
        return self.schedules.backfill(
            schedule_id,
            start,
            end,
            dry_run=dry_run,
            limit=limit,
            priority=priority,
            by=by,
            unknown_too=unknown_too,
        )

    def changes(
        self, schedule_id: str, limit: int = 20, cursor: str | None = None
    ) -> Page[ScheduleChange]:
        """Return who changed what of a schedule, newest first; the last fifty are kept.

        Raises UnknownSchedule, and InvalidSchedule for a bad value.
        """
        return self.schedules.changes(schedule_id, limit, cursor)

    def bulk(
        self,
        action: str,
        *,
        user_id: str | None = None,
        name: str | None = None,
        name_prefix: str | None = None,
        contains: str | None = None,
        is_active: bool | None = None,
        tenant: str | None = None,
        ids: Sequence[str] | None = None,
        dry_run: bool = True,
        by: str | None = None,
        note: str | None = None,
        progress: Progress | None = None,
        **changes: Any,
    ) -> BulkResult:
        """Pause, resume, remove, update or trigger all schedules that match; by default only count.

        They are those of a user or a tenant, with tasks of a name, active or not (see
        list_schedules); without any of these, all. With `ids`, only those of them that also match:
        one that is gone or cannot be read does not. `changes` are for update; `by` and `note` as in
        pause_schedule. One that fails does not stop the others: the result has counts and errors.
        `progress` is called with the numbers of those done and of all; an exception of it ends the
        operation. Raises InvalidSchedule for bad input, before anything is done.
        """
        return self.schedules.bulk(
            action,
            ids=ids,
            dry_run=dry_run,
            by=by,
            note=note,
            progress=progress,
            changes=changes,
            user_id=user_id,
            name=name,
            name_prefix=name_prefix,
            contains=contains,
            is_active=is_active,
            tenant=tenant,
        )

    def copy_schedule(self, schedule_id: str, new_id: str | None = None, **changes: Any) -> str:
        """Store a schedule like another, with some fields changed, and return its id. It is active.

        Raises UnknownSchedule, BrokenRecord, and as add_schedule.
        """
        return self.schedules.copy(schedule_id, new_id, changes)

    def export_schedules(
        self,
        user_id: str | None = None,
        name: str | None = None,
        is_active: bool | None = None,
        *,
        tenant: str | None = None,
    ) -> list[dict[str, Any]]:
        """Return schedules as documents for `import_schedules`; see schedules/import_export.py."""
        wanted = ScheduleFilter(user_id=user_id, name=name, is_active=is_active, tenant=tenant)
        return self.schedules.export(wanted)

    def import_schedules(
        self,
        documents: Iterable[Mapping[str, Any]],
        *,
        prune: bool = False,
        user_id: str | None = None,
        tenant: str | None = None,
        dry_run: bool = True,
        by: str | None = None,
    ) -> Diff:
        """Make the stored schedules as the documents say; by default only return the difference.

        Each document has a `schedule_id` and otherwise what add_schedule takes. A field that it
        does not name gets its default, but `is_active` stays. `prune` removes the schedules that no
        document names: all of them, or those of `user_id` and of `tenant`. The same import again
        changes nothing.
        Raises InvalidSchedule, which names each bad document by its index and its field, before
        anything is stored.
        """
        wanted = ScheduleFilter(user_id=user_id, tenant=tenant) if prune else None
        return self.schedules.import_(documents, prune=wanted, dry_run=dry_run, by=by)

    def replan(self) -> Replanned:
        """Compute the next runs of all active schedules again, after an update of zone data.

        A new leader does so by itself when the queue was last planned by other zone data. Only
        future fire times move, and none that a user has set.
        """
        return self.schedules.replan()
