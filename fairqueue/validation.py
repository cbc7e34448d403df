"""Check input before anything is stored. Errors name the value and say what is valid.

Errors end up in logs and in the audit log, which other people read. So a message shows only values
that cannot be secret. For others, such as values in a payload, it shows the path and the type.
"""

import json
import math
import re
from collections.abc import Collection, Iterable
from datetime import timedelta
from enum import IntEnum
from functools import lru_cache
from typing import Any, TypeVar

from fairqueue.errors import (
    InvalidInput,
    InvalidPayload,
    InvalidTask,
    is_plain,
    kind_of,
    safe_repr,
    shown,
    truncate,
)

MAX_NAME_LENGTH = 200  # characters of an id, a user or a task name: they are parts of index members
MAX_PAYLOAD_BYTES = 256 * 1024
MAX_PAYLOAD_DEPTH = 32
MAX_RESULT_BYTES = 16 * 1024
MAX_NOTE_LENGTH = 1000  # characters
MAX_ERROR_LENGTH = 2000  # characters of an error that are kept

# Control characters separate the parts of index members; lone surrogates are not valid UTF-8.
_NAME = re.compile(rf"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{MAX_NAME_LENGTH}}}")
_TEXT = re.compile(r"(?:[^\x00-\x1f\x7f-\x9f\ud800-\udfff]|[\n\t])*")
# Nothing that JSON escapes: scripts search for a tenant in the text of a record.
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIRE_ID = re.compile(r".*:\d{11,}", re.DOTALL)
# A name that contains one of these is secret.
_SECRET_PART = re.compile(
    r"pass(phrase)?$|passw|passcode|pwd|secret|token|credential|creds$|authorization|cookie|private"
    r"|signature|bearer|jwt|session[_\-. ]?id|conn(ection)?[_\-. ]?str(ing)?",
    re.IGNORECASE,
)
# A name that ends in one of these words is secret; "keyboard", "monkey", "author" and our own
# "limit_keys" are not.
_SECRET_WORD = re.compile(
    r"(?<![a-z])(o?auth|pw|sas|sig|(t?otp|pin)(_?code)?)$"
    r"|((?<![a-z])(?<!limit_)|api|access|ssh|priv|private|master|signing|(en|de)cryption)keys?$"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_CACHED_NAME = 100  # characters: for longer names `is_secret` is not cached


T = TypeVar("T")


class Priority(IntEnum):
    """The six levels that order a user's own tasks; CRITICAL tasks also pass other users."""

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
    """Check an id, user or name: 1 to `most` characters, none of them a control character."""
    if isinstance(value, str) and len(value) <= most and _NAME.fullmatch(value):
        return value
    raise error(
        f"{what} must be a string of 1 to {most} characters without control characters, "
        f"not {_given(value)}"
    )


def _given(value: object) -> str:
    """Return an invalid name as a message shows it. A payload passed by mistake is not shown."""
    return truncate(shown(value), 80) if isinstance(value, str) else safe_repr(value)


def check_items(
    value: object, what: str, of: str, error: type[InvalidInput] = InvalidInput
) -> list[Any]:
    """Return the items of an iterable; `of` names them: "task names". Strings are refused."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return list(value)
    raise error(f"{what} must be a list of {of}, not {kind_of(value)}")


def check_text(
    value: object, what: str, error: type[InvalidInput] = InvalidInput, *, most: int
) -> str:
    """Check human-readable text; only line breaks and tabs are allowed as control characters."""
    if isinstance(value, str):
        text = value.replace("\r\n", "\n")
        if len(text) <= most and _TEXT.fullmatch(text):
            return text
    raise error(
        f"{what} must be a string of at most {most} characters without control characters other "
        f"than line breaks and tabs, not {_given(value)}"
    )


def check_type(
    value: object, what: str, kind: type[T], error: type[InvalidInput] = InvalidInput
) -> T:
    """Check an instance of a class."""
    if isinstance(value, kind):
        return value
    raise error(f"{what} must be an instance of {kind.__name__}, not {safe_repr(value)}")


def check_one_of(
    value: object, what: str, choices: Collection[str], error: type[InvalidInput] = InvalidInput
) -> str:
    """Check that a value is one of `choices`."""
    if isinstance(value, str) and value in choices:
        return value
    raise error(f"{what} must be one of {', '.join(choices)}, not {truncate(shown(value), 80)}")


def check_tenant(value: object, error: type[InvalidInput] = InvalidTask) -> str:
    """Check the name of a tenant: 1 to 64 letters, digits, '_', '.' or '-'."""
    if isinstance(value, str) and _TENANT.fullmatch(value):
        return value
    raise error(f"tenant must be 1 to 64 letters, digits, '_', '.' or '-', not {_given(value)}")


def with_tenant_prefix(tenant: str, given: str) -> str:
    """Return `<tenant>~<id>`, an id that no other tenant can use; see docs/tenants.md.

    The name of a tenant cannot contain `~`, and such an id
    never has the form of a scheduled task's id.
    """
    prefix = f"{tenant}~"
    return given if given.startswith(prefix) else prefix + given


def check_task_id(value: object) -> str:
    """Check a task id. The form <schedule_id>:<time in ms> is reserved for scheduled fires."""
    task_id = check_name(value, "task_id")
    if _FIRE_ID.fullmatch(task_id):
        raise InvalidTask(
            "task_id must not end in ':' and a long number, which is the form of a scheduled fire, "
            f"<schedule_id>:<time in ms>: {task_id!r}"
        )
    return task_id


def check_priority(value: object, error: type[InvalidInput] = InvalidTask) -> Priority:
    """Check a Priority or its number."""
    if isinstance(value, int) and not isinstance(value, bool) and value in _PRIORITIES:
        return _PRIORITIES[value]
    raise error(f"priority must be a Priority or a number from 1 to 6, not {shown(value)}")


def check_seconds(
    value: object,
    what: str,
    error: type[InvalidInput] = InvalidInput,
    *,
    least: float = 0.0,
    most: float = 3_155_760_000.0,
) -> float:
    """Return a duration, given in seconds or as a timedelta, in seconds; at most 100 years."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise error(f"{what} must be a number of seconds or a timedelta, not {shown(value)}")
    # False for NaN too. Compared first: a huge int can be compared, but not converted to float.
    if not least <= seconds <= most:
        raise error(f"{what} must be {least:.15g} to {most:.15g} seconds, not {shown(value)}")
    return float(seconds)


def check_count(
    value: object,
    what: str,
    error: type[InvalidInput] = InvalidInput,
    *,
    least: int = 0,
    most: int = 1_000_000_000,
) -> int:
    """Check a whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise error(f"{what} must be a whole number from {least} to {most}, not {shown(value)}")
    return value


def check_number(
    value: object, what: str, error: type[InvalidInput] = InvalidInput, *, least: float, most: float
) -> float:
    """Check a finite number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise error(f"{what} must be a number from {least:.15g} to {most:.15g}, not {shown(value)}")
    return float(value)


def is_secret(name: str) -> bool:
    """Return whether a value with this name must not be shown."""
    # Names come from payloads: long ones would fill the memory, and rarely repeat.
    return _cached_is_secret(name) if len(name) <= _CACHED_NAME else _is_secret(name)


def _is_secret(name: str) -> bool:
    name = name.rstrip("0123456789_-. ")
    return bool(_SECRET_PART.search(name) or _SECRET_WORD.search(_CAMEL.sub("_", name).lower()))


_cached_is_secret = lru_cache(maxsize=10_000)(_is_secret)


def _safe_repr_at(path: str, value: object) -> str:
    """Describe a value in a payload: only its type, unless it is plain and its path not secret."""
    if is_plain(value) and not any(map(is_secret, re.split(r"[.\[]", path))):
        return f"{shown(value)[:80]}, {kind_of(value)}"
    return kind_of(value)


def check_payload(value: object, what: str = "payload") -> dict[str, Any]:
    """Check a JSON object: string keys, only values that JSON can represent, not too deep.

    Raises InvalidPayload with the path to the value, such as `payload.items[3].price`.
    """
    if not isinstance(value, dict):
        raise InvalidPayload(f"{what} must be a dict (a JSON object), not {safe_repr(value)}")
    _walk(value, what, 1, [MAX_PAYLOAD_BYTES])
    return value


def _walk(value: Any, path: str, depth: int, left: list[int]) -> None:
    """Check each value in a payload, because json.dumps would silently convert some of them.

    `left` is the number of values that may follow: each takes at least one byte. Shared
    references can expand to exponentially many values.
    """
    if value is None or isinstance(value, str | bool | int):
        return
    if depth > MAX_PAYLOAD_DEPTH:
        raise InvalidPayload(f"{path[:200]} is nested more than {MAX_PAYLOAD_DEPTH} levels deep")
    if isinstance(value, dict | list | tuple):
        left[0] -= len(value)
        if left[0] < 0:
            raise InvalidPayload(f"{path[:200]} has more values than can be stored")
        _walk_inside(value, path, depth + 1, left)
    elif not isinstance(value, float) or not math.isfinite(value):
        raise InvalidPayload(
            f"{path[:200]} must be a string, a finite number, a boolean, None, a list or a dict "
            f"for JSON, not {_safe_repr_at(path, value)}"
        )


def _walk_inside(value: Any, path: str, depth: int, left: list[int]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise InvalidPayload(
                    f"{path[:200]} must have strings as keys for JSON, not {safe_repr(key)}"
                )
            _walk(inner, f"{path}.{key}", depth, left)
    else:
        for index, inner in enumerate(value):
            _walk(inner, f"{path}[{index}]", depth, left)


# Created once: constructing an encoder costs as much as encoding a small payload.
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)


def encode_json(value: object, what: str, limit: int) -> str:
    """Return compact canonical JSON of at most `limit` bytes.

    Raises InvalidPayload with the path to a value that JSON cannot represent.
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
        raise InvalidPayload(f"{what} must be at most {limit} bytes of JSON, not {size}")
    return text


def _find_unwritable(value: object, path: str, depth: int = 1) -> tuple[str, str, str]:
    """Return the path to the value that JSON cannot represent, a description of it, and why.

    Called only after a failure: checking every string first would slow down every push.
    """
    parts: list[tuple[str, object]] = []
    if isinstance(value, dict):
        for key in value:
            if isinstance(key, str) and (reason := _unwritable(key)):
                return path, "a dict with a key that is not valid Unicode", reason
        parts = [(f"{path}.{key}", inner) for key, inner in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    for inner_path, inner in parts:
        if depth <= MAX_PAYLOAD_DEPTH and _unwritable(inner):
            return _find_unwritable(inner, inner_path, depth + 1)
    return (
        path,
        "an integer with too many digits" if isinstance(value, int) else _safe_repr_at(path, value),
        _unwritable(value) or "unknown",
    )


def _unwritable(value: object) -> str | None:
    """Return why a value cannot be written as JSON, or None if it can."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "it contains a lone surrogate, which is not valid Unicode"
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None
