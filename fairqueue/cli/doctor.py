"""`fairqueue doctor`: find problems of Redis and the queue, and repair inconsistent records."""

import click

from fairqueue.cli.exit_codes import OK, UNHEALTHY
from fairqueue.cli.listing import columns, show
from fairqueue.cli.output import Progress, note
from fairqueue.cli.session import Command, Consent, Session, destructive, prints_data
from fairqueue.doctor import PROBLEM, Doctor
from fairqueue.errors import plural
from fairqueue.link.keys import command_line

COLUMNS = columns("CHECK=check LEVEL=level WHAT=text")


@click.command(cls=Command)
@click.option("--fix", is_flag=True, help="Repair counts and indexes that are inconsistent.")
@click.option("--quick", is_flag=True, help="Skip the full consistency check.")
@destructive
@prints_data
def doctor(session: Session, fix: bool, quick: bool, consent: Consent) -> int:
    """Check Redis and the queue for problems. The exit code is 6 if there are any."""
    if fix and quick:
        raise click.UsageError("--quick cannot be used with --fix, which compares all entries")
    with session.open(check=False) as queue:
        physician = Doctor(queue)
        with Progress("doctor") as progress:
            findings = physician.examine(records=not quick, progress=progress)
        wrong = sum(finding.repairable for finding in findings)
        places = plural(wrong, "inconsistent entry", "inconsistent entries")
        if fix and wrong and consent.to(f"repair {places}"):
            with Progress("repair") as progress:
                findings = physician.examine(fix=True, progress=progress)
    show(session, "findings", iter(findings), COLUMNS)
    if wrong and not fix and session.is_table:
        repair = command_line("fairqueue doctor --fix", session.queue)
        note(f"{plural(wrong, 'entry', 'entries')} can be repaired: {repair}")
    return UNHEALTHY if any(each.level == PROBLEM for each in findings) else OK
