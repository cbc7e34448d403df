"""Say how the users of a queue fare: what waits and runs, and what each got of all service."""

import base64
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fairqueue.clock import LATEST_MS, from_ms, to_ms
from fairqueue.errors import InvalidInput, shown
from fairqueue.link.connection import Link
from fairqueue.models import UNREADABLE, Page, QueueSnapshot, UserSettings, new_id, text_or_none
from fairqueue.queue.delays import index_all, index_delayed
from fairqueue.queue.records import without_past_pause
from fairqueue.queue.snapshot import jain_index
from fairqueue.queue.workers import WorkerStore
from fairqueue.reasons import when
from fairqueue.validation import check_count, check_name, check_tenant

MAX_LISTED = 1000  # users in one answer
MAX_READ = 100  # users that `read` takes
READ_CHUNK = 10  # of them in one call: about 1 ms of the server's time
COUNTED_CHUNK = 200  # users whose tasks one call counts: less than 1 ms of the server's time
MAX_SUMMED = 1000  # users whose weights are summed for what each is entitled to
SUMMED_CHUNK = 50  # users that one call looks at for that: half a ms of the server's time
DEMAND_MS = 10_000  # for so long it is known who wants service; a user's own row is always new
MAX_DEMANDS = 32  # windows for which that is kept
MAX_BUCKETS, MAX_SHARED = 60, 10  # of `shares`: each bucket of each user is a look-up
AFTER_THE_LAST_MS = 253_402_300_799_000  # "when the run before it ends": lua/lib/delays.lua
MAX_LOOKS = 100  # at delayed tasks that are not in the index, each at some thousand of them
PURGE_CHUNK = 100  # tasks that one call cancels: some 5 ms of the server's time


@dataclass(frozen=True, slots=True, kw_only=True)
class UserInfo:
    """How a user fares.

    backlog: tasks that wait for a worker; delayed ones are not among them, of which there are
    `delayed`, retries included; the first becomes ready at `delayed_until`. oldest_wait: for how
    many seconds the longest waiting of its next tasks waits. wait_p50, wait_p95: seconds that the
    last 20 of its runs which ended in the window had waited. ended: runs that ended in the window;
    what was cancelled before it ran is none of them. received: their share of all that ended in it.
    entitled: the share that would have been fair: what ended is shared out by weight among those
    who want service, which have tasks that wait or run, or had some that ended, and nobody gets
    more than it wanted. Of more than 1,000 such users some are counted, and it is too large then.
    Who the others are is as it was up to ten seconds ago.

    held: those of the backlog that wait for room in the limits of their names. users_ahead: how
    many users are served before it; None if it may not be served.

    state: "served", "waiting", "paused", "capped", "rate limited" or "idle"; `why` says it in a
    sentence. window_start: when the window begins, which is later than it was asked for where runs
    have been dropped by the retention of the queue. is_known: whether the queue has anything of it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessView:
    """How evenly users are served.

    jain: Jain's index over what users received in the window, each against what it was entitled to:
    1 if everybody got the share that is theirs, 1/n if one had all. Users that are paused or have a
    max_running or a rate are left out: what they get is not for the queue to decide. None if
    nothing ended. users: how many want service in the window; with `has_more` there are more than
    so many. backlogged: how many have waiting tasks. ended: runs that ended in the window.
    window_start: as in UserInfo.
    """

    jain: float | None
    users: int
    backlogged: int
    ended: int
    window_start: datetime
    has_more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSeries:
    """Runs that ended in stretches of time, which begin at `times`: of some users, and of others.

    Before `window_start` some have been dropped by the retention of the queue.
    """

    times: list[datetime]
    users: list[str]
    counts: dict[str, list[int]]
    others: list[int]
    window_start: datetime


class PeopleStore:
    """The users of one queue."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._demands: dict[tuple[int, str], _Demand] = {}

    def active(self, limit: int = MAX_LISTED, tenant: str | None = None) -> list[str]:
        """Users with waiting or running tasks, those with the most waiting ones first.

        They are put in order among 1,000 each of those who are next to be served, may not be
        served, have running tasks, and wait for slots; and 1,000 users of the tenant. Raises
        InvalidInput for a bad limit or tenant.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        names = self._link.run("active_users", limit=MAX_LISTED, tenant=_tenant(tenant))
        users = [user for name in names if (user := _user(name)) is not None]
        found: list[tuple[int, int, str]] = []
        for part in in_parts(users, COUNTED_CHUNK):
            counts = [int(count) for count in self._link.run("backlogs", rest=part)]
            found += [
                (-waiting, -running, user)
                for user, waiting, running in zip(part, counts[::2], counts[1::2], strict=True)
                if waiting or running
            ]
        return [user for _, _, user in sorted(found)[:limit]]

    def names(
        self,
        limit: int = 100,
        cursor: str | None = None,
        tenant: str | None = None,
        prefix: str | None = None,
    ) -> Page[str]:
        """A page of all users that the queue knows, in the order of their names' bytes.

        These are the users with waiting, delayed or running tasks, schedules, ended runs that are
        kept, or settings; of a tenant, all that it ever had. While more than 1,000 users have
        running tasks, one that has nothing else is left out. A page may be short although its
        cursor says that there is more. Raises InvalidInput for a bad value.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        index_delayed(self._link)
        more, found = self._link.run(
            "list_users",
            after=_decode_cursor(cursor),
            prefix="" if prefix is None else check_name(prefix, "prefix"),
            tenant=_tenant(tenant),
            limit=limit,
        )
        users = [user for name in found if (user := _user(name)) is not None]
        return Page(users, _encode_cursor(found[-1]) if more and found else None)

    def read(self, user_ids: Sequence[str], since: datetime | float) -> list[UserInfo]:
        """How at most 100 users fare, in their order; shares are those since a moment.

        Of a user that the queue does not know, the answer says so. Raises InvalidInput for a bad
        value.
        """
        if len(user_ids) > MAX_READ:
            raise InvalidInput(f"{len(user_ids)} users are too many: {MAX_READ} at most")
        users = [check_name(user, "user_id") for user in user_ids]
        since_ms = to_ms(since, "since")
        index_delayed(self._link)
        takers = self._has_takers()
        facts: list[_Facts] = []
        window_ms = ended = 0
        for part in in_parts(users, READ_CHUNK):
            now_ms, window_ms, ended, rows = self._people(part, since_ms)
            facts += [
                _Facts.read(user, row, now_ms, takers=takers)
                for user, row in zip(part, rows, strict=True)
            ]
        if not facts:
            return []
        # Before anything has ended: what each would be entitled to of the first.
        level = self._demand(since_ms).level_with(facts, ended or 1)
        return [each.info(window_ms, ended, level) for each in facts]

    def _has_takers(self) -> bool:
        """Whether a worker takes tasks; one without heartbeats is there while it holds a lease."""
        alive = WorkerStore(self._link).alive()
        if alive:
            return not all(worker.draining for worker in alive)
        after = f"({self._link.now_ms()}"
        return bool(self._link.ask(("ZCOUNT", self._link.keys["leases"], after, "+inf"))[0])

    def knows(self, user_id: str) -> bool:
        """Whether the queue has anything of a user. Raises InvalidInput for a bad name."""
        check_name(user_id, "user_id")
        index_delayed(self._link)
        *_, (row,) = self._people([user_id], 0)
        return int(row[-1]) > 0

    def overview(self, snapshot: QueueSnapshot, since: datetime | float) -> FairnessView:
        """How evenly users are served: `TaskQueue.inspect()` and what ended since a moment."""
        since_ms = to_ms(since, "since")
        _, window_ms, ended, _ = self._people([], since_ms)
        demand = self._demand(since_ms)
        return FairnessView(
            jain=demand.jain(ended),
            users=len(demand.weights),
            has_more=demand.is_cut,
            backlogged=snapshot.active_users,
            ended=ended,
            window_start=from_ms(window_ms),
        )

    def _people(self, users: list[str], since_ms: int) -> tuple[int, int, int, list[Any]]:
        """The time, the begin of the window, the runs that ended in it, and a row of each user."""
        now_ms, window_ms, ended, *rows = self._link.run(
            "user_stats", since_ms=since_ms, rest=users
        )
        return int(now_ms), int(window_ms), int(ended), rows

    def _demand(self, since_ms: int, tenant: str = "") -> "_Demand":
        """Who wants service in a window, as it was at most ten seconds ago.

        To find them takes a look at each user, in several calls.
        """
        now_ms = self._link.now_ms()
        key = (round((now_ms - since_ms) / 1000), tenant)
        known = self._demands.get(key)
        if known is not None and 0 <= now_ms - known.at_ms < DEMAND_MS:
            return known
        found = _Demand(at_ms=now_ms)
        after = b""
        for _ in range(0, MAX_SUMMED, SUMMED_CHUNK):
            after, *flat = self._link.run(
                "users_in_window",
                since_ms=since_ms,
                tenant=tenant,
                after=after,
                limit=SUMMED_CHUNK,
                most=MAX_SUMMED + 1,  # one more, to know that there are more
            )
            found.add(flat)
            if not after or found.is_cut:
                break
        found.is_cut = found.is_cut or bool(after)
        for part in in_parts(list(found.weights), COUNTED_CHUNK):
            counts = [int(count) for count in self._link.run("backlogs", rest=part)]
            found.open |= {
                user: waiting + running
                for user, waiting, running in zip(part, counts[::2], counts[1::2], strict=True)
            }
        if len(self._demands) >= MAX_DEMANDS:
            self._demands.clear()
        self._demands[key] = found
        return found

    def top(self, since: datetime | float, limit: int, tenant: str | None = None) -> list[str]:
        """Users of whom the most runs ended since a moment, as it was at most ten seconds ago.

        Of more than 1,000 users so many are compared. Raises InvalidInput for a bad value.
        """
        check_count(limit, "limit", least=1, most=MAX_LISTED)
        ended = self._demand(to_ms(since, "since"), _tenant(tenant)).ended
        return sorted(ended, key=lambda user: (-ended[user], user))[:limit]

    def next_task(self, user_id: str) -> str | None:
        """The id of the task of a user that is handed out next, or else becomes ready next.

        None if nothing waits and nothing is delayed.
        """
        check_name(user_id, "user_id")
        part = f"[{user_id}\0", f"({user_id}\1", "LIMIT", 0, 1
        keys = self._link.keys
        index_delayed(self._link)
        waiting, held, delayed = self._link.ask(
            *(("ZRANGEBYLEX", keys[key], *part) for key in ("backlog", "held", "delayed_index"))
        )
        first = [(member, 2) for member in (*waiting, *delayed)]
        first[len(waiting) : len(waiting)] = [(member, 3) for member in held]
        for member, place in first:
            parts = member.decode("utf-8", "replace").split("\0")
            if len(parts) > place:  # else it is no entry: the next claim drops it
                return str(parts[place])
        return None

    def shares(
        self,
        since: datetime | float,
        until: datetime | float,
        buckets: int,
        users: Sequence[str],
        tenant: str | None = None,
    ) -> ShareSeries:
        """How many runs of at most 10 users, and of others, ended in at most 60 stretches of time.

        The others are those of the tenant, where there is one. Raises InvalidInput for a bad value.
        """
        check_count(buckets, "buckets", least=1, most=MAX_BUCKETS)
        since_ms, until_ms = to_ms(since, "since"), to_ms(until, "until")
        if since_ms >= until_ms:
            raise InvalidInput(f"since {since!r} is not before until {until!r}")
        if len(users) > MAX_SHARED:
            raise InvalidInput(f"{len(users)} users are too many: {MAX_SHARED} at most")
        names = list(dict.fromkeys(check_name(user, "user_id") for user in users))
        window, everybody, *rows = self._link.run(
            "run_counts",
            since_ms=since_ms,
            until_ms=until_ms,
            buckets=buckets,
            tenant=_tenant(tenant),
            rest=names,
        )
        width = (until_ms - since_ms) / buckets
        return ShareSeries(
            times=[from_ms(int(since_ms + number * width)) for number in range(buckets)],
            users=names,
            counts={user: [int(n) for n in row] for user, row in zip(names, rows, strict=True)},
            others=[
                max(0, int(total) - sum(map(int, own)))
                for total, *own in zip(everybody, *rows, strict=True)
            ],
            window_start=from_ms(int(window)),
        )

    def waiting(self, user_id: str) -> int:
        """Count the tasks of a user that wait or are delayed: as many as `purge` would cancel.

        It looks through all delayed tasks of the queue, in short steps, because an older version
        may have delayed some that the index of users does not show.
        """
        check_name(user_id, "user_id")
        index_all(self._link)
        index_delayed(self._link)  # drops what is there too much
        range_ = f"[{user_id}\0", f"({user_id}\1"
        keys = self._link.keys
        places = ("backlog", "held", "delayed_index")
        counts = self._link.ask(*(("ZLEXCOUNT", keys[key], *range_) for key in places))
        return sum(map(int, counts))

    def purge(self, user_id: str, limit: int = PURGE_CHUNK) -> int:
        """Cancel tasks of a user that wait, at most `limit` (100); how many do not any more.

        Delayed ones, those that wait to be retried, and those that wait for room in the limits of
        their names are among them; running tasks go on. History has them as cancelled. Call it
        until it returns 0. Raises InvalidInput for a bad value.
        """
        check_name(user_id, "user_id")
        check_count(limit, "limit", least=1, most=PURGE_CHUNK)
        for _ in range(MAX_LOOKS):  # none that an older version delayed may be left to run
            if index_delayed(self._link):
                break
        return int(self._link.run("purge", op=new_id(), user=user_id, limit=limit))


def in_parts(users: list[str], size: int) -> Iterator[list[str]]:
    """Users in lists of so many: a script that looks at all of them would be long."""
    return (users[i : i + size] for i in range(0, len(users), size))


def _tenant(tenant: str | None) -> str:
    return "" if tenant is None else check_tenant(tenant)


def _user(name: bytes) -> str | None:
    """A user's name; None for what cannot be one."""
    try:
        return check_name(name.decode(), "user_id")
    except ValueError:  # no UTF-8, or InvalidTask
        return None


def _encode_cursor(name: bytes) -> str:
    return base64.urlsafe_b64encode(name).decode()


def _decode_cursor(cursor: object) -> bytes:
    try:
        if cursor is None:
            return b""
        if not isinstance(cursor, str):
            raise TypeError("no string")
        return base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
    except (ValueError, TypeError):
        raise InvalidInput(f"cursor {shown(cursor)} is none: pass the `cursor` of a page") from None


@dataclass(slots=True, kw_only=True)
class _Demand:
    """Users who want service in a window: their weights, and how much they got and still want."""

    at_ms: int
    weights: dict[str, float] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)
    limited: set[str] = field(default_factory=set)  # those whose own settings hold them back
    is_cut: bool = False  # there are more users than these

    def jain(self, ended: int) -> float | None:
        """How evenly users got what they were entitled to, of so many runs that ended."""
        level = self.level_with((), ended) if ended else 0.0
        parts = []
        for user, weight in self.weights.items():
            got = self.ended.get(user, 0)
            wanted = got + self.open.get(user, 0)
            if user not in self.limited and wanted:
                parts.append(got / min(wanted, level * weight) if level else 0.0)
        return jain_index(parts)

    def add(self, flat: list[Any]) -> None:
        """Take up what a script found, as long as there is room."""
        for name, ended, settings in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            user = _user(name)
            if user is None:
                continue
            if len(self.weights) >= MAX_SUMMED and user not in self.weights:
                self.is_cut = True
                continue
            read = _settings(settings, b"", self.at_ms)
            self.weights[user] = read.weight
            if read.paused or read.max_running is not None or read.rate is not None:
                self.limited.add(user)
            if int(ended):
                self.ended[user] = int(ended)

    def level_with(self, facts: Sequence["_Facts"], ended: int) -> float:
        """How many runs for a weight of 1 were fair, with these users as they are now.

        What ended is shared out by weight, and nobody gets more than it wanted: the rest of it goes
        to the others, again by weight.
        """
        found = {
            user: (self.ended.get(user, 0) + self.open.get(user, 0), weight)
            for user, weight in self.weights.items()
        }
        found |= {each.user: (each.wanted, each.settings.weight) for each in facts}
        left, weights = float(ended), math.fsum(weight for _, weight in found.values())
        for wanted, weight in sorted(found.values(), key=lambda each: each[0] / each[1]):
            if weights <= 0 or wanted / weight >= left / weights:
                return left / weights if weights > 0 else math.inf
            left, weights = left - wanted, weights - weight
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What is read of a user, and what its state is made of."""

    user: str
    settings: UserSettings
    backlog: int
    held: int
    running: int
    delayed: int
    delayed_until: datetime | None
    before: int
    schedules: int
    oldest_ms: int
    ended: int
    p50_ms: int
    p95_ms: int
    is_known: bool
    limited_until: datetime | None
    now: datetime
    takers: bool

    @classmethod
    def read(cls, user: str, row: list[Any], now_ms: int, *, takers: bool) -> "_Facts":
        """The answer of a script; `takers`: whether any worker takes tasks."""
        backlog, held, running, before = (int(value) for value in row[2:6])
        schedules, oldest_ms, ended, p50_ms, p95_ms, delayed, next_due, known = (
            int(value) for value in row[7:]
        )
        return cls(
            user=user,
            settings=_settings(row[0], row[1], now_ms),
            backlog=backlog,
            held=held,
            running=running,
            delayed=delayed,
            delayed_until=from_ms(next_due) if 0 <= next_due < AFTER_THE_LAST_MS else None,
            before=before,
            schedules=schedules,
            oldest_ms=oldest_ms,
            ended=ended,
            p50_ms=p50_ms,
            p95_ms=p95_ms,
            is_known=bool(known),
            limited_until=_parked_until(row[6], now_ms),
            now=from_ms(now_ms),
            takers=takers,
        )

    @property
    def wanted(self) -> int:
        """How many runs it wanted in the window: those that it got, and those that are open."""
        return self.backlog + self.running + self.ended

    def info(self, window_ms: int, ended: int, level: float) -> UserInfo:
        """How the user fares among all."""
        state, why = self.explain()
        return UserInfo(
            user_id=self.user,
            settings=self.settings,
            backlog=self.backlog,
            held=self.held,
            users_ahead=None if self.before < 0 else self.before,
            running=self.running,
            delayed=self.delayed,
            delayed_until=self.delayed_until,
            schedules=self.schedules,
            oldest_wait=_seconds(self.oldest_ms),
            wait_p50=_seconds(self.p50_ms),
            wait_p95=_seconds(self.p95_ms),
            ended=self.ended,
            received=min(1.0, self.ended / ended) if ended else 0.0,
            entitled=min(self.wanted, level * self.settings.weight) / (ended or 1),
            state=state,
            why=why,
            parked_until=self.limited_until,
            window_start=from_ms(window_ms),
            is_known=self.is_known,
        )

    def explain(self) -> tuple[str, str]:
        """The state, and why it is so."""
        most, rate = self.settings.max_running, self.settings.rate
        waits = f"{self.backlog} {'task waits' if self.backlog == 1 else 'tasks wait'}"
        if self.settings.paused:
            return "paused", self._pause() + (f"; {waits}" if self.backlog else "")
        if not self.backlog:
            if not self.running:
                return "idle", self._later() or "nothing waits"
            return "served", f"has {self.running} running; {self._later() or 'nothing waits'}"
        if most is not None and self.running >= most:
            return "capped", f"has {self.running} of {most} running (max_running); {waits}"
        if rate is not None and self.limited_until is not None:
            at = when(self.limited_until, self.now)
            return "rate limited", f"rate of {rate:g}/s reached, next at {at}; {waits}"
        if self.running:
            return "served", f"has {self.running} running; {waits}"
        return "waiting", f"{waits}{self._for_what()}"

    def _pause(self) -> str:
        """Who has paused it, since when, until when and why."""
        settings, text = self.settings, f"paused by {self.settings.paused_by or 'an operator'}"
        if settings.paused_at is not None:
            text += f" since {when(settings.paused_at, self.now)}"
        if settings.paused_until is not None:
            text += f" until {when(settings.paused_until, self.now)}"
        return text + (f": {settings.pause_note}" if settings.pause_note else "")

    def _later(self) -> str:
        """What is delayed, if anything."""
        if not self.delayed:
            return ""
        are = "1 task is" if self.delayed == 1 else f"{self.delayed} tasks are"
        first = self.delayed_until
        return f"{are} delayed" + (f", the first until {when(first, self.now)}" if first else "")

    def _for_what(self) -> str:
        if not self.takers:
            return "; no worker is alive"
        if self.held == self.backlog:
            return " for room in the limits of the names"
        if self.before < 0:
            return ""  # it may not be served, and the next claim looks at it again
        if self.before == 0:
            return "; its turn is next"
        return f"; {self.before} {'user is' if self.before == 1 else 'users are'} before it"


def _seconds(ms: int) -> float | None:
    return None if ms < 0 else ms / 1000


def _parked_until(score: bytes, now_ms: int) -> datetime | None:
    """The moment to come at which a parked user is looked at again; None if there is none."""
    try:
        until_ms = int(float(score))
        return from_ms(until_ms) if until_ms > now_ms else None
    except (ValueError, OverflowError):  # empty, +inf, or beyond the year 9999
        return None


def _settings(text: bytes, tenant: bytes, now_ms: int) -> UserSettings:
    """The settings of a user; what cannot be read counts as the default, as it does for claims."""
    try:
        stored = json.loads(text or b"{}")
        fields = {name: _positive(stored.get(name)) for name in ("max_running", "max_waiting")}
        settings = UserSettings(
            weight=_positive(stored.get("weight")) or 1.0,
            rate=_positive(stored.get("rate")),
            paused=stored.get("paused") is True,
            tenant=tenant.decode("utf-8", "replace") or None,
            paused_at=_moment(stored.get("paused_at")),
            paused_by=text_or_none(stored.get("paused_by")),
            pause_note=text_or_none(stored.get("pause_note")),
            paused_until=_moment(stored.get("paused_until")),
            **{name: None if value is None else int(value) for name, value in fields.items()},
        )
        return without_past_pause(settings, now_ms)
    except UNREADABLE:
        return UserSettings()


def _moment(value: object) -> datetime | None:
    ms = _positive(value)
    return None if ms is None or ms > LATEST_MS else from_ms(int(ms))


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None
