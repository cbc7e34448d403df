"""Everything that can be done with the schedules of a queue, except firing them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Unpack

from fairqueue.errors import InvalidSchedule, UnknownSchedule, shown
from fairqueue.link.operation import Ask, Now, Operation, operation, steps
from fairqueue.link.partitions import Partitioned, everywhere, whole
from fairqueue.logs import event_logger, whose
from fairqueue.models import (
    DEFAULT_NAME,
    Page,
    Problem,
    ScheduledTask,
    Task,
    encode_payload,
    new_id,
    task_document,
)
from fairqueue.queue.queue import QueueOperations
from fairqueue.recurrence.frequency import Frequency
from fairqueue.retry_policy import encode_policy
from fairqueue.schedules.backfill import Backfill, BackfillRequest, backfill
from fairqueue.schedules.bulk import BulkResult, Progress, check_action, run_bulk
from fairqueue.schedules.changes import (
    CHANGES_LISTED,
    ScheduleChange,
    change_bounds,
    check_change,
    read_changes,
)
from fairqueue.schedules.definition import policy_of
from fairqueue.schedules.fields import FIELDS, KINDS, ScheduleOptions, flow_of
from fairqueue.schedules.import_export import Diff, export, import_documents
from fairqueue.schedules.outcomes import FireTime, list_moments
from fairqueue.schedules.places import at_schedule
from fairqueue.schedules.replan import Replanned, Replanner
from fairqueue.schedules.search import (
    MoreFilters,
    ScheduleFilter,
    find_ids,
    search,
    select_ids,
)
from fairqueue.schedules.store import CheckTask, ScheduleStore
from fairqueue.validation import Priority, check_count, check_name, check_payload

_log = event_logger("fairqueue.scheduler")


class Schedules(Partitioned):
    """The schedules of one queue: all that TaskScheduler offers, except firing them."""

    def __init__(self, queue: QueueOperations, check_task: CheckTask | None = None) -> None:
        """`check_task` gets the name and the payload of future tasks, and may raise."""
        self.queue = queue
        self.link = queue.link
        self.store = ScheduleStore(queue.link, check_task, queue)

    def _twin(self, part: Any) -> Any:
        twin = Schedules(self.queue.at(part))
        twin.store = self.store.at(part)
        return twin

    @operation
    @whole
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
    ) -> Operation[str]:
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
        (schedule_id,) = yield from steps(self.store.add)([spec], on_conflict)
        _log("schedule_added", schedule=schedule_id, **whose(user_id, options.get("tenant")))
        return schedule_id

    @operation
    @whole
    def add_schedules(
        self, schedules: Iterable[Mapping[str, Any]], *, on_conflict: str = "error"
    ) -> Operation[list[str]]:
        """Store many schedules, given as dicts of add_schedule's arguments; all or none of them.

        One call is one script: 10,000 schedules of 16 MiB at most; each blocks the server for
        about 13 µs. In a queue with partitions it is one script in each of them: if one refuses its
        part, or does not answer, those that were added to others are removed again, and those that
        were replaced stay so; if this process dies meanwhile, a part may be stored. Returns their
        ids. Raises as add_schedule.
        """
        ids = yield from steps(self.store.add)(schedules, on_conflict)
        _log("schedules_added", count=len(ids))
        return ids

    @operation
    @whole
    def update_schedule(
        self,
        /,
        schedule_id: str,
        *,
        changed_by: str | None = None,
        if_revision: str | None = None,
        **changes: Any,
    ) -> Operation[bool]:
        """Change the given fields, and no others; return False if there is no such schedule.

        Fields: those of add_schedule, `is_active`, and `next_run` (a time in the future). A new
        rule, zone or limit computes the next run again. `changed_by` is kept in the history of
        its changes. Raises as add_schedule, InvalidSchedule for an unknown field, and
        StaleVersion if the schedule has another revision than `if_revision`.
        """
        change = check_change(changed_by)
        found = yield from steps(self.store.update)(schedule_id, changes, change, if_revision)
        _log("schedule_updated", schedule=schedule_id, fields=sorted(changes), found=found)
        return found

    @operation
    @whole
    def remove_schedule(
        self, schedule_id: str, *, if_revision: str | None = None
    ) -> Operation[bool]:
        """Remove a schedule; return False if there is none. Tasks that it has fired stay.

        Raises StaleVersion if the schedule has another revision than `if_revision`.
        """
        found = yield from steps(self.store.remove)(schedule_id, if_revision)
        _log("schedule_removed", schedule=schedule_id, found=found)
        return found

    @operation
    @whole
    def get_schedule(self, schedule_id: str) -> Operation[ScheduledTask | None]:
        """Return a schedule, or None. Raises BrokenRecord if it cannot be read."""
        return (yield from steps(self.store.get)(schedule_id))

    @operation
    @whole
    def list_schedules(
        self,
        user_id: str | None = None,
        is_active: bool | None = None,
        limit: int = 100,
        cursor: str | None = None,
        **filters: Unpack[MoreFilters],
    ) -> Operation[Page[ScheduledTask]]:
        """Return a page of schedules, ordered by user and id; its `cursor` gets the next one.

        More filters are `name` of their tasks, `name_prefix`, `contains` (a part of the name, of
        the id or of the title, in upper or lower case) and `tenant`. With a name they are ordered
        by name and id; with `contains` too, or, with a user, by id; those of a `tenant` always by
        user and id. A page may be short although it has a cursor: one call looks at 10,000 at most.
        Records that cannot be read are left out; see `problems`. Raises InvalidSchedule for a bad
        value.
        """
        wanted = ScheduleFilter(user_id=user_id, is_active=is_active, **filters)
        return (yield from search(self.store, wanted, limit, cursor))

    @operation
    @whole
    def pause_schedule(
        self,
        schedule_id: str,
        *,
        note: str | None = None,
        by: str | None = None,
        until: datetime | float | None = None,
    ) -> Operation[bool]:
        """Stop firing until it is resumed, or until a time; return False if there is none.

        Fire times that pass meanwhile are noted as paused. Raises InvalidSchedule for a bad value.
        """
        change = check_change(by, note, until, (yield Now()))
        found = yield from steps(self.store.update)(schedule_id, {"is_active": False}, change)
        _log("schedule_paused", schedule=schedule_id, found=found)
        return found

    @operation
    @whole
    def resume_schedule(
        self, schedule_id: str, *, note: str | None = None, by: str | None = None
    ) -> Operation[bool]:
        """Resume a paused or disabled schedule, from now; return False if there is none."""
        change = check_change(by, note)
        found = yield from steps(self.store.update)(schedule_id, {"is_active": True}, change)
        _log("schedule_resumed", schedule=schedule_id, found=found)
        return found

    @operation
    @whole
    def tenants_of(self, user_id: str) -> Operation[list[str]]:
        """Return the tenants that have a user of this id; see TaskQueue.tenants_of."""
        return (yield from steps(self.queue.tenants_of)(user_id))

    @operation
    @whole
    def problems(self) -> Operation[list[Problem]]:
        """Return the schedules that cannot run, and why: unreadable records, broken rules."""
        return (yield from steps(self.store.problems)())

    @operation
    @whole
    def trigger(
        self,
        schedule_id: str,
        *,
        triggered_by: str | None = None,
        payload: dict[str, Any] | None = None,
    ) -> Operation[str]:
        """Push one task now, whatever the plan and the overlap policy, and return its id.

        If another task has the schedule's unique key, the id of that task is returned, or with
        on_duplicate "error" DuplicateTask is raised. The plan is left as it is. `triggered_by` is
        kept in the history; `payload` is for this run only. Raises UnknownSchedule, BrokenRecord,
        and as TaskQueue.push.
        """
        if triggered_by is not None:
            check_name(triggered_by, "triggered_by")
        schedule = yield from steps(self.store.get)(schedule_id)
        if schedule is None:
            raise UnknownSchedule(f"there is no schedule {schedule_id!r} to trigger")
        if payload is not None:
            yield from self.store.check_task(schedule.name, check_payload(payload))
        payload = schedule.payload if payload is None else payload
        options = asdict(schedule)
        policy, flow = policy_of(options), flow_of(options)
        task = Task(
            task_id=new_id(),
            user_id=schedule.user_id,
            priority=schedule.priority,
            payload=payload,
            name=schedule.name,
            schedule_id=schedule_id,
            run_type="manual",
            triggered_by=triggered_by,
            policy=policy,
            tenant=schedule.tenant,
            flow=flow,
            document=task_document(
                schedule.user_id,
                schedule.name,
                schedule.priority,
                encode_payload(payload),
                schedule_id,
                origin={"by": triggered_by, "tenant": schedule.tenant},
                policy=encode_policy(policy),
                flow=flow,
            ),
        )
        task_id = yield from steps(self.queue.push)(task)
        own = whose(schedule.user_id, schedule.tenant)
        _log("schedule_triggered", schedule=schedule_id, task=task_id, **own)
        return task_id

    @operation
    @at_schedule
    def moments(
        self,
        schedule_id: str,
        start: datetime | float,
        end: datetime | float,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Operation[Page[FireTime]]:
        """Return each fire time from `start` until before `end`, and its outcome.

        At most 1,000 on a page; its `cursor` gets the next one. See FireTime. Raises
        UnknownSchedule, and InvalidSchedule for a bad value.
        """
        return (yield from list_moments(self.store, schedule_id, start, end, limit, cursor))

    @operation
    @at_schedule
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
    ) -> Operation[Backfill]:
        """Push a task for each past fire time in a range that has none; `dry_run` counts them.

        Those are the skipped ones, and those before the schedule was made. Whether a fire time that
        is "unknown" (see FireTime) was fired is not known: it is left alone, unless `unknown_too`.
        The same call twice makes the same tasks once, even if those of the first call are gone.
        `by` is kept with each task.
        Raises UnknownSchedule; InvalidSchedule for a bad value, for more than `limit` fire times
        (at most 10,000), and for a schedule with overlap "cancel_previous"; QueueFull when no more
        fit, and ScheduleConflict when others keep changing it: then the call may be repeated.
        """
        request = BackfillRequest(
            schedule_id=schedule_id,
            start=start,
            end=end,
            limit=limit,
            priority=priority,
            by=by,
            unknown_too=unknown_too,
        )
        report = yield from backfill(self.store, request, dry_run)
        if not dry_run:
            _log("schedule_backfilled", schedule=schedule_id, filled=report.filled, by=by)
        return report

    @operation
    @at_schedule
    def changes(
        self, schedule_id: str, limit: int = 20, cursor: str | None = None
    ) -> Operation[Page[ScheduleChange]]:
        """Return who changed what of a schedule, newest first; the last fifty are kept.

        Raises UnknownSchedule, and InvalidSchedule for a bad value.
        """
        check_count(limit, "limit", InvalidSchedule, least=1, most=CHANGES_LISTED)
        if (yield from steps(self.store.get)(schedule_id)) is None:
            raise UnknownSchedule(f"there is no schedule {schedule_id!r}")
        bounds, key = change_bounds(schedule_id, cursor), self.link.keys["changes"]
        (members,) = yield Ask(("ZREVRANGEBYLEX", key, *bounds, "LIMIT", 0, limit + 1))
        return read_changes(members, limit)

    @operation
    @whole
    def bulk(
        self,
        /,
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
    ) -> Operation[BulkResult]:
        """Pause, resume, remove, update or trigger all schedules that match; by default only count.

        They are those of a user or a tenant, with tasks of a name, active or not (see
        list_schedules); without any of these, all. With `ids`, only those of them that also match:
        one that is gone or cannot be read does not. `changes` are for update; `by` and `note` as in
        pause_schedule. One that fails does not stop the others: the result has counts and errors.
        `progress` is called with the numbers of those done and of all; an exception of it ends the
        operation. Raises InvalidSchedule for bad input, before anything is done.
        """
        check_action(action, changes)
        change = check_change(by, note)
        wanted = ScheduleFilter(
            user_id=user_id,
            name=name,
            name_prefix=name_prefix,
            contains=contains,
            is_active=is_active,
            tenant=tenant,
        )
        if ids is None:
            matching = yield from find_ids(self.store, wanted)
        else:
            matching = yield from select_ids(self.store, wanted, ids)
        result = BulkResult(action=action, dry_run=dry_run, matched=len(matching))
        if dry_run:
            return result
        update = steps(self.store.update)
        acts: dict[str, Callable[[str], Operation[object]]] = {
            "pause": lambda each: update(each, {"is_active": False}, change),
            "resume": lambda each: update(each, {"is_active": True}, change),
            "remove": lambda each: steps(self.store.remove)(each),
            "update": lambda each: update(each, changes, change),
            "trigger": lambda each: steps(self.trigger)(each, triggered_by=by),
        }
        yield from run_bulk(result, matching, acts[action], progress)
        _log("schedules_changed", action=action, done=result.done, failed=result.failed, by=by)
        return result

    @operation
    @whole
    def copy_schedule(
        self, /, schedule_id: str, new_id: str | None = None, **changes: Any
    ) -> Operation[str]:
        """Store a schedule like another, with some fields changed, and return its id. It is active.

        Raises UnknownSchedule, BrokenRecord, and as add_schedule.
        """
        stored = yield from steps(self.store.find)(schedule_id)
        for name in ("schedule_id", "is_active", "next_run"):
            if name in changes:
                raise InvalidSchedule(f"{name} {shown(changes[name])} cannot be given to a copy")
        spec = {name: FIELDS[name].to_user(each) for name, each in stored.definition.fields.items()}
        if any(changes.get(kind) is not None for kind in KINDS):
            # A rule of another kind replaces the old one, and an interval starts over.
            spec |= dict.fromkeys((*KINDS, "anchor"))
        spec |= {**changes, "schedule_id": new_id or None}
        (copied,) = yield from steps(self.store.add)([spec], "error")
        _log("schedule_copied", schedule=copied, original=schedule_id)
        return copied

    @operation
    @whole
    def export_schedules(
        self,
        user_id: str | None = None,
        name: str | None = None,
        is_active: bool | None = None,
        *,
        name_prefix: str | None = None,
        contains: str | None = None,
        tenant: str | None = None,
    ) -> Operation[list[dict[str, Any]]]:
        """Return schedules as documents for `import_schedules`; see schedules/import_export.py."""
        wanted = ScheduleFilter(
            user_id=user_id,
            name=name,
            name_prefix=name_prefix,
            contains=contains,
            is_active=is_active,
            tenant=tenant,
        )
        return (yield from export(self.store, wanted))

    @operation
    @whole
    def import_schedules(
        self,
        documents: Iterable[Mapping[str, Any]],
        *,
        prune: bool = False,
        user_id: str | None = None,
        tenant: str | None = None,
        dry_run: bool = True,
        by: str | None = None,
    ) -> Operation[Diff]:
        """Make the stored schedules as the documents say; by default only return the difference.

        Each document has a `schedule_id` and otherwise what add_schedule takes. A field that it
        does not name gets its default, but `is_active` stays. `prune` removes the schedules that no
        document names: all of them, or those of `user_id` and of `tenant`. The same import again
        changes nothing.
        Raises InvalidSchedule, which names each bad document by its index and its field, before
        anything is stored.
        """
        wanted = ScheduleFilter(user_id=user_id, tenant=tenant) if prune else None
        change = check_change(by)
        diff = yield from import_documents(
            self.store, documents, prune=wanted, dry_run=dry_run, change=change
        )
        if not dry_run:
            counts = {"added": len(diff.added), "removed": len(diff.removed)}
            _log("schedules_imported", **counts, updated=len(diff.changed), by=by)
        return diff

    @operation
    @whole
    def replan(self) -> Operation[Replanned]:
        """Compute the next runs of all active schedules again, after an update of zone data.

        A new leader does so by itself when the queue was last planned by other zone data. Only
        future fire times move, and none that a user has set.
        """
        if self.link.parts:
            reports = yield from everywhere(self, lambda twin: twin.replanned(), strict=True)
            report = Replanned(
                looked_at=sum(each.looked_at for each in reports),
                changed=sum(each.changed for each in reports),
                failed=sum(each.failed for each in reports),
            )
        else:
            report = yield from self.replanned()
        _log("schedules_replanned", **asdict(report))
        return report

    def replanned(self) -> Operation[Replanned]:
        """Compute the next runs of one partition again; see `replan`."""
        replanner = Replanner(self.store)
        while (yield from steps(replanner.step)()):
            pass
        return replanner.report
