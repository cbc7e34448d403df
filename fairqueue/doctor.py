"""Say what is wrong with a queue and its Redis, and put right what does not agree.

Redis is asked about itself; the queue about its leader, its workers and what is late; and every
index and count is compared with the records, in small steps, while the queue is in use. Whether an
entry is wrong is decided by a script at one moment, so that work that goes on is no difference.
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
from fairqueue.link.connection import Argument, Link
from fairqueue.link.keys import KEY_TYPES, command_line
from fairqueue.link.scripts import load_script, script_names
from fairqueue.models import QueueSnapshot, new_id
from fairqueue.queue.delays import index_delayed
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.schedules.store import ScheduleStore

OK, WARNING, PROBLEM = "ok", "warning", "problem"

ROUND_TRIPS = 10  # asked for the latency
SLOW_S = 0.05  # a round trip that is usually longer makes everything slow
SKEW_S = 2.0  # clocks that differ by more confuse people; the queue goes by that of Redis
FULL_SHARE, FULLER_SHARE = 0.8, 0.95  # of maxmemory: soon, and now, Redis refuses new tasks
OVERDUE_S = 60.0  # a schedule that is later than this is stuck
BATCH = 100  # entries that one script looks at
HISTORY_BYTES = 2**30  # of ended runs: with more of them, they are told to be many
HISTORY_SHARE = 0.5  # of maxmemory, where that is less
HISTORY_SAMPLE = 100  # runs whose sizes are looked at
RUN_BYTES = 450  # of a run besides its texts: its places in the indexes
MOST_LEASES = 10_000  # more are not counted in one script: lua/maintenance/repair_tasks.lua
EXAMPLES = 5  # of what is wrong with a structure
_HELLO = ("TIME",)  # not PING: a server that cannot write to its disk refuses that

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found. repairable: how many entries `fix` would put right."""

    check: str
    level: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)
    repairable: int = 0


def _nothing(_: int) -> None:
    """Nobody wants to know how far it is."""


class Doctor:
    """Examines one queue."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue
        self._link = queue.link

    def examine(
        self, *, fix: bool = False, records: bool = True, progress: Progress = _nothing
    ) -> list[Finding]:
        """What was found, check by check. `fix` repairs entries that do not agree.

        Without `records` the entries are not compared, which takes as long as there are many.
        Raises RedisUnavailable and, where Redis lets nobody in, RedisRefused.
        """
        self._link.ask(_HELLO)
        info = self._info()
        found = [
            *_of_server(info),
            *self._of_settings(info),
            self._of_latency(),
            self._of_clock(),
            self._of_permissions(),
            self._of_scripts(),
        ]
        try:
            snapshot = self._queue.inspect()
        except RedisRefused as error:
            return [*found, Finding(check="queue", level=PROBLEM, text=str(error))]
        found += [_of_leader(snapshot, self._queue.name), *self._of_schedules(snapshot)]
        found += [self._of_workers(snapshot), self._of_stale_runs()]
        found += [self._of_history(int(info.get("maxmemory", 0)))]
        if records:
            found += self._of_records(fix, progress)
        return found

    def _of_records(self, fix: bool, progress: Progress) -> list[Finding]:
        try:
            return Records(self._link, fix=fix, progress=progress).compare()
        except RedisRefused as error:  # it takes no writes now; what else was found has to be told
            text = f"the entries could not be compared: {error}"
            return [Finding(check="records", level=PROBLEM, text=text)]

    # --- Redis ------------------------------------------------------------------------------------

    def _info(self) -> dict[str, str]:
        try:
            text = self._link.ask(("INFO",))[0]
        except RedisRefused:
            return {}
        lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
        return {name: value for name, colon, value in lines if colon}

    def _of_settings(self, info: dict[str, str]) -> list[Finding]:
        appendfsync = self._config("appendfsync")
        save = self._config("save")
        return [_of_policy(info), _of_persistence(info, appendfsync, save), _of_memory(info)]

    def _config(self, name: str) -> str | None:
        """A setting of the server; None where nobody may ask."""
        try:
            answer = self._link.ask(("CONFIG", "GET", name))[0]
        except RedisRefused:
            return None
        return answer[1].decode() if len(answer) == 2 else None

    def _of_latency(self) -> Finding:
        taken = []
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            self._link.ask(_HELLO)
            taken.append(time.perf_counter() - started)
        middle = statistics.median(taken)
        numbers = {"median": middle, "least": min(taken), "most": max(taken)}
        words = ", ".join(f"{name} {seconds * 1000:.2f} ms" for name, seconds in numbers.items())
        level = OK if middle <= SLOW_S else WARNING
        return Finding(check="latency", level=level, text=f"round trips: {words}", details=numbers)

    def _of_clock(self) -> Finding:
        before = time.time()
        seconds, micros = self._link.ask(("TIME",))[0]
        after = time.time()
        skew = (before + after) / 2 - (int(seconds) + int(micros) / 1e6)
        details = {"skew": skew}
        text = f"this machine is {skew:+.3f} s off Redis, by whose clock the queue goes"
        level = OK if abs(skew) <= SKEW_S else WARNING
        return Finding(check="clock", level=level, text=text, details=details)

    def _of_permissions(self) -> Finding:
        refused, how = _Permissions(self._link).refused()
        if refused:
            names = ", ".join(refused)
            text = f"the user of Redis may not run {names}: allow them ({how})"
            return Finding(
                check="permissions", level=PROBLEM, text=text, details={"refused": refused}
            )
        return Finding(check="permissions", level=OK, text=f"all commands are allowed ({how})")

    def _of_scripts(self) -> Finding:
        names = script_names()
        try:
            for name in names:
                self._link.ask(("SCRIPT", "LOAD", load_script(name).text))
        except RedisRefused as error:
            text = f"script {name!r} cannot be loaded: {error}"
            return Finding(check="scripts", level=PROBLEM, text=text)
        return Finding(check="scripts", level=OK, text=f"{len(names)} scripts are loaded")

    # --- the queue --------------------------------------------------------------------------------

    def _of_schedules(self, snapshot: QueueSnapshot) -> list[Finding]:
        found: list[Finding] = []
        problems = ScheduleStore(self._link).problems() if snapshot.set_aside else []
        if problems:
            told = [f"{each.schedule_id}: {each.reason}" for each in problems]
            aside = plural(snapshot.set_aside, "schedule was", "schedules were")
            text = f"{aside} set aside, such as {told[0]}"
            details: dict[str, Any] = {"set_aside": told[:100]}
            found.append(Finding(check="schedules", level=WARNING, text=text, details=details))
        if snapshot.overdue > OVERDUE_S:
            text = f"the most overdue schedule is {snapshot.overdue:.0f} s late: nobody fires it"
            details = {"overdue": snapshot.overdue}
            found.append(Finding(check="overdue", level=PROBLEM, text=text, details=details))
        if not found:
            text = f"{snapshot.active_schedules} of {snapshot.schedules} are active, none is late"
            found.append(Finding(check="schedules", level=OK, text=text))
        return found

    def _of_workers(self, snapshot: QueueSnapshot) -> Finding:
        store = WorkerStore(self._link)
        alive = store.alive()
        details = {"workers": len(alive), "waiting": snapshot.ready}
        if snapshot.ready and not store.is_anybody_there():
            waits = plural(snapshot.ready, "task waits", "tasks wait")
            start = command_line("fairqueue worker --app tasks", self._queue.name)
            text = f"{waits} and no worker is alive: {start}"
            return Finding(check="workers", level=PROBLEM, text=text, details=details)
        slots = sum(worker.slots for worker in alive)
        are = plural(len(alive), "worker is", "workers are")
        text = f"{are} alive, with {plural(slots, 'slot')}"
        return Finding(check="workers", level=OK, text=text, details=details)

    def _of_stale_runs(self) -> Finding:
        """Runs whose tasks were ended because they did not end, and that workers still have."""
        current = [
            task_id.encode()
            for worker in WorkerStore(self._link).alive()
            for task_id in worker.current
        ]
        stale = [
            task_id.decode(errors="replace")
            for ids in _batches(current, BATCH)
            for task_id, text in zip(ids, self._statuses(ids), strict=True)
            if b'"stale":' in (text or b"")
        ]
        if stale:
            many = plural(len(stale), "slot is", "slots are")
            text = f"{many} taken by runs that do not end, such as {stale[0]}"
            details = {"stale": stale[:100]}
            return Finding(check="stale runs", level=WARNING, text=text, details=details)
        return Finding(check="stale runs", level=OK, text="no run goes on after it had to end")

    def _statuses(self, ids: Sequence[bytes]) -> list[bytes | None]:
        found: list[bytes | None] = self._link.ask(("HMGET", self._link.keys["status"], *ids))[0]
        return found

    def _of_history(self, maxmemory: int) -> Finding:
        """How much memory the ended runs take, told from some of them."""
        keys = self._link.keys
        kept = self._link.ask(("ZCARD", keys["ended"]), ("ZCARD", keys["dead"]))
        used = sum(
            count * self._bytes_of_one(name)
            for name, count in zip(("ended", "dead"), kept, strict=True)
            if count
        )
        most = min(HISTORY_BYTES, maxmemory * HISTORY_SHARE) if maxmemory else HISTORY_BYTES
        details = {"runs": sum(kept), "bytes": round(used)}
        text = f"{sum(kept):,} ended runs are kept, some {used / 2**20:,.0f} MiB"
        if used <= most:
            return Finding(check="history", level=OK, text=text, details=details)
        text += (
            f", more than {most / 2**20:,.0f} MiB: lower keep_finished, keep_dead or their times"
        )
        return Finding(check="history", level=WARNING, text=text, details=details)

    def _bytes_of_one(self, name: str) -> float:
        """What a kept run takes in the middle, by a sample."""
        keys = self._link.keys
        ids = self._link.ask(("ZRANDMEMBER", keys[name], HISTORY_SAMPLE))[0]
        if not ids:
            return 0.0
        places = ("tasks", "status", "attempts")
        sizes = self._link.ask(*(("HSTRLEN", keys[place], i) for place in places for i in ids))
        return RUN_BYTES + sum(map(int, sizes)) / len(ids)


def _of_server(info: dict[str, str]) -> list[Finding]:
    version = info.get("redis_version")
    if version is None:
        text = "INFO is not allowed: version, memory and persistence are not known"
        return [Finding(check="server", level=WARNING, text=text)]
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {version}"
    if int(version.split(".")[0]) < 7:
        text = f"{name}: FairQueue needs 7.0 or later"
        return [Finding(check="server", level=PROBLEM, text=text)]
    return [Finding(check="server", level=OK, text=name, details={"version": version})]


def _of_policy(info: dict[str, str]) -> Finding:
    policy = info.get("maxmemory_policy", "?")
    if policy.startswith("allkeys"):
        text = f"maxmemory-policy {policy} throws tasks and schedules away: set it to noeviction"
        return Finding(check="eviction", level=PROBLEM, text=text)
    return Finding(check="eviction", level=OK, text=f"maxmemory-policy {policy}")


def _of_persistence(info: dict[str, str], appendfsync: str | None, save: str | None) -> Finding:
    details = {"appendonly": info.get("aof_enabled"), "appendfsync": appendfsync, "save": save}
    for name in ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status"):
        if info.get(name, "ok") != "ok":
            text = f"Redis could not write to disk: {name} is {info[name]}"
            return Finding(check="persistence", level=PROBLEM, text=text, details=details)
    if info.get("aof_enabled") == "1":
        level = WARNING if appendfsync == "no" else OK
        text = f"appendonly yes, appendfsync {appendfsync or 'not known'}"
        return Finding(check="persistence", level=level, text=text, details=details)
    lost = "the last minutes" if save else "everything"
    text = f"appendonly no: {lost} would be lost in a crash; set appendonly yes"
    if not info:
        text = "not known"
    return Finding(check="persistence", level=WARNING, text=text, details=details)


def _of_memory(info: dict[str, str]) -> Finding:
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    details = {"used_memory": used, "maxmemory": most}
    if not most:
        text = f"{used / 2**20:.1f} MiB used, without a maxmemory"
        return Finding(check="memory", level=OK, text=text, details=details)
    share = used / most
    text = f"{used / 2**20:.1f} MiB used, {share:.0%} of maxmemory"
    level = OK if share < FULL_SHARE else WARNING if share < FULLER_SHARE else PROBLEM
    return Finding(check="memory", level=level, text=text, details=details)


def _of_leader(snapshot: QueueSnapshot, queue: str) -> Finding:
    until = snapshot.leader_until
    if snapshot.leader is not None and until is not None and until > snapshot.at:
        left = (until - snapshot.at).total_seconds()
        text = f"{snapshot.leader} leads, for {left:.1f} s more; term {snapshot.epoch}"
        return Finding(check="leader", level=OK, text=text, details={"seconds_left": left})
    if snapshot.active_schedules:
        start = command_line("fairqueue scheduler", queue)
        text = f"no scheduler leads: schedules do not fire; {start}"
        return Finding(check="leader", level=PROBLEM, text=text)
    return Finding(check="leader", level=OK, text="nobody leads, and no schedule is active")


# --- what Redis lets us do ------------------------------------------------------------------------

# May be tried on a field that nobody has: nothing comes of it.
_HARMLESS: dict[str, tuple[Argument, ...]] = {
    "HGET": ("status",),
    "HLEN": ("status",),
    "HEXISTS": ("status",),
    "HDEL": ("status",),
    "HMGET": ("status",),
    "ZCARD": ("ready",),
    "ZSCORE": ("ready",),
    "ZREM": ("ready",),
    "LLEN": ("wake",),
}
_ALONE = {"HLEN", "ZCARD", "LLEN"}


class _Permissions:
    """Which of the commands that FairQueue needs the user of the connection may not run."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def refused(self) -> tuple[list[str], str]:
        """The commands that are refused, and how that was found out."""
        commands = needed_commands()
        try:
            user = self._link.ask(("ACL", "WHOAMI"))[0]
            arities = self._arities(commands)
            return [
                command
                for command in commands
                if not self._is_allowed(user, command, arities.get(command, 2))
            ], "by ACL DRYRUN"
        except RedisRefused:
            return self._tried(), "those that can be tried without a change"

    def _arities(self, commands: Sequence[str]) -> dict[str, int]:
        """How many words each has at least, itself included."""
        answers = self._link.ask(("COMMAND", "INFO", *commands))[0]
        return {
            command: abs(answer[1])
            for command, answer in zip(commands, answers, strict=True)
            if answer
        }

    def _is_allowed(self, user: bytes, command: str, arity: int) -> bool:
        words = command.split("|")
        key = self._link.keys["status"]
        given: list[Argument] = ["x" * 40, 1, key] if command == "EVALSHA" else []
        given += [key] * (arity - len(words) - len(given))
        answer = self._link.ask(("ACL", "DRYRUN", user, *words, *given))[0]
        return bool(answer == b"OK")

    def _tried(self) -> list[str]:
        found = []
        for command, (name,) in _HARMLESS.items():
            words: list[Argument] = [command, self._link.keys[str(name)]]
            if command not in _ALONE:
                words.append(f"doctor:{new_id()}")
            try:
                self._link.ask(words)
            except RedisRefused as error:
                if isinstance(error.__cause__, redis.exceptions.NoPermissionError):
                    found.append(command)
        return found


# --- records that have to agree -------------------------------------------------------------------

# Structures in the order in which they are put right: what is in no record goes first, then each
# task is brought to where its record says, then counts, then the turns of users.
_OF_TASKS = (
    *("tasks", "attempts", "waiting", "delayed", "delayed_index", "leases", "ended", "dead"),
    *("backlog", "held", "slot_line", "slots", "deadlines", "open", "runs", "failures"),
)
_OF_RECORDS = (
    *("due", "plan", "schedule_state", "schedule_index", "schedule_names", "tenant_schedules"),
    *("moments", "changes", "schedules", "users", "user_names", "tenants", "tenant_users"),
    *("workers", "worker_ends"),
)
_BY_SCHEDULE = ("moments", "changes")


class Records:
    """Compares every index and count of a queue with its records, and repairs if asked to."""

    def __init__(self, link: Link, *, fix: bool, progress: Progress = _nothing) -> None:
        self._link = link
        self._fix = fix
        self._progress = progress
        self._looked = 0

    def compare(self) -> list[Finding]:
        """A finding for each structure with something wrong, or one that says that all agree."""
        found: list[Finding] = []
        if self._fix and not self._link.ask(("ZCARD", self._link.keys["delayed_index"]))[0]:
            index_delayed(self._link)  # an older version made none: that is nothing wrong
        for name in _OF_TASKS:
            found += self._check("repair_tasks", name, self._entries(name), name)
        found += self._check("repair_tasks", "task", self._entries("status"), "status")
        found += self._check_counts()
        found += self._check("repair_tasks", "user", self._users(), "users in line")
        for name in _OF_RECORDS:
            found += self._check("repair_records", name, self._entries(name), name)
        if not found:
            text = f"{plural(self._looked, 'entry agrees', 'entries agree')} with each other"
            return [Finding(check="records", level=OK, text=text)]
        return found

    def _entries(self, name: str) -> Iterator[bytes]:
        scan = _hscan if KEY_TYPES[name] == "hash" else _zscan
        entries = scan(self._link, name)
        if name in _BY_SCHEDULE:
            return _distinct(entry.partition(b"\0")[0] for entry in entries)
        return entries

    def _users(self) -> Iterator[bytes]:
        """Users who have a turn, or waiting tasks."""
        for name in ("ready", "parked", "critical"):
            yield from self._entries(name)
        yield from _distinct(member.partition(b"\0")[0] for member in self._entries("backlog"))

    def _check_counts(self) -> list[Finding]:
        if self._link.ask(("ZCARD", self._link.keys["leases"]))[0] > MOST_LEASES:
            text = f"more than {MOST_LEASES} tasks run: the counts of users were not compared"
            return [Finding(check="running", level=WARNING, text=text)]
        counts = Counter(dict(self._stored_counts()))
        counts.subtract(self._leases_by_user())
        # Work goes on meanwhile: the script says which ones do differ.
        differing = [user for user, count in counts.items() if count]
        zeros = [user for user, count in self._stored_counts() if count <= 0]
        return self._check("repair_tasks", "running", iter({*differing, *zeros}), "running")

    def _stored_counts(self) -> list[tuple[bytes, int]]:
        key = self._link.keys["running"]
        return [(user, _number(text)) for user, text in _hscan_pairs(self._link, key)]

    def _leases_by_user(self) -> Counter[bytes]:
        counts: Counter[bytes] = Counter()
        keys = self._link.keys
        for ids in _batches(_zscan(self._link, "leases"), BATCH):
            for text in self._link.ask(("HMGET", keys["status"], *ids))[0]:
                user = _user_in(text or b"")
                if user is not None:
                    counts[user] += 1
        return counts

    def _check(self, script: str, kind: str, entries: Iterator[bytes], name: str) -> list[Finding]:
        wrong: list[str] = []
        count = repairable = 0
        for batch in _batches(entries, BATCH):
            answer = self._link.run(
                script, op=new_id(), kind=kind, fix="1" if self._fix else "", rest=batch
            )
            self._looked += len(batch)
            self._progress(self._looked)
            for i in range(0, len(answer), 3):
                entry, text, can_be = answer[i : i + 3]
                count += 1
                repairable += can_be == b"1"
                if len(wrong) < EXAMPLES:
                    shown = entry.decode(errors="replace").replace("\0", " / ")
                    wrong.append(f"{shown} {text.decode(errors='replace')}")
        return [_disagreement(name, count, repairable, wrong, self._fix)] if count else []


_USER = re.compile(rb'"user":("(?:[^"\\]|\\.)*")')


def _user_in(record: bytes) -> bytes | None:
    """The user in the text of a status record; None if there is none or it cannot be read."""
    match = _USER.search(record)
    with suppress(ValueError):
        return str(json.loads(match[1])).encode() if match else None
    return None


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        return -1


def _disagreement(name: str, count: int, repairable: int, wrong: list[str], fix: bool) -> Finding:
    done = repairable if fix else 0
    many = plural(count, "entry does", "entries do")
    text = f"{many} not agree, such as: {wrong[0]}"
    if done:
        text = f"{done} of {text}; repaired"
    return Finding(
        check=f"records: {name}",
        level=WARNING if done == count else PROBLEM,
        text=text,
        details={"wrong": count, "repaired": done, "examples": wrong},
        repairable=0 if fix else repairable,
    )


# --- walking through structures -------------------------------------------------------------------


def _batches(entries: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    source = iter(entries)
    while batch := list(islice(source, size)):
        yield batch


def _distinct(entries: Iterable[bytes]) -> Iterator[bytes]:
    seen: set[bytes] = set()
    for entry in entries:
        if entry not in seen:
            seen.add(entry)
            yield entry


def _zscan(link: Link, name: str) -> Iterator[bytes]:
    for flat in _scan(link, "ZSCAN", link.keys[name]):
        yield from flat[::2]


def _hscan(link: Link, name: str) -> Iterator[bytes]:
    """The fields of a hash; without their values where the server can leave them out."""
    key = link.keys[name]
    try:
        yield from (field for flat in _scan(link, "HSCAN", key, "NOVALUES") for field in flat)
    except RedisRefused:  # before Redis 7.4 and Valkey 8
        yield from (field for field, _ in _hscan_pairs(link, key))


def _hscan_pairs(link: Link, key: bytes) -> Iterator[tuple[bytes, bytes]]:
    for flat in _scan(link, "HSCAN", key):
        yield from zip(flat[::2], flat[1::2], strict=True)


def _scan(link: Link, command: str, key: bytes, *more: str) -> Iterator[list[bytes]]:
    """The parts of a structure. Entries that stay are there once at least."""
    cursor: bytes | int = 0
    while True:
        cursor, part = link.ask((command, key, cursor, "COUNT", BATCH, *more))[0]
        yield part
        if int(cursor) == 0:
            return
