"""Who did what: an entry before the change, its end afterwards, and pages of them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from helpers.network import LossyProxy
from helpers.state import dump
from helpers.tasks import Unshowable
from helpers.world import World

from fairqueue.access.audit import CUT, MAX_DETAILS_BYTES, AuditEntry, AuditLog
from fairqueue.access.credentials import Actor
from fairqueue.clock import ManualClock
from fairqueue.errors import InvalidInput
from fairqueue.queue.queue import TaskQueue

ANN = Actor(name="ann", role="operator", tenant="acme", via="rest", key_id="0123456789abcdef")
SPOILT = b"1700000000000-999999-" + b"a" * 24


@pytest.fixture
def log(queue: TaskQueue) -> AuditLog:
    return AuditLog(queue.link)


@pytest.fixture
def plant(world: World) -> Callable[..., None]:
    """Put members into the log that it has not written."""

    def plant(*members: bytes) -> None:
        world.redis.zadd(world.keys["audit"], dict.fromkeys(members, 0))

    return plant


def write(log: AuditLog, target: str = "s1", **fields: Any) -> str:
    """An entry that was begun."""
    fields = {"actor": ANN, "action": "schedule.pause", **fields}
    return log.begin(target=target, **fields)


def targets(entries: list[AuditEntry]) -> list[str]:
    return [entry.target for entry in entries]


# --- one entry ------------------------------------------------------------------------------------


def test_an_entry_is_written_before_its_outcome_is_known(log: AuditLog, clock: ManualClock) -> None:
    began = clock.now()
    entry_id = log.begin(ANN, "schedule.pause", "s1", tenant="other", details={"note": "x"})
    started = AuditEntry(
        entry_id=entry_id,
        at=began,
        actor="ann",
        role="operator",
        via="rest",
        key_id="0123456789abcdef",
        tenant="other",
        action="schedule.pause",
        target="s1",
        outcome="started",
        details={"note": "x"},
        error=None,
    )
    assert log.entries() == [started]
    clock.advance(5)
    assert log.end(entry_id, "failed", "no such schedule", {"tried": 2}) is True
    (ended,) = log.entries()
    assert (ended.at, ended.outcome, ended.error) == (began, "failed", "no such schedule")
    assert ended.details == {"note": "x", "tried": 2}


def test_what_belongs_to_no_tenant_is_written_under_that_of_the_actor(log: AuditLog) -> None:
    write(log)
    write(log, actor=Actor(name="root"))
    assert [entry.tenant for entry in log.entries()] == [None, "acme"]


def test_the_first_end_of_an_entry_stands(log: AuditLog) -> None:
    entry_id = write(log)
    assert log.end(entry_id, "done") is True
    assert log.end(entry_id, "done") is True
    assert log.end(entry_id, "failed", "late") is False
    assert [(entry.outcome, entry.error) for entry in log.entries()] == [("done", None)]


def test_a_gone_entry_is_not_ended(log: AuditLog, redis_client: redis.Redis) -> None:
    entry_id = write(log)
    redis_client.flushdb()
    assert log.end(entry_id, "done") is False
    assert dump(redis_client) == {}


@pytest.mark.parametrize("outcome", ["started", "", None, "DONE"])
def test_an_outcome_that_is_none_is_refused(log: AuditLog, outcome: Any) -> None:
    with pytest.raises(InvalidInput, match="outcome"):
        log.end(write(log), outcome)


@pytest.mark.parametrize("entry_id", ["", "x", None, "1700000000000-000000-" + "g" * 24])
def test_an_id_that_is_none_is_refused(log: AuditLog, entry_id: Any) -> None:
    with pytest.raises(InvalidInput, match="entry_id"):
        log.end(entry_id, "done")


@pytest.mark.parametrize("action", ["", None, "a\0b", "x" * 201])
def test_an_action_that_is_no_name_is_refused_and_nothing_is_stored(
    log: AuditLog, redis_client: redis.Redis, action: Any
) -> None:
    with pytest.raises(InvalidInput, match="action"):
        write(log, action=action)
    assert dump(redis_client) == {}


def test_entries_that_are_ended_at_the_same_time_all_end(log: AuditLog) -> None:
    ids = [write(log, f"s{n}") for n in range(20)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda entry_id: log.end(entry_id, "done"), ids)) == [True] * 20
    entries = log.entries()
    assert {entry.outcome for entry in entries} == {"done"}
    assert sorted(targets(entries)) == sorted(f"s{n}" for n in range(20))


def test_a_lost_reply_writes_an_entry_once(far: TaskQueue, proxy: LossyProxy) -> None:
    log = AuditLog(far.link)
    entry_id = proxy.losing(lambda: write(log))
    assert proxy.losing(lambda: log.end(entry_id, "done")) is True
    assert [(e.entry_id, e.outcome) for e in log.entries()] == [(entry_id, "done")]


# --- details --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("details", "kept"),
    [
        (None, {}),
        ({"n": 1, "f": 1.5, "t": True, "x": None}, {"n": 1, "f": 1.5, "t": True, "x": None}),
        ({"empty": [], "o": {}, "deep": [[1, {"a": "b"}]]},) * 2,
        ({"big": 2**60, "nul": "a\0b", "name": "Zoë ☃"},) * 2,
        ({"tuple": (1, 2)}, {"tuple": [1, 2]}),
        ({"nan": float("nan"), "inf": float("inf")}, {"nan": "nan", "inf": "inf"}),
        ({1: {2: 3}}, {"1": {"2": 3}}),
        ({"set": {7}, "type": int}, {"set": "{7}", "type": "<class 'int'>"}),
        ({"lone": "\ud800"}, {"lone": "?"}),
        ({"long": "x" * 501}, {"long": "x" * 500 + CUT}),
        ({"many": list(range(101))}, {"many": [*range(100), CUT]}),
        ({"x": Unshowable()}, {"unwritable": "RuntimeError"}),
        ({"x": 10**5000}, {"unwritable": "ValueError"}),
        ("no details", {"unwritable": "ValueError"}),
    ],
    ids=range(14),
)
def test_details_are_written_best_effort(log: AuditLog, details: Any, kept: dict[str, Any]) -> None:
    log.end(write(log, details=details), "done")
    (entry,) = log.entries()
    assert entry.details == kept


@pytest.mark.parametrize(
    "details",
    [
        {f"k{n}": "x" * 400 for n in range(50)},
        {f"k{n}": "☃" * 400 for n in range(50)},
        {f"k{n}": '"\\\0' * 100 for n in range(50)},
        {f"k{n}": n for n in range(100_000)},
        {"x" * 100_000: {"y" * 100_000: "z" * 100_000}},
    ],
    ids=["ascii", "snow", "escapes", "many", "long"],
)
def test_details_that_are_too_large_are_cut(
    log: AuditLog, redis_client: redis.Redis, details: dict[str, Any]
) -> None:
    entry_id = write(log, details=details)
    assert log.end(entry_id, "done", details=details) is True
    (member,) = dump(redis_client)["audit"]
    assert len(member.encode()) < 2 * MAX_DETAILS_BYTES + 1000
    assert CUT in member
    assert log.entries()[0].outcome == "done"


def test_details_that_hold_themselves_are_cut(log: AuditLog) -> None:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    write(log, details=circle)
    assert log.entries()[0].details["again"]["again"]


def test_a_long_target_or_error_is_cut(log: AuditLog) -> None:
    log.end(write(log, "t" * 1000), "failed", "e" * 10_000)
    (entry,) = log.entries()
    assert entry.target == "t" * 500 + CUT
    assert entry.error == "e" * 2000 + CUT


# --- listings -------------------------------------------------------------------------------------


@pytest.fixture
def written(log: AuditLog, clock: ManualClock) -> AuditLog:
    """Six entries, a second apart."""
    bob = Actor(name="bob", tenant="other")
    for actor, action, target in (
        (ANN, "schedule.pause", "s1"),
        (bob, "schedule.pause", "s2"),
        (ANN, "schedule.resume", "s1"),
        (ANN, "task.push", "t1"),
        (bob, "scheduler", "s1"),
        (Actor(name="root"), "key.create", "k1"),
    ):
        log.end(log.begin(actor, action, target), "done")
        clock.advance(1)
    return log


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({}, ["k1", "s1", "t1", "s1", "s2", "s1"]),
        ({"actor": "ann"}, ["t1", "s1", "s1"]),
        ({"action": "schedule."}, ["s1", "s2", "s1"]),
        ({"action": "schedule.pause"}, ["s2", "s1"]),
        ({"target": "s1"}, ["s1", "s1", "s1"]),
        ({"tenant": "other"}, ["s1", "s2"]),
        ({"tenant": "nobody"}, []),
        ({"actor": "ann", "target": "s1", "action": "schedule.r"}, ["s1"]),
    ],
)
def test_entries_are_listed_newest_first_by_filters(
    written: AuditLog, filters: dict[str, Any], found: list[str]
) -> None:
    assert targets(written.entries(**filters)) == found


def test_a_time_range_includes_its_start_but_not_its_end(log: AuditLog, clock: ManualClock) -> None:
    times = []
    for n in range(4):
        times.append(clock.now())
        write(log, str(n))
        clock.advance(1)
    assert targets(log.entries(since=times[1], until=times[3])) == ["2", "1"]
    assert targets(log.entries(since=times[1].timestamp())) == ["3", "2", "1"]
    assert targets(log.entries(until=0)) == []
    assert targets(log.entries(since=200_000_000_000)) == []


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("filters", [{}, {"actor": "ann"}, {"actor": "ann", "until": 1.7e9 + 3}])
def test_pages_hold_each_entry_once(written: AuditLog, limit: int, filters: dict[str, Any]) -> None:
    whole = written.entries(**filters)
    assert whole.cursor is None
    found: list[AuditEntry] = []
    cursor = None
    for _ in range(10):
        page = written.entries(limit=limit, cursor=cursor, **filters)
        assert len(page) <= limit
        found += page
        cursor = page.cursor
        if cursor is None:
            break
    assert found == whole


def test_entries_of_one_moment_are_listed_in_their_order(log: AuditLog) -> None:
    for n in range(20):
        write(log, str(n))
    assert targets(log.entries()) == [str(n) for n in reversed(range(20))]


def test_a_page_of_a_whole_read_has_a_next(log: AuditLog, plant: Callable[..., None]) -> None:
    head = b'{"actor":"a","role":"admin","via":"cli","action":"a","target":"%s","details":{}}'
    rows = [b"mine" if n % 502 == 501 else b"other" for n in range(1200)]  # 2 and 500 are read
    base = 1_700_000_000_000
    plant(
        *(
            b"%013d-000000-%024x\0" % (base - n, n) + head % target + b"\0"
            for n, target in enumerate(rows)
        )
    )
    page = log.entries(target="mine", limit=1)
    assert len(page) == 1
    assert page.cursor == page[0].entry_id
    assert len(log.entries(target="mine", cursor=page.cursor)) == 1


def test_a_page_is_not_moved_by_entries_that_come_while_it_is_read(written: AuditLog) -> None:
    first = written.entries(limit=2)
    write(written, "new")
    assert targets(written.entries(cursor=first.cursor)) == ["t1", "s1", "s2", "s1"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"limit": 0}, "limit must .*not 0"),
        ({"limit": 1001}, "limit must .*not 1001"),
        ({"cursor": "x"}, "cursor must .*not 'x'"),
        ({"cursor": 7}, "cursor must .*not 7"),
        ({"tenant": "a b"}, "tenant must .*not 'a b'"),
        ({"since": "today"}, "since must .*not 'today'"),
        ({"until": float("nan")}, "until must .*not nan"),
    ],
)
def test_a_bad_listing_is_refused(log: AuditLog, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        log.entries(**arguments)


def test_the_newest_ten_thousand_entries_are_kept_and_can_all_be_walked_through(
    log: AuditLog, plant: Callable[..., None], world: World
) -> None:
    head = b'{"actor":"old","role":"admin","via":"cli","action":"a","target":"%d","details":{}}'
    base = world.clock.now_ms() - 20_000
    members = [b"%013d-000000-%024x\0" % (base + n, n) + head % n + b"\0" for n in range(10_050)]
    plant(*members)
    write(log, "new")
    audit = world.dump()["audit"]
    assert len(audit) == 10_000
    assert members[50].decode() not in audit
    assert members[51].decode() in audit
    assert targets(log.entries(target="51")) == ["51"]
    assert targets(log.entries(limit=2)) == ["new", "10049"]


@pytest.mark.untidy
@pytest.mark.parametrize(
    "member",
    [
        b"garbage",
        b"zzz\0{}\0",
        b"",
        b"1700000000000-1x",
        SPOILT,
        SPOILT + b"\0not json\0",
        SPOILT + b"\0{}\0",
        SPOILT + b"\0[]\0{}",
        SPOILT + b"\0\xff\0\xff",
        SPOILT + b'\0{"actor":"a","role":"r","via":"v","action":"a","target":"t","details":[]}\0',
    ],
    ids=range(10),
)
def test_an_entry_that_somebody_has_spoilt_counts_as_none(
    log: AuditLog, plant: Callable[..., None], member: bytes
) -> None:
    plant(member)
    entry_id = write(log)
    assert log.end(entry_id, "done") is True
    assert [entry.entry_id for entry in log.entries()] == [entry_id]
    assert [entry.entry_id for entry in log.entries(limit=1)] == [entry_id]
    log.end(SPOILT.decode(), "done")
    assert [entry.entry_id for entry in log.entries()] == [entry_id]
