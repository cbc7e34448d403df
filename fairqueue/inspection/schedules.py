"""Look at schedules and change them, as an actor may."""

import builtins
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache, partial
from typing import Any, TypedDict, Unpack

from fairqueue.clock import to_ms
from fairqueue.errors import (
    ConfigurationError,
    FairQueueError,
    InvalidSchedule,
    UnknownSchedule,
    shown,
)
from fairqueue.inspection.context import InspectionContext
from fairqueue.inspection.masking import mask, mask_side, unmask
from fairqueue.inspection.missing import reading
from fairqueue.inspection.views import (
    DayCount,
    LogEntry,
    Outcome,
    Preview,
    ScheduleView,
    Upcoming,
)
from fairqueue.models import Page, Problem, ScheduledTask
from fairqueue.recurrence.frequency import Frequency, as_cron
from fairqueue.recurrence.kinds import compile_form
from fairqueue.recurrence.moments import describe, preview
from fairqueue.schedules.backfill import Backfill
from fairqueue.schedules.bulk import BulkResult, Progress
from fairqueue.schedules.changes import ScheduleChange
from fairqueue.schedules.definition import Definition
from fairqueue.schedules.fields import FIELDS, NARROWING, check_patch
from fairqueue.schedules.import_export import Diff
from fairqueue.schedules.outcomes import FireTime
from fairqueue.schedules.search import ScheduleFilter, ScheduleFilters
from fairqueue.schedules.store import check_list
from fairqueue.validation import check_count

OUTCOMES = 10  # last runs that a listing shows for each schedule
UPCOMING_LOOKED = 1000  # schedules looked at for the next runs of one tenant
LOG_RUNS = 50  # last runs of a schedule whose log lines are merged
MAX_PREVIEWED = 100

# The role that a bulk action needs: actions that cannot be undone are for admins.
BULK_ROLES = {
    "pause": "operator",
    "resume": "operator",
    "trigger": "operator",
    "update": "admin",
    "remove": "admin",
}


class RuleLimits(TypedDict, total=False):
    """What narrows a rule; see `fairqueue.schedules.fields.ScheduleOptions`."""

    start: datetime | float | None
    end: datetime | float | None
    windows: builtins.list[dict[str, Any]] | None
    exclude: builtins.list[str] | None


class ScheduleInspector:
    """The schedules that an actor may see."""

    def __init__(self, context: InspectionContext) -> None:
        self._context = context
        self._guard = context.guard

    # --- looking ----------------------------------------------------------------------------------

    @reading
    def list(
        self, *, limit: int = 50, cursor: str | None = None, **filters: Unpack[ScheduleFilters]
    ) -> Page[ScheduleView]:
        """Return a page of schedules with their last outcomes; see TaskScheduler.list_schedules.

        Raises InvalidSchedule for a bad value, and Forbidden for another tenant.
        """
        page = self._context.schedules.list_schedules(
            limit=limit, cursor=cursor, **self._filters(filters)
        )
        return Page(self._views(page), page.cursor)

    def count(self, **filters: Unpack[ScheduleFilters]) -> int:
        """Return how many schedules match: those that a bulk action would change."""
        self._filters(filters)
        return self.bulk("pause", dry_run=True, **filters).matched

    @reading
    def get(self, schedule_id: str) -> ScheduleView:
        """Return a schedule. Raises UnknownSchedule, BrokenRecord."""
        return self._views([self._own(schedule_id)])[0]

    @reading
    def find(self, schedule_id: str) -> ScheduleView | None:
        """Return a schedule, or None."""
        try:
            return self.get(schedule_id)
        except UnknownSchedule:
            return None

    @reading
    def upcoming(self, limit: int = 10) -> builtins.list[Upcoming]:
        """Return the schedules that run next; of one tenant, those among the next thousand."""
        self._guard.read()
        check_count(limit, "limit", InvalidSchedule, least=1, most=100)
        found: builtins.list[Upcoming] = []
        step = limit if self._guard.actor.tenant is None else UPCOMING_LOOKED
        due = self._context.glance.due_soon(step)
        tasks = self._context.store.read([schedule_id for schedule_id, _ in due])
        for (_, at), task in zip(due, tasks, strict=True):
            if task is not None and self._guard.actor.sees(task.tenant):
                found.append(Upcoming(at=at, schedule=_masked(task)))
        return found[:limit]

    @reading
    def problems(self) -> builtins.list[Problem]:
        """Return the schedules that cannot run; none for an actor of one tenant.

        An unreadable record does not say which tenant it belongs to.
        """
        self._guard.read()
        return [] if self._guard.actor.tenant is not None else self._context.store.problems()

    @reading
    def moments(
        self,
        schedule_id: str,
        start: datetime | float,
        end: datetime | float,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[FireTime]:
        """Return its fire times in a range, with outcomes; see TaskScheduler.moments."""
        schedule_id = self._own(schedule_id).schedule_id
        return self._context.schedules.moments(schedule_id, start, end, limit, cursor)

    @reading
    def changes(
        self, schedule_id: str, limit: int = 20, cursor: str | None = None
    ) -> Page[ScheduleChange]:
        """Return who changed what, newest first; secrets in payloads are masked."""
        schedule_id = self._own(schedule_id).schedule_id
        page = self._context.schedules.changes(schedule_id, limit, cursor)
        shown = [
            replace(
                each,
                fields={
                    name: (mask_side(name, old), mask_side(name, new))
                    for name, (old, new) in each.fields.items()
                },
            )
            for each in page
        ]
        return Page(shown, page.cursor)

    @reading
    def logs(self, schedule_id: str, limit: int = 100) -> builtins.list[LogEntry]:
        """Return the last lines that its runs have logged, newest first."""
        schedule_id = self._own(schedule_id).schedule_id
        check_count(limit, "limit", InvalidSchedule, least=1, most=1000)
        # Another tenant may have had a schedule of this id, whose runs are kept: they stay hidden.
        own = self._guard.actor.tenant
        runs = self._context.history.runs(schedule_id=schedule_id, tenant=own, limit=LOG_RUNS)
        return self._context.log_entries(runs, limit)

    @reading
    def history_chart(self, schedule_id: str, days: int = 30) -> builtins.list[DayCount]:
        """Return how its runs ended, day by day, oldest first; among the last thousand runs."""
        schedule_id = self._own(schedule_id).schedule_id
        check_count(days, "days", InvalidSchedule, least=1, most=366)
        today = self._context.now().date()
        counts: defaultdict[date, Counter[str]] = defaultdict(Counter)
        own = self._guard.actor.tenant
        for ending in self._context.glance.endings([schedule_id], 1000, own)[schedule_id]:
            counts[ending.ended_at.date()][ending.status] += 1
        wanted = [today - timedelta(days=ago) for ago in range(days - 1, -1, -1)]
        return [DayCount(day=day, **counts[day]) for day in wanted]

    # --- without Redis ----------------------------------------------------------------------------

    @staticmethod
    def preview(
        cron_expr: str | Frequency | Mapping[str, Any] | None = None,
        *,
        every: float | timedelta | None = None,
        at: datetime | float | str | None = None,
        timezone: str = "UTC",
        count: int = 5,
        after: datetime | None = None,
        schedule_id: str = "",
        **limits: Unpack[RuleLimits],
    ) -> Preview:
        """Return what a rule means: a sentence, and its next runs with notes on clock changes.

        A rule is what TaskScheduler.add_schedule takes: `cron_expr` may also be EVERY_DAY, a
        builder or a dictionary of fields, and `at` a string in ISO 8601. `limits` are start, end,
        windows and exclude, as schedules have them. Raises InvalidCron, UnknownTimezone or
        InvalidSchedule, naming the value.
        """
        check_count(count, "count", InvalidSchedule, least=1, most=MAX_PREVIEWED)
        if sum(each is not None for each in (cron_expr, every, at)) != 1:
            raise InvalidSchedule("a rule is one of cron_expr, every and at: pass one of them")
        after = datetime.now(UTC) if after is None else after
        form: dict[str, Any] = {"timezone": timezone}
        if every is not None:
            form |= {"every": FIELDS["every"].check(every), "anchor": to_ms(after, "after")}
        elif at is not None:
            form["at"] = FIELDS["at"].check(at)
        else:
            form["cron"] = as_cron(cron_expr)
        if narrowed := {name: value for name, value in limits.items() if value is not None}:
            form["limits"] = check_patch(narrowed)
        recurrence = compile_form(form, seed=schedule_id)
        runs = preview(recurrence, count, after)
        notes = [f"{run.local.isoformat(sep=' ')}: {run.note}" for run in runs if run.note]
        if not runs:
            notes = [f"no runs after {after.isoformat(sep=' ', timespec='seconds')}"]
        return Preview(
            rule=form.get("cron") or (f"every {every}" if every is not None else f"at {at}"),
            sentence=_sentence(recurrence),
            timezone=timezone,
            runs=[run.local for run in runs],
            warnings=notes,
        )

    # --- changing ---------------------------------------------------------------------------------

    def add(self, *, on_conflict: str = "error", **spec: Any) -> str:
        """Store a schedule and return its id. Takes what TaskScheduler.add_schedule takes."""
        self._guard.require("admin", "add schedules")
        spec = self._context.with_tenant(spec)
        given = self._context.new_schedule_id(spec.pop("schedule_id", None))
        if given is not None:
            spec["schedule_id"] = given
        spec["created_by"] = self._by
        if on_conflict == "replace" and given is not None:
            self._check_not_anothers(given)
        with self._guard.change(
            "schedule.add", given or "(new)", tenant=spec.get("tenant"), details=spec
        ) as entry:
            schedule_id = self._context.schedules.add_schedule(on_conflict=on_conflict, **spec)
            entry.add(schedule_id=schedule_id)
        return schedule_id

    def copy(self, schedule_id: str, new_id: str | None = None, **changes: Any) -> str:
        """Store a schedule like another, with some fields changed, and return its id."""
        task = self._own(schedule_id, "admin", "add schedules")
        changes = self._context.with_tenant(changes)
        with self._changing("schedule.copy", task, changes) as entry:
            new_id = self._context.new_schedule_id(new_id)
            changes["created_by"] = self._by
            copied = self._context.schedules.copy_schedule(task.schedule_id, new_id, **changes)
            entry.add(schedule_id=copied)
        return copied

    def update(
        self, schedule_id: str, changes: Mapping[str, Any], *, if_match: str | None = None
    ) -> ScheduleView:
        """Change the given fields, and no others. A value given as `***` stays as it is.

        Raises UnknownSchedule, StaleVersion if its etag is not `if_match`, and as
        TaskScheduler.update_schedule.
        """
        task = self._own(schedule_id, "admin", "change schedules")
        patch = self._context.with_tenant(changes, is_new=False)
        for field in ("payload", "metadata"):
            if isinstance(patch.get(field), Mapping):
                patch[field] = unmask(patch[field], getattr(task, field))
        with self._changing("schedule.update", task, patch):
            revision = self._revision(task, if_match)
            patch |= {"changed_by": self._by, "if_revision": revision}
            _check(task, self._context.schedules.update_schedule(task.schedule_id, **patch))
        return self.get(task.schedule_id)

    def remove(self, schedule_id: str, *, if_match: str | None = None) -> None:
        """Remove a schedule. Raises UnknownSchedule, StaleVersion."""
        task = self._own(schedule_id, "admin", "remove schedules")
        with self._changing("schedule.remove", task):
            revision = self._revision(task, if_match)
            remove = self._context.schedules.remove_schedule
            _check(task, remove(task.schedule_id, if_revision=revision))

    def pause(
        self,
        schedule_id: str,
        *,
        note: str | None = None,
        until: datetime | float | None = None,
    ) -> None:
        """Stop firing until it is resumed, or until a time. Raises UnknownSchedule."""
        task = self._own(schedule_id, "operator", "pause schedules")
        with self._changing("schedule.pause", task, {"note": note, "until": until}):
            pause = self._context.schedules.pause_schedule
            _check(task, pause(task.schedule_id, note=note, by=self._by, until=until))

    def resume(self, schedule_id: str, *, note: str | None = None) -> None:
        """Resume it from now. Raises UnknownSchedule."""
        task = self._own(schedule_id, "operator", "resume schedules")
        with self._changing("schedule.resume", task, {"note": note}):
            resume = self._context.schedules.resume_schedule
            _check(task, resume(task.schedule_id, note=note, by=self._by))

    def toggle(self, schedule_id: str) -> bool:
        """Pause it if it is active, else resume it; return whether it is active then."""
        is_active = self._own(schedule_id, "operator", "pause and resume schedules").is_active
        if is_active:
            self.pause(schedule_id)
        else:
            self.resume(schedule_id)
        return not is_active

    def trigger(self, schedule_id: str, *, payload: dict[str, Any] | None = None) -> str:
        """Push one task now and return its id. Raises UnknownSchedule, QueueFull."""
        task = self._own(schedule_id, "operator", "trigger schedules")
        if payload is not None:
            payload = self._guard.unmask(payload, task.payload)
        with self._changing("schedule.trigger", task) as entry:
            trigger = self._context.schedules.trigger
            task_id = trigger(task.schedule_id, triggered_by=self._by, payload=payload)
            entry.add(task_id=task_id)
        return task_id

    def backfill(
        self,
        schedule_id: str,
        start: datetime | float,
        end: datetime | float,
        *,
        dry_run: bool = True,
        limit: int = 1000,
        priority: int = 1,
        unknown_too: bool = False,
    ) -> Backfill:
        """Push tasks for past fire times that have none; by default only count them."""
        task = self._own(schedule_id, "viewer" if dry_run else "operator", "backfill schedules")
        options: Any = {"limit": limit, "priority": priority, "unknown_too": unknown_too}
        fill = partial(self._context.schedules.backfill, task.schedule_id, start, end, **options)
        if dry_run:
            return fill(dry_run=True)
        with self._changing("schedule.backfill", task, {"start": start, "end": end}) as entry:
            report = fill(by=self._by)
            entry.add(filled=report.filled)
        return report

    # --- many -------------------------------------------------------------------------------------

    def bulk(
        self,
        action: str,
        *,
        ids: Sequence[str] | None = None,
        dry_run: bool = True,
        note: str | None = None,
        progress: Progress | None = None,
        changes: Mapping[str, Any] | None = None,
        **filters: Unpack[ScheduleFilters],
    ) -> BulkResult:
        """Pause, resume, trigger, update or remove all that match; by default only count.

        One that fails does not stop the others; see BulkResult. Raises InvalidSchedule.
        """
        wanted = self._filters(filters)
        ids = self._context.meant_schedules(ids)
        patch = dict(changes or {})
        for field in patch.keys() & {*ScheduleFilters.__annotations__, "ids", "note", "by"}:
            raise InvalidSchedule(f"{field} cannot be changed for many schedules: update each")
        act = partial(
            self._context.schedules.bulk, action, ids=ids, note=note, by=self._by, **wanted
        )
        if dry_run:
            return act(dry_run=True, **patch)
        self._guard.require(BULK_ROLES.get(action, "admin"), f"{action} schedules")
        if patch:
            patch = self._context.with_tenant(patch, is_new=False)
        details = {"filters": _given(filters), "ids": [*(ids or ())], "changes": patch}
        with self._guard.change(
            f"schedules.{action}",
            "(all that match)",
            tenant=wanted["tenant"],
            details={**details, "note": note},
        ) as entry:
            result = act(dry_run=False, progress=progress, **patch)
            entry.add(matched=result.matched, done=result.done, failed=result.failed)
        return result

    def export(self, **filters: Unpack[ScheduleFilters]) -> builtins.list[dict[str, Any]]:
        """Return schedules as documents for `import_`, with their secrets: for admins only."""
        self._guard.require("admin", "export schedules")
        wanted = self._filters(filters)
        with self._guard.change(
            "schedules.export",
            "(all that match)",
            tenant=wanted["tenant"],
            details={"filters": _given(filters)},
        ) as entry:
            documents = self._context.schedules.export_schedules(**wanted)
            entry.add(exported=len(documents))
        return documents

    def import_(
        self, documents: Iterable[Mapping[str, Any]], *, prune: bool = False, dry_run: bool = True
    ) -> Diff:
        """Make the stored schedules as the documents say; by default only return the difference.

        For an actor of one tenant all are of that tenant, and `prune` removes no others.
        """
        self._guard.require("admin", "import schedules")
        given = check_list(documents, "documents")
        listed = [self._context.with_tenant(each, is_new=False) for each in given]
        for each in listed:
            each["schedule_id"] = self._context.new_schedule_id(each.get("schedule_id"))
            if isinstance(each["schedule_id"], str):
                self._check_not_anothers(each["schedule_id"])
        tenant = self._guard.actor.tenant
        load = self._context.schedules.import_schedules
        run = partial(load, listed, prune=prune, tenant=tenant, by=self._by)
        if dry_run:
            return run(dry_run=True)
        details = {"documents": len(listed), "prune": prune}
        with self._guard.change("schedules.import", "(file)", details=details) as entry:
            diff = run(dry_run=False)
            entry.add(added=len(diff.added), changed=len(diff.changed), removed=len(diff.removed))
        return diff

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _by(self) -> str:
        return self._guard.actor.name

    def _filters(self, filters: ScheduleFilters) -> ScheduleFilters:
        """Return the filters within the tenant of the actor. Raises Forbidden for another one."""
        self._guard.read()
        wanted: ScheduleFilters = {**filters, "tenant": self._guard.scope(filters.get("tenant"))}
        ScheduleFilter(**wanted)
        return wanted

    def _own(self, schedule_id: str, role: str = "", doing: str = "") -> ScheduledTask:
        """Return a schedule that the actor may see, with its secrets. Raises UnknownSchedule.

        With a role, raises Forbidden for an actor who does not have it.
        """
        if role:
            self._guard.require(role, doing)
        self._guard.read()
        task = self._context.store.get(self._context.schedule_id_of(schedule_id))
        if task is None or not self._guard.actor.sees(task.tenant):
            raise UnknownSchedule(f"there is no schedule {shown(schedule_id)}")
        return task

    def _check_not_anothers(self, schedule_id: str) -> None:
        if self._guard.actor.tenant is None:
            return
        task = self._context.store.get(schedule_id)
        if task is not None and not self._guard.actor.sees(task.tenant):
            raise UnknownSchedule(f"schedule id {shown(schedule_id)} cannot be used")

    def _revision(self, task: ScheduledTask, if_match: str | None) -> str | None:
        """Return the revision that a change requires; None for any.

        An actor of one tenant changes only the revision that was looked at: the schedule may become
        another tenant's before the change.
        """
        if if_match is not None:
            return _revision(if_match)
        return None if self._guard.actor.tenant is None else task.revision

    def _changing(self, action: str, task: ScheduledTask, details: Mapping[str, Any] = {}) -> Any:
        return self._guard.change(
            action, task.schedule_id, tenant=task.tenant, details=dict(details)
        )

    def _views(self, tasks: Sequence[ScheduledTask]) -> builtins.list[ScheduleView]:
        ids = [task.schedule_id for task in tasks]
        endings = self._context.glance.endings(ids, OUTCOMES, self._guard.actor.tenant)
        complex_ids = [task.schedule_id for task in tasks if _is_complex(task)]
        stored = dict(zip(complex_ids, self._context.store.stored(complex_ids), strict=True))
        views = []
        for task in tasks:
            record = stored.get(task.schedule_id)
            outcomes = [
                Outcome(task_id=each.task_id, status=each.status, ended_at=each.ended_at)
                for each in endings[task.schedule_id]
            ]
            sentence = (
                _cron_sentence(task.cron_expr, task.timezone)
                if record is None
                else _stored_sentence(record.definition)
            )
            views.append(
                ScheduleView(
                    schedule=_masked(task),
                    state=state_of(task),
                    sentence=sentence,
                    outcomes=outcomes,
                )
            )
        return views


def _given(filters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in filters.items() if value is not None}


def _check(task: ScheduledTask, found: bool) -> None:
    if not found:
        raise UnknownSchedule(f"there is no schedule {shown(task.schedule_id)} any more")


def state_of(schedule: ScheduledTask) -> str:
    """Return its state: active, completed, disabled (by the scheduler), paused or inactive."""
    if schedule.is_active:
        return "active"
    if schedule.disabled_reason:
        return "completed" if schedule.disabled_reason.startswith("completed") else "disabled"
    return "inactive" if schedule.paused_at is None else "paused"


def _masked(task: ScheduledTask) -> ScheduledTask:
    payload, metadata = mask(task.payload), mask(task.metadata)
    if payload == task.payload and metadata == task.metadata:
        return task  # as most are: to copy so many fields takes a while
    return replace(task, payload=payload, metadata=metadata)


def _is_complex(task: ScheduledTask) -> bool:
    """Return whether its sentence depends on more than its expression and its zone."""
    is_limited = any(getattr(task, name) is not None for name in NARROWING)
    return not task.cron_expr or "H" in task.cron_expr or is_limited


@lru_cache(maxsize=10_000)
def _cron_sentence(cron_expr: str, timezone: str) -> str:
    try:
        return describe(cron_expr, timezone)
    except FairQueueError:
        return cron_expr  # broken, or the extra for sentences is not installed


def _stored_sentence(definition: Definition) -> str:
    try:
        return _sentence(definition.recurrence)
    except InvalidSchedule:
        return definition.rule_text  # broken: it must not keep others from being listed


def _sentence(recurrence: Any) -> str:
    try:
        return describe(recurrence)
    except ConfigurationError:  # the extra for sentences is not installed
        return str(getattr(recurrence, "cron_expr", ""))


def _revision(if_match: str | None) -> str | None:
    """Return the revision in an etag; runs since then do not make it stale."""
    return None if if_match is None else if_match.strip('"').partition(".")[0]
