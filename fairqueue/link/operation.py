"""What to ask Redis: operations do no I/O, they yield requests that a driver answers.

An operation is a generator. Each `yield` hands a request to the driver and evaluates to the
answer; an error of the request is raised at the `yield`. The blocking driver (connection.py) and
the asynchronous one (aio.py) run the same operations, so deadlines, repeats and waiting are written
once for each driver and never in an operation.
"""

from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, get_args, overload

Argument = str | bytes | int | float
T = TypeVar("T")
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)


class Call:
    """Run a script by name. Arguments go by the names in its header, `rest` after them.

    now_ms: the time that the script uses; None for the queue's clock. timeout: seconds for this
    call, repeats included; None for the queue's.
    """

    __slots__ = ("arguments", "now_ms", "rest", "script", "timeout")
    method = "_call"  # of the driver that answers it

    def __init__(
        self,
        script: str,
        *,
        rest: Sequence[Argument] = (),
        timeout: float | None = None,
        now_ms: int | None = None,
        **arguments: Any,
    ) -> None:
        self.script = script
        self.rest = rest
        self.timeout = timeout
        self.now_ms = now_ms
        self.arguments = arguments


class Together:
    """Run several scripts in one round trip; the answers in order."""

    __slots__ = ("calls",)
    method = "_together"

    def __init__(self, *calls: Call) -> None:
        self.calls = calls


class Each:
    """Run one script several times, making each call while the server works on the one before.

    `read` is called with each answer in order. It may return False to stop, or raise.
    """

    __slots__ = ("calls", "read")
    method = "_each"

    def __init__(self, calls: Iterable[Call], read: Callable[[Any], object]) -> None:
        self.calls = calls
        self.read = read


class Ask:
    """Send plain commands that only read, in one round trip; the answers in order."""

    __slots__ = ("commands", "timeout")
    method = "_ask"

    def __init__(self, *commands: Sequence[Argument], timeout: float | None = None) -> None:
        self.commands = commands
        self.timeout = timeout


class Now:
    """The time of the queue in ms: its clock, or a close estimate of the server's."""

    __slots__ = ()
    method = "_now"


class Blocking:
    """Call a function that may block, such as one that looks up a host; its result.

    The asynchronous driver runs it in a thread.
    """

    __slots__ = ("arguments", "function")
    method = "_blocking"

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments


class Wait:
    """Wait up to `seconds` for a token in a list, or in one of several: the key that it came from.

    None if no token came. Lists are given by name, or as keys: those of partitions.

    A lost connection only ends the wait: the call that follows finds out whether Redis is gone.
    Between two waits of one operation the server keeps the request, so that no token is missed.
    """

    __slots__ = ("keys", "seconds")
    method = "_wait"

    def __init__(self, keys: str | Sequence[str | bytes], seconds: float) -> None:
        self.keys = (keys,) if isinstance(keys, str) else tuple(keys)
        self.seconds = seconds


class At:
    """Run an operation with another link of the queue, such as that of a partition; its result."""

    __slots__ = ("link", "steps")
    method = "_at"

    def __init__(self, link: Any, steps: "Operation[Any]") -> None:
        self.link = link
        self.steps = steps


class Gather:
    """Run operations of several partitions at the same time; the results in order.

    Given as pairs of a link and an operation. All end before an error is raised: the first one.
    With `partial`, an error takes the place of the result.
    """

    __slots__ = ("operations", "partial")
    method = "_gather"

    def __init__(
        self, operations: "Iterable[tuple[Any, Operation[Any]]]", *, partial: bool = False
    ) -> None:
        self.operations = list(operations)
        self.partial = partial


Request = Call | Together | Each | Ask | Now | Blocking | Wait | At | Gather
Operation = Generator[Request, Any, T]


class Performed(Protocol[S_contra, P, R_co]):
    """A method that runs its operation with the driver of its object, its `link`."""

    def __call__(self, store: S_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the operation."""

    @overload
    def __get__(self, store: None, owner: type, /) -> "Performed[S_contra, P, R_co]": ...

    @overload
    def __get__(self, store: Any, owner: type, /) -> Callable[P, R_co]: ...


def operation(
    method: Callable[Concatenate[S_contra, P], Operation[R_co]],
) -> Performed[S_contra, P, R_co]:
    """Turn a method that is an operation into one that runs it and returns its result.

    The object's `link` is the driver that runs it. The operation itself stays reachable: `steps`
    makes it part of another one, and the asynchronous API awaits it.
    """
    if result := get_args(method.__annotations__.get("return")):
        method.__annotations__["return"] = result[2]  # `help` and signatures show the result

    @wraps(method)
    def perform(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        result: R_co = self.link.perform(method(self, *args, **kwargs))
        return result

    return cast(Performed[S_contra, P, R_co], perform)


def awaited(
    method: Performed[S_contra, P, T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The asynchronous method for one that `operation` made, on an object that wraps a store.

    The object has the store as `operations`, and its driver as `link`.
    """
    steps: Any = cast(Any, method).__wrapped__

    @wraps(steps)
    async def perform(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return cast(T, await self.link.perform(steps(self.operations, *args, **kwargs)))

    return perform


def steps(method: Callable[P, T]) -> Callable[P, Operation[T]]:
    """The operation of a method that `operation` made, for `yield from` in another operation."""
    plain: Any = method
    return cast(Callable[P, Operation[T]], plain.__func__.__wrapped__.__get__(plain.__self__))
