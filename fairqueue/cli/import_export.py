"""`fairqueue export` and `import`: schedules as files."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from fairqueue.cli.bulk import filtered, filters_of
from fairqueue.cli.listing import show_one
from fairqueue.cli.output import Progress, note, on_terminal, say
from fairqueue.cli.session import Command, Consent, Session, destructive, pass_session, reading
from fairqueue.cli.text import cell, plural, printable
from fairqueue.inspection.documents import document
from fairqueue.schedules.import_export import FORMATS, Diff, dump_schedules, load_schedules


@click.command(cls=Command)
@click.argument("file", required=False)
@click.option("--format", "format_", type=click.Choice(FORMATS), help="Default: by the file.")
@filtered
@pass_session
def export(session: Session, file: str | None, format_: str | None, **filters: Any) -> None:
    """Write schedules to a file or standard output. They are whole, with their secrets."""
    form = format_ or _format_of(file)
    with session.inspector() as inspector, Progress("export") as progress:
        documents = inspector.schedules.export(**filters_of(filters))
        progress(len(documents))
    text = dump_schedules(documents, form)
    if file is None or file == "-":
        lines = text.rstrip("\n").split("\n")
        say("\n".join(map(printable, lines) if on_terminal() else lines))
        return
    _write(file, text)
    note(f"{plural(len(documents), 'schedule')} written to {file}")


@click.command("import", cls=Command)
@click.argument("file")
@click.option("--format", "format_", type=click.Choice(FORMATS), help="Default: by the file.")
@click.option("--prune", is_flag=True, help="Remove schedules that the file does not name.")
@destructive
@reading
@pass_session
def import_(
    session: Session, file: str, format_: str | None, prune: bool, consent: Consent
) -> None:
    """Make schedules as a file says; `-` is standard input. The same again changes nothing."""
    documents = load_schedules(_read(file), format_ or _format_of(file))
    with session.inspector() as inspector:
        diff = inspector.schedules.import_(documents, prune=prune)
        if not diff.is_empty and consent.to(_words(diff)):
            with Progress("import") as progress:
                diff = inspector.schedules.import_(documents, prune=prune, dry_run=False)
                progress(len(documents))
    if session.is_table:
        _tell(diff)
    else:
        show_one(session, document(diff), {})


def _words(diff: Diff) -> str:
    return (
        f"add {len(diff.added)}, change {len(diff.changed)} and remove {len(diff.removed)} "
        "schedules"
    )


def _tell(diff: Diff) -> None:
    for schedule_id in diff.added:
        say(printable(f"+ {schedule_id}"))
    for schedule_id, fields in document(diff)["changed"].items():
        words = (f"{name}: {cell(old)} -> {cell(new)}" for name, (old, new) in fields.items())
        say(printable(f"~ {schedule_id}  {', '.join(words)}"))
    for schedule_id in diff.removed:
        say(printable(f"- {schedule_id}"))
    note(f"{len(diff.unchanged)} are as the file says")


def _format_of(file: str | None) -> str:
    return "yaml" if file is not None and file.endswith((".yaml", ".yml")) else "json"


def _read(file: str) -> str:
    try:
        if file == "-":
            return sys.stdin.read()
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{file!r} cannot be read: {error}") from None


def _write(file: str, text: str) -> None:
    """Write a file that only its owner may read, if it is new: payloads may hold secrets."""
    try:
        with open(file, "w", encoding="utf-8", opener=_open_own) as opened:
            opened.write(text)
    except OSError as error:
        raise click.ClickException(f"{file!r} cannot be written: {error}") from None


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
