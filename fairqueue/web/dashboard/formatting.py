"""Write values for people: the filters and functions that templates use."""

import json
import math
import re
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any
from urllib.parse import quote

from markupsafe import Markup, escape

from fairqueue.errors import UnknownTimezone, plural
from fairqueue.history.records import Run
from fairqueue.inspection.views import ScheduleView
from fairqueue.link.keys import command_line
from fairqueue.models import ScheduledTask
from fairqueue.reasons import Reason, estimate, sentence
from fairqueue.recurrence.zones import find_zone

NOTHING = "–"
MAX_SHORT = 18  # characters of an id in a table


# --- numbers and durations ------------------------------------------------------------------------


def number(value: float | None, digits: int = 0) -> str:
    """`12345` -> `12,345`; a dash for None."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    """`0.123` -> `12.3 %`."""
    if value is None:
        return NOTHING
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 99.95 or percent == 0 else f"{percent:.1f} %"


def duration(seconds: float | None) -> str:
    """A duration in one or two units: `340 ms`, `4.2 s`, `3 min 5 s`, `2 d 4 h`."""
    if seconds is None:
        return NOTHING
    if seconds < 0:
        return f"−{duration(-seconds)}"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        text = f"{seconds:.1f}".removesuffix(".0")
        return f"{text} s"
    whole = round(seconds)
    units = (("min", 60), ("h", 3600), ("d", 86_400))
    place = 0 if whole < 3600 else 1 if whole < 86_400 else 2
    (unit, length), (below, lower) = units[place], (("s", 1), *units)[place]
    many, rest = divmod(whole, length)
    rest //= lower
    return f"{many} {unit} {rest} {below}" if rest else f"{many} {unit}"


def brief(seconds: float | None) -> str:
    """A duration in one unit: `4.2 s`, `12.6 min`, `2.1 d`."""
    if seconds is None or seconds < 59.95:
        return duration(seconds)
    for unit, length, most in (("min", 60, 59.95), ("h", 3600, 23.95)):
        if seconds / length < most:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d"


def seconds_text(seconds: float | None) -> str:
    """A duration as `read_seconds` parses it: `1h30m`."""
    if seconds is None:
        return ""
    whole, found = int(seconds), ""
    if whole != seconds or not whole:
        return f"{seconds:g}s"
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        many, whole = divmod(whole, size)
        found += f"{many}{unit}" if many else ""
    return found


def size(count: float | None) -> str:
    """Bytes: `1.5 MiB`."""
    if count is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


# --- times ----------------------------------------------------------------------------------------


def moment(at: datetime | None, absent: str = NOTHING) -> str:
    """A date and time, in the zone that the reader chose."""
    return _time(at, "moment", absent)


def ago(at: datetime | None, absent: str = NOTHING) -> str:
    """A past time as its distance from now: `4 min ago`. It keeps counting."""
    return _time(at, "ago", absent)


def countdown(at: datetime | None, absent: str = NOTHING) -> str:
    """A future time: `in 4 min`, counting down."""
    return _time(at, "countdown", absent)


def span(first: datetime, last: datetime) -> str:
    """Two times as a range: `10 Nov 07:00:00 to 18 Nov 07:00:00`, with days if they differ."""
    if first == last:
        return moment(first)
    begin, end = _written(first), _written(last)
    return (
        _time(first, "moment", NOTHING, f' data-beside="{end}"')
        + " to "
        + _time(last, "moment", NOTHING, f' data-beside="{begin}" data-end')
    )


def _time(at: datetime | None, kind: str, absent: str, more: str = "") -> str:
    """A <time> that assets/app.js keeps up to date; without scripts it shows UTC."""
    if at is None:
        return absent
    text = _written(at)
    # Digits only, so there is nothing to escape: a page may have hundreds of these.
    return Markup(  # noqa: S704
        f'<time datetime="{text}" data-time="{kind}"{more}>{text[:10]} {text[11:19]} UTC</time>'
    )


def _written(at: datetime) -> str:
    text = at.astimezone(UTC).isoformat(sep="T", timespec="milliseconds")
    return f"{text[:23]}Z"


def local_text(at: datetime | None, timezone: str) -> str:
    """A time as an input of type datetime-local expects it, in a time zone."""
    if at is None:
        return ""
    shown = at.astimezone(_tzinfo(timezone))
    return shown.strftime("%Y-%m-%dT%H:%M:%S" if shown.second else "%Y-%m-%dT%H:%M")


def wall(at: datetime, timezone: str) -> str:
    """A time on the clock of a zone, with its offset, so that clock changes show."""
    shown = at.astimezone(_tzinfo(timezone))
    precision = "seconds" if shown.second else "minutes"
    return f"{shown:%a} {shown.isoformat(sep=' ', timespec=precision)}"


def utc_text(at: datetime) -> str:
    """A time in UTC."""
    shown = at.astimezone(UTC)
    return f"{shown:%Y-%m-%d %H:%M:%S}" if shown.second else f"{shown:%Y-%m-%d %H:%M}"


def _tzinfo(timezone: str) -> tzinfo:
    """A time zone; UTC if it is no longer known, which the schedule reports itself."""
    try:
        return find_zone(timezone).tzinfo
    except UnknownTimezone:
        return UTC


# --- texts ----------------------------------------------------------------------------------------

# Between the words of a name: after punctuation, and before a capital letter.
_JOINTS = re.compile(r"(?<=[._:])(?=[^._:])|(?<=[a-z0-9])(?=[A-Z])")


def dotted(text: str) -> str:
    """A name with line-break opportunities between its words."""
    return Markup("<wbr>").join(map(escape, _JOINTS.split(text)))


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON, on one line unless it is indented."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)


def segment(text: str) -> str:
    """An id as the last segment of a path. Slashes are quoted: browsers resolve `a/../b`."""
    return quote(text, safe=":@!$'()*+,;=~", errors="replace")


def query_value(text: str) -> str:
    """A value in a query string; unlike Jinja's filter, it accepts text that UTF-8 cannot hold."""
    return quote(text, safe="", errors="replace")


def query_of(**given: str | None) -> str:
    """A query string of the values that are given, without its question mark."""
    return "&".join(f"{name}={query_value(text)}" for name, text in given.items() if text)


def short(text: str) -> str:
    """An id that fits into a table: its beginning and its end."""
    return text if len(text) <= MAX_SHORT else f"{text[:8]}…{text[-8:]}"


def first_line(text: str | None) -> str:
    """The first line of an error."""
    return text.splitlines()[0] if text and text.strip() else ""


def explained(reason: Reason, now: datetime) -> str:
    """Why a task waits, as a sentence with times in the reader's zone."""

    def tell(at: datetime) -> str:
        return Markup("{} ({})").format(moment(at), countdown(at) if at > now else ago(at))

    def fill(template: str, **values: Any) -> str:
        return Markup(template).format(**values)  # noqa: S704 - ours; the values are escaped

    return sentence(reason.code, reason.values, tell, fill)


def command(*words: object, ids: Sequence[object] = ()) -> str:
    """The command line that does the same; `cli_hint` adds the option --queue if needed.

    `ids` are names chosen by others. They come last, after `--` if one looks like an option, so
    that a copied line does not run something else.
    """
    named = [str(each) for each in ids]
    stop = ["--"] if any(each.startswith("-") for each in named) else []
    return "fairqueue " + shlex.join([*map(str, words), *stop, *named])


def options(**given: object) -> list[str]:
    """The options of a command line, such as `--note why`, without those that have no value."""
    found: list[str] = []
    for name, value in given.items():
        if value not in (None, ""):
            flag, text = f"--{name.replace('_', '-')}", str(value)
            # A value that looks like an option must be joined to its own.
            found += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return found


# --- schedules and runs ---------------------------------------------------------------------------


def rule_text(schedule: ScheduledTask) -> str:
    """The rule of a schedule: its expression, its interval or its time."""
    if schedule.every is not None:
        return f"every {seconds_text(schedule.every.total_seconds())}"
    if schedule.at is not None:
        return f"at {local_text(schedule.at, schedule.timezone).replace('T', ' ')}"
    return schedule.cron_expr


def rule_summary(view: ScheduleView) -> str:
    """The rule in words, without its zone and anchor, which a list shows elsewhere."""
    return view.sentence.removesuffix(f" ({view.schedule.timezone})").partition(", counted from ")[
        0
    ]


def waited(run: Run, now: datetime) -> float | None:
    """How many seconds a run has waited for its last attempt, so far or in all."""
    begun = run.started_at if run.status not in ("pending", "retrying") else None
    end = begun or run.ended_at or now
    return (end - run.due_at).total_seconds() if end >= run.due_at else None


def took(run: Run, now: datetime) -> float | None:
    """How many seconds the last attempt of a run took, so far or in all."""
    if run.status == "running" and run.started_at is not None:
        return max(0.0, (now - run.started_at).total_seconds())
    return run.seconds


FILTERS: dict[str, Callable[..., Any]] = {
    "ago": ago,
    "brief": brief,
    "countdown": countdown,
    "dotted": dotted,
    "duration": duration,
    "explained": explained,
    "json": json_text,
    "moment": moment,
    "number": number,
    "of_queue": command_line,
    "plural": plural,
    "share": share,
    "size": size,
    "span": span,
    "urlencode": query_value,
}
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(
        command,
        estimate,
        first_line,
        json_text,
        options,
        query_of,
        query_value,
        rule_summary,
        rule_text,
    ),
    *(segment, short),
    *(took, utc_text, waited, wall),
)
