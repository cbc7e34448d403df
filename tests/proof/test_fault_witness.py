"""What journals of a storm say together about who acted without the right to."""

import json
from pathlib import Path

import pytest

from faults import report
from faults.checker import Told


def told_by(folder: Path, **journals: list[list[object]]) -> Told:
    for actor, lines in journals.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{actor}.journal").write_text(text)
    return Told.read(folder)


def test_a_term_that_begins_when_the_one_before_has_ended_is_all_right(tmp_path: Path) -> None:
    told = told_by(tmp_path, a=[["led", 1, 100, 200]], b=[["led", 2, 200, 300]])
    assert told.two_leaders() == set()


def test_a_term_that_begins_before_the_one_before_has_ended_is_found(tmp_path: Path) -> None:
    told = told_by(tmp_path, a=[["led", 1, 100, 200]], b=[["led", 2, 199, 299]])
    assert told.two_leaders() == {"term 2 began before the end of 1"}


def test_a_leader_who_resigns_makes_room_for_the_next(tmp_path: Path) -> None:
    told = told_by(tmp_path, a=[["led", 1, 100, 200], ["resigning"]], b=[["led", 2, 150, 250]])
    assert told.two_leaders() == set()


def test_a_term_that_two_were_told_of_is_found(tmp_path: Path) -> None:
    told = told_by(tmp_path, a=[["led", 1, 100, 200]], b=[["led", 1, 120, 220]])
    assert told.two_leaders() == {"term 1 of a and b"}


def test_an_act_that_was_sent_after_the_end_of_its_term_is_found(tmp_path: Path) -> None:
    told = told_by(tmp_path, a=[["acted", "fire", 200, 200], ["acted", "resign", 201, 200]])
    assert told.late == {"resign by a, 1 ms"}


@pytest.mark.parametrize(("sent_ms", "found"), [(199, set()), (201, {"retry of t"})])
def test_acting_on_anothers_task_is_found(tmp_path: Path, sent_ms: int, found: set[str]) -> None:
    told = told_by(
        tmp_path,
        early=[["held", 100, [["t", 1]]], ["kept", "retry", sent_ms, [["t", 1]]]],
        late=[["held", 200, [["t", 2]]], ["kept", "finish", 300, [["t", 2]]]],
    )
    assert told.without_lease(tmp_path) == found


def test_a_table_is_written_to_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- mutations: begin -->\nold\n<!-- mutations: end -->\nz\n")
    monkeypatch.setattr(report, "PAGE", page)
    report.fill("mutations", "new")
    assert page.read_text() == "a\n<!-- mutations: begin -->\nnew\n<!-- mutations: end -->\nz\n"


def test_a_page_without_a_table_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    with pytest.raises(SystemExit, match="has no place for the mutations"):
        report.fill("mutations", "new")
