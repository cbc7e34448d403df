"""Schedules as code: documents that people write and review, compared with what is stored.

A document is a dict of the arguments of add_schedule, with `schedule_id`, and with `is_active` if
the import should change that. Durations are in seconds; times are ISO 8601 with an offset.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
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
from fairqueue.link.driver import in_batches
from fairqueue.link.operation import Now, Operation, steps
from fairqueue.schedules.changes import Change
from fairqueue.schedules.definition import Stored, recurrence_of
from fairqueue.schedules.fields import FIELDS, OPTIONAL, REPLANNING, STORED, check_patch
from fairqueue.schedules.search import MAX_LISTED, ScheduleFilter, find_ids
from fairqueue.schedules.store import ADDED_AT_ONCE, ScheduleStore, check_list, check_new
from fairqueue.schedules.update import past_time
from fairqueue.validation import MAX_PAYLOAD_DEPTH

MAX_DOCUMENTS = 100_000  # of one import
MAX_PROBLEMS = 20  # that one error names
FORMATS = ("json", "yaml")
MAX_YAML_DEPTH = 2 * MAX_PAYLOAD_DEPTH  # of a text; each level makes each token take longer

_KNOWN = ("schedule_id", *STORED, "is_active")
_EMPTY: dict[str, Any] = {"payload": {}, "metadata": {}, **OPTIONAL}  # left out of documents


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
        """Whether the stored schedules are as the documents say."""
        return not (self.added or self.changed or self.removed)


# --- export ---------------------------------------------------------------------------------------


def export(store: ScheduleStore, wanted: ScheduleFilter) -> Operation[list[dict[str, Any]]]:
    """Return a document for each schedule that matches, ordered by id."""
    found = yield from _stored_by_id(store, (yield from find_ids(store, wanted)))
    return [_document(found[schedule_id]) for schedule_id in sorted(found)]


def _document(stored: Stored) -> dict[str, Any]:
    fields = stored.definition.fields
    document: dict[str, Any] = {"schedule_id": stored.definition.schedule_id}
    for name in STORED:
        if name not in _EMPTY or fields[name] != _EMPTY[name]:
            document[name] = FIELDS[name].to_document(fields[name])
    return document | {"is_active": _is_wanted(stored)}


def _is_wanted(stored: Stored) -> bool:
    """Return False if a user has paused it; a schedule that has ended, or is broken, is wanted."""
    return stored.is_active or bool(stored.state.get("reason"))


# --- import ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A document that was read: `fields` are its values as they would be stored."""

    number: int
    schedule_id: str
    spec: dict[str, Any]
    fields: dict[str, Any]
    is_active: bool | None

    @property
    def place(self) -> str:
        """Which document it is, for error messages."""
        return _place(self.number, self.schedule_id)


def import_documents(
    store: ScheduleStore,
    documents: Iterable[Mapping[str, Any]],
    *,
    prune: ScheduleFilter | None,
    dry_run: bool,
    change: Change,
) -> Operation[Diff]:
    """Make the stored schedules as the documents say; see TaskScheduler.import_schedules."""
    entries = _read_all(check_list(documents, "documents"))
    if prune is not None and not entries:
        raise InvalidSchedule(
            "prune without any document would remove every schedule: use bulk('remove') to do that"
        )
    before = yield from _stored_by_id(store, list(entries))
    diff = Diff(dry_run=dry_run)
    for schedule_id, entry in entries.items():
        stored = before.get(schedule_id)
        if stored is None:
            diff.added.append(schedule_id)
        elif changes := _differences(entry, stored):
            diff.changed[schedule_id] = changes
        else:
            diff.unchanged.append(schedule_id)
    if prune is not None:
        found = yield from find_ids(store, prune)
        diff.removed.extend(sorted(each for each in found if each not in entries))
    _check_fire_times(entries, diff, (yield Now()))
    yield from _check_tasks(store, entries, diff)
    if not dry_run:
        yield from _apply(store, entries, diff, change)
    return diff


def _apply(
    store: ScheduleStore, entries: Mapping[str, _Entry], diff: Diff, change: Change
) -> Operation[None]:
    new = [entries[schedule_id] for schedule_id in diff.added]
    for added in in_batches(new, ADDED_AT_ONCE, _size):
        # If one exists all the same, it is unreadable or just made: the document wins.
        yield from steps(store.add)([_new_spec(entry, change) for entry in added], "replace")
    for schedule_id, changes in diff.changed.items():
        entry = entries[schedule_id]
        patch = {
            name: entry.is_active
            if name == "is_active"
            else FIELDS[name].to_user(entry.fields[name])
            for name in changes
        }
        yield from steps(store.update)(schedule_id, patch, change)
    for schedule_id in diff.removed:
        yield from steps(store.remove)(schedule_id)


def _size(entry: _Entry) -> int:
    return len(json.dumps(entry.fields["payload"]))


def _new_spec(entry: _Entry, change: Change) -> dict[str, Any]:
    paused = {"is_active": False} if entry.is_active is False else {}
    return {**entry.spec, **paused, "created_by": change.by}


def _stored_by_id(store: ScheduleStore, ids: Sequence[str]) -> Operation[dict[str, Stored]]:
    found: dict[str, Stored] = {}
    for i in range(0, len(ids), MAX_LISTED):
        for stored in (yield from steps(store.stored)(ids[i : i + MAX_LISTED])):
            if stored is not None:
                found[stored.definition.schedule_id] = stored
    return found


def _differences(entry: _Entry, stored: Stored) -> dict[str, tuple[Any, Any]]:
    before = stored.definition.fields
    changes = {
        name: (FIELDS[name].to_document(before[name]), FIELDS[name].to_document(after))
        for name, after in entry.fields.items()
        if name in before and before[name] != after
    }
    if entry.spec.get("anchor") is None:
        changes.pop("anchor", None)
    if entry.is_active is not None and entry.is_active != _is_wanted(stored):
        changes["is_active"] = (_is_wanted(stored), entry.is_active)
    return changes


def _check_fire_times(entries: Mapping[str, _Entry], diff: Diff, now_ms: int) -> None:
    """Raise InvalidSchedule for new rules that have no fire time to come."""
    resumed = (False, True)
    new = set(diff.added) | {
        schedule_id
        for schedule_id, changes in diff.changed.items()
        if any(name in REPLANNING for name in changes) or changes.get("is_active") == resumed
    }
    problems = []
    for schedule_id, entry in entries.items():
        if schedule_id in new:
            recurrence = recurrence_of(schedule_id, entry.fields["timezone"], entry.fields)
            if recurrence.next_ms(now_ms) is None:
                why = past_time(entry.fields, now_ms) or "it has no fire time to come"
                problems.append(f"{entry.place}: {why}")
    _raise_all(problems)


def _check_tasks(
    store: ScheduleStore, entries: Mapping[str, _Entry], diff: Diff
) -> Operation[None]:
    """Raise InvalidSchedule for new tasks that the store refuses, in a dry run too."""
    new = set(diff.added)
    new |= {each for each, changes in diff.changed.items() if changes.keys() & {"name", "payload"}}
    problems = []
    for schedule_id, entry in entries.items():
        if schedule_id in new:
            try:
                yield from store.check_task(entry.fields["name"], entry.fields["payload"])
            except InvalidInput as error:
                problems.append(f"{entry.place}: {error}")
    _raise_all(problems)


def _read_all(documents: Sequence[Mapping[str, Any]]) -> dict[str, _Entry]:
    """Return all documents by id. Raises InvalidSchedule, which names the bad ones."""
    if len(documents) > MAX_DOCUMENTS:
        raise InvalidSchedule(
            f"at most {MAX_DOCUMENTS} documents fit in one call, not {len(documents)}"
        )
    entries: dict[str, _Entry] = {}
    problems = []
    for number, document in enumerate(documents):
        try:
            entry = _read(number, document)
            if entry.schedule_id in entries:
                first = entries[entry.schedule_id].number
                raise InvalidSchedule(f"{entry.place}: has the id of document {first}")
            entries[entry.schedule_id] = entry
        except InvalidInput as error:
            problems.append(str(error))
    _raise_all(problems)
    return entries


def _raise_all(problems: Sequence[str]) -> None:
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        raise InvalidSchedule("nothing was stored: " + "; ".join(problems[:MAX_PROBLEMS]) + more)


def _place(number: int, schedule_id: object) -> str:
    return f"document {number} ({shown(schedule_id):.80})"


def _read(number: int, document: Mapping[str, Any]) -> _Entry:
    if not isinstance(document, Mapping):
        raise InvalidSchedule(
            f"document {number} must be a dict of a schedule's fields, not {safe_repr(document)}"
        )
    if document.get("schedule_id") is None:
        raise InvalidSchedule(f"document {number}, field 'schedule_id': it is missing")
    place = _place(number, document["schedule_id"])
    spec = {name: _read_field(place, name, value) for name, value in document.items()}
    is_active = spec.pop("is_active", None)
    try:
        schedule_id, fields = check_new(spec)
    except InvalidCron as error:
        raise InvalidSchedule(f"{place}, field 'cron_expr': {error}") from None
    except InvalidInput as error:
        raise InvalidSchedule(f"{place}: {error}") from None
    return _Entry(
        number=number, schedule_id=schedule_id, spec=spec, fields=fields, is_active=is_active
    )


def _read_field(place: str, name: object, value: Any) -> Any:
    """Return a value as `add_schedule` takes it. Raises InvalidSchedule, which names the field."""
    if name not in _KNOWN:
        raise InvalidSchedule(
            f"{place}, field {shown(name):.60}: unknown; known fields: {', '.join(_KNOWN)}"
        )
    try:
        value = _from_yaml(str(name), value)
        if name != "schedule_id":
            check_patch({str(name): value})
    except InvalidInput as error:
        raise InvalidSchedule(f"{place}, field {shown(name)}: {error}") from None
    return value


def _from_yaml(name: str, value: Any) -> Any:
    """Undo what YAML makes of dates and of times of day."""
    kind = FIELDS[name].kind if name in FIELDS else ""
    if kind == "dates" and isinstance(value, list):
        return [each.isoformat() if type(each) is date else each for each in value]
    if kind == "windows" and isinstance(value, list):
        return [_window(each) for each in value]
    return value


def _window(value: Any) -> Any:
    """Return a window whose hours YAML may have read as numbers: 17:30 as 17 * 60 + 30."""
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
    """Return documents as text, JSON or YAML, for a file under version control.

    Raises InvalidSchedule for another format, and ConfigurationError if PyYAML (extra `cli`) is not
    installed.
    """
    plain = [dict(document) for document in documents]
    if _check_format(format) == "json":
        return json.dumps(plain, ensure_ascii=False, indent=2) + "\n"
    return str(_yaml().safe_dump(plain, allow_unicode=True, sort_keys=False))


def load_schedules(text: str, format: str = "json") -> list[dict[str, Any]]:
    """Return the documents in a text, JSON or YAML, as `import_schedules` takes them.

    Raises InvalidSchedule, which says where the text cannot be read, and as `dump_schedules`.
    """
    loaded = _load_json(text) if _check_format(format) == "json" else _load_yaml(text)
    if not isinstance(loaded, list):
        raise InvalidSchedule(f"the text must hold a list of schedules, not {safe_repr(loaded)}")
    return loaded


def _check_format(format: object) -> str:
    if format not in FORMATS:
        raise InvalidSchedule(f"format must be one of {', '.join(FORMATS)}, not {shown(format)}")
    return str(format)


def _load_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidSchedule(f"the text is not JSON: {error}") from None


def _load_yaml(text: str) -> Any:
    yaml = _yaml()
    try:
        _check_tokens(yaml, text)
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InvalidSchedule):
            raise
        raise InvalidSchedule(f"the text is not YAML: {error}") from None


def _check_tokens(yaml: ModuleType, text: str) -> None:
    """Refuse what would take PyYAML more time or memory than there is, before it is parsed."""
    blocks = (yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken)
    begins = (*blocks, yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken)
    ends = (yaml.BlockEndToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)
    depth = 0
    for token in yaml.scan(text):
        # Aliases of aliases can stand for more than fits into memory.
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
