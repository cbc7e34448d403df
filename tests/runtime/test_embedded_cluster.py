"""The embedded cluster: a real one on loopback ports, that starts in seconds and leaves nothing."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waiting import eventually

import fairqueue
from fairqueue.errors import ConfigurationError
from fairqueue.link.keys import SLOTS
from fairqueue.runtime.cluster import EmbeddedCluster


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_all_slots_are_served_by_as_many_primaries_as_wanted(cluster: EmbeddedCluster) -> None:
    assert len(cluster.nodes) == len(cluster.primaries) == 3
    owners = [cluster.owner(slot) for slot in (0, SLOTS // 2, SLOTS - 1)]
    assert owners == list(cluster.nodes)
    assert cluster.url == f"redis+cluster://{','.join(node.address for node in cluster.nodes)}/"


def test_a_slot_moves_in_one_step_and_back(cluster: EmbeddedCluster) -> None:
    first, second, _ = cluster.nodes
    cluster.move_slots(0, 9, second)
    assert cluster.owner(5) is second
    cluster.move_slots(0, 9, first)
    assert cluster.owner(5) is first


def test_a_slot_moves_key_by_key_and_back(cluster: EmbeddedCluster) -> None:
    first, second, _ = cluster.nodes
    move = cluster.moving_slot(7, second)
    move.finish()
    assert cluster.owner(move.slot) is second
    cluster.moving_slot(move.slot, first).finish()
    assert cluster.owner(move.slot) is first


def test_the_ports_of_a_node_are_nobody_elses(cluster: EmbeddedCluster) -> None:
    for node in cluster.nodes:
        with socket.socket() as sock, pytest.raises(OSError, match="in use"):
            sock.bind(("127.0.0.1", node.port))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"primaries": 0}, "primaries must be"),
        ({"replicas": -1}, "replicas must be"),
        ({"node_timeout": 0}, "node_timeout must be"),
        ({"config": {"port": "1"}}, "set by FairQueue itself"),
        ({"fsync": "never"}, "fsync must be"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EmbeddedCluster.start(**settings)  # type: ignore[arg-type]


def test_the_example_of_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(fairqueue.__file__).parent.parent / "docs" / "cluster.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    (example,) = [block for block in blocks if "EmbeddedCluster" in block]
    exec(example, {})
    assert capsys.readouterr().out == "1 3\n"


def test_nothing_is_left_when_the_process_of_a_cluster_is_killed() -> None:
    program = """if True:
        from fairqueue.testing import EmbeddedCluster
        cluster = EmbeddedCluster.start(1)
        print(*(node.server.pid for node in cluster.nodes), flush=True)
        input()
    """
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert pids
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, pids)), "all servers are gone")
