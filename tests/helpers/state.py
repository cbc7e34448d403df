"""The whole state of a queue as plain data, and a check that its parts agree."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import redis
from redis.client import Pipeline

from fairqueue.link.keys import KEY_TYPES, Keys
from fairqueue.queue.queue import TaskQueue

State = dict[str, Any]
# Written by every script to recognise its repetition: no part of what the queue is.
_REPLAY = ("ops", "ops_before")

# By methods of the client, whose answers are the same with either protocol of Redis.
READS: dict[str, Callable[[Pipeline, bytes], object]] = {
    "hash": lambda pipe, key: pipe.hgetall(key),
    "zset": lambda pipe, key: pipe.zrange(key, 0, -1, withscores=True),
    "list": lambda pipe, key: pipe.lrange(key, 0, -1),
    "string": lambda pipe, key: pipe.get(key),
}


def dump(client: redis.Redis, name: str = "default") -> State:
    """Read everything that a queue stores: key -> content, without absent keys."""
    keys = Keys(name)
    with client.pipeline(transaction=False) as pipe:
        pipe.keys("*")
        for key in KEY_TYPES:
            pipe.type(keys[key])
        stored, *types = pipe.execute()
        kinds = {
            key: kind.decode()
            for key, kind in zip(KEY_TYPES, types, strict=True)
            if kind != b"none"
        }
        for key, kind in kinds.items():
            READS[kind](pipe, keys[key])
        contents = pipe.execute()
    state: State = {}
    for (key, kind), content in zip(kinds.items(), contents, strict=True):
        state[key] = _content(kind, content)
    known = set(keys.all())
    strangers = [key for key in stored if key not in known]
    if strangers:
        state["keys that keys.py does not know"] = sorted(strangers)
    return state


def _content(kind: str, content: Any) -> Any:
    if kind == "hash":
        return {field.decode(): _value(value) for field, value in content.items()}
    if kind == "zset":
        return {member.decode(): float(score) for member, score in content}
    if kind == "list":
        return [item.decode() for item in content]
    return content.decode()


def _value(value: bytes) -> Any:
    """JSON objects as dicts: Lua writes their fields in any order."""
    text = value.decode("utf-8", "replace")
    if text.startswith("{"):
        with suppress(ValueError):
            return json.loads(text)
    return text


def changes(before: State, after: State) -> dict[str, Any]:
    """Compare two states: `key.field` -> (before, after)."""
    found: dict[str, Any] = {}
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if isinstance(old or new, dict) and isinstance(new or old, dict):
            old, new = old or {}, new or {}
            for field in sorted(old.keys() | new.keys()):
                if old.get(field) != new.get(field):
                    found[f"{key}.{field}"] = (old.get(field), new.get(field))
        else:
            found[key] = (old, new)
    return found


def places(client: redis.Redis, name: str = "default") -> dict[str, list[str]]:
    """Read where each task is: state -> sorted task ids."""
    found = defaultdict(list)
    for task_id, record in dump(client, name).get("status", {}).items():
        found[record["state"]].append(task_id)
    return {state: sorted(ids) for state, ids in found.items()}


def status_of(client: redis.Redis, task_id: str, name: str = "default") -> dict[str, Any]:
    """Read the status record of a task."""
    text = cast(bytes, client.hget(Keys(name)["status"], task_id))
    found: dict[str, Any] = json.loads(text)
    return found


def stats(client: redis.Redis, name: str = "default") -> dict[str, int]:
    """Read the counters of a queue; `pushed` is the last rank."""
    state = dump(client, name)
    counted = {field: int(value) for field, value in state.get("stats", {}).items()}
    return {"pushed": int(state.get("fair", {}).get("seq", 0)), **counted}


def check_consistency(client: redis.Redis, name: str = "default", *, is_old: bool = False) -> None:
    """Compare every count and index of a queue with what can be computed from the others.

    is_old: an older version has written it, which made no index of delayed tasks by user.
    """
    state = dump(client, name)
    assert "keys that keys.py does not know" not in state, state
    status = state.get("status", {})
    assert status.keys() == state.get("tasks", {}).keys()
    by_state = defaultdict(set)
    for task_id, record in status.items():
        by_state[record["state"]].add(task_id)
    backlog = [member.split("\0") for member in state.get("backlog", {})]
    held = [member.split("\0") for member in state.get("held", {})]
    in_backlog, in_held = {task_id for _, _, task_id, _ in backlog}, {each[3] for each in held}
    assert in_backlog | in_held == by_state["ready"]
    assert not in_backlog & in_held
    assert state.get("waiting", {}).keys() == by_state["ready"]
    assert state.get("delayed", {}).keys() == by_state["delayed"]
    by_user = {
        f"{status[task_id]['user']}\0{due:015.0f}\0{task_id}"
        for task_id, due in state.get("delayed", {}).items()
    }
    indexed = state.get("delayed_index", {}).keys()
    assert indexed <= by_user if is_old else indexed == by_user
    moments = state.get("delayed_users", {}).keys()
    assert is_old or {member.split("\0")[0] for member in indexed} <= moments
    assert state.get("leases", {}).keys() == by_state["running"]
    assert state.get("ended", {}).keys() == by_state["finished"] | by_state["cancelled"]
    assert state.get("dead", {}).keys() == by_state["buried"]
    for user, rank, task_id, name in backlog:
        record = status[task_id]
        assert (record["user"], record["rank"], record["name"]) == (user, rank, name)
    for user, name, rank, task_id in held:
        record = status[task_id]
        assert (record["user"], record["rank"], record["name"]) == (user, rank, name)
    running = Counter(status[task_id]["user"] for task_id in by_state["running"])
    assert {u: int(n) for u, n in state.get("running", {}).items()} == dict(running)
    _check_users(state, backlog)
    _check_tenants(state)
    _check_limits(state, by_state["running"], held)
    _check_history(state, by_state["finished"] | by_state["cancelled"] | by_state["buried"])
    _check_schedules(state)


def _check_schedules(state: State) -> None:
    """Check the indexes of schedules by name and tenant, and that notes belong to schedules.

    The name of one whose definition somebody has spoilt stays where it was, and so does its tenant.
    """
    definitions = {
        schedule: definition if isinstance(definition, dict) else {}
        for schedule, definition in state.get("schedules", {}).items()
    }
    names = {
        member
        for member in state.get("schedule_names", {})
        if definitions.get(member.partition("\0")[2], {}).get("name")
    }
    named = {
        f"{definition['name']}\0{schedule}"
        for schedule, definition in definitions.items()
        if definition.get("name")
    }
    assert names == named
    of_tenants = {
        member
        for member in state.get("tenant_schedules", {})
        if definitions.get(member.rpartition("\0")[2], {}).get("user_id")
    }
    assert of_tenants == {
        f"{definition['tenant']}\0{definition['user_id']}\0{schedule}"
        for schedule, definition in definitions.items()
        if definition.get("tenant")
    }
    known = definitions.keys() | state.get("broken", {}).keys()
    for key in ("moments", "changes"):
        assert {member.partition("\0")[0] for member in state.get(key, {})} <= known
    waiting = state.get("due", {}).keys()
    for schedule, record in state.get("schedule_state", {}).items():
        if isinstance(record, dict) and record.get("until") and not record.get("active"):
            assert schedule in waiting


def _check_limits(state: State, running: set[str], held: list[list[str]]) -> None:
    """Slots and deadlines belong to leases, and each user with held tasks has a turn."""
    status = state.get("status", {})
    slots = {f"{status[i]['name']}\0{i}" for i in running if status[i].get("slot")}
    assert state.get("slots", {}).keys() == slots
    late = {i for i in running if status[i].get("deadline") and not status[i].get("stale")}
    assert state.get("deadlines", {}).keys() == late
    line = state.get("slot_line", {})
    turns = [tuple(member.split("\0")) for member in line if not member.startswith("\1")]
    marks = {tuple(member[1:].split("\0")) for member in line if member.startswith("\1")}
    assert sorted((name, user) for name, _, user in turns) == sorted(marks)
    assert {(name, user) for user, name, _, _ in held} <= marks
    assert held or not line


OUTCOMES = {"finished": "s", "cancelled": "c", "buried": "f"}


def _check_history(state: State, ended: set[str]) -> None:
    """Each ended run is listed in all its places and each unfinished one of a schedule is open."""
    status = state.get("status", {})
    places, prints = set(), set()
    for task_id in ended:
        record = status[task_id]
        timed_out = record["state"] == "buried" and record.get("timed_out")
        outcome = "t" if timed_out else OUTCOMES[record["state"]]
        tail = f"\0{record['ended']:013d}{outcome}{task_id}"
        never_ran = outcome == "c" and "claimed" not in record
        values = (
            ["od", "d" + record["user"]] if never_ran else ["o" + outcome, "u" + record["user"]]
        )
        values += ["n" + record["name"]]
        values += ["c" + record["schedule"]] if "schedule" in record else []
        values += ["f" + record["fingerprint"]] if "fingerprint" in record else []
        values += ["t" + record["tenant"]] if "tenant" in record else []
        prints |= {record["fingerprint"]} if "fingerprint" in record else set()
        places |= {value + tail for value in values}
    assert state.get("runs", {}).keys() == places
    assert state.get("failures", {}).keys() == prints
    assert state.get("attempts", {}).keys() <= status.keys()
    unfinished = {
        f"{record['schedule']}\0{task_id}"
        for task_id, record in status.items()
        if "schedule" in record and task_id not in ended
    }
    assert state.get("open", {}).keys() == unfinished


def _check_users(state: State, backlog: list[list[str]]) -> None:
    """Each user with waiting tasks is in exactly one of ready and parked, others in neither."""
    ready, parked = state.get("ready", {}).keys(), state.get("parked", {}).keys()
    assert not ready & parked
    assert ready | parked == {user for user, *_ in backlog}
    assert not ready & state.get("idle", {}).keys()
    heads: dict[str, str] = {}
    for user, rank, *_ in backlog:  # in the order of the index
        heads.setdefault(user, rank)
    critical = {user for user in ready if heads[user].startswith("0")}
    assert state.get("critical", {}).keys() == critical


def _check_tenants(state: State) -> None:
    """Tenants have the users that belong to them, and users with settings are listed."""
    tenants = {f"{tenant}\0{user}" for user, tenant in state.get("tenants", {}).items()}
    assert state.get("tenant_users", {}).keys() == tenants
    assert state.get("user_names", {}).keys() == state.get("users", {}).keys()


def spoil(client: redis.Redis, queue: TaskQueue, key: str) -> None:
    """Put a value of another type where a key of the queue should be."""
    client.delete(queue.keys[key])
    if KEY_TYPES[key] == "string":
        client.rpush(queue.keys[key], "item")
    else:
        client.set(queue.keys[key], "text")


def count_commands(client: redis.Redis) -> Counter[str]:
    """Count the calls of each command on this server, including those of scripts."""
    info = cast(dict[str, dict[str, int]], client.info("commandstats"))
    return Counter({name.removeprefix("cmdstat_"): row["calls"] for name, row in info.items()})


def jain(amounts: list[float]) -> float:
    """Jain's fairness index: 1 if all amounts are equal, 1/n if one has everything."""
    return sum(amounts) ** 2 / (len(amounts) * sum(x * x for x in amounts))


def state_of(client: redis.Redis, name: str = "default", *, replay: bool = False) -> State:
    """Read everything stored; with `replay`, also the answers kept for repeated calls."""
    state = {key: text for key, text in dump(client, name).items() if replay or key not in _REPLAY}
    if isinstance(state.get("leader"), str):
        with suppress(ValueError):
            state["leader"] = json.loads(state["leader"])
    return state
