"""The demo: what its users want, what its handlers do, and its pictures as text."""

import io
import re
from dataclasses import fields
from datetime import UTC, datetime

import pytest
from helpers.tasks import make_task
from helpers.world import World

from fairqueue.demo import demo
from fairqueue.demo.demo import (
    LIVE,
    MARK,
    NOISY,
    DemoState,
    Load,
    Reader,
    Terminal,
    fair_shares,
    frame,
    handler_of,
    received,
)
from fairqueue.demo.jobs import IMPORT, JOBS, POOLS
from fairqueue.errors import ConfigurationError
from fairqueue.history.runs import History
from fairqueue.models import QueueSnapshot, UserSettings
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.stats.users import UserInfo
from fairqueue.worker.context import TaskContext
from fairqueue.worker.worker import Worker

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
START = datetime(2026, 1, 1, tzinfo=UTC)


def make_user(
    user_id: str, ended: int = 0, backlog: int = 0, *, weight: float = 1.0, state: str = "served"
) -> UserInfo:
    told: dict[str, object] = {
        "user_id": user_id,
        "settings": UserSettings(weight=weight),
        "backlog": backlog,
        "running": 0,
        "wait_p95": 9.8 if user_id == NOISY else 0.012,
        "ended": ended,
        "received": ended / 100,
        "state": state,
    }
    others = dict.fromkeys(each.name for each in fields(UserInfo))  # which are not shown
    return UserInfo(**{**others, **told})  # type: ignore[arg-type]


def make_snapshot(**changes: object) -> DemoState:
    """Ten seconds into a run in which all is well."""
    state = QueueSnapshot(
        at=START,
        counters={},
        ready=8000,
        delayed=0,
        running=8,
        dead=3,
        oldest_wait=9.8,
        active_users=3,
        parked_users=0,
        schedules=14,
        active_schedules=12,
        overdue=0.0,
        set_aside=0,
        leader="a",
        leader_until=START,
        epoch=1,
        jain_index=0.98,
    )
    usual: dict[str, object] = {
        "seconds": 10.0,
        "state": state,
        "served": 100,
        "fired": 50,
        "rate": 200.0,
        "users": [make_user(NOISY, 95, 8000), make_user("lakeside.office", 5)],
        "jain": 0.98,
    }
    return DemoState(**{**usual, **changes})  # type: ignore[arg-type]


def empty_snapshot() -> DemoState:
    """Before anything has happened."""
    return make_snapshot(users=[], rate=0.0, fired=0, served=0, jain=None)


# --- what happens ---------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers that take no time."""
    monkeypatch.setattr(demo, "WORK_S", (0.0, 0.0))


def fated(fate: int) -> str:
    """The id of a task with this fate."""
    return next(name for n in range(10**6) if demo.fate_of(name := f"t{n}") == fate)


def test_a_handler_works_logs_and_answers(quick: None) -> None:
    context = TaskContext(make_task(task_id=fated(999)))
    assert handler_of(JOBS[0])({}, context) == {"reports": 1002}
    assert context.logged is not None
    assert [line.message for line in context.logged.kept()[0]] == [
        "collecting reports that are due",
        "rendered 1002 reports",
        "e-mails handed over",
    ]


def test_some_tasks_fail_or_hang(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    monkeypatch.setattr(demo, "_take", taken.append)
    handle = handler_of(JOBS[9])

    def attempt(fate: int, number: int) -> str:
        taken.clear()
        try:
            handle({}, TaskContext(make_task(task_id=fated(fate)), number))
        except Exception as error:
            return type(error).__name__
        return "hangs" if len(taken) > 1 else "works"

    first_to_hang, first_to_recover = demo.ALWAYS_FAIL, demo.ALWAYS_FAIL + demo.HANG
    assert [attempt(0, number) for number in (1, 2, 3)] == ["BackupError"] * 3
    assert [attempt(first_to_hang, number) for number in (1, 2)] == ["hangs"] * 2
    assert [attempt(first_to_recover, number) for number in (1, 2)] == ["BackupError", "works"]
    assert attempt(first_to_recover + demo.FAIL_ONCE, 1) == "works"


def test_the_noisy_user_floods_and_the_others_want_a_little(queue: TaskQueue) -> None:
    load = Load(queue)
    pushed = sum(load.push() for _ in range(5))
    assert queue.size() == pushed
    assert queue.size(NOISY) == demo.BACKLOG  # once: there is enough left
    assert 5 < pushed - demo.BACKLOG < 60


def test_a_drained_backlog_is_filled_again(world: World) -> None:
    world.patch(demo, "BACKLOG", 3)
    world.patch(demo, "LEAST_BACKLOG", 3)
    world.patch(demo, "RATES", {})
    load = Load(world.queue)
    assert [load.push(), load.push()] == [3, 0]
    (claim,) = world.queue.claim("w")
    world.queue.finish(claim)
    assert load.push() == 3


def test_a_user_who_is_held_back_does_not_pile_up(
    queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "BACKLOG", 1)
    monkeypatch.setattr(demo, "MOST_WAITING", 4)
    load = Load(queue)
    for _ in range(50):
        load.push()
    assert queue.size("greenfield.bursar") == 4


def test_a_worker_of_the_demo_knows_all_that_is_wanted(
    quick: None, queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "BACKLOG", 20)
    monkeypatch.setattr(demo, "ALWAYS_FAIL", 0)
    monkeypatch.setattr(demo, "HANG", 0)
    monkeypatch.setattr(demo, "FAIL_ONCE", 0)
    demo.fill(queue)
    for schedule_id, _, _ in LIVE:
        TaskScheduler(queue).trigger(schedule_id)
    pushed = Load(queue).push() + len(LIVE)
    assert {pool.pool for pool in queue.inspect().pools} == set(POOLS)
    worker = Worker(queue, pools=POOLS)
    demo.register(worker)
    before = queue.inspect().counters["finished"]
    done = worker.run_until_empty()
    assert done + queue.size() == pushed  # the rest is of users who have reached a limit
    assert queue.inspect().counters["finished"] == before + done


def test_what_a_slow_user_asks_for_expires(world: World) -> None:
    world.patch(demo, "BACKLOG", 1)
    world.patch(demo, "RATES", {"admissions": 1.0})
    load = Load(world.queue)
    for _ in range(5):
        load.push()
    world.advance(16)
    assert all(claim.task.name == IMPORT.name for claim in world.queue.claim("w", limit=99))
    assert world.queue.inspect().counters["expired_tasks"] == 15


def test_one_request_in_five_seconds_is_enough(world: World) -> None:
    world.patch(demo, "BACKLOG", 0)
    world.patch(demo, "RATES", {"transport": 1.0})
    load = Load(world.queue)
    assert [load.push(), load.push()] == [3, 0]
    world.advance(5)
    assert load.push() == 3
    assert world.queue.inspect().counters["not_unique"] == 3


def test_a_queue_that_a_demo_left_is_begun_anew(queue: TaskQueue) -> None:
    demo.fill(queue)
    queue.push(make_task())
    demo.fill(queue)
    assert queue.size() == 0
    assert len(TaskScheduler(queue).list_schedules()) == 10 + len(LIVE)
    assert len(History(queue).runs(limit=1000)) == 100


def test_a_queue_of_others_is_left_alone(queue: TaskQueue) -> None:
    TaskScheduler(queue).add_schedule("* * * * *", "alice", schedule_id="theirs")
    with pytest.raises(ConfigurationError, match="has 1 schedules"):
        demo.fill(queue)
    assert [each.schedule_id for each in TaskScheduler(queue).list_schedules()] == ["theirs"]


def test_live_schedules_fire_within_seconds(world: World) -> None:
    demo.fill(world.queue)
    scheduler = TaskScheduler(world.queue)
    world.advance(5)
    scheduler.tick()
    found = scheduler.get_schedule(MARK)
    assert found is not None
    assert found.run_count == 1


def test_what_is_read_is_what_has_happened_since_the_start(quick: None, world: World) -> None:
    world.queue.push(make_task())
    world.queue.finish(*world.queue.claim("w"))
    reader = Reader(world.queue)
    world.queue.push_many(make_task(NOISY) for _ in range(3))
    world.queue.push(make_task("ann"))
    world.advance(1)
    for claim in world.queue.claim("w", limit=2):
        world.queue.finish(claim)
    shot = reader.read(["news"])
    assert (shot.served, shot.fired, shot.state.ready) == (2, 0, 2)
    assert shot.users[0].user_id == NOISY
    assert [user.user_id for user in shot.users[1:]] == ["alice", "ann"]
    assert shot.notes == ["news"]


# --- the pictures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("users", "expected"),
    [
        ([], []),
        ([make_user("a"), make_user("b")], [0, 0]),
        ([make_user("a", 90, 1000), make_user("b", 5), make_user("c", 5)], [90, 5, 5]),
        ([make_user("a", 100, 1000), make_user("b", 0, 2), make_user("c", 0, 50)], [49, 2, 49]),
        ([make_user("a", 40, 100, weight=3.0), make_user("b", 0, 100)], [30, 10]),
        # One that may not have more has what is fair.
        ([make_user("a", 50, 100), make_user("b", 1, 100, state="capped")], [50, 1]),
    ],
)
def test_service_is_shared_by_weight_but_nobody_gets_more_than_is_wanted(
    users: list[UserInfo], expected: list[float]
) -> None:
    assert fair_shares(users) == pytest.approx(expected)
    assert sum(fair_shares(users)) == pytest.approx(sum(user.ended for user in users))


def test_one_who_wants_nothing_has_no_share() -> None:
    assert received([make_user("a"), make_user("b", 10)]) == [None, pytest.approx(1.0)]


def test_durations_are_as_people_say_them() -> None:
    assert [demo.duration(s) for s in (None, 0.012, 0.9994, 1.25)] == [
        "-",
        "12 ms",
        "999 ms",
        "1.2 s",
    ]


@pytest.mark.parametrize("columns", [20, 60, 80, 120, 300])
@pytest.mark.parametrize("shot", [make_snapshot(), empty_snapshot(), make_snapshot(notes=["x"])])
def test_a_frame_fits_the_terminal(shot: DemoState, columns: int) -> None:
    assert max(map(len, frame(shot, columns))) < columns
    for rows in (5, 24):
        assert len(frame(shot, columns, rows)) < rows


def test_a_frame_labels_each_number() -> None:
    text = "\n".join(frame(make_snapshot(notes=["A worker ended."]), 120, 24))
    assert "10 s: 200 tasks a second, 50 schedules fired" in text
    assert "waiting 8,000   running 8   failed 3   fairness (Jain) 0.98" in text
    assert re.search(rf"{NOISY} +8,000 +0 +9\.8 s +95%  █+ 100% served\n", text)
    assert re.search(r"lakeside.office +0 +0 +12 ms +5%  █+ 100% served\n", text)
    assert text.endswith("A worker ended.")


def test_a_frame_of_24_rows_shows_all_users_of_the_demo_at_80_columns() -> None:
    users = [make_user(NOISY, 95, 8000), *(make_user(f"user-{n}", 1) for n in range(13))]
    lines = frame(make_snapshot(users=users), 80, 24)
    assert [line for line in lines if "user-12" in line]
    assert lines[-1].endswith("(p95).")


def test_the_contrast_is_a_sentence_with_numbers() -> None:
    assert demo.contrast(make_snapshot()) == (
        "hillcrest.imports has 8,000 tasks waiting: first in, first out, the next task of any user "
        "would wait 40 s. The others wait 12 ms at most (p95)."
    )


def test_one_who_starves_shows_in_the_bars() -> None:
    users = [make_user(NOISY, 100, 8000), make_user("lakeside.office", 0, 10, state="waiting")]
    text = "\n".join(frame(make_snapshot(users=users), 80, 24))
    assert re.search(rf"{NOISY} .* █+ 111% served\n", text)
    assert re.search(r"lakeside.office .* ░+   0% waiting\n", text)


def test_before_anything_happened_there_is_text_for_it() -> None:
    shot = empty_snapshot()
    assert demo.line(shot).endswith("received of the fair share: none yet")
    assert demo.contrast(shot) == "hillcrest.imports has 0 tasks waiting."


def test_a_line_has_the_noisy_user_and_the_spread_of_the_others() -> None:
    users = [make_user(NOISY, 90, 8000), make_user("a", 5), make_user("b", 5, 5), make_user("c")]
    assert demo.line(make_snapshot(users=users)) == (
        " 10 s | 200 tasks/s | fired 50 | waiting 8,000 | running 8 | received of the fair share: "
        "hillcrest.imports 106%, 2 others 50% to 100%"
    )


# --- the terminal ---------------------------------------------------------------------------------


class FakeTerminal(io.StringIO):
    encoding = "utf-8"


def draw(out: FakeTerminal, *shots: DemoState) -> str:
    with Terminal(out) as terminal:
        for shot in shots:
            terminal.show(shot)
    return out.getvalue()


def test_a_frame_is_drawn_over_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("NO_COLOR", "1")
    text = draw(FakeTerminal(), make_snapshot(), make_snapshot())
    height = len(frame(make_snapshot(), 80, 24))
    assert text.count(f"\r\x1b[{height}A") == 1
    assert "\x1b[2J" not in text
    assert text.startswith("\x1b[?25l")
    assert text.endswith("\x1b[?25h")


def test_a_resized_terminal_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    out = FakeTerminal()
    monkeypatch.setenv("COLUMNS", "80")
    with Terminal(out) as terminal:
        terminal.show(make_snapshot())
        monkeypatch.setenv("COLUMNS", "100")
        terminal.show(make_snapshot())
    assert out.getvalue().count("\x1b[2J") == 1


def test_no_color_means_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = draw(FakeTerminal(), make_snapshot())
    monkeypatch.setenv("NO_COLOR", "1")
    plain = draw(FakeTerminal(), make_snapshot())
    assert "\x1b[32m█" in coloured
    assert not re.search(r"\x1b\[[0-9;]*m", plain)
    assert ESCAPE.sub("", coloured) == ESCAPE.sub("", plain)


def test_a_terminal_without_unicode_gets_plain_bars() -> None:
    class Ascii(FakeTerminal):
        encoding = "ascii"

    assert draw(Ascii(), make_snapshot(), empty_snapshot()).isascii()
