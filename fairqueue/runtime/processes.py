"""Run a function in several processes at once, and replace each one that ends.

    parent  == socket pair ==>  supervisor  -- fork -->  children 0 .. count - 1

`ProcessGroup.start` forks the *supervisor*, which has one thread, forks the *children* and waits.
Children that are started later are therefore copies of the parent as it was at `start`, and never
of a process with threads.

No process outlives its parent. The supervisor sees the end of the socket pair or, if forked copies
of the parent keep that open, the end of the parent itself; it then lets the children finish, kills
those that do not, and ends. The children see the end of a pipe that only the supervisor can write
to. A parent-death signal would not work: Linux sends it when the *thread* that forked ends.
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
from types import FrameType
from typing import NoReturn, Self

from fairqueue.errors import ConfigurationError, FairQueueError, shown
from fairqueue.logs import error_line, log_event
from fairqueue.validation import check_count, check_name, check_seconds

logger = logging.getLogger("fairqueue.processes")

# Seconds before a crashed child is replaced: doubled each time, up to the longest. Also the minimum
# time between two starts of a child that ends without an error.
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 30.0
# Seconds after which a child counts as healthy, and its backoff is reset.
HEALTHY_S = 60.0
# Seconds for the supervisor to answer beyond its time-out: it only forks, signals and waits. After
# that it is killed.
ANSWER_S = 10.0
# Seconds for the supervisor to fork all children: forking a large process takes time.
START_S = 60.0
# Seconds between two checks of the parent, if the kernel cannot report its end.
PARENT_CHECK_S = 1.0
# How often a waiting main thread wakes up, in case another thread received a signal.
LOOK_UP_S = 1.0
# Seconds of the longest wait, eleven days: poll() accepts at most twice that. A `stop` with a
# longer time-out kills after this.
LONGEST_WAIT_S = 1_000_000.0
# The last cells of the table that the supervisor writes and the parent reads. The cells before them
# hold the pid of each child, or 0.
RESTARTS, OUTCOME = -2, -1
# How the group ended: all children by themselves, or some killed. 0: the supervisor still runs, or
# has died.
STOPPED, KILLED = 1, 2

# The exit status of a child that is not to be replaced.
RETIRED = 113

# Runs until the event is set; the number is the child's index. Returns True not to be replaced.
Serve = Callable[[threading.Event, int], bool | None]


@dataclass(frozen=True, kw_only=True)
class _GroupSettings:
    """What the supervisor needs to know."""

    serve: Serve
    count: int
    name: str
    max_memory: int | None
    grace: float
    memory_interval: float


class ProcessGroup:
    """Runs `serve(stop, index)` in `count` processes, each with an index of its own from 0 on.

    `serve` must return soon after the event `stop` is set: by `stop()`, by a SIGTERM to its
    process, at the memory limit, and when the parent or the supervisor has died. If it returns
    earlier, it is called again at once in a new process with the same index (at most ten times a
    second); if it raises or dies, after a pause that doubles each time. If it returns True, it has
    retired and is not called again; when all have retired, the group ends.

    The children are copies of this process at the time of `start`. A lock that another thread holds
    at that time stays locked in them, so start the group before threads. When `serve` has returned,
    the process ends without waiting for its other threads.

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

        name: the name of these processes in logs.
        max_memory: bytes of resident memory, including those shared with the parent, beyond which a
            child is asked to end and replaced. Linux only.
        grace: seconds to finish before SIGKILL, for a child beyond its memory limit or whose parent
            or supervisor has died.
        memory_interval: seconds between two checks of the memory.

        Raises ConfigurationError naming the argument.
        """
        if not callable(serve):
            raise ConfigurationError(
                f"serve must be a function of (stop, index), not {shown(serve)}"
            )
        if max_memory is not None:
            check_count(max_memory, "max_memory", ConfigurationError, least=1, most=2**63 - 1)
            if _memory_of(os.getpid()) is None:
                raise ConfigurationError(
                    f"max_memory {max_memory!r} cannot be enforced: this system has no /proc to "
                    "read the memory of a process from; leave it out"
                )
        self._settings = _GroupSettings(
            serve=serve,
            count=check_count(count, "count", ConfigurationError, least=1, most=10_000),
            name=check_name(name, "name", ConfigurationError),
            max_memory=max_memory,
            grace=check_seconds(grace, "grace", ConfigurationError),
            memory_interval=check_seconds(
                memory_interval, "memory_interval", ConfigurationError, least=0.001
            ),
        )
        # Re-entrant: a signal handler may stop what the main thread is starting.
        self._lock = threading.RLock()
        self._run: _SupervisorHandle | None = None

    def start(self) -> None:
        """Start the processes, unless they run already, and return when all have been forked.

        If the supervisor had died, its children first get `grace` seconds to end. Raises
        FairQueueError if a process cannot be forked; nothing is left running then.
        """
        with self._lock:
            before = self._own_run()
            if before is not None:
                if before.is_alive():
                    return
                before.finish(self._settings.grace)
            run = self._run = _SupervisorHandle(self._settings)
            try:
                run.wait_until_started()
            except BaseException:
                run.ask_to_stop(0)
                run.finish(0)
                raise

    def stop(self, timeout: float = 30.0) -> bool:
        """Ask all processes to stop and wait for them; True if none had to be killed.

        Those that still run after `timeout` seconds are killed. If another thread also waits in
        `stop`, the shorter time-out counts. A second call returns the same as the first. Raises
        ConfigurationError for an invalid timeout.
        """
        timeout = check_seconds(timeout, "timeout", ConfigurationError)
        run = self._own_run()
        if run is None:
            return True
        run.ask_to_stop(timeout)
        with self._lock:
            return run.finish(timeout)

    def is_alive(self) -> bool:
        """Whether the supervisor runs, so that dead children are replaced."""
        run = self._own_run()
        return run is not None and run.is_alive()

    def has_died(self) -> bool:
        """Whether the last supervisor was killed, or failed, before it was asked to end."""
        run = self._own_run()
        return run is not None and run.has_died()

    def alive(self) -> list[int]:
        """Return the process ids of the living children, by index."""
        run = self._own_run()
        return [] if run is None else [pid for pid in run.pids() if process_exists(pid)]

    @property
    def restarts(self) -> int:
        """How many children were replaced since the last `start`."""
        run = self._own_run()
        return 0 if run is None else run.table[RESTARTS]

    @property
    def supervisor_pid(self) -> int:
        """The process id of the last supervisor; 0 if there was none."""
        run = self._own_run()
        return 0 if run is None else run.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _own_run(self) -> "_SupervisorHandle | None":
        # A forked copy of the owner does not control the group. It must not take the lock either,
        # which may be held by a thread that does not exist there.
        run = self._run
        return run if run is not None and run.owner == os.getpid() else None


class _SupervisorHandle:
    """The parent's side of one start: asks the supervisor to stop, and waits for its end."""

    def __init__(self, settings: _GroupSettings) -> None:
        self.owner = os.getpid()
        self.table = memoryview(mmap.mmap(-1, 8 * (settings.count + 2))).cast("q")
        self._reaping = threading.RLock()
        self._reaped = False
        self._all_ended: bool | None = None
        ours, theirs = socket.socketpair()
        # The supervisor and the children keep the other end open: this end closes with the last.
        everyone, held = os.pipe()

        def supervise() -> None:
            ours.close()
            os.close(everyone)
            _Supervisor(settings, theirs, self.owner, self.table).run()

        try:
            self.pid = _fork(supervise)
        except OSError as error:
            ours.close()
            os.close(everyone)
            raise FairQueueError(f"cannot start processes: {error}") from error
        finally:
            theirs.close()
            os.close(held)
        self._channel = ours
        self._everyone = open(everyone, "rb", buffering=0)  # noqa: SIM115  closed in finish()

    def wait_until_started(self) -> None:
        """Return when all children have been forked. Raises FairQueueError if that fails."""
        self._channel.settimeout(START_S)
        line = b""
        try:
            while not line.endswith(b"\n"):
                received = self._channel.recv(4096)
                if not received:
                    raise ConnectionResetError("it ended")
                line += received
        except OSError as error:
            raise FairQueueError(f"the supervisor did not start its processes: {error}") from error
        if line != b"\n":
            raise FairQueueError(f"cannot start processes: {line.decode().strip()}")

    def ask_to_stop(self, timeout: float) -> None:
        """Tell the supervisor how long the children have, if it still exists."""
        with contextlib.suppress(OSError):
            # The flag prevents SIGPIPE, which may kill the application.
            self._channel.sendall(b"%f\n" % timeout, getattr(socket, "MSG_NOSIGNAL", 0))

    def finish(self, timeout: float) -> bool:
        """Wait until all are gone; True if none was killed. For one thread at a time."""
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
        """Whether the supervisor is gone without having recorded how its children ended."""
        return not self.is_alive() and not self.table[OUTCOME]

    def pids(self) -> list[int]:
        """Return the children that the supervisor last recorded; none after `finish`."""
        return [] if self._all_ended is not None else [pid for pid in self.table[:RESTARTS] if pid]

    def _hangs_up(self, seconds: float) -> bool:
        """Whether the supervisor closes its side of the channel within `seconds`."""
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
        """Kill a supervisor that hangs; its children notice that and end."""
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
        """Wait for the children of a dead supervisor, which stop by themselves, or kill them.

        They are killed by pid only while the pipe shows that some live: the pids of those that have
        ended may belong to other processes by now.
        """
        ended = _ends(self._everyone.fileno(), deadline - time.monotonic())
        for pid in [] if ended else self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _ends(self._everyone.fileno(), ANSWER_S)
        return ended


@dataclass(slots=True)
class _ChildSlot:
    """One index: its current process, or when the next one is due."""

    index: int
    backoff: float
    pid: int = 0  # 0: none
    since: float = 0.0
    due: float = 0.0  # when to start the next one
    kill_at: float = math.inf  # set when it was asked to end
    asked: bool = False
    retired: bool = False  # not to be replaced


class _Supervisor:
    """The program of the supervisor process: one thread, which sleeps until something happens."""

    def __init__(
        self,
        settings: _GroupSettings,
        channel: socket.socket,
        parent: int,
        table: "memoryview[int]",
    ) -> None:
        self._settings = settings
        self._channel = channel
        self._parent = parent
        self._table = table
        self._children = [_ChildSlot(index, FIRST_BACKOFF_S) for index in range(settings.count)]
        self._unread = b""
        self._stopping = False
        self._killed = False
        self._check_memory_at = math.inf if settings.max_memory is None else 0.0
        self._lifeline, self._lifeline_held = os.pipe()
        self._signals, self._signals_in = os.pipe()
        self._parent_file = _watch_process(parent)
        self._poll = select.poll()
        for file in (channel.fileno(), self._signals, self._parent_file):
            if file is not None:
                self._poll.register(file, select.POLLIN)

    def run(self) -> None:
        """Supervise until asked to stop, or until the parent is gone."""
        self._take_over_signals()
        self._start_all()
        while not self._stopping or any(child.pid for child in self._children):
            self._wait()
            self._act(time.monotonic())
        self._table[OUTCOME] = KILLED if self._killed else STOPPED

    def _take_over_signals(self) -> None:
        os.set_blocking(self._signals, False)
        os.set_blocking(self._signals_in, False)
        # This also stops writing to a file that the parent's event loop reads.
        signal.set_wakeup_fd(self._signals_in, warn_on_full_buffer=False)
        # A terminal sends these to all its processes; the parent handles them.
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
        with contextlib.suppress(OSError):  # the parent has died; the next wait notices
            self._channel.sendall(answer)

    # --- events -----------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Sleep until a signal, a message or the end of the parent, or the next due time."""
        times = [self._check_memory_at]
        times += [child.kill_at for child in self._children if child.pid]
        if not self._stopping:
            times += [child.due for child in self._children if not child.pid]
        seconds = min(min(times) - time.monotonic(), LONGEST_WAIT_S)
        if self._parent_file is None and not self._stopping:
            seconds = min(seconds, PARENT_CHECK_S)
        for file, _ in self._poll.poll(max(0.0, seconds) * 1000):
            if file == self._signals:
                if signal.SIGTERM in os.read(self._signals, 4096):
                    self._stop(self._settings.grace)
            elif file == self._channel.fileno():
                self._listen()
            else:
                self._poll.unregister(file)
                self._abandoned()
        if os.getppid() != self._parent and not self._stopping:
            self._abandoned()

    def _listen(self) -> None:
        """Read how many seconds the children have, or that the channel was closed."""
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
            _log(logging.WARNING, "group_abandoned", group=self._settings.name, pid=self._parent)
        self._stop(self._settings.grace)

    def _act(self, now: float) -> None:
        """Do everything that is due now."""
        for child in self._children:
            if child.pid:
                self._reap(child, now)
            if child.pid and now >= child.kill_at:
                self._kill(child)
            if not child.pid and not self._stopping and now >= child.due:
                self._restart(child, now)
        if now >= self._check_memory_at:
            self._check_memory_at = now + self._settings.memory_interval
            self._check_memory()

    # --- actions ----------------------------------------------------------------------------------

    def _start(self, child: _ChildSlot, now: float) -> None:
        child.pid = _fork(lambda: self._be_child(child.index))
        child.since, child.kill_at, child.asked = now, math.inf, False
        self._table[child.index] = child.pid
        _log(logging.INFO, "process_started", **self._fields(child))

    def _restart(self, child: _ChildSlot, now: float) -> None:
        try:
            self._start(child, now)
        except OSError as error:
            _log(logging.ERROR, "process_not_started", **self._fields(child), error=str(error))
            self._back_off(child, now)
        else:
            self._table[RESTARTS] += 1

    def _reap(self, child: _ChildSlot, now: float) -> None:
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

    def _back_off(self, child: _ChildSlot, now: float) -> None:
        child.due = now + child.backoff
        child.backoff = min(child.backoff * 2, LONGEST_BACKOFF_S)

    def _stop(self, seconds: float) -> None:
        """Ask all children to end within `seconds`, or sooner if they were asked before."""
        self._stopping = True
        self._check_memory_at = math.inf
        for child in self._children:
            if child.pid:
                self._ask_to_end(child, seconds)

    def _ask_to_end(self, child: _ChildSlot, seconds: float) -> None:
        child.asked = True
        child.kill_at = min(child.kill_at, time.monotonic() + seconds)
        os.kill(child.pid, signal.SIGTERM)

    def _kill(self, child: _ChildSlot) -> None:
        self._killed = self._killed or self._stopping
        child.kill_at = math.inf
        os.kill(child.pid, signal.SIGKILL)
        _log(logging.WARNING, "process_killed", **self._fields(child))

    def _check_memory(self) -> None:
        limit = self._settings.max_memory
        for child in self._children:
            memory = _memory_of(child.pid) if child.pid and not child.asked else None
            if limit is not None and memory is not None and memory > limit:
                fields = self._fields(child) | {"memory": memory, "max_memory": limit}
                _log(logging.WARNING, "process_over_memory", **fields)
                self._ask_to_end(child, self._settings.grace)

    def _fields(self, child: _ChildSlot) -> dict[str, object]:
        return {"group": self._settings.name, "index": child.index, "pid": child.pid}

    # --- in a child -------------------------------------------------------------------------------

    def _be_child(self, index: int) -> int:
        """Run `serve` in a forked process; return its exit status."""
        signal.set_wakeup_fd(-1)
        # The lifeline must close with the supervisor, and the parent must see the supervisor's end,
        # so no child may keep these open.
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
            args=(self._lifeline, asked, stop, self._settings),
            name="fairqueue-stop",
            daemon=True,
        ).start()
        return RETIRED if self._settings.serve(stop, index) else 0


def wait_for(stop: threading.Event) -> None:
    """Wait in the main thread until an event is set, and wake up once in a while.

    Signal handlers run in the main thread, but only a signal that this thread itself receives ends
    its wait. After a SIGSTOP another thread may receive it.
    """
    while not stop.wait(LOOK_UP_S):
        pass


def _catch_sigterm() -> int:
    """Make SIGTERM write to a pipe, and return the end to read.

    The handler cannot set an event: the thread that it interrupts may hold the event's lock.
    """
    asked, ask = os.pipe()
    os.set_blocking(ask, False)
    child = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == child:
            with contextlib.suppress(BlockingIOError):
                os.write(ask, b"\0")
        else:  # forked by `serve`, and not ours to handle
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)
    return asked


def _watch(lifeline: int, asked: int, stop: threading.Event, settings: _GroupSettings) -> None:
    """In a thread of each child: set the event when asked to end or the supervisor has died."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.register(asked, select.POLLIN)
    while lifeline not in (file for file, _ in poll.poll()):
        os.read(asked, 4096)
        stop.set()
    stop.set()
    _log(logging.WARNING, "supervisor_died", group=settings.name, pid=os.getpid())
    time.sleep(settings.grace)
    os.kill(os.getpid(), signal.SIGKILL)  # no other process is left to do it


def _fork(work: Callable[[], int | None]) -> int:
    """Fork a process that runs `work` with all signals blocked; return its pid.

    It exits with the status that `work` returns, or with 1 after an exception, which is logged.
    """
    _flush()
    # Signals wait until the new process has its own handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns that threads may hold locks. Of the parent's locks the supervisor
            # takes only those of logging, which Python reinitializes; for `serve` see ProcessGroup.
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
    """Run `work` and exit without the parent's exit handlers and `finally` clauses."""
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
    """Flush standard output: buffered text would be written by both sides of a fork."""
    for stream in (sys.stdout, sys.stderr):
        # It may be None, closed, or a broken pipe.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()


def _watch_process(pid: int) -> int | None:
    """Return a file that becomes readable when the process ends; None if not supported."""
    pidfd_open = getattr(os, "pidfd_open", None)  # Linux only
    if pidfd_open is not None:
        with contextlib.suppress(OSError):  # an old kernel, a sandbox, or already ended
            return int(pidfd_open(pid))
    return None


def _ends(pipe: int, seconds: float) -> bool:
    """Whether all writers of a pipe are gone within `seconds`."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(max(0.0, min(seconds, LONGEST_WAIT_S)) * 1000))


def process_exists(pid: int) -> bool:
    """Whether a process of this user has this id; False for 0."""
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except OSError:  # gone, or another user's by now
        return False
    return True


def _memory_of(pid: int) -> int | None:
    """Return the resident memory of a process in bytes; None if it cannot be read."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _log(level: int, event: str, **fields: object) -> None:
    # An error must neither end the supervisor nor keep a child from killing itself.
    with contextlib.suppress(Exception):
        log_event(logger, event, level, **fields)
