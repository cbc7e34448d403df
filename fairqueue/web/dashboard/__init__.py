"""The dashboard: pages rendered on the server, each kept up to date by an event stream."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from fairqueue.web.dashboard import login
from fairqueue.web.dashboard.pages import ROUTES
from fairqueue.web.dashboard.shell import ASSETS, STATIC, check_files

FOREVER = "public, max-age=31536000, immutable"  # URLs with a digest of the content
MAX_NAME = 100  # characters of a file name; longer ones raise errors on some systems
A_DAY = "public, max-age=86400"  # URLs without one: the font that a style sheet names


def routes() -> list[BaseRoute]:
    """The routes of the dashboard. Raises ConfigurationError if its files are missing."""
    check_files()
    return [Route("/static/{path}", static_file, name="static"), *login.ROUTES, *ROUTES]


def static_file(request: Request) -> Response:
    """A file that pages load, from one of the two folders."""
    name = request.path_params["path"]
    if len(name) > MAX_NAME:
        raise HTTPException(404)
    for folder in (ASSETS, STATIC):
        found = folder / name
        if found.parent == folder and found.is_file():
            keeps = FOREVER if "v" in request.query_params else A_DAY
            return FileResponse(found, headers={"Cache-Control": keeps})
    raise HTTPException(404)
