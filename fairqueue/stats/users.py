"""Statistics of users and tenants: waiting and running tasks, and their shares of service."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fairqueue.clock import from_ms, to_ms
from fairqueue.cursors import decode_cursor, encode_cursor
from fairqueue.errors import InvalidInput
from fairqueue.link.connection import Link
from fairqueue.link.operation import Ask, Call, Now, Operation, operation, steps
from fairqueue.link.owners import Owner
from fairqueue.models import Page, QueueSnapshot, UserSettings, new_id
from fairqueue.queue.delays import DelayIndex
from fairqueue.queue.workers import WorkerStore
from fairqueue.stats.demand import Demand
from fairqueue.stats.facts import Facts, check_owner, check_sharer, valid_key
from fairqueue.validation import check_count, check_name, check_tenant

MAX_LISTED = 1000  # users in one answer
MAX_READ = 100  # users in one call of `read`
READ_CHUNK = 10  # of them in one script: about 1 ms of server time
COUNTED_CHUNK = 200  # users whose tasks one script counts: less than 1 ms of server time
MAX_SUMMED = 1000  # users whose weights are summed to compute fair shares
SUMMED_CHUNK = 50  # users that one script examines for that: half a ms of server time
DEMAND_MS = 10_000  # how long the demand of all users is cached; a user's own row is always new
MAX_DEMANDS = 128  # cached windows: more than the tenants of a page
MAX_BUCKETS, MAX_SHARED = 60, 10  # of `shares`: each bucket of each user is a look-up
MAX_LOOKS = 100  # updates of the index of delayed tasks, each of some thousand entries
PURGE_CHUNK = 100  # tasks that one script cancels: about 5 ms of server time


@dataclass(frozen=True, slots=True, kw_only=True)
class UserInfo:
    """The state of a user, of a tenant or without one, and their share of service in a window.

    backlog: tasks that wait for a worker, without delayed ones. held: those of the backlog that
    wait because of the limits of their names. delayed: delayed tasks and retries, the first of
    which becomes ready at `delayed_until`. users_ahead: users of the same tenant that are served
    before this one, or, without a tenant, tenants and users without one; None if the user cannot be
    served now or waits only in other pools than "default". oldest_wait: the longest wait among the
    next tasks. wait_p50, wait_p95: waits of the last 20 runs that ended in the window. All waits
    are in seconds.

    ended: runs that ended in the window, without those that did not run. received: their share of
    all runs that ended, or of those of the user's tenant. entitled: the fair share: these runs are
    divided by weight among the users of the tenant (without one: among the tenants and the users
    without one) with waiting, running or ended tasks, and nobody gets more than they wanted. At
    most 1,000 are counted; with more, `entitled` is too large. The others are cached for ten
    seconds.

    state: "served", "waiting", "paused", "capped", "rate limited" or "idle"; `why` explains it. A
    user whose tenant is paused, capped or rate limited is in that state, too.
    window_start: the start of the window, later than requested if the retention of the queue has
    dropped runs. is_known: whether the queue has any data of this user.
    """

    user_id: str
    settings: UserSettings
    backlog: int
    held: int
    users_ahead: int | None
    running: int
    schedules: int
    oldest_wait: float | None
    wait_p50: float | None
    wait_p95: float | None
    ended: int
    received: float
    entitled: float
    state: str
    why: str
    parked_until: datetime | None
    window_start: datetime
    is_known: bool
    delayed: int = 0
    delayed_until: datetime | None = None
    tenant: str | None = None

    @property
    def owner(self) -> Owner:
        """The user and the tenant."""
        return Owner(self.user_id, self.tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantInfo:
    """The state of a tenant and its share of service in a window of time.

    The fields are those of UserInfo, for all users of the tenant together. users: how many it has
    had, at most 10,000. tenants_ahead: tenants, and users without one, that are served before it.
    jain: Jain's index of its users; see FairnessView.
    """

    tenant: str
    settings: UserSettings
    users: int
    backlog: int
    held: int
    tenants_ahead: int | None
    running: int
    schedules: int
    oldest_wait: float | None
    wait_p50: float | None
    wait_p95: float | None
    ended: int
    received: float
    entitled: float
    state: str
    why: str
    parked_until: datetime | None
    window_start: datetime
    is_known: bool
    delayed: int = 0
    delayed_until: datetime | None = None
    jain: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessView:
    """How evenly tenants, and users without one, are served; or the users of one tenant.

    jain: Jain's index of received against entitled service: 1 if all got their fair share, 1/n if
    one got everything, None if no run ended. Those that are paused or have max_running or a rate
    are left out: their own limits decide their share. users: how many had demand in the window, or
    more if `has_more`. backlogged: how many have waiting tasks. ended: runs that ended in the
    window. window_start: as in UserInfo.
    """

    jain: float | None
    users: int
    backlogged: int
    ended: int
    window_start: datetime
    has_more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSeries:
    """Counts of ended runs in buckets that begin at `times`, for some users and for all others.

    A tenant is an Owner whose user id is "".

    Before `window_start` the retention of the queue has dropped runs.
    """

    times: list[datetime]
    users: list[Owner]
    counts: dict[Owner, list[int]]
    others: list[int]
    window_start: datetime


class UserStats:
    """The users and the tenants of one queue."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._delays = DelayIndex(link)
        self._demands: dict[tuple[int, str], Demand] = {}

    @operation
    def active(self, limit: int = MAX_LISTED, tenant: str | None = None) -> Operation[list[Owner]]:
        """Return users with waiting or running tasks, those with the most waiting ones first.

        At most 1,000 each are compared of those who are served next, who cannot be served, who have
        running tasks, and who wait for slots; or 1,000 users of the tenant. Raises InvalidInput for
        a bad limit or tenant.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        names = yield Call("active_users", limit=MAX_LISTED, tenant=_tenant(tenant), whole=0)
        return (yield from self._by_backlog(names, limit))

    @operation
    def active_tenants(self, limit: int = MAX_LISTED) -> Operation[list[str]]:
        """Return tenants with waiting or running tasks, those with the most waiting ones first.

        Those are compared that `active` looks at. Raises InvalidInput for a bad limit.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        names = yield Call("active_users", limit=MAX_LISTED, tenant="", whole=1)
        owners = yield from self._by_backlog(names, limit)
        return [owner.tenant for owner in owners if owner.tenant is not None]

    def _by_backlog(self, names: list[bytes], limit: int) -> Operation[list[Owner]]:
        """Return those with waiting or running tasks, the largest backlog first."""
        keys = [key for name in names if (key := valid_key(name)) is not None]
        found = sorted(
            (-waiting, -running, key)
            for key, waiting, running in (yield from self._counts(keys))
            if waiting or running
        )
        return [Owner.of_key(key) for _, _, key in found[:limit]]

    def _counts(self, keys: list[str]) -> Operation[list[tuple[str, int, int]]]:
        """Return each owner or tenant with the numbers of its waiting and its running tasks."""
        found: list[tuple[str, int, int]] = []
        for part in in_parts(keys, COUNTED_CHUNK):
            flat = [int(count) for count in (yield Call("backlogs", rest=part))]
            found += zip(part, flat[::2], flat[1::2], strict=True)
        return found

    @operation
    def names(
        self,
        limit: int = 100,
        cursor: str | None = None,
        tenant: str | None = None,
        prefix: str | None = None,
    ) -> Operation[Page[Owner]]:
        """Return a page of all users of the queue, sorted by the bytes of their ids, then tenants.

        These are the users with waiting, delayed or running tasks, schedules, stored runs, or
        settings, and all users that a tenant ever had. While more than 1,000 users have running
        tasks, a user with nothing else may be missing. A page with a cursor may be short. Raises
        InvalidInput naming the value.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        yield from steps(self._delays.update)()
        more, *found = yield Call(
            "list_users",
            after=b"" if cursor is None else decode_cursor(cursor),
            prefix="" if prefix is None else check_name(prefix, "prefix"),
            tenant=_tenant(tenant),
            limit=limit,
        )
        owners = [owner for place in found if (owner := _owner_at(place)) is not None]
        return Page(owners, encode_cursor(found[-1]) if more and found else None)

    @operation
    def tenants(
        self, limit: int = 100, cursor: str | None = None, prefix: str | None = None
    ) -> Operation[Page[str]]:
        """Return a page of all tenants: those with users, schedules or settings, in order.

        Raises InvalidInput naming the value.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        more, *found = yield Call(
            "list_tenants",
            after=b"" if cursor is None else decode_cursor(cursor),
            prefix="" if prefix is None else check_tenant(prefix, InvalidInput),
            limit=limit,
        )
        names = [name for each in found if (name := _tenant_at(each)) is not None]
        return Page(names, encode_cursor(found[-1]) if more and found else None)

    @operation
    def read(self, owners: Sequence[Owner], since: datetime | float) -> Operation[list[UserInfo]]:
        """Return the state of at most 100 users, in their order, with their shares since a time.

        Unknown users have `is_known` False. Raises InvalidInput naming the value.
        """
        check_count(len(owners), "number of users", most=MAX_READ)
        listed = [check_owner(owner) for owner in owners]
        since_ms = to_ms(since, "since")
        found: dict[Owner, UserInfo] = {}
        yield from steps(self._delays.update)()
        for tenant in dict.fromkeys(owner.tenant or "" for owner in listed):
            own = [owner for owner in dict.fromkeys(listed) if (owner.tenant or "") == tenant]
            keys = [owner.key for owner in own] + ([Owner.whole(tenant).key] if tenant else [])
            facts, window_ms, ended = yield from self._facts(keys, since_ms, tenant)
            group = facts.pop() if tenant else None
            # Before any run has ended: each user's share of the first one.
            demand = yield from self._demand(since_ms, tenant)
            level = demand.level_with(facts, ended or 1)
            for owner, each in zip(own, facts, strict=True):
                found[owner] = UserInfo(
                    user_id=owner.user_id,
                    users_ahead=each.ahead if group is None or group.ahead is not None else None,
                    tenant=owner.tenant,
                    **each.fields(window_ms, ended, level, owner.tenant, group),
                )
        return [found[owner] for owner in listed]

    @operation
    def read_tenants(
        self, tenants: Sequence[str], since: datetime | float
    ) -> Operation[list[TenantInfo]]:
        """Return the state of at most 100 tenants, in their order, with their shares since a time.

        Unknown tenants have `is_known` False. Raises InvalidInput naming the value.
        """
        check_count(len(tenants), "number of tenants", most=MAX_READ)
        names = [check_tenant(tenant, InvalidInput) for tenant in tenants]
        since_ms = to_ms(since, "since")
        yield from steps(self._delays.update)()
        keys = [Owner.whole(name).key for name in names]
        facts, window_ms, ended = yield from self._facts(keys, since_ms, "")
        level = (yield from self._demand(since_ms)).level_with(facts, ended or 1)
        found = []
        for name, each in zip(names, facts, strict=True):
            jain = None
            if each.ended:
                jain = (yield from self._demand(since_ms, name)).jain(each.ended)
            found.append(
                TenantInfo(
                    tenant=name,
                    users=each.users,
                    tenants_ahead=each.ahead,
                    jain=jain,
                    **each.fields(window_ms, ended, level, name),
                )
            )
        return found

    def _facts(
        self, keys: list[str], since_ms: int, tenant: str
    ) -> Operation[tuple[list[Facts], int, int]]:
        """The facts of owners or tenants, the start of the window, and its ended runs."""
        takers = yield from self._has_takers()
        facts: list[Facts] = []
        window_ms, ended = since_ms, 0
        for part in in_parts(keys, READ_CHUNK):
            now_ms, window_ms, ended, rows = yield from self._rows(part, since_ms, tenant)
            facts += [
                Facts.read(key, row, now_ms, takers=takers)
                for key, row in zip(part, rows, strict=True)
            ]
        return facts, window_ms, ended

    def _has_takers(self) -> Operation[bool]:
        """Return whether a worker takes tasks; without heartbeats, whether one holds a lease."""
        alive = yield from steps(WorkerStore(self.link).alive)()
        if alive:
            return not all(worker.draining for worker in alive)
        after = f"({(yield Now())}"
        return bool((yield Ask(("ZCOUNT", self.link.keys["leases"], after, "+inf")))[0])

    @operation
    def knows(self, owner: Owner) -> Operation[bool]:
        """Return whether the queue has any data of a user. Raises InvalidInput for a bad name."""
        check_owner(owner)
        yield from steps(self._delays.update)()
        *_, (row,) = yield from self._rows([owner.key], 0)
        return int(row[-2]) > 0

    @operation
    def overview(
        self, snapshot: QueueSnapshot, since: datetime | float, tenant: str | None = None
    ) -> Operation[FairnessView]:
        """Return how evenly tenants are served, or the users of one of them.

        From `TaskQueue.inspect()` and the ended runs.
        """
        since_ms = to_ms(since, "since")
        _, window_ms, ended, _ = yield from self._rows([], since_ms, _tenant(tenant))
        demand = yield from self._demand(since_ms, _tenant(tenant))
        backlogged = snapshot.active_users
        if tenant is not None or (snapshot.active_tenants and not demand.is_cut):
            backlogged = sum(1 for waiting in demand.waiting.values() if waiting)
        return FairnessView(
            jain=demand.jain(ended),
            users=len(demand.weights),
            has_more=demand.is_cut,
            backlogged=backlogged,
            ended=ended,
            window_start=from_ms(window_ms),
        )

    def _rows(
        self, keys: list[str], since_ms: int, tenant: str = ""
    ) -> Operation[tuple[int, int, int, list[Any]]]:
        """Return the time, the start of the window, its ended runs, and a row for each owner."""
        now_ms, window_ms, ended, *rows = yield Call(
            "user_stats", since_ms=since_ms, tenant=tenant, rest=keys
        )
        return int(now_ms), int(window_ms), int(ended), rows

    def _demand(self, since_ms: int, tenant: str = "") -> Operation[Demand]:
        """Return those with demand in a window, cached for ten seconds.

        Without a tenant these are tenants and users without one. Finding them examines each, in
        several scripts.
        """
        now_ms = yield Now()
        key = (round((now_ms - since_ms) / 1000), tenant)
        known = self._demands.get(key)
        if known is not None and 0 <= now_ms - known.at_ms < DEMAND_MS:
            return known
        found = Demand(at_ms=now_ms, most=MAX_SUMMED)
        after = b""
        for _ in range(0, MAX_SUMMED, SUMMED_CHUNK):
            after, *flat = yield Call(
                "users_in_window",
                since_ms=since_ms,
                tenant=tenant,
                after=after,
                limit=SUMMED_CHUNK,
                most=MAX_SUMMED + 1,  # one more shows that there are more
            )
            found.add(flat)
            if not after or found.is_cut:
                break
        found.is_cut = found.is_cut or bool(after)
        if tenant:  # the list has all users that ended runs, and no others
            active = yield Call("active_users", limit=MAX_LISTED, tenant=tenant, whole=0)
            found.add_active([each for name in active if (each := valid_key(name)) is not None])
        counts = yield from self._counts(list(found.weights))
        found.open = {key: waiting + running for key, waiting, running in counts}
        found.waiting = {key: waiting for key, waiting, _ in counts}
        if len(self._demands) >= MAX_DEMANDS:
            self._demands.clear()
        self._demands[key] = found
        return found

    @operation
    def top(
        self, since: datetime | float, limit: int, tenant: str | None = None
    ) -> Operation[list[Owner]]:
        """Return those with the most ended runs since a time, cached for ten seconds.

        These are users of the tenant; without one, tenants and users without a tenant. At most
        1,000 are compared. Raises InvalidInput naming the value.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        ended = (yield from self._demand(to_ms(since, "since"), _tenant(tenant))).ended
        found = sorted(ended, key=lambda key: (-ended[key], key))[:limit]
        return [Owner.of_key(key) for key in found]

    @operation
    def next_task(self, owner: Owner) -> Operation[str | None]:
        """Return the id of the user's task that is claimed next, or else becomes ready next.

        None if no task waits or is delayed. Tasks of the default pool come first.
        """
        check_owner(owner)
        part = (*owner.range, "LIMIT", 0, 1)
        keys = self.link.keys
        yield from steps(self._delays.update)()
        waiting, held, delayed = yield Ask(
            *(("ZRANGEBYLEX", keys[key], *part) for key in ("backlog", "held", "delayed_index"))
        )
        for members, place in ((waiting, 2), (held, 3), (delayed, 2)):
            for member in members:
                parts = member.decode("utf-8", "replace").split("\0")
                if len(parts) > place:  # or else it is damaged, and the next claim drops it
                    return str(parts[place])
        return None

    @operation
    def shares(
        self,
        since: datetime | float,
        until: datetime | float,
        buckets: int,
        users: Sequence[Owner],
        tenant: str | None = None,
    ) -> Operation[ShareSeries]:
        """Count the ended runs of at most 10 users, and of all others, in at most 60 buckets.

        With a tenant, the others are its users. Raises InvalidInput naming the value.
        """
        check_count(buckets, "buckets", least=1, most=MAX_BUCKETS)
        since_ms, until_ms = to_ms(since, "since"), to_ms(until, "until")
        if since_ms >= until_ms:
            raise InvalidInput(f"since must be before until ({until!r}), not {since!r}")
        check_count(len(users), "number of users", most=MAX_SHARED)
        listed = list(dict.fromkeys(users))
        window, everybody, *rows = yield Call(
            "run_counts",
            since_ms=since_ms,
            until_ms=until_ms,
            buckets=buckets,
            tenant=_tenant(tenant),
            rest=[check_sharer(user).key for user in listed],
        )
        width = (until_ms - since_ms) / buckets
        return ShareSeries(
            times=[from_ms(int(since_ms + number * width)) for number in range(buckets)],
            users=listed,
            counts={user: [int(n) for n in row] for user, row in zip(listed, rows, strict=True)},
            others=[
                max(0, int(total) - sum(map(int, own)))
                for total, *own in zip(everybody, *rows, strict=True)
            ],
            window_start=from_ms(int(window)),
        )

    @operation
    def waiting(self, owner: Owner) -> Operation[int]:
        """Count the waiting and delayed tasks of a user or a tenant: what `purge` would cancel.

        It examines all delayed tasks of the queue, in short steps, because an older version may
        have delayed some that the index of users does not contain.
        """
        check_sharer(owner)
        yield from steps(self._delays.rebuild)()
        yield from steps(self._delays.update)()  # drops surplus entries
        keys = self.link.keys
        places = ("backlog", "held", "delayed_index")
        counts = yield Ask(*(("ZLEXCOUNT", keys[place], *owner.range) for place in places))
        return sum(map(int, counts))

    @operation
    def purge(self, owner: Owner, limit: int = PURGE_CHUNK) -> Operation[int]:
        """Cancel at most `limit` (100) waiting tasks of a user or a tenant, and return how many.

        Delayed tasks, retries and tasks held by limits are included; running tasks are not. The
        history shows them as cancelled. Call it until it returns 0. Raises InvalidInput naming the
        value.
        """
        check_sharer(owner)
        check_count(limit, "limit", least=1, most=PURGE_CHUNK)
        for _ in range(MAX_LOOKS):  # tasks that an older version delayed must not be left to run
            if (yield from steps(self._delays.update)()):
                break
        return int((yield Call("purge", op=new_id(), owner=owner.key, limit=limit)))


def in_parts(users: list[str], size: int) -> Iterator[list[str]]:
    """Return users in chunks, so that no script runs for long."""
    return (users[i : i + size] for i in range(0, len(users), size))


def _tenant(tenant: str | None) -> str:
    return "" if tenant is None else check_tenant(tenant)


def _owner_at(place: bytes) -> Owner | None:
    """Return the user at a place of the list of users; None if it is not a valid one."""
    user, _, tenant = place.partition(b"\0")
    try:
        return check_owner(Owner(user.decode(), tenant.decode() or None))
    except ValueError:
        return None


def _tenant_at(place: bytes) -> str | None:
    """Return the tenant at a place of the list of tenants; None if it is not a valid one."""
    try:
        return check_tenant(place.decode(), InvalidInput)
    except ValueError:
        return None
