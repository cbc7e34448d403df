"""Find actors that acted without the right to, which the guards must prevent.

A stale leader or a worker without its lease is refused. Usually the data would not show it if it
were not, because another guard follows each guard. So the actors note what they sent and when, and
the answers; two journals together show who acted without the right to.

    led    a scheduler learned that it leads: epoch, server time, end of the term
    acted  a leader's act was accepted: when it was sent, and when the term ended at the latest
    held   a worker got tasks: when it learned that, ids and attempts, when it had asked
    kept   an act upon leases was accepted: when it was sent, ids and attempts
"""

import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairqueue.link.connection import Link
from fairqueue.link.operation import Call, Together
from fairqueue.link.scripts import load_script
from fairqueue.queue.claim import CLAIM_HEAD
from faults.journal import Journal, read_journals

# Scripts that need the token of a term, and those that need the token of a lease.
OF_LEADERS = ("fire", "resume", "set_aside", "resign")
OF_WORKERS = ("finish", "retry", "bury", "release", "extend")
REFUSALS = (b"stale", b"lost_lease", b"ended")


def now_ms() -> int:
    """Return the time, which is that of a server on this machine too."""
    return time.time_ns() // 1_000_000


class Witness(Link):
    """A link that notes accepted acts, and can stop its actor right before one."""

    journal: Journal
    stop_before: dict[str, threading.Event]
    _sent: dict[str, int]
    _ends_ms: int
    _attempts: dict[tuple[str, str], int]

    @classmethod
    def watch(cls, link: Link, journal: Journal) -> "Witness":
        """Wrap an existing link. `stop_before` names scripts: each stops the actor once."""
        link.__class__ = cls
        assert isinstance(link, cls)
        link.journal = journal
        link.stop_before = {name: threading.Event() for name in OF_LEADERS}
        link._sent, link._ends_ms, link._attempts = {}, 0, {}
        return link

    def _call(self, call: Call) -> Any:
        sent_ms = now_ms()
        answer = super()._call(call)
        self._saw_call(call, answer, sent_ms)
        return answer

    def _stream(self, calls: Iterable[Call]) -> Generator[Any, None, None]:
        sent: deque[tuple[Call, int]] = deque()

        def watched() -> Iterator[Call]:
            for call in calls:
                sent.append((call, now_ms()))
                yield call

        for answer in super()._stream(watched()):
            self._saw_call(sent[0][0], answer, sent[0][1])
            sent.popleft()
            yield answer

    def _together(self, request: Together) -> list[Any]:
        sent_ms = now_ms()
        answers = super()._together(request)
        for call, answer in zip(request.calls, answers, strict=True):
            self._saw_call(call, answer, sent_ms)
        return answers

    def command_of(self, call: Call) -> Any:
        made = super().command_of(call)
        name = call.script
        if name in OF_LEADERS:
            if name == "resign":
                self.journal.note("resigning")
            if self.stop_before[name].is_set():
                self.stop_before[name].clear()
                # To this thread: one to the process might stop it only after the command is sent.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            # The time of the first attempt, which decided whether the act was accepted.
            self._sent.setdefault(call.arguments["op"], now_ms())
        return made

    def _saw_call(self, call: Call, answer: Any, sent_ms: int) -> None:
        self._saw(call.script, {**call.arguments, "rest": call.rest}, answer, sent_ms)

    def _saw(self, name: str, arguments: Mapping[str, Any], answer: Any, sent_ms: int) -> None:
        if name == "lead" and answer[0] != b"follower":
            self._ends_ms = int(answer[4])
            self.journal.note("led", int(answer[1]), int(answer[2]), self._ends_ms)
        elif name in OF_LEADERS:
            self._saw_act(name, arguments, answer)
        elif name == "claim" and len(answer) > CLAIM_HEAD:
            tasks = [(answer[i].decode(), answer[i + 2]) for i in range(CLAIM_HEAD, len(answer), 4)]
            for task_id, attempt in tasks:
                self._attempts[arguments["op"], task_id] = attempt
            self.journal.note("held", now_ms(), tasks, sent_ms)
        elif name in OF_WORKERS:
            self._saw_end(name, arguments, answer, sent_ms)

    def _saw_act(self, name: str, arguments: Mapping[str, Any], answer: Any) -> None:
        sent_ms = self._sent.pop(arguments["op"], None)
        word = answer[0] if isinstance(answer, list) else answer
        if sent_ms is None or word in REFUSALS:
            return
        self.journal.note("acted", name, sent_ms, self._ends_ms)
        if name == "fire":
            self._ends_ms = now_ms() + int(arguments["term_ms"])

    def _saw_end(self, name: str, arguments: Mapping[str, Any], answer: Any, sent_ms: int) -> None:
        if name in ("finish", "extend"):
            rest, width = arguments["rest"], len(load_script(name).fields)
            leases = [(rest[i + 1], rest[i]) for i in range(0, len(rest), width)]
            words = list(answer)
        else:
            leases, words = [(arguments["token"], arguments["id"])], [answer]
        known = self._attempts.get if name == "extend" else self._attempts.pop
        tasks = []
        for lease, word in zip(leases, words, strict=True):
            attempt = known(lease, None)
            if attempt is not None and word not in REFUSALS:
                tasks.append((lease[1], attempt))
        if tasks:
            self.journal.note("kept", name, sent_ms, tasks)


@dataclass(kw_only=True)
class Term:
    """One term in the journals: its leaders, its start, and its end."""

    leaders: set[str] = field(default_factory=set)
    begins_ms: int
    ends_ms: int


@dataclass
class Testimony:
    """All evidence together; `faults.checker.Told` calls a method for each line."""

    terms: dict[int, Term] = field(default_factory=dict)
    resigning: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    again: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    wrong: set[str] = field(default_factory=set)

    def _led(self, actor: str, epoch: int, at_ms: int, ends_ms: int) -> None:
        term = self.terms.setdefault(epoch, Term(begins_ms=at_ms, ends_ms=ends_ms))
        term.leaders.add(actor)
        term.begins_ms = min(term.begins_ms, at_ms)
        term.ends_ms = max(term.ends_ms, ends_ms)

    def _resigning(self, actor: str) -> None:
        self.resigning.add(actor)

    def _acted(self, actor: str, name: str, sent_ms: int, ends_ms: int) -> None:
        if sent_ms > ends_ms:
            self.late.add(f"{name} by {actor}, {sent_ms - ends_ms} ms")

    def _held(self, actor: str, at_ms: int, tasks: list[tuple[str, int]], sent_ms: int = 0) -> None:
        for task_id, attempt in tasks:
            if attempt > 1:
                self.again[task_id].append((at_ms, attempt))

    def _kept(self, actor: str, name: str, sent_ms: int, tasks: list[tuple[str, int]]) -> None:
        """Keep an act for `without_lease`: most are about tasks that only one worker ever had."""

    def _wrong(self, actor: str, what: str) -> None:
        self.wrong.add(f"{actor} was told that {what}")

    def two_leaders(self) -> set[str]:
        """Return terms that began before the previous one had ended, or that had two leaders."""
        found = {
            f"term {epoch} of {' and '.join(sorted(term.leaders))}"
            for epoch, term in self.terms.items()
            if len(term.leaders) > 1
        }
        for epoch, term in self.terms.items():
            before = self.terms.get(epoch - 1)
            if before and term.begins_ms < before.ends_ms and not before.leaders & self.resigning:
                found.add(f"term {epoch} began before the end of {epoch - 1}")
        return found

    def without_lease(self, folder: Path) -> set[str]:
        """Return acts upon a task that were accepted although another worker had got it before.

        Each claim increments the attempt. A release decrements it, and the next claim increments it
        again: so a lower attempt is an earlier claim.
        """
        if not self.again:
            return set()
        return {
            f"{fields[0]} of {task_id}"
            for _, (kind, *fields) in read_journals(folder)
            if kind == "kept"
            for task_id, attempt in fields[2]
            if any(
                at_ms < fields[1] and later > attempt
                for at_ms, later in self.again.get(task_id, ())
            )
        }
