"""Partitions: where each one is, what it has to do, and which one is hot."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.web.app_state import app_state
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.shell import page


def partitions(request: Request) -> Response:
    """The page. Raises Forbidden for an actor of one tenant."""
    part = inspector_of(request).partitions
    part.check()
    # Open pages refresh themselves; fifty of them must not cost more than one.
    view = app_state(request).cache.get("partitions", part.read)
    known = [row for row in view.partitions if row.error is None]
    return page(
        request,
        "partitions.html",
        view=view,
        down=len(view.partitions) - len(known),
        most_waiting=max((row.ready or 0 for row in known), default=0),
        most_rate=max((row.rate for row in known), default=0.0),
        waiting=sum(row.ready or 0 for row in known),
        rate=sum(row.rate for row in known),
        has_rates=any(row.pushed is not None for row in known),
    )


ROUTES: list[BaseRoute] = [Route("/partitions", partitions, name="partitions")]
