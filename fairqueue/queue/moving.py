"""Move the waiting tasks of users between partitions: in steps that can be repeated by anybody.

The tenant of a user decides which partition the user is in. Tasks that go to another tenant move in
three steps, some at a time. The first takes them out of their partition and notes them whole under
the key `moving`, the second stores them in the other partition, and the third removes the note.
Whoever meets a note goes on with the move: the next call, or the leader of the partition.
"""

from typing import Any

from fairqueue.link.operation import Ask, At, Call, Operation
from fairqueue.models import new_id

MOVED_AT_ONCE = 100  # tasks of a user that one script moves to another tenant: a few ms
TASKS = b"\x01"  # begins the fields of `moving` that have tasks; then the other partition


def move_between(
    source: Any, target: Any, user_id: str, tenant: str | None, to: str | None
) -> Operation[int]:
    """Move a user to a tenant in another partition; how many tasks were moved.

    source, target: the links of both partitions. Tasks stay that the other partition refuses, and
    those buffered behind a run that stays.
    """
    moved, is_first = 0, True
    while True:  # more passes if some stayed: others were passed over that changed their places
        skip, moved_before, is_over = 0, moved, False
        while not is_over:
            answer = yield At(
                source, _take(source, target, user_id, tenant, to, first=is_first, skip=skip)
            )
            batch, number, is_ours, stay, more = answer
            if batch:
                words = yield from deliver(source, target, batch, int(number))
                if is_ours:
                    is_first = False
                    moved += words.count(b"s", 1)
                    skip += words.count(b"r", 1)
            skip += stay
            is_over = not more
        if moved == moved_before or not skip:
            return moved


def _take(
    source: Any,
    target: Any,
    user_id: str,
    tenant: str | None,
    to: str | None,
    *,
    first: bool,
    skip: int,
) -> Operation[list[Any]]:
    """Take some tasks out of their partition; what move_user_out returns."""
    # A replica that took over may have forgotten the last batches, which the other one has.
    (text,) = yield At(
        target, _ask(("HGET", target.keys["repartition"], f"={source.keys.partition}"))
    )
    call = Call(
        "move_user_out",
        op=new_id(),
        user=user_id,
        tenant=tenant or "",
        to=to or "",
        partition=target.keys.partition,
        after=int((text or b"0").partition(b"\0")[0]),
        first="1" if first else "",
        skip=skip,
        limit=MOVED_AT_ONCE,
    )
    answer: list[Any] = yield from _call(call)
    return answer


def go_on(parts: Any, source: Any, field: bytes, batch: bytes) -> Operation[None]:
    """Go on with a move out of a partition that was interrupted: a field of `moving`."""
    number = int(batch[batch.index(b":") + 1 :][: int(batch[: batch.index(b":")])])
    yield from deliver(source, parts[int(field.removeprefix(TASKS))], batch, number)


def deliver(source: Any, target: Any, batch: bytes, number: int) -> Operation[bytes]:
    """Store tasks that have left a partition in the other one, and end their move; the words."""
    words: bytes = yield At(
        target, _call(Call("move_user_in", partition=source.keys.partition, batch=batch))
    )
    partition = target.keys.partition
    end = Call("end_user_move", partition=partition, batch=number, words=words)
    yield At(source, _call(end))
    return words


def _ask(*commands: Any) -> Operation[list[Any]]:
    answers: list[Any] = yield Ask(*commands)
    return answers


def _call(call: Call) -> Operation[Any]:
    return (yield call)
