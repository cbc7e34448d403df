"""Claim from a queue with several partitions, fairly over all of them."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fairqueue.errors import RedisRefused, RedisUnavailable
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

# One partition that is away, or refuses, does not keep workers from the others.
FAILURES = (RedisUnavailable, RedisRefused)


class Claiming:
    """A claim over partitions: what it wants, and what it has found so far."""

    def __init__(
        self, worker_id: str, limit: int, lease_ms: int, wanted: Wanted, balance: Balance
    ) -> None:
        self.worker_id, self.limit, self.lease_ms = worker_id, limit, lease_ms
        self.wanted, self.balance = wanted, balance
        self.claims: list[Any] = []
        self.tried: set[int] = set()  # partitions that have nothing more for this claim
        self.has_asked = False  # whether all partitions were asked
        self.has_recorded = False  # whether a partition recorded what was finished
        self.refusal: RedisRefused | None = None  # of one that did not

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
        """Take note that a partition did not answer, or refused."""
        self.balance.note_down(number, error)
        self.tried.add(number)

    def recorded(self, answers: Iterable[object]) -> None:
        """Take note of the answers of partitions to what was finished."""
        for answer in answers:
            if isinstance(answer, RedisRefused):
                self.refusal = answer
            elif not isinstance(answer, Exception):
                self.has_recorded = True

    def answer(self, hint: float) -> Answer:
        """What was found.

        If nothing was, and nothing recorded, raises RedisUnavailable if no partition answers, and
        RedisRefused if one refuses: what others have done must not be lost for that.
        """
        failure = self.refusal or self.balance.failure()
        if failure is not None and not self.claims and not self.has_recorded:
            raise failure.with_traceback(None)  # it may be raised again and again
        return Answer(self.claims, hint, self.balance.lists())


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
        claim = Claiming(worker_id, limit, lease_ms, wanted, self._balance_of(wanted))
        first = yield from self._best(claim, woken_by)
        return (yield from self._claim_on(claim, first))

    def _best(self, claim: Claiming, woken_by: bytes | None) -> Operation[int | None]:
        """The partition to claim from first, if anything is known to wait."""
        balance = claim.balance
        if woken_by is not None and (found := balance.partition_with(woken_by)) is not None:
            return found
        if balance.is_old():
            yield from self._ask_all(claim)
        return balance.best()

    def _claim_on(self, claim: Claiming, first: int | None) -> Operation[Answer]:
        """Claim from one partition after the other; nothing is found only if all were asked."""
        balance, number = claim.balance, first
        has_entered = False
        while not claim.is_full:
            if number is not None:
                yield from self._claim_at(claim, number)
            elif claim.claims or has_entered:
                break
            else:
                if not claim.has_asked:
                    yield from self._ask_all(claim)
                has_entered = True
                for each in () if claim.wanted.is_all else balance.unentered(ENTER_S):
                    if not claim.is_full:
                        yield from self._claim_at(claim, each)
            number = balance.best(claim.tried)
        return claim.answer(balance.hint())

    def _claim_at(self, claim: Claiming, number: int) -> Operation[None]:
        """Claim from a partition, and take note of what it says."""
        part = self.link.parts[number]
        steps = self.at(part)._claim_once(
            claim.worker_id, claim.left, claim.lease_ms, claim.wanted, claim.balance.floors(number)
        )
        try:
            answer: Answer = yield At(part, steps)
        except FAILURES as error:
            claim.failed(number, error)
        else:
            yield from self._found(claim, number, answer)

    def _found(self, claim: Claiming, number: int, answer: Answer) -> Operation[None]:
        """Take note of what a partition answered, and carry what it has to say to others."""
        claim.found(number, answer, self.link.parts[number])
        if answer.asked:
            claim.reached((yield from carry(self, number, answer.asked)))

    def _ask_all(self, claim: Claiming) -> Operation[None]:
        """Ask all partitions for their levels."""
        balance, wanted = claim.balance, claim.wanted
        asked = balance.askable()
        parts = [self.link.parts[number] for number in asked]
        answers = yield Gather(
            [(part, self.at(part)._peek(wanted.pools)) for part in parts], partial=True
        )
        for number, answer in zip(asked, answers, strict=True):
            if isinstance(answer, FAILURES):
                balance.note_down(number, answer)
            elif isinstance(answer, Exception):
                raise answer
            else:
                self._note_peek(balance, number, answer, wanted)
        balance.was_asked()
        claim.has_asked = True

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
        number = None
        if claim.limit:
            number = yield from self._best(claim, woken_by)
        calls, token, peeked = self._exchange_calls(finishes, claim, number)
        answers = yield from self._at_each(calls)
        claim.recorded(answers[each] for each in finishes)
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
            return answers, claim.answer(0.0)
        if claim.claims:
            return answers, claim.answer(balance.hint())
        number = balance.best(claim.tried)
        is_known = claim.wanted.is_all or not balance.unentered(ENTER_S)
        if number is None and is_known and (claim.has_asked or not balance.is_old()):
            # A token tells of new tasks; if that was not done now, all are asked again in a moment.
            latest = math.inf if claim.has_asked else balance.asks_in()
            return answers, claim.answer(min(balance.hint(), latest))
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
            except FAILURES as error:
                return {number: error}
        asked = []
        for number, own in calls.items():
            twin = self.at(self.link.parts[number])
            asked.append((twin.link, twin._together(own)))
        answers = dict(zip(calls, (yield Gather(asked, partial=True)), strict=True))
        for answer in answers.values():
            if isinstance(answer, Exception) and not isinstance(answer, FAILURES):
                raise answer
        return answers

    def _together(self, calls: Sequence[Call]) -> Operation[list[Any]]:
        yield from self.ready()
        answers: list[Any] = yield Together(*calls)
        return answers
