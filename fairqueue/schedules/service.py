"""Everything that can be done with the schedules of a queue, except firing them."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any, Unpack

from fairqueue.errors import InvalidSchedule, UnknownSchedule, shown
from fairqueue.link.operation import Ask, Now, Operation, operation, steps
from fairqueue.logs import log_event
from fairqueue.models import (
    Page,
    Problem,
    ScheduledTask,
    Task,
    encode_payload,
    new_id,
    task_document,
)
from fairqueue.queue.queue import TaskQueue
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
from fairqueue.schedules.fields import FIELDS, KINDS
from fairqueue.schedules.import_export import Diff, export, import_documents
from fairqueue.schedules.outcomes import FireTime, list_moments
from fairqueue.schedules.replan import Replanned, Replanner
from fairqueue.schedules.search import (
    ScheduleFilter,
    ScheduleFilters,
    find_ids,
    search,
    select_ids,
)
from fairqueue.schedules.store import CheckTask, ScheduleStore
from fairqueue.validation import Priority, check_count, check_name, check_payload

_log = partial(log_event, logging.getLogger("fairqueue.scheduler"))


class Schedules:
    """The schedules of one queue. TaskScheduler documents the arguments of each method."""

    def __init__(self, queue: TaskQueue, check_task: CheckTask | None = None) -> None:
        """`check_task` is called with the name and the payload of future tasks; it may raise."""
        self.queue = queue
        self.link = queue.link
        self.store = ScheduleStore(queue.link, check_task)

    # --- one schedule -----------------------------------------------------------------------------

    @operation
    def add(self, spec: Mapping[str, Any], on_conflict: str = "error") -> Operation[str]:
        """Store a schedule and return its id; see TaskScheduler.add_schedule."""
        (schedule_id,) = yield from steps(self.store.add)([spec], on_conflict)
        _log("schedule_added", schedule=schedule_id, user=spec.get("user_id"))
        return schedule_id

    @operation
    def add_many(
        self, specs: Iterable[Mapping[str, Any]], on_conflict: str = "error"
    ) -> Operation[list[str]]:
        """Store many schedules, all or none, and return their ids."""
        ids = yield from steps(self.store.add)(specs, on_conflict)
        _log("schedules_added", count=len(ids))
        return ids

    @operation
    def update(
        self,
        schedule_id: str,
        changes: Mapping[str, Any],
        *,
        by: str | None = None,
        if_revision: str | None = None,
    ) -> Operation[bool]:
        """Change the given fields; return False if there is no such schedule."""
        change = check_change(by)
        found = yield from steps(self.store.update)(schedule_id, changes, change, if_revision)
        _log("schedule_updated", schedule=schedule_id, fields=sorted(changes), found=found)
        return found

    @operation
    def remove(self, schedule_id: str, *, if_revision: str | None = None) -> Operation[bool]:
        """Remove a schedule; return False if there is none."""
        found = yield from steps(self.store.remove)(schedule_id, if_revision)
        _log("schedule_removed", schedule=schedule_id, found=found)
        return found

    @operation
    def get(self, schedule_id: str) -> Operation[ScheduledTask | None]:
        """Return a schedule, or None. Raises BrokenRecord if it cannot be read."""
        return (yield from steps(self.store.get)(schedule_id))

    @operation
    def pause(
        self,
        schedule_id: str,
        *,
        note: str | None = None,
        by: str | None = None,
        until: datetime | float | None = None,
    ) -> Operation[bool]:
        """Pause a schedule; return False if there is none."""
        change = check_change(by, note, until, (yield Now()))
        found = yield from steps(self.store.update)(schedule_id, {"is_active": False}, change)
        _log("schedule_paused", schedule=schedule_id, found=found)
        return found

    @operation
    def resume(
        self, schedule_id: str, *, note: str | None = None, by: str | None = None
    ) -> Operation[bool]:
        """Resume a schedule that was paused or disabled; return False if there is none."""
        change = check_change(by, note)
        found = yield from steps(self.store.update)(schedule_id, {"is_active": True}, change)
        _log("schedule_resumed", schedule=schedule_id, found=found)
        return found

    @operation
    def trigger(
        self, schedule_id: str, *, by: str | None = None, payload: dict[str, Any] | None = None
    ) -> Operation[str]:
        """Push one task now and return its id; see TaskScheduler.trigger."""
        if by is not None:
            check_name(by, "triggered_by")
        schedule = yield from steps(self.store.get)(schedule_id)
        if schedule is None:
            raise UnknownSchedule(f"there is no schedule {schedule_id!r} to trigger")
        if payload is not None:
            self.store.check_task(schedule.name, check_payload(payload))
        payload = schedule.payload if payload is None else payload
        policy = policy_of(asdict(schedule))
        task = Task(
            task_id=new_id(),
            user_id=schedule.user_id,
            priority=schedule.priority,
            payload=payload,
            name=schedule.name,
            schedule_id=schedule_id,
            run_type="manual",
            triggered_by=by,
            policy=policy,
            tenant=schedule.tenant,
            document=task_document(
                schedule.user_id,
                schedule.name,
                schedule.priority,
                encode_payload(payload),
                schedule_id,
                origin={"by": by, "tenant": schedule.tenant},
                policy=encode_policy(policy),
            ),
        )
        task_id = yield from steps(self.queue.push)(task)
        _log("schedule_triggered", schedule=schedule_id, task=task_id, user=schedule.user_id)
        return task_id

    @operation
    def copy(
        self, schedule_id: str, new_schedule_id: str | None, changes: Mapping[str, Any]
    ) -> Operation[str]:
        """Store a schedule like another and return its id; see TaskScheduler.copy_schedule."""
        stored = yield from steps(self.store.find)(schedule_id)
        for name in ("schedule_id", "is_active", "next_run"):
            if name in changes:
                raise InvalidSchedule(f"{name} {shown(changes[name])} cannot be given to a copy")
        spec = {name: FIELDS[name].to_user(each) for name, each in stored.definition.fields.items()}
        if any(changes.get(kind) is not None for kind in KINDS):
            # A rule of another kind replaces the old one, and an interval begins anew.
            spec |= dict.fromkeys((*KINDS, "anchor"))
        spec |= {**changes, "schedule_id": new_schedule_id or new_id()}
        (copied,) = yield from steps(self.store.add)([spec], "error")
        _log("schedule_copied", schedule=copied, original=schedule_id)
        return copied

    @operation
    def moments(
        self,
        schedule_id: str,
        start: datetime | float,
        end: datetime | float,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Operation[Page[FireTime]]:
        """Return a page of its fire times in [start, end), and what became of each."""
        return (yield from list_moments(self.store, schedule_id, start, end, limit, cursor))

    @operation
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
        """Push a task for each past fire time without one; see TaskScheduler.backfill."""
        request = BackfillRequest.create(schedule_id, start, end, limit, priority, by, unknown_too)
        report = yield from backfill(self.store, request, dry_run)
        if not dry_run:
            _log("schedule_backfilled", schedule=schedule_id, filled=report.filled, by=by)
        return report

    @operation
    def changes(
        self, schedule_id: str, limit: int = 20, cursor: str | None = None
    ) -> Operation[Page[ScheduleChange]]:
        """Return a page of who changed what, newest first; see TaskScheduler.changes."""
        check_count(limit, "limit", InvalidSchedule, least=1, most=CHANGES_LISTED)
        if (yield from steps(self.store.get)(schedule_id)) is None:
            raise UnknownSchedule(f"there is no schedule {schedule_id!r}")
        bounds, key = change_bounds(schedule_id, cursor), self.link.keys["changes"]
        (members,) = yield Ask(("ZREVRANGEBYLEX", key, *bounds, "LIMIT", 0, limit + 1))
        return read_changes(members, limit)

    # --- many schedules ---------------------------------------------------------------------------

    @operation
    def page(
        self, wanted: ScheduleFilter, limit: int = 100, cursor: str | None = None
    ) -> Operation[Page[ScheduledTask]]:
        """Return a page of the schedules that match; see TaskScheduler.list_schedules."""
        return (yield from search(self.store, wanted, limit, cursor))

    @operation
    def problems(self) -> Operation[list[Problem]]:
        """Return the schedules that cannot run, and why: unreadable records, broken rules."""
        return (yield from steps(self.store.problems)())

    @operation
    def bulk(
        self,
        action: str,
        *,
        ids: Sequence[str] | None = None,
        dry_run: bool = True,
        by: str | None = None,
        note: str | None = None,
        progress: Progress | None = None,
        changes: Mapping[str, Any] | None = None,
        **filters: Unpack[ScheduleFilters],
    ) -> Operation[BulkResult]:
        """Act on all schedules that match; see TaskScheduler.bulk."""
        patch = dict(changes or {})
        check_action(action, patch)
        change, wanted = check_change(by, note), ScheduleFilter(**filters)
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
            "update": lambda each: update(each, patch, change),
            "trigger": lambda each: steps(self.trigger)(each, by=by),
        }
        yield from run_bulk(result, matching, acts[action], progress)
        _log("schedules_changed", action=action, done=result.done, failed=result.failed, by=by)
        return result

    @operation
    def export(self, wanted: ScheduleFilter) -> Operation[list[dict[str, Any]]]:
        """Return schedules as documents that `import_` takes."""
        return (yield from export(self.store, wanted))

    @operation
    def import_(
        self,
        documents: Iterable[Mapping[str, Any]],
        *,
        prune: ScheduleFilter | None = None,
        dry_run: bool = True,
        by: str | None = None,
    ) -> Operation[Diff]:
        """Make the stored schedules as the documents say; see TaskScheduler.import_schedules."""
        change = check_change(by)
        diff = yield from import_documents(
            self.store, documents, prune=prune, dry_run=dry_run, change=change
        )
        if not dry_run:
            counts = {"added": len(diff.added), "removed": len(diff.removed)}
            _log("schedules_imported", **counts, updated=len(diff.changed), by=by)
        return diff

    @operation
    def replan(self) -> Operation[Replanned]:
        """Compute the next runs of all active schedules again; see TaskScheduler.replan."""
        replanner = Replanner(self.store)
        while (yield from steps(replanner.step)()):
            pass
        _log("schedules_replanned", **asdict(replanner.report))
        return replanner.report
