"""The number of a queue's layout: what another version has laid out is left alone."""

from typing import Any

import pytest
import redis
from helpers.recorded import RECORDED, load
from helpers.tasks import make_task, push
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock
from fairqueue.errors import RedisRefused, UnknownLayout
from fairqueue.link.scripts import load_script, script_names
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler

REFUSED = "queue 'default' has layout 3, which this version of FairQueue does not know"


def layout_of(queue: TaskQueue, client: redis.Redis) -> object:
    return client.hget(queue.keys["fair"], "layout")


@pytest.mark.parametrize("name", script_names())
def test_every_script_refuses_a_layout_that_it_does_not_know(world: World, name: str) -> None:
    world.push("a")
    world.redis.hset(world.keys["fair"], "layout", 3)
    before = world.state(replay=True)
    names = load_script(name).arguments
    arguments: dict[str, Any] = {argument: "" for argument in names if argument != "now_ms"}
    with pytest.raises(UnknownLayout, match=REFUSED):
        world.queue.link.run(name, **arguments)
    assert world.state(replay=True) == before
    world.redis.hset(world.keys["fair"], "layout", 1)


def test_a_layout_that_is_no_number_is_not_known_either(world: World) -> None:
    world.redis.hset(world.keys["fair"], "layout", "next")
    with pytest.raises(UnknownLayout, match="has layout next"):
        world.push("a")
    assert world.redis.hgetall(world.keys["fair"]) == {b"layout": b"next"}


def test_the_queue_of_a_later_version_is_not_deleted(world: World) -> None:
    world.push("a")
    world.redis.hset(world.keys["fair"], "layout", 3)
    with pytest.raises(UnknownLayout):
        world.queue.destroy()
    world.redis.hset(world.keys["fair"], "layout", 1)
    world.redis.set(world.keys["due"], "spoilt")
    world.queue.destroy()
    assert world.redis.keys("*") == []


def test_those_who_handle_a_refusal_by_redis_handle_this_one() -> None:
    assert issubclass(UnknownLayout, RedisRefused)


@pytest.mark.parametrize(
    "write",
    [
        lambda queue: queue.push(make_task()),
        lambda queue: queue.push(make_task(delay=60)),
        lambda queue: queue.configure(max_attempts=3),
        lambda queue: queue.set_user("alice", weight=2),
        lambda queue: queue.set_limits("mail", slots=2),
        lambda queue: TaskScheduler(queue, registry=CollectorRegistry()).add_schedule(
            "0 9 * * *", "alice"
        ),
    ],
)
def test_whoever_writes_to_a_new_queue_notes_its_layout(world: World, write: object) -> None:
    assert callable(write)
    assert layout_of(world.queue, world.redis) is None
    write(world.queue)
    assert layout_of(world.queue, world.redis) == b"1"


@pytest.mark.parametrize("name", RECORDED[:1])
def test_a_queue_without_a_number_has_the_first(name: str, redis_client: redis.Redis) -> None:
    recorded = load(redis_client, name)
    queue = TaskQueue(redis_client, clock=ManualClock(recorded["at_ms"] / 1000))
    assert layout_of(queue, redis_client) is None
    push(queue, "new")
    assert layout_of(queue, redis_client) == b"1"
