"""The audit log and the API keys, for one actor."""

import builtins
from typing import Any

from fairqueue.access.audit import AuditEntry
from fairqueue.access.credentials import KeyInfo, NewKey
from fairqueue.inspection.context import InspectorPart
from fairqueue.inspection.missing import reading
from fairqueue.models import Page


class Audit(InspectorPart):
    """The audit log: who changed what."""

    @reading
    def list(self, *, tenant: str | None = None, **filters: Any) -> Page[AuditEntry]:
        """A page of the audit log, newest first; see `AuditLog.entries` for the filters."""
        self._guard.read()
        return self._context.stores.audit.entries(tenant=self._guard.scope(tenant), **filters)


class ApiKeys(InspectorPart):
    """The keys of the REST API and the dashboard."""

    @reading
    def list(self) -> builtins.list[KeyInfo]:
        """All keys, newest first, without their secrets."""
        self._guard.require_global_admin("see API keys")
        return self._context.stores.access.keys()

    def create(
        self,
        name: str,
        role: str,
        tenant: str | None = None,
        expires_in: float | None = None,
    ) -> NewKey:
        """Create a key. Only the returned object has its secret."""
        self._guard.require_global_admin("create API keys")
        details = {"role": role, "expires_in": expires_in}
        with self._guard.change("key.create", name, tenant=tenant, details=details) as entry:
            key = self._context.stores.access.create_key(
                name, role, tenant, expires_in=expires_in, by=self._guard.actor.name
            )
            entry.add(key_id=key.info.key_id)
        return key

    def revoke(self, key_id: str) -> bool:
        """Revoke a key and end its sessions; False if there is no such key."""
        self._guard.require_global_admin("revoke API keys")
        with self._guard.change("key.revoke", key_id) as entry:
            revoked = self._context.stores.access.revoke(key_id)
            entry.add(revoked=revoked)
        return revoked
