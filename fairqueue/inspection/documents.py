"""Convert the library's objects to JSON documents: the same for CLI, REST and exports.

A dataclass becomes an object of its fields, without those that its repr hides. Times are ISO 8601
in UTC with `Z`; a time in a zone (in a preview) keeps its offset. Durations are seconds. Values
whose names look like secrets are masked in all JSON that users provide.
"""

import math
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from datetime import date, datetime, timedelta
from enum import Enum
from functools import lru_cache
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.inspection.masking import mask, mask_side
from fairqueue.models import Page
from fairqueue.queue.reports import LogLine

# Objects that extend another one: its fields are merged into theirs, so that a job of a listing and
# a single job, a run and its details, have the same fields in the same places.
FLAT = {"ScheduleView": "schedule", "RunDetails": "run", "NewKey": "info"}
# Properties that a document has in addition to the fields.
ADDED = {"ScheduleView": ("etag",)}
# Mappings that become the list of their values, in the order of another field: their keys are users
# and tenants, and no text names one of these and no other.
LISTED = {"ShareSeries": ("counts", "users")}
# Fields that hold JSON of users. The keys of all others are our own names, or ids.
MASKED = frozenset({"payload", "metadata", "result", "details", "policy"})
_PLAIN = frozenset({str, int, bool, type(None)})  # as most values are
MASKED_BY_ID = frozenset({"changed"})  # the same, by id; an id may look like a secret's name


def document(value: Any) -> Any:
    """Return a value as JSON: objects, pages, mappings and lists, and what they contain.

    A page is {"items": [...], "cursor": ...}. A number that is not finite becomes None. Raises
    TypeError for a value that JSON cannot hold.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return value.value if isinstance(value, Enum) else str(value)
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, datetime | date | timedelta):
        return moment(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _object(value)
    return _collection(value)


def moment(value: datetime | date | timedelta) -> str | float:
    """Return a time or a date as ISO 8601, a duration as seconds."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not isinstance(value, datetime):
        return value.isoformat()
    # All times of the library are whole milliseconds.
    text = value.isoformat(timespec="milliseconds" if value.microsecond else "seconds")
    return text if value.utcoffset() else text.removesuffix("+00:00") + "Z"


@lru_cache(maxsize=256)
def shown_fields(kind: Any) -> tuple[Field[Any], ...]:
    """Return the fields of a dataclass that its document has."""
    return tuple(field for field in fields(kind) if field.repr)


def _number(value: float) -> float | None:
    if isinstance(value, int):
        return int(value)
    return value if math.isfinite(value) else None


def _object(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    flat = FLAT.get(kind.__name__)
    found: dict[str, Any] = {} if flat is None else _object(getattr(value, flat))
    listed, order = LISTED.get(kind.__name__, ("", ""))
    for field in shown_fields(kind):
        if field.name == listed:
            mapping = getattr(value, listed)
            found[listed] = [document(mapping[each]) for each in getattr(value, order)]
        elif field.name != flat:
            inner = document(getattr(value, field.name))
            found[field.name] = _masked(field.name, inner) if inner else inner
    return found | {name: document(getattr(value, name)) for name in ADDED.get(kind.__name__, ())}


def _masked(name: str, value: Any) -> Any:
    if name == "fields":
        return {field: [mask_side(field, side) for side in pair] for field, pair in value.items()}
    if name in MASKED_BY_ID:
        return {each: mask(inner) for each, inner in value.items()}
    return mask(value) if name in MASKED else value


def _collection(value: Any) -> Any:
    if isinstance(value, Page):
        return {"items": [document(each) for each in value], "cursor": value.cursor}
    if isinstance(value, LogLine):
        return {
            "at": moment(from_ms(value.at_ms)),
            "level": value.level,
            "message": value.message,
            "context": mask(dict(value.context)),
        }
    if isinstance(value, Mapping):
        return {str(name): document(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [document(each) for each in value]
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}, which JSON cannot hold")
