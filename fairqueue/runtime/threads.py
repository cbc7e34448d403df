"""Keep the threads of a worker at work, whatever is raised in them."""

import logging
import threading
import time
from collections.abc import Callable

from fairqueue.logs import error_line, log_event

logger = logging.getLogger("fairqueue.worker")

# Seconds before a thread goes on after something was raised in it: twice as many each time, up to
# the longest; the first again after it has gone well for that long.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


def keep_going(work: Callable[[], None], is_over: Callable[[], bool]) -> None:
    """Do the work of this thread until it returns. Whatever it raises is logged, and it goes on.

    Also SystemExit: a thread that ends silently leaves a worker that looks alive and does nothing.
    """
    pause = FIRST_PAUSE_S
    while True:
        began = time.monotonic()
        try:
            return work()
        except BaseException as error:
            _say(error)
        if is_over():
            return None
        if time.monotonic() - began > LONGEST_PAUSE_S:
            pause = FIRST_PAUSE_S
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _say(error: BaseException) -> None:
    log_event(
        logger,
        "thread_failed",
        logging.ERROR,
        thread_name=threading.current_thread().name,
        error=error_line(error),
        exc_info=error,
    )
