"""One way for every face to look at a queue and to act on it, with roles, tenants and an audit log.

inspector = Inspector(queue, Actor(name="ann", role="operator", tenant="north"))
for view in inspector.schedules.list(contains="report"):
    ...
inspector.schedules.pause("report-7", note="too many mails")
"""

from fairqueue.access.credentials import Actor
from fairqueue.inspection.administration import ApiKeys, Audit
from fairqueue.inspection.context import InspectionContext, Stores
from fairqueue.inspection.runs import Failed, Runs, Tasks
from fairqueue.inspection.schedules import ScheduleInspector
from fairqueue.inspection.system import System, Workers
from fairqueue.inspection.users import Users
from fairqueue.queue.queue import TaskQueue

PYTHON = Actor(name="python")


class Inspector:
    """All that can be seen and done of a queue, for one actor. May be used by many threads.

    What the actor's role does not allow raises Forbidden; what belongs to another tenant is as if
    it were not there. Each change is in the audit log, with the actor's name. Making one opens no
    connection.
    """

    def __init__(self, queue: TaskQueue, actor: Actor = PYTHON) -> None:
        self._begin(Stores(queue), actor)

    def _begin(self, stores: Stores, actor: Actor) -> None:
        self.queue = stores.queue
        self.actor = actor
        self.stores = stores
        context = InspectionContext(stores, actor)
        self.schedules = ScheduleInspector(context)
        self.runs = Runs(context)
        self.failed = Failed(context)
        self.tasks = Tasks(context)
        self.users = Users(context)
        self.workers = Workers(context)
        self.system = System(context)
        self.audit = Audit(context)
        self.keys = ApiKeys(context)

    def acting_as(self, actor: Actor) -> "Inspector":
        """The same queue for another actor; costs next to nothing."""
        other = Inspector.__new__(Inspector)
        other._begin(self.stores, actor)
        return other


__all__ = ["Actor", "Inspector"]
