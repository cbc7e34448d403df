"""Run all of FairQueue as one program: server, scheduler, workers and dashboard.

    this process  -->  dashboard, schedulers, workers: each a group of processes that are replaced
                  -->  the embedded server, if no Redis is named

The groups are those of `runtime/processes.py`, so that nothing outlives this process, however it
ends. Here is only what holds them together: in which order they start and end, and what is said.
"""

import errno
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import Any, Self, TextIO

from prometheus_client import REGISTRY, CollectorRegistry

from fairqueue.access.credentials import LOGIN_S, AccessStore, Actor
from fairqueue.alerts import Alerts
from fairqueue.demo.demo import STEP_S, Load, Reader, Terminal, contrast, fill, line, register
from fairqueue.errors import ConfigurationError, FairQueueError, plural
from fairqueue.link.keys import Keys
from fairqueue.link.urls import shown
from fairqueue.metrics.collectors import MetricsServer
from fairqueue.metrics.processes import Tally
from fairqueue.models import QueueSnapshot
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.processes import ProcessGroup
from fairqueue.scheduler.scheduler import STOPPED, TaskScheduler
from fairqueue.validation import check_count, check_seconds
from fairqueue.web import WebServer, create_app
from fairqueue.worker.worker import Worker

OK, INTERRUPTED = 0, 130
CHECK_S = 2.0  # so long the first question to Redis waits: a wrong address is told soon
MORE_PORTS = 20  # that a demo tries when its own is taken
LAST_PORT = 65_535
LOOK_S = 0.5  # so often a process looks whether its threads live, or somebody has drained it
START_S = 30.0  # so long the dashboard gets until it answers
# What each gets to end by itself, seconds; after that it is killed. The tasks of a worker get
# DRAIN_S, and what is not done by then is given back in the rest; last alerts get LAST_ALERTS_S.
GRACE_S, DRAIN_S, WORKER_GRACE_S, LAST_ALERTS_S = 10.0, 30.0, 35.0, 2.0
EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - addresses that cannot be opened in a browser

# Makes the worker of an app, given the queue and the settings `concurrency` and, if there are any,
# `alerts`.
MakeWorker = Callable[[TaskQueue, Mapping[str, Any]], Worker]


def run(
    url: str | None = None,
    embedded_path: str | os.PathLike[str] | None = None,
    queue: str = "default",
    host: str = "127.0.0.1",
    port: int = 8844,
    workers: int = 1,
    concurrency: int = 8,
    app: MakeWorker | None = None,
    demo: bool = False,
    seconds: float | None = None,
    schedulers: int = 1,
    open_browser: bool = False,
    alerts: Alerts | None = None,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
) -> int:
    """Run everything until SIGINT or SIGTERM, or for so many seconds; the exit code.

    url: of a Redis; without it a server is started, whose data is kept in `embedded_path` if that
    is given. app: what makes the worker; without one, and without `demo`, no tasks are run.
    workers: how many processes run tasks, `concurrency` at a time each. port: 0 takes a free one;
    that of a demo may be a later one, if it is taken.
    demo: fill the queue, which must be empty or that of an earlier demo, and keep it busy; at a
    `url` it is emptied in the end. alerts: whom schedulers and workers tell what goes wrong;
    without them, those of the app's worker. metrics_port: answer scrapes there, with the metrics
    of the queue and of all processes, added up; 0 takes a free one.

    A part that dies is started again. The first signal ends the dashboard, the schedulers, the
    workers when their tasks are done, then the server; the second ends all at once (130).
    For the main thread of a program of its own: it handles signals, and forks.

    Raises ConfigurationError, RedisUnavailable or EmbeddedServerError when it cannot start; then
    nothing is left running.
    """
    if url is not None and embedded_path is not None:
        raise ConfigurationError(
            f"url {shown(url)!r} and embedded_path {str(embedded_path)!r} are both given: pass "
            "one of them"
        )
    Keys(queue)
    check_count(workers, "workers", ConfigurationError, most=1000)
    check_count(schedulers, "schedulers", ConfigurationError, most=100)
    if seconds is not None:
        check_seconds(seconds, "seconds", ConfigurationError)
    out: TextIO = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None where it is closed
    with (
        Signals() as signals,
        _logging_for(demo),
        _open(url, embedded_path, queue) as opened,
        closing(_dashboard(opened, host, port, MORE_PORTS if demo else 0)) as web,
        _metrics(metrics_host, metrics_port) as metrics,
        ExitStack() as afterwards,
    ):
        worker = _worker(opened, app, demo, concurrency, alerts)
        told = alerts or (Alerts() if worker is None else worker.alerts)
        if demo:
            fill(opened)
            if url is not None:
                afterwards.callback(opened.destroy)
        tree = Tree(opened, adding_up=metrics_port is not None)
        # Not before nobody serves it any more, and not later: who comes then must not wait.
        tree.add("dashboard", lambda stop: _serve(web, stop), at_end=web.close)
        tree.add("scheduler", lambda stop: _schedule(opened, told, stop), schedulers)
        if worker is not None:
            tree.add(
                "worker",
                lambda stop: _work(worker, stop),
                workers,
                WORKER_GRACE_S,
                registry=worker.registry,
            )
        signals.second = tree.kill
        with tree:
            if metrics is not None:
                # Not before all are forked: no thread of ours may hold a lock then.
                metrics.start(REGISTRY, *_registries_of(worker), queue=opened)
            program = Program(tree, opened, signals, out, seconds)
            try:
                program.welcome(web, url, port, open_browser, metrics)
                program.go(Load(opened) if demo else None)
            except BrokenPipeError:
                # Nobody reads any more. Python would complain when it flushes stdout at the end.
                os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
            ran = program.seconds
            tree.stop()
            program.farewell(ran)
    return INTERRUPTED if len(signals.seen) > 1 else OK


# --- the parts ------------------------------------------------------------------------------------


@contextmanager
def _open(url: str | None, path: str | os.PathLike[str] | None, name: str) -> Iterator[TaskQueue]:
    """The queue, at a Redis that answers."""
    opened = TaskQueue.embedded(path, name) if url is None else TaskQueue.from_url(url, name)
    with opened:
        opened.check(timeout=CHECK_S)
        yield opened


class Dashboard(WebServer):
    """The dashboard, served by one process after the other, all at the port that is taken here."""

    def close(self) -> None:
        """Let go of the port, where it was taken."""
        # Processes that were forked since then have it too: with a mere close, who comes now would
        # wait for an answer. It cannot be done where nobody listens yet, nor on every system.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _dashboard(queue: TaskQueue, host: str, port: int, more: int = 0) -> Dashboard:
    """The dashboard at a port; if that is taken, at one of so many after it."""
    try:
        return Dashboard(create_app(queue), host, port)
    except ConfigurationError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        if more and 0 < port < LAST_PORT and error.__cause__.errno == errno.EADDRINUSE:
            return _dashboard(queue, host, port + 1, more - 1)
        raise ConfigurationError(
            f"the dashboard cannot have port {port} of {host} ({error.__cause__.strerror}): end "
            "what has it, or choose another port; 0 takes a free one"
        ) from error


def _worker(
    queue: TaskQueue,
    app: MakeWorker | None,
    demo: bool,
    concurrency: int,
    alerts: Alerts | None,
) -> Worker | None:
    if app is not None:
        given = {} if alerts is None else {"alerts": alerts}
        return app(queue, {"concurrency": concurrency, **given})
    if not demo:
        return None
    worker = Worker(queue, concurrency=concurrency, alerts=alerts)
    register(worker)
    return worker


def _metrics(host: str, port: int | None) -> AbstractContextManager[MetricsServer | None]:
    """The port for scrapes, if there is to be one: taken, but nobody answers yet."""
    return nullcontext() if port is None else MetricsServer(port, host)


def _registries_of(worker: Worker | None) -> list[CollectorRegistry]:
    return [] if worker is None else [worker.registry]


def _serve(web: WebServer, stop: threading.Event) -> None:
    with web:
        while web.is_alive() and not stop.wait(LOOK_S):
            pass
    if not stop.is_set():
        raise FairQueueError("the thread of the dashboard has ended")


def _schedule(queue: TaskQueue, alerts: Alerts, stop: threading.Event) -> None:
    scheduler = TaskScheduler(queue, alerts=alerts)
    scheduler.start()
    while scheduler.state != STOPPED and not stop.wait(LOOK_S):
        pass
    scheduler.stop(GRACE_S - LAST_ALERTS_S)
    alerts.close(LAST_ALERTS_S)
    if not stop.is_set():
        raise FairQueueError("the thread of the scheduler has ended")


def _work(worker: Worker, stop: threading.Event) -> None:
    worker.start()
    # One that somebody has drained ends, and its process is replaced: without any, all would wait.
    while worker.state in ("running", "draining") and not stop.wait(LOOK_S):
        pass
    has_failed = worker.state == "failed"
    worker.stop(DRAIN_S)
    worker.alerts.close(LAST_ALERTS_S)
    if has_failed:
        raise FairQueueError("the worker has failed")


class Tree:
    """The groups of processes, from their start to their end."""

    def __init__(self, queue: TaskQueue, *, adding_up: bool = False) -> None:
        self._queue = queue
        self._adding_up = adding_up
        self._groups: dict[str, ProcessGroup] = {}
        self._ends: dict[str, tuple[float, Callable[[], None]]] = {}
        self._told: dict[str, int] = {}
        self._stopped = False

    def add(
        self,
        name: str,
        serve: Callable[[threading.Event], None],
        count: int = 1,
        grace: float = GRACE_S,
        at_end: Callable[[], None] = lambda: None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """So many processes that serve until the event is set; 0 are none.

        `grace`: seconds they get at `stop`, after which `at_end` is called. If this process is
        killed they get GRACE_S: a server of our own is gone then, and nothing that they do would be
        recorded. `registry`: where their metrics are, which are added up if that is wanted.
        """
        if count:
            tally = Tally(count, registry) if self._adding_up else None

            def be(stop: threading.Event, index: int) -> None:
                with nullcontext() if tally is None else tally.reporting(index):
                    serve(stop)

            self._groups[name] = ProcessGroup(be, count, name=name, grace=GRACE_S)
            self._ends[name] = grace, at_end
            self._told[name] = 0

    def __enter__(self) -> Self:
        try:
            for group in self._groups.values():
                group.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._stopped:
            self.kill()

    def stop(self) -> None:
        """End all in the order in which they were added, each when the one before it is gone."""
        for name, group in self._groups.items():
            grace, at_end = self._ends[name]
            group.stop(grace)
            at_end()
        self._stopped = True

    def kill(self) -> None:
        """End all at once; also from the handler of a signal, while `stop` waits."""
        for group in self._groups.values():
            group.stop(0)

    def look(self) -> list[str]:
        """What has happened since the last look; start again what nobody watches any more."""
        news = []
        for name, group in self._groups.items():
            if group.restarts > self._told[name]:
                times = plural(group.restarts, "time")
                news.append(f"A {name} ended and was started again; so far {times}.")
            if not group.is_alive():
                group.start()
                news.append(f"The processes of the {name} were gone and are started again.")
            self._told[name] = group.restarts
        server = self._queue.server
        if server is not None and not _exists(server.pid):
            server.restart()
            kept = "" if server.path is not None else "; its data is gone"
            news.append(f"The embedded server was gone and is started again{kept}.")
        return news


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- the program ----------------------------------------------------------------------------------


class Signals:
    """SIGINT and SIGTERM: the first ends a wait, the second calls `second`."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.second: Callable[[], None] = lambda: None
        self._awake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._owner = os.getpid()

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._awake)
        os.close(self._waker)

    def _handle(self, number: int, frame: object) -> None:
        if os.getpid() != self._owner:
            return  # a copy that was forked just now, before it has handlers of its own
        self.seen.append(number)
        with suppress(BlockingIOError):
            os.write(self._waker, b"\0")
        if len(self.seen) > 1:
            self.second()

    def wait(self, seconds: float) -> bool:
        """Wait for so long, or until a signal has come; whether one has."""
        select.select([self._awake], [], [], max(0.0, seconds))
        return bool(self.seen)


class Program:
    """What is said while the processes run."""

    def __init__(
        self, tree: Tree, queue: TaskQueue, signals: Signals, out: TextIO, seconds: float | None
    ) -> None:
        self._tree = tree
        self._queue = queue
        self._signals = signals
        self._out = out
        self._seconds = seconds
        self._began = time.monotonic()
        self._first = queue.inspect()
        self._last_words = ""

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """Write a line. Raises BrokenPipeError."""
        self._out.write(text + "\n")
        self._out.flush()

    def welcome(
        self,
        web: WebServer,
        url: str | None,
        port: int,
        open_browser: bool,
        metrics: MetricsServer | None,
    ) -> None:
        """Say where everything is, once the dashboard answers. `port`: what was asked for."""
        host = "127.0.0.1" if web.host in EVERYWHERE else web.host
        base = web.url.replace(web.host, host, 1) if web.host else web.url
        deadline = time.monotonic() + START_S
        while not _answers(host, web.port) and time.monotonic() < deadline:
            if self._signals.wait(0.05):
                return
        secret = AccessStore(self._queue.link).create_login(Actor(name="local", via="web"))
        link = f"{base}/login?token={secret}"
        server = self._queue.server
        redis = server.url if server is not None else shown(url or "")
        if port not in (0, web.port):
            self.say(f"Port {port} is in use, so the dashboard has port {web.port}.")
        self.say(f"Dashboard  {base}")
        self.say(f"Log in     {link}  (once, within {LOGIN_S / 60:.0f} minutes)")
        self.say(f"Redis      {redis}")
        self.say(f"Queue      {self._queue.name}")
        if metrics is not None:
            self.say(f"Metrics    {metrics.url}")
        if open_browser:
            webbrowser.open(link)

    def go(self, load: Load | None) -> None:
        """Look after the processes until the end. Raises BrokenPipeError."""
        if load is None:
            while not self._is_over():
                for news in self._tree.look():
                    self.say(news)
            return
        live = self._out.isatty() and os.environ.get("TERM") != "dumb"
        with Terminal(self._out) if live else nullcontext() as terminal:
            self._go(load, terminal)

    def _go(self, load: Load, terminal: Terminal | None) -> None:
        """Keep the demo busy, and show what comes of it."""
        reader = Reader(self._queue)
        while not self._is_over():
            notes = self._tree.look()
            try:
                load.push()
                shot = reader.read(notes)
            except FairQueueError as error:
                self.say(f"{error}; trying again")
                continue
            self._last_words = contrast(shot)
            if terminal is not None:
                terminal.show(shot)
            else:
                self.say("\n".join([*notes, line(shot)]))

    def _is_over(self) -> bool:
        """Wait for one step, or until the end if that is sooner; whether it has come."""
        left = STEP_S
        if self._seconds is not None:
            left = min(left, self._seconds - self.seconds)
        return self._signals.wait(left) or left <= 0

    def farewell(self, seconds: float) -> None:
        """Say what there was in so many seconds."""
        with suppress(FairQueueError, BrokenPipeError):
            last = self._queue.inspect()
            self.say(
                f"Ran {seconds:.0f} s: "
                f"{plural(_grown(self._first, last, 'fired'), 'schedule')} fired, "
                f"{plural(_grown(self._first, last, 'finished'), 'task')} done, "
                f"{_grown(self._first, last, 'buried')} failed, {last.ready:,} still waiting."
            )
            if self._last_words:
                self.say(self._last_words)


def _grown(first: QueueSnapshot, last: QueueSnapshot, counter: str) -> int:
    return last.counters.get(counter, 0) - first.counters.get(counter, 0)


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False


@contextmanager
def _logging_for(demo: bool) -> Iterator[None]:
    """The demo fails on purpose, many times a minute: nobody wants to read that in a log."""
    before = logging.root.manager.disable
    if demo:
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
