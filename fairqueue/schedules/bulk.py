"""Act on many schedules, one by one, and count how it went."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairqueue.errors import (
    LONGEST_SHOWN,
    FairQueueError,
    InvalidSchedule,
    RedisUnavailable,
    UnknownSchedule,
    UnknownTask,
    shown,
    truncate,
)
from fairqueue.link.operation import Operation
from fairqueue.schedules.fields import check_patch

ACTIONS = ("pause", "resume", "remove", "update", "trigger")
MAX_ERRORS = 100  # that a bulk operation names; the others are counted

Progress = Callable[[int, int], object]


@dataclass(slots=True, kw_only=True)
class BulkResult:
    """What a bulk operation did, or would do.

    matched: how many items the filter has found. done, gone (removed by others meanwhile), failed
    and left (not tried, because Redis was gone) add up to it, unless it was a dry run.
    errors: what was wrong, by id; the first hundred.
    """

    action: str
    dry_run: bool
    matched: int
    done: int = 0
    gone: int = 0
    failed: int = 0
    left: int = 0
    errors: dict[str, str] = field(default_factory=dict)


def check_action(action: object, changes: Mapping[str, Any]) -> str:
    """Check a bulk action and its changes. Raises InvalidSchedule."""
    if action not in ACTIONS:
        raise InvalidSchedule(f"action must be one of {', '.join(ACTIONS)}, not {shown(action)}")
    if action == "update" and not changes:
        raise InvalidSchedule("update needs at least one field to change")
    if action != "update" and changes:
        names = truncate(", ".join(sorted(changes)), LONGEST_SHOWN)
        raise InvalidSchedule(f"{action} takes no changes; {names} are given")
    if action == "update":
        check_patch(changes)
    return str(action)


def run_bulk(
    result: BulkResult,
    ids: Sequence[str],
    act: Callable[[str], Operation[object]],
    progress: Progress | None = None,
    stop_on: tuple[type[FairQueueError], ...] = (RedisUnavailable,),
) -> Operation[BulkResult]:
    """Act on each item; one that fails does not stop the others, unless by an error of `stop_on`.

    `act` returns False for an item that is gone.
    """
    for number, each in enumerate(ids, start=1):
        try:
            if (yield from act(each)) is False:
                result.gone += 1
            else:
                result.done += 1
        except (UnknownSchedule, UnknownTask):
            result.gone += 1
        except FairQueueError as error:
            result.failed += 1
            if len(result.errors) < MAX_ERRORS:
                result.errors[each] = str(error)
            if isinstance(error, stop_on):
                # Without Redis, each of the others would wait for the time-out.
                result.left = len(ids) - number
                break
        if progress is not None:
            progress(number, len(ids))
    return result
