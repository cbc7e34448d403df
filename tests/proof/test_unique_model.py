"""What pushes with unique keys do, and which task has a key, is what the plain model says."""

from typing import Any

import pytest
from helpers.machines import EXAMPLES, EchoingMachine, run_machine
from helpers.state import check_consistency, dump
from helpers.unique_model import UniqueModel, UniqueTask
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from fairqueue.errors import DuplicateTask
from fairqueue.models import Claim, Task

picks = st.integers(0, 999)
lost_reply = st.sampled_from((False, False, True))
# What happens to a second one, the scope in ms or in words, debounce and its end, delay: in ms.
pushes = st.tuples(
    st.sampled_from(("k1", "k2")),
    st.sampled_from(("ignore", "ignore", "replace", "replace", "error")),
    st.sampled_from(("unfinished", "unfinished", "waiting", 4000)),
    st.sampled_from((None, None, (2000, None), (2000, 5000))),
    st.sampled_from((0, 0, 0, 3000)),
)


class UniqueMachine(EchoingMachine):
    """Does the same with the real queue and with the model."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.model = UniqueModel()
        self.claims: list[Claim] = []
        self.pushed = 0
        self.queue.configure(max_attempts=1000)

    @rule(milliseconds=st.sampled_from((1, 500, 1000, 2000, 5000, 31_000)))
    def time_passes(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds / 1000)
        self.link.travelled_ms += milliseconds

    @precondition(lambda self: self.link.recent())
    @rule(pick=picks)
    def a_command_comes_again_late(self, pick: int) -> None:
        recent = self.link.recent()
        self.link.send_again(recent[pick % len(recent)])

    def make(self, spec: Any) -> tuple[Task, UniqueTask]:
        key, reaction, scope, debounce, delay = spec
        self.pushed += 1
        task_id = f"t{self.pushed}"
        fields: dict[str, Any] = {"unique": key, "on_duplicate": reaction, "unique_for": scope}
        planned = UniqueTask(task_id=task_id, key=key, reaction=reaction, scope=scope)
        if isinstance(scope, int):
            fields["unique_for"] = scope / 1000
        if debounce and reaction == "replace":
            planned.debounce_ms, planned.max_wait_ms = debounce
            fields["debounce"] = debounce[0] / 1000
            if debounce[1]:
                fields["max_wait"] = debounce[1] / 1000
        elif delay:
            planned.delay_ms = delay
            fields["delay"] = delay / 1000
        task = Task.create(user_id="ann", task_id=task_id, payload={"from": task_id}, **fields)
        return task, planned

    @rule(spec=pushes, lost=lost_reply)
    def push(self, spec: Any, lost: bool) -> None:
        task, planned = self.make(spec)
        expected = self.model.push(planned, self.now)
        try:
            answer = self.lossy(lost, lambda: self.queue.push(task))
        except DuplicateTask:
            answer = None
        assert answer == expected

    @rule(specs=st.lists(pushes, min_size=2, max_size=4), lost=lost_reply)
    def push_many(self, specs: list[Any], lost: bool) -> None:
        pairs = [self.make(spec) for spec in specs if spec[1] != "error"]
        expected = self.model.push_many([planned for _, planned in pairs], self.now)
        tasks = [task for task, _ in pairs]
        assert self.lossy(lost, lambda: self.queue.push_many(tasks)) == expected

    @rule(lost=lost_reply)
    def claim(self, lost: bool) -> None:
        claims = self.lossy(lost, lambda: self.queue.claim("w", limit=100, lease=30))
        token = self.link.last_arguments["op"]
        taken = {claim.task.task_id for claim in claims}
        assert taken == self.model.claim(token, 30_000, self.now)
        self.claims += claims

    @rule(
        pick=picks, how=st.sampled_from(("finish", "finish", "bury", "release", "retry", "later"))
    )
    def end(self, pick: int, how: str) -> None:
        tasks = self.model.tasks
        live = [c for c in self.claims if tasks[c.task.task_id].token == c.token]
        if not live:
            return
        claim = live[pick % len(live)]
        task = tasks[claim.task.task_id]
        if how == "finish":
            self.queue.finish(claim)
            self.model.end(task, "finished", self.now)
        elif how == "bury":
            self.queue.bury(claim, "no")
            self.model.end(task, "buried", self.now)
        elif how == "release":
            self.queue.release(claim)
            due_ms, task.attempts = task.due_ms, task.attempts - 1
            self.model.wait_again(task, self.now)
            task.due_ms = due_ms
        else:
            delay = 2000 if how == "later" else 0
            self.queue.retry(claim, "no", delay=delay / 1000)
            self.model.wait_again(task, self.now, delay)

    @rule(pick=picks, lost=lost_reply)
    def cancel(self, pick: int, lost: bool) -> None:
        waiting = [t for t in self.model.tasks.values() if self.model.is_waiting(t.task_id)]
        if waiting:
            task = waiting[pick % len(waiting)]
            assert self.lossy(lost, lambda: self.queue.cancel(task.task_id))
            self.model.end(task, "cancelled", self.now)

    @invariant()
    def the_queue_is_what_the_model_says(self) -> None:
        check_consistency(self.client)
        state = dump(self.client)
        real = {
            task_id: (
                record["state"],
                record["attempts"],
                record.get("behind", False),
                state["tasks"][task_id]["payload"]["from"],
            )
            for task_id, record in state.get("status", {}).items()
        }
        assert real == {
            task.task_id: (task.state, task.attempts, task.behind, task.made_by)
            for task in self.model.tasks.values()
        }
        delayed = {
            task.task_id: task.due_ms
            for task in self.model.tasks.values()
            if task.state == "delayed" and not task.behind
        }
        stored = state.get("delayed", {})
        assert {task_id: stored[task_id] for task_id in delayed} == delayed
        assert len(stored) == sum(t.state == "delayed" for t in self.model.tasks.values())


@pytest.mark.timeout(0 if EXAMPLES else 120)
def test_unique_keys_do_what_the_model_says(redis_url: str) -> None:
    run_machine(UniqueMachine, redis_url, examples=60)
