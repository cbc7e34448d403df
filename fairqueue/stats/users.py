"""Statistics of users and tenants: waiting and running tasks, and their shares of service."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Self

from fairqueue.clock import from_ms, to_ms
from fairqueue.errors import InvalidInput, RedisUnavailable
from fairqueue.link.connection import Link
from fairqueue.link.merging import merged_names
from fairqueue.link.operation import Ask, Call, Now, Operation, operation, steps
from fairqueue.link.owners import Owner
from fairqueue.link.partitions import (
    Partitioned,
    at_owner,
    at_part,
    everywhere,
    everywhere_numbered,
    partition_of,
    whole,
)
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
MAX_SUMMED = 1000  # users whose weights are summed to compute fair shares, in one partition
MAX_SUMMED_IN_ALL = 10_000  # in all partitions
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
    most 1,000 are counted, 10,000 over partitions; with more, `entitled` is too large. The others
    are cached for ten seconds.

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


class _Figures(NamedTuple):
    """The facts of some owners or tenants, the start of the window, and all runs that ended."""

    facts: list[Facts]
    window_ms: int
    ended: int


class UserStats(Partitioned):
    """The users and the tenants of one queue."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._delays = DelayIndex(link)
        self._demands: dict[tuple[int, str], Demand] = {}

    def _twin(self, part: Any) -> Self:
        twin = super()._twin(part)
        twin._delays, twin._demands = self._delays.at(part), {}
        return twin

    @operation
    @whole
    def active(self, limit: int = MAX_LISTED, tenant: str | None = None) -> Operation[list[Owner]]:
        """Return users with waiting or running tasks, those with the most waiting ones first.

        At most 1,000 each are compared of those who are served next, who cannot be served, who have
        running tasks, and who wait for slots, in each partition; or 1,000 users of the tenant.
        Raises InvalidInput for a bad limit or tenant.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        if tenant is not None:
            twin = self.part_of(None, _tenant(tenant))
            found = yield from at_part(twin, twin._by_backlog(limit, tenant=tenant))
        else:
            parts = yield from everywhere(self, lambda twin: twin._by_backlog(limit))
            found = sorted(chain.from_iterable(parts))[:limit]
        return [Owner.of_key(key) for _, _, key in found]

    @operation
    @whole
    def active_tenants(self, limit: int = MAX_LISTED) -> Operation[list[str]]:
        """Return tenants with waiting or running tasks, those with the most waiting ones first.

        Those are compared that `active` looks at. Raises InvalidInput for a bad limit.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        parts = yield from everywhere(self, lambda twin: twin._by_backlog(limit, whole=1))
        owners = [Owner.of_key(key) for _, _, key in sorted(chain.from_iterable(parts))[:limit]]
        return [owner.tenant for owner in owners if owner.tenant is not None]

    def _by_backlog(
        self, limit: int, *, tenant: str = "", whole: int = 0
    ) -> Operation[list[tuple[int, int, str]]]:
        """Return those with waiting or running tasks, the largest backlog first.

        For each the numbers of its waiting and running tasks, negative, and its name in Redis.
        """
        names = yield Call("active_users", limit=MAX_LISTED, tenant=tenant, whole=whole)
        keys = [key for name in names if (key := valid_key(name)) is not None]
        found = sorted(
            (-waiting, -running, key)
            for key, waiting, running in (yield from self._counts(keys))
            if waiting or running
        )
        return found[:limit]

    def _counts(self, keys: list[str]) -> Operation[list[tuple[str, int, int]]]:
        """Return each owner or tenant with the numbers of its waiting and its running tasks."""
        found: list[tuple[str, int, int]] = []
        for part in in_parts(keys, COUNTED_CHUNK):
            flat = [int(count) for count in (yield Call("backlogs", rest=part))]
            found += zip(part, flat[::2], flat[1::2], strict=True)
        return found

    @operation
    @whole
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
        start = "" if prefix is None else check_name(prefix, "prefix")
        within = _tenant(tenant)

        def listed(twin: Self, after: bytes, most: int) -> Operation[Any]:
            yield from steps(twin._delays.update)()
            return (yield Call("list_users", after=after, prefix=start, tenant=within, limit=most))

        store = self if tenant is None else self.part_of(None, tenant)
        return Page(*(yield from merged_names(store, listed, _owner_at, limit, cursor)))

    @operation
    @whole
    def tenants(
        self, limit: int = 100, cursor: str | None = None, prefix: str | None = None
    ) -> Operation[Page[str]]:
        """Return a page of all tenants: those with users, schedules or settings, in order.

        Raises InvalidInput naming the value.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        start = "" if prefix is None else check_tenant(prefix, InvalidInput)

        def listed(_: Self, after: bytes, most: int) -> Operation[Any]:
            return (yield Call("list_tenants", after=after, prefix=start, limit=most))

        return Page(*(yield from merged_names(self, listed, _tenant_at, limit, cursor)))

    @operation
    @whole
    def read(self, owners: Sequence[Owner], since: datetime | float) -> Operation[list[UserInfo]]:
        """Return the state of at most 100 users, in their order, with their shares since a time.

        Unknown users have `is_known` False. Those of partitions that do not answer, if that is
        tolerated, are left out. Raises InvalidInput naming the value.
        """
        check_count(len(owners), "number of users", most=MAX_READ)
        listed = [check_owner(owner) for owner in owners]
        since_ms = to_ms(since, "since")
        found: dict[Owner, UserInfo] = {}
        yield from self._update_delays(listed)
        takers = yield from self._has_takers()
        for tenant in dict.fromkeys(owner.tenant or "" for owner in listed):
            own = [owner for owner in dict.fromkeys(listed) if (owner.tenant or "") == tenant]
            sharers = own + ([Owner.whole(tenant)] if tenant else [])
            figures = yield from self._figures(sharers, since_ms, tenant, takers=takers)
            facts = {each.key: each for each in figures.facts}
            group = facts.pop(Owner.whole(tenant).key, None) if tenant else None
            # Before any run has ended: each user's share of the first one.
            demand = yield from self._demand(since_ms, tenant)
            level = demand.level_with([*facts.values()], figures.ended or 1)
            for owner in own:
                if (each := facts.get(owner.key)) is None:
                    continue
                found[owner] = UserInfo(
                    user_id=owner.user_id,
                    users_ahead=each.ahead if group is None or group.ahead is not None else None,
                    tenant=owner.tenant,
                    **each.fields(figures.window_ms, figures.ended, level, owner.tenant, group),
                )
        return [found[owner] for owner in listed if owner in found]

    @operation
    @whole
    def read_tenants(
        self, tenants: Sequence[str], since: datetime | float
    ) -> Operation[list[TenantInfo]]:
        """Return the state of at most 100 tenants, in their order, with their shares since a time.

        Unknown tenants have `is_known` False. Those of partitions that do not answer, if that is
        tolerated, are left out. Raises InvalidInput naming the value.
        """
        check_count(len(tenants), "number of tenants", most=MAX_READ)
        names = [check_tenant(tenant, InvalidInput) for tenant in tenants]
        since_ms = to_ms(since, "since")
        sharers = [Owner.whole(name) for name in names]
        yield from self._update_delays(sharers)
        takers = yield from self._has_takers()
        figures = yield from self._figures(sharers, since_ms, "", takers=takers)
        level = (yield from self._demand(since_ms)).level_with(figures.facts, figures.ended or 1)
        facts = {each.key: each for each in figures.facts}
        found = []
        for name in names:
            if (each := facts.get(Owner.whole(name).key)) is None:
                continue
            jain = None
            if each.ended:
                jain = (yield from self._demand(since_ms, name)).jain(each.ended)
            found.append(
                TenantInfo(
                    tenant=name,
                    users=each.users,
                    tenants_ahead=each.ahead,
                    jain=jain,
                    **each.fields(figures.window_ms, figures.ended, level, name),
                )
            )
        return found

    def _update_delays(self, owners: Iterable[Owner]) -> Operation[None]:
        """Bring the index of delayed tasks up to date where owners have theirs."""
        involved = sorted({self._number_of(owner) for owner in owners})
        yield from everywhere_numbered(
            self, lambda twin: steps(twin._delays.update)(), only=involved
        )

    def _number_of(self, owner: Owner) -> int:
        return partition_of(owner.user_id, owner.tenant, max(1, len(self.link.parts)))

    def _figures(
        self, sharers: Sequence[Owner], since_ms: int, tenant: str, *, takers: bool
    ) -> Operation[_Figures]:
        """The figures of users of a tenant, or of those who share the whole queue.

        Without those whose partitions do not answer. Raises RedisUnavailable if that is all.
        """
        if tenant:
            twin = self.part_of(None, tenant)
            keys = [owner.key for owner in sharers]
            return (yield from at_part(twin, twin._facts(keys, since_ms, tenant, takers=takers)))
        placed: dict[int, list[str]] = {}
        for owner in sharers:
            placed.setdefault(self._number_of(owner), []).append(owner.key)
        parts = yield from everywhere(
            self,
            lambda twin: twin._facts(
                placed.get(twin.link.keys.partition, []), since_ms, "", takers=takers
            ),
        )
        facts = [*chain.from_iterable(part.facts for part in parts)]
        if sharers and not facts:
            raise RedisUnavailable("the partition of the queue that has them did not answer")
        if self.link.parts:
            facts = yield from self._among_all(facts)
        window_ms = max(part.window_ms for part in parts)
        return _Figures(facts, window_ms, sum(part.ended for part in parts))

    def _among_all(self, facts: list[Facts]) -> Operation[list[Facts]]:
        """Add those of other partitions who are served before to the facts of users and tenants."""
        waiting = [each for each in facts if each.level is not None]
        if not waiting:
            return facts
        floors: list[float] = []
        if any(each.clock_level is not None for each in waiting):
            heads = yield from everywhere(self, partial(_seats_before, ()))
            floors = [float(head) for head, *_ in heads if head]
        levels = []
        for each in waiting:
            # A clock that rests moves to where the others are.
            rests = each.clock_level is not None and floors
            shift = max(0.0, min(floors) - (each.clock_level or 0.0)) if rests else 0.0
            levels.append((each.level or 0.0) + shift)
        counts = yield from everywhere_numbered(self, partial(_seats_before, levels))
        more: dict[str, int] = {}
        for number, (_, *before) in counts:
            for each, count in zip(waiting, before, strict=True):
                if self._number_of(Owner.of_key(each.key)) != number:
                    more[each.key] = more.get(each.key, 0) + int(count)
        return [replace(each, before=each.before + more.get(each.key, 0)) for each in facts]

    def _facts(
        self, keys: list[str], since_ms: int, tenant: str, *, takers: bool
    ) -> Operation[_Figures]:
        """The figures of owners or tenants of one partition, and of all its runs."""
        facts: list[Facts] = []
        window_ms, ended = since_ms, 0
        for part in in_parts(keys, READ_CHUNK) if keys else [keys]:
            now_ms, window_ms, ended, rows = yield from self._rows(part, since_ms, tenant)
            facts += [
                Facts.read(key, row, now_ms, takers=takers)
                for key, row in zip(part, rows, strict=True)
            ]
        return _Figures(facts, window_ms, ended)

    def _has_takers(self) -> Operation[bool]:
        """Return whether a worker takes tasks; without heartbeats, whether one holds a lease."""
        alive = yield from steps(WorkerStore(self.link).alive)()
        if alive:
            return not all(worker.draining for worker in alive)
        return any((yield from everywhere(self, lambda twin: twin._has_leases())))

    def _has_leases(self) -> Operation[bool]:
        after = f"({(yield Now())}"
        return bool((yield Ask(("ZCOUNT", self.link.keys["leases"], after, "+inf")))[0])

    @operation
    @at_owner
    def knows(self, owner: Owner) -> Operation[bool]:
        """Return whether the queue has any data of a user. Raises InvalidInput for a bad name."""
        check_owner(owner)
        yield from steps(self._delays.update)()
        *_, (row,) = yield from self._rows([owner.key], 0)
        return int(row[13]) > 0

    @operation
    @whole
    def overview(
        self, snapshot: QueueSnapshot, since: datetime | float, tenant: str | None = None
    ) -> Operation[FairnessView]:
        """Return how evenly tenants are served, or the users of one of them.

        From `TaskQueue.inspect()` and the ended runs.
        """
        since_ms = to_ms(since, "since")
        figures = yield from self._figures((), since_ms, _tenant(tenant), takers=False)
        demand = yield from self._demand(since_ms, _tenant(tenant))
        backlogged = snapshot.active_users
        if tenant is not None or (snapshot.active_tenants and not demand.is_cut):
            backlogged = sum(1 for waiting in demand.waiting.values() if waiting)
        return FairnessView(
            jain=demand.jain(figures.ended),
            users=len(demand.weights),
            has_more=demand.is_cut,
            backlogged=backlogged,
            ended=figures.ended,
            window_start=from_ms(figures.window_ms),
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
        if tenant and self.link.parts:
            twin = self.part_of(None, tenant)
            return (yield from at_part(twin, twin._demand(since_ms, tenant)))
        now_ms = yield Now()
        key = (round((now_ms - since_ms) / 1000), tenant)
        known = self._demands.get(key)
        if known is not None and 0 <= now_ms - known.at_ms < DEMAND_MS:
            return known
        count = max(1, len(self.link.parts))
        most = min(MAX_SUMMED, MAX_SUMMED_IN_ALL // count)
        parts = yield from everywhere(self, lambda twin: twin._find_demand(since_ms, tenant, most))
        found = Demand.merged(parts) if len(parts) > 1 else parts[0]
        if len(parts) == count:
            if len(self._demands) >= MAX_DEMANDS:
                self._demands.clear()
            self._demands[key] = found
        return found

    def _find_demand(self, since_ms: int, tenant: str, most: int) -> Operation[Demand]:
        found = Demand(at_ms=(yield Now()), most=most)
        after = b""
        for _ in range(0, most, SUMMED_CHUNK):
            after, *flat = yield Call(
                "users_in_window",
                since_ms=since_ms,
                tenant=tenant,
                after=after,
                limit=SUMMED_CHUNK,
                most=most + 1,  # one more shows that there are more
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
        return found

    @operation
    @whole
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
    @at_owner
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
    @whole
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
        call = partial(
            _run_counts,
            since_ms,
            until_ms,
            buckets,
            _tenant(tenant),
            [check_sharer(user).key for user in listed],
        )
        if tenant is not None:
            twin = self.part_of(None, tenant)
            parts = [(yield from at_part(twin, call(twin)))]
        else:
            parts = yield from everywhere(self, call)
        # Each partition counts the runs of all: those that it does not have are none.
        everybody, *rows = [
            [sum(column) for column in zip(*counts, strict=True)]
            for counts in zip(*(counts for _, counts in parts), strict=True)
        ]
        width = (until_ms - since_ms) / buckets
        return ShareSeries(
            times=[from_ms(int(since_ms + number * width)) for number in range(buckets)],
            users=listed,
            counts=dict(zip(listed, rows, strict=True)),
            others=[max(0, total - sum(own)) for total, *own in zip(everybody, *rows, strict=True)],
            window_start=from_ms(max(window for window, _ in parts)),
        )

    @operation
    @at_owner
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
    @at_owner
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


def _seats_before(levels: Sequence[float], _: object) -> Operation[list[Any]]:
    """What a partition serves next, and how many users and tenants before these levels."""
    answer: list[Any] = yield Call("seats_before", rest=[repr(level) for level in levels])
    return answer


def _run_counts(
    since_ms: int, until_ms: int, buckets: int, tenant: str, keys: list[str], _: object
) -> Operation[tuple[int, list[list[int]]]]:
    """The start of the window in one partition; the ended runs of all and of each, by bucket."""
    window, *counts = yield Call(
        "run_counts",
        since_ms=since_ms,
        until_ms=until_ms,
        buckets=buckets,
        tenant=tenant,
        rest=keys,
    )
    return int(window), [[int(count) for count in row] for row in counts]


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
