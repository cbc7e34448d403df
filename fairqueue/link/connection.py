"""The blocking driver: runs operations on connections of redis-py, under one deadline each."""

import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import redis
from redis.connection import AbstractConnection

from fairqueue.clock import Clock
from fairqueue.errors import ConfigurationError, RedisRefused, RedisUnavailable
from fairqueue.link.dialer import Dialer, disconnect
from fairqueue.link.driver import (
    BROKEN,
    ELSEWHERE,
    IN_A_CLUSTER,
    WAIT_PAUSE_S,
    Attempts,
    Driver,
    Talk,
)
from fairqueue.link.gathering import gather
from fairqueue.link.keys import KEY_TYPES, Keys
from fairqueue.link.listener import Listener, Waiter, answer_or_error, at_most, readable
from fairqueue.link.operation import (
    Argument,
    Ask,
    At,
    Blocking,
    Call,
    Each,
    Gather,
    Now,
    Operation,
    Together,
    Wait,
)

Result = TypeVar("Result")


class Connections:
    """The connections to one server, for all links that lead there. Safe to use from many threads.

    After a fork, the child leaves the parent's connections alone.
    """

    is_cluster = False  # whether another server may have the keys at any time: see cluster.py

    def __init__(self, dialer: Dialer) -> None:
        self.dialer = dialer
        self.is_known = False  # whether a connection was ever made
        self.is_checked = False  # whether the server is known to keep what it stores
        self.era = 0  # how often connections broke
        self._free: list[AbstractConnection] = []
        self._pid = os.getpid()
        self._closed = False

    def close(self) -> None:
        """Close the connections that are not in use; the others close when they come back."""
        self._closed = True
        self.close_free()

    def close_free(self) -> None:
        """Close the connections that are not in use."""
        with suppress(IndexError):
            while True:
                disconnect(self._free.pop())

    @property
    def name(self) -> str | None:
        """Where the server is, for people: a host and port, or a path; None if not known."""
        return self.dialer.name

    def listener(self, *keys: bytes) -> Waiter:
        """A listener for tokens in lists."""
        return Listener(self, *keys)

    def here(self) -> "Connections":
        """The connections to the server that has the keys now."""
        return self

    def converse(self, connection: AbstractConnection, talk: Talk) -> Any:
        """Send what a conversation yields, and read the answers; its result."""
        try:
            commands = next(talk)
            while True:
                commands = talk.send(exchange(connection, commands))
        except StopIteration as end:
            return end.value

    def take(self, within: float) -> AbstractConnection:
        """A free connection that leads to where a new one would, or a new one."""
        return self._take_free(within) or self.dial(within)

    @contextmanager
    def one(self, within: float = math.inf) -> Iterator[AbstractConnection]:
        """A connection for the body of a `with` statement; it is closed after an error."""
        connection = self.take(within)
        try:
            yield connection
        except BaseException as error:
            self.give_up(connection, error)
            raise
        self.take_back(connection)

    def give_up(self, connection: AbstractConnection, error: BaseException) -> None:
        """Close a connection after an error.

        An answer may still be on its way, and must not reach the next user of the connection; or it
        was READONLY, and this is the wrong server by now.
        """
        disconnect(connection)
        if isinstance(error, BROKEN):
            self._drop_free(_address(connection))

    def lend(self) -> AbstractConnection:
        """A connection to wait on: a free one whose other end is still there, or a new one.

        The caller returns it with `take_back` once all answers are read, or closes it. Raises redis
        errors, and RedisRefused after `close`.
        """
        while (connection := self._take_free(math.inf)) is not None:
            sock = getattr(connection, "_sock", None)
            # Nothing was asked, so anything to read is the end of the connection.
            if not isinstance(sock, socket.socket) or not readable([sock], 0):
                return connection
            disconnect(connection)
        return self.dial(math.inf)

    def take_back(self, connection: AbstractConnection) -> None:
        """Keep a connection for the next caller."""
        self._free.append(connection)
        if self._closed:
            self.close()

    def _drop_free(self, address: object) -> None:
        """Close the free connections to an address: each would cost somebody a time-out."""
        self.era += 1
        kept = []
        with suppress(IndexError):
            while True:
                connection = self._free.pop()
                if _address(connection) == address:
                    disconnect(connection)
                else:
                    kept.append(connection)
        self._free.extend(kept)

    def _take_free(self, within: float) -> AbstractConnection | None:
        """A free connection that leads to where a new one would; None if there is none."""
        if self._pid != os.getpid():
            # After a fork the connections belong to the parent: leave them alone.
            self._free, self._pid = [], os.getpid()
        if self._closed:
            raise RedisRefused("the queue is closed: make a new TaskQueue")
        with suppress(IndexError):
            while True:
                connection = self._free.pop()
                if self.dialer.still_leads(connection, within):
                    return connection
                disconnect(connection)
        return None

    def dial(self, within: float) -> AbstractConnection:
        """A new connection. Raises redis errors."""
        connection = self.dialer.dial(within)
        self.is_known = True
        return connection


class Link(Driver):
    """The blocking way to one queue in Redis. May be used by many threads, and after a fork."""

    parts: "tuple[Link, ...]" = ()  # the links of the partitions, if there are several

    def __init__(
        self, connections: Connections, keys: Keys, *, timeout: float, clock: Clock | None
    ) -> None:
        super().__init__(keys, timeout, clock)
        self.connections = connections
        self.whole: Link = self  # the link of the queue that this one is a partition of

    @property
    def is_known(self) -> bool:
        """Whether a connection was ever made."""
        return self.connections.is_known

    @property
    def era(self) -> int:  # type: ignore[override]
        """Grows when connections break."""
        return self.connections.era

    @property
    def is_clustered(self) -> bool:  # type: ignore[override]
        """Whether the keys may move to another server."""
        return self.connections.is_cluster

    @property
    def node(self) -> str | None:
        """The server that has the keys, as far as is known: a host and port, or a path."""
        return self.connections.name

    @property
    def is_checked(self) -> bool:
        """Whether the server is known to keep what it stores; see QueueBase.check."""
        return self.connections.is_checked

    @is_checked.setter
    def is_checked(self, value: bool) -> None:
        self.connections.is_checked = value

    def close(self) -> None:
        """Close the connections that are not in use; the others close when they come back."""
        self.connections.close()

    # --- operations -------------------------------------------------------------------------------

    def perform(self, steps: Operation[Result]) -> Result:
        """Run an operation: answer its requests one by one, and return its result.

        Raises RedisUnavailable when Redis did not answer in time (it is not known what has been
        done, the same operation may be repeated), RedisRefused when it refused a request.
        """
        listener: Waiter | None = None
        try:
            request = next(steps)
            while True:
                try:
                    if type(request) is Wait:
                        listener = listener or self.listener(*request.keys)
                        answer = self._wait(listener, request)
                    else:
                        answer = getattr(self, request.method)(request)
                except BaseException as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            result: Result = end.value
            if not self.is_begun:  # scripts look for themselves
                self._refuse_partitions()
            return result
        finally:
            if listener is not None:
                listener.close()

    def _refuse_partitions(self) -> None:
        """After a first read: raise WrongPartitions if the queue has several partitions.

        It would look empty. Scripts refuse it by themselves.
        """
        with suppress(RedisRefused, RedisUnavailable):
            self.begin_with(self._ask(Ask(("HGET", self.keys["fair"], "layout")))[0])

    def run(
        self,
        name: str,
        /,
        *,
        rest: Sequence[Argument] = (),
        timeout: float | None = None,
        now_ms: int | None = None,
        **arguments: Any,
    ) -> Any:
        """Run one script, outside of an operation. Raises as `perform`."""
        return self._call(Call(name, rest=rest, timeout=timeout, now_ms=now_ms, **arguments))

    def ask(self, *commands: Sequence[Argument], timeout: float | None = None) -> list[Any]:
        """Send plain reading commands, outside of an operation. Raises as `perform`."""
        return self._ask(Ask(*commands, timeout=timeout))

    def now_ms(self) -> int:
        """The time of the queue: its clock, or a close estimate of the server's.

        Scripts that depend on it check it against the server's clock and refuse one that is off.
        """
        known = self.known_time()
        return self.read_time(self.ask(("TIME",))[0]) if known is None else known

    def listener(self, *keys: str | bytes) -> Waiter:
        """Make a listener for tokens in lists; while it waits, it has its own connection."""
        return self.connections.listener(*self.full(keys))

    # --- requests ---------------------------------------------------------------------------------

    def _call(self, call: Call) -> Any:
        prepared = self.command_of(call)
        answer = self._repeat(lambda: self._run_script(*prepared), call.timeout)
        self.is_begun = True
        return answer

    def _together(self, request: Together) -> list[Any]:
        prepared = [self.command_of(call) for call in request.calls]
        answers: list[Any] = self._repeat(lambda: self._run_together(prepared), None)
        return answers

    def _each(self, request: Each) -> None:
        with closing(self._stream(request.calls)) as answers:
            for answer in answers:
                if request.read(answer) is False:
                    return

    def _stream(self, calls: Iterable[Call]) -> Generator[Any, None, None]:
        """Run scripts one after the other; yields the answers.

        The next call is made while the server works on the one before. After an error the others
        go one by one, so that each is repeated as any call.
        """
        waiting: deque[tuple[Call, float]] = deque()
        source = iter(calls)
        try:
            with self.connections.one() as connection:
                for call in source:
                    if not self.connections.dialer.still_leads(connection):
                        source = chain([call], source)
                        raise redis.ConnectionError("another server is the primary now")
                    waiting.append((call, time.monotonic()))
                    connection.send_command(*self.command_of(call)[1])
                    if len(waiting) > 1:
                        answer = connection.read_response()
                        waiting.popleft()
                        yield answer
                while waiting:
                    answer = connection.read_response()
                    waiting.popleft()
                    yield answer
        except redis.RedisError as error:
            if waiting and isinstance(error, redis.ResponseError):
                yield self._call(waiting.popleft()[0])  # it was answered: with a refusal
            for call, sent_at in waiting:
                prepared = self.command_of(call)
                yield self._repeat(partial(self._run_script, *prepared), None, sent_at=sent_at)
            for call in source:
                yield self._call(call)

    def _ask(self, request: Ask) -> list[Any]:
        answers: list[Any] = self._repeat(
            lambda: self._run_commands(request.commands), request.timeout
        )
        return answers

    def _now(self, request: Now) -> int:
        return self.now_ms()

    def _blocking(self, request: Blocking) -> Any:
        return request.function(*request.arguments)

    def _at(self, request: At) -> Any:
        return request.link.perform(request.steps)

    def _gather(self, request: Gather) -> list[Any]:
        return gather(request)

    def _wait(self, listener: Waiter, request: Wait) -> bytes | None:
        listener.listen_to(*self.full(request.keys))
        try:
            listener.wait(request.seconds)
            return listener.token_from
        except (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError):
            time.sleep(min(request.seconds, WAIT_PAUSE_S))
            return None
        except ELSEWHERE as error:
            raise ConfigurationError(IN_A_CLUSTER) from error
        except redis.ResponseError as error:
            raise RedisRefused(f"Redis refused: {error}") from error

    def ask_again(
        self, request: Call | Ask | Together | Now, *, since: float, sent_at: float | None
    ) -> Any:
        """Answer a request whose time-out began at `since`; `sent_at`: when it was sent."""
        if isinstance(request, Now):
            (now,) = self.ask_again(Ask(("TIME",)), since=since, sent_at=sent_at)
            return self.read_time(now)
        if isinstance(request, Ask):
            talk: Callable[[], Talk] = partial(self._run_commands, request.commands)
        elif isinstance(request, Together):
            talk = partial(self._run_together, [self.command_of(call) for call in request.calls])
        else:
            talk = partial(self._run_script, *self.command_of(request))
        timeout = None if isinstance(request, Together) else request.timeout
        return self._repeat(talk, timeout, sent_at=sent_at, since=since)

    # --- attempts ---------------------------------------------------------------------------------

    def _repeat(
        self,
        talk: Callable[[], Talk],
        timeout: float | None,
        *,
        sent_at: float | None = None,
        since: float | None = None,
    ) -> Any:
        """Have a conversation, again if need be, until the deadline; once if nobody was there."""
        attempts = Attempts(self, timeout, sent_at, since)
        while True:
            begun, connection, connections = False, None, self.connections
            # Not by `one`: a context manager costs 5 % of a push.
            try:
                connection = connections.take(attempts.limit)
                attempts.begin()
                begun = True
                if attempts.limit == math.inf:
                    answer = connections.converse(connection, talk())
                else:
                    with at_most(connection, attempts.limit):
                        answer = connections.converse(connection, talk())
            except BaseException as error:
                if connection is not None:
                    connections.give_up(connection, error)
                if not isinstance(error, (redis.ResponseError, *BROKEN)):
                    raise
                failure = error
            else:
                connections.take_back(connection)
                return answer
            outcome = attempts.failed(failure, begun)
            if isinstance(outcome, float):
                time.sleep(outcome)
                continue
            if "WRONGTYPE" in str(outcome):
                types = self.ask(*(("TYPE", self.keys[name]) for name in KEY_TYPES))
                outcome = self._wrong_types(outcome, types)
            raise outcome from failure


def _address(connection: AbstractConnection) -> tuple[object, ...]:
    """Where a connection leads: to a host and port, or to a path."""
    return tuple(getattr(connection, name, None) for name in ("host", "port", "path"))


def exchange(connection: AbstractConnection, commands: Sequence[Sequence[Argument]]) -> list[Any]:
    """Send commands in one write, and read the answers; a refusal is one, too."""
    if len(commands) == 1:
        connection.send_command(*commands[0])
    else:  # a write for each would wake the server each time
        connection.send_packed_command(connection.pack_commands(commands))
    return [answer_or_error(connection) for _ in commands]
