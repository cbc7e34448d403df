"""Run a handler in a process of its own, which can be killed whatever it does.

The process is started by a fork server (where there is none, anew), never by a plain fork of a
process with threads. It finds the handler by module and name, gets its task as JSON, and answers in
JSON over a pipe: nothing that a child says is unpickled. It is killed with SIGKILL, which neither
a loop in C nor a blocked signal can hold up.

As always with `multiprocessing`, the child imports the main script too: what that does must stand
under `if __name__ == "__main__"`. A handler that is defined in the main script works there. The
environment and the working directory are those of the moment when the first such process was
started. A handler there cannot use `multiprocessing` to start processes itself; `subprocess` works.
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
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from fairqueue.errors import ConfigurationError, TimedOut, shown
from fairqueue.logs import clean
from fairqueue.models import Task
from fairqueue.queue.reports import MAX_LINE_LENGTH, Failure, bounded, storable
from fairqueue.worker.context import LogCapture, TaskContext
from fairqueue.worker.dispatch import unwrapped
from fairqueue.worker.event_loop import Leftovers, Stage
from fairqueue.worker.handlers import Discard, Handler, HandlerSettings, Retry

START_S = 60.0  # a process whose handler has not begun after this long is given up
EXIT_S = 1.0  # so long a process may take to end after it has said how its handler went
MAX_MESSAGE_BYTES = 256 * 1024  # far more than a result or a traceback has: the other end is broken

# Multiprocessing looks after all children of a process whenever one is started. One thread at a
# time: of two that ask how a child ended, only one gets the answer.
_children = threading.Lock()


class ProcessFailed(Exception):
    """A handler failed in its process, or that process ended without a word.

    `failure` has the type, the message and the traceback of what was raised there.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
        if failure.traceback:
            self.add_note(failure.traceback)  # so that it is seen where this is logged


def check_isolated(target: Any) -> None:
    """See that a child process can find this handler. Raises ConfigurationError."""
    path = getattr(target, "__qualname__", "")
    if not (inspect.isfunction(target) or inspect.isclass(target)) or "<" in path:
        raise ConfigurationError(
            f"{shown(target)} cannot run with isolation='process': its process finds it by name, "
            "so that it must be a function or a class at the top level of a module"
        )


def check_findable(handler: Handler) -> None:
    """See that its name leads to this handler, now that modules are loaded.

    Raises ConfigurationError.
    """
    module, path = handler.target.__module__, handler.target.__qualname__
    try:
        found = _find(module, path)
    except (ImportError, AttributeError):
        found = None
    if found is not handler.target:
        raise ConfigurationError(
            f"the handler of {handler.name!r} cannot run with isolation='process': {module}.{path} "
            f"is {'not there' if found is None else 'something else'}, and its process finds it so"
        )


def check_not_starting() -> None:
    """See that this is no child that is just importing the main script of its parent.

    Raises ConfigurationError.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "a worker is started while a process is being set up that imports the main script: "
            "start it there under `if __name__ == '__main__':`"
        )


def run_isolated(handler: Handler, context: TaskContext, *, capture: bool) -> Any:
    """Run a handler in a process of its own; its result.

    The process is killed when its time-out is over, which counts from the beginning of the handler,
    and when `context.stop` is called. Raises what the handler did, if that was Retry, Discard or
    TimedOut, and ProcessFailed for all else.
    """
    request = {
        "module": handler.target.__module__,
        "path": handler.target.__qualname__,
        "name": handler.name,
        "task_id": context.task_id,
        "document": context.task.document,
        "attempt": context.attempt,
        "capture": capture,
    }
    child = _Child(json.dumps(request), context)
    context.on_stop = child.kill
    try:
        if context.cancelled:  # before there was anything to kill
            child.kill()
        return child.result(handler.timeout)
    except KeyboardInterrupt:
        child.kill()
        raise
    finally:
        context.on_stop = None
        child.close()


def _start_method() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    method = multiprocessing.get_context("forkserver")
    # Only our own modules: one of the application may open connections when it is imported, which
    # all children would share.
    method.set_forkserver_preload([__name__])
    return method


class _Child:
    """The process of one run, seen from the worker."""

    def __init__(self, request: str, context: TaskContext) -> None:
        self._context = context
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
        """End it now, whatever it does. Any thread may."""
        with self._ending:
            if not self._closed:
                with suppress(OSError):  # it may have become another user's
                    self._process.kill()

    def close(self) -> None:
        """See that it has ended, and free what it held here."""
        if not wait([self._process.sentinel], EXIT_S):
            self.kill()
        self._exit_code()
        with self._ending:
            self._closed = True
            self._process.close()
        self._here.close()
        self._alive.close()

    def result(self, timeout: float | None) -> Any:
        """Wait for what it says in the end. Raises as `run_isolated`."""
        deadline: float | None = time.monotonic() + START_S
        begun = False
        while True:
            text = self._next_message(deadline)
            if text is None:
                self.kill()
                raise self._overdue(timeout if begun else None)
            try:
                word, value = self._heard(json.loads(text))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                self.kill()
                raise _failed("its process said something that makes no sense") from error
            if word == "begun":
                begun = True
                deadline = None if timeout is None else time.monotonic() + timeout
            elif word == "error":
                raise value
            elif word == "result":
                return value

    def _next_message(self, deadline: float | None) -> bytes | None:
        """What it says next; None if the deadline passes before. Raises ProcessFailed."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return None
        ready = wait([self._here, self._process.sentinel], left)
        if not ready:
            return None
        try:
            # What it has said before it died counts.
            if self._here in ready or self._here.poll():
                return self._here.recv_bytes(MAX_MESSAGE_BYTES)
        except EOFError:
            self.kill()  # it has closed its end, or is dying
        except OSError as error:
            self.kill()
            raise _failed(f"its process said more than {MAX_MESSAGE_BYTES} bytes") from error
        raise self._died()

    def _heard(self, message: Any) -> tuple[str, Any]:
        """A message, understood: its word, and the result or error that it tells of."""
        ((word, value),) = message.items()
        if word == "log":
            self._log(*value)
        elif word == "left":
            names, count, ended = value
            self._context.left = Leftovers(tuple(map(str, names)), int(count), bool(ended))
        elif word == "error":
            value = _rebuilt(**value)
        return word, value

    def _log(self, level: int, message: str, own: bool, context: Any) -> None:
        """Log what was said to `context.log` there; keep what was said to other loggers."""
        fields = dict(context)
        if own:
            self._context.log.log(int(level), "%s", message, extra=fields)
        else:
            self._context.lines.keep(int(level), str(message), fields)

    def _overdue(self, timeout: float | None) -> Exception:
        if timeout is not None:
            return TimedOut(f"ran for more than {timeout:g} s")
        return _failed(f"its handler had not begun after {START_S:g} s")

    def _died(self) -> ProcessFailed:
        """Why it has ended without a word."""
        code = self._exit_code()
        if self._context.lease_lost:
            text = "its process was killed: the lease was lost"
        elif self._context.cancelled:
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
    """A failure that is not the handler's own."""
    return ProcessFailed(Failure(type=ProcessFailed.__name__, message=text))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _rebuilt(
    kind: str, type: str, message: str, traceback: str, place: str, in_: float | None = None
) -> Exception:
    """The error that a child has told of."""
    failure = Failure(
        type=str(type), message=str(message), traceback=str(traceback), place=str(place)
    )
    error: Exception
    if kind == "retry":
        error = Retry(message, in_=in_)
    elif kind == "discard":
        error = Discard(message)
    elif kind == "timed_out":
        error = TimedOut(message)
    else:
        return ProcessFailed(failure)
    vars(error)["failure"] = failure  # where it happened there
    return error


# --- in the child ---------------------------------------------------------------------------------


class _Voice:
    """What the child says to its worker. Any thread may log."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def say(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        with self._lock:
            self._connection.send_bytes(text)


class _ToldLines:
    """Log lines that are told to the worker as they come."""

    def __init__(self, voice: _Voice, *, own: bool) -> None:
        self._voice = voice
        self._own = own

    def keep(self, level: int, message: str, context: Mapping[str, Any]) -> None:
        line = [level, clean(message, MAX_LINE_LENGTH), self._own, bounded(context)]
        self._voice.say({"log": line})


def _main(connection: Connection, worker: Connection, request: str) -> None:
    """Run one handler and say how that went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which decides
    _end_with_worker(worker)
    logging.getLogger("fairqueue.task").disabled = True  # the worker logs these lines
    voice = _Voice(connection)
    try:
        voice.say({"result": storable(_run(json.loads(request), voice))})
    except BaseException as error:  # also SystemExit: it is the handler's
        voice.say({"error": _facts(error)})


def _run(request: dict[str, Any], voice: _Voice) -> Any:
    target = _find(request["module"], request["path"])
    handler = Handler(request["name"], target, HandlerSettings())
    task = Task.from_document(request["task_id"], request["document"])
    context = TaskContext(task, request["attempt"], lines=_ToldLines(voice, own=True))
    capture = LogCapture() if request["capture"] else None
    if capture is not None:
        capture.attach()
    others = TaskContext(task, request["attempt"], lines=_ToldLines(voice, own=False))
    voice.say({"begun": True})
    with Stage() as stage, capture.of(others) if capture else nullcontext():
        stage.begin()
        try:
            return handler.run(context, stage)
        finally:
            left = stage.clear()
            if left is not None:
                voice.say({"left": [left.names, left.count, left.ended]})


def _facts(error: BaseException) -> dict[str, Any]:
    """What can be said of an error in JSON."""
    failure = Failure.of(error)
    kinds = {"retry": Retry, "discard": Discard, "timed_out": TimedOut}
    kind = next((kind for kind, of in kinds.items() if isinstance(error, of)), "error")
    return {
        "kind": kind,
        "type": failure.type,
        "message": failure.message,
        "traceback": failure.traceback,
        "place": failure.place,
        "in_": error.in_ if isinstance(error, Retry) else None,
    }


def _find(module: str, path: str) -> Any:
    """The function or class of this name, as the module has it."""
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = unwrapped(getattr(found, name))
    return found


def _end_with_worker(worker: Connection) -> None:
    """End this process when the other end of this pipe closes: when its worker has died.

    A thread would see it, but does not run while a handler holds the interpreter's lock. So Linux
    is asked to send the signal by itself.
    """

    def watch() -> None:
        with suppress(OSError):
            worker.poll(None)  # nobody writes: what can be read is the end
        os.kill(os.getpid(), signal.SIGKILL)

    if sys.platform == "linux":
        fcntl.fcntl(worker.fileno(), fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(worker.fileno(), fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(worker.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(worker.fileno(), fcntl.F_SETFL, flags | os.O_ASYNC)
    # Also where Linux does so: the worker may have died before it was asked.
    threading.Thread(target=watch, name="fairqueue-parent", daemon=True).start()


def _begin_in_child() -> None:
    """Forget the parent's fork server: a child that is no child of ours cannot be waited for.

    The standard library has no word for this, so it is done only where its names are as we know.
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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
