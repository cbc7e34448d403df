"""For the tests of those who use FairQueue: a clock that stands still until it is moved.

Pass one as `TaskQueue(client, clock=clock)`, move it with `clock.advance(60)`, and call
`scheduler.tick()`: nothing has to sleep.
"""

from fairqueue.clock import ManualClock

__all__ = ["ManualClock"]
