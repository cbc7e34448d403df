"""Alerts for people: deduplicated, rate limited, sent to several recipients."""

from fairqueue.alerts.alert import (
    EVENT_KINDS,
    KINDS,
    LIMIT_KINDS,
    Alert,
    AlertNotSent,
)
from fairqueue.alerts.alerts import (
    AlertMetrics,
    Alerts,
    alert_metrics,
)
from fairqueue.alerts.limits import (
    AlertLimits,
    Breach,
    Dedup,
    Lane,
    LimitWatch,
    RateLimit,
    RunWindow,
)
from fairqueue.alerts.recipients import (
    CallableRecipient,
    EmailRecipient,
    LogRecipient,
    Recipient,
    WebhookRecipient,
)

__all__ = [
    "EVENT_KINDS",
    "KINDS",
    "LIMIT_KINDS",
    "Alert",
    "AlertLimits",
    "AlertMetrics",
    "AlertNotSent",
    "Alerts",
    "Breach",
    "CallableRecipient",
    "Dedup",
    "EmailRecipient",
    "Lane",
    "LimitWatch",
    "LogRecipient",
    "RateLimit",
    "Recipient",
    "RunWindow",
    "WebhookRecipient",
    "alert_metrics",
]
