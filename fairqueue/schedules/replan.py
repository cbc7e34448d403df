"""Compute the next runs of all schedules again, after an update of the time zone data."""

import logging
from dataclasses import dataclass

import pytz

from fairqueue.errors import FairQueueError, RedisUnavailable
from fairqueue.link.operation import Ask, Call, Now, Operation, operation, steps
from fairqueue.logs import log_event
from fairqueue.models import new_id
from fairqueue.schedules.definition import ENGINE, Stored
from fairqueue.schedules.search import MAX_LISTED, ScheduleFilter, ids_of, walk
from fairqueue.schedules.store import ScheduleStore

logger = logging.getLogger("fairqueue.control")

# A fire time as close as this is left as it was planned, so that replanning loses none.
REPLAN_MARGIN_MS = 30_000
_ALL = ScheduleFilter()


def zone_data() -> str:
    """Return which zone data and rules this process computes fire times by."""
    olson, version = getattr(pytz, "OLSON_VERSION", "?"), getattr(pytz, "__version__", "?")
    return f"{olson} (pytz {version}), engine {ENGINE}"


@dataclass(slots=True, kw_only=True)
class Replanned:
    """How many active schedules were looked at, and how many have another next run now."""

    looked_at: int = 0
    changed: int = 0
    failed: int = 0


class Replanner:
    """Computes the next runs of all active schedules again, page by page.

    It moves only future fire times. One that is due, or will be in a moment, is fired as it was
    planned, and so is one that a user has set.
    """

    def __init__(self, store: ScheduleStore) -> None:
        self.link = store.link
        self._store = store
        self._start = _ALL.bounds[0]  # moves on when a page is done: a step can be repeated
        self.report = Replanned()

    @property
    def is_begun(self) -> bool:
        """Whether a page is done."""
        return self._start != _ALL.bounds[0]

    @operation
    def is_needed(self) -> Operation[bool]:
        """Return whether the queue was last planned by other zone data or rules than ours."""
        (text,) = yield Ask(("HGET", self.link.keys["settings"], "tzdata"))
        return bool(text != zone_data().encode())

    @operation
    def step(self) -> Operation[bool]:
        """Look at one page; return False after the last, when our zone data has been recorded."""
        members = yield from walk(self._store, _ALL, self._start, MAX_LISTED)
        if not members:
            yield Call("configure", op=new_id(), rest=["tzdata", zone_data()])
            return False
        for stored in (yield from steps(self._store.stored)(ids_of(members))):
            if stored is not None and stored.is_active:
                self.report.looked_at += 1
                yield from self._replan(stored)
        self._start = b"(" + members[-1]
        return True

    def _replan(self, stored: Stored) -> Operation[None]:
        definition, nominal_ms = stored.definition, stored.plan.nominal_ms
        now_ms = yield Now()
        if nominal_ms is None or nominal_ms == stored.plan.set_ms:
            return
        if nominal_ms <= now_ms + REPLAN_MARGIN_MS:
            return
        try:
            if definition.recurrence.next_ms(now_ms) == nominal_ms:
                return
            # Setting the same zone computes the next run again, and changes nothing else.
            patch = {"timezone": definition.timezone}
            if (yield from steps(self._store.update)(definition.schedule_id, patch)):
                self.report.changed += 1
        except RedisUnavailable:
            raise
        except FairQueueError as error:
            # It has no fire time any more, or its zone is unknown: its old plan stays.
            self.report.failed += 1
            log_event(
                logger,
                "replan_failed",
                logging.WARNING,
                schedule=definition.schedule_id,
                error=str(error),
            )
