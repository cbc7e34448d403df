"""Old names of modules still work, with a warning."""

import importlib
import sys

import pytest

from fairqueue.aliases import MOVED


@pytest.mark.parametrize("name", MOVED)
def test_an_old_name_is_the_module_of_today(name: str) -> None:
    sys.modules.pop(f"fairqueue.{name}", None)
    with pytest.warns(DeprecationWarning, match=f"fairqueue.{name} is now fairqueue.{MOVED[name]}"):
        old = importlib.import_module(f"fairqueue.{name}")
    assert old is importlib.import_module(f"fairqueue.{MOVED[name]}")
    assert old.__name__ == f"fairqueue.{MOVED[name]}"


def test_other_names_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("fairqueue.nothing")
