"""Old names of modules still work, with a warning."""

import importlib
import sys

import pytest

from fairqueue.aliases import MOVED


@pytest.mark.parametrize("name", MOVED)
def test_an_old_name_is_the_module_of_today(name: str) -> None:
    sys.modules.pop(f"fairqueue.{name}", None)
    warning = f"fairqueue.{name} has moved to fairqueue.{MOVED[name]}"
    with pytest.warns(DeprecationWarning, match=warning):
        old = importlib.import_module(f"fairqueue.{name}")
    assert old is importlib.import_module(f"fairqueue.{MOVED[name]}")
    assert old.__name__ == f"fairqueue.{MOVED[name]}"


def test_other_names_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fairqueue.nothing")
