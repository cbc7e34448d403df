"""What the pages about users and tenants share: time windows, hints, charts of shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from starlette.requests import Request
from starlette.responses import Response

from fairqueue.stats.users import ShareSeries, TenantInfo, UserInfo
from fairqueue.web.dashboard.charts import Line, chart_document
from fairqueue.web.dashboard.formatting import duration

# The minutes and the label of each window.
WINDOWS = {"15m": (15, "15 min"), "1h": (60, "1 hour"), "24h": (1440, "24 hours")}
DEFAULT = "1h"

# A user gets a hint if it received less or more than these multiples of its entitlement, and the
# difference is at least this part of all service. Receiving more takes nothing from others.
UNDER, MIN_LACK = 0.75, 0.01
OVER, MIN_EXCESS = 1.5, 0.1
NEAR = 0.5  # of a limit: a user below it is held back by something else
LATE = 0.25  # of the window: a user that waits for less came late
TONES = 8  # colours of a chart
SCALES = (0.05, 0.1, 0.25, 0.5, 1.0)  # shares that a full bar can represent
EVEN, ROUGH = 0.95, 0.8  # lowest Jain index of "even" and "roughly even"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """Why a user received much less ("under", "limited") or more ("over") than its fair share.

    limited: by its own settings or by limits of task names, which is intended.
    """

    kind: str
    label: str
    reason: str


def window_of(request: Request) -> str:
    """The window in the query."""
    found = request.query_params.get("window", DEFAULT)
    return found if found in WINDOWS else DEFAULT


def windows() -> list[tuple[str, str]]:
    """The windows to choose from."""
    return [(name, label) for name, (_, label) in WINDOWS.items()]


def hint(info: UserInfo | TenantInfo, minutes: int) -> Hint | None:
    """The hint about the share of a user or a tenant, if any."""
    gap = info.entitled - info.received
    if info.backlog and info.received < UNDER * info.entitled and gap >= MIN_LACK:
        limit = _limit_of(info, minutes)
        if limit is not None:
            return Hint(kind="limited", label="Limited", reason=limit)
        return Hint(kind="under", label="Under-served", reason=_why_under(info, minutes))
    if info.received > OVER * info.entitled and -gap >= MIN_EXCESS:
        return Hint(
            kind="over",
            label="Above its share",
            reason="others did not use their share, or its CRITICAL tasks went first",
        )
    return None


def _limit_of(info: UserInfo | TenantInfo, minutes: int) -> str | None:
    """The setting that limits a user, even if not right now; None if there is none.

    A limit that the user uses to less than half does not count.
    """
    settings = info.settings
    if settings.paused:
        return "it is paused"
    if info.state == "paused":
        return "its tenant is paused"
    most = settings.max_running
    if most is not None and (info.state == "capped" or info.running >= NEAR * most):
        return f"at most {most} of its tasks may run at the same time (max_running)"
    rate = settings.rate
    if rate is not None and (
        info.state == "rate limited" or info.ended >= NEAR * rate * minutes * 60
    ):
        return f"its rate is limited to {rate:g} tasks per second"
    if info.state in ("capped", "rate limited"):
        return "its tenant has reached a limit"
    if info.held == info.backlog:
        return "its tasks are held back by the limits of their names or keys"
    return None


def _why_under(info: UserInfo | TenantInfo, minutes: int) -> str:
    if info.oldest_wait is not None and info.oldest_wait < LATE * minutes * 60:
        return f"its tasks came late: the oldest has waited {duration(info.oldest_wait)}"
    return "CRITICAL tasks of others went first, or there are too few workers"


def evenness(jain: float | None) -> tuple[str, str]:
    """A Jain index in words, and its tone."""
    if jain is None:
        return "nothing to compare", "idle"
    if jain >= EVEN:
        return "even", "ok"
    return ("roughly even", "warn") if jain >= ROUGH else ("uneven", "bad")


def scale_of(infos: Sequence[UserInfo | TenantInfo]) -> float:
    """The share that a full bar represents, the same for all on a page."""
    most = max((max(info.received, info.entitled) for info in infos), default=0.0)
    return next((scale for scale in SCALES if most <= scale), 1.0)


# --- charts ---------------------------------------------------------------------------------------


def kind_of(request: Request) -> str:
    """What a chart shows, as in the query: "share" or "runs"."""
    return "runs" if request.query_params.get("as") == "runs" else "share"


def share_document(series: ShareSeries, tenant: str | None, kind: str) -> Response:
    """The chart of those who share the queue or, with a tenant, of the users of the tenant."""
    shown = [str(owner) if tenant is None else owner.user_id for owner in series.users]
    names = [*shown, *(["others"] if any(series.others) else [])]
    tones = [*tones_of(shown), "idle"]
    values = [*(series.counts[owner] for owner in series.users), series.others]
    lines = list(zip(names, tones, values, strict=False))
    if kind == "runs":
        return chart_document(series.times, lines)
    return chart_document(series.times, _in_percent(series, lines), "%")


def tones_of(names: Sequence[str]) -> list[str]:
    """A colour for each name that depends on the name, so that it stays the same.

    If several names lead to one colour, the first by name gets it, and the others a free one.
    """
    wanted = {name: crc32(name.encode("utf-8", "replace")) % TONES for name in names}
    taken: dict[int, str] = {}
    for name in sorted(names):
        taken.setdefault(wanted[name], name)
    found = {name: tone for tone, name in taken.items()}
    free = [tone for tone in range(TONES) if tone not in taken]
    for name in sorted(wanted.keys() - found.keys()):
        found[name] = free.pop(wanted[name] % len(free)) if free else wanted[name]
    return [str(found[name] + 1) for name in names]


def _in_percent(series: ShareSeries, lines: Sequence[Line]) -> list[Line]:
    """Counts as percentages of all runs that ended in the same interval."""
    totals = [
        sum(series.counts[owner][i] for owner in series.users) + others
        for i, others in enumerate(series.others)
    ]
    return [
        (
            label,
            tone,
            [
                None if not total else 100 * (count or 0) / total
                for count, total in zip(values, totals, strict=True)
            ],
        )
        for label, tone, values in lines
    ]
