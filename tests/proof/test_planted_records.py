"""Records that somebody else has planted, one kind after the other: what is told of them.

tests/proof/test_fuzz.py plants whatever can be thought of, and looks whether others go on.
"""

import base64
import json
from typing import Any

import pytest
from helpers.world import World

from fairqueue import FairQueueError, Task, TaskQueue, TaskScheduler
from fairqueue.access.credentials import Actor
from fairqueue.errors import BrokenRecord, InvalidInput, InvalidSchedule
from fairqueue.history.records import read_run
from fairqueue.inspection import Inspector
from fairqueue.link.owners import Owner
from fairqueue.stats.users import UserStats

pytestmark = pytest.mark.untidy

TASK = {"user": "u", "name": "n", "priority": 3, "payload": {}}
RUN = {
    "state": "buried",
    "user": "u",
    "name": "n",
    "level": 3,
    "attempts": 1,
    "pushed": 1,
    "due": 1,
}


@pytest.mark.parametrize(
    "spoilt",
    [
        *({"payload": []}, {"payload": None}, {"user": 7}, {"name": {}}, {"schedule": 1}),
        *({"by": []}, {"retry_of": {}}, {"policy": "x"}, {"tenant": 5}),
    ],
    ids=str,
)
def test_a_task_whose_fields_are_of_a_wrong_kind_is_broken(spoilt: dict[str, Any]) -> None:
    Task.from_document("t", json.dumps(TASK).encode())
    with pytest.raises(BrokenRecord):
        Task.from_document("t", json.dumps(TASK | spoilt).encode())


@pytest.mark.parametrize(
    "spoilt",
    [
        *({"user": 7}, {"name": []}, {"type": 1}, {"by": {}}, {"schedule": 1}, {"retry_of": []}),
        *({"retried_as": 1}, {"worker": {}}, {"error": []}, {"fingerprint": 3}, {"tenant": {}}),
    ],
    ids=str,
)
def test_a_run_whose_fields_are_of_a_wrong_kind_is_none(spoilt: dict[str, Any]) -> None:
    assert read_run("t", json.dumps(RUN).encode()) is not None
    assert read_run("t", json.dumps(RUN | spoilt).encode()) is None


@pytest.mark.parametrize("record", ["[1]", "7", "null", '"x"', "{", '{"scheduler": 1, "ends": 2}'])
def test_a_record_of_the_leader_that_is_none_is_of_nobody(world: World, record: str) -> None:
    world.redis.set(world.keys["leader"], record)
    snapshot = world.queue.inspect()
    assert (snapshot.leader, snapshot.leader_until) == (None, None)


def test_a_tenant_that_is_no_text_hides_no_user(world: World) -> None:
    world.push("a", user_id="alice")
    world.redis.hset(world.keys["tenants"], "alice", b"\xff")
    (info,) = UserStats(world.queue.link).read([Owner("alice")], 0)
    assert (info.user_id, info.backlog, info.settings.tenant) == ("alice", 1, None)


def test_an_explanation_of_a_delay_that_is_no_time_says_so(world: World) -> None:
    world.push("a", delay=60)
    world.redis.zadd(world.keys["delayed"], {"a": 1e300})
    with pytest.raises(BrokenRecord, match="'a'"):
        world.queue.explain("a")


def test_a_cursor_that_is_no_text_is_refused(queue: TaskQueue) -> None:
    cursor = base64.urlsafe_b64encode(b"\xff\0s").decode()
    with pytest.raises(InvalidSchedule, match="pass the `cursor` of a page"):
        TaskScheduler(queue).list_schedules(cursor=cursor)


@pytest.mark.parametrize("fields", [7, "text", [1], None])
def test_fields_of_a_schedule_must_be_an_object(queue: TaskQueue, fields: Any) -> None:
    inspector = Inspector(queue, Actor(name="eve", role="admin", via="rest"))
    with pytest.raises(InvalidInput, match="expected the fields of a schedule"):
        inspector.schedules.import_([fields], dry_run=False)


def test_a_payload_that_stands_for_more_than_can_be_looked_at_is_refused() -> None:
    value: Any = []
    for _ in range(20):
        value = [value] * 20
    with pytest.raises(FairQueueError, match="more values than can be stored"):
        Task.create(user_id="u", payload={"a": value})
