"""Draw the pictures of docs/fairness.md from real runs: `python -m scripts.fairness_pictures`.

Each picture has the same tasks twice: without an option of flow control, and with it. Time is
passed in and chance has a seed, so that the pictures change only if the queue does.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.adversarial import SCENES, FlatTrial, Trial
from benchmarks.quotes import quotes_of, steady
from fairqueue import Task, TaskQueue
from fairqueue.clock import ManualClock
from fairqueue.models import Claim
from fairqueue.runtime.embedded import EmbeddedServer

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
# Colours that colour-blind people can tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"
COLORS = (BLUE, ORANGE, GREEN, RED)
STYLES = ("-", "--", ":", "-.")  # so that lines are seen that lie on each other
WINDOW = 60  # claims over which a share is measured
RARE_SERVES = 120

Served = list[tuple[str, float]]  # who was served, and how much
Picture = Callable[[str, Figure], None]
PICTURES: dict[str, Picture] = {}


def picture(name: str) -> Callable[[Picture], Picture]:
    """Register a picture under the name of its file."""

    def add(function: Picture) -> Picture:
        PICTURES[name] = function
        return function

    return add


# --- recording and drawing ------------------------------------------------------------------------


def recorded(kind: type[Trial]) -> type[Trial]:
    """A trial that also notes who was served, in order, as `history`."""

    class Recorded(kind):  # type: ignore[valid-type, misc]
        def __init__(self, url: str, size: float) -> None:
            super().__init__(url, size)
            self.history: Served = []

        def served(self, claim: Claim, amount: float = 1.0, *, again: bool = False) -> None:
            tenant, user = self.owner(claim.task)
            self.history.append((tenant or user, amount))
            super().served(claim, amount, again=again)

    return Recorded


def play(url: str, name: str, size: float, kind: type[Trial]) -> Served:
    """Play a scene on an empty server; who was served."""
    empty(url)
    trial: Any = recorded(kind)(url, size)
    with trial.queue:
        SCENES[name](trial)
    history: Served = trial.history
    return history


def empty(url: str) -> None:
    """Delete everything on a server."""
    with redis.Redis.from_url(url) as client:
        client.flushall()


def panels(figure: Figure, titles: Sequence[str]) -> list[Axes]:
    """Panels beside each other, with a scale in common."""
    axes = list(figure.subplots(1, len(titles), sharex=True, sharey=True, squeeze=False)[0])
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, loc="left", fontsize=11)
        axis.grid(color="#e5e5e5", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return axes


def draw_service(axis: Axes, served: Served, members: dict[str, str]) -> None:
    """What members got so far. `members`: their labels."""
    for (member, label), color, style in zip(members.items(), COLORS, STYLES, strict=False):
        total, totals = 0.0, [0.0]
        for who, amount in served:
            total += amount if who == member else 0.0
            totals.append(total)
        axis.plot(totals, style, color=color, linewidth=2.4, label=label)


def finish(figure: Figure, across: str, up: str) -> None:
    """Label the axes; the legend is below the panels, where it hides nothing."""
    axes = figure.axes
    for axis in axes:
        axis.set_xlabel(across)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
    axes[0].set_ylabel(up)
    handles, _ = axes[0].get_legend_handles_labels()
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9
    )


# --- tenants --------------------------------------------------------------------------------------

TWO_LEVELS = ("Fair between users only", "Fair between tenants, then users")


def compare_levels(
    url: str, figure: Figure, scene: str, size: float, members: dict[str, str]
) -> None:
    """Play a scene without and with tenants."""
    axes = panels(figure, TWO_LEVELS)
    histories = [play(url, scene, size, kind) for kind in (FlatTrial, Trial)]
    same = min(map(len, histories))  # scenes last until something has happened
    for axis, history in zip(axes, histories, strict=True):
        draw_service(axis, history[:same], members)
    finish(figure, "tasks served, of all", "tasks served, of each")


@picture("fairness-crowd")
def crowd(url: str, figure: Figure) -> None:
    """Service of tenants with different numbers of users."""
    members = {
        "crowd": "a tenant with 100 users",
        "lone": "a tenant with one user",
        "bob": "a user without a tenant",
    }
    compare_levels(url, figure, "one tenant with 1,000 users, one with 1", 0.1, members)


@picture("fairness-newcomers")
def newcomers(url: str, figure: Figure) -> None:
    """Service while one tenant has a new user for each task."""
    members = {"flooded": "a tenant with a new user for each task", "other": "another tenant"}
    compare_levels(url, figure, "a flood of new users of one tenant", 0.1, members)


@picture("fairness-due-together")
def due_together(url: str, figure: Figure) -> None:
    """Service before and after many tasks of one tenant fall due at the same time."""
    members = {
        "flood": "2,000 delayed tasks of 5 users of one tenant",
        "acme": "a tenant with one user",
    }
    compare_levels(url, figure, "a flood of delayed tasks that fall due together", 0.34, members)


@picture("fairness-weights")
def weights(url: str, figure: Figure) -> None:
    """The share of three tenants of the latest claims, while the weight of one changes."""
    axes = panels(figure, ("Equal weights", "acme gets weight 3 after 300 tasks"))
    for axis, changes in zip(axes, (False, True), strict=True):
        empty(url)
        trial: Any = recorded(Trial)(url, 1.0)
        tenants = {"acme": "acme", "globex": "globex", "initech": "initech"}
        with trial.queue:
            for tenant in tenants:
                for user in ("ann", "bob"):
                    trial.push(tenant, user, 600)
            trial.serve(300)
            if changes:
                trial.set_tenant("acme", 3.0)
            trial.serve(300)
        for tenant, color, style in zip(tenants, COLORS, STYLES, strict=False):
            got = [who == tenant for who, _ in trial.history]
            shares = [sum(got[n - WINDOW : n]) / WINDOW for n in range(WINDOW, len(got) + 1)]
            moments = range(WINDOW, len(got) + 1)
            axis.plot(moments, shares, style, color=color, linewidth=2.2, label=tenant)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.set_ylim(top=0.8)
    finish(figure, "tasks served, of all", f"share of the last {WINDOW} tasks")


@picture("fairness-cost")
def cost(url: str, figure: Figure) -> None:
    """Service in units, where the tasks of one tenant are larger."""
    sizes = {"ann": 8.0, "bob": 1.0}
    axes = panels(figure, ("Each task counts 1", "Each task counts what it costs"))
    for axis, is_declared in zip(axes, (False, True), strict=True):
        empty(url)
        served: Served = []
        with TaskQueue.from_url(url, clock=ManualClock()) as queue:
            for tenant, user in (("acme", "ann"), ("globex", "bob")):
                declared = sizes[user] if is_declared else None
                queue.push_many(
                    Task.create(user_id=user, tenant=tenant, cost=declared) for _ in range(450)
                )
            for _ in range(360):
                (claim,) = queue.claim("w")
                served.append((claim.task.tenant or "", sizes[claim.task.user_id]))
                queue.finish(claim)
        draw_service(
            axis, served, {"acme": "acme: tasks of 8 units", "globex": "globex: tasks of 1 unit"}
        )
    finish(figure, "tasks served, of all", "units served, of each")


# --- pools ----------------------------------------------------------------------------------------


@picture("fairness-pools")
def pools(url: str, figure: Figure) -> None:
    """Rare workers: ann's tasks have waited for them while others were served; then come bob's."""
    axes = panels(figure, ("Kinds of tasks told apart by name", "Kinds of tasks in pools"))
    for axis, is_pool in zip(axes, (False, True), strict=True):
        empty(url)
        with TaskQueue.from_url(url, clock=ManualClock()) as queue:
            served = serve_rare(queue, is_pool=is_pool)
        labels = {"ann": "ann, whose tasks came first", "bob": "bob, whose tasks came later"}
        draw_service(axis, served, labels)
    finish(figure, "GPU tasks served, of both", "GPU tasks served, of each")


def serve_rare(queue: TaskQueue, *, is_pool: bool) -> Served:
    """Who is served by the rare workers."""

    def push(user: str, kind: str) -> None:
        pool, name = (kind, "task") if is_pool else ("default", kind)
        tasks = [Task.create(user_id=user, pool=pool, name=name) for _ in range(2 * RARE_SERVES)]
        queue.push_many(tasks)

    def serve(kind: str) -> str:
        pools, names = ([kind], None) if is_pool else (["default"], [kind])
        (claim,) = queue.claim("w", pools=pools, names=names)
        queue.finish(claim)
        return claim.task.user_id

    push("ann", "gpu")
    for n in range(5):
        push(f"user-{n}", "cpu")
    for _ in range(5 * RARE_SERVES):
        serve("cpu")
    push("bob", "gpu")
    return [(serve("gpu"), 1.0) for _ in range(RARE_SERVES)]


# --- keys -----------------------------------------------------------------------------------------

RUN_S = 3  # seconds that a task of the picture of keys takes
Bar = tuple[int, int, str]  # lane, second at which it begins, user


@picture("fairness-keys")
def keys(url: str, figure: Figure) -> None:
    """When the tasks of an account run, on four workers."""
    axes = panels(figure, ("No limit", 'set_limit("account:*", slots=1)'))
    for axis, is_limited in zip(axes, (False, True), strict=True):
        empty(url)
        for lane, began, user in run_on_four(url, is_limited=is_limited):
            color = ORANGE if user == "ann" else BLUE
            axis.barh(lane, RUN_S * 0.94, left=began, color=color, height=0.72)
        axis.set_xlabel("seconds")
        axis.set_yticks(range(4), [f"worker {n + 1}" for n in range(4)])
        axis.grid(visible=False, axis="y")
    axes[0].invert_yaxis()
    axes[0].barh(-5, 0, color=ORANGE, label="tasks with the key account:42")
    axes[0].barh(-5, 0, color=BLUE, label="tasks without a key")
    axes[0].set_ylim(3.6, -0.6)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)


def run_on_four(url: str, *, is_limited: bool) -> list[Bar]:
    """Run eight tasks of an account and others; which worker ran whose task when."""
    clock, bars = ManualClock(), []
    with TaskQueue.from_url(url, clock=clock) as queue:
        if is_limited:
            queue.set_limit("account:*", slots=1)
        queue.push_many(Task.create(user_id="ann", limit_keys=["account:42"]) for _ in range(8))
        queue.push_many(Task.create(user_id="bob") for _ in range(12))
        busy: dict[int, tuple[int, Claim]] = {}
        for second in range(8 * RUN_S):
            for lane in [lane for lane, (ends, _) in busy.items() if ends == second]:
                queue.finish(busy.pop(lane)[1])
            for lane in range(4):
                if lane not in busy and (claims := queue.claim(f"w{lane}", lease=600.0)):
                    busy[lane] = second + RUN_S, claims[0]
                    bars.append((lane, second, claims[0].task.user_id))
            clock.advance(1)
    return bars


# --- unique keys ----------------------------------------------------------------------------------

PUSHES = (0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 40, 41, 43, 45, 47)  # seconds
REACTIONS: dict[str, dict[str, Any]] = {
    "plain pushes": {},
    'unique="report"': {"unique": "report"},
    "debounce=5, max_wait=6": {"unique": "report", "debounce": 5.0, "max_wait": 6.0},
    "unique_for=10 (throttle)": {"unique": "report", "unique_for": 10.0},
}
REPORT_S = 3  # seconds that a report takes


@picture("fairness-unique")
def unique(url: str, figure: Figure) -> None:
    """When reports run that were pushed many times, each in three seconds by one worker."""
    (axis,) = panels(figure, ("When the report runs",))
    rows = len(REACTIONS)
    for row, (name, options) in enumerate(REACTIONS.items(), start=1):
        empty(url)
        began = run_reports(url, options)
        color = COLORS[row % 4] if name != "plain pushes" else GREY
        for second in began:
            axis.barh(row, REPORT_S * 0.9, left=second, color=color, height=0.6)
        axis.text(71, row, f"{len(began)} runs", va="center", fontsize=9)
    axis.plot(PUSHES, [0] * len(PUSHES), "v", color=RED, markersize=7)
    axis.text(71, 0, f"{len(PUSHES)} pushes", va="center", fontsize=9)
    axis.set_yticks(range(rows + 1), ["a push", *REACTIONS])
    axis.set_ylim(rows + 0.6, -0.6)
    axis.set_xlim(-1, 70)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("seconds")


def run_reports(url: str, options: dict[str, Any]) -> list[int]:
    """The seconds at which one worker begins to make a report."""
    clock, began = ManualClock(), []
    running: tuple[int, Claim] | None = None
    with TaskQueue.from_url(url, clock=clock) as queue:
        for second in range(70):
            if running is not None and running[0] == second:
                queue.finish(running[1])
                running = None
            if second in PUSHES:
                queue.push(Task.create(user_id="ann", payload={"at": second}, **options))
            if running is None and (claims := queue.claim("w", lease=600.0)):
                running = second + REPORT_S, claims[0]
                began.append(second)
            clock.advance(1)
    return began


# --- quotes ---------------------------------------------------------------------------------------


@picture("fairness-quotes")
def quotes(url: str, figure: Figure) -> None:
    """Estimates of waits, and the truth."""
    empty(url)
    asked = quotes_of(url, steady, 1800)
    (axis,) = panels(figure, ("Estimated and true waits, steady load",))
    points = [(each.about, each.truth) for each in asked if each.about is not None]
    most = max(truth or 0.0 for _, truth in points)
    axis.plot([0, most], [0, most], color=GREY, linewidth=1.2, label="exactly right")
    axis.plot(*zip(*points, strict=True), ".", color=BLUE, alpha=0.6, label="a quote")
    axis.set_xlabel("estimate, seconds")
    axis.set_ylabel("truth, seconds")
    axis.legend(frameon=False, fontsize=9)


def main() -> None:
    """Draw all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", nargs="*", help=f"of {', '.join(PICTURES)}; default: all")
    options = parser.parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    with EmbeddedServer.start() as server:
        for name in options.picture or PICTURES:
            figure = Figure(figsize=(9.6, 3.4), dpi=110, layout="constrained")
            PICTURES[name](server.url, figure)
            figure.savefig(IMAGES / f"{name}.png")
            print(f"docs/images/{name}.png")


if __name__ == "__main__":
    main()
