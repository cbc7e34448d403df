"""The dashboard and the REST API, as an ASGI app that can be mounted.

Needs the extra `web` (`pip install 'fairqueue[web]'`).
"""

from fairqueue.web.app import close_streams, create_app
from fairqueue.web.server import WebServer, serve

__all__ = ["WebServer", "close_streams", "create_app", "serve"]
