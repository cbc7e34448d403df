"""The history of runs: list them, read one, retry or delete failed ones, delete old ones."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Unpack

from fairqueue.clock import to_ms
from fairqueue.errors import BrokenRecord, InvalidInput, QueueFull, UnknownTask
from fairqueue.history.failures import FailureGroups
from fairqueue.history.filters import Filters
from fairqueue.history.listing import MAX_LISTED, RunListing
from fairqueue.history.records import Run, RunDetails, read_attempts, read_run
from fairqueue.link.operation import Ask, Call, Now, Operation, operation, steps
from fairqueue.link.partitions import at_found, at_part, everywhere, over_all, total, whole
from fairqueue.logs import log_event
from fairqueue.models import Page, Task, encode_payload, new_id, task_document
from fairqueue.queue.waiting_room import make_room
from fairqueue.retry_policy import encode_policy
from fairqueue.validation import (
    check_count,
    check_items,
    check_name,
    check_payload,
    check_seconds,
    check_tenant,
)

logger = logging.getLogger("fairqueue.history")

PRUNE_CHUNK = 100  # records that one script drops, and fewer large ones: about 2 ms
DISCARD_CHUNK = 100
FAILED = ("failed", "timed_out")


class History(RunListing, FailureGroups):
    """The runs of a queue: waiting and running tasks, and the ended ones that are still stored.

    `TaskQueue.configure` sets how many are stored, and how long: keep_finished, keep_dead, ...
    """

    @operation
    @whole
    def find(self, task_ids: Sequence[str]) -> Operation[list[Run]]:
        """Return the stored runs with these ids, in order, without damaged ones.

        Several tenants or users may have one with the same id if the queue has partitions: then
        these follow each other. Raises InvalidInput if `task_ids` is not a list of ids.
        """
        task_ids = check_items(task_ids, "task_ids", "task ids")
        if not task_ids:
            return []
        for task_id in task_ids:
            check_name(task_id, "task_id")
        parts = yield from everywhere(self, lambda twin: twin._find(task_ids))
        found = (run for runs in zip(*parts, strict=True) for run in runs)
        return [run for run in found if run is not None]

    def _find(self, task_ids: Sequence[str]) -> Operation[list[Run | None]]:
        (texts,) = yield Ask(("HMGET", self.link.keys["status"], *task_ids))
        found = zip(task_ids, texts, strict=True)
        return [None if text is None else read_run(task_id, text) for task_id, text in found]

    @operation
    @at_found("status", "task_id")
    def get(self, task_id: str, *, tenant: str | None = None) -> Operation[RunDetails | None]:
        """Return a run with its attempts, or None; with a tenant, only if it is the tenant's.

        Raises BrokenRecord if its record is damaged, and AmbiguousTask if several partitions of the
        queue have a run with this id, of several tenants or users, and no tenant is given.
        """
        check_name(task_id, "task_id")
        if tenant is not None:
            check_tenant(tenant, InvalidInput)
        keys = self.link.keys
        status, document, lines = yield Ask(
            ("HGET", keys["status"], task_id),
            ("HGET", keys["tasks"], task_id),
            ("HGET", keys["attempts"], task_id),
        )
        if status is None:
            return None
        run = read_run(task_id, status)
        if run is None:
            raise BrokenRecord(f"the status record of task {task_id!r} is damaged")
        if tenant not in (None, run.tenant):
            return None
        try:
            task = Task.from_document(task_id, document or b"")
        except BrokenRecord:
            task = None
        return RunDetails(run=run, attempts=read_attempts(run, lines or b""), task=task)

    # --- failed runs ------------------------------------------------------------------------------

    @operation
    @at_found("status", "task_id")
    def retry(
        self,
        task_id: str,
        *,
        triggered_by: str | None = None,
        payload: dict[str, Any] | None = None,
        tenant: str | None = None,
    ) -> Operation[str]:
        """Run a failed run again, as a new run that refers to it, and return the new id.

        A `payload` replaces its own. A failed run is retried once: a second call returns the same
        id, whatever the payload. Raises UnknownTask if it is not a failed run (of the tenant, if
        one is given), BrokenRecord if its task is damaged, InvalidPayload, QueueFull, and
        AmbiguousTask as `get` does.
        """
        if triggered_by is not None:
            check_name(triggered_by, "triggered_by")
        if payload is not None:
            encode_payload(check_payload(payload))
        details = yield from steps(self.get)(task_id, tenant=tenant)
        if details is None or details.run.status not in FAILED:
            status = "unknown" if details is None else details.run.status
            raise UnknownTask(f"task {task_id!r} is {status}: only failed runs can be retried")
        if details.task is None:
            raise BrokenRecord(
                f"the document of task {task_id!r} is damaged: the run cannot be retried"
            )
        task = _again(details.task, triggered_by, payload)
        call = Call(
            "revive",
            op=new_id(),
            id=task_id,
            new_id=task.task_id,
            user=task.user_id,
            task_name=task.name,
            document=task.document,
            head=task.status_head,
            level=int(task.priority),
            schedule=task.schedule_id or "",
        )
        answer = yield call
        if answer[0] == b"full" and (yield from make_room(self.link, 1)):
            call.arguments["op"] = new_id()
            answer = yield call
        if answer[0] == b"not_dead":
            raise UnknownTask(f"task {task_id!r} is no longer a failed run")
        if answer[0] == b"full":
            raise QueueFull(f"task {task_id!r} cannot be retried now: max_waiting is reached")
        return str(answer[1].decode())

    @operation
    @whole
    def retry_matching(
        self,
        *,
        triggered_by: str | None = None,
        limit: int = MAX_LISTED,
        **filters: Unpack[Filters],
    ) -> Operation[list[str]]:
        """Retry at most `limit` failed runs that match, the latest first; return the new ids.

        Runs that were retried before are skipped, and those whose tasks are damaged too, with a
        warning in the log. Raises QueueFull, after which the call can be repeated for the rest, and
        InvalidInput for a bad filter or limit.
        """
        check_count(limit, "limit", least=1)
        if triggered_by is not None:
            check_name(triggered_by, "triggered_by")
        retried: list[str] = []
        cursor: str | None = None
        while True:
            page = yield from self._failed(cursor, filters)
            for run in page:
                if run.retried_as is None:
                    retried += yield from self._retry_one(run, triggered_by)
                if len(retried) == limit:
                    return retried
            cursor = page.cursor
            if cursor is None:
                return retried

    def _retry_one(self, run: Run, triggered_by: str | None) -> Operation[list[str]]:
        """Retry a run and return its new id in a list, which is empty if it cannot be retried."""
        try:
            twin = self.part_of(run.user_id, run.tenant)
            retry = steps(twin.retry)(run.task_id, triggered_by=triggered_by)
            return [(yield from at_part(twin, retry))]
        except (BrokenRecord, UnknownTask) as error:  # UnknownTask: dropped meanwhile
            fields = {"task": run.task_id, "user": run.user_id, "error": str(error)}
            log_event(logger, "run_not_retried", logging.WARNING, **fields)
            return []

    @operation
    @at_found("status", "task_id")
    def discard(self, task_id: str, *, tenant: str | None = None) -> Operation[bool]:
        """Delete a failed run from the history; return False if it is not a failed run.

        With a tenant, only a run of that tenant. Raises AmbiguousTask as `get` does.
        """
        check_name(task_id, "task_id")
        if tenant is not None and (yield from steps(self.get)(task_id, tenant=tenant)) is None:
            return False
        return (yield from self._discard([task_id])) == 1

    @operation
    @whole
    def discard_matching(
        self, *, limit: int = MAX_LISTED, **filters: Unpack[Filters]
    ) -> Operation[int]:
        """Delete at most `limit` failed runs that match, the latest first; return how many.

        Raises InvalidInput for a bad filter or limit.
        """
        check_count(limit, "limit", least=1)
        runs: list[Run] = []
        cursor: str | None = None
        while len(runs) < limit:
            page = yield from self._failed(cursor, filters)
            runs += page
            cursor = page.cursor
            if cursor is None:
                break
        placed: dict[History, list[str]] = {}
        for run in runs[:limit]:
            placed.setdefault(self.part_of(run.user_id, run.tenant), []).append(run.task_id)
        dropped = 0
        for twin, ids in placed.items():
            for i in range(0, len(ids), DISCARD_CHUNK):
                dropped += yield from at_part(twin, twin._discard(ids[i : i + DISCARD_CHUNK]))
        return dropped

    def _discard(self, ids: list[str]) -> Operation[int]:
        """Delete failed runs; one script deletes as many as its time allows."""
        dropped, left = 0, 1
        while left:
            count, left = yield Call("discard", op=new_id(), rest=ids)
            dropped += int(count)
        return dropped

    def _failed(self, cursor: str | None, filters: Filters) -> Operation[Page[Run]]:
        return steps(self.runs)(FAILED, limit=MAX_LISTED, cursor=cursor, **filters)

    @operation
    @over_all(total, strict=True)
    def prune(self, older_than: float | timedelta) -> Operation[int]:
        """Delete ended runs, failed ones included, that are at least this old; return how many.

        `older_than` is in seconds or a timedelta. Raises InvalidInput if it is neither.
        """
        seconds = check_seconds(older_than, "older_than")
        before_ms = (yield Now()) - round(seconds * 1000) + 1
        dropped = 0
        while count := (yield Call("prune", op=new_id(), before_ms=before_ms, limit=PRUNE_CHUNK)):
            dropped += int(count)
        return dropped


def _again(task: Task, triggered_by: str | None, payload: dict[str, Any] | None) -> Task:
    """Return a retry of a task, with another payload if one is given."""
    payload = task.payload if payload is None else payload
    # The policy of the task or its schedule applies to this run too.
    flow = task.flow.of_retry()
    scheduled_ms = None if task.scheduled_for is None else to_ms(task.scheduled_for, "moment")
    return Task(
        task_id=new_id(),
        user_id=task.user_id,
        priority=task.priority,
        payload=payload,
        name=task.name,
        schedule_id=task.schedule_id,
        scheduled_for=task.scheduled_for,
        run_type="retry",
        triggered_by=triggered_by,
        retry_of=task.task_id,
        policy=task.policy,
        tenant=task.tenant,
        flow=flow,
        document=task_document(
            task.user_id,
            task.name,
            task.priority,
            encode_payload(payload),
            task.schedule_id,
            scheduled_ms,
            origin={"by": triggered_by, "retry_of": task.task_id, "tenant": task.tenant},
            policy=encode_policy(task.policy),
            flow=flow,
        ),
    )
