"""What the tests of applications that use FairQueue need: a manual clock, and a cluster.

Pass the clock as `TaskQueue(client, clock=clock)`, move it with `clock.advance(60)`, and call
`scheduler.tick()`. No test has to sleep. `EmbeddedCluster.start()` starts a real cluster in
seconds.
"""

from fairqueue.clock import ManualClock
from fairqueue.runtime.cluster import EmbeddedCluster

__all__ = ["EmbeddedCluster", "ManualClock"]
