"""The public functions on fire times, with datetimes: next, previous, listed, described."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from fairqueue.clock import LATEST_MS, from_ms, read_ms, to_ms
from fairqueue.errors import InvalidCron, InvalidSchedule, short_repr, shown
from fairqueue.recurrence.cron import HORIZON_YEARS
from fairqueue.recurrence.frequency import FIELD_NAMES, Frequency, as_cron
from fairqueue.recurrence.kinds import (
    CronRecurrence,
    IntervalRecurrence,
    LimitedRecurrence,
    OnceRecurrence,
    Recurrence,
    compile_form,
    compile_recurrence,
)
from fairqueue.recurrence.windows import check_windows
from fairqueue.recurrence.words import (
    cron_words,
    gap_words,
    interval_words,
    limits_words,
    offset_words,
    once_words,
    overlap_words,
)
from fairqueue.validation import check_count

# Runs that one call computes: at most a second of work.
MAX_RUNS = 10_000


# A rule as add_schedule takes it (an expression, a name such as EVERY_DAY, a builder, a dictionary
# of fields), a form, or a compiled recurrence.
Spec = str | Frequency | Mapping[str, Any] | Recurrence


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewedRun:
    """A future run, and the effect of a change of the clock on it."""

    utc: datetime
    # The same time on the wall clock.
    local: datetime
    # Local time minus UTC, as in "+01:00".
    offset: str
    # Whether the previous run had another offset.
    offset_changed: bool
    # "gap": its local time is skipped, so it runs at the end of the gap. "first" or "second": its
    # local time occurs twice, and the run is at this one.
    shift: Literal["", "gap", "first", "second"]
    # The same in words; may be empty.
    note: str


def next_run(spec: Spec, timezone: str | None, after: datetime) -> datetime:
    """Return the first fire time after an aware datetime, as an aware datetime in the zone.

    `spec` is a rule as in `add_schedule` (a cron expression, EVERY_DAY, `every().day`, a dictionary
    of fields), or a form or a recurrence, which has its own zone: then `timezone` is None. In a
    form, `at` and `anchor` may be aware datetimes or ISO 8601. Raises InvalidCron, or for a form
    InvalidSchedule, also if it does not fire within nine years; UnknownTimezone; and InvalidInput
    for a naive datetime.
    """
    recurrence = _recurrence(spec, timezone)
    moment_ms = recurrence.next_ms(to_ms(after, "after"))
    if moment_ms is not None:
        return _in_zone(recurrence, moment_ms)
    if _is_expression(spec):
        raise InvalidCron(
            f"{_expression(spec)!r} does not fire within {HORIZON_YEARS} years after {after}, or "
            "before the year 10000: choose days that occur more often"
        )
    raise InvalidSchedule(f"{shown(spec):.200} does not fire after {after}, or not for years")


def matches(spec: Spec, moment: datetime, timezone: str | None = None) -> bool:
    """Return whether a rule fires in the second of an aware datetime.

    An expression without a zone is in UTC; one of five fields fires at second 0. Raises as
    `next_run` does, except for a rule that never fires.
    """
    recurrence = _recurrence(spec, _zone_or_utc(spec, timezone))
    second = to_ms(moment, "moment") // 1000 * 1000
    return recurrence.next_ms(second - 1) in range(second, second + 1000)


def previous_run(spec: Spec, timezone: str | None, at: datetime) -> datetime | None:
    """Return the last fire time up to an aware datetime, as an aware datetime in the zone.

    None if there is none within nine years, or since 1970. Raises as `next_run` does.
    """
    recurrence = _recurrence(spec, timezone)
    moment_ms = recurrence.latest_ms(to_ms(at, "at"))
    return None if moment_ms is None else _in_zone(recurrence, moment_ms)


def between(
    spec: Spec, timezone: str | None, start: datetime, end: datetime, limit: int = 1000
) -> list[datetime]:
    """Return up to `limit` fire times in [start, end), as aware datetimes in the zone.

    At most 10,000. Raises as `next_run` does, except for a rule that never fires.
    """
    recurrence = _recurrence(spec, timezone)
    check_count(limit, "limit", least=1, most=MAX_RUNS)
    from_ms, until_ms = _ceil_ms(start, "start"), _ceil_ms(end, "end")
    return [_in_zone(recurrence, at) for at in recurrence.between(from_ms, until_ms, limit)]


def preview(
    spec: Spec, n: int, after: datetime, *, timezone: str | None = None
) -> list[PreviewedRun]:
    """Return the next `n` runs after an aware datetime, with the effects of clock changes.

    At most 10,000; fewer if there are no more. An expression without a zone is in UTC. Raises as
    `next_run` does.
    """
    recurrence = _recurrence(spec, _zone_or_utc(spec, timezone))
    check_count(n, "n", least=1, most=MAX_RUNS)
    after_ms = to_ms(after, "after")
    moments = recurrence.between(after_ms + 1, LATEST_MS + 1, n)
    offset = None
    if moments and (before := recurrence.previous_ms(moments[0])) is not None:
        offset = _offset(recurrence, before)
    runs = []
    for moment_ms in moments:
        runs.append(_previewed(recurrence, moment_ms, offset))
        offset = _offset(recurrence, moment_ms)
    return runs


def describe(spec: Spec, timezone: str | None = None, *, locale: str = "en_US") -> str:
    """Describe a rule or a form in words, with the zone if it is given.

    An expression is described in the language of `locale`, everything else in English. Raises as
    `next_run` does, InvalidInput for an unknown locale, and ConfigurationError if the package
    cron-descriptor, of the extra `cli`, is not installed.
    """
    if _is_expression(spec) and timezone is None:
        return cron_words(_expression(spec), locale)
    return _words(_recurrence(spec, timezone), locale)


def _words(recurrence: Recurrence, locale: str) -> str:
    if isinstance(recurrence, CronRecurrence):
        return f"{cron_words(recurrence.cron_expr, locale)} ({recurrence.timezone})"
    if isinstance(recurrence, IntervalRecurrence):
        return interval_words(recurrence.every_ms, recurrence.anchor_ms, recurrence.zone)
    if isinstance(recurrence, OnceRecurrence):
        return once_words(recurrence.at_ms, recurrence.zone)
    if isinstance(recurrence, LimitedRecurrence):
        limits = limits_words(recurrence.limits.form, recurrence.zone)
        return "; ".join([_words(recurrence.inner, locale), *limits])
    raise InvalidSchedule(f"{recurrence!r:.60} cannot be described")


def _is_expression(spec: Spec) -> bool:
    """Return whether a rule has no zone of its own."""
    if isinstance(spec, Mapping):
        return not FIELD_NAMES.isdisjoint(spec)
    return not isinstance(spec, Recurrence)


def _expression(spec: Any) -> str:
    is_plain = isinstance(spec, str) and not spec.upper().startswith("EVERY_")
    return spec if is_plain else as_cron(spec)


def _zone_or_utc(spec: Spec, timezone: str | None) -> str | None:
    return "UTC" if timezone is None and _is_expression(spec) else timezone


def _recurrence(spec: Spec, timezone: str | None) -> Recurrence:
    if _is_expression(spec):
        return compile_recurrence(_expression(spec), timezone)  # type: ignore[arg-type]  # it says what None lacks
    if timezone is not None:
        raise InvalidSchedule(
            f"timezone must be None for a form, which has its own, not {short_repr(timezone)}"
        )
    return spec if isinstance(spec, Recurrence) else compile_form(_stored(spec))


def _stored(form: Any) -> Any:
    """Return a form as it is stored, with times given as datetimes or text in milliseconds."""
    if not isinstance(form, Mapping):
        return form
    limits = form.get("limits")
    if isinstance(limits, Mapping):
        check_windows(limits.get("windows"))
    moments = {
        name: read_ms(form[name], name, InvalidSchedule)
        for name in ("at", "anchor")
        if isinstance(form.get(name), str | datetime)
    }
    return {**form, **moments}


def _previewed(recurrence: Recurrence, moment_ms: int, offset_before: int | None) -> PreviewedRun:
    zone, moment, offset = recurrence.zone, moment_ms // 1000, _offset(recurrence, moment_ms)
    rule = recurrence.inner if isinstance(recurrence, LimitedRecurrence) else recurrence
    fixed = isinstance(rule, CronRecurrence) and not rule.elapsed
    skipped = rule.skipped_local(moment_ms) if isinstance(rule, CronRecurrence) else None
    shift: Literal["", "gap", "first", "second"] = ""
    notes = []
    if skipped is not None:
        shift = "gap"
        notes.append(gap_words(zone, moment, skipped))
    elif showing := zone.showing(moment):
        shift = "second" if showing == 2 else "first"
        notes.append(overlap_words(zone, moment, only=fixed))
    changed = offset_before is not None and offset != offset_before
    if offset_before is not None and changed:
        notes.append(f"UTC{offset_words(offset)}, after UTC{offset_words(offset_before)} before")
    return PreviewedRun(
        utc=from_ms(moment_ms),
        local=_in_zone(recurrence, moment_ms),
        offset=offset_words(offset),
        offset_changed=changed,
        shift=shift,
        note="; ".join(notes),
    )


def _offset(recurrence: Recurrence, moment_ms: int) -> int:
    zone = recurrence.zone
    return zone.offsets[zone.period(moment_ms // 1000)]


def _in_zone(recurrence: Recurrence, moment_ms: int) -> datetime:
    return from_ms(moment_ms).astimezone(recurrence.zone.tzinfo)


def _ceil_ms(moment: datetime, what: str) -> int:
    """Return the time in milliseconds, rounded up."""
    floor = to_ms(moment, what)
    return floor + 1 if isinstance(moment, datetime) and moment.microsecond % 1000 else floor
