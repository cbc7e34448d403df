"""Write values for people: numbers, shares, durations and moments, as the templates' filters."""

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from markupsafe import Markup, escape

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


def _time(at: datetime | None, kind: str, absent: str) -> str:
    """A <time> that assets/app.js keeps up to date; without scripts it says the moment in UTC."""
    if at is None:
        return absent
    utc = at.astimezone(UTC)
    text = utc.isoformat(sep=" ", timespec="milliseconds")
    # Digits only, so there is nothing to escape: there may be hundreds of these on a page.
    return Markup(  # noqa: S704
        f'<time datetime="{text[:10]}T{text[11:23]}Z" data-time="{kind}">{text[:19]} UTC</time>'
    )


def dotted(text: str) -> str:
    """A name that may be broken after its dots, and not in the middle of a word."""
    return Markup("<wbr>").join(escape(part) for part in text.replace(".", ".\0").split("\0"))


def plural(count: int, one: str, many: str | None = None) -> str:
    """`1 task`, `1,200 tasks`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def urlencode(text: str) -> str:
    """A value in a query string; unlike Jinja's own, also of text that UTF-8 cannot hold."""
    return quote(text, safe="", errors="replace")


FILTERS: dict[str, Callable[..., Any]] = {
    "ago": ago,
    "brief": brief,
    "countdown": countdown,
    "dotted": dotted,
    "duration": duration,
    "moment": moment,
    "number": number,
    "plural": plural,
    "share": share,
    "size": size,
    "urlencode": urlencode,
}
