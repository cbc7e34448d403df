"""Claims and exchanges of a queue with partitions of which some fail."""

import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.partitions import without
from helpers.tasks import make_task

from fairqueue.errors import RedisRefused, RedisUnavailable
from fairqueue.link.connection import Connections
from fairqueue.link.dialer import connection_maker
from fairqueue.link.partitions import partition_of
from fairqueue.queue.balance import Balance
from fairqueue.queue.permits import home_of
from fairqueue.queue.queue import TaskQueue
from fairqueue.worker.worker import Worker

PARTITIONS = 4


@pytest.fixture
def many(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    with TaskQueue(redis_client, timeout=1.0, partitions=PARTITIONS) as queue:
        queue.check()
        yield queue


def user_in(number: int) -> str:
    """A user whose tasks are in a partition."""
    names = (f"user-{i}" for i in range(1000))
    return next(name for name in names if partition_of(name, None, PARTITIONS) == number)


def push(queue: TaskQueue, number: int) -> str:
    return queue.push(make_task(user_id=user_in(number)))


def damage(client: redis.Redis, queue: TaskQueue, number: int) -> bytes:
    """Let a partition refuse all claims and finishes; returns the key that is in the way."""
    key = queue.link.parts[number].keys["leases"]
    client.delete(key)
    client.set(key, "of another program")
    return key


def age(queue: TaskQueue) -> None:
    """Let some time pass since all partitions were asked."""
    for known in queue.__dict__["_balances"].values():
        known.asked_at -= 2


def test_a_claim_says_that_no_partition_answers(many: TaskQueue) -> None:
    with without(many, *range(PARTITIONS)):
        for _ in range(2):
            with pytest.raises(RedisUnavailable):
                many.claim("w")
            with pytest.raises(RedisUnavailable):
                many.exchange([], "w", 1)
    assert many.claim("w") == [], "asked again at once: there was no other one to ask"


def test_an_exchange_says_that_nothing_could_be_recorded(many: TaskQueue) -> None:
    push(many, 1)
    (claim,) = many.claim("w")
    age(many)
    with without(many, *range(PARTITIONS)), pytest.raises(RedisUnavailable):
        many.exchange([(claim, None)], "w", 1)
    words, _ = many.exchange([(claim, None)], "w", 1)
    assert words == ["finished"]


def test_a_partition_that_refuses_does_not_keep_workers_from_the_others(
    many: TaskQueue, redis_client: redis.Redis
) -> None:
    key = damage(redis_client, many, 2)
    pushed = [push(many, number) for number in (0, 1, 3)]
    claims = many.claim("w", limit=10)
    assert sorted(each.task.task_id for each in claims) == sorted(pushed)
    words, _ = many.exchange([(each, None) for each in claims], "w", 10)
    assert words == ["finished"] * 3
    with pytest.raises(RedisRefused, match="another program"):
        many.claim("w")  # nothing else is left to be said
    redis_client.delete(key)


def test_a_result_that_is_refused_does_not_lose_what_others_do(
    many: TaskQueue, redis_client: redis.Redis
) -> None:
    push(many, 1)
    push(many, 2)
    claims = {claim.partition: claim for claim in many.claim("w", limit=2)}
    third = push(many, 1)
    key = damage(redis_client, many, 2)
    results = [(claims[number], None) for number in (1, 2)]
    words, answer = many.exchange(results, "w", 5)
    assert words == ["finished", "not_recorded"]
    assert [claim.task.task_id for claim in answer.claims] == [third]
    with pytest.raises(RedisRefused):
        many.exchange([(claims[2], None)], "w", 0)
    redis_client.delete(key)


def test_a_claim_does_not_wait_for_the_home_of_each_limit(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leases run meanwhile."""
    names = [name for i in range(100) if home_of(name := f"name-{i}", PARTITIONS) == 0][:8]
    with (
        TaskQueue(redis_client, timeout=1.0, partitions=PARTITIONS) as queue,
        socket.create_server(("127.0.0.1", 0)) as silent,  # accepts, and never answers
    ):
        for name in names:
            queue.set_limits(name, slots=1)
            queue.push(make_task(user_id=user_in(1), name=name))
        free = push(queue, 1)
        nobody = connection_maker(redis.Redis(port=silent.getsockname()[1]), 1.0)
        monkeypatch.setattr(queue.link.parts[0], "connections", Connections(nobody))
        began = time.monotonic()
        claims = queue.claim("w", limit=10)
        assert time.monotonic() - began < 5.0
        assert [claim.task.task_id for claim in claims] == [free]


def test_an_idle_worker_does_not_poll(many: TaskQueue) -> None:
    many.claim("w")
    age(many)
    _, answer = many.exchange([], "w", 1)
    assert answer.hint > 5, "all were asked just now: a token tells of new tasks"


def test_a_partition_that_was_away_learns_what_a_worker_declares(many: TaskQueue) -> None:
    worker = Worker(many)
    worker.register("mail", lambda task: None, slots=2)
    with without(many, 2):
        worker.run_once()
    twin = many.at(many.link.parts[2])
    assert twin.get_limits() == {}
    worker.run_once()
    assert twin.get_limits() == many.get_limits() != {}


def test_threads_that_share_what_is_known_do_not_disturb_each_other() -> None:
    known = Balance(8)
    errors: list[Exception] = []
    over = threading.Event()

    def claims(number: int) -> None:
        at = 0
        while not over.is_set():
            at += 1
            try:
                known.best()
                floor = known.floors(number)
                assert floor[0] != "~", "others serve"
                known.note(number, f"{at % 7} =0".encode(), 0.0, has_more=True)
            except Exception as error:
                errors.append(error)

    for number in range(8):
        known.note(number, b"1 =0", 0.0, has_more=True)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=claims, args=(number,)) for number in range(4)]
    try:
        for thread in threads:
            thread.start()
        over.wait(0.5)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(usual)
    assert errors == []


def test_a_full_queue_can_be_drained_by_new_workers(own_server: OwnServer) -> None:
    """Also of tasks whose limits span partitions."""
    url, drained = own_server().url, 0
    with TaskQueue.from_url(url, partitions=PARTITIONS) as queue:
        queue.set_limits("mail", slots=1)
        queue.set_limits("sms", rate=1000.0)
        for number in range(PARTITIONS):
            queue.push(make_task(user_id=user_in(number), name="mail"))
            queue.push(make_task(user_id=user_in(number), name="sms"))
    with redis.Redis.from_url(url) as client:
        client.config_set("maxmemory", 1)
    with TaskQueue.from_url(url, partitions=PARTITIONS) as queue:
        end = time.monotonic() + 10.0
        while drained < 2 * PARTITIONS and time.monotonic() < end:
            for claim in queue.claim("w", limit=10, wait=0.5):
                queue.finish(claim)
                drained += 1
    assert drained == 2 * PARTITIONS
