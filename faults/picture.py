"""A chart of a soak: its faults, lateness, shares, memory and data."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from faults.measures import Series, entry_series, memory_series, quantile

if TYPE_CHECKING:
    from faults.soak import Record

# Colours that colour-blind people can tell apart.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY, BLACK = "#CC79A7", "#56B4E9", "#999999", "#222222"
GROUPS = {
    "processes killed": (RED, ("kill",)),
    "processes stopped": (ORANGE, ("stop", "pause_leader", "pause_before_fire")),
    "network": (BLUE, ("network", "drop_replies")),
    "server": (PURPLE, ("kill_server", "client_pause", "script_flush", "full_memory")),
}
ROLES = {"worker": BLUE, "scheduler": ORANGE, "producer": GREEN, "editor": PURPLE}
LINES = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK)
BINS = 150  # of a line, from left to right
MOST_MARKS = 250  # more would hide the curves


def draw(record: "Record", path: Path) -> None:
    """Write the chart as PNG."""
    figure = Figure(figsize=(13, 15), dpi=100, layout="constrained")
    axes = figure.subplots(6, 1, sharex=True, height_ratios=(1.3, 1.8, 1.1, 1.1, 1.5, 1.6))
    result, minutes = record.result, round((record.ended - record.began) / 60, 1)
    figure.suptitle(
        f"A soak of {minutes:g} minutes: {len(_marks(record)):,} faults, "
        f"{result.verdict.tasks:,} tasks, violations: {result.violations}  (seed {result.seed})",
        fontsize=14,
        fontweight="bold",
    )
    panels = (_faults, _lateness, _throughput, _fairness, _memory, _entries)
    for axis, panel in zip(axes, panels, strict=True):
        axis.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        panel(axis, record)
    axes[-1].set_xlim(0, (record.ended - record.began) / 60)
    axes[-1].set_xlabel("minutes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _marks(record: "Record") -> Series:
    """Return the faults as minute and number of their group, without sub-kinds."""
    number = {kind: place for place, (_, kinds) in enumerate(GROUPS.values()) for kind in kinds}
    return [((at - record.began) / 60, number[kind]) for at, kind in record.marks if kind in number]


def _title(axis: Axes, text: str) -> None:
    axis.set_title(text, loc="left", fontsize=11)


def _legend(axis: Axes, handles: Sequence[Artist] | None = None, left: float = 1.005) -> None:
    """Put the legend beside the panel, where it hides nothing."""
    shown = axis.get_legend_handles_labels()[0] if handles is None else handles
    place = (left, 1.03)
    axis.legend(handles=shown, loc="upper left", bbox_to_anchor=place, frameon=False, fontsize=9)


def _binned(
    record: "Record", series: Iterable[tuple[float, float]], fold: Callable[[list[float]], float]
) -> tuple[list[float], list[float]]:
    """Return a series with one point for each interval that has data."""
    width = (record.ended - record.began) / BINS
    bins: dict[int, list[float]] = {}
    for at, value in series:
        bins.setdefault(int((at - record.began) / width), []).append(value)
    places = sorted(place for place in bins if 0 <= place < BINS)
    return [(place + 0.5) * width / 60 for place in places], [fold(bins[p]) for p in places]


def _minutes(record: "Record", series: Series) -> tuple[list[float], list[float]]:
    return [(at - record.began) / 60 for at, _ in series], [value for _, value in series]


def _faults(axis: Axes, record: "Record") -> None:
    kinds = [(kind, color) for color, kinds in GROUPS.values() for kind in kinds]
    for row, (kind, color) in enumerate(kinds):
        moments = [(at - record.began) / 60 for at, name in record.marks if name == kind]
        axis.plot(moments, [row] * len(moments), "|", color=color, markersize=9, markeredgewidth=2)
    axis.set_yticks(range(len(kinds)), [kind.replace("_", " ") for kind, _ in kinds], fontsize=8)
    axis.set_ylim(len(kinds) - 0.5, -0.5)
    _title(axis, "Faults")
    handles = [
        Line2D([], [], color=color, marker="|", linestyle="", markeredgewidth=2, label=name)
        for name, (color, _) in GROUPS.items()
    ]
    _legend(axis, handles)


def _lateness(axis: Axes, record: "Record") -> None:
    colors = [color for color, _ in GROUPS.values()]
    marks = _marks(record)
    for at, group in marks if len(marks) <= MOST_MARKS else ():
        axis.axvline(at, color=colors[int(group)], alpha=0.18, linewidth=1)
    late = [(at, max(seconds, 0.001)) for at, seconds in record.late]
    axis.plot(*_minutes(record, late), ".", color=SKY, markersize=2.5, alpha=0.5, label="each task")
    axis.plot(*_binned(record, late, median), color=BLUE, linewidth=1.8, label="median")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(_seconds))
    _legend(axis)
    worst = max((seconds for _, seconds in late), default=0.0)
    high = quantile([seconds for _, seconds in late], 0.99) if late else 0.0
    _title(
        axis,
        "Lateness: from the moment of a schedule to the run of its task "
        f"(99 % below {_seconds(high)}, worst {_seconds(worst)})",
    )


def _seconds(value: float, place: object = None) -> str:
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.3g} s"


def _throughput(axis: Axes, record: "Record") -> None:
    width = (record.ended - record.began) / BINS
    runs = [(run.at, 1.0) for run in record.runs]
    axis.plot(
        *_binned(record, runs, lambda ones: len(ones) / width),
        color=GREEN,
        linewidth=1.8,
        label="tasks run, per second",
    )
    axis.set_ylim(bottom=0)
    waiting: Series = [(s.at, s.data.entries["waiting"]) for s in record.samples if s.data]
    other = axis.twinx()
    other.plot(*_minutes(record, waiting), color=GREY, linewidth=1.2, label="tasks waiting (right)")
    other.set_ylim(bottom=0)
    other.spines["top"].set_visible(False)
    handles = [*axis.get_lines(), *other.get_lines()]
    _legend(axis, handles, left=1.05)
    _title(axis, "Throughput")


def _fairness(axis: Axes, record: "Record") -> None:
    moments = [(share.at - record.began) / 60 for share in record.shares]
    axis.fill_between(
        moments,
        [share.least for share in record.shares],
        [share.most for share in record.shares],
        color=SKY,
        alpha=0.4,
        linewidth=0,
        label="least and most served user",
    )
    axis.plot(
        moments,
        [share.jain for share in record.shares],
        color=BLUE,
        label="Jain index",
        linewidth=1.8,
    )
    axis.axhline(1, color=BLACK, linewidth=0.8, linestyle=":")
    least = min([0.8, *(share.least - 0.05 for share in record.shares)])
    axis.set_ylim(least, max([1.2, *(share.most + 0.05 for share in record.shares)]))
    _legend(axis)
    _title(axis, "Fairness: share of users with equal weights and enough to do, 1 = entitled")


def _memory(axis: Axes, record: "Record") -> None:
    series = memory_series(record.samples)
    for name, points in series.items():
        role, _, actor = name.partition(" ")
        lives_on = actor[1:].startswith("0-")
        axis.plot(
            *_minutes(record, points),
            color=ROLES.get(role, BLACK),
            linewidth=2 if lives_on or name == "Redis" else 0.7,
            alpha=1 if lives_on or name == "Redis" else 0.5,
            label=f"{role}, never killed" if lives_on else "Redis" if name == "Redis" else None,
        )
    axis.plot([], [], color=GREY, linewidth=0.7, label="those that are killed")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} MiB"))
    _legend(axis)
    _title(axis, "Memory of each process, and of Redis' data")


def _entries(axis: Axes, record: "Record") -> None:
    # Some keys go together: tasks and their status.
    together: dict[tuple[float, ...], list[str]] = {}
    series = entry_series(record.samples)
    for name, points in series.items():
        together.setdefault(tuple(value for _, value in points), []).append(name)
    largest = sorted(together, key=max, reverse=True)
    for values, color in zip(largest, LINES, strict=False):
        names = together[values]
        moments, sizes = _minutes(record, series[names[0]])
        axis.plot(moments, sizes, color=color, linewidth=1.5, label=", ".join(names))
    axis.set_yscale("log")
    axis.set_ylim(bottom=10)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _legend(axis)
    _title(axis, "Entries of the largest keys")
