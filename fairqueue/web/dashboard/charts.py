"""The JSON documents of charts: times, and lines with labels and tones."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from starlette.responses import JSONResponse, Response

from fairqueue.stats.samples import Series

# A line: its label, its tone (a CSS token --tone-* of assets/app.css), and its values.
Line = tuple[str, str, Sequence[float | None]]


def chart_document(times: Sequence[datetime], lines: Sequence[Line], unit: str = "") -> Response:
    """The document that <figure data-chart> loads; None in the values is a gap."""
    return JSONResponse(
        {
            "times": [at.timestamp() for at in times],
            "unit": unit,
            "lines": [
                {"label": label, "tone": tone, "values": list(values)}
                for label, tone, values in lines
            ],
        }
    )


def series_document(series: Series, picks: Sequence[tuple[str, str, str]], unit: str) -> Response:
    """A chart of samples; `picks` are (name in the series, label, tone)."""
    nothing: list[Any] = [None] * len(series.times)
    lines = [(label, tone, series.values.get(name, nothing)) for name, label, tone in picks]
    return chart_document(series.times, lines, unit)
