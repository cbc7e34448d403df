"""What both drivers share: commands of scripts, the deadline of a request, the meaning of errors.

redis-py's own retries are off. It resends a command after a lost reply, which is right only for
commands that recognise their repetition; ours do, and they carry an operation id that must be the
same each time. So the drivers repeat requests themselves, and `Attempts` decides for both of them.
"""

import math
import random
import re
import ssl
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import redis

from fairqueue.clock import Clock
from fairqueue.errors import (
    ConfigurationError,
    FairQueueError,
    RedisRefused,
    RedisUnavailable,
    UnknownLayout,
    WrongPartitions,
)
from fairqueue.link.dialer import NobodyThere
from fairqueue.link.keys import BARRIER, KEY_TYPES, STORED, Keys
from fairqueue.link.operation import Argument, Call
from fairqueue.link.scripts import Script, load_script, script_names

# Half of REPLAY_MS in lua/lib/replay.lua: an operation is never repeated after Redis forgot it.
MAX_TIMEOUT_S = 30.0
BATCH_BYTES = 1024 * 1024  # documents in one script at most, roughly
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
# A sample of the server's clock is used for this long; a quartz drifts less than 1 ms meanwhile.
CLOCK_SAMPLE_S = 20.0
# The server answers BLPOP after this long in any case. If it has not answered SILENCE_S later, the
# connection is dead although nobody closed it: a frozen server, or a network that drops packets.
BLOCK_S = 5.0
SILENCE_S = 2.0
WAIT_PAUSE_S = 0.1  # after the connection of a wait broke

# Errors that mean: not done, and worth repeating.
_NO_REPLICAS = "NOREPLICAS "
_LATER = ("BUSY ", "UNBLOCKED ", _NO_REPLICAS)
_LATER_TYPES = (  # redis-py removes the first word where it has a type for the error
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
    redis.exceptions.NoScriptError,  # flushed between loading it and running it
)
# What a node of a cluster answers to a client that does not know of clusters.
ELSEWHERE = (redis.exceptions.AskError, redis.exceptions.ClusterCrossSlotError)
IN_A_CLUSTER = (
    "this server is a node of a cluster, and others have a part of the keys: connect with "
    "redis+cluster://, or with a redis.RedisCluster"
)
AT_ONCE = 4  # how often a request follows the keys to another node before it pauses
_WRONG_LAYOUT = re.compile(r"WRONGLAYOUT (\S+)")  # see lua/lib/layout.lua

# Errors after which other connections to the same address are not worth trying either.
BROKEN = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.InvalidResponse,  # the peer is not a Redis, or its answer was garbled
    OSError,
    redis.exceptions.ReadOnlyError,
)

# A conversation on one connection: yields commands to be sent together, and gets their answers. A
# refusal is an answer, too.
Talk = Generator[Sequence[Sequence[Argument]], list[Any], Any]
Item = TypeVar("Item")


class HalfDone(redis.ResponseError):
    """Of several commands sent together, one was refused and another was done."""

    def __init__(self, refusal: redis.ResponseError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Driver:
    """The keys and the clock of one queue, and the commands that run its scripts."""

    parts: "tuple[Any, ...]" = ()  # the links of the partitions, if there are several
    record: Any = None  # of one with partitions: the link with the keys that it would have without
    is_begun = False  # whether it is known that the queue has as many partitions as `parts`
    era = 0  # grows when connections break: the next answer may be another server's
    is_checked = False  # whether the server is known to keep what it stores; see QueueBase.check
    is_clustered = False  # whether the keys may move to another server

    def __init__(self, keys: Keys, timeout: float, clock: Clock | None) -> None:
        self.keys = keys
        self.timeout = timeout
        self.clock = clock
        # fakeredis and servers before 7.0 do not know the first line of scripts, `#!lua`.
        self._plain_scripts = False
        self._starts: dict[str, list[Argument]] = {}  # the constant part of each script's command
        self._clock_sample: tuple[int, float, int] | None = None
        # All of them now: a process must not mix the scripts of two versions of the library.
        for name in script_names():
            load_script(name)

    @property
    def is_known(self) -> bool:
        """Whether a connection was ever made."""
        raise NotImplementedError

    def begin_with(self, layout: bytes | None) -> None:
        """Take note of the layout of a queue without partitions.

        Raises WrongPartitions if it is that of a queue with several.
        """
        if layout and layout.startswith(STORED.encode()):
            raise WrongPartitions(int(layout[len(STORED) :]), 1)
        self.is_begun = True

    def full(self, keys: Iterable[str | bytes]) -> tuple[bytes, ...]:
        """The keys with these names; bytes are the key of a partition already."""
        return tuple(key if isinstance(key, bytes) else self.keys[key] for key in keys)

    def command_of(self, call: Call) -> tuple[Script, list[Argument]]:
        """The script of a call, and the command that runs it."""
        script, arguments = load_script(call.script), call.arguments
        start = self._starts.get(script.name)
        if start is None:
            keys = [self.keys[key] for key in script.keys]
            start = self._starts[script.name] = ["EVALSHA", script.sha, len(keys), *keys]
        if "now_ms" in script.arguments:
            now_ms: Argument | None = call.now_ms
            if now_ms is None:
                now_ms = "" if self.clock is None else self.clock.now_ms()
            arguments["now_ms"] = now_ms
        return script, [*start, *(arguments[name] for name in script.arguments), *call.rest]

    # --- conversations ----------------------------------------------------------------------------

    def _run_script(self, script: Script, command: list[Argument]) -> Talk:
        if not self._plain_scripts:
            (answer,) = yield (command,)
            if isinstance(answer, redis.exceptions.NoScriptError):
                _check((yield (("SCRIPT", "LOAD", script.text),))[0])
                (answer,) = yield (command,)
            if not isinstance(answer, redis.ResponseError) or "near '#'" not in str(answer):
                return _check(answer)
            self._plain_scripts = True
        return _check((yield (("EVAL", script.plain_text, *command[2:]),))[0])

    def _run_together(self, prepared: Sequence[tuple[Script, list[Argument]]]) -> Talk:
        if self._plain_scripts:
            answers = []
            for each in prepared:
                answers.append((yield from self._run_script(*each)))
            return answers
        answers = yield [command for _, command in prepared]
        for i, answer in enumerate(answers):
            if isinstance(answer, redis.exceptions.NoScriptError):
                answers[i] = yield from self._run_script(*prepared[i])
        refusals = [each for each in answers if isinstance(each, redis.ResponseError)]
        if refusals:
            raise HalfDone(refusals[0]) if len(refusals) < len(answers) else refusals[0]
        return answers

    def _run_commands(self, commands: Sequence[Sequence[Argument]]) -> Talk:
        return [_check(answer) for answer in (yield commands)]

    # --- time -------------------------------------------------------------------------------------

    def learn_time(self, now_ms: int) -> int:
        """Take note of what the server's clock said just now."""
        if self.clock is None:
            self._clock_sample = (now_ms, time.monotonic(), self.era)
        return now_ms

    def known_time(self) -> int | None:
        """The time of the queue's clock, or of a recent sample of the server's; None if too old."""
        if self.clock is not None:
            return self.clock.now_ms()
        sample = self._clock_sample
        if sample is None or sample[2] != self.era:
            return None
        if time.monotonic() - sample[1] >= CLOCK_SAMPLE_S:
            return None
        return sample[0] + int((time.monotonic() - sample[1]) * 1000)

    def read_time(self, answer: Sequence[Any]) -> int:
        """The answer to TIME in ms."""
        return self.learn_time(int(answer[0]) * 1000 + int(answer[1]) // 1000)

    def _wrong_types(self, refusal: FairQueueError, types: Sequence[bytes]) -> FairQueueError:
        """The refusal, with the keys that have a wrong type."""
        wrong = [
            f"{self.keys[name].decode()} is a {found.decode()} and should be a {right}"
            for (name, right), found in zip(KEY_TYPES.items(), types, strict=True)
            if found.decode() not in ("none", right) and name != BARRIER
        ]
        text = f"{refusal}; another program has written here: {', '.join(wrong)}"
        return type(refusal)(text)


class Attempts:
    """The attempts at one request: how long they go on, and what a failure means.

    A first attempt takes as long as a connection waits by itself, which leaves time for another.
    sent_at: when the request was already sent, by `time.monotonic`, without an answer. A request
    that may have been done is never sent after the deadline: Redis would not recognise it. since:
    when the time-out began, if that was before.
    """

    __slots__ = ("_deadline", "_driver", "_in_doubt", "_moves", "_pause", "limit")

    def __init__(
        self,
        driver: Driver,
        timeout: float | None,
        sent_at: float | None = None,
        since: float | None = None,
    ) -> None:
        self._driver = driver
        self._in_doubt = sent_at is not None
        self._deadline = (sent_at or since or time.monotonic()) + (
            driver.timeout if timeout is None else timeout
        )
        self._pause = FIRST_PAUSE_S
        self._moves = 0  # how often another node was named
        self.limit = math.inf if timeout is None else timeout  # seconds for the next attempt
        if since is not None:
            self.limit = max(self._deadline - time.monotonic(), FIRST_PAUSE_S)

    def begin(self) -> None:
        """Raises redis.TimeoutError if it is too late to send the request again."""
        if self._in_doubt and time.monotonic() >= self._deadline:
            raise redis.TimeoutError("no time was left to send it again")

    def failed(self, failure: Exception, begun: bool) -> float | FairQueueError:
        """Seconds to wait before the next attempt, or the error for the caller."""
        if isinstance(failure, HalfDone):
            failure, self._in_doubt = failure.refusal, True
        is_elsewhere = isinstance(failure, redis.exceptions.AskError)
        if not is_for_later(failure) and not (is_elsewhere and self._driver.is_clustered):
            return self._refused(failure)
        if isinstance(failure, NobodyThere) and not self._driver.is_known:
            # A wrong address, most likely. One that worked before may be that of a restart.
            return RedisUnavailable(f"Redis did not answer: {failure}")
        if begun and not isinstance(failure, redis.ResponseError):
            self._in_doubt = True
        wait = self._pause * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        if is_elsewhere and self._moves < AT_ONCE:
            self._moves += 1
            wait = 0.0
        if time.monotonic() + wait >= self._deadline:
            if str(failure).startswith(_NO_REPLICAS) and not self._in_doubt:
                return RedisRefused(f"Redis refused: {failure}")
            return RedisUnavailable(f"Redis did not answer: {failure}")
        if wait:
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        self.limit = max(self._deadline - time.monotonic() - wait, FIRST_PAUSE_S)
        return wait

    def _refused(self, error: Exception) -> FairQueueError:
        """The error of a refusal; if an earlier attempt may have been done, it says so."""
        if is_untrusted(error):
            return RedisUnavailable(f"the certificate of Redis was rejected: {error}")
        kind: type[FairQueueError] = RedisRefused
        layout = _WRONG_LAYOUT.match(str(error))
        if layout and layout[1].startswith(STORED):
            wanted = max(1, len(self._driver.parts))
            return WrongPartitions(int(layout[1].removeprefix(STORED)), wanted)
        if layout:
            kind = UnknownLayout
            text = (
                f"queue {self._driver.keys.queue!r} has layout {layout[1]}, which this version of "
                "FairQueue does not know: install the version that changed it, or a later one"
            )
        elif isinstance(error, ELSEWHERE):
            kind, text = ConfigurationError, IN_A_CLUSTER
        elif isinstance(error, redis.ResponseError):
            text = f"Redis refused: {error}"
        else:
            text = f"Redis refused the login: {error}"
        if self._in_doubt:
            return RedisUnavailable(f"{text}; it is not known whether it was done before that")
        return kind(text)


# Errors that only the cluster client of redis-py before 8 has types for.
_TYPES: dict[str, type[redis.ResponseError]] = {
    "ASK": redis.exceptions.AskError,
    "CLUSTERDOWN": redis.exceptions.ClusterDownError,
    "CROSSSLOT": redis.exceptions.ClusterCrossSlotError,
    "MASTERDOWN": redis.exceptions.MasterDownError,
    "MOVED": redis.exceptions.MovedError,
    "TRYAGAIN": redis.exceptions.TryAgainError,
}


def typed(error: redis.ResponseError) -> redis.ResponseError:
    """An error of a server with the type that it has in all versions of redis-py."""
    word, _, text = str(error).partition(" ")
    kind = _TYPES.get(word) if type(error) is redis.ResponseError else None
    return error if kind is None else kind(text)


def is_for_later(error: Exception) -> bool:
    """Whether a request is worth repeating: nobody has refused it permanently."""
    if isinstance(error, redis.ResponseError):
        return isinstance(error, _LATER_TYPES) or str(error).startswith(_LATER)
    return not isinstance(error, redis.AuthenticationError) and not is_untrusted(error)


def is_untrusted(error: BaseException) -> bool:
    """Whether the server's certificate was rejected: repeating would get the same one."""
    causes = (error, error.__cause__, error.__context__)
    return any(isinstance(each, ssl.SSLCertVerificationError) for each in causes)


def gathered(results: list[Any], *, partial: bool) -> list[Any]:
    """The results of operations; raises the first error unless `partial`, but never hides others.

    What is not an Exception, such as a cancellation, is raised in any case.
    """
    for result in results:
        if isinstance(result, BaseException) and not (partial and isinstance(result, Exception)):
            raise result
    return results


def _check(answer: Any) -> Any:
    if isinstance(answer, redis.ResponseError):
        raise answer
    return answer


def in_batches(
    items: Sequence[Item],
    most: int,
    size_of: Callable[[Item], int],
    most_bytes: int = BATCH_BYTES,
) -> Iterator[Sequence[Item]]:
    """Cut a list into parts of at most `most` items, and fewer where they are large."""
    start = size = 0
    for i, item in enumerate(items):
        if i > start and (i - start == most or size + size_of(item) > most_bytes):
            yield items[start:i]
            start, size = i, 0
        size += size_of(item)
    if start < len(items):
        yield items[start:]
