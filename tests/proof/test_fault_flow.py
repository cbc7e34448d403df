"""The checker of storms with keys and unique keys: it sees what broke a promise, and only that."""

from itertools import count
from pathlib import Path

import pytest

from faults.flow import STRICT, Evidence, flow_of
from faults.journal import Journal

LEASE_MS = 2000
# Tasks of a producer with one key, which has one slot, and two tasks with the same unique key.
STRICT_ONES = [
    task_id
    for number in range(2000)
    if flow_of(task_id := f"p0-0.{number}").limit_keys == (STRICT,)
]


def same_unique() -> tuple[str, str]:
    seen: dict[tuple[str, str], str] = {}
    for number in count():
        flow = flow_of(task_id := f"p0-0.{number}")
        if flow.unique and not flow.limit_keys:
            if (flow.tenant, flow.unique) in seen:
                return seen[flow.tenant, flow.unique], task_id
            seen[flow.tenant, flow.unique] = task_id
    raise AssertionError


class Witnessed:
    """Journals of two workers and of the storm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storm = Journal(folder / "storm.journal")
        self.producer = Journal(folder / "p0-0.journal")
        self.workers = [Journal(folder / f"w{n}-0.journal") for n in range(2)]

    def run(self, worker: int, task_id: str, first: int, last: int | None, sent: int = 0) -> None:
        journal = self.workers[worker]
        journal.note("held", first, [[task_id, 1]], sent)
        journal.note("run", task_id, "user-1", first / 1000, None)
        if last is not None:
            journal.note("left", task_id, last)

    def evidence(self) -> Evidence:
        return Evidence.read(self.folder, LEASE_MS)


@pytest.fixture
def seen(tmp_path: Path) -> Witnessed:
    return Witnessed(tmp_path)


def test_runs_one_after_the_other_keep_to_one_slot(seen: Witnessed) -> None:
    seen.run(0, STRICT_ONES[0], 100, 200)
    seen.run(1, STRICT_ONES[1], 200, 300)
    assert seen.evidence().over() == set()


def test_runs_at_a_time_are_more_than_one_slot(seen: Witnessed) -> None:
    seen.run(0, STRICT_ONES[0], 100, 200)
    seen.run(1, STRICT_ONES[1], 150, 300)
    (found,) = seen.evidence().over()
    assert found.startswith(f"2 of {STRICT} at once")


@pytest.mark.parametrize(("killed_ms", "are_more"), [(120, 0), (180, 1)])
def test_a_run_ends_with_its_process(seen: Witnessed, killed_ms: int, are_more: int) -> None:
    seen.run(0, STRICT_ONES[0], 100, None)
    seen.storm.note("killed", "w0-0", killed_ms)
    seen.run(1, STRICT_ONES[1], 150, 300)
    assert len(seen.evidence().over()) == are_more


def test_a_run_counts_only_while_its_lease_was_certainly_held(seen: Witnessed) -> None:
    seen.run(0, STRICT_ONES[0], 100, 5000)
    seen.run(1, STRICT_ONES[1], LEASE_MS + 10, 5000, sent=LEASE_MS)
    assert seen.evidence().over() == set()


def test_a_unique_task_that_is_stored_while_another_is_unfinished_is_seen(seen: Witnessed) -> None:
    first, second = same_unique()
    seen.producer.note("uniques", 50, {first: first})
    seen.run(0, first, 100, 300)
    seen.producer.note("uniques", 150, {second: second})
    seen.run(1, second, 400, 500)
    assert len(seen.evidence().twice()) == 1


def test_unique_tasks_one_after_the_other_are_right(seen: Witnessed) -> None:
    first, second = same_unique()
    seen.producer.note("uniques", 50, {first: first})
    seen.run(0, first, 100, 300)
    seen.producer.note("uniques", 310, {second: second})
    seen.run(1, second, 400, 500)
    evidence = seen.evidence()
    assert (evidence.twice(), evidence.wrong_answers()) == (set(), set())


def test_an_answer_with_a_task_of_another_key_is_seen(seen: Witnessed) -> None:
    first, _ = same_unique()
    seen.producer.note("uniques", 50, {first: STRICT_ONES[0]})
    assert len(seen.evidence().wrong_answers()) == 1
