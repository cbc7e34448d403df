"""Keep secrets out of what people are shown: values whose names look like secrets."""

import re
from contextlib import suppress
from typing import Any

from fairqueue.validation import is_secret

MASK = "***"

# Begins at what is rare and ends at a slash, so that no text takes long, whatever it is made of.
_IN_URL = re.compile(r"://[^/\s]*@")
_IN_QUERY = re.compile(r"([?&])([^?&=#\s]{1,100})=[^&#\s]+")


def mask(value: Any) -> Any:
    """The same JSON value with secrets replaced by `***`; those in URLs too."""
    return _mask(value, {})


def _mask(value: Any, seen: dict[int, Any]) -> Any:
    """The same; each list and dict once, since what was not checked may be in itself, or deep."""
    if isinstance(value, str):
        return _mask_text(value) if "://" in value else value
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) not in seen:
        seen[id(value)] = MASK
        with suppress(RecursionError):
            seen[id(value)] = _mask_inside(value, seen)
    return seen[id(value)]


def _mask_inside(value: Any, seen: dict[int, Any]) -> Any:
    if not isinstance(value, dict):
        return [_mask(inner, seen) for inner in value]
    return {
        name: MASK if is_secret(str(name)) and not _is_empty(inner) else _mask(inner, seen)
        for name, inner in value.items()
    }


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | dict | list) and not value)


def _mask_text(text: str) -> str:
    return _IN_QUERY.sub(_mask_parameter, _IN_URL.sub(f"://{MASK}@", text))


def _mask_parameter(match: re.Match[str]) -> str:
    return f"{match[1]}{match[2]}={MASK}" if is_secret(match[2]) else match[0]


def mask_side(field: str, value: Any) -> Any:
    """An old or new value of a field that was changed, as it may be shown.

    Of a long payload only the beginning of its text is kept, in which nobody can tell secrets.
    """
    hides = field in ("payload", "metadata") and isinstance(value, str)
    return MASK if hides else mask(value)


def unmask(new: Any, stored: Any) -> Any:
    """The new value, where it says `***` with what is stored there: what was not shown is kept.

    Lists are compared by position, so an edit that moves masked values in a list must say them.
    """
    if isinstance(new, str) and MASK in new and mask(stored) == new:
        return stored
    if isinstance(new, dict) and isinstance(stored, dict):
        return {
            name: stored[name]
            if inner == MASK and name in stored and is_secret(str(name))
            else unmask(inner, stored.get(name))
            for name, inner in new.items()
        }
    if isinstance(new, list) and isinstance(stored, list):
        rest = [None] * max(0, len(new) - len(stored))
        return [unmask(a, b) for a, b in zip(new, [*stored, *rest], strict=False)]
    return new
