import resource
import socket
import threading

import pytest

from fairqueue import connection
from fairqueue.connection import in_batches
from fairqueue.queue import TaskQueue


def test_a_wait_ends_when_another_thread_nudges_it(queue: TaskQueue) -> None:
    listener = queue.link.listener("wake")
    threading.Thread(target=listener.nudge).start()
    assert listener.wait(60) is True
    assert listener.wait(0.001) is False, "one nudge ends one wait"
    listener.close()


def test_an_interrupted_listener_waits_no_more(queue: TaskQueue) -> None:
    listener = queue.link.listener("wake")
    listener.interrupt()
    assert listener.wait(60) is True
    assert listener.wait(60) is True
    listener.close()


def test_a_token_that_comes_between_two_waits_is_not_missed(queue: TaskQueue) -> None:
    listener = queue.link.listener("wake")
    assert listener.wait(0.001) is False
    queue.link.ask(("LPUSH", queue.keys["wake"], "1"))
    assert listener.wait(60) is True
    listener.close()


def test_file_descriptors_beyond_the_reach_of_select_can_be_waited_for(
    queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2200:
        monkeypatch.setattr(connection, "SELECTABLE", 0)
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2200), hard))
    opened: list[socket.socket] = []
    try:
        while connection.SELECTABLE and (not opened or opened[-1].fileno() < 1100):
            opened.append(socket.socket())
        listener = queue.link.listener("wake")
        assert listener.wait(0.001) is False
        queue.link.ask(("LPUSH", queue.keys["wake"], "1"))
        assert listener.wait(60) is True
        listener.close()
    finally:
        for sock in opened:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_batches_are_bounded_by_number_and_by_size() -> None:
    def sizes(items: list[int], most: int) -> list[list[int]]:
        return [list(batch) for batch in in_batches(items, most, lambda size: size)]

    million = connection.BATCH_BYTES
    assert sizes([], 2) == []
    assert sizes([1, 1, 1, 1, 1], 2) == [[1, 1], [1, 1], [1]]
    assert sizes([million, million, 1], 10) == [[million], [million], [1]]
    assert sizes([3 * million], 10) == [[3 * million]], "one that is too large goes alone"
