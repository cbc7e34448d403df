"""Partitions of a queue on the command line: how many, which is hot, and if some do not answer."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
from helpers.commands import Cli
from helpers.partitions import NOWHERE, without

from fairqueue.cli.session import Session
from fairqueue.queue.queue import TaskQueue

pytestmark = pytest.mark.untidy


@pytest.fixture
def cli(redis_url: str, redis_client: redis.Redis) -> Cli:
    return Cli(redis_url)


def test_a_queue_is_opened_with_the_partitions_that_it_has(
    cli: Cli, redis_client: redis.Redis
) -> None:
    made = cli.ok("tasks", "push", "--user", "ann", "--id", "a", "--partitions", "3")
    assert made.out == "a\n"
    assert cli.ok("tasks", "push", "--user", "bob", "--id", "b").out == "b\n"
    with TaskQueue(redis_client, partitions=3) as queue:
        assert queue.size() == 2


def test_another_number_of_partitions_is_refused(cli: Cli) -> None:
    cli.ok("stats", "--partitions", "3")
    for number in ("1", "4"):
        done = cli.run("stats", "--partitions", number)
        assert (done.code, done.out) == (2, "")
        assert f"has 3 partitions, and this client was made for {number}" in done.err
    assert cli.run("stats", "--partitions", "0").code == 2


def test_a_queue_without_partitions_cannot_be_opened_with_some(cli: Cli) -> None:
    cli.ok("tasks", "push", "--user", "ann")
    done = cli.run("stats", "--partitions", "3")
    assert (done.code, "has 1 partition, and this client was made for 3" in done.err) == (2, True)


def test_the_number_may_come_from_the_environment(
    cli: Cli, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRQUEUE_PARTITIONS", "2")
    cli.ok("tasks", "push", "--user", "ann")
    with TaskQueue(redis_client, partitions=2) as queue:
        assert queue.size() == 1
    monkeypatch.setenv("FAIRQUEUE_PARTITIONS", "many")
    done = cli.run("stats")
    assert (done.code, "$FAIRQUEUE_PARTITIONS must be 1 to 256, not 'many'" in done.err) == (
        2,
        True,
    )


# --- fairqueue partitions -------------------------------------------------------------------------


def test_partitions_are_listed_with_nodes_and_advice(cli: Cli) -> None:
    cli.ok("tasks", "push", "--user", "ann", "--partitions", "3")
    done = cli.ok("partitions", "--over", "0", "--memory")
    headings, *rows = done.lines
    assert headings.split()[:4] == ["PARTITION", "SLOT", "NODE", "CLOCK"]
    assert [row.split()[0] for row in rows[:3]] == ["0", "1", "2"]
    assert done.lines[-1].startswith("ok: no partition has much more")
    document = cli.json("partitions", "--over", "500ms")
    assert [row["pushed"] for row in document["partitions"]] == [0, 0, 0]
    assert sum(row["ready"] for row in document["partitions"]) == 1


def test_a_queue_without_partitions_has_one_row(cli: Cli) -> None:
    done = cli.ok("partitions", "--over", "0")
    assert done.lines[1].split()[0] == "0"
    assert "this queue has one partition" in done.lines[-1]


@contextmanager
def missing(number: int) -> Iterator[None]:
    """Let commands open a queue one of whose partitions does not answer."""
    opened = Session.open

    @contextmanager
    def open_without(session: Session, **options: bool) -> Iterator[TaskQueue]:
        with opened(session, **options) as queue, without(queue, number):
            yield queue

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "open", open_without)
        yield


def test_reading_goes_on_without_partitions_and_says_so(cli: Cli) -> None:
    for number in range(12):
        cli.ok("tasks", "push", "--user", f"u{number}", "--partitions", "3")
    with missing(2):
        listed = cli.run("tasks", "list", "--json")
        shown = cli.run("partitions", "--over", "0")
        status = cli.run("status")
    assert listed.code == 3
    assert 0 < len(listed.json["tasks"]) < 12
    assert f"Partition 2 (node {NOWHERE}) does not answer: what is shown lacks" in listed.err
    assert (shown.code, "error: Partition 2 of node" in shown.out) == (6, True)
    assert (status.code, "error: Partition 2 (node" in status.out) == (6, True)


def test_the_status_is_shown_without_the_partition_of_the_whole(cli: Cli) -> None:
    cli.ok("tasks", "push", "--user", "ann", "--partitions", "3")
    with missing(0):
        status = cli.run("status")
    assert (status.code, "error: Partition 0 (node" in status.out) == (6, True)


def test_changes_of_all_that_match_fail_without_a_partition(cli: Cli) -> None:
    cli.ok("schedules", "add", "0 9 * * *", "--user", "ann", "--partitions", "3")
    with missing(1):
        for line in ("schedules pause --all --yes", "failed retry --all --yes", "export"):
            assert cli.run(*line.split()).code == 3, line
