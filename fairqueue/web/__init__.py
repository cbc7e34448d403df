"""The web face: pages and a REST API over the Inspector, as one ASGI app that mounts anywhere.

Needs the extra `web` (`pip install 'fairqueue[web]'`).
"""

from fairqueue.web.app import close_streams, create_app
from fairqueue.web.server import WebServer, serve

__all__ = ["WebServer", "close_streams", "create_app", "serve"]
