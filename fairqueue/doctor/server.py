"""Examine a Redis server: version, persistence, memory, latency, clock and permissions."""

import statistics
import time

import redis

from fairqueue.doctor.findings import OK, PROBLEM, WARNING, Finding
from fairqueue.errors import RedisRefused
from fairqueue.link.acl import needed_commands
from fairqueue.link.connection import Link
from fairqueue.link.info import parse_info
from fairqueue.link.operation import Argument, Ask, Operation
from fairqueue.link.scripts import load_script, script_names
from fairqueue.models import new_id

ROUND_TRIPS = 10  # measured for the latency
SLOW_S = 0.05  # a longer median round trip slows everything down
SKEW_S = 2.0  # clocks that differ by more confuse people; the queue uses the clock of Redis
FULL_SHARE, FULLER_SHARE = 0.8, 0.95  # of maxmemory: Redis refuses new tasks soon, or any time now
_HELLO = ("TIME",)  # not PING, which a server refuses that cannot write to its disk


class ServerChecks:
    """Examines the server that a link leads to."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.max_memory = 0  # bytes; 0 if there is no limit, or before `findings`

    def findings(self) -> Operation[list[Finding]]:
        """Return the findings about the server. Raises RedisUnavailable, RedisRefused."""
        yield Ask(_HELLO)
        info = yield from self._info()
        self.max_memory = int(info.get("maxmemory", 0))
        return [
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
