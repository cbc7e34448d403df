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
from fairqueue.errors import RedisRefused
from fairqueue.link.dialer import connection_maker, disconnect
from fairqueue.link.driver import BROKEN, WAIT_PAUSE_S, Attempts, Driver, Talk
from fairqueue.link.keys import KEY_TYPES, Keys
from fairqueue.link.listener import Listener, at_most, readable
from fairqueue.link.operation import (
    Argument,
    Ask,
    Blocking,
    Call,
    Each,
    Now,
    Operation,
    Together,
    Wait,
)

Result = TypeVar("Result")


class Link(Driver):
    """The blocking way to one queue in Redis. May be used by many threads, and after a fork."""

    def __init__(
        self, client: redis.Redis, keys: Keys, *, timeout: float, clock: Clock | None
    ) -> None:
        super().__init__(keys, timeout, clock)
        self._dialer = connection_maker(client, timeout)
        self._free: list[AbstractConnection] = []
        self._pid = os.getpid()
        self._closed = False

    def close(self) -> None:
        """Close the connections that are not in use; the others close when they come back."""
        self._closed = True
        with suppress(IndexError):
            while True:
                disconnect(self._free.pop())

    # --- operations -------------------------------------------------------------------------------

    def perform(self, steps: Operation[Result]) -> Result:
        """Run an operation: answer its requests one by one, and return its result.

        Raises RedisUnavailable when Redis did not answer in time (it is not known what has been
        done, the same operation may be repeated), RedisRefused when it refused a request.
        """
        listener: Listener | None = None
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
            return result
        finally:
            if listener is not None:
                listener.close()

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
        known = self._known_time()
        return self._read_time(self.ask(("TIME",))[0]) if known is None else known

    def listener(self, *keys: str) -> Listener:
        """Make a listener for tokens in lists; while it waits, it has its own connection."""
        return Listener(self, self._dialer, *(self.keys[key] for key in keys))

    # --- requests ---------------------------------------------------------------------------------

    def _call(self, call: Call) -> Any:
        prepared = self._command(call)
        return self._repeat(lambda: self._run_script(*prepared), call.timeout)

    def _together(self, request: Together) -> list[Any]:
        prepared = [self._command(call) for call in request.calls]
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
            with self._connection() as connection:
                for call in source:
                    if not self._dialer.still_leads(connection):
                        source = chain([call], source)
                        raise redis.ConnectionError("another server is the primary now")
                    waiting.append((call, time.monotonic()))
                    connection.send_command(*self._command(call)[1])
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
                prepared = self._command(call)
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

    def _wait(self, listener: Listener, request: Wait) -> bool:
        listener.listen_to(*(self.keys[key] for key in request.keys))
        try:
            return listener.wait(request.seconds)
        except (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError):
            time.sleep(min(request.seconds, WAIT_PAUSE_S))
            return False
        except redis.ResponseError as error:
            raise RedisRefused(f"Redis refused: {error}") from error

    # --- attempts ---------------------------------------------------------------------------------

    def _repeat(
        self, talk: Callable[[], Talk], timeout: float | None, *, sent_at: float | None = None
    ) -> Any:
        """Have a conversation, again if need be, until the deadline; once if nobody was there."""
        attempts = Attempts(self, timeout, sent_at)
        while True:
            begun, connection = False, None
            # Not by `_connection`: a context manager costs 5 % of a push.
            try:
                connection = self._take_free(attempts.limit) or self._dial(attempts.limit)
                attempts.begin()
                begun = True
                if attempts.limit == math.inf:
                    answer = _converse(connection, talk())
                else:
                    with at_most(connection, attempts.limit):
                        answer = _converse(connection, talk())
            except BaseException as error:
                if connection is not None:
                    self._give_up(connection, error)
                if not isinstance(error, (redis.ResponseError, *BROKEN)):
                    raise
                failure = error
            else:
                self.take_back(connection)
                return answer
            outcome = attempts.failed(failure, begun)
            if isinstance(outcome, float):
                time.sleep(outcome)
                continue
            if "WRONGTYPE" in str(outcome):
                types = self.ask(*(("TYPE", self.keys[name]) for name in KEY_TYPES))
                outcome = self._wrong_types(outcome, types)
            raise outcome from failure

    # --- connections ------------------------------------------------------------------------------

    @contextmanager
    def _connection(self, within: float = math.inf) -> Iterator[AbstractConnection]:
        connection = self._take_free(within) or self._dial(within)
        try:
            yield connection
        except BaseException as error:
            self._give_up(connection, error)
            raise
        self.take_back(connection)

    def _give_up(self, connection: AbstractConnection, error: BaseException) -> None:
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
        return self._dial(math.inf)

    def take_back(self, connection: AbstractConnection) -> None:
        """Keep a connection for the next caller."""
        self._free.append(connection)
        if self._closed:
            self.close()

    def _drop_free(self, address: object) -> None:
        """Close the free connections to an address: each would cost somebody a time-out."""
        self._clock_sample = None  # the next answer may be another server's
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
                if self._dialer.still_leads(connection, within):
                    return connection
                disconnect(connection)
        return None

    def _dial(self, within: float) -> AbstractConnection:
        connection = self._dialer.dial(within)
        self._was_there = True
        return connection


def _address(connection: AbstractConnection) -> tuple[object, ...]:
    """Where a connection leads: to a host and port, or to a path."""
    return tuple(getattr(connection, name, None) for name in ("host", "port", "path"))


def _converse(connection: AbstractConnection, talk: Talk) -> Any:
    try:
        commands = next(talk)
        while True:
            if len(commands) == 1:
                connection.send_command(*commands[0])
            else:  # together: a write for each would wake the server each time
                connection.send_packed_command(connection.pack_commands(commands))
            commands = talk.send([_answer_or_error(connection) for _ in commands])
    except StopIteration as end:
        return end.value


def _answer_or_error(connection: AbstractConnection) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error
