"""A user of Redis with the documented rights: they are enough, and they are no more than needed."""

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest
import redis
from helpers.commands import Cli
from helpers.schedules import THURSDAY, add
from helpers.tasks import claim_one, push
from helpers.world import World
from limited import sitecustomize as limited_user
from prometheus_client import CollectorRegistry

import fairqueue
from fairqueue.clock import ManualClock
from fairqueue.doctor import PROBLEM, Doctor
from fairqueue.errors import ConfigurationError, RedisRefused
from fairqueue.history.runs import History
from fairqueue.link.acl import CHANGING, NOT_GRANTED, SENT, acl_line, called_by, needed_commands
from fairqueue.link.keys import Keys
from fairqueue.link.scripts import load_script, script_names
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler

PACKAGE = Path(fairqueue.__file__).parent
GUIDE = PACKAGE.parent / "docs" / "operations.md"
USER, PASSWORD = "fairqueue", "of-this-test"
KEYS = Keys("default")


@dataclass(frozen=True)
class Command:
    """A command of the server. has_keys: whether its arguments name some."""

    name: str
    least_words: int
    flags: frozenset[str]
    has_keys: bool

    @classmethod
    def read(cls, row: Any) -> Iterator[Self]:
        """A command, or its subcommands if it has some, from the answer to COMMAND."""
        if row[9]:
            for sub in row[9]:
                yield from cls.read(sub)
        else:
            flags = frozenset(flag.decode() for flag in row[2])
            has_keys = row[3] != 0 or "movablekeys" in flags
            yield cls(row[0].decode().upper(), abs(row[1]), flags, has_keys)


def commands_of(world: World) -> dict[str, Command]:
    """All commands of the server, subcommands as in CONFIG|GET."""
    # As it came: redis-py leaves subcommands out.
    connection = world.redis.connection_pool.make_connection()
    try:
        connection.connect()
        connection.send_command("COMMAND")
        rows: Any = connection.read_response()
    finally:
        connection.disconnect()
    return {command.name: command for row in rows for command in Command.read(row)}


Granting = Callable[..., redis.Redis]


@pytest.fixture
def granted(redis_client: redis.Redis, redis_url: str) -> Iterator[Granting]:
    """Make the user with a line of `fairqueue acl`; a client that logs in as it."""
    clients = []

    def granted(line: str) -> redis.Redis:
        redis_client.execute_command(*shlex.split(line))
        redis_client.execute_command("ACL", "SETUSER", USER, f">{PASSWORD}")
        clients.append(redis.Redis.from_url(redis_url, username=USER, password=PASSWORD))
        return clients[-1]

    redis_client.execute_command("ACL", "LOG", "RESET")
    yield granted
    for client in clients:
        client.close()
    redis_client.execute_command("ACL", "DELUSER", USER)


@pytest.fixture
def minimal(granted: Granting, clock: ManualClock) -> Iterator[TaskQueue]:
    """A queue whose user may do what the guide says, and no more."""
    with TaskQueue(granted(acl_line(USER)), clock=clock) as queue:
        yield queue


def verdict(world: World, command: Command, *words: object) -> str:
    """What Redis would say to the user: OK, or why not."""
    answer: Any = world.redis.execute_command(
        "ACL", "DRYRUN", USER, *command.name.split("|"), *words
    )
    return str(answer.decode())


def arguments_of(command: Command, key: bytes) -> list[object]:
    """As many arguments as the command needs, all of them this key."""
    if command.name == "EVALSHA":
        return ["x" * 40, 1, key]
    return [key] * (command.least_words - len(command.name.split("|")))


# --- it is enough ---------------------------------------------------------------------------------


def test_the_documented_user_can_do_a_whole_round(minimal: TaskQueue, world: World) -> None:
    world.clock.set(THURSDAY)
    scheduler = TaskScheduler(minimal, registry=CollectorRegistry())
    add(scheduler)
    world.advance(60)
    assert scheduler.tick().fired == 1
    push(minimal, "pushed", user_id="bob")
    for _ in range(2):
        minimal.finish(claim_one(minimal), {"done": True})
    assert {run.status for run in History(minimal).runs()} == {"succeeded"}
    findings = {finding.check: finding for finding in Doctor(minimal).examine()}
    assert [each for each in findings.values() if each.level == PROBLEM] == []
    assert findings["permissions"].text == "all commands are allowed (by ACL DRYRUN)"
    scheduler.stop()
    world.check()


def test_no_refusal_of_redis_is_ignored(minimal: TaskQueue, redis_client: redis.Redis) -> None:
    minimal.check()
    push(minimal, "a")
    minimal.claim("w", wait=0.01)
    Doctor(minimal).examine()
    log: Any = redis_client.acl_log()
    refused = {entry["object"].upper() for entry in log if entry["username"] == USER}
    # redis-py says who it is where it may, and a doctor without CONFIG GET knows less.
    assert refused - {"CLIENT|SETINFO"} == set(NOT_GRANTED)


def test_a_wait_for_a_task_needs_no_more(granted: Granting) -> None:
    with TaskQueue(granted(acl_line(USER))) as queue:
        listener = queue.link.listener("wake")
        assert listener.wait(0.001) is False
        push(queue, "a")
        assert listener.wait(60) is True
        listener.close()


def test_a_user_for_all_queues_has_the_keys_of_all_and_no_others(granted: Granting) -> None:
    client = granted(acl_line(USER, None))
    for name in ("default", "mail"):
        with TaskQueue(client, name) as queue:
            push(queue, "a")
            queue.destroy()
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.get("foreign")


LOOKING = [
    ["status"],
    ["stats"],
    ["metrics"],
    ["schedules", "list"],
    ["schedules", "show", "nine"],
    ["schedules", "moments", "nine"],
    ["schedules", "changes", "nine"],
    ["tasks", "list"],
    ["tasks", "explain", "b"],
    ["runs", "list"],
    ["runs", "show", "a"],
    ["failed", "groups"],
    ["users", "list"],
    ["users", "show", "alice"],
    ["workers", "list"],
    ["keys", "list"],
    ["audit"],
    ["settings"],
    ["doctor", "--quick"],
    ["users", "list", "--order", "name"],
    ["runs", "--user", "alice", "--status", "pending"],
]


def test_a_user_that_may_only_look_sees_all_and_changes_nothing(
    granted: Granting, redis_client: redis.Redis, redis_url: str
) -> None:
    with TaskQueue(redis_client) as queue:
        push(queue, "a", "b")
        queue.finish(claim_one(queue))
        scheduler = TaskScheduler(queue, registry=CollectorRegistry())
        add(scheduler)
        push(queue, "late", user_id="of an older version", delay=60)
        redis_client.delete(KEYS["delayed_index"])  # what looking would put right if it might
    granted(acl_line(USER, read_only=True))
    parts = urlsplit(redis_url)
    address = parts.netloc.rpartition("@")[2]
    cli = Cli(parts._replace(netloc=f"{USER}:{PASSWORD}@{address}").geturl())
    for words in LOOKING:
        done = cli.run(*words)
        # 6: the queue has no leader and no worker, or the doctor cannot do all that there is.
        assert done.code in (0, 6), (words, done)
        assert "NOPERM" not in done.out.replace("+", ""), (words, done)
    for words in (
        ["tasks", "push", "--user", "alice", "--name", "mail"],
        ["tasks", "cancel", "b", "--yes"],
        ["schedules", "remove", "nine", "--yes"],
        ["settings", "max_attempts=8"],
    ):
        assert cli.run(*words).code != 0, words
    with TaskQueue(redis_client) as queue:
        assert (queue.size(), queue.inspect().schedules) == (1, 1)


# --- and no more than that ------------------------------------------------------------------------


def test_every_other_command_of_the_server_is_refused(minimal: TaskQueue, world: World) -> None:
    commands = commands_of(world)
    assert set(needed_commands()) <= commands.keys()
    for name, command in commands.items():
        said = verdict(world, command, *arguments_of(command, KEYS["status"]))
        if name in needed_commands() or "no_auth" in command.flags:  # who says who they are
            assert said == "OK", name
        else:
            assert "no permissions to run the" in said, (name, said)
    always = {name for name, command in commands.items() if "no_auth" in command.flags}
    assert always == {"AUTH", "HELLO", "QUIT", "RESET"}


@pytest.mark.parametrize(
    "key",
    ["foreign", "{fairqueue:mail}:status", "{fairqueue:default2}:status", "{fairqueue:default}"],
)
def test_no_command_may_use_other_keys(minimal: TaskQueue, world: World, key: str) -> None:
    commands = commands_of(world)
    tried = [commands[name] for name in needed_commands() if commands[name].has_keys]
    assert len(tried) > 30
    for command in tried:
        said = verdict(world, command, *arguments_of(command, key.encode()))
        assert f"no permissions to access the '{key}' key" in said, (command, said)


@pytest.mark.parametrize(
    "text",
    [
        "return redis.call('GET', 'foreign')",
        "return redis.call('SET', '{fairqueue:mail}:leader', 'me')",
        "return redis.call('PUBLISH', 'channel', 'message')",
        "return redis.call('DBSIZE')",
        "return redis.call('FLUSHALL')",
    ],
)
def test_a_script_may_do_no_more_than_the_user(minimal: TaskQueue, text: str) -> None:
    (sha,) = minimal.link.ask(("SCRIPT", "LOAD", text))
    # As Valkey says it, and Redis.
    with pytest.raises(RedisRefused, match=r"ACL failure in script|executing the script can't"):
        minimal.link.ask(("EVALSHA", sha, 0))


def test_no_channel_is_open_to_the_user(minimal: TaskQueue, redis_client: redis.Redis) -> None:
    user: Any = redis_client.acl_getuser(USER)
    assert user["channels"] in ([], "", [b""])
    assert user["selectors"] == []


def test_an_earlier_permission_is_revoked(granted: Granting, redis_client: redis.Redis) -> None:
    redis_client.execute_command("ACL", "SETUSER", USER, "on", "nopass", "+@all", "~*", "&*")
    granted(acl_line(USER))
    user: Any = redis_client.acl_getuser(USER)
    assert user["keys"] == ["~{fairqueue:default}:*", "~{fairqueue:default:*}:*"]
    assert "+@all" not in user["categories"]
    assert "nopass" not in user["flags"]


@pytest.mark.parametrize("user", ["", "a b", "default", "x" * 65, "a\n", None])
def test_a_name_that_cannot_be_a_users_is_refused(user: Any) -> None:
    with pytest.raises(ConfigurationError, match="user must be"):
        acl_line(user)
    with pytest.raises(ConfigurationError, match="queue name"):
        acl_line(USER, "*")


# --- where the list comes from --------------------------------------------------------------------


def first_words(node: ast.AST) -> Iterator[list[ast.expr]]:
    """What may be a command with its arguments, in a node of a module."""
    if isinstance(node, ast.Tuple | ast.List):
        yield node.elts
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "send_command":
            yield node.args
        elif name == "_scan":
            yield node.args[1:]


def sent_by(path: Path, containers: set[str], known: set[str]) -> Iterator[str]:
    """The commands that a module sends."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for words in first_words(node):
            texts = [getattr(word, "value", None) for word in words[:2]]
            if texts and texts[0] in containers:
                yield f"{texts[0]}|{texts[1]}"
            elif texts and texts[0] in known:
                yield str(texts[0])


SENDS = re.compile(r"\.ask\(|\bAsk\(|send_command\(|class Driver")


def test_the_list_of_plain_commands_is_what_the_modules_send(world: World) -> None:
    known = set(commands_of(world))
    containers = {name.partition("|")[0] for name in known if "|" in name}
    # Only those that send something: others name methods of HTTP.
    modules = [
        path for path in PACKAGE.rglob("*.py") if SENDS.search(path.read_text(encoding="utf-8"))
    ]
    sent = {command for path in modules for command in sent_by(path, containers, known)}
    # EVAL: for servers that are too old, and for fakeredis.
    assert sent - {"EVAL"} == {*SENT, *NOT_GRANTED}


CALL = re.compile(r"redis\.p?call\(\s*([^,)\s]+)")
CALL_WITH = re.compile(r"(?<!function )\bcall_with\(([^,]+),")


@pytest.mark.parametrize("script", script_names())
def test_the_commands_of_a_script_are_all_found(script: str) -> None:
    text = load_script(script).text
    named = {*CALL.findall(text), *CALL_WITH.findall(text)}
    # Not by name: the probes of types, and the function whose callers name the command.
    by_name = named - {"PROBES[name]", "command"}
    assert {word.strip("'") for word in by_name} <= called_by(script)
    assert [word for word in by_name if not word.startswith("'")] == []


def test_each_command_is_needed_by_a_module_or_a_script(world: World) -> None:
    called = {command for script in script_names() for command in called_by(script)}
    assert set(needed_commands()) == {*SENT, *called}
    commands = commands_of(world)
    writing = {name for name in needed_commands() if "write" in commands[name].flags}
    assert writing == CHANGING


def test_the_guide_has_the_lines_that_the_program_prints() -> None:
    documented = re.findall(r"^(?:> )?(ACL SETUSER \S+ reset .*)$", GUIDE.read_text(), re.M)
    assert documented == [acl_line(USER), acl_line("fairqueue-look", read_only=True)]


# --- the suite as that user -----------------------------------------------------------------------


@pytest.mark.skipif(not limited_user.is_on(), reason=f"{limited_user.VARIABLE} is not set")
def test_the_suite_runs_as_the_documented_user(
    redis_url: str, redis_client: redis.Redis, spawn: Callable[..., Any]
) -> None:
    with TaskQueue.from_url(redis_url) as queue:
        assert queue.link.ask(("ACL", "WHOAMI")) == [limited_user.NAME.encode()]
    assert redis_client.acl_whoami() == "default"
    program = (
        "import sys; from fairqueue import TaskQueue\n"
        "with TaskQueue.from_url(sys.argv[1]) as queue:\n"
        "    print(queue.link.ask(('ACL', 'WHOAMI'))[0].decode())\n"
    )
    assert spawn(program, redis_url).communicate(timeout=60)[0].strip() == limited_user.NAME
