"""Users and tenants: shares, waits and limits, for one actor."""

import builtins
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, TypeVar

from fairqueue.cursors import bad_cursor
from fairqueue.errors import InvalidInput, UnknownTenant, UnknownUser, shown
from fairqueue.flow_options import DEFAULT_POOL
from fairqueue.inspection.context import LONG_AGO, InspectorPart
from fairqueue.inspection.missing import reading
from fairqueue.link.owners import Owner
from fairqueue.models import DEFAULT_NAME, Explanation, Page, UserSettings
from fairqueue.queue.base import UNSET
from fairqueue.queue.estimate import Quote
from fairqueue.stats.users import PURGE_CHUNK, FairnessView, ShareSeries, TenantInfo, UserInfo
from fairqueue.validation import check_count, check_name, check_tenant

MAX_ACTIVE = 1000  # users with tasks that are sorted by backlog
MAX_LISTED = 100
BUCKETS = 30  # intervals in a chart of shares
MAX_TOP = 10
MAX_NAMED = 5  # tenants in a message
MAX_MINUTES = 7 * 24 * 60
ORDERS = ("backlog", "name")

T = TypeVar("T")
Progress = Callable[[int, int], object]


class Sharers(InspectorPart):
    """What users and tenants have in common."""

    def _series(
        self, minutes: int, sharers: Sequence[Owner], tenant: str | None = None
    ) -> ShareSeries:
        """Count in intervals that begin at round times, so a run stays in its interval."""
        self._since(minutes)
        step = timedelta(seconds=minutes * 60 // BUCKETS)
        now = self._context.now()
        until = now + step - (now - LONG_AGO) % step
        people = self._context.people
        return people.shares(until - BUCKETS * step, until, BUCKETS, sharers, tenant)

    def _set(self, action: str, owner: Owner, change: Mapping[str, Any]) -> UserSettings:
        """Change settings, and record it."""
        queue, name = self._context.queue, owner.user_id
        with self._changing(action, owner, change):
            if owner.tenant is not None and owner.is_tenant:
                return queue.set_tenant(owner.tenant, **change)
            return queue.set_user(name, tenant=owner.tenant, **change)

    def _pause(
        self, action: str, owner: Owner, note: str | None, until: datetime | float | None
    ) -> UserSettings:
        told = {"paused": True, "note": note, "until": until}
        details = {name: value for name, value in told.items() if value is not None}
        pause = {**told, "by": self._guard.actor.name}
        queue = self._context.queue
        with self._changing(action, owner, details):
            if owner.tenant is not None and owner.is_tenant:
                return queue.set_tenant(owner.tenant, **pause)  # type: ignore[arg-type]
            return queue.set_user(owner.user_id, tenant=owner.tenant, **pause)  # type: ignore[arg-type]

    def _purge(self, action: str, owner: Owner, *, dry_run: bool, progress: Progress | None) -> int:
        """Cancel what waits, and return how many tasks that were; a dry run only counts."""
        people = self._context.people
        waiting = people.waiting(owner)
        if dry_run:
            return waiting
        done = 0
        with self._changing(action, owner, {"waiting": waiting}) as entry:
            # At most as many as were counted: tasks pushed meanwhile stay.
            while done < waiting and (
                count := people.purge(owner, min(PURGE_CHUNK, waiting - done))
            ):
                done += count
                entry.add(cancelled=done)
                if progress is not None:
                    progress(done, waiting)
        return done

    def _changing(self, action: str, owner: Owner, details: Mapping[str, Any]) -> Any:
        target = owner.tenant if owner.is_tenant else owner.user_id
        return self._guard.change(action, target, tenant=owner.tenant, details=details)

    def _since(self, minutes: int) -> datetime:
        check_count(minutes, "minutes", least=1, most=MAX_MINUTES)
        return self._context.now() - timedelta(minutes=minutes)


class Users(Sharers):
    """The users that an actor may see.

    A user id that several tenants use is a user of each: `tenant` says which one is meant, None the
    user without a tenant. An actor of one tenant always means a user of its own tenant.
    """

    @reading
    def list(
        self,
        *,
        order: str = "backlog",
        prefix: str | None = None,
        tenant: str | None = None,
        minutes: int = 60,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[UserInfo]:
        """A page of users.

        order "backlog": users with waiting or running tasks, the largest backlog first, among the
        first thousand. order "name": all users, A to Z. Shares are counted over the last `minutes`,
        as far as history goes back. Raises InvalidInput, Forbidden.
        """
        self._guard.read()
        _check_order(order)
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        since = self._since(minutes)
        scope = self._guard.scope(tenant)
        people = self._context.people
        if order == "name":
            owners = people.names(limit, cursor, scope, prefix)
            return Page(people.read(owners, since), owners.cursor)
        active = people.active(MAX_ACTIVE, scope)
        page = _slice(active, attrgetter("user_id"), prefix, limit, cursor)
        return Page(people.read(page, since), page.cursor)

    @reading
    def get(self, user_id: str, minutes: int = 60, *, tenant: str | None = None) -> UserInfo:
        """The state and share of a user. Raises UnknownUser."""
        self._guard.read()
        since = self._since(minutes)
        owner = self._context.owner(user_id, tenant)
        (info,) = self._context.people.read([owner], since)
        if not info.is_known:
            raise UnknownUser(f"there is no user {user_id!r}{self._elsewhere(owner)}")
        return info

    def _elsewhere(self, owner: Owner) -> str:
        """The tenants that have a user of this id, for an actor that has named no tenant."""
        others = self._context.queue.tenants_of(owner.user_id) if owner.tenant is None else []
        if not others:
            return f" of tenant {owner.tenant!r}" if owner.tenant is not None else ""
        names = ", ".join(map(repr, others[:MAX_NAMED])) + ", …" * (len(others) > MAX_NAMED)
        return f" without a tenant, but of tenant {names}: say whose user is meant"

    @reading
    def exists(self, user_id: str, *, tenant: str | None = None) -> bool:
        """Whether the queue has any data of a user. Raises InvalidInput for a bad name."""
        self._guard.read()
        check_name(user_id, "user_id", InvalidInput)
        return self._context.people.knows(Owner(user_id, self._guard.scope(tenant)))

    @reading
    def tenants_of(self, user_id: str) -> builtins.list[str]:
        """The tenants with such a user. Raises Forbidden for an actor of one tenant."""
        self._guard.read_global("see other tenants")
        return self._context.queue.tenants_of(user_id)

    @reading
    def overview(self, minutes: int = 60) -> FairnessView:
        """How evenly tenants and users without one are served.

        For an actor of one tenant: how evenly the users of the tenant are.
        """
        self._guard.read()
        snapshot, since = self._context.queue.inspect(), self._since(minutes)
        return self._context.people.overview(snapshot, since, self._guard.actor.tenant)

    @reading
    def shares(self, minutes: int = 60, top: int = 8) -> ShareSeries:
        """Ended runs over time: of the `top` tenants and users with most, and of all others.

        For an actor of one tenant: of the users of the tenant.
        """
        self._guard.read()
        check_count(top, "top", least=1, most=MAX_TOP)
        tenant = self._guard.actor.tenant
        users = self._context.people.top(self._since(minutes), top, tenant)
        return self._series(minutes, users, tenant)

    @reading
    def service(self, user_id: str, minutes: int = 60, *, tenant: str | None = None) -> ShareSeries:
        """Ended runs of a user over time, and of all others of the tenant, or of the queue.

        Raises UnknownUser.
        """
        self._guard.read()
        owner = self._context.owner(user_id, tenant)
        return self._series(minutes, [owner], owner.tenant)

    @reading
    def next_wait(self, user_id: str, *, tenant: str | None = None) -> Explanation | None:
        """Why the next task of a user waits or is delayed; None if nothing waits.

        Raises UnknownUser.
        """
        self._guard.read()
        task_id = self._context.people.next_task(self._context.owner(user_id, tenant))
        return None if task_id is None else self._context.queue.explain(task_id)

    @reading
    def quote(
        self,
        user_id: str,
        *,
        tenant: str | None = None,
        name: str = DEFAULT_NAME,
        pool: str = DEFAULT_POOL,
    ) -> Quote:
        """When a task of a user would start if it was pushed now; see TaskQueue.quote.

        The user may be a new one. Raises InvalidInput naming the value.
        """
        self._guard.read()
        own = self._guard.scope(tenant)
        return self._context.queue.quote(user_id, tenant=own, name=name, pool=pool)

    # --- changing ---------------------------------------------------------------------------------

    def set(
        self,
        user_id: str,
        *,
        tenant: str | None = None,
        weight: float = UNSET,
        max_running: int | None = UNSET,
        max_waiting: int | None = UNSET,
        rate: float | None = UNSET,
    ) -> UserSettings:
        """Change the given settings of a user; see TaskQueue.set_user.

        Raises ConfigurationError, and Forbidden for an actor of one tenant: weights and limits
        protect the shares of other tenants.
        """
        self._guard.require("admin", "change users")
        self._guard.require_all_tenants("change weights and limits")
        change = _change(weight, max_running, max_waiting, rate)
        return self._set("user.set", self._context.owner(user_id, tenant), change)

    def pause(
        self,
        user_id: str,
        *,
        tenant: str | None = None,
        note: str | None = None,
        until: datetime | float | None = None,
    ) -> UserSettings:
        """Stop handing out the tasks of a user until resumed, or until a time; `note` says why.

        Raises ConfigurationError for an invalid note or time.
        """
        self._guard.require("operator", "pause users")
        return self._pause("user.pause", self._context.owner(user_id, tenant), note, until)

    def resume(self, user_id: str, *, tenant: str | None = None) -> UserSettings:
        """Hand out the tasks of a user again."""
        self._guard.require("operator", "resume users")
        owner = self._context.owner(user_id, tenant)
        return self._set("user.resume", owner, {"paused": False})

    def move(self, user_id: str, to: str | None, *, tenant: str | None = None) -> int:
        """Move a user to another tenant, or to none, and return how many waiting tasks were moved.

        See TaskQueue.move_user. Raises InvalidInput, UnknownUser, and Forbidden for an actor of one
        tenant. A user who is in the other tenant already is known, so the call can be repeated.
        """
        self._guard.require("admin", "move users")
        self._guard.require_all_tenants("move users")
        owner = self._context.owner(user_id, tenant)
        if not any(map(self._context.people.knows, (owner, Owner(user_id, to)))):
            raise UnknownUser(f"there is no user {user_id!r}{self._elsewhere(owner)}")
        with self._changing("user.move", owner, {"to": to}) as entry:
            moved = self._context.queue.move_user(user_id, to, tenant=owner.tenant)
            entry.add(moved=moved)
        return moved

    def purge(
        self,
        user_id: str,
        *,
        tenant: str | None = None,
        dry_run: bool = True,
        progress: Progress | None = None,
    ) -> int:
        """Cancel all waiting and delayed tasks of a user, and return how many.

        A dry run, the default, only counts. Running tasks are not affected.
        """
        self._guard.require("viewer" if dry_run else "admin", "drop the backlog of users")
        owner = self._context.owner(user_id, tenant)
        return self._purge("user.purge", owner, dry_run=dry_run, progress=progress)


class Tenants(Sharers):
    """The tenants that an actor may see: all of them, or its own."""

    @reading
    def list(
        self,
        *,
        order: str = "name",
        prefix: str | None = None,
        minutes: int = 60,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page[TenantInfo]:
        """A page of tenants.

        order "name": all tenants, A to Z. order "backlog": tenants with waiting or running tasks;
        see `Users.list`. Shares are counted over the last `minutes`. Raises InvalidInput.
        """
        self._guard.read()
        _check_order(order)
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        since, own = self._since(minutes), self._guard.actor.tenant
        people = self._context.people
        if own is not None:
            return Page(people.read_tenants([own], since), None)
        if order == "backlog":
            page = _slice(people.active_tenants(MAX_ACTIVE), str, prefix, limit, cursor)
            return Page(people.read_tenants(page, since), page.cursor)
        names = people.tenants(limit, cursor, prefix)
        return Page(people.read_tenants(names, since), names.cursor)

    @reading
    def exist(self) -> bool:
        """Whether the actor sees any tenant."""
        self._guard.read()
        return self._guard.actor.tenant is not None or bool(self._context.people.tenants(1))

    @reading
    def get(self, tenant: str, minutes: int = 60) -> TenantInfo:
        """The state and share of a tenant. Raises UnknownTenant."""
        self._guard.read()
        since = self._since(minutes)
        (info,) = self._context.people.read_tenants([self._seen(tenant)], since)
        if not info.is_known:
            raise UnknownTenant(f"there is no tenant {tenant!r}")
        return info

    @reading
    def overview(self, tenant: str, minutes: int = 60) -> FairnessView:
        """How evenly the users of a tenant are served. Raises UnknownTenant."""
        self._guard.read()
        snapshot, since = self._context.queue.inspect(), self._since(minutes)
        return self._context.people.overview(snapshot, since, self._seen(tenant))

    @reading
    def shares(self, minutes: int = 60, top: int = 8) -> ShareSeries:
        """Ended runs over time: of the `top` tenants with most, and of all others together.

        For an actor of one tenant: of its tenant alone.
        """
        self._guard.read()
        check_count(top, "top", least=1, most=MAX_TOP)
        own = self._guard.actor.tenant
        if own is not None:
            return self._series(minutes, [Owner.whole(own)], own)
        found = self._context.people.top(self._since(minutes), MAX_LISTED)
        return self._series(minutes, [owner for owner in found if owner.is_tenant][:top])

    @reading
    def service(self, tenant: str, minutes: int = 60, top: int = 8) -> ShareSeries:
        """Ended runs over time of the `top` users of a tenant, and of its others together."""
        self._guard.read()
        check_count(top, "top", least=1, most=MAX_TOP)
        seen = self._seen(tenant)
        users = self._context.people.top(self._since(minutes), top, seen)
        return self._series(minutes, users, seen)

    # --- changing ---------------------------------------------------------------------------------

    def set(
        self,
        tenant: str,
        *,
        weight: float = UNSET,
        max_running: int | None = UNSET,
        max_waiting: int | None = UNSET,
        rate: float | None = UNSET,
    ) -> UserSettings:
        """Change the given settings of a tenant; see TaskQueue.set_tenant.

        Raises ConfigurationError, and Forbidden for an actor of one tenant.
        """
        self._guard.require("admin", "change tenants")
        self._guard.require_all_tenants("change weights and limits")
        change = _change(weight, max_running, max_waiting, rate)
        return self._set("tenant.set", Owner.whole(self._seen(tenant)), change)

    def pause(
        self, tenant: str, *, note: str | None = None, until: datetime | float | None = None
    ) -> UserSettings:
        """Stop handing out the tasks of a tenant until resumed, or until a time; `note` says why.

        Raises ConfigurationError for an invalid note or time, and Forbidden for an actor of one
        tenant.
        """
        self._guard.require("operator", "pause tenants")
        self._guard.require_all_tenants("pause tenants")
        return self._pause("tenant.pause", Owner.whole(self._seen(tenant)), note, until)

    def resume(self, tenant: str) -> UserSettings:
        """Hand out the tasks of a tenant again."""
        self._guard.require("operator", "resume tenants")
        self._guard.require_all_tenants("resume tenants")
        return self._set("tenant.resume", Owner.whole(self._seen(tenant)), {"paused": False})

    def purge(self, tenant: str, *, dry_run: bool = True, progress: Progress | None = None) -> int:
        """Cancel all waiting and delayed tasks of a tenant, and return how many.

        A dry run, the default, only counts. Running tasks are not affected.
        """
        self._guard.require("viewer" if dry_run else "admin", "drop the backlog of tenants")
        owner = Owner.whole(self._seen(tenant))
        return self._purge("tenant.purge", owner, dry_run=dry_run, progress=progress)

    def _seen(self, tenant: str) -> str:
        """Raises UnknownTenant if the actor may not see a tenant."""
        check_tenant(tenant, InvalidInput)
        if self._guard.actor.tenant not in (None, tenant):
            raise UnknownTenant(f"there is no tenant {tenant!r}")
        return tenant


def _change(*values: Any) -> dict[str, Any]:
    """The settings that were given. Raises InvalidInput if there are none."""
    names = ("weight", "max_running", "max_waiting", "rate")
    given = dict(zip(names, values, strict=True))
    change = {name: value for name, value in given.items() if value is not UNSET}
    if not change:
        raise InvalidInput(f"nothing to change: pass at least one of {', '.join(names)}")
    return change


def _check_order(order: object) -> None:
    if order not in ORDERS:
        raise InvalidInput(f"order must be {' or '.join(ORDERS)}, not {shown(order)}")


def _slice(
    found: Sequence[T], name: Callable[[T], str], prefix: str | None, limit: int, cursor: str | None
) -> Page[T]:
    """A page of those whose name begins with a prefix; its cursor says how many come before it."""
    wanted = [each for each in found if prefix is None or name(each).startswith(prefix)]
    start = _offset(cursor)
    more = start + limit < len(wanted)
    return Page(wanted[start : start + limit], str(start + limit) if more else None)


def _offset(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not isinstance(cursor, str) or not re.fullmatch(r"\d{1,9}", cursor, re.ASCII):
        raise bad_cursor(cursor, InvalidInput)
    return int(cursor)
