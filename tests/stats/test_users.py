"""Users with numbers: who they are, how each fares, what each got, and an end to a backlog."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import redis
from scheduling import before_script
from support import (
    beat,
    changes,
    check_consistency,
    claim_one,
    count_commands,
    dump,
    fill,
    places,
    push,
    spoil,
    stats,
)

from fairqueue import TaskQueue, TaskScheduler
from fairqueue.clock import ManualClock
from fairqueue.errors import InvalidInput, RedisRefused
from fairqueue.history.records import Run
from fairqueue.history.runs import History
from fairqueue.inspection import Inspector
from fairqueue.models import Page, UserSettings
from fairqueue.queue.delays import DelayIndex, index_delayed
from fairqueue.reasons import when
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.stats.users import PeopleStore, UserInfo

HOUR = timedelta(hours=1)


@pytest.fixture
def people(queue: TaskQueue) -> PeopleStore:
    return PeopleStore(queue.link)


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


def every_page(read: Callable[[str | None], Any]) -> list[str]:
    """All items of a listing, page by page."""
    found: list[str] = []
    cursor = None
    while True:
        page = read(cursor)
        found += page
        if page.cursor is None:
            return found
        assert cursor != page.cursor, "a page that leads to itself"
        cursor = page.cursor


def one(people: PeopleStore, clock: ManualClock, user: str) -> UserInfo:
    (info,) = people.read([user], clock.now() - HOUR)
    return info


# --- who is active --------------------------------------------------------------------------------


def test_users_with_waiting_or_running_tasks_are_active_the_largest_backlog_first(
    queue: TaskQueue, people: PeopleStore
) -> None:
    fill(queue, "runs", 1)
    claim_one(queue)
    fill(queue, "few", 2)
    fill(queue, "many", 5)
    fill(queue, "paused", 3)
    queue.set_user("paused", paused=True)
    queue.set_user("has settings only", weight=2)
    push(queue, "later", user_id="delayed", delay=60)
    assert people.active() == ["many", "paused", "few", "runs"]
    assert people.active(2) == ["many", "paused"]


def test_a_user_whose_tasks_wait_for_a_slot_is_active(
    queue: TaskQueue, people: PeopleStore
) -> None:
    queue.set_limits("default", slots=1)
    fill(queue, "alice", 1)
    fill(queue, "bob", 2)
    queue.claim("w", limit=3)
    assert queue.link.ask(("ZCARD", queue.keys["held"])) == [2]
    assert people.active() == ["bob", "alice"]


def test_active_users_of_a_tenant_are_found_however_many_others_there_are(
    queue: TaskQueue, people: PeopleStore
) -> None:
    for n in range(5):
        fill(queue, f"other-{n}", 1)
    push(queue, "a", "b", user_id="alice", tenant="acme")
    push(queue, "c", user_id="bob", tenant="acme")
    push(queue, "d", user_id="carol", tenant="acme.north")
    queue.set_user("dave", tenant="acme")
    assert people.active(tenant="acme") == ["alice", "bob"]
    assert people.active(1, tenant="acme") == ["alice"]
    assert people.active(tenant="nobody") == []


@pytest.mark.parametrize("limit", [0, 1001, None, 2.0, True])
def test_a_limit_that_is_none_is_refused(people: PeopleStore, limit: Any) -> None:
    with pytest.raises(InvalidInput, match="limit"):
        people.active(limit)
    with pytest.raises(InvalidInput, match="limit"):
        people.names(limit)


@pytest.mark.parametrize("tenant", ["", "a b", 3, "x" * 65, "a\0b"])
def test_a_tenant_that_is_none_is_refused(people: PeopleStore, tenant: Any) -> None:
    with pytest.raises(InvalidInput, match="tenant"):
        people.active(tenant=tenant)
    with pytest.raises(InvalidInput, match="tenant"):
        people.names(tenant=tenant)


# --- all names ------------------------------------------------------------------------------------


def know_some(queue: TaskQueue) -> list[str]:
    """Users that each are known in another way; all of them in order."""
    scheduler = TaskScheduler(queue)
    queue.set_limits("slow", slots=1)
    push(queue, "h1", "h2", user_id="held", name="slow")
    queue.claim("w", limit=2)
    run(queue, "ended", 3)
    push(queue, "r", user_id="runs")
    claim_one(queue)
    push(queue, "d", user_id="delayed", delay=60)
    push(queue, "t", user_id="retries")
    queue.retry(claim_one(queue), "broken", delay=60)
    fill(queue, "waits", 3)
    fill(queue, "wait", 1)  # the beginning of another name
    scheduler.add_schedule("0 9 * * *", "scheduled", schedule_id="one")
    scheduler.add_schedule("0 9 * * *", "Ünal", schedule_id="two")
    queue.set_user("set", weight=2)
    queue.set_user("waits", weight=2)
    queue.set_user("two words", paused=True)
    return sorted(
        [
            *("held", "ended", "runs", "delayed", "retries", "wait", "waits", "scheduled"),
            *("Ünal", "set", "two words"),
        ],
        key=str.encode,
    )


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_all_users_are_listed_in_order_each_once(
    queue: TaskQueue, people: PeopleStore, limit: int
) -> None:
    known = know_some(queue)
    assert every_page(lambda cursor: people.names(limit, cursor)) == known


def test_a_page_that_ends_with_the_last_user_says_so(queue: TaskQueue, people: PeopleStore) -> None:
    fill(queue, "alice", 1)
    fill(queue, "bob", 1)
    assert people.names(2).cursor is None
    assert people.names(1).cursor is not None


def test_names_may_be_those_that_begin_alike(queue: TaskQueue, people: PeopleStore) -> None:
    know_some(queue)
    found = every_page(lambda cursor: people.names(1, cursor, prefix="wait"))
    assert found == ["wait", "waits"]
    assert people.names(prefix="se") == ["set"]
    assert people.names(prefix="x") == []


def test_the_users_of_a_tenant_are_listed(queue: TaskQueue, people: PeopleStore) -> None:
    for n in range(5):
        push(queue, f"a{n}", user_id=f"user-{n}", tenant="acme")
        push(queue, f"b{n}", user_id=f"other-{n}", tenant="acmf")
    assert every_page(lambda cursor: people.names(2, cursor, "acme")) == [
        f"user-{n}" for n in range(5)
    ]
    assert people.names(tenant="acme", prefix="user-3") == ["user-3"]
    assert people.names(tenant="acm") == []


@pytest.mark.parametrize("cursor", ["*", "ü", 3, b"x"])
def test_a_cursor_that_is_none_is_refused(people: PeopleStore, cursor: Any) -> None:
    with pytest.raises(InvalidInput, match=r"cursor .* is none"):
        people.names(10, cursor)


def test_the_work_for_a_page_does_not_depend_on_how_many_tasks_users_have(
    own_server: Callable[..., EmbeddedServer],
) -> None:
    url = own_server().url
    with TaskQueue.from_url(url) as queue, redis.Redis.from_url(url) as client:
        for user in ("alice", "bob", "carol"):
            fill(queue, user, 500)
        before = count_commands(client)
        assert PeopleStore(queue.link).names(10) == ["alice", "bob", "carol"]
        assert (count_commands(client) - before)["zrangebylex"] <= 10


# --- how a user fares -----------------------------------------------------------------------------


def test_a_user_has_its_numbers(queue: TaskQueue, people: PeopleStore, clock: ManualClock) -> None:
    scheduler = TaskScheduler(queue)
    scheduler.add_schedule("0 9 * * *", "alice", schedule_id="one")
    scheduler.add_schedule("0 9 * * *", "alice", schedule_id="two")
    scheduler.add_schedule("0 9 * * *", "alice2", schedule_id="three")
    queue.set_user("alice", weight=3, max_running=5, max_waiting=100, rate=1000, tenant="acme")
    fill(queue, "alice", 4)
    fill(queue, "alice2", 1)
    clock.advance(7)
    push(queue, "late", user_id="alice", priority=6)
    assert claim_one(queue).task.task_id == "late"
    clock.advance(1)
    info = one(people, clock, "alice")
    assert info == UserInfo(
        user_id="alice",
        settings=UserSettings(weight=3, max_running=5, max_waiting=100, rate=1000, tenant="acme"),
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
        window_start=clock.now() - HOUR,
        is_known=True,
    )


def test_users_are_read_together_in_their_order(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    fill(queue, "alice", 1)
    fill(queue, "bob", 2)
    found = people.read(["bob", "nobody", "alice"], clock.now() - HOUR)
    assert [(info.user_id, info.backlog, info.is_known) for info in found] == [
        ("bob", 2, True),
        ("nobody", 0, False),
        ("alice", 1, True),
    ]
    assert people.read([], clock.now()) == []


def test_a_page_of_users_is_read_in_few_round_trips_and_who_wants_service_once_in_ten_seconds(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = [f"user-{n:03d}" for n in range(100)]
    for user in users:
        fill(queue, user, 1)
    sent = before_script(queue, monkeypatch, "user_stats", lambda: None)
    found = people.read(users, clock.now() - HOUR)
    assert [info.user_id for info in found] == users
    assert [info.entitled for info in found] == [pytest.approx(0.01)] * 100
    assert set(sent) == {"user_stats", "users_in_window", "backlogs"}
    assert len(sent) <= 20
    looked_up = sent.count("users_in_window")
    fill(queue, "new", 1)
    clock.advance(9)
    (info,) = people.read(["new"], clock.now() - HOUR)
    assert info.entitled == pytest.approx(1 / 101)  # with the user itself as it is now
    assert sent.count("users_in_window") == looked_up
    clock.advance(1)
    people.read(["new"], clock.now() - HOUR)
    assert sent.count("users_in_window") > looked_up


def test_bad_users_and_times_are_refused(people: PeopleStore, clock: ManualClock) -> None:
    for users in ([""], ["a\0"], [3], ["x" * 201], ["user"] * 101):
        with pytest.raises(InvalidInput, match="user"):
            people.read(users, clock.now())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="since"):
        people.read(["alice"], clock.now().replace(tzinfo=None))


@pytest.mark.parametrize("known_by", ["settings", "tenant", "schedule", "run", "waiting"])
def test_a_user_is_known_by_whatever_the_queue_has_of_it(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock, known_by: str
) -> None:
    if known_by == "settings":
        queue.set_user("alice", paused=True)
    elif known_by == "tenant":
        queue.set_user("alice", tenant="acme")
    elif known_by == "schedule":
        TaskScheduler(queue).add_schedule("0 9 * * *", "alice")
    elif known_by == "run":
        run(queue, "alice")
        clock.advance(2 * HOUR)  # before the window
    else:
        fill(queue, "alice", 1)
    assert one(people, clock, "alice").is_known
    assert people.knows("alice")
    assert not one(people, clock, "alic").is_known
    assert not people.knows("alic")


def test_the_task_that_is_handed_out_next_is_told(queue: TaskQueue, people: PeopleStore) -> None:
    assert people.next_task("alice") is None
    queue.set_limits("slow", slots=1)
    push(queue, "s1", "s2", name="slow")
    queue.claim("w", limit=2)
    assert people.next_task("alice") == "s2"  # it waits for a slot
    push(queue, "a", "b")
    push(queue, "urgent", priority=6)
    assert people.next_task("alice") == "urgent"


# --- why it is so ---------------------------------------------------------------------------------


def state(people: PeopleStore, clock: ManualClock, user: str = "alice") -> tuple[str, str]:
    info = one(people, clock, user)
    return info.state, info.why


def test_a_paused_user_says_so(queue: TaskQueue, people: PeopleStore, clock: ManualClock) -> None:
    queue.set_user("alice", paused=True)
    since = f"since {when(clock.now(), clock.now())}"
    assert state(people, clock) == ("paused", f"paused by an operator {since}")
    fill(queue, "alice", 1)
    assert state(people, clock) == ("paused", f"paused by an operator {since}; 1 task waits")
    until = clock.now() + HOUR
    queue.pause_user("alice", by="ann", note="unpaid", until=until)
    said = f"paused by ann {since} until {when(until, clock.now())}: unpaid; 1 task waits"
    assert state(people, clock) == ("paused", said)
    queue.pause_user("alice")
    assert one(people, clock, "alice").parked_until is None


def test_a_user_at_its_cap_says_so(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    queue.set_user("alice", max_running=2)
    fill(queue, "alice", 5)
    queue.claim("w", limit=5)
    assert state(people, clock) == ("capped", "has 2 of 2 running (max_running); 3 tasks wait")


def test_a_user_over_its_rate_says_when_it_goes_on(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    queue.set_user("alice", rate=2)
    fill(queue, "alice", 3)
    queue.finish(claim_one(queue))
    free = clock.now() + timedelta(seconds=0.5)
    at = when(free, clock.now())
    assert one(people, clock, "alice").parked_until == free
    assert state(people, clock) == (
        "rate limited",
        f"rate of 2/s reached, next at {at}; 2 tasks wait",
    )
    clock.advance(0.5)
    beat(queue)
    assert state(people, clock) == ("waiting", "2 tasks wait")


def test_a_user_who_waits_says_for_whom(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    for user in ("alice", "bob", "carol"):
        fill(queue, user, 3)
    assert state(people, clock, "alice") == ("waiting", "3 tasks wait; no worker is alive")
    beat(queue)
    assert state(people, clock, "alice") == ("waiting", "3 tasks wait; its turn is next")
    assert state(people, clock, "bob") == ("waiting", "3 tasks wait; 1 user is before it")
    assert state(people, clock, "carol") == ("waiting", "3 tasks wait; 2 users are before it")


def test_a_user_whose_tasks_wait_for_slots_says_so(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    queue.set_limits("default", slots=1)
    fill(queue, "bob", 1)
    claim_one(queue)
    fill(queue, "alice", 2)
    assert queue.claim("w", limit=3) == []
    assert state(people, clock) == ("waiting", "2 tasks wait for room in the limits of the names")


def test_a_user_with_nothing_to_wait_for_is_idle_or_served(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    assert state(people, clock) == ("idle", "nothing waits")
    fill(queue, "alice", 1)
    claim_one(queue)
    assert state(people, clock) == ("served", "has 1 running; nothing waits")


# --- shares ---------------------------------------------------------------------------------------


def test_received_is_the_share_of_all_runs_that_ended_in_the_window(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    run(queue, "alice", 5)
    clock.advance(2 * HOUR)
    run(queue, "alice", 3)
    run(queue, "alice2", 1)
    run(queue, "bob", 3)
    push(queue, "dead", "cancelled", user_id="bob")
    queue.bury(claim_one(queue), "no")
    queue.cancel("cancelled")
    clock.advance(1)
    found = people.read(["alice", "alice2", "bob", "carol"], clock.now() - HOUR)
    assert [(info.ended, info.received) for info in found] == [
        (3, 3 / 8),
        (1, 1 / 8),
        (4, 4 / 8),  # what was cancelled before it ran has taken nothing of the others
        (0, 0.0),
    ]
    (all_day,) = people.read(["alice"], clock.now() - 3 * HOUR)
    assert (all_day.ended, all_day.received) == (8, 8 / 13)


def test_entitled_is_the_weight_among_those_who_want_service(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    for user, weight in (("waits", 2), ("ended", 3), ("paused", 4), ("idle", 100)):
        queue.set_user(user, weight=weight)
    run(queue, "idle")
    clock.advance(2 * HOUR)
    run(queue, "ended")
    fill(queue, "runs", 1)
    claim_one(queue)
    fill(queue, "waits", 1)
    queue.set_user("paused", paused=True)
    fill(queue, "paused", 1)
    found = people.read(["waits", "ended", "paused", "runs", "idle"], clock.now() - HOUR)
    assert [info.entitled for info in found] == pytest.approx([0.2, 0.3, 0.4, 0.1, 0.0])


def test_nobody_is_entitled_to_more_than_it_wanted(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    for user, pushed in (("noisy", 80), ("quiet", 2), ("other", 40)):
        fill(queue, user, pushed)
    queue.finish_many((claim, None) for claim in queue.claim("w", limit=42))

    found = people.read(["noisy", "quiet", "other"], clock.now() - HOUR)

    assert [info.received for info in found] == pytest.approx([20 / 42, 2 / 42, 20 / 42])
    assert [info.entitled for info in found] == pytest.approx([20 / 42, 2 / 42, 20 / 42])


def test_waits_are_those_of_the_last_runs_in_the_window(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    for seconds in (1000, *range(1, 21)):
        push(queue, f"task-{seconds}")
        clock.advance(seconds)
        queue.finish(claim_one(queue))
    info = one(people, clock, "alice")
    assert (info.wait_p50, info.wait_p95) == (10.0, 19.0)
    clock.advance(2 * HOUR)
    assert one(people, clock, "alice").wait_p50 is None


def test_the_window_begins_where_history_is_whole(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    queue.configure(keep_finished=10)
    for n in range(15):
        run(queue, "alice" if n % 2 else "bob")
        clock.advance(10)
    whole_since = clock.now() - timedelta(seconds=100)
    info = one(people, clock, "alice")
    assert (info.window_start, info.ended, info.received) == (whole_since, 5, 0.5)
    view = people.overview(queue.inspect(), clock.now() - HOUR)
    assert (view.window_start, view.ended, view.users) == (whole_since, 10, 2)
    (recent,) = people.read(["bob"], clock.now() - timedelta(seconds=45))
    assert (recent.window_start, recent.ended) == (clock.now() - timedelta(seconds=45), 2)


def test_the_window_is_no_longer_than_ended_runs_are_kept(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    queue.configure(keep_finished_for=600)
    assert one(people, clock, "alice").window_start == clock.now() - timedelta(minutes=10)
    queue.configure(keep_finished=0)
    assert one(people, clock, "alice").window_start == clock.now()


def test_dead_letters_cut_the_window_only_where_they_are_kept(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    queue.configure(keep_dead=1)
    for name in ("a", "b"):
        push(queue, name)
        queue.bury(claim_one(queue), "no")
        clock.advance(10)
    assert one(people, clock, "alice").window_start == clock.now() - timedelta(seconds=10)
    queue.configure(keep_dead=0)
    run(queue, "bob")
    assert one(people, clock, "alice").window_start == clock.now() - HOUR


def test_an_overview_says_how_evenly_users_are_served(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    fill(queue, "alice", 50)
    fill(queue, "bob", 50)
    run_some(queue, clock)
    snapshot = queue.inspect()
    view = people.overview(snapshot, clock.now() - HOUR)
    assert (view.users, view.backlogged, view.ended) == (2, 2, 40)
    assert view.jain == snapshot.jain_index == 1.0
    assert view.window_start == clock.now() - HOUR


def test_the_jain_index_is_that_of_the_window(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    fill(queue, "alice", 50)
    queue.claim("w", limit=10)  # alice is served alone, long ago
    fill(queue, "bob", 50)
    taken = queue.claim("w", limit=10, lease=600)
    own = [claim for claim in taken if claim.task.user_id == "alice"]
    queue.finish_many((claim, None) for claim in own)
    clock.advance(1200)
    for _ in range(10):
        queue.finish_many((claim, None) for claim in queue.claim("w", limit=2))
    index = {
        seconds: people.overview(queue.inspect(), clock.now() - timedelta(seconds=seconds)).jain
        for seconds in (600, 3600)
    }
    lately, in_all = index[600], index[3600]
    assert lately == 1.0
    assert in_all is not None
    assert in_all < 0.99


def test_whom_somebody_has_limited_takes_no_part_in_the_jain_index(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    for user in ("alice", "bob", "slow", "capped", "paused"):
        fill(queue, user, 50)
    queue.set_user("slow", rate=0.001)
    queue.set_user("capped", max_running=1)
    queue.set_user("paused", paused=True)
    for _ in range(10):
        queue.finish_many((claim, None) for claim in queue.claim("w", limit=10))
    view = people.overview(queue.inspect(), clock.now() - HOUR)
    assert view.jain == pytest.approx(1.0, abs=0.001)
    assert view.users == 5


def run_some(queue: TaskQueue, clock: ManualClock) -> None:
    """Run forty tasks over two windows in which the service of users is compared."""
    for _ in range(4):
        claims = queue.claim("w", limit=10)
        queue.finish_many((claim, None) for claim in claims)
        clock.advance(10)


def test_of_too_many_users_so_many_are_summed(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairqueue.stats.users.MAX_SUMMED", 4)
    for n in range(10):
        fill(queue, f"user-{n}", 1)
    found = people.read(["user-9", "user-8"], clock.now() - HOUR)
    assert [info.entitled for info in found] == [1 / 6, 1 / 6]  # of four, and themselves
    assert people.overview(queue.inspect(), clock.now() - HOUR).users == 4


def test_the_users_who_got_most_are_found(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    run(queue, "old", 9)
    clock.advance(2 * HOUR)
    for user, count in (("alice", 3), ("bob", 5), ("carol", 1), ("dave", 3)):
        run(queue, user, count)
    fill(queue, "waits", 20)
    queue.set_user("carol", tenant="acme")
    since = clock.now() - HOUR
    assert people.top(since, 3) == ["bob", "alice", "dave"]
    assert people.top(since, 10) == ["bob", "alice", "dave", "carol"]
    assert people.top(since, 10, "acme") == ["carol"]


def test_the_users_who_got_most_are_found_in_several_parts(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairqueue.stats.users.SUMMED_CHUNK", 3)
    for n in range(10):
        run(queue, f"user-{n}", n + 1)
    clock.advance(1)
    top = people.top(clock.now() - HOUR, 10)
    assert top == [f"user-{n}" for n in range(9, -1, -1)]
    assert people.overview(queue.inspect(), clock.now() - HOUR).users == 10


def test_shares_over_time_are_counted_by_user_and_of_the_others(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    start = clock.now()
    run(queue, "alice", 2)
    run(queue, "bob", 1)
    clock.advance(59.999)
    run(queue, "carol", 4)
    clock.advance(0.001)
    run(queue, "alice", 3)
    clock.advance(120)
    run(queue, "bob", 5)
    series = people.shares(start, start + timedelta(minutes=4), 4, ["alice", "bob", "alice"])
    assert series.times == [start + timedelta(minutes=n) for n in range(4)]
    assert series.users == ["alice", "bob"]
    assert series.counts == {"alice": [2, 3, 0, 0], "bob": [1, 0, 0, 5]}
    assert series.others == [4, 0, 0, 0]
    assert series.window_start == start


def test_the_others_of_a_tenant_are_its_own(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    push(queue, "a", "b", user_id="alice", tenant="acme")
    push(queue, "c", user_id="bob", tenant="acme")
    push(queue, "d", user_id="carol")
    queue.finish_many((claim, None) for claim in queue.claim("w", limit=4))
    until = clock.now() + timedelta(seconds=1)
    series = people.shares(clock.now(), until, 1, ["alice"], "acme")
    assert (series.counts, series.others) == ({"alice": [2]}, [1])


def test_shares_that_cannot_be_are_refused(people: PeopleStore, clock: ManualClock) -> None:
    now, later = clock.now(), clock.now() + HOUR
    for buckets in (0, 61, None):
        with pytest.raises(InvalidInput, match="buckets"):
            people.shares(now, later, buckets, [])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="is not before"):
        people.shares(later, now, 5, [])
    with pytest.raises(InvalidInput, match="11 users are too many"):
        people.shares(now, later, 5, [f"user-{n}" for n in range(11)])
    with pytest.raises(InvalidInput, match="user_id"):
        people.shares(now, later, 5, [""])


# --- users with nothing but delayed tasks ---------------------------------------------------------


def test_a_user_with_only_delayed_tasks_is_known(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    assert not people.knows("alice")
    push(queue, "a", "b", user_id="alice", delay=60)
    push(queue, "soon", user_id="alice", delay=30)
    assert people.knows("alice")
    info = one(people, clock, "alice")
    assert (info.is_known, info.delayed, info.backlog, info.state) == (True, 3, 0, "idle")
    assert info.delayed_until == clock.now() + timedelta(seconds=30)
    assert people.names() == ["alice"]
    listed = History(queue).runs(("pending", "retrying"), user_id="alice")
    assert [run.task_id for run in listed] == ["b", "a", "soon"]


def test_a_user_with_only_a_retrying_task_is_known(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock
) -> None:
    push(queue, "a", user_id="alice")
    queue.retry(claim_one(queue), "broken", delay=60)
    assert people.knows("alice")
    assert one(people, clock, "alice").delayed == 1
    assert [run.task_id for run in History(queue).runs("retrying", user_id="alice")] == ["a"]
    clock.advance(61)
    queue.finish(claim_one(queue))
    assert one(people, clock, "alice").delayed == 0


def test_delayed_tasks_of_a_user_are_listed_page_by_page(
    queue: TaskQueue, clock: ManualClock
) -> None:
    for n in range(7):
        push(queue, f"t{n}", user_id="alice", delay=60 + n)
        push(queue, f"o{n}", user_id="alice2", delay=60 + n)
    history = History(queue)
    found = every_page(
        lambda cursor: _ids(history.runs("pending", user_id="alice", limit=2, cursor=cursor))
    )
    assert found == [f"t{n}" for n in reversed(range(7))]


def _ids(page: Page[Run]) -> Page[str]:
    return Page([run.task_id for run in page], page.cursor)


def test_delayed_tasks_that_an_older_version_stored_are_found(
    queue: TaskQueue, people: PeopleStore, redis_client: redis.Redis, clock: ManualClock
) -> None:
    push(queue, *(f"old-{n}" for n in range(600)), user_id="alice", delay=60)
    redis_client.delete(queue.keys["delayed_index"])
    push(queue, "new", user_id="alice", delay=60)
    assert people.knows("alice")
    assert one(people, clock, "alice").delayed == 601
    check_consistency(redis_client)
    # An older worker takes them up and leaves the index as it is.
    left = dump(redis_client)["delayed_index"]
    clock.advance(61)
    while claims := queue.claim("w", limit=250):
        queue.finish_many((claim, None) for claim in claims)
    redis_client.zadd(queue.keys["delayed_index"], left)
    assert one(people, clock, "alice").delayed == 0
    assert "delayed_index" not in dump(redis_client)


def test_the_index_of_delayed_tasks_is_made_in_bounded_steps(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    push(queue, *(f"old-{n}" for n in range(1000)), user_id="alice", delay=60)
    redis_client.delete(queue.keys["delayed_index"])
    with mock.patch("fairqueue.queue.delays.MAX_STEPS", 2):
        index_delayed(queue.link)
        assert 0 < redis_client.zcard(queue.keys["delayed_index"]) < 1000
        for _ in range(10):  # each goes on where the one before it stopped
            index_delayed(queue.link)
    assert redis_client.zcard(queue.keys["delayed_index"]) == 1000
    first = redis_client.zrange(queue.keys["delayed_index"], 0, 0)
    redis_client.zrem(queue.keys["delayed_index"], *first)
    index_delayed(queue.link)
    assert redis_client.zcard(queue.keys["delayed_index"]) == 1000
    redis_client.zadd(queue.keys["delayed_index"], {"alice\x00001699990000000\0gone": 0})
    index_delayed(queue.link)
    assert redis_client.zcard(queue.keys["delayed_index"]) == 1000


def test_what_cannot_be_indexed_is_not_looked_for_at_each_heartbeat(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock
) -> None:
    """One record that cannot be read must not let each worker walk through all, again and again."""
    push(queue, *(f"t{n}" for n in range(600)), user_id="alice", delay=3600)
    redis_client.zadd(queue.keys["delayed"], {"ghost": clock.now_ms() + 3_600_000})
    index_delayed(queue.link)
    with mock.patch.object(
        DelayIndex, "_step", autospec=True, side_effect=DelayIndex._step
    ) as step:
        index_delayed(queue.link)
        clock.advance(59)
        index_delayed(queue.link)
        assert step.call_count == 0
        # Something else is amiss: that is looked for at once.
        redis_client.zrem(
            queue.keys["delayed_index"], *redis_client.zrange(queue.keys["delayed_index"], 0, 0)
        )
        index_delayed(queue.link)
        assert step.call_count > 0
        assert redis_client.zcard(queue.keys["delayed_index"]) == 600
        step.reset_mock()
        clock.advance(61)
        index_delayed(queue.link)
        assert step.call_count > 0
    redis_client.zrem(queue.keys["delayed"], "ghost")
    index_delayed(queue.link)
    left = set(redis_client.hkeys(queue.keys["fair"]))
    assert not left & {b"index_from", b"index_off"}


# --- purge ----------------------------------------------------------------------------------------


def test_a_purge_misses_no_delayed_task_that_an_older_version_stored(
    queue: TaskQueue, people: PeopleStore, redis_client: redis.Redis
) -> None:
    """Also where there are more than one look brings into the index."""
    push(queue, *(f"bob-{n}" for n in range(2000)), user_id="bob", delay=60)
    push(queue, *(f"alice-{n}" for n in range(3)), user_id="alice", delay=60)
    redis_client.delete(queue.keys["delayed_index"])
    with mock.patch("fairqueue.queue.delays.MAX_STEPS", 1):
        assert people.purge("alice") == 3
        assert people.purge("alice") == 0
    assert redis_client.zcard(queue.keys["delayed"]) == 2000


def test_a_purge_cancels_what_waits_and_history_has_it_as_cancelled(
    queue: TaskQueue, people: PeopleStore, redis_client: redis.Redis
) -> None:
    fill(queue, "alice", 5)
    fill(queue, "alice2", 2)
    push(queue, "later", user_id="alice", delay=60)
    claim = claim_one(queue)
    assert people.waiting("alice") == 5
    assert people.purge("alice") == 5
    assert people.purge("alice") == people.waiting("alice") == 0
    dropped = ["alice-1", "alice-2", "alice-3", "alice-4", "later"]
    assert places(redis_client) == {
        "running": ["alice-0"],
        "cancelled": dropped,
        "ready": ["alice2-0", "alice2-1"],
    }
    ended = History(queue).runs("cancelled", user_id="alice")
    assert sorted(run.task_id for run in ended) == dropped
    assert stats(redis_client)["cancelled"] == 5
    queue.finish(claim)


def test_a_purge_takes_delayed_and_retrying_tasks_in_bounded_steps(
    queue: TaskQueue, people: PeopleStore, redis_client: redis.Redis
) -> None:
    push(queue, "again", user_id="alice")
    queue.retry(claim_one(queue), "broken", delay=30)
    push(queue, *(f"later-{n}" for n in range(150)), user_id="alice", delay=60)
    push(queue, "other", user_id="alice2", delay=60)
    assert people.waiting("alice") == 151
    assert [people.purge("alice", 40), people.purge("alice"), people.purge("alice")] == [
        *(40, 100, 11)
    ]
    assert places(redis_client)["delayed"] == ["other"]
    assert dump(redis_client)["delayed"].keys() == {"other"}


def test_a_purge_takes_at_most_so_many(queue: TaskQueue, people: PeopleStore) -> None:
    fill(queue, "alice", 110)
    assert [people.purge("alice", 4), people.purge("alice"), people.purge("alice")] == [4, 100, 6]


def test_a_purge_takes_what_waits_for_slots(
    queue: TaskQueue, people: PeopleStore, redis_client: redis.Redis
) -> None:
    queue.set_limits("slow", slots=1)
    push(queue, "one", "two", "three", name="slow")
    queue.claim("w", limit=3)
    fill(queue, "alice", 2)
    assert people.waiting("alice") == 4
    assert [people.purge("alice", 3), people.purge("alice", 3)] == [3, 1]
    assert "held" not in dump(redis_client)
    assert "slot_line" not in dump(redis_client)


@pytest.mark.parametrize("paused", [False, True])
def test_a_user_who_was_purged_is_served_again_later(
    queue: TaskQueue, people: PeopleStore, paused: bool
) -> None:
    queue.set_user("alice", paused=paused)
    fill(queue, "alice", 3, priority=6)
    people.purge("alice")
    assert people.active() == []
    queue.set_user("alice", paused=False)
    push(queue, "new")
    assert claim_one(queue).task.task_id == "new"


def test_a_purge_that_arrives_twice_is_one(
    queue: TaskQueue, people: PeopleStore, redis_client: redis.Redis
) -> None:
    fill(queue, "alice", 5)
    arguments: dict[str, Any] = {"op": "op", "user": "alice", "limit": 2}
    assert queue.link.run("purge", **arguments) == 2
    before = dump(redis_client)
    assert queue.link.run("purge", **arguments) == 2
    assert changes(before, dump(redis_client)) == {}


def test_a_purge_keeps_the_retention(
    queue: TaskQueue, people: PeopleStore, redis_client: redis.Redis
) -> None:
    queue.configure(keep_finished=10)
    fill(queue, "alice", 100)
    assert people.purge("alice") == 100
    assert len(places(redis_client)["cancelled"]) == 10


def test_bad_purges_are_refused(queue: TaskQueue, people: PeopleStore) -> None:
    fill(queue, "alice", 1)
    for limit in (0, 251, None, "all"):
        with pytest.raises(InvalidInput, match="limit"):
            people.purge("alice", limit)  # type: ignore[arg-type]
    for user in ("", None, "a\0"):
        with pytest.raises(InvalidInput, match="user_id"):
            people.purge(user)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="user_id"):
            people.waiting(user)  # type: ignore[arg-type]
    assert people.waiting("alice") == 1


# --- rubbish --------------------------------------------------------------------------------------


def plant(client: redis.Redis, queue: TaskQueue) -> None:
    """Put nonsense where records of alice and of others should be."""
    keys = queue.keys
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
            client.zadd(keys[key], {member: 0})
    for member in (b"ualice\0x", b"ualice\0", b"ualice\x001700000000000szz", b"os\0x", b"u\xff\0"):
        client.zadd(keys["runs"], {member: 0})
    client.zadd(keys["parked"], {b"\xff": 5, b"alice": 1e300})
    client.zadd(keys["ready"], {b"": 0, b"\xfe": 3})
    client.hset(keys["users"], mapping={"alice": "[1]", "bob": "{", "carol": '{"weight":1e999}'})
    client.hset(keys["users"], "dave", '{"weight":"x","max_running":-1,"rate":true,"paused":1}')
    client.hset(keys["tenants"], mapping={"alice": b"\xff", "bob": ""})
    client.hset(keys["running"], mapping={"alice": "x", "bob": "-3"})
    client.hset(keys["status"], mapping={"zz": "{", "x": ""})
    client.hset(keys["settings"], mapping={"keep_finished": "x", "keep_dead_ms": ""})


@pytest.mark.untidy
def test_planted_rubbish_crashes_no_reader(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock, redis_client: redis.Redis
) -> None:
    fill(queue, "erin", 3)
    plant(redis_client, queue)
    users = ["alice", "bob", "carol", "dave", "erin"]
    found = people.read(users, clock.now() - HOUR)
    assert [info.user_id for info in found] == users
    assert [info.settings for info in found] == [UserSettings()] * 5
    assert found[-1].backlog == 3
    assert all(0 <= info.entitled <= 1 and 0 <= info.received <= 1 for info in found)
    assert "erin" in people.active()
    assert people.active(tenant="rubbish") == []
    listed = every_page(lambda cursor: people.names(1, cursor))
    assert {"alice", "erin"} <= set(listed)
    assert len(set(listed)) == len(listed)
    series = people.shares(clock.now() - HOUR, clock.now(), 6, users)
    assert len(series.others) == 6
    assert people.overview(queue.inspect(), clock.now() - HOUR).users > 0
    assert "erin" not in people.top(clock.now() - HOUR, 10)
    assert [people.next_task(user) for user in ("alice", "bob")] == [None, None]


@pytest.mark.untidy
def test_a_purge_drops_entries_that_are_none_and_ends(
    queue: TaskQueue, people: PeopleStore, redis_client: redis.Redis
) -> None:
    fill(queue, "alice", 3)
    push(queue, "bobs", user_id="bob")
    redis_client.hset(queue.keys["status"], "alice-1", "{")
    backlog = queue.keys["backlog"]
    for member in ("alice\0", "alice\0x", "alice\x003\0bobs\0default", "alice\x003\0gone\0n"):
        redis_client.zadd(backlog, {member: 0})
    redis_client.zadd(queue.keys["held"], {"alice\0x": 0})
    assert people.purge("alice") == 8
    assert people.purge("alice") == 0
    assert people.active() == ["bob"]
    assert claim_one(queue).task.task_id == "bobs"
    infos = [queue.get(task_id) for task_id in ("alice-0", "alice-2")]
    assert [info and info.state for info in infos] == ["cancelled"] * 2


@pytest.mark.untidy
@pytest.mark.parametrize("key", ["backlog", "runs", "users", "running"])
def test_a_key_of_another_type_is_named(
    queue: TaskQueue, people: PeopleStore, clock: ManualClock, redis_client: redis.Redis, key: str
) -> None:
    fill(queue, "alice", 1)
    spoil(redis_client, queue, key)
    with pytest.raises(RedisRefused, match=f"{key} is a string"):
        people.read(["alice"], clock.now() - HOUR)


def test_a_run_that_waits_for_the_one_before_it_is_delayed_until_nobody_knows_when(
    queue: TaskQueue, clock: ManualClock, people: PeopleStore
) -> None:
    scheduler = TaskScheduler(queue, "one", lock_timeout=600.0)
    scheduler.add_schedule("* * * * *", "bob", schedule_id="s", overlap="buffer_one")
    for _ in range(2):
        clock.advance(60)
        scheduler.tick()
        queue.claim("w", lease=1000)
    info = one(people, clock, "bob")
    assert (info.running, info.delayed, info.delayed_until) == (1, 1, None)


def test_a_purge_finds_what_an_older_version_delayed_though_the_numbers_agree(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    push(queue, "b", user_id="bob", delay=3600)
    index = queue.keys["delayed_index"]
    of_bob: list[Any] = redis_client.zrange(index, 0, -1)
    push(queue, *(f"a{n}" for n in range(600)), user_id="alice", delay=3600)
    redis_client.delete(index)  # as an older version leaves it: it delayed those of alice,
    others = {f"bob\x00001699990000000\0gone-{n}": 0.0 for n in range(600)}  # and took up these
    redis_client.zadd(index, {of_bob[0]: 0.0, **others})

    inspector = Inspector(queue)
    assert inspector.users.purge("alice") == 600
    purged = inspector.users.purge("alice", dry_run=False)

    assert purged == 600
    assert places(redis_client)["delayed"] == ["b"]
    redis_client.zrem(index, *others)
