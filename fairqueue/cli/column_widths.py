"""Fit a table into a terminal: which columns stay, and how wide each is."""

from collections.abc import Mapping, Sequence

GAP = 2  # between columns

# Texts that may be cut to so many characters. All others are whole: an id is there to be copied.
_NARROWEST = {
    **dict.fromkeys(("USER", "NAME", "BY", "HOST", "ZONE", "TENANT"), 10),
    **dict.fromkeys(("NAMES", "CURRENT"), 12),
    **dict.fromkeys(("ERROR", "REASON", "NOTE", "MESSAGE", "FIELDS", "WHAT"), 20),
    "ACTOR": 8,
}
# What can be read nowhere else goes on in the next line.
WRAPPED = ("REASON", "NOTE", "MESSAGE", "FIELDS", "WHAT")
# What is left out of a terminal that is too narrow, the first one first.
_FIRST_TO_GO = (
    *("VERSION", "PID", "VIA", "TENANT", "DUE", "ATTEMPTS", "STARTED", "CURRENT", "ZONE"),
    *("P95 WAIT", "SCHEDULES", "PRIORITY", "LAST RUN", "WEIGHT", "OLDEST WAIT", "HOST", "NAMES"),
    *("SEEN", "PUSHED", "CREATED", "OUTCOME", "NAME", "USER", "ERROR"),
)


def fit(widths: Mapping[str, int], empty: Sequence[str], columns: int) -> dict[str, int]:
    """The headings that stay, and how wide each column is.

    widths: what each column needs to be whole. empty: headings that have no value in any row, which
    go first. The first column always stays. What stays may be wider than the terminal if there is
    nothing more to leave out.
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
