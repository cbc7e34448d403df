"""A storm: schedulers, workers, producers and editors as processes, and the faults that hit them.

A `Profile` defines the actors, the faults and their frequency, and the goals. All random choices
come from one seed: which fault, which target, for how long. The scheduling of the machine does not
depend on the seed, so a seed reproduces a kind of trouble, not an interleaving.
"""

import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from prometheus_client import CollectorRegistry

from fairqueue.clock import from_ms
from fairqueue.errors import FairQueueError
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer, Fsync
from fairqueue.scheduler.scheduler import TaskScheduler
from faults.checker import Verdict, check
from faults.fleet import Fleet
from faults.flow import set_limits
from faults.journal import Journal
from faults.nursery import Nursery
from faults.proxy import Proxy
from faults.roles import Part, SharedClock
from faults.witness import now_ms

QUEUE = "storm"
STEADY = 10  # schedules that fire each second from the beginning to the end
DRAIN_S = 300.0
CATCH_UP_S = 120.0
LONG_LEASE_S = 8.0  # long enough for a living worker to extend it in time on a busy machine
MEMORY = "/dev/shm"
HOUR_MS = 3_600_000
# How long a network is broken, the server does not answer, or memory is short.
SHORTEST_S, LONGEST_S = 0.1, 1.5
# Multiples of the leader's term for which it is stopped.
PAUSES = (0.5, 1.0, 2.0, 5.0)

NETWORK = ("delay", "black_hole", "half_open", "one_byte_chunks", "refuse", "reset")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The actors, faults and goals of a storm.

    faults: kind -> relative frequency. goals: kind -> how many there must be; all goals, `tasks`
    and `seconds` must be reached, unless `most_seconds` have passed. gap: seconds between two
    faults. fleet: whether to use a primary with replicas and sentinels. lanes: number of parallel
    worlds, each with its part of the goals. part: further settings of the actors.
    """

    name: str
    faults: dict[str, int] = field(default_factory=dict)
    goals: dict[str, int] = field(default_factory=dict)
    tasks: int = 0
    seconds: float = 0.0
    most_seconds: float = 3600.0
    gap: float = 0.3
    schedulers: int = 3
    workers: int = 3
    producers: int = 2
    editors: int = 1
    fsync: Fsync = "always"
    on_disk: bool = False
    fleet: bool = False
    concurrency: int = 4
    proxied: bool = True
    jumping: bool = False
    backlog: int = 5_000
    timeout: float = 5.0
    lock_timeout: float = 1.0
    lease: float = 2.0
    lanes: int = 1
    part: dict[str, Any] = field(default_factory=dict)

    @property
    def calm(self) -> bool:
        """Whether all actors live and are never blocked for long."""
        return set(self.faults) <= {"drop_replies", "script_flush"}

    @property
    def durable(self) -> bool:
        """Whether Redis keeps acknowledged writes."""
        return self.fsync == "always" and not self.fleet


@dataclass(kw_only=True)
class Result:
    """A storm and its verdict."""

    name: str
    seed: int
    seconds: float
    faults: dict[str, int]
    verdict: Verdict
    durable: bool
    restarts: int = 0

    @property
    def violations(self) -> int:
        """How many guarantees were broken."""
        return self.verdict.violations(durable=self.durable)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return {**asdict(self), "violations": self.violations}


@dataclass
class Player:
    """An actor and its current process."""

    role: str
    index: int
    proxy: Proxy | None
    incarnation: int = -1
    pid: int = 0
    resumes_at: float | None = None
    name: str = ""


class Storm:
    """One storm, from the first process to the verdict."""

    def __init__(self, profile: Profile, seed: int, *, say: Callable[[str], None] = print) -> None:
        self.profile = profile
        self.seed = seed
        self.dice = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.has_flow = bool(profile.part.get("flow"))
        self._say = say
        self._stack = ExitStack()
        self._restore: list[tuple[float, Callable[[], None]]] = []
        self._restarts = 0
        self._troubles: list[str] = []

    def __enter__(self) -> Self:
        profile = self.profile
        with ExitStack() as stack:
            self.folder = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="storm-", dir=_parent(profile))
                )
            )
            self.nursery = stack.enter_context(Nursery())
            self.url = self._open_server(stack)
            clock_path = self.folder / "clock"
            self.clock = SharedClock(clock_path) if profile.jumping else None
            self.queue = stack.enter_context(
                TaskQueue.from_url(self.url, QUEUE, clock=self.clock, timeout=30.0)
            )
            self.journal = Journal(self.folder / "storm.journal")
            self.players = self._cast()
            self._set_up()
            for player in self.players:
                self._begin(player)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _open_server(self, stack: ExitStack) -> str:
        """Start the server and the proxies; return the address."""
        profile = self.profile
        self.proxies: list[Proxy] = []
        if profile.fleet:
            self.fleet = stack.enter_context(Fleet.start(replicas=2, fsync=profile.fsync))
            return self.fleet.sentinel_url()
        self.server = stack.enter_context(
            EmbeddedServer.start(self.folder / "data", fsync=profile.fsync)
        )
        self.client = stack.enter_context(redis.Redis.from_url(self.server.url))
        for _ in range(3 if profile.proxied else 0):
            self.proxies.append(stack.enter_context(Proxy.start(self.server.socket_path)))
        return self.server.url

    def _cast(self) -> list[Player]:
        profile = self.profile
        counts = {
            "scheduler": profile.schedulers,
            "worker": profile.workers,
            "producer": profile.producers,
            "editor": profile.editors,
        }
        return [
            Player(role, index, self.proxies[index % len(self.proxies)] if self.proxies else None)
            for role, count in counts.items()
            for index in range(count)
        ]

    def _set_up(self) -> None:
        everything = 10**9
        self.queue.configure(
            max_attempts=10_000,
            max_waiting=self.profile.backlog,
            keep_finished=everything,
            keep_finished_for=everything,
            keep_dead=everything,
            keep_dead_for=everything,
        )
        if self.has_flow:
            set_limits(self.queue)
        scheduler = TaskScheduler(self.queue, registry=CollectorRegistry())
        scheduler.add_schedules(
            {"cron_expr": "* * * * * *", "user_id": f"user-{n}", "schedule_id": f"steady-{n}"}
            for n in range(STEADY)
        )

    # --- actors -----------------------------------------------------------------------------------

    def _begin(self, player: Player) -> None:
        player.incarnation += 1
        player.name = f"{player.role[0]}{player.index}-{player.incarnation}"
        player.pid = self.nursery.start(player.role, asdict(self._part(player)))
        player.resumes_at = None

    def _part(self, player: Player) -> Part:
        profile = self.profile
        return Part(
            name=player.name,
            url=self.url if player.proxy is None else player.proxy.url,
            queue=QUEUE,
            journal=str(self.folder / f"{player.name}.journal"),
            seed=self.dice.randrange(2**32),
            clock=None if self.clock is None else str(self.folder / "clock"),
            timeout=profile.timeout,
            lock_timeout=profile.lock_timeout,
            lease=profile.lease,
            concurrency=profile.concurrency,
            **profile.part,
        )

    def _end(self, role: str, timeout: float = 60.0) -> list[str]:
        """Ask all actors of a role to end; return what went wrong."""
        ending = [player for player in self.players if player.role == role]
        for player in ending:
            self.nursery.signal(player.pid, signal.SIGCONT)
            self.nursery.signal(player.pid, signal.SIGTERM)
        troubles = []
        for player in ending:
            status = self.nursery.wait(player.pid, timeout)
            if status is None:
                troubles.append(f"{player.name} does not end")
            elif status not in (0, -signal.SIGTERM):  # the latter: before it had begun
                troubles.append(f"{player.name} ended with status {status}")
        return troubles

    # --- the storm --------------------------------------------------------------------------------

    def run(self) -> Result:
        """Inject faults until the goals are reached, drain, and judge."""
        began = time.monotonic()
        told = began
        kinds, weights = zip(*sorted(self.profile.faults.items()), strict=True)
        while not self._is_enough(time.monotonic() - began):
            self._strike(self.dice.choices(kinds, weights)[0])
            self._pass_time(self.profile.gap * self.dice.uniform(0.5, 1.5))
            if time.monotonic() - told > 20:
                told = time.monotonic()
                self._say(f"  {told - began:5.0f} s: {self._pushed()} tasks, {dict(self.faults)}")
        troubles = self._drain() + self._troubles
        verdict = self._judge()
        if self.profile.producers and not verdict.acknowledged:
            troubles.append("no push was acknowledged")
        verdict.unfinished += len(troubles)
        verdict.details += troubles
        return Result(
            name=self.profile.name,
            seed=self.seed,
            seconds=round(time.monotonic() - began, 1),
            faults=dict(sorted(self.faults.items())),
            verdict=verdict,
            durable=self.profile.durable,
            restarts=self._restarts,
        )

    def _strike(self, kind: str) -> bool:
        """Try a fault; True if it was injected."""
        strike: Callable[[], bool] = getattr(self, f"_strike_{kind}")
        struck = strike()
        self.faults[kind] += struck
        return struck

    def _judge(self) -> Verdict:
        durable = self.profile.durable
        return check(
            self.queue,
            self.folder,
            durable=durable,
            steady_clock=self.clock is None,
            direct=not self.profile.proxied,
            calm=self.profile.calm and self.profile.lease >= LONG_LEASE_S,
            # A lease that was acknowledged by a primary that is gone excludes nobody.
            lease_ms=round(self.profile.lease * 1000) if self.has_flow and durable else None,
        )

    def _is_enough(self, seconds: float) -> bool:
        if "drop_replies" in self.profile.faults:
            self.faults["dropped_reply"] = sum(proxy.dropped for proxy in self.proxies)
        if seconds > self.profile.most_seconds:
            return True
        return (
            seconds >= self.profile.seconds
            and all(self.faults[kind] >= goal for kind, goal in self.profile.goals.items())
            and self._pushed() >= self.profile.tasks
        )

    def _pushed(self) -> int:
        with suppress(FairQueueError):
            return self.queue.inspect().counters.get("pushed", 0)
        return 0

    def _pass_time(self, seconds: float) -> None:
        """Wait for a while, and meanwhile end faults that have lasted long enough."""
        end = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for moment, restore in [entry for entry in self._restore if entry[0] <= now]:
                self._restore.remove((moment, restore))
                restore()
            if now >= end:
                return
            later = min([end, *(moment for moment, _ in self._restore)])
            time.sleep(max(0.001, later - now))

    def _later(self, seconds: float, restore: Callable[[], None]) -> None:
        self._restore.append((time.monotonic() + seconds, restore))

    def _for_a_while(self) -> float:
        return self.dice.uniform(SHORTEST_S, LONGEST_S)

    def _drain(self) -> list[str]:
        """End all faults, finish the work, end all actors; return what went wrong."""
        for _, restore in self._restore:
            restore()
        self._restore.clear()
        for proxy in self.proxies:
            proxy.clear()
        troubles = self._end("producer") + self._end("editor")
        if self.clock is not None:
            self.clock.jump_to(2 * HOUR_MS)  # later than ever before, so that all plans are due
        troubles += self._catch_up() + self._end("scheduler")
        if self.clock is not None:
            self.clock.jump_to(4 * HOUR_MS)  # and no lease
        deadline = time.monotonic() + DRAIN_S
        while True:
            snapshot = self.queue.inspect()
            left = snapshot.ready + snapshot.delayed + snapshot.running
            if not left:
                break
            if time.monotonic() > deadline:
                troubles.append(f"{left} tasks are left after {DRAIN_S:.0f} s")
                break
            self._replace_the_dead()
            time.sleep(0.05)
        return troubles + self._end("worker")

    def _catch_up(self) -> list[str]:
        """Wait until each steady schedule has fired again, so that a scheduler leads."""
        scheduler = TaskScheduler(self.queue, registry=CollectorRegistry())
        since = from_ms(self.queue.link.now_ms())
        deadline = time.monotonic() + CATCH_UP_S
        while True:
            found = [scheduler.get_schedule(f"steady-{n}") for n in range(STEADY)]
            late = [
                each.schedule_id
                for each in found
                if each is not None and (each.last_run is None or each.last_run < since)
            ]
            if not late:
                return []
            if time.monotonic() > deadline:
                return [f"{late} have not fired since {since} for {CATCH_UP_S:.0f} s"]
            time.sleep(0.1)

    def _replace_the_dead(self) -> None:
        """Restart actors that have died, as a supervisor would."""
        for player in self.players:
            if player.role == "worker" and self.nursery.ended(player.pid):
                self._note_end(player)
                self._begin(player)

    def _note_end(self, player: Player) -> bool:
        """Whether an actor ended as requested; if it ended by itself, that is a violation."""
        status = self.nursery.wait(player.pid)
        if status in (0, -signal.SIGTERM, -signal.SIGKILL):
            return True
        self._restarts += 1
        self._troubles.append(f"{player.name} ended with status {status}")
        return False

    # --- faults: each returns whether it was injected ---------------------------------------------

    def _running(self, *roles: str) -> list[Player]:
        return [
            player
            for player in self.players
            if player.resumes_at is None and (not roles or player.role in roles)
        ]

    def _strike_kill(self) -> bool:
        """SIGKILL of any actor; a supervisor replaces it at once."""
        return self._kill(self.dice.choice(self.players))

    def _kill(self, player: Player) -> bool:
        self.journal.note("killed", player.name, now_ms())
        killed = self.nursery.signal(player.pid, signal.SIGKILL)
        as_told = self._note_end(player)
        self._begin(player)
        return killed and as_told

    def _strike_stop(self) -> bool:
        """SIGSTOP of any actor, sometimes for longer than leases and terms."""
        candidates = self._running()
        if not candidates:
            return False
        return self._stop(self.dice.choice(candidates))

    def _stop(self, player: Player, seconds: float | None = None) -> bool:
        """Stop an actor, by default for a multiple of the term."""
        if seconds is None:
            seconds = self.dice.choice(PAUSES) * self.profile.lock_timeout
        pid = player.pid
        if not self.nursery.signal(pid, signal.SIGSTOP):
            return False
        player.resumes_at = time.monotonic() + seconds
        self._later(seconds, lambda: self._resume(player, pid))
        return True

    def _resume(self, player: Player, pid: int) -> None:
        if player.pid == pid:
            self.nursery.signal(pid, signal.SIGCONT)
            player.resumes_at = None

    def _leader(self) -> Player | None:
        with suppress(FairQueueError):
            name = self.queue.inspect().leader
            return next((player for player in self._running() if player.name == name), None)
        return None

    def _strike_pause_leader(self) -> bool:
        """SIGSTOP of the leader at any point."""
        leader = self._leader()
        return leader is not None and self._stop(leader)

    def _strike_pause_before_fire(self) -> bool:
        """The leader stops itself between reading what is due and firing it."""
        leader = self._leader()
        if leader is None or not self.nursery.signal(leader.pid, signal.SIGUSR1):
            return False
        if not self._has_stopped(leader):
            self._kill(leader)  # it would stop itself later, and stay stopped
            return False
        return self._stop(leader)

    def _has_stopped(self, player: Player) -> bool:
        """Whether an actor stops itself, as requested."""
        deadline = time.monotonic() + 3
        while not _is_stopped(player.pid):
            if time.monotonic() > deadline or self.nursery.ended(player.pid):
                return False
            self._pass_time(0.005)
        return True

    def _strike_pause_before_resign(self) -> bool:
        """The leader is asked to end, and stops before it resigns until another leads."""
        leader = self._leader()
        if leader is None or not self.nursery.signal(leader.pid, signal.SIGUSR2):
            return False
        self.nursery.signal(leader.pid, signal.SIGTERM)
        if not self._has_stopped(leader):
            self._kill(leader)
            return False
        return self._end_later(leader, self.dice.choice(PAUSES[1:]) * self.profile.lock_timeout)

    def _strike_stop_worker(self) -> bool:
        """SIGSTOP of a worker for longer than its leases."""
        workers = self._running("worker")
        if not workers:
            return False
        seconds = self.dice.uniform(1.1, 2.0) * self.profile.lease
        return self._stop(self.dice.choice(workers), seconds)

    def _strike_end_worker(self) -> bool:
        """The same, and then it is asked to end: it releases tasks that it has lost."""
        workers = self._running("worker")
        if not workers:
            return False
        seconds = self.dice.uniform(1.1, 2.0) * self.profile.lease
        return self._end_later(self.dice.choice(workers), seconds)

    def _end_later(self, player: Player, seconds: float) -> bool:
        pid = player.pid

        def end() -> None:
            if player.pid != pid:
                return
            self.nursery.signal(pid, signal.SIGCONT)
            self.nursery.signal(pid, signal.SIGTERM)
            self._note_end(player)
            self._begin(player)

        if not self.nursery.signal(pid, signal.SIGSTOP):
            return False
        player.resumes_at = time.monotonic() + seconds
        self._later(seconds, end)
        return True

    def _strike_network(self) -> bool:
        """One of the proxies has faults for a while."""
        proxy, kind = self.dice.choice(self.proxies), self.dice.choice(NETWORK)
        if kind == "delay":
            proxy.delay(self.dice.uniform(0.005, 0.1), jitter=0.05)
        else:
            getattr(proxy, kind)()
        self.faults[kind] += 1
        self._later(self._for_a_while(), proxy.clear)
        return True

    def _strike_drop_replies(self) -> bool:
        """Commands are applied, and their replies are lost."""
        proxy = self.dice.choice(self.proxies)
        proxy.drop_replies(self.dice.randint(1, 20), every=self.dice.randint(1, 3))
        return True

    def _strike_kill_server(self) -> bool:
        """SIGKILL of Redis, and a restart from disk."""
        self.server.kill()
        self._pass_time(self.dice.choice((0.0, 0.0, 0.2, 1.0)))
        self.server.restart()
        return True

    def _strike_failover(self) -> bool:
        """The primary dies, freezes or is asked to step down; a replica is promoted."""
        kind = self.dice.choice(("kill_primary", "pause_primary", "planned_failover"))
        if kind == "kill_primary":
            self.fleet.primary.kill()
        elif kind == "pause_primary":
            self.fleet.primary.pause()
        else:
            self.fleet.failover()
        self.faults[kind] += 1
        self.fleet.wait_for_failover(60.0)
        self._pass_time(self._for_a_while())
        self.fleet.mend(60.0)
        return True

    def _strike_client_pause(self) -> bool:
        """Redis does not answer for a while."""
        self.client.execute_command("CLIENT", "PAUSE", int(self._for_a_while() * 1000), "ALL")
        return True

    def _strike_script_flush(self) -> bool:
        """Redis forgets the scripts."""
        self.client.script_flush()
        return True

    def _strike_full_memory(self) -> bool:
        """Redis is out of memory: it accepts nothing new, and tasks are drained."""
        used = int(self.client.info("memory")["used_memory"])
        self.client.config_set("maxmemory", max(1, used - 1))
        self._later(self._for_a_while(), lambda: _set_memory(self.client))
        return True

    def _strike_clock_jump(self) -> bool:
        """The clock jumps by up to an hour, either way."""
        assert self.clock is not None
        self.clock.jump_to(self.dice.randint(-HOUR_MS, HOUR_MS))
        return True


def _parent(profile: Profile) -> str | None:
    """Return the data folder: in memory, where an fsync is cheap, unless a disk is requested.

    A SIGKILL does not affect the page cache, so the order of write, fsync and reply is tested
    either way; a power failure is tested by neither.
    """
    return None if profile.on_disk or not Path(MEMORY).is_dir() else MEMORY


def _set_memory(client: redis.Redis) -> None:
    with suppress(redis.RedisError):
        client.config_set("maxmemory", 0)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def run_storm(profile: Profile, seed: int, *, say: Callable[[str], None] = print) -> Result:
    """Run one storm."""
    lanes = profile.lanes
    part = replace(
        profile,
        lanes=1,
        tasks=-(-profile.tasks // lanes),
        goals={kind: -(-goal // lanes) for kind, goal in profile.goals.items()},
    )

    def run_lane(number: int) -> Result:
        with Storm(part, seed + number, say=say) as storm:
            return storm.run()

    with ThreadPoolExecutor(lanes) as pool:
        return _sum(list(pool.map(run_lane, range(lanes))))


def _sum(results: list[Result]) -> Result:
    """Combine the results of lanes."""
    faults: Counter[str] = Counter()
    verdict = Verdict()
    for result in results:
        faults.update(result.faults)
        verdict += result.verdict
    return replace(
        results[0],
        seconds=max(result.seconds for result in results),
        faults=dict(sorted(faults.items())),
        verdict=verdict,
        restarts=sum(result.restarts for result in results),
    )
