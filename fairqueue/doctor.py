"""Examine a queue and its Redis, and repair indexes and counts that do not match the records.

The doctor asks Redis about itself, and the queue about its leader, its workers and its delays. It
compares every index and count with the records, in small steps, while the queue is in use. A script
decides atomically whether an entry is wrong, so that concurrent work is not reported.
"""

import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import redis

from fairqueue.errors import RedisRefused, plural
from fairqueue.link.acl import needed_commands
from fairqueue.link.connection import Link
from fairqueue.link.info import parse_info
from fairqueue.link.keys import KEY_TYPES, command_line
from fairqueue.link.operation import Argument, Ask, Call, Operation, operation, steps
from fairqueue.link.owners import Owner
from fairqueue.link.scripts import load_script, script_names
from fairqueue.models import QueueSnapshot, new_id
from fairqueue.queue.delays import DelayIndex
from fairqueue.queue.pools import pool_infos
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerInfo, WorkerStore
from fairqueue.schedules.store import ScheduleStore

OK, WARNING, PROBLEM = "ok", "warning", "problem"

ROUND_TRIPS = 10  # measured for the latency
SLOW_S = 0.05  # a longer median round trip slows everything down
SKEW_S = 2.0  # clocks that differ by more confuse people; the queue uses the clock of Redis
FULL_SHARE, FULLER_SHARE = 0.8, 0.95  # of maxmemory: Redis refuses new tasks soon, or any time now
OVERDUE_S = 60.0  # a schedule that is later than this is stuck
BATCH = 100  # entries that one script examines
HISTORY_BYTES = 2**30  # memory of ended runs above which the doctor warns
HISTORY_SHARE = 0.5  # the same as a part of maxmemory, if that is less
HISTORY_SAMPLE = 100  # runs whose size is measured
RUN_BYTES = 450  # memory of a run besides its texts: its entries in the indexes
MOST_LEASES = 10_000  # more are not counted in one script: lua/maintenance/repair_tasks.lua
EXAMPLES = 5  # of wrong entries in one finding
_HELLO = ("TIME",)  # not PING, which a server refuses that cannot write to its disk

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. repairable: how many entries `fix` would repair."""

    check: str
    level: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)
    repairable: int = 0


def _nothing(_: int) -> None:
    """Report no progress."""


class Doctor:
    """Examines one queue."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue
        self.link = queue.link

    @operation
    def examine(
        self, *, fix: bool = False, records: bool = True, progress: Progress = _nothing
    ) -> Operation[list[Finding]]:
        """Return the findings of all checks. `fix` repairs inconsistent entries.

        `records`: whether to compare all entries, which takes long if there are many. `progress`
        is called with the number of entries compared so far. Raises RedisUnavailable, and
        RedisRefused if Redis does not accept the connection.
        """
        yield Ask(_HELLO)
        info = yield from self._info()
        found = [
            _check_server(info),
            _check_eviction(info),
            _check_persistence(
                info, (yield from self._config("appendfsync")), (yield from self._config("save"))
            ),
            _check_memory(info),
            (yield from self._check_latency()),
            (yield from self._check_clock()),
            (yield from self._check_permissions()),
            (yield from self._check_scripts()),
        ]
        try:
            snapshot = yield from steps(self._queue.inspect)()
        except RedisRefused as error:
            return [*found, Finding("queue", PROBLEM, str(error))]
        workers = yield from steps(WorkerStore(self.link).alive)()
        found += [
            _check_leader(snapshot, self._queue.name),
            *(yield from self._check_schedules(snapshot)),
            (yield from self._check_workers(snapshot, workers)),
            (yield from self._check_stale_runs([i.encode() for w in workers for i in w.current])),
            (yield from self._check_history(int(info.get("maxmemory", 0)))),
        ]
        if records:
            found += yield from self._check_records(fix, progress)
        return found

    def _check_records(self, fix: bool, progress: Progress) -> Operation[list[Finding]]:
        try:
            return (yield from steps(Records(self.link, fix=fix, progress=progress).compare)())
        except RedisRefused as error:  # no writes now; the other findings still count
            return [Finding("records", PROBLEM, f"the entries could not be compared: {error}")]

    # --- Redis ------------------------------------------------------------------------------------

    def _info(self) -> Operation[dict[str, str]]:
        try:
            return parse_info((yield Ask(("INFO",)))[0])
        except RedisRefused:
            return {}

    def _config(self, name: str) -> Operation[str | None]:
        """Return a setting of the server; None if CONFIG is not allowed."""
        try:
            answer = (yield Ask(("CONFIG", "GET", name)))[0]
        except RedisRefused:
            return None
        return answer[1].decode() if len(answer) == 2 else None

    def _check_latency(self) -> Operation[Finding]:
        taken = []
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            yield Ask(_HELLO)
            taken.append(time.perf_counter() - started)
        median = statistics.median(taken)
        numbers = {"median": median, "least": min(taken), "most": max(taken)}
        words = ", ".join(f"{name} {seconds * 1000:.2f} ms" for name, seconds in numbers.items())
        return Finding(
            "latency", OK if median <= SLOW_S else WARNING, f"round trips: {words}", numbers
        )

    def _check_clock(self) -> Operation[Finding]:
        before = time.time()
        seconds, micros = (yield Ask(("TIME",)))[0]
        skew = (before + time.time()) / 2 - (int(seconds) + int(micros) / 1e6)
        text = f"the clock of this machine is {skew:+.3f} s off Redis, whose clock the queue uses"
        return Finding("clock", OK if abs(skew) <= SKEW_S else WARNING, text, {"skew": skew})

    def _check_permissions(self) -> Operation[Finding]:
        refused, how = yield from _Permissions(self.link).refused()
        if refused:
            text = f"the Redis user may not run {', '.join(refused)}: allow them ({how})"
            return Finding("permissions", PROBLEM, text, {"refused": refused})
        return Finding("permissions", OK, f"all commands are allowed ({how})")

    def _check_scripts(self) -> Operation[Finding]:
        names = script_names()
        try:
            for name in names:
                yield Ask(("SCRIPT", "LOAD", load_script(name).text))
        except RedisRefused as error:
            return Finding("scripts", PROBLEM, f"script {name!r} cannot be loaded: {error}")
        return Finding("scripts", OK, f"{len(names)} scripts are loaded")

    # --- the queue --------------------------------------------------------------------------------

    def _check_schedules(self, snapshot: QueueSnapshot) -> Operation[list[Finding]]:
        found: list[Finding] = []
        problems = []
        if snapshot.set_aside:
            problems = yield from steps(ScheduleStore(self.link).problems)()
        if problems:
            reasons = [f"{each.schedule_id}: {each.reason}" for each in problems]
            aside = plural(snapshot.set_aside, "schedule was", "schedules were")
            text = f"{aside} set aside, such as {reasons[0]}"
            found.append(Finding("schedules", WARNING, text, {"set_aside": reasons[:100]}))
        if snapshot.overdue > OVERDUE_S:
            text = f"a schedule is {snapshot.overdue:.0f} s overdue: no scheduler fires it"
            found.append(Finding("overdue", PROBLEM, text, {"overdue": snapshot.overdue}))
        text = f"{snapshot.active_schedules} of {snapshot.schedules} are active, none is late"
        return found or [Finding("schedules", OK, text)]

    def _check_workers(
        self, snapshot: QueueSnapshot, workers: Sequence[WorkerInfo]
    ) -> Operation[Finding]:
        details = {"workers": len(workers), "waiting": snapshot.ready}
        if snapshot.ready:
            is_anybody_there = yield from steps(WorkerStore(self.link).is_anybody_there)()
            if not is_anybody_there:
                waits = plural(snapshot.ready, "task waits", "tasks wait")
                start = command_line("fairqueue worker --app tasks", self._queue.name)
                text = f"{waits} and no worker is alive: {start}"
                return Finding("workers", PROBLEM, text, details)
        unserved = [pool for pool in pool_infos(snapshot, workers) if pool.is_unserved]
        if unserved:
            waiting = {pool.pool: pool.waiting for pool in unserved}
            shown = ", ".join(f"{name!r} ({count})" for name, count in waiting.items())
            text = f"tasks wait in pools that no live worker serves: {shown:.300}"
            return Finding("workers", WARNING, text, details | {"unserved": waiting})
        slots = plural(sum(worker.slots for worker in workers), "slot")
        text = f"{plural(len(workers), 'worker is', 'workers are')} alive, with {slots}"
        return Finding("workers", OK, text, details)

    def _check_stale_runs(self, current: list[bytes]) -> Operation[Finding]:
        """Look for runs that workers still have although their tasks were ended."""
        stale = []
        for ids in _batches(current, BATCH):
            texts = (yield Ask(("HMGET", self.link.keys["status"], *ids)))[0]
            for task_id, text in zip(ids, texts, strict=True):
                if b'"stale":' in (text or b""):
                    stale.append(task_id.decode(errors="replace"))
        if stale:
            many = plural(len(stale), "slot is", "slots are")
            text = f"{many} taken by runs that do not end, such as {stale[0]}"
            return Finding("stale runs", WARNING, text, {"stale": stale[:100]})
        return Finding("stale runs", OK, "no run continues after its task was ended")

    def _check_history(self, maxmemory: int) -> Operation[Finding]:
        """Estimate the memory of the ended runs from a sample."""
        keys = self.link.keys
        kept = yield Ask(("ZCARD", keys["ended"]), ("ZCARD", keys["dead"]))
        used = 0.0
        for name, count in zip(("ended", "dead"), kept, strict=True):
            if count:
                used += count * (yield from self._bytes_of_one(name))
        most = min(HISTORY_BYTES, maxmemory * HISTORY_SHARE) if maxmemory else HISTORY_BYTES
        details = {"runs": sum(kept), "bytes": round(used)}
        text = f"{sum(kept):,} ended runs are kept and use about {used / 2**20:,.0f} MiB"
        if used <= most:
            return Finding("history", OK, text, details)
        advice = "lower keep_finished, keep_dead or the times to keep them"
        text += f", more than {most / 2**20:,.0f} MiB: {advice}"
        return Finding("history", WARNING, text, details)

    def _bytes_of_one(self, name: str) -> Operation[float]:
        """Return the mean size of a kept run in a sample."""
        keys = self.link.keys
        ids = (yield Ask(("ZRANDMEMBER", keys[name], HISTORY_SAMPLE)))[0]
        if not ids:
            return 0.0
        places = ("tasks", "status", "attempts")
        sizes = yield Ask(*(("HSTRLEN", keys[place], i) for place in places for i in ids))
        return RUN_BYTES + sum(map(int, sizes)) / len(ids)


def _check_server(info: dict[str, str]) -> Finding:
    version = info.get("redis_version")
    if version is None:
        text = "INFO is not allowed: version, memory and persistence are unknown"
        return Finding("server", WARNING, text)
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    if int(version.split(".")[0]) < 7:
        return Finding("server", PROBLEM, f"{name}: FairQueue needs 7.0 or later")
    return Finding("server", OK, name, {"version": version})


def _check_eviction(info: dict[str, str]) -> Finding:
    policy = info.get("maxmemory_policy", "?")
    if policy.startswith("allkeys"):
        text = f"maxmemory-policy {policy} evicts tasks and schedules: set it to noeviction"
        return Finding("eviction", PROBLEM, text)
    return Finding("eviction", OK, f"maxmemory-policy {policy}")


def _check_persistence(info: dict[str, str], appendfsync: str | None, save: str | None) -> Finding:
    details = {"appendonly": info.get("aof_enabled"), "appendfsync": appendfsync, "save": save}
    for name in ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status"):
        if info.get(name, "ok") != "ok":
            text = f"Redis could not write to disk: {name} is {info[name]}"
            return Finding("persistence", PROBLEM, text, details)
    if info.get("aof_enabled") == "1":
        text = f"appendonly yes, appendfsync {appendfsync or 'unknown'}"
        return Finding("persistence", WARNING if appendfsync == "no" else OK, text, details)
    lost = "the last minutes" if save else "everything"
    text = f"appendonly no: {lost} would be lost in a crash; set appendonly yes"
    return Finding("persistence", WARNING, text if info else "unknown", details)


def _check_memory(info: dict[str, str]) -> Finding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    share = used / most if most else 0.0
    text = f"{used / 2**20:.1f} MiB used, " + (f"{share:.0%} of maxmemory" if most else "no limit")
    level = OK if share < FULL_SHARE else WARNING if share < FULLER_SHARE else PROBLEM
    return Finding("memory", level, text, {"used_memory": used, "maxmemory": most})


def _check_leader(snapshot: QueueSnapshot, queue: str) -> Finding:
    until = snapshot.leader_until
    if snapshot.leader is not None and until is not None and until > snapshot.at:
        left = (until - snapshot.at).total_seconds()
        text = f"{snapshot.leader} leads for another {left:.1f} s; term {snapshot.epoch}"
        return Finding("leader", OK, text, {"seconds_left": left})
    if snapshot.active_schedules:
        start = command_line("fairqueue scheduler", queue)
        return Finding("leader", PROBLEM, f"no scheduler leads, so schedules do not fire: {start}")
    return Finding("leader", OK, "no scheduler leads, and no schedule is active")


# --- what Redis permits ---------------------------------------------------------------------------

# Commands that can be tried on a field that does not exist, without any effect.
_HARMLESS = {
    **dict.fromkeys(("HGET", "HLEN", "HEXISTS", "HDEL", "HMGET"), "status"),
    **dict.fromkeys(("ZCARD", "ZSCORE", "ZREM"), "ready"),
    "LLEN": "wake",
}
_WITHOUT_FIELD = {"HLEN", "ZCARD", "LLEN"}


class _Permissions:
    """Finds which of the commands that FairQueue needs the Redis user may not run."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def refused(self) -> Operation[tuple[list[str], str]]:
        """Return the commands that are refused, and how that was found out."""
        commands = needed_commands()
        try:
            user = (yield Ask(("ACL", "WHOAMI")))[0]
            infos = (yield Ask(("COMMAND", "INFO", *commands)))[0]
            refused = []
            for command, info in zip(commands, infos, strict=True):
                if not (yield from self._is_allowed(user, command, abs(info[1]) if info else 2)):
                    refused.append(command)
            return refused, "by ACL DRYRUN"
        except RedisRefused:
            return (yield from self._try_harmless()), "those that can be tried without a change"

    def _is_allowed(self, user: bytes, command: str, arity: int) -> Operation[bool]:
        """Ask about a command that has at least `arity` words, itself included."""
        words = command.split("|")
        key = self.link.keys["status"]
        given: list[Argument] = ["x" * 40, 1, key] if command == "EVALSHA" else []
        given += [key] * (arity - len(words) - len(given))
        answer = (yield Ask(("ACL", "DRYRUN", user, *words, *given)))[0]
        return bool(answer == b"OK")

    def _try_harmless(self) -> Operation[list[str]]:
        found = []
        for command, name in _HARMLESS.items():
            words: list[Argument] = [command, self.link.keys[name]]
            if command not in _WITHOUT_FIELD:
                words.append(f"doctor:{new_id()}")
            try:
                yield Ask(words)
            except RedisRefused as error:
                if isinstance(error.__cause__, redis.exceptions.NoPermissionError):
                    found.append(command)
        return found


# --- records that have to agree -------------------------------------------------------------------

# Structures in the order of repair: first entries without a record are removed, then each task is
# moved to where its record says, then counts are corrected, then the places of users.
_OF_TASKS = (
    *("tasks", "attempts", "waiting", "delayed", "delayed_index", "leases", "ended", "dead"),
    *("backlog", "held", "slot_line", "slots", "deadlines", "open", "runs", "failures"),
    *("pool_tasks", "gate_order", "gate_passes", "paced", "uniques", "expiring"),
    *("rings", "tags", "clocks"),
)
_OF_RECORDS = (
    *("due", "plan", "schedule_state", "schedule_index", "schedule_names", "tenant_schedules"),
    *("moments", "changes", "schedules", "users", "user_names", "user_tenants", "tenant_users"),
    *("workers", "worker_ends", "limits"),
)
_BY_SCHEDULE = ("moments", "changes")  # examined by the schedule id before the NUL of each entry


class Records:
    """Compares every index and count of a queue with its records, and repairs if asked to."""

    def __init__(self, link: Link, *, fix: bool, progress: Progress = _nothing) -> None:
        self.link = link
        self._fix = fix
        self._progress = progress
        self._looked = 0
        self._omit_values = True  # whether the server supports HSCAN NOVALUES

    @operation
    def compare(self) -> Operation[list[Finding]]:
        """Return a finding for each structure with wrong entries, or one that all agree."""
        found: list[Finding] = []
        if self._fix and not (yield Ask(("ZCARD", self.link.keys["delayed_index"])))[0]:
            # Older versions have no such index: nothing is wrong.
            yield from steps(DelayIndex(self.link).update)()
        for name in _OF_TASKS:
            found += yield from self._check("repair_tasks", name, [name])
        found += yield from self._check("repair_tasks", "task", ["status"])
        found += yield from self._check("repair_tasks", "behind", ["delayed"], name="unique keys")
        found += yield from self._check_counts()
        turns = ["ready", "parked", "critical"]
        found += yield from self._check("repair_tasks", "user", turns, ["backlog"], "users in line")
        for name in _OF_RECORDS:
            whole, by_id = ([], [name]) if name in _BY_SCHEDULE else ([name], [])
            found += yield from self._check("repair_records", name, whole, by_id, name)
        text = f"{plural(self._looked, 'entry agrees', 'entries agree')} with each other"
        return found or [Finding("records", OK, text)]

    def _check(
        self,
        script: str,
        kind: str,
        whole: Sequence[str],
        by_id: Sequence[str] = (),
        name: str = "",
    ) -> Operation[list[Finding]]:
        """Examine structures: the entries of `whole`, and the distinct ids that begin `by_id`."""
        wrong = _WrongEntries()
        for structure in (*whole, *by_id):
            seen: set[bytes] = set()
            cursor = -1
            while cursor:
                cursor, entries = yield from self._page(structure, max(0, cursor))
                if structure in by_id:
                    ids = dict.fromkeys(entry.partition(b"\0")[0] for entry in entries)
                    entries = [each for each in ids if each not in seen]
                    seen.update(entries)
                yield from self._examine(script, kind, entries, wrong)
        return wrong.findings(name or whole[0], self._fix)

    def _examine(
        self, script: str, kind: str, entries: Iterable[bytes], wrong: "_WrongEntries"
    ) -> Operation[None]:
        """Run a script on entries, and add the wrong ones to `wrong`."""
        for batch in _batches(entries, BATCH):
            fix = "1" if self._fix else ""
            wrong.add((yield Call(script, op=new_id(), kind=kind, fix=fix, rest=batch)))
            self._looked += len(batch)
            self._progress(self._looked)

    # --- counts of running tasks ------------------------------------------------------------------

    def _check_counts(self) -> Operation[list[Finding]]:
        if (yield Ask(("ZCARD", self.link.keys["leases"])))[0] > MOST_LEASES:
            text = f"more than {MOST_LEASES} tasks run: the counts of users were not compared"
            return [Finding("running", WARNING, text)]
        counts = Counter(dict((yield from self._stored_counts())))
        counts.subtract((yield from self._leases_by_user()))
        # Work goes on meanwhile: the script decides which counts are wrong.
        users = {user for user, count in counts.items() if count}
        users |= {user for user, count in (yield from self._stored_counts()) if count <= 0}
        wrong = _WrongEntries()
        yield from self._examine("repair_tasks", "running", users, wrong)
        return wrong.findings("running", self._fix)

    def _stored_counts(self) -> Operation[list[tuple[bytes, int]]]:
        counts: list[tuple[bytes, int]] = []
        cursor = -1
        while cursor:
            cursor, flat = yield from self._scan("HSCAN", "running", max(0, cursor))
            counts += zip(flat[::2], map(_number, flat[1::2]), strict=True)
        return counts

    def _leases_by_user(self) -> Operation[Counter[bytes]]:
        counts: Counter[bytes] = Counter()
        cursor = -1
        while cursor:
            cursor, entries = yield from self._page("leases", max(0, cursor))
            for ids in _batches(entries, BATCH):
                for text in (yield Ask(("HMGET", self.link.keys["status"], *ids)))[0]:
                    counts.update(_sharers_in(text or b""))
        return counts

    # --- scanning ---------------------------------------------------------------------------------

    def _page(self, name: str, cursor: int) -> Operation[tuple[int, list[bytes]]]:
        """Return the next cursor, 0 at the end, and entries of a structure, some of them twice."""
        if KEY_TYPES[name] != "hash":
            cursor, flat = yield from self._scan("ZSCAN", name, cursor)
            return cursor, flat[::2]
        if self._omit_values:
            try:
                return (yield from self._scan("HSCAN", name, cursor, "NOVALUES"))
            except RedisRefused:  # before Redis 7.4 and Valkey 8
                self._omit_values = False
        cursor, flat = yield from self._scan("HSCAN", name, cursor)
        return cursor, flat[::2]

    def _scan(
        self, command: str, name: str, cursor: int, *more: str
    ) -> Operation[tuple[int, list[bytes]]]:
        key = self.link.keys[name]
        following, part = (yield Ask((command, key, cursor, "COUNT", BATCH, *more)))[0]
        return int(following), part


class _WrongEntries:
    """Counts the wrong entries of a structure, and keeps a few as examples."""

    def __init__(self) -> None:
        self._count = self._repairable = 0
        self._examples: list[str] = []

    def add(self, answer: list[bytes]) -> None:
        """Add the answer of a script: entry, text, and b"1" if it is repairable, for each."""
        self._count += len(answer) // 3
        self._repairable += answer[2::3].count(b"1")
        for entry, text in list(zip(answer[::3], answer[1::3], strict=True))[:EXAMPLES]:
            shown = entry.decode(errors="replace").replace("\0", " / ")
            self._examples.append(f"{shown} {text.decode(errors='replace')}")
        del self._examples[EXAMPLES:]

    def findings(self, name: str, fix: bool) -> list[Finding]:
        """Return the finding, if any entry was wrong."""
        if not self._count:
            return []
        done = self._repairable if fix else 0
        many = plural(self._count, "entry does", "entries do")
        text = f"{many} not agree, such as: {self._examples[0]}"
        return [
            Finding(
                f"records: {name}",
                WARNING if done == self._count else PROBLEM,
                f"{done} of {text}; repaired" if done else text,
                {"wrong": self._count, "repaired": done, "examples": self._examples},
                repairable=0 if fix else self._repairable,
            )
        ]


_USER = re.compile(rb'"user":("(?:[^"\\]|\\.)*")')
_GROUP = re.compile(rb'"group":"([A-Za-z0-9_.-]+)"')


def _sharers_in(record: bytes) -> list[bytes]:
    """Return the owner and the tenant of a status record, by their names in Redis.

    Empty if absent or malformed.
    """
    match, group = _USER.search(record), _GROUP.search(record)
    with suppress(ValueError):
        if match is not None:
            user, tenant = str(json.loads(match[1])), group[1].decode() if group else None
            found = [Owner(user, tenant).key] + ([Owner.whole(tenant).key] if tenant else [])
            return [each.encode() for each in found]
    return []


def _number(text: bytes) -> int:
    """Parse a stored count; -1 if malformed."""
    try:
        return int(text)
    except ValueError:
        return -1


def _batches(entries: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    source = iter(entries)
    while batch := list(islice(source, size)):
        yield batch
