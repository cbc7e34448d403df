"""Store the answers to requests with an Idempotency-Key, so a repeated request is not done twice.

The client chooses the key. The answer to the first request with a key answers the others.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from fairqueue.errors import InvalidInput, shown
from fairqueue.link.connection import Link
from fairqueue.link.operation import Call, Operation, operation
from fairqueue.link.partitions import at_home
from fairqueue.models import UNREADABLE, new_id
from fairqueue.validation import check_count, check_name

MAX_KEY_LENGTH = 1000  # characters: the id of a credential and the key of the client
MAX_BODY_BYTES = 64 * 1024  # of a larger body only the status is stored
MAX_HEADERS_BYTES = 8 * 1024  # as JSON, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The state of a request.

    state: "new": the caller has it now, and must end it with `done` or `drop` and the token.
    "running": another caller has it. "done": answer with status, headers and body. "other": the key
    was used for another request. is_whole: False if the body or the headers were too large to
    store: the request was done and must not be repeated, but only its status is known.
    """

    state: str
    token: str = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: str = ""
    is_whole: bool = True


class ReplyStore:
    """The requests of one queue with an Idempotency-Key, and their answers.

    They are stored for 24 to 48 hours, or less if more than 10,000 of them, or answers of more than
    32 MiB, come within 24 hours.
    """

    def __init__(self, link: Link) -> None:
        self.link = link

    @operation
    @at_home
    def begin(self, key: str, digest: str) -> Operation[Begun]:
        """Reserve a request, or return its state. `digest` identifies the content of the request.

        A reservation lasts one minute. After that the next caller gets it, so a request may be done
        twice if its first owner takes longer, or dies before it calls `done`. Raises InvalidInput
        for a bad key or digest.
        """
        check_name(digest, "digest", InvalidInput)
        token = new_id()
        state, *answer = yield Call(
            "begin_request", request=_field(key), digest=digest, token=token
        )
        if state == b"done":
            return _read_answer(*answer)
        return Begun(state=state.decode(), token=token if state == b"new" else "")

    @operation
    @at_home
    def done(
        self,
        key: str,
        status: int,
        headers: Mapping[str, str],
        body: str,
        *,
        token: str | None = None,
    ) -> Operation[bool]:
        """Store the answer to a request; with a token, only if the caller still has it.

        Return False if nothing was stored: another caller has the request now, or it has an answer
        already. Raises InvalidInput for a bad key or status.
        """
        check_count(status, "status", least=100, most=599)
        headers_text = json.dumps({str(name): str(value) for name, value in headers.items()})
        body_bytes = body.encode("utf-8", "replace")
        is_whole = len(body_bytes) <= MAX_BODY_BYTES and len(headers_text) <= MAX_HEADERS_BYTES
        kept = yield Call(
            "end_request",
            request=_field(key),
            token=token or "",
            status=status,
            headers=headers_text if is_whole else "",
            body=body_bytes if is_whole else b"",
        )
        return bool(kept)

    @operation
    @at_home
    def drop(self, key: str, *, token: str | None = None) -> Operation[None]:
        """Give up a reservation, so that the request can be sent again at once.

        A stored answer stays. With a token, only the caller's own reservation is given up.
        """
        yield Call("drop_request", request=_field(key), token=token or "")


def _field(key: object) -> str:
    """Return the hash of a key: clients may choose any text."""
    if isinstance(key, str) and 0 < len(key) <= MAX_KEY_LENGTH:
        return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    raise InvalidInput(
        f"key of a request must be a string of 1 to {MAX_KEY_LENGTH} characters, "
        f"not {shown(key):.80}"
    )


def _read_answer(status: int, headers: bytes, body: bytes) -> Begun:
    """Read a stored answer. Without headers, which are JSON, it was too large to store."""
    try:
        read = {str(name): str(value) for name, value in json.loads(headers).items()}
    except UNREADABLE:
        return Begun(state="done", status=status, is_whole=False)
    return Begun(state="done", status=status, headers=read, body=body.decode("utf-8", "replace"))
