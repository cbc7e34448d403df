"""The fair queue: push tasks, claim them fairly between users, and say how they went."""

import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Self

import redis

from fairqueue.clock import Clock, from_ms, read_ms
from fairqueue.errors import (
    BrokenRecord,
    ConfigurationError,
    FairQueueError,
    InvalidInput,
    InvalidTask,
    LeaseLost,
    QueueFull,
    RedisRefused,
    UnknownLayout,
    UnknownTask,
    kind_of,
    shown,
)
from fairqueue.link.connection import MAX_TIMEOUT_S, Argument, Link, Listener, in_batches
from fairqueue.link.keys import Keys
from fairqueue.link.urls import open_client
from fairqueue.models import (
    UNREADABLE,
    Claim,
    Explanation,
    HandlerLimits,
    QueueSettings,
    QueueSnapshot,
    Task,
    TaskInfo,
    UserSettings,
    check_when,
    moment_text,
    new_id,
)
from fairqueue.queue.explanation import Waiting
from fairqueue.queue.records import (
    broken_status,
    handler_limits,
    task_info,
    user_settings,
)
from fairqueue.queue.reports import Failure, Report, fingerprint
from fairqueue.queue.snapshot import snapshot
from fairqueue.queue.workers import WorkerStore
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.validation import (
    MAX_ERROR_LENGTH,
    MAX_NOTE_LENGTH,
    MAX_RESULT_BYTES,
    check_count,
    check_items,
    check_name,
    check_number,
    check_seconds,
    check_tenant,
    encode_json,
)

PUSH_CHUNK = 250  # tasks in one script: some 3 ms of the server's time
CLAIM_HEAD = 4  # values in the answer of the script `claim` before its tasks, four values each
FINISH_CHUNK = 250  # results that one call of finish_and_claim takes
FINISHED_AT_ONCE = 100  # of them in one script, and fewer with long results: some 4 ms
FINISHED_BYTES = 256 * 1024
EXTEND_CHUNK = 250  # leases in one script: some 3 ms
CLAIM_LIMIT = 1000  # tasks in one claim at most
CLAIM_CHUNK = 250  # of them in one script: some 5 ms of the server's time
# A token that a dying worker took is lost: others look for themselves after this long.
LONGEST_WAIT_S = 5.0
PAUSE_S = 0.1  # after a connection broke while it waited
MAX_LEASE_S = 86_400.0
JAIN_SAMPLE = 1000  # backlogged users whose service is compared
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 1000.0
MOST_SLOTS = 1000  # so many leases are looked at when all slots of a name seem taken

_HOST = socket.gethostname()

# A claim, the result, and what the attempt has to tell.
Result = tuple[Claim, Any] | tuple[Claim, Any, "Report | None"]


class _Unset:
    def __repr__(self) -> str:
        return "unchanged"


UNSET: Any = _Unset()


class Answer(NamedTuple):
    """What a claim was told: the tasks, seconds until there may be more, and where to wait."""

    claims: list[Claim]
    hint: float
    wake: str  # the key of the list that has a token when there is something for this worker


class TaskQueue:
    """A queue on Redis that is fair between users. May be used by many threads at once.

    Making one opens no connection; the first call does, and checks that the server is one that
    keeps what it is given. `timeout` bounds each operation in seconds, repeats included. `clock`
    is for tests: without one, all time is that of the Redis server.
    """

    def __init__(
        self,
        redis_client: redis.Redis,
        name: str = "default",
        *,
        timeout: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """Raises ConfigurationError for an unusable client, name, time-out or clock."""
        self.name = name
        self.keys = Keys(name)
        timeout = check_seconds(
            timeout, "timeout", ConfigurationError, least=0.1, most=MAX_TIMEOUT_S
        )
        if clock is not None and not callable(getattr(clock, "now_ms", None)):
            raise ConfigurationError(
                "clock must be None, or have a method now_ms as ManualClock has, which "
                f"{kind_of(clock)} has not"
            )
        self.link = Link(redis_client, self.keys, timeout=timeout, clock=clock)
        self._server: EmbeddedServer | None = None
        self._checked = False

    @classmethod
    def from_url(
        cls, url: str, name: str = "default", *, timeout: float = 5.0, clock: Clock | None = None
    ) -> Self:
        """A queue at a `redis://`, `rediss://`, `unix://` or `redis+sentinel://` URL.

        The last is `redis+sentinel://host:port,host:port/service/0`: the queue is at the primary
        that the sentinels name, whichever that is. Raises ConfigurationError.
        """
        return cls(open_client(url), name, timeout=timeout, clock=clock)

    @classmethod
    def embedded(
        cls,
        path: str | os.PathLike[str] | None = None,
        name: str = "default",
        *,
        clock: Clock | None = None,
    ) -> Self:
        """A queue with a real server of its own, which ends with this process.

        With a `path` the data is kept there, and each acknowledged write survives a crash; without,
        it is gone at the end. Raises EmbeddedServerError, saying what is missing.
        """
        server = EmbeddedServer.start(path)
        try:
            queue = cls.from_url(server.url, name, clock=clock)
        except BaseException:
            server.stop()
            raise
        queue._server = server
        return queue

    @property
    def server(self) -> EmbeddedServer | None:
        """The embedded server, if this queue has one."""
        return self._server

    def destroy(self) -> None:
        """Delete the queue with all its tasks and schedules. There is no way back.

        Raises UnknownLayout for the queue of a later version, which may have more keys.
        """
        try:
            self.inspect()
        except UnknownLayout:
            raise
        except RedisRefused:  # one whose keys are spoilt can be deleted
            pass
        self.link.ask(("UNLINK", *self.keys.all()))

    def close(self) -> None:
        """Close the connections, and end the embedded server if there is one."""
        self.link.close()
        if self._server is not None:
            self._server.stop()
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TaskQueue(name={self.name!r})"

    def check(self, timeout: float | None = None) -> None:
        """See that Redis is there and keeps what it is given.

        Raises RedisUnavailable, or ConfigurationError for a server that evicts keys or is too old.
        """
        _check_timeout(timeout)
        try:
            info = _parse_info(self.link.ask(("INFO",), timeout=timeout)[0])
        except RedisRefused:
            info = {}  # not allowed, or not known: fakeredis
            self.link.ask(("PING",), timeout=timeout)
        policy = info.get("maxmemory_policy", "noeviction")
        if policy.startswith("allkeys"):
            raise ConfigurationError(
                f"this Redis has maxmemory-policy {policy!r} and may throw tasks and schedules "
                "away: set it to 'noeviction'"
            )
        version = info.get("redis_version", "7.0")
        if int(version.split(".")[0]) < 7:
            raise ConfigurationError(f"this is Redis {version}: FairQueue needs 7.0 or later")
        self._checked = True

    def _run(self, script: str, **arguments: Any) -> Any:
        if not self._checked:
            self.check()
        return self.link.run(script, **arguments)

    # --- pushing ----------------------------------------------------------------------------------

    def push(self, task: Task) -> str:
        """Store a task; its id. The same task pushed again is one task.

        Raises InvalidTask when the id means another task, QueueFull when a limit is reached; then
        nothing was stored.
        """
        self._pushed(self._run("push", rest=_push_arguments(task)))
        return task.task_id

    def push_many(self, tasks: Iterable[Task]) -> list[str]:
        """Store many tasks in few round trips; their ids in order.

        Each batch of a few hundred is stored together or not at all. Raises as `push`; with more
        than one batch, others may have been stored then. The call can be repeated with the same
        tasks: those that are stored already are not doubled.
        """
        listed = check_items(tasks, "tasks", "tasks", InvalidTask)
        for task in listed:
            if not isinstance(task, Task):
                raise InvalidTask(f"{shown(task)} is no Task: make one with Task.create(...)")
        if listed and not self._checked:
            self.check()
        calls = (
            {"rest": [field for task in batch for field in _push_arguments(task)]}
            for batch in in_batches(listed, PUSH_CHUNK, lambda task: len(task.document))
        )
        stored = "its batch was not stored, others of this call may be"
        with closing(self.link.run_each("push", calls)) as answers:
            for answer in answers:
                self._pushed(answer, stored if len(listed) > PUSH_CHUNK else "nothing was stored")
        return [task.task_id for task in listed]

    def _pushed(self, answer: list[Any], stored: str = "nothing was stored") -> None:
        word = answer[0]
        if word == b"other":
            raise InvalidTask(
                f"task_id {answer[1].decode()!r} is taken by a task with other content: choose "
                f"another id; {stored}"
            )
        if word == b"full":
            whose = "the queue" if answer[1] == b"queue" else "the user"
            raise QueueFull(
                f"task {answer[2].decode()!r} does not fit: {whose} has as many waiting tasks as "
                f"max_waiting allows; {stored}"
            )

    # --- claiming ---------------------------------------------------------------------------------

    def claim(
        self,
        worker_id: str,
        limit: int = 1,
        lease: float = 30.0,
        wait: float = 0.0,
        *,
        names: Iterable[str] | None = None,
        avoid: Iterable[str] = (),
    ) -> list[Claim]:
        """Take up to `limit` tasks, fairly between users, each for `lease` seconds.

        Returns [] when nothing is ready; with `wait`, blocks up to so many seconds for the first.
        No more are taken once their documents come to 1 MiB, or their names to 64 KiB: the next
        claim gets the others. With
        `names`, only tasks of these names; with `avoid`, none of those: the others stay where they
        are, and of a user's tasks the first hundred are looked at.
        """
        check_name(worker_id, "worker_id")
        check_count(limit, "limit", least=1, most=CLAIM_LIMIT)
        lease_ms = _lease_ms(lease)
        wanted = _wanted(names, avoid)
        deadline = time.monotonic() + check_seconds(wait, "wait")
        claims, hint, wake = self._claim_once(worker_id, limit, lease_ms, wanted)
        if claims or wait == 0:
            return self._claim_rest(claims, worker_id, limit, lease_ms, wanted)
        listener = self.link.listener(wake)
        try:
            while not claims:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                listener.listen_to(self.keys[wake])
                self._await(listener, min(remaining, hint, LONGEST_WAIT_S))
                claims, hint, wake = self._claim_once(worker_id, limit, lease_ms, wanted)
        finally:
            listener.close()
        return self._claim_rest(claims, worker_id, limit, lease_ms, wanted)

    def _claim_rest(
        self, claims: list[Claim], worker_id: str, limit: int, lease_ms: int, wanted: str
    ) -> list[Claim]:
        """Go on to the limit while scripts find as many as they take at most."""
        got = len(claims)
        while got == CLAIM_CHUNK and len(claims) < limit:
            try:
                more = self._claim_once(worker_id, limit - len(claims), lease_ms, wanted).claims
            except FairQueueError:
                break  # those that are held already must reach the caller
            got = len(more)
            claims += more
        return claims

    def _await(self, listener: Listener, seconds: float) -> None:
        try:
            listener.wait(seconds)
        except (redis.ConnectionError, redis.TimeoutError, redis.InvalidResponse, OSError):
            # The claim that follows finds out whether Redis is gone, and goes on if it is not.
            time.sleep(min(seconds, PAUSE_S))
        except redis.ResponseError as error:
            raise RedisRefused(f"Redis refused: {error}") from error

    def _claim_once(self, worker_id: str, limit: int, lease_ms: int, wanted: str) -> "Answer":
        """One round trip."""
        token = new_id()
        answer = self._run(
            "claim",
            op=token,
            worker=worker_id,
            limit=min(limit, CLAIM_CHUNK),
            lease_ms=lease_ms,
            place=this_place(),
            names=wanted,
        )
        return self._claims(answer, token, worker_id, lease_ms)

    def _claims(self, answer: list[Any], token: str, worker_id: str, lease_ms: int) -> "Answer":
        self.link.learn_time(int(answer[1]))
        # From the claim and not from the answer, which may be one to a repetition.
        until = from_ms(int(answer[2]) + lease_ms)
        claims = []
        for i in range(CLAIM_HEAD, len(answer), 4):
            try:
                task = _claimed(answer[i], answer[i + 1])
            except BrokenRecord as error:
                self._end("bury", answer[i], token, **_failure(str(error), None, "unreadable"))
                continue
            claims.append(
                Claim(
                    task=task,
                    token=token,
                    attempt=answer[i + 2],
                    worker_id=worker_id,
                    lease_until=until,
                    due_ms=answer[i + 3],
                )
            )
        hint = int(answer[0])
        wake = f"wake_{answer[3]}" if answer[3] else "wake"
        return Answer(claims, math.inf if hint < 0 else hint / 1000, wake)

    def extend(
        self,
        claims: Sequence[Claim],
        lease: float = 30.0,
        *,
        timeouts: Sequence[float | None] | None = None,
    ) -> list[str]:
        """Prolong many leases in one call, to `lease` seconds from now.

        None beyond the deadline of its run: a lease after its time-out, or after the "cancel".
        `timeouts` says for each claim how many seconds its handler may run, None for any number;
        the task's own time-out and what set_limits has said win over it. Without it, the
        time-out that a worker has declared last for the name counts.

        A word for each claim: "extended", "cancel" (extended; its cancelling was asked for),
        "ended" (it was finished, retried, released or buried with this claim already), or
        "lost_lease" (another worker may own it, or it is beyond its deadline: stop).
        """
        lease_ms = _lease_ms(lease)
        listed = [_check_claim(claim) for claim in check_items(claims, "claims", "claims")]
        said = [_timeout_ms(each) for each in timeouts] if timeouts else [""] * len(listed)
        if len(said) != len(listed):
            raise InvalidTask(f"{len(said)} timeouts for {len(listed)} claims: give one for each")
        rows = [(c.task.task_id, c.token, ms) for c, ms in zip(listed, said, strict=True)]
        words: list[str] = []
        for i in range(0, len(rows), EXTEND_CHUNK):
            rest = [argument for row in rows[i : i + EXTEND_CHUNK] for argument in row]
            answer = self._run("extend", op=new_id(), lease_ms=lease_ms, rest=rest)
            words += [word.decode() for word in answer]
        return words

    # --- ending -----------------------------------------------------------------------------------

    def finish(self, claim: Claim, result: Any = None) -> None:
        """Record that the task is done, with a small JSON result if there is one.

        Raises LeaseLost if another may own it now, InvalidPayload for an unusable result.
        """
        if self.finish_many([(_check_claim(claim), result)])[0] == "lost_lease":
            raise _lost(claim.task.task_id)

    def finish_many(self, results: Iterable[Result]) -> list[str]:
        """Record that many tasks are done, given as (claim, result) or (claim, result, report).

        One word for each:
        "finished", "cancelled" (its cancelling was asked for), or "lost_lease" (nothing changed).
        """
        rows = _finish_rows(results)
        words: list[str] = []
        for answer in self.link.run_each("finish", _finish_calls(rows)):
            words += [word.decode() for word in answer]
        return words

    def finish_and_claim(
        self,
        results: Sequence[Result],
        worker_id: str,
        limit: int,
        lease: float = 30.0,
        *,
        names: Iterable[str] | None = None,
        avoid: Iterable[str] = (),
    ) -> tuple[list[str], list[Claim], float]:
        """Record what is done and take the next tasks, in one round trip.

        At most 250 results, and 250 tasks whatever the limit. The words of `finish_many`, the
        claims of `claim`, and how many seconds until there may be more (infinite: nothing is known
        to come).
        """
        words, answer = self.exchange(results, worker_id, limit, lease, names=names, avoid=avoid)
        return words, answer.claims, answer.hint

    def exchange(
        self,
        results: Sequence[Result],
        worker_id: str,
        limit: int,
        lease: float = 30.0,
        *,
        names: Iterable[str] | None = None,
        avoid: Iterable[str] = (),
    ) -> tuple[list[str], "Answer"]:
        """The same as `finish_and_claim`, with the list at which one who finds nothing waits."""
        check_name(worker_id, "worker_id")
        rows = _finish_rows(results)
        check_count(len(rows), "results", most=FINISH_CHUNK)
        check_count(limit, "limit", most=CLAIM_LIMIT)
        lease_ms, token = _lease_ms(lease), new_id()
        if not self._checked:
            self.check()
        calls: list[tuple[str, dict[str, Any]]] = [("finish", call) for call in _finish_calls(rows)]
        finishes = len(calls)
        if limit:
            claim = {
                "op": token,
                "worker": worker_id,
                "limit": min(limit, CLAIM_CHUNK),
                "lease_ms": lease_ms,
                "place": this_place(),
                "names": _wanted(names, avoid),
            }
            calls.append(("claim", claim))
        answers = self.link.run_together(*calls)
        words = [word.decode() for answer in answers[:finishes] for word in answer]
        if not limit:
            return words, Answer([], 0.0, "wake")
        return words, self._claims(answers[-1], token, worker_id, lease_ms)

    def retry(
        self, claim: Claim, error: str = "", delay: float = 0.0, *, report: Report | None = None
    ) -> None:
        """Offer the task again after `delay` seconds, keeping the error. Raises LeaseLost."""
        delay_ms = round(check_seconds(delay, "delay") * 1000)
        failure = _failure(error, report, _check_claim(claim).task.name)
        del failure["fingerprint"]
        self._end_claim("retry", claim, delay_ms=delay_ms, **failure)

    def release(self, claim: Claim) -> None:
        """Give the task back as if it had not been claimed. Raises LeaseLost."""
        self._end_claim("release", _check_claim(claim))

    def bury(self, claim: Claim, error: str = "", *, report: Report | None = None) -> None:
        """Put the task among the dead letters. Raises LeaseLost."""
        failure = _failure(error, report, _check_claim(claim).task.name)
        self._end_claim("bury", claim, **failure)

    def _end_claim(self, script: str, claim: Claim, **arguments: Argument) -> None:
        if self._end(script, claim.task.task_id, claim.token, **arguments) == b"lost_lease":
            raise _lost(claim.task.task_id)

    def _end(self, script: str, task_id: str | bytes, token: str, **arguments: Argument) -> Any:
        # Not a random operation id: a caller who got RedisUnavailable may make the same call again,
        # and lua/task/extend.lua can tell a claim that was given back from one that was lost.
        name = task_id if isinstance(task_id, str) else task_id.hex()
        operation = f"{script}:{token}:{name}"
        return self._run(script, op=operation, id=task_id, token=token, **arguments)

    def cancel(self, task_id: str) -> bool:
        """See to it that a task does not run (any more).

        True if it will not run, or, when it runs now, if the request is recorded: its worker sees
        it with the next `extend`, and however the run ends, the task ends as cancelled. One that
        goes on for a lease after that is ended without it. False if it has ended otherwise or is
        not known.
        """
        check_name(task_id, "task_id")
        return bool(self._run("cancel", op=new_id(), id=task_id) != b"over")

    def reschedule(
        self, task_id: str, *, at: datetime | float | None = None, delay: float | None = None
    ) -> bool:
        """Move the time of a task that no worker has claimed; False if one has, or it has ended.

        `at` is an aware datetime or seconds since 1970, `delay` is in seconds from now; neither, or
        a moment in the past, means now. Its place among the user's tasks is that of its push.
        Raises UnknownTask, and InvalidTask for a bad time.
        """
        check_name(task_id, "task_id")
        when = moment_text(*check_when(delay, at))
        word = self._run("reschedule", op=new_id(), id=task_id, when=when)
        if word == b"absent":
            raise UnknownTask(f"there is no task {task_id!r} to move")
        return bool(word == b"moved")

    # --- looking ----------------------------------------------------------------------------------

    def size(self, user_id: str | None = None) -> int:
        """How many tasks wait for a worker, also of paused or capped users; not delayed ones."""
        keys = self.keys["backlog"], self.keys["held"]
        if user_id is None:
            return sum(self.link.ask(*(("ZCARD", key) for key in keys)))
        check_name(user_id, "user_id")
        user = f"[{user_id}\0", f"({user_id}\1"
        return sum(self.link.ask(*(("ZLEXCOUNT", key, *user) for key in keys)))

    def get(self, task_id: str) -> TaskInfo | None:
        """What is known of a task, or None. Raises BrokenRecord if that cannot be read."""
        check_name(task_id, "task_id")
        status, document, lease_end = self.link.ask(
            ("HGET", self.keys["status"], task_id),
            ("HGET", self.keys["tasks"], task_id),
            ("ZSCORE", self.keys["leases"], task_id),
        )
        return None if status is None else task_info(task_id, status, document, lease_end)

    def explain(self, task_id: str) -> Explanation | None:
        """Why a task waits: the reasons, with the one that binds first; None if it is not known.

        Its sentences have the times of this process's zone. A worker that does not send heartbeats
        (one that calls `claim` itself) counts as alive while it holds a lease. Raises BrokenRecord.
        """
        check_name(task_id, "task_id")
        answer = self._run("explain", id=task_id)
        if not answer:
            return None
        try:
            return Waiting(task_id, answer, WorkerStore(self.link).alive()).explanation()
        except UNREADABLE as error:
            raise broken_status(task_id, error) from None

    def inspect(self, timeout: float | None = None) -> QueueSnapshot:
        """Counts and counters of the queue at this moment, in one bounded read."""
        _check_timeout(timeout)
        return snapshot(self.link.run("queue_stats", sample=JAIN_SAMPLE, timeout=timeout))

    # --- settings ---------------------------------------------------------------------------------

    def set_user(
        self,
        user_id: str,
        *,
        weight: float = UNSET,
        max_running: int | None = UNSET,
        max_waiting: int | None = UNSET,
        rate: float | None = UNSET,
        paused: bool = UNSET,
        tenant: str | None = UNSET,
        note: str | None = None,
        by: str | None = None,
        until: datetime | float | None = None,
    ) -> UserSettings:
        """Change what is given of a user's settings, at once and for what already waits.

        weight: share of service, 0.01 to 1000. max_running: tasks at a time. max_waiting: tasks
        that may wait for a worker, delayed ones not counted. rate: tasks per second. None takes a
        limit away. paused: no task is handed out; with True, `note` says why, `by` who wants it,
        and `until` (an aware datetime or seconds since 1970) when the pause ends by itself. tenant:
        the group that the user belongs to from now on, None for none; what is stored of its tasks
        and schedules stays as it is. Raises InvalidTask for a bad user id and ConfigurationError
        for a bad value.
        """
        check_name(user_id, "user_id")
        change: dict[str, object] = {}
        if weight is not UNSET:
            change["weight"] = check_number(
                weight, "weight", ConfigurationError, least=LEAST_WEIGHT, most=MOST_WEIGHT
            )
        for field, value in (("max_running", max_running), ("max_waiting", max_waiting)):
            if value is not UNSET:
                change[field] = (
                    None
                    if value is None
                    else check_count(value, field, ConfigurationError, least=1)
                )
        if rate is not UNSET:
            change["rate"] = (
                None
                if rate is None
                else check_number(rate, "rate", ConfigurationError, least=0.001, most=1e6)
            )
        if paused is not UNSET:
            if not isinstance(paused, bool):
                raise ConfigurationError(f"paused {shown(paused)} is neither True nor False")
            change["paused"] = paused
        change |= self._pause(paused, note, by, until)
        if tenant is not UNSET:
            change["tenant"] = None if tenant is None else check_tenant(tenant, ConfigurationError)
        text = self._run("set_user", op=new_id(), user=user_id, change=json.dumps(change))
        return user_settings(text, self.link.now_ms())

    def _pause(self, paused: Any, note: Any, by: Any, until: Any) -> dict[str, object]:
        """What is said of a pause, as it is stored. Raises ConfigurationError."""
        if paused is not True:
            if (note, by, until) != (None, None, None):
                raise ConfigurationError("note, by and until are for a pause: pass paused=True")
            return {}
        if by is not None:
            check_name(by, "by", ConfigurationError)
        if note is not None and (not isinstance(note, str) or len(note) > MAX_NOTE_LENGTH):
            raise ConfigurationError(
                f"note {shown(note)} must be a text of at most {MAX_NOTE_LENGTH} characters"
            )
        until_ms = None if until is None else read_ms(until, "until", ConfigurationError)
        if until_ms is not None and until_ms <= self.link.now_ms():
            raise ConfigurationError(f"until {from_ms(until_ms).isoformat()} is in the past")
        return {"pause_note": note, "paused_by": by, "paused_until": until_ms}

    def pause_user(
        self,
        user_id: str,
        *,
        note: str | None = None,
        by: str | None = None,
        until: datetime | float | None = None,
    ) -> UserSettings:
        """Hand out no task of a user until it is resumed, or until a moment; see `set_user`."""
        return self.set_user(user_id, paused=True, note=note, by=by, until=until)

    def resume_user(self, user_id: str) -> UserSettings:
        """Hand out the tasks of a user again; see `set_user`."""
        return self.set_user(user_id, paused=False)

    def get_user(self, user_id: str) -> UserSettings:
        """The settings of a user; the defaults for one that has none."""
        check_name(user_id, "user_id")
        text, tenant = self.link.ask(
            ("HGET", self.keys["users"], user_id), ("HGET", self.keys["tenants"], user_id)
        )
        settings = user_settings(text or b"{}", self.link.now_ms())
        return replace(settings, tenant=_tenant(tenant))

    def tenant_of(self, user_id: str) -> str | None:
        """The tenant that a user belongs to, or None.

        That is the one which `set_user` says, or else the first that a task or schedule of the user
        has named.
        """
        check_name(user_id, "user_id")
        tenant = self.link.ask(("HGET", self.keys["tenants"], user_id))[0]
        return _tenant(tenant)

    def set_limits(
        self,
        name: str,
        *,
        slots: int | None = None,
        rate: float | None = None,
        timeout: float | None = None,
    ) -> None:
        """Limit all tasks of a name over all workers, from now on; see HandlerLimits.

        What is not given is not limited. Stands over what workers declare for their handlers; with
        no limit at all that is taken back, and what the next worker to start declares holds. Raises
        ConfigurationError for a bad value.
        """
        check_name(name, "name", ConfigurationError)
        limits = check_limits(slots, rate, timeout)
        text = json.dumps({**limits, "by": "operator"}) if limits else ""
        self._run("set_limits", op=new_id(), task_name=name, limits=text)

    def get_limits(self) -> dict[str, HandlerLimits]:
        """The limits that hold, by name of the tasks."""
        stored = self.link.ask(("HGETALL", self.keys["limits"]))[0]
        return {
            name.decode("utf-8", "replace"): handler_limits(text)
            for name, text in zip(stored[::2], stored[1::2], strict=True)
        }

    def configure(
        self,
        *,
        max_attempts: int = UNSET,
        max_waiting: int = UNSET,
        keep_finished: int = UNSET,
        keep_finished_for: float | timedelta = UNSET,
        keep_dead: int = UNSET,
        keep_dead_for: float | timedelta = UNSET,
        cost: str = UNSET,
        critical_share: float = UNSET,
        ageing: float | timedelta = UNSET,
        max_schedules: int = UNSET,
        min_interval: float | timedelta = UNSET,
    ) -> QueueSettings:
        """Change what is given of the queue's settings, for all its processes; see QueueSettings.

        Raises ConfigurationError for a bad value, and for `ageing` while tasks are queued.
        """
        rest: list[Argument] = []
        counts = (
            ("max_attempts", max_attempts, 1),
            ("max_waiting", max_waiting, 0),
            ("keep_finished", keep_finished, 0),
            ("keep_dead", keep_dead, 0),
            ("max_schedules", max_schedules, 0),
        )
        for name, count, least in counts:
            if count is not UNSET:
                rest += [name, check_count(count, name, ConfigurationError, least=least)]
        durations = (
            ("keep_finished", "_for", keep_finished_for),
            ("keep_dead", "_for", keep_dead_for),
            ("ageing", "", ageing),
            ("min_interval", "", min_interval),
        )
        for name, suffix, duration in durations:
            if duration is not UNSET:
                seconds = check_seconds(duration, name + suffix, ConfigurationError)
                rest += [name + "_ms", round(seconds * 1000)]
        if cost is not UNSET:
            if cost not in ("tasks", "time"):
                raise ConfigurationError(f"cost {shown(cost)} is neither 'tasks' nor 'time'")
            rest += ["cost", cost]
        if critical_share is not UNSET:
            share = check_number(
                critical_share, "critical_share", ConfigurationError, least=0.0, most=1.0
            )
            rest += ["critical_share", repr(share)]
        if self._run("configure", op=new_id(), rest=rest) == b"not_empty":
            raise ConfigurationError(
                f"ageing {ageing!r} can be set only while no task is queued: a task's rank is made "
                "when it is pushed"
            )
        return self.settings()

    def settings(self) -> QueueSettings:
        """The settings of the queue as they are."""
        stored = self.link.ask(("HGETALL", self.keys["settings"]))[0]
        values = asdict(QueueSettings())
        for field, value in zip(stored[::2], stored[1::2], strict=True):
            name, text = field.decode("utf-8", "replace"), value.decode("utf-8", "replace")
            in_ms = name.endswith("_ms")
            if in_ms:
                plain = name.removesuffix("_ms")
                name = plain + "_for" if plain + "_for" in values else plain
            if name in values:
                with suppress(*UNREADABLE):  # it is told as the default then
                    values[name] = _setting(text, values[name], in_ms)
        return QueueSettings(**values)


def _setting(text: str, default: Any, in_ms: bool) -> Any:
    if isinstance(default, str):
        return text
    value = int(text) / 1000 if in_ms else type(default)(text)
    if not math.isfinite(value):  # OverflowError for a whole number that is too long
        raise ValueError(f"{value} is no setting")
    return value


def _push_arguments(task: Task) -> tuple[Argument, ...]:
    if not isinstance(task, Task):
        raise InvalidTask(f"{shown(task)} is no Task: make one with Task.create(...)")
    return (
        task.task_id,
        task.user_id,
        task.name,
        task.document,
        task.status_head,
        int(task.priority),
        task.when,
        task.schedule_id or "",
    )


def _check_claim(claim: object) -> Claim:
    if isinstance(claim, Claim):
        return claim
    raise InvalidInput(
        f"claim must be a Claim, not {kind_of(claim)}: pass one of those that claim() returned"
    )


def _finish_rows(results: object) -> list[tuple[str, ...]]:
    """What is sent of results, given as (claim, result) or (claim, result, report)."""
    rows = []
    for result in check_items(results, "results", "(claim, result)"):
        if not isinstance(result, tuple | list) or not 2 <= len(result) <= 3:
            raise InvalidInput(
                f"results must be pairs of a claim and its result, not {kind_of(result)}"
            )
        _check_claim(result[0])
        rows.append(_finish_row(*result))
    return rows


def _finish_row(claim: Claim, result: Any, report: Report | None = None) -> tuple[str, ...]:
    text = "" if result is None else encode_json(result, "result", MAX_RESULT_BYTES)
    if report is None:
        return claim.task.task_id, claim.token, text, "", ""
    took_ms = f"{report.seconds * 1000:.3f}"
    return claim.task.task_id, claim.token, text, took_ms, report.document


def _finish_calls(rows: Sequence[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    """The arguments of the scripts that finish tasks: each takes a bounded number and size."""
    batches = in_batches(rows, FINISHED_AT_ONCE, lambda row: sum(map(len, row)), FINISHED_BYTES)
    for batch in batches:
        yield {"rest": [field for row in batch for field in row]}


def _failure(error: object, report: Report | None, name: str) -> dict[str, Argument]:
    text = _error_text(error)
    mark = report.fingerprint if report is not None else ""
    return {
        "error": text,
        "timed_out": "1" if report is not None and report.timed_out else "",
        "fingerprint": mark or fingerprint(name, Failure(type="", message=text)),
        "report": "" if report is None else report.document,
    }


def _check_timeout(timeout: object) -> None:
    """Raises ConfigurationError unless it is None or how many seconds a call may take."""
    if timeout is not None:
        check_seconds(timeout, "timeout", ConfigurationError, least=0.001)


def _timeout_ms(timeout: float | None) -> int:
    """How long a handler may run, as the script takes it; 0 for ever."""
    if timeout is None:
        return 0
    return max(1, round(check_seconds(timeout, "timeout", InvalidTask) * 1000))


def _wanted(names: Iterable[str] | None, avoid: Iterable[str]) -> str:
    """Which names a claim wants, as the script takes it; sorted: the same names are one kind."""
    avoided = check_items(avoid, "avoid", "task names", InvalidTask)
    unwanted = [check_name(name, "avoid") for name in avoided]
    if names is None:
        return "-" + "\n".join(sorted({*unwanted})) if unwanted else ""
    given = check_items(names, "names", "task names, or None for all", InvalidTask)
    left_out = set(unwanted)
    listed = sorted({check_name(each, "names") for each in given} - left_out)
    if not listed:
        raise InvalidTask("names leave nothing to claim: give names, or None for all")
    return "+" + "\n".join(listed)


def this_place() -> str:
    """Host and process, for records of who does something."""
    return f"{_HOST} {os.getpid()}"


def check_limits(slots: object, rate: object, timeout: object) -> dict[str, float]:
    """Limits of a handler as they are stored. Raises ConfigurationError naming the value."""
    limits: dict[str, float] = {}
    if slots is not None and check_count(slots, "slots", ConfigurationError, most=MOST_SLOTS):
        limits["slots"] = slots  # type: ignore[assignment]
    if rate is not None:
        limits["rate"] = check_number(rate, "rate", ConfigurationError, least=0.001, most=1e6)
    if timeout is not None:
        seconds = check_seconds(timeout, "timeout", ConfigurationError, least=0.001)
        limits["timeout_ms"] = round(seconds * 1000)
    return limits


def _tenant(name: bytes | None) -> str | None:
    return None if name is None else name.decode("utf-8", "replace")


def _claimed(task_id: bytes, document: bytes) -> Task:
    try:
        return Task.from_document(task_id.decode(), document)
    except UnicodeDecodeError:
        raise BrokenRecord(f"the task id {task_id!r} is no text") from None


def _lease_ms(lease: object) -> int:
    return round(check_seconds(lease, "lease", least=0.001, most=MAX_LEASE_S) * 1000)


def _lost(task_id: str) -> LeaseLost:
    return LeaseLost(
        f"the lease of task {task_id!r} is lost: another worker may own it now, and nothing was "
        "changed; ask for a longer lease, or extend it while the task runs"
    )


def _error_text(error: object) -> str:
    return str(error).encode("utf-8", "replace").decode()[:MAX_ERROR_LENGTH]


def _parse_info(text: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}
