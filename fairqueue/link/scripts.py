"""Load the Lua scripts: one file per transition, each with a header that is its contract.

A header declares the keys and arguments of its script by name; `@include` adds shared parts from
`lua/lib` with theirs. This module assigns the positions, so that neither Lua nor Python counts
them. Lua files have keys as `K.<key>` and arguments as `A.<argument>`, which become places in KEYS
and ARGV: a table of names would have to be built in each call. Arguments that repeat are rows: the
header names the fields of a row, Lua reads `R.<field>[i]` for each `i = FIRST, #ARGV, ROW`, and
Python packs a row by keyword with `Script.row`.

A part whose header says LAZY is one function that makes a table of functions when it is first
called: `rings().place(...)`. Its functions cost nothing in a call that does not need them. Files
name such parts in a line `@lazy`; they come after all other parts, whose functions they may call.
A part that only one lazy part includes is made with it. A lazy part checks the types of its keys
when it is made, so a script makes the parts that it may need before its first write: it calls them,
or the header of the part says when (`LAZY UNLESS <condition>`).
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_USES_LAZY = re.compile(r"^-- @lazy (.+)$", re.MULTILINE)
_IS_LAZY = re.compile(r"^-- LAZY(?: UNLESS (.+))?$", re.MULTILINE)
_FLAGS = re.compile(r"^-- FLAGS (.+)$", re.MULTILINE)
_PROBES_ITSELF = re.compile(r"^-- PROBES itself", re.MULTILINE)
_ROW_FIELD = re.compile(r"\bR\.(\w+)\[(\w+)\]")
_PROBE = re.compile(r"\bprobe\('(\w+)'\)")

# A function, or a table of constants in capitals, with the comment above it. A function begins and
# ends in the first column.
_FUNCTION = re.compile(
    r"(?:^--[^\n]*\n)*^local (?:"
    r"function (?P<function>\w+)\((?:[^\n]* end\n|.*?^end\n)"
    r"|(?P<table>[A-Z][A-Z0-9_]*) = \{[^{}]*\}[ \t]*(?:--[^\n]*)?\n)",
    re.M | re.S,
)
_COMMENT = re.compile(r"^[ \t]*--[^\n]*\n", re.M)
_WORD = re.compile(r"\w+")
_CAPITALS = re.compile(r"\b[A-Z][A-Z0-9_]*\b")
# Marks where a part begins, for with_stages.
_STAGE = "_stage_\n"
STAGE_FUNCTIONS = 25  # with fewer functions in a stage, scripts were not faster
MOST_TAKEN = 58  # variables from around it that a function of Lua can use: 60, less two to be safe
# A constant number, declared in the first column.
_CONSTANT = re.compile(r"^local ([A-Z][A-Z0-9_]*) = (-?[0-9][0-9.]*)[ \t]*(?:--[^\n]*)?\n", re.M)


class ScriptError(Exception):
    """A Lua file breaks its contract. This is a bug in FairQueue, not in its use."""


@dataclass(frozen=True, slots=True)
class Part:
    """One Lua file: the declarations of its header, and its code without lines of comments.

    uses: the lazy parts that it calls. made_if: the condition, in Lua, under which a lazy part is
    made before the script begins.
    """

    name: str
    keys: dict[str, str]
    arguments: tuple[str, ...]
    row: tuple[str, ...]
    includes: tuple[str, ...]
    uses: tuple[str, ...]
    is_lazy: bool
    made_if: str
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
    include, uses = _INCLUDE.search(text), _USES_LAZY.search(text)
    lazy = _IS_LAZY.search(text)
    flags = _FLAGS.search(text)
    return Part(
        name=path.stem,
        keys=keys,
        arguments=tuple(arguments),
        row=tuple(row),
        includes=tuple(include.group(1).split()) if include else (),
        uses=tuple(uses.group(1).split()) if uses else (),
        is_lazy=lazy is not None,
        made_if=(lazy and lazy[1]) or "",
        flags=flags.group(1).strip() if flags else "",
        probes_itself=_PROBES_ITSELF.search(text) is not None,
        text=_COMMENT.sub("", text),
    )


def parts_of(name: str) -> list[Part]:
    """Return the parts of a script, each after those it includes, and the script itself last.

    Lazy parts come after the others. Raises ScriptError if parts include each other in a circle.
    """
    folder = lua_folder()
    ordered: dict[str, Part] = {}
    lazy: dict[str, Part] = {}

    def visit(part: Part, above: tuple[str, ...]) -> None:
        if part.name in above:
            raise ScriptError("circle of includes: " + " -> ".join((*above, part.name)))
        for include in part.includes:
            if include not in ordered:
                visit(read_part(folder / LIB / f"{include}.lua"), (*above, part.name))
        (lazy if part.is_lazy else ordered)[part.name] = part
        for used in part.uses:
            if used not in lazy:
                visit(read_part(folder / LIB / f"{used}.lua"), ())

    main = read_part(script_files()[name])
    visit(read_part(folder / LIB / f"{LAYOUT}.lua"), ())
    visit(main, ())
    del ordered[name]
    return [*ordered.values(), *lazy.values(), main]


_SHARED = "SHARED"  # returns the table of what the lazy parts of a script use of it
_REST = "REST"  # returns the functions that only lazy parts use
_DECLARED = re.compile(r"^local (?:function (\w+)|([\w, ]+?)(?: =|$))", re.M)
# Variables that get a value; fields of tables, which follow a dot, do not count.
_ASSIGNED = re.compile(r"(?<![\w.])(\w+(?:, \w+)*) = ")


def as_lazy(name: str, text: str, taken: str, probes: str = "") -> str:
    """Return a text as a function that runs it when it is first called, and keeps its result.

    taken: Lua that declares what the text uses of the script. A function takes each variable that
    it uses from around it when it is made, and that is what making a function costs: so these come
    from a table. The text is in a function of its own, because a function has room for 200 local
    variables.
    """
    return f"""do
local made
{name} = function()
if not made then
{probes}made = (function()
{taken}{text}end)()
end
return made
end
end
"""


def _declared(text: str) -> set[str]:
    """The local variables that a text declares in the first column."""
    return {
        name.strip()
        for function, names in _DECLARED.findall(text)
        for name in (function or names).split(",")
    }


def _assigned(text: str) -> set[str]:
    """The variables to which a text assigns values after their declaration, and maybe others."""
    lines = "\n".join(line for line in text.split("\n") if not line.startswith("local "))
    return {name for listed in _ASSIGNED.findall(lines) for name in listed.split(", ")}


def _functions(text: str) -> list[str]:
    return [_name(found) for found in _FUNCTION.finditer(text)]


def _taken_from(maker: str, names: Iterable[str]) -> str:
    """Lua that declares variables with the values of a table, which a function returns."""
    listed = sorted(names)
    values = ", ".join(f"{maker}.{name}" for name in listed)
    return f"local {maker} = {maker}()\nlocal {', '.join(listed)} = {values}\n" if listed else ""


def _shared_by(names: Iterable[str]) -> str:
    """Lua that declares the function which makes the table of what lazy parts use."""
    return f"local {_SHARED}\n" + as_lazy(_SHARED, f"return {_as_table(names)}\n", "")


def _as_table(names: Iterable[str]) -> str:
    return "{ " + ", ".join(f"{name} = {name}" for name in sorted(names)) + " }"


def _assembled(first: str, lazy: Sequence[tuple[str, str, str]], last: str) -> str:
    """Join the parts of a script, the lazy parts (name, text and probes), and the script itself.

    Functions that nothing calls are left out; those that only lazy parts call are made when one of
    these is.
    """
    if not lazy:
        return without_unused(first + _STAGE + last)
    names = [name for name, _, _ in lazy]
    marked = [f"\n{_SHARED}_{name}\n{text}\n" for name, text, _ in lazy]
    whole = without_unused("".join([first, *marked, f"\n{_SHARED}_\n", last]))
    whole_first, *texts, last = re.split(rf"\n{_SHARED}_\w*\n", whole)
    always = set(_functions(without_unused(first + last)))
    rest = "".join(f[0] for f in _FUNCTION.finditer(whole_first) if _name(f) not in always)
    first = _FUNCTION.sub(lambda f: f[0] if _name(f) in always else "", whole_first)
    numbers = {name for name, _ in _CONSTANT.findall(whole_first)}
    # A variable that changes cannot be copied.
    outside = _declared(first) - set(names) - numbers - _assigned(whole_first)
    shared = outside & _words("".join([rest, *texts]))
    made = [_STAGE + _shared_by(shared)]
    if rest:
        text = rest + f"return {_as_table(_functions(rest))}\n"
        made += [
            f"local {_REST}\n",
            as_lazy(_REST, text, _taken_from(_SHARED, shared & _words(rest))),
        ]
    for (name, _, probes), text in zip(lazy, texts, strict=True):
        words = _words(text) - _declared(text)
        taken = _taken_from(_SHARED, shared & words)
        taken += _taken_from(_REST, set(_functions(rest)) & words)
        made.append(as_lazy(name, text, taken, probes))
    return "\n".join([first, *made, last])


def made_with(parts: Sequence[Part]) -> dict[str, list[Part]]:
    """Map each lazy part to the parts of a script that only it includes, in their order."""
    by_name = {part.name: part for part in parts}

    def included(part: Part) -> set[str]:
        return set(part.includes).union(*(included(by_name[name]) for name in part.includes))

    always = included(parts[-1]) | {LAYOUT}
    needed = {part.name: included(part) - always for part in parts if part.is_lazy}
    users = Counter(name for names in needed.values() for name in names)
    return {
        lazy: [part for part in parts if part.name in names and users[part.name] == 1]
        for lazy, names in needed.items()
    }


def without_unused(text: str) -> str:
    """Remove the functions and the tables of constants that the rest of the text does not need.

    Lua allows 200 local variables in a function, and each function of a part is one.
    """
    functions: dict[str, frozenset[str]] = {}  # name -> words in it
    for found in _FUNCTION.finditer(text):
        functions[_name(found)] = functions.get(_name(found), frozenset()) | _words(found[0])
    used: set[str] = set()
    new = functions.keys() & _WORD.findall(_FUNCTION.sub("", text))
    while new:
        used |= new
        new = functions.keys() & frozenset().union(*(functions[name] for name in new)) - used
    return _FUNCTION.sub(lambda found: found[0] if _name(found) in used else "", text)


def _name(found: re.Match[str]) -> str:
    """The name of a function or a table."""
    return str(found["function"] or found["table"])


@cache
def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text))


def with_stages(text: str) -> str:
    """Put what follows some of the marks into a function of its own.

    To make a function, Lua looks up each local variable that it uses in a list of all that are in
    use, the last one first. What comes from around the function in which it is made is taken
    without looking. So it costs less to make functions if the variables of the parts before are
    outside. A stage has a number of functions before it: to make the stage is work, too.
    """
    first, *others = text.split(_STAGE)
    following = [frozenset[str]()]  # the words of each part and of all after it
    for each in reversed(others):
        following.insert(0, following[0] | _words(each))
    made, declared, stages, before = [first], _declared(first), 0, len(_functions(first))
    for number, each in enumerate(others):
        taken = declared & following[number]
        if before >= STAGE_FUNCTIONS and len(taken) <= MOST_TAKEN:
            made.append("return (function()\n")
            stages, before = stages + 1, 0
        made.append(each)
        declared |= _declared(each)
        before += len(_functions(each))
    return "".join(made) + "end)()\n" * stages


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


def with_places(text: str, name: str, declared: Sequence[str], places: str) -> str:
    """Replace `<name>.<declared>` by its place in KEYS or ARGV.

    Raises ScriptError for one that no header declares.
    """
    numbers = {each: number for number, each in enumerate(declared, 1)}

    def place(found: re.Match[str]) -> str:
        if found[1] not in numbers:
            raise ScriptError(f"{found[0]}: no header declares {found[1]}")
        return f"{places}[{numbers[found[1]]}]"

    return re.sub(rf"\b{name}\.(\w+)", place, text)


def probe_of(keys: Mapping[str, str], key: str) -> str:
    """Return the command that fails if a key has another type than declared."""
    return f"redis.call('{_TYPE_PROBES[keys[key]]}', K.{key})"


@cache
def load_script(name: str) -> Script:
    """Assemble a script from its parts, once in a process."""
    parts = parts_of(name)
    main, private = parts[-1], made_with(parts)
    elsewhere = {part.name for own in private.values() for part in own}
    keys = {key: type_ for part in parts for key, type_ in part.keys.items()}
    arguments = list(dict.fromkeys(argument for part in parts for argument in part.arguments))
    row = next((part.row for part in parts if part.row), ())
    writes = "no-writes" not in main.flags
    always = [part for part in parts if not part.is_lazy and part.name not in elsewhere]
    probed = _probed(always) if writes else []
    first = [f"local FIRST = {len(arguments) + 1}\nlocal ROW = {len(row)}\n"]
    first += [f"local {lazy}\n" for lazy in private]
    first.append(parts[0].text)
    if not any(part.name == "fair" for part in always):  # which reads all fields of that key
        first.append("check_layout(redis.call('HGET', K.fair, 'layout'))\n")
    first += [_STAGE + part.text for part in always[1:-1]]
    lazy = []
    for part in parts:
        if part.is_lazy:
            own = private[part.name]
            declared = dict.fromkeys(key for each in (*own, part) for key in each.keys)
            unprobed = [key for key in declared if writes and key not in {"fair", *probed}]
            probes = "".join(probe_of(keys, key) + "\n" for key in unprobed)
            text = "".join(each.text for each in (*own, part))
            lazy.append((part.name, text, probes))
    last = [f"if {part.made_if} then {part.name}() end\n" for part in parts if part.made_if]
    last.append(main.text)
    code = _assembled("\n".join(first), lazy, "\n".join(last))
    code = with_rows(with_numbers(code), row)
    lines = ["local KEYS, ARGV = KEYS, ARGV"]
    if writes:
        lines.append("local function probe_all()")
        lines += [probe_of(keys, key) for key in probed]
        lines.append("end")
        if not main.probes_itself:
            lines.append("probe_all()")
    code = _PROBE.sub(lambda found: probe_of(keys, found[1]), "\n".join([*lines, code]))
    code = with_places(code, "K", list(keys), "KEYS")
    body = with_stages(with_places(code, "A", arguments, "ARGV"))
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


def _probed(parts: Sequence[Part]) -> list[str]:
    """Return the keys that a script probes before it writes: those of all parts but lazy ones.

    Every script reads the key `fair`.
    """
    return list(dict.fromkeys(key for part in parts for key in part.keys if key != "fair"))
