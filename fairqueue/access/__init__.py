"""Credentials, the audit log, and idempotent requests."""

from fairqueue.access.credentials import (
    AccessStore,
    Actor,
    Admission,
    KeyInfo,
    NewKey,
    check_role,
    id_of,
)

__all__ = [
    "AccessStore",
    "Actor",
    "Admission",
    "KeyInfo",
    "NewKey",
    "check_role",
    "id_of",
]
