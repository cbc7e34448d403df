"""Decide what an actor may see and change, and write each change down: the one place for both."""

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


class Noted:
    """What a change adds to its entry in the audit log when it is done."""

    def __init__(self) -> None:
        self.details: dict[str, Any] = {}

    def add(self, **details: Any) -> None:
        """Say more about the change, such as how many objects it touched."""
        self.details.update(details)


class Guard:
    """The rules for one actor."""

    def __init__(self, actor: Actor, log: AuditLog) -> None:
        self.actor = actor
        self._log = log

    def read(self) -> None:
        """Let a viewer pass. Raises Forbidden."""
        self.require("viewer", "look at this")

    def require(self, role: str, what: str) -> None:
        """Raises Forbidden unless the actor has the role or a higher one."""
        if not self.actor.may(role):
            raise Forbidden(
                f"{self.actor.name!r} is {self.actor.role}: to {what} takes the role {role}"
            )

    def require_all_tenants(self, what: str) -> None:
        """Raises Forbidden for an actor of one tenant: this concerns all of them."""
        if self.actor.tenant is not None:
            raise Forbidden(
                f"{self.actor.name!r} belongs to tenant {self.actor.tenant!r}: to {what} takes a "
                "key without a tenant"
            )

    def scope(self, tenant: str | None) -> str | None:
        """The tenant that a listing is of: the actor's own, if it has one.

        Raises Forbidden if another is asked for.
        """
        if self.actor.tenant is None:
            return tenant
        if tenant not in (None, self.actor.tenant):
            raise Forbidden(f"{self.actor.name!r} cannot see tenant {shown(tenant)}")
        return self.actor.tenant

    def unmask(self, new: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
        """Arguments for one run, where they say `***` with what is stored; see masking.unmask.

        Raises Forbidden if secrets that are not shown would come together with arguments of the
        actor's own, unless it is an admin, who may see them: a run that takes a token to an address
        of one's choice tells it.
        """
        found: dict[str, Any] = unmask(new, stored)
        if found not in (new, stored):
            self.require("admin", "use secrets that are not shown with other arguments")
        return found

    @contextmanager
    def change(
        self,
        action: str,
        target: object,
        *,
        tenant: object = None,
        details: Mapping[str, Any] | None = None,
    ) -> Iterator[Noted]:
        """Write a change down before it is made, and how it ended.

        If the process dies in between, the entry says that it was started, which is all that is
        known then. The log gets a line, too: who makes many changes could push others' entries out
        of the audit log, which keeps the newest. Nobody has checked what is given here: a payload
        in place of a name is not written down.
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
        noted = Noted()
        try:
            yield noted
        except FairQueueError as error:
            self._end(entry_id, "failed", str(error), noted)
            raise
        except BaseException as error:
            self._end(entry_id, "failed", error_line(error)[:200], noted)
            raise
        self._end(entry_id, "done", None, noted)

    def _end(self, entry_id: str, outcome: str, error: str | None, noted: Noted) -> None:
        """Complete an entry. Without Redis it stays "started", and what was done is done."""
        try:
            self._log.end(entry_id, outcome, error, mask(noted.details))
        except FairQueueError as lost:
            log_event(
                logger, "audit_not_completed", logging.WARNING, entry=entry_id, error=str(lost)
            )
