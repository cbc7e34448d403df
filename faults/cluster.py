"""Storms on a real cluster: nodes die, freeze, come and go, slots move, and nothing may be lost.

`python -m faults cluster` runs all kinds. `kept`: nodes without replicas that write each change to
disk before they answer; they are killed and restarted, frozen, added and removed, and slots move
under load, in one step and key by key. Then nothing that was acknowledged may be lost or doubled.
`failover`: each primary has a replica that takes over when it is killed. Replication is
asynchronous, so acknowledged changes may be lost; how many is measured, and what is left has to be
consistent. `loss`: acknowledged changes are lost for certain, because a replica takes over that got
nothing for a while, or because its primary was cut off from the other nodes, but not from clients.
In all of them, workers and schedulers are killed and frozen, and clients are cut off from a node.
"""

import json
import random
import re
import signal
import tempfile
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import redis
from prometheus_client import CollectorRegistry

from fairqueue.clock import from_ms
from fairqueue.doctor import OK, Records
from fairqueue.errors import EmbeddedServerError, FairQueueError, LeaseLost, RedisUnavailable
from fairqueue.link.partitions import partition_of
from fairqueue.models import ScheduledTask, Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.cluster import EmbeddedCluster, EmbeddedNode
from fairqueue.scheduler.scheduler import TaskScheduler
from faults.cuts import Bus, cut_client, keep_from_copying, obey_cuts
from faults.journal import Journal, read_journals
from faults.nursery import Nursery

PARTITIONS = 8
PRIMARIES = 3
TENANTS = 30
BATCH = 10  # tasks of a push
NODE_TIMEOUT_S = 1.0
LEASE_S = 5.0
DRAIN_S = 90.0
TERM_S = 2.0  # of a leader of schedules
CATCH_UP_S = 40.0
KINDS = ("kept", "failover", "loss")
SECONDS = {"short": 4.0, "long": 90.0}  # of faults, for each kind
# Who has a schedule of every second, so that each partition has some.
SCHEDULED = range(24)
_FIRE = re.compile(r"^every-(\d+):(\d{12,})$")


def tenant_of(number: int) -> str:
    """Whose task has a number. Those of one push have the same tenant, so only a node matters."""
    return f"tenant-{number // BATCH % TENANTS}"


def is_fire(task_id: str) -> bool:
    """Whether it is the id of a fire time of one of the schedules: a whole second."""
    fire = _FIRE.match(task_id)
    return fire is not None and int(fire[1]) in SCHEDULED and int(fire[2]) % 1000 == 0


def owner_of(task_id: str) -> str:
    """Whose task has an id, pushed or fired."""
    fire = _FIRE.match(task_id)
    return f"tenant-{fire[1]}" if fire else tenant_of(int(task_id.rpartition(".")[2]))


# --- actors: processes that write down what they do ----------------------------------------------


def produce(url: str, journal: Journal, name: str, stop: Callable[[], bool]) -> None:
    """Push tasks; a push that was not answered is repeated until it is."""
    queue = TaskQueue.from_url(url, partitions=PARTITIONS, timeout=3.0)
    number = 0
    while not stop():
        tasks = [
            Task.create(user_id=f"user-{n % 3}", tenant=tenant_of(n), task_id=f"{name}.{n}")
            for n in range(number, number + BATCH)
        ]
        number += BATCH
        ids = [task.task_id for task in tasks]
        journal.note("intent", ids)
        while True:
            try:
                queue.push_many(tasks)
                break
            except FairQueueError:
                time.sleep(0.1)
        journal.note("pushed", ids, time.monotonic())
        time.sleep(0.02)


def work(url: str, journal: Journal, name: str, stop: Callable[[], bool]) -> None:
    """Claim tasks and finish them; what was not answered is repeated until it is."""
    queue = TaskQueue.from_url(url, partitions=PARTITIONS, timeout=3.0)
    while not stop():
        try:
            claims = queue.claim(name, limit=10, lease=LEASE_S, wait=0.2)
        except FairQueueError:
            continue
        for claim in claims:
            journal.note("ran", claim.task.task_id)
            while True:
                try:
                    queue.finish(claim)
                    journal.note("done", claim.task.task_id)
                    break
                except LeaseLost:
                    break
                except RedisUnavailable:
                    continue
                except FairQueueError as error:
                    journal.note("refused", claim.task.task_id, str(error))
                    break


def schedule(url: str, journal: Journal, name: str, stop: Callable[[], bool]) -> None:
    """Lead partitions, or wait for the leader to go, as a scheduler of an application would."""
    queue = TaskQueue.from_url(url, partitions=PARTITIONS, timeout=3.0)
    scheduler: TaskScheduler | None = None
    while scheduler is None and not stop():
        with suppress(FairQueueError):
            scheduler = TaskScheduler(
                queue, name, check_interval=0.2, lock_timeout=TERM_S, registry=CollectorRegistry()
            )
    if scheduler is not None:
        scheduler.start()
        while not stop():
            time.sleep(0.05)
        scheduler.stop()


ROLES = {"producer": produce, "worker": work, "scheduler": schedule}
CREW = {"producer": 3, "worker": 3, "scheduler": 3}


class Actors:
    """The processes of a storm."""

    def __init__(self, nursery: Nursery, url: str, folder: Path) -> None:
        self._nursery, self._url, self._folder = nursery, url, folder
        self._running: dict[str, int] = {}  # process ids
        self._frozen: dict[str, float] = {}  # until when
        self._started = 0

    def start(self, role: str) -> str:
        """Start another process of a role; its name."""
        name = f"{role}-{self._started}"
        self._started += 1
        setting = {"url": self._url, "folder": str(self._folder), "name": name}
        self._running[name] = self._nursery.start(role, setting)
        return name

    def kill_one(self, role: str, chance: random.Random) -> None:
        """Kill a process of a role without notice, and start another one."""
        name = self.any(role, chance)
        self._frozen.pop(name, None)
        self._kill(name)
        self.start(role)

    def any(self, role: str, chance: random.Random) -> str:
        """The name of a process of a role."""
        return chance.choice([name for name in self._running if name.startswith(role)])

    def freeze(self, name: str, seconds: float) -> None:
        """Stop a process without ending it; `thaw` lets it go on after this time."""
        self._nursery.signal(self._running[name], signal.SIGSTOP)
        self._frozen[name] = time.monotonic() + seconds

    def thaw(self, *, all_of_them: bool = False) -> None:
        """Let those go on whose time is over."""
        for name, until in list(self._frozen.items()):
            if all_of_them or time.monotonic() >= until:
                self._nursery.signal(self._running[name], signal.SIGCONT)
                del self._frozen[name]

    def cut(self, name: str, port: int, seconds: float) -> None:
        """Let a process not reach a port for some time."""
        cut_client(self._folder, name, port, seconds)

    def stop(self, role: str) -> None:
        """Ask all processes of a role to end, and wait for them."""
        self.thaw(all_of_them=True)
        for name in [name for name in self._running if name.startswith(role)]:
            self._nursery.signal(self._running[name], signal.SIGTERM)
            self._nursery.wait(self._running[name], 20.0)
            self._kill(name)

    def _kill(self, name: str) -> None:
        pid = self._running.pop(name)
        self._nursery.signal(pid, signal.SIGKILL)
        self._nursery.wait(pid)


# --- faults ---------------------------------------------------------------------------------------


@dataclass
class Takeover:
    """A change of the primary that loses writes: how, and since when (`time.monotonic`)."""

    how: str
    begun: float


class Weather:
    """Does things to a cluster, one after the other; `faults` counts them."""

    def __init__(
        self, cluster: EmbeddedCluster, slots: list[int], actors: Actors, seed: int, kind: str
    ) -> None:
        self._cluster, self._slots, self._actors = cluster, slots, actors
        self._chance = random.Random(seed)  # so that a storm can be repeated
        self._kind = kind
        self._added: list[EmbeddedNode] = []
        self._bus = Bus(cluster.nodes) if kind == "loss" else None
        self.faults: Counter[str] = Counter()
        self.takeovers: list[Takeover] = []

    def blow(self, seconds: float) -> None:
        """Inject faults for some time, each kind at least once; then all nodes run again."""
        acts = {
            "kept": [self._kill, self._freeze, self._move, self._move_keys, self._grow],
            "failover": [self._kill, self._freeze, self._fail_over, self._move],
            "loss": [self._kill_before_it_copies, self._cut_off_primary],
        }[self._kind]
        acts += [self._worker, self._scheduler, self._freeze_client, self._cut_client]
        until, round_of = time.monotonic() + seconds, list(acts)
        while round_of or time.monotonic() < until:
            round_of = round_of or list(acts)
            act = round_of.pop(self._chance.randrange(len(round_of)))
            try:
                act()
            except (redis.RedisError, EmbeddedServerError) as error:
                self.faults[f"{act.__name__[1:]} refused: {type(error).__name__}"] += 1
            else:
                self.faults[act.__name__[1:]] += 1
            self._calm()
            time.sleep(self._chance.uniform(0.1, 0.4))
        self._actors.thaw(all_of_them=True)
        for node in self._added:
            self._cluster.remove(node)

    def close(self) -> None:
        """End what it has put into the network."""
        if self._bus is not None:
            self._bus.close()

    def _calm(self) -> None:
        """Let all nodes run again, and wait until the cluster works."""
        for node in self._cluster.nodes:
            if node.is_frozen:
                node.thaw()
            if not node.is_running:
                node.restart()
        self._cluster.wait()
        self._actors.thaw()

    def _primary(self) -> EmbeddedNode:
        return self._cluster.owner(self._chance.choice(self._slots))

    def _kill(self) -> None:
        node = self._primary()
        node.kill()
        if self._kind == "failover":
            self._await_heir(node)
        else:
            time.sleep(self._chance.uniform(0.1, 1.0))

    def _await_heir(self, dead: EmbeddedNode) -> None:
        until = time.monotonic() + 15.0
        while time.monotonic() < until:
            if len(self._cluster.primaries) >= PRIMARIES:
                return
            time.sleep(0.1)

    def _freeze(self) -> None:
        node = self._primary()
        node.freeze()
        time.sleep(self._chance.uniform(0.2, 3.0))
        node.thaw()

    def _fail_over(self) -> None:
        self._cluster.fail_over(self._primary())

    def _target(self, slot: int) -> EmbeddedNode:
        owner = self._cluster.owner(slot)
        return self._chance.choice([each for each in self._cluster.primaries if each is not owner])

    def _move(self) -> None:
        slot = self._chance.choice(self._slots)
        self._cluster.move_slots(slot, slot, self._target(slot))

    def _move_keys(self) -> None:
        slot = self._chance.choice(self._slots)
        move = self._cluster.moving_slot(slot, self._target(slot))
        keys = move.keys()
        for key in keys:
            move.move_keys(key)
            time.sleep(0.01)
        move.finish()

    def _grow(self) -> None:
        if self._added:
            self._cluster.remove(self._added.pop())
            return
        self._added.append(self._cluster.add())
        slot = self._chance.choice(self._slots)
        self._cluster.move_slots(slot, slot, self._added[0])

    def _worker(self) -> None:
        self._actors.kill_one("worker", self._chance)

    def _scheduler(self) -> None:
        self._actors.kill_one("scheduler", self._chance)

    def _client(self) -> str:
        return self._actors.any(self._chance.choice((*CREW, "scheduler")), self._chance)

    def _freeze_client(self) -> None:
        self._actors.freeze(self._client(), self._chance.uniform(0.5, 2.5) * TERM_S)

    def _cut_client(self) -> None:
        self._actors.cut(self._client(), self._primary().port, self._chance.uniform(1.0, 6.0))

    # --- that lose what was acknowledged ----------------------------------------------------------

    def _kill_before_it_copies(self) -> None:
        """Kill a primary whose replica has got nothing for a moment, and let that take over."""
        primary = self._primary()
        replica = self._cluster.replicas_of(primary)[0]
        self.takeovers.append(Takeover("killed", time.monotonic()))
        let_copy = keep_from_copying(primary, replica)
        try:
            time.sleep(self._chance.uniform(0.1, 1.0))
            primary.kill()
            self._await_promotion(replica)
        finally:
            let_copy()

    def _cut_off_primary(self) -> None:
        """Cut a primary off from the other nodes, its replica too, and not from the clients."""
        primary = self._primary()
        replica = self._cluster.replicas_of(primary)[0]
        assert self._bus is not None
        self._bus.join()
        self.takeovers.append(Takeover("cut off", time.monotonic()))
        let_copy = keep_from_copying(primary, replica)
        self._bus.cut_off(primary)
        try:
            self._await_promotion(replica)
            time.sleep(self._chance.uniform(0.0, 1.0))
        finally:
            self._bus.heal()
            let_copy()

    def _await_promotion(self, replica: EmbeddedNode) -> None:
        until = time.monotonic() + 15.0
        while not replica.is_primary:
            if time.monotonic() > until:
                raise EmbeddedServerError(f"{replica} does not take over")
            time.sleep(0.05)


# --- the judgement --------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What is left of what was acknowledged, over all partitions."""

    kind: str
    seed: int
    acknowledged: int = 0
    finished: int = 0
    lost: int = 0  # acknowledged, and not among the tasks that have ended
    lost_by: dict[str, list[int]] = field(default_factory=dict)  # in each takeover
    undone: int = 0  # acknowledged as finished, and not finished any more
    doubled: int = 0  # acknowledged as finished more than once
    unexpected: int = 0  # never pushed
    misplaced: int = 0  # in a partition where its group does not belong, or in two
    unfinished: int = 0  # left when nothing more happened
    inconsistent: int = 0  # a partition whose structures disagree
    fires: int = 0  # fire times that were enqueued
    missed: int = 0  # fire times that are recorded as missed
    unfired: int = 0  # schedules whose fire times do not add up to these, or that stopped
    undone_fires: int = 0  # ran, and are not among the tasks any more
    run_again: int = 0  # runs of tasks, fired ones too, that had run before
    faults: dict[str, int] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)

    @property
    def violations(self) -> int:
        """What may not be. A failover may lose acknowledged changes, and do them again."""
        always = self.unexpected + self.misplaced + self.unfinished + self.inconsistent
        if self.kind == "kept":
            always += self.lost + self.undone + self.doubled + self.undone_fires
        return always + self.unfired


@dataclass
class _Told:
    """What is in the journals."""

    intended: set[str] = field(default_factory=set)
    pushed: dict[str, float] = field(default_factory=dict)  # task id -> when it was acknowledged
    ran: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, folder: Path, verdict: Verdict) -> Self:
        told = cls()
        for actor, (word, what, *more) in read_journals(folder):
            if word == "intent":
                told.intended |= set(what)
            elif word == "pushed":
                told.pushed |= dict.fromkeys(what, *more)
            elif word == "ran":
                told.ran[what] += 1
            elif word == "done":
                told.done[what] += 1
            elif word == "refused":
                verdict.details.append(f"{actor}: {what} {more}")
        return told


def judge(
    queue: TaskQueue, folder: Path, verdict: Verdict, takeovers: Sequence[Takeover] = ()
) -> None:
    """Compare the journals with the contents of all partitions."""
    told = _Told.read(folder, verdict)
    places: Counter[str] = Counter()
    finished: set[str] = set()
    for part in queue.link.parts:
        statuses, leases, backlog = part.ask(
            ("HGETALL", part.keys["status"]),
            ("ZCARD", part.keys["leases"]),
            ("ZCARD", part.keys["backlog"]),
        )
        running = 0
        for name, text in zip(statuses[::2], statuses[1::2], strict=True):
            task_id, record = name.decode(), json.loads(text)
            places[task_id] += 1
            running += record["state"] == "running"
            if record["state"] == "finished":
                finished.add(task_id)
            belongs = partition_of("", owner_of(task_id), PARTITIONS)
            verdict.misplaced += belongs != part.keys.partition
        verdict.inconsistent += running != leases or backlog != 0
    verdict.acknowledged = len(told.pushed)
    verdict.finished = len([task_id for task_id in finished if not _FIRE.match(task_id)])
    verdict.lost = len(told.pushed.keys() - finished)
    verdict.undone = len(set(told.done) - finished)
    verdict.doubled = sum(1 for count in told.done.values() if count > 1)
    fires = {task_id for task_id in places if is_fire(task_id)}
    verdict.fires = len(fires)
    verdict.unexpected = len(set(places) - told.intended - fires)
    verdict.undone_fires = len({each for each in told.ran if is_fire(each)} - fires)
    verdict.run_again = told.ran.total() - len(told.ran)
    verdict.misplaced += sum(1 for count in places.values() if count > 1)
    begun = [each.begun for each in takeovers]
    after = Counter(bisect(begun, told.pushed[each]) for each in told.pushed.keys() - finished)
    for number, each in enumerate(takeovers, start=1):
        verdict.lost_by.setdefault(each.how, []).append(after[number])
    for task_id in sorted(told.pushed.keys() - finished)[:5]:
        verdict.details.append(f"lost: {task_id}")


def judge_schedules(queue: TaskQueue, verdict: Verdict) -> None:
    """Check that each fire time was enqueued or is recorded as missed, over all partitions."""
    there = Counter[str]()
    for part in queue.link.parts:
        (names,) = part.ask(("HKEYS", part.keys["status"]))
        there.update(fire[1] for name in names if (fire := _FIRE.match(name.decode())))
    schedules = _schedules(queue)
    for number in SCHEDULED:
        schedule = schedules.get(f"every-{number}")
        if schedule is None or schedule.last_run is None:
            verdict.unfired += 1
            verdict.details.append(f"every-{number} is gone, or has never fired")
            continue
        first = schedule.created_at.replace(microsecond=0)  # it fires from the next second on
        moments = round((schedule.last_run - first).total_seconds())
        runs, missed = schedule.run_count, schedule.missed_count
        verdict.missed += missed
        if runs != there[str(number)] or runs + missed != moments:
            verdict.unfired += 1
            verdict.details.append(
                f"every-{number}: {moments} moments, {runs} fired, {missed} missed, "
                f"{there[str(number)]} tasks"
            )


def judge_structures(queue: TaskQueue, verdict: Verdict) -> None:
    """Compare every index and count of all partitions with the records."""
    for finding in Records(queue.link, fix=False).compare():
        if finding.level != OK:
            verdict.inconsistent += 1
            verdict.details.append(f"{finding.check}: {finding.text}")


def _schedules(queue: TaskQueue) -> dict[str, ScheduledTask]:
    scheduler = TaskScheduler(queue, "checker", registry=CollectorRegistry())
    return {each.schedule_id: each for each in scheduler.list_schedules(limit=1000)}


def _catch_up(queue: TaskQueue) -> None:
    """Wait until each schedule has fired again, so that each partition has a leader."""
    since, until = from_ms(queue.link.now_ms()), time.monotonic() + CATCH_UP_S
    while time.monotonic() < until:
        with suppress(FairQueueError):
            moments = [each.last_run for each in _schedules(queue).values()]
            if all(moment is not None and moment >= since for moment in moments):
                return
        time.sleep(0.2)
    raise TimeoutError(f"a schedule has not fired for {CATCH_UP_S:g} s after the last fault")


def add_schedules(queue: TaskQueue) -> None:
    """Add the schedules, which fire each second."""
    TaskScheduler(queue, registry=CollectorRegistry()).add_schedules(
        {
            "cron_expr": "* * * * * *",
            "user_id": "clock",
            "tenant": f"tenant-{number}",
            "schedule_id": f"every-{number}",
        }
        for number in SCHEDULED
    )


def run_cluster_storm(kind: str, seed: int, seconds: float) -> Verdict:
    """Run a storm of a kind on a cluster of its own, and judge what is left."""
    verdict = Verdict(kind, seed)
    replicas, fsync = (0, "always") if kind == "kept" else (1, "everysec")
    config = {"cluster-require-full-coverage": "no"}
    with (
        tempfile.TemporaryDirectory() as place,
        Nursery("faults.cluster") as nursery,
        EmbeddedCluster.start(
            PRIMARIES,
            replicas,
            fsync=fsync,  # type: ignore[arg-type]
            node_timeout=NODE_TIMEOUT_S,
            config=config,
            timeout=60.0,
        ) as cluster,
        TaskQueue.from_url(cluster.url, partitions=PARTITIONS, timeout=10.0) as queue,
    ):
        folder = Path(place)
        queue.configure(keep_finished=1_000_000, max_attempts=1000)
        add_schedules(queue)
        actors = Actors(nursery, cluster.url, folder)
        for role, count in CREW.items():
            for _ in range(count):
                actors.start(role)
        slots = [part.keys.slot for part in queue.link.parts]
        with closing(Weather(cluster, slots, actors, seed, kind)) as weather:
            try:
                weather.blow(seconds)
                verdict.faults = dict(weather.faults)
                actors.stop("producer")
                _catch_up(queue)
                actors.stop("scheduler")
                verdict.unfinished = _drain(queue)
            finally:
                for role in CREW:
                    actors.stop(role)
            judge(queue, folder, verdict, weather.takeovers)
            judge_schedules(queue, verdict)
            judge_structures(queue, verdict)
    return verdict


def _drain(queue: TaskQueue) -> int:
    """Wait until nothing waits or runs; how much is left."""
    until, left = time.monotonic() + DRAIN_S, -1
    while left and time.monotonic() < until:
        with suppress(FairQueueError):
            found = queue.inspect()
            left = found.ready + found.delayed + found.running
        time.sleep(0.2)
    return left


def run(form: str, seed: int, seconds: float | None = None) -> list[Verdict]:
    """Run all kinds of storm, and print what came of them."""
    verdicts = []
    for kind in KINDS:
        verdict = run_cluster_storm(kind, seed, SECONDS[form] if seconds is None else seconds)
        verdicts.append(verdict)
        print(json.dumps(asdict(verdict) | {"violations": verdict.violations}), flush=True)
    return verdicts


def act(role: str, setting: dict[str, str]) -> None:
    """Be an actor, until SIGTERM."""
    is_over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: is_over.append(number))
    folder, name = Path(setting["folder"]), setting["name"]
    obey_cuts(folder, name)
    journal = Journal(folder / f"{name}.journal")
    ROLES[role](setting["url"], journal, name, lambda: bool(is_over))
