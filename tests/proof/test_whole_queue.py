"""Every operation works on the whole of a queue that has partitions, and none on one of them only.

The first test walks all stores: an operation that does not declare what it does with partitions
fails it. The others ask a queue whose users live in all of its partitions.
"""

import importlib
import inspect
import pkgutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import redis
from helpers.partitions import without
from helpers.state import check_consistency
from helpers.tasks import fill, make_task, push
from prometheus_client import CollectorRegistry

import fairqueue
from fairqueue.access.audit import AuditLog
from fairqueue.access.credentials import Actor
from fairqueue.clock import ManualClock
from fairqueue.doctor import OK, PROBLEM, Doctor, Finding, Records
from fairqueue.errors import AmbiguousTask, InvalidInput, RedisUnavailable, UnknownTask
from fairqueue.history.runs import History
from fairqueue.link import operation as operation_module
from fairqueue.link.keys import Keys
from fairqueue.link.owners import Owner
from fairqueue.link.partitions import partition_of, tolerate_missing
from fairqueue.metrics import QueueCollector
from fairqueue.models import Claim
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Report
from fairqueue.runtime.cluster import EmbeddedCluster
from fairqueue.stats.overview import OverviewStore
from fairqueue.stats.samples import SampleStore
from fairqueue.stats.users import UserStats

PARTS = 4
HOUR = timedelta(hours=1)
USERS = [f"user-{n:02}" for n in range(12)]
TENANTS = [f"tenant-{n:02}" for n in range(10)]
# Those of one partition: a scheduler has one for each that it leads. The last asks no queue.
OF_ONE_PARTITION = {
    *("Firing.fire", "Leadership.lead", "Leadership.resign"),
    *("Replanner.is_needed", "Replanner.step", "Outgoing.check"),
}

KINDS = {"home", "any", "owner", "task", "claim", "found", "all", "tenant", "whole"}


def operations() -> Iterator[tuple[str, Any]]:
    """The operations of all classes of the package, by name."""
    for module in pkgutil.walk_packages(fairqueue.__path__, "fairqueue."):
        if module.name.endswith("__main__"):
            continue
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if kind.__module__ != module.name:
                continue
            for name, method in vars(kind).items():
                code = getattr(method, "__code__", None)
                is_ours = code is not None and code.co_filename == operation_module.__file__
                if is_ours and hasattr(method, "__wrapped__"):
                    yield f"{kind.__qualname__}.{name}", method


def test_each_operation_declares_what_it_does_with_partitions() -> None:
    found = {
        name: getattr(method.__wrapped__, "__partitions__", None)
        for name, method in operations()
        if not inspect.iscoroutinefunction(method)
    }
    assert len(found) > 100
    assert {name for name, kind in found.items() if kind is None} <= OF_ONE_PARTITION
    assert {kind for kind in found.values() if kind is not None} <= KINDS


@pytest.fixture
def queue(redis_client: redis.Redis, clock: ManualClock) -> Iterator[TaskQueue]:
    """A queue with four partitions."""
    with TaskQueue(redis_client, clock=clock, partitions=PARTS) as queue:
        yield queue


@pytest.fixture
def alike(queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock) -> Iterator[TaskQueue]:
    """A queue without partitions, to which the same happens."""
    with TaskQueue(redis_client, "alike", clock=clock) as alike:
        yield alike


@pytest.fixture
def history(queue: TaskQueue) -> History:
    return History(queue)


@pytest.fixture
def people(queue: TaskQueue) -> UserStats:
    return UserStats(queue.link)


def a_report(fingerprint: str = "cause") -> Report:
    return Report(seconds=0.5, error_type="ValueError", message="bad", fingerprint=fingerprint)


def claim_all(queue: TaskQueue) -> list[Claim]:
    claims = []
    while more := queue.claim("w", limit=100):
        claims += more
    return sorted(claims, key=lambda claim: (claim.task.task_id, claim.task.tenant or ""))


def end_all(queue: TaskQueue) -> None:
    """Let all waiting tasks end: those with "bad" in their ids fail."""
    for claim in claim_all(queue):
        if "bad" in claim.task.task_id:
            queue.bury(claim, "bad value", report=a_report(claim.task.task_id.partition("-")[0]))
        else:
            queue.finish(claim)


def all_of(read: Any, limit: int, between: Any = None) -> list[Any]:
    """All entries of a listing, read in pages of `limit`; `between` is called after each page."""
    found: list[Any] = []
    cursor = None
    for number in range(1000):
        page = read(limit=limit, cursor=cursor)
        assert len(page) <= limit
        found += page
        cursor = page.cursor
        if cursor is None:
            return found
        if between is not None:
            between(number)
    raise AssertionError("the listing has no end")


def other_tenant(than: str) -> str:
    """A tenant in another partition."""
    here = partition_of("", than, PARTS)
    return next(each for each in TENANTS if partition_of("", each, PARTS) != here)


def test_the_users_of_these_tests_live_in_all_partitions() -> None:
    assert {partition_of(user, None, PARTS) for user in USERS} == {*range(PARTS)}
    assert {partition_of("", tenant, PARTS) for tenant in TENANTS} == {*range(PARTS)}


# --- the same as without partitions ---------------------------------------------------------------


def live_through(queue: TaskQueue, clock: ManualClock) -> None:
    """A day of users and tenants: runs that ended, that run, wait, and are delayed."""
    for n, user in enumerate(USERS):
        fill(queue, user, n % 4 + 1)
        queue.set_user(user, weight=n % 3 + 1)
        push(queue, f"bad-{user}", user_id=user)
    for n, (tenant, user) in enumerate(product(TENANTS, ("ann", "bob"))):
        push(queue, f"{tenant}-{user}", f"worse-bad-{tenant}-{user}", user_id=user, tenant=tenant)
        queue.set_tenant(tenant, weight=n % 2 + 1)
    end_all(queue)
    clock.advance(5)
    for user in USERS:
        push(queue, f"runs-{user}", user_id=user)
    claim_all(queue)
    clock.advance(5)
    for n, user in enumerate(USERS):
        fill(queue, f"{user}", n % 4 + 5)
        push(queue, f"later-{user}", user_id=user, delay=60)
    for tenant in TENANTS[:5]:
        push(queue, f"waits-{tenant}", user_id="ann", tenant=tenant)
    clock.advance(5)


@pytest.fixture
def both(queue: TaskQueue, alike: TaskQueue, clock: ManualClock) -> tuple[TaskQueue, TaskQueue]:
    start = clock.now()
    live_through(queue, clock)
    clock.set(start)
    live_through(alike, clock)
    return queue, alike


def test_counts_are_those_of_a_queue_without_partitions(both: tuple[TaskQueue, TaskQueue]) -> None:
    whole, one = (queue.inspect() for queue in both)
    names = ["ready", "delayed", "running", "dead", "active_users", "parked_users"]
    names += ["active_tenants", "parked_tenants", "held", "schedules", "unique_keys"]
    for name in names:
        assert getattr(whole, name) == getattr(one, name), name
        assert getattr(whole, name) == sum(getattr(part, name) for part in whole.parts), name
    assert whole.oldest_wait == one.oldest_wait
    for name in ("pushed", "finished", "buried", "claimed"):
        assert whole.counters[name] == one.counters[name]
    assert [part.partition for part in whole.parts] == [*range(PARTS)]
    assert all(part.ready for part in whole.parts)
    assert [(pool.pool, pool.waiting) for pool in whole.pools] == [("default", one.ready)]
    assert [queue.size() for queue in both] == [one.ready] * 2


def test_shares_are_those_of_a_queue_without_partitions(
    both: tuple[TaskQueue, TaskQueue], clock: ManualClock
) -> None:
    whole, one = (UserStats(queue.link) for queue in both)
    since = clock.now() - HOUR
    owners = [Owner(user) for user in USERS] + [Owner("ann", each) for each in TENANTS]
    for ours, theirs in zip(whole.read(owners, since), one.read(owners, since), strict=True):
        assert ours.owner == theirs.owner
        assert (ours.received, ours.entitled) == pytest.approx((theirs.received, theirs.entitled))
        assert (ours.backlog, ours.running, ours.delayed, ours.ended, ours.schedules) == (
            *(theirs.backlog, theirs.running, theirs.delayed, theirs.ended),
            theirs.schedules,
        )
        assert ours.state == theirs.state
    tenants = whole.read_tenants(TENANTS, since), one.read_tenants(TENANTS, since)
    for our, their in zip(*tenants, strict=True):
        assert (our.tenant, our.users, our.jain) == (their.tenant, their.users, their.jain)
        assert (our.received, our.entitled) == pytest.approx((their.received, their.entitled))
    views = [
        stats.overview(queue.inspect(), since)
        for stats, queue in zip((whole, one), both, strict=True)
    ]
    assert views[0].jain == pytest.approx(views[1].jain)
    assert (views[0].users, views[0].backlogged, views[0].ended) == (
        *(views[1].users, views[1].backlogged),
        views[1].ended,
    )


def test_listings_are_those_of_a_queue_without_partitions(
    both: tuple[TaskQueue, TaskQueue], clock: ManualClock
) -> None:
    since = clock.now() - HOUR
    whole, one = (UserStats(queue.link) for queue in both)
    assert all_of(whole.names, 3) == list(one.names(limit=1000)) == list(whole.names(limit=1000))
    assert all_of(whole.tenants, 3) == list(one.tenants(limit=1000)) == sorted(TENANTS)
    assert list(whole.names(prefix="user-0")) == list(one.names(prefix="user-0"))
    assert list(whole.names(tenant="tenant-01")) == list(one.names(tenant="tenant-01"))
    for limit in (1, 5, 100):
        assert whole.top(since, limit) == one.top(since, limit)
        assert whole.active(limit) == one.active(limit)
        assert whole.active_tenants(limit) == one.active_tenants(limit)
    users = [Owner(user) for user in USERS[:9]]
    charts = [stats.shares(since, clock.now(), 5, users) for stats in (whole, one)]
    assert charts[0] == charts[1]
    views = [OverviewStore(queue.link) for queue in both]
    assert views[0].count_ended(since) == views[1].count_ended(since)
    assert views[0].count_ended(since, "tenant-03") == views[1].count_ended(since, "tenant-03")
    assert views[0].recent() == views[1].recent()
    assert views[0].count_before(clock.now()) == views[1].count_before(clock.now())
    histories = [History(queue) for queue in both]
    for status in ("pending", "running", "succeeded", "failed", None):
        ours = all_of(lambda status=status, **page: histories[0].runs(status, **page), 7)
        theirs = histories[1].runs(status, limit=1000)
        assert len(ours) == len(theirs)
        assert {run.task_id for run in ours} == {run.task_id for run in theirs}
        moments = [run.ended_at or run.started_at or run.pushed_at for run in ours]
        if status is not None:
            assert moments == sorted(moments, reverse=True)


def test_users_ahead_are_those_of_all_partitions(
    queue: TaskQueue, people: UserStats, clock: ManualClock
) -> None:
    for n, user in enumerate(USERS):
        queue.set_user(user, weight=n + 1)
        fill(queue, user, 60)
    for _ in range(100):
        queue.claim("w")
    infos = people.read([Owner(user) for user in USERS], clock.now() - HOUR)
    ahead = {info.user_id: info.users_ahead for info in infos}
    assert max(each or 0 for each in ahead.values()) > len(USERS) / PARTS + 2
    served: list[str] = []
    while len(set(served)) < len(USERS):
        served += [claim.task.user_id for claim in queue.claim("w")]
    order = list(dict.fromkeys(served))
    for user, before in ahead.items():
        assert before == pytest.approx(order.index(user), abs=PARTS), (ahead, order)


# --- listings while things change -----------------------------------------------------------------


def test_a_listing_has_no_gaps_and_nothing_twice_while_tasks_come_and_end(
    queue: TaskQueue, history: History, clock: ManualClock, redis_client: redis.Redis
) -> None:
    for n in range(40):
        push(queue, f"old-{n}", user_id=USERS[n % len(USERS)])
        clock.advance(1)
    end_all(queue)
    for n in range(40):
        push(queue, f"waits-{n}", user_id=USERS[n % len(USERS)])
        clock.advance(1)

    def go_on(number: int) -> None:
        clock.advance(1)
        for user in USERS:
            push(queue, f"new-{number}-{user}", user_id=user)
        for claim in queue.claim("w", limit=2):
            queue.finish(claim)

    ended = all_of(lambda **page: history.runs("succeeded", **page), 3, go_on)
    assert [run.task_id for run in ended].count("old-0") == 1
    assert len({run.task_id for run in ended}) == len(ended)
    assert {f"old-{n}" for n in range(40)} <= {run.task_id for run in ended}
    waiting = {run.task_id for run in history.runs("pending", limit=1000)}
    listed = [
        run.task_id for run in all_of(lambda **page: history.runs("pending", **page), 3, go_on)
    ]
    assert len(set(listed)) == len(listed)
    left = {run.task_id for run in history.runs("pending", limit=1000)}
    assert waiting & left <= {*listed}
    check_consistency(redis_client)


def test_names_have_no_gaps_and_none_twice_while_users_come(
    queue: TaskQueue, people: UserStats
) -> None:
    for user in USERS:
        fill(queue, user, 1)
    found = all_of(people.names, 2, lambda number: fill(queue, f"new-{number}", 1))
    assert [owner for owner in found if owner.user_id in USERS] == [Owner(user) for user in USERS]
    assert len(set(found)) == len(found)


def test_a_cause_of_failures_is_one_group_in_all_partitions(
    queue: TaskQueue, history: History, clock: ManualClock
) -> None:
    for n, user in enumerate(USERS):
        push(queue, f"cause{n % 3}-bad-{user}", user_id=user)
        end_all(queue)
        clock.advance(1)
    groups = history.failure_groups()
    assert [(group.fingerprint, group.count) for group in groups] == [
        ("cause2", 4),
        ("cause1", 4),
        ("cause0", 4),
    ]
    assert [group.latest.user_id for group in groups] == USERS[:-4:-1]
    for limit in (1, 2, 3):
        assert all_of(history.failure_groups, limit) == list(groups)
    assert len(history.retry_matching(fingerprint="cause1")) == 4
    assert history.discard_matching(fingerprint="cause1", limit=3) == 3
    counts = {group.fingerprint: group.count for group in history.failure_groups()}
    assert counts == {"cause0": 4, "cause1": 1, "cause2": 4}
    assert history.prune(0) == 9


def test_a_cursor_of_a_queue_with_another_number_of_partitions_is_refused(
    both: tuple[TaskQueue, TaskQueue],
) -> None:
    pages = [History(queue).runs("pending", limit=1) for queue in both]
    with pytest.raises(InvalidInput, match="cursor"):
        History(both[0]).runs("pending", cursor=pages[1].cursor)


# --- one id in several partitions -----------------------------------------------------------------


def test_an_id_that_several_tenants_use_is_never_guessed(
    queue: TaskQueue, history: History, redis_client: redis.Redis
) -> None:
    here, there = TENANTS[0], other_tenant(TENANTS[0])
    for tenant in (here, there):
        queue.push(make_task("ann", "cause-bad", tenant=tenant, payload={"whose": tenant}))
    end_all(queue)
    for ask in (history.get, history.retry, history.discard):
        with pytest.raises(AmbiguousTask, match="tenant="):
            ask("cause-bad")
    for tenant in (here, there):
        found = history.get("cause-bad", tenant=tenant)
        assert found is not None
        assert (found.run.tenant, found.task and found.task.payload) == (tenant, {"whose": tenant})
    assert [run.tenant for run in history.find(["cause-bad"])] != []
    assert {run.tenant for run in history.find(["cause-bad"])} == {here, there}
    absent = next(each for each in TENANTS if each not in (here, there))
    assert history.get("cause-bad", tenant=absent) is None
    with pytest.raises(UnknownTask):
        history.retry("cause-bad", tenant=absent)
    new_id = history.retry("cause-bad", tenant=there)
    again = history.get(new_id)
    assert again is not None
    assert again.run.tenant == there
    assert history.discard("cause-bad", tenant=absent) is False
    assert history.discard("cause-bad", tenant=here) is True
    assert [run.tenant for run in history.find(["cause-bad"])] == [there]
    check_consistency(redis_client)


# --- samples, access ------------------------------------------------------------------------------


def test_samples_of_partitions_are_added_up(
    both: tuple[TaskQueue, TaskQueue], clock: ManualClock
) -> None:
    stores = [SampleStore(queue.link) for queue in both]
    clock.advance(15 - clock.now_ms() / 1000 % 15)
    assert [store.take() for store in stores] == [True, True]
    assert [store.take() for store in stores] == [False, False]
    clock.advance(15)
    for queue in both:
        for user in USERS:
            push(queue, f"more-{user}", f"bad-more-{user}", user_id=user)
        end_all(queue)
    assert [store.take() for store in stores] == [True, True]
    whole, one = (store.read("15m") for store in stores)
    assert whole.times == one.times
    for name, values in whole.values.items():
        if not name.startswith("wait"):
            assert values == pytest.approx(one.values[name]), name
    waits = [series.values["wait_p50"][-1] for series in (whole, one)]
    assert waits[0] is not None
    assert waits[0] == pytest.approx(waits[1], abs=5.0)


def test_the_audit_log_is_one(queue: TaskQueue) -> None:
    log = AuditLog(queue.link)
    for user in USERS:
        log.end(log.begin(Actor(name=user), "test.done", user), "done")
    assert sorted(entry.actor for entry in all_of(log.entries, 5)) == USERS


# --- partitions that do not answer ----------------------------------------------------------------


def test_a_partition_that_does_not_answer_is_named_and_the_rest_is_shown(
    queue: TaskQueue, history: History, people: UserStats, clock: ManualClock
) -> None:
    for user in USERS:
        fill(queue, user, 2)
    gone = partition_of(USERS[0], None, PARTS)
    rest = [user for user in USERS if partition_of(user, None, PARTS) != gone]
    everything = {run.task_id for run in history.runs("pending")}
    with without(queue, gone):
        for ask in (history.runs, people.names, queue.inspect):
            with pytest.raises(RedisUnavailable):
                ask()
        with tolerate_missing() as missing:
            page = history.runs("pending", limit=3)
            found = [*page]
            while len(found) < 2 * len(rest):
                page = history.runs("pending", limit=3, cursor=page.cursor)
                found += page
            assert [owner.user_id for owner in people.names()] == rest
            assert queue.inspect().ready == 2 * len(rest)
            infos = people.read([Owner(user) for user in USERS], clock.now() - HOUR)
            assert [info.user_id for info in infos] == rest
            with pytest.raises(RedisUnavailable):
                people.read([Owner(USERS[0])], clock.now() - HOUR)
        assert missing.partitions.keys() == {gone}
        assert {run.user_id for run in found} == {*rest}
    # Its entries are shown once it answers again.
    assert (
        page.cursor is None
        or {
            *(run.task_id for run in found),
            *(run.task_id for run in history.runs("pending", limit=1000, cursor=page.cursor)),
        }
        == everything
    )


def test_changes_of_all_partitions_fail_if_one_does_not_answer(
    queue: TaskQueue, history: History
) -> None:
    with without(queue, 2), tolerate_missing(), pytest.raises(RedisUnavailable):
        history.prune(0)


def test_a_scrape_says_which_partition_does_not_answer(queue: TaskQueue) -> None:
    for user in USERS:
        fill(queue, user, 1)
    registry = CollectorRegistry()
    registry.register(QueueCollector(queue))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"fairqueue_{name}", {"queue": "default", **labels})

    def up() -> list[float | None]:
        return [value("partition_up", partition=str(number)) for number in range(PARTS)]

    waiting = {part.partition: part.ready for part in queue.inspect().parts}
    for part in queue.inspect().parts:
        assert value("partition_ready", partition=str(part.partition)) == part.ready
    assert (up(), value("pushed_total"), value("ready")) == ([1.0] * PARTS, 12, 12)
    with without(queue, 1):
        assert (up(), value("redis_up")) == ([1.0, 0.0, 1.0, 1.0], 1)
        assert value("pushed_total") == 12  # a counter never goes back
        assert value("ready") == 12 - waiting[1]
        fresh = CollectorRegistry()
        fresh.register(QueueCollector(queue))
        assert fresh.get_sample_value("fairqueue_pushed_total", {"queue": "default"}) is None
    assert up() == [1.0] * PARTS


# --- the doctor -----------------------------------------------------------------------------------


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_the_doctor_examines_and_repairs_every_partition(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    for user in USERS:
        fill(queue, user, 2)
    assert by_check(Doctor(queue).examine())["partitions"].text == "all 4 partitions answer"
    assert [each.level for each in Records(queue.link, fix=False).compare()] == [OK]
    for number in range(PARTS):
        redis_client.delete(Keys("default", number, PARTS)["waiting"])
    wrong = [each for each in Doctor(queue).examine() if each.level == PROBLEM and each.repairable]
    assert {each.details["partition"] for each in wrong} == {*range(PARTS)}
    assert {each.text.partition(":")[0] for each in wrong} == {f"partition {n}" for n in range(4)}
    Doctor(queue).examine(fix=True)
    check_consistency(redis_client)
    assert [each.level for each in Records(queue.link, fix=False).compare()] == [OK]


def test_the_doctor_names_users_in_a_wrong_partition_and_settings_that_differ(
    queue: TaskQueue,
) -> None:
    queue.configure(keep_dead=7)
    queue.set_limit("account:*", slots=2)
    wrong = (partition_of("user-00", None, PARTS) + 1) % PARTS
    astray = queue.at(queue.link.parts[wrong])
    astray.push(make_task("user-00", "astray"))
    astray.configure(keep_dead=8)
    found = by_check(Doctor(queue).examine())
    assert "such as user-00 to" in found["partitions: groups"].text
    assert found["partitions: groups"].details["partition"] == wrong
    assert "keep_dead is" in found["partitions: settings"].text


def test_the_doctor_names_a_partition_that_does_not_answer(queue: TaskQueue) -> None:
    fill(queue, "alice", 2)
    with without(queue, 3):
        found = by_check(Doctor(queue).examine())
    assert found["partitions"].level == PROBLEM
    assert found["partitions"].text.startswith("partition 3 was not examined: ")


# --- a real cluster -------------------------------------------------------------------------------


def test_a_frozen_node_of_a_cluster_is_named_and_the_others_are_shown(
    own_cluster: Callable[..., EmbeddedCluster],
) -> None:
    cluster = own_cluster(3, node_timeout=30.0)
    with TaskQueue.from_url(cluster.url, partitions=6, timeout=1.0) as queue:
        for user in USERS:
            fill(queue, user, 2)
        history, people = History(queue), UserStats(queue.link)
        frozen = cluster.owner(queue.link.parts[0].keys.slot)
        gone = {
            part.keys.partition
            for part in queue.link.parts
            if cluster.owner(part.keys.slot) is frozen
        }
        rest = [user for user in USERS if partition_of(user, None, 6) not in gone]
        assert 0 < len(rest) < len(USERS)
        frozen.freeze()
        try:
            began = time.monotonic()
            with tolerate_missing() as missing:
                assert {run.user_id for run in history.runs("pending")} == {*rest}
                assert [owner.user_id for owner in people.names()] == rest
                assert queue.inspect().ready == 2 * len(rest)
            assert missing.partitions.keys() == gone
            # The frozen node was waited for once, not by each call.
            assert time.monotonic() - began < 3 * queue.link.timeout
        finally:
            frozen.thaw()
        assert {run.user_id for run in history.runs("pending")} == {*USERS}
