"""Handlers that take many tasks in one call: each is finished or failed on its own."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers import state as stored
from helpers.network import LossyProxy
from helpers.tasks import fill, info_of, make_task, push
from helpers.waiting import eventually, until_blocked
from helpers.workers import Person
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue import Discard, Retry, TaskContext, TaskQueue, Worker
from fairqueue.errors import ConfigurationError, InvalidTask
from fairqueue.models import Claim
from fairqueue.worker.batches import Batches, Unit
from fairqueue.worker.handlers import Handler, HandlerSettings
from fairqueue.worker.lease_keeper import ActiveRun

Make = Callable[..., Worker]
Payloads = list[dict[str, Any]]


@pytest.fixture
def make(live: TaskQueue) -> Iterator[Make]:
    made: list[Worker] = []

    def make(**settings: Any) -> Worker:
        made.append(Worker(live, **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.stop(0.0)


class Calls:
    """A batched handler that remembers the ids of the tasks of each call."""

    def __init__(self, result: Callable[[TaskContext], Any] = lambda context: None) -> None:
        self.ids: list[list[str]] = []
        self.users: list[list[str]] = []
        self._result = result

    def __call__(self, payloads: Payloads, contexts: list[TaskContext]) -> list[Any]:
        assert [each.task.payload for each in contexts] == payloads
        self.ids.append([each.task_id for each in contexts])
        self.users.append([each.task.user_id for each in contexts])
        return [self._result(each) for each in contexts]

    @property
    def sizes(self) -> list[int]:
        return [len(each) for each in self.ids]


def states(queue: TaskQueue, *task_ids: str) -> list[str]:
    return [info_of(queue, each).state for each in task_ids]


# --- what a batch is, with the time passed in -----------------------------------------------------


def run_of(world: World, task_id: str, handler: Handler | None) -> ActiveRun:
    world.push(task_id, name=handler.name if handler else "plain")
    claim: Claim = world.claim_one()
    context = TaskContext(claim.task, claim.attempt)
    return ActiveRun(claim, context, handler)


def handler(name: str = "index", **options: Any) -> Handler:
    return Handler(name, lambda payloads: None, HandlerSettings.create(**options))


def ids(units: list[Unit]) -> list[list[str]]:
    return [[run.context.task_id for run in unit.runs] for unit in units]


def test_a_batch_is_complete_or_has_waited_for_long_enough(world: World) -> None:
    batches, index = Batches(60.0), handler(batch=3, batch_wait=2.0)
    assert (len(batches), batches.until(), batches.due(1e9)) == (0, None, [])
    for number, now in enumerate((10.0, 11.0)):
        assert list(batches.add(run_of(world, f"a{number}", index), now)) == []
    assert (len(batches), batches.until(), batches.missing()) == (1, 12.0, {"index": 1})
    assert batches.due(11.9) == []
    (unit,) = batches.add(run_of(world, "a2", index), 11.9)
    assert (ids([unit]), unit.since, unit.is_batch) == ([["a0", "a1", "a2"]], 11.9, True)
    assert (len(batches), batches.due(1e9)) == (0, [])

    assert list(batches.add(run_of(world, "b", index), 20.0)) == []
    assert ids(batches.due(22.0)) == [["b"]]
    assert batches.until() is None


def test_batches_of_several_names_do_not_mix_and_single_tasks_do_not_wait(world: World) -> None:
    batches, one, two = Batches(60.0), handler("one", batch=2), handler("two", batch=9)
    (unit,) = batches.add(run_of(world, "p", handler("plain")), 0.0)
    assert (ids([unit]), unit.is_batch) == ([["p"]], False)
    (unit,) = batches.add(run_of(world, "q", None), 0.0)
    assert not unit.is_batch
    for task_id, by in (("a", one), ("b", two)):
        assert list(batches.add(run_of(world, task_id, by), 0.0)) == []
    assert batches.missing() == {"one": 1, "two": 8}
    assert ids(list(batches.add(run_of(world, "c", one), 0.0))) == [["a", "c"]]
    assert [run.context.task_id for run in batches.take_all()] == ["b"]
    assert len(batches) == 0


def test_no_task_waits_longer_than_its_lease_allows(world: World) -> None:
    batches = Batches(5.0)
    assert list(batches.add(run_of(world, "a", handler(batch=9, batch_wait=60)), 100.0)) == []
    assert batches.until() == 105.0


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        (None, [["a", "b", "c", "d", "e"]]),
        ("user", [["a", "e"], ["b"], ["c"], ["d"]]),
        ("tenant", [["a", "e"], ["b"], ["c", "d"]]),
    ],
)
def test_a_call_has_tasks_of_one_user_or_tenant_if_asked(
    world: World, by: str | None, groups: list[list[str]]
) -> None:
    given = {"a": ("ann", None), "b": ("bob", None), "c": ("ann", "acme"), "d": ("bob", "acme")}
    calls = Calls()
    worker = Worker(world.queue)
    worker.register("index", calls, batch=9, batch_by=by)
    for task_id, (user, tenant) in [*given.items(), ("e", ("ann", None))]:
        world.push(task_id, user_id=user, tenant=tenant, name="index")
    assert worker.run_until_empty() == 5
    assert sorted(map(sorted, calls.ids)) == groups


BAD = [
    ({"batch": 0}, "batch must be a whole number from 1 to 250, not 0"),
    ({"batch": 251}, "batch must be a whole number from 1 to 250, not 251"),
    ({"batch": True}, "batch must be"),
    ({"batch": 2.5}, "batch must be"),
    ({"batch_wait": 1}, "batch_wait 1.0 needs batch"),
    ({"batch_by": "user"}, "batch_by 'user' needs batch"),
    ({"batch": 5, "batch_wait": -1}, "batch_wait must be"),
    ({"batch": 5, "batch_wait": 61}, "batch_wait must be"),
    ({"batch": 5, "batch_by": "name"}, "batch_by must be one of user, tenant, not 'name'"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda each: str(each)[:40])
def test_bad_options_of_batches_are_refused(
    queue: TaskQueue, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Worker(queue).task("index", **options)


def test_a_handler_of_batches_takes_payloads_and_maybe_contexts(queue: TaskQueue) -> None:
    with pytest.raises(ConfigurationError, match="must take the payloads, or the payloads and"):
        Worker(queue).register("index", lambda: None, batch=5)


# --- results --------------------------------------------------------------------------------------


def test_one_call_gets_up_to_so_many_tasks(world: World) -> None:
    calls = Calls(lambda context: context.task.payload["n"] + 1)
    worker = Worker(world.queue, concurrency=2)
    worker.register("index", calls, batch=4)
    for n in range(10):
        world.push(f"t{n}", name="index", payload={"n": n})
    assert worker.run_once() == 8  # two calls
    assert worker.run_once() == 2
    assert calls.sizes == [4, 4, 2]
    assert [world.info(f"t{n}").result for n in range(10)] == list(range(1, 11))


@pytest.mark.parametrize("kind", ["function", "async", "class", "payloads only", "none"])
def test_every_kind_of_handler_takes_batches(world: World, kind: str) -> None:
    worker = Worker(world.queue)
    register = worker.task("index", batch=9)

    if kind == "function":

        @register
        def run(payloads: Payloads, contexts: list[TaskContext]) -> Any:
            return [each.task.user_id for each in contexts]

    elif kind == "async":

        @register
        async def later(payloads: Payloads, contexts: list[TaskContext]) -> Any:
            return tuple(each.task.user_id for each in contexts)

    elif kind == "class":

        @register
        class Index:
            def handle(self, payloads: Payloads) -> Any:
                return [each["user"] for each in payloads]

    elif kind == "payloads only":
        register(lambda payloads: [each["user"] for each in payloads])
    else:
        register(lambda payloads: None)
    for user in ("ann", "bob"):
        world.push(user, user_id=user, name="index", payload={"user": user})
    assert worker.run_once() == 2
    results = [world.info(user).result for user in ("ann", "bob")]
    assert results == ([None, None] if kind == "none" else ["ann", "bob"])


def test_each_task_fails_on_its_own(world: World) -> None:
    outcomes: dict[str, Any] = {
        "good": 7,
        "bad": ValueError("no such page"),
        "late": Retry("busy", in_=300),
        "gone": Discard("closed"),
    }
    worker = Worker(world.queue)
    worker.register(
        "index", Calls(lambda each: outcomes[each.task_id]), batch=9, retries=1, backoff=[10]
    )
    world.push(*outcomes, name="index")
    assert worker.run_once() == 4
    found = {each: world.info(each) for each in outcomes}
    assert {each: info.state for each, info in found.items()} == {
        "good": "finished",
        "bad": "delayed",
        "late": "delayed",
        "gone": "buried",
    }
    assert (found["good"].result, found["bad"].error) == (7, "ValueError: no such page")
    assert [(found[each].due_at - world.now()).seconds for each in ("bad", "late")] == [10, 300]
    world.advance(10)
    assert worker.run_once() == 1
    assert world.info("bad").state == "buried"


def test_what_the_handler_raises_all_tasks_have_failed_with(
    world: World, logged: Callable[[str], list[dict[str, Any]]]
) -> None:
    def broken(payloads: Payloads) -> None:
        raise ConnectionError("the index is down")

    worker = Worker(world.queue)
    worker.register("index", broken, batch=9, retries=1, backoff=[10])
    world.push("a", "b", name="index")
    world.push("c", name="index", retries=0)
    assert worker.run_once() == 3
    assert states(world.queue, "a", "b", "c") == ["delayed", "delayed", "buried"]
    assert {world.info(each).error for each in "abc"} == {"ConnectionError: the index is down"}
    assert len(logged("task_failed")) == 3


@pytest.mark.parametrize(
    ("answer", "what"), [([1], "a list of 1"), ({"a": 1, "b": 2}, "a dict"), ("ab", "a str")]
)
def test_an_answer_of_another_length_is_a_failure_of_all(
    world: World, answer: Any, what: str
) -> None:
    worker = Worker(world.queue)
    worker.register("index", lambda payloads: answer, batch=9, retries=0)
    world.push("a", "b", name="index")
    worker.run_once()
    assert states(world.queue, "a", "b") == ["buried", "buried"]
    assert str(world.info("a").error).endswith(
        f"or a list with one result for each of its 2 tasks, not {what}"
    )


def test_an_interrupt_gives_back_all_tasks_of_the_call(world: World) -> None:
    def interrupted(payloads: Payloads) -> None:
        raise KeyboardInterrupt

    worker = Worker(world.queue)
    worker.register("index", interrupted, batch=9)
    world.push("a", "b", "c", name="index")
    with pytest.raises(KeyboardInterrupt):
        worker.run_once()
    assert states(world.queue, "a", "b", "c") == ["ready"] * 3
    assert {world.info(each).attempts for each in "abc"} == {0}


def test_filters_and_hooks_are_called_for_each_task(world: World) -> None:
    told: list[str] = []

    def note(kind: str) -> Callable[..., None]:
        return lambda first, context: told.append(f"{kind} {context.task_id}")

    def check(payload: dict[str, Any], context: TaskContext) -> None:
        if context.task_id == "refused":
            raise PermissionError("no")

    calls = Calls(lambda each: KeyError("x") if each.task_id == "bad" else "done")
    worker = Worker(world.queue)
    worker.register(
        "index",
        calls,
        batch=9,
        retries=0,
        skip=lambda payload, context: context.task_id == "skipped",
        before=check,
        then=note("then"),
        catch=note("catch"),
        finally_=lambda context: told.append(f"finally {context.task_id}"),
    )
    world.push("a", "bad", "skipped", "refused", name="index")
    assert worker.run_once() == 4
    assert calls.ids == [["a", "bad"]]
    assert states(world.queue, "a", "bad", "skipped", "refused") == [
        "finished",
        "buried",
        "finished",
        "buried",
    ]
    assert "skipped" in world.info("skipped").result
    assert sorted(told) == [
        "catch bad",
        "catch refused",
        "finally a",
        "finally bad",
        "finally refused",
        "then a",
    ]


def test_each_task_has_its_own_log_and_a_share_of_the_time(world: World) -> None:
    registry = CollectorRegistry()

    def index(payloads: Payloads, contexts: list[TaskContext]) -> None:
        for context in contexts:
            context.log("indexed %s" % context.task_id)  # noqa: UP031

    worker = Worker(world.queue, registry=registry)
    worker.register("index", index, batch=9)
    world.push("a", "b", name="index")
    worker.run_once()
    for task_id in ("a", "b"):
        details = world.history.get(task_id)
        assert details is not None
        assert [line.message for line in details.attempts[0].log] == [f"indexed {task_id}"]
    labels = {"queue": "default", "task": "index"}
    runs = {**labels, "outcome": "finished"}
    assert registry.get_sample_value("fairqueue_worker_runs_total", runs) == 2
    assert registry.get_sample_value("fairqueue_worker_run_seconds_count", labels) == 2


# --- cost -----------------------------------------------------------------------------------------


def turn_after(world: World, worker: Worker, **fields: Any) -> int:
    """After a task that cost 50, how many tasks of another are served until the user's next one."""
    world.push("d", user_id="alice", name="dear", **fields)
    world.push("next", user_id="alice")
    world.fill("bob", 60)
    assert worker.run_once() == 1
    assert world.info("d").attempts == 1
    return [world.claim_one().task.task_id for _ in range(61)].index("next")


@pytest.mark.parametrize("batch", [None, 9])
def test_the_cost_of_an_attempt_is_settled_at_its_end(world: World, batch: int | None) -> None:
    """Whoever was charged for 1 and cost 50 is served again after fifty tasks of another."""
    worker = Worker(world.queue, concurrency=1)

    def dear(_: Any, contexts: Any) -> None:
        for each in contexts if isinstance(contexts, list) else [contexts]:
            each.cost(1)
            each.cost(50)

    worker.register("dear", dear, batch=batch)
    assert 45 <= turn_after(world, worker) <= 55


def test_an_attempt_that_says_nothing_costs_what_was_declared(world: World) -> None:
    worker = Worker(world.queue, concurrency=1)
    worker.register("dear", lambda payload: None)
    assert turn_after(world, worker) <= 2


@pytest.mark.parametrize("ends", [Retry("later", in_=60), Discard("never"), ValueError("no")])
@pytest.mark.parametrize("batch", [None, 9])
def test_the_cost_of_a_failed_attempt_is_settled_too(
    world: World, ends: Exception, batch: int | None
) -> None:
    worker = Worker(world.queue, concurrency=1)

    @worker.task("dear", backoff=[60], batch=batch)
    def dear(_: Any, contexts: Any) -> None:
        for each in contexts if isinstance(contexts, list) else [contexts]:
            each.cost(50)
        raise ends

    assert 45 <= turn_after(world, worker) <= 55


def isolated(payload: dict[str, Any], context: TaskContext) -> None:
    context.cost(50)
    if payload.get("fails"):
        raise Discard("never")


@pytest.mark.processes
@pytest.mark.parametrize("payload", [{}, {"fails": True}])
def test_a_handler_in_its_own_process_says_its_cost(world: World, payload: dict[str, Any]) -> None:
    worker = Worker(world.queue, concurrency=1)
    worker.register("dear", isolated, isolation="process")
    assert 45 <= turn_after(world, worker, payload=payload) <= 55


@pytest.mark.parametrize("cost", [0, -1, float("nan"), 1e7, "3", None, True])
def test_a_bad_cost_is_refused(cost: Any) -> None:
    context = TaskContext(make_task())
    context.cost(2)
    with pytest.raises(InvalidTask, match="cost must be"):
        context.cost(cost)
    assert context.spent == 2.0


# --- in processes of their own --------------------------------------------------------------------


def apart(payloads: Payloads, contexts: list[TaskContext]) -> list[Any]:
    for context in contexts:
        context.log("from %s" % context.task_id)  # noqa: UP031
        context.cost(50)
    outcomes = {"good": [os.getpid(), len(payloads)], "bad": ValueError("no"), "gone": Discard("x")}
    return [outcomes[each.task_id] for each in contexts]


def exits(payloads: Payloads) -> None:
    sys.exit(3)


def waits(payloads: Payloads) -> None:
    Path(payloads[0]["file"]).touch()
    time.sleep(600)


@pytest.mark.processes
def test_a_batch_runs_in_one_process_and_each_task_ends_on_its_own(world: World) -> None:
    worker = Worker(world.queue, capture_logs=True)
    worker.register("index", apart, batch=9, isolation="process", backoff=[10])
    world.push("good", "bad", "gone", name="index")
    assert worker.run_once() == 3
    pid, size = world.info("good").result
    assert (pid != os.getpid(), size) == (True, 3)
    assert states(world.queue, "good", "bad", "gone") == ["finished", "delayed", "buried"]
    assert world.info("bad").error == "ValueError: no"
    for task_id in ("good", "bad", "gone"):
        details = world.history.get(task_id)
        assert details is not None
        assert [line.message for line in details.attempts[0].log] == [f"from {task_id}"]


@pytest.mark.processes
def test_all_tasks_of_a_process_that_ends_have_failed(world: World) -> None:
    worker = Worker(world.queue)
    worker.register("index", exits, batch=9, isolation="process", retries=0)
    world.push("a", "b", name="index")
    assert worker.run_once() == 2
    assert [world.info(each).error for each in "ab"] == ["SystemExit: 3"] * 2


@pytest.mark.processes
@pytest.mark.parametrize("ends", ["cancel", "time-out"])
def test_a_process_is_killed_when_none_of_its_tasks_is_wanted(
    live: TaskQueue, make: Make, tmp_path: Path, ends: str
) -> None:
    begun = tmp_path / "begun"
    # The process may take a while to begin; a cancellation is seen after a third of the lease.
    worker = make(concurrency=1, lease=60.0 if ends == "time-out" else 6.0)
    timeout = 0.5 if ends == "time-out" else None
    worker.register("index", waits, batch=2, isolation="process", timeout=timeout, retries=0)
    push(live, "a", "b", name="index", payload={"file": str(begun)})
    worker.start()
    eventually(begun.exists, "it has begun", within=60)
    if ends == "cancel":
        assert live.cancel("a")
        assert live.cancel("b")
        until(live, "cancelled", "a", "b")
    else:
        until(live, "buried", "a", "b")
        assert info_of(live, "a").error == "timed out: ran for more than 0.5 s"
    push(live, "c", name="index", payload={"file": str(begun)})
    until(live, "running", "c")


# --- fairness, limits, pools ----------------------------------------------------------------------


def test_a_batch_is_filled_in_the_fair_order(world: World) -> None:
    calls = Calls()
    worker = Worker(world.queue, concurrency=1)
    worker.register("index", calls, batch=6)
    world.fill("busy", 50, name="index")
    world.fill("calm", 3, name="index")
    worker.run_once()
    assert sorted(calls.users[0]) == ["busy"] * 3 + ["calm"] * 3


def test_other_tasks_are_no_part_of_a_batch_and_keep_their_turn(world: World) -> None:
    calls, served = Calls(), []
    worker = Worker(world.queue, concurrency=1)
    worker.register("index", calls, batch=10)
    worker.register("mail", lambda payload, context: served.append(context.task.user_id))
    world.fill("bulk", 20, name="index")
    world.fill("post", 2, name="mail")
    for _ in range(4):
        worker.run_once()
    assert (calls.sizes, served) == ([10, 10], ["post", "post"])


def test_slots_of_a_name_bound_a_batch(world: World) -> None:
    calls = Calls()
    worker = Worker(world.queue)
    worker.register("index", calls, batch=9, slots=3)
    world.fill("ann", 7, name="index")
    worker.run_until_empty()
    assert calls.sizes == [3, 3, 1]


def test_a_batch_has_tasks_of_the_pools_of_its_worker_only(world: World) -> None:
    calls = Calls()
    worker = Worker(world.queue, pools=["gpu"])
    worker.register("index", calls, batch=9)
    world.fill("ann", 3, name="index", pool="gpu")
    world.push("plain", name="index")
    assert worker.run_until_empty() == 3
    assert world.info("plain").state == "ready"


# --- in threads -----------------------------------------------------------------------------------


class Held(Calls):
    """A batched handler that waits for `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.contexts: list[TaskContext] = []

    def __call__(self, payloads: Payloads, contexts: list[TaskContext]) -> list[Any]:
        self.contexts += contexts
        self.begun.set()
        assert self.go_on.wait(60)
        return super().__call__(payloads, contexts)


def until(queue: TaskQueue, state: str, *task_ids: str) -> None:
    wanted = [state] * len(task_ids)
    eventually(lambda: states(queue, *task_ids) == wanted, f"they are {state}", within=30)


def finished(queue: TaskQueue, *task_ids: str) -> None:
    until(queue, "finished", *task_ids)


def test_threads_run_full_batches_while_tasks_wait(live: TaskQueue, make: Make) -> None:
    calls = Calls()
    worker = make(concurrency=2)
    worker.register("index", calls, batch=25)
    fill(live, "ann", 100, name="index")
    worker.start()
    finished(live, *(f"ann-{n}" for n in range(100)))
    assert calls.sizes == [25] * 4


def test_a_batch_waits_for_more_tasks_and_not_for_long(
    live: TaskQueue, make: Make, redis_client: redis.Redis
) -> None:
    """The first task comes alone; the batch begins when the last one has come."""
    calls = Calls()
    worker = make()
    worker.register("index", calls, batch=3, batch_wait=15.0)
    worker.start()
    until_blocked(redis_client)
    for task_id in "abc":
        push(live, task_id, name="index")
        if task_id != "c":
            eventually(lambda: live.inspect().ready == 0, "it is claimed")
    finished(live, *"abc")
    assert calls.ids == [["a", "b", "c"]]


def test_a_batch_that_stays_small_begins_all_the_same(live: TaskQueue, make: Make) -> None:
    calls = Calls()
    worker = make()
    worker.register("index", calls, batch=3, batch_wait=0.05)
    worker.start()
    push(live, "a", name="index")
    finished(live, "a")
    assert calls.ids == [["a"]]


def test_a_batch_takes_one_slot_and_others_run_beside_it(live: TaskQueue, make: Make) -> None:
    held, done = Held(), threading.Event()
    worker = make(concurrency=2)
    worker.register("index", held, batch=50)
    worker.register("mail", lambda payload: done.set())
    fill(live, "ann", 50, name="index")
    worker.start()
    assert held.begun.wait(30)
    push(live, "m", name="mail")
    assert done.wait(30)
    held.go_on.set()
    finished(live, *(f"ann-{n}" for n in range(50)))


def test_the_leases_of_a_whole_batch_are_kept(live: TaskQueue, make: Make) -> None:
    held = Held()
    worker = make(concurrency=1, lease=1.5)
    worker.register("index", held, batch=5)
    fill(live, "ann", 5, name="index")
    worker.start()
    assert held.begun.wait(30)
    before = [info_of(live, f"ann-{n}").lease_until for n in range(5)]
    eventually(
        lambda: all(info_of(live, f"ann-{n}").lease_until != before[n] for n in range(5)),
        "all leases are extended",
    )
    held.go_on.set()
    finished(live, *(f"ann-{n}" for n in range(5)))
    assert live.inspect().counters.get("expired", 0) == 0


def test_one_task_of_a_batch_can_be_cancelled(live: TaskQueue, make: Make) -> None:
    held = Held()
    worker = make(concurrency=1, lease=1.5)
    worker.register("index", held, batch=3)
    fill(live, "ann", 3, name="index")
    worker.start()
    assert held.begun.wait(30)
    assert live.cancel("ann-1")
    contexts = {each.task_id: each for each in held.contexts}
    eventually(lambda: contexts["ann-1"].cancelled, "it is told")
    assert not contexts["ann-0"].cancelled
    held.go_on.set()
    finished(live, "ann-0", "ann-2")
    until(live, "cancelled", "ann-1")


def test_a_task_that_is_cancelled_while_it_waits_for_its_batch_does_not_run(
    live: TaskQueue, make: Make
) -> None:
    calls = Calls()
    worker = make(concurrency=1, lease=1.5)
    worker.register("index", calls, batch=2, batch_wait=15.0)
    worker.start()
    push(live, "a", name="index")
    until(live, "running", "a")
    assert live.cancel("a")
    until(live, "cancelled", "a")
    push(live, "b", name="index")
    finished(live, "b")
    assert calls.ids == [["b"]]


def test_a_timeout_ends_the_call_and_fails_all_its_tasks(
    live: TaskQueue, make: Make, person: Person
) -> None:
    began = threading.Event()
    told: list[TaskContext] = []

    def spin(payloads: Payloads, contexts: list[TaskContext]) -> None:
        told.extend(contexts)
        began.set()
        while True:
            pass

    worker = make(concurrency=1, alerts=person.alerts)
    worker.register("index", spin, batch=3, timeout=0.2, retries=0)
    fill(live, "ann", 3, name="index")
    worker.start()
    assert began.wait(30)
    until(live, "buried", "ann-0", "ann-1", "ann-2")
    assert {info_of(live, f"ann-{n}").error for n in range(3)} == {
        "timed out: ran for more than 0.2 s"
    }
    assert [each.cancelled for each in told] == [True] * 3


def test_a_worker_that_stops_gives_back_what_it_gathers_and_waits_for_what_runs(
    live: TaskQueue, make: Make
) -> None:
    held, gathered = Held(), Calls()
    worker = make(concurrency=2)
    worker.register("index", held, batch=2)
    worker.register("later", gathered, batch=9, batch_wait=15.0)
    fill(live, "ann", 2, name="index")
    worker.start()
    assert held.begun.wait(30)
    push(live, "g", name="later")
    until(live, "running", "g")
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(worker.stop(30)))
    stopping.start()
    until(live, "ready", "g")
    held.go_on.set()
    stopping.join(30)
    assert stopped == [True]
    assert gathered.ids == []
    assert states(live, "ann-0", "ann-1") == ["finished", "finished"]
    assert info_of(live, "g").attempts == 0


def test_a_stop_in_the_middle_of_a_batch_releases_all_of_it(live: TaskQueue, make: Make) -> None:
    held = Held()
    worker = make(concurrency=1)
    worker.register("index", held, batch=3)
    fill(live, "ann", 3, name="index")
    worker.start()
    assert held.begun.wait(30)
    assert worker.stop(0.0) is False
    assert states(live, "ann-0", "ann-1", "ann-2") == ["ready"] * 3
    assert all(each.cancelled for each in held.contexts)
    held.go_on.set()


def test_a_drained_worker_gives_back_what_it_gathers(live: TaskQueue, make: Make) -> None:
    worker = make(worker_id="w")
    worker.register("index", Calls(), batch=9, batch_wait=15.0)
    worker.start()
    push(live, "g", name="index")
    until(live, "running", "g")
    pool = worker._pool
    assert pool is not None
    pool._heartbeat.is_draining = True  # as its next heartbeat would learn
    pool._listener.nudge()
    eventually(lambda: worker.state == "stopped", "it has ended")
    assert info_of(live, "g").state == "ready"


def test_calls_for_one_user_each_run_in_all_slots(live: TaskQueue, make: Make) -> None:
    calls = Calls()
    worker = make(concurrency=3)
    worker.register("index", calls, batch=20, batch_by="user")
    users = [f"u{n}" for n in range(7)]
    for user in users:
        fill(live, user, 12, name="index")
    worker.start()
    finished(live, *(f"{user}-{n}" for user in users for n in range(12)))
    assert all(len(set(each)) == 1 for each in calls.users)
    assert sum(calls.sizes) == 7 * 12
    assert live.inspect().counters.get("expired", 0) == 0


@pytest.mark.processes
def test_processes_run_batches_and_are_replaced_after_max_tasks(live: TaskQueue) -> None:
    worker = Worker(live, processes=1, max_tasks=10, concurrency=1)
    worker.register("index", lambda payloads: [len(payloads)] * len(payloads), batch=4)
    fill(live, "ann", 24, name="index")
    worker.start()
    try:
        finished(live, *(f"ann-{n}" for n in range(24)))
    finally:
        assert worker.stop(30)
    sizes = [info_of(live, f"ann-{n}").result for n in range(24)]
    assert max(sizes) == 4


def test_no_task_of_a_batch_is_lost_on_a_bad_network(
    far: TaskQueue, near: redis.Redis, proxy: LossyProxy
) -> None:
    """Answers are lost now and then: each task ends once, and has its result."""
    worker = Worker(far, concurrency=2, lease=5.0)
    worker.register("index", Calls(lambda each: each.task_id), batch=10)
    fill(far, "ann", 60, name="index")
    worker.start()
    try:
        for _ in range(3):
            proxy.drop_replies()
        finished(far, *(f"ann-{n}" for n in range(60)))
    finally:
        worker.stop(30)
    assert [info_of(far, f"ann-{n}").result for n in range(60)] == [f"ann-{n}" for n in range(60)]
    assert stored.stats(near)["finished"] == 60
