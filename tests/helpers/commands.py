"""What tests of the command line share: run a command, and find the command that a line names."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.testing import CliRunner

from fairqueue.cli import program


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, as JSON."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        """What it printed, by line."""
        return self.out.splitlines()

    @property
    def objects(self) -> list[Any]:
        """What it printed, a JSON object on each line."""
        return [json.loads(line) for line in self.lines]


class Cli:
    """Runs commands in this process, on one server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def run(self, *arguments: str, input: str | None = None) -> Result:
        """Run a command to its end, without a terminal."""
        done = CliRunner().invoke(
            program, list(arguments), input=input, env={"FAIRQUEUE_URL": self._url}
        )
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Result(done.exit_code, done.stdout, done.stderr)

    def ok(self, *arguments: str, input: str | None = None) -> Result:
        """The same for one that must end well."""
        done = self.run(*arguments, input=input)
        assert done.code == 0, done
        return done

    def json(self, *arguments: str) -> Any:
        """What a command prints with `-o json`."""
        return self.ok(*arguments, "-o", "json").json


def parse(arguments: Sequence[str]) -> click.Context:
    """Read a line as the program does, without running it. Raises UsageError."""
    command: click.Command = program
    rest, context = list(arguments), None
    while isinstance(command, click.Group):
        context = command.make_context(command.name, rest, parent=context)
        _, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command = found
    return command.make_context(command.name, rest, parent=context)


def all_commands(
    group: click.Group = program, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with the words that name it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from all_commands(command, (*path, name))
        else:
            yield (*path, name), command
