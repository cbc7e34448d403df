import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairqueue.link.keys import KEY_TYPES
from fairqueue.link.scripts import parts_of, script_names

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)


def rows() -> dict[str, tuple[str, ...]]:
    text = (ROOT / "docs" / "data-model.md").read_text()
    return {match[1]: match.groups()[1:] for match in ROW.finditer(text)}


def test_the_data_model_lists_each_key_with_its_type() -> None:
    assert {key: row[0] for key, row in rows().items()} == KEY_TYPES


def test_the_data_model_names_owners_that_exist_and_declare_the_key() -> None:
    for key, (_, _, owner, lifetime) in rows().items():
        assert lifetime.strip()
        for name in re.findall(r"\b[a-z]+(?:_[a-z]+)*\b", owner):
            if name in script_names():
                declared = {k for part in parts_of(name) for k in part.keys}
                assert key in declared, f"{name} is said to write {key} but does not declare it"


def test_each_key_is_used_by_a_script() -> None:
    used = {key for name in script_names() for part in parts_of(name) for key in part.keys}
    assert used == set(KEY_TYPES)


# --- the map --------------------------------------------------------------------------------------

MAP = (ROOT / "docs" / "architecture.md").read_text()


def test_the_map_has_every_room_and_every_module_in_it() -> None:
    rows = dict(re.findall(r"^\| (`[^|]+`) \| (.+) \|$", MAP[: MAP.index("## Operations")], re.M))
    told = {name.rstrip("/") for rooms in rows for name in re.findall(r"`([\w/]+)`", rooms)}
    package = ROOT / "fairqueue"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert told == rooms | {path.stem for path in package.glob("*.py")} - {"__init__"}
    for room in rooms - {"cli", "demo", "inspection", "web"}:
        named = next(what for names, what in rows.items() if f"`{room}/`" in names)
        modules = {path.stem for path in (package / room).glob("*.py")} - {"__init__", "extra"}
        assert modules <= set(re.findall(r"`(\w+)`", named)), room


NAMED = MAP + (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`([\w/]+\.(?:py|lua|html))`", NAMED))))
def test_each_file_on_the_map_is_there(file: str) -> None:
    folders = [ROOT, ROOT / "fairqueue", ROOT / "lua"]
    assert any((folder / file).is_file() for folder in folders)


@pytest.mark.parametrize(("name", "file"), re.findall(r"`([\w.]+)` in\s+`([\w/]+\.py)`", MAP))
def test_each_function_on_the_map_is_in_its_file(name: str, file: str) -> None:
    last = name.rpartition(".")[2]
    text = (ROOT / "fairqueue" / file).read_text()
    assert re.search(rf"^\s*(?:def|class) {last}\b", text, re.MULTILINE)


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_first_example_of_the_readme_is_short() -> None:
    assert len([line for line in EXAMPLES[0].splitlines() if line.strip()]) <= 12


def test_the_example_of_the_readme_works(tmp_path: Path) -> None:
    (example,) = EXAMPLES
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example + "\nqueue.close()\n"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "building report 8\n"


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings]
            assert anchor in slugs, f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_makefile_has_the_targets_that_a_page_names(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_each_row_of_the_bug_ledger_names_a_test_that_exists() -> None:
    ledger = (ROOT / "docs" / "reliability.md").read_text().partition("## The bug ledger")[2]
    bugs = [row for row in ledger.splitlines() if row.startswith("|")][2:]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in bugs:
        (name,) = re.findall(r"`(test_\w+)` \|$", row)
        assert f"def {name}(" in tests, row
