"""`fairqueue workers`: list live workers, and drain them."""

import click

from fairqueue.cli.listing import columns, show
from fairqueue.cli.output import note
from fairqueue.cli.session import Consent, Group, Session, destructive, pass_session, prints_data
from fairqueue.errors import UnknownWorker

COLUMNS = columns(
    "ID=worker_id HOST=host PID=pid VERSION=version SLOTS=slots RUNNING=running SEEN=seen_at "
    "POOLS=pools NAMES=names CURRENT=current"
)


@click.group(cls=Group, default="list")
def workers() -> None:
    """List live workers, and drain them. Default: list. Times are UTC."""


@workers.command("list")
@prints_data
def list_(session: Session) -> None:
    """List live workers, as of their last heartbeats."""
    found = session.inspector.workers.list()
    show(session, "workers", iter(found), COLUMNS)
    if not found:
        note("no worker is alive")


@workers.command()
@click.argument("worker_id", metavar="ID")
@destructive
@pass_session
def drain(session: Session, worker_id: str, consent: Consent) -> None:
    """Let a worker finish its tasks, take no more, and exit."""
    part = session.inspector.workers
    if worker_id not in {each.worker_id for each in part.list()}:
        raise UnknownWorker(f"there is no live worker {worker_id!r}")
    if consent.to(f"drain worker {worker_id!r}"):
        part.drain(worker_id)
