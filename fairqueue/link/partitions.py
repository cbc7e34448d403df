"""Which partition an operation is for, and what it means for a queue that has several.

A store works with one set of keys, those of its `link`. A queue with partitions has a link for the
whole of it, with the keys of partition 0, the home, and a link for each partition in `parts`. Each
operation declares, by a decorator below `@operation`, what it does with the whole: `at_home`,
`at_any`, `at_owner`, `at_found`, `at_claim`, `at_task`, `over_all`, `over_tenant` or `whole`.
Without partitions, all of them do nothing.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from hashlib import blake2b
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from fairqueue.errors import AmbiguousTask, FairQueueError, RedisUnavailable
from fairqueue.link.operation import Ask, At, Gather, Operation
from fairqueue.link.owners import Owner

T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")
P = ParamSpec("P")
Steps = Callable[Concatenate[S, P], Operation[T]]

_MULTIPLIER = 2862933555777941757  # of the generator of jump consistent hash


@lru_cache(maxsize=65_536)
def jump_hash(name: str, buckets: int) -> int:
    """A number below `buckets` for a name; evenly spread, and the same in all versions.

    With one bucket more, 1/buckets of the names move, all of them to the new one.
    """
    key = int.from_bytes(blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    chosen, following = -1, 0
    while following < buckets:
        chosen = following
        key = (key * _MULTIPLIER + 1) % 2**64
        following = int((chosen + 1) * (2**31 / ((key >> 33) + 1)))
    return chosen


def partition_of(user_id: object, tenant: object, partitions: int) -> int:
    """The partition of a group: of a tenant, or of a user without one.

    Values that cannot be names have one as well, whose operation refuses them.
    """
    if partitions == 1:
        return 0
    if tenant is None:
        return jump_hash(str(user_id), partitions)
    return _partition_of_tenant(str(tenant), partitions)


@lru_cache(maxsize=65_536)
def _partition_of_tenant(tenant: str, partitions: int) -> int:
    return jump_hash(Owner.whole(tenant).key, partitions)


class Partitioned:
    """A store whose operations work on the whole of a queue, and on each partition."""

    link: Any

    def at(self, part: Any) -> Self:
        """The same store in one partition, given by its link."""
        twins: dict[int, Self] = self.__dict__.setdefault("_twins", {})
        twin = twins.get(id(part))
        if twin is None:
            twin = twins[id(part)] = self._twin(part)
        return twin

    def _twin(self, part: Any) -> Self:
        twin = copy.copy(self)
        twin.link = part
        twin.__dict__["_twins"] = {}
        return twin

    def part_of(self, user_id: object, tenant: object) -> Self:
        """The store in the partition of a user or a tenant; this one if there are no partitions."""
        parts = self.link.parts
        return self.at(parts[partition_of(user_id, tenant, len(parts))]) if parts else self

    def twins(self) -> "list[Self]":
        """The store in each partition; this one alone if there are no partitions."""
        return [self.at(part) for part in self.link.parts] or [self]


# --- partitions that do not answer ----------------------------------------------------------------


class Missing:
    """The partitions that did not answer while others did, and why."""

    def __init__(self) -> None:
        self.partitions: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self.partitions)


_MISSING: ContextVar[Missing | None] = ContextVar("fairqueue_missing", default=None)


@contextmanager
def tolerate_missing(missing: Missing | None = None) -> Iterator[Missing]:
    """Let operations that read the whole queue go on without the partitions that do not answer.

    Yields where these are noted: in `missing` if that is given. Those noted there already are not
    asked again, so that one of them costs one time-out and not one for each operation. Changes are
    not affected: they fail as ever.
    """
    missing = Missing() if missing is None else missing
    token = _MISSING.set(missing)
    try:
        yield missing
    finally:
        _MISSING.reset(token)


def is_tolerant() -> bool:
    """Whether operations that read may go on without partitions that do not answer."""
    return _MISSING.get() is not None


def everywhere(
    store: S, steps_of: Callable[[S], Operation[T]], *, strict: bool = False
) -> Operation[list[T]]:
    """Run an operation in all partitions at the same time; the results of those that answered.

    They are in the order of partitions. Without `tolerate_missing`, or with `strict`, one that does
    not answer raises RedisUnavailable. One that did not answer before is not asked again. A queue
    without partitions has one result.
    """
    found = yield from everywhere_numbered(store, steps_of, strict=strict)
    return [result for _, result in found]


def everywhere_numbered(
    store: S,
    steps_of: Callable[[S], Operation[T]],
    *,
    strict: bool = False,
    tolerant: bool = False,
    only: Sequence[int] | None = None,
) -> Operation[list[tuple[int, T]]]:
    """As `everywhere`, with the number of the partition before each result; of some if `only`.

    tolerant: as within `tolerate_missing`.
    """
    twins: Any = store
    parts = twins.link.parts
    if not parts:
        return [(0, (yield from steps_of(store)))]
    missing = None if strict else _MISSING.get()
    if tolerant and missing is None:
        missing = Missing()
    numbers = range(len(parts)) if only is None else only
    if missing:
        numbers = [number for number in numbers if number not in missing.partitions]
    pairs = [(parts[number], steps_of(twins.at(parts[number]))) for number in numbers]
    results = yield Gather(pairs, partial=missing is not None)
    found = []
    for number, result in zip(numbers, results, strict=True):
        if isinstance(result, RedisUnavailable) and missing is not None:
            missing.partitions[number] = str(result)
        elif isinstance(result, Exception):
            raise result
        else:
            found.append((number, result))
    if not found and missing is not None and len(missing.partitions) == len(parts):
        reason = next(iter(missing.partitions.values()))
        raise RedisUnavailable(f"no partition of the queue answered: {reason}")
    return found


def sorted_out(
    store: Any,
    numbers: Sequence[int],
    rows: Sequence[R],
    steps_of: Callable[[Any, list[R]], Operation[list[T]]],
    missing: T | None = None,
) -> Operation[list[T]]:
    """Run an operation in each partition with the rows that belong there; results in their order.

    numbers: the partition of each row. missing: the result for rows whose partition does not answer
    while another one does. Raises RedisUnavailable if none answers, or if `missing` is None.
    """
    parts = store.link.parts
    places: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number if number < len(parts) else 0, []).append(place)
    if len(places) == 1:
        (number,) = places
        twin = store.at(parts[number])
        return (yield from at_part(twin, steps_of(twin, list(rows))))
    asked = []
    for number, own in places.items():
        twin = store.at(parts[number])
        asked.append((twin.link, steps_of(twin, [rows[place] for place in own])))
    answers = yield Gather(asked, partial=True)
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    for error in errors:
        if (
            missing is None
            or len(errors) == len(answers)
            or not isinstance(error, RedisUnavailable)
        ):
            raise error
    found: list[Any] = [missing] * len(rows)
    for own, answer in zip(places.values(), answers, strict=True):
        if not isinstance(answer, Exception):
            for place, result in zip(own, answer, strict=True):
                found[place] = result
    return found


# --- what an operation does with the whole --------------------------------------------------------


def _declare(kind: str, method: Any) -> Any:
    method.__partitions__ = kind
    return method


def at_home(method: Steps[S, P, T]) -> Steps[S, P, T]:
    """The operation works in partition 0, which has the records of the queue as a whole."""
    declared: Steps[S, P, T] = _declare("home", method)
    return declared


def whole(method: Steps[S, P, T]) -> Steps[S, P, T]:
    """The operation handles the partitions itself."""
    declared: Steps[S, P, T] = _declare("whole", method)
    return declared


def at_owner(method: Steps[S, P, T]) -> Steps[S, P, T]:
    """The operation works in the partition of its arguments `user_id` and `tenant`, or `owner`."""
    signature = inspect.signature(method)

    def choose(self: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        owner = given.get("owner")
        if owner is not None:
            return self.part_of(getattr(owner, "user_id", None), getattr(owner, "tenant", None))
        return self.part_of(given.get("user_id"), given.get("tenant"))

    return _routed("owner", method, choose)


def at_claim(method: Steps[S, P, T]) -> Steps[S, P, T]:
    """The operation works in the partition of its first argument, a claim."""

    def choose(self: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        claim = args[0] if args else kwargs.get("claim")
        number = getattr(claim, "partition", 0)
        parts = self.link.parts
        return self.at(parts[number if number < len(parts) else 0])

    return _routed("claim", method, choose)


def at_task(method: Steps[S, P, T]) -> Steps[S, P, T]:
    """The operation works in the partition of its first argument, a task."""

    def choose(self: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        task = args[0] if args else kwargs.get("task")
        return self.part_of(getattr(task, "user_id", None), getattr(task, "tenant", None))

    return _routed("task", method, choose)


def _routed(
    kind: str, method: Steps[S, P, T], choose: Callable[[Any, Sequence[Any], dict[str, Any]], Any]
) -> Steps[S, P, T]:
    @wraps(method)
    def steps(self: Any, /, *args: Any, **kwargs: Any) -> Operation[T]:
        if not self.link.parts:
            return method(self, *args, **kwargs)
        twin = choose(self, args, kwargs)
        return at_part(twin, method(twin, *args, **kwargs))

    declared: Steps[S, P, T] = _declare(kind, steps)
    return declared


def at_part(twin: Any, steps: Operation[T]) -> Operation[T]:
    """Run an operation of a store with the link of that store: in its partition."""
    result: T = yield At(twin.link, steps)
    return result


def at_any(method: Steps[S, P, T]) -> Steps[S, P, T]:
    """The operation reads what all partitions have alike: from the home, or else from another.

    If the home does not answer, those at other servers are asked at the same time.
    """

    @wraps(method)
    def steps(self: Any, /, *args: Any, **kwargs: Any) -> Operation[T]:
        if not self.link.parts:
            return (yield from method(self, *args, **kwargs))
        home, *others = self.twins()
        server = home.link.node
        try:
            return (yield from at_part(home, method(home, *args, **kwargs)))
        except RedisUnavailable:
            others = [twin for twin in others if twin.link.node != server]
            if not others:
                raise
        asked = [(twin.link, method(twin, *args, **kwargs)) for twin in others]
        answers: list[Any] = yield Gather(asked, partial=True)
        found: T | Exception = answers[0]
        for answer in answers:
            if not isinstance(answer, Exception):
                found = answer
        if isinstance(found, Exception):
            raise found
        return found

    declared: Steps[S, P, T] = _declare("any", steps)
    return declared


def at_found(
    key: str, argument: str, *, ambiguous: type[FairQueueError] = AmbiguousTask
) -> Callable[[Steps[S, P, T]], Steps[S, P, T]]:
    """The operation works in the partition whose hash `key` has the id that an argument gives.

    If the argument `tenant` is given as well, only the partition of the tenant counts. An id that
    no partition has is for the home, which says so. Raises `ambiguous` if several have it.
    """

    def decorate(method: Steps[S, P, T]) -> Steps[S, P, T]:
        signature = inspect.signature(method)

        @wraps(method)
        def steps(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Operation[T]:
            if not self.link.parts:
                return (yield from method(self, *args, **kwargs))
            given = signature.bind_partial(self, *args, **kwargs).arguments
            if given.get("tenant") is not None:
                twin = self.part_of(None, given["tenant"])
            else:
                twin = yield from locate(self, key, given.get(argument), ambiguous)
            return (yield from at_part(twin, method(twin, *args, **kwargs)))

        declared: Steps[S, P, T] = _declare("found", steps)
        return declared

    return decorate


def locate(
    store: S, key: str, name: object, ambiguous: type[FairQueueError] = AmbiguousTask
) -> Operation[S]:
    """The store in the partition whose hash `key` has a field; in the home if none has it.

    Raises RedisUnavailable if that is not known, and `ambiguous` if several partitions have it.
    """
    twins: list[Any] = cast(Any, store).twins()
    if not isinstance(name, str):
        return cast(S, twins[0])  # which refuses it
    missing = _MISSING.get()
    known = missing.partitions if missing else {}
    twins = [twin for twin in twins if twin.link.keys.partition not in known]
    asked = [(twin.link, _has(twin.link, key, name)) for twin in twins]
    answers = yield Gather(asked, partial=True)
    found = [twin for twin, answer in zip(twins, answers, strict=True) if answer is True]
    if len(found) > 1:
        raise ambiguous(
            f"{len(found)} partitions of the queue have the id {name!r}, of different tenants or "
            "users: pass tenant= to say which one is meant"
        )
    for answer in answers:
        if not found and isinstance(answer, Exception):
            raise answer
    if known and not found:
        raise RedisUnavailable(next(iter(known.values())))
    return cast(S, found[0] if found else twins[0])


def _has(link: Any, key: str, name: str) -> Operation[bool]:
    (found,) = yield Ask(("HEXISTS", link.keys[key], name))
    return bool(found)


def over_all(
    merge: Callable[[list[T]], T], *, strict: bool = False, tolerant: bool = False
) -> Callable[[Steps[S, P, T]], Steps[S, P, T]]:
    """The operation works in every partition; `merge` makes one result of theirs.

    strict: it changes something, so all partitions have to answer. tolerant: it goes on without
    those that do not answer, and raises only if none does.
    """

    def decorate(method: Steps[S, P, T]) -> Steps[S, P, T]:
        @wraps(method)
        def steps(self: Any, /, *args: Any, **kwargs: Any) -> Operation[T]:
            if not self.link.parts:
                return method(self, *args, **kwargs)
            return _merged(self, args, kwargs)

        def _merged(self: Any, args: Any, kwargs: Any) -> Operation[T]:
            answered = yield from everywhere_numbered(
                self,
                lambda twin: method(twin, *args, **kwargs),
                strict=strict,
                tolerant=tolerant,
            )
            return merge([result for _, result in answered])

        declared: Steps[S, P, T] = _declare("all", steps)
        return declared

    return decorate


def over_tenant(
    merge: Callable[[list[T]], T], *, strict: bool = False
) -> Callable[[Steps[S, P, T]], Steps[S, P, T]]:
    """The operation works in the partition of its argument `tenant`, or in all if that is None."""

    def decorate(method: Steps[S, P, T]) -> Steps[S, P, T]:
        signature = inspect.signature(method)
        of_all = over_all(merge, strict=strict)(method)

        @wraps(method)
        def steps(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Operation[T]:
            if not self.link.parts:
                return method(self, *args, **kwargs)
            tenant = signature.bind_partial(self, *args, **kwargs).arguments.get("tenant")
            if tenant is None:
                return of_all(self, *args, **kwargs)
            twin = self.part_of(None, tenant)
            return at_part(twin, method(twin, *args, **kwargs))

        declared: Steps[S, P, T] = _declare("tenant", steps)
        return declared

    return decorate


def total(counts: list[int]) -> int:
    """Merge counts: their sum."""
    return sum(counts)
