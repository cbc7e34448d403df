"""Schedules as code: documents that people write and review, compared with what is stored.

A document is a dict of the arguments of add_schedule, with `schedule_id`, and `is_active` if that
is to be as it says. Durations are seconds; moments are ISO 8601 with an offset.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from types import ModuleType
from typing import Any

from fairqueue.errors import (
    ConfigurationError,
    InvalidCron,
    InvalidInput,
    InvalidSchedule,
    safe_repr,
    shown,
)
from fairqueue.link.connection import Link, in_batches
from fairqueue.schedules.bulk import Filter, walk_ids
from fairqueue.schedules.store import (
    ADDED_AT_ONCE,
    FIELDS,
    MAX_LISTED,
    PLANNING,
    USUAL,
    Change,
    ScheduleStore,
    Stored,
    check_list,
    fields_of,
    past_moment,
    recurrence_of,
    user_form,
)
from fairqueue.validation import MAX_PAYLOAD_DEPTH

MAX_DOCUMENTS = 100_000  # of one import
MAX_PROBLEMS = 20  # that one error names
FORMATS = ("json", "yaml")
MAX_YAML_DEPTH = 2 * MAX_PAYLOAD_DEPTH  # of a text; each level makes each token take longer

_MOMENTS = ("anchor", "at", "start", "end")
_KNOWN = ("schedule_id", *FIELDS, "is_active")
_EMPTY: dict[str, Any] = {"payload": {}, "metadata": {}, **USUAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """What an import changes, or would change; ids are in the order of the documents.

    changed: by id, each field with its old and new value as documents have them.
    """

    dry_run: bool
    added: list[str] = field(default_factory=list)
    changed: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether what is stored is as the documents say."""
        return not (self.added or self.changed or self.removed)


# --- out ------------------------------------------------------------------------------------------


def export(link: Link, store: ScheduleStore, filter_: Filter) -> list[dict[str, Any]]:
    """A document for each schedule that matches, ordered by id."""
    documents: list[dict[str, Any]] = []
    for ids in walk_ids(link, store, filter_):
        documents += [_document(stored) for stored in store.stored(ids) if stored is not None]
    return sorted(documents, key=lambda document: str(document["schedule_id"]))


def _document(stored: Stored) -> dict[str, Any]:
    fields = fields_of(stored.definition)
    document: dict[str, Any] = {"schedule_id": stored.definition.schedule_id}
    for name in FIELDS:
        if name not in _EMPTY or fields[name] != _EMPTY[name]:
            document[name] = _written(name, fields[name])
    return document | {"is_active": _is_wanted(stored)}


def _written(name: str, value: Any) -> Any:
    """A value as documents have it."""
    value = user_form(name, value)
    if isinstance(value, datetime):
        return value.isoformat()
    if name == "priority":
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_wanted(stored: Stored) -> bool:
    """False if a user has switched it off; one that has ended, or that is broken, is not."""
    return stored.is_active or bool(stored.state.get("reason"))


# --- in -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A document that was read: what it says as it would be stored."""

    number: int
    schedule_id: str
    spec: dict[str, Any]
    fields: dict[str, Any]
    is_active: bool | None


def import_documents(
    link: Link,
    store: ScheduleStore,
    documents: Iterable[Mapping[str, Any]],
    *,
    prune: Filter | None,
    dry_run: bool,
    change: Change,
) -> Diff:
    """Make what is stored as the documents say; see TaskScheduler.import_schedules."""
    entries = _read_all(check_list(documents, "documents"))
    if prune is not None and not entries:
        raise InvalidSchedule(
            "prune without any document would remove every schedule: use bulk('remove') if that "
            "is meant"
        )
    before = _stored_by_id(store, [entry.schedule_id for entry in entries])
    diff = Diff(dry_run=dry_run)
    for entry in entries:
        stored = before.get(entry.schedule_id)
        if stored is None:
            diff.added.append(entry.schedule_id)
        elif changes := _differences(entry, stored):
            diff.changed[entry.schedule_id] = changes
        else:
            diff.unchanged.append(entry.schedule_id)
    if prune is not None:
        wanted = {entry.schedule_id for entry in entries}
        found = (each for ids in walk_ids(link, store, prune) for each in ids)
        diff.removed.extend(sorted(each for each in found if each not in wanted))
    _check_moments(entries, diff, link.now_ms())
    _check_tasks(store, entries, diff)
    if not dry_run:
        _apply(store, entries, diff, change)
    return diff


def _apply(store: ScheduleStore, entries: Sequence[_Entry], diff: Diff, change: Change) -> None:
    by_id = {entry.schedule_id: entry for entry in entries}
    new = [by_id[schedule_id] for schedule_id in diff.added]
    for added in in_batches(new, ADDED_AT_ONCE, _size):
        # What is there all the same is unreadable, or was made a moment ago: the document wins.
        store.add([_made_by(entry, change) for entry in added], "replace")
    for schedule_id, changes in diff.changed.items():
        entry = by_id[schedule_id]
        patch = {
            name: entry.is_active if name == "is_active" else user_form(name, entry.fields[name])
            for name in changes
        }
        store.update(schedule_id, patch, change)
    for schedule_id in diff.removed:
        store.remove(schedule_id)


def _size(entry: _Entry) -> int:
    return len(json.dumps(entry.fields["payload"]))


def _made_by(entry: _Entry, change: Change) -> dict[str, Any]:
    paused = {"is_active": False} if entry.is_active is False else {}
    return {**entry.spec, **paused, "created_by": change.by}


def _stored_by_id(store: ScheduleStore, ids: Sequence[str]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for i in range(0, len(ids), MAX_LISTED):
        for stored in store.stored(ids[i : i + MAX_LISTED]):
            if stored is not None:
                found[stored.definition.schedule_id] = stored
    return found


def _differences(entry: _Entry, stored: Stored) -> dict[str, tuple[Any, Any]]:
    before = fields_of(stored.definition)
    names = [name for name in FIELDS if name != "anchor" or entry.spec.get("anchor") is not None]
    changes = {
        name: (_written(name, before[name]), _written(name, entry.fields[name]))
        for name in names
        if before[name] != entry.fields[name]
    }
    if entry.is_active is not None and entry.is_active != _is_wanted(stored):
        changes["is_active"] = (_is_wanted(stored), entry.is_active)
    return changes


def _check_moments(entries: Sequence[_Entry], diff: Diff, now_ms: int) -> None:
    """Raises InvalidSchedule for rules that are new and have no moment to come."""
    new = set(diff.added)
    for schedule_id, changes in diff.changed.items():
        if any(name in PLANNING for name in changes) or changes.get("is_active") == (False, True):
            new.add(schedule_id)
    problems = [
        f"{_name(entry.number, entry.schedule_id)}: "
        + (past_moment(entry.fields, now_ms) or "it has no moment to come")
        for entry in entries
        if entry.schedule_id in new
        and recurrence_of(entry.schedule_id, entry.fields["timezone"], entry.fields).next_ms(now_ms)
        is None
    ]
    _raise_all(problems)


def _check_tasks(store: ScheduleStore, entries: Sequence[_Entry], diff: Diff) -> None:
    """Raises InvalidSchedule for new tasks that the store refuses: a dry run tells so, too."""
    new = set(diff.added)
    new |= {each for each, changes in diff.changed.items() if changes.keys() & {"name", "payload"}}
    problems = []
    for entry in entries:
        if entry.schedule_id in new:
            try:
                store.look_at(entry.fields["name"], entry.fields["payload"])
            except InvalidInput as error:
                problems.append(f"{_name(entry.number, entry.schedule_id)}: {error}")
    _raise_all(problems)


def _read_all(documents: Sequence[Mapping[str, Any]]) -> list[_Entry]:
    """All documents, checked. Raises InvalidSchedule, which names the bad ones."""
    if len(documents) > MAX_DOCUMENTS:
        raise InvalidSchedule(f"{len(documents)} documents in one call: at most {MAX_DOCUMENTS}")
    entries: dict[str, _Entry] = {}
    problems = []
    for number, document in enumerate(documents):
        try:
            entry = _read(number, document)
            if entry.schedule_id in entries:
                first = entries[entry.schedule_id].number
                raise InvalidSchedule(f"{_name(number, entry.schedule_id)}: as document {first}")
            entries[entry.schedule_id] = entry
        except InvalidInput as error:
            problems.append(str(error))
    _raise_all(problems)
    return list(entries.values())


def _raise_all(problems: Sequence[str]) -> None:
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise InvalidSchedule("nothing was stored: " + "; ".join(problems[:MAX_PROBLEMS]) + more)


def _name(number: int, schedule_id: object) -> str:
    return f"document {number} ({shown(schedule_id):.80})"


def _read(number: int, document: Mapping[str, Any]) -> _Entry:
    if not isinstance(document, Mapping):
        raise InvalidSchedule(
            f"document {number} is {safe_repr(document)}: a dict of a schedule is one"
        )
    if document.get("schedule_id") is None:
        raise InvalidSchedule(f"document {number}, field 'schedule_id': a document needs one")
    place = _name(number, document["schedule_id"])
    spec = {name: _read_field(place, name, value) for name, value in document.items()}
    is_active = spec.pop("is_active", None)
    try:
        schedule_id, fields = ScheduleStore.check(spec)
    except InvalidCron as error:
        raise InvalidSchedule(f"{place}, field 'cron_expr': {error}") from None
    except InvalidInput as error:
        raise InvalidSchedule(f"{place}: {error}") from None
    return _Entry(
        number=number, schedule_id=schedule_id, spec=spec, fields=fields, is_active=is_active
    )


def _read_field(place: str, name: object, value: Any) -> Any:
    """A value as `add_schedule` takes it. Raises InvalidSchedule, which names the field."""
    if name not in _KNOWN:
        raise InvalidSchedule(f"{place}, field {shown(name):.60}: known are {', '.join(_KNOWN)}")
    try:
        value = _spoken(str(name), value)
        if name != "schedule_id":
            ScheduleStore.check_changes({str(name): value})
    except InvalidInput as error:
        raise InvalidSchedule(f"{place}, field {shown(name)}: {error}") from None
    return value


def _spoken(name: str, value: Any) -> Any:
    """What a text means: a moment, and what YAML makes of dates and of hours."""
    if name in _MOMENTS and isinstance(value, str):
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            raise InvalidSchedule(
                f"{shown(value):.60} is no moment: such as '2026-03-05T09:00:00+00:00'"
            ) from None
    if name == "exclude" and isinstance(value, list):
        return [each.isoformat() if type(each) is date else each for each in value]
    if name == "windows" and isinstance(value, list):
        return [_window(each) for each in value]
    return value


def _window(value: Any) -> Any:
    """A window whose hours YAML may have taken for numbers: it reads 17:30 as 17 * 60 + 30."""
    if not isinstance(value, Mapping):
        return value
    hours = {
        side: f"{value[side] // 60:02d}:{value[side] % 60:02d}"
        for side in ("from", "to")
        if type(value.get(side)) is int and 0 <= value[side] <= 1440
    }
    return {**value, **hours}


# --- text -----------------------------------------------------------------------------------------


def dump_schedules(documents: Sequence[Mapping[str, Any]], format: str = "json") -> str:
    """Documents as text, JSON or YAML, for a file under version control.

    Raises InvalidSchedule for another format, ConfigurationError where PyYAML, of the extra `cli`,
    is not installed.
    """
    plain = [dict(document) for document in documents]
    if _check_format(format) == "json":
        return json.dumps(plain, ensure_ascii=False, indent=2) + "\n"
    return str(_yaml().safe_dump(plain, allow_unicode=True, sort_keys=False))


def load_schedules(text: str, format: str = "json") -> list[dict[str, Any]]:
    """The documents in a text, JSON or YAML, as `import_schedules` takes them.

    Raises InvalidSchedule, which says where a text cannot be read, and as `dump_schedules`.
    """
    loaded = _load_json(text) if _check_format(format) == "json" else _load_yaml(text)
    if not isinstance(loaded, list):
        raise InvalidSchedule(f"the text holds {safe_repr(loaded)}: a list of schedules is needed")
    return loaded


def _check_format(format: object) -> str:
    if format not in FORMATS:
        raise InvalidSchedule(f"format {shown(format)} is none of {', '.join(FORMATS)}")
    return str(format)


def _load_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidSchedule(f"the text is no JSON: {error}") from None


def _load_yaml(text: str) -> Any:
    yaml = _yaml()
    try:
        _check_tokens(yaml, text)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InvalidSchedule):
            raise
        raise InvalidSchedule(f"the text is no YAML: {error}") from None


def _check_tokens(yaml: ModuleType, text: str) -> None:
    """Look for what a few lines can bring PyYAML to its knees with, before it reads them."""
    blocks = (yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken)
    begins = (*blocks, yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken)
    ends = (yaml.BlockEndToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)
    depth = 0
    for token in yaml.scan(text):
        # References to references can stand for more than fits into memory.
        if isinstance(token, yaml.AliasToken):
            raise InvalidSchedule("the text has a YAML alias (*name): write the value out")
        depth += isinstance(token, begins) - isinstance(token, ends)
        if depth > MAX_YAML_DEPTH:
            raise InvalidSchedule(f"the text is nested more than {MAX_YAML_DEPTH} levels deep")


def _yaml() -> ModuleType:
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(
            "PyYAML is not installed: pip install 'fairqueue[cli]', or use JSON"
        ) from None
    return yaml
