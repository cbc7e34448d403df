"""Claim tasks fairly between users, and extend their leases."""

import math
import os
import socket
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from fairqueue.clock import from_ms
from fairqueue.errors import BrokenRecord, FairQueueError, InvalidInput, InvalidTask, kind_of, shown
from fairqueue.flow_options import DEFAULT_POOL, check_pool
from fairqueue.link.operation import Argument, Call, Operation, Wait, operation
from fairqueue.link.partitions import sorted_out, whole
from fairqueue.link.scripts import load_script
from fairqueue.models import Claim, Task, new_id
from fairqueue.queue.base import QueueBase
from fairqueue.queue.reports import failure_arguments
from fairqueue.validation import check_count, check_items, check_name, check_seconds

CLAIM_LIMIT = 1000  # tasks in one claim at most
CLAIM_CHUNK = 250  # of them in one script: about 5 ms of server time
CLAIM_HEAD = 5  # values in the answer of the script `claim` before its tasks, four values each
EXTEND_CHUNK = 250  # leases in one script: about 3 ms
MAX_LEASE_S = 86_400.0
DEFAULT_POOLS = (DEFAULT_POOL,)
MOST_POOLS = 20  # of one claim: each costs it some commands
# A token that a dying worker took is lost: others look for themselves after this long.
LONGEST_WAIT_S = 5.0

_HOST = socket.gethostname()


class Wanted(NamedTuple):
    """What a claim takes, as the script gets it: names of tasks, and pools."""

    names: str = ""
    pools: str = ""

    @property
    def is_all(self) -> bool:
        """Whether it takes tasks of all names in the default pool alone."""
        return self == Wanted()


class Answer(NamedTuple):
    """What a claim returned: the tasks, seconds until there may be more, and where to wait.

    wake: the lists that get a token when there is work for this worker, by name, or as keys of
    partitions. levels: of the partition; see lua/lib/level.lua. asked: what the partition wants to
    be carried to the homes of limits; see permits.py.
    """

    claims: list[Claim]
    hint: float
    wake: tuple[str | bytes, ...]
    levels: bytes = b""
    asked: bytes = b""


class ClaimOperations(QueueBase):
    """The part of a queue that hands out tasks and keeps their leases."""

    @operation
    @whole
    def claim(
        self,
        worker_id: str,
        limit: int = 1,
        lease: float = 30.0,
        wait: float = 0.0,
        *,
        names: Iterable[str] | None = None,
        avoid: Iterable[str] = (),
        pools: Iterable[str] = DEFAULT_POOLS,
    ) -> Operation[list[Claim]]:
        """Take up to `limit` tasks, fairly between tenants and users, each for `lease` seconds.

        Returns [] when nothing is ready; with `wait`, blocks up to that many seconds for the first
        task. A claim ends early when its documents reach 1 MiB or its names 64 KiB: the next claim
        gets the rest. Only tasks of `pools` are taken; from several pools, the next one is that of
        the pool whose users have been served least. With `names`, only tasks with these names are
        taken; with `avoid`, none with those. The other tasks stay where they are. Of each user, the
        first hundred tasks are examined, and of each tenant some twenty users.
        """
        check_name(worker_id, "worker_id")
        check_count(limit, "limit", least=1, most=CLAIM_LIMIT)
        lease_ms = check_lease(lease)
        wanted = Wanted(wanted_names(names, avoid), wanted_pools(pools))
        deadline = time.monotonic() + check_seconds(wait, "wait")
        claims, hint, wake, *_ = yield from self._claim(worker_id, limit, lease_ms, wanted)
        while not claims and (remaining := deadline - time.monotonic()) > 0:
            woken_by = yield Wait(wake, min(remaining, hint, LONGEST_WAIT_S))
            claims, hint, wake, *_ = yield from self._claim(
                worker_id, limit, lease_ms, wanted, woken_by
            )
        if self.link.parts:
            return claims
        got = len(claims)
        while got == CLAIM_CHUNK and len(claims) < limit:
            left = limit - len(claims)
            try:
                more = (yield from self._claim_once(worker_id, left, lease_ms, wanted)).claims
            except FairQueueError:
                break  # the caller must get the tasks that it already holds
            got = len(more)
            claims += more
        return claims

    def _claim(
        self,
        worker_id: str,
        limit: int,
        lease_ms: int,
        wanted: "Wanted",
        woken_by: bytes | None = None,
    ) -> Operation[Answer]:
        """Claim once; `woken_by`: the list whose token came, if one did."""
        raise NotImplementedError

    def _claim_once(
        self, worker_id: str, limit: int, lease_ms: int, wanted: "Wanted", floors: str = ""
    ) -> Operation[Answer]:
        """Claim in one round trip; `floors`: see the script, for a partition."""
        call, token = claim_call(worker_id, limit, lease_ms, wanted, floors)
        answer = yield from self._call(call)
        return (yield from self._read_claims(answer, token, worker_id, lease_ms))

    def _read_claims(
        self, answer: list[Any], token: str, worker_id: str, lease_ms: int
    ) -> Operation[Answer]:
        """The tasks in the answer; those that cannot be read are buried."""
        self.link.learn_time(int(answer[1]))
        # From the claim and not from the answer, which may be one to a repetition.
        until = from_ms(int(answer[2]) + lease_ms)
        claims = []
        for i in range(CLAIM_HEAD, len(answer), 4):
            try:
                task = _claimed(answer[i], answer[i + 1])
            except BrokenRecord as error:
                failure = failure_arguments(str(error), None, "unreadable")
                yield from self._call(end_call("bury", answer[i], token, cost="", **failure))
                continue
            claims.append(
                Claim(
                    task=task,
                    token=token,
                    attempt=answer[i + 2],
                    worker_id=worker_id,
                    lease_until=until,
                    due_ms=answer[i + 3],
                    partition=self.keys.partition,
                )
            )
        levels, _, asked = answer[4].partition(b"\n")
        return Answer(claims, hint_seconds(answer[0]), wake_lists(answer[3]), levels, asked)

    @operation
    @whole
    def extend(
        self,
        claims: Sequence[Claim],
        lease: float = 30.0,
        *,
        timeouts: Sequence[float | None] | None = None,
    ) -> Operation[list[str]]:
        """Extend many leases in one call, to `lease` seconds from now.

        A lease never goes beyond the deadline of its run, which is one lease after its time-out or
        after its cancellation. `timeouts` says for each claim how many seconds its handler may run,
        None for any number; the task's own time-out and the one of set_limits take precedence.
        Without it, the time-out that a worker has declared last for the name counts.

        Returns a word for each claim: "extended", "cancel" (extended, and its cancellation was
        requested), "ended" (it was finished, retried, released or buried with this claim already),
        or "lost_lease" (another worker may own it, or its deadline has passed: stop). Of a queue
        with partitions, "not_extended" if its partition did not answer while others did.
        """
        lease_ms = check_lease(lease)
        listed = [check_claim(claim) for claim in check_items(claims, "claims", "claims")]
        given: list[int | str] = [""] * len(listed)
        if timeouts:
            given = [_timeout_ms(each) for each in timeouts]
        if len(given) != len(listed):
            raise InvalidTask(f"{len(given)} timeouts for {len(listed)} claims: give one for each")
        pack = load_script("extend").row
        rows = [
            pack(id=claim.task.task_id, token=claim.token, timeout_ms=timeout_ms)
            for claim, timeout_ms in zip(listed, given, strict=True)
        ]
        if self.link.parts:
            numbers = [claim.partition for claim in listed]
            return (
                yield from sorted_out(
                    self,
                    numbers,
                    rows,
                    lambda twin, some: twin._extend(some, lease_ms),
                    "not_extended",
                )
            )
        return (yield from self._extend(rows, lease_ms))

    def _extend(self, rows: Sequence[tuple[Argument, ...]], lease_ms: int) -> Operation[list[str]]:
        words: list[str] = []
        for i in range(0, len(rows), EXTEND_CHUNK):
            rest: list[Argument] = [each for row in rows[i : i + EXTEND_CHUNK] for each in row]
            call = Call("extend", op=new_id(), lease_ms=lease_ms, rest=rest)
            words += [word.decode() for word in (yield from self._call(call))]
        return words


def claim_call(
    worker_id: str, limit: int, lease_ms: int, wanted: Wanted, floors: str = ""
) -> tuple[Call, str]:
    """The call of one claim, and the token of the tasks that it takes."""
    token = new_id()
    call = Call(
        "claim",
        op=token,
        worker=worker_id,
        limit=min(limit, CLAIM_CHUNK),
        lease_ms=lease_ms,
        place=this_place(),
        names=wanted.names,
        pools=wanted.pools,
        floor=floors,
    )
    return call, token


def hint_seconds(hint: int) -> float:
    """Seconds until there may be something to do; infinite if nothing is known."""
    return math.inf if hint < 0 else hint / 1000


def end_call(script: str, task_id: str | bytes, token: str, **arguments: Any) -> Call:
    """The call that ends a claim.

    Its operation id is not random: a caller that got RedisUnavailable may make the same call again,
    and lua/task/extend.lua can tell a claim that was given back from one that was lost.
    """
    name = task_id if isinstance(task_id, str) else task_id.hex()
    return Call(script, op=f"{script}:{token}:{name}", id=task_id, token=token, **arguments)


def check_claim(claim: object) -> Claim:
    """Raises InvalidInput for anything but a Claim."""
    if isinstance(claim, Claim):
        return claim
    raise InvalidInput(
        f"claim must be a Claim, not {kind_of(claim)}: pass one that claim() returned"
    )


def check_lease(lease: object) -> int:
    """The length of a lease in ms. Raises InvalidTask for a bad value."""
    return round(check_seconds(lease, "lease", least=0.001, most=MAX_LEASE_S) * 1000)


def wanted_names(names: Iterable[str] | None, avoid: Iterable[str]) -> str:
    """The names of a claim as the script takes them; sorted, so that equal sets are one kind."""
    avoided = check_items(avoid, "avoid", "task names", InvalidTask)
    unwanted = {check_name(name, "avoid") for name in avoided}
    if names is None:
        return "-" + "\n".join(sorted(unwanted)) if unwanted else ""
    given = check_items(names, "names", "task names, or None for all", InvalidTask)
    listed = sorted({check_name(each, "names") for each in given} - unwanted)
    if not listed:
        raise InvalidTask("names leave nothing to claim: give names, or None for all")
    return "+" + "\n".join(listed)


def wanted_pools(pools: Iterable[str]) -> str:
    """The pools of a claim as the script takes them; "" for the default pool alone.

    Raises InvalidTask naming the value.
    """
    listed = check_pools(pools)
    return "" if listed == DEFAULT_POOLS else "\n".join(listed)


def check_pools(pools: Iterable[str], error: type[InvalidInput] = InvalidTask) -> tuple[str, ...]:
    """The pools of a claim, sorted. Raises `error` naming the value."""
    if isinstance(pools, str):
        raise error(f"pools must be a list of names, such as ['gpu'], not {shown(pools)}")
    given = check_items(pools, "pools", "names", error)
    listed = tuple(sorted({check_pool(pool, error) for pool in given}))
    if not listed:
        raise error("pools must name at least one pool, such as 'default'")
    if len(listed) > MOST_POOLS:
        raise error(f"pools must name at most {MOST_POOLS} pools, not {len(listed)}")
    return listed


def this_place() -> str:
    """Host and process id, for records of who does something."""
    return f"{_HOST} {os.getpid()}"


@lru_cache(maxsize=1024)
def wake_lists(numbers: int | bytes) -> tuple[str, ...]:
    """The names of wake lists, given as a number or as several with commas; 0 is `wake`."""
    listed = numbers.decode().split(",") if isinstance(numbers, bytes) else [str(numbers)]
    return tuple("wake" if number == "0" else f"wake_{number}" for number in listed)


def _timeout_ms(timeout: float | None) -> int:
    """How long a handler may run, as the script takes it; 0 for no limit."""
    if timeout is None:
        return 0
    return max(1, round(check_seconds(timeout, "timeout", InvalidTask) * 1000))


def _claimed(task_id: bytes, document: bytes) -> Task:
    try:
        return Task.from_document(task_id.decode(), document)
    except UnicodeDecodeError:
        raise BrokenRecord(f"the task id {task_id!r} is not UTF-8") from None
