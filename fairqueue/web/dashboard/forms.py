"""Read forms, and make POST handlers from functions that act on them."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from python_multipart.exceptions import FormParserError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from fairqueue.errors import FairQueueError, InvalidInput
from fairqueue.web.dashboard.shell import came_from, error_page, is_htmx, set_toast
from fairqueue.web.problems import problem_of

MAX_FIELDS = 2000  # of a form
MAX_FILES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The result of an action: a sentence for the toast, and where to go next.

    to: a path of this app; by default back to the page that the request came from. stay: leave the
    page as it is. response: what htmx swaps in, instead of going anywhere.
    """

    text: str
    to: str | None = None
    stay: bool = False
    level: str = "success"
    response: Response | None = None


class Form:
    """The fields of a form. An empty field counts as absent."""

    def __init__(self, data: FormData) -> None:
        self._data = data

    def text(self, name: str) -> str | None:
        """A field without leading and trailing white space."""
        return self.raw(name).strip() or None

    def need(self, name: str) -> str:
        """A required field. Raises InvalidInput."""
        found = self.text(name)
        if found is None:
            raise InvalidInput(f"{name.replace('_', ' ')} is required")
        return found

    def raw(self, name: str) -> str:
        """A field as it was sent, such as a JSON text; empty if absent."""
        value = self._data.get(name)
        return value if isinstance(value, str) else ""

    def has(self, name: str) -> bool:
        """Whether a field was sent, such as a ticked box."""
        return name in self._data

    def every(self, name: str) -> list[str]:
        """All values of a field, such as ticked rows."""
        return [value for value in self._data.getlist(name) if isinstance(value, str)]

    def integer(self, name: str) -> int | None:
        """A whole number. Raises InvalidInput."""
        found: int | None = self._parsed(name, int, "must be a whole number, not {!r:.80}")
        return found

    def decimal(self, name: str) -> float | None:
        """A number. Raises InvalidInput."""
        found: float | None = self._parsed(name, float, "must be a number, not {!r:.80}")
        return found

    def json(self, name: str) -> Any:
        """A JSON value; None if empty. Raises InvalidInput."""
        return self._parsed(name, json.loads, "is not valid JSON: {error}")

    def _parsed(self, name: str, parse: Callable[[str], Any], problem: str) -> Any:
        found = self.text(name)
        try:
            return None if found is None else parse(found)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{name} {problem.format(found, error=error)}") from None

    def payload(self, example: str) -> dict[str, Any] | None:
        """The field `payload` as a JSON object; None if empty. Raises InvalidInput."""
        found = self.json("payload")
        if found is not None and not isinstance(found, dict):
            raise InvalidInput(f"payload must be a JSON object such as {example}")
        return found


Handler = Callable[[Request], Awaitable[Response]]


def posted(handle: Callable[[Request, Form], Response]) -> Handler:
    """Make a POST handler that returns a page or a part of one. It runs in a thread."""

    @wraps(handle)
    async def read(request: Request) -> Response:
        data = await form_of(request, max_files=MAX_FILES, max_fields=MAX_FIELDS)
        try:
            return await run_in_threadpool(handle, request, Form(data))
        finally:
            await data.close()

    return read


def action(act: Callable[[Request, Form], Done]) -> Handler:
    """Make a POST handler from a function that changes something and returns the result.

    The function runs in a thread. An error of the library becomes a toast with its message.
    """

    @wraps(act)
    def handle(request: Request, form: Form) -> Response:
        try:
            return _answer(request, act(request, form))
        except FairQueueError as error:
            return error_page(request, problem_of(error))

    return posted(handle)


async def form_of(request: Request, *, max_files: int, max_fields: int) -> FormData:
    """Read the form of a request. Raises HTTPException (400) if it is malformed."""
    try:
        return await request.form(max_files=max_files, max_fields=max_fields)
    except FormParserError as error:  # not all versions of Starlette catch it
        raise HTTPException(400, "The form is malformed.") from error


def _answer(request: Request, done: Done) -> Response:
    toast = {"text": done.text, "level": done.level}
    by_htmx = is_htmx(request)
    if by_htmx and (done.stay or done.response is not None):
        response = done.response or Response(status_code=204)
        response.headers["HX-Trigger"] = json.dumps({"toast": toast})
        return response
    where = done.to or came_from(request)
    response = Response(status_code=204) if by_htmx else RedirectResponse(where, 303)
    if by_htmx:
        response.headers["HX-Redirect"] = where
    set_toast(request, response, toast)
    return response
