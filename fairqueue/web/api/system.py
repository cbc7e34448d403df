"""Answer requests about workers, pools, statistics, the audit log, API keys and settings."""

from typing import Any

from fairqueue.errors import truncate
from fairqueue.inspection.documents import document
from fairqueue.web.api import models as m
from fairqueue.web.api.endpoint import ApiRequest, Nothing, Reply
from fairqueue.web.api.errors import refuse
from fairqueue.web.api.sharers import changes_of
from fairqueue.web.app_state import readiness
from fairqueue.web.problems import MAX_PART

# --- workers --------------------------------------------------------------------------------------


def list_workers(call: ApiRequest[Nothing, Nothing]) -> Any:
    """List the live workers."""
    return call.inspector.workers.list()


def drain_worker(call: ApiRequest[Nothing, Nothing]) -> Any:
    """Let a worker finish its tasks, take no more, and exit."""
    call.inspector.workers.drain(call.id)
    return {"worker_id": call.id, "draining": True}


def list_pools(call: ApiRequest[Nothing, Nothing]) -> Any:
    """List the pools, with their waiting tasks and their workers."""
    return call.inspector.system.pools()


def list_partitions(call: ApiRequest[m.PartitionQuery, Nothing]) -> Any:
    """Get the partitions with their nodes, backlogs, leaders and load, and what to do."""
    return call.inspector.partitions.read(memory=call.query.memory)


# --- statistics -----------------------------------------------------------------------------------


def get_snapshot(call: ApiRequest[Nothing, Nothing]) -> Any:
    """Get the counts of the queue."""
    return call.inspector.system.snapshot()


def get_series(call: ApiRequest[m.SeriesQuery, Nothing]) -> Any:
    """Get samples of the queue over time."""
    return call.inspector.system.series(**call.arguments)


def get_overview(call: ApiRequest[Nothing, Nothing]) -> Any:
    """Get the state of the queue."""
    return call.inspector.system.overview()


def list_attention(call: ApiRequest[Nothing, Nothing]) -> Any:
    """List what needs attention."""
    return call.inspector.system.attention()


def get_redis(call: ApiRequest[Nothing, Nothing]) -> Any:
    """Get the state of the Redis server."""
    return call.inspector.system.redis()


# --- audit, keys, settings ------------------------------------------------------------------------


def list_audit(call: ApiRequest[m.AuditQuery, Nothing]) -> Any:
    """List the entries of the audit log."""
    return call.inspector.audit.list(**call.arguments)


def list_keys(call: ApiRequest[Nothing, Nothing]) -> Any:
    """List keys, without their secrets."""
    return call.inspector.keys.list()


def create_key(call: ApiRequest[Nothing, m.NewKeyRequest]) -> Reply:
    """Create a key; its secret is returned once."""
    key = call.inspector.keys.create(**call.arguments)
    content = document(key)
    # The response is stored for repeated requests, but Redis must have only the secret's hash.
    return Reply(content=content | {"secret": key.secret}, kept=content | {"secret": None})


def revoke_key(call: ApiRequest[Nothing, Nothing]) -> None:
    """Revoke a key."""
    if not call.inspector.keys.revoke(call.id):
        raise refuse(404, "unknown-key", f"there is no key {call.id!r}")


def get_settings(call: ApiRequest[Any, Any]) -> Any:
    """Get the settings of the queue."""
    return call.inspector.system.settings()


def change_settings(call: ApiRequest[Nothing, m.SettingChanges]) -> Any:
    """Change settings of the queue."""
    call.inspector.system.configure(**changes_of(call))
    return get_settings(call)


def list_limits(call: ApiRequest[Any, Any]) -> Any:
    """List the limits by task name."""
    return {"limits": call.inspector.system.limits()}


def set_limits(call: ApiRequest[Nothing, m.LimitChanges]) -> Any:
    """Set the limits of a task name."""
    call.inspector.system.set_limits(call.id, **call.arguments)
    return list_limits(call)


def list_key_limits(call: ApiRequest[Any, Any]) -> Any:
    """List the limits by key and pattern."""
    return {"limits": call.inspector.system.key_limits()}


def set_key_limit(call: ApiRequest[Nothing, m.KeyLimitChanges]) -> Any:
    """Set the limits of a key, or of all keys of a pattern."""
    call.inspector.system.set_limit(call.id, **call.arguments)
    return list_key_limits(call)


def remove_key_limit(call: ApiRequest[Nothing, Nothing]) -> None:
    """Remove the limits of a key or a pattern."""
    if not call.inspector.system.remove_limit(call.id):
        raise refuse(404, "unknown-limit", f"there is no limit of {truncate(call.id, MAX_PART)!r}")


# --- without a key --------------------------------------------------------------------------------


def health(call: ApiRequest[Nothing, Nothing]) -> Any:
    """Check that the process responds; Redis is not asked."""
    return {"status": "ok"}


def ready(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Check whether the queue can be used."""
    reasons = readiness(call.state)
    word = "not ready" if reasons else "ready"
    return Reply(content={"status": word, "reasons": reasons}, status=503 if reasons else 200)
