"""Decide what a change makes of a schedule: plain functions of what is stored and of the time."""

from collections.abc import Mapping
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.errors import InvalidCron, InvalidSchedule
from fairqueue.link.operation import Call
from fairqueue.models import new_id
from fairqueue.schedules.changes import Change
from fairqueue.schedules.definition import (
    Definition,
    Stored,
    definition_text,
    recurrence_of,
    rule_text,
)
from fairqueue.schedules.fields import KINDS, NARROWING, REPLANNING, flow_of
from fairqueue.schedules.plan import Plan
from fairqueue.schedules.planning import MISSED_CAP, Rules, due_ms, stretch
from fairqueue.schedules.state import number_in


class Update:
    """A checked patch for a stored schedule at one time. Raises InvalidSchedule or a subclass."""

    def __init__(self, stored: Stored, patch: Mapping[str, Any], now_ms: int) -> None:
        self._stored, self._patch, self._now_ms = stored, patch, now_ms
        self._id = stored.definition.schedule_id
        self._before = stored.definition.fields
        self.fields = anchored(_patched(self._before, patch), now_ms)
        if self.changes_rule:
            recurrence_of(self._id, self.fields["timezone"], self.fields)
        flow_of(self.fields)
        self._active = self._new_active()
        if self._active == "1" or (self._stays_active and "max_runs" in patch):
            self._check_runs()
        self._next_ms, self._due_ms = self._next_fire()

    @property
    def changes_rule(self) -> bool:
        """Whether the rule or its limits are given."""
        return any(name in self._patch for name in (*KINDS, *NARROWING))

    def call(self, expected: bytes, by: Change, client_now: int) -> Call:
        """Return the call that stores it, if the stored definition is still `expected`."""
        old, fields, active = self._stored.definition, self.fields, self._active
        resumes = active == "1" or self._replans
        return Call(
            "update_schedule",
            op=new_id(),
            client_now=client_now,
            id=self._id,
            expected=expected,
            base=self._stored.plan.base,
            definition=definition_text(
                fields,
                created_by=old.created_by,
                created_ms=old.created_ms,
                updated_ms=self._now_ms,
                ruled_ms=old.ruled_ms if self._keeps_outcomes() else self._now_ms,
            ),
            user=fields["user_id"],
            tenant=fields["tenant"] or "",
            title=fields["title"] or "",
            revision=self._revision(),
            old_name=old.name,
            task_name=fields["name"],
            next_ms=self._next_ms,
            due_ms=self._due_ms,
            active=active,
            pause=by.pause_text() if active == "0" else "",
            noted=paused_note(self._stored, self._now_ms) if resumes else "",
            change=by.text(self._before, fields, active),
        )

    @property
    def _replans(self) -> bool:
        return any(name in self._patch for name in REPLANNING)

    @property
    def _stays_active(self) -> bool:
        return self._active == "" and self._stored.is_active

    @property
    def _keeps_plan(self) -> bool:
        return self._active == "" and self._next_ms == ""

    def _new_active(self) -> str:
        """Return '1' or '0' if the patch changes whether it is active, else ''.

        A schedule that was disabled for its cron rule is active again with a new rule; one that is
        paused stays paused.
        """
        state = self._stored.state
        if "is_active" in self._patch:
            wanted = bool(self._patch["is_active"])
            if wanted and self._stored.is_active and not self._replans:
                return ""
            return "1" if wanted else "0"
        is_disabled = state.get("reason") and not state.get("paused")
        return "1" if is_disabled and (self._replans or "next_run" in self._patch) else ""

    def _check_runs(self) -> None:
        most, runs = self.fields["max_runs"], number_in(self._stored.state, "runs") or 0
        if most is not None and runs >= most:
            raise InvalidSchedule(
                f"max_runs {most} is not more than the {runs} runs that schedule {self._id!r} has "
                "had: give a higher number, or None"
            )

    def _next_fire(self) -> tuple[int | str, int | str]:
        """Return the next fire time and when to act on it; empty strings if the plan stays."""
        if "next_run" in self._patch:
            if self._active == "" and not self._stored.is_active:
                raise InvalidSchedule(
                    f"next_run cannot be set: schedule {self._id!r} is not active; pass "
                    "is_active=True with it"
                )
            next_ms = self._patch["next_run"]
            if next_ms <= self._now_ms:
                raise InvalidSchedule(
                    f"next_run {from_ms(next_ms).isoformat()} is in the past: pass a time after "
                    f"{from_ms(self._now_ms).isoformat()}"
                )
            return next_ms, next_ms
        if self._active == "1" or (self._stays_active and self._replans):
            return first_fire(self._id, self.fields, self._now_ms)
        return "", ""

    def _keeps_outcomes(self) -> bool:
        """Return whether the outcomes of earlier fire times are still known afterwards.

        It is if the rule stays, and the plan goes on, or stops and goes on by a pause.
        """
        if self._replans or "next_run" in self._patch:
            return False
        if self._keeps_plan:
            return True
        was_paused = number_in(self._stored.state, "paused") is not None
        return not self._stored.plan.is_set and (self._active == "0" or was_paused)

    def _revision(self) -> str:
        if self._keeps_plan:
            return self._stored.plan.next_revision()
        return Plan.new_revision(self._patch.get("next_run"))


def _patched(before: dict[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields after a change. A rule of another kind replaces the old one."""
    fields = before | {name: value for name, value in patch.items() if name in before}
    kinds = [kind for kind in KINDS if patch.get(kind) is not None]
    if len(kinds) > 1:
        raise InvalidSchedule(f"a schedule needs one of {', '.join(KINDS)}; {kinds} are given")
    if kinds:
        fields |= {kind: None for kind in KINDS if kind != kinds[0]}
    if all(fields[kind] is None for kind in KINDS):
        raise InvalidSchedule(f"a schedule needs one of {', '.join(KINDS)}; none would be left")
    if "anchor" not in patch and (kinds or "start" in patch):
        fields["anchor"] = None
    return fields


def anchored(fields: dict[str, Any], now_ms: int) -> dict[str, Any]:
    """Let an interval count from its start, or from its creation, so that it does not drift."""
    if fields["every"] is None or fields["anchor"] is not None:
        return fields
    return fields | {"anchor": now_ms if fields["start"] is None else fields["start"]}


def first_fire(schedule_id: str, fields: Mapping[str, Any], now_ms: int) -> tuple[int, int]:
    """Return the first fire time after now, and when to act on it. Raises if there is none."""
    recurrence = recurrence_of(schedule_id, fields["timezone"], fields)
    moment = recurrence.next_ms(now_ms)
    if moment is None:
        if past := past_time(fields, now_ms):
            raise InvalidSchedule(f"{past}: the schedule would never run")
        error = InvalidSchedule if fields["cron_expr"] is None else InvalidCron
        raise error(
            f"{rule_text(fields)} has no fire time in the coming years in {fields['timezone']}, "
            "within its limits"
        )
    rules = Rules(schedule_id=schedule_id, recurrence=recurrence, jitter_ms=fields["jitter"])
    return moment, due_ms(rules, moment)


def past_time(fields: Mapping[str, Any], now_ms: int) -> str | None:
    """Say which of `at` and `end` is in the past, so that a rule has no fire time; None if none."""
    for name in ("at", "end"):
        if fields[name] is not None and fields[name] <= now_ms:
            return f"{name} {from_ms(fields[name]).isoformat()} is in the past"
    return None


def paused_note(stored: Stored, now_ms: int) -> str:
    """Return the note of the fire times that passed while a schedule was paused; '' if none did.

    It includes those that had come before the pause and were not fired yet.
    """
    definition: Definition = stored.definition
    paused, last_run = number_in(stored.state, "paused"), number_in(stored.state, "last_run")
    if paused is None:
        return ""
    since = max(definition.ruled_ms, 0 if last_run is None else min(last_run, paused))
    try:
        recurrence = definition.recurrence
    except InvalidSchedule:
        return ""  # it had none then
    first, last = recurrence.next_ms(since), recurrence.latest_ms(now_ms)
    if first is None or last is None or first > last:
        return ""
    return stretch(first, last, recurrence.count(first, last + 1, MISSED_CAP), "paused")
