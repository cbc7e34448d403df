"""The exceptions of FairQueue, all derived from FairQueueError, and how messages show values."""

import reprlib
from datetime import date, time, timedelta
from decimal import Decimal

# The repr of objects with shared references can be unbounded.
_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxfrozenset = 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 200
LONGEST_SHOWN = 200  # characters of a string in a message


def shown(value: object) -> str:
    """Return the repr of a value, with long strings cut and followed by their length."""
    if isinstance(value, str | bytes):
        if len(value) <= LONGEST_SHOWN:
            return repr(value)
        what = "characters" if isinstance(value, str) else "bytes"
        return f"{value[:LONGEST_SHOWN]!r}... ({len(value)} {what})"
    try:
        return _REPR.repr(value)
    except Exception:  # the value's own __repr__ failed, or a number has thousands of digits
        return f"a {type(value).__name__} that cannot be shown"


def truncate(text: str, most: int) -> str:
    """Return the text, truncated to at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def short_repr(value: object) -> str:
    """Return the repr of a value, truncated to about 60 characters."""
    return truncate(shown(value), 63)


# Values of these types cannot contain a secret.
_PLAIN = (type(None), int, float, complex, Decimal, date, time, timedelta)


def is_plain(value: object) -> bool:
    """Return whether a value is a number, a bool, None or a time, which contain no secrets."""
    return isinstance(value, _PLAIN)


def kind_of(value: object) -> str:
    """Return the type of a value with its article: "a dict", "an object"; "None" for None."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[:1] in "aeiouAEIOU" else f"a {name}"


def safe_repr(value: object) -> str:
    """Return the repr of a plain value, or else only the type, so that secrets do not leak."""
    return shown(value) if is_plain(value) else kind_of(value)


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun: `1 task`, `1,200 tasks`. Give `many` for irregular plurals."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


class FairQueueError(Exception):
    """The base of all errors of FairQueue."""


# --- bad input: also ValueErrors; nothing was stored ----------------------------------------------


class InvalidInput(FairQueueError, ValueError):
    """An argument is invalid; the message says what is valid."""


class ConfigurationError(InvalidInput):
    """A constructor argument, a setting or the configuration of the Redis server is invalid."""


class WrongPartitions(ConfigurationError):
    """The queue has another number of partitions than the client was made for: `stored`."""

    def __init__(self, stored: int, wanted: int) -> None:
        super().__init__(
            f"this queue has {stored} partition{'s' * (stored > 1)}, and this client was made for "
            f"{wanted}: pass partitions={stored}; the number never changes, but `fairqueue "
            "repartition` moves what is stored to a new queue"
        )
        self.stored = stored


class InvalidTask(InvalidInput):
    """A task has an invalid id, user, name, priority or time, or its id belongs to another task."""


class InvalidPayload(InvalidTask):
    """A payload is not a JSON object, is too large or too deep; the message contains the path."""


class UnknownTask(InvalidTask):
    """There is no task with this id."""


class UnknownUser(InvalidTask):
    """There is no user with this id."""


class UnknownTenant(InvalidInput):
    """There is no tenant with this name."""


class UnknownWorker(InvalidInput):
    """No live worker has this id."""


class InvalidSchedule(InvalidInput):
    """A schedule has an invalid or unknown field."""


class UnknownSchedule(InvalidSchedule):
    """There is no schedule with this id."""


class InvalidCron(InvalidSchedule):
    """A cron expression is invalid, or never fires."""


class UnknownTimezone(InvalidSchedule):
    """A time zone is not in the tz database."""


# --- not possible in the current state ------------------------------------------------------------


class LeaseLost(FairQueueError):
    """The lease of a claim has ended and another worker may own the task. Nothing was changed."""


class QueueFull(FairQueueError):
    """The queue, or this user's share of it, is at its limit. Nothing was stored.

    is_of_queue: whether it is max_waiting of the queue that is reached.
    """

    is_of_queue = False


class DuplicateTask(FairQueueError):
    """Another task has this unique key. Nothing was stored. `task_id` is the id of that task."""

    def __init__(self, message: str, task_id: str = "") -> None:
        super().__init__(message)
        self.task_id = task_id


class AmbiguousTask(FairQueueError):
    """Tasks of several tenants have this id: pass `tenant=` to say which one is meant."""


class ScheduleConflict(FairQueueError):
    """The schedule id is taken, or the schedule kept changing while it was being updated."""


class StaleVersion(FairQueueError):
    """The object has changed since it was read. Nothing was changed."""


class Forbidden(FairQueueError):
    """The actor's role or tenant does not allow this. Nothing was changed."""


class ScheduleQuota(FairQueueError):
    """A user has reached the schedule quota, or a schedule fires too often."""


class QueueInUse(FairQueueError):
    """A queue that has to be at rest is in use; the message says by whom. Nothing was moved."""


class RepartitionError(FairQueueError):
    """A queue cannot be moved, or another process moves it now. The move can be repeated safely."""


class BrokenRecord(FairQueueError):
    """A record in Redis is damaged; `TaskScheduler.problems()` lists damaged schedules."""


class TimedOut(Exception):
    """Raised inside a handler that has exceeded its time-out."""


# --- Redis ----------------------------------------------------------------------------------------


class RedisUnavailable(FairQueueError):
    """Redis did not answer in time. The command may have run; the call can be retried safely."""


class RedisRefused(FairQueueError):
    """Redis refused a command: out of memory, no permission, wrong type. Nothing was changed."""


class UnknownLayout(RedisRefused):
    """A later version of FairQueue has written this queue. Nothing was read or changed."""


class EmbeddedServerError(FairQueueError):
    """The embedded server cannot start; the message says what is missing."""
