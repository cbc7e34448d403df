"""How tasks end: the words of records, runs, counters and the index of ended runs.

`lua/lib/outcomes.lua` has the same table.
"""

from typing import NamedTuple


class Outcome(NamedTuple):
    """How a task ended, in each vocabulary.

    A task that timed out is counted by the counter of its state as well.
    """

    status: str  # of the run
    state: str  # of the task
    counter: str  # in the key `stats`
    letter: str  # in the key `runs`


OUTCOMES = (
    Outcome("succeeded", "finished", "finished", "s"),
    Outcome("failed", "buried", "buried", "f"),
    Outcome("timed_out", "buried", "timed_out", "t"),
    Outcome("cancelled", "cancelled", "cancelled", "c"),
    Outcome("expired", "expired", "expired_tasks", "e"),
)
STATUS_OF_STATE = {
    "finished": "succeeded",
    "buried": "failed",
    "cancelled": "cancelled",
    "expired": "expired",
}
LETTERS = {outcome.status: outcome.letter for outcome in OUTCOMES}
STATUS_OF_LETTER = {outcome.letter: outcome.status for outcome in OUTCOMES}
# The letter of tasks that were cancelled before they ran, and the kind of those that did not run.
NEVER_RAN = "d"


def ended_status(state: str, *, timed_out: bool) -> str:
    """Return the status of a run whose task ended in `state`. Raises KeyError for other states."""
    return "timed_out" if state == "buried" and timed_out else STATUS_OF_STATE[state]
