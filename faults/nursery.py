"""A process that has everything imported and forks the actors of a storm in milliseconds.

It signals and reaps them, so that no signal ever hits a reused process id, and kills them when it
ends. The harness talks to it in JSON lines.
"""

import ctypes
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, Self

ANSWER_S = 60.0


class Nursery:
    """The harness's end: start, signal and await actors. May be used by many threads."""

    def __init__(self, module: str = "faults.roles") -> None:
        """Start it; `act` of the module is what actors do."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "faults.nursery", module],
                stdin=theirs.fileno(),
                close_fds=True,
            )
        self._answers: dict[int, Any] = {}
        self._ended: dict[int, int] = {}
        self._asked = 0
        self._news = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, role: str, setting: dict[str, Any]) -> int:
        """Fork an actor; return its process id."""
        return int(self._ask("start", role, setting))

    def signal(self, pid: int, number: int) -> bool:
        """Send a signal; False if the process has ended."""
        return bool(self._ask("signal", pid, int(number)))

    def wait(self, pid: int, timeout: float = ANSWER_S) -> int | None:
        """Return the exit status of an actor, or minus the signal; None if it still runs."""
        with self._news:
            self._news.wait_for(lambda: pid in self._ended, timeout)
            return self._ended.get(pid)

    def ended(self, pid: int) -> bool:
        """Whether an actor is gone."""
        with self._news:
            return pid in self._ended

    def close(self) -> None:
        """Kill all actors, and end."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait(ANSWER_S)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ask(self, *question: Any) -> Any:
        with self._news:
            self._asked += 1
            number = self._asked
            self._socket.sendall(json.dumps([number, *question]).encode() + b"\n")
            if not self._news.wait_for(lambda: number in self._answers, ANSWER_S):
                raise TimeoutError(f"the nursery does not answer {question[0]!r}")
            return self._answers.pop(number)

    def _listen(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                kind, key, value = json.loads(line)
                with self._news:
                    (self._ended if kind == "ended" else self._answers)[key] = value
                    self._news.notify_all()


def _serve(module: str) -> None:
    """Fork, signal and reap until the harness closes the connection."""
    from fairqueue.link.scripts import load_script, script_names

    act = importlib.import_module(module).act
    for name in script_names():
        load_script(
            name
        )  # once for all actors, some of which would be killed before on a busy machine
    logging.getLogger("fairqueue").addHandler(logging.NullHandler())  # warnings are expected
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    child_ended, wake = os.pipe()
    for end in (child_ended, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    harness = socket.socket(fileno=0)
    children: set[int] = set()
    unread = b""
    while True:
        readable = select.select([harness, child_ended], [], [])[0]  # type: ignore[type-var]
        if child_ended in readable:
            os.read(child_ended, 4096)
            _reap(harness, children)
        if harness not in readable:
            continue
        received = harness.recv(65_536)
        if not received:
            break
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            number, verb, *arguments = json.loads(line)
            if verb == "start":
                answer = _fork(act, libc, *arguments)
                children.add(answer)
            else:
                answer = _signal(children, *arguments)
            _tell(harness, "answer", number, answer)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _fork(act: Any, libc: Any, role: str, setting: dict[str, Any]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # 1: PR_SET_PDEATHSIG
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the harness must notice our end
        if os.getppid() == parent:
            act(role, setting)
            status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def _signal(children: set[int], pid: int, number: int) -> bool:
    if pid not in children:
        return False
    os.kill(pid, number)
    return True


def _reap(harness: socket.socket, children: set[int]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            _tell(harness, "ended", pid, os.waitstatus_to_exitcode(status))


def _tell(harness: socket.socket, kind: str, key: int, value: Any) -> None:
    harness.sendall(json.dumps([kind, key, value]).encode() + b"\n")


if __name__ == "__main__":
    _serve(sys.argv[1])
