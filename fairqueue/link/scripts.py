"""Load the Lua scripts: one file per transition, each with a header that is its contract.

A header declares the keys and arguments of its script by name; `@include` adds shared parts from
`lua/lib` with theirs. This module assigns the positions, so that neither Lua nor Python counts
them. Lua sees keys as `K.<key>` and arguments as `A.<argument>`. Arguments that repeat are rows:
the header names the fields of a row, Lua reads `R.<field>[i]` for each `i = FIRST, #ARGV, ROW`,
and Python packs a row by keyword with `Script.row`.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fairqueue.link.keys import KEY_TYPES

# Each command raises WRONGTYPE if the key has another type. Redis does not roll a script back, so
# a script probes all its keys before its first write, unless its header says "PROBES itself".
_TYPE_PROBES = {"zset": "ZCARD", "hash": "HLEN", "list": "LLEN", "string": "STRLEN"}

LIB = "lib"  # the folder of the shared parts; the other folders hold scripts

# The part that every script includes: it refuses a queue whose layout this version does not know.
LAYOUT = "layout"

_DECLARATION = re.compile(r"^-- (KEYS|ARGV|ROW) (\S+)(?:\s+(\S+))?", re.MULTILINE)
_INCLUDE = re.compile(r"^-- @include (.+)$", re.MULTILINE)
_FLAGS = re.compile(r"^-- FLAGS (.+)$", re.MULTILINE)
_PROBES_ITSELF = re.compile(r"^-- PROBES itself", re.MULTILINE)
_ROW_FIELD = re.compile(r"\bR\.(\w+)\[(\w+)\]")

# A function with the comment above it. It begins and ends in the first column.
_FUNCTION = re.compile(
    r"(?:^--[^\n]*\n)*^local function (?P<name>\w+)\((?:[^\n]* end\n|.*?^end\n)", re.M | re.S
)
_COMMENT = re.compile(r"^[ \t]*--[^\n]*\n", re.M)
_WORD = re.compile(r"\w+")
_CAPITALS = re.compile(r"\b[A-Z][A-Z0-9_]*\b")
# A constant number, declared in the first column.
_CONSTANT = re.compile(r"^local ([A-Z][A-Z0-9_]*) = (-?[0-9][0-9.]*)[ \t]*(?:--[^\n]*)?\n", re.M)


class ScriptError(Exception):
    """A Lua file breaks its contract. This is a bug in FairQueue, not in its use."""


@dataclass(frozen=True, slots=True)
class Part:
    """One Lua file: the declarations of its header, and its code without lines of comments."""

    name: str
    keys: dict[str, str]
    arguments: tuple[str, ...]
    row: tuple[str, ...]
    includes: tuple[str, ...]
    flags: str
    probes_itself: bool
    text: str


@dataclass(frozen=True, slots=True)
class Script:
    """A script that is ready to be sent.

    row: packs the fields of one row, given by keyword, in the order of the header; `fields` names
    them. plain_text: the text without the first line, `#!lua`, for servers that do not know it.
    """

    name: str
    keys: tuple[str, ...]
    arguments: tuple[str, ...]
    fields: tuple[str, ...]
    row: Callable[..., tuple[Any, ...]]
    text: str
    plain_text: str
    sha: str


def lua_folder() -> Path:
    """Return the folder of the Lua files: in the installed package, or beside it in a checkout."""
    inside = Path(str(files("fairqueue"))) / "lua"
    return inside if inside.is_dir() else inside.parent.parent / "lua"


def script_files() -> dict[str, Path]:
    """Map each script to its file. Folders only group scripts: a name is used once.

    Raises ScriptError if two files have the same name.
    """
    return _files_in(lua_folder())


@cache
def _files_in(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*/*.lua")):
        if path.stem in found:
            raise ScriptError(f"two files are named {path.name}: {found[path.stem]} and {path}")
        found[path.stem] = path
    return {name: path for name, path in found.items() if path.parent.name != LIB}


@cache
def script_names() -> list[str]:
    """List the scripts by name."""
    return sorted(script_files())


@cache
def read_part(path: Path) -> Part:
    """Read one Lua file. Raises ScriptError if its header is wrong."""
    text = path.read_text(encoding="utf-8")
    keys: dict[str, str] = {}
    arguments: list[str] = []
    row: list[str] = []
    for kind, name, declared_type in _DECLARATION.findall(text):
        if kind == "KEYS":
            if KEY_TYPES.get(name) != declared_type:
                raise ScriptError(f"{path.name}: key {name} is not a {declared_type} in keys.py")
            keys[name] = declared_type
        elif kind == "ROW":
            row.append(name)
        elif name != "...":
            arguments.append(name)
    if bool(row) != ("\n-- ARGV ... " in text):
        raise ScriptError(f"{path.name}: declare `ARGV ...` and the fields of its rows together")
    include = _INCLUDE.search(text)
    flags = _FLAGS.search(text)
    return Part(
        name=path.stem,
        keys=keys,
        arguments=tuple(arguments),
        row=tuple(row),
        includes=tuple(include.group(1).split()) if include else (),
        flags=flags.group(1).strip() if flags else "",
        probes_itself=_PROBES_ITSELF.search(text) is not None,
        text=_COMMENT.sub("", text),
    )


def parts_of(name: str) -> list[Part]:
    """Return the parts of a script, each after those it includes, and the script itself last.

    Raises ScriptError if parts include each other in a circle.
    """
    folder = lua_folder()
    ordered: dict[str, Part] = {}

    def visit(part: Part, above: tuple[str, ...]) -> None:
        if part.name in above:
            raise ScriptError("circle of includes: " + " -> ".join((*above, part.name)))
        for include in part.includes:
            if include not in ordered:
                visit(read_part(folder / LIB / f"{include}.lua"), (*above, part.name))
        ordered[part.name] = part

    visit(read_part(folder / LIB / f"{LAYOUT}.lua"), ())
    visit(read_part(script_files()[name]), ())
    return list(ordered.values())


def without_unused(text: str) -> str:
    """Remove the functions that the rest of the text does not need.

    Lua allows 200 local variables in a function, and each function of a part is one.
    """
    functions: dict[str, frozenset[str]] = {}  # name -> words in it
    for found in _FUNCTION.finditer(text):
        functions[found["name"]] = functions.get(found["name"], frozenset()) | _words(found[0])
    used: set[str] = set()
    new = functions.keys() & _WORD.findall(_FUNCTION.sub("", text))
    while new:
        used |= new
        new = functions.keys() & frozenset().union(*(functions[name] for name in new)) - used
    return _FUNCTION.sub(lambda found: found[0] if found["name"] in used else "", text)


@cache
def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text))


def with_numbers(text: str) -> str:
    """Replace constants by their numbers: each constant would be a local variable, too.

    Raises ScriptError if the name of a constant also appears as a string, as in 'LIMIT'.
    """
    numbers = dict(_CONSTANT.findall(text))
    for name in numbers:
        if f"'{name}'" in text:
            raise ScriptError(f"constant {name} has the same name as a string")
    text = _CONSTANT.sub("", text)
    return _CAPITALS.sub(lambda word: numbers.get(word[0], word[0]), text)


def with_rows(text: str, row: tuple[str, ...]) -> str:
    """Replace `R.<field>[i]` by its place in ARGV. Raises ScriptError for an unknown field."""

    def place(found: re.Match[str]) -> str:
        field, i = found.groups()
        if field not in row:
            raise ScriptError(f"{found[0]}: no header declares the row field {field}")
        offset = row.index(field)
        return f"ARGV[{i} + {offset}]" if offset else f"ARGV[{i}]"

    return _ROW_FIELD.sub(place, text)


def _packer(fields: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    """Make a function that takes the fields as keywords and returns them as a tuple.

    It is compiled, as namedtuple does: pushing calls it for each task, and looking the fields up
    in a dictionary takes four times as long. The names come from the headers.
    """
    if not fields:
        return lambda: ()
    names = ", ".join(fields)
    packer: Callable[..., tuple[Any, ...]] = eval(f"lambda *, {names}: ({names},)")  # noqa: S307
    return packer


@cache
def load_script(name: str) -> Script:
    """Assemble a script from its parts, once in a process."""
    parts = parts_of(name)
    main = parts[-1]
    keys = {key: type_ for part in parts for key, type_ in part.keys.items()}
    arguments = list(dict.fromkeys(argument for part in parts for argument in part.arguments))
    row = next((part.row for part in parts if part.row), ())
    lines = [
        "local K = { " + ", ".join(f"{k} = KEYS[{i}]" for i, k in enumerate(keys, 1)) + " }",
        "local A = { " + ", ".join(f"{a} = ARGV[{i}]" for i, a in enumerate(arguments, 1)) + " }",
    ]
    texts = [part.text for part in parts]
    if not any(part.name == "fair" for part in parts):  # which reads all fields of that key
        texts.insert(1, "check_layout(redis.call('HGET', K.fair, 'layout'))\n")
    if "no-writes" not in main.flags:
        # Every script reads the key `fair`.
        probed = {key: _TYPE_PROBES[type_] for key, type_ in keys.items() if key != "fair"}
        probes = ", ".join(f"{key} = '{probe}'" for key, probe in probed.items())
        lines += [
            f"local PROBES = {{ {probes} }}",
            "local function probe(name) redis.call(PROBES[name], K[name]) end",
            "local function probe_all() for name in pairs(PROBES) do probe(name) end end",
        ]
        if not main.probes_itself:
            lines.append("probe_all()")
    texts.insert(0, f"local FIRST = {len(arguments) + 1}\nlocal ROW = {len(row)}\n")
    code = with_rows(with_numbers(without_unused("\n".join(texts))), row)
    body = "\n".join([*lines, code])
    flags = f" flags={main.flags}" if main.flags else ""
    text = f"#!lua{flags}\n{body}"
    return Script(
        name=name,
        keys=tuple(keys),
        arguments=tuple(arguments),
        fields=row,
        row=_packer(row),
        text=text,
        plain_text=body,
        sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(),
    )
