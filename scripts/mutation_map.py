"""Record which tests run which functions and scripts: a plugin of pytest.

`random_mutants.py` loads it for one run of the suite. Each process of that run writes its own file
into the folder named by MUTATION_MAP.

Every function of `fairqueue` gets a first statement that notes its call. Tracing by coverage.py is
slower, and hangs on Python 3.11 when an exception is raised in a thread from outside, as time-outs
of handlers are.
"""

import ast
import json
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CALLED: set[tuple[str, str]] = set()  # file and function, since the current test began
NOTE = "_note_call"  # what each function calls first


def functions(tree: ast.AST, prefix: str = "") -> list[tuple[str, int, int]]:
    """List the functions of a module: qualified name, first and last line; nested ones last."""
    return [
        (name, node.lineno, node.end_lineno or node.lineno) for name, node in _defined(tree, prefix)
    ]


Defined = tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]


def _defined(tree: ast.AST, prefix: str) -> list[Defined]:
    found: list[Defined] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{node.name}"
            found.append((name, node))
            found += _defined(node, f"{name}.")
        elif isinstance(node, ast.ClassDef):
            found += _defined(node, f"{prefix}{node.name}.")
        else:
            found += _defined(node, prefix)
    return found


def function_at(spans: list[tuple[str, int, int]], line: int) -> str:
    """Name the innermost function around a line; empty at the top level of a module."""
    inside = [name for name, first, last in spans if first <= line <= last]
    return inside[-1] if inside else ""


def with_notes(source: bytes, file: str) -> ast.Module:
    """Parse a module, with a first statement in each function that notes its call."""
    tree = ast.parse(source)
    for name, node in _defined(tree, ""):
        note = ast.parse(f"{NOTE}({(file, name)!r})").body[0]
        for each in ast.walk(note):
            ast.copy_location(each, node.body[0])
        has_docstring = ast.get_docstring(node, clean=False) is not None
        node.body.insert(1 if has_docstring else 0, note)
    return tree


class Loader(SourceFileLoader):
    """Loads a module whose functions note their calls."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile from the source: code in __pycache__ notes no calls."""
        path = Path(self.get_filename(fullname))
        tree = with_notes(path.read_bytes(), str(path.relative_to(ROOT)))
        return compile(tree, str(path), "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, with the recorder that its functions call."""
        setattr(module, NOTE, CALLED.add)
        super().exec_module(module)


class Finder(MetaPathFinder):
    """Finds the modules of this tree's `fairqueue`, and gives them that loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the package as Python does, and replace its loader."""
        if name.partition(".")[0] != "fairqueue":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


class Recorder:
    """Records the functions of `fairqueue` and the Lua scripts that each test runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._functions: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._scripts: dict[str, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = {}
        self._test = ""
        self._note_scripts()

    def _note_scripts(self) -> None:
        from fairqueue.link.connection import Link  # imported only now, so that its calls are noted

        command = Link.command_of

        def noting(link: Link, call: Any) -> Any:
            self._scripts[call.script].add(self._test)
            return command(link, call)

        Link.command_of = noting  # type: ignore[method-assign,assignment]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Attribute all calls from now on to this test."""
        self._test = item.nodeid
        CALLED.clear()
        try:
            return (yield)
        finally:
            for file, name in list(CALLED):
                self._functions[file][name].add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record how long each test takes."""
        taken = self._seconds.get(report.nodeid, 0.0)
        self._seconds[report.nodeid] = taken + report.duration

    def pytest_unconfigure(self) -> None:
        """Write the record."""
        document = {
            "functions": {
                file: {name: sorted(tests) for name, tests in entries.items()}
                for file, entries in self._functions.items()
            },
            "scripts": {name: sorted(tests) for name, tests in self._scripts.items()},
            "seconds": self._seconds,
        }
        path = self._folder / f"{os.getpid()}.json"
        path.write_text(json.dumps(document), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the processes that run tests, not in the one that distributes them."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(Path(os.environ["MUTATION_MAP"])))


if "MUTATION_MAP" in os.environ:
    sys.meta_path.insert(0, Finder())
