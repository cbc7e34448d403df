"""max_waiting of a queue with partitions: exact over all of them, wherever the tasks are."""

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest
import redis
from helpers.tasks import make_task

from fairqueue.clock import ManualClock
from fairqueue.errors import QueueFull, RedisUnavailable
from fairqueue.link.operation import Call, Gather, Operation
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.waiting_room import make_room

PARTITIONS = 4
MOST = 20


@pytest.fixture
def many(redis_client: redis.Redis, clock: ManualClock) -> Iterator[TaskQueue]:
    with TaskQueue(redis_client, clock=clock, partitions=PARTITIONS) as queue:
        queue.configure(max_waiting=MOST)
        yield queue


def rooms(queue: TaskQueue) -> list[int]:
    """The room of each partition, and what is on its way to another one."""
    settings = [part.ask(("HGETALL", part.keys["settings"]))[0] for part in queue.link.parts]
    fields = [dict(zip(flat[::2], flat[1::2], strict=True)) for flat in settings]
    found = []
    for number, own in enumerate(fields):
        to, count, gift = (own.get(b"waiting_gift") or b"0 0 none").split()
        has_arrived = fields[int(to)].get(f"waiting_from_{number}".encode()) == gift
        found.append(int(own[b"waiting_room"]) + (0 if has_arrived else int(count)))
    return found


def test_one_user_may_have_all_that_may_wait(many: TaskQueue) -> None:
    for i in range(MOST):
        many.push(make_task("ann", f"t{i}"))
    with pytest.raises(QueueFull, match="max_waiting is reached for the queue"):
        many.push(make_task("ann", "one more"))
    assert many.size() == MOST
    assert sum(rooms(many)) == MOST


def test_push_many_moves_room_as_well(many: TaskQueue) -> None:
    many.push_many([make_task("ann", f"t{i}") for i in range(MOST)])
    with pytest.raises(QueueFull):
        many.push_many([make_task("bob", "b")])
    assert many.size() == MOST


def test_room_comes_back_to_where_it_is_needed(many: TaskQueue) -> None:
    many.push_many([make_task("ann", f"t{i}") for i in range(MOST)])
    for claim in many.claim("w", limit=MOST):
        many.finish(claim)
    for user in ("bob", "cy", "dan", "eve"):
        many.push_many([make_task(user, f"{user}-{i}") for i in range(MOST // 4)])
    assert many.size() == MOST


def test_another_max_waiting_is_shared_out_anew(many: TaskQueue) -> None:
    many.push_many([make_task("ann", f"t{i}") for i in range(MOST)])
    many.configure(max_waiting=2 * MOST)
    many.push_many([make_task("ann", f"more-{i}") for i in range(MOST)])
    with pytest.raises(QueueFull):
        many.push(make_task("bob"))
    assert sum(rooms(many)) == 2 * MOST


class _Died(Exception):
    """The client is gone."""


def dying(steps: Operation[bool], left: list[int]) -> Operation[bool]:
    """An operation of which only some more requests are sent."""
    answer = None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            return bool(end.value)
        if left[0] == 0:
            steps.close()
            raise _Died
        left[0] -= isinstance(request, Call | Gather) or hasattr(request, "steps")
        answer = yield request


@pytest.mark.parametrize("seed", range(3))
def test_room_is_neither_lost_nor_doubled_when_clients_die_on_the_way(
    many: TaskQueue, seed: int
) -> None:
    rng = random.Random(seed)
    pushed = 0
    for _ in range(60):
        number = rng.randrange(PARTITIONS)
        part = many.link.parts[number]
        with suppress(_Died):
            part.perform(dying(make_room(part, rng.randint(1, 8)), [rng.randint(0, 6)]))
        if rng.random() < 0.3:
            with suppress(QueueFull):
                many.push(make_task(f"u{rng.randrange(9)}"))
                pushed += 1
        assert sum(rooms(many)) <= MOST
        assert many.size() == pushed <= MOST
    for part in many.link.parts:
        part.perform(make_room(part, 1))
    assert sum(rooms(many)) == MOST


def test_a_partition_that_does_not_answer_gives_nothing(many: TaskQueue) -> None:
    with pytest.MonkeyPatch.context() as patch:
        silent = many.link.parts[0]
        patch.setattr(silent, "ask_again", _unavailable)
        many.push_many([make_task("ann", f"t{i}") for i in range(MOST // 2)])
    assert many.size() == MOST // 2


def _unavailable(*_: object, **__: object) -> None:
    raise RedisUnavailable("Redis did not answer")
