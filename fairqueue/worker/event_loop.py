"""Call what belongs to one run in one context, and end what it leaves running in the event loop.

A slot runs the tasks of one user after those of another. What one of them sets in a context
variable, or starts beside its handler, must not reach the next.
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
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

# Seconds for all that a run has left behind to end after it was cancelled. What has not ended then
# never goes on: its event loop is given up. Only a thread cannot be ended.
LEFT_S = 1.0
THREADS_LOOK_S = 0.005  # between two looks at threads that have something to finish
MAX_NAMED = 10  # of those that were left running
# Timers of connections that close: nobody's own code, and each ends with its connection.
_HARMLESS = "asyncio.sslproto"

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


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

    def take(self) -> list[AsyncGenerator[Any, Any]]:
        """As `left`; each once, since it need not heed that it is to end."""
        taken = self.left()
        self.open.clear()
        return taken


class _Threads(ThreadPoolExecutor):
    """The threads of an event loop, which know what they have not finished."""

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
        """Let a thread call it."""
        job = super().submit(call, *args, **kwargs)
        self._unfinished[job] = call
        job.add_done_callback(lambda job: self._unfinished.pop(job, None))
        return job

    def unfinished(self) -> "dict[Future[Any], Callable[..., Any]]":
        """What they have not finished, and what is called there."""
        return self._unfinished.copy()


class Stage:
    """Where one slot runs its tasks, one after the other. It has an event loop once one is needed.

    For one thread. `begin` comes first for each run, `clear` last.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._variables = contextvars.Context()
        self._generators = _Generators()
        self._threads = _Threads()
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
            self._replace_threads(self._runner.get_loop())
        self._used = True
        return self._runner.run(self._watched(coroutine), context=self._variables)

    def _replace_threads(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let those that are there finish what they do, and the next run have others."""
        self._threads.shutdown(wait=False)
        self._threads = _Threads()
        loop.set_default_executor(self._threads)

    async def _watched(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        self._generators.watch()
        return await coroutine

    def clear(self) -> Leftovers | None:
        """Cancel what the run has left in the event loop; None if there was nothing.

        What goes on in spite of it is never run again: the next run gets another event loop. What
        goes on in a thread cannot be ended, and is only told.
        """
        if self._runner is None or not self._used:
            return None
        loop = self._runner.get_loop()
        sweep = _Sweep(loop, self._generators, self._threads)
        if not sweep.is_needed():
            return None
        self._runner.run(sweep.run(), context=contextvars.copy_context())
        ended = sweep.ended and not self._threads.unfinished()
        if not sweep.ended:
            self._runner = None
            loop.close()
        elif not ended:
            self._replace_threads(loop)
        names = sweep.names
        return Leftovers(tuple(names[:MAX_NAMED]), len(names), ended) if names else None


class _Sweep:
    """Ends what a run has left in an event loop, one kind after the other, for LEFT_S at most.

    What ends may start more of any kind, so that all are looked at again until nothing is there.
    Timers, and calls for the next turn, can be seen only in the event loops of asyncio itself.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, generators: _Generators, threads: _Threads
    ) -> None:
        self._loop = loop
        self._generators = generators
        self._threads = threads
        self._seen: set[Future[Any]] = set()
        self.names: list[str] = []
        self.ended = False  # all but what threads do

    def is_needed(self) -> bool:
        """Whether there is anything to end."""
        return bool(
            asyncio.all_tasks(self._loop)
            or self._generators.closing
            or self._generators.left()
            or self._timers()
            or self._turns()
            or self._threads.unfinished()
        )

    async def run(self) -> None:
        """End all that is there, as far as that can be done in time."""
        end = self._loop.time() + LEFT_S
        await asyncio.sleep(0)  # a generator that was dropped gets the task that closes it
        while (seconds := end - self._loop.time()) > 0:
            self.ended = False
            if tasks := self._cancel_tasks() or self._close_generators():
                await _end(tasks, seconds)
            elif self._cancel_timers() or self._turns():
                await asyncio.sleep(0)
            else:
                self.ended = True
                if not self._cancel_jobs():
                    return
                await asyncio.sleep(THREADS_LOOK_S)
        if not self.ended and not self.names:
            self._name(getattr(each, "_callback", each) for each in self._turns())

    def _cancel_tasks(self) -> "set[asyncio.Task[Any]]":
        tasks = {each for each in asyncio.all_tasks() if each is not asyncio.current_task()}
        # Others are those with which the event loop closes a generator.
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
        """Whether a thread has something to finish; what none has begun is given up."""
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

    def _turns(self) -> list[asyncio.Handle]:
        """Calls for the next turn of the event loop."""
        return list(getattr(self._loop, "_ready", ()))

    def _name(self, started: Iterable[Any]) -> None:
        self.names += map(_name_of, started)


async def _end(tasks: "set[asyncio.Task[Any]]", seconds: float) -> None:
    """Wait for these to end; how they do is nobody's business any more."""
    done, _ = await asyncio.wait(tasks, timeout=seconds)
    for task in done:
        if not task.cancelled():
            task.exception()  # otherwise asyncio complains that nobody asked


async def _close(generator: AsyncGenerator[Any, Any]) -> None:
    with suppress(Exception):
        await generator.aclose()


def _module(handle: asyncio.Handle) -> object:
    return getattr(getattr(handle, "_callback", None), "__module__", None)


def _name_of(started: Any) -> str:
    if isinstance(started, functools.partial):
        # That of `asyncio.to_thread` calls what it was given in a context.
        in_context = isinstance(getattr(started.func, "__self__", None), contextvars.Context)
        return _name_of(started.args[0] if in_context and started.args else started.func)
    return str(getattr(started, "__qualname__", None) or type(started).__name__)
