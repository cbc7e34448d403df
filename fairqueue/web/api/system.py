"""Answer requests about users, workers, numbers, the audit log, keys and settings."""

import time
from weakref import WeakKeyDictionary

from fairqueue.errors import FairQueueError, InvalidInput
from fairqueue.inspection import Inspector
from fairqueue.inspection.documents import document
from fairqueue.web.api import models as m
from fairqueue.web.api.endpoint import ApiRequest, Nothing, Reply
from fairqueue.web.api.errors import Refused, not_found

READY_S = 1.0  # for so long an answer is good: anyone may ask, and Redis must not notice
_readiness: WeakKeyDictionary[Inspector, tuple[float, list[str]]] = WeakKeyDictionary()

# --- users ----------------------------------------------------------------------------------------


def list_users(call: ApiRequest[m.UserQuery, Nothing]) -> Reply:
    """List users and how they fare."""
    return Reply(content=document(call.inspector.users.list(**m.given(call.query))))


def get_user(call: ApiRequest[m.WindowQuery, Nothing]) -> Reply:
    """Say how a user fares."""
    user_id, minutes = call.path["user_id"], call.query.minutes
    return Reply(content=document(call.inspector.users.get(user_id, minutes)))


def change_user(call: ApiRequest[Nothing, m.UserChanges]) -> Reply:
    """Change weight, limits or tenant of a user."""
    changes = m.given(call.body)
    if not changes:
        raise InvalidInput("a change needs at least one field; the body has none")
    return Reply(content=document(call.inspector.users.set(call.path["user_id"], **changes)))


def pause_user(call: ApiRequest[Nothing, m.Pause]) -> Reply:
    """Pause a user: no task of theirs is handed out, until they are resumed or until a moment."""
    note, until = call.body.note, call.body.until
    paused = call.inspector.users.pause(call.path["user_id"], note=note, until=until)
    return Reply(content=document(paused))


def resume_user(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Resume a user."""
    return Reply(content=document(call.inspector.users.resume(call.path["user_id"])))


def purge_user(call: ApiRequest[Nothing, m.DryRunOnly]) -> Reply:
    """Cancel all tasks of a user that wait."""
    dry_run = call.body.dry_run
    count = call.inspector.users.purge(call.path["user_id"], dry_run=dry_run)
    return Reply(content={"dry_run": dry_run, "count": count})


# --- workers --------------------------------------------------------------------------------------


def list_workers(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """List the workers that are alive."""
    return Reply(content={"items": document(call.inspector.workers.list())})


def drain_worker(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Let a worker finish what it has, and take no more."""
    call.inspector.workers.drain(call.path["worker_id"])
    return Reply(content={"worker_id": call.path["worker_id"], "draining": True})


# --- numbers --------------------------------------------------------------------------------------


def get_snapshot(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Count what is in the queue."""
    return Reply(content=document(call.inspector.system.snapshot()))


def get_series(call: ApiRequest[m.SeriesQuery, Nothing]) -> Reply:
    """Tell what the queue did over time."""
    return Reply(content=document(call.inspector.system.series(call.query.window)))


def get_overview(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Tell the state of the queue on one page."""
    return Reply(content=document(call.inspector.system.overview()))


def list_attention(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """List what somebody should look at."""
    return Reply(content={"items": document(call.inspector.system.attention())})


def get_fairness(call: ApiRequest[m.WindowQuery, Nothing]) -> Reply:
    """Say how evenly users are served."""
    return Reply(content=document(call.inspector.users.overview(call.query.minutes)))


def get_shares(call: ApiRequest[m.ShareQuery, Nothing]) -> Reply:
    """Tell who was served over time."""
    return Reply(content=document(call.inspector.users.shares(call.query.minutes, call.query.top)))


def get_redis(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Say how the Redis server is."""
    return Reply(content=document(call.inspector.system.redis()))


# --- audit, keys, settings ------------------------------------------------------------------------


def list_audit(call: ApiRequest[m.AuditQuery, Nothing]) -> Reply:
    """List who did what."""
    return Reply(content=document(call.inspector.audit.list(**m.given(call.query))))


def list_keys(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """List keys, without their secrets."""
    return Reply(content={"items": document(call.inspector.keys.list())})


def create_key(call: ApiRequest[Nothing, m.NewKeyRequest]) -> Reply:
    """Make a key; its secret is told this once."""
    made = call.inspector.keys.create(**m.given(call.body))
    told = document(made)
    # What is kept for a repeated request must not have the secret: Redis has only its hash.
    return Reply(content=told | {"secret": made.secret}, kept=told | {"secret": None})


def revoke_key(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Take a key back."""
    key_id = call.path["key_id"]
    if not call.inspector.keys.revoke(key_id):
        raise Refused(not_found("unknown-key", f"there is no key {key_id!r}"))
    return Reply()


def get_settings(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Read the settings of the queue."""
    return Reply(content=document(call.inspector.system.settings()))


def change_settings(call: ApiRequest[Nothing, m.SettingChanges]) -> Reply:
    """Change settings of the queue."""
    changes = m.given(call.body)
    if not changes:
        raise InvalidInput("a change needs at least one field; the body has none")
    call.inspector.system.configure(**changes)
    return Reply(content=document(call.inspector.system.settings()))


def list_limits(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """List the limits of tasks by name."""
    return Reply(content={"limits": document(call.inspector.system.limits())})


def set_limits(call: ApiRequest[Nothing, m.LimitChanges]) -> Reply:
    """Limit all tasks of a name."""
    call.inspector.system.set_limits(call.path["name"], **m.given(call.body))
    return Reply(content={"limits": document(call.inspector.system.limits())})


# --- without a key --------------------------------------------------------------------------------


def health(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Say that the process answers; Redis is not asked."""
    return Reply(content={"status": "ok"})


def ready(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Say whether the queue can be worked with."""
    now = time.monotonic()
    until, reasons = _readiness.get(call.inspector, (now, []))
    if until <= now:
        try:
            reasons = call.inspector.system.ready()
        except FairQueueError:
            reasons = ["Redis does not answer"]
        _readiness[call.inspector] = (now + READY_S, reasons)
    word = "not ready" if reasons else "ready"
    return Reply(content={"status": word, "reasons": reasons}, status=503 if reasons else 200)
