"""Why a task waits: the answer of the script explain, read as reasons."""

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.models import (
    UNREADABLE,
    Explanation,
)
from fairqueue.queue.records import (
    handler_limits,
    moment_of,
    read_status,
    user_settings,
)
from fairqueue.queue.workers import ANY, WorkerInfo
from fairqueue.reasons import reason
from fairqueue.validation import (
    Priority,
)

MAX_BRIEF = 200  # characters of an error in a sentence


class Waiting:
    """The answer of `explain`, and the reasons that follow from it."""

    def __init__(self, task_id: str, answer: list[Any], workers: Sequence[WorkerInfo]) -> None:
        self.task_id = task_id
        self.status = read_status(task_id, answer[0])
        self.state = str(self.status["state"])
        self.user, self.name = str(self.status["user"]), str(self.status["name"])
        self.now = from_ms(int(answer[1]))
        self.lease_until, self.due = moment_of(answer[2]), moment_of(answer[3])
        self.own, users = int(answer[4]), int(answer[5])
        self.users = None if users < 0 else users
        self.parked = answer[6] != b""
        self.parked_until = None if answer[6] in (b"", b"inf") else moment_of(answer[6])
        self.settings = user_settings(answer[7] or b"{}", int(answer[1]))
        self.running = int(answer[8])
        self.held = bool(answer[9])
        self.limits = handler_limits(answer[10] or b"{}")
        self.document = answer[11]
        self.critical, self.taken = int(answer[12]), int(answer[13])
        self.name_free = moment_of(answer[14])
        self.leases = int(answer[15])
        self.workers = workers

    def explanation(self) -> Explanation:
        """Say why the task waits, or how it ended."""
        reasons = tuple(reason(code, self.now, **values) for code, values in self._reasons())
        waits = self.state == "ready" and not self.held
        return Explanation(
            task_id=self.task_id,
            state=self.state,
            summary=" ".join(each.text for each in reasons),
            reasons=reasons,
            delayed_until=self.due if self.state == "delayed" and not self._is_buffered else None,
            own_tasks_ahead=self.own if waits else None,
            users_ahead=self.users if waits and not self.parked else None,
            user_paused=waits and self.settings.paused,
            user_capped=waits and self._is_capped,
            user_rate_limited_until=self._rate_until if waits else None,
            waits_for_slot=self.held,
        )

    @property
    def _is_buffered(self) -> bool:
        return bool(self.status.get("buffered"))

    @property
    def _is_capped(self) -> bool:
        most = self.settings.max_running
        return most is not None and self.running >= most

    @property
    def _rate_until(self) -> datetime | None:
        """When the rate of the user allows the next task, if the task waits for that."""
        if self.settings.rate is None or self.settings.paused or self._is_capped:
            return None
        until = self.parked_until
        return until if until is not None and until > self.now else None

    def _reasons(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.state == "running":
            yield from self._of_run()
        elif self.state == "delayed":
            yield from self._of_delay()
            yield from self._of_pause()
            yield from self._of_workers()
        elif self.state == "ready":
            blocks = [*self._of_workers(), *self._of_user(), *self._of_name()]
            yield from blocks
            yield from self._of_turn(is_blocked=bool(blocks))
            if self.status.get("error") and self.status["attempts"]:
                yield "retry", self._attempt()
        else:
            at = {"at": moment_of(self.status.get("ended")) or self.now}
            if self.state == "buried":
                yield "failed", at | {"error": _brief(self.status.get("error"))}
            else:
                yield "cancelled" if self.state == "cancelled" else "succeeded", at

    def _of_run(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield (
            "running",
            {
                "worker": self.status.get("worker"),
                "since": moment_of(self.status.get("claimed")),
                "until": self.lease_until,
                "attempt": self.status["attempts"],
            },
        )
        if self.status.get("cancel"):
            yield "cancelling", {}

    def _of_delay(self) -> Iterator[tuple[str, dict[str, Any]]]:
        is_due = self.due is None or self.due <= self.now
        until = None if is_due else self.due
        if self._is_buffered:
            yield "buffered", {"schedule": self.status.get("schedule")}
        elif self.status["attempts"]:
            yield "retry", {**self._attempt(), "until": until}
        elif not is_due:
            yield "delayed", {"until": until}
        if is_due:
            yield "due", {"since": self.due or self.now}

    def _attempt(self) -> dict[str, Any]:
        """The last attempt, and how many there may be if the task itself says so."""
        return {
            "attempt": self.status["attempts"],
            "attempts": _most_attempts(self.document),
            "error": _brief(self.status.get("error")),
        }

    def _of_workers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        takers = [worker for worker in self.workers if not worker.draining]
        if not takers:
            # A process that claims without heartbeats counts as alive while it holds a lease.
            if self.workers or not self.leases:
                yield "no_worker", {"draining": len(self.workers)}
        elif not any({self.name, ANY}.intersection(worker.names) for worker in takers):
            yield "no_handler", {"name": self.name, "workers": len(takers)}

    def _of_pause(self) -> Iterator[tuple[str, dict[str, Any]]]:
        settings = self.settings
        if settings.paused:
            yield (
                "user_paused",
                {
                    "user": self.user,
                    "by": settings.paused_by,
                    "since": settings.paused_at,
                    "until": settings.paused_until,
                    "note": settings.pause_note,
                },
            )

    def _of_user(self) -> Iterator[tuple[str, dict[str, Any]]]:
        settings = self.settings
        yield from self._of_pause()
        if self._is_capped:
            most = {"running": self.running, "max_running": settings.max_running}
            yield "user_capped", {"user": self.user, **most}
        if (until := self._rate_until) is not None:
            yield "user_rate", {"user": self.user, "rate": settings.rate, "until": until}

    def _of_name(self) -> Iterator[tuple[str, dict[str, Any]]]:
        slots, rate = self.limits.slots, self.limits.rate
        is_full = slots is not None and self.taken >= slots
        is_late = rate is not None and self.name_free is not None and self.name_free > self.now
        if is_full:
            yield "name_slots", {"name": self.name, "slots": slots, "taken": self.taken}
        if is_late:
            yield "name_rate", {"name": self.name, "rate": rate, "until": self.name_free}
        if self.held and not is_full and not is_late:
            yield "set_aside", {"name": self.name}

    def _of_turn(self, *, is_blocked: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.held:
            return
        own = {"tasks": self.own, "user": self.user}
        if is_blocked or self.users is None:
            if self.own:
                yield "own_tasks", own
            return
        if self.critical and self.status.get("level") != Priority.CRITICAL:
            yield "critical", {"users": self.critical}
        yield "turn", {"users": self.users, **own}


def _brief(error: object) -> str | None:
    """The first line of an error, as a part of a sentence."""
    lines = error.split("\n", 1) if isinstance(error, str) else [""]
    return lines[0][:MAX_BRIEF].rstrip(" .") or None


def _most_attempts(document: bytes) -> int | None:
    """How many attempts a task asks for itself; None if it leaves that to its handler."""
    try:
        policy = json.loads(document)["policy"]
        most, retries = policy.get("max_attempts"), policy.get("retries")
    except UNREADABLE:
        return None
    if isinstance(most, int):
        return most
    return retries + 1 if isinstance(retries, int) else None
