"""What a scheduler does in one partition: it leads there or follows, fires, and looks it over."""

import math
import time

from fairqueue.alerts import Alerts
from fairqueue.link.connection import Link
from fairqueue.metrics.collectors import SchedulerMetrics
from fairqueue.scheduler.firing import Firing
from fairqueue.scheduler.leadership import Leadership, Reading
from fairqueue.schedules.replan import Replanner
from fairqueue.schedules.store import ScheduleStore

LOOK_OVER_MS = 10_000  # how often a leader ends runs that do not respond and checks the backlog
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # after a failure, before the partition is asked again


class Post:
    """One partition, or the queue if it has no partitions, and what a scheduler knows of it."""

    def __init__(
        self,
        whole: ScheduleStore,
        link: Link,
        leadership: Leadership,
        metrics: SchedulerMetrics,
        alerts: Alerts,
        queue_name: str,
    ) -> None:
        self.link = link
        self.number = link.keys.partition
        self.leadership = leadership
        self.store = whole.at(link) if whole.link.parts else whole
        self.firing = Firing(self.store, whole, leadership, metrics, alerts, queue_name)
        self.replanner: Replanner | None = None  # from its election until all is replanned
        self.looked_ms: int | None = None  # when it was last looked over
        self.heard: list[bytes] = []  # notices that were passed on then
        # Until when it is led from here, and when to take it although others should have done so;
        # both by the clock of `Spread`.
        self.led_until_ms = -math.inf
        self.ask_ms = math.inf
        self._pause_s = 0.0
        self._silent_until = 0.0

    def looks(self, reading: Reading) -> bool:
        """Whether the time has come to look the partition over."""
        at_ms = reading.now_ms
        if self.looked_ms is not None and abs(at_ms - self.looked_ms) < LOOK_OVER_MS:
            return False
        self.looked_ms = at_ms
        return True

    @property
    def is_held(self) -> bool:
        """Whether it was led from here when last heard of, even if the term is over by now."""
        return self.leadership.holds

    @property
    def is_failing(self) -> bool:
        """Whether the last request to it failed."""
        return self._pause_s > 0

    @property
    def is_silent(self) -> bool:
        """Whether it is not to be asked now, because it failed a moment ago."""
        return self.is_failing and time.monotonic() < self._silent_until

    def note_answer(self) -> None:
        """Note that it has answered."""
        self._pause_s = 0.0

    def note_failure(self) -> None:
        """Note that it has not answered: it is asked again after a pause."""
        self.leadership.doubt()
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
        self._silent_until = time.monotonic() + self._pause_s
