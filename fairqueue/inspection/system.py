"""The queue as a whole: counts, charts, workers, settings, and what needs attention."""

import builtins
import shlex
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from fairqueue.errors import (
    ConfigurationError,
    InvalidInput,
    RedisRefused,
    RedisUnavailable,
    UnknownWorker,
    plural,
    shown,
)
from fairqueue.inspection.context import InspectorPart
from fairqueue.inspection.masking import mask
from fairqueue.inspection.missing import missing_text, noted, reading
from fairqueue.inspection.views import Attention, LeaderInfo, Overview, RedisInfo
from fairqueue.link.keys import command_line
from fairqueue.models import HandlerLimits, KeyLimits, QueueSettings, QueueSnapshot
from fairqueue.queue.pools import PoolInfo, pool_infos
from fairqueue.queue.settings import check_limited_key
from fairqueue.queue.workers import WorkerInfo
from fairqueue.stats.samples import Series
from fairqueue.validation import check_seconds

RECENT = 100  # ended runs that waits and durations are computed from
MAX_ATTENTION = 20
OVERDUE_S = 60.0  # schedules that are later than this need attention
OLD_WAIT_S = 600.0
SKEW_S = 2.0
MEMORY_SHARE = 0.85  # of maxmemory
START_SCHEDULER = "fairqueue scheduler"
START_WORKER = "fairqueue worker --app tasks"  # with a tasks.py in the same folder


class Workers(InspectorPart):
    """The workers of the queue, which all tenants share."""

    @reading
    def list(self) -> builtins.list[WorkerInfo]:
        """The live workers. Raises Forbidden for an actor of one tenant."""
        self._guard.read_global("see workers")
        return self._context.workers.alive()

    def drain(self, worker_id: str) -> None:
        """Let a worker finish its tasks, take no more, and exit. It reacts within 10 s.

        Raises UnknownWorker.
        """
        self._guard.require("operator", "drain workers")
        self._guard.require_all_tenants("drain workers")
        with self._guard.change("worker.drain", worker_id):
            if not self._context.workers.drain(worker_id, self._guard.actor.name):
                raise UnknownWorker(f"there is no live worker {worker_id!r}")


class System(InspectorPart):
    """The queue as a whole."""

    # --- numbers ----------------------------------------------------------------------------------

    @reading
    def snapshot(self) -> QueueSnapshot:
        """The counts of the queue. Raises Forbidden for an actor of one tenant."""
        self._guard.read_global("see the whole queue")
        return self._context.queue.inspect()

    @reading
    def overview(self) -> Overview:
        """The state of the queue; for an actor of one tenant, only what concerns the tenant."""
        self._guard.read()
        now = self._context.now()
        tenant = self._guard.actor.tenant
        glance = self._context.glance
        recent = glance.recent(tenant, RECENT)
        waits, took = recent.waits, recent.seconds
        hour = glance.count_ended(now - timedelta(hours=1), tenant)
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        shared = self._whole_queue(now) if tenant is None else self._one_tenant(tenant)
        return Overview(
            at=now,
            wait_p50=_quantile(waits, 0.5),
            wait_p95=_quantile(waits, 0.95),
            mean_seconds=sum(took) / len(took) if took else None,
            failures_last_hour=hour["failed"] + hour["timed_out"],
            runs_today=glance.count_ended(midnight, tenant),
            **shared,
        )

    def _whole_queue(self, now: datetime) -> dict[str, Any]:
        snapshot = self._context.queue.inspect()
        workers = self._context.workers.alive()
        return {
            "ready": snapshot.ready,
            "delayed": snapshot.delayed,
            "running": snapshot.running,
            "dead": snapshot.dead,
            "oldest_wait": snapshot.oldest_wait,
            "due_within_hour": self._context.glance.count_due(now + timedelta(hours=1)),
            "schedules": snapshot.schedules,
            "active_schedules": snapshot.active_schedules,
            "workers": len(workers),
            "worker_slots": sum(worker.slots for worker in workers),
            "leader": _leader(snapshot),
            "jain": snapshot.jain_index,
            "active_users": snapshot.active_users,
            "snapshot": snapshot,
        }

    def _one_tenant(self, tenant: str) -> dict[str, Any]:
        whole = ("ready", "delayed", "running", "dead", "oldest_wait", "due_within_hour")
        others = ("active_schedules", "workers", "worker_slots", "leader", "jain", "active_users")
        count = self._context.glance.count_schedules(tenant)
        return {**dict.fromkeys((*whole, *others, "snapshot")), "schedules": count}

    @reading
    def series(self, window: str = "1h") -> Series:
        """Samples of the queue over time. Raises Forbidden for an actor of one tenant."""
        self._guard.read_global("see the whole queue")
        return self._context.samples.read(window)

    @reading
    def leader(self) -> LeaderInfo:
        """The scheduler that fires schedules."""
        return _leader(self.snapshot())

    @reading
    def redis(self) -> RedisInfo:
        """The Redis server. Raises Forbidden for an actor of one tenant."""
        self._guard.read_global("see the server")
        info, took, skew = self._context.glance.server()
        return RedisInfo(
            version=info.get("valkey_version") or info.get("redis_version", "?"),
            server="Valkey" if "valkey_version" in info else "Redis",
            used_memory=int(info.get("used_memory", 0)),
            max_memory=int(info.get("maxmemory", 0)),
            policy=info.get("maxmemory_policy", "?"),
            appendonly=info.get("aof_enabled") == "1",
            appendfsync=info.get("aof_fsync", "?"),
            last_save_ok=info.get("rdb_last_bgsave_status", "ok") == "ok"
            and info.get("aof_last_write_status", "ok") == "ok",
            replicas=int(info.get("connected_slaves", 0)),
            clients=int(info.get("connected_clients", 0)),
            uptime=float(info.get("uptime_in_seconds", 0)),
            round_trip=took,
            clock_skew=skew,
        )

    @reading
    def pools(self) -> list[PoolInfo]:
        """The pools of the queue and of its live workers, the default one first."""
        self._guard.read_global("see pools")
        return pool_infos(self._context.queue.inspect(), self._context.workers.alive())

    # --- what needs attention ---------------------------------------------------------------------

    @reading
    def attention(self) -> list[Attention]:
        """What an operator should look at, the worst first."""
        self._guard.read()
        if self._guard.actor.tenant is not None:
            return self._failures()
        snapshot = self._context.queue.inspect()
        found = [*self._of_scheduler(snapshot), *self._of_workers(snapshot), *self._failures()]
        if 0 not in noted():  # the server of the queue as a whole
            found += self._of_redis()
        if away := missing_text(self._context.link, noted()):
            found.append(Attention(level="error", kind="partition", target="", text=away))
        found.sort(key=lambda each: each.level != "error")
        return found[:MAX_ATTENTION]

    def _of_scheduler(self, snapshot: QueueSnapshot) -> list[Attention]:
        found = []
        if snapshot.active_schedules and not _is_led(snapshot):
            start = command_line(START_SCHEDULER, self._context.queue.name)
            text = f"no scheduler is running: schedules do not fire. Start one: {start}"
            found.append(Attention(level="error", kind="leader", target="", text=text))
        elif snapshot.overdue > OVERDUE_S:
            text = f"a schedule is {snapshot.overdue:.0f} s late"
            found.append(Attention(level="warning", kind="leader", target="", text=text))
        for problem in self._context.store.problems()[:MAX_ATTENTION]:
            text = f"schedule {problem.schedule_id} cannot run: {problem.reason}"
            target = problem.schedule_id
            found.append(Attention(level="error", kind="schedule", target=target, text=text))
        return found

    def _of_workers(self, snapshot: QueueSnapshot) -> list[Attention]:
        if not (snapshot.ready or snapshot.running):
            return []
        if not self._context.workers.is_anybody_there():
            start = command_line(START_WORKER, self._context.queue.name)
            text = f"no worker is alive: {_left_behind(snapshot)}. Start one: {start}"
            return [Attention(level="error", kind="workers", target="", text=text)]
        if not snapshot.ready:
            return []
        unserved = [
            pool for pool in pool_infos(snapshot, self._context.workers.alive()) if pool.is_unserved
        ]
        if unserved:
            return [self._of_pool(pool) for pool in unserved[:MAX_ATTENTION]]
        if snapshot.oldest_wait > OLD_WAIT_S:
            minutes = snapshot.oldest_wait / 60
            text = f"the oldest task has waited {minutes:.0f} minutes"
            return [Attention(level="warning", kind="users", target="", text=text)]
        return []

    def _of_pool(self, pool: PoolInfo) -> Attention:
        start = command_line(f"{START_WORKER} {_pool_option(pool.pool)}", self._context.queue.name)
        tasks = "a task waits" if pool.waiting == 1 else f"{pool.waiting} tasks wait"
        text = f"no live worker serves the pool {pool.pool!r}: {tasks}. Start one: {start}"
        return Attention(level="warning", kind="pool", target=pool.pool, text=text)

    def _failures(self) -> list[Attention]:
        since = self._context.now() - timedelta(hours=1)
        count = self._context.glance.count_ended(since, self._guard.actor.tenant)
        failed, expired = count["failed"] + count["timed_out"], count["expired"]
        found = []
        if failed:
            text = "a run failed lately"
            if failed > 1:
                text = f"{failed} runs failed within the last hour"
            found.append(Attention(level="warning", kind="failed", target="", text=text))
        if expired:
            tasks = plural(expired, "task")
            which = "it" if expired == 1 else "them"
            text = f"{tasks} expired within the last hour, before a worker started {which}"
            found.append(Attention(level="warning", kind="expired", target="", text=text))
        return found

    def _of_redis(self) -> list[Attention]:
        info = self.redis()
        texts = []
        if info.max_memory and info.used_memory > MEMORY_SHARE * info.max_memory:
            share = info.used_memory / info.max_memory
            texts.append(("error", f"{info.server} uses {share:.0%} of its maxmemory"))
        if not info.last_save_ok:
            texts.append(("error", f"{info.server} could not write its data to disk"))
        if abs(info.clock_skew) > SKEW_S:
            text = f"the clock of this machine is {info.clock_skew:+.1f} s off that of Redis"
            texts.append(("warning", text))
        return [Attention(level=level, kind="redis", target="", text=text) for level, text in texts]

    def ready(self) -> list[str]:
        """Why the queue cannot be used now; empty if it can. Needs no role."""
        try:
            snapshot = self._context.queue.inspect()
        except (RedisUnavailable, RedisRefused) as error:
            return [f"redis: {type(error).__name__}"]
        if snapshot.active_schedules and not _is_led(snapshot):
            return ["leader: none"]
        return []

    # --- settings ---------------------------------------------------------------------------------

    @reading
    def settings(self) -> dict[str, Any]:
        """The settings of the queue, and the limits by task name, key and pattern."""
        self._guard.read_global("see settings")
        queue = self._context.queue
        limits = {name: asdict(each) for name, each in queue.get_limits().items()}
        keys = {key: asdict(each) for key, each in queue.get_key_limits().items()}
        settings: dict[str, Any] = mask(asdict(queue.settings()))
        return {
            "queue": queue.name,
            "settings": settings,
            "limits": limits,
            "key_limits": keys,
        }

    def configure(self, **changes: Any) -> QueueSettings:
        """Change settings; see TaskQueue.configure. Raises ConfigurationError."""
        self._guard.require_global_admin("change settings")
        known = asdict(QueueSettings())
        for name in changes:
            if name not in known:
                raise InvalidInput(f"unknown setting {shown(name)}: use {', '.join(sorted(known))}")
        if not changes:
            raise InvalidInput(f"nothing to change: pass some of {', '.join(sorted(known))}")
        with self._guard.change("settings.change", self._context.queue.name, details=changes):
            return self._context.queue.configure(**changes)

    @reading
    def limits(self) -> dict[str, HandlerLimits]:
        """The limits by task name, which apply across all workers."""
        self._guard.read_global("see limits")
        return self._context.queue.get_limits()

    def set_limits(self, name: str, **limits: Any) -> None:
        """Set the limits of a task name; see TaskQueue.set_limits."""
        self._guard.require_global_admin("change limits")
        with self._guard.change("limits.change", name, details=limits):
            self._context.queue.set_limits(name, **limits)

    @reading
    def key_limits(self) -> dict[str, KeyLimits]:
        """The limits of tasks with a key, by key or pattern."""
        self._guard.read_global("see limits")
        return self._context.queue.get_key_limits()

    def set_limit(self, key: str, **limits: Any) -> None:
        """Set the limits of a key, or of all keys of a pattern; see TaskQueue.set_limit.

        Raises ConfigurationError; without slots and rate too: see `remove_limit`.
        """
        self._guard.require_global_admin("change limits")
        if limits.get("slots") is None and limits.get("rate") is None:
            raise ConfigurationError(f"a limit of {shown(key)} needs slots or rate: give one")
        with self._guard.change("key_limits.change", key, details=limits):
            self._context.queue.set_limit(key, **limits)

    def remove_limit(self, key: str) -> bool:
        """Remove the limits of a key or a pattern; False if it has none."""
        self._guard.require_global_admin("change limits")
        check_limited_key(key)
        if key not in self._context.queue.get_key_limits():
            return False
        with self._guard.change("key_limits.remove", key):
            self._context.queue.set_limit(key)
        return True

    def prune(self, older_than: float | timedelta, *, dry_run: bool = True) -> int:
        """Delete runs that ended longer ago, and return how many; by default only count."""
        self._guard.require_global_admin("delete runs")
        seconds = check_seconds(older_than, "older_than")
        if dry_run:
            return self._context.glance.count_before(
                self._context.now() - timedelta(seconds=seconds)
            )
        details = {"older_than": seconds}
        with self._guard.change("runs.prune", "(old ones)", details=details) as entry:
            dropped = self._context.history.prune(seconds)
            entry.add(dropped=dropped)
        return dropped


def _is_led(snapshot: QueueSnapshot) -> bool:
    """Whether a scheduler leads. The record of a leader that was killed outlives its term."""
    return snapshot.leader_until is not None and snapshot.leader_until > snapshot.at


def _leader(snapshot: QueueSnapshot) -> LeaderInfo:
    left = 0.0
    if snapshot.leader_until is not None:
        left = max(0.0, (snapshot.leader_until - snapshot.at).total_seconds())
    return LeaderInfo(
        scheduler=snapshot.leader,
        until=snapshot.leader_until,
        seconds_left=left,
        terms=snapshot.epoch,
    )


def _pool_option(pool: str) -> str:
    """The option of `fairqueue worker` for a pool, whose name may look like an option."""
    is_odd = pool.startswith("-")
    return shlex.join([f"--pool={pool}"] if is_odd else ["--pool", pool])


def _quantile(ordered: list[float], part: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


def _left_behind(snapshot: QueueSnapshot) -> str:
    """What is left undone in a queue without workers."""
    texts = []
    if snapshot.ready:
        texts.append(plural(snapshot.ready, "task waits", "tasks wait"))
    if snapshot.running:
        lost = "run has lost its worker", "runs have lost their workers"
        texts.append(plural(snapshot.running, *lost))
    return ", ".join(texts)
