"""Callables around a handler: filters before a run, hooks before and after it."""

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fairqueue.errors import ConfigurationError, shown
from fairqueue.worker.event_loop import Runner

Call = TypeVar("Call", bound=Callable[..., Any])
Callables = Callable[..., Any] | Sequence[Callable[..., Any]]

# The kinds of hooks, and their arguments.
KINDS = {
    "before": ("payload", "context"),
    "then": ("result", "context"),
    "catch": ("error", "context"),
    "finally_": ("context",),
}
FILTER = ("payload", "context")

_adding = threading.Lock()


@dataclass(frozen=True, slots=True)
class Hook:
    """A callable and the number of its arguments, so that its signature is read only once."""

    call: Callable[..., Any]
    count: int
    is_async: bool
    name: str

    @classmethod
    def create(cls, call: Callable[..., Any], kind: str, arguments: Sequence[str]) -> "Hook":
        """Check a callable that takes these arguments or the first of them.

        Raises ConfigurationError.
        """
        if not callable(call):
            raise ConfigurationError(f"{kind} must be callable, not {shown(call)}")
        name = str(getattr(call, "__name__", None) or type(call).__name__)
        count = _count(call, f"{kind} {name!r}", arguments)
        return cls(call, count, is_async(call), name)

    def __call__(self, runner: Runner, *arguments: Any) -> Any:
        """Call it with as many of these as it takes; a coroutine runs in the runner's loop."""
        answer = runner.call(self.call, *arguments[: self.count])
        return runner.wait(answer) if self.is_async else answer


class Hooks:
    """The hooks of a worker or of a handler; tuples, so that they can be read while others add."""

    def __init__(self) -> None:
        self.before: tuple[Hook, ...] = ()
        self.then: tuple[Hook, ...] = ()
        self.catch: tuple[Hook, ...] = ()
        self.finally_: tuple[Hook, ...] = ()

    def add(self, kind: str, calls: Callables) -> None:
        """Add one or several hooks. Raises ConfigurationError for one that cannot be called."""
        hooks = tuple(Hook.create(call, kind, KINDS[kind]) for call in listed(calls))
        with _adding:
            setattr(self, kind, getattr(self, kind) + hooks)


class Hookable:
    """Something to which hooks can be attached, by a call or as decorators.

    The order around a run: the worker's `before`, the handler's `before`, the handler; after a
    success the handler's `then`, the worker's `then`; after a failure the handler's `catch`, the
    worker's `catch`; always last the handler's `finally_` and the worker's `finally_`. Hooks run in
    the thread of the run, may be `async`, are not subject to the handler's time-out, and take all
    their arguments or only the first of them. The handler, its hooks and its filters share one copy
    of the context variables, which ends with the run.
    """

    _hooks: Hooks

    def before(self, call: Call) -> Call:
        """Call it with (payload, context) before the handler; if it raises, the run fails."""
        self._hooks.add("before", call)
        return call

    def then(self, call: Call) -> Call:
        """Call it with (result, context) after a success, before that is recorded.

        If it raises, the error is logged, and the run is still a success.
        """
        self._hooks.add("then", call)
        return call

    def catch(self, call: Call) -> Call:
        """Call it with (error, context) after a failure, including `Retry`, `Discard`, `TimedOut`.

        If it raises, the error is only logged.
        """
        self._hooks.add("catch", call)
        return call

    def finally_(self, call: Call) -> Call:
        """Call it with (context) at the end of each run.

        If it raises, the error is only logged.
        """
        self._hooks.add("finally_", call)
        return call


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Decides whether a task runs: its answer must be true (`wanted`) or false."""

    hook: Hook
    wanted: bool

    def refuses(self, runner: Runner, payload: Any, context: Any) -> bool:
        """Whether to skip the task. Raises what the filter raises."""
        return bool(self.hook(runner, payload, context)) is not self.wanted


def filters(when: Callables, skip: Callables) -> tuple[TaskFilter, ...]:
    """Return filters: all of `when` must be true, all of `skip` false.

    Raises ConfigurationError.
    """
    wanted = [TaskFilter(Hook.create(call, "when", FILTER), True) for call in listed(when)]
    unwanted = [TaskFilter(Hook.create(call, "skip", FILTER), False) for call in listed(skip)]
    return (*wanted, *unwanted)


def listed(calls: Callables) -> Sequence[Callable[..., Any]]:
    """Return one callable or several as a list."""
    return calls if isinstance(calls, list | tuple) else [calls]  # type: ignore[list-item]


def is_async(call: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine."""
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    )


def needed(signature: inspect.Signature) -> tuple[int, bool]:
    """Return how many positional arguments are required, and whether there is *args."""
    parameters = signature.parameters.values()
    required = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(required), any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _count(call: Callable[..., Any], what: str, arguments: Sequence[str]) -> int:
    """Return how many of the arguments a hook gets: those without a default."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return 1  # written in C
    count, takes_any = needed(signature)
    if takes_any:
        count = max(count, len(arguments))
    try:
        if count <= len(arguments):
            signature.bind(*([None] * count))
            return count
        reason = f"it needs {count}"
    except TypeError as error:
        reason = str(error)
    raise ConfigurationError(
        f"{what} must take ({', '.join(arguments)}) or the first of these; "
        f"its signature is {signature}: {reason}"
    )
