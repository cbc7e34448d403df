"""What the doctor finds: the results of its checks."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

OK, WARNING, PROBLEM = "ok", "warning", "problem"
BATCH = 100  # entries that one script examines

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. repairable: how many entries `fix` would repair."""

    check: str
    level: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)
    repairable: int = 0

    def of_partition(self, number: int) -> "Finding":
        """The finding with the partition that it is about."""
        details = {"partition": number, **self.details}
        return replace(self, text=f"partition {number}: {self.text}", details=details)

    def of_node(self, node: str) -> "Finding":
        """The finding with the server that it is about."""
        return replace(self, text=f"{node}: {self.text}", details={"node": node, **self.details})


def no_progress(_: int) -> None:
    """Report no progress."""


def in_batches(entries: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    """Return entries in lists of at most `size`."""
    source = iter(entries)
    while batch := list(islice(source, size)):
        yield batch
