"""Keep secrets out of what people are shown: values whose names look like secrets."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

from fairqueue.errors import is_plain
from fairqueue.validation import is_secret

MASK = "***"

_NAMES = ("schedule_id", "user_id", "name", "tenant")  # fields of schedules that are plain text
# No pattern goes over a part of a text again that it has gone over from an earlier beginning: none
# takes long, whatever the text is made of. A user and password end at the last "@" before a slash;
# if they hold slashes, which they should not, there is a colon that is not that of a port.
_IN_URL = re.compile(r"//(?:[^/\s]*@|[^/\s:@?#]*:(?!\d{1,5}[/?#])(?:(?!//)\S)*@)")
# In a URL (`?name=`), or in a text of such pairs (`Server=h; name=`).
_NAME = re.compile(
    r"[?&#](?P<option>[^?&=#;\s]{1,100})=|(?:^|;)(?P<pair>[^?&=#;\n]{1,100})=", re.MULTILINE
)
_OPTION_VALUE = re.compile(r"[^&#\s]+")
_PAIR_VALUE = re.compile(r"""(?=[^;\n])[ \t]*(?:"[^"\n]*"|'[^'\n]*')?[^;\n]*""")


def mask(value: Any) -> Any:
    """The same JSON value with secrets replaced by `***`; those in URLs too.

    So is what JSON cannot hold, unless it is a time: nobody can tell what it would say.
    """
    return _mask(value, {})


def _mask(value: Any, seen: dict[int, Any]) -> Any:
    """The same; each list and dict once, since what was not checked may be in itself, or deep."""
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
            found[MASK] = MASK  # as a part of a name that is none may be a secret
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
    """The parts of a text; `***` in place of the values whose names are secret."""
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
    """An old or new value of a field that was changed, as it may be shown.

    Of a long payload only the beginning of its text is kept, in which nobody can tell secrets.
    """
    return MASK if _hides(field, value) else mask(value)


def mask_details(details: Mapping[str, Any]) -> dict[str, Any]:
    """What somebody gave for a change, before it was checked, as it may be shown.

    Nobody can tell secrets in a payload that is no object, such as the text of one, or in one that
    was given as a name.
    """
    shown: dict[str, Any] = mask(
        {name: MASK if _hides(name, value) else value for name, value in details.items()}
    )
    if isinstance(details.get("changes"), dict):
        shown["changes"] = mask_details(details["changes"])
    return shown


def _hides(field: str, value: Any) -> bool:
    """Whether a field has what does not belong there, which may be a payload in another form."""
    if field in ("payload", "metadata"):
        return value is not None and not isinstance(value, dict)
    return field in _NAMES and not isinstance(value, str) and not is_plain(value)


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
