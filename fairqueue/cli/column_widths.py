"""Fit a table into a terminal: choose the columns to show and their widths."""

from collections.abc import Mapping, Sequence

GAP = 2  # cells between columns

# Columns that may be shortened, and to how many cells. Ids are never shortened: people copy them.
_NARROWEST = {
    **dict.fromkeys(("USER", "NAME", "BY", "HOST", "ZONE", "TENANT", "POOL"), 10),
    **dict.fromkeys(("NAMES", "CURRENT"), 12),
    **dict.fromkeys(("ERROR", "REASON", "NOTE", "MESSAGE", "FIELDS", "WHAT"), 20),
    "ACTOR": 8,
}
# Columns that wrap, because their text is shown nowhere else.
WRAPPED = ("REASON", "NOTE", "MESSAGE", "FIELDS", "WHAT")
# Columns to leave out of a narrow terminal, in this order.
_FIRST_TO_GO = (
    *("VERSION", "PID", "VIA", "POOL", "DUE", "ATTEMPTS", "STARTED", "CURRENT", "ZONE"),
    *("P95 WAIT", "SCHEDULES", "JAIN", "PRIORITY", "LAST RUN", "WEIGHT", "OLDEST WAIT", "HOST"),
    *("NAMES", "SEEN", "PUSHED", "CREATED", "OUTCOME", "TENANT", "NAME", "USER", "ERROR"),
)


def fit(widths: Mapping[str, int], empty: Sequence[str], columns: int) -> dict[str, int]:
    """The headings to show, with the width of each column.

    widths: the full width of each column. empty: headings of columns without any value, which are
    left out first. The first column always stays. The result may be wider than the terminal if no
    more columns can be left out.
    """
    first = next(iter(widths))
    least = {name: _least(name, width, name == first) for name, width in widths.items()}
    for name in (*empty, *_FIRST_TO_GO):
        if _total(least) <= columns:
            break
        if name != first:
            least.pop(name, None)
    spare = max(0, columns - _total(least))
    for name, width in least.items():
        more = min(spare, widths[name] - width)
        least[name] += more
        spare -= more
    return least


def _least(name: str, width: int, is_first: bool) -> int:
    return width if is_first else min(width, max(len(name), _NARROWEST.get(name, width)))


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)
