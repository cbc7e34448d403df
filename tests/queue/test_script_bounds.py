"""No script does more at once than a few milliseconds' work, however large what is stored is.

How long scripts take is measured by `python -m benchmarks worst`; here it is what they leave over,
and that nothing is left over for ever.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import redis
from helpers.recorded import RECORDED, load
from helpers.tasks import claim_one, make_task
from helpers.world import World

from fairqueue.doctor import Doctor, Records
from fairqueue.errors import InvalidSchedule, InvalidTask, RedisRefused
from fairqueue.history.runs import History
from fairqueue.models import DIGESTED_BYTES, Task
from fairqueue.queue.end import FINISHED_AT_ONCE
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Failure, Report
from fairqueue.queue.workers import WorkerStore
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules.store import ADDED_AT_ONCE

LARGE = {"x": "y" * 250_000}  # nearly as large as a payload may be


def sha1(task: Task) -> str:
    return hashlib.sha1(task.document.encode(), usedforsecurity=False).hexdigest()


def end(world: World, count: int, *, dead: bool = False, **fields: Any) -> list[str]:
    """So many tasks that have ended, by id."""
    ids = [f"t{n:04}" for n in range(count)]
    world.queue.push_many(make_task(task_id=i, **fields) for i in ids)
    left = count
    while left:
        claims = world.queue.claim("w", 100)
        left -= len(claims)
        if dead:
            for claim in claims:
                world.queue.bury(claim, "no")
        else:
            world.queue.finish_many((claim, None) for claim in claims)
    return ids


def forget_digests(world: World) -> None:
    """Make the records those of a version that kept no digests."""
    key = world.keys["status"]
    for task_id, text in world.redis.hgetall(key).items():
        record = json.loads(text)
        record.pop("digest", None)
        record.pop("bytes", None)
        world.redis.hset(key, task_id, json.dumps(record, separators=(",", ":")))


# --- digests --------------------------------------------------------------------------------------


def test_the_digest_of_a_long_document_is_kept_with_its_length(world: World) -> None:
    long, short = make_task(task_id="long", payload=LARGE), make_task(task_id="short")
    assert len(short.document) <= DIGESTED_BYTES
    world.queue.push_many([long, short])
    status = world.dump()["status"]
    assert status["long"]["digest"] == sha1(long)
    assert status["long"]["bytes"] == len(long.document)
    assert not {"digest", "bytes"} & status["short"].keys()


def test_what_a_schedule_fires_and_a_retry_have_digests_too(world: World) -> None:
    world.scheduler.add_schedule("* * * * *", "alice", schedule_id="s", payload=LARGE)
    world.tick_after(60)
    claim = world.claim_one()
    world.queue.bury(claim, "no")
    again = History(world.queue).retry(claim.task.task_id)
    status = world.dump()["status"]
    assert status[claim.task.task_id]["digest"] == sha1(claim.task)
    new = world.info(again)
    assert new.task is not None
    assert status[again]["digest"] == sha1(new.task)


@pytest.mark.parametrize("with_digests", [True, False])
@pytest.mark.parametrize("size", [10, 5000])
def test_a_dropped_task_is_recognised(world: World, with_digests: bool, size: int) -> None:
    end(world, 1, payload={"x": "y" * size})
    if not with_digests:
        forget_digests(world)
    world.advance(1)
    assert History(world.queue).prune(0.5) == 1
    assert world.queue.push(make_task(task_id="t0000", payload={"x": "y" * size})) == "t0000"
    assert world.queue.get("t0000") is None
    with pytest.raises(InvalidTask):
        world.queue.push(make_task(task_id="t0000", payload={"x": "z" * size}))


def test_a_stored_document_of_another_length_is_not_read_to_refuse_its_id(world: World) -> None:
    world.queue.push(make_task(task_id="a", payload=LARGE))
    before = world.count_commands()
    with pytest.raises(InvalidTask):
        world.queue.push(make_task(task_id="a", payload={"x": 1}))
    used = world.count_commands() - before
    assert used["hstrlen"] == 1
    world.queue.push(make_task(task_id="a", payload=LARGE))  # the same again
    other = {"x": "z" * 250_000}  # as long
    with pytest.raises(InvalidTask):
        world.queue.push(make_task(task_id="a", payload=other))


# --- dropping -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("with_digests", "at_once"), [(True, 80), (False, 12)])
def test_one_script_frees_a_bounded_number_of_bytes_and_claims_take_up_the_rest(
    world: World, with_digests: bool, at_once: int
) -> None:
    end(world, 200, payload=LARGE)
    if not with_digests:
        forget_digests(world)
    world.queue.configure(keep_finished=0)
    world.fill("small", 100)
    claims = world.queue.claim("w", 100)

    world.queue.finish_many((claim, None) for claim in claims)

    kept = [i for i in world.dump()["ended"] if i.startswith("t")]
    assert 200 - at_once <= len(kept) < 200
    left = [300]
    while left[-1]:
        world.queue.claim("w")
        left.append(world.redis.zcard(world.keys["ended"]))
        assert left[-1] < left[-2]
        assert left[-2] - left[-1] <= 310
    assert "behind" not in world.dump()["fair"]
    assert not {"tasks", "status"} & world.dump().keys()


@pytest.mark.parametrize("with_digests", [True, False])
def test_all_that_is_asked_for_is_pruned_and_discarded(world: World, with_digests: bool) -> None:
    ids = end(world, 120, dead=True, payload=LARGE)
    if not with_digests:
        forget_digests(world)
    assert History(world.queue).discard(ids[5])
    assert not History(world.queue).discard(ids[5])
    assert History(world.queue).discard_matching(limit=90) == 90
    world.advance(1)
    assert History(world.queue).prune(0.5) == 29


def test_a_discard_that_is_sent_again_says_the_same(world: World) -> None:
    ids = end(world, 100, dead=True, payload=LARGE)
    first = world.queue.link.run("discard", op="o", rest=ids)
    assert first == world.queue.link.run("discard", op="o", rest=ids)
    assert first[1] > 0
    assert sum(first) == 100


# --- keeping --------------------------------------------------------------------------------------


def test_yesterdays_runs_are_found_with_the_default_retention(world: World) -> None:
    end(world, 1200)
    world.advance(6 * 86_400)
    world.fill("bob", 1)
    world.queue.finish(world.claim_one())
    assert world.redis.zcard(world.keys["ended"]) == 1201
    assert world.queue.settings().keep_finished >= 100_000
    world.advance(86_400)
    for _ in range(10):
        world.advance(11)  # each window of service
        world.queue.claim("w")
    assert world.redis.zcard(world.keys["ended"]) == 1


@pytest.mark.parametrize("stored", [{"keep_finished": 5}, {"keep_finished_for": 60}])
def test_what_somebody_has_set_stays(world: World, stored: dict[str, Any]) -> None:
    world.queue.configure(**stored)
    end(world, 20)
    world.advance(61)
    world.queue.claim("w")
    left = world.redis.zcard(world.keys["ended"])
    assert left == (5 if "keep_finished" in stored else 0)


@pytest.mark.parametrize(("most", "level"), [(2**30, "ok"), (1000, "warning")])
def test_the_doctor_watches_what_ended_runs_take(world: World, most: int, level: str) -> None:
    world.patch("fairqueue.doctor.examination.HISTORY_BYTES", most)
    end(world, 10, payload=LARGE)
    found = {finding.check: finding for finding in Doctor(world.queue).examine(records=False)}
    history = found["history"]
    assert history.level == level
    assert history.details["runs"] == 10
    assert 10 * 250_000 < history.details["bytes"] < 10 * 253_000
    assert ("lower keep_finished" in history.text) == (level == "warning")


@pytest.mark.untidy  # an older version has written it
def test_nothing_of_a_queue_has_an_expiry(world: World) -> None:
    load(world.redis, RECORDED[-1])  # with something in every key
    assert world.tick().is_leader
    there = [key for key in world.keys.all() if world.redis.exists(key)]
    assert world.keys["leader"] in there
    assert {key: world.redis.pttl(key) for key in there} == dict.fromkeys(there, -1)


def test_a_volatile_server_evicts_nothing(
    own_server: Callable[..., EmbeddedServer],
) -> None:
    server = own_server(config={"maxmemory": "12mb", "maxmemory-policy": "volatile-lru"})
    with TaskQueue.from_url(server.url) as queue, redis.Redis.from_url(server.url) as client:
        scheduler = TaskScheduler(queue, "one", lock_timeout=60.0)
        scheduler.add_schedule("0 0 1 1 *", "alice", schedule_id="s")
        assert scheduler.tick().is_leader
        stored = 0
        with suppress(RedisRefused):
            while stored < 1000:
                queue.push(make_task(payload={"x": "y" * 50_000}))
                stored += 1
        assert stored < 1000  # it was full
        assert client.info("stats")["evicted_keys"] == 0
        assert queue.size() == stored
        assert queue.inspect().leader == "one"
        queue.finish(claim_one(queue))  # it still drains


# --- finishing and listing ------------------------------------------------------------------------


def test_many_long_results_are_finished_in_several_scripts(world: World) -> None:
    world.fill("alice", 2 * FINISHED_AT_ONCE)
    claims = world.queue.claim("w", 2 * FINISHED_AT_ONCE)
    error = Failure(type="E", message="m" * 1000, traceback="t" * 8000, place="p")
    report = Report.of_failure("n", error, seconds=1.0)
    results = [(claim, "r" * 16_000, report) for claim in claims]
    before = world.count_commands()

    words, more, _ = world.queue.finish_and_claim(results[:150], "w", 5)
    assert words == ["finished"] * 150
    assert more == []
    assert world.queue.finish_many(results) == ["finished"] * 2 * FINISHED_AT_ONCE

    sent = (world.count_commands() - before)["evalsha"]
    assert sent >= (150 + 200) * 24_000 // (256 * 1024)
    assert world.info(claims[-1].task.task_id).result == "r" * 16_000


def test_runs_with_long_results_are_listed_in_parts_and_none_is_missed(world: World) -> None:
    ids = []
    for n in range(240):
        task_id = world.queue.push(make_task(task_id=f"t{n:04}"))
        claim = world.claim_one()
        world.advance(0.001)
        if n % 3 == 0:
            world.queue.bury(claim, "e" * 2000)
        else:
            world.queue.finish(claim, "r" * 16_000)
        ids.append(task_id)
    history = History(world.queue)
    for statuses in (("succeeded", "failed"), None, ("failed", "succeeded", "cancelled")):
        page = history.runs(statuses, limit=1000)
        assert [run.task_id for run in page] == ids[::-1]
        found, cursor = [], None
        while True:
            page = history.runs(statuses, limit=70, cursor=cursor)
            found += [run.task_id for run in page]
            cursor = page.cursor
            if cursor is None:
                break
        assert found == ids[::-1]


# --- workers --------------------------------------------------------------------------------------


def test_names_of_workers_are_known_after_one_has_left_whatever_they_are(queue: TaskQueue) -> None:
    workers = WorkerStore(queue.link)
    odd = ['a],"current":[', "b\\", 'c"', "[]"]
    lists = {"w1": ["mail", "report"], "w2": ["mail", "report"], "w3": odd, "w4": []}
    for worker, names in lists.items():
        workers.beat({"names": names, "current": ['"names":'], "running": 1}, worker)
    workers.beat({"current": [], "names": ["other order"]}, "w5")
    workers.beat({"names": ["gone"], "current": []}, "w6")
    workers.leave("w6")
    beat = workers.beat({"names": ["own"], "current": []}, "w7")
    assert beat.handled == {"mail", "report", "own", "other order", *odd}


# --- delays ---------------------------------------------------------------------------------------


@pytest.mark.untidy
@pytest.mark.parametrize("planted", ["alice\0soon\0x", "alice\0", "alice\x00123\0", "alice\0-1\0x"])
def test_an_unreadable_entry_of_the_delay_index_is_dropped(world: World, planted: str) -> None:
    world.queue.push(make_task(task_id="t", user_id="alice", delay=1))
    world.redis.zadd(world.keys["delayed_index"], {planted: 0})
    world.advance(1)
    assert world.claim_one().task.task_id == "t"
    assert world.redis.zcard(world.keys["delayed_index"]) == 0


# --- schedules ------------------------------------------------------------------------------------


def test_an_import_of_many_or_large_schedules_is_several_scripts(world: World) -> None:
    def imported(count: int, **fields: Any) -> int:
        documents = [
            {"cron_expr": "@daily", "user_id": "u", "schedule_id": f"{len(fields)}-{n}", **fields}
            for n in range(count)
        ]
        before = world.count_commands()
        world.scheduler.import_schedules(documents, dry_run=False)
        return (world.count_commands() - before)["evalsha"]

    world.scheduler.add_schedule("@daily", "u")  # now the server knows the script
    assert imported(ADDED_AT_ONCE) == 1
    assert imported(ADDED_AT_ONCE + 1, name="n") == 2
    assert imported(12, name="n", payload=LARGE) == 3  # four in a MiB
    assert world.redis.hlen(world.keys["schedules"]) == 1 + 2 * ADDED_AT_ONCE + 1 + 12


def test_more_bytes_of_schedules_than_one_script_takes_are_refused(world: World) -> None:
    many = [{"cron_expr": "@daily", "user_id": "u", "payload": LARGE}] * 68
    with pytest.raises(InvalidSchedule, match=r"17,0\d\d,\d\d\d bytes.* several calls"):
        world.scheduler.add_schedules(many)
    assert world.redis.hlen(world.keys["schedules"]) == 0
    assert len(world.scheduler.add_schedules(many[:60])) == 60


# --- the doctor -----------------------------------------------------------------------------------


def test_the_doctor_counts_the_runs_of_users_whatever_they_are_called(world: World) -> None:
    users = ["plain", 'a"user":"plain', "b\\", "ü"]
    for user in users:
        world.fill(user, 2)
    for claim in world.queue.claim("w", 8):
        world.queue.retry(claim, 'an error with "user":"plain" in it', 0)
    world.queue.claim("w", 8)
    assert world.redis.hgetall(world.keys["running"]) == {user.encode(): b"2" for user in users}
    world.redis.delete(world.keys["running"])

    found = Records(world.queue.link, fix=True).compare()

    assert [each.check for each in found] == ["records: running"]
    assert world.redis.hgetall(world.keys["running"]) == {user.encode(): b"2" for user in users}
