"""`fairqueue keys`: keys for the REST API and the dashboard."""

import click

from fairqueue.access.credentials import ROLES
from fairqueue.cli.exit_codes import NOT_FOUND
from fairqueue.cli.listing import show
from fairqueue.cli.output import json_text, note, say
from fairqueue.cli.session import Consent, Group, Session, destructive, pass_session, reading
from fairqueue.cli.values import DURATION
from fairqueue.inspection.documents import document

COLUMNS = {
    "ID": lambda key: key.key_id,
    "NAME": lambda key: key.name,
    "ROLE": lambda key: key.role,
    "TENANT": lambda key: key.tenant,
    "CREATED": lambda key: key.created_at,
    "BY": lambda key: key.created_by,
    "EXPIRES": lambda key: key.expires_at,
}


@click.group(cls=Group, default="list")
def keys() -> None:
    """Keys for REST and dashboard; alone: list them. Times are UTC."""


@keys.command()
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="viewer", show_default=True)
@click.option("--tenant", help="It sees this tenant only.")
@click.option("--expires-in", type=DURATION, help="It holds for so long; default: until revoked.")
@reading
@pass_session
def create(
    session: Session, name: str, role: str, tenant: str | None, expires_in: float | None
) -> None:
    """Make a key and print its secret, which is shown this once."""
    with session.inspector() as inspector:
        key = inspector.keys.create(name, role, tenant, expires_in)
    if not session.is_table:
        say(json_text({**document(key), "secret": key.secret}))
        return
    note(f"key {key.info.key_id} for {role} {name!r}; its secret is shown only now:")
    say(key.secret)


@keys.command("list")
@reading
@pass_session
def list_(session: Session) -> None:
    """Keys, newest first, without their secrets."""
    with session.inspector() as inspector:
        found = inspector.keys.list()
    show(session, "keys", iter(found), COLUMNS)


@keys.command()
@click.argument("key_id", metavar="ID")
@destructive
@pass_session
def revoke(session: Session, key_id: str, consent: Consent) -> int:
    """Take a key back, with the sessions that were begun with it."""
    with session.inspector() as inspector:
        if key_id in {key.key_id for key in inspector.keys.list()}:
            if not consent.to(f"revoke key {key_id!r}"):
                return 0
            if inspector.keys.revoke(key_id):
                return 0
    note(f"there is no key {key_id!r}")
    return NOT_FOUND
