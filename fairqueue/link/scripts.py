"""Read the Lua files: one per transition, each with a header that is its contract.

A header names the keys and arguments of its script; `@include` brings in shared parts from
`lua/lib` with theirs. Here the names get their positions, so that neither Lua nor Python ever
counts them: a script sees `K.<key>`, `A.<argument>`, and its remaining arguments from `FIRST` on.
"""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from fairqueue.link.keys import KEY_TYPES

# Raises WRONGTYPE where a key holds something else. Redis does not roll a script back, so a script
# asks all its keys before its first write, unless its header says that it probes itself.
_TYPE_PROBES = {"zset": "ZCARD", "hash": "HLEN", "list": "LLEN", "string": "STRLEN"}

LIB = "lib"  # the folder of the shared parts; the other folders hold scripts

# The part that every script includes: it refuses a queue whose layout this version does not know.
LAYOUT = "layout"

_DECLARATION = re.compile(r"^-- (KEYS|ARGV) (\S+)(?:\s+(\S+))?", re.MULTILINE)
_INCLUDE = re.compile(r"^-- @include (.+)$", re.MULTILINE)
_FLAGS = re.compile(r"^-- FLAGS (.+)$", re.MULTILINE)
_PROBES_ITSELF = re.compile(r"^-- PROBES itself", re.MULTILINE)


# A function of a part, with the comment above it: it begins and ends at the margin.
_FUNCTION = re.compile(
    r"(?:^--[^\n]*\n)*^local function (?P<name>\w+)\((?:[^\n]* end\n|.*?^end\n)", re.M | re.S
)
_WORD = re.compile(r"\w+")
# A constant that is a number, at the margin.
_CONSTANT = re.compile(r"^local ([A-Z][A-Z0-9_]*) = (-?[0-9][0-9.]*)[ \t]*(?:--[^\n]*)?\n", re.M)


class ScriptError(Exception):
    """A Lua file does not keep its contract: a mistake in the project, not in its use."""


@dataclass(frozen=True, slots=True)
class Part:
    """One Lua file as it stands: what its header declares, and its text."""

    name: str
    keys: dict[str, str]
    arguments: tuple[str, ...]
    takes_rest: bool
    includes: tuple[str, ...]
    flags: str
    probes_itself: bool
    text: str


@dataclass(frozen=True, slots=True)
class Script:
    """A script that is ready to be sent."""

    name: str
    keys: tuple[str, ...]
    arguments: tuple[str, ...]
    takes_rest: bool
    text: str
    plain_text: str
    sha: str


def lua_folder() -> Path:
    """Where the Lua files are: inside the installed package, or beside it in a checkout."""
    inside = Path(str(files("fairqueue"))) / "lua"
    return inside if inside.is_dir() else inside.parent.parent / "lua"


def script_files() -> dict[str, Path]:
    """Map each script to its file. Folders only group scripts: a name is used once.

    Raises ScriptError if two files have the same name.
    """
    found: dict[str, Path] = {}
    for path in sorted(lua_folder().glob("*/*.lua")):
        if path.stem in found:
            raise ScriptError(f"two files are named {path.name}: {found[path.stem]} and {path}")
        found[path.stem] = path
    return {name: path for name, path in found.items() if path.parent.name != LIB}


@cache
def script_names() -> list[str]:
    """List the scripts by name."""
    return sorted(script_files())


def read_part(path: Path) -> Part:
    """Read one Lua file. Raises ScriptError for a header that names an unknown key or type."""
    text = path.read_text(encoding="utf-8")
    keys: dict[str, str] = {}
    arguments: list[str] = []
    takes_rest = False
    for kind, name, declared_type in _DECLARATION.findall(text):
        if kind == "KEYS":
            if KEY_TYPES.get(name) != declared_type:
                raise ScriptError(f"{path.name}: key {name} is no {declared_type} in keys.py")
            keys[name] = declared_type
        elif name == "...":
            takes_rest = True
        else:
            arguments.append(name)
    include = _INCLUDE.search(text)
    flags = _FLAGS.search(text)
    return Part(
        name=path.stem,
        keys=keys,
        arguments=tuple(arguments),
        takes_rest=takes_rest,
        includes=tuple(include.group(1).split()) if include else (),
        flags=flags.group(1).strip() if flags else "",
        probes_itself=_PROBES_ITSELF.search(text) is not None,
        text=text,
    )


def parts_of(name: str) -> list[Part]:
    """The included parts of a script in the order of need, then the script itself.

    Raises ScriptError for a circle of includes.
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
    """A script without the functions of its parts that it never calls.

    A function of Lua has room for 200 local variables, and each function of a part is one.
    """
    while True:
        counts = Counter(_WORD.findall(text))
        unused = [found[0] for found in _FUNCTION.finditer(text) if not _is_used(found, counts)]
        if not unused:
            return text
        for function in unused:
            text = text.replace(function, "", 1)


def with_numbers(text: str) -> str:
    """A script with its constants put in where they are used: each would be a local variable, too.

    Raises ScriptError for a constant whose name also stands in quotes, as words of Redis do.
    """
    numbers = dict(_CONSTANT.findall(text))
    for name in numbers:
        if f"'{name}'" in text:
            raise ScriptError(f"constant {name} has the name of a word in quotes")
    text = _CONSTANT.sub("", text)
    return _WORD.sub(lambda word: numbers.get(word[0], word[0]), text)


def _is_used(function: re.Match[str], counts: Counter[str]) -> bool:
    """Whether a function is named elsewhere than in itself."""
    name = function["name"]
    return counts[name] > _WORD.findall(function[0]).count(name)


@cache
def load_script(name: str) -> Script:
    """Put a script together from its parts; done once for each."""
    parts = parts_of(name)
    main = parts[-1]
    keys = {key: type_ for part in parts for key, type_ in part.keys.items()}
    arguments = list(dict.fromkeys(argument for part in parts for argument in part.arguments))
    lines = [
        "local K = { " + ", ".join(f"{k} = KEYS[{i}]" for i, k in enumerate(keys, 1)) + " }",
        "local A = { " + ", ".join(f"{a} = ARGV[{i}]" for i, a in enumerate(arguments, 1)) + " }",
        f"local FIRST = {len(arguments) + 1}",
    ]
    texts = [part.text for part in parts]
    if not any(part.name == "fair" for part in parts):  # which reads it with all else of that key
        texts.insert(1, "check_layout(redis.call('HGET', K.fair, 'layout'))\n")
    if "no-writes" not in main.flags:
        # The key `fair` is read in any case.
        probed = {key: _TYPE_PROBES[type_] for key, type_ in keys.items() if key != "fair"}
        probes = ", ".join(f"{key} = '{probe}'" for key, probe in probed.items())
        lines += [
            f"local PROBES = {{ {probes} }}",
            "local function probe(name) redis.call(PROBES[name], K[name]) end",
            "local function probe_all() for name in pairs(PROBES) do probe(name) end end",
        ]
        if not main.probes_itself:
            lines.append("probe_all()")
    body = "\n".join([*lines, with_numbers(without_unused("\n".join(texts)))])
    flags = f" flags={main.flags}" if main.flags else ""
    text = f"#!lua{flags}\n{body}"
    return Script(
        name=name,
        keys=tuple(keys),
        arguments=tuple(arguments),
        takes_rest=main.takes_rest,
        text=text,
        plain_text=body,
        sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(),
    )
