"""What the threads of one worker share: its settings, handlers and executor."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fairqueue.alerts import Alerts
from fairqueue.models import Claim
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.settings import check_limits
from fairqueue.worker.context import LogCapture, TaskContext
from fairqueue.worker.executor import Executor
from fairqueue.worker.handlers import Handlers
from fairqueue.worker.heartbeat import Heartbeat, WorkerProfile
from fairqueue.worker.lease_keeper import ActiveRun, LeaseKeeper

NO_LIMITS = {"slots": None, "rate": None, "timeout": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCore:
    """The settings of a worker, and the makers of what its threads need."""

    queue: TaskQueue
    worker_id: str
    concurrency: int
    pools: tuple[str, ...]
    lease: float
    capture_logs: bool
    handlers: Handlers
    executor: Executor
    alerts: Alerts

    def profile(self) -> WorkerProfile:
        """Describe the worker for its heartbeat: slots, handlers and their limits."""
        named = self.handlers.named()
        policies = {handler.name: _http_policy(handler.target) for handler in named}
        return WorkerProfile(
            worker_id=self.worker_id,
            slots=self.concurrency,
            pools=self.pools,
            limits={
                handler.name: check_limits(**{**NO_LIMITS, **handler.settings.limits})
                for handler in named
            },
            takes_any=self.handlers.takes_any,
            http={name: policy for name, policy in policies.items() if policy is not None},
        )

    def new_heartbeat(self, on_drain: Callable[[], None] = lambda: None) -> Heartbeat:
        """Return a heartbeat that has not been sent yet."""
        return Heartbeat(self.queue, self.profile, self.alerts, on_drain)

    def new_lease_keeper(
        self, heartbeat: Heartbeat, on_death: Callable[[str], None] = lambda reason: None
    ) -> LeaseKeeper:
        """Start a lease keeper."""
        return LeaseKeeper(self.queue, self.lease, self.executor.stuck_gauge, heartbeat, on_death)

    def new_log_capture(self) -> LogCapture | None:
        """Attach a capture to the root logger, or return None if logs are not captured."""
        if not self.capture_logs:
            return None
        capture = LogCapture()
        capture.attach()
        return capture

    def new_run(self, claim: Claim, keeper: LeaseKeeper) -> ActiveRun:
        """Return the run of a claim, with the handler of its task."""
        context = TaskContext(claim.task, claim.attempt, beat=partial(keeper.beat, claim))
        return ActiveRun(claim, context, self.handlers.find(claim.task))


def _http_policy(target: object) -> dict[str, object] | None:
    """Return where the requests of an `HttpTasks` handler may go; None for other handlers."""
    policy = getattr(getattr(target, "__self__", None), "http_policy", None)
    return policy if isinstance(policy, dict) else None
