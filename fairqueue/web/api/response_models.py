"""Derive the models of responses from the dataclasses of the library."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from inspect import cleandoc
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from fairqueue.inspection.documents import ADDED, FLAT, LISTED, shown_fields
from fairqueue.queue.reports import LogLine


class LogLineDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A log line of a run."""

    at: datetime
    level: str
    message: str
    context: dict[str, Any]


def record(name: str, doc: str, fields: Mapping[str, Any]) -> type[msgspec.Struct]:
    """A model of a response; all its fields are required."""
    return msgspec.defstruct(
        name,
        list(fields.items()),
        kw_only=True,
        forbid_unknown_fields=True,
        namespace={"__doc__": doc},
        module=__name__,
    )


@lru_cache(maxsize=256)
def shape(kind: Any, name: str | None = None) -> type[msgspec.Struct]:
    """The model of the document of a dataclass."""
    return record(name or kind.__name__, cleandoc(kind.__doc__ or ""), fields_of(kind))


@lru_cache(maxsize=256)
def page(item: Any, name: str) -> type[msgspec.Struct]:
    """The model of a page of items."""
    doc = "A page of a listing; `cursor` gets the next page, null at the end."
    return record(name, doc, {"items": list[item], "cursor": str | None})


def whole(kind: Any, name: str) -> type[msgspec.Struct]:
    """The model of a listing without pages."""
    item = shape(kind)
    return record(name, "All items.", {"items": list[item]})  # type: ignore[valid-type]


def fields_of(kind: Any) -> dict[str, Any]:
    """The fields of the document of a dataclass, with their types."""
    hints = get_type_hints(kind)
    flat = FLAT.get(kind.__name__)
    found = {} if flat is None else fields_of(hints[flat])
    listed, _ = LISTED.get(kind.__name__, ("", ""))
    own = {field.name: _type(hints[field.name]) for field in shown_fields(kind)}
    if listed:
        own[listed] = list[_type(get_args(hints[listed])[1])]  # type: ignore[misc]
    for name in ADDED.get(kind.__name__, ()):
        own[name] = _type(get_type_hints(getattr(kind, name).fget)["return"])
    return found | {field: inner for field, inner in own.items() if field != flat}


def _type(hint: Any) -> Any:
    """The type of a value in a document."""
    if hint is timedelta:
        return float
    if hint is LogLine:
        return LogLineDocument
    if is_dataclass(hint):
        return shape(cast(Any, hint))
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return Union[tuple(_type(each) for each in inner)]  # noqa: UP007 - made of a tuple
    if origin is tuple:
        return list[_type(inner[0])] if len(inner) == 2 and inner[1] is ... else list[Any]  # type: ignore[misc]
    if origin is list:
        return list[_type(inner[0])]  # type: ignore[misc]
    if origin is dict:
        return dict[str, _type(inner[1])]  # type: ignore[misc]
    return hint
