"""Unique keys: what a second push does, for how long, and that a repeated push changes nothing."""

import threading
from collections import Counter
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from helpers.tasks import ids_of, make_task
from helpers.waiting import in_thread
from helpers.world import World

from fairqueue.errors import DuplicateTask, FairQueueError, InvalidTask, QueueFull
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue

KEY = "report:7"
OF_KEYS = {"uniques", "expiring"}  # what is stored of unique keys


def make(task_id: str, user_id: str = "alice", unique: str = KEY, **fields: Any) -> Task:
    return make_task(user_id, task_id, unique=unique, payload={"from": task_id}, **fields)


def push(world: World, task_id: str, user_id: str = "alice", **fields: Any) -> str:
    return world.queue.push(make(task_id, user_id, **fields))


def payload_of(world: World, task_id: str) -> Any:
    task = world.info(task_id).task
    assert task is not None
    return task.payload["from"]


def claimed(world: World, limit: int = 10) -> list[str]:
    return ids_of(world.queue.claim("w", limit=limit))


# --- what a second push does ----------------------------------------------------------------------


def test_by_default_a_second_push_finds_the_first_task(world: World) -> None:
    assert push(world, "a") == "a"
    before = world.state()
    assert push(world, "b") == "a"
    after = world.state()
    assert after.pop("stats") == {**before.pop("stats", {}), "not_unique": "1"}
    assert after == before
    assert world.queue.get("b") is None
    assert payload_of(world, "a") == "a"


def test_a_duplicate_can_be_an_error(world: World) -> None:
    push(world, "a")
    before = world.dump()
    with pytest.raises(DuplicateTask, match="'b' was not stored: task 'a' has the same") as caught:
        push(world, "b", on_duplicate="error")
    assert caught.value.task_id == "a"
    assert world.dump() == before
    with pytest.raises(DuplicateTask):  # in a batch, nothing of it is stored
        world.queue.push_many([make_task(task_id="c"), make("b", on_duplicate="error")])
    assert world.queue.size() == 1


def test_a_replacement_brings_its_payload_options_and_time(world: World) -> None:
    push(world, "a", priority=1, name="old", pool="gpu", limit_keys=["k"], cost=3, delay=500)
    options: dict[str, Any] = {"on_duplicate": "replace", "priority": 5, "name": "new"}
    assert push(world, "b", timeout=7.0, **options) == "a"
    assert world.queue.get("b") is None
    info = world.info("a")
    assert (info.state, info.name, info.priority) == ("ready", "new", 5)
    assert (info.pool, info.limit_keys, info.cost) == ("default", (), None)
    (claim,) = world.queue.claim("w", limit=10)
    assert (claim.task.task_id, claim.task.payload["from"]) == ("a", "b")
    assert claim.task.policy == {"timeout": 7.0}
    assert world.stats()["replaced"] == 1


OLD: list[dict[str, Any]] = [{}, {"delay": 500}, {"pool": "gpu"}, {"limit_keys": ["k"]}]
NEW: list[dict[str, Any]] = [{}, {"delay": 50}, {"pool": "mail"}, {"expires": 900}, {"cost": 2}]


@pytest.mark.parametrize("old", OLD, ids=repr)
@pytest.mark.parametrize("new", NEW, ids=repr)
def test_a_task_is_replaced_wherever_it_waits(
    world: World, old: dict[str, Any], new: dict[str, Any]
) -> None:
    world.queue.set_limit("k", slots=1)
    world.push("first", limit_keys=["k"], user_id="bob")
    claimed(world)
    push(world, "a", **old)
    claims = claimed(world, limit=1) if "limit_keys" in old else []  # now it is held
    assert claims == []
    assert push(world, "b", on_duplicate="replace", **new) == "a"
    world.check()
    world.advance(50)
    claims = ids_of(world.queue.claim("w", limit=5, pools=["default", "mail"]))
    assert "a" in claims
    assert payload_of(world, "a") == "b"


def test_a_replaced_task_keeps_its_place(world: World) -> None:
    push(world, "a")
    world.push("c")
    push(world, "b", on_duplicate="replace")
    assert claimed(world) == ["a", "c"]


def test_in_a_batch_the_order_decides(world: World) -> None:
    tasks = [
        make("a"),
        make("b"),
        make("c", on_duplicate="replace"),
        make("d", unique="other"),
        make("e", user_id="bob"),
        make("f", on_duplicate="replace"),
        make_task(task_id="plain"),
        make("g"),
    ]
    assert world.queue.push_many(tasks) == ["a", "a", "a", "d", "e", "a", "plain", "a"]
    assert payload_of(world, "a") == "f"
    assert world.queue.size() == 4
    assert world.queue.push_many(tasks) == ["a", "a", "a", "d", "e", "a", "plain", "a"]
    assert payload_of(world, "a") == "f"


# --- whose key ------------------------------------------------------------------------------------


def test_a_key_belongs_to_a_tenant_or_to_a_user_without_one(world: World) -> None:
    assert push(world, "a") == "a"
    assert push(world, "b", "bob") == "b"
    assert push(world, "c", tenant="acme") == "c"
    assert push(world, "d", "bob", tenant="acme") == "c"
    assert push(world, "e", tenant="blue") == "e"
    assert push(world, "f", "bob", unique="report:8") == "f"


def test_a_replacement_may_be_of_another_user_of_the_tenant(world: World) -> None:
    push(world, "a", "ann", tenant="acme")
    assert push(world, "b", "bob", tenant="acme", on_duplicate="replace") == "a"
    assert world.info("a").user_id == "bob"
    assert world.queue.size("ann", tenant="acme") == 0
    assert world.queue.size("bob", tenant="acme") == 1


def test_a_moved_task_takes_its_key_along_or_gives_it_up(world: World) -> None:
    push(world, "a", tenant="acme")
    push(world, "b", tenant="blue")
    assert world.queue.move_user("alice", None, tenant="acme") == 1
    assert push(world, "c") == "a"
    assert push(world, "d", tenant="acme") == "d"
    assert world.queue.move_user("alice", "blue") == 1
    assert push(world, "e", tenant="blue") == "b"
    assert push(world, "f") == "f"
    assert set(claimed(world)) == {"a", "b", "d", "f"}


# --- for how long ---------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["finish", "bury", "cancel", "cancel a run", "purge", "expire"])
def test_an_unfinished_task_has_its_key(world: World, end: str) -> None:
    push(world, "a", expires=1000)
    assert push(world, "b") == "a"
    if end in ("cancel", "purge", "expire"):
        if end == "cancel":
            world.queue.cancel("a")
        elif end == "purge":
            world.inspector.users.purge("alice", dry_run=False)
        else:
            world.advance(1000)
            assert claimed(world) == []
    else:
        claim = world.claim_one()
        assert push(world, "c") == "a"
        world.queue.retry(claim, "no", delay=5)
        assert push(world, "d") == "a"
        world.advance(5)
        claim = world.claim_one()
        if end == "cancel a run":
            world.queue.cancel("a")
            assert push(world, "e") == "a"
        (world.queue.bury if end == "bury" else world.queue.finish)(claim)
    assert not world.dump().keys() & OF_KEYS
    assert push(world, "z") == "z"


@pytest.mark.parametrize("reaction", ["ignore", "error", "replace"])
@pytest.mark.parametrize("delay", [None, 1.0, 4.0])
def test_a_task_that_has_expired_has_no_key_though_nobody_has_claimed_since(
    world: World, reaction: str, delay: float | None
) -> None:
    push(world, "a", expires=5.0, delay=delay)
    world.advance(5.0)
    assert push(world, "b", on_duplicate=reaction) == "b"
    assert push(world, "c") == "b"
    assert claimed(world) == ["b"]
    assert world.info("a").state == "expired"
    assert push(world, "d") == "b"


def test_a_lost_lease_does_not_lose_the_key(world: World) -> None:
    world.queue.configure(max_attempts=2)
    push(world, "a")
    for n in range(2):
        world.claim_one()
        world.advance(31)
        assert push(world, f"b{n}") == "a"
    assert claimed(world) == []
    assert world.info("a").state == "buried"
    assert push(world, "c") == "c"


def test_a_waiting_task_has_its_key_until_it_starts(world: World) -> None:
    push(world, "a", unique_for="waiting")
    assert push(world, "b", unique_for="waiting") == "a"
    claim = world.claim_one()
    assert push(world, "c", unique_for="waiting") == "c"
    assert push(world, "d", unique_for="waiting") == "c"
    world.queue.finish(claim)
    assert push(world, "e", unique_for="waiting") == "c"


@pytest.mark.parametrize("end", ["release", "retry", "delayed retry", "lost lease"])
def test_a_task_that_waits_again_has_its_key_again(world: World, end: str) -> None:
    push(world, "a", unique_for="waiting")
    claim = world.claim_one()
    if end == "release":
        world.queue.release(claim)
    elif end == "lost lease":
        world.advance(31)
        assert claimed(world) == ["a"]
        world.advance(31)
        world.queue.set_user("alice", paused=True)
        assert claimed(world) == []
    else:
        world.queue.retry(claim, "no", delay=60 if end == "delayed retry" else 0)
    assert push(world, "b", unique_for="waiting") == "a"


def test_a_task_that_waits_again_takes_its_key_from_nobody(world: World) -> None:
    push(world, "a", unique_for="waiting")
    claim = world.claim_one()
    assert push(world, "b", unique_for="waiting") == "b"
    world.queue.retry(claim, "no")
    assert push(world, "c", unique_for="waiting") == "b"
    assert sorted(claimed(world)) == ["a", "b"]
    assert not world.dump().keys() & OF_KEYS


def test_a_throttle_lets_the_first_of_a_window_through(world: World) -> None:
    window: dict[str, Any] = {"unique_for": 60}
    assert push(world, "a", **window) == "a"
    world.queue.finish(world.claim_one())
    for n in range(6):
        assert push(world, f"b{n}", **window) == "a"
        world.advance(9.9)
    world.advance(0.6)
    assert push(world, "c", **window) == "c"
    world.advance(60)
    claimed(world)
    assert not world.dump().keys() & OF_KEYS


def test_a_window_does_not_outlive_a_longer_task(world: World) -> None:
    """The window counts from the first push, whatever the task does."""
    push(world, "a", unique_for=60)
    world.claim_one(lease=600)
    world.advance(61)
    assert push(world, "b", unique_for=60) == "b"


def test_a_replacement_in_a_window_waits_for_its_end(world: World) -> None:
    options: dict[str, Any] = {"unique_for": 60, "on_duplicate": "replace"}
    push(world, "a", **options)
    world.queue.finish(world.claim_one())
    world.advance(10)
    tasks = [make("b", **options), make("c", **options)]
    assert world.queue.push_many(tasks) == ["b", "b"]
    world.advance(49)
    assert claimed(world) == []
    world.advance(1)
    assert claimed(world) == ["b"]
    assert payload_of(world, "b") == "c"


def test_a_key_may_be_given_as_timedelta_too(world: World) -> None:
    push(world, "a", unique_for=timedelta(minutes=1))
    world.queue.finish(world.claim_one())
    assert push(world, "b", unique_for=timedelta(minutes=1)) == "a"


# --- debounce -------------------------------------------------------------------------------------


def test_each_push_puts_a_debounced_task_off(world: World) -> None:
    assert push(world, "a", debounce=5) == "a"
    for n in range(4):
        world.advance(4)
        assert claimed(world) == []
        assert push(world, f"b{n}", debounce=5) == "a"
    world.advance(4.9)
    assert claimed(world) == []
    world.advance(0.1)
    assert claimed(world) == ["a"]
    assert payload_of(world, "a") == "b3"


def test_a_debounced_task_waits_at_most_so_long(world: World) -> None:
    for n in range(12):  # a second apart; each would put the task off by five seconds
        push(world, f"b{n}", debounce=5, max_wait=12)
        assert claimed(world) == []
        world.advance(1)
    assert claimed(world) == ["b0"]
    assert payload_of(world, "b0") == "b11"


def test_a_debounced_task_that_is_ready_is_put_off_once_more(world: World) -> None:
    push(world, "a", debounce=5)
    world.advance(6)
    world.queue.set_user("alice", paused=True)
    assert claimed(world) == []
    push(world, "b", debounce=5)
    world.queue.set_user("alice", paused=False)
    assert claimed(world) == []
    world.advance(5)
    assert claimed(world) == ["a"]


def test_after_a_debounced_task_has_started_the_next_one_begins_anew(world: World) -> None:
    push(world, "a", debounce=5, max_wait=8)
    world.advance(5)
    claim = world.claim_one()
    assert push(world, "b", debounce=5, max_wait=8) == "b"
    assert push(world, "c", debounce=5, max_wait=8) == "b"
    world.queue.finish(claim)
    assert claimed(world) == []
    world.advance(5)
    assert claimed(world) == ["b"]
    assert payload_of(world, "b") == "c"


# --- a task that runs already ---------------------------------------------------------------------


def test_a_running_task_is_not_replaced_and_the_new_one_waits_behind_it(world: World) -> None:
    push(world, "a")
    claim = world.claim_one()
    assert push(world, "b", on_duplicate="replace") == "b"
    assert payload_of(world, "a") == "a"
    assert claimed(world) == []
    assert world.info("b").state == "delayed"
    found = world.queue.explain("b")
    assert found is not None
    assert found.reasons[0].code == "behind"
    # At most one waits behind: the next push replaces it, or finds the running one.
    assert push(world, "c", on_duplicate="replace") == "b"
    assert push(world, "d") == "a"
    world.queue.finish(claim)
    assert claimed(world) == ["b"]
    assert payload_of(world, "b") == "c"
    assert push(world, "e") == "b"


@pytest.mark.parametrize("end", ["bury", "cancel", "lease", "release", "retry"])
def test_the_next_one_starts_when_the_first_has_ended(world: World, end: str) -> None:
    world.queue.configure(max_attempts=1)
    push(world, "a")
    claim = world.claim_one(lease=30)
    push(world, "b", on_duplicate="replace")
    if end in ("release", "retry"):
        # The first waits again: it is served first, and the other still waits behind it.
        getattr(world.queue, end)(claim)
        again = world.claim_one()
        assert again.task.task_id == "a"
        assert claimed(world) == []
        world.queue.finish(again)
    elif end == "lease":
        world.advance(31)
        assert claimed(world) == []
    elif end == "cancel":
        world.queue.cancel("a")
        world.queue.finish(claim)
    else:
        world.queue.bury(claim)
    assert claimed(world) == ["b"]


def test_a_task_behind_another_can_be_cancelled(world: World) -> None:
    push(world, "a")
    claim = world.claim_one()
    push(world, "b", on_duplicate="replace")
    assert world.queue.cancel("b")
    assert push(world, "c", on_duplicate="replace") == "c"
    world.queue.finish(claim)
    assert claimed(world) == ["c"]


@pytest.mark.parametrize("delay", [None, 0, 100])
def test_a_task_behind_another_stays_there_if_it_is_rescheduled(
    world: World, delay: float | None
) -> None:
    push(world, "a")
    claim = world.claim_one()
    push(world, "b", on_duplicate="replace", delay=50)
    assert world.queue.reschedule("b", delay=delay)
    assert claimed(world) == []
    assert push(world, "c", on_duplicate="replace") == "b"
    assert world.queue.reschedule("b", delay=delay)
    world.queue.finish(claim)
    world.advance(delay or 0)
    assert claimed(world) == ["b"]


def test_a_task_behind_another_keeps_its_own_delay(world: World) -> None:
    push(world, "a")
    claim = world.claim_one()
    push(world, "b", on_duplicate="replace", delay=100)
    world.queue.finish(claim)
    assert claimed(world) == []
    world.advance(100)
    assert claimed(world) == ["b"]


# --- repeated pushes ------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1000, 0])
def test_a_repeated_push_gets_its_first_answer_whatever_has_happened_since(
    world: World, keep: int
) -> None:
    """X was ignored for Y, the reply was lost, Y ended: the repetition must not enqueue X."""
    world.queue.configure(keep_finished=keep)
    push(world, "Y")
    task = make("X")
    assert world.queue.push(task) == "Y"
    world.queue.finish(world.claim_one())
    for _ in range(3):
        assert world.queue.push(task) == "Y"
        world.advance(15)
    assert world.queue.push_many([task, make_task(task_id="other")]) == ["Y", "other"]
    assert claimed(world) == ["other"]


def test_a_repeated_replacement_does_not_replace_again(world: World) -> None:
    push(world, "a")
    first, second = (make(task_id, on_duplicate="replace") for task_id in ("b", "c"))
    assert world.queue.push(first) == "a"
    assert world.queue.push(second) == "a"
    assert world.queue.push(first) == "a"
    assert payload_of(world, "a") == "c"
    claim = world.claim_one()
    assert world.queue.push(second) == "a"
    world.queue.finish(claim)
    assert world.queue.push(second) == "a"
    assert claimed(world) == []


@pytest.mark.parametrize("keep", [1000, 0])
@pytest.mark.parametrize("replaced", [1, 50])
def test_the_first_push_is_recognised_though_its_task_was_replaced(
    world: World, keep: int, replaced: int
) -> None:
    world.queue.configure(keep_finished=keep)
    first = make("a", on_duplicate="replace")
    assert world.queue.push(first) == "a"
    for n in range(replaced):
        push(world, f"b{n}", on_duplicate="replace")
    assert world.queue.push(first) == "a"
    assert payload_of(world, "a") == f"b{replaced - 1}"
    world.queue.finish(world.claim_one())
    assert world.queue.push(first) == "a"
    assert claimed(world) == []
    with pytest.raises(InvalidTask, match="'a' is already used by a task with different content"):
        push(world, "a", on_duplicate="replace", name="another")


def test_a_refused_id_stays_refused(world: World) -> None:
    """The id of a task that was ignored belongs to it, as that of one that was stored does."""
    push(world, "a")
    push(world, "b")
    with pytest.raises(InvalidTask, match="'b' is already used"):
        push(world, "b", name="another")


def test_two_producers_at_once_make_one_task(queue: TaskQueue) -> None:
    start = threading.Barrier(8)
    answers: list[Counter[str]] = []

    def produce(number: int) -> None:
        found = Counter[str]()
        start.wait(20)
        for n in range(40):
            reaction = ("ignore", "replace", "error")[n % 3]
            task = make(f"{number}/{n}", unique=f"u{n % 5}", on_duplicate=reaction, delay=600)
            try:
                found[queue.push(task)] += 1
            except DuplicateTask as error:
                found[str(error.task_id)] += 1
        answers.append(found)

    for wait in [in_thread(partial(produce, n)) for n in range(8)]:
        wait()
    assert sum(answers, Counter[str]()).total() == 320
    assert len(set().union(*answers)) == 5  # one task for each key
    assert queue.inspect().delayed == 5


def test_no_two_tasks_of_a_key_run_at_once(queue: TaskQueue) -> None:
    """Producers replace while workers claim and finish: one runs, at most one waits behind it."""
    stop, running, most, done = threading.Event(), Counter[str](), Counter[str](), Counter[str]()
    lock = threading.Lock()

    def work(number: int) -> None:
        while not stop.is_set() or queue.size() or queue.inspect().delayed:
            for claim in queue.claim(f"w{number}", limit=2, wait=0.02):
                key = str(claim.task.unique)
                with lock:
                    running[key] += 1
                    most[key] = max(most[key], running[key])
                with lock:
                    running[key] -= 1
                    done[key] += 1
                queue.finish(claim)

    def produce(number: int) -> None:
        for n in range(60):
            queue.push(make(f"{number}/{n}", unique=f"u{n % 3}", on_duplicate="replace"))

    workers = [in_thread(partial(work, n)) for n in range(3)]
    for wait in [in_thread(partial(produce, n)) for n in range(4)]:
        wait()
    stop.set()
    for wait in workers:
        wait()
    assert set(most.values()) == {1}
    assert 3 <= done.total() <= 240


# --- the rest -------------------------------------------------------------------------------------


def test_a_full_queue_takes_no_new_key_but_still_answers_for_old_ones(world: World) -> None:
    world.queue.configure(max_waiting=1)
    push(world, "a")
    with pytest.raises(QueueFull):
        push(world, "b", unique="other")
    assert push(world, "c") == "a"
    assert push(world, "d", on_duplicate="replace") == "a"
    assert list(world.dump()["uniques"]) == [f"alice\0{KEY}"]


def test_a_retried_dead_letter_needs_no_key(world: World) -> None:
    push(world, "a")
    world.queue.bury(world.claim_one(), "no")
    push(world, "b")
    retried = world.history.retry("a")
    assert sorted(claimed(world)) == sorted(["b", retried])


def test_an_expiry_counts_from_the_push_that_replaced(world: World) -> None:
    push(world, "a", expires=10)
    world.advance(8)
    push(world, "b", on_duplicate="replace", expires=10)
    world.advance(8)
    claim = world.claim_one()
    world.queue.release(claim)
    assert world.info("a").expires_at == world.now() + timedelta(seconds=2)
    assert claimed(world) == ["a"]


def test_idle_keys_leave_nothing_behind(world: World) -> None:
    world.queue.configure(keep_finished=0)
    for n in range(60):
        scope = ("unfinished", "waiting", 5.0)[n % 3]
        push(world, f"t{n}", unique=f"u{n}", unique_for=scope, on_duplicate="replace")
    for _ in range(6):
        world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=20))
        world.advance(2)
    assert claimed(world) == []
    assert not world.dump().keys() & OF_KEYS


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"unique": ""}, "unique must be a string of 1 to 200 characters"),
        ({"unique": "a\nb"}, r"not 'a\nb'"),
        ({"unique": KEY, "on_duplicate": "skip"}, "not 'skip'"),
        ({"unique": KEY, "unique_for": "ever"}, "not 'ever'"),
        ({"unique": KEY, "unique_for": 0}, "not 0"),
        ({"debounce": 5}, "debounce needs unique"),
        ({"unique": KEY, "debounce": 5, "on_duplicate": "error"}, "not 'error'"),
        ({"unique": KEY, "debounce": 5, "max_wait": 1}, "not 1"),
        ({"unique": KEY, "debounce": datetime(2100, 1, 1)}, "debounce must be"),
    ],
    ids=repr,
)
def test_bad_options_are_named_and_nothing_is_stored(
    world: World, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(FairQueueError) as caught:
        world.push("t", **fields)
    assert said in str(caught.value)
    assert world.dump() == {}
