"""The worst cost of each script: Redis does nothing else meanwhile, so each must be short.

Each case builds the worst state that the limits of FairQueue allow, and makes the call. The figure
is the processor time of the server's main thread for the longest call of a script, arguments and
answer included; the least of a few repetitions, since other load of the machine can only add to
it.
"""

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import redis

from benchmarks.common import Bench
from fairqueue import Task, TaskQueue, TaskScheduler
from fairqueue.access.audit import AuditLog
from fairqueue.access.credentials import AccessStore, Actor
from fairqueue.access.idempotency import ReplyStore
from fairqueue.clock import ManualClock
from fairqueue.doctor import Records
from fairqueue.history.runs import History
from fairqueue.link.operation import Ask, Call
from fairqueue.link.owners import Owner
from fairqueue.models import Claim
from fairqueue.queue.claim import CLAIM_LIMIT, EXTEND_CHUNK
from fairqueue.queue.reports import Failure, LogLines, Report
from fairqueue.queue.workers import MAX_CURRENT, WorkerStore
from fairqueue.schedules.store import ADDED_AT_ONCE, MAX_ADDED
from fairqueue.stats.samples import SampleStore
from fairqueue.stats.users import PURGE_CHUNK, UserStats
from fairqueue.validation import MAX_NAME_LENGTH, MAX_PAYLOAD_BYTES, MAX_RESULT_BYTES

MOST_MS = 10.0  # of one script
ALL_OR_NONE = "add_schedules of 10,000, all or none"
ALL_OR_NONE_MS = 200.0
REPEATS = 3
MANY = 250  # the limit of one call for most things
OPEN = 100  # unfinished runs of one schedule
LONG = "n" * (MAX_NAME_LENGTH - 60)  # for names and ids of the maximum length
LARGE = {"x": "y" * (MAX_PAYLOAD_BYTES - 100)}
RESULT = "r" * (MAX_RESULT_BYTES - 10)


@dataclass
class World:
    """An empty queue and everything that acts on it."""

    url: str
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        self.queue = TaskQueue.from_url(self.url, timeout=30.0, clock=self.clock)
        self.scheduler = TaskScheduler(self.queue, "bench")
        self.history = History(self.queue)
        self.link = self.queue.link
        self.people = UserStats(self.link)
        self.workers = WorkerStore(self.link)

    def push(self, count: int, users: int = MANY, **fields: Any) -> None:
        """Push `count` tasks of `users` users; ids, names and user ids have the maximum length."""
        fields.setdefault("name", LONG)
        self.queue.push_many(
            Task.create(user_id=f"{LONG}-{n % users}", task_id=f"{LONG}-{n}", **fields)
            for n in range(count)
        )

    def claims(self, count: int, lease: float = 3600.0) -> list[Claim]:
        """Claim `count` tasks."""
        found: list[Claim] = []
        while len(found) < count:
            got = self.queue.claim("w", min(CLAIM_LIMIT, count - len(found)), lease)
            if not got:
                raise SystemExit("there is less to claim than the benchmark needs")
            found += got
        return found

    def ended(self, count: int, *, dead: bool = False, result: Any = None, **fields: Any) -> None:
        """Create `count` ended runs."""
        self.push(count, **fields)
        claims = self.claims(count)
        if dead:
            for claim in claims:
                self.queue.bury(claim, "failed", report=failure())
        else:
            self.queue.finish_many((claim, result) for claim in claims)

    def schedules(self, count: int, **fields: Any) -> list[str]:
        """Add `count` schedules that fire every minute."""
        return self.scheduler.add_schedules(
            {
                "cron_expr": "* * * * *",
                "user_id": f"{LONG}-{n % MANY}",
                "name": LONG,
                "schedule_id": f"{LONG}-{n}",
                **fields,
            }
            for n in range(count)
        )

    def open_runs(self, overlap: str, *, running: bool, count: int = MANY) -> None:
        """Add due schedules with the maximum number of unfinished runs."""
        self.schedules(count)
        for _ in range(OPEN):
            self.clock.advance(60)
            self.scheduler.tick()
        if running:
            self.claims(count * OPEN, 86_400)
        for n in range(count):
            self.scheduler.update_schedule(f"{LONG}-{n}", overlap=overlap)
        self.clock.advance(60)

    def beats(self, count: int) -> None:
        """Register workers with the largest records."""
        for n in range(count):
            self.beat(n)

    def beat(self, number: int) -> None:
        record = {
            "host": "h",
            "pid": number,
            "version": "1",
            "slots": 100,
            "names": [f"{LONG}-{number % 10}-{n}" for n in range(50)],
            "current": [f"{LONG}-{n}" for n in range(MAX_CURRENT)],
            "running": 100,
            "started": 1,
        }
        self.workers.beat(record, f"w{number}")


def failure() -> Report:
    """Return the longest report."""
    lines = LogLines()
    for n in range(200):
        lines.keep(20, f"{n} " + "l" * 490)
    error = Failure(type="E" * 100, message="m" * 1000, traceback="t" * 8000, place="p")
    return Report.of_failure(LONG, error, seconds=1.0, lines=lines)


# A case prepares a world, and returns the call to measure.
Case = Callable[[World], Callable[[], object]]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


# --- tasks ----------------------------------------------------------------------------------------


@case("push_many of new users, long names, tenant")
def push_new(world: World) -> Callable[[], object]:
    return lambda: world.push(1000, 1000, tenant="t" * 64)


@case("push_many of new users, 24 kinds of workers")
def push_to_sorts(world: World) -> Callable[[], object]:
    for n in range(24):
        world.queue.claim("w", names=[LONG, f"only-{n}"])
    return lambda: world.push(1000, 1000)


@case("push_many, delayed")
def push_delayed(world: World) -> Callable[[], object]:
    return lambda: world.push(1000, 1000, delay=60)


@case("push_many of the largest payloads")
def push_large(world: World) -> Callable[[], object]:
    return lambda: world.push(16, payload=LARGE)


@case("push_many again, of the largest payloads")
def push_again(world: World) -> Callable[[], object]:
    world.push(16, payload=LARGE)
    return lambda: world.push(16, payload=LARGE)


@case("push_many again, of the largest, dropped since")
def push_buried(world: World) -> Callable[[], object]:
    world.ended(16, payload=LARGE)
    world.clock.advance(1)
    world.history.prune(0.5)
    return lambda: world.push(16, payload=LARGE)


@case("claim of 1,000 users")
def claim_many(world: World) -> Callable[[], object]:
    world.push(CLAIM_LIMIT, CLAIM_LIMIT)
    return lambda: world.queue.claim("w", CLAIM_LIMIT)


@case("claim of some names, in vain")
def claim_in_vain(world: World) -> Callable[[], object]:
    world.push(60_000, 500)
    return lambda: [world.queue.claim("w", CLAIM_LIMIT, names=["other"]) for _ in range(4)]


@case("claim of the largest payloads")
def claim_large(world: World) -> Callable[[], object]:
    world.push(20, payload=LARGE)
    return lambda: world.queue.claim("w", CLAIM_LIMIT)


@case("claim with 20,000 limited names")
def claim_limited(world: World) -> Callable[[], object]:
    for n in range(20_000):
        world.queue.set_limits(f"name-{n}", slots=1)
    for n in range(MANY):
        world.queue.push(Task.create(user_id=f"{LONG}-{n}", name=f"name-{n}"))
    return lambda: world.queue.claim("w", MANY)


@case("claim that promotes and takes back")
def claim_upkeep(world: World) -> Callable[[], object]:
    world.push(1000, 1000)
    world.claims(1000, 1)
    world.queue.push_many(Task.create(user_id=f"d{n}", delay=1) for n in range(1000))
    world.clock.advance(2)
    return lambda: world.queue.claim("w", 1)


@case("claim that takes back last attempts of schedules")
def claim_expired(world: World) -> Callable[[], object]:
    world.queue.configure(max_attempts=1)
    world.open_runs("allow", running=True, count=100)
    world.clock.advance(86_401)
    return lambda: world.queue.claim("w", 1)


@case("claim that trims the largest payloads")
def claim_trims(world: World) -> Callable[[], object]:
    world.ended(410, payload=LARGE)
    world.clock.advance(90 * 86_400)
    return lambda: world.queue.claim("w", 1)


@case("finish_many")
def finish_many(world: World) -> Callable[[], object]:
    world.push(1000, 1000, tenant="t" * 64)
    claims = world.claims(1000)
    return lambda: world.queue.finish_many((claim, None) for claim in claims)


@case("finish_many with the largest results and reports")
def finish_large(world: World) -> Callable[[], object]:
    world.push(MANY)
    claims, report = world.claims(MANY), failure()
    return lambda: world.queue.finish_many((claim, RESULT, report) for claim in claims)


@case("finish_and_claim with the largest results")
def finish_and_claim(world: World) -> Callable[[], object]:
    world.push(MANY)
    claims, report = world.claims(MANY), failure()
    results = [(claim, RESULT, report) for claim in claims]
    return lambda: world.queue.finish_and_claim(results, "w", 0)


@case("finish_many while small runs are trimmed")
def finish_trims(world: World) -> Callable[[], object]:
    world.ended(1000)
    world.queue.configure(keep_finished=0)
    world.queue.push_many(Task.create(user_id="u") for _ in range(MANY))
    claims = world.claims(MANY)
    return lambda: world.queue.finish_many((claim, None) for claim in claims)


@case("finish_many while the largest payloads are trimmed")
def finish_trims_large(world: World) -> Callable[[], object]:
    world.ended(510, payload=LARGE, result=RESULT)
    world.queue.configure(keep_finished=0)
    world.queue.push_many(Task.create(user_id="u") for _ in range(MANY))
    claims = world.claims(MANY)
    return lambda: world.queue.finish_many((claim, None) for claim in claims)


@case("finish_many of 250 schedules with 100 open runs each")
def finish_schedules(world: World) -> Callable[[], object]:
    world.open_runs("allow", running=True)
    claims = world.history.runs("running", limit=1000)
    ids = {run.schedule_id: run.task_id for run in claims}
    held = [_held(world, task_id) for task_id in ids.values()]
    return lambda: world.queue.finish_many((claim, None) for claim in held)


@case("finish_many of capped users")
def finish_capped(world: World) -> Callable[[], object]:
    for n in range(MANY):
        world.queue.set_user(f"{LONG}-{n}", max_running=1)
    world.push(2 * MANY)
    claims = world.claims(MANY)
    return lambda: world.queue.finish_many((claim, None) for claim in claims)


@case("finish_many of names with slots, cost by time")
def finish_slots(world: World) -> Callable[[], object]:
    world.queue.configure(cost="time")
    world.queue.set_limits(LONG, slots=1000, timeout=60)
    world.push(MANY)
    claims = world.claims(MANY)
    world.clock.advance(1)
    return lambda: world.queue.finish_many((claim, None) for claim in claims)


def _held(world: World, task_id: str) -> Claim:
    """Return the claim of a running task."""
    info = world.queue.get(task_id)
    text = world.link.ask(("HGET", world.queue.keys["status"], task_id))[0].decode()
    token = text.split('"token":"')[1].split('"')[0]
    task = info.task if info is not None else None
    if task is None:
        raise SystemExit(f"task {task_id} is gone")
    now = world.clock.now()
    return Claim(task=task, token=token, attempt=1, worker_id="w", lease_until=now, due_ms=0)


@case("extend of 1,000")
def extend(world: World) -> Callable[[], object]:
    world.push(EXTEND_CHUNK)
    claims = world.claims(EXTEND_CHUNK)
    return lambda: world.queue.extend(claims)


@case("retry with the longest report, again and again")
def retry(world: World) -> Callable[[], object]:
    world.push(1)
    for _ in range(3):
        world.queue.retry(world.claims(1)[0], "m" * 2000, report=failure())
    claim = world.claims(1)[0]
    return lambda: world.queue.retry(claim, "m" * 2000, report=failure())


@case("bury of a run of a schedule with 100 open ones")
def bury(world: World) -> Callable[[], object]:
    world.open_runs("allow", running=True, count=1)
    run = world.history.runs("running", limit=1)[0]
    claim = _held(world, run.task_id)
    return lambda: world.queue.bury(claim, "m" * 2000, report=failure())


@case("release, cancel, reschedule, explain")
def small_ones(world: World) -> Callable[[], object]:
    world.push(1000, 1)
    claim = world.claims(1)[0]

    def act() -> None:
        world.queue.release(claim)
        world.queue.cancel(f"{LONG}-5")
        world.queue.reschedule(f"{LONG}-6", delay=5)
        world.queue.explain(f"{LONG}-7")

    return act


@case("revive of the largest payload")
def revive(world: World) -> Callable[[], object]:
    world.ended(1, dead=True, payload=LARGE)
    return lambda: world.history.retry(f"{LONG}-0")


@case("prune of small runs")
def prune(world: World) -> Callable[[], object]:
    world.ended(1000)
    world.clock.advance(1)
    return lambda: world.history.prune(0.5)


@case("prune of the largest runs")
def prune_large(world: World) -> Callable[[], object]:
    world.ended(500, payload=LARGE, result=RESULT)
    world.clock.advance(1)
    return lambda: world.history.prune(0.5)


@case("discard of dead letters with the longest reports")
def discard(world: World) -> Callable[[], object]:
    world.ended(500, dead=True)
    return lambda: world.history.discard_matching(limit=500)


@case("discard of the largest dead letters")
def discard_large(world: World) -> Callable[[], object]:
    world.ended(250, dead=True, payload=LARGE)
    return lambda: world.history.discard_matching(limit=500)


@case("purge of a user")
def purge(world: World) -> Callable[[], object]:
    world.push(1000, 1)
    return lambda: world.people.purge(Owner(f"{LONG}-0"), PURGE_CHUNK)


@case("purge of a user's runs of schedules")
def purge_schedules(world: World) -> Callable[[], object]:
    world.schedules(MANY, user_id="one")
    for _ in range(OPEN):
        world.clock.advance(60)
        world.scheduler.tick()
    return lambda: world.people.purge(Owner("one"), PURGE_CHUNK)


@case("purge while the largest runs are trimmed")
def purge_trims(world: World) -> Callable[[], object]:
    world.ended(510, payload=LARGE, result=RESULT)
    world.queue.configure(keep_finished=0)
    world.queue.push_many(Task.create(user_id="u") for _ in range(MANY))
    return lambda: world.people.purge(Owner("u"), PURGE_CHUNK)


@case("set_user, set_limits, configure")
def settings(world: World) -> Callable[[], object]:
    world.push(1000, 1000)

    def act() -> None:
        world.queue.set_user(f"{LONG}-0", weight=2.0, paused=True, rate=5.0, tenant="t")
        world.queue.set_limits(LONG, slots=1, rate=5.0, timeout=3.0)
        world.queue.configure(max_attempts=3, max_waiting=10**6, keep_dead=5)

    return act


# --- schedules ------------------------------------------------------------------------------------


@case("fire of 250, late")
def fire(world: World) -> Callable[[], object]:
    world.schedules(1000, tenant="t" * 64)
    world.clock.advance(3600)
    return world.scheduler.tick


@case("fire with the largest payloads")
def fire_large(world: World) -> Callable[[], object]:
    world.schedules(32, payload=LARGE)
    world.clock.advance(60)
    return world.scheduler.tick


@case("fire, skip, 100 open runs each")
def fire_skip(world: World) -> Callable[[], object]:
    world.open_runs("skip", running=True)
    return world.scheduler.tick


@case("fire, buffer_one, 100 open runs each")
def fire_buffer(world: World) -> Callable[[], object]:
    world.open_runs("buffer_one", running=True)
    return world.scheduler.tick


@case("fire, cancel_previous, 100 waiting runs each")
def fire_cancel(world: World) -> Callable[[], object]:
    world.open_runs("cancel_previous", running=False)
    return world.scheduler.tick


@case("fire, cancel_previous, 100 running ones each")
def fire_cancel_running(world: World) -> Callable[[], object]:
    world.open_runs("cancel_previous", running=True)
    return world.scheduler.tick


@case("add_schedules of 500, as an import adds them")
def add_some(world: World) -> Callable[[], object]:
    return lambda: world.schedules(ADDED_AT_ONCE, tenant="t" * 64)


# The only case that may take longer: one script has to add all of them or none.
@case(ALL_OR_NONE)
def add_most(world: World) -> Callable[[], object]:
    return lambda: world.schedules(MAX_ADDED, tenant="t" * 64)


@case("add_schedule, update, trigger, remove, pause")
def one_schedule(world: World) -> Callable[[], object]:
    world.schedules(1, payload=LARGE)
    schedule, scheduler = f"{LONG}-0", world.scheduler
    for n in range(60):
        scheduler.update_schedule(schedule, metadata={"n": "m" * 1000 + str(n)}, changed_by=LONG)

    def act() -> None:
        scheduler.update_schedule(schedule, payload={**LARGE, "n": 1})
        scheduler.trigger(schedule)
        scheduler.pause_schedule(schedule, note="n" * 1000, by="me")
        scheduler.resume_schedule(schedule)
        scheduler.remove_schedule(schedule)

    return act


@case("backfill")
def backfill(world: World) -> Callable[[], object]:
    world.schedules(1)
    now = world.clock.now().timestamp()
    return lambda: world.scheduler.backfill(f"{LONG}-0", now - 60 * 1000, now)


@case("backfill of the largest payload")
def backfill_large(world: World) -> Callable[[], object]:
    world.schedules(1, payload=LARGE)
    now = world.clock.now().timestamp()
    return lambda: world.scheduler.backfill(f"{LONG}-0", now - 60 * 16, now)


# --- workers, keys, requests ----------------------------------------------------------------------


@case("beat of one of 1,000 workers")
def beat(world: World) -> Callable[[], object]:
    world.beats(1000)
    return lambda: world.beat(5)


@case("beats after one of 1,000 workers has left")
def beat_after(world: World) -> Callable[[], object]:
    world.beats(1000)

    def act() -> None:
        world.workers.leave("w7")
        for n in range(20):
            world.beat(n + 100)

    return act


@case("beats while one of 1,000 workers is gone")
def beat_gone(world: World) -> Callable[[], object]:
    world.beats(1)
    world.clock.advance(30)
    world.beats(1000)
    world.clock.advance(6)

    def act() -> None:
        for n in range(20):
            world.beat(n + 100)

    return act


@case("beat that reports stale runs")
def beat_stale(world: World) -> Callable[[], object]:
    world.queue.set_limits(LONG, timeout=1)
    world.push(200)
    world.claims(200, 5)
    world.queue.extend([_held(world, f"{LONG}-{n}") for n in range(200)], 600)
    world.clock.advance(10)
    return lambda: world.beat(1)


@case("keys, logins, sessions, audit, replies")
def access(world: World) -> Callable[[], object]:
    store, audit, replies = AccessStore(world.link), AuditLog(world.link), ReplyStore(world.link)
    actor = Actor(name="a", role="admin", via="rest")
    for n in range(300):
        store.create_login(actor, seconds=1)
        audit.begin(actor, "x", LONG, details={"n": "d" * 1000})
        replies.done(f"k{n}", 200, {}, "b" * 30_000, token=replies.begin(f"k{n}", "d").token)
    world.clock.advance(100_000)

    def act() -> None:
        key = store.create_key("k", "admin", by="a")
        session = store.redeem(key.secret)
        store.admit(session.secret if session else "", rate=1.0, burst=5)
        audit.end(audit.begin(actor, "x", LONG), "done")
        replies.begin("new", "d")
        store.revoke(key.info.key_id)

    return act


@case("sample of busy slots")
def sample(world: World) -> Callable[[], object]:
    world.ended(1000, result=RESULT)
    return lambda: SampleStore(world.link).take()


# --- reading --------------------------------------------------------------------------------------


@case("runs, 1,000 on a page, largest results")
def runs(world: World) -> Callable[[], object]:
    world.ended(1000, result=RESULT)
    return lambda: world.history.runs(limit=1000)


@case("runs of several statuses, 1,000 on a page")
def runs_mixed(world: World) -> Callable[[], object]:
    world.ended(1000, result=RESULT)
    return lambda: world.history.runs(("succeeded", "failed", "cancelled"), limit=1000)


@case("running runs, 10,000 of them")
def runs_running(world: World) -> Callable[[], object]:
    world.push(10_000, 1000)
    world.claims(10_000)
    return lambda: world.history.runs("running", limit=1000)


@case("failure groups, 1,000 on a page")
def groups(world: World) -> Callable[[], object]:
    world.push(1000)
    for n, claim in enumerate(world.claims(1000)):
        letters = "".join(string.ascii_letters[int(digit)] for digit in str(n))
        world.queue.bury(claim, f"failed for {letters}")
    return lambda: world.history.failure_groups(1000)


@case("inspect, users, their shares")
def people(world: World) -> Callable[[], object]:
    world.ended(5000, users=2000)
    world.queue.push_many(
        Task.create(user_id=f"{LONG}-{n % 2000}", task_id=f"again-{n}") for n in range(5000)
    )
    since = world.clock.now().timestamp() - 3600

    def act() -> None:
        snapshot = world.queue.inspect()
        world.people.active()
        page = world.people.names(1000)
        world.people.read(page[:100], since)
        world.people.overview(snapshot, since)
        world.people.shares(since, since + 3600, 60, page[:10])

    return act


@case("doctor, nothing wrong")
def doctor(world: World) -> Callable[[], object]:
    mixed(world)
    return lambda: Records(world.link, fix=False).compare()


@case("doctor, everything wrong")
def doctor_fixes(world: World) -> Callable[[], object]:
    mixed(world)
    client = redis.Redis.from_url(world.url)
    keys = world.queue.keys
    for name in ("waiting", "ended", "dead", "runs", "open", "schedule_index", "ready", "running"):
        client.delete(keys[name])
    client.close()
    return lambda: Records(world.link, fix=True).compare()


def mixed(world: World) -> None:
    """Create some of everything."""
    world.open_runs("allow", running=False, count=20)
    world.ended(1000)
    world.queue.push_many(Task.create(user_id=f"u{n % 50}") for n in range(12_000))
    world.claims(9_000)


# --- measuring ------------------------------------------------------------------------------------


class Meter:
    """Measures the server's processor time for each call through a link.

    Not SLOWLOG, which includes the time that the server waited for a processor. A call that is
    cheaper than the measurement itself counts as 0.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._question = min(self._since(self._now()) for _ in range(100))

    def _now(self) -> float:
        info = cast("dict[str, float]", self._client.info("cpu"))
        return info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"]

    def _since(self, start: float) -> float:
        return (self._now() - start) * 1000

    def watch(self, link: Any) -> dict[str, float]:
        """Return the longest call of each script and of reading commands from now on, in ms."""
        worst: dict[str, float] = {}
        run, ask = link._call, link._ask

        def measured(name: str, call: Callable[[], Any]) -> Any:
            start = self._now()
            answer = call()
            taken = max(0.0, self._since(start) - self._question)
            worst[name] = max(worst.get(name, 0.0), taken)
            return answer

        def run_one(call: Call) -> Any:
            return measured(call.script, lambda: run(call))

        def ask_one(command: Any, timeout: float | None) -> Any:
            return measured(str(command[0]), lambda: ask(Ask(command, timeout=timeout))[0])

        link._call = run_one
        link._ask = lambda request: [ask_one(each, request.timeout) for each in request.commands]
        link._stream = lambda calls: (run_one(call) for call in calls)
        link._together = lambda request: [run_one(call) for call in request.calls]
        return worst


def measure(bench: Bench, meter: Meter, prepare: Case) -> dict[str, float]:
    """Return the longest call of each script in a case, the least of a few repetitions, in ms."""
    least: dict[str, float] = {}
    for _ in range(REPEATS):
        bench.empty()
        world = World(bench.server.url)
        with world.queue:
            act = prepare(world)
            worst = meter.watch(world.link)
            act()
        for name, ms in worst.items():
            least[name] = min(ms, least.get(name, ms))
    return least


def run(bench: Bench, only: str = "") -> None:
    meter = Meter(bench.client)
    for name, prepare in CASES.items():
        if only in name:
            most = ALL_OR_NONE_MS if name == ALL_OR_NONE else MOST_MS
            for line in lines(measure(bench, meter, prepare), most):
                bench.add(f"worst: {name}", *line)
    bench.empty()


def lines(worst: dict[str, float], most: float) -> Iterator[tuple[str, str, bool, str]]:
    """Print the slowest script of a case, and all that exceed the limit."""
    ordered = sorted(worst.items(), key=lambda each: -each[1])
    for i, (script, ms) in enumerate(ordered):
        if i == 0 or ms > most:
            yield f"{ms:.1f} ms", f"≤ {most:.0f} ms", ms <= most, script
