"""Isolate the runs of a slot from each other: context variables, and leftovers in the event loop.

A slot runs tasks of different users one after the other. Context variables that a run sets, and
asyncio tasks that it starts, must not reach the next run.
"""

import asyncio
import contextvars
import functools
import inspect
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Self, TypeVar

# Seconds for the leftovers of a run to end after they were cancelled. The event loop of those that
# have not ended by then is abandoned, so that they never continue. Threads cannot be ended.
LEFT_S = 1.0
THREAD_CHECK_S = 0.005  # between two checks of busy threads
MAX_NAMED = 10  # leftovers that are named
# Timers of closing connections are not the handler's code, and end with their connection.
_HARMLESS = "asyncio.sslproto"

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a run left running: the first few names, how many, and whether all have ended."""

    names: tuple[str, ...]
    count: int
    ended: bool


@dataclass(slots=True)
class _Generators:
    """The async generators of one run that are not closed."""

    open: "weakref.WeakSet[AsyncGenerator[Any, Any]]" = field(default_factory=weakref.WeakSet)
    closing: bool = False  # one was dropped unfinished, and the event loop is about to close it

    def watch(self) -> None:
        """Track generators that are started from now on, until the event loop stops."""
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
        """Return those that were started and not exhausted."""
        return [each for each in self.open if getattr(each, "ag_frame", None) is not None]

    def take(self) -> list[AsyncGenerator[Any, Any]]:
        """Return as `left`, but each only once, since it may refuse to close."""
        taken = self.left()
        self.open.clear()
        return taken


class _Threads(ThreadPoolExecutor):
    """The threads of an event loop, with a record of unfinished calls."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="asyncio")
        self._unfinished: dict[Future[Any], Callable[..., Any]] = {}

    def submit(
        self,
        call: Callable[Arguments, Answer],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> "Future[Answer]":
        """Call it in a thread."""
        job = super().submit(call, *args, **kwargs)
        self._unfinished[job] = call
        job.add_done_callback(lambda job: self._unfinished.pop(job, None))
        return job

    def unfinished(self) -> "dict[Future[Any], Callable[..., Any]]":
        """Return the unfinished calls, by future."""
        return self._unfinished.copy()


class Runner:
    """Calls the code of one run after the other in a slot; creates an event loop on first use.

    For one thread. Call `begin` first for each run, and `clear` last.
    """

    def __init__(self) -> None:
        self._loops: asyncio.Runner | None = None
        self._variables = contextvars.Context()
        self._generators = _Generators()
        self._threads = _Threads()
        self._used = False  # whether this run has used the event loop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._loops is not None:
            self._loops.close()

    def begin(self) -> None:
        """Begin a run, with its own copy of the context variables of this thread."""
        self._variables = contextvars.copy_context()
        self._generators = _Generators()
        self._used = False

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the context of the run."""
        return self._variables.run(function, *arguments)

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine until it ends, in the context of the run."""
        if self._loops is None:
            self._loops = asyncio.Runner()
            self._replace_threads(self._loops.get_loop())
        self._used = True
        return self._loops.run(self._watched(coroutine), context=self._variables)

    def _replace_threads(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the next run new threads; the old ones finish what they do."""
        self._threads.shutdown(wait=False)
        self._threads = _Threads()
        loop.set_default_executor(self._threads)

    async def _watched(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._generators.watch()
        return await coroutine

    def clear(self) -> Leftovers | None:
        """Cancel what the run has left in the event loop; None if there was nothing.

        If something ignores that, its event loop is abandoned and the next run gets a new one.
        Threads cannot be ended, and are only reported.
        """
        if self._loops is None or not self._used:
            return None
        loop = self._loops.get_loop()
        sweep = _Sweep(loop, self._generators, self._threads)
        if not sweep.is_needed():
            return None
        self._loops.run(sweep.run(), context=contextvars.copy_context())
        ended = sweep.ended and not self._threads.unfinished()
        if not sweep.ended:
            self._loops = None
            loop.close()
        elif not ended:
            self._replace_threads(loop)
        names = sweep.names
        return Leftovers(tuple(names[:MAX_NAMED]), len(names), ended) if names else None


class _Sweep:
    """Ends what a run has left in an event loop, one kind after the other, for LEFT_S at most.

    Leftovers may start others while they end, so all kinds are checked again until none is left.
    Timers and pending callbacks are visible only in the event loops of asyncio itself.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, generators: _Generators, threads: _Threads
    ) -> None:
        self._loop = loop
        self._generators = generators
        self._threads = threads
        self._seen: set[Future[Any]] = set()
        self.names: list[str] = []
        self.ended = False  # all but calls in threads

    def is_needed(self) -> bool:
        """Whether there is anything to end."""
        return bool(
            asyncio.all_tasks(self._loop)
            or self._generators.closing
            or self._generators.left()
            or self._timers()
            or self._callbacks()
            or self._threads.unfinished()
        )

    async def run(self) -> None:
        """End all leftovers, as far as time allows."""
        end = self._loop.time() + LEFT_S
        await asyncio.sleep(0)  # lets a dropped generator get the task that closes it
        while (seconds := end - self._loop.time()) > 0:
            self.ended = False
            if tasks := self._cancel_tasks() or self._close_generators():
                await _end(tasks, seconds)
            elif self._cancel_timers() or self._callbacks():
                await asyncio.sleep(0)
            else:
                self.ended = True
                if not self._cancel_jobs():
                    return
                await asyncio.sleep(THREAD_CHECK_S)
        if not self.ended and not self.names:
            self._name(getattr(each, "_callback", each) for each in self._callbacks())

    def _cancel_tasks(self) -> "set[asyncio.Task[Any]]":
        tasks = {each for each in asyncio.all_tasks() if each is not asyncio.current_task()}
        # Tasks of other awaitables are those with which the event loop closes a generator.
        left = [task for task in tasks if inspect.iscoroutine(task.get_coro())]
        self._name(task.get_coro() for task in left)
        for task in left:
            task.cancel()
        return tasks

    def _close_generators(self) -> "set[asyncio.Task[Any]]":
        generators = self._generators.take()
        self._name(generators)
        return {asyncio.ensure_future(_close(each)) for each in generators}

    def _cancel_timers(self) -> bool:
        timers = self._timers()
        self._name(getattr(each, "_callback", each) for each in timers)
        for timer in timers:
            timer.cancel()
        return bool(timers)

    def _cancel_jobs(self) -> bool:
        """Cancel calls that no thread has begun; True if any call is unfinished."""
        new = {
            job: call for job, call in self._threads.unfinished().items() if job not in self._seen
        }
        self._seen.update(new)
        self._name(new.values())
        for job in new:
            job.cancel()
        return bool(self._threads.unfinished())

    def _timers(self) -> list[asyncio.TimerHandle]:
        timers: Iterable[asyncio.TimerHandle] = getattr(self._loop, "_scheduled", ())
        return [each for each in timers if not each.cancelled() and _module(each) != _HARMLESS]

    def _callbacks(self) -> list[asyncio.Handle]:
        """Callbacks for the next iteration of the event loop."""
        return list(getattr(self._loop, "_ready", ()))

    def _name(self, started: Iterable[Any]) -> None:
        self.names += map(_name_of, started)


async def _end(tasks: "set[asyncio.Task[Any]]", seconds: float) -> None:
    """Wait for these to end, and ignore how."""
    done, _ = await asyncio.wait(tasks, timeout=seconds)
    for task in done:
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that it was never retrieved


async def _close(generator: AsyncGenerator[Any, Any]) -> None:
    with suppress(Exception):
        await generator.aclose()


def _module(handle: asyncio.Handle) -> object:
    return getattr(getattr(handle, "_callback", None), "__module__", None)


def _name_of(started: Any) -> str:
    if isinstance(started, functools.partial):
        # `asyncio.to_thread` wraps the function in the `run` of a context.
        in_context = isinstance(getattr(started.func, "__self__", None), contextvars.Context)
        return _name_of(started.args[0] if in_context and started.args else started.func)
    return str(getattr(started, "__qualname__", None) or type(started).__name__)
