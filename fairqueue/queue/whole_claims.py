"""Claim from a queue with several partitions, fairly over all of them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fairqueue.errors import RedisUnavailable
from fairqueue.link.operation import At, Call, Gather, Operation, Together
from fairqueue.queue.balance import Balance
from fairqueue.queue.claim import (
    Answer,
    ClaimOperations,
    Wanted,
    claim_call,
    hint_seconds,
)
from fairqueue.queue.permits import carry

# Seconds for the answer to a question to all partitions: it is asked again soon.
ASK_TIMEOUT_S = 1.0
# A claim tells a partition which names and pools a worker takes, and learns where to wait. The
# partition forgets it after a minute; see lua/lib/kinds.lua.
ENTER_S = 20.0
TASKS_OF_CLAIM = 10  # one that takes more counts as several: it changes more, and costs more
MOST_BALANCES = 64  # kinds of claims of one client


class Claiming:
    """A claim over partitions: what it wants, and what it has found so far."""

    def __init__(
        self, worker_id: str, limit: int, lease_ms: int, wanted: Wanted, balance: Balance
    ) -> None:
        self.worker_id, self.limit, self.lease_ms = worker_id, limit, lease_ms
        self.wanted, self.balance = wanted, balance
        self.claims: list[Any] = []
        self.tried: set[int] = set()  # partitions that have nothing more for this claim
        self.error: Exception | None = None

    @property
    def left(self) -> int:
        """How many tasks may still be taken."""
        return self.limit - len(self.claims)

    @property
    def is_full(self) -> bool:
        """Whether all tasks that were wanted are taken."""
        return len(self.claims) >= self.limit

    def found(self, number: int, answer: Answer, part: Any) -> None:
        """Take note of the answer of a partition."""
        balance = self.balance
        self.claims += answer.claims
        balance.claims += 1 + len(answer.claims) // TASKS_OF_CLAIM
        balance.note(number, answer.levels, answer.hint, has_more=bool(answer.claims))
        known = balance.partitions[number]
        known.lists = part.full(answer.wake)
        balance.entered(number)
        balance.note_claimed(number)
        if not answer.claims:
            # What waits there is not for this worker, or may not run now.
            balance.note_vain(number)
            self.tried.add(number)

    def reached(self, numbers: Iterable[int]) -> None:
        """Take note that partitions got permits: held tasks may have come back there."""
        for number in numbers:
            self.balance.note_due(number)
            self.tried.discard(number)

    def failed(self, number: int, error: Exception) -> None:
        """Take note that a partition did not answer."""
        self.balance.note_down(number)
        self.error = error
        self.tried.add(number)


class WholeClaims(ClaimOperations):
    """The part of a queue that claims over partitions."""

    def _balance_of(self, wanted: Wanted) -> Balance:
        """What is known of the partitions, for claims of this kind."""
        known: dict[Wanted, Balance] = self.__dict__.setdefault("_balances", {})
        found = known.get(wanted)
        if found is None:
            if len(known) >= MOST_BALANCES:
                known.clear()
            found = known[wanted] = Balance(len(self.link.parts))
        return found

    def _claim(
        self,
        worker_id: str,
        limit: int,
        lease_ms: int,
        wanted: Wanted,
        woken_by: bytes | None = None,
    ) -> Operation[Answer]:
        """Claim once; `woken_by`: the list whose token came, if one did."""
        if not self.link.parts:
            return (yield from self._claim_once(worker_id, limit, lease_ms, wanted))
        balance = self._balance_of(wanted)
        asked_at = balance.asked_at
        first = yield from self._best(balance, wanted, woken_by)
        # Workers of some names also have to claim where they are not known.
        was_asked = wanted.is_all and balance.asked_at != asked_at
        claim = Claiming(worker_id, limit, lease_ms, wanted, balance)
        return (yield from self._claim_on(claim, first, was_asked=was_asked))

    def _best(
        self, balance: Balance, wanted: Wanted, woken_by: bytes | None
    ) -> Operation[int | None]:
        """The partition to claim from first, if anything is known to wait."""
        if woken_by is not None and (found := balance.partition_with(woken_by)) is not None:
            return found
        if balance.is_old():
            yield from self._ask_all(balance, wanted)
        return balance.best()

    def _claim_on(
        self, claim: Claiming, first: int | None, *, was_asked: bool = False
    ) -> Operation[Answer]:
        """Claim from one partition after the other; nothing is found only if all were asked.

        was_asked: they were, since the call has begun.
        """
        balance, number = claim.balance, first
        while not claim.is_full:
            if number is not None:
                yield from self._claim_at(claim, number)
            elif claim.claims or was_asked:
                break
            else:
                yield from self._ask_all(balance, claim.wanted)
                was_asked = True
                for each in () if claim.wanted.is_all else balance.unentered(ENTER_S):
                    if not claim.is_full:
                        yield from self._claim_at(claim, each)
            number = balance.best(claim.tried)
        if not claim.claims and claim.error is not None and not balance.is_any_up():
            raise claim.error
        return Answer(claim.claims, balance.hint(), balance.lists())

    def _claim_at(self, claim: Claiming, number: int) -> Operation[None]:
        """Claim from a partition, and take note of what it says."""
        part = self.link.parts[number]
        steps = self.at(part)._claim_once(
            claim.worker_id, claim.left, claim.lease_ms, claim.wanted, claim.balance.floors(number)
        )
        try:
            answer: Answer = yield At(part, steps)
        except RedisUnavailable as error:
            claim.failed(number, error)
        else:
            yield from self._found(claim, number, answer)

    def _found(self, claim: Claiming, number: int, answer: Answer) -> Operation[None]:
        """Take note of what a partition answered, and carry what it has to say to others."""
        claim.found(number, answer, self.link.parts[number])
        if answer.asked:
            claim.reached((yield from carry(self, number, answer.asked)))

    def _ask_all(self, balance: Balance, wanted: Wanted) -> Operation[None]:
        """Ask all partitions for their levels."""
        asked = balance.askable()
        parts = [self.link.parts[number] for number in asked]
        answers = yield Gather(
            [(part, self.at(part)._peek(wanted.pools)) for part in parts], partial=True
        )
        for number, answer in zip(asked, answers, strict=True):
            if isinstance(answer, RedisUnavailable):
                balance.note_down(number)
            elif isinstance(answer, Exception):
                raise answer
            else:
                self._note_peek(balance, number, answer, wanted)
        balance.was_asked()

    def _note_peek(self, balance: Balance, number: int, answer: list[Any], wanted: Wanted) -> None:
        hint, now_ms, levels = answer
        part = self.link.parts[number]
        part.learn_time(int(now_ms))
        balance.note(number, levels, hint_seconds(hint))
        if wanted.is_all:
            balance.partitions[number].lists = part.full(("wake",))

    def _peek(self, pools: str) -> Operation[list[Any]]:
        answer: list[Any] = yield self._peek_call(pools)
        return answer

    def _peek_call(self, pools: str) -> Call:
        return Call("peek", pools=pools, timeout=min(ASK_TIMEOUT_S, self.link.timeout))

    def _exchange_over(
        self,
        finishes: dict[int, list[Call]],
        claim: Claiming,
        woken_by: bytes | None,
    ) -> Operation[tuple[dict[int, list[Any] | Exception], Answer]]:
        """Run the calls that finish tasks in their partitions, and claim, at the same time.

        Returns the answers of each partition, or its error, and the claim.
        """
        balance = claim.balance
        asked_at, number = balance.asked_at, None
        if claim.limit:
            number = yield from self._best(balance, claim.wanted, woken_by)
        calls, token, peeked = self._exchange_calls(finishes, claim, number)
        answers = yield from self._at_each(calls)
        for each in peeked:
            answered = answers[each]
            if not isinstance(answered, Exception):
                self._note_peek(balance, each, answered.pop(), claim.wanted)
        if number is not None:
            answer = answers[number]
            if isinstance(answer, Exception):
                claim.failed(number, answer)
            else:
                part = self.link.parts[number]
                last = answer.pop()
                steps = self.at(part)._read_claims(last, token, claim.worker_id, claim.lease_ms)
                yield from self._found(claim, number, (yield At(part, steps)))
        if not claim.limit:
            return answers, Answer([], 0.0, balance.lists())
        if claim.claims:
            return answers, Answer(claim.claims, balance.hint(), balance.lists())
        number = balance.best(claim.tried)
        is_known = claim.wanted.is_all or not balance.unentered(ENTER_S)
        if number is None and is_known and not balance.is_old():
            # All partitions were asked just now, or are asked in a moment. A token tells of tasks
            # that come meanwhile.
            rest = math.inf if balance.asked_at != asked_at else balance.asks_in()
            return answers, Answer([], min(balance.hint(), rest), balance.lists())
        return answers, (yield from self._claim_on(claim, number))

    def _exchange_calls(
        self, finishes: dict[int, list[Call]], claim: Claiming, number: int | None
    ) -> tuple[dict[int, list[Call]], str, list[int]]:
        """The calls of an exchange, by partition; the token of its claim, which is at `number`.

        Where nothing was left to claim, what is finished may let other tasks begin: these
        partitions, the last of the three, are asked for their levels.
        """
        calls, token, peeked = {each: [*own] for each, own in finishes.items()}, "", []
        for each in finishes:
            if claim.limit and each != number and claim.balance.is_empty(each):
                calls[each].append(self._peek_call(claim.wanted.pools))
                peeked.append(each)
        if number is not None:
            floors = claim.balance.floors(number)
            call, token = claim_call(
                claim.worker_id, claim.limit, claim.lease_ms, claim.wanted, floors
            )
            calls.setdefault(number, []).append(call)
        return calls, token, peeked

    def _at_each(self, calls: dict[int, list[Call]]) -> Operation[dict[int, list[Any] | Exception]]:
        """Run calls in their partitions at the same time; the answers of each, or its error."""
        if len(calls) == 1:
            ((number, own),) = calls.items()
            twin = self.at(self.link.parts[number])
            try:
                return {number: (yield At(twin.link, twin._together(own)))}
            except RedisUnavailable as error:
                return {number: error}
        asked = []
        for number, own in calls.items():
            twin = self.at(self.link.parts[number])
            asked.append((twin.link, twin._together(own)))
        answers = dict(zip(calls, (yield Gather(asked, partial=True)), strict=True))
        for answer in answers.values():
            if isinstance(answer, Exception) and not isinstance(answer, RedisUnavailable):
                raise answer
        return answers

    def _together(self, calls: Sequence[Call]) -> Operation[list[Any]]:
        yield from self.ready()
        answers: list[Any] = yield Together(*calls)
        return answers
