"""Reset objects in forked children, where locks may be held by threads that no longer exist."""

import os
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_resets: WeakKeyDictionary[Any, Callable[[Any], None]] = WeakKeyDictionary()


def reset_in_child(owner: T, reset: Callable[[T], None]) -> None:
    """Call `reset(owner)` in every forked child, for as long as `owner` lives."""
    _resets[owner] = reset


def _reset_all() -> None:
    for owner, reset in list(_resets.items()):
        reset(owner)


os.register_at_fork(after_in_child=_reset_all)
