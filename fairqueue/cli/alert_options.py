"""The options of `scheduler`, `worker` and `up` that say where alerts go."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from fairqueue.alerts import AlertLimits, Alerts, LogRecipient, Recipient, WebhookRecipient
from fairqueue.cli.apps import call, find
from fairqueue.cli.values import read_duration, read_pairs
from fairqueue.errors import ConfigurationError, kind_of, shown

DEFAULT_NAME = "alerts"
EXAMPLE = f"myapp.ops:{DEFAULT_NAME}"
LAST_ALERTS_S = 5.0  # how long to wait at the end for alerts that are not sent yet


def alert_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--alerts` and the `--alert-…` options, passed to the command as `alerts`."""

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
    @click.option(
        "--alert-limit",
        "limits",
        metavar="NAME=VALUE",
        multiple=True,
        help="Change a limit of alerts, such as backlog=50000, pool_unserved=5m or lateness=off; "
        "can be repeated.",
    )
    @functools.wraps(command)
    def with_alerts(
        *args: Any,
        named: str | None,
        alert_webhook: str | None,
        alert_log: bool,
        limits: tuple[str, ...],
        **settings: Any,
    ) -> Any:
        alerts = _alerts(named, alert_webhook, alert_log, limits)
        try:
            return command(*args, alerts=alerts, **settings)
        finally:
            if alerts is not None:
                alerts.close(LAST_ALERTS_S)

    return with_alerts


def _alerts(
    named: str | None, webhook: str | None, log: bool, changed: Sequence[str]
) -> Alerts | None:
    """Raises ConfigurationError or UsageError if the options cannot be used."""
    limits = _limits(changed)
    if named is None:
        recipients = _recipients(webhook, log)
        if changed and not recipients:
            raise click.UsageError(
                f"--alert-limit {shown(changed[0])} needs --alert-webhook or --alert-log, which "
                "say where alerts go"
            )
        return Alerts(recipients, limits=limits) if recipients else None
    if webhook is not None or log or changed:
        raise ConfigurationError(
            f"--alerts {shown(named)} has its own recipients and limits: remove --alert-webhook, "
            "--alert-log and --alert-limit"
        )
    path = named if ":" in named else f"{named}:{DEFAULT_NAME}"
    wanted = "an Alerts, or a function that returns one"
    _, found = find(path, "--alerts", wanted, EXAMPLE)
    if callable(found) and not isinstance(found, Alerts):
        found = call(found, f"--alerts {shown(named)}")
    if not isinstance(found, Alerts):
        raise ConfigurationError(f"--alerts {shown(named)} must be {wanted}, not {kind_of(found)}")
    return found


def _limits(given: Sequence[str]) -> AlertLimits:
    """The limits of alerts: the defaults with these changes. Raises UsageError."""
    usual = asdict(AlertLimits())
    changes: dict[str, Any] = {}
    for name, text in read_pairs(given, "--alert-limit").items():
        if name not in usual:
            raise click.UsageError(
                f"--alert-limit {shown(name)} is not a limit: use one of {', '.join(usual)}"
            )
        changes[name] = None if text == "off" else _number(name, text)
    return AlertLimits(**changes)


def _number(name: str, text: str) -> float:
    value = read_duration(text)
    if value is None:
        raise click.UsageError(
            f"--alert-limit {name}={text} must be a number, a duration such as 90s or 10m, or off"
        )
    return int(value) if value.is_integer() else value


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
