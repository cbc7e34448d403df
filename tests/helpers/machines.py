"""What the state machines of the models share: a link that repeats commands, and how they run."""

import os
import random
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from fairqueue.clock import ManualClock
from fairqueue.link.connection import Link
from fairqueue.link.operation import Call
from fairqueue.models import new_id
from fairqueue.queue.queue import TaskQueue

EXAMPLES = os.environ.get("FAIRQUEUE_MODEL_EXAMPLES")
SAME = os.environ.get("FAIRQUEUE_MODEL_SAME", "0" if EXAMPLES else "1") != "0"
# Shrinking takes minutes: without it a failure is longer to read, but said at once.
SHRINK = os.environ.get("FAIRQUEUE_MODEL_SHRINK", "1" if EXAMPLES else "0") != "0"

# Scripts that recognise their repetition, and refusals that are no answers: asked again, they may
# be given another. `lead` and `claim` have their own rules.
REMEMBERED = {
    *("push", "finish", "retry", "release", "bury", "extend", "cancel", "reschedule"),
    *("set_user", "set_limits", "configure"),
    *("add_schedules", "update_schedule", "remove_schedule"),
    *("fire", "resume", "set_aside", "resign", "move_user"),
}
FORGOTTEN = (b"full", b"other", b"exists", b"skewed", b"quota", b"duplicate", b"pools")
REPLAY_MS = 60_000  # what is repeated is recognised for so long, and may be for longer


class EchoingLink(Link):
    """A link that sends its scripts twice while `echo` is set, as after a lost reply.

    The caller gets the second answer, which has to be the first one. What was sent can be sent
    again later, too: `travelled_ms` is how far the clock has moved since the beginning, in all.
    """

    echo = False
    travelled_ms = 0
    last_answer: Any = None
    last_arguments: dict[str, Any]
    sent: list["Sent"]

    def _call(self, call: Call) -> Any:
        name, arguments = call.script, {**call.arguments, "rest": call.rest, "now_ms": call.now_ms}
        self.last_arguments = arguments
        self.last_answer = self._echoed(name, lambda: Link._call(self, call))
        self._keep(name, arguments, self.last_answer)
        return self.last_answer

    def _stream(self, calls: Iterable[Call]) -> Generator[Any, None, None]:
        for call in calls:
            answer = self._echoed(call.script, partial(self._stream_one, call))
            self._keep(call.script, {**call.arguments, "rest": call.rest}, answer)
            yield answer

    def _stream_one(self, call: Call) -> Any:
        return next(super()._stream([call]))

    def _keep(self, name: str, arguments: Mapping[str, Any], answer: Any) -> None:
        word = answer[0] if isinstance(answer, list) and answer else answer
        if name in REMEMBERED and word not in FORGOTTEN:
            self.sent.append(Sent(name, arguments, answer, self.travelled_ms))

    def recent(self) -> list["Sent"]:
        """What may still come again: after that long the client has given up."""
        return [s for s in self.sent if self.travelled_ms - s.travelled_ms <= REPLAY_MS / 2]

    def send_again(self, sent: "Sent") -> None:
        again = Link._call(self, Call(sent.name, **sent.arguments))
        assert _essence(sent.name, again) == _essence(sent.name, sent.answer), sent.name

    def _echoed(self, name: str, send: Callable[[], Any]) -> Any:
        first = send()
        if not self.echo:
            return first
        second = send()
        assert _essence(name, second) == _essence(name, first), f"{name}: {first} then {second}"
        return second


@dataclass(frozen=True)
class Sent:
    """A command that was answered."""

    name: str
    arguments: Mapping[str, Any]
    answer: Any
    travelled_ms: int


def _essence(name: str, answer: Any) -> Any:
    """What a caller learns from an answer, whether it is the first or a repetition."""
    if name == "push":
        # How many were new is for nobody but readers of a trace.
        return [part for part in answer if not isinstance(part, int)]
    if name == "lead":
        # A repetition renews the term that the first has begun.
        return [answer[0] == b"follower", *answer[1:]]
    if name == "sample":
        return None  # a repetition finds that it is taken, and nobody asks who took it
    return answer


class Ids:
    """Random ids that are the same in every run; the next one can be chosen."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self.forced: str | None = None

    def __call__(self) -> str:
        forced, self.forced = self.forced, None
        return forced or self._random.randbytes(12).hex()


class EchoingMachine(RuleBasedStateMachine):
    """A state machine with a real queue on an EchoingLink, a clock and ids of its own."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.cleanup = ExitStack()
        self.client = self.cleanup.enter_context(redis.Redis.from_url(url))
        self.client.flushdb()
        self.clock = ManualClock()
        self.queue = self.cleanup.enter_context(TaskQueue(self.client, clock=self.clock))
        connections = self.queue.link.connections
        self.link = EchoingLink(connections, self.queue.keys, timeout=5.0, clock=self.clock)
        self.link.sent = []
        self.queue.link = self.link
        self.ids = Ids()
        for name, module in list(sys.modules.items()):
            if name.startswith("fairqueue.") and getattr(module, "new_id", None) is new_id:
                self.cleanup.enter_context(mock.patch.object(module, "new_id", self.ids))

    def teardown(self) -> None:
        self.cleanup.close()

    @property
    def now(self) -> int:
        return self.clock.now_ms()

    def lossy(self, lost: bool, act: Callable[[], Any]) -> Any:
        """Do something of which the reply is lost, so that it is sent twice."""
        self.link.echo = lost
        try:
            return act()
        finally:
            self.link.echo = False


def run_machine(machine: type[RuleBasedStateMachine], url: str, examples: int) -> None:
    """Run a machine that is made with the address of a server; `EXAMPLES` says how often."""
    run_state_machine_as_test(
        lambda: machine(url),  # type: ignore[arg-type, call-arg]  # any maker of machines will do
        settings=settings(
            max_examples=int(EXAMPLES) if EXAMPLES else examples,
            stateful_step_count=50,
            deadline=None,
            derandomize=SAME,
            database=None,
            print_blob=not SAME,
            phases=(Phase.generate, Phase.shrink) if SHRINK else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
