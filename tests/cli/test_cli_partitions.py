"""The number of partitions of a queue on the command line."""

import pytest
import redis
from helpers.commands import Cli

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
