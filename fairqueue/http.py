"""Tasks that call a URL: the public names of `fairqueue.http_tasks`, which needs httpx."""

from fairqueue.http_tasks.http import HttpTasks, SecretRequest, Secrets, verify_signature
from fairqueue.http_tasks.network import (
    IpAddress,
    IpNetwork,
    Resolver,
    check_made,
    forbidding_rule,
    look_up_by,
)
from fairqueue.http_tasks.requests import check_request

__all__ = [
    "HttpTasks",
    "IpAddress",
    "IpNetwork",
    "Resolver",
    "SecretRequest",
    "Secrets",
    "check_made",
    "check_request",
    "forbidding_rule",
    "look_up_by",
    "verify_signature",
]
