"""The errors of FairQueue: one tree, so that `except FairQueueError` catches all of them."""

import reprlib
from datetime import date, time, timedelta
from decimal import Decimal

# Few objects that are in each other again and again can have a repr that never ends.
_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxfrozenset = 20
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 200
LONGEST_SHOWN = 200  # characters of a text that a message shows


def shown(value: object) -> str:
    """A value as a message shows it: its repr; of a long text the beginning, and how long it is."""
    if isinstance(value, str | bytes):
        if len(value) <= LONGEST_SHOWN:
            return repr(value)
        what = "characters" if isinstance(value, str) else "bytes"
        return f"{value[:LONGEST_SHOWN]!r}... ({len(value)} {what})"
    try:
        return _REPR.repr(value)
    except Exception:  # the value's own code, or a number of thousands of digits
        return f"a {type(value).__name__} that cannot be shown"


def cut(text: str, most: int) -> str:
    """A text that may hold anything, at most so long."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


# What says no more than itself, whatever it was passed in as.
_PLAIN = (type(None), int, float, complex, Decimal, date, time, timedelta)


def is_plain(value: object) -> bool:
    """Whether a value is a number, a bool, None or a time: nothing that has secrets in it."""
    return isinstance(value, _PLAIN)


def kind_of(value: object) -> str:
    """The type of a value in words: "a dict", "an object"; None is "None"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[:1] in "aeiouAEIOU" else f"a {name}"


def told(value: object) -> str:
    """A value that may hold secrets, as a message tells of it: itself if plain, else its type."""
    return shown(value) if is_plain(value) else kind_of(value)


def plural(count: int, one: str, many: str | None = None) -> str:
    """A count with its noun: `1 task`, `1,200 tasks`; `many` where an s is not enough."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


class FairQueueError(Exception):
    """Something that FairQueue was asked for could not be done."""


# --- bad input: also ValueErrors; nothing was stored ----------------------------------------------


class InvalidInput(FairQueueError, ValueError):
    """A value that was passed in cannot be used; the message says what would be."""


class ConfigurationError(InvalidInput):
    """A constructor's argument, a setting or the server's own configuration is unusable."""


class InvalidTask(InvalidInput):
    """A task has an unusable id, user, name, priority or time, or its id means another task."""


class InvalidPayload(InvalidTask):
    """A payload is not a JSON object, or is too large or too deep; the message has the path."""


class UnknownTask(InvalidTask):
    """There is no task with this id."""


class UnknownUser(InvalidTask):
    """There is no user of this name."""


class UnknownWorker(InvalidInput):
    """There is no living worker with this id."""


class InvalidSchedule(InvalidInput):
    """A schedule has an unusable or unknown field."""


class UnknownSchedule(InvalidSchedule):
    """There is no schedule with this id."""


class InvalidCron(InvalidSchedule):
    """A cron expression cannot be read, or can never fire."""


class UnknownTimezone(InvalidSchedule):
    """A time zone is not in the tz database."""


# --- the state of things said no ------------------------------------------------------------------


class LeaseLost(FairQueueError):
    """The lease of a claim has ended, so another worker may own the task: nothing was changed."""


class QueueFull(FairQueueError):
    """The queue, or the user's part of it, has reached its limit: the task was not stored."""


class ScheduleConflict(FairQueueError):
    """The schedule id is taken, or the schedule kept changing while it was being updated."""


class StaleVersion(FairQueueError):
    """The object was changed since it was read: nothing was changed."""


class Forbidden(FairQueueError):
    """The actor's role or tenant does not allow this: nothing was changed."""


class ScheduleQuota(FairQueueError):
    """A user has as many schedules as the queue allows, or one is too frequent."""


class BrokenRecord(FairQueueError):
    """A record in Redis cannot be read; `TaskScheduler.problems()` lists those of schedules."""


class TimedOut(Exception):
    """Raised inside a handler that has run for longer than its time-out."""


# --- Redis ----------------------------------------------------------------------------------------


class RedisUnavailable(FairQueueError):
    """Redis did not answer in time. Whether it acted is unknown; the same call may be repeated."""


class RedisRefused(FairQueueError):
    """Redis said no (out of memory, no permission, a wrong-typed key): nothing was changed."""


class UnknownLayout(RedisRefused):
    """The queue has the layout of a later version of FairQueue: nothing was read or changed."""


class EmbeddedServerError(FairQueueError):
    """The embedded server cannot be started here; the message says what is missing."""
