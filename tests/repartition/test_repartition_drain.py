"""A queue is moved while it is in use: each task and each fire time is in one queue at a time."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import redis
from helpers.commands import Cli
from helpers.moving import Open, move_with_deaths, texts_of
from helpers.network import LossyProxy
from helpers.state import check_consistency
from helpers.tasks import make_task, push

from fairqueue.clock import ManualClock
from fairqueue.doctor import Doctor
from fairqueue.errors import ConfigurationError, QueueInUse, RepartitionError
from fairqueue.history.runs import History
from fairqueue.models import Claim
from fairqueue.queue.queue import TaskQueue
from fairqueue.repartition import Repartition, count
from fairqueue.scheduler.scheduler import TaskScheduler


@pytest.fixture
def old(open_queue: Open) -> TaskQueue:
    return open_queue(0, 1)


@pytest.fixture
def new(open_queue: Open) -> TaskQueue:
    return open_queue(1, 4)


def drain(old: TaskQueue, new: TaskQueue) -> Any:
    return Repartition(old, new).run(drain=True)


def claim(queue: TaskQueue, limit: int = 10, **options: Any) -> list[Claim]:
    """Claim from all partitions."""
    claims: list[Claim] = []
    while found := queue.claim("w", limit - len(claims), **options):
        claims += found
        if len(claims) == limit:
            break
    return claims


# --- what is refused ------------------------------------------------------------------------------


def test_a_queue_in_use_is_refused_and_the_message_says_who_uses_it(
    old: TaskQueue, new: TaskQueue
) -> None:
    push(old, "one", "two")
    old.claim("w")
    TaskScheduler(old, "leading").tick()
    with pytest.raises(QueueInUse, match=r"scheduler 'leading' leads; 1 task runs"):
        Repartition(old, new).run()
    assert count(old).waiting == 1


def test_a_new_queue_with_tasks_is_refused_unless_the_old_one_is_in_use(
    old: TaskQueue, new: TaskQueue
) -> None:
    push(old, "one")
    push(new, "two")
    with pytest.raises(RepartitionError, match="'default' is not empty"):
        Repartition(old, new).run()
    assert drain(old, new).is_complete
    assert {each.task.task_id for each in claim(new)} == {"one", "two"}


def test_queues_that_order_tasks_in_different_ways_are_refused(
    old: TaskQueue, new: TaskQueue
) -> None:
    old.configure(ageing=60)
    push(old, "one")
    push(new, "two")
    with pytest.raises(RepartitionError, match="another ageing"):
        drain(old, new)
    new.cancel("two")
    assert drain(old, new).is_complete
    assert new.settings().ageing == 60


def test_a_queue_is_not_moved_to_itself(old: TaskQueue) -> None:
    push(old, "one")
    with pytest.raises(ConfigurationError, match="to itself"):
        Repartition(old, old).run()
    assert count(old).waiting == 1


def test_the_process_that_begins_last_goes_on(old: TaskQueue, new: TaskQueue) -> None:
    push(old, *map(str, range(20)))

    class Slow(Repartition):
        def _copier(self) -> Any:
            Repartition(old, new, batch=3).run()
            return super()._copier()

    with pytest.raises(RepartitionError, match="another process moves queue 'default' now"):
        Slow(old, new).run()
    assert (count(old).total, count(new).waiting) == (0, 20)


def test_a_queue_is_part_of_one_move_at_a_time(open_queue: Open, old: TaskQueue) -> None:
    push(old, *map(str, range(20)))
    new, third = open_queue(1, 4), open_queue(2, 2)

    class Dying(Repartition):
        def _put(self, *arguments: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Dying(old, new, batch=3).run()
    assert count(old).moving == 3
    with pytest.raises(RepartitionError, match=r"another move, to default \(4 partitions\)"):
        Repartition(old, third).run()
    with pytest.raises(RepartitionError, match="another move"):
        Repartition(third, old).run(drain=True)
    assert Repartition(old, new).run().verified
    assert count(new).waiting == 20


class Overtaken(Repartition):
    """Meets another process between two of its steps."""

    def meet(self, what: Callable[[], object]) -> Self:
        self._what: Callable[[], object] | None = what
        return self

    def _put(self, *arguments: Any) -> Any:
        what, self._what = self._what, None
        if what is not None:
            what()
        return super()._put(*arguments)


def end_and_forget(queue: TaskQueue, clock: ManualClock) -> list[str]:
    """Run all tasks of a queue until nothing is known of them; their ids."""
    clock.advance(100)
    ids = []
    for store in [queue.at(link) for link in queue.link.parts]:
        for each in store.claim("w", limit=50):
            store.finish(each)
            ids.append(each.task.task_id)
        clock.advance(1)
        History(store).prune(0.5)
    for _ in range(3):  # tombstones end
        clock.advance(200)
        for store in [queue.at(link) for link in queue.link.parts]:
            store.set_user("other", weight=2.0)
    return ids


def test_a_process_that_was_overtaken_stores_nothing(
    old: TaskQueue, new: TaskQueue, clock: ManualClock
) -> None:
    push(old, "one", "two")

    def overtake() -> None:
        assert drain(old, new).is_complete
        assert end_and_forget(new, clock) == ["one", "two"]

    with pytest.raises(RepartitionError, match="another process"):
        Overtaken(old, new).meet(overtake).run(drain=True)
    assert claim(new) == []


def test_what_has_arrived_is_not_stored_again_when_it_is_gone(
    old: TaskQueue, new: TaskQueue, clock: ManualClock
) -> None:
    push(old, "one", "two")
    TaskScheduler(old, "s").add_schedule("0 9 * * *", "alice", schedule_id="daily")

    class Dying(Repartition):
        def _call_to_settle(self, fields: Any) -> Any:
            if fields:
                raise KeyboardInterrupt
            return super()._call_to_settle(fields)

    for _ in range(2):  # the schedule, then the tasks
        with pytest.raises(KeyboardInterrupt):
            Dying(old, new).run(drain=True)
        assert count(old).moving
        part = new.part_of("alice", None)
        TaskScheduler(part, "t").remove_schedule("daily")
        ended = end_and_forget(new, clock)
        with pytest.raises(KeyboardInterrupt):
            Dying(old, new).run(drain=True)
        assert (count(new).schedules, claim(new)) == (0, [])
        mover = Repartition(old, new)
        mover._begin(must_be_empty=False)
        mover._finish_earlier()
    assert ended == ["one", "two"]
    assert drain(old, new).is_complete
    assert (count(new).schedules, claim(new)) == (0, [])


def test_what_is_on_the_way_does_not_go_to_a_queue_of_that_name_elsewhere(
    open_queue: Open, old: TaskQueue, new: TaskQueue
) -> None:
    push(old, "one")
    elsewhere = open_queue(2, 4)

    class Dying(Repartition):
        def _put(self, *arguments: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Dying(old, new).run()
    with pytest.raises(RepartitionError, match="on their way to a queue 'default' on another"):
        Repartition(old, elsewhere).run()
    assert Repartition(old, new).run().is_complete
    assert (count(new).waiting, count(elsewhere).total) == (1, 0)


def test_two_queues_become_one(open_queue: Open, old: TaskQueue, new: TaskQueue) -> None:
    other = open_queue(2, 2)
    push(old, "one")
    push(other, "two")
    assert Repartition(old, new).run().is_complete
    assert drain(other, new).is_complete
    push(old, "three")
    assert drain(old, new).is_complete
    assert {each.task.task_id for each in claim(new)} == {"one", "two", "three"}


def test_a_window_of_a_unique_key_goes_on_in_the_new_queue(
    old: TaskQueue, new: TaskQueue, clock: ManualClock
) -> None:
    window: dict[str, Any] = {"unique": "report", "unique_for": 500}
    push(old, "gone", **window)
    push(old, "kept", user_id="bob", **window)
    for each in old.claim("w", limit=5):
        old.finish(each)
        if each.task.task_id == "gone":
            clock.advance(1)
            History(old).prune(0.5)
    assert Repartition(old, new).run().is_complete
    for user in ("alice", "bob"):
        new.push(make_task(user, f"again-{user}", **window))
    assert claim(new) == []
    clock.advance(501)
    for user in ("alice", "bob"):
        new.push(make_task(user, f"now-{user}", **window))
    assert len(claim(new)) == 2


# --- what is in both queues -----------------------------------------------------------------------


def test_the_same_id_is_one_task_and_another_task_with_the_id_is_left_behind(
    old: TaskQueue, new: TaskQueue
) -> None:
    push(old, "same", "other", "third")
    new.push(make_task("alice", "same"))
    new.push(make_task("alice", "other", payload={"n": 2}))
    report = drain(old, new)
    assert (report.known, list(report.refused)) == (1, ["waiting 'other'"])
    assert (report.left.waiting, report.left.moving) == (1, 0)
    assert sorted(each.task.task_id for each in claim(new)) == ["other", "same", "third"]
    assert [each.task.task_id for each in claim(old)] == ["other"]


def test_a_task_gives_up_its_unique_key_if_the_new_queue_has_given_it_away(
    old: TaskQueue, new: TaskQueue
) -> None:
    push(old, "first", unique="report")
    new.push(make_task("alice", "second", unique="report"))
    drain(old, new)
    assert sorted(each.task.task_id for each in claim(new)) == ["first", "second"]
    new.push(make_task("alice", "third", unique="report"))
    assert "third" not in texts_of(new, "tasks")


def test_a_task_behind_one_that_runs_moves_when_that_one_has_ended(
    old: TaskQueue, new: TaskQueue
) -> None:
    push(old, "first", unique="report")
    (running,) = claim(old)
    push(old, "second", unique="report", on_duplicate="replace")
    assert drain(old, new).left.delayed == 1
    old.retry(running, "again", delay=100)
    assert drain(old, new).is_complete
    assert claim(new) == []


def test_a_task_and_the_one_behind_it_stay_in_order(
    old: TaskQueue, new: TaskQueue, clock: ManualClock
) -> None:
    push(old, "first", unique="report")
    (running,) = claim(old)
    push(old, "second", unique="report", on_duplicate="replace")
    old.retry(running, "again", delay=100)
    assert drain(old, new).is_complete
    clock.advance(101)
    (again,) = claim(new)
    assert again.task.task_id == "first"
    assert claim(new) == []
    new.finish(again)
    assert [each.task.task_id for each in claim(new)] == ["second"]


def test_tasks_of_a_user_keep_their_order_and_go_before_later_ones(
    old: TaskQueue, new: TaskQueue
) -> None:
    push(old, "a", "b", "c")
    Repartition(old, new)._begin(must_be_empty=True)
    push(new, "later")
    drain(old, new)
    assert [each.task.task_id for each in claim(new)] == ["a", "b", "c", "later"]


# --- running tasks --------------------------------------------------------------------------------


def test_running_tasks_stay_until_they_end_and_are_moved_by_a_later_run(
    old: TaskQueue, new: TaskQueue
) -> None:
    push(old, "one", "two", "three")
    held = old.claim("w", limit=2)
    report = drain(old, new)
    assert (report.moved, report.left.running) == ({"waiting": 1}, 2)
    old.retry(held[0], "later", delay=0)
    old.finish(held[1])
    assert drain(old, new).is_complete
    again = {each.task.task_id: each.attempt for each in claim(new)}
    assert again == {held[0].task.task_id: 2, "three": 1}


def test_with_wait_the_move_ends_when_nothing_is_left(old: TaskQueue, new: TaskQueue) -> None:
    push(old, "one", "two")
    (held,) = old.claim("w")
    looked = []

    def stop() -> bool:
        looked.append(count(old).running)
        if len(looked) == 12:
            old.finish(held)
        return False

    report = Repartition(old, new).run(drain=True, wait=True, stop=stop)
    assert report.is_complete
    assert (count(new).waiting, count(new).ended) == (1, 1)


def test_the_doctor_finds_what_was_left_behind(old: TaskQueue, new: TaskQueue) -> None:
    def told(queue: TaskQueue) -> list[tuple[str, str]]:
        found = Doctor(queue).examine(records=False)
        return [(each.level, each.text) for each in found if each.check == "repartition"]

    assert told(old) == []
    drain(old, new)
    assert told(old) == [("ok", "the queue was moved to default (4 partitions)")]
    assert told(new) == []
    push(old, "late")
    ((level, text),) = told(old)
    assert level == "warning"
    assert "but 1 task waits here and 0 records are on the way" in text


# --- schedules ------------------------------------------------------------------------------------


def test_a_schedule_whose_run_is_unfinished_moves_with_it_or_after_it(
    old: TaskQueue, new: TaskQueue, clock: ManualClock
) -> None:
    scheduler = TaskScheduler(old, "s")
    scheduler.add_schedule("* * * * *", "alice", schedule_id="skip", overlap="skip")
    scheduler.add_schedule("* * * * *", "alice", schedule_id="free")
    clock.advance(60)
    scheduler.tick()
    (running,) = [each for each in claim(old, lease=600) if each.task.schedule_id == "skip"]
    scheduler.trigger("skip")
    report = drain(old, new)
    assert (report.left.schedules, report.left.waiting) == (1, 1)
    clock.advance(60)
    scheduler.tick()
    assert count(old).waiting == 1
    old.retry(running, "again", delay=300)
    plan = texts_of(old, "plan")["skip"]
    drain(old, new)
    assert texts_of(new, "plan")["skip"] == plan
    clock.advance(60)
    part = new.part_of("alice", None)
    TaskScheduler(part, "t").tick()
    waiting = [i for i, s in texts_of(new, "status").items() if s["state"] != "finished"]
    assert [i for i in waiting if i.startswith("skip:")] == [running.task.task_id]


@pytest.mark.parametrize("seed", range(2))
def test_each_fire_time_is_fired_once_while_both_schedulers_tick(
    seed: int, old: TaskQueue, new: TaskQueue, clock: ManualClock
) -> None:
    rng = random.Random(seed)
    stores = [old, *(new.at(link) for link in new.link.parts)]
    schedulers = [TaskScheduler(store, f"s{i}") for i, store in enumerate(stores)]
    for n in range(12):
        schedulers[0].add_schedule("* * * * *", f"user-{n}", schedule_id=f"every-{n}")
    began = clock.now_ms()
    fired: Counter[str] = Counter()

    def go_on() -> None:
        clock.advance(60)
        for scheduler in schedulers:
            scheduler.tick()
        for store in rng.sample(stores, len(stores)):
            for each in store.claim("w", limit=50):
                store.finish(each)
                fired[each.task.task_id] += 1

    for _ in range(3):
        go_on()
    for _ in range(8):
        move_with_deaths(old, new, rng, go_on, drain=True)
        go_on()
    assert count(new).schedules == 12
    minutes = (clock.now_ms() - began) // 60_000
    assert set(fired.values()) == {1}
    assert len(fired) == 12 * minutes


# --- networks and threads -------------------------------------------------------------------------


@pytest.fixture
def far_queues(proxy: LossyProxy) -> Iterator[list[TaskQueue]]:
    """An old and a new queue behind a network that loses replies."""
    with (
        TaskQueue.from_url(proxy.url, timeout=10) as old,
        TaskQueue.from_url(proxy.url.removesuffix("0") + "1", timeout=10, partitions=4) as new,
        redis.Redis.from_url(proxy.url.removesuffix("0") + "1") as client,
    ):
        yield [old, new]
        check_consistency(client, partitions=4)


def test_lost_replies_neither_lose_nor_double_anything(
    far_queues: list[TaskQueue], proxy: LossyProxy
) -> None:
    old, new = far_queues
    for number in range(40):
        old.push(make_task(f"user-{number % 9}", f"task-{number}"))
    held = old.claim("w", limit=10)
    old.finish_many([(each, None) for each in held[:5]])
    for each in held[5:]:
        old.bury(each, "no")
    scheduler = TaskScheduler(old, "s")
    for number in range(10):
        scheduler.add_schedule("0 9 * * *", f"user-{number}", schedule_id=f"daily-{number}")

    class Unlucky(Repartition):
        def _run_all(self, calls: Any) -> Any:
            lose = bool(calls)
            return proxy.losing(lambda: super(Unlucky, self)._run_all(calls), replies=int(lose))

    report = Unlucky(old, new, batch=8).run()
    assert report.verified
    assert report.is_complete
    assert (count(new).waiting, count(new).ended, count(new).dead) == (30, 5, 5)
    assert count(new).schedules == 10


class Crowd:
    """Producers that switch to the new queue half-way, and workers of both, in threads."""

    def __init__(self, old: TaskQueue, new: TaskQueue) -> None:
        self.pushed: list[str] = []
        self.ended: Counter[str] = Counter()
        self._over = threading.Event()
        stores = [old, *(new.at(link) for link in new.link.parts)]
        self._workers = [threading.Thread(target=self._work, args=(store,)) for store in stores]
        self._producers = [
            threading.Thread(target=self._produce, args=(name, old, new)) for name in "ab"
        ]
        for thread in (*self._workers, *self._producers):
            thread.start()

    @property
    def is_producing(self) -> bool:
        return any(thread.is_alive() for thread in self._producers)

    def finish(self) -> None:
        """Wait until everything has ended."""
        for _ in range(1000):
            if len(self.ended) == len(self.pushed):
                break
            self._over.wait(0.01)
        self._over.set()
        for thread in self._workers:
            thread.join(10)

    def _produce(self, name: str, old: TaskQueue, new: TaskQueue) -> None:
        for number in range(300):
            task = make_task(f"{name}-{number % 7}", f"{name}:{number}", delay=number % 2 / 50)
            (old if number < 150 else new).push(task)
            self.pushed.append(task.task_id)

    def _work(self, store: TaskQueue) -> None:
        while not self._over.is_set():
            for each in store.claim("w", limit=3, wait=0.02):
                store.finish(each)
                self.ended[each.task.task_id] += 1


def test_a_queue_is_drained_while_producers_and_workers_go_on(
    clients: list[redis.Redis],
) -> None:
    """With no clock but the server's."""
    with TaskQueue(clients[0]) as old, TaskQueue(clients[1], partitions=4) as new:
        new.check()
        crowd = Crowd(old, new)
        while crowd.is_producing:
            Repartition(old, new, batch=20).run(drain=True)
        report = Repartition(old, new, batch=20).run(drain=True, wait=True)
        crowd.finish()
        assert report.is_complete
        assert sorted(crowd.ended) == sorted(crowd.pushed)
        assert set(crowd.ended.values()) == {1}
        assert count(new).ended == len(crowd.pushed)
    check_consistency(clients[1], partitions=4)


# --- the command ----------------------------------------------------------------------------------


def test_the_command_moves_a_queue_and_compares_the_ids(
    redis_url: str, redis_client: redis.Redis
) -> None:
    cli = Cli(redis_url)
    with TaskQueue(redis_client) as queue:
        push(queue, *map(str, range(5)))
    to = ("repartition", "many", "--to", "3")
    dry = cli.ok(*to, "--dry-run")
    assert "would move 5 waiting tasks, 0 schedules, 0 ended tasks from queue 'default'" in dry.err
    assert not redis_client.keys("*many*")
    done = cli.ok(*to, "--yes")
    assert "the ids of all tasks and schedules are those that were there before" in done.err
    assert "waiting" in done.out
    back = cli.json("--queue", "many", "repartition", "one", "--to", "1", "--yes")
    assert (back["complete"], back["moved"], back["verified"]) == (True, {"waiting": 5}, True)
    with TaskQueue(redis_client, "one") as queue:
        assert len(queue.claim("w", limit=9)) == 5


def test_the_command_says_what_is_left(redis_url: str, redis_client: redis.Redis) -> None:
    cli = Cli(redis_url)
    with TaskQueue(redis_client) as queue:
        push(queue, "one", "two")
        queue.claim("w")
    to = ("repartition", "many", "--to", "3", "--yes")
    refused = cli.run(*to)
    assert refused.code == 1
    assert "queue 'default' is in use: 1 task runs" in refused.err
    drained = cli.run(*to, "--drain")
    assert drained.code == 1
    assert "1 record is left in the old queue" in drained.err
    assert cli.run(*to, "--wait").code == 2
