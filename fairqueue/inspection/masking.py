"""Mask secrets in what is shown: values whose names look like secrets."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from fairqueue.errors import is_plain
from fairqueue.validation import is_secret

MASK = "***"

_NAMES = ("schedule_id", "user_id", "name", "tenant")  # fields of schedules that are plain text
# The patterns take linear time on any text. User and password end at the last "@" before a slash;
# if they contain slashes, which they should not, there is a colon that is not that of a port.
_IN_URL = re.compile(r"//(?:[^/\s]*@|[^/\s:@?#]*:(?!\d{1,5}[/?#])(?:(?!//)\S)*@)")
# In a URL (`?name=`), or in a text of pairs (`Server=h; name=`).
_NAME = re.compile(
    r"[?&#](?P<option>[^?&=#;\s]{1,100})=|(?:^|;)(?P<pair>[^?&=#;\n]{1,100})=", re.MULTILINE
)
_OPTION_VALUE = re.compile(r"[^&#\s]+")
_PAIR_VALUE = re.compile(r"""(?=[^;\n])[ \t]*(?:"[^"\n]*"|'[^'\n]*')?[^;\n]*""")


def mask(value: Any) -> Any:
    """A JSON value with secrets replaced by `***`, also those in URLs.

    Values that are not JSON are replaced too, except times.
    """
    return _mask(value, {})


def _mask(value: Any, seen: dict[int, Any]) -> Any:
    """Mask each list and dict once: a value that was not checked may be recursive, or deep."""
    if isinstance(value, str):
        return _mask_text(value)
    if not isinstance(value, dict | list | tuple):
        return value if is_plain(value) else MASK
    if id(value) not in seen:
        seen[id(value)] = MASK
        with suppress(RecursionError):
            seen[id(value)] = _mask_inside(value, seen)
    return seen[id(value)]


def _mask_inside(value: Any, seen: dict[int, Any]) -> Any:
    if not isinstance(value, dict):
        return [_mask(inner, seen) for inner in value]
    found = {}
    for name, inner in value.items():
        if not isinstance(name, str) and not is_plain(name):
            found[MASK] = MASK  # parts of a name that is not plain may be secret
        elif isinstance(name, str) and is_secret(name) and not _is_empty(inner):
            found[name] = MASK
        else:
            found[name] = _mask(inner, seen)
    return found


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | dict | list) and not value)


def _mask_text(text: str) -> str:
    if "//" in text:
        text = _IN_URL.sub(f"//{MASK}@", text)
    return "".join(_without_values(text)) if "=" in text else text


def _without_values(text: str) -> Iterator[str]:
    """The parts of a text, with `***` for values with secret names."""
    done = 0
    for name in _NAME.finditer(text):
        if name.start() < done or not is_secret(unquote(name["option"] or name["pair"]).strip()):
            continue
        value = (_OPTION_VALUE if name["option"] else _PAIR_VALUE).match(text, name.end())
        if value is not None:
            yield text[done : name.end()] + MASK
            done = value.end()
    yield text[done:]


def mask_side(field: str, value: Any) -> Any:
    """Mask the old or new value of a changed field.

    Only the beginning of the text of a long payload is stored, so secrets in it cannot be found.
    """
    return MASK if _hides(field, value) else mask(value)


def mask_details(details: Mapping[str, Any]) -> dict[str, Any]:
    """Mask the arguments of a change, before they are validated.

    A payload that is not an object, such as its text, is hidden as a whole, and so is an object
    that was given as a name.
    """
    shown: dict[str, Any] = mask(
        {name: MASK if _hides(name, value) else value for name, value in details.items()}
    )
    if isinstance(details.get("changes"), dict):
        shown["changes"] = mask_details(details["changes"])
    return shown


def _hides(field: str, value: Any) -> bool:
    """Whether a field has a value of a wrong type, which may be a payload in another form."""
    if field in ("payload", "metadata"):
        return value is not None and not isinstance(value, dict)
    return field in _NAMES and not isinstance(value, str) and not is_plain(value)


def unmask(new: Any, stored: Any) -> Any:
    """Replace each `***` in a new value by the stored value at the same place.

    Lists are compared by position, so an edit that moves masked values must spell them out.
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
