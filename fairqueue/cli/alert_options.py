"""The options of `scheduler`, `worker` and `up` that say where alerts go."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from fairqueue.alerts import Alerts, LogRecipient, Recipient, WebhookRecipient
from fairqueue.cli.apps import call, find
from fairqueue.errors import ConfigurationError, kind_of, shown

DEFAULT_NAME = "alerts"
EXAMPLE = f"myapp.ops:{DEFAULT_NAME}"
LAST_ALERTS_S = 5.0  # how long to wait at the end for alerts that are not sent yet


def alert_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--alerts`, `--alert-webhook` and `--alert-log`, passed to the command as `alerts`."""

    @click.option(
        "--alerts",
        "named",
        metavar="MODULE[:NAME]",
        help="Object of class Alerts, or a function that returns one; "
        f"default name: {DEFAULT_NAME}.",
    )
    @click.option(
        "--alert-webhook",
        metavar="URL|@FILE",
        help="Post alerts to this URL as JSON; @FILE reads the URL from a file, to keep it out of "
        "ps.",
    )
    @click.option("--alert-log", is_flag=True, help="Write alerts to the log.")
    @functools.wraps(command)
    def with_alerts(
        *args: Any, named: str | None, alert_webhook: str | None, alert_log: bool, **settings: Any
    ) -> Any:
        alerts = _alerts(named, alert_webhook, alert_log)
        try:
            return command(*args, alerts=alerts, **settings)
        finally:
            if alerts is not None:
                alerts.close(LAST_ALERTS_S)

    return with_alerts


def _alerts(named: str | None, webhook: str | None, log: bool) -> Alerts | None:
    """Raises ConfigurationError if the options cannot be used."""
    if named is None:
        recipients = _recipients(webhook, log)
        return Alerts(recipients) if recipients else None
    if webhook is not None or log:
        raise ConfigurationError(
            f"--alerts {shown(named)} has its own recipients: remove --alert-webhook and "
            "--alert-log"
        )
    path = named if ":" in named else f"{named}:{DEFAULT_NAME}"
    wanted = "an Alerts, or a function that returns one"
    _, found = find(path, "--alerts", wanted, EXAMPLE)
    if callable(found) and not isinstance(found, Alerts):
        found = call(found, f"--alerts {shown(named)}")
    if not isinstance(found, Alerts):
        raise ConfigurationError(f"--alerts {shown(named)} must be {wanted}, not {kind_of(found)}")
    return found


def _recipients(webhook: str | None, log: bool) -> Sequence[Recipient]:
    recipients: list[Recipient] = []
    if webhook is not None:
        # http:// on the command line is a deliberate choice.
        recipients.append(WebhookRecipient(_url(webhook), allow_http=True))
    if log:
        recipients.append(LogRecipient())
    return recipients


def _url(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--alert-webhook {shown(text)} cannot be read: {error}") from None
