"""Small programs that together make every call to Redis that the library can make.

Each tour uses the public objects as a user would, notes each attempt and its answer, and may be
killed at any of its calls. Then its notes are all that is known.
"""

import json
import logging
import os
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import redis
from prometheus_client import CollectorRegistry

from fairqueue.access.audit import AuditLog
from fairqueue.access.credentials import AccessStore, Actor
from fairqueue.access.idempotency import ReplyStore
from fairqueue.clock import ManualClock
from fairqueue.doctor import Doctor
from fairqueue.errors import FairQueueError, QueueFull, RedisRefused
from fairqueue.history.runs import History
from fairqueue.inspection import Inspector
from fairqueue.link.keys import Keys
from fairqueue.link.partitions import partition_of
from fairqueue.models import Claim, QueueSettings, Task, UserSettings
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.repartition import Repartition
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.web.missing import Absences
from fairqueue.worker.handlers import Discard, Retry
from fairqueue.worker.worker import Worker

LEASE_S = 30.0
TERM_S = 10.0
START_S = 1_700_000_000.0  # when every tour begins, by its own clock
SHORT_WAIT_S = 0.02  # for a token that does not come
TENANT = "north"
POOL = "gpu"
# A Redis user that may not read its permissions, while tours run.
LIMITED_USER, LIMITED_PASSWORD = "fairqueue-faults-limited", secrets.token_urlsafe(16)

T = TypeVar("T")
Value = dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tour:
    """A program to be killed.

    spoils: keys that it corrupts on purpose, and that an operator has to delete after its death.
    mends: it repairs inconsistent records, which may be inconsistent until then. asks_sentinels:
    its server is found through sentinels. forgets_scripts: the scripts must be loaded again.
    """

    name: str
    play: Callable[["Stage"], None]
    spoils: tuple[str, ...] = ()
    mends: bool = False
    asks_sentinels: bool = False
    forgets_scripts: bool = False


class Stage:
    """The objects of a tour, and its journal.

    `raw` is a client without failpoints, for corrupting data.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        journal: int,
        client: Callable[..., redis.Redis],
        raw: redis.Redis,
    ) -> None:
        self.rng = random.Random(f"{name} {seed}")
        self.client = client
        self.raw = raw
        self.clock = ManualClock(START_S)
        self._journal = journal
        self._count = 0
        self._values: dict[str, Value] = {}
        self.user_of: dict[str, str] = {}  # of the tasks that were pushed together
        self.queue: TaskQueue
        self.scheduler: TaskScheduler

    def open(self, queue: str) -> None:
        """Create the objects that all tours use, on instrumented connections."""
        self.queue = TaskQueue(self.client(), queue, clock=self.clock)

    def lead(self, scheduler_id: str = "first") -> TaskScheduler:
        """Return a scheduler, created once, whose metrics are not exposed."""
        if not hasattr(self, "scheduler"):
            self.scheduler = self.new_scheduler(scheduler_id)
        return self.scheduler

    def new_scheduler(self, scheduler_id: str) -> TaskScheduler:
        return TaskScheduler(
            self.queue, scheduler_id, lock_timeout=TERM_S, registry=CollectorRegistry()
        )

    @property
    def now(self) -> datetime:
        return self.clock.now()

    # --- the journal ------------------------------------------------------------------------------

    def note(self, *fields: Any) -> None:
        """Write a line of the journal. It is in the kernel when this returns."""
        os.write(self._journal, json.dumps(fields, default=str).encode() + b"\n")

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.note("clock", self.clock.now_ms())

    def op(
        self,
        action: Callable[[], T],
        told: Callable[[T], dict[str, Any]] = lambda _: {},
        **effects: Any,
    ) -> T:
        """Do something, with a note before and after; `told` adds to the latter.

        The effects are read by `aftermath.Journal`.
        """
        self._count += 1
        number = self._count
        self.note("try", number, effects)
        try:
            answer = action()
        except FairQueueError:
            self.note("refused", number)
            raise
        self.note("ok", number, told(answer))
        for name, (_, after) in effects.get("sets", {}).items():
            self._values[name] = after
        return answer

    def change(self, register: str, change: Value, action: Callable[[], T]) -> T:
        """Do something that sets readable values: all of them or none."""
        return self.op(action, sets={register: self._step(register, change)})

    def change_all(self, changes: dict[str, Value], action: Callable[[], T]) -> T:
        """The same for several registers, each by itself."""
        return self.op(action, sets={name: self._step(name, new) for name, new in changes.items()})

    def value(self, register: str) -> Value:
        """Return the last value of a register."""
        return self._values.get(register, _default(register))

    def new_id(self, prefix: str) -> str:
        """Return a new id."""
        self._count += 1
        return f"{prefix}-{self._count}"

    def _step(self, register: str, change: Value) -> tuple[Value, Value]:
        before = self.value(register)
        return before, None if change is None else {**(before or {}), **change}

    # --- tasks ------------------------------------------------------------------------------------

    def specs(self, count: int, prefix: str = "t", **fields: Any) -> list[dict[str, Any]]:
        """Return fields of new tasks of some users, with all kinds of options."""
        rng = self.rng
        found = []
        for _ in range(count):
            user = f"u{rng.randrange(3)}"
            spec: dict[str, Any] = {
                "user_id": user,
                "task_id": self.new_id(prefix),
                "payload": {"n": rng.randrange(100)},
                "priority": rng.randint(1, 5),
            }
            if user == "u0":
                spec["tenant"] = TENANT
            if rng.random() < 0.2:
                spec["delay"] = rng.randint(1, 60)
            found.append(spec | fields)
        return found

    def push(self, specs: Sequence[dict[str, Any]]) -> list[str]:
        """Push tasks together, all or none."""
        self.user_of.update((spec["task_id"], spec["user_id"]) for spec in specs)
        tasks = [Task.create(**spec) for spec in specs]
        return self.op(
            lambda: [self.queue.push(tasks[0])] if len(tasks) == 1 else self.queue.push_many(tasks),
            tasks=specs,
        )

    def push_some(self, least: int = 3, most: int = 8, **fields: Any) -> list[str]:
        return self.push(self.specs(self.rng.randint(least, most), **fields))

    def claim(self, limit: int = 1, worker: str = "w") -> list[Claim]:
        return self.op(lambda: self.queue.claim(worker, limit, LEASE_S))

    def finish(self, claims: Sequence[Claim]) -> None:
        """Finish tasks. Acknowledged ones stay finished."""
        results = [(claim, {"by": "tour", "n": self.rng.random()}) for claim in claims]
        self.op(
            lambda: self.queue.finish_many(results),
            told=lambda words: {"ended": _ended(results, words)},
        )

    def bury(self, claim: Claim) -> None:
        ended = {claim.task.task_id: {"state": "buried"}}
        self.op(lambda: self.queue.bury(claim, "no use"), told=lambda _: {"ended": ended})

    def shuffled(self, *steps: Callable[[], object]) -> None:
        """Do all of these, in an order that depends on the seed."""
        order = list(steps)
        self.rng.shuffle(order)
        for step in order:
            step()


def _ended(results: Sequence[tuple[Claim, Any]], words: Sequence[str]) -> dict[str, Any]:
    return {
        claim.task.task_id: {"state": word} | ({"result": result} if word == "finished" else {})
        for (claim, result), word in zip(results, words, strict=True)
        if word != "lost_lease"
    }


def _finished(result: tuple[Claim, Any], _: object) -> dict[str, Any]:
    return {"ended": _ended([result], ["finished"])}


def _default(register: str) -> Value:
    """Return the initial value of a register."""
    kind = register.partition("/")[0]
    if kind == "user":
        return asdict(UserSettings())
    if kind == "settings":
        return asdict(QueueSettings())
    return _DEFAULTS.get(kind)


_DEFAULTS: dict[str, Value] = {
    "key": {"count": 0},
    "login": {"used": False},
    "session": {"holds": True},
    "reply": {"state": "new"},
}


# --- producers and workers ------------------------------------------------------------------------


def produce(stage: Stage) -> None:
    """Push in every way, cancel, move, and inspect waiting tasks."""
    queue, rng = stage.queue, stage.rng
    worker = Worker(queue, registry=CollectorRegistry())
    mail = worker.task("mail")(lambda payload: None)
    ids = stage.push_some()

    def dispatch() -> None:
        (spec,) = stage.specs(1, name="mail", payload={"to": "x"})
        delay = spec.pop("delay", None)
        way = mail.options(
            priority=spec["priority"], task_id=spec["task_id"], tenant=spec.get("tenant")
        )
        way = way if delay is None else way.delay(delay)
        stage.op(
            lambda: way.push(spec["user_id"], to="x"),
            tasks=[spec | ({} if delay is None else {"delay": delay})],
        )

    def cancel() -> None:
        task_id = rng.choice(ids)
        stage.op(
            lambda: queue.cancel(task_id),
            told=lambda done: {"ended": {task_id: {"state": "cancelled"}}} if done else {},
        )

    def move() -> None:
        task_id = rng.choice(ids)
        stage.op(lambda: queue.reschedule(task_id, delay=rng.choice([None, 5, 50])))

    def look() -> None:
        queue.size()
        queue.size(user_id="u1")
        queue.get(ids[0])
        queue.explain(ids[-1])

    stage.shuffled(
        dispatch,
        cancel,
        move,
        look,
        lambda: stage.push_some(1, 1),
        lambda: stage.push_some(2, 5),
    )


def work(stage: Stage) -> None:
    """Claim tasks and end them in every way; let leases expire."""
    queue, rng = stage.queue, stage.rng
    stage.push(stage.specs(rng.randint(8, 12), delay=None))
    held = stage.claim(limit=rng.randint(7, 8))

    def take() -> Claim:
        if not held:
            held.extend(stage.claim(limit=1))
        return held.pop(rng.randrange(len(held)))

    def retry() -> None:
        claim, delay = take(), rng.choice([0.0, 7.0])
        stage.op(lambda: queue.retry(claim, "broken", delay))

    def release() -> None:
        claim = take()
        stage.op(lambda: queue.release(claim))

    def cancel() -> None:
        claim = take()
        task_id = claim.task.task_id
        ended = {task_id: {"state": "cancelled"}}
        stage.op(lambda: queue.cancel(task_id), told=lambda _: {"ended": ended})
        if rng.random() < 0.5:
            stage.finish([claim])

    def finish_and_claim() -> None:
        results = [(take(), {"by": "tour", "n": rng.random()})]
        _, claims, _ = stage.op(
            lambda: queue.finish_and_claim(results, "w", 1, LEASE_S),
            told=lambda answer: {"ended": _ended(results, answer[0])},
        )
        held.extend(claims)

    def extend() -> None:
        if held:
            stage.op(lambda: queue.extend(held, LEASE_S))

    extend()
    stage.shuffled(
        retry,
        release,
        cancel,
        extend,
        finish_and_claim,
        lambda: stage.bury(take()),
        lambda: stage.finish([take()]),
    )
    stage.advance(LEASE_S + 1)  # leases still held are taken back by the next claim
    stage.finish(stage.claim(limit=2, worker="w2"))


def run_handlers(stage: Stage) -> None:
    """A worker with handlers that succeed, fail and give up; it is drained and stops."""
    queue, rng = stage.queue, stage.rng
    worker = Worker(
        queue, concurrency=3, lease=LEASE_S, worker_id="hand", registry=CollectorRegistry()
    )
    logger = logging.getLogger("faults.tour")

    @worker.task("good", slots=2)
    def good(payload: dict[str, Any], context: Any) -> dict[str, Any]:
        context.log("done")
        return {"by": "handler"}

    @worker.task("bad", retries=1, backoff=[5.0], jitter="none", timeout=60)
    def bad(payload: dict[str, Any]) -> None:
        logger.debug("about to fail")
        raise Retry("again") if payload["n"] % 2 else ValueError("bad")

    @worker.task("ugly")
    def ugly(payload: dict[str, Any]) -> None:
        raise Discard("never")

    names = ["good", "bad", "ugly", *rng.choices(["good", "bad", "ugly", "unknown"], k=3)]
    for name in names:
        stage.push(stage.specs(1, name=name))
    stage.op(worker.run_until_empty)
    stage.advance(61)
    stage.op(worker.run_once)
    stage.push(stage.specs(2, name="good"))
    stage.op(lambda: WorkerStore(queue.link).drain("hand", "an operator"))
    WorkerStore(queue.link).alive()
    stage.op(worker.run_once)
    stage.op(lambda: worker.stop(timeout=5.0))


def wait(stage: Stage) -> None:
    """Wait for tokens: one that exists, and one that never comes."""
    stage.push_some(1, 3, delay=None)
    stage.finish(stage.claim(limit=5))
    stage.op(lambda: stage.queue.claim("w", wait=SHORT_WAIT_S))
    _add(stage, 1)
    listener = stage.queue.link.listener("scheduler_wake")
    listener.wait(SHORT_WAIT_S)
    listener.wait(SHORT_WAIT_S)
    listener.close()


def overrun(stage: Stage) -> None:
    """A leader finds runs that continue after their time-out; limits hold tasks back."""
    queue = stage.queue
    stage.change("limits/slow", {"slots": 2, "timeout": 5.0}, lambda: _slow(queue))
    stage.push(stage.specs(4, name="slow", delay=None))
    held = stage.claim(limit=4)
    for _ in range(2):  # the lease goes on, and the time-out is over by a lease
        stage.advance(20)
        stage.op(lambda: queue.extend(held, LEASE_S))
    stage.op(lambda: WorkerStore(queue.link).find_stale())
    stage.op(stage.lead().tick)
    stage.finish(held[:1])


def _slow(queue: TaskQueue) -> None:
    queue.set_limits("slow", slots=2, timeout=5.0)


# --- schedules ------------------------------------------------------------------------------------


def _spec(stage: Stage, schedule_id: str) -> dict[str, Any]:
    """Return the fields of a schedule that fires every few seconds."""
    rng = stage.rng
    spec: dict[str, Any] = {
        "schedule_id": schedule_id,
        "user_id": f"u{rng.randrange(3)}",
        "name": rng.choice(["report", "mail"]),
        "payload": {"n": rng.randrange(9)},
        "priority": rng.randint(1, 5),
        "every": float(rng.choice([7, 20, 45])),
        "misfire": rng.choice(["fire_once", "skip", "fire_all"]),
        "overlap": rng.choice(["allow", "skip", "buffer_one"]),
    }
    if rng.random() < 0.3:
        del spec["every"]
        spec["cron_expr"] = "* * * * *"
    if spec["user_id"] == "u0":
        spec["tenant"] = TENANT
    return spec


READ_BACK = ("user_id", "name", "payload", "priority")


def _stored(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the compared fields of a schedule."""
    return {name: spec[name] for name in READ_BACK} | {"is_active": True}


def _add(stage: Stage, count: int, prefix: str = "s", **fields: Any) -> list[str]:
    """Add schedules in one call, all or none."""
    specs = [_spec(stage, stage.new_id(prefix)) | fields for _ in range(count)]
    stage.op(
        lambda: stage.lead().add_schedules(specs),
        sets={f"schedule/{spec['schedule_id']}": (None, _stored(spec)) for spec in specs},
        together=[f"schedule/{spec['schedule_id']}" for spec in specs],
    )
    return [str(spec["schedule_id"]) for spec in specs]


def write_schedules(stage: Stage) -> None:
    """Add, change, pause, resume, copy and remove schedules, one by one."""
    scheduler, rng = stage.lead(), stage.rng
    ids = _add(stage, rng.randint(3, 5))

    def update() -> None:
        each = rng.choice(ids)
        fields: dict[str, Any] = {"payload": {"n": 77}, "priority": 2}
        stage.change(f"schedule/{each}", fields, lambda: scheduler.update_schedule(each, **fields))

    def pause() -> None:
        each = rng.choice(ids)
        until = rng.choice([None, stage.clock.now_ms() / 1000 + 30])
        stage.change(
            f"schedule/{each}",
            {"is_active": False},
            lambda: scheduler.pause_schedule(each, until=until, by="ann"),
        )
        stage.advance(3)
        if rng.random() < 0.7:
            stage.change(
                f"schedule/{each}", {"is_active": True}, lambda: scheduler.resume_schedule(each)
            )

    def copy() -> None:
        each = rng.choice(ids)
        value = (stage.value(f"schedule/{each}") or {}) | {"is_active": True}
        stage.change(
            f"schedule/{each}-copy", value, lambda: scheduler.copy_schedule(each, f"{each}-copy")
        )

    def trigger() -> None:
        each = rng.choice(ids)
        stage.op(
            lambda: scheduler.trigger(each, triggered_by="ann"),
            told=lambda task_id: {"stored": [task_id]},
            triggers=[each],
        )

    def remove() -> None:
        (each,) = _add(stage, 1, prefix="gone")
        stage.change(f"schedule/{each}", None, lambda: scheduler.remove_schedule(each))

    def look() -> None:
        scheduler.get_schedule(ids[0])
        scheduler.list_schedules(limit=10)
        scheduler.list_schedules(name_prefix="re", limit=10)
        scheduler.list_schedules(contains="s", tenant=TENANT, limit=10)
        scheduler.changes(ids[0])
        scheduler.problems()

    stage.shuffled(update, pause, copy, trigger, remove, look)


def write_many_schedules(stage: Stage) -> None:
    """Change many schedules: in bulk, by import, for new time zone data, and by backfill."""
    scheduler, rng = stage.lead(), stage.rng
    ids = _add(stage, rng.randint(3, 5))
    registers = [f"schedule/{each}" for each in ids]

    def bulk() -> None:
        stage.change_all(
            {name: {"is_active": False} for name in registers},
            lambda: scheduler.bulk("pause", ids=ids, dry_run=False, by="ann"),
        )
        stage.advance(rng.choice([1, 9]))
        stage.change_all(
            {name: {"is_active": True} for name in registers},
            lambda: scheduler.bulk("resume", ids=ids, dry_run=False),
        )
        stage.op(
            lambda: scheduler.bulk("trigger", ids=ids[:2], dry_run=False, by="ann"),
            triggers=ids[:2],
        )

    def exchange() -> None:
        documents = scheduler.export_schedules()
        chosen = rng.choice(documents)
        chosen["payload"] = {"n": 55}
        spec = _spec(stage, stage.new_id("imported"))
        documents.append(spec)
        stage.change_all(
            {
                f"schedule/{chosen['schedule_id']}": {"payload": {"n": 55}},
                f"schedule/{spec['schedule_id']}": _stored(spec),
            },
            lambda: scheduler.import_schedules(documents, dry_run=False, by="ann"),
        )

    def backfill() -> None:
        each, now = rng.choice(ids), stage.clock.now_ms() / 1000
        fill = lambda: scheduler.backfill(each, now - 100, now - 10, dry_run=False)  # noqa: E731
        stage.op(fill, fills=[each])
        scheduler.moments(each, now - 100, now + 100)
        scheduler.moments(each, now - 100, now + 100, limit=2)

    def replan() -> None:
        stage.op(scheduler.replan)

    def prune() -> None:
        (spare,) = _add(stage, 1, prefix="pruned")
        kept = [each for each in scheduler.export_schedules() if each["schedule_id"] != spare]
        stage.change(
            f"schedule/{spare}",
            None,
            lambda: scheduler.import_schedules(kept, prune=True, dry_run=False),
        )

    stage.shuffled(bulk, exchange, backfill, replan, prune)


def fire(stage: Stage) -> None:
    """Lead, fire due schedules, resume paused ones, set aside broken ones, resign."""
    scheduler, rng = stage.lead(), stage.rng
    ids = _add(stage, rng.randint(2, 5))
    (paused,) = _add(stage, 1, prefix="paused")
    until = stage.clock.now_ms() / 1000 + 8
    stage.change(
        f"schedule/{paused}",
        {"is_active": False},
        lambda: scheduler.pause_schedule(paused, until=until),
    )
    (broken,) = _add(stage, 1, prefix="broken", every=7.0, cron_expr=None)
    stage.op(lambda: _spoil_schedule(stage, broken), spoiled=[broken])
    ticks: list[int] = [9, *rng.choices([1, 20, 61], k=2)]
    for seconds in ticks:
        stage.advance(seconds)
        stage.op(scheduler.tick, resumes=[paused])
        stage.finish(stage.claim(limit=rng.randint(1, 3)))
    if rng.random() < 0.5:
        stage.change(f"schedule/{ids[0]}", None, lambda: scheduler.remove_schedule(ids[0]))
    stage.op(scheduler.stop)


def _spoil_schedule(stage: Stage, schedule_id: str) -> None:
    stage.raw.hset(stage.queue.keys["schedules"].decode(), schedule_id, "{ no JSON")


def take_over(stage: Stage) -> None:
    """One scheduler leads, another takes over; the first one notices."""
    rng = stage.rng
    first, second = stage.lead("first"), stage.new_scheduler("second")
    _add(stage, rng.randint(2, 4))
    stage.advance(8)
    stage.op(first.tick)
    stage.op(second.tick)
    stage.advance(TERM_S + rng.choice([1, 30]))
    stage.op(second.tick)
    stage.advance(8)
    stage.op(first.tick)
    stage.op(second.tick)
    stage.op(second.stop)
    stage.op(first.tick)


# --- operators ------------------------------------------------------------------------------------


def settings(stage: Stage) -> None:
    """Change settings of the queue, of users and of names, and read them back."""
    queue, rng = stage.queue, stage.rng
    stage.push_some()

    def configure() -> None:
        values: dict[str, Any] = {
            "max_attempts": rng.randint(2, 9),
            "cost": "time",
            "critical_share": 0.25,
        }
        stage.change("settings/", values, lambda: queue.configure(**values))

    def user() -> None:
        values: dict[str, Any] = {"weight": 2.5, "max_running": rng.randint(1, 3), "rate": 9.0}
        values["paused"] = True
        stage.change("user/u1", values, lambda: queue.set_user("u1", **values))
        stage.claim(limit=5)
        stage.change("user/u1", {"paused": False}, lambda: queue.set_user("u1", paused=False))

    def limits() -> None:
        values: dict[str, Any] = {"slots": rng.randint(1, 4), "rate": 5.0, "timeout": 9.0}
        stage.change("limits/default", values, lambda: queue.set_limits("default", **values))
        stage.claim(limit=5)

    def full() -> None:
        stage.change("user/u2", {"max_waiting": 1}, lambda: queue.set_user("u2", max_waiting=1))
        with suppress(QueueFull):
            stage.push(stage.specs(3, user_id="u2", delay=None))

    def look() -> None:
        queue.get_user("u0")
        queue.tenants_of("u0")
        queue.get_limits()
        queue.settings()
        queue.inspect()

    stage.shuffled(configure, user, limits, full, look)


def flow(stage: Stage) -> None:
    """Share between tenants, with pools, keys, unique tasks and costs; move a user."""
    queue, rng = stage.queue, stage.rng
    stage.op(lambda: queue.set_limit("account:*", slots=2))
    specs = stage.specs(rng.randint(6, 9), tenant=TENANT)
    for spec in specs:
        spec |= {"limit_keys": [f"account:{rng.randrange(2)}"], "unique": spec["task_id"]}
        spec |= {"cost": 2.5, "expires": 86_400.0, "pool": rng.choice(("default", POOL))}
    stage.push(specs)

    def share() -> None:
        stage.op(lambda: queue.set_tenant(TENANT, weight=rng.choice((0.5, 2.0)), max_running=3))

    def serve() -> None:
        claims = stage.op(lambda: queue.claim("w", 4, LEASE_S, pools=("default", POOL)))
        results = [(claim, {"by": "tour", "n": rng.random()}) for claim in claims]
        for each in results:
            stage.op(partial(queue.finish, *each, cost=3.0), told=partial(_finished, each))

    def move() -> None:
        stage.op(lambda: queue.move_user("u1", "south", tenant=TENANT))

    def look() -> None:
        queue.get_tenant(TENANT)
        queue.quote("u1", tenant=TENANT)

    stage.shuffled(share, serve, move, look)


def _with_history(stage: Stage) -> tuple[list[str], list[str]]:
    """Tasks that ended well, and dead letters."""
    stage.push(stage.specs(stage.rng.randint(7, 9), delay=None))
    claims = stage.claim(limit=5)
    dead = claims[:3]
    for claim in dead:
        stage.bury(claim)
    stage.finish(claims[3:])
    return [claim.task.task_id for claim in claims[3:]], [claim.task.task_id for claim in dead]


def operate(stage: Stage) -> None:
    """Run dead letters again, drop them, cancel the backlog of a user."""
    history, rng = History(stage.queue), stage.rng
    done, dead = _with_history(stage)
    inspector = Inspector(stage.queue, Actor(name="ann"))

    def revive() -> None:
        stage.op(
            lambda: history.retry(dead[0], triggered_by="ann"),
            told=lambda task_id: {"stored": [task_id]},
            revives=[dead[0]],
        )

    def discard() -> None:
        stage.op(
            lambda: history.discard(dead[1]), told=lambda _: {"dropped": [dead[1]]}, drops=[dead[1]]
        )

    def purge() -> None:
        waiting = stage.user_of.keys() - {*done, *dead}
        user = stage.user_of[rng.choice(sorted(waiting))]
        tenant = TENANT if user == "u0" else None
        stage.op(lambda: inspector.users.purge(user, tenant=tenant, dry_run=False))

    stage.shuffled(revive, discard, purge)


def prune(stage: Stage) -> None:
    """Drop old runs, and keep those that are not as old."""
    done, dead = _with_history(stage)
    stage.advance(5)
    _with_history(stage)
    old = [*done, *dead]
    stage.op(
        lambda: Inspector(stage.queue).system.prune(4, dry_run=False),
        told=lambda _: {"dropped": old},
        drops=old,
    )


def inspect(stage: Stage) -> None:
    """Read and change everything that an operator can."""
    inspector = Inspector(stage.queue, Actor(name="ann"))
    done, dead = _with_history(stage)
    ids = _add(stage, 2, user_id="u0", tenant=TENANT)
    stage.advance(61)
    stage.op(stage.lead().tick)
    stage.finish(stage.claim(limit=20))
    theirs = inspector.acting_as(Actor(name="bob", role="operator", tenant=TENANT))
    stage.shuffled(
        *_runs_seen(inspector, done, dead),
        *_users_seen(inspector),
        *_system_seen(inspector),
        *_schedules_seen(inspector, ids),
        *_tenant_seen(theirs),
        *_changed(stage, inspector),
    )


def _runs_seen(inspector: Inspector, done: list[str], dead: list[str]) -> Iterator[Any]:
    yield lambda: inspector.runs.list()
    yield lambda: inspector.runs.list("running")
    yield lambda: inspector.runs.get(done[0])
    yield lambda: inspector.runs.logs(dead[0])
    yield lambda: inspector.runs.explain(done[0])
    yield lambda: inspector.failed.list()
    yield lambda: inspector.failed.groups()
    yield lambda: inspector.tasks.list()
    yield lambda: inspector.tasks.list(user_id="u1")


def _users_seen(inspector: Inspector) -> Iterator[Any]:
    yield lambda: inspector.users.list()
    yield lambda: inspector.users.list(order="name")
    yield lambda: inspector.users.overview()
    yield lambda: inspector.users.shares()
    yield lambda: inspector.users.next_wait("u1")
    yield lambda: inspector.users.purge("u1")
    yield lambda: inspector.tenants.list()


def _system_seen(inspector: Inspector) -> Iterator[Any]:
    yield lambda: inspector.system.overview()
    yield lambda: inspector.system.series()
    yield lambda: inspector.system.attention()
    yield lambda: inspector.system.settings()
    yield lambda: inspector.system.prune(5)
    yield lambda: inspector.workers.list()
    yield lambda: inspector.audit.list()
    yield lambda: inspector.keys.list()


def _schedules_seen(inspector: Inspector, ids: list[str]) -> Iterator[Any]:
    yield lambda: inspector.schedules.list()
    yield lambda: inspector.schedules.get(ids[0])
    yield lambda: inspector.schedules.upcoming()
    yield lambda: inspector.schedules.history_chart(ids[0])
    yield lambda: inspector.schedules.logs(ids[0])


def _tenant_seen(theirs: Inspector) -> Iterator[Any]:
    yield lambda: theirs.system.overview()
    yield lambda: theirs.schedules.list()
    yield lambda: theirs.users.list(order="name")
    yield lambda: theirs.users.shares()
    yield lambda: theirs.failed.groups()


def _changed(stage: Stage, inspector: Inspector) -> Iterator[Any]:
    spec = _spec(stage, stage.new_id("inspected"))
    register = f"schedule/{spec['schedule_id']}"
    yield lambda: stage.change(register, _stored(spec), lambda: inspector.schedules.add(**spec))
    yield lambda: stage.change(
        "user/u9", {"weight": 3.0}, lambda: inspector.users.set("u9", weight=3.0)
    )
    (task,) = stage.specs(1, prefix="inspected")
    as_stored = [task | {"triggered_by": "ann"}]
    yield lambda: stage.op(lambda: inspector.tasks.push(**task), tasks=as_stored)


def keep_door(stage: Stage) -> None:
    """Create and end API keys, logins and sessions."""
    access = AccessStore(stage.queue.link)
    new = stage.change(
        "key/north", {"count": 1}, lambda: access.create_key("north", "operator", TENANT, by="ann")
    )
    stage.note("secret", "key", new.secret)
    admission = access.admit(new.secret, rate=100, burst=10)
    assert admission.actor is not None
    login = stage.op(lambda: access.create_login(admission.actor))  # type: ignore[arg-type]
    stage.note("secret", "login", login)
    session = stage.change("login/", {"used": True}, lambda: access.redeem(login))
    assert session is not None
    stage.note("secret", "session", session.secret)
    access.admit(session.secret, rate=100, burst=10)
    access.holding([new.info.key_id, session.info.key_id])
    access.keys()
    again = access.redeem(new.secret)
    assert again is not None
    if stage.rng.random() < 0.5:
        stage.change("session/", {"holds": False}, lambda: access.end(session.secret))
    else:
        stage.op(lambda: access.end(again.secret))
    stage.change_all(
        {"key/north": {"count": 0}, "session/": {"holds": False}},
        lambda: access.revoke(new.info.key_id),
    )


def keep_books(stage: Stage) -> None:
    """Write entries of the audit log, and answers to idempotent requests."""
    log, replies = AuditLog(stage.queue.link), ReplyStore(stage.queue.link)
    actor = Actor(name="ann")

    def audit() -> None:
        entry = stage.change(
            "audit/x", {"outcome": "started"}, lambda: log.begin(actor, "test.act", "x")
        )
        stage.change("audit/x", {"outcome": "done"}, lambda: log.end(entry, "done"))
        log.entries(action="test.")

    def answer() -> None:
        begun = stage.change(
            "reply/one", {"state": "running"}, lambda: replies.begin("one", "digest")
        )
        stage.change(
            "reply/one",
            {"state": "done", "status": 201},
            lambda: replies.done("one", 201, {"a": "b"}, "body", token=begun.token),
        )
        replies.begin("one", "digest")

    def give_up() -> None:
        begun = stage.change(
            "reply/two", {"state": "running"}, lambda: replies.begin("two", "digest")
        )
        stage.change("reply/two", {"state": "new"}, lambda: replies.drop("two", token=begun.token))

    stage.shuffled(audit, answer, give_up)


# --- the server's own side ------------------------------------------------------------------------


def doctor(stage: Stage) -> None:
    """Examine a queue with inconsistent records, and repair them.

    Also look up a user whose delayed tasks were stored by an older version.
    """
    _with_history(stage)
    _add(stage, 2)
    stage.push(stage.specs(stage.rng.randint(1, 4), delay=60))
    stage.raw.delete(stage.queue.keys["delayed_index"].decode())
    stage.op(lambda: Inspector(stage.queue).users.list(order="name"))
    stage.op(lambda: _disagree(stage))
    stage.op(lambda: Doctor(stage.queue).examine(fix=True))


def _disagree(stage: Stage) -> None:
    """Remove index entries of a few records, and add entries without a record."""
    keys, rng, raw = stage.queue.keys, stage.rng, stage.raw
    for name in rng.sample(["waiting", "ended", "dead", "due", "schedule_index", "runs"], k=3):
        members: Any = raw.zrange(keys[name].decode(), 0, 0)
        if members:
            raw.zrem(keys[name].decode(), members[0])
    raw.zadd(keys["backlog"].decode(), {"u9\0000000000\0nobody\0default": 0})
    raw.hset(keys["running"].decode(), "u9", "7")


def limited_doctor(stage: Stage) -> None:
    """Examine an empty queue in another database, as a user who may not read its permissions."""
    client = stage.client(username=LIMITED_USER, password=LIMITED_PASSWORD, db=1)
    queue = TaskQueue(client, stage.queue.name, clock=stage.clock)
    queue.check()
    Doctor(queue).examine(records=False)
    queue.close()


def destroy(stage: Stage) -> None:
    """Delete a whole queue: another one, whose tasks are not checked afterwards."""
    other = TaskQueue(stage.client(), stage.queue.name + ".gone", clock=stage.clock)
    for n in range(stage.rng.randint(1, 4)):
        other.push(Task.create(user_id=f"u{n}"))
    keys = stage.raw.exists(*Keys(other.name).all())
    stage.op(other.destroy, destroys=[other.name, keys])


def repartition(stage: Stage) -> None:
    """Move a whole queue to another one. Neither is checked afterwards: tests/repartition does."""
    old = TaskQueue(stage.client(), stage.queue.name + ".old", clock=stage.clock)
    new = TaskQueue(stage.client(), stage.queue.name + ".new", clock=stage.clock, partitions=2)
    old.push_many(Task.create(user_id=f"u{n}", delay=n % 2) for n in range(6))
    TaskScheduler(old, "planner").add_schedule("0 9 * * *", "u1")
    old.set_user("u1", weight=2.0)
    (done,) = old.claim("w")
    old.finish(done)
    Repartition(old, new).run()


def share_out(stage: Stage) -> None:
    """Use a queue with partitions. It is not checked afterwards: its own tests do that."""
    client, name = stage.client(), stage.queue.name + ".whole"
    queue = TaskQueue(client, name, clock=stage.clock, partitions=2)
    schedules = TaskScheduler(queue, "planner", registry=CollectorRegistry())
    tenants = [_group_in(number) for number in range(2)]
    queue.configure(ageing=60)
    queue.set_limits("default", slots=2, rate=5.0)
    queue.set_limit("account:*", slots=1)
    for n in range(8):
        fields: dict[str, Any] = {"tenant": tenants[n % 2], "limit_keys": ["account:1"]}
        queue.push(Task.create(user_id=f"u{n // 2}", task_id=f"t{n}", delay=n // 7, **fields))
    Inspector(queue).tenants.list()

    def serve() -> None:
        for claim in queue.claim("w", 3, LEASE_S):
            queue.finish(claim)
        stage.clock.advance(1)
        for claim in queue.claim("w", 3, LEASE_S):
            queue.release(claim)

    def move() -> None:
        queue.move_user("u1", tenants[0], tenant=tenants[1])
        id_ = schedules.add_schedule("0 9 * * *", "u1", tenant=tenants[0])
        schedules.update_schedule(id_, tenant=tenants[1])

    def look() -> None:
        queue.explain("t6")
        queue.quote("u3", tenant=tenants[0])
        Inspector(queue).users.next_wait("u3")
        Inspector(queue).partitions.read(memory=True)
        Absences(queue.link).is_back(0)

    def lead() -> None:
        schedules.tick()
        stage.clock.advance(11)
        schedules.tick()

    def fill() -> None:
        """One partition needs more room than its half of max_waiting."""
        queue.configure(max_waiting=60)
        queue.push_many(
            [Task.create(user_id="full", tenant=tenants[0], task_id=f"full{n}") for n in range(40)]
        )

    stage.shuffled(serve, move, look, lead, fill)


def _group_in(number: int) -> str:
    """A tenant of one of two partitions."""
    names = (f"tenant{n}" for n in range(100))
    return next(each for each in names if partition_of("u", each, 2) == number)


def refused(stage: Stage) -> None:
    """Use a key of a wrong type: the error names it."""
    stage.push_some()
    stage.raw.set(stage.queue.keys["audit"].decode(), "text")
    with suppress(RedisRefused):
        AuditLog(stage.queue.link).begin(Actor(name="ann"), "test.act", "y")
    stage.raw.delete(stage.queue.keys["audit"].decode())
    stage.push_some()


def scripts_gone(stage: Stage) -> None:
    """Flush the scripts of the server during work."""
    stage.push_some()
    stage.raw.script_flush()
    stage.push_some()
    claims = stage.claim(limit=3)
    stage.raw.script_flush()
    results = [(claim, {"by": "tour", "n": 1}) for claim in claims]
    _, more, _ = stage.op(
        lambda: stage.queue.finish_and_claim(results, "w", 2, LEASE_S),
        told=lambda answer: {"ended": _ended(results, answer[0])},
    )
    stage.finish(more)


def plain_scripts(stage: Stage) -> None:
    """Send scripts as text, for servers that do not support `#!lua`."""
    stage.queue.link._plain_scripts = True
    stage.push_some(2, 4)
    stage.finish(stage.claim(limit=2))


def ask_sentinels(stage: Stage) -> None:
    """Push and work on a server found through sentinels, on several connections."""
    stage.push_some(2, 4)
    stage.op(lambda: stage.queue.claim("w", 3, LEASE_S, wait=SHORT_WAIT_S))
    stage.push_some(1, 3)


TOURS = {
    tour.name: tour
    for tour in (
        Tour(name="produce", play=produce),
        Tour(name="work", play=work),
        Tour(name="handlers", play=run_handlers),
        Tour(name="wait", play=wait),
        Tour(name="overrun", play=overrun),
        Tour(name="schedules", play=write_schedules),
        Tour(name="many schedules", play=write_many_schedules),
        Tour(name="fire", play=fire),
        Tour(name="take over", play=take_over),
        Tour(name="settings", play=settings),
        Tour(name="flow", play=flow),
        Tour(name="operate", play=operate),
        Tour(name="prune", play=prune),
        Tour(name="inspect", play=inspect),
        Tour(name="door", play=keep_door),
        Tour(name="books", play=keep_books),
        Tour(name="doctor", play=doctor, mends=True),
        Tour(name="limited doctor", play=limited_doctor),
        Tour(name="destroy", play=destroy),
        Tour(name="repartition", play=repartition),
        Tour(name="partitions", play=share_out),
        Tour(name="refused", play=refused, spoils=("audit",)),
        Tour(name="scripts gone", play=scripts_gone, forgets_scripts=True),
        Tour(name="plain scripts", play=plain_scripts),
        Tour(name="sentinels", play=ask_sentinels, asks_sentinels=True),
    )
}
