"""`fairqueue acl`: the Redis command that creates a user with the rights of a queue."""

import click

from fairqueue.cli.output import say
from fairqueue.cli.session import Command, Session, pass_session
from fairqueue.link.acl import acl_line


@click.command(cls=Command)
@click.option("--user", default="fairqueue", show_default=True, help="Name of the user.")
@click.option("--read-only", is_flag=True, help="A user that can only read the queue.")
@click.option("--all-queues", is_flag=True, help="For all queues, not only --queue.")
@pass_session
def acl(session: Session, user: str, read_only: bool, all_queues: bool) -> None:
    """Print the ACL SETUSER line for a Redis user with few rights.

    Nothing is sent to Redis. Add a password to the line: without one the user cannot log in.
    """
    say(acl_line(user, None if all_queues else session.queue, read_only=read_only))
