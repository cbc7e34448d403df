"""What the pages about users share: windows of time, hints about shares, command lines."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from fairqueue.stats.users import UserInfo
from fairqueue.web.dashboard.filters import duration

# Of each window its minutes and its name.
WINDOWS = {"15m": (15, "15 min"), "1h": (60, "1 hour"), "24h": (1440, "24 hours")}
USUAL = "1h"

# Beyond these parts of what a user is entitled to it gets a hint, if the difference is such a part
# of all service. More than one's share takes nothing from others: it is told where it is a lot.
UNDER, LEAST_LACK = 0.75, 0.01
OVER, LEAST_EXCESS = 1.5, 0.1
NEAR = 0.5  # of a limit: who takes less than this is held back by something else
LATE = 0.25  # of the window: who waits for less had little to wait for in most of it
SCALES = (0.05, 0.1, 0.25, 0.5, 1.0)  # shares that a full bar may stand for
EVEN, ROUGH = 0.95, 0.8  # Jain indexes from which users are served evenly, and roughly so


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """Why a user got much less ("under", "limited") or more ("over") than it is entitled to.

    limited: by its own settings or by the limits of names, which is as somebody wants it.
    """

    kind: str
    label: str
    reason: str


def window_of(request: Request) -> str:
    """The window that the address asks for."""
    found = request.query_params.get("window", USUAL)
    return found if found in WINDOWS else USUAL


def windows() -> list[tuple[str, str]]:
    """The windows to choose from."""
    return [(name, label) for name, (_, label) in WINDOWS.items()]


def hint(info: UserInfo, minutes: int) -> Hint | None:
    """What is worth saying about a user's share, if anything."""
    gap = info.entitled - info.received
    if info.backlog and info.received < UNDER * info.entitled and gap >= LEAST_LACK:
        limit = _limit_of(info, minutes)
        if limit is not None:
            return Hint(kind="limited", label="Limited", reason=limit)
        return Hint(kind="under", label="Under-served", reason=_why_under(info, minutes))
    if info.received > OVER * info.entitled and -gap >= LEAST_EXCESS:
        return Hint(
            kind="over",
            label="Above its share",
            reason="others left theirs unused, or its CRITICAL tasks went first",
        )
    return None


def _limit_of(info: UserInfo, minutes: int) -> str | None:
    """What somebody has set that holds a user back, also if it does not do so at this moment.

    A limit of which the user takes less than half is not what holds it back.
    """
    settings = info.settings
    if settings.paused:
        return "it is paused"
    most = settings.max_running
    if most is not None and (info.state == "capped" or info.running >= NEAR * most):
        return f"at most {most} of its tasks run at a time (max_running)"
    rate = settings.rate
    if rate is not None and (
        info.state == "rate limited" or info.ended >= NEAR * rate * minutes * 60
    ):
        return f"its rate is {rate:g} tasks a second"
    if info.held == info.backlog:
        return "its tasks wait for room in the limits of their names"
    return None


def _why_under(info: UserInfo, minutes: int) -> str:
    if info.oldest_wait is not None and info.oldest_wait < LATE * minutes * 60:
        return f"its tasks came late: the oldest waits {duration(info.oldest_wait)}"
    return "CRITICAL tasks of others went first, or there were too few workers"


def evenness(jain: float | None) -> tuple[str, str]:
    """A Jain index in words, and the tone of it."""
    if jain is None:
        return "nothing to compare", "idle"
    if jain >= EVEN:
        return "even", "ok"
    return ("roughly even", "warn") if jain >= ROUGH else ("uneven", "bad")


def scale_of(infos: Sequence[UserInfo]) -> float:
    """The share that a full bar stands for: the same for all that are shown together."""
    most = max((max(info.received, info.entitled) for info in infos), default=0.0)
    return next((scale for scale in SCALES if most <= scale), 1.0)
