"""Users with numbers: who they are, how each fares, what each got, and an end to a backlog."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import redis
from helpers.state import changes, count_commands
from helpers.tasks import claim_one, fill, push
from helpers.world import World

from fairqueue import TaskQueue, TaskScheduler
from fairqueue.clock import ManualClock
from fairqueue.errors import InvalidInput, RedisRefused
from fairqueue.history.records import Run
from fairqueue.history.runs import History
from fairqueue.inspection import Inspector
from fairqueue.link.owners import Owner
from fairqueue.models import Page, UserSettings
from fairqueue.queue.delays import DelayIndex
from fairqueue.reasons import when
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.stats.users import UserInfo, UserStats

HOUR = timedelta(hours=1)
ALICE = Owner("alice")


@pytest.fixture
def people(queue: TaskQueue) -> UserStats:
    return UserStats(queue.link)


def run(queue: TaskQueue, user: str, count: int = 1) -> None:
    """Push and run so many tasks of a user, in no time."""
    ids = push(
        queue,
        *(f"{user}:{queue.inspect().counters['pushed']}-{n}" for n in range(count)),
        user_id=user,
    )
    claims = queue.claim("w", limit=len(ids))
    assert {claim.task.user_id for claim in claims} == {user}
    queue.finish_many((claim, None) for claim in claims)


def every_page(read: Callable[[str | None], Any]) -> list[Any]:
    """All items of a listing, page by page."""
    found: list[Any] = []
    cursor = None
    while True:
        page = read(cursor)
        found += page
        if page.cursor is None:
            return found
        assert cursor != page.cursor, "a page that leads to itself"
        cursor = page.cursor


def owners(*user_ids: str, tenant: str | None = None) -> list[Owner]:
    return [Owner(user_id, tenant) for user_id in user_ids]


def one(people: UserStats, world: World, user: str, tenant: str | None = None) -> UserInfo:
    (info,) = people.read([Owner(user, tenant)], world.now() - HOUR)
    return info


# --- who is active --------------------------------------------------------------------------------


def test_active_users_are_listed_by_backlog(queue: TaskQueue, people: UserStats) -> None:
    fill(queue, "runs", 1)
    claim_one(queue)
    fill(queue, "few", 2)
    fill(queue, "many", 5)
    fill(queue, "paused", 3)
    queue.set_user("paused", paused=True)
    queue.set_user("has settings only", weight=2)
    push(queue, "later", user_id="delayed", delay=60)
    assert people.active() == owners("many", "paused", "few", "runs")
    assert people.active(2) == owners("many", "paused")


def test_a_user_whose_tasks_wait_for_a_slot_is_active(world: World, people: UserStats) -> None:
    world.queue.set_limits("default", slots=1)
    world.fill("alice", 1)
    world.fill("bob", 2)
    world.queue.claim("w", limit=3)
    assert len(world.dump()["held"]) == 2
    assert people.active() == owners("bob", "alice")


def test_active_tenants_are_listed_by_backlog(queue: TaskQueue, people: UserStats) -> None:
    push(queue, "a", user_id="ann", tenant="small")
    push(queue, "b", "c", "d", user_id="bob", tenant="large", pool="gpu")
    push(queue, "e", user_id="small")
    push(queue, "f", "g", user_id="cat", tenant="done")
    for claim in queue.claim("w", limit=10):
        if claim.task.tenant == "done":
            queue.finish(claim)
    queue.set_tenant("idle", weight=2)
    assert people.active_tenants() == ["large", "small"]
    assert people.active_tenants(1) == ["large"]
    with pytest.raises(InvalidInput, match="limit must be a whole number from 1 to 1000, not 0"):
        people.active_tenants(0)


def test_active_users_of_a_tenant_are_found_among_many(queue: TaskQueue, people: UserStats) -> None:
    for n in range(5):
        fill(queue, f"other-{n}", 1)
    push(queue, "a", "b", user_id="alice", tenant="acme")
    push(queue, "c", user_id="bob", tenant="acme")
    push(queue, "d", user_id="carol", tenant="acme.north")
    queue.set_user("dave", tenant="acme")
    assert people.active(tenant="acme") == owners("alice", "bob", tenant="acme")
    assert people.active(1, tenant="acme") == owners("alice", tenant="acme")
    assert people.active(tenant="nobody") == []


@pytest.mark.parametrize("limit", [0, 1001, None, 2.0, True])
def test_a_limit_that_is_none_is_refused(people: UserStats, limit: Any) -> None:
    with pytest.raises(InvalidInput, match="limit"):
        people.active(limit)
    with pytest.raises(InvalidInput, match="limit"):
        people.names(limit)


@pytest.mark.parametrize("tenant", ["", "a b", 3, "x" * 65, "a\0b"])
def test_a_tenant_that_is_none_is_refused(people: UserStats, tenant: Any) -> None:
    with pytest.raises(InvalidInput, match="tenant"):
        people.active(tenant=tenant)
    with pytest.raises(InvalidInput, match="tenant"):
        people.names(tenant=tenant)


# --- all names ------------------------------------------------------------------------------------


def know_some(world: World) -> list[str]:
    """Users that each are known in another way; all of them in order."""
    scheduler = TaskScheduler(world.queue)
    world.queue.set_limits("slow", slots=1)
    world.push("h1", "h2", user_id="held", name="slow")
    world.queue.claim("w", limit=2)
    run(world.queue, "ended", 3)
    world.push_and_claim("r", user_id="runs")
    world.push("d", user_id="delayed", delay=60)
    world.push("t", user_id="retries")
    world.queue.retry(world.claim_one(), "broken", delay=60)
    world.fill("waits", 3)
    world.fill("wait", 1)  # the beginning of another name
    scheduler.add_schedule("0 9 * * *", "scheduled", schedule_id="one")
    scheduler.add_schedule("0 9 * * *", "Ünal", schedule_id="two")
    world.queue.set_user("set", weight=2)
    world.queue.set_user("waits", weight=2)
    world.queue.set_user("two words", paused=True)
    return sorted(
        [
            *("held", "ended", "runs", "delayed", "retries", "wait", "waits", "scheduled"),
            *("Ünal", "set", "two words"),
        ],
        key=str.encode,
    )


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_each_user_is_listed_once_in_order(world: World, people: UserStats, limit: int) -> None:
    known = know_some(world)
    assert every_page(lambda cursor: people.names(limit, cursor)) == owners(*known)


def test_a_page_that_ends_with_the_last_user_says_so(queue: TaskQueue, people: UserStats) -> None:
    fill(queue, "alice", 1)
    fill(queue, "bob", 1)
    assert people.names(2).cursor is None
    assert people.names(1).cursor is not None


def test_names_may_be_those_that_begin_alike(world: World, people: UserStats) -> None:
    know_some(world)
    found = every_page(lambda cursor: people.names(1, cursor, prefix="wait"))
    assert found == owners("wait", "waits")
    assert people.names(prefix="se") == owners("set")
    assert people.names(prefix="x") == []


def test_the_users_of_a_tenant_are_listed(queue: TaskQueue, people: UserStats) -> None:
    for n in range(5):
        push(queue, f"a{n}", user_id=f"user-{n}", tenant="acme")
        push(queue, f"b{n}", user_id=f"other-{n}", tenant="acmf")
    assert every_page(lambda cursor: people.names(2, cursor, "acme")) == owners(
        *(f"user-{n}" for n in range(5)), tenant="acme"
    )
    assert people.names(tenant="acme", prefix="user-3") == owners("user-3", tenant="acme")
    assert people.names(tenant="acm") == []


@pytest.mark.parametrize("cursor", ["*", "ü", 3, b"x"])
def test_a_cursor_that_is_none_is_refused(people: UserStats, cursor: Any) -> None:
    with pytest.raises(InvalidInput, match=r"cursor .* is not valid"):
        people.names(10, cursor)


def test_the_work_for_a_page_does_not_depend_on_how_many_tasks_users_have(
    own_server: Callable[..., EmbeddedServer],
) -> None:
    url = own_server().url
    with TaskQueue.from_url(url) as queue, redis.Redis.from_url(url) as client:
        for user in ("alice", "bob", "carol"):
            fill(queue, user, 500)
        before = count_commands(client)
        assert UserStats(queue.link).names(10) == owners("alice", "bob", "carol")
        assert (count_commands(client) - before)["zrangebylex"] <= 10


# --- how a user fares -----------------------------------------------------------------------------


def test_a_user_has_its_numbers(world: World, people: UserStats) -> None:
    scheduler = TaskScheduler(world.queue)
    scheduler.add_schedule("0 9 * * *", "alice", schedule_id="one")
    scheduler.add_schedule("0 9 * * *", "alice", schedule_id="two")
    scheduler.add_schedule("0 9 * * *", "alice2", schedule_id="three")
    world.queue.set_user("alice", weight=3, max_running=5, max_waiting=100, rate=1000)
    world.fill("alice", 4)
    world.fill("alice2", 1)
    world.advance(7)
    world.push("late", user_id="alice", priority=6)
    assert world.claim_one().task.task_id == "late"
    world.advance(1)
    info = one(people, world, "alice")
    assert info == UserInfo(
        user_id="alice",
        settings=UserSettings(weight=3, max_running=5, max_waiting=100, rate=1000),
        backlog=4,
        held=0,
        users_ahead=0,
        running=1,
        schedules=2,
        oldest_wait=8.0,
        wait_p50=None,
        wait_p95=None,
        ended=0,
        received=0.0,
        entitled=3 / 4,
        state="served",
        why="has 1 running; 4 tasks wait",
        parked_until=None,
        window_start=world.now() - HOUR,
        is_known=True,
    )


def test_users_are_read_together_in_their_order(world: World, people: UserStats) -> None:
    world.fill("alice", 1)
    world.fill("bob", 2)
    found = people.read(owners("bob", "nobody", "alice"), world.now() - HOUR)
    assert [(info.user_id, info.backlog, info.is_known) for info in found] == [
        ("bob", 2, True),
        ("nobody", 0, False),
        ("alice", 1, True),
    ]
    assert people.read([], world.now()) == []


@pytest.mark.one_partition
def test_a_page_of_users_is_read_in_few_round_trips_and_who_wants_service_once_in_ten_seconds(
    world: World, people: UserStats
) -> None:
    users = [f"user-{n:03d}" for n in range(100)]
    for user in users:
        world.fill(user, 1)
    sent = world.before_script("user_stats", lambda: None)
    found = people.read(owners(*users), world.now() - HOUR)
    assert [info.user_id for info in found] == users
    assert [info.entitled for info in found] == [pytest.approx(0.01)] * 100
    assert set(sent) == {"user_stats", "users_in_window", "backlogs"}
    assert len(sent) <= 20
    looked_up = sent.count("users_in_window")
    world.fill("new", 1)
    world.advance(9)
    (info,) = people.read(owners("new"), world.now() - HOUR)
    assert info.entitled == pytest.approx(1 / 101)  # with the user itself as it is now
    assert sent.count("users_in_window") == looked_up
    world.advance(1)
    people.read(owners("new"), world.now() - HOUR)
    assert sent.count("users_in_window") > looked_up


def test_bad_users_and_times_are_refused(people: UserStats, clock: ManualClock) -> None:
    for users in ([""], ["a\0"], [3], ["x" * 201], ["user"] * 101):
        with pytest.raises(InvalidInput, match="user"):
            people.read([Owner(user) for user in users], clock.now())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="since"):
        people.read(owners("alice"), clock.now().replace(tzinfo=None))


@pytest.mark.parametrize("known_by", ["settings", "tenant", "schedule", "run", "waiting"])
def test_a_user_is_known_by_any_record(world: World, people: UserStats, known_by: str) -> None:
    tenant = "acme" if known_by == "tenant" else None
    if known_by == "settings":
        world.queue.set_user("alice", paused=True)
    elif known_by == "tenant":
        world.queue.set_user("alice", tenant="acme")
    elif known_by == "schedule":
        TaskScheduler(world.queue).add_schedule("0 9 * * *", "alice")
    elif known_by == "run":
        run(world.queue, "alice")
        world.advance(2 * HOUR)  # before the window
    else:
        world.fill("alice", 1)
    assert one(people, world, "alice", tenant).is_known
    assert people.knows(Owner("alice", tenant))
    for unknown in (Owner("alic", tenant), Owner("alice", "globex")):
        assert not one(people, world, unknown.user_id, unknown.tenant).is_known
        assert not people.knows(unknown)


def test_the_task_that_is_handed_out_next_is_told(queue: TaskQueue, people: UserStats) -> None:
    assert people.next_task(ALICE) is None
    queue.set_limits("slow", slots=1)
    push(queue, "s1", "s2", name="slow")
    queue.claim("w", limit=2)
    assert people.next_task(ALICE) == "s2"  # it waits for a slot
    push(queue, "a", "b")
    push(queue, "urgent", priority=6)
    assert people.next_task(ALICE) == "urgent"


# --- why it is so ---------------------------------------------------------------------------------


def state(people: UserStats, world: World, user: str = "alice") -> tuple[str, str]:
    info = one(people, world, user)
    return info.state, info.why


def test_a_paused_user_says_so(world: World, people: UserStats) -> None:
    world.queue.set_user("alice", paused=True)
    since = f"since {when(world.now(), world.now())}"
    assert state(people, world) == ("paused", f"paused by an operator {since}")
    world.fill("alice", 1)
    assert state(people, world) == ("paused", f"paused by an operator {since}; 1 task waits")
    until = world.now() + HOUR
    world.queue.pause_user("alice", by="ann", note="unpaid", until=until)
    said = f"paused by ann {since} until {when(until, world.now())}: unpaid; 1 task waits"
    assert state(people, world) == ("paused", said)
    world.queue.pause_user("alice")
    assert one(people, world, "alice").parked_until is None


def test_a_user_at_its_cap_says_so(world: World, people: UserStats) -> None:
    world.queue.set_user("alice", max_running=2)
    world.fill("alice", 5)
    world.queue.claim("w", limit=5)
    assert state(people, world) == ("capped", "has 2 of 2 running (max_running); 3 tasks wait")


def test_a_user_over_its_rate_says_when_it_goes_on(world: World, people: UserStats) -> None:
    world.queue.set_user("alice", rate=2)
    world.fill("alice", 3)
    world.queue.finish(world.claim_one())
    free = world.now() + timedelta(seconds=0.5)
    at = when(free, world.now())
    assert one(people, world, "alice").parked_until == free
    assert state(people, world) == (
        "rate limited",
        f"rate of 2/s reached, next at {at}; 2 tasks wait",
    )
    world.advance(0.5)
    world.beat()
    assert state(people, world) == ("waiting", "2 tasks wait")


@pytest.mark.one_partition  # in several, those at one level are served in any order
def test_a_user_who_waits_says_for_whom(world: World, people: UserStats) -> None:
    for user in ("alice", "bob", "carol"):
        world.fill(user, 3)
    assert state(people, world, "alice") == ("waiting", "3 tasks wait; no worker is alive")
    world.beat()
    assert state(people, world, "alice") == ("waiting", "3 tasks wait; this user is next")
    assert state(people, world, "bob") == ("waiting", "3 tasks wait; 1 user is ahead")
    assert state(people, world, "carol") == ("waiting", "3 tasks wait; 2 users are ahead")


def of_acme(people: UserStats, world: World, user: str = "alice") -> tuple[str, str]:
    info = one(people, world, user, "acme")
    return info.state, info.why


def test_a_user_of_a_paused_tenant_says_so(world: World, people: UserStats) -> None:
    world.beat()
    world.fill("alice", 2, tenant="acme")
    assert of_acme(people, world) == ("waiting", "2 tasks wait; this user is next in its tenant")
    assert one(people, world, "alice", "acme").users_ahead == 0
    world.queue.set_tenant("acme", paused=True, by="ann", note="unpaid")
    assert one(people, world, "alice", "acme").users_ahead is None
    since = f"since {when(world.now(), world.now())}"
    paused = f"its tenant is paused by ann {since}: unpaid"
    assert of_acme(people, world) == ("paused", f"{paused}; 2 tasks wait")
    assert of_acme(people, world, "idle") == ("paused", paused)
    world.queue.set_user("alice", tenant="acme", paused=True, by="bob")
    assert of_acme(people, world) == ("paused", f"paused by bob {since}; 2 tasks wait")
    (tenant,) = people.read_tenants(["acme"], world.now() - HOUR)
    assert (tenant.state, tenant.why) == ("paused", f"paused by ann {since}: unpaid; 2 tasks wait")


def test_a_user_of_another_tenant_or_of_none_is_not_paused(world: World, people: UserStats) -> None:
    world.beat()
    world.fill("alice", 1)
    world.push("there", user_id="alice", tenant="globex")
    world.queue.set_tenant("acme", paused=True)
    read = people.read([Owner("alice", t) for t in (None, "globex", "acme")], world.now() - HOUR)
    assert [info.state for info in read] == ["waiting", "waiting", "paused"]


def test_a_user_of_a_tenant_at_its_limits_says_so(world: World, people: UserStats) -> None:
    world.beat()
    world.queue.set_tenant("acme", max_running=1)
    world.fill("alice", 1, tenant="acme")
    world.fill("bob", 1, tenant="acme")
    claim = world.claim_one()
    assert (claim.task.user_id, world.queue.claim("w")) == ("alice", [])
    capped = "its tenant has 1 of 1 running (max_running); 1 task waits"
    assert of_acme(people, world, "bob") == ("capped", capped)
    assert of_acme(people, world, "alice") == ("served", "has 1 running; no task waits")
    world.queue.finish(claim)
    world.queue.set_tenant("acme", max_running=None, rate=2)
    world.fill("carol", 2, tenant="acme")
    world.queue.finish(world.claim_one())
    assert world.queue.claim("w") == []
    at = when(world.now() + timedelta(seconds=0.5), world.now())
    state, why = of_acme(people, world, "carol")
    assert (state, why.partition(";")[0]) == (
        "rate limited",
        f"its tenant's rate of 2/s reached, next at {at}",
    )


def test_a_user_whose_tasks_wait_for_slots_says_so(world: World, people: UserStats) -> None:
    world.queue.set_limits("default", slots=1)
    world.fill("bob", 1)
    world.claim_one()
    world.fill("alice", 2)
    assert world.queue.claim("w", limit=3) == []
    assert state(people, world) == (
        "waiting",
        "2 tasks wait because of limits on their names or keys",
    )


def test_a_user_without_tasks_is_idle_or_served(world: World, people: UserStats) -> None:
    assert state(people, world) == ("idle", "no task waits")
    world.fill("alice", 1)
    world.claim_one()
    assert state(people, world) == ("served", "has 1 running; no task waits")


# --- shares ---------------------------------------------------------------------------------------


def test_received_is_the_share_of_runs_in_the_window(world: World, people: UserStats) -> None:
    run(world.queue, "alice", 5)
    world.advance(2 * HOUR)
    run(world.queue, "alice", 3)
    run(world.queue, "alice2", 1)
    run(world.queue, "bob", 3)
    world.push("dead", "cancelled", user_id="bob")
    world.queue.bury(world.claim_one(), "no")
    world.queue.cancel("cancelled")
    world.advance(1)
    found = people.read(owners("alice", "alice2", "bob", "carol"), world.now() - HOUR)
    assert [(info.ended, info.received) for info in found] == [
        (3, 3 / 8),
        (1, 1 / 8),
        (4, 4 / 8),  # what was cancelled before it ran has taken nothing of the others
        (0, 0.0),
    ]
    (all_day,) = people.read(owners("alice"), world.now() - 3 * HOUR)
    assert (all_day.ended, all_day.received) == (8, 8 / 13)


def test_entitled_is_the_weight_among_active_users(world: World, people: UserStats) -> None:
    for user, weight in (("waits", 2), ("ended", 3), ("paused", 4), ("idle", 100)):
        world.queue.set_user(user, weight=weight)
    run(world.queue, "idle")
    world.advance(2 * HOUR)
    run(world.queue, "ended")
    world.fill("runs", 1)
    world.claim_one()
    world.fill("waits", 1)
    world.queue.set_user("paused", paused=True)
    world.fill("paused", 1)
    found = people.read(owners("waits", "ended", "paused", "runs", "idle"), world.now() - HOUR)
    assert [info.entitled for info in found] == pytest.approx([0.2, 0.3, 0.4, 0.1, 0.0])


@pytest.mark.one_partition
def test_nobody_is_entitled_to_more_than_it_wanted(world: World, people: UserStats) -> None:
    for user, pushed in (("noisy", 80), ("quiet", 2), ("other", 40)):
        world.fill(user, pushed)
    world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=42))

    found = people.read(owners("noisy", "quiet", "other"), world.now() - HOUR)

    assert [info.received for info in found] == pytest.approx([20 / 42, 2 / 42, 20 / 42])
    assert [info.entitled for info in found] == pytest.approx([20 / 42, 2 / 42, 20 / 42])


def test_waits_are_those_of_the_last_runs_in_the_window(world: World, people: UserStats) -> None:
    for seconds in (1000, *range(1, 21)):
        world.push(f"task-{seconds}")
        world.advance(seconds)
        world.queue.finish(world.claim_one())
    info = one(people, world, "alice")
    assert (info.wait_p50, info.wait_p95) == (10.0, 19.0)
    world.advance(2 * HOUR)
    assert one(people, world, "alice").wait_p50 is None


def test_the_window_begins_where_history_is_whole(world: World, people: UserStats) -> None:
    world.queue.configure(keep_finished=10)
    for n in range(15):
        run(world.queue, "alice" if n % 2 else "bob")
        world.advance(10)
    whole_since = world.now() - timedelta(seconds=100)
    info = one(people, world, "alice")
    assert (info.window_start, info.ended, info.received) == (whole_since, 5, 0.5)
    view = people.overview(world.queue.inspect(), world.now() - HOUR)
    assert (view.window_start, view.ended, view.users) == (whole_since, 10, 2)
    (recent,) = people.read(owners("bob"), world.now() - timedelta(seconds=45))
    assert (recent.window_start, recent.ended) == (world.now() - timedelta(seconds=45), 2)


def test_the_window_is_not_longer_than_runs_are_kept(world: World, people: UserStats) -> None:
    world.queue.configure(keep_finished_for=600)
    assert one(people, world, "alice").window_start == world.now() - timedelta(minutes=10)
    world.queue.configure(keep_finished=0)
    assert one(people, world, "alice").window_start == world.now()


def test_only_kept_dead_letters_shorten_the_window(world: World, people: UserStats) -> None:
    world.queue.configure(keep_dead=1)
    for name in ("a", "b"):
        world.push(name)
        world.queue.bury(world.claim_one(), "no")
        world.advance(10)
    assert one(people, world, "alice").window_start == world.now() - timedelta(seconds=10)
    world.queue.configure(keep_dead=0)
    run(world.queue, "bob")
    assert one(people, world, "alice").window_start == world.now() - HOUR


def test_an_overview_says_how_evenly_users_are_served(world: World, people: UserStats) -> None:
    world.fill("alice", 50)
    world.fill("bob", 50)
    run_some(world)
    snapshot = world.queue.inspect()
    view = people.overview(snapshot, world.now() - HOUR)
    assert (view.users, view.backlogged, view.ended) == (2, 2, 40)
    assert view.jain == snapshot.jain_index == 1.0
    assert view.window_start == world.now() - HOUR


def test_the_jain_index_is_that_of_the_window(world: World, people: UserStats) -> None:
    world.fill("alice", 50)
    world.queue.claim("w", limit=10)  # alice is served alone, long ago
    world.fill("bob", 50)
    taken = world.queue.claim("w", limit=10, lease=600)
    own = [claim for claim in taken if claim.task.user_id == "alice"]
    world.queue.finish_many((claim, None) for claim in own)
    world.advance(1200)
    for _ in range(10):
        world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=2))
    index = {
        seconds: people.overview(
            world.queue.inspect(), world.now() - timedelta(seconds=seconds)
        ).jain
        for seconds in (600, 3600)
    }
    lately, in_all = index[600], index[3600]
    assert lately == 1.0
    assert in_all is not None
    assert in_all < 0.99


def test_limited_users_are_not_in_the_jain_index(world: World, people: UserStats) -> None:
    for user in ("alice", "bob", "slow", "capped", "paused"):
        world.fill(user, 50)
    world.queue.set_user("slow", rate=0.001)
    world.queue.set_user("capped", max_running=1)
    world.queue.set_user("paused", paused=True)
    for _ in range(10):
        world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=10))
    view = people.overview(world.queue.inspect(), world.now() - HOUR)
    assert view.jain == pytest.approx(1.0, abs=0.001)
    assert view.users == 5


def run_some(world: World) -> None:
    """Run forty tasks over two windows in which the service of users is compared."""
    for _ in range(4):
        claims = world.queue.claim("w", limit=10)
        world.queue.finish_many((claim, None) for claim in claims)
        world.advance(10)


@pytest.mark.one_partition
def test_of_too_many_users_so_many_are_summed(world: World, people: UserStats) -> None:
    world.patch("fairqueue.stats.users.MAX_SUMMED", 4)
    for n in range(10):
        world.fill(f"user-{n}", 1)
    found = people.read(owners("user-9", "user-8"), world.now() - HOUR)
    assert [info.entitled for info in found] == [1 / 6, 1 / 6]  # of four, and themselves
    assert people.overview(world.queue.inspect(), world.now() - HOUR).users == 4


def test_the_users_who_got_most_are_found(world: World, people: UserStats) -> None:
    run(world.queue, "old", 9)
    world.advance(2 * HOUR)
    for user, count in (("alice", 3), ("bob", 5), ("dave", 4)):
        run(world.queue, user, count)
    for user in ("carol", "erin"):
        world.queue.finish(world.push_and_claim(f"{user}:1", user_id=user, tenant="acme"))
    world.queue.finish(world.push_and_claim("erin:2", user_id="erin", tenant="acme"))
    world.fill("waits", 20)
    since = world.now() - HOUR
    acme = Owner.whole("acme")
    assert people.top(since, 3) == [*owners("bob", "dave"), acme]
    assert people.top(since, 10) == [*owners("bob", "dave"), acme, ALICE]
    assert people.top(since, 2, "acme") == owners("erin", "carol", tenant="acme")


def test_the_users_who_got_most_are_found_in_several_parts(world: World, people: UserStats) -> None:
    world.patch("fairqueue.stats.users.SUMMED_CHUNK", 3)
    for n in range(10):
        run(world.queue, f"user-{n}", n + 1)
    world.advance(1)
    top = people.top(world.now() - HOUR, 10)
    assert top == owners(*(f"user-{n}" for n in range(9, -1, -1)))
    assert people.overview(world.queue.inspect(), world.now() - HOUR).users == 10


def test_shares_over_time_are_counted_by_user(world: World, people: UserStats) -> None:
    start = world.now()
    run(world.queue, "alice", 2)
    run(world.queue, "bob", 1)
    world.advance(59.999)
    run(world.queue, "carol", 4)
    world.advance(0.001)
    run(world.queue, "alice", 3)
    world.advance(120)
    run(world.queue, "bob", 5)
    series = people.shares(start, start + timedelta(minutes=4), 4, owners("alice", "bob", "alice"))
    assert series.times == [start + timedelta(minutes=n) for n in range(4)]
    assert series.users == owners("alice", "bob")
    assert series.counts == {ALICE: [2, 3, 0, 0], Owner("bob"): [1, 0, 0, 5]}
    assert series.others == [4, 0, 0, 0]
    assert series.window_start == start


def test_the_others_of_a_tenant_are_its_own(world: World, people: UserStats) -> None:
    world.push("a", "b", user_id="alice", tenant="acme")
    world.push("c", user_id="bob", tenant="acme")
    world.push("d", user_id="carol")
    world.queue.finish_many((claim, None) for claim in world.queue.claim("w", limit=4))
    until = world.now() + timedelta(seconds=1)
    alice = Owner("alice", "acme")
    series = people.shares(world.now(), until, 1, [alice], "acme")
    assert (series.counts, series.others) == ({alice: [2]}, [1])
    series = people.shares(world.now(), until, 1, [Owner.whole("acme")])
    assert (series.counts, series.others) == ({Owner.whole("acme"): [3]}, [1])


def test_shares_that_cannot_be_are_refused(people: UserStats, clock: ManualClock) -> None:
    now, later = clock.now(), clock.now() + HOUR
    for buckets in (0, 61, None):
        with pytest.raises(InvalidInput, match="buckets"):
            people.shares(now, later, buckets, [])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="since must be before until"):
        people.shares(later, now, 5, [])
    with pytest.raises(InvalidInput, match=r"number of users must be .* not 11"):
        people.shares(now, later, 5, owners(*(f"user-{n}" for n in range(11))))
    with pytest.raises(InvalidInput, match="user_id"):
        people.shares(now, later, 5, owners(""))


# --- users with nothing but delayed tasks ---------------------------------------------------------


def test_a_user_with_only_delayed_tasks_is_known(world: World, people: UserStats) -> None:
    assert not people.knows(ALICE)
    world.push("a", "b", user_id="alice", delay=60)
    world.push("soon", user_id="alice", delay=30)
    assert people.knows(ALICE)
    info = one(people, world, "alice")
    assert (info.is_known, info.delayed, info.backlog, info.state) == (True, 3, 0, "idle")
    assert info.delayed_until == world.now() + timedelta(seconds=30)
    assert people.names() == owners("alice")
    listed = History(world.queue).runs(("pending", "retrying"), user_id="alice")
    assert [run.task_id for run in listed] == ["b", "a", "soon"]


def test_a_user_with_only_a_retrying_task_is_known(world: World, people: UserStats) -> None:
    world.push("a", user_id="alice")
    world.queue.retry(world.claim_one(), "broken", delay=60)
    assert people.knows(ALICE)
    assert one(people, world, "alice").delayed == 1
    assert [run.task_id for run in History(world.queue).runs("retrying", user_id="alice")] == ["a"]
    world.advance(61)
    world.queue.finish(world.claim_one())
    assert one(people, world, "alice").delayed == 0


def test_delayed_tasks_of_a_user_are_listed_page_by_page(world: World) -> None:
    for n in range(7):
        world.push(f"t{n}", user_id="alice", delay=60 + n)
        world.push(f"o{n}", user_id="alice2", delay=60 + n)
    history = History(world.queue)
    found = every_page(
        lambda cursor: _ids(history.runs("pending", user_id="alice", limit=2, cursor=cursor))
    )
    assert found == [f"t{n}" for n in reversed(range(7))]


def _ids(page: Page[Run]) -> Page[str]:
    return Page([run.task_id for run in page], page.cursor)


@pytest.mark.one_partition
def test_delayed_tasks_of_an_older_version_are_found(world: World, people: UserStats) -> None:
    world.push(*(f"old-{n}" for n in range(600)), user_id="alice", delay=60)
    world.redis.delete(world.keys["delayed_index"])
    world.push("new", user_id="alice", delay=60)
    assert people.knows(ALICE)
    assert one(people, world, "alice").delayed == 601
    world.check()
    # An older worker takes them up and leaves the index as it is.
    left = world.dump()["delayed_index"]
    world.advance(61)
    while claims := world.queue.claim("w", limit=250):
        world.queue.finish_many((claim, None) for claim in claims)
    world.redis.zadd(world.keys["delayed_index"], left)
    assert one(people, world, "alice").delayed == 0
    assert "delayed_index" not in world.dump()


@pytest.mark.one_partition
def test_the_index_of_delayed_tasks_is_made_in_bounded_steps(world: World) -> None:
    world.push(*(f"old-{n}" for n in range(1000)), user_id="alice", delay=60)
    world.redis.delete(world.keys["delayed_index"])
    with mock.patch("fairqueue.queue.delays.MAX_STEPS", 2):
        DelayIndex(world.queue.link).update()
        assert 0 < world.redis.zcard(world.keys["delayed_index"]) < 1000
        for _ in range(10):  # each goes on where the one before it stopped
            DelayIndex(world.queue.link).update()
    assert world.redis.zcard(world.keys["delayed_index"]) == 1000
    first = world.redis.zrange(world.keys["delayed_index"], 0, 0)
    world.redis.zrem(world.keys["delayed_index"], *first)
    DelayIndex(world.queue.link).update()
    assert world.redis.zcard(world.keys["delayed_index"]) == 1000
    world.redis.zadd(world.keys["delayed_index"], {"alice\x00001699990000000\0gone": 0})
    DelayIndex(world.queue.link).update()
    assert world.redis.zcard(world.keys["delayed_index"]) == 1000


@pytest.mark.one_partition
def test_what_cannot_be_indexed_is_not_looked_for_at_each_heartbeat(world: World) -> None:
    """One record that cannot be read must not let each worker walk through all, again and again."""
    world.push(*(f"t{n}" for n in range(600)), user_id="alice", delay=3600)
    world.redis.zadd(world.keys["delayed"], {"ghost": world.clock.now_ms() + 3_600_000})
    DelayIndex(world.queue.link).update()
    with mock.patch.object(
        DelayIndex, "_step", autospec=True, side_effect=DelayIndex._step
    ) as step:
        DelayIndex(world.queue.link).update()
        world.advance(59)
        DelayIndex(world.queue.link).update()
        assert step.call_count == 0
        # Something else is amiss: that is looked for at once.
        world.redis.zrem(
            world.keys["delayed_index"], *world.redis.zrange(world.keys["delayed_index"], 0, 0)
        )
        DelayIndex(world.queue.link).update()
        assert step.call_count > 0
        assert world.redis.zcard(world.keys["delayed_index"]) == 600
        step.reset_mock()
        world.advance(61)
        DelayIndex(world.queue.link).update()
        assert step.call_count > 0
    world.redis.zrem(world.keys["delayed"], "ghost")
    DelayIndex(world.queue.link).update()
    left = set(world.redis.hkeys(world.keys["fair"]))
    assert not left & {b"index_from", b"index_off"}


# --- purge ----------------------------------------------------------------------------------------


@pytest.mark.one_partition
def test_a_purge_finds_delayed_tasks_of_old_versions(world: World, people: UserStats) -> None:
    """Also where there are more than one look brings into the index."""
    world.push(*(f"bob-{n}" for n in range(2000)), user_id="bob", delay=60)
    world.push(*(f"alice-{n}" for n in range(3)), user_id="alice", delay=60)
    world.redis.delete(world.keys["delayed_index"])
    with mock.patch("fairqueue.queue.delays.MAX_STEPS", 1):
        assert people.purge(ALICE) == 3
        assert people.purge(ALICE) == 0
    assert world.redis.zcard(world.keys["delayed"]) == 2000


def test_a_purge_cancels_and_history_has_it(world: World, people: UserStats) -> None:
    world.fill("alice", 5)
    world.fill("alice2", 2)
    claim = world.push_and_claim("later", user_id="alice", delay=60)
    assert people.waiting(ALICE) == 5
    assert people.purge(ALICE) == 5
    assert people.purge(ALICE) == people.waiting(ALICE) == 0
    dropped = ["alice-1", "alice-2", "alice-3", "alice-4", "later"]
    assert world.places() == {
        "running": ["alice-0"],
        "cancelled": dropped,
        "ready": ["alice2-0", "alice2-1"],
    }
    ended = History(world.queue).runs("cancelled", user_id="alice")
    assert sorted(run.task_id for run in ended) == dropped
    assert world.stats()["cancelled"] == 5
    world.queue.finish(claim)


def test_a_purge_takes_delayed_tasks_in_small_steps(world: World, people: UserStats) -> None:
    world.push("again", user_id="alice")
    world.queue.retry(world.claim_one(), "broken", delay=30)
    world.push(*(f"later-{n}" for n in range(150)), user_id="alice", delay=60)
    world.push("other", user_id="alice2", delay=60)
    assert people.waiting(ALICE) == 151
    assert [people.purge(ALICE, 40), people.purge(ALICE), people.purge(ALICE)] == [*(40, 100, 11)]
    assert world.places()["delayed"] == ["other"]
    assert world.dump()["delayed"].keys() == {"other"}


def test_a_purge_takes_at_most_so_many(queue: TaskQueue, people: UserStats) -> None:
    fill(queue, "alice", 110)
    assert [people.purge(ALICE, 4), people.purge(ALICE), people.purge(ALICE)] == [4, 100, 6]


def test_a_purge_takes_what_waits_for_slots(world: World, people: UserStats) -> None:
    world.queue.set_limits("slow", slots=1)
    world.push("one", "two", "three", name="slow")
    world.queue.claim("w", limit=3)
    world.fill("alice", 2)
    assert people.waiting(ALICE) == 4
    assert [people.purge(ALICE, 3), people.purge(ALICE, 3)] == [3, 1]
    assert "held" not in world.dump()
    assert "slot_line" not in world.dump()


@pytest.mark.parametrize("paused", [False, True])
def test_a_purged_user_is_served_later(queue: TaskQueue, people: UserStats, paused: bool) -> None:
    queue.set_user("alice", paused=paused)
    fill(queue, "alice", 3, priority=6)
    people.purge(ALICE)
    assert people.active() == []
    queue.set_user("alice", paused=False)
    push(queue, "new")
    assert claim_one(queue).task.task_id == "new"


def test_a_purge_that_arrives_twice_is_one(world: World, people: UserStats) -> None:
    world.fill("alice", 5)
    arguments: dict[str, Any] = {"op": "op", "owner": "alice", "limit": 2}
    link = world.queue.part_of("alice", None).link
    assert link.run("purge", **arguments) == 2
    before = world.dump()
    assert link.run("purge", **arguments) == 2
    assert changes(before, world.dump()) == {}


def test_a_purge_keeps_the_retention(world: World, people: UserStats) -> None:
    world.queue.configure(keep_finished=10)
    world.fill("alice", 100)
    assert people.purge(ALICE) == 100
    assert len(world.places()["cancelled"]) == 10


def test_bad_purges_are_refused(queue: TaskQueue, people: UserStats) -> None:
    fill(queue, "alice", 1)
    for limit in (0, 251, None, "all"):
        with pytest.raises(InvalidInput, match="limit"):
            people.purge(ALICE, limit)  # type: ignore[arg-type]
    for user in ("", None, "a\0"):
        with pytest.raises(InvalidInput, match="user_id"):
            people.purge(Owner(user))  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="user_id"):
            people.waiting(Owner(user))  # type: ignore[arg-type]
    assert people.waiting(ALICE) == 1


# --- rubbish --------------------------------------------------------------------------------------


def plant(world: World) -> None:
    """Put nonsense where records of alice and of others should be."""
    keys = world.keys
    for key in ("backlog", "held", "schedule_index", "user_names", "tenant_users", "runs"):
        for member in (
            b"rubbish",
            b"alice\0",
            b"alice\0x",
            b"\xff\xfe\0x",
            b"\0",
            b"",
            b"u",
            b"u\0",
        ):
            world.redis.zadd(keys[key], {member: 0})
    for member in (b"ualice\0x", b"ualice\0", b"ualice\x001700000000000szz", b"os\0x", b"u\xff\0"):
        world.redis.zadd(keys["runs"], {member: 0})
    world.redis.zadd(keys["parked"], {b"\xff": 5, b"alice": 1e300})
    world.redis.zadd(keys["ready"], {b"": 0, b"\xfe": 3})
    world.redis.hset(
        keys["users"], mapping={"alice": "[1]", "bob": "{", "carol": '{"weight":1e999}'}
    )
    world.redis.hset(
        keys["users"], "dave", '{"weight":"x","max_running":-1,"rate":true,"paused":1}'
    )
    world.redis.hset(keys["tenants"], mapping={"alice": b"\xff", "bob": ""})
    world.redis.hset(keys["running"], mapping={"alice": "x", "bob": "-3"})
    world.redis.hset(keys["status"], mapping={"zz": "{", "x": ""})
    world.redis.hset(keys["settings"], mapping={"keep_finished": "x", "keep_dead_ms": ""})


@pytest.mark.untidy
def test_planted_rubbish_crashes_no_reader(world: World, people: UserStats) -> None:
    world.fill("erin", 3)
    plant(world)
    users = ["alice", "bob", "carol", "dave", "erin"]
    found = people.read(owners(*users), world.now() - HOUR)
    assert [info.user_id for info in found] == users
    assert [info.settings for info in found] == [UserSettings()] * 5
    assert found[-1].backlog == 3
    assert all(0 <= info.entitled <= 1 and 0 <= info.received <= 1 for info in found)
    assert Owner("erin") in people.active()
    assert people.active(tenant="rubbish") == []
    listed = every_page(lambda cursor: people.names(1, cursor))
    assert set(owners("alice", "erin")) <= set(listed)
    assert len(set(listed)) == len(listed)
    series = people.shares(world.now() - HOUR, world.now(), 6, owners(*users))
    assert len(series.others) == 6
    assert people.overview(world.queue.inspect(), world.now() - HOUR).users > 0
    assert Owner("erin") not in people.top(world.now() - HOUR, 10)
    assert [people.next_task(user) for user in owners("alice", "bob")] == [None, None]


@pytest.mark.one_partition
@pytest.mark.untidy
def test_a_purge_drops_entries_that_are_none_and_ends(world: World, people: UserStats) -> None:
    world.fill("alice", 3)
    world.push("bobs", user_id="bob")
    world.redis.hset(world.keys["status"], "alice-1", "{")
    backlog = world.keys["backlog"]
    for member in ("alice\0", "alice\0x", "alice\x003\0bobs\0default", "alice\x003\0gone\0n"):
        world.redis.zadd(backlog, {member: 0})
    world.redis.zadd(world.keys["held"], {"alice\0x": 0})
    assert people.purge(ALICE) == 8
    assert people.purge(ALICE) == 0
    assert people.active() == owners("bob")
    assert world.claim_one().task.task_id == "bobs"
    infos = [world.queue.get(task_id) for task_id in ("alice-0", "alice-2")]
    assert [info and info.state for info in infos] == ["cancelled"] * 2


@pytest.mark.one_partition
@pytest.mark.untidy
@pytest.mark.parametrize("key", ["backlog", "runs", "users", "running"])
def test_a_key_of_another_type_is_named(world: World, people: UserStats, key: str) -> None:
    world.fill("alice", 1)
    world.spoil(key)
    with pytest.raises(RedisRefused, match=f"{key} is a string"):
        people.read(owners("alice"), world.now() - HOUR)


def test_a_buffered_run_is_delayed_without_a_known_end(world: World, people: UserStats) -> None:
    scheduler = TaskScheduler(world.queue, "one", lock_timeout=600.0)
    scheduler.add_schedule("* * * * *", "bob", schedule_id="s", overlap="buffer_one")
    for _ in range(2):
        world.advance(60)
        scheduler.tick()
        world.queue.claim("w", lease=1000)
    info = one(people, world, "bob")
    assert (info.running, info.delayed, info.delayed_until) == (1, 1, None)


@pytest.mark.one_partition
def test_a_purge_finds_what_an_older_version_delayed_though_the_numbers_agree(world: World) -> None:
    world.push("b", user_id="bob", delay=3600)
    index = world.keys["delayed_index"]
    of_bob: list[Any] = world.redis.zrange(index, 0, -1)
    world.push(*(f"a{n}" for n in range(600)), user_id="alice", delay=3600)
    world.redis.delete(index)  # as an older version leaves it: it delayed those of alice,
    others = {f"bob\x00001699990000000\0gone-{n}": 0.0 for n in range(600)}  # and took up these
    world.redis.zadd(index, {of_bob[0]: 0.0, **others})

    inspector = Inspector(world.queue)
    assert inspector.users.purge("alice") == 600
    purged = inspector.users.purge("alice", dry_run=False)

    assert purged == 600
    assert world.places()["delayed"] == ["b"]
    world.redis.zrem(index, *others)
