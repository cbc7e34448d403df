"""What an older version stored works with the present code, without a migration.

See `recorded.py` for what is in the recorded queues and how one is made.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.older import VERSIONS, OlderVersion
from helpers.recorded import RECORDED, Life, load, record, shape_of
from helpers.state import check_consistency, dump, places
from helpers.tasks import claim_one, ids_of
from prometheus_client import CollectorRegistry

from fairqueue.access.audit import AuditLog
from fairqueue.access.credentials import AccessStore
from fairqueue.access.idempotency import ReplyStore
from fairqueue.clock import ManualClock, from_ms
from fairqueue.doctor import Records
from fairqueue.errors import InvalidTask, LeaseLost
from fairqueue.history.runs import History
from fairqueue.link.owners import Owner
from fairqueue.models import Claim, Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.stats.samples import SampleStore
from fairqueue.stats.users import UserStats

ENDED = {"finished", "cancelled", "buried", "expired"}


@dataclass(frozen=True)
class Old:
    """A recorded queue in a real server, at the moment at which it was recorded."""

    client: redis.Redis
    queue: TaskQueue
    clock: ManualClock
    secret: str
    is_first: bool  # of a version that ended no stale runs, and did not note who made a schedule

    @property
    def scheduler(self) -> TaskScheduler:
        return TaskScheduler(self.queue, "two", registry=CollectorRegistry())

    @property
    def history(self) -> History:
        return History(self.queue)

    def record(self, key: str, field: str) -> dict[str, Any]:
        """A JSON record of the queue."""
        found: dict[str, Any] = json.loads(self.client.hget(self.queue.keys[key], field) or "{}")
        return found

    def held_claim(self, task_id: str) -> Claim:
        """The claim of a worker that has run since before the update."""
        info, status = self.queue.get(task_id), self.record("status", task_id)
        assert info is not None
        assert info.task is not None
        assert info.lease_until is not None
        return Claim(
            task=info.task,
            token=status["token"],
            attempt=status["attempts"],
            worker_id=status["worker"],
            lease_until=info.lease_until,
            due_ms=status["due"],
        )

    def claim_all(self, **options: Any) -> list[str]:
        """The ids of all tasks that can be claimed now, in order."""
        found: list[str] = []
        while claims := self.queue.claim("w9", 10, **options):
            found += ids_of(claims)
        return found


@pytest.fixture(params=RECORDED)
def old(request: pytest.FixtureRequest, redis_client: redis.Redis) -> Iterator[Old]:
    """A recorded queue, whose counts and indexes agree before the test and after it."""
    recorded = load(redis_client, request.param)
    check_consistency(redis_client, is_old=True)
    clock = ManualClock(recorded["at_ms"] / 1000)
    with TaskQueue(redis_client, clock=clock) as queue:
        is_first = request.param == RECORDED[0]
        yield Old(redis_client, queue, clock, recorded["secret"], is_first)
    check_consistency(redis_client, is_old=True)


def test_the_version_before_can_read_what_this_one_stores(
    redis_client: redis.Redis, tmp_path: Path
) -> None:
    """The same life of a queue without tenants leaves records with the same fields and types."""
    Life(redis_client, ManualClock(), tenant=None).live()
    before = OlderVersion(VERSIONS[-1], tmp_path).run(
        "import json; from helpers.recorded import record_life\n"
        "print(json.dumps(record_life(tenant=None)['keys']))"
    )
    expected, found = shape_of(before), shape_of(record(redis_client))
    # Older versions ignore these, and have no use for the answers to the calls of others.
    assert found.pop("gate_times") == ("zset", [("paced", "")])
    assert set(found["fair"][1]) - set(expected["fair"][1]) == {("pace", "0.0 0 0 0")}
    for key in ("fair", "ops", "samples"):  # samples have more fields; see test_upgrade.py
        del found[key], expected[key]
    # What tasks take is measured anew.
    assert found.pop("averages") == expected.pop("usage")
    assert found == expected


def test_the_doctor_finds_nothing_to_repair(old: Old) -> None:
    before = dump(old.client)

    findings = Records(old.queue.link, fix=True).compare()

    assert {(each.check, each.repairable) for each in findings if each.level != "ok"} == set()
    after = dump(old.client)
    assert {key for key in before if before[key] != after[key]} <= {"ops", "ops_before"}


def test_a_restart_of_everything_finds_no_record_unreadable(old: Old) -> None:
    for _ in range(3):
        old.scheduler.tick()
        old.claim_all()
        old.clock.advance(3600)

    assert old.queue.inspect().counters.get("broken_tasks", 0) == 0
    assert old.queue.inspect().set_aside == 1  # the one that was broken before


def test_each_users_tasks_are_claimed_in_their_order_and_users_by_their_tags(old: Old) -> None:
    state = dump(old.client)
    expected = defaultdict(list)
    for member in sorted(state["backlog"]):  # by user and rank
        user, _, task_id, _ = member.split("\0")
        if user in state["ready"]:
            expected[user].append(task_id)

    got = defaultdict(list)
    found = old.claim_all()
    served = [state["status"][task_id]["user"] for task_id in found]
    for user, task_id in zip(served, found, strict=True):
        got[user].append(task_id)

    assert got == expected
    assert found[0] == "critical"
    by_tag = sorted(state["ready"], key=state["ready"].__getitem__)
    assert list(dict.fromkeys(served[1:])) == by_tag


def test_who_may_not_be_served_is_served_when_that_ends(old: Old) -> None:
    assert not {"paused-1", "capped-2", "rated-2"} & set(old.claim_all())

    old.queue.set_user("paused", paused=False)
    old.queue.set_user("capped", max_running=None)
    old.clock.advance(999)
    old.queue.set_user("rated", rate=1000)

    assert {"paused-1", "capped-2", "rated-2"} <= set(old.claim_all())


def test_a_worker_that_ran_through_the_update_can_end_its_tasks(old: Old) -> None:
    held = ["running-1", "running-3", "slot-3", "skip:1700000040000"]
    done = [old.held_claim(i) for i in held + ["stale-1"] * old.is_first]
    late = old.held_claim("running-2")
    old.queue.retry(late, "it failed", delay=5)

    assert old.queue.finish_many((claim, {"ok": 1}) for claim in done) == [
        "finished",
        "cancelled",  # that was asked for
        *["finished"] * (len(done) - 2),
    ]
    with pytest.raises(LeaseLost):
        old.queue.finish(late)
    assert old.queue.extend([old.held_claim("rated-1")]) == ["extended"]
    assert "slot-1" in ids_of(old.queue.claim("w9", 5, names=["slotted"]))  # its slot is free


def test_an_old_lease_that_expires_is_taken_back(old: Old) -> None:
    old.clock.advance(20)

    claim = old.queue.claim("w9", names=["short"])[0]

    assert (claim.task.task_id, claim.attempt) == ("running-short", 2)


def test_a_buffered_run_begins_when_the_one_before_it_ends(old: Old) -> None:
    old.claim_all()
    old.queue.finish(old.held_claim("buffer:1700000040000"))

    assert claim_one(old.queue).task.task_id == "buffer:1700000100000"


def test_delayed_and_retrying_tasks_become_ready(old: Old) -> None:
    old.clock.advance(3600)

    assert {"delayed-1", "delayed-2", "retrying"} <= set(old.claim_all(lease=86_400))


def test_delayed_tasks_are_found_by_user(old: Old) -> None:
    delayed = set(dump(old.client)["delayed"])
    status = dump(old.client)["status"]
    people = UserStats(old.queue.link)

    users = {status[task_id]["user"] for task_id in delayed}
    found = {user: people.read([Owner(user)], 0)[0].delayed for user in users}

    assert sum(found.values()) == len(delayed) > 0
    check_consistency(old.client)


def test_what_waits_can_be_cancelled_moved_and_purged(old: Old) -> None:
    assert old.queue.cancel("delayed-1")
    assert old.queue.cancel("slot-2")  # it is held
    assert old.queue.cancel("critical")
    assert old.queue.reschedule("retrying", delay=0)
    UserStats(old.queue.link).purge(Owner("heavy"))

    found = set(old.claim_all())

    assert "retrying" in found
    assert not {"critical", "slot-2"} & found
    assert not any(task_id.startswith("heavy") for task_id in found)


def a_task(**fields: Any) -> Callable[[TaskQueue], object]:
    return lambda queue: queue.push(
        Task.create(user_id="alice", task_id="first of its kind", **fields)
    )


# What gives a queue layout 2.
FIRST_USES: dict[str, Callable[[TaskQueue], object]] = {
    "tenant": a_task(tenant="acme"),
    "pool": a_task(pool="gpu"),
    "keys": a_task(limit_keys=["account:1"]),
    "unique": a_task(unique="report"),
    "expiry": a_task(expires=3600),
    "cost": a_task(cost=2.5),
    "settings of a tenant": lambda queue: queue.set_tenant("acme", weight=2),
    "settings of a user of one": lambda queue: queue.set_user("heavy", tenant="acme", weight=2),
    "limits of a key": lambda queue: queue.set_limit("account:*", slots=2),
    "a worker of a pool": lambda queue: queue.claim("w9", pools=["gpu"]),
    "a move": lambda queue: queue.move_user("heavy", "acme"),
}


@pytest.mark.parametrize("use", [None, *FIRST_USES])
def test_all_that_was_unfinished_runs_once_whatever_is_used_meanwhile(
    old: Old, use: str | None
) -> None:
    """Old workers end some runs, others never answer, and the layout changes in the midst of it."""
    state = places(old.client)
    unfinished = {*state["ready"], *state["delayed"], *state["running"]}
    held = [i for i in ("running-1", "running-2", "slot-3") if i in state["running"]]
    late = [old.held_claim(i) for i in held]
    ran = Counter(["running-1"])
    assert old.queue.finish_many([(late[0], None)]) == ["finished"]

    for user in ("paused", "capped", "rated"):
        old.queue.set_user(user, paused=False, max_running=None, rate=None)
    old.queue.set_limits("paced", rate=None)
    for n in range(60):
        if n == 3 and use is not None:
            FIRST_USES[use](old.queue)
            assert old.queue.extend(late[1:2], 30) == ["extended"]
        if n == 4:
            old.queue.finish(late[1])
            ran["running-2"] += 1
        pools = ["default", "gpu"] if use == "pool" and n > 5 else ["default"]
        claims = old.queue.claim("w9", 3, 600, pools=pools)
        assert {claim.task.task_id for claim in claims}.isdisjoint(ran)
        ran.update(ids_of(claims))
        old.queue.finish_many((claim, None) for claim in claims)
        check_consistency(old.client, is_old=True)
        if n > 5 and not claims:
            old.clock.advance(300)

    ran.pop("first of its kind", None)
    assert set(ran.values()) == {1}
    ended = {i for name, ids in places(old.client).items() for i in ids if name in ENDED}
    assert unfinished <= ended
    stale = {i for i in ("stale-1",) if i in state["running"]}
    assert unfinished - ran.keys() == {"running-3"} | stale  # cancelled, and timed out
    assert set(ran) <= unfinished
    layout = dump(old.client)["fair"].get("layout")
    assert layout == ("1" if use is None else "2")
    assert {each.level for each in Records(old.queue.link, fix=False).compare()} == {"ok"}


def test_a_pair_inherits_what_the_user_of_its_tenant_was_given(old: Old) -> None:
    get = old.queue.get_user
    assert get("heavy", tenant="acme").weight == get("heavy").weight == 4.0
    assert get("heavy", tenant="other").weight == 1.0
    old.queue.set_user("heavy", tenant="acme", max_running=1)
    assert (get("heavy", tenant="acme").weight, get("heavy", tenant="acme").max_running) == (4.0, 1)
    assert get("heavy").max_running is None
    assert old.queue.tenants_of("heavy") == ["acme"]


def test_old_dead_letters_are_found_retried_and_discarded(old: Old) -> None:
    again = old.record("status", "dead-2")["retried_as"]
    fingerprints = {group.fingerprint for group in old.history.failure_groups()}

    new = old.history.retry("dead-1", triggered_by="me")

    assert old.history.retry("dead-2") == again
    details = old.history.get(new)
    assert details is not None
    assert details.run.retry_of == "dead-1"
    failed = old.history.get("dead-5")
    assert failed is not None
    assert failed.run.status == "timed_out"
    assert failed.attempts[0].error_type == "OSError"
    assert old.history.discard("dead-5")
    assert len(fingerprints) == (4 if old.is_first else 5)
    assert {r.task_id for r in old.history.runs(status="failed")} == {
        "dead-1",
        "dead-2",
        "dead-4",
        "expired",
        "failing:1700000040000",
    }


def test_old_runs_are_listed_and_counted(old: Old) -> None:
    runs = old.history.runs(schedule_id="plain", status="succeeded")

    assert [run.task_id for run in runs] == [
        "plain:1700000160000",
        "plain:1700000100000",
        "plain:1700000040000",
    ]
    finished = old.history.get("finished-6")
    assert finished is not None
    assert finished.run.result == [1, None, "x"]
    named = {owner.user_id for owner in UserStats(old.queue.link).names()}
    assert named >= {"alice", "bob", "erin", "capped"}


def test_a_repetition_from_before_the_update_gets_the_first_answer(old: Old) -> None:
    gone = Task.create(user_id="dora", task_id="gone-1", name="soon gone")

    assert old.queue.push(gone) == "gone-1"
    assert old.queue.get("gone-1") is None  # not pushed a second time
    with pytest.raises(InvalidTask):
        old.queue.push(Task.create(user_id="dora", task_id="gone-1", name="another"))
    waiting = Task.create(user_id="alice", task_id="low", priority=2)
    assert old.queue.push(waiting) == "low"
    with pytest.raises(InvalidTask):
        old.queue.push(Task.create(user_id="alice", task_id="low", priority=3))


def test_old_records_are_dropped_when_their_time_is_over(old: Old) -> None:
    at_first = places(old.client)
    kept = {i for state in ("finished", "cancelled", "buried") for i in at_first[state]}

    old.clock.advance(20 * 365 * 86_400)
    old.queue.configure(max_attempts=1000)
    old.claim_all(lease=86_400)
    for _ in range(10):  # each window of service trims a part
        old.clock.advance(11)
        old.queue.claim("w9", 1)

    state = dump(old.client)
    assert not kept & {*state["status"], *state["tasks"], *state["attempts"]}
    left = {member.partition("\0")[2][14:] for member in state["runs"]}
    assert left == {"running-3", *["stale-1"] * old.is_first}


def test_old_records_can_be_pruned(old: Old) -> None:
    old.clock.advance(1)

    assert old.history.prune(0) == (24 if old.is_first else 25)

    assert not {"ended", "dead", "runs", "failures"} & dump(old.client).keys()


def test_old_schedules_fire_as_they_should(old: Old) -> None:
    before = {s.schedule_id: s.run_count for s in old.scheduler.list_schedules()}
    old.clock.advance(20)

    report = old.scheduler.tick()

    after = {s.schedule_id: s.run_count for s in old.scheduler.list_schedules()}
    fired = {i: after[i] - before[i] for i in after if after[i] != before[i]}
    # "skip" and "buffer" have an unfinished run.
    assert fired == {"plain": 1, "previous": 1, "seconds": 1, "interval": 1}
    assert report.skipped == 2
    assert dump(old.client)["status"]["previous:1700000760000"]["state"] == "cancelled"


def test_old_schedules_can_be_changed(old: Old) -> None:
    scheduler = old.scheduler
    assert scheduler.update_schedule("plain", cron_expr="*/2 * * * *", changed_by="me")
    assert scheduler.update_schedule("skip", overlap="allow")
    assert scheduler.resume_schedule("paused")
    assert scheduler.update_schedule("daily", user_id="erin", tenant="other")
    scheduler.add_schedule("0 0 * * *", "alice", schedule_id="buffer", on_conflict="replace")
    minutely: dict[str, Any] = {"cron_expr": "* * * * *", "user_id": "alice", "name": "s.spoilt"}
    scheduler.add_schedule(**minutely, schedule_id="spoilt", on_conflict="replace")
    scheduler.trigger("hashed")
    assert scheduler.remove_schedule("interval")
    now = old.clock.now().timestamp()
    assert scheduler.backfill("plain", now - 3000, now - 2700).filled > 0
    old.clock.advance(7200)  # "paused until" goes on

    scheduler.tick()

    active = {s.schedule_id for s in scheduler.list_schedules(is_active=True)}
    assert {"plain", "paused", "paused until", "daily", "spoilt", "buffer"} <= active
    assert not {"interval", "failing", "once done"} & active
    changed_by = [change.by for change in scheduler.changes("plain")]
    assert changed_by == ["me", "carol"] + [None] * (not old.is_first)
    assert len(scheduler.moments("plain", now - 3000, now)) > 10


def test_old_keys_sessions_requests_and_entries_hold(old: Old) -> None:
    link = old.queue.link
    access, replies = AccessStore(link), ReplyStore(link)

    actor = access.admit(old.secret, rate=1, burst=5).actor

    assert actor is not None
    assert (actor.name, actor.role, actor.tenant) == ("ci", "operator", "acme")
    listed = access.keys()
    assert {key.name for key in listed} == {"ci", "short"}
    assert replies.begin("new", "d").state == "done"
    assert replies.begin("old", "d").state == "done"
    assert replies.begin("open", "d").state == "running"
    assert [entry.action for entry in AuditLog(link).entries()] == ["task.cancel", "user.pause"]
    assert len(SampleStore(link).read().times) >= 4


def test_old_workers_are_alive_and_hear_of_what_was_asked(old: Old) -> None:
    workers = WorkerStore(old.queue.link)
    assert [worker.worker_id for worker in workers.alive()] == ["w1", "w2"]

    record = old.record("workers", "w2")
    beat = workers.beat({k: v for k, v in record.items() if k not in ("id", "seen", "drain")}, "w2")

    assert beat.drained_by == "carol"
    assert beat.handled == {"bulk", "report", "long", "short"}
    old.clock.advance(30)
    workers.beat({k: v for k, v in record.items() if k not in ("id", "seen", "drain")}, "w2")
    old.clock.advance(10)
    assert workers.beat({"names": ["own"]}, "w3").handled == {"own", "long", "short"}


def test_old_settings_hold(old: Old) -> None:
    settings = old.queue.settings()

    assert (settings.max_attempts, settings.keep_dead, settings.max_schedules) == (3, 500, 1000)
    assert old.queue.get_user("heavy").weight == 4.0
    assert old.queue.get_limits()["slotted"].slots == 1
    assert from_ms(old.clock.now_ms()) == old.queue.inspect().at
