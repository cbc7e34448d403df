"""What became of tasks: runs, attempts and failures."""

from fairqueue.history.runs import (
    Attempt,
    FailureGroup,
    Filters,
    History,
    Run,
    RunDetails,
    read_run,
)

__all__ = [
    "Attempt",
    "FailureGroup",
    "Filters",
    "History",
    "Run",
    "RunDetails",
    "read_run",
]
