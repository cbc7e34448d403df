"""What a worker runs for a task: handlers by name, and what happens when one fails."""

import asyncio
import copy
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack

from fairqueue.errors import ConfigurationError, TimedOut, shown
from fairqueue.logs import log_event
from fairqueue.models import Task
from fairqueue.retry_policy import RetryPolicy, check_timeout
from fairqueue.validation import check_count, check_name, check_number, check_seconds
from fairqueue.worker.context import RunningTask, TaskContext
from fairqueue.worker.event_loop import Stage
from fairqueue.worker.hooks import KINDS, Callables, Filter, Hooks, filters, is_async, needed

logger = logging.getLogger("fairqueue.worker")

LEAST_RATE, MOST_RATE = 0.001, 1e6  # runs of a handler per second


class Retry(Exception):
    """Raised by a handler: offer the task again, after `in_` seconds or as its policy says."""

    def __init__(self, reason: str = "", *, in_: float | None = None) -> None:
        super().__init__(reason)
        self.in_ = None if in_ is None else check_seconds(in_, "in_", ConfigurationError)


class Discard(Exception):
    """Raised by a handler: it makes no sense to try this task again; to the dead letters."""


class HandlerOptions(TypedDict, total=False):
    """What may be said of a handler when it is registered; `Worker.task` explains each."""

    retries: int
    backoff: float | Sequence[float]
    backoff_cap: float
    backoff_multiplier: float
    jitter: str
    timeout: float | None
    slots: int
    rate: float | None
    isolation: str
    when: Callables
    skip: Callables
    before: Callables
    then: Callables
    catch: Callables
    finally_: Callables


# Those that a class may have as attributes when it is registered with its module.
CLASS_OPTIONS = (
    "retries",
    "backoff",
    "backoff_cap",
    "backoff_multiplier",
    "jitter",
    "timeout",
    "slots",
    "rate",
    "isolation",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSettings:
    """The options of a handler, checked."""

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    timeout: float | None = None
    slots: int = 0
    rate: float | None = None
    isolated: bool = False
    filters: tuple[Filter, ...] = ()
    hooks: tuple[tuple[str, Callables], ...] = ()

    @classmethod
    def create(cls, **options: Unpack[HandlerOptions]) -> "HandlerSettings":
        """Settings of a handler. Raises ConfigurationError naming the option and its value."""
        unknown = sorted(options.keys() - HandlerOptions.__annotations__.keys())
        if unknown:
            known = ", ".join(HandlerOptions.__annotations__)
            raise ConfigurationError(f"{shown(unknown[0])} is no option of a handler: {known} are")
        timeout, rate = options.get("timeout"), options.get("rate")
        isolation = options.get("isolation", "thread")
        if isolation not in ("thread", "process"):
            raise ConfigurationError(
                f"isolation {shown(isolation)} is neither 'thread' nor 'process'"
            )
        if timeout is not None:
            timeout = check_timeout(timeout, ConfigurationError)
        if rate is not None:
            rate = check_number(rate, "rate", ConfigurationError, least=LEAST_RATE, most=MOST_RATE)
        backoff = options.get("backoff", 2.0)
        usual_jitter = "none" if isinstance(backoff, list | tuple) else "full"
        hooks = tuple((kind, options[kind]) for kind in KINDS if kind in options)  # type: ignore[literal-required]
        for kind, calls in hooks:
            Hooks().add(kind, calls)  # so that a bad one is named here
        return cls(
            policy=RetryPolicy.create(
                options.get("retries", 5),
                backoff,
                options.get("backoff_cap", 60.0),
                options.get("jitter", usual_jitter),
                options.get("backoff_multiplier", 2.0),
            ),
            timeout=timeout,
            slots=check_count(options.get("slots", 0), "slots", ConfigurationError),
            rate=rate,
            isolated=isolation == "process",
            filters=filters(options.get("when", ()), options.get("skip", ())),
            hooks=hooks,
        )

    @property
    def limits(self) -> dict[str, float | None]:
        """What has to hold across all workers, and is therefore stored; {} if nothing has."""
        if not self.slots and self.rate is None and self.timeout is None:
            return {}
        return {"slots": self.slots, "rate": self.rate, "timeout": self.timeout}


class Handler:
    """A callable that runs tasks of one name. Made by `Worker.task`."""

    def __init__(
        self,
        name: str,
        target: Callable[..., Any],
        settings: HandlerSettings,
        *,
        takes_task: bool = False,
    ) -> None:
        self.name = name
        self.settings = settings
        self.policy = settings.policy
        self.timeout = settings.timeout
        self.filters = settings.filters
        self.hooks = Hooks()
        for kind, calls in settings.hooks:
            self.hooks.add(kind, calls)
        self.target = target
        self._is_class = inspect.isclass(target)
        self._takes_task = takes_task
        call = _callable_of(target)
        what = f"the handler of {shown(name)}" if name else "the default handler"
        self._takes_context = _takes_context(call, what, takes_task=takes_task)
        self.is_async = is_async(call)

    def run(self, context: TaskContext, stage: Stage) -> Any:
        """Call it for a task; its result. Raises whatever it raises, TimedOut if it is async."""
        target = self.target
        if self._is_class:
            target = stage.call(target).handle
        first: Task | dict[str, Any]
        first = RunningTask.of(context) if self._takes_task else context.task.payload
        arguments = (first, context) if self._takes_context else (first,)
        answer = stage.call(target, *arguments)
        return stage.wait(self._await(answer)) if self.is_async else answer

    def under(self, policy: Mapping[str, Any]) -> "Handler":
        """The same, with retries, delays and time-out as a task wants them.

        Raises ConfigurationError for what was stored and cannot be used.
        """
        timeout = self.timeout
        if "timeout" in policy:
            timeout = check_timeout(policy["timeout"], ConfigurationError)
        settings = replace(self.settings, policy=self.policy.under(policy), timeout=timeout)
        changed = copy.copy(self)
        changed.settings, changed.policy, changed.timeout = (
            settings,
            settings.policy,
            settings.timeout,
        )
        return changed

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
                raise ConfigurationError(f"handler {shown(default)} cannot be called")
            self._default = Handler("", default, HandlerSettings(), takes_task=True)

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

    def find(self, task: Task) -> Handler | None:
        """The handler of a task, the default one, or None; with the task's own policy."""
        handler = self._by_name.get(task.name, self._default)
        if handler is None or not task.policy:
            return handler
        try:
            return handler.under(task.policy)
        except (ConfigurationError, AttributeError, TypeError) as error:
            log_event(
                logger,
                "policy_unusable",
                logging.WARNING,
                task=task.task_id,
                user=task.user_id,
                error=str(error),
            )
            return handler

    @property
    def takes_any(self) -> bool:
        """Whether there is a default handler."""
        return self._default is not None

    def named(self) -> list[Handler]:
        """All that have a name."""
        return list(self._by_name.values())


def handler_classes(module_name: str) -> dict[str, tuple[type, HandlerOptions]]:
    """The classes of a module that can handle tasks, by dotted path, with their options.

    Those that are defined there and have a method `handle`, but for abstract ones and those whose
    name begins with an underscore. Imports the module. Raises ConfigurationError if that fails or
    there is no such class.
    """
    check_name(module_name, "module", ConfigurationError)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigurationError(
            f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    found: dict[str, tuple[type, HandlerOptions]] = {}
    for value in vars(module).values():
        if inspect.isclass(value) and _handles(value, module.__name__):
            options = {name: getattr(value, name) for name in CLASS_OPTIONS if hasattr(value, name)}
            found[f"{module_name}.{value.__qualname__}"] = (value, options)  # type: ignore[assignment]
    if not found:
        raise ConfigurationError(f"module {module_name!r} has no class with a method `handle`")
    return found


def _handles(value: type, module_name: str) -> bool:
    return (
        value.__module__ == module_name
        and not value.__name__.startswith("_")
        and not inspect.isabstract(value)
        and callable(getattr(value, "handle", None))
    )


def _callable_of(target: Any) -> Callable[..., Any]:
    """What is called with the payload in the end, as far as that is known without an instance."""
    if inspect.isclass(target):
        return _handle_of(target)
    if not callable(target):
        raise ConfigurationError(f"{shown(target)} cannot be called: a function, or a class")
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


def _takes_context(call: Callable[..., Any], what: str, *, takes_task: bool) -> bool:
    """Whether a handler gets a context after its first argument, which it must take."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return False  # written in C: it gets the payload
    count, takes_any = needed(signature)
    takes_context = not takes_task and (count > 1 or takes_any)
    try:
        signature.bind(*([None] * (2 if takes_context else 1)))
    except TypeError as error:
        right = "the task" if takes_task else "the payload, or the payload and a context"
        raise ConfigurationError(
            f"{what} must take {right}; it takes {signature}: {error}"
        ) from None
    return takes_context
