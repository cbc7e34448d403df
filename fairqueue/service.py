"""Run all of FairQueue as one program: server, schedulers, workers and dashboard.

    this process  -->  dashboard, schedulers, workers: each a group of processes that are replaced
                  -->  the embedded server, if no Redis is given

The groups are those of `runtime/processes.py`, so that nothing outlives this process, however it
ends. This module starts and stops them in order, and prints what happens.
"""

import errno
import logging
import os
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
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TextIO

from prometheus_client import REGISTRY, CollectorRegistry

from fairqueue.access.credentials import LOGIN_S, AccessStore, Actor
from fairqueue.alerts import Alerts
from fairqueue.demo.demo import (
    STEP_S,
    Load,
    Reader,
    Terminal,
    contrast,
    fill,
    grown,
    line,
    register,
)
from fairqueue.demo.jobs import POOLS
from fairqueue.errors import ConfigurationError, FairQueueError, plural
from fairqueue.link.keys import Keys
from fairqueue.link.urls import shown
from fairqueue.metrics.collectors import MetricsServer
from fairqueue.metrics.processes import Tally
from fairqueue.models import QueueSnapshot
from fairqueue.queue.opening import open_embedded, open_queue
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.processes import ProcessGroup, process_exists
from fairqueue.runtime.signals import StopSignals
from fairqueue.scheduler.scheduler import STOPPED, TaskScheduler
from fairqueue.validation import check_count, check_seconds
from fairqueue.web import WebServer, create_app
from fairqueue.worker.worker import Worker

OK, INTERRUPTED = 0, 130
CHECK_S = 2.0  # time-out of the first request to Redis, so that a wrong address fails soon
MORE_PORTS = 20  # that a demo tries if its own is taken
LAST_PORT = 65_535
CHECK_INTERVAL_S = 0.5  # how often a process checks its threads
START_S = 30.0  # how long the dashboard may take to answer
# Seconds until a process that was asked to end is killed. The tasks of a worker have DRAIN_S; in
# the rest of the time unfinished ones are released. Last alerts have LAST_ALERTS_S.
GRACE_S, DRAIN_S, WORKER_GRACE_S, LAST_ALERTS_S = 10.0, 30.0, 35.0, 2.0
EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - addresses that a browser cannot open

# Creates the worker of an app, from the queue and the settings `concurrency` and maybe `alerts`.
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
    partitions: int | None = None,
) -> int:
    """Run everything until SIGINT or SIGTERM, or for `seconds`; return the exit code.

    url: of a Redis; without it a server is started, which keeps its data in `embedded_path` if that
    is given. app: creates the worker; without it and without `demo`, no tasks are run. workers: how
    many processes run tasks, `concurrency` at a time each. port: 0 takes a free one; a demo takes a
    later one if it is in use. demo: fill the queue, which must be empty or that of an earlier demo,
    and keep it busy; at a `url` it is emptied in the end. alerts: for schedulers and workers; by
    default those of the app's worker. metrics_port: serve the metrics of the queue and of all
    processes there, added up; 0 takes a free one. partitions: of a new queue; without it, the queue
    is opened with as many as it has.

    A part that dies is restarted. The first signal ends the dashboard, the schedulers, the workers
    when their tasks are done, then the server; the second ends all at once (130). It handles
    signals and forks, so it must be called in the main thread of its own program.
    Raises ConfigurationError, RedisUnavailable or EmbeddedServerError if it cannot start; nothing
    is left running then.
    """
    _check_arguments(url, embedded_path, queue, workers, schedulers, seconds)
    with (
        StopSignals() as signals,
        _logging_for(demo),
        _open(url, embedded_path, queue, partitions) as opened,
        closing(_dashboard(opened, host, port, MORE_PORTS if demo else 0)) as web,
        _metrics(metrics_host, metrics_port) as metrics,
        ExitStack() as afterwards,
    ):
        worker = _worker(opened, app, demo, concurrency, alerts)
        if demo:
            fill(opened)
            if url is not None:
                afterwards.callback(opened.destroy)
        tree = _processes(opened, web, worker, alerts, schedulers, workers, metrics)
        signals.on_second = tree.kill
        with tree:
            console = Console(tree, opened, signals, web, metrics, url, port, seconds)
            console.run(demo=demo, open_browser=open_browser)
    return INTERRUPTED if len(signals.seen) > 1 else OK


# --- the parts ------------------------------------------------------------------------------------


def _check_arguments(
    url: str | None,
    embedded_path: str | os.PathLike[str] | None,
    queue: str,
    workers: int,
    schedulers: int,
    seconds: float | None,
) -> None:
    if url is not None and embedded_path is not None:
        raise ConfigurationError(
            f"url {shown(url)!r} and embedded_path {str(embedded_path)!r} exclude each other: pass "
            "one of them"
        )
    Keys(queue)
    check_count(workers, "workers", ConfigurationError, most=1000)
    check_count(schedulers, "schedulers", ConfigurationError, most=100)
    if seconds is not None:
        check_seconds(seconds, "seconds", ConfigurationError)


@contextmanager
def _open(
    url: str | None, path: str | os.PathLike[str] | None, name: str, partitions: int | None
) -> Iterator[TaskQueue]:
    """Open the queue, and check that Redis answers."""
    if url is None:
        opened = open_embedded(path, name, partitions=partitions)
    else:
        opened = open_queue(url, name, partitions=partitions, timeout=CHECK_S)
    with opened:
        opened.check(timeout=CHECK_S)
        yield opened


class Dashboard(WebServer):
    """The dashboard, served by one process after the other at the same port."""

    def close(self) -> None:
        """Close the port in this process."""
        # Forked processes have the socket too, so that after a mere close a new connection would
        # wait for an answer. Not possible before listen(), nor on every system.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _dashboard(queue: TaskQueue, host: str, port: int, more: int = 0) -> Dashboard:
    """Return the dashboard at a port, or at one of `more` later ones if that is taken."""
    try:
        return Dashboard(create_app(queue), host, port)
    except ConfigurationError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        if more and 0 < port < LAST_PORT and error.__cause__.errno == errno.EADDRINUSE:
            return _dashboard(queue, host, port + 1, more - 1)
        raise ConfigurationError(
            f"the dashboard cannot use port {port} of {host} ({error.__cause__.strerror}): stop "
            "the program that uses it, or choose another port; 0 takes a free one"
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
    worker = Worker(queue, concurrency=concurrency, alerts=alerts, pools=POOLS)
    register(worker)
    return worker


def _metrics(host: str, port: int | None) -> AbstractContextManager[MetricsServer | None]:
    """Take the port for scrapes, if there is to be one; nothing answers there yet."""
    return nullcontext() if port is None else MetricsServer(port, host)


def _processes(
    queue: TaskQueue,
    web: "Dashboard",
    worker: Worker | None,
    alerts: Alerts | None,
    schedulers: int,
    workers: int,
    metrics: MetricsServer | None,
) -> "ProcessTree":
    if alerts is None:
        alerts = Alerts() if worker is None else worker.alerts
    registry = REGISTRY if worker is None else worker.registry

    def serve_metrics() -> None:
        if metrics is not None:
            metrics.start(*dict.fromkeys((REGISTRY, registry)), queue=queue)

    tree = ProcessTree(queue, serve_metrics, adding_up=metrics is not None)
    # The port is closed when its last process is gone, and not later: a connection must not wait.
    tree.add("dashboard", lambda stop: _serve(web, stop), at_end=web.close)
    tree.add("scheduler", lambda stop: _schedule(queue, alerts, stop), schedulers)
    if worker is not None:
        work = partial(_work, worker)
        tree.add("worker", work, workers, WORKER_GRACE_S, registry=registry)
    return tree


def _serve(web: WebServer, stop: threading.Event) -> None:
    with web:
        while web.is_alive() and not stop.wait(CHECK_INTERVAL_S):
            pass
    if not stop.is_set():
        raise FairQueueError("the thread of the dashboard has ended")


def _schedule(queue: TaskQueue, alerts: Alerts, stop: threading.Event) -> None:
    scheduler = TaskScheduler(queue, alerts=alerts)
    scheduler.start()
    while scheduler.state != STOPPED and not stop.wait(CHECK_INTERVAL_S):
        pass
    scheduler.stop(GRACE_S - LAST_ALERTS_S)
    alerts.close(LAST_ALERTS_S)
    if not stop.is_set():
        raise FairQueueError("the thread of the scheduler has ended")


def _work(worker: Worker, stop: threading.Event) -> None:
    worker.start()
    # A drained worker ends, and its process is replaced: otherwise no tasks would run.
    while worker.state in ("running", "draining") and not stop.wait(CHECK_INTERVAL_S):
        pass
    has_failed = worker.state == "failed"
    worker.stop(DRAIN_S)
    worker.alerts.close(LAST_ALERTS_S)
    if has_failed:
        raise FairQueueError("the worker has failed")


class ProcessTree:
    """The groups of processes, from their start to their end.

    `forked` is called when all processes are forked.
    """

    def __init__(
        self, queue: TaskQueue, forked: Callable[[], None], *, adding_up: bool = False
    ) -> None:
        self._queue = queue
        self._forked = forked
        self._adding_up = adding_up
        self._groups: dict[str, ProcessGroup] = {}
        self._ends: dict[str, tuple[float, Callable[[], None]]] = {}
        self._restarts: dict[str, int] = {}
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
        """Add `count` processes that run `serve` until its event is set.

        `grace`: seconds they have to end at `stop`; then `at_end` is called. If this process is
        killed they have GRACE_S: an embedded server is gone then, and nothing could be recorded.
        `registry`: holds their metrics, which are added up if `adding_up`.
        """
        if count:
            tally = Tally(count, registry) if self._adding_up else None

            def be(stop: threading.Event, index: int) -> None:
                with nullcontext() if tally is None else tally.reporting(index):
                    serve(stop)

            self._groups[name] = ProcessGroup(be, count, name=name, grace=GRACE_S)
            self._ends[name] = grace, at_end
            self._restarts[name] = 0

    def __enter__(self) -> Self:
        try:
            for group in self._groups.values():
                group.start()
            # Not before: no thread of this process may hold a lock during a fork.
            self._forked()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._stopped:
            self.kill()

    def stop(self) -> None:
        """End the groups in the order in which they were added, one after the other."""
        for name, group in self._groups.items():
            grace, at_end = self._ends[name]
            group.stop(grace)
            at_end()
        self._stopped = True

    def kill(self) -> None:
        """Kill all processes. May be called by a signal handler while `stop` waits."""
        for group in self._groups.values():
            group.stop(0)

    def check(self) -> list[str]:
        """Restart groups and servers that died; return what happened since the last call."""
        news = []
        for name, group in self._groups.items():
            if group.restarts > self._restarts[name]:
                times = plural(group.restarts, "time")
                news.append(f"A {name} ended and was restarted; so far {times}.")
            if not group.is_alive():
                group.start()
                news.append(f"The processes of the {name} were gone and were restarted.")
            self._restarts[name] = group.restarts
        server = self._queue.server
        if server is not None and not process_exists(server.pid):
            server.restart()
            kept = "" if server.path is not None else "; its data is lost"
            news.append(f"The embedded server was gone and was restarted{kept}.")
        return news


# --- the console ----------------------------------------------------------------------------------


@dataclass
class Console:
    """Prints what happens while the processes run. `port`: the one that was asked for."""

    tree: ProcessTree
    queue: TaskQueue
    signals: StopSignals
    web: WebServer
    metrics: MetricsServer | None
    url: str | None
    port: int
    seconds: float | None

    def run(self, *, demo: bool, open_browser: bool) -> None:
        """Print where everything is, run until the end, stop the processes, print a summary."""
        self._out: TextIO = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None if closed
        self._began = time.monotonic()
        self._contrast = ""
        first = self.queue.inspect()
        try:
            self._welcome(open_browser)
            if demo:
                self._show_demo()
            while not self._is_over():
                for note in self.tree.check():
                    self._print(note)
        except BrokenPipeError:
            # Nothing reads the output. Python would complain when it flushes stdout at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())
        ran = self._ran()
        self.tree.stop()
        self._farewell(first, ran)

    def _ran(self) -> float:
        return time.monotonic() - self._began

    def _print(self, text: str) -> None:
        """Write a line. Raises BrokenPipeError."""
        self._out.write(text + "\n")
        self._out.flush()

    def _welcome(self, open_browser: bool) -> None:
        """Print the addresses once the dashboard answers."""
        web, server = self.web, self.queue.server
        host = "127.0.0.1" if web.host in EVERYWHERE else web.host
        base = web.url.replace(web.host, host, 1) if web.host else web.url
        deadline = time.monotonic() + START_S
        while not _answers(host, web.port) and time.monotonic() < deadline:
            if self.signals.wait(0.05):
                return
        secret = AccessStore(self.queue.link).create_login(Actor(name="local", via="web"))
        link = f"{base}/login?token={secret}"
        redis = server.url if server is not None else shown(self.url or "")
        if self.port not in (0, web.port):
            self._print(f"Port {self.port} is in use, so the dashboard uses port {web.port}.")
        self._print(f"Dashboard  {base}")
        self._print(f"Log in     {link}  (once, within {LOGIN_S / 60:.0f} minutes)")
        self._print(f"Redis      {redis}")
        self._print(f"Queue      {self.queue.name}")
        if self.metrics is not None:
            self._print(f"Metrics    {self.metrics.url}")
        if open_browser:
            webbrowser.open(link)

    def _show_demo(self) -> None:
        """Push tasks, and show how they are served, until the end. Raises BrokenPipeError."""
        load, reader = Load(self.queue), Reader(self.queue)
        live = self._out.isatty() and os.environ.get("TERM") != "dumb"
        with Terminal(self._out) if live else nullcontext() as terminal:
            while not self._is_over():
                notes = self.tree.check()
                try:
                    load.push()
                    shot = reader.read(notes)
                except FairQueueError as error:
                    self._print(f"{error}; trying again")
                    continue
                self._contrast = contrast(shot)
                if terminal is not None:
                    terminal.show(shot)
                else:
                    self._print("\n".join([*notes, line(shot)]))

    def _is_over(self) -> bool:
        """Wait for one step, or until the end if that is sooner; True at the end."""
        left = STEP_S
        if self.seconds is not None:
            left = min(left, self.seconds - self._ran())
        return self.signals.wait(left) or left <= 0

    def _farewell(self, first: QueueSnapshot, seconds: float) -> None:
        """Print what was done in `seconds`."""
        with suppress(FairQueueError, BrokenPipeError):
            last = self.queue.inspect()
            self._print(
                f"Ran {seconds:.0f} s: "
                f"{plural(grown(first, last, 'fired'), 'schedule')} fired, "
                f"{plural(grown(first, last, 'finished'), 'task')} done, "
                f"{grown(first, last, 'buried')} failed, {last.ready:,} still waiting."
            )
            if self._contrast:
                self._print(self._contrast)


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False


@contextmanager
def _logging_for(demo: bool) -> Iterator[None]:
    """Log no warnings in the demo, which fails on purpose many times a minute."""
    before = logging.root.manager.disable
    if demo:
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
