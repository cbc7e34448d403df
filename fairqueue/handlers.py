"""What a worker runs for a task: handlers by name, and what happens when one fails."""

import asyncio
import functools
import inspect
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fairqueue.errors import ConfigurationError
from fairqueue.models import Claim, Task
from fairqueue.validation import check_count, check_name, check_seconds

logger = logging.getLogger("fairqueue.task")

MAX_DOUBLINGS = 60  # 2 ** 60 seconds is beyond any cap; more would overflow


class Retry(Exception):
    """Raised by a handler: offer the task again, after `in_` seconds or as its policy says."""

    def __init__(self, reason: str = "", *, in_: float | None = None) -> None:
        super().__init__(reason)
        self.in_ = None if in_ is None else check_seconds(in_, "in_", ConfigurationError)


class Discard(Exception):
    """Raised by a handler: it makes no sense to try this task again; to the dead letters."""


class TimedOut(Exception):
    """Raised inside a handler that has run for longer than its time-out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and when a task that failed is offered again.

    retries: how many times after the first attempt. backoff: seconds before the first retry, which
    double each time up to `cap`; or a list, one delay for each retry, the last one repeated.
    jitter: "full" draws a delay between 0 and that, "none" takes it as it is.
    """

    retries: int = 5
    backoff: float | tuple[float, ...] = 2.0
    cap: float = 60.0
    jitter: str = "full"

    @classmethod
    def create(
        cls, retries: int, backoff: float | Sequence[float], cap: float, jitter: str
    ) -> "RetryPolicy":
        """A policy, checked. Raises ConfigurationError naming the value."""
        check_count(retries, "retries", ConfigurationError)
        cap = check_seconds(cap, "backoff_cap", ConfigurationError)
        if jitter not in ("full", "none"):
            raise ConfigurationError(f"jitter {jitter!r} is neither 'full' nor 'none'")
        if isinstance(backoff, list | tuple):
            if not backoff:
                raise ConfigurationError("backoff [] has no delay: give one for each retry")
            delays = tuple(check_seconds(each, "backoff", ConfigurationError) for each in backoff)
            return cls(retries=retries, backoff=delays, cap=cap, jitter=jitter)
        seconds = check_seconds(backoff, "backoff", ConfigurationError)
        return cls(retries=retries, backoff=seconds, cap=cap, jitter=jitter)

    def delay(self, attempt: int) -> float | None:
        """Seconds until the next attempt after this one failed, or None: there is no other."""
        if attempt > self.retries:
            return None
        if isinstance(self.backoff, tuple):
            delay = self.backoff[min(attempt, len(self.backoff)) - 1]
        else:
            delay = min(self.cap, self.backoff * 2 ** min(attempt - 1, MAX_DOUBLINGS))
        return delay if self.jitter == "none" else random.uniform(0, delay)  # noqa: S311 - jitter


class TaskContext:
    """What a handler may know of its run, and say while it runs.

    `cancelled` and `lease_lost` become True while it runs, within a third of the lease: a handler
    that takes long looks at them and ends early. A run whose lease is lost is not recorded.
    """

    def __init__(self, claim: Claim) -> None:
        self.task = claim.task
        self.task_id = claim.task.task_id
        self.attempt = claim.attempt
        self.cancelled = False
        self.lease_lost = False
        self.log = logging.LoggerAdapter(
            logger, {"task": claim.task.task_id, "user": claim.task.user_id}
        )


class Handler:
    """A callable that runs tasks of one name. Made by `Worker.task`."""

    def __init__(
        self,
        name: str,
        target: Callable[..., Any],
        policy: RetryPolicy,
        timeout: float | None = None,
        *,
        takes_task: bool = False,
    ) -> None:
        self.name = name
        self.policy = policy
        self.timeout = timeout
        self._target = target
        self._is_class = inspect.isclass(target)
        self._takes_task = takes_task
        call = _callable_of(target)
        what = f"the handler of {name!r}" if name else "the default handler"
        self._takes_context = _takes_context(call, what, takes_task=takes_task)
        self.is_async = _is_async(call)

    def run(self, context: TaskContext, runner: asyncio.Runner) -> Any:
        """Call it for a task; its result. Raises whatever it raises, TimedOut if it is async."""
        target = self._target
        if self._is_class:
            target = target().handle
        first: Task | dict[str, Any] = context.task if self._takes_task else context.task.payload
        arguments = (first, context) if self._takes_context else (first,)
        if not self.is_async:
            return target(*arguments)
        return runner.run(self._await(target(*arguments)))

    async def _await(self, coroutine: Any) -> Any:
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                return await coroutine
        except TimeoutError as error:
            if not limit.expired():
                raise  # the handler's own
            raise TimedOut(f"ran for more than {self.timeout:g} s") from error


class Handlers:
    """The handlers of a worker, by task name; nothing else is ever run."""

    def __init__(self, default: Callable[[Task], Any] | None) -> None:
        self._by_name: dict[str, Handler] = {}
        self._default = None
        if default is not None:
            if not callable(default):
                raise ConfigurationError(f"handler {default!r} cannot be called")
            self._default = Handler("", default, RetryPolicy(), takes_task=True)

    def add(self, handler: Handler) -> None:
        """Take a handler. Raises ConfigurationError if its name has one already."""
        check_name(handler.name, "name", ConfigurationError)
        if handler.name in self._by_name:
            raise ConfigurationError(f"task {handler.name!r} has a handler already")
        self._by_name[handler.name] = handler

    def label(self, name: str) -> str:
        """A task's name where it has a handler of its own, for metrics; else which one it has."""
        if name in self._by_name:
            return name
        return "unknown" if self._default is None else "default"

    def find(self, name: str) -> Handler | None:
        """The handler of a task, the default one, or None."""
        return self._by_name.get(name, self._default)


def _callable_of(target: Any) -> Callable[..., Any]:
    """What is called with the payload in the end, as far as that is known without an instance."""
    if inspect.isclass(target):
        return _handle_of(target)
    if not callable(target):
        raise ConfigurationError(f"{target!r} cannot be called: a function, or a class")
    return target  # type: ignore[no-any-return]


def _handle_of(target: type) -> Callable[..., Any]:
    name = target.__name__
    method = getattr(target, "handle", None)
    if not callable(method):
        raise ConfigurationError(f"class {name} cannot handle tasks: it needs a method `handle`")
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        raise ConfigurationError(f"class {name} must be made without arguments: {error}") from None
    except ValueError:
        pass  # written in C
    if isinstance(inspect.getattr_static(target, "handle"), staticmethod | classmethod):
        return method  # type: ignore[no-any-return]
    return functools.partial(method, None)  # None for self: to look at it, never to call it


def _is_async(call: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    )


def _takes_context(call: Callable[..., Any], what: str, *, takes_task: bool) -> bool:
    """Whether a handler gets a context after its first argument, which it must take."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return False  # written in C: it gets the payload
    parameters = signature.parameters.values()
    needed = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    takes_context = not takes_task and (len(needed) > 1 or takes_any)
    try:
        signature.bind(*([None] * (2 if takes_context else 1)))
    except TypeError as error:
        right = "the task" if takes_task else "the payload, or the payload and a context"
        raise ConfigurationError(
            f"{what} must take {right}; it takes {signature}: {error}"
        ) from None
    return takes_context
