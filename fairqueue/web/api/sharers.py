"""Answer requests about those who share the queue: users and tenants."""

from typing import Any

from fairqueue.errors import InvalidInput
from fairqueue.web.api import models as m
from fairqueue.web.api.endpoint import ApiRequest, Nothing


def changes_of(call: ApiRequest[Any, Any]) -> dict[str, Any]:
    """The arguments of a change. Raises InvalidInput if there are none."""
    if not m.given(call.body):
        raise InvalidInput("the body must have at least one field to change")
    return call.arguments


# --- users ----------------------------------------------------------------------------------------


def list_users(call: ApiRequest[m.UserQuery, Nothing]) -> Any:
    """List users with their shares."""
    return call.inspector.users.list(**call.arguments)


def get_user(call: ApiRequest[m.OwnerWindowQuery, Nothing]) -> Any:
    """Get a user with its share."""
    return call.inspector.users.get(call.id, **call.arguments)


def change_user(call: ApiRequest[m.OwnerQuery, m.UserChanges]) -> Any:
    """Change weight or limits of a user."""
    return call.inspector.users.set(call.id, **changes_of(call))


def pause_user(call: ApiRequest[m.OwnerQuery, m.Pause]) -> Any:
    """Pause a user until resumed, or until a time: no task of the user starts."""
    return call.inspector.users.pause(call.id, **call.arguments)


def resume_user(call: ApiRequest[m.OwnerQuery, Nothing]) -> Any:
    """Resume a user."""
    return call.inspector.users.resume(call.id, **call.arguments)


def purge_user(call: ApiRequest[m.OwnerQuery, m.DryRunOnly]) -> Any:
    """Cancel all waiting tasks of a user."""
    count = call.inspector.users.purge(call.id, **call.arguments)
    return {"dry_run": call.body.dry_run, "count": count}


def move_user(call: ApiRequest[m.OwnerQuery, m.UserMove]) -> Any:
    """Move a user, with its waiting tasks and settings, to another tenant."""
    return {"moved": call.inspector.users.move(call.id, **call.arguments)}


def quote_user(call: ApiRequest[m.QuoteQuery, Nothing]) -> Any:
    """Estimate when a task of a user would start if it was pushed now."""
    return call.inspector.users.quote(call.id, **call.arguments)


def get_fairness(call: ApiRequest[m.WindowQuery, Nothing]) -> Any:
    """Get how evenly tenants, and users without one, are served."""
    return call.inspector.users.overview(**call.arguments)


def get_shares(call: ApiRequest[m.ShareQuery, Nothing]) -> Any:
    """Get the ended runs of the top tenants and users over time."""
    return call.inspector.users.shares(**call.arguments)


# --- tenants --------------------------------------------------------------------------------------


def list_tenants(call: ApiRequest[m.TenantQuery, Nothing]) -> Any:
    """List tenants with their shares."""
    return call.inspector.tenants.list(**call.arguments)


def get_tenant(call: ApiRequest[m.WindowQuery, Nothing]) -> Any:
    """Get a tenant with its share."""
    return call.inspector.tenants.get(call.id, **call.arguments)


def list_tenant_users(call: ApiRequest[m.TenantUserQuery, Nothing]) -> Any:
    """List the users of a tenant with their shares of its service."""
    tenant = call.inspector.tenants.get(call.id).tenant  # 404 for an unknown tenant
    return call.inspector.users.list(tenant=tenant, **call.arguments)


def get_tenant_fairness(call: ApiRequest[m.WindowQuery, Nothing]) -> Any:
    """Get how evenly the users of a tenant are served."""
    return call.inspector.tenants.overview(call.id, **call.arguments)


def get_tenant_shares(call: ApiRequest[m.ShareQuery, Nothing]) -> Any:
    """Get the ended runs of the top users of a tenant over time."""
    return call.inspector.tenants.service(call.id, **call.arguments)


def change_tenant(call: ApiRequest[Nothing, m.TenantChanges]) -> Any:
    """Change weight or limits of a tenant."""
    return call.inspector.tenants.set(call.id, **changes_of(call))


def pause_tenant(call: ApiRequest[Nothing, m.Pause]) -> Any:
    """Pause a tenant until resumed, or until a time: no task of its users starts."""
    return call.inspector.tenants.pause(call.id, **call.arguments)


def resume_tenant(call: ApiRequest[Nothing, Nothing]) -> Any:
    """Resume a tenant."""
    return call.inspector.tenants.resume(call.id)


def purge_tenant(call: ApiRequest[Nothing, m.DryRunOnly]) -> Any:
    """Cancel all waiting tasks of the users of a tenant."""
    count = call.inspector.tenants.purge(call.id, **call.arguments)
    return {"dry_run": call.body.dry_run, "count": count}
