"""Keep the answers to requests, so that one that is sent again is answered and not done again."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from fairqueue.errors import InvalidInput, shown
from fairqueue.link.connection import Link
from fairqueue.models import UNREADABLE, new_id
from fairqueue.validation import check_count, check_name

MAX_KEY_LENGTH = 1000  # characters: the id of a credential and what the client has chosen
MAX_BODY_BYTES = 64 * 1024  # a longer body is not kept, but that the request was done is
MAX_HEADERS_BYTES = 8 * 1024  # as JSON; longer ones are not kept either


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What is known of a request.

    state: "new": it is yours now, do it, then say `done` or `drop` with the token. "running":
    another one does it. "done": answer with status, headers and body. "other": the key is that of
    another request. is_whole: False if the body or the headers were too long to keep: the request
    was done, and must not be done again, but only its status is known.
    """

    state: str
    token: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    is_whole: bool = True


class ReplyStore:
    """The requests of one queue that carry a key of their own, and the answers to them.

    Kept for 24 to 48 hours; less where more than 10,000 of them, or answers of more than 32 MiB,
    come within 24 hours.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def begin(self, key: str, digest: str) -> Begun:
        """Reserve a request, or learn what became of it; `digest` tells requests of one key apart.

        A reservation holds for a minute. Then its owner counts as gone, and the next who asks gets
        it: so a request may be done twice whose first owner takes longer, or ended before it could
        say `done`. Raises InvalidInput for a key or digest that cannot be used.
        """
        check_name(digest, "digest", InvalidInput)
        token = new_id()
        state, *answer = self._link.run(
            "begin_request", request=_field(key), digest=digest, token=token
        )
        if state == b"done":
            return _read_answer(*answer)
        return Begun(state=state.decode(), token=token if state == b"new" else "")

    def done(
        self,
        key: str,
        status: int,
        headers: Mapping[str, str],
        body: str,
        *,
        token: str | None = None,
    ) -> bool:
        """Keep the answer to a request that was begun.

        With the token of `begin`, only if the reservation is still the caller's. False if nothing
        was kept: it is somebody else's by now, or an answer is there already, which stands.
        Raises InvalidInput for a key or status that cannot be used.
        """
        check_count(status, "status", least=100, most=599)
        headers_text = json.dumps({str(name): str(value) for name, value in headers.items()})
        body_bytes = body.encode("utf-8", "replace")
        is_whole = len(body_bytes) <= MAX_BODY_BYTES and len(headers_text) <= MAX_HEADERS_BYTES
        kept = self._link.run(
            "end_request",
            request=_field(key),
            token=token or "",
            status=status,
            headers=headers_text if is_whole else "",
            body=body_bytes if is_whole else b"",
        )
        return bool(kept)

    def drop(self, key: str, *, token: str | None = None) -> None:
        """Give up a reservation: the request was not done, and may be sent again at once.

        An answer that is kept stays. With the token of `begin`, only the caller's own reservation.
        """
        self._link.run("drop_request", request=_field(key), token=token or "")


def _field(key: object) -> str:
    """What a key is kept under: its hash, so that clients may choose any text."""
    if isinstance(key, str) and 0 < len(key) <= MAX_KEY_LENGTH:
        return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    raise InvalidInput(
        f"key of a request {shown(key):.80} cannot be used: a string of 1 to {MAX_KEY_LENGTH} "
        "characters"
    )


def _read_answer(status: int, headers: bytes, body: bytes) -> Begun:
    """An answer that was kept: without headers, which are JSON, it is one that was too long."""
    try:
        read = {str(name): str(value) for name, value in json.loads(headers).items()}
    except UNREADABLE:
        return Begun(state="done", status=status, is_whole=False)
    return Begun(state="done", status=status, headers=read, body=body.decode("utf-8", "replace"))
