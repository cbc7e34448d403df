"""`fairqueue workers`: who is alive, and who shall end."""

import click

from fairqueue.cli.listing import show
from fairqueue.cli.output import note
from fairqueue.cli.session import Consent, Group, Session, destructive, pass_session, reading
from fairqueue.errors import UnknownWorker

COLUMNS = {
    "ID": lambda worker: worker.worker_id,
    "HOST": lambda worker: worker.host,
    "PID": lambda worker: worker.pid,
    "VERSION": lambda worker: worker.version,
    "SLOTS": lambda worker: worker.slots,
    "RUNNING": lambda worker: worker.running,
    "SEEN": lambda worker: worker.seen_at,
    "NAMES": lambda worker: worker.names,
    "CURRENT": lambda worker: worker.current,
}


@click.group(cls=Group, default="list")
def workers() -> None:
    """Workers; alone: list those that are alive. Times are UTC."""


@workers.command("list")
@reading
@pass_session
def list_(session: Session) -> None:
    """Workers that are alive, as they said at their last heartbeat."""
    with session.inspector() as inspector:
        found = inspector.workers.list()
    show(session, "workers", iter(found), COLUMNS)
    if not found:
        note("no worker is alive")


@workers.command()
@click.argument("worker_id", metavar="ID")
@destructive
@pass_session
def drain(session: Session, worker_id: str, consent: Consent) -> None:
    """Have a worker finish what it runs, take no more, and end."""
    with session.inspector() as inspector:
        if worker_id not in {each.worker_id for each in inspector.workers.list()}:
            raise UnknownWorker(f"there is no living worker {worker_id!r}")
        if consent.to(f"drain worker {worker_id!r}"):
            inspector.workers.drain(worker_id)
