"""Show the rest of a queue when some of its partitions do not answer.

A face opens `note_missing` for a request or a command. Within it, the reading methods of inspectors
go on without the partitions that do not answer, and note which. Without it they raise
RedisUnavailable, as all changes do in any case: nobody gets a part and takes it for the whole.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

from fairqueue.link.connection import Link
from fairqueue.link.partitions import Missing, tolerate_missing
from fairqueue.stats.partitions import node_of

P = ParamSpec("P")
T = TypeVar("T")

_NOTED: ContextVar[Missing | None] = ContextVar("fairqueue_noted", default=None)


@contextmanager
def note_missing(known: Mapping[int, str] = {}) -> Iterator[Missing]:
    """Let reading methods go on without partitions that do not answer; yields where they are noted.

    known: those that are known not to answer, with the reasons. They are not asked.
    """
    missing = Missing()
    missing.partitions.update(known)
    token = _NOTED.set(missing)
    try:
        yield missing
    finally:
        _NOTED.reset(token)


def reading(method: Callable[P, T]) -> Callable[P, T]:
    """Mark a method of an inspector that only reads, and whose caller may show a part."""

    @wraps(method)
    def read(*args: P.args, **kwargs: P.kwargs) -> T:
        noted = _NOTED.get()
        if noted is None:
            return method(*args, **kwargs)
        with tolerate_missing(noted):
            return method(*args, **kwargs)

    return read


def noted() -> Mapping[int, str]:
    """Return the partitions that did not answer so far, with the reasons."""
    missing = _NOTED.get()
    return {} if missing is None else dict(missing.partitions)


def missing_text(link: Link, numbers: Mapping[int, str], *, with_nodes: bool = True) -> str:
    """What to tell about partitions that do not answer; empty if all do.

    with_nodes: name their nodes, which the viewers of one tenant do not see.
    """
    if not numbers or not link.parts:
        return ""
    if not with_nodes:
        return "A part of the queue does not answer: what is shown may lack tasks and schedules."
    by_node: dict[str, list[int]] = {}
    for number in sorted(numbers):
        by_node.setdefault(node_of(link.parts[number]), []).append(number)
    places = " and ".join(
        f"{', '.join(map(str, own))} (node {node})" for node, own in by_node.items()
    )
    if len(numbers) == 1:
        return f"Partition {places} does not answer: what is shown lacks its tasks and schedules."
    return f"Partitions {places} do not answer: what is shown lacks their tasks and schedules."
