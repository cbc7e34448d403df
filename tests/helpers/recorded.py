"""A queue with something in every one of its keys, as a version of FairQueue stores it.

`tests/data/queue-0.1.0.json` is such a queue as commit 17df8d8 wrote it: key -> type -> content;
`tests/data/queue-0.1.0-layout.json` as bdbb29b did, the first with a layout number;
`tests/data/queue-0.1.0-flat.json` as 13cf035 did, the last without two levels of fairness.
The tests load it into a real server and go on from there with the present code, so that what a
version stored that people run keeps working. It is never recorded anew, since the point of it is
its age: a later version that stores other things gets a file of its own, with

    PYTHONPATH=tests python -m helpers.recorded tests/data/queue-<version>.json

in a checkout of that version, and its name goes into RECORDED.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from fairqueue.access.audit import AuditLog
from fairqueue.access.credentials import AccessStore, Actor
from fairqueue.access.idempotency import ReplyStore
from fairqueue.clock import ManualClock
from fairqueue.history.runs import History
from fairqueue.link.keys import KEY_TYPES, Keys
from fairqueue.models import Claim, Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Failure, LogLines, Report
from fairqueue.queue.workers import WorkerStore
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.stats.samples import SampleStore

DATA = Path(__file__).parents[1] / "data"
# The oldest first.
RECORDED = ("queue-0.1.0.json", "queue-0.1.0-layout.json", "queue-0.1.0-flat.json")

# --- reading and writing --------------------------------------------------------------------------


def record(client: Any, name: str = "default") -> dict[str, Any]:
    """Everything that a queue has in Redis: key -> {type: content}, as JSON can hold it.

    Bytes that are no UTF-8 become lone surrogates, scores the text that Redis has for them.
    """
    keys, found = Keys(name), {}
    for key in KEY_TYPES:
        kind = client.type(keys[key]).decode()
        if kind == "hash":
            content: Any = {
                _text(f): _text(v) for f, v in sorted(client.hgetall(keys[key]).items())
            }
        elif kind == "zset":
            flat = client.execute_command("ZRANGE", keys[key], 0, -1, "WITHSCORES")
            content = [[_text(member), _score(score)] for member, score in _paired(flat)]
        elif kind == "list":
            content = [_text(item) for item in client.lrange(keys[key], 0, -1)]
        elif kind == "string":
            content = _text(client.get(keys[key]))
        else:
            continue
        found[key] = {kind: content}
    return found


def shape_of(keys: dict[str, Any]) -> dict[str, Any]:
    """A recorded queue without ids, numbers and errors: fields, and the types of their values."""
    found: dict[str, Any] = {}
    for key, stored in keys.items():
        ((kind, content),) = stored.items()
        if kind == "hash":
            items = content.items()
        elif kind == "string":
            items = [("", content)]
        else:
            items = [(each if kind == "list" else each[0], "") for each in content]
        if key == "notices":  # the last part is an error
            items = [(member.rpartition("\0")[0], value) for member, value in items]
        found[key] = kind, sorted({(_masked(name), _types(value)) for name, value in items})
    return found


def _masked(text: str) -> str:
    return re.sub(r"\d+", "0", re.sub(r"[0-9a-f]{16,}", "<id>", text))


def _types(text: str) -> str:
    try:
        record = json.loads(text)
    except ValueError:
        return _masked(text)
    if not isinstance(record, dict):
        return type(record).__name__
    names = {int: "number", float: "number"}
    kinds = {_masked(n): names.get(type(v), type(v).__name__) for n, v in record.items()}
    return json.dumps(kinds, sort_keys=True)


def load(client: redis.Redis, file: str, name: str = "default") -> dict[str, Any]:
    """Load a recorded queue into an empty database.

    The moment at which it was recorded, `at_ms`, and the `secret` of one of its API keys.
    """
    recorded: dict[str, Any] = json.loads((DATA / file).read_text(encoding="utf-8"))
    keys = Keys(name)
    with client.pipeline() as pipe:
        for key, stored in recorded["keys"].items():
            ((kind, content),) = stored.items()
            if kind == "hash":
                pipe.hset(keys[key], mapping={_bytes(f): _bytes(v) for f, v in content.items()})
            elif kind == "zset":
                pipe.execute_command(
                    "ZADD", keys[key], *(x for m, score in content for x in (score, _bytes(m)))
                )
            elif kind == "list":
                pipe.rpush(keys[key], *map(_bytes, content))
            else:
                pipe.set(keys[key], _bytes(content))
        pipe.execute()
    del recorded["keys"]
    return recorded


def _paired(flat: list[Any]) -> Iterator[tuple[bytes, Any]]:
    """Members and scores, as either protocol of Redis gives them."""
    if flat and isinstance(flat[0], list | tuple):
        yield from flat
    else:
        yield from zip(flat[::2], flat[1::2], strict=True)


def _score(score: Any) -> str:
    return score.decode() if isinstance(score, bytes) else f"{score:.17g}"


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# --- a life ---------------------------------------------------------------------------------------


class Life:
    """Fills a queue with a little of everything before it is recorded.

    With a tenant, some tasks, schedules and users belong to it, and versions with two levels give
    the queue layout 2.
    """

    def __init__(
        self, client: redis.Redis, clock: ManualClock, tenant: str | None = "acme"
    ) -> None:
        self.clock, self.client, self.tenant = clock, client, tenant
        self.queue = TaskQueue(client, clock=clock)
        self.link, self.keys = self.queue.link, self.queue.keys
        self.history = History(self.queue)
        self.scheduler = TaskScheduler(self.queue, "scheduler-1")
        self.samples = SampleStore(self.link)
        self.secret = ""  # of a key, which is nowhere in Redis

    def push(self, user: str, *ids: str, **fields: Any) -> None:
        """Push tasks with these ids."""
        self.queue.push_many(Task.create(user_id=user, task_id=i, **fields) for i in ids)

    def claim(
        self, *names: str, limit: int = 1, worker: str = "w1", lease: float = 600
    ) -> list[Claim]:
        """Claim tasks of these names."""
        return self.queue.claim(worker, limit, lease, names=names or None)

    def settings(self) -> None:
        """Settings of the queue, of users and of names."""
        self.queue.configure(max_attempts=3, keep_dead=500, cost="time", max_schedules=1000)
        self.queue.set_user("heavy", weight=4.0, tenant=self.tenant)
        self.queue.set_limits("slotted", slots=1, timeout=30)
        self.queue.set_limits("paced", rate=0.01)

    def past(self) -> None:
        """Runs that have ended, each in its way."""
        self.push("alice", "finished-1", "finished-2", name="report", tenant=self.tenant)
        self.push("bob", "finished-3", payload={"n": 3}, triggered_by="carol")
        self.push("dora", "pruned-1", "pruned-2", name="soon gone")
        claims = self.claim(limit=5)
        self.clock.advance(2)
        log = LogLines()
        log.keep(20, "half way")
        report = Report(seconds=1.5, log=log.kept()[0])
        self.queue.finish_many([(c, {"rows": 7}, report) for c in claims])
        self.clock.advance(1)
        self.history.prune(0.5)
        self.push("alice", "finished-4", "finished-5", name="report", tenant=self.tenant)
        self.push("bob", "finished-6", name="report", payload={"text": "ä" * 100})
        for claim in self.claim(limit=3):
            self.queue.finish(claim, result=[1, None, "x"])
        self.failures()
        self.queue.configure(cost="tasks")

    def failures(self) -> None:
        """Dead letters of several causes, some retried or dropped since, and what was cancelled."""
        self.push("bob", *(f"dead-{n}" for n in range(1, 6)), name="fails", tenant=self.tenant)
        for n, claim in enumerate(self.claim("fails", limit=5), 1):
            self.clock.advance(0.1)
            cause = ValueError(f"row {n} is bad") if n < 4 else OSError("no route to host")
            report = Report.of_failure("fails", Failure.of(cause), seconds=0.1, timed_out=n == 5)
            self.queue.bury(claim, str(cause), report=report)
        self.history.retry("dead-2")
        self.history.discard("dead-3")
        self.push("erin", "expired", name="dies")
        for _ in range(3):
            self.claim("dies", lease=1)
            self.clock.advance(2)
        self.claim("nothing has this name")  # takes the expired lease back
        self.push("erin", "cancelled-1", "cancelled-2", name="unwanted")
        self.queue.cancel("cancelled-1")
        (running,) = self.claim("unwanted")
        self.queue.cancel("cancelled-2")
        self.queue.finish(running)

    def schedules(self) -> None:
        """Schedules of all kinds, fired for an hour or so, and what is open of them."""
        add, now = self.scheduler.add_schedule, self.clock.now()
        minutely: dict[str, Any] = {"cron_expr": "* * * * *", "user_id": "alice"}
        add(
            **minutely,
            schedule_id="plain",
            name="report",
            metadata={"team": "a"},
            tenant=self.tenant,
        )
        add("0 9 * * 1-5", "bob", timezone="Europe/London", schedule_id="daily", priority=5)
        add("*/20 * * * * *", "bob", schedule_id="seconds", jitter=3, misfire="fire_all")
        add("H H * * *", "dora", schedule_id="hashed", exclude=["2023-12-25"])
        add(user_id="alice", every=90, schedule_id="interval", name="s.interval", max_runs=500)
        add(user_id="alice", at=now.timestamp() + 86_400, schedule_id="once later")
        add(user_id="alice", at=now.timestamp() + 30, schedule_id="once done", name="s.once")
        add(**minutely, schedule_id="skip", overlap="skip", name="s.skip", timeout=20, retries=2)
        add(**minutely, schedule_id="buffer", overlap="buffer_one", name="s.buffer")
        add(**minutely, schedule_id="previous", overlap="cancel_previous", name="s.previous")
        add(**minutely, schedule_id="failing", max_failures=1, name="s.failing", backoff=[1, 2])
        windows = [{"days": [1, 2, 3, 4, 5, 6, 7], "from": "08:00", "to": "18:00"}]
        add("*/5 * * * *", "erin", schedule_id="windows", windows=windows, misfire="skip")
        add(**minutely, schedule_id="paused", name="s.paused")
        add(**minutely, schedule_id="paused until", name="s.paused")
        add(**minutely, schedule_id="spoilt", name="s.spoilt")
        add("0 0 1 1 *", "removed", schedule_id="removed")
        self.scheduler.remove_schedule("removed")
        self.scheduler.pause_schedule("paused", note="too loud", by="carol")
        until = now.timestamp() + 7200
        self.scheduler.pause_schedule("paused until", by="carol", until=until)
        self.scheduler.update_schedule("plain", payload={"n": 2}, changed_by="carol")
        self.client.hset(self.keys["schedules"], "spoilt", "{")
        for _ in range(3):
            self.clock.advance(60)
            self.scheduler.tick()
            self.samples.take()
            self.serve_schedules()
        self.clock.advance(600)  # nobody looked for ten minutes
        self.scheduler.tick()
        start = self.clock.now().timestamp()
        self.scheduler.backfill("plain", start - 300, start - 120, by="carol")
        self.scheduler.trigger("plain", triggered_by="carol", payload={"manual": True})
        self.samples.take()

    def serve_schedules(self) -> None:
        """End some runs and leave others running."""
        for claim in self.claim("report", "s.interval", "s.once", limit=3):
            self.queue.finish(claim)
        for claim in self.claim("s.skip", "s.buffer", "s.previous", limit=3):
            assert claim.task.schedule_id
        for claim in self.claim("s.failing"):
            self.queue.bury(claim, "it failed")

    def present(self) -> None:
        """Tasks in every state, and users of every kind."""
        push = self.push
        push("alice", "low", priority=2)
        push("alice", "high", priority=4)
        push("alice", "critical", priority=6)
        push("heavy", *(f"heavy-{n}" for n in range(20)), name="bulk", tenant=self.tenant)
        push("light", "light-1", name="bulk", payload={"weiß": "ü", "deep": {"list": [1.5, None]}})
        push("later", "delayed-1", "delayed-2", delay=3600, name="bulk")
        push("alice", "slot-1", "slot-2", name="slotted")
        push("bob", "slot-3", name="slotted")
        push("bob", "pace-1", "pace-2", name="paced")
        assert len(self.claim("slotted", "paced", limit=5)) == 2  # the other three are held
        self.scheduler.update_schedule("daily", next_run=self.clock.now().timestamp() + 100)
        push("paused", "paused-1", priority=6)
        self.queue.set_user("paused", paused=True)
        self.queue.set_user("rated", rate=0.001)
        push("rated", "rated-1", "rated-2", name="rated")
        self.queue.set_user("capped", max_running=1, max_waiting=10)
        push("capped", "capped-1", "capped-2", name="capped")
        push("frank", "running-1", "running-2", "running-3", name="long")
        for claim in self.claim("rated", "capped", "long", limit=10, worker="w2"):
            if claim.task.task_id == "running-3":
                self.queue.cancel("running-3")
        push("gina", "retrying", "retried", "released", name="flaky")
        for claim in self.claim("flaky", limit=3):
            self.end_flaky(claim)
        self.queue.set_limits("overdue", timeout=1)
        push("henry", "stale-1", name="overdue")
        overdue = self.claim("overdue", lease=5, worker="w2")
        self.queue.extend(overdue, 600)
        running = self.claim("s.skip", "s.buffer", limit=2)
        assert {claim.task.name for claim in running} == {"s.skip", "s.buffer"}
        self.clock.advance(11)  # another window of service
        assert len(WorkerStore(self.link).find_stale()) == 1
        for claim in self.claim("bulk", limit=4):
            self.queue.finish(claim)
        push("soon", "running-short", name="short")
        self.claim("short", lease=15, worker="w2")

    def end_flaky(self, claim: Claim) -> None:
        """Retry one later and one now, and release the third."""
        if claim.task.task_id == "retrying":
            report = Report.of_failure("flaky", Failure.of(OSError("refused")), seconds=0.2)
            self.queue.retry(claim, "refused", delay=900, report=report)
        elif claim.task.task_id == "retried":
            self.queue.retry(claim, "refused")
        else:
            self.queue.release(claim)

    def people(self) -> None:
        """Workers, keys, logins, sessions, requests and what was written about them."""
        workers = WorkerStore(self.link)
        for worker, names in (("w1", ["bulk", "report"]), ("w2", ["long", "short"])):
            info = {"host": "h", "pid": 7, "version": "0.1.0", "slots": 4, "names": names}
            now = self.clock.now_ms()
            workers.beat(
                {**info, "current": [], "running": 0, "started": now}, worker, {"long": {}}
            )
        workers.drain("w2", "carol")
        access = AccessStore(self.link)
        key = access.create_key("ci", "operator", "acme", by="carol")
        access.create_key("short", "viewer", expires_in=3600, by="carol")
        self.secret = key.secret
        carol = Actor(name="carol", role="admin", via="rest", key_id=key.info.key_id)
        access.create_login(carol)
        session = access.redeem(key.secret)
        assert session is not None
        access.admit(session.secret, rate=1.0, burst=5)
        audit = AuditLog(self.link)
        audit.end(audit.begin(carol, "user.pause", "paused"), "done")
        audit.begin(carol, "task.cancel", "running-3", details={"why": "slow"})
        replies = ReplyStore(self.link)
        self.clock.advance(-90_000)
        replies.done("old", 201, {"location": "/x"}, "{}", token=replies.begin("old", "d").token)
        self.clock.advance(90_000)
        replies.done("new", 200, {}, '{"ok":1}', token=replies.begin("new", "d").token)
        replies.begin("open", "d")

    def live(self) -> None:
        """Do all of it, in an order that keeps all records."""
        self.settings()
        self.past()
        self.schedules()
        self.present()
        self.people()
        self.push("dora", "gone-1", name="soon gone")
        (claim,) = self.claim("soon gone")
        self.queue.bury(claim, "gone")
        self.history.discard("gone-1")


def record_life(tenant: str | None = "acme") -> dict[str, Any]:
    """Record the queue of a life in a server of its own."""
    clock = ManualClock()
    with EmbeddedServer.start() as server, redis.Redis.from_url(server.url) as client:
        life = Life(client, clock, tenant)
        life.live()
        return {"at_ms": clock.now_ms(), "secret": life.secret, "keys": record(client)}


def main() -> None:
    """Record a queue of this version into the file that is named."""
    recorded = record_life()
    missing = sorted(KEY_TYPES.keys() - recorded["keys"].keys())
    if missing:
        sys.exit(f"nothing is in {', '.join(missing)}: let something happen that fills them")
    text = json.dumps(recorded, indent=1, sort_keys=True)
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
