"""Run operations of several partitions at the same time: one round trip for each step and server.

All operations advance in step. What they ask of one server goes there in one write, and the servers
work at the same time. What fails is repeated one by one, with the deadline of its start.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import redis
from redis.connection import AbstractConnection

from fairqueue.errors import RedisUnavailable
from fairqueue.link.driver import BROKEN, gathered
from fairqueue.link.listener import answer_or_error, at_most
from fairqueue.link.operation import Argument, Ask, Call, Gather, Now, Operation, Together

_PIPELINED = (Call, Ask, Together, Now)


class Server(Protocol):
    """The connections to one server."""

    def take(self, within: float) -> AbstractConnection:
        """Return a connection that nobody else uses."""

    def take_back(self, connection: AbstractConnection) -> None:
        """Keep a connection for the next caller."""

    def give_up(self, connection: AbstractConnection, error: BaseException) -> None:
        """Close a connection after an error."""


class _Run:
    """One of the operations: what it asks for now, and how it ended."""

    def __init__(self, link: Any, steps: Operation[Any]) -> None:
        self.link = link
        self.result: Any = None
        self.is_over = False
        self.request: Any = None
        self.since = 0.0
        self._steps = steps
        self.go_on(None)

    def go_on(self, answer: Any, error: BaseException | None = None) -> None:
        """Let the operation read the answer to its request, up to its next one."""
        try:
            send = self._steps.send
            self.request = send(answer) if error is None else self._steps.throw(error)
        except StopIteration as end:
            self.result, self.is_over = end.value, True
        except Exception as failure:
            self.result, self.is_over = failure, True

    @property
    def is_pipelined(self) -> bool:
        """Whether what it asks for now can be sent together with what others ask for."""
        return not self.is_over and isinstance(self.request, _PIPELINED)

    def tell_time(self) -> None:
        """Answer all requests for the time that need no server."""
        while not self.is_over and type(self.request) is Now:
            known = self.link.known_time()
            if known is None:
                return
            self.go_on(known)

    def commands(self) -> Sequence[Sequence[Argument]]:
        """What the request sends."""
        request = self.request
        if type(request) is Ask:
            return request.commands
        if type(request) is Now:
            return (("TIME",),)
        calls = request.calls if type(request) is Together else (request,)
        return [self.link.command_of(call)[1] for call in calls]

    def read(self, answers: list[Any]) -> None:
        """Take the answers to the commands; ask again one by one if some were refused."""
        if any(isinstance(answer, redis.ResponseError) for answer in answers):
            self.ask_alone(None)
        elif type(self.request) is Now:
            self.go_on(self.link.read_time(answers[0]))
        else:
            self.go_on(answers[0] if type(self.request) is Call else answers)

    def ask_alone(self, sent_at: float | None) -> None:
        """Send the request by itself, repeated until its deadline."""
        try:
            answer = self.link.ask_again(self.request, since=self.since, sent_at=sent_at)
        except Exception as error:
            self.go_on(None, error)
        else:
            self.go_on(answer)

    def abandon(self) -> None:
        """End the operation: nobody wants its result."""
        self._steps.close()


def gather(request: Gather) -> list[Any]:
    """The results of operations, in order; see Gather."""
    runs: list[_Run] = []
    try:
        for link, steps in request.operations:
            runs.append(_Run(link, steps))
        while active := [run for run in runs if not run.is_over]:
            for run in active:
                run.tell_time()
            together = [run for run in active if run.is_pipelined]
            alone = [run for run in active if not run.is_pipelined and not run.is_over]
            _exchange(together)
            _ask_others(alone)
    except BaseException:
        for run in runs:
            run.abandon()
        raise
    return gathered([run.result for run in runs], partial=request.partial)


def _ask_others(runs: list[_Run]) -> None:
    """Answer requests that are more than some commands, one after the other.

    Where a server has not answered one of them in time, the others are not sent: together they
    would take many times as long as a call may.
    """
    silent: dict[Server, RedisUnavailable] = {}
    for run in runs:
        connections = run.link.connections
        server = connections.here()
        # In a cluster of which no node answers, nobody knows the server.
        is_unknown = silent and server is connections and connections.is_cluster
        if is_unknown or server in silent:
            first = silent.get(server) or next(iter(silent.values()))
            run.go_on(None, RedisUnavailable(str(first)))
            continue
        try:
            answer = getattr(run.link, run.request.method)(run.request)
        except RedisUnavailable as error:
            silent[server] = error
            run.go_on(None, error)
        except Exception as error:
            run.go_on(None, error)
        else:
            run.go_on(answer)


def _exchange(runs: list[_Run]) -> None:
    """Send the requests of all runs, to all servers, then read the answers."""
    by_server: dict[Server, list[_Run]] = {}
    for run in runs:
        by_server.setdefault(run.link.connections.here(), []).append(run)
    sent: list[_Sent] = []
    try:
        for server, theirs in by_server.items():
            sent.append(_Sent(server, theirs))
        while sent:
            sent.pop(0).receive()
    except BaseException as error:
        for each in sent:
            each.give_up(error)
        raise


class _Sent:
    """What was sent to one server for several runs."""

    def __init__(self, server: Server, runs: list[_Run]) -> None:
        self._server = server
        self._runs = runs
        self._connection: AbstractConnection | None = None
        self._sent_at: float | None = None
        now = time.monotonic()
        self._patience = math.inf
        for run in runs:
            run.since = now
            limit = getattr(run.request, "timeout", None)
            self._patience = min(self._patience, math.inf if limit is None else limit)
        self._commands = [run.commands() for run in runs]
        try:
            self._connection = server.take(self._patience)
            self._sent_at = now
            every = [command for commands in self._commands for command in commands]
            self._connection.send_packed_command(self._connection.pack_commands(every))
        except BaseException as error:
            self.give_up(error)
            if not isinstance(error, (redis.ResponseError, *BROKEN)):
                raise

    def give_up(self, error: BaseException) -> None:
        """Close the connection: answers may still be on their way."""
        if self._connection is not None:
            self._server.give_up(self._connection, error)
            self._connection = None

    def receive(self) -> None:
        """Read the answers, and let each run go on with its own."""
        answers: list[list[Any]] = []
        if self._connection is not None:
            try:
                with at_most(self._connection, self._patience):
                    for commands in self._commands:
                        answers.append([answer_or_error(self._connection) for _ in commands])
            except BaseException as error:
                self.give_up(error)
                if not isinstance(error, BROKEN):
                    raise
            else:
                self._server.take_back(self._connection)
                self._connection = None
        for run, theirs in zip(self._runs, answers, strict=False):
            run.read(theirs)
        for run in self._runs[len(answers) :]:
            run.ask_alone(self._sent_at)
