"""Workers and health: who works, who leads, how Redis fares, and what holds work back."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.doctor import FULL_SHARE, FULLER_SHARE, SKEW_S, SLOW_S
from fairqueue.errors import InvalidInput
from fairqueue.inspection.views import RedisInfo
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.filters import duration, number, share, size
from fairqueue.web.dashboard.pages.helpers import command, paths, segment
from fairqueue.web.dashboard.pages.run_helpers import refused, short
from fairqueue.web.dashboard.shell import Done, Form, action, page

CURRENT = 5  # runs of a worker that are named; the others are counted
NAMES = 8  # of its handlers


# --- how Redis fares ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One thing about Redis: its value, whether it is good, and what to do if not.

    level: ok, warning or error. part: of what there is, from 0 to 1, where that can be said.
    """

    name: str
    value: str
    level: str = "ok"
    advice: str = ""
    part: float | None = None


def judge(info: RedisInfo) -> list[Judgement]:
    """What is to be said about the server, in the order of a page."""
    return [
        Judgement(name="Server", value=f"{info.server} {info.version}, up {duration(info.uptime)}"),
        _memory(info),
        _policy(info),
        _persistence(info),
        _last_save(info),
        Judgement(
            name="Replicas",
            value=number(info.replicas),
            advice="" if info.replicas else "None: if this server is lost, so is what it holds.",
        ),
        Judgement(name="Clients", value=f"{number(info.clients)} connected"),
        _round_trip(info),
        _clock(info),
    ]


def _memory(info: RedisInfo) -> Judgement:
    if not info.max_memory:
        text = f"{size(info.used_memory)} used, without a maxmemory"
        advice = "With a maxmemory, a full server refuses new tasks before the machine is out."
        return Judgement(name="Memory", value=text, advice=advice)
    part = info.used_memory / info.max_memory
    text = f"{size(info.used_memory)} of {size(info.max_memory)}, {share(part)}"
    level = "ok" if part < FULL_SHARE else "warning" if part < FULLER_SHARE else "error"
    advice = "Soon it refuses new tasks: raise maxmemory, or keep fewer ended runs (Settings)."
    return Judgement(
        name="Memory", value=text, level=level, part=part, advice=advice if level != "ok" else ""
    )


def _policy(info: RedisInfo) -> Judgement:
    if info.policy.startswith("allkeys"):
        advice = "A full server throws tasks and schedules away: set maxmemory-policy noeviction."
        return Judgement(name="Eviction", value=info.policy, level="error", advice=advice)
    return Judgement(name="Eviction", value=info.policy)


def _persistence(info: RedisInfo) -> Judgement:
    if not info.appendonly:
        advice = "A crash loses what came since the last snapshot: set appendonly yes."
        return Judgement(name="Persistence", value="appendonly no", level="warning", advice=advice)
    text = "appendonly yes"
    if info.appendfsync != "?":
        text += f", appendfsync {info.appendfsync}"
    if info.appendfsync == "no":
        advice = "A crash of the machine may lose half a minute: set appendfsync everysec."
        return Judgement(name="Persistence", value=text, level="warning", advice=advice)
    return Judgement(name="Persistence", value=text)


def _last_save(info: RedisInfo) -> Judgement:
    if info.last_save_ok:
        return Judgement(name="Last save", value="succeeded")
    advice = "Its disk may be full or not writable: the log of the server says why."
    return Judgement(name="Last save", value="failed", level="error", advice=advice)


def _round_trip(info: RedisInfo) -> Judgement:
    slow = info.round_trip > SLOW_S
    advice = "Everything waits for it: look at the network, and at SLOWLOG GET on the server."
    return Judgement(
        name="Round trip",
        value=f"{info.round_trip * 1000:.2f} ms",
        level="warning" if slow else "ok",
        advice=advice if slow else "",
    )


def _clock(info: RedisInfo) -> Judgement:
    off = abs(info.clock_skew) > SKEW_S
    advice = "The queue goes by the clock of Redis: let NTP set the clocks of both machines."
    return Judgement(
        name="Clock",
        value=f"this machine is {info.clock_skew:+.3f} s off",
        level="warning" if off else "ok",
        advice=advice if off else "",
    )


# --- the page -------------------------------------------------------------------------------------


def workers(request: Request) -> Response:
    """The page. Raises Forbidden for somebody of one tenant: all of this is shared."""
    inspector = inspector_of(request)
    found = inspector.workers.list()
    snapshot = inspector.system.snapshot()
    return page(
        request,
        "workers.html",
        workers=found,
        slots=sum(worker.slots for worker in found),
        running=sum(worker.running for worker in found),
        leader=inspector.system.leader(),
        snapshot=snapshot,
        judgements=judge(inspector.system.redis()),
        limits=inspector.system.limits(),
        problems=inspector.schedules.problems(),
        most_current=CURRENT,
        most_names=NAMES,
        short=short,
        segment=segment,
        command=command,
        **paths(request),
    )


@action
def drain(request: Request, form: Form) -> Done:
    """Have a worker end when it has finished what it runs."""
    inspector_of(request).workers.drain(form.raw("id"))
    return Done(text="It takes no more tasks, and ends when those that it runs are done.")


@action
def set_limits(request: Request, form: Form) -> Done:
    """Limit all tasks of a name; what is left empty is not limited."""
    name = form.raw("name").strip()
    try:
        limits = {
            "slots": form.integer("slots"),
            "rate": form.decimal("rate"),
            "timeout": form.decimal("timeout"),
        }
        inspector_of(request).system.set_limits(name, **limits)
    except InvalidInput as error:
        return refused(error)
    if not any(limits.values()):
        return Done(text=f"Nothing limits {name} any more, until a worker that starts says so.")
    return Done(text=f"The limits of {name} hold from now on.")


ROUTES: list[BaseRoute] = [
    Route("/workers", workers, name="workers"),
    Route("/do/workers/drain", drain, methods=["POST"], name="worker_drain"),
    Route("/do/limits", set_limits, methods=["POST"], name="limits_set"),
]
