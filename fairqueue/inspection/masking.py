"""Keep secrets out of what people are shown: values whose names look like secrets."""

import re
from functools import lru_cache
from typing import Any

MASK = "***"

# Parts of names; `key` alone only at the end, so that "keyboard" and "monkey" are shown.
_SECRET = re.compile(
    r"pass(word|wd|phrase)?$|passw|secret|token|credential|authorization|cookie|private|signature"
    r"|(^|[_\-. ]|api|access)key$|bearer|session_?id",
    re.IGNORECASE,
)
_CAMEL_KEY = re.compile(r"[a-z]Key$")
# Begins at what is rare and ends at a slash, so that no text takes long, whatever it is made of.
_IN_URL = re.compile(r"://[^/\s]*@")


@lru_cache(maxsize=10_000)
def is_secret(name: str) -> bool:
    """Whether a value of this name is not to be shown."""
    return bool(_SECRET.search(name) or _CAMEL_KEY.search(name))


def mask(value: Any) -> Any:
    """The same JSON value with secrets replaced by `***`; passwords in URLs too."""
    if isinstance(value, dict):
        return {
            name: MASK if is_secret(str(name)) and inner not in (None, "", {}, []) else mask(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask(inner) for inner in value]
    if isinstance(value, str) and "://" in value:
        return _IN_URL.sub(f"://{MASK}@", value)
    return value


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
