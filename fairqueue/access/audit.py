"""The audit log: an entry is written before each change, and completed with its outcome."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from fairqueue.access.credentials import Actor
from fairqueue.clock import from_ms, to_ms
from fairqueue.errors import InvalidInput, shown
from fairqueue.link.connection import Link
from fairqueue.link.operation import Ask, Call, Operation, operation
from fairqueue.link.partitions import at_home
from fairqueue.models import UNREADABLE, Page, new_id
from fairqueue.validation import (
    MAX_ERROR_LENGTH,
    check_count,
    check_name,
    check_one_of,
    check_tenant,
)

STARTED = "started"
OUTCOMES = ("done", "failed")
MAX_LISTED = 1000  # entries on one page
READ_AT_ONCE = 500  # entries in one answer of Redis
MAX_WALKED = 10_000  # entries examined for one page: as many as are stored
MAX_DETAILS_BYTES = 8 * 1024  # as JSON, for each of `begin` and `end`
LONGEST_TEXT = 500  # characters of one string in the details, and of a target
MOST_ITEMS = 100  # of one list or object in the details
MAX_DEPTH = 8  # levels of details
LAST_MS = 9_999_999_999_999  # in 2286: the time of an entry has 13 digits
CUT = "… (cut)"  # marks the end of a text that was too long

_ENTRY_ID = re.compile(r"[0-9]{13}-[0-9]{6}-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One action of one actor.

    key_id: the credential that was used, if any; names need not be unique. tenant: that of the
    target, or else of the actor. outcome: "done", "failed" (see error), or "started": the action is
    under way, or the process died before it could record the outcome.
    """

    entry_id: str
    at: datetime
    actor: str
    role: str
    via: str
    key_id: str | None
    tenant: str | None
    action: str
    target: str
    outcome: str
    details: dict[str, Any]
    error: str | None


class _AuditFilter(NamedTuple):
    """The entries that a listing contains."""

    actor: str | None
    action: str | None
    target: str | None
    tenant: str | None

    def has(self, entry: AuditEntry) -> bool:
        return (
            self.actor in (None, entry.actor)
            and self.target in (None, entry.target)
            and self.tenant in (None, entry.tenant)
            and (self.action is None or entry.action.startswith(self.action))
        )


class AuditLog:
    """The audit log of one queue: the newest 10,000 entries."""

    def __init__(self, link: Link) -> None:
        self.link = link

    @operation
    @at_home
    def begin(
        self,
        actor: Actor,
        action: str,
        target: str,
        *,
        tenant: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> Operation[str]:
        """Write an entry before the change is made, and return its id.

        Details that JSON cannot represent are converted to strings, and large ones are cut. Raises
        InvalidInput if `action` is not a valid name.
        """
        head = {
            "actor": actor.name,
            "role": actor.role,
            "via": actor.via,
            "key": actor.key_id,
            "tenant": actor.tenant if tenant is None else _named(tenant),
            "action": check_name(action, "action", InvalidInput),
            "target": _named(target),
            "details": _details(details),
        }
        entry: bytes = yield Call("begin_audit", op=new_id(), head=_encode(head))
        return entry.decode()

    @operation
    @at_home
    def end(
        self,
        entry_id: str,
        outcome: str,
        error: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> Operation[bool]:
        """Write the outcome of an entry, "done" or "failed". `details` are added to it.

        Return False if the entry is no longer stored, or has another outcome, which stays. Raises
        InvalidInput for a bad id or outcome.
        """
        tail: dict[str, Any] = {"outcome": check_one_of(outcome, "outcome", OUTCOMES)}
        if error is not None:
            tail["error"] = _text(error, MAX_ERROR_LENGTH)
        if details:
            tail["details"] = _details(details)
        return bool((yield Call("end_audit", entry=_check_id(entry_id), tail=_encode(tail))))

    @operation
    @at_home
    def entries(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        target: str | None = None,
        tenant: str | None = None,
        since: datetime | float | None = None,
        until: datetime | float | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Operation[Page[AuditEntry]]:
        """Return a page of entries, newest first.

        action: a prefix: "schedule." matches all actions on schedules. since, until: the bounds,
        `until` not included. A page with a cursor may be short. Raises InvalidInput naming the
        value.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        if tenant is not None:
            check_tenant(tenant, InvalidInput)
        wanted = _AuditFilter(actor, action, target, tenant)
        # Members begin with a digit; ':' is the character after '9'.
        first = "[0" if since is None else f"[{_digits(since, 'since')}"
        ends = [":"] if until is None else [_digits(until, "until")]
        if cursor is not None:
            ends.append(_check_id(cursor, "cursor"))
        return (yield from self._page(wanted, first, min(ends), limit))

    def _page(
        self, wanted: _AuditFilter, first: str, end: str, limit: int
    ) -> Operation[Page[AuditEntry]]:
        found: list[AuditEntry] = []
        last, position = f"({end}".encode(), None
        size, walked = min(limit + 1, READ_AT_ONCE), 0  # enough if nothing is filtered out
        key = self.link.keys["audit"]
        while walked < MAX_WALKED:
            (members,) = yield Ask(("ZREVRANGEBYLEX", key, last, first, "LIMIT", 0, size))
            for i, member in enumerate(members, 1):
                entry = _entry(member)
                if entry is None:
                    continue
                position = entry.entry_id
                if wanted.has(entry):
                    found.append(entry)
                if len(found) == limit:
                    is_last = i == len(members) < size
                    return Page(found, None if is_last else position)
            if len(members) < size:
                return Page(found, None)
            last = b"(" + members[-1]
            walked += size
            size = READ_AT_ONCE
        return Page(found, position)


def _entry(member: bytes) -> AuditEntry | None:
    """Read an entry; None if it is damaged."""
    try:
        id_text, head_text, tail_text = member.split(b"\0")
        entry_id = _check_id(id_text.decode())
        head = json.loads(head_text)
        tail: dict[str, Any] = json.loads(tail_text) if tail_text else {"outcome": STARTED}
        error, tenant = tail.get("error"), head.get("tenant")
        return AuditEntry(
            entry_id=entry_id,
            at=from_ms(int(entry_id[:13])),
            actor=str(head["actor"]),
            role=str(head["role"]),
            via=str(head["via"]),
            key_id=None if head.get("key") is None else str(head["key"]),
            tenant=None if tenant is None else str(tenant),
            action=str(head["action"]),
            target=str(head["target"]),
            outcome=str(tail["outcome"]),
            details={**head["details"], **tail.get("details", {})},
            error=None if error is None else str(error),
        )
    except UNREADABLE:
        return None


def _check_id(entry_id: object, what: str = "entry_id") -> str:
    if isinstance(entry_id, str) and _ENTRY_ID.fullmatch(entry_id):
        return entry_id
    right = "the `cursor` of a page" if what == "cursor" else "an id that `begin` returned"
    raise InvalidInput(f"{what} must be {right}, not {shown(entry_id):.80}")


def _digits(moment: datetime | float, what: str) -> str:
    return f"{min(max(to_ms(moment, what), 0), LAST_MS):013d}"


# --- details --------------------------------------------------------------------------------------


def _details(details: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return details as JSON can represent them: an action must not fail because of them."""
    try:
        plain: dict[str, Any] = _plain(dict(details or {}), 1)
        text = _encode(plain)
    except Exception as error:
        return {"unwritable": type(error).__name__}
    if len(text.encode()) > MAX_DETAILS_BYTES:
        return {"cut": _text(text, MAX_DETAILS_BYTES // 5)}  # a character has at most 4 bytes
    return plain


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if depth <= MAX_DEPTH and isinstance(value, Mapping):
        items = islice(value.items(), MOST_ITEMS)
        plain = {_text(key): _plain(inner, depth + 1) for key, inner in items}
        if len(value) > MOST_ITEMS:
            plain[CUT] = f"{len(value) - MOST_ITEMS} more"
        return plain
    if depth <= MAX_DEPTH and isinstance(value, list | tuple):
        kept = [_plain(inner, depth + 1) for inner in value[:MOST_ITEMS]]
        return kept if len(value) <= MOST_ITEMS else [*kept, CUT]
    return _text(value)


def _named(value: object) -> str:
    """Return the name of a target, which may not have been checked yet, as text."""
    return _text(value if isinstance(value, str) else shown(value))


def _text(value: object, most: int = LONGEST_TEXT) -> str:
    """Return any value as text that can be stored, cut to size."""
    # Containers that contain each other can have a repr that never ends.
    text = shown(value) if isinstance(value, list | tuple | dict | set) else str(value)
    if len(text) > most:
        text = text[:most] + CUT
    return text.encode("utf-8", "replace").decode()


def _encode(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
