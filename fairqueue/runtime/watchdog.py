"""The program of the watchdog process, which starts and stops an embedded server.

Its source is copied and run on its own, so it imports only the standard library. Standard input is
the socket to the owner: it reads a JSON list [number, verb, arguments...] per line, and answers
with a JSON object per line.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# Seconds between two checks of the parent: how long the server may outlive an owner that was killed
# while a forked child of it lives on. Otherwise the end of the socket is noticed at once.
TICK_S = 0.25


class Watchdog:
    """Serves one owner until that is gone."""

    def __init__(self, owner: int, folder: str, grace: float) -> None:
        self._owner = owner
        self._folder = folder
        self._grace = grace
        self._server = 0
        self._status: int | None = None

    def run(self) -> None:
        """Answer requests until the owner is gone; then stop the server and clean up."""
        # Drop what was inherited from the thread that started this process. Only the owner ends it.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        # The end of a child writes a byte to this pipe, so that waiting for it needs no polling.
        self._child_ended, wake = os.pipe()
        os.set_blocking(self._child_ended, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        os.umask(0o077)
        verbs: dict[str, Callable[..., object]] = {
            "lock": self.lock,
            "start": self.start,
            "poll": self.poll,
            "stop": self.stop,
            "kill": self.kill,
        }
        try:
            for line in self._requests():
                number, verb, *arguments = json.loads(line)
                answer: dict[str, object] = {"to": number, "result": None, "error": None}
                try:
                    answer["result"] = verbs[verb](*arguments)
                except OSError as error:
                    answer["error"] = str(error)
                os.write(0, json.dumps(answer).encode() + b"\n")
        finally:
            self.stop()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _requests(self) -> Iterator[bytes]:
        """Yield lines from the owner, for as long as it lives and keeps the socket open."""
        unread = b""
        while os.getppid() == self._owner:
            self.poll()
            if 0 not in self._wait(TICK_S, 0):
                continue
            received = os.read(0, 65_536)
            if not received:
                return
            *lines, unread = (unread + received).split(b"\n")
            yield from lines

    def _wait(self, seconds: float, *files: int) -> list[int]:
        """Wait until one of the files can be read or a child has ended."""
        poll = select.poll()
        for file in (self._child_ended, *files):
            poll.register(file, select.POLLIN)
        readable = [file for file, _ in poll.poll(max(0, seconds) * 1000)]
        with contextlib.suppress(BlockingIOError):
            os.read(self._child_ended, 4096)
        return readable

    def lock(self, path: str) -> str | None:
        """Lock the data folder until server and watchdog are gone; return who holds it, or None."""
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 32).decode(errors="replace")
            os.close(file)
            return holder or "unknown"
        os.ftruncate(file, 0)
        os.write(file, str(self._owner).encode())
        # The server inherits it: if the watchdog is killed, the folder stays locked until the
        # server is gone too.
        os.set_inheritable(file, True)
        return None

    def start(self, binary: str, config: str, log: str) -> int:
        """Start the server; return its process id."""
        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        prctl = _find_prctl()
        watchdog = os.getpid()
        self._server = os.fork()
        if self._server == 0:
            try:
                # Its own group, so that kill() also reaches a rewrite of the AOF.
                os.setpgid(0, 0)
                for file, number in ((null, 0), (output, 1), (output, 2)):
                    os.dup2(file, number)
                for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                if prctl is not None:
                    prctl(1, signal.SIGKILL, 0, 0, 0)  # 1: PR_SET_PDEATHSIG
                if os.getppid() == watchdog:
                    os.execv(binary, [binary, config])  # noqa: S606
            except OSError as error:
                os.write(2, f"cannot run {binary}: {error}\n".encode())
            finally:
                os._exit(127)
        os.close(null)
        os.close(output)
        return self._server

    def poll(self) -> int | None:
        """Return None while the server runs, then its exit status, or minus the signal."""
        if self._server:
            ended, status = os.waitpid(self._server, os.WNOHANG)
            if not ended:
                return None
            self._ended(status)
        return self._status

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the server still runs after the grace period."""
        self.poll()
        if self._server:
            os.kill(self._server, signal.SIGTERM)
        deadline = time.monotonic() + self._grace
        while self._server and time.monotonic() < deadline:
            self._wait(deadline - time.monotonic())
            self.poll()
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the server and its children."""
        self.poll()
        if self._server:
            # Its group may not exist yet, if it was forked just now.
            with contextlib.suppress(OSError):
                os.killpg(self._server, signal.SIGKILL)
            os.kill(self._server, signal.SIGKILL)
            self._ended(os.waitpid(self._server, 0)[1])

    def _ended(self, status: int) -> None:
        self._server = 0
        self._status = os.waitstatus_to_exitcode(status)


def _find_prctl() -> Any:
    """Return the function prctl of Linux, or None."""
    if sys.platform == "linux":
        with contextlib.suppress(ImportError, OSError, AttributeError):
            import ctypes

            return ctypes.CDLL(None).prctl
    return None
