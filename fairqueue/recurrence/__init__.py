"""Times at which schedules fire, without Redis: cron, intervals, zones, windows, descriptions."""

from fairqueue.recurrence.cron import resolve_hashed
from fairqueue.recurrence.frequency import as_cron, every, from_fields, symbolic
from fairqueue.recurrence.kinds import (
    LARGEST_STEP_MS,
    SMALLEST_STEP_MS,
    CronRecurrence,
    IntervalRecurrence,
    LimitedRecurrence,
    OnceRecurrence,
    Recurrence,
    compile_form,
    compile_recurrence,
)
from fairqueue.recurrence.moments import (
    MAX_RUNS,
    PreviewedRun,
    Spec,
    between,
    describe,
    matches,
    next_run,
    preview,
    previous_run,
)
from fairqueue.recurrence.windows import Calendars

__all__ = [
    "LARGEST_STEP_MS",
    "MAX_RUNS",
    "SMALLEST_STEP_MS",
    "Calendars",
    "CronRecurrence",
    "IntervalRecurrence",
    "LimitedRecurrence",
    "OnceRecurrence",
    "PreviewedRun",
    "Recurrence",
    "Spec",
    "as_cron",
    "between",
    "compile_form",
    "compile_recurrence",
    "describe",
    "every",
    "from_fields",
    "matches",
    "next_run",
    "preview",
    "previous_run",
    "resolve_hashed",
    "symbolic",
]
