"""Format values and tables for a terminal, without control characters."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta

from fairqueue.validation import Priority


def printable(text: str) -> str:
    """The text on one line, with control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_lines(text: str) -> list[str]:
    """The lines of a text such as a traceback, with control characters escaped."""
    return [printable(line.replace("\t", "    ")) for line in text.split("\n")]


def moment_text(moment: datetime | None) -> str:
    """A time to the second."""
    return "-" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S")


UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


def exact_duration(seconds: float) -> str:
    """An exact duration: 90061 is 1d1h1m1s."""
    parts = []
    left = seconds
    for unit, size in UNITS[:-1]:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count:.0f}{unit}")
    if left or not parts:
        parts.append(f"{left:g}s")
    return "".join(parts)


def duration_text(seconds: float | None) -> str:
    """A duration in its two largest units: 90 is 1m30s."""
    if seconds is None:
        return "-"
    if seconds < 0:
        return "-" + duration_text(-seconds)
    if seconds < 10:
        return f"{seconds:.3g}s"
    whole = round(seconds)
    parts = []
    for unit, size in UNITS:
        if whole >= size:
            parts.append(f"{whole // size}{unit}")
            whole %= size
        elif parts:
            break
    return "".join(parts[:2])


def cell(value: object) -> str:
    """A value as text."""
    if value is None or value == "":
        return "-"
    if isinstance(value, datetime):
        return moment_text(value)
    if isinstance(value, timedelta):
        return duration_text(value.total_seconds())
    if isinstance(value, Priority):
        return value.name
    return _plain(value)


def short_cell(value: object) -> str:
    """A value as short text: times of this year without the year."""
    text = cell(value)
    if isinstance(value, datetime) and value.year == datetime.now(UTC).year:
        return text[len("2026-") :]
    return text


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, list | tuple):
        return ", ".join(map(cell, value)) or "-"
    return value.isoformat() if isinstance(value, date) else str(value)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table with aligned columns."""
    cells = [[printable(text) for text in each] for each in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for each in cells:
        padded = (text.ljust(width) for text, width in zip(each, widths, strict=True))
        yield "  ".join(padded).rstrip()


def pairs(values: Mapping[str, object]) -> Iterator[str]:
    """A line for each name and value, with aligned values."""
    yield from table([(name, cell(value)) for name, value in values.items()])


def in_words(counts: Mapping[str, object]) -> str:
    """Counts with their names, in one line."""
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items())
