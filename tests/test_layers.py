"""Imports point down only, and importing does nothing."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fairqueue

PACKAGE = Path(fairqueue.__file__).parent

# From the ground up: a room imports from those above it in this list, and from itself. A room is a
# sub-package, or a module at the top.
LAYERS = [
    {"errors", "logs", "reasons", "outcomes", "aliases"},
    {"clock", "cursors", "validation"},
    {"retry_policy", "flow_options", "recurrence", "link", "runtime"},
    {"models", "testing"},
    {"queue", "access"},
    {"schedules"},
    {"history"},
    {"stats", "doctor", "repartition"},
    {"metrics"},
    {"alerts"},
    {"worker"},
    {"http_tasks"},
    {"http", "scheduler"},
    {"inspection", "aio"},
    {"demo", "web"},
    {"service"},
    {"cli"},
    {"__main__"},
]
MOST_AT_THE_TOP = 18
# Names of classes that exist twice; shrink it, never extend it.
STILL_SHARED_NAMES = {"Answer", "Outcome", "Readiness", "Reading", "Task"}
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 700, 60
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
PACKAGES = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
MODULES = sorted([path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"] + PACKAGES)


def text_of(module: str) -> str:
    """The text of a module, or of all modules of a package."""
    paths = [PACKAGE / f"{module}.py"]
    if module in PACKAGES:
        paths = sorted((PACKAGE / module).rglob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def imports_of(text: str) -> set[str]:
    """The rooms of this package that a text imports from, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "fairqueue" if node.level else node.module or ""
            if node.level and node.module:
                module += "." + node.module
            names = [module]
            if module == "fairqueue":
                names = [f"fairqueue.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("fairqueue.")}
    return found


def upward(module: str, text: str) -> set[str]:
    """What a room imports from others of its row, and from later rows."""
    return {
        name for name in imports_of(text) if name != module and LAYER.get(name, 99) >= LAYER[module]
    }


def test_every_room_has_a_layer() -> None:
    assert set(MODULES) == set(LAYER)


def test_few_modules_are_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_TOP


def test_no_two_classes_have_the_same_name() -> None:
    names = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in names if names.count(name) > 1} <= STILL_SHARED_NAMES


def test_modules_and_functions_are_short() -> None:
    long = set()
    for path in PACKAGE.rglob("*.py"):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix()
        if text.count("\n") > MOST_LINES:
            long.add(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long.add(f"{name}:{node.name}")
    assert long == set()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module: str) -> None:
    assert upward(module, text_of(module)) == set()


@pytest.mark.parametrize(
    "line",
    [
        "from fairqueue.queue.queue import TaskQueue",
        "import fairqueue.queue.queue",
        "import fairqueue.queue.queue as q",
        "from fairqueue import queue",
        "from fairqueue import TaskQueue",
        "from . import queue",
        "from .queue import TaskQueue",
        "def f():\n    from fairqueue.queue.queue import TaskQueue",
    ],
)
def test_an_upward_import_is_found(line: str) -> None:
    assert len(upward("link", f"import os\n{line}\n")) == 1
    assert upward("link", "from fairqueue.errors import InvalidInput\nimport redis\n") == set()


def test_modules_do_not_import_each_other_in_circles() -> None:
    names = {
        ".".join(["fairqueue", *path.relative_to(PACKAGE).with_suffix("").parts]): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {name: modules_of(path.read_text(), set(names)) for name, path in names.items()}
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {m for m, needs in graph.items() if m not in done and needs <= done}
        assert ready, f"a circle among {sorted(graph.keys() - done)}"
        done |= ready


def modules_of(text: str, known: set[str]) -> set[str]:
    """Which of the known modules a text imports at its top."""
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found & known


def test_only_stores_talk_to_redis() -> None:
    """Who imports redis: the connection and those that make clients; nobody else."""
    talkers = set()
    for module in MODULES:
        tree = ast.parse(text_of(module))
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] == "redis" for name in names):
                talkers.add(module)
    assert {"link", "queue"} <= talkers
    assert not talkers & {"clock", "errors", "models", "validation", "recurrence"}
    assert not talkers & {"inspection", "cli", "web"}  # the faces contain no Redis


def test_importing_opens_no_connection_starts_no_thread_and_installs_no_handler() -> None:
    program = textwrap.dedent(
        """
        import atexit, logging, signal, socket, sys, threading, warnings

        import croniter, multiprocessing.util, prometheus_client, pytz, redis  # theirs, not ours

        def handlers():
            return {n: signal.getsignal(n) for n in signal.valid_signals()}

        def events(event, arguments):
            loud = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn")
            if event.startswith(loud) and event != "socket.gethostname":
                seen.append(event)

        seen = []
        before = (threading.active_count(), handlers(), logging.getLogger().handlers[:],
                  logging.getLogger().level, warnings.filters[:], sys.excepthook,
                  threading.excepthook, atexit._ncallbacks())
        sys.addaudithook(events)
        import fairqueue, fairqueue.link.connection, fairqueue.runtime.embedded
        after = (threading.active_count(), handlers(), logging.getLogger().handlers[:],
                 logging.getLogger().level, warnings.filters[:], sys.excepthook,
                 threading.excepthook, atexit._ncallbacks())
        assert after == before, (before, after)
        assert seen == [], seen
        assert logging.getLogger("fairqueue").handlers in ([], [logging.NullHandler()])
        fairqueue.TaskQueue.from_url("redis://127.0.0.1:1/0")  # opens none either
        assert "socket.connect" not in seen, seen
        print("quiet")
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("quiet\n", 0), done.stderr
