"""Hold the leader's term: a random token, owner-checked renewal and resignation."""

import time
from dataclasses import dataclass

from fairqueue.link.connection import Link
from fairqueue.link.operation import Call, Operation, operation
from fairqueue.models import new_id
from fairqueue.schedules.plan import Plan

# We stop trusting our term this much before it ends: a part of it, at most a second.
DISTRUST_PART, DISTRUST_S = 0.2, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DueSchedule:
    """A schedule that is due, as it was read."""

    member: bytes
    definition: bytes
    plan: Plan

    @property
    def schedule_id(self) -> str:
        """Its id; escaped if it is not valid UTF-8, which no client of ours writes."""
        return self.member.decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one round trip returned: who leads, what is due, and when the next schedule is.

    `read_at` is the time of this process's monotonic clock when the server's clock was `now_ms`.
    """

    is_leader: bool
    elected: bool
    lost: bool
    epoch: int
    now_ms: int
    ends_ms: int
    next_ms: int | None
    due: list[DueSchedule]
    read_at: float


class Leadership:
    """The leadership of one scheduler.

    It only saves work. Correctness depends on the fence and the comparison in the fire script.
    """

    def __init__(self, link: Link, scheduler_id: str, term_s: float) -> None:
        self.link = link
        self._scheduler_id = scheduler_id
        self.term_ms = round(term_s * 1000)
        self._trust_s = term_s - min(DISTRUST_PART * term_s, DISTRUST_S)
        self.token = new_id()
        self._trusted_until: float | None = None
        self._epoch = 0
        self._holds = False  # a term that was neither resigned nor known to be lost

    @property
    def is_leader(self) -> bool:
        """True while the term is safely ours by this process's own monotonic clock."""
        trusted = self._trusted_until
        return trusted is not None and time.monotonic() < trusted

    @property
    def holds(self) -> bool:
        """Whether it has a term that was neither resigned nor known to be lost."""
        return self._holds

    @operation
    def lead(
        self, limit: int, now_ms: int | None = None, timeout: float | None = None
    ) -> Operation[Reading]:
        """Become or stay the leader, and read what is due. Raises as a Call does."""
        asked_at = time.monotonic()
        answer = yield Call(
            "lead",
            now_ms=now_ms,
            token=self.token,
            scheduler=self._scheduler_id,
            term_ms=self.term_ms,
            limit=limit,
            timeout=timeout,
        )
        replied_at = time.monotonic()
        is_leader = answer[0] != b"follower"
        # By the number: if the reply 'elected' was lost, its repetition says 'leader'. By the word:
        # a server that has lost its data counts from the start.
        elected = is_leader and (answer[0] == b"elected" or int(answer[1]) != self._epoch)
        lost = self._holds and (elected or not is_leader)
        if is_leader:
            self._trusted_until = asked_at + self._trust_s
            self._epoch, self._holds = int(answer[1]), True
        else:
            self.lose()
        clock_ms = int(answer[2])
        if now_ms is None:
            self.link.learn_time(clock_ms)
        return Reading(
            is_leader=is_leader,
            elected=elected,
            lost=lost,
            epoch=int(answer[1]),
            now_ms=clock_ms,
            ends_ms=int(answer[4]),
            next_ms=int(answer[5]) if int(answer[5]) >= 0 else None,
            due=[
                DueSchedule(member=answer[i], definition=answer[i + 1], plan=Plan(answer[i + 2]))
                for i in range(6, len(answer), 3)
            ],
            read_at=(asked_at + replied_at) / 2 - int(answer[3]) / 1e6,
        )

    def doubt(self) -> None:
        """Stop trusting our term until Redis has confirmed it again."""
        self._trusted_until = None

    def lose(self) -> None:
        """Note that another scheduler leads. A later term of ours needs a new token."""
        self._trusted_until = None
        self._holds = False
        self.token = new_id()

    @operation
    def resign(self, timeout: float | None = None) -> Operation[bool]:
        """Give the term up; return whether it was ours. Raises as a Call does."""
        self._trusted_until = None
        self._holds = False
        answer = yield Call("resign", op=new_id(), token=self.token, timeout=timeout)
        self.token = new_id()
        return bool(answer == b"resigned")
