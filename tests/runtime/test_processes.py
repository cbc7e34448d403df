"""Groups of real processes: started, replaced, stopped, killed, and nobody left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.waiting import eventually

from fairqueue.cli.session import until_signalled
from fairqueue.errors import ConfigurationError
from fairqueue.runtime import processes
from fairqueue.runtime.processes import ProcessGroup, wait_for

pytestmark = pytest.mark.processes

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs the memory of a process"
)

# Each program has a session of its own, so that a signal to its group reaches nobody else.
PROLOGUE = """
import atexit, errno, json, logging, mmap, os, random, signal, sys, threading, time, warnings
from fairqueue.runtime import processes
from fairqueue.runtime.processes import ProcessGroup

os.setsid()

def tell(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())

class Teller(logging.Handler):
    def emit(self, record):
        names = ("event", "group", "index", "pid", "status", "restart_in", "memory", "error")
        facts = {name: getattr(record, name) for name in names if hasattr(record, name)}
        if record.exc_info:
            facts["traceback"] = logging.Formatter().formatException(record.exc_info)
        tell(level=record.levelname, **facts)

logging.getLogger("fairqueue.processes").addHandler(Teller())
logging.getLogger("fairqueue.processes").setLevel(logging.INFO)

def has_child_processes():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True

def in_a_copy(function):
    pid = os.fork()
    if not pid:
        function()
        os._exit(0)
    return os.waitpid(pid, 0)[1]

births = mmap.mmap(-1, 16)  # shared by all: how often each index was born

def tell_birth(index):
    births[index] += 1
    tell(born=index, pid=os.getpid())

def serve(stop, index):
    tell_birth(index)
    stop.wait()
    tell(drained=index)

def serve_forever(stop, index):
    tell_birth(index)
    threading.Event().wait()
"""

# The test asks, line by line, until it closes the standard input.
EPILOGUE = """
for line in sys.stdin:
    tell(answer=eval(line))
"""


class Program:
    """Another Python, which has a group of processes; all of them share its standard output."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self._unheard: list[dict[str, Any]] = []

    def hear(self, **wanted: object) -> dict[str, Any]:
        """The next thing told, by any of the processes, that has these facts."""
        return self._find(lambda told: wanted.items() <= told.items(), str(wanted))

    def ask(self, expression: str) -> Any:
        """What an expression is, in the parent of the group."""
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self._find(lambda told: "answer" in told, expression)["answer"]

    def births(self, count: int) -> list[int]:
        """The pids of the next ones of each index."""
        return [self.hear(born=index)["pid"] for index in range(count)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> list[dict[str, Any]]:
        """End the parent; all that was told until the last of the processes was gone."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        while (told := self._next()) is not None:
            self._unheard.append(told)
        return self._unheard

    def _find(self, matches: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        for number, told in enumerate(self._unheard):
            if matches(told):
                return self._unheard.pop(number)
        while (new := self._next()) is not None:
            if matches(new):
                return new
            self._unheard.append(new)
        raise AssertionError(f"all have ended, and nobody told {what}")

    def _next(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


Run = Callable[[str], Program]


@pytest.fixture
def run(spawn: Callable[..., "subprocess.Popen[str]"]) -> Run:
    def run(body: str) -> Program:
        return Program(spawn(PROLOGUE + textwrap.dedent(body) + EPILOGUE))

    return run


TWO = """
group = ProcessGroup(serve, 2, name="pair")
group.start()
"""


def statuses(told: list[dict[str, Any]]) -> list[int]:
    return [facts["status"] for facts in told if facts.get("event") == "process_ended"]


# --- running --------------------------------------------------------------------------------------


def test_each_process_has_an_index_of_its_own(run: Run) -> None:
    program = run("group = ProcessGroup(serve, 3)\ngroup.start()")
    pids = program.births(3)

    assert len({*pids, program.process.pid, program.ask("group.supervisor_pid")}) == 5
    assert program.ask("[group.alive(), group.is_alive(), group.restarts]") == [pids, True, 0]


def test_a_process_has_the_usual_handler_for_the_ends_of_its_own_children(run: Run) -> None:
    program = run(
        """
        def serve(stop, index):
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            tell(usual=signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL and not blocked)
            stop.wait()

        group = ProcessGroup(serve, 1)
        group.start()
        """
    )
    program.hear(usual=True)


def test_a_second_start_changes_nothing(run: Run) -> None:
    program = run(TWO)
    before = program.ask("[group.supervisor_pid, group.alive()]")

    assert program.ask("group.start()") is None
    assert program.ask("[group.supervisor_pid, group.alive()]") == before


def test_a_group_outlives_the_thread_that_started_it(run: Run) -> None:
    program = run(
        """
        warnings.simplefilter("error")
        group = ProcessGroup(serve, 2)
        thread = threading.Thread(target=group.start)
        thread.start()
        thread.join()
        """
    )
    pids = program.births(2)

    assert program.ask("[group.alive(), group.is_alive(), group.stop(60)]") == [pids, True, True]
    assert statuses(program.end()) == [0, 0]


def test_the_processes_draw_different_random_numbers(run: Run) -> None:
    program = run(
        """
        def serve(stop, index):
            tell(drawn=index, number=random.random())
            stop.wait()

        random.seed(1)
        group = ProcessGroup(serve, 2)
        group.start()
        """
    )

    assert program.hear(drawn=0)["number"] != program.hear(drawn=1)["number"]


def test_the_processes_run_no_exit_handlers_and_write_no_output_of_the_parent(run: Run) -> None:
    program = run(
        """
        def serve(stop, index):
            print(json.dumps({"buffered": index}))

        sys.stdout = open(1, "w", buffering=4096, closefd=False)  # whatever the environment says
        atexit.register(lambda: tell(exits=os.getpid()))
        print(json.dumps({"buffered": "parent"}))
        group = ProcessGroup(serve, 1)
        group.start()
        """
    )
    program.hear(buffered=0)
    assert program.ask("group.stop(60)") is True
    told = program.end()

    assert [facts for facts in told if "exits" in facts] == [{"exits": program.process.pid}]
    assert [facts for facts in told if facts.get("buffered") == "parent"] == [
        {"buffered": "parent"}
    ]


def test_a_start_without_enough_processes_leaves_none(run: Run) -> None:
    program = run(
        """
        fork, forks = os.fork, mmap.mmap(-1, 1)

        def fork_twice():
            forks[0] += 1
            if forks[0] > 2:
                raise OSError(errno.EAGAIN, "too many processes")
            return fork()

        os.fork = fork_twice
        group = ProcessGroup(serve, 2)
        try:
            group.start()
        except Exception as error:
            tell(refused=str(error), kind=type(error).__name__)
        """
    )
    refused = program.hear(kind="FairQueueError")["refused"]

    assert "cannot start processes" in refused
    assert "too many processes" in refused
    assert program.ask("[group.alive(), group.is_alive(), has_child_processes()]") == [
        [],
        False,
        False,
    ]


# --- replacing ------------------------------------------------------------------------------------


def test_a_process_that_was_killed_is_replaced_and_keeps_its_index(run: Run) -> None:
    program = run(TWO)
    first, second = program.births(2)

    os.kill(second, signal.SIGKILL)
    replaced = program.hear(born=1)["pid"]

    ended = program.hear(event="process_ended", status=-signal.SIGKILL)
    assert (ended["group"], ended["index"], ended["pid"]) == ("pair", 1, second)
    eventually(lambda: program.ask("group.restarts") == 1, "it is counted")
    assert program.ask("group.alive()") == [first, replaced]


def test_a_process_that_ended_without_an_error_is_replaced_after_the_same_pause(run: Run) -> None:
    program = run(
        """
        def serve_five_times(stop, index):
            tell_birth(index)
            if births[0] == 5:
                stop.wait()

        processes.FIRST_BACKOFF_S = 0.01
        group = ProcessGroup(serve_five_times, 1)
        group.start()
        """
    )
    for _ in range(5):
        program.hear(born=0)

    ended = [program.hear(event="process_ended") for _ in range(4)]
    assert {(facts["level"], facts["status"]) for facts in ended} == {("INFO", 0)}
    assert all(facts["restart_in"] <= 0.01 for facts in ended)


@pytest.mark.parametrize(
    ("healthy", "pauses"), [(60.0, [0.01, 0.02, 0.04, 0.04]), (0.0, [0.01, 0.01, 0.01, 0.01])]
)
def test_a_process_that_fails_at_birth_is_replaced_after_longer_and_longer_pauses(
    run: Run, healthy: float, pauses: list[float]
) -> None:
    program = run(
        f"""
        def fail(stop, index):
            raise RuntimeError("boom")

        processes.FIRST_BACKOFF_S, processes.LONGEST_BACKOFF_S = 0.01, 0.04
        processes.HEALTHY_S = {healthy}
        group = ProcessGroup(fail, 1)
        group.start()
        """
    )
    ended = [program.hear(event="process_ended") for _ in pauses]

    assert [facts["restart_in"] for facts in ended] == pauses
    assert {(facts["level"], facts["status"]) for facts in ended} == {("WARNING", 1)}
    assert "RuntimeError: boom" in program.hear(event="process_failed")["traceback"]
    assert program.ask("group.stop(60)") is True


def test_a_replacement_that_the_system_refuses_is_tried_again(run: Run) -> None:
    program = run(
        """
        fork, forks = os.fork, mmap.mmap(-1, 1)

        def refuse_the_third():
            forks[0] += 1
            if forks[0] == 3:
                raise OSError(errno.EAGAIN, "too many processes")
            return fork()

        os.fork = refuse_the_third
        group = ProcessGroup(serve, 1)
        group.start()
        """
    )
    os.kill(program.births(1)[0], signal.SIGKILL)

    assert "too many" in program.hear(event="process_not_started", index=0)["error"]
    program.hear(born=0)
    eventually(lambda: program.ask("group.restarts") == 1, "only the one that came is counted")


def test_a_process_that_gets_a_sigterm_drains_and_is_replaced(run: Run) -> None:
    program = run(TWO)
    os.kill(program.births(2)[0], signal.SIGTERM)

    program.hear(drained=0)
    program.hear(event="process_ended", index=0, status=0)
    program.hear(born=0)


def test_a_sigterm_during_a_fork_is_not_lost_and_stops_no_other(run: Run) -> None:
    program = run(
        """
        forks = mmap.mmap(-1, 1)

        def after_fork():
            forks[0] += 1
            if forks[0] == 2:  # the first is the supervisor
                os.kill(os.getpid(), signal.SIGTERM)

        os.register_at_fork(after_in_child=after_fork)
        group = ProcessGroup(serve, 1)
        group.start()
        """
    )

    program.hear(drained=0)
    program.hear(event="process_ended", status=0)
    eventually(lambda: program.ask("group.restarts") == 1, "it is replaced")


def test_a_sigterm_to_what_a_process_forked_ends_that_and_stops_nothing(run: Run) -> None:
    program = run(
        """
        def serve(stop, index):
            ready, tell_ready = os.pipe()
            pid = os.fork()
            if not pid:
                os.write(tell_ready, b"!")  # Python drops a signal that comes while it forks
            while not pid:
                time.sleep(0.01)
            os.read(ready, 1)
            os.kill(pid, signal.SIGTERM)
            status = os.waitpid(pid, 0)[1]
            tell(ended_by=os.WTERMSIG(status), stop=stop.is_set())
            stop.wait()

        group = ProcessGroup(serve, 1)
        group.start()
        """
    )

    assert program.hear(ended_by=signal.SIGTERM)["stop"] is False
    assert program.ask("[group.restarts, group.stop(60)]") == [0, True]


# --- memory ---------------------------------------------------------------------------------------

GREEDY = """
def serve_greedily(stop, index):
    first = births[index] == 0
    tell_birth(index)
    if first and index == 0:
        kept = b"x" * (200 << 20)
    (threading.Event() if {stubborn} else stop).wait()

limit = processes._memory_of(os.getpid()) + (100 << 20)
group = ProcessGroup(serve_greedily, 2, max_memory=limit, memory_interval=0.01, grace={grace})
group.start()
"""


@needs_proc
def test_a_process_over_the_memory_limit_drains_and_is_replaced(run: Run) -> None:
    program = run(GREEDY.format(stubborn=False, grace=60))
    greedy, modest = program.births(2)

    over = program.hear(event="process_over_memory")
    assert (over["index"], over["pid"]) == (0, greedy)
    assert over["memory"] > program.ask("limit")
    program.hear(event="process_ended", pid=greedy, status=0)
    program.hear(born=0)
    assert modest in program.ask("group.alive()")


@needs_proc
def test_a_process_over_the_memory_limit_is_killed_and_replaced(run: Run) -> None:
    program = run(GREEDY.format(stubborn=True, grace=0.01))
    greedy = program.births(2)[0]

    program.hear(event="process_killed", pid=greedy)
    ended = program.hear(event="process_ended", pid=greedy, status=-signal.SIGKILL)
    assert ended["level"] == "INFO"  # no crash: it was meant to end
    program.hear(born=0)


# --- stopping -------------------------------------------------------------------------------------


def test_stop_lets_the_processes_drain_and_leaves_none(run: Run) -> None:
    program = run(TWO)
    program.births(2)

    assert program.ask("group.stop(60)") is True
    program.hear(drained=0)
    program.hear(drained=1)
    assert program.ask("[group.alive(), group.is_alive(), has_child_processes()]") == [
        [],
        False,
        False,
    ]
    assert statuses(program.end()) == [0, 0]


def test_a_stop_right_after_the_start_reaches_the_newborn(run: Run) -> None:
    program = run("group = ProcessGroup(serve, 8)")

    assert program.ask("[group.start(), group.stop(60)]") == [None, True]
    assert statuses(program.end()) == [0] * 8


def test_stop_kills_those_that_do_not_end_in_time(run: Run) -> None:
    program = run("group = ProcessGroup(serve_forever, 2)\ngroup.start()")
    program.births(2)

    assert program.ask("group.stop(0.05)") is False
    assert program.ask("[group.alive(), has_child_processes()]") == [[], False]
    assert statuses(program.end()) == [-signal.SIGKILL] * 2


def test_a_second_stop_says_what_the_first_did_and_one_without_a_start_is_fine(run: Run) -> None:
    program = run("group = ProcessGroup(serve_forever, 1)")
    assert program.ask("[group.stop(60), group.start()]") == [True, None]
    program.births(1)

    assert program.ask("[group.stop(0), group.stop(60)]") == [False, False]


def test_a_group_can_be_started_again_after_it_was_stopped(run: Run) -> None:
    program = run(TWO)
    before = program.births(2)

    assert program.ask("[group.stop(60), group.start()]") == [True, None]
    after = program.births(2)
    assert not {*before} & {*after}
    assert program.ask("[group.alive(), group.restarts]") == [after, 0]
    assert program.ask("group.stop(60)") is True


@pytest.mark.parametrize(("first", "second"), [(1e9, 0.05), (0.5, 1e9)])
def test_the_shorter_of_two_times_to_stop_counts(run: Run, first: float, second: float) -> None:
    program = run(
        f"""
        def serve_on(stop, index):
            stop.wait()
            serve_forever(stop, index)

        group = ProcessGroup(serve_on, 1)
        group.start()
        threading.Thread(target=lambda: tell(ended=group.stop({first}))).start()
        """
    )
    program.births(1)  # it was asked to stop

    assert program.ask(f"group.stop({second})") is False
    program.hear(ended=False)
    program.hear(event="process_killed")  # by the supervisor, in time


def test_the_end_of_a_with_block_stops_the_group(run: Run) -> None:
    program = run("with ProcessGroup(serve, 2) as group:\n    tell(alive=len(group.alive()))")

    program.hear(alive=2)
    assert program.ask("has_child_processes()") is False


def test_a_forked_copy_of_the_parent_can_not_stop_the_group(run: Run) -> None:
    program = run(TWO)
    pids = program.births(2)

    assert program.ask("in_a_copy(lambda: group.stop(0))") == 0
    assert program.ask("[group.alive(), group.is_alive(), group.stop(60)]") == [pids, True, True]
    assert statuses(program.end()) == [0, 0]


def test_a_sigterm_to_the_supervisor_stops_the_group(run: Run) -> None:
    program = run(TWO)
    program.births(2)

    os.kill(program.ask("group.supervisor_pid"), signal.SIGTERM)
    program.hear(drained=0)
    program.hear(drained=1)
    eventually(lambda: program.ask("group.is_alive()") is False, "the supervisor ends")
    assert program.ask("[group.restarts, group.stop(60)]") == [0, True]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_of_the_terminal_is_left_to_the_parent(run: Run, number: signal.Signals) -> None:
    program = run(
        f"""
        signal.signal({int(number)}, lambda number, frame: tell(heard=number))
        group = ProcessGroup(serve, 2)
        group.start()
        """
    )
    pids = program.births(2)

    os.killpg(program.process.pid, number)
    program.hear(heard=number)
    assert program.ask("[group.alive(), group.stop(60)]") == [pids, True]
    told = program.end()
    assert statuses(told) == [0, 0]
    assert [facts for facts in told if "heard" in facts] == []


def test_a_signal_to_a_process_does_not_reach_the_event_loop_of_the_parent(run: Run) -> None:
    program = run(
        """
        heard, hear = os.pipe()
        os.set_blocking(heard, False)
        os.set_blocking(hear, False)
        signal.set_wakeup_fd(hear)  # as asyncio does

        def serve(stop, index):
            tell_birth(index)
            stop.wait()
            tell(drained=index, wakes=signal.set_wakeup_fd(-1))

        group = ProcessGroup(serve, 1)
        group.start()

        def signals():
            try:
                return len(os.read(heard, 10))
            except BlockingIOError:
                return 0
        """
    )
    os.kill(program.births(1)[0], signal.SIGTERM)
    assert program.hear(drained=0)["wakes"] == -1
    os.kill(program.ask("group.supervisor_pid"), signal.SIGTERM)
    eventually(lambda: program.ask("group.is_alive()") is False, "the supervisor ends")

    assert program.ask("signals()") == 0


def test_a_signal_handler_may_stop_a_group_that_is_being_stopped(run: Run) -> None:
    program = run(
        """
        def interrupt(number, frame):
            tell(inner=group.stop(0))

        signal.signal(signal.SIGALRM, interrupt)
        group = ProcessGroup(serve_forever, 1)
        group.start()
        """
    )
    program.births(1)

    assert program.ask("[signal.setitimer(signal.ITIMER_REAL, 0.05)[0], group.stop(1e9)]") == [
        0.0,
        False,
    ]
    program.hear(inner=False)


# --- the parent or the supervisor dies ------------------------------------------------------------


def test_when_the_parent_is_killed_the_processes_drain_and_none_is_left(run: Run) -> None:
    program = run(TWO)
    program.births(2)

    program.kill()
    told = program.end()
    assert sorted(facts["drained"] for facts in told if "drained" in facts) == [0, 1]
    assert statuses(told) == [0, 0]


def test_when_the_parent_is_killed_those_that_do_not_drain_are_killed(run: Run) -> None:
    program = run("group = ProcessGroup(serve_forever, 2, grace=0.05)\ngroup.start()")
    program.births(2)

    program.kill()
    assert statuses(program.end()) == [-signal.SIGKILL] * 2


@pytest.mark.parametrize("pidfd", [True, False])
def test_no_process_outlives_a_killed_parent_with_a_forked_copy(run: Run, pidfd: bool) -> None:
    program = run(
        f"""
        if not {pidfd}:
            processes._watch_process = lambda pid: None
            processes.PARENT_CHECK_S = 0.01
        group = ProcessGroup(serve, 2)
        group.start()
        copy = os.fork()
        if not copy:
            for file in range(3):
                os.close(file)
            signal.pause()
        """
    )
    program.births(2)
    copy = program.ask("copy")
    try:
        program.kill()
        assert statuses(program.end()) == [0, 0]
    finally:
        os.kill(copy, signal.SIGKILL)  # fails if it had ended: then it proved nothing


def test_when_the_parent_ends_without_stopping_the_group_it_drains(run: Run) -> None:
    program = run(TWO)
    program.births(2)

    assert statuses(program.end()) == [0, 0]
    assert program.process.wait(60) == 0


def test_when_the_parent_forgets_the_group_it_drains(run: Run) -> None:
    program = run(TWO)
    program.births(2)

    program.ask("[globals().pop('group'), None][1]")
    program.hear(drained=0)
    program.hear(drained=1)
    program.hear(event="group_abandoned", pid=program.process.pid)


def test_when_the_supervisor_is_killed_the_processes_drain(run: Run) -> None:
    program = run(TWO)
    program.births(2)

    os.kill(program.ask("group.supervisor_pid"), signal.SIGKILL)
    program.hear(drained=0)
    program.hear(drained=1)
    eventually(lambda: program.ask("group.is_alive()") is False, "the parent knows")
    assert program.ask("[group.stop(60), group.alive()]") == [True, []]


def test_when_the_supervisor_is_killed_those_that_do_not_drain_end_themselves(run: Run) -> None:
    program = run("group = ProcessGroup(serve_forever, 2, grace=0.05)\ngroup.start()")
    program.births(2)

    os.kill(program.ask("group.supervisor_pid"), signal.SIGKILL)
    told = program.end()
    assert [facts["event"] for facts in told if "event" in facts].count("supervisor_died") == 2


def test_a_log_handler_that_raises_ends_no_supervisor_and_saves_no_orphan(run: Run) -> None:
    program = run(
        """
        class Broken(logging.Handler):
            def emit(self, record):
                raise RuntimeError("the log is full")

        logging.getLogger("fairqueue.processes").addHandler(Broken())
        group = ProcessGroup(serve_forever, 1, grace=0.05)
        group.start()
        """
    )
    os.kill(program.births(1)[0], signal.SIGKILL)
    program.births(1)

    os.kill(program.ask("group.supervisor_pid"), signal.SIGKILL)
    program.end()


def test_when_the_supervisor_is_killed_stop_kills_those_that_do_not_drain(run: Run) -> None:
    program = run("group = ProcessGroup(serve_forever, 2, grace=60)\ngroup.start()")
    program.births(2)

    os.kill(program.ask("group.supervisor_pid"), signal.SIGKILL)
    assert program.ask("group.stop(0.05)") is False
    program.end()


def test_when_the_supervisor_hangs_stop_kills_it_and_leaves_no_process(run: Run) -> None:
    program = run("group = ProcessGroup(serve_forever, 2, grace=60)\ngroup.start()")
    program.births(2)
    os.kill(program.ask("group.supervisor_pid"), signal.SIGSTOP)
    program.ask("setattr(processes, 'ANSWER_S', 0.05)")

    assert program.ask("[group.stop(0), has_child_processes()]") == [False, False]
    program.end()


def test_a_group_whose_supervisor_was_killed_can_be_started_again(run: Run) -> None:
    program = run(TWO)
    program.births(2)
    os.kill(program.ask("group.supervisor_pid"), signal.SIGKILL)
    eventually(lambda: program.ask("group.is_alive()") is False, "the parent knows")

    assert program.ask("group.start()") is None
    assert program.births(2) == program.ask("group.alive()")
    assert program.ask("group.stop(60)") is True


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"serve": "serve"}, r"serve must be a function of .*, not 'serve'"),
        ({"count": 0}, r"count must be .*, not 0"),
        ({"count": True}, r"count must be .*, not True"),
        ({"count": 1.5}, r"count must be .*, not 1\.5"),
        ({"name": "a\nb"}, r"name must be .*, not 'a"),
        ({"max_memory": 0}, r"max_memory must be .*, not 0"),
        ({"max_memory": "1G"}, r"max_memory must be .*, not '1G'"),
        ({"grace": -1}, r"grace must be .*, not -1"),
        ({"memory_interval": 0}, r"memory_interval must be .*, not 0"),
    ],
)
def test_a_bad_argument_is_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {"serve": lambda stop, index: None, "count": 1} | wrong

    with pytest.raises(ConfigurationError, match=named):
        ProcessGroup(**arguments)


def test_a_memory_limit_without_a_way_to_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_memory_of", lambda pid: None)

    with pytest.raises(ConfigurationError, match=r"max_memory 5 .*no /proc"):
        ProcessGroup(lambda stop, index: None, 1, max_memory=5)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5", None])
def test_a_time_to_stop_that_is_none_is_refused_by_name(timeout: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"timeout must be .*, not {timeout!r}"):
        ProcessGroup(lambda stop, index: None, 1).stop(timeout)


def signal_this_thread_when_main_is_in(name: str) -> None:
    """As the kernel does to a process that is woken: whoever is awake first is given the signal."""
    main = threading.main_thread().ident
    assert main is not None

    def is_there() -> bool:
        frame = sys._current_frames()[main]
        while frame.f_back is not None and frame.f_code.co_name != name:
            frame = frame.f_back
        return frame.f_code.co_name == name

    eventually(is_there, f"the main thread is in {name}")
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


def test_a_signal_that_another_thread_was_given_ends_a_wait() -> None:
    stop, (asked, ask) = threading.Event(), os.pipe()

    def set_when_asked() -> None:
        os.read(asked, 1)
        stop.set()

    before = signal.signal(signal.SIGTERM, lambda *_: os.write(ask, b"x"))
    threads = [
        threading.Thread(target=set_when_asked),
        threading.Thread(target=signal_this_thread_when_main_is_in, args=("wait_for",)),
    ]
    try:
        for thread in threads:
            thread.start()
        wait_for(stop)
    finally:
        signal.signal(signal.SIGTERM, before)
        for thread in threads:
            thread.join()
        os.close(asked)
        os.close(ask)


def test_a_signal_that_another_thread_was_given_ends_a_command() -> None:
    thread = threading.Thread(target=signal_this_thread_when_main_is_in, args=("until_signalled",))
    thread.start()
    assert until_signalled(lambda: True, lambda: None)
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_may_come_as_soon_as_a_command_says_where_it_serves(number: int) -> None:
    assert until_signalled(lambda: True, lambda: os.kill(os.getpid(), number))
