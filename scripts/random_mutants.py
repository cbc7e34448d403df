"""Change the code at random places and see whether a test notices: `mutants.py --random`.

    python scripts/mutants.py --random 100 --seed 7
    python scripts/mutants.py --random 20 --only task/claim.lua   only files with this in their path
    python scripts/mutants.py --random 99 --only overview.py::due_soon       only in this function
    python scripts/mutants.py --random 0 --map                    record again which tests run what

A mutant is one small change of Python or Lua: another comparison, operator or number, an inverted
condition, a removed statement. The tests that run the changed function are run until one fails,
those in the nearest file first. A run of the whole suite records which tests these are; the record
is kept in .mutants/. A mutant that survives is printed with its line. The working tree is never
changed.
"""

import argparse
import ast
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from mutants import AT_ONCE, ROOT, run, run_tests
from mutation_map import function_at, functions

from fairqueue.link.scripts import load_script, parts_of, script_names

MAP = ROOT / ".mutants" / "map.json"
BUDGET_S = 900.0  # spent on the tests of one mutant; tests that remain after that are not run
FEW = 20  # with fewer tests recorded, a function may run mostly in other processes
CHUNK = 150  # tests per call of pytest; the budget is checked between calls
FILE_S = 60.0  # usual for a whole file of tests that are not recorded
TEST_TIMEOUT_S = 60  # for one test; a mutant that makes a test hang counts as caught
SUITE_TIMEOUT_S = 7200
# They generate demo data: most changes there are neither right nor wrong.
NOT_MUTATED = {"fairqueue/demo/demo.py", "fairqueue/demo/jobs.py", "fairqueue/demo/seeder.py"}
# They start programs. What runs in those is not recorded: a mutant that all other tests let pass
# has to pass these, too, and those of the modules that they are named after before.
IN_PROCESSES = [
    f"tests/{name}.py"
    for name in [
        "cli/test_cli_metrics",
        "cli/test_cli_processes",
        "runtime/test_processes",
        "scheduler/test_scheduler_processes",
        "worker/test_worker_processes",
    ]
]
# Not recorded either, because they are slow: browsers, storms of faults, fuzzers.
NOT_RECORDED = (
    *IN_PROCESSES,
    *(
        f"tests/{name}*"
        for name in [
            "browser/",
            "proof/test_fault_",
            "proof/test_failpoints",
            "proof/test_fuzz",
            "proof/test_model",
            "proof/test_rest_fuzz",
            "proof/test_soak",
            "link/test_failover",
            "runtime/test_embedded",
            "test_service",
            "demo/",
        ]
    ),
)
# A mutant that is not valid Lua says nothing about the tests; it is not counted.
NOT_LUA = re.compile(r"[Ee]rror compiling script")


@dataclass(frozen=True)
class Mutant:
    """One change: in `file`, the bytes from `start` to `end` become `new`."""

    file: str
    start: int
    end: int
    new: str
    what: str

    def line(self, source: bytes) -> int:
        return source.count(b"\n", 0, self.start) + 1

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def describe(self, source: bytes) -> str:
        """The place, and the line before and after."""
        number = self.line(source)
        before = source.split(b"\n")[number - 1].decode().strip()
        changed = self.apply(source).split(b"\n")[number - 1].decode().strip()
        return f"{self.file}:{number} ({self.what})\n    - {before}\n    + {changed}"


# --- Python ---------------------------------------------------------------------------------------

COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "in": "not in", "not in": "in", "is": "is not", "is not": "is",
}  # fmt: skip
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*"}
OPERATOR_OF = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//"}
NOT_WORTH = {"logger", "log", "_log", "warnings"}  # calls that only report


class PythonSites(ast.NodeVisitor):
    """All mutants of one module."""

    def __init__(self, file: str, source: bytes) -> None:
        self._file = file
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._depth = 0
        self.found: list[Mutant] = []
        self.visit(ast.parse(source))

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _span(self, node: Any) -> tuple[int, int]:
        start = self._at(node.lineno, node.col_offset)
        return start, self._at(node.end_lineno, node.end_col_offset)

    def _replace(self, node: Any, new: str, what: str) -> None:
        start, end = self._span(node)
        self.found.append(Mutant(self._file, start, end, new, what))

    def _between(self, left: Any, right: Any, old: str, new: str, what: str) -> None:
        """Replace an operator, which stands somewhere between its operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._source[start:end].decode()
        pattern = r"\s+".join(re.escape(word) for word in old.split())
        match = re.search(rf"(?<!\w){pattern}(?!\w)" if old[0].isalpha() else re.escape(old), gap)
        if match is not None:
            at = start + len(gap[: match.start()].encode())
            self.found.append(Mutant(self._file, at, at + len(match[0].encode()), new, what))

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _enter(self, node: Any) -> None:
        """Visit the body and defaults of a function, not its annotations and decorators."""
        self._depth += 1
        arguments = getattr(node, "args", None)
        if arguments is not None:
            for default in [*arguments.defaults, *filter(None, arguments.kw_defaults)]:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = _enter

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """A module constant is a bound or a duration: multiply it by ten."""
        value = node.value
        if self._depth == 0 and isinstance(value, ast.Constant) and _is_number(value.value):
            if value.value:
                self._replace(value, f"{value.value * 10!r}", "constant")
        else:
            self.visit(value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass", "statement removed")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Call):
            if not isinstance(node.value, ast.Constant):
                self.generic_visit(node)
            return
        name = self._text(node.value.func).split(".")
        if NOT_WORTH.isdisjoint(name[:1]):
            self._replace(node, "pass", "statement removed")
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass", "statement removed")  # the message is not mutated

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        if not isinstance(node.value, ast.Constant):
            self._replace(node, "return None", "returns None")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if self._text(node.test) != "TYPE_CHECKING":
            self._replace(node.test, f"not ({self._text(node.test)})", "condition inverted")
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._replace(node.test, f"(not ({self._text(node.test)}))", "condition inverted")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            old = _COMPARISON_OF[type(operator)]
            self._between(left, right, old, COMPARISONS[old], "comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, old, new, "and, or")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        old = OPERATOR_OF.get(type(node.op))
        is_text = any(
            isinstance(side, ast.JoinedStr | ast.List | ast.Tuple)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
            for side in (node.left, node.right)
        )
        if old is not None and not is_text:
            self._between(node.left, node.right, old, OPERATORS[old], "operator")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, f"bool({self._text(node.operand)})", "not")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self._replace(node.func, "max" if node.func.id == "min" else "min", "min, max")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value), "constant")
        elif _is_number(node.value):
            self._replace(node, f"{node.value + 1!r}", "constant")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Offsets inside f-strings are not reliable before Python 3.12."""


_COMPARISON_OF: dict[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- Lua ------------------------------------------------------------------------------------------

LUA_TOKEN = re.compile(
    r"--[^\n]*|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|"
    r"(?P<token>~=|==|<=|>=|\.\.|[<>+*/-]|\b(?:and|or|not|true|false)\b|\bmath\.(?:min|max)\b"
    r"|(?<![\w.])\d+(?:\.\d+)?\b)"
)
LUA_TOKENS = {
    "~=": "==", "==": "~=", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+",
    "*": "/", "/": "*", "and": "or", "or": "and", "not": "", "true": "false", "false": "true",
    "math.min": "math.max", "math.max": "math.min",
}  # fmt: skip
LUA_STATEMENT = re.compile(
    r"^ +(?:redis\.call\(.*\)|[a-z_]+\([^()]*(?:\([^()]*\)[^()]*)*\))$", re.M
)
LUA_CONDITION = re.compile(r"(?<!-)\b(?:if|elseif) (.+?) then\b")
LUA_CONSTANT = re.compile(r"^local [A-Z_]+ = ([\d.]+)", re.M)


def lua_sites(file: str, source: bytes) -> Iterator[Mutant]:
    """All mutants of one Lua file. They are found by patterns: a few are not valid Lua."""
    text = source.decode("latin-1")
    constants = {match.start(1): match for match in LUA_CONSTANT.finditer(text)}
    for match in LUA_TOKEN.finditer(text):
        token = match["token"]
        if token is None or token == "..":
            continue
        start, end = match.span("token")
        if start in constants:
            yield Mutant(file, start, end, f"{float(token) * 10:g}", "constant")
        elif token[0].isdigit():
            yield Mutant(file, start, end, f"{float(token) + 1:g}", "constant")
        else:
            yield Mutant(file, start, end, LUA_TOKENS[token], "operator")
    for match in LUA_STATEMENT.finditer(text):
        yield Mutant(file, *match.span(), "", "statement removed")
    for match in LUA_CONDITION.finditer(text):
        yield Mutant(file, *match.span(1), f"not ({match[1]})", "condition inverted")


def lua_function(source: bytes, offset: int) -> str:
    """The name of the local function around an offset; empty outside of all."""
    name, text = "", source.decode("latin-1")
    for match in re.finditer(r"^(?:local function (\w+)|end\b)", text, re.M):
        if match.start() > offset:
            break
        name = match[1] or ""
    return name


# --- drawing --------------------------------------------------------------------------------------


@cache
def all_sites(only: str = "") -> tuple[Mutant, ...]:
    """Every mutant there is, in the order of files and places."""
    found: list[Mutant] = []
    for path in sorted((ROOT / "fairqueue").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if file not in NOT_MUTATED:
            source = path.read_bytes()
            found += PythonSites(file, source).found
    for path in sorted((ROOT / "lua").rglob("*.lua")):
        found += lua_sites(str(path.relative_to(ROOT)), path.read_bytes())
    part, _, function = only.partition("::")
    found = [mutant for mutant in found if part in mutant.file]
    return tuple(m for m in found if not function or function_of(m).endswith(function))


def function_of(mutant: Mutant) -> str:
    """The qualified name of the function that a mutant changes; empty outside of all."""
    source = _source(mutant.file)
    if mutant.file.endswith(".lua"):
        return lua_function(source, mutant.start)
    return function_at(_spans(mutant.file), mutant.line(source))


@cache
def _spans(file: str) -> list[tuple[str, int, int]]:
    return functions(ast.parse(_source(file)))


def still_compiles(mutant: Mutant, source: bytes) -> bool:
    """Whether a mutant of Python is valid; of Lua that is seen when it runs."""
    if mutant.file.endswith(".lua"):
        return True
    with suppress(SyntaxError):
        compile(mutant.apply(source), mutant.file, "exec")
        return True
    return False


def draw(count: int, seed: int, only: str = "") -> list[Mutant]:
    """Draw `count` different mutants uniformly from all places in Python and Lua.

    Each has its own lot, made of the seed, its function and its line: a change elsewhere in the
    code, or another name of the file, does not draw others. So a draw can be repeated after its
    survivors were dealt with.
    """
    lots: dict[bytes, Mutant] = {}
    for mutant in all_sites(only):
        change = mutant.describe(_source(mutant.file)).partition("\n")[2]
        nth = 0
        while (lot := _lot(seed, function_of(mutant), mutant.what, change, nth)) in lots:
            nth += 1
        lots[lot] = mutant
    drawn: list[Mutant] = []
    for lot in sorted(lots):
        if len(drawn) == count:
            break
        if still_compiles(lots[lot], _source(lots[lot].file)):
            drawn.append(lots[lot])
    return drawn


def _lot(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


@cache
def _source(file: str) -> bytes:
    return (ROOT / file).read_bytes()


# --- which tests ----------------------------------------------------------------------------------


def record_map() -> None:
    """Run the suite once and record which tests run which functions and scripts."""
    with tempfile.TemporaryDirectory(prefix="mutation-map-") as name:
        ignored = [f"--ignore-glob={pattern}" for pattern in NOT_RECORDED]
        options = ["-q", "-p", "mutation_map", *ignored, "--timeout=600"]
        environment = {"MUTATION_MAP": name, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
        path = f"{ROOT}:{ROOT / 'scripts'}"
        result = run(
            ROOT,
            "-m",
            "pytest",
            *options,
            timeout=SUITE_TIMEOUT_S,
            PYTHONPATH=path,
            **environment,
        )
        print(result.stdout.strip().splitlines()[-1] if result.stdout else result.stderr)
        MAP.parent.mkdir(exist_ok=True)
        MAP.write_text(json.dumps(_merged(Path(name).glob("*.json"))), encoding="utf-8")


def _merged(files: Iterable[Path]) -> dict[str, Any]:
    by_function: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    scripts: dict[str, set[str]] = defaultdict(set)
    seconds: dict[str, float] = {}
    for path in files:
        document = json.loads(path.read_text(encoding="utf-8"))
        for file, entries in document["functions"].items():
            for name, tests in entries.items():
                by_function[file][name].update(tests)
        for name, tests in document["scripts"].items():
            scripts[name].update(tests)
        seconds.update(document["seconds"])
    return {
        "functions": {f: {n: sorted(t) for n, t in e.items()} for f, e in by_function.items()},
        "scripts": {name: sorted(tests) for name, tests in scripts.items()},
        "seconds": seconds,
    }


class Chooser:
    """Selects the tests that may catch a mutant, the nearest and quickest first."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._functions: dict[str, dict[str, list[str]]] = document["functions"]
        self._scripts: dict[str, list[str]] = document["scripts"]
        self._seconds: dict[str, float] = document["seconds"]

    def tests_of(self, mutant: Mutant) -> list[str]:
        tests = self._covering(mutant)
        words = set(re.findall(r"[a-z]+", mutant.file)) - {"fairqueue", "lua", "lib", "py"}
        words.add(mutant.file.rpartition("/")[2].partition(".")[0])

        def nearness(test: str) -> tuple[bool, int, float]:
            file, _, name = test.partition("::")
            near = sum(word in file or word.rstrip("s") in file for word in words)
            # A whole file is there for a function that runs in other processes only: it goes first.
            return name != "", -near, self._seconds.get(test, 1.0)

        return sorted(tests, key=nearness)

    def longest(self, tests: list[str]) -> float:
        """Seconds after which these tests are taken to hang, also on a busy machine."""
        usual = sum(self._seconds.get(test, 1.0 if "::" in test else FILE_S) for test in tests)
        return 2 * TEST_TIMEOUT_S + 10 * usual

    def _covering(self, mutant: Mutant) -> set[str]:
        if mutant.file.endswith(".lua"):
            return self._running_script(mutant)
        entries = self._functions.get(mutant.file, {})
        recorded = set(entries.get(function_of(mutant), ()))
        found = recorded or {test for tests in entries.values() for test in tests}
        # Not recorded: new functions, and code that runs at import or only in child processes.
        # Fall back to all tests of the module, and to the files that are named after it.
        if len(recorded) < FEW:
            stem = Path(mutant.file).stem.rstrip("s")
            named = (ROOT / "tests").rglob(f"test_*{stem}*.py")
            found |= {str(path.relative_to(ROOT)) for path in named}
        return found

    def _running_script(self, mutant: Mutant) -> set[str]:
        stem = Path(mutant.file).stem
        if "/lib/" not in mutant.file:
            return set(self._scripts.get(stem, ()))
        function = function_of(mutant)
        if function:
            named = f"local function {function}("
            users = [name for name in script_names() if named in _text_of(name)]
        else:
            users = [n for n in script_names() if stem in {part.name for part in parts_of(n)}]
        return {test for name in users for test in self._scripts.get(name, ())}


@cache
def _text_of(script: str) -> str:
    return load_script(script).text


# --- trying ---------------------------------------------------------------------------------------


def copy_all(folder: Path) -> None:
    """Copy all tracked files, and the files that the pages load."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    static = "fairqueue/web/dashboard/static"
    shutil.copytree(ROOT / static, folder / static, dirs_exist_ok=True)


@dataclass(frozen=True)
class Verdict:
    """The outcome for a mutant: caught (by which test), survived (how many tests) or not Lua."""

    word: str
    by: str = ""
    tried: int = 0


class Trial:
    """Runs the tests of mutants, each mutant in its own copy of the tree."""

    def __init__(self, pristine: Path, chooser: Chooser) -> None:
        self._pristine = pristine
        self._chooser = chooser
        self._unusable: set[str] = set()  # tests that fail without a mutant, or no longer exist

    def __call__(self, mutant: Mutant) -> Verdict:
        tests = self._chooser.tests_of(mutant)
        with tempfile.TemporaryDirectory(prefix="mutant-") as name:
            folder = Path(name) / "tree"
            shutil.copytree(self._pristine, folder)
            file = folder / mutant.file
            file.write_bytes(mutant.apply(file.read_bytes()))
            verdict = self._try(folder, tests)
            if verdict.word == "survived" and mutant.file.endswith(".py"):
                further = self._try(folder, IN_PROCESSES)
                verdict = replace(further, tried=verdict.tried + further.tried)
            return verdict

    def _try(self, folder: Path, tests: list[str]) -> Verdict:
        tried, ends = 0, time.monotonic() + BUDGET_S
        while tests and time.monotonic() < ends:
            chunk = [test for test in tests[:CHUNK] if test not in self._unusable]
            failed, output = self._run(folder, chunk)
            if NOT_LUA.search(output):
                return Verdict("not Lua")
            if failed is None:
                tried += len(chunk)
                tests = tests[CHUNK:]
            elif failed == "" or self._run(self._pristine, [failed])[0] is None:
                return Verdict("caught", failed or "no end within the time-out", tried)
            else:
                self._unusable.add(failed)
        return Verdict("survived", tried=tried)

    def _run(self, folder: Path, tests: list[str]) -> tuple[str | None, str]:
        """The first test that fails; None if all pass, empty if pytest itself failed or hung."""
        if not tests:
            return None, ""
        listing = folder.parent / f"tests-of-{folder.name}-{id(tests)}.txt"
        listing.write_text("\n".join(tests), encoding="utf-8")
        try:
            result = run_tests(
                folder,
                [f"@{listing}", f"--timeout={TEST_TIMEOUT_S}"],
                traceback="short",
                timeout=self._chooser.longest(tests),
            )
        except subprocess.TimeoutExpired:
            return "", ""
        if result.returncode in (0, 5):
            return None, result.stdout
        output = result.stdout + result.stderr
        failed = re.search(r"^(?:FAILED|ERROR) (\S*?::.*?)(?: - |$)", output, re.M)
        if failed is None:
            missing = set(
                re.findall(rf"not found: (?:{re.escape(str(folder))}/)?(.+)$", output, re.M)
            )
            rest = [test for test in tests if test not in missing]
            if len(rest) < len(tests):  # some were renamed since the map was recorded
                self._unusable |= missing
                return self._run(folder, rest)
        return (failed[1] if failed else ""), output


def try_at_random(arguments: list[str]) -> int:
    """Run `mutants.py --random`. Return the exit status: 1 if 5 % or more survived."""
    parser = argparse.ArgumentParser(prog="mutants.py --random")
    parser.add_argument("--random", type=int, required=True, help="how many mutants")
    parser.add_argument("--seed", type=int, default=None, help="repeats a run")
    parser.add_argument("--only", default="", help="only files with this in their path")
    parser.add_argument("--map", action="store_true", help="record again which tests run what")
    options = parser.parse_args(arguments)
    if options.map or not MAP.exists():
        print("recording which tests run what: one run of the suite", flush=True)
        record_map()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    mutants = draw(options.random, seed, options.only)
    print(f"{len(mutants)} mutants of {len(all_sites(options.only))}, seed {seed}", flush=True)
    chooser = Chooser(json.loads(MAP.read_text(encoding="utf-8")))
    words: dict[str, int] = defaultdict(int)
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as name,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        pristine = Path(name) / "pristine"
        copy_all(pristine)
        trial = Trial(pristine, chooser)
        for mutant, verdict in zip(mutants, pool.map(trial, mutants), strict=True):
            words[verdict.word] += 1
            described = mutant.describe(_source(mutant.file))
            if verdict.word == "survived":
                print(f"SURVIVED {verdict.tried} tests: {described}", flush=True)
            else:
                place = described.partition("\n")[0]
                print(f"{verdict.word:8} {place}  {verdict.by}", flush=True)
    judged = words["caught"] + words["survived"]
    print(f"mutants: {words['caught']} passed, {words['survived']} failed")
    return int(words["survived"] * 20 >= max(judged, 1))


if __name__ == "__main__":
    sys.exit(try_at_random(sys.argv[1:]))
