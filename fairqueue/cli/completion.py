"""`fairqueue completion`: shell completion of commands and options."""

import os

import click
from click.shell_completion import get_completion_class

from fairqueue.cli.output import say
from fairqueue.cli.session import Command

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_FAIRQUEUE_COMPLETE"


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print the completion script of a shell. Default: the current shell."""
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    kind = get_completion_class(name) if name in SHELLS else None
    if kind is None:
        raise click.UsageError(f"name a shell: {', '.join(SHELLS)}")
    say(kind(ctx.find_root().command, {}, "fairqueue", VARIABLE).source())
