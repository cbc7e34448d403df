"""Import the libraries of the extra `http`, or raise an error that says how to install them."""

try:
    import httpcore as httpcore
    import httpx as httpx
except ImportError as error:
    raise ImportError(
        "fairqueue.http needs httpx, which is not installed: pip install 'fairqueue[http]'"
    ) from error
