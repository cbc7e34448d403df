"""Which partition a claim is for, case by case; benchmarks/partitions.py attacks the whole."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count, islice

import pytest
import redis

from fairqueue import Priority
from fairqueue.clock import ManualClock
from fairqueue.errors import AmbiguousTask, RedisUnavailable
from fairqueue.link.partitions import partition_of
from fairqueue.models import Task
from fairqueue.queue import balance
from fairqueue.queue.balance import Balance
from fairqueue.queue.claim import Wanted
from fairqueue.queue.queue import TaskQueue

PARTITIONS = 4


def tenants_in(partition: int, number: int, prefix: str = "t") -> list[str]:
    """Some names of tenants that belong in a partition."""
    names = (f"{prefix}{n}" for n in count())
    chosen = (name for name in names if partition_of("", name, PARTITIONS) == partition)
    return list(islice(chosen, number))


A, B, C, D = (tenants_in(number, 3) for number in range(PARTITIONS))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(redis_client: redis.Redis, clock: ManualClock) -> Iterator[TaskQueue]:
    with TaskQueue(redis_client, clock=clock, partitions=PARTITIONS) as made:
        yield made


def fill(queue: TaskQueue, tenants: list[str], number: int, **options: object) -> None:
    queue.push_many(
        Task.create(user_id="ann", tenant=tenant, **options)  # type: ignore[arg-type]
        for tenant in tenants
        for _ in range(number)
    )


def serve(
    queue: TaskQueue,
    number: int,
    then: Callable[[str | None], object] = lambda tenant: None,
    **options: object,
) -> Counter[str]:
    """Claim and finish tasks one by one; how many each tenant had."""
    served: Counter[str] = Counter()
    for _ in range(number):
        (claim,) = queue.claim("w", **options)  # type: ignore[arg-type]
        queue.finish(claim)
        served[str(claim.task.tenant)] += 1
        then(claim.task.tenant)
    return served


def assert_even(served: Counter[str], tenants: list[str], spread: int = 4) -> None:
    counts = [served[tenant] for tenant in tenants]
    assert max(counts) - min(counts) <= spread, served


def test_partitions_that_wake_begin_where_the_others_are(queue: TaskQueue) -> None:
    fill(queue, A[:1], 1)
    fill(queue, B[:1], 1)
    serve(queue, 2)
    fill(queue, C, 100)
    serve(queue, 150)
    # Two at once: neither of them is a measure for the other.
    fill(queue, A, 40)
    fill(queue, B, 40)
    assert_even(serve(queue, 90), [*A, *B, *C])


def test_a_partition_whose_tenants_were_paused_begins_where_the_others_are(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock
) -> None:
    fill(queue, [*A, *C], 100)
    serve(queue, 12)
    for tenant in A:
        queue.set_tenant(tenant, paused=True)
    # By a client that never knew of them, and so does not look there.
    with TaskQueue(redis_client, clock=clock, partitions=PARTITIONS) as other:
        serve(other, 120)
        for tenant in A:
            queue.set_tenant(tenant, paused=False)
        assert_even(serve(other, 60), [*A, *C])


def test_a_tenant_that_is_alone_and_comes_again_and_again_gets_its_share(queue: TaskQueue) -> None:
    fill(queue, [*B, *C], 100)
    (alone,) = A[:1]
    fill(queue, [alone], 1)

    def again(tenant: str | None) -> None:
        if tenant == alone:
            fill(queue, [alone], 1)

    assert_even(serve(queue, 210, again), [alone, *B, *C], spread=12)


def test_a_queue_that_was_idle_begins_where_its_farthest_partition_was(queue: TaskQueue) -> None:
    fill(queue, A[:1], 60)
    serve(queue, 60)
    assert queue.claim("w") == []
    fill(queue, [*A, *B, *C], 20)
    assert_even(serve(queue, 90), [*A, *B, *C])


def test_ordinary_tasks_gain_nothing_from_critical_ones_beside_them(
    queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balance, "CLAIMS_EACH", 0)  # each claim knows of the critical task
    queue.configure(critical_share=0.5)
    beside, urgent = A[:2], A[2]
    fill(queue, [*beside, *B, *C], 60)
    served: Counter[str] = Counter()
    for _ in range(20):
        queue.push(Task.create(user_id="ann", tenant=urgent, priority=Priority.CRITICAL))
        claims = queue.claim("w", 8)
        served.update(str(claim.task.tenant) for claim in claims)
        queue.finish_many((claim, None) for claim in claims)
    assert served.pop(urgent) == 20
    assert_even(served, [*beside, *B, *C], spread=8)


def test_tasks_that_no_worker_takes_do_not_hold_their_partition_back(queue: TaskQueue) -> None:
    fill(queue, A[:1], 1, name="rare")
    fill(queue, [*B, *C], 60, name="common")
    serve(queue, 180, avoid=["rare"])
    fill(queue, A[1:], 40, name="common")
    assert_even(serve(queue, 80, avoid=["rare"]), [*A[1:], *B, *C], spread=8)


def test_a_partition_that_was_out_of_reach_begins_where_the_others_are(queue: TaskQueue) -> None:
    fill(queue, [*A, *C], 100)
    serve(queue, 6)
    (known,) = queue._balances.values()  # type: ignore[attr-defined]
    known.note_down(0, RedisUnavailable("Redis did not answer"))
    known.partitions[0].down_until = float("inf")
    serve(queue, 120)
    known.partitions[0].down_until = known.asked_at = float("-inf")
    known.partitions[0].down_since -= balance.AWAY_S
    assert_even(serve(queue, 60), [*A, *C])


def test_what_becomes_due_in_an_idle_partition_is_offered_though_others_are_busy(
    queue: TaskQueue, clock: ManualClock
) -> None:
    fill(queue, C, 100)
    fill(queue, A, 3, delay=5)
    serve(queue, 3)
    clock.advance(6)
    served = serve(queue, 60)
    assert all(served[tenant] == 3 for tenant in A), served


def test_a_claim_that_comes_too_late_for_its_turn_takes_less(queue: TaskQueue) -> None:
    fill(queue, A[:1], 30)
    part = queue.link.parts[0]

    def claim() -> int:
        steps = queue.at(part)._claim_once("w", 8, 30_000, Wanted(), "0.0 -")
        return len(part.perform(steps).claims)

    assert claim() == 8
    assert claim() == 2, "another client has been here since that floor was known"


def test_an_id_of_two_tenants_is_not_guessed(queue: TaskQueue) -> None:
    for tenant in (A[0], B[0]):
        queue.push(Task.create(user_id="ann", tenant=tenant, task_id="same"))
    with pytest.raises(AmbiguousTask):
        queue.cancel("same")
    assert queue.cancel("same", tenant=A[0])
    assert [claim.task.tenant for claim in queue.claim("w", 2)] == [B[0]]


# --- what a client knows --------------------------------------------------------------------------


def test_floors_are_the_lowest_levels_of_others_that_serve() -> None:
    known = Balance(4)
    for number, levels in enumerate((b"5 =0", b"7 2", b"~1 ~1", b"=9 =3")):
        known.note(number, levels, 1.0)
    assert known.floors(0) == "7.0 2.0"
    assert known.floors(1) == "5.0 3.0"
    assert known.floors(2) == "5.0 2.0"
    assert known.best() == 2, "what rests is served first, if its lane or level is lowest"
    assert known.best({2}) == 1
    assert known.best({1, 2}) == 0


def test_without_others_that_serve_the_floor_is_how_far_they_were() -> None:
    known = Balance(3)
    for number, levels in enumerate((b"~2 =0", b"~4 =0", b"=9 =3")):
        known.note(number, levels, 1.0)
    assert known.floors(0) == "~9.0 3.0"
    assert known.best() == 0


def test_a_partition_that_did_not_answer_is_not_chosen_and_comes_back_as_one_that_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = Balance(2)
    known.note(0, b"1 =0", 1.0)
    known.note(1, b"8 =0", 1.0)
    known.note_down(0, RedisUnavailable("Redis did not answer"))
    assert (known.best(), known.askable()) == (1, [1])
    known.note(0, b"1 =0", 1.0)
    assert known.floors(0) == "8.0 0.0", "it was only away for a moment"
    known.partitions[0].down_since -= balance.AWAY_S
    assert known.floors(0) == "!8.0 0.0"
    known.note_claimed(0)
    assert known.floors(0) == "8.0 0.0"


def test_where_something_is_due_comes_first() -> None:
    known = Balance(2)
    known.note(0, b"1 =0", 1.0)
    known.note(1, b"=0 =0", 0.0)
    assert known.best() == 1
    assert known.best({1}) == 0
    known.note(1, b"5 =0", 0.0, has_more=True)
    assert known.best() == 0, "more waits there, for its turn"
