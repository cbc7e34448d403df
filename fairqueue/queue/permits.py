"""Carry the permits of limits that span partitions between their homes and the other partitions.

Each partition starts no more tasks of such a limit than it has permits. The home of the limit, a
partition chosen by its name, gives them out. Servers do not talk to each other: a client whose
claim is told that a partition wants permits, or gives some up, carries that to the home, and what
the home answers to those concerned. It may die at any point, and others may do the same at the same
time: see lua/lib/permits.lua for why the limit holds nevertheless.
"""

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from fairqueue.errors import FairQueueError
from fairqueue.link.operation import Ask, At, Call, Gather, Operation
from fairqueue.link.partitions import jump_hash
from fairqueue.models import new_id

WANTED, LEND = "wanted", "lend"  # words of the script take_permits
CARRY_S = 1.0  # for all that one claim carries, roughly: meanwhile its leases run


class Said(NamedTuple):
    """What a partition has said about its permits; set_by: the operation that set its limits."""

    partition: int
    version: int
    permits: int
    wants: int
    set_by: str | bytes


class Given(NamedTuple):
    """What a partition has been given by the home; slots: of the limit, at that time."""

    partition: int
    version: int
    permits: int
    slots: int
    set_by: bytes


class Question(NamedTuple):
    """How many starts of a rate a partition wants, in units of cost.

    first: for the next task. more: what attempts have cost more than they declared. asked_ms: when,
    by the clock of the partition.
    """

    first: float
    most: float
    more: float
    number: int
    asked_ms: int
    set_by: str


def home_of(gate: str, partitions: int) -> int:
    """The partition that gives out the permits of a limit."""
    return jump_hash(gate, partitions)


def carry(queue: Any, number: int, asked: bytes) -> Operation[set[int]]:
    """Carry what a partition has said in the answer of a claim; the partitions that got permits.

    Errors are ignored: the partition says it again, and the claim must not be lost. So it is if
    there is no time for it, because partitions do not answer.
    """
    reached: set[int] = set()
    lists = json.loads(asked)
    end = time.monotonic() + CARRY_S
    for gate, *said in lists["slots"]:
        if time.monotonic() >= end:
            return reached
        with suppress(FairQueueError):
            reached |= yield from _carry(queue, gate, Said(number, *said))
    for gate, *question in lists["rates"]:
        if time.monotonic() >= end:
            return reached
        with suppress(FairQueueError):
            yield from _bring_starts(queue, gate, Question(*question), queue.link.parts[number])
            reached.add(number)
    return reached


def _patience(queue: Any) -> float:
    """Seconds for one call."""
    return min(CARRY_S, float(queue.link.timeout))


def _bring_starts(queue: Any, gate: str, question: Question, part: Any) -> Operation[None]:
    """Bring a partition starts of a rate, as many as its home allows now."""
    home = queue.link.parts[home_of(gate, len(queue.link.parts))]
    call = Call(
        "share_starts",
        op=new_id(),
        gate=gate,
        partition=part.keys.partition,
        first=question.first,
        most=question.most,
        more=question.more,
        timeout=_patience(queue),
    )
    units, wait = yield At(home, queue.at(home)._call(call))
    number, asked = question.number, question.asked_ms
    call = Call(
        "take_starts",
        gate=gate,
        units=units,
        wait=wait,
        number=number,
        asked=asked,
        timeout=_patience(queue),
    )
    yield At(part, queue.at(part)._call(call))


def _carry(queue: Any, gate: str, said: Said) -> Operation[set[int]]:
    is_wanted, to_tell, to_ask = yield from _share(queue, gate, [said])
    if to_ask:
        answers = yield from _take(queue, gate, to_ask, LEND)
        heard = [
            Said(given.partition, *answer)
            for given, answer in zip(to_ask, answers, strict=True)
            if not isinstance(answer, Exception)
        ]
        is_wanted, more, _ = yield from _share(queue, gate, heard)
        to_tell = [*{each.partition: each for each in (*to_tell, *more)}.values()]
    if not to_tell:
        return set()
    yield from _take(queue, gate, to_tell, WANTED if is_wanted else "")
    return {each.partition for each in to_tell}


def _share(
    queue: Any, gate: str, said: Iterable[Said]
) -> Operation[tuple[int, list[Given], list[Given]]]:
    """Tell the home; whether somebody waits, who to tell, and whom to ask for permits."""
    home = queue.link.parts[home_of(gate, len(queue.link.parts))]
    rest = [value for each in said for value in each]
    call = Call("share_permits", op=new_id(), gate=gate, rest=rest, timeout=_patience(queue))
    is_wanted, to_tell, to_ask = yield At(home, queue.at(home)._call(call))
    return is_wanted, [Given(*each) for each in to_tell], [Given(*each) for each in to_ask]


def _take(queue: Any, gate: str, given: list[Given], word: str) -> Operation[list[Any]]:
    """Bring permits to partitions; what each says then, or its error."""
    asked = []
    for each in given:
        part = queue.link.parts[each.partition]
        call = Call(
            "take_permits",
            gate=gate,
            version=each.version,
            count=each.permits,
            slots=each.slots,
            set_by=each.set_by,
            word=word,
            timeout=_patience(queue),
        )
        asked.append((part, queue.at(part)._call(call)))
    answers: list[Any] = yield Gather(asked, partial=True)
    return answers


def with_slots_of_others(link: Any, fields: dict[str, Any]) -> Operation[dict[str, Any]]:
    """The answer of `explain`, with the slots that tasks of all partitions hold.

    link: that of the partition which answered. A partition that does not answer counts for nothing.
    """
    others = [part for part in link.whole.parts if part is not link]
    shared = [gate for gate in fields["gates"] if gate[1] != b"" and b"\2" not in gate[0]]
    if not others or not shared:
        return fields
    names = [gate[0] for gate in shared]
    answers = yield Gather([(part, _used(part, names)) for part in others], partial=True)
    counts = [answer for answer in answers if not isinstance(answer, Exception)]
    for i, gate in enumerate(shared):
        gate[2] = int(gate[2]) + sum(count[i] for count in counts)
    return fields


def _used(link: Any, names: list[bytes]) -> Operation[list[int]]:
    ranges = [(b"[" + name + b"\0", b"(" + name + b"\1") for name in names]
    counts: list[int] = yield Ask(
        *(("ZLEXCOUNT", link.keys["slots"], first, last) for first, last in ranges)
    )
    return counts
