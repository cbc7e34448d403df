"""Storms on a real cluster: nodes die, freeze, come and go, slots move, and nothing may be lost.

`python -m faults cluster` runs both kinds. `kept`: nodes without replicas that write each change to
disk before they answer; they are killed and restarted, frozen, added and removed, and slots move
under load, in one step and key by key. Then nothing that was acknowledged may be lost or doubled.
`failover`: each primary has a replica that takes over when it is killed. Replication is
asynchronous, so acknowledged changes may be lost; how many is measured, and what is left has to be
consistent. Workers are killed in both.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import redis

from fairqueue.errors import EmbeddedServerError, FairQueueError, LeaseLost, RedisUnavailable
from fairqueue.link.partitions import partition_of
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.cluster import EmbeddedCluster, EmbeddedNode
from faults.journal import Journal, read_journals

PARTITIONS = 8
PRIMARIES = 3
TENANTS = 30
BATCH = 10  # tasks of a push
NODE_TIMEOUT_S = 1.0
LEASE_S = 5.0
DRAIN_S = 90.0
KINDS = ("kept", "failover")
SECONDS = {"short": 12.0, "long": 90.0}  # of faults, for each kind


def tenant_of(number: int) -> str:
    """Whose task has a number. Those of one push have the same tenant, so only a node matters."""
    return f"tenant-{number // BATCH % TENANTS}"


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
        journal.note("pushed", ids)
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


ROLES = {"producer": produce, "worker": work}


class Actors:
    """The processes of a storm."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0

    def start(self, role: str) -> str:
        """Start another process of a role; its name."""
        name = f"{role}-{self._started}"
        self._started += 1
        command = [sys.executable, "-m", "faults.cluster", role, self._url, str(self._folder), name]
        self._running[name] = subprocess.Popen(command)
        return name

    def kill_one(self, role: str, chance: random.Random) -> None:
        """Kill a process of a role without notice, and start another one."""
        names = [name for name in self._running if name.startswith(role)]
        process = self._running.pop(chance.choice(names))
        process.kill()
        process.wait()
        self.start(role)

    def stop(self, role: str) -> None:
        """Ask all processes of a role to end, and wait for them."""
        for name in [name for name in self._running if name.startswith(role)]:
            process = self._running.pop(name)
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20.0)
            process.kill()
            process.wait()


# --- faults ---------------------------------------------------------------------------------------


class Weather:
    """Does things to a cluster, one after the other; `faults` counts them."""

    def __init__(
        self, cluster: EmbeddedCluster, slots: list[int], actors: Actors, seed: int, kind: str
    ) -> None:
        self._cluster, self._slots, self._actors = cluster, slots, actors
        self._chance = random.Random(seed)  # so that a storm can be repeated
        self._kind = kind
        self._added: list[EmbeddedNode] = []
        self.faults: Counter[str] = Counter()

    def blow(self, seconds: float) -> None:
        """Inject faults for some time, each kind at least once; then all nodes run again."""
        acts = [self._kill, self._freeze, self._move, self._move_keys, self._grow, self._worker]
        if self._kind == "failover":
            acts = [self._kill, self._freeze, self._fail_over, self._move, self._worker]
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
            time.sleep(self._chance.uniform(0.2, 0.8))
        for node in self._added:
            self._cluster.remove(node)

    def _calm(self) -> None:
        """Let all nodes run again, and wait until the cluster works."""
        for node in self._cluster.nodes:
            if node.is_frozen:
                node.thaw()
            if not node.is_running:
                node.restart()
        self._cluster.wait()

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


# --- the judgement --------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What is left of what was acknowledged, over all partitions."""

    kind: str
    seed: int
    acknowledged: int = 0
    finished: int = 0
    lost: int = 0  # acknowledged, and not among the tasks that have ended
    undone: int = 0  # acknowledged as finished, and not finished any more
    doubled: int = 0  # acknowledged as finished more than once
    unexpected: int = 0  # never pushed
    misplaced: int = 0  # in a partition where its group does not belong, or in two
    unfinished: int = 0  # left when nothing more happened
    inconsistent: int = 0  # a partition whose structures disagree
    faults: dict[str, int] = field(default_factory=dict)
    details: list[str] = field(default_factory=list)

    @property
    def violations(self) -> int:
        """What may not be. A failover may lose acknowledged changes, and do them again."""
        always = self.unexpected + self.misplaced + self.unfinished + self.inconsistent
        return always + (0 if self.kind == "failover" else self.lost + self.undone + self.doubled)


def judge(queue: TaskQueue, folder: Path, verdict: Verdict) -> None:
    """Compare the journals with the contents of all partitions."""
    intended: set[str] = set()
    pushed: set[str] = set()
    done: Counter[str] = Counter()
    for actor, (word, what, *more) in read_journals(folder):
        if word == "intent":
            intended |= set(what)
        elif word == "pushed":
            pushed |= set(what)
        elif word == "done":
            done[what] += 1
        elif word == "refused":
            verdict.details.append(f"{actor}: {what} {more}")
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
            number = int(task_id.rpartition(".")[2])
            belongs = partition_of("", tenant_of(number), PARTITIONS)
            verdict.misplaced += belongs != part.keys.partition
        verdict.inconsistent += running != leases or backlog != 0
    verdict.acknowledged, verdict.finished = len(pushed), len(finished)
    verdict.lost = len(pushed - finished)
    verdict.undone = len(set(done) - finished)
    verdict.doubled = sum(1 for count in done.values() if count > 1)
    verdict.unexpected = len(set(places) - intended)
    verdict.misplaced += sum(1 for count in places.values() if count > 1)
    for task_id in sorted(pushed - finished)[:5]:
        verdict.details.append(f"lost: {task_id}")


def run_cluster_storm(kind: str, seed: int, seconds: float) -> Verdict:
    """Run a storm of a kind on a cluster of its own, and judge what is left."""
    verdict = Verdict(kind, seed)
    options = {"kept": (0, "always"), "failover": (1, "everysec")}
    replicas, fsync = options[kind]
    config = {"cluster-require-full-coverage": "no"}
    with (
        tempfile.TemporaryDirectory() as place,
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
        actors = Actors(cluster.url, folder)
        for role in ("producer", "producer", "producer", "worker", "worker", "worker"):
            actors.start(role)
        try:
            slots = [part.keys.slot for part in queue.link.parts]
            weather = Weather(cluster, slots, actors, seed, kind)
            weather.blow(seconds)
            verdict.faults = dict(weather.faults)
            actors.stop("producer")
            verdict.unfinished = _drain(queue)
        finally:
            actors.stop("producer")
            actors.stop("worker")
        judge(queue, folder, verdict)
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
    """Run both kinds of storm, and print what came of them."""
    verdicts = []
    for kind in KINDS:
        verdict = run_cluster_storm(kind, seed, SECONDS[form] if seconds is None else seconds)
        verdicts.append(verdict)
        print(json.dumps(asdict(verdict) | {"violations": verdict.violations}), flush=True)
    return verdicts


def _act() -> None:
    """Be an actor, until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m faults.cluster")
    parser.add_argument("role", choices=sorted(ROLES))
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    options = parser.parse_args()
    is_over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: is_over.append(number))
    parent = os.getppid()
    journal = Journal(options.folder / f"{options.name}.journal")
    ROLES[options.role](
        options.url, journal, options.name, lambda: bool(is_over) or os.getppid() != parent
    )


if __name__ == "__main__":
    _act()
