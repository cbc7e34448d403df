"""The root command: it runs a command and turns errors into exit codes."""

import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from fairqueue.cli.exit_codes import FAILED, INTERRUPTED, OK, USAGE, exit_code
from fairqueue.cli.output import note
from fairqueue.cli.session import Group
from fairqueue.cli.text import printable
from fairqueue.errors import FairQueueError
from fairqueue.worker.heartbeat import VERSION

MAX_MESSAGE = 2000  # characters of a usage error, which repeats what was typed


class RootCommand(Group):
    """The root of all commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which they were added, by purpose."""
        return list(self.commands)

    def main(self, *args: Any, standalone_mode: bool = True, **settings: Any) -> Any:
        """Run a command and exit; without `standalone_mode`, return the exit code."""
        code = self._run(*args, **settings)
        if standalone_mode:
            sys.exit(code)
        return code

    def _run(self, *args: Any, **settings: Any) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names may contain any characters
        try:
            run: Callable[..., Any] = super().main
            code = run(*args, **settings, standalone_mode=False)
        except click.ClickException as error:
            # The message repeats what was typed or pasted.
            error.message = printable(error.message[:MAX_MESSAGE])  # type: ignore[misc]
            error.show()
            return USAGE if isinstance(error, click.UsageError) else FAILED
        except click.Abort:
            return INTERRUPTED
        except FairQueueError as error:
            note(str(error))
            return exit_code(error)
        return code if isinstance(code, int) else OK


@click.group("fairqueue", cls=RootCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="fairqueue")
def program() -> None:
    """A scheduler and a fair task queue on Redis."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code."""
    code: int = program.main(args=arguments, prog_name="fairqueue", standalone_mode=False)
    return code
