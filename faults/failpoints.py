"""Kill a process before, during and after every call to Redis that the library makes.

A failpoint is a call and a phase. "before": nothing was sent; "sent": the server has applied it,
and its reply was not read; "after": the reply was read, and the caller did not get it.
`python -m faults.failpoints` visits all of them.
"""

import argparse
import ast
import gc
import json
import logging
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import redis
from redis.connection import AbstractConnection, Connection
from redis.sentinel import SentinelConnectionPool

import fairqueue
from fairqueue.link import dialer as dialing
from fairqueue.link.scripts import load_script, script_names
from fairqueue.link.urls import open_client
from fairqueue.models import new_id
from fairqueue.runtime.embedded import EmbeddedServer
from faults.aftermath import Journal, Verdict, judge
from faults.fleet import Fleet
from faults.tour import LIMITED_PASSWORD, LIMITED_USER, TOURS, Stage, Tour

PHASES = ("before", "sent", "after")
TOUR_S = 60  # a tour takes some ms; it is killed after this
# Seconds to wait for a reply before the process dies: a command that the server applies only after
# the death would be judged as if it had never been sent. BLPOP may never reply.
REPLY_S, BLOCKED_S = 50.0, 0.05
Failpoint = tuple[str, str]  # call, phase

# Commands whose second word says what they do.
_CONTAINERS = frozenset(
    {"ACL", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "MEMORY", "SCRIPT", "SENTINEL"}
)


# --- the catalogue --------------------------------------------------------------------------------

# What redis-py sends when it connects.
_HANDSHAKE = ("AUTH", "CLIENT SETINFO", "SELECT")
# Commands that the library sends only to sentinels.
_OF_SENTINELS = frozenset({"ROLE", "SENTINEL GET-MASTER-ADDR-BY-NAME"})
# Commands that only nodes of a cluster are sent: storms attack those, and no tour has one.
_OF_CLUSTERS = frozenset({"CLUSTER SLOTS", "LPUSH"})
# Commands that are not written at the call that sends them: (module, function) -> commands.
_INDIRECT: dict[tuple[str, str], tuple[str, ...]] = {
    ("aio", "_stream"): (),  # scripts
    ("store", "_texts"): ("HMGET",),
    ("connection", "_stream"): (),  # scripts
    ("connection", "ask"): (),  # what its callers name
    ("connection", "exchange"): ("EVAL",),  # what its callers name, and scripts in plain form
    ("cluster", "ask"): (),  # a node of an embedded cluster, by a method of that name
    ("group_listener", "_ask"): (),  # a connection that waits, by a method of that name
    ("listener", "wait"): (),  # the same
    ("base", "_check"): ("HGET",),
    ("places", "_ask"): ("HLEN", "HRANDFIELD"),
    ("moving", "_ask"): ("HGET",),
    # Scripts, what Ask names, and the loading and EVAL of scripts in the driver.
    ("connection", "_converse"): ("EVAL", "SCRIPT LOAD"),
    ("dialer", "_primary"): (),  # asks a sentinel, by a method of that name
    ("records", "_scan"): ("HSCAN", "ZSCAN"),
    ("groups", "_page"): ("HSCAN", "ZSCAN"),
    ("copying", "_rows"): ("HSCAN", "ZSCAN"),
    ("server", "_try_harmless"): (
        *("HGET", "HLEN", "HEXISTS", "HDEL", "HMGET", "ZCARD", "ZSCORE", "ZREM", "LLEN"),
    ),
}


class UnknownCommand(Exception):
    """The command of a call cannot be read from the source: name it in `_INDIRECT`."""


@cache
def catalogue() -> tuple[str, ...]:
    """Return all calls of the library: its scripts by name, then plain commands."""
    return (*script_names(), *sorted({*_HANDSHAKE, *sent_commands()} - _OF_CLUSTERS))


def all_failpoints() -> list[Failpoint]:
    """Return all failpoints."""
    return [(call, phase) for call in catalogue() for phase in PHASES]


def sent_commands(folder: Path | None = None) -> set[str]:
    """Return the plain commands in the source of the library.

    Raises UnknownCommand for a call whose command is not written there.
    """
    folder = folder or Path(fairqueue.__file__).parent
    found: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"\.ask\(|\bAsk\(|send_command\(", text):
            found.update(_commands_in(ast.parse(text), path.stem))
    return found


def _commands_in(tree: ast.Module, module: str) -> Iterator[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    functions.sort(key=lambda node: node.lineno)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        # The function around a call is the last one that begins before it.
        inside = [each.name for each in functions if each.lineno <= node.lineno]
        place = (module, inside[-1] if inside else "")
        if name == "send_command":
            yield from _command(node.args, place, node)
        elif name in ("ask", "Ask") and not _is_text(node.args):
            for argument in node.args:
                yield from _asked(argument, place, constants)


def _is_text(arguments: Sequence[ast.expr]) -> bool:
    """Whether the call is not to Redis: Link.ask takes sequences."""
    return isinstance(arguments[0], ast.Constant)


def _asked(
    argument: ast.expr, place: tuple[str, str], constants: dict[str, ast.expr]
) -> Iterator[str]:
    """The command in one argument of `Link.ask`: a tuple, or several from a generator."""
    if isinstance(argument, ast.Starred):
        argument = argument.value
    if isinstance(argument, ast.GeneratorExp):
        argument = argument.elt
    if isinstance(argument, ast.Name):
        argument = constants.get(argument.id, argument)
    if isinstance(argument, ast.Tuple):
        yield from _command(argument.elts, place, argument)
    else:
        yield from _indirect(place, argument)


def _command(words: Sequence[ast.expr], place: tuple[str, str], node: ast.expr) -> Iterator[str]:
    first = words[0]
    texts = [each.value for each in words[:2] if isinstance(each, ast.Constant)]
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        yield from _indirect(place, node)
    else:
        yield _name(*map(str, texts))


def _indirect(place: tuple[str, str], node: ast.expr) -> Iterator[str]:
    if place not in _INDIRECT:
        raise UnknownCommand(f"fairqueue module {place[0]!r}, {place[1]}, line {node.lineno}")
    yield from _INDIRECT[place]


def _name(first: str, second: str = "", *_: str) -> str:
    word = first.upper()
    return f"{word} {second.upper()}" if word in _CONTAINERS else word


@cache
def _scripts_by_sha() -> dict[str, str]:
    return {load_script(name).sha: name for name in script_names()}


def call_of(words: Sequence[bytes]) -> str:
    """Return the name of a command in the catalogue: its script, or itself."""
    first, second = words[0].decode(), words[1].decode(errors="replace") if len(words) > 1 else ""
    if first == "EVALSHA":
        return _scripts_by_sha().get(second, "EVALSHA")
    return _name(first, second)


# --- instrumented connections ---------------------------------------------------------------------


class Failpoints:
    """Counts the failpoints that this process passes, and ends it at one of them."""

    def __init__(self, target: Failpoint | None = None, nth: int = 1) -> None:
        self.passed: Counter[Failpoint] = Counter()
        self._target = target
        self._nth = nth
        self._lock = threading.Lock()

    @classmethod
    def record(cls) -> "Failpoints":
        """Only count how often each failpoint is passed, in `passed`."""
        return cls()

    @classmethod
    def kill_at(cls, call: str, phase: str, nth: int = 1) -> "Failpoints":
        """Kill this process when it passes a failpoint for the nth time."""
        return cls((call, phase), nth)

    def client(self, url: str, **options: Any) -> redis.Redis:
        """Return a client for `TaskQueue` whose connections pass failpoints.

        After a call for sentinels, all connections of this process do.
        """
        client = open_client(url)
        assert isinstance(client, redis.Redis)
        pool = client.connection_pool
        pool.connection_kwargs.update(options)
        if isinstance(pool, SentinelConnectionPool):
            # The library itself connects to the primary that sentinels name, with its own class.
            vars(dialing)["Connection"] = self._watched(Connection)
            pools = [each.connection_pool for each in pool.sentinel_manager.sentinels]
        else:
            pools = [pool]
        for each in pools:
            each.connection_class = self._watched(each.connection_class)
        return client

    def passes(self, call: str, phase: str) -> bool:
        """Count a pass; True if the process is to end here."""
        with self._lock:
            self.passed[call, phase] += 1
            return (call, phase) == self._target and self.passed[call, phase] == self._nth

    def _watched(self, base: type[AbstractConnection]) -> type[AbstractConnection]:
        """Return the class of connections, with all requests and replies counted."""
        return type("Watched", (_Watched, base), {"points": self})


class _Watched(AbstractConnection):
    """A mix-in for a class of connections, which reports each command to `points`."""

    points: Failpoints

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._unanswered: deque[str] = deque()
        super().__init__(*args, **kwargs)

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        commands = list(_split(command))
        for i, (call, _) in enumerate(commands):
            if self.points.passes(call, "before"):
                # Earlier commands of the same write may have been sent.
                super().send_packed_command([text for _, text in commands[:i]])  # type: ignore[no-untyped-call]
                self._end_after(len(self._unanswered) + i)
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]
        ends = False
        for call, _ in commands:
            self._unanswered.append(call)
            ends = self.points.passes(call, "sent") or ends
        if ends:
            self._end_after(len(self._unanswered))

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)
        finally:  # an error reply is a reply, too
            if self._unanswered and self.points.passes(self._unanswered.popleft(), "after"):
                die()

    def disconnect(self, *args: Any, **kwargs: Any) -> None:
        self._unanswered.clear()
        super().disconnect(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _end_after(self, replies: int) -> NoReturn:
        """End when the server has applied what was sent, shown by the number of replies."""
        blocks = "BLPOP" in self._unanswered
        cast(socket.socket, self._sock).settimeout(BLOCKED_S if blocks else REPLY_S)
        with suppress(redis.ConnectionError, redis.TimeoutError):
            for _ in range(replies):
                with suppress(redis.ResponseError):
                    super().read_response()
        die()


def die() -> NoReturn:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    while True:  # the signal is on its way
        signal.pause()


def _split(packed: str | bytes | Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Return the commands in a write, each with its bytes."""
    text = packed.encode() if isinstance(packed, str) else packed
    whole = text if isinstance(text, bytes) else b"".join(text)
    position = 0
    while position < len(whole):
        start = position
        count, position = _number(whole, position, b"*")
        words = []
        for _ in range(count):
            size, position = _number(whole, position, b"$")
            words.append(whole[position : position + size])
            position += size + 2
        yield call_of(words), whole[start:position]


def _number(text: bytes, position: int, mark: bytes) -> tuple[int, int]:
    end = text.index(b"\r\n", position)
    assert text[position : position + 1] == mark
    return int(text[position + 1 : end]), end + 2


# --- one run --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: a tour with a seed, which is killed at a failpoint, or not."""

    tour: Tour
    seed: int
    failpoint: Failpoint | None = None
    nth: int = 1

    def __str__(self) -> str:
        where = "to its end" if self.failpoint is None else "{}, {}".format(*self.failpoint)
        return f"seed {self.seed}, tour {self.tour.name!r}, {where}, pass {self.nth}"


class Director:
    """Runs tours in children of this process, which must have one thread, and judges them.

    `fleet` has the sentinels for tours that need them; without it, these are left out.
    """

    def __init__(self, url: str, fleet: Fleet | None = None) -> None:
        self._url = url
        self._fleet = fleet
        for each in [url, *([fleet.primary.url] if fleet else [])]:
            load_scripts(each)
        self._prefix = f"faults-{new_id()[:8]}"
        self._count = 0

    def play(self, run: Run) -> tuple[Verdict, Journal]:
        """Run a tour, let others recover, and return what is wrong."""
        self._count += 1
        name = f"{self._prefix}-{self._count}"
        url, direct_url = self._urls(run.tour)
        with tempfile.TemporaryFile() as file:
            status = _fork(run, name, file, url, direct_url)
            file.seek(0)
            journal = Journal.read(file.read())
        if run.tour.forgets_scripts:
            load_scripts(direct_url)
        with redis.Redis.from_url(direct_url) as client:
            verdict = judge(client, name, journal, run.tour, repeat=run.seed % 2 == 1)
        if journal.error or os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
            verdict.failed.append(f"the tour failed: {journal.error or status}")
        journal.killed = os.WIFSIGNALED(status)
        return verdict, journal

    def tours(self) -> list[Tour]:
        """The tours that can be run."""
        return [tour for tour in TOURS.values() if self._fleet or not tour.asks_sentinels]

    def _urls(self, tour: Tour) -> tuple[str, str]:
        """Return the address for a tour, and the server itself."""
        if tour.asks_sentinels and self._fleet:
            return self._fleet.sentinel_url(), self._fleet.primary.url
        return self._url, self._url


def _fork(run: Run, name: str, file: IO[bytes], url: str, direct_url: str) -> int:
    """Run a tour in a child; return its exit status."""
    pid = os.fork()
    if pid == 0:
        _be_killed(run, name, file.fileno(), url, direct_url)
    return os.waitpid(pid, 0)[1]


def _be_killed(run: Run, name: str, journal: int, url: str, direct_url: str) -> NoReturn:
    """Run a tour in the child, on instrumented connections."""
    signal.alarm(TOUR_S)
    code = 1
    try:
        if run.failpoint is None:
            points = Failpoints.record()
        else:
            points = Failpoints.kill_at(*run.failpoint, run.nth)
        stage = Stage(
            run.tour.name,
            run.seed,
            journal,
            lambda **options: points.client(url, **options),
            redis.Redis.from_url(direct_url),
        )
        try:
            stage.open(name)
            run.tour.play(stage)
            stage.note("passed", [[*point, count] for point, count in points.passed.items()])
            code = 0
        except BaseException:
            stage.note("error", traceback.format_exc())
    finally:
        os._exit(code)


# --- all of them ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FailpointSummary:
    """The results of all runs.

    failpoints: how many there are; killed: at how many of the chosen ones a process died with every
    seed; unvisited: the other chosen ones. unmade: calls of the catalogue that no tour makes;
    unknown: calls of tours that are not in the catalogue. calls: the phases of each call in which a
    process died, the runs, and the violations. The other fields count violations.
    """

    failpoints: int
    killed: int
    runs: int
    lost: int
    unexpected: int
    duplicated: int
    double_completions: int
    inconsistent: int
    violations: list[str]
    unvisited: list[str] = field(default_factory=list)
    unmade: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    calls: dict[str, tuple[list[str], int, int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not (self.violations or self.unvisited or self.unmade or self.unknown)


class _Tally:
    """Counts while the runs go on."""

    def __init__(self, chosen: list[Failpoint], seeds: int) -> None:
        self.chosen = chosen
        self.seeds = seeds
        self.visits = 0
        self._kinds: Counter[str] = Counter()
        self._violations: list[str] = []
        self._killed: Counter[Failpoint] = Counter()
        self._runs: Counter[str] = Counter()
        self._wrong: Counter[str] = Counter()
        self._made: set[str] = set()
        # Sentinels are started only if needed, since that takes a while.
        self.asks_sentinels = any(call in _OF_SENTINELS for call, _ in chosen)
        self._left_out = frozenset() if self.asks_sentinels else _OF_SENTINELS

    def add_made(self, calls: Iterable[str]) -> None:
        self._made.update(calls)

    def add(self, run: Run, verdict: Verdict) -> None:
        call = run.failpoint[0] if run.failpoint else ""
        self._runs[call] += 1
        for kind, texts in verdict.by_kind().items():
            self._kinds[kind] += len(texts)
            self._wrong[call] += len(texts)
            self._violations += [f"{kind}: {text} ({run})" for text in texts]

    def add_visit(self, point: Failpoint, killed: bool) -> None:
        self.visits += 1
        self._killed[point] += killed

    def summary(self, seconds: float) -> FailpointSummary:
        kinds = self._kinds
        unvisited = [point for point in self.chosen if self._killed[point] < self.seeds]
        return FailpointSummary(
            failpoints=len(all_failpoints()),
            killed=len(self.chosen) - len(unvisited),
            runs=self._runs.total(),
            lost=kinds["lost"],
            unexpected=kinds["unexpected"],
            duplicated=kinds["duplicated"],
            double_completions=kinds["double_completions"],
            inconsistent=kinds["inconsistent"],
            violations=self._violations,
            unvisited=[", ".join(point) for point in unvisited],
            unmade=sorted({*catalogue()} - self._made - self._left_out),
            unknown=sorted(self._made - {*catalogue()}),
            calls={
                call: (
                    [phase for phase in PHASES if self._killed[call, phase]],
                    self._runs[call],
                    self._wrong[call],
                )
                for call in dict.fromkeys(call for call, _ in self.chosen)
            },
            seconds=seconds,
        )


def run_failpoints(
    url: str,
    *,
    seeds: Iterable[int],
    only: str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> FailpointSummary:
    """Kill a process at every failpoint, once for each seed, and check what it leaves.

    `only` names calls, or parts of their names, separated by commas; `fire:sent` is one phase. Each
    run has its own queue, which is deleted. The server also loses its scripts and has another user
    meanwhile, so use one for tests. It forks, so it raises RuntimeError if other threads run.
    """
    if threading.active_count() > 1:
        raise RuntimeError(
            f"{threading.active_count()} threads run here, and a fork copies only one: call "
            "run_failpoints in a process of its own, such as python -m faults.failpoints"
        )
    chosen = [point for point in all_failpoints() if only is None or _is_meant(point, only)]
    listed = list(seeds)
    tally = _Tally(chosen, len(listed))
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(limited_user(url))
        fleet = None
        if tally.asks_sentinels:
            fleet = stack.enter_context(
                Fleet.start(replicas=0, sentinels=1, fsync="everysec", down_after=60.0)
            )
        gc.freeze()  # so that children copy fewer pages
        stack.callback(gc.unfreeze)
        for seed in listed:
            _kill_everywhere(Director(url, fleet), seed, tally, progress)
    return tally.summary(time.monotonic() - started)


def _is_meant(point: Failpoint, only: str) -> bool:
    for part in only.split(","):
        name, _, phase = part.partition(":")
        if phase in ("", point[1]) and (
            name == point[0] if name in catalogue() else name in point[0]
        ):
            return True
    return False


def _kill_everywhere(
    director: Director,
    seed: int,
    tally: "_Tally",
    progress: Callable[[int, int], object] | None,
) -> None:
    plan = Plan(director, seed, tally)
    tally.add_made(plan.made())
    for point in tally.chosen:
        tally.add_visit(point, _kill(director, plan, point, tally))
        if progress is not None:
            progress(tally.visits, len(tally.chosen) * tally.seeds)


class Plan:
    """Run all tours with one seed; return which passes which failpoint, and how often."""

    def __init__(self, director: Director, seed: int, tally: _Tally) -> None:
        self.seed = seed
        self._rng = random.Random(seed)
        self._tours: dict[Failpoint, list[tuple[Tour, int]]] = defaultdict(list)
        for tour in director.tours():
            run = Run(tour=tour, seed=seed)
            verdict, journal = director.play(run)
            tally.add(run, verdict)
            for call, phase, count in journal.passed:
                self._tours[call, phase].append((tour, count))

    def made(self) -> set[str]:
        """Return the calls that the tours make."""
        return {call for call, _ in self._tours}

    def runs(self, point: Failpoint) -> Iterator[Run]:
        """Return a run that reaches a failpoint: at a random pass of a tour, or at its first."""
        tours = self._tours.get(point)
        if not tours:
            return
        tour, count = self._rng.choice(tours)
        nth = self._rng.randint(1, count)
        yield Run(tour=tour, seed=self.seed, failpoint=point, nth=nth)
        if nth > 1:  # ids are random, and may change how often a step is repeated
            yield Run(tour=tour, seed=self.seed, failpoint=point)


def _kill(director: Director, plan: Plan, point: Failpoint, tally: _Tally) -> bool:
    for run in plan.runs(point):
        verdict, journal = director.play(run)
        tally.add(run, verdict)
        if journal.killed:
            return True
    return False


def load_scripts(url: str) -> None:
    """Load all scripts, so that a tour passes the same failpoints each time."""
    with redis.Redis.from_url(url) as client, client.pipeline(transaction=False) as pipe:
        for name in script_names():
            pipe.script_load(load_script(name).text)
        pipe.execute()


@contextmanager
def limited_user(url: str) -> Iterator[None]:
    """Create the Redis user of one of the tours, who may not read its permissions."""
    with redis.Redis.from_url(url) as client:
        rules = ("reset", "on", f">{LIMITED_PASSWORD}", "~*", "&*", "+@all", "-acl", "-info")
        client.execute_command("ACL", "SETUSER", LIMITED_USER, *rules)
        try:
            yield
        finally:
            client.execute_command("ACL", "DELUSER", LIMITED_USER)


# --- from the command line ------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.failpoints", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--only", help="calls, or parts of their names, separated by commas; such as fire:sent"
    )
    parser.add_argument("--url", help="a server to use; default: start one")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    given = parser.parse_args(arguments)
    # Each run loses leaders on purpose, which would fill the log.
    logging.getLogger("fairqueue").setLevel(logging.CRITICAL)
    seeds = range(given.first, given.first + given.seeds)
    if given.url:
        summary = run_failpoints(given.url, seeds=seeds, only=given.only, progress=_progress(given))
    else:
        with EmbeddedServer.start() as server:
            summary = run_failpoints(
                server.url, seeds=seeds, only=given.only, progress=_progress(given)
            )
    if given.json:
        print(json.dumps({name: getattr(summary, name) for name in summary.__slots__}))
    else:
        _print(summary, seeds)
    return 0 if summary.is_clean else 1


def _progress(given: argparse.Namespace) -> Callable[[int, int], object] | None:
    if given.json or not sys.stderr.isatty():
        return None
    return lambda done, of: print(f"\r{done} of {of}", end="", file=sys.stderr, flush=True)


def _print(summary: FailpointSummary, seeds: range) -> None:
    print(f"seeds {seeds.start} to {seeds.stop - 1}")
    width = max(map(len, summary.calls), default=0)
    print(f"{'call':<{width}}  {'killed':<17}  {'runs':>5} {'violations':>10}")
    for call, (phases, runs, wrong) in summary.calls.items():
        print(f"{call:<{width}}  {' '.join(phases):<17}  {runs:>5} {wrong:>10}")
    for text in summary.violations:
        print(text)
    for what, texts in (
        ("no process died there", summary.unvisited),
        ("no tour makes this call", summary.unmade),
        ("the catalogue does not have this call", summary.unknown),
    ):
        for text in texts:
            print(f"{what}: {text}")
    print(
        f"{summary.killed} failpoints of {summary.failpoints}, {summary.runs} runs in "
        f"{summary.seconds:.0f} s: {summary.lost} lost, {summary.unexpected} unexpected, "
        f"{summary.duplicated} duplicated, {summary.double_completions} completed twice, "
        f"{summary.inconsistent} inconsistent"
    )


if __name__ == "__main__":
    sys.exit(main())
