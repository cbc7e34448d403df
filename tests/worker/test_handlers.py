"""Handlers without a server: what may be one, what it gets, and when a failure is tried again."""

import asyncio
import copy
import functools
import logging
import random
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from helpers.tasks import Unshowable, make_task

from fairqueue.errors import ConfigurationError, FairQueueError, TimedOut
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.retry_policy import RetryPolicy
from fairqueue.worker.context import LogCapture, RunningTask, TaskContext
from fairqueue.worker.event_loop import Runner
from fairqueue.worker.handlers import Discard, Handler, Handlers, HandlerSettings, Retry
from fairqueue.worker.worker import Worker

PAYLOAD = {"n": 7}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        runner.begin()
        yield runner


@pytest.fixture
def context() -> TaskContext:
    task = Task.create(user_id="alice", task_id="t", payload=PAYLOAD, name="job")
    return TaskContext(task, attempt=3)


@pytest.fixture
def worker() -> Worker:
    """One that never meets a server: nothing listens at this address."""
    return Worker(TaskQueue(redis.Redis(port=1)))


def policy(**fields: Any) -> RetryPolicy:
    given: dict[str, Any] = {"retries": 5, "backoff": 2.0, "cap": 60.0, "jitter": "none"}
    return RetryPolicy.create(**given | fields)


def delays(policy: RetryPolicy) -> list[float | None]:
    """What it says after each attempt, up to and including the first None."""
    found: list[float | None] = []
    while not found or found[-1] is not None:
        found.append(policy.delay(len(found) + 1))
    return found


def handler(target: Callable[..., Any], timeout: float | None = None) -> Handler:
    return Handler("job", target, HandlerSettings.create(timeout=timeout))


# --- delays ---------------------------------------------------------------------------------------


def test_delays_double_from_the_backoff_up_to_the_cap() -> None:
    assert delays(policy(retries=7)) == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, None]


def test_a_list_gives_each_delay_and_its_last_one_is_repeated() -> None:
    assert delays(policy(retries=4, backoff=[1, 5])) == [1.0, 5.0, 5.0, 5.0, None]
    assert delays(policy(retries=1, backoff=(3, 4, 5))) == [3.0, None]


def test_a_list_is_not_cut_by_the_cap_which_is_for_doubling() -> None:
    assert policy(backoff=[600.0], cap=60.0).delay(1) == 600.0


def test_delays_grow_by_the_multiplier() -> None:
    assert delays(policy(retries=4, multiplier=1)) == [2.0, 2.0, 2.0, 2.0, None]
    assert delays(policy(retries=4, multiplier=3)) == [2.0, 6.0, 18.0, 54.0, None]
    assert policy(retries=1000, multiplier=100.0).delay(1000) == 60.0


def test_without_a_word_on_jitter_a_list_is_exact_and_a_number_is_drawn_from() -> None:
    assert HandlerSettings.create().policy == RetryPolicy(jitter="full")
    assert HandlerSettings.create(backoff=3).policy.jitter == "full"
    assert HandlerSettings.create(backoff=[3]).policy.jitter == "none"
    assert HandlerSettings.create(backoff=[3], jitter="full").policy.jitter == "full"


def test_without_retries_there_is_no_second_attempt() -> None:
    assert delays(policy(retries=0)) == [None]


def test_a_backoff_of_zero_is_no_delay_however_often() -> None:
    assert delays(policy(retries=3, backoff=0)) == [0.0, 0.0, 0.0, None]


def test_timedeltas_are_durations_in_each_place() -> None:
    second = timedelta(seconds=1)
    assert delays(policy(retries=3, backoff=second, cap=3 * second)) == [1.0, 2.0, 3.0, None]
    assert delays(policy(retries=2, backoff=[second, 2 * second])) == [1.0, 2.0, None]


@pytest.mark.parametrize("attempt", [61, 1_000, 999_999_999])
def test_a_huge_attempt_has_the_cap_as_its_delay(attempt: int) -> None:
    assert policy(retries=1_000_000_000, backoff=0.001).delay(attempt) == 60.0
    assert policy(retries=1_000_000_000, backoff=[1.0, 2.0]).delay(attempt) == 2.0


def test_full_jitter_draws_between_nothing_and_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []

    def draw(low: float, high: float) -> float:
        asked.append((low, high))
        return high / 4

    monkeypatch.setattr(random, "uniform", draw)
    assert delays(policy(retries=2, jitter="full")) == [0.5, 1.0, None]
    assert delays(policy(retries=1, backoff=[8], jitter="full")) == [2.0, None]
    assert asked == [(0, 2.0), (0, 4.0), (0, 8.0)]


def test_without_jitter_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(random, "uniform")
    assert policy().delay(1) == 2.0


def test_jitter_really_varies_and_stays_within_the_delay() -> None:
    drawn = [policy(jitter="full").delay(1) for _ in range(200)]
    assert all(delay is not None and 0 <= delay <= 2 for delay in drawn)
    assert len(set(drawn)) > 100


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("retries", -1, "not -1"),
        ("retries", 1.5, "not 1.5"),
        ("retries", True, "not True"),
        ("retries", None, "not None"),
        ("backoff", -0.5, "not -0.5"),
        ("backoff", "soon", "not 'soon'"),
        ("backoff", float("nan"), "not nan"),
        ("backoff", [], "1 to 1000 delays, not 0"),
        ("backoff", (), "1 to 1000 delays, not 0"),
        ("backoff", [1, -2], "not -2"),
        ("backoff", [1, "x"], "not 'x'"),
        ("backoff", {1, 2}, "not {1, 2}"),
        ("backoff_cap", float("inf"), "not inf"),
        ("backoff_cap", None, "not None"),
        ("jitter", "some", "not 'some'"),
        ("jitter", None, "not None"),
        ("jitter", ["full"], "not ['full']"),
        ("timeout", 0, "not 0"),
        ("timeout", -1, "not -1"),
        ("timeout", "1 s", "not '1 s'"),
    ],
)
def test_a_bad_setting_is_named(worker: Worker, field: str, value: object, named: str) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(ConfigurationError) as error:
        worker.task("job", **settings)
    assert str(error.value).startswith(f"{field} must ")
    assert named in str(error.value)


@pytest.mark.parametrize("name", ["", "a\nb", None, 7, "x" * 201])
def test_a_bad_task_name_is_refused(worker: Worker, name: Any) -> None:
    with pytest.raises(ConfigurationError, match="name "):
        worker.task(name)(lambda payload: None)


@pytest.mark.parametrize("in_", [-1, "soon", True, float("inf")])
def test_a_retry_in_no_time_at_all_is_refused_where_it_is_made(in_: Any) -> None:
    with pytest.raises(ConfigurationError, match="in_ "):
        Retry(in_=in_)


def test_a_retry_has_its_reason_and_its_time_in_seconds() -> None:
    assert (str(Retry("busy", in_=timedelta(minutes=1))), Retry(in_=3).in_) == ("busy", 3.0)  # type: ignore[arg-type]
    assert Retry(in_=timedelta(minutes=1)).in_ == 60.0  # type: ignore[arg-type]
    assert (str(Retry()), Retry().in_) == ("", None)


def test_what_handlers_raise_is_no_error_of_the_library() -> None:
    for kind in (Retry, Discard, TimedOut):
        assert not issubclass(kind, FairQueueError)


# --- what may be a handler, and what it gets ------------------------------------------------------


def plain(payload: Any) -> Any:
    return payload


def with_context(payload: Any, context: Any) -> Any:
    return payload, context


def with_option(payload: Any, repeat: int = 1) -> Any:
    return payload, repeat


def anything(*args: Any) -> Any:
    return args


def payload_and_more(payload: Any, *rest: Any, **named: Any) -> Any:
    return payload, *rest


def optional(payload: Any = None) -> Any:
    return payload


def named_only(payload: Any, *, factor: int = 2) -> Any:
    return payload, factor


async def plain_async(payload: Any) -> Any:
    await asyncio.sleep(0)
    return payload


async def async_with_context(payload: Any, context: Any) -> Any:
    await asyncio.sleep(0)
    return payload, context


class Plain:
    def handle(self, payload: Any) -> Any:
        return payload

    def other(self, payload: Any, context: Any) -> Any:
        return payload, context


class OddSelf:
    def handle(this, payload: Any) -> Any:
        return payload


class WithContext:
    def handle(self, payload: Any, context: Any) -> Any:
        return payload, context


class Static:
    @staticmethod
    def handle(payload: Any, context: Any) -> Any:
        return payload, context


class OfClass:
    @classmethod
    def handle(cls, payload: Any) -> Any:
        return payload


class Async:
    async def handle(self, payload: Any, context: Any) -> Any:
        await asyncio.sleep(0)
        return payload, context


class Callable_:
    def __call__(self, payload: Any, context: Any) -> Any:
        return payload, context


class AsyncCallable:
    async def __call__(self, payload: Any) -> Any:
        await asyncio.sleep(0)
        return payload


@pytest.mark.parametrize(
    "target",
    [
        plain,
        optional,
        plain_async,
        lambda payload: payload,
        Plain,
        OddSelf,
        OfClass,
        Plain().handle,
        AsyncCallable(),
        functools.partial(lambda extra, payload: payload, 1),
    ],
)
def test_a_handler_may_take_the_payload(context: TaskContext, runner: Runner, target: Any) -> None:
    assert handler(target).run(context, runner) == PAYLOAD


@pytest.mark.parametrize(
    "target",
    [
        with_context,
        anything,
        payload_and_more,
        async_with_context,
        WithContext,
        Static,
        Async,
        Plain().other,
        Callable_(),
    ],
)
def test_a_handler_of_two_arguments_gets_the_payload_and_the_context(
    context: TaskContext, runner: Runner, target: Any
) -> None:
    payload, given = handler(target).run(context, runner)
    assert payload == PAYLOAD
    assert given is context


@pytest.mark.parametrize("target", [with_option, named_only])
def test_default_arguments_are_kept(context: TaskContext, runner: Runner, target: Any) -> None:
    assert handler(target).run(context, runner)[1] in (1, 2)


def test_builtins_get_the_payload(
    context: TaskContext, runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert handler(len).run(context, runner) == 1
    assert handler(max).run(context, runner) == "n"  # one whose signature is not known
    handler(print).run(context, runner)
    assert capsys.readouterr().out.startswith(str(PAYLOAD))


def test_each_run_of_a_class_has_its_own_instance(context: TaskContext, runner: Runner) -> None:
    class Counting:
        def __init__(self) -> None:
            self.runs = 0

        def handle(self, payload: Any) -> int:
            self.runs += 1
            return self.runs

    one = handler(Counting)
    assert [one.run(context, runner) for _ in range(3)] == [1, 1, 1]


def no_arguments() -> None: ...
def three(a: Any, b: Any, c: Any) -> None: ...
def three_and_more(a: Any, b: Any, c: Any, *rest: Any) -> None: ...
def only_named(*, payload: Any) -> None: ...
def needs_named(payload: Any, *, factor: int) -> None: ...


class NoPayload:
    def handle(self) -> None: ...


class TooMuch:
    def handle(self, a: Any, b: Any, c: Any) -> None: ...


@pytest.mark.parametrize(
    "target", [no_arguments, three, three_and_more, only_named, needs_named, NoPayload, TooMuch]
)
def test_a_handler_of_the_wrong_arguments_is_not_registered(worker: Worker, target: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"handler of 'job' must take the payload"):
        worker.task("job")(target)


class NoHandle: ...


class HandleIsNone:
    handle = None


class NeedsArguments:
    def __init__(self, database: object) -> None: ...
    def handle(self, payload: Any) -> None: ...


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (NoHandle, "NoHandle .* `handle`"),
        (dict, "dict .* `handle`"),
        (HandleIsNone, "HandleIsNone .* `handle`"),
        (NeedsArguments, "NeedsArguments must have a constructor without arguments: .*'database'"),
        ("build", "must be a function or a class, not 'build'"),
        (None, "must be a function or a class, not None"),
        (NoHandle(), "must be a function or a class, not .*NoHandle object"),
    ],
)
def test_what_cannot_be_a_handler_is_refused(worker: Worker, target: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        worker.task("job")(target)


def test_a_name_has_one_handler(worker: Worker) -> None:
    worker.task("job")(plain)
    with pytest.raises(ConfigurationError, match="a handler for task 'job' is already registered"):
        worker.task("job")(with_context)


# --- the default handler --------------------------------------------------------------------------


@pytest.mark.parametrize("target", [plain, anything, plain_async, Plain, AsyncCallable()])
def test_the_default_handler_gets_the_task(
    context: TaskContext, runner: Runner, target: Any
) -> None:
    found = Handlers(target).find(make_task(name="whatever"))
    assert found is not None
    result = found.run(context, runner)
    assert (result[0] if isinstance(result, tuple) else result) == context.task


@pytest.mark.parametrize("target", [no_arguments, with_context, only_named])
def test_a_default_handler_that_cannot_take_a_task_is_refused(target: Any) -> None:
    with pytest.raises(ConfigurationError, match="default handler must take the task"):
        Handlers(target)


def test_a_default_handler_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="handler must be callable, not 'x'"):
        Handlers("x")  # type: ignore[arg-type]


def test_a_handler_of_its_own_goes_before_the_default_one() -> None:
    handlers = Handlers(plain)
    own = handler(with_context)
    handlers.add(own)
    assert handlers.find(make_task(name="job")) is own
    assert handlers.find(make_task(name="other")) not in (None, own)
    assert Handlers(None).find(make_task(name="job")) is None


# --- time in async handlers -----------------------------------------------------------------------


def test_an_async_handler_is_ended_by_its_time_out(context: TaskContext, runner: Runner) -> None:
    ended: list[str] = []

    async def forever(payload: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(TimedOut, match=r"ran for more than 0\.01 s"):
        handler(forever, timeout=0.01).run(context, runner)
    assert ended == ["cancelled"]


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_time_out_that_an_async_handler_raises_itself_is_its_own_error(
    context: TaskContext, runner: Runner, timeout: float | None
) -> None:
    async def fails(payload: Any) -> None:
        raise TimeoutError("the database did not answer")

    with pytest.raises(TimeoutError, match="the database did not answer"):
        handler(fails, timeout).run(context, runner)


# --- the context ----------------------------------------------------------------------------------


def test_a_context_logs_with_its_id(context: TaskContext, caplog: pytest.LogCaptureFixture) -> None:
    assert (context.task_id, context.attempt, context.task.user_id) == ("t", 3, "alice")
    assert (context.cancelled, context.lease_lost) == (False, False)
    with caplog.at_level("INFO", "fairqueue.task"):
        context.log.info("half done")
    (record,) = caplog.records
    assert (record.message, vars(record)["task"], vars(record)["user"]) == (
        "half done",
        "t",
        "alice",
    )


# --- workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("queue", "default", "queue must be a TaskQueue, not a str"),
        ("handler", 5, "handler must be callable, not 5"),
        ("concurrency", 0, "not 0"),
        ("concurrency", 251, "not 251"),
        ("concurrency", 2.0, "not 2.0"),
        ("lease", 0.05, "not 0.05"),
        ("lease", "x", "not 'x'"),
        ("lease", 86_401, "not 86401"),
        ("worker_id", "", "not ''"),
        ("worker_id", "a\0", "not 'a\\x00'"),
    ],
)
def test_a_bad_argument_is_named(worker: Worker, field: str, value: object, named: str) -> None:
    arguments: dict[str, Any] = {"queue": worker.queue, field: value}
    with pytest.raises(ConfigurationError) as error:
        Worker(**arguments)
    assert str(error.value).startswith(f"{field} ")
    assert named in str(error.value)


def test_workers_have_ids_of_their_own(worker: Worker) -> None:
    assert worker.worker_id != Worker(worker.queue).worker_id
    assert Worker(worker.queue, worker_id="me").worker_id == "me"


@pytest.mark.parametrize("timeout", [-1, "x", None])
def test_a_bad_time_to_stop_in_is_named(worker: Worker, timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match="timeout "):
        worker.stop(timeout)


def test_a_worker_that_was_never_started_is_stopped(worker: Worker) -> None:
    assert worker.stop() is True


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("slots", -1, "not -1"),
        ("slots", 1.5, "not 1.5"),
        ("slots", True, "not True"),
        ("rate", 0, "not 0"),
        ("rate", -1, "not -1"),
        ("rate", "fast", "not 'fast'"),
        ("rate", float("inf"), "not inf"),
        ("when", 5, "when must be callable, not 5"),
        ("skip", [plain, "x"], "skip must be callable, not 'x'"),
        ("when", three, "when 'three' must take (payload, context)"),
        ("before", three, "before 'three' must take (payload, context)"),
        ("then", None, "then must be callable, not None"),
        ("catch", three, "catch 'three' must take (error, context)"),
        ("finally_", with_context, "finally_ 'with_context' must take (context)"),
        ("finally_", only_named, "finally_ 'only_named' must take (context)"),
        ("retires", 5, "'retires' is not an option of a handler"),
    ],
)
def test_a_bad_option_is_named(worker: Worker, field: str, value: object, named: str) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(ConfigurationError) as decorated:
        worker.task("job", **options)
    with pytest.raises(ConfigurationError) as registered:
        worker.register("job", plain, **options)
    assert field in str(decorated.value)
    assert named in str(decorated.value)
    assert str(registered.value) == str(decorated.value)
    assert worker.register("job", plain).name == "job"  # nothing was registered before


def test_the_limits_of_handlers_are_told_for_those_that_have_any(worker: Worker) -> None:
    worker.register("free", plain)
    worker.register("slots", plain, slots=3)
    worker.register("rate", plain, rate=2)
    worker.register("timeout", plain, timeout=timedelta(seconds=5))  # type: ignore[arg-type]
    assert worker.handler_limits() == {
        "slots": {"slots": 3, "rate": None, "timeout": None},
        "rate": {"slots": 0, "rate": 2.0, "timeout": None},
        "timeout": {"slots": 0, "rate": None, "timeout": 5.0},
    }


# --- what the decorator makes ---------------------------------------------------------------------


def test_what_is_registered_can_be_called_as_before(worker: Worker) -> None:
    function = worker.task("function")(with_option)
    made = worker.register("class", Plain)
    coroutine = worker.register("async", plain_async)
    assert function({"n": 1}, repeat=2) == ({"n": 1}, 2)
    assert isinstance(made(), Plain)
    assert asyncio.run(coroutine({"n": 1})) == {"n": 1}
    assert (function.name, made.name) == ("function", "class")


def test_what_is_registered_looks_like_what_it_wraps(worker: Worker) -> None:
    def documented(payload: Any) -> None:
        """What it does."""

    vars(documented)["colour"] = "red"
    task = worker.task("job")(documented)
    assert (task.__name__, task.__doc__, task.__module__) == (
        "documented",
        "What it does.",
        __name__,
    )
    assert task.colour == "red"
    assert worker.register("class", Static).handle({}, None) == ({}, None)
    with pytest.raises(AttributeError, match="missing"):
        _ = task.missing
    assert copy.copy(task)({}) is None


def test_what_one_worker_has_registered_another_can_register_too(worker: Worker) -> None:
    other = Worker(worker.queue)
    first = worker.task("a")(plain)
    second = other.task("b")(first)
    assert second.__wrapped__ is plain


# --- modules --------------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Make a module of this text; its name."""
    made: list[str] = []

    def make(text: str) -> str:
        name = f"made_up_jobs_{len(made)}"
        module = types.ModuleType(name)
        exec(textwrap.dedent(text), vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        made.append(name)
        return name

    return make


JOBS = """
    import abc
    from collections import OrderedDict
    from test_handlers import Plain as imported

    class SendReport:
        retries = 1
        timeout = 2.5
        slots = 3
        def handle(self, payload): return "sent"

    class Base(abc.ABC):
        backoff = [1, 2]
        @abc.abstractmethod
        def handle(self, payload): ...

    class Derived(Base):
        def handle(self, payload): return "derived"

    class _Private:
        def handle(self, payload): ...

    class NoHandle: ...

    def handle(payload): ...

    alias = SendReport
"""


def test_the_classes_of_a_module_are_registered_by_their_dotted_paths(
    worker: Worker, module: Callable[[str], str], context: TaskContext, runner: Runner
) -> None:
    name = module(JOBS)
    assert worker.register_module(name) == [f"{name}.SendReport", f"{name}.Derived"]
    report, derived = worker._handlers.named()
    assert (report.policy.retries, report.timeout, report.settings.slots) == (1, 2.5, 3)
    assert derived.policy.backoff == (1.0, 2.0)
    assert [each.run(context, runner) for each in (report, derived)] == ["sent", "derived"]


def test_a_worker_is_made_with_modules(worker: Worker, module: Callable[[str], str]) -> None:
    name = module(JOBS)
    made = Worker(worker.queue, modules=[name])
    assert made.handler_limits().keys() == {f"{name}.SendReport"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "has no class with a method `handle`"),
        ("class A:\n    retries = -1\n    def handle(self, p): ...", r"A: retries must .* not -1"),
        ("class A:\n    def handle(self): ...", r"A: the handler of .* must take the payload"),
    ],
)
def test_a_module_that_cannot_be_registered_is_refused(
    worker: Worker, module: Callable[[str], str], text: str, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        worker.register_module(module(text))


@pytest.mark.parametrize("name", ["no.such.module", "", None, "os\n", ".relative"])
def test_a_module_that_cannot_be_imported_is_named(worker: Worker, name: Any) -> None:
    with pytest.raises(ConfigurationError, match="module "):
        worker.register_module(name)
    with pytest.raises(ConfigurationError, match="module "):
        Worker(worker.queue, modules=[name])


def test_a_string_is_no_list_of_modules(worker: Worker) -> None:
    with pytest.raises(
        ConfigurationError, match="modules must be a list of names of modules, not a str"
    ):
        Worker(worker.queue, modules="os")


def test_a_worker_captures_logs_or_not(worker: Worker) -> None:
    with pytest.raises(ConfigurationError, match="capture_logs must be True or False, not 'yes'"):
        Worker(worker.queue, capture_logs="yes")  # type: ignore[arg-type]


# --- the log of a run -----------------------------------------------------------------------------


def kept(context: TaskContext) -> list[tuple[str, str]]:
    lines = context.logged
    return [] if lines is None else [(line.level, line.message) for line in lines.kept()[0]]


def test_all_levels_of_logs_are_kept(context: TaskContext, monkeypatch: pytest.MonkeyPatch) -> None:
    # Those who print log records may fail of these; they are kept all the same.
    monkeypatch.setattr(logging.getLogger("fairqueue.task"), "disabled", True)
    context.log.debug("a %s", 1)
    context.log.info("b %(n)d", {"n": 2})
    context.log("c")
    context.log("d", level="warning")
    context.log("100 %", level="no such level")
    context.log.error("%d", "no number")
    context.log.log(logging.CRITICAL, Unshowable())
    try:
        raise ValueError
    except ValueError:
        context.log.exception("e")
    assert kept(context) == [
        ("debug", "a 1"),
        ("info", "b 2"),
        ("info", "c"),
        ("warning", "d"),
        ("info", "100 %"),
        ("error", "%d"),
        ("critical", "a Unshowable that cannot be shown"),
        ("error", "e"),
    ]


def test_a_handler_that_logs_nothing_has_no_lines(context: TaskContext) -> None:
    assert context.logged is None


def test_a_line_says_where_it_comes_from_and_keeps_its_own_fields(
    context: TaskContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "fairqueue.task"):
        context.log.info("by name", extra={"rows": 3})
        context.log("by call")
        context.log.log(logging.INFO, "by number")
    here = "test_a_line_says_where_it_comes_from_and_keeps_its_own_fields"
    assert [record.funcName for record in caplog.records] == [here] * 3
    assert (vars(caplog.records[0])["rows"], vars(caplog.records[0])["task"]) == (3, "t")


def test_captured_records_are_those_of_the_thread_of_the_run(context: TaskContext) -> None:
    elsewhere = logging.getLogger("elsewhere")
    capture = LogCapture()
    capture.attach()
    try:
        elsewhere.warning("before")
        with capture.of(context):
            elsewhere.warning("in %s", "it")
            elsewhere.debug("below the level of its logger")
            context.log.warning("kept once")
            other = threading.Thread(target=elsewhere.warning, args=("of another thread",))
            other.start()
            other.join(10)
        elsewhere.warning("after")
    finally:
        capture.detach()
    assert kept(context) == [("warning", "in it"), ("warning", "kept once")]
    assert capture not in logging.getLogger().handlers


# --- heartbeats, and the task of the default handler ----------------------------------------------


def test_a_heartbeat_asks_until_the_run_is_stopped() -> None:
    asked: list[TaskContext] = []
    context = TaskContext(Task.create(user_id="alice"), beat=asked.append)
    assert context.heartbeat() is True
    context.stop()
    assert context.heartbeat() is False
    assert asked == [context]
    assert (context.cancelled, context.lease_lost) == (True, False)


def test_a_heartbeat_says_at_once_that_the_lease_is_lost() -> None:
    context = TaskContext(
        Task.create(user_id="alice"), beat=lambda context: context.stop(lease_lost=True)
    )
    assert context.heartbeat() is False
    assert (context.cancelled, context.lease_lost) == (True, True)


def test_a_running_task_is_a_task_that_knows_how_its_run_stands(context: TaskContext) -> None:
    task = RunningTask.of(context)
    assert isinstance(task, Task)
    assert task == context.task
    assert context.task == task
    assert task != Task.create(user_id="alice", task_id="t", payload={"n": 8}, name="job")
    assert task != "a task"
    assert (task.payload, task.document) == (PAYLOAD, context.task.document)
    assert (task.cancelled, task.lease_lost) == (False, False)
    context.stop(lease_lost=True)
    assert (task.cancelled, task.lease_lost) == (True, True)
    with pytest.raises(AttributeError):
        task.user_id = "bob"  # type: ignore[misc]
