"""The handlers of a worker, by task name, and their options."""

import asyncio
import copy
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack

from fairqueue.errors import ConfigurationError, TimedOut, kind_of, shown
from fairqueue.flow_options import DEFAULT_POOL, check_pool
from fairqueue.logs import event_logger, whose
from fairqueue.models import Task
from fairqueue.retry_policy import RetryPolicy, check_timeout
from fairqueue.validation import (
    check_count,
    check_name,
    check_number,
    check_one_of,
    check_seconds,
)
from fairqueue.worker.context import RunningTask, TaskContext
from fairqueue.worker.event_loop import Runner
from fairqueue.worker.hooks import KINDS, Callables, Hooks, TaskFilter, filters, is_async, needed

_log = event_logger("fairqueue.worker")

MOST_BATCH = 250  # tasks in one call: as many as one claim takes
MOST_BATCH_WAIT_S = 60.0
BATCH_BY = ("user", "tenant")
LEAST_RATE, MOST_RATE = 0.001, 1e6  # runs of a handler per second


class Retry(Exception):
    """Raised by a handler to retry the task.

    It runs again after `in_` seconds, or after the delay of its retry policy.
    """

    def __init__(self, reason: str = "", *, in_: float | None = None) -> None:
        super().__init__(reason)
        self.in_ = None if in_ is None else check_seconds(in_, "in_", ConfigurationError)


class Discard(Exception):
    """Raised by a handler to bury the task without further attempts."""


class HandlerOptions(TypedDict, total=False):
    """The options of a handler; `Worker.task` explains each."""

    retries: int
    backoff: float | Sequence[float]
    backoff_cap: float
    backoff_multiplier: float
    jitter: str
    timeout: float | None
    slots: int
    rate: float | None
    pool: str
    batch: int | None
    batch_wait: float
    batch_by: str | None
    isolation: str
    when: Callables
    skip: Callables
    before: Callables
    then: Callables
    catch: Callables
    finally_: Callables


# The options that may be attributes of a class, when it is registered with its module.
CLASS_OPTIONS = (
    *("retries", "backoff", "backoff_cap", "backoff_multiplier", "jitter"),
    *("timeout", "slots", "rate", "pool", "batch", "batch_wait", "batch_by", "isolation"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSettings:
    """The checked options of a handler. batch: 0 if it takes one task in a call."""

    policy: RetryPolicy = field(default_factory=RetryPolicy)
    timeout: float | None = None
    slots: int = 0
    rate: float | None = None
    pool: str = DEFAULT_POOL
    batch: int = 0
    batch_wait: float = 0.0
    batch_by: str | None = None
    isolated: bool = False
    filters: tuple[TaskFilter, ...] = ()
    hooks: tuple[tuple[str, Callables], ...] = ()

    @classmethod
    def create(cls, **options: Unpack[HandlerOptions]) -> "HandlerSettings":
        """Check options. Raises ConfigurationError naming the option and its value."""
        unknown = sorted(options.keys() - HandlerOptions.__annotations__.keys())
        if unknown:
            known = ", ".join(HandlerOptions.__annotations__)
            raise ConfigurationError(
                f"{shown(unknown[0])} is not an option of a handler: use one of {known}"
            )
        timeout, rate = options.get("timeout"), options.get("rate")
        isolation = options.get("isolation", "thread")
        if isolation not in ("thread", "process"):
            raise ConfigurationError(
                f"isolation must be 'thread' or 'process', not {shown(isolation)}"
            )
        if timeout is not None:
            timeout = check_timeout(timeout, ConfigurationError)
        if rate is not None:
            rate = check_number(rate, "rate", ConfigurationError, least=LEAST_RATE, most=MOST_RATE)
        backoff = options.get("backoff", 2.0)
        usual_jitter = "none" if isinstance(backoff, list | tuple) else "full"
        hooks = tuple((kind, options[kind]) for kind in KINDS if kind in options)  # type: ignore[literal-required]
        for kind, calls in hooks:
            Hooks().add(kind, calls)  # so that a bad hook raises here
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
            pool=check_pool(options.get("pool", DEFAULT_POOL), ConfigurationError),
            **_batch_options(options),
            isolated=isolation == "process",
            filters=filters(options.get("when", ()), options.get("skip", ())),
            hooks=hooks,
        )

    @property
    def limits(self) -> dict[str, float | None]:
        """The limits that hold across all workers, and are stored; {} if there are none."""
        if not self.slots and self.rate is None and self.timeout is None:
            return {}
        return {"slots": self.slots, "rate": self.rate, "timeout": self.timeout}


def _batch_options(options: HandlerOptions) -> dict[str, Any]:
    """Return the checked options of batches. Raises ConfigurationError naming the value."""
    batch, wait, by = options.get("batch"), options.get("batch_wait", 0.0), options.get("batch_by")
    wait = check_seconds(wait, "batch_wait", ConfigurationError, most=MOST_BATCH_WAIT_S)
    if by is not None:
        check_one_of(by, "batch_by", BATCH_BY, ConfigurationError)
    if batch is None:
        for name, value in (("batch_wait", wait), ("batch_by", by)):
            if value:
                raise ConfigurationError(f"{name} {shown(value)} needs batch, the largest number")
        return {}
    batch = check_count(batch, "batch", ConfigurationError, least=1, most=MOST_BATCH)
    return {"batch": batch, "batch_wait": wait, "batch_by": by}


class Handler:
    """A callable that runs tasks of one name. Created by `Worker.task`."""

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
        gets = _GETS_ONE
        if takes_task:
            gets = _GETS_TASK
        elif settings.batch:
            gets = _GETS_BATCH
        self._takes_context = _takes_context(call, what, gets)
        self.is_async = is_async(call)

    def run(self, context: TaskContext, runner: Runner) -> Any:
        """Call it for a task and return its result.

        Raises whatever the handler raises, and TimedOut if it is async.
        """
        first: Task | dict[str, Any]
        first = RunningTask.of(context) if self._takes_task else context.task.payload
        return self._call(runner, first, context)

    def run_batch(self, contexts: Sequence[TaskContext], runner: Runner) -> list[Any]:
        """Call it for several tasks; return for each a result, or the exception of its failure.

        Raises as `run`, and TypeError if it returns neither None nor a list of that length.
        """
        answer = self._call(runner, [each.task.payload for each in contexts], [*contexts])
        if answer is None:
            return [None] * len(contexts)
        if isinstance(answer, list | tuple) and len(answer) == len(contexts):
            return list(answer)
        what = kind_of(answer)
        if isinstance(answer, list | tuple):
            what = f"{what} of {len(answer)}"
        raise TypeError(
            f"the handler of {self.name!r} must return None, or a list with one result for each of "
            f"its {len(contexts)} tasks, not {what}"
        )

    def _call(self, runner: Runner, first: object, context: object) -> Any:
        target = self.target
        if self._is_class:
            target = runner.call(target).handle
        arguments = (first, context) if self._takes_context else (first,)
        answer = runner.call(target, *arguments)
        return runner.wait(self._await(answer)) if self.is_async else answer

    def under(self, policy: Mapping[str, Any]) -> "Handler":
        """Return a copy with the retry policy and time-out of a task.

        Raises ConfigurationError if the stored policy is invalid.
        """
        timeout = self.timeout
        if "timeout" in policy:
            timeout = check_timeout(policy["timeout"], ConfigurationError)
        settings = replace(self.settings, policy=self.policy.under(policy), timeout=timeout)
        changed = copy.copy(self)
        changed.settings, changed.policy, changed.timeout = settings, settings.policy, timeout
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
    """The handlers of a worker, by task name. A worker runs only these."""

    def __init__(self, default: Callable[[Task], Any] | None) -> None:
        self._by_name: dict[str, Handler] = {}
        self._default = None
        if default is not None:
            if not callable(default):
                raise ConfigurationError(f"handler must be callable, not {shown(default)}")
            self._default = Handler("", default, HandlerSettings(), takes_task=True)

    def add(self, handler: Handler) -> None:
        """Add a handler. Raises ConfigurationError if its name has one already."""
        check_name(handler.name, "name", ConfigurationError)
        if handler.name in self._by_name:
            raise ConfigurationError(f"a handler for task {handler.name!r} is already registered")
        self._by_name[handler.name] = handler

    def label(self, name: str) -> str:
        """Return the metric label of a task: its name, "default", or "unknown"."""
        if name in self._by_name:
            return name
        return "unknown" if self._default is None else "default"

    def find(self, task: Task) -> Handler | None:
        """Return the handler of a task, with the task's own policy; None if there is none."""
        handler = self._by_name.get(task.name, self._default)
        if handler is None or not task.policy:
            return handler
        try:
            return handler.under(task.policy)
        except (ConfigurationError, AttributeError, TypeError) as error:
            _log(
                "policy_unusable",
                logging.WARNING,
                task=task.task_id,
                **whose(task.user_id, task.tenant),
                error=str(error),
            )
            return handler

    @property
    def takes_any(self) -> bool:
        """Whether there is a default handler."""
        return self._default is not None

    def named(self) -> list[Handler]:
        """Return all handlers except the default one."""
        return list(self._by_name.values())


def handler_classes(module_name: str) -> dict[str, tuple[type, HandlerOptions]]:
    """Import a module and return its handler classes, by dotted path, with their options.

    Handler classes are defined there and have a method `handle`; abstract ones and those whose name
    begins with an underscore are left out. Raises ConfigurationError if the import fails or there
    is no such class.
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
    """Return the callable that gets the payload, without creating an instance."""
    if inspect.isclass(target):
        return _handle_of(target)
    if not callable(target):
        raise ConfigurationError(f"handler must be a function or a class, not {shown(target)}")
    return target  # type: ignore[no-any-return]


def _handle_of(target: type) -> Callable[..., Any]:
    name = target.__name__
    method = getattr(target, "handle", None)
    if not callable(method):
        raise ConfigurationError(f"class {name} cannot handle tasks: it needs a method `handle`")
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        raise ConfigurationError(
            f"class {name} must have a constructor without arguments: {error}"
        ) from None
    except ValueError:
        pass  # written in C
    if isinstance(inspect.getattr_static(target, "handle"), staticmethod | classmethod):
        return method  # type: ignore[no-any-return]
    return functools.partial(method, None)  # None for self: for its signature only, never called


# What handlers get.
_GETS_TASK = "the task"
_GETS_ONE = "the payload, or the payload and a context"
_GETS_BATCH = "the payloads, or the payloads and their contexts"


def _takes_context(call: Callable[..., Any], what: str, gets: str) -> bool:
    """Whether a handler takes a context as its second argument. Checks that it takes the first."""
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return False  # written in C: it gets only the payload
    count, takes_any = needed(signature)
    takes_context = gets != _GETS_TASK and (count > 1 or takes_any)
    try:
        signature.bind(*([None] * (2 if takes_context else 1)))
    except TypeError as error:
        raise ConfigurationError(
            f"{what} must take {gets}; its signature is {signature}: {error}"
        ) from None
    return takes_context
