"""`fairqueue export` and `import`: schedules as files."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from fairqueue.cli.bulk import schedule_filters
from fairqueue.cli.listing import given, show_one
from fairqueue.cli.output import Progress, note, on_terminal, say
from fairqueue.cli.session import Command, Consent, Session, destructive, pass_session, prints_data
from fairqueue.cli.text import cell, printable
from fairqueue.errors import plural
from fairqueue.inspection.documents import document
from fairqueue.schedules.import_export import FORMATS, Diff, dump_schedules, load_schedules

format_option = click.option(
    "--format", "format_", type=click.Choice(FORMATS), help="Default: by the name of the file."
)


@click.command(cls=Command)
@click.argument("file", required=False)
@format_option
@schedule_filters
@pass_session
def export(session: Session, file: str | None, format_: str | None, **filters: Any) -> None:
    """Write schedules to a file or standard output. Secrets are included."""
    form = format_ or _format_of(file)
    with Progress("export") as progress:
        documents = session.inspector.schedules.export(**given(filters))
        progress(len(documents))
    text = dump_schedules(documents, form)
    if file is None or file == "-":
        lines = text.rstrip("\n").split("\n")
        say("\n".join(map(printable, lines) if on_terminal() else lines))
        return
    _write(file, text)
    note(f"wrote {plural(len(documents), 'schedule')} to {file}")


@click.command("import", cls=Command)
@click.argument("file")
@format_option
@click.option("--prune", is_flag=True, help="Remove schedules that are not in the file.")
@destructive
@prints_data
def import_(
    session: Session, file: str, format_: str | None, prune: bool, consent: Consent
) -> None:
    """Add and change schedules to match a file. `-` is standard input."""
    documents = load_schedules(_read(file), format_ or _format_of(file))
    schedules = session.inspector.schedules
    diff = schedules.import_(documents, prune=prune)
    if not diff.is_empty and consent.to(_words(diff)):
        with Progress("import") as progress:
            diff = schedules.import_(documents, prune=prune, dry_run=False)
            progress(len(documents))
    if session.is_table:
        _print_diff(diff)
    else:
        show_one(session, document(diff), {})


def _words(diff: Diff) -> str:
    return (
        f"add {len(diff.added)}, change {len(diff.changed)} and remove {len(diff.removed)} "
        "schedules"
    )


def _print_diff(diff: Diff) -> None:
    for schedule_id in diff.added:
        say(printable(f"+ {schedule_id}"))
    for schedule_id, fields in document(diff)["changed"].items():
        words = (f"{name}: {cell(old)} -> {cell(new)}" for name, (old, new) in fields.items())
        say(printable(f"~ {schedule_id}  {', '.join(words)}"))
    for schedule_id in diff.removed:
        say(printable(f"- {schedule_id}"))
    note(f"{plural(len(diff.unchanged), 'schedule')} unchanged")


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
    """Write a file. A new one is readable by its owner only: payloads may contain secrets."""
    try:
        with open(file, "w", encoding="utf-8", opener=_open_private) as opened:
            opened.write(text)
    except OSError as error:
        raise click.ClickException(f"{file!r} cannot be written: {error}") from None


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
