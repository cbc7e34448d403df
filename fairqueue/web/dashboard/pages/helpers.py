"""What pages share: addresses, command lines, times as people type them, rules in short."""

import json
import re
import shlex
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, tzinfo
from functools import wraps
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from fairqueue.clock import from_ms
from fairqueue.errors import InvalidInput, UnknownTimezone
from fairqueue.inspection.views import ScheduleView
from fairqueue.models import ScheduledTask
from fairqueue.recurrence.zones import find_zone
from fairqueue.web.app_state import root_of
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.shell import MAX_FIELDS, Form, form_of

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)", re.ASCII)
LONGEST_DURATION = 60  # characters
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - of wall clocks


def posted(handle: Callable[[Request, Form], Response]) -> Callable[[Request], Awaitable[Response]]:
    """Make a POST handler that answers with a page or a part of one; it runs in a thread."""

    @wraps(handle)
    async def read(request: Request) -> Response:
        data = await form_of(request, max_files=1, max_fields=MAX_FIELDS)
        try:
            return await run_in_threadpool(handle, request, Form(data))
        finally:
            await data.close()

    return read


def now_of(request: Request) -> datetime:
    """The time of the queue."""
    return from_ms(inspector_of(request).queue.link.now_ms())


def paths(request: Request) -> dict[str, Any]:
    """How the addresses of single things begin; an id follows, quoted.

    For lists: finding a route by its name for each link of a page takes longer than all the rest.
    """
    root = root_of(request.scope)
    return {
        "schedule_path": f"{root}/schedules/",
        "user_path": f"{root}/users/",
        "run_path": f"{root}/runs/",
    }


def segment(text: str) -> str:
    """An id as the end of an address. Slashes too: browsers would resolve `a/../b`."""
    return quote(text, safe=":@!$'()*+,;=~", errors="replace")


def query_value(text: str) -> str:
    """An id as a value in a query string."""
    return quote(text, safe="", errors="replace")


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON for people to read."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)


def command(*words: object, ids: Sequence[object] = ()) -> str:
    """The command line that does the same; `cli_hint` adds the queue, where it has another name.

    `ids` are what somebody else has named. They stand at the end, where one that looks like an
    option is none: whoever copies the line must not run something else.
    """
    named = [str(each) for each in ids]
    stop = ["--"] if any(each.startswith("-") for each in named) else []
    return "fairqueue " + shlex.join([*map(str, words), *stop, *named])


def options(**given: object) -> list[str]:
    """The options of a command line, such as `--note why`; those without a value are left out."""
    found: list[str] = []
    for name, value in given.items():
        if value not in (None, ""):
            flag, text = f"--{name.replace('_', '-')}", str(value)
            # A value that looks like an option is none if it hangs on its own.
            found += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return found


# --- rules ----------------------------------------------------------------------------------------


def rule_text(schedule: ScheduledTask) -> str:
    """When it fires, as short as can be: its expression, its interval or its moment."""
    if schedule.every is not None:
        return f"every {seconds_text(schedule.every.total_seconds())}"
    if schedule.at is not None:
        return f"at {local_text(schedule.at, schedule.timezone).replace('T', ' ')}"
    return schedule.cron_expr


def brief(view: ScheduleView) -> str:
    """Its sentence without what stands beside it in a list: the zone, and where it counts from."""
    sentence = view.sentence.removesuffix(f" ({view.schedule.timezone})")
    return sentence.partition(", counted from ")[0]


# --- times ----------------------------------------------------------------------------------------


def read_local(text: str | None, timezone: str, what: str) -> datetime | None:
    """A moment as an input of type datetime-local sends it, on the wall clock of a zone.

    Of a time that comes twice, the first is meant; of one that is skipped, the end of the gap.
    Raises InvalidInput, UnknownTimezone.
    """
    if not text:
        return None
    try:
        wall = datetime.fromisoformat(text)
        if wall.tzinfo is not None:
            return wall.astimezone(UTC)
        seconds = find_zone(timezone).first_reach(int((wall - _EPOCH).total_seconds()))
        return from_ms(seconds * 1000)
    except (ValueError, OverflowError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{what} {text!r:.60} is no time: such as 2026-03-05T09:00") from None


def local_text(at: datetime | None, timezone: str) -> str:
    """A moment as an input of type datetime-local takes it."""
    if at is None:
        return ""
    shown = at.astimezone(_tzinfo(timezone))
    return shown.strftime("%Y-%m-%dT%H:%M:%S" if shown.second else "%Y-%m-%dT%H:%M")


def wall(at: datetime, timezone: str) -> str:
    """A moment on the wall clock of a zone, with its offset: clock changes show."""
    shown = at.astimezone(_tzinfo(timezone))
    precision = "seconds" if shown.second else "minutes"
    return f"{shown:%a} {shown.isoformat(sep=' ', timespec=precision)}"


def utc_text(at: datetime) -> str:
    """The same in UTC."""
    shown = at.astimezone(UTC)
    return f"{shown:%Y-%m-%d %H:%M:%S}" if shown.second else f"{shown:%Y-%m-%d %H:%M}"


def _tzinfo(timezone: str) -> tzinfo:
    """A zone; UTC for one that is not known any more, whose schedule says so itself."""
    try:
        return find_zone(timezone).tzinfo
    except UnknownTimezone:
        return UTC


def read_seconds(text: str, what: str) -> float:
    """Seconds of a text such as `90`, `1.5h` or `1h 30m`. Raises InvalidInput."""
    # A longer one is none: to search it would take long.
    compact = text.replace(" ", "") if len(text) <= LONGEST_DURATION else ""
    try:
        return float(compact)
    except ValueError:
        parts = _PART.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise InvalidInput(
            f"{what} {text!r:.60} is no duration: such as 90 (seconds), 15m or 1h30m"
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def seconds_text(seconds: float | None) -> str:
    """Seconds as `read_seconds` takes them, in the largest units that say them exactly."""
    if seconds is None:
        return ""
    whole, found = int(seconds), ""
    if whole != seconds or not whole:
        return f"{seconds:g}s"
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        many, whole = divmod(whole, size)
        found += f"{many}{unit}" if many else ""
    return found
