"""Parse stored records: the status of a task, settings of a user, limits of a handler."""

import json
from dataclasses import replace
from datetime import datetime
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.errors import (
    BrokenRecord,
)
from fairqueue.flow_options import read_flow
from fairqueue.models import (
    UNREADABLE,
    HandlerLimits,
    KeyLimits,
    Task,
    TaskInfo,
    UserSettings,
)
from fairqueue.validation import (
    Priority,
)


def handler_limits(text: bytes) -> HandlerLimits:
    """Parse the limits of a handler; no limits if they are unreadable."""
    try:
        stored = json.loads(text)
        timeout_ms = stored.get("timeout_ms")
        slots, rate = stored.get("slots"), stored.get("rate")
        return HandlerLimits(
            slots=None if slots is None else int(slots),
            rate=None if rate is None else float(rate),
            timeout=None if timeout_ms is None else timeout_ms / 1000,
        )
    except UNREADABLE:
        return HandlerLimits()


def key_limits(text: bytes) -> KeyLimits:
    """Parse the limits of a key; no limits if they are unreadable."""
    try:
        stored = json.loads(text)
        slots, rate = stored.get("slots"), stored.get("rate")
        return KeyLimits(
            slots=None if slots is None else int(slots),
            rate=None if rate is None else float(rate),
            ordered=bool(stored.get("ordered")),
            through_retries=bool(stored.get("through_retries")),
            scope="tenant" if stored.get("scope") == "tenant" else "queue",
        )
    except UNREADABLE:
        return KeyLimits()


def moment_of(value: Any) -> datetime | None:
    """Milliseconds as a datetime; None if absent."""
    return None if value in (None, "", b"") else from_ms(int(float(value)))


def read_status(task_id: str, text: bytes) -> dict[str, Any]:
    """Parse the status of a task. Raises BrokenRecord."""
    try:
        status = json.loads(text)
        status["state"], status["user"], status["pushed"]
    except UNREADABLE as error:
        raise broken_status(task_id, error) from None
    return dict(status)


def broken_status(task_id: str, error: Exception) -> BrokenRecord:
    """Return the error for a status that cannot be read."""
    return BrokenRecord(f"the status of task {task_id!r} is unreadable: {error!r}")


def task_info(
    task_id: str, text: bytes, document: bytes | None, lease_end: bytes | None
) -> TaskInfo:
    """Make the TaskInfo of a task from its records. Raises BrokenRecord."""
    status = read_status(task_id, text)
    task = None
    if document is not None:
        try:
            task = Task.from_document(task_id, document)
        except BrokenRecord:
            task = None
    try:
        flow = read_flow(status)
        return TaskInfo(
            task_id=task_id,
            state=status["state"],
            user_id=status["user"],
            name=status["name"],
            priority=Priority(status["level"]),
            attempts=status["attempts"],
            pushed_at=from_ms(int(status["pushed"])),
            due_at=from_ms(int(status["due"])),
            claimed_at=moment_of(status.get("claimed")),
            ended_at=moment_of(status.get("ended")),
            lease_until=moment_of(lease_end),
            worker_id=status.get("worker"),
            error=status.get("error"),
            result=json.loads(status["result"]) if "result" in status else None,
            cancel_requested=bool(status.get("cancel")),
            task=task,
            tenant=status.get("tenant"),
            pool=flow.pool,
            limit_keys=flow.limit_keys,
            cost=flow.cost,
            expires_at=moment_of(status.get("expires")),
        )
    except UNREADABLE as error:
        raise broken_status(task_id, error) from None


def user_settings(text: bytes, now_ms: int) -> UserSettings:
    """Parse the settings of a user. Raises BrokenRecord."""
    try:
        stored = json.loads(text)
        for field in ("max_running", "max_waiting"):
            if stored.get(field) is not None:
                stored[field] = int(stored[field])
        stored["weight"] = float(stored.get("weight", 1.0))
        for field in ("paused_at", "paused_until"):
            stored[field] = moment_of(stored.get(field))
        return without_past_pause(UserSettings(**stored), now_ms)
    except UNREADABLE as error:
        raise BrokenRecord(
            f"the settings of a user, {text!r:.80}, are unreadable: {error!r}"
        ) from None


def without_past_pause(settings: UserSettings, now_ms: int) -> UserSettings:
    """The settings without a pause that is over."""
    until = settings.paused_until
    if settings.paused and (until is None or until > from_ms(now_ms)):
        return settings
    none = {"paused_at": None, "paused_by": None, "pause_note": None, "paused_until": None}
    return replace(settings, paused=False, **none)  # type: ignore[arg-type]
