"""Talk to Redis: run scripts under one deadline, repeat what may be repeated, wait without polling.

redis-py's own retries are off. It resends a command after a lost reply, which is right only for
commands that recognise their repetition; ours do, and they carry an operation id that must be the
same each time. So the repeating happens here.
"""

import math
import os
import random
import re
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from typing import Any, TypeVar, cast

import redis
from redis.connection import AbstractConnection

from fairqueue.clock import Clock
from fairqueue.errors import FairQueueError, RedisRefused, RedisUnavailable, UnknownLayout
from fairqueue.link.dialer import Dialer, NobodyThere, disconnect
from fairqueue.link.dialer import connection_maker as _connection_maker
from fairqueue.link.keys import KEY_TYPES, Keys
from fairqueue.link.operation import Argument as Argument
from fairqueue.link.operation import (
    Ask,
    Call,
    Each,
    Now,
    Operation,
    Together,
    Wait,
)
from fairqueue.link.scripts import Script, load_script, script_names

Action = Callable[[AbstractConnection], Any]
Item = TypeVar("Item")
Result = TypeVar("Result")

# Half of REPLAY_MS in lua/lib/replay.lua: an operation is never repeated after Redis forgot it.
MAX_TIMEOUT_S = 30.0
SELECTABLE = 1024  # file descriptors from this number on are too large for `select`
BATCH_BYTES = 1024 * 1024  # documents in one script at most, roughly
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
# A sample of the server's clock is used for so long; drift of a quartz in that time is under 1 ms.
CLOCK_SAMPLE_S = 20.0
# The server answers a listener after so long in any case. If it has not for so much longer, the
# connection is dead although nobody closed it: a frozen server, or a network that swallows all.
BLOCK_S = 5.0
SILENCE_S = 2.0
WAIT_PAUSE_S = 0.1  # after the connection of a wait broke
# For the rest of an answer that has begun: meanwhile a listener heeds nobody else.
PARTIAL_S = 0.05

# Errors that say: not done, and it is worth asking again.
_NO_REPLICAS = "NOREPLICAS "
_LATER = ("BUSY ", "UNBLOCKED ", _NO_REPLICAS)
_LATER_TYPES = (  # redis-py takes the word away where it has a type for the error
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
    redis.exceptions.NoScriptError,  # flushed between loading it and running it
)

_WRONG_LAYOUT = re.compile(r"WRONGLAYOUT (\S+)")  # see lua/lib/layout.lua

# Errors after which other connections to the same address are not worth trying either.
_BROKEN = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.InvalidResponse,  # who answers is no Redis, or what it said was garbled
    OSError,
    redis.exceptions.ReadOnlyError,
)


class _HalfDone(redis.ResponseError):
    """Of commands that were sent together one was refused, and another was done."""

    def __init__(self, refusal: redis.ResponseError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Link:
    """The way to one queue in Redis. May be used by many threads, and after a fork."""

    def __init__(
        self, client: redis.Redis, keys: Keys, *, timeout: float, clock: Clock | None
    ) -> None:
        self.keys = keys
        self.timeout = timeout
        self.clock = clock
        self._dialer = _connection_maker(client, timeout)
        self._free: list[AbstractConnection] = []
        self._starts: dict[str, list[Argument]] = {}  # of commands: what is the same each time
        self._pid = os.getpid()
        self._closed = False
        self._was_there = False  # whether a connection was ever made
        self._plain_scripts = False
        self._clock_sample: tuple[int, float] | None = None
        # All of them now: a process must not mix the scripts of two versions of the library.
        for name in script_names():
            load_script(name)

    def close(self) -> None:
        """Close the connections that are not in use; those in use close when they come back."""
        self._closed = True
        with suppress(IndexError):
            while True:
                disconnect(self._free.pop())

    # --- operations -------------------------------------------------------------------------------

    def perform(self, steps: Operation[Result]) -> Result:
        """Run an operation: answer its requests one by one, blocking, and return its result."""
        listener: Listener | None = None
        try:
            request = next(steps)
            while True:
                try:
                    if type(request) is Wait:
                        listener = listener or self.listener(request.key)
                        answer = self._wait(listener, request)
                    else:
                        answer = _ANSWERS[type(request)](self, request)
                except BaseException as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            return cast(Result, end.value)
        finally:
            if listener is not None:
                listener.close()

    def _wait(self, listener: "Listener", request: Wait) -> bool:
        listener.listen_to(self.keys[request.key])
        try:
            return listener.wait(request.seconds)
        except (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError):
            time.sleep(min(request.seconds, WAIT_PAUSE_S))
            return False
        except redis.ResponseError as error:
            raise RedisRefused(f"Redis refused: {error}") from error

    def _answer_call(self, call: Call) -> Any:
        return self.run(
            call.script, rest=call.rest, timeout=call.timeout, now_ms=call.now_ms, **call.arguments
        )

    def _answer_together(self, request: Together) -> list[Any]:
        return self.run_together(*((call.script, _given(call)) for call in request.calls))

    def _answer_each(self, request: Each) -> None:
        calls = iter(request.calls)
        first = next(calls, None)
        if first is None:
            return
        given = (_given(call) for call in chain([first], calls))
        with closing(self.run_each(first.script, given)) as answers:
            for answer in answers:
                if request.read(answer) is False:
                    return

    def _answer_ask(self, request: Ask) -> list[Any]:
        return self.ask(*request.commands, timeout=request.timeout)

    def _answer_now(self, request: Now) -> int:
        return self.now_ms()

    # --- commands ---------------------------------------------------------------------------------

    def run(
        self,
        name: str,
        *,
        rest: Sequence[Argument] = (),
        timeout: float | None = None,
        now_ms: int | None = None,
        **arguments: Any,
    ) -> Any:
        """Run a script by name. Arguments go by the names in its header, `now_ms` by itself.

        Raises RedisUnavailable when Redis did not answer within the time-out (what has happened is
        unknown, the same operation may be repeated), RedisRefused when it said no.
        """
        script = load_script(name)
        command = self._command(script, rest=rest, now_ms=now_ms, **arguments)
        return self._repeat(self._evaluation(script, command), timeout)

    def run_each(self, name: str, calls: Iterable[Mapping[str, Any]]) -> Generator[Any, None, None]:
        """Run a script several times, with the arguments that `run` takes; yields the answers.

        The next call is put together while the server works on the one before. After an error the
        others go one by one, so that each is repeated as `run` repeats it.
        """
        script = load_script(name)
        waiting: deque[tuple[Mapping[str, Any], float]] = deque()
        source = iter(calls)
        try:
            with self._connection() as connection:
                for call in source:
                    if not self._dialer.still_leads(connection):
                        source = chain([call], source)
                        raise redis.ConnectionError("another server leads by now")
                    waiting.append((call, time.monotonic()))
                    connection.send_command(*self._command(script, **call))
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
                yield self.run(name, **waiting.popleft()[0])  # it was answered: with a refusal
            for call, sent_at in waiting:
                action = self._evaluation(script, self._command(script, **call))
                yield self._repeat(action, None, sent_at=sent_at)
            for call in source:
                yield self.run(name, **call)

    def run_together(self, *calls: tuple[str, Mapping[str, Any]]) -> list[Any]:
        """Run several scripts in one round trip, each by name and the arguments of `run`."""
        prepared = [
            (script, self._command(script, **arguments))
            for script, arguments in ((load_script(name), call) for name, call in calls)
        ]

        def talk(connection: AbstractConnection) -> list[Any]:
            if self._plain_scripts:
                return [self._evaluate(connection, *each) for each in prepared]
            _send(connection, [command for _, command in prepared])
            answers = [_answer_or_error(connection) for _ in prepared]
            for i, answer in enumerate(answers):
                if isinstance(answer, redis.exceptions.NoScriptError):
                    answers[i] = self._evaluate(connection, *prepared[i])
            refusals = [each for each in answers if isinstance(each, redis.ResponseError)]
            if refusals:
                raise _HalfDone(refusals[0]) if len(refusals) < len(answers) else refusals[0]
            return answers

        answers: list[Any] = self._repeat(talk, None)
        return answers

    def ask(self, *commands: Sequence[Argument], timeout: float | None = None) -> list[Any]:
        """Send plain reading commands in one round trip; the answers in order. Raises as `run`."""

        def talk(connection: AbstractConnection) -> list[Any]:
            _send(connection, commands)
            return [connection.read_response() for _ in commands]

        answers: list[Any] = self._repeat(talk, timeout)
        return answers

    def _command(
        self,
        script: Script,
        *,
        rest: Sequence[Argument] = (),
        now_ms: int | None = None,
        **arguments: Argument,
    ) -> list[Argument]:
        if "now_ms" in script.arguments:
            if now_ms is None and self.clock is not None:
                now_ms = self.clock.now_ms()
            arguments["now_ms"] = "" if now_ms is None else now_ms
        start = self._starts.get(script.name)
        if start is None:
            keys = [self.keys[key] for key in script.keys]
            start = self._starts[script.name] = ["EVALSHA", script.sha, len(keys), *keys]
        return [*start, *(arguments[name] for name in script.arguments), *rest]

    def _evaluation(self, script: Script, command: list[Argument]) -> Action:
        return lambda connection: self._evaluate(connection, script, command)

    def _evaluate(
        self, connection: AbstractConnection, script: Script, command: list[Argument]
    ) -> Any:
        if not self._plain_scripts:
            try:
                return self._evaluate_by_sha(connection, script, command)
            except redis.ResponseError as error:
                # fakeredis and servers before 7.0 do not know the first line, `#!lua`; fakeredis
                # says so only when the script is run.
                if "near '#'" not in str(error):
                    raise
                self._plain_scripts = True
        return self._evaluate_plain(connection, script, command)

    def _evaluate_by_sha(
        self, connection: AbstractConnection, script: Script, command: list[Argument]
    ) -> Any:
        connection.send_command(*command)
        try:
            return connection.read_response()
        except redis.exceptions.NoScriptError:
            connection.send_command("SCRIPT", "LOAD", script.text)
        connection.read_response()
        connection.send_command(*command)
        return connection.read_response()

    def _evaluate_plain(
        self, connection: AbstractConnection, script: Script, command: list[Argument]
    ) -> Any:
        connection.send_command("EVAL", script.plain_text, *command[2:])
        return connection.read_response()

    def _repeat(
        self,
        action: Action,
        timeout: float | None,
        *,
        sent_at: float | None = None,
    ) -> Any:
        """Do it, again if need be, until the deadline; once if there has never been anybody.

        sent_at: when it was sent before, by `time.monotonic`, without an answer. What may have been
        done is never sent after the deadline: Redis would not know it again.
        """
        in_doubt = sent_at is not None
        deadline = (sent_at or time.monotonic()) + (self.timeout if timeout is None else timeout)
        pause = FIRST_PAUSE_S
        # A first try takes as long as a connection waits by itself, which leaves time for another.
        limit = math.inf if timeout is None else timeout
        failure: Exception
        while True:
            begun = False
            try:
                with self._connection(limit) as connection:
                    if in_doubt and time.monotonic() >= deadline:
                        raise redis.TimeoutError("no time was left to send it again")
                    begun = True
                    if limit == math.inf:
                        return action(connection)
                    with _at_most(connection, limit):
                        return action(connection)
            except _HalfDone as error:
                failure, in_doubt = error.refusal, True
            except (redis.ResponseError, *_BROKEN) as error:
                failure = error
            if not _is_for_later(failure):
                raise self._refused(failure, in_doubt) from failure
            if isinstance(failure, NobodyThere) and not self._was_there:
                # A wrong address, most likely. One that was right before is that of a restart.
                raise RedisUnavailable(f"Redis did not answer: {failure}") from failure
            in_doubt = in_doubt or (begun and not isinstance(failure, redis.ResponseError))
            wait = pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
            if time.monotonic() + wait >= deadline:
                if str(failure).startswith(_NO_REPLICAS) and not in_doubt:
                    raise RedisRefused(f"Redis refused: {failure}") from failure
                raise RedisUnavailable(f"Redis did not answer: {failure}") from failure
            time.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            limit = max(deadline - time.monotonic(), FIRST_PAUSE_S)

    def _refused(self, error: Exception, in_doubt: bool) -> FairQueueError:
        """What the caller is told of a refusal; if an earlier try may have been done, that too."""
        if _is_untrusted(error):
            return RedisUnavailable(f"Redis cannot be trusted: {error}")
        kind: type[FairQueueError] = RedisRefused
        if layout := _WRONG_LAYOUT.match(str(error)):
            kind = UnknownLayout
            text = (
                f"queue {self.keys.queue!r} has layout {layout[1]}, which this version of "
                "FairQueue does not know: install the version that changed it, or a later one"
            )
        elif isinstance(error, redis.ResponseError):
            text = self._refusal(error)
        else:
            text = f"Redis refused to let us in: {error}"
        if in_doubt:
            return RedisUnavailable(f"{text}; whether it was done before that is not known")
        return kind(text)

    def _refusal(self, error: redis.ResponseError) -> str:
        """What Redis said, with the key where it says only that one has a wrong type."""
        text = f"Redis refused: {error}"
        if "WRONGTYPE" not in text:
            return text
        types = self.ask(*(("TYPE", self.keys[name]) for name in KEY_TYPES))
        wrong = [
            f"{self.keys[name].decode()} is a {found.decode()} and should be a {right}"
            for (name, right), found in zip(KEY_TYPES.items(), types, strict=True)
            if found.decode() not in ("none", right)
        ]
        return f"{text}; something else has written here: {', '.join(wrong)}"

    # --- time -------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """The time of the queue: the clock that was passed in, or a close estimate of the server's.

        Scripts that depend on it check it against the server's own and say so if it is off.
        """
        if self.clock is not None:
            return self.clock.now_ms()
        sample = self._clock_sample
        if sample is not None and time.monotonic() - sample[1] < CLOCK_SAMPLE_S:
            return sample[0] + int((time.monotonic() - sample[1]) * 1000)
        seconds, micros = self.ask(("TIME",))[0]
        return self.learn_time(int(seconds) * 1000 + int(micros) // 1000)

    def learn_time(self, now_ms: int) -> int:
        """Take note of what the server's clock said just now."""
        if self.clock is None:
            self._clock_sample = (now_ms, time.monotonic())
        return now_ms

    # --- connections ------------------------------------------------------------------------------

    @contextmanager
    def _connection(self, within: float = math.inf) -> Iterator[AbstractConnection]:
        connection = self._take(within)
        try:
            yield connection
        except BaseException as error:
            # An answer may still be on its way, and must not reach the next user of the connection;
            # or it was READONLY, and this is the wrong server by now.
            disconnect(connection)
            if isinstance(error, _BROKEN):
                self._drop_free(_address(connection))
            raise
        self.take_back(connection)

    def lend(self) -> AbstractConnection:
        """A connection to wait on: a free one whose other end is still there, or a new one.

        Whoever has read all answers to what it has sent gives it back by `take_back`; others close
        it. Raises redis errors, and RedisRefused after `close`.
        """
        while (connection := self._take_free(math.inf)) is not None:
            sock = getattr(connection, "_sock", None)
            # Nothing was asked: what can be read is the end.
            if not isinstance(sock, socket.socket) or not _readable([sock], 0):
                return connection
            disconnect(connection)
        return self._dial(math.inf)

    def take_back(self, connection: AbstractConnection) -> None:
        """Keep a connection for the next who needs one."""
        self._free.append(connection)
        if self._closed:
            self.close()

    def _drop_free(self, address: object) -> None:
        """Close the free connections to an address: else each would cost somebody a time-out."""
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

    def _take(self, within: float) -> AbstractConnection:
        connection = self._take_free(within)
        return self._dial(within) if connection is None else connection

    def _take_free(self, within: float) -> AbstractConnection | None:
        """A connection that is free and leads to where a new one would; None if there is none."""
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

    def listener(self, key: str) -> "Listener":
        """Something that waits for a token in a list, on a connection of its own meanwhile."""
        return Listener(self, self._dialer, self.keys[key])


_ANSWERS: dict[type, Callable[[Link, Any], Any]] = {
    Call: Link._answer_call,
    Together: Link._answer_together,
    Each: Link._answer_each,
    Ask: Link._answer_ask,
    Now: Link._answer_now,
}


def _given(call: Call) -> Mapping[str, Any]:
    return {"rest": call.rest, "now_ms": call.now_ms, **call.arguments}


def in_batches(
    items: Sequence[Item],
    most: int,
    size_of: Callable[[Item], int],
    most_bytes: int = BATCH_BYTES,
) -> Iterator[Sequence[Item]]:
    """Cut a list into parts of at most so many items, and fewer where they are large."""
    start = size = 0
    for i, item in enumerate(items):
        if i > start and (i - start == most or size + size_of(item) > most_bytes):
            yield items[start:i]
            start, size = i, 0
        size += size_of(item)
    if start < len(items):
        yield items[start:]


class Listener:
    """Waits for a token in a list of Redis, for another thread, or for the time, without polling.

    The server's own time-outs are checked ten times a second only; so the timer is ours, and the
    server is asked to wait for longer. Its time-out shows that it still listens.
    """

    def __init__(self, link: Link, dialer: Dialer, key: bytes) -> None:
        self._link = link
        self._dialer = dialer
        self._pid = os.getpid()
        self._key = key
        self._connection: AbstractConnection | None = None
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self._interrupted = threading.Event()
        self._pending = False
        self._answers_by = 0.0  # a living server has answered what is pending

    def listen_to(self, key: bytes) -> None:
        """Wait for tokens in this list from now on."""
        if key != self._key:
            self.forget()
            self._key = key

    def wait(self, seconds: float) -> bool:
        """Wait for at most so long; True if a token came or another thread ended the wait.

        Raises redis errors when the connection fails. The wish for a token stays with the server
        until `forget`, so that one which comes between two waits is not missed.
        """
        if seconds <= 0 or self._interrupted.is_set():
            return self._interrupted.is_set()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            sock = self._ask()
            if sock is None:
                return self._woken(_readable([self._awake], min(left, LONGEST_PAUSE_S / 10)))
            ready = self._ready(sock, left)
            if sock in ready:
                if self._read() is not None:
                    return True
                # Half an answer may be all that ever comes: the others are heeded too.
                ready = _readable([self._awake], 0)
            if ready:
                return self._woken(ready)
            if self._pending and time.monotonic() >= self._answers_by:
                self.forget()
        return False

    def _ready(self, sock: socket.socket, seconds: float) -> list[socket.socket]:
        """Wait for the server, another thread or the time: which of the first two it was."""
        connection = self._connection
        assert connection is not None  # noqa: S101 - _ask has just made it
        try:
            if connection.can_read(timeout=0):
                return [sock]
        except BaseException:
            self.forget()
            raise
        silence = max(0.0, self._answers_by - time.monotonic())
        return _readable([sock, self._awake], min(seconds, silence))

    def _read(self) -> Any:
        """The answer: a token, or None if there was none for a while, or is none yet."""
        connection = self._connection
        assert connection is not None  # noqa: S101 - _ready has just looked at it
        try:
            with _at_most(connection, PARTIAL_S):
                answer = connection.read_response(disconnect_on_error=False)
        except redis.TimeoutError:
            return None  # TLS said something of itself, or the rest is on its way: still pending
        except redis.ResponseError as error:
            self.forget()
            if _is_for_later(error):
                raise redis.ConnectionError(f"no longer the primary: {error}") from error
            raise
        except BaseException:
            self.forget()
            raise
        self._pending = False
        return answer

    def _ask(self) -> socket.socket | None:
        """See to it that the server knows our wish; the socket, or None where there is none."""
        if self._connection is not None and not self._dialer.still_leads(self._connection):
            self.forget()
        if self._connection is None:
            self._connection = self._link.lend()
            self._pending = False
        sock = getattr(self._connection, "_sock", None)
        if not isinstance(sock, socket.socket):
            return None  # fakeredis
        if not self._pending:
            try:
                self._connection.send_command("BLPOP", self._key, BLOCK_S)
            except BaseException:
                self.forget()
                raise
            self._pending = True
            self._answers_by = time.monotonic() + BLOCK_S + SILENCE_S
        return sock

    def forget(self) -> None:
        """Take the wish back, so that a token goes to somebody else."""
        connection, self._connection = self._connection, None
        self._pending = False
        if connection is not None:
            disconnect(connection)

    def _release(self) -> None:
        """Let go of the connection: it is of use to others if nothing is asked on it any more."""
        connection = self._connection
        if connection is None or self._pending or self._pid != os.getpid():
            self.forget()
        else:
            self._connection = None
            self._link.take_back(connection)

    def _woken(self, ready: list[socket.socket]) -> bool:
        if ready:
            with suppress(BlockingIOError):
                self._awake.recv(4096)
        return bool(ready)

    def wait_for_nudge(self, seconds: float) -> bool:
        """Wait for another thread only: a token goes to somebody else meanwhile."""
        self._release()
        if seconds <= 0 or self._interrupted.is_set():
            return self._interrupted.is_set()
        return self._woken(_readable([self._awake], seconds))

    def interrupt(self) -> None:
        """End the wait of another thread, and all later ones."""
        self._interrupted.set()
        self.nudge()

    def nudge(self) -> None:
        """End the wait of another thread, or its next one if it does not wait now."""
        with suppress(OSError):
            self._waker.send(b"x")

    def close(self) -> None:
        """Give everything back."""
        self._release()
        self._awake.close()
        self._waker.close()


def _is_for_later(error: Exception) -> bool:
    """Whether it is worth asking again: nobody has said a no that stays."""
    if isinstance(error, redis.ResponseError):
        return isinstance(error, _LATER_TYPES) or str(error).startswith(_LATER)
    return not isinstance(error, redis.AuthenticationError) and not _is_untrusted(error)


def _address(connection: AbstractConnection) -> tuple[object, ...]:
    """Where a connection leads: to a host and port, or to a path."""
    return tuple(getattr(connection, name, None) for name in ("host", "port", "path"))


def _send(connection: AbstractConnection, commands: Sequence[Sequence[Argument]]) -> None:
    """Send commands together: each write of its own would wake the server and cost a call."""
    connection.send_packed_command(connection.pack_commands(commands))


def _answer_or_error(connection: AbstractConnection) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error


def _is_untrusted(error: BaseException) -> bool:
    """Whether the server's certificate was refused: asking again would get the same one."""
    causes = (error, error.__cause__, error.__context__)
    return any(isinstance(each, ssl.SSLCertVerificationError) for each in causes)


def _readable(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Those that can be read within so long. `select` is exact to the µs, `poll` to the ms."""
    if max(sock.fileno() for sock in sockets) < SELECTABLE:
        return select.select(sockets, [], [], seconds)[0]
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLIN)
    ready = {number for number, _ in poll.poll(seconds * 1000)}
    return [sock for sock in sockets if sock.fileno() in ready]


@contextmanager
def _at_most(connection: AbstractConnection, seconds: float) -> Iterator[None]:
    """Wait no longer for an answer, if that is less than the connection would by itself."""
    sock = getattr(connection, "_sock", None)
    if not isinstance(sock, socket.socket):
        yield
        return
    usual = sock.gettimeout()
    sock.settimeout(seconds if usual is None else min(usual, seconds))
    try:
        yield
    finally:
        if sock.fileno() >= 0:  # it was not closed meanwhile
            sock.settimeout(usual)
