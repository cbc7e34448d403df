"""The names of a queue's Redis keys: a fixed set under one hash tag, for each partition.

No other code makes up names of keys, and scripts declare all keys that they use. So a queue works
in a cluster, and can be inspected, measured and deleted as a whole.
"""

import binascii
import itertools
import re
from functools import lru_cache

from fairqueue.errors import ConfigurationError, shown

# name -> Redis type; docs/data-model.md describes the content of each key.
KEY_TYPES = {
    # tasks
    "tasks": "hash",
    "status": "hash",
    "backlog": "zset",
    "waiting": "zset",
    "delayed": "zset",
    "delayed_index": "zset",
    "delayed_users": "zset",
    "leases": "zset",
    "ended": "zset",
    "dead": "zset",
    "wake": "list",
    # workers that take only some names; see lua/lib/kinds.lua
    "kinds": "hash",
    **{f"wake_{place}": "list" for place in range(1, 9)},
    # limits of handlers, and the workers that run them
    "limits": "hash",
    "slots": "zset",
    "held": "zset",
    "slot_line": "zset",
    "paced": "hash",
    "gate_times": "zset",
    "gate_order": "zset",
    "gate_passes": "hash",
    "permits": "hash",
    "deadlines": "zset",
    "workers": "hash",
    "worker_ends": "zset",
    # history
    "attempts": "hash",
    "runs": "zset",
    "failures": "zset",
    "notices": "zset",
    # unique keys and expiry
    "uniques": "hash",
    "expiring": "zset",
    # fairness between users and tenants
    "fair": "hash",
    "ready": "zset",
    "critical": "zset",
    "parked": "zset",
    "idle": "zset",
    "running": "hash",
    "users": "hash",
    "user_names": "zset",
    "tenants": "hash",
    "tenant_users": "zset",
    "user_tenants": "zset",
    "rings": "zset",
    "tags": "hash",
    "clocks": "hash",
    "pool_tasks": "zset",
    "throttle": "hash",
    "averages": "hash",
    "usage": "hash",  # of versions before layout 2; see BARRIER
    "served": "hash",
    "served_before": "hash",
    # schedules
    "schedules": "hash",
    "plan": "hash",
    "due": "zset",
    "schedule_state": "hash",
    "schedule_index": "zset",
    "broken": "hash",
    "open": "zset",
    "moments": "zset",
    "changes": "zset",
    "schedule_names": "zset",
    "tenant_schedules": "zset",
    "moving": "hash",
    "leader": "string",
    "epoch": "string",
    "scheduler_wake": "list",
    "schedulers": "hash",
    # access and audit
    "credentials": "hash",
    "credential_ends": "zset",
    "api_keys": "zset",
    "sessions": "zset",
    "api_pace": "hash",
    "replies": "hash",
    "replies_before": "hash",
    "audit": "zset",
    # the queue as a whole
    "settings": "hash",
    "stats": "hash",
    "samples": "zset",
    "ops": "hash",
    "ops_before": "hash",
    # records that move to another queue; see lua/lib/repartition.lua
    "repartition": "hash",
}

# With layout 2 this key is a text, so that versions without layout numbers, which check nothing but
# types, refuse the queue: lua/lib/barrier.lua.
BARRIER = "usage"

DEFAULT_QUEUE = "default"
SLOTS = 16_384  # of a cluster
MOST_PARTITIONS = 256
# Before the number, in the layout of a queue that has partitions; see begin_partitions.lua.
STORED = "partitions="

_QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Keys:
    """The keys of one queue, or of one partition of it, by name."""

    def __init__(self, queue: str, partition: int = 0, partitions: int = 1) -> None:
        if not isinstance(queue, str) or not _QUEUE_NAME.fullmatch(queue):
            raise ConfigurationError(
                f"queue name must have 1 to 64 letters, digits, '_', '.' or '-', not {shown(queue)}"
            )
        self.queue = queue
        self.partition = partition
        tag = (
            queue
            if partitions == 1
            else f"{queue}:{partition}.{_salt(queue, partition, partitions)}"
        )
        self.prefix = f"{{fairqueue:{tag}}}:"
        self._names = {name: (self.prefix + name).encode() for name in KEY_TYPES}

    def __getitem__(self, name: str) -> bytes:
        return self._names[name]

    @property
    def slot(self) -> int:
        """The slot of a cluster that has all these keys."""
        return slot_of(self.prefix[1 : self.prefix.index("}")])

    def all(self) -> list[bytes]:
        """Return every key that the queue or the partition may have."""
        return list(self._names.values())


def slot_of(tag: str) -> int:
    """The slot of a cluster for keys with this hash tag."""
    return binascii.crc_hqx(tag.encode(), 0) % SLOTS


def slot_of_key(key: bytes) -> int:
    """The slot of a key that `Keys` has made, which has a hash tag."""
    return slot_of(key[1 : key.index(b"}")].decode())


@lru_cache(maxsize=4096)
def _salt(queue: str, partition: int, partitions: int) -> int:
    """The first number that puts a partition into its part of the slots: 1/n of them each.

    So partitions spread over nodes as evenly as slots do. Takes some n attempts of 0.5 µs.
    """
    first, end = partition * SLOTS // partitions, (partition + 1) * SLOTS // partitions
    salts = itertools.count()
    return next(i for i in salts if first <= slot_of(f"fairqueue:{queue}:{partition}.{i}") < end)


def command_line(line: str, queue: str) -> str:
    """Add the option for a queue to a command line that begins with `fairqueue`."""
    if queue == DEFAULT_QUEUE:
        return line
    program, _, rest = line.partition(" ")
    # With "=", a name that begins with "-" is not taken for an option.
    option = f"--queue={queue}" if queue.startswith("-") else f"--queue {queue}"
    return f"{program} {option} {rest}"
