"""A plain model of the queue and of its schedulers: what FairQueue should do, in dicts and lists.

It is written from the words of the design and of the headers of the scripts, and is slow on
purpose: all that can be worked out from the tasks (who waits, who runs, what is due) is worked out
anew each time. The test beside it compares the real queue with it after every step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

CRITICAL = 6
CRITICAL_CREDIT = 10.0  # CRITICAL tasks that may go first in a row before their share binds
BURST_S = 0.1  # a rate limit lets through so many seconds' worth at once, at least one task
UPKEEP = 100  # delays and leases that one claim looks after
WINDOW_MS = 10_000  # so often, a claim forgets old records too
TRIMMED = 200
CATCH_UP = 10
RETURNED = 1000  # held tasks that one call brings back
LOOK_AGAIN_MS = 1000
MISSED_CAP = 1000
NEVER = math.inf

Document = tuple[object, ...]
Ending = tuple[str, str, str]  # a call that ends a claim: its name, the task, the token


@dataclass(kw_only=True)
class ModelTask:
    """A task and all that has happened to it. `arrival` orders tasks of one level."""

    task_id: str
    user: str
    level: int
    document: Document
    name: str = "default"
    timeout_ms: int | None = None
    due_ms: int = 0
    arrival: int = 0
    state: str = "new"
    attempts: int = 0
    since_ms: int = 0
    token: str | None = None
    charge: float = 0.0
    claimed_ms: int = 0
    lease_end_ms: int = 0
    ended_ms: int = 0
    cancel_asked: bool = False
    cancel_heard: bool = False
    deadline_ms: int | None = None  # when it is ended if its lease was kept until then
    has_slot: bool = False
    is_held: bool = False  # set aside until its name has a slot free

    @property
    def rank(self) -> tuple[int, int]:
        """Order by level, highest first, then by arrival."""
        return CRITICAL - self.level, self.arrival


@dataclass(frozen=True, kw_only=True)
class ModelUser:
    """The settings of one user."""

    weight: float = 1.0
    max_running: int | None = None
    rate: float | None = None
    paused: bool = False


@dataclass(kw_only=True)
class ModelSettings:
    """The settings of the queue."""

    max_attempts: int = 5
    max_waiting: int = 0
    keep_finished: int = 100_000
    keep_finished_ms: int = 604_800_000
    keep_dead: int = 10_000
    keep_dead_ms: int = 2_592_000_000
    critical_share: float = 0.5
    cost: str = "tasks"


@dataclass(frozen=True, kw_only=True)
class Grave:
    """The digest of a dropped task: when it was dropped, its document and how it ended."""

    at_ms: int
    document: Document
    word: str
    token: str | None


class ModelQueue:
    """The queue. Every method takes the moment at which it happens, in ms."""

    def __init__(self) -> None:
        self.settings = ModelSettings()
        self.users: dict[str, ModelUser] = {}
        self.tasks: dict[str, ModelTask] = {}
        self.graves: dict[str, Grave] = {}
        self.claims: dict[str, list[str]] = {}
        self.answers: dict[Ending, tuple[int, str]] = {}
        self.counts: Counter[str] = Counter()
        self.arrivals = 0
        self.window_ms: int | None = None
        self.behind = False  # there are records to forget
        # Start-time fair queueing.
        self.clock = 0.0
        self.ready: dict[str, float] = {}
        self.parked: dict[str, float] = {}
        self.idle: dict[str, float] = {}
        self.throttle: dict[str, float] = {}
        self.usage: dict[str, float] = {}
        self.average: float | None = None
        # The lane of those whose next task is CRITICAL.
        self.critical: dict[str, float] = {}
        self.critical_clock = 0.0
        self.credit = CRITICAL_CREDIT
        # Slots of names, and for each name whose held task is next.
        self.slots: dict[str, int] = {}
        self.line: dict[str, dict[str, int]] = {}
        self.last_turn = 0
        self.look_at: dict[str, int] = {}  # when held tasks of a name may come back
        self.freed: set[str] = set()  # names of which a slot was freed just now
        self.seen_ms: int | None = None  # the last claim that changed a clock
        self.moved = False  # this claim changes one
        # Users of whom the claim that is made now can take nothing, at all or by the lane.
        self.passed: set[str] = set()
        self.lane_left: set[str] = set()

    # --- what can be worked out -------------------------------------------------------------------

    def user(self, user: str) -> ModelUser:
        """The settings of a user."""
        return self.users.get(user, ModelUser())

    def in_state(self, *states: str) -> list[ModelTask]:
        """The tasks in these states."""
        return [task for task in self.tasks.values() if task.state in states]

    def backlog(self, user: str) -> list[ModelTask]:
        """A user's waiting tasks, next one first."""
        mine = [t for t in self.in_state("ready") if t.user == user and not t.is_held]
        return sorted(mine, key=lambda task: task.rank)

    def held(self, user: str, name: str) -> list[ModelTask]:
        """A user's tasks of a name that wait for a slot, next one first."""
        mine = [t for t in self.in_state("ready") if t.is_held and (t.user, t.name) == (user, name)]
        return sorted(mine, key=lambda task: task.rank)

    def room(self, name: str) -> float:
        """How many tasks of a name may begin."""
        used = sum(task.has_slot and task.name == name for task in self.in_state("running"))
        return self.slots.get(name, math.inf) - used

    def running(self) -> Counter[str]:
        """How many tasks of each user are leased."""
        return Counter(task.user for task in self.in_state("running"))

    def holds(self, task_id: str, token: str) -> bool:
        """Whether this token has the task's lease; one that is over counts until taken back."""
        task = self.tasks.get(task_id)
        return task is not None and task.state == "running" and task.token == token

    def cost(self, user: str) -> float:
        """What a serve is charged: one, or the time that the user's tasks take on average."""
        if self.settings.cost != "time":
            return 1.0
        return self.usage.get(user, 1.0 if self.average is None else self.average)

    def stride(self, user: str) -> float:
        """How far a serve moves the user in virtual time."""
        return self.cost(user) / self.user(user).weight

    def blocked_until(self, user: str, now: int) -> float | None:
        """When a user may be served: None for now, a time, or NEVER until a setting changes."""
        settings = self.user(user)
        if settings.paused:
            return NEVER
        if settings.max_running is not None and self.running()[user] >= settings.max_running:
            return NEVER
        if settings.rate is not None:
            burst, interval = max(1, math.floor(settings.rate * BURST_S)), 1000 / settings.rate
            if self.throttle.get(user, 0.0) > now + burst * interval + 0.001:
                # The clock was set back, or the rate was lower: no debt is larger than this.
                self.throttle[user] = now + burst * interval
            free = self.throttle.get(user, 0.0) - (burst - 1) * interval
            if free > now:
                return math.ceil(free)
        return None

    def most_credit(self) -> float:
        """The credit that the CRITICAL lane can save up: at least what one refill brings."""
        share = self.settings.critical_share
        return max(CRITICAL_CREDIT, 1 + (share / (1 - share) if share < 1 else 0))

    def is_full(self, more: int) -> bool:
        """Whether `more` tasks would exceed the limit of the queue."""
        limit = self.settings.max_waiting
        return 0 < limit < len(self.in_state("ready", "delayed")) + more

    def hint(self, now: int, avoid: str | None = None, *, after_all: bool = False) -> int:
        """Ms until something may be claimed: 0 now, -1 when nothing is known.

        after_all: for one who has looked at all users, also those behind the last that was served.
        """
        others = self.ready.keys() - self.passed
        if after_all:
            others = {u for u in others if any(t.name != avoid for t in self.backlog(u))}
        if others:
            return 0
        moments: list[float] = [task.due_ms for task in self.in_state("delayed")]
        moments += [at_ms for name, at_ms in self.look_at.items() if name != avoid]
        moments += [task.lease_end_ms for task in self.in_state("running")]
        moments += [moment for moment in self.parked.values() if moment < NEVER]
        return max(0, math.ceil(min(moments) - now)) if moments else -1

    # --- users come and go ------------------------------------------------------------------------

    def _enter(self, user: str, now: int, *, newcomer: bool) -> None:
        """A user with waiting tasks takes a place in ready, or is parked."""
        until = self.blocked_until(user, now)
        if until is not None:
            self.parked[user] = until
            return
        if user in self.idle:
            self.ready[user] = max(self.clock, self.idle.pop(user))
        else:
            self.ready[user] = self.clock + (self.stride(user) if newcomer else 0.0)
        self._keep_lane(user)

    def _keep_lane(self, user: str) -> None:
        """In the CRITICAL lane are those in ready whose next task is CRITICAL."""
        backlog = self.backlog(user)
        if user in self.ready and backlog and backlog[0].level == CRITICAL:
            self.critical.setdefault(user, self.critical_clock + self.stride(user))
        else:
            self.critical.pop(user, None)

    def _park(self, user: str, until: float) -> None:
        self.idle[user] = self.ready.pop(user)
        self.parked[user] = until
        self._keep_lane(user)

    def _review(self, user: str, now: int) -> None:
        """The limits of a user, or what counts against them, have changed."""
        until = self.blocked_until(user, now)
        if user in self.parked:
            if until is not None:
                self.parked[user] = until
            else:
                del self.parked[user]
                self._enter(user, now, newcomer=False)
        elif user in self.ready and until is not None:
            self._park(user, until)

    def _settle(self) -> None:
        """Nothing is ready and nothing runs: the clock moves to the largest tag, the tags go."""
        if self.idle and not self.ready and not self.in_state("running"):
            self.clock = max([self.clock, *self.idle.values()])
            self.moved = True
            self.idle.clear()
            self.usage.clear()

    def _wait(self, tasks: list[ModelTask], now: int, *, returning: bool = False) -> None:
        """Tasks begin to wait for a worker; those that return do not make their user a newcomer."""
        users = {task.user for task in tasks}
        absent = users - self.ready.keys() - self.parked.keys()
        if absent:
            self._settle()
        for task in tasks:
            task.since_ms = task.since_ms if task.is_held else now
            task.state, task.is_held = "ready", False
        for user in absent:
            known = returning or user in self.idle or self.running()[user] > 0
            self._enter(user, now, newcomer=not known)
        for user in users - absent:
            self._keep_lane(user)

    # --- pushing ----------------------------------------------------------------------------------

    def remembers(self, task_id: str) -> bool:
        """Whether an id is known, as a task or as one that has gone not long ago."""
        return task_id in self.tasks or task_id in self.graves

    def push(self, tasks: list[ModelTask], now: int) -> str:
        """Store tasks, all or none: 'pushed', 'other' (an id means another task) or 'full'."""
        new: dict[str, ModelTask] = {}
        for task in tasks:
            task_id = task.task_id
            before = self.tasks.get(task_id) or new.get(task_id) or self.graves.get(task_id)
            if before is None:
                new[task_id] = task
            elif before.document != task.document:
                return "other"
        if new and self.is_full(len(new)):
            return "full"
        self.store(new.values(), now)
        return "pushed"

    def store(self, new: Iterable[ModelTask], now: int) -> None:
        """Store tasks that are new: they wait, or are delayed."""
        waiting = []
        for task in new:
            self.arrivals += 1
            task.arrival = self.arrivals
            self.tasks[task.task_id] = task
            if task.due_ms > now:
                task.state = "delayed"
            else:
                task.due_ms = now
                waiting.append(task)
        self._wait(waiting, now)

    # --- claiming ---------------------------------------------------------------------------------

    def claim(
        self, token: str, limit: int, lease_ms: int, now: int, avoid: str | None = None
    ) -> list[str]:
        """Hand out tasks, fairly; a repeated claim gets what it still holds, if that is any."""
        self.passed, self.lane_left = set(), set()
        self.credit = min(self.credit, self.most_credit())
        held = [task_id for task_id in self.claims.get(token, []) if self.holds(task_id, token)]
        if held:
            return held
        self.moved = False
        self._turn_window(now)
        self._upkeep(limit, now)
        served: list[str] = []
        while len(served) < limit and (task := self._serve(now, avoid)) is not None:
            task.has_slot = task.name in self.slots
            self.moved = True
            task.state, task.token, task.attempts = "running", token, task.attempts + 1
            task.claimed_ms, task.lease_end_ms = now, now + lease_ms
            if task.timeout_ms is not None:
                task.deadline_ms = now + task.timeout_ms + lease_ms
            self._move_on(task.user, now)
            served.append(task.task_id)
            if self.room(task.name) <= 0:
                self.look_at.pop(task.name, None)
        if served:
            self.claims[token] = served
            self.counts["claimed"] += len(served)
        else:
            self._settle()
        for user in [user for user, tag in self.idle.items() if tag <= self.clock]:
            del self.idle[user]
            if self.settings.cost == "time":
                self.usage.pop(user, None)
        if self.moved:
            self.seen_ms = now
        return served

    def _turn_window(self, now: int) -> None:
        """Every ten seconds or so a claim also forgets what has been kept for long enough."""
        if self.window_ms is None or abs(now - self.window_ms) >= WINDOW_MS:
            self.window_ms = now
            self._trim(TRIMMED, now)
            self._look_at_held(now)

    def _serve(self, now: int, avoid: str | None) -> ModelTask | None:
        """The next task of the next user of whom one can be taken, who is charged for it."""
        share = self.settings.critical_share
        lane_open = share >= 1 or (share > 0 and self.credit >= 1)
        while lane_open and (lane := self.critical.keys() - self.lane_left):
            user = min(lane, key=lambda user: (self.critical[user], user))
            task = self._first_runnable(user, avoid)
            if task is None or task.level != CRITICAL:
                self.lane_left.add(user)
                continue
            self.critical_clock = max(self.critical_clock, self.critical[user])
            self.critical[user] += self.stride(user)
            if share < 1:
                self.credit -= 1
            return self._charge(task, now)
        while others := self.ready.keys() - self.passed:
            user = min(others, key=lambda user: (self.ready[user], user))
            task = self._first_runnable(user, avoid)
            if task is None:
                self.passed.add(user)
                continue
            self.clock = max(self.clock, self.ready[user])
            if share < 1:
                self.credit = min(self.most_credit(), self.credit + share / (1 - share))
            return self._charge(task, now)
        return None

    def _first_runnable(self, user: str, avoid: str | None) -> ModelTask | None:
        """A user's first task that may run; those before it that lack a slot are set aside."""
        found = None
        for task in self.backlog(user):
            if task.name == avoid:
                continue
            if self.room(task.name) > 0:
                found = task
                break
            task.is_held = True
            if user not in self.line.get(task.name, {}):
                self._take_turn(task.name, user, None)
        if not self.backlog(user):
            self._leave(user)
        self._keep_lane(user)
        return found

    def _charge(self, task: ModelTask, now: int) -> ModelTask:
        user = task.user
        self.ready[user] += self.stride(user)
        rate = self.user(user).rate
        if rate is not None:
            self.throttle[user] = max(float(now), self.throttle.get(user, 0.0)) + 1000 / rate
        task.charge = float(f"{self.cost(user):.14g}")  # as JSON keeps it
        return task

    def _look_at_held(self, now: int) -> None:
        """The next claim looks at all names with held tasks."""
        if any(task.is_held for task in self.in_state("ready")):
            self.look_at |= dict.fromkeys(self.line, now)

    def _flush(self, now: int) -> None:
        """Whoever frees a slot brings the next held task of that name back."""
        if self.freed and any(task.is_held for task in self.in_state("ready")):
            self._return_held(sorted(self.freed), RETURNED, now)
        self.freed.clear()

    def _return_held(self, names: list[str], most: int, now: int) -> None:
        """Tasks that were set aside come back as far as there is room, users taking turns."""
        back: list[ModelTask] = []
        returned = Counter[str]()
        for name in names:
            room = min(most, self.room(name))
            while room > 0 and (task := self._next_held(name, back)) is not None:
                back.append(task)
                returned[name] += 1
                if self.blocked_until(task.user, now) is None:
                    room -= 1
        is_last = all(task in back for task in self.in_state("ready") if task.is_held)
        self._wait(back, now, returning=True)
        if is_last:
            self.line.clear()
        for name in names:
            # Whoever frees a slot looks; with free ones left, those that came back may not start.
            if name not in self.line or self.room(name) <= 0:
                self.look_at.pop(name, None)
            else:
                is_more = self.room(name) > returned[name]
                self.look_at[name] = now if is_more else now + LOOK_AGAIN_MS

    def _take_turn(self, name: str, user: str, tag: int | None) -> None:
        """A user's turn for a name comes one stride after a tag, or after the first in the line."""
        line = self.line.setdefault(name, {})
        if tag is None:
            tag = min(line.values(), default=self.last_turn)
        line[user] = tag + max(1, math.floor(1000 * self.cost(user) / self.user(user).weight))
        self.last_turn = max(self.last_turn, line[user])

    def _next_held(self, name: str, back: list[ModelTask]) -> ModelTask | None:
        while line := self.line.get(name):
            user = min(line, key=lambda user: (line[user], user))
            tag = line.pop(user)
            held = [task for task in self.held(user, name) if task not in back]
            if len(held) > 1:
                self._take_turn(name, user, tag)
            if not line:
                del self.line[name]
            if held:
                return held[0]
        return None

    def _move_on(self, user: str, now: int) -> None:
        """Where a user goes after a serve: stays in ready, is parked, or has nothing left."""
        if not self.backlog(user):
            self._leave(user)
            return
        until = self.blocked_until(user, now)
        if until is not None:
            self._park(user, until)
        self._keep_lane(user)

    def _leave(self, user: str) -> None:
        """A user without waiting tasks is in neither ready nor parked, but keeps the tag."""
        if user in self.ready:
            self.idle[user] = self.ready.pop(user)
        self.parked.pop(user, None)
        self._keep_lane(user)

    def _upkeep(self, most: int, now: int) -> None:
        """What time has made due: delays that are over, leases that have ended, parked users."""
        due = [task for task in self.in_state("delayed") if task.due_ms <= now]
        due.sort(key=lambda task: (task.due_ms, task.task_id))
        self._wait(due[:UPKEEP], now)
        self._take_back(now)
        if self.seen_ms is not None and now < self.seen_ms:
            self.moved = True
            self._look_at_held(now)
        self._flush(now)
        if due_names := [name for name, at_ms in self.look_at.items() if at_ms <= now]:
            self._return_held(due_names, most, now)
        if self.behind:
            self._trim(CATCH_UP, now)
        # Those who wait for a moment: it has come, or is too far since the clock was set back.
        for user in [user for user, until in self.parked.items() if until < NEVER]:
            self._review(user, now)

    def _take_back(self, now: int) -> None:
        expired = [task for task in self.in_state("running") if task.lease_end_ms <= now]
        expired.sort(key=lambda task: (task.lease_end_ms, task.task_id))
        self._end_unanswered(expired[:UPKEEP], now)

    def look_over(self, now: int) -> None:
        """What is done without a claim: runs beyond their deadline and expired leases are ended."""
        late = [t for t in self.in_state("running") if t.deadline_ms and t.deadline_ms <= now]
        late.sort(key=lambda task: (task.deadline_ms, task.task_id))
        self._end_unanswered(late[:UPKEEP], now)
        self._take_back(now)
        self._trim(UPKEEP, now)
        self._flush(now)

    def _end_unanswered(self, tasks: list[ModelTask], now: int) -> None:
        """End leases without a word of their workers.

        A run whose lease was kept until its deadline goes on, and is not offered again.
        """
        again = []
        for task in tasks:
            deadline = task.deadline_ms
            stale = deadline is not None and deadline <= now and task.lease_end_ms >= deadline
            self._end_lease(task, now)
            self.counts["stale_runs" if stale else "expired"] += 1
            task.token = None
            if task.cancel_asked:
                self._close(task, "cancelled", now)
            elif stale or task.attempts >= self.settings.max_attempts:
                self._close(task, "buried", now)
                self.counts["timed_out"] += stale
            else:
                again.append(task)
        self._wait(again, now, returning=True)
        closed = len(tasks) - len(again)
        if closed:
            self._trim(closed, now)

    # --- ending -----------------------------------------------------------------------------------

    def _end_lease(self, task: ModelTask, now: int) -> None:
        """The lease is over: its user has one running task less, and pays for the time."""
        self._free(task)
        if self.settings.cost == "time":
            self.moved = True
            seconds = max(now - task.claimed_ms, 1) / 1000
            self._adjust(task.user, (seconds - task.charge) / self.user(task.user).weight)
            own = self.usage.get(task.user, seconds)
            self.usage[task.user] = own + (seconds - own) / 4
            average = seconds if self.average is None else self.average
            self.average = average + (seconds - average) / 16
        if self.user(task.user).max_running is not None:
            self._review(task.user, now)

    def _free(self, task: ModelTask) -> None:
        if task.has_slot:
            self.freed.add(task.name)
        task.state, task.has_slot, task.deadline_ms = "between", False, None

    def _adjust(self, user: str, by: float) -> None:
        """Correct a tag, never below the clock."""
        if user in self.ready:
            self.ready[user] = max(self.clock, self.ready[user] + by)
        else:
            self.idle[user] = max(self.clock, self.idle.get(user, self.clock) + by)

    def _close(self, task: ModelTask, state: str, now: int) -> None:
        task.state, task.ended_ms = state, now
        self.counts[state] += 1

    def _trim(self, added: int, now: int) -> None:
        """Forget the oldest ended tasks beyond what is kept, a bounded number at a time."""
        s = self.settings
        ended = ("finished", "cancelled")
        more = self._trim_some(ended, s.keep_finished, s.keep_finished_ms, added, now)
        more_dead = self._trim_some(("buried",), s.keep_dead, s.keep_dead_ms, added, now)
        self.behind = more or more_dead

    def _trim_some(
        self, states: tuple[str, ...], keep: int, keep_ms: int, added: int, now: int
    ) -> bool:
        bound = 2 * added + 10
        ended = sorted(self.in_state(*states), key=lambda task: (task.ended_ms, task.task_id))
        over = ended[: max(0, len(ended) - keep)][:bound]
        old = [task for task in ended if now - task.ended_ms >= keep_ms][:bound]
        for task in over or old:
            del self.tasks[task.task_id]
            self.graves[task.task_id] = Grave(
                at_ms=now, document=task.document, word=task.state, token=task.token
            )
        return len(over or old) == bound

    def finish(self, pairs: list[tuple[str, str]], now: int) -> list[str]:
        """For each task and token 'finished', 'cancelled' or 'lost_lease'; repeated, the same."""
        words, closed = [], 0
        for task_id, token in pairs:
            if self.holds(task_id, token):
                task = self.tasks[task_id]
                self._end_lease(task, now)
                self._close(task, "cancelled" if task.cancel_asked else "finished", now)
                closed += 1
            words.append(self._finished_by(task_id, token) or "lost_lease")
        if closed:
            self._trim(closed, now)
        self._flush(now)
        return words

    def _finished_by(self, task_id: str, token: str) -> str | None:
        """How the task ended, if it did so by this token."""
        task, grave = self.tasks.get(task_id), self.graves.get(task_id)
        if task is not None:
            word, last_token = task.state, task.token
        elif grave is not None:
            word, last_token = grave.word, grave.token
        else:
            return None
        return word if word in ("finished", "cancelled") and last_token == token else None

    def bury(self, task_id: str, token: str, now: int) -> str:
        """'buried', 'cancelled' (it was asked for) or 'lost_lease'."""
        return self._once("bury", task_id, token, now, self._bury)

    def retry(self, task_id: str, token: str, delay_ms: int, now: int) -> str:
        """'retried', 'cancelled' (it was asked for) or 'lost_lease'."""
        return self._once("retry", task_id, token, now, partial(self._retry, delay_ms))

    def release(self, task_id: str, token: str, now: int) -> str:
        """'released' (attempt, charge and rank restored), 'cancelled' or 'lost_lease'."""
        return self._once("release", task_id, token, now, self._release)

    def _once(
        self, name: str, task_id: str, token: str, now: int, act: Callable[[ModelTask, int], str]
    ) -> str:
        """End a claim, if this token holds it. The same call again gets the same answer."""
        if (name, task_id, token) not in self.answers:
            word = "lost_lease"
            if self.holds(task_id, token):
                word = act(self.tasks[task_id], now)
                self._flush(now)
            self.answers[name, task_id, token] = now, word
        return self.answers[name, task_id, token][1]

    def _cancelled(self, task: ModelTask, now: int) -> bool:
        """Whether the task ends as cancelled, because that was asked for."""
        if task.cancel_asked:
            self._close(task, "cancelled", now)
            self._trim(1, now)
        return task.cancel_asked

    def _bury(self, task: ModelTask, now: int) -> str:
        self._end_lease(task, now)
        if not self._cancelled(task, now):
            self._close(task, "buried", now)
            self._trim(1, now)
        return task.state

    def _retry(self, delay_ms: int, task: ModelTask, now: int) -> str:
        self._end_lease(task, now)
        if self._cancelled(task, now):
            return "cancelled"
        task.token, task.due_ms = None, now + delay_ms
        self.counts["retried"] += 1
        if delay_ms > 0:
            task.state = "delayed"
        else:
            self._wait([task], now, returning=True)
        return "retried"

    def _release(self, task: ModelTask, now: int) -> str:
        self._free(task)
        self._adjust(task.user, -task.charge / self.user(task.user).weight)
        if self._cancelled(task, now):
            word = "cancelled"
        else:
            task.token, task.attempts = None, task.attempts - 1
            self.counts["released"] += 1
            self._wait([task], now, returning=True)
            word = "released"
        self._review(task.user, now)
        return word

    def extend(self, task_id: str, token: str, lease_ms: int, now: int) -> str:
        """'extended', 'cancel' (extended; its cancelling was asked for), 'ended' or 'lost_lease'.

        It is 'ended' where the holder of the token has ended the lease itself.
        """
        if not self.holds(task_id, token):
            return "ended" if self._ended_by(task_id, token) else "lost_lease"
        task = self.tasks[task_id]
        if task.deadline_ms is not None and task.deadline_ms <= now:
            return "lost_lease"
        longest = now + lease_ms
        if task.cancel_asked and not task.cancel_heard:
            task.cancel_heard, task.deadline_ms = True, min(longest, task.deadline_ms or longest)
        task.lease_end_ms = min(longest, task.deadline_ms or longest)
        return "cancel" if task.cancel_asked else "extended"

    def _ended_by(self, task_id: str, token: str) -> bool:
        task, grave = self.tasks.get(task_id), self.graves.get(task_id)
        last = task or grave
        if last is not None and last.token == token:
            return True
        given_back = (self.answers.get((name, task_id, token)) for name in ("retry", "release"))
        return any(answer and answer[1] != "lost_lease" for answer in given_back)

    def cancel(self, task_id: str, now: int) -> bool:
        """Whether the task will not run, or is asked to end as cancelled."""
        task = self.tasks.get(task_id)
        if task is None or task.state in ("finished", "buried"):
            return False
        if task.state == "running":
            task.cancel_asked = True
        elif task.state != "cancelled":
            self._take_away(task)
            self._close(task, "cancelled", now)
            self._trim(1, now)
        return True

    def reschedule(self, task_id: str, delay_ms: int, now: int) -> bool:
        """Whether the task has not been claimed, and becomes ready at another time now."""
        task = self.tasks[task_id]
        if task.state not in ("ready", "delayed"):
            return False
        self._take_away(task)
        task.due_ms = now + delay_ms
        if delay_ms > 0:
            task.state = "delayed"
        else:
            self._wait([task], now)
        return True

    def _take_away(self, task: ModelTask) -> None:
        """A task does not wait any more."""
        waited, was_held = task.state == "ready", task.is_held
        task.state, task.is_held = "between", False
        if was_held and not any(other.is_held for other in self.in_state("ready")):
            self.line.clear()
        elif waited and not was_held:
            self._keep_lane(task.user)
            if not self.backlog(task.user):
                self._leave(task.user)

    # --- settings ---------------------------------------------------------------------------------

    def set_slots(self, name: str, slots: int | None, now: int) -> None:
        """Limit how many tasks of a name run at a time, from the next claim on."""
        if name in self.line:
            self.look_at[name] = now
        self.slots.pop(name, None)
        if slots is not None:
            self.slots[name] = slots

    def set_user(self, user: str, now: int, **change: float | bool | None) -> None:
        """Change settings; a new weight rescales what the user is ahead of clocks and lines."""
        old = self.user(user)
        self.users[user] = new = replace(old, **change)  # type: ignore[arg-type]
        if new.rate is None:
            self.throttle.pop(user, None)
        clocks = (
            (self.ready, self.clock),
            (self.idle, self.clock),
            (self.critical, self.critical_clock),
        )
        for tags, clock in clocks:
            if old.weight != new.weight and tags.get(user, clock) > clock:
                tags[user] = clock + (tags[user] - clock) * old.weight / new.weight
        for name, line in self.line.items() if old.weight != new.weight else ():
            if user in line and self.held(user, name):
                first = min(line.values())
                line[user] = first + math.floor((line[user] - first) * old.weight / new.weight)
        self._review(user, now)


# --- schedules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Every:
    """A cron expression whose moments are easy to know: one in each period, at an offset."""

    period_ms: int
    offset_ms: int = 0

    def latest_at(self, moment_ms: int) -> int:
        """The latest moment at or before."""
        return (moment_ms - self.offset_ms) // self.period_ms * self.period_ms + self.offset_ms

    def next_after(self, moment_ms: int) -> int:
        """The first moment strictly after."""
        return self.latest_at(moment_ms) + self.period_ms


@dataclass(kw_only=True)
class ModelSchedule:
    """A schedule: what its user wrote, and how far it has come. `saves` counts its revisions.

    One that is paused `until_ms` goes on by itself then.
    """

    schedule_id: str
    cron: Every
    user: str
    level: int
    payload: int
    active: bool = True
    until_ms: int | None = None
    nominal_ms: int | None = None
    due_ms: int = 0
    saves: int = 0
    last_run_ms: int | None = None
    runs: int = 0
    missed: int = 0

    @property
    def plan(self) -> tuple[int, int | None]:
        """What a fire compares: the revision and the moment."""
        return self.saves, self.nominal_ms


@dataclass(frozen=True)
class Term:
    """A leader's term; `token` is a scheduler and how many tokens it has had before."""

    token: tuple[str, int]
    ends_ms: int
    term_ms: int


@dataclass
class ModelTick:
    """The result of a tick."""

    is_leader: bool = False
    fired: int = 0
    missed: int = 0
    refused: int = 0
    moved: int = 0
    wait_ms: int | None = None


@dataclass
class ModelReading:
    """What was due at a moment: schedules as they were then."""

    now_ms: int
    due: list[ModelSchedule]


@dataclass
class ModelSchedulers:
    """All schedulers of a queue, with the schedules."""

    queue: ModelQueue
    term_ms: int
    schedules: dict[str, ModelSchedule] = field(default_factory=dict)
    term: Term | None = None
    epoch: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    trusting: set[str] = field(default_factory=set)
    saves: int = 0

    REFUSED_MS = 5000

    def add(self, schedule: ModelSchedule, now: int, *, replacing: bool) -> bool:
        """Store a schedule; False if its id is taken. A replaced one keeps its counts."""
        old = self.schedules.get(schedule.schedule_id)
        if old is not None:
            if not replacing:
                return False
            self._give_up(old, now)
            schedule.last_run_ms, schedule.runs = old.last_run_ms, old.runs
            schedule.missed = old.missed
        self.schedules[schedule.schedule_id] = schedule
        self._plan_anew(schedule, now)
        self._saved(schedule)
        return True

    def update(self, schedule_id: str, now: int, change: dict[str, object]) -> bool:
        """Change some fields. A new cron plans anew from now; what is inactive has no plan."""
        schedule = self.schedules.get(schedule_id)
        if schedule is None:
            return False
        was_active = schedule.active
        if "active" in change:
            schedule.until_ms = None
        for name, value in change.items():
            setattr(schedule, name, value)
        if not schedule.active:
            if was_active:
                self._give_up(schedule, now)
            schedule.nominal_ms = None
            schedule.due_ms = schedule.until_ms or 0
        elif not was_active or "cron" in change:
            self._give_up(schedule, now)
            self._plan_anew(schedule, now)
        self._saved(schedule)
        return True

    def remove(self, schedule_id: str) -> bool:
        """Forget a schedule; its tasks stay."""
        return self.schedules.pop(schedule_id, None) is not None

    def _give_up(self, schedule: ModelSchedule, now: int) -> None:
        """A moment that has come and is not fired any more was missed."""
        if schedule.nominal_ms is not None and schedule.nominal_ms <= now:
            schedule.missed += 1
            self.queue.counts["missed"] += 1

    def _plan_anew(self, schedule: ModelSchedule, now: int) -> None:
        schedule.nominal_ms = schedule.due_ms = schedule.cron.next_after(now)

    def _saved(self, schedule: ModelSchedule) -> None:
        self.change_revision(schedule)

    def change_revision(self, schedule: ModelSchedule) -> None:
        """Make plans that others have read out of date."""
        self.saves += 1
        schedule.saves = self.saves

    def awaited(self) -> list[ModelSchedule]:
        """Those that a leader has something to do with some time, soonest first."""
        awaited = [s for s in self.schedules.values() if s.active or s.until_ms is not None]
        return sorted(awaited, key=lambda s: (s.due_ms, s.schedule_id))

    def token(self, name: str) -> tuple[str, int]:
        """The token of a scheduler: it takes another whenever it has lost or resigned."""
        return name, self.tokens[name]

    def leads(self, name: str, now: int) -> bool:
        """Whether the present term is this scheduler's."""
        term = self.present_term(now)
        return term is not None and term.token == self.token(name)

    def present_term(self, now: int) -> Term | None:
        """The term that has not ended yet; none, if the clock was set back by more than it is."""
        term = self.term
        if term is None or term.ends_ms > now + 2 * term.term_ms:
            return None
        return term if term.ends_ms > now else None

    def renew(self, name: str, now: int, term_ms: int) -> None:
        """Give the term to this scheduler."""
        self.term = Term(self.token(name), now + term_ms, term_ms)

    def _lose(self, name: str) -> None:
        self.tokens[name] += 1
        self.trusting.discard(name)

    def read(self, name: str, now: int) -> ModelReading | None:
        """Lead if nobody else does, and read what is due; None if somebody else leads."""
        term = self.present_term(now)
        if term is not None and term.token != self.token(name):
            self._lose(name)
            return None
        if term is None:
            self.epoch += 1
            self.queue.counts["terms"] += 1
        self.renew(name, now, self.term_ms)
        self.trusting.add(name)
        due = [replace(schedule) for schedule in self.awaited() if schedule.due_ms <= now]
        return ModelReading(now, due)

    def fire(self, name: str, reading: ModelReading, now: int) -> ModelTick | None:
        """Fire what was read, maybe a while ago; None if it is told not to lead any more.

        Those whose pause was to end go on, if it leads. That it does not, it learns from fires.
        """
        report = ModelTick(is_leader=True)
        planned = [read for read in reading.due if read.until_ms is None]
        if planned:
            if not self.leads(name, now):
                self._lose(name)
                return None
            self.renew(name, now, self.term_ms)
            self._fire_all(planned, reading.now_ms, report, now)
        for read in reading.due:
            schedule = self.schedules.get(read.schedule_id)
            is_known = schedule is not None and schedule.plan == read.plan
            if schedule and is_known and read.until_ms is not None and self.leads(name, now):
                schedule.active, schedule.until_ms = True, None
                self._plan_anew(schedule, reading.now_ms)
        return report

    def _fire_all(
        self, planned: list[ModelSchedule], read_ms: int, report: ModelTick, now: int
    ) -> None:
        new: list[ModelTask] = []
        for read in planned:
            schedule = self.schedules.get(read.schedule_id)
            if schedule is None or schedule.plan != read.plan:
                report.moved += 1
            else:
                self._fire(schedule, read_ms, report, new, now)
        self.queue.store(new, now)
        self.queue.counts["fired"] += len(new)
        self.queue.counts["missed"] += report.missed

    def tick(self, name: str, now: int) -> ModelTick:
        """One pass of a scheduler: lead if nobody else does, fire all that is due."""
        reading = self.read(name, now)
        if reading is None:
            assert self.term is not None
            return ModelTick(wait_ms=self.term.ends_ms - now)
        report = self.fire(name, reading, now)
        assert report is not None
        later = [schedule.due_ms - now for schedule in self.awaited()]
        report.wait_ms = min(later, default=None)
        return report

    def _fire(
        self,
        schedule: ModelSchedule,
        read_ms: int,
        report: ModelTick,
        new: list[ModelTask],
        now: int,
    ) -> None:
        """Fire for the latest moment that had passed; those before it are counted as missed."""
        nominal = schedule.nominal_ms
        assert nominal is not None
        moment = max(nominal, schedule.cron.latest_at(read_ms))
        if schedule.last_run_ms is not None and moment <= schedule.last_run_ms:
            # The clock was set back and the plan made anew since: this moment has had its fire.
            schedule.nominal_ms = schedule.due_ms = schedule.cron.next_after(moment)
            return
        task_id = f"{schedule.schedule_id}:{moment}"
        if not self.queue.remembers(task_id):
            if self.queue.is_full(len(new) + 1):
                schedule.due_ms = now + self.REFUSED_MS
                report.refused += 1
                return
            document = (schedule.user, schedule.level, schedule.payload, task_id)
            new.append(
                ModelTask(
                    task_id=task_id,
                    user=schedule.user,
                    level=schedule.level,
                    document=document,
                )
            )
        missed = min(MISSED_CAP, (moment - nominal) // schedule.cron.period_ms)
        report.fired += 1
        report.missed += missed
        schedule.runs += 1
        schedule.missed += missed
        schedule.last_run_ms = moment
        schedule.nominal_ms = schedule.due_ms = schedule.cron.next_after(moment)

    def stop(self, name: str, now: int) -> None:
        """A scheduler that believes to lead resigns, which ends the term if it is its own."""
        if name in self.trusting:
            if self.leads(name, now):
                self.term = None
            self._lose(name)
