"""Every command that changes something can be sent twice: the second changes nothing more.

The client repeats a command when its reply is lost. So each is sent again here, at once and after
what may happen in between, and the whole state is compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from helpers.network import LossyProxy
from helpers.state import changes, stats
from helpers.tasks import claim_one, ids_of, make_task, push
from helpers.world import World

from fairqueue.errors import InvalidTask, LeaseLost
from fairqueue.models import Claim
from fairqueue.queue.claim import CLAIM_HEAD
from fairqueue.queue.push import push_row
from fairqueue.queue.queue import TaskQueue


@dataclass(frozen=True)
class Command:
    """A script with its arguments, to be sent as often as one likes."""

    name: str
    arguments: dict[str, Any]

    def send(self, queue: TaskQueue) -> Any:
        return queue.link.run(self.name, **self.arguments)


def tasks_in(answer: list[Any]) -> list[Any]:
    """What a claim answered but for the times: id, document, attempt and due time of each task."""
    return [answer[i : i + 4] for i in range(CLAIM_HEAD, len(answer), 4)]


def held(world: World) -> Claim:
    """A claim on `alice-0`, of four tasks of alice and bob each."""
    world.fill("alice", 4)
    world.fill("bob", 4)
    claim = world.claim_one(lease=30)
    assert claim.task.task_id == "alice-0"
    return claim


FAILURE = {"error": "no", "timed_out": "", "report": '{"n":1}', "cost": "2.5"}


def claim_arguments(op: str, limit: int) -> dict[str, Any]:
    """The arguments of a claim of tasks of any name."""
    fixed = {"worker": "w", "lease_ms": 30_000, "place": "here", "names": "", "pools": ""}
    return {"op": op, "limit": limit, "floor": "", **fixed}


def command_of(name: str, world: World) -> Command:
    """A command that will be done when it is sent for the first time."""
    claim = held(world)
    mine = {"op": f"op-{name}", "id": claim.task.task_id, "token": claim.token}
    new = [make_task("carol", f"new-{n}") for n in range(3)] + [make_task("dave", "d", delay=9)]
    arguments: dict[str, dict[str, Any]] = {
        "push": {"rest": [argument for task in new for argument in push_row(task)]},
        "claim": claim_arguments("op-claim", limit=3),
        "finish": {"rest": [claim.task.task_id, claim.token, '{"ok":1}', "1.5", '{"n":1}', "3"]},
        "retry": {**mine, **FAILURE, "delay_ms": 0},
        "retry later": {**mine, **FAILURE, "delay_ms": 5000},
        "release": mine,
        "bury": {**mine, **FAILURE, "fingerprint": "f"},
        "cancel": {"op": "op-cancel", "id": "bob-1"},
        "cancel running": {"op": "op-cancel", "id": claim.task.task_id},
        "cancel unknown": {"op": "op-cancel", "id": "nobody"},
        "extend": {
            "op": "op-extend",
            "lease_ms": 60_000,
            "rest": [claim.task.task_id, claim.token, "nobody", "token"],
        },
        "set_user": {
            "op": "op-set_user",
            "owner": "alice",
            "user": "alice",
            "tenant": "",
            "change": '{"weight":0.25,"max_running":1,"rate":5}',
        },
        "set_limits": {
            "op": "op-set_limits",
            "field": "default",
            "limits": '{"slots":1}',
            "after": "",
        },
        "reschedule": {"op": "op-reschedule", "id": "bob-1", "when": "+5000"},
        "reschedule running": {"op": "op-reschedule", "id": claim.task.task_id, "when": ""},
        "configure": {"op": "op-configure", "rest": ["max_attempts", 3, "cost", "time"]},
        "configure refused": {"op": "op-configure", "rest": ["ageing_ms", 3]},
    }
    return Command(name.split()[0], arguments[name])


NAMES = [
    "push",
    "claim",
    "finish",
    "retry",
    "retry later",
    "release",
    "bury",
    "cancel",
    "cancel running",
    "cancel unknown",
    "extend",
    "set_user",
    "set_limits",
    "reschedule",
    "reschedule running",
    "configure",
    "configure refused",
]

# A repeated push is counted, and says that none of its tasks is new. Nothing else may differ.
COUNTED = {"push": {"stats.duplicates": (None, "4")}}
ANSWERS_AGAIN: dict[str, Any] = {"push": [b"pushed", 0]}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("later", [0, 1, 29.9])
def test_a_repeated_command_changes_nothing(world: World, name: str, later: float) -> None:
    command = command_of(name, world)
    before = world.dump()
    first = command.send(world.queue)
    once = world.dump()
    assert once != before
    world.advance(later)
    again = command.send(world.queue)
    assert changes(once, world.dump()) == COUNTED.get(name, {})
    if name == "claim":
        assert tasks_in(again) == tasks_in(first)
        assert len(tasks_in(again)) == 3
    else:
        assert again == ANSWERS_AGAIN.get(name, first)


@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_command_is_recognised_after_many_others(world: World, name: str) -> None:
    """The generation of remembered operations turns once in between."""
    world.queue.configure(keep_finished=0, keep_dead=0)
    command = command_of(name, world)
    world.advance(59)
    first = command.send(world.queue)
    world.advance(2)
    for n in range(30):
        world.push(f"x{n}", user_id="zoe")
        world.queue.cancel(f"x{n}")
    world.advance(26)
    once = world.dump()
    again = command.send(world.queue)
    assert changes(once, world.dump()) == COUNTED.get(name, {})
    if name == "claim":
        assert tasks_in(again) == tasks_in(first)
    else:
        assert again == ANSWERS_AGAIN.get(name, first)


def everything_ends(queue: TaskQueue) -> None:
    """All that is left is claimed by others and finished, and no record is kept."""
    queue.configure(keep_finished=0, keep_dead=0)
    for user in ("alice", "bob"):
        queue.set_user(user, max_running=None, rate=None)
    while claims := queue.claim("other", limit=50):
        queue.finish_many((claim, None) for claim in claims)


def claimed_by_another(queue: TaskQueue) -> None:
    queue.claim("other", limit=2)


def cancelled_meanwhile(queue: TaskQueue) -> None:
    for n in range(4):
        queue.cancel(f"alice-{n}")


MEANWHILE: dict[str, Callable[[TaskQueue], None]] = {
    "everything ended": everything_ends,
    "claimed by another": claimed_by_another,
    "cancelled": cancelled_meanwhile,
}


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "claim"])
def test_a_repeated_command_is_recognised(world: World, name: str, meanwhile: str) -> None:
    command = command_of(name, world)
    first = command.send(world.queue)
    MEANWHILE[meanwhile](world.queue)
    once = world.dump()
    again = command.send(world.queue)
    after = changes(once, world.dump())
    if name == "push":
        assert after.pop("stats.duplicates") == (None, "4")
    assert after == {}
    assert again == ANSWERS_AGAIN.get(name, first)


def test_a_claim_sent_again_returns_only_what_it_still_holds(world: World) -> None:
    command = command_of("claim", world)
    command.send(world.queue)
    records = world.dump()["status"]
    mine = [task_id for task_id, record in records.items() if record.get("token") == "op-claim"]
    world.queue.link.run("finish", rest=[mine[0], "op-claim", "", "", ""])
    again = command.send(world.queue)
    assert sorted(task[0].decode() for task in tasks_in(again)) == sorted(mine[1:])


def test_a_claim_whose_leases_have_expired_claims_anew(world: World) -> None:
    command = command_of("claim", world)
    first = command.send(world.queue)
    world.advance(31)
    others = world.queue.claim("other", limit=8)
    assert {task[0].decode() for task in tasks_in(first)} <= set(ids_of(others))
    assert tasks_in(command.send(world.queue)) == []
    world.queue.release(others[0])
    ((task_id, *_),) = tasks_in(command.send(world.queue))
    assert task_id.decode() == others[0].task.task_id


def test_a_claim_that_found_nothing_may_find_something_when_it_is_sent_again(world: World) -> None:
    command = Command("claim", claim_arguments("op", limit=1))
    assert tasks_in(command.send(world.queue)) == []
    empty = world.dump()
    assert tasks_in(command.send(world.queue)) == []
    assert world.dump() == empty
    world.push("t1")
    assert tasks_in(command.send(world.queue))[0][0] == b"t1"


def test_a_repeated_claim_tells_the_lease_as_it_is(world: World) -> None:
    world.push("t1")
    run = world.queue.link.run
    answers = []

    def lost_reply(name: str, **arguments: Any) -> Any:
        answers.append(run(name, **arguments))
        world.advance(10)
        return run(name, **arguments)

    with world.monkeypatch.context() as patched:
        patched.setattr(world.queue.link, "run", lost_reply)
        world.queue.check()
        (claim,) = world.queue.claim("w", lease=30)
    assert claim.lease_until == world.info("t1").lease_until


def test_a_finish_sent_again_by_a_worker_that_lost_its_lease_is_refused_again(world: World) -> None:
    claim = held(world)
    world.advance(31)
    world.queue.claim("other", limit=8)
    before = world.dump()
    command = Command("finish", {"rest": [claim.task.task_id, claim.token, "", "", ""]})
    assert command.send(world.queue) == [b"lost_lease"]
    assert command.send(world.queue) == [b"lost_lease"]
    assert changes(before, world.dump()) == {"stats.lost_leases": (None, "2")}


@pytest.mark.parametrize("name", ["retry", "release", "bury"])
def test_a_refusal_sent_again_is_refused_again(world: World, name: str) -> None:
    command = command_of(name, world)
    world.advance(31)
    world.queue.claim("other", limit=8)
    assert command.send(world.queue) == b"lost_lease"
    once = world.dump()
    assert command.send(world.queue) == b"lost_lease"
    assert world.dump() == once


@pytest.mark.parametrize("asked", [False, True], ids=["finished", "cancelled"])
def test_a_repeated_finish_of_a_gone_task_says_how_it_ended(world: World, asked: bool) -> None:
    world.queue.configure(keep_finished=0)
    claim = held(world)
    if asked:
        world.queue.cancel(claim.task.task_id)
    command = Command("finish", {"rest": [claim.task.task_id, claim.token, "", "", ""]})
    first = command.send(world.queue)
    assert first == [b"cancelled" if asked else b"finished"]
    assert world.queue.get(claim.task.task_id) is None
    assert command.send(world.queue) == first


def test_a_buried_task_that_is_gone_is_not_finished(world: World) -> None:
    world.queue.configure(keep_dead=0)
    claim = held(world)
    world.queue.bury(claim, "no")
    assert world.queue.get(claim.task.task_id) is None
    with pytest.raises(LeaseLost):
        world.queue.finish(claim)


def test_a_push_that_was_refused_can_be_sent_again_and_done(queue: TaskQueue) -> None:
    queue.configure(max_waiting=1)
    push(queue, "t1")
    command = Command("push", {"rest": [*push_row(make_task(task_id="t2"))]})
    assert command.send(queue)[0] == b"full"
    queue.finish(claim_one(queue))
    assert command.send(queue) == [b"pushed", 1]


# --- replies that are lost on the way -------------------------------------------------------------


def test_a_lost_reply_repeats_no_call(far: TaskQueue, near: redis.Redis, proxy: LossyProxy) -> None:
    assert proxy.losing(lambda: far.push(make_task(task_id="t1"))) == "t1"
    assert proxy.losing(lambda: far.push(make_task(task_id="t2")), replies=3) == "t2"
    many = [make_task(task_id=f"many-{n}") for n in range(700)]
    assert len(proxy.losing(lambda: far.push_many(many), replies=2)) == 700
    assert stats(near)["pushed"] == 702
    (one,) = proxy.losing(lambda: far.claim("w"))
    (two,) = proxy.losing(lambda: far.claim("w"))
    (three,) = proxy.losing(lambda: far.claim("w"))
    (four,) = far.claim("w")
    assert ids_of([one, two, three, four]) == ["t1", "t2", "many-0", "many-1"]
    assert stats(near)["claimed"] == 4
    assert proxy.losing(lambda: far.extend([one, two])) == ["extended", "extended"]
    proxy.losing(lambda: far.finish(one, {"ok": True}))
    proxy.losing(lambda: far.retry(two, "again", delay=60))
    proxy.losing(lambda: far.release(three))
    proxy.losing(lambda: far.bury(four, "no"))
    assert proxy.losing(lambda: far.cancel("many-5")) is True
    assert proxy.losing(lambda: far.set_user("alice", weight=2.0)).weight == 2.0
    assert proxy.losing(lambda: far.configure(max_attempts=2)).max_attempts == 2
    counted = stats(near)
    assert counted.pop("duplicates") > 0
    assert counted == {
        "pushed": 702,
        "claimed": 4,
        "finished": 1,
        "retried": 1,
        "released": 1,
        "buried": 1,
        "cancelled": 1,
    }
    (again,) = far.claim("w")
    assert (again.task.task_id, again.attempt) == ("many-0", 1)


def test_a_lost_refusal_is_repeated(far: TaskQueue, near: redis.Redis, proxy: LossyProxy) -> None:
    push(far, "t1")
    claim = claim_one(far)
    far.finish(claim)
    proxy.drop_replies(2)
    with pytest.raises(LeaseLost):
        far.retry(claim)
    proxy.drop_replies(2)
    with pytest.raises(InvalidTask):
        far.push(make_task(task_id="t1", payload={"other": 1}))
    assert stats(near)["lost_leases"] == 1
