"""Who may do what, who did what, and requests that are answered once."""

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
