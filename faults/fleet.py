"""A fleet of servers: a primary, its replicas, and sentinels that watch them.

    owner  == pipes, a JSON line each way ==>  keeper process  -->  servers and sentinels

The keeper, which is this file run as a program, is the parent of them all: so no signal ever hits
a reused process id, and all end with the owner, even at SIGKILL.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

import redis

from fairqueue.runtime.embedded import Fsync, find_binary

SERVICE = "main"
HOST = "127.0.0.1"
START_S = 30.0  # seconds until all must run and know each other
# Seconds between two checks of the keeper's parent: how long servers may outlive an owner that was
# killed while a forked copy of it lives on. Otherwise the end of the pipe is noticed at once.
LOOK_S = 0.25
LOOKS = 0.02  # seconds between two checks of a server that is about to change
STARTS = 5  # attempts with free ports, which another program may take first
# Milliseconds. Sentinels find each other and what has changed at once, not in 10 s; and a busy
# machine does not make them distrust their clocks for 30 s.
PERIODS = {
    "INFO-PERIOD": 200,
    "PING-PERIOD": 100,
    "ASK-PERIOD": 100,
    "PUBLISH-PERIOD": 200,
    "TILT-TRIGGER": 20_000,
    "TILT-PERIOD": 1000,
    "ELECTION-TIMEOUT": 2000,
    "MIN-LINK-RECONNECT-PERIOD": 200,
}


class FleetError(Exception):
    """A server of the fleet has failed; the message has the end of its log."""


class Keeper:
    """The owner's end of the process that starts, signals and kills the others."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.fleet", str(os.getpid()), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1],
            start_new_session=True,
        )

    def ask(self, verb: str, *arguments: object) -> int:
        """Send `start`, `signal` or `kill`; return the answer when it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise FleetError(f"the keeper of the fleet has ended; it was asked for {verb!r}")
        return int(answer)

    def close(self) -> None:
        """Kill all, and remove the folder."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        self._process.wait(START_S)


class Node:
    """One server or sentinel of a fleet. Its port is the same for its life."""

    def __init__(self, keeper: Keeper, folder: Path, lines: list[str], *arguments: str) -> None:
        folder.mkdir()
        self._keeper = keeper
        self._folder = folder
        self._arguments = [str(folder / "node.conf"), *arguments]
        self.is_paused = False
        for _ in range(STARTS):
            self.port = free_port()
            own = [f"port {self.port}", f"bind {HOST}", f"dir {folder}", 'logfile ""']
            (folder / "node.conf").write_text("\n".join([*own, *lines]) + "\n")
            if self._start():
                return
        raise FleetError(f"no server comes up in {folder}" + self.last_words())

    @property
    def url(self) -> str:
        """Its address, which may be that of a replica."""
        return f"redis://{HOST}:{self.port}/0"

    def client(self) -> redis.Redis:
        """A client that does not wait long for an answer, and decodes."""
        # Protocol 3: with every redis-py, sentinels then answer with a dictionary.
        return redis.Redis(HOST, self.port, protocol=3, decode_responses=True, socket_timeout=2.0)

    def ask(self, *command: str | int) -> Any:
        """The answer to one command."""
        with self.client() as client:
            return client.execute_command(*command)

    def role(self) -> str:
        """Return its role: "master" or "slave"; "" if it does not answer."""
        with suppress(redis.RedisError, OSError):
            return str(self.ask("ROLE")[0])
        return ""

    def is_alive(self) -> bool:
        """Whether its process runs, or is paused."""
        return bool(self._keeper.ask("signal", self.pid, 0))

    def kill(self) -> None:
        """Kill it, as in a crash, and wait until it is gone."""
        self._keeper.ask("kill", self.pid)
        self.is_paused = False

    def pause(self) -> None:
        """Pause it: it answers nothing, and its connections stay open."""
        self._keeper.ask("signal", self.pid, signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        """Resume it."""
        self._keeper.ask("signal", self.pid, signal.SIGCONT)
        self.is_paused = False

    def restart(self) -> None:
        """Start it again at its port with its data on disk, after killing it if it runs."""
        self.kill()
        if not self._start():
            raise FleetError(f"the server at port {self.port} does not start" + self.last_words())

    def last_words(self) -> str:
        """The end of its log."""
        with suppress(OSError):
            text = (self._folder / "log").read_text(errors="replace")
            return "\n" + "\n".join(text.splitlines()[-15:])
        return ""

    def _start(self) -> bool:
        """Start it; False if it ended at once, or if the port is in use."""
        argv = [str(find_binary()), *self._arguments]
        self.pid = self._keeper.ask("start", argv, str(self._folder / "log"))
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if not self.is_alive():
                return False
            with suppress(redis.RedisError, OSError), self.client() as client:
                server = cast(dict[str, int], client.info("server"))
                if server["process_id"] == self.pid:
                    return True
            time.sleep(LOOKS)
        return False


class Fleet:
    """A primary, its replicas and sentinels, on ports of 127.0.0.1. May be used by one thread.

    `primary` and `replicas` are those last seen: `wait_for_failover` and `promote` update them.
    """

    def __init__(self, keeper: Keeper, folder: Path) -> None:
        self._keeper = keeper
        self._folder = folder
        self.nodes: list[Node] = []
        self.sentinels: list[Node] = []
        self.primary: Node

    @classmethod
    def start(
        cls,
        replicas: int = 1,
        sentinels: int = 3,
        fsync: Fsync = "always",
        *,
        down_after: float = 0.7,
        config: Mapping[str, str] | None = None,
    ) -> Self:
        """Start all servers, and return when replicas are in sync and sentinels know all of them.

        down_after: seconds of silence after which a sentinel considers a primary dead.
        config: more settings for primary and replicas.
        """
        folder = Path(tempfile.mkdtemp(prefix="fleet-"))
        keeper = Keeper(folder)
        try:
            fleet = cls(keeper, folder)
            fleet._start_servers(replicas, fsync, config or {})
            fleet._start_sentinels(sentinels, down_after)
        except BaseException:
            keeper.close()
            raise
        return fleet

    def close(self) -> None:
        """Kill all of it."""
        self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def replicas(self) -> list[Node]:
        """All servers but the primary, dead ones included."""
        return [node for node in self.nodes if node is not self.primary]

    def sentinel_url(self, service: str = SERVICE) -> str:
        """The address for `TaskQueue.from_url`."""
        hosts = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{service}/0"

    # --- who is the primary -----------------------------------------------------------------------

    def failover(self) -> None:
        """Ask the sentinels for a planned failover; `wait_for_failover` waits for it."""
        self.sentinels[0].ask("SENTINEL", "FAILOVER", SERVICE)

    def wait_for_failover(self, timeout: float = 30.0) -> Node:
        """Wait until all sentinels name another primary, and it is one: the new primary."""
        old = self.primary
        self._until(lambda: self._find_primary() not in (None, old), "another primary", timeout)
        return self.primary

    def _find_primary(self) -> Node | None:
        """Return the primary that all sentinels name, if it is one, and store it as `primary`."""
        named = {self._named(sentinel) for sentinel in self.sentinels}
        found = next((node for node in self.nodes if {node.port} == named), None)
        if found is None or found.role() != "master":
            return None
        self.primary = found
        return found

    def promote(self, index: int = 0) -> Node:
        """Make a replica the primary by hand; the others that live follow it."""
        chosen = self.replicas[index]
        chosen.ask("REPLICAOF", "NO", "ONE")
        for node in self.nodes:
            if node is not chosen and node.role():
                node.ask("REPLICAOF", HOST, chosen.port)
        self.primary = chosen
        return chosen

    def wait_for_sync(self, timeout: float = 30.0) -> None:
        """Wait until each living replica is in sync with the primary."""

        def in_sync() -> bool:
            role, offset, *_ = self.primary.ask("ROLE")
            if role != "master":
                return False
            living = [node.ask("ROLE") for node in self.replicas if node.role()]
            return all(
                role[0] == "slave" and role[1:3] == [HOST, self.primary.port] and role[4] >= offset
                for role in living
            )

        self._until(in_sync, "replicas in sync", timeout)

    def wait_for_replica(self, node: Node, timeout: float = 30.0) -> None:
        """Wait until a former primary knows that it is a replica."""
        self._until(lambda: node.role() == "slave", f"port {node.port} a replica", timeout)

    def mend(self, timeout: float = 30.0) -> None:
        """Resume paused servers, start dead ones, and wait until all are healthy."""
        for node in (*self.nodes, *self.sentinels):
            if node.is_paused:
                node.resume()
            elif not node.is_alive():
                node.restart()
        if self.sentinels:
            # On a busy machine they may have chosen again.
            self._until(lambda: self._find_primary() is not None, "one primary", timeout)
        for node in self.replicas:
            if not self.sentinels:
                node.ask("REPLICAOF", HOST, self.primary.port)
            self.wait_for_replica(node, timeout)
        self.wait_for_sync(timeout)
        self._wait_for_sentinels(timeout)

    def _named(self, sentinel: Node) -> int | None:
        """The port of the primary that a sentinel names; None if it does not answer."""
        with suppress(redis.RedisError, OSError):
            named = sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
            return int(named[1])
        return None

    # --- inside -----------------------------------------------------------------------------------

    def _start_servers(self, replicas: int, fsync: Fsync, config: Mapping[str, str]) -> None:
        lines = [
            'save ""',
            "appendonly yes",
            f"appendfsync {fsync}",
            "maxmemory-policy noeviction",
            "repl-diskless-sync-delay 0",
            *(f"{name} {value}" for name, value in config.items()),
        ]
        for n in range(1 + replicas):
            own = [] if n == 0 else [f"replicaof {HOST} {self.nodes[0].port}"]
            self.nodes.append(Node(self._keeper, self._folder / f"server-{n}", lines + own))
        self.primary = self.nodes[0]
        self.wait_for_sync(START_S)

    def _start_sentinels(self, count: int, down_after: float) -> None:
        lines = [
            f"sentinel monitor {SERVICE} {HOST} {self.primary.port} {count // 2 + 1}",
            f"sentinel down-after-milliseconds {SERVICE} {round(down_after * 1000)}",
            f"sentinel failover-timeout {SERVICE} 3000",
        ]
        for n in range(count):
            folder = self._folder / f"sentinel-{n}"
            self.sentinels.append(Node(self._keeper, folder, lines, "--sentinel"))
            periods = [text for pair in PERIODS.items() for text in pair]
            self.sentinels[n].ask("SENTINEL", "DEBUG", *periods)

        self._wait_for_sentinels(START_S)

    def _wait_for_sentinels(self, timeout: float) -> None:
        """Wait until all sentinels know all servers, and consider them healthy."""

        def content() -> bool:
            return all(self._is_content(sentinel) for sentinel in self.sentinels)

        self._until(content, "sentinels that know everybody", timeout)

    def _is_content(self, sentinel: Node) -> bool:
        with suppress(redis.RedisError, OSError):
            service = sentinel.ask("SENTINEL", "MASTER", SERVICE)
            replicas = sentinel.ask("SENTINEL", "REPLICAS", SERVICE)
            return (
                int(service["port"]) == self.primary.port
                and service["flags"] == "master"
                and int(service["num-other-sentinels"]) == len(self.sentinels) - 1
                and len(replicas) == len(self.replicas)
                and all(each["flags"] == "slave" for each in replicas)
                and all(each["master-link-status"] == "ok" for each in replicas)
            )
        return False

    def _until(self, condition: Callable[[], bool], what: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                logs = [f"\n{node._folder.name}:{node.last_words()}" for node in self.sentinels]
                raise FleetError(f"no {what} within {timeout:g} s" + "".join(logs))
            time.sleep(LOOKS)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port


# --- the keeper's process -------------------------------------------------------------------------


def _keep(owner: int, folder: str) -> None:
    """Start, signal and kill servers for the owner, until it is gone; then kill all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while os.getppid() == owner:
            if not select.select([0], [], [], LOOK_S)[0]:
                continue
            line = b""
            while not line.endswith(b"\n") and (byte := os.read(0, 1)):
                line += byte
            if not line:
                return
            print(_obey(children, *json.loads(line)), flush=True)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _obey(children: dict[int, "subprocess.Popen[bytes]"], verb: str, *arguments: Any) -> int:
    if verb == "start":
        argv, log = arguments
        with open(log, "ab") as output:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/"
            )
        children[child.pid] = child
        return child.pid
    pid, number = (*arguments, signal.SIGKILL)[:2]
    if children[pid].poll() is not None:
        return 0
    children[pid].send_signal(number)
    if verb == "kill":
        children[pid].wait()
    return 1


if __name__ == "__main__":
    _keep(int(sys.argv[1]), sys.argv[2])
