"""Look at the audit log and at API keys, and make and take back keys, as an actor may."""

import builtins
from datetime import datetime

from fairqueue.access.audit import AuditEntry
from fairqueue.access.credentials import KeyInfo, NewKey
from fairqueue.inspection.context import InspectionContext
from fairqueue.models import Page


class Audit:
    """Who changed what."""

    def __init__(self, context: InspectionContext) -> None:
        self._guard = context.guard
        self._log = context.stores.audit

    def list(
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
        """A page of the audit log, newest first; `action` is how it begins."""
        self._guard.read()
        return self._log.entries(
            actor=actor,
            action=action,
            target=target,
            tenant=self._guard.scope(tenant),
            since=since,
            until=until,
            limit=limit,
            cursor=cursor,
        )


class ApiKeys:
    """The keys of the REST API and the dashboard."""

    def __init__(self, context: InspectionContext) -> None:
        self._guard = context.guard
        self._access = context.stores.access

    def list(self) -> builtins.list[KeyInfo]:
        """All keys, newest first, without their secrets."""
        self._require("look at API keys")
        return self._access.keys()

    def create(
        self,
        name: str,
        role: str,
        tenant: str | None = None,
        expires_in: float | None = None,
    ) -> NewKey:
        """Make a key. Its secret is in the answer, and nowhere else."""
        self._require("make API keys")
        details = {"role": role, "expires_in": expires_in}
        with self._guard.change("key.create", name, tenant=tenant, details=details) as noted:
            by = self._guard.actor.name
            key = self._access.create_key(name, role, tenant, expires_in=expires_in, by=by)
            noted.add(key_id=key.info.key_id)
        return key

    def revoke(self, key_id: str) -> bool:
        """Take a key back, with the sessions that were begun with it; False if there is none."""
        self._require("take API keys back")
        with self._guard.change("key.revoke", key_id) as noted:
            revoked = self._access.revoke(key_id)
            noted.add(revoked=revoked)
        return revoked

    def _require(self, what: str) -> None:
        self._guard.require("admin", what)
        self._guard.require_all_tenants(what)
