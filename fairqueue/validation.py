"""Check what users pass in, before anything is stored: errors say what is wrong and what is right.

Errors come into logs and the audit log, which others read. So they show a value only if it is meant
to be read; of one that may hold secrets, such as a payload, they tell the path and the type.
"""

import json
import math
import re
from collections.abc import Iterable
from datetime import timedelta
from enum import IntEnum
from functools import lru_cache
from typing import Any

from fairqueue.errors import (
    InvalidInput,
    InvalidPayload,
    InvalidTask,
    is_plain,
    kind_of,
    shown,
    told,
)

MAX_NAME_LENGTH = 200  # characters of an id, a user or a task name: they are parts of index members
MAX_PAYLOAD_BYTES = 256 * 1024
MAX_PAYLOAD_DEPTH = 32
MAX_RESULT_BYTES = 16 * 1024
MAX_NOTE_LENGTH = 1000  # characters
MAX_ERROR_LENGTH = 2000  # characters of an error that are kept

# Control characters separate the parts of index members; lone surrogates are no UTF-8.
_NAME = re.compile(rf"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{MAX_NAME_LENGTH}}}")
_TEXT = re.compile(r"(?:[^\x00-\x1f\x7f-\x9f\ud800-\udfff]|[\n\t])*")
# Nothing that JSON escapes: scripts find a tenant in the text of a record without reading it.
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIRE_ID = re.compile(r".*:\d{11,}", re.DOTALL)
# Parts of names that are secret wherever they stand.
_SECRET_PART = re.compile(
    r"pass(phrase)?$|passw|passcode|pwd|secret|token|credential|creds$|authorization|cookie|private"
    r"|signature|bearer|jwt|session[_\-. ]?id|conn(ection)?[_\-. ]?str(ing)?",
    re.IGNORECASE,
)
# The last words of names, so that "keyboard" and "monkey", "author" and "spin" are shown.
_SECRET_WORD = re.compile(
    r"(?<![a-z])(o?auth|pw|sas|sig|(t?otp|pin)(_?code)?)$"
    r"|((?<![a-z])|api|access|ssh|priv|private|master|signing|(en|de)cryption)keys?$"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_KEPT_NAME = 100  # characters of a name of which it is kept whether it is secret


class Priority(IntEnum):
    """The six levels that order a user's own tasks; CRITICAL is also a lane across users."""

    VERY_LOW = 1
    LOW = 2
    NORMAL = 3
    HIGH = 4
    VERY_HIGH = 5
    CRITICAL = 6


_PRIORITIES = {int(p): p for p in Priority}


def check_name(
    value: object,
    what: str,
    error: type[InvalidInput] = InvalidTask,
    *,
    most: int = MAX_NAME_LENGTH,
) -> str:
    """An id, user or name: 1 to 200 characters, none of them a control character."""
    if isinstance(value, str) and len(value) <= most and _NAME.fullmatch(value):
        return value
    text = _named(value)
    if len(text) > 80:
        text = text[:77] + "..."
    raise error(
        f"{what} {text} cannot be used: a string of 1 to {most} characters "
        "without control characters"
    )


def _named(value: object) -> str:
    """What was passed in as a name: a payload in its place is not repeated."""
    if isinstance(value, str) or is_plain(value):
        return shown(value)
    return f"of type {type(value).__name__}"


def check_items(
    value: object, what: str, of: str, error: type[InvalidInput] = InvalidInput
) -> list[Any]:
    """The items of a list or another iterable, such as a list `of` "task names".

    A string has items too, its letters, which nobody means.
    """
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return list(value)
    raise error(f"{what} must be a list of {of}, not {kind_of(value)}")


def check_text(
    value: object, what: str, error: type[InvalidInput] = InvalidInput, *, most: int
) -> str:
    """A text for people: of several lines, without other control characters, not too long."""
    if isinstance(value, str):
        text = value.replace("\r\n", "\n")
        if len(text) <= most and _TEXT.fullmatch(text):
            return text
    raise error(
        f"{what} {_named(value):.80} cannot be used: a string of at most {most} characters, "
        "without control characters other than line ends and tabs"
    )


def check_tenant(value: object, error: type[InvalidInput] = InvalidTask) -> str:
    """The name of a tenant: 1 to 64 letters, digits, '_', '.' or '-'."""
    if isinstance(value, str) and _TENANT.fullmatch(value):
        return value
    raise error(
        f"tenant {_named(value):.80} cannot be used: 1 to 64 letters, digits, '_', '.' or '-', or "
        "None"
    )


def own_id(tenant: str, given: str) -> str:
    """An id as one tenant's: `<tenant>~<id>`, which no other tenant can name; see docs/tenants.md.

    No name of a tenant has a `~`, and an id with one in this place has not the form of a fire.
    """
    prefix = f"{tenant}~"
    return given if given.startswith(prefix) else prefix + given


def check_task_id(value: object) -> str:
    """A task id that does not look like the id of a scheduled fire."""
    task_id = check_name(value, "task_id")
    if _FIRE_ID.fullmatch(task_id):
        raise InvalidTask(
            f"task_id {task_id!r} has the form of a scheduled fire, <schedule_id>:<time in ms>: "
            "choose one that does not end in ':' and a long number"
        )
    return task_id


def check_priority(value: object, error: type[InvalidInput] = InvalidTask) -> Priority:
    """A Priority, or its number."""
    if isinstance(value, int) and not isinstance(value, bool) and value in _PRIORITIES:
        return _PRIORITIES[value]
    raise error(f"priority {shown(value)} is none: a Priority, or its number from 1 to 6")


def check_seconds(
    value: object,
    what: str,
    error: type[InvalidInput] = InvalidInput,
    *,
    least: float = 0.0,
    most: float = 3_155_760_000.0,
) -> float:
    """A duration in seconds, or a timedelta, within bounds (at most 100 years)."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise error(f"{what} {shown(value)} is no duration: seconds or a timedelta")
    # False for NaN too; a whole number of any length can be compared, and not made a float.
    if not least <= seconds <= most:
        raise error(f"{what} {shown(value)} is out of range: {least:g} to {most:g} seconds")
    return float(seconds)


def check_count(
    value: object,
    what: str,
    error: type[InvalidInput] = InvalidInput,
    *,
    least: int = 0,
    most: int = 1_000_000_000,
) -> int:
    """A whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise error(f"{what} {shown(value)} is no whole number from {least} to {most}")
    return value


def check_number(
    value: object, what: str, error: type[InvalidInput] = InvalidInput, *, least: float, most: float
) -> float:
    """A finite number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise error(f"{what} {shown(value)} is no number from {least:g} to {most:g}")
    return float(value)


def is_secret(name: str) -> bool:
    """Whether a value of this name is not to be shown."""
    # Names come from payloads: long ones would fill the memory, and are hardly seen again.
    return _is_kept_secret(name) if len(name) <= _KEPT_NAME else _is_secret(name)


def _is_secret(name: str) -> bool:
    name = name.rstrip("0123456789_-. ")
    return bool(_SECRET_PART.search(name) or _SECRET_WORD.search(_CAMEL.sub("_", name).lower()))


_is_kept_secret = lru_cache(maxsize=10_000)(_is_secret)


def _told(path: str, value: object) -> str:
    """A value in a payload, as an error tells of it; see `told`.

    Nor is a number told whose name, or that of what it is in, is secret.
    """
    if is_plain(value) and not any(map(is_secret, re.split(r"[.\[]", path))):
        return f"{shown(value)[:80]}, {kind_of(value)}"
    return kind_of(value)


def check_payload(value: object, what: str = "payload") -> dict[str, Any]:
    """A JSON object: string keys, nothing that JSON cannot hold, not too deep.

    Raises InvalidPayload with the path to the value, such as `payload.items[3].price`.
    """
    if not isinstance(value, dict):
        raise InvalidPayload(f"{what} is {told(value)} and no JSON object: pass a dict")
    _walk(value, what, 1, [MAX_PAYLOAD_BYTES])
    return value


def _walk(value: Any, path: str, depth: int, left: list[int]) -> None:
    """Look at everything in a value, so that nothing is silently turned into something else.

    `left` is how many values may still come: each takes a byte at least. A few lists that are in
    each other again and again can stand for more values than could ever be looked at.
    """
    if value is None or isinstance(value, str | bool | int):
        return
    if depth > MAX_PAYLOAD_DEPTH:
        raise InvalidPayload(f"{path[:200]} is nested more than {MAX_PAYLOAD_DEPTH} levels deep")
    if isinstance(value, dict | list | tuple):
        left[0] -= len(value)
        if left[0] < 0:
            raise InvalidPayload(f"{path[:200]} holds more values than can be stored")
        _walk_inside(value, path, depth + 1, left)
    elif not isinstance(value, float) or not math.isfinite(value):
        raise InvalidPayload(
            f"{path[:200]} is {_told(path, value)}, which JSON cannot hold: strings, finite "
            "numbers, booleans, None, lists and dicts can be"
        )


def _walk_inside(value: Any, path: str, depth: int, left: list[int]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                which = f"the key {shown(key)}" if is_plain(key) else f"{kind_of(key)} as a key"
                raise InvalidPayload(f"{path[:200]} has {which}: JSON keys are strings")
            _walk(inner, f"{path}.{key}", depth, left)
    else:
        for index, inner in enumerate(value):
            _walk(inner, f"{path}[{index}]", depth, left)


# Kept: making an encoder costs as much as encoding a small payload.
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)


def encode_json(value: object, what: str, limit: int) -> str:
    """Compact JSON in one canonical form, at most `limit` bytes.

    Raises InvalidPayload, with the path to what cannot be written.
    """
    try:
        text = _ENCODER.encode(value)
        size = len(text) if text.isascii() else len(text.encode())
    except (TypeError, ValueError, RecursionError):
        path, culprit, reason = _find_unwritable(value, what)
        raise InvalidPayload(
            f"{path[:200]} is {culprit}, which cannot be written as JSON: {reason}"
        ) from None
    if size > limit:
        raise InvalidPayload(f"{what} has {size} bytes as JSON; at most {limit} can be stored")
    return text


def _find_unwritable(value: object, path: str, depth: int = 1) -> tuple[str, str, str]:
    """The path to what a value cannot be written for, what that is, and why.

    Only after a failure: looking at each string beforehand would cost every push.
    """
    parts: list[tuple[str, object]] = []
    if isinstance(value, dict):
        for key in value:
            if isinstance(key, str) and (reason := _unwritable(key)):
                return path, "a dict with a broken key", reason
        parts = [(f"{path}.{key}", inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    for inner_path, inner in parts:
        if depth <= MAX_PAYLOAD_DEPTH and _unwritable(inner):
            return _find_unwritable(inner, inner_path, depth + 1)
    return (
        path,
        "a long number" if isinstance(value, int) else _told(path, value),
        _unwritable(value) or "unknown",
    )


def _unwritable(value: object) -> str | None:
    """Why a value cannot be written as JSON, or None if it can."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "a lone surrogate is not text"
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None
