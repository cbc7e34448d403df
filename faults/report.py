"""Report the results of storms, on the screen and in docs/reliability.md."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "faults" / "results.json"
PAGE = ROOT / "docs" / "reliability.md"
HEAD = (
    "storm",
    "seed",
    "seconds",
    "tasks",
    "of these fired",
    "faults",
    "run again",
    "lost",
    "unexpected",
    "enqueued twice",
    "completed twice",
    "anything else wrong",
)
# The other counts of a verdict: see checker.Verdict.
_ELSE = ("unfinished", "disagreements", "schedules_wrong", "grown", "stale", "crowded", "wrong")


def row_of(result: dict[str, Any]) -> tuple[str, ...]:
    """Return a line of the table; what was not checked is left open."""
    verdict = result["verdict"]

    def count(*names: str) -> str:
        known = [verdict[name] for name in names if name in verdict]
        return f"{sum(known):,}" if known else "–"

    faults = ", ".join(
        f"{number:,} {kind.replace('_', ' ')}" for kind, number in result["faults"].items()
    )
    return (
        result["name"],
        str(result["seed"]),
        f"{result['seconds']:,.0f}",
        count("tasks"),
        count("fires"),
        faults,
        count("repeated_runs"),
        count("lost"),
        count("unexpected"),
        count("duplicated"),
        count("doubled", "repeated_completions"),
        count(*_ELSE),
    )


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = HEAD) -> str:
    """Format rows as Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def publish(results: Sequence[dict[str, Any]]) -> None:
    """Store results, each in place of the last one of its name, and write the table of the page."""
    kept = {result["name"]: result for result in json.loads(RESULTS.read_text())}
    kept.update({result["name"]: result for result in results})
    RESULTS.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    fill("results", table(row_of(result) for result in kept.values()))


def fill(block: str, content: str) -> None:
    """Write a table into docs/reliability.md, between the marks with its name."""
    begin, end = f"<!-- {block}: begin -->", f"<!-- {block}: end -->"
    text = PAGE.read_text() if PAGE.exists() else ""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"{PAGE} has no place for the {block}: {begin} ... {end}, each once")
    before, after = text[: text.index(begin)], text[text.index(end) :]
    PAGE.write_text(f"{before}{begin}\n{content}\n{after}")
