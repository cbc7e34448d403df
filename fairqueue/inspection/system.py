"""Look at the queue as a whole: numbers, charts, workers, settings, and what needs attention."""

import builtins
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from fairqueue.errors import (
    InvalidInput,
    RedisRefused,
    RedisUnavailable,
    UnknownWorker,
    plural,
    shown,
)
from fairqueue.inspection.context import InspectionContext
from fairqueue.inspection.masking import mask
from fairqueue.inspection.views import Attention, LeaderInfo, Overview, RedisInfo
from fairqueue.link.keys import command_line
from fairqueue.models import HandlerLimits, QueueSettings, QueueSnapshot
from fairqueue.queue.workers import WorkerInfo
from fairqueue.stats.samples import Series
from fairqueue.validation import check_seconds

RECENT = 100  # ended runs whose waits and durations are looked at
MAX_ATTENTION = 20
OVERDUE_S = 60.0  # a schedule that is later than this says that nobody fires
OLD_WAIT_S = 600.0
SKEW_S = 2.0
MEMORY_SHARE = 0.85  # of maxmemory
START_SCHEDULER = "fairqueue scheduler"
START_WORKER = "fairqueue worker --app tasks"  # of a tasks.py in the same folder


class Workers:
    """The workers of the queue, which all tenants share."""

    def __init__(self, context: InspectionContext) -> None:
        self._context = context
        self._guard = context.guard

    def list(self) -> builtins.list[WorkerInfo]:
        """The workers that are alive. Raises Forbidden for an actor of one tenant."""
        self._guard.read()
        self._guard.require_all_tenants("look at workers")
        return self._context.workers.alive()

    def drain(self, worker_id: str) -> None:
        """Have a worker finish what it runs, take no more, and end. It hears within 10 s.

        Raises UnknownWorker.
        """
        self._guard.require("operator", "drain workers")
        self._guard.require_all_tenants("drain workers")
        with self._guard.change("worker.drain", worker_id):
            if not self._context.workers.drain(worker_id, self._guard.actor.name):
                raise UnknownWorker(f"there is no living worker {worker_id!r}")


class System:
    """The queue as a whole."""

    def __init__(self, context: InspectionContext) -> None:
        self._context = context
        self._guard = context.guard

    # --- numbers ----------------------------------------------------------------------------------

    def snapshot(self) -> QueueSnapshot:
        """Counts of the whole queue. Raises Forbidden for an actor of one tenant."""
        self._guard.read()
        self._guard.require_all_tenants("look at the whole queue")
        return self._context.queue.inspect()

    def overview(self) -> Overview:
        """The state of the queue; of one tenant, the numbers that exist of it alone."""
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

    def series(self, window: str = "1h") -> Series:
        """What the queue did over time. Raises Forbidden for an actor of one tenant."""
        self._guard.read()
        self._guard.require_all_tenants("look at the whole queue")
        return self._context.samples.read(window)

    def leader(self) -> LeaderInfo:
        """Who fires schedules."""
        return _leader(self.snapshot())

    def redis(self) -> RedisInfo:
        """The server under the queue. Raises Forbidden for an actor of one tenant."""
        self._guard.read()
        self._guard.require_all_tenants("look at the server")
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

    # --- what needs attention ---------------------------------------------------------------------

    def attention(self) -> list[Attention]:
        """What an operator should look at, the worst first; nothing is good news."""
        self._guard.read()
        if self._guard.actor.tenant is not None:
            return self._failures()
        snapshot = self._context.queue.inspect()
        found = [*self._of_scheduler(snapshot), *self._of_workers(snapshot), *self._failures()]
        found += self._of_redis()
        found.sort(key=lambda each: each.level != "error")
        return found[:MAX_ATTENTION]

    def _of_scheduler(self, snapshot: QueueSnapshot) -> list[Attention]:
        found = []
        if snapshot.active_schedules and not _is_led(snapshot):
            start = command_line(START_SCHEDULER, self._context.queue.name)
            text = f"no scheduler leads: schedules do not fire. Start one: {start}"
            found.append(Attention(level="error", kind="leader", target="", text=text))
        elif snapshot.overdue > OVERDUE_S:
            text = f"a schedule is {snapshot.overdue:.0f} s late"
            found.append(Attention(level="warning", kind="leader", target="", text=text))
        for problem in self._context.store.problems()[:MAX_ATTENTION]:
            text = f"schedule {problem.schedule_id} was set aside: {problem.reason}"
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
        if snapshot.oldest_wait > OLD_WAIT_S:
            minutes = snapshot.oldest_wait / 60
            text = f"the oldest task has waited {minutes:.0f} minutes"
            return [Attention(level="warning", kind="users", target="", text=text)]
        return []

    def _failures(self) -> list[Attention]:
        since = self._context.now() - timedelta(hours=1)
        count = self._context.glance.count_ended(since, self._guard.actor.tenant)
        failed = count["failed"] + count["timed_out"]
        if not failed:
            return []
        text = f"{failed} runs failed within the last hour" if failed > 1 else "a run failed lately"
        return [Attention(level="warning", kind="failed", target="", text=text)]

    def _of_redis(self) -> list[Attention]:
        info = self.redis()
        texts = []
        if info.max_memory and info.used_memory > MEMORY_SHARE * info.max_memory:
            share = info.used_memory / info.max_memory
            texts.append(("error", f"{info.server} uses {share:.0%} of its maxmemory"))
        if not info.last_save_ok:
            texts.append(("error", f"{info.server} could not write its data to disk"))
        if abs(info.clock_skew) > SKEW_S:
            texts.append(("warning", f"clocks differ: ours is {info.clock_skew:+.1f} s off Redis"))
        return [Attention(level=level, kind="redis", target="", text=text) for level, text in texts]

    def ready(self) -> list[str]:
        """Why the queue cannot be used now; empty if it can. For anybody who asks."""
        try:
            snapshot = self._context.queue.inspect()
        except (RedisUnavailable, RedisRefused) as error:
            return [f"redis: {type(error).__name__}"]
        if snapshot.active_schedules and not _is_led(snapshot):
            return ["leader: none"]
        return []

    # --- settings ---------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """The settings of the queue that are in force, and the limits of names."""
        self._guard.read()
        self._guard.require_all_tenants("look at settings")
        limits = {name: asdict(each) for name, each in self._context.queue.get_limits().items()}
        settings: dict[str, Any] = mask(asdict(self._context.queue.settings()))
        return {"queue": self._context.queue.name, "settings": settings, "limits": limits}

    def configure(self, **changes: Any) -> QueueSettings:
        """Change settings; see TaskQueue.configure. Raises ConfigurationError."""
        self._require_admin("change settings")
        known = asdict(QueueSettings())
        for name in changes:
            if name not in known:
                raise InvalidInput(f"setting {shown(name)} is none of {', '.join(sorted(known))}")
        if not changes:
            raise InvalidInput(f"no setting is given: pass some of {', '.join(sorted(known))}")
        with self._guard.change("settings.change", self._context.queue.name, details=changes):
            return self._context.queue.configure(**changes)

    def limits(self) -> dict[str, HandlerLimits]:
        """The limits that hold for tasks of a name, over all workers."""
        self._guard.read()
        self._guard.require_all_tenants("look at limits")
        return self._context.queue.get_limits()

    def set_limits(self, name: str, **limits: Any) -> None:
        """Limit all tasks of a name; see TaskQueue.set_limits."""
        self._require_admin("change limits")
        with self._guard.change("limits.change", name, details=limits):
            self._context.queue.set_limits(name, **limits)

    def prune(self, older_than: float | timedelta, *, dry_run: bool = True) -> int:
        """Forget ended runs that old; how many. By default only count."""
        self._require_admin("forget runs")
        seconds = check_seconds(older_than, "older_than")
        if dry_run:
            return self._context.glance.count_before(
                self._context.now() - timedelta(seconds=seconds)
            )
        details = {"older_than": seconds}
        with self._guard.change("runs.prune", "(old ones)", details=details) as noted:
            dropped = self._context.history.prune(seconds)
            noted.add(dropped=dropped)
        return dropped

    def _require_admin(self, what: str) -> None:
        self._guard.require("admin", what)
        self._guard.require_all_tenants(what)


def _is_led(snapshot: QueueSnapshot) -> bool:
    """Whether a term runs. The record of one that was not resigned stays for long after its end."""
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


def _quantile(ordered: list[float], part: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else None


def _left_behind(snapshot: QueueSnapshot) -> str:
    """What a queue without workers does not do."""
    texts = []
    if snapshot.ready:
        texts.append(plural(snapshot.ready, "task waits", "tasks wait"))
    if snapshot.running:
        lost = "run has lost its worker", "runs have lost their workers"
        texts.append(plural(snapshot.running, *lost))
    return ", ".join(texts)
