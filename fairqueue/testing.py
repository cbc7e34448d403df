"""For the tests of those who use FairQueue: a clock that stands still until it is moved.

    clock = ManualClock()
    queue = TaskQueue(fakeredis.FakeRedis(), clock=clock)
    ...
    clock.advance(60)
    scheduler.tick()
"""

from fairqueue.clock import ManualClock

__all__ = ["ManualClock"]
