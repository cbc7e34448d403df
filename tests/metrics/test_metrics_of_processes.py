"""The metrics of processes that come and go, added up for one port."""

import os
import signal
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.waiting import eventually
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Enum,
    Gauge,
    Histogram,
    Info,
    generate_latest,
)
from prometheus_client.registry import Collector

from fairqueue.metrics import processes as tally_module
from fairqueue.metrics.processes import Merged, Tally


class Meters:
    """A metric of each kind, in a registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.runs = Counter("runs", "Runs.", ["task"], registry=self.registry)
        self.seconds = Histogram("seconds", "Seconds.", buckets=(1, 2), registry=self.registry)
        self.stuck = Gauge("stuck", "Stuck.", registry=self.registry)
        self._all = CollectorRegistry()
        self._all.register(Merged(self.registry))

    def get(self, name: str, **labels: str) -> float | None:
        """What a scrape of the parent shows."""
        return self._all.get_sample_value(name, labels)

    def text(self) -> str:
        return generate_latest(self._all).decode()


@pytest.fixture
def meters() -> Meters:
    return Meters()


@contextmanager
def child(work: Callable[[], object]) -> Iterator[int]:
    """A forked process that works, and ends in order when the parent is done; its pid."""
    ready, told = os.pipe()
    wait, go = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that run elsewhere
        pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(go)

            def until_told() -> None:
                os.write(told, b"x")
                os.read(wait, 1)

            work_and_wait(work, until_told)
            status = 0
        finally:
            os._exit(status)
    os.close(told)
    os.close(wait)
    assert os.read(ready, 1) == b"x", "the child failed"
    try:
        yield pid
    finally:
        os.close(go)
        os.waitpid(pid, 0)
        os.close(ready)


def work_and_wait(work: Callable[[], object], until_told: Callable[[], None]) -> None:
    """`work` returns the context in which to wait."""
    with work() as _:  # type: ignore[attr-defined]
        until_told()


def counting(
    meters: Meters, tally: Tally, place: int, runs: float, stuck: float = 0
) -> Callable[[], object]:
    """Report at a place, count, and see that it is written down."""

    def count() -> None:
        meters.runs.labels("mail").inc(runs)
        meters.seconds.observe(1.5)
        meters.stuck.set(stuck)

    return reporting(tally, place, count)


def reporting(
    tally: Tally, place: int, change: Callable[[], object] = lambda: None
) -> Callable[[], Any]:
    """Report at a place, change something, and see that it is written down."""

    @contextmanager
    def work() -> Iterator[None]:
        tally_module.REPORT_S = 0.01
        with tally.reporting(place):
            change()
            before = tally._places[place]._memory[0]
            eventually(lambda: tally._places[place]._memory[0] != before, "written")
            eventually(lambda: tally._places[place]._memory[0] == before, "written again")
            yield

    return work


def test_children_and_parent_are_added_up(meters: Meters) -> None:
    meters.runs.labels("mail").inc(100)  # the parent's own, which children inherit
    tally = Tally(2, meters.registry)
    with (
        child(counting(meters, tally, 0, 3, stuck=1)),
        child(counting(meters, tally, 1, 4, stuck=1)),
    ):
        assert meters.get("runs_total", task="mail") == 107
        assert meters.get("seconds_bucket", le="2.0") == 2
        assert (meters.get("seconds_count"), meters.get("seconds_sum")) == (2, 3.0)
        assert meters.get("stuck") == 2
    assert meters.get("runs_total", task="mail") == 107
    assert meters.get("stuck") == 0, "nothing is stuck where nobody is"
    assert meters.text().count("# TYPE runs_total counter") == 1
    assert "_created" not in meters.text()


def test_one_that_replaces_another_goes_on_from_there(meters: Meters) -> None:
    tally = Tally(1, meters.registry)
    seen = []
    for number in range(3):
        with child(counting(meters, tally, 0, 2)) as pid:
            seen.append(meters.get("runs_total", task="mail"))
            if number == 1:
                os.kill(pid, signal.SIGKILL)
        seen.append(meters.get("runs_total", task="mail"))
    assert seen == [2, 2, 4, 4, 6, 6]


def test_a_gauge_of_one_that_was_killed_is_not_shown(meters: Meters) -> None:
    tally = Tally(1, meters.registry)
    with child(counting(meters, tally, 0, 2, stuck=5)) as pid:
        assert meters.get("stuck") == 5
        os.kill(pid, signal.SIGKILL)
    assert meters.get("stuck") == 0


def test_a_child_of_a_child_counts_for_both(meters: Meters) -> None:
    """As the processes of a worker that is itself one of several."""
    tally = Tally(1, meters.registry)

    @contextmanager
    def nested() -> Iterator[None]:
        inner = Tally(1, meters.registry)
        with (
            counting(meters, tally, 0, 1)(),  # type: ignore[attr-defined]
            child(counting(meters, inner, 0, 10)),
        ):
            eventually(lambda: tally_of(tally) == 11, "both are written down")
            yield

    with child(nested):
        assert meters.get("runs_total", task="mail") == 11


def test_what_is_yes_or_no_is_not_added_up(meters: Meters) -> None:
    app = Info("app", "The application.", registry=meters.registry)
    state = Enum("state", "Where it is.", states=["idle", "busy"], registry=meters.registry)
    app.info({"version": "1"})

    def change() -> None:
        app.info({"version": "2"})
        state.state("busy")

    tally = Tally(3, meters.registry)
    with (
        child(reporting(tally, 0)),
        child(reporting(tally, 1, change)),
        child(reporting(tally, 2, change)),
    ):
        assert meters.get("app_info", version="1") == 1
        assert meters.get("app_info", version="2") == 1
        assert meters.get("state", state="busy") == 1
        assert meters.get("state", state="idle") == 1
    assert meters.get("app_info", version="2") is None


def test_only_the_parent_reports_a_gauge_that_a_child_inherited(
    meters: Meters,
) -> None:
    meters.stuck.set(1000)
    tally = Tally(2, meters.registry)
    with child(reporting(tally, 0)), child(reporting(tally, 1, lambda: meters.stuck.set(7))):
        assert meters.get("stuck") == 1007
        meters.stuck.set(10)
        assert meters.get("stuck") == 17


def test_a_gauge_of_a_child_of_a_child_counts_once(meters: Meters) -> None:
    meters.stuck.set(1000)
    tally = Tally(1, meters.registry)

    @contextmanager
    def nested() -> Iterator[None]:
        inner = Tally(1, meters.registry)
        with reporting(tally, 0)(), child(reporting(inner, 0, lambda: meters.stuck.set(7))):
            eventually(lambda: ("stuck", ()) in next(tally.read())["stuck"].values, "it is told")
            yield

    with child(nested):
        assert meters.get("stuck") == 1007


class Failing(Collector):
    """A collector of the application that fails at first."""

    fails = True

    def collect(self) -> list[Any]:
        if self.fails:
            raise RuntimeError("the database is away")
        return []

    def describe(self) -> list[Any]:
        return []


def test_a_failing_collector_stops_nobody(meters: Meters, caplog: pytest.LogCaptureFixture) -> None:
    meters.registry.register(Failing())
    tally = Tally(1, meters.registry)
    with tally.reporting(0):
        assert list(tally.read()) == [{}]
    told = [vars(each) for each in caplog.records]
    assert [(each["event"], each["error"]) for each in told] == [
        ("metrics_not_reported", "RuntimeError: the database is away")
    ]


def test_what_is_counted_after_a_collector_has_failed_is_told(meters: Meters) -> None:
    meters.runs.labels("mail").inc(100)
    failing = Failing()
    meters.registry.register(failing)
    tally = Tally(1, meters.registry)

    @contextmanager
    def work() -> Iterator[None]:
        tally_module.REPORT_S = 0.01
        with tally.reporting(0):
            failing.fails = False
            eventually(lambda: list(tally.read()) != [{}], "it can be read")
            meters.runs.labels("mail").inc(3)
            eventually(lambda: tally_of(tally) == 3, "it is told")
            yield

    with child(work):
        failing.fails = False  # here too
        assert meters.get("runs_total", task="mail") == 103


def tally_of(tally: Tally) -> float | None:
    (families,) = tally.read()
    return families["runs"].values.get(("runs_total", (("task", "mail"),)))


def test_what_is_written_while_it_is_read_is_read_whole(meters: Meters) -> None:
    tally = Tally(1, meters.registry)
    ended = threading.Event()
    place = tally._places[0]

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            family = tally_module._Family("counter", "x" * (number % 1000), {("n", ()): number})
            place.write(os.getpid(), {"n": family})

    thread = threading.Thread(target=write)
    thread.start()
    try:
        last, deadline = 0.0, time.monotonic() + 60
        while last < 500:  # so many have been written beside the reads
            assert time.monotonic() < deadline
            _, families = place.read()
            if families:
                value = families["n"].values["n", ()]
                assert len(families["n"].text) == value % 1000
                assert value >= last
                last = value
    finally:
        ended.set()
        thread.join()


def test_a_half_that_was_spoilt_is_not_read(meters: Meters) -> None:
    tally = Tally(1, meters.registry)
    place = tally._places[0]
    place.write(7, {"n": tally_module._Family("counter", "", {("n", ()): 1.0})})
    start = 1 + place._memory[0] * tally_module.PLACE_BYTES + tally_module._HEAD.size
    place._memory[start] ^= 1
    assert place.read() == (0, {})


def test_metrics_that_are_too_many_are_told_and_the_last_ones_stay(
    meters: Meters, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tally_module, "PLACE_BYTES", 1000)
    tally = Tally(1, meters.registry)
    with tally.reporting(0):
        meters.runs.labels("mail").inc()
    for number in range(1000):
        meters.runs.labels(zlib.crc32(bytes(number)).__format__("x")).inc()
    with tally.reporting(0):
        pass
    assert tally_of(tally) == 1
    assert caplog.text.count("metrics_not_reported") == 1
