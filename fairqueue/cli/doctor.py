"""`fairqueue doctor`: look for what is wrong, and put it right."""

import click

from fairqueue.cli.exit_codes import OK, UNHEALTHY
from fairqueue.cli.listing import show
from fairqueue.cli.output import Progress, note
from fairqueue.cli.session import Command, Consent, Session, destructive, pass_session, reading
from fairqueue.cli.text import plural
from fairqueue.doctor import PROBLEM, Doctor, Finding
from fairqueue.link.keys import command_line

COLUMNS = {
    "CHECK": lambda finding: finding.check,
    "LEVEL": lambda finding: finding.level,
    "WHAT": lambda finding: finding.text,
}


@click.command(cls=Command)
@click.option("--fix", is_flag=True, help="Repair counts and indexes that do not agree.")
@click.option("--quick", is_flag=True, help="Do not compare all entries with each other.")
@destructive
@reading
@pass_session
def doctor(session: Session, fix: bool, quick: bool, consent: Consent) -> int:
    """Look for what is wrong with Redis and the queue. Exit code 6 for a problem."""
    if fix and quick:
        raise click.UsageError("--quick makes no sense with --fix, which compares all entries")
    with session.open(check=False) as queue:
        physician = Doctor(queue)
        with Progress("doctor") as progress:
            findings = physician.examine(records=not quick, progress=progress)
        wrong = sum(finding.repairable for finding in findings)
        if fix and wrong and consent.to(f"repair what does not agree in {plural(wrong, 'place')}"):
            with Progress("repair") as progress:
                findings = physician.examine(fix=True, progress=progress)
    show(session, "findings", iter(findings), COLUMNS)
    if wrong and not fix and session.is_table:
        entries = "entry" if wrong == 1 else "entries"
        repair = command_line("fairqueue doctor --fix", session.queue)
        note(f"{wrong} {entries} can be repaired: {repair}")
    return code_of(findings)


def code_of(findings: list[Finding]) -> int:
    """6 if something is a problem that was not repaired."""
    return UNHEALTHY if any(each.level == PROBLEM for each in findings) else OK
