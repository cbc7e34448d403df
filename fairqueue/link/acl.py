"""The smallest set of permissions that FairQueue needs in Redis, as rules of an ACL user.

A script runs with the permissions of its caller, so the commands that scripts call are needed too;
they are read from the scripts.
"""

import re
from functools import cache

from fairqueue.errors import ConfigurationError, shown
from fairqueue.link.keys import Keys
from fairqueue.link.scripts import load_script, script_names

# The commands that Python sends; a test compares them with the source. EVAL is not among them:
# only servers that are too old for FairQueue need it.
SENT = (
    *("EVALSHA", "SCRIPT|LOAD", "PING", "INFO", "TIME", "TYPE", "BLPOP", "UNLINK"),
    *("EXISTS", "GET", "HEXISTS", "HGET", "HGETALL", "HLEN", "HMGET", "HSCAN", "HSTRLEN"),
    *("ZCARD", "ZCOUNT", "ZLEXCOUNT", "ZMSCORE", "ZRANDMEMBER", "ZRANGE", "ZRANGEBYLEX"),
    *("ZREVRANGEBYLEX", "ZSCAN", "ZSCORE", "HRANDFIELD", "LPUSH"),
    "MEMORY|USAGE",  # only `fairqueue partitions --memory`
    "ROLE",  # only with Sentinel
    *("ASKING", "CLUSTER|SLOTS"),  # only in a cluster
    # Only `fairqueue doctor`, to find out what is not permitted.
    *("ACL|DRYRUN", "ACL|WHOAMI", "COMMAND|INFO"),
)
# Used by `fairqueue doctor` and left out on purpose: a user who may read the configuration can read
# passwords in it. Without it the doctor cannot tell how often Redis writes to disk.
NOT_GRANTED = ("CONFIG|GET",)
# The commands that write; a user without them can only read.
CHANGING = frozenset(
    (
        *("BLPOP", "DEL", "HDEL", "HINCRBY", "HSET", "INCR", "LPUSH", "RENAME", "SET", "UNLINK"),
        *("ZADD", "ZREM", "ZREMRANGEBYLEX", "ZREMRANGEBYRANK"),
    )
)

# `call_with` is a helper of lua/task/claim.lua that runs a command for many members.
_CALLED = re.compile(r"\bp?call(?:_with)?\(\s*'(\w+)'")
# The commands that probe the types of keys are in a table of each script.
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
    """The commands that FairQueue needs, sorted; `read_only`: only those that do not write."""
    called = (command for script in script_names() for command in called_by(script))
    return tuple(sorted({*SENT, *called} - (CHANGING if read_only else frozenset())))


def rules(queue: str | None = "default", *, read_only: bool = False) -> list[str]:
    """The rules of `ACL SETUSER` for a queue, or for all with None: keys and commands, no password.

    Raises ConfigurationError for a bad name of a queue.
    """
    patterns = ["{fairqueue:*}:*"]
    if queue is not None:
        # The name of a queue contains no characters that are special in a pattern, and no colon.
        patterns = [f"{Keys(queue).prefix}*", f"{{fairqueue:{queue}:*}}:*"]  # and its partitions
    commands = needed_commands(read_only=read_only)
    return [f"~{pattern}" for pattern in patterns] + [f"+{name.lower()}" for name in commands]


def acl_line(user: str, queue: str | None = "default", *, read_only: bool = False) -> str:
    """The command that creates such a user, who can log in once a password is set.

    Raises ConfigurationError for a bad name of a user or a queue.
    """
    if not isinstance(user, str) or not _USER_NAME.fullmatch(user) or user == "default":
        raise ConfigurationError(
            "user must be 1 to 64 letters, digits, '_', '.', '@' or '-', and not 'default', which "
            f"is a user of Redis itself; not {shown(user)}"
        )
    # `reset` first: it revokes what an earlier version of the line allowed.
    return " ".join(["ACL SETUSER", user, "reset on", *rules(queue, read_only=read_only)])
