"""Run a function in several processes at once, and replace each one that ends.

    parent  == socket pair ==>  supervisor  -- fork -->  children 0 .. count - 1

`ProcessGroup.start` forks the *supervisor*, which has one thread, forks the *children* and waits.
Children that are started later are therefore copies of the parent as it was at `start`, and never
of a process with threads.

Nobody outlives its boss. The supervisor sees the end of the socket pair or, where forked copies of
the parent keep that open, the end of the parent itself; it then lets the children finish, kills
those that do not, and ends. The children see the end of a pipe that only the supervisor can write
to. A parent-death signal would not do: Linux sends it when the *thread* that forked ends.
"""

import contextlib
import logging
import math
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

from fairqueue.errors import ConfigurationError, FairQueueError, shown
from fairqueue.logs import error_line, log_event
from fairqueue.validation import check_count, check_name, check_seconds

logger = logging.getLogger("fairqueue.processes")

# Seconds before a child that crashed is replaced: twice as many each time, up to the longest. Also
# the least time between two starts of a child that ends without an error.
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 30.0
# Seconds after which a child counts as healthy: its next crash is a first one again.
HEALTHY_S = 60.0
# Seconds for the supervisor to answer beyond what it was given: it only forks, signals and waits.
# One that is later is killed.
ANSWER_S = 10.0
# Seconds for the supervisor to fork all children: a copy of a large process takes its time.
START_S = 60.0
# Seconds between two looks at who our parent is, where the kernel cannot tell of its end.
PARENT_CHECK_S = 1.0
# So often a main thread that waits looks whether another thread was given a signal.
LOOK_UP_S = 1.0
# Seconds of the longest wait, eleven days: poll() cannot take more than twice that. A stop that was
# given more time kills after this.
LONGEST_WAIT_S = 1_000_000.0
# The last cells of the table that the supervisor writes and the parent reads. Before them comes one
# for each child: its pid, or 0.
RESTARTS, OUTCOME = -2, -1
# How it ended: each child by itself, or some killed. 0, neither: the supervisor died, or runs.
# So an end that it was not told to is never taken for one that it was.
STOPPED, KILLED = 1, 2

# The status of a child that is not to be replaced.
RETIRED = 113

# Serves until the event is set; the number is the child's index. True: it is not to be replaced.
Serve = Callable[[threading.Event, int], bool | None]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the supervisor has to know."""

    serve: Serve
    count: int
    name: str
    max_memory: int | None
    grace: float
    memory_interval: float


class ProcessGroup:
    """Runs `serve(stop, index)` in `count` processes, each with an index of its own from 0 on.

    `serve` returns soon after the event `stop` is set: by `stop()`, by a SIGTERM to its process,
    when the memory limit is reached, and when the parent or the supervisor died. One that returns
    earlier is called again, in a new process, at once (ten times a second at most); one that raises
    or dies, after a pause that doubles with each time. The new process has the index of the old.
    One that returns True has retired and is not called again; when all have, the group has ended.

    The children are copies of this process as it is when `start` is called. A lock that another
    thread holds at that moment stays locked in them: start the group before threads. When `serve`
    has returned, the process ends without waiting for threads that it left.

    All methods may be called from any thread. In a forked copy of this process `stop` does nothing.
    """

    def __init__(
        self,
        serve: Serve,
        count: int,
        *,
        name: str = "process",
        max_memory: int | None = None,
        grace: float = 30.0,
        memory_interval: float = 10.0,
    ) -> None:
        """Start nothing yet.

        name: what the log calls these processes.
        max_memory: bytes of resident memory, those shared with the parent included, beyond which a
            child is asked to end and replaced. Linux only.
        grace: seconds to finish before SIGKILL, for a child that is over its memory or whose parent
            or supervisor died.
        memory_interval: seconds between two looks at the memory.

        Raises ConfigurationError naming the argument.
        """
        if not callable(serve):
            raise ConfigurationError(
                f"serve {shown(serve)} cannot be called: a function (stop, index)"
            )
        if max_memory is not None:
            check_count(max_memory, "max_memory", ConfigurationError, least=1, most=2**63 - 1)
            if _memory_of(os.getpid()) is None:
                raise ConfigurationError(
                    f"max_memory {max_memory!r} cannot be watched: there is no /proc here that "
                    "tells the memory of a process; leave it out"
                )
        self._plan = _Plan(
            serve=serve,
            count=check_count(count, "count", ConfigurationError, least=1, most=10_000),
            name=check_name(name, "name", ConfigurationError),
            max_memory=max_memory,
            grace=check_seconds(grace, "grace", ConfigurationError),
            memory_interval=check_seconds(
                memory_interval, "memory_interval", ConfigurationError, least=0.001
            ),
        )
        # Re-entrant, as is the other: a signal handler may stop what the main thread just starts.
        self._lock = threading.RLock()
        self._run: _Run | None = None

    def start(self) -> None:
        """Start the processes and return when all are there; nothing happens if they run already.

        If the supervisor had died, its children first get `grace` seconds to end. Raises
        FairQueueError if the system refuses a process; nothing is left running then.
        """
        with self._lock:
            before = self._own_run()
            if before is not None:
                if before.is_alive():
                    return
                before.finish(self._plan.grace)
            run = self._run = _Run(self._plan)
            try:
                run.wait_until_started()
            except BaseException:
                run.ask_to_stop(0)
                run.finish(0)
                raise

    def stop(self, timeout: float = 30.0) -> bool:
        """Ask all to stop, and return when they are gone; True if none had to be killed.

        Those that still run after `timeout` seconds are killed. While another thread waits in
        `stop`, the shorter of both times counts. A second call returns what the first did. Raises
        ConfigurationError for a timeout that is none.
        """
        timeout = check_seconds(timeout, "timeout", ConfigurationError)
        run = self._own_run()
        if run is None:
            return True
        run.ask_to_stop(timeout)
        with self._lock:
            return run.finish(timeout)

    def is_alive(self) -> bool:
        """Whether the supervisor runs, and with it the promise that dead children are replaced."""
        run = self._own_run()
        return run is not None and run.is_alive()

    def has_died(self) -> bool:
        """Whether the supervisor as last started was killed, or failed, before it was to end."""
        run = self._own_run()
        return run is not None and run.has_died()

    def alive(self) -> list[int]:
        """The process ids of the children that live, by index."""
        run = self._own_run()
        return [] if run is None else [pid for pid in run.pids() if _exists(pid)]

    @property
    def restarts(self) -> int:
        """How many children were replaced since the last `start`."""
        run = self._own_run()
        return 0 if run is None else run.table[RESTARTS]

    @property
    def supervisor_pid(self) -> int:
        """The process id of the supervisor as last started; 0 if it never was."""
        run = self._own_run()
        return 0 if run is None else run.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _own_run(self) -> "_Run | None":
        # A forked copy of the process that started them has no say. It must not wait for the lock
        # either, which may be held by a thread that it does not have.
        run = self._run
        return run if run is not None and run.owner == os.getpid() else None


class _Run:
    """The parent's side of one start: asks the supervisor to stop, and waits for the end."""

    def __init__(self, plan: _Plan) -> None:
        self.owner = os.getpid()
        self.table = memoryview(mmap.mmap(-1, 8 * (plan.count + 2))).cast("q")
        self._reaping = threading.RLock()
        self._reaped = False
        self._all_ended: bool | None = None
        ours, theirs = socket.socketpair()
        # The supervisor and the children keep the other end open: this one ends with the last.
        everyone, held = os.pipe()

        def supervise() -> None:
            ours.close()
            os.close(everyone)
            _Supervisor(plan, theirs, self.owner, self.table).run()

        try:
            self.pid = _fork(supervise)
        except OSError as error:
            ours.close()
            os.close(everyone)
            raise FairQueueError(f"no process can be started: {error}") from error
        finally:
            theirs.close()
            os.close(held)
        self._channel = ours
        self._everyone = open(everyone, "rb", buffering=0)  # noqa: SIM115  closed in finish()

    def wait_until_started(self) -> None:
        """Return when all children were forked. Raises FairQueueError if that failed."""
        self._channel.settimeout(START_S)
        line = b""
        try:
            while not line.endswith(b"\n"):
                received = self._channel.recv(4096)
                if not received:
                    raise ConnectionResetError("it ended")
                line += received
        except OSError as error:
            raise FairQueueError(f"the supervisor does not start its processes: {error}") from error
        if line != b"\n":
            raise FairQueueError(f"no process can be started: {line.decode().strip()}")

    def ask_to_stop(self, timeout: float) -> None:
        """Tell the supervisor how long the children have; one that is gone needs no telling."""
        with contextlib.suppress(OSError):
            # The flag: an application that lets SIGPIPE kill it should not die of this.
            self._channel.sendall(b"%f\n" % timeout, getattr(socket, "MSG_NOSIGNAL", 0))

    def finish(self, timeout: float) -> bool:
        """Return when all are gone; True if none was killed. One thread at a time."""
        if self._all_ended is None:
            deadline = time.monotonic() + timeout
            if not self._hangs_up(timeout + ANSWER_S):
                self._kill()
            self._reap(0)
            if self.table[OUTCOME]:
                self._all_ended = self.table[OUTCOME] == STOPPED
            else:
                self._all_ended = self._end_orphans(deadline)
            self._channel.close()
            self._everyone.close()
        return self._all_ended

    def is_alive(self) -> bool:
        """Whether the supervisor runs."""
        self._reap(os.WNOHANG)
        return not self._reaped

    def has_died(self) -> bool:
        """Whether the supervisor is gone without having said how its children ended."""
        return not self.is_alive() and not self.table[OUTCOME]

    def pids(self) -> list[int]:
        """The children as the supervisor saw them last; none after `finish`."""
        return [] if self._all_ended is not None else [pid for pid in self.table[:RESTARTS] if pid]

    def _hangs_up(self, seconds: float) -> bool:
        """Whether the supervisor ends its side of the channel within so many seconds."""
        self._channel.settimeout(min(seconds, LONGEST_WAIT_S))
        try:
            while self._channel.recv(4096):
                pass
        except TimeoutError:
            return False
        except OSError:  # it died with something unread
            pass
        return True

    def _kill(self) -> None:
        """Kill a supervisor that hangs; its children will notice."""
        with self._reaping, contextlib.suppress(ProcessLookupError):
            if not self._reaped:
                os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> None:
        with self._reaping:
            if not self._reaped:
                try:
                    self._reaped = os.waitpid(self.pid, options)[0] != 0
                except ChildProcessError:  # the application ignores SIGCHLD, or reaps all itself
                    self._reaped = True

    def _end_orphans(self, deadline: float) -> bool:
        """Wait for the children of a supervisor that died, which stop by themselves, or kill them.

        They are killed by number only while the pipe tells that some live: the numbers of those
        that have ended may belong to others by now.
        """
        ended = _ends(self._everyone.fileno(), deadline - time.monotonic())
        for pid in [] if ended else self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _ends(self._everyone.fileno(), ANSWER_S)
        return ended


@dataclass(slots=True)
class _Child:
    """One index: the process that serves it now, or when the next one is due."""

    index: int
    backoff: float
    pid: int = 0  # 0: none at the moment
    since: float = 0.0
    due: float = 0.0  # when to start the next one
    kill_at: float = math.inf  # set when it was asked to end
    asked: bool = False
    retired: bool = False  # it is not to be replaced


class _Supervisor:
    """What the supervising process runs: one thread, which sleeps until something happens."""

    def __init__(
        self, plan: _Plan, channel: socket.socket, parent: int, table: "memoryview[int]"
    ) -> None:
        self._plan = plan
        self._channel = channel
        self._parent = parent
        self._table = table
        self._children = [_Child(index, FIRST_BACKOFF_S) for index in range(plan.count)]
        self._unread = b""
        self._stopping = False
        self._killed = False
        self._look_at = math.inf if plan.max_memory is None else 0.0
        self._lifeline, self._lifeline_held = os.pipe()
        self._signals, self._signals_in = os.pipe()
        self._parent_file = _watch_process(parent)
        self._poll = select.poll()
        for file in (channel.fileno(), self._signals, self._parent_file):
            if file is not None:
                self._poll.register(file, select.POLLIN)

    def run(self) -> None:
        """Supervise until told to stop or left alone."""
        self._take_over_signals()
        self._start_all()
        while not self._stopping or any(child.pid for child in self._children):
            self._wait()
            self._act(time.monotonic())
        self._table[OUTCOME] = KILLED if self._killed else STOPPED

    def _take_over_signals(self) -> None:
        os.set_blocking(self._signals, False)
        os.set_blocking(self._signals_in, False)
        # Also ends the use of a file that the parent's event loop reads.
        signal.set_wakeup_fd(self._signals_in, warn_on_full_buffer=False)
        # A terminal sends these to all its processes: the parent decides what they mean.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def _start_all(self) -> None:
        answer = b"\n"
        try:
            for child in self._children:
                self._start(child, time.monotonic())
        except OSError as error:
            answer = f"{error}\n".encode()
            self._stop(0)
        with contextlib.suppress(OSError):  # the parent has died; the next wait tells
            self._channel.sendall(answer)

    # --- what happens -----------------------------------------------------------------------------

    def _wait(self) -> None:
        """Sleep until a signal, a word of the parent, its end, or the next thing that is due."""
        moments = [self._look_at]
        moments += [child.kill_at for child in self._children if child.pid]
        if not self._stopping:
            moments += [child.due for child in self._children if not child.pid]
        seconds = min(min(moments) - time.monotonic(), LONGEST_WAIT_S)
        if self._parent_file is None and not self._stopping:
            seconds = min(seconds, PARENT_CHECK_S)
        for file, _ in self._poll.poll(max(0.0, seconds) * 1000):
            if file == self._signals:
                if signal.SIGTERM in os.read(self._signals, 4096):
                    self._stop(self._plan.grace)
            elif file == self._channel.fileno():
                self._listen()
            else:
                self._poll.unregister(file)
                self._abandoned()
        if os.getppid() != self._parent and not self._stopping:
            self._abandoned()

    def _listen(self) -> None:
        """The parent says for how many seconds the children may go on, or hangs up."""
        try:
            received = self._channel.recv(4096)
        except OSError:
            received = b""
        if not received:
            self._poll.unregister(self._channel)
            self._abandoned()
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            self._stop(float(line))

    def _abandoned(self) -> None:
        if not self._stopping:
            _log(logging.WARNING, "group_abandoned", group=self._plan.name, pid=self._parent)
        self._stop(self._plan.grace)

    def _act(self, now: float) -> None:
        """Do all that is due at this moment."""
        for child in self._children:
            if child.pid:
                self._reap(child, now)
            if child.pid and now >= child.kill_at:
                self._kill(child)
            if not child.pid and not self._stopping and now >= child.due:
                self._restart(child, now)
        if now >= self._look_at:
            self._look_at = now + self._plan.memory_interval
            self._check_memory()

    # --- what is done -----------------------------------------------------------------------------

    def _start(self, child: _Child, now: float) -> None:
        child.pid = _fork(lambda: self._be_child(child.index))
        child.since, child.kill_at, child.asked = now, math.inf, False
        self._table[child.index] = child.pid
        _log(logging.INFO, "process_started", **self._fields(child))

    def _restart(self, child: _Child, now: float) -> None:
        try:
            self._start(child, now)
        except OSError as error:
            _log(logging.ERROR, "process_not_started", **self._fields(child), error=str(error))
            self._back_off(child, now)
        else:
            self._table[RESTARTS] += 1

    def _reap(self, child: _Child, now: float) -> None:
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if not pid:
            return
        code = os.waitstatus_to_exitcode(status)
        child.retired = code == RETIRED
        crashed = code not in (0, RETIRED) and not child.asked
        fields = self._fields(child) | {"status": code}
        child.pid = self._table[child.index] = 0
        if not crashed or now - child.since >= HEALTHY_S:
            child.backoff = FIRST_BACKOFF_S
        if crashed:
            self._back_off(child, now)
        else:
            child.due = math.inf if child.retired else max(now, child.since + FIRST_BACKOFF_S)
        self._stopping = self._stopping or all(each.retired for each in self._children)
        if not self._stopping and not child.retired:
            fields["restart_in"] = round(child.due - now, 3)
        _log(logging.WARNING if crashed else logging.INFO, "process_ended", **fields)

    def _back_off(self, child: _Child, now: float) -> None:
        child.due = now + child.backoff
        child.backoff = min(child.backoff * 2, LONGEST_BACKOFF_S)

    def _stop(self, seconds: float) -> None:
        """Ask all children to end within so many seconds, or sooner if they were asked before."""
        self._stopping = True
        self._look_at = math.inf
        for child in self._children:
            if child.pid:
                self._ask_to_end(child, seconds)

    def _ask_to_end(self, child: _Child, seconds: float) -> None:
        child.asked = True
        child.kill_at = min(child.kill_at, time.monotonic() + seconds)
        os.kill(child.pid, signal.SIGTERM)

    def _kill(self, child: _Child) -> None:
        self._killed = self._killed or self._stopping
        child.kill_at = math.inf
        os.kill(child.pid, signal.SIGKILL)
        _log(logging.WARNING, "process_killed", **self._fields(child))

    def _check_memory(self) -> None:
        limit = self._plan.max_memory
        for child in self._children:
            memory = _memory_of(child.pid) if child.pid and not child.asked else None
            if limit is not None and memory is not None and memory > limit:
                fields = self._fields(child) | {"memory": memory, "max_memory": limit}
                _log(logging.WARNING, "process_over_memory", **fields)
                self._ask_to_end(child, self._plan.grace)

    def _fields(self, child: _Child) -> dict[str, object]:
        return {"group": self._plan.name, "index": child.index, "pid": child.pid}

    # --- in a child -------------------------------------------------------------------------------

    def _be_child(self, index: int) -> int:
        """Serve, in a process that was forked for it; the status that it ends with."""
        signal.set_wakeup_fd(-1)
        # The lifeline must end with the supervisor, and the parent must see the supervisor's end:
        # no child may keep those open.
        self._channel.close()
        for file in (self._lifeline_held, self._signals, self._signals_in, self._parent_file):
            if file is not None:
                os.close(file)
        stop = threading.Event()
        asked = _catch_sigterm()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        threading.Thread(
            target=_watch,
            args=(self._lifeline, asked, stop, self._plan),
            name="fairqueue-stop",
            daemon=True,
        ).start()
        return RETIRED if self._plan.serve(stop, index) else 0


def wait_for(stop: threading.Event) -> None:
    """Wait in the main thread until an event is set, and look up once in a while.

    Handlers of signals run in the main thread, and only a signal that this thread itself is given
    ends its wait. After a process was frozen, as by SIGSTOP, it may be another one.
    """
    while not stop.wait(LOOK_UP_S):
        pass


def _catch_sigterm() -> int:
    """Let SIGTERM write to a pipe, of which this is the end to read.

    It cannot set an event: the thread that it interrupts may hold the event's lock.
    """
    asked, ask = os.pipe()
    os.set_blocking(ask, False)
    child = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == child:
            with contextlib.suppress(BlockingIOError):
                os.write(ask, b"\0")
        else:  # forked by `serve`: the signal is its own matter
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)
    return asked


def _watch(lifeline: int, asked: int, stop: threading.Event, plan: _Plan) -> None:
    """In a thread of each child: set the event when asked to, or when the supervisor has died."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.register(asked, select.POLLIN)
    while lifeline not in (file for file, _ in poll.poll()):
        os.read(asked, 4096)
        stop.set()
    stop.set()
    _log(logging.WARNING, "supervisor_died", group=plan.name, pid=os.getpid())
    time.sleep(plan.grace)
    os.kill(os.getpid(), signal.SIGKILL)  # nobody else is left to do it


def _fork(work: Callable[[], int | None]) -> int:
    """Fork a process that does this work and nothing else, with all signals blocked; its pid.

    It ends with the status that the work returns, or with 1 after an exception, which is logged.
    """
    _flush()
    # A signal that comes before the new process has its own handlers waits until it has.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of locks that threads hold while we fork. The supervisor takes none
            # of the parent's but those of logging, which Python makes anew; for those that `serve`
            # takes, see ProcessGroup.
            warnings.filterwarnings(
                "ignore", r"This process .* is multi-threaded", DeprecationWarning
            )
            pid = os.fork()
        if pid == 0:
            _work_and_exit(work)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work_and_exit(work: Callable[[], int | None]) -> NoReturn:
    """Work, and end the process without the parent's exit handlers and `finally` clauses."""
    status = 1
    try:
        status = work() or 0
    except BaseException as error:
        fields = {"pid": os.getpid(), "error": error_line(error)}
        log_event(logger, "process_failed", logging.ERROR, exc_info=True, **fields)
    finally:
        with contextlib.suppress(Exception):
            _flush()
        os._exit(status)


def _flush() -> None:
    """Write out standard output: what waits in it would be written by both sides of a fork."""
    for stream in (sys.stdout, sys.stderr):
        # None, closed, or a pipe that nobody reads.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def _watch_process(pid: int) -> int | None:
    """A file that can be read when the process has ended; None where the kernel has none."""
    pidfd_open = getattr(os, "pidfd_open", None)  # Linux only
    if pidfd_open is not None:
        with contextlib.suppress(OSError):  # an old kernel, a sandbox, or it has ended already
            return int(pidfd_open(pid))
    return None


def _ends(pipe: int, seconds: float) -> bool:
    """Whether all who can write to a pipe are gone within so many seconds."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(max(0.0, min(seconds, LONGEST_WAIT_S)) * 1000))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:  # none, or somebody else's by now
        return False
    return True


def _memory_of(pid: int) -> int | None:
    """Bytes of resident memory of a process; None where it cannot be read."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _log(level: int, event: str, **fields: object) -> None:
    # A handler that raises must not end the supervisor, nor keep a child from killing itself.
    with contextlib.suppress(Exception):
        log_event(logger, event, level, **fields)
