"""Keep the threads of a worker running, whatever is raised in them."""

import logging
import threading
import time
from collections.abc import Callable

from fairqueue.logs import error_line, event_logger

_log = event_logger("fairqueue.worker")

# Seconds before a thread continues after an error: doubled each time, up to the longest; reset
# after that long without an error.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


def keep_going(work: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Call `work` until it returns or `is_over`; log any exception and call it again.

    Even SystemExit: a worker with a thread that ended silently looks alive and does nothing.
    """
    pause = FIRST_PAUSE_S
    while True:
        began = time.monotonic()
        try:
            return work()
        except BaseException as error:
            _log(
                "thread_failed",
                logging.ERROR,
                thread_name=threading.current_thread().name,
                error=error_line(error),
                exc_info=error,
            )
        if is_over():
            return None
        if time.monotonic() - began > LONGEST_PAUSE_S:
            pause = FIRST_PAUSE_S
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
