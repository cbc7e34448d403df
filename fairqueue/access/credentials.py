"""API keys, one-time logins and sessions, stored as hashes of their secrets.

A secret is `fq_<id>_<256 random bits>`. Redis stores its SHA-256. A slow hash would add nothing:
256 random bits cannot be guessed.
"""

import hashlib
import hmac
import json
import math
import re
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.errors import Forbidden, InvalidInput, QueueFull, shown
from fairqueue.link.connection import Link
from fairqueue.link.operation import Ask, Call, Now, Operation, operation
from fairqueue.link.partitions import at_home
from fairqueue.models import UNREADABLE, as_text, new_id
from fairqueue.validation import (
    check_count,
    check_name,
    check_number,
    check_one_of,
    check_seconds,
    check_tenant,
)

ROLES = ("viewer", "operator", "admin")  # each includes the ones before it
WAYS = ("python", "cli", "rest", "web")
LOGIN_S = 600.0  # lifetime of a one-time login
SESSION_S = 43_200.0  # 12 hours: a session ends with the working day
LONGEST_SESSION_S = 2_592_000.0  # 30 days, for sessions and logins
MAX_LISTED = 1000  # keys in one answer
MAX_KEYS = 10_000  # per queue, as in lua/lib/credentials.lua
CHUNK = 500  # credentials in one command: a millisecond or two of server time

_SECRET = re.compile(r"fq_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_VIA = {"key": "rest", "session": "web"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The person or program behind a request.

    role: one of ROLES. tenant: the only tenant that they see, or None for all. via: "python",
    "cli", "rest" or "web". key_id: the id of their key or session.
    """

    name: str
    role: str = "admin"
    tenant: str | None = None
    via: str = "python"
    key_id: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "name of an actor", InvalidInput)
        check_role(self.role)
        if self.tenant is not None:
            check_tenant(self.tenant, InvalidInput)
        check_one_of(self.via, "via", WAYS)

    def may(self, role: str) -> bool:
        """Return whether their role includes this one. Raises InvalidInput for an unknown role."""
        return ROLES.index(self.role) >= ROLES.index(check_role(role))

    def sees(self, tenant: str | None) -> bool:
        """Return whether they may see objects of a tenant, or without a tenant (None)."""
        return self.tenant is None or self.tenant == tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """A credential without its secret.

    kind: "key", "session" or "login". expires_at: None for a key that is valid until revoked.
    """

    key_id: str
    name: str
    kind: str
    role: str
    tenant: str | None
    created_at: datetime
    created_by: str
    expires_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A new credential with its secret, which is not stored anywhere."""

    secret: str = field(repr=False)
    info: KeyInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Who sent a request, or None; and how many seconds they must wait (0 admits them)."""

    actor: Actor | None
    wait: float = 0.0


NOBODY = Admission(actor=None)


class AccessStore:
    """The credentials of one queue."""

    def __init__(self, link: Link) -> None:
        self.link = link

    # --- keys -------------------------------------------------------------------------------------

    @operation
    @at_home
    def create_key(
        self,
        name: str,
        role: str,
        tenant: str | None = None,
        *,
        expires_in: float | timedelta | None = None,
        by: str,
    ) -> Operation[NewKey]:
        """Create an API key and return it with its secret, which is not stored.

        Names need not be unique: to replace a key, create another with the same name, then revoke
        the old one. Raises InvalidInput naming the value, QueueFull if there are 10,000 keys.
        """
        check_name(name, "name of a key", InvalidInput)
        check_role(role)
        if tenant is not None:
            check_tenant(tenant, InvalidInput)
        check_name(by, "by", InvalidInput)
        if expires_in is not None:
            expires_in = check_seconds(expires_in, "expires_in", least=1.0)
        return (yield from self._add("key", name, role, tenant, by=by, seconds=expires_in))

    @operation
    @at_home
    def keys(self) -> Operation[list[KeyInfo]]:
        """Return the valid keys, newest first; at most a thousand."""
        keys = self.link.keys
        (ids,) = yield Ask(("ZRANGE", keys["api_keys"], 0, MAX_LISTED - 1, "REV"))
        if not ids:
            return []
        now = from_ms((yield Now()))
        (texts,) = yield Ask(("HMGET", keys["credentials"], *ids))
        found = (
            _info(id_.decode("utf-8", "replace"), text)
            for id_, text in zip(ids, texts, strict=True)
        )
        return [each for each in found if each and (not each.expires_at or each.expires_at > now)]

    @operation
    @at_home
    def revoke(self, key_id: str) -> Operation[bool]:
        """Revoke a key with the sessions made from it, or one session. Return whether it existed.

        Raises InvalidInput if the id does not have the form of a key id.
        """
        if not isinstance(key_id, str) or not _KEY_ID.fullmatch(key_id):
            raise InvalidInput(f"key_id must be 16 hexadecimal digits, not {shown(key_id):.80}")
        found = yield Call("revoke_credentials", op=new_id(), rest=[key_id])
        # The sessions are invalid already, because their key is gone: this only removes records.
        for ids in (yield from self._sessions_of(key_id)):
            yield Call("revoke_credentials", op=new_id(), rest=ids)
        return bool(found)

    def _sessions_of(self, key_id: str) -> Operation[list[list[bytes]]]:
        """Return the ids of the sessions and logins made from a key, in chunks."""
        keys = self.link.keys
        (ids,) = yield Ask(("ZRANGE", keys["sessions"], 0, -1))
        parts = [ids[i : i + CHUNK] for i in range(0, len(ids), CHUNK)]
        texts = yield Ask(*(("HMGET", keys["credentials"], *part) for part in parts))
        mark = f'"parent":"{key_id}"'.encode()
        found = (
            [id_ for id_, text in zip(part, records, strict=True) if mark in (text or b"")]
            for part, records in zip(parts, texts, strict=True)
        )
        return [part for part in found if part]

    # --- sessions ---------------------------------------------------------------------------------

    @operation
    @at_home
    def create_login(self, actor: Actor, *, seconds: float = LOGIN_S) -> Operation[str]:
        """Return a secret that can be redeemed once for a session of this actor.

        It is valid for `seconds`, and only while the actor's key is, or their session if it was not
        made from a key. Raises Forbidden if that has ended, InvalidInput for a bad duration.
        """
        seconds = check_seconds(seconds, "seconds", least=1.0, most=LONGEST_SESSION_S)
        added = yield from self._add(
            "login",
            actor.name,
            actor.role,
            actor.tenant,
            by=actor.name,
            seconds=seconds,
            source=actor.key_id or "",
        )
        return added.secret

    @operation
    @at_home
    def redeem(self, secret: str, *, seconds: float = SESSION_S) -> Operation[NewKey | None]:
        """Begin a session with a login, which is used up, or with a key, which stays valid.

        Return None if the secret belongs to neither. If several clients redeem one login, one of
        them gets a session. The session ends after `seconds`, or with the key it was made from.
        Raises InvalidInput for a bad duration, and QueueFull if a key begins too many sessions:
        twenty at once, then one a minute.
        """
        seconds = check_seconds(seconds, "seconds", least=1.0, most=LONGEST_SESSION_S)
        key_id = id_of(secret)
        if key_id is None:
            return None
        new_key_id, new_secret = _new_secret()
        text = yield Call(
            "begin_session",
            op=new_id(),
            id=key_id,
            digest=_digest(secret),
            new_id=new_key_id,
            new_digest=_digest(new_secret),
            ttl_ms=round(seconds * 1000),
        )
        if text.startswith(b"+"):
            seconds = math.ceil(int(text) / 1000)
            raise QueueFull(f"too many logins with this key: try again in {seconds} s")
        info = _info(new_key_id, text)
        return None if info is None else NewKey(secret=new_secret, info=info)

    @operation
    @at_home
    def end(self, secret: str) -> Operation[None]:
        """Log out: end the session of this secret. A secret of another kind is ignored."""
        key_id = id_of(secret)
        if key_id is not None:
            yield Call("end_session", id=key_id, digest=_digest(secret))

    # --- admission --------------------------------------------------------------------------------

    @operation
    @at_home
    def admit(self, secret: str, *, rate: float, burst: int) -> Operation[Admission]:
        """Identify the owner of a secret and apply their rate limit, in one round trip.

        Each credential may send `rate` requests a second, and `burst` at once. A wrong secret does
        not count against its id, or anyone who knows an id could lock its owner out. It is not
        slowed down either: 256 bits cannot be guessed. A malformed secret costs no round trip. A
        login is not admitted; it has to be redeemed. Raises InvalidInput for a bad rate or burst.
        """
        check_number(rate, "rate", least=0.001, most=1e6)
        check_count(burst, "burst", least=1, most=1_000_000)
        key_id = id_of(secret)
        if key_id is None:
            return NOBODY
        digest = _digest(secret)
        text, wait_ms = yield Call(
            "authenticate", id=key_id, digest=digest, interval_ms=1000 / rate, burst=burst
        )
        actor = _actor(key_id, text, digest)
        return NOBODY if actor is None else Admission(actor=actor, wait=int(wait_ms) / 1000)

    @operation
    @at_home
    def holding(self, key_ids: Collection[str]) -> Operation[set[str]]:
        """Return which of these keys and sessions are still valid."""
        found = yield from self._unended(key_ids)
        parents = yield from self._unended({each for each in found.values() if each is not None})
        return {key_id for key_id, parent in found.items() if parent is None or parent in parents}

    def _unended(self, key_ids: Collection[str]) -> Operation[dict[str, str | None]]:
        """Return those that exist and have not expired, each with its parent or None.

        A damaged record counts as absent, as in lua/lib/credentials.lua.
        """
        ids = list(key_ids)
        found: dict[str, str | None] = {}
        if not ids:
            return found
        now_ms = yield Now()
        (texts,) = yield Ask(("HMGET", self.link.keys["credentials"], *ids))
        for key_id, text in zip(ids, texts, strict=True):
            with suppress(*UNREADABLE):
                record = json.loads(text or b"")
                parent = _parent(record)
                if record.get("ends", math.inf) > now_ms:
                    found[key_id] = parent
        return found

    def _add(
        self,
        kind: str,
        name: str,
        role: str,
        tenant: str | None,
        *,
        by: str,
        seconds: float | None,
        source: str = "",
    ) -> Operation[NewKey]:
        key_id, secret = _new_secret()
        record = {"kind": kind, "name": name, "role": role, "by": by, "hash": _digest(secret)}
        if tenant is not None:
            record["tenant"] = tenant
        text = yield Call(
            "add_credential",
            op=new_id(),
            id=key_id,
            record=json.dumps(record),
            ttl_ms="" if seconds is None else math.ceil(seconds * 1000),
            source=source,
        )
        if text == b"full":
            raise QueueFull(f"the queue has {MAX_KEYS} keys already: revoke unused ones first")
        if text == b"gone":
            raise Forbidden(f"the key or session {source!r} of {name!r} has ended")
        info = _info(key_id, text)
        if info is None:  # the script has just written it
            raise RuntimeError(f"the record of key {shown(key_id)} is damaged")
        return NewKey(secret=secret, info=info)


def check_role(role: object) -> str:
    """Check one of ROLES. Raises InvalidInput naming the value."""
    return check_one_of(role, "role", ROLES)


def id_of(secret: object) -> str | None:
    """Return the id in a secret, which is not secret; None for a malformed secret."""
    match = _SECRET.fullmatch(secret) if isinstance(secret, str) else None
    return match[1] if match else None


def _new_secret() -> tuple[str, str]:
    """Return a new id and a secret that contains it."""
    key_id = secrets.token_hex(8)
    return key_id, f"fq_{key_id}_{secrets.token_urlsafe(32)}"


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _actor(key_id: str, text: bytes, digest: str) -> Actor | None:
    """Return the owner in a record, or None if the secret is another or the record is damaged."""
    try:
        record = json.loads(text)
        if not hmac.compare_digest(str(record["hash"]).encode(), digest.encode()):
            return None
        return Actor(
            name=record["name"],
            role=record["role"],
            tenant=record.get("tenant"),
            via=_VIA[record["kind"]],
            key_id=key_id,
        )
    except UNREADABLE:
        return None


def _parent(record: dict[str, Any]) -> str | None:
    """Return the id that a credential was made from, or None. Raises ValueError, TypeError."""
    as_text(record["hash"])
    as_text(record["kind"])
    if "parent" not in record:
        return None
    parent = as_text(record["parent"])
    if not _KEY_ID.fullmatch(parent):
        raise ValueError(f"{parent!r:.80} is not the id of a credential")
    return parent


def _info(key_id: str, text: bytes | None) -> KeyInfo | None:
    """Read a record; None if it is absent or damaged."""
    try:
        record = json.loads(text or b"")
        ends = record.get("ends")
        tenant = record.get("tenant")
        return KeyInfo(
            key_id=key_id,
            name=str(record["name"]),
            kind=str(record["kind"]),
            role=check_role(record["role"]),
            tenant=None if tenant is None else check_tenant(tenant),
            created_at=from_ms(int(record["created"])),
            created_by=str(record["by"]),
            expires_at=None if ends is None else from_ms(int(ends)),
        )
    except UNREADABLE:
        return None
