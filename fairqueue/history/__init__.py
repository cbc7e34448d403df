"""The history of tasks: runs, attempts and failures."""

from fairqueue.history.filters import Filters
from fairqueue.history.records import Attempt, FailureGroup, Run, RunDetails, read_run
from fairqueue.history.runs import History

__all__ = [
    "Attempt",
    "FailureGroup",
    "Filters",
    "History",
    "Run",
    "RunDetails",
    "read_run",
]
