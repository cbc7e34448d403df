"""The users: shares, waits and limits, for one actor."""

import builtins
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from fairqueue.cursors import bad_cursor
from fairqueue.errors import InvalidInput, UnknownUser, shown
from fairqueue.inspection.context import LONG_AGO, InspectorPart
from fairqueue.models import Explanation, Page, UserSettings
from fairqueue.queue.base import UNSET
from fairqueue.stats.users import PURGE_CHUNK, FairnessView, ShareSeries, UserInfo
from fairqueue.validation import check_count

MAX_ACTIVE = 1000  # users with tasks that are sorted by backlog
MAX_LISTED = 100
BUCKETS = 30  # intervals in a chart of shares
MAX_TOP = 10
MAX_MINUTES = 7 * 24 * 60
ORDERS = ("backlog", "name")


class Users(InspectorPart):
    """The users that an actor may see."""

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
        if order not in ORDERS:
            raise InvalidInput(f"order must be {' or '.join(ORDERS)}, not {shown(order)}")
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        since = self._since(minutes)
        scope = self._guard.scope(tenant)
        if order == "name":
            names = self._context.people.names(limit, cursor, scope, prefix)
            return Page(self._context.people.read(names, since), names.cursor)
        return self._busiest(prefix, scope, since, limit, cursor)

    def _busiest(
        self,
        prefix: str | None,
        tenant: str | None,
        since: datetime,
        limit: int,
        cursor: str | None,
    ) -> Page[UserInfo]:
        active = self._context.people.active(MAX_ACTIVE, tenant)
        wanted = [user for user in active if prefix is None or user.startswith(prefix)]
        start = _offset(cursor)
        more = start + limit < len(wanted)
        found = self._context.people.read(wanted[start : start + limit], since)
        return Page(found, str(start + limit) if more else None)

    def get(self, user_id: str, minutes: int = 60) -> UserInfo:
        """The state and share of a user. Raises UnknownUser."""
        self._guard.read()
        since = self._since(minutes)
        self._context.check_user(user_id)
        (info,) = self._context.people.read([user_id], since)
        if not info.is_known:
            raise UnknownUser(f"there is no user {user_id!r}")
        return info

    def overview(self, minutes: int = 60) -> FairnessView:
        """How evenly all users are served. Raises Forbidden for an actor of one tenant."""
        self._guard.read_global("compare all users")
        return self._context.people.overview(self._context.queue.inspect(), self._since(minutes))

    def shares(self, minutes: int = 60, top: int = 8) -> ShareSeries:
        """Ended runs over time: of the `top` users with most, and of all others together."""
        self._guard.read()
        check_count(top, "top", least=1, most=MAX_TOP)
        tenant = self._guard.actor.tenant
        users = self._context.people.top(self._since(minutes), top, tenant)
        return self._series(minutes, users, tenant)

    def service(self, user_id: str, minutes: int = 60) -> ShareSeries:
        """Ended runs of a user over time, and of all others that the actor may see.

        Raises UnknownUser.
        """
        self._guard.read()
        self._context.check_user(user_id)
        return self._series(minutes, [user_id], self._guard.actor.tenant)

    def _series(self, minutes: int, users: builtins.list[str], tenant: str | None) -> ShareSeries:
        """Count in intervals that begin at round times, so a run stays in its interval."""
        self._since(minutes)
        step = timedelta(seconds=minutes * 60 // BUCKETS)
        now = self._context.now()
        until = now + step - (now - LONG_AGO) % step
        return self._context.people.shares(until - BUCKETS * step, until, BUCKETS, users, tenant)

    def next_wait(self, user_id: str) -> Explanation | None:
        """Why the next task of a user waits or is delayed; None if nothing waits.

        Raises UnknownUser.
        """
        self._guard.read()
        self._context.check_user(user_id)
        task_id = self._context.people.next_task(user_id)
        return None if task_id is None else self._context.queue.explain(task_id)

    # --- changing ---------------------------------------------------------------------------------

    def set(
        self,
        user_id: str,
        *,
        weight: float = UNSET,
        max_running: int | None = UNSET,
        max_waiting: int | None = UNSET,
        rate: float | None = UNSET,
        tenant: str | None = UNSET,
    ) -> UserSettings:
        """Change the given settings of a user; see TaskQueue.set_user.

        Raises ConfigurationError, and Forbidden for an actor of one tenant: weights and limits
        protect the shares of other tenants.
        """
        self._guard.require("admin", "change users")
        self._guard.require_all_tenants("change weights and limits")
        given = {
            "weight": weight,
            "max_running": max_running,
            "max_waiting": max_waiting,
            "rate": rate,
            "tenant": tenant,
        }
        change = {name: value for name, value in given.items() if value is not UNSET}
        if not change:
            raise InvalidInput(f"nothing to change: pass at least one of {', '.join(given)}")
        return self._set("user.set", user_id, change)

    def pause(
        self,
        user_id: str,
        *,
        note: str | None = None,
        until: datetime | float | None = None,
    ) -> UserSettings:
        """Stop handing out the tasks of a user until resumed, or until a time; `note` says why.

        Raises ConfigurationError for an invalid note or time.
        """
        self._guard.require("operator", "pause users")
        self._context.check_user(user_id)
        told = {"paused": True, "note": note, "until": until}
        details = {name: value for name, value in told.items() if value is not None}
        with self._changing("user.pause", user_id, details):
            by = self._guard.actor.name
            return self._context.queue.pause_user(user_id, note=note, by=by, until=until)

    def resume(self, user_id: str) -> UserSettings:
        """Hand out the tasks of a user again."""
        self._guard.require("operator", "resume users")
        self._context.check_user(user_id)
        return self._set("user.resume", user_id, {"paused": False})

    def purge(
        self,
        user_id: str,
        *,
        dry_run: bool = True,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Cancel all waiting and delayed tasks of a user, and return how many.

        A dry run, the default, only counts. Running tasks are not affected.
        """
        self._guard.require("viewer" if dry_run else "admin", "drop the backlog of users")
        self._context.check_user(user_id)
        people = self._context.people
        waiting = people.waiting(user_id)
        if dry_run:
            return waiting
        done = 0
        with self._changing("user.purge", user_id, {"waiting": waiting}) as entry:
            # At most as many as were counted: tasks pushed meanwhile stay.
            while done < waiting and (
                count := people.purge(user_id, min(PURGE_CHUNK, waiting - done))
            ):
                done += count
                entry.add(cancelled=done)
                if progress is not None:
                    progress(done, waiting)
        return done

    def _set(self, action: str, user_id: str, change: Mapping[str, Any]) -> UserSettings:
        with self._changing(action, user_id, change):
            return self._context.queue.set_user(user_id, **change)

    def _changing(self, action: str, user_id: str, details: Mapping[str, Any]) -> Any:
        tenant = self._context.queue.tenant_of(user_id)
        return self._guard.change(action, user_id, tenant=tenant, details=details)

    def _since(self, minutes: int) -> datetime:
        check_count(minutes, "minutes", least=1, most=MAX_MINUTES)
        return self._context.now() - timedelta(minutes=minutes)


def _offset(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not isinstance(cursor, str) or not re.fullmatch(r"\d{1,9}", cursor, re.ASCII):
        raise bad_cursor(cursor, InvalidInput)
    return int(cursor)
