"""Make tasks of past moments of a schedule that did not become one."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from json.encoder import encode_basestring
from operator import itemgetter

from fairqueue.clock import from_ms
from fairqueue.errors import InvalidSchedule, QueueFull, ScheduleConflict
from fairqueue.link.connection import Link, in_batches
from fairqueue.link.scripts import load_script
from fairqueue.models import encode_payload, new_id, origin_fields, status_head, task_document
from fairqueue.retry_policy import encode_policy, status_fields
from fairqueue.schedules.outcomes import (
    BACKFILLED,
    Fates,
    check_range,
    read_fates,
    stored_tasks,
    task_id_of,
)
from fairqueue.schedules.planning import stretch
from fairqueue.schedules.store import Definition, ScheduleStore, new_revision, policy_of
from fairqueue.validation import Priority, check_count, check_name, check_priority

MAX_FILLED = 10_000  # tasks of one call
MAX_RANGE = 100_000  # moments that one call looks at: a second or two
CHUNK = 200  # moments in one script: some 5 ms of the server's time

# What has no task, as far as is known. Of an "unknown" moment it is not.
FILLABLE = ("skipped", "before")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backfill:
    """What a backfill did, or would do.

    moments: how many have no task. filled: how many got one. unknown: how many were left alone
    because nobody knows whether they were fired. first, last: of the moments without a task.
    """

    dry_run: bool
    moments: int
    filled: int = 0
    unknown: int = 0
    first: datetime | None = None
    last: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be filled, and how, checked."""

    schedule_id: str
    from_ms: int
    until_ms: int
    limit: int
    priority: Priority
    by: str | None
    unknown_too: bool

    @classmethod
    def create(
        cls,
        schedule_id: str,
        start: object,
        end: object,
        limit: int,
        priority: int,
        by: str | None,
        unknown_too: bool,
    ) -> "Request":
        """Raises InvalidSchedule naming the value."""
        from_ms, until_ms = check_range(start, end)
        if by is not None:
            check_name(by, "by", InvalidSchedule)
        return cls(
            schedule_id=schedule_id,
            from_ms=from_ms,
            until_ms=until_ms,
            limit=check_count(limit, "limit", InvalidSchedule, least=1, most=MAX_FILLED),
            priority=check_priority(priority, InvalidSchedule),
            by=by,
            unknown_too=unknown_too,
        )


def backfill(link: Link, store: ScheduleStore, request: Request, dry_run: bool) -> Backfill:
    """Fill moments, or count them; see TaskScheduler.backfill."""
    filled = 0
    deadline = time.monotonic() + link.timeout
    while True:
        fates = read_fates(link, store, request.schedule_id)
        _check_overlap(fates.stored.definition)
        runs, unknown = _find(link, fates, request)
        moments = [ms for run in runs for ms in run]
        if len(moments) > request.limit:
            raise InvalidSchedule(
                f"{len(moments)} moments of schedule {request.schedule_id!r} are to be filled: "
                f"more than the limit of {request.limit}; choose a shorter range, or a higher limit"
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
        done, finished = _fill(link, fates, request, runs, filled)
        filled += done
        if finished:
            return replace(report, filled=filled)
        if time.monotonic() > deadline:
            raise ScheduleConflict(
                f"schedule {request.schedule_id!r} was changed by others again and again: {filled} "
                "moments were filled; the call may be repeated"
            )


def _check_overlap(definition: Definition) -> None:
    if definition.overlap == "cancel_previous":
        raise InvalidSchedule(
            f"schedule {definition.schedule_id!r} has overlap 'cancel_previous', so that its next "
            "run would cancel what is filled: change that first"
        )


def _find(link: Link, fates: Fates, request: Request) -> tuple[list[list[int]], int]:
    """The moments to fill, and how many are left alone because nothing is known of them."""
    until_ms = min(request.until_ms, fates.now_ms + 1)
    moments = fates.moments(request.from_ms, until_ms, MAX_RANGE + 1)
    if len(moments) > MAX_RANGE:
        raise InvalidSchedule(
            f"the range has more than {MAX_RANGE} moments of schedule {request.schedule_id!r}: "
            "choose a shorter one"
        )
    wanted = {*FILLABLE, "unknown"} if request.unknown_too else set(FILLABLE)
    outcomes = [fates.fate(ms)[0] for ms in moments]
    # What is before it was made, or not known, may have a task all the same.
    doubtful = [
        task_id_of(request.schedule_id, ms)
        for ms, outcome in zip(moments, outcomes, strict=True)
        if outcome in wanted and outcome != "skipped"
    ]
    there = stored_tasks(link, doubtful)
    runs: list[list[int]] = [[]]
    for ms, outcome in zip(moments, outcomes, strict=True):
        if outcome in wanted and task_id_of(request.schedule_id, ms) not in there:
            runs[-1].append(ms)
        elif runs[-1]:
            runs.append([])
    unknown = 0 if request.unknown_too else outcomes.count("unknown")
    return [run for run in runs if run], unknown


def _fill(
    link: Link, fates: Fates, request: Request, runs: Sequence[Sequence[int]], before: int
) -> tuple[int, bool]:
    """Enqueue the tasks, oldest first: how many, and whether nobody came between."""
    definition = fates.stored.definition
    head = _status_head(definition, request)
    document, tail = _document(definition, request)
    base, filled = fates.stored.revision, 0
    items = [(number, ms) for number, run in enumerate(runs) for ms in run]
    for batch in in_batches(items, CHUNK, lambda _: len(document) + len(tail)):
        revision = new_revision(base)
        row = load_script("backfill").row
        rows = (row(moment=ms, document=f"{document}{ms}{tail}") for _, ms in batch)
        answer = link.run(
            "backfill",
            op=new_id(),
            id=request.schedule_id,
            base=base,
            revision=revision,
            user=definition.user_id,
            task_name=definition.name,
            head=head,
            level=int(request.priority),
            notes="\n".join(_notes(batch)),
            rest=[field for each in rows for field in each],
        )
        if answer[0] == b"changed":
            return filled, False
        if answer[0] == b"full":
            raise QueueFull(
                f"{before + filled} moments of schedule {request.schedule_id!r} were filled, then "
                f"the {answer[1].decode()} had as many waiting tasks as max_waiting allows; the "
                "call may be repeated, and goes on there"
            )
        filled += int(answer[1])
        base = revision
    return filled, True


def _notes(batch: Sequence[tuple[int, int]]) -> list[str]:
    """What is noted of the moments: one note for those with no other of the rule between them."""
    notes = []
    for _, group in groupby(batch, key=itemgetter(0)):
        moments = [ms for _, ms in group]
        notes.append(stretch(moments[0], moments[-1], len(moments), BACKFILLED))
    return notes


def _document(definition: Definition, request: Request) -> tuple[str, str]:
    """The document of a task, before and after its moment."""
    head, mark, tail = task_document(
        definition.user_id,
        definition.name,
        request.priority,
        encode_payload(definition.payload),
        definition.schedule_id,
        0,
        origin={"by": request.by, "tenant": definition.rare["tenant"]},
        policy=encode_policy(policy_of(definition.rare)),
    ).partition('"scheduled_for":0')
    return head + mark[:-1], tail


def _status_head(definition: Definition, request: Request) -> str:
    # Without its max_failures: what fails now says nothing about the runs of today.
    return (
        status_head(definition.user_id, definition.name, request.priority)
        + f',"schedule":{encode_basestring(definition.schedule_id)},"type":"scheduled"'
        + origin_fields({"by": request.by, "tenant": definition.rare["tenant"]})
        + status_fields(policy_of(definition.rare))
    )
