"""End claims: finish, retry, release and bury; cancel and reschedule tasks."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from fairqueue.errors import InvalidInput, LeaseLost, UnknownTask, kind_of
from fairqueue.flow_options import check_cost
from fairqueue.link.driver import in_batches
from fairqueue.link.operation import Call, Each, Operation, Together, operation, steps
from fairqueue.link.partitions import at_claim, at_found, sorted_out, whole
from fairqueue.link.scripts import load_script
from fairqueue.models import Claim, check_when, moment_text, new_id
from fairqueue.queue.claim import (
    CLAIM_LIMIT,
    DEFAULT_POOLS,
    Answer,
    Wanted,
    check_claim,
    check_lease,
    claim_call,
    end_call,
    wanted_names,
    wanted_pools,
)
from fairqueue.queue.reports import Report, failure_arguments
from fairqueue.queue.whole_claims import Claiming, WholeClaims
from fairqueue.validation import (
    MAX_RESULT_BYTES,
    check_count,
    check_items,
    check_name,
    check_seconds,
    encode_json,
)

FINISH_CHUNK = 250  # results that one call of finish_and_claim takes
FINISHED_AT_ONCE = 100  # of them in one script, and fewer with long results: about 4 ms
FINISHED_BYTES = 256 * 1024
NOT_RECORDED = "not_recorded"  # the word for a result whose partition did not answer

# A claim, the result, and what the attempt reports.
Result = tuple[Claim, Any] | tuple[Claim, Any, Report | None]


class EndOperations(WholeClaims):
    """The part of a queue that records how claims ended."""

    @operation
    @at_claim
    def finish(
        self, claim: Claim, result: Any = None, *, cost: float | None = None
    ) -> Operation[None]:
        """Record that the task is done, with a small JSON result if there is one.

        cost: what it has cost, if that is not what was charged when it was claimed. Raises
        LeaseLost if another worker may own it now, InvalidPayload for a bad result, InvalidTask for
        a bad cost.
        """
        row = _finish_row(check_claim(claim), result, cost=_cost_text(cost))
        if (yield Call("finish", rest=row)) == [b"lost_lease"]:
            raise _lost(claim.task.task_id)

    @operation
    @whole
    def finish_many(self, results: Iterable[Result]) -> Operation[list[str]]:
        """Record that many tasks are done, given as (claim, result) or (claim, result, report).

        Returns one word for each: "finished", "cancelled" (its cancellation was requested), or
        "lost_lease" (nothing changed).
        """
        listed = check_items(results, "results", "(claim, result)")
        rows = _finish_rows(listed)
        if not self.link.parts or not rows:
            return (yield from self._finish_rows(rows))
        numbers = [result[0].partition for result in listed]
        steps_of = lambda twin, own: twin._finish_rows(own)  # noqa: E731
        return (yield from sorted_out(self, numbers, rows, steps_of))

    def _finish_rows(self, rows: Sequence[tuple[str, ...]]) -> Operation[list[str]]:
        words: list[str] = []
        yield Each(
            _finish_calls(rows),
            lambda answer: words.extend(word.decode() for word in answer),
        )
        return words

    @operation
    @whole
    def finish_and_claim(
        self,
        results: Sequence[Result],
        worker_id: str,
        limit: int,
        lease: float = 30.0,
        *,
        names: Iterable[str] | None = None,
        avoid: Iterable[str] = (),
        pools: Iterable[str] = DEFAULT_POOLS,
    ) -> Operation[tuple[list[str], list[Claim], float]]:
        """Record what is done and take the next tasks, in one round trip.

        Takes at most 250 results, and returns at most 250 tasks whatever the limit. Returns the
        words of `finish_many`, the claims of `claim`, and how many seconds until there may be more
        (infinite if nothing is known to come). Of a queue with partitions, the word is
        "not_recorded" if the partition of a task did not answer while others did: pass it again.
        """
        words, answer = yield from steps(self.exchange)(
            results, worker_id, limit, lease, names=names, avoid=avoid, pools=pools
        )
        return words, answer.claims, answer.hint

    @operation
    @whole
    def exchange(
        self,
        results: Sequence[Result],
        worker_id: str,
        limit: int,
        lease: float = 30.0,
        *,
        names: Iterable[str] | None = None,
        avoid: Iterable[str] = (),
        pools: Iterable[str] = DEFAULT_POOLS,
        woken_by: bytes | None = None,
    ) -> Operation[tuple[list[str], Answer]]:
        """As `finish_and_claim`, with the lists at which to wait when nothing is found.

        woken_by: the list whose token came before: its partition is asked first.
        """
        check_name(worker_id, "worker_id")
        results = check_items(results, "results", "(claim, result)")
        rows = _finish_rows(results)
        check_count(len(rows), "results", most=FINISH_CHUNK)
        check_count(limit, "limit", most=CLAIM_LIMIT)
        lease_ms = check_lease(lease)
        wanted = Wanted("", "")
        if limit:
            wanted = Wanted(wanted_names(names, avoid), wanted_pools(pools))
        if self.link.parts:
            numbers = [result[0].partition for result in results]
            claiming = Claiming(worker_id, limit, lease_ms, wanted, self._balance_of(wanted))
            return (yield from self._exchange_parts(rows, numbers, claiming, woken_by))
        if not self.link.is_checked:
            yield from self._check()
        finishes = list(_finish_calls(rows))
        if not limit:
            answers = yield Together(*finishes)
            return _words(answers), Answer([], 0.0, ("wake",))
        claim, token = claim_call(worker_id, limit, lease_ms, wanted)
        *answers, last = yield Together(*finishes, claim)
        return _words(answers), (yield from self._read_claims(last, token, worker_id, lease_ms))

    def _exchange_parts(
        self,
        rows: Sequence[tuple[str, ...]],
        numbers: Sequence[int],
        claiming: Claiming,
        woken_by: bytes | None,
    ) -> Operation[tuple[list[str], Answer]]:
        """The exchange of a queue with partitions; `numbers` has the partition of each row."""
        places: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            places.setdefault(number, []).append(place)
        finishes = {
            number: list(_finish_calls([rows[place] for place in own]))
            for number, own in places.items()
        }
        answers, answer = yield from self._exchange_over(finishes, claiming, woken_by)
        words = [NOT_RECORDED] * len(rows)
        for number, own in places.items():
            answered = answers[number]
            if not isinstance(answered, Exception):
                for place, word in zip(own, _words(answered), strict=True):
                    words[place] = word
        return words, answer

    @operation
    @at_claim
    def retry(
        self,
        claim: Claim,
        error: str = "",
        delay: float = 0.0,
        *,
        report: Report | None = None,
        cost: float | None = None,
    ) -> Operation[None]:
        """Offer the task again after `delay` seconds, keeping the error. Raises LeaseLost.

        cost: what this attempt has cost; see `finish`.
        """
        delay_ms = round(check_seconds(delay, "delay") * 1000)
        failure = failure_arguments(error, report, check_claim(claim).task.name)
        del failure["fingerprint"]
        yield from self._end("retry", claim, delay_ms=delay_ms, cost=_cost_text(cost), **failure)

    @operation
    @at_claim
    def release(self, claim: Claim) -> Operation[None]:
        """Give the task back as if it had not been claimed. Raises LeaseLost."""
        yield from self._end("release", claim)

    @operation
    @at_claim
    def bury(
        self,
        claim: Claim,
        error: str = "",
        *,
        report: Report | None = None,
        cost: float | None = None,
    ) -> Operation[None]:
        """Move the task to the dead letters. Raises LeaseLost.

        cost: what this attempt has cost; see `finish`.
        """
        failure = failure_arguments(error, report, check_claim(claim).task.name)
        yield from self._end("bury", claim, cost=_cost_text(cost), **failure)

    def _end(self, script: str, claim: Claim, **arguments: Any) -> Operation[None]:
        task_id = check_claim(claim).task.task_id
        word = yield from self._call(end_call(script, task_id, claim.token, **arguments))
        if word == b"lost_lease":
            raise _lost(task_id)

    @operation
    @at_found("status", "task_id")
    def cancel(self, task_id: str, *, tenant: str | None = None) -> Operation[bool]:
        """Cancel a task: remove it if it waits, or ask its worker to stop it.

        tenant: whose task, for an id that several tenants use in a queue with partitions; without
        it, AmbiguousTask is raised then.

        True if it will not run, or, when it runs now, if the request is recorded: its worker sees
        it with the next `extend`, and however the run ends, the task ends as cancelled. A run that
        goes on for another lease is ended without its worker. False if the task has ended
        otherwise or is not known.
        """
        check_name(task_id, "task_id")
        word = yield from self._call(Call("cancel", op=new_id(), id=task_id))
        return bool(word != b"over")

    @operation
    @at_found("status", "task_id")
    def reschedule(
        self,
        task_id: str,
        *,
        at: datetime | float | None = None,
        delay: float | None = None,
        tenant: str | None = None,
    ) -> Operation[bool]:
        """Change when a task becomes ready; False if a worker has claimed it, or it has ended.

        `at` is an aware datetime or seconds since 1970, `delay` is in seconds from now; neither, or
        a time in the past, means now. Its place among the user's tasks is that of its push. For
        `tenant` see `cancel`. Raises UnknownTask, and InvalidTask for a bad time.
        """
        check_name(task_id, "task_id")
        when = moment_text(*check_when(delay, at))
        word = yield from self._call(Call("reschedule", op=new_id(), id=task_id, when=when))
        if word == b"absent":
            raise UnknownTask(f"there is no task {task_id!r} to reschedule")
        return bool(word == b"moved")


def _words(answers: Iterable[Iterable[bytes]]) -> list[str]:
    return [word.decode() for answer in answers for word in answer]


def _finish_rows(results: object) -> list[tuple[str, ...]]:
    """The rows of results, given as (claim, result) or (claim, result, report)."""
    rows = []
    for result in check_items(results, "results", "(claim, result)"):
        if not isinstance(result, tuple | list) or not 2 <= len(result) <= 3:
            raise InvalidInput(
                f"results must be pairs of a claim and its result, not {kind_of(result)}"
            )
        check_claim(result[0])
        rows.append(_finish_row(*result))
    return rows


def _cost_text(cost: float | None) -> str:
    """The cost of an attempt as scripts take it; "" if it was not given. Raises InvalidTask."""
    return "" if cost is None else repr(check_cost(cost))


def _finish_row(
    claim: Claim, result: Any, report: Report | None = None, cost: str = ""
) -> tuple[str, ...]:
    text = "" if result is None else encode_json(result, "result", MAX_RESULT_BYTES)
    return load_script("finish").row(
        id=claim.task.task_id,
        token=claim.token,
        result=text,
        took="" if report is None else f"{report.seconds * 1000:.3f}",
        report="" if report is None else report.document,
        cost=cost or ("" if report is None else _cost_text(report.cost)),
    )


def _finish_calls(rows: Sequence[tuple[str, ...]]) -> Iterator[Call]:
    """The scripts that finish tasks: each takes a bounded number and size."""
    batches = in_batches(rows, FINISHED_AT_ONCE, lambda row: sum(map(len, row)), FINISHED_BYTES)
    return (Call("finish", rest=[field for row in batch for field in row]) for batch in batches)


def _lost(task_id: str) -> LeaseLost:
    return LeaseLost(
        f"the lease of task {task_id!r} is lost: another worker may own it now, and nothing was "
        "changed; ask for a longer lease, or extend it while the task runs"
    )
