"""Tasks and runs: list, explain, cancel, retry and push them, for one actor."""

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, TypedDict, Unpack

from fairqueue.errors import QueueFull, RedisUnavailable, UnknownTask
from fairqueue.history.records import FailureGroup, Run, RunDetails
from fairqueue.inspection.context import InspectorPart
from fairqueue.inspection.masking import mask
from fairqueue.inspection.missing import reading
from fairqueue.inspection.views import LogEntry
from fairqueue.link.operation import Operation, steps
from fairqueue.models import Explanation, Page, Task, TaskOptions
from fairqueue.queue.reports import LogLine
from fairqueue.queue.workers import LostRun
from fairqueue.schedules.bulk import BulkResult, run_bulk
from fairqueue.validation import Priority, check_count, check_items, check_payload

FAILED = ("failed", "timed_out")
WAITING = ("pending", "retrying")


class RunFilters(TypedDict, total=False):
    """Filters of runs; see `History.runs`."""

    user_id: str | None
    schedule_id: str | None
    name: str | None
    fingerprint: str | None
    tenant: str | None
    pool: str | None
    since: datetime | float | None
    until: datetime | float | None


class _RunPart(InspectorPart):
    """What runs, failed runs and tasks have in common.

    In a queue with partitions, several tenants may have a task with the same id: `tenant` says
    whose is meant. Without it, such an id raises AmbiguousTask. An actor of one tenant always means
    its own tenant.
    """

    @reading
    def get(self, task_id: str, *, tenant: str | None = None) -> RunDetails:
        """All that is stored about a run, with secrets masked.

        Raises UnknownTask, AmbiguousTask, BrokenRecord.
        """
        return _masked(self._own(task_id, tenant))

    @reading
    def explain(self, task_id: str, *, tenant: str | None = None) -> Explanation | None:
        """Why a task waits. Raises UnknownTask, AmbiguousTask."""
        run = self._own(task_id, tenant).run
        return self._context.queue.explain(run.task_id, tenant=run.tenant)

    def cancel(self, task_id: str, *, tenant: str | None = None) -> bool:
        """Cancel a task; False if it has already ended. Raises UnknownTask, AmbiguousTask."""
        self._guard.require("operator", "cancel runs")
        run = self._own(task_id, tenant).run
        with self._changing("run.cancel", run) as entry:
            cancelled = self._context.queue.cancel(run.task_id, tenant=run.tenant)
            entry.add(cancelled=cancelled)
        return cancelled

    def _own(self, task_id: str, tenant: str | None = None) -> RunDetails:
        self._guard.read()
        whose = self._guard.scope(tenant)
        details = self._context.history.get(self._context.task_id_of(task_id), tenant=whose)
        if details is None or not self._guard.actor.sees(details.run.tenant):
            raise UnknownTask(f"there is no task {task_id!r}")
        return details

    def _page(
        self, status: Any, limit: int, cursor: str | None, filters: Mapping[str, Any]
    ) -> Page[Run]:
        self._guard.read()
        given = {**filters, "tenant": self._guard.scope(filters.get("tenant"))}
        if given.get("schedule_id") is not None:
            given["schedule_id"] = self._context.schedule_id_of(given["schedule_id"])
        page = self._context.history.runs(status, limit=limit, cursor=cursor, **given)
        return Page([_masked_run(run) for run in page], page.cursor)

    def _changing(self, action: str, run: Run, details: Mapping[str, Any] = {}) -> Any:
        return self._guard.change(
            action, run.task_id, tenant=run.tenant, details={"user_id": run.user_id, **details}
        )


class _Retryable(_RunPart):
    """Runs that can be retried."""

    def retry(self, task_id: str, *, tenant: str | None = None) -> str:
        """Run a failed run again, and return the id of the new run.

        A second call returns the same id. Raises UnknownTask if it is not a failed run,
        AmbiguousTask, QueueFull.
        """
        return self._retry(task_id, None, tenant)

    def _retry(self, task_id: str, payload: dict[str, Any] | None, tenant: str | None) -> str:
        self._guard.require("operator", "retry runs")
        details = self._own(task_id, tenant)
        if payload is not None and details.task is not None:
            payload = self._guard.unmask(payload, details.task.payload)
            self._context.stores.outgoing.check(details.task.name, check_payload(payload))
        edited = {} if payload is None else {"payload": payload}
        with self._changing("run.retry", details.run, edited) as entry:
            new_id = self._context.history.retry(
                details.run.task_id,
                triggered_by=self._guard.actor.name,
                payload=payload,
                tenant=details.run.tenant,
            )
            entry.add(task_id=new_id)
        return new_id


class Runs(_Retryable):
    """The runs that an actor may see: waiting, running and ended."""

    @reading
    def list(
        self,
        status: str | tuple[str, ...] | builtins.list[str] | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        **filters: Unpack[RunFilters],
    ) -> Page[Run]:
        """A page of runs, newest first; see History.runs. Raises InvalidInput, Forbidden."""
        return self._page(status, limit, cursor, filters)

    @reading
    def find(self, task_ids: Sequence[str]) -> builtins.list[Run]:
        """The runs with these ids, at most a thousand, without those that are gone.

        Raises InvalidInput.
        """
        self._guard.read()
        listed = check_items(task_ids, "task_ids", "task ids")
        check_count(len(listed), "task_ids", most=1000)
        found = self._context.history.find(listed)
        return [_masked_run(run) for run in found if self._guard.actor.sees(run.tenant)]

    @reading
    def lost(self, runs: Sequence[Run]) -> dict[str, LostRun]:
        """Running runs whose worker sends no heartbeats or has lost its lease, by id."""
        self._guard.read()
        held = {run.task_id: run.worker_id for run in runs if run.status == "running"}
        return self._context.workers.lost({id_: by for id_, by in held.items() if by is not None})

    @reading
    def logs(
        self, task_id: str, limit: int = 1000, *, tenant: str | None = None
    ) -> builtins.list[LogEntry]:
        """The log lines of a run, oldest first. Raises UnknownTask, AmbiguousTask."""
        run = self._own(task_id, tenant).run
        return self._context.log_entries([run], limit)[::-1]

    def edit_and_retry(
        self, task_id: str, payload: dict[str, Any], *, tenant: str | None = None
    ) -> str:
        """Retry with other arguments; `***` keeps a secret unchanged."""
        return self._retry(task_id, payload, tenant)


class Failed(_Retryable):
    """The failed runs that an actor may see."""

    @reading
    def list(
        self, *, limit: int = 50, cursor: str | None = None, **filters: Unpack[RunFilters]
    ) -> Page[Run]:
        """A page of failed runs, newest first."""
        return self._page(FAILED, limit, cursor, filters)

    @reading
    def groups(self, limit: int = 50, cursor: str | None = None) -> Page[FailureGroup]:
        """Failed runs by cause, the latest first.

        For an actor of one tenant: one page, of its latest thousand failed runs.
        """
        self._guard.read()
        if self._guard.actor.tenant is not None:
            return self._own_groups(limit)
        page = self._context.history.failure_groups(limit, cursor)
        shown = [replace(group, latest=_masked_run(group.latest)) for group in page]
        return Page(shown, page.cursor)

    def _own_groups(self, limit: int) -> Page[FailureGroup]:
        check_count(limit, "limit", least=1, most=1000)
        by_cause: dict[str, builtins.list[Run]] = {}
        for run in self._page(FAILED, 1000, None, {}):
            if run.fingerprint is not None and run.ended_at is not None:
                by_cause.setdefault(run.fingerprint, []).append(run)
        groups = [
            FailureGroup(
                fingerprint=mark,
                count=len(runs),
                last_at=runs[0].ended_at or runs[0].pushed_at,
                latest=runs[0],
            )
            for mark, runs in by_cause.items()
        ]
        return Page(groups[:limit], None)

    def discard(self, task_id: str, *, tenant: str | None = None) -> bool:
        """Delete a failed run; False if it is not a failed run."""
        self._guard.require("operator", "discard failed runs")
        run = self._own(task_id, tenant).run
        with self._changing("run.discard", run) as entry:
            discarded = self._context.history.discard(run.task_id, tenant=run.tenant)
            entry.add(discarded=discarded)
        return discarded

    def retry_many(
        self,
        *,
        dry_run: bool = True,
        progress: Callable[[int, int], object] | None = None,
        **filters: Unpack[RunFilters],
    ) -> BulkResult:
        """Retry all failed runs that match and were not retried yet; by default only count."""
        runs = [run for run in self._walk(filters) if run.retried_as is None]
        return self._many("retry", runs, self._retry_one, dry_run, progress, filters)

    def discard_many(
        self,
        *,
        dry_run: bool = True,
        progress: Callable[[int, int], object] | None = None,
        **filters: Unpack[RunFilters],
    ) -> BulkResult:
        """Delete all failed runs that match; by default only count."""
        runs = builtins.list(self._walk(filters))
        return self._many("discard", runs, self._discard_one, dry_run, progress, filters)

    def retry_page(
        self, *, limit: int = 200, cursor: str | None = None, **filters: Unpack[RunFilters]
    ) -> tuple[BulkResult, str | None]:
        """Retry one page of failed runs, and return the result and the next cursor.

        For a caller that must answer soon and repeats it until the cursor is None. If `left` of the
        result is not 0, it had to stop, and the same page can be tried again.
        """
        page = self._page(FAILED, limit, cursor, filters)
        runs = [run for run in page if run.retried_as is None]
        return self._many("retry", runs, self._retry_one, False, None, filters), page.cursor

    def discard_page(
        self, *, limit: int = 200, cursor: str | None = None, **filters: Unpack[RunFilters]
    ) -> tuple[BulkResult, str | None]:
        """Delete one page of failed runs; see `retry_page`."""
        page = self._page(FAILED, limit, cursor, filters)
        return self._many("discard", page, self._discard_one, False, None, filters), page.cursor

    def _retry_one(self, run: Run) -> Operation[str]:
        retry, by = steps(self._context.history.retry), self._guard.actor.name
        return retry(run.task_id, triggered_by=by, tenant=run.tenant)

    def _discard_one(self, run: Run) -> Operation[bool]:
        return steps(self._context.history.discard)(run.task_id, tenant=run.tenant)

    def export(self, **filters: Unpack[RunFilters]) -> Iterator[RunDetails]:
        """All failed runs that match, with attempts and payloads; secrets are masked."""
        for run in self._walk(filters):
            details = self._context.history.get(run.task_id, tenant=run.tenant)
            if details is not None:
                yield _masked(details)

    def _walk(self, filters: RunFilters) -> Iterator[Run]:
        cursor: str | None = None
        while True:
            page = self._page(FAILED, 1000, cursor, filters)
            yield from page
            cursor = page.cursor
            if cursor is None:
                return

    def _many(
        self,
        action: str,
        runs: builtins.list[Run],
        act: Callable[[Run], Operation[object]],
        dry_run: bool,
        progress: Callable[[int, int], object] | None,
        filters: RunFilters,
    ) -> BulkResult:
        result = BulkResult(action=action, dry_run=dry_run, matched=len(runs))
        if dry_run:
            return result
        self._guard.require("operator", f"{action} failed runs")
        if not runs:
            return result  # no change, nothing to record
        given = {name: value for name, value in filters.items() if value is not None}
        with self._guard.change(
            f"runs.{action}", "(all that match)", details={"filters": given}
        ) as entry:
            ids = [run.task_id for run in runs]
            rest = iter(runs)  # not by id, which several tenants may use
            stop_on = (RedisUnavailable, QueueFull)
            bulk = run_bulk(result, ids, lambda _: act(next(rest)), progress, stop_on)
            self._context.link.perform(bulk)
            entry.add(matched=result.matched, done=result.done, failed=result.failed)
        return result


class Tasks(_RunPart):
    """Waiting tasks, and new ones."""

    @reading
    def list(
        self,
        *,
        user_id: str | None = None,
        name: str | None = None,
        tenant: str | None = None,
        pool: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[Run]:
        """A page of waiting and delayed tasks."""
        filters = {"user_id": user_id, "name": name, "tenant": tenant, "pool": pool}
        return self._page(WAITING, limit, cursor, filters)

    def push(
        self,
        *,
        user_id: str,
        payload: dict[str, Any] | None = None,
        priority: int = Priority.NORMAL,
        name: str = "default",
        task_id: str | None = None,
        delay: float | None = None,
        at: datetime | float | None = None,
        tenant: str | None = None,
        **options: Unpack[TaskOptions],
    ) -> str:
        """Push a task, and return its id; or that of the task that has its unique key.

        Raises InvalidTask, InvalidPayload, QueueFull, DuplicateTask. `options` sets its retries,
        time-out and flow; see `Task.create`.
        """
        self._guard.require("operator", "push tasks")
        given: dict[str, Any] = {"user_id": user_id}
        if tenant is not None:
            given["tenant"] = tenant
        task = Task.create(
            **options,
            payload=payload,
            priority=priority,
            name=name,
            task_id=self._context.new_task_id(task_id),
            delay=delay,
            at=at,
            triggered_by=self._guard.actor.name,
            **self._context.with_tenant(given),
        )
        self._context.stores.outgoing.check(task.name, task.payload)
        details = {"user_id": user_id, "name": name}
        with self._guard.change(
            "task.push", task.task_id, tenant=task.tenant, details=details
        ) as entry:
            pushed = self._context.queue.push(task)
            if pushed != task.task_id:
                entry.add(task_id=pushed, unique=task.flow.unique)
        return pushed

    def reschedule(
        self,
        task_id: str,
        *,
        at: datetime | float | None = None,
        delay: float | None = None,
        tenant: str | None = None,
    ) -> bool:
        """Change when a waiting task is due; False if it is running or has ended."""
        self._guard.require("operator", "reschedule tasks")
        run = self._own(task_id, tenant).run
        with self._changing("task.reschedule", run, {"at": at, "delay": delay}) as entry:
            moved = self._context.queue.reschedule(
                run.task_id, at=at, delay=delay, tenant=run.tenant
            )
            entry.add(moved=moved)
        return moved


def _masked(details: RunDetails) -> RunDetails:
    task = details.task
    if task is not None:
        task = replace(task, payload=mask(task.payload), document="")
    attempts = [replace(each, log=_masked_log(each.log)) for each in details.attempts]
    return replace(details, run=_masked_run(details.run), task=task, attempts=attempts)


def _masked_log(lines: tuple[LogLine, ...]) -> tuple[LogLine, ...]:
    return tuple(line._replace(context=mask(dict(line.context))) for line in lines)


def _masked_run(run: Run) -> Run:
    return run if run.result is None else replace(run, result=mask(run.result))
