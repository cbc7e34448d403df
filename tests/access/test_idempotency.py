"""A request that is sent again is answered as before, and not done again."""

import hashlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from helpers.network import LossyProxy
from helpers.state import dump
from helpers.world import World

from fairqueue.access.idempotency import Begun, ReplyStore
from fairqueue.errors import InvalidInput
from fairqueue.queue.queue import TaskQueue

DAY = 86_400.0
HEADERS = {"content-type": "application/json", "etag": '"1"'}


@pytest.fixture
def store(queue: TaskQueue) -> ReplyStore:
    return ReplyStore(queue.link)


def field_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def do(store: ReplyStore, key: str, status: int = 201, body: str = "{}") -> Begun:
    """A request that was done."""
    begun = store.begin(key, "d")
    assert begun.state == "new"
    assert store.done(key, status, HEADERS, body, token=begun.token) is True
    return begun


# --- one request ----------------------------------------------------------------------------------


def test_a_request_is_new_then_running_then_done(store: ReplyStore) -> None:
    begun = store.begin("k", "d")
    assert begun == Begun(state="new", token=begun.token)
    assert begun.token
    assert store.begin("k", "d") == Begun(state="running")
    assert store.done("k", 201, HEADERS, '{"id": "Zoë"}') is True
    answer = Begun(state="done", status=201, headers=HEADERS, body='{"id": "Zoë"}')
    assert store.begin("k", "d") == answer
    assert store.begin("k", "d") == answer


def test_another_request_with_the_same_key_is_told_apart(store: ReplyStore) -> None:
    store.begin("k", "d")
    assert store.begin("k", "e") == Begun(state="other")
    store.done("k", 200, {}, "")
    assert store.begin("k", "e") == Begun(state="other")
    assert store.begin("other", "e").state == "new"


def test_a_request_that_was_given_up_may_be_sent_again_at_once(store: ReplyStore) -> None:
    begun = store.begin("k", "d")
    store.drop("k", token=begun.token)
    store.drop("k", token=begun.token)
    assert store.begin("k", "e").state == "new"


def test_an_answer_that_is_kept_cannot_be_given_up(store: ReplyStore) -> None:
    begun = do(store, "k")
    store.drop("k")
    store.drop("k", token=begun.token)
    assert store.begin("k", "d").state == "done"


def test_the_first_answer_stands(store: ReplyStore) -> None:
    do(store, "k", status=201, body="one")
    assert store.done("k", 201, HEADERS, "one") is True
    assert store.done("k", 500, HEADERS, "two") is False
    assert store.begin("k", "d").body == "one"


def test_an_unbegun_request_is_not_kept(store: ReplyStore, redis_client: redis.Redis) -> None:
    assert store.done("k", 200, {}, "") is False
    assert dump(redis_client) == {}


# --- owners that are gone -------------------------------------------------------------------------


def test_a_reservation_whose_owner_is_gone_is_given_anew(store: ReplyStore, world: World) -> None:
    store.begin("k", "d")
    world.advance(59.999)
    assert store.begin("k", "d").state == "running"
    world.advance(0.001)
    assert store.begin("k", "d").state == "new"
    assert store.begin("k", "d").state == "running"


def test_an_owner_who_lost_the_reservation_changes_nothing(store: ReplyStore, world: World) -> None:
    slow = store.begin("k", "d")
    world.advance(60)
    quick = store.begin("k", "d")
    store.drop("k", token=slow.token)
    assert store.done("k", 500, {}, "slow", token=slow.token) is False
    assert store.begin("k", "d").state == "running"
    assert store.done("k", 200, {}, "quick", token=quick.token) is True
    assert store.begin("k", "d").body == "quick"


def test_of_many_who_begin_a_request_at_the_same_time_one_gets_it(store: ReplyStore) -> None:
    together = threading.Barrier(8)

    def begin(_: int) -> str:
        together.wait(30)
        return store.begin("k", "d").state

    with ThreadPoolExecutor(8) as pool:
        states = sorted(pool.map(begin, range(8)))
    assert states == ["new"] + ["running"] * 7


def test_a_lost_reply_repeats_no_call(far: TaskQueue, proxy: LossyProxy) -> None:
    store = ReplyStore(far.link)
    begun = proxy.losing(lambda: store.begin("k", "d"))
    assert begun.state == "new"
    assert proxy.losing(lambda: store.done("k", 200, HEADERS, "x", token=begun.token)) is True
    assert proxy.losing(lambda: store.begin("k", "d")).body == "x"


# --- large, odd and spoilt ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "body"),
    [({}, "x" * 65_537), ({}, "\u2603" * 30_000), ({"x": "y" * 9000}, "small")],
    ids=["body", "wide body", "headers"],
)
def test_a_long_answer_has_a_status(store: ReplyStore, headers: dict[str, str], body: str) -> None:
    store.begin("k", "d")
    assert store.done("k", 201, headers, body) is True
    assert store.begin("k", "d") == Begun(state="done", status=201, is_whole=False)


def test_an_answer_of_the_largest_size_is_kept(store: ReplyStore) -> None:
    body = '\0"' * 32_768
    store.begin("k", "d")
    store.done("k", 200, {}, body)
    assert store.begin("k", "d") == Begun(state="done", status=200, body=body)


@pytest.mark.parametrize("body", ["", "\ud800", "\0", "\u2603\U0001f600", '\\"/'])
def test_a_body_may_be_any_text(store: ReplyStore, body: str) -> None:
    store.begin("k", "d")
    store.done("k", 200, {}, body)
    assert store.begin("k", "d").body == body.replace("\ud800", "?")


@pytest.mark.parametrize("key", ["a\0b", "\ud800", " ", "x" * 1000, "\u2603"])
def test_a_key_may_be_any_text(store: ReplyStore, key: str) -> None:
    assert [store.begin(key, "d").state for _ in range(2)] == ["new", "running"]


@pytest.mark.parametrize("key", ["", "x" * 1001, None, 7, b"k"])
def test_a_bad_key_stores_nothing(store: ReplyStore, redis_client: redis.Redis, key: Any) -> None:
    for call in (
        lambda: store.begin(key, "d"),
        lambda: store.done(key, 200, {}, ""),
        lambda: store.drop(key),
    ):
        with pytest.raises(InvalidInput, match="key of a request"):
            call()
    assert dump(redis_client) == {}


@pytest.mark.parametrize("digest", ["", None, "a\0b"])
def test_a_digest_that_is_none_is_refused(store: ReplyStore, digest: Any) -> None:
    with pytest.raises(InvalidInput, match="digest"):
        store.begin("k", digest)


@pytest.mark.parametrize("status", [99, 600, "200", None, True])
def test_a_status_that_is_none_is_refused(store: ReplyStore, status: Any) -> None:
    store.begin("k", "d")
    with pytest.raises(InvalidInput, match="status"):
        store.done("k", status, {}, "")


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "x",
        "[]",
        "null",
        '{"digest":"d"',
        '{"digest":"d"}',
        '{"digest":7,"owner":"o","at":1}',
        '{"digest":"d","owner":"o","at":1,"status":"x","headers":"{}","body":""}',
        '{"digest":"d","owner":"o","at":1,"status":200,"headers":null,"body":""}',
    ],
)
@pytest.mark.parametrize("generation", ["replies", "replies_before"])
def test_a_record_that_somebody_has_spoilt_counts_as_none(
    store: ReplyStore, world: World, generation: str, garbage: str
) -> None:
    world.redis.hset(world.keys[generation], field_of("k"), garbage)
    assert store.done("k", 200, {}, "") is False
    store.drop("k")
    begun = store.begin("k", "d")
    assert begun.state == "new"
    assert store.done("k", 200, {}, "", token=begun.token) is True


@pytest.mark.parametrize("headers", ["x", "[]", "null"])
def test_an_answer_whose_headers_are_spoilt_is_one_of_which_the_status_is_known(
    store: ReplyStore, world: World, headers: str
) -> None:
    answer = {"status": 200, "headers": headers, "body": "b"}
    record = json.dumps({"digest": "d", "owner": "o", "at": 1, **answer})
    world.redis.hset(world.keys["replies"], field_of("k"), record)
    assert store.begin("k", "d") == Begun(state="done", status=200, is_whole=False)


# --- generations ----------------------------------------------------------------------------------


def test_an_answer_is_kept_between_one_and_two_days(store: ReplyStore, world: World) -> None:
    do(store, "first")
    world.advance(DAY)
    do(store, "last")
    world.advance(1)
    do(store, "next")  # turns the generations
    assert [store.begin(key, "d").state for key in ("first", "last")] == ["done", "done"]
    world.advance(DAY)
    assert store.begin("last", "d").state == "done"
    world.advance(1)
    do(store, "later")
    assert store.begin("next", "d").state == "done"
    assert store.begin("first", "d").state == "new"


def test_a_reservation_outlives_a_change_of_generations(store: ReplyStore, world: World) -> None:
    do(store, "old")
    world.advance(DAY)
    begun = store.begin("k", "d")
    world.advance(1)
    do(store, "new")
    assert store.begin("k", "d").state == "running"
    assert store.done("k", 200, {}, "", token=begun.token) is True
    assert store.begin("k", "d").state == "done"


def test_generations_change_when_answers_are_too_many(store: ReplyStore, world: World) -> None:
    do(store, "k")
    strangers: dict[Any, Any] = {f"x{n}": "{}" for n in range(10_000)}
    world.redis.hset(world.keys["replies"], mapping=strangers)
    do(store, "new")
    state = world.dump()
    assert state["replies"].keys() == {"", field_of("new")}
    assert len(state["replies_before"]) == 10_002
    assert store.begin("k", "d").state == "done"


def test_generations_change_when_the_answers_are_too_large(store: ReplyStore, world: World) -> None:
    do(store, "k", body="x" * 1000)
    since, size = world.dump()["replies"][""].split()
    assert 1000 < int(size) < 2000
    world.redis.hset(world.keys["replies"], "", f"{since} {33 * 1024 * 1024}")
    do(store, "new")
    assert world.dump()["replies"].keys() == {"", field_of("new")}
    assert store.begin("k", "d").state == "done"


@pytest.mark.parametrize("spoilt", ["x", "", "1 -1", "1e400 1"])
def test_a_spoilt_generation_begins_anew(store: ReplyStore, world: World, spoilt: str) -> None:
    do(store, "k")
    world.redis.hset(world.keys["replies"], "", spoilt)
    do(store, "new")
    assert store.begin("k", "d").state == "done"
