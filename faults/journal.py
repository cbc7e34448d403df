"""Journals: what each process of a storm attempted, and the answers; one JSON array per line."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """A file that one process appends to. A line is in the kernel when `note` returns."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, *fields: Any) -> None:
        """Append a complete line, which survives the death of the process."""
        os.write(self._file, json.dumps(fields, separators=(",", ":")).encode() + b"\n")


def read_journals(folder: Path) -> Iterator[tuple[str, list[Any]]]:
    """Every line of every journal, with the name of its actor."""
    for path in sorted(folder.glob("*.journal")):
        actor = path.name.removesuffix(".journal")
        with path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    yield actor, json.loads(line)
