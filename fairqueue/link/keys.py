"""The names of a queue's Redis keys: a fixed set under one hash tag.

No other code makes up names of keys, and scripts declare all keys that they use. So a queue works
in a cluster, and can be inspected, measured and deleted as a whole.
"""

import re

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
    "leader": "string",
    "epoch": "string",
    "scheduler_wake": "list",
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
}

# With layout 2 this key is a text, so that versions without layout numbers, which check nothing but
# types, refuse the queue: lua/lib/barrier.lua.
BARRIER = "usage"

DEFAULT_QUEUE = "default"

_QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Keys:
    """The keys of one queue, by name."""

    def __init__(self, queue: str) -> None:
        if not isinstance(queue, str) or not _QUEUE_NAME.fullmatch(queue):
            raise ConfigurationError(
                f"queue name must have 1 to 64 letters, digits, '_', '.' or '-', not {shown(queue)}"
            )
        self.queue = queue
        self.prefix = f"{{fairqueue:{queue}}}:"
        self._names = {name: (self.prefix + name).encode() for name in KEY_TYPES}

    def __getitem__(self, name: str) -> bytes:
        return self._names[name]

    def all(self) -> list[bytes]:
        """Return every key that the queue may have."""
        return list(self._names.values())


def command_line(line: str, queue: str) -> str:
    """Add the option for a queue to a command line that begins with `fairqueue`."""
    if queue == DEFAULT_QUEUE:
        return line
    program, _, rest = line.partition(" ")
    # With "=", a name that begins with "-" is not taken for an option.
    option = f"--queue={queue}" if queue.startswith("-") else f"--queue {queue}"
    return f"{program} {option} {rest}"
