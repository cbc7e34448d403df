"""What the other partitions of a queue serve before a task: for explanations and quotes."""

from typing import Any

from fairqueue.errors import RedisUnavailable
from fairqueue.link.operation import Call, Gather, Operation
from fairqueue.queue.estimate import Pace


def with_others(link: Any, fields: dict[str, Any], pool: str | None) -> Operation[dict[str, Any]]:
    """The answer of `explain` or `quote`, with what comes before in the other partitions.

    link: that of the partition which answered. pool: None for the default one. A partition that
    does not answer serves nothing meanwhile, and counts for nothing. Without partitions, the answer
    stays as it is.
    """
    others = [part for part in link.whole.parts if part is not link]
    if not others or not fields.get("level"):
        return fields
    level = float(fields["level"])
    if fields.get("clock_level"):
        # Nothing waited in its partition before: its clock moves to where the others are.
        answers = yield from _ask(others, Call("peek", pools=pool or ""))
        # Not of those that have nothing to serve, or rest; see level.text in lua/lib/level.lua.
        first = (levels.partition(b" ")[0] for _, _, levels in answers)
        floors = [float(text) for text in first if text[:1] not in (b"=", b"~")]
        if floors:
            level += min(floors) - float(fields["clock_level"])
    answers = yield from _ask(others, Call("ahead_of", pool=pool or "", level=repr(level)))
    sums = [sum(int(answer[i]) for answer in answers) for i in range(4)]
    paces = [pace for answer in answers if (pace := Pace.read(answer[4])).is_busy]
    found = dict(fields)
    top = "tenants" if fields.get("tenants") is not None else "users"
    for name, more in zip(("before", top, "critical", "leases"), sums, strict=True):
        if fields.get(name) is not None:
            found[name] = int(fields[name]) + more
    found["pace"] = Pace.together([Pace.read(fields.get("pace")), *paces]).text
    return found


def _ask(parts: list[Any], call: Call) -> Operation[list[Any]]:
    """The answers of the partitions that answer."""
    asked = [(part, _call(Call(call.script, **call.arguments))) for part in parts]
    answers = yield Gather(asked, partial=True)
    for answer in answers:
        if isinstance(answer, Exception) and not isinstance(answer, RedisUnavailable):
            raise answer
    return [answer for answer in answers if not isinstance(answer, Exception)]


def _call(call: Call) -> Operation[Any]:
    return (yield call)
