"""The examples of the guides: each is a program that runs, and prints what its comments say."""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
# The tests of alerts, of HTTP tasks and of frequencies run those of theirs.
PAGES = ["cheatsheet.md", "workers.md", "history.md", "recurrence.md", "schedules.md", "tenants.md"]
PAGES += ["dashboard.md", "flow.md", "fairness.md"]

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MODULE = re.compile(r"# (\w+\.py)\n")  # the first line of an example that others import
PROMISE = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)


def examples(page: str) -> list[str]:
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def programs() -> Iterator[object]:
    """The examples that are no modules, each with the name of its page."""
    for page in PAGES:
        for number, example in enumerate(examples(page), start=1):
            if not MODULE.match(example):
                yield pytest.param(page, example, id=f"{page} {number}")


def comments(example: str) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(example).readline)
    return "\n".join(token.string for token in tokens if token.type == tokenize.COMMENT)


@pytest.mark.processes
@pytest.mark.parametrize(("page", "example"), list(programs()))
def test_an_example_prints_what_its_comments_say(tmp_path: Path, page: str, example: str) -> None:
    for other in examples(page):
        if module := MODULE.match(other):
            (tmp_path / module[1]).write_text(other, encoding="utf-8")
    program = tmp_path / "example.py"
    program.write_text(example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    said = comments(example)
    for line in printed:
        assert line in said, f"{line!r} is printed, and no comment from here on says so: {said}"
        said = said.partition(line)[2]
    for promise in PROMISE.findall(example):
        assert any(line in promise for line in printed), f"{promise!r} is not printed: {printed}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_examples(page: str) -> None:
    assert examples(page)
