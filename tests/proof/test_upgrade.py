"""The version before and this one use one queue, as during an upgrade: docs/operations.md#upgrades.

`helpers.older` runs the version before in a process of its own. Both evaluate the same expressions,
with the same clock.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.older import OlderProcess, OlderVersion, Refused
from helpers.state import changes, check_consistency, dump
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock
from fairqueue.doctor import Records
from fairqueue.errors import LeaseLost
from fairqueue.link.owners import Owner
from fairqueue.models import Claim, Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.stats.users import UserStats

Side = Callable[[str], Any]  # evaluates an expression with one of the versions


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> OlderVersion:
    return OlderVersion("0.1.0-flat", tmp_path_factory.mktemp("older"))


@pytest.fixture
def old(version: OlderVersion, redis_url: str, world: World) -> Iterator[Side]:
    process = OlderProcess(version, redis_url, world.clock)
    yield process.do
    process.close()


@pytest.fixture
def new(world: World) -> Side:
    """The same names as in a process of the version before, with this one."""
    claims: dict[str, Claim] = {}

    def claim(limit: int = 1, lease: float = 30.0, **options: Any) -> list[str]:
        found = world.queue.claim("new", limit, lease, **options)
        claims.update({each.task.task_id: each for each in found})
        return [each.task.task_id for each in found]

    def finish(task_id: str) -> str:
        return world.queue.finish_many([(claims[task_id], None)])[0]

    scheduler = TaskScheduler(world.queue, "new", registry=CollectorRegistry())
    names = {"queue": world.queue, "scheduler": scheduler, "Task": Task, "claims": claims}
    return lambda code: eval(code, names | {"claim": claim, "finish": finish})


def push(*ids: str, user: str = "alice", **fields: Any) -> str:
    given = "".join(f", {name}={value!r}" for name, value in fields.items())
    return f"queue.push_many(Task.create(user_id={user!r}, task_id=i{given}) for i in {ids!r})"


def layout_of(world: World) -> str | None:
    found: str | None = world.dump().get("fair", {}).get("layout")
    return found


def both_ways(old: Side, new: Side) -> list[tuple[Side, Side]]:
    return [(old, new), (new, old)]


# --- side by side, while no new option is used ----------------------------------------------------


def test_each_version_runs_what_the_other_has_pushed(world: World, old: Side, new: Side) -> None:
    for n, (one, other) in enumerate(both_ways(old, new)):
        one(push(f"now-{n}"))
        one(push(f"later-{n}", delay=60))
        assert other("claim()") == [f"now-{n}"]
        assert other(f"finish('now-{n}')") == "finished"
        world.advance(60)
        assert other("claim()") == [f"later-{n}"]
        other(f"queue.retry(claims['later-{n}'], 'broken', delay=10)")
        world.advance(10)
        assert one("claim()") == [f"later-{n}"]
        one(f"queue.release(claims['later-{n}'])")
        assert other("claim()") == [f"later-{n}"]
        other(f"queue.bury(claims['later-{n}'], 'no')")
        world.check()
    assert world.places() == {"finished": ["now-0", "now-1"], "buried": ["later-0", "later-1"]}
    assert layout_of(world) == "1"


def test_each_version_takes_back_the_leases_of_the_other(
    world: World, old: Side, new: Side
) -> None:
    for n, (one, other) in enumerate(both_ways(old, new)):
        one(push(f"t{n}"))
        assert one("claim(lease=10)") == [f"t{n}"]
        world.advance(11)
        assert other("claim()") == [f"t{n}"]
        with pytest.raises((Refused, LeaseLost), match="lease"):
            one(f"queue.finish(claims['t{n}'])")
        assert other(f"finish('t{n}')") == "finished"
    assert world.stats()["expired"] == 2


def test_limits_settings_and_cancellations_hold_in_both_versions(
    world: World, old: Side, new: Side
) -> None:
    for n, (one, other) in enumerate(both_ways(old, new)):
        one(f"queue.set_limits('slow-{n}', slots=1)")
        one(f"queue.set_user('user-{n}', max_running=2, weight=3)")
        one(push(f"a{n}", f"b{n}", f"c{n}", name=f"slow-{n}"))
        one(push(*(f"{n}-{i}" for i in range(4)), user=f"user-{n}"))
        assert sorted(other("claim(10)")) == [f"{n}-0", f"{n}-1", f"a{n}"]
        assert one("claim(10)") == []  # the other two tasks are held
        assert other(f"finish('a{n}')") == "finished"
        # The version before looks at held tasks in each claim, this one when a slot is freed. It
        # finds one that an older worker has freed within ten seconds.
        world.advance(10)
        assert one("claim(1)") == [f"b{n}"]
        assert other(f"queue.cancel('c{n}')")
        assert one(f"finish('b{n}')") == "finished"
        for task_id in (f"{n}-0", f"{n}-1"):
            other(f"queue.finish(claims['{task_id}'])")
        assert sorted(one("claim(10)")) == [f"{n}-2", f"{n}-3"]
        for task_id in (f"{n}-2", f"{n}-3"):
            one(f"queue.finish(claims['{task_id}'])")
        world.check()
    assert layout_of(world) == "1"


def test_schedules_of_either_version_are_fired_by_the_other(
    world: World, old: Side, new: Side
) -> None:
    """Each moment once, whoever leads."""
    start = world.clock.now_ms()
    add = "scheduler.add_schedule('* * * * *', 'alice', schedule_id={!r})"
    old(add.format("of the old"))
    new(add.format("of the new"))
    for minute in range(20):
        world.advance(60)  # longer than a term: the first to come leads
        for side in (old, new)[:: 1 if minute % 3 else -1]:
            side("scheduler.tick() and None")
    first = -(-start // 60_000) * 60_000
    moments = [str(first + 60_000 * n) for n in range(20)]
    status = world.dump()["status"]
    for schedule in ("of the old", "of the new"):
        assert sorted(i for i in status if i.startswith(schedule)) == [
            f"{schedule}:{moment}" for moment in moments
        ]
    assert layout_of(world) == "1"


def test_each_version_reads_the_samples_and_the_state_of_the_other(
    world: World, old: Side, new: Side
) -> None:
    store = "__import__('fairqueue.stats.samples', fromlist=['x']).SampleStore(queue.link)"
    waiting = f"[n for n in {store}.read('15m').values['ready'] if n]"
    for n, (one, other) in enumerate(both_ways(old, new)):
        one(push(f"t{n}", user=f"user-{n}"))
        one(f"{store}.take()")
        world.advance(15)
        for side in (one, other):
            assert side(waiting) == [1, 2][: n + 1]
            assert side("queue.inspect().ready") == n + 1
            assert side("queue.explain('t0').summary")


class Traffic:
    """Random calls of both versions, and what must come of them."""

    USERS = ("alice", "bob", "carol")

    def __init__(self, world: World, old: Side, new: Side, chance: random.Random) -> None:
        self.world, self.sides, self.chance = world, [old, new], chance
        self.pushed: list[str] = []
        self.ended: Counter[str] = Counter()
        self.held: list[list[str]] = [[], []]  # ids of claimed tasks, by side

    def step(self) -> None:
        number = self.chance.randrange(2)
        side, held = self.sides[number], self.held[number]
        kind = self.chance.choice(KINDS)
        if kind == "push":
            new_id = f"t{len(self.pushed)}"
            self.pushed.append(new_id)
            fields: dict[str, Any] = {"name": self.chance.choice(["default", "slow", "paced"])}
            fields |= self.chance.choice([{}, {"delay": 20}, {"priority": 6}, {"priority": 2}])
            side(push(new_id, user=self.chance.choice(self.USERS), **fields))
        elif kind == "claim":
            options = self.chance.choice(["", "", ", names=['slow']", ", avoid=['slow']"])
            held += side(f"claim({self.chance.randint(1, 4)}, 60{options})")
        elif kind == "end" and held:
            self.end(side, held.pop(self.chance.randrange(len(held))))
        elif kind == "set":
            side(self.chance.choice(SETTINGS).format(user=self.chance.choice(self.USERS)))
        elif kind == "cancel" and self.pushed:
            side(f"queue.cancel({self.chance.choice(self.pushed)!r})")
        elif kind == "wait":
            self.world.advance(self.chance.choice([1, 5, 12]))

    def end(self, side: Side, task_id: str) -> None:
        how = self.chance.choice(["finish"] * 5 + ["retry", "retry later", "release", "bury"])
        ways = {
            "finish": "queue.finish(claims[{!r}])",
            "retry": "queue.retry(claims[{!r}], 'broken')",
            "retry later": "queue.retry(claims[{!r}], 'broken', delay=15)",
            "release": "queue.release(claims[{!r}])",
            "bury": "queue.bury(claims[{!r}], 'broken')",
        }
        try:
            side(ways[how].format(task_id))
        except LeaseLost:
            pass
        except Refused as error:
            if error.kind != "LeaseLost":
                raise

    def drain(self) -> None:
        """Let both versions run all that is left."""
        for user in self.USERS:
            self.sides[0](f"queue.set_user({user!r}, paused=False, max_running=None)")
        for _ in range(200):
            self.world.advance(12)
            for side in self.sides:
                for task_id in side("claim(5, 30)"):
                    side(f"finish({task_id!r})")
            if not {"ready", "delayed", "running"} & self.world.places().keys():
                return
        raise AssertionError(self.world.places())


KINDS = ["push"] * 4 + ["claim"] * 4 + ["end"] * 6 + ["set", "cancel", "wait"]
SETTINGS = [
    "queue.set_user({user!r}, paused=True)",
    "queue.set_user({user!r}, paused=False)",
    "queue.set_user({user!r}, max_running=1)",
    "queue.set_user({user!r}, weight=3, max_running=None)",
    "queue.set_limits('slow', slots=2)",
    "queue.set_limits('paced', rate=2)",
    "queue.set_limits('slow', slots=1)",
]


@pytest.mark.parametrize("seed", range(4))
def test_both_versions_work_on_one_queue_at_once(
    world: World, old: Side, new: Side, seed: int
) -> None:
    world.queue.configure(max_attempts=100)
    traffic = Traffic(world, old, new, random.Random(seed))
    for n in range(250):
        traffic.step()
        slots = [member for member in world.dump().get("slots", {}) if member.startswith("slow\0")]
        assert len(slots) <= 2
        if n % 25 == 0:
            world.check()
    traffic.drain()
    world.check()
    counted, places = world.stats(), world.places()
    assert layout_of(world) == "1"
    assert sorted(i for ids in places.values() for i in ids) == sorted(traffic.pushed)
    assert places.keys() <= {"finished", "buried", "cancelled"}
    assert counted["finished"] == len(places["finished"])
    assert [f for f in Records(world.queue.link, fix=False).compare() if f.level != "ok"] == []


# --- the upgrade of a queue with tenants ----------------------------------------------------------


def live_with_tenants(old: Side) -> None:
    """What the version before has stored and runs when the upgrade begins."""
    old("queue.set_user('heavy', weight=4, tenant='acme')")
    old("queue.set_user('capped', max_running=1, tenant='acme')")
    old("queue.set_user('paused', paused=True, tenant='acme')")
    old("queue.set_user('plain', weight=2)")
    for user in ("heavy", "capped", "paused"):
        old(push(f"{user}-0", f"{user}-1", user=user, tenant="acme"))
    old(push("plain-0", "plain-1", user="plain"))
    old(push("globex-0", user="heavy", tenant="globex"))
    old(push("later", user="heavy", tenant="acme", delay=3600))
    old(
        "scheduler.add_schedule('* * * * *', 'heavy', schedule_id='each', tenant='acme',"
        " name='each')"
    )


def test_the_order_of_a_rolling_upgrade(world: World, old: Side, new: Side) -> None:
    """docs/operations.md#upgrades: workers, then schedulers and producers, then new options."""
    live_with_tenants(old)
    running = old("claim(3, 30)")
    assert len(running) == 3

    # 1. Workers of both versions serve the queue.
    by_new = new("claim(1, 30)")
    assert old(f"finish({running[0]!r})") == "finished"
    assert new(f"finish({by_new[0]!r})") == "finished"
    assert layout_of(world) == "1"

    # 2. A producer of this version pushes what needs nothing new.
    new(push("plain-2", user="plain"))
    old(push("plain-3", user="plain"))
    assert layout_of(world) == "1"

    # 3. The first task of a tenant by this version: from now on, older processes are refused.
    new(push("pair-0", user="heavy", tenant="acme"))
    assert layout_of(world) == "2"
    before = world.state(replay=True)
    for code in OLD_CALLS:
        with pytest.raises(Refused) as refused:
            old(code.format(held=running[1]))
        assert is_clean(refused.value), code
    assert changes(before, world.state(replay=True)) == {}

    # 4. The leases of older workers expire, and workers of this version run their tasks again.
    world.advance(60)
    new("queue.set_user('paused', tenant='acme', paused=False)")
    new("queue.set_user('paused', paused=False)")
    world.advance(3600)
    ran = Counter(run_all(world, new))
    ended = {running[0], by_new[0]}
    left = {i for i in world.dump()["status"] if not i.startswith("each:")} - ended
    assert set(ran) == left
    assert set(ran.values()) == {1}
    assert set(running[1:]) <= left
    # Schedules that the version before added go on, as those of the pair.
    new("scheduler.tick() and None")
    (fired,) = [i for i in world.dump()["status"] if i.startswith("each:")]
    assert world.status_of(fired)["group"] == "acme"
    world.check()


# Calls that change something, and what the processes of the version before do all the time.
OLD_CALLS = [
    "queue.push(Task.create(user_id='plain'))",
    "queue.push(Task.create(user_id='heavy', tenant='acme', delay=60))",
    "queue.push_many(Task.create(user_id='new') for _ in range(3))",
    "claim(5)",
    "finish({held!r})",
    "queue.extend([claims[{held!r}]])",
    "queue.retry(claims[{held!r}], 'broken')",
    "queue.release(claims[{held!r}])",
    "queue.bury(claims[{held!r}], 'broken')",
    "queue.cancel('later')",
    "queue.reschedule('later', delay=5)",
    "queue.set_user('plain', weight=9)",
    "queue.set_limits('default', slots=1)",
    "queue.configure(max_attempts=9)",
    "scheduler.tick()",
    "scheduler.add_schedule('* * * * *', 'plain')",
    "scheduler.update_schedule('each', priority=5)",
    "scheduler.pause_schedule('each')",
    "scheduler.remove_schedule('each')",
    "scheduler.trigger('each')",
    "queue.inspect()",
    "queue.destroy()",
]


# Of versions without layout numbers: what does not touch tasks or only reads.
HARMLESS = {
    "queue.push(Task.create(user_id='plain'))",
    "queue.extend([claims[{held!r}]])",
    "queue.configure(max_attempts=9)",
    "scheduler.add_schedule('* * * * *', 'plain')",
    "scheduler.update_schedule('each', priority=5)",
    "scheduler.pause_schedule('each')",
    "scheduler.remove_schedule('each')",
    "scheduler.tick()",
    "queue.inspect()",
    "queue.destroy()",
}


def is_clean(refused: Refused) -> bool:
    """Whether an older version says why it is refused: the number, or the type of a key."""
    if refused.kind == "UnknownLayout":
        return "layout 2, which this version of FairQueue does not know" in refused.text
    return refused.kind == "RedisRefused" and ":usage is a string" in refused.text


def run_all(world: World, side: Side) -> list[str]:
    """The ids of all tasks that can be claimed, each of which is finished."""
    found: list[str] = []
    while ids := side("claim(10)"):
        found += ids
        for task_id in ids:
            assert side(f"finish({task_id!r})") == "finished"
    return found


def test_every_script_of_the_version_before_is_refused(world: World, old: Side) -> None:
    world.push("a", user_id="alice", tenant="acme")
    before = world.state(replay=True)
    names = old("sorted(__import__('fairqueue.link.scripts', fromlist=['x']).script_names())")
    assert len(names) > 50
    for name in names:
        with pytest.raises(Refused) as refused:
            old(
                f"link.run({name!r}, **{{a: '' for a in __import__('fairqueue.link.scripts',"
                f" fromlist=['x']).load_script({name!r}).arguments if a != 'now_ms'}})"
            )
        assert is_clean(refused.value), name
    assert changes(before, world.state(replay=True)) == {}


@pytest.fixture
def first(tmp_path: Path, redis_url: str, world: World) -> Iterator[Side]:
    """A process of a version without layout numbers."""
    process = OlderProcess(OlderVersion("0.1.0", tmp_path), redis_url, world.clock)
    yield process.do
    process.close()


@pytest.mark.untidy  # it has no index of delayed tasks
def test_a_version_without_layout_numbers_is_refused_before_it_writes(
    world: World, first: Side, new: Side
) -> None:
    live_with_tenants(first)
    first(push("t0", "t1", user="idle"))
    first("claim(3, 600)")
    held = sorted(first("list(claims)"))[0]
    new(push("pair-0", "pair-1", user="heavy", tenant="acme"))
    before = world.state(replay=True)
    for code in [each for each in OLD_CALLS if each not in HARMLESS]:
        with pytest.raises(Refused) as refused:
            first(code.format(held=held))
        assert ":usage is a string" in refused.value.text, code
        assert changes(before, world.state(replay=True)) == {}, code
    # It may lead, but it fires nothing.
    world.advance(700)
    with pytest.raises(Refused, match="usage is a string"):
        first("scheduler.tick()")
    assert not [i for i in world.dump()["status"] if i.startswith("each:")]
    # A single task without a tenant is pushed as this version would push it.
    first(push("single", user="heavy"))
    assert {"single", "pair-0", "pair-1", held} <= set(run_all(world, new))
    check_consistency(world.redis, is_old=True)


def test_a_version_without_layout_numbers_works_beside_this_one_with_layout_1(
    world: World, first: Side, new: Side
) -> None:
    for n, (one, other) in enumerate(both_ways(first, new)):
        one(push(f"a{n}", f"b{n}"))
        assert other("claim(1)") == [f"a{n}"]
        assert one("claim(1)") == [f"b{n}"]
        assert other(f"finish('a{n}')") == one(f"finish('b{n}')") == "finished"
    assert layout_of(world) == "1"


def test_settings_are_inherited_by_the_pair_that_they_were_made_for(
    world: World, old: Side, new: Side
) -> None:
    live_with_tenants(old)
    get = world.queue.get_user
    assert get("heavy", tenant="acme").weight == get("heavy").weight == 4
    assert get("heavy", tenant="globex").weight == 1  # only its tasks named it
    assert get("plain").weight == 2
    assert get("plain", tenant="acme").weight == 1
    assert get("paused", tenant="acme").paused
    new(push("of the pair", user="paused", tenant="acme"))
    new(push("capped-2", "capped-3", user="capped", tenant="acme"))
    found = new("claim(50)")
    assert not {"of the pair", "paused-0", "paused-1"} & set(found)
    # The tasks from before count for the plain user, the new ones for the pair.
    assert sorted(i for i in found if i.startswith("capped")) == ["capped-0", "capped-2"]
    # What the pair is given is its own.
    world.queue.set_user("paused", tenant="acme", paused=False)
    assert new("claim(50)") == ["of the pair"]
    assert get("paused").paused
    people = UserStats(world.queue.link)
    assert people.knows(Owner("heavy", "acme"))
    world.queue.set_user("paused", paused=False)


def test_an_older_worker_that_is_left_over_blocks_nothing(
    world: World, old: Side, new: Side
) -> None:
    """It is refused again and again while others serve the queue."""
    old(push(*(f"t{n}" for n in range(6))))
    (held,) = old("claim(1, 30)")
    new(push("pair", user="alice", tenant="acme"))
    ran = []
    for _ in range(8):
        with pytest.raises(Refused, match="usage is a string"):
            old("claim()")
        ran += [i for i in new("claim()") if new(f"finish({i!r})")]
    assert sorted(ran) == sorted({"pair", *(f"t{n}" for n in range(6))} - {held})
    world.advance(31)
    assert new("claim()") == [held]
    assert world.info(held).attempts == 2
    new(f"finish({held!r})")


def test_a_queue_of_the_version_before_has_nothing_to_repair(
    world: World, old: Side, redis_client: redis.Redis
) -> None:
    live_with_tenants(old)
    old("claim(3)")
    before = dump(redis_client)
    findings = Records(TaskQueue(redis_client, clock=world.clock).link, fix=True).compare()
    assert [each for each in findings if each.level != "ok"] == []
    changed = {each.partition(".")[0] for each in changes(before, dump(redis_client))}
    assert changed <= {"ops", "ops_before"}
    check_consistency(redis_client)
    assert isinstance(world.clock, ManualClock)
