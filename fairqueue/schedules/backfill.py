"""Push tasks for past fire times of a schedule that have none."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from operator import itemgetter

from fairqueue.clock import from_ms
from fairqueue.errors import InvalidSchedule, QueueFull, ScheduleConflict
from fairqueue.link.driver import in_batches
from fairqueue.link.operation import Call, Operation
from fairqueue.link.scripts import load_script
from fairqueue.models import encode_payload, new_id
from fairqueue.queue.waiting_room import make_room
from fairqueue.schedules.definition import Definition, task_texts
from fairqueue.schedules.outcomes import (
    BACKFILLED,
    Outcomes,
    check_range,
    read_outcomes,
    stored_tasks,
    task_id_of,
)
from fairqueue.schedules.plan import Plan
from fairqueue.schedules.planning import stretch
from fairqueue.schedules.store import ScheduleStore
from fairqueue.validation import Priority, check_count, check_name, check_priority

MAX_FILLED = 10_000  # tasks of one call
MAX_RANGE = 100_000  # fire times that one call looks at: a second or two
CHUNK = 200  # fire times in one script: about 5 ms of server time

# Outcomes without a task, as far as is known.
FILLABLE = ("skipped", "before")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfill:
    """What a backfill did, or would do.

    moments: fire times without a task. filled: those that got one. unknown: those that were left
    alone because it is not known whether they were fired. first, last: of those without a task.
    """

    dry_run: bool
    moments: int
    filled: int = 0
    unknown: int = 0
    first: datetime | None = None
    last: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillRequest:
    """What to fill, and how. Raises InvalidSchedule naming a bad value."""

    schedule_id: str
    start: object
    end: object
    limit: int
    priority: int
    by: str | None
    unknown_too: bool

    def __post_init__(self) -> None:
        check_range(self.start, self.end)
        if self.by is not None:
            check_name(self.by, "by", InvalidSchedule)
        check_count(self.limit, "limit", InvalidSchedule, least=1, most=MAX_FILLED)
        check_priority(self.priority, InvalidSchedule)


def backfill(store: ScheduleStore, request: BackfillRequest, dry_run: bool) -> Operation[Backfill]:
    """Fill fire times, or count them; see TaskScheduler.backfill."""
    filled = 0
    deadline = time.monotonic() + store.link.timeout
    while True:
        outcomes = yield from read_outcomes(store, request.schedule_id)
        _check_overlap(outcomes.stored.definition)
        runs, unknown = yield from _find(store, outcomes, request)
        moments = [ms for run in runs for ms in run]
        if len(moments) > request.limit:
            raise InvalidSchedule(
                f"schedule {request.schedule_id!r} has {len(moments)} fire times to fill, more "
                f"than the limit of {request.limit}: choose a shorter range, or a higher limit"
            )
        report = Backfill(
            dry_run=dry_run,
            moments=filled + len(moments),
            unknown=unknown,
            first=from_ms(moments[0]) if moments else None,
            last=from_ms(moments[-1]) if moments else None,
        )
        if dry_run:
            return report
        yield from store.ready()
        done, finished = yield from _fill(store, outcomes, request, runs, filled)
        filled += done
        if finished:
            return replace(report, filled=filled)
        if time.monotonic() > deadline:
            raise ScheduleConflict(
                f"schedule {request.schedule_id!r} was changed by others repeatedly: {filled} "
                "fire times were filled; the call may be repeated"
            )


def _check_overlap(definition: Definition) -> None:
    if definition.overlap == "cancel_previous":
        raise InvalidSchedule(
            f"schedule {definition.schedule_id!r} has overlap 'cancel_previous', so its next run "
            "would cancel the new tasks: change that first"
        )


def _find(
    store: ScheduleStore, outcomes: Outcomes, request: BackfillRequest
) -> Operation[tuple[list[list[int]], int]]:
    """Return the fire times to fill, by stretch, and how many are left alone as unknown."""
    start_ms, end_ms = check_range(request.start, request.end)
    moments = outcomes.moments(start_ms, min(end_ms, outcomes.now_ms + 1), MAX_RANGE + 1)
    if len(moments) > MAX_RANGE:
        raise InvalidSchedule(
            f"the range has more than {MAX_RANGE} fire times of schedule {request.schedule_id!r}: "
            "choose a shorter one"
        )
    wanted = {*FILLABLE, "unknown"} if request.unknown_too else set(FILLABLE)
    found = [(ms, outcomes.of(ms)[0], task_id_of(request.schedule_id, ms)) for ms in moments]
    # A fire time before the schedule was made, or an unknown one, may have a task.
    doubtful = [each for _, word, each in found if word in wanted and word != "skipped"]
    there = yield from stored_tasks(store, doubtful)
    runs: list[list[int]] = [[]]
    for ms, word, task_id in found:
        if word in wanted and task_id not in there:
            runs[-1].append(ms)
        elif runs[-1]:
            runs.append([])
    unknown = 0 if request.unknown_too else sum(word == "unknown" for _, word, _ in found)
    return [run for run in runs if run], unknown


def _fill(
    store: ScheduleStore,
    outcomes: Outcomes,
    request: BackfillRequest,
    runs: Sequence[Sequence[int]],
    before: int,
) -> Operation[tuple[int, bool]]:
    """Push the tasks, oldest first; return how many, and whether nothing has changed meanwhile."""
    definition, plan, filled = outcomes.stored.definition, outcomes.stored.plan, 0
    texts = task_texts(
        definition.schedule_id,
        definition.user_id,
        definition.name,
        Priority(request.priority),
        encode_payload(definition.payload),
        definition.options,
        by=request.by,
        is_backfill=True,
    )
    size = len(texts.document(0))
    items = [(number, ms) for number, run in enumerate(runs) for ms in run]
    for batch in in_batches(items, CHUNK, lambda _: size):
        revision = plan.next_revision()
        row = load_script("backfill").row
        rows = (row(moment=ms, document=texts.document(ms)) for _, ms in batch)
        call = Call(
            "backfill",
            op=new_id(),
            id=request.schedule_id,
            base=plan.base,
            revision=revision,
            user=definition.user_id,
            task_name=definition.name,
            head=texts.status_head,
            level=int(request.priority),
            notes="\n".join(_notes(batch)),
            rest=[field for each in rows for field in each],
        )
        answer = yield call
        if answer[:2] == [b"full", b"queue"] and (yield from make_room(store.link, len(batch))):
            call.arguments["op"] = new_id()
            answer = yield call
        if answer[0] == b"changed":
            return filled, False
        if answer[0] == b"pools":
            raise QueueFull(
                f"{before + filled} fire times of schedule {request.schedule_id!r} were filled; "
                f"its pool {definition.options['pool']!r} is new, and a queue can have at most 100 "
                "pools"
            )
        if answer[0] == b"full":
            raise QueueFull(
                f"{before + filled} fire times of schedule {request.schedule_id!r} were filled; "
                f"then the {answer[1].decode()} had as many waiting tasks as max_waiting allows. "
                "Repeat the call later to continue"
            )
        filled += int(answer[1])
        plan = Plan(revision.encode())
    return filled, True


def _notes(batch: Sequence[tuple[int, int]]) -> list[str]:
    """Return the notes of the fire times: one for each stretch."""
    notes = []
    for _, group in groupby(batch, key=itemgetter(0)):
        moments = [ms for _, ms in group]
        notes.append(stretch(moments[0], moments[-1], len(moments), BACKFILLED))
    return notes
