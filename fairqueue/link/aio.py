"""The asynchronous driver: runs the same operations on connections of redis.asyncio."""

import asyncio
import inspect
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.sentinel
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.sentinel import SentinelConnectionPool

from fairqueue.clock import Clock
from fairqueue.errors import ConfigurationError, RedisRefused, RedisUnavailable, kind_of
from fairqueue.link import driver
from fairqueue.link.cluster import ClusterAddress
from fairqueue.link.dialer import NobodyThere, is_nobody, options_like
from fairqueue.link.driver import (
    BROKEN,
    ELSEWHERE,
    IN_A_CLUSTER,
    WAIT_PAUSE_S,
    Attempts,
    Driver,
    Talk,
    gathered,
)
from fairqueue.link.keys import KEY_TYPES, Keys
from fairqueue.link.operation import (
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


class _Stopped(Exception):
    """The reader of the answers of Each wants no more, or has failed."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error


class AsyncLink(Driver):
    """The asynchronous way to one queue in Redis.

    Many tasks of one event loop may use it, but not several threads. In another loop, or after a
    fork, it opens connections of its own. A task that is cancelled closes the connection that it
    uses: no answer is left on its way. What it asked may have been done.
    """

    def __init__(
        self,
        client: redis.Redis | redis.asyncio.Redis | ClusterAddress,
        keys: Keys,
        *,
        timeout: float,
        clock: Clock | None,
    ) -> None:
        super().__init__(keys, timeout, clock)
        self.whole = self  # it has no partitions
        self._dialer = _Dialer(client, timeout)
        self._free: list[AbstractConnection] = []
        self._home: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._abandoned: list[list[AbstractConnection]] = []
        self._closed = False
        self._is_known = False

    @property
    def is_known(self) -> bool:
        """Whether a connection was ever made."""
        return self._is_known

    async def close(self) -> None:
        """Close the connections that are not in use; the others close when they come back."""
        self._closed = True
        self._move_home()
        while self._free:
            await _disconnect(self._free.pop())

    async def perform(self, steps: Operation[Result]) -> Result:
        """Run an operation: answer its requests one by one, and return its result.

        Raises RedisUnavailable when Redis did not answer in time (it is not known what has been
        done, the same operation may be repeated), RedisRefused when it refused a request.
        """
        waiter: _Waiter | None = None
        try:
            request = next(steps)
            while True:
                try:
                    if type(request) is Wait:
                        waiter = waiter or _Waiter(self)
                        answer = await self._wait(waiter, request)
                    else:
                        answer = await getattr(self, request.method)(request)
                except BaseException as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            if not self.is_begun:  # scripts look for themselves
                await self._refuse_partitions()
            return cast(Result, end.value)
        finally:
            if waiter is not None:
                await waiter.close()

    async def _refuse_partitions(self) -> None:
        """As in the blocking driver."""
        with suppress(RedisRefused, RedisUnavailable):
            self.begin_with((await self._ask(Ask(("HGET", self.keys["fair"], "layout"))))[0])

    # --- requests ---------------------------------------------------------------------------------

    async def _call(self, call: Call) -> Any:
        prepared = self.command_of(call)
        answer = await self._repeat(lambda: self._run_script(*prepared), call.timeout)
        self.is_begun = True
        return answer

    async def _together(self, request: Together) -> list[Any]:
        prepared = [self.command_of(call) for call in request.calls]
        answers: list[Any] = await self._repeat(lambda: self._run_together(prepared), None)
        return answers

    async def _each(self, request: Each) -> None:
        """As in the blocking driver: the next call is made while the server works on the last."""

        def read(answer: Any) -> None:
            try:
                goes_on = request.read(answer) is not False
            except Exception as error:
                raise _Stopped(error) from None
            if not goes_on:
                raise _Stopped

        try:
            await self._stream(iter(request.calls), read)
        except _Stopped as stopped:
            if stopped.error is not None:
                raise stopped.error from None

    async def _stream(self, calls: Iterator[Call], read: Callable[[Any], None]) -> None:
        waiting: deque[tuple[Call, float]] = deque()
        try:
            async with self._connection() as connection:
                for call in calls:
                    waiting.append((call, time.monotonic()))
                    async with self._patience():
                        await connection.send_command(*self.command_of(call)[1])
                    if len(waiting) > 1:
                        read(await self._next_answer(connection, waiting))
                while waiting:
                    read(await self._next_answer(connection, waiting))
        except redis.RedisError as error:
            if waiting and isinstance(error, redis.ResponseError):
                read(await self._call(waiting.popleft()[0]))  # it was answered: with a refusal
            for call, sent_at in waiting:
                talk = partial(self._run_script, *self.command_of(call))
                read(await self._repeat(talk, None, sent_at=sent_at))
            for call in calls:
                read(await self._call(call))

    async def _next_answer(
        self, connection: AbstractConnection, waiting: deque[tuple[Call, float]]
    ) -> Any:
        async with self._patience():
            answer = await connection.read_response()
        waiting.popleft()
        return answer

    async def _ask(self, request: Ask) -> list[Any]:
        answers: list[Any] = await self._repeat(
            lambda: self._run_commands(request.commands), request.timeout
        )
        return answers

    async def _now(self, request: Now) -> int:
        known = self.known_time()
        return self.read_time((await self._ask(Ask(("TIME",))))[0]) if known is None else known

    async def _blocking(self, request: Blocking) -> Any:
        return await asyncio.to_thread(request.function, *request.arguments)

    async def _at(self, request: At) -> Any:
        return await request.link.perform(request.steps)

    async def _gather(self, request: Gather) -> list[Any]:
        performed = (link.perform(steps) for link, steps in request.operations)
        results = await asyncio.gather(*performed, return_exceptions=True)
        return gathered(results, partial=request.partial)

    async def _wait(self, waiter: "_Waiter", request: Wait) -> bytes | None:
        try:
            return await waiter.wait(self.full(request.keys), request.seconds)
        except (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError):
            await asyncio.sleep(min(request.seconds, WAIT_PAUSE_S))
            return None
        except ELSEWHERE as error:
            raise ConfigurationError(IN_A_CLUSTER) from error
        except redis.ResponseError as error:
            raise RedisRefused(f"Redis refused: {error}") from error

    # --- attempts ---------------------------------------------------------------------------------

    def _patience(self, limit: float = math.inf) -> AbstractAsyncContextManager[None]:
        """At most as long as one attempt may take, or `limit` seconds if that is less."""
        return _within(min(limit, self._dialer.attempt))

    async def _converse(self, connection: AbstractConnection, talk: Talk) -> Any:
        try:
            commands = next(talk)
            while True:
                packed = connection.pack_commands(commands)
                await connection.send_packed_command(packed)
                answers = [await _answer_or_error(connection) for _ in commands]
                commands = talk.send(answers)
        except StopIteration as end:
            return end.value

    async def _repeat(
        self, talk: Callable[[], Talk], timeout: float | None, *, sent_at: float | None = None
    ) -> Any:
        """Have a conversation, again if need be, until the deadline; once if nobody was there."""
        attempts = Attempts(self, timeout, sent_at)
        while True:
            begun = False
            try:
                async with self._connection(attempts.limit) as connection:
                    attempts.begin()
                    begun = True
                    async with self._patience(attempts.limit):
                        return await self._converse(connection, talk())
            except (redis.ResponseError, *BROKEN) as error:
                failure = error
            outcome = attempts.failed(failure, begun)
            if isinstance(outcome, float):
                await asyncio.sleep(outcome)
                continue
            if "WRONGTYPE" in str(outcome):
                request = Ask(*(("TYPE", self.keys[name]) for name in KEY_TYPES))
                outcome = self._wrong_types(outcome, await self._ask(request))
            raise outcome from failure

    # --- connections ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _connection(self, within: float = math.inf) -> AsyncIterator[AbstractConnection]:
        connection = self._take_free() or await self.dial(within)
        transport = connection._writer.transport if connection._writer is not None else None
        try:
            yield connection
        except BaseException as error:
            # An answer may still be on its way, and must not reach the next user of the connection.
            await _disconnect(connection)
            if transport is not None:  # redis-py may have closed it, and left its buffer to be sent
                transport.abort()
            if isinstance(error, BROKEN) and self._home == _here():
                self._clock_sample = None  # the next answer may be another server's
                while self._free:  # each would cost somebody a time-out
                    await _disconnect(self._free.pop())
            raise
        await self.take_back(connection)

    async def take_back(self, connection: AbstractConnection) -> None:
        """Keep a connection for the next caller; close it if the queue is used elsewhere now."""
        if self._closed or self._home != _here():
            await _disconnect(connection)
        else:
            self._free.append(connection)

    def _take_free(self) -> AbstractConnection | None:
        if self._closed:
            raise RedisRefused("the queue is closed: make a new AsyncTaskQueue")
        self._move_home()
        return self._free.pop() if self._free else None

    def _move_home(self) -> None:
        """Leave the connections of another process or event loop alone."""
        home = _here()
        if self._home != home:
            if self._home is not None and self._home[0] != home[0]:
                # Closing them, as collecting them would, takes them from the parent's event loop.
                self._abandoned.append(self._free)
            self._free, self._home = [], home

    async def lend(self, within: float) -> AbstractConnection:
        """A connection to wait on: a free one whose other end is still there, or a new one."""
        while (connection := self._take_free()) is not None:
            if connection._reader is not None and not connection._reader.at_eof():
                return connection
            await _disconnect(connection)
        return await self.dial(within)

    async def dial(self, within: float = math.inf) -> AbstractConnection:
        """A new connection, ready for use. Raises redis errors."""
        self._move_home()
        connection = await self._dialer.dial(within)
        self._is_known = True
        return connection


class _Dialer:
    """Opens connections like a client's, with time-outs that are ours."""

    def __init__(
        self, client: redis.Redis | redis.asyncio.Redis | ClusterAddress, timeout: float
    ) -> None:
        if isinstance(
            client, ClusterAddress | redis.RedisCluster | redis.asyncio.cluster.RedisCluster
        ):
            raise ConfigurationError(
                "the asynchronous driver does not support Redis Cluster yet: use TaskQueue, in a "
                "thread if need be"
            )
        if not isinstance(client, redis.Redis | redis.asyncio.Redis):
            raise ConfigurationError(
                f"client must be a redis.Redis or a redis.asyncio.Redis, not {kind_of(client)}"
            )
        pool: Any = client.connection_pool
        if isinstance(pool, SentinelConnectionPool | redis.asyncio.sentinel.SentinelConnectionPool):
            raise ConfigurationError(
                "the asynchronous driver does not support Redis Sentinel yet: pass the address of "
                "the primary"
            )
        self._make = _asynchronous(pool.connection_class)
        known = {name for each in self._make.__mro__ for name in inspect.signature(each).parameters}
        options = options_like(pool, timeout / 2) | {"retry": Retry(NoBackoff(), 0)}
        self.attempt: float = options["socket_timeout"]  # seconds for an answer
        # Time-outs are ours: those of redis-py use asyncio.wait_for, which on Python 3.11 swallows
        # a cancellation that comes when the awaited future is done.
        options |= {"socket_timeout": None, "socket_connect_timeout": None}
        self._options = {name: value for name, value in options.items() if name in known}

    async def dial(self, within: float) -> AbstractConnection:
        """A connection, ready for use, made in at most `within` seconds. Raises redis errors."""
        connection = self._make(**self._options)
        try:
            async with _within(min(within, self.attempt)):
                await connection.connect()
        except BaseException as error:
            await _disconnect(connection)
            if isinstance(error, redis.ConnectionError):
                if isinstance(error.__cause__, redis.AuthenticationError):
                    raise error.__cause__ from None
                if is_nobody(error):
                    raise NobodyThere(str(error)) from error
            raise
        return connection


def _asynchronous(kind: type) -> type[AbstractConnection]:
    """The asynchronous class of connections for a class of either kind."""
    if issubclass(kind, AbstractConnection):
        return kind
    for blocking, awaiting in (
        (redis.connection.SSLConnection, SSLConnection),
        (redis.connection.UnixDomainSocketConnection, UnixDomainSocketConnection),
        (redis.connection.Connection, Connection),
    ):
        if issubclass(kind, blocking) and kind._connect is blocking._connect:
            return awaiting
    raise ConfigurationError(
        f"connections of the class {kind.__name__} cannot be used asynchronously: pass a "
        "redis.asyncio.Redis"
    )


class _Waiter:
    """Waits for tokens on its own connection; the BLPOP stays pending between two waits."""

    def __init__(self, link: AsyncLink) -> None:
        self._link = link
        self._keys: tuple[bytes, ...] = ()
        self._connection: AbstractConnection | None = None
        self._answer: asyncio.Task[Any] | None = None

    async def wait(self, keys: tuple[bytes, ...], seconds: float) -> bytes | None:
        """Wait at most `seconds`; the list that a token came from. Raises redis errors."""
        if keys != self._keys:
            await self.close()
            self._keys = keys
        end = time.monotonic() + seconds
        try:
            while (left := end - time.monotonic()) > 0:
                if self._answer is None:
                    self._answer = await self._ask(left)
                done, _ = await asyncio.wait({self._answer}, timeout=left)
                if not done:
                    return None
                answer, self._answer = self._answer, None
                if answer.result() is not None:
                    key: bytes = answer.result()[0]
                    return key
        except BaseException:
            await self.close(is_broken=True)
            raise
        return None

    async def _ask(self, within: float) -> "asyncio.Task[Any]":
        if self._connection is None:
            self._connection = await self._link.lend(within)
        await self._connection.send_command("BLPOP", *self._keys, driver.BLOCK_S)
        return asyncio.ensure_future(_read_token(self._connection))

    async def close(self, *, is_broken: bool = False) -> None:
        """Give up the pending BLPOP, so that a token goes to another client."""
        connection, self._connection = self._connection, None
        answer, self._answer = self._answer, None
        try:
            if answer is not None:
                answer.cancel()
                await asyncio.wait({answer})
        finally:
            if connection is not None:
                if answer is None and not is_broken and connection.is_connected:
                    await self._link.take_back(connection)
                else:
                    await _disconnect(connection)


def _here() -> tuple[int, asyncio.AbstractEventLoop]:
    return os.getpid(), asyncio.get_running_loop()


@asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    """Raises redis.TimeoutError after this long."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise redis.TimeoutError(f"no answer within {seconds:g} s") from None


async def _read_token(connection: AbstractConnection) -> Any:
    """The answer to BLPOP; without one for this long, the connection is dead."""
    # Not by the argument `timeout` of redis-py: after it, the answer is still on its way.
    async with _within(driver.BLOCK_S + driver.SILENCE_S):
        return await connection.read_response()


async def _answer_or_error(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except redis.ResponseError as error:
        return driver.typed(error)


async def _disconnect(connection: AbstractConnection) -> None:
    """Close a connection, whatever state it is in."""
    with suppress(Exception):
        await connection.disconnect(nowait=True)
