"""Look at schedules and change them, as an actor may."""

import builtins
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any, TypedDict, Unpack

from fairqueue.clock import read_ms, to_ms
from fairqueue.errors import (
    ConfigurationError,
    FairQueueError,
    InvalidSchedule,
    UnknownSchedule,
    shown,
)
from fairqueue.inspection.context import InspectionContext
from fairqueue.inspection.masking import mask, mask_side, unmask
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
from fairqueue.schedules.bulk import BulkResult, Filter, ScheduleChange, search
from fairqueue.schedules.import_export import Diff, export, import_documents
from fairqueue.schedules.outcomes import Moment
from fairqueue.schedules.store import Definition, ScheduleStore, check_change, check_list
from fairqueue.validation import check_count

OUTCOMES = 10  # last runs that a listing tells of each schedule
UPCOMING_LOOKED = 1000  # schedules looked at for the next fires of one tenant
LOG_RUNS = 50  # last runs of a schedule whose lines are put together
MAX_PREVIEWED = 100

# What a bulk action takes: what cannot be undone is for admins.
BULK_ROLES = {
    "pause": "operator",
    "resume": "operator",
    "trigger": "operator",
    "update": "admin",
    "remove": "admin",
}


class ScheduleFilters(TypedDict, total=False):
    """Which schedules are meant; see `fairqueue.schedules.bulk.Filter`."""

    user_id: str | None
    name: str | None
    name_prefix: str | None
    contains: str | None
    is_active: bool | None
    tenant: str | None


class RuleLimits(TypedDict, total=False):
    """What narrows a rule; see `fairqueue.schedules.store.ScheduleOptions`."""

    start: datetime | float | None
    end: datetime | float | None
    windows: builtins.list[dict[str, Any]] | None
    exclude: builtins.list[str] | None


class Schedules:
    """The schedules that an actor may see."""

    def __init__(self, context: InspectionContext) -> None:
        self._context = context
        self._guard = context.guard

    # --- looking ----------------------------------------------------------------------------------

    def list(
        self, *, limit: int = 50, cursor: str | None = None, **filters: Unpack[ScheduleFilters]
    ) -> Page[ScheduleView]:
        """A page of schedules with their last outcomes; see TaskScheduler.list_schedules.

        Raises InvalidSchedule for a bad value, and Forbidden for another tenant.
        """
        context = self._context
        page = search(context.link, context.store, self._filter(filters), limit, cursor)
        return Page(self._views(page), page.cursor)

    def count(self, **filters: Unpack[ScheduleFilters]) -> int:
        """How many schedules match: what a bulk action would be done to."""
        self._filter(filters)
        return self.bulk("pause", dry_run=True, **filters).matched

    def get(self, schedule_id: str) -> ScheduleView:
        """A schedule. Raises UnknownSchedule, BrokenRecord."""
        return self._views([self._own(schedule_id)])[0]

    def find(self, schedule_id: str) -> ScheduleView | None:
        """A schedule, or None."""
        try:
            return self.get(schedule_id)
        except UnknownSchedule:
            return None

    def upcoming(self, limit: int = 10) -> builtins.list[Upcoming]:
        """The schedules that act next. Of one tenant, the next thousand are looked through."""
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

    def problems(self) -> builtins.list[Problem]:
        """Schedules that the scheduler had to set aside; none for an actor of one tenant.

        A record that cannot be read does not say whose it is.
        """
        self._guard.read()
        return [] if self._guard.actor.tenant is not None else self._context.store.problems()

    def moments(
        self,
        schedule_id: str,
        start: datetime | float,
        end: datetime | float,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[Moment]:
        """Its moments in a range, and what became of each; see TaskScheduler.moments."""
        schedule_id = self._own(schedule_id).schedule_id
        return self._context.scheduler.moments(schedule_id, start, end, limit, cursor)

    def changes(
        self, schedule_id: str, limit: int = 20, cursor: str | None = None
    ) -> Page[ScheduleChange]:
        """Who changed what of it, newest first; secrets in payloads are masked."""
        schedule_id = self._own(schedule_id).schedule_id
        page = self._context.scheduler.changes(schedule_id, limit, cursor)
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

    def logs(self, schedule_id: str, limit: int = 100) -> builtins.list[LogEntry]:
        """The last lines that its runs have logged, newest first."""
        schedule_id = self._own(schedule_id).schedule_id
        check_count(limit, "limit", InvalidSchedule, least=1, most=1000)
        # An id may have been another's schedule before, whose runs are kept: those stay theirs.
        own = self._guard.actor.tenant
        runs = self._context.history.runs(schedule_id=schedule_id, tenant=own, limit=LOG_RUNS)
        return self._context.log_entries([run.task_id for run in runs], limit)

    def history_chart(self, schedule_id: str, days: int = 30) -> builtins.list[DayCount]:
        """How its runs of the last days ended, oldest first; of the last thousand runs."""
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
        """What a rule means: a sentence, and its next runs with what clock changes do to them.

        A rule is what TaskScheduler.add_schedule takes: `cron_expr` may be EVERY_DAY, a builder or
        a dictionary of fields, too, and `at` a text in ISO 8601.
        `limits` are start, end, windows and exclude, as schedules have them. Raises InvalidCron,
        UnknownTimezone or InvalidSchedule, naming the value.
        """
        check_count(count, "count", InvalidSchedule, least=1, most=MAX_PREVIEWED)
        given = [each for each in (cron_expr, every, at) if each is not None]
        if len(given) != 1:
            raise InvalidSchedule("a rule is one of cron_expr, every and at: pass one of them")
        after = datetime.now(UTC) if after is None else after
        form: dict[str, Any] = {"timezone": timezone}
        if every is not None:
            spec = ScheduleStore.check({"every": every, "user_id": "preview"})[1]
            form |= {"every": spec["every"], "anchor": to_ms(after, "after")}
        elif at is not None:
            form["at"] = read_ms(at, "at", InvalidSchedule)
        else:
            form["cron"] = as_cron(cron_expr)
        given_limits = {name: value for name, value in limits.items() if value is not None}
        if given_limits:
            form["limits"] = ScheduleStore.check_changes(given_limits)
        recurrence = compile_form(form, seed=schedule_id)
        runs = preview(recurrence, count, after)
        notes = [f"{run.local.isoformat(sep=' ')}: {run.note}" for run in runs if run.note]
        if not runs:
            notes = [f"it has no run after {after.isoformat(sep=' ', timespec='seconds')}"]
        return Preview(
            rule=form.get("cron") or (f"every {every}" if every is not None else f"at {at}"),
            sentence=_sentence(recurrence),
            timezone=timezone,
            runs=[run.local for run in runs],
            warnings=notes,
        )

    # --- changing ---------------------------------------------------------------------------------

    def add(self, *, on_conflict: str = "error", **spec: Any) -> str:
        """Store a schedule; its id. Takes what TaskScheduler.add_schedule takes."""
        self._guard.require("admin", "add schedules")
        spec = self._context.with_tenant(spec)
        given = self._context.new_schedule_id(spec.pop("schedule_id", None))
        if given is not None:
            spec["schedule_id"] = given
        spec["created_by"] = self._by
        if on_conflict == "replace" and given is not None:
            self._check_not_anothers(given)
        target = given or "(new)"
        with self._guard.change(
            "schedule.add", target, tenant=spec.get("tenant"), details=spec
        ) as n:
            schedule_id = self._context.scheduler.add_schedule(on_conflict=on_conflict, **spec)
            n.add(schedule_id=schedule_id)
        return schedule_id

    def copy(self, schedule_id: str, new_id: str | None = None, **changes: Any) -> str:
        """Store a schedule like another, with some fields changed; its id."""
        self._guard.require("admin", "add schedules")
        task = self._own(schedule_id)
        schedule_id = task.schedule_id
        changes = self._context.with_tenant(changes, known_user=task.user_id)
        with self._changing("schedule.copy", task, changes) as noted:
            new_id = self._context.new_schedule_id(new_id)
            changes["created_by"] = self._by
            copied = self._context.scheduler.copy_schedule(schedule_id, new_id, **changes)
            noted.add(schedule_id=copied)
        return copied

    def update(
        self, schedule_id: str, changes: Mapping[str, Any], *, if_match: str | None = None
    ) -> ScheduleView:
        """Change the given fields, and no others. What is given as `***` stays as it is.

        Raises UnknownSchedule, StaleVersion if it is not as `if_match` says (an etag), and as
        TaskScheduler.update_schedule.
        """
        self._guard.require("admin", "change schedules")
        task = self._own(schedule_id)
        schedule_id = task.schedule_id
        patch = self._context.with_tenant(changes, known_user=task.user_id, is_new=False)
        for field in ("payload", "metadata"):
            if isinstance(patch.get(field), Mapping):
                patch[field] = unmask(patch[field], getattr(task, field))
        with self._changing("schedule.update", task, patch):
            self._found(
                schedule_id,
                self._context.scheduler.update_schedule(
                    schedule_id,
                    changed_by=self._by,
                    if_revision=self._revision(task, if_match),
                    **patch,
                ),
            )
        return self.get(schedule_id)

    def remove(self, schedule_id: str, *, if_match: str | None = None) -> None:
        """Forget a schedule. Raises UnknownSchedule, StaleVersion."""
        self._guard.require("admin", "remove schedules")
        task = self._own(schedule_id)
        schedule_id = task.schedule_id
        with self._changing("schedule.remove", task):
            revision = self._revision(task, if_match)
            self._found(
                schedule_id,
                self._context.scheduler.remove_schedule(schedule_id, if_revision=revision),
            )

    def pause(
        self,
        schedule_id: str,
        *,
        note: str | None = None,
        until: datetime | float | None = None,
    ) -> None:
        """Fire no more until it is resumed, or until a moment. Raises UnknownSchedule."""
        self._guard.require("operator", "pause schedules")
        task = self._own(schedule_id)
        schedule_id = task.schedule_id
        with self._changing("schedule.pause", task, {"note": note, "until": until}):
            scheduler = self._context.scheduler
            self._found(
                schedule_id,
                scheduler.pause_schedule(schedule_id, note=note, by=self._by, until=until),
            )

    def resume(self, schedule_id: str, *, note: str | None = None) -> None:
        """Let it go on from now. Raises UnknownSchedule."""
        self._guard.require("operator", "resume schedules")
        task = self._own(schedule_id)
        schedule_id = task.schedule_id
        with self._changing("schedule.resume", task, {"note": note}):
            scheduler = self._context.scheduler
            self._found(schedule_id, scheduler.resume_schedule(schedule_id, note=note, by=self._by))

    def toggle(self, schedule_id: str) -> bool:
        """Pause it if it is active, else resume it; whether it is active then."""
        self._guard.require("operator", "pause and resume schedules")
        is_active = self._own(schedule_id).is_active
        if is_active:
            self.pause(schedule_id)
        else:
            self.resume(schedule_id)
        return not is_active

    def trigger(self, schedule_id: str, *, payload: dict[str, Any] | None = None) -> str:
        """One run now; the id of its task. Raises UnknownSchedule, QueueFull."""
        self._guard.require("operator", "trigger schedules")
        task = self._own(schedule_id)
        schedule_id = task.schedule_id
        if payload is not None:
            payload = self._guard.unmask(payload, task.payload)
        with self._changing("schedule.trigger", task) as noted:
            scheduler = self._context.scheduler
            task_id = scheduler.trigger(schedule_id, triggered_by=self._by, payload=payload)
            noted.add(task_id=task_id)
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
        """Make up for moments that were not fired; by default only count them."""
        self._guard.require("viewer" if dry_run else "operator", "backfill schedules")
        task = self._own(schedule_id)
        schedule_id = task.schedule_id
        options: Any = {"limit": limit, "priority": priority, "unknown_too": unknown_too}
        scheduler = self._context.scheduler
        if dry_run:
            return scheduler.backfill(schedule_id, start, end, dry_run=True, **options)
        with self._changing("schedule.backfill", task, {"start": start, "end": end}) as noted:
            report = scheduler.backfill(schedule_id, start, end, by=self._by, **options)
            noted.add(filled=report.filled)
        return report

    # --- many -------------------------------------------------------------------------------------

    def bulk(
        self,
        action: str,
        *,
        ids: Sequence[str] | None = None,
        dry_run: bool = True,
        note: str | None = None,
        progress: Callable[[int, int], object] | None = None,
        changes: Mapping[str, Any] | None = None,
        **filters: Unpack[ScheduleFilters],
    ) -> BulkResult:
        """Pause, resume, trigger, update or remove all that match; by default only count.

        One that fails does not stop the others; see BulkResult. Raises InvalidSchedule.
        """
        wanted = self._filter(filters)
        ids = self._context.meant_schedules(ids)
        options: dict[str, Any] = {**asdict(wanted), "ids": ids, "note": note, "by": self._by}
        scheduler = self._context.scheduler
        patch = dict(changes or {})
        for field in patch.keys() & options.keys():
            raise InvalidSchedule(f"{field} cannot be changed of many schedules: update each")
        if dry_run:
            return scheduler.bulk(action, dry_run=True, **options, **patch)
        self._guard.require(BULK_ROLES.get(action, "admin"), f"{action} schedules")
        if patch:
            patch = self._context.with_tenant(patch, is_new=False)
        given = {name: value for name, value in filters.items() if value is not None}
        details = {"filters": given, "ids": list(ids or ()), "changes": patch, "note": note}
        with self._guard.change(
            f"schedules.{action}", "(all that match)", tenant=wanted.tenant, details=details
        ) as noted:
            result = scheduler.bulk(action, dry_run=False, progress=progress, **options, **patch)
            noted.add(matched=result.matched, done=result.done, failed=result.failed)
        return result

    def export(self, **filters: Unpack[ScheduleFilters]) -> builtins.list[dict[str, Any]]:
        """Schedules as documents that `import_` takes, whole: for admins, as they hold secrets."""
        self._guard.require("admin", "export schedules")
        wanted = self._filter(filters)
        given = {name: value for name, value in filters.items() if value is not None}
        with self._guard.change(
            "schedules.export", "(all that match)", tenant=wanted.tenant, details={"filters": given}
        ) as noted:
            documents = export(self._context.link, self._context.store, wanted)
            noted.add(exported=len(documents))
        return documents

    def import_(
        self, documents: Iterable[Mapping[str, Any]], *, prune: bool = False, dry_run: bool = True
    ) -> Diff:
        """Make what is stored as the documents say; by default only tell the difference.

        Of an actor of one tenant, all are of that tenant, and `prune` touches no other.
        """
        self._guard.require("admin", "import schedules")
        given = check_list(documents, "documents")
        listed = [self._context.with_tenant(each, is_new=False) for each in given]
        for each in listed:
            each["schedule_id"] = self._context.new_schedule_id(each.get("schedule_id"))
            if isinstance(each["schedule_id"], str):
                self._check_not_anothers(each["schedule_id"])
        tenant = self._guard.actor.tenant
        wanted = Filter(tenant=tenant) if prune else None

        def run(dry: bool) -> Diff:
            change = check_change(self._by)
            context = self._context
            return import_documents(
                context.link, context.store, listed, prune=wanted, dry_run=dry, change=change
            )

        if dry_run:
            return run(True)
        details = {"documents": len(listed), "prune": prune}
        with self._guard.change("schedules.import", "(file)", details=details) as noted:
            diff = run(False)
            noted.add(added=len(diff.added), changed=len(diff.changed), removed=len(diff.removed))
        return diff

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _by(self) -> str:
        return self._guard.actor.name

    def _filter(self, filters: Mapping[str, Any]) -> Filter:
        self._guard.read()
        return Filter(**{**filters, "tenant": self._guard.scope(filters.get("tenant"))})

    def _own(self, schedule_id: str) -> ScheduledTask:
        """A schedule that the actor may see, with its secrets. Raises UnknownSchedule."""
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
        """The revision that a change is of; None: any.

        For an actor of one tenant that which was looked at, whatever they ask for: a schedule may
        become another tenant's between the look and the change.
        """
        if if_match is not None:
            return _revision(if_match)
        return None if self._guard.actor.tenant is None else task.revision

    def _found(self, schedule_id: str, found: bool) -> None:
        if not found:
            raise UnknownSchedule(f"there is no schedule {shown(schedule_id)} any more")

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


def state_of(schedule: ScheduledTask) -> str:
    """In a word: active, completed, disabled by the scheduler, paused, or inactive."""
    if schedule.is_active:
        return "active"
    if schedule.disabled_reason:
        return "completed" if schedule.disabled_reason.startswith("completed") else "disabled"
    return "inactive" if schedule.paused_at is None else "paused"


def _masked(task: ScheduledTask) -> ScheduledTask:
    payload, metadata = mask(task.payload), mask(task.metadata)
    if payload == task.payload and metadata == task.metadata:
        return task  # as most are: a copy of so many fields takes its time
    return replace(task, payload=payload, metadata=metadata)


def _is_complex(task: ScheduledTask) -> bool:
    """Whether its sentence takes more than its expression and its zone."""
    limits = (task.start, task.end, task.windows, task.exclude)
    return not task.cron_expr or "H" in task.cron_expr or any(each is not None for each in limits)


@lru_cache(maxsize=10_000)
def _cron_sentence(cron_expr: str, timezone: str) -> str:
    try:
        return describe(cron_expr, timezone)
    except FairQueueError:
        return cron_expr  # broken, or the words are not installed


def _stored_sentence(definition: Definition) -> str:
    try:
        return _sentence(definition.recurrence)
    except InvalidSchedule:
        return definition.words  # broken: one must not keep others from being listed


def _sentence(recurrence: Any) -> str:
    try:
        return describe(recurrence)
    except ConfigurationError:  # the words are not installed
        return str(getattr(recurrence, "cron_expr", ""))


def _revision(if_match: str | None) -> str | None:
    """What an etag says of the revision; runs since then do not make it stale."""
    return None if if_match is None else if_match.strip('"').partition(".")[0]
