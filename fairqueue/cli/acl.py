"""`fairqueue acl`: the command of Redis that makes a user with just the rights that are needed."""

import click

from fairqueue.cli.output import say
from fairqueue.cli.session import Command, Session, pass_session
from fairqueue.link.acl import acl_line


@click.command(cls=Command)
@click.option("--user", default="fairqueue", show_default=True, help="Its name.")
@click.option("--read-only", is_flag=True, help="May look at the queue, and change nothing.")
@click.option("--all-queues", is_flag=True, help="Not only for the queue that --queue names.")
@pass_session
def acl(session: Session, user: str, read_only: bool, all_queues: bool) -> None:
    """Print the ACL SETUSER line of a Redis user with few rights.

    Nothing is sent to Redis. The user can log in once ACL SETUSER has given it a password.
    """
    say(acl_line(user, None if all_queues else session.queue, read_only=read_only))
