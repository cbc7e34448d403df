"""A manual clock for the tests of applications that use FairQueue.

Pass it as `TaskQueue(client, clock=clock)`, move it with `clock.advance(60)`, and call
`scheduler.tick()`. No test has to sleep.
"""

from fairqueue.clock import ManualClock

__all__ = ["ManualClock"]
