"""Call what belongs to one run in one context, and end what it leaves running in the event loop.

A slot runs the tasks of one user after those of another. What one of them sets in a context
variable, or starts beside its handler, must not reach the next.
"""

import asyncio
import contextvars
import inspect
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

# Seconds for what a run has left behind to end after it was cancelled. What has not ended then
# never goes on: its event loop is given up.
LEFT_S = 1.0
MAX_NAMED = 10  # of those that were left running


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a run has left running: names of the first few, how many, and if all ended when told."""

    names: tuple[str, ...]
    count: int
    ended: bool


@dataclass(slots=True)
class _Generators:
    """The async generators of one run, while they are not closed."""

    open: "weakref.WeakSet[AsyncGenerator[Any, Any]]" = field(default_factory=weakref.WeakSet)
    closing: bool = False  # one was dropped half-way, and the event loop is to close it

    def watch(self) -> None:
        """Learn of each one that is begun from now on, until the event loop stops."""
        loops = sys.get_asyncgen_hooks()

        def begin(generator: AsyncGenerator[Any, Any]) -> None:
            self.open.add(generator)
            if loops.firstiter is not None:
                loops.firstiter(generator)

        def drop(generator: AsyncGenerator[Any, Any]) -> None:
            self.closing = True
            if loops.finalizer is not None:
                loops.finalizer(generator)

        sys.set_asyncgen_hooks(firstiter=begin, finalizer=drop)

    def left(self) -> list[AsyncGenerator[Any, Any]]:
        """Those that were begun and not brought to their end."""
        return [each for each in self.open if getattr(each, "ag_frame", None) is not None]


class Stage:
    """Where one slot runs its tasks, one after the other. It has an event loop once one is needed.

    For one thread. `begin` comes first for each run, `clear` last.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._variables = contextvars.Context()
        self._generators = _Generators()
        self._used = False  # the event loop, by this run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._runner is not None:
            self._runner.close()

    def begin(self) -> None:
        """A run begins: it sees the context variables of this thread, and changes its own copy."""
        self._variables = contextvars.copy_context()
        self._generators = _Generators()
        self._used = False

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the context of the run."""
        return self._variables.run(function, *arguments)

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end, in the context of the run."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        self._used = True
        return self._runner.run(self._watched(coroutine), context=self._variables)

    async def _watched(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._generators.watch()
        return await coroutine

    def clear(self) -> Leftovers | None:
        """Cancel what the run has left in the event loop; None if there was nothing.

        What goes on in spite of it is never run again: the next run gets another event loop.
        """
        if self._runner is None or not self._used:
            return None
        loop = self._runner.get_loop()
        generators = self._generators
        if not (asyncio.all_tasks(loop) or generators.closing or generators.left()):
            return None
        names, ended = self._runner.run(_cancel(generators), context=contextvars.copy_context())
        if not ended:
            self._runner = None
            loop.close()
        return Leftovers(tuple(names[:MAX_NAMED]), len(names), ended) if names else None


async def _cancel(generators: _Generators) -> tuple[list[str], bool]:
    """Cancel all tasks but this one and close generators; what they are, and if all ended soon."""
    await asyncio.sleep(0)  # a generator that was dropped gets the task that closes it
    others = asyncio.all_tasks() - {asyncio.current_task()}
    left = [task for task in others if inspect.iscoroutine(task.get_coro())]
    names = [_name_of(task.get_coro()) for task in left]
    for task in left:
        task.cancel()
    ended = await _end(others)
    for generator in generators.left() if ended else ():
        names.append(_name_of(generator))
        ended = await _end({asyncio.ensure_future(_close(generator))}) and ended
    return names, ended


async def _end(tasks: "set[asyncio.Task[Any]]") -> bool:
    """Whether these end within LEFT_S; how they do is nobody's business any more."""
    if not tasks:
        return True
    done, pending = await asyncio.wait(tasks, timeout=LEFT_S)
    for task in done:
        if not task.cancelled():
            task.exception()  # otherwise asyncio complains that nobody asked
    return not pending


async def _close(generator: AsyncGenerator[Any, Any]) -> None:
    with suppress(Exception):
        await generator.aclose()


def _name_of(started: Any) -> str:
    return str(getattr(started, "__qualname__", None) or type(started).__name__)
