"""Workers and health: live workers, pools, the leading scheduler, Redis, and limits."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.doctor import FULL_SHARE, FULLER_SHARE, SKEW_S, SLOW_S
from fairqueue.errors import InvalidInput
from fairqueue.inspection.views import RedisInfo
from fairqueue.models import QueueSnapshot
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.formatting import duration, number, share, size
from fairqueue.web.dashboard.forms import Done, Form, action
from fairqueue.web.dashboard.pages.run_helpers import refused
from fairqueue.web.dashboard.shell import page

CURRENT = 5  # runs of a worker that are named; the others are counted
NAMES = 8  # handlers of a worker that are named


# --- Redis ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisCheck:
    """A property of Redis, its value, and what to do about it.

    level: ok, warning or error. part: the used part of a limit, from 0 to 1.
    """

    name: str
    value: str
    level: str = "ok"
    advice: str = ""
    part: float | None = None


def check_redis(info: RedisInfo) -> list[RedisCheck]:
    """The properties of the server, in the order of the page."""
    return [
        RedisCheck(
            name="Server", value=f"{info.server} {info.version}, up {duration(info.uptime)}"
        ),
        _memory(info),
        _check(
            "Eviction",
            info.policy,
            "error" if info.policy.startswith("allkeys") else "ok",
            "A full server deletes tasks and schedules: set maxmemory-policy noeviction.",
        ),
        _persistence(info),
        _check(
            "Last save",
            "succeeded" if info.last_save_ok else "failed",
            "ok" if info.last_save_ok else "error",
            "Its disk may be full or not writable: see the log of the server.",
        ),
        RedisCheck(
            name="Replicas",
            value=number(info.replicas),
            advice="" if info.replicas else "None: if this server is lost, its data is lost.",
        ),
        RedisCheck(name="Clients", value=f"{number(info.clients)} connected"),
        _check(
            "Round trip",
            f"{info.round_trip * 1000:.2f} ms",
            "warning" if info.round_trip > SLOW_S else "ok",
            "Every call is slow: check the network, and SLOWLOG GET on the server.",
        ),
        _check(
            "Clock",
            f"this machine is {info.clock_skew:+.3f} s off",
            "warning" if abs(info.clock_skew) > SKEW_S else "ok",
            "The queue uses the clock of Redis: synchronize the clocks of both machines with NTP.",
        ),
    ]


def _check(name: str, value: str, level: str, advice: str, part: float | None = None) -> RedisCheck:
    """A check whose advice is only shown if it is not ok."""
    advice = "" if level == "ok" else advice
    return RedisCheck(name=name, value=value, level=level, advice=advice, part=part)


def _memory(info: RedisInfo) -> RedisCheck:
    if not info.max_memory:
        advice = (
            "Set maxmemory so that Redis rejects new tasks before the machine runs out of memory."
        )
        text = f"{size(info.used_memory)} used, no maxmemory"
        return RedisCheck(name="Memory", value=text, advice=advice)
    part = info.used_memory / info.max_memory
    text = f"{size(info.used_memory)} of {size(info.max_memory)}, {share(part)}"
    level = "ok" if part < FULL_SHARE else "warning" if part < FULLER_SHARE else "error"
    advice = "It will soon refuse new tasks: raise maxmemory, or keep fewer ended runs (Settings)."
    return _check("Memory", text, level, advice, part)


def _persistence(info: RedisInfo) -> RedisCheck:
    if not info.appendonly:
        advice = "A crash loses all data since the last snapshot: set appendonly yes."
        return _check("Persistence", "appendonly no", "warning", advice)
    text = "appendonly yes"
    if info.appendfsync != "?":
        text += f", appendfsync {info.appendfsync}"
    level = "warning" if info.appendfsync == "no" else "ok"
    advice = "A crash of the machine may lose half a minute of data: set appendfsync everysec."
    return _check("Persistence", text, level, advice)


def partitions_by_leader(snapshot: QueueSnapshot) -> dict[str | None, list[int]]:
    """The partitions that each scheduler leads, those without a leader last.

    Partitions that do not answer are left out. Empty if the queue has no partitions, or no leader.
    """
    if not snapshot.parts or not any(snapshot.leaders.values()):
        return {}
    found: dict[str | None, list[int]] = {}
    for partition, leader in sorted(snapshot.leaders.items()):
        found.setdefault(leader, []).append(partition)
    return dict(sorted(found.items(), key=lambda each: (each[0] is None, each[0] or "")))


# --- the page -------------------------------------------------------------------------------------


def workers(request: Request) -> Response:
    """The page. Raises Forbidden for an actor of one tenant."""
    inspector = inspector_of(request)
    found, snapshot = inspector.workers.list(), inspector.system.snapshot()
    return page(
        request,
        "workers.html",
        workers=found,
        slots=sum(worker.slots for worker in found),
        running=sum(worker.running for worker in found),
        leader=inspector.system.leader(),
        snapshot=snapshot,
        leaders=partitions_by_leader(snapshot),
        checks=check_redis(inspector.system.redis()),
        pools=inspector.system.pools(),
        limits=inspector.system.limits(),
        key_limits=inspector.system.key_limits(),
        problems=inspector.schedules.problems(),
        max_current=CURRENT,
        max_names=NAMES,
    )


@action
def drain(request: Request, form: Form) -> Done:
    """Let a worker finish its tasks and exit."""
    inspector_of(request).workers.drain(form.raw("id"))
    return Done(text="The worker takes no more tasks, and exits when its tasks are done.")


@action
def set_limits(request: Request, form: Form) -> Done:
    """Set the limits of a task name; an empty field removes the limit."""
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
        return Done(text=f"{name} is no longer limited, unless a worker that starts limits it.")
    return Done(text=f"The limits of {name} apply from now on.")


@action
def set_key_limits(request: Request, form: Form) -> Done:
    """Set the limits of a key or a pattern."""
    key, order = form.raw("key").strip(), form.raw("order")
    try:
        inspector_of(request).system.set_limit(
            key,
            slots=form.integer("slots"),
            rate=form.decimal("rate"),
            ordered=order != "",
            through_retries=order == "retries",
            scope=form.raw("scope"),
        )
    except InvalidInput as error:
        return refused(error)
    return Done(text=f"The limits of {key} apply from now on.")


@action
def remove_key_limits(request: Request, form: Form) -> Done:
    """Remove the limits of a key or a pattern."""
    key = form.raw("key")
    if inspector_of(request).system.remove_limit(key):
        return Done(text=f"The limits of {key} are removed.")
    return Done(text=f"{key} has no limits.", level="warning")


ROUTES: list[BaseRoute] = [
    Route("/workers", workers, name="workers"),
    Route("/do/workers/drain", drain, methods=["POST"], name="worker_drain"),
    Route("/do/limits", set_limits, methods=["POST"], name="limits_set"),
    Route("/do/limits/keys", set_key_limits, methods=["POST"], name="key_limits_set"),
    Route("/do/limits/keys/remove", remove_key_limits, methods=["POST"], name="key_limits_remove"),
]
