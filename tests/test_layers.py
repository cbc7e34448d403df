"""Imports point down only, and importing does nothing."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fairqueue

PACKAGE = Path(fairqueue.__file__).parent

# From the ground up: a module imports from its own row and from rows above it in this list.
LAYERS = [
    {"clock", "errors", "logs"},
    {
        "validation",
        "models",
        "keys",
        "cron",
        "zones",
        "recurrence",
        "scripts",
        "embedded",
        "reports",
        "frequency",
        "windows",
        "jitter",
        "describe",
        "planning",
        "policy",
        "reasons",
        "hooks",
        "processes",
        "addresses",
        "dialing",
        "stage",
        "threads",
    },
    {"connection", "context", "permissions"},
    {
        "queue",
        "schedules",
        "leadership",
        "history",
        "workers",
        "moments",
        "backfill",
        "control",
        "exchange",
        "glance",
        "people",
        "delays",
        "samples",
        "access",
        "audit",
        "replies",
    },
    {
        "metrics",
        "tally",
        "handlers",
        "dispatch",
        "isolation",
        "alerts",
        "presence",
        "keeper",
        "running",
    },
    {"scheduler", "worker", "http", "outgoing"},
    {"testing", "daemon", "inspection", "school", "seeder", "doctor"},
    {"web", "demo"},
    {"up"},
    {"cli"},
    {"__main__"},
]
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
    """The modules of this package that a text imports, also inside functions."""
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
    """What a module imports from above itself."""
    return {name for name in imports_of(text) if LAYER.get(name, 99) > LAYER[module]}


def test_every_module_has_a_layer() -> None:
    assert [name for name in MODULES if name not in LAYER] == []


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_only(module: str) -> None:
    assert upward(module, text_of(module)) == set()


@pytest.mark.parametrize(
    "line",
    [
        "from fairqueue.queue import TaskQueue",
        "import fairqueue.queue",
        "import fairqueue.queue as q",
        "from fairqueue import queue",
        "from fairqueue import TaskQueue",
        "from . import queue",
        "from .queue import TaskQueue",
        "def f():\n    from fairqueue.queue import TaskQueue",
    ],
)
def test_an_upward_import_is_found(line: str) -> None:
    assert len(upward("keys", f"import os\n{line}\n")) == 1
    assert upward("keys", "from fairqueue.errors import InvalidInput\nimport redis\n") == set()


def test_modules_of_one_layer_do_not_import_each_other_in_circles() -> None:
    graph = {m: imports_of(text_of(m)) - {m} for m in MODULES}
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {m for m, needs in graph.items() if m not in done and needs <= done}
        assert ready, f"a circle among {sorted(graph.keys() - done)}"
        done |= ready


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
    assert {"connection", "queue"} <= talkers
    assert not talkers & {"clock", "errors", "models", "keys", "validation", "scripts", "cron"}
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
        import fairqueue, fairqueue.connection, fairqueue.embedded, fairqueue.scripts
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
