"""The Lua files keep their contract: headers, rows, includes, and shared constants."""

import re
import shutil
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import redis

from fairqueue.access.credentials import MAX_KEYS
from fairqueue.doctor import MOST_LEASES
from fairqueue.link import scripts
from fairqueue.link.driver import MAX_TIMEOUT_S
from fairqueue.link.keys import KEY_TYPES
from fairqueue.link.scripts import (
    Part,
    ScriptError,
    load_script,
    lua_folder,
    parts_of,
    read_part,
    script_files,
    with_numbers,
    with_places,
    with_rows,
    without_unused,
)
from fairqueue.link.scripts import script_names as names
from fairqueue.metrics.collectors import _COUNTERS
from fairqueue.models import DIGESTED_BYTES, QueueSettings
from fairqueue.outcomes import LETTERS, NEVER_RAN, OUTCOMES, STATUS_OF_STATE, ended_status
from fairqueue.queue.claim import LONGEST_WAIT_S
from fairqueue.queue.settings import MOST_SLOTS
from fairqueue.schedules.changes import CHANGES_LISTED
from fairqueue.schedules.outcomes import NOTES_KEPT
from fairqueue.stats.facts import AFTER_THE_LAST_MS
from fairqueue.stats.samples import COARSE_MS, FINE_MS
from fairqueue.validation import Priority

FOLDER = lua_folder()
FILES = sorted(FOLDER.rglob("*.lua"))
FILE_IDS = [str(path.relative_to(FOLDER)) for path in FILES]

# Scripts that a full queue needs to drain, and scripts that only read.
DRAINS = {"claim", "finish", "retry", "release", "bury", "cancel", "extend", "lead", "resign"}
DRAINS |= {"heartbeat", "discard", "prune"}
READS = {path.stem for path in (FOLDER / "read").glob("*.lua")}

STORES = {"push", "fire", "revive", "add_schedules", "configure", "set_user", "set_limits"}

every_file = pytest.mark.parametrize("path", FILES, ids=FILE_IDS)
every_script = pytest.mark.parametrize("name", names())


def code_of(path: Path) -> str:
    """The text without its comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(re.sub(r"(^|\s)--.*$", "", line) for line in lines)


def with_includes(path: Path) -> list[Part]:
    """A file's part and all that it includes, itself last."""
    if path.parent.name != "lib":
        return parts_of(path.stem)
    own = read_part(path)
    found: dict[str, Part] = {}

    def visit(part: Part) -> None:
        found[part.name] = part
        for include in (*part.includes, *part.uses):
            if include not in found:
                visit(read_part(FOLDER / "lib" / f"{include}.lua"))

    visit(own)
    del found[own.name]
    return [*found.values(), own]


@every_file
def test_every_declared_key_argument_and_row_field_is_used(path: Path) -> None:
    part = read_part(path)
    # A shared part may declare keys and arguments for the files that include it.
    users = [path]
    if path.parent.name == "lib":
        users += [p for p in FILES if path.stem in {x.name for x in with_includes(p)[:-1]}]
    code = "\n".join(code_of(user) for user in users)
    unused = [key for key in part.keys if not re.search(rf"\bK\.{key}\b", code)]
    unused += [name for name in part.arguments if not re.search(rf"\bA\.{name}\b", code)]
    unused += [name for name in part.row if not re.search(rf"\bR\.{name}\[i\]", code_of(path))]
    assert unused == []
    assert bool(part.row) == ("FIRST" in code_of(path))


@every_file
def test_every_used_key_argument_and_row_field_is_declared(path: Path) -> None:
    parts = with_includes(path)
    keys = {key for part in parts for key in part.keys}
    arguments = {name for part in parts for name in part.arguments}
    code = code_of(path)
    assert set(re.findall(r"\bK\.(\w+)", code)) <= keys
    assert set(re.findall(r"\bA\.(\w+)", code)) <= arguments
    assert set(re.findall(r"\bR\.(\w+)", code)) <= set(parts[-1].row)


@every_file
def test_no_key_or_argument_is_reached_by_its_number(path: Path) -> None:
    code = code_of(path)
    assert "KEYS" not in code
    assert code.count("ARGV") == code.count("#ARGV")
    # `i` goes from FIRST by rows; with one field, a row is one argument.
    loops = re.findall(r"for i = (.+), #ARGV(.*) do", code)
    starts = re.findall(r"local i = (\S+) \+ \(n - 1\) \* (\w+)$", code, re.M)
    step = ", ROW" if len(read_part(path).row) > 1 else ""
    assert {*loops, *((first, f", {by}") for first, by in starts)} <= {("FIRST", step)}
    assert bool(loops) == ("R." in code)


@every_file
def test_no_command_walks_the_whole_database(path: Path) -> None:
    commands = set(re.findall(r"call\w*\('(\w+)'", code_of(path)))
    assert not commands & {"KEYS", "SCAN", "HSCAN", "ZSCAN", "SSCAN", "EVAL", "FLUSHDB", "FLUSHALL"}
    # No command is composed at run time, where this test could not see it.
    indirect = re.findall(r"redis\.p?call\((?!')(.*?),", code_of(path))
    assert indirect in ([], ["command"])
    assert re.findall(r"call_with\((?!'|command, key, list\))", code_of(path)) == []


@every_file
def test_a_file_opens_with_one_sentence_about_itself(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert re.fullmatch(r"-- [A-Z].*\.", first)
    assert len(first) <= 100


@every_script
def test_every_script_says_what_it_returns(name: str) -> None:
    header = script_files()[name].read_text(encoding="utf-8").split("\n\n")[0]
    assert re.search(r"^-- Returns ", header, re.MULTILINE), header


@every_script
def test_the_flags_say_which_scripts_may_run_when_memory_is_full(name: str) -> None:
    flags = read_part(script_files()[name]).flags
    if name in READS:
        assert flags == "no-writes"
    elif name in DRAINS:
        assert flags == "allow-oom"
    else:
        assert flags in ("", "allow-oom")
    assert name not in STORES or flags == ""


@every_script
def test_every_script_compiles_on_the_server(name: str, redis_client: redis.Redis) -> None:
    script = load_script(name)
    assert redis_client.script_load(script.text) in (script.sha, script.sha.encode())
    assert script.text.startswith("#!lua")
    assert not script.plain_text.startswith("#!")


LUA_CALLS = {"tonumber", "tostring", "type", "ipairs", "pairs", "next", "pcall", "unpack", "error"}
LUA_WORDS = {"if", "elseif", "and", "or", "not", "return", "function", "in", "while", "until"}


@every_script
def test_every_function_is_defined_before_it_is_called(name: str) -> None:
    """Otherwise Lua would look for a global, and raise in the middle of the script."""
    code = re.sub(r"--.*|'[^'\n]*'", "", load_script(name).text)
    calls = {word for word in re.findall(r"(?<![\w.:])(\w+)\(", code) if not word[0].isdigit()}
    for called in calls - LUA_CALLS - LUA_WORDS:
        names = rf"(\w+, )*{called}(, \w+)*"
        defined = re.search(
            rf"local function {called}\(|local {names}( =|$)|\({names}\)|for {names} in", code, re.M
        )
        assert defined is not None, called
        first = re.search(rf"(?<![\w.:])(?<!function ){called}\(", code)
        assert first is None or defined.start() < first.start(), called


@every_script
def test_a_script_has_room_for_its_local_variables(name: str) -> None:
    """Lua allows 200 local variables in a function, and a script is a function.

    So is each of its lazy parts.
    """
    lazy = re.compile(r"^do\nlocal made\n.*?^return made\nend\nend\n", re.M | re.S)
    text = load_script(name).text
    for each in (lazy.sub("", text), *lazy.findall(text)):
        outside = re.findall(r"^local (?:function )?([\w, ]+?)(?: =|\(|$)", each, re.M)
        assert sum(len(names.split(",")) for names in outside) <= 196


def test_functions_that_nothing_calls_are_removed() -> None:
    text = """local ONE = 1

-- Called only by a function that nothing calls.
local function one()
  return ONE
end

local function two() return one() end

-- Calls itself.
local function three(n)
  if n > 0 then
    return three(n - 1)
  end
end

local function four(n) return n end

-- A comment that stays.
local function five(n)
  return four(n)
end

return five(1)
"""
    left = without_unused(text)
    assert re.findall(r"local function (\w+)", left) == ["four", "five"]
    assert "Called only by" not in left
    assert "-- A comment that stays.\nlocal function five" in left
    assert left.endswith("return five(1)\n")


def test_functions_that_only_call_each_other_are_removed() -> None:
    text = "local function a() return b() end\nlocal function b() return a() end\nreturn 1\n"
    assert without_unused(text) == "return 1\n"


@every_script
def test_no_comment_is_sent_or_keeps_a_function(name: str) -> None:
    assert not re.search(r"^\s*--", load_script(name).text, re.M)


@every_script
def test_every_key_of_a_script_is_declared_once_and_has_a_type(name: str) -> None:
    script = load_script(name)
    assert len(set(script.keys)) == len(script.keys)
    assert set(script.keys) <= KEY_TYPES.keys()
    assert len(set(script.arguments)) == len(script.arguments)


@every_script
def test_every_script_checks_the_layout_of_the_queue_once(name: str) -> None:
    text = load_script(name).plain_text.replace("local function check_layout(", "")
    assert text.count("check_layout(") == 1


@every_script
def test_a_script_that_writes_probes_its_keys_before_anything_else(name: str) -> None:
    script, part = load_script(name), read_part(script_files()[name])
    before, probes, _ = script.plain_text.partition("\nprobe_all()\n")
    if name in READS:
        assert "probe_all" not in script.plain_text
    elif part.probes_itself:
        assert re.search(r"\bprobe(_all)?\(", code_of(script_files()[name]))
    else:
        assert probes
        _, _, probed = before.partition("local function probe_all()\n")
        assert re.fullmatch(r"(redis\.call\('(\w+)', KEYS\[\d+\]\)\n)+end", probed)
        assert probed.count("redis.call") == before.count("redis.call")


def test_a_lazy_part_is_made_when_it_is_called_and_probes_its_own_keys_then(
    copied: Path, redis_client: redis.Redis
) -> None:
    (copied / "lib" / "a.lua").write_text(
        "-- LAZY\n-- @include time\n-- KEYS tasks  hash  x\n-- KEYS ended  zset  x\n"
        "local a = {}\nfunction a.age() return now - 1 end\nreturn a\n"
    )
    (copied / "task" / "mine.lua").write_text(
        "-- @lazy a\n-- KEYS tasks  hash  x\n-- ARGV id  text  x\n"
        "if A.id ~= '' then return a().age() + a().age() end\nreturn redis.call('HLEN', K.tasks)\n"
    )
    load_script.cache_clear()
    script = load_script("mine")
    assert [part.name for part in parts_of("mine")] == ["layout", "time", "a", "mine"]
    keys = [f"k:{key}" for key in script.keys]
    redis_client.set("k:ended", "text")
    call = partial(redis_client.eval, script.text, len(keys), *keys)
    values = {"now_ms": "10", "id": ""}
    assert call(*(values[name] for name in script.arguments)) == 0
    values["id"] = "1"
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        call(*(values[name] for name in script.arguments))
    redis_client.delete("k:ended")
    assert call(*(values[name] for name in script.arguments)) == 18


def test_keys_and_arguments_become_places() -> None:
    text = with_places("K.b, K.a, R.b, OK.b", "K", ["a", "b"], "KEYS")
    assert text == "KEYS[2], KEYS[1], R.b, OK.b"
    with pytest.raises(ScriptError, match=r"K\.c: no header declares c"):
        with_places("K.c", "K", ["a", "b"], "KEYS")


def test_every_key_is_used_by_some_script() -> None:
    used = {key for name in names() for key in load_script(name).keys}
    assert used == KEY_TYPES.keys()


def test_every_shared_part_is_included_by_some_script() -> None:
    included = {part.name for name in names() for part in parts_of(name)[:-1]}
    assert included == {path.stem for path in (FOLDER / "lib").glob("*.lua")}


# --- includes -------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the Lua files that a test may change."""
    folder = tmp_path / "lua"
    shutil.copytree(FOLDER, folder)
    monkeypatch.setattr(scripts, "lua_folder", lambda: folder)
    return folder


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        ({"lib/a": "-- @include a"}, "mine -> a -> a"),
        ({"lib/a": "-- @include b", "lib/b": "-- @include a"}, "mine -> a -> b -> a"),
        (
            {"lib/a": "-- @include time b", "lib/b": "-- @include c", "lib/c": "-- @include b"},
            "mine -> a -> b -> c -> b",
        ),
    ],
)
def test_a_circle_of_includes_is_found(copied: Path, files: dict[str, str], circle: str) -> None:
    (copied / "task" / "mine.lua").write_text("-- Mine.\n--\n-- @include a\n")
    for name, text in files.items():
        (copied / f"{name}.lua").write_text(text + "\n")
    with pytest.raises(ScriptError, match=f"circle of includes: {circle}"):
        parts_of("mine")


def test_a_part_that_two_others_include_comes_once_and_first(copied: Path) -> None:
    (copied / "lib" / "a.lua").write_text("-- @include time\n")
    (copied / "lib" / "b.lua").write_text("-- @include time a\n")
    (copied / "task" / "mine.lua").write_text("-- @include b a\n")
    assert [part.name for part in parts_of("mine")] == ["layout", "time", "a", "b", "mine"]


@every_script
def test_no_script_includes_itself_in_a_circle(name: str) -> None:
    parts = [part.name for part in parts_of(name)]
    assert len(set(parts)) == len(parts)
    assert parts[-1] == name


def test_two_files_of_one_name_are_refused(copied: Path) -> None:
    (copied / "read" / "push.lua").write_text("-- Mine.\n")
    with pytest.raises(ScriptError, match=r"two files are named push\.lua"):
        script_files()


@pytest.mark.parametrize(
    "line", ["-- KEYS nonsense  hash  x", "-- KEYS tasks  zset  x", "-- KEYS tasks"]
)
def test_a_header_with_an_unknown_key_or_type_is_refused(copied: Path, line: str) -> None:
    (copied / "task" / "mine.lua").write_text(line + "\n")
    with pytest.raises(ScriptError, match=r"mine\.lua: key \w+ is not a"):
        parts_of("mine")


# --- rows -----------------------------------------------------------------------------------------


def test_a_row_is_packed_in_the_order_of_the_header_whatever_the_order_of_its_fields() -> None:
    script = load_script("extend")
    assert script.fields == ("id", "token", "timeout_ms")
    assert script.row(timeout_ms=7, id="a", token="b") == ("a", "b", 7)


@pytest.mark.parametrize(
    "fields", [{"id": 1, "token": 2}, {"id": 1, "token": 2, "timeout_ms": 3, "user": 4}]
)
def test_a_row_with_a_missing_or_an_unknown_field_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(TypeError):
        load_script("extend").row(**fields)


def test_a_script_without_rows_packs_nothing() -> None:
    assert load_script("claim").fields == ()
    assert load_script("claim").row() == ()


def test_row_fields_are_read_from_their_places() -> None:
    assert with_rows("f(R.b[i], R.a[j], A.b)", ("a", "b")) == "f(ARGV[i + 1], ARGV[j], A.b)"


def test_a_row_field_that_no_header_declares_is_refused() -> None:
    with pytest.raises(ScriptError, match="row field c"):
        with_rows("R.c[i]", ("a", "b"))


@pytest.mark.parametrize("lines", ["-- ROW id  text  x", "-- ARGV ...  tasks"])
def test_rows_and_what_they_are_go_together(copied: Path, lines: str) -> None:
    (copied / "task" / "mine.lua").write_text(f"-- Mine.\n{lines}\n")
    with pytest.raises(ScriptError, match=r"mine\.lua: declare"):
        parts_of("mine")


# --- where they are -------------------------------------------------------------------------------


def test_scripts_are_found_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "files", lambda package: tmp_path / "fairqueue")
    assert lua_folder() == tmp_path / "lua"


def test_scripts_are_found_when_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "fairqueue" / "lua"
    shutil.copytree(FOLDER, inside)
    monkeypatch.setattr(scripts, "files", lambda package: tmp_path / "fairqueue")
    assert lua_folder() == inside
    assert script_files().keys() == set(names())
    assert [part.name for part in parts_of("push")][-1] == "push"


def test_the_names_of_the_scripts_are_the_transitions() -> None:
    transitions = {"push", "claim", "finish", "retry", "release", "bury", "cancel", "extend"}
    assert transitions | READS | {"set_user", "configure"} <= set(names())


# --- what Lua and Python both say -----------------------------------------------------------------


def test_the_defaults_of_the_settings_are_the_same_in_lua_and_python() -> None:
    text = (FOLDER / "lib" / "settings.lua").read_text(encoding="utf-8")
    table = re.search(r"local SETTINGS = \{(.*?)\n\}", text, re.DOTALL)
    assert table is not None
    in_lua: dict[str, object] = {}
    for name, value in re.findall(r"(\w+) = (\S+),", table.group(1)):
        in_lua[name] = value.strip("'") if value.startswith("'") else float(value)
    in_python: dict[str, object] = {}
    for field in fields(QueueSettings):
        value = field.default
        if field.name.endswith("_for") or field.name in ("ageing", "min_interval"):
            assert isinstance(value, float)
            in_python[field.name.removesuffix("_for") + "_ms"] = value * 1000
        else:
            in_python[field.name] = float(value) if isinstance(value, int | float) else value
    assert in_lua.pop("waiting_room") == -1  # of a partition, which nobody sets
    assert in_lua == in_python


def constant(file: str, name: str) -> float:
    """The number that a Lua file gives to a constant."""
    match = re.search(rf"^local {name} = ([0-9.]+)", (FOLDER / file).read_text("utf-8"), re.M)
    assert match is not None, f"{file} has no constant {name}"
    return float(match[1])


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        # The client gives up before Redis forgets the answer to an operation.
        ("lib/replay.lua", "REPLAY_MS", 2 * MAX_TIMEOUT_S * 1000),
        ("lib/backlog.lua", "CRITICAL", Priority.CRITICAL),
        ("lib/changes.lua", "CHANGES_KEPT", CHANGES_LISTED),
        ("lib/credentials.lua", "KEY_LIMIT", MAX_KEYS),
        ("lib/delays.lua", "AFTER_THE_LAST", AFTER_THE_LAST_MS),
        ("lib/enqueue.lua", "DIGESTED", DIGESTED_BYTES),
        ("lib/gates.lua", "SLOTS_CHECKED", MOST_SLOTS),
        ("lib/moments.lua", "MOMENTS_KEPT", NOTES_KEPT),
        ("maintenance/repair_tasks.lua", "MOST_LEASES", MOST_LEASES),
        ("maintenance/sample.lua", "FINE_MS", FINE_MS),
        ("maintenance/sample.lua", "COARSE_MS", COARSE_MS),
        ("task/claim.lua", "LONGEST_WAIT_MS", LONGEST_WAIT_S * 1000),
    ],
)
def test_a_constant_is_the_same_in_lua_and_python(file: str, name: str, value: float) -> None:
    assert constant(file, name) == value


def test_the_words_for_ends_are_the_same_in_lua_and_python() -> None:
    text = (FOLDER / "lib" / "outcomes.lua").read_text(encoding="utf-8")
    tables = {
        name: dict(re.findall(r"(\w+) = '(\w+)'", entries))
        for name, entries in re.findall(r"^local (\w+) = \{ ([^{}]*) \}$", text, re.M)
    }
    assert tables["LETTERS"] == LETTERS
    assert tables["OUTCOME_OF_STATE"] == STATUS_OF_STATE
    assert tables["COUNTER_OF_STATE"] == {
        each.state: each.counter
        for each in OUTCOMES
        if each.counter not in (each.state, "timed_out")
    }
    assert f"local NEVER_RAN = '{NEVER_RAN}'" in text
    ended_runs = (FOLDER / "lib" / "ended_runs.lua").read_text(encoding="utf-8")
    listed = ", ".join(f"'{outcome.status}'" for outcome in OUTCOMES if outcome.status != "expired")
    assert f"local OUTCOMES = {{ {listed} }}" in ended_runs
    for outcome in OUTCOMES:
        timed_out = outcome.status == "timed_out"
        assert ended_status(outcome.state, timed_out=timed_out) == outcome.status
        assert outcome.counter in _COUNTERS


def test_constants_are_replaced_by_their_numbers() -> None:
    text = "local MOST = 10  -- so many\nlocal NAMES = { 'a' }\nreturn MOST + 1, NAMES, ALMOST\n"
    assert with_numbers(text) == "local NAMES = { 'a' }\nreturn 10 + 1, NAMES, ALMOST\n"


def test_a_constant_with_the_name_of_a_string_is_refused() -> None:
    with pytest.raises(ScriptError, match="LIMIT"):
        with_numbers("local LIMIT = 10\nredis.call('ZRANGE', K.ready, 0, 1, 'LIMIT', 0, LIMIT)\n")
