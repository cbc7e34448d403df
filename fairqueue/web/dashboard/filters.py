"""Write values for people: numbers, shares, durations and moments, as the templates' filters."""

import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from markupsafe import Markup, escape

from fairqueue.errors import plural
from fairqueue.link.keys import command_line
from fairqueue.reasons import Reason, sentence

NOTHING = "–"


def number(value: float | None, digits: int = 0) -> str:
    """`12345` -> `12,345`; a dash where there is none."""
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
    """Seconds in the one or two units that matter: `340 ms`, `4.2 s`, `3 min 5 s`, `2 d 4 h`."""
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
    for unit, size, below, lower in (
        ("min", 60, "s", 1),
        ("h", 3600, "min", 60),
        ("d", 86_400, "h", 3600),
    ):
        if whole < size * {"min": 60, "h": 24, "d": 10**9}[unit]:
            many, rest = divmod(whole, size)
            rest //= lower
            return f"{many} {unit} {rest} {below}" if rest else f"{many} {unit}"
    return NOTHING


def brief(seconds: float | None) -> str:
    """Seconds in one unit, where there is little room: `4.2 s`, `12.6 min`, `2.1 d`."""
    if seconds is None or seconds < 59.95:
        return duration(seconds)
    for unit, length, most in (("min", 60, 59.95), ("h", 3600, 23.95)):
        if seconds / length < most:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 86_400:.1f} d"


def size(count: float | None) -> str:
    """Bytes: `1.5 MiB`."""
    if count is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def moment(at: datetime | None, absent: str = NOTHING) -> str:
    """A moment as date and time, in the zone that the reader chose."""
    return _time(at, "moment", absent)


def ago(at: datetime | None, absent: str = NOTHING) -> str:
    """A moment as its distance from now: `4 min ago`. It goes on counting."""
    return _time(at, "ago", absent)


def countdown(at: datetime | None, absent: str = NOTHING) -> str:
    """A moment to come: `in 4 min`, counting down."""
    return _time(at, "countdown", absent)


def span(first: datetime, last: datetime) -> str:
    """Two moments as a range: `10 Nov 07:00:00 to 18 Nov 07:00:00`, with days where they differ."""
    if first == last:
        return moment(first)
    begin, end = _written(first), _written(last)
    return (
        _time(first, "moment", NOTHING, f' data-beside="{end}"')
        + " to "
        + _time(last, "moment", NOTHING, f' data-beside="{begin}" data-end')
    )


def _time(at: datetime | None, kind: str, absent: str, more: str = "") -> str:
    """A <time> that assets/app.js keeps up to date; without scripts it says the moment in UTC."""
    if at is None:
        return absent
    text = _written(at)
    # Digits only, so there is nothing to escape: there may be hundreds of these on a page.
    return Markup(  # noqa: S704
        f'<time datetime="{text}" data-time="{kind}"{more}>{text[:10]} {text[11:19]} UTC</time>'
    )


def _written(at: datetime) -> str:
    text = at.astimezone(UTC).isoformat(sep="T", timespec="milliseconds")
    return f"{text[:23]}Z"


# Between the words of a name: after a mark, and before a capital.
_JOINTS = re.compile(r"(?<=[._:])(?=[^._:])|(?<=[a-z0-9])(?=[A-Z])")


def dotted(text: str) -> str:
    """A name that may be broken between its words, and not in the middle of one."""
    return Markup("<wbr>").join(map(escape, _JOINTS.split(text)))


def as_json(value: Any) -> str:
    """A value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False, default=str)


def urlencode(text: str) -> str:
    """A value in a query string; unlike Jinja's own, also of text that UTF-8 cannot hold."""
    return quote(text, safe="", errors="replace")


def told(reason: Reason, now: datetime) -> str:
    """A reason why a task waits as a sentence, whose moments are in the reader's zone."""

    def tell(at: datetime) -> str:
        return Markup("{} ({})").format(moment(at), countdown(at) if at > now else ago(at))

    def fill(template: str, **values: Any) -> str:
        return Markup(template).format(**values)  # noqa: S704 - ours; the values are escaped

    return sentence(reason.code, reason.values, tell, fill)


FILTERS: dict[str, Callable[..., Any]] = {
    "ago": ago,
    "brief": brief,
    "countdown": countdown,
    "dotted": dotted,
    "duration": duration,
    "json": as_json,
    "moment": moment,
    "number": number,
    "of_queue": command_line,
    "plural": plural,
    "share": share,
    "size": size,
    "told": told,
    "span": span,
    "urlencode": urlencode,
}
