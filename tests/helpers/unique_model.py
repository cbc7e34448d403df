"""A plain model of unique keys: which task has a key, and what a push with the key does."""

from dataclasses import dataclass

WAITING = ("ready", "delayed")
ENDED = ("finished", "cancelled", "buried")


@dataclass(kw_only=True)
class UniqueTask:
    """A task with a unique key, or what a push wants to make of it.

    scope: "unfinished", "waiting" or a window in ms. `made_by` is the push whose payload it has.
    """

    task_id: str
    key: str | None
    reaction: str
    scope: str | int
    debounce_ms: int | None = None
    max_wait_ms: int | None = None
    delay_ms: int = 0
    made_by: str = ""
    state: str = "new"
    due_ms: int = 0
    behind: bool = False
    attempts: int = 0
    token: str | None = None
    lease_end_ms: int = 0


@dataclass(kw_only=True)
class Holder:
    """The task that has a key, or had it last, and the one that waits behind it."""

    task_id: str
    scope: str | int
    first_ms: int  # of the pushes that it stands for
    ends_ms: int | None = None  # of its window
    following: str | None = None
    since_ms: int = 0


class UniqueModel:
    """The tasks of one user. Every method takes the moment at which it happens, in ms."""

    def __init__(self) -> None:
        self.tasks: dict[str, UniqueTask] = {}
        self.keys: dict[str, Holder] = {}

    def is_waiting(self, task_id: str | None) -> bool:
        """Whether a task has not been claimed."""
        return task_id is not None and self.tasks[task_id].state in WAITING

    def holder(self, key: str, now: int) -> Holder | None:
        """Who has a key now."""
        found = self.keys.get(key)
        if found is None:
            return None
        if self.is_waiting(found.following):
            return found
        found.following = None
        if found.scope == "waiting":
            has_key = self.is_waiting(found.task_id)
        elif found.scope == "unfinished":
            has_key = self.tasks[found.task_id].state not in ENDED
        else:
            has_key = found.ends_ms is not None and found.ends_ms > now
        return found if has_key else None

    def push_many(self, tasks: list[UniqueTask], now: int) -> list[str | None]:
        """The ids that a push of several tasks returns; None where a duplicate is an error.

        What all of them do is decided before any stored task is replaced.
        """
        new: dict[str, tuple[UniqueTask, int]] = {}  # the first of a key that it stores
        replacing: list[tuple[str, UniqueTask, Holder]] = []
        answers = [self.push_one(task, now, new, replacing) for task in tasks]
        for task_id, task, holder in replacing:
            self.replace(task_id, task, holder, now)
        return answers

    def push(self, task: UniqueTask, now: int) -> str | None:
        """The id that the push returns; None if the duplicate is an error."""
        return self.push_many([task], now)[0]

    def push_one(
        self,
        task: UniqueTask,
        now: int,
        new: dict[str, tuple[UniqueTask, int]],
        replacing: list[tuple[str, UniqueTask, Holder]],
    ) -> str | None:
        task.due_ms = now + task.delay_ms
        task.made_by = task.task_id
        assert task.key is not None
        if task.key in new:
            first, begins = new[task.key]
            if task.reaction == "replace":
                self.put_off(task, now, now)
                self.take_over(first, task, begins, now)
            return first.task_id
        holder = self.holder(task.key, now)
        if holder and task.reaction == "error":
            return None
        if holder and task.reaction == "ignore":
            return holder.task_id
        running = holder is not None and not self.is_waiting(holder.task_id)
        if holder and (not running or holder.following):
            since = holder.since_ms if running else holder.first_ms
            self.put_off(task, since, now)
            waits = holder.following if running and holder.following else holder.task_id
            replacing.append((waits, task, holder))
            return waits
        self.put_off(task, now, now)
        begins = now
        if holder and self.tasks[holder.task_id].state not in ENDED:
            task.behind = True
            holder.following, holder.since_ms = task.task_id, now
        else:
            if holder:
                assert holder.ends_ms is not None
                begins = holder.ends_ms
                task.due_ms = max(task.due_ms, begins)
            self.hold(task, now, begins)
        self.tasks[task.task_id] = task
        new[task.key] = (task, begins)
        task.state = "delayed" if task.behind or task.due_ms > now else "ready"
        return task.task_id

    def take_over(self, first: UniqueTask, last: UniqueTask, begins: int, now: int) -> None:
        """A task that is stored only now is what a later one of the same push says."""
        first.made_by, first.scope = last.made_by, last.scope
        first.due_ms = max(last.due_ms, begins)
        first.state = "delayed" if first.behind or first.due_ms > now else "ready"
        if not first.behind:
            self.hold(first, now, begins)

    def hold(self, task: UniqueTask, first: int, begins: int) -> None:
        """A task has its key from now on."""
        assert task.key is not None
        window = task.scope if isinstance(task.scope, int) else None
        ends = None if window is None else begins + window
        self.keys[task.key] = Holder(
            task_id=task.task_id, scope=task.scope, first_ms=first, ends_ms=ends
        )

    def put_off(self, task: UniqueTask, first: int, now: int) -> None:
        """Each push with a debounce puts the task off, but only so far."""
        if task.debounce_ms is not None:
            task.due_ms = now + task.debounce_ms
            if task.max_wait_ms is not None:
                task.due_ms = max(now, min(task.due_ms, first + task.max_wait_ms))

    def replace(self, task_id: str, new: UniqueTask, holder: Holder, now: int) -> None:
        """A waiting task gets the payload, the options and the time of another push."""
        old = self.tasks[task_id]
        old.made_by, old.scope, old.due_ms, old.attempts = new.made_by, new.scope, new.due_ms, 0
        old.state = "delayed" if old.behind or old.due_ms > now else "ready"
        if holder.task_id == task_id:
            window = new.scope if isinstance(new.scope, int) else None
            holder.scope = new.scope
            holder.ends_ms = None if window is None else holder.first_ms + window

    def give_up(self, task: UniqueTask, now: int, *, keeps_window: bool) -> None:
        """A task does not have its key any more, and the next one may begin."""
        holder = self.keys.get(task.key or "")
        if holder is None:
            return
        if holder.following == task.task_id:
            holder.following = None
        elif holder.task_id == task.task_id:
            following = holder.following
            if following is not None and self.is_waiting(following):
                self.follow(self.tasks[following], holder.since_ms, now)
            elif not (keeps_window and holder.ends_ms is not None and holder.ends_ms > now):
                del self.keys[task.key or ""]

    def follow(self, task: UniqueTask, since: int, now: int) -> None:
        """The task that waited behind another has the key now."""
        self.hold(task, since, since)
        task.behind = False
        task.due_ms = max(now, task.due_ms)

    def claim(self, token: str, lease_ms: int, now: int) -> set[str]:
        """Hand out all that may run."""
        for task in self.tasks.values():
            if task.state == "delayed" and not task.behind and task.due_ms <= now:
                task.state = "ready"
        for task in self.tasks.values():
            if task.state == "running" and task.lease_end_ms <= now:
                self.wait_again(task, now)
        for holder in self.keys.values():
            if holder.ends_ms is not None and holder.ends_ms <= now:
                holder.ends_ms = None
        ready = [task for task in self.tasks.values() if task.state == "ready"]
        for task in ready:
            task.state, task.token, task.lease_end_ms = "running", token, now + lease_ms
            task.attempts += 1
        for task in ready:
            if task.scope == "waiting":
                self.give_up(task, now, keeps_window=False)
        return {task.task_id for task in ready}

    def wait_again(self, task: UniqueTask, now: int, delay_ms: int = 0) -> None:
        """A task that was claimed waits: it has its key, unless another task has."""
        task.state = "delayed" if delay_ms else "ready"
        task.token, task.due_ms = None, now + delay_ms
        if task.scope == "waiting" and task.key not in self.keys:
            self.hold(task, now, now)

    def end(self, task: UniqueTask, state: str, now: int) -> None:
        """A task ends."""
        task.state, task.token, task.behind = state, None, False
        self.give_up(task, now, keeps_window=True)

    def reschedule(self, task: UniqueTask, delay_ms: int, now: int) -> None:
        """A waiting task becomes ready at another time, whatever it waited behind."""
        task.due_ms, task.behind = now + delay_ms, False
        task.state = "delayed" if delay_ms else "ready"
