"""Gather claimed tasks of one name for a handler that takes many in one call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fairqueue.worker.lease_keeper import ActiveRun


@dataclass(slots=True, eq=False)
class Unit:
    """What a slot runs in one call: a task, or a batch of tasks. `since`: when it was complete."""

    runs: list[ActiveRun]
    since: float

    @property
    def is_batch(self) -> bool:
        """Whether the handler gets a list, maybe of a single task."""
        return batch_size(self.runs[0]) > 0


@dataclass(slots=True)
class _Gathering:
    size: int
    until: float
    runs: list[ActiveRun] = field(default_factory=list)


class Batches:
    """The tasks that wait for others of their batch. Not safe for threads; times are passed in.

    longest: no task waits longer than this many seconds, whatever its handler allows.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._gatherings: dict[str, _Gathering] = {}  # by name

    def __len__(self) -> int:
        """How many batches are being gathered."""
        return len(self._gatherings)

    def add(self, run: ActiveRun, now: float) -> Iterator[Unit]:
        """Take a run; return what can be run now: itself if its handler takes one, or a batch."""
        handler, size = run.handler, batch_size(run)
        if handler is None or not size:
            yield Unit([run], now)
            return
        gathering = self._gatherings.get(handler.name)
        if gathering is None:
            until = now + min(handler.settings.batch_wait, self._longest)
            gathering = self._gatherings[handler.name] = _Gathering(size, until)
        gathering.runs.append(run)
        if len(gathering.runs) >= size:
            del self._gatherings[handler.name]
            yield from units(gathering.runs, now)

    def due(self, now: float) -> list[Unit]:
        """Return the batches that have waited long enough, as they are."""
        over = [name for name, each in self._gatherings.items() if each.until <= now]
        return [unit for name in over for unit in units(self._gatherings.pop(name).runs, now)]

    def missing(self) -> dict[str, int]:
        """Return how many more tasks of each name would complete a batch."""
        return {name: each.size - len(each.runs) for name, each in self._gatherings.items()}

    def until(self) -> float | None:
        """Return when the next batch has waited long enough; None if none is being gathered."""
        return min((each.until for each in self._gatherings.values()), default=None)

    def take_all(self) -> list[ActiveRun]:
        """Return all tasks, which then wait no more."""
        runs = [run for each in self._gatherings.values() for run in each.runs]
        self._gatherings.clear()
        return runs


def batch_size(run: ActiveRun) -> int:
    """Return how many tasks the handler of a run takes in one call; 0 if it takes one by itself."""
    return 0 if run.handler is None else run.handler.settings.batch


def units(runs: Sequence[ActiveRun], now: float) -> list[Unit]:
    """Return the calls for the tasks of one batch: of one user or tenant if its handler says so.

    The time-out of a task may differ from that of its handler, and is that of its call.
    """
    groups: dict[object, list[ActiveRun]] = {}
    for run in runs:
        groups.setdefault(_group_of(run), []).append(run)
    return [Unit(group, now) for group in groups.values()]


def _group_of(run: ActiveRun) -> object:
    handler, task = run.handler, run.claim.task
    if handler is None or handler.settings.batch_by is None:
        return handler and handler.timeout
    if handler.settings.batch_by == "tenant" and task.tenant is not None:
        return handler.timeout, task.tenant
    return handler.timeout, task.tenant, task.user_id
