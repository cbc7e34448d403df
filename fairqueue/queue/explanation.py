"""Why a task waits: the answer of the script explain, read as reasons."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.flow_options import DEFAULT_POOL
from fairqueue.models import (
    UNREADABLE,
    Explanation,
)
from fairqueue.queue.estimate import Pace, claim_counts_ms, free_slots, quote
from fairqueue.queue.records import (
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

GATE_FIELDS = 7  # values for each limit at the end of the answer
_KEY, _TENANT = "\x03", "\x02"  # in the names of limits; see lua/lib/gates.lua


def named(answer: list[Any]) -> dict[str, Any]:
    """The answer of the script explain by name; `gates` is the list of its limits."""
    if not answer:
        return {}
    fields: dict[str, Any] = {"gates": []}
    i = 0
    while i < len(answer):
        if answer[i] == b"gate":
            fields["gates"].append(answer[i + 1 : i + 1 + GATE_FIELDS])
            i += 1 + GATE_FIELDS
        else:
            fields[answer[i].decode()] = None if answer[i + 1] == b"" else answer[i + 1]
            i += 2
    return fields


class Sharer:
    """A user, or a tenant, and what it may use."""

    def __init__(self, name: str, prefix: str, fields: Mapping[str, Any]) -> None:
        now_ms = int(fields["now"])
        self.name = name
        self.settings = user_settings(fields[f"{prefix}settings"] or b"{}", now_ms)
        self.running = int(fields[f"{prefix}running"])
        parked = fields[f"{prefix}parked"]
        self.parked = parked is not None
        self._until = None if parked in (None, b"inf") else moment_of(parked)
        self._now = from_ms(now_ms)

    @property
    def is_capped(self) -> bool:
        """Whether as many tasks run as may."""
        most = self.settings.max_running
        return most is not None and self.running >= most

    @property
    def rate_until(self) -> datetime | None:
        """When its rate allows the next task, if that is what it waits for."""
        if self.settings.rate is None or self.settings.paused or self.is_capped:
            return None
        return self._until if self._until is not None and self._until > self._now else None

    def pause(self, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The reason that it is paused. `what`: "user" or "tenant"."""
        settings = self.settings
        if settings.paused:
            yield (
                f"{what}_paused",
                {
                    what: self.name,
                    "by": settings.paused_by,
                    "since": settings.paused_at,
                    "until": settings.paused_until,
                    "note": settings.pause_note,
                },
            )

    def blocks(self, what: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The reasons that it may not be served now."""
        settings = self.settings
        yield from self.pause(what)
        if self.is_capped:
            most = {"running": self.running, "max_running": settings.max_running}
            yield f"{what}_capped", {what: self.name, **most}
        if (until := self.rate_until) is not None:
            yield f"{what}_rate", {what: self.name, "rate": settings.rate, "until": until}


class Gate:
    """A limit that a task has to pass: of its name, or of one of its keys."""

    def __init__(self, values: Sequence[Any]) -> None:
        text = values[0].decode("utf-8", "replace")
        self.text = text
        self.is_key = text.startswith(_KEY)
        self.name = text.removeprefix(_KEY).partition(_TENANT)[0]
        self.slots = None if values[1] == b"" else int(values[1])
        self.taken = int(values[2])
        self.rate = None if values[3] == b"" else float(values[3])
        self.free = moment_of(values[4])
        self.before, self.reserved = int(values[5]), int(values[6])

    def reasons(self, now: datetime) -> Iterator[tuple[str, dict[str, Any]]]:
        """Why a task cannot pass it now."""
        what = "key" if self.is_key else "name"
        if self.slots is not None and self.taken >= self.slots:
            yield f"{what}_slots", {what: self.name, "slots": self.slots, "taken": self.taken}
        if self.rate is not None and self.free is not None and self.free > now:
            yield f"{what}_rate", {what: self.name, "rate": self.rate, "until": self.free}
        if self.before:
            yield "key_order", {"key": self.name, "tasks": self.before}
        elif self.reserved and self.slots is not None and self.taken < self.slots:
            yield "reserved", {what: self.name}


class Waiting:
    """The answer of `explain`, and the reasons that follow from it."""

    def __init__(
        self, task_id: str, fields: Mapping[str, Any], workers: Sequence[WorkerInfo]
    ) -> None:
        self.task_id = task_id
        self._fields = {"before": None, **fields}
        self.status = read_status(task_id, fields["status"])
        self.state = str(self.status["state"])
        self.name = str(self.status["name"])
        self.tenant_name = self.status.get("group")
        self.pool = self.status.get("pool") or DEFAULT_POOL
        self.now = from_ms(int(fields["now"]))
        self.lease_until, self.due = moment_of(fields["lease_end"]), moment_of(fields["due"])
        self.user = Sharer(str(self.status["user"]), "", fields)
        self.tenant = None
        if self.tenant_name is not None:
            self.tenant = Sharer(self.tenant_name, "tenant_", fields)
        self.document = fields["document"] or b""
        self.leases = int(fields["leases"])
        self.own = int(fields.get("own") or 0)
        self.users, self.tenants = (_count(fields.get(name)) for name in ("users", "tenants"))
        self.ring = int(fields.get("ring") or 0)
        self.critical = int(fields.get("critical") or 0)
        held = fields.get("held")
        self.held_at = None if held is None else Gate([held, b"", 0, b"", b"", 0, 0])
        self.gates = [Gate(values) for values in fields["gates"]]
        self.workers = workers

    def explanation(self) -> Explanation:
        """Say why the task waits, or how it ended."""
        reasons = tuple(reason(code, self.now, **values) for code, values in self._reasons())
        waits = self.state == "ready" and self.held_at is None
        is_served = waits and not self.user.parked
        return Explanation(
            task_id=self.task_id,
            state=self.state,
            summary=" ".join(each.text for each in reasons),
            reasons=reasons,
            delayed_until=self.due if self.state == "delayed" and not self._is_behind else None,
            own_tasks_ahead=self.own if waits else None,
            users_ahead=self.users if is_served else None,
            tenants_ahead=self.tenants if is_served and not self._is_tenant_parked else None,
            user_paused=waits and self.user.settings.paused,
            user_capped=waits and self.user.is_capped,
            user_rate_limited_until=self.user.rate_until if waits else None,
            waits_for_slot=self.held_at is not None,
            **self._quoted(),
        )

    def _quoted(self) -> dict[str, datetime | None]:
        """The estimate of the start, for a task that has not started."""
        if self.state not in ("ready", "delayed") or self._is_behind or self._has_expired:
            return {}
        due_ms = None if self.due is None else round(self.due.timestamp() * 1000)
        fields = {"own": self.own, "full": int(self.held_at is not None), **self._fields}
        found = quote(fields, free_slots(self.workers, self.pool, self.name), due_ms)
        return {
            "starts_about": found.starts_about,
            "starts_earliest": found.earliest,
            "starts_latest": found.latest,
        }

    @property
    def _is_claimed_from(self) -> bool:
        """Whether somebody took a task of its pool lately, maybe without heartbeats."""
        span_ms = claim_counts_ms(self.leases, self.workers)
        now_ms = round(self.now.timestamp() * 1000)
        return Pace.read(self._fields.get("pace")).is_recent(now_ms, span_ms)

    @property
    def _is_buffered(self) -> bool:
        return bool(self.status.get("buffered"))

    @property
    def _is_behind(self) -> bool:
        """Whether it starts when another task ends."""
        return self._is_buffered or bool(self.status.get("behind"))

    @property
    def expires(self) -> datetime | None:
        """When the task expires if it has not started by then."""
        return moment_of(self.status.get("expires"))

    @property
    def _has_expired(self) -> bool:
        """Whether it has expired, and no claim has noticed yet."""
        waits = self.state in ("ready", "delayed")
        return waits and self.expires is not None and self.expires <= self.now

    @property
    def _is_tenant_parked(self) -> bool:
        return self.tenant is not None and self.tenant.parked

    def _reasons(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.state == "running":
            yield from self._of_run()
        elif self._has_expired:
            yield "expiring", {"until": self.expires}
        elif self.state == "delayed":
            yield from self._of_delay()
            yield from self.user.pause("user")
            if self.tenant is not None:
                yield from self.tenant.pause("tenant")
            yield from self._of_workers()
            yield from self._of_expiry()
        elif self.state == "ready":
            blocks = [*self._of_workers(), *self._of_sharers(), *self._of_gates()]
            yield from blocks
            yield from self._of_turn(is_blocked=bool(blocks))
            if self.status.get("error") and self.status["attempts"]:
                yield "retry", self._attempt()
            yield from self._of_expiry()
        else:
            at = {"at": moment_of(self.status.get("ended")) or self.now}
            if self.state == "buried":
                yield "failed", at | {"error": _brief(self.status.get("error"))}
            else:
                yield self.state if self.state in ("cancelled", "expired") else "succeeded", at

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
        elif self._is_behind:
            yield "behind", {}
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

    def _of_expiry(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.expires is not None:
            yield "expires", {"until": self.expires}

    def _of_workers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        takers = [worker for worker in self.workers if not worker.draining]
        in_pool = [worker for worker in takers if self.pool in worker.pools]
        if not takers:
            # A process that claims without heartbeats counts as alive while it holds a lease.
            if self.workers or not self.leases:
                yield "no_worker", {"draining": len(self.workers)}
            elif self.pool != DEFAULT_POOL and not self._is_claimed_from:
                yield "no_pool_worker", {"pool": self.pool, "workers": 0}
        elif not in_pool and not self._is_claimed_from:
            yield "no_pool_worker", {"pool": self.pool, "workers": len(takers)}
        elif in_pool and not any({self.name, ANY} & {*worker.names} for worker in in_pool):
            yield "no_handler", {"name": self.name, "workers": len(in_pool)}

    def _of_sharers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self.user.blocks("user")
        if self.tenant is not None:
            yield from self.tenant.blocks("tenant")

    def _of_gates(self) -> Iterator[tuple[str, dict[str, Any]]]:
        found = [each for gate in self.gates for each in gate.reasons(self.now)]
        yield from found
        if self.held_at is not None and not found:
            what = "key" if self.held_at.is_key else "name"
            yield f"{what}_turn" if what == "key" else "set_aside", {what: self.held_at.name}

    def _of_turn(self, *, is_blocked: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        if self.held_at is not None:
            return
        own = {"tasks": self.own, "user": self.user.name}
        if is_blocked or self.users is None:
            if self.own:
                yield "own_tasks", own
            return
        if self.critical and self.status.get("level") != Priority.CRITICAL:
            yield "critical", {"users": self.critical}
        if self.tenant_name is None:
            yield "turn", {"users": self.users, **own}
        else:
            places = {"tenants": self.tenants or 0, "place": self.users + 1, "of": self.ring}
            yield "tenant_turn", {"tenant": self.tenant_name, **places, **own}


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


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
