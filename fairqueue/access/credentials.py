"""Say who may ask for what: keys, one-time logins and sessions, kept as hashes of their secrets.

A secret is `fq_<id>_<256 random bits>`. Redis has the SHA-256 of it, which is of no use to whoever
reads it there: against 256 random bits there is nothing that a slow hash would add.
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
from fairqueue.models import UNREADABLE, as_text, new_id
from fairqueue.validation import (
    check_count,
    check_name,
    check_number,
    check_seconds,
    check_tenant,
)

ROLES = ("viewer", "operator", "admin")  # each may what those before it may
WAYS = ("python", "cli", "rest", "web")
LOGIN_S = 600.0  # so long a one-time login can be used
SESSION_S = 43_200.0  # 12 hours: a session ends with the working day
LONGEST_SESSION_S = 2_592_000.0  # 30 days: of a session or a login
MAX_LISTED = 1000  # keys in one answer
MAX_KEYS = 10_000  # of a queue, as lua/lib/credentials.lua has it; another one is refused
CHUNK = 500  # credentials in one command: a millisecond or two of the server's time

_SECRET = re.compile(r"fq_([0-9a-f]{16})_[A-Za-z0-9_-]{43}")
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_VIA = {"key": "rest", "session": "web"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Somebody who asks for something.

    role: one of ROLES. tenant: the only one that they see, or None for all. via: "python", "cli",
    "rest" or "web". key_id: of the key or session that they came with.
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
        if self.via not in WAYS:
            raise InvalidInput(f"via {shown(self.via):.80} is none of {', '.join(WAYS)}")

    def may(self, role: str) -> bool:
        """Whether they may do what takes this role. Raises InvalidInput for none of ROLES."""
        return ROLES.index(self.role) >= ROLES.index(check_role(role))

    def sees(self, tenant: str | None) -> bool:
        """Whether they may see what belongs to a tenant, or to none (None)."""
        return self.tenant is None or self.tenant == tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyInfo:
    """What is known of a credential; of its secret nothing is.

    kind: "key", "session" or "login". expires_at: None for a key that holds until it is revoked.
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
    """A credential that was just made: the only time that its secret is known."""

    secret: str = field(repr=False)
    info: KeyInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Who has come, or None; and for how many seconds they have to wait first (0: come in)."""

    actor: Actor | None
    wait: float = 0.0


NOBODY = Admission(actor=None)


class AccessStore:
    """The credentials of one queue."""

    def __init__(self, link: Link) -> None:
        self._link = link

    # --- keys -------------------------------------------------------------------------------------

    def create_key(
        self,
        name: str,
        role: str,
        tenant: str | None = None,
        *,
        expires_in: float | timedelta | None = None,
        by: str,
    ) -> NewKey:
        """A key for somebody or something. Its secret is in the answer and nowhere else.

        Names need not be unique: a key is replaced by one of the same name, then revoked.
        Raises InvalidInput naming what cannot be used, QueueFull when there are 10,000 keys.
        """
        check_name(name, "name of a key", InvalidInput)
        check_role(role)
        if tenant is not None:
            check_tenant(tenant, InvalidInput)
        check_name(by, "by", InvalidInput)
        if expires_in is not None:
            expires_in = check_seconds(expires_in, "expires_in", least=1.0)
        return self._add("key", name, role, tenant, by=by, seconds=expires_in)

    def keys(self) -> list[KeyInfo]:
        """The keys that hold, newest first; at most a thousand."""
        keys = self._link.keys
        ids = self._link.ask(("ZRANGE", keys["api_keys"], 0, MAX_LISTED - 1, "REV"))[0]
        if not ids:
            return []
        now = from_ms(self._link.now_ms())
        texts = self._link.ask(("HMGET", keys["credentials"], *ids))[0]
        found = (
            _info(id_.decode("utf-8", "replace"), text)
            for id_, text in zip(ids, texts, strict=True)
        )
        return [each for each in found if each and (not each.expires_at or each.expires_at > now)]

    def revoke(self, key_id: str) -> bool:
        """Take back a key and the sessions that came from it, at once; or one session.

        Whether there was one. Raises InvalidInput for what is no id of a key.
        """
        if not isinstance(key_id, str) or not _KEY_ID.fullmatch(key_id):
            raise InvalidInput(f"key_id {shown(key_id):.80} is none: 16 hexadecimal digits")
        found = self._link.run("revoke_credentials", op=new_id(), rest=[key_id])
        # They hold no longer as it is; a crash in the middle of tidying up opens no door.
        for ids in self._sessions_of(key_id):
            self._link.run("revoke_credentials", op=new_id(), rest=ids)
        return bool(found)

    def _sessions_of(self, key_id: str) -> list[list[bytes]]:
        """The sessions and logins that came from a key, in parts."""
        keys = self._link.keys
        ids = self._link.ask(("ZRANGE", keys["sessions"], 0, -1))[0]
        parts = [ids[i : i + CHUNK] for i in range(0, len(ids), CHUNK)]
        texts = self._link.ask(*(("HMGET", keys["credentials"], *part) for part in parts))
        mark = f'"parent":"{key_id}"'.encode()
        found = (
            [id_ for id_, text in zip(part, records, strict=True) if mark in (text or b"")]
            for part, records in zip(parts, texts, strict=True)
        )
        return [part for part in found if part]

    # --- sessions ---------------------------------------------------------------------------------

    def create_login(self, actor: Actor, *, seconds: float = LOGIN_S) -> str:
        """A secret that can be turned into a session of this actor, once, within so many seconds.

        It holds only while the key does that the actor came with, or their session if it came from
        no key. Raises Forbidden if that is gone, InvalidInput for a bad duration.
        """
        seconds = check_seconds(seconds, "seconds", least=1.0, most=LONGEST_SESSION_S)
        added = self._add(
            "login",
            actor.name,
            actor.role,
            actor.tenant,
            by=actor.name,
            seconds=seconds,
            source=actor.key_id or "",
        )
        return added.secret

    def redeem(self, secret: str, *, seconds: float = SESSION_S) -> NewKey | None:
        """Begin a session with a login, which is used up by that, or with a key, which stays.

        None if the secret is of neither. Of several who redeem one login at the same time, one
        gets a session. It ends after so many seconds, or with the key that it came from.
        Raises InvalidInput for a bad duration, and QueueFull if a key has begun too many: twenty
        at once, then one a minute.
        """
        seconds = check_seconds(seconds, "seconds", least=1.0, most=LONGEST_SESSION_S)
        key_id = id_of(secret)
        if key_id is None:
            return None
        new_key_id, new_secret = _new_secret()
        text = self._link.run(
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

    def end(self, secret: str) -> None:
        """Log out: the session of this secret ends. What is of no session is left alone."""
        key_id = id_of(secret)
        if key_id is not None:
            self._link.run("end_session", id=key_id, digest=_digest(secret))

    # --- at the door ------------------------------------------------------------------------------

    def admit(self, secret: str, *, rate: float, burst: int) -> Admission:
        """Who comes with this secret, and whether they may come in now: one round trip.

        Each credential has so many requests a second, and as many as `burst` at once. A wrong
        secret uses up nothing of its owner's: who knows an id could lock them out otherwise. Nor
        is it slowed down: 256 bits cannot be guessed. What has not even the form of a secret costs
        no round trip. A login is not let in; it has to be redeemed. Raises InvalidInput for a rate
        or burst that is none.
        """
        check_number(rate, "rate", least=0.001, most=1e6)
        check_count(burst, "burst", least=1, most=1_000_000)
        key_id = id_of(secret)
        if key_id is None:
            return NOBODY
        digest = _digest(secret)
        text, wait_ms = self._link.run(
            "authenticate", id=key_id, digest=digest, interval_ms=1000 / rate, burst=burst
        )
        actor = _actor(key_id, text, digest)
        return NOBODY if actor is None else Admission(actor=actor, wait=int(wait_ms) / 1000)

    def holding(self, key_ids: Collection[str]) -> set[str]:
        """Those of these keys and sessions that have neither ended nor been taken back."""
        found = self._unended(key_ids)
        parents = self._unended({parent for parent in found.values() if parent is not None})
        return {key_id for key_id, parent in found.items() if parent is None or parent in parents}

    def _unended(self, key_ids: Collection[str]) -> dict[str, str | None]:
        """Those that are there and have not ended, each with what it came from, or None.

        As in lua/lib/credentials.lua: a record that somebody has spoilt is none.
        """
        ids = list(key_ids)
        if not ids:
            return {}
        now_ms = self._link.now_ms()
        texts = self._link.ask(("HMGET", self._link.keys["credentials"], *ids))[0]
        found = {}
        for key_id, text in zip(ids, texts, strict=True):
            with suppress(*UNREADABLE):
                record = json.loads(text or b"")
                parent = _parent(record)
                if record.get("ends", math.inf) > now_ms:
                    found[key_id] = parent
        return found

    # --- making one -------------------------------------------------------------------------------

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
    ) -> NewKey:
        key_id, secret = _new_secret()
        record = {"kind": kind, "name": name, "role": role, "by": by, "hash": _digest(secret)}
        if tenant is not None:
            record["tenant"] = tenant
        text = self._link.run(
            "add_credential",
            op=new_id(),
            id=key_id,
            record=json.dumps(record),
            ttl_ms="" if seconds is None else math.ceil(seconds * 1000),
            source=source,
        )
        if text == b"full":
            raise QueueFull(f"there are {MAX_KEYS} keys already: revoke some that nobody needs")
        if text == b"gone":
            raise Forbidden(f"the key or session {source!r} that {name!r} came with has ended")
        info = _info(key_id, text)
        if info is None:  # we have just written it
            raise RuntimeError(f"the record of key {shown(key_id)} cannot be read")
        return NewKey(secret=secret, info=info)


def check_role(role: object) -> str:
    """One of ROLES. Raises InvalidInput naming the value."""
    if isinstance(role, str) and role in ROLES:
        return role
    raise InvalidInput(f"role {shown(role):.80} is none of {', '.join(ROLES)}")


def id_of(secret: object) -> str | None:
    """The id in a secret, which is no secret itself; None for what has not the form of one."""
    match = _SECRET.fullmatch(secret) if isinstance(secret, str) else None
    return match[1] if match else None


def _new_secret() -> tuple[str, str]:
    """An id, and a secret with it."""
    key_id = secrets.token_hex(8)
    return key_id, f"fq_{key_id}_{secrets.token_urlsafe(32)}"


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _actor(key_id: str, text: bytes, digest: str) -> Actor | None:
    """Who a record is of, if it is of this secret and can be read."""
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
    """The id of what a credential came from, if it came from any. Raises ValueError, TypeError."""
    as_text(record["hash"])
    as_text(record["kind"])
    if "parent" not in record:
        return None
    parent = as_text(record["parent"])
    if not _KEY_ID.fullmatch(parent):
        raise ValueError(f"{parent!r:.80} is no id of a credential")
    return parent


def _info(key_id: str, text: bytes | None) -> KeyInfo | None:
    """What a record says; None if there is none, or somebody has spoilt it."""
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
