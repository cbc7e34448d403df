"""The least that FairQueue must be allowed to do in Redis, as rules for a user of its own.

A script runs with the rights of whoever runs it, so the commands that the scripts call count too;
they are read from the scripts themselves.
"""

import re
from functools import cache

from fairqueue.errors import ConfigurationError, shown
from fairqueue.link.keys import Keys
from fairqueue.link.scripts import load_script, script_names

# What Python sends itself; a test compares it with the source. EVAL is not among them: only
# servers that are too old for FairQueue need it.
SENT = (
    *("EVALSHA", "SCRIPT|LOAD", "PING", "INFO", "TIME", "TYPE", "BLPOP", "UNLINK"),
    *("HEXISTS", "HGET", "HGETALL", "HMGET", "HSCAN", "HSTRLEN"),
    *("ZCARD", "ZCOUNT", "ZLEXCOUNT", "ZMSCORE", "ZRANDMEMBER", "ZRANGE", "ZRANGEBYLEX"),
    *("ZREVRANGEBYLEX", "ZSCAN", "ZSCORE"),
    "ROLE",  # only where sentinels name the server
    # Only `fairqueue doctor`, to find out what is not allowed.
    *("ACL|DRYRUN", "ACL|WHOAMI", "COMMAND|INFO"),
)
# Asked for by `fairqueue doctor` and left out on purpose: whoever may read the configuration can
# read passwords in it. Without it the doctor does not know how often Redis writes to disk.
NOT_GRANTED = ("CONFIG|GET",)
# What changes something; a user without them can only look.
CHANGING = frozenset(
    (
        *("BLPOP", "DEL", "HDEL", "HINCRBY", "HSET", "INCR", "LPUSH", "RENAME", "SET", "UNLINK"),
        *("ZADD", "ZREM", "ZREMRANGEBYLEX", "ZREMRANGEBYRANK"),
    )
)

# `call_with` is how lua/task/claim.lua names a command once for many members.
_CALLED = re.compile(r"\bp?call(?:_with)?\(\s*'(\w+)'")
# The types of keys are probed by these, whose names are in a table of each script.
_PROBED = re.compile(r"^local PROBES = \{(.*)\}$", re.MULTILINE)
_QUOTED = re.compile(r"'(\w+)'")
_USER_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


@cache
def called_by(script: str) -> frozenset[str]:
    """The commands that a script calls, its shared parts included."""
    text = load_script(script).text
    probes = _PROBED.search(text)
    return frozenset(_CALLED.findall(text)) | frozenset(
        _QUOTED.findall(probes[1] if probes else "")
    )


@cache
def needed_commands(*, read_only: bool = False) -> tuple[str, ...]:
    """Every command that FairQueue needs, sorted; `read_only`: those that change nothing."""
    called = (command for script in script_names() for command in called_by(script))
    return tuple(sorted({*SENT, *called} - (CHANGING if read_only else frozenset())))


def rules(queue: str | None = "default", *, read_only: bool = False) -> list[str]:
    """The rules of `ACL SETUSER`: keys and commands, without a password. None: for all queues.

    Raises ConfigurationError for a name that no queue can have.
    """
    # A queue's name holds nothing that a pattern of Redis would take for something else.
    pattern = "{fairqueue:*}:*" if queue is None else f"{Keys(queue).prefix}*"
    commands = needed_commands(read_only=read_only)
    return [f"~{pattern}", *(f"+{command.lower()}" for command in commands)]


def acl_line(user: str, queue: str | None = "default", *, read_only: bool = False) -> str:
    """The command that makes such a user, who can log in once somebody sets a password.

    Raises ConfigurationError for a name of a user or a queue that cannot be used.
    """
    if not isinstance(user, str) or not _USER_NAME.fullmatch(user) or user == "default":
        raise ConfigurationError(
            f"user {shown(user)} cannot be used: 1 to 64 letters, digits, '_', '.', '@' or '-', "
            "and not 'default', which is Redis's own"
        )
    # `reset` first: what an earlier version of the line allowed is taken back.
    return " ".join(["ACL SETUSER", user, "reset on", *rules(queue, read_only=read_only)])
