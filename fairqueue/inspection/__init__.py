"""Read and change a queue as an actor with a role and a tenant; every change is audited.

inspector = Inspector(queue, Actor(name="ann", role="operator", tenant="north"))
for view in inspector.schedules.list(contains="report"):
    ...
inspector.schedules.pause("report-7", note="too many mails")
"""

from fairqueue.access.credentials import Actor
from fairqueue.inspection.administration import ApiKeys, Audit
from fairqueue.inspection.context import InspectionContext, Stores
from fairqueue.inspection.partitions import Partitions
from fairqueue.inspection.runs import Failed, Runs, Tasks
from fairqueue.inspection.schedules import ScheduleInspector
from fairqueue.inspection.system import System, Workers
from fairqueue.inspection.users import Tenants, Users
from fairqueue.queue.queue import TaskQueue

PYTHON = Actor(name="python")


class Inspector:
    """Read and change a queue as one actor. Thread-safe; creating one opens no connection.

    Raises Forbidden for what the actor's role does not allow. Objects of other tenants are not
    found. Each change is recorded in the audit log with the actor's name.
    """

    def __init__(self, queue: TaskQueue, actor: Actor = PYTHON) -> None:
        self._begin(Stores(queue), actor)

    def _begin(self, stores: Stores, actor: Actor) -> None:
        self.queue = stores.queue
        self.actor = actor
        self.stores = stores
        context = InspectionContext(stores, actor)
        self.now = context.now
        self.schedules = ScheduleInspector(context)
        self.runs = Runs(context)
        self.failed = Failed(context)
        self.tasks = Tasks(context)
        self.users = Users(context)
        self.tenants = Tenants(context)
        self.workers = Workers(context)
        self.system = System(context)
        self.partitions = Partitions(context)
        self.audit = Audit(context)
        self.keys = ApiKeys(context)

    def acting_as(self, actor: Actor) -> "Inspector":
        """An inspector of the same queue for another actor. This is cheap."""
        other = Inspector.__new__(Inspector)
        other._begin(self.stores, actor)
        return other


__all__ = ["Actor", "Inspector"]
