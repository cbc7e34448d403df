"""The command line `fairqueue`."""

from fairqueue.cli.acl import acl
from fairqueue.cli.bench import bench
from fairqueue.cli.completion import completion
from fairqueue.cli.daemons import metrics, scheduler, worker
from fairqueue.cli.doctor import doctor
from fairqueue.cli.failed import failed
from fairqueue.cli.import_export import export, import_
from fairqueue.cli.keys import keys
from fairqueue.cli.limits import limits, pools
from fairqueue.cli.partitions import partitions
from fairqueue.cli.program import main, program
from fairqueue.cli.repartition import repartition
from fairqueue.cli.runs import runs
from fairqueue.cli.schedules import schedules
from fairqueue.cli.serve import dashboard, demo, up
from fairqueue.cli.system import audit, prune, settings, stats, status
from fairqueue.cli.tasks import tasks
from fairqueue.cli.tenants import tenants
from fairqueue.cli.top import top
from fairqueue.cli.users import quote, users
from fairqueue.cli.workers import workers

for _command in (
    *(up, demo, dashboard, worker, scheduler),
    *(schedules, tasks, runs, failed, users, tenants, quote, limits, pools, workers),
    *(partitions, keys),
    *(audit, settings, status, stats, top, doctor, acl, bench),
    *(export, import_, repartition, prune, metrics, completion),
):
    program.add_command(_command)

__all__ = ["main", "program"]
