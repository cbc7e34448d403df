"""Run a handler in its own process, which can be killed whatever it does.

The process is started by a fork server (or spawned, where there is none), never by a plain fork of
a process with threads. It finds the handler by module and name, gets its task as JSON, and answers
in JSON over a pipe: nothing from the child is unpickled. It is killed with SIGKILL, which neither a
loop in C nor a blocked signal can delay.

As always with `multiprocessing`, the child also imports the main script, whose code must therefore
be guarded by `if __name__ == "__main__"`. A handler may be defined in the main script. The
environment and the working directory are those at the start of the first such process. A handler
cannot start processes with `multiprocessing`; `subprocess` works.
"""

import fcntl
import importlib
import inspect
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from fairqueue.errors import ConfigurationError, TimedOut, shown
from fairqueue.logs import clean
from fairqueue.models import Task
from fairqueue.queue.reports import MAX_LINE_LENGTH, Failure, bounded, storable
from fairqueue.worker.context import LogCapture, TaskContext
from fairqueue.worker.dispatch import unwrapped
from fairqueue.worker.event_loop import Leftovers, Runner
from fairqueue.worker.handlers import Discard, Handler, HandlerSettings, Retry

START_S = 60.0  # a process whose handler has not begun after this long is killed
EXIT_S = 1.0  # how long a process may take to end after its last message
MAX_MESSAGE_BYTES = 256 * 1024  # far more than a result or a traceback needs

# Starting a child makes multiprocessing reap all others. One thread at a time: of two that ask how
# a child ended, only one gets the answer.
_children = threading.Lock()

Send = Callable[[dict[str, Any]], None]  # sends a message from the child to its worker

# Errors of a handler that are raised again in the worker.
_KINDS: dict[str, type[Exception]] = {"retry": Retry, "discard": Discard, "timed_out": TimedOut}


class ProcessFailed(Exception):
    """A handler failed in its process, or that process ended without an answer.

    `failure` has the type, the message and the traceback of the error in the process.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
        if failure.traceback:
            self.add_note(failure.traceback)  # so that logs show it


def check_isolated(target: Any) -> None:
    """Check that a child process can find this handler by name. Raises ConfigurationError."""
    path = getattr(target, "__qualname__", "")
    if not (inspect.isfunction(target) or inspect.isclass(target)) or "<" in path:
        raise ConfigurationError(
            f"{shown(target)} cannot run with isolation='process': it must be a function or a "
            "class at the top level of a module, so that its process can find it by name"
        )


def check_findable(handler: Handler) -> None:
    """Check that its name leads to this handler, now that all modules are loaded.

    Raises ConfigurationError.
    """
    module, path = handler.target.__module__, handler.target.__qualname__
    try:
        found = _find(module, path)
    except (ImportError, AttributeError):
        found = None
    if found is not handler.target:
        raise ConfigurationError(
            f"the handler of {handler.name!r} cannot run with isolation='process': its process "
            f"looks for {module}.{path}, which {'does not exist' if found is None else 'differs'}"
        )


def check_not_starting() -> None:
    """Check that this is not a child that is importing the main script of its parent.

    Raises ConfigurationError.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "a worker was started while a child process imports the main script: start it under "
            "`if __name__ == '__main__':`"
        )


def run_isolated(handler: Handler, contexts: Sequence[TaskContext], *, capture: bool) -> list[Any]:
    """Run a handler in its own process; return its results, one for each task.

    The process is killed after the time-out, which counts from the start of the handler, and when
    `stop` was called for all contexts. A task of a batch that has failed alone has its error as its
    result. Raises Retry, Discard or TimedOut if the handler did, and ProcessFailed for all other
    errors.
    """
    request = {
        "module": handler.target.__module__,
        "path": handler.target.__qualname__,
        "name": handler.name,
        "tasks": [[each.task_id, each.task.document, each.attempt] for each in contexts],
        "batch": handler.settings.batch,
        "capture": capture,
    }
    child = _TaskProcess(json.dumps(request), contexts)

    def kill_unwanted() -> None:
        if all(each.cancelled for each in contexts):
            child.kill()

    for each in contexts:
        each.on_stop = kill_unwanted
    try:
        kill_unwanted()  # they may have been stopped before there was anything to kill
        return child.results(handler.timeout)
    except KeyboardInterrupt:
        child.kill()
        raise
    finally:
        for each in contexts:
            each.on_stop = None
        child.close()


def _start_method() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    method = multiprocessing.get_context("forkserver")
    # Only our own modules: a module of the application may open connections when it is imported,
    # which all children would share.
    method.set_forkserver_preload([__name__])
    return method


class _TaskProcess:
    """The process of one run, or of a batch, as seen by the worker."""

    def __init__(self, request: str, contexts: Sequence[TaskContext]) -> None:
        self._contexts = contexts
        self._ending = threading.Lock()
        self._closed = False
        self._here, there = multiprocessing.Pipe(duplex=False)
        watched, self._alive = multiprocessing.Pipe(duplex=False)  # closes when this process ends
        try:
            with _children:
                self._process = _start_method().Process(
                    target=_main, args=(there, watched, request), name="fairqueue-task", daemon=True
                )
                self._process.start()
        except BaseException:
            self._here.close()
            self._alive.close()
            raise
        finally:
            there.close()
            watched.close()

    def kill(self) -> None:
        """Kill the process. May be called from any thread."""
        with self._ending:
            if not self._closed:
                with suppress(OSError):  # it may run as another user by now
                    self._process.kill()

    def close(self) -> None:
        """Wait for the process to end, kill it if needed, and free its resources."""
        if not wait([self._process.sentinel], EXIT_S):
            self.kill()
        self._exit_code()
        with self._ending:
            self._closed = True
            self._process.close()
        self._here.close()
        self._alive.close()

    def results(self, timeout: float | None) -> list[Any]:
        """Wait for the results. Raises as `run_isolated`."""
        found: list[Any] = [None] * len(self._contexts)
        deadline: float | None = time.monotonic() + START_S
        begun = False
        while True:
            text = self._next_message(deadline)
            if text is None:
                self.kill()
                if begun and timeout is not None:
                    raise TimedOut(f"ran for more than {timeout:g} s")
                raise _failed(f"its handler had not begun after {START_S:g} s")
            try:
                kind, value = self._read(json.loads(text), found)
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
                self.kill()
                raise _failed("its process sent a malformed message") from error
            if kind == "begun":
                begun = True
                deadline = None if timeout is None else time.monotonic() + timeout
            elif kind == "error":
                raise value
            elif kind == "end":
                return found

    def _next_message(self, deadline: float | None) -> bytes | None:
        """Return the next message; None if the deadline passes first. Raises ProcessFailed."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return None
        ready = wait([self._here, self._process.sentinel], left)
        if not ready:
            return None
        try:
            # Messages sent before it died count.
            if self._here in ready or self._here.poll():
                return self._here.recv_bytes(MAX_MESSAGE_BYTES)
        except EOFError:
            self.kill()  # it has closed the pipe, or is dying
        except OSError as error:
            self.kill()
            raise _failed(f"its process sent more than {MAX_MESSAGE_BYTES} bytes") from error
        raise self._died()

    def _read(self, message: Any, found: list[Any]) -> tuple[str, Any]:
        """Handle a message, which may have a result; return its kind, and its error."""
        ((kind, value),) = message.items()
        if kind == "log":
            self._log(*value)
        elif kind == "left":
            names, count, ended = value
            self._contexts[0].left = Leftovers(tuple(map(str, names)), int(count), bool(ended))
        elif kind == "cost":
            number, cost = value
            self._contexts[number].cost(cost)
        elif kind == "result":
            number, found[number] = value
        elif kind == "failed":
            number, error = value
            found[number] = _rebuilt(**error)
        elif kind == "error":
            value = _rebuilt(**value)
        return kind, value

    def _log(self, number: int, level: int, message: str, own: bool, fields: Any) -> None:
        """Log a line of `context.log` in the process; keep a line of another logger."""
        context, fields = self._contexts[number], dict(fields)
        if own:
            context.log.log(int(level), "%s", message, extra=fields)
        else:
            context.lines.keep(int(level), str(message), fields)

    def _died(self) -> ProcessFailed:
        """Return why the process has ended without a result."""
        code = self._exit_code()
        if all(each.lease_lost for each in self._contexts):
            text = "its process was killed: the lease was lost"
        elif all(each.cancelled for each in self._contexts):
            text = "its process was killed: the task was cancelled, or its worker stopped"
        elif code < 0:
            text = f"its process was killed by {_signal_name(-code)}"
        else:
            text = f"its process exited with status {code} before it gave a result"
        return _failed(text)

    def _exit_code(self) -> int:
        wait([self._process.sentinel])
        with _children:
            self._process.join()
        return int(self._process.exitcode or 0)


def _failed(text: str) -> ProcessFailed:
    """Return a failure of the process, not of the handler."""
    return ProcessFailed(Failure(type=ProcessFailed.__name__, message=text))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _rebuilt(
    kind: str, type: str, message: str, traceback: str, place: str, in_: float | None = None
) -> Exception:
    """Return the error that a child has reported."""
    failure = Failure(
        type=str(type), message=str(message), traceback=str(traceback), place=str(place)
    )
    if kind not in _KINDS:
        return ProcessFailed(failure)
    error = Retry(message, in_=in_) if kind == "retry" else _KINDS[kind](message)
    vars(error)["failure"] = failure  # with the traceback of the process
    return error


# --- in the child ---------------------------------------------------------------------------------


class _SentLines:
    """Log lines that are sent to the worker at once."""

    def __init__(self, send: Send, number: int, *, own: bool) -> None:
        self._send = send
        self._number = number
        self._own = own

    def keep(self, level: int, message: str, context: Mapping[str, Any]) -> None:
        line = [self._number, level, clean(message, MAX_LINE_LENGTH), self._own, bounded(context)]
        self._send({"log": line})


def _main(connection: Connection, worker: Connection, request: str) -> None:
    """Run one handler and send its result or error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the worker
    _end_with_worker(worker)
    logging.getLogger("fairqueue.task").disabled = True  # the worker logs these lines
    lock = threading.Lock()  # any thread may log

    def send(message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        with lock:
            connection.send_bytes(text)

    try:
        for number, result in enumerate(_run(json.loads(request), send)):
            if isinstance(result, _Failed):
                send({"failed": [number, _error_fields(result.error)]})
            else:
                send({"result": [number, storable(result)]})
        send({"end": None})
    except BaseException as error:  # including SystemExit, which comes from the handler
        send({"error": _error_fields(error)})


@dataclass(frozen=True, slots=True)
class _Failed:
    """The result of a task of a batch that failed alone."""

    error: BaseException


def _run(request: dict[str, Any], send: Send) -> list[Any]:
    target = _find(request["module"], request["path"])
    handler = Handler(request["name"], target, HandlerSettings(batch=request["batch"]))
    contexts = [
        TaskContext(
            Task.from_document(task_id, document),
            attempt,
            lines=_SentLines(send, number, own=True),
        )
        for number, (task_id, document, attempt) in enumerate(request["tasks"])
    ]
    capture = LogCapture() if request["capture"] else None
    if capture is not None:
        capture.attach()
    others = TaskContext(contexts[0].task, lines=_SentLines(send, 0, own=False))
    send({"begun": True})
    with Runner() as runner, capture.of(others) if capture else nullcontext():
        runner.begin()
        try:
            if not request["batch"]:
                return [handler.run(contexts[0], runner)]
            results = handler.run_batch(contexts, runner)
            return [_Failed(each) if isinstance(each, BaseException) else each for each in results]
        finally:
            for number, context in enumerate(contexts):
                if context.spent is not None:
                    send({"cost": [number, context.spent]})
            left = runner.clear()
            if left is not None:
                send({"left": [left.names, left.count, left.ended]})


def _error_fields(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON fields, the arguments of `_rebuilt`."""
    failure = Failure.of(error)
    return {
        "kind": next((kind for kind, of in _KINDS.items() if isinstance(error, of)), "error"),
        "type": failure.type,
        "message": failure.message,
        "traceback": failure.traceback,
        "place": failure.place,
        "in_": error.in_ if isinstance(error, Retry) else None,
    }


def _find(module: str, path: str) -> Any:
    """Import a function or class by module and name."""
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = unwrapped(getattr(found, name))
    return found


def _end_with_worker(worker: Connection) -> None:
    """End this process when the other end of this pipe closes because its worker has died.

    A thread cannot run while a handler holds the GIL, so on Linux the kernel sends the signal.
    """

    def watch() -> None:
        with suppress(OSError):
            worker.poll(None)  # nothing is ever written: it becomes readable at the end
        os.kill(os.getpid(), signal.SIGKILL)

    if sys.platform == "linux":
        fcntl.fcntl(worker.fileno(), fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(worker.fileno(), fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(worker.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(worker.fileno(), fcntl.F_SETFL, flags | os.O_ASYNC)
    # Also on Linux: the worker may have died before F_SETSIG.
    threading.Thread(target=watch, name="fairqueue-parent", daemon=True).start()


def _reset_in_child() -> None:
    """Forget the parent's fork server, whose children this process cannot wait for.

    The standard library has no function for this, so it is done only if its internals are known.
    """
    global _children
    _children = threading.Lock()
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    alive = getattr(server, "_forkserver_alive_fd", None)
    if server is None or alive is None:
        return
    with suppress(OSError):
        os.close(alive)
    server.__init__()


os.register_at_fork(after_in_child=_reset_in_child)
