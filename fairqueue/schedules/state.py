"""The state of a schedule: its runs, counts and pauses, as scripts write it."""

import json
import re
from collections.abc import Sequence
from typing import Any

from fairqueue.clock import LATEST_MS
from fairqueue.models import UNREADABLE

_TITLE = re.compile(rb'(?<=[{,])"title":("(?:[^"\\]|\\.)*")')
# The types of its fields; float means a count or a time in ms.
_TYPES: dict[str, type] = {
    "active": bool,
    **dict.fromkeys(("user", "tenant", "title", "reason", "note", "by"), str),
    **dict.fromkeys(("since", "paused", "until", "last_run"), float),
    **dict.fromkeys(("runs", "missed", "refused", "skipped", "failures"), float),
}


def read_state(text: bytes | None) -> dict[str, Any]:
    """Read a state without malformed values, as lua/lib/states.lua does.

    The next fire repairs them; until then the rest can be shown.
    """
    try:
        state = json.loads(text or b"{}")
    except UNREADABLE:
        return {}
    if not isinstance(state, dict):
        return {}
    return {name: value for name, value in state.items() if _is_valid(name, value)}


def number_in(state: dict[str, Any], name: str) -> int | None:
    """Return a count or a time in ms; None if the state has none."""
    value = state.get(name)
    return int(value) if isinstance(value, int | float) else None


def are_active(texts: Sequence[bytes | None]) -> list[bool]:
    """Return for each state whether it is active, as `read_state` would, without reading all."""
    whole = [text or b"{}" for text in texts]
    try:
        states = json.loads(b"[" + b",".join(whole) + b"]")  # a fourth of the time of one by one
    except UNREADABLE:
        states = []
    if len(states) != len(whole):  # one of them is malformed
        states = [read_state(text) for text in whole]
    return [isinstance(state, dict) and state.get("active") is True for state in states]


def title_in(state: bytes) -> str:
    """Find the title in the text of a state: to parse all of it takes ten times as long.

    In JSON a quote inside a value is escaped, so nothing else can be mistaken for it.
    """
    found = _TITLE.search(state)
    if found is None:
        return ""
    try:
        return str(json.loads(found[1])) if b"\\" in found[1] else found[1][1:-1].decode()
    except ValueError:
        return ""  # malformed


def _is_valid(name: str, value: Any) -> bool:
    kind = _TYPES.get(name, type(value))
    if kind is not float:
        return isinstance(value, kind)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= LATEST_MS
