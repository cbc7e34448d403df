"""Check what an actor may see and change, and record each change in the audit log."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fairqueue.access.audit import AuditLog
from fairqueue.access.credentials import Actor
from fairqueue.errors import FairQueueError, Forbidden, safe_repr, shown
from fairqueue.inspection.masking import mask, mask_details, unmask
from fairqueue.logs import error_line, log_event

logger = logging.getLogger("fairqueue.inspection")


class ChangeDetails:
    """Details that a change adds to its audit entry when it is done."""

    def __init__(self) -> None:
        self.details: dict[str, Any] = {}

    def add(self, **details: Any) -> None:
        """Add details, such as the number of changed objects."""
        self.details.update(details)


class Guard:
    """The permissions of one actor."""

    def __init__(self, actor: Actor, log: AuditLog) -> None:
        self.actor = actor
        self._log = log

    def read(self) -> None:
        """Raises Forbidden unless the actor is at least a viewer."""
        self.require("viewer", "see this")

    def read_global(self, what: str) -> None:
        """Raises Forbidden unless the actor is at least a viewer, of all tenants."""
        self.read()
        self.require_all_tenants(what)

    def require_global_admin(self, what: str) -> None:
        """Raises Forbidden unless the actor is an admin of all tenants."""
        self.require("admin", what)
        self.require_all_tenants(what)

    def require(self, role: str, what: str) -> None:
        """Raises Forbidden unless the actor has the role or a higher one."""
        if not self.actor.may(role):
            raise Forbidden(
                f"{self.actor.name!r} has the role {self.actor.role}; to {what} you need the role "
                f"{role}"
            )

    def require_all_tenants(self, what: str) -> None:
        """Raises Forbidden if the actor belongs to one tenant."""
        if self.actor.tenant is not None:
            raise Forbidden(
                f"{self.actor.name!r} belongs to tenant {self.actor.tenant!r}; to {what} you need "
                "a key without a tenant"
            )

    def scope(self, tenant: str | None) -> str | None:
        """The tenant to list: the actor's own, if it has one.

        Raises Forbidden if `tenant` is another one.
        """
        if self.actor.tenant is None:
            return tenant
        if tenant not in (None, self.actor.tenant):
            raise Forbidden(f"{self.actor.name!r} cannot see tenant {shown(tenant)}")
        return self.actor.tenant

    def unmask(self, new: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
        """Replace `***` in arguments for one run by the stored secrets; see masking.unmask.

        Raises Forbidden if an actor who is not an admin combines hidden secrets with other
        arguments: a run that sends a token to an address of the actor's choice would reveal it.
        """
        found: dict[str, Any] = unmask(new, stored)
        if found not in (new, stored):
            self.require("admin", "combine hidden secrets with other arguments")
        return found

    @contextmanager
    def change(
        self,
        action: str,
        target: object,
        *,
        tenant: object = None,
        details: Mapping[str, Any] | None = None,
    ) -> Iterator[ChangeDetails]:
        """Record a change in the audit log before it is made, and its outcome afterwards.

        If the process dies in between, the entry stays "started". The change is also logged: the
        audit log keeps only the newest entries. The arguments are not validated yet, so a value
        that is not plain, such as a payload instead of a name, is not recorded.
        """
        target = target if isinstance(target, str) else safe_repr(target)
        tenant = self.actor.tenant if tenant is None else tenant
        tenant = tenant if tenant is None or isinstance(tenant, str) else safe_repr(tenant)
        entry_id = self._log.begin(
            actor=self.actor,
            action=action,
            target=target,
            tenant=tenant,
            details=mask_details(details or {}),
        )
        fields = {"actor": self.actor.name, "key": self.actor.key_id, "via": self.actor.via}
        fields |= {"action": action, "target": target, "tenant": tenant, "entry": entry_id}
        log_event(logger, "change_begun", **fields)
        entry = ChangeDetails()
        try:
            yield entry
        except FairQueueError as error:
            self._end(entry_id, "failed", str(error), entry)
            raise
        except BaseException as error:
            self._end(entry_id, "failed", error_line(error)[:200], entry)
            raise
        self._end(entry_id, "done", None, entry)

    def _end(self, entry_id: str, outcome: str, error: str | None, entry: ChangeDetails) -> None:
        """Complete an entry. Without Redis it stays "started"; the change is not undone."""
        try:
            self._log.end(entry_id, outcome, error, mask(entry.details))
        except FairQueueError as lost:
            log_event(
                logger, "audit_not_completed", logging.WARNING, entry=entry_id, error=str(lost)
            )
