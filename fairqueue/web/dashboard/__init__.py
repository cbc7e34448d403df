"""The pages of the web face: rendered on the server, kept up to date by one event stream each."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from fairqueue.web.dashboard import login
from fairqueue.web.dashboard.pages import ROUTES
from fairqueue.web.dashboard.shell import ASSETS, STATIC, check_files

FOREVER = "public, max-age=31536000, immutable"  # an address with a digest of the content
LONGEST_NAME = 100  # characters of a file's name; systems complain about long ones
A_DAY = "public, max-age=86400"  # one without: the font, which a style sheet names


def routes() -> list[BaseRoute]:
    """All that people see. Raises ConfigurationError where the files are not installed."""
    check_files()
    return [Route("/static/{path}", static_file, name="static"), *login.ROUTES, *ROUTES]


def static_file(request: Request) -> Response:
    """A file that pages load: ours, or of those we build on. Folders have no other way in."""
    name = request.path_params["path"]
    if len(name) > LONGEST_NAME:
        raise HTTPException(404)
    for folder in (ASSETS, STATIC):
        found = folder / name
        if found.parent == folder and found.is_file():
            keeps = FOREVER if "v" in request.query_params else A_DAY
            return FileResponse(found, headers={"Cache-Control": keeps})
    raise HTTPException(404)
