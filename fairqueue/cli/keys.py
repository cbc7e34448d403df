"""`fairqueue keys`: API keys for the REST API and the dashboard."""

import click

from fairqueue.access.credentials import ROLES
from fairqueue.cli.exit_codes import NOT_FOUND
from fairqueue.cli.listing import columns, show
from fairqueue.cli.output import json_text, note, say
from fairqueue.cli.session import Consent, Group, Session, destructive, pass_session, prints_data
from fairqueue.cli.values import DURATION
from fairqueue.inspection.documents import document

COLUMNS = columns(
    "ID=key_id NAME=name ROLE=role TENANT=tenant CREATED=created_at BY=created_by "
    "EXPIRES=expires_at"
)


@click.group(cls=Group, default="list")
def keys() -> None:
    """Create, list and revoke API keys. Default: list. Times are UTC."""


@keys.command()
@click.argument("name")
@click.option(
    "--role", type=click.Choice(ROLES), default="viewer", show_default=True, help="Role of the key."
)
@click.option("--tenant", help="Limit the key to this tenant.")
@click.option("--expires-in", type=DURATION, help="Lifetime; default: until it is revoked.")
@prints_data
def create(
    session: Session, name: str, role: str, tenant: str | None, expires_in: float | None
) -> None:
    """Create a key and print its secret, which is not shown again."""
    key = session.inspector.keys.create(name, role, tenant, expires_in)
    if not session.is_table:
        say(json_text({**document(key), "secret": key.secret}))
        return
    note(f"key {key.info.key_id} for {role} {name!r}; the secret is not shown again:")
    say(key.secret)


@keys.command("list")
@prints_data
def list_(session: Session) -> None:
    """List keys, newest first, without their secrets."""
    show(session, "keys", iter(session.inspector.keys.list()), COLUMNS)


@keys.command()
@click.argument("key_id", metavar="ID")
@destructive
@pass_session
def revoke(session: Session, key_id: str, consent: Consent) -> int:
    """Revoke a key and end the sessions that used it to log in."""
    part = session.inspector.keys
    found = key_id in {key.key_id for key in part.list()}
    if found and consent.to(f"revoke key {key_id!r}"):
        found = part.revoke(key_id)
    if not found:
        note(f"there is no key {key_id!r}")
    return 0 if found else NOT_FOUND
