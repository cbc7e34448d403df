"""Keep who did what: an entry is there before the change, and says afterwards how it went."""

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
from fairqueue.models import UNREADABLE, Page, new_id
from fairqueue.validation import MAX_ERROR_LENGTH, check_count, check_name, check_tenant

STARTED = "started"
OUTCOMES = ("done", "failed")
MAX_LISTED = 1000  # entries on one page
READ_AT_ONCE = 500  # entries in one answer of Redis
MAX_WALKED = 10_000  # entries looked at for one page: as many as are kept
MAX_DETAILS_BYTES = 8 * 1024  # as JSON, of the beginning and of the end each
LONGEST_TEXT = 500  # characters of one text in the details, and of a target
MOST_ITEMS = 100  # of one list or object in the details
MAX_DEPTH = 8  # levels of details
LAST_MS = 9_999_999_999_999  # in 2286: entries have 13 digits for their time
CUT = "… (cut)"  # at the end of what was too long

_ENTRY_ID = re.compile(r"[0-9]{13}-[0-9]{6}-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Something that somebody did.

    key_id: of the credential that they came with, where there was one; names may be the same.
    tenant: of what it was done to, else of who did it. outcome: "done", "failed" (see error), or
    "started": nobody knows how it went, because whoever did it ended in the middle, or does it now.
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


class _Filter(NamedTuple):
    """What a listing is of."""

    actor: str | None
    action: str | None
    target: str | None
    tenant: str | None

    def has(self, entry: AuditEntry) -> bool:
        wanted = (
            (self.actor, entry.actor),
            (self.target, entry.target),
            (self.tenant, entry.tenant),
        )
        return all(want is None or want == got for want, got in wanted) and (
            self.action is None or entry.action.startswith(self.action)
        )


class AuditLog:
    """The audit log of one queue: the newest 10,000 entries."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def begin(
        self,
        actor: Actor,
        action: str,
        target: str,
        *,
        tenant: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> str:
        """Write that somebody is about to do something; the id of the entry.

        It is there before the change is: what happens is never without an entry. `details` that
        JSON cannot hold, or that are too large, are written as well as can be.
        Raises InvalidInput for an action that is no name.
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
        entry: bytes = self._link.run("begin_audit", op=new_id(), head=_encode(head))
        return entry.decode()

    def end(
        self,
        entry_id: str,
        outcome: str,
        error: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> bool:
        """Write how it went: "done" or "failed". `details` are added to those of the beginning.

        False if the entry is no longer kept, or has another end already: the first one stands.
        Raises InvalidInput for an id or outcome that is none.
        """
        if outcome not in OUTCOMES:
            raise InvalidInput(f"outcome {shown(outcome):.80} is none of {', '.join(OUTCOMES)}")
        tail: dict[str, Any] = {"outcome": outcome}
        if error is not None:
            tail["error"] = _text(error, MAX_ERROR_LENGTH)
        if details:
            tail["details"] = _details(details)
        written = self._link.run("end_audit", entry=_check_id(entry_id), tail=_encode(tail))
        return bool(written)

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
    ) -> Page[AuditEntry]:
        """A page of entries, newest first.

        `action` is how the action begins: "schedule." are all of schedules. `since` is with that
        moment, `until` without it. A page may be short although its cursor says that there is more.
        Raises InvalidInput naming what cannot be used.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        if tenant is not None:
            check_tenant(tenant, InvalidInput)
        wanted = _Filter(actor, action, target, tenant)
        # Members begin with a digit; ':' is the character after '9'.
        first = "[0" if since is None else f"[{_digits(since, 'since')}"
        ends = [":"] if until is None else [_digits(until, "until")]
        if cursor is not None:
            ends.append(_check_id(cursor, "cursor"))
        return self._page(wanted, first, min(ends), limit)

    def _page(self, wanted: _Filter, first: str, end: str, limit: int) -> Page[AuditEntry]:
        found: list[AuditEntry] = []
        last, position = f"({end}".encode(), None
        size, walked = min(limit + 1, READ_AT_ONCE), 0  # enough where nothing is filtered out
        while walked < MAX_WALKED:
            members = self._read(first, last, size)
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

    def _read(self, first: str, last: bytes, size: int) -> list[bytes]:
        key = self._link.keys["audit"]
        members: list[bytes] = self._link.ask(
            ("ZREVRANGEBYLEX", key, last, first, "LIMIT", 0, size)
        )[0]
        return members


def _entry(member: bytes) -> AuditEntry | None:
    """What a member says; None if somebody has spoilt it."""
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
    hint = "the `cursor` of a page" if what == "cursor" else "what `begin` returned"
    raise InvalidInput(f"{what} {shown(entry_id):.80} is none: pass {hint}")


def _digits(moment: datetime | float, what: str) -> str:
    return f"{min(max(to_ms(moment, what), 0), LAST_MS):013d}"


# --- details --------------------------------------------------------------------------------------


def _details(details: Mapping[str, Any] | None) -> dict[str, Any]:
    """Details as JSON can hold them. An action must not fail because of what is said about it."""
    try:
        plain: dict[str, Any] = _plain(dict(details or {}), 1)
        text = _encode(plain)
    except Exception as error:
        return {"unwritable": type(error).__name__}
    if len(text.encode()) > MAX_DETAILS_BYTES:
        return {"cut": _text(text, MAX_DETAILS_BYTES // 5)}  # a character has 4 bytes at most
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
    """What an action is about; nobody may have looked at it before, so it may be anything."""
    return _text(value if isinstance(value, str) else shown(value))


def _text(value: object, most: int = LONGEST_TEXT) -> str:
    """Anything as text that can be stored, with a mark where it was cut."""
    # What holds others can have more parts than could ever be written.
    text = shown(value) if isinstance(value, list | tuple | dict | set) else str(value)
    if len(text) > most:
        text = text[:most] + CUT
    return text.encode("utf-8", "replace").decode()


def _encode(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
