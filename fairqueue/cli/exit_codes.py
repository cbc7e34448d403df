"""The exit codes of the program, the same for every command."""

from fairqueue.errors import (
    AmbiguousTask,
    DuplicateTask,
    EmbeddedServerError,
    FairQueueError,
    InvalidInput,
    LeaseLost,
    RedisUnavailable,
    ScheduleConflict,
    StaleVersion,
    UnknownSchedule,
    UnknownTask,
    UnknownTenant,
    UnknownUser,
    UnknownWorker,
)

OK, FAILED, USAGE, NO_REDIS, NOT_FOUND, CONFLICT, UNHEALTHY = 0, 1, 2, 3, 4, 5, 6
INTERRUPTED = 130

# The first match counts: the Unknown errors are also InvalidInput.
_BY_ERROR: tuple[tuple[tuple[type[FairQueueError], ...], int], ...] = (
    ((UnknownSchedule, UnknownTask, UnknownUser, UnknownTenant, UnknownWorker), NOT_FOUND),
    ((ScheduleConflict, StaleVersion, LeaseLost, DuplicateTask), CONFLICT),
    ((InvalidInput, AmbiguousTask), USAGE),
    ((RedisUnavailable, EmbeddedServerError), NO_REDIS),
)


def exit_code(error: FairQueueError) -> int:
    """The exit code of an error."""
    return next((code for kinds, code in _BY_ERROR if isinstance(error, kinds)), FAILED)
