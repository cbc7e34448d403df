"""The program: its commands, and how its ends become exit codes."""

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

MAX_MESSAGE = 2000  # characters of what is wrong with a line; the rest is what was typed


class Program(Group):
    """The root of all commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were added: by what they are for."""
        return list(self.commands)

    def main(self, *args: Any, standalone_mode: bool = True, **settings: Any) -> Any:
        """Run a command and exit; without `standalone_mode`, the exit code is returned."""
        code = self._run(*args, **settings)
        if standalone_mode:
            sys.exit(code)
        return code

    def _run(self, *args: Any, **settings: Any) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names may be in any script
        try:
            run: Callable[..., Any] = super().main
            code = run(*args, **settings, standalone_mode=False)
        except click.ClickException as error:
            # It repeats what was typed, or pasted.
            error.message = printable(error.message[:MAX_MESSAGE])  # type: ignore[misc]
            error.show()
            return USAGE if isinstance(error, click.UsageError) else FAILED
        except click.Abort:
            return INTERRUPTED
        except FairQueueError as error:
            note(str(error))
            return exit_code(error)
        return code if isinstance(code, int) else OK


@click.group("fairqueue", cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="fairqueue")
def program() -> None:
    """Schedules and a fair queue on Redis."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    code: int = program.main(args=arguments, prog_name="fairqueue", standalone_mode=False)
    return code
