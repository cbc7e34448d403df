"""Decide what a schedule fires, and when it acts next: plain functions of the time."""

from dataclasses import dataclass, replace

from fairqueue.recurrence.jitter import jitter_ms
from fairqueue.recurrence.kinds import Recurrence

MISSED_CAP = 1000  # missed fire times are counted up to this many at once
MISFIRE_GRACE_MS = 60_000  # with misfire="skip", a run that is at most this late is still fired


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The fire times of a schedule and its policies; times in ms."""

    schedule_id: str
    recurrence: Recurrence
    misfire: str = "fire_once"
    catch_up_ms: int = 86_400_000
    max_catch_up: int = 100
    jitter_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now.

    moment_ms: the fire time to fire, or None. next_ms, due_ms: the next fire time and when to act
    on it, None if there is none. missed: how many fire times are given up; `note` records them.
    """

    moment_ms: int | None
    next_ms: int | None
    due_ms: int | None
    missed: int = 0
    note: str = ""


def due_ms(rules: Rules, moment_ms: int) -> int:
    """Return when to act on a fire time: at once, or a little later by its jitter."""
    if not rules.jitter_ms:
        return moment_ms
    following = rules.recurrence.next_ms(moment_ms)
    return moment_ms + jitter_ms(rules.schedule_id, moment_ms, rules.jitter_ms, following)


def stretch(first_ms: int, last_ms: int, count: int, reason: str) -> str:
    """Return the note of fire times with one outcome; see lua/lib/moments.lua."""
    return f"{last_ms:013d}\0{first_ms:013d}\0{count}\0{reason}"


def plan(rules: Rules, nominal_ms: int, now_ms: int) -> Decision:
    """Return what to fire when the planned time has come, or has passed unnoticed."""
    next_ms = rules.recurrence.next_ms(nominal_ms)
    if rules.misfire == "fire_once" and (next_ms is None or next_ms > now_ms):
        return _step(rules, nominal_ms, next_ms)  # the common case
    last_ms = _last_come_ms(rules, nominal_ms, now_ms)
    if rules.misfire == "skip":
        on_time = now_ms - due_ms(rules, last_ms) <= MISFIRE_GRACE_MS
        return _fire_from(rules, nominal_ms, last_ms, last_ms if on_time else None, "misfire")
    if rules.misfire == "fire_all":
        first_ms = _first_caught_up_ms(rules, nominal_ms, last_ms, now_ms)
        return _fire_from(rules, nominal_ms, last_ms, first_ms, "not caught up")
    return _fire_from(rules, nominal_ms, last_ms, last_ms, "missed")


def _last_come_ms(rules: Rules, nominal_ms: int, now_ms: int) -> int:
    """Return the latest fire time to act on by now; at least the planned one."""
    last_ms = rules.recurrence.latest_ms(now_ms)
    if last_ms is not None and last_ms > nominal_ms and due_ms(rules, last_ms) > now_ms:
        # Its jitter is not over. That of the one before is: it never passes the next fire time.
        last_ms = rules.recurrence.previous_ms(last_ms)
    return nominal_ms if last_ms is None else max(nominal_ms, last_ms)


def _first_caught_up_ms(rules: Rules, nominal_ms: int, last_ms: int, now_ms: int) -> int | None:
    """Return the oldest fire time to catch up on; the others follow, one by one.

    Those before the window are given up, and the oldest beyond max_catch_up. One that is no later
    than the grace is on time, whatever the window.
    """
    recurrence = rules.recurrence
    window_ms = now_ms - max(rules.catch_up_ms, MISFIRE_GRACE_MS)
    first_ms: int | None = nominal_ms
    if due_ms(rules, nominal_ms) < window_ms:
        first_ms = recurrence.next_ms(max(nominal_ms, window_ms - 1))
    if first_ms is None or first_ms > last_ms:
        return None
    if 1 + recurrence.count(first_ms + 1, last_ms + 1, rules.max_catch_up) <= rules.max_catch_up:
        return first_ms
    for _ in range(rules.max_catch_up - 1):
        last_ms = recurrence.previous_ms(last_ms) or first_ms
    return last_ms


def _step(rules: Rules, moment_ms: int | None, next_ms: int | None) -> Decision:
    due = None if next_ms is None else due_ms(rules, next_ms)
    return Decision(moment_ms=moment_ms, next_ms=next_ms, due_ms=due)


def _fire_from(
    rules: Rules, nominal_ms: int, last_ms: int, moment_ms: int | None, reason: str
) -> Decision:
    """Fire `moment_ms`, and give up those from the planned one until before it; None: all."""
    recurrence = rules.recurrence
    step = _step(rules, moment_ms, recurrence.next_ms(last_ms if moment_ms is None else moment_ms))
    if moment_ms == nominal_ms:
        return step
    if moment_ms is not None:
        last_ms = max(nominal_ms, recurrence.previous_ms(moment_ms) or nominal_ms)
    # The planned time may not be one of the rule's: a user can set next_run.
    missed = 1 + recurrence.count(nominal_ms + 1, last_ms + 1, MISSED_CAP - 1)
    return replace(step, missed=missed, note=stretch(nominal_ms, last_ms, missed, reason))
