"""Random mutants: every one is a small change that still compiles, and a seed repeats the draw."""

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    """scripts/random_mutants.py, which is not part of a package."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.find_spec("random_mutants")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPTS))


PYTHON = '''
LIMIT = 20

def pick(items, least: int = 1):
    """Doc."""
    if not items or len(items) < least:
        raise ValueError("none")
    total = 0
    for item in items:
        total += item
    logger.info("picked")
    return max(total, LIMIT) + 1
'''


def changes(mutants: ModuleType) -> list[str]:
    source = PYTHON.encode()
    found = mutants.PythonSites("x.py", source).found
    return [mutant.describe(source).partition("\n    + ")[2] for mutant in found]


def test_a_module_has_a_mutant_for_each_kind_of_change(mutants: ModuleType) -> None:
    assert changes(mutants) == [
        "LIMIT = 200",
        "def pick(items, least: int = 2):",
        "if not (not items or len(items) < least):",
        "if not items and len(items) < least:",
        "if bool(items) or len(items) < least:",
        "if not items or len(items) <= least:",
        "pass",
        "total = 1",
        "pass",
        "return None",
        "return max(total, LIMIT) - 1",
        "return min(total, LIMIT) + 1",
        "return max(total, LIMIT) + 2",
    ]


LUA = b"""-- keep 1 and not 2
local KEPT = 100

local function trim(key)
  local over = redis.call('ZCARD', key) - KEPT
  if over > 0 and key ~= 'a or b' then
    redis.call('ZREM', key, over)
  end
end
"""


def test_lua_is_changed_outside_of_comments_and_texts(mutants: ModuleType) -> None:
    found = list(mutants.lua_sites("x.lua", LUA))
    assert [mutant.describe(LUA).partition("\n    + ")[2] for mutant in found] == [
        "local KEPT = 1000",
        "local over = redis.call('ZCARD', key) + KEPT",
        "if over >= 0 and key ~= 'a or b' then",
        "if over > 1 and key ~= 'a or b' then",
        "if over > 0 or key ~= 'a or b' then",
        "if over > 0 and key == 'a or b' then",
        "",
        "if not (over > 0 and key ~= 'a or b') then",
    ]
    assert {mutants.lua_function(LUA, mutant.start) for mutant in found[1:]} == {"trim"}


def test_a_seed_repeats_the_draw_and_all_of_it_compiles(mutants: ModuleType) -> None:
    drawn = mutants.draw(200, seed=7)
    assert drawn == mutants.draw(200, seed=7)
    assert drawn != mutants.draw(200, seed=8)
    assert len(set(drawn)) == 200
    kinds = {Path(mutant.file).suffix for mutant in drawn}
    assert kinds == {".py", ".lua"}
    for mutant in random.Random(1).sample(drawn, 50):
        source = (mutants.ROOT / mutant.file).read_bytes()
        assert mutant.apply(source) != source
        assert mutants.still_compiles(mutant, source)


def test_a_change_elsewhere_does_not_draw_other_mutants(
    mutants: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = mutants.draw(200, seed=7)
    changed = drawn[0].file
    rest = [site for site in mutants.all_sites() if site.file != changed]
    monkeypatch.setattr(mutants, "all_sites", lambda only: rest)
    kept = [mutant for mutant in drawn if mutant.file != changed]
    assert len(kept) < 200
    assert mutants.draw(len(kept), seed=7) == kept


def test_the_tests_of_the_changed_function_are_chosen_nearest_first(mutants: ModuleType) -> None:
    chooser = mutants.Chooser(
        {
            "functions": {
                "fairqueue/clock.py": {"to_ms": ["tests/test_b.py::b", "tests/test_clock.py::a"]}
            },
            "scripts": {"claim": ["tests/test_queue.py::c"], "push": ["tests/test_queue.py::p"]},
            "seconds": {"tests/test_b.py::b": 0.1, "tests/test_clock.py::a": 5.0},
        }
    )
    source = (mutants.ROOT / "fairqueue/clock.py").read_bytes()
    start = source.index(b"def to_ms(")
    mutant = mutants.Mutant("fairqueue/clock.py", start, start + 1, "x", "test")
    assert chooser.tests_of(mutant) == ["tests/test_clock.py::a", "tests/test_b.py::b"]
    lua = (mutants.ROOT / "lua/lib/upkeep.lua").read_bytes()
    promote = mutants.Mutant(
        "lua/lib/upkeep.lua", lua.index(b"local function promote") + 30, 0, "", ""
    )
    assert chooser.tests_of(promote) == ["tests/test_queue.py::c"]


def test_every_function_of_a_recorded_module_notes_its_call(mutants: ModuleType) -> None:
    source = b'''
from __future__ import annotations

def outer(n: int) -> int:
    """Doc."""
    def inner(): return n
    return inner()

class Box:
    async def empty(self): pass
    def never(self): pass
'''
    noted: list[tuple[str, str]] = []
    names = {"_note_call": noted.append}
    tree = sys.modules["mutation_map"].with_notes(source, "x.py")
    exec(compile(tree, "x.py", "exec", dont_inherit=True), names)
    code: Any = names
    assert code["outer"](3) == 3
    assert code["outer"].__doc__ == "Doc."
    with pytest.raises(StopIteration):
        code["Box"]().empty().send(None)
    assert noted == [("x.py", "outer"), ("x.py", "outer.inner"), ("x.py", "Box.empty")]


def test_the_text_of_each_listed_mutation_is_in_its_file_once(mutants: ModuleType) -> None:
    listed = sys.modules["mutants"].MUTATIONS
    texts = {each.file: (mutants.ROOT / each.file).read_text() for each in listed}
    wrong = [each.name for each in listed if texts[each.file].count(each.old) != 1]
    assert wrong == []
