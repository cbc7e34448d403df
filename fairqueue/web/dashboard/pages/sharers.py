"""One user or one tenant: who is meant, and the dialogs and actions on them."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput, plural
from fairqueue.link.owners import Owner
from fairqueue.stats.users import TenantInfo, UserInfo
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.formatting import command, duration, options, query_of
from fairqueue.web.dashboard.forms import Done, Form, Handler, action
from fairqueue.web.dashboard.pages.helpers import now_of
from fairqueue.web.dashboard.shell import partial, user_link

# For how many minutes somebody is paused; "" until resumed.
PAUSES = {
    "": "until resumed",
    "15": "15 minutes",
    "60": "1 hour",
    "480": "8 hours",
    "1440": "1 day",
    "10080": "1 week",
}
MAX_PAUSE = 366 * 24 * 60  # minutes
DIALOGS = {"user": ("limits", "purge", "pause", "move"), "tenant": ("limits", "purge", "pause")}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSharer:
    """A user or a tenant, for templates and actions.

    noun: "user" or "tenant"; the routes of their actions begin with it. name: the id of the user,
    or the name of the tenant. tenant: of the user, if any.
    """

    noun: str
    name: str
    tenant: str | None = None

    @classmethod
    def of(cls, info: UserInfo | TenantInfo) -> "NamedSharer":
        """The user or the tenant with this state."""
        if isinstance(info, TenantInfo):
            return cls(noun="tenant", name=info.tenant)
        return cls(noun="user", name=info.user_id, tenant=info.tenant)

    @property
    def label(self) -> str:
        """What people read: `ann`, `ann of acme` or `acme`."""
        return self.name if self.noun == "tenant" else str(Owner(self.name, self.tenant))

    @property
    def fields(self) -> dict[str, str]:
        """The fields of forms that say who is meant."""
        return (
            {"id": self.name} if self.tenant is None else {"id": self.name, "tenant": self.tenant}
        )

    @property
    def query(self) -> str:
        """The same as a query string, without its question mark."""
        return query_of(**self.fields)

    def command(self, verb: str, *words: object) -> str:
        """The command line that does something to the user or the tenant."""
        return command(f"{self.noun}s", verb, *words, *options(tenant=self.tenant), ids=[self.name])

    # --- through the inspector --------------------------------------------------------------------

    def get(self, request: Request) -> UserInfo | TenantInfo:
        """The state. Raises UnknownUser, UnknownTenant."""
        if self.noun == "tenant":
            return inspector_of(request).tenants.get(self.name)
        return inspector_of(request).users.get(self.name, tenant=self.tenant)

    def waiting(self, request: Request) -> int:
        """How many tasks a purge would cancel."""
        count: int = self.call(request, "purge", dry_run=True)
        return count

    def call(self, request: Request, name: str, **arguments: Any) -> Any:
        """Call a method of `Inspector.users` or of `Inspector.tenants`."""
        inspector = inspector_of(request)
        if self.noun == "tenant":
            return getattr(inspector.tenants, name)(self.name, **arguments)
        return getattr(inspector.users, name)(self.name, tenant=self.tenant, **arguments)


def sharer_in(noun: str, form: Form) -> NamedSharer:
    """Who a form is about."""
    return NamedSharer(
        noun=noun, name=form.raw("id"), tenant=form.text("tenant") if noun == "user" else None
    )


def user_in(request: Request) -> NamedSharer:
    """The user that a query is about."""
    given = request.query_params
    return NamedSharer(noun="user", name=given.get("id", ""), tenant=given.get("tenant") or None)


# --- dialogs --------------------------------------------------------------------------------------


def _asking(noun: str) -> Callable[[Request], Response]:
    def ask(request: Request) -> Response:
        """A dialog: change limits, cancel waiting tasks, pause, or move."""
        kind = request.path_params["kind"]
        if kind not in DIALOGS[noun]:
            raise HTTPException(404)
        given = request.query_params
        tenant = (given.get("tenant") or None) if noun == "user" else None
        sharer = NamedSharer(noun=noun, name=given.get("id", ""), tenant=tenant)
        return partial(
            request,
            f"sharer_{kind}.html",
            who=sharer,
            info=sharer.get(request),
            waiting=sharer.waiting(request) if kind == "purge" else 0,
            pauses=PAUSES,
        )

    return ask


# --- actions --------------------------------------------------------------------------------------


def _changing(noun: str) -> Handler:
    @action
    def change(request: Request, form: Form) -> Done:
        """Change the limits that differ from what the form showed, and keep others' changes."""
        sharer = sharer_in(noun, form)
        given = {
            name: value
            for name, value in _limits(form).items()
            if form.raw(name).strip() != form.raw(f"was_{name}")
        }
        if not given:
            return Done(text="Nothing was changed.", level="warning", stay=True)
        sharer.call(request, "set", **given)
        text = ", ".join(f"{name.replace('_', ' ')} {_said(each)}" for name, each in given.items())
        return Done(text=f"Changed {_named(request, sharer)}: {text}.")

    return change


def _limits(form: Form) -> dict[str, Any]:
    """The limits in the form; an empty field removes a limit. Raises InvalidInput."""
    found: dict[str, Any] = {
        "weight": form.decimal("weight"),
        "max_running": form.integer("max_running"),
        "max_waiting": form.integer("max_waiting"),
        "rate": form.decimal("rate"),
    }
    if form.has("weight") and found["weight"] is None:
        raise InvalidInput("weight is required: a number from 0.01 to 1000, by default 1")
    return {name: value for name, value in found.items() if form.has(name)}


def _said(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _named(request: Request, sharer: NamedSharer) -> str:
    """Its name; an actor of one tenant knows the tenant."""
    return sharer.name if actor_of(request).tenant is not None else sharer.label


def _pausing(noun: str) -> Handler:
    @action
    def pause(request: Request, form: Form) -> Done:
        """Pause somebody until resumed, or for some minutes."""
        sharer = sharer_in(noun, form)
        minutes = form.integer("minutes")
        if minutes is not None and not 0 < minutes <= MAX_PAUSE:
            raise InvalidInput(f"minutes must be 1 to {MAX_PAUSE}, not {minutes}")
        until = None if minutes is None else now_of(request) + timedelta(minutes=minutes)
        sharer.call(request, "pause", note=form.text("note"), until=until)
        how_long = f" for {duration(minutes * 60)}" if minutes else ""
        return Done(text=f"Paused {_named(request, sharer)}{how_long}. Running tasks continue.")

    return pause


def _resuming(noun: str) -> Handler:
    @action
    def resume(request: Request, form: Form) -> Done:
        """Resume somebody."""
        sharer = sharer_in(noun, form)
        sharer.call(request, "resume")
        return Done(text=f"Resumed {_named(request, sharer)}.")

    return resume


def _purging(noun: str) -> Handler:
    @action
    def purge(request: Request, form: Form) -> Done:
        """Cancel the waiting tasks of somebody."""
        sharer = sharer_in(noun, form)
        count = sharer.call(request, "purge", dry_run=False)
        name = _named(request, sharer)
        return Done(text=f"Cancelled {plural(count, 'waiting task')} of {name}.")

    return purge


@action
def move(request: Request, form: Form) -> Done:
    """Move a user to another tenant, or to none, and go to the user's new page."""
    user, to = sharer_in("user", form), form.text("to")
    count = inspector_of(request).users.move(user.name, to, tenant=user.tenant)
    moved = NamedSharer(noun="user", name=user.name, tenant=to)
    tasks = plural(count, "waiting task")
    return Done(
        text=f"Moved {user.label} to {'no tenant' if to is None else to}, with {tasks}.",
        to=user_link(request, moved.name, moved.tenant),
    )


def action_routes(noun: str) -> list[BaseRoute]:
    """The routes of the dialogs and of the actions on users or on tenants."""
    kinds = f"{noun}s"
    posts = {"set": _changing, "pause": _pausing, "resume": _resuming, "purge": _purging}
    return [
        Route(f"/ask/{kinds}/{{kind}}", _asking(noun), name=f"{noun}_ask"),
        *(
            Route(f"/do/{kinds}/{verb}", make(noun), methods=["POST"], name=f"{noun}_{verb}")
            for verb, make in posts.items()
        ),
    ]
