"""Clusters whose nodes fail, come and go."""

from collections.abc import Callable

from fairqueue.link.keys import SLOTS
from fairqueue.runtime.cluster import EmbeddedCluster

OwnCluster = Callable[..., EmbeddedCluster]


def test_nodes_of_an_embedded_cluster_come_and_go(own_cluster: OwnCluster) -> None:
    cluster = own_cluster(1, 1, fsync="always")
    (primary,) = cluster.primaries
    primary.ask("SET", "a", "1")
    added = cluster.add()
    cluster.move_slots(0, SLOTS // 2, added)
    assert cluster.primaries == [primary, added]
    cluster.remove(added)
    assert cluster.owner(0) is primary
    replica = cluster.fail_over(primary)
    assert cluster.primaries == [replica]
    primary.kill()
    replica.kill()
    replica.restart()
    primary.restart()
    cluster.wait()
    assert cluster.primaries[0].ask("GET", "a") == b"1", "kept by fsync"
