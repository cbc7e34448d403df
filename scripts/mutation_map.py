"""Record which tests run which functions and scripts: a plugin of pytest.

`random_mutants.py` loads it for one run of the suite. Each process of that run writes its own file
into the folder named by MUTATION_MAP.
"""

import ast
import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import coverage
import pytest

from fairqueue.connection import Link

ROOT = Path(__file__).resolve().parent.parent


def functions(tree: ast.AST, prefix: str = "") -> list[tuple[str, int, int]]:
    """List the functions of a module: qualified name, first and last line; nested ones last."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{node.name}"
            found.append((name, node.lineno, node.end_lineno or node.lineno))
            found += functions(node, f"{name}.")
        elif isinstance(node, ast.ClassDef):
            found += functions(node, f"{prefix}{node.name}.")
        else:
            found += functions(node, prefix)
    return found


def function_at(spans: list[tuple[str, int, int]], line: int) -> str:
    """Name the innermost function around a line; empty at the top level of a module."""
    inside = [name for name, first, last in spans if first <= line <= last]
    return inside[-1] if inside else ""


class Recorder:
    """Records the functions of `fairqueue` and the Lua scripts that each test runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scripts: dict[str, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = {}
        self._test = ""
        self._coverage = coverage.Coverage(
            data_file=None, source=[str(ROOT / "fairqueue")], config_file=False, messages=False
        )
        self._coverage.start()
        command = Link._command

        def noting(link: Link, name: Any, *arguments: Any, **named: Any) -> Any:
            self._scripts[getattr(name, "name", str(name))].add(self._test)
            return command(link, name, *arguments, **named)

        Link._command = noting  # type: ignore[method-assign,assignment]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Attribute what runs from here on to this test."""
        self._test = item.nodeid
        self._coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record how long each test takes."""
        taken = self._seconds.get(report.nodeid, 0.0)
        self._seconds[report.nodeid] = taken + report.duration

    def pytest_unconfigure(self) -> None:
        """Write the record."""
        self._coverage.stop()
        document = {
            "functions": self._functions(),
            "scripts": {name: sorted(tests) for name, tests in self._scripts.items()},
            "seconds": self._seconds,
        }
        path = self._folder / f"{os.getpid()}.json"
        path.write_text(json.dumps(document), encoding="utf-8")

    def _functions(self) -> dict[str, dict[str, list[str]]]:
        data = self._coverage.get_data()
        modules = {}
        for file in data.measured_files():
            path = Path(file)
            spans = functions(ast.parse(path.read_text(encoding="utf-8")))
            tests: dict[str, set[str]] = defaultdict(set)
            for line, contexts in data.contexts_by_lineno(file).items():
                tests[function_at(spans, line)].update(context for context in contexts if context)
            modules[str(path.relative_to(ROOT))] = {k: sorted(v) for k, v in tests.items()}
        return modules


def pytest_configure(config: pytest.Config) -> None:
    """Record in the processes that run tests, not in the one that hands them out."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(Path(os.environ["MUTATION_MAP"])))
