"""Cursors of listings: the place where the next page begins, as an opaque string."""

import base64

from fairqueue.errors import InvalidInput, shown


def encode_cursor(place: bytes) -> str:
    """Return the cursor of a page that ends at `place`."""
    return base64.urlsafe_b64encode(place).decode()


def decode_cursor(cursor: object, error: type[InvalidInput] = InvalidInput) -> bytes:
    """Return the place of a cursor. Raises `error` for a value that `encode_cursor` never makes."""
    try:
        if isinstance(cursor, str):
            return base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
    except ValueError:
        pass
    raise bad_cursor(cursor, error)


def bad_cursor(cursor: object, error: type[InvalidInput], why: str = "") -> InvalidInput:
    """Return the error for a cursor that cannot be used here; `why` says more."""
    return error(f"cursor {shown(cursor)} is not valid{why}: pass the `cursor` of a page")
