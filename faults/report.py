"""Say what storms have left, on the screen and in docs/reliability.md."""

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
    "s",
    "tasks",
    "fires",
    "faults",
    "lost",
    "unexpected",
    "enqueued twice",
    "completed twice",
    "not ended",
    "disagreements",
    "without right",
    "wrong answers",
)


def row_of(result: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    verdict = result["verdict"]
    faults = ", ".join(
        f"{count:,} {kind.replace('_', ' ')}" for kind, count in result["faults"].items()
    )
    return (
        result["name"],
        str(result["seed"]),
        f"{result['seconds']:.0f}",
        f"{verdict['tasks']:,}",
        f"{verdict['fires']:,}",
        faults,
        f"{verdict['lost']:,}",
        f"{verdict['unexpected']:,}",
        f"{verdict['duplicated']:,}",
        f"{verdict['doubled'] + verdict['repeated_completions']:,}",
        f"{verdict['unfinished']:,}",
        f"{verdict['disagreements'] + verdict['schedules_wrong'] + verdict['grown']:,}",
        # Of a result from before these were looked at, nothing is known.
        f"{verdict.get('stale', '–')}",
        f"{verdict.get('wrong', '–')}",
    )


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = HEAD) -> str:
    """Rows as Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def publish(results: Sequence[dict[str, Any]]) -> None:
    """Keep results, each in the place of the last of its name, and write the page's table."""
    kept = {result["name"]: result for result in json.loads(RESULTS.read_text())}
    kept.update({result["name"]: result for result in results})
    RESULTS.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    fill("results", table(row_of(result) for result in kept.values()))


def fill(block: str, content: str) -> None:
    """Write a table to its place in docs/reliability.md, between the marks with its name."""
    begin, end = f"<!-- {block}: begin -->", f"<!-- {block}: end -->"
    text = PAGE.read_text() if PAGE.exists() else ""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"{PAGE} has no place for the {block}: {begin} ... {end}, each once")
    before, after = text[: text.index(begin)], text[text.index(end) :]
    PAGE.write_text(f"{before}{begin}\n{content}\n{after}")
