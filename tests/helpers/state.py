"""The whole state of a queue as plain data, and a check that its parts agree."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import redis
from redis.client import Pipeline

from fairqueue.link.keys import KEY_TYPES, STORED, Keys
from fairqueue.link.owners import Owner
from fairqueue.link.scripts import made_with, parts_of
from fairqueue.queue.queue import TaskQueue
from helpers.waiting import infos

State = dict[str, Any]
# Written by every script to recognise its repetition: no part of what the queue is.
_REPLAY = ("ops", "ops_before")
# Fields that count, which of several partitions are added up; none: all of them.
_COUNTERS: dict[str, tuple[str, ...]] = {"stats": (), "fair": ("seq",)}

# By methods of the client, whose answers are the same with either protocol of Redis.
READS: dict[str, Callable[[Pipeline, bytes], object]] = {
    "hash": lambda pipe, key: pipe.hgetall(key),
    "zset": lambda pipe, key: pipe.zrange(key, 0, -1, withscores=True),
    "list": lambda pipe, key: pipe.lrange(key, 0, -1),
    "string": lambda pipe, key: pipe.get(key),
}


def partitions_of(client: redis.Redis, name: str = "default") -> int:
    """How many partitions a queue has recorded; 1 if it has none, or if a test spoilt the key."""
    text = b""
    with suppress(redis.ResponseError):
        text = cast(bytes | None, client.hget(Keys(name)["fair"], "layout")) or b""
    return int(text.removeprefix(STORED.encode())) if text.startswith(STORED.encode()) else 1


def dump(client: redis.Redis, name: str = "default") -> State:
    """Read everything that a queue stores: key -> content, of all its partitions together.

    Counters are added up. What partitions have alike is that of the first one.
    """
    partitions = partitions_of(client, name)
    state: State = {}
    for number in range(partitions):
        for key, content in dump_partition(client, name, number, partitions).items():
            if isinstance(content, dict):
                merged = content | state.get(key, {})
                if key in _COUNTERS and key in state:
                    for field in _COUNTERS[key] or content:
                        counts = (int(each.get(field, 0)) for each in (content, state[key]))
                        merged[field] = str(sum(counts))
                state[key] = merged
            elif isinstance(content, list):
                state[key] = content + state.get(key, []) if key in KEY_TYPES else content
            else:
                state.setdefault(key, content)
    return state


def dump_partition(client: redis.Redis, name: str, partition: int, partitions: int) -> State:
    """Read everything that one partition of a queue stores: key -> content."""
    keys = Keys(name, partition, partitions)
    stored = cast(list[bytes], client.keys("*"))
    with client.pipeline(transaction=False) as pipe:
        for key in KEY_TYPES:
            pipe.type(keys[key])
        types = pipe.execute()
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
    known = set(Keys(name).all())
    for number in range(partitions):
        known |= set(Keys(name, number, partitions).all())
    strangers = [key for key in stored if key not in known]
    if strangers:
        state["keys that keys.py does not know"] = sorted(strangers)
    return state


def keys_with(queue: TaskQueue, task_id: str) -> Keys:
    """The keys of the partition that has a task, or of the first one if none has it."""
    for part in queue.link.parts:
        if part.ask(("HEXISTS", part.keys["status"], task_id))[0]:
            return part.keys
    return queue.keys


def keys_of(queue: TaskQueue, user_id: str, tenant: str | None = None) -> Keys:
    """The keys of the partition of a user or of a tenant."""
    return queue.part_of(user_id, tenant).keys


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
    partitions = partitions_of(client, name)
    places = [Keys(name, number, partitions)["status"] for number in range(partitions)]
    text = next(each for place in places if (each := cast(bytes, client.hget(place, task_id))))
    found: dict[str, Any] = json.loads(text)
    return found


def stats(client: redis.Redis, name: str = "default") -> dict[str, int]:
    """Read the counters of a queue; `pushed` is the last rank."""
    state = dump(client, name)
    counted = {field: int(value) for field, value in state.get("stats", {}).items()}
    return {"pushed": int(state.get("fair", {}).get("seq", 0)), **counted}


def owner_of(record: dict[str, Any]) -> str:
    """The user of a status record, or the user of its tenant."""
    return Owner(record["user"], record.get("group")).key


def seat_of(record: dict[str, Any]) -> str:
    """The owner of a status record in its pool."""
    return owner_of(record) + (f"\x03{record['pool']}" if "pool" in record else "")


def tenant_of(seat: str) -> str | None:
    """The seat of the tenant that a seat belongs to; the tenant of an owner."""
    if not seat.startswith("\x02") or "\x02" not in seat[1:]:
        return None
    tenant, _, rest = seat[1:].partition("\x02")
    _, mark, pool = rest.partition("\x03")
    return Owner.whole(tenant).key + mark + pool


def label_of(record: dict[str, Any]) -> str:
    """What a claim has to know of a task: its name, keys, cost and expiry."""
    flow = record.get("flow", {})
    label = "".join([record["name"], *(f"\x03{key}" for key in flow.get("keys", []))])
    label += f"\x04{flow['cost']:.17g}" if "cost" in flow else ""
    return label + (f"\x05{record['expires']:.0f}" if "expires" in record else "")


def check_consistency(
    client: redis.Redis,
    name: str = "default",
    *,
    is_old: bool = False,
    partitions: int | None = None,
) -> None:
    """Compare every count and index of a queue with what can be computed from the others.

    is_old: an older version has written it, which made no index of delayed tasks by user.
    """
    partitions = partitions or partitions_of(client, name)
    for partition in range(partitions):
        _check_partition(dump_partition(client, name, partition, partitions), is_old=is_old)


def _check_partition(state: State, *, is_old: bool) -> None:
    assert "keys that keys.py does not know" not in state, state
    status = state.get("status", {})
    assert status.keys() == state.get("tasks", {}).keys()
    by_state = defaultdict(set)
    for task_id, record in status.items():
        by_state[record["state"]].add(task_id)
    backlog = [member.split("\0") for member in state.get("backlog", {})]
    held = [member.split("\0") for member in state.get("held", {})]
    in_backlog, in_held = {task_id for _, _, task_id, _ in backlog}, {each[3] for each in held}
    assert len(backlog) == len(in_backlog)
    assert len(held) == len(in_held)
    assert in_backlog | in_held == by_state["ready"]
    assert not in_backlog & in_held
    assert state.get("waiting", {}).keys() == by_state["ready"]
    assert state.get("delayed", {}).keys() == by_state["delayed"]
    by_user = {
        f"{owner_of(status[task_id])}\0{due:015.0f}\0{task_id}"
        for task_id, due in state.get("delayed", {}).items()
    }
    indexed = state.get("delayed_index", {}).keys()
    assert indexed <= by_user if is_old else indexed == by_user
    moments = state.get("delayed_users", {}).keys() | _tags(state, "d").keys()
    owners = {member.split("\0")[0] for member in indexed}
    assert is_old or owners | {tenant for o in owners if (tenant := tenant_of(o))} <= moments
    assert state.get("leases", {}).keys() == by_state["running"]
    ended = by_state["finished"] | by_state["cancelled"] | by_state["expired"]
    assert state.get("ended", {}).keys() == ended
    assert state.get("dead", {}).keys() == by_state["buried"]
    for seat, rank, task_id, label in backlog:
        record = status[task_id]
        assert (seat_of(record), record["rank"], label_of(record)) == (seat, rank, label)
    for seat, gate, rank, task_id, *label in held:
        record = status[task_id]
        assert (seat_of(record), record["rank"]) == (seat, rank)
        assert label_of(record) == (label[0] if label else gate)
    owners_of_runs = [owner_of(status[task_id]) for task_id in by_state["running"]]
    running = Counter([*owners_of_runs, *filter(None, map(tenant_of, owners_of_runs))])
    assert {u: int(n) for u, n in state.get("running", {}).items()} == dict(running)
    _check_seats(state, backlog)
    _check_rings(state)
    _check_tenants(state)
    _check_limits(state, by_state["running"], held)
    _check_flow(state, by_state["ready"], by_state["delayed"])
    _check_history(state, ended | by_state["buried"])
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
    """Slots and deadlines belong to leases, and each seat with held tasks has a turn."""
    status = state.get("status", {})
    slots = {f"{status[i]['name']}\0{i}" for i in running if status[i].get("slot")}
    slots |= {f"{gate}\0{i}" for i in running for gate in status[i].get("slots", [])}
    assert state.get("slots", {}).keys() == slots
    late = {i for i in running if status[i].get("deadline") and not status[i].get("stale")}
    assert state.get("deadlines", {}).keys() == late
    line = state.get("slot_line", {})
    turns = [tuple(member.split("\0")) for member in line if not member.startswith("\1")]
    marks = {tuple(member[1:].split("\0")) for member in line if member.startswith("\1")}
    assert sorted((gate, seat) for gate, _, seat in turns) == sorted(marks)
    for seat, gate, *_ in held:
        tenant = tenant_of(seat)
        assert (gate if tenant is None else f"{gate}\x06{tenant}", seat) in marks
        assert tenant is None or (gate, tenant) in marks
    assert held or not line
    waiting = {i for i, record in status.items() if record["state"] in ("ready", "delayed")}
    for member in state.get("gate_order", {}):
        gate, _, task_id, *_ = member[1:].split("\0")
        assert task_id in waiting, member
        assert gate in _gates_of(status[task_id]), member
    assert state.get("gate_passes", {}).keys() <= waiting


def _gates_of(record: dict[str, Any]) -> set[str]:
    """The limits that a task can have: of its name, and of its keys with each scope."""
    keys = [f"\x03{key}" for key in record.get("flow", {}).get("keys", [])]
    whose = tenant_of(owner_of(record)) or owner_of(record)
    return {record["name"], *keys, *(f"{key}\x02{whose}" for key in keys)}


def _check_flow(state: State, ready: set[str], delayed: set[str]) -> None:
    """Pools, unique keys and expiries have the tasks that the records name, and no others."""
    status = state.get("status", {})
    since = state.get("waiting", {})
    in_pools = {
        f"{status[i]['pool']}\0{since[i]:015.0f}\0{i}" for i in ready if "pool" in status[i]
    }
    assert state.get("pool_tasks", {}).keys() == in_pools
    pools = set(state.get("fair", {}).get("pools", "").split("\n"))
    assert {status[i]["pool"] for i in ready if "pool" in status[i]} <= pools
    expiring = {member: at for member, at in state.get("expiring", {}).items() if member[0] != "\1"}
    assert expiring == {i: status[i]["expires"] for i in ready | delayed if "expires" in status[i]}
    holders = {field: content.split("\0") for field, content in state.get("uniques", {}).items()}
    at_work = set[str]()
    for task_id, record in status.items():
        flow = record.get("flow", {})
        scope = flow.get("unique_for", "unfinished")
        has_key = record["state"] in ("ready", "delayed", "running")
        if "unique" not in flow or not has_key:
            continue
        if scope == "unfinished":
            whose = tenant_of(owner_of(record)) or owner_of(record)
            field = f"{whose}\0{flow['unique']}"
            holder = holders.get(field, [])
            # A push takes the key of a task that has expired, before a claim ends that one.
            is_over = record.get("expires", math.inf) <= max(r["pushed"] for r in status.values())
            assert is_over or task_id in (*holder[:1], *holder[4:5])
            if record["state"] == "running":
                assert field not in at_work, "two tasks with a unique key run"
                at_work.add(field)
    windows = {member[1:] for member in state.get("expiring", {}) if member[0] == "\1"}
    with_end = {field for field, holder in holders.items() if holder[2]}
    assert windows == with_end


def _tags(state: State, kind: str) -> dict[str, str]:
    """The tags of seats in rings, of one kind."""
    return {f[1:]: tag for f, tag in state.get("tags", {}).items() if f.startswith(kind)}


def _check_rings(state: State) -> None:
    """Each seat of a ring has one tag, and a tenant waits while one of its users does."""
    members = {tuple(member.split("\0")) for member in state.get("rings", {})}
    tags = {(field[0], field[1:], tag) for field, tag in state.get("tags", {}).items()}
    assert {(ring[0], seat, tag) for ring, tag, seat in members} == tags
    for ring, _, seat in members:
        pool = "\x03" + seat.partition("\x03")[2] if "\x03" in seat else ""
        assert ring[1:] == (tenant_of(seat) or pool)
    ready = state.get("ready", {}).keys() | _tags(state, "r").keys()
    parked = state.get("parked", {}).keys()
    tenants = {tenant for seat in _tags(state, "r") if (tenant := tenant_of(seat))}
    is_tenant = [s for s in ready | parked if s[0] == "\x02" and tenant_of(s) is None]
    assert set(is_tenant) == tenants
    critical = state.get("critical", {}).keys() | _tags(state, "c").keys()
    first = {tenant for seat in _tags(state, "c") if (tenant := tenant_of(seat))}
    assert {t for t in critical if t in tenants} == {t for t in first if t in ready}
    # The clocks of a tenant go when its seats have gone.
    idle = state.get("idle", {}).keys() | _tags(state, "i").keys()
    for ring in state.get("clocks", {}):
        assert not ring.startswith("\x02") or ring in ready | parked | idle, ring


OUTCOMES = {"finished": "s", "cancelled": "c", "expired": "e", "buried": "f"}


def _check_history(state: State, ended: set[str]) -> None:
    """Each ended run is listed in all its places and each unfinished one of a schedule is open."""
    status = state.get("status", {})
    places, prints = set(), set()
    for task_id in ended:
        record = status[task_id]
        timed_out = record["state"] == "buried" and record.get("timed_out")
        outcome = "t" if timed_out else OUTCOMES[record["state"]]
        tail = f"\0{record['ended']:013d}{outcome}{task_id}"
        never_ran = outcome == "e" or (outcome == "c" and "claimed" not in record)
        values = ["od" if never_ran and outcome == "c" else "o" + outcome]
        values += [("d" if never_ran else "u") + owner_of(record)]
        if "group" in record:
            values += ["p" + record["user"], *([] if never_ran else ["g" + record["group"]])]
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


def _check_seats(state: State, backlog: list[list[str]]) -> None:
    """Each seat with waiting tasks is in exactly one of ready and parked, others in neither."""
    ready = state.get("ready", {}).keys() | _tags(state, "r").keys()
    parked = state.get("parked", {}).keys()
    assert not ready & parked
    tenants = {s for s in ready | parked if s[0] == "\x02" and tenant_of(s) is None}
    assert (ready | parked) - tenants == {seat for seat, *_ in backlog}
    assert not ready & (state.get("idle", {}).keys() | _tags(state, "i").keys())
    heads: dict[str, str] = {}
    for seat, rank, *_ in backlog:  # in the order of the index
        heads.setdefault(seat, rank)
    critical = {seat for seat in ready - tenants if heads[seat].startswith("0")}
    in_lane = state.get("critical", {}).keys() | _tags(state, "c").keys()
    assert in_lane - tenants == critical


def _check_tenants(state: State) -> None:
    """The two lists of tenants and users agree, and those with settings are listed."""
    turned = {"\0".join(reversed(m.split("\0"))) for m in state.get("user_tenants", {})}
    of_old = {f"{tenant}\0{user}" for user, tenant in state.get("tenants", {}).items()}
    assert turned <= state.get("tenant_users", {}).keys() <= turned | of_old
    assert state.get("user_names", {}).keys() == state.get("users", {}).keys()


def spoil(client: redis.Redis, queue: TaskQueue, key: str) -> None:
    """Put a value of another type where a key of the queue should be."""
    client.delete(queue.keys[key])
    if KEY_TYPES[key] == "string":
        client.rpush(queue.keys[key], "item")
    else:
        client.set(queue.keys[key], "text")


def only_lazy_keys(script: str) -> set[str]:
    """The keys of a script that only its lazy parts use: most calls do not touch them."""
    parts = parts_of(script)
    own = {part.name for parts in made_with(parts).values() for part in parts}
    always = {key for p in parts if not p.is_lazy and p.name not in own for key in p.keys}
    return {key for part in parts for key in part.keys} - always


def count_commands(client: redis.Redis) -> Counter[str]:
    """Count the calls of each command on this server, including those of scripts."""
    found: Counter[str] = Counter()
    for info in infos(client, "commandstats"):
        for name, row in info.items():
            found[name.removeprefix("cmdstat_")] += row["calls"]
    return found


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
