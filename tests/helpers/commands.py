"""Run commands of the command line, and parse command lines."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.testing import CliRunner

from fairqueue.cli import program


@dataclass(frozen=True)
class Result:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The output, parsed as JSON."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        """The lines of the output."""
        return self.out.splitlines()

    @property
    def objects(self) -> list[Any]:
        """The output, parsed as one JSON object per line."""
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
        """Run a command that must succeed."""
        done = self.run(*arguments, input=input)
        assert done.code == 0, done
        return done

    def json(self, *arguments: str) -> Any:
        """The output of a command with `-o json`, parsed."""
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
    """Yield every command that is not a group, with its words."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from all_commands(command, (*path, name))
        else:
            yield (*path, name), command
